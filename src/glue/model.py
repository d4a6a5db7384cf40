"""The encoder as a Composer model for text classification and regression."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torchmetrics import Metric
from transformers import PreTrainedTokenizerBase

from src.lion import LionForSequenceClassification
from src.training.trainer import AutocastModel


class LionClassifier(AutocastModel):
    """Classifier or regressor of a text or a pair of texts. `metrics` are torchmetrics by name."""

    def __init__(
        self, model: LionForSequenceClassification, tokenizer: PreTrainedTokenizerBase, metrics: dict[str, Metric]
    ):
        super().__init__(model, tokenizer, use_logits=True)
        self.val_metrics = metrics

    def eval_forward(self, batch: Mapping[str, Tensor], outputs: Any = None) -> Tensor:
        """Return logits, (batch, classes), or regression values, (batch,)."""
        with self.autocast():
            return super().eval_forward({"labels": None, **batch}, outputs).float()  # a test set has no labels
