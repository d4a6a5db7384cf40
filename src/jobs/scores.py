"""The metrics of the tasks, over all examples of a split at once."""

import torch
from scipy.stats import pearsonr, spearmanr
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional import classification as f
from torchmetrics.utilities import dim_zero_cat

from src.jobs.predictions import predicted
from src.jobs.tasks import Task

# Functions of (predictions, labels, classes); predictions and labels are class indices or values, both (examples,).
METRICS = {
    "accuracy": lambda guesses, labels, n: f.multiclass_accuracy(guesses, labels, n, "micro", validate_args=False),
    "f1": lambda guesses, labels, n: f.binary_f1_score(guesses, labels, validate_args=False),
    "macro_f1": lambda guesses, labels, n: f.multiclass_f1_score(guesses, labels, n, "macro", validate_args=False),
    "matthews": lambda guesses, labels, n: f.multiclass_matthews_corrcoef(guesses, labels, n, validate_args=False),
    "spearman": lambda guesses, labels, n: spearmanr(guesses, labels).statistic,
    "pearson": lambda guesses, labels, n: pearsonr(guesses, labels).statistic,
}
CORRELATIONS = ("matthews", "spearman", "pearson")


def score(metrics: tuple[str, ...], predictions: Tensor, labels: Tensor, classes: int) -> dict[str, float]:
    """Compute metrics of predictions, (examples,): class indices, or regression values."""
    if not predictions.isfinite().all():
        return dict.fromkeys(metrics, float("nan"))
    # The correlation with a constant counts as 0; the libraries return NaN, or not quite 0.
    constant = any((values == values[0]).all() for values in (predictions, labels))
    zero = CORRELATIONS if constant else ()
    return {m: 0.0 if m in zero else float(METRICS[m](predictions, labels, classes)) for m in metrics}


def at_chance(accuracy: float, constant: float, examples: int) -> bool:
    """Return whether an accuracy is at most two standard errors above that of a constant answer."""
    return accuracy <= constant + 2 * (constant * (1 - constant) / examples) ** 0.5


class TaskScore(Metric):
    """A task's metric for evaluation during training, computed over all collected predictions of a split."""

    full_state_update = False

    def __init__(self, task: Task, metric: str):
        super().__init__()
        self.task, self.metric = task, metric
        self.add_state("predictions", default=[], dist_reduce_fx="cat")
        self.add_state("labels", default=[], dist_reduce_fx="cat")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        self.predictions.append(predicted(logits))
        self.labels.append(labels)

    def compute(self) -> Tensor:
        predictions, labels = dim_zero_cat(self.predictions).cpu(), dim_zero_cat(self.labels).cpu()
        return torch.tensor(score((self.metric,), predictions, labels, self.task.num_labels)[self.metric])
