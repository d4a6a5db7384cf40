"""Where the time before the first training step goes."""

import time

import psutil
from composer import Callback, Logger, State

from src.cli import log


class Startup(Callback):
    """Measure the phases of startup and report them after the first step. Construct it once imports are done."""

    def __init__(self) -> None:
        self.started = self.last = psutil.Process().create_time()
        self.phases: dict[str, float] = {}
        self.done("imports")

    def done(self, phase: str) -> None:
        """Attribute the time since the previous phase to this one."""
        now = time.time()
        self.phases[phase], self.last = now - self.last, now

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.phases:
            self.done("first step")
            phases = ", ".join(f"{seconds:.1f} {phase}" for phase, seconds in self.phases.items())
            log.info(f"first step after {self.last - self.started:.1f} s: {phases}")
            self.phases = {}
