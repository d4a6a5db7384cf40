"""Sources of documents: files, or a dataset on the Hugging Face Hub. Both can resume."""

import functools
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from src.data.readers import BATCH_BYTES, SET_COLUMN, STANDARD_INPUT, Batch, ReadOptions, check_texts, read_batches
from src.errors import UserError, first_line, reason

RECORDS = 256  # records of a dataset read at a time
C4_DOCUMENTS = {"train": 364_868_892, "validation": 364_608}  # allenai/c4 en, to estimate the time left

Position = Any  # JSON-serializable


class Files:
    """Files, read in order. A position is [index of the file, records before it in the file]."""

    unit = "B"

    def __init__(self, paths: list[Path], patterns: list[str], options: ReadOptions):
        self.paths, self.options = paths, options
        self.resumable = all(path.is_file() for path in paths)  # pipes can be read only once
        self.stamps = [stamp(path) for path in paths]
        self.total = sum(size for _, size, _ in self.stamps) if self.resumable else None
        self.description = {"data_files": patterns, "files": len(paths)}

    def changed(self, stamps: list[tuple[str, int, int]], position: Position) -> str | None:
        """Return the first of the files read up to a position that has changed since its stamp, or None."""
        read = stamps[: position[0] + 1]
        pairs = itertools.zip_longest(map(tuple, read), self.stamps[: len(read)])
        return next((old[0] for old, new in pairs if old != new), None)

    def batches(self, position: Position | None) -> Iterator[tuple[Position, Batch]]:
        """Yield batches from a position on, each with its own."""
        first, skip = position or (0, 0)
        for number in range(first, len(self.paths)):
            for batch in read_batches(self.paths[number], self.options, skip if number == first else 0):
                yield [number, batch.first], batch


def stamp(path: Path) -> tuple[str, int, int]:
    """Return path, size and modification time, which change if the file does. Raises UserError for a broken link."""
    if path == STANDARD_INPUT:
        return str(path), 0, 0
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({reason(error)}); fix or omit it") from None
    return str(path), status.st_size, status.st_mtime_ns


class HubDataset:
    """A split of a dataset on the Hub, streamed. A position is [state of the dataset, batches to skip after it].

    A state of None is the start.
    """

    unit = "docs"
    resumable = True
    stamps = None  # the revision, in the description, identifies the data

    def __init__(self, dataset: str, subset: str | None, split: str, column: str):
        self.dataset, self.split, self.column = dataset, split, column
        try:
            builder = _builder(dataset, subset)
            self.documents = builder.as_streaming_dataset(split=split)
        except Exception as error:  # whatever the Hub's clients raise: connection, missing dataset, missing split, …
            raise self._unreadable(error) from None
        splits = builder.info.splits or {}
        known = C4_DOCUMENTS.get(split) if (dataset, subset) == ("allenai/c4", "en") else None
        self.total = splits[split].num_examples if split in splits else known
        self.description = {"dataset": dataset, "data_subset": subset, "hub_split": split, "revision": builder.hash}

    def changed(self, stamps: None, position: Position) -> None:
        return None

    def batches(self, position: Position | None) -> Iterator[tuple[Position, Batch]]:
        """Yield batches from a position on, each with its own."""
        state, skip = position or (None, 0)
        if state is not None:
            self.documents.load_state_dict(state)
        rows = self.documents.iter(batch_size=RECORDS)
        for number in itertools.count():
            try:
                # Before the first batch after a load, `datasets` returns the initial state, and after it one that may
                # be too far ahead (a table that was split counts twice); count both from the loaded state.
                here = [state, number] if number < 2 else [self.documents.state_dict(), 0]
                columns = next(rows, None)
            except Exception as error:
                raise self._unreadable(error) from None
            if columns is None:
                return
            texts = columns.get(self.column)
            if texts is None:
                found = f"its columns are {', '.join(columns)}"
                raise UserError(f"{self.dataset}: no column {self.column} ({found}); {SET_COLUMN}")
            check_texts(self.dataset, self.column, texts)
            if number >= skip:
                yield here, Batch(self.dataset, 0, texts, "text", len(texts))

    def _unreadable(self, error: Exception) -> UserError:
        source = f"{self.dataset} ({self.split}) from the Hugging Face Hub"
        fix = "check the name and the connection, or use --data_files"
        return UserError(f"--dataset: cannot read {source}: {first_line(error)}; {fix}")


@functools.cache
def _builder(dataset: str, subset: str | None):
    from datasets import load_dataset_builder

    return load_dataset_builder(dataset, subset)


def grouped(batches: Iterable[tuple[Position, Batch]]) -> Iterator[tuple[list[Position], list[Batch]]]:
    """Combine small batches, with their positions, into groups worth sending to another process."""
    positions, group, length = [], [], 0
    for position, batch in batches:
        positions.append(position)
        group.append(batch)
        length += batch.length()
        if length >= BATCH_BYTES:
            yield positions, group
            positions, group, length = [], [], 0
    if group:
        yield positions, group
