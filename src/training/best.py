"""The key `save_best`: `best-rank0.pt`, the checkpoint of a run's best evaluation so far."""

import os
import shutil
from pathlib import Path

from composer import Callback, Logger, State

from src.checkpoints.reading import read_checkpoint
from src.cli import log
from src.errors import reason
from src.files import BEST, METRICS, read_json_lines
from src.training.checkpointing import CheckpointWriter, checkpoints
from src.training.ranks import decide
from src.training.task import Curve, best_step


class BestCheckpoint(Callback):
    """Save each step whose evaluation is better by `curve` than all before, and let best-rank0.pt be its checkpoint: a
    file of its own, which stays when `writer` deletes the other. Which is best is read from metrics.jsonl, so a resumed
    run knows it. What fails only warns."""

    def __init__(self, curve: Curve, writer: CheckpointWriter):
        self.curve, self.writer, self.folder = curve, writer, writer.folder

    def after_load(self, state: State, logger: Logger) -> None:
        """Make up for what a killed run left undone, or a run did before it had this callback."""
        if (step := self._best_step(state)) is not None:
            self._report(decide(lambda: self._link(step)))

    def eval_after_all(self, state: State, logger: Logger) -> None:
        if (step := self._best_step(state)) == state.timestamp.batch.value:
            self._report(self.writer.save(state) or decide(lambda: self._link(step)))

    eval_standalone_end = eval_after_all

    def _best_step(self, state: State) -> int | None:
        now = state.timestamp.batch.value
        lines = decide(lambda: read_json_lines(self.folder / METRICS))
        return best_step([(x["step"], x["eval"]) for x in lines if "eval" in x and x["step"] <= now], self.curve)

    def _report(self, failure: str | None) -> None:
        if failure:
            log.warning(f"save_best: {failure}; training continues")

    def _link(self, step: int) -> str | None:
        """Return None, or why best-rank0.pt is not the checkpoint of this step."""
        best, unfinished = self.folder / BEST, self.folder / f"{BEST}.unfinished"
        path = next((x for x in checkpoints(self.folder) if x.name.endswith(f"-ba{step}-rank0.pt")), None)
        try:
            if path is None:  # deleted, since newer ones are kept
                if best.is_file() and read_checkpoint(best).timestamp.get("batch") == step:
                    return None
                return f"step {step} has the best {self.curve.title} so far, and its checkpoint is not in {self.folder}"
            if not (best.exists() and best.samefile(path)):
                unfinished.unlink(missing_ok=True)
                _give_name(path, unfinished)
                unfinished.replace(best)
        except OSError as error:
            return f"{best} cannot be written ({reason(error)})"
        return None


def _give_name(path: Path, name: Path) -> None:
    """Give a file, which is never changed, a second name, or copy it on a file system without."""
    try:
        os.link(path, name)
    except OSError:
        shutil.copyfile(path, name)
