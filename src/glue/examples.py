"""A task's examples, from the official GLUE files, from files of one's own, or from the Hub."""

import csv
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from src.cli import log
from src.data.readers import parse_json, python_values, refuse_half_pair
from src.errors import UserError, first_line
from src.glue.tasks import HUB, Task, check_labels, class_name

DIAGNOSTIC = "AX"  # GLUE's set of test examples that MNLI's model is to predict
DIAGNOSTIC_FILES = ("diagnostic/diagnostic.tsv", "AX/AX.tsv")
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


class Part(NamedTuple):
    """Rows of one file or of a data set on the Hub, and its name."""

    place: str
    rows: list[Row]
    classes: tuple[str, ...] = ()  # by their numbers, where the source tells


class Split(NamedTuple):
    """A split, and the files it is in, or the data set, subset and split that it is on the Hub."""

    kind: str  # train, validation or test
    name: str
    paths: tuple[Path, ...]
    hub: tuple[str | None, ...] = ()


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
        found = [Split(kind, name, (_official(task, folder, name),)) for kind in kinds for name in names[kind]]
        places = [path for path in (Path(glue_dir) / place for place in DIAGNOSTIC_FILES) if path.is_file()]
        return found + [Split("test", DIAGNOSTIC, (path,)) for path in places[:1] if with_test and task.name == "mnli"]
    if task.hub is None:
        raise UserError(f"tasks.{task.name} lies in {task.folder} below glue_dir, which is not set; set glue_dir, or give the task files")  # fmt: skip
    names = {"train": (task.train,), "validation": task.validation, "test": task.test}
    found = [Split(kind, name, (), (task.hub, task.subset, name)) for kind in kinds for name in names[kind]]
    diagnostic = with_test and task.name == "mnli" and task.hub == HUB
    return found + ([Split("test", DIAGNOSTIC, (), (HUB, "ax", "test"))] if diagnostic else [])


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
        splits = splits_of(task, glue_dir, with_test)
        predicted = [split.name for split in splits if split.kind != "train"]
        if twice := [name for name in predicted if predicted.count(name) > 1]:
            raise UserError(f"tasks.{task.name}: {twice[0]} is to be predicted twice, for validation and for the test; name another split, or leave predict_test out")  # fmt: skip
        for split in splits:
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
        content = [_sha256(path) for path in split.paths] or list(split.hub[:2])
        found.setdefault(split.kind, {})[split.name] = content
    return found


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while part := file.read(2**20):
                found.update(part)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); mend that, or name another file") from None  # fmt: skip
    return found.hexdigest()


def texts_digest(examples: Iterable[Example]) -> str:
    """SHA-256 of texts in their order, whatever their spaces, of which GLUE's files and the Hub have not all the same."""
    texts = [[" ".join(text.split()) for text in example.texts] for example in examples]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def read_task(task: Task, glue_dir: str | None, with_test: bool = False) -> Data:
    """The examples of a task. Raises UserError naming file and line, or the data set, that cannot be read."""
    check_sources([task], glue_dir, with_test)
    splits = splits_of(task, glue_dir, with_test)
    sources = {
        split: [_read_path(task, split, path) for path in split.paths] or [_read_hub(task, split)] for split in splits
    }
    if not task.regression and not task.labels:
        task = replace(task, labels=_found_labels(task, sources[splits[0]]))
        check_labels(task)
        of_which = f"; f1 is that of {task.labels[1]}" if "f1" in task.metrics else ""
        log.info(f"{task.title}: the labels of the training set are {', '.join(task.labels)}{of_which}")
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


def _examples(task: Task, split: Split, parts: list[Part]) -> list[Example]:
    examples, unit = [], "line" if split.paths else "row"
    for place, rows, _ in parts:
        for row in rows:
            label = None if split.kind == "test" else parse_label(task, row.label, f"{place}, {unit} {row.number}")
            examples.append(Example(row.texts, label))
        if not rows:
            raise UserError(f"{place} holds no examples{'' if split.kind == 'test' else ' with a label'}")
    return examples


def _found_labels(task: Task, parts: list[Part]) -> tuple[str, ...]:
    """The labels of a training set: in the order of its source, or sorted, by number where all are whole numbers."""
    for place, rows, _ in parts:
        for row in rows:
            if isinstance(row.label, list | dict):
                raise UserError(f"{place}, line {row.number}: {row.label!r} is no single label; name the label's column, or mend the row")  # fmt: skip
    names = {class_name(row.label) for part in parts for row in part.rows}
    if len(names) > 1000:
        raise UserError(f"tasks.{task.name}: {len(names):,} different labels in column {task.label}; set kind: regression, or name the label's column")  # fmt: skip
    if not task.regression and all(isinstance(column, int) for column in (*task.columns, task.label)):
        _refuse_header(task, parts)
    whole = all(name.removeprefix("-").isdecimal() for name in names)
    if len(names) < 2:
        shown = f"all rows of the training set have the label {names.pop()!r}" if names else f"{parts[0].place} holds no examples with a label"  # fmt: skip
        raise UserError(f"tasks.{task.name}: {shown}; there is nothing to learn")
    return parts[0].classes or tuple(sorted(names, key=lambda name: (int(name) if whole else 0, name)))


def _refuse_header(task: Task, parts: list[Part]) -> None:
    """Raise UserError where the first row's label occurs nowhere else, as the name of a column would, and others do."""
    times = Counter(class_name(row.label) for part in parts for row in part.rows)
    first = Counter(class_name(part.rows[0].label) for part in parts if part.rows and part.rows[0].number == 1)
    for name, count in first.items():
        if times[name] == count < max(times.values()):
            raise UserError(f"{parts[0].place}, line 1: its label {name!r} occurs in no other line, as if it were a header; then give columns and label by their names, or else name all labels")  # fmt: skip


def parse_label(task: Task, label: Any, place: str) -> float:
    """A label as a number: a class by name, or by number where no name looks like one; or the value of a regression."""
    name = class_name(label)
    if name in task.labels:
        return float(task.labels.index(name))
    try:
        value = float("nan") if isinstance(label, bool) else float(label)
    except (TypeError, ValueError, OverflowError):
        value = float("nan")
    if task.regression:
        if math.isfinite(value):
            return value
        raise UserError(f"{place}: the label {label!r} is not a number; mend or remove the row")
    if math.isfinite(value) and class_name(value) in task.labels:  # the text 1.0 is 1, too
        return float(task.labels.index(class_name(value)))
    if value in range(len(task.labels)) and not any(_is_number(known) for known in task.labels):
        return value
    raise UserError(f"{place}: the label {label!r} is not one of {', '.join(task.labels)}; mend or remove the row")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _read_path(task: Task, split: Split, path: Path) -> Part:
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
        if split.kind != "test" and _no_label(value) and task.unlabelled != "":
            raise UserError(f'{path}, line {number}: no label in {label}; mend or remove the row, or set tasks.{task.name}.unlabelled to "" to leave such rows out')  # fmt: skip
        found.append(Row(number, tuple(texts), value))
    return Part(str(path), _labelled(task, split, str(path), found))


def _no_label(value: Any) -> bool:
    return value is None or value == "" or value != value  # NaN


def _labelled(task: Task, split: Split, place: str, rows: list[Row]) -> list[Row]:
    """The rows that have a label, and the others counted."""
    if split.kind == "test":
        return rows
    kept = [row for row in rows if not _no_label(row.label) and class_name(row.label) != task.unlabelled]
    if len(kept) < len(rows):
        mark = f" ({task.unlabelled})" if task.unlabelled else ""
        log.info(f"{place}: left out {len(rows) - len(kept):,} rows without a label{mark}")
    return kept


def read_rows(path: Path, wanted: Columns, may_skip: int = 0, form: str | None = None) -> Iterator[tuple[int, tuple]]:
    """Line number and wanted columns of every row of a .csv, .tsv, .jsonl or .parquet file.

    In .tsv, quotes are literal; in .csv they enclose a cell. `may_skip` rows of another length than the header are left
    out. Raises UserError naming file and line of a row that cannot be read.
    """
    ending = path.suffix.lower()
    if form == "tab" or ending == ".tsv":
        return _pick(path, _tsv_cells(path), wanted, may_skip)
    if ending == ".csv":
        return _pick(path, _csv_cells(path), wanted, may_skip)
    if ending == ".jsonl":
        return _jsonl_rows(path, wanted)
    if ending == ".parquet":
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
        row = line.rstrip("\r\n")
        yield number, row.split("\t") if row else []


def _csv_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader((line for _, line in _lines(path)), strict=True)
    begin = 1
    try:
        for row in reader:
            yield begin, row
            begin = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {begin}: not valid CSV ({error}); mend the row") from None


def _pick(
    path: Path, rows: Iterator[tuple[int, list[str]]], wanted: Columns, may_skip: int
) -> Iterator[tuple[int, tuple]]:
    """The wanted columns, by the names of a header, or by number. Every row is as long as the first; empty ones are left out.

    But not where there is one column: an empty text that others follow.
    """
    names = [column for column in wanted if isinstance(column, str)]
    places, width, skipped, empty = [column for column in wanted if isinstance(column, int)], 0, [], []
    for number, row in rows:
        if not row:
            empty.append(number)
            continue
        if not width:
            width = len(row)
            if names:
                if missing := [name for name in names if name not in row]:
                    raise UserError(f"{path}: its header has no {', '.join(missing)} (it has {', '.join(row)})")
                _refuse_twice(path, names, row)
                places = [row.index(column) if isinstance(column, str) else column for column in wanted]
                empty.clear()
                continue
        if width == 1:
            yield from ((line, ("",) * len(places)) for line in empty)
        empty.clear()
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


def _refuse_twice(path: Path, wanted: Iterable[str], there: list[str]) -> None:
    if twice := [name for name in wanted if there.count(name) > 1]:
        raise UserError(f"{path}: two of its columns are called {twice[0]}; rename one")


def _jsonl_rows(path: Path, wanted: Columns) -> Iterator[tuple[int, tuple]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        row = parse_json(line, path, number)
        if not isinstance(row, dict) or any(column not in row for column in wanted):
            keys = f"its keys are {', '.join(row)}" if isinstance(row, dict) else "it is no object"
            missing = [str(column) for column in wanted if not isinstance(row, dict) or column not in row]
            raise UserError(f"{path}, line {number}: no {', '.join(missing)} ({keys})")
        cells = tuple(row[column] for column in wanted)
        refuse_half_pair("".join(cell for cell in cells if isinstance(cell, str)), path, number)
        yield number, cells


def _parquet_rows(path: Path, wanted: Columns) -> Iterator[tuple[int, tuple]]:
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        if missing := [str(column) for column in wanted if column not in file.schema_arrow.names]:
            raise UserError(f"{path} has no column {', '.join(missing)} (it has {', '.join(file.schema_arrow.names)})")
        _refuse_twice(path, wanted, file.schema_arrow.names)
        number = 0
        for batch in file.iter_batches(columns=list(wanted)):
            for row in zip(*(python_values(batch.column(column), path, number) for column in wanted)):
                number += 1
                yield number, row
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error})") from None


def _read_hub(task: Task, split: Split) -> Part:
    """The rows of a split on the Hub (or in a folder that `datasets` reads). Raises UserError where it does not answer."""
    from datasets import ClassLabel, load_dataset

    hub, subset, split_name = split.hub
    name = hub if subset is None else f"{hub} ({subset})"
    try:
        table = load_dataset(hub, subset, split=split_name)
    except Exception as error:  # whatever the Hub's clients raise
        reason = first_line(error)
        way_out = "set glue_dir to a folder with the GLUE files" if task.folder else f"mend tasks.{task.name}.hub"
        raise UserError(f"cannot read {name}, {split_name}, from the Hugging Face Hub: {reason}; {way_out}") from None
    wanted = task.columns if split.kind == "test" else (*task.columns, task.label)
    if missing := [str(column) for column in wanted if column not in table.column_names]:
        raise UserError(f"{name} has no column {', '.join(missing)} (it has {', '.join(table.column_names)})")
    feature = None if split.kind == "test" else table.features[task.label]
    classes = tuple(feature.names or ()) if isinstance(feature, ClassLabel) else ()
    if classes and task.labels and set(classes) != set(task.labels):
        raise UserError(f"{name}: its labels are {', '.join(classes)}, and those of tasks.{task.name} are {', '.join(task.labels)}; set labels to the former")  # fmt: skip
    content, rows = table.select_columns(list(wanted))[:], []
    for number, cells in enumerate(zip(*(content[column] for column in wanted)), 1):
        value = None if split.kind == "test" else cells[-1]
        if classes and value is not None:
            value = classes[value] if value >= 0 else None  # as the Hub marks what nobody has labelled
        texts = cells[: len(task.columns)]
        if not all(isinstance(text, str) for text in texts):
            raise UserError(f"{name}, {split_name}, row {number}: {texts!r} is no text; name the text columns")
        rows.append(Row(number, texts, value))
    place = f"{name}, {split_name}"
    return Part(place, _labelled(task, split, place, rows), classes)
