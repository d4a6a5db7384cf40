"""Tasks of Long Range Arena, and the config of `lra.py`. A task of one's own is `like` one of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

from src.config import SEED, key
from src.data.tokenizers import SPECIAL_TOKENS
from src.errors import UserError
from src.jobs import tasks
from src.jobs.config import JobsConfig
from src.jobs.tasks import Suite
from src.lra.listops import VOCABULARY

FIRST = len(SPECIAL_TOKENS)  # the token of the number 0


@dataclass
class LraConfig(JobsConfig):
    """Keys of `lra.py`."""

    starting_checkpoint_load_path: str | None = key(
        "checkpoint that main.py pretrained on the task's own inputs (lra.py shards): sets the encoder's weights and "
        "sizes; null: random weights",
        None,
    )
    model: dict[str, Any] = key(
        "LionConfig arguments for all tasks, which override each task's own; long_reach: true: its max_length", {}
    )
    lra_dir: str | None = key("folder of the unpacked release (lra_release/lra_release) or of lra.py make", None)
    arrays_folder: str | None = key(
        "where the files, once read, are kept for all jobs; several runs may share it; default: save_folder/arrays",
        None,
    )
    activation_checkpointing: bool = key("store only each layer's input and recompute the rest, to save memory", False)
    tasks: dict[str, Any] = key(
        "changes to src/lra/tasks.yaml (a list of values: a search), or new tasks: see Task in src/lra/tasks.py", {}
    )
    tasks_to_run: list[str] = key("names of tasks, in order; empty: all six", [])
    device_eval_batch_size: int = key("samples per evaluation batch", 32, at_least=1)
    save_finetuned_checkpoints: bool = key("keep the trained model of each job", False)


@dataclass(frozen=True)
class Task(tasks.Task):
    """A task on sequences of tokens, bytes or pixels, each a number from 0 to 255."""

    searchable: ClassVar[tuple[str, ...]] = (*tasks.Task.searchable, "dropout")
    needed: ClassVar[Mapping[str, str]] = {
        "layout": "how its files are laid out",
        "max_length": "the maximum sequence length",
        "labels": "the names of its classes",
    }
    unstored: ClassVar[tuple[str, ...]] = (  # and what the data's digest already covers
        *tasks.Task.unstored, "layout", "folder", "size", "hub", "validation", "split", "split_seed",
    )  # fmt: skip

    layout: str = key("of src/lra/sources.py", "listops", choices=("listops", "imdb", "aan", "cifar10", "pathfinder"))
    folder: str | None = key("folder below lra_dir; default: the layout's", None)
    size: int | None = key("pixels per side of Pathfinder's images", None, choices=(None, 32, 128))
    hub: str | None = key("name of a dataset on the Hub to read if there is no folder", None)
    max_length: int = key("maximum sequence length", 4096, at_least=1)
    validation: str = key(
        "held_out: a part of the training set, or the task's own; test: the test set itself, as in papers on Text",
        "held_out",
        choices=("held_out", "test"),
    )
    split: str = key("of Pathfinder's images into 80, 10 and 10 %", "seed", choices=("seed", "in_order"))
    split_seed: int = key("seed of what is held out, and of that split", 0, **SEED)
    inputs: str = key(
        "tokens: an embedding per value; values: the normalized value through a linear layer",
        "tokens",
        choices=("tokens", "values"),
    )
    vocabulary: int = key("how many values there are", 256, at_least=1, at_most=256)
    model: Mapping[str, Any] = key("arguments of LionConfig", {})
    dropout: float = key("dropout on embeddings and blocks", 0.0, at_least=0, below=1)
    lr: float = key("peak learning rate", 5e-4, at_least=0)
    weight_decay: float = key("weight decay; decays, biases and norms have none", 0.05, at_least=0)
    optimizer: str = key("adamw, decoupled_adamw, or module:Class of your own", "adamw")

    @property
    def pairs(self) -> bool:
        return self.layout == "aan"

    @property
    def longest(self) -> int:
        """The longest row of a batch, a multiple of 8."""
        return -(-self.max_length // 8) * 8

    def changed(self, name: str, given: Mapping[str, Any]) -> Self:
        """Arguments of the model that are not given stay."""
        given = {**given, "model": {**self.model, **given["model"]}} if "model" in given else given
        return super().changed(name, given)

    def check(self) -> None:
        super().check()
        place = f"tasks.{self.name}"
        if (self.size is None) == (self.layout == "pathfinder"):
            raise UserError(f"{place}.size={self.size}: use 32 or 128 for Pathfinder, and omit size for others")
        if not self.labels:
            raise UserError(f"{place}.labels is empty; name the classes in the order of their numbers")
        bytes_or_pixels = self.layout != "listops" and self.inputs == "tokens"
        if self.vocabulary < (least := 256 if bytes_or_pixels else len(VOCABULARY)):
            raise UserError(
                f"{place}.vocabulary={self.vocabulary}: its inputs have {least} values; raise it, or omit it"
            )


LRA = {
    name: Task(name, metrics=("accuracy",), **{k: tuple(v) if isinstance(v, list) else v for k, v in task.items()})
    for name, task in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}
SUITE = Suite("Long Range Arena", "six", LRA)


# Examples of the release's test sets.
TESTED = {"listops": 2000, "text": 25000, "retrieval": 17437, "image": 10000, "pathfinder": 20000, "pathx": 20000}


def unlike(task: Task, tested: int) -> list[str] | None:
    """Return what differs from the benchmark in a task with this number of test examples; None for a task outside the
    benchmark."""
    if (known := LRA.get(task.name)) is None:
        return None
    same = ("layout", "hub", "size", "max_length", "metrics", "labels")
    differ = [name for name in same if getattr(task, name) != getattr(known, name)]
    found = [f"{', '.join(differ)} unlike the benchmark's"] if differ else []
    if tested != TESTED[task.name]:
        found.append(f"{tested:,} test examples instead of {TESTED[task.name]:,}")
    return found


def counts(task: Task, origin: str | None, tested: int) -> bool:
    """Return whether the benchmark's averages count a task: one of the six, with its data, or the same generated."""
    return unlike(task, tested) == [] and (origin is None or "unlike the release" not in origin)


def model_arguments(task: Task, own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of LionConfig for a task: its own, then the config's. Raises UserError."""
    from src.training.text_model import check_arguments

    for place, part in ((f"tasks.{task.name}.model", own), ("model", given)):
        check_arguments(
            place, {n: value for n, value in part.items() if n != "long_reach" or not isinstance(value, bool)}
        )
        if "hidden_dropout_prob" in part:
            raise UserError(f"{place}.hidden_dropout_prob: use the tasks' own field, dropout, instead")
    arguments = {**own, **given}
    reach = arguments.pop("long_reach", None)
    return {**arguments, "long_reach": task.max_length if reach is True else reach} if reach else arguments
