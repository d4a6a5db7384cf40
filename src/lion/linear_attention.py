"""Full linear attention with a decay mask: one function, computed in three forms.

    y_i = Σ_j  s · (q_i · k_j) · M_ij · v_j

    M_ij = 1                          i = j
         = λ_j · λ_{j+1} · … · λ_{i-1}    j < i   (key in the past)
         = λ_{i+1} · … · λ_j              j > i   (key in the future)

Afzal et al., "Linear Attention for Efficient Bidirectional Sequence Modeling", arXiv:2502.16249, section 3.
`definition` below is that formula and nothing else; the forms are faster ways to the same numbers:

    full        the L×L matrix, for short sequences                      O(L²) work and memory
    chunkwise   the matrix inside chunks, d×d states between them        O(L) work and memory
    recurrent   a d×d state in each direction, token by token            O(L) work, O(1) state

Letters in shape comments: B batch, H heads, L length, D head size of q and k, E head size of v, N chunks, C chunk.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

FORMS = ("auto", "full", "recurrent", "chunkwise")

# Logarithms of weights are held above this: e^-60 is below every dtype's rounding, and products of it with ordinary
# numbers are not yet denormal, which a CPU computes many times slower.
_LOG_NOTHING = -60.0

# Up to this length "auto" takes the full form. Forward and backward of 1,024 tokens in all, 12 heads of 64, float32, one
# core of a Xeon: full 35 ms and chunkwise 51 ms in texts of 128 tokens, 85 and 67 ms in texts of 256.
_FULL_UP_TO = 192


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    mask: Tensor | None = None,
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
        scale: s in the formula; D^-1/2 when None.
        normalize: divide each y_i by its row sum Σ_j s·(q_i·k_j)·M_ij + 1e-6.
        form: "full", "recurrent", "chunkwise", or "auto", which picks by length.
        chunk_size: C of the chunkwise form.
        dropout_p: dropout on the matrix s·QKᵀ⊙M, which only the full form has.

    Returns:
        (B, H, L, E) in v's dtype. States and summed log decays are kept in float32 or better whatever the inputs are.

    Raises:
        ValueError: shapes that do not fit each other, an unknown form, or dropout asked of a form without a matrix.
    """
    form = _check(q, k, v, log_decay, mask, form, chunk_size, dropout_p)
    dtype = v.dtype
    if (normalize or form != "full") and dtype in (torch.bfloat16, torch.float16):
        q, k, v = q.float(), k.float(), v.float()  # states and row sums are sums over the whole text
    if normalize:  # the row sum is what a column of ones in V receives
        v = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], dim=-1)
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        k = k.masked_fill(~mask[:, None, :, None], 0)
    if log_decay is not None:
        log_decay = _per_token(log_decay, length=q.shape[-2])

    with torch.autocast(q.device.type, enabled=False):
        if form == "full":
            y = _full(q, k, v, log_decay, dropout_p)
        elif form == "recurrent":
            y = _recurrent(q, k, v, log_decay)
        else:
            y = _chunkwise(q, k, v, log_decay, chunk_size)
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
    q: Tensor, k: Tensor, log_decay: Tensor | None = None, *, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """The matrix s·QKᵀ⊙M of the full form, (B, H, L, L), with the columns of masked keys 0. Arguments as above."""
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        k = k.masked_fill(~mask[:, None, :, None], 0)
    return _scores(q, k, None if log_decay is None else _per_token(log_decay, length=q.shape[-2]))


# The three forms. q is scaled and masked keys are 0 by now; log_decay is None or (B or 1, H, L) in float64.


def _full(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, dropout_p: float = 0.0) -> Tensor:
    return F.dropout(_scores(q, k, log_decay), dropout_p) @ v


def _scores(q: Tensor, k: Tensor, log_decay: Tensor | None) -> Tensor:
    return q @ k.mT if log_decay is None else _DecayedScores.apply(q, k, log_decay)


class _DecayedScores(torch.autograd.Function):
    """QKᵀ⊙M, (..., L, L), from q, k (..., L, D) and log λ (..., L). In place where autograd would keep every step."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, log_decay: Tensor) -> Tensor:
        scores = q @ k.mT
        decay = _decay_mask(log_decay, scores.dtype)
        scores *= decay
        ctx.save_for_backward(q, k, decay, scores)
        ctx.log_decay_shape = log_decay.shape
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, decay, scores = ctx.saved_tensors
        grad_log_decay = None
        if ctx.needs_input_grad[2]:
            grad_log_mask = grad * scores  # ∂/∂ log M
            grad_log_decay = _gradient_through_sums(grad_log_mask).sum_to_size(ctx.log_decay_shape)
        grad = grad * decay
        return grad @ k, grad.mT @ q, grad_log_decay


def _decay_mask(log_decay: Tensor, dtype: torch.dtype) -> Tensor:
    """M of the formula, (..., L, L), from log λ, (..., L).

    With c_t = Σ log λ up to t and its midpoint m_t = c_t − ½ log λ_t, both triangles are one expression,
    log M_ij = −|m_i − m_j| + ½ log λ_j − ½ log λ_i, so neither has to be selected and none can overflow.
    """
    half = log_decay / 2
    midpoint = log_decay.cumsum(-1) - half
    compute = torch.promote_types(dtype, torch.float32)
    # Two float32 numbers hold the float64 sum: far into a text, neighbours are close and far from 0.
    high = midpoint.to(compute)
    low, half = (midpoint - high).to(compute), half.to(compute)
    log_mask = high[..., :, None] - high[..., None, :]
    log_mask.add_(low[..., :, None]).sub_(low[..., None, :]).abs_().neg_()
    log_mask.add_(half[..., None, :]).sub_(half[..., :, None])
    return log_mask.clamp_(min=_LOG_NOTHING).exp_().to(dtype)


def _gradient_through_sums(grad_log_mask: Tensor) -> Tensor:
    """From ∂/∂ log M, (..., L, L), to ∂/∂ log λ, (..., L): λ_t takes part in M_ij where j ≤ t < i or i < t ≤ j."""
    L = grad_log_mask.shape[-1]
    past = grad_log_mask * torch.ones(L, L, dtype=grad_log_mask.dtype, device=grad_log_mask.device).tril()
    wide = torch.promote_types(grad_log_mask.dtype, torch.float32)  # the sums are subtracted and summed again below
    rows, columns, past_rows, past_columns = (
        matrix.sum(dimension, dtype=wide).double() for matrix in (grad_log_mask, past) for dimension in (-1, -2)
    )
    before = past_rows - past_columns  # log M_ij = c_{i-1} − c_{j-1} in the past, diagonal included on both sides
    upto = (columns - past_columns) - (rows - past_rows)  # log M_ij = c_j − c_i in the future
    both = before + upto
    return both.flip(-1).cumsum(-1).flip(-1) - before  # c_t gathers log λ up to t


def _recurrent(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None) -> Tensor:
    """Two passes with a D×E state:  S_i = λ S_{i∓1} + k_i v_iᵀ,  y_i = q_iᵀ (S^F_i + S^B_i) − (q_i·k_i) v_i."""
    decay = None if log_decay is None else log_decay.exp().to(q.dtype)[..., None, None].unbind(2)  # (B or 1, H, 1, 1)
    queries, keys, values = q[..., None, :].unbind(2), k[..., :, None].unbind(2), v[..., None, :].unbind(2)

    def one_direction(order: Iterable[int]) -> list[Tensor]:
        state, previous, outputs = 0, None, []
        for t in order:
            if previous is not None and decay is not None:
                state = state * decay[previous]
            state = state + keys[t] * values[t]  # (B, H, D, E)
            outputs.append((queries[t] @ state).squeeze(-2))  # (B, H, E)
            previous = t
        return outputs

    forward = one_direction(range(len(queries)))
    backward = one_direction(reversed(range(len(queries))))[::-1]
    diagonal = (q * k).sum(-1, keepdim=True) * v  # both passes have counted it
    return torch.stack(forward, dim=2) + torch.stack(backward, dim=2) - diagonal


def _chunkwise(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, chunk_size: int) -> Tensor:
    """The full form inside chunks of C tokens; a D×E state from the left and one from the right bring in the rest."""
    if log_decay is None:  # nothing decays, so one state holds the whole text
        return q @ (k.mT @ v)
    L = q.shape[-2]
    pad = -L % chunk_size
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, chunk_size)) for x in (q, k, v))  # (B, H, N, C, D or E)
    a = F.pad(log_decay, (0, pad)).unflatten(2, (-1, chunk_size))  # (B or 1, H, N, C)

    upto = a.cumsum(-1)  # from the chunk's first token up to and with t
    total = upto[..., -1:]

    def weights(log_weight: Tensor) -> Tensor:  # (B or 1, H, N, C, 1); every exponent here is ≤ 0
        return log_weight.clamp(min=_LOG_NOTHING).exp().to(q.dtype)[..., None]

    to_end, from_start = weights(total - upto + a), weights(upto)  # key j to its chunk's end, and to its start
    since_start, until_end = weights(upto - a), weights(total - upto)  # query i likewise, its own decay left out
    decay = weights(total)  # (B or 1, H, N, 1, 1): across a whole chunk
    left = _sum_of_earlier((k * to_end).mT @ v, decay)  # (B, H, N, D, E)
    right = _sum_of_earlier(((k * from_start).mT @ v).flip(2), decay.flip(2)).flip(2)
    y = _full(q, k, v, a) + (q * since_start) @ left + (q * until_end) @ right
    return y.flatten(2, 3)[:, :, :L]


def _sum_of_earlier(updates: Tensor, decay: Tensor) -> Tensor:
    """S_0 = 0, S_{n+1} = decay_n S_n + updates_n along dimension 2: what each chunk receives from those before it."""
    updates = updates.unbind(2)
    state, states = torch.zeros_like(updates[0]), []
    for update, weight in zip(updates, decay.unbind(2)):
        states.append(state)
        state = state * weight + update
    return torch.stack(states, dim=2)


def _per_token(log_decay: Tensor, length: int) -> Tensor:
    """log λ as (B or 1, H, L), finite, in float64: sums over a long text must keep float32's accuracy."""
    per_token = log_decay if log_decay.ndim == 3 else log_decay[None, :, None].expand(1, -1, length)
    return per_token.double().clamp(min=_LOG_NOTHING)


def _check(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, mask: Tensor | None,
    form: str, chunk_size: int, dropout_p: float,
) -> str:  # fmt: skip
    """Raise ValueError for arguments that do not fit; return the form with "auto" decided."""
    if q.ndim != 4:
        raise ValueError(f"q must be (batch, heads, length, head_dim), not {tuple(q.shape)}")
    B, H, L, _ = q.shape
    if k.shape != q.shape or v.shape[:-1] != q.shape[:-1]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} must agree in (batch, heads, length), q and k in all")  # fmt: skip
    if log_decay is not None and log_decay.shape not in ((H,), (B, H, L)):
        raise ValueError(f"log_decay must be None, ({H},) or ({B}, {H}, {L}), not {tuple(log_decay.shape)}")
    if mask is not None and (mask.shape != (B, L) or mask.dtype != torch.bool):
        raise ValueError(f"mask must be bool of shape ({B}, {L}), not {mask.dtype} of {tuple(mask.shape)}")
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, not {form!r}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, not {chunk_size}")
    if dropout_p > 0 and form not in ("auto", "full"):
        raise ValueError(f"dropout on the attention matrix exists only in the full form, not in the {form} one")
    if form != "auto":
        return form
    return "full" if dropout_p > 0 or L <= _FULL_UP_TO else "chunkwise"
