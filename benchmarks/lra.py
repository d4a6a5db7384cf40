"""Time and memory of a training step of the recipes of Long Range Arena at full size:

    python benchmarks/lra.py [yamls/lra/lion-s.yaml ...] [--tasks listops,pathx] [--device cuda] [key=value ...]

A step is forward, backward, gradient clipping and AdamW of a model as lra.py builds it, on one batch of random numbers:
as many samples as in the recipe, of full length, without padding. Each case runs in a process of its own. On a CPU a
batch is split into microbatches; if there are more than two, two are timed and the step's time is extrapolated, unless
--whole. A case that fails, for instance because memory is too small, affects only its own row.

Without a GPU, the hours of an epoch on an A100 are estimated: compute time at a share of the card's peak, or the time
to move the bytes that must be moved, whichever is longer; see `count_work`. On a GPU they are measured. Writes a table,
its raw numbers and a plot, updated after each case.
"""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks import measure
from src import cli, plots
from src.config import Rule, check_value, load
from src.lion.mixers import MIXERS
from src.lra.model import SequenceClassifier
from src.lra.tasks import LRA, SUITE, LraConfig, Task
from src.lra.training import build_model, build_optimizer, build_settings, read_start
from src.training.trainer import configure_process

CONFIGS = [f"yamls/lra/{name}.yaml" for name in ("lion-s", "lion-d", "lion-s-heads", "softmax")]
# Training examples of the release, without those that are held out.
EXAMPLES = {
    "listops": 96_000, "text": 22_500, "retrieval": 147_086, "image": 45_000, "pathfinder": 160_000, "pathx": 160_000,
}  # fmt: skip
MICROBATCH = 33_000  # tokens, on a CPU
LONG = 8192  # tokens; a CPU recomputes the layers of longer inputs
PEAK, BANDWIDTH = 312e12, 1.5e12  # of an A100: operations in bfloat16 and bytes per second


class Case(NamedTuple):
    """A config's model and training of one task."""

    model: str
    task: Task
    config: LraConfig
    settings: dict[str, Any]  # of the model
    microbatch: int

    @property
    def sizes(self) -> list[int]:
        """Samples of each microbatch; the last may be smaller."""
        count, rest = divmod(self.task.batch_size, self.microbatch)
        return [self.microbatch] * count + [rest] * (rest > 0)


class Work(NamedTuple):
    """Operations, and bytes read and written."""

    operations: float
    bytes: float


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    about = f"configs of lra.py (default: {' '.join(CONFIGS)}), and key=value to override keys in all of them"
    add("given", nargs="*", metavar="FILE.yaml or key=value", help=about)
    add("--tasks", type=lambda names: names.split(","), default=[], help="names, with commas (default: all six)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    words = f"samples per forward pass (default: the batch; on a CPU, those of at most {MICROBATCH:,} tokens)"
    add("--microbatch", type=int, help=words)
    add("--rounds", type=int, help="timed steps per case, of which the median is taken (default: 1; 9 on a GPU)")
    add("--whole", action="store_true", help="run all microbatches of a step on a CPU")
    add("--precision", choices=("fp32", "amp_bf16"), help="(default: amp_bf16 on a GPU, fp32 on a CPU)")
    words = "share of an A100's peak that is assumed; narrow layers keep a GPU far from it (default: 0.05)"
    add("--a100_share", type=float, default=0.05, help=words)
    add("--out", type=Path, help=measure.OUT)
    a = parser.parse_intermixed_args(argv)  # overrides may also be last
    a.out = a.out or measure.results_folder(a.device)
    on_gpu = a.device == "cuda"
    usual = "amp_bf16" if on_gpu else "fp32"
    a.precision, a.whole = a.precision or usual, a.whole or on_gpu
    a.rounds = (9 if on_gpu else 1) if a.rounds is None else a.rounds
    check_value("--rounds", a.rounds, int, Rule(at_least=1))
    check_value("--a100_share", a.a100_share, float, Rule(above=0, at_most=1))
    if a.microbatch is not None:
        check_value("--microbatch", a.microbatch, int, Rule(at_least=1))
    overrides = [text for text in a.given if "=" in text]
    a.configs = [text for text in a.given if "=" not in text] or CONFIGS
    if len({Path(path).stem for path in a.configs}) < len(a.configs):
        parser.error("the configs must have different names; rename one")

    cases, rows = [case for path in a.configs for case in cases_of(path, overrides, a)], []
    order = list(dict.fromkeys(case.task.name for case in cases))
    cases.sort(key=lambda case: order.index(case.task.name))
    name = "-".join(["lra", a.device, *([] if a.precision == usual else [a.precision])])
    how = a.device, a.precision, a.rounds, a.whole
    for case in cli.progress(cases, desc="cases"):
        row = {"task": case.task.name, "model": case.model} | describe(case, a.a100_share)
        cli.log.info(f"{case.model}, {case.task.name}: {row['batch']} samples, {row['microbatch']} at a time …")
        failed: dict[str, str] = {}
        measured = measure.attempt(failed, "error", measure.apart, alone, case, *how, torch.get_num_threads())
        row |= measured or failed
        if measured:
            row["tokens_per_second"] = row["batch"] * row["tokens"] / row["step_s"]
            if on_gpu and row["steps_per_epoch"]:
                row["hours_per_epoch"] = row["steps_per_epoch"] * row["step_s"] / 3600
            if not row["finite"]:
                row["error"] = "the loss or its gradient is non-finite"
        rows.append(row)
        last = len(rows) == len(cases)
        measure.write(a.out, name, caption(a), measure.machine(a.device), [table(rows, on_gpu)], rows, show=last)
    if draw(rows, a.out / f"{name}.png", f"A training step, {a.precision}, {measure.device_name(a.device)}"):
        print(f"picture  {a.out / name}.png")


def cases_of(path: str, overrides: list[str], a: argparse.Namespace) -> Iterator[Case]:
    """Yield a config's case of each task. Raises UserError."""
    config = load(LraConfig, "lra.py", [path, *overrides])
    stored, _ = read_start(config)
    for task in SUITE.select(a.tasks or config.tasks_to_run, config.tasks, config.default_seed, 1):
        size = a.microbatch or task.microbatch_size
        if size is None:
            size = task.batch_size if a.device == "cuda" else max(1, MICROBATCH // tokens_of(task))
        recompute = config.activation_checkpointing or (a.device == "cpu" and task.max_length > LONG)
        own = replace(config, activation_checkpointing=recompute)
        yield Case(Path(path).stem, task, own, build_settings(task, own, stored), min(size, task.batch_size))


def tokens_of(task: Task) -> int:
    """Tokens of one sample, of both sequences of a pair."""
    return task.max_length * (2 if task.pairs else 1)


def describe(case: Case, share: float) -> dict[str, Any]:
    """Return what is known of a case without running it."""
    task, examples = case.task, EXAMPLES.get(case.task.name)
    with torch.device("meta"):
        model = build_model(case.settings, None, case.config)
    work = count_work(model, task)
    hours = None if examples is None else examples * a100_seconds(work, share) / 3600
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "batch": task.batch_size,
        "length": task.max_length,
        "tokens": tokens_of(task),
        "microbatch": case.microbatch,
        "recomputes_layers": case.config.activation_checkpointing,
        "operations": task.batch_size * work.operations,
        "bytes": task.batch_size * work.bytes,
        "epochs": task.epochs,
        "steps_per_epoch": None if examples is None else -(-examples // task.batch_size),
        "a100_hours_per_epoch": hours,
    }


def count_work(model: SequenceClassifier, task: Task) -> Work:
    """Count what training on one sample of full length takes at least.

    Operations: 6 per token and weight of a linear layer, a multiplication and an addition in the forward pass and twice
    that in the backward pass; and likewise 6 per product of the mixing, see `Mixer.products_per_token`. Of the head, 6
    per weight and sample. Elementwise functions, embeddings and what is recomputed are not counted.

    Bytes: numbers of 2 bytes. In a forward pass, each linear layer reads its inputs and writes its outputs; what is
    between two of them is one fused pass, which reads one's outputs and writes the other's inputs. So a token takes
    2 · Σ(inputs + outputs) numbers per layer, and in the backward pass twice as many: together 84·D in a layer of D
    channels with q, k, v and a gated MLP of width 2·D. Weights and optimizer are not counted.
    """
    config, encoder, L = model.config, model.lion, task.max_length
    linear = [module for module in encoder.layers.modules() if isinstance(module, nn.Linear)]
    weights = sum(layer.weight.numel() for layer in linear)
    products = len(encoder.layers) * MIXERS[config.mixer].products_per_token(config, L)
    value = 0 if model.value is None else model.value.weight.numel()
    head = sum(layer.weight.numel() for layer in (model.pair, model.classifier) if layer is not None)
    numbers = 6 * sum(layer.in_features + layer.out_features for layer in linear)
    tokens = tokens_of(task)
    return Work(6.0 * (tokens * (weights + products + value) + head), 2.0 * tokens * numbers)


def a100_seconds(work: Work, share: float) -> float:
    """Estimate the time of this work on one A100 whose arithmetic runs at a share of its peak."""
    return max(work.operations / (share * PEAK), work.bytes / BANDWIDTH)


class Training:
    """A model and its optimizer."""

    def __init__(self, case: Case, device: str, precision: str):
        torch.manual_seed(0)
        self.task, self.device, self.precision = case.task, device, precision
        with torch.device(device):
            self.model = build_model(case.settings, None, case.config).train()
        self.optimizer = build_optimizer(case.task, self.model)
        clipping = case.config.algorithms.get("gradient_clipping") or {}
        self.clip_at = clipping.get("clipping_threshold", torch.inf)
        self.seen: list[torch.Tensor] = []  # losses, and norms of gradients

    def accumulate(self, samples: int, length: int | None = None) -> None:
        """Add the gradients of random samples of full length, or of another."""
        task, length = self.task, length or self.task.max_length
        shape = (samples, 2, length) if task.pairs else (samples, length)
        numbers = torch.randint(task.vocabulary, shape, device=self.device)
        labels = torch.randint(task.num_labels, (samples,), device=self.device)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "amp_bf16"):
            loss = self.model(numbers, labels=labels).loss
        (loss * (samples / task.batch_size)).backward()
        self.seen.append(loss.detach())

    def update(self) -> None:
        self.seen.append(nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_at))
        self.optimizer.step()
        self.optimizer.zero_grad()


def alone(case: Case, device: str, precision: str, rounds: int, whole: bool, threads: int) -> dict[str, Any]:
    """Do what `take_steps` does, in a process of its own, set up as for training."""
    torch.set_num_threads(threads)
    configure_process(device)
    return take_steps(case, device, precision, rounds, whole)


def take_steps(case: Case, device: str, precision: str, rounds: int, whole: bool) -> dict[str, Any]:
    """Return the median step time after a warm-up step of one microbatch, the peak memory beyond the libraries' own,
    and whether all losses and gradients are finite. Unless `whole`, time at most two microbatches."""
    small = case._replace(settings={**case.settings, "num_hidden_layers": 1})
    Training(small, device, precision).accumulate(1, min(16, case.task.max_length))  # libraries allocate once
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = 0 if device == "cuda" else measure.highest_mark()
    training, timed = Training(case, device, precision), case.sizes if whole else case.sizes[:2]

    def accumulate() -> None:
        for samples in timed:
            training.accumulate(samples)

    training.accumulate(case.microbatch)
    training.update()
    steps = {"microbatches": accumulate, "update": training.update}
    times = measure.interleaved(steps, device, rounds, 600, warm_ups=0)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else measure.highest_mark()
    return {
        "step_s": times["microbatches"] * case.task.batch_size / sum(timed) + times["update"],
        "update_s": times["update"],
        "samples_timed": sum(timed),
        "peak_gb": (peak - before) / 1e9,
        "finite": bool(torch.stack(training.seen).isfinite().all()),
    }


def caption(a: argparse.Namespace) -> str:
    parts = "" if a.whole else "; of more than two microbatches, two were timed and the step's time is extrapolated"
    recomputed = "" if a.device == "cuda" else f"; inputs of more than {LONG:,} tokens with activation checkpointing"
    hours = f"Hours on one {torch.cuda.get_device_name() if a.device == 'cuda' else 'A100'}"
    if a.device == "cuda":
        hours += " follow from the step."
    else:
        hours += (
            f" are estimates, not measurements: the operations at {a.a100_share:.0%} of {PEAK / 1e12:.0f} teraFLOPS, "
            f"or the bytes that at least have to be moved at {BANDWIDTH / 1e12} TB/s, whichever takes longer; decays per "
            "channel, which a GPU computes without a kernel, take longer."
        )
    return (
        "A training step (forward, backward, gradient clipping, AdamW) of the recipes of Long Range Arena at full "
        f"size, on random numbers of full length without padding, {a.precision}, microbatches in parentheses{parts}"
        f"{recomputed}. Operations are 6 per token and weight of a linear layer or product of the mixing. {hours} They "
        "are for inputs of full length; most of ListOps, Text and Retrieval are shorter:"
    )


def table(rows: list[dict], on_gpu: bool) -> list[list[str]]:
    """Return one line per case."""
    hours = "per epoch" if on_gpu else "per epoch on an A100, estimated"
    header = ["task", "model", "parameters", "batch × length", "step, s", "tokens per second", "peak memory, GB"]
    lines = [[*header, "operations per step, T", f"hours {hours}", "hours of all epochs"]]
    for row in rows:
        task, length = LRA.get(row["task"]), f"{row['length']:,}"
        shape = f"2 × {length}" if row["tokens"] > row["length"] else length
        cells = [task.title if task else row["task"], row["model"], f"{row['parameters']:,}"]
        cells.append(f"{row['batch']} × {shape} ({row['microbatch']})")
        if "step_s" in row:
            cells += [f"{row['step_s']:,.1f}", f"{row['tokens_per_second']:,.0f}", f"{row['peak_gb']:,.1f}"]
        else:
            cells += ["failed", "-", "-"]
        each = row.get("hours_per_epoch") if on_gpu else row["a100_hours_per_epoch"]
        cells.append(f"{row['operations'] / 1e12:,.2f}")
        cells += ["-", "-"] if each is None else [f"{each:,.3f}", f"{row['epochs'] * each:,.1f}"]
        lines.append(cells)
    return lines


def draw(rows: list[dict], picture: Path, title: str) -> bool:
    """Draw the time per token of each task as bars, one colour per model; return whether there was any."""
    times: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if "step_s" in row:
            task = LRA[row["task"]].title if row["task"] in LRA else row["task"]
            times.setdefault(row["model"], {})[task] = [1e6 / row["tokens_per_second"]]
    if times:
        plots.bars(list(times.items()), {}, picture, title, "µs per token")
    return bool(times)


if __name__ == "__main__":
    cli.run(main)
