"""Linear layers on a CPU. torch multiplies float32 matrices with MKL, and has an operator that does so with oneDNN:
which of the two is faster, by up to half, depends on the processor, on the number of tokens, and on the product (the
output, the gradient of the input, that of the weights)."""

import collections
import itertools
import statistics
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules import module

from . import machine
from .custom_operators import once_differentiable

TOKENS = (8, 32, 128, 256, 512, 1024)  # that are measured; fewer are left to MKL
# The weights that are measured; others are treated like the one with the most similar ratio of sides.
SHAPES = {"square": (768, 768), "wider": (3072, 768), "narrower": (768, 3072)}
MIN_WEIGHTS, MIN_PRODUCTS = 2**15, 2**22  # for smaller layers, the checks below would cost more than they save
NEVER = dict.fromkeys(SHAPES, [[]] * 3)  # what `measure` returns where MKL is always faster
TIE = 0.95  # of MKL's time: what oneDNN may take
FEW = 128  # tokens; so many or fewer are the second operand, which oneDNN reorders in memory, instead of the weights


class LinearLayers:
    """A module that computes its linear layers by this method, which cpu.py replaces."""

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return layer(x)


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """Compute layer(x), (..., D) to (..., E), by oneDNN where it is faster."""
    if _left_to_torch(x) or type(layer) is not nn.Linear or not _is_large(layer.weight, x):
        return layer(x)
    by_onednn = _by_onednn(layer.weight, x) if _is_plain(layer, x) else ()
    if not any(by_onednn):
        return layer(x)
    return _Linear.apply(x, layer.weight, layer.bias, by_onednn)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, by_onednn: tuple[bool, ...]) -> Tensor:
        needed = ctx.needs_input_grad
        ctx.save_for_backward(x if needed[1] else None, weight if needed[0] else None)
        ctx.by_onednn = by_onednn
        return _output(x, weight, bias, by_onednn[0])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needed, (_, of_input, of_weight) = ctx.needs_input_grad, ctx.by_onednn
        if _needs_torch_backward(grad):
            of_input = of_weight = False
        return (
            _of_input(grad, weight, of_input) if needed[0] else None,
            _of_weight(grad, x, of_weight) if needed[1] else None,
            grad.reshape(-1, grad.shape[-1]).sum(0) if needed[2] else None,
            None,
        )


def split_linear(layer: nn.Module, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Compute layer(x).split(sizes, -1), (..., D) to (..., E_i), as tensors with their own memory. Gradients of parts
    of one tensor would first be copied next to each other, on two cores of a base model for 3 ms per layer."""
    if _left_to_torch(x) or not _is_plain(layer, x) or layer.bias is not None:
        return layer(x).split(sizes, -1)
    return _SplitLinear.apply(x, layer.weight, sizes)


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        return tuple(_output(x, part, None, _by_onednn(part, x)[0]) for part in weight.split(sizes))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = None, torch.empty_like(weight)
        for grad, part, target in zip(grads, weight.split(ctx.sizes), grad_weight.split(ctx.sizes)):
            _, of_input, of_weight = _by_onednn(part, x)
            of_x = _of_input(grad, part, of_input)
            grad_x = of_x if grad_x is None else grad_x.add_(of_x)
            if of_weight:
                target.copy_(_of_weight(grad, x, True))
            else:
                torch.mm(grad.flatten(0, -2).T, x.flatten(0, -2), out=target)
        return grad_x, grad_weight, None


# The products; x: (..., D), weight: (E, D), grad: (..., E)


def _output(x: Tensor, weight: Tensor, bias: Tensor | None, by_onednn: bool) -> Tensor:
    if not by_onednn:
        return F.linear(x, weight, bias)
    tokens = x.flatten(0, -2)
    if len(tokens) > FEW:
        y = _multiply(tokens, weight, bias)
    else:
        y = _multiply(weight, tokens).T.contiguous()
        y = y if bias is None else y.add_(bias)
    return y.view(*x.shape[:-1], len(weight))


def _of_input(grad: Tensor, weight: Tensor, by_onednn: bool) -> Tensor:
    if not by_onednn:
        return grad @ weight
    return _multiply(grad.flatten(0, -2), weight.T).view(*grad.shape[:-1], weight.shape[1])


def _of_weight(grad: Tensor, x: Tensor, by_onednn: bool) -> Tensor:
    grad, x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    return _multiply(grad.T, x.T) if by_onednn else grad.T @ x


def _multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a bᵀ + bias, (rows of a, rows of b), by the operator of oneDNN that torch.compile calls."""
    # With gaps between their numbers, oneDNN would take hundreds of times as long.
    a, b = (x if x.is_contiguous() or x.T.is_contiguous() else x.contiguous() for x in (a, b))
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


# Which of them oneDNN computes


def _left_to_torch(x: Tensor) -> bool:
    """Whether x is not on a CPU, or something records the model. To be asked before reading a size, which adds a
    guard."""
    return x.device.type != "cpu" or torch.compiler.is_compiling() or torch.jit.is_tracing()


def _is_plain(layer: nn.Module, x: Tensor) -> bool:
    """Whether `layer` is nn.Linear, not replaced, wrapped or hooked, all is float32 on a CPU, and nothing transforms
    it."""
    return (
        x.dtype == torch.float32
        and type(x) in (Tensor, nn.Parameter)
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and type(layer) is nn.Linear
        and _is_parameter(layer.weight, len(layer.weight), x.shape[-1])
        and (layer.bias is None or (_is_parameter(layer.bias, len(layer.weight)) and layer.bias.is_contiguous()))
        and not is_hooked(layer)
    )


def _is_parameter(x: Tensor, *shape: int) -> bool:
    kind = x.device.type, x.dtype, x.layout
    return type(x) in (Tensor, nn.Parameter) and kind == ("cpu", torch.float32, torch.strided) and x.shape == shape


def _needs_torch_backward(grad: Tensor) -> bool:
    """Whether torch must compute this backward pass: oneDNN's operator supports neither second derivatives, nor
    batches of gradients, nor counts of operations."""
    batched = torch._C._are_functorch_transforms_active() or torch._C._functorch.is_legacy_batchedtensor(grad)
    return torch.is_grad_enabled() or batched or has_global_hooks()


def _is_large(weight: Tensor, x: Tensor) -> bool:
    size = weight.numel()
    return size >= MIN_WEIGHTS and x.shape[:-1].numel() * size >= MIN_PRODUCTS


def is_hooked(layer: nn.Module) -> bool:
    """Whether hooks look at a module, or its forward is replaced, as accelerate does to load weights."""
    forward = "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks
    return bool(forward or layer._backward_hooks or layer._backward_pre_hooks) or has_global_hooks()


def is_unchanged(layer: nn.Module, kind: type) -> bool:
    """Whether a layer computes what its kind does, maybe with weights that are computed, and need not be called."""
    same = isinstance(layer, kind) and type(layer).forward is kind.forward
    if torch.compiler.is_compiling():
        return same and not (layer._forward_hooks or layer._forward_pre_hooks)
    return same and not is_hooked(layer)


def has_global_hooks() -> bool:
    """Whether hooks look at all modules, as those of torch's FlopCounterMode do."""
    forward = module._global_forward_hooks or module._global_forward_pre_hooks
    return bool(forward or module._global_backward_hooks or module._global_backward_pre_hooks)


def _by_onednn(weight: Tensor, x: Tensor) -> tuple[bool, ...]:
    """Whether oneDNN computes the output of x, (..., D), and weight, (E, D), and the gradients of either, faster."""
    tokens, onednn = x.shape[:-1].numel(), torch.backends.mkldnn
    # Where float32 matrix products may use lower precision, torch calls oneDNN itself.
    if hasattr(onednn, "matmul"):  # newer than torch 2.7
        exact = onednn.matmul.fp32_precision in ("none", "ieee")
    else:
        exact = torch.get_float32_matmul_precision() != "medium"
    possible = (
        exact
        and tokens >= TOKENS[0]
        and onednn.enabled
        and can_choose()
        and _is_large(weight, x)
        and tokens * max(weight.shape) < 2**31  # larger products are untested
    )
    if not possible:
        return False, False, False
    wider, narrower = (a > 1.5 * b for a, b in (weight.shape, weight.shape[::-1]))
    shape = "wider" if wider else "narrower" if narrower else "square"
    return tuple(_is_within(changes, tokens) for changes in machine.choice("onednn_from", measure)[shape])


def _is_within(changes: list[int], tokens: int) -> bool:
    """Whether oneDNN computes so many tokens; `changes` as of `measure`."""
    return sum(change <= tokens for change in changes) % 2 > 0


def can_choose() -> bool:
    """Whether this process has both libraries; without MKL torch multiplies matrices with another one."""
    has_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_onednn and torch.backends.mkl.is_available()


def measure() -> dict[str, list[list[int]]]:
    """Time both ways of each product of some numbers of TOKENS, in turns; takes three to six seconds. Return, for each
    of SHAPES and for the output and the gradients of input and weight, numbers of tokens: oneDNN is faster from the
    first to below the second, from the third to below the fourth, and so on."""
    seconds = collections.defaultdict(lambda: ([], []))
    products = {
        "output": lambda x, weight, grad, way: _output(x, weight, None, way),
        "input": lambda x, weight, grad, way: _of_input(grad, weight, way),
        "weight": lambda x, weight, grad, way: _of_weight(grad, x, way),
    }
    places = _places()
    for number, tokens, (shape, (E, D)) in itertools.product(range(6), TOKENS, SHAPES.items()):
        for (name, product), way in itertools.product(products.items(), (number % 2 > 0, number % 2 == 0)):
            operands = [
                next(places)[: rows * columns].view(rows, columns)
                for rows, columns in ((tokens, D), (E, D), (tokens, E))
            ]
            start = time.perf_counter()
            product(*operands, way)
            seconds[shape, name, tokens][way].append(time.perf_counter() - start)
    found = {}
    for shape, name in itertools.product(SHAPES, products):
        faster, changes = False, []
        for tokens in TOKENS:
            # Not of the fastest: MKL's time varies by a quarter from one place in memory to the next, oneDNN's hardly.
            ratios = (onednn / mkl for mkl, onednn in zip(*seconds[shape, name, tokens]))
            if (statistics.median(ratios) < (1 if faster else TIE)) != faster:  # a tie changes nothing
                faster = not faster
                changes.append(tokens)
        found.setdefault(shape, []).append(changes)
    return found


def _places() -> Iterator[Tensor]:
    """Endless operands. Like the weights of a model, they are not in the cache: few tokens take as long as reading
    them. And their alignment differs, on which the speed depends."""
    memory = torch.rand(2**24, generator=torch.Generator(), dtype=torch.float32, device="cpu")
    size, start = 3 * 2**20, 0
    while True:
        yield memory[start:][:size]
        start = (start + size + 16) % (len(memory) - size) // 16 * 16
