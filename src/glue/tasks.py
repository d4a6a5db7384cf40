"""The tasks as data: where their columns and labels are, how they are scored, how they are trained.

Hyperparameters are those of the paper's released configs (arXiv:2502.16249). A task of one's own stands in a YAML file,
under `tasks`, with the fields of `Task`; `like: rte` takes every field that is not given from RTE.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from src.cli import UserError
from src.config import nearest

LISTS = ("metrics", "columns", "labels", "tsv_columns", "validation", "tsv_validation", "seeds")
METRICS = ("accuracy", "f1", "matthews", "spearman")


@dataclass(frozen=True)
class Task:
    name: str
    title: str  # in reports
    metrics: tuple[str, ...]  # of METRICS; the score is their mean
    # Where the examples are. Text columns are one or two, by name, or by number where a TSV file has no header.
    columns: tuple[str, ...]  # on the Hub
    labels: tuple[str, ...]  # names in the order of their numbers; none for a regression
    folder: str  # in the official GLUE download
    tsv_columns: tuple[str | int, ...]
    tsv_label: str | int
    subset: str | None = None  # of nyu-mll/glue
    validation: tuple[str, ...] = ("validation",)  # splits on the Hub
    tsv_validation: tuple[str, ...] = ("dev",)  # files, without .tsv
    # How it is trained.
    epochs: int = 3
    batch_size: int = 16
    lr: float = 1e-5
    weight_decay: float = 1e-6
    optimizer: str = "decoupled_adamw"
    seeds: tuple[int, ...] = ()  # `default_seed` if there is none
    eval_interval: str = "1ep"
    precision: str | None = None  # over that of the config

    @property
    def num_labels(self) -> int:
        return len(self.labels) or 1


ENTAILMENT = ("entailment", "not_entailment")
FIVE_SEEDS = (19, 8364, 717, 10536, 90166)

GLUE = {
    task.name: task
    for task in (
        Task("mnli", "MNLI", ("accuracy",), ("premise", "hypothesis"), ("entailment", "neutral", "contradiction"), "MNLI",
             ("sentence1", "sentence2"), "gold_label", "mnli", ("validation_matched", "validation_mismatched"),
             ("dev_matched", "dev_mismatched"), epochs=3, batch_size=48, weight_decay=5e-6, seeds=(19,), eval_interval="2300ba"),
        Task("rte", "RTE", ("accuracy",), ("sentence1", "sentence2"), ENTAILMENT, "RTE", ("sentence1", "sentence2"), "label", "rte",
             epochs=2, batch_size=16, weight_decay=1e-6, optimizer="adamw", seeds=FIVE_SEEDS, eval_interval="100ba"),
        Task("qqp", "QQP", ("accuracy", "f1"), ("question1", "question2"), ("not_duplicate", "duplicate"), "QQP",
             ("question1", "question2"), "is_duplicate", "qqp",
             epochs=5, batch_size=16, weight_decay=3e-6, seeds=(19,), eval_interval="2000ba"),
        Task("qnli", "QNLI", ("accuracy",), ("question", "sentence"), ENTAILMENT, "QNLI", ("question", "sentence"), "label", "qnli",
             epochs=10, batch_size=16, weight_decay=1e-6, seeds=(19,), eval_interval="1000ba"),
        Task("sst2", "SST-2", ("accuracy",), ("sentence",), ("negative", "positive"), "SST-2", ("sentence",), "label", "sst2",
             epochs=3, batch_size=16, weight_decay=3e-6, seeds=(19, 8364, 717), eval_interval="500ba"),
        Task("stsb", "STS-B", ("spearman",), ("sentence1", "sentence2"), (), "STS-B", ("sentence1", "sentence2"), "score", "stsb",
             epochs=8, batch_size=32, weight_decay=3e-6, seeds=FIVE_SEEDS, eval_interval="200ba", precision="fp32"),
        Task("mrpc", "MRPC", ("f1",), ("sentence1", "sentence2"), ("not_equivalent", "equivalent"), "MRPC",
             ("#1 String", "#2 String"), "Quality", "mrpc",
             epochs=10, batch_size=32, weight_decay=8e-6, seeds=FIVE_SEEDS, eval_interval="100ba"),
        Task("cola", "CoLA", ("matthews",), ("sentence",), ("unacceptable", "acceptable"), "CoLA", (3,), 1, "cola",
             epochs=10, batch_size=32, weight_decay=1e-6, seeds=(19, 8364, 717, 10536), eval_interval="250ba"),
    )
}  # fmt: skip


def select(to_run: list[str], changes: Mapping[str, Any], default_seed: int) -> list[Task]:
    """The tasks to run, with what the config changes in them. Raises UserError for unknown tasks and fields."""
    known = dict(GLUE)
    for name, given in changes.items():
        if not isinstance(given, Mapping):
            raise UserError(f"tasks.{name} must hold `key: value` lines, not {given!r}")
        known[name] = _changed(name, dict(given), GLUE)
    for name in to_run:
        if name not in known:
            raise UserError(f"tasks_to_run: unknown task {name}{nearest(name, list(known))}")
    chosen = [known[name] for name in to_run or GLUE]
    return [task if task.seeds else replace(task, seeds=(default_seed,)) for task in chosen]


def _changed(name: str, given: dict[str, Any], tasks: Mapping[str, Task]) -> Task:
    like = given.pop("like", name)
    allowed = [entry.name for entry in fields(Task) if entry.name != "name"]
    for key, value in given.items():
        if key not in allowed:
            raise UserError(f"unknown key tasks.{name}.{key}{nearest(key, allowed)}")
        if isinstance(value, list):
            given[key] = tuple(value)
        elif key in LISTS:
            raise UserError(f"tasks.{name}.{key} must be a list, such as [{value}], not {value!r}")
    for metric in given.get("metrics", ()):
        if metric not in METRICS:
            raise UserError(f"tasks.{name}.metrics: unknown metric {metric}{nearest(metric, list(METRICS))}")
    if like in tasks:
        return replace(tasks[like], name=name, **given)
    if like != name:
        raise UserError(f"tasks.{name}.like: unknown task {like}{nearest(like, list(tasks))}")
    needed = [entry.name for entry in fields(Task) if entry.name != "name" and entry.default is entry.default_factory]
    if missing := [key for key in needed if key not in given]:
        raise UserError(f"tasks.{name}: a new task needs {', '.join(missing)}, or `like:` a task of GLUE")
    return Task(name=name, **given)
