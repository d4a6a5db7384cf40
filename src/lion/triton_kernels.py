"""The device code of linear_attention_triton.py: linear attention with a decay mask as GPU kernels, in Triton.

It is flash attention without the softmax: blocks of scores are computed, masked and multiplied by V on chip, and no
matrix is ever stored. Since log M_ij is a difference of two numbers, only blocks on the diagonal need an exponential
per entry. Past keys of another block are decayed through a point between them and the queries' block,

    M_ij = exp(exclusive_i − exclusive_first) · exp(exclusive_first − exclusive_j),    first: the queries' first token,

one factor per query and one per key, neither above 1; future keys likewise through the queries' last token. A key's
factor is split once more, at the edge of its block: what remains is one number per block, and one per key that all
queries share and one kernel computes.

Inside a chunk of a text all pairs of blocks are computed. Keys and values of other chunks arrive as states, one from
the left and one from the right, for which one kernel sums each chunk and another scans chunks. The full form is one
chunk as long as the text, without states. Without decays all chunks share one state, their sum.

The backward pass recomputes everything. y = (s·QKᵀ⊙M) V, so the gradients of q, k and v are such products too, from
the same kernel; for k and v, which need Mᵀ, exclusive and inclusive swap roles, unless keys have weights in place of
their own decays. No two programs write the same entry.

Rows that read only the columns BEFORE or AFTER them, with or without those on the DIAGONAL, skip the blocks and states
of the other side.

Row sums of QKᵀ⊙M are outputs as if V had one more column, of ones, which is never stored: a state is followed by the
vector that this column adds, and the gradient of a row sum is added to ∂y·V of all keys.

A text may be read in several ORDERS, (ORDERS, L): the place in memory of each of its tokens. Each head then counts as
one per order, the heads of the first order before those of the second, and all orders read the same operands.

Shape letters: B batch, H heads, L length, D head size of q and k, E head size of v, N chunks, C chunk size, T and S
block sizes of rows and columns, G of the blocks that factors refer to.
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

# "Sums" are the cumulative log decays of one chunk, from its start, in float32 and in units of log 2:
#
#   C × 4     high, low, half and key, so that a token is one load. exclusive = high + low − half and
#             inclusive = high + low + half: their mean as two numbers, precise enough for differences of neighbours,
#             and half their difference. As a query, a token takes half from log M, and as a key it adds `key`: half or,
#             for keys that have a weight in place of their own decay, log weight − half.
#   4 × C     a key's factor to the end of its block of G tokens, and from the block's start; then those of a query.
#   C/G+1 × 2 high and low of inclusive at the last token of each block, after a zero.

# These vary with a batch's length: a kernel would be recompiled where one is 1 or a multiple of 16.
VARYING = "H", "L", "N", "blocks", "columns", "parts", "decay_batch", "decay_head", "weight_batch", "weight_head"
kernel = triton.jit(do_not_specialize=VARYING)


@triton.jit
def _places(order, start, length, T):
    """Where T tokens of a text, from `start`, are in memory."""
    token = start + tl.arange(0, T)
    return token if order is None else tl.load(order + token, mask=token < length, other=0)


@triton.jit
def _entries(pointer, start, stride, length, SIZE, T, PADDED, order):
    """The entries of T tokens of a text, (length, SIZE), from `start`: (T, PADDED), and which are inside the text."""
    token, feature = tl.arange(0, T), tl.arange(0, PADDED)
    inside = (start + token < length)[:, None] & (feature < SIZE)[None, :]
    if order is None:
        pointer += start * stride
    else:
        token = _places(order, start, length, T)
    return pointer + (token[:, None] * stride + feature[None, :]), inside


@triton.jit
def _tile(pointer, start, stride, length, mask, SIZE, T, PADDED, DOT, order=None):
    """Load T tokens of a text, (length, SIZE), from `start`: (T, PADDED), 0 outside the text and at masked tokens."""
    entry, inside = _entries(pointer, start, stride, length, SIZE, T, PADDED, order)
    if mask is not None:
        inside &= _real_tokens(mask, start, length, T)[:, None]
    return tl.load(entry, mask=inside, other=0.0).to(DOT)


@triton.jit
def _store_tile(pointer, start, stride, length, x, SIZE, T, PADDED, order=None):
    """Store a tile as `_tile` loads it."""
    entry, inside = _entries(pointer, start, stride, length, SIZE, T, PADDED, order)
    tl.store(entry, x.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _real_tokens(mask, start, length, T):
    """Whether each of T tokens is real, from a row of the mask."""
    token = start + tl.arange(0, T)
    return tl.load(mask + token, mask=token < length, other=0) != 0


@triton.jit
def _load_sums(pointer, first, T, KEYS):
    """high, low and what T keys or queries take from log M. They are loaded as one tile: vectors would be loaded in the
    layout of the scores' columns, repeatedly and with a register for each."""
    token, pair = first + tl.arange(0, T), tl.arange(0, 2)
    four = tl.load(pointer + token[:, None, None] * 4 + pair[None, :, None] * 2 + pair[None, None, :])
    even, odd = tl.split(four)
    high, half = tl.split(even)
    low, key = tl.split(odd)
    return high, low, -key if KEYS else half


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
def _decay_mask(high, low, own, other_high, other_low, other):
    """M, (T, S): its logarithm is −|m_i − m_j|, less what query and key take, in both triangles."""
    distance = tl.abs((high[:, None] - other_high[None, :]) + (low[:, None] - other_low[None, :]))
    return tl.exp2(-other[None, :] - own[:, None] - distance)


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


@triton.jit
def _log_decay(decay, LOGITS, LOG_ZERO):
    """log λ in float64, at least LOG_ZERO, of log λ or of the logit of 1 − λ."""
    if LOGITS:
        decay = -(tl.maximum(decay, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(decay))))
    return tl.maximum(decay, LOG_ZERO, propagate_nan=tl.PropagateNan.ALL)


@kernel
def sums_kernel(sums, decay, log_weight, seq_idx, orders, H, L, C, N, width, decay_batch, decay_head, decay_token,
        weight_batch, weight_head, weight_token, LOGITS: tl.constexpr, LOG_ZERO: tl.constexpr, LOG2E: tl.constexpr,
        G: tl.constexpr, SIZE: tl.constexpr, ORDERS: tl.constexpr):
    """Sums of one chunk: (B or 1, H, N, width)."""
    row, chunk = tl.program_id(0) // N, (tl.program_id(0) % N).to(tl.int64)
    b, h = (row // H).to(tl.int64), (row % H).to(tl.int64)
    sums += (row.to(tl.int64) * N + chunk) * width
    edges, number = sums + 8 * C, tl.arange(0, SIZE // G)
    tl.store(edges + tl.arange(0, 2), tl.zeros((2,), tl.float32))
    so_far = tl.zeros((1,), tl.float64)
    for first in range(0, C, SIZE):
        local = first + number[:, None] * G + tl.arange(0, G)[None, :]
        token = chunk * C + local
        inside = (local < C) & (token < L)
        log_decay = tl.zeros((SIZE // G, G), tl.float64)
        if decay is not None:
            of_token = token
            if orders is not None:
                of_token = tl.load(orders + h // (H // ORDERS) * L + token, mask=inside, other=0)
            place = decay + b * decay_batch + h * decay_head + of_token * decay_token
            log_decay = _log_decay(tl.load(place, mask=inside, other=0.0).to(tl.float64), LOGITS, LOG_ZERO)
            log_decay = tl.where(inside, log_decay, 0.0)
        step = log_decay
        if seq_idx is not None:
            sequence = tl.load(seq_idx + b * L + token, mask=inside, other=0)
            previous = tl.load(seq_idx + b * L + token - 1, mask=inside & (token > 0), other=0)
            step += tl.where(inside & (token > 0) & (sequence != previous), LOG_ZERO, 0.0)
        within, whole = tl.cumsum(step, 1), tl.sum(step, 1)  # in each block
        edge = so_far + tl.cumsum(whole, 0)
        so_far += tl.sum(whole, 0)
        until_end = whole[:, None] - within
        of_key = log_decay  # what a key is multiplied by besides the decays between it and the query
        if log_weight is not None:
            place = log_weight + b * weight_batch + h * weight_head + token * weight_token
            of_key = tl.load(place, mask=inside, other=0.0).to(tl.float64)
        half = (log_decay * (0.5 * LOG2E)).to(tl.float32)
        middle = (edge[:, None] - until_end) * LOG2E - half.to(tl.float64)
        high = middle.to(tl.float32)
        tl.store(sums + local * 4, high, mask=local < C)
        tl.store(sums + local * 4 + 1, (middle - high.to(tl.float64)).to(tl.float32), mask=local < C)
        tl.store(sums + local * 4 + 2, half, mask=local < C)
        tl.store(sums + local * 4 + 3, (of_key * LOG2E).to(tl.float32) - half, mask=local < C)
        factor = sums + 4 * C + local
        tl.store(factor, tl.exp2(((until_end + of_key) * LOG2E).to(tl.float32)), mask=local < C)
        tl.store(factor + C, tl.exp2(((within - log_decay + of_key) * LOG2E).to(tl.float32)), mask=local < C)
        tl.store(factor + 2 * C, tl.exp2((until_end * LOG2E).to(tl.float32)), mask=local < C)
        tl.store(factor + 3 * C, tl.exp2(((within - log_decay) * LOG2E).to(tl.float32)), mask=local < C)
        edge *= LOG2E
        high = edge.to(tl.float32)
        place = edges + 2 * (first // G + 1 + number)
        tl.store(place, high, mask=first // G + number < C // G)
        tl.store(place + 1, (edge - high.to(tl.float64)).to(tl.float32), mask=first // G + number < C // G)


@kernel
def states_kernel(k, v, mask, orders, grad_rows, sums, states, H, L, C, N, columns, side, k_batch, k_head, k_token,
        v_batch, v_head, v_token, sums_batch, sums_head, sums_chunk, D: tl.constexpr, E: tl.constexpr, S: tl.constexpr,
        PD: tl.constexpr, PE: tl.constexpr, STATE: tl.constexpr, KEYS: tl.constexpr, BEFORE: tl.constexpr,
        AFTER: tl.constexpr, ORDERS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Σ_j k_j v_jᵀ of one chunk, of keys or of queries, decayed to its end if later chunks read it, and to its start if
    earlier ones do: (2, B·H, N, STATE), or (1, B·H, N, STATE) for one of them or without decays. STATE is D·E or, with
    row sums, D·(E + 1): then Σ_j k_j follows, each k_j times its entry of grad_rows, (B, H, N·C), if given. A program
    computes PE columns."""
    ROW_SUMS: tl.constexpr = STATE > D * E
    row, rest = (tl.program_id(0) // (N * columns)).to(tl.int64), tl.program_id(0) % (N * columns)
    chunk, column = (rest // columns).to(tl.int64), rest % columns * PE
    b, h = row // H, row % H
    head = h if orders is None else h % (H // ORDERS)
    k += b * k_batch + head * k_head
    v += b * v_batch + head * v_head + column
    if orders is not None:
        orders += h // (H // ORDERS) * L
    if mask is not None:
        mask += b * L
    if grad_rows is not None:
        grad_rows += row * N * C
    begin, end = chunk * C, tl.minimum(chunk * C + C, L)
    rightward, leftward = tl.zeros((PD, PE), tl.float32), tl.zeros((PD, PE), tl.float32)
    last_rightward, last_leftward = tl.zeros((S, PD), tl.float32), tl.zeros((S, PD), tl.float32)
    if sums is not None:
        sums += b * sums_batch + h * sums_head + chunk * sums_chunk
        end_high, end_low, end_half = _load_sum(sums, C - 1, 1)
    for block in range(0, tl.cdiv(end - begin, S)):
        start = begin + block * S
        K = _tile(k, start, k_token, L, mask, D, S, PD, DOT, orders)
        V = _tile(v, start, v_token, L, None, E - column, S, PE, DOT, orders)
        if ROW_SUMS:
            last = K.to(tl.float32)
            if grad_rows is not None:
                last *= tl.load(grad_rows + start + tl.arange(0, S))[:, None]
        if sums is None:
            rightward = tl.dot(tl.trans(K), V, rightward, input_precision=PRECISION)
            if ROW_SUMS:
                last_rightward += last
        else:
            high, low, of_k = _load_sums(sums, block * S, S, KEYS)
            to_end = _weight(end_high, end_low, end_half, high, low, of_k)
            from_start = tl.exp2(high + low - of_k)
            # V is weighed, not K: a transposed product of registers would be Hopper's riskiest kind, and slower.
            if BEFORE:
                rightward = tl.dot(tl.trans(K), (V * to_end[:, None]).to(DOT), rightward, input_precision=PRECISION)
            if AFTER:
                leftward = tl.dot(tl.trans(K), (V * from_start[:, None]).to(DOT), leftward, input_precision=PRECISION)
            if ROW_SUMS and BEFORE:
                last_rightward += last * to_end[:, None]
            if ROW_SUMS and AFTER:
                last_leftward += last * from_start[:, None]
    states += (row * N + chunk) * STATE
    if BEFORE:
        _store_tile(states + column, 0, E, D, rightward, E - column, PD, PE)
    if AFTER and sums is not None:
        _store_tile(states + side + column, 0, E, D, leftward, E - column, PD, PE)
    if ROW_SUMS:
        entry = tl.arange(0, PD)
        inside, entry = (entry < D) & (column == 0), D * E + entry
        if BEFORE:
            tl.store(states + entry, tl.sum(last_rightward, 0).to(states.dtype.element_ty), mask=inside)
        if AFTER and sums is not None:
            tl.store(states + side + entry, tl.sum(last_leftward, 0).to(states.dtype.element_ty), mask=inside)


@kernel
def scan_kernel(states, incoming, sums, H, C, N, parts, side, sums_batch, sums_head, sums_chunk, SIZE: tl.constexpr,
        PART: tl.constexpr, STAGES: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr):
    """From the chunks' own states to those that enter each chunk, from the left if BEFORE and from the right if AFTER:
    (1 or 2, B·H, N, SIZE). A program scans PART of a state's entries in one direction."""
    part, rest = tl.program_id(0) % parts, tl.program_id(0) // parts
    direction, row = rest % (BEFORE + AFTER) + (1 - BEFORE), (rest // (BEFORE + AFTER)).to(tl.int64)
    direction = direction.to(tl.int64)
    entry = part * PART + tl.arange(0, PART)
    place = direction * side + row * N * SIZE + entry
    sums += row // H * sums_batch + row % H * sums_head
    state = tl.zeros((PART,), tl.float32)
    high, low, half = _load_sum(sums + direction * (N - 1) * sums_chunk, C - 1, 1)
    for step in tl.range(0, N, num_stages=STAGES):
        chunk = direction * (N - 1 - step) + (1 - direction) * step
        own = tl.load(states + place + chunk * SIZE, mask=entry < SIZE, other=0.0).to(tl.float32)
        after = tl.minimum(step + 1, N - 1)  # loads the next sum during this chunk
        following = direction * (N - 1 - after) + (1 - direction) * after
        high2, low2, half2 = _load_sum(sums + following * sums_chunk, C - 1, 1)
        tl.store(incoming + place + chunk * SIZE, state.to(incoming.dtype.element_ty), mask=entry < SIZE)
        state = state * tl.exp2(high + low + half) + own
        high, low, half = high2, low2, half2


# Outputs and gradients


@triton.jit
def _add_block(total, total_x, row_sums, Q, X, k, v, mask, order, rows, grad_rows, seed, start, first, length, weight,
        k_token, v_token, D, E, S, DOT, PRECISION, DROPPED, DECAYS, ROWS_ARE_KEYS):
    """Add one block of columns, from `first`: (QKᵀ⊙weight) V to `total`, and (XVᵀ⊙weight) K to total_x if rows are
    keys; weight: (1 or T, S). If `rows` are given, the output's row sums are added to row_sums, (T,); for gradients,
    those of the row sums are added to QKᵀ: grad_rows, (T,), or, if rows are keys, those in `rows`. The fourth result
    is ∂/∂ log weight, (T, S), if DECAYS."""
    T: tl.constexpr = Q.shape[0]
    PD: tl.constexpr = Q.shape[1]
    PE: tl.constexpr = total.shape[1]
    K = _tile(k, first, k_token, length, mask if X is None else None, D, S, PD, DOT, order)
    V = _tile(v, first, v_token, length, None if X is None or ROWS_ARE_KEYS else mask, E, S, PE, DOT, order)
    if seed is not None:
        row, column = start + tl.arange(0, T)[:, None], first + tl.arange(0, S)[None, :]
        kept = _keeps(seed, column, row, DROPPED) if ROWS_ARE_KEYS else _keeps(seed, row, column, DROPPED)
        weight = tl.where(kept, weight, 0.0)
    if ROWS_ARE_KEYS:
        scores_x = tl.dot(X, tl.trans(V), input_precision=PRECISION) * weight
        total_x = tl.dot(scores_x.to(DOT), K, total_x, input_precision=PRECISION)
        scores = tl.dot(Q, tl.trans(K), input_precision=PRECISION)
        if rows is not None:
            scores += tl.load(rows + first + tl.arange(0, S))[None, :]
        pairs = scores_x * scores
        scores *= weight
    else:
        scores = tl.dot(Q, tl.trans(K), input_precision=PRECISION)
        if grad_rows is not None:
            scores += grad_rows[:, None]
        scores *= weight
        pairs = scores
        if rows is not None and X is None:
            row_sums += tl.sum(scores, 1)
        if DECAYS:
            pairs = tl.dot(X, tl.trans(V), input_precision=PRECISION) * scores
    return tl.dot(scores.to(DOT), V, total, input_precision=PRECISION), total_x, row_sums, pairs


@triton.jit
def _last_vector(state, place, SIZE, PADDED):
    """What follows a state's matrix, of SIZE entries, in float32."""
    entry = tl.arange(0, PADDED)
    return tl.load(state + place + entry, mask=entry < SIZE, other=0.0).to(tl.float32)


@triton.jit
def _read_state(total, total_x, Q, X, pointer, rows, grad_rows, decay, D, E, PD, PE, DOT, PRECISION):
    """Add QS, decayed, to `total` and, for gradients, whose S is stored transposed, XSᵀ to total_x. The third result
    is the row sums of QS ⊙ X, or what the output's row sums read; grad_rows as for `_add_block`, or 1 if rows are keys.
    One product after the other, since there are no registers for both."""
    row_sums = tl.zeros((Q.shape[0],), tl.float32)
    if X is None:
        read = tl.dot(Q, _tile(pointer, 0, E, D, None, E, PD, PE, DOT), input_precision=PRECISION)
        total += read * decay
        if rows is not None:
            row_sums = tl.sum(Q * _last_vector(pointer, D * E, D, PD)[None, :] * decay, 1)
    else:
        transposed = _tile(pointer, 0, D, E, None, D, PE, PD, DOT)
        read = tl.dot(Q, tl.trans(transposed), input_precision=PRECISION)
        if rows is not None:
            read += grad_rows[:, None] * _last_vector(pointer, D * E, E, PE)[None, :]
        read *= decay
        row_sums = tl.sum(X * read, 1)
        total += read
        total_x += tl.dot(X, transposed, input_precision=PRECISION) * decay
    return total, total_x, row_sums


@kernel
def product_kernel(q, k, v, x, out, out_x, mask, orders, seed, rows, sums, incoming, grad_sums, scale, H, L, C, N,
        blocks, side, plane, q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, x_batch,
        x_head, x_token, out_token, out_x_token, sums_batch, sums_head, sums_chunk, D: tl.constexpr, E: tl.constexpr,
        T: tl.constexpr, S: tl.constexpr, G: tl.constexpr, PD: tl.constexpr, PE: tl.constexpr, STATE: tl.constexpr,
        BEFORE: tl.constexpr, AFTER: tl.constexpr, DIAGONAL: tl.constexpr, EPSILON: tl.constexpr, INSIDE: tl.constexpr,
        WEIGHTS: tl.constexpr, ORDERS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, DROPPED: tl.constexpr):
    """out = scale · (QKᵀ⊙M) V for T rows of a head: the output of linear attention, or, of other operands, a gradient.

        out   q    k    v    x   out_x
        y     q    k    v
        ∂q    ∂y   v    k    q
        ∂k    v    ∂y   q    k   ∂v      its rows are keys, and M is transposed

    out_x is scale · (XVᵀ⊙M) K. grad_sums, if requested, receives row sums of (QKᵀ⊙M) ⊙ XVᵀ, the gradients of exclusive,
    inclusive and the sum over the chunk: planes 0 to 2 from ∂q, 3 to 5 from ∂k. `mask` is of the keys, and `incoming`
    are the states of k and v. `rows`, if given, receives the row sums of y, (B, H, L), by which y is divided if EPSILON
    is a number; for gradients it holds those of the row sums, (B, H, N·C).
    """
    ROWS_ARE_KEYS: tl.constexpr = out_x is not None
    # Keys with their own decay swap exclusive and inclusive.
    SWAPPED: tl.constexpr = ROWS_ARE_KEYS and not WEIGHTS
    SIGN: tl.constexpr = -1 if SWAPPED else 1
    DECAYS: tl.constexpr = grad_sums is not None
    ROW_SUMS: tl.constexpr = rows is not None and x is None
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    b, h = (row // H).to(tl.int64), (row % H).to(tl.int64)
    chunk, own = block // (C // T), block % (C // T)  # `own`: the block of rows in its chunk
    length = tl.minimum(C, L - chunk * C)
    count = tl.cdiv(length, S)  # of blocks of columns in the chunk
    row, chunk = row.to(tl.int64), chunk.to(tl.int64)
    start = chunk * C + own * T
    begin, head = chunk * C, h
    order = None
    if orders is not None:  # places count from the text's start
        orders += h // (H // ORDERS) * L
        begin, head, order = chunk * 0, h % (H // ORDERS), orders + chunk * C
    Q = _tile(q + b * q_batch + head * q_head, start, q_token, L, None, D, T, PD, DOT, orders)
    # From here on tokens are counted from the chunk's start, so that places in it are numbers of 32 bits.
    k += b * k_batch + head * k_head + begin * k_token
    v += b * v_batch + head * v_head + begin * v_token
    if mask is not None:
        mask += b * L + chunk * C
    if seed is not None:
        seed = tl.load(seed + row)
    X = None
    if x is not None:
        x += b * x_batch + head * x_head + begin * x_token
        X = _tile(x, own * T, x_token, length, mask if ROWS_ARE_KEYS else None, E, T, PE, DOT, order)
    total, total_x = tl.zeros((T, PE), tl.float32), tl.zeros((T, PD), tl.float32)
    row_sums = tl.zeros((T,), tl.float32)
    grad_rows = None
    if rows is not None:
        rows += row * L + begin if ROW_SUMS else row * N * C + chunk * C
        if ROWS_ARE_KEYS:
            grad_rows = tl.full((T,), 1.0, tl.float32)
        elif not ROW_SUMS:
            grad_rows = tl.load(rows + own * T + tl.arange(0, T))
    if sums is None:
        if incoming is not None:
            total, total_x, row_sums = _read_state(total, total_x, Q, X, incoming + row * STATE, rows, grad_rows, 1.0,
                D, E, PD, PE, DOT, PRECISION)
        if INSIDE:
            # The first block, not zeros, defines what the loop adds to: else ptxas makes each product of the loop wait
            # for the one before (warning C7515).
            total, total_x, row_sums, _ = _add_block(total, total_x, row_sums, Q, X, k, v, mask, order, rows,
                grad_rows, seed, own * T, 0, length, 1.0, k_token, v_token, D, E, S, DOT, PRECISION, DROPPED, False,
                ROWS_ARE_KEYS)
            for other in range(1, count):
                total, total_x, row_sums, _ = _add_block(total, total_x, row_sums, Q, X, k, v, mask, order, rows,
                    grad_rows, seed, own * T, other * S, length, 1.0, k_token, v_token, D, E, S, DOT, PRECISION,
                    DROPPED, False, ROWS_ARE_KEYS)
    else:
        sums += b * sums_batch + h * sums_head + chunk * sums_chunk
        high, low, of_row = _load_sums(sums, own * T, T, ROWS_ARE_KEYS)
        past, future, outside = tl.zeros((T,), tl.float32), tl.zeros((T,), tl.float32), tl.zeros((T,), tl.float32)
        i, j = own * T + tl.arange(0, T), tl.arange(0, S)
        for part in tl.static_range(T // S):  # the rows' own block; first, for the same reason
            first = own * T + part * S
            high2, low2, of_column = _load_sums(sums, first, S, not ROWS_ARE_KEYS)
            own_weight = _decay_mask(high, low, of_row, high2, low2, of_column)
            if not (BEFORE and AFTER):
                ahead = i[:, None] - (first + j[None, :]) if BEFORE else first + j[None, :] - i[:, None]
                own_weight = tl.where(ahead >= 1 - DIAGONAL, own_weight, 0.0)
            total, total_x, row_sums, pairs = _add_block(total, total_x, row_sums, Q, X, k, v, mask, order, rows,
                grad_rows, seed, own * T, first, length, own_weight, k_token, v_token, D, E, S, DOT, PRECISION,
                DROPPED, DECAYS, ROWS_ARE_KEYS)
            if DECAYS:
                past += tl.sum(tl.where(i[:, None] > first + j[None, :], pairs, 0.0), 1)
                future += tl.sum(tl.where(i[:, None] < first + j[None, :], pairs, 0.0), 1)
        # Blocks before and after that of the rows: from a key to an edge of its block, from there to the rows' first or
        # last token, and on to each row.
        high0, low0, half0 = _load_sum(sums, own * T, SIGN)
        high1, low1, half1 = _load_sum(sums, own * T + T - 1, SIGN)
        from_first = _weight(high, low, -of_row, high0, low0, -half0)
        to_last = _weight(high1, low1, half1, high, low, of_row)
        factors, edges = sums + (6 if ROWS_ARE_KEYS else 4) * C + tl.arange(0, S), sums + 8 * C
        for step in range(0 if BEFORE else own * (T // S), tl.maximum(own * (T // S), count - T // S if AFTER else 0)):
            before = step < own * (T // S)
            other = step + tl.where(before, 0, T // S)
            edge = edges + 2 * (other * S // G + tl.where(before, 1, 0))
            high3, low3 = tl.load(edge), tl.load(edge + 1)
            across = tl.where(before, (high0 - high3) + (low0 - low3) - half0, (high3 - high1) + (low3 - low1) - half1)
            factor = tl.load(factors + other * S + tl.where(before, 0, C))
            weight = (tl.where(before, from_first, to_last) * tl.exp2(across))[:, None] * factor[None, :]
            total, total_x, row_sums, pairs = _add_block(total, total_x, row_sums, Q, X, k, v, mask, order, rows,
                grad_rows, seed, own * T, other * S, length, weight, k_token, v_token, D, E, S, DOT, PRECISION,
                DROPPED, DECAYS, ROWS_ARE_KEYS)
            if DECAYS:
                of_pairs = tl.sum(pairs, 1)
                past += tl.where(before, of_pairs, 0.0)
                future += tl.where(before, 0.0, of_pairs)
        if incoming is not None:
            incoming += (row * N + chunk) * STATE
            end_high, end_low, end_half = _load_sum(sums, C - 1, 1)
            from_start = tl.exp2(high + low - of_row)
            until_end = _weight(end_high, end_low, end_half, high, low, of_row)
            # A loop, so that registers need not hold both states.
            for direction in tl.range(0 if BEFORE else 1, 2 if AFTER else 1, num_stages=1):
                decay = tl.where(direction == 0, from_start, until_end)
                total, total_x, read = _read_state(total, total_x, Q, X, incoming + direction * side, rows, grad_rows,
                    decay[:, None], D, E, PD, PE, DOT, PRECISION)
                if ROW_SUMS:
                    row_sums += read
                past += tl.where(direction == 0, read, 0.0)
                if AFTER:
                    outside = read
        if DECAYS:
            plane = tl.cast(plane, tl.int64)
            grad_sums += row * N * C + start + tl.arange(0, T) + (3 * plane if ROWS_ARE_KEYS else 0)
            tl.store(grad_sums + (plane if SWAPPED else 0), past * scale)
            tl.store(grad_sums + (0 if SWAPPED else plane), -future * scale)
            tl.store(grad_sums + 2 * plane, outside * scale)
    if ROWS_ARE_KEYS and mask is not None:
        total = tl.where(_real_tokens(mask, own * T, length, T)[:, None], total, 0.0)
    total *= scale
    if ROW_SUMS:
        row_sums *= scale
        # Without an order, `_places` would return the same and cost ptxas 20 registers.
        place = own * T + tl.arange(0, T) if order is None else _places(order, own * T, length, T)
        tl.store(rows + place, row_sums, mask=own * T + tl.arange(0, T) < length)
        if EPSILON is not None:
            total /= (row_sums + EPSILON)[:, None]
    _store_tile(out + b * L * out_token + h * E, start, out_token, L, total, E, T, PE, orders)
    if ROWS_ARE_KEYS:
        _store_tile(out_x + b * L * out_x_token + h * D, start, out_x_token, L, total_x * scale, D, T, PD, orders)


@kernel
def rows_kernel(grad, y, row_sums, grad_undivided, grad_row_sums, H, L, padded, blocks, E: tl.constexpr,
        T: tl.constexpr, PE: tl.constexpr, EPSILON: tl.constexpr):
    """Compute the gradients of what was divided, (B, L, H, E), and of the row sums, (B, H, padded) with zeros at the
    end, for T rows, from the result y and its gradient."""
    row, start = (tl.program_id(0) // blocks).to(tl.int64), (tl.program_id(0) % blocks).to(tl.int64) * T
    place, inside = row // H * L * H * E + row % H * E, start + tl.arange(0, T) < L
    divisor = tl.load(row_sums + row * L + start + tl.arange(0, T), mask=inside, other=1.0) + EPSILON
    of_y = _tile(grad + place, start, H * E, L, None, E, T, PE, tl.float32) / divisor[:, None]
    of_y = of_y.to(grad_undivided.dtype.element_ty)  # rounded, as it is multiplied
    _store_tile(grad_undivided + place, start, H * E, L, of_y, E, T, PE)
    products = of_y.to(tl.float32) * _tile(y + place, start, H * E, L, None, E, T, PE, tl.float32)
    tl.store(grad_row_sums + row * padded + start + tl.arange(0, T), -tl.sum(products, 1))


@triton.jit
def _plane(grad_sums, number, plane, token, length):
    """One of the six planes of `product_kernel`, at some tokens of a chunk."""
    return tl.load(grad_sums + number * plane + token, mask=token < length, other=0.0).to(tl.float64)


@kernel
def decay_gradients_kernel(grad, grad_weight, decay, orders, sums, grad_sums, incoming, grad_incoming, scale, H, L, C,
        N, side, plane, decay_batch, decay_head, decay_token, sums_batch, sums_head, sums_chunk, LOGITS: tl.constexpr,
        LOG_ZERO: tl.constexpr, STATE: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr, BEFORE: tl.constexpr,
        AFTER: tl.constexpr, ORDERS: tl.constexpr):
    """∂ log λ of one chunk, or of the logit of 1 − λ, and ∂ log weight of its keys if requested: (B, L, H) each. A
    token's decay is part of exclusive at all later tokens of its chunk, of inclusive at these and at its own, and of
    the chunk's sum: keys and queries decay to its end, states across it."""
    row, chunk = (tl.program_id(0) // N).to(tl.int64), (tl.program_id(0) % N).to(tl.int64)
    b, h = row // H, row % H
    plane = tl.cast(plane, tl.int64)
    total = tl.zeros((1,), tl.float64)
    if incoming is not None:
        crossing = tl.zeros((PART,), tl.float32)
        place = (row * N + chunk) * STATE
        for first in range(0, STATE, PART):
            of_state = place + first + tl.arange(0, PART)
            inside = first + tl.arange(0, PART) < STATE
            # Keys before and queries after the chunk, and the reverse.
            for direction in tl.static_range(0 if BEFORE else 1, 2 if AFTER else 1):
                S = tl.load(incoming + direction * side + of_state, mask=inside, other=0.0).to(tl.float32)
                G = tl.load(grad_incoming + (1 - direction) * side + of_state, mask=inside, other=0.0).to(tl.float32)
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
        of_key, to_end = _plane(grad_sums, 4, plane, token, length), _plane(grad_sums, 5, plane, token, length)
        inclusive += of_key
        if grad_weight is None:
            exclusive -= to_end
        else:
            inclusive -= to_end
            of_key = _plane(grad_sums, 3, plane, token, length) - of_key + to_end
        token += chunk * C
        real = token < chunk * C + length
        if orders is not None:
            token = tl.load(orders + h // (H // ORDERS) * L + token, mask=real, other=0)
        given = tl.load(decay + b * decay_batch + h * decay_head + token * decay_token, mask=real, other=0.0)
        clamped = given > -LOG_ZERO if LOGITS else given < LOG_ZERO
        own = tl.where(clamped, 0.0, total - tl.cumsum(exclusive + inclusive, 0) + inclusive)
        if LOGITS:
            own *= -1.0 / (1.0 + tl.exp(-given.to(tl.float64)))
        entry = (b * L + token) * H + h
        tl.store(grad + entry, own.to(grad.dtype.element_ty), mask=real)
        if grad_weight is not None:
            tl.store(grad_weight + entry, of_key.to(grad_weight.dtype.element_ty), mask=real)
        total -= tl.sum(exclusive + inclusive, 0)
