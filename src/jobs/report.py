"""Job results → a table, JSON and a plot; and the `report` command, which compares runs."""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from src import plots
from src.cli import progress
from src.config import Rule, check_value
from src.errors import RunFailed, UserError, reason
from src.files import check_writable, write_atomically, write_json
from src.jobs import predictions
from src.jobs.comparison import Difference, of_resamples
from src.jobs.experiment import RESULT_FILE, Average, Experiment, Result, Row, mean_score
from src.publish.card import missing_seeds
from src.tables import markdown

HELP = (
    "Print the report of a run, or compare runs with the first one: for each task, the difference in score in points, "
    "with its 95% confidence interval and two-sided p-value, from a paired bootstrap over the validation examples."
)
COMPARED = (
    "Differences from {first} in points, with 95% confidence interval and two-sided p-value, by a paired bootstrap of "
    "{resamples:,} resamples over the validation examples: in each, the runs are scored on the same drawn examples, "
    "and a run's seeds are averaged. The spread between seeds is shown with the means; it is not in the interval, and "
    "the p-value is not corrected for the number of tasks."
)


def write(results: list[Result], average: Average, folder: Path, name: str, failures: Sequence = ()) -> list[Row]:
    """Write report.md, report.json and report.png into a run's folder, and return the rows."""
    rows = summarize(results, average)
    with writing(folder):
        content = {"run": name, "tasks": rows, average.key: average.of(rows), "failed": list(failures)}
        write_json(folder / "report.json", content)
        write_atomically(folder / "report.md", f"# {name}\n\n{text(rows, average, failures)}\n")
        if rows:
            draw([(name, rows)], folder / "report.png")
    return rows


def summarize(results: Sequence[Result], average: Average) -> list[Row]:
    """Return one row per task: mean and standard deviation over seeds, each seed, and the majority class's score. A
    search's row is the candidate with the highest mean among those with the most seeds, and lists all."""
    tasks: dict[str, dict[str, Row]] = {}  # task → variant → row
    for result in results:
        row = {name: result[name] for name in ("task", "title", "metrics", "majority")}
        row |= {"variant": result.get("variant", ""), "seeds": {}, "folders": {}, "of": result.get("of", 0)}
        row[average.key] = average.counts(result)
        row = tasks.setdefault(row["task"], {}).setdefault(row["variant"], row)
        row["seeds"][str(result["seed"])] = result["score"]
        row["folders"][str(result["seed"])] = result["folder"]
        scores = list(row["seeds"].values())
        row["mean"], row["std"] = mean(scores), stdev(scores) if len(scores) > 1 else None
    rows = []
    for variants in tasks.values():
        best = dict(max(variants.values(), key=lambda row: (len(row["seeds"]), row["mean"])))
        if best["variant"]:
            keys = ("variant", "mean", "std", "seeds", "of")
            best["candidates"] = [{key: row[key] for key in keys} for row in variants.values()]
        rows.append(best)
    return rows


def text(rows: list[Row], average: Average, failures: Sequence[str] = ()) -> str:
    """Return the table, the average, what failed, and the candidates of each search."""
    lines = [["task", "metric", "majority class", "score", "seeds"]]
    searches = [["search", "candidate", "score", "seeds"]]
    for row in rows:
        title = f"{row['title']}{'*' if row['variant'] else ''}"
        lines.append([title, " and ".join(row["metrics"]), f"{100 * row['majority']:.2f}", spread(row), seeds(row)])
        for other in row.get("candidates", ()):
            picked = ", picked" if other["variant"] == row["variant"] else ""
            searches.append([row["title"], f"{other['variant']}{picked}", spread(other), seeds(other)])
    parts = [markdown(lines)] if rows else []
    counted = {row["task"] for row in rows if average.counts(row)}
    if counted & average.tasks.keys():
        missing = ", ".join(title for name, title in average.tasks.items() if name not in counted)
        parts.append(f"{average.title}: {f'not computed, lacks {missing}' if missing else average_text(rows, average)}")
    if failures:
        parts.append("\n".join(["Failed, and not in the scores:", *(f"- {failure}" for failure in failures)]))
    if len(searches) > 1:
        picked = "\\* Picked from the candidates below on the validation set itself, so its score is biased upwards."
        parts += [picked, markdown(searches)]
    return "\n\n".join(parts)


def spread(row: Row) -> str:
    """Return mean ± standard deviation in points, and the number of seeds if some failed."""
    deviation = "" if row["std"] is None else f" ± {100 * row['std']:.2f}"
    return f"{100 * row['mean']:.2f}{deviation}{f' ({missing})' if (missing := missing_seeds(row)) else ''}"


def seeds(row: Row) -> str:
    return ", ".join(f"{100 * score:.2f}" for score in row["seeds"].values())


def average_text(rows: list[Row], average: Average) -> str:
    """Return the average in points, if there is one, and the tasks that lack seeds."""
    failed = [f"{row['title']}: {missing_seeds(row)}" for row in rows if average.counts(row) and missing_seeds(row)]
    value = average.of(rows)
    return "-" if value is None else f"{100 * value:.2f}" + (f" ({', '.join(failed)})" if failed else "")


def draw(runs: Sequence[tuple[str, list[Row]]], picture: Path, title: str = "Scores by task and metric") -> None:
    """Draw one bar per task and run, each seed as a dot and the majority class as a dashed line."""
    groups = {row["task"]: "\n".join((row["title"], *row["metrics"])) for _, rows in runs for row in rows}
    bars = [(name, {groups[r["task"]]: [100 * s for s in r["seeds"].values()] for r in rows}) for name, rows in runs]
    baselines = {groups[row["task"]]: 100 * row["majority"] for _, rows in runs for row in rows}
    plots.bars(bars, baselines, picture, title, "score × 100")


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an OSError into RunFailed."""
    try:
        yield
    except OSError as error:
        to_do = "free space there and repeat the command to resume"
        raise RunFailed(f"cannot write to {folder} ({reason(error)}); {to_do}") from None


class Run(NamedTuple):
    folder: Path
    report: dict[str, Any]  # report.json
    rows: dict[str, Row]  # of the report, by task


class Split(NamedTuple):
    predictions: Any  # class indices or values, (examples,)
    labels: Any
    classes: int
    texts: str | None  # digest; earlier versions wrote none


def main(experiment: type[Experiment], argv: list[str]) -> None:
    """Run the command `report DIR ...`."""
    script, average = experiment.command, experiment.average
    parser = argparse.ArgumentParser(prog=f"{script} report", description=HELP)
    parser.add_argument("folders", metavar="DIR", type=Path, nargs="+", help=f"save_folder of a {script} run")
    parser.add_argument("--out", type=Path, help="folder for compare.md, compare.json and compare.png")
    parser.add_argument("--resamples", type=int, default=1000, help="of the bootstrap (default: 1000)")
    arguments = parser.parse_args(argv)
    out, resamples = arguments.out, arguments.resamples
    check_value("--resamples", resamples, int, Rule(at_least=100))
    if out is not None:
        check_writable("--out", out)
    runs = read_runs(arguments.folders, script)
    (first, base), *others = runs.items()
    differences: dict[str, dict[str, Difference | None]] = {name: {} for name, _ in others}
    if others:
        pairs = [(task, name, run) for task in base.rows for name, run in others if task in run.rows]
        for task, name, run in progress(pairs, desc="bootstrap"):
            differences[name][task] = difference(base, run, task, resamples)
        parts = [table(runs, differences, average), COMPARED.format(first=first, resamples=resamples)]
        if any(row["variant"] for run in runs.values() for row in run.rows.values()):
            parts.append("\\* Picked by a search on these examples, so its score and its gain are biased upwards.")
        failed = {name: "; ".join(run.report.get("failed", ())) for name, run in runs.items()}
        parts += [f"{name} lacks jobs that failed: {jobs}" for name, jobs in failed.items() if jobs]
    else:
        parts = [f"# {first}", text(base.report["tasks"], average, base.report.get("failed", ()))]
    shown = "\n\n".join(parts)
    print(f"\n{shown}\n")
    if out is not None:
        found = {name: {task: d._asdict() for task, d in of.items() if d} for name, of in differences.items()}
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            write_atomically(out / "compare.md", f"{shown}\n")
            content = {"runs": {name: run.report for name, run in runs.items()}, "differences": found}
            write_json(out / "compare.json", content)
            draw([(name, run.report["tasks"]) for name, run in runs.items()], out / "compare.png")
        print(f"table    {out / 'compare.md'}, compare.json\npicture  {out / 'compare.png'}")


def read_runs(folders: list[Path], script: str) -> dict[str, Run]:
    """Return runs by name: their folder's name, or its path if two folders share a name."""
    names = [folder.resolve().name for folder in folders]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("report: a folder is named twice; name each once")
    runs = {}
    for folder, name in zip(folders, names):
        file = folder / "report.json"
        try:
            report = json.loads(file.read_text())
            rows = {row["task"]: row for row in report["tasks"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            to_do = f"give the save_folder of a finished {script} run, or repeat the run"
            raise UserError(f"cannot read {file} ({reason(error)}); {to_do}") from None
        if not rows:
            raise UserError(f"{folder} has no scores, since all of its jobs failed; repeat its {script} run")
        runs[name if len(set(names)) == len(names) else str(folder)] = Run(folder, report, rows)
    return runs


def difference(first: Run, second: Run, task: str, resamples: int) -> Difference | None:
    """Return how much better the second run is at a task, by a paired bootstrap; None if they differ in examples."""
    import torch

    from src.jobs.scores import score

    row, other = first.rows[task], second.rows[task]
    ours, theirs = read_splits(first.folder, row), read_splits(second.folder, other)
    # By position, since the names of splits differ between sources.
    same = len(ours[0]) == len(theirs[0]) and all(
        a.labels.tolist() == b.labels.tolist() and (a.texts == b.texts or None in (a.texts, b.texts))
        for a, b in zip(ours[0], theirs[0])
    )
    if not same or row["metrics"] != other["metrics"]:
        return None

    def mean_of(seeds: list[list[Split]], drawn: list[torch.Tensor]) -> float:
        scores = []
        for splits in seeds:
            pairs = ((split, split.predictions[rows], split.labels[rows]) for rows, split in zip(drawn, splits))
            scores.append(mean_score(score(metrics, guesses, labels, s.classes) for s, guesses, labels in pairs))
        return sum(scores) / len(scores)

    generator, metrics, gains = torch.Generator().manual_seed(0), tuple(row["metrics"]), []
    for _ in range(resamples):
        drawn = [torch.randint(len(split.labels), (len(split.labels),), generator=generator) for split in ours[0]]
        gains.append(mean_of(theirs, drawn) - mean_of(ours, drawn))
    return of_resamples(other["mean"] - row["mean"], gains)


def read_splits(folder: Path, row: Row) -> list[list[Split]]:
    """Return the splits of a task that each seed predicted. Raises UserError if they cannot be read."""
    seeds = []
    for job in (folder / "jobs" / name for name in row["folders"].values()):
        try:
            result = json.loads((job / RESULT_FILE).read_text())
            classes, texts = result["labels"], result.get("validation_texts", {})
            splits = ((split, predictions.read_tensors(job, split, classes)) for split in result["scores"])
            seeds.append([Split(*tensors, len(classes) or 1, texts.get(split)) for split, tensors in splits])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{job} lacks readable predictions ({error}); repeat its run") from None
    return seeds


def table(runs: dict[str, Run], differences: dict[str, dict[str, Difference | None]], average: Average) -> str:
    """Return one row per task: each run's score, and each later run's difference from the first."""
    first = next(iter(runs))
    lines = [["task", "metric", *runs, *(f"{name} − {first}" for name in differences)]]
    for task, row in {task: row for run in runs.values() for task, row in run.rows.items()}.items():
        found = [run.rows.get(task) for run in runs.values()]
        scores = [f"{spread(row)}{'*' if row['variant'] else ''}" if row else "-" for row in found]
        gaps = [str(of.get(task) or ("other examples" if task in of else "-")) for of in differences.values()]
        lines.append([row["title"], " and ".join(row["metrics"]), *scores, *gaps])
    values = {name: value for name, run in runs.items() if (value := average.of(run.report["tasks"])) is not None}
    if values:
        scores = [average_text(run.report["tasks"], average) for run in runs.values()]
        gaps = {name: f"{100 * (value - values[first]):+.2f}" for name, value in values.items() if first in values}
        lines.append([average.title, "", *scores, *(gaps.get(name, "-") for name in differences)])
    return markdown(lines)
