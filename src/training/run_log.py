"""What a run reports: the time of startup, a progress bar, the time left, and `metrics.jsonl`."""

import contextlib
import functools
import itertools
import json
import logging
import math
import os
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from composer import Callback, Logger, State, Time, TimeUnit
from composer.loggers import LoggerDestination
from composer.utils import dist
from tqdm import tqdm

from src.cli import is_main_process, log, progress
from src.errors import reason
from src.files import METRICS, read_json_lines, write_atomically
from src.training.epochs import steps_left
from src.training.task import Curve

TRAIN_LOSS = "loss/train/total"  # Composer's names
FLOPS, MFU = "throughput/flops_per_sec", "throughput/device/mfu"


class RunLog(LoggerDestination):
    """Write a line to `folder/metrics.jsonl` every `interval` batches of training and after every evaluation. Training
    lines: {"step", "samples", "seconds", "loss", "lr", "samples_per_second", "tokens_per_second", …} and the training
    metrics of `curves`; loss and rates are means since the previous line. Evaluation lines: {"step", "samples",
    "seconds", "eval": {metric: value}}. Lines of other evaluations of a checkpoint: {"step", "samples", "seconds",
    "finetune": {metric: value}}, all of that checkpoint, and later in the file than the lines of its step. A resumed
    run drops the lines of later steps than its checkpoint's, and writes {"step", "samples", "seconds", "changed":
    {key: [old, new]}} if it changes its config. If a line cannot be written, the run continues without it and warns
    once. Without a title there is no progress bar."""

    def __init__(
        self,
        folder: Path,
        interval: str,
        title: str = "",
        curves: Sequence[Curve] = (),
        statistics: Any = None,
        counts: str = "tokens",
        compiles: bool = False,
    ):
        self.path = folder / METRICS
        self.interval = Time.from_timestring(interval).value
        self.title, self.compiles = title, compiles
        self.train_curves = [curve for curve in curves if curve.train_key not in (None, TRAIN_LOSS)]
        self.statistics, self.counts = statistics, counts  # of a Task
        self.latest: dict[str, float] = {}
        self.losses: list[float] = []
        self.last_line: tuple = ()  # `_counts` at the previous line
        self.steps: deque[tuple] = deque(maxlen=11)  # `_counts` after this process's first steps
        self.rates: dict[str, float] = {}  # between the last two lines
        self.bar: tqdm | None = None
        self.resumed_from: int | None = None  # the step of the checkpoint, until it is evaluated
        self.estimated = False  # whether the time left has been logged
        self.warn_once = functools.cache(log.warning)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.latest.update({name: float(value) for name, value in metrics.items()})

    def after_load(self, state: State, logger: Logger) -> None:
        """Drop the lines after the checkpoint that the run resumes from."""
        step = self.resumed_from = state.timestamp.batch.value
        self._keep(lambda line: step > 0 and line["step"] <= step)

    def _keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        if not (is_main_process() and self.path.is_file()):
            return
        kept = [line for line in read_json_lines(self.path) if wanted(line)]
        try:
            write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        except OSError as error:
            self.warn_once(f"cannot write {self.path}: {reason(error)}; lines of earlier steps are repeated")

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "padding": vars(self.statistics) if self.statistics else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])
        if self.statistics:
            vars(self.statistics).update(state["padding"])

    def changed(self, state: State, changes: dict[str, Any]) -> None:
        """Write and log what changes from the next step on: {key: [old value, new value]}."""
        at = state.timestamp.batch.value
        if not any(line["step"] == at and line.get("changed") == changes for line in read_json_lines(self.path)):
            self.write({**place(state), "changed": changes})
        for name, (old, new) in changes.items():
            log.info(f"{name}: {old} up to step {at}, {new} from now on")

    def fit_start(self, state: State, logger: Logger) -> None:
        self.last_line = _counts(state)
        if self.title:
            self.bar = progress(desc=self.title, unit="step", initial=state.timestamp.batch.value)

    def batch_end(self, state: State, logger: Logger) -> None:
        self.losses.append(self.latest[TRAIN_LOSS])
        batch, last = state.timestamp.batch.value, self._last_batch(state)
        if batch % self.interval == 0 or batch == last:
            self.write({**place(state), **self._training_metrics(state)})
            self.losses.clear()
        if not self.estimated:
            self.steps.append(_counts(state))
            self._estimate(None if last is None else last - batch)
        if self.bar is not None:
            self.bar.total = last
            self.bar.set_postfix_str(self._postfix(), refresh=False)
            self.bar.update(batch - self.bar.n)

    def _estimate(self, left: int | None) -> None:
        """Log the time left once, after ten steps or twenty seconds, not counting the slow first step. Where others
        compile too, it waits for ten, and their median."""
        steps, samples, tokens, seconds = (now - first for now, first in zip(self.steps[-1], self.steps[0]))
        if left is None or (steps < 10 and (seconds < 20 or self.compiles)):
            return
        median = statistics.median(after[3] - before[3] for before, after in itertools.pairwise(self.steps))
        if not median:
            return
        self.estimated = True
        minutes = math.ceil(left * median / 60)
        rate = (tokens if self.counts == "tokens" else samples) / steps / median
        time = "less than a minute" if minutes <= 1 else f"about {minutes // 60}:{minutes % 60:02} hours"
        log.info(f"{time} left at {rate:,.0f} {self.counts}/s")

    def eval_end(self, state: State, logger: Logger) -> None:
        if (step := state.timestamp.batch.value) == self.resumed_from:  # perhaps a repetition
            self._keep(lambda line: line["step"] < step or "eval" not in line)
            self.resumed_from = None
        metrics = {f"{label}/{name}": m for label, each in state.eval_metrics.items() for name, m in each.items()}
        # The only labels may be another rank's; Composer has added up those of all.
        own = [name for name, m in metrics.items() if m.update_count]
        counted = set(itertools.chain(*dist.all_gather_object(own)))
        values = {name: float(m.compute()) for name, m in metrics.items() if name in counted}
        self.write({**place(state), "eval": values})

    def _last_batch(self, state: State) -> int | None:
        """Return the batch at which the run ends, or None if it is not known yet."""
        if state.max_duration.unit == TimeUnit.EPOCH:
            if state.dataloader_len is None:
                return None
            now, epochs = state.timestamp, state.max_duration.value - state.timestamp.epoch.value
            left = steps_left(state.train_dataloader, now)
            return now.batch.value + left + (epochs - 1) * state.dataloader_len.value
        elapsed = state.get_elapsed_duration().value
        return round(state.timestamp.batch.value / elapsed) if elapsed else None

    def _training_metrics(self, state: State) -> dict[str, float]:
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        metrics = {"loss": sum(finite) / len(finite)} if finite else {}
        if state.schedulers:
            metrics["lr"] = state.schedulers[0].get_last_lr()[0]
        names = {curve.train_key: curve.name for curve in self.train_curves}
        names |= {"skipped_steps": "skipped_steps", FLOPS: "flops_per_second", MFU: "share_of_peak_flops"}
        metrics |= {name: self.latest[key] for key, name in names.items() if key in self.latest}
        _, samples, tokens, seconds = (now - last for now, last in zip(_counts(state), self.last_line))
        self.last_line = _counts(state)
        self.rates = {"samples_per_second": samples / seconds, "tokens_per_second": tokens / seconds} if seconds else {}
        return metrics | self.rates | (self.statistics.shares() if self.statistics else {})

    def _postfix(self) -> str:
        parts = [f"loss {self.latest[TRAIN_LOSS]:.3f}"]
        for curve in self.train_curves:
            if (value := self.latest.get(curve.train_key)) is not None:
                parts.append(f"{curve.name} {value:{'.1%' if curve.percent else '.3f'}}")
        parts += [f"{tqdm.format_sizeof(rate)} {name.split('_')[0]}/s" for name, rate in self.rates.items()]
        if FLOPS in self.latest:
            of_peak = f" ({self.latest[MFU]:.0%} of peak)" if MFU in self.latest else ""
            parts.append(f"{tqdm.format_sizeof(self.latest[FLOPS])}FLOP/s{of_peak}")
        return ", ".join(parts)

    def write(self, line: dict[str, Any]) -> None:
        """Append a line, which begins with its `place`."""
        if not is_main_process():
            return
        size = self.path.stat().st_size if self.path.is_file() else 0
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(self.path, size)  # a partial line would hide those after it
            self.warn_once(f"cannot write {self.path}: {reason(error)}; training continues without these lines")


def place(state: State) -> dict[str, float]:
    """Return where in a run its state is, as a line has it."""
    step, samples, _, seconds = _counts(state)
    return {"step": step, "samples": samples, "seconds": round(seconds, 1)}


def _counts(state: State) -> tuple[int, int, int, float]:
    """Return the steps, samples, tokens and seconds of a run so far."""
    now = state.timestamp
    return now.batch.value, now.sample.value, now.token.value, now.total_wct.total_seconds()


class LibraryMessages(logging.Handler):
    """Pass the messages and warnings of libraries on to this project's log, each once and in one line."""

    libraries = ("composer", "streaming")
    omitted = (  # starts of messages that no user can act on
        "composer: No batches were trained",  # of a run that resumes at the end of an epoch
        "composer: Cannot split",  # the last batch is smaller
        "composer: The tokenizer was not provided",  # image models have none
        "streaming: Because `num_canonical_nodes`",  # the default, named whenever a run resumes
    )

    def __init__(self) -> None:
        super().__init__()
        self.passed: set[str] = set()
        self.others = warnings.showwarning

    def start(self) -> None:
        """Take over from the libraries' own handlers; pass on warnings and errors, and at level debug all messages."""
        for name in self.libraries:
            library = logging.getLogger(name)
            library.setLevel(log.level if log.level == logging.DEBUG else max(log.level, logging.WARNING))
            library.handlers, library.propagate = [self], False
        if warnings.showwarning != self.show_warning:
            self.others, warnings.showwarning = warnings.showwarning, self.show_warning

    def emit(self, record: logging.LogRecord) -> None:
        self._pass(record.name.split(".")[0], record.levelno, record.getMessage(), record.exc_info)

    def show_warning(self, message: Warning, category: type, filename: str, *rest: Any, **named: Any) -> None:
        """Stand in for `warnings.showwarning`."""
        library = next((name for name in self.libraries if f"-packages/{name}/" in filename), None)
        if library is None:
            self.others(message, category, filename, *rest, **named)
        else:
            self._pass(library, logging.WARNING, str(message))

    def _pass(self, library: str, level: int, text: str, error: Any = None) -> None:
        line = f"{library}: {' '.join(text.split())}"
        if line not in self.passed and not line.startswith(self.omitted):
            self.passed.add(line)
            log.log(level, line, exc_info=error)


library_messages = LibraryMessages()


class Startup(Callback):
    """Measure the phases of startup and report them after the first step. Construct it once imports are done."""

    def __init__(self) -> None:
        self.started = self.last = psutil.Process().create_time()
        self.phases: dict[str, float] = {}
        self.done("imports")

    def done(self, phase: str) -> None:
        """Attribute the time since the previous phase to this one."""
        now = time.time()
        self.phases[phase], self.last = now - self.last, now

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.phases:
            self.done("first step")
            phases = ", ".join(f"{seconds:.1f} {phase}" for phase, seconds in self.phases.items())
            log.info(f"first step after {self.last - self.started:.1f} s: {phases}")
            self.phases = {}
