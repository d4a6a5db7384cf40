"""How far models carry information: passkey and header, see src/embed/synthetic.py, by the length of the documents.

    python benchmarks/reach.py header
    python benchmarks/reach.py passkey

Trains models of 2 layers on short documents by embed.py, from random weights, and evaluates them on long ones: the
share of queries that find their document first. Or starts from checkpoints, such as those of benchmarks/anneal.py:

    python benchmarks/reach.py header --tokenizer anneal/short/tokenizer \\
        --start_from 'before=anneal/short/pretrained/{mixer}-{seed}/latest-rank0.pt'

Run it again to resume. Writes a table with mean and standard deviation over the seeds, a second one by the position of
the query's word in the longest documents, the numbers and a picture.
"""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch

from benchmarks import measure
from src import cli, plots
from src.data.workers import usable_cores
from src.errors import UserError
from src.tables import spread

ROOT = Path(__file__).resolve().parents[1]
SEED = 17  # of the first run
HELD_OUT = 64  # pairs
SIZES = (
    "model.hidden_size=128 model.num_hidden_layers=2 model.num_attention_heads=4 model.intermediate_size=512 "
    "model.hidden_dropout_prob=0.0 model.attention_probs_dropout_prob=0.0"
).split()
RANDOM = [
    *SIZES,
    "starting_checkpoint_load_path=null",
    "model.mixer={mixer}",
    "model.max_position_embeddings={longest}",
]
STARTS = {  # name → config overrides
    "as published": RANDOM,
    "8 to 1,024": [*RANDOM, "model.decay_horizon=[8, 1024]"],
    "8 to 1,024, key weights": [*RANDOM, "model.decay_horizon=[8, 1024]", "model.key_weight=linear"],
    "none": RANDOM,  # no decay
}


class Case(NamedTuple):
    mixer: str
    start: str
    pooling: str = "mean"

    def __str__(self) -> str:
        return "-".join(self).replace(",", "").replace(" ", "-")


SPREAD = [name for name in STARTS if name != "none"]
CASES = {
    "header": [
        *(Case("lion-s", start) for start in SPREAD), *(Case("lion-d", start) for start in SPREAD[:2]),
        Case("lion-lit", "none"), Case("softmax", "none"),
    ],
    "passkey": [Case("lion-s", "8 to 1,024", pooling) for pooling in ("mean", "attention")],
}  # fmt: skip
LENGTHS = {"header": [128, 512, 2048, 8192], "passkey": [256, 1024, 4096, 16384]}
LONGEST_PAIR = {"header": 128, "passkey": 256}  # tokens, by default of src.embed.synthetic
FROM_CHECKPOINTS = {"header": "mean", "passkey": "attention"}  # pooling with --start_from
THIRDS = ("beginning", "middle", "end")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("task", choices=list(CASES))
    words = "tokenizer folder; its words form the texts (default: demo/tokenizer)"
    add("--tokenizer", default="demo/tokenizer", help=words)
    add("--lengths", nargs="+", type=int, help="tokens of the documents (default: 128 to 8192, or 256 to 16384)")
    add("--steps", type=int, default=500, help="training steps (default: 500)")
    add("--batch", type=int, default=32, help="pairs per step (default: 32)")
    add("--seeds", type=int, default=3, help="runs of each model (default: 3)")
    add("--mixers", nargs="+", help="only these (default: all; with --start_from, lion-d and lion-s)")
    words = "checkpoints to start from, with {mixer} and {seed} (17, 18, …) in their path, and a name for the table"
    add("--start_from", action="append", metavar="NAME=PATH", help=f"{words}; may be repeated")
    add("--jobs", type=int, default=1, help="runs at a time, which share the cores (default: 1)")
    add(
        "--out", type=Path, help="folder for all outputs (default: reach/TASK; with --start_from, reach/TASK-continued)"
    )
    add("overrides", nargs="*", metavar="key=value", help="changes to the config of training")
    options = parser.parse_intermixed_args(argv)  # overrides may also be last
    options.lengths = sorted(options.lengths or LENGTHS[options.task])
    options.out = options.out or Path("reach", options.task + "-continued" * bool(options.start_from))
    starts, cases = STARTS, [case for case in CASES[options.task] if case.mixer in (options.mixers or [case.mixer])]
    if options.start_from:
        starts, cases = from_checkpoints(options)
    data, out = options.out / "data", options.out
    pairs = HELD_OUT + options.steps * options.batch  # none is seen twice
    make = ["--tokenizer", options.tokenizer, "--lengths", *options.lengths, "--pairs", pairs]
    made = data / "made.json"
    if not made.exists():
        run("-m", "src.embed.synthetic", options.task, *make, "--out", data)
        made.write_text(json.dumps(make))
    elif json.loads(made.read_text()) != make:
        raise UserError(f"{data} was made with other options; repeat those, or choose another --out")
    jobs = [(case, SEED + number) for number in range(options.seeds) for case in cases]
    with ThreadPoolExecutor(options.jobs) as pool:
        done = [pool.submit(train_and_evaluate, options, case, seed, starts[case.start]) for case, seed in jobs]
        try:
            rows = [future.result() for future in cli.progress(as_completed(done), total=len(done), desc="runs")]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    rows.sort(key=lambda row: jobs.index(((Case(row["mixer"], row["start"], row["pooling"])), row["seed"])))
    title = (
        f"{options.task}: queries that find their document first, in percent, after {options.steps} steps of "
        f"{options.batch} pairs of at most {LONGEST_PAIR[options.task]} tokens, mean ± standard deviation of "
        f"{options.seeds} seeds; then the mean by the position of the query's word in the longest documents:"
    )
    facts = measure.machine("cuda" if torch.cuda.is_available() else "cpu")
    measure.write(out, "results", title, facts, [table(rows, cases), by_place(rows, cases)], rows)
    draw(rows, cases, [*starts], out / "results.png", options.task)
    print(f"picture  {out / 'results.png'}")


def from_checkpoints(options: argparse.Namespace) -> tuple[dict[str, list[str]], list[Case]]:
    """Return name → config overrides, and the cases, for --start_from. Raises UserError."""
    starts: dict[str, list[str]] = {}
    for given in options.start_from:
        name, _, path = given.partition("=")
        fields = set(re.findall(r"{.*?}", path))
        if not re.fullmatch(r"[\w-]+", name) or name in starts or fields != {"{mixer}", "{seed}"}:
            form = "NAME=PATH, with a new name of letters and digits, and {mixer} and {seed} in the path"
            raise UserError(f"--start_from {given}: give {form}")
        starts[name] = [f"starting_checkpoint_load_path={path}"]
    mixers, pooling = options.mixers or ("lion-d", "lion-s"), FROM_CHECKPOINTS[options.task]
    return starts, [Case(mixer, name, pooling) for mixer in mixers for name in starts]


def run(*command: object, threads: int | None = None) -> None:
    """Run a Python program of this project silently; if it fails, print its output and end."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    done = subprocess.run([sys.executable, *map(str, command)], env=environment, capture_output=True, text=True)
    if done.returncode:
        print(f"{done.stdout}{done.stderr}\nfailed: python {' '.join(map(str, command))}", file=sys.stderr)
        raise SystemExit(done.returncode)


def train_and_evaluate(options: argparse.Namespace, case: Case, seed: int, start: list[str]) -> dict[str, Any]:
    """Return a row of results: per length, the share of queries that find their document first; None if the model does
    not read documents of that length. start: overrides of the config."""
    threads = max(1, usable_cores() // options.jobs)
    data, name, longest = options.out / "data", f"{case}-seed-{seed}", LONGEST_PAIR[options.task]
    folder = options.out / "runs" / name
    config = [
        ROOT / "embed.py", ROOT / "yamls/embed/tiny.yaml", f"run_name={name}", f"save_folder={folder}", f"seed={seed}",
        *(part.format(mixer=case.mixer, seed=seed, longest=longest) for part in start),
        f"tokenizer_name={options.tokenizer}",
        f"pooling={case.pooling}", f"data.made.files={data / 'pairs.jsonl'}",
        *(["data.made.columns.passage=passage"] if options.task == "header" else []),
        f"max_seq_len={longest}", f"held_out={HELD_OUT}",
        f"global_train_batch_size={options.batch}", f"max_duration={options.steps}ba", "eval_interval=1dur",
        "save_interval=100ba", "optimizer.lr=1.0e-3", "progress_bar=false", *options.overrides,
    ]  # fmt: skip
    run(*config, threads=threads)
    folders = [data / f"{options.task}-{length}" for length in options.lengths]
    scores, checkpoint = options.out / "scores" / name, folder / "latest-rank0.pt"
    run(ROOT / "embed.py", "evaluate", checkpoint, "--data", *folders, "--out", scores, threads=threads)
    (found,) = json.loads((scores / "report.json").read_text())["results"].values()
    row: dict[str, Any] = {**case._asdict(), "seed": seed, "accuracy": {}, "by_third": {}}
    for length, path in zip(options.lengths, folders):
        result = found[path.name]
        first = {query: value == 1 for query, value in result["by_query"]["RR@10"].items()}
        row["accuracy"][str(length)] = None if result["cut"]["document"] else 100 * mean(first.values())
        queries = map(json.loads, (path / "queries.jsonl").read_text().splitlines())
        thirds: list[list[bool]] = [[], [], []]
        for query in queries:
            thirds[min(2, int(3 * query["metadata"]["depth"]))].append(first[query["_id"]])
        row["by_third"][str(length)] = [100 * mean(third) if third else None for third in thirds]
    return row


def of_case(rows: list[dict[str, Any]], case: Case) -> list[dict[str, Any]]:
    return [row for row in rows if (row["mixer"], row["start"], row["pooling"]) == tuple(case)]


def table(rows: list[dict[str, Any]], cases: list[Case]) -> list[list[str]]:
    lengths = list(rows[0]["accuracy"])
    lines = [["mixer", "start", "pooling", *(f"{int(length):,} tokens" for length in lengths)]]
    for case in cases:
        seeds = [[row["accuracy"][length] for row in of_case(rows, case)] for length in lengths]
        lines.append([*case, *("-" if None in values else spread(values) for values in seeds)])
    return lines


def by_place(rows: list[dict[str, Any]], cases: list[Case]) -> list[list[str]]:
    longest = list(rows[0]["accuracy"])[-1]
    lines = [["mixer", "start", "pooling", *THIRDS]]
    for case in cases:
        own = [row for row in of_case(rows, case) if row["accuracy"][longest] is not None]
        thirds = zip(*(row["by_third"][longest] for row in own))
        cells = ["-" if None in third else f"{mean(third):.1f}" for third in thirds]
        lines.append([*case, *(cells or ["-"] * len(THIRDS))])
    return lines


def draw(rows: list[dict[str, Any]], cases: list[Case], starts: list[str], picture: Path, task: str) -> None:
    """Draw a plot per mixer and pooling: accuracy against length, a line per start, a dot per seed."""
    groups = list(dict.fromkeys((case.mixer, case.pooling) for case in cases if case.start != "none"))
    figure, axes = plots.subplots(columns=len(groups), title=task)
    tints = dict(zip(starts, ("black", *plots.OTHERS)))
    for axis, group in zip(axes[0], groups):
        for case in cases:
            if (case.mixer, case.pooling) == group:
                own = of_case(rows, case)
                lengths = list(own[0]["accuracy"])
                for row in own:
                    axis.plot(*zip(*((int(n), row["accuracy"][n]) for n in lengths)), ".", color=tints[case.start])
                means = [mean(row["accuracy"][n] for row in own) for n in lengths]
                axis.plot([*map(int, lengths)], means, "-", color=tints[case.start], label=case.start)
        plots.label_axes(axis, f"{group[0]}, {group[1]} pooling", "tokens of a document", "found first, %")
        axis.set_xscale("log", base=2)
        axis.set_xticks([*map(int, lengths)], [f"{int(n):,}" for n in lengths])
        axis.set_ylim(0, 103)
    plots.save(figure, picture)


if __name__ == "__main__":
    cli.run(main)
