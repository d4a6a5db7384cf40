"""A picture of how the scores of each task rose during training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from src import plots
from src.files import METRICS, read_json_lines
from src.jobs.experiment import Row

COLUMNS = 3
Points = dict[int, float]  # samples seen → score


def draw(
    runs: Mapping[str, tuple[Path, Sequence[Row]]], picture: Path, title: str = "Validation during training"
) -> bool:
    """Draw one plot per task: each run's mean over seeds, its seeds as thin lines, and the majority class. `runs` are
    save_folder and report rows by name. Return whether there was anything to draw."""
    tasks: dict[str, dict[str, list[Points]]] = {}  # title → run → seeds
    majority = {}
    for name, (folder, rows) in runs.items():
        for row in rows:
            seeds = [points(folder / "jobs" / job) for job in row["folders"].values()]
            if seeds := list(filter(None, seeds)):
                tasks.setdefault(row["title"], {})[name] = seeds
                majority[row["title"]] = 100 * row["majority"]
    if not tasks:
        return False
    columns = min(COLUMNS, len(tasks))
    figure, axes = plots.subplots(-(-len(tasks) // columns), columns, title, width=4.5, height=3.5)
    shades = dict(zip(runs, plots.colors(runs)))
    for axis in axes.flat[len(tasks) :]:
        axis.remove()
    for axis, (task, of) in zip(axes.flat, tasks.items()):
        for name, seeds in of.items():
            for each in seeds if len(seeds) > 1 else ():
                axis.plot(each.keys(), each.values(), color=shades[name], linewidth=0.7, alpha=0.5)
            shared = [samples for samples in seeds[0] if all(samples in each for each in seeds)]
            means = [mean(each[samples] for each in seeds) for samples in shared]
            axis.plot(shared, means, color=shades[name], marker=".", label=name)
        axis.axhline(majority[task], color="black", linestyle="--", linewidth=1, label="majority class")
        plots.label_axes(axis, task, "samples seen", "score × 100")
        axis.xaxis.set_major_formatter("{x:,.0f}")
    plots.save(figure, picture)
    return True


def points(job: Path) -> Points:
    """Return the scores of a job's evaluations, each the mean over splits and metrics."""
    lines = read_json_lines(job / METRICS)
    return {line["samples"]: 100 * mean(line["eval"].values()) for line in lines if line.get("eval")}
