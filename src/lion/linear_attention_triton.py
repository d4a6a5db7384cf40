"""Linear attention with a decay mask on a GPU: launches the kernels of triton_kernels.py, forward and backward."""

import contextlib
import functools
import math
import re

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import triton_kernels as kernels
from .linear_attention_forms import LOG_ZERO
from .triton_kernels import tl, triton

# Head sizes, of q and k and of v, that fit the registers of one program; larger ones would spill to memory.
LARGEST_HEAD = {torch.bfloat16: 128, torch.float16: 64, torch.float32: 64}
ROWS = 64  # T, the rows of a program: what a warp group of a Hopper GPU multiplies at once
COLUMNS = 32  # S, the columns processed at a time; with more, a thread runs out of registers


def covers(q: Tensor, k: Tensor, v: Tensor, extra_columns: int = 0) -> bool:
    """Whether the kernels compute these operands, v with additional columns: in bfloat16, float16 or float32, heads up
    to LARGEST_HEAD, on an NVIDIA GPU, Ampere or newer, or on any device in Triton's interpreter."""
    return (
        kernels.AVAILABLE
        and q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
        and max(q.shape[-1], v.shape[-1] + extra_columns) <= LARGEST_HEAD.get(q.dtype, 0)
        and min(q.numel(), v.numel()) > 0
        and _runs_on(q.device)
    )


@torch.compiler.assume_constant_result
def _runs_on(device: torch.device) -> bool:
    if not isinstance(kernels.forward_kernel, triton.JITFunction):
        return True  # TRITON_INTERPRET=1
    return device.type == "cuda" and torch.version.hip is None and _capability(device) >= (8, 0)


_capability = functools.cache(torch.cuda.get_device_capability)


def fused_linear_attention(q, k, v, log_decay, mask, seq_idx, scale, chunk_size: int | None, dropout_p=0.0) -> Tensor:
    """`linear_attention` for operands that `covers` accepts, in the full form if `chunk_size` is None. (B, H, L, E)

    Only the full form has dropout, with 0 ≤ dropout_p < 1.
    """
    seed = None
    if dropout_p > 0:  # one number per matrix, from which both passes derive the dropped entries
        seed = torch.randint(2**62, q.shape[:2], device=q.device)
    arguments = q, k, v, log_decay, mask, seq_idx, seed, scale, chunk_size or 0, dropout_p
    if torch.compiler.is_compiling() or type(q) is not Tensor:
        return _forward(*arguments)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments[:4]):
        return _Eager.apply(*arguments)
    return _launch_forward(*arguments)[0]


class _Plan:
    """Shapes, strides and dtypes of one call, as the kernels take them.

    shape: q's. with_sums: there are decays or packed sequences. uniform: all chunks and texts have the same decays.
    """

    def __init__(
        self, shape, E: int, dtype, device, with_sums: bool, uniform: bool, chunk_size: int, dot, precision: str
    ):
        self.B, self.H, self.L, self.D = shape
        self.E = E
        self.T = min(ROWS, max(16, triton.next_power_of_2(self.L)))
        self.PD, self.PE = (max(16, triton.next_power_of_2(size)) for size in (self.D, self.E))
        self.S = min(COLUMNS if max(self.PD, self.PE) <= 64 else COLUMNS // 2, self.T)
        self.inside = with_sums or chunk_size == 0
        if not self.inside:
            chunk_size *= 4  # nothing is computed inside chunks, and fewer states have to be summed
        self.C = triton.cdiv(min(chunk_size or self.L, self.L), self.T) * self.T
        self.N = triton.cdiv(self.L, self.C)
        self.with_states = self.N > 1 or not self.inside
        self.blocks = triton.cdiv(self.L, self.T)
        self.sums_shape = (1, self.H, self.C, 4) if uniform else (self.B, self.H, self.N * self.C, 4)
        head = 4 * self.sums_shape[2]
        self.sums_strides = (0, head, 0) if uniform else (self.H * head, head, 4 * self.C)
        self.side = self.B * self.H * self.N * self.D * self.E
        self.device, self.dtype = device, dtype
        self.sizes = {"D": self.D, "E": self.E, "T": self.T, "S": self.S, "PD": self.PD, "PE": self.PE}
        self.dots = {"DOT": dot, "PRECISION": precision}
        exact = dot == tl.float32 and precision == "ieee"  # no tensor cores, and more than the registers hold
        self.launch = {
            "num_warps": max(1, self.T // (8 if exact else 16)),  # 8 or 16 rows per warp
            "num_stages": 2 if dot == tl.float32 else 3,
        }

    def empty_like_tokens(self, size: int) -> Tensor:
        """(B, H, L, size), with the heads of a token contiguous, as the layer after attention reads them."""
        return torch.empty(self.B, self.L, self.H, size, dtype=self.dtype, device=self.device).transpose(1, 2)


_plan = functools.lru_cache(256)(_Plan)  # all layers of a step share one


def _prepare(q, k, v, log_decay, mask, seq_idx, chunk_size: int):
    """The plan of a call, and its tensors as the kernels read them."""
    with_sums = log_decay is not None or seq_idx is not None
    uniform = seq_idx is None and log_decay is not None and log_decay.ndim == 1
    plan = _plan(q.shape, v.shape[-1], q.dtype, q.device, with_sums, uniform, chunk_size, *_dot_precision(q.dtype))
    mask = None if mask is None else mask.contiguous().view(torch.uint8)
    return plan, _tokens(q), _tokens(k), _tokens(v), mask, None if seq_idx is None else seq_idx.contiguous()


def _dot_precision(dtype: torch.dtype) -> tuple["tl.dtype", str]:
    """The dtype of the operands of matrix products, and their precision. Sums are in float32.

    float16 is multiplied as TF32, which keeps its full mantissa, since scores and states can exceed float16's range.
    Triton's interpreter cannot multiply bfloat16.
    """
    if dtype == torch.bfloat16 and isinstance(kernels.forward_kernel, triton.JITFunction):
        return tl.bfloat16, "ieee"
    if dtype == torch.float32 and not _tf32_is_allowed():
        return tl.float32, "ieee"
    return tl.float32, "tf32"


def _tf32_is_allowed() -> bool:
    """Whether PyTorch allows TF32 in its own float32 matrix products; newer versions renamed the setting."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return torch.backends.cuda.matmul.allow_tf32 if precision is None else precision == "tf32"


def _tokens(x: Tensor) -> Tensor:
    """x, (B, H, L, ·), copied only if the features of a token are not contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _decay_strides(log_decay: Tensor | None) -> tuple[int, int, int]:
    if log_decay is None:
        return 0, 0, 0
    return log_decay.stride() if log_decay.ndim == 3 else (0, log_decay.stride(0), 0)


def _launch(kernel, programs: int, q: Tensor, *arguments, **options) -> None:
    elsewhere = q.is_cuda and q.get_device() != torch.cuda.current_device()  # Triton launches on the current GPU
    with torch.cuda.device(q.device) if elsewhere else contextlib.nullcontext():
        kernel[(programs,)](q, *arguments, **options)


def _cumulative_sums(plan: _Plan, log_decay: Tensor | None, seq_idx: Tensor | None) -> Tensor | None:
    """The cumulative log decays as the kernels read them, if there are any."""
    if log_decay is None and seq_idx is None:
        return None
    sums = torch.empty(plan.sums_shape, dtype=torch.float32, device=plan.device)
    N = plan.sums_shape[2] // plan.C
    _launch(
        kernels.sums_kernel, plan.sums_shape[0] * plan.H * N, sums, log_decay, seq_idx, plan.H, plan.L, plan.C, N,
        *_decay_strides(log_decay), LOG_ZERO=LOG_ZERO, LOG2E=math.log2(math.e),
        SIZE=min(triton.next_power_of_2(plan.C), 1024), num_warps=4,
    )  # fmt: skip
    return sums


def _incoming_states(plan: _Plan, k, v, mask: Tensor | None, sums: Tensor | None, sign: int = 1) -> Tensor | None:
    """The states that enter each chunk from the left and from the right, (2, B·H, N, D, E); without decays one for all,
    (1, B·H, 1, D, E). sign: −1 for gradients, with q and dy in place of k and v."""
    if not plan.with_states:
        return None
    rows, D, E, N = plan.B * plan.H, plan.D, plan.E, plan.N
    states = torch.empty(1 if sums is None else 2, rows, N, D, E, dtype=torch.float32, device=plan.device)
    PE = min(plan.PE, 64)
    columns = triton.cdiv(E, PE)
    _launch(
        kernels.states_kernel, rows * N * columns, k, v, mask, sums, states,
        plan.H, plan.L, plan.C, N, columns, plan.side,
        *k.stride()[:3], *v.stride()[:3], *plan.sums_strides, **{**plan.sizes, "PE": PE},
        SIGN=sign, **plan.dots, **plan.launch,
    )  # fmt: skip
    dtype = plan.dtype if plan.dtype == torch.bfloat16 else torch.float32  # in which the states are multiplied
    if sums is None:
        return states.sum(2, keepdim=True).to(dtype)
    incoming = torch.empty_like(states, dtype=dtype)
    part = 256
    parts = triton.cdiv(D * E, part)
    _launch(
        kernels.scan_kernel, rows * 2 * parts, states, incoming, sums, plan.H, plan.C, N, parts, plan.side,
        *plan.sums_strides, SIZE=D * E, PART=part, STAGES=4, num_warps=2,
    )  # fmt: skip
    return incoming


def _launch_forward(
    q, k, v, log_decay, mask, seq_idx, seed, scale, chunk_size, dropout_p
) -> tuple[Tensor, Tensor | None]:
    """The output, and the cumulative sums, if there are any."""
    plan, q, k, v, mask, seq_idx = _prepare(q, k, v, log_decay, mask, seq_idx, chunk_size)
    sums = _cumulative_sums(plan, log_decay, seq_idx)
    incoming = _incoming_states(plan, k, v, mask, sums)
    y = plan.empty_like_tokens(plan.E)
    _launch(
        kernels.forward_kernel, plan.B * plan.H * plan.blocks,
        q, k, v, y, mask, seed, sums, incoming, scale / (1 - dropout_p),
        plan.H, plan.L, plan.C, plan.N, plan.blocks, plan.side,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *y.stride()[:3], *plan.sums_strides,
        **plan.sizes, INSIDE=plan.inside, **plan.dots, DROPPED=round(dropout_p * 2**32), **plan.launch,
    )  # fmt: skip
    return y, sums


def _launch_backward(
    dy, q, k, v, log_decay, mask, seq_idx, seed, scale, chunk_size, dropout_p, with_decays, sums=None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """∂q, ∂k, ∂v and ∂log_decay, which is empty unless with_decays. sums: of the forward pass, if it kept them."""
    plan, q, k, v, mask, seq_idx = _prepare(q, k, v, log_decay, mask, seq_idx, chunk_size)
    dy = _tokens(dy)
    scale /= 1 - dropout_p
    if sums is None:
        sums = _cumulative_sums(plan, log_decay, seq_idx)
    incoming = _incoming_states(plan, k, v, mask, sums)
    grad_incoming = _incoming_states(plan, q, dy, None, sums, sign=-1)
    dq, dk, dv = plan.empty_like_tokens(plan.D), plan.empty_like_tokens(plan.D), plan.empty_like_tokens(plan.E)
    grad_sums, grad_plane = None, plan.B * plan.H * plan.N * plan.C
    if with_decays:
        grad_sums = torch.empty(6, grad_plane, dtype=torch.float32, device=plan.device)
    programs = plan.B * plan.H * plan.blocks
    shape = plan.H, plan.L, plan.C, plan.N, plan.blocks, plan.side, grad_plane
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dy.stride()[:3]
    options = {**plan.sizes, "INSIDE": plan.inside, **plan.dots, "DROPPED": round(dropout_p * 2**32), **plan.launch}
    _launch(
        kernels.query_gradients_kernel, programs, q, k, v, dy, dq, mask, seed, sums, incoming, grad_sums, scale,
        *shape, *strides, *dq.stride()[:3], *plan.sums_strides, **options,
    )  # fmt: skip
    _launch(
        kernels.key_gradients_kernel, programs, q, k, v, dy, dk, dv, mask, seed, sums, grad_incoming, grad_sums, scale,
        *shape, *strides, *dk.stride()[:3], *dv.stride()[:3], *plan.sums_strides, **options,
    )  # fmt: skip
    if not with_decays:
        return dq, dk, dv, q.new_empty(0)
    dtype = log_decay.dtype if log_decay.ndim == 3 else torch.float64
    grad = torch.empty(plan.B, plan.H, plan.L, device=plan.device, dtype=dtype)
    _launch(
        kernels.decay_gradients_kernel, plan.B * plan.H * plan.N,
        log_decay, sums, grad_sums, incoming, grad_incoming, grad, scale,
        plan.H, plan.L, plan.C, plan.N, plan.side, grad_plane,
        *_decay_strides(log_decay), *plan.sums_strides, LOG_ZERO=LOG_ZERO,
        STATE=plan.D * plan.E, PART=1024, SIZE=min(triton.next_power_of_2(plan.C), 1024), num_warps=4,
    )  # fmt: skip
    return dq, dk, dv, grad if log_decay.ndim == 3 else grad.sum((0, 2)).to(log_decay.dtype)


def _gradients(ctx, backward, dy: Tensor) -> tuple[Tensor | None, ...]:
    with_decays = ctx.needs_input_grad[3]
    *operands, sums = ctx.saved_tensors  # read only once: checkpointing does not return them again
    *grads, d_decay = backward(dy, *operands, *ctx.numbers, with_decays, sums)
    return *grads, d_decay if with_decays else None, *[None] * 6


class _Eager(torch.autograd.Function):
    """The operator outside torch.compile: PyTorch's dispatch of a custom operator takes longer than the launches."""

    @staticmethod
    def forward(ctx, *arguments):
        y, sums = _launch_forward(*arguments)
        ctx.save_for_backward(*arguments[:7], sums)
        ctx.numbers = arguments[7:]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _gradients(ctx, _launch_backward, dy)


# The same as custom operators, which torch.compile does not trace into

_NAME = re.sub(r"\W", "_", __name__)  # a copy of this file in a Hub folder registers its own operators
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? mask, Tensor? seq_idx, Tensor? seed, float scale, "
    "SymInt chunk_size, float dropout_p"
)
_forward = torch.library.custom_op(
    f"{_NAME}::forward", lambda *x: _launch_forward(*x)[0], mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor"
)
_backward = torch.library.custom_op(
    f"{_NAME}::backward", _launch_backward, mutates_args=(),
    schema=f"(Tensor dy, {_ARGUMENTS}, bool with_decays, Tensor? sums=None) -> (Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip


@_forward.register_fake
def _(q, k, v, log_decay, mask, seq_idx, seed, scale, chunk_size, dropout_p):
    B, H, L, _ = q.shape
    return v.new_empty(B, L, H, v.shape[-1]).transpose(1, 2)


@_backward.register_fake
def _(dy, q, k, v, log_decay, mask, seq_idx, seed, scale, chunk_size, dropout_p, with_decays, sums=None):
    B, H, L, _ = q.shape
    grads = [x.new_empty(B, L, H, x.shape[-1]).transpose(1, 2) for x in (q, k, v)]
    return *grads, torch.empty_like(log_decay, memory_format=torch.contiguous_format) if with_decays else q.new_empty(0)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:7], None)  # the sums are recomputed
    ctx.numbers = inputs[7:]


_forward.register_autograd(lambda ctx, dy: _gradients(ctx, _backward, dy), setup_context=_save)
