"""The options of src/convert_dataset.py."""

import argparse

from src.data.convert import SPLITS
from src.data.readers import LINE_KINDS
from src.data.workers import usable_cores


def conversion_parser(description: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    source, length = parser.add_mutually_exclusive_group(required=True), parser.add_mutually_exclusive_group()
    kinds = ".txt (one document per line), .jsonl, .csv, .tsv, each optionally .gz or .zst, or .parquet"
    splits = {"nargs": "+", "choices": SPLITS, "default": ["train", "val"], "metavar": "SPLIT"}
    cores = {"type": int, "default": usable_cores()}
    source.add_argument("--dataset", help="name on the Hub, e.g. allenai/c4; streamed, not downloaded first")
    source.add_argument("--data_files", nargs="+", metavar="GLOB", help=f"{kinds}; - is standard input")
    source.add_argument(
        "--images", metavar="FOLDER", help="train/CLASS/*, CLASS/*, Parquet, CIFAR, MNIST, or a name on the Hub"
    )
    source.add_argument("--merge", action="store_true", help="join the parts in --out_root that --part wrote")
    add("--data_subset", help="the dataset's configuration, e.g. en")
    add("--revision", help="the dataset's commit, tag or branch (default: the latest)")
    add("--splits", **splits, help=f"some of {', '.join(SPLITS)} (default: train val)")
    add("--out_root", required=True, help="folder to write to; each split is a folder in it")
    add("--text_column", default="text", help="column or key with the text (default: text)")
    add("--one_document_per_file", action="store_true", help="a .txt file is one document, line ends included")
    add("--stdin_format", choices=LINE_KINDS, help="format of - (default: jsonl if it starts with {, else txt)")
    words = "skip up to N rows of each file that are not JSON, not UTF-8, or of another length (default: 0)"
    add("--malformed_rows", type=int, default=0, metavar="N", help=words)
    words = "hold out this fraction of documents, or of the images in CLASS/*, for val, chosen by a hash of each"
    add("--val_fraction", type=float, help=words)
    add("--tokenizer", metavar="NAME", help="write rows of tokens of this tokenizer: a folder, or a name on the Hub")
    length.add_argument("--concat_tokens", type=int, metavar="N", help="full rows of N tokens, documents end to end")
    length.add_argument("--max_seq_len", type=int, metavar="N", help="one row per document, truncated to N tokens")
    add("--num_workers", **cores, help="processes that tokenize or verify (default: one per core, here %(default)s)")
    add("--part", metavar="I/N", help="write part I of N alone, on this machine; --merge joins them")
    add("--compression", choices=["zstd"], help="compress the shards")
    add("--size_limit", type=int, default=1 << 26, help="maximum bytes per shard (default: 64 MiB)")
    add("--overwrite", action="store_true", help="replace existing splits, and unfinished ones of other commands")
    return parser
