"""Several fine-tuning runs side by side:  python glue.py report DIR [DIR ...] [--out DIR]

Every run against the first: the difference of the scores in points, its 95 % interval and a p value, by a paired bootstrap
over the examples of the validation sets, with both runs' predictions of the same examples drawn together.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.cli import progress
from src.errors import UserError
from src.jobs import report
from src.tables import markdown

RESAMPLES = 1000
NOTE = (
    "Differences against {first} in points, with 95 % interval and two-sided p, by a paired bootstrap of {resamples:,} resamples "
    "over the validation examples: in each, the runs are scored on the same drawn examples, and a run's seeds are averaged. "
    "The spread between seeds stands beside the means; it is not in the interval, and p is not corrected for the number of tasks."
)
PICKED = "\\* Of a search, picked on these examples: its score, and what it gains, are too high rather than too low."


@dataclass(frozen=True)
class Difference:
    """Of two scores, in the unit of the scores, 0 to 1."""

    mean: float
    low: float  # of the 95 % interval
    high: float
    p: float

    def __str__(self) -> str:
        return f"{100 * self.mean:+.2f} [{100 * self.low:+.2f}, {100 * self.high:+.2f}], p = {self.p:.3f}"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="glue.py report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", metavar="DIR", type=Path, nargs="+", help="save_folder of a fine-tuning run")
    parser.add_argument("--out", type=Path, help="folder for compare.md, compare.json and compare.png")
    parser.add_argument("--resamples", type=int, default=RESAMPLES, help=f"of the bootstrap (default: {RESAMPLES})")
    arguments = parser.parse_args(argv)
    if arguments.resamples < 100:
        raise UserError(f"--resamples {arguments.resamples}: an interval needs 100 or more")
    if arguments.out is not None:
        try:
            arguments.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out: {arguments.out} cannot be made a folder ({error.strerror or error}); name another") from None  # fmt: skip
    runs = dict(zip(names(arguments.folders), map(read_report, arguments.folders)))
    if len(runs) == 1:
        ((name, run),) = runs.items()
        text = f"# {name}\n\n{report.text(run['tasks'], run.get('failed', ()))}"
        differences: dict[str, Any] = {}
    else:
        differences = compare(runs, arguments.folders, arguments.resamples)
        notes = [NOTE.format(first=next(iter(runs)), resamples=arguments.resamples)]
        if any(row["variant"] for run in runs.values() for row in run["tasks"]):
            notes.append(PICKED)
        notes += [f"{name} lacks jobs that failed: {'; '.join(run['failed'])}" for name, run in runs.items() if run.get("failed")]  # fmt: skip
        text = "\n\n".join((table(runs, differences), *notes))
    print(f"\n{text}\n")
    if arguments.out is not None:
        content = {"runs": runs, "differences": {run: {task: vars(d) for task, d in of_run.items() if d} for run, of_run in differences.items()}}  # fmt: skip
        with report.writing(arguments.out):
            (arguments.out / "compare.md").write_text(f"{text}\n", encoding="utf-8")
            (arguments.out / "compare.json").write_text(json.dumps(content, indent=1))
            report.draw([(name, run["tasks"]) for name, run in runs.items()], arguments.out / "compare.png")
        print(f"table    {arguments.out / 'compare.md'}, compare.json\npicture  {arguments.out / 'compare.png'}")


def names(folders: list[Path]) -> list[str]:
    """What to call each run: its folder's name, or its path where two have the same."""
    resolved = [folder.resolve() for folder in folders]
    if len(set(resolved)) < len(resolved):
        raise UserError("report: a folder is named twice; name each once")
    short = [path.name for path in resolved]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def read_report(folder: Path) -> dict[str, Any]:
    try:
        run = json.loads((folder / "report.json").read_text())
        if not run["tasks"]:
            raise UserError(f"{folder} has no scores, since all of its jobs failed; repeat its glue.py")
        return run
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder} holds no report.json; give the save_folder of a glue.py that has ended") from None
    except OSError as error:
        raise UserError(f"{folder / 'report.json'} cannot be read ({error.strerror or error}); mend that, or name another folder") from None  # fmt: skip
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{folder / 'report.json'} is damaged; repeat its glue.py, which writes it again") from None


def compare(runs: dict[str, dict], folders: list[Path], resamples: int) -> dict[str, dict[str, Difference | None]]:
    """Run → task → its difference from the first run's; None where the two did not predict the same examples."""
    first, *others = runs
    places = dict(zip(runs, folders))
    differences: dict[str, dict[str, Difference | None]] = {other: {} for other in others}
    rows = {name: {row["task"]: row for row in run["tasks"]} for name, run in runs.items()}
    pairs = [(task, other) for task in rows[first] for other in others if task in rows[other]]
    for task, other in progress(pairs, desc="bootstrap"):
        ours, theirs = (read_predictions(places[name], rows[name][task]) for name in (first, other))
        differences[other][task] = difference(ours, theirs, rows[first][task], rows[other][task], resamples)
    return differences


def read_predictions(folder: Path, row: dict[str, Any]) -> dict[str, list[tuple]]:
    """Seed → (predictions, labels, classes, digest of the texts) of each split of a task; the first two are arrays."""
    import torch

    found: dict[str, list[tuple]] = {}
    for seed, name in row["folders"].items():
        place = folder / "jobs" / name
        try:
            result = json.loads((place / "result.json").read_text())
            for split in result["scores"]:
                read = report.predictions(place, split)
                logits = torch.tensor([line["logits"] for line in read])
                guesses = logits.argmax(-1) if logits.ndim == 2 else logits
                labels = torch.tensor([line["label"] for line in read])
                texts = result.get("validation_texts", {}).get(split)
                found.setdefault(seed, []).append((guesses, labels, len(result["labels"]) or 1, texts))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{place} lacks predictions that can be read ({error}); repeat its glue.py") from None
    return found


def difference(ours: dict, theirs: dict, our_row: dict, their_row: dict, resamples: int) -> Difference | None:
    """The second run's score less the first's, over all seeds of each, by a paired bootstrap over the examples."""
    import torch

    from src.glue.scores import mean_score, score

    one, other = next(iter(ours.values())), next(iter(theirs.values()))
    # In the order of the splits, whose names are others on the Hub than in GLUE's files.
    same = our_row["metrics"] == their_row["metrics"] and len(one) == len(other)
    for (_, labels, _, texts), (_, other_labels, _, other_texts) in zip(one, other):
        same = same and torch.equal(labels, other_labels) and (texts == other_texts or None in (texts, other_texts))
    if not same:
        return None
    metrics, generator = tuple(our_row["metrics"]), torch.Generator().manual_seed(0)

    def mean_of(seeds: dict[str, list[tuple]], drawn: list[torch.Tensor]) -> float:
        scores = [
            mean_score({
                str(number): score(metrics, guesses[rows], labels[rows], classes)
                for number, (rows, (guesses, labels, classes, _)) in enumerate(zip(drawn, splits))
            })
            for splits in seeds.values()
        ]  # fmt: skip
        return sum(scores) / len(scores)

    found = []
    for _ in range(resamples):
        drawn = [torch.randint(len(labels), (len(labels),), generator=generator) for _, labels, _, _ in one]
        found.append(mean_of(theirs, drawn) - mean_of(ours, drawn))
    values = torch.tensor(found, dtype=torch.float64)
    low, high = torch.quantile(values, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    # How often a resample says the contrary; with one added to each count, p is never 0 (Davison & Hinkley 1997, 4.2).
    contrary = min(int((values <= 0).sum()), int((values >= 0).sum()))
    p = min(1.0, 2 * (contrary + 1) / (resamples + 1))
    return Difference(their_row["mean"] - our_row["mean"], low, high, p)


def score_of(row: dict[str, Any] | None) -> str:
    return "-" if row is None else f"{report.spread(row)}{'*' if row['variant'] else ''}"


def table(runs: dict[str, dict], differences: dict[str, dict[str, Difference | None]]) -> str:
    """A row a task: each run's score, and each later run's difference from the first's."""
    rows = {name: {row["task"]: row for row in run["tasks"]} for name, run in runs.items()}
    tasks = {row["task"]: row for run in runs.values() for row in run["tasks"]}
    lines = [["task", "metric", *runs, *(f"{name} − {next(iter(runs))}" for name in differences)]]
    for task, row in tasks.items():
        scores = [score_of(rows[name].get(task)) for name in runs]
        told = [
            str(of_run.get(task) or ("other examples" if task in of_run else "-")) for of_run in differences.values()
        ]
        lines.append([row["title"], " and ".join(row["metrics"]), *scores, *told])
    averages = [run["glue"] for run in runs.values()]
    if any(average is not None for average in averages):
        shown = ["-" if run["glue"] is None else report.average(run["glue"], run["tasks"]) for run in runs.values()]
        gaps = ["-" if None in (average, averages[0]) else f"{100 * (average - averages[0]):+.2f}" for average in averages[1:]]  # fmt: skip
        lines.append(["GLUE average", "", *shown, *gaps])
    return markdown(lines)
