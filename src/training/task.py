"""The interface of a task: what one run trains, and what it measures. `src/training/run.py` does everything else."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.checkpoints.remote import fetch
from src.errors import UserError

if TYPE_CHECKING:  # a finished run is reported without these imports, which take seconds
    from composer import Callback, DataSpec
    from composer.models import HuggingFaceModel

    from src.publish.callback import Background
    from src.training.checkpointing import CheckpointWriter
    from src.training.run_log import RunLog


@dataclass(frozen=True)
class Curve:
    """A metric, in the names of metrics.jsonl (`name` and `eval_key`) and of Composer (`train_key`)."""

    name: str  # in lines of training and in summary.json, e.g. accuracy
    title: str  # for people, e.g. masked accuracy
    eval_key: str  # e.g. eval/MaskedAccuracy
    train_key: str | None = None  # e.g. metrics/train/MaskedAccuracy; None: not measured in training
    percent: bool = False
    unit: str = ""  # of a value that is not a percentage, e.g. nats per token
    baseline: bool = False  # drawn as a line: the score of a trivial prediction


def best_step(evaluations: Iterable[tuple[int, Mapping[str, float]]], curve: Curve) -> int | None:
    """Return the first step after 0 with the best value of a curve, the highest percentage or otherwise the lowest
    number, among (step, values by eval_key); None if there is none."""
    sign = -1 if curve.percent else 1
    trained = [(step, values.get(curve.eval_key, math.nan)) for step, values in evaluations if step]
    return min(((sign * value, step) for step, value in trained if math.isfinite(value)), default=(0.0, None))[1]


def score_curve(name: str) -> Curve:
    """Return the curve of a fine-tuned copy's score, such as finetune/sst2/accuracy."""
    return Curve(name, name.removeprefix("finetune/").replace("/", " "), name, percent=True)


def in_words(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{score_curve(name).title} {score:.2%}" for name, score in scores.items())


class Task(ABC):
    """What a run trains: its model, its data, and what is measured."""

    command: str  # the script, for messages
    curves: tuple[Curve, ...]  # drawn and summarized; the evaluation with the lowest first curve is the best
    max_tokens_per_sample: int
    sample: str  # a sample in words, such as "up to 128 tokens each"
    counts: str = "tokens"  # whose number per second is reported; otherwise a name of samples
    statistics: Any = None  # counts of the training data, saved as attributes; `shares()` goes to the metrics

    def __init__(self, config: Any):
        self.config = config

    @property
    def microbatch_size(self) -> Any:
        """The samples per device and forward pass, or auto."""
        return self.config.device_train_microbatch_size

    def best_curve(self) -> Curve | None:
        """The curve by which the best checkpoint is kept. Raises UserError for the key `save_best`."""
        if (name := self.config.save_best) is None:
            return None
        names = {curve.name: curve for curve in self.curves if not curve.baseline}
        if name not in names:
            raise UserError(f"save_best={name} must be one of {', '.join(names)}")
        return names[name]

    @property
    def compiles_well(self) -> bool:
        """Whether compile_config=auto may compile the model."""
        return True

    def callbacks(self) -> "list[Callback]":
        """Return callbacks that act on each batch before the others do."""
        return []

    def background(self, writer: "CheckpointWriter", run_log: "RunLog") -> "list[Background]":
        """Return what works on the checkpoints that the writer has saved while training continues."""
        return []

    def check_paths(self) -> None:
        """Raise UserError for a path or a curve that cannot be used, before any import that takes seconds."""
        self.best_curve()
        start, resumes = self.config.load_path, any(Path(self.config.save_folder).glob("ep*-rank0.pt"))
        if not (start is None or resumes or "://" in start or (path := fetch(start, "load_path")).is_file()):
            folder = f", or start from the weights of a folder with {self.config.weights_key}" if path.is_dir() else ""
            raise UserError(f"load_path={start} is not a file; give a checkpoint or omit load_path{folder}")

    @abstractmethod
    def build_model(self, checkpoint: Path | None) -> "HuggingFaceModel":
        """Return the model; `checkpoint` is the run's own if it resumes. Raises UserError."""

    @abstractmethod
    def build_loaders(self, device_batch_size: int) -> "tuple[DataSpec, DataSpec]":
        """Return training and evaluation data for this device, and set `statistics`. Raises UserError."""

    @abstractmethod
    def describe(self, model: "HuggingFaceModel") -> tuple[str, str]:
        """Return the model and the data in words."""
