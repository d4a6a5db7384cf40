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
    """The loss of logits, (B, num_labels), as in BERT's classifier of transformers. By `config.problem_type`, or if
    that is None by the labels, it is the squared error (regression; if there is one label), binary cross entropy
    (multi_label_classification; labels of floating point), or cross entropy (single_label_classification)."""
    kind, one = config.problem_type, logits.shape[-1] == 1
    if kind == "regression" or (one and kind != "multi_label_classification"):
        return F.mse_loss(logits.float(), labels.float().view_as(logits))
    if kind == "multi_label_classification" or (kind is None and labels.is_floating_point()):
        return F.binary_cross_entropy_with_logits(logits.float(), labels.float().view_as(logits))
    return F.cross_entropy(logits.float(), labels.flatten())
