"""Time of a training step of each mixer, Hugging Face's BERT and ModernBERT:

    python benchmarks/train_step.py [--device cuda]

Masked language modelling at base size on random tokens without padding. The models take steps in turn; medians and
ratios. All have about as many weights, and the same number of layers except Hydra: 23 smaller ones instead of 12. BERT's
class computes the logits of all tokens; "sparse" is the same model with those of masked tokens only, as in the others.
With --graph, each model's step is also captured as a CUDA graph, which the GPU replays without waiting for the program.
Writes a table, its numbers and a picture.
"""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import contextlib
import statistics
from pathlib import Path

import torch

from benchmarks import measure, models
from benchmarks.models import BERT, MODERN_BERT, SPARSE_BERT, TRAINED, VOCABULARY, build, describe, model_name
from src import cli, plots
from src.errors import UserError
from src.lion.losses import labelled_positions
from src.lion.machine import keep_freed_memory


def main(argv: list[str]) -> None:
    a = parse(argv)
    if a.device == "cpu":
        keep_freed_memory()  # as in training
    failed: dict[str, str] = {}
    steps = {name: measure.attempt(failed, name, prepare, name, a) for name in cli.progress(a.models, desc="models")}
    steps = {name: step for name, step in steps.items() if step}
    print(f"{a.rounds} rounds of {len(steps) * len(a.length)} steps …", file=sys.stderr, flush=True)
    warm_ups = 3 if a.compile == "reduce-overhead" else 1  # the second is recorded
    times = measure.interleaved(steps, a.device, a.rounds, 600, failed, warm_ups=warm_ups)
    floor, facts = least_seconds(a), measure.machine(a.device)
    rows = [row_of(name, seconds / len(a.length), floor, a) for name, seconds in times.items()]
    if a.graph:
        write(rows, failed, floor, facts, a, show=False)
        steps.clear()  # their memory
        torch.cuda.empty_cache()
        for row, name in zip(rows, cli.progress(times, desc="graphs")):
            errors: dict[str, str] = {}
            seconds = measure.attempt(errors, name, measure.graph_time, prepare, name, a)
            row |= {"graph_ms": seconds and 1000 * seconds / len(a.length), "graph_error": errors.get(name)}
            write(rows, failed, floor, facts, a, show=False)
    write(rows, failed, floor, facts, a)
    described = f"{describe(a.models, a.layers, a.hidden)}, {texts(a)}, {a.precision}"
    times = {row["model"]: row["ms"] / 1000 for row in rows}
    draw(times, floor, a.out / f"{file_name(a)}.png", f"{described}, {measure.device_name(a.device)}")
    print(f"picture  {a.out / file_name(a)}.png")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    about = "names, or pretraining configs, whose options are taken and whose sizes are not (default: all names)"
    parser.add_argument("--models", nargs="+", default=TRAINED, type=model_name, metavar="NAME", help=about)
    parser.add_argument("--batch", type=int, help="texts per step (default: 8 on a CPU, 128 on a GPU)")
    words = "tokens per text; with several, steps take texts of each length in turn (default: 128)"
    parser.add_argument("--length", type=int, nargs="+", default=[128], help=words)
    about = "rows of this many texts of random lengths that do not attend to each other, in models that have packing"
    parser.add_argument("--packed", type=int, default=1, metavar="TEXTS", help=about)
    parser.add_argument("--layers", type=int, default=12, help="(default: 12, that is 23 in hydra)")
    parser.add_argument("--hidden", type=int, default=768, help="(default: 768, in heads of 64)")
    parser.add_argument("--masked", type=float, default=0.3, help="masking rate (default: 0.3)")
    parser.add_argument(
        "--dropout",
        type=float,
        default=0.1,
        help="everywhere, also on the attention matrix; in hydra on the embeddings only (default: 0.1)",
    )
    parser.add_argument("--precision", choices=("fp32", "amp_bf16"), help="(default: amp_bf16 on a GPU, fp32 on a CPU)")
    parser.add_argument("--form", default="auto", help="form of the operator (default: auto)")
    parser.add_argument(
        "--compile",
        nargs="?",
        const="default",
        choices=("default", "reduce-overhead", "max-autotune"),
        help="torch.compile every model, as `compile_config` does, in this mode (without a mode: default)",
    )
    about = "also time each model's step as a CUDA graph; there, our softmax reads packed rows through a mask"
    parser.add_argument("--graph", action="store_true", help=about)
    parser.add_argument("--rounds", type=int, default=9, help="steps per model and length (default: 9)")
    parser.add_argument("--out", type=Path, help=measure.OUT)
    a = parser.parse_args(argv)
    a.out = a.out or measure.results_folder(a.device)
    if a.graph and a.device == "cpu":
        raise UserError("--graph needs a GPU; omit it")
    if not 1 <= a.packed <= min(a.length):
        raise UserError(f"--packed is {a.packed}; give 1 to {min(a.length)} texts, the tokens of a row")
    if len({Path(name).stem for name in a.models}) < len(a.models):
        parser.error("--models must have different names; rename a config")
    a.usual_batch, a.usual_precision = (8, "fp32") if a.device == "cpu" else (128, "amp_bf16")
    a.batch, a.precision = a.batch or a.usual_batch, a.precision or a.usual_precision
    return a


def row_of(name: str, seconds: float, floor: float, a: argparse.Namespace) -> dict:
    how = models.setting(name, a.device, a.precision == "amp_bf16") if a.packed == 1 else {}
    return {"model": short(name), **how, "ms": 1000 * seconds, "floor_ms": 1000 * floor}


def write(
    rows: list[dict], failed: dict[str, str], floor: float, facts: dict, a: argparse.Namespace, show: bool = True
) -> None:
    """Write what has been measured so far."""
    size = describe(a.models, a.layers, a.hidden)
    compiled = f", compiled, {a.compile}" if a.compile else ""
    title = (
        f"A training step (forward, backward, AdamW) of {size}{compiled}, {texts(a)}, "
        f"{a.masked:.0%} masked, dropout {a.dropout}, {a.precision}; the floor, {1000 * floor:,.1f} ms, is the time of "
        "BERT's matrix products at the rate of a large one, plus that of reading and writing its weights and moments:"
    )
    lines = table(rows, a.batch * sum(a.length) / len(a.length))
    rows = rows + [{"model": name, "error": error} for name, error in failed.items()]
    measure.write(a.out, file_name(a), title, facts, [lines], rows, show)


def texts(a: argparse.Namespace) -> str:
    lengths = " and ".join(filter(None, [", ".join(map(str, a.length[:-1])), str(a.length[-1])]))
    lengths += " tokens" if len(a.length) == 1 else " tokens in turn (times are means)"
    return f"{a.batch} texts of {lengths}" if a.packed == 1 else f"{a.batch} rows of {lengths} in {a.packed} texts"


def file_name(a: argparse.Namespace) -> str:
    special = {
        **models.unusual_size(a.layers, a.hidden),
        f"compiled-{a.compile}": a.compile,
        f"packed-{a.packed}": a.packed != 1,
        f"batch-{a.batch}": a.batch != a.usual_batch,
        "-".join(map(str, a.length)): a.length != [128],
        a.precision: a.precision != a.usual_precision,
    }
    return "-".join(["train-step", a.device, *(word for word, present in special.items() if present)])


def short(name: str) -> str:
    """Return the name of a model, or of a config without its folder."""
    return Path(name).stem if name.endswith(".yaml") else name


def table(rows: list[dict], tokens: float) -> list[list[str]]:
    """Return one line per model, for steps of this many tokens."""
    times = {row["model"]: row["ms"] for row in rows}
    compared = [name for name in (BERT, SPARSE_BERT, MODERN_BERT, "softmax") if name in times]
    ratios = [f"relative to {name.replace('softmax', 'our softmax')}" for name in compared]
    graphs = any("graph_ms" in row for row in rows)
    lines = [["model", "step, ms", *["as a CUDA graph, ms"] * graphs, "tokens per second", "floor / time", *ratios]]
    for row in rows:
        ms = row["ms"]
        graph = (
            [row.get("graph_error") or (f"{row['graph_ms']:,.1f}" if row.get("graph_ms") else "-")] if graphs else []
        )
        ratios = [f"×{ms / times[other]:.2f}" for other in compared]
        rate, floor = f"{1000 * tokens / ms:,.0f}", f"{row['floor_ms'] / ms:.0%}"
        lines.append([models.titled(row), f"{ms:,.1f}", *graph, rate, floor, *ratios])
    return lines


def prepare(name: str, a: argparse.Namespace):
    """Return a function that takes one step of the model `name` with texts of each length."""
    torch.manual_seed(0)
    with torch.device(a.device):
        how = {"dropout": a.dropout, "form": a.form, "half": a.precision == "amp_bf16"}
        model = build(name, a.layers, a.hidden, max(a.length), **how, masked_lm=True).train()
    if a.compile:
        models.compile_model(model, a.compile)
    # A graph needs AdamW's step counts on the GPU, where the fused one has them anyway.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=a.device == "cuda")
    batches = []
    for length in a.length:
        ids = torch.randint(5, 30522, (a.batch, length), device=a.device)
        labels = ids.masked_fill(torch.rand(ids.shape, device=a.device) >= a.masked, -100)
        seq_idx = random_texts(a.batch, length, a.packed, a.device) if a.packed > 1 else None
        batches.append((ids, labels, labelled_positions(labels), seq_idx))  # as in training
    half = torch.autocast(a.device, torch.bfloat16) if a.precision == "amp_bf16" else contextlib.nullcontext()

    def step() -> None:
        for batch in batches:
            with half:
                loss = models.masked_lm_loss(model, *batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def random_texts(rows: int, length: int, texts: int, device: str) -> torch.Tensor:
    """Return the text that each token belongs to, (rows, length), with `texts` of random lengths in each row."""
    starts = torch.rand(rows, length - 1, device=device).argsort() < texts - 1
    return torch.nn.functional.pad(starts, (1, 0)).cumsum(1)


def least_seconds(a: argparse.Namespace) -> float:
    """Return the minimum time of a step at BERT's sizes at the measured rates of this device, the mean over lengths.

    6 operations per weight and token, with the vocabulary at masked tokens only, and 12·L·hidden per layer and token
    for softmax(QKᵀ)V; then the optimizer, which overlaps with nothing: weight, gradient and two moments read, three
    written.
    """
    rates = measure.rates(a.device, torch.bfloat16 if a.precision == "amp_bf16" else torch.float32)
    layers = a.layers * 12 * a.hidden**2
    head = a.hidden * (a.hidden + VOCABULARY)
    operations = [
        6 * a.batch * length * (layers + 2 * a.layers * length / a.packed * a.hidden + a.masked * head)
        for length in a.length
    ]
    return statistics.mean(operations) / rates.operations + 28 * (layers + head) / rates.bytes


def draw(times: dict[str, float], floor: float, picture: Path, title: str) -> None:
    figure, axes = plots.subplots(title=title, width=8, height=0.5 * len(times) + 1.5)
    axis = axes[0, 0]
    bars = axis.barh(list(times), [1000 * seconds for seconds in times.values()], color=plots.colors(times))
    axis.bar_label(bars, fmt="{:,.0f}", padding=3)
    axis.axvline(1000 * floor, color="gray", linestyle=":", label="floor")
    axis.invert_yaxis()
    plots.label_axes(axis, "", "training step, ms", "")
    axis.grid(visible=False, axis="y")
    axis.xaxis.set_major_formatter("{x:,.0f}")
    plots.save(figure, picture)


if __name__ == "__main__":
    cli.run(main)
