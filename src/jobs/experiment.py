"""What a command with many short runs provides; src/jobs does the rest."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

RESULT_FILE, LOG_FILE = "result.json", "log.txt"
Result = dict[str, Any]  # of a job
Row = dict[str, Any]  # of a report: the scores of a task


@dataclass(frozen=True)
class Job:
    """A training run of one task with one seed, in its own folder."""

    task: Any  # with name, title, seeds, and variant: the values that a search gives it, or ""
    seed: int
    folder: Path
    settings: dict[str, Any]  # everything that its result depends on, in JSON types
    after: "Job | None" = None  # the job whose model it starts from
    cost: int = 0  # of training, in any unit

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.task.title, self.task.variant, f"seed {self.seed}")))

    def read_result(self) -> Result:
        return json.loads((self.folder / RESULT_FILE).read_text())


@dataclass(frozen=True)
class Average:
    """The mean over a benchmark's tasks. A result or row says by `key` if it counts; else its task's name decides."""

    key: str
    title: str
    tasks: Mapping[str, str]  # name → title

    def counts(self, row: Row) -> bool:
        return row.get(self.key, row["task"] in self.tasks)

    def of(self, rows: list[Row]) -> float | None:
        """Return the average, or None if any task has no score."""
        scores = {row["task"]: row["mean"] for row in rows if self.counts(row)}
        return mean(scores[name] for name in self.tasks) if self.tasks.keys() <= scores.keys() else None


class Experiment(ABC):
    """Many short runs from one config with save_folder, base_run_name, device, parallel, rerun and progress_bar. Each
    job's process gets a pickled copy. The module must not import torch: `check_paths` must report errors quickly."""

    command: ClassVar[str]  # the script, for messages
    example: ClassVar[str]  # its arguments, for --help
    schema: ClassVar[type]  # of the config
    preload: ClassVar[str]  # the module with the imports that every job needs
    average: ClassVar[Average]
    start_name = "random weights"  # what the jobs start from; `plan` may set it

    def __init__(self, config: Any):
        self.config, self.folder = config, Path(config.save_folder)

    @abstractmethod
    def check_paths(self) -> None:
        """Raise UserError for an invalid config or path, before any import that takes seconds."""

    def check_sections(self) -> None:  # noqa: B027
        """Raise UserError for a mistake in the config that takes imports of seconds to find; for `plan`, and a dry
        run."""

    @abstractmethod
    def plan(self, device: str) -> list[Job]:
        """Return all jobs for a device, gpu or cpu. Raises UserError for anything that would make a job fail."""

    @abstractmethod
    def cost(self, job: Job) -> int:
        """Return a job's cost. Reads all of its data, so that a bad row is reported before any job runs."""

    @abstractmethod
    def run(self, job: Job, device: str, steps: Any) -> Result:
        """Train, score and write predictions, in the job's process; `steps` is a pool.StepReporter. Return task, title,
        variant, seed, folder (its name), metrics, score and majority (of the job and of the majority class, 0 to 1),
        scores (split → metric → value), labels (classes; empty for a regression), the average's key, and more."""

    @abstractmethod
    def files(self, job: Job, result: Result) -> list[str] | None:
        """Return the files that a finished job must have; None if its result lacks what the config asks for."""

    def origin(self, settings: dict[str, Any]) -> Any:
        """Return the part of a job's settings that all results in a folder must share."""
        return None

    def finish(self, rows: list[Row]) -> None:  # noqa: B027
        """Write and print what needs the results of all jobs."""

    @staticmethod
    @abstractmethod
    def score(metrics: tuple[str, ...], predictions: Any, labels: Any, classes: int) -> dict[str, float]:
        """Compute metrics of predictions, (examples,): class indices, or regression values."""


def mean_score(scores: Iterable[Mapping[str, float]]) -> float:
    """Return the mean over splits and metrics, which is the score of a job."""
    values = [value for metrics in scores for value in metrics.values()]
    return sum(values) / len(values)
