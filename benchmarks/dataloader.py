"""Samples per second of the data loader and of a training step:  python benchmarks/dataloader.py [--data_local DIR ...]

Folders contain text or tokens; src/convert_dataset.py writes both. Every loader is timed with and without packing, with
each number of workers, and by itself: in training, the step also uses the processor. Writes a table and its numbers.
"""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import itertools
import time
from pathlib import Path

import torch

from benchmarks import measure, models, train_step
from src import cli
from src.data import streaming
from src.data.batches import sample_count
from src.data.config import DatasetConfig, LoaderConfig
from src.training import text_model
from src.training import trainer as trainers


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data_local", nargs="+", default=["demo/token-shards"], metavar="DIR", help="(default: demo/token-shards)"
    )
    parser.add_argument("--split", default="train", help="(default: train)")
    parser.add_argument("--tokenizer_name", default="demo/tokenizer", help="(default: demo/tokenizer)")
    parser.add_argument("--max_seq_len", type=int, default=128, help="tokens (default: 128)")
    parser.add_argument("--loader_batch", type=int, default=128, help="samples per batch of the loader (default: 128)")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
    parser.add_argument("--seconds", type=float, default=3, help="seconds per loader (default: 3)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="lion-s", choices=models.MODELS, help="(default: lion-s)")
    parser.add_argument("--batch", type=int, help="batch size of its step (default: 8 on a CPU, 128 on a GPU)")
    parser.add_argument("--layers", type=int, default=12, help="(default: 12, that is 23 in hydra)")
    parser.add_argument("--hidden", type=int, default=768, help="(default: 768, in heads of 64)")
    parser.add_argument("--out", type=Path, help=measure.OUT)
    a = parser.parse_args(argv)
    a.out = a.out or measure.results_folder(a.device)
    trainers.silence_libraries()
    tokenizer = text_model.build_tokenizer(a.tokenizer_name, a.max_seq_len)

    rows = []
    cases = list(itertools.product(a.data_local, (False, True), a.workers))
    for folder, packing, workers in cli.progress(cases, desc="loaders"):
        loader = open_loader(folder, packing, workers, tokenizer, a)
        kind = "tokens" if "tokens" in loader.dataset.shards[0].column_names else "text"
        speed = samples_per_second(loader, a.seconds)
        row = {"data": folder, "kind": kind, "packing": packing, "workers": workers, "samples_per_second": speed}
        rows.append({**row, **loader.padding.shares()})
        del loader  # and its workers
    step = step_samples_per_second(a)

    lines = [["samples", "workers", "samples per second", f"relative to {a.model}'s step", "padding"]]
    for row in rows:
        kind, speed = f"{row['kind']}{', packed' if row['packing'] else ''}", row["samples_per_second"]
        lines.append([kind, str(row["workers"]), f"{speed:,.0f}", f"×{speed / step:,.0f}", f"{row['padding']:.1%}"])
    size = models.describe([a.model], a.layers, a.hidden)
    title = (
        f"Batches of {a.loader_batch} samples of at most {a.max_seq_len} tokens; training {a.model}, {size}, "
        f"processes {step:,.1f} samples per second:"
    )
    rows.append({"model": a.model, "samples_per_second": step})
    measure.write(a.out, f"dataloader-{a.device}", title, measure.machine(a.device), [lines], rows)


def open_loader(folder: str, packing: bool, workers: int, tokenizer, a: argparse.Namespace) -> streaming.TextDataLoader:
    options = DatasetConfig(
        local=folder, remote=None, split=a.split, tokenizer_name=a.tokenizer_name, max_seq_len=a.max_seq_len,
        mlm_probability=0.3, packing=packing, shuffle=True, seed=17,
    )  # fmt: skip
    return streaming.build(LoaderConfig(options, num_workers=workers), tokenizer, a.loader_batch, train=True)


def samples_per_second(loader: streaming.TextDataLoader, seconds: float) -> float:
    """Measure a loader from its second batch on, over as many epochs as needed."""
    batches = (batch for _ in itertools.count() for batch in loader)
    next(batches)
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        count += sample_count(next(batches))
    return count / (time.perf_counter() - begin)


def step_samples_per_second(a: argparse.Namespace) -> float:
    a.batch = a.batch or (8 if a.device == "cpu" else 128)
    a.precision = "fp32" if a.device == "cpu" else "amp_bf16"
    a.length, a.packed, a.masked, a.dropout, a.form, a.compile = [a.max_seq_len], 1, 0.3, 0.1, "auto", False
    step = train_step.prepare(a.model, a)
    return a.batch / measure.interleaved({a.model: step}, a.device, rounds=5, seconds=30)[a.model]


if __name__ == "__main__":
    cli.run(main)
