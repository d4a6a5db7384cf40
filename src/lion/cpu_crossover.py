"""Up to which length the full form is faster than the chunkwise form, both by the kernel of cpu_kernel.py. By the
number of operations, it is about 192 tokens for heads of 64; but products of a whole matrix are larger and thus faster;
where rows are divided by their sums, the chunkwise form has one column more than fills its vectors; and several orders
share the products of a matrix. Measured for heads of 64 and both triangles, without what autograd adds to a call."""

import functools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from . import linear_attention_native as native
from . import machine
from .cpu_kernel import signed_sums, version
from .linear_attention_forms import DIRECTIONS, EPSILON, LOG_ZERO, chunkwise, divided, full, with_ones

# Those that are measured. Texts of up to the first take the full form, and longer ones than the last never.
LENGTHS = (128, 192, 256, 320, 384, 512, 768, 1024)
KINDS = PLAIN, NORMALIZED, IN_ORDERS = "", "_normalized", "_in_orders"  # the last: of two orders, and normalized
HEAD_DIM, ROUNDS = 64, 9


def full_is_faster(length: int, kind: str = PLAIN) -> bool:
    """Whether the full form is, at this length: in training if gradients are enabled, otherwise in inference."""
    if not LENGTHS[0] < length <= LENGTHS[-1] or torch._C._are_functorch_transforms_active():
        return length <= LENGTHS[0]  # within such a transform, no tensor has the memory that a measurement needs
    return length <= full_up_to(kind)["training" if torch.is_grad_enabled() else "inference"]


def full_up_to(kind: str) -> dict[str, int]:
    """What `measure` has found on this machine, now or earlier."""
    return machine.choice(f"full_up_to{kind}", _measurement(kind), version())


@functools.cache  # one object for each kind, by which a choice is found that this process has made
def _measurement(kind: str) -> Callable[[], dict[str, int]]:
    return lambda: measure(kind)


@torch.no_grad()  # the first call may be within a context that records what autograd does
def measure(kind: str) -> dict[str, int]:
    """Time both forms at some LENGTHS, in turns; takes half a second, for two orders a second. Return where their times
    are equal."""
    return {
        mode: _crossover(functools.partial(prepare, kind=kind))
        for mode, prepare in (("inference", _inference), ("training", _training))
    }


def _crossover(prepare: Callable) -> int:
    """Bisect LENGTHS, since the ratio falls with the length, and interpolate."""
    ratios, shorter, longer = {}, -1, len(LENGTHS)  # the last at which the full form is no slower, and the next
    while longer - shorter > 1:
        middle = (shorter + longer) // 2
        ratios[middle] = _ratio(*prepare(LENGTHS[middle]))
        shorter, longer = (middle, longer) if ratios[middle] >= 1 else (shorter, middle)
    if shorter < 0 or longer == len(LENGTHS):
        return LENGTHS[max(shorter, 0)]
    share = (ratios[shorter] - 1) / (ratios[shorter] - ratios[longer])
    return round(LENGTHS[shorter] + share * (LENGTHS[longer] - LENGTHS[shorter]))


def _ratio(full: Callable, chunkwise: Callable) -> float:
    """The time of the second over that of the first."""
    ratios = []
    for number in range(ROUNDS):
        seconds = {}
        for run in (full, chunkwise) if number % 2 else (chunkwise, full):
            start = time.perf_counter()
            run()
            seconds[run] = time.perf_counter() - start
        ratios.append(seconds[chunkwise] / seconds[full])
    return statistics.median(ratios)


def _inference(length: int, kind: str) -> tuple[Callable, Callable]:
    q, k, v, _, log_decay, sums, order = _operands(length, kind)
    how = {"order": order, "normalize": kind != PLAIN}

    def in_chunks() -> Tensor:
        if kind == PLAIN:
            return chunkwise(q, k, v, sums, None, None, 1.0, 128, False, "shared")
        return divided(chunkwise(q, k, with_ones(v), sums, None, None, 1.0, 128, False, "shared", order))

    return lambda: full(q, k, v, log_decay, None, None, None, 1.0, 1.0, "shared", **how), in_chunks


def _training(length: int, kind: str) -> tuple[Callable, Callable]:
    q, k, v, grad, log_decay, sums, order = _operands(length, kind)
    in_full, in_chunks = _inference(length, kind)
    wide, row_sums = v if kind == PLAIN else with_ones(v), v[..., 0].contiguous()
    epsilon, options = 0.0 if kind == PLAIN else EPSILON, (1.0, 128, False, "shared")
    operands = log_decay, None, None, None, order, 1.0, 1.0, DIRECTIONS["shared"], epsilon, LOG_ZERO

    def train_in_full() -> None:
        in_full()
        native.full_backward(grad, q, k, v, *operands, with_sums=True, rows=() if kind == PLAIN else (v, row_sums))

    def train_in_chunks() -> None:
        in_chunks()
        of_y = grad  # what autograd computes of the division
        if kind != PLAIN:
            of_y = torch.cat([grad / row_sums[..., None], (grad * v).sum(-1, keepdim=True)], -1)
        native.chunkwise_backward(of_y, q, k, wide, sums, None, None, order, *options, DIRECTIONS, True)

    return train_in_full, train_in_chunks


def _operands(length: int, kind: str) -> tuple[Tensor | None, ...]:
    """q, k, v and a gradient, (1, H, L, D), log decays, their sums, and orders."""
    heads, how = 4 * torch.get_num_threads(), {"dtype": torch.float32, "device": "cpu"}
    shape = 4, 1, length, heads, HEAD_DIM
    q, k, v, grad = torch.rand(shape, generator=torch.Generator(), **how).transpose(2, 3)
    places = torch.arange(length, device="cpu")
    order = torch.stack([places, places.flip(0)]) if kind == IN_ORDERS else None
    log_decay = torch.full((1, heads * (1 if order is None else 2), length), -0.1, **how)
    return q, k, v, grad, log_decay, signed_sums(log_decay, length, LOG_ZERO, order), order
