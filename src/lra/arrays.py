"""A task's examples as arrays on disk, read once from the official files, then mapped into memory, which jobs share.

FOLDER/TASK/{train,validation,test}/ has `values.bin`, all parts end to end, uint8; `ends.npy`, (parts · examples + 1,):
part i is from ends[i] to ends[i + 1]; and `labels.npy`, (examples,), both int64. about.json beside them describes the
rest."""

import hashlib
import json
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from src.cli import log, progress
from src.errors import RunFailed, UserError, reason
from src.files import sha256, write_json
from src.lra.sources import SPLITS, Example, amount, check, generated, read, stamps

FORMAT = 1  # raise it if the same files give other arrays
ABOUT = "about.json"
OPTIONS = ("layout", "folder", "size", "max_length", "hub", "validation", "split", "split_seed")
STEP = 64  # examples between two looks at the progress bar


class Examples:
    """The examples of a split, mapped into memory. Raises RunFailed if the files are missing or corrupt.

    `values`, (tokens,), uint8; `ends`, (parts · examples + 1,); `labels` and `lengths`, of the longest part,
    (examples,); `parts` of an example, 1 or 2. Processes that it is sent to map the files themselves."""

    def __init__(self, folder: Path, parts: int, count: int, tokens: int):
        self.folder, self.parts = folder, parts
        self._arguments = folder, parts, count, tokens
        try:
            self.values = np.memmap(folder / "values.bin", np.uint8, "r")
            self.ends = np.load(folder / "ends.npy", "r")
            self.labels = np.load(folder / "labels.npy")
        except (OSError, ValueError, EOFError):
            raise RunFailed(_corrupt(folder)) from None
        shapes = self.values.shape, self.ends.shape, self.labels.shape
        if shapes != ((tokens,), (parts * count + 1,), (count,)) or self.ends[-1] != tokens:
            raise RunFailed(_corrupt(folder))
        self.lengths = np.diff(self.ends).reshape(count, parts).max(1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        first = range(len(self))[index] * self.parts
        ends = self.ends[first : first + self.parts + 1].tolist()
        parts = tuple(np.asarray(self.values[start:end]) for start, end in pairwise(ends))
        return {"parts": parts, "label": int(self.labels[index])}

    def __reduce__(self) -> tuple:
        return Examples, self._arguments


@dataclass(frozen=True)
class Prepared:
    """A task's arrays: their folder and what about.json says of them."""

    folder: Path
    about: dict[str, Any]

    @property
    def digest(self) -> str:
        """The SHA-256 of all arrays, whatever files and folders they are from."""
        return self.about["digest"]

    def open(self, split: str) -> Examples:
        """Return the examples of "train", "validation" or "test". Raises RunFailed if they are missing or corrupt."""
        split = "test" if split == "validation" and self.about["validation"] == "test" else split
        try:
            stored = json.loads((self.folder / ABOUT).read_text(encoding="utf-8"))["digest"]
        except (OSError, ValueError, KeyError, TypeError):
            raise RunFailed(_corrupt(self.folder)) from None
        if stored != self.digest:
            found = "was rewritten by another command with other files or options"
            raise RunFailed(f"{self.folder} {found}; run this command again with another arrays_folder")
        about = self.about["splits"][split]
        return Examples(self.folder / split, self.about["parts"], about["examples"], about["tokens"])

    def check_labels(self, count: int) -> None:
        """Raise UserError for more classes than the task has labels."""
        found = max(len(split["classes"]) for split in self.about["splits"].values())
        if found > count:
            title = self.about["title"]
            raise UserError(f"{title} has {found} classes in its data, and {count} labels; add the missing labels")

    def summary(self) -> str:
        """Return sizes, lengths (mean and share truncated: of the training set) and origin in a line."""
        about, splits = self.about, self.about["splits"]
        counts = [f"{splits[name]['examples']:,}" for name in SPLITS if name in splits]
        line = f"{about['title']}: {' / '.join(counts)} examples"
        line += f", mean length {splits['train']['mean_length']:,.0f}"
        line += f", longest {max(split['longest'] for split in splits.values()):,}"
        if cut := splits["train"]["cut"]:
            line += f", {cut:.1%} truncated to {about['max_length']:,}"
        if skipped := sum(split["skipped"] for split in splits.values()):
            line += f", {skipped:,} empty {'image' if skipped == 1 else 'images'} skipped"
        line += "; validation on the test set" if "validation" not in splits else ""
        return f"{line}; {about['origin']}" if about["origin"] else line


def prepare(task: Any, lra_dir: str | None, folder: Path, progress_bar: bool = True) -> Prepared:
    """Return a task's arrays in `folder`; build them first if missing or outdated. A killed command leaves none; a
    concurrent one waits. Raises UserError for the source files, RunFailed if writing fails."""
    from filelock import FileLock, Timeout

    check(task, lra_dir)
    options = {name: getattr(task, name) for name in OPTIONS}
    origin = generated(task, lra_dir)
    source = {"format": FORMAT, **options, "origin": origin, "stamps": stamps(task, lra_dir)}
    if (prepared := _stored(folder / task.name, source)) is not None:
        return prepared
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f".{task.name}.lock")
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            log.info(f"{task.title}: waiting for another command, which reads its files into {folder}")
            held = lock.acquire()
        with held:
            if (prepared := _stored(folder / task.name, source, tell=True)) is None:
                prepared = _write(task, lra_dir, folder / task.name, source, progress_bar)
            return prepared
    except OSError as error:
        found = f"cannot write {task.title} to {folder}: {reason(error)}"
        raise RunFailed(f"{found}; free some space, or choose another folder") from None


def collate(items: Sequence[dict[str, Any]], *, pad_to_multiple_of: int = 8) -> dict[str, Any]:
    """Return a batch of items of Examples: `input_ids`, (batch, length), or (batch, 2, length) of pairs, int64, padded
    with 0; `attention_mask`, likewise, 1 for a token, unless all are; `labels`, (batch,), int64."""
    import torch

    rows, parts = [row for item in items for row in item["parts"]], len(items[0]["parts"])
    lengths = np.array([len(row) for row in rows])
    length = -(-lengths.max() // pad_to_multiple_of) * pad_to_multiple_of
    ids = np.zeros((len(rows), length), np.int64)
    for target, row in zip(ids, rows):
        target[: len(row)] = row
    arrays = {"input_ids": ids}
    if (lengths < length).any():
        arrays["attention_mask"] = (np.arange(length) < lengths[:, None]).astype(np.int64)
    shape = (len(items), parts, length) if parts > 1 else (len(items), length)
    batch = {name: torch.from_numpy(array.reshape(shape)) for name, array in arrays.items()}
    return {**batch, "labels": torch.tensor([item["label"] for item in items])}


def _corrupt(folder: Path) -> str:
    return f"{folder} is missing or corrupt; run the command again to rebuild it"


def _stored(folder: Path, source: dict[str, Any], tell: bool = False) -> Prepared | None:
    """Return the arrays in a folder, or None if they are missing, corrupt, or of other files or options."""
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        if about.pop("source") != source:
            if tell:
                log.info(f"{folder} is of other files or options; reading the files again")
            return None
        prepared = Prepared(folder, about)
        for split in about["splits"]:
            prepared.open(split)
        return prepared
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RunFailed):
        if tell and folder.exists():
            log.warning(f"{folder} is missing or corrupt; reading the files again")
        return None


def _write(task: Any, lra_dir: str | None, folder: Path, source: dict[str, Any], progress_bar: bool) -> Prepared:
    """Write a task's arrays under a temporary name, then rename it."""
    unfinished, old = (folder.with_name(f".{folder.name}.{state}") for state in ("unfinished", "old"))
    for path in (unfinished, old):  # of a killed command
        shutil.rmtree(path, ignore_errors=True)
    counts: Counter = Counter()
    total = amount(source["stamps"])
    try:
        unfinished.mkdir()
        splits, parts = {}, 1
        # A bar appears only if it takes longer than three seconds.
        with progress(total=total, desc=f"reading {task.title}", delay=3, leave=False) as bar:
            for split in SPLITS:
                if split == "validation" and task.validation == "test":
                    continue
                examples = read(task, lra_dir, split, counts)
                if progress_bar:
                    examples = _shown(examples, bar, counts)
                before = counts.copy()
                splits[split], parts = _write_split(unfinished / split, examples)
                of_split = {name: counts[name] - before[name] for name in ("parts", "cut", "skipped")}
                splits[split]["cut"] = of_split["cut"] / of_split["parts"]
                splits[split]["skipped"] = of_split["skipped"]
        about = {
            "title": task.title,
            "origin": source["origin"],
            "digest": sha256(
                [json.dumps([parts, [(name, about["sha256"]) for name, about in splits.items()]]).encode()]
            ),
            "parts": parts,
            "max_length": task.max_length,
            "validation": task.validation,
            "splits": splits,
        }
        write_json(unfinished / ABOUT, {**about, "source": source})
        if folder.exists():
            folder.rename(old)
        unfinished.rename(folder)
    finally:
        for path in (unfinished, old):
            shutil.rmtree(path, ignore_errors=True)
    return Prepared(folder, about)


def _shown(examples: Iterator[Example], bar: Any, counts: Counter) -> Iterator[Example]:
    for number, example in enumerate(examples):
        if number % STEP == 0:
            bar.update(counts["read"] - bar.n)
        yield example


def _write_split(folder: Path, examples: Iterator[Example]) -> tuple[dict[str, Any], int]:
    """Write the arrays of a split as its examples come; return what is told of them, and the parts of an example."""
    labels, ends, end, parts, digest = array("q"), array("q", [0]), 0, (), hashlib.sha256()
    folder.mkdir()
    with (folder / "values.bin").open("wb", buffering=1 << 20) as file:
        for parts, label in examples:
            for part in parts:
                file.write(part)
                digest.update(part)
                end += len(part)
                ends.append(end)
            labels.append(label)
        file.flush()
        os.fsync(file.fileno())  # some disks report that they are full only now
    for name, values in (("ends", ends), ("labels", labels)):
        np.save(folder / f"{name}.npy", np.frombuffer(values, np.int64))
        digest.update(values)
    lengths = np.diff(np.frombuffer(ends, np.int64))
    classes = np.bincount(np.frombuffer(labels, np.int64)) / len(labels)
    about = {
        "examples": len(labels),
        "tokens": end,
        "mean_length": float(lengths.mean()),
        "longest": int(lengths.max()),
        "classes": [round(share, 4) for share in classes.tolist()],
        "sha256": digest.hexdigest(),
    }
    return about, len(parts)
