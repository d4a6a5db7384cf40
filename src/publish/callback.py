"""The key `hf_export`: export Hub folders of a run's checkpoints during training; a failed export never stops it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from composer import Callback, Logger, State
from composer.utils import dist

from src.cli import log
from src.errors import RunFailed
from src.files import LATEST


class HubExports(Callback):
    """After each save, export to `save_folder/hub/ep{epoch}-ba{batch}`; delete exports whose checkpoint is deleted.

    Rank 0 exports; the other ranks wait for it, at most `dist_timeout` seconds. `writer` is the callback before this
    one, which saves checkpoints: it has a `folder` and a `saved_batch`.
    """

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
            log.warning(f"step {self.exported_batch}: the Hub folder was not written, training continues: {failure}")
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
    checkpoint = (folder / LATEST).resolve()
    out = folder / "hub" / checkpoint.name.removesuffix("-rank0.pt")
    if out.is_dir() and checkpoint.exists():
        if out.stat().st_mtime >= checkpoint.stat().st_mtime:
            return out, None
        shutil.rmtree(out, ignore_errors=True)  # exported from an older checkpoint of the same name
    hub = Path(__file__).parents[1] / "hub.py"
    command = [sys.executable, hub, "export", f"--checkpoint={checkpoint}", f"--out={out}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=time_limit)
    except subprocess.TimeoutExpired:
        return out, f"it took more than {time_limit:.0f} s"
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return out, last.removeprefix("error: ") if done.returncode else None
