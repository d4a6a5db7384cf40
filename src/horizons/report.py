"""The measurements as a table and as a picture."""

from pathlib import Path
from typing import Any

from src import plots
from src.tables import markdown


def text(result: dict[str, Any]) -> str:
    """Return the measurements as a table and a line."""
    distances = list(result["shares"])
    lines = [["layer", "horizons of its heads, tokens", *(f"from beyond {distance:,}" for distance in distances)]]
    for number, horizons in enumerate(result["horizons"]):
        shown = (f"{x:.3g}" if x < 1000 else f"{x:,.0f}" for x in sorted(horizons or ()))
        shown = "no decay" if horizons is None else " ".join(shown)
        lines.append([str(number + 1), shown, *(f"{result['shares'][distance][number]:.1%}" for distance in distances)])
    table = markdown(lines)
    gradients = ", ".join(f"{result['gradients'][distance]:.1e} at {distance:,}" for distance in distances)
    return f"{table}\n\ngradient relative to a token's own: {gradients}" if distances else table


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw horizons per layer and head, and shares per layer."""
    from matplotlib.ticker import PercentFormatter

    figure, axes = plots.subplots(1, 2, result["checkpoint"])
    tint = plots.OTHERS[3]
    series = (("initial_horizons", "before training", "none", -0.1), ("horizons", "after training", tint, 0.1))
    for name, label, fill, shift in series:
        points = [(layer + shift, x) for layer, horizons in enumerate(result[name], 1) for x in horizons or ()]
        if points:
            axes[0, 0].plot(*zip(*points), "o", alpha=0.6, color=tint, markerfacecolor=fill, label=label)
    plots.label_axes(axes[0, 0], "horizon per head", "layer", "tokens")
    plots.log_y(axes[0, 0])
    for (distance, shares), tint in zip(result["shares"].items(), plots.OTHERS):
        axes[0, 1].plot(range(1, len(shares) + 1), shares, "o-", color=tint, label=f"beyond {distance:,} tokens")
    plots.label_axes(axes[0, 1], "share of an output", "layer", "")
    axes[0, 1].yaxis.set_major_formatter(PercentFormatter(1))
    axes[0, 1].set_ylim(bottom=0)
    for axis in axes[0]:
        axis.set_xticks(range(1, len(result["horizons"]) + 1))
    plots.save(figure, path)
