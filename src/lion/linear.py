"""Linear layers of many tokens on a CPU, multiplied by oneDNN."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Below these sizes nothing is gained, forward and backward together: oneDNN reorders the weights in every call.
_FROM_TOKENS = 1024
_FROM_WEIGHTS = 2**19


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """layer(x), (..., D) to (..., E).

    On an x86 CPU torch multiplies float32 matrices by MKL, but convolutions by oneDNN, which takes up to a quarter less time
    for the layers of a base model on two cores of an AMD EPYC. A linear layer is a 1×1 convolution with tokens as pixels;
    x and the result stay where they are in memory.
    """
    if not _is_convolved(layer, x):
        return layer(x)
    pixels = x.reshape(1, -1, 1, x.shape[-1]).permute(0, 3, 1, 2)  # (1, D, tokens, 1), the channels last in memory
    y = F.conv2d(pixels, layer.weight[..., None, None], layer.bias)
    return y.permute(0, 2, 3, 1).reshape(*x.shape[:-1], -1)


def _is_convolved(layer: nn.Module, x: Tensor) -> bool:
    """Whether oneDNN is worth it for x, (..., D), and `layer` is a plain linear layer that nothing has replaced, wrapped or
    hooked. Compilers and tracers see a linear layer."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # before sizes, which they would take for conditions
        return False
    tokens = x.shape[:-1].numel()
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and tokens >= _FROM_TOKENS
        and torch.backends.mkl.is_available()  # or torch has its matrix products from elsewhere
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and torch.get_num_threads() > 1  # on one, torch does not give such a convolution to oneDNN
        and not _may_round()
        and type(layer) is nn.Linear
        and type(layer.weight) in (Tensor, nn.Parameter)
        and layer.weight.device == x.device
        and layer.weight.dtype == x.dtype
        and layer.weight.shape[1] == x.shape[-1]
        and layer.weight.numel() >= _FROM_WEIGHTS
        and tokens * max(layer.weight.shape) < 2**31  # not tried beyond
        and "forward" not in vars(layer)
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
    )


def _may_round() -> bool:
    """Whether matrix products may be computed in less than float32, for which torch asks oneDNN itself."""
    if hasattr(torch.backends.mkldnn, "matmul"):  # newer than torch 2.7
        return torch.backends.mkldnn.matmul.fp32_precision not in ("none", "ieee")
    return torch.get_float32_matmul_precision() == "medium"
