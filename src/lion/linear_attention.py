"""Full linear attention with a decay mask: one function, computed in three forms.

    y_i = Σ_j  s · (q_i · k_j) · M_ij · v_j

    M_ij = 1                          i = j
         = λ_j · λ_{j+1} · … · λ_{i-1}    j < i   (key in the past)
         = λ_{i+1} · … · λ_j              j > i   (key in the future)

Afzal et al., "Linear Attention for Efficient Bidirectional Sequence Modeling", arXiv:2502.16249, section 3.
`definition` is this formula and nothing else. The forms compute the same numbers faster:

    full        the L×L matrix, for short sequences                      O(L²) time and memory
    chunkwise   the matrix inside chunks, D×E states between them        O(L) time and memory
    recurrent   a D×E state in each direction, token by token            O(L) time, O(1) state

linear_attention_forms.py implements them in PyTorch, linear_attention_triton.py the first two as GPU kernels.
Shape letters: B batch, H heads, L length, D head size of q and k, E head size of v.
"""

import os
from typing import NamedTuple

import torch
from torch import Tensor

from .cpu import dropout
from .linear_attention_forms import chunkwise, clamped_exp, cumulative_log_decay, decayed_scores, read_state, recurrent
from .linear_attention_triton import covers, fused_linear_attention

FORMS = ("auto", "full", "recurrent", "chunkwise")
# "auto" takes the full form up to these lengths, without and with decay: where benchmarks/operator.py finds it no
# slower than the chunkwise one, forward and backward in float32, on two cores of an AMD EPYC. For the kernels they are
# estimated, not measured.
FULL_UP_TO = {"pytorch": (64, 256), "triton": (128, 512)}

USE_TRITON = os.environ.get("LION_TRITON", "1") != "0"  # LION_TRITON=0 computes everything in PyTorch, for comparison


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    seq_idx: Tensor | None = None,
    left_state: Tensor | None = None,
    right_state: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = False,
    form: str = "auto",
    chunk_size: int = 128,
    dropout_p: float = 0.0,
) -> Tensor:
    """Compute bidirectional linear attention with decay, arXiv:2502.16249 section 3.

    Args:
        q, k, v: queries and keys, (B, H, L, D), and values, (B, H, L, E).
        log_decay: log λ ≤ 0: None for λ = 1 (LION-LIT), (H,) for one per head (LION-D), or (B, H, L) (LION-S).
        mask: (B, L) bool, True at real tokens. Padding keys contribute nothing.
        seq_idx: (B, L) integers, the sequence that each token of a packed row belongs to; each sequence gets the same
            output as on its own. A new sequence starts where the number changes. From FlashAttention's offsets:
            `torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())[None]`.
        left_state, right_state: (B, H, D, E), states of the text before and after this segment, see `segment_states`.
        scale: s in the formula; D^-1/2 if None.
        normalize: divide each y_i by its row sum Σ_j s·(q_i·k_j)·M_ij + 1e-6.
        form: "full", "recurrent", "chunkwise", or "auto", which chooses by length.
        chunk_size: tokens per chunk of the chunkwise form.
        dropout_p: dropout on the matrix s·QKᵀ⊙M, which only the full form computes.

    Returns:
        (B, H, L, E) in v's dtype. States and log decays are summed in float32 or better for any input dtype.

    Raises ValueError for shapes that do not match, an unknown form, dropout in a form without a matrix, or states
    combined with packing or normalization.
    """
    _check(q, k, v, log_decay, mask, seq_idx, left_state, right_state, normalize, form, chunk_size, dropout_p)
    dtype = v.dtype
    form, fused = _choose_form(q, k, v, log_decay is not None or seq_idx is not None, normalize, form, dropout_p)
    if (normalize or (form != "full" and not fused)) and dtype in (torch.bfloat16, torch.float16):
        q, k, v = q.float(), k.float(), v.float()  # states and row sums accumulate over the text
    if normalize:  # a column of ones in V receives the row sum
        v = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], dim=-1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k = k if fused else _zero_masked(k, mask)  # the kernels mask keys and sum decays themselves
    with torch.autocast(q.device.type, enabled=False):
        summed = not fused or left_state is not None or right_state is not None
        cumulative = cumulative_log_decay(log_decay, seq_idx, q.shape[-2]) if summed else None
        if fused:
            size = 0 if form == "full" else chunk_size
            y = fused_linear_attention(q, k, v, log_decay, mask, seq_idx, scale, size, dropout_p)
        elif form == "full":
            y = dropout(decayed_scores(scale * q, k, cumulative), dropout_p) @ v
        elif form == "recurrent":
            y = recurrent(scale * q, k, v, cumulative)
        elif cumulative is None:  # nothing decays, so one state serves the whole text
            y = q @ (scale * (k.mT @ v))
        else:
            uniform = seq_idx is None and log_decay.ndim == 1  # all chunks have the same decays
            y = chunkwise(q, k, v, *cumulative, scale, min(chunk_size, q.shape[-2]), uniform)
        if left_state is not None:
            y = y + read_state(scale * q, None if cumulative is None else cumulative[0], left_state)
        if right_state is not None:
            to_end = None if cumulative is None else cumulative[1][..., -1:] - cumulative[1]
            y = y + read_state(scale * q, to_end, right_state)
    if normalize:
        y = y[..., :-1] / (y[..., -1:] + 1e-6)
    return y.to(dtype)


def definition(q, k, v, log_decay=None, *, mask=None, scale=None, normalize=False) -> Tensor:
    """Compute the formula at the top of this file literally, in O(L³); arguments as for `linear_attention`."""
    L = q.shape[-2]
    i, j, t = torch.meshgrid(*[torch.arange(L, device=q.device)] * 3, indexing="ij")
    between = ((j <= t) & (t < i)) | ((i < t) & (t <= j))  # the decay of token t acts between j and i
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if log_decay is not None:
        per_token = log_decay if log_decay.ndim == 3 else log_decay[None, :, None].expand(1, -1, L)
        scores = scores * torch.where(between, per_token[:, :, None, None, :], 0).sum(-1).exp()
    if mask is not None:
        scores = scores * mask[:, None, None, :]
    if normalize:
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-6)
    return scores @ v


def attention_matrix(q, k, log_decay=None, *, mask=None, seq_idx=None, scale=None) -> Tensor:
    """Compute the matrix s·QKᵀ⊙M, (B, H, L, L), zero in the columns of padding, for arguments of `linear_attention`."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return decayed_scores(scale * q, _zero_masked(k, mask), cumulative_log_decay(log_decay, seq_idx, q.shape[-2]))


def _zero_masked(k: Tensor, mask: Tensor | None) -> Tensor:
    return k if mask is None else k.masked_fill(~mask[:, None, :, None], 0)


class SegmentStates(NamedTuple):
    """What one segment of a text passes to the others, in float32 or better."""

    rightward: Tensor  # the state of its keys and values after its last token, (B, H, D, E)
    leftward: Tensor  # the same before its first token
    across: Tensor  # the decay of a state that crosses the segment in either direction, (B or 1, H, 1, 1)


def segment_states(k, v, log_decay=None, *, mask=None) -> SegmentStates:
    """Summarize one segment of a text that does not fit in memory; arguments as for `linear_attention`. Go through the
    segments from left to right and update `left = left * across + rightward` after each, then from right to left and
    update `right = right * across + leftward`. With both states from before a segment's own update,
    `linear_attention(..., left_state=left, right_state=right)` on it returns its part of the text's output."""
    k = _zero_masked(k, mask)
    with torch.autocast(k.device.type, enabled=False):
        wide = torch.promote_types(k.dtype, torch.float32)
        k, v = k.to(wide), v.to(wide)
        if log_decay is None:
            state = k.mT @ v
            return SegmentStates(state, state, torch.ones(1, 1, 1, 1, dtype=wide, device=k.device))
        exclusive, inclusive = cumulative_log_decay(log_decay, None, k.shape[-2])
        total = inclusive[..., -1:]
        to_end, from_start, across = (clamped_exp(x).to(wide)[..., None] for x in (total - exclusive, inclusive, total))
        return SegmentStates((k * to_end).mT @ v, (k * from_start).mT @ v, across)


def _check(q, k, v, log_decay, mask, seq_idx, left_state, right_state, normalize, form, chunk_size, dropout_p) -> None:
    """Raise ValueError if the arguments are inconsistent."""
    if q.ndim != 4:
        raise ValueError(f"q must be (batch, heads, length, head_dim) (got {tuple(q.shape)})")
    (B, H, L, D), E = q.shape, v.shape[-1]
    for name, x, *shapes in (
        ("k", k, (B, H, L, D)),
        ("v", v, (B, H, L, E)),
        ("log_decay", log_decay, (H,), (B, H, L)),
        ("mask", mask, (B, L)),
        ("seq_idx", seq_idx, (B, L)),
        ("left_state", left_state, (B, H, D, E)),
        ("right_state", right_state, (B, H, D, E)),
    ):
        if x is not None and tuple(x.shape) not in shapes:
            raise ValueError(f"{name} must have the shape {' or '.join(map(str, shapes))} (got {tuple(x.shape)})")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool (got {mask.dtype})")
    if seq_idx is not None and seq_idx.is_floating_point():
        raise ValueError(f"seq_idx must be integers (got {seq_idx.dtype})")
    if (left_state is not None or right_state is not None) and (seq_idx is not None or normalize):
        raise ValueError("left_state and right_state cannot be combined with seq_idx or normalize; omit the latter two")
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)} (got {form})")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1 (got {chunk_size})")
    if dropout_p > 0 and form not in ("auto", "full"):
        raise ValueError(f"attention dropout exists only in the full form; set it to 0 for the {form} form")


def _choose_form(q, k, v, decays: bool, normalize: bool, form: str, dropout_p: float) -> tuple[str, bool]:
    """Resolve "auto" and decide whether to use the kernels; PyTorch computes what they do not cover."""
    fused = USE_TRITON and form != "recurrent" and 0 <= dropout_p < 1 and covers(q, k, v, extra_columns=int(normalize))
    if form == "auto":
        full_up_to = FULL_UP_TO["triton" if fused else "pytorch"][decays]
        form = "full" if dropout_p > 0 or q.shape[-2] <= full_up_to else "chunkwise"
    return form, fused
