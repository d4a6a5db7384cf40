"""Latency and memory of encoders by length:  python benchmarks/inference.py [--device cuda] [--batch 1 64]

One forward pass of each mixer and form, and of Hugging Face's BERT and ModernBERT, at base size on random tokens
without padding; interleaved runs, medians. All have the same number of layers except Hydra: 23 smaller ones instead of
12. On a GPU, passes of our encoders are also timed on the device alone, by replaying a CUDA graph, and with --graph
those of the others. Writes a table, its numbers and a picture.
"""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import functools
import math
from pathlib import Path

import torch

from benchmarks import measure, models
from benchmarks.models import BERT, LINEAR, MODELS, MODERN_BERT, build, compile_layers, created_as, describe
from src import cli, plots
from src.errors import UserError
from src.lion.machine import keep_freed_memory

LONGEST = {"full": 4096, "recurrent": 2048, "chunkwise": 2**20, "auto": 2**20, "softmax": 32768}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--lengths", type=int, nargs="+", help="(default: 128 to 2,048; to 65,536 on a GPU)")
    parser.add_argument("--batch", type=int, nargs="+", help="texts per pass (default: 1; 1 and 64 on a GPU)")
    parser.add_argument("--tokens", type=int, default=2**20, help="limit per pass, of all texts (default: 1,048,576)")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS, help="(default: all)")
    forms = [form for form in LONGEST if form != "softmax"]
    parser.add_argument("--forms", nargs="+", choices=forms, help="(default: auto; auto full chunkwise on a GPU)")
    parser.add_argument("--layers", type=int, default=12, help="(default: 12, that is 23 in hydra)")
    parser.add_argument("--hidden", type=int, default=768, help="(default: 768, in heads of 64)")
    parser.add_argument("--dtype", help="(default: bfloat16 on a GPU, float32 on a CPU)")
    parser.add_argument("--compile", action="store_true", help="torch.compile every model's layers")
    words = "also capture Hugging Face's models as CUDA graphs, each in a process of its own"
    parser.add_argument("--graph", action="store_true", help=words)
    parser.add_argument("--rounds", type=int, default=9, help="runs per case, or as few as 3 if slow (default: 9)")
    parser.add_argument("--seconds", type=float, default=20, help="limit per length, after 3 rounds (default: 20)")
    parser.add_argument("--out", type=Path, help=measure.OUT)
    a = parser.parse_args(argv)
    if a.graph and a.device == "cpu":
        raise UserError("--graph needs a GPU; omit it")
    a.out = a.out or measure.results_folder(a.device)
    usual = "bfloat16" if a.device == "cuda" else "float32"
    a.dtype = a.dtype or usual
    a.lengths = sorted(a.lengths or [128, 512, 2048, *([8192, 16384, 65536] if a.device == "cuda" else [])])
    a.batch = a.batch or ([1, 64] if a.device == "cuda" else [1])
    a.forms = a.forms or (["auto", "full", "chunkwise"] if a.device == "cuda" else ["auto"])
    longest = {**LONGEST, "full": 8192, "softmax": 65536} if a.device == "cuda" else LONGEST
    size = (a.layers, a.hidden, a.lengths[-1], a.dtype, a.device, a.compile)

    cases = [(name, form) for name in a.models for form in (a.forms if name in LINEAR else ["softmax"])]
    model = f"{describe(a.models, a.layers, a.hidden)}{', compiled' if a.compile else ''}, {a.dtype}"
    title = f"One pass of an encoder of {model}; peak memory beyond its weights:"
    special = {**models.unusual_size(a.layers, a.hidden), "compiled": a.compile, a.dtype: a.dtype != usual}
    name = "-".join(["inference", a.device, *(word for word, present in special.items() if present)])
    facts = measure.machine(a.device)
    rows: list[dict] = []
    for batch in a.batch:
        for length in cli.progress(a.lengths, desc=f"batch {batch}"):
            failed: dict = {}
            here = [case for case in cases if length <= longest[case[1]] and batch * length <= a.tokens]
            runs = {case: measure.attempt(failed, case, prepare, *case, batch, length, *size) for case in here}
            runs = {case: run for case, run in runs.items() if case not in failed}
            times = measure.interleaved(runs, a.device, a.rounds, a.seconds, failed)
            for case in here:
                alone = None
                if a.device == "cuda" and case in times and case[0] not in (BERT, MODERN_BERT):
                    alone = measure.attempt({}, case, measure.device_time, runs[case], times[case])
                elif a.graph and case in times:  # a failed capture would be the last of its process
                    arguments = (prepare, *case, batch, length, *size)
                    alone = measure.attempt(failed, case, measure.graph_time, *arguments)
                rows.append({
                    "batch": batch, "length": length, "model": case[0], "form": case[1],
                    **models.setting(case[0], a.device, a.dtype != "float32"),
                    "ms": 1000 * times[case] if case in times else None, "device_ms": alone and 1000 * alone,
                    "peak_mib": None, "error": failed.get(case),
                })  # fmt: skip
            del runs
            if a.device == "cuda":  # on a CPU a case is measured from its smallest to its largest batch
                fill_peaks(rows[-len(here) :] if here else [], size, a)
            measure.write(a.out, name, title, facts, [table(rows)], rows, show=False)
    if a.device == "cpu" and not a.compile:  # compiling would count
        fill_peaks(rows, size, a)
    measure.write(a.out, name, title, facts, [table(rows)], rows)
    draw(rows, a.out / f"{name}.png", f"Encoders of {model}, {measure.device_name(a.device)}")
    print(f"picture  {a.out / name}.png")


def fill_peaks(rows: list[dict], size: tuple, a: argparse.Namespace) -> None:
    """Measure the peak memory of each row that has a time."""
    rows = sorted((row for row in rows if row["ms"]), key=tokens)
    for case in cli.progress(dict.fromkeys((row["model"], row["form"]) for row in rows), desc="memory", leave=False):
        own = [row for row in rows if (row["model"], row["form"]) == case]
        arguments = [(*case, row["batch"], row["length"], *size) for row in own]
        warm_up = (*case, 1, measure.WARM_UP_TOKENS[a.device], *size)
        failed: dict = {}
        peaks = measure.attempt(failed, case, measure.peak_memory, prepare, warm_up, arguments, a.device)
        for row, peak in zip(own, peaks or []):
            row["peak_mib"] = peak / 2**20
        for row in own if failed else []:
            row["error"] = failed[case]


def tokens(row: dict) -> int:
    return row["batch"] * row["length"]


def prepare(name, form, batch, length, layers, hidden, longest, dtype, device, compiled):
    """Return a function that encodes one batch."""
    if device == "cpu":
        keep_freed_memory()  # as in embed.py encode; in this process, which may be one whose memory is measured
    model = load(name, form, layers, hidden, longest, dtype, device, compiled)
    ids = torch.randint(5, model.config.vocab_size, (batch, length), device=device)

    def run() -> None:
        with torch.inference_mode():
            model(ids)

    return run


@functools.cache
def load(name, form, layers, hidden, longest, dtype, device, compiled) -> torch.nn.Module:
    """Build a model with random weights; it is kept, so that in its memory only texts count."""
    torch.manual_seed(0)
    with created_as(dtype, device):
        how = {"form": "auto" if form == "softmax" else form, "half": dtype != "float32"}
        model = build(name, layers, hidden, longest, **how).eval()
    if compiled:
        compile_layers(model)
    return model


def ratio(other: dict | None, row: dict) -> float | None:
    """Return another row's time over this row's, on the device alone if both were measured there."""
    for key in ("device_ms", "ms"):
        if other and other[key] and row[key]:
            return other[key] / row[key]
    return None


def table(rows: list[dict]) -> list[list[str]]:
    others = [name for name in ("softmax", BERT) if any(row["model"] == name for row in rows)]
    beside = {(row["batch"], row["length"], row["model"]): row for row in rows}
    on_device = any(row["device_ms"] for row in rows)
    times = ["ms", "on the device"] if on_device else ["ms"]
    compared = [f"{name}'s time is" for name in others]
    lines = [["batch", "length", "model", "form", *times, "µs per token", *compared, "peak, MiB"]]
    for row in rows:
        own = row["device_ms"] or row["ms"]
        times = [row["ms"], *([row["device_ms"]] if on_device else [])]
        ratios = [ratio(beside.get((row["batch"], row["length"], name)), row) for name in others]
        lines.append([
            str(row["batch"]), f"{row['length']:,}", models.titled(row), row["form"],
            *("-" if ms is None else f"{ms:,.2f}" for ms in times),
            "-" if own is None else f"{1000 * own / tokens(row):.2f}",
            *("-" if ratio is None else f"×{ratio:.2f}" for ratio in ratios),
            "-" if row["peak_mib"] is None else f"{row['peak_mib']:,.0f}",
        ])  # fmt: skip
    return lines


def draw(rows: list[dict], picture: Path, title: str) -> None:
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    figure, axes = plots.subplots(rows=len(batches), columns=2, title=title)
    styles = {"auto": "-", "softmax": "-", "full": "-.", "chunkwise": "--", "recurrent": ":"}
    for line, batch in zip(axes, batches):
        for model, form in dict.fromkeys((row["model"], row["form"]) for row in rows):
            own = [row for row in rows if (row["batch"], row["model"], row["form"]) == (batch, model, form)]
            look = {"color": plots.color(model), "linestyle": styles[form], "marker": "."}
            for axis, key, least in zip(line, ("ms", "peak_mib"), (0, 1)):  # below 1 MiB, what else a process does
                heights = [row[key] if row[key] is not None and row[key] >= least else math.nan for row in own]
                label = model if form == "softmax" else f"{model} {form}"
                axis.plot([row["length"] for row in own], heights, label=label, **look)
        plots.label_axes(line[0], f"one pass, batch {batch}", "tokens", "ms", log=True)
        plots.label_axes(line[1], f"peak memory, batch {batch}", "tokens", "MiB", log=True)
    plots.save(figure, picture)


if __name__ == "__main__":
    cli.run(main)
