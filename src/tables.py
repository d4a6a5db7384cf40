"""Markdown tables that are readable as plain text."""

from collections.abc import Sequence
from statistics import mean, stdev


def spread(values: Sequence[float]) -> str:
    """Return mean ± standard deviation, of a single value the value."""
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def mean_of(metrics: Sequence[str]) -> str:
    """Return the name of a task's score, which is the mean of its metrics."""
    return f"mean of {' and '.join(metrics)}" if len(metrics) > 1 else metrics[0]


def markdown(lines: list[list[str]]) -> str:
    """Return a table with aligned columns, numbers to the right; the first line is its header."""
    columns = list(zip(*lines))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(cell[:1].isdigit() or cell[:1] in "-×" for cell in column[1:]) for column in columns]

    def row(cells: list[str]) -> str:
        aligned = (cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(cells, widths, numeric))
        return f"| {' | '.join(aligned)} |"

    rule = "|" + "|".join("-" * (w + 1) + ":" if right else "-" * (w + 2) for w, right in zip(widths, numeric)) + "|"
    return "\n".join([row(lines[0]), rule, *map(row, lines[1:])])
