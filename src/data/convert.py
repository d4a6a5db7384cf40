"""Text → MDS shards: a dataset of the Hugging Face Hub, or files of one's own.

python src/convert_dataset.py --dataset allenai/c4 --data_subset en --splits train_small val --out_root ./my-copy-c4
python src/convert_dataset.py --data_files 'texts/*.jsonl.gz' --val_fraction 0.01 --out_root ./my-texts
zcat texts/*.gz | python src/convert_dataset.py --data_files - --splits train --out_root ./my-texts

As they stand, texts are tokenized while training. Tokenized here, training only reads them:

python src/convert_dataset.py ... --tokenizer bert-base-uncased --concat_tokens 128   documents end to end, in full rows
python src/convert_dataset.py ... --tokenizer bert-base-uncased --max_seq_len 128     a row a document, the rest cut off

A conversion that was interrupted goes on with the same command, and its shards are those of one that was not.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from src.cli import log, progress
from src.data.corpora import Files, HubDataset, grouped
from src.data.readers import LINE_KINDS, STANDARD_INPUT, Batch, ReadOptions, file_kind, texts
from src.data.token_rows import Packer, RowMaker, Rows
from src.data.tokenizers import load_tokenizer, vocabulary_digest
from src.data.workers import in_order, usable_cores
from src.errors import UserError

if TYPE_CHECKING:  # what it imports takes seconds, and the worker processes do without
    from src.data.shards import ShardWriter

# A split's name → the Hub's split, and how many documents of it at most. The names M2-BERT and MosaicBERT users know.
SPLITS = {
    "train": ("train", None),
    "train_small": ("train", 100_000),
    "val": ("validation", None),
    "val_small": ("validation", 10_000),
}


def main(argv: list[str]) -> None:
    arguments = parse(argv)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes of --num_workers are the parallelism
    check_output(Path(arguments.out_root), arguments.splits, arguments.overwrite)
    jobs = plan(arguments)
    try:
        for job in jobs:
            write_split(job, arguments)
    except KeyboardInterrupt:
        if jobs[0].source.resumable:
            raise
        log.info("interrupted; standard input and pipes cannot be read again, so the same command begins anew")
        sys.exit(130)
    except UserError:
        discard_if_nothing_is_done(jobs)
        raise


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="convert_dataset.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--dataset", help="name on the Hub, e.g. allenai/c4; streamed, not downloaded first")
    source.add_argument("--data_files", nargs="+", metavar="GLOB",
                        help=".txt (a document a line), .jsonl, .csv or .tsv, also as .gz or .zst, or .parquet; - is standard input")  # fmt: skip
    add("--data_subset", help="the dataset's configuration, e.g. en")
    add("--splits", nargs="+", choices=SPLITS, default=["train", "val"], metavar="SPLIT",
        help=f"which to write: {', '.join(SPLITS)} (default: train val)")  # fmt: skip
    add("--out_root", required=True, help="folder to write to; each split is a folder in it")
    add("--text_column", default="text", help="column or key with the text (default: text)")
    add("--one_document_per_file", action="store_true", help="a .txt file is one document, line ends and all")
    add("--stdin_format", choices=LINE_KINDS, help="what standard input holds (default: jsonl if it begins with {, else txt)")  # fmt: skip
    add("--val_fraction", type=float,
        help="share of documents that go to val, chosen by a hash of the text; for data without a validation split")  # fmt: skip
    add("--tokenizer", metavar="NAME", help="write rows of tokens, of this tokenizer: a folder, or a name on the Hub")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--concat_tokens", type=int, metavar="N", help="rows of N tokens, documents end to end in them, no token lost")  # fmt: skip
    length.add_argument("--max_seq_len", type=int, metavar="N", help="a row a document, cut to N tokens")
    add("--num_workers", type=int, default=usable_cores(), help="processes that tokenize (default: one a core, here %(default)s); the result is the same")  # fmt: skip
    add("--compression", choices=["zstd"], help="compress the shards")
    add("--size_limit", type=int, default=1 << 26, help="bytes of a shard at most (default: 64 MiB)")
    add("--overwrite", action="store_true", help="replace splits that are already there, and begin anew what another command has begun")  # fmt: skip
    arguments = parser.parse_args(argv)
    arguments.splits = list(dict.fromkeys(arguments.splits))
    check(arguments)
    return arguments


def check(arguments: argparse.Namespace) -> None:
    """Raise UserError for arguments that do not go together, or lie outside what they can be."""
    if arguments.val_fraction is not None and not 0 < arguments.val_fraction < 1:
        raise UserError(f"--val_fraction {arguments.val_fraction} must lie between 0 and 1")
    length = arguments.max_seq_len if arguments.concat_tokens is None else arguments.concat_tokens
    if (arguments.tokenizer is None) != (length is None):
        raise UserError("rows of tokens take --tokenizer NAME together with --concat_tokens N or --max_seq_len N; leave out both to write text")  # fmt: skip
    if length is not None and not 3 <= length < 2**31:
        raise UserError(f"rows of {length} tokens cannot be; from 3 on there is room for text between [CLS] and [SEP]")
    if not 0 < arguments.size_limit < 2**32:
        raise UserError(f"--size_limit {arguments.size_limit} must lie between 1 and {2**32 - 1} bytes")
    if arguments.num_workers < 1:
        raise UserError(f"--num_workers {arguments.num_workers} must be at least 1")
    if arguments.stdin_format and str(STANDARD_INPUT) not in (arguments.data_files or []):
        raise UserError("--stdin_format goes with --data_files -, the standard input; leave it out")
    if arguments.data_files is None:
        if arguments.one_document_per_file:
            raise UserError("--one_document_per_file goes with --data_files, and .txt files among them; leave it out")
        return
    if arguments.data_subset is not None:
        raise UserError("--data_subset is a configuration of --dataset, and files have none; leave it out")
    if arguments.val_fraction is None and any(SPLITS[split][0] == "validation" for split in arguments.splits):
        raise UserError(
            "files have no validation split; give --val_fraction 0.01 to set documents aside, or --splits train"
        )
    if str(STANDARD_INPUT) in arguments.data_files and len(arguments.splits) > 1:
        raise UserError("standard input can be read once, so it gives one split at a time; give one, or write it to a file first")  # fmt: skip


def check_output(out_root: Path, splits: list[str], overwrite: bool) -> None:
    """Raise UserError if a split is already there and none is unfinished, before anything is read or written."""
    if out_root.exists() and not out_root.is_dir():
        raise UserError(f"--out_root {out_root} is a file; name a folder")
    if overwrite or any(unfinished(out_root / split).exists() for split in splits):
        return
    for split in splits:
        if (out_root / split).exists():
            raise already_there(out_root / split)


def already_there(folder: Path) -> UserError:
    return UserError(f"{folder} is already there; name another --out_root, or give --overwrite to replace it")


def unfinished(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.unfinished")


def is_validation(text: str, fraction: float) -> bool:
    """Whether a document belongs to the validation split: decided by its text alone, so by no order and no machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < fraction * 2**64


# Records → documents, in any process


@dataclass
class Documents:
    """What became of a batch's records."""

    sizes: np.ndarray  # (records,), bytes of text; 0 for an empty one, -1 for one of the other split
    texts: list[str] | None  # of the records with a size, in order; or
    rows: Rows | None

    def first(self, count: int) -> "Documents":
        """Up to the count-th document."""
        kept = np.flatnonzero(self.sizes > 0)
        if len(kept) < count:
            return self
        sizes = self.sizes[: kept[count - 1] + 1]
        return Documents(sizes, self.texts and self.texts[:count], self.rows and self.rows.first(count))


@dataclass
class Prepare:
    """Records → the documents of a split."""

    column: str
    val_fraction: float | None
    validation: bool
    rows: RowMaker | None

    def __call__(self, batches: list[Batch]) -> Documents:
        everything = [text for batch in batches for text in texts(batch, self.column)]
        sizes = np.fromiter(map(self.size, everything), np.int64, len(everything))
        documents = [text for text, size in zip(everything, sizes.tolist()) if size > 0]
        if self.rows is None:
            return Documents(sizes, documents, None)
        rows = self.rows(documents)
        there = rows.lengths > 0
        sizes[np.flatnonzero(sizes > 0)[~there]] = 0  # nothing that the tokenizer knows as text
        return Documents(sizes, None, Rows(rows.tokens, rows.lengths[there], rows.content[there]))

    def size(self, text: str) -> int:
        if self.val_fraction is not None and is_validation(text, self.val_fraction) != self.validation:
            return -1
        return len(text.encode()) if not text.isspace() else 0


# Splits


@dataclass
class Job:
    """A split to write."""

    folder: Path
    source: Files | HubDataset
    limit: int | None  # documents at most
    prepare: Prepare
    tokens: dict[str, Any] | None  # what split.json says of the tokenizer
    command: dict[str, Any]  # every option that the shards depend on
    progress: dict[str, Any] | None  # of an earlier process

    @property
    def unfinished(self) -> Path:
        return unfinished(self.folder)


def plan(arguments: argparse.Namespace) -> list[Job]:
    """The splits to write, each begun. Raises UserError, before beginning any, if one of them cannot be written."""
    from src.data.shards import begin, read_progress

    rows, tokens = row_maker(arguments)
    jobs = []
    for split in arguments.splits:
        folder = Path(arguments.out_root) / split
        hub_split, limit = SPLITS[split]
        source = open_source(arguments, hub_split)
        prepare = Prepare(arguments.text_column, arguments.val_fraction, hub_split == "validation", rows)
        command = describe(arguments, source, rows)
        jobs.append(Job(folder, source, limit, prepare, tokens, command, read_progress(unfinished(folder))))

    # A command begins all its splits before it writes the first: what is finished beside one that is begun is its work.
    begun = [job.progress["splits"] for job in jobs if job.progress and job.progress["command"] == job.command]
    done = [
        job
        for job in jobs
        if job.progress is None and job.folder.exists() and any(job.folder.name in splits for splits in begun)
    ]
    for job in done:
        log.info(f"{job.folder}: written by the same command before")
    jobs = [job for job in jobs if job not in done]
    for job in jobs:
        check_free(job, arguments.overwrite)
    for job in jobs:
        if job.progress is None:
            try:
                facts = {"command": job.command, "splits": arguments.splits, "stamps": job.source.stamps}
                job.progress = begin(job.unfinished, **facts)
            except OSError as error:
                raise cannot_write(job, error) from None
    return jobs


def row_maker(arguments: argparse.Namespace) -> tuple[RowMaker | None, dict[str, Any] | None]:
    """What makes rows of tokens, and what split.json says of it; two Nones to write text."""
    if arguments.tokenizer is None:
        return None, None
    mode = "concat_tokens" if arguments.concat_tokens else "max_seq_len"
    length = arguments.concat_tokens or arguments.max_seq_len
    tokenizer = load_tokenizer(arguments.tokenizer)
    return RowMaker.of(tokenizer, mode, length), {
        "tokenizer": arguments.tokenizer,
        "vocab_size": len(tokenizer),
        "digest": vocabulary_digest(tokenizer),
        "mode": mode,
        "length": length,
    }


def open_source(arguments: argparse.Namespace, hub_split: str) -> Files | HubDataset:
    if arguments.data_files is None:
        split = hub_split if arguments.val_fraction is None else "train"
        return HubDataset(arguments.dataset, arguments.data_subset, split, arguments.text_column)
    stdin = "txt"
    if str(STANDARD_INPUT) in arguments.data_files:
        stdin = arguments.stdin_format or ("jsonl" if sys.stdin.buffer.peek(1)[:1] == b"{" else "txt")
        log.info(f"standard input: read as .{stdin}; it cannot be read again, so a conversion of it begins anew if interrupted")  # fmt: skip
    reading = ReadOptions(arguments.text_column, arguments.one_document_per_file, stdin)
    files = Files(arguments.data_files, reading)
    if arguments.one_document_per_file and all(file_kind(path)[0] != "txt" for path in files.paths):
        raise UserError("--one_document_per_file goes with .txt files, and there are none among --data_files; leave it out")  # fmt: skip
    return files


def describe(arguments: argparse.Namespace, source: Files | HubDataset, rows: RowMaker | None) -> dict[str, Any]:
    """The options that the shards depend on, as JSON holds them."""
    names = ("text_column", "one_document_per_file", "val_fraction", "concat_tokens", "max_seq_len", "compression", "size_limit")  # fmt: skip
    options = {name: getattr(arguments, name) for name in names}
    tokenizer = rows and hashlib.sha256(rows.tokenizer_json.encode()).hexdigest()
    return {**source.description, **options, "tokenizer": tokenizer}


def check_free(job: Job, overwrite: bool) -> None:
    """Forget an earlier process's progress if it is of no use. Raises UserError where that, or a split, would be lost."""
    if job.folder.exists() and not overwrite:
        raise already_there(job.folder)
    if job.progress and job.progress["shards"] and (why := cannot_go_on(job)):
        if not overwrite:
            raise UserError(f"{job.unfinished} holds what an earlier conversion wrote, but {why}; give the command it was, or --overwrite to begin anew")  # fmt: skip
        job.progress = None
    elif job.progress and not job.progress["shards"]:
        job.progress = None


def cannot_go_on(job: Job) -> str | None:
    """Why the command cannot go on with what is there, if so."""
    before = job.progress["command"]
    differing = [name for name in {**before, **job.command} if before.get(name) != job.command.get(name)]
    if differing:
        shown = {"files": "the number of files", "hub_split": "the Hub's split", "revision": "the dataset's revision"}
        return f"by another command ({', '.join(shown.get(name, f'--{name}') for name in differing)} not the same)"
    changed = job.source.changed(job.progress["stamps"], job.progress["state"]["last"])
    return changed and f"{changed} has changed since"


def discard_if_nothing_is_done(jobs: list[Job]) -> None:
    """After an error, leave no trace of a command that has neither a split nor a shard to go on from."""
    from src.data.shards import read_progress

    left = [read_progress(job.unfinished) for job in jobs]
    if len(jobs) < len(jobs[0].progress["splits"]) or any(progress is None or progress["shards"] for progress in left):
        log.info(f"what is complete stays in {jobs[0].folder.parent}, and the same command goes on from it")
        return
    for job in jobs:
        shutil.rmtree(job.unfinished)
    with contextlib.suppress(OSError):  # it holds other things
        jobs[0].folder.parent.rmdir()


def cannot_write(job: Job, error: OSError) -> UserError:
    again = (
        " and give the same command, which goes on from the shards that are complete" if job.source.resumable else ""
    )
    return UserError(
        f"cannot write {job.unfinished}: {error.strerror or error}; make room{again}, or name another --out_root"
    )


def write_split(job: Job, arguments: argparse.Namespace) -> None:
    """Write a split. It appears under its name when it is complete, and not before."""
    from src.data.shards import ShardWriter, give_name

    columns = job.prepare.rows.columns if job.prepare.rows else {"text": "str"}
    options = {"columns": columns, "compression": arguments.compression, "size_limit": arguments.size_limit}
    try:
        with contextlib.closing(ShardWriter(job.unfinished, job.progress, job.source.resumable, **options)) as writer:
            counts = write_shards(job, writer, arguments.num_workers)
            if counts["documents"] == 0:
                raise nothing_written(job, counts)
            summary = summarize(job, counts, writer)
            (job.unfinished / "split.json").write_text(json.dumps(summary, indent=1) + "\n")
            give_name(job.unfinished, job.folder)
    except OSError as error:
        raise cannot_write(job, error) from None
    log.info(f"{job.folder}: {in_words(summary)}")


def nothing_written(job: Job, counts: Counter) -> UserError:
    if counts["of_other_split"]:
        raised = "raise" if job.prepare.validation else "lower"
        return UserError(f"{job.folder.name}: none of the {counts['of_other_split']:,} documents falls to it; {raised} --val_fraction {job.prepare.val_fraction:g}, and give --overwrite")  # fmt: skip
    return UserError(f"{job.folder.name}: there is not one document with text; check the source and --text_column")


def write_shards(job: Job, writer: "ShardWriter", workers: int) -> Counter:
    """Write what is left of a split's documents; returns what was counted since its beginning."""
    state = job.progress["state"] or {"place": None, "counts": {}, "waiting": None}
    counts = Counter(state["counts"])
    rows = job.prepare.rows
    packer = Packer(rows, state["waiting"]) if rows and rows.mode == "concat_tokens" else None
    if writer.stored:
        log.info(f"{job.folder}: going on after {len(writer.shards):,} shards")
    if rows is None:
        workers = 1  # to parse text takes less time than to send it to another process and back
    groups = grouped(job.source.batches(state["place"]))
    total = job.source.total
    if job.source.unit == "docs" and job.limit is not None and job.prepare.val_fraction is None:
        total = min(total or job.limit, job.limit)
    bar = progress(desc=job.folder.name, total=total, unit=job.source.unit, initial=counts["read"])
    with bar, contextlib.closing(in_order(job.prepare, groups, workers)) as results:
        text_before, start = counts["text_bytes"], time.perf_counter()
        for places, batches, documents in results:
            writer.mark(
                {"place": places[0], "last": places[-1], "counts": counts, "waiting": packer and packer.state()}
            )
            if job.limit is not None:
                documents = documents.first(job.limit - counts["documents"])
            for sample in samples(documents, rows, packer):
                writer.write(sample)
            counts = counts + count(documents, rows, batches)
            rate = (counts["text_bytes"] - text_before) / 1e6 / (time.perf_counter() - start)
            tokens = f"{counts['tokens']:,} tokens, " if rows else ""
            bar.set_postfix_str(f"{counts['documents']:,} documents, {tokens}{rate:.1f} MB/s of text", refresh=False)
            bar.update(sum(batch.size for batch in batches))
            if counts["documents"] == job.limit:
                break
    for sample in packer.last_sample() if packer else ():
        writer.write(sample)
    writer.finish()
    return counts


def samples(documents: Documents, rows: RowMaker | None, packer: Packer | None) -> Iterator[dict[str, Any]]:
    if rows is None:
        return ({"text": text} for text in documents.texts)
    return packer.samples(documents.rows) if packer else rows.samples(documents.rows)


def count(documents: Documents, rows: RowMaker | None, batches: list[Batch]) -> Counter:
    sizes = documents.sizes
    counts = {
        "read": sum(batch.size for batch in batches),
        "documents": np.count_nonzero(sizes > 0),
        "empty": np.count_nonzero(sizes == 0),
        "of_other_split": np.count_nonzero(sizes < 0),
        "text_bytes": int(sizes[sizes > 0].sum()),
    }
    if rows:
        counts["tokens"] = int(documents.rows.content.sum())
        counts["cut_off"] = documents.rows.cut_off(rows.length - 2) if rows.mode == "max_seq_len" else 0
    return Counter(counts)


def summarize(job: Job, counts: Counter, writer: "ShardWriter") -> dict[str, Any]:
    """split.json: what a finished split holds, and what of."""
    summary = {
        "documents": counts["documents"],
        "empty": counts["empty"],
        "text_bytes": counts["text_bytes"],
        "samples": writer.stored,
        "shards": len(writer.shards),
        "bytes": writer.bytes_stored(),
        "source": job.source.description,
    }
    if job.tokens:
        share = counts["cut_off"] / counts["tokens"]
        summary["tokens"] = {**job.tokens, "of_text": counts["tokens"], "share_cut_off": share}
    return summary


def in_words(summary: dict[str, Any]) -> str:
    words = [f"{summary['documents']:,} documents"]
    if summary["empty"]:
        words.append(f"{summary['empty']:,} empty ones left out")
    mean = summary["text_bytes"] / summary["documents"]
    words.append(f"{summary['text_bytes'] / 1e6:,.1f} MB of text ({mean:,.0f} bytes a document)")
    if tokens := summary.get("tokens"):
        words.append(f"{tokens['of_text']:,} tokens ({tokens['of_text'] / summary['documents']:,.1f} a document)")
        words.append(f"{summary['samples']:,} rows of at most {tokens['length']}")
        if tokens["mode"] == "max_seq_len":
            words.append(f"{tokens['share_cut_off']:.2%} of the tokens cut off")
    words.append(f"{summary['shards']:,} shards of {summary['bytes'] / 1e6:,.1f} MB in all")
    return ", ".join(words)
