"""Composer's TensorBoard logger, made to survive a full disk."""

import functools
from collections.abc import Callable
from typing import Any

from composer import Event, Logger, State
from composer.loggers import TensorboardLogger

from src.cli import log
from src.errors import reason


class TensorBoard(TensorboardLogger):
    """Composer's logger; after a failed write it warns once, and the run continues without it."""

    failed = False

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self._try(super().run_event, event, state, logger)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._try(super().log_metrics, metrics, step)

    def log_images(self, *arguments: Any, **options: Any) -> None:
        self._try(functools.partial(super().log_images, **options), *arguments)

    def close(self, state: State, logger: Logger) -> None:
        self._try(super().close, state, logger)

    def _try(self, write: Callable[..., None], *arguments: Any) -> None:
        if self.failed:
            return
        try:
            write(*arguments)
        except OSError as error:
            self.failed = True
            log.warning(
                f"loggers.tensorboard: cannot write to {self.log_dir}: {reason(error)}; the run continues without it"
            )
