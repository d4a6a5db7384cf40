"""Metrics of more than one command."""

import torch
from torch import Tensor
from torchmetrics import Metric


class MajorityAccuracy(Metric):
    """Accuracy of always predicting the most frequent label, the baseline of an accuracy."""

    def __init__(self, classes: int):
        super().__init__()
        self.add_state("counts", default=torch.zeros(classes, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        self.counts += torch.bincount(labels[labels >= 0], minlength=len(self.counts))

    def compute(self) -> Tensor:
        return self.counts.max() / self.counts.sum().clamp(min=1)
