"""Pictures of image models: which classes are confused, predictions, orders of patches, what a patch sees."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from src import plots
from src.lion import LionForImageClassification
from src.lion.patch_orders import matrix_in_orders, snakes

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


def orders(height: int, width: int, path: Path) -> None:
    """Draw the two orders in which LION♮ reads patches. Raises OSError."""
    figure, axes = plots.subplots(columns=2, title=f"Two orders of {height} × {width} patches", width=4, height=4)
    for axis, order, name in zip(axes[0], snakes(height, width, 0, "cpu"), ("rows", "columns")):
        rows, columns = order // width, order % width
        axis.axis("off")
        axis.plot(columns, rows, color=plots.COLORS["lion-s"], linewidth=2, marker="o", markersize=4)
        for place, (row, column) in enumerate(zip(rows.tolist(), columns.tolist())):
            axis.annotate(str(place), (column, row), (3, 3), textcoords="offset points", fontsize=7)
        axis.set(title=name, xlim=(-0.6, width - 0.4), ylim=(height - 0.4, -0.6), aspect="equal")
    plots.save(figure, path)


def predictions(found: Sequence[tuple[Path, str, float]], path: Path, title: str, columns: int = 10) -> None:
    """Draw 40 pictures with what a model takes them for: first those it gets wrong, in red, at most 20, the most
    confident first. Each is (file, class, probability); a file's folder is its true class. Raises OSError."""
    from PIL import Image

    wrong = [each for each in found if each[1] != each[0].parent.name]
    wrong = sorted(wrong, key=lambda each: -each[2])[:20]
    right = [each for each in found if each[1] == each[0].parent.name]
    step = max(1, len(right) // (40 - len(wrong)))
    shown = (wrong + right[::step])[:40]
    rows = -(-len(shown) // columns)
    figure, axes = plots.subplots(rows, columns, title=title, width=1.0, height=1.15)
    for axis in axes.flat:
        axis.axis("off")
    for axis, (file, label, probability) in zip(axes.flat, shown):
        truth = file.parent.name
        axis.imshow(Image.open(file).convert("RGB"))
        words = f"{label} {probability:.0%}" if label == truth else f"{label} {probability:.0%}, is {truth}"
        axis.set_title(words, fontsize=6, color="black" if label == truth else "crimson")
    plots.save(figure, path)


def heads(
    matrices: Sequence[Tensor], patch: tuple[int, int], grid: tuple[int, int], prefix: int, path: Path, title: str
) -> None:
    """Draw what belongs to one patch, at (row, column) of a grid, of each layer's matrices, (H, L, L): a row of
    pictures for each head. Raises OSError."""
    query = prefix + patch[0] * grid[1] + patch[1]
    figure, axes = plots.subplots(len(matrices[0]), len(matrices), title=title, width=1.6, height=1.7)
    for number, layer in enumerate(matrices):
        for head, matrix in enumerate(layer):
            axis = axes[head, number]
            axis.imshow(matrix[query, prefix:].unflatten(0, grid), cmap="viridis", vmin=0)
            axis.plot(patch[1], patch[0], "rs", markersize=3)
            axis.set_title(f"layer {number + 1}, head {head + 1}", fontsize=7)
            axis.axis("off")
    plots.save(figure, path)


def masks(model: LionForImageClassification, pixel_values: Tensor) -> list[Tensor]:
    """Return the mask of each layer for one image, (1, 3, height, width): M of patch_orders.py, averaged over orders,
    (H, L, L), up to a factor per row. The model has decays."""
    found, orders = [], model.lion.orders(pixel_values)
    for layer, x in zip(model.lion.layers, model.lion(pixel_values, output_hidden_states=True).hidden_states):
        ones = x.new_ones(1, model.config.num_attention_heads, x.shape[1], 1)
        log_decays = layer.attention.log_decays(layer.before_mixing(x))
        found.append(matrix_in_orders(ones, ones, log_decays, orders, scale=1.0)[0])
    return found
