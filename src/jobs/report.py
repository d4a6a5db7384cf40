"""Job results → a table, JSON and a plot."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev

from src import plots
from src.errors import RunFailed, reason
from src.files import write_atomically, write_json
from src.jobs.experiment import Average, Result, Row
from src.publish.run_facts import missing_seeds
from src.tables import markdown

PICKED = (
    "\\* The best of the candidates below on the validation set itself: "
    "a score picked so is too high rather than too low."
)


def summarize(results: Sequence[Result], average: Average) -> list[Row]:
    """Return one row per task: mean and standard deviation over seeds, each seed, and the majority class's score.

    A result may hold "of", the expected number of seeds. The row of a searched task is the candidate with the highest
    mean among those with the most seeds, and "candidates" lists all of them.
    """
    tasks: dict[str, dict[str, Row]] = {}  # task → variant → row
    for result in results:
        row = {name: result[name] for name in ("task", "title", "metrics", "majority")}
        row |= {"variant": result.get("variant", ""), "seeds": {}, "folders": {}, "of": result.get("of", 0)}
        row[average.key] = average.counts(result)
        row = tasks.setdefault(row["task"], {}).setdefault(row["variant"], row)
        row["seeds"][str(result["seed"])] = result["score"]
        row["folders"][str(result["seed"])] = result["folder"]
    rows = []
    for variants in tasks.values():
        for row in variants.values():
            scores = list(row["seeds"].values())
            row["mean"], row["std"] = mean(scores), stdev(scores) if len(scores) > 1 else None
        best = dict(max(variants.values(), key=lambda row: (len(row["seeds"]), row["mean"])))
        if best["variant"]:
            keys = ("variant", "mean", "std", "seeds", "of")
            best["candidates"] = [{key: row[key] for key in keys} for row in variants.values()]
        rows.append(best)
    return rows


def spread(row: Row) -> str:
    """Return mean ± standard deviation in points, and the number of seeds if some failed."""
    deviation = "" if row["std"] is None else f" ± {100 * row['std']:.2f}"
    return f"{100 * row['mean']:.2f}{deviation}{f' ({missing})' if (missing := missing_seeds(row)) else ''}"


def average_text(value: float, rows: list[Row], average: Average) -> str:
    """Return the average in points, and the tasks that lack seeds."""
    failed = [f"{row['title']}: {missing_seeds(row)}" for row in rows if average.counts(row) and missing_seeds(row)]
    return f"{100 * value:.2f}" + (f" ({', '.join(failed)})" if failed else "")


def text(rows: list[Row], average: Average, failures: Sequence[str] = ()) -> str:
    """Return the table, the average, what failed, and the candidates of each search."""

    def seeds(row: Row) -> str:
        return ", ".join(f"{100 * score:.2f}" for score in row["seeds"].values())

    lines, searches = (
        [["task", "metric", "majority class", "score", "seeds"]],
        [["search", "candidate", "score", "seeds"]],
    )
    for row in rows:
        title, metrics = f"{row['title']}{'*' if row['variant'] else ''}", " and ".join(row["metrics"])
        lines.append([title, metrics, f"{100 * row['majority']:.2f}", spread(row), seeds(row)])
        for other in row.get("candidates", ()):
            picked = ", picked" if other["variant"] == row["variant"] else ""
            searches.append([row["title"], f"{other['variant']}{picked}", spread(other), seeds(other)])
    parts = [markdown(lines)] if rows else []
    counted = {row["task"] for row in rows if average.counts(row)}
    value = average.of(rows)
    if value is not None:
        parts.append(f"{average.title}: {average_text(value, rows, average)}")
    elif counted & average.tasks.keys():
        missing = ", ".join(title for name, title in average.tasks.items() if name not in counted)
        parts.append(f"{average.title}: not without {missing}")
    if failures:
        parts.append("\n".join(["Failed, and not in the scores:", *(f"- {failure}" for failure in failures)]))
    if len(searches) > 1:
        parts += [PICKED, markdown(searches)]
    return "\n\n".join(parts)


def write(
    results: Sequence[Result], average: Average, folder: Path, name: str, failures: Sequence[str] = ()
) -> list[Row]:
    """Write report.md, report.json and report.png into a run's folder, and return the rows."""
    rows = summarize(results, average)
    with writing(folder):
        content = {"run": name, "tasks": rows, average.key: average.of(rows), "failed": list(failures)}
        write_json(folder / "report.json", content)
        write_atomically(folder / "report.md", f"# {name}\n\n{text(rows, average, failures)}\n")
        if rows:
            draw([(name, rows)], folder / "report.png")
    return rows


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an OSError into RunFailed."""
    try:
        yield
    except OSError as error:
        to_do = "free space there and repeat the command, which resumes"
        raise RunFailed(f"cannot write to {folder} ({reason(error)}); {to_do}") from None


def draw(runs: Sequence[tuple[str, list[Row]]], picture: Path, title: str = "Scores by task and metric") -> None:
    """Draw one bar per task and run, each seed as a dot and the majority class as a dashed line."""
    groups = {row["task"]: "\n".join((row["title"], *row["metrics"])) for _, rows in runs for row in rows}
    bars = [
        (name, {groups[row["task"]]: [100 * score for score in row["seeds"].values()] for row in rows})
        for name, rows in runs
    ]
    baselines = {groups[row["task"]]: 100 * row["majority"] for _, rows in runs for row in rows}
    plots.bars(bars, baselines, picture, title, "score × 100")
