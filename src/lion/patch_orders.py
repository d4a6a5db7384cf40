"""Linear attention over the patches of an image, read in several orders: the masks of the orders are averaged, and each
row is divided by its sum.

    y_i = Σ_j A_ij v_j / (Σ_j A_ij + 1e-6)        A_ij = s · (q_i · k_j) · mean over the orders o of M^o(π_o(i), π_o(j))

M is the mask of linear_attention.py with the decays of the order o, and π_o(t) the place of token t in it. LION♮ has
two orders, `snakes`; Afzal et al., "Linear Attention for Efficient Bidirectional Sequence Modeling", arXiv:2502.16249.
Shape letters: B batch, H heads, L tokens, O orders, D head size of q and k, E head size of v.
"""

import torch
from torch import Tensor

from . import cpu_crossover, cpu_kernel, linear_attention_triton
from .custom_operators import no_autocast
from .linear_attention import (
    attention_matrix,
    definition,
    is_fused,
    kernel_sums,
    linear_attention,
    log_of_decay,
    signed_sums,
)
from .linear_attention_forms import EPSILON, chunkwise, divided, full, with_ones
from .two_sided_attention import check_options, check_shapes, resolve_form


def snakes(height: int, width: int, prefix: int = 1, device: torch.device | None = None) -> Tensor:
    """Return two orders of height × width patches, (2, prefix + height · width): the raster number of the token at each
    place. One snake runs through the rows, the first from left to right; the other through the columns, the first from
    top to bottom. `prefix` tokens that are not patches come first in both."""
    raster = torch.arange(height * width, device=device).view(height, width)
    orders = []
    for lines in (raster, raster.mT):
        lines = lines.clone()
        lines[1::2] = lines[1::2].flip(-1)
        orders.append(torch.cat([torch.arange(prefix, device=device), prefix + lines.flatten()]))
    return torch.stack(orders)


def linear_attention_in_orders(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    orders: Tensor | None = None,
    *,
    forget_logits: Tensor | None = None,
    scale: float | None = None,
    form: str = "auto",
    chunk_size: int = 128,
    dropout_p: float = 0.0,
) -> Tensor:
    """Compute the formula at the top of this file.

    Args:
        q, k, v: queries and keys, (B, H, L, D), and values, (B, H, L, E), in any one order, such as raster order.
        log_decay: log λ ≤ 0, (O·H,) for one per head or (B, O·H, L) for one per head and token: the heads of the first
            order, then those of the second, …
        orders: (O, L) integers, the token at each place; None: one order, that of q, k and v.
        forget_logits: instead of log_decay, the logits of 1 − λ.
        scale, form, chunk_size, dropout_p: as for `linear_attention`.

    Returns:
        (B, H, L, E) in v's dtype. Half precision is computed in float32, except by the GPU kernels.

    Raises ValueError for shapes that do not match, by the CPU's kernel for an order without all tokens, for which the
    GPU kernels return anything, and as `linear_attention` does.
    """
    (B, H, L, D), O = q.shape, 1 if orders is None else len(orders)  # noqa: E741
    check_shapes(
        ("orders", orders, (O, L)),
        ("k", k, (B, H, L, D)),
        ("v", v, (B, H, L, v.shape[-1])),
        ("log_decay", log_decay, (O * H,), (B, O * H, L)),
        ("forget_logits", forget_logits, (O * H,), (B, O * H, L)),
    )
    if (log_decay is None) == (forget_logits is None):
        raise ValueError("forget_logits and log_decay are two ways to give decays; give one of them")
    check_options(None, None, None, None, form, chunk_size, dropout_p)
    if orders is not None:
        if orders.is_floating_point():
            raise ValueError(f"orders must be integers (got {orders.dtype})")
        orders = orders.to(q.device, torch.int64)
    dtype, fused = v.dtype, is_fused(q, k, v, form, dropout_p)
    if not fused:
        wide = torch.promote_types(dtype, torch.float32)
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
    scale = D**-0.5 if scale is None else scale
    how = {"scale": scale, "form": form, "chunk_size": chunk_size, "dropout_p": dropout_p}
    with no_autocast(q):
        if orders is None:
            decays = {"log_decay": log_decay, "forget_logits": forget_logits}
            return linear_attention(q, k, v, **decays, normalize=True, **how).to(dtype)
        kind = cpu_crossover.IN_ORDERS if O > 1 else cpu_crossover.NORMALIZED
        in_full = resolve_form(form, v, True, dropout_p, fused, kind=kind) == "full"
        if fused:
            given, size = log_decay if forget_logits is None else forget_logits, 0 if in_full else chunk_size
            rest = scale, size, dropout_p, forget_logits is not None, "divide"
            return linear_attention_triton.fused_linear_attention(q, k, v, given, None, None, *rest, orders=orders)
        log_decay = log_decay if forget_logits is None else log_of_decay(forget_logits)
        if form != "recurrent" and dropout_p == 0 and kernel_sums(log_decay, v):
            orders = orders.contiguous()
            cpu_kernel.check_orders(orders)
            if in_full:
                how = {"order": orders, "normalize": True}
                return full(q, k, v, log_decay, None, None, None, 1.0, scale, "shared", **how).to(dtype)
            sums = signed_sums(log_decay, L, order=orders)
            return divided(chunkwise(q, k, with_ones(v), sums, None, None, scale, L, False, "shared", orders)).to(dtype)
        # Each head in each order is a head, (B, H·O, L, ·). The gradient of x[:, :, orders] would sort on a GPU.
        operands = q, k, with_ones(v)
        q, k, v = (x.index_select(2, orders.flatten()).view(B, H * O, L, -1) for x in operands)
        log_decay, dim = (log_decay, 0) if log_decay.ndim == 1 else (_in_order(log_decay, orders), 1)
        log_decay = log_decay.unflatten(dim, (O, H)).transpose(dim, dim + 1).flatten(dim, dim + 1)
        y = linear_attention(q, k, v, log_decay, **how)
        # The rows are added before they are divided.
        y = y.unflatten(1, (H, O))
        y = y.gather(3, places(orders)[:, :, None].expand(y.shape)).mean(2)
        return divided(y).to(dtype)


def definition_in_orders(q, k, v, log_decay, orders=None, *, scale=None) -> Tensor:
    """Compute the formula at the top of this file literally; arguments as for `linear_attention_in_orders`."""

    def matrix(q, k, log_decay, scale) -> Tensor:
        return definition(q, k, torch.eye(q.shape[2], dtype=q.dtype, device=q.device), log_decay, scale=scale)

    return matrix_in_orders(q, k, log_decay, orders, scale=scale, matrix=matrix) @ v


def matrix_in_orders(q, k, log_decay, orders=None, *, scale=None, matrix=attention_matrix) -> Tensor:
    """Compute A_ij / (Σ_j A_ij + 1e-6), (B, H, L, L); arguments as for `linear_attention_in_orders`, and what computes
    the matrix of one order."""
    orders = torch.arange(q.shape[2], device=q.device)[None] if orders is None else orders
    average = 0
    dim = -1 if log_decay.ndim == 1 else 1
    for order, place, decays in zip(orders, places(orders), log_decay.chunk(len(orders), dim)):
        decays = decays if decays.ndim == 1 else decays[..., order]
        in_order = matrix(q[:, :, order], k[:, :, order], decays, scale=scale)
        average = average + in_order[:, :, place][..., place] / len(orders)
    return average / (average.sum(-1, keepdim=True) + EPSILON)


def places(orders: Tensor) -> Tensor:
    """Return the place of each token, (O, L), for the token at each place, (O, L)."""
    numbers = torch.arange(orders.shape[1], device=orders.device).expand_as(orders)
    return torch.empty_like(orders).scatter_(1, orders, numbers)


def _in_order(log_decay: Tensor, orders: Tensor) -> Tensor:
    """Bring decays, (B, O·H, L), into the order of their heads."""
    index = orders.repeat_interleave(log_decay.shape[1] // len(orders), 0)
    return log_decay.gather(2, index.expand_as(log_decay))
