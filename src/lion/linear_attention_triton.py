"""Linear attention with a decay mask on a GPU: launches the kernels of triton_kernels.py, forward and backward."""

import contextlib
import functools
import math
import os

import torch
from torch import Tensor
from torch.nn import functional as F

from . import cpu_kernel
from . import triton_kernels as kernels
from .custom_operators import gradients, has_tangents, once_differentiable, operator, save_inputs
from .linear_attention_forms import EPSILON, LOG_ZERO
from .triton_kernels import tl, triton

# Head sizes, of q and k and of v, that fit the registers of one program; larger ones would spill to memory.
LARGEST_HEAD = {torch.bfloat16: 128, torch.float16: 64, torch.float32: 64}
# Triton is known to miscompile such kernels for newer cards than Hopper's; LION_TRITON=force runs them there too.
NEWEST = (99, 0) if os.environ.get("LION_TRITON") == "force" else (9, 0)

# Tiles of each kernel by compute capability, for heads of up to 64: rows, columns, warps and pipeline stages. Those of
# Hopper are, within 6%, the fastest on an H200 by benchmarks/first_card.py, which measures them on a card; those of
# Ampere and Ada were chosen by registers and instructions of the compiled kernels, see benchmarks/kernels.py.
TILES = {
    (8, 0): {"y": (64, 64, 4, 2), "dq": (64, 32, 4, 2), "dk": (64, 32, 4, 2), "states": (64, 32, 4, 3)},
    (9, 0): {"y": (64, 32, 4, 3), "dq": (64, 64, 4, 2), "dk": (64, 64, 4, 2), "states": (64, 32, 4, 3)},
}

# Whether a query reads the keys before it, those after it, and its own.
KEYS = {
    "all": (True, True, True),
    "to": (True, False, True),
    "before": (True, False, False),
    "after": (False, True, False),
}

INTERPRETED = kernels.AVAILABLE and not isinstance(kernels.product_kernel, triton.JITFunction)  # TRITON_INTERPRET=1


def covers(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels support these operands: bfloat16, float16 or float32, heads up to LARGEST_HEAD, on an NVIDIA
    GPU (Ampere, Ada or Hopper) or on any device in Triton's interpreter."""
    return (
        kernels.AVAILABLE
        and _runs_on(q.device)
        and q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
        and max(q.shape[-1], v.shape[-1]) <= LARGEST_HEAD.get(q.dtype, 0)
        and min(q.numel(), v.numel()) > 0
    )


@torch.compiler.assume_constant_result
def _runs_on(device: torch.device) -> bool:
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return INTERPRETED or (is_nvidia and (8, 0) <= _capability(device) <= NEWEST)


_capability = functools.cache(torch.cuda.get_device_capability)


def _card(device: torch.device) -> tuple[int, int]:
    """The compute capability whose tiles are used; Triton's interpreter has none of its own."""
    return _capability(device) if device.type == "cuda" else (9, 0)


def fused_linear_attention(
    q, k, v, log_decay, mask, seq_idx, scale, chunk_size: int, dropout_p: float, forget_logits: bool = False,
    row_mode: str = "", keys: str = "all", log_weight: Tensor | None = None, orders: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `linear_attention`, (B, H, L, E), for operands that `covers` accepts; the full form if `chunk_size` is 0.
    Other arguments are those of `linear_attention`, but for q, k and v of as many heads.
    Only the full form has dropout, with 0 ≤ dropout_p < 1. If k and v are None, q holds all three, (B, L, 3, H, D),
    and so does its gradient. forget_logits: whether log_decay holds logits of 1 − λ. row_mode: "divide" divides each
    row by its sum + EPSILON; "sum" returns rows as they are and their sums, (B, H, L), both in float32. keys: what
    each query reads, of KEYS. log_weight: (B, H, L), the logarithms of weights that keys have in place of their own
    decays; then log_decay must be (B, H, L) too. orders: (O, L) integers, the tokens in each of O orders, of which
    log_decay has one per head, (O·H,) or (B, O·H, L); the results of the orders are added before they are divided,
    which they then must be."""
    seed = None  # one number per matrix, from which both passes derive the dropped entries
    if count_dropped(dropout_p) > 0:
        heads = (q.shape[-2] if v is None else q.shape[1]) * (1 if orders is None else len(orders))
        seed = torch.randint(2**62, (q.shape[0], heads), device=q.device)
    if orders is not None:  # wrong places would be overwritten
        orders = orders.clamp(0, q.shape[-2] - 1).to(torch.int32).contiguous()
    arguments = q, k, v, log_decay, log_weight, mask, seq_idx, orders, seed, None, None, scale, chunk_size, dropout_p
    arguments = *arguments, forget_logits, keys
    if row_mode:
        arguments = *arguments, row_mode
    if type(q) is not Tensor or torch.compiler.is_compiling():
        run = (ATTENTION_ROWS if row_mode else ATTENTION).call
    elif torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments[:5]):
        run = _Eager.apply
    elif has_tangents(*arguments[:5]):
        run = _Eager.apply  # which refuses them
    else:
        run = _launch_forward_rows if row_mode else _launch_forward
    return run(*arguments)[0] if row_mode == "divide" else run(*arguments)


def count_dropped(dropout_p: float) -> int:
    """Of 2^32 entries, those that dropout drops."""
    return round(dropout_p * 2**32)


class Kernel:
    """A kernel with the numbers that it gets after its tensors, and its constants."""

    def __init__(self, name: str, kernel, programs: int, numbers: tuple, **options):
        self.name, self.kernel, self.programs, self.numbers, self.options = name, kernel, programs, numbers, options
        self.compiled, self.constants = None, []

    def launch(self, *tensors: Tensor | None) -> None:
        """Launch it. Triton would look up the compiled kernel by all arguments each time; within a plan, the first call
        decides."""
        if self.compiled is not None:
            self.compiled(*tensors, *self.numbers, *self.constants)
            return
        compiled = self.kernel[(self.programs,)](*tensors, *self.numbers, **self.options)
        if compiled is not None:  # the interpreter has none
            self.keep(compiled[(self.programs, 1, 1)])

    def keep(self, compiled) -> None:
        """Launch this function from now on: it takes the tensors, the numbers and the constants."""
        self.compiled = compiled
        self.constants = [self.options[name] for name in self.kernel.arg_names if name in self.options]


class Plan:
    """How the kernels cut operands of certain types, shapes and strides. Plans are kept, since making one takes the
    host longer than all launches."""

    def __init__(
        self, device, dtype, precision, shape, E, strides, decay_dims, decay_strides, weight_strides: tuple | None,
        packed: bool, given: tuple, orders: int, scale, chunk_size: int, dropped: int, logits: bool, keys: str,
        row_mode: str = "",
    ):  # fmt: skip
        *_, log_weight, mask, order, seq_idx = given
        excluded = packed or any(x is not None for x in (log_weight, mask, seq_idx))
        if order is not None and (excluded or row_mode != "divide"):
            raise ValueError("orders need divided rows, and exclude mask, seq_idx, log_weight, and q, k and v in one")
        B, heads, L, D = shape
        H = heads * orders
        before, after, diagonal = KEYS[keys]
        has_decays = decay_dims > 0 or seq_idx is not None
        self.decays = has_decays or keys != "all"  # of which those that are not given are 1
        self.inside = self.decays or chunk_size == 0
        tiles = {name: tile(name, device, precision, L, max(D, E)) for name in ("y", "dq", "dk", "states")}
        rows = [tiles[name][0] for name in ("y", "dq", "dk")]
        self.G, step = min(rows), max(rows)
        if not self.inside:
            chunk_size *= 4  # nothing is computed inside chunks, and fewer states have to be summed
        self.C = triton.cdiv(min(chunk_size or L, L), step) * step
        self.N = triton.cdiv(L, self.C)
        self.has_states = not (self.inside and self.N == 1)
        uniform = decay_dims < 2 and seq_idx is None  # all chunks decay alike
        # Of the sums of a chunk: 8 numbers per token and 2 per edge of a block, aligned.
        width = triton.cdiv(8 * self.C + 2 * (self.C // self.G + 1), 16) * 16
        self.sums_shape = (1, H, 1, width) if uniform else (B, H, self.N, width)
        sums = (0, width, 0) if uniform else (H * self.N * width, self.N * width, width)
        sums = sums if self.decays else (0, 0, 0)
        directions = before + after if self.decays else 1
        self.row_mode, self.divides = row_mode, row_mode == "divide"
        state = D * E + (D if row_mode else 0)
        self.states_shape = directions, B * H, self.N, state
        # The type in which states are multiplied; without decays they add up whole texts.
        self.states_dtype = dtype if dtype == torch.bfloat16 and has_decays else torch.float32
        side = B * H * self.N * state if self.has_states and before and after else 0
        plane = B * H * self.N * self.C
        tokens, widest = self.C if order is None else L, max(H * max(D, E), *strides[2::3])
        if tokens * widest >= 2**31:
            instead = "use the chunkwise form" if order is None else f"give at most {(2**31 - 1) // widest:,}"
            raise ValueError(f"{tokens:,} tokens are too many for one matrix on a GPU; {instead}")
        where = H, L, self.C, self.N
        q, k, v = strides[:3], strides[3:6], strides[6:]
        dy = L * heads * E, E, heads * E
        size = min(max(triton.next_power_of_2(self.C), 2 * self.G), 1024)
        log_zero = {"LOGITS": logits, "LOG_ZERO": LOG_ZERO}

        def options(name: str) -> dict:
            _, columns, warps, stages = tiles[name]
            dot, ways = precision
            return {"S": min(columns, self.G), "DOT": dot, "PRECISION": ways, "num_warps": warps, "num_stages": stages}

        def states(name: str, D: int, E: int, of_k: tuple, of_v: tuple, keys: bool, **sides: bool) -> list[Kernel]:
            """The kernel that sums each chunk's states, and the one that scans chunks."""
            part = min(_padded(E), 64)
            columns = triton.cdiv(E, part)
            numbers = *where, columns, side, *of_k, *of_v, *sums
            cut = {"D": D, "E": E, "PD": _padded(D), "PE": part, "STATE": state}
            how = {"KEYS": keys, "ORDERS": orders, **cut, **sides, **options("states")}
            own = Kernel(name, kernels.states_kernel, B * H * self.N * columns, numbers, **how)
            parts = triton.cdiv(state, 256)
            scans = B * H * sum(sides.values())
            scan = Kernel(
                "scan", kernels.scan_kernel, scans * parts, (H, self.C, self.N, parts, side, *sums), SIZE=state,
                PART=256, STAGES=4, **sides, num_warps=2,
            )  # fmt: skip
            return [own, scan]

        def product(name: str, D: int, E: int, *of_operands: tuple, out: int, out_x: int, **sides: bool) -> Kernel:
            T = tiles[name][0]
            of_operands = [stride for operand in of_operands for stride in operand]
            blocks = triton.cdiv(L, T)
            numbers = scale, *where, blocks, side, plane, *of_operands, out, out_x, *sums
            cut = {"D": D, "E": E, "PD": _padded(D), "PE": _padded(E), "STATE": state, "T": T, "G": self.G}
            how = {"EPSILON": EPSILON if self.divides and orders == 1 else None, "WEIGHTS": log_weight is not None}
            how |= {**sides, "DIAGONAL": diagonal, "INSIDE": self.inside, "ORDERS": orders, "DROPPED": dropped}
            how |= options(name)
            return Kernel(name, kernels.product_kernel, B * H * blocks, numbers, **cut, **how)

        numbers = H, L, self.C, self.sums_shape[2], width, *decay_strides, *(weight_strides or (0, 0, 0))
        self.sums = Kernel(
            "sums", kernels.sums_kernel, math.prod(self.sums_shape[:3]), numbers, **log_zero, LOG2E=math.log2(math.e),
            G=self.G, SIZE=size, ORDERS=orders, num_warps=4,
        )  # fmt: skip
        # For keys, the sides are exchanged.
        of_queries, of_keys = {"BEFORE": before, "AFTER": after}, {"BEFORE": after, "AFTER": before}
        self.states = states("states", D, E, k, v, True, **of_queries)
        self.grad_states = states("grad_states", D, E, q, dy, False, **of_keys)
        of_q, of_v = (3 * H * D, 3 * H * D) if packed else (H * D, H * E)  # between tokens, in the gradients
        self.y = product("y", D, E, q, k, v, q, out=H * E, out_x=0, **of_queries)
        # Compiled with and without the gradients of decays.
        self.dq = [product("dq", E, D, dy, v, k, q, out=of_q, out_x=0, **of_queries) for _ in range(2)]
        self.dk = [product("dk", E, D, v, dy, q, k, out=of_q, out_x=of_v, **of_keys) for _ in range(2)]
        self.decay_gradients = Kernel(
            "decay_gradients", kernels.decay_gradients_kernel, B * H * self.N,
            (scale, *where, side, plane, *decay_strides, *sums), **log_zero, **of_queries, STATE=state, PART=1024,
            SIZE=size, ORDERS=orders, num_warps=4,
        )  # fmt: skip
        blocks, self.padded = self.N * self.C // self.G, self.N * self.C
        self.division = Kernel(
            "rows", kernels.rows_kernel, B * heads * blocks, (heads, L, self.padded, blocks), E=E, T=self.G,
            PE=_padded(E), EPSILON=orders * EPSILON, num_warps=4,
        )  # fmt: skip
        self.plane, self.packed, self.orders = plane, packed, orders


def tile(name: str, device: torch.device, precision: tuple, length: int, size: int) -> tuple[int, int, int, int]:
    """Return the rows and columns of a kernel's tiles, its warps, and the stages of its loads, for heads of a size."""
    rows, columns, warps, stages = TILES[max(known for known in TILES if known <= _card(device))][name]
    columns = columns if size <= 64 else columns // 2  # with more, a thread runs out of registers
    if precision[0] == tl.float32:
        columns, stages = min(columns, 32), 2
    if precision == (tl.float32, "ieee"):  # no tensor cores, and more than the registers hold
        warps *= 2
    used = min(rows, max(16, triton.next_power_of_2(length)))
    return used, min(columns, used), max(1, warps * used // rows), stages


_plan = functools.lru_cache(1024)(Plan)


class _Call:
    """The operands of one call as the kernels read them. A backward pass gets the `sums`, and the states `incoming` to
    each chunk from left and right, from its forward pass, unless that was compiled."""

    def __init__(
        self, q, k, v, log_decay, log_weight, mask, seq_idx, orders, seed, sums, incoming, scale, chunk_size, dropout_p,
        forget_logits, keys, row_mode="",
    ):  # fmt: skip
        self.seed, self.decay, self.log_weight, self.orders, packed = seed, log_decay, log_weight, orders, v is None
        q, k, v = q.permute(2, 0, 3, 1, 4).unbind() if packed else (q, k, v)
        self.q, self.k, self.v = q, k, v = [*map(cpu_kernel.adjacent_rows, (q, k, v))]
        self.mask = None if mask is None else mask.contiguous()
        seq_idx = None if seq_idx is None else seq_idx.contiguous()
        dims, decay_strides = 0, (0, 0, 0)
        if log_decay is not None:
            dims, decay_strides = log_decay.ndim, log_decay.stride()
            decay_strides = (0, *decay_strides, 0) if dims == 1 else decay_strides
        strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]
        # Triton compiles other code for misaligned pointers.
        tensors = q, k, v, log_decay, log_weight, self.mask, orders, seq_idx
        given = [x if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in tensors]
        self.plan = plan = _plan(
            q.device, q.dtype, _dot_precision(q.dtype), q.shape, v.shape[-1], strides, dims, decay_strides,
            None if log_weight is None else log_weight.stride(), packed, tuple(given),
            1 if orders is None else len(orders), scale / (1 - dropout_p), chunk_size, count_dropped(dropout_p),
            forget_logits, keys, row_mode,
        )  # fmt: skip
        if sums is None and plan.decays:
            sums = torch.empty(plan.sums_shape, dtype=torch.float32, device=q.device)
            plan.sums.launch(sums, log_decay, log_weight, seq_idx, orders)
        self.sums = sums
        self.incoming = incoming if incoming is not None else self.pass_states(plan.states, k, v, self.mask, None)

    def pass_states(self, both: list[Kernel], k: Tensor, v: Tensor, mask: Tensor | None, grad_rows: Tensor | None):
        """The states that enter each chunk from the left and from the right, (2, B·H, N, ·); without decays one for
        all, (1, B·H, 1, ·). None if there are none. For gradients, q and dy are in place of k and v, and grad_rows are
        those of the row sums."""
        plan = self.plan
        if not plan.has_states:
            return None
        states = torch.empty(plan.states_shape, dtype=plan.states_dtype, device=k.device)
        own, scan = both
        own.launch(k, v, mask, self.orders, grad_rows, self.sums, states)
        if self.sums is None:
            return states if plan.N == 1 else states.sum(2, keepdim=True)
        incoming = torch.empty_like(states)
        scan.launch(states, incoming, self.sums)
        return incoming

    def output(self) -> tuple[Tensor, Tensor | None]:
        """y, and the row sums if there are any."""
        v, plan = self.v, self.plan
        if plan.orders == 1:
            y, row_sums = _empty_output(None, None, v, plan.row_mode), _empty_row_sums(v) if plan.row_mode else None
        else:  # float16 could not hold rows that are not divided yet
            y = self.in_orders(v, v.dtype if v.dtype == torch.bfloat16 else torch.float32)
            row_sums = _empty_row_sums(y)
        rest = self.mask, self.orders, self.seed, row_sums, self.sums, self.incoming, None
        plan.y.launch(self.q, self.k, v, None, y, None, *rest)
        if plan.orders > 1:
            y, row_sums = self.added(y, torch.float32), row_sums.unflatten(1, (plan.orders, -1)).sum(1)
            y = (y / (row_sums + plan.orders * EPSILON)[..., None]).to(v.dtype)
        return y, row_sums

    def in_orders(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """An empty tensor like x, (B, H, L, ·), for each order, (B, O·H, L, ·)."""
        B, H, L, size = x.shape
        return x.new_empty(B, L, self.plan.orders * H, size, dtype=dtype).transpose(1, 2)

    def added(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum over orders, (B, H, L, ·), of (B, O·H, L, ·)."""
        return x.transpose(1, 2).unflatten(2, (self.plan.orders, -1)).sum(2, dtype=dtype).transpose(1, 2)

    def gradients(self, with_decays: bool, dy: Tensor, grad_rows, y, row_sums) -> list[Tensor]:
        """∂q, ∂k, ∂v, or of all three in one, and, if requested, ∂log_decay and ∂log_weight. Of rows that were divided,
        y and row_sums are what `output` returned; of others with row sums, grad_rows are the gradients of these."""
        plan, q, k, v = self.plan, self.q, self.k, self.v
        dy = _laid_out(dy)
        if plan.divides:  # float16 could not hold a gradient that is divided by a small sum
            undivided = torch.empty_like(dy, dtype=dy.dtype if dy.dtype == torch.bfloat16 else torch.float32)
            grad_rows = row_sums.new_empty(*row_sums.shape[:2], plan.padded)
            plan.division.launch(dy, _laid_out(y), row_sums.contiguous(), undivided, grad_rows)
            dy = undivided
            if self.orders is not None:
                grad_rows = grad_rows.index_select(2, self.orders.flatten()).unflatten(2, self.orders.shape)
                grad_rows = F.pad(grad_rows.transpose(1, 2).contiguous(), (0, plan.padded - q.shape[2]))
        elif plan.row_mode:
            grad_rows = F.pad(grad_rows, (0, plan.padded - grad_rows.shape[-1])).contiguous()
        if plan.packed:
            (B, H, L, D) = q.shape
            whole = torch.empty(B, L, 3, H, D, dtype=q.dtype, device=q.device)
            grads, (dq, dk, dv) = [whole], whole.unbind(2)
        else:
            grads = dq, dk, dv = [_empty(x) if plan.orders == 1 else self.in_orders(x, x.dtype) for x in (q, k, v)]
        grad_incoming = self.pass_states(plan.grad_states, q, dy, None, grad_rows)
        grad_sums = None
        if with_decays:
            grad_sums = torch.empty(6, plan.plane, dtype=torch.float32, device=q.device)
        rest = self.mask, self.orders, self.seed, grad_rows, self.sums
        plan.dq[with_decays].launch(dy, v, k, q, dq, None, *rest, self.incoming, grad_sums)
        plan.dk[with_decays].launch(v, dy, q, k, dk, dv, *rest, grad_incoming, grad_sums)
        if plan.orders > 1:
            grads = [self.added(x, x.dtype) for x in grads]
        if not with_decays:
            return grads
        B, H, L, _ = q.shape
        H *= plan.orders
        per_head = self.decay.ndim == 1
        grad = torch.empty(B, L, H, dtype=torch.float64 if per_head else self.decay.dtype, device=q.device)
        of_weight = None if self.log_weight is None else grad.new_empty(B, L, H, dtype=self.log_weight.dtype)
        plan.decay_gradients.launch(
            grad, of_weight, self.decay, self.orders, self.sums, grad_sums, self.incoming, grad_incoming
        )
        grads.append(grad.sum((0, 1)).to(self.decay.dtype) if per_head else grad.mT)
        return grads if of_weight is None else [*grads, of_weight.mT]


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _empty(x: Tensor) -> Tensor:
    """A tensor like x, (B, H, L, ·), with the heads of a token contiguous, as the layer after attention reads them; or
    like q, k and v in one, (B, L, 3, H, ·)."""
    if x.ndim == 5:
        return x.new_empty(x.shape)
    B, H, L, size = x.shape
    return x.new_empty(B, L, H, size).transpose(1, 2)


def _empty_row_sums(v: Tensor) -> Tensor:
    return v.new_empty(v.shape[:-1], dtype=torch.float32)


def _laid_out(x: Tensor) -> Tensor:
    """x with the strides of `_empty(x)`, from an aligned address; copied only if it has others."""
    return x if x.transpose(1, 2).is_contiguous() and x.data_ptr() % 16 == 0 else _empty(x).copy_(x)


def _empty_decays(x: Tensor) -> Tensor:
    """A tensor like the gradient of log decays, (H,) or (B, H, L)."""
    return x.new_empty(x.shape) if x.ndim == 1 else x.new_empty(x.mT.shape).mT


def _empty_output(q: Tensor | None, k: Tensor | None, v: Tensor | None, *others) -> Tensor:
    """In float32 if rows are not divided yet: float16 could not hold them or their gradients."""
    y = _empty(q.select(2, 0).transpose(1, 2) if v is None else v)
    return torch.empty_like(y, dtype=torch.float32) if others[-1:] == ("sum",) else y


def _empty_outputs(*inputs) -> tuple[Tensor, Tensor]:
    y = _empty_output(*inputs)
    return y, _empty_row_sums(y)


def _dot_precision(dtype: torch.dtype) -> tuple["tl.dtype", str]:
    """The dtype of the operands of matrix products, and their precision. float16 is multiplied as TF32, which holds its
    full mantissa, since scores and states can exceed float16's range. Triton's interpreter cannot multiply bfloat16."""
    if dtype == torch.bfloat16 and not INTERPRETED:
        return tl.bfloat16, "ieee"
    # Whether PyTorch allows TF32 in its own float32 matrix products; newer versions renamed the setting.
    setting = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    tf32_is_allowed = torch.backends.cuda.matmul.allow_tf32 if setting is None else setting == "tf32"
    return tl.float32, "tf32" if dtype != torch.float32 or tf32_is_allowed else "ieee"


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    """Make a GPU the current one, on which Triton launches."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else contextlib.nullcontext()


def _launch_forward(*arguments) -> Tensor:
    return _launch_forward_rows(*arguments)[0]


def _launch_forward_rows(*arguments) -> tuple[Tensor, Tensor | None]:
    with _on(arguments[0].device):
        return _Call(*arguments).output()


def _launch_backward(dy: Tensor, *arguments) -> list[Tensor]:
    """The gradients of `_Call.gradients`; the arguments are those of `_Call`, and whether decays need one."""
    return _launch_backward_rows(dy, None, None, None, *arguments)


def _launch_backward_rows(dy: Tensor, grad_rows, y, row_sums, *arguments) -> list[Tensor]:
    *arguments, with_decays = arguments
    with _on(dy.device):
        return _Call(*arguments).gradients(with_decays, dy, grad_rows, y, row_sums)


class _Eager(torch.autograd.Function):
    """The operator outside torch.compile: PyTorch's dispatch of a custom operator takes longer than the launches."""

    @staticmethod
    def forward(ctx, *arguments):
        with _on(arguments[0].device):
            call = _Call(*arguments)
            outputs = call.output()
        inputs, mode = (*arguments[:9], call.sums, call.incoming, *arguments[11:]), call.plan.row_mode
        # Only the gradients of divided rows need the outputs, and nobody reads the row sums of these.
        save_inputs(ctx, inputs, {"": None, "sum": (None, None), "divide": outputs}[mode])
        ctx.set_materialize_grads(mode != "divide")
        return outputs if mode else outputs[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return gradients(ctx, _launch_backward if len(grads) == 1 else _launch_backward_rows, *grads)


_INPUTS = "Tensor q, Tensor? k, Tensor? v, Tensor? log_decay, Tensor? log_weight, Tensor? mask, Tensor? seq_idx"
_INPUTS += ", Tensor? orders, Tensor? seed, Tensor? sums, Tensor? incoming, float scale, SymInt chunk_size"
_INPUTS += ", float dropout_p, bool forget_logits, str keys"
ATTENTION = operator(_launch_forward, _launch_backward, _INPUTS, _empty, _empty_output, _empty_decays)
_INPUTS += ", str row_mode"
ATTENTION_ROWS = operator(
    _launch_forward_rows, _launch_backward_rows, _INPUTS, _empty, _empty_outputs, _empty_decays, outputs=2
)
