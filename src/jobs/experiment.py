"""What a command with many short runs provides; src/jobs does the rest."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

from src.checkpoints.remote import checkpoint_step
from src.config import to_dict
from src.errors import UserError
from src.files import file_digest
from src.jobs.tasks import Task, optimizer_of

RESULT_FILE, SETTINGS_FILE, LOG_FILE = "result.json", "settings.json", "log.txt"
Result = dict[str, Any]  # of a job
Row = dict[str, Any]  # of a report: the scores of a task


@dataclass(frozen=True)
class Job:
    """A training run of one task with one seed, in its own folder."""

    task: Task
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

    def saved_step(self) -> int:
        """Return the step at which this job, with these settings, was last saved, which it resumes from; or 0."""
        with suppress(OSError, ValueError):
            if json.loads((self.folder / SETTINGS_FILE).read_text()) == self.settings:
                return max((checkpoint_step(path.name) or 0 for path in self.folder.glob("ep*-rank0.pt")), default=0)
        return 0


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
    """Many short runs from one config, a JobsConfig. Each job's process gets a pickled copy. The module must not import
    torch: `check_paths` must report errors quickly."""

    command: ClassVar[str]  # the script, for messages
    example: ClassVar[str]  # its arguments, for --help
    commands: ClassVar[tuple[str, ...]] = ("report",)  # what it does besides
    schema: ClassVar[type]  # of the config
    preload: ClassVar[str]  # the module with the imports that every job needs
    averages: ClassVar[tuple[Average, ...]]
    scored_on: ClassVar[str] = "validation"  # which examples the scores are of
    start_name = "random weights"  # what the jobs start from; `plan` may set it
    tasks: Sequence[Task] = ()  # to run; `check_paths` sets them

    def __init__(self, config: Any):
        self.config, self.folder = config, Path(config.save_folder)

    @abstractmethod
    def check_paths(self) -> None:
        """Raise UserError for an invalid config or path, before any import that takes seconds."""

    def check_sections(self) -> None:
        """Raise UserError for a mistake in the config that takes imports of seconds to find; for `plan`, and a dry
        run."""
        from torch import nn

        from src.training import registry
        from src.training.own_code import import_files

        config = self.config
        import_files(config.code_paths)
        registry.build_scheduler(config.scheduler)
        registry.build_all("algorithms", config.algorithms)
        registry.build_all("callbacks", config.callbacks)
        for task in self.tasks:
            try:
                registry.build_optimizer(optimizer_of(task), nn.Linear(1, 1))
            except UserError as error:
                raise UserError(f"tasks.{task.name}: {error}") from None
        file = config.loggers.get("file", False)
        if file is None or isinstance(file, dict):
            if "{run_name}" not in str((file or {}).get("filename", "{run_name}")):
                raise UserError("loggers.file.filename must contain {run_name}, so that each job has its own file")
            # Do not capture the output of this process.
            file = {**(file or {}), "capture_stdout": False, "capture_stderr": False}
        registry.build_all("loggers", {**config.loggers, "file": file})

    @abstractmethod
    def plan(self, device: str) -> list[Job]:
        """Return all jobs for a device, gpu or cpu. Raises UserError for anything that would make a job fail."""

    def job(self, task: Task, seed: int, device: str, after: Job | None = None, **settings: Any) -> Job:
        """Return a job with all that its result depends on, so that it runs again if that changes: what shapes any
        training, and `settings`, what the command adds."""
        from src.training.trainer import resolve_precision

        given = to_dict(self.config)
        shared = {name: given[name] for name in ("scheduler", "algorithms")}
        # Of our callbacks, the stopper alone changes training; a user's own may.
        change = {name: each for name, each in given["callbacks"].items() if name == "early_stopper" or ":" in name}
        shared["callbacks"] = {name: each for name, each in change.items() if each is not False}
        if self.config.code_paths:
            shared["code"] = [file_digest(Path(path)) for path in self.config.code_paths]
        precision = resolve_precision(task.precision or self.config.precision, device)
        settings = {**shared, "precision": precision, "task": task.settings(), "seed": seed, **settings}
        folder = self.folder / "jobs" / "-".join(filter(None, (task.name, task.variant, str(seed))))
        return Job(task, seed, folder, json.loads(json.dumps(settings)), after)  # with the types that JSON keeps

    @abstractmethod
    def cost(self, job: Job) -> int:
        """Return a job's cost. Reads all of its data, so that a bad row is reported before any job runs."""

    @abstractmethod
    def run(self, job: Job, device: str, steps: Any) -> Result:
        """Train, score and write predictions, in the job's process; `steps` is a pool.StepReporter. Return task, title,
        variant, seed, folder (its name), metrics, score and majority (of the job and of the majority class, 0 to 1),
        scores (split → metric → value), labels (classes; empty for a regression), each average's key, and more, such
        as `notes`, a list of sentences for the report. training.train returns all but averages and notes."""

    @abstractmethod
    def files(self, job: Job, result: Result) -> list[str] | None:
        """Return the files that a finished job must have; None if its result lacks what the config asks for."""

    def origin(self, settings: dict[str, Any]) -> Any:
        """Return the part of a job's settings that all results in a folder must share."""
        return None

    def finish(self, rows: list[Row]) -> None:  # noqa: B027
        """Write and print what needs the results of all jobs."""


def mean_score(scores: Iterable[Mapping[str, float]]) -> float:
    """Return the mean over splits and metrics, which is the score of a job."""
    values = [value for metrics in scores for value in metrics.values()]
    return sum(values) / len(values)
