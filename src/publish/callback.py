"""The key `hf_export`: Hub folders of a run's checkpoints, made while it goes on. What fails there stops no training."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from composer import Callback, Logger, State
from composer.utils import dist

from src.cli import log
from src.errors import RunFailed
from src.training.checkpointing import LATEST, CheckpointWriter

CHOICES = ("end", "save")


class HubExports(Callback):
    """After each save, writes the checkpoint as `save_folder/hub/ep{epoch}-ba{batch}`; keeps as many as there are checkpoints.

    Stands after the writer of checkpoints in the list of callbacks. Works on rank 0 alone, which the others await for
    `dist_timeout` seconds at most.
    """

    def __init__(self, writer: CheckpointWriter, dist_timeout: float):
        self.writer = writer
        self.seconds = min(0.8 * dist_timeout, 24 * 3600)  # of one export
        self.exported_batch = -1

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        self._export()

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        self._export()

    def _export(self) -> None:
        if dist.get_global_rank() != 0 or self.writer.saved_batch == self.exported_batch:
            return
        self.exported_batch = self.writer.saved_batch
        out, refused = export_newest(self.writer.folder, self.seconds)
        if refused:
            log.warning(f"step {self.exported_batch}: no Hub folder, training goes on: {refused}")
            return
        for folder in out.parent.iterdir():
            ours = re.fullmatch(r"ep\d+-ba\d+(-unfinished)?", folder.name)
            if ours and not (self.writer.folder / f"{folder.name}-rank0.pt").exists():
                shutil.rmtree(folder, ignore_errors=True)


def export_last(folder: Path) -> Path:
    """The Hub folder of a finished run's last checkpoint, made if it is not there. Raises RunFailed where it cannot be."""
    out, refused = export_newest(folder)
    if refused:
        raise RunFailed(f"the run is done and saved, but not its Hub folder: {refused}; the same command tries again")
    return out


def export_newest(folder: Path, seconds: float | None = None) -> tuple[Path, str | None]:
    """Export a run's newest checkpoint in a process of its own; returns the Hub folder, and why there is none (or None)."""
    checkpoint = (folder / LATEST).resolve()
    out = folder / "hub" / checkpoint.name.removesuffix("-rank0.pt")
    if out.is_dir() and checkpoint.exists():
        if out.stat().st_mtime >= checkpoint.stat().st_mtime:
            return out, None
        shutil.rmtree(out, ignore_errors=True)  # of a checkpoint of that name which was lost and made anew
    script = Path(__file__).parents[1] / "hub.py"
    command = [sys.executable, str(script), "export", "--checkpoint", str(checkpoint), "--out", str(out)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        return out, str(error) if isinstance(error, OSError) else f"it took more than {seconds:.0f} s"
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return out, said[-1].removeprefix("error: ")
    return out, None
