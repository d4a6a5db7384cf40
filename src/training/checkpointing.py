"""The checkpoints of a run: written whole or not at all, and found again."""

import contextlib
import os
import re
import zipfile
from pathlib import Path

import torch
from composer import Callback, Event, Logger, State
from composer.utils import create_interval_scheduler, dist
from composer.utils.checkpoint import save_checkpoint

from src.cli import is_main_process, log
from src.errors import RunFailed, UserError, first_line

LATEST = "latest-rank0.pt"


class CheckpointWriter(Callback):
    """Saves `folder/ep{epoch}-ba{batch}-rank0.pt` every `interval` and at the end, and points `latest-rank0.pt` at the newest.

    A file has its name only once it is on the disk whole, so a kill leaves no half one under it. All but the newest `keep`
    are deleted; -1 keeps all. Where the disk refuses, the run goes on and tries again at the next interval; at the end of
    the run it raises RunFailed.
    """

    def __init__(self, folder: Path, interval: str, keep: int):
        self.folder = folder
        self.keep = keep
        self.is_due = create_interval_scheduler(interval)
        self.saved_batch = -1

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        self._save_if_due(state, Event.BATCH_CHECKPOINT)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        self._save_if_due(state, Event.EPOCH_CHECKPOINT)

    def _save_if_due(self, state: State, event: Event) -> None:
        if self.is_due(state, event) and (refused := self.save(state)):
            log.warning(f"{refused}; training goes on and tries again at the next save")

    def save(self, state: State) -> str | None:
        """Save this step, if it is not saved yet; None, or why it cannot be. Every rank has to call it."""
        batch = state.timestamp.batch.value
        if batch == self.saved_batch:
            return None
        finite = all(bool(torch.isfinite(parameter).all()) for parameter in state.model.parameters())
        if dist.all_gather_object(finite).count(False):
            raise RunFailed(f"step {batch}: some weights are no finite numbers any more, and were not saved; {way_back(self.folder)}")  # fmt: skip
        path = self.folder / f"ep{state.timestamp.epoch.value}-ba{batch}-rank0.pt"
        refused = self._write(state, path)
        if refused is None:
            self.saved_batch = batch
            return None
        if state.timestamp >= state.max_duration:
            raise RunFailed(f"cannot save step {batch}, the last, to {path}: {refused}; make room there, then {way_back(self.folder)}")  # fmt: skip
        return f"cannot save step {batch} to {path}: {refused}"

    def _write(self, state: State, path: Path) -> str | None:
        """None, or on every rank why rank 0 could not write."""
        unfinished = path.with_suffix(".unfinished")
        refused = None
        try:
            save_checkpoint(state, str(unfinished))  # all ranks give their part, rank 0 writes
        except (OSError, RuntimeError) as error:
            if dist.get_global_rank() != 0:
                raise
            refused = getattr(error, "strerror", None) or first_line(error)
            dist.barrier()  # where the others wait for the file
        if dist.get_global_rank() == 0:
            try:
                if refused is None:
                    self._publish(unfinished, path)
                unfinished.unlink(missing_ok=True)
            except OSError as error:
                refused = refused or error.strerror or str(error)
        said = [refused]
        dist.broadcast_object_list(said)
        return said[0]

    def _publish(self, unfinished: Path, path: Path) -> None:
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
        point_latest_at(path)
        if self.keep >= 1:
            found = checkpoints(self.folder)
            for old in found[found.index(path) :][self.keep :]:  # a later one was damaged, and left out
                old.unlink()


def checkpoints(folder: Path) -> list[Path]:
    """A run's checkpoints, the newest first."""

    def batch(path: Path) -> int:
        found = re.fullmatch(r"ep\d+-ba(\d+)-rank0\.pt", path.name)
        return int(found[1]) if found else -1

    return sorted((path for path in folder.glob("ep*-rank0.pt") if batch(path) >= 0), key=batch, reverse=True)


def point_latest_at(path: Path) -> None:
    link = path.with_name(f"{LATEST}.unfinished")
    link.unlink(missing_ok=True)
    link.symlink_to(path.name)
    link.replace(path.with_name(LATEST))


def newest_whole(folder: Path) -> Path | None:
    """The newest checkpoint of a run that is whole, None where it has none yet; says which it leaves out.

    `latest-rank0.pt` names it from then on. Raises UserError where there are some and none is whole.
    """
    found = checkpoints(folder)
    for path in found:
        if is_whole(path):
            if is_main_process() and (folder / LATEST).resolve() != path.resolve():  # a kill came between the two
                with contextlib.suppress(OSError):  # a full disk: the next save says so
                    point_latest_at(path)
            return path
        log.warning(f"{path} is damaged (cut short?) and left out")
    if found:
        raise UserError(f"save_folder: no checkpoint in {folder} is whole; remove them to begin anew, or name another folder")  # fmt: skip
    return None


def is_whole(path: Path) -> bool:
    """Whether a file that torch.save wrote is all there, by the checksums in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError):
        return False


def way_back(folder: Path) -> str:
    """What to do after a failure, as the end of a sentence."""
    last = next(filter(is_whole, checkpoints(folder)), None)
    return f"the same command goes on from {last}" if last else "no checkpoint was saved before"
