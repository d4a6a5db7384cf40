"""Texts out of files: .txt, .jsonl (or .json, an object a line), .csv, .tsv and .parquet; all but the last .gz or .zst too.

`read_batches` reads records as they lie in the file, and `texts` makes texts of them, which takes longer and may happen in
another process.
"""

import contextlib
import csv
import glob
import io
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow

from src.errors import UserError

KINDS = {".txt": "txt", ".jsonl": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
LINE_KINDS = ("txt", "jsonl", "csv", "tsv")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
STANDARD_INPUT = Path("-")
BATCH_BYTES = 1 << 20  # a few tenths of a second of tokenizing
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Reading:
    """How files are read."""

    column: str = "text"  # column or key with the text
    one_document_per_file: bool = False  # of .txt
    standard_input: str = "txt"  # one of LINE_KINDS


@dataclass
class Batch:
    """Consecutive records of a file: bytes still to be parsed, or texts."""

    file: str
    first: int  # records of the file before this batch
    records: list[bytes] | list[str | None]
    # Of the records: a line each (txt, jsonl), a file each (file), or texts with None for an empty one (text).
    kind: str
    size: int  # bytes of the file that were read for them; of a dataset, the number of records

    def length(self) -> int:
        """Of the records, in bytes or characters."""
        return sum(map(len, filter(None, self.records)))


def find_files(patterns: list[str]) -> list[Path]:
    """The files that match, pattern by pattern, each once. Raises UserError for a pattern that nothing matches.

    The name of a file is itself first, and a pattern only where there is no such file: `a[1].txt`.
    """
    paths = []
    for pattern in patterns:
        names = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        found = sorted(path for path in map(Path, names) if not path.is_dir())
        if Path(pattern) == STANDARD_INPUT:
            found = [STANDARD_INPUT]
        if not found:
            raise UserError(f"--data_files: nothing matches {pattern}")
        paths += found
    return list(dict.fromkeys(paths))


def read_texts(path: Path, column: str) -> Iterator[str]:
    """A file's documents. Raises UserError naming file and line."""
    for batch in read_batches(path, Reading(column)):
        yield from texts(batch, column)


def read_batches(path: Path, reading: Reading, skip: int = 0) -> Iterator[Batch]:
    """A file's records but the first `skip`, about BATCH_BYTES at a time. Raises UserError for a file that cannot be read."""
    kind, compression = file_kind(path, reading)
    if kind == "parquet":
        yield from _parquet_batches(path, reading.column, skip)
        return
    try:
        with _open(path, compression) as (file, position):
            if kind in ("csv", "tsv"):
                records = _csv_texts(file, path, reading.column, "," if kind == "csv" else "\t")
                kind = "text"
            elif kind == "txt" and reading.one_document_per_file:
                records = iter([file.read()])
                kind = "file"
            else:
                records = _lines(file, path)
            yield from _batches(records, str(path), kind, skip, position)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); mend it or leave it out") from None


def file_kind(path: Path, reading: Reading) -> tuple[str, str | None]:
    """What a file holds and how it is compressed, told by its ending. Raises UserError where that says nothing."""
    if path == STANDARD_INPUT:
        return reading.standard_input, None
    compression = COMPRESSIONS.get(path.suffix)
    ending = Path(path.stem).suffix if compression else path.suffix
    kind = KINDS.get(ending)
    if kind is None or (kind == "parquet" and compression):
        raise UserError(f"{path}: cannot read {ending or 'a file without an ending'}{path.suffix if compression else ''}; give .txt, .jsonl, .csv or .tsv, as they are or with .gz or .zst, or .parquet")  # fmt: skip
    return kind, compression


@contextlib.contextmanager
def _open(path: Path, compression: str | None) -> Iterator[tuple[BinaryIO, Callable[[], int] | None]]:
    """The file, decompressed, and what tells how many bytes of it have been read, if it can be told."""
    with contextlib.ExitStack() as stack:
        stored = sys.stdin.buffer if path == STANDARD_INPUT else stack.enter_context(path.open("rb"))
        position = stored.tell if stored.seekable() else None
        file = stored
        if compression:
            file = io.BufferedReader(
                pyarrow.CompressedInputStream(pyarrow.PythonFile(stored, "r"), compression), 1 << 18
            )
        if file.peek(3)[:3] == BYTE_ORDER_MARK:
            file.read(3)
        yield file, position


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    number = 0
    try:
        for line in file:
            number += 1
            yield line
    except OSError as error:
        raise UserError(f"{path}, line {number + 1}: cannot be read on ({error.strerror or error}); the file is damaged or cut off, so copy it again") from None  # fmt: skip


def _batches(
    records: Iterator[bytes] | Iterator[str], file: str, kind: str, skip: int, position: Callable[[], int] | None
) -> Iterator[Batch]:
    for _ in itertools.islice(records, skip):
        pass
    first, held, length = skip, [], 0
    before = position() if position and skip else 0
    for record in records:
        held.append(record)
        length += len(record)
        if length >= BATCH_BYTES:
            now = position() if position else before + length
            yield Batch(file, first, held, kind, now - before)
            first, held, length, before = first + len(held), [], 0, now
    if held:
        yield Batch(file, first, held, kind, position() - before if position else length)


def _csv_texts(file: BinaryIO, path: Path, column: str, delimiter: str) -> Iterator[str]:
    csv.field_size_limit(2**31 - 1)  # a document is a field; the library's limit is 128 KiB
    rows = csv.reader((_decode(line, path, number) for number, line in enumerate(_lines(file, path), 1)), delimiter=delimiter, strict=True)  # fmt: skip
    try:
        header = next(rows, [])
        if column not in header:
            raise UserError(f"{path}: no column {column!r} (there are {', '.join(header)}); name it with --text_column")
        index = header.index(column)
        for row in rows:
            if row and len(row) != len(header):
                raise UserError(f"{path}, line {rows.line_num}: the row has {len(row)} fields, the header {len(header)}; mend or remove the row")  # fmt: skip
            yield row[index] if row else ""
    except csv.Error as error:
        raise UserError(f"{path}, line {rows.line_num}: not valid CSV ({error}); mend or remove the row") from None


def _parquet_batches(path: Path, column: str, skip: int) -> Iterator[Batch]:
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        if column not in file.schema_arrow.names:
            raise UserError(f"{path}: no column {column!r} (there are {', '.join(file.schema_arrow.names)}); name it with --text_column")  # fmt: skip
        kind = file.schema_arrow.field(column).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise UserError(f"{path}: column {column!r} holds {kind}, not text; name another with --text_column")
        row_size = path.stat().st_size / max(file.metadata.num_rows, 1)
        first = 0
        for rows in file.iter_batches(batch_size=1024, columns=[column]):
            if first + len(rows) > skip:
                start = max(skip - first, 0)
                records = python_values(rows.column(0).slice(start), path, first + start)
                yield Batch(str(path), first + start, records, "text", round(row_size * len(records)))
            first += len(rows)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error}); copy it again or leave it out") from None


def python_values(values: pyarrow.Array, path: Path, first: int) -> list:
    """Rows of a column, the first of them after `first` others. Raises UserError naming the row of bytes that are no text."""
    try:
        return values.to_pylist()
    except UnicodeDecodeError:
        for number, value in enumerate(values, first + 1):
            try:
                value.as_py()
            except UnicodeDecodeError:
                raise UserError(f"{path}, row {number}: not valid UTF-8; mend the file") from None
        raise


def texts(batch: Batch, column: str) -> list[str]:
    """The texts of a batch's records, "" for one without text. Raises UserError naming file and line."""
    if batch.kind == "text":
        return [text or "" for text in batch.records]
    if batch.kind == "file":
        return [_decode(record, batch.file, 1) for record in batch.records]
    lines = [_decode(record, batch.file, number) for number, record in enumerate(batch.records, batch.first + 1)]
    if batch.kind == "txt":
        return [line.rstrip("\r\n") for line in lines]
    return [
        _text_of_json(line, column, batch.file, number) if not line.isspace() else ""
        for number, line in enumerate(lines, batch.first + 1)
    ]


def _decode(record: bytes, file: str | Path, line: int) -> str:
    try:
        return record.decode()
    except UnicodeDecodeError as error:
        line += record.count(b"\n", 0, error.start)
        raise UserError(f"{file}, line {line}: not valid UTF-8; mend the file or convert it to UTF-8") from None


def parse_json(line: str, file: str | Path, number: int) -> Any:
    """What a line says. Raises UserError where that is no JSON, a number of thousands of digits, or too deep."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{file}, line {number}: not valid JSON ({getattr(error, 'msg', error)}); mend or remove the line"
        ) from None


def refuse_half_pair(text: str, file: str | Path, number: int) -> None:
    """Raise UserError for half of a surrogate pair, which JSON can spell and no encoding can write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{file}, line {number}: half of a surrogate pair, which is no text; mend or remove the line"
        ) from None


def _text_of_json(line: str, column: str, file: str, number: int) -> str:
    row = parse_json(line, file, number)
    if not isinstance(row, dict) or column not in row or not isinstance(row[column], str | None):
        keys = f"its keys are {', '.join(row)}" if isinstance(row, dict) else "it is no object"
        raise UserError(f"{file}, line {number}: no text under {column!r} ({keys}); name the key with --text_column")
    text = row[column] or ""
    refuse_half_pair(text, file, number)
    return text
