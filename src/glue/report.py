"""Scores of fine-tuning runs → a table, JSON and a picture."""

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from src.glue.tasks import GLUE
from src.tables import markdown

Result = dict[str, Any]


def summarize(results: list[Result]) -> list[dict[str, Any]]:
    """A row a task: mean and standard deviation over seeds, each seed, and the majority class's score."""
    rows: dict[str, dict[str, Any]] = {}
    for result in results:
        row = rows.setdefault(result["task"], {"task": result["task"], "title": result["title"],
                                               "metrics": result["metrics"], "majority": result["majority"], "seeds": {}})  # fmt: skip
        row["seeds"][str(result["seed"])] = result["score"]
    for row in rows.values():
        scores = list(row["seeds"].values())
        row["mean"], row["std"] = mean(scores), stdev(scores) if len(scores) > 1 else None
    return list(rows.values())


def glue_average(rows: list[dict[str, Any]]) -> float | None:
    """The mean over the eight tasks of GLUE, where all of them are there."""
    scores = {row["task"]: row["mean"] for row in rows}
    return mean(scores[name] for name in GLUE) if all(name in scores for name in GLUE) else None


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, to be read as it is."""
    lines = [["task", "metric", "majority class", "score", "seeds"]]
    for row in rows:
        spread = "" if row["std"] is None else f" ± {100 * row['std']:.2f}"
        seeds = ", ".join(f"{100 * score:.2f}" for score in row["seeds"].values())
        lines.append([row["title"], " and ".join(row["metrics"]), f"{100 * row['majority']:.2f}", f"{100 * row['mean']:.2f}{spread}", seeds])  # fmt: skip
    return markdown(lines)


def closing(rows: list[dict[str, Any]]) -> str:
    """The GLUE average, or what it lacks; nothing where none of the tasks is GLUE's."""
    average = glue_average(rows)
    if average is not None:
        return f"GLUE average: {100 * average:.2f}"
    there = {row["task"] for row in rows}
    if not there & GLUE.keys():
        return ""
    return f"GLUE average: not without {', '.join(GLUE[name].title for name in GLUE if name not in there)}"


def write(results: list[Result], folder: Path, name: str) -> list[dict[str, Any]]:
    """Write report.md, report.json and report.png into a run's folder; returns the rows."""
    rows = summarize(results)
    (folder / "report.json").write_text(json.dumps({"run": name, "tasks": rows, "glue": glue_average(rows)}, indent=1))
    (folder / "report.md").write_text("\n\n".join(filter(None, (f"# {name}", table(rows), closing(rows)))) + "\n")
    draw([(name, rows)], folder / "report.png")
    return rows


def draw(runs: list[tuple[str, list[dict[str, Any]]]], picture: Path) -> None:
    """Bars: the score of every task, a color a run, each seed a dot, the majority class a dashed line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    tasks = [row["title"] for row in runs[0][1]]
    figure, axis = plt.subplots(figsize=(max(4, 1.2 * len(tasks) * max(1, len(runs) / 2) + 2), 4), layout="constrained")
    width = 0.8 / len(runs)
    for number, (name, rows) in enumerate(runs):
        places = [place - 0.4 + width * (number + 0.5) for place in range(len(rows))]
        axis.bar(places, [100 * row["mean"] for row in rows], width * 0.92, label=name, alpha=0.8)
        for place, row in zip(places, rows):
            axis.plot([place] * len(row["seeds"]), [100 * score for score in row["seeds"].values()], "k.", markersize=4)
    for place, row in enumerate(runs[0][1]):
        line = [100 * row["majority"]] * 2
        axis.plot(
            [place - 0.45, place + 0.45], line, "k--", linewidth=1, label="majority class" if place == 0 else None
        )
    axis.set_xticks(range(len(tasks)), [f"{row['title']}\n{' and '.join(row['metrics'])}" for row in runs[0][1]])
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(picture, dpi=150)
    plt.close(figure)
