"""A matrix of two triangles times V, in three forms in PyTorch; two_sided_attention.py defines it:

    y_i = Σ_{j<i} (q→_i·k→_j) W→_ij v_j  +  δ_i v_i  +  Σ_{j>i} (q←_i·k←_j) W←_ij v_j        W_ij = exp(query_i − key_j)

All forms read W off one number per query and one per key: cumulative log decays, for future keys with the opposite
sign. What the functions below take:

    triangles              "shared": both, with the same q and k; "separate": both, with their own; "past"; "future"
    q, k                   (B, G, L, D), or (B, G, L, 2D) if separate, side by side; G is H, or 1 if heads share them
    v                      (B, H, L, E)
    query_sums, key_sums   (B or 1, H or 1, L, T) in float64; key_sums None: equal to query_sums, as in LION;
                           `full` by the kernel, "shared" with H heads of q, also takes the log decays in float32
    diagonal               δ, (B, H, L), or None for δ_i = q_i·k_i

Shape letters: B batch, H heads, L length, D head size of q and k, E head size of v, T triangles, N chunks, C chunk
size.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from . import cpu_kernel
from . import linear_attention_native as native
from .custom_operators import no_autocast, once_differentiable, operator

# Lower bound of log weights: e^-60 is below every dtype's precision, and its products with ordinary numbers are not yet
# denormal, which a CPU multiplies many times slower.
LOG_ZERO = -60.0
EPSILON = 1e-6  # what is added to a row's sum before the row is divided by it
TILES, LOG_ZERO_OF_FACTOR = 4, -43.0  # see `_tile_factors`; the product of two factors is not yet denormal
BLOCK_ENTRIES = {"cpu": 2**18, "cuda": 2**26}  # matrix entries to process at a time: to fit a CPU's cache or fill a GPU
# In which direction a state passes the keys of each triangle.
DIRECTIONS = {"shared": (1, -1), "separate": (1, -1), "past": (1,), "future": (-1,)}


def cumulative_log_decay(log_decay: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return (exclusive, inclusive), each (B or 1, H, L): the sums of log_decay, (H,) or (B, H, L), before each token
    and up to it. They are float64, to keep differences accurate far into a text."""
    per_token = log_decay if log_decay.ndim == 3 else log_decay[None, :, None].expand(1, -1, length)
    per_token = per_token.double().clamp(min=LOG_ZERO)
    inclusive = per_token.cumsum(-1)
    return inclusive - per_token, inclusive


def sequence_starts(seq_idx: Tensor) -> Tensor:
    """Mark where packed sequences start, except the first of a row, (B, L) bool."""
    return F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))


def clamped_exp(log_weight: Tensor) -> Tensor:
    return log_weight.clamp(min=LOG_ZERO).exp()


def read_state(q: Tensor, log_weight: Tensor | None, state: Tensor) -> Tensor:
    """Multiply queries, (B, G, L, D), by a state from outside their segment, decayed by log_weight, (B or 1, H, L)."""
    q = q.to(torch.promote_types(q.dtype, torch.float32))
    if log_weight is not None:
        q = q * clamped_exp(log_weight).to(q.dtype)[..., None]
    return q @ state.to(q.dtype)


def write_state(k: Tensor, log_weight: Tensor | None, v: Tensor) -> Tensor:
    """Σ_j k_j v_jᵀ, (B, H, D, E), decayed by log_weight, (B or 1, H, L), in float32 or better."""
    wide = torch.promote_types(k.dtype, torch.float32)
    k, v = k.to(wide), v.to(wide)
    return (k if log_weight is None else k * clamped_exp(log_weight).to(wide)[..., None]).mT @ v


def with_ones(v: Tensor) -> Tensor:
    """v with a column of ones, which receives the row sums, (B, H, L, E + 1)."""
    return torch.cat([v, v.new_ones(*v.shape[:-1], 1)], dim=-1)


def divided(y: Tensor) -> Tensor:
    """Rows of y, (B, H, L, E + 1), divided by their sums, which are its last column."""
    return y[..., :-1] / (y[..., -1:] + EPSILON)


class _Block(NamedTuple):
    """n chunks of b texts whose C×C matrices fit the cache. The last chunk of a text may be shorter than C, and the
    full form has one chunk per text."""

    texts: slice
    chunks: slice
    tokens: slice
    size: int  # C

    def of(self, x: Tensor) -> Tensor:
        """A view of this block of x, (B or 1, H or 1, L, ...): (b or 1, H or 1, n, C, ...)."""
        chunks = self.chunks.stop - self.chunks.start
        return (x if x.shape[0] == 1 else x[self.texts])[:, :, self.tokens].unflatten(2, (chunks, -1))

    def state(self, x: Tensor) -> Tensor:
        """A view of this block of x, (B or 1, H or 1, N, ...): (b or 1, H or 1, n, ...)."""
        return (x if x.shape[0] == 1 else x[self.texts])[:, :, self.chunks]

    def write(self, targets: Iterable[Tensor], values: Iterable[Tensor]) -> None:
        for target, value in zip(targets, values):
            self.of(target).copy_(value)


def _blocks(x: Tensor, chunk_size: int) -> list[_Block]:
    """Cut x, (B, H, L, ·), into blocks."""
    count, heads, length, _ = x.shape
    if torch.compiler.is_compiling():  # the full form; the compiler tiles it, and would unroll a loop over blocks
        return [_Block(slice(None), slice(0, 1), slice(None), length)]  # a bound would be a constant of its program
    matrices = BLOCK_ENTRIES["cpu" if x.is_cpu else "cuda"] // (heads * chunk_size * chunk_size)
    texts = min(max(matrices, 1), count)
    chunks = max(matrices // texts, 1)
    complete = length // chunk_size
    spans = [(first, min(first + chunks, complete), chunk_size) for first in range(0, complete, chunks)]
    if length % chunk_size:
        spans.append((complete, complete + 1, length % chunk_size))
    return [
        _Block(slice(text, text + texts), slice(first, end), slice(first * chunk_size, end * chunk_size), size)
        for text in range(0, count, texts)
        for first, end, size in spans
    ]


def _weights(blocks, query_sums, key_sums, diagonal, triangles, dtype, uniform) -> Iterator[tuple[Tensor, ...]]:
    """Return what `_assemble` makes each block's W from, computed once if uniform. On its diagonal W is 1, or 0 if a
    diagonal is given."""
    compute = torch.promote_types(dtype, torch.float32)
    size, tiles, tiled, first = blocks[0].size, None, None, None
    if key_sums is None and triangles == "shared":
        exclusive, inclusive = query_sums[..., 0], -query_sums[..., 1]
        numbers = split_sums(exclusive, inclusive, compute)
        function = mirrored_weights
    else:
        keys = query_sums if key_sums is None else key_sums
        pairs = zip(query_sums.unbind(-1), keys.unbind(-1))
        numbers = [number for pair in pairs for x in pair for number in _split(x, compute)]
        function = functools.partial(_triangle_weights, triangles, float(diagonal is None))
        if not (uniform or torch.compiler.is_compiling()) and size % TILES == 0 and size >= 16 * TILES:
            tiles = _tile_factors(query_sums, keys, size, DIRECTIONS[triangles], compute)
            complete = query_sums.shape[2] // size * size
            tiled = torch.stack([x[:, :, :complete].unflatten(2, (-1, TILES, size // TILES)) for x in numbers], 3)
    if uniform:
        first = function(*(blocks[0].of(x)[:, :, :1] for x in numbers)).to(dtype)

    def weights(block: _Block) -> tuple[Tensor, ...]:
        if uniform:  # the last chunk may be shorter
            return (first[..., : block.size, : block.size] if block.size < size else first,)
        if tiles is None or block.size < size:
            return (function(*map(block.of, numbers)).to(dtype),)
        return *map(block.state, tiles), function(*block.state(tiled).unbind(3))

    return map(weights, blocks)


def _assemble(parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """W of a block, (b or 1, H or 1, n or 1, C, C), given as such (then perhaps with the block's matrices), or as
    factors, (b, H, n, S, c, T) and (b, H, n, S, T, C), and the S tiles on its diagonal, (b, H, n, S, c, c)."""
    if len(parts) < 3:
        return parts[0]
    rows, columns, on_diagonal = parts
    W = (rows @ columns).unflatten(-1, (TILES, -1))  # (b, H, n, S, c, S, c)
    W.diagonal(dim1=-4, dim2=-2).copy_(on_diagonal.movedim(-3, -1))
    return W.flatten(-2).flatten(-3, -2).to(dtype)


def _tile_factors(query_sums, key_sums, size: int, directions: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Outside the S = TILES tiles on its diagonal, W of a chunk is a product of one number per row and, in each row of
    tiles, one per column, as of a state passed there: no exponential per entry. Returns the two factors of each
    triangle, (B or 1, H or 1, N, S, c, T) and (B or 1, H or 1, N, S, T, C), of the complete chunks."""
    complete = query_sums.shape[2] // size * size
    query, key = (x[:, :, :complete].unflatten(2, (-1, size)).movedim(-1, 3) for x in (query_sums, key_sums))
    query = query.unflatten(-1, (TILES, -1))  # (B or 1, H or 1, N, T, S, c)
    entry = torch.stack([query[:, :, :, i, :, min(d, 0)] for i, d in enumerate(directions)], 3)  # first reader, (.., S)
    rows, columns = (query - entry[..., None]), (entry[..., None] - key.unsqueeze(-2))  # (..., S, c), (..., S, C)
    rows, columns = (x.to(dtype).clamp_(min=LOG_ZERO_OF_FACTOR).exp_() for x in (rows, columns))
    tile = torch.arange(TILES, device=key.device)
    key_tile = tile.repeat_interleave(size // TILES)
    others = [key_tile >= tile[:, None] if direction > 0 else key_tile <= tile[:, None] for direction in directions]
    columns.masked_fill_(torch.stack(others), 0)
    return [rows.movedim(3, -1).contiguous(), columns.movedim(3, -2).contiguous()]


def _split(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two numbers of `dtype` for one in float64: far into a text, neighbours differ little and are far from 0."""
    high = x.to(dtype)
    return high, (x - high).to(dtype)


def _differences(x_high: Tensor, x_low: Tensor, y_high: Tensor, y_low: Tensor) -> Tensor:
    """x_i − y_j, (..., L, L), of numbers in two parts, (..., L)."""
    return (x_high[..., :, None] - y_high[..., None, :]).add_(x_low[..., :, None]).sub_(y_low[..., None, :])


def split_sums(exclusive: Tensor, inclusive: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What `mirrored_weights` takes for sums, (..., L), in float64."""
    return *_split((exclusive + inclusive) / 2, dtype), ((inclusive - exclusive) / 2).to(dtype)


def mirrored_weights(high: Tensor, low: Tensor, half: Tensor) -> Tensor:
    """W, (..., L, L), if each sum serves queries and keys, as in LION. With m the mean of the exclusive and the
    inclusive sum, h half their difference, log W_ij = −|m_i − m_j| + h_j − h_i in both triangles: none can overflow."""
    log_weights = _differences(high, low, high, low).abs_().neg_()
    log_weights.add_(half[..., None, :]).sub_(half[..., :, None])
    return log_weights.clamp_(min=LOG_ZERO).exp_()


def _triangle_weights(triangles: str, on_diagonal: float, *numbers: Tensor) -> Tensor:
    """W, (..., L, L), from the sums of each triangle's queries and keys, in two parts."""
    log_weights = _differences(*numbers[:4])
    L, like = log_weights.shape[-1], {"dtype": log_weights.dtype, "device": log_weights.device}
    outside = torch.full((L, L), -1e30, **like)
    outside = outside.tril(-1) if triangles == "future" else outside.triu(1)
    log_weights.add_(outside)
    if len(numbers) > 4:
        log_weights.clamp_(min=_differences(*numbers[4:]).add_(outside.flip(-1, -2)))
    weights = log_weights.clamp_(min=LOG_ZERO).exp_()
    if len(numbers) == 4:  # exact zeros beside the only triangle
        weights = weights.tril_() if triangles == "past" else weights.triu_()
    weights.diagonal(dim1=-2, dim2=-1).fill_(on_diagonal)
    return weights


def _scores(q: Tensor, k: Tensor, triangles: str) -> Tensor:
    """q_i·k_j, (..., L, L)."""
    if triangles != "separate":
        return q @ k.mT
    past, future = (x @ y.mT for x, y in zip(q.chunk(2, -1), k.chunk(2, -1)))
    return past.tril_().add_(future.triu_(1))


def _score_gradients(grad: Tensor, q: Tensor, k: Tensor, triangles: str) -> tuple[Tensor, ...]:
    """∂q and ∂k from ∂scores, (b, G, ..., L, L)."""
    if triangles != "separate":
        return grad @ k, grad.mT @ q
    sides = zip((grad.tril(-1), grad.triu(1)), q.chunk(2, -1), k.chunk(2, -1))
    return tuple(torch.cat(x, -1) for x in zip(*((side @ key, side.mT @ query) for side, query, key in sides)))


def _sum_gradients(grad_log_weights: Tensor, triangles: str, one_sum: bool) -> list[Tensor]:
    """Turn ∂/∂ log W, (..., L, L), possibly overwritten, into the gradients of T queries' sums and T keys' sums, or, if
    they are one, of these T; each (..., L) in float64. An entry adds to its row what it subtracts from its column:
    sums rounded differently would leave a remainder."""
    matrices = grad_log_weights.flatten(0, -3)
    size, sums = matrices.shape[0], []
    if not torch.compiler.is_compiling():
        size = max(1, BLOCK_ENTRIES["cpu" if matrices.is_cpu else "cuda"] // matrices[0].numel())
    for few in matrices.split(size):
        few = few.double()
        if not one_sum:  # otherwise the diagonal cancels
            few.diagonal(dim1=-2, dim2=-1).zero_()
        rows, columns = [few.sum(-1)], [few.sum(-2)]
        if len(DIRECTIONS[triangles]) == 2:
            few.tril_()
            rows, columns = ([past := few.sum(dim), both - past] for dim, (both,) in ((-1, rows), (-2, columns)))
        sums.append([x - y for x, y in zip(rows, columns)] if one_sum else [*rows, *(-x for x in columns)])
    return [torch.cat(x).view(grad_log_weights.shape[:-1]) for x in zip(*sums)]


# The recurrent form


def _recurrent_forward(q, k, v, query_sum, key_sum, direction: int) -> Tensor:
    """One triangle, token by token. With S_i the keys and values seen before token i, decayed up to its query,
    S_i = exp(query_i − query_{i−1}) S_{i−1} + exp(query_i − key_{i−1}) k_{i−1} v_{i−1}ᵀ and y_i = q_iᵀ S_i."""
    if direction < 0:
        q, k, v = (x.flip(-2) for x in (q, k, v))
        query_sum, key_sum = query_sum.flip(-1), key_sum.flip(-1)
    decays = clamped_exp(query_sum.diff()).to(q.dtype)[..., None, None]
    k = k[:, :, :-1] * clamped_exp(query_sum[..., 1:] - key_sum[..., :-1]).to(q.dtype)[..., None]
    state, y = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), v.new_zeros(v.shape)
    for t in range(1, q.shape[-2]):
        state.mul_(decays[:, :, t - 1]).addcmul_(k[:, :, t - 1, :, None], v[:, :, t - 1, None, :])
        y[:, :, t] = (q[:, :, t, None, :] @ state).squeeze(-2)
    return y if direction > 0 else y.flip(-2)


def _recurrent_backward(grad, q, k, v, query_sum, key_sum, direction: int, with_sums: bool) -> list[Tensor]:
    # Each gradient is such a product too; for k and v, the transposed triangle swaps queries and keys.
    grad_q = _recurrent_forward(grad, v, k, query_sum, key_sum, direction)
    grad_k = _recurrent_forward(v, grad, q, -key_sum, -query_sum, -direction)
    grad_v = _recurrent_forward(k, q, grad, -key_sum, -query_sum, -direction)
    if not with_sums:
        return [grad_q, grad_k, grad_v]
    grad_query, grad_key = (q * grad_q).sum(-1).double(), -(k * grad_k).sum(-1).double()
    return [grad_q, grad_k, grad_v, grad_query.sum_to_size(query_sum.shape), grad_key.sum_to_size(key_sum.shape)]


# The full and the chunkwise form


class _Full(torch.autograd.Function):
    """One chunk per text. In PyTorch, what W is made from is kept for the backward pass: reading is faster than
    computing it."""

    @staticmethod
    def forward(
        ctx, q, k, v, query_sums, key_sums, diagonal, kept, order, factor: float, scale: float, triangles: str,
        epsilon: float,
    ) -> Tensor:  # fmt: skip
        ctx.native = triangles != "separate" and cpu_kernel.covers(v)
        if ctx.native:
            tensors = q, k, v, query_sums, key_sums, diagonal, kept, order
            ctx.options = factor, scale, DIRECTIONS[triangles], epsilon, LOG_ZERO
            y, *row_sums = native.full_forward(*tensors, *ctx.options, with_rows=True)
            ctx.save_for_backward(*tensors, *([y, *row_sums] if row_sums else []))
            return y
        assert order is None and not epsilon
        tensors = q, k, v, query_sums, key_sums, diagonal
        ctx.options = scale, v.shape[2], query_sums.shape[0] == 1, triangles, factor
        weights: list[tuple[Tensor, ...]] = []
        y = _multiply(_Chunks(*tensors, *ctx.options, kept), weights if any(ctx.needs_input_grad) else None)
        ctx.blocks = len(weights)
        ctx.save_for_backward(*tensors, kept, *(x for parts in weights for x in parts))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if ctx.native:
            how = {"with_sums": any(ctx.needs_input_grad[3:6]), "rows": saved[8:]}
            return *native.full_backward(grad, *saved[:8], *ctx.options, **how), *[None] * 6
        tensors, kept, parts = saved[:6], saved[6], saved[7:]
        count = len(parts) // ctx.blocks
        weights = [parts[i : i + count] for i in range(0, len(parts), count)]
        with no_autocast(grad):
            chunks = _Chunks(*tensors, *ctx.options, kept, weights)
            grads = _gradients(chunks, grad, any(ctx.needs_input_grad[3:6]))
        return *grads, *[None] * 6


def full(
    q, k, v, query_sums, key_sums, diagonal, kept, factor: float, scale: float, triangles: str, *,
    order: Tensor | None = None, normalize: bool = False,
) -> Tensor:  # fmt: skip
    """The output, (B, H, L, E). kept: 1 for the entries of the matrix that dropout keeps, 0 for others, (B, H, L, L),
    or None, and the factor by which it multiplies them. By the kernel only: order, (O, L), the token at each place of O
    orders, whose W are averaged, with log decays of O·H heads; normalize: divide each row by its sum."""
    epsilon, tensors = EPSILON if normalize else 0.0, (q, k, v, query_sums, key_sums, diagonal, kept, order)
    # Autograd would add a tenth to a short text's time, so it is left out where nothing records the call.
    unrecorded = not torch.is_grad_enabled() and not torch.jit.is_tracing() and forward_ad._current_level < 0
    if unrecorded and triangles != "separate" and cpu_kernel.covers(v):
        return native.full_forward(*tensors, factor, scale, DIRECTIONS[triangles], epsilon, LOG_ZERO)[0]
    return _Full.apply(*tensors, factor, scale, triangles, epsilon)


def _chunkwise_forward(q, k, v, query_sums, key_sums, diagonal, order, *options) -> Tensor:
    """The full form inside chunks of C tokens, plus the rest through a D×E state per triangle, stacked to TD×E. The
    backward pass recomputes states and C×C matrices, since storing them would take most of the memory."""
    tensors = q, k, v, query_sums, key_sums, diagonal
    if cpu_kernel.covers(v):
        return native.chunkwise_forward(*tensors, order, *options, DIRECTIONS)
    assert order is None
    return _multiply(_Chunks(*tensors, *options))


def _chunkwise_backward(grad: Tensor, q, k, v, query_sums, key_sums, diagonal, order, *options) -> list[Tensor]:
    *options, with_sums = options
    tensors = q, k, v, query_sums, key_sums, diagonal
    if cpu_kernel.covers(v):
        grads = native.chunkwise_backward(grad, *tensors, order, *options, DIRECTIONS, with_sums)
    else:
        grads = _gradients(_Chunks(*tensors, *options), grad, with_sums)
    return [x for x in grads if x is not None]


# Both passes access long tensors in place, one block at a time: the system would have to zero the memory of a copy.


def _multiply(chunks: "_Chunks", keep: list[tuple[Tensor, ...]] | None = None) -> Tensor:
    """The output; appends to `keep` what the backward pass needs of each block."""
    y = torch.empty_like(chunks.v)
    for block, parts in zip(chunks.blocks, chunks.weights):
        Q, W = chunks.scale * block.of(chunks.q), _assemble(parts, y.dtype)
        matrix = chunks.matrix(block, Q, block.of(chunks.k), W, overwrite=keep is None or len(parts) > 1)
        if keep is not None:  # if all texts have the same W, there is room for the matrix
            keep.append((W, matrix) if chunks.uniform else parts)
        Y = chunks.drop(block, matrix) @ block.of(chunks.v)
        if chunks.states is not None:
            Y += chunks.weigh(Q, block.of(chunks.query_weights)) @ block.state(chunks.states)
        block.of(y).copy_(Y)
    return y


def _gradients(chunks: "_Chunks", grad: Tensor, with_sums: bool) -> list[Tensor | None]:
    """The gradients of q, k, v and, with_sums, of both sums and the diagonal; None of what is None."""
    q, k, v, (query_sums, key_sums), diagonal = chunks.q, chunks.k, chunks.v, chunks.sums, chunks.diagonal
    scale, triangles = chunks.scale, chunks.triangles
    query_weights, key_weights = chunks.query_weights, chunks.key_weights
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    T, one_sum = query_sums.shape[-1], key_sums is None
    grad_sums = [v.new_empty(v.shape[:3], dtype=torch.float64) for _ in range(T if one_sum else 2 * T)]
    grad_diagonal = None if diagonal is None else diagonal.new_empty(diagonal.shape)
    with_states = chunks.states is not None
    if with_states:
        grad_weights = [v.new_empty(*v.shape[:3], T) for _ in range(2)]
        # What a chunk's queries read from a state flows back to all keys in it: the same scans in the other direction.
        grad_states = chunks.incoming_states(q, grad, scale * query_weights, sign=-1)
    for block, parts in zip(chunks.blocks, chunks.weights):
        Q, K, V, dY, W = scale * block.of(q), block.of(k), block.of(v), block.of(grad), _assemble(parts, v.dtype)
        matrix = parts[1] if len(parts) == 2 else chunks.matrix(block, Q, K, W)
        grad_matrix = chunks.drop(block, dY @ V.mT)
        dV = chunks.drop(block, matrix).mT @ dY
        if diagonal is not None:
            block.of(grad_diagonal).copy_(grad_matrix.diagonal(dim1=-2, dim2=-1))
        if with_sums:
            products = torch.mul(matrix, grad_matrix, out=None if len(parts) == 2 else matrix)
            block.write(grad_sums, _sum_gradients(products, triangles, one_sum))
        grad_scores = grad_matrix.mul_(W)
        if chunks.shared is None:
            dQ, dK = _score_gradients(grad_scores, Q, K, triangles)
        else:
            torch.sum(grad_scores, 1, keepdim=True, out=chunks.shared_scores(block))
            dQ, dK = torch.zeros_like(Q), torch.zeros_like(K)
        through_states = ()
        if with_states:
            S, dS = block.state(chunks.states), block.state(grad_states)
            dV += chunks.weigh(K, block.of(key_weights)) @ dS
            through_states = (Q, dQ, query_weights, dY @ S.mT), (K, dK, key_weights, V @ dS.mT)
        for number, (x, dX, weights, by_triangle) in enumerate(through_states):
            if with_sums:
                products = (chunks.by_triangle(x) * by_triangle.unflatten(-1, (T, -1))).sum(-1)
                block.of(grad_weights[number]).copy_(products)
            chunks.add_weighed(dX, by_triangle, block.of(weights))
        block.write(grads, (dQ.mul_(scale), dK, dV))
    for block in chunks.shared_blocks:
        dQ, dK = _score_gradients(chunks.shared_scores(block), scale * block.of(q), block.of(k), triangles)
        block.of(grads[0]).add_(dQ, alpha=scale)
        block.of(grads[1]).add_(dK)
    if not with_sums:
        return [*grads, None, None, None]
    if with_states:  # from the weights to their logarithms, and on to the sums
        of_query, of_key = ((g * w).double() for g, w in zip(grad_weights, (query_weights, key_weights)))
        products = (chunks.states * grad_states).unflatten(-2, (T, -1)).sum((-2, -1))  # (B, H, N, T)
        of_across = (products * chunks.across).double()
        of_incoming, of_outgoing = -chunks.sum(of_query) - of_across, chunks.sum(of_key) + of_across
        for number in range(T):
            grad_sums[number] += of_query[..., number]
            grad_sums[number - T] -= of_key[..., number]
            chunks.add_boundary_gradients(grad_sums[number], number, of_incoming[..., number], of_outgoing[..., number])
    of_sums = [torch.stack(grad_sums[:T], -1).sum_to_size(query_sums.shape), None]
    if not one_sum:
        of_sums[1] = torch.stack(grad_sums[T:], -1).sum_to_size(key_sums.shape)
    return [*grads, *of_sums, grad_diagonal]


class _Chunks:
    """What both passes read. At the boundary of two chunks, a state is decayed up to the query that reads it first.

    Attributes:
        blocks, weights: of all chunks, and what each block's W is made from.
        shared: the scores that all heads share, (B, 1, L, C), computed in larger blocks, `shared_blocks`; or None.
        query_weights, key_weights: from an incoming state to a query, and from a key to an outgoing state, both
            (B or 1, H or 1, L, T).
        across: decay of a state that crosses a chunk, (B or 1, H or 1, N, T).
        states: those that enter each chunk, (B, H, N, TD, E). These four are None, or absent, if there is only one.
    """

    def __init__(
        self, q, k, v, query_sums, key_sums, diagonal, scale, chunk_size: int, uniform: bool, triangles: str,
        factor: float = 1.0, kept: Tensor | None = None, weights: Iterable[tuple[Tensor, ...]] | None = None,
    ):  # fmt: skip
        self.q, self.k, self.v, self.sums, self.diagonal = q, k, v, (query_sums, key_sums), diagonal
        length = v.shape[2]
        chunk_size = min(chunk_size, length)
        self.scale, self.chunk_size, self.uniform, self.triangles = scale, chunk_size, uniform, triangles
        self.factor, self.kept = factor, kept
        self.directions = DIRECTIONS[triangles]
        self.blocks, self.shared, self.shared_blocks = _blocks(v, chunk_size), None, []
        if q.shape[1] < v.shape[1]:
            self.shared, self.shared_blocks = q.new_empty(*q.shape[:3], chunk_size), _blocks(q, chunk_size)
            for block in self.shared_blocks:
                self.shared_scores(block).copy_(_scores(scale * block.of(q), block.of(k), triangles))
        self.query_weights = self.key_weights = self.states = None
        if length <= chunk_size:
            if weights is None:
                weights = _weights(self.blocks, query_sums, key_sums, diagonal, triangles, v.dtype, uniform)
            self.weights = weights
            return
        self.first = torch.arange(0, length, chunk_size, device=v.device)
        self.last = (self.first + chunk_size - 1).clamp(max=length - 1)
        keys = query_sums if key_sums is None else key_sums
        incoming, outgoing = [], []
        for number, direction in enumerate(self.directions):
            query, key = query_sums[..., number], keys[..., number]
            entry = query[..., self.first if direction > 0 else self.last]
            # Nothing reads what leaves the text; its weights only have to be finite.
            end = torch.minimum(query, key)[..., -1:] if direction > 0 else torch.minimum(query, key)[..., :1]
            incoming.append(entry)
            outgoing.append(torch.cat([entry[..., 1:], end] if direction > 0 else [end, entry[..., :-1]], -1))
        incoming, outgoing = torch.stack(incoming, -1), torch.stack(outgoing, -1)  # (B or 1, H or 1, N, T)
        self.across = clamped_exp(outgoing - incoming).to(v.dtype)
        entry, exit = (x.repeat_interleave(chunk_size, 2)[:, :, :length] for x in (incoming, outgoing))
        self.query_weights = clamped_exp(query_sums - entry).to(v.dtype)
        self.key_weights = clamped_exp(exit - keys).to(v.dtype)
        if key_sums is None and triangles == "shared":  # both sums of a token must stay close
            entry = torch.stack([direction * entry[..., 0] for direction in self.directions], -1)
        own = [None if x is None else x - entry for x in (query_sums, key_sums)]  # restart in each chunk
        self.weights = _weights(self.blocks, *own, diagonal, triangles, v.dtype, uniform)
        self.states = self.incoming_states(k, v, self.key_weights)

    def shared_scores(self, block: _Block) -> Tensor:
        """A view of a block of the scores that all heads share, (b, 1, n, C, C)."""
        scores = block.of(self.shared)
        return scores[..., : scores.shape[-2]]  # the last chunk may be shorter

    def matrix(self, block: _Block, q: Tensor, k: Tensor, weights: Tensor, overwrite: bool = False) -> Tensor:
        """The C×C matrices of a block, (b, H, n, C, C), possibly in the memory of the weights."""
        if self.shared is None:
            matrix = _scores(q, k, self.triangles).mul_(weights)
        else:
            scores = self.shared_scores(block)
            overwrite = overwrite and not self.uniform and weights.shape[0] == scores.shape[0]
            matrix = torch.mul(scores, weights, out=weights if overwrite else None)
        if self.diagonal is not None:
            matrix.diagonal(dim1=-2, dim2=-1).copy_(block.of(self.diagonal))
        return matrix

    def drop(self, block: _Block, matrix: Tensor) -> Tensor:
        """Dropout of a block's matrices, (b, H, 1, C, C), or of their gradients."""
        return matrix if self.kept is None else (matrix * block.of(self.kept)).mul_(self.factor)

    def by_triangle(self, x: Tensor) -> Tensor:
        """What each triangle reads of q or k: (..., D) or (..., 2D) to (..., 1 or 2, D)."""
        return x.unflatten(-1, (2, -1)) if self.triangles == "separate" else x.unsqueeze(-2)

    def weigh(self, x: Tensor, weights: Tensor) -> Tensor:
        """q or k of each triangle times its weights, (..., C, T), side by side: (..., C, TD)."""
        return (self.by_triangle(x) * weights.unsqueeze(-1)).flatten(-2)

    def add_weighed(self, grad: Tensor, weighed: Tensor, weights: Tensor) -> None:
        """Add the gradient of `weigh`, (b, H, n, C, TD) times the weights, to that of q or k, (b, G, n, C, ·)."""
        count = len(self.directions)
        targets = grad.chunk(2, -1) if self.triangles == "separate" else [grad] * count
        for target, one, weight in zip(targets, weighed.chunk(count, -1), weights.split(1, -1)):
            if grad.shape[1] == weighed.shape[1]:
                target.addcmul_(one, weight)
            else:
                target += (one * weight).sum(1, keepdim=True)

    def incoming_states(self, k: Tensor, v: Tensor, weights: Tensor, sign: int = 1) -> Tensor:
        """The states that enter each chunk, (B, H, N, TD, E). sign: −1 for gradients, with q and ∂y in place of k and
        v, which pass in the opposite direction."""
        count = len(self.first)
        width = k.shape[-1] * (1 if self.triangles == "separate" else len(self.directions))
        states = v.new_empty(*v.shape[:2], count, width, v.shape[-1])
        for block in self.blocks:  # first each chunk's own
            block.state(states).copy_(self.weigh(block.of(k), block.of(weights)).mT @ block.of(v))
        parts = states.chunk(len(self.directions), -2)
        for part, across, direction in zip(parts, self.across.unbind(-1), self.directions):
            own, decays = part.unbind(2), across[..., None, None].unbind(2)
            state = torch.zeros_like(own[0])
            for n in range(count)[:: sign * direction]:
                following = torch.addcmul(own[n], state, decays[n])
                own[n].copy_(state)
                state = following
        return states

    def sum(self, x: Tensor) -> Tensor:  # (..., L, T) to (..., N, T)
        return F.pad(x, (0, 0, 0, -x.shape[2] % self.chunk_size)).unflatten(2, (-1, self.chunk_size)).sum(3)

    def add_boundary_gradients(self, grad_sum: Tensor, number: int, incoming: Tensor, outgoing: Tensor) -> None:
        """Add the gradients of what chunks take as their boundaries' sums, (B, H, N), to those of a triangle's
        queries, (B, H, L)."""
        forward = self.directions[number] > 0
        neighbours = slice(1, None), slice(None, -1)
        own, other = neighbours if forward else reversed(neighbours)
        incoming[..., own] += outgoing[..., other]
        grad_sum[..., self.first if forward else self.last] += incoming


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor query_sum, Tensor key_sum, int direction"
RECURRENT = operator(_recurrent_forward, _recurrent_backward, _INPUTS, lambda x: x.new_empty(x.shape))
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor query_sums, Tensor? key_sums, Tensor? diagonal"
_INPUTS += ", Tensor? order, float scale, int chunk_size, bool uniform, str triangles"
CHUNKWISE = operator(_chunkwise_forward, _chunkwise_backward, _INPUTS, torch.empty_like)


def chunkwise(
    q, k, v, query_sums, key_sums, diagonal, scale: float, chunk_size: int, uniform: bool, triangles: str,
    order: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The output, (B, H, L, E). uniform: all chunks have the same decays. By the kernel only: order, (O, L), the token
    at each place of O orders, whose W are averaged, with two sums for each."""
    return CHUNKWISE.call(q, k, v, query_sums, key_sums, diagonal, order, scale, chunk_size, uniform, triangles)


def recurrent(q, k, v, query_sums, key_sums, diagonal, triangles: str) -> Tensor:
    """The output, (B, H, L, E)."""
    key_sums = query_sums if key_sums is None else key_sums
    y = (q * k).sum(-1, keepdim=True) * v if diagonal is None else diagonal[..., None] * v
    sides = (x.chunk(2, -1) if triangles == "separate" else [x] * 2 for x in (q, k))
    for number, (side, direction) in enumerate(zip(zip(*sides), DIRECTIONS[triangles])):
        side = (x.expand(-1, v.shape[1], -1, -1) for x in side)
        y = y + RECURRENT.call(*side, v, query_sums[..., number], key_sums[..., number], direction)
    return y
