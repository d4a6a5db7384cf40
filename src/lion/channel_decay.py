"""Linear attention whose keys have a decay per channel: Λ_t is a diagonal matrix and not a number.

    y_i = Σ_j s · (Σ_d q_id k_jd M_ijd) · v_j

    M_ijd = 1                              i = j
          = λ_jd · λ_{j+1,d} · … · λ_{i-1,d}    j < i   (key in the past)
          = λ_{i+1,d} · … · λ_jd                j > i   (key in the future)

Afzal et al., arXiv:2502.16249, theorem B.1. `definition` is this formula and nothing else. With c the cumulative log
decays, M_ijd is e^(c_id) times e^(−c_jd), one of which would overflow. So blocks of tokens are merged in pairs, from
single tokens up to chunks: queries in one read keys in the other through their common boundary, and each token's decay
to that boundary is a product of numbers at most 1. States pass between chunks.
Shape letters: B batch, H heads, L length, D head size of q and k, E head size of v, N chunks, C chunk size.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from . import cpu, cpu_kernel
from .custom_operators import no_autocast, once_differentiable
from .linear_attention_forms import EPSILON, LOG_ZERO_OF_FACTOR, clamped_exp, sequence_starts
from .two_sided_attention import SegmentStates, zero_masked

# Tokens per chunk. A CPU computes least in small chunks; a GPU would wait for the states to pass through many.
LARGEST = {"cpu": 16, "cuda": 64}
SMALLEST = math.exp(LOG_ZERO_OF_FACTOR)
ENTRIES = {"cpu": 2**20, "cuda": 2**26}  # of the C × C matrices that are computed at once


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
        scores = scores / (scores.sum(-1, keepdim=True) + EPSILON)
    return scores @ v


def attend_by_channel(
    q, k, v, log_decay, log_decay_future=None, *, mask=None, seq_idx=None, left_state=None, right_state=None,
    scale: float, causal: bool = False, form: str, chunk_size: int = 128, dropout_p: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute one of the forms, (B, H, L, E), in float32 or better; arguments as for `linear_attention`, with log
    decays (H, D) or (B, H, L, D). Form "matrix" is "full" without the CPU's kernel."""
    wide = torch.promote_types(v.dtype, torch.float32)
    with no_autocast(q):
        k = zero_masked(k, mask)
        if (groups := v.shape[1] // q.shape[1]) > 1:
            q, k = (x.repeat_interleave(groups, 1) for x in (q, k))
        if form in ("full", "chunkwise") and not dropout_p and cpu_kernel.covers(v):
            q, k = (x if x.dtype == v.dtype else x.to(wide) for x in (q, k))
            return _in_kernel(q, k, v, log_decay, log_decay_future, left_state, right_state, seq_idx, scale, causal)
        q, k, v = scale * q.to(wide), k.to(wide), v.to(wide)
        if q.shape[2] == 1:  # no decay has an effect, but each has a gradient, of 0
            q = q + sum(0 * decay.exp().sum() for decay in (log_decay, log_decay_future) if decay is not None)
        given = q, k, v, log_decay, log_decay_future, left_state, right_state, seq_idx
        if form == "recurrent":
            return _recurrent(*given, causal)
        size = 1 << (q.shape[2] - 1).bit_length()  # in the full form, all tokens are one chunk
        if form == "chunkwise":
            size = min(size, LARGEST["cpu" if q.is_cpu else "cuda"], 1 << chunk_size.bit_length() - 1)
        compute = _chunkwise if torch.compiler.is_compiling() or dropout_p else _InBlocks.apply
        return compute(*given, causal, size, dropout_p)


def segment_states_by_channel(k, v, log_decay, log_decay_future=None, *, mask=None) -> SegmentStates:
    """As `segment_states`; a state that crosses the segment is multiplied by (B or 1, H, D, 1)."""
    wide = torch.promote_types(k.dtype, torch.float32)
    with no_autocast(k):
        k, v = zero_masked(k, mask).to(wide), v.to(wide)
        past, future = _of_tokens(log_decay, log_decay_future, k.shape[2], None, False)
        past, future = past.double(), future.double().cumsum(2)
        total, before = past.sum(2, keepdim=True), past.cumsum(2) - past
        states = [(k * clamped_exp(weight).to(wide)).mT @ v for weight in (total - before, future)]
        across = [clamped_exp(sums[:, :, -1, :, None]).to(wide) for sums in (total, future)]
        return SegmentStates(*states, *across)


def _of_tokens(
    log_decay, log_decay_future, length: int, seq_idx: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor | None]:
    """The log decays of each token, (B or 1, H, L, D), of past and of future keys (None: there are none). Across a
    boundary of packed sequences, λ is e^LOG_ZERO_OF_FACTOR."""
    future = None if causal else log_decay if log_decay_future is None else log_decay_future
    decays = [log_decay, future]
    for number, x in enumerate(decays):
        if x is not None:
            x = (x if x.ndim == 4 else x[None, :, None].expand(1, -1, length, -1)).clamp(min=LOG_ZERO_OF_FACTOR)
            if seq_idx is not None:  # decays of past keys end with the token before a boundary, others begin after it
                starts = sequence_starts(seq_idx)
                starts = F.pad(starts[:, 1:], (0, 1)) if number == 0 else starts
                x = x.masked_fill(starts[:, None, :, None], LOG_ZERO_OF_FACTOR)
            decays[number] = x
    return tuple(decays)


class _Blocks(NamedTuple):
    """Decays within n blocks of C tokens, in one direction: `enter`, from the entry boundary to each query; `leave`,
    from each key to the exit boundary; both (..., n, C, D); `across`, of the whole block, (..., n, 1, D)."""

    enter: Tensor
    leave: Tensor
    across: Tensor

    def joined(self, direction: int) -> "_Blocks":
        """Put pairs of blocks together."""
        first, second = (_Blocks(*x) for x in zip(*map(_halves, self)))
        near, far = (first, second)[::direction]  # near: the half that is entered first
        enter = [near.enter, _product(far.enter, near.across)][::direction]
        leave = [_product(near.leave, far.across), far.leave][::direction]
        return _Blocks(torch.cat(enter, -2), torch.cat(leave, -2), _product(near.across, far.across))


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second of each pair of blocks, (..., n, C, ·)."""
    return x.unflatten(-3, (-1, 2)).unbind(-3)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x·y, at least e^LOG_ZERO_OF_FACTOR."""
    return (x * y).clamp(min=SMALLEST)


def _matrix(q: Tensor, k: Tensor, decays: list[Tensor]) -> tuple[Tensor, list[_Blocks]]:
    """Σ_d q_id k_jd M_ijd, (..., N, C, C), of q, k and λ of each direction, (..., N, C, D) with C a power of two; and
    how the chunks decay in each direction."""
    C = q.shape[-2]
    q, k, *decays = (x.flatten(-3, -2).unsqueeze(-2) for x in (q, k, *decays))  # (..., blocks, 1, D)
    matrix = (q * k).sum(-1, keepdim=True)
    blocks = [_Blocks(torch.ones_like(x), x, x) for x in decays]
    while (size := q.shape[-2]) < C:
        corners = [matrix.new_zeros(())] * 2
        for half, of_direction in zip((1, 0), blocks):  # the second halves read past keys
            queries, keys = _halves(q * of_direction.enter)[half], _halves(k * of_direction.leave)[1 - half]
            if size < 4:  # faster than many tiny products of matrices
                corners[half] = (queries.unsqueeze(-2) * keys.unsqueeze(-3)).sum(-1)
            else:
                corners[half] = queries @ keys.mT
        first, second = _halves(matrix)
        upper, lower = (x.expand_as(first) for x in corners)
        matrix = torch.cat([torch.cat([first, upper], -1), torch.cat([lower, second], -1)], -2)
        q, k = (x.unflatten(-3, (-1, 2)).flatten(-3, -2) for x in (q, k))
        blocks = [x.joined(direction) for direction, x in zip((1, -1), blocks)]
    return matrix, blocks


def _chunkwise(
    q, k, v, log_decay, log_decay_future, left_state, right_state, seq_idx, causal: bool, C: int, dropout_p: float
) -> Tensor:
    """The matrix inside chunks of C tokens, and states from both sides of each. The full form is that of one chunk."""
    L = q.shape[2]
    N = -(-L // C)
    decays = [x for x in _of_tokens(log_decay, log_decay_future, L, seq_idx, causal) if x is not None]
    q, k, v, *decays = (F.pad(x, (0, 0, 0, N * C - L)).unflatten(2, (N, C)) for x in (q, k, v, *decays))
    matrix, directions = _matrix(q, k, [x.to(q.dtype).exp() for x in decays])  # from (B, H, N, C, D)
    y = cpu.dropout(matrix, dropout_p) @ v
    for of_chunks, state, order in zip(directions, (left_state, right_state), (1, -1)):
        if N > 1 or state is not None:
            own = (k * of_chunks.leave).mT @ v
            y = y + (q * of_chunks.enter) @ _incoming(own, of_chunks.across.mT, state, order)
    return y.flatten(2, 3)[:, :, :L]


def _incoming(own: Tensor, across: Tensor, state: Tensor | None, order: int) -> Tensor:
    """The states that enter each chunk, (B, H, N, D, E), from those of its own keys and values, its decay,
    (B or 1, H, N, D, 1), and the state from outside."""
    state = torch.zeros_like(own[:, :, 0]) if state is None else state.to(own.dtype)
    states = [state]
    for added, decay in list(zip(own.unbind(2), across.unbind(2)))[::order][:-1]:
        state = torch.addcmul(added, state, decay)
        states.append(state)
    return torch.stack(states[::order], 2)


class _InBlocks(torch.autograd.Function):
    """`_chunkwise` on a few sequences at a time, to fit a CPU's cache. The backward pass recomputes it: its activations
    take many times the memory of q, k and v."""

    @staticmethod
    def forward(ctx, *given) -> Tensor:
        tensors, ctx.options = given[:8], given[8:]
        ctx.save_for_backward(*tensors)
        return torch.cat([_chunkwise(*part, *ctx.options) for part in _parts(tensors, ctx.options[1])])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = [number for number, needs in enumerate(ctx.needs_input_grad) if needs]
        tensors = ctx.saved_tensors
        parts, found = _parts(tensors, ctx.options[1]), []
        for part, of_part in zip(parts, grad.split([len(part[0]) for part in parts])):
            part = [x if x is None else x.detach() for x in part]
            wanted = [part[number].requires_grad_() for number in needed]
            with torch.enable_grad(), no_autocast(grad):
                y = _chunkwise(*part, *ctx.options)
                found.append(torch.autograd.grad(y, wanted, of_part, materialize_grads=True))
        grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for number, of_parts in zip(needed, zip(*found)):
            grads[number] = sum(of_parts) if tensors[number].ndim == 2 else torch.cat(of_parts)
        return tuple(grads)


def _parts(tensors: tuple[Tensor | None, ...], chunk_size: int) -> list[list[Tensor | None]]:
    """Split tensors of a batch, but not decays that all sequences share, (H, D), into those of a few sequences."""
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
        factors = decay.to(q.dtype).exp()[..., None]
        state = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state.to(q.dtype)
        for t in order:
            y[t] = y[t] + (q[:, :, t, None] @ state).squeeze(-2)
            state = factors[:, :, t] * torch.addcmul(state, k[:, :, t, :, None], v[:, :, t, None])
    return torch.stack(y, 2)


def _in_kernel(
    q, k, v, log_decay, log_decay_future, left_state, right_state, seq_idx, scale: float, causal: bool
) -> Tensor:
    """The recurrence as the CPU's kernel computes it, which clamps decays."""
    if seq_idx is not None:
        log_decay, log_decay_future = _of_tokens(log_decay, log_decay_future, q.shape[2], seq_idx, causal)
    rest = (x if x is None else x.float() for x in (log_decay, log_decay_future, left_state, right_state))
    return _InKernel.apply(q, k, v, *rest, scale, causal)


class _InKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *given) -> Tensor:
        tensors, ctx.options = given[:7], given[7:]
        ctx.save_for_backward(*tensors)
        y = cpu_kernel.empty_rows(tensors[2])
        for number, direction in enumerate(_directions(*tensors, *ctx.options)):
            direction.forward(y, add=number > 0)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad
        *inputs, log_decay, _, _, _ = tensors
        grads: list[Tensor | None] = [*map(cpu_kernel.empty_rows, inputs), None, None, None, None]
        B, _, L, _ = inputs[0].shape
        for number, direction in enumerate(_directions(*tensors, *ctx.options)):
            place = 3 if tensors[4] is None else 3 + number  # of the decays, which both directions may share
            if (add := grads[place] is not None) or not needed[place]:
                pass
            elif tensors[place].ndim == 2:
                grads[place] = grad.new_empty(B, *log_decay.shape[:1], 1, *log_decay.shape[1:])
            else:
                grads[place] = grad.new_empty(tensors[place].shape)
            of_decay = None if grads[place] is None else grads[place].expand(-1, -1, L, -1)
            if needed[5 + number]:
                grads[5 + number] = grad.new_empty(tensors[5 + number].shape)
            direction.backward(grad, *grads[:3], of_decay, grads[5 + number], number > 0, add)
        for place in (3, 4):
            if grads[place] is not None and tensors[place].ndim == 2:
                grads[place] = grads[place].sum((0, 2))
        grads[:3] = (grad.to(x.dtype) for grad, x in zip(grads, inputs))
        return *grads, None, None


def _directions(
    q, k, v, log_decay, log_decay_future, left_state, right_state, scale: float, causal: bool
) -> Iterator[cpu_kernel.ChannelCalls]:
    """The recurrence of past keys, with the diagonal, and that of future ones."""
    decays = log_decay, log_decay if log_decay_future is None else log_decay_future
    for direction, decay, state in list(zip((1, -1), decays, (left_state, right_state)))[: 1 if causal else 2]:
        per_token = decay if decay.ndim == 4 else decay[None, :, None].expand(1, -1, q.shape[2], -1)
        yield cpu_kernel.ChannelCalls(q, k, v, per_token, state, direction, direction > 0, scale, LOG_ZERO_OF_FACTOR)
