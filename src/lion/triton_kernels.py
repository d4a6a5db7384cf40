"""The device code of linear_attention_triton.py: linear attention with a decay mask as GPU kernels, in Triton.

It is flash attention without the softmax: blocks of scores are computed, masked and multiplied by V on chip, and no
matrix is ever stored. Since log M_ij is a difference of two numbers, only blocks on the diagonal need an exponential
per entry. Past keys of another block are decayed through a point between them and the queries' block,

    M_ij = exp(exclusive_i − exclusive_first) · exp(exclusive_first − exclusive_j),    first: the queries' first token,

one factor per query and one per key, neither above 1; future keys likewise through the queries' last token.

Inside a chunk of a text all pairs of blocks are computed. Keys and values of other chunks arrive as states, one from
the left and one from the right, for which one kernel sums each chunk and another scans chunks. The full form is one
chunk as long as the text, without states. Without decays all chunks share one state, their sum.

The backward pass recomputes everything. y = (s·QKᵀ⊙M) V, so the gradients of q, k and v are such products too, from
the same kernel; for k and v, which need Mᵀ, exclusive and inclusive swap roles. No two programs write the same entry.

Shape letters: B batch, H heads, L length, D head size of q and k, E head size of v, N chunks, C chunk size, T and S
block sizes of rows and columns.
"""

# One argument per line would double this file.
# fmt: off

from types import SimpleNamespace

try:
    import triton
    import triton.language as tl
except ImportError:  # the kernels are then never launched, see `linear_attention_triton.covers`
    triton = SimpleNamespace(jit=lambda function=None, **_: function or (lambda function: function))
    tl = SimpleNamespace(constexpr=None)

AVAILABLE = not isinstance(triton, SimpleNamespace)

# For each token the kernels load three numbers: high, low and half. In units of log 2, the cumulative log decays are
# exclusive = high + low − half and inclusive = high + low + half: their mean as two float32 numbers, precise enough for
# differences of neighbours, and half their difference. SIGN = −1 swaps exclusive and inclusive. A fourth number is
# padding, so that a token is one load. "Sums" are these numbers.

# These vary with a batch's length: a kernel would be recompiled where one is 1 or a multiple of 16.
kernel = triton.jit(do_not_specialize=["H", "L", "N", "blocks", "columns", "parts", "decay_batch", "decay_head"])


@triton.jit
def _tile(pointer, start, stride, length, mask, SIZE, T, PADDED, DOT):
    """Load T tokens of a text, (length, SIZE), from `start`: (T, PADDED), 0 outside the text and at masked tokens."""
    token, feature = tl.arange(0, T), tl.arange(0, PADDED)
    inside = (start + token < length)[:, None] & (feature < SIZE)[None, :]
    if mask is not None:
        inside &= _real_tokens(mask, start, length, T)[:, None]
    offset = token[:, None] * stride + feature[None, :]
    return tl.load(pointer + start * stride + offset, mask=inside, other=0.0).to(DOT)


@triton.jit
def _store_tile(pointer, start, stride, length, x, SIZE, T, PADDED):
    """Store a tile as `_tile` loads it."""
    token, feature = tl.arange(0, T), tl.arange(0, PADDED)
    inside = (start + token < length)[:, None] & (feature < SIZE)[None, :]
    offset = token[:, None] * stride + feature[None, :]
    tl.store(pointer + start * stride + offset, x.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _real_tokens(mask, start, length, T):
    """Whether each of T tokens is real, from a row of the mask."""
    token = start + tl.arange(0, T)
    return tl.load(mask + token, mask=token < length, other=0) != 0


@triton.jit
def _load_sums(pointer, first, T, SIGN):
    """high, low and half of T tokens, loaded as one tile: vectors would be loaded in the layout of the scores' columns,
    repeatedly and with a register for each."""
    token, pair = first + tl.arange(0, T), tl.arange(0, 2)
    four = tl.load(pointer + token[:, None, None] * 4 + pair[None, :, None] * 2 + pair[None, None, :])
    even, odd = tl.split(four)
    high, half = tl.split(even)
    low, _ = tl.split(odd)
    return high, low, SIGN * half


@triton.jit
def _load_sum(pointer, token, SIGN):
    """high, low and half of one token."""
    pointer += token * 4
    return tl.load(pointer), tl.load(pointer + 1), SIGN * tl.load(pointer + 2)


@triton.jit
def _weight(to_high, to_low, to_half, from_high, from_low, from_half):
    """The decay between two sums."""
    return tl.exp2((to_high - from_high) + (to_low - from_low) + (to_half - from_half))


@triton.jit
def _decay_mask(high, low, half, other_high, other_low, other_half):
    """M, (T, S): its logarithm is −|m_i − m_j| + h_j − h_i in both triangles."""
    distance = tl.abs((high[:, None] - other_high[None, :]) + (low[:, None] - other_low[None, :]))
    return tl.exp2(other_half[None, :] - half[:, None] - distance)


@triton.jit
def _keeps(seed, i, j, DROPPED):
    """Whether dropout keeps each entry of a matrix, for queries i and keys j; it drops DROPPED of 2^32."""
    row = i.to(tl.uint32) + seed.to(tl.uint32)
    row = (row ^ (row >> 16)) * 0x7FEB352D  # Wellons' hash of 32 bits
    row = (row ^ (row >> 15)) * 0x846CA68B
    column = j.to(tl.uint32) * 0x9E3779B1 + (seed >> 32).to(tl.uint32)
    x = (row ^ (row >> 16) ^ column) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B  # enough: the high bits decide
    return x >= DROPPED


# Sums and states


@kernel
def sums_kernel(sums, log_decay, seq_idx, H, L, C, N, decay_batch, decay_head, decay_token, LOG_ZERO: tl.constexpr,
        LOG2E: tl.constexpr, SIZE: tl.constexpr):
    """Sums of one chunk, counted from its start: (B or 1, H, N·C, 4)."""
    row, chunk = tl.program_id(0) // N, (tl.program_id(0) % N).to(tl.int64)
    b, h = (row // H).to(tl.int64), (row % H).to(tl.int64)
    so_far = tl.zeros((1,), tl.float64)
    for first in range(0, C, SIZE):
        local = first + tl.arange(0, SIZE)
        token = chunk * C + local
        inside = (local < C) & (token < L)
        decay = tl.zeros((SIZE,), tl.float64)
        if log_decay is not None:
            place = log_decay + b * decay_batch + h * decay_head + token * decay_token
            decay = tl.load(place, mask=inside, other=0.0).to(tl.float64)
            decay = tl.maximum(decay, LOG_ZERO, propagate_nan=tl.PropagateNan.ALL)
        step = decay
        if seq_idx is not None:
            number = tl.load(seq_idx + b * L + token, mask=inside, other=0)
            previous = tl.load(seq_idx + b * L + token - 1, mask=inside & (token > 0), other=0)
            step += tl.where(inside & (token > 0) & (number != previous), LOG_ZERO, 0.0)
        inclusive = so_far + tl.cumsum(step, 0)
        so_far += tl.sum(step, 0)
        half = (decay * (0.5 * LOG2E)).to(tl.float32)
        middle = inclusive * LOG2E - half.to(tl.float64)
        high = middle.to(tl.float32)
        out = sums + (row.to(tl.int64) * N * C + token) * 4
        tl.store(out, high, mask=local < C)
        tl.store(out + 1, (middle - high.to(tl.float64)).to(tl.float32), mask=local < C)
        tl.store(out + 2, half, mask=local < C)


@kernel
def states_kernel(k, v, mask, sums, states, H, L, C, N, columns, side, k_batch, k_head, k_token, v_batch, v_head,
        v_token, sums_batch, sums_head, sums_chunk, D: tl.constexpr, E: tl.constexpr, S: tl.constexpr, PD: tl.constexpr,
        PE: tl.constexpr, SIGN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Σ_j k_j v_jᵀ of one chunk, decayed to its end and to its start: (2, B·H, N, D, E), or (1, B·H, N, D, E) without
    decays. A program computes PE columns."""
    row, rest = (tl.program_id(0) // (N * columns)).to(tl.int64), tl.program_id(0) % (N * columns)
    chunk, column = (rest // columns).to(tl.int64), rest % columns * PE
    b, h = row // H, row % H
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head + column
    if mask is not None:
        mask += b * L
    begin, end = chunk * C, tl.minimum(chunk * C + C, L)
    rightward, leftward = tl.zeros((PD, PE), tl.float32), tl.zeros((PD, PE), tl.float32)
    if sums is not None:
        sums += b * sums_batch + h * sums_head + chunk * sums_chunk
        end_high, end_low, end_half = _load_sum(sums, C - 1, 1)
    for block in range(0, tl.cdiv(end - begin, S)):
        start = begin + block * S
        K = _tile(k, start, k_token, L, mask, D, S, PD, DOT)
        V = _tile(v, start, v_token, L, None, E - column, S, PE, DOT)
        if sums is None:
            rightward = tl.dot(tl.trans(K), V, rightward, input_precision=PRECISION)
        else:
            high, low, half = _load_sums(sums, block * S, S, SIGN)
            to_end = _weight(end_high, end_low, end_half, high, low, -half)
            from_start = tl.exp2(high + low + half)
            rightward = tl.dot(tl.trans((K * to_end[:, None]).to(DOT)), V, rightward, input_precision=PRECISION)
            leftward = tl.dot(tl.trans((K * from_start[:, None]).to(DOT)), V, leftward, input_precision=PRECISION)
    states += (row * N + chunk) * D * E + column
    _store_tile(states, 0, E, D, rightward, E - column, PD, PE)
    if sums is not None:
        _store_tile(states + side, 0, E, D, leftward, E - column, PD, PE)


@kernel
def scan_kernel(states, incoming, sums, H, C, N, parts, side, sums_batch, sums_head, sums_chunk, SIZE: tl.constexpr,
        PART: tl.constexpr, STAGES: tl.constexpr):
    """From the chunks' own states to those that enter each chunk, from the left and the right: (2, B·H, N, D, E).
    A program scans PART of a state's SIZE = D·E entries in one direction."""
    part, rest = tl.program_id(0) % parts, tl.program_id(0) // parts
    direction, row = (rest % 2).to(tl.int64), (rest // 2).to(tl.int64)
    entry = part * PART + tl.arange(0, PART)
    place = direction * side + row * N * SIZE + entry
    sums += row // H * sums_batch + row % H * sums_head
    state = tl.zeros((PART,), tl.float32)
    high, low, half = _load_sum(sums + direction * (N - 1) * sums_chunk, C - 1, 1)
    for step in tl.range(0, N, num_stages=STAGES):
        chunk = direction * (N - 1 - step) + (1 - direction) * step
        own = tl.load(states + place + chunk * SIZE, mask=entry < SIZE, other=0.0)
        after = tl.minimum(step + 1, N - 1)  # loads the next sum during this chunk
        following = direction * (N - 1 - after) + (1 - direction) * after
        high2, low2, half2 = _load_sum(sums + following * sums_chunk, C - 1, 1)
        tl.store(incoming + place + chunk * SIZE, state.to(incoming.dtype.element_ty), mask=entry < SIZE)
        state = state * tl.exp2(high + low + half) + own
        high, low, half = high2, low2, half2


# Outputs and gradients. Contributions from before the rows' block are decayed to its first token, summed, and then
# decayed to all rows at once; later ones are decayed through its last token to each row, block by block, since no
# registers are left for a second sum.


@triton.jit
def _add_block(total, total_x, Q, X, k, v, mask, seed, start, first, length, weight, k_token, v_token, D, E, T, S,
        PD, PE, DOT, PRECISION, DROPPED, DECAYS, ROWS_ARE_KEYS):
    """Add one block of columns, from `first`: (QKᵀ⊙weight) V to `total`, and (XVᵀ⊙weight) K to total_x if rows are
    keys; weight: (1 or T, S). The third result is ∂/∂ log weight, (T, S), if DECAYS."""
    K = _tile(k, first, k_token, length, mask if X is None else None, D, S, PD, DOT)
    V = _tile(v, first, v_token, length, None if X is None or ROWS_ARE_KEYS else mask, E, S, PE, DOT)
    if seed is not None:
        row, column = start + tl.arange(0, T)[:, None], first + tl.arange(0, S)[None, :]
        kept = _keeps(seed, column, row, DROPPED) if ROWS_ARE_KEYS else _keeps(seed, row, column, DROPPED)
        weight = tl.where(kept, weight, 0.0)
    if ROWS_ARE_KEYS:
        scores_x = tl.dot(X, tl.trans(V), input_precision=PRECISION) * weight
        total_x = tl.dot(scores_x.to(DOT), K, total_x, input_precision=PRECISION)
        scores = tl.dot(Q, tl.trans(K), input_precision=PRECISION)
        pairs = scores_x * scores
        scores *= weight
    else:
        scores = tl.dot(Q, tl.trans(K), input_precision=PRECISION) * weight
        pairs = scores
        if DECAYS:
            pairs = tl.dot(X, tl.trans(V), input_precision=PRECISION) * scores
    return tl.dot(scores.to(DOT), V, total, input_precision=PRECISION), total_x, pairs


@triton.jit
def _read_state(Q, X, pointer, D, E, PD, PE, DOT, PRECISION):
    """QS and, for gradients, whose S is stored transposed, also XSᵀ."""
    if X is None:
        out = tl.dot(Q, _tile(pointer, 0, E, D, None, E, PD, PE, DOT), input_precision=PRECISION)
        out_x = tl.zeros((Q.shape[0], PD), tl.float32)
    else:
        transposed = _tile(pointer, 0, D, E, None, D, PE, PD, DOT)
        out = tl.dot(Q, tl.trans(transposed), input_precision=PRECISION)
        out_x = tl.dot(X, transposed, input_precision=PRECISION)
    return out, out_x


@kernel
def product_kernel(q, k, v, x, out, out_x, mask, seed, sums, incoming, grad_sums, scale, H, L, C, N, blocks, side,
        plane, q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, x_batch, x_head, x_token,
        sums_batch, sums_head, sums_chunk, D: tl.constexpr, E: tl.constexpr, T: tl.constexpr, S: tl.constexpr,
        PD: tl.constexpr, PE: tl.constexpr, INSIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
        DROPPED: tl.constexpr):
    """out = scale · (QKᵀ⊙M) V for T rows of a head: the output of linear attention, or, of other operands, a gradient.

        out   q    k    v    x   out_x
        y     q    k    v
        ∂q    ∂y   v    k    q
        ∂k    v    ∂y   q    k   ∂v      its rows are keys, and M is transposed

    out_x is scale · (XVᵀ⊙M) K. grad_sums, if requested, receives row sums of (QKᵀ⊙M) ⊙ XVᵀ, the gradients of exclusive,
    inclusive and the sum over the chunk: planes 0 to 2 from ∂q, 3 to 5 from ∂k. `mask` is of the keys, and `incoming`
    are the states of k and v.
    """
    ROWS_ARE_KEYS: tl.constexpr = out_x is not None
    SIGN: tl.constexpr = -1 if ROWS_ARE_KEYS else 1
    DECAYS: tl.constexpr = grad_sums is not None
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    b, h = (row // H).to(tl.int64), (row % H).to(tl.int64)
    chunk, own = block // (C // T), block % (C // T)  # `own`: the block of rows in its chunk
    count = tl.cdiv(tl.minimum(C, L - chunk * C), S)  # of blocks of columns in the chunk
    row, chunk = row.to(tl.int64), chunk.to(tl.int64)
    begin, start = chunk * C, chunk * C + own * T
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    if mask is not None:
        mask += b * L
    if seed is not None:
        seed = tl.load(seed + row)
    Q = _tile(q + b * q_batch + h * q_head, start, q_token, L, None, D, T, PD, DOT)
    X = None
    if x is not None:
        X = _tile(x + b * x_batch + h * x_head, start, x_token, L, None, E, T, PE, DOT)
        if ROWS_ARE_KEYS and mask is not None:  # after the load: this costs fewer registers here
            X = tl.where(_real_tokens(mask, start, L, T)[:, None], X, 0.0).to(DOT)
    total, total_x = tl.zeros((T, PE), tl.float32), tl.zeros((T, PD), tl.float32)
    if incoming is not None:
        incoming += (row if sums is None else row * N + chunk) * D * E
        total, total_x = _read_state(Q, X, incoming, D, E, PD, PE, DOT, PRECISION)
    if sums is None:
        if INSIDE:
            for other in range(0, count):
                total, total_x, _ = _add_block(total, total_x, Q, X, k, v, mask, seed, start, begin + other * S, L,
                    1.0, k_token, v_token, D, E, T, S, PD, PE, DOT, PRECISION, DROPPED, False, ROWS_ARE_KEYS)
    else:
        sums += b * sums_batch + h * sums_head + chunk * sums_chunk
        high, low, half = _load_sums(sums, own * T, T, SIGN)
        high0, low0, half0 = _load_sum(sums, own * T, SIGN)  # of the first token
        high1, low1, half1 = _load_sum(sums, own * T + T - 1, SIGN)  # of the last
        past, future, outside = tl.zeros((T,), tl.float32), tl.zeros((T,), tl.float32), tl.zeros((T,), tl.float32)
        if incoming is not None:
            from_start = tl.exp2(high0 + low0 - half0)
            total *= from_start
            total_x *= from_start
            if DECAYS:
                past = tl.sum(X * total, 1)
        for other in range(0, own * (T // S)):
            high2, low2, half2 = _load_sums(sums, other * S, S, SIGN)
            weight = _weight(high0, low0, -half0, high2, low2, -half2)[None, :]
            total, total_x, pairs = _add_block(total, total_x, Q, X, k, v, mask, seed, start, begin + other * S, L,
                weight, k_token, v_token, D, E, T, S, PD, PE, DOT, PRECISION, DROPPED, DECAYS, ROWS_ARE_KEYS)
            if DECAYS:
                past += tl.sum(pairs, 1)
        from_first = _weight(high, low, -half, high0, low0, -half0)
        total *= from_first[:, None]
        total_x *= from_first[:, None]
        past *= from_first
        to_last = _weight(high1, low1, half1, high, low, half)
        if incoming is not None:
            end_high, end_low, end_half = _load_sum(sums, C - 1, 1)
            until_end = (_weight(end_high, end_low, end_half, high1, low1, half1) * to_last)[:, None]
            right, right_x = _read_state(Q, X, incoming + side, D, E, PD, PE, DOT, PRECISION)
            right *= until_end
            total += right
            total_x += right_x * until_end
            if DECAYS:
                outside = tl.sum(X * right, 1)
        for other in range((own + 1) * (T // S), count):
            high2, low2, half2 = _load_sums(sums, other * S, S, SIGN)
            weight = to_last[:, None] * _weight(high2, low2, half2, high1, low1, half1)[None, :]
            total, total_x, pairs = _add_block(total, total_x, Q, X, k, v, mask, seed, start, begin + other * S, L,
                weight, k_token, v_token, D, E, T, S, PD, PE, DOT, PRECISION, DROPPED, DECAYS, ROWS_ARE_KEYS)
            if DECAYS:
                future += tl.sum(pairs, 1)
        i, j = own * T + tl.arange(0, T), tl.arange(0, S)
        for other in range(own * (T // S), tl.minimum((own + 1) * (T // S), count)):
            high2, low2, half2 = _load_sums(sums, other * S, S, SIGN)
            weight = _decay_mask(high, low, half, high2, low2, half2)
            total, total_x, pairs = _add_block(total, total_x, Q, X, k, v, mask, seed, start, begin + other * S, L,
                weight, k_token, v_token, D, E, T, S, PD, PE, DOT, PRECISION, DROPPED, DECAYS, ROWS_ARE_KEYS)
            if DECAYS:
                past += tl.sum(tl.where(i[:, None] > other * S + j[None, :], pairs, 0.0), 1)
                future += tl.sum(tl.where(i[:, None] < other * S + j[None, :], pairs, 0.0), 1)
        if DECAYS:
            plane = tl.cast(plane, tl.int64)
            grad_sums += row * N * C + start + tl.arange(0, T) + (3 * plane if ROWS_ARE_KEYS else 0)
            tl.store(grad_sums + (plane if ROWS_ARE_KEYS else 0), past * scale)
            tl.store(grad_sums + (0 if ROWS_ARE_KEYS else plane), -future * scale)
            tl.store(grad_sums + 2 * plane, outside * scale)
    if ROWS_ARE_KEYS and mask is not None:
        total = tl.where(_real_tokens(mask, start, L, T)[:, None], total, 0.0)
    _store_tile(out + (b * L * H + h) * E, start, H * E, L, total * scale, E, T, PE)
    if ROWS_ARE_KEYS:
        _store_tile(out_x + (b * L * H + h) * D, start, H * D, L, total_x * scale, D, T, PD)


@triton.jit
def _plane(grad_sums, number, plane, token, length):
    """One of the six planes of `product_kernel`, at some tokens of a chunk."""
    return tl.load(grad_sums + number * plane + token, mask=token < length, other=0.0).to(tl.float64)


@kernel
def decay_gradients_kernel(log_decay, sums, grad_sums, incoming, grad_incoming, grad, scale, H, L, C, N, side, plane,
        decay_batch, decay_head, decay_token, sums_batch, sums_head, sums_chunk, LOG_ZERO: tl.constexpr,
        STATE: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr):
    """∂ log_decay of one chunk, (B, H, L). A token's decay is part of exclusive at all later tokens of its chunk, of
    inclusive at these and at its own, and of the chunk's sum: keys and queries decay to its end, states across it."""
    row, chunk = (tl.program_id(0) // N).to(tl.int64), (tl.program_id(0) % N).to(tl.int64)
    b, h = row // H, row % H
    plane = tl.cast(plane, tl.int64)
    total = tl.zeros((1,), tl.float64)
    if incoming is not None:
        crossing = tl.zeros((PART,), tl.float32)
        place = (row * N + chunk) * STATE
        for first in range(0, STATE, PART):
            entry = place + first + tl.arange(0, PART)
            inside = first + tl.arange(0, PART) < STATE
            for direction in tl.static_range(2):  # keys before and queries after the chunk, and the reverse
                S = tl.load(incoming + direction * side + entry, mask=inside, other=0.0).to(tl.float32)
                G = tl.load(grad_incoming + (1 - direction) * side + entry, mask=inside, other=0.0).to(tl.float32)
                crossing += S * G
        high, low, half = _load_sum(sums + b * sums_batch + h * sums_head + chunk * sums_chunk, C - 1, 1)
        total += tl.sum(crossing, 0).to(tl.float64) * tl.exp2(high + low + half) * scale
    grad_sums += row * N * C + chunk * C
    length = tl.minimum(C, L - chunk * C)
    for first in range(0, length, SIZE):
        token = first + tl.arange(0, SIZE)
        for number in tl.static_range(0, 6, 3):
            each = _plane(grad_sums, number, plane, token, length) + _plane(grad_sums, number + 1, plane, token, length)
            total += tl.sum(each, 0)
    for first in range(0, length, SIZE):
        token = first + tl.arange(0, SIZE)
        exclusive = _plane(grad_sums, 0, plane, token, length) + _plane(grad_sums, 3, plane, token, length)
        inclusive = _plane(grad_sums, 1, plane, token, length) - _plane(grad_sums, 2, plane, token, length)
        exclusive -= _plane(grad_sums, 5, plane, token, length)
        inclusive += _plane(grad_sums, 4, plane, token, length)
        decay = log_decay + b * decay_batch + h * decay_head + (chunk * C + token) * decay_token
        clamped = tl.load(decay, mask=token < length, other=0.0) < LOG_ZERO
        own = tl.where(clamped, 0.0, total - tl.cumsum(exclusive + inclusive, 0) + inclusive)
        tl.store(grad + row * L + chunk * C + token, own.to(grad.dtype.element_ty), mask=token < length)
        total -= tl.sum(exclusive + inclusive, 0)
