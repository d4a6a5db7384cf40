"""Sources of documents: files, or a dataset on the Hugging Face Hub. Both can resume from a batch's position.

Both consist of units, which are never divided: rows of tokens end with a unit, and a part of a conversion is a run of
units. What they are depends on the source alone, so that any number of parts gives the same samples."""

import bisect
import functools
import itertools
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from src.cli import log
from src.data.readers import SET_COLUMN, STANDARD_INPUT, Batch, check_columns, check_texts, read_batches
from src.errors import UserError, first_line, reason
from src.files import sha256

RECORDS = 256  # records of a dataset read at a time
UNIT_BYTES = 1 << 24  # of files: few rows are shorter because a unit ends, and a large corpus still has many units
MAX_UNITS = 1024  # of a dataset, whose files have unknown sizes; C4 has as many files
C4_DOCUMENTS = {"train": 364_868_892, "validation": 364_608}  # allenai/c4 en, to estimate the time left


class Files:
    """Files, read in order. A position is [index of the file, records before it in the file]. A unit is consecutive
    files, the fewest that have UNIT_BYTES."""

    unit = "B"

    def __init__(self, paths: list[Path], options: Namespace):
        self.paths, self.options = paths, options
        try:
            found = [path.stat() for path in paths if path != STANDARD_INPUT]
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be read ({reason(error)}); fix or omit it") from None
        self.resumable = all(path.is_file() for path in paths)  # pipes can be read only once
        # path, size and modification time
        self.stamps = [[str(path), file.st_size, file.st_mtime_ns] for path, file in zip(paths, found)]
        self.total = sum(file.st_size for file in found) if self.resumable else None
        self.firsts, self.sizes = [0], [0]  # of each unit: its first file, its bytes
        for number, file in enumerate(found if self.resumable else ()):
            if self.sizes[-1] >= UNIT_BYTES:
                self.firsts.append(number)
                self.sizes.append(0)
            self.sizes[-1] += file.st_size
        self.description = {"data_files": options.data_files, "files": len(paths)}
        self.stdin_format = "txt"
        if STANDARD_INPUT in paths:
            self.stdin_format = options.stdin_format or ("jsonl" if sys.stdin.buffer.peek(1)[:1] == b"{" else "txt")
            kind = self.stdin_format
            log.info(f"standard input: read as .{kind}; it cannot be read again, so an interruption starts over")

    def changed(self, stamps: list[list], position: list) -> str | None:
        """Return the first file, among those read up to a position, that has changed since its stamp, or None."""
        read = stamps[: position[0] + 1]
        return next((old[0] for old, new in zip(read, self.stamps) if old != new), None)

    def identity(self, times: bool = False) -> dict[str, str]:
        """Return what all parts of a conversion must have read: a digest of the files' names and sizes; with `times`,
        also one of when they were changed, which differs on other machines."""
        found = {"files": sha256([json.dumps([stamp[:2] for stamp in self.stamps]).encode()])}
        return found | ({"times": sha256([json.dumps([stamp[2] for stamp in self.stamps]).encode()])} if times else {})

    def unit_of(self, position: list) -> int:
        return bisect.bisect_right(self.firsts, position[0]) - 1

    def batches(self, unit: int, position: list | None) -> Iterator[Batch]:
        """Yield the batches of a unit, from a position in it on."""
        first, skip = position or (self.firsts[unit], 0)
        end = (*self.firsts, len(self.paths))[unit + 1]
        column, whole = self.options.text_column, self.options.one_document_per_file
        for number, path in enumerate(self.paths[first:end], first):
            for batch in read_batches(path, column, skip, whole, self.stdin_format, self.options.malformed_rows):
                yield batch._replace(position=[number, batch.position])
            skip = 0


class HubDataset:
    """A split of a dataset on the Hub, streamed. A position is [state or None, batches to skip after it, unit]; earlier
    versions wrote no unit, and a state of the whole split. A unit is consecutive files."""

    key, set_column = "--dataset", SET_COLUMN  # for messages
    fix = "check the name and the connection, or use --data_files"

    unit = "docs"
    resumable = True
    stamps = None  # the revision, in the description, identifies the data

    def __init__(self, dataset: str, subset: str | None, split: str, column: str, revision: str | None = None):
        self.dataset, self.split, self.column = dataset, split, column
        if any(Path(dataset, name).is_file() for name in ("dataset_dict.json", "state.json")):
            saved = f"{dataset} was written by save_to_disk of `datasets`"
            raise UserError(f"--dataset: {saved}; write each split with its to_parquet, and give --data_files")
        try:
            builder = _builder(dataset, subset, revision)
            self.documents = builder.as_streaming_dataset(split=split)
        except Exception as error:  # whatever the Hub's clients raise: connection, missing dataset, missing split, …
            raise self._unreadable(error) from None
        known = C4_DOCUMENTS if (dataset, subset) == ("allenai/c4", "en") else {}
        splits = builder.info.splits or {}
        self.total = splits[split].num_examples if split in splits else known.get(split)
        self.sizes = [1] * min(self.documents.num_shards, MAX_UNITS)
        names = {"dataset": dataset, "data_subset": subset, "hub_split": split}
        self.description = {**names, "revision": builder.hash}

    def identity(self, times: bool = False) -> dict[str, str]:
        return {}  # the description has the revision

    def unit_of(self, position: list) -> int:
        return position[2] if len(position) > 2 else len(self.sizes) - 1  # no unit comes after the whole split

    def batches(self, unit: int, position: list | None) -> Iterator[Batch]:
        """Yield the batches of a unit, from a position in it on."""
        state, skip, *where = position or (None, 0, unit)
        documents = self.documents.shard(len(self.sizes), unit) if where else self.documents
        if state is not None:
            documents.load_state_dict(state)
        rows = documents.iter(batch_size=RECORDS)
        for number in itertools.count():
            try:
                # Before the first batch after a load, `datasets` returns the initial state, and after it one that may
                # be too far ahead (a table that was split counts twice); count both from the loaded state.
                here = [state, number] if number < 2 else [documents.state_dict(), 0]
                columns = next(rows, None)
            except Exception as error:
                raise self._unreadable(error) from None
            if columns is None:
                return
            check_columns(self.dataset, [self.column], list(columns), self.set_column)
            texts = check_texts(columns[self.column], self.dataset, self.column, self.set_column)
            if number >= skip:
                yield Batch([*here, *where], texts, len(texts))

    def _unreadable(self, error: Exception) -> UserError:
        found = f"cannot read {self.dataset} ({self.split}) from the Hugging Face Hub: {first_line(error)}"
        return UserError(f"{self.key}: {found}; {self.fix}")


@functools.cache
def _builder(dataset: str, subset: str | None, revision: str | None):
    from datasets import load_dataset_builder

    return load_dataset_builder(dataset, subset, revision=revision)
