"""What spread horizons are worth: masked accuracy of LION-D, LION-S and LION-S+ whose decays start as published, or
spread over the heads, without or with weights of the keys, trained on rows of several lengths for the same number of
tokens:

    python benchmarks/horizons.py --out horizons [--data_files 'texts/*.jsonl']

Trains small models by `python -m src.demo --compare` in a folder per length below --out; run it again to resume. Writes
a table with mean and standard deviation over the seeds, its numbers and a picture.
"""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import json
import subprocess
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from benchmarks import measure
from src import cli, plots
from src.tables import spread

ROOT = Path(__file__).resolve().parents[1]
MIXERS = ("lion-d", "lion-s", "lion-s-plus")
STARTS = {  # name → model options, for rows of L tokens
    "published": lambda length: {"decay_horizon": None},
    "2-to-L": lambda length: {"decay_horizon": [2, length]},
    "8-to-8L": lambda length: {"decay_horizon": [8, 8 * length]},
    "2-to-L-weighed": lambda length: {"decay_horizon": [2, length], "key_weight": "linear"},
}
STEP_TOKENS = 2048


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mixers", nargs="+", default=MIXERS, choices=MIXERS, help="(default: all)")
    add("--starts", nargs="+", default=list(STARTS), choices=STARTS, help="horizons at the start (default: all)")
    add("--lengths", nargs="+", type=int, default=[32, 128, 512], help="tokens of a row (default: 32 128 512)")
    add("--tokens", type=int, default=2**20, help="of a run; a step takes 2048 (default: 1048576)")
    add("--seeds", type=int, default=3, help="runs of each model (default: 3)")
    add("--jobs", type=int, default=1, help="runs at a time, which share the cores (default: 1)")
    add("--data_files", nargs="+", metavar="GLOB", help="your own text (default: the demo's corpus)")
    add("--val_fraction", type=float, help="of --data_files, to evaluate on")
    add("--vocab_size", type=int, help="tokens of the vocabulary")
    add("--out", type=Path, default=Path("horizons"), help="folder for all outputs (default: horizons)")
    add("overrides", nargs="*", metavar="key=value", help="changes to the pretraining config")
    options = parser.parse_intermixed_args(argv)  # overrides may also be last
    measure.keep_options(options.out, options, ("tokens", "overrides"))
    rows = [row for length in cli.progress(options.lengths, desc="lengths") for row in compare(options, length)]
    lines = [["model", "horizons at the start", *(f"{length} tokens" for length in options.lengths)]]
    for mixer in options.mixers:
        for start in options.starts:
            cells = [row["accuracy"] for row in rows if (row["mixer"], row["start"]) == (mixer, start)]
            lines.append([mixer, start.replace("-", " "), *(f"{spread(seeds)}%" for seeds in cells)])
    text = ", ".join(options.data_files) if options.data_files else "the demo's corpus"
    title = (
        f"Masked accuracy after {options.tokens:,} tokens of {text} in rows of L tokens, mean ± standard deviation of "
        f"{options.seeds} seeds:"
    )
    measure.write(
        options.out, "results", title, measure.machine("cuda" if torch.cuda.is_available() else "cpu"), [lines], rows
    )
    draw(rows, options.out / "results.png")
    print(f"picture  {options.out / 'results.png'}")


def compare(options: argparse.Namespace, length: int) -> list[dict[str, Any]]:
    """Train every model on rows of `length` tokens; return the masked accuracy in percent of each seed."""
    out = options.out / str(length)
    (out / "configs").mkdir(parents=True, exist_ok=True)
    models = {
        (mixer, start): out / f"configs/{mixer}-{start}.yaml" for mixer in options.mixers for start in options.starts
    }
    for (mixer, start), path in models.items():
        config = [f"inherit: {ROOT}/yamls/pretrain/{mixer}-tiny.yaml", f"run_name: {path.stem}", "model:"]
        settings = [f"  {name}: {json.dumps(value)}" for name, value in STARTS[start](length).items()]
        path.write_text("\n".join([*config, *settings, ""]))
    batch = max(1, STEP_TOKENS // length)
    given = {name: getattr(options, name) for name in ("seeds", "jobs", "data_files", "val_fraction", "vocab_size")}
    command = ["-m", "src.demo", "--compare", "--pretrain_only", "--out", out.resolve(), "--length", length]
    for name, value in given.items():
        if value is not None:
            command += [f"--{name}", *(value if isinstance(value, list) else [value])]
    command += ["--models", *(path.resolve() for path in models.values())]
    command += [f"max_duration={options.tokens // length}sp", f"global_train_batch_size={batch}"]
    command += [f"device_train_microbatch_size={batch}", f"device_eval_batch_size={4 * batch}"]
    command += ["eval_first=false", "eval_interval=1dur", *options.overrides]  # only the last evaluation is used
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *map(str, command)], env=environment)
    if done.returncode:
        raise SystemExit(done.returncode)
    results = json.loads((out / "results.json").read_text())
    return [
        {"mixer": mixer, "start": start, "length": length, "accuracy": [run["accuracy"] for run in results[path.stem]]}
        for (mixer, start), path in models.items()
    ]


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
    """Draw a plot per mixer: masked accuracy against the length of rows, a line per start with standard deviations."""
    mixers, starts, ticks = (list(dict.fromkeys(row[key] for row in rows)) for key in ("mixer", "start", "length"))
    figure, axes = plots.subplots(columns=len(mixers))
    for axis, mixer in zip(axes[0], mixers):
        for start, shade in zip(starts, ("black", *plots.OTHERS)):
            chosen = [row for row in rows if (row["mixer"], row["start"]) == (mixer, start)]
            lengths, means = [row["length"] for row in chosen], [mean(row["accuracy"]) for row in chosen]
            deviations = [stdev(row["accuracy"]) if len(row["accuracy"]) > 1 else 0 for row in chosen]
            axis.errorbar(lengths, means, deviations, fmt="o-", color=shade, capsize=3, label=start.replace("-", " "))
        plots.label_axes(axis, mixer, "tokens of a row", "masked accuracy, %")
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, ticks)
    plots.save(figure, picture)


if __name__ == "__main__":
    cli.run(main)
