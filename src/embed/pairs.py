"""Training pairs: read once from any source into a memory-mapped Arrow file of the run, then taken by row."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
import pyarrow
from filelock import FileLock
from pyarrow import ipc

from src.cli import log, progress
from src.data.readers import Malformed, find_files, grouped, read_rows
from src.embed.beir import check_passage, read_beir
from src.embed.config import patterns
from src.errors import RunFailed, UserError, reason

SCHEMA = pyarrow.schema(
    {
        "query": pyarrow.large_string(), "document": pyarrow.large_string(),
        "negatives": pyarrow.list_(pyarrow.large_string()), "passage": pyarrow.list_(pyarrow.int64()),
        "query_key": pyarrow.int64(), "document_key": pyarrow.int64(),
    }
)  # fmt: skip
STAMP = b"source"  # in the file's metadata: what it was read from


class Pair(NamedTuple):
    query: str
    document: str
    negatives: list[str]
    passage: Sequence[int] | None = None  # first and last character of the document whose vector is meant; None: all


def text_key(text: str, passage: Sequence[int] | None = None) -> int:
    """A number by which equal texts, or passages, are recognized."""
    text += "" if passage is None else f"\n{[*passage]}"
    return _number(text.encode())


def tokens_key(ids: Sequence[int], span: Sequence[int] | None = None) -> int:
    """A number by which texts with equal tokens, after cutting, and equal passages are recognized."""
    return _number(np.array([*ids, *(() if span is None else (-1, *span))], np.int32).tobytes())


def _number(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


@dataclass
class Pairs:
    """A source. `query_keys` and `document_keys`, (rows,), are the numbers of the texts."""

    name: str
    table: pyarrow.Table
    prompts: dict[str, str]
    proportion: float | None = None

    def __post_init__(self) -> None:
        self.query_keys, self.document_keys = (
            self.table.column(name).to_numpy() for name in ("query_key", "document_key")
        )
        self.by_query = np.argsort(self.query_keys, kind="stable")

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, row: int) -> Pair:
        return Pair(*(self.table.column(name)[row].as_py() for name in Pair._fields))

    def rows_of(self, query_keys: Sequence[int] | np.ndarray) -> np.ndarray:
        """The rows of some queries, at least one."""
        starts, stops = (np.searchsorted(self.query_keys, query_keys, s, self.by_query) for s in ("left", "right"))
        return np.concatenate([self.by_query[start:stop] for start, stop in zip(starts, stops)])

    def positives(self, query_key: int) -> np.ndarray:
        """The numbers of all documents that are pairs of a query."""
        return np.unique(self.document_keys[self.rows_of([query_key])])


def open_pairs(name: str, source: dict[str, Any], prompts: dict[str, str], folder: Path) -> Pairs:
    """Open the pairs of a source, kept in `folder`. The first of several processes reads them, if they are not there,
    while the others wait. Raises UserError with file and line, RunFailed if they cannot be written."""
    kept = folder / f"{name}.arrow"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            keep(name, source, kept)
    except OSError as error:
        raise RunFailed(f"cannot write {kept} ({reason(error)}); free space and repeat the command") from None
    table = ipc.open_file(pyarrow.memory_map(str(kept))).read_all()
    return Pairs(name, table, {**prompts, **source.get("prompts", {})}, source.get("proportion"))


def keep(name: str, source: dict[str, Any], kept: Path) -> None:
    """Read a source into a file, unless the file holds it. Raises UserError, OSError."""
    stamp, unfinished, count = _stamp(source), kept.with_suffix(".unfinished"), 0
    if _is_of(kept, stamp):
        return
    try:
        with ipc.new_file(str(unfinished), SCHEMA.with_metadata({STAMP: stamp})) as writer:
            for group in grouped(_read(name, source), lambda pair: len(pair.query) + len(pair.document)):
                writer.write_batch(_batch(group))
                count += len(group)
        if not count:
            raise UserError(f"data.{name} has no pairs; name other files")
        unfinished.replace(kept)
    finally:
        unfinished.unlink(missing_ok=True)
    log.info(f"data.{name}: {count:,} pairs")


def _stamp(source: dict[str, Any]) -> bytes:
    """What the pairs of a source depend on: its keys, and the size and time of its files."""
    files = find_files(patterns(source)) if "files" in source else sorted(Path(source["beir"]).rglob("*.*"))
    facts = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    skipped = [source["malformed_rows"]] if source.get("malformed_rows") else []
    return repr((source.get("columns"), source.get("split"), facts, *skipped)).encode()


def _is_of(kept: Path, stamp: bytes) -> bool:
    try:
        return (ipc.open_file(pyarrow.memory_map(str(kept))).schema.metadata or {}).get(STAMP) == stamp
    except (OSError, pyarrow.ArrowException):
        return False


def _batch(pairs: list[Pair]) -> pyarrow.RecordBatch:
    columns = [*map(list, zip(*pairs))]
    keys = [
        [text_key(pair.query) for pair in pairs],
        [text_key(pair.document, pair.passage) for pair in pairs],
    ]
    return pyarrow.record_batch([*columns, *keys], schema=SCHEMA)


def _read(name: str, source: dict[str, Any]) -> Iterator[Pair]:
    if "beir" in source:
        data = read_beir(Path(source["beir"]), source.get("split", "train"), f"data.{name}.beir")
        for query, grades in data.judged.items():
            for document, grade in grades.items():
                if grade > 0:
                    yield Pair(data.queries[query], data.documents[document], [], data.passages.get(document))
        return
    columns = {"query": "query", "document": "document", **source.get("columns", {})}
    negatives, place = columns.get("negatives", []), columns.get("passage", [])
    wanted = [columns["query"], columns["document"]]
    wanted += [name for part in (place, negatives) for name in ([part] if isinstance(part, str) else part)]
    places = 1 if isinstance(place, str) else len(place)
    kinds = " or .".join(kind for kind in ("query", "document", "passage", "negatives") if columns.get(kind))
    way_out = f", or skip up to N in each file with data.{name}.malformed_rows=N"
    fix_column = f"; set data.{name}.columns.{kinds} to one of these, or correct the file"
    with progress(desc=f"reading data.{name}", unit="pair") as bar:
        for path in find_files(patterns(source)):
            malformed = Malformed(path, source.get("malformed_rows", 0), way_out)
            for number, (query, document, *others) in read_rows(path, wanted, malformed, fix=fix_column):
                found, passage = others[places:], others[:places]
                found = found[0] if isinstance(negatives, str) else [text for text in found if text is not None]
                if problem := _problem(columns, query, document, found):
                    malformed.skip(number, problem)
                    continue
                bar.update()
                if passage:
                    passage = passage[0] if isinstance(place, str) else passage
                    passage = check_passage(passage, document, f"{path}, line {number}")
                yield Pair(query, document, found, passage or None)


def _problem(columns: dict[str, Any], query: Any, document: Any, negatives: Any) -> str | None:
    """What is wrong with the texts of a row, or None."""
    for kind, text in (("query", query), ("document", document)):
        if not isinstance(text, str) or not text.strip():
            is_text = isinstance(text, str)
            what = "missing" if text is None else "empty" if is_text else f"not text, but {shorten(repr(text), 40)}"
            return f"the {kind} ({columns[kind]}) is {what}"
    if not isinstance(negatives, list) or not all(isinstance(text, str) and text.strip() for text in negatives):
        problem = f"the negatives ({columns['negatives']}) must be a list of non-empty texts"
        return f"{problem} (got {shorten(repr(negatives), 60)})"
    return None
