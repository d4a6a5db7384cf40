"""Text → MDS shards: what the splits of a command hold; src/data/splits.py starts and resumes them."""

import contextlib
import hashlib
import os
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from src.cli import log, progress
from src.data.corpora import Files, HubDataset
from src.data.parts import Part, check_others, command_of
from src.data.readers import STANDARD_INPUT, Batch, file_kind, find_files, grouped
from src.data.splits import Split, check_options, start_or_resume, unfinished, write_all
from src.data.token_rows import Packer, RowMaker
from src.data.tokenizers import check_path, load_tokenizer
from src.data.workers import in_order
from src.errors import UserError
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
# The options that the shards depend on, besides the source and the tokenizer
SHARD_OPTIONS = (
    "text_column", "one_document_per_file", "val_fraction", "concat_tokens", "max_seq_len", "compression", "size_limit",
)  # fmt: skip


def convert(options: Namespace) -> None:
    """Write the splits that a command line of src/convert_dataset.py asks for. Raises UserError."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes of --num_workers are the parallelism
    files = check(options)
    resumable = all(path.is_file() for path in files)
    write_all(lambda: plan(options, files), lambda split: write_split(split, options), options, resumable)


def check(options: Namespace) -> list[Path]:
    """Return the files to read. Raises UserError for missing files and for options that are invalid or conflict."""
    files = find_files(options.data_files) if options.data_files is not None else []
    kinds = [file_kind(path)[0] for path in files]
    stdin = STANDARD_INPUT in files
    fraction = options.val_fraction
    length = options.max_seq_len if options.concat_tokens is None else options.concat_tokens
    splits = [SPLITS[split][0] for split in options.splits]
    options.part = options.part and Part.parse(options.part)
    few = next((split for split in options.splits if SPLITS[split][1] is not None), None)
    undivided = files and fraction is None and len({*splits}) > 1
    for wrong, message in (
        (fraction is not None and not 0 < fraction < 1, f"--val_fraction {fraction} must be between 0 and 1"),
        (options.tokenizer and length is None, "--tokenizer needs --concat_tokens N or --max_seq_len N; add one"),
        (length is not None and not options.tokenizer, "--concat_tokens and --max_seq_len need --tokenizer; add it"),
        (length is not None and not 3 <= length < 2**31, f"rows must have 3 to {2**31 - 1} tokens (got {length})"),
        (options.stdin_format and not stdin, "--stdin_format requires --data_files -; omit it"),
        (options.one_document_per_file and "txt" not in kinds, "--one_document_per_file requires .txt files; omit it"),
        (options.malformed_rows < 0, f"--malformed_rows {options.malformed_rows} must be at least 0"),
        (options.malformed_rows and not files, "--malformed_rows requires --data_files; omit it"),
        (options.data_subset is not None and files, "--data_subset requires --dataset; omit it"),
        (
            options.revision is not None and (files or Path(options.dataset).is_dir()),
            "--revision requires --dataset with a name on the Hub; omit it",
        ),
        (
            undivided,
            "files have no validation split; give --val_fraction 0.01, or convert them with --splits train, "
            "and others with --splits val",
        ),
        (options.part and few, f"--part: {few} is the first documents of a split, for one machine; omit --part"),
        (options.part and not all(path.is_file() for path in files), "--part requires files, not a stream; omit it"),
        (stdin and len(splits) > 1, "standard input can be read only once; give one split only"),
    ):
        if wrong:
            raise UserError(message)
    if options.tokenizer is not None:
        check_path(options.tokenizer, "--tokenizer")
    check_options(options)
    return files


def is_validation(text: str, fraction: float) -> bool:
    """Return whether a document belongs to the validation split, which its text alone decides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < fraction * 2**64


def prepare(rows: RowMaker | None, fraction: float | None, validation: bool, group: list[Batch]) -> tuple:
    """Return the documents of a split that a group of batches holds; `fraction` is --val_fraction.

    Returns:
        sizes: (records,), bytes of text; 0 if empty, -1 if it belongs to the other split.
        contents: the records with size > 0, in order: texts, or what RowMaker makes of them.
        tokens: (documents,), tokens in each text, including truncated ones; empty for texts.
    """

    def size(text: str) -> int:
        if fraction is not None and is_validation(text, fraction) != validation:
            return -1
        return len(text.encode()) if not text.isspace() else 0

    records = [text for batch in group for text in batch.texts]
    sizes = np.fromiter(map(size, records), np.int64, len(records))
    texts = [text for text, size in zip(records, sizes.tolist()) if size > 0]
    if rows is None:
        return sizes, texts, np.zeros(0, np.int64)
    contents, tokens = rows(texts)
    sizes[np.flatnonzero(sizes > 0)[tokens == 0]] = 0  # text without any token, such as control characters
    return sizes, list(filter(None, contents)), tokens[tokens > 0]


@dataclass
class TextSplit(Split):
    validation: bool  # whether it is the validation split
    limit: int | None  # maximum number of documents
    rows: RowMaker | None  # None: it holds text
    units: range  # of the source
    part: Part | None  # None: it is the whole split


def check_undivided(source: Files, options: Namespace) -> None:
    """Raise UserError if files that are not to be divided are those of the other kind of split."""
    kind = SPLITS[options.splits[0]][0]
    for other in (split for split, (of, _) in SPLITS.items() if of != kind):
        made = command_of(Path(options.out_root, other)) or {}
        same = {**source.identity(), "text_column": options.text_column, "val_fraction": None}
        if source.resumable and same.items() <= made.items():
            own = f"{options.out_root}/{other} already holds these files"
            raise UserError(f"{own}; give others, delete it, or divide them with --val_fraction 0.01 --overwrite")


def plan(options: Namespace, files: list[Path]) -> list[TextSplit]:
    """Return the splits to write, with their folders created; none is created if this raises UserError."""
    from src.data.shards import read_progress

    rows = None
    if options.tokenizer is not None:
        mode = "concat_tokens" if options.concat_tokens else "max_seq_len"
        rows = RowMaker.of(load_tokenizer(options.tokenizer), mode, getattr(options, mode))
    source = Files(files, options) if files else None
    if files and options.val_fraction is None:
        check_undivided(source, options)
    splits = []
    for split in options.splits:
        whole, (hub_split, limit) = Path(options.out_root, split), SPLITS[split]
        if not files:
            hub_split_read = hub_split if options.val_fraction is None else "train"
            of_hub = options.dataset, options.data_subset, hub_split_read, options.text_column, options.revision
            source = HubDataset(*of_hub)
        command = {**source.description, **{name: getattr(options, name) for name in SHARD_OPTIONS}}
        command["tokenizer"] = rows and rows.tokenizer_digest
        folder, units = whole, range(len(source.sizes))
        if part := options.part:
            folder, units = whole / str(part), part.units(source.sizes)
            command |= source.identity()
            check_others(part, whole, command, options)
            log.info(f"{folder}: {len(units):,} of the {len(source.sizes):,} units that the source can be divided into")
        made = command_of(folder) == command | source.identity(times=part is None)
        finished = made and source.resumable and not options.overwrite
        before, validation = read_progress(unfinished(folder)), hub_split == "validation"
        job = TextSplit(folder, source, command, before, validation, limit, rows, units, part, finished=finished)
        splits.append(job)
    return start_or_resume(splits, options)


def write_split(job: TextSplit, options: Namespace) -> None:
    """Write a split. It appears under its final name once it is complete."""
    from src.data.shards import ShardWriter, publish

    folder = unfinished(job.folder)
    columns = job.rows.columns if job.rows else {"text": "str"}
    format_ = {"columns": columns, "compression": options.compression, "size_limit": options.size_limit}
    with contextlib.closing(ShardWriter(folder, job.progress, job.source.resumable, **format_)) as writer:
        counts = write_shards(job, writer, options)
        if job.part is None:
            check_documents(job.folder.name, counts, options.val_fraction)
        size = sum(path.stat().st_size for path in folder.glob("shard.*"))
        sizes = {"samples": writer.stored, "shards": len(writer.shards), "bytes": size}
        summary = summarize(counts, job.source.description, job.rows and job.rows.summary, **sizes)
        if job.part is None:
            summary["command"] = job.command | job.source.identity(times=True)
        else:
            summary["part"] = {**vars(job.part), "counts": counts, "command": job.command}
        write_json(folder / "split.json", summary)
        publish(folder, job.folder)
    log.info(f"{job.folder}: {in_words(summary)}")


def check_documents(split: str, counts: Counter, fraction: float | None, in_parts: bool = False) -> None:
    """Raise UserError for a split without documents."""
    if counts["documents"]:
        return
    again = ", delete the parts and convert again" if in_parts else ""
    if others := counts["of_other_split"]:
        fix = f"{'raise' if SPLITS[split][0] == 'validation' else 'lower'} --val_fraction {fraction:g}"
        found = f"none of the {others:,} documents belongs to it; {fix}{again or ', and give --overwrite'}"
    else:
        found = f"no document has text; check the source and --text_column{again}"
    raise UserError(f"{split}: {found}")


def summarize(counts: Counter, source: dict, tokens: dict | None, **sizes: int) -> dict[str, Any]:
    """Return the content of split.json, from the counts of `write_shards` and what is known of the token rows."""
    summary = {name: counts[name] for name in ("documents", "empty", "text_bytes")} | sizes | {"source": source}
    if tokens:
        share = counts["cut_off"] / max(counts["tokens"], 1)
        summary["tokens"] = {**tokens, "of_text": counts["tokens"], "share_cut_off": share}
    return summary


def groups_of(source: Files | HubDataset, units: range, position: list | None) -> Iterator[list[Batch]]:
    """Yield consecutive batches of units in groups to process, from a position on. No group is of two units."""
    first = units.start if position is None else source.unit_of(position)
    for unit in range(first, units.stop):
        yield from grouped(source.batches(unit, position if unit == first else None), Batch.length)


def write_shards(job: TextSplit, writer: "ShardWriter", options: Namespace) -> Counter:
    """Write the remaining documents of a split; return the counts since its start."""
    state = job.progress["state"] or {"place": None, "counts": {}, "waiting": None}
    counts, rows, source = Counter(state["counts"]), job.rows, job.source
    packer = Packer(rows, state["waiting"]) if rows and rows.mode == "concat_tokens" else None
    if writer.stored:
        log.info(f"{job.folder}: resuming after {len(writer.shards):,} shards")
    total = source.total and round(
        source.total * sum(source.sizes[job.units.start : job.units.stop]) / sum(source.sizes)
    )
    if source.unit == "docs" and job.limit is not None and options.val_fraction is None:
        total = min(total or job.limit, job.limit)
    name = str(job.folder.relative_to(options.out_root))
    bar = progress(desc=name, total=total, unit=source.unit, initial=counts["read"])
    groups = groups_of(source, job.units, state["place"])
    unit = source.unit_of(state["place"]) if state["place"] else None
    work = partial(prepare, rows, options.val_fraction, job.validation)
    workers = options.num_workers if rows else 1  # sending text to another process and back takes longer than its work
    bytes_before, start = counts["text_bytes"], time.perf_counter()
    with bar, contextlib.closing(in_order(work, groups, workers)) as results:
        for group, (sizes, contents, tokens) in results:
            if packer and (here := source.unit_of(group[0].position)) != unit:
                if writer.samples >= writer.stored:  # earlier versions stored rows with documents of two units
                    for sample in packer.last_sample():
                        writer.write(sample)
                unit = here
            places = {"place": group[0].position, "last": group[-1].position}
            writer.mark({**places, "counts": dict(counts), "waiting": packer and packer.state()})
            if job.limit is not None and len(contents) >= (left := job.limit - counts["documents"]):
                contents, tokens = contents[:left], tokens[:left]
                sizes = sizes[: np.flatnonzero(sizes > 0)[left - 1] + 1]  # of the records up to the last document
            column = "tokens" if rows else "text"
            for sample in packer.samples(contents) if packer else ({column: content} for content in contents):
                writer.write(sample)
            read = sum(batch.size for batch in group)
            counts.update(read=read, documents=len(contents), tokens=int(tokens.sum()))
            counts.update(empty=np.count_nonzero(sizes == 0), of_other_split=np.count_nonzero(sizes < 0))
            counts["text_bytes"] += int(sizes[sizes > 0].sum())
            if rows and not packer:
                counts["cut_off"] += int(np.maximum(tokens - (rows.length - 2), 0).sum())
            rate = (counts["text_bytes"] - bytes_before) / 1e6 / (time.perf_counter() - start)
            shown = f"{counts['documents']:,} documents, " + (f"{counts['tokens']:,} tokens, " if rows else "")
            bar.set_postfix_str(f"{shown}{rate:.1f} MB/s of text", refresh=False)
            bar.update(read)
            if counts["documents"] == job.limit:
                break
    for sample in packer.last_sample() if packer else ():
        writer.write(sample)
    writer.finish()
    return counts


def in_words(summary: dict[str, Any]) -> str:
    documents, size = summary["documents"], summary["text_bytes"]
    if not documents:
        return "no documents"  # of a part
    words = [f"{documents:,} documents"] + ([f"{summary['empty']:,} empty ones skipped"] if summary["empty"] else [])
    words.append(f"{size / 1e6:,.1f} MB of text ({size / documents:,.0f} bytes per document)")
    if tokens := summary.get("tokens"):
        words.append(f"{tokens['of_text']:,} tokens ({tokens['of_text'] / documents:,.1f} per document)")
        words.append(f"{summary['samples']:,} rows of at most {tokens['length']}")
        if tokens["mode"] == "max_seq_len":
            words.append(f"{tokens['share_cut_off']:.2%} of the tokens truncated")
    words.append(f"{summary['shards']:,} shards, {summary['bytes'] / 1e6:,.1f} MB in total")
    return ", ".join(words)
