"""Callbacks that keep a run reproducible, finite and resumable, or end it early."""

import math
import signal
import time
from typing import Any

import numpy as np
import torch
from composer import Callback, Event, Logger, State, Timestamp, TimeUnit
from composer.callbacks import EarlyStopper
from composer.utils import dist

from src.cli import log
from src.config import Rule, check_value
from src.errors import RunFailed
from src.training.checkpointing import CheckpointWriter, resume_hint


class SeedEveryStep(Callback):
    """Seed each step's dropout by (seed, step, rank), so that a resumed run repeats an uninterrupted one."""

    def __init__(self, seed: int):
        self.seed = seed

    def batch_start(self, state: State, logger: Logger) -> None:
        entropy = (self.seed, state.timestamp.batch.value, dist.get_global_rank())
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1))


class FiniteLoss(Callback):
    """At a non-finite loss, stop before the step is saved; or skip and count updates with non-finite gradients."""

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
            state.model.zero_grad()  # optimizers skip parameters without a gradient
            self.skipped += 1
            step = state.timestamp.batch.value + 1
            log.warning(f"step {step}: non-finite gradients; update skipped ({self.skipped} so far)")
        logger.log_metrics({"skipped_steps": self.skipped})

    def batch_end(self, state: State, logger: Logger) -> None:
        loss = state.total_loss_dict["loss/train/total"]
        if self.action == "stop" and not math.isfinite(loss):
            at = f"at learning rate {state.schedulers[0].get_last_lr()[0]:.3g}; {resume_hint(self.writer.folder)}"
            to_do = "try a lower optimizer.lr in a new save_folder, or on_nonfinite_loss=skip"
            raise RunFailed(f"step {state.timestamp.batch.value}: loss is {loss} {at}; {to_do}")

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped = state["skipped"]


class StopOnSignal(Callback):
    """On SIGTERM or Ctrl-C: finish the step, or the batch of an evaluation, which the resumed run repeats; save, and
    raise SystemExit. The same signal again, at least `PAUSE` seconds later, ends the run at once. A sooner one may be a
    duplicate: `timeout` or a scheduler signals the whole process group, and Composer's launcher in it forwards the
    signal."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)
    PAUSE = 1.0

    def __init__(self, writer: CheckpointWriter):
        self.writer = writer
        self.requested = 0
        self.first_heard: dict[int, float] = {}  # per signal
        self.old_handlers: dict[int, object] = {}

    def fit_start(self, state: State, logger: Logger) -> None:
        self.old_handlers = {signum: signal.signal(signum, self._request) for signum in self.SIGNALS}

    def _request(self, signum: int, frame: object) -> None:
        now = time.monotonic()
        first = self.first_heard.setdefault(signum, now)  # a launcher may send SIGTERM after a Ctrl-C
        if not self.requested:
            self.requested = signum
            log.info(f"{signal.Signals(signum).name}: finishing this step and saving; repeat to end at once")
        elif now - first >= self.PAUSE:
            signal.signal(signum, self.old_handlers[signum])
            signal.raise_signal(signum)

    def eval_before_all(self, state: State, logger: Logger) -> None:
        if not on_any_rank(self.requested, state):
            return
        for algorithm in state.algorithms:
            if algorithm.match(Event.EVAL_END, state):  # averaged weights are in place of the trained ones
                algorithm.apply(Event.EVAL_END, state, logger)
        self.batch_checkpoint(state, logger)

    eval_batch_end = eval_before_all

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if not on_any_rank(self.requested, state):
            return
        signum = signal.Signals(self.requested or signal.SIGTERM)  # 0: signalled on another rank
        if failure := self.writer.save(state):
            log.warning(f"{signum.name}: {failure}; {resume_hint(self.writer.folder)}")
        else:
            log.info(f"{signum.name}: saved step {state.timestamp.batch.value}; the same command resumes from it")
        raise SystemExit(128 + signum)

    def fit_end(self, state: State, logger: Logger) -> None:
        for signum, handler in self.old_handlers.items():
            signal.signal(signum, handler)


def on_any_rank(flag: object, state: State) -> bool:
    """Return whether the flag is set on any rank, with the same answer on all of them."""
    if dist.get_world_size() == 1:
        return bool(flag)
    flags = state.device.tensor_to_device(torch.tensor([int(bool(flag))]))
    dist.all_reduce(flags, reduce_operation="MAX")
    return bool(flags.item())


class ResumableEarlyStopper(EarlyStopper):
    """End the run when `monitor` has not improved for `patience`. Its best value is saved with the run."""

    def __init__(self, monitor="LanguageCrossEntropy", dataloader_label="eval", comp=None, min_delta=0, patience="1ep"):
        if comp is None and "crossentropy" in monitor.lower():  # Composer recognizes losses by other names
            comp = "less"
        super().__init__(monitor, dataloader_label, comp, min_delta, patience)
        if self.patience.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH):
            raise ValueError(f"patience {patience} must be in epochs (ep) or batches (ba)")

    def before_load(self, state: State, logger: Logger) -> None:
        measured = {**state.eval_metrics, "train": state.train_metrics or {}}
        labels, key = Rule(choices=tuple(measured)), "callbacks.early_stopper"
        check_value(f"{key}.dataloader_label", self.dataloader_label, rule=labels)
        check_value(f"{key}.monitor", self.monitor, rule=Rule(choices=tuple(measured[self.dataloader_label])))

    def state_dict(self) -> dict[str, Any]:
        if self.best is None:
            return {}
        occurred = self.best_occurred
        return {"best": float(self.best), "epoch": occurred.epoch.value, "batch": occurred.batch.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.best = torch.tensor(state["best"])
            self.best_occurred = Timestamp(epoch=state["epoch"], batch=state["batch"])
