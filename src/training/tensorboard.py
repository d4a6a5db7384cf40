"""TensorBoard files of a run, which a full disk does not end."""

import functools
import threading
from collections.abc import Callable
from typing import Any

from composer import Event, Logger, State
from composer.loggers import TensorboardLogger

from src.cli import log


class TensorBoard(TensorboardLogger):
    """Composer's. Where the disk refuses, it says so once, and the run goes on without it."""

    refused = False

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.INIT:
            threading.excepthook = functools.partial(_without_writers, threading.excepthook)
        self._try(super().run_event, event, state, logger)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._try(super().log_metrics, metrics, step)

    def log_images(self, *arguments: Any, **options: Any) -> None:
        self._try(functools.partial(super().log_images, **options), *arguments)

    def close(self, state: State, logger: Logger) -> None:
        self._try(super().close, state, logger)

    def _try(self, write: Callable[..., None], *arguments: Any) -> None:
        if self.refused:
            return
        try:
            write(*arguments)
        except OSError as error:
            self.refused = True
            log.warning(f"loggers.tensorboard: cannot write to {self.log_dir}: {error.strerror or error}; the run goes on without it")  # fmt: skip


def _without_writers(hook: Callable[[threading.ExceptHookArgs], None], failed: threading.ExceptHookArgs) -> None:
    """Leave out the traceback of TensorBoard's writing threads, whose errors reach the main one as well."""
    if not (issubclass(failed.exc_type, OSError) and type(failed.thread).__module__.startswith("tensorboard.")):
        hook(failed)
