"""What a run leaves to look at: a progress line while it lasts, `metrics.jsonl`, and a picture of its curves."""

import contextlib
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer import Logger, State, Time, TimeUnit
from composer.loggers import LoggerDestination
from tqdm import tqdm

from src.cli import is_main_process, log, progress
from src.training.metrics import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from src.data.streaming import Padding


class RunLog(LoggerDestination):
    """Writes a line to `folder/metrics.jsonl` every `interval` batches of training and after every evaluation.

    Lines of training: {"step", "samples", "seconds", "loss", "accuracy", "lr", "samples_per_second", "tokens_per_second",
    …}, the accuracy that of the masked tokens, the loss and the rates means since the line before, and the share of padding
    so far. Lines of evaluation: {"step", "samples", "seconds", "eval": {metric: value}}. A run that goes on from a
    checkpoint drops the lines after it. Where the disk refuses a line, the run goes on without it, and says so once.
    """

    def __init__(
        self,
        folder: Path,
        interval: str = "10ba",
        description: str = "train",
        show_progress: bool = True,
        padding: "Padding | None" = None,
    ):
        self.path = folder / METRICS_FILE
        self.interval = Time.from_timestring(interval).value
        self.description = description
        self.show_progress = show_progress
        self.padding = padding
        self.latest: dict[str, float] = {}
        self.losses: list[float] = []
        self.before = (0, 0, 0.0)  # samples, tokens and seconds at the line before
        self.rates: dict[str, float] = {}  # over the time between the last two lines
        self.bar = None
        self.refused = False  # a line
        # Step, tokens and seconds at the end of the first step of this process.
        self.first: tuple[float, ...] | None = None
        self.told_time_left = False

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.latest.update({name: float(value) for name, value in metrics.items()})

    def init(self, state: State, logger: Logger) -> None:
        if is_main_process():
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def after_load(self, state: State, logger: Logger) -> None:
        """Forget what came after the checkpoint that the run goes on from."""
        if is_main_process() and self.path.is_file():
            step = state.timestamp.batch.value
            kept = [line for line in read_metrics(self.path.parent) if line["step"] <= step] if step else []
            unfinished = self.path.with_suffix(".unfinished")
            try:
                unfinished.write_text("".join(json.dumps(line) + "\n" for line in kept))
                unfinished.replace(self.path)
            except OSError as error:
                self._refuse(error)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "padding": vars(self.padding) if self.padding else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])
        if self.padding:
            vars(self.padding).update(state["padding"])

    def fit_start(self, state: State, logger: Logger) -> None:
        self.before = self._counts(state)
        if self.show_progress:
            self.bar = progress(desc=self.description, unit="step", initial=state.timestamp.batch.value)

    def batch_end(self, state: State, logger: Logger) -> None:
        self.losses.append(self.latest["loss/train/total"])
        batch = state.timestamp.batch.value
        if batch % self.interval == 0 or batch == self._last_batch(state):
            finite = [loss for loss in self.losses if math.isfinite(loss)]
            loss = {"loss": sum(finite) / len(finite)} if finite else {}
            padding = self.padding.shares() if self.padding else {}
            self._write(state, {**loss, **self._training_metrics(state), **padding})
            self.losses.clear()
        if not self.told_time_left:
            self._tell_time_left(state)
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
        """End the line of the bar, so that what is said next has its own."""
        if self.bar is not None:
            self.bar.close()

    def _last_batch(self, state: State) -> int | None:
        """The batch at which the run ends, as far as it can be told by now."""
        if state.max_duration.unit == TimeUnit.EPOCH:
            return None if state.dataloader_len is None else state.max_duration.value * state.dataloader_len.value
        elapsed = state.get_elapsed_duration().value
        return round(state.timestamp.batch.value / elapsed) if elapsed else None

    def _counts(self, state: State) -> tuple[int, int, float]:
        now = state.timestamp
        return now.sample.value, now.token.value, now.total_wct.total_seconds()

    def _training_metrics(self, state: State) -> dict[str, float]:
        metrics = {"lr": state.schedulers[0].get_last_lr()[0]} if state.schedulers else {}
        for name, key in (
            ("accuracy", "metrics/train/MaskedAccuracy"),
            ("skipped_steps", "skipped_steps"),
            ("flops_per_second", "throughput/flops_per_sec"),  # of the speed_monitor, from its second window on
            ("share_of_peak_flops", "throughput/device/mfu"),
        ):
            if key in self.latest:
                metrics[name] = self.latest[key]
        samples, tokens, seconds = (now - then for now, then in zip(self._counts(state), self.before))
        self.before = self._counts(state)
        self.rates = {"samples_per_second": samples / seconds, "tokens_per_second": tokens / seconds} if seconds else {}
        return metrics | self.rates

    def _postfix(self) -> str:
        parts = [f"loss {self.latest['loss/train/total']:.3f}"]
        if "metrics/train/MaskedAccuracy" in self.latest:
            parts.append(f"accuracy {self.latest['metrics/train/MaskedAccuracy']:.1%}")
        parts += [f"{tqdm.format_sizeof(rate)} {name.split('_')[0]}/s" for name, rate in self.rates.items()]
        if "throughput/flops_per_sec" in self.latest:
            share = self.latest.get("throughput/device/mfu")
            of_peak = "" if share is None else f" ({share:.0%} of peak)"
            parts.append(f"{tqdm.format_sizeof(self.latest['throughput/flops_per_sec'])}FLOP/s{of_peak}")
        return ", ".join(parts)

    def _tell_time_left(self, state: State) -> None:
        """After ten steps, or twenty seconds of them, say once how long the rest will take. The first, the slowest, is left out."""
        _, tokens, seconds = self._counts(state)
        now = (state.timestamp.batch.value, tokens, seconds)
        if self.first is None:
            self.first = now
            return
        steps, tokens, seconds = (end - begin for begin, end in zip(self.first, now))
        last = self._last_batch(state)
        if last is None or not seconds or (steps < 10 and seconds < 20):
            return
        self.told_time_left = True
        minutes = math.ceil((last - now[0]) * seconds / steps / 60)
        log.info(f"about {minutes // 60}:{minutes % 60:02} hours left at {tokens / seconds:,.0f} tokens a second")

    def _write(self, state: State, values: dict[str, Any]) -> None:
        if not is_main_process():
            return
        at = {
            "step": state.timestamp.batch.value,
            "samples": state.timestamp.sample.value,
            "seconds": round(state.timestamp.total_wct.total_seconds(), 1),
        }
        size = self.path.stat().st_size if self.path.is_file() else 0
        try:
            with self.path.open("a") as file:
                file.write(json.dumps({**at, **values}) + "\n")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(self.path, size)  # half a line would hide those after it
            self._refuse(error)

    def _refuse(self, error: OSError) -> None:
        if not self.refused:
            log.warning(f"cannot write {self.path}: {error.strerror or error}; training goes on, and leaves out what cannot be written there")  # fmt: skip
        self.refused = True


def draw_curves(runs: Iterable[tuple[str, Path]], picture: Path) -> None:
    """Loss and masked accuracy of runs, (name, folder), against the samples seen: evaluation as lines, training faint."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    panels = (
        ("loss", "loss", "eval/LanguageCrossEntropy"),
        ("masked accuracy", "accuracy", "eval/MaskedAccuracy"),
    )
    floor = None
    for color, (name, folder) in zip(plt.rcParams["axes.prop_cycle"].by_key()["color"], runs):
        lines = read_metrics(folder)
        for axis, (title, train_key, eval_key) in zip(axes, panels):
            train = [(line["samples"], line[train_key]) for line in lines if train_key in line]
            evals = [(line["samples"], line["eval"][eval_key]) for line in lines if "eval" in line]
            if train:
                axis.plot(*zip(*train), color=color, alpha=0.25, linewidth=1)
            if evals:
                axis.plot(*zip(*evals), color=color, marker="o", markersize=4, label=name)
            axis.set(title=title, xlabel="samples")
        floor = next((line["eval"]["eval/MostFrequentTokenAccuracy"] for line in lines if "eval" in line), floor)
    if floor is not None:
        axes[1].axhline(floor, color="gray", linestyle=":", label="most frequent token")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.suptitle("evaluation (dots) and training (faint; more tokens are masked there)", fontsize=9)
    figure.savefig(picture, dpi=150)
    plt.close(figure)
