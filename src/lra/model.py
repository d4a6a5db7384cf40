"""The classifier of Long Range Arena: a LION encoder of tokens or pixels, and a head for one sequence or for two."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import SequenceClassifierOutput

from src.lion import LionConfig
from src.lion.modeling_lion import HeadedModel
from src.lra.tasks import FIRST

MEAN, DEVIATION = 122.6, 61.0  # of CIFAR-10's gray pixels, as in S4 and S5


class SequenceClassifier(HeadedModel):
    """The encoder's mean over tokens, (B, D), and a linear layer. With `config.reads_values`, a linear layer and not a
    table embeds inputs. With `config.reads_pairs`, two sequences are encoded separately, and an MLP takes
    [x₁, x₂, x₁∘x₂, x₁−x₂] of their means, as in the benchmark's own models (arXiv:2011.04006, section 2.2.3)."""

    def add_head(self, config: LionConfig) -> None:
        D = config.hidden_size
        self.value = nn.Linear(1, D) if config.reads_values else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.pair = nn.Linear(4 * D, D) if config.reads_pairs else None
        self.classifier = nn.Linear(D, config.num_labels)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self.value:
            module.reset_parameters()  # with a bias: without, only the sign of a value passes the embeddings' LayerNorm

    def no_weight_decay(self) -> set[str]:
        """The parameters of decays."""
        return {name for name, _ in self.named_parameters() if ".attention.decay" in name}

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> SequenceClassifierOutput:
        """Classify sequences of numbers from 0 to 255, (B, L), or pairs, (B, 2, L), with masks of the same shape;
        labels: (B,)."""
        if self.pair is not None:
            input_ids = input_ids.flatten(0, 1)
            attention_mask = None if attention_mask is None else attention_mask.flatten(0, 1)
        if self.value is None:
            x = self.lion(input_ids + FIRST, attention_mask).last_hidden_state
        else:
            values = (input_ids.to(self.value.weight.dtype) - MEAN) / DEVIATION
            x = self.lion(None, attention_mask, inputs_embeds=self.value(values[..., None])).last_hidden_state
        x = self.lion._pooled(x, None if attention_mask is None else attention_mask.bool())
        if self.pair is not None:
            first, second = x.unflatten(0, (-1, 2)).unbind(1)
            x = F.gelu(self.pair(torch.cat([first, second, first * second, first - second], -1)))
        logits = self.classifier(self.dropout(x))
        loss = None if labels is None else F.cross_entropy(logits.float(), labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)
