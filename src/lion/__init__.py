"""LION: bidirectional encoders with linear attention (arXiv:2502.16249). Needs only torch and transformers."""

from .configuration_lion import LionConfig, LionVisionConfig
from .linear_attention import linear_attention
from .modeling_lion import (
    LionForMaskedLM,
    LionForQuestionAnswering,
    LionForSequenceClassification,
    LionForTokenClassification,
    LionModel,
    LionPreTrainedModel,
)
from .modeling_lion_embedding import LionEmbeddingModel
from .modeling_lion_vision import LionForImageClassification, LionImageModel
from .patch_orders import linear_attention_in_orders
from .two_sided_attention import Triangle, two_sided_attention

__all__ = [
    "LionConfig",
    "LionEmbeddingModel",
    "LionForImageClassification",
    "LionForMaskedLM",
    "LionForQuestionAnswering",
    "LionForSequenceClassification",
    "LionForTokenClassification",
    "LionImageModel",
    "LionModel",
    "LionPreTrainedModel",
    "LionVisionConfig",
    "Triangle",
    "linear_attention",
    "linear_attention_in_orders",
    "two_sided_attention",
]
