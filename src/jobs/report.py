"""Results of jobs → a table, JSON and a picture."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev

from src import plots
from src.errors import RunFailed, reason
from src.files import write_atomically, write_json
from src.jobs.experiment import Average, Row
from src.jobs.jobs import Result
from src.tables import markdown

PICKED = (
    "\\* The best of the candidates below on the validation set itself: "
    "a score picked so is too high rather than too low."
)


def summarize(results: Sequence[Result], average: Average) -> list[Row]:
    """Return a row per task: mean and standard deviation over seeds, each seed, and the majority class's score.

    A result may hold "of", the number of seeds there should be. Of a searched task, the row is the candidate with the highest
    mean among those with most seeds, and "candidates" lists all.
    """
    candidates: dict[str, dict[str, Row]] = {}
    for result in results:
        variant = result.get("variant", "")
        new = {name: result[name] for name in ("task", "title", "metrics", "majority")}
        new |= {"variant": variant, "seeds": {}, "folders": {}, "of": result.get("of", 0)}
        row = candidates.setdefault(result["task"], {}).setdefault(
            variant, {**new, average.key: average.counts(result)}
        )
        row["seeds"][str(result["seed"])] = result["score"]
        row["folders"][str(result["seed"])] = result["folder"]
    rows = []
    for variants in candidates.values():
        for row in variants.values():
            scores = list(row["seeds"].values())
            row["mean"], row["std"] = mean(scores), stdev(scores) if len(scores) > 1 else None
        best = dict(max(variants.values(), key=lambda row: (len(row["seeds"]), row["mean"])))
        if best["variant"]:
            shown = ("variant", "mean", "std", "seeds", "of")
            best["candidates"] = [{name: row[name] for name in shown} for row in variants.values()]
        rows.append(best)
    return rows


def missing_seeds(row: Row) -> str:
    """Return how many of its seeds a row has, if some failed: ` (2 of 3 seeds)`."""
    return f" ({len(row['seeds'])} of {row['of']} seeds)" if len(row["seeds"]) < row.get("of", 0) else ""


def spread(row: Row) -> str:
    """Return mean ± standard deviation in points, and the number of seeds if some failed."""
    deviation = "" if row["std"] is None else f" ± {100 * row['std']:.2f}"
    return f"{100 * row['mean']:.2f}{deviation}{missing_seeds(row)}"


def average_text(value: float, rows: list[Row], average: Average) -> str:
    """Return the average in points, and the tasks that lack seeds."""
    incomplete = [row for row in rows if average.counts(row) and missing_seeds(row)]
    failed = ", ".join(f"{row['title']}: {missing_seeds(row)[2:-1]}" for row in incomplete)
    return f"{100 * value:.2f}{f' ({failed})' if failed else ''}"


def each_seed(row: Row) -> str:
    return ", ".join(f"{100 * score:.2f}" for score in row["seeds"].values())


def table(rows: list[Row]) -> str:
    lines = [["task", "metric", "majority class", "score", "seeds"]]
    for row in rows:
        title = f"{row['title']}*" if row["variant"] else row["title"]
        lines.append([title, " and ".join(row["metrics"]), f"{100 * row['majority']:.2f}", spread(row), each_seed(row)])
    return markdown(lines)


def search_table(rows: list[Row]) -> str:
    """Return the candidates of every search, with a note on how to read the best one's score."""
    lines = [["search", "candidate", "score", "seeds"]]
    for row in rows:
        for candidate in row.get("candidates", ()):
            picked = ", picked" if candidate["variant"] == row["variant"] else ""
            lines.append([row["title"], f"{candidate['variant']}{picked}", spread(candidate), each_seed(candidate)])
    return f"{PICKED}\n\n{markdown(lines)}" if len(lines) > 1 else ""


def closing(rows: list[Row], average: Average, failures: Sequence[str] = ()) -> str:
    """Return the average, or the tasks it lacks if any task counts; and the jobs that failed."""
    lines = []
    counted = {row["task"] for row in rows if average.counts(row)} & average.tasks.keys()
    value = average.of(rows)
    if value is not None:
        lines.append(f"{average.title}: {average_text(value, rows, average)}")
    elif counted:
        missing = ", ".join(title for name, title in average.tasks.items() if name not in counted)
        lines.append(f"{average.title}: not without {missing}")
    if failures:
        lines.append("\n".join(["Failed, and not in the scores:", *(f"- {failure}" for failure in failures)]))
    return "\n\n".join(lines)


def text(rows: list[Row], average: Average, failures: Sequence[str] = ()) -> str:
    return "\n\n".join(
        filter(None, (table(rows) if rows else "", closing(rows, average, failures), search_table(rows)))
    )


def write(
    results: Sequence[Result], average: Average, folder: Path, name: str, failures: Sequence[str] = ()
) -> list[Row]:
    """Write report.md, report.json and report.png into a run's folder, and return the rows."""
    rows = summarize(results, average)
    content = {"run": name, "tasks": rows, average.key: average.of(rows), "failed": list(failures)}
    with writing(folder):
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
        message = f"cannot write to {folder} ({reason(error)}); free space there and repeat the command"
        raise RunFailed(f"{message}, which resumes") from None


def draw(runs: Sequence[tuple[str, list[Row]]], picture: Path, title: str = "") -> None:
    """Draw the scores of every task, a bar per run, each seed a dot, the majority class a dashed line."""
    rows = {row["task"]: row for _, rows in runs for row in rows}
    groups = {name: "\n".join((row["title"], *row["metrics"])) for name, row in rows.items()}
    scores = [
        (name, {groups[row["task"]]: [100 * score for score in row["seeds"].values()] for row in rows})
        for name, rows in runs
    ]
    baselines = {groups[name]: 100 * row["majority"] for name, row in rows.items()}
    plots.bars(scores, baselines, picture, title or "Fine-tuning, by task and metric", "score × 100")
