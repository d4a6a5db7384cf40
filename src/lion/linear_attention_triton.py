"""Linear attention with a decay mask on a GPU: launches the kernels of triton_kernels.py, forward and backward."""

import contextlib
import functools
import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import triton_kernels as kernels
from .linear_attention_forms import LOG_ZERO, gradients, operator, save_inputs
from .triton_kernels import tl, triton

# Head sizes, of q and k and of v, that fit the registers of one program; larger ones would spill to memory.
LARGEST_HEAD = {torch.bfloat16: 128, torch.float16: 64, torch.float32: 64}
ROWS = 64  # T, the rows of a program: what a warp group of a Hopper GPU multiplies at once
COLUMNS = 32  # S, the columns processed at a time; with more, a thread runs out of registers

INTERPRETED = kernels.AVAILABLE and not isinstance(kernels.product_kernel, triton.JITFunction)  # TRITON_INTERPRET=1


def covers(q: Tensor, k: Tensor, v: Tensor, extra_columns: int = 0) -> bool:
    """Whether the kernels support these operands, with `extra_columns` added to v: bfloat16, float16 or float32, heads
    up to LARGEST_HEAD, on an NVIDIA GPU (Ampere or newer) or on any device in Triton's interpreter."""
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
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return INTERPRETED or (is_nvidia and _capability(device) >= (8, 0))


_capability = functools.cache(torch.cuda.get_device_capability)


def fused_linear_attention(q, k, v, log_decay, mask, seq_idx, scale, chunk_size: int, dropout_p: float) -> Tensor:
    """Compute `linear_attention`, (B, H, L, E), for operands that `covers` accepts; the full form if `chunk_size` is 0.
    Only the full form has dropout, with 0 ≤ dropout_p < 1."""
    # One number per matrix, from which both passes derive the dropped entries.
    seed = torch.randint(2**62, q.shape[:2], device=q.device) if dropout_p > 0 else None
    arguments = q, k, v, log_decay, mask, seq_idx, seed, None, scale, chunk_size, dropout_p
    if type(q) is not Tensor or torch.compiler.is_compiling():
        return _forward(*arguments)
    with_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments[:4])
    return _Eager.apply(*arguments) if with_gradient else _launch_forward(*arguments)


class _Call:
    """The operands of one call as the kernels read them, how the kernels cut them, and the cumulative log decays. A
    backward pass gets these `sums` from its forward pass, unless that was compiled."""

    def __init__(self, q, k, v, log_decay, mask, seq_idx, seed, sums, scale, chunk_size, dropout_p):
        self.B, self.H, self.L, D = q.shape
        self.q, self.k, self.v = map(_tokens, (q, k, v))
        self.mask = None if mask is None else mask.contiguous().view(torch.uint8)
        self.seed, self.scale, self.dropped = seed, scale / (1 - dropout_p), round(dropout_p * 2**32)
        self.T = min(ROWS, max(16, triton.next_power_of_2(self.L)))
        self.S = min(COLUMNS if max(D, v.shape[-1]) <= 64 else COLUMNS // 2, self.T)
        self.inside = log_decay is not None or seq_idx is not None or chunk_size == 0
        if not self.inside:
            chunk_size *= 4  # nothing is computed inside chunks, and fewer states have to be summed
        self.C = triton.cdiv(min(chunk_size or self.L, self.L), self.T) * self.T
        self.N = triton.cdiv(self.L, self.C)
        dot, precision = _dot_precision(q.dtype)
        exact = precision == "ieee" and dot == tl.float32  # no tensor cores, and more than the registers hold
        self.options = {"DOT": dot, "PRECISION": precision, "num_stages": 2 if dot == tl.float32 else 3}
        self.options["num_warps"] = max(1, self.T // (8 if exact else 16))  # 8 or 16 rows per warp
        self.uniform = seq_idx is None and log_decay is not None and log_decay.ndim == 1  # all chunks decay alike
        if log_decay is not None and log_decay.ndim == 1:
            log_decay = log_decay[None, :, None].expand(q.shape[:3])
        self.log_decay, self.decay_strides = log_decay, (0, 0, 0) if log_decay is None else log_decay.stride()
        if sums is None and (log_decay is not None or seq_idx is not None):
            B, N = (1, 1) if self.uniform else (self.B, self.N)
            sums = q.new_empty(B, self.H, N, self.C, 4, dtype=torch.float32)
            _launch(
                kernels.sums_kernel, B * self.H * N,
                sums, log_decay, None if seq_idx is None else seq_idx.contiguous(),
                self.H, self.L, self.C, N, *self.decay_strides, LOG_ZERO=LOG_ZERO, LOG2E=math.log2(math.e),
                SIZE=min(triton.next_power_of_2(self.C), 1024), num_warps=4,
            )  # fmt: skip
            sums = sums.expand(self.B, -1, self.N, -1, -1) if self.uniform else sums
        self.sums, self.sums_strides = sums, (0, 0, 0) if sums is None else sums.stride()[:3]

    def incoming_states(self, k: Tensor, v: Tensor, mask: Tensor | None, sign: int = 1) -> Tensor | None:
        """The states that enter each chunk from the left and from the right, (2, B·H, N, D, E); without decays one for
        all, (1, B·H, 1, D, E). sign: −1 for gradients, with q and dy in place of k and v."""
        if self.inside and self.N == 1:
            return None
        B, H, L, D = k.shape
        E, N = v.shape[-1], self.N
        states = k.new_empty(1 if self.sums is None else 2, B * H, N, D, E, dtype=torch.float32)
        PE = min(_padded(E), 64)
        columns = triton.cdiv(E, PE)
        _launch(
            kernels.states_kernel, B * H * N * columns, k, v, mask, self.sums, states,
            H, L, self.C, N, columns, states.stride(0), *k.stride()[:3], *v.stride()[:3], *self.sums_strides,
            D=D, E=E, S=self.S, PD=_padded(D), PE=PE, SIGN=sign, **self.options,
        )  # fmt: skip
        dtype = k.dtype if k.dtype == torch.bfloat16 else torch.float32  # in which the states are multiplied
        if self.sums is None:
            return states.sum(2, keepdim=True).to(dtype)
        incoming = torch.empty_like(states, dtype=dtype)
        part = 256
        parts = triton.cdiv(D * E, part)
        _launch(
            kernels.scan_kernel, B * H * 2 * parts, states, incoming, self.sums, H, self.C, N, parts, states.stride(0),
            *self.sums_strides, SIZE=D * E, PART=part, STAGES=4, num_warps=2,
        )  # fmt: skip
        return incoming

    def output(self) -> Tensor:
        y = _empty(self.v)
        self.product(self.q, self.k, self.v, y, self.incoming_states(self.k, self.v, self.mask))
        return y

    def product(self, q, k, v, out, incoming, x=None, out_x=None, grad_sums=None) -> None:
        """Fill `out`, and the others that are given, as `kernels.product_kernel` says."""
        D, E = q.shape[-1], v.shape[-1]
        blocks = triton.cdiv(self.L, self.T)
        side = 0 if incoming is None else incoming.stride(0)
        plane = 0 if grad_sums is None else grad_sums.stride(0)
        strides = [stride for operand in (q, k, v, q if x is None else x) for stride in operand.stride()[:3]]
        _launch(
            kernels.product_kernel, self.B * self.H * blocks,
            q, k, v, x, out, out_x, self.mask, self.seed, self.sums, incoming, grad_sums, self.scale,
            self.H, self.L, self.C, self.N, blocks, side, plane, *strides, *self.sums_strides,
            D=D, E=E, T=self.T, S=self.S, PD=_padded(D), PE=_padded(E),
            INSIDE=self.inside, DROPPED=self.dropped, **self.options,
        )  # fmt: skip


@functools.cache
def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _tokens(x: Tensor) -> Tensor:
    """x, (B, H, L, ·), copied only if the features of a token are not contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _empty(x: Tensor) -> Tensor:
    """A tensor like x, (B, H, L, ·), with the heads of a token contiguous, as the layer after attention reads them."""
    B, H, L, size = x.shape
    return x.new_empty(B, L, H, size).transpose(1, 2)


def _dot_precision(dtype: torch.dtype) -> tuple["tl.dtype", str]:
    """The dtype of the operands of matrix products, and their precision. float16 is multiplied as TF32, which holds its
    full mantissa, since scores and states can exceed float16's range. Triton's interpreter cannot multiply bfloat16."""
    if dtype == torch.bfloat16 and not INTERPRETED:
        return tl.bfloat16, "ieee"
    # Whether PyTorch allows TF32 in its own float32 matrix products; newer versions renamed the setting.
    setting = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    tf32_is_allowed = torch.backends.cuda.matmul.allow_tf32 if setting is None else setting == "tf32"
    return tl.float32, "tf32" if dtype != torch.float32 or tf32_is_allowed else "ieee"


def _launch(kernel, programs: int, first: Tensor, *arguments, **options) -> None:
    elsewhere = first.is_cuda and first.get_device() != torch.cuda.current_device()  # Triton launches on the latter
    with torch.cuda.device(first.device) if elsewhere else contextlib.nullcontext():
        kernel[(programs,)](first, *arguments, **options)


def _launch_forward(*arguments) -> Tensor:
    return _Call(*arguments).output()


def _launch_backward(dy: Tensor, *arguments) -> list[Tensor]:
    """∂q, ∂k, ∂v and, if the last argument is True, ∂log_decay; the others are those of `_Call`."""
    *arguments, with_decays = arguments
    call = _Call(*arguments)
    q, k, v, dy = call.q, call.k, call.v, _tokens(dy)
    incoming, grad_incoming = call.incoming_states(k, v, call.mask), call.incoming_states(q, dy, None, sign=-1)
    dq, dk, dv = map(_empty, (q, k, v))
    grad_sums = q.new_empty(6, call.B * call.H * call.N * call.C, dtype=torch.float32) if with_decays else None
    call.product(dy, v, k, dq, incoming, x=q, grad_sums=grad_sums)
    call.product(v, dy, q, dk, grad_incoming, x=k, out_x=dv, grad_sums=grad_sums)
    if not with_decays:
        return [dq, dk, dv]
    log_decay = arguments[3]
    per_head = log_decay.ndim == 1
    grad = q.new_empty(q.shape[:3], dtype=torch.float64 if per_head else log_decay.dtype)
    _launch(
        kernels.decay_gradients_kernel, call.B * call.H * call.N,
        call.log_decay, call.sums, grad_sums, incoming, grad_incoming, grad, call.scale,
        call.H, call.L, call.C, call.N, 0 if incoming is None else incoming.stride(0), grad_sums.stride(0),
        *call.decay_strides, *call.sums_strides, LOG_ZERO=LOG_ZERO, STATE=q.shape[-1] * v.shape[-1], PART=1024,
        SIZE=min(triton.next_power_of_2(call.C), 1024), num_warps=4,
    )  # fmt: skip
    return [dq, dk, dv, grad.sum((0, 2)).to(log_decay.dtype) if per_head else grad]


class _Eager(torch.autograd.Function):
    """The operator outside torch.compile: PyTorch's dispatch of a custom operator takes longer than the launches."""

    @staticmethod
    def forward(ctx, *arguments):
        call = _Call(*arguments)
        save_inputs(ctx, (*arguments[:7], call.sums, *arguments[8:]), None)
        return call.output()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return gradients(ctx, _launch_backward, dy)


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? mask, Tensor? seq_idx, Tensor? seed, Tensor? sums"
_INPUTS += ", float scale, SymInt chunk_size, float dropout_p"
_forward, _backward = operator(_launch_forward, _launch_backward, _INPUTS, _empty)
