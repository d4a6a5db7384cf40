"""What the time between a command and its first training step goes into."""

import contextlib
import os
import time

import psutil
from composer import Callback, Logger, State

from src.cli import log


def launched() -> float | None:
    """When the launcher began that started this process, if Composer's did."""
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process().parent()
        if "RANK" in os.environ and parent is not None and "composer" in " ".join(parent.cmdline()[:3]):
            return parent.create_time()
    return None


class Startup(Callback):
    """Measures the parts of a start, and says them once the first step is done. Made when the imports are."""

    def __init__(self) -> None:
        self.last = psutil.Process().create_time()
        self.begun = launched() or self.last
        self.parts: dict[str, float] = {"launcher": self.last - self.begun} if self.begun < self.last else {}
        self.done("imports")

    def done(self, part: str) -> None:
        """Give the time since the last part, or since the process began, to this one."""
        now = time.time()
        self.parts[part], self.last = now - self.last, now

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.parts:
            self.done("first step")
            parts = ", ".join(f"{seconds:.1f} {part}" for part, seconds in self.parts.items())
            log.info(f"first step after {self.last - self.begun:.1f} s: {parts}")
            self.parts = {}
