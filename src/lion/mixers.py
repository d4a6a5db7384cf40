"""What replaces BERT's self-attention: the three variants of LION (arXiv:2502.16249), Hydra (arXiv:2407.09941), and
softmax as the baseline. Shape letters: B batch, L length, D hidden size, H heads, I width of all heads."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.backends.cuda import flash_sdp_enabled, is_flash_attention_available
from torch.nn import functional as F
from transformers import PretrainedConfig

from . import cpu, patch_orders
from .cpu_linear import LinearLayers, is_unchanged
from .custom_operators import as_autocast, no_autocast
from .hydra_attention import Scans, hydra_attention
from .linear_attention import attention_matrix, linear_attention, log_of_decay, segment_states
from .linear_attention_forms import LOG_ZERO, sequence_starts
from .two_sided_attention import SegmentStates, two_sided_attention, two_sided_segment_states


def build_norm(config: PretrainedConfig, eps: float) -> nn.Module:
    """The configured normalization of hidden states."""
    if config.normalization == "rmsnorm":
        return nn.RMSNorm(config.hidden_size, eps)
    return nn.LayerNorm(config.hidden_size, eps, bias=config.bias)


class Mixer(LinearLayers, nn.Module):
    """What the encoder asks of a mixer. `forward` returns what the output projection maps back to the hidden size."""

    has_positions = False  # whether the encoder adds position embeddings
    has_states = False  # whether segments of a text can pass states to each other
    has_mlp = True  # whether an MLP follows
    halo = 0  # tokens of each neighbouring segment that a segment needs, besides the states

    def init_parameters(self) -> None:
        """Initialize the mixer's own parameters; `_init_weights` has initialized its layers."""

    @classmethod
    def prepare(
        cls, config: PretrainedConfig, x: Tensor, mask: Tensor | None, seq_idx: Tensor | None
    ) -> tuple[Tensor | None, dict]:
        """Compute once per batch of embedded tokens, (B, L, D), what all layers need: the mask to give them, and other
        arguments of `forward`, which also works without these."""
        return mask, {}

    def forward(
        self, x, mask, seq_idx, form, output_attentions=False, halo=(0, 0), rotation=None, **states
    ) -> tuple[Tensor, Tensor | None]:
        """Mix the tokens of x, (B, L, D): (B, L, I), and the matrix, (B, H, L, L), if requested.

        rotation: what the function of this name returns, if the model has rotary position embeddings. For segments of
        a long text, states are left_state and right_state of `linear_attention`, and halo are the numbers of tokens of
        the neighbouring segments that x and mask begin and end with. donors: see `pass_states`; None: no state passing.
        """
        raise NotImplementedError

    def project_out(self, y: Tensor) -> Tensor:
        """Map what `forward` returned, (..., I), to the mixer's output, (..., D)."""
        raise NotImplementedError

    def segment_states(self, x: Tensor, mask: Tensor | None, halo=(0, 0), rotation=None) -> SegmentStates:
        """What a segment of a text, (B, L, D), passes to the others; arguments as for `forward`."""
        raise NotImplementedError

    def values(self, x: Tensor) -> Tensor:
        """What the matrix multiplies, (B, H, L, ·)."""
        raise NotImplementedError

    def log_decays(self, x: Tensor) -> Tensor | None:
        """log λ of the heads, (B, H, L), or if both directions have their own, (B, 2H, L); None: no decay."""
        return None

    @classmethod
    def products_per_token(cls, config: PretrainedConfig, length: int) -> int:
        """Count the multiplications of one layer's mixing per token of a text of this length."""
        raise NotImplementedError

    def split_linear(self, layer: nn.Linear, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """layer(x) in parts; cpu.py replaces this method too."""
        return layer(x).split(sizes, -1)


def pass_states(states: SegmentStates, donors: Tensor) -> dict[str, Tensor]:
    """Return left_state and right_state, see `linear_attention`: each text of a batch gets the states of its donor, a
    number in donors, (B,), as if that text stood on both sides; −1: none."""
    receives = (donors >= 0)[:, None, None, None]
    passed = {"left_state": states.rightward, "right_state": states.leftward}
    return {name: state.index_select(0, donors.clamp(min=0)) * receives for name, state in passed.items()}


def count_widths(config: PretrainedConfig, length: int, states: int) -> int:
    """Count the keys, or the entries of states, that each query reads in the configured form; "auto": the fewest."""
    widths = {"full": length, "chunkwise": min(config.chunk_size, length) + states, "recurrent": states}
    widths["auto"] = min(widths["full"], widths["chunkwise"])
    return widths["full" if config.attention_probs_dropout_prob > 0 else config.attention_form]


class Attention(Mixer):
    """Projections to q, k and v, `mix`, and an output projection. A subclass adds what is particular to it."""

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        D, W = config.hidden_size, config.short_conv
        self.config = config
        self.num_heads = config.num_attention_heads
        self.qkv = nn.Linear(D, 3 * D, bias=config.bias)
        self.norm = nn.Identity()  # before the output projection
        self.add_parameters(D)
        self.out = nn.Linear(D, D, bias=config.bias)
        self.halo = W // 2
        self.conv = nn.Conv1d(3 * D, 3 * D, W, padding=W // 2, groups=3 * D, bias=False) if W else None
        self.gate = nn.Linear(D, D, bias=config.bias) if config.value_gate else None
        if config.value_gate:
            self.norm = nn.RMSNorm(D, eps=1e-5)

    def add_parameters(self, hidden_size: int) -> None:
        """Create the parameters that only this mixer has."""

    def mix(
        self, x, q, k, v, mask, seq_idx, form, output_attentions, qkv=None, **states
    ) -> tuple[Tensor, Tensor | None]:
        """Return the heads' outputs, (B, H, L, D/H), and the attention matrix, (B, H, L, L), if requested. qkv: see
        `project`."""
        raise NotImplementedError

    @classmethod
    def products_per_token(cls, config: PretrainedConfig, length: int) -> int:
        return 2 * config.hidden_size * length

    def project(self, x, mask, seq_idx, halo=(0, 0), rotation=None) -> tuple[Tensor | None, ...]:
        """Return q, k and v, each (B, H, L, D/H), and x and mask, of the segment without its halo; and, if q, k and v
        are views of one tensor, that, (B, L, 3, H, D/H)."""
        qkv = self.linear(self.qkv, x)
        if self.conv is not None:
            if mask is not None:  # so that tokens near a text's end see zeros, as beyond it
                qkv = qkv.masked_fill(~mask[..., None], 0)
            (qkv,) = cpu.convolve(self.conv, [qkv], seq_idx, self.halo)
        if any(halo):
            own = slice(halo[0], x.shape[1] - halo[1])
            qkv, x, mask = qkv[:, own], x[:, own], None if mask is None else mask[:, own]
        qkv = qkv.unflatten(-1, (3, self.num_heads, -1))
        if self.config.feature_map == "none" and rotation is None:
            q, k, v = (y.transpose(1, 2) for y in qkv.unbind(2))
            return q, k, v, x, mask, qkv
        qk, v = qkv.split((2, 1), 2)
        if self.config.feature_map != "none":
            qk = FEATURE_MAPS[self.config.feature_map](qk)
        if rotation is not None:  # in (2, B, H, L, D/H)
            qk = cpu.rotate(qk.permute(2, 0, 3, 1, 4), rotation).permute(1, 3, 0, 2, 4)
        q, k, v = (y.transpose(1, 2) for y in (*qk.unbind(2), v.squeeze(2)))
        return q, k, v, x, mask, None

    def values(self, x: Tensor) -> Tensor:
        return self.project(x, None, None)[2]

    def project_out(self, y: Tensor) -> Tensor:
        return self.linear(self.out, y if self.gate is not None else self.norm(y))

    def forward(self, x, mask, seq_idx, form, output_attentions=False, halo=(0, 0), rotation=None, **states):
        x = as_autocast(x)  # once for the layers that read it
        q, k, v, x, mask, qkv = self.project(x, mask, seq_idx, halo, rotation)
        y, matrix = self.mix(x, q, k, v, mask, seq_idx, form, output_attentions, qkv=qkv, **states)
        y = y.transpose(1, 2).reshape(x.shape)
        return y if self.gate is None else cpu.gated_norm(self.norm, y, self.linear(self.gate, x)), matrix

    @property
    def dropout_p(self) -> float:
        return self.config.attention_probs_dropout_prob if self.training else 0.0


FEATURE_MAPS = {"silu": cpu.positive_map, "sigmoid": torch.sigmoid, "elu": lambda x: F.elu(x) + 1}


def rotation(position_ids: Tensor, size: int, theta: float) -> Tensor:
    """Return the cosines and sines, (2, B or 1, 1, L, size/2), by which `rotate` turns heads of this size at these
    positions, (B or 1, L)."""
    powers = torch.arange(0, size, 2, dtype=torch.float64, device=position_ids.device) / size
    angles = position_ids[:, None, :, None] * theta**-powers  # float32 would be inexact far into a text
    return torch.stack([angles.cos(), angles.sin()]).float()


class Softmax(Attention):
    """BERT's attention. On a GPU, FlashAttention takes no mask: where all tokens are real none is given, and packed
    rows are given as sequences instead."""

    has_positions = True

    @classmethod
    def prepare(cls, config, x, mask, seq_idx):
        eager = _is_eager(x)
        if seq_idx is not None:
            sequences = find_sequences(mask, seq_idx) if eager and _has_flash_attention(config, x) else None
            return mask, {"keys": visible_keys(mask, seq_idx)} if sequences is None else {"sequences": sequences}
        # The program waits for a GPU here, so mixers that lose little by a mask keep theirs; and in training, where it
        # should not wait, all do: loaders give none where all tokens are real.
        unneeded = mask is not None and eager and not torch.is_grad_enabled() and mask.all()
        return None if unneeded else mask, {}

    def mix(self, x, q, k, v, mask, seq_idx, form, output_attentions, keys=None, sequences=None, **states):
        if torch.compiler.is_compiling():  # which would recompile for each longest sequence
            sequences = None
        if keys is None and (sequences is None or output_attentions):
            keys = visible_keys(mask, seq_idx)
        if sequences is None:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=keys, dropout_p=self.dropout_p)
        else:
            y = attend_within(sequences, q, k, v, self.dropout_p)
        if not output_attentions:
            return y, None
        scores = q @ k.mT * q.shape[-1] ** -0.5
        # Not −∞, which without any key would give NaN.
        return y, (scores if keys is None else scores.masked_fill(~keys, torch.finfo(scores.dtype).min)).softmax(-1)


def visible_keys(mask: Tensor | None, seq_idx: Tensor | None) -> Tensor | None:
    """Mark the keys that queries attend to: the real ones, (B, 1, 1, L), of their own sequence, (B, 1, L, L)."""
    real = None if mask is None else mask[:, None, None, :]
    if seq_idx is None:
        return real
    number = sequence_starts(seq_idx).cumsum(1)
    same = number[:, None, :, None] == number[:, None, None, :]
    return same if real is None else same & real


class Sequences(NamedTuple):
    """Where the sequences of packed rows and the padding between them start in the flattened rows, from 0 to B·L, in
    int32, and how long the longest is."""

    starts: Tensor
    longest: int


def find_sequences(mask: Tensor | None, seq_idx: Tensor) -> Sequences | None:
    """Find the sequences of packed rows, (B, L); None if there is padding within one. The program waits for a GPU."""
    B, L = seq_idx.shape
    number = 2 * sequence_starts(seq_idx).cumsum(1) + (1 if mask is None else mask)  # odd at real tokens
    number = number.cpu() + 2 * L * torch.arange(B, device="cpu")[:, None]
    numbers, lengths = number.flatten().unique_consecutive(return_counts=True)
    if (numbers[numbers % 2 == 1].diff() == 0).any():
        return None
    starts = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)).to(seq_idx.device)
    return Sequences(starts, int(lengths.max()))


def attend_within(sequences: Sequences, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    """Softmax attention, (B, H, L, D/H), without a mask: each sequence attends to itself, and so does padding. It calls
    FlashAttention as PyTorch's nested tensors do, without making any."""
    (starts, longest), batch = sequences, len(q)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B·L, H, D/H)
    how = starts, starts, longest, longest, dropout_p, False, False
    y, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *how)
    return y.unflatten(0, (batch, -1)).transpose(1, 2)


def _is_eager(x: Tensor) -> bool:
    """Whether the program may depend on the values of a batch."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or type(x) is not Tensor or x.is_meta:
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _has_flash_attention(config: PretrainedConfig, x: Tensor) -> bool:
    """Whether FlashAttention can compute with what the layers make of x, forward and backward."""
    if not x.is_cuda or torch.version.hip is not None or torch.cuda.get_device_capability(x.device) < (8, 0):
        return False
    if not (is_flash_attention_available() and flash_sdp_enabled()):
        return False
    size, dtype = config.hidden_size // config.num_attention_heads, x.dtype
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
    return dtype in (torch.float16, torch.bfloat16) and size % 8 == 0 and size <= 192


CHANNEL_HORIZON = 10, 1000  # tokens, of `channel_decays` without a `decay_horizon`: S5's steps from 0.1 to 0.001


class LinearMixer(Attention):
    """Linear attention; a subclass defines the decay λ."""

    has_states = True

    def log_decay(self, x: Tensor) -> Tensor | None:
        """log λ in float32 or better: None, (H,) or (B, H, L); with `channel_decays`, (H, D/H) or (B, H, L, D/H); 2H
        instead of H if past and future keys have their own."""
        return None

    def forget_logits(self, x: Tensor) -> Tensor | None:
        """The logits of 1 − λ, (B, H, L), in any dtype, if λ is a sigmoid and each token has its own."""
        return None

    def decays(self, x: Tensor, real: Tensor | None, of_heads: bool = False) -> dict[str, Tensor | None]:
        """The decays as arguments of `linear_attention`. Tokens that are not `real`, (B, L) bool, do not decay what
        depends on the token, so that nothing depends on them; with `of_heads`, nor what is one number per head."""
        log_decay = self.log_decay(x)
        if log_decay is not None and real is not None and (of_heads or log_decay.ndim > 2):
            log_decay = log_decay if log_decay.ndim > 2 else log_decay[:, None]
            log_decay = log_decay.where(real[:, None, :, None] if self.config.channel_decays else real[:, None], 0)
        if not self.config.separate_decays:
            return {"log_decay": log_decay}
        return dict(zip(("log_decay", "log_decay_future"), log_decay.chunk(2, 0 if log_decay.ndim < 3 else 1)))

    def log_decays(self, x: Tensor) -> Tensor | None:
        log_decay = self.log_decay(x)
        if self.config.channel_decays:  # of all channels, as if each were a head
            log_decay = log_decay.flatten() if log_decay.ndim == 2 else log_decay.mT.flatten(1, 2)
        if log_decay is None or log_decay.ndim == 3:
            return log_decay
        return log_decay[:, None].expand(len(x), -1, x.shape[1])

    def weigh(self, k: Tensor, log_decay: Tensor | None) -> Tensor:
        """Multiply the keys, (B, H, L, D/H), by `key_weight`."""
        if self.config.key_weight == "none":
            return k
        if self.config.key_weight == "linear":
            weights = -2 * log_decay.expm1()
        else:
            weights = (-4 / 3 * (2 * log_decay).expm1()).clamp(min=1e-12).sqrt()  # whose gradient is infinite at 0
        if not self.config.channel_decays:
            weights = weights[..., None]
        return k * (weights[:, None] if weights.ndim == 2 else weights).to(k.dtype)

    def mix(
        self, x, q, k, v, mask, seq_idx, form, output_attentions, qkv=None, orders=None, donors=None, **states
    ):  # fmt: skip
        if output_attentions and form in ("recurrent", "chunkwise"):
            raise ValueError(f"the {form} form has no attention matrix; use attention_form='full'")
        how = {"form": form, "chunk_size": self.config.chunk_size, "dropout_p": self.dropout_p}
        what = {"mask": mask, "seq_idx": seq_idx, "normalize": self.config.normalize_rows}
        operands = (q, k, v) if qkv is None else (qkv,)
        if donors is None and not output_attentions and (logits := self.forget_logits(x)) is not None:
            if mask is not None:
                logits = logits.where(mask[:, None], -math.inf)  # as in `decays`
            if self.config.num_orders > 1:
                y = patch_orders.linear_attention_in_orders(q, k, v, forget_logits=logits, orders=orders, **how)
                return y, None
            return linear_attention(*operands, forget_logits=logits, **what, **how, **states), None
        decays = self.decays(x, mask, of_heads=donors is not None)
        if self.config.num_orders and decays["log_decay"] is not None:
            y = patch_orders.linear_attention_in_orders(q, k, v, decays["log_decay"], orders, **how)
            return y, patch_orders.matrix_in_orders(q, k, decays["log_decay"], orders) if output_attentions else None
        if self.config.key_weight != "none":
            k = self.weigh(k, decays["log_decay"])
            operands = q, k, v
        what = {**what, **decays}
        if donors is not None:
            with torch.no_grad():
                own = segment_states(k, v, **decays, mask=mask, normalize=self.config.normalize_rows)
                states = {**states, **pass_states(own, donors)}
        y = linear_attention(*operands, **what, **how, **states)
        return y, attention_matrix(q, k, **what) if output_attentions else None

    def segment_states(self, x: Tensor, mask: Tensor | None, halo=(0, 0), rotation=None) -> SegmentStates:
        _, k, v, x, mask, _ = self.project(x, mask, None, halo, rotation)
        decays = self.decays(x, mask)
        k = self.weigh(k, decays["log_decay"])
        return segment_states(k, v, **decays, mask=mask, normalize=self.config.normalize_rows)

    @classmethod
    def products_per_token(cls, config: PretrainedConfig, length: int) -> int:
        """Count L×L or C×C matrices and, except in the full form, two states per head; "auto": the cheaper form."""
        states = 2 * config.hidden_size // config.num_attention_heads
        return 2 * config.hidden_size * count_widths(config, length, states)


class LionLit(LinearMixer):
    """No decay, λ = 1, and for texts a LayerNorm of the result."""

    has_positions = True

    def add_parameters(self, hidden_size: int) -> None:
        if self.config.output_norm:
            self.norm = build_norm(self.config, eps=1e-5)


def decays_shape(config: PretrainedConfig) -> tuple[int, ...]:
    """One per head, or one per head and direction, or one per head and order of patches; or so many per channel."""
    D, H = config.hidden_size, config.num_attention_heads
    count = H * (2 if config.separate_decays else 1) * max(config.num_orders, 1)
    return (count, D // H) if config.channel_decays else (count,)


def spread_horizons(config: PretrainedConfig) -> list[float]:
    """The horizons of `decay_horizon` in tokens, one per head; a single head has their geometric mean."""
    (low, high), H = config.decay_horizon or CHANNEL_HORIZON, config.num_attention_heads
    return [low * (high / low) ** (h / (H - 1) if H > 1 else 0.5) for h in range(H)]


def initial_logits(config: PretrainedConfig) -> Tensor | None:
    """logit λ of each decay for the horizons of `decay_horizon`; None for none. Channel n of a head, from 0, decays
    n + 1 times as fast as its first: −(n + 1) are the eigenvalues of HiPPO-LegS (Gu et al., arXiv:2206.11893,
    S4D-Real)."""
    if config.decay_horizon is None and not config.channel_decays:
        return None
    shape = decays_shape(config)
    wide = {"dtype": torch.float64, "device": "cpu"}  # whatever device the model is built on
    logits = torch.tensor([math.log(horizon - 1) for horizon in spread_horizons(config)], **wide)
    if config.channel_decays:
        log_decay = F.logsigmoid(logits)[:, None] * torch.arange(1, shape[1] + 1, **wide)
        logits = log_decay - (-log_decay.expm1()).log()
    return logits.repeat(shape[0] // len(logits), *[1] * (len(shape) - 1))


class DecayingMixer(LinearMixer):
    """Linear attention with decays λ = σ(logits)."""

    def add_to_logits(self, amount: Tensor) -> None:
        """Add an amount to each logit, (H,) or (2H,)."""
        raise NotImplementedError(f"{type(self).__name__} must define add_to_logits, to start with other horizons")

    def widen(self, x: Tensor) -> None:
        """Widen the horizons of the slower half of the heads to those configured, and leave the other heads as they
        are. A head's horizon is −1 / mean(log λ) over the tokens of x, (B, L, D)."""
        log_decay = self.log_decays(x).double().transpose(0, 1).flatten(1).cpu()  # (H or 2H, tokens)
        logits = log_decay - (-log_decay.expm1()).clamp(min=1e-300).log()
        directions = log_decay.mean(-1).view(-1, self.num_heads)
        slower = directions.argsort(dim=1)[:, -((self.num_heads + 1) // 2) :]
        wanted = log_decay.new_tensor(spread_horizons(self.config)[-slower.shape[1] :])
        targets = torch.zeros_like(directions).scatter(1, slower, wanted.expand_as(slower))
        targets = targets.flatten()
        low, high = torch.zeros_like(targets), torch.full_like(targets, 50.0)
        for _ in range(50):  # bisection
            middle = (low + high) / 2
            reached = -1 / F.logsigmoid(logits + middle[:, None]).mean(-1) >= targets
            low, high = low.where(reached, middle), middle.where(reached, high)
        self.add_to_logits(high.where(-1 / log_decay.mean(-1) < targets, 0))


class LionD(DecayingMixer):
    """One learned decay per head, λ = σ(α_h)."""

    def add_parameters(self, hidden_size: int) -> None:
        self.decay = nn.Parameter(torch.randn(decays_shape(self.config)))

    def init_parameters(self) -> None:
        nn.init.normal_(self.decay)
        if (logits := initial_logits(self.config)) is not None:
            self.decay.copy_(logits)

    def add_to_logits(self, amount: Tensor) -> None:
        self.decay.add_(amount.to(self.decay))

    def log_decay(self, x: Tensor) -> Tensor:
        return F.logsigmoid(self.decay.float())


class LionS(DecayingMixer):
    """A decay computed from each token, λ = σ(−(w_h·x_t + b_h))."""

    def add_parameters(self, hidden_size: int) -> None:
        self.decay = nn.Linear(hidden_size, math.prod(decays_shape(self.config)))
        if (logits := initial_logits(self.config)) is not None:
            self.decay.initial_bias = (-logits.flatten()).tolist()  # for `_init_weights`

    def add_to_logits(self, amount: Tensor) -> None:
        self.decay.bias.sub_(amount.to(self.decay.bias))

    def forget_logits(self, x: Tensor) -> Tensor | None:
        config, own = self.config, type(self).log_decay is not LionS.log_decay  # a subclass has another decay
        needs_decays = own or config.separate_decays or config.channel_decays or config.key_weight != "none"
        return None if needs_decays else self._logits(x)

    def _logits(self, x: Tensor) -> Tensor:
        """The logits of 1 − λ, (B, H, L); −∞ for the tokens before the patches of an image, which do not decay."""
        logits, prefix = self.decay(x), self.config.num_prefix_tokens
        if prefix:
            logits = F.pad(logits.narrow(1, prefix, x.shape[1] - prefix), (0, 0, prefix, 0), value=-math.inf)
        return logits.mT

    def log_decay(self, x: Tensor) -> Tensor:
        if self.config.channel_decays:
            layer, wide = self.decay, torch.promote_types(x.dtype, torch.float32)
            if is_unchanged(layer, nn.Linear):
                # The bias is added in float32: in bfloat16, horizons of 10,000 tokens would differ by 6% or not at all.
                logits = F.linear(x, layer.weight).to(wide) + layer.bias
            else:  # an adapter, quantized, or loaded when it is called
                logits = layer(x).to(wide)
            return log_of_decay(logits).unflatten(-1, decays_shape(self.config)).transpose(1, 2)
        return log_of_decay(self._logits(x))


class Hydra(Mixer):
    """Two Mamba-2 scans, one in each direction and shifted by one token, and a diagonal: a quasiseparable matrix. Hwang
    et al., "Hydra: Bidirectional State Space Models Through Generalized Matrix Mixers", arXiv:2407.09941. H heads of
    size P share queries and keys of N numbers; W is the width of a convolution over tokens."""

    has_states = True
    has_mlp = False

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.config = config
        D, N, W, H = config.hidden_size, config.d_state, config.d_conv, config.num_attention_heads
        I = H * config.headdim  # noqa: E741
        self.sizes = I, I, 4 * N, 2 * H  # of gate, values, queries and keys, step sizes
        self.halo = (W - 1) // 2 + 1  # convolution and shift
        self.in_proj = nn.Linear(D, sum(self.sizes), bias=False)
        self.conv = nn.Conv1d(I + 4 * N, I + 4 * N, W, padding=W // 2, groups=I + 4 * N)
        self.dt_bias = nn.Parameter(torch.zeros(H))
        self.A_log = nn.Parameter(torch.zeros(H))
        self.D = nn.Parameter(torch.ones(H))
        self.fc_D = nn.Linear(I, H, bias=False)
        self.norm = nn.RMSNorm(I, eps=1e-5)
        self.out = nn.Linear(I, D, bias=False)

    def init_parameters(self) -> None:
        bound = self.config.d_conv**-0.5
        for parameter in (self.conv.weight, self.conv.bias):
            nn.init.uniform_(parameter, -bound, bound)
        step = torch.empty_like(self.dt_bias).uniform_(math.log(0.001), math.log(0.1)).exp().clamp(min=1e-4)
        self.dt_bias.copy_(step + (-(-step).expm1()).log())  # the inverse of softplus
        nn.init.zeros_(self.A_log)
        nn.init.ones_(self.D)
        nn.init.ones_(self.norm.weight)

    def project_in(self, x: Tensor, mask: Tensor | None, seq_idx: Tensor | None) -> tuple[Tensor, ...]:
        """Return the gate, (B, L, I), the values, the queries and keys, both convolved, and the step sizes before
        softplus."""
        I, _, *others = self.sizes  # noqa: E741
        z, v, qk = self.split_linear(self.in_proj, x, (I, I, sum(others)))
        qk, dt = qk.split(others, -1)
        if mask is not None:  # so that tokens near a text's end see zeros, as beyond it
            v, qk = (y.masked_fill(~mask[..., None], 0) for y in (v, qk))
        v, qk = cpu.convolve(self.conv, [v, qk], seq_idx, self.halo)
        in_place = not (torch.is_grad_enabled() or torch.jit.is_tracing())  # which is repeated without gradients
        return z, F.silu(v, in_place), F.silu(qk, in_place), dt

    def project(self, x: Tensor, mask: Tensor | None, seq_idx: Tensor | None, halo: tuple[int, int]) -> tuple:
        """Return the gate, (B, L, I), v, (B, H, L, P), the scans, the diagonal, (B, H, L), and the mask; of the segment
        without its halo."""
        z, v, qk, dt = self.project_in(x, mask, seq_idx)
        if mask is not None:  # queries of padding must not shift into a text
            qk = qk.masked_fill(~mask[..., None], 0)
        k, q, k_future, q_future = qk.chunk(4, -1)
        q, q_future = F.pad(q, (0, 0, 1, -1)), F.pad(q_future, (0, 0, -1, 1))  # each token reads by its neighbour's
        if any(halo):
            own = slice(halo[0], x.shape[1] - halo[1])
            z, dt, v, k, q, k_future, q_future = (y[:, own] for y in (z, dt, v, k, q, k_future, q_future))
            mask = None if mask is None else mask[:, own]
        with no_autocast(x):
            wide = torch.promote_types(dt.dtype, torch.float32)
            step = F.softplus(dt.to(wide).unflatten(-1, (2, -1)) + self.dt_bias)  # (B, L, 2, H)
            if mask is not None:  # padding forgets nothing
                step = step.masked_fill(~mask[..., None, None], 0)
            log_weight = step.clamp(min=math.exp(LOG_ZERO)).log().permute(2, 0, 3, 1)  # (2, B, H, L)
            log_decay = (step * -self.A_log.to(wide).exp()).permute(2, 0, 3, 1)
        queries, keys = (q[:, None], q_future[:, None]), (k[:, None], k_future[:, None])
        diagonal = (self.linear(self.fc_D, v) + self.D).mT
        v = v.unflatten(-1, (len(self.D), -1)).transpose(1, 2)
        return z, v, Scans(queries, keys, log_decay, log_weight), diagonal, mask

    def forward(
        self, x, mask, seq_idx, form, output_attentions=False, halo=(0, 0), rotation=None, donors=None, **states
    ):
        z, v, scans, diagonal, mask = self.project(x, mask, seq_idx, halo)
        if donors is not None:
            with torch.no_grad():
                past, future, totals = scans.triangles()
                own = two_sided_segment_states(v, past, future, *totals, mask=mask)
                states = {**states, **pass_states(own, donors)}
        where = {"mask": mask, "seq_idx": seq_idx}
        y = hydra_attention(v, scans, diagonal, **where, **states, form=form, chunk_size=self.config.chunk_size)
        matrix = None
        if output_attentions:
            if form in ("recurrent", "chunkwise"):
                raise ValueError(f"the {form} form has no attention matrix; use attention_form='full'")
            identity = torch.eye(v.shape[2], dtype=v.dtype, device=v.device).expand(*v.shape[:2], -1, -1)
            past, future, _ = scans.triangles()
            matrix = two_sided_attention(identity, past, future, diagonal, **where, form="full", report=False)
        return cpu.gated_norm(self.norm, y.transpose(1, 2).flatten(2), z), matrix

    def project_out(self, y: Tensor) -> Tensor:
        return self.linear(self.out, y)

    def values(self, x: Tensor) -> Tensor:
        return self.project(x, None, None, (0, 0))[1]

    def log_decays(self, x: Tensor) -> Tensor:
        return torch.cat([*self.project(x, None, None, (0, 0))[2].log_decays], 1).clamp(min=LOG_ZERO)

    def segment_states(self, x: Tensor, mask: Tensor | None, halo=(0, 0), rotation=None) -> SegmentStates:
        _, v, scans, _, mask = self.project(x, mask, None, halo)
        past, future, totals = scans.triangles()
        return two_sided_segment_states(v, past, future, *totals, mask=mask)

    @classmethod
    def products_per_token(cls, config: PretrainedConfig, length: int) -> int:
        """Count two matrices of scores, which all heads share, and one per head; or states, two per head."""
        N, width = config.d_state, config.num_attention_heads * config.headdim
        states = 4 * N * width // (2 * N + width)  # in entries of those matrices
        return (2 * N + width) * count_widths(config, length, states)


# By name in a configuration; configuration_lion.py repeats the names, since transformers loads it without this file.
MIXERS = {"lion-lit": LionLit, "lion-d": LionD, "lion-s": LionS, "hydra": Hydra, "softmax": Softmax}
