"""Time and memory of turning a long document into a vector:  python benchmarks/embed.py [--device cuda]

One document to one vector, the mean of its tokens, by the LION variants, by Hugging Face's BERT and ModernBERT reading
it whole, and by these two reading it in windows of 512 tokens, whose vectors are averaged. Windows cost as much per
token as a short text, but no token sees beyond its window. All are of base size with random weights, on random tokens.

The models take turns; medians. On a CPU a document above --once_above is read once, while its memory is measured. By
default, the benchmark takes about 25 minutes on two cores. Writes two tables, their numbers and a picture; what has
been measured is written as it goes.
"""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure, models
from benchmarks.models import BERT, LINEAR, MODERN_BERT, build, created_as, describe, lion_config, setting, titled
from src import cli, plots
from src.lion import LionConfig, LionEmbeddingModel
from src.lion.machine import keep_freed_memory

MODELS = (BERT, MODERN_BERT, *LINEAR)
COMPARED = (BERT, MODERN_BERT, "lion-lit", "lion-d", "lion-s")
WINDOW, NEAR = 512, 2048  # tokens
WHOLE, WINDOWS = "whole", f"windows of {WINDOW}"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    add("--lengths", type=int, nargs="+", default=[512, 2048, 8192, 65536], help="(default: 512 2048 8192 65536)")
    words = f"of {', '.join(MODELS)} (default: all but the last two)"
    add("--models", nargs="+", default=COMPARED, choices=MODELS, metavar="NAME", help=words)
    add("--dtype", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"), help="(default: both)")
    words = "tokens that BERT and ModernBERT read whole; longer documents only in windows (default: 8192)"
    add("--longest_softmax", type=int, default=8192, help=words)
    add("--window_batch", type=int, help="windows read at a time (default: 8; 64 on a GPU)")
    words = "tokens; longer documents are read once, in the pass that measures memory (default: 8192; none on a GPU)"
    add("--once_above", type=int, help=words)
    add("--layers", type=int, default=12, help="(default: 12, that is 23 in hydra)")
    add("--hidden", type=int, default=768, help="(default: 768, in heads of 64)")
    add("--rounds", type=int, help="runs per case, or as few as 1 if slow (default: 3; 9 on a GPU)")
    add("--seconds", type=float, default=240, help="limit per length, after the first round (default: 240)")
    add("--out", type=Path, help=measure.OUT)
    a = parser.parse_args(argv)
    a.out = a.out or measure.results_folder(a.device)
    on_gpu = a.device == "cuda"
    a.lengths, a.dtype = sorted(set(a.lengths)), list(dict.fromkeys(a.dtype))
    a.window_batch = a.window_batch or (64 if on_gpu else 8)
    a.once_above = a.once_above or (a.lengths[-1] if on_gpu else 8192)
    a.rounds = a.rounds or (9 if on_gpu else 3)

    rows = plan(a)
    special = [word for word, present in models.unusual_size(a.layers, a.hidden).items() if present]
    name, title, facts = "-".join(["embed", a.device, *special]), caption(a), measure.machine(a.device)

    def write(show: bool = False) -> None:
        done = [row for row in rows if row["ms"] or row["error"]]
        tables = [table(done), ratios(done, a.lengths, a.longest_softmax)]
        measure.write(a.out, name, title, facts, [lines for lines in tables if len(lines) > 1], done, show)

    reads = sum(row["length"] * (1 + a.rounds * (row["length"] <= a.once_above)) for row in rows)
    with cli.progress(total=reads, desc="encoding", unit="token") as bar:
        for dtype in a.dtype:
            of_dtype = [row for row in rows if row["dtype"] == dtype]
            for length in (length for length in a.lengths if length <= a.once_above):
                time_in_turn([row for row in of_dtype if row["length"] == length], a, bar)
                write()
            for model, reading in dict.fromkeys((row["model"], row["reading"]) for row in of_dtype):
                own = [row for row in of_dtype if (row["model"], row["reading"]) == (model, reading)]
                read_once(own, a)
                bar.update(sum(row["length"] for row in own))
                write()
    write(show=True)
    size = describe(a.models, a.layers, a.hidden)
    draw(rows, a.out / f"{name}.png", f"A document to a vector, {size}, {measure.device_name(a.device)}")
    print(f"picture  {a.out / name}.png")


def plan(a: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each measurement, without its results."""
    cases = [(model, WHOLE) for model in a.models]
    cases += [(model, WINDOWS) for model in a.models if model not in LINEAR]
    return [
        {"dtype": dtype, "length": length, "model": model, "reading": reading}
        | setting(model, a.device, dtype == "bfloat16")
        | {"ms": None, "peak_mib": None, "error": None}
        for dtype in a.dtype
        for length in a.lengths
        for model, reading in cases
        if model in LINEAR or reading == WINDOWS or length <= a.longest_softmax
    ]


def caption(a: argparse.Namespace) -> str:
    about = "" if set(a.models) <= set(LINEAR) else f"; windows are read {a.window_batch} at a time"
    if MODERN_BERT in a.models:
        from transformers import ModernBertConfig

        usual = ModernBertConfig()
        about += (
            "; every third layer of ModernBERT has global attention, the others local "
            f"attention to {usual.local_attention} tokens{', by a mask' if a.device == 'cpu' else ''}"
        )
    if a.lengths[-1] > LionConfig.segment_length:
        about += f"; LION reads documents above {LionConfig.segment_length:,} tokens in segments"
    if a.lengths[-1] > a.once_above:
        about += f"; times above {a.once_above:,} tokens are of one run"
    size = describe(a.models, a.layers, a.hidden)
    return f"A document to a vector, the mean of its tokens, by encoders of {size}{about}; peak memory beyond weights:"


def time_in_turn(rows: list[dict[str, Any]], a: argparse.Namespace, bar: Any) -> None:
    """Fill in the times of documents of one length."""
    failed: dict[int, str] = {}
    runs = {n: measure.attempt(failed, n, prepare, *arguments(row, a)) for n, row in enumerate(rows)}
    runs = {n: run for n, run in runs.items() if run}
    end = bar.n + a.rounds * sum(row["length"] for row in rows)
    # A long document needs no run to warm up on a CPU: the shorter ones have done so.
    short = rows[0]["length"] <= NEAR or a.device == "cuda"
    step = functools.partial(bar.update, (end - bar.n) / (len(rows) * (a.rounds + short)))
    times = measure.interleaved(runs, a.device, a.rounds, a.seconds, failed, least=1, warm_ups=int(short), after=step)
    bar.update(end - bar.n)
    for number, row in enumerate(rows):
        row["ms"] = 1000 * times[number] if number in times else None
        row["error"] = failed.get(number)


def read_once(rows: list[dict[str, Any]], a: argparse.Namespace) -> None:
    """Fill in the peak memory of one case, from the shortest document to the longest, and times that are missing."""
    rows = [row for row in rows if not row["error"]]
    failed: dict[str, str] = {}
    given = [arguments(row, a) for row in rows]
    warm_up = arguments(rows[0] | {"length": measure.WARM_UP_TOKENS[a.device]}, a) if rows else ()
    costs = measure.attempt(failed, "", measure.single_runs, prepare, warm_up, given, a.device) if rows else []
    for row, cost in zip(rows, costs or []):
        row["ms"] = row["ms"] or 1000 * cost.seconds
        row["peak_mib"] = cost.bytes / 2**20
    for row in rows:
        row["error"] = failed.get("")


def arguments(row: dict[str, Any], a: argparse.Namespace) -> tuple:
    """Return the arguments of `prepare` for a row."""
    in_windows = a.window_batch if row["reading"] == WINDOWS else None
    longest = a.lengths[-1] if row["model"] in LINEAR else min(a.lengths[-1], a.longest_softmax)
    return row["length"], in_windows, row["model"], a.layers, a.hidden, longest, row["dtype"], a.device


def prepare(length: int, window_batch: int | None, *model: Any) -> Callable[[], Tensor]:
    """Return a function that encodes one document of random tokens; with `window_batch`, in windows. Other arguments
    are those of `load`."""
    keep_freed_memory()  # as in embed.py encode
    encoder = load(*model)
    ids = torch.randint(5, encoder.config.vocab_size, (1, length), device=encoder.device)
    batches = [ids] if window_batch is None else windows(ids, window_batch)
    return functools.partial(encode, encoder, batches)


@functools.lru_cache(maxsize=len(MODELS))
def load(name: str, layers: int, hidden: int, longest: int, dtype: str, device: str) -> torch.nn.Module:
    """Build a model with random weights; it is kept for documents of all lengths."""
    torch.manual_seed(0)
    with created_as(dtype, device):
        if name in LINEAR:
            return LionEmbeddingModel(lion_config(name, layers, hidden, longest)).eval()
        return build(name, layers, hidden, longest, half=dtype == "bfloat16").eval()


def windows(ids: Tensor, batch: int) -> list[Tensor]:
    """Cut a document, (1, L), into windows, at most `batch` in each of the tensors, (windows, 512); a shorter rest of
    the document is the last of them."""
    cut = ids.shape[1] // WINDOW * WINDOW
    parts = [*ids[:, :cut].reshape(-1, WINDOW).split(batch), ids[:, cut:]]
    return [part for part in parts if part.numel()]


@torch.inference_mode()
def encode(model: torch.nn.Module, batches: list[Tensor]) -> Tensor:
    """Return the mean vector, (D,) in float32, of texts, in batches (B, L)."""
    vectors = []
    for ids in batches:
        output = model(ids)
        if isinstance(model, LionEmbeddingModel):
            vectors.append(output.pooler_output)
        else:
            vectors.append(output.last_hidden_state.mean(1, dtype=torch.float32))
    return torch.cat(vectors).mean(0)


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    lines = [["dtype", "length", "model", "reads", "ms", "µs per token", "tokens per second", "peak, MiB"]]
    for row in rows:
        ms, length = row["ms"] or math.nan, row["length"]
        numbers = [f"{ms:,.1f}", f"{1000 * ms / length:,.1f}", f"{1000 * length / ms:,.0f}"]
        peak = "-" if row["peak_mib"] is None else f"{row['peak_mib']:,.0f}"
        times = numbers if row["ms"] else ["-"] * len(numbers)
        lines.append([row["dtype"], f"{length:,}", titled(row), row["reading"], *times, peak])
    return lines


def ratios(rows: list[dict[str, Any]], lengths: list[int], longest_softmax: int) -> list[list[str]]:
    """Return a table of the time per token of each LION variant at the greatest length relative to 2,048, and its time
    beside BERT's, whole and in windows."""
    near, far = NEAR if NEAR in lengths else lengths[0], lengths[-1]
    whole = [length for length in lengths if length <= longest_softmax][-1:]
    times = {(row["dtype"], row["length"], row["model"], row["reading"]): row["ms"] for row in rows if row["ms"]}
    lines = [["dtype", "model", f"time per token at {far:,}, relative to {near:,}"]]
    lines[0] += [f"BERT's time at {length:,} is" for length in whole]
    lines[0] += [f"relative to BERT in windows at {length:,}" for length in lengths]
    for dtype, model in dict.fromkeys((row["dtype"], row["model"]) for row in rows if row["model"] in LINEAR):
        own = {length: times.get((dtype, length, model, WHOLE), math.nan) for length in lengths}
        beside = [times.get((dtype, length, BERT, WHOLE), math.nan) / own[length] for length in whole]
        beside += [own[length] / times.get((dtype, length, BERT, WINDOWS), math.nan) for length in lengths]
        cells = [own[far] / far / (own[near] / near), *beside]
        lines.append([dtype, model, *("-" if math.isnan(ratio) else f"×{ratio:.2f}" for ratio in cells)])
    return lines


def draw(rows: list[dict[str, Any]], picture: Path, title: str) -> None:
    """Draw time per token and peak memory against the length of the document, a row of plots per dtype."""
    dtypes, ticks = (list(dict.fromkeys(row[key] for row in rows)) for key in ("dtype", "length"))
    figure, axes = plots.subplots(rows=len(dtypes), columns=2, title=title)
    for line, dtype in zip(axes, dtypes):
        for model, reading in dict.fromkeys((row["model"], row["reading"]) for row in rows):
            own = [row for row in rows if (row["dtype"], row["model"], row["reading"]) == (dtype, model, reading)]
            lengths = [row["length"] for row in own]
            times = [1000 * (row["ms"] or math.nan) / row["length"] for row in own]
            look = {"color": plots.color(model), "linestyle": "-" if reading == WHOLE else "--", "marker": "."}
            label = model if reading == WHOLE else f"{model}, {reading}"
            line[0].plot(lengths, times, label=label, **look)
            line[1].plot(lengths, [row["peak_mib"] or math.nan for row in own], label=label, **look)
        plots.label_axes(line[0], f"time per token, {dtype}", "tokens", "µs")
        plots.label_axes(line[1], f"peak memory, {dtype}", "tokens", "MiB", log=True)
        line[0].set_ylim(bottom=0)
        for axis in line:
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    plots.save(figure, picture)


if __name__ == "__main__":
    cli.run(main)
