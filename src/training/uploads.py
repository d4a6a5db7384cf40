"""A run's files in `save_remote`: uploaded in the background while it trains, and downloaded where it resumes."""

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from src.checkpoints.remote import Store, checkpoint_step
from src.checkpoints.safe_load import is_valid_checkpoint
from src.cli import log
from src.errors import UserError, first_line, reason
from src.files import BEST, CONFIG, LATEST, SUMMARY, follow, link, write_atomically

SMALL = (".json", ".jsonl", ".png", ".yaml")  # a run's files besides checkpoints
LINKS = (LATEST, BEST)  # there, files with the name of a checkpoint
KEY = "save_remote"
PAUSES = (1, 4, 16)  # seconds before each further attempt


class Uploads:
    """Upload what is new in `folder` to `store`, in a thread of its own, after every save. A failed upload is tried
    again, then reported, and tried again after the next save; it never stops training. Only rank 0 has one. Nothing is
    deleted there."""

    def __init__(self, folder: Path, store: Store):
        """Raises what the store's client does."""
        self.folder, self.store = folder, store
        self.busy: Path | None = None  # the file that is being read
        self.failure: str | None = None
        stored = [folder / name for name in store.names() if checkpoint_step(name) is not None]
        whole = (path for path in stored if path.is_file() and path.stat().st_size == store.size(path.name))
        self.known = {path.name: _version(path) for path in whole}
        self.changed, self.requests, self.served, self.ending = threading.Condition(), 0, 0, False
        self.thread: threading.Thread | None = None

    def notify(self) -> None:
        """Upload what is new, in the background."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, daemon=True)
            self.thread.start()
        with self.changed:
            self.requests += 1
            self.changed.notify_all()

    def finish(self) -> str | None:
        """Return once everything is uploaded, or why it is not."""
        self.ending = True
        if self.missing():
            log.info(f"uploading to {self.store.address}")
        self.notify()
        with self.changed:
            self.changed.wait_for(lambda: self.served == self.requests)
        return self.failure

    def missing(self) -> list[Path]:
        """Return the files that are new or changed, in the order in which they are to appear."""
        files = [path for path in self.folder.iterdir() if path.is_file() and path.suffix in (*SMALL, ".pt")]
        steps = {path: checkpoint_step(path.name) for path in files}
        files = [path for path in files if path.name in LINKS or path.suffix in SMALL or steps[path] is not None]
        # A checkpoint comes with its metrics, and the summary, which says that the run is finished, with all of them.
        last = {LATEST: 2, BEST: 2, SUMMARY: 3}
        files.sort(key=lambda p: (last.get(p.name, int(steps[p] is not None)), steps[p] or 0, p.name))
        return [path for path in files if self.known.get(path.name) != _version(path)]

    def _work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.served < self.requests)
                requests = self.requests
            try:
                self.failure = self._upload_all(self.missing())
            except OSError as error:
                self.failure = f"{self.folder} cannot be read ({reason(error)})"
            if self.failure and not self.ending:
                log.warning(f"{KEY}: {self.failure}; training continues, and the next save tries again")
            with self.changed:
                self.served = requests
                self.changed.notify_all()

    def _upload_all(self, files: list[Path]) -> str | None:
        """Return None, or why a file is not uploaded. Without a config or checkpoint, no later file appears: they imply
        that it is there."""
        first = None
        for path in files:
            failure = self._upload(path)
            first = first or failure
            if failure and (path.name == CONFIG or path.suffix == ".pt"):
                break
        self.busy = None
        return first

    def _upload(self, path: Path) -> str | None:
        """Return None, or why the file is not uploaded."""
        self.busy = path
        for pause in (*PAUSES, None):
            try:
                with tempfile.TemporaryDirectory() as work:
                    version, source = _version(path), path
                    if path.name in LINKS:
                        steps = {name: step for name in self.known if (step := checkpoint_step(name)) is not None}
                        target = follow(path).resolve().name
                        if path.name == LATEST and steps and target != (newest := max(steps, key=steps.get)):
                            target, version = newest, None  # one was saved meanwhile, and is not there yet
                        if target not in steps:  # nor is this one
                            return None
                        source = Path(work, path.name)
                        source.write_text(f"{target}\n")
                    elif path.suffix != ".pt":  # it may grow meanwhile
                        source = Path(shutil.copyfile(path, Path(work, path.name)))
                    self.store.upload(source, path.name)
                self.known[path.name] = version
                return None
            except FileNotFoundError:
                if not path.exists():  # deleted meanwhile, since newer checkpoints replaced it
                    return None
                failure = "file not found"
            except Exception as error:  # whatever the client raises
                failure = first_line(error)
            if pause is not None:
                time.sleep(pause)
        return f"{path.name} was not uploaded to {self.store.address} ({failure})"


def restore(folder: Path, store: Store, after: int, check: Callable[[Path], None]) -> Uploads:
    """Download what a run needs to resume from `store`, if it has a checkpoint later than step `after`; return what
    uploads the folder to it. `check` gets a folder with the stored config and raises UserError for another run's.
    Raises UserError."""
    try:
        _download_later(folder, store, after, check)
        return Uploads(folder, store)
    except UserError:
        raise
    except Exception as error:  # whatever the client raises
        problem = f"{KEY}: {store.address} cannot be read ({first_line(error)})"
        raise UserError(f"{problem}; fix the address or the credentials, or free disk space") from None


def _download_later(folder: Path, store: Store, after: int, check: Callable[[Path], None]) -> None:
    names = store.names()
    steps = {name: step for name in names if (step := checkpoint_step(name)) is not None}
    later = sorted((name for name in steps if steps[name] > after), key=steps.get, reverse=True)
    if not steps:
        return
    if CONFIG not in names:
        problem = f"{KEY}: {store.address} has checkpoints but no {CONFIG}"
        raise UserError(f"{problem}; restore it or choose another address")
    small = [name for name in names if name.endswith(SMALL)] if later else [CONFIG]
    with tempfile.TemporaryDirectory() as work:
        for name in small:
            store.download(name, Path(work, name))
        check(Path(work))
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("*.downloaded"):  # by a killed start
            left.unlink()
        # Whatever moment it is killed at, a later start finds no checkpoint without the files that belong to it, and
        # downloads again what is missing: the newest checkpoint gets its name last, but for the summary.
        for name in later:
            newest = _download(store, name, folder)
            if is_valid_checkpoint(newest):
                break
            newest.unlink()
            log.warning(f"{store.address}/{name} is corrupt or truncated; skipped")
        else:
            if after < 0:
                raise UserError(f"{KEY}: no checkpoint in {store.address} is valid; remove them or choose another")
            return
        (folder / SUMMARY).unlink(missing_ok=True)
        for file in small:
            if file != SUMMARY:
                write_atomically(folder / file, Path(work, file).read_bytes())
        if BEST in names:
            store.download(BEST, Path(work, BEST))
            best = folder / follow(Path(work, BEST)).name
            if best.name in steps and best.name != name and not best.is_file():
                _download(store, best.name, folder).replace(best)
            link(folder / BEST, best.name)
        newest.replace(folder / name)
        link(folder / LATEST, name)
        # It may be of the run before it was extended.
        if SUMMARY in small and json.loads(Path(work, SUMMARY).read_text())["after"]["step"] == steps[name]:
            write_atomically(folder / SUMMARY, Path(work, SUMMARY).read_bytes())


def _download(store: Store, name: str, folder: Path) -> Path:
    """Download a checkpoint under a name that is not a checkpoint's, and return that."""
    log.info(f"downloading {store.address}/{name}")
    store.download(name, path := folder / f"{name}.downloaded")
    return path


def _version(path: Path) -> tuple[int, int, str] | None:
    """Return the size, time and target of a file, which differ after a change; None if there is no file."""
    try:
        status = path.stat()
        return status.st_size, status.st_mtime_ns, os.path.realpath(path)
    except OSError:
        return None
