"""Progress of a run: a bar, an estimate of the time left, and the lines of `metrics.jsonl`."""

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any, Protocol

from composer import Logger, State, Time, TimeUnit
from composer.loggers import LoggerDestination
from tqdm import tqdm

from src.cli import is_main_process, log, progress
from src.errors import reason
from src.files import METRICS, read_json_lines, write_atomically
from src.training.metrics import Curve

TRAIN_LOSS = "loss/train/total"  # Composer's names
FLOPS, MFU = "throughput/flops_per_sec", "throughput/device/mfu"


class Statistics(Protocol):
    """What a data loader counts, as plain attributes; saved with the run."""

    def shares(self) -> dict[str, float]:
        """Return values for the lines of metrics.jsonl."""


class RunLog(LoggerDestination):
    """Write a line to `folder/metrics.jsonl` every `interval` batches of training and after every evaluation.

    Training lines: {"step", "samples", "seconds", "loss", "lr", "samples_per_second", "tokens_per_second", …} and
    the training metrics of `curves`; loss and rates are means since the previous line. Evaluation lines: {"step",
    "samples", "seconds", "eval": {metric: value}}. A resumed run drops the lines after its checkpoint. If a line cannot
    be written, the run continues without it and warns once.
    """

    def __init__(
        self,
        folder: Path,
        interval: str = "10ba",
        description: str = "train",
        show_progress: bool = True,
        curves: tuple[Curve, ...] = (),
        statistics: Statistics | None = None,
    ):
        self.path = folder / METRICS
        self.interval = Time.from_timestring(interval).value
        self.description = description
        self.show_progress = show_progress
        self.train_keys = {c.train_key: c for c in curves if c.train_key is not None and c.train_key != TRAIN_LOSS}
        self.statistics = statistics
        self.latest: dict[str, float] = {}
        self.losses: list[float] = []
        self.last_counts = (0, 0, 0.0)  # samples, tokens and seconds at the previous line
        self.rates: dict[str, float] = {}  # between the last two lines
        self.bar: tqdm | None = None
        self.failed = False  # whether writing a line has failed
        self.first_step: tuple[float, ...] | None = (
            None  # step, tokens and seconds after the first step of this process
        )
        self.estimated = False

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.latest.update({name: float(value) for name, value in metrics.items()})

    def init(self, state: State, logger: Logger) -> None:
        if is_main_process():
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def after_load(self, state: State, logger: Logger) -> None:
        """Drop the lines after the checkpoint that the run resumes from."""
        if is_main_process() and self.path.is_file():
            step = state.timestamp.batch.value
            kept = [line for line in read_json_lines(self.path) if line["step"] <= step] if step else []
            try:
                write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept))
            except OSError as error:
                self._warn(error)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "padding": vars(self.statistics) if self.statistics else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])
        if self.statistics:
            vars(self.statistics).update(state["padding"])

    def fit_start(self, state: State, logger: Logger) -> None:
        self.last_counts = self._counts(state)
        if self.show_progress:
            self.bar = progress(desc=self.description, unit="step", initial=state.timestamp.batch.value)

    def batch_end(self, state: State, logger: Logger) -> None:
        self.losses.append(self.latest[TRAIN_LOSS])
        batch = state.timestamp.batch.value
        if batch % self.interval == 0 or batch == self._last_batch(state):
            finite = [loss for loss in self.losses if math.isfinite(loss)]
            loss = {"loss": sum(finite) / len(finite)} if finite else {}
            shares = self.statistics.shares() if self.statistics else {}
            self._write(state, {**loss, **self._training_metrics(state), **shares})
            self.losses.clear()
        if not self.estimated:
            self._estimate_time_left(state)
        if self.bar is not None:
            self.bar.total = self._last_batch(state)
            self.bar.set_postfix_str(self._postfix(), refresh=False)
            self.bar.update(batch - self.bar.n)

    def eval_end(self, state: State, logger: Logger) -> None:
        values = {
            f"{label}/{name}": float(metric.compute())
            for label, metrics in state.eval_metrics.items()
            for name, metric in metrics.items()
            if metric.update_count
        }
        self._write(state, {"eval": values})

    def fit_end(self, state: State, logger: Logger) -> None:
        self.end_progress()

    def end_progress(self) -> None:
        """Close the bar, so that the next message starts on a new line."""
        if self.bar is not None:
            self.bar.close()

    def _last_batch(self, state: State) -> int | None:
        """Return the batch at which the run ends, or None if it is not known yet."""
        if state.max_duration.unit == TimeUnit.EPOCH:
            return None if state.dataloader_len is None else state.max_duration.value * state.dataloader_len.value
        elapsed = state.get_elapsed_duration().value
        return round(state.timestamp.batch.value / elapsed) if elapsed else None

    def _counts(self, state: State) -> tuple[int, int, float]:
        now = state.timestamp
        return now.sample.value, now.token.value, now.total_wct.total_seconds()

    def _training_metrics(self, state: State) -> dict[str, float]:
        metrics = {"lr": state.schedulers[0].get_last_lr()[0]} if state.schedulers else {}
        names = {key: curve.name for key, curve in self.train_keys.items()}
        names |= {"skipped_steps": "skipped_steps", FLOPS: "flops_per_second", MFU: "share_of_peak_flops"}
        metrics |= {name: self.latest[key] for key, name in names.items() if key in self.latest}
        samples, tokens, seconds = (now - last for now, last in zip(self._counts(state), self.last_counts))
        self.last_counts = self._counts(state)
        self.rates = {"samples_per_second": samples / seconds, "tokens_per_second": tokens / seconds} if seconds else {}
        return metrics | self.rates

    def _postfix(self) -> str:
        parts = [f"loss {self.latest[TRAIN_LOSS]:.3f}"]
        for key, curve in self.train_keys.items():
            if key in self.latest:
                parts.append(
                    f"{curve.name} {self.latest[key]:.1%}" if curve.percent else f"{curve.name} {self.latest[key]:.3f}"
                )
        parts += [f"{tqdm.format_sizeof(rate)} {name.split('_')[0]}/s" for name, rate in self.rates.items()]
        if FLOPS in self.latest:
            of_peak = f" ({self.latest[MFU]:.0%} of peak)" if MFU in self.latest else ""
            parts.append(f"{tqdm.format_sizeof(self.latest[FLOPS])}FLOP/s{of_peak}")
        return ", ".join(parts)

    def _estimate_time_left(self, state: State) -> None:
        """After ten steps or twenty seconds, log once how long the rest will take, not counting the slow first step."""
        _, tokens, seconds = self._counts(state)
        now = (state.timestamp.batch.value, tokens, seconds)
        if self.first_step is None:
            self.first_step = now
            return
        steps, tokens, seconds = (end - start for start, end in zip(self.first_step, now))
        last = self._last_batch(state)
        if last is None or not seconds or (steps < 10 and seconds < 20):
            return
        self.estimated = True
        minutes = math.ceil((last - now[0]) * seconds / steps / 60)
        log.info(f"about {minutes // 60}:{minutes % 60:02} hours left at {tokens / seconds:,.0f} tokens/s")

    def _write(self, state: State, values: dict[str, Any]) -> None:
        if not is_main_process():
            return
        now = state.timestamp
        at = {"step": now.batch.value, "samples": now.sample.value, "seconds": round(now.total_wct.total_seconds(), 1)}
        size = self.path.stat().st_size if self.path.is_file() else 0
        try:
            with self.path.open("a") as file:
                file.write(json.dumps({**at, **values}) + "\n")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(self.path, size)  # a partial line would hide those after it
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self.failed:
            log.warning(
                f"cannot write {self.path}: {reason(error)}; training continues without the lines it cannot write"
            )
        self.failed = True
