"""The core of every bidirectional linear transformer with scalar decay: two triangles and a diagonal, times V.

    y_i = Σ_{j<i} s (q→_i·k→_j) e^{Q→_i − K→_j} w→_j v_j  +  δ_i v_i  +  Σ_{j>i} s (q←_i·k←_j) e^{K←_j − Q←_i} w←_j v_j

Each triangle has its own queries, keys, key weights w, and cumulative log decays: Q of queries, K of keys, both summed
from left to right. Which decays lie between a key and a query is a question of where the sums of either begin and end:

    up to the token       before the token
    inclusive_t = Σ_{u≤t} log λ_u       exclusive_t = Σ_{u<t} log λ_u

`definition` is this formula and nothing else; linear_attention_forms.py computes the same numbers faster, in three
forms. LION (linear_attention.py) and Hydra (hydra_attention.py) are callers that choose the sums, queries and diagonal.
Shape letters: B batch, H heads, G heads of q and k, L length, D head size of q and k, E head size of v.
"""

import functools
import itertools
import logging
from typing import NamedTuple

import torch
from torch import Tensor

from . import cpu, cpu_crossover, cpu_kernel
from .custom_operators import has_tangents, no_autocast
from .linear_attention_forms import (
    DIRECTIONS,
    LOG_ZERO,
    chunkwise,
    clamped_exp,
    full,
    read_state,
    recurrent,
    sequence_starts,
    write_state,
)

log = logging.getLogger(__name__)
FORMS = ("auto", "full", "recurrent", "chunkwise")
# "auto" takes the full form up to these lengths, without and with decay. native: with decay, where the kernel has only
# the chunkwise form; where it has both, see cpu_crossover.py. pytorch: about where it was measured to be no slower.
# triton: on an H200 it is 5% (with decay) and 14% (without) slower there, but needs less memory with decay and half the
# launches.
FULL_UP_TO = {"native": (64, 64), "pytorch": (64, 256), "triton": (128, 512)}


class Triangle(NamedTuple):
    """The past or the future keys: queries and keys, (B, G, L, D) with G a divisor of H; their cumulative log decays,
    (B or 1, H, L), as `cumulative_log_decay` returns; and the logarithm of the keys' weights, (B, H, L), or None."""

    q: Tensor
    k: Tensor
    query_sum: Tensor
    key_sum: Tensor
    log_weight: Tensor | None = None


def two_sided_attention(
    v: Tensor,
    past: Triangle | None,
    future: Triangle | None,
    diagonal: Tensor,
    *,
    mask: Tensor | None = None,
    seq_idx: Tensor | None = None,
    left_state: Tensor | None = None,
    right_state: Tensor | None = None,
    scale: float = 1.0,
    form: str = "auto",
    chunk_size: int = 128,
    report: bool = True,
) -> Tensor:
    """Compute the formula at the top of this file.

    Args:
        v: values, (B, H, L, E).
        past, future: the triangles; None for none. Their sums must not make a weight of the decays exceed 1: for every
            key before a query Q→_i ≤ K→_j, and for every key after it K←_j ≤ Q←_i.
        diagonal: δ, (B, H, L), of any sign.
        mask: (B, L) bool, True at real tokens. Padding keys contribute nothing.
        seq_idx: (B, L) integers, the sequence that each token of a packed row belongs to, see `linear_attention`. Keys
            of other sequences get no weight; queries and keys that are shifted across a boundary do not matter.
        left_state, right_state: (B, H, D, E), states of the text before and after this segment. They are decayed by
            e^{Q→_i}, and by e^{Q←_L − Q←_i} with L the last token.
        scale, form, chunk_size: as in `linear_attention`.
        report: whether to log, once, that a GPU has no kernel for this.

    Returns:
        (B, H, L, E) in v's dtype. States and sums are float32 or better for any input dtype.

    Raises ValueError for shapes that do not match, an unknown form, neither triangle, or states with packing.
    """
    given = [triangle for triangle in (past, future) if triangle is not None]
    if not given:
        raise ValueError("past and future are both None; give at least one triangle")
    for name, x in (("v", v), ("q", given[0].q)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be (batch, heads, length, head_dim) (got {tuple(x.shape)})")
    (B, H, L, E), (_, G, _, D) = v.shape, given[0].q.shape
    shapes = [("mask", mask, (B, L)), ("seq_idx", seq_idx, (B, L)), ("diagonal", diagonal, (B, H, L))]
    shapes += [("left_state", left_state, (B, H, D, E)), ("right_state", right_state, (B, H, D, E))]
    for side, triangle in (("past", past), ("future", future)):
        allowed = ((B, G, L, D),), ((B, G, L, D),), ((1, H, L), (B, H, L)), ((1, H, L), (B, H, L)), ((B, H, L),)
        for name, x, expected in zip(Triangle._fields, triangle or (), allowed):
            shapes.append((f"{side}.{name}", x, *expected))
    check_shapes(*shapes)
    check_options(mask, seq_idx, left_state, right_state, form, chunk_size)
    if H % G:
        raise ValueError(f"v must have a multiple of the {G} heads of q and k (got {H})")
    for name, state, triangle in (("left_state", left_state, past), ("right_state", right_state, future)):
        if state is not None and triangle is None:
            raise ValueError(f"{name} has no triangle that reads it; omit it")
    if v.numel() == 0:
        return of_nothing(v, left_state, right_state, diagonal, *itertools.chain(*given))

    if report:
        report_fallback(v, "two_sided_attention")
    # The forms take q and k side by side, and future sums with the opposite sign.
    shared = len(given) == 2 and past.q is future.q and past.k is future.k
    triangles = "shared" if shared else "separate" if len(given) == 2 else "future" if past is None else "past"
    signs = [1] * (past is not None) + [-1] * (future is not None)
    q, k = given[0].q, given[0].k
    if triangles == "separate":
        q, k = torch.cat([past.q, future.q], -1), torch.cat([past.k, future.k], -1)

    def stacked(tensors: list[Tensor]) -> Tensor:  # (B or 1, H, L, T)
        return torch.stack([x.expand(max(x.shape[0] for x in tensors), H, L) for x in tensors], -1)

    query_sums = stacked([sign * x.query_sum.double() for sign, x in zip(signs, given)])
    key_sums = stacked([sign * x.key_sum.double() for sign, x in zip(signs, given)])
    diagonal = diagonal if mask is None else diagonal.masked_fill(~mask[:, None], 0)
    log_weights = None
    if any(x.log_weight is not None for x in given):
        log_weights = stacked([v.new_zeros(B, H, L) if x.log_weight is None else x.log_weight for x in given])
    form = resolve_form(form, v, True, both_in_kernel=triangles != "separate", one_sided=len(given) == 1)
    with no_autocast(v):
        return attend(
            q, k, v, query_sums, key_sums, log_weights, diagonal, triangles, mask=mask, seq_idx=seq_idx, scale=scale,
            left_state=left_state, right_state=right_state, form=form, chunk_size=chunk_size,
        )  # fmt: skip


def definition(v, past, future, diagonal, *, mask=None, scale=1.0) -> Tensor:
    """Compute the formula at the top of this file literally, in O(L²); arguments as for `two_sided_attention`."""
    L, H = v.shape[2], v.shape[1]
    matrix = torch.diag_embed(diagonal if mask is None else diagonal * mask[:, None])
    for triangle, sign in ((past, 1), (future, -1)):
        if triangle is not None:
            q, k = (x.repeat_interleave(H // x.shape[1], 1) for x in triangle[:2])
            exponent = sign * (triangle.query_sum[..., :, None] - triangle.key_sum[..., None, :])
            if triangle.log_weight is not None:
                exponent = exponent + triangle.log_weight[..., None, :]
            inside = torch.ones(L, L, dtype=torch.bool, device=v.device).tril(-1)
            inside = inside if sign > 0 else inside.mT
            if mask is not None:
                inside = inside & mask[:, None, None, :]
            matrix = matrix + scale * (q @ k.mT) * torch.where(inside, exponent, -torch.inf).exp()
    return matrix @ v


class SegmentStates(NamedTuple):
    """What one segment of a text passes to the others, in float32 or better."""

    rightward: Tensor  # the state of its keys and values after its last token, (B, H, D, E)
    leftward: Tensor  # the same before its first token
    across: Tensor  # the decay of a state that crosses the segment to the right, (B or 1, H or 1, 1, 1)
    across_leftward: Tensor  # to the left; the same in LION


def two_sided_segment_states(v, past, future, past_total, future_total, *, mask=None) -> SegmentStates:
    """Summarize one segment of a text, see `linear_attention.segment_states`; arguments as for `two_sided_attention`,
    and the sum of all log decays of the segment in each direction, (B or 1, H, 1)."""
    weights = [past_total - past.key_sum, future.key_sum]
    with no_autocast(v):
        states = []
        for triangle, log_weight in zip((past, future), weights):
            if triangle.log_weight is not None:
                log_weight = log_weight + triangle.log_weight
            states.append(write_state(zero_masked(triangle.k, mask), log_weight, v))
        across = (clamped_exp(total).to(states[0].dtype)[..., None] for total in (past_total, future_total))
        return SegmentStates(*states, *across)


# What the callers share


def of_nothing(v: Tensor, *operands: Tensor | None) -> Tensor:
    """The output of no tokens or no texts, (B, H, L, E), of which all operands get gradients of 0."""
    return v * sum(x.sum() for x in operands if x is not None and x.is_floating_point())


def attend(
    q, k, v, query_sums, key_sums, log_weights, diagonal, triangles, *, mask, seq_idx, left_state, right_state,
    scale, form, chunk_size, dropout_p=0.0, uniform=False, normalize=False,
) -> Tensor:  # fmt: skip
    """Compute one of the forms, (B, H, L, E), for arguments as linear_attention_forms.py describes them, except that
    query_sums may be None (no decay) and G any divisor of H; log_weights: (B, H, L, T) or None; uniform: all chunks
    have the same decays; normalize: see `linear_attention_forms.full`; the others as for `two_sided_attention`. The
    caller turns autocast off."""
    (B, H, L, _), G, dtype = v.shape, q.shape[1], v.dtype
    if 1 < G < H:  # groups of heads become rows of the batch, whose decays differ

        def fold(x: Tensor | None) -> Tensor | None:
            return (
                None if x is None else x.expand(B, max(x.shape[1], G), *x.shape[2:]).unflatten(1, (G, -1)).flatten(0, 1)
            )

        mask, seq_idx = (None if x is None else x.repeat_interleave(G, 0) for x in (mask, seq_idx))
        y = attend(
            *map(fold, (q, k, v, query_sums, key_sums, log_weights, diagonal)), triangles, mask=mask, seq_idx=seq_idx,
            left_state=fold(left_state), right_state=fold(right_state), scale=scale, form=form, chunk_size=chunk_size,
            dropout_p=dropout_p, normalize=normalize,
        )  # fmt: skip
        return y.unflatten(0, (B, G)).flatten(1, 2)
    in_kernel = form == "chunkwise" and query_sums is not None and cpu_kernel.covers(v)  # which sums in float32
    if form != "full" and dtype in (torch.bfloat16, torch.float16) and not in_kernel:
        q, k, v = q.float(), k.float(), v.float()  # states accumulate over the text
    k = zero_masked(k, mask)
    if query_sums is None and (triangles != "shared" or form == "recurrent"):
        query_sums = torch.zeros(1, 1, L, len(DIRECTIONS[triangles]), dtype=torch.float64, device=q.device)
    query_sums = add_boundaries(query_sums, seq_idx, triangles)
    key_sums = None if key_sums is None else add_boundaries(key_sums, seq_idx, triangles)
    if log_weights is not None and form == "recurrent":  # in its sums they would scale a state up and down
        sides = k.unflatten(-1, (2 if triangles == "separate" else 1, -1))
        k = (sides * clamped_exp(log_weights).to(k.dtype)[..., None]).flatten(-2)
        if triangles == "shared":
            q, triangles = torch.cat([q, q], -1), "separate"
    elif log_weights is not None:
        key_sums = (query_sums if key_sums is None else key_sums) - log_weights.double().clamp(min=LOG_ZERO)
    given = [x for x in (query_sums, key_sums) if x is not None]
    if given and (G < H or diagonal is not None):
        rows = max(x.shape[0] for x in given)
        query_sums, key_sums = *(x.expand(rows, H, -1, -1) for x in given), *[None] * (2 - len(given))
    operands = query_sums, key_sums, diagonal
    if form != "full" and query_sums is not None and has_tangents(q, k, v, *operands):
        raise NotImplementedError("with decays there are no derivatives in forward mode; use backward mode")
    if form == "full" and query_sums is None and not (dropout_p > 0 and cpu_kernel.covers(v)):
        y = cpu.dropout(scale * q @ k.mT, dropout_p) @ v
    elif form == "full":
        kept, factor = cpu.draw_kept((B, H, L, L), dropout_p, v.device) if dropout_p > 0 else (None, 1.0)
        y = full(q, k, v, *operands, kept, factor, scale, triangles, normalize=normalize)
    elif form == "recurrent":
        y = recurrent(scale * q, k, v, *operands, triangles)
    elif query_sums is None:  # nothing decays, so one state serves the whole text
        y = q @ (scale * (k.mT @ v))
    else:
        y = chunkwise(q, k, v, *operands, scale, chunk_size, uniform, triangles)
    y = add_states(y, q, query_sums, triangles, left_state, right_state, scale)
    return y.to(dtype)


def add_boundaries(sums: Tensor | None, seq_idx: Tensor | None, triangles: str) -> Tensor | None:
    """Let each boundary between packed sequences weigh e^LOG_ZERO, in sums, (B or 1, H or 1, L, T); None: no decay."""
    if seq_idx is None:
        return sums
    boundaries = LOG_ZERO * sequence_starts(seq_idx).cumsum(-1)[:, None].double()
    boundaries = torch.stack([direction * boundaries for direction in DIRECTIONS[triangles]], -1)
    return boundaries if sums is None else sums + boundaries


def add_states(y, q, query_sums, triangles: str, left_state, right_state, scale: float) -> Tensor:
    """Add to y, (B, H, L, E), what the queries read from the states of other segments."""
    if left_state is None and right_state is None:
        return y
    q = scale * q.to(torch.promote_types(q.dtype, torch.float32))
    past, future = q.chunk(2, -1) if triangles == "separate" else (q, q)
    if left_state is not None:
        y = y + read_state(past, None if query_sums is None else query_sums[..., 0], left_state)
    if right_state is not None:
        to_end = None if query_sums is None else query_sums[..., -1] - query_sums[..., -1:, -1]
        y = y + read_state(future, to_end, right_state)
    return y


def resolve_form(
    form: str, v: Tensor, decays: bool, dropout_p: float = 0.0, fused: bool = False, *, both_in_kernel: bool = True,
    one_sided: bool = False, kind: str = cpu_crossover.PLAIN,
) -> str:  # fmt: skip
    """Resolve "auto" for values v, (B, H, L, E). both_in_kernel: whether the CPU's kernel has both forms for this call.
    one_sided: whether there is one triangle, for which the chunkwise form takes half the time. kind: one of those of
    cpu_crossover.py."""
    if form != "auto" or dropout_p > 0:
        return "full" if form == "auto" else form
    length, kernels = v.shape[2], "triton" if fused else "native" if cpu_kernel.covers(v) else "pytorch"
    if isinstance(length, torch.SymInt) and not torch.compiler.is_dynamo_compiling():  # exported for all lengths
        return "chunkwise"
    if kernels == "native" and decays and both_in_kernel:
        return "full" if cpu_crossover.full_is_faster(2 * length if one_sided else length, kind) else "chunkwise"
    without_decays, with_decays = FULL_UP_TO[kernels]
    full_up_to = with_decays if decays else without_decays  # torch.compile of 2.11 cannot index by a bool
    return "full" if length <= full_up_to else "chunkwise"


def zero_masked(k: Tensor, mask: Tensor | None) -> Tensor:
    return k if mask is None else k.masked_fill(~mask[:, None, :, None], 0)


@functools.cache
def _warn_once(message: str) -> None:
    log.warning(message)


def report_fallback(x: Tensor, what: str) -> None:
    """Warn once that a GPU computes something in PyTorch for lack of a kernel."""
    if x.is_cuda and not torch.compiler.is_compiling():
        _warn_once(f"{what}: computed in PyTorch, more slowly than by the GPU kernels, which do not cover it")


def _is_shape(own: torch.Size, shape: tuple[int, ...]) -> bool:
    return own == shape or all(a == b for a, b in zip(own, shape))


def check_shapes(*named: tuple) -> None:
    """Raise ValueError unless each (name, tensor or None, shape, ...) has one of its shapes."""
    for name, x, *shapes in named:
        # A tracer takes comparisons for conditions of its program, so only shapes of one rank are compared. It finds
        # shapes different whose sizes it knows by other names, so single sizes are compared, too.
        if x is not None and not any(_is_shape(x.shape, shape) for shape in shapes if len(shape) == x.ndim):
            raise ValueError(f"{name} must have the shape {' or '.join(map(str, shapes))} (got {tuple(x.shape)})")


def check_options(mask, seq_idx, left_state, right_state, form: str, chunk_size: int, dropout_p: float = 0.0) -> None:
    """Raise ValueError for what no caller allows."""
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool (got {mask.dtype})")
    if seq_idx is not None and seq_idx.is_floating_point():
        raise ValueError(f"seq_idx must be integers (got {seq_idx.dtype})")
    if seq_idx is not None and (left_state is not None or right_state is not None):
        raise ValueError("left_state and right_state cannot be combined with seq_idx; omit it")
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)} (got {form})")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1 (got {chunk_size})")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout must be from 0 to 1 (got {dropout_p})")
    if dropout_p > 0 and form not in ("auto", "full"):
        raise ValueError(f"attention dropout exists only in the full form; set it to 0 for the {form} form")
