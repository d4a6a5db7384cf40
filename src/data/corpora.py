"""Where documents come from: files, or a dataset of the Hugging Face Hub; both can be read on from a place in them."""

import functools
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from src.data.readers import (
    BATCH_BYTES,
    STANDARD_INPUT,
    Batch,
    ReadOptions,
    check_texts,
    file_kind,
    find_files,
    read_batches,
)
from src.errors import UserError, first_line

RECORDS = 256  # of a dataset, read at a time
C4_DOCUMENTS = {"train": 364_868_892, "validation": 364_608}  # allenai/c4 en, for the time left

Place = Any  # as JSON holds it


class Files:
    """The files that patterns match, in order. A place is [file, records of it]."""

    unit = "B"

    def __init__(self, patterns: list[str], reading: ReadOptions):
        self.paths = find_files(patterns)
        for path in self.paths:
            file_kind(path, reading.stdin_format)
        self.reading = reading
        self.resumable = all(path.is_file() for path in self.paths)  # what comes through a pipe comes once
        self.stamps = [self._stamp(path) for path in self.paths]
        self.total = sum(size for _, size, _ in self.stamps) if self.resumable else None
        self.description = {"data_files": patterns, "files": len(self.paths)}

    @staticmethod
    def _stamp(path: Path) -> tuple[str, int, int]:
        """Path, bytes and time of change: what tells that a file is the one that was there. Raises UserError where it is not."""
        if path == STANDARD_INPUT:
            return str(path), 0, 0
        try:
            status = path.stat()
        except OSError as error:  # a link to nothing
            raise UserError(f"{path}: cannot be read ({error.strerror or error}); mend it or leave it out") from None
        return str(path), status.st_size, status.st_mtime_ns

    def changed(self, stamps: list[tuple[str, int, int]], place: Place) -> str | None:
        """The first file, of those read up to a place, that is not what it was."""
        read = place[0] + 1
        pairs = zip(map(tuple, stamps[:read]), self.stamps[:read] + [("", 0, 0)] * read)
        return next((old[0] for old, new in pairs if old != new), None)

    def batches(self, place: Place | None) -> Iterator[tuple[Place, Batch]]:
        first, skip = place or (0, 0)
        for number in range(first, len(self.paths)):
            for batch in read_batches(self.paths[number], self.reading, skip if number == first else 0):
                yield [number, batch.first], batch


class HubDataset:
    """A split of a dataset of the Hub, streamed. A place is [state that `datasets` gives, batches to skip from there].

    A state of None is the beginning.
    """

    unit = "docs"
    resumable = True
    stamps = None  # the revision, in the description, tells one dataset from another

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

    def changed(self, stamps: None, place: Place) -> None:
        return None

    def batches(self, place: Place | None) -> Iterator[tuple[Place, Batch]]:
        state, skip = place or (None, 0)
        if state is not None:
            self.documents.load_state_dict(state)
        rows = self.documents.iter(batch_size=RECORDS)
        for number in itertools.count():
            try:
                # Before the first batch after a load `datasets` gives the state of the beginning, and after it one that
                # may lie too far (a table that was cut counts twice); both places are named by the state that was loaded.
                here = [state, number] if number < 2 else [self.documents.state_dict(), 0]
                columns = next(rows, None)
            except Exception as error:
                raise self._unreadable(error) from None
            if columns is None:
                return
            texts = columns.get(self.column)
            if texts is None:
                raise UserError(f"{self.dataset}: no column {self.column!r} (there are {', '.join(columns)}); name it with --text_column")  # fmt: skip
            check_texts(self.dataset, self.column, texts)
            if number >= skip:
                yield here, Batch(self.dataset, 0, texts, "text", len(texts))

    def _unreadable(self, error: Exception) -> UserError:
        reason = first_line(error)
        return UserError(f"--dataset: cannot read {self.dataset} ({self.split}) from the Hugging Face Hub: {reason}; check the name and the connection, or use --data_files")  # fmt: skip


@functools.cache
def _builder(dataset: str, subset: str | None):
    from datasets import load_dataset_builder

    return load_dataset_builder(dataset, subset)


def grouped(batches: Iterable[tuple[Place, Batch]]) -> Iterator[tuple[list[Place], list[Batch]]]:
    """Batches together, with their places, so that many small ones become a few worth sending to another process."""
    places, group, length = [], [], 0
    for place, batch in batches:
        places.append(place)
        group.append(batch)
        length += batch.length()
        if length >= BATCH_BYTES:
            yield places, group
            places, group, length = [], [], 0
    if group:
        yield places, group
