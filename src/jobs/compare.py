"""Compare runs: every run against the first, by a paired bootstrap over the validation examples.

For each task: the difference of the scores in points, its 95 % interval and a p value. A resample draws the same examples
for both runs.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.cli import progress
from src.errors import UserError, reason
from src.files import write_atomically, write_json
from src.jobs import predictions, report
from src.jobs.experiment import Average, Experiment, mean_score
from src.jobs.jobs import RESULT_FILE
from src.tables import markdown

if TYPE_CHECKING:
    from torch import Tensor

RESAMPLES = 1000
NOTE = (
    "Differences from {first} in points, with 95 % interval and two-sided p, by a paired bootstrap of {resamples:,} "
    "resamples over the validation examples: in each, the runs are scored on the same drawn examples, and a run's seeds are "
    "averaged. The spread between seeds is shown with the means; it is not in the interval, and p is not corrected for the "
    "number of tasks."
)
PICKED = "\\* Of a search, picked on these examples: its score and its gain are too high rather than too low."


@dataclass(frozen=True)
class Difference:
    """Of two scores, in the unit of the scores, 0 to 1."""

    mean: float
    low: float  # of the 95 % interval
    high: float
    p: float

    def __str__(self) -> str:
        return f"{100 * self.mean:+.2f} [{100 * self.low:+.2f}, {100 * self.high:+.2f}], p = {self.p:.3f}"


@dataclass(frozen=True)
class Split:
    """What a job predicted for one split."""

    predictions: "Tensor"  # (examples,), class numbers or values; as are the labels
    labels: "Tensor"
    classes: int
    texts: str | None  # digest


Differences = dict[str, dict[str, Difference | None]]  # run → task; None if the runs predicted other examples
Score = Callable[..., dict[str, float]]  # Experiment.score


def main(experiment: type[Experiment], argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=f"{experiment.command} report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folders", metavar="DIR", type=Path, nargs="+", help=f"save_folder of a {experiment.command} run"
    )
    parser.add_argument("--out", type=Path, help="folder for compare.md, compare.json and compare.png")
    parser.add_argument("--resamples", type=int, default=RESAMPLES, help=f"of the bootstrap (default: {RESAMPLES})")
    arguments = parser.parse_args(argv)
    if arguments.resamples < 100:
        raise UserError(f"--resamples={arguments.resamples} must be at least 100, which an interval needs")
    if arguments.out is not None:
        try:
            arguments.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out: cannot create {arguments.out} ({reason(error)}); choose another folder") from None
    reports = [read_report(folder, experiment.command) for folder in arguments.folders]
    runs = dict(zip(names(arguments.folders), reports))
    average = experiment.average
    differences: Differences = {}
    if len(runs) == 1:
        ((name, run),) = runs.items()
        text = f"# {name}\n\n{report.text(run['tasks'], average, run.get('failed', ()))}"
    else:
        differences = compare(runs, arguments.folders, arguments.resamples, experiment.score)
        notes = [NOTE.format(first=next(iter(runs)), resamples=arguments.resamples)]
        if any(row["variant"] for run in runs.values() for row in run["tasks"]):
            notes.append(PICKED)
        for name, run in runs.items():
            if run.get("failed"):
                notes.append(f"{name} lacks jobs that failed: {'; '.join(run['failed'])}")
        text = "\n\n".join((table(runs, differences, average), *notes))
    print(f"\n{text}\n")
    if arguments.out is not None:
        shown = {run: {task: vars(d) for task, d in of_run.items() if d} for run, of_run in differences.items()}
        with report.writing(arguments.out):
            write_atomically(arguments.out / "compare.md", f"{text}\n")
            write_json(arguments.out / "compare.json", {"runs": runs, "differences": shown})
            report.draw([(name, run["tasks"]) for name, run in runs.items()], arguments.out / "compare.png")
        print(f"table    {arguments.out / 'compare.md'}, compare.json\npicture  {arguments.out / 'compare.png'}")


def names(folders: list[Path]) -> list[str]:
    """Return a name for each run: its folder's name, or its path if two have the same."""
    resolved = [folder.resolve() for folder in folders]
    if len(set(resolved)) < len(resolved):
        raise UserError("report: a folder is named twice; name each once")
    short = [path.name for path in resolved]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def read_report(folder: Path, script: str) -> dict[str, Any]:
    path = folder / "report.json"
    try:
        run = json.loads(path.read_text())
        if run["tasks"]:
            return run
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder} has no report.json; give the save_folder of a finished {script} run") from None
    except OSError as error:
        raise UserError(f"cannot read {path} ({reason(error)}); fix that or give another folder") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is corrupt; repeat its {script} run, which writes it again") from None
    raise UserError(f"{folder} has no scores, since all of its jobs failed; repeat its {script} run")


def compare(runs: dict[str, dict], folders: list[Path], resamples: int, score: Score) -> Differences:
    """Return the difference of each later run from the first, by run and task."""
    first, *others = runs
    folder = dict(zip(runs, folders))
    differences: Differences = {other: {} for other in others}
    rows = {name: {row["task"]: row for row in run["tasks"]} for name, run in runs.items()}
    pairs = [(task, other) for task in rows[first] for other in others if task in rows[other]]
    for task, other in progress(pairs, desc="bootstrap"):
        ours, theirs = (read_splits(folder[name], rows[name][task]) for name in (first, other))
        differences[other][task] = difference(ours, theirs, rows[first][task], rows[other][task], resamples, score)
    return differences


def read_splits(folder: Path, row: dict[str, Any]) -> dict[str, list[Split]]:
    """Return the splits of a task that each seed predicted. Raises UserError if they cannot be read."""
    found: dict[str, list[Split]] = {}
    for seed, name in row["folders"].items():
        job = folder / "jobs" / name
        try:
            result = json.loads((job / RESULT_FILE).read_text())
            for split in result["scores"]:
                guesses, labels = predictions.read_tensors(job, split, result["labels"])
                texts = result.get("validation_texts", {}).get(split)
                found.setdefault(seed, []).append(Split(guesses, labels, len(result["labels"]) or 1, texts))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{job} lacks readable predictions ({error}); repeat its run") from None
    return found


def same_examples(ours: list[Split], theirs: list[Split]) -> bool:
    """Compare splits in their order: their names differ between the Hub and GLUE's files."""
    import torch

    return len(ours) == len(theirs) and all(
        torch.equal(one.labels, other.labels) and (one.texts == other.texts or None in (one.texts, other.texts))
        for one, other in zip(ours, theirs)
    )


def difference(
    ours: dict[str, list[Split]],
    theirs: dict[str, list[Split]],
    our_row: dict,
    their_row: dict,
    resamples: int,
    score: Score,
) -> Difference | None:
    """Return the second run's score minus the first's, over all seeds of each, by a paired bootstrap over the examples."""
    import torch

    one, other = next(iter(ours.values())), next(iter(theirs.values()))
    if our_row["metrics"] != their_row["metrics"] or not same_examples(one, other):
        return None
    metrics, generator = tuple(our_row["metrics"]), torch.Generator().manual_seed(0)

    def mean_of(seeds: dict[str, list[Split]], drawn: list[torch.Tensor]) -> float:
        scores = []
        for splits in seeds.values():
            resampled = [
                (split.predictions[rows], split.labels[rows], split.classes) for rows, split in zip(drawn, splits)
            ]
            scores.append(mean_score({str(i): score(metrics, *arguments) for i, arguments in enumerate(resampled)}))
        return sum(scores) / len(scores)

    found = []
    for _ in range(resamples):
        drawn = [torch.randint(len(split.labels), (len(split.labels),), generator=generator) for split in one]
        found.append(mean_of(theirs, drawn) - mean_of(ours, drawn))
    values = torch.tensor(found, dtype=torch.float64)
    low, high = torch.quantile(values, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    # How often a resample shows the opposite; with 1 added to each count, p is never 0 (Davison & Hinkley 1997, 4.2).
    opposite = min(int((values <= 0).sum()), int((values >= 0).sum()))
    p = min(1.0, 2 * (opposite + 1) / (resamples + 1))
    return Difference(their_row["mean"] - our_row["mean"], low, high, p)


def table(runs: dict[str, dict], differences: Differences, average: Average) -> str:
    """Return a row per task: each run's score, and each later run's difference from the first."""

    def score_of(row: dict[str, Any] | None) -> str:
        return "-" if row is None else f"{report.spread(row)}{'*' if row['variant'] else ''}"

    rows = {name: {row["task"]: row for row in run["tasks"]} for name, run in runs.items()}
    tasks = {row["task"]: row for run in runs.values() for row in run["tasks"]}
    lines = [["task", "metric", *runs, *(f"{name} − {next(iter(runs))}" for name in differences)]]
    for task, row in tasks.items():
        scores = [score_of(rows[name].get(task)) for name in runs]
        gaps = [str(of.get(task) or ("other examples" if task in of else "-")) for of in differences.values()]
        lines.append([row["title"], " and ".join(row["metrics"]), *scores, *gaps])
    values = {name: run.get(average.key) for name, run in runs.items()}
    if any(value is not None for value in values.values()):
        first, *others = values.values()
        shown = ["-" if values[name] is None else report.average_text(values[name], run["tasks"], average)
                 for name, run in runs.items()]  # fmt: skip
        gaps = ["-" if None in (value, first) else f"{100 * (value - first):+.2f}" for value in others]
        lines.append([average.title, "", *shown, *gaps])
    return markdown(lines)
