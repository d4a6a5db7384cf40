"""The losses of the heads, in float32, and what they do not count."""

from torch import Tensor
from torch.nn import functional as F
from transformers import PretrainedConfig


def labelled_positions(labels: Tensor) -> Tensor:
    """The positions of the labels that are not -100 in the flattened labels."""
    return (labels.flatten() != -100).nonzero().squeeze(1)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the labels that are not -100; 0 without any, where F.cross_entropy returns NaN."""
    return F.cross_entropy(logits.float(), labels, reduction="sum") / (labels != -100).sum().clamp(min=1)


def span_loss(logits: Tensor, positions: Tensor) -> Tensor:
    """The cross entropy of where spans start or end, (B,), by logits, (B, L); those outside the text do not count."""
    positions = positions.flatten()
    return cross_entropy(logits, positions.masked_fill((positions < 0) | (positions >= logits.shape[1]), -100))


def classification_loss(config: PretrainedConfig, logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of logits, (B, num_labels), as in BERT's classifier of transformers. By `config.problem_type`, it is the
    squared error (regression; with one label also if it says single_label_classification), binary cross entropy
    (multi_label_classification), or cross entropy (single_label_classification). If that is None, it is set, since
    pipelines read it too: to regression for one label, to multi_label_classification for labels of floating point.
    Raises ValueError for labels of one class each where several are expected."""
    one = logits.shape[-1] == 1
    if config.problem_type is None:
        kind = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
        config.problem_type = "regression" if one else kind
    kind = config.problem_type
    if labels.numel() != logits.numel() and kind == "multi_label_classification":
        problem = f"problem_type={kind} needs labels of shape {tuple(logits.shape)}"
        raise ValueError(f"{problem} (got {tuple(labels.shape)}); give such, or set config.problem_type")
    if kind == "regression" or (one and kind != "multi_label_classification"):
        return F.mse_loss(logits.float(), labels.float().view_as(logits))
    if kind == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(logits.float(), labels.float().view_as(logits))
    return F.cross_entropy(logits.float(), labels.flatten())
