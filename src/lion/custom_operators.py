"""Custom operators, which hide kernels and loops from torch.compile: it would unroll the loops."""

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad

VERSION = 2  # of what operators announce to a compiler: Inductor finds what it compiled earlier by their names


class Operator(NamedTuple):
    """An operator with a gradient, and the two that it calls, which know nothing of autograd."""

    call: OpOverload
    forward: OpOverload
    backward: OpOverload


def operator(
    forward: Callable, backward: Callable, inputs: str, empty, output=None, of_decay=None, outputs: int = 1
) -> Operator:
    """Register forward(q, k, v, ...), with its gradient. `inputs` is its schema, tensors first. `backward` takes the
    output's gradient, the inputs, and whether any other floating-point tensor (log decays) needs a gradient; it returns
    the gradients of q, k and v, if given, and, if so, of all those. A compiler expects the dtype and layout of
    `empty(x)` for gradients of q, k and v, of `of_decay(x)` for others, and of `output(*inputs)`, which is `empty(v)`
    by default. With several outputs, `backward` takes their gradients, the outputs, and then the inputs."""
    # A copy in a Hub folder, whose name may have any letters, registers operators of its own.
    module = forward.__module__.replace(".", "_")
    module = re.sub(r"\W", lambda letter: f"_{ord(letter[0]):x}_", module, flags=re.ASCII)
    namespace = f"{module}_{VERSION}"
    while hasattr(getattr(torch.ops, namespace), forward.__name__[1:]):  # that of a module that is imported again
        namespace += "_"
    results = f"({', '.join(['Tensor'] * outputs)})" if outputs > 1 else "Tensor"
    leading = [f"Tensor leading_{number}" for number in range(2 * outputs if outputs > 1 else 1)]
    of_backward = f"({', '.join(leading)}, {inputs}, bool with_decays) -> Tensor[]"
    run = _register(f"{namespace}::{forward.__name__[1:]}", f"({inputs}) -> {results}", forward)
    run_backward = _register(f"{namespace}::{backward.__name__[1:]}", of_backward, backward)

    @torch.library.register_fake(run_backward)
    def _(*given):
        q, k, v, *others = given[len(leading) :]
        decays = [x for x in others if isinstance(x, Tensor) and x.is_floating_point()] if others[-1] else []
        of_decays = [of_decay(x) if of_decay else x.new_empty(x.shape) for x in decays]
        return [*(empty(x) for x in (q, k, v) if x is not None), *of_decays]

    torch.library.register_fake(run, lambda *given: output(*given) if output else empty(given[2]))

    class Differentiable(torch.autograd.Function):
        forward, setup_context = staticmethod(run), staticmethod(save_inputs)
        backward = staticmethod(once_differentiable(lambda ctx, *grads: gradients(ctx, run_backward, *grads)))

    # A compiler traces through a composite operator to those that it calls, so a compiled model spends no time on
    # autograd, as it would with a `torch.library.custom_op`.
    def differentiable(*given):
        return Differentiable.apply(*given)

    name, schema = f"{run.name()}_differentiable", f"({inputs}) -> {results}"
    return Operator(_register(name, schema, differentiable, "CompositeImplicitAutograd"), run, run_backward)


def _register(name: str, schema: str, function: Callable, key: str = "CompositeExplicitAutograd") -> OpOverload:
    torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, key, function)
    namespace, name = name.split("::")
    return getattr(getattr(torch.ops, namespace), name).default


def once_differentiable(backward: Callable) -> Callable:
    """Decorate the backward pass of a torch.autograd.Function whose gradients have no gradients. Unlike with torch's
    decorator of this name, torch.autograd.grad does not omit their part of a second derivative either."""

    @functools.wraps(backward)
    def first_order(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        once = _ReadOnce(ctx)
        with torch.no_grad():
            results = backward(once, *grads)
        results = results if isinstance(results, tuple) else (results,)
        sources = [x for x in (*grads, *once.saved_tensors) if x is not None and x.requires_grad]
        return tuple(None if x is None else _Underivable.apply(x, *sources) for x in results)

    return first_order


class _ReadOnce:
    """A context whose saved tensors are read once, which is all that activation checkpointing allows."""

    def __init__(self, ctx):
        self.ctx = ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)

    @functools.cached_property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        return self.ctx.saved_tensors


class _Underivable(torch.autograd.Function):
    """A gradient that depends on all sources; its own gradient is an error."""

    @staticmethod
    def forward(ctx, x: Tensor, *_sources: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, _grad: Tensor):
        raise RuntimeError(
            "second derivatives are not implemented for this model; compute gradients without create_graph=True"
        )


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


def as_autocast(x: Tensor) -> Tensor:
    """x in the dtype to which autocast, if it is on, would convert it for each linear layer."""
    kind = x.device.type
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))
