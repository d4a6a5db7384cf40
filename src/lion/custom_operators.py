"""Custom operators, which hide kernels and loops from torch.compile: it would unroll the loops."""

import contextlib
import re
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad


def operator(
    forward: Callable, backward: Callable, inputs: str, empty, output=None, of_decay=None, outputs: int = 1
) -> list[Callable]:
    """Register forward(q, k, v, ...) and its gradient as operators, and return both. `inputs` is their schema, tensors
    first. `backward` takes the output's gradient, the inputs, and whether any other floating-point tensor (log decays)
    needs a gradient; it returns the gradients of q, k and v, if given, and, if so, of all those. A compiler expects the
    layout of `empty(x)` for gradients of q, k and v, of `of_decay(x)` for others, and of `output(q, k, v)`. With
    several outputs, `backward` takes their gradients, the outputs, and then the inputs."""
    name = re.sub(r"\W", "_", forward.__module__)  # its copy in a Hub folder registers its own operators
    results = f"({', '.join(['Tensor'] * outputs)})" if outputs > 1 else "Tensor"
    leading = [f"Tensor leading_{number}" for number in range(2 * outputs if outputs > 1 else 1)]
    schemas = f"({inputs}) -> {results}", f"({', '.join(leading)}, {inputs}, bool with_decays) -> Tensor[]"
    run, run_backward = operators = [
        torch.library.custom_op(f"{name}::{function.__name__[1:]}", function, mutates_args=(), schema=schema)
        for function, schema in zip((forward, backward), schemas)
    ]

    @run_backward.register_fake
    def _(*given):
        q, k, v, *others = given[len(leading) :]
        decays = [x for x in others if isinstance(x, Tensor) and x.is_floating_point()] if others[-1] else []
        of_decays = [of_decay(x) if of_decay else x.new_empty(x.shape) for x in decays]
        return [*(empty(x) for x in (q, k, v) if x is not None), *of_decays]

    run.register_fake(lambda q, k, v, *others: output(q, k, v) if output else empty(v))
    run.register_autograd(lambda ctx, *grads: gradients(ctx, run_backward, *grads), setup_context=save_inputs)
    return operators


def has_tangents(*inputs) -> bool:
    """Whether derivatives in forward mode are computed of any of these, which an operator would drop."""
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return False
    return any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in inputs)


def save_inputs(ctx, inputs: tuple, output: Tensor | tuple[Tensor, ...] | None) -> None:
    """Save the inputs and, if there are several, the outputs."""
    tensors = [x for x in inputs if x is None or isinstance(x, Tensor)]
    ctx.save_for_backward(*tensors, *(output if isinstance(output, tuple) else ()))
    ctx.numbers = inputs[len(tensors) :]


def gradients(ctx, backward: Callable, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of an operator's inputs, from `backward` and what `save_inputs` saved."""
    saved = ctx.saved_tensors  # read once, which is all that activation checkpointing allows
    count = len(ctx.needs_input_grad) - len(ctx.numbers)
    tensors, outputs = saved[:count], saved[count:]
    with no_autocast(grads[0]):
        grads = iter(backward(*grads, *outputs, *tensors, *ctx.numbers, any(ctx.needs_input_grad[3:])))
    floating = (x is not None and x.is_floating_point() for x in tensors)
    return *(next(grads, None) if x else None for x in floating), *[None] * len(ctx.numbers)


def no_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """A context in which autocast is off on x's device. To check takes a tenth of the time of turning it off."""
    kind = x.device.type
    on = not x.is_meta and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else contextlib.nullcontext()
