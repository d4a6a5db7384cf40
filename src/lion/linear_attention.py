"""Full linear attention with a decay mask: one function, computed in three forms.

    y_i = Σ_j  s · (q_i · k_j) · M_ij · v_j

    M_ij = 1                          i = j
         = λ_j · λ_{j+1} · … · λ_{i-1}    j < i   (key in the past)
         = λ_{i+1} · … · λ_j              j > i   (key in the future)

Afzal et al., "Linear Attention for Efficient Bidirectional Sequence Modeling", arXiv:2502.16249, section 3.
`definition` below is that formula and nothing else; the forms are faster ways to the same numbers:

    full        the L×L matrix, for short sequences                      O(L²) work and memory
    chunkwise   the matrix inside chunks, D×E states between them        O(L) work and memory
    recurrent   a D×E state in each direction, token by token            O(L) work, O(1) state

On a GPU the full and the chunkwise form are kernels of their own, in linear_attention_triton.py, where these cover the operands.

All of them read the decays off two running sums: with before_t = log λ_1 + … + log λ_{t-1} and upto_t = before_t + log λ_t,
log M_ij is before_i − before_j in the past and upto_j − upto_i in the future.

Letters in shape comments: B batch, H heads, L length, D head size of q and k, E head size of v, N chunks, C chunk.
"""

import os
import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .dropout import dropout
from .linear_attention_triton import covers, fused_linear_attention

FORMS = ("auto", "full", "recurrent", "chunkwise")

# Logarithms of weights are held above this: e^-60 is below every dtype's rounding, and products of it with ordinary
# numbers are not yet denormal, which a CPU computes many times slower.
_LOG_NOTHING = -60.0

# Up to these lengths "auto" takes the full form: where benchmarks/operator.py finds it no slower than the chunkwise one, forward
# and backward in float32, on two cores of an AMD EPYC. Without decay that is where L products a token are the D of a state.
_FULL_UP_TO = 256
_FULL_UP_TO_WITHOUT_DECAY = 64

# The same for the kernels, by count: beyond, the full form's L products a token are more than the chunkwise form's work with
# its states, and fewer kernels to start no longer outweigh that. Not measured yet.
_FUSED_FULL_UP_TO = 512
_FUSED_FULL_UP_TO_WITHOUT_DECAY = 128

# LION_TRITON=0 computes everything in PyTorch, for comparison.
_FUSED = os.environ.get("LION_TRITON", "1") != "0"

# Entries of L×L or C×C matrices that are worked on at a time: on a CPU what stays in its cache, on a GPU what fills it.
_BLOCK_ENTRIES = {"cpu": 2**18, "cuda": 2**26}


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
    """Bidirectional linear attention with decay, arXiv:2502.16249 section 3.

    Args:
        q, k: queries and keys, (B, H, L, D).
        v: values, (B, H, L, E).
        log_decay: log λ ≤ 0. None for λ = 1 (LION-LIT), (H,) for one λ a head (LION-D), (B, H, L) for one a
            head and token (LION-S).
        mask: (B, L) bool, True at real tokens. A key that is not real contributes nothing.
        seq_idx: (B, L) integers, the number of the sequence that a token belongs to, where a row is packed with several:
            each gives what it gives alone. Where the number changes, a sequence begins. From offsets as FlashAttention
            has them: `torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())[None]`.
        left_state, right_state: (B, H, D, E), what the text before and after this piece of it passes on, see `piece_states`.
        scale: s in the formula; D^-1/2 when None.
        normalize: divide each y_i by its row sum Σ_j s·(q_i·k_j)·M_ij + 1e-6.
        form: "full", "recurrent", "chunkwise", or "auto", which picks by length.
        chunk_size: C of the chunkwise form.
        dropout_p: dropout on the matrix s·QKᵀ⊙M, which only the full form has.

    Returns:
        (B, H, L, E) in v's dtype. States and log decays are summed in float32 or better whatever the inputs are.

    Raises:
        ValueError: shapes that do not fit each other, an unknown form, dropout asked of a form without a matrix, or states
            together with packing or normalization.
    """
    _check(q, k, v, log_decay, mask, seq_idx, left_state, right_state, normalize, form, chunk_size, dropout_p)
    dtype = v.dtype
    form, fused = _choose(q, k, v, log_decay is not None or seq_idx is not None, normalize, form, dropout_p)
    if (normalize or (form != "full" and not fused)) and dtype in (torch.bfloat16, torch.float16):
        q, k, v = q.float(), k.float(), v.float()  # states and row sums are sums over the whole text
    if normalize:  # the row sum is what a column of ones in V receives
        v = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], dim=-1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not fused:  # the kernels mask keys, and sum decays, on their way
        k = _masked(k, mask)
    with torch.autocast(q.device.type, enabled=False):
        sums = None
        if not fused or left_state is not None or right_state is not None:
            sums = _running_sums(log_decay, seq_idx, q.shape[-2])
        if fused:
            size = None if form == "full" else chunk_size
            y = fused_linear_attention(q, k, v, log_decay, mask, seq_idx, scale, size, dropout_p)
        elif form == "full":
            y = dropout(_scores(scale * q, k, sums), dropout_p) @ v
        elif form == "recurrent":
            y = _recurrent(scale * q, k, v, sums)
        else:
            alike = seq_idx is None and log_decay is not None and log_decay.ndim == 1
            y = _chunkwise(q, k, v, sums, scale, chunk_size, alike)
        if left_state is not None:
            y = y + _drawn(scale * q, None if sums is None else sums[0], left_state)
        if right_state is not None:
            y = y + _drawn(scale * q, None if sums is None else sums[1][..., -1:] - sums[1], right_state)
    if normalize:
        y = y[..., :-1] / (y[..., -1:] + 1e-6)
    return y.to(dtype)


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = False,
) -> Tensor:
    """The formula at the head of this file, written out: O(L³), for tests and readers. Arguments as `linear_attention`."""
    L = q.shape[-2]
    i, j, t = torch.meshgrid(*[torch.arange(L, device=q.device)] * 3, indexing="ij")
    between = ((j <= t) & (t < i)) | ((i < t) & (t <= j))  # t is one of the decays on the way from j to i
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if log_decay is not None:
        per_token = log_decay if log_decay.ndim == 3 else log_decay[None, :, None].expand(1, -1, L)
        scores = scores * torch.where(between, per_token[:, :, None, None, :], 0).sum(-1).exp()
    if mask is not None:
        scores = scores * mask[:, None, None, :]
    if normalize:
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-6)
    return scores @ v


def attention_matrix(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    seq_idx: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The matrix s·QKᵀ⊙M of the full form, (B, H, L, L), with the columns of masked keys 0. Arguments as above."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _scores(scale * q, _masked(k, mask), _running_sums(log_decay, seq_idx, q.shape[-2]))


class PieceStates(NamedTuple):
    """What a piece of a text passes on to the pieces beside it, in float32 or better.

    rightward, leftward: (B, H, D, E), its keys and values as they arrive after its last and before its first token.
    across: (B or 1, H, 1, 1), what is left of a state that crosses it, in either direction.
    """

    rightward: Tensor
    leftward: Tensor
    across: Tensor


def piece_states(k: Tensor, v: Tensor, log_decay: Tensor | None = None, *, mask: Tensor | None = None) -> PieceStates:
    """Summarize a piece of a text that is too long to be held at once. Arguments as `linear_attention`.

    Read the pieces from left to right, and keep `left = left * across + rightward` before each; then from right to left
    with `right = right * across + leftward`. `linear_attention(..., left_state=left, right_state=right)` of a piece is
    what the whole text gives there.
    """
    k = _masked(k, mask)
    with torch.autocast(k.device.type, enabled=False):
        wide = torch.promote_types(k.dtype, torch.float32)
        k, v = k.to(wide), v.to(wide)
        if log_decay is None:
            state = k.mT @ v
            return PieceStates(state, state, torch.ones(1, 1, 1, 1, dtype=wide, device=k.device))
        before, upto = _running_sums(log_decay, None, k.shape[-2])
        total = upto[..., -1:]
        to_end, from_start, across = (_exp(x).to(wide)[..., None] for x in (total - before, upto, total))
        return PieceStates((k * to_end).mT @ v, (k * from_start).mT @ v, across)


# The running sums that every form starts from


def _running_sums(log_decay: Tensor | None, seq_idx: Tensor | None, length: int) -> tuple[Tensor, Tensor] | None:
    """(before, upto), each (B or 1, H or 1, L) in float64, so that differences far into a text are still exact.

    A boundary between packed sequences lowers both sums by what leaves nothing, in either direction.
    """
    if log_decay is None and seq_idx is None:
        return None
    if log_decay is None:
        log_decay = torch.zeros(1, device=seq_idx.device)
    per_token = log_decay if log_decay.ndim == 3 else log_decay[None, :, None].expand(1, -1, length)
    per_token = per_token.double().clamp(min=_LOG_NOTHING)
    upto = per_token.cumsum(-1)
    before = upto - per_token
    if seq_idx is not None:
        boundaries = sequence_begins(seq_idx).cumsum(-1)[:, None]  # (B, 1, L)
        before, upto = before + _LOG_NOTHING * boundaries, upto + _LOG_NOTHING * boundaries
    return before, upto


def sequence_begins(seq_idx: Tensor) -> Tensor:
    """(B, L) bool from the numbers of packed sequences: True where one begins, but for the first of a row."""
    return F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))


def _drawn(q: Tensor, log_weight: Tensor | None, state: Tensor) -> Tensor:
    """What queries, (B, H, L, D), draw from a state outside their text, over decays of (B or 1, H, L)."""
    q = q.to(torch.promote_types(q.dtype, torch.float32))
    if log_weight is not None:
        q = q * _exp(log_weight).to(q.dtype)[..., None]
    return q @ state.to(q.dtype)


def _exp(log_weight: Tensor) -> Tensor:
    return log_weight.clamp(min=_LOG_NOTHING).exp()


def _masked(k: Tensor, mask: Tensor | None) -> Tensor:
    return k if mask is None else k.masked_fill(~mask[:, None, :, None], 0)


# The full form


def _scores(q: Tensor, k: Tensor, sums: tuple[Tensor, Tensor] | None) -> Tensor:
    return q @ k.mT if sums is None else _DecayedScores.apply(q, k, *sums)


class _DecayedScores(torch.autograd.Function):
    """QKᵀ⊙M, (B, H, L, L), from q, k and the running sums. The backward pass makes M again rather than keep it."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, before: Tensor, upto: Tensor) -> Tensor:
        scores = q @ k.mT
        decay = _masks(before, upto, scores.dtype)
        for block in _blocks(q):
            scores[block] *= decay(block)
        ctx.save_for_backward(q, k, before, upto, scores)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, before, upto, scores = ctx.saved_tensors
        grad_q, grad_k = torch.empty_like(q), torch.empty_like(k)
        grad_sums = [q.new_empty(q.shape[:-1], dtype=torch.float64) for _ in range(2)]
        with_decays = any(ctx.needs_input_grad[2:])
        with torch.autocast(q.device.type, enabled=False):
            decay = _masks(before, upto, scores.dtype)
            for block in _blocks(q):
                if with_decays:
                    grad_sums[0][block], grad_sums[1][block] = _sums_gradients(grad[block] * scores[block])
                grad_scores = grad[block] * decay(block)
                grad_q[block] = grad_scores @ k[block]
                grad_k[block] = grad_scores.mT @ q[block]
        if not with_decays:
            return grad_q, grad_k, None, None
        return grad_q, grad_k, *(x.sum_to_size(before.shape) for x in grad_sums)


def _block_entries(x: Tensor) -> int:
    return _BLOCK_ENTRIES.get(x.device.type, _BLOCK_ENTRIES["cuda"])


def _blocks(x: Tensor) -> list[slice]:
    """Slices over texts, (B, H, L, ·): so few at a time that their matrices stay in the cache."""
    count, heads, length, _ = x.shape
    if torch.compiler.is_compiling():  # which makes blocks of its own, and would write out the loop over these
        return [slice(0, count)]
    size = max(1, _block_entries(x) // (heads * length * length))
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def _masks(before: Tensor, upto: Tensor, dtype: torch.dtype) -> Callable[[slice], Tensor]:
    """The decay masks of the texts in a slice; made once where all are alike."""
    if len(before) > 1:
        return lambda block: _decay_mask(before[block], upto[block], dtype)
    mask = _decay_mask(before, upto, dtype)
    return lambda block: mask


def _decay_mask(before: Tensor, upto: Tensor, dtype: torch.dtype) -> Tensor:
    """M of the formula, (..., L, L), from the running sums, (..., L) in float64.

    With m the middle of the two sums and h half their difference, both triangles are one expression,
    log M_ij = −|m_i − m_j| + h_j − h_i, so neither has to be selected and none can overflow.
    """
    middle, half = (before + upto) / 2, (upto - before) / 2
    compute = torch.promote_types(dtype, torch.float32)
    # Two float32 numbers hold the float64 sum: far into a text, neighbours are close and far from 0.
    high = middle.to(compute)
    low, half = (middle - high).to(compute), half.to(compute)
    log_mask = high[..., :, None] - high[..., None, :]
    log_mask.add_(low[..., :, None]).sub_(low[..., None, :]).abs_().neg_()
    log_mask.add_(half[..., None, :]).sub_(half[..., :, None])
    return log_mask.clamp_(min=_LOG_NOTHING).exp_().to(dtype)


def _sums_gradients(grad_log_mask: Tensor) -> tuple[Tensor, Tensor]:
    """From ∂/∂ log M, (..., L, L), to ∂/∂ before and ∂/∂ upto, (..., L) in float64. It may be written over."""
    matrices = grad_log_mask.flatten(0, -3)
    size = len(matrices) if torch.compiler.is_compiling() else max(1, _block_entries(matrices) // matrices[0].numel())
    sums = [_rows_and_columns(few.double()) for few in matrices.split(size)]
    return tuple(torch.cat(x).view(grad_log_mask.shape[:-1]) for x in zip(*sums))


def _rows_and_columns(grad_log_mask: Tensor) -> tuple[Tensor, Tensor]:
    """The same for a few matrices in float64, written over. A pair adds to its row and takes from its column: sums that did
    not round alike would leave something with every token."""
    rows, columns = grad_log_mask.sum(-1), grad_log_mask.sum(-2)
    past = grad_log_mask.tril_()
    past_rows, past_columns = past.sum(-1), past.sum(-2)
    return past_rows - past_columns, (columns - past_columns) - (rows - past_rows)  # the diagonal cancels in both


# The recurrent form


def _recurrent(q: Tensor, k: Tensor, v: Tensor, sums: tuple[Tensor, Tensor] | None) -> Tensor:
    if sums is None:
        sums = (torch.zeros(1, 1, q.shape[-2], dtype=torch.float64, device=q.device),) * 2
    return _token_by_token(q, k, v, *sums)


def _recurrent_forward(q: Tensor, k: Tensor, v: Tensor, before: Tensor, upto: Tensor) -> Tensor:
    """Two passes over the tokens, with a state each and nothing else: the backward pass runs the same two passes."""
    past, future = _two_passes(q, k, v, before, upto)
    diagonal = (q * k).sum(-1, keepdim=True) * v  # both passes have counted it
    return past.add_(future).sub_(diagonal)


def _recurrent_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, before: Tensor, upto: Tensor, with_decays: bool
) -> list[Tensor]:
    # y = (QKᵀ⊙M) V, so each gradient is such a product too. Mᵀ is M with the two sums exchanged.
    q_past, q_future = _two_passes(grad, v, k, before, upto)
    k_past, k_future = _two_passes(v, grad, q, upto, before)
    v_past, v_future = _two_passes(k, q, grad, upto, before)
    of_sums = []
    if with_decays:
        grad_before = (q * q_past).sum(-1).double() - (k * k_future).sum(-1)
        grad_upto = (k * k_past).sum(-1).double() - (q * q_future).sum(-1)
        of_sums = [grad_before.sum_to_size(before.shape), grad_upto.sum_to_size(upto.shape)]
    diagonal = (grad * v).sum(-1, keepdim=True)
    grad_q = q_past.add_(q_future).sub_(diagonal * k)
    grad_k = k_past.add_(k_future).sub_(diagonal * q)
    grad_v = v_past.add_(v_future).sub_((q * k).sum(-1, keepdim=True) * grad)
    return [grad_q, grad_k, grad_v, *of_sums]


def _two_passes(q: Tensor, k: Tensor, v: Tensor, before: Tensor, upto: Tensor) -> tuple[Tensor, Tensor]:
    """S_i = λ S_{i∓1} + k_i v_iᵀ and q_iᵀ S_i from the left and from the right, (B, H, L, E) each."""
    rightward, leftward = (_exp(s.diff()).to(q.dtype) for s in (before, -upto.flip(-1)))
    leftward = leftward.flip(-1)
    L = q.shape[-2]
    outputs = []
    for order, weights, offset in ((range(L), rightward, -1), (reversed(range(L)), leftward, 0)):
        state, y = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), torch.empty_like(v)
        for t in order:
            if 0 <= t + offset < L - 1:
                state.mul_(weights[..., t + offset, None, None])
            state.addcmul_(k[:, :, t, :, None], v[:, :, t, None, :])
            y[:, :, t] = (q[:, :, t, None, :] @ state).squeeze(-2)
        outputs.append(y)
    return outputs[0], outputs[1]


# The chunkwise form


def _chunkwise(
    q: Tensor, k: Tensor, v: Tensor, sums: tuple[Tensor, Tensor] | None, scale: float, chunk_size: int, alike: bool
) -> Tensor:
    """`alike`: the decays of one chunk are those of all."""
    if sums is None:  # nothing decays, so one state holds the whole text
        return q @ (scale * (k.mT @ v))
    return _chunk_by_chunk(q, k, v, *sums, scale, min(chunk_size, q.shape[-2]), alike)


def _chunkwise_forward(
    q: Tensor, k: Tensor, v: Tensor, before: Tensor, upto: Tensor, scale: float, chunk_size: int, alike: bool
) -> Tensor:
    """The full form inside chunks of C tokens; a D×E state from the left and one from the right bring in the rest.

    Both directions are computed as one: their states lie below each other, 2D×E.
    The backward pass computes states and C×C matrices again: kept, they would be most of the memory. Both passes read and
    write long tensors a block at a time where they lie, since a copy of one is memory that the system has to find first.
    """
    before, upto, to_query, of_key, across = _chunk_weights(before, upto, chunk_size, q.dtype)
    blocks = _chunk_blocks(q, chunk_size)
    states = _received(blocks, k, v, of_key, across, (1, -1))
    y = torch.empty_like(v)
    decay = _chunk_masks(blocks, before, upto, q.dtype, alike)
    for block in blocks:
        Q, K, V = scale * block.of(q), block.of(k), block.of(v)
        Y = (Q @ K.mT).mul_(decay(block)) @ V
        Y += _twice(Q, block.of(to_query)) @ block.state(states)
        block.of(y).copy_(Y)
    return y


def _chunkwise_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, before: Tensor, upto: Tensor, scale: float, chunk_size: int, alike: bool,
    with_decays: bool,
) -> list[Tensor]:  # fmt: skip
    sums_shape = before.shape
    before, upto, to_query, of_key, across = _chunk_weights(before, upto, chunk_size, q.dtype)
    blocks = _chunk_blocks(q, chunk_size)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if with_decays:
        grad_sums = [q.new_empty(q.shape[:-1], dtype=torch.float64) for _ in range(2)]
        grad_weights = [q.new_empty(*q.shape[:-1], 2) for _ in range(2)]
    states = _received(blocks, k, v, of_key, across, (1, -1))
    # What a chunk's queries draw from a state flows back to all the keys in it: the same scans, the other way.
    grad_states = _received(blocks, q, grad, scale * to_query, across, (-1, 1))
    decay = _chunk_masks(blocks, before, upto, q.dtype, alike)
    for block in blocks:
        Q, K, V, dY, M = scale * block.of(q), block.of(k), block.of(v), block.of(grad), decay(block)
        S, dS = block.state(states), block.state(grad_states)
        scores, grad_scores = (Q @ K.mT).mul_(M), dY @ V.mT
        dV = scores.mT @ dY
        if with_decays:
            for grad_sum, of_block in zip(grad_sums, _sums_gradients(scores.mul_(grad_scores))):
                block.of(grad_sum).copy_(of_block)
        grad_scores.mul_(M)
        dQ, dK = grad_scores @ K, grad_scores.mT @ Q
        dV += _twice(K, block.of(of_key)) @ dS
        through_states = (Q, dQ, to_query, dY @ S.mT), (K, dK, of_key, V @ dS.mT)
        for number, (x, dX, weight, drawn) in enumerate(through_states):
            if with_decays:
                of_both = (x.unsqueeze(-2) * drawn.unflatten(-1, (2, -1))).sum(-1)
                block.of(grad_weights[number]).copy_(of_both)
            for drawn_from, w in zip(drawn.chunk(2, -1), block.of(weight).split(1, -1)):
                dX.addcmul_(drawn_from, w)
        for whole, of_block in ((grad_q, dQ.mul_(scale)), (grad_k, dK), (grad_v, dV)):
            block.of(whole).copy_(of_block)
    if not with_decays:
        return [grad_q, grad_k, grad_v]
    # To the logarithms of the weights, and from these to the sums: what `_chunk_weights` does, backwards.
    weighted = ((g * w).double().unbind(-1) for g, w in zip(grad_weights, (to_query, of_key)))
    (of_before, of_until_end), (of_to_end, of_upto) = weighted
    of_across = ((states * grad_states).sum((-2, -1)) * across[..., 0, 0]).double()
    grad_before, grad_upto = grad_sums
    grad_before += of_before - of_to_end
    grad_upto += of_upto - of_until_end
    grad_end = _sum_of_chunks(of_until_end + of_to_end, chunk_size) + of_across
    grad_start = _sum_of_chunks(of_before + of_upto, chunk_size) + of_across
    grad_end[..., :-1] -= grad_start[..., 1:]
    grad_upto[..., _last_tokens(upto, chunk_size)] += grad_end
    return [grad_q, grad_k, grad_v, grad_before.sum_to_size(sums_shape), grad_upto.sum_to_size(sums_shape)]


def _last_tokens(x: Tensor, chunk_size: int) -> Tensor:
    """Where the chunks of x, (..., L), end: (N,)."""
    length = x.shape[-1]
    return torch.arange(chunk_size - 1, length + chunk_size - 1, chunk_size, device=x.device).clamp(max=length - 1)


def _sum_of_chunks(x: Tensor, chunk_size: int) -> Tensor:
    """(..., L) to (..., N)."""
    return F.pad(x, (0, -x.shape[-1] % chunk_size)).unflatten(-1, (-1, chunk_size)).sum(-1)


def _chunk_weights(before: Tensor, upto: Tensor, chunk_size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What the running sums of a text are inside its chunks, and what is left on the ways into and out of these.

    Returns:
        before, upto: from each chunk's start, (B or 1, H or 1, L).
        to_query, of_key: of a state at a query, and of a key in a state, (B or 1, H or 1, L, 2), from the left and from
            the right.
        across: of a state that crosses a chunk, (B or 1, H or 1, N, 1, 1).
    """
    end = upto[..., _last_tokens(upto, chunk_size)]  # (B or 1, H or 1, N)
    start = F.pad(end[..., :-1], (1, 0))
    across = _exp(end - start).to(dtype)[..., None, None]
    start, end = (x.repeat_interleave(chunk_size, -1)[..., : upto.shape[-1]] for x in (start, end))
    before, upto, until_end, to_end = before - start, upto - start, end - upto, end - before
    # No logarithm is above 0.
    to_query, of_key = (_exp(torch.stack(logs, -1)).to(dtype) for logs in ((before, until_end), (to_end, upto)))
    return before, upto, to_query, of_key, across


class _Block(NamedTuple):
    """n chunks of b texts, so few that their C×C matrices stay in the cache. A text's last chunk may be shorter than C."""

    texts: slice
    chunks: slice
    tokens: slice

    def of(self, x: Tensor) -> Tensor:
        """A view of this block of x, (B or 1, H or 1, L, ...): (b or 1, H or 1, n, C, ...)."""
        return self._texts(x)[:, :, self.tokens].unflatten(2, (self.chunks.stop - self.chunks.start, -1))

    def state(self, x: Tensor) -> Tensor:
        """A view of this block of x, (B or 1, H or 1, N, ...): (b or 1, H or 1, n, ...)."""
        return self._texts(x)[:, :, self.chunks]

    def _texts(self, x: Tensor) -> Tensor:
        return x if len(x) == 1 else x[self.texts]


def _chunk_blocks(x: Tensor, chunk_size: int) -> list[_Block]:
    """All of x, (B, H, L, ·), in blocks."""
    count, heads, length, _ = x.shape
    matrices = _block_entries(x) // (heads * chunk_size * chunk_size)
    texts = min(max(matrices, 1), count)
    chunks = max(matrices // texts, 1)
    whole = length // chunk_size
    spans = [(first, min(first + chunks, whole)) for first in range(0, whole, chunks)]
    if length % chunk_size:
        spans.append((whole, whole + 1))
    return [
        _Block(slice(text, text + texts), slice(*span), slice(span[0] * chunk_size, min(span[1] * chunk_size, length)))
        for text in range(0, count, texts)
        for span in spans
    ]


def _chunk_masks(
    blocks: list[_Block], before: Tensor, upto: Tensor, dtype: torch.dtype, alike: bool
) -> Callable[[_Block], Tensor]:
    """The decay masks of a block, (b or 1, H or 1, n or 1, C, C); made once where all chunks are alike."""
    if not alike:
        return lambda block: _decay_mask(block.of(before), block.of(upto), dtype)
    mask = _decay_mask(*(blocks[0].of(x)[:, :, :1] for x in (before, upto)), dtype)

    def cut(block: _Block) -> Tensor:  # to the last chunk's length
        length = block.of(before).shape[-1]
        return mask[..., :length, :length]

    return cut


def _twice(x: Tensor, weights: Tensor) -> Tensor:
    """(..., C, D) by weights from the left and from the right, (..., C, 2), side by side: (..., C, 2D)."""
    return (x.unsqueeze(-2) * weights.unsqueeze(-1)).flatten(-2)


def _received(
    blocks: list[_Block], k: Tensor, v: Tensor, weights: Tensor, across: Tensor, directions: tuple[int, int]
) -> Tensor:
    """The states in which each chunk finds the chunks before it in either direction, below each other, (B, H, N, 2D, E)."""
    count, D = blocks[-1].chunks.stop, k.shape[-1]
    states = k.new_empty(*k.shape[:2], count, 2 * D, v.shape[-1])
    for block in blocks:  # first each chunk's own
        block.state(states).copy_(_twice(block.of(k), block.of(weights)).mT @ block.of(v))
    for half, direction in zip(states.split(D, dim=-2), directions):
        state = torch.zeros_like(half[:, :, 0])
        for n in range(count)[::direction]:
            following = torch.addcmul(half[:, :, n], state, across[:, :, n])
            half[:, :, n] = state
            state = following
    return states


# The loops over tokens and over blocks as operators of PyTorch's, which torch.compile does not look into: it would write
# out every step of a loop, and compile for minutes


def _operator(
    forward: Callable[..., Tensor], backward: Callable[..., list[Tensor]], like: Callable
) -> Callable[..., Tensor]:
    """forward(q, k, v, before, upto, *numbers) with the gradients of `backward`, which has the same arguments between the
    output's gradient and whether those of the sums are wanted. `like`: the tensors in whose layout it gives q's, k's and v's.
    """
    name = re.sub(r"\W", "_", __name__)  # a copy of this file in a Hub folder registers operators of its own
    run = torch.library.custom_op(f"{name}::{forward.__name__[1:]}", forward, mutates_args=())
    run_backward = torch.library.custom_op(f"{name}::{backward.__name__[1:]}", backward, mutates_args=())

    @run.register_fake
    def _(q, k, v, *others):
        return torch.empty_like(v)

    @run_backward.register_fake
    def _(grad, q, k, v, before, upto, *numbers):
        *_, with_decays = numbers
        of_sums = [x.new_empty(x.shape) for x in (before, upto)] if with_decays else []
        return [*map(torch.empty_like, like(grad, q, k, v)), *of_sums]

    def keep(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.numbers = inputs[5:]

    def gradients(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad.device.type, enabled=False):
            grads = run_backward(grad, *ctx.saved_tensors, *ctx.numbers, any(ctx.needs_input_grad[3:5]))
        return *grads, *[None] * (len(ctx.needs_input_grad) - len(grads))

    run.register_autograd(gradients, setup_context=keep)
    return run


_token_by_token = _operator(_recurrent_forward, _recurrent_backward, lambda grad, q, k, v: (k, q, grad))
_chunk_by_chunk = _operator(_chunkwise_forward, _chunkwise_backward, lambda grad, q, k, v: (q, k, v))


def _check(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, mask: Tensor | None,
    seq_idx: Tensor | None, left_state: Tensor | None, right_state: Tensor | None, normalize: bool,
    form: str, chunk_size: int, dropout_p: float,
) -> None:  # fmt: skip
    """Raise ValueError for arguments that do not fit."""
    if q.ndim != 4:
        raise ValueError(f"q must be (batch, heads, length, head_dim), not {tuple(q.shape)}")
    B, H, L, D = q.shape
    if k.shape != q.shape or v.shape[:-1] != q.shape[:-1]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} must agree in (batch, heads, length), q and k in all")  # fmt: skip
    if log_decay is not None and log_decay.shape not in ((H,), (B, H, L)):
        raise ValueError(f"log_decay must be None, ({H},) or ({B}, {H}, {L}), not {tuple(log_decay.shape)}")
    if mask is not None and (mask.shape != (B, L) or mask.dtype != torch.bool):
        raise ValueError(f"mask must be bool of shape ({B}, {L}), not {mask.dtype} of {tuple(mask.shape)}")
    if seq_idx is not None and (seq_idx.shape != (B, L) or seq_idx.is_floating_point()):
        raise ValueError(f"seq_idx must be integers of shape ({B}, {L}), not {seq_idx.dtype} of {tuple(seq_idx.shape)}")
    for name, state in (("left_state", left_state), ("right_state", right_state)):
        if state is not None and state.shape != (B, H, D, v.shape[-1]):
            raise ValueError(f"{name} must be ({B}, {H}, {D}, {v.shape[-1]}), not {tuple(state.shape)}")
        if state is not None and (seq_idx is not None or normalize):
            raise ValueError(f"{name} belongs to one text that is not normalized; leave out seq_idx and normalize")
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, not {form!r}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, not {chunk_size}")
    if dropout_p > 0 and form not in ("auto", "full"):
        raise ValueError(f"dropout on the attention matrix exists only in the full form, not in the {form} one")


def _choose(
    q: Tensor, k: Tensor, v: Tensor, decays: bool, normalize: bool, form: str, dropout_p: float
) -> tuple[str, bool]:
    """The form, with "auto" decided, and whether the kernels of linear_attention_triton.py compute it.

    PyTorch computes what they have no kernel for: the recurrent form, float64, operands of different types, heads above 128
    (above 64 in float16 and float32), CPUs and cards before Ampere. `attention_matrix` and `piece_states` are always PyTorch's.
    """
    extra = int(normalize)  # normalization adds a column to v
    fused = _FUSED and form != "recurrent" and 0 <= dropout_p < 1 and covers(q, k, v, extra)
    if form == "auto":
        if fused:
            longest = _FUSED_FULL_UP_TO if decays else _FUSED_FULL_UP_TO_WITHOUT_DECAY
        else:
            longest = _FULL_UP_TO if decays else _FULL_UP_TO_WITHOUT_DECAY
        form = "full" if dropout_p > 0 or q.shape[-2] <= longest else "chunkwise"
    return form, fused
