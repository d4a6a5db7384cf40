"""What the time between a command and its first training step goes into."""

import time

import psutil
from composer import Callback, Logger, State

from src.cli import log


class Startup(Callback):
    """Measures the parts of a start, and says them once the first step is done. Made when the imports are."""

    def __init__(self) -> None:
        self.begun = self.last = psutil.Process().create_time()
        self.parts: dict[str, float] = {}
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
