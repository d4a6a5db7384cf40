"""The key `hf_export`: export Hub folders of a run's checkpoints during training; a failed export never stops it."""

import contextlib
import multiprocessing
import os
import re
import shutil
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from composer import Callback, Logger, State
from composer.utils import dist

from src.cli import log
from src.errors import RunFailed, UserError, first_line
from src.files import LATEST, follow, is_newer


class HubExports(Callback):
    """After each save, export to `save_folder/hub/ep{epoch}-ba{batch}`; delete exports whose checkpoint is deleted.
    Rank 0 exports; the other ranks wait for it, at most `dist_timeout` seconds. `writer` is the callback before this
    one, which saves checkpoints: it has a `folder` and a `saved_batch`."""

    def __init__(self, writer: Any, dist_timeout: float):
        self.writer = writer
        self.time_limit = min(0.8 * dist_timeout, 24 * 3600)  # seconds for one export
        self.exported_batch = -1

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() != 0 or self.writer.saved_batch == self.exported_batch:
            return
        self.exported_batch = self.writer.saved_batch
        out, failure = export_latest(self.writer.folder, self.time_limit)
        if failure:
            log.warning(f"step {self.exported_batch}: the Hub folder was not written ({failure}); training continues")
            return
        for folder in out.parent.iterdir():
            ours = re.fullmatch(r"ep\d+-ba\d+(-unfinished)?", folder.name)
            if ours and not (self.writer.folder / f"{folder.name}-rank0.pt").exists():
                shutil.rmtree(folder, ignore_errors=True)

    epoch_checkpoint = batch_checkpoint


def export_last(folder: Path) -> Path:
    """Return the Hub folder of a finished run's last checkpoint, exporting it if needed. Raises RunFailed."""
    out, failure = export_latest(folder)
    if failure:
        raise RunFailed(f"the run is saved, but its Hub folder is not: {failure}; repeat the command to retry")
    return out


def export_latest(folder: Path, time_limit: float | None = None) -> tuple[Path, str | None]:
    """Export a run's latest checkpoint in another process; return the Hub folder, and the error or None."""
    checkpoint = follow(folder / LATEST).resolve()
    out = folder / "hub" / checkpoint.name.removesuffix("-rank0.pt")
    if out.is_dir() and checkpoint.exists():
        if is_newer(out, checkpoint):
            return out, None
        shutil.rmtree(out, ignore_errors=True)  # exported from an older checkpoint of the same name
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_export, args=(checkpoint, out, sender), daemon=True)
    process.start()
    process.join(time_limit)
    if process.is_alive():
        process.kill()
        return out, f"the export took more than {time_limit:.0f} s"
    if receiver.poll():
        return out, receiver.recv()
    return out, f"exit status {process.exitcode}" if process.exitcode else None


def _export(checkpoint: Path, out: Path, sender: Connection) -> None:
    from src.publish.commands import export

    with open(os.devnull, "w") as silence, contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        try:
            export(checkpoint, out)
        except Exception as error:  # such as out of memory
            sender.send(("" if isinstance(error, UserError) else f"{type(error).__name__}: ") + first_line(error))
