"""A task's examples, from the official GLUE files, from the user's files, or from the Hub."""

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from src.cli import log
from src.data.readers import read_rows
from src.errors import UserError, first_line, reason
from src.files import file_digest, sha256
from src.glue.tasks import HUB, Task, check_labels, class_name

DIAGNOSTIC = "AX"  # GLUE's diagnostic test set, predicted by the MNLI model
DIAGNOSTIC_FILES = ("diagnostic/diagnostic.tsv", "AX/AX.tsv")
KINDS = ("train", "validation", "test")


@dataclass(frozen=True)
class Example:
    texts: tuple[str, ...]  # one or two
    label: float | None  # a class number, or the value of a regression; None in a test set
    id: int | str | None = field(default=None, compare=False)  # its row in the source


@dataclass(frozen=True)
class Data:
    task: Task  # with its labels
    train: list[Example]
    validation: dict[str, list[Example]]  # by split
    test: dict[str, list[Example]]

    @property
    def cost(self) -> int:
        """The number of characters that training reads: an estimate of a job's duration relative to others."""
        return self.task.epochs * sum(16 + sum(map(len, example.texts)) for example in self.train)


class Row(NamedTuple):
    number: int  # its line in a file
    texts: tuple[str, ...]
    label: Any


class Part(NamedTuple):
    """The rows of one file or Hub split, and its name."""

    source: str
    rows: list[Row]
    classes: tuple[str, ...] = ()  # in the order of their numbers, if the source has names for them


class Split(NamedTuple):
    """A split: its files, or the dataset, subset and split on the Hub."""

    kind: str  # one of KINDS
    name: str
    paths: tuple[Path, ...]
    hub: tuple[str | None, ...] = ()


def splits_of(task: Task, glue_dir: str | None, with_test: bool) -> list[Split]:
    """Return the sources of a task's splits. Raises UserError if it has none."""
    kinds = KINDS if with_test else KINDS[:2]
    if task.files:
        if with_test and "test" not in task.files:
            raise UserError(f"predict_test: tasks.{task.name}.files has no test; add one, or omit {task.name}")
        files = {kind: task.files[kind] for kind in kinds}
        return [Split(k, k, tuple(map(Path, [f] if isinstance(f, str) else f))) for k, f in files.items()]
    predicts_diagnostic = with_test and task.name == "mnli"
    if glue_dir is not None and task.folder is not None:
        names = {"train": ("train",), "validation": task.tsv_validation, "test": task.tsv_test}
        folder = Path(glue_dir) / task.folder
        splits = [Split(kind, name, (_official_file(task, folder, name),)) for kind in kinds for name in names[kind]]
        found = [path for name in DIAGNOSTIC_FILES if (path := Path(glue_dir, name)).is_file()]
        return splits + [Split("test", DIAGNOSTIC, (path,)) for path in found[:1] if predicts_diagnostic]
    if task.hub is None:
        raise UserError(f"glue_dir is not set, and tasks.{task.name} is in its folder {task.folder}; set glue_dir")
    names = {"train": (task.train,), "validation": task.validation, "test": task.test}
    splits = [Split(kind, name, (), (task.hub, task.subset, name)) for kind in kinds for name in names[kind]]
    diagnostic = Split("test", DIAGNOSTIC, (), (HUB, "ax", "test"))
    return splits + ([diagnostic] if predicts_diagnostic and task.hub == HUB else [])


def _official_file(task: Task, folder: Path, name: str) -> Path:
    """Return the official file of a split, under its publisher's name if only that exists."""
    path = folder / f"{name}.tsv"
    other = folder / task.tsv_other_names.get(name, path.name)
    return other if other.is_file() and not path.is_file() else path


def check_sources(tasks: Iterable[Task], glue_dir: str | None, with_test: bool = False) -> None:
    """Raise UserError for missing files, before any task is trained."""
    if glue_dir is not None and not Path(glue_dir).is_dir():
        raise UserError(f"glue_dir: {glue_dir} is not a directory; download GLUE to it, or omit glue_dir")
    for task in tasks:
        splits = splits_of(task, glue_dir, with_test)
        names = [split.name for split in splits if split.kind != "train"]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise UserError(
                f"tasks.{task.name}: {repeated[0]} is both a validation and a test split; omit predict_test"
            )
        for path in (path for split in splits for path in split.paths if not path.is_file()):
            if task.files:
                raise UserError(f"tasks.{task.name}.files: {path} does not exist; correct the path")
            raise UserError(f"glue_dir: {path} does not exist; add it, or omit {task.name} from tasks_to_run")


def digest(task: Task, glue_dir: str | None, with_test: bool = False) -> dict[str, Any]:
    """Identify a task's examples by kind of split: digests of the files, or the names on the Hub."""
    found: dict[str, Any] = {}
    for split in splits_of(task, glue_dir, with_test):
        try:
            content = [file_digest(path) for path in split.paths] or list(split.hub[:2])
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be read ({reason(error)}); fix or replace it") from None
        found.setdefault(split.kind, {})[split.name] = content
    return found


def texts_digest(examples: Iterable[Example]) -> str:
    """Return the SHA-256 of texts in order, ignoring white space, in which GLUE's files and the Hub differ."""
    texts = [[" ".join(text.split()) for text in example.texts] for example in examples]
    return sha256([json.dumps(texts).encode()])


def read_task(task: Task, glue_dir: str | None, with_test: bool = False) -> Data:
    """Return the examples of a task. Raises UserError with the file and line, or the dataset, that cannot be read."""
    check_sources([task], glue_dir, with_test)
    splits = splits_of(task, glue_dir, with_test)
    parts = {
        split: [_read_file(task, split, path) for path in split.paths] or [_read_hub(task, split)] for split in splits
    }
    if not task.regression and not task.labels:
        task = replace(task, labels=_find_labels(task, parts[splits[0]]))
        check_labels(task)
        positive = f"; f1 is that of {task.labels[1]}" if "f1" in task.metrics else ""
        log.info(f"{task.title}: the labels of the training set are {', '.join(task.labels)}{positive}")
    examples: dict[str, dict[str, list[Example]]] = {kind: {} for kind in KINDS}
    for split, rows in parts.items():
        examples[split.kind][split.name] = _examples(task, split, rows)
    (train,) = examples["train"].values()
    if splits[0].paths and splits[0].paths[0].name in task.tsv_other_names.values():
        train = _without_validation(splits[0].paths[0], train, examples["validation"])
    return Data(task, train, examples["validation"], examples["test"])


def _without_validation(path: Path, train: list[Example], validation: dict[str, list[Example]]) -> list[Example]:
    """Remove the development set that GLUE took out of the publisher's file of MRPC."""
    held_out = {example.texts for examples in validation.values() for example in examples}
    kept = [example for example in train if example.texts not in held_out]
    log.info(f"{path}: {len(train) - len(kept):,} rows are in the development set and are not trained on")
    if not kept:
        raise UserError(f"{path}: all of its rows are in the development set; replace it with the training set")
    return kept


def _examples(task: Task, split: Split, parts: list[Part]) -> list[Example]:
    examples, unit = [], "line" if split.paths else "row"
    for source, rows, _ in parts:
        for row in rows:
            label = None if split.kind == "test" else parse_label(task, row.label, f"{source}, {unit} {row.number}")
            examples.append(Example(row.texts, label, row.number if len(parts) == 1 else f"{source}:{row.number}"))
        if not rows:
            raise UserError(f"{source} holds no examples{'' if split.kind == 'test' else ' with a label'}")
    return examples


def _find_labels(task: Task, parts: list[Part]) -> tuple[str, ...]:
    """Return the labels of a training set, in the order of its source, or sorted: as numbers if all are integers."""
    rows = [(part.source, row) for part in parts for row in part.rows]
    for source, row in rows:
        if isinstance(row.label, list | dict):
            raise UserError(f"{source}, line {row.number}: {row.label!r} is not a single label; fix the row")
    count = Counter(class_name(row.label) for _, row in rows)
    if len(count) > 1000:
        raise UserError(f"tasks.{task.name}: {len(count):,} labels in {task.label}; set kind: regression, or fix label")
    if all(isinstance(column, int) for column in (*task.columns, task.label)):
        _check_no_header(parts, count)
    if len(count) < 2:
        none = f"{parts[0].source} holds no examples with a label"
        found = f"all rows have the label {next(iter(count))!r}" if count else none
        raise UserError(f"tasks.{task.name}: {found}; there is nothing to learn")
    integers = all(name.removeprefix("-").isdecimal() for name in count)
    return parts[0].classes or tuple(sorted(count, key=lambda name: (int(name) if integers else 0, name)))


def _check_no_header(parts: list[Part], count: Counter[str]) -> None:
    """Raise UserError if the first row's label occurs nowhere else, as a column's name would, while others repeat."""
    first = Counter(class_name(part.rows[0].label) for part in parts if part.rows and part.rows[0].number == 1)
    for name, times in first.items():
        if count[name] == times < max(count.values()):
            found = f"{parts[0].source}, line 1: the label {name!r} occurs nowhere else, as if it were a header"
            raise UserError(f"{found}; give columns and label by name, or list all labels")


def parse_label(task: Task, label: Any, where: str) -> float:
    """Return a label as a number: the number of a class, given by name or number, or the value of a regression."""
    name = class_name(label)
    if name in task.labels:
        return float(task.labels.index(name))
    value = _number(label)
    if task.regression:
        if math.isfinite(value):
            return value
        raise UserError(f"{where}: the label {label!r} is not a number; fix or remove the row")
    if math.isfinite(value) and class_name(value) in task.labels:  # the text 1.0 is 1, too
        return float(task.labels.index(class_name(value)))
    if value in range(len(task.labels)) and all(math.isnan(_number(known)) for known in task.labels):
        return value
    raise UserError(f"{where}: the label {label!r} must be one of {', '.join(task.labels)}; fix or remove the row")


def _number(label: Any) -> float:
    """Return a label as a number, or NaN if it is not one."""
    try:
        return math.nan if isinstance(label, bool) else float(label)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _read_file(task: Task, split: Split, path: Path) -> Part:
    columns, label, is_test = task.columns, task.label, split.kind == "test"
    if not task.files:
        columns = (task.tsv_test_columns if is_test else ()) or task.tsv_columns or columns
        label = label if task.tsv_label is None else task.tsv_label
    wanted = columns if is_test else (*columns, label)
    malformed = 0 if is_test else task.malformed_rows  # every row of a test set needs a prediction
    rows = []
    for number, cells in read_rows(path, wanted, malformed, tab_separated=not task.files):
        texts, value = cells[: len(columns)], None if is_test else cells[-1]
        for column, text in zip(columns, texts):
            if not isinstance(text, str):
                raise UserError(f"{path}, line {number}: {column} holds {text!r}, not text; fix or remove the row")
        if not is_test and _is_missing(value) and task.unlabelled != "":
            fix = f'fix or remove the row, or set tasks.{task.name}.unlabelled to "" to skip such rows'
            raise UserError(f"{path}, line {number}: no label in {label}; {fix}")
        rows.append(Row(number, texts, value))
    return Part(str(path), _labelled(task, split, str(path), rows))


def _is_missing(value: Any) -> bool:
    return value is None or value == "" or value != value  # NaN


def _labelled(task: Task, split: Split, source: str, rows: list[Row]) -> list[Row]:
    """Return the rows that have a label, and log how many do not."""
    if split.kind == "test":
        return rows
    kept = [row for row in rows if not _is_missing(row.label) and class_name(row.label) != task.unlabelled]
    if len(kept) < len(rows):
        mark = f" ({task.unlabelled})" if task.unlabelled else ""
        log.info(f"{source}: skipped {len(rows) - len(kept):,} rows without a label{mark}")
    return kept


def _read_hub(task: Task, split: Split) -> Part:
    """Read a split from the Hub, or from a folder in the Hub's format. Raises UserError if that fails."""
    from datasets import ClassLabel, load_dataset

    hub, subset, split_name = split.hub
    name = hub if subset is None else f"{hub} ({subset})"
    source = f"{name}, {split_name}"
    try:
        table = load_dataset(hub, subset, split=split_name)
    except Exception as error:  # whatever the Hub's clients raise
        fix = "set glue_dir to a folder with the GLUE files" if task.folder else f"check tasks.{task.name}.hub"
        raise UserError(f"cannot read {source}, from the Hugging Face Hub: {first_line(error)}; {fix}") from None
    is_test = split.kind == "test"
    wanted = task.columns if is_test else (*task.columns, task.label)
    if missing := [str(column) for column in wanted if column not in table.column_names]:
        raise UserError(f"{name}: no column {', '.join(missing)} (its columns are {', '.join(table.column_names)})")
    feature = None if is_test else table.features[task.label]
    classes = tuple(feature.names or ()) if isinstance(feature, ClassLabel) else ()
    if classes and task.labels and set(classes) != set(task.labels):
        found = f"its labels are {', '.join(classes)}, but tasks.{task.name}.labels are {', '.join(task.labels)}"
        raise UserError(f"{name}: {found}; set labels to the former")
    content, rows = table.select_columns(list(wanted))[:], []
    for number, cells in enumerate(zip(*(content[column] for column in wanted)), 1):
        value = None if is_test else cells[-1]
        if classes and value is not None:
            value = classes[value] if value >= 0 else None  # -1 marks a row without a label on the Hub
        texts = cells[: len(task.columns)]
        if not all(isinstance(text, str) for text in texts):
            raise UserError(f"{source}, row {number}: {texts!r} is not text; set columns to text columns")
        rows.append(Row(number, texts, value))
    return Part(source, _labelled(task, split, source, rows), classes)
