"""Plots in one style: `curves` of metrics, `bars` of scores; others by `subplots`, `color`, `label_axes` and `save`."""

import io
import itertools
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from src.files import METRICS, read_json_lines, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from src.training.task import Curve

COLORS = {
    "lion-lit": "#e69f00", "lion-d": "#009e73", "lion-s": "#0072b2", "lion-s-plus": "#cc79a7", "hydra": "#56b4e9",
    "softmax": "#d55e00", "bert": "#d55e00", "hugging face bert": "#7f7f7f", "modernbert": "#000000",
}  # fmt: skip
OTHERS = "#8c564b #17becf #bcbd22 #9467bd #1b4f3a #ff9896 #aa3377 #4b4b9b #98df8a".split()  # in order of appearance
# Fonts, where they are installed, for what matplotlib's own lacks, such as names in Chinese, Japanese or Korean.
FALLBACKS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei",
    "Droid Sans Fallback", "IPAGothic", "NanumGothic", "Microsoft YaHei", "Malgun Gothic", "Hiragino Sans",
    "PingFang SC", "Arial Unicode MS", "Noto Sans Devanagari", "Noto Sans Thai", "Unifont",
)  # fmt: skip
FAMILY = re.compile(rf"({'|'.join(sorted(COLORS, key=len, reverse=True))})(?![a-z])")


def color(name: str) -> str:
    """Return the colour of a mixer or of the mixer that a model's or run's name contains."""
    return colors([name])[0]


def colors(names: Iterable[str]) -> list[str]:
    """Return a colour for each name in one figure: its mixer's if that is still free, else the next of OTHERS."""
    chosen, others = [], itertools.cycle(OTHERS)
    for name in names:
        family = FAMILY.search(name.lower())
        own = COLORS[family[1]] if family else None
        chosen.append(own if own and own not in chosen else next(others))
    return chosen


def subplots(rows: int = 1, columns: int = 1, title: str = "", width: float = 5.5, height: float = 4.0):
    """Return a figure and its axes, an array (rows, columns). Width and height are those of one plot, in inches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import font_manager

    installed = {*font_manager.get_font_names()}
    matplotlib.rcParams.update({
        "font.family": ["sans-serif", *(font for font in FALLBACKS if font in installed)],
        "text.parse_math": False,  # a dollar in a title is a dollar
        "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True,
        "axes.spines.top": False, "axes.spines.right": False,
        "legend.frameon": False, "legend.fontsize": 9, "figure.titlesize": 11, "axes.titlesize": 11, "savefig.dpi": 150,
    })  # fmt: skip
    from matplotlib import pyplot

    size = (width * columns, height * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    figure.suptitle(title)
    return figure, axes


def label_axes(axis: "Axes", title: str, x_label: str, y_label: str, log: bool = False) -> None:
    """Set title and labels. `log`: x in powers of 2, y in powers of 10 if any of the lines drawn is positive."""
    axis.set(title=title, xlabel=x_label, ylabel=y_label)
    if log:
        axis.set_xscale("log", base=2)
        if any(y > 0 for line in axis.lines for y in line.get_ydata()):
            log_y(axis)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.yaxis.set_major_formatter("{x:,g}")


def log_y(axis: "Axes") -> None:
    """Draw y in powers of 10; a short axis, on which few or none of them lie, has 2 and 5 times each, too."""
    from matplotlib.ticker import LogLocator

    axis.set_yscale("log", nonpositive="mask")
    low, high = axis.get_ylim()
    if high < 100 * low:
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:,g}")  # the default formatters are mathematical text
    axis.yaxis.set_minor_formatter("")


def save(figure: "Figure", path: Path) -> None:
    """Add one legend below all plots, write the figure in the format its suffix names, and free it. Raises OSError."""
    from matplotlib import pyplot

    entries = {label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels())}
    if entries:
        fitting = int(figure.get_figwidth() / (0.8 + 0.08 * max(map(len, entries))))  # inches
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=max(1, fitting))
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing from")  # which is drawn as a box
        figure.savefig(picture, format=path.suffix[1:])
    pyplot.close(figure)
    write_atomically(path, picture.getvalue())


def curves(runs: Iterable[tuple[str, Path]], curves: Sequence["Curve"], path: Path, title: str) -> None:
    """Plot runs, (name, folder), against samples seen, one plot per curve: training faint, evaluations with dots."""
    metrics = {name: read_json_lines(folder / METRICS) for name, folder in runs}
    drawn = [curve for curve in curves if not curve.baseline]
    figure, axes = subplots(columns=len(drawn), title=title)
    for axis in axes[0, 1:]:  # one score of a fine-tuned copy is seen within the whole run
        axis.sharex(axes[0, 0])
    for axis, curve in zip(axes[0], drawn):
        scale, last = 100 if curve.percent else 1, {}
        for shade, (name, lines) in zip(colors(metrics), metrics.items()):
            train = [(line["samples"], scale * line[curve.name]) for line in lines if curve.name in line]
            evaluations = [(line["samples"], line.get("eval", {}) | line.get("finetune", {})) for line in lines]
            evaluations = [(samples, values) for samples, values in evaluations if curve.eval_key in values]
            if train:
                axis.plot(*zip(*train), color=shade, alpha=0.25, linewidth=1)
            if evaluations:
                points = [(samples, scale * values[curve.eval_key]) for samples, values in evaluations]
                axis.plot(*zip(*points), color=shade, marker=".", label=name)
                last |= evaluations[-1][1]
        for floor in curves:
            if floor.baseline and floor.percent == curve.percent and floor.eval_key in last:
                axis.axhline(scale * last[floor.eval_key], color="black", linewidth=1, ls=":", label=floor.title)
        label_axes(axis, curve.title, "samples seen", "%" if curve.percent else curve.unit)
        axis.xaxis.set_major_formatter("{x:,.0f}")
    save(figure, path)


def bars(runs: Sequence[tuple[str, Mapping]], baselines: Mapping[str, float], path: Path, title: str, unit: str):
    """Draw scores as bars, one colour per run: the mean of each group with a dot per seed, and a dashed baseline.
    `runs` are (name, {group: scores of its seeds}); `baselines` are {group: score of the majority class}."""
    groups = list(dict.fromkeys(group for _, scores in runs for group in scores))
    figure, axes = subplots(title=title, width=max(4.5, 1.2 * len(groups) * max(1, len(runs) / 2) + 2), height=4.5)
    axis, width = axes[0, 0], 0.8 / len(runs)
    for number, (shade, (name, scores)) in enumerate(zip(colors(name for name, _ in runs), runs)):
        middles = [groups.index(group) - 0.4 + width * (number + 0.5) for group in scores]
        axis.bar(middles, [mean(seeds) for seeds in scores.values()], width * 0.92, color=shade, alpha=0.85, label=name)
        for middle, seeds in zip(middles, scores.values()):
            axis.plot([middle] * len(seeds), seeds, "k.", markersize=4)
    for group, score in baselines.items():
        middle = groups.index(group)
        axis.plot([middle - 0.45, middle + 0.45], [score, score], "k--", linewidth=1, label="majority class")
    label_axes(axis, "", "", unit)
    axis.set_xticks(range(len(groups)), groups)
    axis.grid(visible=False, axis="x")
    save(figure, path)
