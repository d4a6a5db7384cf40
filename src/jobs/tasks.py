"""The tasks of a benchmark: how each is scored and trained, and what a config changes in them. A config adds others
under `tasks`, with the fields of the benchmark's `Task`; `like: NAME` takes every omitted field from a known task. A
hyperparameter with several values, `lr: [1e-5, 3e-5]`, starts a search over them."""

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from types import UnionType
from typing import Any, ClassVar, Self, get_args, get_origin

from src.config import SEED, Rule, check_known, check_value, duration, key, nearest, validate
from src.errors import UserError

METRICS = {"classification": ("accuracy", "f1", "macro_f1", "matthews"), "regression": ("spearman", "pearson")}


@dataclass(frozen=True)
class Task:
    """A task of any benchmark. The names of its fields, and of a subclass's, are part of every stored result."""

    searchable: ClassVar[tuple[str, ...]] = ("epochs", "batch_size", "lr", "weight_decay")  # a list is a search
    needed: ClassVar[Mapping[str, str]] = {}  # fields that a task without `like` must have, and what they are
    unstored: ClassVar[tuple[str, ...]] = ("title", "seeds", "precision", "microbatch_size")  # what `settings` omits

    name: str = key("used in folders and in tasks_to_run")
    title: str = key("used in reports")
    metrics: tuple[str, ...] = key("of METRICS; the score is their mean")
    labels: tuple[str, ...] = key("class names in the order of their numbers; default: those of the training set", ())
    kind: ClassVar[str] = "classification"  # a subclass with regressions makes it a field
    # How it is trained.
    epochs: int = key("epochs of training", 3, at_least=1)
    batch_size: int = key("samples per step", 16, at_least=1)
    lr: float = key("peak learning rate", 1e-5, at_least=0)
    weight_decay: float = key("weight decay", 1e-6, at_least=0)
    optimizer: str = key("decoupled_adamw, adamw, or module:Class of your own", "decoupled_adamw")
    seeds: tuple[int, ...] = key("one job per seed; default: default_seed", ())
    eval_interval: str = duration("how often to evaluate", "1ep")
    precision: str | None = key("overrides the config's", None, choices=("fp32", "amp_bf16", "amp_fp16"))
    microbatch_size: int | None = key("samples per forward pass; default: the batch", None, at_least=1)
    variant: str = key("in a search: the values of this candidate", "")

    @property
    def regression(self) -> bool:
        return self.kind == "regression"

    @property
    def num_labels(self) -> int:
        return 1 if self.regression else len(self.labels)

    def changed(self, name: str, given: Mapping[str, Any]) -> Self:
        """Return this task, or one of another name that is like it, with the fields that a config gives."""
        return replace(self, **{**({} if name == self.name else {"name": name, "title": name}), **given})

    def settings(self) -> dict[str, Any]:
        """Return the fields that a result depends on."""
        return {name: value for name, value in asdict(self).items() if name not in self.unstored}

    def check(self) -> None:
        """Raise UserError for fields that are invalid or do not fit together."""
        place = f"tasks.{self.name}"
        validate(self, f"{place}.")
        if ":" not in self.optimizer:
            named = Rule(choices=("decoupled_adamw", "adamw"), also=("module:Class",))
            check_value(f"{place}.optimizer", self.optimizer, rule=named)
        for seed in self.seeds:
            check_value(f"{place}.seeds", seed, int, Rule(**SEED))
        for metric in self.metrics:
            if metric not in (known := METRICS[self.kind]):
                raise UserError(f"{place}.metrics: unknown metric {metric} for a {self.kind}{nearest(metric, known)}")
        classes, shown = len(self.labels), ", ".join(self.labels)
        batch, size = self.batch_size, self.microbatch_size
        for wrong, message in (
            (not self.metrics, ".metrics must have at least one entry"),
            (self.regression and classes, ".labels: a regression has none; set labels to [] or omit kind"),
            (classes == 1 or repeated(self.labels), f".labels={shown} must be two or more classes, each once"),
            ("f1" in self.metrics and classes not in (0, 2), ".metrics: f1 is for two classes; use macro_f1"),
            (repeated(self.seeds), ".seeds has a seed twice; give each once"),
            (size and size > batch, f".microbatch_size={size} is more than batch_size={batch}; lower it"),
        ):
            if wrong:
                raise UserError(f"{place}{message}")


def repeated(values: tuple) -> bool:
    return len(set(values)) < len(values)


def optimizer_of(task: Task) -> dict[str, Any]:
    """Return what a task gives its optimizer: name and arguments."""
    given = {"name": task.optimizer, "lr": task.lr, "weight_decay": task.weight_decay}
    return given if ":" in task.optimizer else {**given, "betas": (0.9, 0.98), "eps": 1e-6}


@dataclass(frozen=True)
class Suite:
    """A benchmark: the tasks that it knows, all of one class."""

    title: str  # such as GLUE
    number: str  # of its tasks, in words
    tasks: Mapping[str, Task] = field(repr=False)

    def select(self, to_run: list[str], changes: Mapping[str, Any], default_seed: int, seeds: int | None = None) -> Any:
        """Return the tasks to run, with the config's changes and their first `seeds` seeds: several candidates of a
        searched task. Raises UserError."""
        known = {name: [task] for name, task in self.tasks.items()}
        known |= {name: self._candidates(name, given) for name, given in changes.items()}
        for name in to_run:
            if name not in known:
                raise UserError(f"tasks_to_run: unknown task {name}{nearest(name, known)}")
        if twice := sorted({name for name in to_run if to_run.count(name) > 1}):
            raise UserError(f"tasks_to_run names {', '.join(twice)} more than once; name each task once")
        if not to_run and (own := [name for name in changes if name not in self.tasks]):
            problem = f"tasks_to_run is empty, which means {self.title}'s {self.number} and not {', '.join(own)}"
            raise UserError(f"{problem}; name the tasks to run, such as tasks_to_run=[{','.join(own)}]")
        chosen = [task for name in to_run or self.tasks for task in known[name]]
        return [replace(task, seeds=(task.seeds or (default_seed,))[:seeds]) for task in chosen]

    def _candidates(self, name: str, given: Any) -> list[Task]:
        """Return a task as the config changes it: one candidate, or several for several values of hyperparameters."""
        place, schema = f"tasks.{name}", type(next(iter(self.tasks.values())))
        given = dict(_converted(place, given, Mapping[str, Any]))
        like = _converted(f"{place}.like", given.pop("like", name), str)
        if like != name and like not in self.tasks:
            raise UserError(f"{place}.like: unknown task {like}{nearest(like, self.tasks)}")
        if not name.replace("_", "").replace("-", "").isalnum():
            problem = "a task's name may have only letters, digits, - and _; its `title` may be anything"
            raise UserError(f"{place}: {problem}")
        kinds = {entry.name: entry.type for entry in fields(schema) if entry.name not in ("name", "variant")}
        check_known(place, given, {*kinds, "like"})
        searched = {n: value for n, value in given.items() if n in schema.searchable and isinstance(value, list)}
        rest = {n: value for n, value in given.items() if n not in searched}
        several = f"only {', '.join(schema.searchable)} take several values"
        given = {n: _converted(f"{place}.{n}", value, kinds[n], several) for n, value in rest.items()}
        if like in self.tasks:
            base = self.tasks[like].changed(name, given)
        elif schema.needed.keys() <= given.keys():
            metric = METRICS.get(given.get("kind", schema.kind), ("",))[0]
            base = schema(**{"name": name, "title": name, "metrics": (metric,), **given})
        else:
            needed = "".join(f"`{n}`, {meaning}, " for n, meaning in schema.needed.items())
            raise UserError(f"{place}: a new task needs {needed}or `like`, a task of {self.title}")
        candidates = [replace(base, **dict(zip(searched, values))) for values in itertools.product(*searched.values())]
        for candidate in candidates:
            candidate.check()
        if not candidates or len(set(map(repr, candidates))) < len(candidates):
            raise UserError(f"{place}: a search needs values, each once; correct {', '.join(searched)}")
        varied = [n for n, values in searched.items() if len(values) > 1]
        variants = [",".join(f"{n}={getattr(task, n):g}" for n in varied) for task in candidates]
        return [replace(task, variant=variant) for task, variant in zip(candidates, variants)]


def _converted(name: str, value: Any, kind: Any, several: str = "") -> Any:
    """Convert a value to its field's type: a list to a tuple, a number to text. Raises UserError for any other type."""
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise UserError(f"{name}={value!r} must be a list, such as [{value}]")
        return tuple(_converted(name, entry, get_args(kind)[0], several) for entry in value)
    if get_origin(kind) is Mapping and not isinstance(value, Mapping):
        raise UserError(f"{name}={value!r} must be a section of `key: value` lines")
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if str not in kinds or type(value) in kinds:
        return value
    if type(value) in (int, float):
        return class_name(value)
    hint = several if isinstance(value, list) else "put it in quotes"
    raise UserError(f"{name}={value!r} must be a string; {hint}")


def class_name(label: Any) -> str:
    """Return a label as a class name. 1.0 becomes "1": tables with missing values store integers as floats."""
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)
