"""Pictures of image models: which classes are confused, orders of patches, a mask, predictions."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from src import plots

MOST = 30  # classes with names on the axes


def confusion(classes: Sequence[str], counts: Tensor, path: Path, title: str) -> None:
    """Draw a matrix of the share of each class, (row), that is predicted as each, (column). Raises OSError."""
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    few = len(classes) <= MOST
    figure, axes = plots.subplots(
        title=title, width=max(5.5, 0.35 * len(classes) * few), height=max(5.0, 0.32 * len(classes) * few)
    )
    axis = axes[0, 0]
    axis.grid(False)
    image = axis.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(image, ax=axis, shrink=0.8)
    axis.set(xlabel="predicted", ylabel="class")
    if few:
        axis.set_xticks(range(len(classes)), classes, rotation=90 if max(map(len, classes)) > 3 else 0)
        axis.set_yticks(range(len(classes)), classes)
        for row in range(len(classes)):
            for column in range(len(classes)):
                if counts[row, column]:
                    shade = "white" if shares[row, column] > 0.5 else "black"
                    axis.text(column, row, int(counts[row, column]), ha="center", va="center", fontsize=7, color=shade)
    plots.save(figure, path)


@torch.no_grad()
def orders(height: int, width: int, path: Path) -> None:
    """Draw the two orders in which LION♮ reads patches. Raises OSError."""
    from src.lion.patch_orders import snakes

    figure, axes = plots.subplots(columns=2, title=f"Two orders of {height} × {width} patches", width=4, height=4)
    for axis, order, name in zip(axes[0], snakes(height, width, 0, "cpu"), ("rows", "columns")):
        rows, columns = order // width, order % width
        axis.grid(False)
        axis.plot(columns, rows, color=plots.COLORS["lion-s"], linewidth=2, marker="o", markersize=4)
        for place, (row, column) in enumerate(zip(rows.tolist(), columns.tolist())):
            axis.annotate(str(place), (column, row), (3, 3), textcoords="offset points", fontsize=7)
        axis.set(title=name, xlim=(-0.6, width - 0.4), ylim=(height - 0.4, -0.6), aspect="equal", xticks=[], yticks=[])
    plots.save(figure, path)
