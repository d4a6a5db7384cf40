"""What a run does with its checkpoints while it trains. The key `hf_export`: export Hub folders of them."""

import re
import shutil
from pathlib import Path
from typing import Any

from composer import Callback, Logger, State
from composer.devices import DeviceCPU
from composer.utils import dist

from src.cli import log
from src.errors import RunFailed, reason
from src.files import LATEST, follow, is_newer
from src.publish.background import Worker, hold
from src.publish.commands import export

HELD = "exporting-unfinished.pt"  # the checkpoint that is exported


class Background(Callback):
    """Works on saved checkpoints, one at a time, in a process of its own beside training; what fails only warns.
    Rank 0 does it. `writer` is a callback before this one, which saves checkpoints: it has a `folder` and a
    `saved_batch`. A subclass adds to `waiting`."""

    work: str  # in words

    def __init__(self, writer: Any):
        self.writer = writer
        self.waiting: list[Any] = []
        self.current: tuple[Any, Worker] | None = None
        self.aside = False

    def init(self, state: State, logger: Logger) -> None:
        self.aside, self.state, self.logger = isinstance(state.device, DeviceCPU), state, logger

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() != 0:
            return
        if self.writer.saved_batch == state.timestamp.batch.value:
            try:
                self.saved(state)
            except OSError as error:
                log.warning(f"step {self.writer.saved_batch}: no {self.work} ({reason(error)}); training continues")
        self.is_busy()

    epoch_checkpoint = batch_checkpoint

    def is_busy(self) -> bool:
        """Report the process if it has ended, and start the next. Return whether there is one."""
        if self.current is not None and not self.current[1].is_running():
            (item, worker), self.current = self.current, None
            self.ended(item, worker.failure())
        while self.current is None and self.waiting:
            item = self.waiting.pop(0)
            try:
                self.current = (item, worker) if (worker := self.start(item)) else None
            except OSError as error:
                self.ended(item, reason(error))
        return self.current is not None

    def saved(self, state: State) -> None:
        """Add what is to be done with the checkpoint of this step, if anything. Raises OSError."""
        raise NotImplementedError

    def start(self, item: Any) -> Worker | None:
        """Start what is next, unless it is done already. Raises OSError."""
        raise NotImplementedError

    def ended(self, item: Any, failure: str | None) -> None:
        raise NotImplementedError

    def close(self, state: State, logger: Logger) -> None:
        """End the process of a run that ends early."""
        if self.current is not None:
            self.current[1].kill()


class HubExports(Background):
    """Export to `save_folder/hub/ep{epoch}-ba{batch}` after each save; a save during an export waits for it, and the
    newest one alone. Delete exports whose checkpoint is deleted, except the newest."""

    work = "Hub folder"
    seen = -1  # the last saved step

    def after_load(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            self.release()  # of a killed run

    def close(self, state: State, logger: Logger) -> None:
        super().close(state, logger)
        if self.current is not None:
            self.release()

    def release(self) -> None:
        (self.writer.folder / HELD).unlink(missing_ok=True)

    def saved(self, state: State) -> None:
        if (step := self.writer.saved_batch) != self.seen:  # an epoch's last step has two events
            self.seen, self.waiting = step, [(step, *linked(self.writer.folder))]

    def start(self, item: tuple[int, Path, Path]) -> Worker | None:
        _, checkpoint, out = item
        if is_newer(out, checkpoint):
            return None
        hold(checkpoint, self.writer.folder / HELD)
        shutil.rmtree(out, ignore_errors=True)  # exported from an older checkpoint of the same name
        return Worker(export, self.writer.folder / HELD, out, aside=self.aside)

    def ended(self, item: tuple[int, Path, Path], failure: str | None) -> None:
        step, _, out = item
        self.release()
        if failure:
            log.warning(f"step {step}: the Hub folder was not written ({failure}); training continues")
            return
        for folder in out.parent.iterdir():
            ours = re.fullmatch(r"ep\d+-ba\d+(-unfinished)?", folder.name)
            if ours and folder != out and not (self.writer.folder / f"{folder.name}-rank0.pt").exists():
                shutil.rmtree(folder, ignore_errors=True)


def linked(folder: Path, name: str = LATEST) -> tuple[Path, Path]:
    """Return the checkpoint that a link in a run's folder names and its Hub folder, which may not exist."""
    checkpoint = follow(folder / name).resolve()
    return checkpoint, folder / "hub" / checkpoint.name.removesuffix("-rank0.pt")


def exported(folder: Path, name: str) -> Path:
    """Return the Hub folder of the checkpoint that a link in a finished run's folder names, exporting it if needed.
    Raises RunFailed."""
    checkpoint, out = linked(folder, name)
    if not is_newer(out, checkpoint):
        shutil.rmtree(out, ignore_errors=True)  # exported from an older checkpoint of the same name
        if failure := Worker(export, checkpoint, out).failure():
            raise RunFailed(f"the run is saved, but its Hub folder is not: {failure}; repeat the command to retry")
    return out
