"""Job results → a table, JSON and a plot; and the `report` command, which compares runs."""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from src import plots
from src.cli import progress
from src.config import Rule, check_value
from src.errors import RunFailed, UserError, reason
from src.files import check_writable, write_atomically, write_json
from src.jobs import curves, predictions
from src.jobs.comparison import Difference, of_resamples
from src.jobs.experiment import RESULT_FILE, Average, Experiment, Result, Row, mean_score
from src.publish.card import missing_seeds
from src.tables import markdown, mean_of

Averages = Sequence[Average]
HELP = (
    "Print the report of a run, or compare runs with the first one: for each task, the difference in score in points, "
    "with its 95% confidence interval and two-sided p-value, from a paired bootstrap over the {scored_on} examples."
)
COMPARED = (
    "Differences from {first} in points, with 95% confidence interval and two-sided p-value, by a paired bootstrap of "
    "{resamples:,} resamples over the {scored_on} examples: in each, the runs are scored on the same drawn examples, "
    "and a run's seeds are averaged. The spread between seeds is shown with the means; it is not in the interval, and "
    "the p-value is not corrected for the number of tasks."
)


def write(results: list[Result], averages: Averages, folder: Path, name: str, failures: Sequence = ()) -> list[Row]:
    """Write report.md, report.json, report.png and curves.png into a run's folder, and return the rows."""
    rows = summarize(results, averages)
    with writing(folder):
        values = {average.key: average.of(rows) for average in averages}
        write_json(folder / "report.json", {"run": name, "tasks": rows, **values, "failed": list(failures)})
        write_atomically(folder / "report.md", f"# {name}\n\n{text(rows, averages, failures)}\n")
        if rows:
            draw([(name, rows)], folder / "report.png")
            curves.draw({name: (folder, rows)}, folder / "curves.png")
    return rows


def summarize(results: Sequence[Result], averages: Averages) -> list[Row]:
    """Return one row per task: mean and standard deviation over seeds, each seed, and the majority class's score. A
    search's row is the candidate with the highest mean among those with the most seeds, and lists all; it is the mean
    of the `selection`, if results have one."""
    tasks: dict[str, dict[str, Row]] = {}  # task → variant → row
    for result in results:
        row = {name: result[name] for name in ("task", "title", "metrics", "majority")}
        row |= {"variant": result.get("variant", ""), "seeds": {}, "folders": {}, "of": result.get("of", 0)}
        row |= {average.key: average.counts(result) for average in averages}
        row = tasks.setdefault(row["task"], {}).setdefault(row["variant"], row)
        row["seeds"][str(result["seed"])] = result["score"]
        row["folders"][str(result["seed"])] = result["folder"]
        scores = list(row["seeds"].values())
        row["mean"], row["std"] = mean(scores), stdev(scores) if len(scores) > 1 else None
        if "selection" in result:
            row.setdefault("selection", {})[str(result["seed"])] = result["selection"]
        if result.get("at_chance"):
            row.setdefault("at_chance", []).append(str(result["seed"]))
        if notes := [note for note in result.get("notes", ()) if note not in row.get("notes", ())]:
            row.setdefault("notes", []).extend(notes)
    rows = []
    for variants in tasks.values():
        selected = all(row.get("selection", {}).keys() == row["seeds"].keys() for row in variants.values())
        compared = selection if selected else itemgetter("mean")
        best = dict(max(variants.values(), key=lambda row: (len(row["seeds"]), compared(row))))
        if best["variant"]:
            keys = {"variant", "mean", "std", "seeds", "of", "at_chance", *(["selection"] if selected else [])}
            best["candidates"] = [{key: row[key] for key in row if key in keys} for row in variants.values()]
        rows.append(best)
    return rows


def selection(row: Row) -> float:
    """Return the mean over seeds by which a candidate was picked on a validation set that it is not scored on."""
    return mean(row["selection"].values())


def text(rows: list[Row], averages: Averages, failures: Sequence[str] = ()) -> str:
    """Return the table, the averages, remarks, what failed, and the candidates of each search."""
    lines = [["task", "metric", "majority class", "score", "seeds"]]
    searches = []
    for row in rows:
        title = f"{row['title']}{'*' if row['variant'] else ''}"
        lines.append([title, mean_of(row["metrics"]), f"{100 * row['majority']:.2f}", spread(row), seeds(row)])
        for other in row.get("candidates", ()):
            picked = ", picked" if other["variant"] == row["variant"] else ""
            validation = f"{100 * selection(other):.2f}" if "selection" in other else "-"
            searches.append([row["title"], f"{other['variant']}{picked}", validation, spread(other), seeds(other)])
    parts = [markdown(lines)] if rows else []
    for average in averages:
        counted = {row["task"] for row in rows if average.counts(row)}
        if counted & average.tasks.keys():
            missing = ", ".join(title for name, title in average.tasks.items() if name not in counted)
            value = f"not computed, lacks {missing}" if missing else average_text(rows, average)
            parts.append(f"{average.title}: {value}")
    parts += remarks({"": rows})
    if failures:
        parts.append("\n".join(["Failed, and not in the scores:", *(f"- {failure}" for failure in failures)]))
    if searches:
        header = ["search", "candidate", "validation", "score", "seeds"]
        if all(validation == "-" for _, _, validation, *_ in searches):
            header, *searches = [[*line[:2], *line[3:]] for line in [header, *searches]]
        picked = "\\* Picked from the candidates below on the validation set"
        parts.append(f"{picked}{'.' if is_unbiased(rows) else ' itself, so its score is biased upwards.'}")
        parts.append(markdown([header, *searches]))
    return "\n\n".join(parts)


def is_unbiased(rows: Iterable[Row]) -> bool:
    """Return whether no search has picked by the scores."""
    return all("selection" in candidate for row in rows for candidate in row.get("candidates", ()))


def remarks(runs: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return what has to be known with the scores of runs: which are at chance, and each note with its tasks."""
    titles, chance, notes = Counter(row["title"] for rows in runs.values() for row in rows), [], {}
    for name, rows in runs.items():
        for row in rows:
            if found := row.get("at_chance"):
                numbers = " and ".join(filter(None, (", ".join(found[:-1]), found[-1])))
                of = f" of {name}" if len(runs) > 1 else ""
                chance.append(f"{row['title']}{of}, seed{'s' * (len(found) > 1)} {numbers}")
            for note in row.get("notes", ()):
                notes.setdefault(note, {}).setdefault(row["title"], []).append(name)
    parts = [f"At chance, no better than one answer to all: {'; '.join(chance)}."] if chance else []
    lines = ["Notes:"]
    for note, of in notes.items():
        tasks = (t if len(names) == titles[t] else f"{t} of {', '.join(names)}" for t, names in of.items())
        lines.append(f"- {', '.join(tasks)}: {note}")
    return parts + (["\n".join(lines)] if notes else [])


def spread(row: Row) -> str:
    """Return mean ± standard deviation in points, and the number of seeds if some failed."""
    deviation = "" if row["std"] is None else f" ± {100 * row['std']:.2f}"
    return f"{100 * row['mean']:.2f}{deviation}{f' ({missing})' if (missing := missing_seeds(row)) else ''}"


def seeds(row: Row) -> str:
    chance = row.get("at_chance", ())
    return ", ".join(f"{100 * score:.2f}{' (chance)' * (seed in chance)}" for seed, score in row["seeds"].items())


def average_text(rows: list[Row], average: Average) -> str:
    """Return the average in points, if there is one, and the tasks that lack seeds or are at chance."""
    if (value := average.of(rows)) is None:
        return "-"
    flaws = []
    for row in filter(average.counts, rows):
        if missing := missing_seeds(row):
            flaws.append(f"{row['title']}: {missing}")
        if chance := len(row.get("at_chance", ())):
            total = len(row["seeds"])
            flaws.append(f"{row['title']}{f': {chance} of {total} seeds' if chance < total else ''} at chance")
    return f"{100 * value:.2f}" + (f" ({', '.join(flaws)})" if flaws else "")


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
    script, averages, scored_on = experiment.command, experiment.averages, experiment.scored_on
    parser = argparse.ArgumentParser(prog=f"{script} report", description=HELP.format(scored_on=scored_on))
    parser.add_argument("folders", metavar="DIR", type=Path, nargs="+", help=f"save_folder of a {script} run")
    parser.add_argument("--out", type=Path, help="folder for compare.md, compare.json, compare.png and curves.png")
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
        compared = COMPARED.format(first=first, resamples=resamples, scored_on=scored_on)
        parts = [table(runs, differences, averages), compared]
        parts += remarks({name: run.report["tasks"] for name, run in runs.items()})
        if picked := [row for run in runs.values() for row in run.rows.values() if row["variant"]]:
            biased = "on these examples, so its score and its gain are biased upwards."
            parts.append(f"\\* Picked by a search {'on the validation set.' if is_unbiased(picked) else biased}")
        failed = {name: "; ".join(run.report.get("failed", ())) for name, run in runs.items()}
        parts += [f"{name} lacks jobs that failed: {jobs}" for name, jobs in failed.items() if jobs]
    else:
        parts = [f"# {first}", text(base.report["tasks"], averages, base.report.get("failed", ()))]
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
            each = {name: (run.folder, run.report["tasks"]) for name, run in runs.items()}
            drawn = ", curves.png" * curves.draw(each, out / "curves.png")
        print(f"table    {out / 'compare.md'}, compare.json\npicture  {out / 'compare.png'}{drawn}")


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
            classes, texts = result["labels"], result.get("validation_texts", {}) | result.get("test_texts", {})
            splits = ((split, predictions.read_tensors(job, split, classes)) for split in result["scores"])
            seeds.append([Split(*tensors, len(classes) or 1, texts.get(split)) for split, tensors in splits])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{job} lacks readable predictions ({error}); repeat its run") from None
    return seeds


def table(runs: dict[str, Run], differences: dict[str, dict[str, Difference | None]], averages: Averages) -> str:
    """Return one row per task: each run's score, and each later run's difference from the first."""
    first = next(iter(runs))
    lines = [["task", "metric", *runs, *(f"{name} − {first}" for name in differences)]]
    for task, row in {task: row for run in runs.values() for task, row in run.rows.items()}.items():
        found = [run.rows.get(task) for run in runs.values()]
        scores = [f"{spread(row)}{'*' if row['variant'] else ''}" if row else "-" for row in found]
        gaps = [str(of.get(task) or ("other examples" if task in of else "-")) for of in differences.values()]
        lines.append([row["title"], mean_of(row["metrics"]), *scores, *gaps])
    for average in averages:
        values = {name: value for name, run in runs.items() if (value := average.of(run.report["tasks"])) is not None}
        if values:
            scores = [average_text(run.report["tasks"], average) for run in runs.values()]
            gaps = {name: f"{100 * (value - values[first]):+.2f}" for name, value in values.items() if first in values}
            lines.append([average.title, "", *scores, *(gaps.get(name, "-") for name in differences)])
    return markdown(lines)
