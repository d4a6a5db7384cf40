"""A task's examples, from the official GLUE files, from the user's files, or from the Hub."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from src.cli import log
from src.data.readers import read_rows
from src.errors import UserError, first_line, reason
from src.files import file_digest, sha256
from src.glue.tasks import HUB, SPLITS, Task
from src.jobs.tasks import class_name

DIAGNOSTIC = "AX"  # GLUE's diagnostic test set, predicted by the MNLI model


@dataclass(frozen=True)
class Example:
    texts: tuple[str, ...]  # one or two
    label: float | None  # a class number, or the value of a regression; None in a test set
    id: int | str | None = field(default=None, compare=False)  # its row in the source


class Data(NamedTuple):
    """A task's data: of each split, its examples, list[Example], or their tokens, Tokens of tokens.py."""

    task: Task  # with its labels
    train: Any
    validation: dict[str, Any]  # by split
    test: dict[str, Any]


class Split(NamedTuple):
    kind: str  # one of SPLITS
    name: str
    paths: tuple[Path, ...]  # its files; none if it is on the Hub
    hub: tuple[str | None, ...] = ()  # dataset, subset and split there


class Row(NamedTuple):
    where: str  # source and number, for messages
    id: int | str
    texts: tuple[str, ...]
    label: Any


def splits_of(task: Task, glue_dir: str | None, with_test: bool) -> list[Split]:
    """Return the sources of a task's splits. Raises UserError if it has none."""
    kinds = SPLITS if with_test else SPLITS[:2]
    if task.files:
        if with_test and "test" not in task.files:
            raise UserError(f"predict_test: tasks.{task.name}.files has no test; add one, or omit {task.name}")
        files = {kind: task.files[kind] for kind in kinds}
        return [Split(k, k, tuple(map(Path, [f] if isinstance(f, str) else f))) for k, f in files.items()]
    predicts_diagnostic = with_test and task.name == "mnli"
    if glue_dir is not None and task.folder is not None:
        names = {"train": ("train",), "validation": task.tsv_validation, "test": task.tsv_test}
        splits = []
        for kind, name in [(k, name) for k in kinds for name in names[k]]:
            path = Path(glue_dir, task.folder, f"{name}.tsv")
            other = path.with_name(task.tsv_other_names.get(name, path.name))  # its publisher's name for it
            splits.append(Split(kind, name, (other if other.is_file() and not path.is_file() else path,)))
        places = (Path(glue_dir, name) for name in ("diagnostic/diagnostic.tsv", "AX/AX.tsv") if predicts_diagnostic)
        return splits + [Split("test", DIAGNOSTIC, (path,)) for path in places if path.is_file()][:1]
    if task.hub is None:
        raise UserError(f"glue_dir is not set, and tasks.{task.name} is in its folder {task.folder}; set glue_dir")
    names = {"train": (task.train,), "validation": task.validation, "test": task.test}
    splits = [Split(kind, name, (), (task.hub, task.subset, name)) for kind in kinds for name in names[kind]]
    diagnostic = Split("test", DIAGNOSTIC, (), (HUB, "ax", "test"))
    return splits + [diagnostic] * (predicts_diagnostic and task.hub == HUB)


def check_sources(tasks: Iterable[Task], glue_dir: str | None, with_test: bool = False) -> None:
    """Raise UserError for missing files, before any task is trained."""
    if glue_dir is not None and not Path(glue_dir).is_dir():
        raise UserError(f"glue_dir: {glue_dir} is not a directory; download GLUE to it, or omit glue_dir")
    for task in tasks:
        place, splits = f"tasks.{task.name}", splits_of(task, glue_dir, with_test)
        names = [split.name for split in splits if split.kind != "train"]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise UserError(f"{place}: {repeated[0]} is both a validation and a test split; omit predict_test")
        if missing := [path for split in splits for path in split.paths if not path.is_file()]:
            if task.files:
                raise UserError(f"{place}.files: {missing[0]} does not exist; correct the path")
            raise UserError(f"glue_dir: {missing[0]} does not exist; add it, or omit {task.name} from tasks_to_run")


def digest(task: Task, glue_dir: str | None, with_test: bool = False) -> dict[str, Any]:
    """Identify a task's examples by kind of split: digests of the files, or the names on the Hub."""
    found: dict[str, Any] = {}
    try:
        for kind, name, paths, hub in splits_of(task, glue_dir, with_test):
            found.setdefault(kind, {})[name] = [file_digest(path) for path in paths] or list(hub[:2])
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({reason(error)}); fix or replace it") from None
    return found


def texts_digest(examples: Iterable[Example]) -> str:
    """Return the SHA-256 of texts in order, ignoring white space, in which GLUE's files and the Hub differ."""
    texts = [[" ".join(text.split()) for text in example.texts] for example in examples]
    return sha256([json.dumps(texts).encode()])


def read_task(task: Task, glue_dir: str | None, with_test: bool = False) -> Data:
    """Return the examples of a task. Raises UserError with the file and line, or the dataset, that cannot be read."""
    check_sources([task], glue_dir, with_test)
    found = {split: _read(task, split) for split in splits_of(task, glue_dir, with_test)}
    (_, _, train_files, _), (rows, classes) = next(iter(found.items()))
    if not task.regression and not task.labels:
        task = replace(task, labels=_find_labels(task, rows, classes))
        task.check()
        positive = f"; f1 is computed for {task.labels[1]}" if "f1" in task.metrics else ""
        log.info(f"{task.title}: the labels of the training set are {', '.join(task.labels)}{positive}")
    examples: dict[str, dict[str, list[Example]]] = {kind: {} for kind in SPLITS}
    for (kind, name, *_), (rows, _) in found.items():
        labels = [None if kind == "test" else parse_label(task, row.label, row.where) for row in rows]
        examples[kind][name] = [Example(row.texts, label, row.id) for row, label in zip(rows, labels)]
    (train,) = examples["train"].values()
    if train_files and train_files[0].name in task.tsv_other_names.values():
        # GLUE took its MRPC development set from the publisher's training file, which still contains it.
        held_out = {example.texts for split in examples["validation"].values() for example in split}
        before, train = len(train), [example for example in train if example.texts not in held_out]
        log.info(f"{train_files[0]}: {before - len(train):,} rows are in the development set and are not trained on")
        if not train:
            raise UserError(f"{train_files[0]}: all rows are in the development set; replace it with the training set")
    return Data(task, train, examples["validation"], examples["test"])


def _read(task: Task, split: Split) -> tuple[list[Row], tuple[str, ...]]:
    """Return the rows of a split (those with a label, unless it is a test set) and the source's class names, if any."""
    is_test, columns, label, classes = split.kind == "test", task.columns, task.label, ()
    if split.paths and not task.files:
        columns = (task.tsv_test_columns if is_test else ()) or task.tsv_columns or columns
        label = label if task.tsv_label is None else task.tsv_label
    wanted = columns if is_test else (*columns, label)
    malformed = 0 if is_test else task.malformed_rows  # every row of a test set needs a prediction
    tables = [(str(path), read_rows(path, wanted, malformed, tab_separated=not task.files)) for path in split.paths]
    if not tables:
        source, table, classes = _read_hub(task, split, wanted)
        tables = [(source, table)]
    rows: list[Row] = []
    for source, table in tables:
        kept, skipped = [], 0
        for number, cells in table:
            where = f"{source}, {'line' if split.paths else 'row'} {number}"
            texts, value = cells[: len(columns)], cells[-1]
            for column, text in zip(columns, texts):
                if not isinstance(text, str):
                    raise UserError(f"{where}: {column} holds {text!r}, not text; fix or remove the row")
            missing = value is None or value == "" or value != value  # NaN
            if is_test or not (missing or class_name(value) == task.unlabelled):
                kept.append(Row(where, f"{source}:{number}" if len(tables) > 1 else number, texts, value))
            elif missing and split.paths and task.unlabelled != "":
                fix = f'fix or remove the row, or set tasks.{task.name}.unlabelled to "" to skip such rows'
                raise UserError(f"{where}: no label in {label}; {fix}")
            else:
                skipped += 1
        if skipped:
            mark = f" ({task.unlabelled})" if task.unlabelled else ""
            log.info(f"{source}: skipped {skipped:,} rows without a label{mark}")
        if not kept:
            raise UserError(f"{source} holds no examples{'' if is_test else ' with a label'}")
        rows += kept
    return rows, classes


def _read_hub(task: Task, split: Split, wanted: tuple) -> tuple[str, Iterator[tuple], tuple[str, ...]]:
    """Read a split on the Hub, or in a folder in the Hub's format: its name, numbered rows, and class names, if any."""
    from datasets import ClassLabel, load_dataset

    hub, subset, name = split.hub
    source = f"{hub}, {name}" if subset is None else f"{hub} ({subset}), {name}"
    try:
        table = load_dataset(hub, subset, split=name)
    except Exception as error:  # whatever the Hub's clients raise
        fix = "set glue_dir to a folder with the GLUE files" if task.folder else f"check tasks.{task.name}.hub"
        raise UserError(f"cannot read {source}, from the Hugging Face Hub: {first_line(error)}; {fix}") from None
    if missing := [str(column) for column in wanted if column not in table.column_names]:
        raise UserError(f"{source}: no column {', '.join(missing)} (its columns are {', '.join(table.column_names)})")
    content = table.select_columns(list(wanted))[:]
    label = table.features[task.label] if task.label in wanted else None
    classes = tuple(label.names or ()) if isinstance(label, ClassLabel) else ()
    if classes and task.labels and set(classes) != set(task.labels):
        found = f"its labels are {', '.join(classes)}, but tasks.{task.name}.labels are {', '.join(task.labels)}"
        raise UserError(f"{source}: {found}; set labels to the former")
    if classes:  # -1 marks a row without a label
        content[task.label] = [None if value is None or value < 0 else classes[value] for value in content[task.label]]
    return source, enumerate(zip(*(content[column] for column in wanted)), 1), classes


def _find_labels(task: Task, rows: list[Row], classes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels of a training set, in its source's order, if it has one, else sorted (integers as numbers)."""
    for row in rows:
        if isinstance(row.label, list | dict):
            raise UserError(f"{row.where}: {row.label!r} is not a single label; fix the row")
    count = Counter(class_name(row.label) for row in rows)
    if len(count) > 1000:
        raise UserError(f"tasks.{task.name}: {len(count):,} labels in {task.label}; set kind: regression, or fix label")
    alike: dict[str, str] = {}
    for name in count:
        if (other := alike.setdefault(re.sub(r"^(-?\d+)\.0+$", r"\1", name.strip()), name)) != name:
            to_do = f"if they are one, correct the rows; if not, list all in tasks.{task.name}.labels"
            raise UserError(f"tasks.{task.name}: {task.label} holds {other!r} and {name!r} as two labels; {to_do}")
    if len(count) < 2:
        raise UserError(f"tasks.{task.name}: all rows have the label {next(iter(count))!r}; there is nothing to learn")
    if all(isinstance(column, int) for column in (*task.columns, task.label)):
        first = [row for row in rows if row.where.endswith(", line 1")]
        names = [class_name(row.label) for row in first]
        for row, name in zip(first, names):
            if count[name] == names.count(name) < max(count.values()):
                to_do = "if it is a header, give columns and label by name; else list all labels"
                raise UserError(f"{row.where}: the label {name!r} occurs nowhere else; {to_do}")
    integers = all(name.removeprefix("-").isdecimal() for name in count)
    return classes or tuple(sorted(count, key=lambda name: (int(name) if integers else 0, name)))


def parse_label(task: Task, label: Any, where: str) -> float:
    """Return a label as a number: the number of a class, given by name or number, or the value of a regression."""
    name, value = class_name(label), _number(label)
    if task.regression and math.isfinite(value):
        return value
    for known in (name, class_name(value) if math.isfinite(value) else name):  # the text 1.0 is 1, too
        if known in task.labels:
            return float(task.labels.index(known))
    if value in range(len(task.labels)) and all(math.isnan(_number(known)) for known in task.labels):
        return value
    wanted = "a number" if task.regression else f"one of {', '.join(task.labels)}"
    raise UserError(f"{where}: the label {label!r} must be {wanted}; fix or remove the row")


def _number(label: Any) -> float:
    """Return a label as a number, or NaN if it is not one."""
    try:
        return math.nan if isinstance(label, bool) else float(label)
    except (TypeError, ValueError, OverflowError):
        return math.nan
