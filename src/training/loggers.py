"""Composer's loggers, so that a run's config reaches each of them, and a resumed run continues in W&B and MLflow."""

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from uuid import uuid4

from composer import Logger, State
from composer.loggers import FileLogger, LoggerDestination, MLFlowLogger, TensorboardLogger, WandBLogger
from composer.utils import dist

from src.cli import is_main_process, log
from src.config import flatten
from src.errors import UserError, first_line, reason
from src.files import write_json

IN_CWD = "{run_name}/logs-rank{rank}.txt"  # where Composer's FileLogger writes by default
IDS = "loggers-rank{}.json"  # in a run folder: the ids of its runs in W&B and MLflow


def scalars(hyperparameters: dict[str, Any]) -> dict[str, Any]:
    """Return nested hyperparameters by dotted name; all but numbers and booleans as text."""
    flat = flatten(hyperparameters)
    return {name: value if isinstance(value, int | float) else str(value) for name, value in flat.items()}


def of_run(loggers: Iterable[LoggerDestination], folder: Path, resumes: bool) -> list[LoggerDestination]:
    """Return the loggers of a run; if it resumes from a checkpoint, those of W&B and MLflow continue the runs whose ids
    are in its folder, and files are appended to. Files without a place of their own are in the run's folder."""
    loggers, ids = list(loggers), folder / IDS.format(dist.get_global_rank())
    if not resumes:  # else W&B would drop the steps that a killed process has already logged
        ids.unlink(missing_ok=True)
    for logger in loggers:
        if isinstance(logger, WandB | MLflow):
            logger.ids = ids
        elif isinstance(logger, File):
            logger.appends = resumes
            if logger.filename_format == IN_CWD:
                logger.filename_format = str(folder / "logs-rank{rank}.txt")
        elif isinstance(logger, TensorBoard):
            logger.log_dir = logger.log_dir or str(folder / "tensorboard")
    return loggers


class _Tracker:
    """A logger to a service that knows runs by an id."""

    kind: str
    ids: Path | None = None

    def kept_id(self) -> str | None:
        """Return the id of the run's earlier part. Raises UserError for a file that is not readable."""
        if self.ids is None or not self.ids.is_file():
            return None
        try:
            return json.loads(self.ids.read_text()).get(self.kind)
        except (OSError, ValueError, AttributeError):
            raise UserError(f"{self.ids} is corrupt; delete it to begin a new run in {self.kind}") from None

    def keep_id(self, value: str) -> None:
        """Store the id for a later part of this run. Raises UserError if it cannot be written."""
        if self.ids is None or self.kept_id() == value:
            return
        others = json.loads(self.ids.read_text()) if self.ids.is_file() else {}
        try:
            self.ids.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.ids, others | {self.kind: value})
        except OSError as error:
            problem = f"save_folder: cannot write {self.ids}: {reason(error)}"
            raise UserError(f"{problem}; free disk space or choose another folder") from None

    @contextlib.contextmanager
    def starting(self, *errors: type[Exception]):
        """Turn an error of the service's client into a UserError."""
        try:
            yield
        except errors as error:
            cause = first_line(error).rstrip(".")
            if hasattr(error, "errors"):  # pydantic, whose first line only counts them
                found = error.errors()[0]
                cause = f"{found['loc'][0]}={found['input']!r}: {found['msg']}"
            resumed = f"; or delete {self.ids} to begin a new run there" if self.kept_id() else ""
            problem = f"loggers.{self.kind} cannot start its run: {cause}"
            raise UserError(f"{problem}; fix that, or omit it with loggers.{self.kind}=false{resumed}") from None


class WandB(_Tracker, WandBLogger):
    """Composer's logger; it continues the run of an earlier part, whose settings may have changed."""

    kind = "wandb"

    def init(self, state: State, logger: Logger) -> None:
        import wandb

        given = self._init_kwargs.get("id") or os.environ.get("WANDB_RUN_ID")
        self._init_kwargs = {"resume": "allow", **self._init_kwargs, "id": given or self.kept_id() or uuid4().hex[:8]}
        with self.starting(wandb.errors.Error, TypeError, ValueError):  # the latter two of a mistake in init_kwargs
            super().init(state, logger)
        if self._enabled:
            self.keep_id(self._init_kwargs["id"])

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        if self._enabled:
            import wandb

            wandb.config.update(hyperparameters, allow_val_change=True)


class MLflow(_Tracker, MLFlowLogger):
    """Composer's logger; it continues the run of an earlier part, whose settings may have changed."""

    kind = "mlflow"

    def init(self, state: State, logger: Logger) -> None:
        from mlflow.exceptions import MlflowException

        given, kept = os.environ.get("MLFLOW_RUN_ID"), self.kept_id()
        if kept and not given:
            os.environ["MLFLOW_RUN_ID"] = kept  # which Composer's logger continues
        try:
            with self.starting(MlflowException):
                super().init(state, logger)
        finally:
            if not given:
                os.environ.pop("MLFLOW_RUN_ID", None)
        if self._enabled:
            self.keep_id(self._run_id)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Log parameters by dotted name; MLflow never changes one, so a new value is a tag."""
        if not self._enabled:
            return
        given = {name: str(value) for name, value in flatten(hyperparameters).items()}
        stored = self._mlflow_client.get_run(self._run_id).data.params
        for name, value in given.items():
            if stored.get(name, value) != value:
                self._mlflow_client.set_tag(self._run_id, name, value)
        super().log_hyperparameters({name: value for name, value in given.items() if name not in stored})


class File(FileLogger):
    """Composer's logger, which would round numbers to four places; a resumed run appends to its file."""

    appends = False

    def init(self, state: State, logger: Logger) -> None:
        if not self.appends:
            super().init(state, logger)
            return
        self._run_name = state.run_name
        Path(self.filename).parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.filename, "a", buffering=self.buffer_size)  # noqa: SIM115
        self._flush_queue()

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        super().log_hyperparameters({name: str(value) for name, value in flatten(hyperparameters).items()})


class TensorBoard(TensorboardLogger):
    """Composer's logger; after a failed write it warns once, and the run continues without it. With `rank_zero_only`,
    other ranks write nothing; Composer's write an empty file and one with hyperparameters."""

    failed = False

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Composer would round numbers to four places and turn them into text."""
        self.hyperparameters |= scalars(hyperparameters)

    def _try(self, write: Callable[..., None], *arguments: Any, **options: Any) -> None:
        try:
            if not self.failed and (is_main_process() or not self.rank_zero_only):
                write(self, *arguments, **options)
        except OSError as error:
            self.failed = True
            problem = f"cannot write to {self.log_dir}: {reason(error)}"
            log.warning(f"loggers.tensorboard: {problem}; the run continues without it")

    run_event = functools.partialmethod(_try, TensorboardLogger.run_event)
    log_metrics = functools.partialmethod(_try, TensorboardLogger.log_metrics)
    log_images = functools.partialmethod(_try, TensorboardLogger.log_images)
    close = functools.partialmethod(_try, TensorboardLogger.close)
