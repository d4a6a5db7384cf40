"""The key `save_best`: `best-rank0.pt`, a link to the checkpoint of a run's best evaluation so far."""

from composer import Callback, Logger, State

from src.cli import log
from src.errors import reason
from src.files import BEST, METRICS, follow, link, read_json_lines
from src.training.checkpointing import CheckpointWriter, checkpoints
from src.training.ranks import decide
from src.training.task import Curve, best_step


class BestCheckpoint(Callback):
    """Save each step whose evaluation is better by `curve` than all before, and point best-rank0.pt at its checkpoint,
    which `writer` then does not delete. Which is best is read from metrics.jsonl, so a resumed run knows it. What fails
    only warns."""

    def __init__(self, curve: Curve, writer: CheckpointWriter):
        self.curve, self.writer, self.folder = curve, writer, writer.folder

    def after_load(self, state: State, logger: Logger) -> None:
        """Set the link that is missing if the run was killed before it was set, or began without this callback."""
        if (step := self._best_step(state)) is not None:
            self._report(decide(lambda: self._link(step)))

    def eval_after_all(self, state: State, logger: Logger) -> None:
        if (step := self._best_step(state)) == state.timestamp.batch.value:
            self._report(self.writer.save(state) or decide(lambda: self._link(step)))

    eval_standalone_end = eval_after_all

    def _best_step(self, state: State) -> int | None:
        now = state.timestamp.batch.value

        def found() -> int | None:
            lines = read_json_lines(self.folder / METRICS)
            return best_step([(x["step"], x["eval"]) for x in lines if "eval" in x and x["step"] <= now], self.curve)

        return decide(found)  # the other ranks need no more than the step

    def _report(self, failure: str | None) -> None:
        if failure:
            log.warning(f"save_best: {failure}; training continues")

    def _link(self, step: int) -> str | None:
        """Return None, or why best-rank0.pt does not point at the checkpoint of this step."""
        best = self.folder / BEST
        path = next((x for x in checkpoints(self.folder) if x.name.endswith(f"-ba{step}-rank0.pt")), None)
        if path is None:
            return f"step {step} has the best {self.curve.title} so far, and its checkpoint is not in {self.folder}"
        try:
            if follow(best).resolve() != path.resolve():
                link(best, path.name)
                if step == self.writer.saved_batch:
                    self.writer.delete_old(path)  # the one that was best before
        except OSError as error:
            return f"{best} cannot be written ({reason(error)})"
        return None
