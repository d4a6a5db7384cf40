"""The full, the recurrent and the chunkwise form of linear attention in PyTorch; linear_attention.py defines it.

All forms read log M off two cumulative sums of the log decays, which `cumulative_log_decay` returns as a pair:

    exclusive_t = log λ_1 + … + log λ_{t-1}         log M_ij = exclusive_i − exclusive_j    j < i
    inclusive_t = log λ_1 + … + log λ_t             log M_ij = inclusive_j − inclusive_i    j > i

Shape letters: B batch, H heads, L length, D head size of q and k, E head size of v, N chunks, C chunk size.
"""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# Lower bound of log weights: e^-60 is below every dtype's precision, and its products with ordinary numbers are not yet
# denormal, which a CPU multiplies many times slower.
LOG_ZERO = -60.0
BLOCK_ENTRIES = {"cpu": 2**18, "cuda": 2**26}  # matrix entries to process at a time: to fit a CPU's cache or fill a GPU


def cumulative_log_decay(log_decay: Tensor | None, seq_idx: Tensor | None, length: int) -> tuple[Tensor, Tensor] | None:
    """Return (exclusive, inclusive), each (B or 1, H or 1, L), or None if nothing decays. They are float64, to keep
    differences accurate far into a text. Each boundary between packed sequences adds LOG_ZERO to both from there on."""
    if log_decay is None and seq_idx is None:
        return None
    if log_decay is None:
        log_decay = torch.zeros(1, device=seq_idx.device)
    per_token = log_decay if log_decay.ndim == 3 else log_decay[None, :, None].expand(1, -1, length)
    per_token = per_token.double().clamp(min=LOG_ZERO)
    inclusive = per_token.cumsum(-1)
    exclusive = inclusive - per_token
    if seq_idx is not None:
        boundaries = sequence_starts(seq_idx).cumsum(-1)[:, None]  # (B, 1, L)
        exclusive, inclusive = exclusive + LOG_ZERO * boundaries, inclusive + LOG_ZERO * boundaries
    return exclusive, inclusive


def sequence_starts(seq_idx: Tensor) -> Tensor:
    """Mark where packed sequences start, except the first of a row, (B, L) bool."""
    return F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))


def clamped_exp(log_weight: Tensor) -> Tensor:
    return log_weight.clamp(min=LOG_ZERO).exp()


def read_state(q: Tensor, log_weight: Tensor | None, state: Tensor) -> Tensor:
    """Multiply queries, (B, H, L, D), by a state from outside their segment, decayed by log_weight, (B or 1, H, L)."""
    q = q.to(torch.promote_types(q.dtype, torch.float32))
    if log_weight is not None:
        q = q * clamped_exp(log_weight).to(q.dtype)[..., None]
    return q @ state.to(q.dtype)


class _Block(NamedTuple):
    """n chunks of b texts whose C×C matrices fit the cache. The last chunk of a text may be shorter than C, and the
    full form has one chunk per text."""

    texts: slice
    chunks: slice
    tokens: slice

    def of(self, x: Tensor) -> Tensor:
        """A view of this block of x, (B or 1, H or 1, L, ...): (b or 1, H or 1, n, C, ...)."""
        chunks = self.chunks.stop - self.chunks.start
        return (x if len(x) == 1 else x[self.texts])[:, :, self.tokens].unflatten(2, (chunks, -1))

    def state(self, x: Tensor) -> Tensor:
        """A view of this block of x, (B, H, N, ...): (b, H, n, ...)."""
        return x[self.texts, :, self.chunks]

    def write(self, targets: Iterable[Tensor], values: Iterable[Tensor]) -> None:
        for target, value in zip(targets, values):
            self.of(target).copy_(value)


def _blocks(x: Tensor, chunk_size: int) -> list[_Block]:
    """Cut x, (B, H, L, ·), into blocks."""
    count, heads, length, _ = x.shape
    if torch.compiler.is_compiling():  # the full form; the compiler tiles it, and would unroll a loop over blocks
        return [_Block(slice(0, count), slice(0, 1), slice(0, length))]
    matrices = BLOCK_ENTRIES["cpu" if x.is_cpu else "cuda"] // (heads * chunk_size * chunk_size)
    texts = min(max(matrices, 1), count)
    chunks = max(matrices // texts, 1)
    complete = length // chunk_size
    spans = [(first, min(first + chunks, complete)) for first in range(0, complete, chunks)]
    if length % chunk_size:
        spans.append((complete, complete + 1))
    return [
        _Block(slice(text, text + texts), slice(*span), slice(span[0] * chunk_size, min(span[1] * chunk_size, length)))
        for text in range(0, count, texts)
        for span in spans
    ]


def _masks(blocks, exclusive, inclusive, dtype: torch.dtype, uniform: bool) -> Callable[[_Block], Tensor]:
    """Return a function from a block to its decay masks, (b or 1, H or 1, n or 1, C, C), computed once if uniform."""
    if not uniform:
        return lambda block: _decay_mask(block.of(exclusive), block.of(inclusive), dtype)
    mask = _decay_mask(*(blocks[0].of(x)[:, :, :1] for x in (exclusive, inclusive)), dtype)

    def cut(block: _Block) -> Tensor:  # to the last chunk's length
        length = block.of(exclusive).shape[-1]
        return mask[..., :length, :length]

    return cut


def _decay_mask(exclusive: Tensor, inclusive: Tensor, dtype: torch.dtype) -> Tensor:
    """M, (..., L, L), from the cumulative log decays, (..., L) in float64. With m their mean and h half their
    difference, log M_ij = −|m_i − m_j| + h_j − h_i in both triangles, so none can overflow."""
    middle, half = (exclusive + inclusive) / 2, (inclusive - exclusive) / 2
    compute = torch.promote_types(dtype, torch.float32)
    # Two float32 numbers represent the float64 sum: far into a text, neighbours differ little and are far from 0.
    high = middle.to(compute)
    low, half = (middle - high).to(compute), half.to(compute)
    log_mask = high[..., :, None] - high[..., None, :]
    log_mask.add_(low[..., :, None]).sub_(low[..., None, :]).abs_().neg_()
    log_mask.add_(half[..., None, :]).sub_(half[..., :, None])
    return log_mask.clamp_(min=LOG_ZERO).exp_().to(dtype)


def _cumulative_gradients(grad_log_mask: Tensor) -> Iterable[Tensor]:
    """Turn ∂/∂ log M, (..., L, L), possibly overwritten, into ∂/∂ exclusive and ∂/∂ inclusive, (..., L) in float64. An
    entry adds to its row what it subtracts from its column: sums rounded differently would leave a remainder."""
    matrices = grad_log_mask.flatten(0, -3)
    size, sums = len(matrices), []
    if not torch.compiler.is_compiling():
        size = max(1, BLOCK_ENTRIES["cpu" if matrices.is_cpu else "cuda"] // matrices[0].numel())
    for few in matrices.split(size):
        few = few.double()
        rows, columns = few.sum(-1), few.sum(-2)
        past_rows, past_columns = few.tril_().sum(-1), few.sum(-2)
        sums.append((past_rows - past_columns, (columns - past_columns) - (rows - past_rows)))  # the diagonal cancels
    return [torch.cat(x).view(grad_log_mask.shape[:-1]) for x in zip(*sums)]


# The full form


def decayed_scores(q: Tensor, k: Tensor, cumulative: tuple[Tensor, Tensor] | None) -> Tensor:
    """QKᵀ⊙M, (B, H, L, L)."""
    return q @ k.mT if cumulative is None else _DecayedScores.apply(q, k, *cumulative)


class _DecayedScores(torch.autograd.Function):
    """QKᵀ⊙M from q, k and the cumulative log decays. The backward pass recomputes M instead of storing it."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, exclusive: Tensor, inclusive: Tensor) -> Tensor:
        scores = q @ k.mT
        blocks = _blocks(q, q.shape[-2])
        decay = _masks(blocks, exclusive, inclusive, scores.dtype, uniform=len(exclusive) == 1)
        for block in blocks:
            block.of(scores).mul_(decay(block))
        ctx.save_for_backward(q, k, exclusive, inclusive, scores)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, exclusive, inclusive, scores = ctx.saved_tensors
        grad_q, grad_k = torch.empty_like(q), torch.empty_like(k)
        grad_cumulative = [q.new_empty(q.shape[:-1], dtype=torch.float64) for _ in range(2)]
        with_decays = any(ctx.needs_input_grad[2:])
        with torch.autocast(q.device.type, enabled=False):
            blocks = _blocks(q, q.shape[-2])
            decay = _masks(blocks, exclusive, inclusive, scores.dtype, uniform=len(exclusive) == 1)
            for block in blocks:
                if with_decays:
                    block.write(grad_cumulative, _cumulative_gradients(block.of(grad) * block.of(scores)))
                grad_scores = block.of(grad) * decay(block)
                block.write((grad_q, grad_k), (grad_scores @ block.of(k), grad_scores.mT @ block.of(q)))
        if not with_decays:
            return grad_q, grad_k, None, None
        return grad_q, grad_k, *(x.sum_to_size(exclusive.shape) for x in grad_cumulative)


# The recurrent form


def recurrent(q: Tensor, k: Tensor, v: Tensor, cumulative: tuple[Tensor, Tensor] | None) -> Tensor:
    """(QKᵀ⊙M) V, (B, H, L, E)."""
    return _recurrent(q, k, v, *(cumulative or [q.new_zeros(1, 1, q.shape[-2], dtype=torch.float64)] * 2))


def _recurrent_forward(q, k, v, exclusive, inclusive) -> Tensor:
    """Scan the tokens in both directions, with one state each; the backward pass scans other operands the same way."""
    past, future = _scans(q, k, v, exclusive, inclusive)
    diagonal = (q * k).sum(-1, keepdim=True) * v  # both scans include it
    return past.add_(future).sub_(diagonal)


def _recurrent_backward(grad, q, k, v, exclusive, inclusive, with_decays) -> list[Tensor]:
    # y = (QKᵀ⊙M) V, so each gradient is such a product too. Mᵀ is M with the two cumulative sums exchanged.
    q_past, q_future = _scans(grad, v, k, exclusive, inclusive)
    k_past, k_future = _scans(v, grad, q, inclusive, exclusive)
    v_past, v_future = _scans(k, q, grad, inclusive, exclusive)
    grad_cumulative = []
    if with_decays:
        grad_exclusive = (q * q_past).sum(-1).double() - (k * k_future).sum(-1)
        grad_inclusive = (k * k_past).sum(-1).double() - (q * q_future).sum(-1)
        grad_cumulative = [grad_exclusive.sum_to_size(exclusive.shape), grad_inclusive.sum_to_size(inclusive.shape)]
    diagonal = (grad * v).sum(-1, keepdim=True)
    grad_q = q_past.add_(q_future).sub_(diagonal * k)
    grad_k = k_past.add_(k_future).sub_(diagonal * q)
    grad_v = v_past.add_(v_future).sub_((q * k).sum(-1, keepdim=True) * grad)
    return [grad_q, grad_k, grad_v, *grad_cumulative]


def _scans(q: Tensor, k: Tensor, v: Tensor, exclusive: Tensor, inclusive: Tensor) -> list[Tensor]:
    """S_i = λ S_{i∓1} + k_i v_iᵀ and q_iᵀ S_i from the left and from the right, (B, H, L, E) each."""
    rightward, leftward = (clamped_exp(x.diff()).to(q.dtype) for x in (exclusive, -inclusive.flip(-1)))
    L = q.shape[-2]
    outputs = []
    for order, weights, offset in ((range(L), rightward, -1), (reversed(range(L)), leftward.flip(-1), 0)):
        state, y = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), v.new_empty(v.shape)
        for t in order:
            if 0 <= t + offset < L - 1:
                state.mul_(weights[..., t + offset, None, None])
            state.addcmul_(k[:, :, t, :, None], v[:, :, t, None, :])
            y[:, :, t] = (q[:, :, t, None, :] @ state).squeeze(-2)
        outputs.append(y)
    return outputs


# The chunkwise form


def _chunkwise_forward(q, k, v, exclusive, inclusive, scale, chunk_size, uniform) -> Tensor:
    """The full form inside chunks of C tokens, plus the rest through a D×E state from each side, stacked to 2D×E. The
    backward pass recomputes states and C×C matrices, since storing them would take most of the memory. Both passes
    access long tensors in place, one block at a time: the system would have to zero the memory of a copy first."""
    blocks, decay, states, (query_weights, _), _ = _chunks(k, v, exclusive, inclusive, chunk_size, uniform)
    y = torch.empty_like(v)
    for block in blocks:
        Q = scale * block.of(q)
        Y = (Q @ block.of(k).mT).mul_(decay(block)) @ block.of(v)
        Y += _weigh_both_ways(Q, block.of(query_weights)) @ block.state(states)
        block.of(y).copy_(Y)
    return y


def _chunkwise_backward(grad, q, k, v, exclusive, inclusive, scale, chunk_size, uniform, with_decays) -> list[Tensor]:
    blocks, decay, states, weights, across = _chunks(k, v, exclusive, inclusive, chunk_size, uniform)
    query_weights, key_weights = weights
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if with_decays:
        grad_cumulative = [q.new_empty(q.shape[:-1], dtype=torch.float64) for _ in range(2)]
        grad_weights = [q.new_empty(*q.shape[:-1], 2) for _ in range(2)]
    # What a chunk's queries read from a state flows back to all keys in it: the same scans in the other direction.
    grad_states = _incoming_states(blocks, q, grad, scale * query_weights, across, (-1, 1))
    for block in blocks:
        Q, K, V, dY, M = scale * block.of(q), block.of(k), block.of(v), block.of(grad), decay(block)
        S, dS = block.state(states), block.state(grad_states)
        scores, grad_scores = (Q @ K.mT).mul_(M), dY @ V.mT
        dV = scores.mT @ dY
        if with_decays:
            block.write(grad_cumulative, _cumulative_gradients(scores.mul_(grad_scores)))
        grad_scores.mul_(M)
        dQ, dK = grad_scores @ K, grad_scores.mT @ Q
        dV += _weigh_both_ways(K, block.of(key_weights)) @ dS
        through_states = (Q, dQ, query_weights, dY @ S.mT), (K, dK, key_weights, V @ dS.mT)
        for number, (x, dX, weight, both_ways) in enumerate(through_states):
            if with_decays:
                products = (x.unsqueeze(-2) * both_ways.unflatten(-1, (2, -1))).sum(-1)
                block.of(grad_weights[number]).copy_(products)
            for one_way, w in zip(both_ways.chunk(2, -1), block.of(weight).split(1, -1)):
                dX.addcmul_(one_way, w)
        block.write(grads, (dQ.mul_(scale), dK, dV))
    if not with_decays:
        return [*grads]
    # From the weights to their logarithms, and on to the cumulative sums: the backward pass of `_chunks`.
    weighted = ((g * w).double().unbind(-1) for g, w in zip(grad_weights, weights))
    (of_exclusive, of_until_end), (of_to_end, of_inclusive) = weighted
    of_across = ((states * grad_states).sum((-2, -1)) * across[..., 0, 0]).double()
    grad_exclusive, grad_inclusive = grad_cumulative
    grad_exclusive += of_exclusive - of_to_end
    grad_inclusive += of_inclusive - of_until_end
    grad_end = _sum_by_chunk(of_until_end + of_to_end, chunk_size) + of_across
    grad_start = _sum_by_chunk(of_exclusive + of_inclusive, chunk_size) + of_across
    grad_end[..., :-1] -= grad_start[..., 1:]
    grad_inclusive[..., _last_tokens(inclusive, chunk_size)] += grad_end
    return [*grads, *(x.sum_to_size(exclusive.shape) for x in grad_cumulative)]


def _last_tokens(x: Tensor, chunk_size: int) -> Tensor:
    length = x.shape[-1]
    return torch.arange(chunk_size - 1, length + chunk_size - 1, chunk_size, device=x.device).clamp(max=length - 1)


def _sum_by_chunk(x: Tensor, chunk_size: int) -> Tensor:  # (..., L) to (..., N)
    return F.pad(x, (0, -x.shape[-1] % chunk_size)).unflatten(-1, (-1, chunk_size)).sum(-1)


def _chunks(k, v, exclusive, inclusive, chunk_size, uniform) -> tuple:
    """Restart the cumulative log decays in each chunk, and return what both passes read.

    Returns:
        blocks, decay: of all chunks, and a function from a block to its decay masks.
        states: those that enter each chunk, (B, H, N, 2D, E).
        weights: decay from an incoming state to a query, and from a key to an outgoing state, each from the left and
            from the right, (B or 1, H or 1, L, 2).
        across: decay of a state that crosses a chunk, (B or 1, H or 1, N, 1, 1).
    """
    end = inclusive[..., _last_tokens(inclusive, chunk_size)]  # (B or 1, H or 1, N)
    start = F.pad(end[..., :-1], (1, 0))
    across = clamped_exp(end - start).to(k.dtype)[..., None, None]
    start, end = (x.repeat_interleave(chunk_size, -1)[..., : inclusive.shape[-1]] for x in (start, end))
    exclusive, inclusive, until_end, to_end = exclusive - start, inclusive - start, end - inclusive, end - exclusive
    pairs = (exclusive, until_end), (to_end, inclusive)  # logarithms, none above 0
    weights = [clamped_exp(torch.stack(pair, -1)).to(k.dtype) for pair in pairs]
    blocks = _blocks(k, chunk_size)
    states = _incoming_states(blocks, k, v, weights[1], across, (1, -1))
    return blocks, _masks(blocks, exclusive, inclusive, k.dtype, uniform), states, weights, across


def _weigh_both_ways(x: Tensor, weights: Tensor) -> Tensor:
    """(..., C, D) times weights from the left and from the right, (..., C, 2), concatenated: (..., C, 2D)."""
    return (x.unsqueeze(-2) * weights.unsqueeze(-1)).flatten(-2)


def _incoming_states(blocks: list[_Block], k, v, weights, across, directions: tuple[int, int]) -> Tensor:
    """The states that enter each chunk from the left and from the right, stacked, (B, H, N, 2D, E)."""
    count, D = blocks[-1].chunks.stop, k.shape[-1]
    states = k.new_empty(*k.shape[:2], count, 2 * D, v.shape[-1])
    for block in blocks:  # first each chunk's own
        block.state(states).copy_(_weigh_both_ways(block.of(k), block.of(weights)).mT @ block.of(v))
    for half, direction in zip(states.split(D, dim=-2), directions):
        state = torch.zeros_like(half[:, :, 0])
        for n in range(count)[::direction]:
            following = torch.addcmul(half[:, :, n], state, across[:, :, n])
            half[:, :, n] = state
            state = following
    return states


# Custom operators hide kernels and the loops over tokens and blocks from torch.compile, which would unroll the loops.


def operator(forward: Callable, backward: Callable, inputs: str, empty: Callable[[Tensor], Tensor]) -> list[Callable]:
    """Register forward(q, k, v, ...) and its gradient as operators, and return both. `inputs` is their schema, tensors
    first. `backward` takes the output's gradient, the inputs, and whether the log decays (all other floating-point
    tensors) need gradients; it returns the gradients of q, k and v and, if so, of the log decays. `empty(x)` returns a
    tensor laid out like the gradient of x, for q, k and v, and, for v, also like the output."""
    name = re.sub(r"\W", "_", forward.__module__)  # a copy of this file in a Hub folder registers its own operators
    schemas = f"({inputs}) -> Tensor", f"(Tensor grad, {inputs}, bool with_decays) -> Tensor[]"
    run, run_backward = operators = [
        torch.library.custom_op(f"{name}::{function.__name__[1:]}", function, mutates_args=(), schema=schema)
        for function, schema in zip((forward, backward), schemas)
    ]

    @run_backward.register_fake
    def _(grad, q, k, v, *others):
        decays = [x for x in others if isinstance(x, Tensor) and x.is_floating_point()] if others[-1] else []
        return [*map(empty, (q, k, v)), *(x.new_empty(x.shape) for x in decays)]

    run.register_fake(lambda q, k, v, *others: empty(v))
    run.register_autograd(lambda ctx, grad: gradients(ctx, run_backward, grad), setup_context=save_inputs)
    return operators


def save_inputs(ctx, inputs: tuple, output: Tensor | None) -> None:
    tensors = [x for x in inputs if x is None or isinstance(x, Tensor)]
    ctx.save_for_backward(*tensors)
    ctx.numbers = inputs[len(tensors) :]


def gradients(ctx, backward: Callable, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of an operator's inputs, from `backward` and what `save_inputs` saved."""
    with torch.autocast(grad.device.type, enabled=False):
        grads = backward(grad, *ctx.saved_tensors, *ctx.numbers, any(ctx.needs_input_grad[3:]))
    return *grads, *[None] * (len(ctx.needs_input_grad) - len(grads))


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor exclusive, Tensor inclusive"
_recurrent, _ = operator(_recurrent_forward, _recurrent_backward, _INPUTS, lambda x: x.new_empty(x.shape))
_INPUTS += ", float scale, SymInt chunk_size, bool uniform"
chunkwise, _ = operator(_chunkwise_forward, _chunkwise_backward, _INPUTS, torch.empty_like)
