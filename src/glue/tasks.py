"""The config of fine-tuning, and its tasks: where texts and labels are. GLUE's eight are in tasks.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

from src.config import Rule, check_known, check_value, key
from src.errors import UserError
from src.jobs import tasks
from src.jobs.config import JobsConfig
from src.jobs.tasks import METRICS, Suite

SPLITS = ("train", "validation", "test")


@dataclass
class FinetuneConfig(JobsConfig):
    """Keys of `glue.py`."""

    starting_checkpoint_load_path: str | None = key(
        "pretrained encoder (ours, the authors' or a BERT): checkpoint, Hub folder or name; null: random weights", None
    )
    from_scratch: bool = key("take sizes and tokenizer of the starting checkpoint, not its weights: a baseline", False)
    tokenizer_name: str | None = key("Hub name or folder; default: the starting checkpoint's tokenizer", None)
    glue_dir: str | None = key("folder with the official GLUE TSV files; default: nyu-mll/glue on the Hub", None)
    tasks: dict[str, Any] = key(
        "changes to src/glue/tasks.yaml (a list of values: a search), or new tasks: see Task in src/glue/tasks.py", {}
    )
    tasks_to_run: list[str] = key("names of tasks, in order; empty: the eight GLUE tasks", [])
    mnli_first: bool = key("start RTE, MRPC and STS-B from the encoder tuned on MNLI with its first seed", False)
    predict_test: bool = key("also predict the GLUE test sets and write the files that its server accepts", False)
    max_seq_len: int = key("maximum sequence length in tokens", 128)
    tokens_folder: str | None = key("where the tokens of each task are kept; default: save_folder/tokens", None)


@dataclass(frozen=True)
class Task(tasks.Task):
    """A text task."""

    needed: ClassVar[Mapping[str, str]] = {"columns": "one or two text columns"}
    # A job stores digests of its examples, and its max_seq_len.
    unstored: ClassVar[tuple[str, ...]] = (*tasks.Task.unstored, "files", "hub", "max_seq_len")

    columns: tuple[str | int, ...] = key("one or two text columns, by name, or by number in a file without a header")
    label: str | int = key("the label's column", "label")
    kind: str = key("what the label is", "classification", choices=tuple(METRICS))
    max_seq_len: int | None = key("overrides the config's", None)
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
    malformed_rows: int = key("maximum number of malformed rows to skip in each file", 0, at_least=0)

    def changed(self, name: str, given: Mapping[str, Any]) -> Self:
        """Let files and datasets that the config names take precedence over glue_dir."""
        like = self
        if source := {field for field in ("files", "folder", "hub", "subset") if given.get(field)}:
            like = replace(like, folder=None)
            if name != self.name:
                like = replace(like, subset=None, malformed_rows=0)
            if not source & {"hub", "subset"}:
                like = replace(like, hub=None, subset=None)
        return super(Task, like).changed(name, given)

    def check(self) -> None:
        super().check()
        place = f"tasks.{self.name}"
        for field, label in (("columns", self.label), ("tsv_columns", self.tsv_label), ("tsv_test_columns", None)):
            columns = getattr(self, field)
            if len(columns) > 2 or (field == "columns" and not columns):
                raise UserError(f"{place}.{field} must have one or two text columns, not {len(columns)}")
            if len({*columns, label}) <= len(columns):
                shown = ", ".join(map(str, columns))
                raise UserError(f"{place}: columns {shown} and label {label} name a column twice; name each once")
            for column in (*columns, label):
                if isinstance(column, int):
                    check_value(f"{place}: column", column, int, Rule(at_least=0))
        check_known(f"{place}.files", self.files, SPLITS)
        for split, paths in self.files.items():
            if not (paths and all(isinstance(path, str) for path in (paths if isinstance(paths, list) else [paths]))):
                raise UserError(f"{place}.files.{split}={paths!r} must be a path or a list of paths")
        missing = [split for split in SPLITS[:2] if split not in self.files]
        sources = [field for field in ("files", "hub", "folder") if getattr(self, field)]
        for wrong, message in (
            (not self.validation, ".validation must have at least one entry"),
            (not self.tsv_validation, ".tsv_validation must have at least one entry"),
            (self.files and missing, f".files lacks {' and '.join(missing)}; give a file for each"),
            (self.files and len(sources) > 1, f" has both {' and '.join(sources[:2])}; omit one"),
            (not sources, " needs files: {train: PATH, validation: PATH}, hub: DATASET, or folder: NAME"),
        ):
            if wrong:
                raise UserError(f"{place}{message}")


HUB = "nyu-mll/glue"
GLUE = {
    name: Task(name, hub=HUB, subset=name, **{k: tuple(v) if isinstance(v, list) else v for k, v in task.items()})
    for name, task in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}
select = Suite("GLUE", "eight", GLUE).select
FROM_MNLI = ("rte", "mrpc", "stsb")  # with `mnli_first`, these start from the encoder fine-tuned on MNLI


def of_glue(task: Task) -> bool:
    """Return whether GLUE's average counts a task: one of the eight, with GLUE's examples, splits and metrics."""
    glue = GLUE.get(task.name)
    if glue is None or task.files or task.folder not in (None, glue.folder):
        return False
    same = ("train", "validation", "tsv_validation", "metrics")
    on_hub = task.hub is None or (task.hub, task.subset) == (glue.hub, glue.subset)
    return on_hub and all(getattr(task, name) == getattr(glue, name) for name in same)
