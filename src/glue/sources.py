"""A task's examples, from the official GLUE files, from files of one's own, or from the Hub."""

import csv
import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from src.cli import UserError, log
from src.glue.tasks import Task, check_labels

ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet")
Columns = tuple[str | int, ...]


@dataclass(frozen=True)
class Example:
    texts: tuple[str, ...]  # one or two
    label: float | None  # a class number, or the value of a regression; None in a test set


@dataclass(frozen=True)
class Data:
    task: Task  # with its labels
    train: list[Example]
    validation: dict[str, list[Example]]  # by split
    test: dict[str, list[Example]]

    @property
    def work(self) -> int:
        """What training costs, in characters read: to tell large jobs from small ones, and the time left."""
        return self.task.epochs * sum(16 + sum(map(len, example.texts)) for example in self.train)


class Row(NamedTuple):
    """A row as it stands in a source: its number there, its texts and its label."""

    number: int
    texts: tuple[str, ...]
    label: Any


class Split(NamedTuple):
    """A split, and the files it is in; none if it is on the Hub."""

    kind: str  # train, validation or test
    name: str
    paths: tuple[Path, ...]


def splits_of(task: Task, glue_dir: str | None, with_test: bool) -> list[Split]:
    """Where each split of a task lies. Raises UserError for a task that is nowhere."""
    kinds = ("train", "validation", "test") if with_test else ("train", "validation")
    if task.files:
        if with_test and "test" not in task.files:
            raise UserError(f"predict_test: tasks.{task.name}.files names no test file; add one, or leave out {task.name}")  # fmt: skip
        return [Split(kind, kind, _paths(task.files[kind])) for kind in kinds]
    if glue_dir is not None and task.folder is not None:
        names = {"train": ("train",), "validation": task.tsv_validation, "test": task.tsv_test}
        folder = Path(glue_dir) / task.folder
        return [Split(kind, name, (_official(task, folder, name),)) for kind in kinds for name in names[kind]]
    if task.hub is None:
        raise UserError(f"tasks.{task.name} lies in {task.folder} below glue_dir, which is not set; set glue_dir, or give the task files")  # fmt: skip
    names = {"train": (task.train,), "validation": task.validation, "test": task.test}
    return [Split(kind, name, ()) for kind in kinds for name in names[kind]]


def _paths(given: str | list[str]) -> tuple[Path, ...]:
    return tuple(map(Path, [given] if isinstance(given, str) else given))


def _official(task: Task, folder: Path, name: str) -> Path:
    """The official file of a split, under its other name if that one alone is there."""
    path = folder / f"{name}.tsv"
    other = folder / task.tsv_other_names.get(name, path.name)
    return other if other.is_file() and not path.is_file() else path


def check_sources(tasks: Iterable[Task], glue_dir: str | None, with_test: bool = False) -> None:
    """Raise UserError for files that are not there, before any task is trained."""
    if glue_dir is not None and not Path(glue_dir).is_dir():
        raise UserError(f"glue_dir: the folder {glue_dir} does not exist; download GLUE to it, or leave glue_dir out")
    for task in tasks:
        for split in splits_of(task, glue_dir, with_test):
            for path in split.paths:
                check_file(task, path)


def check_file(task: Task, path: Path) -> None:
    if path.is_file():
        return
    if task.files:
        raise UserError(f"tasks.{task.name}.files: {path} is not there; mend its path")
    raise UserError(f"glue_dir: {path} is not there; put {task.title}'s {path.name} at that place, or leave {task.name} out of tasks_to_run")  # fmt: skip


def digest(task: Task, glue_dir: str | None, with_test: bool = False) -> dict[str, Any]:
    """What the examples are, shortly, by kind of split: digests of the files, or the names on the Hub."""
    found: dict[str, Any] = {}
    for split in splits_of(task, glue_dir, with_test):
        content = [_sha256(path) for path in split.paths] or [task.hub, task.subset]
        found.setdefault(split.kind, {})[split.name] = content
    return found


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            found.update(part)
    return found.hexdigest()


def read_task(task: Task, glue_dir: str | None, with_test: bool = False) -> Data:
    """The examples of a task. Raises UserError naming file and line, or the data set, that cannot be read."""
    check_sources([task], glue_dir, with_test)
    splits = splits_of(task, glue_dir, with_test)
    sources = {split: _read_hub(task, split) if not split.paths else [] for split in splits}
    for split in splits:
        for path in split.paths:
            sources[split].append((str(path), _read_path(task, split, path)))
    if not task.regression and not task.labels:
        task = replace(task, labels=_found_labels(task, [row.label for _, rows in sources[splits[0]] for row in rows]))
        check_labels(task)
        log.info(f"{task.title}: the labels of the training set are {', '.join(task.labels)}")
    examples = {split: _examples(task, split, parts) for split, parts in sources.items()}
    of_kind = {kind: {s.name: found for s, found in examples.items() if s.kind == kind} for kind in ("train", "validation", "test")}  # fmt: skip
    (train,) = of_kind["train"].values()
    if splits[0].paths and splits[0].paths[0].name in task.tsv_other_names.values():
        train = _without_validation(splits[0].paths[0], train, of_kind["validation"])
    return Data(task, train, of_kind["validation"], of_kind["test"])


def _without_validation(path: Path, train: list[Example], validation: dict[str, list[Example]]) -> list[Example]:
    """MRPC's own file holds the training set and the development set that GLUE took out of it."""
    held_out = {example.texts for examples in validation.values() for example in examples}
    kept = [example for example in train if example.texts not in held_out]
    log.info(f"{path}: {len(train) - len(kept):,} rows are in the development set and are not trained on")
    if not kept:
        raise UserError(f"{path}: all of its rows are in the development set; put the training set there")
    return kept


def _examples(task: Task, split: Split, parts: list[tuple[str, list[Row]]]) -> list[Example]:
    examples = []
    for place, rows in parts:
        for row in rows:
            label = None if split.kind == "test" else parse_label(task, row.label, f"{place}, line {row.number}")
            examples.append(Example(row.texts, label))
        if not rows:
            raise UserError(f"{place} holds no examples")
    return examples


def _found_labels(task: Task, values: list[Any]) -> tuple[str, ...]:
    """The different labels of a training set, in order, by number where all are whole numbers."""
    names = {str(value) for value in values}
    if len(names) > 1000:
        raise UserError(f"tasks.{task.name}: {len(names):,} different labels in column {task.label}; set kind: regression, or name the label's column")  # fmt: skip
    whole = all(name.removeprefix("-").isdecimal() for name in names)
    found = tuple(sorted(names, key=int if whole else None))
    if len(found) < 2:
        raise UserError(f"tasks.{task.name}: all rows of the training set have the label {found[0]!r}; there is nothing to learn")  # fmt: skip
    return found


def parse_label(task: Task, label: Any, place: str) -> float:
    """A label as a number: a class by name, or by number where no name looks like one; or the value of a regression."""
    name = str(label)
    if name in task.labels:
        return float(task.labels.index(name))
    try:
        value = float("nan") if isinstance(label, bool) else float(label)
    except (TypeError, ValueError):
        value = float("nan")
    if task.regression:
        if math.isfinite(value):
            return value
        raise UserError(f"{place}: the label {label!r} is not a number; mend or remove the row")
    if value in range(len(task.labels)) and not any(_is_number(known) for known in task.labels):
        return value
    raise UserError(f"{place}: the label {label!r} is not one of {', '.join(task.labels)}; mend or remove the row")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _read_path(task: Task, split: Split, path: Path) -> list[Row]:
    columns, label = task.columns, task.label
    if not task.files:
        columns = task.tsv_columns or columns
        label = label if task.tsv_label is None else task.tsv_label
        if split.kind == "test":
            columns = task.tsv_test_columns or columns
    wanted = columns if split.kind == "test" else (*columns, label)
    may_skip = 0 if split.kind == "test" else task.malformed_rows  # each row of a test set needs its prediction
    rows = read_rows(path, wanted, may_skip, "tab" if not task.files else None)
    found = []
    for number, cells in rows:
        texts, value = cells[: len(columns)], cells[-1] if split.kind != "test" else None
        for column, text in zip(columns, texts):
            if not isinstance(text, str):
                raise UserError(f"{path}, line {number}: no text in {column} but {text!r}; mend or remove the row")
        if split.kind != "test" and (value is None or value == ""):
            raise UserError(f"{path}, line {number}: no label in {label}; mend or remove the row")
        found.append(Row(number, tuple(texts), value))
    return _labelled(task, str(path), found)


def _labelled(task: Task, place: str, rows: list[Row]) -> list[Row]:
    if task.unlabelled is None:
        return rows
    kept = [row for row in rows if row.label != task.unlabelled]
    if len(kept) < len(rows):
        log.info(f"{place}: left out {len(rows) - len(kept):,} rows without a label ({task.unlabelled})")
    return kept


def read_rows(path: Path, wanted: Columns, may_skip: int = 0, form: str | None = None) -> Iterator[tuple[int, tuple]]:
    """Line number and wanted columns of every row of a .csv, .tsv, .jsonl or .parquet file.

    In .tsv, quotes are literal; in .csv they enclose a cell. `may_skip` rows of another length than the header are left
    out. Raises UserError naming file and line of a row that cannot be read.
    """
    if form == "tab" or path.suffix == ".tsv":
        return _pick(path, _tsv_cells(path), wanted, may_skip)
    if path.suffix == ".csv":
        return _pick(path, _csv_cells(path), wanted, may_skip)
    if path.suffix == ".jsonl":
        return _jsonl_rows(path, wanted)
    if path.suffix == ".parquet":
        return _parquet_rows(path, wanted)
    raise UserError(f"{path}: cannot read {path.suffix or 'a file without an ending'}; give {', '.join(ENDINGS)}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their ends, by the line feed alone, without a byte-order mark."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise UserError(f"{path}, line {number}: not valid UTF-8; mend the file or convert it to UTF-8") from None  # fmt: skip


def _tsv_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    for number, line in _lines(path):
        if row := line.rstrip("\r\n"):
            yield number, row.split("\t")


def _csv_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader((line for _, line in _lines(path)), strict=True)
    begin = 1
    try:
        for row in reader:
            if row:
                yield begin, row
            begin = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {begin}: not valid CSV ({error}); mend the row") from None


def _pick(
    path: Path, rows: Iterator[tuple[int, list[str]]], wanted: Columns, may_skip: int
) -> Iterator[tuple[int, tuple]]:
    """The wanted columns, by the names of a header, or by number. Every row is as long as the first."""
    places, width, skipped = [column for column in wanted if isinstance(column, int)], 0, []
    for number, row in rows:
        if not width:
            width = len(row)
            if len(places) < len(wanted):
                if missing := [str(column) for column in wanted if column not in row]:
                    raise UserError(f"{path}: its header has no {', '.join(missing)} (it has {', '.join(row)})")
                places = [row.index(str(column)) for column in wanted]
                continue
        if len(row) != width or max(places) >= width:
            if len(skipped) < may_skip:
                skipped.append(number)
                continue
            why = f", after {may_skip} others that were left out" if may_skip else ""
            raise UserError(f"{path}, line {number}: {len(row)} columns instead of {max(width, max(places) + 1)}{why}; mend or remove the row")  # fmt: skip
        yield number, tuple(row[place] for place in places)
    if skipped:
        shown = ", ".join(map(str, skipped[:5])) + (", …" if len(skipped) > 5 else "")
        log.info(f"{path}: left out {len(skipped)} rows that are not {width} columns long (line {shown}), as the official file has some")  # fmt: skip


def _jsonl_rows(path: Path, wanted: Columns) -> Iterator[tuple[int, tuple]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: not valid JSON ({error.msg}); mend or remove the line") from None
        if not isinstance(row, dict) or any(column not in row for column in wanted):
            keys = f"its keys are {', '.join(row)}" if isinstance(row, dict) else "it is no object"
            missing = [str(column) for column in wanted if not isinstance(row, dict) or column not in row]
            raise UserError(f"{path}, line {number}: no {', '.join(missing)} ({keys})")
        yield number, tuple(row[column] for column in wanted)


def _parquet_rows(path: Path, wanted: Columns) -> Iterator[tuple[int, tuple]]:
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        if missing := [str(column) for column in wanted if column not in file.schema_arrow.names]:
            raise UserError(f"{path} has no column {', '.join(missing)} (it has {', '.join(file.schema_arrow.names)})")
        number = 0
        for batch in file.iter_batches(columns=list(wanted)):
            for row in zip(*(batch.column(column).to_pylist() for column in wanted)):
                number += 1
                yield number, row
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error})") from None


def _read_hub(task: Task, split: Split) -> list[tuple[str, list[Row]]]:
    """The rows of a split on the Hub (or in a folder that `datasets` reads). Raises UserError where it does not answer."""
    from datasets import ClassLabel, load_dataset

    name = task.hub if task.subset is None else f"{task.hub} ({task.subset})"
    try:
        table = load_dataset(task.hub, task.subset, split=split.name)
    except Exception as error:  # whatever the Hub's clients raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        way_out = "set glue_dir to a folder with the GLUE files" if task.folder else f"mend tasks.{task.name}.hub"
        raise UserError(f"cannot read {name}, {split.name}, from the Hugging Face Hub: {reason}; {way_out}") from None
    wanted = task.columns if split.kind == "test" else (*task.columns, task.label)
    if missing := [str(column) for column in wanted if column not in table.column_names]:
        raise UserError(f"{name} has no column {', '.join(missing)} (it has {', '.join(table.column_names)})")
    feature = table.features.get(task.label)
    names = feature.names if isinstance(feature, ClassLabel) and tuple(feature.names) == (task.labels or tuple(feature.names)) else None  # fmt: skip
    content, rows = table.select_columns(list(wanted))[:], []
    for number, cells in enumerate(zip(*(content[column] for column in wanted)), 1):
        value = None if split.kind == "test" else cells[-1]
        if names is not None and value is not None:
            value = names[value] if value >= 0 else task.unlabelled
        texts = cells[: len(task.columns)]
        if not all(isinstance(text, str) for text in texts):
            raise UserError(f"{name}, {split.name}, row {number}: {texts!r} is no text; name the text columns")
        rows.append(Row(number, texts, value))
    return [(f"{name}, {split.name}", _labelled(task, name, rows))]
