"""What keeps a run in order: random numbers that a resumed run draws again, losses that are numbers, and ends that save."""

import math
import signal
import time

import numpy as np
import torch
from composer import Callback, Logger, State
from composer.utils import dist

from src.cli import log
from src.errors import RunFailed
from src.training.checkpointing import CheckpointWriter, way_back


class SeedEveryStep(Callback):
    """Draws each step's dropout from (seed, step, rank), so that a run which goes on mid-epoch draws what it would have."""

    def __init__(self, seed: int):
        self.seed = seed

    def batch_start(self, state: State, logger: Logger) -> None:
        entropy = (self.seed, state.timestamp.batch.value, dist.get_global_rank())
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1))


class FiniteLoss(Callback):
    """ "stop": end the run where a loss is not finite. "skip": leave out an update whose gradients are not, and count it.

    A run that stops has not saved the step: the checkpoint before it is still the newest.
    """

    def __init__(self, action: str, writer: CheckpointWriter):
        self.action = action
        self.writer = writer
        self.skipped = 0

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if self.action != "skip":
            return
        gradients = [parameter.grad for parameter in state.model.parameters() if parameter.grad is not None]
        total = torch.stack(torch._foreach_norm(gradients)).sum()
        if on_any_rank(not math.isfinite(total), state):
            for parameter in state.model.parameters():
                parameter.grad = None  # optimizers leave such a parameter as it is
            self.skipped += 1
            step = state.timestamp.batch.value + 1
            log.warning(f"step {step}: gradients are no finite numbers; its update is left out ({self.skipped} so far)")
        logger.log_metrics({"skipped_steps": self.skipped})

    def batch_end(self, state: State, logger: Logger) -> None:
        loss = state.total_loss_dict["loss/train/total"]
        if self.action == "stop" and not math.isfinite(loss):
            lr = state.schedulers[0].get_last_lr()[0]
            raise RunFailed(
                f"step {state.timestamp.batch.value}: the loss is {loss} at learning rate {lr:.3g}; {way_back(self.writer.folder)},"
                " perhaps with a lower optimizer.lr in a new save_folder, or with on_nonfinite_loss=skip"
            )

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped = state["skipped"]


class Stopped(SystemExit):
    """The run was asked to end by a signal, has saved its last step if the disk let it, and said so. `code` is the status."""


class StopOnSignal(Callback):
    """On SIGTERM or Ctrl-C: finish the step (and the evaluation after it), save, and raise Stopped.

    The same signal once more, `PAUSE` seconds later or more, ends at once. Before, it may come twice without being meant:
    `timeout`, or a scheduler, sends it to the whole process group, in which Composer's launcher passes it on.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)
    PAUSE = 1.0

    def __init__(self, writer: CheckpointWriter):
        self.writer = writer
        self.asked = 0
        self.heard: dict[int, float] = {}  # each signal, when first
        self.before: dict[int, object] = {}

    def fit_start(self, state: State, logger: Logger) -> None:
        self.before = {signum: signal.signal(signum, self._ask) for signum in self.SIGNALS}

    def _ask(self, signum: int, frame: object) -> None:
        now = time.monotonic()
        first = self.heard.setdefault(signum, now)  # of the other one too, which a launcher sends after a Ctrl-C
        if not self.asked:
            self.asked = signum
            log.info(f"{signal.Signals(signum).name}: finishing this step and saving; once more to end at once")
        elif now - first >= self.PAUSE:
            signal.signal(signum, self.before[signum])
            signal.raise_signal(signum)

    def _restore(self) -> None:
        for signum, handler in self.before.items():
            signal.signal(signum, handler)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if on_any_rank(self.asked, state):
            refused = self.writer.save(state)
            signum = self.asked or signal.SIGTERM  # another rank was asked
            name = signal.Signals(signum).name
            if refused:
                log.warning(f"{name}: {refused}; {way_back(self.writer.folder)}")
            else:
                log.info(f"{name}: step {state.timestamp.batch.value} is saved; the same command goes on from there")
            raise Stopped(128 + signum)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._restore()


def on_any_rank(flag: object, state: State) -> bool:
    """Whether the flag is set on one of the ranks, told to all of them."""
    if dist.get_world_size() == 1:
        return bool(flag)
    raised = state.device.tensor_to_device(torch.tensor([int(bool(flag))]))
    dist.all_reduce(raised, reduce_operation="MAX")
    return bool(raised.item())
