"""Text → MDS shards: plan one job per split, then write the splits one after the other.

A split is written to a hidden folder and renamed when it is complete. An interrupted conversion resumes with the same
command and writes the shards that an uninterrupted one would have written.
"""

import contextlib
import hashlib
import os
import shutil
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from src.cli import log, progress
from src.data.corpora import Files, HubDataset, grouped
from src.data.readers import STANDARD_INPUT, Batch, ReadOptions, file_kind, find_files, texts
from src.data.token_rows import Packer, RowMaker, Rows
from src.data.tokenizers import check_path, load_tokenizer
from src.data.workers import in_order
from src.errors import UserError, reason
from src.files import write_json

if TYPE_CHECKING:  # takes seconds to import, and worker processes do not need it
    from src.data.shards import ShardWriter

# Split → the Hub's split and the maximum number of its documents. M2-BERT and MosaicBERT use these names.
SPLITS = {
    "train": ("train", None),
    "train_small": ("train", 100_000),
    "val": ("validation", None),
    "val_small": ("validation", 10_000),
}


def convert(options: Namespace) -> None:
    """Write the splits that a command line of src/convert_dataset.py asks for. Raises UserError."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes of --num_workers are the parallelism
    files = check(options)
    jobs = plan(options, files)
    try:
        for job in jobs:
            write_split(job, options)
    except KeyboardInterrupt:
        if jobs[0].source.resumable:
            raise
        log.info("interrupted; standard input and pipes cannot be read again, so the same command starts over")
        sys.exit(130)
    except UserError:
        discard_if_empty(jobs)
        raise


def check(options: Namespace) -> list[Path]:
    """Return the files to read. Raises UserError for missing files and for options that are invalid or conflict."""
    files = find_files(options.data_files) if options.data_files is not None else []
    kinds = [file_kind(path)[0] for path in files]
    stdin = STANDARD_INPUT in files
    fraction, size = options.val_fraction, options.size_limit
    length = options.max_seq_len if options.concat_tokens is None else options.concat_tokens
    splits = [SPLITS[split][0] for split in options.splits]
    no_validation = files and fraction is None and "validation" in splits
    for wrong, message in (
        (fraction is not None and not 0 < fraction < 1, f"--val_fraction {fraction} must be between 0 and 1"),
        ((options.tokenizer is None) != (length is None), "--tokenizer requires --concat_tokens or --max_seq_len"),
        (length is not None and not 3 <= length < 2**31, f"rows must have 3 to {2**31 - 1} tokens (got {length})"),
        (not 0 < size < 2**32, f"--size_limit {size} must be between 1 and {2**32 - 1} bytes"),
        (options.num_workers < 1, f"--num_workers {options.num_workers} must be at least 1"),
        (options.stdin_format and not stdin, "--stdin_format requires --data_files -; omit it"),
        (options.one_document_per_file and "txt" not in kinds, "--one_document_per_file requires .txt files; omit it"),
        (options.data_subset is not None and files, "--data_subset requires --dataset; omit it"),
        (no_validation, "files have no validation split; give --val_fraction 0.01, or --splits train"),
        (stdin and len(splits) > 1, "standard input can be read only once; give one split only"),
    ):
        if wrong:
            raise UserError(message)
    if options.tokenizer is not None:
        check_path(options.tokenizer, "--tokenizer")
    out_root = Path(options.out_root)
    if out_root.exists() and not out_root.is_dir():
        raise UserError(f"--out_root: {out_root} is not a directory; choose another folder")
    folders = [out_root / split for split in options.splits]
    if not options.overwrite and not any(unfinished(folder).exists() for folder in folders):
        for folder in folders:
            check_absent(folder)
    return files


def check_absent(folder: Path) -> None:
    if folder.exists():
        raise UserError(f"{folder} already exists; choose another --out_root, or give --overwrite to replace it")


def unfinished(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.unfinished")


# Records → documents, in any process


def is_validation(text: str, fraction: float) -> bool:
    """Return whether a document belongs to the validation split, which its text alone decides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < fraction * 2**64


@dataclass
class Documents:
    """The documents in a batch of records."""

    sizes: np.ndarray  # (records,), bytes of text; 0 if empty, -1 if it belongs to the other split
    texts: list[str] | None  # of the records with size > 0, in order; None if tokenized
    rows: Rows | None  # the same, tokenized

    def first(self, count: int) -> "Documents":
        """Return the records up to the count-th document."""
        kept = np.flatnonzero(self.sizes > 0)
        if len(kept) < count:
            return self
        sizes = self.sizes[: kept[count - 1] + 1]
        return Documents(sizes, self.texts and self.texts[:count], self.rows and self.rows.first(count))


@dataclass
class Prepare:
    """Turns batches of records into the documents of a split."""

    column: str
    val_fraction: float | None
    validation: bool
    rows: RowMaker | None

    def __call__(self, batches: list[Batch]) -> Documents:
        records = [text for batch in batches for text in texts(batch, self.column)]
        sizes = np.fromiter(map(self.size, records), np.int64, len(records))
        documents = [text for text, size in zip(records, sizes.tolist()) if size > 0]
        if self.rows is None:
            return Documents(sizes, documents, None)
        rows = self.rows(documents)
        kept = rows.lengths > 0
        sizes[np.flatnonzero(sizes > 0)[~kept]] = 0  # text without any token, such as control characters
        return Documents(sizes, None, Rows(rows.tokens, rows.lengths[kept], rows.content[kept]))

    def size(self, text: str) -> int:
        if self.val_fraction is not None and is_validation(text, self.val_fraction) != self.validation:
            return -1
        return len(text.encode()) if not text.isspace() else 0


# Plan


@dataclass
class Job:
    """A split to write."""

    folder: Path
    source: Files | HubDataset
    limit: int | None  # maximum number of documents
    prepare: Prepare
    command: dict[str, Any]  # every option that the shards depend on
    progress: dict[str, Any] | None  # left by an earlier process
    unfinished: Path  # the folder's name until it is complete


def plan(options: Namespace, files: list[Path]) -> list[Job]:
    """Return the splits to write, with their folders created; none is created if this raises UserError."""
    from src.data.shards import read_progress, start

    rows = None
    if options.tokenizer is not None:
        mode = "concat_tokens" if options.concat_tokens else "max_seq_len"
        rows = RowMaker.of(load_tokenizer(options.tokenizer), mode, getattr(options, mode))
    jobs = []
    for split in options.splits:
        folder = Path(options.out_root) / split
        hub_split, limit = SPLITS[split]
        source = open_source(options, files, hub_split)
        prepare = Prepare(options.text_column, options.val_fraction, hub_split == "validation", rows)
        command = describe(options, source, rows)
        hidden = unfinished(folder)
        jobs.append(Job(folder, source, limit, prepare, command, read_progress(hidden), hidden))

    # A command starts all its splits before it writes the first, so a finished split next to a started one is its own.
    resumed = [job.progress["splits"] for job in jobs if job.progress and job.progress["command"] == job.command]
    for job in list(jobs):
        if job.progress is None and job.folder.exists() and any(job.folder.name in splits for splits in resumed):
            log.info(f"{job.folder}: already written by the same command")
            jobs.remove(job)
    for job in jobs:
        check_resumable(job, options.overwrite)
    for job in jobs:
        if job.progress is None:
            facts = {"command": job.command, "splits": options.splits, "stamps": job.source.stamps}
            with write_errors(job):
                job.progress = start(job.unfinished, **facts)
    return jobs


def open_source(options: Namespace, files: list[Path], hub_split: str) -> Files | HubDataset:
    if not files:
        split = hub_split if options.val_fraction is None else "train"
        return HubDataset(options.dataset, options.data_subset, split, options.text_column)
    stdin_format = "txt"
    if STANDARD_INPUT in files:
        stdin_format = options.stdin_format or ("jsonl" if sys.stdin.buffer.peek(1)[:1] == b"{" else "txt")
        log.info(f"standard input: read as .{stdin_format}; it cannot be read again, so an interruption starts over")
    reading = ReadOptions(options.text_column, options.one_document_per_file, stdin_format)
    return Files(files, options.data_files, reading)


def describe(options: Namespace, source: Files | HubDataset, rows: RowMaker | None) -> dict[str, Any]:
    """Return the options that the shards depend on, JSON-serializable."""
    names = ("text_column", "one_document_per_file", "val_fraction", "concat_tokens", "max_seq_len", "compression")
    chosen = {name: getattr(options, name) for name in (*names, "size_limit")}
    return {**source.description, **chosen, "tokenizer": rows and rows.tokenizer_digest}


def check_resumable(job: Job, overwrite: bool) -> None:
    """Discard an earlier process's progress if it is useless. Raises UserError if shards or a split would be lost."""
    if not overwrite:
        check_absent(job.folder)
    if job.progress is None:
        return
    why = job.progress["shards"] and why_not_resumable(job)
    if why and not overwrite:
        fix = "repeat the same command, or give --overwrite to start over"
        raise UserError(f"{job.unfinished} holds an earlier conversion, but {why}; {fix}")
    if why or not job.progress["shards"]:
        job.progress = None


def why_not_resumable(job: Job) -> str | None:
    before = job.progress["command"]
    shown = {"files": "the number of files", "hub_split": "the Hub's split", "revision": "the dataset's revision"}
    differing = [name for name in {**before, **job.command} if before.get(name) != job.command.get(name)]
    if differing:
        return f"with different options ({', '.join(shown.get(name, f'--{name}') for name in differing)})"
    changed = job.source.changed(job.progress["stamps"], job.progress["state"]["last"])
    return changed and f"{changed} has changed since"


def discard_if_empty(jobs: list[Job]) -> None:
    """After an error, remove the folders of a command that has written neither a split nor a shard."""
    from src.data.shards import read_progress

    left = [read_progress(job.unfinished) for job in jobs]
    if len(jobs) < len(jobs[0].progress["splits"]) or any(progress is None or progress["shards"] for progress in left):
        log.info(f"{jobs[0].folder.parent} keeps what is complete, and the same command resumes")
        return
    for job in jobs:
        shutil.rmtree(job.unfinished)
    with contextlib.suppress(OSError):  # it holds other files
        jobs[0].folder.parent.rmdir()


@contextlib.contextmanager
def write_errors(job: Job) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = "free disk space and repeat the command, or choose another --out_root"
        raise UserError(f"cannot write {job.unfinished}: {reason(error)}; {fix}") from None


# Write


def write_split(job: Job, options: Namespace) -> None:
    """Write a split. It appears under its final name once it is complete."""
    from src.data.shards import ShardWriter, publish

    columns = job.prepare.rows.columns if job.prepare.rows else {"text": "str"}
    format_ = {"columns": columns, "compression": options.compression, "size_limit": options.size_limit}
    with (
        write_errors(job),
        contextlib.closing(ShardWriter(job.unfinished, job.progress, job.source.resumable, **format_)) as writer,
    ):
        counts = write_shards(job, writer, options.num_workers)
        check_not_empty(job, counts)
        summary = summarize(job, counts, writer)
        write_json(job.unfinished / "split.json", summary)
        publish(job.unfinished, job.folder)
    log.info(f"{job.folder}: {in_words(summary)}")


def check_not_empty(job: Job, counts: Counter) -> None:
    if counts["documents"]:
        return
    found, fix = "no document has text", "check the source and --text_column"
    if others := counts["of_other_split"]:
        found = f"none of the {others:,} documents belongs to it"
        change = "raise" if job.prepare.validation else "lower"
        fix = f"{change} --val_fraction {job.prepare.val_fraction:g}, and give --overwrite"
    raise UserError(f"{job.folder.name}: {found}; {fix}")


def write_shards(job: Job, writer: "ShardWriter", workers: int) -> Counter:
    """Write the remaining documents of a split; return the counts since its start."""
    state = job.progress["state"] or {"place": None, "counts": {}, "waiting": None}
    counts, rows = Counter(state["counts"]), job.prepare.rows
    packer = Packer(rows, state["waiting"]) if rows and rows.mode == "concat_tokens" else None
    if writer.stored:
        log.info(f"{job.folder}: resuming after {len(writer.shards):,} shards")
    if rows is None:
        workers = 1  # parsing text takes less time than sending it to another process and back
    total = job.source.total
    if job.source.unit == "docs" and job.limit is not None and job.prepare.val_fraction is None:
        total = min(total or job.limit, job.limit)
    bar = progress(desc=job.folder.name, total=total, unit=job.source.unit, initial=counts["read"])
    groups = grouped(job.source.batches(state["place"]))
    with bar, contextlib.closing(in_order(job.prepare, groups, workers)) as results:
        bytes_before, start = counts["text_bytes"], time.perf_counter()
        for positions, batches, documents in results:
            waiting = packer and packer.state()
            writer.mark({"place": positions[0], "last": positions[-1], "counts": counts, "waiting": waiting})
            if job.limit is not None:
                documents = documents.first(job.limit - counts["documents"])
            samples = (packer or rows).samples(documents.rows) if rows else ({"text": t} for t in documents.texts)
            for sample in samples:
                writer.write(sample)
            counts = counts + count(documents, rows, batches)
            rate = (counts["text_bytes"] - bytes_before) / 1e6 / (time.perf_counter() - start)
            tokens = f"{counts['tokens']:,} tokens, " if rows else ""
            bar.set_postfix_str(f"{counts['documents']:,} documents, {tokens}{rate:.1f} MB/s of text", refresh=False)
            bar.update(sum(batch.size for batch in batches))
            if counts["documents"] == job.limit:
                break
    for sample in packer.last_sample() if packer else ():
        writer.write(sample)
    writer.finish()
    return counts


def count(documents: Documents, rows: RowMaker | None, batches: list[Batch]) -> Counter:
    sizes = documents.sizes
    counts = {"read": sum(batch.size for batch in batches), "text_bytes": int(sizes[sizes > 0].sum())}
    for name, group in {"documents": sizes > 0, "empty": sizes == 0, "of_other_split": sizes < 0}.items():
        counts[name] = np.count_nonzero(group)
    if rows:
        counts["tokens"] = int(documents.rows.content.sum())
        counts["cut_off"] = documents.rows.cut_off(rows.length - 2) if rows.mode == "max_seq_len" else 0
    return Counter(counts)


def summarize(job: Job, counts: Counter, writer: "ShardWriter") -> dict[str, Any]:
    """Return the content of split.json: what a finished split holds, and its source."""
    summary = {name: counts[name] for name in ("documents", "empty", "text_bytes")}
    summary |= {"samples": writer.stored, "shards": len(writer.shards), "bytes": writer.bytes_stored()}
    summary |= {"source": job.source.description}
    if job.prepare.rows:
        share = counts["cut_off"] / counts["tokens"]
        summary["tokens"] = {**job.prepare.rows.summary, "of_text": counts["tokens"], "share_cut_off": share}
    return summary


def in_words(summary: dict[str, Any]) -> str:
    documents, size = summary["documents"], summary["text_bytes"]
    words = [f"{documents:,} documents"] + ([f"{summary['empty']:,} empty ones skipped"] if summary["empty"] else [])
    words.append(f"{size / 1e6:,.1f} MB of text ({size / documents:,.0f} bytes per document)")
    if tokens := summary.get("tokens"):
        words.append(f"{tokens['of_text']:,} tokens ({tokens['of_text'] / documents:,.1f} per document)")
        words.append(f"{summary['samples']:,} rows of at most {tokens['length']}")
        if tokens["mode"] == "max_seq_len":
            words.append(f"{tokens['share_cut_off']:.2%} of the tokens truncated")
    words.append(f"{summary['shards']:,} shards, {summary['bytes'] / 1e6:,.1f} MB in total")
    return ", ".join(words)
