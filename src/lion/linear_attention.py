"""Full linear attention with a decay mask: one function, computed in three forms.

    y_i = Σ_j  s · (q_i · k_j) · M_ij · v_j

    M_ij = 1                          i = j
         = λ_j · λ_{j+1} · … · λ_{i-1}    j < i   (key in the past)
         = λ_{i+1} · … · λ_j              j > i   (key in the future)

Afzal et al., "Linear Attention for Efficient Bidirectional Sequence Modeling", arXiv:2502.16249, section 3.
`definition` is this formula and nothing else. The forms compute the same numbers faster:

    full        the L×L matrix, for short sequences                      O(L²) time and memory
    chunkwise   the matrix inside chunks, D×E states between them        O(L) time and memory
    recurrent   a D×E state in each direction, token by token            O(L) time, O(1) state

In PyTorch, they are those of two_sided_attention.py with the same q, k and decays in both triangles;
linear_attention_triton.py implements the first two as GPU kernels.
Shape letters: B batch, H heads, G heads of q and k, L length, D head size of q and k, E head size of v.
"""

import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import channel_decay, cpu_crossover, cpu_kernel, linear_attention_triton
from .custom_operators import no_autocast, once_differentiable
from .linear_attention_forms import EPSILON, LOG_ZERO, cumulative_log_decay, divided, with_ones, write_state
from .two_sided_attention import (
    FULL_UP_TO,  # noqa: F401
    SegmentStates,
    Triangle,
    add_states,
    attend,
    check_options,
    check_shapes,
    of_nothing,
    report_fallback,
    resolve_form,
    two_sided_segment_states,
    zero_masked,
)

ROUNDING = 1e-3  # what a log decay may be above 0
USE_TRITON = os.environ.get("LION_TRITON", "1") != "0"  # LION_TRITON=0 computes everything in PyTorch, for comparison


def linear_attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    log_decay: Tensor | None = None,
    *,
    log_decay_future: Tensor | None = None,
    forget_logits: Tensor | None = None,
    mask: Tensor | None = None,
    seq_idx: Tensor | None = None,
    left_state: Tensor | None = None,
    right_state: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = False,
    causal: bool = False,
    form: str = "auto",
    chunk_size: int = 128,
    dropout_p: float = 0.0,
) -> Tensor:
    """Compute bidirectional linear attention with decay, arXiv:2502.16249 section 3.

    Args:
        q, k, v: queries and keys, (B, G, L, D), and values, (B, H, L, E). G may be any divisor of H: each head of q and
            k then serves H/G heads of v. Or q holds all three, (B, L, 3, H, D): its gradient is then computed in
            place, and not copied from three parts.
        log_decay: log λ ≤ 0: None for λ = 1 (LION-LIT), (H,) for one per head (LION-D), or (B, H, L) (LION-S); or, with
            a last dimension D, one per key channel, see channel_decay.py. Those below −60, or −43 per channel, count
            as that, with a gradient of 0.
        log_decay_future: the decays of keys after a query, if they are not those of log_decay.
        forget_logits: the logit of 1 − λ, shaped like log_decay and in any dtype, instead of it. The GPU kernels
            compute log λ = −softplus(forget_logits) and its gradient themselves.
        mask: (B, L) bool, True at real tokens. Padding keys contribute nothing.
        seq_idx: (B, L) integers, the sequence that each token of a packed row belongs to; each sequence gets the same
            output as on its own. A new sequence starts where the number changes. From FlashAttention's offsets:
            `torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())[None]`.
        left_state, right_state: (B, H, D, E), states of the text before and after this segment, see `segment_states`;
            with normalize (B, H, D, E + 1).
        scale: s in the formula; D^-1/2 if None.
        normalize: divide each y_i by its row sum Σ_j s·(q_i·k_j)·M_ij + 1e-6.
        causal: omit the keys after each query, j > i.
        form: "full", "recurrent", "chunkwise", or "auto", which chooses by length.
        chunk_size: tokens per chunk of the chunkwise form; the kernel in C has its own.
        dropout_p: dropout on the matrix s·QKᵀ⊙M, from 0 to 1; only the full form computes this matrix.

    Returns:
        (B, H, L, E) in v's dtype. States and log decays are summed in float32 or better for any input dtype.

    Raises ValueError for shapes that do not match, an unknown form, dropout in a form without a matrix, states
    combined with packing, states or decays from the right with `causal`, decays for future keys only, or in two ways;
    also for log decays above 0 (not on a GPU, where the program would have to wait for them). Forms that PyTorch does
    not compute by itself have first derivatives in backward mode only; others raise NotImplementedError or
    RuntimeError.
    """
    qkv = q if k is None and v is None else None
    if qkv is not None:
        if q.ndim != 5 or q.shape[2] != 3:
            raise ValueError(f"q without k and v must be (batch, length, 3, heads, head_dim) (got {tuple(q.shape)})")
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    _check(
        q, k, v, log_decay, log_decay_future, forget_logits, mask, seq_idx, left_state, right_state, normalize, causal,
        form, chunk_size, dropout_p,
    )  # fmt: skip
    if v.numel() == 0:
        return of_nothing(v, q, k, log_decay, log_decay_future, forget_logits, left_state, right_state)
    dtype, has_decays = v.dtype, any(x is not None for x in (log_decay, forget_logits, seq_idx)) or causal
    by_channel = log_decay is not None and log_decay.ndim in (2, 4)
    fused = is_fused(q, k, v, form, dropout_p, uncovered="decays per channel" if by_channel else "")
    if normalize and not fused and dtype in (torch.bfloat16, torch.float16):
        q, k, v = q.float(), k.float(), v.float()
    form = resolve_form(
        form, v, has_decays, dropout_p, fused, both_in_kernel=not by_channel, one_sided=causal,
        kind=cpu_crossover.NORMALIZED if normalize else cpu_crossover.PLAIN,
    )  # fmt: skip
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    states = {"left_state": left_state, "right_state": right_state}
    if fused:
        decays, how = (log_decay, log_decay_future, forget_logits), (form, chunk_size, dropout_p)
        return _on_gpu(qkv, q, k, v, decays, mask, seq_idx, states, scale, normalize, causal, *how)
    if forget_logits is not None:
        log_decay = log_of_decay(forget_logits)
    given = {"mask": mask, "seq_idx": seq_idx, **states, "scale": scale, "form": form, "chunk_size": chunk_size}
    given["dropout_p"] = dropout_p
    has_states, separate = has_any(states), log_decay_future is not None
    divides = form == "full" and has_decays and not (by_channel or has_states) and cpu_kernel.covers(v)
    if normalize and not divides:
        v = with_ones(v)
    with no_autocast(q):
        if by_channel:
            y = channel_decay.attend_by_channel(q, k, v, log_decay, log_decay_future, causal=causal, **given)
        else:  # if decays are separate, sums of keys and queries; torch.compile refuses one tensor in both places
            plain = form == "full" and q.shape[1] == v.shape[1] and seq_idx is None
            plain = plain and not (causal or separate or has_states) and kernel_sums(log_decay, v)
            sums = log_decay if plain else signed_sums(log_decay, q.shape[-2], causal, log_decay_future)
            y = attend(
                q, k, v, sums, sums.clone() if separate else None, None, None, "past" if causal else "shared", **given,
                uniform=_is_uniform(log_decay, log_decay_future) and seq_idx is None, normalize=normalize and divides,
            )  # fmt: skip
    return (divided(y) if normalize and not divides else y).to(dtype)


def _on_gpu(
    qkv, q, k, v, decays, mask, seq_idx, states: dict, scale: float, normalize: bool, causal: bool, form: str,
    chunk_size: int, dropout_p: float,
) -> Tensor:  # fmt: skip
    """`linear_attention` by the GPU kernels. decays: log_decay, log_decay_future and forget_logits."""
    q, k = one_per_head(q, v.shape[1]), one_per_head(k, v.shape[1])
    parts = (q, k, v) if qkv is None else (qkv, None, None)
    log_decay, log_decay_future, forget_logits = decays
    how, keys = (mask, seq_idx, scale, 0 if form == "full" else chunk_size, dropout_p), "to" if causal else "all"
    if log_decay_future is None and not has_any(states):
        given = log_decay if forget_logits is None else forget_logits
        return linear_attention_triton.fused_linear_attention(
            *parts, given, *how, forget_logits is not None, "divide" if normalize else "", keys
        )
    if forget_logits is not None:
        log_decay = log_of_decay(forget_logits)
    run = fused_with_row_sums if normalize else linear_attention_triton.fused_linear_attention
    with no_autocast(q):
        if log_decay_future is None:
            y = run(*parts, log_decay, *how, keys=keys)
        else:
            y = run(*parts, log_decay, *how, keys="to").float() + run(*parts, log_decay_future, *how, keys="after")
        if has_any(states):
            sums = signed_sums(log_decay, q.shape[-2], causal, log_decay_future)
            y = add_states(y, q, sums, "past" if causal else "shared", **states, scale=scale)
    return (divided(y) if normalize else y).to(v.dtype)


def has_any(states: dict[str, Tensor | None]) -> bool:
    return any(state is not None for state in states.values())


def fused_with_row_sums(*arguments, keys: str = "all") -> Tensor:
    """`fused_linear_attention` of these arguments as if v had a column of ones, which receives the row sums: (B, H, L,
    E + 1) in float32."""
    y, row_sums = linear_attention_triton.fused_linear_attention(*arguments, row_mode="sum", keys=keys)
    return torch.cat([y, row_sums[..., None]], -1)


def definition(
    q, k, v, log_decay=None, *, log_decay_future=None, mask=None, scale=None, normalize=False, causal=False
) -> Tensor:
    """Compute the formula at the top of this file literally, in O(L³); arguments as for `linear_attention`."""
    L = q.shape[-2]
    i, j, t = torch.meshgrid(*[torch.arange(L, device=q.device)] * 3, indexing="ij")
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    # The decays of the tokens t act between j and i.
    of_future = log_decay if log_decay_future is None else log_decay_future
    for decays, between in ((log_decay, (j <= t) & (t < i)), (of_future, (i < t) & (t <= j))):
        if decays is not None:
            per_token = decays if decays.ndim == 3 else decays[None, :, None].expand(1, -1, L)
            scores = scores * torch.where(between, per_token[:, :, None, None, :], 0).sum(-1).exp()
    if mask is not None:
        scores = scores * mask[:, None, None, :]
    if causal:
        scores = scores.tril()
    if normalize:
        scores = scores / (scores.sum(-1, keepdim=True) + EPSILON)
    return scores @ v


def attention_matrix(
    q, k, log_decay=None, *, log_decay_future=None, mask=None, seq_idx=None, scale=None, normalize=False
) -> Tensor:
    """Compute the matrix s·QKᵀ⊙M, (B, H, L, L), zero in the columns of padding, for arguments of `linear_attention`.
    Heads are those of the decays, or else of q. Raises ValueError if these are not a multiple of q's."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if log_decay is not None:
        q, k = (one_per_head(x, log_decay.shape[0 if log_decay.ndim <= 2 else 1]) for x in (q, k))
    identity = torch.eye(q.shape[-2], dtype=q.dtype, device=q.device).expand(*q.shape[:2], -1, -1)
    how = {"mask": mask, "seq_idx": seq_idx, "scale": scale}
    if log_decay is not None and log_decay.ndim in (2, 4):
        matrix = channel_decay.attend_by_channel(q, k, identity, log_decay, log_decay_future, **how, form="matrix")
    else:
        with no_autocast(q):
            sums = signed_sums(log_decay, q.shape[-2], log_decay_future=log_decay_future)
            matrix = attend(
                q, k, identity, sums, None if log_decay_future is None else sums.clone(), None, None, "shared", **how,
                left_state=None, right_state=None, form="full", chunk_size=0,
            )  # fmt: skip
    return matrix / (matrix.sum(-1, keepdim=True) + EPSILON) if normalize else matrix


def segment_states(k, v, log_decay=None, *, log_decay_future=None, mask=None, normalize=False) -> SegmentStates:
    """Summarize one segment of a text that does not fit in memory; arguments as for `linear_attention`. Go through the
    segments from left to right and update `left = left * across + rightward` after each, then from right to left and
    update `right = right * across_leftward + leftward`. With both states from before a segment's own update,
    `linear_attention(..., left_state=left, right_state=right)` on it returns its part of the text's output."""
    k = one_per_head(k, v.shape[1])
    if normalize:
        v = with_ones(v)
    if log_decay is None:
        with no_autocast(k):
            state = write_state(zero_masked(k, mask), None, v)
        across = state.new_ones(1, 1, 1, 1)
        return SegmentStates(state, state, across, across)
    if log_decay.ndim in (2, 4):
        return channel_decay.segment_states_by_channel(k, v, log_decay, log_decay_future, mask=mask)
    exclusive, total = cumulative_log_decay(log_decay, k.shape[-2])
    inclusive = total
    if log_decay_future is not None:
        _, inclusive = cumulative_log_decay(log_decay_future, k.shape[-2])
    past, future = Triangle(k, k, exclusive, exclusive), Triangle(k, k, inclusive, inclusive)
    return two_sided_segment_states(v, past, future, total[..., -1:], inclusive[..., -1:], mask=mask)


def log_of_decay(forget_logits: Tensor) -> Tensor:
    """log λ in float32 or better, of logits of 1 − λ, (H,) or (B, H, L)."""
    x = forget_logits.to(torch.promote_types(forget_logits.dtype, torch.float32))
    if x.ndim == 3:  # in the memory layout of a linear layer's output
        return F.logsigmoid(-x.mT).mT
    return F.logsigmoid(-x)


def one_per_head(x: Tensor, heads: int) -> Tensor:
    """Queries or keys, (B, G, L, D), for each of H heads, (B, H, L, D); copied only if 1 < G < H. Raises ValueError if
    G does not divide H."""
    if heads % x.shape[1]:
        raise ValueError(f"{x.shape[1]} heads of queries and keys cannot serve {heads}; use a divisor")
    times = heads // x.shape[1]
    return x if times == 1 else x.expand(-1, heads, -1, -1) if x.shape[1] == 1 else x.repeat_interleave(times, 1)


def _is_uniform(*log_decays: Tensor | None) -> bool:
    """Whether there are decays, and all tokens have the same."""
    return log_decays[0] is not None and all(x is None or x.ndim == 1 for x in log_decays)


def kernel_sums(log_decay: Tensor | None, *others: Tensor) -> bool:
    """Whether the CPU's kernel sums these decays, and covers the others too."""
    if log_decay is None or log_decay.dtype != torch.float32:
        return False
    return all(map(cpu_kernel.covers, (log_decay, *others)))


def signed_sums(
    log_decay: Tensor | None, length: int, causal: bool = False, log_decay_future: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """The decays as linear_attention_forms.py reads them, (B or 1, H, L, T): exclusive for past, inclusive for future
    keys. order: see `cpu_kernel.signed_sums`; only for decays that it sums."""
    if log_decay is None:
        return None
    if log_decay_future is None and not causal:
        return _SignedSums.apply(log_decay, length, order)
    exclusive, inclusive = cumulative_log_decay(log_decay, length)
    if log_decay_future is not None:
        _, inclusive = cumulative_log_decay(log_decay_future, length)
        rows = max(exclusive.shape[0], inclusive.shape[0])
        exclusive, inclusive = (x.expand(rows, -1, -1) for x in (exclusive, inclusive))
    return torch.stack([exclusive] if causal else [exclusive, -inclusive], -1)


class _SignedSums(torch.autograd.Function):
    """`cumulative_log_decay` and its gradient: ten small operations each would take as long as a short text's
    attention."""

    @staticmethod
    def forward(ctx, log_decay: Tensor, length: int, order: Tensor | None) -> Tensor:
        ctx.save_for_backward(log_decay, order)
        ctx.native = kernel_sums(log_decay)
        if ctx.native:
            return cpu_kernel.signed_sums(log_decay, length, LOG_ZERO, order)
        exclusive, inclusive = cumulative_log_decay(log_decay, length)
        return torch.stack([exclusive, -inclusive], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        """A token's decay is in the exclusive sums after it and in the inclusive sums from it on."""
        log_decay, order = ctx.saved_tensors
        if ctx.native:
            return cpu_kernel.signed_sums_gradient(grad, log_decay, LOG_ZERO, order), None, None
        past, future = grad.unbind(-1)
        both = past - future
        grad = both.sum(-1, keepdim=True) - both.cumsum(-1) - future
        grad = grad.sum((0, 2)) if log_decay.ndim == 1 else grad
        return (grad * (log_decay >= LOG_ZERO)).to(log_decay.dtype), None, None


def _check(
    q, k, v, log_decay, log_decay_future, forget_logits, mask, seq_idx, left_state, right_state, normalize, causal,
    form, chunk_size, dropout_p,
) -> None:  # fmt: skip
    """Raise ValueError if the arguments are inconsistent."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is None:
            raise ValueError(f"{name} is None; give k and v, or neither if q holds all three")
        if x.ndim != 4:
            raise ValueError(f"{name} must be (batch, heads, length, head_dim) (got {tuple(x.shape)})")
        if not x.is_floating_point() or (x is not v and x.shape[-1] == 0):
            raise ValueError(f"{name} must have floating-point numbers in each head (got {x.dtype}, {tuple(x.shape)})")
    for name, x in (("log_decay", log_decay), ("log_decay_future", log_decay_future)):
        if not (x is None or isinstance(x, Tensor)):
            raise ValueError(f"{name} must be a tensor, such as torch.full((heads,), -0.1) (got {x!r})")
    (B, G, L, D), (H, E) = q.shape, (v.shape[1], v.shape[-1])
    H = H if H % G == 0 else G
    state, decays = (B, H, D, E + int(normalize)), [(H,), (B, H, L), (H, D), (B, H, L, D)]
    of_future = decays if log_decay is None else decays[:2] if log_decay.ndim in (1, 3) else decays[2:]
    check_shapes(
        ("k", k, (B, G, L, D)),
        ("v", v, (B, H, L, E)),
        ("log_decay", log_decay, *decays),
        ("log_decay_future", log_decay_future, *of_future),
        ("forget_logits", forget_logits, (H,), (B, H, L)),
        ("mask", mask, (B, L)),
        ("seq_idx", seq_idx, (B, L)),
        ("left_state", left_state, state),
        ("right_state", right_state, state),
    )
    check_options(mask, seq_idx, left_state, right_state, form, chunk_size, dropout_p)
    if forget_logits is not None and not (log_decay is None and log_decay_future is None):
        raise ValueError("forget_logits and log_decay are two ways to give decays; omit one")
    if log_decay is None and log_decay_future is not None:
        raise ValueError("log_decay_future needs log_decay; give both, zeros for none")
    for name, x in (("log_decay", log_decay), ("log_decay_future", log_decay_future)):
        if x is not None and _is_readable(x) and (largest := float(_of_real_tokens(x.detach(), mask).max())) > ROUNDING:
            example = "log λ, such as torch.tensor([0.9, 0.5]).log()"
            raise ValueError(f"{name} must be at most 0 (got {largest:.3g}); give {example}")
    for name, of_future in (("right_state", right_state), ("log_decay_future", log_decay_future)):
        if causal and of_future is not None:
            raise ValueError(f"{name} cannot be combined with causal, which reads no keys to the right; omit one")


def _is_readable(x: Tensor) -> bool:
    """Whether a look at the values of x costs little, and nothing records or transforms the program."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or x.device.type != "cpu" or not x.numel():
        return False
    transformed = torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack()
    return type(x) in (Tensor, nn.Parameter) and not transformed


def _of_real_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """log decays with 0 at padding, where they may be anything before and after a text."""
    if mask is None or x.ndim < 3:
        return x
    return x.where(mask[:, None] if x.ndim == 3 else mask[:, None, :, None], 0)


def is_fused(q, k, v, form: str, dropout_p: float, uncovered: str = "") -> bool:
    """Whether the GPU kernels compute a call. If not, PyTorch does; on a GPU, each reason is logged once. `uncovered`
    names what the caller knows that they do not."""
    if not USE_TRITON or form == "recurrent":
        return False
    if not uncovered and dropout_p == 1:
        uncovered = "dropout of 1"
    if not uncovered and not linear_attention_triton.covers(q, k, v):
        uncovered = f"heads of {q.shape[-1]} and {v.shape[-1]} in {q.dtype}"
    if uncovered:
        report_fallback(q, uncovered)
    return not uncovered
