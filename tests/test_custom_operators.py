"""Custom operators: what a compiler is told of their results, what it calls, and second derivatives."""

import functools
from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from src.lion import cpu_kernel, linear_attention
from src.lion import linear_attention_forms as forms
from src.lion.custom_operators import operator
from src.lion.linear_attention import definition
from src.lion.linear_attention_forms import cumulative_log_decay

B, H, L, D = 2, 4, 70, 16


def assert_announced(operator: Callable, *inputs) -> None:
    """The results have the dtypes, shapes and strides that the operator announces to a compiler."""
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in inputs]
    results, announced = operator(*inputs), operator(*fakes)
    several = isinstance(results, list | tuple)
    results, announced = (results, announced) if several else ([results], [announced])
    assert len(results) == len(announced)
    for result, fake in zip(results, announced):
        assert (result.dtype, result.shape, result.stride()) == (fake.dtype, fake.shape, fake.stride())


def in_layout(x: Tensor, layout: str) -> Tensor:
    """x, (B, H, L, ·), as projections of a model lay it out, or contiguous."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if layout == "of a model" else x


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("layout", ["of a model", "contiguous"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_results_of_both_forms_on_a_cpu_are_as_announced(dtype, layout, in_c, monkeypatch):
    if in_c and not cpu_kernel.is_available():
        pytest.skip("needs a C compiler")
    if not in_c:
        monkeypatch.setattr(cpu_kernel, "covers", lambda v: False)
    q, k, v, grad = (in_layout(torch.randn(B, H, L, D).to(dtype), layout) for _ in range(4))
    exclusive, inclusive = cumulative_log_decay(-torch.rand(B, H, L), L)
    sums = torch.stack([exclusive, -inclusive], -1)
    own = in_layout(torch.randn(B, H, L, 1), layout)[..., 0]
    for diagonal in (None, own, own.to(dtype)):
        for key_sums in (None, sums.clone()):
            tensors = q, k, v, sums, key_sums, diagonal, None, 1.0, 32, False, "shared"
            _, forward, backward = forms.CHUNKWISE
            assert_announced(forward, *tensors)
            for with_sums in (False, True):
                assert_announced(backward, grad, *tensors, with_sums)
    _, forward, backward = forms.RECURRENT
    for direction in (1, -1):
        assert_announced(forward, q, k, v, exclusive, inclusive, direction)
        for with_sums in (False, True):
            assert_announced(backward, grad, q, k, v, exclusive, inclusive, direction, with_sums)


@pytest.mark.parametrize("form", ["full", "chunkwise", "recurrent"])
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_second_derivatives_are_complete_or_refused(decay, form):
    """torch.autograd.grad omits those of a function that torch's once_differentiable decorates."""
    per_token = -torch.rand(B, H, L)
    log_decay = {"none": None, "head": -torch.rand(H), "channel": per_token[..., None].expand(-1, -1, -1, D)}[decay]

    def second(attend: Callable, log_decay: Tensor | None, dtype: torch.dtype) -> Tensor:
        y = x.sin() + attend(*[x.to(dtype)] * 3, log_decay).to(x.dtype)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    x = torch.randn(B, H, L, D, requires_grad=True)
    attend = functools.partial(linear_attention, form=form, chunk_size=32)
    if (decay, form) in [("none", "full"), ("none", "chunkwise"), ("channel", "recurrent")]:  # in PyTorch alone
        expected = second(definition, per_token.double() if decay == "channel" else None, torch.float64)
        assert (second(attend, log_decay, torch.float32) - expected).norm() < 1e-4 * expected.norm()
    else:
        with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
            second(attend, log_decay, torch.float32)


def test_a_gradient_is_the_same_with_create_graph():
    x = torch.randn(1, 2, 9, 4, requires_grad=True)
    log_decay = (-torch.rand(2)).requires_grad_()
    for form in ("full", "chunkwise", "recurrent"):
        loss = linear_attention(x, x, x, log_decay, form=form, chunk_size=4).square().sum()
        plain = torch.autograd.grad(loss, (x, log_decay), retain_graph=True)
        for result, expected in zip(torch.autograd.grad(loss, (x, log_decay), create_graph=True), plain):
            assert torch.equal(result, expected)


def test_a_gradient_with_create_graph_through_a_checkpoint_can_be_changed_in_place():
    q, k, v = (torch.randn(1, 2, 9, 4, requires_grad=True) for _ in range(3))
    log_decay = -torch.rand(1, 2, 9)
    for form in ("full", "chunkwise", "recurrent"):

        def attend(*inputs: Tensor, form: str = form) -> Tensor:
            return linear_attention(*inputs, form=form, chunk_size=4)

        plain = torch.autograd.grad(attend(q, k, v, log_decay).square().sum(), (q, k, v))
        y = checkpoint(attend, q, k, v, log_decay, use_reentrant=False)
        for grad, expected in zip(torch.autograd.grad(y.square().sum(), (q, k, v), create_graph=True), plain):
            assert torch.equal(grad.detach(), expected)
            grad.mul_(2)


def test_a_module_of_any_name_registers_operators():
    """A Hub folder may have letters of any alphabet in its name."""

    def _run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.clone()

    def _run_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, with_decays: bool) -> list[Tensor]:
        return [grad.clone() for _ in range(3)]

    names = set()
    for module in ("modelle.hüb", "modelle.hob", "文.model-a"):
        _run.__module__ = module
        made = operator(_run, _run_backward, "Tensor q, Tensor k, Tensor v", torch.empty_like)
        names.add(made.call.name())
        x = torch.randn(3)
        assert torch.equal(made.call(x, x, x), x)
    assert len(names) == 3 and all(name.isascii() for name in names)


def test_a_compiled_function_spends_no_time_on_autograd():
    targets = []

    def record(graph, _inputs):
        targets.extend(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(
        functools.partial(linear_attention, form="chunkwise", chunk_size=4), backend=aot_autograd(fw_compiler=record)
    )
    x = torch.randn(1, 2, 9, 4, requires_grad=True)
    compiled(x, x, x, torch.tensor([-0.1, -0.2])).sum().backward()
    operators = [target for target in targets if "chunkwise" in str(target)]
    assert operators == [forms.CHUNKWISE.forward, forms.CHUNKWISE.backward]
