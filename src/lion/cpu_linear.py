"""Linear layers on a CPU. torch multiplies float32 matrices with MKL but convolves with oneDNN, and a linear layer is a
1×1 convolution with tokens as pixels: which of the two is faster, by up to half, depends on the processor, on the
number of tokens, and on the product (the output, the gradient of the input, that of the weights)."""

import collections
import itertools
import statistics
import time

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from . import machine

# The numbers that are measured. With fewer tokens a convolution is slower than it seems: oneDNN reorders the weights on
# every call, which a measurement finds in the cache, but a model does not.
TOKENS = (128, 256, 512, 1024)
MIN_WEIGHTS = 2**19
SHAPES = {"square": (768, 768), "wider": (3072, 768), "narrower": (768, 3072)}  # of the weights that are measured
TIE = 0.95  # of the plain product's time: what a convolution may take
PIXELS = 8  # of numbers that are a multiple of 4 only, oneDNN takes four times as long for gradients of weights


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """Compute layer(x), (..., D) to (..., E), by convolutions where they are faster; nothing is copied."""
    recorded = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if recorded or type(layer) is not nn.Linear or layer.weight.numel() < MIN_WEIGHTS:
        return layer(x)  # early: for a small layer, the checks below would take as long as the product
    convolved = _convolved(layer.weight, x) if _is_plain(layer, x) else ()
    if not any(convolved):
        return layer(x)
    return _Linear.apply(x, layer.weight, layer.bias, convolved)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, convolved: tuple[bool, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.convolved = convolved
        return _output(x, weight, bias, convolved[0])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needed, (_, of_input, of_weight) = ctx.needs_input_grad, ctx.convolved
        return (
            _of_input(grad, x, weight, of_input) if needed[0] else None,
            _of_weight(grad, x, weight, of_weight) if needed[1] else None,
            grad.flatten(0, -2).sum(0) if needed[2] else None,
            None,
        )


def split_linear(layer: nn.Module, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Compute layer(x).split(sizes, -1), (..., D) to (..., E_i), as tensors with their own memory. Gradients of parts
    of one tensor would first be copied next to each other, on two cores of a base model for 3 ms per layer."""
    if not _is_plain(layer, x) or layer.bias is not None:
        return layer(x).split(sizes, -1)
    return _SplitLinear.apply(x, layer.weight, sizes)


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        return tuple(_output(x, part, None, _convolved(part, x)[0]) for part in weight.split(sizes))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = None, torch.empty_like(weight)
        for grad, part, target in zip(grads, weight.split(ctx.sizes), grad_weight.split(ctx.sizes)):
            _, of_input, of_weight = _convolved(part, x)
            of_x = _of_input(grad, x, part, of_input)
            grad_x = of_x if grad_x is None else grad_x.add_(of_x)
            if of_weight:
                target.copy_(_of_weight(grad, x, part, True))
            else:
                torch.mm(grad.flatten(0, -2).T, x.flatten(0, -2), out=target)
        return grad_x, grad_weight, None


# The products; x: (..., D), weight: (E, D), grad: (..., E)


def _output(x: Tensor, weight: Tensor, bias: Tensor | None, convolved: bool) -> Tensor:
    if not convolved:
        return F.linear(x, weight, bias)
    return _from_pixels(F.conv2d(_to_pixels(x), weight[..., None, None], bias), x)


def _of_input(grad: Tensor, x: Tensor, weight: Tensor, convolved: bool) -> Tensor:
    return _from_pixels(_gradient(grad, x, weight, 0), x) if convolved else grad @ weight


def _of_weight(grad: Tensor, x: Tensor, weight: Tensor, convolved: bool) -> Tensor:
    grad, x = grad.flatten(0, -2), x.flatten(0, -2)
    whole = len(x) // PIXELS * PIXELS if convolved else 0
    if not whole:
        return grad.T @ x
    found = _gradient(grad[:whole], x[:whole], weight, 1)[..., 0, 0]
    return found if whole == len(x) else found.addmm_(grad[whole:].T, x[whole:])


def _gradient(grad: Tensor, x: Tensor, weight: Tensor, number: int) -> Tensor:
    options = [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [number == 0, number == 1, False]
    return torch.ops.aten.convolution_backward(
        _to_pixels(grad), _to_pixels(x), weight[..., None, None], None, *options
    )[number]


def _to_pixels(x: Tensor) -> Tensor:
    """View x, (..., D), as an image, (1, D, tokens, 1), with channels last in memory."""
    return x.reshape(1, -1, 1, x.shape[-1]).permute(0, 3, 1, 2)


def _from_pixels(image: Tensor, like: Tensor) -> Tensor:
    return image.permute(0, 2, 3, 1).reshape(*like.shape[:-1], -1)


# Which of them to convolve


def _is_plain(layer: nn.Module, x: Tensor) -> bool:
    """Whether `layer` is nn.Linear, not replaced, wrapped or hooked, x is float32 on a CPU, and nothing traces it."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False  # before any size is read, which would add a guard
    return (
        x.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and type(layer) is nn.Linear
        and type(layer.weight) in (Tensor, nn.Parameter)
        and (layer.weight.device, layer.weight.dtype, layer.weight.shape[1]) == (x.device, x.dtype, x.shape[-1])
        and "forward" not in vars(layer)
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
    )


def _convolved(weight: Tensor, x: Tensor) -> tuple[bool, ...]:
    """Whether oneDNN computes the output of x, (..., D), and weight, (E, D), and the gradients of either, faster."""
    tokens, oneDNN = x.shape[:-1].numel(), torch.backends.mkldnn
    # Where float32 matrix products may use lower precision, torch calls oneDNN itself.
    if hasattr(oneDNN, "matmul"):  # newer than torch 2.7
        exact = oneDNN.matmul.fp32_precision in ("none", "ieee")
    else:
        exact = torch.get_float32_matmul_precision() != "medium"
    possible = (
        exact
        and tokens >= TOKENS[0]
        and oneDNN.enabled
        and can_convolve()
        and weight.numel() >= MIN_WEIGHTS
        and tokens * max(weight.shape) < 2**31  # larger products are untested
    )
    if not possible:
        return False, False, False
    wider, narrower = (a > 1.5 * b for a, b in (weight.shape, weight.shape[::-1]))
    shape = "wider" if wider else "narrower" if narrower else "square"
    return tuple(least is not None and tokens >= least for least in machine.choice("convolved_from", measure)[shape])


def can_convolve() -> bool:
    """Whether this process has both ways: without MKL torch multiplies matrices with another library, and with one
    thread it does not pass such a convolution to oneDNN."""
    return torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and torch.get_num_threads() > 1


def measure() -> dict[str, list[int | None]]:
    """Time both ways of each product of some numbers of TOKENS, in turns; takes two to four seconds. Return, for each
    of SHAPES and for the output and the gradients of input and weight, the number of tokens from which on a convolution
    is faster by more than a tie; None: it never is."""
    seconds = collections.defaultdict(lambda: ([], []))
    products = {
        "output": lambda x, weight, grad, way: _output(x, weight, None, way),
        "input": lambda x, weight, grad, way: _of_input(grad, x, weight, way),
        "weight": lambda x, weight, grad, way: _of_weight(grad, x, weight, way),
    }
    for number, tokens, (shape, (E, D)) in itertools.product(range(4), TOKENS, SHAPES.items()):
        # In new places every time, on whose alignment the speed depends.
        operands = [_operand(rows, columns) for rows, columns in ((tokens, D), (E, D), (tokens, E))]
        for (name, product), way in itertools.product(products.items(), (number % 2 > 0, number % 2 == 0)):
            start = time.perf_counter()
            product(*operands, way)
            seconds[shape, name, tokens][way].append(time.perf_counter() - start)
    found = {}
    for shape, name in itertools.product(SHAPES, products):
        least = None
        for tokens in reversed(TOKENS):
            # Not of the fastest: MKL's time varies by a quarter from one place in memory to the next, oneDNN's hardly.
            ratios = (convolved / plain for plain, convolved in zip(*seconds[shape, name, tokens]))
            if statistics.median(ratios) >= TIE:
                break
            least = tokens
        found.setdefault(shape, []).append(least)
    return found


def _operand(rows: int, columns: int) -> Tensor:
    return torch.rand(rows, columns, generator=torch.Generator(), dtype=torch.float32, device="cpu")
