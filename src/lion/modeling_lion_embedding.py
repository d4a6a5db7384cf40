"""Text embeddings: a LION encoder whose hidden states are pooled to a vector per text, or per passage of one."""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from .channel_decay import attend_by_channel  # noqa: F401
from .channel_kernel_source import CHANNELS  # noqa: F401
from .configuration_lion import LionConfig
from .cpu import speed_up  # noqa: F401
from .cpu_crossover import full_is_faster  # noqa: F401
from .cpu_kernel import covers  # noqa: F401
from .cpu_kernel_source import SOURCE  # noqa: F401
from .cpu_linear import linear  # noqa: F401
from .custom_operators import no_autocast
from .full_kernel_source import FULL  # noqa: F401
from .hydra_attention import hydra_attention  # noqa: F401
from .linear_attention import SegmentStates  # noqa: F401
from .linear_attention_forms import sequence_starts
from .linear_attention_native import full_forward  # noqa: F401
from .linear_attention_triton import fused_linear_attention  # noqa: F401
from .losses import cross_entropy  # noqa: F401
from .machine import choice  # noqa: F401
from .mixers import MIXERS  # noqa: F401
from .modeling_lion import HeadedModel, LionModel
from .patch_orders import snakes  # noqa: F401
from .pooling import pool, pool_spans
from .triton_kernels import AVAILABLE  # noqa: F401
from .two_sided_attention import two_sided_attention  # noqa: F401

# Unused imports are here because transformers copies from a local Hub folder only what this file imports itself.
READ_AT_ONCE = 8192  # tokens
POOLING_MASK = inspect.Parameter("pooling_mask", inspect.Parameter.KEYWORD_ONLY, default=None)
ARGUMENTS = list(inspect.signature(LionModel.forward).parameters)[1:]


class LionEmbeddingModel(HeadedModel):
    """The encoder and a pooling, `config.pooling`: texts to vectors. With attention pooling, hidden states are returned
    times their weights and the number of tokens, so that their mean over a text is its vector, and their mean over a
    span is the span's vector but for its length."""

    def add_head(self, config: LionConfig) -> None:
        attends = config.pooling == "attention"
        self.pooling_weight = nn.Parameter(torch.zeros(config.hidden_size)) if attends else None

    def init_parameters(self) -> None:
        if self.pooling_weight is not None:
            nn.init.zeros_(self.pooling_weight)

    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, *args, **kwargs):
        """Encode texts. Arguments: `LionModel.forward`, and pooling_mask, (B, L), True at the tokens of a passage that
        are pooled; None: all real ones. The pooler's output is the vectors in float32, (B, D), not of unit length; of
        packed texts, (texts, D), in reading order."""
        if len(args) > len(ARGUMENTS) - 2:
            raise TypeError(f"forward() takes at most {len(ARGUMENTS)} inputs ({len(args) + 2} given)")
        given = dict(**dict(zip(ARGUMENTS[2:], args)), **kwargs)
        return_dict, pooling_mask = given.pop("return_dict", None), given.pop("pooling_mask", None)
        seq_idx = given.get("seq_idx")
        output = self.lion(input_ids, attention_mask, **given, return_dict=True)
        x = output.last_hidden_state
        tokens = torch.ones_like(x[:, None, :, 0], dtype=torch.bool)  # of each text, (B, texts of a row, L)
        if seq_idx is not None:
            number = sequence_starts(seq_idx).cumsum(1)
            tokens = number[:, None] == torch.arange(int(number.max()) + 1, device=x.device)[:, None]
        texts = tokens.any(-1)  # of which rows have different numbers
        for mask in (attention_mask, pooling_mask):
            if mask is not None:
                tokens = tokens & mask[:, None].bool()
        if self.config.pooling == "cls":
            tokens = tokens & (tokens.cumsum(-1) == 1)
        with no_autocast(x):
            vectors, weights = pool(x, tokens, self.scores(x))
        if self.pooling_weight is not None:
            factors = (weights * tokens.sum(-1, keepdim=True)).sum(1)  # (B, L)
            x = x * factors[..., None].to(x.dtype)
        vectors = vectors[:, 0] if seq_idx is None else vectors[texts]
        output = BaseModelOutputWithPooling(x, vectors, output.hidden_states, output.attentions)
        return output if self.returns_dict(return_dict) else output.to_tuple()

    forward.__signature__ = inspect.Signature(  # which transformers and Composer read
        [*inspect.signature(LionModel.forward).parameters.values(), POOLING_MASK]
    )

    def scores(self, x: Tensor) -> Tensor | None:
        """The scores of tokens, (..., D), in float32 at least; None without attention pooling."""
        if self.pooling_weight is None:
            return None
        with no_autocast(x):
            wide = torch.promote_types(x.dtype, torch.float32)
            return x.to(wide) @ self.pooling_weight.to(wide)

    @torch.no_grad()
    def encode_long(self, input_ids: Tensor, *args, spans: Sequence[tuple[int, int]], **kwargs) -> tuple:
        """Return vectors, (spans, D), and weights, (spans,), of passages of a text by the model's pooling. Arguments:
        `LionModel.encode_long`. Raises ValueError also for pooling "cls", which has none of passages."""
        if self.config.pooling == "cls":
            raise ValueError("pooling is cls, the first token, so passages have no vectors; use a model with another")
        if len(input_ids) != 1:
            raise ValueError(f"spans are of a single text, and this is a batch of {len(input_ids)}; pass one at a time")
        x = self.lion.encode_long(input_ids, *args, **kwargs)[0]
        scores = None
        if self.pooling_weight is not None:
            scores = torch.cat([self.scores(part.to(self.device)) for part in x.split(READ_AT_ONCE)])
        return pool_spans(x, spans, scores)
