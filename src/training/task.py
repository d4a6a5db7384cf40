"""The interface of a task: what one run trains. `src/training/run.py` does everything else."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.training.metrics import Curve

if TYPE_CHECKING:  # a finished run is reported without these imports, which take seconds
    from composer import DataSpec
    from composer.models import HuggingFaceModel

    from src.training.run_log import Statistics


class Task(ABC):
    """What a run trains: its model, its data, and what is measured."""

    command: str  # the script, for messages
    curves: tuple[Curve, ...]  # drawn and summarised; the evaluation with the lowest first curve is the best
    statistics: "Statistics | None" = None  # of the training data, once `build_loaders` has run

    def __init__(self, config: Any):
        self.config = config

    @abstractmethod
    def check_paths(self) -> None:
        """Raise UserError for a path that cannot be used, before any import that takes seconds."""

    @abstractmethod
    def build_model(self, checkpoint: Path | None) -> "HuggingFaceModel":
        """Return the model; `checkpoint` is the run's own if it resumes. Raises UserError."""

    @abstractmethod
    def build_loaders(self, device_batch_size: int) -> "tuple[DataSpec, DataSpec]":
        """Return training and evaluation data for this device. Raises UserError."""

    @abstractmethod
    def describe(self, model: "HuggingFaceModel") -> tuple[str, str]:
        """Return the model and the data in words."""

    @property
    @abstractmethod
    def max_tokens_per_sample(self) -> int:
        """Return the maximum number of tokens in a sample."""
