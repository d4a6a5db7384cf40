"""Scores of fine-tuning runs → a table, JSON and a picture."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from src.errors import RunFailed
from src.glue.tasks import GLUE
from src.tables import markdown

Result = dict[str, Any]
Row = dict[str, Any]


def summarize(results: list[Result]) -> list[Row]:
    """A row a task: mean and standard deviation over seeds, each seed, and the majority class's score.

    Beside its score a result may tell "of", how many seeds there should be, and "glue", whether GLUE's average counts it.
    Of a searched task, the candidate with the highest mean among those with most seeds, and all of them under "candidates".
    """
    candidates: dict[str, dict[str, Row]] = {}
    for result in results:
        variant = result.get("variant", "")
        row = candidates.setdefault(result["task"], {}).setdefault(variant, {
            "task": result["task"], "title": result["title"], "variant": variant, "metrics": result["metrics"],
            "majority": result["majority"], "seeds": {}, "folders": {}, "of": result.get("of", 0),
            "glue": result.get("glue", result["task"] in GLUE),
        })  # fmt: skip
        row["seeds"][str(result["seed"])] = result["score"]
        row["folders"][str(result["seed"])] = result["folder"]
    rows = []
    for variants in candidates.values():
        for row in variants.values():
            scores = list(row["seeds"].values())
            row["mean"], row["std"] = mean(scores), stdev(scores) if len(scores) > 1 else None
        best = dict(max(variants.values(), key=lambda row: (len(row["seeds"]), row["mean"])))
        if best["variant"]:
            best["candidates"] = [{key: row[key] for key in ("variant", "mean", "std", "seeds", "of")} for row in variants.values()]  # fmt: skip
        rows.append(best)
    return rows


def glue_average(rows: list[Row]) -> float | None:
    """The mean over the eight tasks of GLUE, where all of them are there."""
    scores = {row["task"]: row["mean"] for row in rows if of_glue(row)}
    return mean(scores[name] for name in GLUE) if all(name in scores for name in GLUE) else None


def of_glue(row: Row) -> bool:
    return row.get("glue", row["task"] in GLUE)


def lacking(row: Row) -> str:
    """How many of its seeds a row has, where some failed."""
    return f"{len(row['seeds'])} of {row['of']} seeds" if len(row["seeds"]) < row.get("of", 0) else ""


def spread(row: Row) -> str:
    """Mean ± standard deviation, in points, and of how many seeds where some failed."""
    deviation = "" if row["std"] is None else f" ± {100 * row['std']:.2f}"
    return f"{100 * row['mean']:.2f}{deviation}{f' ({lacking(row)})' if lacking(row) else ''}"


def average(glue: float, rows: list[Row]) -> str:
    """GLUE's average, in points, and what seeds it lacks."""
    failed = ", ".join(f"{row['title']}: {lacking(row)}" for row in rows if of_glue(row) and lacking(row))
    return f"{100 * glue:.2f}{f' ({failed})' if failed else ''}"


def each_seed(row: Row) -> str:
    return ", ".join(f"{100 * score:.2f}" for score in row["seeds"].values())


def table(rows: list[Row]) -> str:
    """Markdown, to be read as it is."""
    lines = [["task", "metric", "majority class", "score", "seeds"]]
    for row in rows:
        title = f"{row['title']}*" if row["variant"] else row["title"]
        lines.append([title, " and ".join(row["metrics"]), f"{100 * row['majority']:.2f}", spread(row), each_seed(row)])
    return markdown(lines)


def search_table(rows: list[Row]) -> str:
    """The candidates of every search, and a note on how to read its winner's score."""
    lines = [["search", "candidate", "score", "seeds"]]
    for row in rows:
        for candidate in row.get("candidates", ()):
            chosen = ", picked" if candidate["variant"] == row["variant"] else ""
            lines.append([row["title"], f"{candidate['variant']}{chosen}", spread(candidate), each_seed(candidate)])
    if len(lines) == 1:
        return ""
    note = "\\* The best of the candidates below on the validation set itself: a score picked so is too high rather than too low."  # fmt: skip
    return f"{note}\n\n{markdown(lines)}"


def closing(rows: list[Row], failures: list[str] = ()) -> str:
    """The GLUE average, or what it lacks, where a task is GLUE's; and the jobs that failed."""
    lines, there = [], {row["task"] for row in rows if of_glue(row)}
    glue = glue_average(rows)
    if glue is not None:
        lines.append(f"GLUE average: {average(glue, rows)}")
    elif there & GLUE.keys():
        missing = ", ".join(GLUE[name].title for name in GLUE if name not in there)
        lines.append(f"GLUE average: not without {missing}")
    if failures:
        lines.append("\n".join(["Failed, and not in the scores:", *(f"- {failure}" for failure in failures)]))
    return "\n\n".join(lines)


def text(rows: list[Row], failures: list[str] = ()) -> str:
    return "\n\n".join(filter(None, (table(rows) if rows else "", closing(rows, failures), search_table(rows))))


def write(results: list[Result], folder: Path, name: str, failures: list[str] = ()) -> list[Row]:
    """Write report.md, report.json and report.png into a run's folder; returns the rows."""
    rows = summarize(results)
    content = {"run": name, "tasks": rows, "glue": glue_average(rows), "failed": list(failures)}
    with writing(folder):
        (folder / "report.json").write_text(json.dumps(content, indent=1))
        (folder / "report.md").write_text(f"# {name}\n\n{text(rows, failures)}\n", encoding="utf-8")
        if rows:
            draw([(name, rows)], folder / "report.png")
    return rows


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raises RunFailed where the disk refuses what is written meanwhile."""
    try:
        yield
    except OSError as error:
        raise RunFailed(f"cannot write to {folder}: {error.strerror or error}; make room there and repeat the command, which writes the rest") from None  # fmt: skip


def predictions(job: Path, split: str) -> list[dict[str, Any]]:
    """The lines that job.write_predictions wrote, each ended by a line feed alone: a class's name may hold U+2028."""
    with (job / f"predictions-{split}.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def draw(runs: list[tuple[str, list[Row]]], picture: Path) -> None:
    """Bars: the score of every task, a color a run, each seed a dot, the majority class a dashed line."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False  # a dollar in a title is a dollar
    from matplotlib import pyplot as plt

    tasks = list({row["task"]: row for _, rows in runs for row in rows}.values())
    places = {row["task"]: place for place, row in enumerate(tasks)}
    figure, axis = plt.subplots(figsize=(max(4, 1.2 * len(tasks) * max(1, len(runs) / 2) + 2), 4), layout="constrained")
    width = 0.8 / len(runs)
    for number, (name, rows) in enumerate(runs):
        middles = [places[row["task"]] - 0.4 + width * (number + 0.5) for row in rows]
        axis.bar(middles, [100 * row["mean"] for row in rows], width * 0.92, label=name, alpha=0.8)
        for middle, row in zip(middles, rows):
            axis.plot(
                [middle] * len(row["seeds"]), [100 * score for score in row["seeds"].values()], "k.", markersize=4
            )
    for place, row in enumerate(tasks):
        line = [100 * row["majority"]] * 2
        axis.plot(
            [place - 0.45, place + 0.45], line, "k--", linewidth=1, label="majority class" if place == 0 else None
        )
    axis.set_xticks(range(len(tasks)), ["\n".join((row["title"], *row["metrics"])) for row in tasks])
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(picture, dpi=150)
    plt.close(figure)
