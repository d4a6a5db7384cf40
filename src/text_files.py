"""Texts out of files: .jsonl (an object a line), .txt (a text a line) and .parquet."""

import glob
import json
from collections.abc import Iterator
from pathlib import Path

from src.cli import UserError


def find_files(patterns: list[str]) -> list[Path]:
    paths = []
    for pattern in patterns:
        found = sorted(Path(path) for path in glob.glob(pattern, recursive=True))
        if not found:
            raise UserError(f"--data_files: nothing matches {pattern}")
        paths += found
    return paths


def read_file(path: Path, column: str) -> Iterator[tuple[str, int]]:
    """Documents of a file, each with the bytes read for it. Raises UserError naming file and line."""
    if path.suffix == ".parquet":
        yield from _read_parquet(path, column)
        return
    if path.suffix not in (".jsonl", ".txt"):
        raise UserError(
            f"{path}: cannot read {path.suffix or 'a file without an ending'}; give .jsonl, .txt or .parquet"
        )
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode().rstrip("\r\n")
            except UnicodeDecodeError:
                raise UserError(
                    f"{path}, line {number}: not valid UTF-8; mend the file or convert it to UTF-8"
                ) from None
            if path.suffix == ".jsonl" and text.strip():
                text = _text_of_json(text, column, path, number)
            yield text, len(line)


def _text_of_json(line: str, column: str, path: Path, number: int) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {number}: not valid JSON ({error.msg}); mend or remove the line") from None
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        keys = f"its keys are {', '.join(row)}" if isinstance(row, dict) else "it is no object"
        raise UserError(f"{path}, line {number}: no text under {column!r} ({keys}); name the key with --text_column")
    try:
        row[column].encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{path}, line {number}: half of a surrogate pair, which is no text; mend or remove the line"
        ) from None
    return row[column]


def _read_parquet(path: Path, column: str) -> Iterator[tuple[str, int]]:
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        if column not in file.schema_arrow.names:
            raise UserError(f"{path}: no column {column!r} (there are {', '.join(file.schema_arrow.names)}); name it with --text_column")  # fmt: skip
        kind = file.schema_arrow.field(column).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise UserError(f"{path}: column {column!r} holds {kind}, not text; name another with --text_column")
        step = path.stat().st_size // max(file.metadata.num_rows, 1)
        for batch in file.iter_batches(columns=[column]):
            for text in batch.column(0).to_pylist():
                yield text or "", step
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error})") from None
