"""Compare runs with the first one by a paired bootstrap over the validation examples.

For each task: the difference of the scores in points, its 95 % interval and a p value. A resample draws the same
examples for both runs.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from src.cli import progress
from src.errors import UserError, reason
from src.files import write_atomically, write_json
from src.jobs import predictions, report
from src.jobs.experiment import RESULT_FILE, Average, Experiment, mean_score
from src.tables import markdown

RESAMPLES = 1000
NOTE = (
    "Differences from {first} in points, with 95 % interval and two-sided p, by a paired bootstrap of {resamples:,} "
    "resamples over the validation examples: in each, the runs are scored on the same drawn examples, and a run's "
    "seeds are averaged. The spread between seeds is shown with the means; it is not in the interval, and p is not "
    "corrected for the number of tasks."
)
PICKED = "\\* Of a search, picked on these examples: its score and its gain are too high rather than too low."


class Difference(NamedTuple):
    """The difference between two scores, on their own scale of 0 to 1."""

    mean: float
    low: float  # of the 95 % confidence interval
    high: float
    p: float

    def __str__(self) -> str:
        return f"{100 * self.mean:+.2f} [{100 * self.low:+.2f}, {100 * self.high:+.2f}], p = {self.p:.3f}"


class Split(NamedTuple):
    """What a job predicted for one split: class numbers or values, (examples,)."""

    predictions: Any
    labels: Any
    classes: int
    texts: str | None  # digest


Run = dict[str, Any]  # report.json
Differences = dict[str, dict[str, Difference | None]]  # run → task; None if the runs predicted different examples
Score = Callable[..., dict[str, float]]  # Experiment.score


def main(experiment: type[Experiment], argv: list[str]) -> None:
    script, average = experiment.command, experiment.average
    parser = argparse.ArgumentParser(
        prog=f"{script} report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", metavar="DIR", type=Path, nargs="+", help=f"save_folder of a {script} run")
    parser.add_argument("--out", type=Path, help="folder for compare.md, compare.json and compare.png")
    parser.add_argument("--resamples", type=int, default=RESAMPLES, help=f"of the bootstrap (default: {RESAMPLES})")
    arguments = parser.parse_args(argv)
    out, folders = arguments.out, arguments.folders
    if arguments.resamples < 100:
        raise UserError(f"--resamples={arguments.resamples} must be at least 100, which an interval needs")
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out: cannot create {out} ({reason(error)}); choose another folder") from None
    runs = dict(zip(names(folders), [read_report(folder, script) for folder in folders]))
    first = next(iter(runs))
    if len(runs) == 1:
        differences: Differences = {}
        text = f"# {first}\n\n{report.text(runs[first]['tasks'], average, runs[first].get('failed', ()))}"
    else:
        differences = compare(runs, folders, arguments.resamples, experiment.score)
        notes = [table(runs, differences, average), NOTE.format(first=first, resamples=arguments.resamples)]
        if any(row["variant"] for run in runs.values() for row in run["tasks"]):
            notes.append(PICKED)
        failed = {name: "; ".join(run.get("failed", ())) for name, run in runs.items()}
        text = "\n\n".join(notes + [f"{name} lacks jobs that failed: {jobs}" for name, jobs in failed.items() if jobs])
    print(f"\n{text}\n")
    if out is not None:
        shown = {run: {task: d._asdict() for task, d in of_run.items() if d} for run, of_run in differences.items()}
        with report.writing(out):
            write_atomically(out / "compare.md", f"{text}\n")
            write_json(out / "compare.json", {"runs": runs, "differences": shown})
            report.draw([(name, run["tasks"]) for name, run in runs.items()], out / "compare.png")
        print(f"table    {out / 'compare.md'}, compare.json\npicture  {out / 'compare.png'}")


def names(folders: list[Path]) -> list[str]:
    """Return a name for each run: its folder's name, or its path if two folders share a name."""
    resolved = [folder.resolve() for folder in folders]
    if len(set(resolved)) < len(resolved):
        raise UserError("report: a folder is named twice; name each once")
    short = [path.name for path in resolved]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def read_report(folder: Path, script: str) -> Run:
    path = folder / "report.json"
    try:
        run = json.loads(path.read_text())
        if not run["tasks"]:
            raise UserError(f"{folder} has no scores, since all of its jobs failed; repeat its {script} run")
        return run
    except OSError as error:
        raise UserError(
            f"cannot read {path} ({reason(error)}); give the save_folder of a finished {script} run"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is corrupt; repeat its {script} run, which writes it again") from None


def compare(runs: dict[str, Run], folders: list[Path], resamples: int, score: Score) -> Differences:
    """Return the difference between each later run and the first, by run and task."""
    first, *others = runs
    folder = dict(zip(runs, folders))
    differences: Differences = {other: {} for other in others}
    rows = {name: {row["task"]: row for row in run["tasks"]} for name, run in runs.items()}
    pairs = [(task, other) for task in rows[first] for other in others if task in rows[other]]
    for task, other in progress(pairs, desc="bootstrap"):
        ours, theirs = (read_splits(folder[name], rows[name][task]) for name in (first, other))
        if rows[first][task]["metrics"] == rows[other][task]["metrics"] and same_examples(ours[0], theirs[0]):
            gain = rows[other][task]["mean"] - rows[first][task]["mean"]
            metrics = tuple(rows[first][task]["metrics"])
            differences[other][task] = Difference(gain, *bootstrap(ours, theirs, metrics, resamples, score))
        else:
            differences[other][task] = None
    return differences


def read_splits(folder: Path, row: dict[str, Any]) -> list[list[Split]]:
    """Return the splits of a task that each seed predicted. Raises UserError if they cannot be read."""
    seeds = []
    for name in row["folders"].values():
        job = folder / "jobs" / name
        try:
            result = json.loads((job / RESULT_FILE).read_text())
            classes, texts = result["labels"], result.get("validation_texts", {})
            splits = ((split, predictions.read_tensors(job, split, classes)) for split in result["scores"])
            seeds.append([Split(*tensors, len(classes) or 1, texts.get(split)) for split, tensors in splits])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{job} lacks readable predictions ({error}); repeat its run") from None
    return seeds


def same_examples(ours: list[Split], theirs: list[Split]) -> bool:
    """Compare splits by position, since their names differ between sources."""
    return len(ours) == len(theirs) and all(
        one.labels.tolist() == other.labels.tolist() and (one.texts == other.texts or None in (one.texts, other.texts))
        for one, other in zip(ours, theirs)
    )


def bootstrap(
    ours: list[list[Split]], theirs: list[list[Split]], metrics: tuple[str, ...], resamples: int, score: Score
) -> tuple[float, float, float]:
    """Return the 95 % interval and p-value of the second run's score minus the first's, over all seeds of each."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def mean_of(seeds: list[list[Split]], drawn: list[torch.Tensor]) -> float:
        scores = []
        for splits in seeds:
            of_split = {}
            for number, (rows, split) in enumerate(zip(drawn, splits)):
                of_split[str(number)] = score(metrics, split.predictions[rows], split.labels[rows], split.classes)
            scores.append(mean_score(of_split))
        return sum(scores) / len(scores)

    gains = []
    for _ in range(resamples):
        drawn = [torch.randint(len(split.labels), (len(split.labels),), generator=generator) for split in ours[0]]
        gains.append(mean_of(theirs, drawn) - mean_of(ours, drawn))
    values = torch.tensor(gains, dtype=torch.float64)
    low, high = torch.quantile(values, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    # How often a resample shows the opposite sign; 1 added to each count keeps p above 0 (Davison & Hinkley 1997, 4.2).
    opposite = min(int((values <= 0).sum()), int((values >= 0).sum()))
    return low, high, min(1.0, 2 * (opposite + 1) / (resamples + 1))


def table(runs: dict[str, Run], differences: Differences, average: Average) -> str:
    """Return one row per task: each run's score, and each later run's difference from the first."""
    rows = {name: {row["task"]: row for row in run["tasks"]} for name, run in runs.items()}
    tasks = {row["task"]: row for run in runs.values() for row in run["tasks"]}
    first = next(iter(runs))
    lines = [["task", "metric", *runs, *(f"{name} − {first}" for name in differences)]]
    for task, row in tasks.items():
        found = [of_run.get(task) for of_run in rows.values()]
        scores = [f"{report.spread(row)}{'*' if row['variant'] else ''}" if row else "-" for row in found]
        gaps = [str(of.get(task) or ("other examples" if task in of else "-")) for of in differences.values()]
        lines.append([row["title"], " and ".join(row["metrics"]), *scores, *gaps])
    values = {name: run[average.key] for name, run in runs.items() if run.get(average.key) is not None}
    if values:
        texts = {name: report.average_text(value, runs[name]["tasks"], average) for name, value in values.items()}
        gaps = {name: f"{100 * (value - values[first]):+.2f}" for name, value in values.items() if first in values}
        shown = [texts.get(name, "-") for name in runs] + [gaps.get(name, "-") for name in differences]
        lines.append([average.title, "", *shown])
    return markdown(lines)
