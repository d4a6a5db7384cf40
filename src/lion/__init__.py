"""LION: bidirectional encoders with linear attention (arXiv:2502.16249). Needs only torch and transformers."""

from .configuration_lion import LionConfig
from .linear_attention import linear_attention
from .modeling_lion import (
    LionForMaskedLM,
    LionForQuestionAnswering,
    LionForSequenceClassification,
    LionForTokenClassification,
    LionModel,
    LionPreTrainedModel,
)
from .two_sided_attention import Triangle, two_sided_attention

__all__ = [
    "LionConfig",
    "LionForMaskedLM",
    "LionForQuestionAnswering",
    "LionForSequenceClassification",
    "LionForTokenClassification",
    "LionModel",
    "LionPreTrainedModel",
    "Triangle",
    "linear_attention",
    "two_sided_attention",
]
