"""Speed-ups on a CPU, applied from outside; hooks, compilers and tracers see the plain model, and so do GPUs, except
for the feature map of images and rotations."""

import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import cpu_kernel
from .cpu_linear import LinearLayers, is_hooked, is_unchanged, linear, split_linear
from .custom_operators import no_autocast, once_differentiable
from .linear_attention_forms import sequence_starts

# Where the modules are from that compute each token on its own: ours, torch's, adapters of PEFT, …
TOKENWISE = (
    *(f"torch.nn.modules.{name}" for name in "activation container conv dropout linear normalization".split()),
    "torch.ao.nn.quantized.dynamic.modules.linear", "transformers.activations", "peft.tuners.lora", __package__,
)  # fmt: skip
SLICE = 2048  # tokens that a layer processes at a time in inference: few enough to stay in cache and to reuse memory


def speed_up(model: nn.Module) -> None:
    """Replace the classes of a model's dropouts, mixers, layers and head with subclasses that are faster on a CPU.
    Linear layers remain plain `nn.Linear` modules, which quantization, adapters and wrappers look for."""
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = Dropout
        elif hasattr(module, "project_out"):
            module.__class__ = _faster(type(module), _Mixer)
        elif hasattr(module, "after_mixing"):
            module.__class__ = _faster(type(module), _Layer)
        elif isinstance(module, LinearLayers):
            module.__class__ = _faster(type(module), _Faster)


def flush_denormals() -> None:
    """Round numbers below 1.2e-38 to 0 in this thread and in those that it starts later, so call it before torch starts
    its own. A CPU takes many times as long to multiply them, and through decays of about ½ the gradients of all tokens
    far from those that a loss reads are that small: a training step of a small LION-S of images takes half as long."""
    torch.set_flush_denormal(True)


class Dropout(nn.Dropout):
    """`nn.Dropout`, computed by `dropout`."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training else x


def dropout(x: Tensor, p: float) -> Tensor:
    """Zero each entry of x, (...), independently with probability p, and divide the others by 1 − p."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not 0 < round(p * 2**16) < 2**16:
        return F.dropout(x, p)
    kept, factor = draw_kept(x.shape, p, x.device)
    return (x * kept).mul_(factor)


def draw_kept(shape: torch.Size, p: float, device: torch.device) -> tuple[Tensor, float]:
    """Draw which entries dropout keeps, as 1 and 0 in bytes, and return by what it multiplies them. On a CPU torch
    draws one number per entry, on one core, which takes a tenth of a training step at base size. Here 64 random bits
    serve four entries, by the kernel on all cores, and p is rounded to a multiple of 2^-16. A product with bytes takes
    a sixth of the time of `torch.where`."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout must be from 0 to 1 (got {p})")
    dropped = round(p * 2**16)
    factor = 2**16 / (2**16 - dropped) if dropped < 2**16 else 0.0
    if device.type != "cpu" or torch.compiler.is_compiling():
        return (torch.rand(shape, device=device) >= dropped / 2**16).byte(), factor
    size = math.prod(shape)
    if dropped < 2**16 and cpu_kernel.is_available():
        seed = torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), None)
        if type(seed) is Tensor:  # not one of FakeTensorMode
            return cpu_kernel.draw_kept(size, dropped, int(seed)).view(shape), factor
    draws = torch.empty(-(-size // 4), dtype=torch.int64, device=device).random_(-(2**63), None)
    kept = torch.empty(size, dtype=torch.uint8, device=device)
    return torch.ge(draws.view(torch.int16)[:size], dropped - 2**15, out=kept).view(shape), factor


def convolve(layer: nn.Conv1d, parts: Sequence[Tensor], seq_idx: Tensor | None, reach: int) -> list[Tensor]:
    """Convolve tokens, (B, L, C), given and returned in parts of their channels, by `depthwise_conv`; or by the layer
    itself if it is replaced, wrapped or hooked. reach: how many tokens it sees on each side, at most."""
    sizes = [x.shape[-1] for x in parts]
    if is_unchanged(layer, nn.Conv1d):
        weights = layer.weight.split(sizes)
        biases = [None] * len(sizes) if layer.bias is None else layer.bias.split(sizes)
        return [depthwise_conv(x, *of_x, seq_idx) for x, *of_x in zip(parts, weights, biases)]
    x = torch.cat([*parts], -1)
    if seq_idx is None:
        y = layer(x.mT).mT
    else:
        spread, place = _spread(x, sequence_starts(seq_idx).cumsum(1), reach)
        y = _gather(layer(spread.mT).mT, place, x.shape[1])
    return [part.clone() for part in y.split(sizes, -1)]  # a hook may have kept y


def _spread(x: Tensor, number: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """Return packed sequences, x, (B, L, C), numbered by number, (B, L), with at least `reach` zeros between them, and
    the places of their tokens, (B, L), in the flattened result."""
    place = torch.arange(x.shape[1], device=x.device) + reach * number
    width = int(place.max()) + 1
    place = place + width * torch.arange(len(x), device=x.device)[:, None]
    spread = x.new_zeros(len(x) * width, x.shape[-1]).index_copy(0, place.flatten(), x.flatten(0, 1))
    return spread.unflatten(0, (len(x), width)), place


def _gather(spread: Tensor, place: Tensor, length: int) -> Tensor:
    """Undo `_spread`."""
    return spread.flatten(0, 1).index_select(0, place.flatten()).unflatten(0, (-1, length))


def depthwise_conv(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None = None) -> Tensor:
    """Convolve each channel of x, (B, L, C), over tokens with its own weight, (C, 1, W) with W odd, and zeros beyond
    the text; packed sequences, numbered by seq_idx, (B, L), do not see each other."""
    if weight.device != x.device:  # on a CPU, torch computes nothing with a weight on meta, and says nothing
        raise ValueError(f"a convolution's weight is on {weight.device} and its input on {x.device}; move one")
    reach, length = weight.shape[-1] // 2, x.shape[1]
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    number = None if seq_idx is None else sequence_starts(seq_idx).cumsum(1)  # (B, L)
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16) and not torch.compiler.is_compiling():
        if seq_idx is None:
            return _DepthwiseConv.apply(x.contiguous(), weight, bias)
        # With zeros between the sequences. Elsewhere this would wait for the GPU, or break the graph.
        spread, place = _spread(x, number, reach)
        return _gather(_DepthwiseConv.apply(spread, weight, bias), place, length)
    if seq_idx is None and not torch.compiler.is_compiling():
        # In the layout of x; else the kernels would copy each of its parts, some for every head.
        return F.conv1d(x.mT, weight, bias, padding=reach, groups=len(weight)).mT.contiguous()
    # Of this, a compiler makes one loop, where a convolution would transpose x; packed sequences take it anywhere.
    padded, y = F.pad(x, (0, 0, reach, reach)), 0 if bias is None else bias
    numbers = None if number is None else F.pad(number, (reach, reach))
    for place in range(2 * reach + 1):
        shifted = padded[:, place : place + length]
        if numbers is not None:
            shifted = shifted.where(numbers[:, place : place + length, None] == number[..., None], 0)
        y = y + weight[:, 0, place] * shifted
    return y


class _DepthwiseConv(torch.autograd.Function):
    """`F.conv1d` would transpose x. With tokens as the columns of an image that has channels last in memory, oneDNN
    takes a sixth of the time, and with the gradients below less than half."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _convolve_image(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        image, grad_image = (y.float().mT.unsqueeze(2) for y in (x, grad))
        options = [1, 1], [0, weight.shape[-1] // 2], [1, 1], False, [0, 0], len(weight)
        of_weight_only = [False, True, False]  # the other two are slower there than below
        _, grad_weight, _ = torch.ops.aten.convolution_backward(
            grad_image, image, weight.float().unsqueeze(2), None, *options, of_weight_only
        )
        grad_bias = grad.sum((0, 1)) if ctx.needs_input_grad[2] else None
        return _convolve_image(grad, weight.flip(-1), None), grad_weight.squeeze(2), grad_bias


def _convolve_image(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    padding = 0, weight.shape[-1] // 2
    return F.conv2d(x.mT.unsqueeze(2), weight.unsqueeze(2), bias, padding=padding, groups=len(weight)).squeeze(2).mT


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate channels i and D/2 + i of x, (..., B, H, L, D), by an angle, as rotary position embeddings do in Llama and
    ModernBERT. rotation: its cosines and sines, (2, B or 1, 1, L, D/2)."""
    cosine, sine = rotation.to(x.dtype)
    if not torch.compiler.is_compiling():
        return _Rotation.apply(x, cosine, sine)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class _Rotation(torch.autograd.Function):
    """Without the temporary tensors that autograd would keep and concatenate."""

    @staticmethod
    def forward(ctx, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotate(x, cosine, sine, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        return _rotate(grad, cosine, sine, -1), None, None


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor, direction: int) -> Tensor:
    y = torch.empty_like(x)
    (first, second), (y_first, y_second) = x.chunk(2, -1), y.chunk(2, -1)
    torch.mul(first, cosine, out=y_first).addcmul_(second, sine, value=-direction)
    torch.mul(second, cosine, out=y_second).addcmul_(first, sine, value=direction)
    return y


def gated_norm(norm: nn.RMSNorm, y: Tensor, z: Tensor) -> Tensor:
    """Compute norm(y) · SiLU(z), (..., I). In inference the result may take y's memory."""
    wide = torch.promote_types(y.dtype, torch.float32)
    recorded = torch.compiler.is_compiling() or torch.jit.is_tracing() or not is_unchanged(norm, nn.RMSNorm)
    if y.device.type != "cpu" or wide != torch.float32 or recorded:
        return (norm(y.to(wide)) * F.silu(z.to(wide))).to(y.dtype)
    if torch.is_grad_enabled():
        return _GatedNorm.apply(y, z, norm.weight.float(), norm.eps)
    output = y if y.is_contiguous() else y.new_empty(y.shape)
    _gated_norm(output, y, z, norm.weight.float(), norm.eps)
    return output


def _gated_norm(output: Tensor, y: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Write the result to output, and return the factor of each token, (..., 1)."""
    factors = y.new_empty(*y.shape[:-1], 1, dtype=torch.float32)
    for out, factor, y_slice, z_slice in _slices(output, factors, y, z):
        wide = y_slice.float()
        norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        factor.copy_(norms.square_().div_(wide.shape[-1]).add_(eps).rsqrt_())
        torch.mul((wide * factor).mul_(weight), F.silu(z_slice.float()), out=out)
    return factors


class _GatedNorm(torch.autograd.Function):
    """In slices that stay in cache, where autograd would write and read a tensor of all tokens a dozen times."""

    @staticmethod
    def forward(ctx, y: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        output = y.new_empty(y.shape)
        ctx.save_for_backward(y, z, weight, _gated_norm(output, y, z, weight, eps))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, z, weight, factors = ctx.saved_tensors
        grad_y, grad_z, grad_weight = *(x.new_empty(x.shape) for x in (y, z)), torch.zeros_like(weight)
        for dy, dz, factor, y, z, grad in _slices(grad_y, grad_z, factors, y, z, grad):  # noqa: B020
            normalized, z, grad = y.float() * factor, z.float(), grad.float()
            gated = F.silu(z).mul_(grad)
            product = gated * normalized
            grad_weight += product.sum(0)
            mean = (product @ weight).div_(len(weight))[:, None]
            torch.mul(gated.mul_(weight).addcmul_(normalized, mean, value=-1), factor, out=dy)
            torch.ops.aten.silu_backward(normalized.mul_(weight).mul_(grad), z, grad_input=dz)
        return grad_y, grad_z, grad_weight, None


def _slices(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(x.flatten(0, -2).split(256) for x in tensors))


def _may_slice(module: nn.Module, x: Tensor) -> bool:
    """Whether to process tokens in slices: not if they are few; nor in training, where activation checkpointing, by
    recomputing the layer, would draw dropout masks in a different order; nor with hooks or modules of others, which
    expect complete activations."""
    return (
        not module.training
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and x.shape[:-1].numel() > SLICE
        and all(type(part).__module__.startswith(TOKENWISE) and not is_hooked(part) for part in _parts(module))
    )


def _parts(layer: nn.Module) -> Iterator[nn.Module]:
    """The modules of a layer that `after_mixing` may call."""
    for name, part in layer.named_children():
        yield from part.children() if name == "attention" else part.modules()


@functools.cache
def _faster(kind: type, methods: type) -> type:
    return kind if issubclass(kind, methods) else type(kind.__name__, (methods, kind), {"_parts": (kind, methods)})


def _rebuild(kind: type, methods: type) -> nn.Module:
    return object.__new__(_faster(kind, methods))


class _Faster:
    def linear(self, layer: nn.Module, x: Tensor) -> Tensor:
        return linear(layer, x)

    def __reduce_ex__(self, protocol: int) -> tuple:  # copies and pickles could not find the class by its name
        return _rebuild, self._parts, self.__dict__


class _Mixer(_Faster):
    def split_linear(self, layer: nn.Module, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return split_linear(layer, x, sizes)


class _Layer(_Faster):
    def after_mixing(self, x: Tensor, y: Tensor) -> Tensor:
        """Process x and y, (B, L, D), in slices."""
        if not _may_slice(self, x):
            return super().after_mixing(x, y)
        output = x.new_empty(x.shape)
        slices = (z.flatten(0, 1).split(SLICE) for z in (output, x, y))
        for output_slice, x_slice, y_slice in zip(*slices):
            output_slice.copy_(super().after_mixing(x_slice, y_slice))
        return output


def positive_map(x: Tensor) -> Tensor:
    """Compute (SiLU(x) + ½) / ‖SiLU(x) + ½‖ over the last dimension: every entry is positive."""
    recorded = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if recorded or (x.device.type == "cpu" and x.dtype != torch.float32):
        return F.normalize(F.silu(x) + 0.5, dim=-1).to(x.dtype)  # autocast on a GPU normalizes in float32
    with no_autocast(x):
        return _PositiveMap.apply(x) if torch.is_grad_enabled() else _positive(x)[0]


def _positive(x: Tensor) -> tuple[Tensor, Tensor]:
    """`positive_map`, computed in place, and the norms."""
    y = F.silu(x).add_(0.5)
    wide = torch.promote_types(y.dtype, torch.float32)
    norms = torch.linalg.vector_norm(y, dim=-1, keepdim=True, dtype=wide)  # at least 0.2 per entry
    return y.div_(norms), norms


class _PositiveMap(torch.autograd.Function):
    """In place, where autograd would write and read a dozen tensors."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y, norms = _positive(x)
        ctx.save_for_backward(x, y, norms)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        x, y, norms = ctx.saved_tensors
        grad = torch.addcmul(grad, y, (grad * y).sum(-1, keepdim=True), value=-1).div_(norms)
        return torch.ops.aten.silu_backward(grad, x)
