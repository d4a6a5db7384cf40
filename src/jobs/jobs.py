"""A job, the result it stores in its folder, and whether an earlier result still holds."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.cli import log
from src.errors import UserError

RESULT_FILE = "result.json"
LOG_FILE = "log.txt"
Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One training run of a task with a seed, in a folder of its own."""

    task: Any  # has a name, a title, and a variant: the values that a search gives it, or ""
    seed: int
    folder: Path
    settings: dict[str, Any]  # everything that its result depends on, as JSON has it
    after: "Job | None" = None  # the job whose model it starts from
    cost: int = 0  # of training, in any unit: to run the largest first and to estimate the time left

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.task.title, self.task.variant, f"seed {self.seed}")))


def read_result(job: Job) -> Result:
    return json.loads((job.folder / RESULT_FILE).read_text())


def stored_result(job: Job) -> Result | None:
    """Return the result in a job's folder, whatever its settings; None if there is none that can be read."""
    try:
        result = read_result(job)
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    return result if isinstance(result, dict) and "settings" in result else None


def finished_result(job: Job, experiment: Any) -> Result | None:
    """Return a job's result if the same settings gave it and its files are complete."""
    result = stored_result(job)
    if result is None:
        return None
    if result["settings"] != job.settings:
        changed = [name for name, value in job.settings.items() if result["settings"].get(name) != value]
        log.info(f"{job.name}: its result has another {', '.join(changed)}, so it runs again")
        return None
    files = experiment.files(job, result)
    return result if files is not None and all((job.folder / file).is_file() for file in files) else None


def refuse_other_origin(jobs: list[Job], experiment: Any) -> None:
    """Raise UserError if a job would replace a result of another origin, such as another pretrained model."""
    for job in jobs:
        result = stored_result(job)
        if result is not None and experiment.origin(result["settings"]) != experiment.origin(job.settings):
            raise UserError(
                f"save_folder: {experiment.folder} has results of other weights, model settings or tokens than those of "
                f"{experiment.start_name} ({job.name}); choose another save_folder or base_run_name, or add --rerun"
            )
