"""Readers of .txt, .jsonl (or .json, one object per line), .csv, .tsv, each optionally .gz or .zst, and .parquet.

A corpus is read in two steps: `read_batches` returns records as stored, and `texts` parses them, which takes longer and
may run in another process. A table is read with `read_rows`: the wanted columns of each row, and its line number.
"""

import contextlib
import csv
import glob
import io
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow

from src.cli import log
from src.errors import UserError, reason

KINDS = {".txt": "txt", ".jsonl": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
LINE_KINDS = ("txt", "jsonl", "csv", "tsv")
DELIMITERS = {"csv": ",", "tsv": "\t"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
STANDARD_INPUT = Path("-")
BATCH_BYTES = 1 << 20  # a few tenths of a second of tokenizing
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SET_COLUMN = "; set --text_column"


class ReadOptions(NamedTuple):
    """How a corpus is read."""

    column: str = "text"  # column or key with the text
    one_document_per_file: bool = False  # for .txt
    stdin_format: str = "txt"  # one of LINE_KINDS


@dataclass
class Batch:
    """Consecutive records of a file: bytes to parse, or texts."""

    file: str
    first: int  # number of records in the file before this batch
    records: list[bytes] | list[str | None]
    kind: str  # of records: txt and jsonl are lines, file is a file's content, text is parsed (None: empty)
    size: int  # bytes read from the file; for a dataset, the number of records

    def length(self) -> int:
        """Return the total length of the records, in bytes or characters."""
        return sum(map(len, filter(None, self.records)))


def find_files(patterns: list[str]) -> list[Path]:
    """Return the files that match, pattern by pattern, each once. Raises UserError for a pattern without a match.

    A pattern that is also the name of a file, such as `a[1].txt`, means that file.
    """
    paths = []
    for pattern in patterns:
        exact = pattern == str(STANDARD_INPUT) or os.path.exists(pattern)
        names = [pattern] if exact else glob.glob(pattern, recursive=True)
        found = sorted(path for path in map(Path, names) if not path.is_dir())
        if not found:
            raise UserError(f"--data_files: nothing matches {pattern}; check the path")
        paths += found
    return list(dict.fromkeys(paths))


def file_kind(path: Path, stdin_format: str = "txt") -> tuple[str, str | None]:
    """Return the kind and the compression of a file, by its extension. Raises UserError for an unknown one."""
    if path == STANDARD_INPUT:
        return stdin_format, None
    compression = COMPRESSIONS.get(path.suffix)
    extension = "".join(path.suffixes[-2:]) if compression else path.suffix
    kind = KINDS.get(extension.lower().removesuffix(path.suffix if compression else ""))
    if kind is None or (kind == "parquet" and compression):
        known = ".txt, .jsonl, .csv or .tsv, optionally with .gz or .zst, or .parquet"
        raise UserError(f"{path}: cannot read {extension or 'a file without an extension'}; give {known}")
    return kind, compression


# Corpora


def read_texts(path: Path, column: str) -> Iterator[str]:
    """Yield a file's documents. Raises UserError with file and line."""
    for batch in read_batches(path, ReadOptions(column)):
        yield from texts(batch, column)


def read_batches(path: Path, options: ReadOptions, skip: int = 0) -> Iterator[Batch]:
    """Yield a file's records after the first `skip`, about BATCH_BYTES at a time. Raises UserError."""
    kind, compression = file_kind(path, options.stdin_format)
    if kind == "parquet":
        for first, (records,), size in _parquet_columns(path, [options.column], skip, SET_COLUMN):
            check_texts(str(path), options.column, records)
            yield Batch(str(path), first, records, "text", size)
        return
    with _open(path, compression) as (file, position):
        if kind in DELIMITERS:
            records, kind = _csv_texts(file, path, options.column, DELIMITERS[kind]), "text"
        elif kind == "txt" and options.one_document_per_file:
            records, kind = iter([file.read()]), "file"
        else:
            records = _lines(file, path)
        yield from _batches(records, str(path), kind, skip, position)


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
    rows = _csv_cells(file, path, delimiter)
    _, header = next(rows, (1, []))
    check_columns(path, [column], header, SET_COLUMN)
    index = header.index(column)
    for line, row in rows:
        if row and len(row) != len(header):
            raise UserError(f"{path}, line {line}: {len(row)} columns instead of {len(header)}; fix or remove the row")
        yield row[index] if row else ""


def texts(batch: Batch, column: str) -> list[str]:
    """Return the texts of a batch's records, "" for an empty one. Raises UserError with file and line."""
    if batch.kind == "text":
        return [text or "" for text in batch.records]
    lines = [_decode(record, batch.file, number) for number, record in enumerate(batch.records, batch.first + 1)]
    if batch.kind != "jsonl":
        return lines if batch.kind == "file" else [line.rstrip("\r\n") for line in lines]
    found = []
    for number, line in enumerate(lines, batch.first + 1):
        (text,) = _json_values(line, batch.file, number, [column], SET_COLUMN) if line.strip() else [""]
        check_texts(f"{batch.file}, line {number}", column, [text])
        found.append(text or "")
    return found


def check_texts(source: str, column: str, values: list[Any]) -> None:
    """Raise UserError unless all values of a column are strings or None."""
    for value in values:
        if not isinstance(value, str | None):
            raise UserError(f"{source}: column {column!r} holds {type(value).__name__}, not text{SET_COLUMN}")


# Tables


def read_rows(
    path: Path, columns: Sequence[str | int], malformed_rows: int = 0, tab_separated: bool = False
) -> Iterator[tuple[int, tuple]]:
    """Yield the line number and the wanted columns of each row of a table.

    Quotes enclose a cell in .csv and are literal in .tsv.

    Args:
        columns: names, or numbers of the columns of a .csv or .tsv without a header.
        malformed_rows: how many rows may differ in length from the others; they are skipped.
        tab_separated: read as .tsv, whatever the extension.

    Raises:
        UserError: a row or a file cannot be read; the message names file and line.
    """
    kind, compression = ("tsv", None) if tab_separated else file_kind(path)
    if kind == "txt":
        raise UserError(f"{path}: cannot read .txt as a table; give .csv, .tsv, .jsonl or .parquet")
    if kind == "parquet":
        for first, values, _ in _parquet_columns(path, columns):
            yield from enumerate(zip(*values), first + 1)
        return
    with _open(path, compression) as (file, _):
        if kind == "csv":
            yield from _select(path, _csv_cells(file, path, ","), columns, malformed_rows)
        elif kind == "tsv":
            rows = ((number, line.rstrip("\r\n")) for number, line in enumerate(_decoded(file, path), 1))
            cells = ((number, row.split("\t") if row else []) for number, row in rows)
            yield from _select(path, cells, columns, malformed_rows)
        else:
            for number, line in enumerate(_decoded(file, path), 1):
                if line.strip():
                    yield number, _json_values(line, path, number, columns)


def _select(
    path: Path, rows: Iterator[tuple[int, list[str]]], columns: Sequence[str | int], malformed_rows: int
) -> Iterator[tuple[int, tuple]]:
    """Yield the wanted cells of each row, by the names in a header or by number.

    All rows must be as long as the first. Empty lines are skipped, except in a file of one column: there an empty line
    before other lines is an empty text.
    """
    names = [column for column in columns if isinstance(column, str)]
    indices, width, skipped, empty = [column for column in columns if isinstance(column, int)], 0, [], []
    for number, row in rows:
        if not row:
            empty.append(number)
            continue
        if not width:
            width = len(row)
            if names:
                check_columns(path, names, row)
                indices = [row.index(column) if isinstance(column, str) else column for column in columns]
                empty.clear()
                continue
        if width == 1:
            yield from ((line, ("",) * len(indices)) for line in empty)
        empty.clear()
        if len(row) == width and max(indices) < width:
            yield number, tuple(row[index] for index in indices)
        elif len(skipped) < malformed_rows:
            skipped.append(number)
        else:
            after = f", after {malformed_rows} other malformed rows" if malformed_rows else ""
            found = f"{len(row)} columns instead of {max(width, max(indices) + 1)}{after}"
            raise UserError(f"{path}, line {number}: {found}; fix or remove the row")
    if skipped:
        shown = ", ".join(map(str, skipped[:5])) + (", …" if len(skipped) > 5 else "")
        log.info(f"{path}: skipped {len(skipped)} rows without {width} columns (line {shown})")


def check_columns(path: Path, wanted: Sequence[str | int], found: list[str], hint: str = "") -> None:
    """Raise UserError unless each wanted column is found exactly once."""
    if missing := [str(name) for name in wanted if name not in found]:
        raise UserError(f"{path}: no column {', '.join(missing)} (its columns are {', '.join(found)}){hint}")
    if repeated := [str(name) for name in wanted if found.count(name) > 1]:
        raise UserError(f"{path}: two columns are called {repeated[0]}; rename one")


# Corpora and tables


@contextlib.contextmanager
def _open(path: Path, compression: str | None) -> Iterator[tuple[BinaryIO, Callable[[], int] | None]]:
    """Open a file, decompressed, without its byte-order mark; also return its `tell` if it is seekable."""
    with contextlib.ExitStack() as stack:
        try:
            stored = sys.stdin.buffer if path == STANDARD_INPUT else stack.enter_context(path.open("rb"))
            file = stored
            if compression:
                stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(stored, "r"), compression)
                file = io.BufferedReader(stream, 1 << 18)
            if file.peek(3)[:3] == BYTE_ORDER_MARK:
                file.read(3)
            yield file, stored.tell if stored.seekable() else None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({reason(error)}); fix or omit it") from None


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    number = 0
    try:
        for line in file:
            number += 1
            yield line
    except OSError as error:
        raise UserError(
            f"{path}, line {number + 1}: corrupt or truncated ({reason(error)}); copy the file again"
        ) from None


def _decoded(file: BinaryIO, path: Path) -> Iterator[str]:
    return (_decode(line, path, number) for number, line in enumerate(_lines(file, path), 1))


def _decode(record: bytes, file: str | Path, line: int) -> str:
    try:
        return record.decode()
    except UnicodeDecodeError as error:
        line += record.count(b"\n", 0, error.start)
        raise UserError(f"{file}, line {line}: not valid UTF-8; convert the file to UTF-8") from None


def _csv_cells(file: BinaryIO, path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(2**31 - 1)  # a document is a field; the library's limit is 128 KiB
    rows, start = csv.reader(_decoded(file, path), delimiter=delimiter, strict=True), 1
    try:
        for row in rows:
            yield start, row
            start = rows.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {start}: not valid CSV ({error}); fix or remove the row") from None


def _json_values(
    line: str, file: str | Path, number: int, columns: Sequence[str | int], hint: str = "; fix or remove the line"
) -> tuple[Any, ...]:
    """Return the values of a line's JSON object under the wanted keys."""
    where = f"{file}, line {number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and deep nesting
        why = getattr(error, "msg", error)
        raise UserError(f"{where}: not valid JSON ({why}); fix or remove the line") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object; fix or remove the line")
    if missing := [str(column) for column in columns if column not in row]:
        raise UserError(f"{where}: no {', '.join(missing)} (its keys are {', '.join(row)}){hint}")
    values = tuple(row[column] for column in columns)
    try:
        "".join(value for value in values if isinstance(value, str)).encode()
    except UnicodeEncodeError:  # JSON can escape half of a surrogate pair, which no encoding can write
        raise UserError(f"{where}: half of a surrogate pair; fix or remove the line") from None
    return values


def _parquet_columns(
    path: Path, columns: Sequence[str | int], skip: int = 0, hint: str = ""
) -> Iterator[tuple[int, list[list], int]]:
    """Yield (rows before these, the values of each wanted column, their share of the file in bytes)."""
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        check_columns(path, columns, file.schema_arrow.names, hint)
        row_size = path.stat().st_size / max(file.metadata.num_rows, 1)
        end = 0
        for rows in file.iter_batches(batch_size=1024, columns=list(columns)):
            first, end = max(skip, end), end + len(rows)
            if first < end:
                rows = rows.slice(len(rows) - (end - first))
                values = [_python_values(rows.column(column), path, first) for column in columns]
                yield first, values, round(row_size * len(rows))
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error}); copy it again or omit it") from None


def _python_values(values: pyarrow.Array, path: Path, first: int) -> list:
    """Return the values of a column, `first` rows into the file. Raises UserError with the row of invalid UTF-8."""
    try:
        return values.to_pylist()
    except UnicodeDecodeError:
        for number, value in enumerate(values, first + 1):
            try:
                value.as_py()
            except UnicodeDecodeError:
                raise UserError(f"{path}, row {number}: not valid UTF-8; fix the file") from None
        raise
