"""What a command with many short runs provides; src/jobs does the rest."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, ClassVar

from src.jobs.jobs import Job, Result

if TYPE_CHECKING:
    from torch import Tensor

    from src.jobs.worker import StepReporter

Row = dict[str, Any]  # of a report: the scores of one task


@dataclass(frozen=True)
class Average:
    """The mean over the tasks of a benchmark, reported once all of them have scores.

    In a result or row, `key` tells whether the average counts it; without the key, the task's name decides.
    """

    key: str
    title: str
    tasks: Mapping[str, str]  # name → title

    def counts(self, row: Row) -> bool:
        return row.get(self.key, row["task"] in self.tasks)

    def of(self, rows: list[Row]) -> float | None:
        """Return the average, or None if a task has no score."""
        scores = {row["task"]: row["mean"] for row in rows if self.counts(row)}
        return mean(scores[name] for name in self.tasks) if self.tasks.keys() <= scores.keys() else None


class Experiment(ABC):
    """Many short runs from one config. Each job's process gets a copy of it, by pickle.

    The config has the keys save_folder, base_run_name, device, parallel, rerun and progress_bar. The class attributes and the
    module itself must not import torch, so that `check_paths` can report a wrong path at once.
    """

    command: ClassVar[str]  # the script, for messages
    example: ClassVar[str]  # arguments for --help
    schema: ClassVar[type]  # of the config
    preload: ClassVar[str]  # the module with the imports that every job needs
    average: ClassVar[Average]

    start_name = "random weights"  # what the jobs start from; `plan` may set it

    def __init__(self, config: Any):
        self.config = config

    @property
    def folder(self) -> Path:
        return Path(self.config.save_folder)

    @abstractmethod
    def check_paths(self) -> None:
        """Raise UserError for what is wrong with the config or a path, without slow imports."""

    @abstractmethod
    def plan(self, device: str) -> list[Job]:
        """Return all jobs for a device, gpu or cpu. Raises UserError for what would make a job fail."""

    @abstractmethod
    def cost(self, job: Job) -> int:
        """Return the cost of a job. Reads all of its data, so that a bad row is reported before any job runs."""

    @abstractmethod
    def run(self, job: Job, device: str, steps: "StepReporter") -> Result:
        """Train, score and write predictions, in the job's process.

        Returns:
            task, title, variant, seed, folder (its name), metrics, score (0 to 1), majority (the score of the most frequent
            class), scores (split → metric → value) and labels (names of the classes; empty for a regression); the
            average's key; and what else is worth storing.
        """

    @abstractmethod
    def files(self, job: Job, result: Result) -> list[str] | None:
        """Return the files that a finished job has; None if its result lacks what the config asks for."""

    def origin(self, settings: dict[str, Any]) -> Any:
        """Return the part of a job's settings that all results of a folder must share."""

    def finish(self, rows: list[Row]) -> list[str]:
        """Write what follows from all results, and return lines to print."""
        return []

    @staticmethod
    @abstractmethod
    def score(metrics: Sequence[str], predictions: "Tensor", labels: "Tensor", classes: int) -> dict[str, float]:
        """Compute metrics of predictions, (examples,), which are class numbers or the values of a regression."""


def mean_score(scores: Mapping[str, Mapping[str, float]]) -> float:
    """Return the mean over splits and metrics: the score of a job."""
    values = [value for metrics in scores.values() for value in metrics.values()]
    return sum(values) / len(values)
