"""The config of fine-tuning, and its tasks: where texts and labels are, and how they are scored and trained.
GLUE's eight are in tasks.yaml. A config adds others under `tasks`, with the fields of `Task`; `like: rte` takes every
omitted field from RTE. A hyperparameter with several values, `lr: [1e-5, 3e-5]`, starts a search over them."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import yaml

from src.config import SEED, Rule, check_known, check_value, duration, key, nearest, validate
from src.errors import UserError
from src.training.config import TrainerConfig

METRICS = {"classification": ("accuracy", "f1", "macro_f1", "matthews"), "regression": ("spearman", "pearson")}
SPLITS = ("train", "validation", "test")
HYPERPARAMETERS = ("epochs", "batch_size", "lr", "weight_decay")  # a list of values is a search


@dataclass
class FinetuneConfig(TrainerConfig):
    """Keys of `glue.py`."""

    base_run_name: str = key("name of the run; each job's name is this, its task and its seed")
    starting_checkpoint_load_path: str | None = key(
        "pretrained encoder (ours, the authors' or a BERT): checkpoint, Hub folder or name; null: random weights", None
    )
    from_scratch: bool = key("take sizes and tokenizer of the starting checkpoint, not its weights: a baseline", False)
    model: dict[str, Any] = key("arguments of LionConfig that override those of the starting checkpoint", {})
    tokenizer_name: str | None = key("Hub name or folder; default: the starting checkpoint's tokenizer", None)
    glue_dir: str | None = key("folder with the official GLUE TSV files; default: nyu-mll/glue on the Hub", None)
    tasks: dict[str, Any] = key(
        "changes to src/glue/tasks.yaml (a list of values: a search), or new tasks: see Task in src/glue/tasks.py", {}
    )
    tasks_to_run: list[str] = key("names of tasks, in order; empty: the eight GLUE tasks", [])
    mnli_first: bool = key("start RTE, MRPC and STS-B from the encoder tuned on MNLI with its first seed", False)
    predict_test: bool = key("also predict the GLUE test sets and write the files that its server accepts", False)
    parallel: Any = key("false: one job at a time; true: one per GPU or CPU core; or the number of jobs", False)
    max_seq_len: int = key("maximum sequence length in tokens", 128)
    device_eval_batch_size: int = key("samples per evaluation batch", 128, at_least=1)
    num_workers: int | None = key(
        "processes to prepare batches; 0: the job's own; default: 2 on a GPU, 0 on a CPU", None, at_least=0
    )
    default_seed: int = key("seed of tasks without seeds", 19, **SEED)
    seeds: int | None = key("use only the first so many of each task's seeds", None, at_least=1)
    save_finetuned_checkpoints: bool = key("keep the fine-tuned model of each job", False)
    tokens_folder: str | None = key("where the tokens of each task are kept; default: save_folder/tokens", None)
    rerun: bool = key("run finished jobs again; also as --rerun", False)
    dry_run: bool = key("check the config, the tasks, their files and the device, and end", False)


@dataclass(frozen=True)
class Task:
    """A text task. The order and the names of its fields are part of every stored result."""

    name: str = key("used in folders and in tasks_to_run")
    title: str = key("used in reports")
    metrics: tuple[str, ...] = key("of METRICS; the score is their mean")
    columns: tuple[str | int, ...] = key("one or two text columns, by name, or by number in a file without a header")
    label: str | int = key("the label's column", "label")
    labels: tuple[str, ...] = key("class names in the order of their numbers; default: those of the training set", ())
    kind: str = key("what the label is", "classification", choices=tuple(METRICS))
    unlabelled: str | None = key('placeholder for a missing label ("": an empty cell); such rows are omitted', None)
    # Where the examples are: in files, on the Hub, or in the official GLUE download, if `glue_dir` is set.
    files: Mapping[str, Any] = key("train, validation, test → path or list of paths", {})
    hub: str | None = key("name of a dataset on the Hub", None)
    subset: str | None = key("its subset", None)
    train: str = key("its training split", "train")
    validation: tuple[str, ...] = key("its validation splits", ("validation",))
    test: tuple[str, ...] = key("its test splits", ("test",))
    folder: str | None = key("folder below glue_dir", None)
    tsv_columns: tuple[str | int, ...] = key("columns of its .tsv files; default: `columns` (likewise below)", ())
    tsv_label: str | int | None = key("label of its .tsv files", None)
    tsv_test_columns: tuple[str | int, ...] = key("columns of its test files", ())
    tsv_validation: tuple[str, ...] = key("names of its validation files, without .tsv", ("dev",))
    tsv_test: tuple[str, ...] = key("names of its test files", ("test",))
    tsv_other_names: Mapping[str, str] = key("file names to use for missing files", {})
    malformed_rows: int = key("maximum number of rows to skip because their length is not the header's", 0, at_least=0)
    # How it is trained.
    epochs: int = key("epochs of training", 3, at_least=1)
    batch_size: int = key("samples per step", 16, at_least=1)
    lr: float = key("peak learning rate", 1e-5, at_least=0)
    weight_decay: float = key("weight decay", 1e-6, at_least=0)
    optimizer: str = key("decoupled_adamw, adamw, or module:Class of your own", "decoupled_adamw")
    seeds: tuple[int, ...] = key("one job per seed; default: default_seed", ())
    eval_interval: str = duration("how often to evaluate", "1ep")
    precision: str | None = key("overrides the config's", None, choices=("fp32", "amp_bf16", "amp_fp16"))
    variant: str = key("in a search: the values of this candidate", "")

    @property
    def regression(self) -> bool:
        return self.kind == "regression"

    @property
    def num_labels(self) -> int:
        return 1 if self.regression else len(self.labels)


HUB = "nyu-mll/glue"
GLUE = {
    name: Task(name, hub=HUB, subset=name, **{k: tuple(v) if isinstance(v, list) else v for k, v in task.items()})
    for name, task in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}
FROM_MNLI = ("rte", "mrpc", "stsb")  # with `mnli_first`, these start from the encoder fine-tuned on MNLI


def of_glue(task: Task) -> bool:
    """Return whether GLUE's average counts a task: one of the eight, with GLUE's examples, splits and metrics."""
    glue = GLUE.get(task.name)
    if glue is None or task.files or task.folder not in (None, glue.folder):
        return False
    same = ("train", "validation", "tsv_validation", "metrics")
    on_hub = task.hub is None or (task.hub, task.subset) == (glue.hub, glue.subset)
    return on_hub and all(getattr(task, name) == getattr(glue, name) for name in same)


def optimizer_of(task: Task) -> dict[str, Any]:
    """Return what a task gives its optimizer: name and arguments."""
    given = {"name": task.optimizer, "lr": task.lr, "weight_decay": task.weight_decay}
    return given if ":" in task.optimizer else {**given, "betas": (0.9, 0.98), "eps": 1e-6}


def select(to_run: list[str], changes: Mapping[str, Any], default_seed: int, seeds: int | None = None) -> list[Task]:
    """Return the tasks to run, with the config's changes and their first `seeds` seeds: several candidates of a
    searched task. Raises UserError."""
    known = {name: [task] for name, task in GLUE.items()}
    known |= {name: _candidates(name, given) for name, given in changes.items()}
    for name in to_run:
        if name not in known:
            raise UserError(f"tasks_to_run: unknown task {name}{nearest(name, known)}")
    if repeated := sorted({name for name in to_run if to_run.count(name) > 1}):
        raise UserError(f"tasks_to_run names {', '.join(repeated)} more than once; name each task once")
    if not to_run and (own := [name for name in changes if name not in GLUE]):
        to_do = f"name the tasks to run, such as tasks_to_run=[{','.join(own)}]"
        raise UserError(f"tasks_to_run is empty, which means GLUE's eight and not {', '.join(own)}; {to_do}")
    chosen = [task for name in to_run or GLUE for task in known[name]]
    return [replace(task, seeds=(task.seeds or (default_seed,))[:seeds]) for task in chosen]


def _candidates(name: str, given: Any) -> list[Task]:
    """Return a task as the config changes it: one candidate, or several if hyperparameters have several values."""
    place = f"tasks.{name}"
    given = dict(_converted(place, given, Mapping[str, Any]))
    like = _converted(f"{place}.like", given.pop("like", name), str)
    if like != name and like not in GLUE:
        raise UserError(f"{place}.like: unknown task {like}{nearest(like, GLUE)}")
    if not name.replace("_", "").replace("-", "").isalnum():
        raise UserError(f"{place}: a task's name may have only letters, digits, - and _; its `title` may be anything")
    kinds = {entry.name: entry.type for entry in fields(Task) if entry.name not in ("name", "variant")}
    check_known(place, given, kinds)
    searched = {field: value for field, value in given.items() if field in HYPERPARAMETERS and isinstance(value, list)}
    rest = {field: value for field, value in given.items() if field not in searched}
    given = {field: _converted(f"{place}.{field}", value, kinds[field]) for field, value in rest.items()}
    if like in GLUE:
        base = GLUE[like] if like == name else replace(GLUE[like], name=name, title=name)
        if source := {field for field in ("files", "folder", "hub", "subset") if given.get(field)}:
            base = replace(base, folder=None)  # files and datasets named in the config take precedence over glue_dir
            if like != name:
                base = replace(base, subset=None, malformed_rows=0)
            if not source & {"hub", "subset"}:
                base = replace(base, hub=None, subset=None)
        base = replace(base, **given)
    elif "columns" in given:
        metric = METRICS.get(given.get("kind", "classification"), ("",))[0]
        base = Task(**{"name": name, "title": name, "metrics": (metric,), **given})
    else:
        raise UserError(f"{place}: a new task needs `columns`, one or two text columns, or `like`, a task of GLUE")
    candidates = [replace(base, **dict(zip(searched, values))) for values in itertools.product(*searched.values())]
    for candidate in candidates:
        check(candidate)
    if not candidates or len(set(map(repr, candidates))) < len(candidates):
        raise UserError(f"{place}: a search needs values, each once; correct {', '.join(searched)}")
    several = [field for field, values in searched.items() if len(values) > 1]
    variants = [",".join(f"{field}={getattr(task, field):g}" for field in several) for task in candidates]
    return [replace(task, variant=variant) for task, variant in zip(candidates, variants)]


def _converted(name: str, value: Any, kind: Any) -> Any:
    """Convert a value to its field's type: a list to a tuple, a number to text. Raises UserError for any other type."""
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise UserError(f"{name}={value!r} must be a list, such as [{value}]")
        return tuple(_converted(name, entry, get_args(kind)[0]) for entry in value)
    if get_origin(kind) is Mapping and not isinstance(value, Mapping):
        raise UserError(f"{name}={value!r} must be a section of `key: value` lines")
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if str not in kinds or type(value) in kinds:
        return value
    if type(value) in (int, float):
        return class_name(value)
    hint = f"only {', '.join(HYPERPARAMETERS)} take several values" if isinstance(value, list) else "put it in quotes"
    raise UserError(f"{name}={value!r} must be a string; {hint}")


def class_name(label: Any) -> str:
    """Return a label as a class name. 1.0 becomes "1": tables with missing values store integers as floats."""
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)


def check(task: Task) -> None:
    """Raise UserError for fields that are invalid or do not fit together."""
    place = f"tasks.{task.name}"
    validate(task, f"{place}.")
    if ":" not in task.optimizer:
        named = Rule(choices=("decoupled_adamw", "adamw"), also=("module:Class",))
        check_value(f"{place}.optimizer", task.optimizer, rule=named)
    for field, label in (("columns", task.label), ("tsv_columns", task.tsv_label), ("tsv_test_columns", None)):
        columns = getattr(task, field)
        if len(columns) > 2 or (field == "columns" and not columns):
            raise UserError(f"{place}.{field} must have one or two text columns, not {len(columns)}")
        if len({*columns, label}) <= len(columns):
            shown = ", ".join(map(str, columns))
            raise UserError(f"{place}: columns {shown} and label {label} name a column twice; name each once")
        for column in (*columns, label):
            if isinstance(column, int):
                check_value(f"{place}: column", column, int, Rule(at_least=0))
    for seed in task.seeds:
        check_value(f"{place}.seeds", seed, int, Rule(**SEED))
    for metric in task.metrics:
        if metric not in (known := METRICS[task.kind]):
            raise UserError(f"{place}.metrics: unknown metric {metric} for a {task.kind}{nearest(metric, known)}")
    check_known(f"{place}.files", task.files, SPLITS)
    for split, paths in task.files.items():
        if not (paths and all(isinstance(path, str) for path in (paths if isinstance(paths, list) else [paths]))):
            raise UserError(f"{place}.files.{split}={paths!r} must be a path or a list of paths")
    missing = [split for split in SPLITS[:2] if split not in task.files]
    sources = [field for field in ("files", "hub", "folder") if getattr(task, field)]
    classes, shown = len(task.labels), ", ".join(task.labels)
    for wrong, message in (
        *(
            (not getattr(task, n), f".{n} must have at least one entry")
            for n in ("metrics", "validation", "tsv_validation")
        ),
        (task.regression and classes, ".labels: a regression has none; set labels to [] or omit kind"),
        (classes == 1 or len(set(task.labels)) < classes, f".labels={shown} must be two or more classes, each once"),
        ("f1" in task.metrics and classes not in (0, 2), ".metrics: f1 is for two classes; use macro_f1"),
        (len(set(task.seeds)) < len(task.seeds), ".seeds has a seed twice; give each once"),
        (task.files and missing, f".files lacks {' and '.join(missing)}; give a file for each"),
        (task.files and len(sources) > 1, f" has both {' and '.join(sources[:2])}; omit one"),
        (not sources, " needs files: {train: PATH, validation: PATH}, hub: DATASET, or folder: NAME"),
    ):
        if wrong:
            raise UserError(f"{place}{message}")
