"""Speed of conversion to rows of tokens by number of workers:  python benchmarks/convert.py --tokenizer DIR

Compared with a plain loop, which tokenizes a thousand documents at a time and passes each row to MDSWriter. All read
the same JSON lines, made of words of the vocabulary, and run in turn; medians of conversions, worker start-up included.
"""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import itertools
import json
import logging
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np

from src import cli
from src.convert_dataset import main as convert_dataset
from src.data.tokenizers import load_tokenizer


def main(argv: list[str]) -> None:
    from benchmarks import measure  # here, since each worker imports this file and should not import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="a folder or a name on the Hub")
    parser.add_argument("--text", type=Path, help="repeat the lines of this file (default: words of the vocabulary)")
    parser.add_argument("--megabytes", type=float, default=30, help="of text (default: 30)")
    parser.add_argument("--length", type=int, default=128, help="tokens per row (default: 128)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="(default: 1 2)")
    parser.add_argument("--rounds", type=int, default=3, help="conversions per case (default: 3)")
    parser.add_argument("--out", type=Path, help=measure.OUT)
    a = parser.parse_args(argv)
    a.out = a.out or measure.results_folder("cpu")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.getLogger("lion").setLevel(logging.WARNING)
    tokenizer = load_tokenizer(a.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "text.jsonl"
        size = write_source(source, tokenizer, a.text, a.megabytes * 1e6)
        cases = {"plain loop": lambda: plain(source, Path(folder) / "plain", tokenizer, a.length)}
        for mode, workers in itertools.product(("max_seq_len", "concat_tokens"), a.workers):
            name = f"{mode}, {workers} worker{'s' if workers > 1 else ''}"
            cases[name] = lambda mode=mode, workers=workers: convert(source, Path(folder) / mode, a, mode, workers)
        times = measure.interleaved(cases, "cpu", a.rounds, seconds=600)
    rows = [
        {"case": name, "seconds": seconds, "megabytes_per_second": size / 1e6 / seconds}
        for name, seconds in times.items()
    ]
    lines = [["", "MB/s of text", "relative to the plain loop", f"relative to {a.workers[0]} worker"]]
    for row in rows:
        mode = row["case"].split(",")[0]
        one = next((r["seconds"] for r in rows if r["case"].startswith(f"{mode},")), row["seconds"])
        rate = f"{row['megabytes_per_second']:.2f}"
        lines.append([row["case"], rate, f"×{rows[0]['seconds'] / row['seconds']:.2f}", f"×{one / row['seconds']:.2f}"])
    origin = a.text.name if a.text else "random words"
    title = (
        f"Conversion of {size / 1e6:.0f} MB of {origin} to rows of {a.length} tokens, "
        f"vocabulary of {len(tokenizer):,}, medians of {a.rounds} rounds:"
    )
    measure.write(a.out, "convert-cpu", title, measure.machine("cpu"), [lines], rows)


def write_source(path: Path, tokenizer, text: Path | None, size: float) -> int:
    """Write JSON lines with about `size` bytes of text, and return the exact number."""
    if text:
        lines = [line for line in text.read_text(encoding="utf-8").splitlines() if line.strip()]
        documents = itertools.cycle(lines)
    else:
        words = sorted(word for word in tokenizer.get_vocab() if word.isalnum())
        draw = random.Random(0)
        documents = (" ".join(draw.choices(words, k=draw.randint(20, 400))) for _ in itertools.count())
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            document = next(documents)
            file.write(json.dumps({"text": document}) + "\n")
            written += len(document.encode())
    return written


def convert(source: Path, out: Path, a: argparse.Namespace, mode: str, workers: int) -> None:
    shutil.rmtree(out, ignore_errors=True)
    options = {"data_files": source, "splits": "train", "out_root": out, "tokenizer": a.tokenizer}
    options |= {mode: a.length, "num_workers": workers}
    convert_dataset([str(word) for name, value in options.items() for word in (f"--{name}", value)])


def plain(source: Path, out: Path, tokenizer, length: int) -> None:
    """Convert each document to one row of at most `length` tokens with a plain loop."""
    from streaming import MDSWriter

    shutil.rmtree(out, ignore_errors=True)
    dtype = "uint16" if len(tokenizer) <= 65536 else "uint32"
    with (
        MDSWriter(out=str(out), columns={"tokens": f"ndarray:{dtype}"}) as shards,
        source.open(encoding="utf-8") as file,
    ):
        while lines := list(itertools.islice(file, 1000)):
            documents = [json.loads(line)["text"] for line in lines]
            for ids in tokenizer(documents, truncation=True, max_length=length)["input_ids"]:
                shards.write({"tokens": np.array(ids, dtype)})


if __name__ == "__main__":
    cli.run(main)
