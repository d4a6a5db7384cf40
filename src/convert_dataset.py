"""Text → MDS shards: a dataset of the Hugging Face Hub, or files of one's own.

python src/convert_dataset.py --dataset allenai/c4 --data_subset en --splits train_small val --out_root ./my-copy-c4
python src/convert_dataset.py --data_files 'texts/*.jsonl' --val_fraction 0.01 --splits train val --out_root ./my-texts
"""

import argparse
import hashlib
import itertools
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from src import cli
from src.cli import UserError, log, progress
from src.text_files import find_files, read_file

# A split's name → the Hub's split, and how many documents of it at most. The names M2-BERT and MosaicBERT users know.
SPLITS = {
    "train": ("train", None),
    "train_small": ("train", 100_000),
    "val": ("validation", None),
    "val_small": ("validation", 10_000),
}
C4_DOCUMENTS = {"train": 364_868_892, "validation": 364_608}  # allenai/c4 en, for the time left


def main(argv: list[str]) -> None:
    arguments = parse(argv)
    out_root = Path(arguments.out_root)
    check_output(out_root, arguments.splits, arguments.overwrite)
    for split in arguments.splits:
        source = open_source(arguments, split)
        write_split(source, out_root / split, arguments.compression, arguments.size_limit)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="convert_dataset.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--dataset", help="name on the Hub, e.g. allenai/c4; streamed, not downloaded first")
    source.add_argument(
        "--data_files", nargs="+", metavar="GLOB", help=".jsonl, .txt (a document a line) or .parquet files"
    )
    parser.add_argument("--data_subset", help="the dataset's configuration, e.g. en")
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=["train", "val"], metavar="SPLIT",
                        help=f"which to write: {', '.join(SPLITS)} (default: train val)")  # fmt: skip
    parser.add_argument("--out_root", required=True, help="folder to write to; each split is a folder in it")
    parser.add_argument("--text_column", default="text", help="column or key with the text (default: text)")
    parser.add_argument("--val_fraction", type=float,
                        help="share of documents that go to val, chosen by a hash of the text; for data without a validation split")  # fmt: skip
    parser.add_argument("--compression", choices=["zstd"], help="compress the shards")
    parser.add_argument("--size_limit", type=int, default=1 << 26, help="bytes of a shard at most (default: 64 MiB)")
    parser.add_argument("--overwrite", action="store_true", help="replace splits that are already there")
    arguments = parser.parse_args(argv)
    if arguments.val_fraction is not None and not 0 < arguments.val_fraction < 1:
        raise UserError(f"--val_fraction {arguments.val_fraction} must lie between 0 and 1")
    from_files = arguments.data_files is not None
    if (
        from_files
        and arguments.val_fraction is None
        and any(SPLITS[split][0] == "validation" for split in arguments.splits)
    ):
        raise UserError(
            "files have no validation split; give --val_fraction 0.01 to set documents aside, or --splits train"
        )
    return arguments


def check_output(out_root: Path, splits: list[str], overwrite: bool) -> None:
    """Raise UserError if a split is already there, before anything is read or written."""
    if out_root.exists() and not out_root.is_dir():
        raise UserError(f"--out_root {out_root} is a file; name a folder")
    for split in splits:
        folder = out_root / split
        if folder.exists() and not overwrite:
            raise UserError(f"{folder} is already there; name another --out_root, or give --overwrite to replace it")


def is_validation(text: str, fraction: float) -> bool:
    """Whether a document belongs to the validation split: decided by its text alone, so by no order and no machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < fraction * 2**64


@dataclass
class Source:
    """A split's documents, each with the progress it makes; None in place of a text that belongs to the other split."""

    documents: Iterator[tuple[str | None, int]]
    limit: int | None  # documents at most
    total: int | None  # progress in all, where it is known
    unit: str  # of progress: bytes of files, documents of the Hub


def open_source(arguments: argparse.Namespace, split: str) -> Source:
    hub_split, limit = SPLITS[split]
    fraction, column = arguments.val_fraction, arguments.text_column
    if arguments.data_files is not None:
        paths = find_files(arguments.data_files)
        documents = itertools.chain.from_iterable(read_file(path, column) for path in paths)
        source = Source(documents, limit, sum(path.stat().st_size for path in paths), "B")
    else:
        documents = read_hub(
            arguments.dataset, arguments.data_subset, hub_split if fraction is None else "train", column
        )
        known = C4_DOCUMENTS[hub_split] if (arguments.dataset, arguments.data_subset) == ("allenai/c4", "en") else None
        source = Source(documents, limit, min(known or limit, limit) if limit else known, "docs")
    if fraction is not None:
        wanted = hub_split == "validation"
        source.documents = (
            (text if is_validation(text, fraction) == wanted else None, step) for text, step in source.documents
        )
    return source


def write_split(source: Source, folder: Path, compression: str | None, size_limit: int) -> None:
    """Write MDS shards. They appear under the split's name when they are complete, and not before."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        count, empty, size = write_shards(source, unfinished, folder.name, compression, size_limit)
        if count == 0:
            raise UserError(f"{folder.name}: there is not one document with text; check the source and --text_column")
    except OSError as error:
        raise UserError(
            f"cannot write {unfinished}: {error.strerror or error}; make room or name another --out_root"
        ) from None
    except UserError:
        shutil.rmtree(unfinished, ignore_errors=True)
        if folder.parent.is_dir() and not any(folder.parent.iterdir()):
            folder.parent.rmdir()
        raise
    if folder.exists():
        shutil.rmtree(folder)
    unfinished.rename(folder)
    shards = len(json.loads((folder / "index.json").read_text())["shards"])
    skipped = f", {empty:,} empty ones left out" if empty else ""
    log.info(f"{folder}: {count:,} documents{skipped}, {size / 1e6:,.1f} MB of text, {shards} shards")


def write_shards(
    source: Source, out: Path, name: str, compression: str | None, size_limit: int
) -> tuple[int, int, int]:
    """Write a split's documents as MDS shards; returns documents, empty ones left out, and bytes of text."""
    from streaming import MDSWriter

    count = empty = size = 0
    with (
        MDSWriter(out=str(out), columns={"text": "str"}, compression=compression, size_limit=size_limit) as shards,
        progress(desc=name, total=source.total, unit=source.unit) as bar,
    ):
        for text, step in source.documents:
            bar.update(step)
            if text is None:
                continue
            if not text.strip():
                empty += 1
                continue
            shards.write({"text": text})
            count, size = count + 1, size + len(text.encode())
            if count == source.limit:
                break
    return count, empty, size


def read_hub(dataset: str, subset: str | None, split: str, column: str) -> Iterator[tuple[str, int]]:
    """Documents of a Hub dataset, streamed. Raises UserError where the Hub or the dataset does not answer."""
    from datasets import load_dataset

    try:
        for row in load_dataset(dataset, subset, split=split, streaming=True):
            if column not in row:
                raise UserError(
                    f"{dataset}: no column {column!r} (there are {', '.join(row)}); name it with --text_column"
                )
            yield row[column] or "", 1
    except UserError:
        raise
    except Exception as error:  # whatever the Hub's clients raise: connection, missing dataset, missing split, …
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"--dataset: cannot read {dataset} ({split}) from the Hugging Face Hub: {reason}; check the name and the connection, or use --data_files") from None  # fmt: skip


if __name__ == "__main__":
    cli.run(main)
