"""`embed.py encode`: files of texts → Parquet files of vectors, one a text or one a passage, resumable."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow
from pyarrow import parquet

from src.checkpoints.remote import check_exists
from src.cli import check_alone, log, progress
from src.data.readers import STANDARD_INPUT, find_files, read_batches
from src.embed.options import MODEL, add_reading, as_earlier, check_counts, fingerprint, open_model
from src.embed.passages import UNITS
from src.errors import UserError
from src.files import check_writable, exclusive_lock, sync_to_disk, write_json
from src.jobs.report import writing

if TYPE_CHECKING:
    from src.embed.encoder import Encoded, Encoder, Passages

# A file in --out, and its key for the last position. Libraries that read a folder of Parquet files skip an underscore.
STATE, FINISHED = "_encoding.json", "finished"
EARLIER_STATE = "encoding.json"  # of earlier versions
PLACES = ("start", "stop", "first", "last")
PROGRESS = b"progress"  # in each part's metadata: the position after it
EXAMPLE = "python embed.py encode my-embedder --data_files 'docs/*.jsonl' --out vectors --passages 256"


class Position(NamedTuple):
    """What has been written: files before the last, texts of the last, and counts."""

    files: int = 0
    texts_of_file: int = 0
    parts: int = 0
    texts: int = 0
    vectors: int = 0
    tokens: int = 0
    cut: int = 0
    bytes: int = 0


def encode(argv: list[str]) -> None:
    """Run the command. Raises UserError, RunFailed."""
    check_alone("embed.py encode")
    options = parse(argv)
    check_counts(options, "passages")
    if options.unit != "tokens" and options.passages is None:
        raise UserError(f"--unit {options.unit} needs --passages; set it to the maximum tokens per passage")
    check_exists(options.model, "MODEL")
    check_writable("--out", options.out)
    files = find_files(options.data_files)
    if STANDARD_INPUT in files:
        raise UserError("--data_files: standard input cannot be read again to resume; give files")
    settings = {
        **fingerprint(options.model, options), "passages": options.passages, "unit": options.unit, "kind": options.kind,
        "text_column": options.text_column[0] if len(options.text_column) == 1 else options.text_column,
        "data": [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files],
    }  # fmt: skip
    with exclusive_lock(options.out, "embed.py encode", "--out"), writing(options.out):
        at, finished = resume(options.out, json.loads(json.dumps(settings)))
        if not finished:
            at = write_all(files, at, options)
            write_json(options.out / STATE, {**settings, FINISHED: at})
    name = "passages" if options.passages else "texts"
    cut = f"; texts truncated: {at.cut:,}" if at.cut else ""
    print(
        f"\n{at.vectors:,} vectors of {at.texts:,} texts, {at.tokens:,} tokens{cut}\nvectors  {options.out}/*.parquet"
    )
    print(f'\nnext: datasets.load_dataset("parquet", data_files="{options.out}/*.parquet"), whose rows are the {name}')


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "embed.py encode",
        description="Write the vectors of texts, of unit length, as Parquet files with the columns file, row (from 0), "
        "start and stop (tokens), first and last (characters), and vector. Repeat an interrupted command to resume; it "
        "writes the same files.",
        epilog=f"Example: {EXAMPLE}",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    kinds = ".txt (a text per line), .jsonl, .csv, .tsv, each optionally .gz or .zst, or .parquet"
    add("--data_files", metavar="GLOB", nargs="+", required=True, help=kinds)
    words = "column or key of the texts (default: text); if it is given several times, those are joined by spaces"
    add("--text_column", action="append", metavar="NAME", help=words)
    add("--out", type=Path, required=True, help="folder for the vectors")
    words = "a vector for each passage of at most this many tokens, which has seen the whole text (late chunking; "
    add("--passages", type=int, metavar="TOKENS", help=f"{words}default: one for each text)")
    units = "where passages end; units longer than --passages are split (default: tokens)"
    add("--unit", choices=list(UNITS), default="tokens", help=units)
    add("--kind", choices=["document", "query"], default="document", help="which prompt to prepend (default: document)")
    add_reading(parser)
    options = parser.parse_args(argv)
    options.text_column = options.text_column or ["text"]
    return options


def resume(out: Path, settings: dict[str, Any]) -> tuple[Position, bool]:
    """Return where to continue, and whether nothing is left; and keep the settings. Raises UserError for a folder with
    other vectors."""
    state, parts = out / STATE, sorted(out.glob("part-*.parquet"))
    if parts and not state.exists() and (out / EARLIER_STATE).is_file():
        (out / EARLIER_STATE).rename(state)
    try:
        stored = json.loads(state.read_text()) if parts else {**settings}
        finished = stored.pop(FINISHED, None)
        if stored["files"] == as_earlier(settings["files"]):
            stored["files"] = settings["files"]
    except (OSError, ValueError, AttributeError, LookupError):
        stored = finished = None
    if stored != settings:
        raise UserError(
            f"--out {out} holds vectors of another model, of other texts or settings; choose another folder"
        )
    if finished is not None:
        return Position(*finished), True
    write_json(state, settings)
    if not parts:
        return Position(), False
    try:
        at = Position(*json.loads(parquet.read_schema(parts[-1]).metadata[PROGRESS]))
    except (OSError, pyarrow.ArrowException, LookupError, TypeError, ValueError):
        raise UserError(f"{parts[-1]} is corrupt; remove it and repeat the command, which writes it again") from None
    log.info(f"resuming after {at.texts:,} texts")
    return at, False


def write_all(files: list[Path], at: Position, options: argparse.Namespace) -> Position:
    """Encode what is left, a part for each batch of texts."""
    from src.embed.encoder import Passages

    encoder = open_model(options.model, options)
    passages = None if options.passages is None else Passages(options.passages, options.unit)
    total = sum(path.stat().st_size for path in files)
    with progress(total=total, initial=at.bytes, desc="encoding", unit="B", unit_divisor=1024) as bar:
        for number, path in enumerate(files[at.files :], at.files):
            skip = at.texts_of_file if number == at.files else 0
            at = at._replace(files=number, texts_of_file=skip)
            for batch in read_batches(path, options.text_column, skip):
                at = write_part(encoder, path, batch, at, options, passages)
                bar.update(batch.size)
    return at


def write_part(
    encoder: "Encoder",
    path: Path,
    batch: Any,
    at: Position,
    options: argparse.Namespace,
    passages: "Passages | None",
) -> Position:
    """Encode a batch of texts, and write its part; return the position after it."""
    found: Encoded = encoder.encode(batch.texts, options.kind, passages=passages)
    at = Position(
        at.files, at.texts_of_file + len(batch.texts), at.parts + 1, at.texts + len(batch.texts),
        at.vectors + len(found.vectors), at.tokens + found.tokens, at.cut + found.cut, at.bytes + batch.size,
    )  # fmt: skip
    owners = range(len(batch.texts)) if found.owners is None else found.owners.tolist()
    places = [[place if place >= 0 else None for place in column] for column in found.places.T.tolist()]
    values = pyarrow.array(found.vectors.flatten().numpy())
    columns = {
        "file": pyarrow.array([path.name] * len(found.vectors)),
        "row": pyarrow.array([batch.position + owner for owner in owners], pyarrow.int64()),
        **{name: pyarrow.array(column, pyarrow.int64()) for name, column in zip(PLACES, places)},
        "vector": pyarrow.FixedSizeListArray.from_arrays(values, found.vectors.shape[1]),
    }  # fmt: skip
    table = pyarrow.table(columns).replace_schema_metadata({PROGRESS: json.dumps(at)})
    part = options.out / f"part-{at.parts - 1:06}.parquet"
    parquet.write_table(table, unfinished := part.with_suffix(".unfinished"))
    sync_to_disk(unfinished)
    unfinished.replace(part)
    return at
