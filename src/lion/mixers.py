"""What replaces BERT's self-attention: the three variants of LION (arXiv:2502.16249), and softmax as the baseline.
Shape letters: B batch, L length, D hidden size, H heads."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig

from .linear_attention import SegmentStates, attention_matrix, linear_attention, segment_states
from .linear_attention_forms import sequence_starts


class Mixer(nn.Module):
    """Projections to q, k and v, `mix`, and an output projection. A subclass adds what is particular to it."""

    has_positions = False  # whether the encoder adds position embeddings
    has_states = False  # whether segments of a text can pass states to each other

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        D = config.hidden_size
        self.config = config
        self.num_heads = config.num_attention_heads
        self.qkv = nn.Linear(D, 3 * D)
        self.norm = nn.Identity()  # before the output projection
        self.add_parameters(D)
        self.out = nn.Linear(D, D)

    def add_parameters(self, hidden_size: int) -> None:
        """Create the parameters that only this mixer has."""

    def init_parameters(self) -> None:
        """Initialize the parameters that are not in a linear layer or a LayerNorm."""

    def mix(self, x, q, k, v, mask, seq_idx, form, output_attentions, **states) -> tuple[Tensor, Tensor | None]:
        """Return the heads' outputs, (B, H, L, D/H), and the attention matrix, (B, H, L, L), if requested."""
        raise NotImplementedError

    @classmethod
    def products_per_token(cls, config: PretrainedConfig, length: int) -> int:
        """Count the multiplications of one layer's `mix` per token of a text of this length."""
        return 2 * config.hidden_size * length

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Split (B, L, 3·D) into three tensors (B, H, L, D/H)."""
        return tuple(x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in qkv.chunk(3, -1))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and v, each (B, H, L, D/H)."""
        return self.split_heads(self.qkv(x))

    def project_out(self, y: Tensor) -> Tensor:
        """Map the concatenated heads, (..., D), to the mixer's output."""
        return self.out(self.norm(y))

    def forward(self, x, mask, seq_idx, form, output_attentions=False, **states):
        """Return the heads before the output projection, (B, L, D), and the matrix, (B, H, L, L), if requested;
        states: left_state and right_state of `linear_attention`, for segments of a long text."""
        y, matrix = self.mix(x, *self.project(x), mask, seq_idx, form, output_attentions, **states)
        return y.transpose(1, 2).reshape(x.shape), matrix

    @property
    def dropout_p(self) -> float:
        return self.config.attention_probs_dropout_prob if self.training else 0.0


class Softmax(Mixer):
    """BERT's attention."""

    has_positions = True

    def mix(self, x, q, k, v, mask, seq_idx, form, output_attentions, **states):
        allowed = None if mask is None else mask[:, None, None, :]  # real keys, (B, 1, 1, L)
        if seq_idx is not None:  # keys of a query's own sequence, (B, 1, L, L)
            number = sequence_starts(seq_idx).cumsum(1)
            same = number[:, None, :, None] == number[:, None, None, :]
            allowed = same if allowed is None else same & allowed
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=self.dropout_p)
        if not output_attentions:
            return y, None
        scores = q @ k.mT * q.shape[-1] ** -0.5
        return y, (scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)).softmax(-1)


class LinearMixer(Mixer):
    """Linear attention; a subclass defines the decay λ."""

    has_states = True

    def log_decay(self, x: Tensor) -> Tensor | None:
        """log λ in float32: None, (H,) or (B, H, L)."""
        return None

    def mix(self, x, q, k, v, mask, seq_idx, form, output_attentions, **states):
        if output_attentions and form in ("recurrent", "chunkwise"):
            raise ValueError(f"the {form} form has no attention matrix; use attention_form='full'")
        log_decay = self.log_decay(x)
        where = {"mask": mask, "seq_idx": seq_idx}
        how = {"form": form, "chunk_size": self.config.chunk_size, "dropout_p": self.dropout_p}
        y = linear_attention(q, k, v, log_decay, **where, **how, **states)
        return y, attention_matrix(q, k, log_decay, **where) if output_attentions else None

    def segment_states(self, x: Tensor, mask: Tensor | None) -> SegmentStates:
        """What a segment of a text, (B, L, D), passes to the others."""
        _, k, v = self.project(x)
        return segment_states(k, v, self.log_decay(x), mask=mask)

    @classmethod
    def products_per_token(cls, config: PretrainedConfig, length: int) -> int:
        """Count L×L or C×C matrices and, except in the full form, two states per head; "auto": the cheaper form."""
        states = 2 * config.hidden_size // config.num_attention_heads
        widths = {"full": length, "chunkwise": min(config.chunk_size, length) + states, "recurrent": states}
        widths["auto"] = min(widths["full"], widths["chunkwise"])
        form = "full" if config.attention_probs_dropout_prob > 0 else config.attention_form
        return 2 * config.hidden_size * widths[form]


class LionLit(LinearMixer):
    """No decay, λ = 1, and a LayerNorm of the result."""

    has_positions = True

    def add_parameters(self, hidden_size: int) -> None:
        self.norm = nn.LayerNorm(hidden_size)


class LionD(LinearMixer):
    """One learned decay per head, λ = σ(α_h)."""

    def add_parameters(self, hidden_size: int) -> None:
        self.decay = nn.Parameter(torch.randn(self.num_heads))

    def init_parameters(self) -> None:
        nn.init.normal_(self.decay)

    def log_decay(self, x: Tensor) -> Tensor:
        return F.logsigmoid(self.decay.float())


class LionS(LinearMixer):
    """A decay computed from each token, λ = σ(−(w_h·x_t + b_h))."""

    def add_parameters(self, hidden_size: int) -> None:
        self.decay = nn.Linear(hidden_size, self.num_heads)

    def log_decay(self, x: Tensor) -> Tensor:
        return F.logsigmoid(-self.decay(x).float()).mT


# By name in a configuration; configuration_lion.py repeats the names, since transformers loads it without this file.
MIXERS = {"lion-lit": LionLit, "lion-d": LionD, "lion-s": LionS, "softmax": Softmax}
