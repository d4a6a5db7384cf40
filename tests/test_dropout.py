import math

import pytest
import torch
from torch import nn

from src.lion.dropout import Dropout, dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3,), (7, 13), (4, 5, 6)])
def test_what_is_kept_is_scaled_forward_and_backward_and_the_rest_is_zero(shape, dtype):
    x = torch.rand(shape, dtype=dtype).add(1).requires_grad_()
    y = dropout(x, 0.25)
    y.sum().backward()
    assert y.dtype == dtype and y.shape == x.shape
    kept = y != 0
    torch.testing.assert_close(y[kept], x[kept] / 0.75)
    torch.testing.assert_close(x.grad, kept.to(dtype) / 0.75)


def test_every_entry_is_dropped_by_itself():
    torch.manual_seed(0)
    p, shape = 0.1, (1000, 1000)
    kept = (dropout(torch.ones(shape), p) != 0).float()
    deviation = math.sqrt(p * (1 - p))
    assert abs(float(kept.mean()) - (1 - p)) < 4 * deviation / 1000
    x = (kept.flatten() - (1 - p)) / deviation
    for shift in (1, 2, 3, 4, 5, 1000):  # four entries share a draw
        assert abs(float((x[shift:] * x[:-shift]).mean())) < 4 / 1000
    for place in range(4):
        assert abs(float(x[place::4].mean())) < 4 / 500


def test_an_operand_need_not_be_contiguous():
    x = torch.rand(6, 4, 10).transpose(0, 2).requires_grad_()
    torch.manual_seed(1)
    y = dropout(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(y, dropout(x.detach().contiguous(), 0.5))


def test_a_seed_gives_the_same_entries_and_another_others():
    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return dropout(torch.ones(1000), 0.5)

    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0), drawn(1))


def test_four_entries_share_a_draw_of_64_bits():
    torch.manual_seed(0)
    y = dropout(torch.ones(11), 0.5)
    torch.manual_seed(0)
    draws = torch.empty(3, dtype=torch.int64).random_(-(2**63), None)
    bits = torch.stack([draws >> 16 * place & 0xFFFF for place in range(4)], -1).flatten()[:11]
    assert torch.equal(y != 0, bits < 2**15)  # as signed numbers, not below 0


def test_derivatives_of_every_kind_go_through():
    x = torch.rand(50, dtype=torch.float64, requires_grad=True)

    def dropped(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return dropout(x**3, 0.5)

    assert torch.autograd.gradcheck(dropped, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(dropped, x)
    _, back = torch.func.vjp(dropped, x.detach())
    torch.testing.assert_close(back(torch.ones(50, dtype=torch.float64))[0] != 0, dropped(x) != 0)


@pytest.mark.parametrize(("p", "share"), [(0.0, 1.0), (1.0, 0.0), (1e-9, 1.0)])
def test_no_entry_or_all(p, share):
    assert (dropout(torch.ones(1000), p) != 0).float().mean() == share
    with pytest.raises(ValueError, match="between 0 and 1"):
        dropout(torch.ones(3), 1.5)


def test_the_module_acts_in_training_alone_and_is_an_nn_dropout():
    module, x = Dropout(0.5), torch.ones(1000)
    assert isinstance(module, nn.Dropout)
    assert not torch.equal(module(x), x)
    assert module.eval()(x) is x
