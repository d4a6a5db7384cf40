"""MDS shards whose writing can resume after a kill at any moment, with the same bytes.
The shards of an unfinished split are in a hidden folder with progress.json, replaced after each complete shard. It
holds the command, the state to resume from, the number of samples to skip after it, and the complete shards."""

import contextlib
import copy
import fcntl
import json
import os
import shutil
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from streaming import MDSWriter

from src.errors import UserError
from src.files import sync_to_disk

PROGRESS = "progress.json"


class ShardWriter(MDSWriter):
    """Writes samples to the shards of a folder, and progress.json after each complete shard. Call `mark(state)` before
    writing the samples that follow a state. After resuming from it, write them again; stored ones are skipped."""

    def __init__(self, folder: Path, progress: dict[str, Any], resumable: bool, **options: Any):
        with tempfile.TemporaryDirectory() as empty:  # MDSWriter refuses a folder with files
            super().__init__(out=empty, **options)
        self.local = str(folder)
        self.folder, self.progress, self.resumable = folder, progress, resumable
        self.shards = progress["shards"]
        self.stored = sum(shard["samples"] for shard in self.shards)
        self.samples = self.stored - progress["skip"]  # written or skipped
        self.mark(progress["state"])
        self.storing: Future | None = None
        self.lock = lock(folder)

    def mark(self, state: Any) -> None:
        self.marked = (self.samples, state)

    def write(self, sample: dict[str, Any]) -> None:
        if self.samples >= self.stored:
            super().write(sample)
        self.samples += 1

    def flush_shard(self) -> None:
        """Store the samples since the last shard in a thread. Raises any error of the previous one."""
        if self.new_samples:  # else the first sample alone is larger than a shard
            self.wait()
            self.stored += len(self.new_samples)
            self.storing = self.executor.submit(copy.copy(self)._store)

    def wait(self) -> None:
        if self.storing is not None:
            self.storing.result()

    def _store(self) -> None:
        super().flush_shard()
        if self.resumable:
            shard = self.shards[-1]
            sync_to_disk(self.folder / (shard["zip_data"] or shard["raw_data"])["basename"])
            samples, state = self.marked
            progress = {"state": state, "skip": self.stored - samples, "shards": self.shards}
            save_progress(self.folder, {**self.progress, **progress})

    def _write_index(self) -> None:
        self.wait()
        super()._write_index()

    def close(self) -> None:
        """Release the folder, finished or not."""
        self.executor.shutdown(cancel_futures=True)
        os.close(self.lock)


def lock(folder: Path) -> int:
    """Lock a folder until the returned handle is closed. Raises UserError if another process holds it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(f"{folder}: another process is writing it; wait for it or choose another --out_root") from None
    except OSError:
        pass  # a file system without locks
    return handle


def start(folder: Path, command: dict[str, Any], splits: list[str], stamps: list | None) -> dict[str, Any]:
    """Create a folder with only progress.json, and return its content: what a resuming command needs, no shards yet."""
    if folder.exists():
        os.close(lock(folder))
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    progress = {"command": command, "splits": splits, "stamps": stamps, "state": None, "skip": 0, "shards": []}
    save_progress(folder, progress)
    return progress


def read_progress(folder: Path) -> dict[str, Any] | None:
    """Return the progress of an unfinished split, or None."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return json.loads((folder / PROGRESS).read_text())


def save_progress(folder: Path, progress: dict[str, Any]) -> None:
    unfinished = folder / f"{PROGRESS}.unfinished"
    unfinished.write_text(json.dumps(progress))
    sync_to_disk(unfinished)
    unfinished.replace(folder / PROGRESS)
    sync_to_disk(folder)


def publish(unfinished: Path, folder: Path) -> None:
    """Rename a finished folder, replacing an older one. No reader sees a partial folder."""
    for path in (unfinished / "index.json", unfinished / "split.json", unfinished):
        sync_to_disk(path)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    unfinished.rename(folder)
    sync_to_disk(folder.parent)
    for path in folder.glob(f"{PROGRESS}*"):
        path.unlink()
    shutil.rmtree(old, ignore_errors=True)
