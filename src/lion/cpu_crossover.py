"""Up to which length the full form is faster than the chunkwise form, both by the kernel of cpu_kernel.py. The matrix
costs fewer operations up to about 192 tokens of heads of 64, but its products are larger and thus faster. Measured for
heads of 64 and both triangles, without what autograd adds to a call."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from . import machine
from .cpu_kernel import signed_sums, version
from .linear_attention_forms import DIRECTIONS, LOG_ZERO, chunkwise, full
from .linear_attention_native import chunkwise_backward, full_backward

LENGTHS = (128, 192, 256, 320, 384, 512)  # those that are measured; shorter texts take the full form, longer ones never
HEADS, HEAD_DIM, ROUNDS = 12, 64, 9


def full_is_faster(length: int) -> bool:
    """Whether the full form is, at this length: in training if gradients are enabled, otherwise in inference."""
    if not LENGTHS[0] < length <= LENGTHS[-1] or torch._C._are_functorch_transforms_active():
        return length <= LENGTHS[0]  # within such a transform, no tensor has the memory that a measurement needs
    return length <= full_up_to()["training" if torch.is_grad_enabled() else "inference"]


def full_up_to() -> dict[str, int]:
    """What `measure` has found on this machine, now or earlier."""
    return machine.choice("full_up_to", measure, version())


@torch.no_grad()  # the first call may be within a context that records what autograd does
def measure() -> dict[str, int]:
    """Time both forms at some LENGTHS, in turns; takes half a second. Return where their times are equal."""
    return {"inference": _crossover(_inference), "training": _crossover(_training)}


def _crossover(prepare: Callable) -> int:
    length_before, ratio_before = LENGTHS[0], 1.0
    for length in LENGTHS:
        ratio = _ratio(*prepare(length))
        if ratio < 1:
            step = (length - length_before) * (ratio_before - 1) / (ratio_before - ratio)
            return length_before + round(step)
        length_before, ratio_before = length, ratio
    return LENGTHS[-1]


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


def _inference(length: int) -> tuple[Callable, Callable]:
    q, k, v, _, sums = _operands(length)
    operands = q, k, v, sums, None, None
    return (
        lambda: full(*operands, None, 1.0, 1.0, "shared"),
        lambda: chunkwise(*operands, 1.0, 128, False, "shared"),
    )


def _training(length: int) -> tuple[Callable, Callable]:
    in_full, in_chunks = _inference(length)
    q, k, v, grad, sums = _operands(length)
    operands = grad, q, k, v, sums, None, None
    return (
        lambda: (in_full(), full_backward(*operands, None, None, 1.0, 1.0, DIRECTIONS["shared"], 0.0, with_sums=True)),
        lambda: (in_chunks(), chunkwise_backward(*operands, None, 1.0, 128, False, "shared", DIRECTIONS, True)),
    )


def _operands(length: int) -> tuple[Tensor, ...]:
    """q, k, v and a gradient, (1, H, L, D), and sums of decays."""
    heads, how = max(HEADS, torch.get_num_threads()), {"dtype": torch.float32, "device": "cpu"}
    shape = 4, 1, length, heads, HEAD_DIM
    q, k, v, grad = torch.rand(shape, generator=torch.Generator(), **how).transpose(2, 3)
    return q, k, v, grad, signed_sums(torch.full((heads,), -0.1, **how), length, LOG_ZERO)
