"""Full linear attention with a decay mask as GPU kernels, in Triton; the definition and the arguments are in linear_attention.py.

It is flash attention without the softmax: blocks of scores are made, masked and multiplied by V where they lie, and no
matrix is ever in memory. Since log M_ij is a difference of two numbers, only blocks on the diagonal need an exponential an
entry. Past keys of another block go through a point between it and the queries' block,

    M_ij = exp(before_i − before_first) · exp(before_first − before_j),    first: the first token of the queries' block,

a factor a query and one a key, neither above 1; future keys likewise through the queries' last token.

A text is cut into chunks. Inside a chunk all pairs of blocks are computed. Keys and values of other chunks arrive as D×E
states, one from the left and one from the right, which two more kernels make: one sums each chunk, one scans over chunks.
The full form is one chunk as long as the text, without states. Without decays all chunks share one state, their sum.

The backward pass computes everything again. y = (s·QKᵀ⊙M) V, so the gradients of q, k and v are such products too, of
other operands; for those of k and v, which need Mᵀ, `before` and `upto` change places. No two programs write the same number.

Letters in shape comments: B batch, H heads, L length, D head size of q and k, E head size of v, N chunks, C chunk, T block.
"""

import contextlib
import functools
import math
import re
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError:  # `covers` then says no, and no kernel is ever started
    triton = SimpleNamespace(jit=lambda function=None, **_: function or (lambda function: function))
    tl = SimpleNamespace(constexpr=None)

AVAILABLE = not isinstance(triton, SimpleNamespace)

# Sizes of q and k, and of v, that the registers of one program hold; with more, most of its numbers go through memory.
LARGEST_HEAD = {torch.bfloat16: 128, torch.float16: 64, torch.float32: 64}
_LOG_NOTHING = -60.0  # as in linear_attention.py
_BLOCK = 64  # T, the rows of a program: what a warp group of a Hopper card multiplies at once
_OTHERS = 32  # S, the tokens that they meet at a time; with more, a thread's numbers exceed its registers


def covers(q: Tensor, k: Tensor, v: Tensor, extra: int = 0) -> bool:
    """Whether the kernels compute these operands, v with so many extra columns: on an NVIDIA card since Ampere, or anywhere in
    Triton's interpreter; in bfloat16, float16 or float32, all alike; heads of up to LARGEST_HEAD, of any size."""
    return (
        AVAILABLE
        and q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
        and max(q.shape[-1], v.shape[-1] + extra) <= LARGEST_HEAD.get(q.dtype, 0)
        and min(q.numel(), v.numel()) > 0
        and _runs_on(q.device)
    )


@torch.compiler.assume_constant_result
def _runs_on(device: torch.device) -> bool:
    if not isinstance(_forward_kernel, triton.JITFunction):
        return True  # TRITON_INTERPRET=1
    return device.type == "cuda" and torch.version.hip is None and _capability(device) >= (8, 0)


_capability = functools.cache(torch.cuda.get_device_capability)


# What the kernels share. Of each token they read three numbers, side by side: high, low and half. The running sums are, in
# units of log 2, before = high + low − half and upto = high + low + half: their middle as two float32 numbers, which hold it as
# exactly as differences of neighbours need, and half of what lies between them. SIGN = −1 exchanges the two. A fourth place is
# empty, so that a token's numbers are one load.

# What varies with a batch's length: a kernel would be compiled again where such a number is 1 or a multiple of 16.
_kernel = triton.jit(do_not_specialize=["H", "L", "N", "blocks", "columns", "parts", "decay_batch", "decay_head"])


@triton.jit
def _tile(pointer, start, stride, length, mask, SIZE, T: tl.constexpr, PADDED: tl.constexpr, DOT: tl.constexpr):
    """T tokens from `start` on of a text, (length, SIZE): (T, PADDED), 0 beyond either, and where its mask, if any, is 0."""
    token, feature = tl.arange(0, T), tl.arange(0, PADDED)
    inside = (start + token < length)[:, None] & (feature < SIZE)[None, :]
    if mask is not None:
        inside &= _real(mask, start, length, T)[:, None]
    offset = token[:, None] * stride + feature[None, :]
    return tl.load(pointer + start * stride + offset, mask=inside, other=0.0).to(DOT)


@triton.jit
def _put(pointer, start, stride, length, x, SIZE, T: tl.constexpr, PADDED: tl.constexpr):
    """The way back of `_tile`."""
    token, feature = tl.arange(0, T), tl.arange(0, PADDED)
    inside = (start + token < length)[:, None] & (feature < SIZE)[None, :]
    offset = token[:, None] * stride + feature[None, :]
    tl.store(pointer + start * stride + offset, x.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _real(mask, start, length, T: tl.constexpr):
    """Which of T tokens are real, from a row of the mask."""
    token = start + tl.arange(0, T)
    return tl.load(mask + token, mask=token < length, other=0) != 0


@triton.jit
def _state(pointer, D: tl.constexpr, E: tl.constexpr, PD: tl.constexpr, PE: tl.constexpr, DOT: tl.constexpr):
    """A state, (D, E): (PD, PE), 0 beyond."""
    d, e = tl.arange(0, PD), tl.arange(0, PE)
    inside = (d < D)[:, None] & (e < E)[None, :]
    return tl.load(pointer + d[:, None] * E + e[None, :], mask=inside, other=0.0).to(DOT)


@triton.jit
def _sums(pointer, first, T: tl.constexpr, SIGN: tl.constexpr):
    """high, low and half of T tokens. Loaded as one tile: a vector would be loaded in the layout of the scores' columns,
    many times over and with a register for each."""
    token, pair = first + tl.arange(0, T), tl.arange(0, 2)
    four = tl.load(pointer + token[:, None, None] * 4 + pair[None, :, None] * 2 + pair[None, None, :])
    even, odd = tl.split(four)
    high, half = tl.split(even)
    low, _ = tl.split(odd)
    return high, low, SIGN * half


@triton.jit
def _sum(pointer, token, SIGN: tl.constexpr):
    """high, low and half of one token."""
    pointer += token * 4
    return tl.load(pointer), tl.load(pointer + 1), SIGN * tl.load(pointer + 2)


@triton.jit
def _weight(to_high, to_low, to_half, from_high, from_low, from_half):
    """What is left on the way between two running sums."""
    return tl.exp2((to_high - from_high) + (to_low - from_low) + (to_half - from_half))


@triton.jit
def _decay_mask(high, low, half, other_high, other_low, other_half):
    """M, (T, S), wherever the tokens lie: −|m_i − m_j| + h_j − h_i is its logarithm in both triangles."""
    distance = tl.abs((high[:, None] - other_high[None, :]) + (low[:, None] - other_low[None, :]))
    return tl.exp2(other_half[None, :] - half[:, None] - distance)


@triton.jit
def _mixed(x):
    """A hash of 32 bits, by Wellons' constants."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _kept(seed, i, j, DROPPED: tl.constexpr):
    """Which entries of one matrix dropout leaves, for queries i and keys j: as many of 2^32 as are not DROPPED."""
    row = _mixed(i.to(tl.uint32) + seed.to(tl.uint32))
    column = j.to(tl.uint32) * 0x9E3779B1 + (seed >> 32).to(tl.uint32)
    x = (row ^ column) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B  # the high bits, which decide, are mixed well enough
    return x >= DROPPED


@triton.jit
def _place(H, blocks, C, length, T: tl.constexpr, S: tl.constexpr):
    """Text, head, both in one, chunk, block of T rows in the chunk, and how many blocks of S tokens the chunk has."""
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    chunk, own = block // (C // T), block % (C // T)
    count = tl.cdiv(tl.minimum(C, length - chunk * C), S)
    return (row // H).to(tl.int64), (row % H).to(tl.int64), row.to(tl.int64), chunk.to(tl.int64), own, count


# Running sums and states


@_kernel
def _sums_kernel(
    sums, log_decay, seq_idx, H, L, C, N,
    decay_batch, decay_head, decay_token,
    LOG_NOTHING: tl.constexpr, LOG2E: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """high, low and half of one chunk, with sums from its start on: (B or 1, H, N·C, 4)."""
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
            decay = tl.maximum(decay, LOG_NOTHING, propagate_nan=tl.PropagateNan.ALL)
        step = decay
        if seq_idx is not None:
            number = tl.load(seq_idx + b * L + token, mask=inside, other=0)
            previous = tl.load(seq_idx + b * L + token - 1, mask=inside & (token > 0), other=0)
            step += tl.where(inside & (token > 0) & (number != previous), LOG_NOTHING, 0.0)
        upto = so_far + tl.cumsum(step, 0)
        so_far += tl.sum(step, 0)
        half = (decay * (0.5 * LOG2E)).to(tl.float32)
        middle = upto * LOG2E - half.to(tl.float64)
        high = middle.to(tl.float32)
        out = sums + (row.to(tl.int64) * N * C + token) * 4
        tl.store(out, high, mask=local < C)
        tl.store(out + 1, (middle - high.to(tl.float64)).to(tl.float32), mask=local < C)
        tl.store(out + 2, half, mask=local < C)


@_kernel
def _states_kernel(
    k, v, mask, sums, states, H, L, C, N, columns, side,
    k_batch, k_head, k_token, v_batch, v_head, v_token, sums_batch, sums_head, sums_chunk,
    D: tl.constexpr, E: tl.constexpr, T: tl.constexpr, S: tl.constexpr, PD: tl.constexpr, PE: tl.constexpr,
    SIGN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ_j k_j v_jᵀ of one chunk, as it arrives after the chunk's end and before its start: (2, B·H, N, D, E).

    Without decays the two are one: (1, B·H, N, D, E). A program makes PE columns.
    """
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
        end_high, end_low, end_half = _sum(sums, C - 1, 1)
    for block in range(0, tl.cdiv(end - begin, S)):
        start = begin + block * S
        K = _tile(k, start, k_token, L, mask, D, S, PD, DOT)
        V = _tile(v, start, v_token, L, None, E - column, S, PE, DOT)
        if sums is None:
            rightward = tl.dot(tl.trans(K), V, rightward, input_precision=PRECISION)
        else:
            high, low, half = _sums(sums, block * S, S, SIGN)
            to_end = _weight(end_high, end_low, end_half, high, low, -half)
            from_start = tl.exp2(high + low + half)
            rightward = tl.dot(tl.trans((K * to_end[:, None]).to(DOT)), V, rightward, input_precision=PRECISION)
            leftward = tl.dot(tl.trans((K * from_start[:, None]).to(DOT)), V, leftward, input_precision=PRECISION)
    d, e = tl.arange(0, PD), tl.arange(0, PE)
    inside = (d < D)[:, None] & (column + e < E)[None, :]
    out = states + (row * N + chunk) * D * E + column + d[:, None] * E + e[None, :]
    tl.store(out, rightward, mask=inside)
    if sums is not None:
        tl.store(out + side, leftward, mask=inside)


@_kernel
def _scan_kernel(
    states, received, sums, H, C, N, parts, side, sums_batch, sums_head, sums_chunk,
    SIZE: tl.constexpr, PART: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """From each chunk's own states to those that it receives, from the left and from the right: (2, B·H, N, D, E).

    A program scans PART of a state's SIZE = D·E entries in one direction.
    """
    part, rest = tl.program_id(0) % parts, tl.program_id(0) // parts
    direction, row = (rest % 2).to(tl.int64), (rest // 2).to(tl.int64)
    entry = part * PART + tl.arange(0, PART)
    place = direction * side + row * N * SIZE + entry
    sums += row // H * sums_batch + row % H * sums_head
    state = tl.zeros((PART,), tl.float32)
    high, low, half = _sum(sums + direction * (N - 1) * sums_chunk, C - 1, 1)
    for step in tl.range(0, N, num_stages=STAGES):
        chunk = direction * (N - 1 - step) + (1 - direction) * step
        own = tl.load(states + place + chunk * SIZE, mask=entry < SIZE, other=0.0)
        after = tl.minimum(step + 1, N - 1)  # whose sum is on its way while this chunk is worked on
        following = direction * (N - 1 - after) + (1 - direction) * after
        high2, low2, half2 = _sum(sums + following * sums_chunk, C - 1, 1)
        tl.store(received + place + chunk * SIZE, state.to(received.dtype.element_ty), mask=entry < SIZE)
        state = state * tl.exp2(high + low + half) + own
        high, low, half = high2, low2, half2


# Outputs and gradients. A program has T rows of the result: queries, or keys for the gradients of k and v. What comes from before
# the rows' block is gathered as it is at the block's first token, and then decayed to each row at once; what comes from after it
# is decayed from the block's last token to each row block by block, since there is no room for a second sum.


@triton.jit
def _attend(
    total, Q, k, v, mask, seed, start, first, length, weight, k_token, v_token,
    D: tl.constexpr, E: tl.constexpr, S: tl.constexpr, PD: tl.constexpr, PE: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, DROPPED: tl.constexpr,
):  # fmt: skip
    """total + (QKᵀ ⊙ weight) V over one block of keys; weight is (1, S) or (T, S). Queries from `start`, keys from `first` on."""
    K = _tile(k, first, k_token, length, mask, D, S, PD, DOT)
    V = _tile(v, first, v_token, length, None, E, S, PE, DOT)
    scores = tl.dot(Q, tl.trans(K), input_precision=PRECISION) * weight
    if seed is not None:
        i, j = start + tl.arange(0, Q.shape[0])[:, None], first + tl.arange(0, S)[None, :]
        scores = tl.where(_kept(seed, i, j, DROPPED), scores, 0.0)
    return tl.dot(scores.to(DOT), V, total, input_precision=PRECISION)


@_kernel
def _forward_kernel(
    q, k, v, y, mask, seed, sums, received, scale, H, L, C, N, blocks, side,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, y_batch, y_head, y_token,
    sums_batch, sums_head, sums_chunk,
    D: tl.constexpr, E: tl.constexpr, T: tl.constexpr, S: tl.constexpr, PD: tl.constexpr, PE: tl.constexpr,
    INSIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, DROPPED: tl.constexpr,
):  # fmt: skip
    """The output of one block of queries."""
    b, h, row, chunk, own, count = _place(H, blocks, C, L, T, S)
    begin = chunk * C
    start = begin + own * T
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    if mask is not None:
        mask += b * L
    if seed is not None:
        seed = tl.load(seed + row)
    Q = _tile(q + b * q_batch + h * q_head, start, q_token, L, None, D, T, PD, DOT)
    left = tl.zeros((T, PE), tl.float32)
    if received is not None:
        received += (row if sums is None else row * N + chunk) * D * E
        left = tl.dot(Q, _state(received, D, E, PD, PE, DOT), input_precision=PRECISION)
    if sums is None:
        if INSIDE:
            for other in range(0, count):
                left = _attend(
                    left, Q, k, v, mask, seed, start, begin + other * S, L, 1.0, k_token, v_token,
                    D, E, S, PD, PE, DOT, PRECISION, DROPPED,
                )  # fmt: skip
        out = left
    else:
        sums += b * sums_batch + h * sums_head + chunk * sums_chunk
        high, low, half = _sums(sums, own * T, T, 1)
        high0, low0, half0 = _sum(sums, own * T, 1)  # of the first token
        high1, low1, half1 = _sum(sums, own * T + T - 1, 1)  # of the last

        if received is not None:
            left *= tl.exp2(high0 + low0 - half0)
        for other in range(0, own * (T // S)):
            high2, low2, half2 = _sums(sums, other * S, S, 1)
            weight = _weight(high0, low0, -half0, high2, low2, -half2)[None, :]
            left = _attend(
                left, Q, k, v, mask, seed, start, begin + other * S, L, weight, k_token, v_token,
                D, E, S, PD, PE, DOT, PRECISION, DROPPED,
            )  # fmt: skip
        out = left * _weight(high, low, -half, high0, low0, -half0)[:, None]

        to_last = _weight(high1, low1, half1, high, low, half)
        if received is not None:
            end_high, end_low, end_half = _sum(sums, C - 1, 1)
            right = tl.dot(Q, _state(received + side, D, E, PD, PE, DOT), input_precision=PRECISION)
            out += right * (_weight(end_high, end_low, end_half, high1, low1, half1) * to_last)[:, None]
        for other in range((own + 1) * (T // S), count):
            high2, low2, half2 = _sums(sums, other * S, S, 1)
            weight = to_last[:, None] * _weight(high2, low2, half2, high1, low1, half1)[None, :]
            out = _attend(
                out, Q, k, v, mask, seed, start, begin + other * S, L, weight, k_token, v_token,
                D, E, S, PD, PE, DOT, PRECISION, DROPPED,
            )  # fmt: skip

        for other in range(own * (T // S), tl.minimum((own + 1) * (T // S), count)):
            high2, low2, half2 = _sums(sums, other * S, S, 1)
            weight = _decay_mask(high, low, half, high2, low2, half2)
            out = _attend(
                out, Q, k, v, mask, seed, start, begin + other * S, L, weight, k_token, v_token,
                D, E, S, PD, PE, DOT, PRECISION, DROPPED,
            )  # fmt: skip
    _put(y + b * y_batch + h * y_head, start, y_token, L, out * scale, E, T, PE)


@triton.jit
def _query_gradients(
    total, Q, dY, k, v, mask, seed, start, first, length, weight, k_token, v_token,
    D: tl.constexpr, E: tl.constexpr, S: tl.constexpr, PD: tl.constexpr, PE: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, DROPPED: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
    """total + (dY Vᵀ ⊙ weight) K over one block of keys, and ∂/∂ log M there, (T, S), if DECAYS."""
    K = _tile(k, first, k_token, length, mask, D, S, PD, DOT)
    V = _tile(v, first, v_token, length, None, E, S, PE, DOT)
    grad = tl.dot(dY, tl.trans(V), input_precision=PRECISION) * weight
    if seed is not None:
        i, j = start + tl.arange(0, Q.shape[0])[:, None], first + tl.arange(0, S)[None, :]
        grad = tl.where(_kept(seed, i, j, DROPPED), grad, 0.0)
    pairs = grad
    if DECAYS:
        pairs = tl.dot(Q, tl.trans(K), input_precision=PRECISION) * grad
    return tl.dot(grad.to(DOT), K, total, input_precision=PRECISION), pairs


@_kernel
def _query_gradients_kernel(
    q, k, v, dy, dq, mask, seed, sums, received, grad_sums, scale, H, L, C, N, blocks, side, grad_plane,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    dy_batch, dy_head, dy_token, dq_batch, dq_head, dq_token, sums_batch, sums_head, sums_chunk,
    D: tl.constexpr, E: tl.constexpr, T: tl.constexpr, S: tl.constexpr, PD: tl.constexpr, PE: tl.constexpr,
    INSIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, DROPPED: tl.constexpr,
):  # fmt: skip
    """∂q of one block of queries, and their part of the gradients of the running sums, if `grad_sums` is there."""
    DECAYS: tl.constexpr = grad_sums is not None
    grad_plane = tl.cast(grad_plane, tl.int64)
    b, h, row, chunk, own, count = _place(H, blocks, C, L, T, S)
    begin = chunk * C
    start = begin + own * T
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    if mask is not None:
        mask += b * L
    if seed is not None:
        seed = tl.load(seed + row)
    Q = _tile(q + b * q_batch + h * q_head, start, q_token, L, None, D, T, PD, DOT)
    dY = _tile(dy + b * dy_batch + h * dy_head, start, dy_token, L, None, E, T, PE, DOT)
    left = tl.zeros((T, PD), tl.float32)
    if received is not None:
        received += (row if sums is None else row * N + chunk) * D * E
        left = tl.dot(dY, tl.trans(_state(received, D, E, PD, PE, DOT)), input_precision=PRECISION)
    if sums is None:
        if INSIDE:
            for other in range(0, count):
                left, _ = _query_gradients(
                    left, Q, dY, k, v, mask, seed, start, begin + other * S, L, 1.0, k_token, v_token,
                    D, E, S, PD, PE, DOT, PRECISION, DROPPED, DECAYS,
                )  # fmt: skip
        out = left
    else:
        sums += b * sums_batch + h * sums_head + chunk * sums_chunk
        high, low, half = _sums(sums, own * T, T, 1)
        high0, low0, half0 = _sum(sums, own * T, 1)
        high1, low1, half1 = _sum(sums, own * T + T - 1, 1)
        past, future, until_end = tl.zeros((T,), tl.float32), tl.zeros((T,), tl.float32), tl.zeros((T,), tl.float32)

        if received is not None:
            left *= tl.exp2(high0 + low0 - half0)
            if DECAYS:
                past = tl.sum(Q * left, 1)
        for other in range(0, own * (T // S)):
            high2, low2, half2 = _sums(sums, other * S, S, 1)
            weight = _weight(high0, low0, -half0, high2, low2, -half2)[None, :]
            left, pairs = _query_gradients(
                left, Q, dY, k, v, mask, seed, start, begin + other * S, L, weight, k_token, v_token,
                D, E, S, PD, PE, DOT, PRECISION, DROPPED, DECAYS,
            )  # fmt: skip
            if DECAYS:
                past += tl.sum(pairs, 1)
        from_first = _weight(high, low, -half, high0, low0, -half0)
        out = left * from_first[:, None]
        past *= from_first

        to_last = _weight(high1, low1, half1, high, low, half)
        if received is not None:
            end_high, end_low, end_half = _sum(sums, C - 1, 1)
            right = tl.dot(dY, tl.trans(_state(received + side, D, E, PD, PE, DOT)), input_precision=PRECISION)
            right *= (_weight(end_high, end_low, end_half, high1, low1, half1) * to_last)[:, None]
            out += right
            if DECAYS:
                until_end = tl.sum(Q * right, 1)
        for other in range((own + 1) * (T // S), count):
            high2, low2, half2 = _sums(sums, other * S, S, 1)
            weight = to_last[:, None] * _weight(high2, low2, half2, high1, low1, half1)[None, :]
            out, pairs = _query_gradients(
                out, Q, dY, k, v, mask, seed, start, begin + other * S, L, weight, k_token, v_token,
                D, E, S, PD, PE, DOT, PRECISION, DROPPED, DECAYS,
            )  # fmt: skip
            if DECAYS:
                future += tl.sum(pairs, 1)

        i, j = own * T + tl.arange(0, T), tl.arange(0, S)
        for other in range(own * (T // S), tl.minimum((own + 1) * (T // S), count)):
            high2, low2, half2 = _sums(sums, other * S, S, 1)
            weight = _decay_mask(high, low, half, high2, low2, half2)
            out, pairs = _query_gradients(
                out, Q, dY, k, v, mask, seed, start, begin + other * S, L, weight, k_token, v_token,
                D, E, S, PD, PE, DOT, PRECISION, DROPPED, DECAYS,
            )  # fmt: skip
            if DECAYS:
                past += tl.sum(tl.where(i[:, None] > other * S + j[None, :], pairs, 0.0), 1)
                future += tl.sum(tl.where(i[:, None] < other * S + j[None, :], pairs, 0.0), 1)
        if DECAYS:
            grad_sums += row * N * C + start + tl.arange(0, T)
            tl.store(grad_sums, past * scale)
            tl.store(grad_sums + grad_plane, -future * scale)
            tl.store(grad_sums + 2 * grad_plane, until_end * scale)
    _put(dq + b * dq_batch + h * dq_head, start, dq_token, L, out * scale, D, T, PD)


@triton.jit
def _key_gradients(
    total_k, total_v, K, V, q, dy, seed, start, first, length, weight, q_token, dy_token,
    D: tl.constexpr, E: tl.constexpr, S: tl.constexpr, PD: tl.constexpr, PE: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, DROPPED: tl.constexpr,
):  # fmt: skip
    """total_k + (V dYᵀ ⊙ weight) Q and total_v + (K Qᵀ ⊙ weight) dY over one block of queries, and ∂/∂ log Mᵀ there, (T, S)."""
    Q = _tile(q, first, q_token, length, None, D, S, PD, DOT)
    dY = _tile(dy, first, dy_token, length, None, E, S, PE, DOT)
    if seed is not None:
        i, j = first + tl.arange(0, S)[None, :], start + tl.arange(0, K.shape[0])[:, None]
        weight = tl.where(_kept(seed, i, j, DROPPED), weight, 0.0)
    scores = tl.dot(K, tl.trans(Q), input_precision=PRECISION) * weight
    total_v = tl.dot(scores.to(DOT), dY, total_v, input_precision=PRECISION)
    grad = tl.dot(V, tl.trans(dY), input_precision=PRECISION)
    total_k = tl.dot((grad * weight).to(DOT), Q, total_k, input_precision=PRECISION)
    return total_k, total_v, scores * grad


@_kernel
def _key_gradients_kernel(
    q, k, v, dy, dk, dv, mask, seed, sums, received, grad_sums, scale, H, L, C, N, blocks, side, grad_plane,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    dy_batch, dy_head, dy_token, dk_batch, dk_head, dk_token, dv_batch, dv_head, dv_token,
    sums_batch, sums_head, sums_chunk,
    D: tl.constexpr, E: tl.constexpr, T: tl.constexpr, S: tl.constexpr, PD: tl.constexpr, PE: tl.constexpr,
    INSIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, DROPPED: tl.constexpr,
):  # fmt: skip
    """∂k and ∂v of one block of keys, and their part of the gradients of the running sums. `received`: states of q and dy."""
    DECAYS: tl.constexpr = grad_sums is not None
    grad_plane = tl.cast(grad_plane, tl.int64)
    b, h, row, chunk, own, count = _place(H, blocks, C, L, T, S)
    begin = chunk * C
    start = begin + own * T
    q += b * q_batch + h * q_head
    dy += b * dy_batch + h * dy_head
    if mask is not None:
        mask += b * L
    if seed is not None:
        seed = tl.load(seed + row)
    K = _tile(k + b * k_batch + h * k_head, start, k_token, L, None, D, T, PD, DOT)
    if mask is not None:  # after the load, which costs fewer registers here
        K = tl.where(_real(mask, start, L, T)[:, None], K, 0.0).to(DOT)
    V = _tile(v + b * v_batch + h * v_head, start, v_token, L, None, E, T, PE, DOT)
    left_k, left_v = tl.zeros((T, PD), tl.float32), tl.zeros((T, PE), tl.float32)
    if received is not None:
        received += (row if sums is None else row * N + chunk) * D * E
        state = _state(received, D, E, PD, PE, DOT)
        left_k = tl.dot(V, tl.trans(state), input_precision=PRECISION)
        left_v = tl.dot(K, state, input_precision=PRECISION)
    if sums is None:
        if INSIDE:
            for other in range(0, count):
                left_k, left_v, _ = _key_gradients(
                    left_k, left_v, K, V, q, dy, seed, start, begin + other * S, L, 1.0, q_token, dy_token,
                    D, E, S, PD, PE, DOT, PRECISION, DROPPED,
                )  # fmt: skip
        out_k, out_v = left_k, left_v
    else:
        sums += b * sums_batch + h * sums_head + chunk * sums_chunk
        high, low, half = _sums(sums, own * T, T, -1)
        high0, low0, half0 = _sum(sums, own * T, -1)
        high1, low1, half1 = _sum(sums, own * T + T - 1, -1)
        past, future, to_end = tl.zeros((T,), tl.float32), tl.zeros((T,), tl.float32), tl.zeros((T,), tl.float32)

        if received is not None:
            from_start = tl.exp2(high0 + low0 - half0)
            left_k *= from_start
            left_v *= from_start
            if DECAYS:
                past = tl.sum(K * left_k, 1)
        for other in range(0, own * (T // S)):
            high2, low2, half2 = _sums(sums, other * S, S, -1)
            weight = _weight(high0, low0, -half0, high2, low2, -half2)[None, :]
            left_k, left_v, pairs = _key_gradients(
                left_k, left_v, K, V, q, dy, seed, start, begin + other * S, L, weight, q_token, dy_token,
                D, E, S, PD, PE, DOT, PRECISION, DROPPED,
            )  # fmt: skip
            if DECAYS:
                past += tl.sum(pairs, 1)
        from_first = _weight(high, low, -half, high0, low0, -half0)
        out_k, out_v = left_k * from_first[:, None], left_v * from_first[:, None]
        past *= from_first

        to_last = _weight(high1, low1, half1, high, low, half)
        if received is not None:
            end_high, end_low, end_half = _sum(sums, C - 1, 1)
            until_end = (_weight(end_high, end_low, end_half, high1, low1, half1) * to_last)[:, None]
            state = _state(received + side, D, E, PD, PE, DOT)
            out_v += tl.dot(K, state, input_precision=PRECISION) * until_end
            right = tl.dot(V, tl.trans(state), input_precision=PRECISION) * until_end
            out_k += right
            if DECAYS:
                to_end = tl.sum(K * right, 1)
        for other in range((own + 1) * (T // S), count):
            high2, low2, half2 = _sums(sums, other * S, S, -1)
            weight = to_last[:, None] * _weight(high2, low2, half2, high1, low1, half1)[None, :]
            out_k, out_v, pairs = _key_gradients(
                out_k, out_v, K, V, q, dy, seed, start, begin + other * S, L, weight, q_token, dy_token,
                D, E, S, PD, PE, DOT, PRECISION, DROPPED,
            )  # fmt: skip
            if DECAYS:
                future += tl.sum(pairs, 1)

        i, j = own * T + tl.arange(0, T), tl.arange(0, S)
        for other in range(own * (T // S), tl.minimum((own + 1) * (T // S), count)):
            high2, low2, half2 = _sums(sums, other * S, S, -1)
            weight = _decay_mask(high, low, half, high2, low2, half2)
            out_k, out_v, pairs = _key_gradients(
                out_k, out_v, K, V, q, dy, seed, start, begin + other * S, L, weight, q_token, dy_token,
                D, E, S, PD, PE, DOT, PRECISION, DROPPED,
            )  # fmt: skip
            if DECAYS:
                past += tl.sum(tl.where(i[:, None] > other * S + j[None, :], pairs, 0.0), 1)
                future += tl.sum(tl.where(i[:, None] < other * S + j[None, :], pairs, 0.0), 1)
        if DECAYS:
            grad_sums += 3 * grad_plane + row * N * C + start + tl.arange(0, T)
            tl.store(grad_sums, -future * scale)
            tl.store(grad_sums + grad_plane, past * scale)
            tl.store(grad_sums + 2 * grad_plane, to_end * scale)
    if mask is not None:
        out_k = tl.where(_real(mask, start, L, T)[:, None], out_k, 0.0)
    _put(dk + b * dk_batch + h * dk_head, start, dk_token, L, out_k * scale, D, T, PD)
    _put(dv + b * dv_batch + h * dv_head, start, dv_token, L, out_v * scale, E, T, PE)


@_kernel
def _decay_gradients_kernel(
    log_decay, sums, grad_sums, received, grad_received, grad, scale, H, L, C, N, side, grad_plane,
    decay_batch, decay_head, decay_token, sums_batch, sums_head, sums_chunk,
    LOG_NOTHING: tl.constexpr, STATE: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """∂ log_decay of one chunk, (B, H, L).

    A decay is in `before` of all later tokens of its chunk, in `upto` of itself and of these, and in the sum over the chunk,
    which leads keys and queries to its end and carries states across.
    """
    row, chunk = (tl.program_id(0) // N).to(tl.int64), (tl.program_id(0) % N).to(tl.int64)
    b, h = row // H, row % H
    grad_plane = tl.cast(grad_plane, tl.int64)
    total = tl.zeros((1,), tl.float64)
    if received is not None:
        crossing = tl.zeros((PART,), tl.float32)
        place = (row * N + chunk) * STATE
        for first in range(0, STATE, PART):
            entry = place + first + tl.arange(0, PART)
            inside = first + tl.arange(0, PART) < STATE
            for direction in tl.static_range(2):  # keys before and queries after the chunk, and the other way around
                S = tl.load(received + direction * side + entry, mask=inside, other=0.0).to(tl.float32)
                G = tl.load(grad_received + (1 - direction) * side + entry, mask=inside, other=0.0).to(tl.float32)
                crossing += S * G
        high, low, half = _sum(sums + b * sums_batch + h * sums_head + chunk * sums_chunk, C - 1, 1)
        total += tl.sum(crossing, 0).to(tl.float64) * tl.exp2(high + low + half) * scale
    grad_sums += row * N * C + chunk * C
    length = tl.minimum(C, L - chunk * C)
    for first in range(0, length, SIZE):
        local = first + tl.arange(0, SIZE)
        for number in tl.static_range(2):
            p = grad_sums + number * 3 * grad_plane + local
            before = tl.load(p, mask=local < length, other=0.0).to(tl.float64)
            upto = tl.load(p + grad_plane, mask=local < length, other=0.0).to(tl.float64)
            total += tl.sum(before + upto, 0)
    for first in range(0, length, SIZE):
        local = first + tl.arange(0, SIZE)
        inside = local < length
        p = grad_sums + local
        before = tl.load(p, mask=inside, other=0.0).to(tl.float64)
        upto = tl.load(p + grad_plane, mask=inside, other=0.0).to(tl.float64)
        upto -= tl.load(p + 2 * grad_plane, mask=inside, other=0.0).to(tl.float64)
        before += tl.load(p + 3 * grad_plane, mask=inside, other=0.0).to(tl.float64)
        upto += tl.load(p + 4 * grad_plane, mask=inside, other=0.0).to(tl.float64)
        before -= tl.load(p + 5 * grad_plane, mask=inside, other=0.0).to(tl.float64)
        token = chunk * C + local
        decay = tl.load(log_decay + b * decay_batch + h * decay_head + token * decay_token, mask=inside, other=0.0)
        own = tl.where(decay < LOG_NOTHING, 0.0, total - tl.cumsum(before + upto, 0) + upto)
        tl.store(grad + row * L + token, own.to(grad.dtype.element_ty), mask=inside)
        total -= tl.sum(before + upto, 0)


# Starting the kernels


def fused_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    mask: Tensor | None,
    seq_idx: Tensor | None,
    scale: float,
    chunk_size: int | None,
    dropout_p: float = 0.0,
) -> Tensor:
    """`linear_attention` of operands that `covers` accepts, in the full form where `chunk_size` is None. (B, H, L, E)

    Only the full form has dropout, with 0 ≤ dropout_p < 1.
    """
    seed = None
    if dropout_p > 0:  # a number a matrix; what it drops, both passes find out
        seed = torch.randint(2**62, q.shape[:2], device=q.device)
    arguments = q, k, v, log_decay, mask, seq_idx, seed, scale, chunk_size or 0, dropout_p
    if torch.compiler.is_compiling() or type(q) is not Tensor:
        return _forward(*arguments)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments[:4]):
        return _Eager.apply(*arguments)
    return _start_forward(*arguments)[0]


class _Plan:
    """Shapes, strides and types of one call, which every kernel takes from here."""

    def __init__(
        self, shape: torch.Size, E: int, dtype: torch.dtype, device: torch.device, with_sums: bool, alike: bool,
        chunk_size: int, dot: "tl.dtype", precision: str,
    ):  # fmt: skip
        """shape: q's. with_sums: there are decays, or packed sequences. alike: the numbers of one chunk and text are those of all."""
        self.B, self.H, self.L, self.D = shape
        self.E = E
        self.T = min(_BLOCK, max(16, triton.next_power_of_2(self.L)))
        self.PD, self.PE = (max(16, triton.next_power_of_2(size)) for size in (self.D, self.E))
        self.S = min(_OTHERS if max(self.PD, self.PE) <= 64 else _OTHERS // 2, self.T)
        self.inside = with_sums or chunk_size == 0
        if not self.inside:
            chunk_size *= 4  # nothing is computed inside chunks, and fewer states have to be added up
        self.C = triton.cdiv(min(chunk_size or self.L, self.L), self.T) * self.T
        self.N = triton.cdiv(self.L, self.C)
        self.with_states = self.N > 1 or not self.inside
        self.blocks = triton.cdiv(self.L, self.T)
        self.sums_shape = (1, self.H, self.C, 4) if alike else (self.B, self.H, self.N * self.C, 4)
        head = 4 * self.sums_shape[2]
        self.sums_strides = (0, head, 0) if alike else (self.H * head, head, 4 * self.C)
        self.side = self.B * self.H * self.N * self.D * self.E
        self.device, self.dtype = device, dtype
        self.sizes = {"D": self.D, "E": self.E, "T": self.T, "S": self.S, "PD": self.PD, "PE": self.PE}
        self.dots = {"DOT": dot, "PRECISION": precision}
        exact = dot == tl.float32 and precision == "ieee"  # not in tensor cores, and more numbers than registers
        self.starts = {
            "num_warps": max(1, self.T // (8 if exact else 16)),  # each multiplies so many rows
            "num_stages": 2 if dot == tl.float32 else 3,
        }

    def empty_like_tokens(self, size: int) -> Tensor:
        """(B, H, L, size), with the heads of a token side by side, as the layer after attention reads them."""
        return torch.empty(self.B, self.L, self.H, size, dtype=self.dtype, device=self.device).transpose(1, 2)


_plan = functools.lru_cache(256)(_Plan)  # a step's layers are alike


def _multiplied_as(dtype: torch.dtype) -> tuple["tl.dtype", str]:
    """The type of the operands of matrix products, and their precision. Sums are in float32.

    float16 goes as TF32, which holds all its digits, since scores and states can exceed float16's range. Triton's interpreter
    cannot multiply bfloat16.
    """
    if dtype == torch.bfloat16 and isinstance(_forward_kernel, triton.JITFunction):
        return tl.bfloat16, "ieee"
    if dtype == torch.float32 and not _tf32_is_allowed():
        return tl.float32, "ieee"
    return tl.float32, "tf32"


def _tf32_is_allowed() -> bool:
    """As for PyTorch's own products of float32 matrices; a newer PyTorch speaks of it under another name."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return torch.backends.cuda.matmul.allow_tf32 if precision is None else precision == "tf32"


def _start(kernel, programs: int, q: Tensor, *arguments, **options) -> None:
    elsewhere = q.is_cuda and q.get_device() != torch.cuda.current_device()  # Triton starts kernels on the current card
    with torch.cuda.device(q.device) if elsewhere else contextlib.nullcontext():
        kernel[(programs,)](q, *arguments, **options)


def _tokens(x: Tensor) -> Tensor:
    """x, (B, H, L, ·), read where it lies if the features of a token lie side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _decay_strides(log_decay: Tensor | None) -> tuple[int, int, int]:
    if log_decay is None:
        return 0, 0, 0
    return log_decay.stride() if log_decay.ndim == 3 else (0, log_decay.stride(0), 0)


def _running_sums(plan: _Plan, log_decay: Tensor | None, seq_idx: Tensor | None) -> Tensor | None:
    """The running sums, if there are any."""
    if log_decay is None and seq_idx is None:
        return None
    sums = torch.empty(plan.sums_shape, dtype=torch.float32, device=plan.device)
    N = plan.sums_shape[2] // plan.C
    _start(
        _sums_kernel, plan.sums_shape[0] * plan.H * N, sums, log_decay, seq_idx, plan.H, plan.L, plan.C, N,
        *_decay_strides(log_decay), LOG_NOTHING=_LOG_NOTHING, LOG2E=math.log2(math.e),
        SIZE=min(triton.next_power_of_2(plan.C), 1024), num_warps=4,
    )  # fmt: skip
    return sums


def _received(
    plan: _Plan, k: Tensor, v: Tensor, mask: Tensor | None, sums: Tensor | None, sign: int = 1
) -> Tensor | None:
    """The states in which each chunk finds all earlier and all later ones, (2, B·H, N, D, E); one for all without decays,
    (1, B·H, 1, D, E). sign: −1 for what flows back from queries, of q and dy in place of k and v."""
    if not plan.with_states:
        return None
    rows, D, E, N = plan.B * plan.H, plan.D, plan.E, plan.N
    states = torch.empty(1 if sums is None else 2, rows, N, D, E, dtype=torch.float32, device=plan.device)
    PE = min(plan.PE, 64)
    columns = triton.cdiv(E, PE)
    _start(
        _states_kernel, rows * N * columns, k, v, mask, sums, states, plan.H, plan.L, plan.C, N, columns, plan.side,
        *k.stride()[:3], *v.stride()[:3], *plan.sums_strides, **{**plan.sizes, "PE": PE},
        SIGN=sign, **plan.dots, **plan.starts,
    )  # fmt: skip
    kept = plan.dtype if plan.dtype == torch.bfloat16 else torch.float32  # as they are multiplied
    if sums is None:
        return states.sum(2, keepdim=True).to(kept)
    received = torch.empty_like(states, dtype=kept)
    part = 256
    parts = triton.cdiv(D * E, part)
    _start(
        _scan_kernel, rows * 2 * parts, states, received, sums, plan.H, plan.C, N, parts, plan.side,
        *plan.sums_strides, SIZE=D * E, PART=part, STAGES=4, num_warps=2,
    )  # fmt: skip
    return received


def _start_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    mask: Tensor | None,
    seq_idx: Tensor | None,
    seed: Tensor | None,
    scale: float,
    chunk_size: int,
    dropout_p: float,
) -> tuple[Tensor, Tensor | None]:
    """The output, and the running sums, if there are any."""
    plan, q, k, v, mask, seq_idx = _prepare(q, k, v, log_decay, mask, seq_idx, chunk_size)
    sums = _running_sums(plan, log_decay, seq_idx)
    y = plan.empty_like_tokens(plan.E)
    _start(
        _forward_kernel, plan.B * plan.H * plan.blocks, q, k, v, y, mask, seed, sums, _received(plan, k, v, mask, sums),
        scale / (1 - dropout_p), plan.H, plan.L, plan.C, plan.N, plan.blocks, plan.side,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *y.stride()[:3], *plan.sums_strides,
        **plan.sizes, INSIDE=plan.inside, **plan.dots, DROPPED=round(dropout_p * 2**32), **plan.starts,
    )  # fmt: skip
    return y, sums


def _start_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    mask: Tensor | None,
    seq_idx: Tensor | None,
    seed: Tensor | None,
    scale: float,
    chunk_size: int,
    dropout_p: float,
    with_decays: bool,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """∂q, ∂k, ∂v and ∂log_decay, which has no entries unless with_decays. sums: of the forward pass, if they were kept."""
    plan, q, k, v, mask, seq_idx = _prepare(q, k, v, log_decay, mask, seq_idx, chunk_size)
    dy = _tokens(dy)
    scale /= 1 - dropout_p
    if sums is None:
        sums = _running_sums(plan, log_decay, seq_idx)
    received, grad_received = _received(plan, k, v, mask, sums), _received(plan, q, dy, None, sums, sign=-1)
    dq, dk, dv = plan.empty_like_tokens(plan.D), plan.empty_like_tokens(plan.D), plan.empty_like_tokens(plan.E)
    grad_sums, grad_plane = None, plan.B * plan.H * plan.N * plan.C
    if with_decays:
        grad_sums = torch.empty(6, grad_plane, dtype=torch.float32, device=plan.device)
    shape = plan.H, plan.L, plan.C, plan.N, plan.blocks, plan.side, grad_plane
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dy.stride()[:3]
    options = {**plan.sizes, "INSIDE": plan.inside, **plan.dots, "DROPPED": round(dropout_p * 2**32), **plan.starts}
    _start(
        _query_gradients_kernel, plan.B * plan.H * plan.blocks, q, k, v, dy, dq, mask, seed, sums, received, grad_sums, scale,
        *shape, *strides, *dq.stride()[:3], *plan.sums_strides, **options,
    )  # fmt: skip
    _start(
        _key_gradients_kernel, plan.B * plan.H * plan.blocks, q, k, v, dy, dk, dv, mask, seed, sums, grad_received, grad_sums, scale,
        *shape, *strides, *dk.stride()[:3], *dv.stride()[:3], *plan.sums_strides, **options,
    )  # fmt: skip
    if not with_decays:
        return dq, dk, dv, q.new_empty(0)
    grad = torch.empty(
        plan.B, plan.H, plan.L, device=plan.device, dtype=log_decay.dtype if log_decay.ndim == 3 else torch.float64
    )
    _start(
        _decay_gradients_kernel, plan.B * plan.H * plan.N, log_decay, sums, grad_sums, received, grad_received, grad, scale,
        plan.H, plan.L, plan.C, plan.N, plan.side, grad_plane,
        *_decay_strides(log_decay), *plan.sums_strides, LOG_NOTHING=_LOG_NOTHING,
        STATE=plan.D * plan.E, PART=1024, SIZE=min(triton.next_power_of_2(plan.C), 1024), num_warps=4,
    )  # fmt: skip
    return dq, dk, dv, grad if log_decay.ndim == 3 else grad.sum((0, 2)).to(log_decay.dtype)


def _prepare(q, k, v, log_decay, mask, seq_idx, chunk_size):
    """The plan of a call, and its tensors as the kernels read them."""
    with_sums = log_decay is not None or seq_idx is not None
    alike = seq_idx is None and log_decay is not None and log_decay.ndim == 1
    plan = _plan(q.shape, v.shape[-1], q.dtype, q.device, with_sums, alike, chunk_size, *_multiplied_as(q.dtype))
    mask = None if mask is None else mask.contiguous().view(torch.uint8)
    return plan, _tokens(q), _tokens(k), _tokens(v), mask, None if seq_idx is None else seq_idx.contiguous()


def _gradients(ctx, backward, dy: Tensor) -> tuple[Tensor | None, ...]:
    with_decays = ctx.needs_input_grad[3]
    *operands, sums = ctx.saved_tensors  # read once: a checkpoint gives them a single time
    *grads, d_decay = backward(dy, *operands, *ctx.numbers, with_decays, sums)
    return *grads, d_decay if with_decays else None, *[None] * 6


class _Eager(torch.autograd.Function):
    """The operator outside of torch.compile, where PyTorch needs longer to find an operator of its own than to start these kernels."""

    @staticmethod
    def forward(ctx, *arguments):
        y, sums = _start_forward(*arguments)
        ctx.save_for_backward(*arguments[:7], sums)
        ctx.numbers = arguments[7:]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _gradients(ctx, _start_backward, dy)


# The same as operators of PyTorch's, which torch.compile does not look into

_NAME = re.sub(r"\W", "_", __name__)  # a copy of this file in a Hub folder registers operators of its own
_forward = torch.library.custom_op(
    f"{_NAME}::forward", lambda *arguments: _start_forward(*arguments)[0], mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? mask, Tensor? seq_idx, Tensor? seed, float scale, "
    "SymInt chunk_size, float dropout_p) -> Tensor",
)  # fmt: skip
_backward = torch.library.custom_op(f"{_NAME}::backward", _start_backward, mutates_args=())


@_forward.register_fake
def _(q, k, v, log_decay, mask, seq_idx, seed, scale, chunk_size, dropout_p):
    B, H, L, _ = q.shape
    return v.new_empty(B, L, H, v.shape[-1]).transpose(1, 2)


@_backward.register_fake
def _(dy, q, k, v, log_decay, mask, seq_idx, seed, scale, chunk_size, dropout_p, with_decays, sums=None):
    B, H, L, _ = q.shape
    grads = [x.new_empty(B, L, H, x.shape[-1]).transpose(1, 2) for x in (q, k, v)]
    return *grads, torch.empty_like(log_decay, memory_format=torch.contiguous_format) if with_decays else q.new_empty(0)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:7], None)  # the sums are made again
    ctx.numbers = inputs[7:]


_forward.register_autograd(lambda ctx, dy: _gradients(ctx, _backward, dy), setup_context=_keep)
