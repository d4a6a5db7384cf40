"""Readers of .txt, .jsonl (or .json, one object per line), .csv, .tsv, each optionally .gz or .zst, and .parquet.
`read_batches` reads a corpus: one text per record. `read_rows` reads a table: the wanted columns of each row."""

import contextlib
import csv
import glob
import io
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow

from src.cli import log
from src.errors import UserError, reason

KINDS = {".txt": "txt", ".jsonl": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
LINE_KINDS = ("txt", "jsonl", "csv", "tsv")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
STANDARD_INPUT = Path("-")
BATCH_BYTES = 1 << 20  # a few tenths of a second of tokenizing
SET_COLUMN = "; set --text_column"
FIX_COLUMN = "; correct the column's name or the file"
NAME_OPTION = ", or skip up to N in each file with --malformed_rows N"

Lines = Iterable[tuple[int, str]]  # with their numbers
Rows = Iterator[tuple[int, Sequence[Any]]]  # line number and cells
Columns = Sequence[str | int]


class Batch(NamedTuple):
    """Consecutive texts of a file or a dataset."""

    position: Any  # JSON-serializable, to resume from: in a file, the number of texts before these
    texts: list[str]  # "" for an empty record
    size: int  # bytes read from the file; for a dataset, the number of records

    def length(self) -> int:
        return sum(map(len, self.texts))


class Malformed:
    """The malformed rows of a file that are skipped, up to a limit. way_out: what errors suggest besides."""

    def __init__(self, path: Path, limit: int, way_out: str = ""):
        self.path, self.limit, self.way_out = path, limit, way_out
        self.skipped: list[int] = []
        self.has_header = False  # which is never skipped

    def skip(self, number: int, found: str, what: str = "row") -> None:
        """Skip the row of a line, which is as found. Raises UserError beyond the limit."""
        if len(self.skipped) == self.limit or (self.has_header and number == 1):
            found += f", after {len(self.skipped)} other malformed rows" if self.skipped else ""
            raise UserError(f"{self.path}, line {number}: {found}; fix or remove the {what}{self.way_out}")
        self.skipped.append(number)

    def report(self) -> None:
        if self.skipped:
            shown = ", ".join(map(str, self.skipped[:5])) + (", …" if len(self.skipped) > 5 else "")
            rows = "row" if len(self.skipped) == 1 else "rows"
            log.info(f"{self.path}: skipped {len(self.skipped):,} malformed {rows} (line {shown})")


def find_files(patterns: list[str], key: str = "--data_files") -> list[Path]:
    """Return the files that match each pattern, or have it as name, such as `a[1].txt`, each once. Raises UserError,
    naming the `key` that holds the patterns."""
    paths = []
    for pattern in patterns:
        exact = pattern == str(STANDARD_INPUT) or os.path.exists(pattern)
        names = [pattern] if exact else glob.glob(pattern, recursive=True)
        found = sorted(path for path in map(Path, names) if not path.is_dir())
        if not found:
            if os.path.isdir(pattern):
                raise UserError(f"{key}: {pattern} is a folder; give its files, as in '{pattern.rstrip('/')}/*.jsonl'")
            raise UserError(f"{key}: nothing matches {pattern}; check the path")
        paths += found
    return list(dict.fromkeys(paths))


def file_kind(path: Path, stdin_format: str = "txt") -> tuple[str, str | None]:
    """Return the kind and the compression of a file, by its extension. Raises UserError for an unknown one."""
    if path == STANDARD_INPUT:
        return stdin_format, None
    compression = COMPRESSIONS.get(path.suffix)
    kind = KINDS.get((path.with_suffix("") if compression else path).suffix.lower())
    if kind is None or (kind == "parquet" and compression):
        extension = "".join(path.suffixes[-2:]) or "a file without an extension"
        fix = "give .txt, .jsonl, .csv or .tsv, optionally with .gz or .zst, or .parquet"
        raise UserError(f"{path}: cannot read {extension}; {fix}")
    return kind, compression


def read_batches(
    path: Path,
    column: str | Sequence[str],
    skip: int = 0,
    one_document_per_file: bool = False,
    stdin_format: str = "txt",
    malformed_rows: int | None = None,
) -> Iterator[Batch]:
    """Yield a file's texts after the first `skip`, about BATCH_BYTES at a time; those of several columns are joined by
    spaces. Up to `malformed_rows` rows are skipped as by `read_rows`, except that a .tsv may have quotes, as a .csv.
    Raises UserError with file and line, and with --malformed_rows as a way out unless that is None."""
    kind, compression = file_kind(path, stdin_format)
    columns = [column] if isinstance(column, str) else [*column]
    if kind == "parquet":
        for first, values, size in _parquet_columns(path, columns, skip, SET_COLUMN):
            parts = [check_texts(of_column, str(path), name) for of_column, name in zip(values, columns)]
            yield Batch(first, parts[0] if len(parts) == 1 else [*map(joined, zip(*parts))], size)
        return
    malformed = Malformed(path, malformed_rows or 0, NAME_OPTION if malformed_rows is not None else "")
    by_line = kind in ("txt", "jsonl") and not one_document_per_file
    with _open(path, compression, malformed if by_line else None) as (lines, position):
        rows = _rows(lines, path, "quoted tsv" if kind == "tsv" else kind, columns, malformed, SET_COLUMN)
        name = " or ".join(columns)
        parts = (check_texts(row or [""], f"{path}, line {number}", name) for number, row in rows)
        texts = itertools.chain.from_iterable(parts) if len(columns) == 1 else map(joined, parts)
        if kind == "txt" and one_document_per_file:
            texts = iter(["".join(line for _, line in lines)])
        for _ in itertools.islice(texts, skip):
            pass
        before = position() if skip else 0
        for group in grouped(texts, len):
            after = position() if position else before + sum(map(len, group))
            yield Batch(skip, group, after - before)
            skip, before = skip + len(group), after
    malformed.report()


def joined(texts: Iterable[str | None]) -> str:
    """Return the text of a row's columns, those that are not empty joined by spaces."""
    return " ".join(text.strip() for text in texts if text and text.strip())


def check_texts(values: Iterable[Any], source: str, column: str, fix: str = SET_COLUMN) -> list[str]:
    """Return the values of a column, "" for None. Raises UserError for any that is not a string."""
    for value in values:
        if not isinstance(value, str | None):
            raise UserError(f"{source}: column {column!r} holds {type(value).__name__}, not text{fix}")
    return [value or "" for value in values]


def grouped(items: Iterable[Any], length: Callable[[Any], int]) -> Iterator[list[Any]]:
    """Combine consecutive items into groups of BATCH_BYTES or a little more, given the length of each item."""
    group, total = [], 0
    for item in items:
        group.append(item)
        total += 1 + length(item)
        if total >= BATCH_BYTES:
            yield group
            group, total = [], 0
    if group:
        yield group


def read_rows(
    path: Path,
    columns: Columns,
    malformed_rows: int | Malformed = 0,
    tab_separated: bool = False,
    optional: Columns = (),
    fix: str = FIX_COLUMN,
) -> Rows:
    """Yield the line number and the wanted columns of each row of a table. Raises UserError with file and line, and
    with `fix` for a missing column. `optional` are further keys of a .jsonl's rows, None where a row lacks them.
    `columns` are names, or numbers in a .csv or .tsv without a header. Up to `malformed_rows` rows that are of another
    length, not JSON or, except in .csv, not UTF-8 are skipped, and empty lines, except in a .csv or .tsv of one column:
    there an empty line before other lines is an empty text. Quotes enclose a cell in .csv and are literal in .tsv;
    `tab_separated` means .tsv, whatever the name. `malformed_rows` may be an object that the caller also uses."""
    kind, compression = ("tsv", None) if tab_separated else file_kind(path)
    if kind == "txt":
        raise UserError(f"{path}: cannot read .txt as a table; give .csv, .tsv, .jsonl or .parquet")
    malformed = Malformed(path, malformed_rows) if isinstance(malformed_rows, int) else malformed_rows
    malformed.has_header = kind in ("csv", "tsv") and any(isinstance(column, str) for column in columns)
    if kind == "parquet":
        for first, values, _ in _parquet_columns(path, columns, fix=fix):
            yield from enumerate(zip(*values), first + 1)
        malformed.report()
        return
    with _open(path, compression, malformed if kind != "csv" else None) as (lines, _):
        lines = _without_last_empty(lines)
        if (first := next(lines, None)) is not None:
            rows = _rows(itertools.chain([first], lines), path, kind, columns, malformed, fix, optional)
            yield from (row for row in rows if row[1])
    malformed.report()


def _without_last_empty(lines: Lines) -> Iterator[tuple[int, str]]:
    """Yield lines up to the last that is not empty."""
    empty = []
    for number, line in lines:
        if line.strip("\r\n"):
            yield from empty
            yield number, line
            empty = []
        else:
            empty.append((number, line))


def _rows(
    lines: Lines, path: Path, kind: str, columns: Columns, malformed: Malformed, fix: str, optional: Columns = ()
) -> Rows:
    """Yield the line number and the wanted columns of each row; no columns if it is empty."""
    if kind == "txt":
        return ((number, [line.rstrip("\r\n")]) for number, line in lines)
    if kind == "jsonl":
        return _json_rows(lines, path, columns, malformed, fix, optional)
    if kind == "tsv":
        stripped = ((number, line.rstrip("\r\n")) for number, line in lines)
        cells = ((number, line.split("\t") if line else []) for number, line in stripped)
    else:
        cells = _csv_cells(lines, path, "," if kind == "csv" else "\t")
    return _select(path, cells, columns, malformed, fix)


def _select(path: Path, rows: Rows, columns: Columns, malformed: Malformed, fix: str) -> Rows:
    """Yield the wanted cells of each row, by the names in a header or by number; none for an empty line. All rows must
    be as long as the first. In a file of one column, an empty line is an empty cell."""
    number, header = next((row for row in rows if row[1]), (1, []))
    width = len(header)
    if names := [column for column in columns if isinstance(column, str)]:
        check_columns(path, names, header, fix)
        columns = [header.index(column) if isinstance(column, str) else column for column in columns]
    else:
        rows = itertools.chain([(number, header)], rows)
    for number, row in rows:
        cells = row or [""] * (width == 1)
        if not cells:
            yield number, ()
        elif len(cells) == width > max(columns):
            yield number, tuple(cells[index] for index in columns)
        else:
            malformed.skip(number, f"{len(cells)} columns instead of {max(width, max(columns) + 1)}")


@contextlib.contextmanager
def _open(
    path: Path, compression: str | None, malformed: Malformed | None
) -> Iterator[tuple[Lines, Callable[[], int] | None]]:
    """Open a file, decompressed, as its lines; also return its `tell` if it is seekable. malformed: where each line is
    a row, so that those that are not UTF-8 may be skipped."""
    numbers = itertools.count(1)
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if path == STANDARD_INPUT else path.open("rb") as stored:
            file = stored
            if compression:
                stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(stored, "r"), compression)
                file = io.BufferedReader(stream, 1 << 18)
            lenient = malformed is not None and malformed.limit > 0
            text = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape" if lenient else "strict", newline="\n")
            lines = zip(numbers, text)
            yield _valid(lines, malformed) if lenient else lines, stored.tell if stored.seekable() else None
    except UnicodeDecodeError as error:  # in a block of the file, which starts in the line after the last one read
        line = next(numbers) - 1 + error.object.count(b"\n", 0, error.start)
        fix = f"convert the file to UTF-8{malformed.way_out if malformed else ''}"
        raise UserError(f"{path}, line {line}: not valid UTF-8; {fix}") from None
    except OSError as error:
        if (line := next(numbers) - 1) <= 1:
            raise UserError(f"{path}: cannot be read ({reason(error)}); fix or omit it") from None
        raise UserError(f"{path}, line {line}: corrupt or truncated ({reason(error)}); copy the file again") from None


def _valid(lines: Lines, malformed: Malformed) -> Lines:
    """Yield the lines that are UTF-8, of a file that was decoded with surrogates in place of other bytes."""
    for number, line in lines:
        try:
            line.encode()
        except UnicodeEncodeError:
            malformed.skip(number, "not valid UTF-8", "line")
        else:
            yield number, line


def _csv_cells(lines: Lines, path: Path, delimiter: str) -> Rows:
    csv.field_size_limit(2**31 - 1)  # a document is a field; the library's limit is 128 KiB
    rows, start = csv.reader((line for _, line in lines), delimiter=delimiter, strict=True), 1
    try:
        for row in rows:
            yield start, row
            start = rows.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {start}: not valid CSV ({error}); fix or remove the row") from None


def _json_rows(lines: Lines, path: Path, columns: Columns, malformed: Malformed, fix: str, optional: Columns) -> Rows:
    """Yield the line number and the values of each line's JSON object under the wanted and the optional keys; none for
    an empty line."""
    for number, line in lines:
        if not line.strip():
            yield number, ()
            continue
        try:
            row = json.loads(line)
            if isinstance(row, dict):
                if missing := [str(column) for column in columns if column not in row]:
                    found = f"no {', '.join(missing)} (its keys are {', '.join(row)})"
                    raise UserError(f"{path}, line {number}: {found}{fix}")
                values = tuple(row.get(column) for column in (*columns, *optional))
                "".join(value for value in values if isinstance(value, str)).encode()
                yield number, values
                continue
            found = "not a JSON object (a file holds one per line)"
        except UnicodeEncodeError:  # JSON can escape half of a surrogate pair, which no encoding can write
            found = "half of a surrogate pair"
        except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and deep nesting
            found = f"not valid JSON ({getattr(error, 'msg', error)}; a file holds one object per line)"
        malformed.skip(number, found, "line")


def _parquet_columns(path: Path, columns: Columns, skip: int = 0, fix: str = FIX_COLUMN) -> Iterator[tuple]:
    """Yield (rows before these, the values of each wanted column, their share of the file in bytes)."""
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        check_columns(path, columns, file.schema_arrow.names, fix)
        row_size, end = path.stat().st_size / max(file.metadata.num_rows, 1), 0
        for rows in file.iter_batches(batch_size=1024, columns=list(columns)):
            first, end = max(skip, end), end + len(rows)
            if first < end:
                rows = rows.slice(len(rows) - (end - first))
                values = [_python_values(rows.column(column), path, first) for column in columns]
                yield first, values, round(row_size * len(rows))
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error}); copy it again or omit it") from None


def _python_values(values: pyarrow.Array, path: Path, first: int) -> list:
    try:
        return values.to_pylist()
    except UnicodeDecodeError as error:
        number = first + 1 + values.cast(pyarrow.large_binary()).to_pylist().index(error.object)
        raise UserError(f"{path}, row {number}: not valid UTF-8; fix the file") from None


def check_columns(source: Path | str, wanted: Columns, found: list[str], fix: str) -> None:
    """Raise UserError unless each wanted column is found exactly once."""
    if missing := [str(name) for name in wanted if name not in found]:
        raise UserError(f"{source}: no column {', '.join(missing)} (its columns are {', '.join(found)}){fix}")
    if repeated := [str(name) for name in wanted if found.count(name) > 1]:
        raise UserError(f"{source}: two columns are called {repeated[0]}; rename one")
