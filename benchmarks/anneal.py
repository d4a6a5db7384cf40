"""What annealing to long rows is worth: masked accuracy by length of context (main.py context) of small models that
were pretrained on rows of 128 tokens, before and after annealing on long rows, with unchanged decays and with stretched
horizons:

    python benchmarks/anneal.py --out anneal --data_files 'texts/*.jsonl'

Trains by `python -m src.demo --compare`; run it again to resume. Writes a table with mean and standard deviation over
the seeds, its numbers and a picture.
"""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import json
import subprocess
from pathlib import Path
from statistics import mean

import torch

from benchmarks import measure
from src import cli, plots
from src.config import Rule, check_value
from src.data.convert import is_validation
from src.data.readers import find_files, read_batches
from src.errors import UserError
from src.tables import spread

ROOT = Path(__file__).resolve().parents[1]
SEED, SHORT = 17, 128
VAL_FRACTION = 0.04  # the demo's
MIXERS = ("lion-d", "lion-s")
BEFORE, CONTINUED = "before", "annealed, decays unchanged"
STRETCHED = "annealed, horizons 8 to L, key weights"
STARTS = {  # how annealing starts: name in a table → suffix of runs, and model options for rows of L tokens
    CONTINUED: ("continued", lambda length: {}),
    STRETCHED: ("stretched", lambda length: {"decay_horizon": [8, length], "key_weight": "linear"}),
}
STEP_TOKENS = 2048
ROWS = 32  # to evaluate on


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mixers", nargs="+", default=MIXERS, choices=MIXERS, help="(default: all)")
    add("--length", type=int, default=2048, help="tokens of a long row, a multiple of 512 from 1024 (default: 2048)")
    add("--tokens", type=int, default=2**20, help="of pretraining; a step takes 2048 (default: 1048576)")
    add("--anneal_tokens", type=int, default=2**19, help="of annealing (default: 524288)")
    add("--lr", type=float, default=1.2e-3, help="peak of annealing; that of pretraining is 1.2e-3 (default: the same)")
    add("--seeds", type=int, default=3, help="runs of each model (default: 3)")
    add("--jobs", type=int, default=1, help="runs at a time, which share the cores (default: 1)")
    add("--data_files", nargs="+", metavar="GLOB", help="your own text (default: the demo's corpus)")
    add("--val_fraction", type=float, default=VAL_FRACTION, help="of --data_files, to evaluate on (default: 0.04)")
    add("--out", type=Path, default=Path("anneal"), help="folder for all outputs (default: anneal)")
    add("overrides", nargs="*", metavar="key=value", help="changes to the config of both trainings")
    options = parser.parse_args(argv)
    if options.val_fraction != VAL_FRACTION and not options.data_files:
        raise UserError("--val_fraction is of --data_files; give those too")
    check_value("--length", options.length, int, Rule(at_least=1024))
    if options.length % 512:
        raise UserError(f"--length {options.length} is not a multiple of 512; round it")
    measure.keep_options(options.out, options, ("tokens", "anneal_tokens", "length", "lr", "overrides"))
    short, long, seeds = options.out / "short", options.out / "long", range(SEED, SEED + options.seeds)
    models: dict[tuple[str, str, int], Path] = {}  # (mixer, start, seed) → checkpoint
    before, after = [], []
    for mixer in options.mixers:
        for seed in seeds:
            name = f"{mixer}-{seed}"
            before.append(write_config(options.out, name, mixer, seed, {}))
            models[mixer, BEFORE, seed] = short / "pretrained" / name / "latest-rank0.pt"
            for start, (suffix, settings) in STARTS.items():
                given = {"pretrained_checkpoint": str(models[mixer, BEFORE, seed].resolve())}
                given |= settings(options.length)
                after.append(write_config(options.out, f"{name}-{suffix}", mixer, seed, given))
                models[mixer, start, seed] = long / "pretrained" / f"{name}-{suffix}" / "latest-rank0.pt"
    train(options, short, SHORT, options.tokens, before)
    train(options, long, options.length, options.anneal_tokens, after, f"optimizer.lr={options.lr}")
    lengths = [SHORT, 512, options.length]
    context = measure_context(options, long, lengths, [*models.values()])
    titles = {key: path.resolve().parent.name for key, path in models.items()}
    rows = [
        {"mixer": mixer, "start": start, "seed": seed, "accuracy": of_lengths(context[titles[mixer, start, seed]])}
        for mixer, start, seed in models
    ]
    text = ", ".join(options.data_files) if options.data_files else "the demo's corpus"
    title = (
        f"Masked accuracy in percent by tokens of context, on {text}, of models pretrained on {options.tokens:,} "
        f"tokens in rows of {SHORT} and annealed on {options.anneal_tokens:,} in rows of {options.length:,}, mean ± "
        f"standard deviation of {options.seeds} seeds:"
    )
    facts = measure.machine("cuda" if torch.cuda.is_available() else "cpu")
    measure.write(options.out, "results", title, facts, [table(rows, lengths)], rows)
    draw(rows, lengths, options.out / "results.png")
    print(f"picture  {options.out / 'results.png'}")


def write_config(out: Path, name: str, mixer: str, seed: int, model: dict[str, object]) -> Path:
    path = out / "configs" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"inherit: {ROOT}/yamls/pretrain/{mixer}-tiny.yaml", f"run_name: {name}", f"seed: {seed}", "model:"]
    settings = [f"  {key}: {json.dumps(value)}" for key, value in {"mixer": mixer, **model}.items()]
    path.write_text("\n".join([*lines, *settings, ""]))
    return path


def train(
    options: argparse.Namespace, out: Path, length: int, tokens: int, configs: list[Path], *overrides: str
) -> None:
    """Train the models of some configs on rows of `length` tokens."""
    batch = max(1, STEP_TOKENS // length)
    command = ["-m", "src.demo", "--compare", "--pretrain_only", "--out", out.resolve(), "--length", length]
    command += ["--jobs", options.jobs]
    if options.data_files:
        files = [path.resolve() for path in find_files(options.data_files)]
        command += ["--data_files", *files, "--val_fraction", options.val_fraction]
    command += ["--models", *(path.resolve() for path in configs), f"max_duration={tokens // length}sp"]
    command += [f"global_train_batch_size={batch}", f"device_train_microbatch_size={batch}"]
    command += [f"device_eval_batch_size={4 * batch}", "eval_first=false", "eval_interval=1dur"]
    run(*command, *overrides, *options.overrides)


def measure_context(options: argparse.Namespace, data: Path, lengths: list[int], checkpoints: list[Path]) -> dict:
    """Return the results of `main.py context` on the documents that no model was trained on."""
    files = find_files(options.data_files) if options.data_files else [data / "documents.jsonl"]
    texts = (text for path in files for batch in read_batches(path, "text") for text in batch.texts)
    held_out = options.out / "held-out.jsonl"
    kept = (text for text in texts if is_validation(text, options.val_fraction))
    held_out.write_text("".join(json.dumps({"text": text}) + "\n" for text in kept))
    command = ["main.py", "context", *checkpoints, "--data_files", held_out, "--lengths", *lengths, "--rows", ROWS]
    run(*command, "--out", options.out / "context")
    return json.loads((options.out / "context/report.json").read_text())["results"]


def of_lengths(result: dict) -> dict[str, float]:
    return {length: 100 * found["accuracy"] for length, found in result["lengths"].items()}


def run(*command: object) -> None:
    program = [ROOT / word if word == "main.py" else word for word in command]
    done = subprocess.run([sys.executable, *map(str, program)], env=os.environ | {"PYTHONPATH": str(ROOT)})
    if done.returncode:
        raise SystemExit(done.returncode)


def of_model(rows: list[dict], mixer: str, start: str, length: int) -> list[float]:
    return [row["accuracy"][str(length)] for row in rows if (row["mixer"], row["start"]) == (mixer, start)]


def table(rows: list[dict], lengths: list[int]) -> list[list[str]]:
    gain = f"{lengths[-1]:,} − {lengths[0]:,}"
    lines = [["mixer", "model", *(f"{length:,}" for length in lengths), gain]]
    for mixer, start in dict.fromkeys((row["mixer"], row["start"]) for row in rows):
        seeds = [of_model(rows, mixer, start, length) for length in lengths]
        gains = [long - short for short, long in zip(seeds[0], seeds[-1])]
        lines.append([mixer, start, *map(spread, seeds), spread(gains)])
    return lines


def draw(rows: list[dict], lengths: list[int], picture: Path) -> None:
    """Draw a plot per mixer: masked accuracy against context, a line per model, a dot per seed."""
    mixers = list(dict.fromkeys(row["mixer"] for row in rows))
    figure, axes = plots.subplots(columns=len(mixers), title="masked accuracy by context")
    for axis, mixer in zip(axes[0], mixers):
        for start, shade in zip((BEFORE, *STARTS), ("black", *plots.OTHERS)):
            seeds = [of_model(rows, mixer, start, length) for length in lengths]
            axis.plot(lengths, [mean(values) for values in seeds], "-", color=shade, label=start)
            for values in zip(*seeds):
                axis.plot(lengths, values, ".", color=shade)
        plots.label_axes(axis, mixer, "tokens of context", "%")
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    plots.save(figure, picture)


if __name__ == "__main__":
    cli.run(main)
