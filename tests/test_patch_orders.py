"""Attention over patches in several orders, against its definition."""

import pytest
import torch
from torch.nn import functional as F

from src.lion.patch_orders import definition_in_orders, linear_attention_in_orders, matrix_in_orders, places, snakes

SNAKES = {  # (height, width) → raster numbers of the patches along the rows and along the columns
    (4, 4): ("0 1 2 3 7 6 5 4 8 9 10 11 15 14 13 12", "0 4 8 12 13 9 5 1 2 6 10 14 15 11 7 3"),
    (3, 3): ("0 1 2 5 4 3 6 7 8", "0 3 6 7 4 1 2 5 8"),
    (2, 3): ("0 1 2 5 4 3", "0 3 4 1 2 5"),
    (1, 4): ("0 1 2 3", "0 1 2 3"),
    (3, 1): ("0 1 2", "0 1 2"),
}


@pytest.mark.parametrize("size", SNAKES)
def test_snakes(size):
    expected = torch.tensor([[int(number) for number in text.split()] for text in SNAKES[size]])
    assert torch.equal(snakes(*size, prefix=0), expected)
    with_prefix = snakes(*size, prefix=2)
    assert torch.equal(with_prefix[:, 2:], expected + 2) and with_prefix[:, :2].tolist() == [[0, 1]] * 2
    place = places(with_prefix)
    assert torch.equal(place.gather(1, with_prefix), torch.arange(place.shape[1]).expand(2, -1))


def draw(batch, heads, grid, kind, dtype, extreme=1.0, read="both"):
    generator = torch.Generator().manual_seed(len(grid) + heads)
    orders = {"both": snakes(*grid), "columns": snakes(*grid)[1:], "raster": None}[read]
    L, D, E, O = grid[0] * grid[1] + 1, 4, 5, 1 if orders is None else len(orders)  # noqa: E741
    q, k = (F.silu(torch.randn(batch, heads, L, D, generator=generator)) + 0.5 for _ in range(2))
    v = torch.randn(batch, heads, L, E, generator=generator)
    shape = (O * heads,) if kind == "d" else (batch, O * heads, L)
    log_decay = F.logsigmoid(extreme * torch.randn(*shape, generator=generator))
    return [x.to(dtype).requires_grad_() for x in (q, k, v, log_decay)], orders


GRIDS = ((4, 4), (2, 5), (1, 1), (5, 3), (1, 8))  # chunks of 4: L mod C is 1, 3, 2, 0 and 1


@pytest.mark.parametrize("read", ["both", "columns", "raster"])
@pytest.mark.parametrize("kind", ["d", "s"])
@pytest.mark.parametrize("form", ["full", "chunkwise", "recurrent"])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("batch, heads", [(2, 3), (1, 1)])
def test_every_form_is_the_definition(read, kind, form, grid, batch, heads):
    inputs, orders = draw(batch, heads, grid, kind, torch.float64, read=read)
    upstream = torch.randn(batch, heads, inputs[0].shape[2], 5, dtype=torch.float64)
    expected = definition_in_orders(*inputs, orders)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    y = linear_attention_in_orders(*inputs, orders, form=form, chunk_size=4)
    grads = torch.autograd.grad(y, inputs, upstream)
    torch.testing.assert_close(y, expected, atol=1e-10, rtol=1e-9)
    q, k, v, log_decay = inputs
    torch.testing.assert_close(matrix_in_orders(q, k, log_decay, orders) @ v, expected, atol=1e-10, rtol=1e-9)
    for name, grad, want in zip("qkvd", grads, wanted):
        torch.testing.assert_close(grad, want, atol=1e-9, rtol=1e-8, msg=f"the gradient of {name} differs")


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("form", ["full", "chunkwise"])
@pytest.mark.parametrize("kind", ["d", "s"])
@pytest.mark.parametrize("read", ["both", "raster"])
def test_training_precision_and_extreme_decays(dtype, tolerance, form, kind, read):
    inputs, orders = draw(2, 2, (5, 6), kind, torch.float32, extreme=100.0, read=read)
    expected = definition_in_orders(*(x.double() for x in inputs), orders)
    q, k, v, log_decay = inputs
    y = linear_attention_in_orders(q.to(dtype), k.to(dtype), v.to(dtype), log_decay, orders, form=form, chunk_size=7)
    assert y.dtype == dtype and (y - expected).abs().max() < tolerance
    y.sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)


def test_shapes_that_do_not_match_are_named():
    (q, k, v, log_decay), orders = draw(1, 2, (2, 2), "d", torch.float32)
    with pytest.raises(ValueError, match="orders"):
        linear_attention_in_orders(q, k, v, log_decay, orders[:, 1:])
    with pytest.raises(ValueError, match="log_decay"):
        linear_attention_in_orders(q, k, v, log_decay[1:], orders)
