"""The operator: every form against the formula written out, and the formula against loops and against pencil and
paper."""

import functools
import itertools
import math
import re
import subprocess
import sys

import plain
import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from src.lion import linear_attention
from src.lion.linear_attention import attention_matrix, definition, segment_states
from src.lion.linear_attention_forms import BLOCK_ENTRIES
from tests.conftest import ROOT, environment

FORMS = ("full", "recurrent", "chunkwise", "auto")
DECAYS = ("none", "head", "token")
MASKS = ("none", "holes", "left", "right")
CHUNK = 16
LENGTHS = (1, 2, 7, 16, 33, 70)
D, E = 4, 6  # of queries and keys, of values


def draw_mask(kind: str, batch: int, length: int, generator: torch.Generator) -> Tensor | None:
    """True at real tokens, at least one a text; each text has its own."""
    if kind == "none":
        return None
    if kind == "holes":
        mask = torch.rand(batch, length, generator=generator) > 0.4
    else:
        real = torch.randint(1, length + 1, (batch, 1), generator=generator)
        mask = torch.arange(length) < real
        mask = mask.flip(1) if kind == "left" else mask
    mask[:, length // 2] |= ~mask.any(1)
    return mask


def draw(
    decay: str, length: int, batch: int = 2, heads: int = 3, mask: str = "none", positive: bool = False, seed: int = 0,
    d: int = D, e: int = E,
) -> tuple[list[Tensor | None], Tensor | None]:  # fmt: skip
    """q, k, v and log_decay in float64, and a mask."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(batch, heads, length, d, generator=generator, dtype=torch.float64) for _ in range(2))
    if positive:
        q, k = q.abs() + 0.1, k.abs() + 0.1
    v = torch.randn(batch, heads, length, e, generator=generator, dtype=torch.float64)
    shape = {"none": None, "head": (heads,), "token": (batch, heads, length)}[decay]
    log_decay = None if shape is None else F.logsigmoid(torch.randn(shape, generator=generator, dtype=torch.float64))
    return [q, k, v, log_decay], draw_mask(mask, batch, length, generator)


def outputs_and_gradients(function, inputs: list[Tensor | None], **options) -> list[Tensor]:
    """The output, then the gradient of a fixed random projection of it for every input that is not None."""
    inputs = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    y = function(*inputs, **options)
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)
    leaves = [x for x in inputs if x is not None]
    return [y.detach(), *torch.autograd.grad((y * probe).sum(), leaves, materialize_grads=True)]


@functools.cache
def reference(*arguments, normalize: bool = False, scale: float | None = None) -> list[Tensor]:
    inputs, mask = draw(*arguments)
    return outputs_and_gradients(definition, inputs, mask=mask, normalize=normalize, scale=scale)


def assert_all_close(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-9) -> None:
    assert len(actual) == len(expected)
    for name, x, y in zip(("output", "q", "k", "v", "log_decay"), actual, expected):
        torch.testing.assert_close(x, y, atol=tolerance, rtol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


def distance(x: Tensor, exact: Tensor) -> float:
    """‖x − exact‖ / ‖exact‖."""
    return float((x.double() - exact).norm() / exact.norm())


# The formula itself


def test_the_definition_equals_the_formula_in_loops():
    (q, k, v, log_decay), mask = draw("token", 5, mask="holes", seed=3)
    decay = log_decay.exp()
    expected = torch.zeros_like(v)
    for b in range(2):
        for h in range(3):
            for i in range(5):
                for j in range(5):
                    if not mask[b, j]:
                        continue
                    weight = 1.0
                    for t in range(j, i):  # a key in the past: from its own decay to the one before the query
                        weight *= decay[b, h, t]
                    for t in range(i + 1, j + 1):  # a key in the future: from the one after the query to its own
                        weight *= decay[b, h, t]
                    expected[b, h, i] += 0.3 * (q[b, h, i] @ k[b, h, j]) * weight * v[b, h, j]
    torch.testing.assert_close(definition(q, k, v, log_decay, mask=mask, scale=0.3), expected, atol=1e-12, rtol=1e-12)


# Decays ½, ¼ and ⅒: from key j (column) to query i (row).
BY_HAND = [
    [1.0, 0.25, 0.25 * 0.1],
    [0.5, 1.0, 0.1],
    [0.5 * 0.25, 0.25, 1.0],
]


@pytest.mark.parametrize("form", ["definition", *FORMS])
@pytest.mark.parametrize("chunk_size", [1, 2, 3])
def test_three_tokens_give_the_result_computed_by_hand(form, chunk_size):
    ones, log_decay = torch.ones(1, 1, 3, 1, dtype=torch.float64), torch.tensor([[[0.5, 0.25, 0.1]]]).double().log()
    one_hot = torch.eye(3, dtype=torch.float64)[None, None]  # the output is then the matrix itself
    if form == "definition":
        y = definition(ones, ones, one_hot, log_decay)
    else:
        y = linear_attention(ones, ones, one_hot, log_decay, form=form, chunk_size=chunk_size)
    torch.testing.assert_close(y[0, 0], torch.tensor(BY_HAND, dtype=torch.float64), atol=1e-7, rtol=1e-7)


def test_the_scale_is_one_over_the_root_of_the_head_size_unless_given():
    (q, k, v, log_decay), _ = draw("token", 7)
    torch.testing.assert_close(definition(q, k, v, log_decay), definition(q, k, v, log_decay, scale=0.5))  # D is 4
    torch.testing.assert_close(definition(q, k, v, log_decay, scale=1.0) / 2, definition(q, k, v, log_decay))


# Every form against the definition, in float64


@pytest.mark.parametrize("batch, heads", [(1, 3), (2, 1)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_outputs_and_gradients_of_the_definition(form, decay, length, mask, batch, heads):
    case = (decay, length, batch, heads, mask)
    inputs, real = draw(*case)
    actual = outputs_and_gradients(linear_attention, inputs, mask=real, form=form, chunk_size=CHUNK)
    assert_all_close(actual, reference(*case))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", [1, 16, 33])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_normalized_rows_are_divided_by_their_sum(form, decay, length, mask):
    case = (decay, length, 2, 3, mask, True)
    inputs, real = draw(*case)
    actual = outputs_and_gradients(linear_attention, inputs, mask=real, normalize=True, form=form, chunk_size=CHUNK)
    assert_all_close(actual, reference(*case, normalize=True))


@pytest.mark.parametrize("form", FORMS)
def test_normalized_weights_sum_to_one(form):
    (q, k, v, log_decay), _ = draw("token", 33, positive=True)
    y = linear_attention(q, k, torch.ones_like(v), log_decay, normalize=True, form=form, chunk_size=CHUNK)
    torch.testing.assert_close(y, torch.ones_like(v), atol=1e-4, rtol=0)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_a_given_scale_replaces_the_default(form, decay, normalize):
    case = (decay, 33, 2, 3, "holes", True)
    inputs, real = draw(*case)
    options = {"scale": 0.7, "normalize": normalize}
    actual = outputs_and_gradients(linear_attention, inputs, mask=real, form=form, chunk_size=CHUNK, **options)
    assert_all_close(actual, reference(*case, **options))


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 32, 33, 34, 1000])
def test_the_chunk_size_changes_nothing(chunk_size):
    inputs, mask = draw("token", 33, 2, 3, "holes")
    actual = outputs_and_gradients(linear_attention, inputs, mask=mask, form="chunkwise", chunk_size=chunk_size)
    assert_all_close(actual, reference("token", 33, 2, 3, "holes"))


@pytest.mark.parametrize("entries", [1, 4 * 3 * 5 * 5, 2**18])  # one text's chunk, four of them, all
@pytest.mark.parametrize("decay", DECAYS)
def test_the_number_of_chunks_per_block_changes_nothing(decay, entries, monkeypatch):
    monkeypatch.setitem(BLOCK_ENTRIES, "cpu", entries)
    inputs, mask = draw(decay, 33, 2, 3, "holes")
    actual = outputs_and_gradients(linear_attention, inputs, mask=mask, form="chunkwise", chunk_size=5)
    assert_all_close(actual, reference(decay, 33, 2, 3, "holes"))


@pytest.mark.parametrize("decay", DECAYS)
def test_auto_gives_the_same_numbers_where_it_switches_form(decay):
    inputs, mask = draw(decay, 300, 1, 1, "right")
    full = outputs_and_gradients(linear_attention, inputs, mask=mask, form="full")
    assert_all_close(outputs_and_gradients(linear_attention, inputs, mask=mask, form="auto"), full)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_gradients_agree_with_finite_differences(form, decay, masked):
    inputs, mask = draw(decay, 5, 1, 2, "holes" if masked else "none", d=2, e=3)
    inputs = [None if x is None else x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(
        lambda *x: linear_attention(*x, mask=mask, form=form, chunk_size=2), inputs, fast_mode=False
    )


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", ["definition", *FORMS])
def test_a_reversed_text_gives_the_reversed_output(form, decay, mask):
    (q, k, v, log_decay), real = draw(decay, 33, mask=mask)

    def operator(*inputs, **options):
        if form == "definition":
            return definition(*inputs, **options)
        return linear_attention(*inputs, **options, form=form, chunk_size=CHUNK)

    backwards = operator(
        q.flip(2), k.flip(2), v.flip(2), log_decay.flip(2) if decay == "token" else log_decay,
        mask=None if real is None else real.flip(1),
    )  # fmt: skip
    expected = operator(q, k, v, log_decay, mask=real)
    torch.testing.assert_close(backwards.flip(2), expected, atol=1e-10, rtol=1e-10)


def test_only_inputs_that_require_a_gradient_get_one():
    (q, k, v, log_decay), _ = draw("token", 7)
    expected = outputs_and_gradients(definition, [q, k, v, log_decay])
    for form in FORMS:
        lone = log_decay.clone().requires_grad_()
        y = linear_attention(q, k, v, lone, form=form, chunk_size=3)
        probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        torch.testing.assert_close(torch.autograd.grad((y * probe).sum(), lone)[0], expected[-1])
        assert not linear_attention(q, k, v, log_decay, form=form, chunk_size=3).requires_grad


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_transposed_views_give_the_results_of_contiguous_inputs(form, decay):
    case = (decay, 33, 2, 3, "holes")
    (q, k, v, log_decay), mask = draw(*case)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    if decay == "token":
        log_decay = log_decay.mT.contiguous().mT
        assert not log_decay.is_contiguous()
    assert not q.is_contiguous()
    mask = mask.T.contiguous().T

    def on_views(*views, **options):  # cloning keeps the strides
        assert not views[0].is_contiguous()
        return linear_attention(*views, **options)

    actual = outputs_and_gradients(on_views, [q, k, v, log_decay], mask=mask, form=form, chunk_size=CHUNK)
    assert_all_close(actual, reference(*case))


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_inputs_are_not_modified(form, decay):
    inputs, mask = draw(decay, 33, mask="holes")
    before = [None if x is None else x.clone() for x in inputs]
    outputs_and_gradients(linear_attention, inputs, mask=mask, form=form, chunk_size=CHUNK, normalize=True)
    linear_attention(*inputs, mask=mask, form=form, chunk_size=CHUNK)
    for x, y in zip(inputs, before):
        assert (x is None and y is None) or torch.equal(x, y)


# Padding


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_a_padded_key_contributes_nothing(form, decay):
    inputs, mask = draw(decay, 33, mask="holes")
    hole = ~mask[:, None, :, None]
    q, k, v, log_decay = inputs
    y, _, grad_k, grad_v, *_ = outputs_and_gradients(linear_attention, inputs, mask=mask, form=form, chunk_size=CHUNK)
    other = linear_attention(
        q, torch.where(hole, 100.0, k), torch.where(hole, -100.0, v), log_decay,
        mask=mask, form=form, chunk_size=CHUNK,
    )  # fmt: skip
    torch.testing.assert_close(other, y, atol=1e-12, rtol=0)
    assert not grad_k.masked_select(hole).any()
    assert not grad_v.masked_select(hole).any()


@pytest.mark.parametrize("padding", [1, 15, 50])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_padding_does_not_change_the_output(form, decay, side, padding):
    inputs, _ = draw(decay, 20)
    alone = outputs_and_gradients(linear_attention, inputs, form=form, chunk_size=CHUNK)[0]
    pad = (padding, 0) if side == "left" else (0, padding)
    q, k, v = (F.pad(x, (0, 0, *pad), value=7.0) for x in inputs[:3])
    log_decay = F.pad(inputs[3], pad, value=-0.3) if decay == "token" else inputs[3]
    mask = F.pad(torch.ones(2, 20, dtype=torch.bool), pad)
    y = linear_attention(q, k, v, log_decay, mask=mask, form=form, chunk_size=CHUNK)
    torch.testing.assert_close(y[mask[:, None].expand(-1, 3, -1)], alone.flatten(0, 2), atol=1e-11, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_a_text_of_only_padding_gives_zeros(form):
    inputs, _ = draw("token", 33)
    mask = torch.tensor([[False], [True]]).expand(2, 33)
    actual = outputs_and_gradients(linear_attention, inputs, mask=mask, form=form, chunk_size=CHUNK)
    assert not actual[0][0].any() and actual[0][1].any()
    assert all(x.isfinite().all() for x in actual)


@pytest.mark.parametrize("form", FORMS)
def test_a_masked_token_with_decay_0_separates_two_texts(form):
    (q, k, v, log_decay), _ = draw("token", 33)
    mask = torch.ones(2, 33, dtype=torch.bool)
    mask[:, 20] = False
    log_decay[:, :, 20] = -math.inf
    packed = linear_attention(q, k, v, log_decay, mask=mask, form=form, chunk_size=CHUNK)
    for part in (slice(0, 20), slice(21, 33)):
        alone = definition(*(x[:, :, part] for x in (q, k, v, log_decay)))
        torch.testing.assert_close(packed[:, :, part], alone, atol=1e-9, rtol=1e-9)


# Decays at their limits


@pytest.mark.parametrize("shape", ["head", "token"])
@pytest.mark.parametrize("form", FORMS)
def test_a_decay_of_1_is_no_decay(form, shape):
    inputs, mask = draw("none", 33, mask="holes")
    zeros = torch.zeros((3,) if shape == "head" else (2, 3, 33), dtype=torch.float64)
    with_ones = outputs_and_gradients(linear_attention, [*inputs[:3], zeros], mask=mask, form=form, chunk_size=CHUNK)
    without = outputs_and_gradients(linear_attention, inputs, mask=mask, form=form, chunk_size=CHUNK)
    assert_all_close(with_ones[:-1], without)
    expected = outputs_and_gradients(definition, [*inputs[:3], zeros], mask=mask)
    torch.testing.assert_close(with_ones[-1], expected[-1], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("value", [-math.inf, -1e4, -100.0, -59.0])
@pytest.mark.parametrize("where", ["everywhere", "here and there", "at both ends", "one head"])
@pytest.mark.parametrize("form", FORMS)
def test_a_decay_near_0_gives_the_definitions_finite_numbers(form, where, value, dtype):
    inputs, mask = draw("token", 33, mask="holes")
    log_decay = inputs[3]
    if where == "everywhere":
        log_decay.fill_(value)
    elif where == "here and there":
        log_decay[torch.rand(log_decay.shape, generator=torch.Generator().manual_seed(0)) < 0.3] = value
    elif where == "at both ends":
        log_decay[..., [0, -1]] = value
    else:
        log_decay[:, 1] = value
    low = [x.to(dtype) for x in inputs]
    actual = outputs_and_gradients(linear_attention, low, mask=mask, form=form, chunk_size=CHUNK)
    expected = outputs_and_gradients(definition, [x.double() for x in low], mask=mask)
    assert all(x.isfinite().all() for x in actual)
    assert_all_close([x.double() for x in actual], expected, 1e-9 if dtype == torch.float64 else 5e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_head_with_decay_0_sees_only_its_own_token(form):
    (q, k, v, _), _ = draw("none", 33)
    y = linear_attention(q, k, v, torch.full((3,), -math.inf), form=form, chunk_size=CHUNK)
    torch.testing.assert_close(y, (q * k).sum(-1, keepdim=True) * D**-0.5 * v, atol=1e-9, rtol=1e-9)


# Other precisions


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize("length", [7, 70])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("with_and_without_kernel")
def test_float32_is_accurate_to_five_digits(form, decay, length, mask, normalize):
    inputs, real = draw(decay, length, mask=mask, positive=normalize)
    inputs = [None if x is None else x.float() for x in inputs]
    actual = outputs_and_gradients(
        linear_attention, inputs, mask=real, form=form, chunk_size=CHUNK, normalize=normalize
    )
    exact = [None if x is None else x.double() for x in inputs]
    expected = outputs_and_gradients(definition, exact, mask=real, normalize=normalize)
    for x, y in zip(actual, expected):
        assert x.dtype == torch.float32
        assert distance(x, y) < 1e-5


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("with_and_without_kernel")
def test_half_precision_is_accurate_to_two_digits(form, decay, dtype, normalize):
    inputs, mask = draw(decay, 70, mask="holes", positive=normalize)
    inputs = [None if x is None else x.to(dtype) for x in inputs[:3]] + [inputs[3]]
    actual = outputs_and_gradients(
        linear_attention, inputs, mask=mask, form=form, chunk_size=CHUNK, normalize=normalize
    )
    exact = [None if x is None else x.double() for x in inputs]
    expected = outputs_and_gradients(definition, exact, mask=mask, normalize=normalize)
    assert [x.dtype for x in actual] == [dtype] * 4 + [torch.float64] * (decay != "none")
    for x, y in zip(actual, expected):
        assert distance(x, y) < 2e-2


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("with_and_without_kernel")
def test_bfloat16_error_is_at_most_twice_that_of_softmax_attention(form, decay):
    (q, k, v, log_decay), _ = draw(decay, 70, 2, 4, d=32, e=32)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    softmax = distance(
        F.scaled_dot_product_attention(q, k, v),
        F.scaled_dot_product_attention(q.double(), k.double(), v.double()),
    )
    y = linear_attention(q, k, v, log_decay, form=form, chunk_size=CHUNK)
    assert distance(y, definition(q.double(), k.double(), v.double(), log_decay)) < 2 * softmax


@pytest.mark.parametrize("mean_log_decay", [-0.002, -0.5, -20.0])
@pytest.mark.parametrize("shape", ["head", "token", "token, slow at the end"])
@pytest.mark.parametrize("form", ["full", "chunkwise", "auto"])
@pytest.mark.usefixtures("with_and_without_kernel")
def test_float32_is_accurate_to_five_digits_over_a_long_text(form, shape, mean_log_decay):
    check_sampled_rows(2000, form, shape, mean_log_decay)


@pytest.mark.parametrize("mean_log_decay", [-1e-4, -0.5])
@pytest.mark.parametrize("shape", ["head", "token", "token, slow at the end"])
def test_float32_is_accurate_to_five_digits_over_100_000_tokens(shape, mean_log_decay):
    check_sampled_rows(100_000, "chunkwise", shape, mean_log_decay)


@pytest.mark.parametrize("decay", ["head", "token"])
@pytest.mark.parametrize("form, length", [("full", 1000), ("chunkwise", 16_384)])
@pytest.mark.usefixtures("with_and_without_kernel")
def test_the_gradient_of_a_decay_is_accurate_over_a_long_text(form, length, decay):
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 4, length, 16, generator=generator) for _ in range(4))
    shape = (4,) if decay == "head" else (1, 4, length)
    log_decay = F.logsigmoid(3 + torch.randn(shape, generator=generator)).requires_grad_()
    actual, exact = (
        torch.autograd.grad(
            linear_attention(*(x.to(dtype) for x in (q, k, v)), log_decay, form=form), log_decay, grad.to(dtype)
        )[0]
        for dtype in (torch.float32, torch.float64)
    )
    assert distance(actual, exact) < 2e-6


def check_sampled_rows(L: int, form: str, shape: str, mean_log_decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, L, 8, generator=generator) for _ in range(3))
    log_decay = 2 * mean_log_decay * torch.rand((2,) if shape == "head" else (1, 2, L), generator=generator)
    if "slow" in shape:  # neighbours are close there, while the sum of all that came before is large
        log_decay[..., L * 3 // 4 :] *= 0.002 / -mean_log_decay
    y = linear_attention(q, k, v, log_decay, form=form)

    per_token = log_decay.double() if log_decay.ndim == 3 else log_decay.double()[None, :, None].expand(1, 2, L)
    before = F.pad(per_token.cumsum(-1), (1, 0))  # (1, 2, L + 1): the sum of what comes before each token
    position = torch.arange(L)
    rows = [0, 1, 127, 128, 129, L // 2, L // 2 + 23, L // 2 + 24, L - 2, L - 1]
    exact = []
    for i in rows:
        past = before[..., i, None] - before[..., :-1]
        future = before[..., 1:] - before[..., i + 1, None]
        log_weight = torch.where(position <= i, past, future).where(position != i, 0)
        scores = (k.double() @ q[..., i, :, None].double()).squeeze(-1) * 8**-0.5 * log_weight.exp()
        exact.append((scores[..., None] * v.double()).sum(-2))
    assert distance(y[:, :, rows], torch.stack(exact, dim=2)) < 1e-5


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_autocast_leaves_float32_inputs_in_float32(form, decay):
    inputs, mask = draw(decay, 33, mask="holes")
    inputs = [None if x is None else x.float() for x in inputs]
    plain = outputs_and_gradients(linear_attention, inputs, mask=mask, form=form, chunk_size=CHUNK)

    def under_autocast(*inputs):  # the forward pass alone, as a training loop has it
        with torch.autocast("cpu", torch.bfloat16):
            return linear_attention(*inputs, mask=mask, form=form, chunk_size=CHUNK)

    actual = outputs_and_gradients(under_autocast, inputs)
    assert actual[0].dtype == torch.float32
    for x, y in zip(actual, plain):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("form, decay", [("recurrent", "none"), ("recurrent", "token"), ("chunkwise", "token")])
def test_the_custom_backward_pass_is_in_float32_under_autocast(form, decay):
    inputs, mask = draw(decay, 33, mask="holes")
    inputs = [None if x is None else x.float() for x in inputs]
    plain = outputs_and_gradients(linear_attention, inputs, mask=mask, form=form, chunk_size=CHUNK)
    with torch.autocast("cpu", torch.bfloat16):
        actual = outputs_and_gradients(linear_attention, inputs, mask=mask, form=form, chunk_size=CHUNK)
    for x, y in zip(actual, plain):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", ["full", "recurrent", "chunkwise"])
def test_a_compiled_operator_gives_the_same_numbers(form, decay):
    inputs, mask = draw(decay, 33, mask="holes")
    torch.compiler.reset()
    compiled = torch.compile(linear_attention, backend="aot_eager", fullgraph=True)
    actual = outputs_and_gradients(compiled, inputs, mask=mask, form=form, chunk_size=CHUNK)
    assert_all_close(actual, reference(decay, 33, 2, 3, "holes"))


@pytest.mark.parametrize("form", ["full", "chunkwise"])
def test_a_compiled_operator_is_in_float32_whether_autocast_is_on_or_off(form):
    inputs = [x.float() for x in draw("token", 33)[0]]
    torch.compiler.reset()
    compiled, found = torch.compile(linear_attention, backend="aot_eager", fullgraph=True), []
    for is_on in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            found.append(compiled(*inputs, form=form, chunk_size=CHUNK))
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])


@pytest.mark.parametrize("form", ["full", "recurrent", "chunkwise"])
def test_the_compiled_graph_does_not_grow_with_the_length(form, monkeypatch):
    """A loop that torch.compile writes out takes minutes to compile."""
    monkeypatch.setitem(BLOCK_ENTRIES, "cpu", 1)  # a block a chunk, or a text
    sizes = []

    def backend(graph, inputs):
        sizes.append(len(graph.graph.nodes))
        return make_boxed_func(graph)

    for length in (33, 160):
        torch.compiler.reset()
        inputs, mask = draw("token", length, mask="holes")
        compiled = torch.compile(linear_attention, backend=aot_autograd(fw_compiler=backend, bw_compiler=backend))
        outputs_and_gradients(compiled, inputs, mask=mask, form=form, chunk_size=CHUNK)
    assert len(sizes) == 4 and sizes[:2] == sizes[2:]


@pytest.mark.parametrize("decay", DECAYS)
def test_three_programs_serve_texts_of_all_shapes(decay):
    """That of the first shape, of all lengths, and of all shapes. torch.compile gives up after eight."""
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(linear_attention, backend=counter, fullgraph=True)
    for batch, length in ((2, 33), (2, 34), (4, 50), (4, 21), (5, 60), (6, 12)):
        inputs, mask = draw(decay, length, batch, mask="holes")
        torch.testing.assert_close(compiled(*inputs, mask=mask), linear_attention(*inputs, mask=mask))
    assert counter.frame_count == 3


# Several sequences in a row, and a text in several segments

PACKED = (5, 1, 27, 16, 2)  # shorter and longer than a chunk, and ends on and off its edges


def one_by_one(function, lengths: tuple[int, ...]):
    """What `function` gives for each part of a row alone, side by side."""

    def apply(q, k, v, log_decay, mask=None, **options):
        outputs, start = [], 0
        for length in lengths:
            part = slice(start, start := start + length)
            decay = log_decay[..., part] if log_decay is not None and log_decay.ndim == 3 else log_decay
            own = None if mask is None else mask[:, part]
            outputs.append(function(q[:, :, part], k[:, :, part], v[:, :, part], decay, mask=own, **options))
        return torch.cat(outputs, dim=2)

    return apply


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_packed_sequences_give_the_outputs_of_each_alone(form, decay, mask, normalize):
    inputs, real = draw(decay, sum(PACKED), mask=mask, positive=normalize)
    numbers = torch.repeat_interleave(torch.tensor([7, 3, 4, 0, 9]), torch.tensor(PACKED))  # a change is what counts
    options = {"mask": real, "normalize": normalize}
    actual = outputs_and_gradients(
        linear_attention, inputs, seq_idx=numbers.expand(2, -1), form=form, chunk_size=CHUNK, **options
    )
    assert_all_close(actual, outputs_and_gradients(one_by_one(definition, PACKED), inputs, **options))


@pytest.mark.parametrize("form", FORMS)
def test_rows_may_be_packed_differently(form):
    inputs, _ = draw("token", 40)
    numbers = (torch.arange(40) >= torch.tensor([[13], [29]])).long()
    y = linear_attention(*inputs, seq_idx=numbers, form=form, chunk_size=CHUNK)
    for row, lengths in enumerate([(13, 27), (29, 11)]):
        alone = one_by_one(definition, lengths)(*(x[row : row + 1] for x in inputs))
        torch.testing.assert_close(y[row : row + 1], alone, atol=1e-9, rtol=1e-9)


def test_offsets_become_numbers_of_sequences_as_the_documentation_says():
    cu_seqlens = torch.tensor([0, 5, 6, 33])
    numbers = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())[None]
    inputs, _ = draw("head", 33, batch=1)
    expected = one_by_one(definition, (5, 1, 27))(*inputs)
    torch.testing.assert_close(linear_attention(*inputs, seq_idx=numbers), expected, atol=1e-9, rtol=1e-9)


def test_values_of_another_sequence_are_not_seen_however_large():
    (q, k, v, _), _ = draw("none", 20, batch=1)
    v[:, :, 10:] *= 1e12
    numbers = (torch.arange(20) >= 10).long()[None]
    for form in FORMS:
        y = linear_attention(q, k, v, seq_idx=numbers, form=form, chunk_size=8)
        alone = definition(*(x[:, :, :10] for x in (q, k, v)))
        torch.testing.assert_close(y[:, :, :10], alone, atol=1e-9, rtol=1e-9)


def in_segments(q, k, v, log_decay, mask=None, *, lengths=(10, 1, 16, 6), normalize=False, **options):
    """A text read segment by segment, as `segment_states` says."""
    starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    parts = [slice(*bounds) for bounds in itertools.pairwise(starts)]

    def of(x, part):
        return x[..., part] if x is not None and x.ndim > 1 else x

    states = [
        segment_states(k[:, :, part], v[:, :, part], of(log_decay, part), mask=of(mask, part), normalize=normalize)
        for part in parts
    ]
    left, lefts = torch.zeros_like(states[0].rightward), []
    for state in states:
        lefts.append(left)
        left = left * state.across + state.rightward
    right, outputs = torch.zeros_like(left), []
    for part, left, state in reversed(list(zip(parts, lefts, states))):
        y = linear_attention(
            q[:, :, part], k[:, :, part], v[:, :, part], of(log_decay, part), mask=of(mask, part),
            left_state=left, right_state=right, normalize=normalize, **options,
        )  # fmt: skip
        outputs.append(y)
        right = right * state.across + state.leftward
    return torch.cat(outputs[::-1], dim=2)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_segments_give_the_outputs_of_one_call(form, decay, mask):
    inputs, real = draw(decay, 33, mask=mask)
    actual = outputs_and_gradients(in_segments, inputs, mask=real, form=form, chunk_size=CHUNK)
    assert_all_close(actual, reference(decay, 33, 2, 3, mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_of_segments_are_float32(dtype):
    inputs, _ = draw("token", 33)
    low = [x.to(dtype) for x in inputs]
    assert segment_states(*low[1:]).rightward.dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert distance(in_segments(*low), definition(*(x.double() for x in low))) < tolerance


# Memory


def bytes_kept_for_the_backward_pass(length: int, form: str, decay: str) -> int:
    inputs, _ = draw(decay, length, batch=1, heads=2, d=16, e=16)
    kept = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    inputs = [None if x is None else x.float().requires_grad_() for x in inputs]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = linear_attention(*inputs, form=form, chunk_size=64)
    del y
    return sum(kept.values())


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", ["recurrent", "chunkwise"])
def test_memory_saved_for_backward_grows_linearly_and_holds_no_matrices(form, decay):
    short, long = (bytes_kept_for_the_backward_pass(length, form, decay) for length in (512, 4096))
    assert long <= 8.1 * short
    inputs = 3 * 2 * 4096 * 16 * 4  # q, k and v; every chunk's 64×64 matrix would be 4 times one of them
    assert long < 2.5 * inputs


# The matrix


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("decay", DECAYS)
def test_the_attention_matrix_times_the_values_is_the_output(decay, mask, scale):
    (q, k, v, log_decay), real = draw(decay, 33, mask=mask)
    matrix = attention_matrix(q, k, log_decay, mask=real, scale=scale)
    assert matrix.shape == (2, 3, 33, 33)
    expected = definition(q, k, v, log_decay, mask=real, scale=scale)
    torch.testing.assert_close(matrix @ v, expected, atol=1e-9, rtol=1e-9)
    if real is not None:
        assert not matrix.masked_select(~real[:, None, None, :]).any()


@pytest.mark.parametrize("channels", [False, True])
def test_matrices_and_states_of_heads_that_share_queries_and_keys(channels):
    q, k, v = torch.randn(2, 2, 9, D), torch.randn(2, 2, 9, D), torch.randn(2, 4, 9, E)
    log_decay = -torch.rand(2, 4, 9, D) if channels else -torch.rand(2, 4, 9)
    y = linear_attention(q, k, v, log_decay, form="full")
    torch.testing.assert_close(attention_matrix(q, k, log_decay) @ v, y, atol=1e-5, rtol=1e-5)
    first = segment_states(k[:, :, :4], v[:, :, :4], log_decay[:, :, :4])
    last = linear_attention(*(x[:, :, 4:] for x in (q, k, v, log_decay)), left_state=first.rightward, form="chunkwise")
    torch.testing.assert_close(last, y[:, :, 4:], atol=1e-5, rtol=1e-5)
    for heads in (1, 3):
        with pytest.raises(ValueError, match=f"2 heads of queries and keys cannot serve {heads}"):
            attention_matrix(q, k, log_decay[:, :heads])
        with pytest.raises(ValueError, match=f"2 heads of queries and keys cannot serve {heads}"):
            segment_states(k, v[:, :heads], log_decay[:, :heads])


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", ["full", "auto"])
def test_dropout_zeroes_entries_of_the_matrix_and_scales_up_the_others(form, decay):
    (q, k, _, log_decay), _ = draw(decay, 300, 1, 2)  # a length at which auto would not choose the full form
    one_hot = torch.eye(300, dtype=torch.float64).expand(1, 2, 300, 300)  # the output is then the matrix itself
    torch.manual_seed(0)
    dropped = linear_attention(q, k, one_hot, log_decay, form=form, dropout_p=0.25)
    matrix = attention_matrix(q, k, log_decay)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], matrix[kept] / 0.75)
    near = torch.ones(300, 300, dtype=torch.bool).tril(1).triu(-1).expand_as(kept)  # where no decay makes a 0
    assert abs(kept[near].float().mean() - 0.75) < 0.05


@pytest.mark.parametrize("heads", [2, 1])
@pytest.mark.parametrize("decay", DECAYS)
def test_gradients_pass_the_entries_that_dropout_keeps(decay, heads):
    (q, k, v, log_decay), _ = draw(decay, 33, 2, 2)
    q, k = q[:, :heads], k[:, :heads]  # heads may share queries and keys
    one_hot = torch.eye(33, dtype=torch.float64).expand(2, 2, 33, 33)
    inputs = [x.detach().requires_grad_() for x in (q, k, v, log_decay) if x is not None]

    def dropped(v: Tensor) -> Tensor:
        torch.manual_seed(0)
        return linear_attention(*inputs[:2], v, *inputs[3:], form="full", dropout_p=0.25)

    factors = (dropped(one_hot) != 0).double() / 0.75
    plain = linear_attention(*inputs[:2], one_hot, *inputs[3:], form="full")
    expected = (plain * factors) @ inputs[2]
    y = dropped(inputs[2])
    torch.testing.assert_close(y, expected, atol=1e-9, rtol=1e-9)
    probe = torch.randn_like(y)
    pairs = zip(*(torch.autograd.grad(x, inputs, probe) for x in (y, expected)))
    assert all(distance(*pair) < 1e-9 for pair in pairs)


# What does not fit


@pytest.mark.parametrize("form", ["recurrent", "chunkwise"])
def test_dropout_is_refused_by_forms_without_a_matrix(form):
    inputs, _ = draw("token", 7)
    with pytest.raises(ValueError, match=f"dropout.*full.*{form}"):
        linear_attention(*inputs, form=form, dropout_p=0.1)


def shapes(**changes) -> dict[str, Tensor]:
    inputs, mask = draw("token", 7, mask="holes")
    return {**dict(zip(("q", "k", "v", "log_decay"), inputs)), "mask": mask, **changes}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"k": torch.zeros(2, 3, 7, D + 1)}, r"\(2, 3, 7, 4\).*\(2, 3, 7, 5\)"),
        ({"k": torch.zeros(2, 3, 8, D)}, r"\(2, 3, 8, 4\)"),
        ({"k": torch.zeros(2, 1, 7, D)}, r"\(2, 1, 7, 4\)"),
        ({"v": torch.zeros(2, 3, 8, E)}, r"\(2, 3, 8, 6\)"),
        ({"v": torch.zeros(1, 3, 7, E)}, r"\(1, 3, 7, 6\)"),
        ({"q": torch.zeros(3, 7, D)}, r"\(3, 7, 4\)"),
        ({"v": torch.zeros(3, 7, E)}, r"\(3, 7, 6\)"),
        ({"log_decay": torch.zeros(2)}, r"log_decay.*\(3,\).*\(2, 3, 7\).*\(2,\)"),
        ({"log_decay": torch.zeros(2, 7, 3)}, r"log_decay.*\(2, 7, 3\)"),
        ({"log_decay": torch.zeros(2, 3, 7, 1)}, r"log_decay.*\(2, 3, 7, 1\)"),
        ({"log_decay": torch.zeros(())}, r"log_decay.*\(\)"),
        ({"log_decay": -0.1}, r"log_decay must be a tensor.*-0.1"),
        ({"log_decay": torch.tensor([0.9, 0.5, 0])}, r"log_decay must be at most 0 \(got 0.9\); give log λ"),
        ({"log_decay": torch.full((2, 3, 7), 1e-2, requires_grad=True)}, r"log_decay must be at most 0 \(got 0.01\)"),
        ({"log_decay": torch.zeros(3), "log_decay_future": torch.ones(3)}, r"log_decay_future must be at most 0"),
        ({"q": torch.zeros(2, 3, 7, D, dtype=torch.long)}, r"q must have floating-point numbers.*int64"),
        ({"q": torch.zeros(2, 3, 7, 0), "k": torch.zeros(2, 3, 7, 0)}, r"q must have .*\(2, 3, 7, 0\)"),
        ({"mask": torch.ones(2, 8, dtype=torch.bool)}, r"mask.*\(2, 7\).*\(2, 8\)"),
        ({"mask": torch.ones(2, 1, 7, dtype=torch.bool)}, r"mask.*\(2, 1, 7\)"),
        ({"mask": torch.ones(2, 7, dtype=torch.long)}, r"mask.*bool.*int64"),
        ({"mask": torch.ones(2, 7)}, r"mask.*bool.*float32"),
        ({"form": "quadratic"}, r"auto, full, recurrent, chunkwise.*quadratic"),
        ({"form": None}, r"auto, full, recurrent, chunkwise.*None"),
        ({"seq_idx": torch.zeros(2, 8, dtype=torch.long)}, r"seq_idx.*\(2, 7\).*\(2, 8\)"),
        ({"seq_idx": torch.zeros(2, 7)}, r"seq_idx.*integers.*float32"),
        ({"left_state": torch.zeros(2, 3, D, D)}, r"left_state.*\(2, 3, 4, 6\).*\(2, 3, 4, 4\)"),
        ({"right_state": torch.zeros(2, 3, E)}, r"right_state.*\(2, 3, 4, 6\).*\(2, 3, 6\)"),
        ({"right_state": torch.zeros(2, 3, D, E), "normalize": True}, rf"right_state.*{E + 1}\)"),
        (
            {"left_state": torch.zeros(2, 3, D, E), "seq_idx": torch.zeros(2, 7, dtype=torch.long)},
            r"left_state.*seq_idx",
        ),
        ({"k": None, "v": None}, r"q without k and v.*\(batch, length, 3, heads, head_dim\).*\(2, 3, 7, 4\)"),
        ({"k": None}, "k is None; give k and v, or neither"),
        ({"log_decay": torch.zeros(3), "forget_logits": torch.zeros(3)}, "forget_logits and log_decay.*omit one"),
        ({"forget_logits": torch.zeros(2, 7, 3)}, r"forget_logits.*\(2, 3, 7\).*\(2, 7, 3\)"),
        ({"chunk_size": 0}, r"chunk_size.*0"),
        ({"dropout_p": -0.1}, r"dropout must be from 0 to 1.*-0.1"),
        ({"dropout_p": 1.5}, r"dropout must be from 0 to 1.*1.5"),
        ({"chunk_size": -16}, r"chunk_size.*-16"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_invalid_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        linear_attention(**shapes(**changes))


def test_decays_above_zero_are_no_error_in_padding_and_if_they_are_rounded():
    inputs, _ = draw("token", 7)
    mask = torch.arange(7).expand(2, 7) < 5
    expected = linear_attention(*inputs, mask=mask)
    inputs[3] = inputs[3].detach().masked_fill(~mask[:, None], 2)
    torch.testing.assert_close(linear_attention(*inputs, mask=mask)[:, :, :5], expected[:, :, :5])
    rounded = torch.full((3,), 1.0000001).log()
    assert (rounded > 0).all() and linear_attention(*inputs[:3], rounded.to(inputs[0].dtype)).isfinite().all()


def test_decays_are_not_looked_at_while_something_records():
    inputs, _ = draw("head", 7)
    traced = make_fx(lambda q, k, v, log_decay: linear_attention(q, k, v, log_decay), tracing_mode="real")(*inputs)
    torch.testing.assert_close(traced(*inputs), linear_attention(*inputs))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", [(), (2,), (2, 5), "bhl", "bhld"], ids=str)
@pytest.mark.parametrize("batch, length", [(0, 5), (2, 0)])
def test_nothing_has_an_output_and_gradients_of_nothing(batch, length, decay, form):
    shape = batch, 2, length, 5
    decay = {"bhl": shape[:3], "bhld": shape}.get(decay, decay)
    inputs = [torch.rand(shape, requires_grad=True) for _ in range(3)]
    inputs += [torch.full(decay, -0.5, requires_grad=True)] if decay else []
    y = linear_attention(*inputs, form=form, mask=torch.ones(batch, length, dtype=torch.bool))
    assert y.shape == shape
    for x, grad in zip(inputs, torch.autograd.grad(y.sum(), inputs)):
        assert grad.shape == x.shape and not grad.any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", DECAYS)
def test_tensors_without_data_have_the_shape_of_the_output(decay, form):
    inputs, _ = draw(decay, 40)
    inputs = [None if x is None else x.to("meta") for x in inputs]
    assert linear_attention(*inputs, form=form).shape == (2, 3, 40, E)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", DECAYS)
def test_derivatives_in_forward_mode_are_right_or_refused(decay, form):
    (q, k, v, log_decay), _ = draw(decay, 40)

    def run(q: Tensor) -> Tensor:
        return linear_attention(q, k, v, log_decay, form=form, chunk_size=CHUNK)

    def dual() -> Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(run(forward_ad.make_dual(q, q))).tangent

    for derivative in (dual, lambda: torch.func.jvp(run, (q,), (q,))[1]):
        try:
            found = derivative()
        except RuntimeError as error:
            works = decay == "none" and form != "recurrent"
            assert not works and re.search("forward mode|jvp|setup_context", str(error)), error
        else:
            torch.testing.assert_close(found, run(q))  # which is linear in q


# The kernels


def test_the_kernels_give_the_same_numbers_in_tritons_interpreter():
    pytest.importorskip("triton", reason="triton is not installed")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "tests/test_linear_attention_triton.py"]
    variables = environment(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


def test_the_operator_works_without_triton():
    program = """
import sys
sys.modules["triton"] = None  # importing it then fails
import torch
from src.lion import linear_attention
q = torch.randn(1, 2, 20, 4, requires_grad=True)
linear_attention(q, q, q, torch.full((2,), -0.5)).sum().backward()
print(bool(q.grad.isfinite().all()))
"""
    done = plain.run([sys.executable, "-c", program], cwd=ROOT, env=environment(HF_HUB_OFFLINE="1"))
    assert done.stdout.strip() == "True", done.stderr
