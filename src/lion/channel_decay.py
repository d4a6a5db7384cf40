"""Linear attention whose keys have a decay per channel: Λ_t is a diagonal matrix and not a number.

    y_i = Σ_j s · (Σ_d q_id k_jd M_ijd) · v_j

    M_ijd = 1                              i = j
          = λ_jd · λ_{j+1,d} · … · λ_{i-1,d}    j < i   (key in the past)
          = λ_{i+1,d} · … · λ_jd                j > i   (key in the future)

Afzal et al., arXiv:2502.16249, theorem B.1. `definition` is this formula and nothing else. As q_id e^(c_id) times
k_jd e^(−c_jd), with c the cumulative log decays, it would overflow. So a chunk is cut into halves again and again: the
queries of one half read the keys of the other decayed up to their boundary, and no exponent is positive. States pass
between chunks.
Shape letters: B batch, H heads, L length, D head size of q and k, E head size of v, N chunks, C chunk size.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .cpu import dropout
from .linear_attention_forms import LOG_ZERO, LOG_ZERO_OF_FACTOR, sequence_starts
from .two_sided_attention import SegmentStates, zero_masked

SMALLEST = 4  # tokens of the blocks whose weights are computed one by one, with an exponential per channel
# Tokens per chunk. A CPU computes least in small chunks; a GPU would wait for the states to pass through many.
LARGEST = {"cpu": 16, "cuda": 64}
ENTRIES = {"cpu": 2**20, "cuda": 2**26}  # of the matrices of the texts that are processed at a time


def definition(
    q, k, v, log_decay, *, log_decay_future=None, mask=None, scale=None, normalize=False, causal=False
) -> Tensor:
    """Compute the formula at the top of this file literally, in O(L³D); arguments as for `linear_attention`."""
    L = q.shape[-2]
    i, j, t = torch.meshgrid(*[torch.arange(L, device=q.device)] * 3, indexing="ij")
    of_future = log_decay if log_decay_future is None else log_decay_future
    exponents = torch.zeros(1, 1, L, L, 1, dtype=q.dtype, device=q.device)
    for decays, between in ((log_decay, (j <= t) & (t < i)), (of_future, (i < t) & (t <= j))):
        per_token = decays if decays.ndim == 4 else decays[:, None].expand(1, -1, L, -1)
        exponents = exponents + torch.einsum("ijt,bhtd->bhijd", between.to(per_token.dtype), per_token)
    scores = torch.einsum("bhid,bhjd,bhijd->bhij", q, k, exponents.exp())
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores * mask[:, None, None, :]
    if causal:
        scores = scores.tril()
    if normalize:
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-6)
    return scores @ v


class Decays(NamedTuple):
    """Log decays of each token, or their sums, (B or 1, H, L, D), for past and for future keys (None: there are none).
    Sums are of past decays before each token, and of future decays up to it: of two tokens, the difference of their
    sums is the log of what M is for the earlier and the later one."""

    past: Tensor
    future: Tensor | None

    def each(self, function) -> "Decays":
        return Decays(*(None if x is None else function(x) for x in self))


def attend_by_channel(
    q, k, v, log_decay, log_decay_future=None, *, mask=None, seq_idx=None, left_state=None, right_state=None,
    scale: float, causal: bool = False, form: str, chunk_size: int = 128, dropout_p: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute one of the forms, (B, H, L, E), in float32 or better; arguments as for `linear_attention`, with log
    decays (H, D) or (B, H, L, D)."""
    wide = torch.promote_types(v.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = scale * q.to(wide), zero_masked(k, mask).to(wide), v.to(wide)
        q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
        given = q, k, v, log_decay, log_decay_future, left_state, right_state, seq_idx
        if form == "recurrent":
            return _recurrent(*given, causal)
        size = _power_of_two(q.shape[2])
        if form == "chunkwise":
            size = min(size, LARGEST["cpu" if q.is_cpu else "cuda"], 1 << chunk_size.bit_length() - 1)
        compute = _chunkwise if torch.compiler.is_compiling() or dropout_p else _InBlocks.apply
        return compute(*given, causal, size, dropout_p)


def matrix_by_channel(q, k, log_decay, log_decay_future=None, *, mask=None, seq_idx=None, scale: float) -> Tensor:
    """Compute s · Σ_d q_id k_jd M_ijd, (B, H, L, L); arguments as for `linear_attention`."""
    identity = torch.eye(q.shape[2], dtype=q.dtype, device=q.device).expand(*q.shape[:2], -1, -1)
    return attend_by_channel(
        q, k, identity, log_decay, log_decay_future, mask=mask, seq_idx=seq_idx, scale=scale, form="full"
    )


def segment_states_by_channel(k, v, log_decay, log_decay_future=None, *, mask=None) -> SegmentStates:
    """As `segment_states`; a state that crosses the segment is multiplied by (B or 1, H, D, 1)."""
    wide = torch.promote_types(k.dtype, torch.float32)
    with torch.autocast(k.device.type, enabled=False):
        k, v = zero_masked(k, mask).to(wide), v.to(wide)
        past, future = _sums(_of_tokens(log_decay, log_decay_future, k.shape[2], None, False), 1)
        weights = past[:, :, -1:] - past[:, :, :-1], future[:, :, :-1]
        states = [(k * _exp(weight, wide)).mT @ v for weight in weights]
        return SegmentStates(*states, *(_exp(sums[:, :, -1, :, None], wide) for sums in (past, future)))


def _of_tokens(log_decay, log_decay_future, length: int, seq_idx: Tensor | None, causal: bool) -> Decays:
    """The decays of each token in float64. A boundary of packed sequences weighs e^LOG_ZERO in both directions."""
    future = None if causal else log_decay if log_decay_future is None else log_decay_future
    decays = Decays(log_decay, future).each(
        lambda x: (x if x.ndim == 4 else x[None, :, None].expand(1, -1, length, -1)).double().clamp(min=LOG_ZERO)
    )
    if seq_idx is None:
        return decays
    starts = LOG_ZERO * sequence_starts(seq_idx)[:, None, :, None]
    before = F.pad(starts[:, :, 1:], (0, 0, 0, 1))  # a sum before a token has the boundary before it
    return Decays(decays.past + before, None if causal else decays.future + starts)


def _sums(decays: Decays, padding: int) -> Decays:
    """Sums of decays and, after the text, of tokens that do not decay."""
    past, future = decays.each(lambda x: F.pad(x, (0, 0, 0, padding)).cumsum(2))
    return Decays(F.pad(past[:, :, :-1], (0, 0, 1, 0)), future)


def _power_of_two(length: int) -> int:
    return 1 << (length - 1).bit_length()


def _exp(log_weight: Tensor, dtype: torch.dtype) -> Tensor:
    return log_weight.to(dtype).clamp(min=LOG_ZERO_OF_FACTOR).exp()


def _matrix(q: Tensor, k: Tensor, sums: Decays) -> Tensor:
    """Σ_d q_id k_jd M_ijd, (..., C, C), of q and k, (..., C, D) with C a power of two."""
    length, size = q.shape[-2], min(SMALLEST, q.shape[-2])
    (q_, k_, past, future) = (
        None if x is None else x.unflatten(-2, (-1, size)) for x in (q, k, *sums)
    )  # (..., blocks, size, D)
    earlier = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()[..., None]
    log_weights = past.unsqueeze(-2) - past.unsqueeze(-3)
    if future is not None:
        log_weights = log_weights.where(earlier, future.unsqueeze(-3) - future.unsqueeze(-2))
    weights = log_weights.to(q.dtype).clamp(min=LOG_ZERO, max=0).exp()
    blocks = (q_.unsqueeze(-2) * k_.unsqueeze(-3) * weights).sum(-1)
    blocks = blocks.tril() if future is None else blocks
    while size < length:  # two blocks become one
        (q0, q1), (k0, k1) = (x.unflatten(-2, (-1, 2, size)).unbind(-3) for x in (q, k))
        halves = sums.each(lambda x, size=size: x.unflatten(-2, (-1, 2, size)).unbind(-3))
        past0, past1 = halves.past
        entry = past1[..., :1, :]
        lower = (q1 * _exp(past1 - entry, q.dtype)) @ (k0 * _exp(entry - past0, q.dtype)).mT
        upper = torch.zeros_like(lower)
        if halves.future is not None:
            future0, future1 = halves.future
            end = future0[..., -1:, :]
            upper = (q0 * _exp(end - future0, q.dtype)) @ (k1 * _exp(future1 - end, q.dtype)).mT
        first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
        blocks = torch.cat([torch.cat([first, upper], -1), torch.cat([lower, second], -1)], -2)
        size *= 2
    return blocks.squeeze(-3)


def _chunkwise(
    q, k, v, log_decay, log_decay_future, left_state, right_state, seq_idx, causal: bool, C: int, dropout_p: float
) -> Tensor:
    """The matrix inside chunks of C tokens, and states from both sides of each. The full form is that of one chunk."""
    L = q.shape[2]
    N = -(-L // C)
    sums = _sums(_of_tokens(log_decay, log_decay_future, L, seq_idx, causal), N * C - L)
    q, k, v = (F.pad(x, (0, 0, 0, N * C - L)).unflatten(2, (N, C)) for x in (q, k, v))  # (B, H, N, C, ·)
    past, future = sums = sums.each(lambda x: x.unflatten(2, (N, C)))
    y = dropout(_matrix(q, k, sums), dropout_p) @ v
    if N > 1 or left_state is not None:
        entry = past[..., :1, :]  # (B or 1, H, N, 1, D)
        exit = torch.cat([entry[:, :, 1:], past[:, :, -1:, -1:]], 2)
        own = (k * _exp(exit - past, q.dtype)).mT @ v
        states = _incoming(own, _exp(exit - entry, q.dtype).mT, left_state)
        y = y + (q * _exp(past - entry, q.dtype)) @ states
    if not causal and (N > 1 or right_state is not None):
        entry = future[..., -1:, :]
        exit = torch.cat([torch.zeros_like(entry[:, :, :1]), entry[:, :, :-1]], 2)
        own = (k * _exp(future - exit, q.dtype)).mT @ v
        across = _exp(entry - exit, q.dtype).mT
        states = _incoming(own.flip(2), across.flip(2), right_state).flip(2)
        y = y + (q * _exp(entry - future, q.dtype)) @ states
    return y.flatten(2, 3)[:, :, :L]


def _incoming(own: Tensor, across: Tensor, first: Tensor | None) -> Tensor:
    """The states that enter each chunk, (B, H, N, D, E), from those of its own keys and values and its decay,
    (B or 1, H, N, D, 1)."""
    state = torch.zeros_like(own[:, :, 0]) if first is None else first.to(own.dtype)
    states = [state]
    for added, decay in zip(own.unbind(2)[:-1], across.unbind(2)):
        state = torch.addcmul(added, state, decay)
        states.append(state)
    return torch.stack(states, 2)


class _InBlocks(torch.autograd.Function):
    """`_chunkwise` of a few texts at a time, which stay in a CPU's cache. The backward pass computes it again, since
    what it would store takes many times the memory of q, k and v."""

    @staticmethod
    def forward(ctx, *given) -> Tensor:
        tensors, ctx.options = given[:8], given[8:]
        ctx.save_for_backward(*tensors)
        return torch.cat([_chunkwise(*part, *ctx.options) for part in _parts(tensors, ctx.options[1])])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = [number for number, needs in enumerate(ctx.needs_input_grad) if needs]
        parts, found = _parts(ctx.saved_tensors, ctx.options[1]), []
        for part, of_part in zip(parts, grad.split([len(part[0]) for part in parts])):
            part = [x if x is None else x.detach() for x in part]
            wanted = [part[number].requires_grad_() for number in needed]
            with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
                y = _chunkwise(*part, *ctx.options)
                found.append(torch.autograd.grad(y, wanted, of_part, materialize_grads=True))
        grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for number, of_parts in zip(needed, zip(*found)):
            grads[number] = sum(of_parts) if ctx.saved_tensors[number].ndim == 2 else torch.cat(of_parts)
        return tuple(grads)


def _parts(tensors: tuple[Tensor | None, ...], chunk_size: int) -> list[list[Tensor | None]]:
    """Cut tensors of a batch, but not decays that all of its texts share, (H, D), into those of a few texts."""
    q, *_, seq_idx = tensors
    count = max(1, ENTRIES["cpu" if q.is_cpu else "cuda"] // (q.shape[1] * q.shape[2] * chunk_size))
    shared = [x is None or (x.ndim == 2 and x is not seq_idx) for x in tensors]
    starts = range(0, len(q), count)
    return [[x if whole else x[at : at + count] for x, whole in zip(tensors, shared)] for at in starts]


def _recurrent(q, k, v, log_decay, log_decay_future, left_state, right_state, seq_idx, causal: bool) -> Tensor:
    """Token by token, in each direction: a query reads the state of the keys before it, decayed by their own and all
    decays in between."""
    L = q.shape[2]
    decays = _of_tokens(log_decay, log_decay_future, L, seq_idx, causal)
    y = list(((q * k).sum(-1, keepdim=True) * v).unbind(2))
    for decay, state, order in zip(decays, (left_state, right_state), (range(L), reversed(range(L)))):
        if decay is None:
            continue
        factors = _exp(decay, q.dtype)[..., None]
        state = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state.to(q.dtype)
        for t in order:
            y[t] = y[t] + (q[:, :, t, None] @ state).squeeze(-2)
            state = factors[:, :, t] * torch.addcmul(state, k[:, :, t, :, None], v[:, :, t, None])
    return torch.stack(y, 2)
