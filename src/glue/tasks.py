"""The tasks as data: where their texts and labels are, how they are scored, how they are trained.

Hyperparameters are those of the paper's released configs (arXiv:2502.16249). A task of one's own stands in a YAML file,
under `tasks`, with the fields of `Task`; `like: rte` takes every field that is not given from RTE. A hyperparameter with
several values, `lr: [1e-5, 3e-5]`, is a search over them.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args, get_origin

from src.config import nearest
from src.errors import UserError

METRICS = {"classification": ("accuracy", "f1", "macro_f1", "matthews"), "regression": ("spearman", "pearson")}
SPLITS = ("train", "validation", "test")
# Hyperparameters: what kind of number, and the least that it may be.
NUMBERS = {"epochs": (int, 1), "batch_size": (int, 1), "lr": (float, 0.0), "weight_decay": (float, 0.0)}


@dataclass(frozen=True)
class Task:
    name: str
    title: str  # in reports
    metrics: tuple[str, ...]  # of METRICS; the score is their mean
    # What is read. Text columns are one or two, by name, or by number where a file has no header.
    columns: tuple[str | int, ...]
    label: str | int = "label"  # the label's column
    labels: tuple[str, ...] = ()  # names in the order of their numbers; those of the training set where none are given
    kind: str = "classification"  # or regression
    unlabelled: str | None = None  # what stands in place of a missing label ("": nothing); such rows are left out
    # Where it is: in files (train, validation, test → path or paths), or on the Hub.
    files: Mapping[str, Any] = field(default_factory=dict)
    hub: str | None = None
    subset: str | None = None
    train: str = "train"  # splits on the Hub
    validation: tuple[str, ...] = ("validation",)
    test: tuple[str, ...] = ("test",)
    # In the official GLUE download, where `glue_dir` names one; files without .tsv.
    folder: str | None = None
    tsv_columns: tuple[str | int, ...] = ()  # `columns` where none are given; so below
    tsv_label: str | int | None = None
    tsv_test_columns: tuple[str | int, ...] = ()
    tsv_validation: tuple[str, ...] = ("dev",)
    tsv_test: tuple[str, ...] = ("test",)
    tsv_other_names: Mapping[str, str] = field(default_factory=dict)  # of a file that is not there under its first
    # So many rows of another length than the header may be left out, since the official file has some.
    malformed_rows: int = 0
    # How it is trained.
    epochs: int = 3
    batch_size: int = 16
    lr: float = 1e-5
    weight_decay: float = 1e-6
    optimizer: str = "decoupled_adamw"
    seeds: tuple[int, ...] = ()  # `default_seed` if there is none
    eval_interval: str = "1ep"
    precision: str | None = None  # over that of the config
    variant: str = ""  # in a search: this candidate's values

    @property
    def regression(self) -> bool:
        return self.kind == "regression"

    @property
    def num_labels(self) -> int:
        return 1 if self.regression else len(self.labels)


ENTAILMENT = ("entailment", "not_entailment")
FIVE_SEEDS = (19, 8364, 717, 10536, 90166)
PAIR = ("sentence1", "sentence2")
MICROSOFT = {"train": "msr_paraphrase_train.txt", "test": "msr_paraphrase_test.txt"}  # MRPC as its publisher names it

HUB = "nyu-mll/glue"
GLUE = {
    task.name: replace(task, hub=HUB, subset=task.name)
    for task in (
        Task("mnli", "MNLI", ("accuracy",), ("premise", "hypothesis"), labels=("entailment", "neutral", "contradiction"),
             folder="MNLI", tsv_columns=PAIR, tsv_label="gold_label", unlabelled="-",
             validation=("validation_matched", "validation_mismatched"), tsv_validation=("dev_matched", "dev_mismatched"),
             test=("test_matched", "test_mismatched"), tsv_test=("test_matched", "test_mismatched"),
             epochs=3, batch_size=48, weight_decay=5e-6, seeds=(19,), eval_interval="2300ba"),
        Task("rte", "RTE", ("accuracy",), PAIR, labels=ENTAILMENT, folder="RTE",
             epochs=2, batch_size=16, weight_decay=1e-6, optimizer="adamw", seeds=FIVE_SEEDS, eval_interval="100ba"),
        Task("qqp", "QQP", ("accuracy", "f1"), ("question1", "question2"), labels=("not_duplicate", "duplicate"),
             folder="QQP", tsv_label="is_duplicate", malformed_rows=100,
             epochs=5, batch_size=16, weight_decay=3e-6, seeds=(19,), eval_interval="2000ba"),
        Task("qnli", "QNLI", ("accuracy",), ("question", "sentence"), labels=ENTAILMENT, folder="QNLI",
             epochs=10, batch_size=16, weight_decay=1e-6, seeds=(19,), eval_interval="1000ba"),
        Task("sst2", "SST-2", ("accuracy",), ("sentence",), labels=("negative", "positive"), folder="SST-2",
             epochs=3, batch_size=16, weight_decay=3e-6, seeds=(19, 8364, 717), eval_interval="500ba"),
        Task("stsb", "STS-B", ("spearman",), PAIR, kind="regression", folder="STS-B", tsv_label="score",
             epochs=8, batch_size=32, weight_decay=3e-6, seeds=FIVE_SEEDS, eval_interval="200ba", precision="fp32"),
        Task("mrpc", "MRPC", ("f1",), PAIR, labels=("not_equivalent", "equivalent"), folder="MRPC",
             tsv_columns=("#1 String", "#2 String"), tsv_label="Quality", tsv_other_names=MICROSOFT,
             epochs=10, batch_size=32, weight_decay=8e-6, seeds=FIVE_SEEDS, eval_interval="100ba"),
        Task("cola", "CoLA", ("matthews",), ("sentence",), labels=("unacceptable", "acceptable"), folder="CoLA",
             tsv_columns=(3,), tsv_label=1, tsv_test_columns=("sentence",),
             epochs=10, batch_size=32, weight_decay=1e-6, seeds=(19, 8364, 717, 10536), eval_interval="250ba"),
    )
}  # fmt: skip
FROM_MNLI = ("rte", "mrpc", "stsb")  # start from the encoder tuned on MNLI, with `mnli_first`


def of_glue(task: Task) -> bool:
    """Whether GLUE's average counts the task: one of the eight, on GLUE's examples and splits, by GLUE's metrics."""
    glue = GLUE.get(task.name)
    if glue is None or task.files or task.folder not in (None, glue.folder):
        return False
    same = ("train", "validation", "tsv_validation", "metrics")
    on_hub = task.hub is None or (task.hub, task.subset) == (glue.hub, glue.subset)
    return on_hub and all(getattr(task, key) == getattr(glue, key) for key in same)


def select(to_run: list[str], changes: Mapping[str, Any], default_seed: int) -> list[Task]:
    """The tasks to run, with what the config changes in them; a searched task once for each candidate.

    Raises UserError for unknown tasks and fields, and for values that no task can have.
    """
    _check_seeds("default_seed", (default_seed,))
    known = {name: [task] for name, task in GLUE.items()}
    for name, given in changes.items():
        if not isinstance(given, Mapping):
            raise UserError(f"tasks.{name} must hold `key: value` lines, not {given!r}")
        known[name] = _changed(name, dict(given))
    for name in to_run:
        if name not in known:
            raise UserError(f"tasks_to_run: unknown task {name}{nearest(name, list(known))}")
    if repeated := sorted({name for name in to_run if to_run.count(name) > 1}):
        raise UserError(f"tasks_to_run names {', '.join(repeated)} more than once; name each task once")
    if not to_run and (own := [name for name in changes if name not in GLUE]):
        raise UserError(f"tasks_to_run is empty, which means GLUE's eight tasks and not {', '.join(own)}; name the tasks to run, such as tasks_to_run=[{','.join(own)}]")  # fmt: skip
    chosen = [task for name in to_run or GLUE for task in known[name]]
    return [task if task.seeds else replace(task, seeds=(default_seed,)) for task in chosen]


def _changed(name: str, given: dict[str, Any]) -> list[Task]:
    like = _typed(f"tasks.{name}.like", given.pop("like", name), str)
    if like != name and like not in GLUE:
        raise UserError(f"tasks.{name}.like: unknown task {like}{nearest(like, list(GLUE))}")
    if not name.replace("_", "").replace("-", "").isalnum():
        raise UserError(f"tasks.{name}: a task's name is made of letters, digits, - and _; its `title` may be anything")
    allowed = {entry.name: entry.type for entry in fields(Task) if entry.name not in ("name", "variant")}
    for key, value in given.items():
        if key not in allowed:
            raise UserError(f"unknown key tasks.{name}.{key}{nearest(str(key), list(allowed))}")
        if key not in NUMBERS:
            given[key] = _typed(f"tasks.{name}.{key}", value, allowed[key])
    searched = {key: value for key, value in given.items() if key in NUMBERS and isinstance(value, list)}
    for key in given.keys() & NUMBERS.keys():
        for value in searched.get(key, [given[key]]):
            _check_number(f"tasks.{name}.{key}", value, *NUMBERS[key])
    if like in GLUE:
        own_title = {} if like == name else {"title": name}
        base = replace(_elsewhere(GLUE[like], name, given), name=name, **{**own_title, **_without(given, searched)})
    else:
        base = _new_task(name, _without(given, searched))
    _check(base)
    candidates = []
    for values in itertools.product(*searched.values()):
        chosen = dict(zip(searched, values))
        variant = ",".join(f"{key}={value:g}" for key, value in chosen.items() if len(searched[key]) > 1)
        candidates.append(replace(base, **chosen, variant=variant))
    if len({task.variant for task in candidates}) < len(candidates) or not candidates:
        raise UserError(f"tasks.{name}: a search needs values, each once; mend {', '.join(searched)}")
    return candidates


def _typed(key: str, value: Any, kind: Any) -> Any:
    """A value as its field has it: a list as a tuple, a number as its text. Raises UserError for one of another type."""
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise UserError(f"{key} must be a list, such as [{value}], not {value!r}")
        return tuple(_typed(key, entry, get_args(kind)[0]) for entry in value)
    if get_origin(kind) is Mapping:
        if not isinstance(value, Mapping):
            raise UserError(f"{key} must hold `key: value` lines, not {value!r}")
        return value
    if kind is int:  # of which `_check` knows the least
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number or (isinstance(value, kind) and not isinstance(value, bool)):
        return value if isinstance(value, kind) else class_name(value)
    several = f"only {', '.join(NUMBERS)} take several values" if isinstance(value, list) else "put a name in quotes"
    raise UserError(f"{key}: {value!r} is no text; {several}")


def class_name(label: Any) -> str:
    """A label as the name of a class: 1.0, as tables with gaps keep whole numbers, is 1."""
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)


def _elsewhere(task: Task, name: str, given: Mapping[str, Any]) -> Task:
    """A task of GLUE without what does not hold where its examples are taken from another place than its own."""
    place = {key for key in ("files", "folder", "hub", "subset") if given.get(key)}
    if not place:
        return task
    if name != task.name:
        task = replace(task, subset=None, malformed_rows=0)
    if not place & {"hub", "subset"}:
        task = replace(task, hub=None, subset=None)
    return replace(task, folder=None)  # files or a data set that are named go before glue_dir


def _without(given: Mapping[str, Any], left_out: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key not in left_out}


def _new_task(name: str, given: dict[str, Any]) -> Task:
    if "columns" not in given:
        raise UserError(f"tasks.{name}: a new task needs columns, the names of one or two text columns, or `like:` a task of GLUE")  # fmt: skip
    metric = METRICS.get(given.get("kind", "classification"), [""])[0]
    return Task(**{"name": name, "title": name, "metrics": (metric,), **given})


def _check_number(key: str, value: Any, kind: type, least: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or (kind is int and not isinstance(value, int)) or value < least:
        raise UserError(f"{key} must be {'a whole number' if kind is int else 'a number'} of at least {least:g}, not {value!r}")  # fmt: skip


def _check_seeds(key: str, seeds: tuple[Any, ...]) -> None:
    for seed in seeds:
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
            raise UserError(f"{key}: {seed!r} is no whole number from 0 to 2³² − 1")


def _check(task: Task) -> None:
    """Raise UserError for fields that do not fit together."""
    place = f"tasks.{task.name}"
    if task.kind not in METRICS:
        raise UserError(f"{place}.kind must be {' or '.join(METRICS)}, not {task.kind!r}")
    if task.regression and task.labels:
        raise UserError(f"{place}.labels: a regression has none; set labels to [] or leave kind out")
    if not task.metrics:
        raise UserError(f"{place}.metrics: name at least one of {', '.join(METRICS[task.kind])}")
    for metric in task.metrics:
        if metric not in METRICS[task.kind]:
            raise UserError(f"{place}.metrics: unknown metric {metric} for a {task.kind}{nearest(metric, list(METRICS[task.kind]))}")  # fmt: skip
    for key in ("columns", "tsv_columns", "tsv_test_columns"):
        given = getattr(task, key)
        if len(given) not in (1, 2) and (given or key == "columns"):
            raise UserError(f"{place}.{key}: one or two text columns, not {len(given)}")
    for columns, label in ((task.columns, task.label), (task.tsv_columns, task.tsv_label)):
        if len({*columns, label}) <= len(columns):
            raise UserError(f"{place}: columns {', '.join(map(str, columns))} and label {label} name a column twice; name each once")  # fmt: skip
    for key in ("validation", "tsv_validation"):
        if not getattr(task, key):
            raise UserError(f"{place}.{key}: name at least one split")
    for column in (*task.columns, *task.tsv_columns, *task.tsv_test_columns, task.label, task.tsv_label):
        if isinstance(column, int) and column < 0:
            raise UserError(f"{place}: no column has the number {column}; the first is 0")
    _check_number(f"{place}.malformed_rows", task.malformed_rows, int, 0)
    if task.files.keys() - set(SPLITS):
        raise UserError(f"{place}.files must name files under {', '.join(SPLITS)}, not {task.files!r}")
    if task.files and not {"train", "validation"} <= task.files.keys():
        raise UserError(f"{place}.files lacks {' and '.join(sorted({'train', 'validation'} - task.files.keys()))}; name a file for each")  # fmt: skip
    for split, paths in task.files.items():
        if not (paths and all(isinstance(path, str) for path in (paths if isinstance(paths, list) else [paths]))):
            raise UserError(f"{place}.files.{split} must be a path or a list of them, not {paths!r}")
    if task.files and (task.hub or task.folder):
        raise UserError(f"{place} has both files and {'hub' if task.hub else 'folder'}; leave out one, since examples come from one place")  # fmt: skip
    if not (task.files or task.hub or task.folder):
        raise UserError(f"{place} needs files (train: PATH, validation: PATH), hub (the name of a data set), or folder (below glue_dir)")  # fmt: skip
    _check_seeds(f"{place}.seeds", task.seeds)
    if len(set(task.seeds)) < len(task.seeds):
        raise UserError(f"{place}.seeds names a seed twice; name each once")
    check_labels(task)


def check_labels(task: Task) -> None:
    """Raise UserError for labels that the task's metrics cannot be computed from."""
    if task.labels and len(set(task.labels)) < max(2, len(task.labels)):
        raise UserError(f"tasks.{task.name}.labels: a classification needs two or more, each once, not {', '.join(task.labels)}")  # fmt: skip
    if "f1" in task.metrics and task.labels and len(task.labels) != 2:
        raise UserError(f"tasks.{task.name}.metrics: f1 is for two classes, and there are {len(task.labels)}; take macro_f1")  # fmt: skip
