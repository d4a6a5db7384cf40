"""The operator with a decay per key channel: every form against the formula written out, outputs and gradients."""

import functools

import pytest
import torch
from test_linear_attention import CHUNK, FORMS, MASKS, PACKED, assert_all_close, distance, outputs_and_gradients
from test_linear_attention import draw as draw_by_head
from torch import Tensor
from torch.nn import functional as F

from src.lion import channel_decay, cpu_kernel, linear_attention
from src.lion.channel_decay import definition
from src.lion.linear_attention import attention_matrix, segment_states

DECAYS = ("head", "token", "strong")
LENGTHS = (1, 2, 7, 16, 33, 70)
OPTIONS = {"none": {}, "causal": {"causal": True}, "normalize": {"normalize": True}, "separate": {}}
# In float32: length, batch, sizes of queries and values, mask and option. Normalized, one key alone has no gradients.
SHAPES = [(1, 1, 4, 6), (2, 2, 5, 9), (7, 1, 24, 4), (16, 2, 16, 16), (33, 2, 5, 33), (70, 1, 16, 24)]
CASES_IN_FLOAT32 = [(*shape, mask, "none") for shape in SHAPES for mask in ("none", "holes", "left")]
CASES_IN_FLOAT32 += [(*shape, "holes", option) for shape in SHAPES for option in ("causal", "separate")]
CASES_IN_FLOAT32 += [*((*shape, "holes", "normalize") for shape in SHAPES[3:]), (200, 1, 4, 5, "holes", "none")]


def draw(
    decay: str, length: int, batch: int = 2, heads: int = 3, mask: str = "none", positive: bool = False, seed: int = 0,
    d: int = 4, e: int = 6,
) -> tuple[list[Tensor], Tensor | None]:  # fmt: skip
    """q, k, v and log decays of channels in float64, and a mask. "strong": some decays are almost 0, others 1."""
    (q, k, v, _), real = draw_by_head("none", length, batch, heads, mask, positive, seed, d, e)
    generator = torch.Generator().manual_seed(seed + 1)
    shape = (heads, q.shape[-1]) if decay == "head" else q.shape
    logits = torch.randn(shape, generator=generator, dtype=torch.float64) * (20 if decay == "strong" else 1)
    return [q, k, v, F.logsigmoid(logits)], real


@functools.cache
def reference(*arguments, **options) -> list[Tensor]:
    inputs, mask = draw(*arguments)
    return outputs_and_gradients(definition, inputs, mask=mask, **options)


def test_the_definition_equals_the_formula_in_loops():
    (q, k, v, log_decay), mask = draw("token", 5, mask="holes", seed=3)
    expected = torch.zeros_like(v)
    for b in range(2):
        for h in range(3):
            for i in range(5):
                for j in range(5):
                    weight = torch.ones(q.shape[-1], dtype=torch.float64) * float(mask[b, j])
                    for t in range(j, i):
                        weight = weight * log_decay[b, h, t].exp()
                    for t in range(i + 1, j + 1):
                        weight = weight * log_decay[b, h, t].exp()
                    expected[b, h, i] += 0.3 * (q[b, h, i] * weight * k[b, h, j]).sum() * v[b, h, j]
    torch.testing.assert_close(definition(q, k, v, log_decay, mask=mask, scale=0.3), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["head", "token"])
def test_equal_decays_of_all_channels_are_decays_of_heads(form, kind):
    (q, k, v, log_decay), mask = draw_by_head(kind, 70, mask="holes")
    options = {"mask": mask, "form": form, "chunk_size": CHUNK}
    by_channel = linear_attention(q, k, v, log_decay[..., None].expand(*log_decay.shape, q.shape[-1]), **options)
    torch.testing.assert_close(by_channel, linear_attention(q, k, v, log_decay, **options), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_outputs_and_gradients_of_the_definition(form, decay, length, mask):
    case = (decay, length, *((1, 3) if length % 2 else (2, 1)), mask)
    inputs, real = draw(*case)
    actual = outputs_and_gradients(linear_attention, inputs, mask=real, form=form, chunk_size=CHUNK)
    assert_all_close(actual, reference(*case))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", ["head", "token"])
def test_decays_of_a_single_token_have_gradients_of_0(form, decay):
    (q, k, v, log_decay), _ = draw(decay, 1)
    log_decay[..., 0] = -torch.inf
    linear_attention(q, k, v, log_decay.requires_grad_(), form=form).sum().backward()
    assert log_decay.grad.abs().sum() == 0


@pytest.mark.parametrize("options", [{"normalize": True}, {"scale": 0.7, "normalize": True}, {"causal": True}], ids=str)
@pytest.mark.parametrize("mask", ["holes", "left"])
@pytest.mark.parametrize("length", [1, 16, 33])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_options_have_the_outputs_and_gradients_of_the_definition(form, decay, length, mask, options):
    case = (decay, length, 2, 3, mask, True)
    inputs, real = draw(*case)
    actual = outputs_and_gradients(linear_attention, inputs, mask=real, form=form, chunk_size=CHUNK, **options)
    assert_all_close(actual, reference(*case, **options), 1e-8)


@pytest.mark.parametrize("length", [1, 16, 33])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_decays_per_direction_have_the_outputs_and_gradients_of_the_definition(form, decay, length):
    inputs, mask = draw(decay, length, mask="holes")
    inputs.append(draw(decay, length, seed=5)[0][3])

    def separate(function, **options):
        return lambda q, k, v, past, future: function(q, k, v, past, log_decay_future=future, mask=mask, **options)

    actual = outputs_and_gradients(separate(linear_attention, form=form, chunk_size=CHUNK), inputs)
    assert_all_close(actual, outputs_and_gradients(separate(definition), inputs))


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 32, 64, 1000])
@pytest.mark.parametrize("entries", [1, 2**20])  # one text at a time, all
@pytest.mark.parametrize("decay", ["head", "token"])
def test_sizes_of_chunks_and_blocks_change_nothing(decay, chunk_size, entries, monkeypatch):
    monkeypatch.setitem(channel_decay.ENTRIES, "cpu", entries)
    monkeypatch.setitem(channel_decay.LARGEST, "cpu", 64)
    case = (decay, 150, 2, 3, "holes")
    inputs, mask = draw(*case)
    actual = outputs_and_gradients(linear_attention, inputs, mask=mask, form="chunkwise", chunk_size=chunk_size)
    assert_all_close(actual, reference(*case))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("decay", DECAYS)
def test_training_precisions_are_accurate(decay, form, dtype, tolerance):
    inputs, mask = draw(decay, 200, mask="holes")
    low = [x.to(dtype) if number < 3 else x.float() for number, x in enumerate(inputs)]
    options = {"mask": mask}
    actual = outputs_and_gradients(linear_attention, low, form=form, chunk_size=CHUNK, **options)
    exact = outputs_and_gradients(definition, [x.double() for x in low], **options)
    assert actual[0].dtype == dtype
    assert all(distance(x, y) < tolerance for x, y in zip(actual, exact))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", DECAYS)
def test_packed_sequences_give_the_outputs_of_each_alone(form, decay):
    (q, k, v, log_decay), _ = draw(decay, sum(PACKED))
    seq_idx = torch.repeat_interleave(torch.arange(len(PACKED)), torch.tensor(PACKED)).expand(2, -1)
    options = {"form": form, "chunk_size": CHUNK}
    packed = linear_attention(q, k, v, log_decay, seq_idx=seq_idx, **options)
    parts, start = [], 0
    for length in PACKED:
        part = slice(start, start + length)
        own = log_decay if log_decay.ndim == 2 else log_decay[:, :, part]
        parts.append(linear_attention(*(x[:, :, part] for x in (q, k, v)), own, **options))
        start += length
    torch.testing.assert_close(packed, torch.cat(parts, 2), atol=1e-9, rtol=1e-9)


# In float32, with the CPU's kernel and without


@functools.cache
def case_in_float32(decay: str, length: int, batch: int, d: int, e: int, mask: str, option: str):
    """Inputs in float32, a mask, and what `definition` has for these inputs in float64."""
    inputs, real = draw(decay, length, batch, 2, mask, option == "normalize", d=d, e=e)
    if option == "separate":
        inputs.append(draw(decay, length, batch, 2, seed=5, d=d, e=e)[0][3])
    inputs = [x.float() for x in inputs]
    exact = [x.double() for x in inputs]
    return inputs, real, outputs_and_gradients(of_future_too(definition), exact, mask=real, **OPTIONS[option])


def of_future_too(function, form: str | None = None):
    """`function`, of which the fifth argument, if any, are the decays of future keys."""
    given = {} if form is None else {"form": form, "chunk_size": CHUNK}
    return lambda q, k, v, past, future=None, **options: function(
        q, k, v, past, log_decay_future=future, **given, **options
    )


def assert_near(actual: list[Tensor], exact: list[Tensor], tolerance: float = 1e-5) -> None:
    for number, (x, y) in enumerate(zip(actual, exact, strict=True)):
        assert x.shape == y.shape and x.dtype == torch.float32
        assert (distance(x, y) if y.any() else float(x.abs().max())) < tolerance, number


@pytest.mark.parametrize("case", CASES_IN_FLOAT32, ids=str)
@pytest.mark.parametrize("decay", DECAYS)
def test_float32_has_the_outputs_and_gradients_of_the_definition(decay, case, with_and_without_kernel):
    length, *_, option = case
    inputs, real, exact = case_in_float32(decay, *case)
    for form in ("full", "chunkwise") if length in (1, 33) else ("chunkwise",):
        actual = outputs_and_gradients(of_future_too(linear_attention, form), inputs, mask=real, **OPTIONS[option])
        assert_near(actual, exact)


@pytest.mark.parametrize("decay", DECAYS)
def test_states_from_outside_have_gradients(decay, with_and_without_kernel):
    """Of the PyTorch path in float64, which another test compares with one call."""
    inputs, mask = draw(decay, 70, mask="holes", d=5, e=24)
    inputs += [
        torch.randn(2, 3, 5, 24, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (0, 1)
    ]

    def with_states(q, k, v, log_decay, left, right):
        return linear_attention(
            q, k, v, log_decay, mask=mask, left_state=left, right_state=right, form="chunkwise", chunk_size=CHUNK
        )

    low = [x.float() for x in inputs]
    actual = outputs_and_gradients(with_states, low)
    assert_near(actual, outputs_and_gradients(with_states, [x.double() for x in low]))


@pytest.mark.parametrize("number", range(4))
def test_inputs_of_any_strides(number, with_and_without_kernel):
    inputs, mask = draw("token", 70, mask="holes", d=16, e=24)
    low = [x.float() for x in inputs]
    exact = outputs_and_gradients(definition, [x.double() for x in low], mask=mask)
    for strided in (low[number].mT.contiguous().mT, low[number].transpose(1, 2).contiguous().transpose(1, 2)):
        leaves = [x.detach().requires_grad_() for x in [*low[:number], strided, *low[number + 1 :]]]
        y = linear_attention(*leaves, mask=mask, form="chunkwise", chunk_size=CHUNK)
        probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
        assert_near([y.detach(), *torch.autograd.grad((y * probe).sum(), leaves)], exact)


def test_decays_below_the_least_have_no_gradient(with_and_without_kernel):
    (q, k, v, log_decay), _ = draw("token", 40)
    log_decay[:, :, ::3] -= 50
    q, k, v, log_decay = (x.float() for x in (q, k, v, log_decay))
    grad = outputs_and_gradients(linear_attention, [q, k, v, log_decay], form="chunkwise")[-1]
    assert not grad[:, :, ::3].any() and grad[:, :, 1::3].any()


def test_gradients_only_of_what_needs_them(with_and_without_kernel):
    inputs = [x.float() for x in draw("head", 40)[0]]
    expected = outputs_and_gradients(linear_attention, inputs, form="chunkwise")
    for number in range(4):
        leaves = [x.clone().requires_grad_(place == number) for place, x in enumerate(inputs)]
        y = linear_attention(*leaves, form="chunkwise")
        probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
        (y * probe).sum().backward()
        assert [x.grad is not None for x in leaves] == [place == number for place in range(4)]
        torch.testing.assert_close(leaves[number].grad, expected[1 + number])


def test_rounding_of_decays_near_one_does_not_add_up(monkeypatch):
    """In float32, λ = e^-2e-5 is off by 2e-8, and its 2000th power by 2000 times as much."""
    monkeypatch.setattr(cpu_kernel, "USE_NATIVE", True)
    if not cpu_kernel.is_available():
        pytest.skip(f"no kernel{cpu_kernel.reason()}")
    inputs = [x.float() for x in draw("head", 2000, 1, 1)[0]]
    inputs[3] = torch.full((1, 4), -2e-5)
    exact = outputs_and_gradients(linear_attention, [x.double() for x in inputs], form="chunkwise")
    assert_near(outputs_and_gradients(linear_attention, inputs, form="chunkwise"), exact, 5e-6)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_segments_give_the_outputs_and_gradients_of_one_call(form, decay, normalize):
    inputs, mask = draw(decay, 70, mask="holes", positive=normalize)

    def in_segments(q, k, v, log_decay):
        parts = [slice(0, 1), slice(1, 30), slice(30, 47), slice(47, 70)]
        decays = [log_decay if log_decay.ndim == 2 else log_decay[:, :, part] for part in parts]
        given = [{"mask": mask[:, part], "normalize": normalize} for part in parts]
        own = [[x[:, :, part] for x in (q, k, v)] for part in parts]
        states = [segment_states(*x[1:], of, **options) for x, of, options in zip(own, decays, given)]
        lefts = [torch.zeros_like(states[0].rightward)]
        for state in states[:-1]:
            lefts.append(lefts[-1] * state.across + state.rightward)
        right, outputs = torch.zeros_like(lefts[0]), []
        for x, of, options, left, state in reversed(list(zip(own, decays, given, lefts, states))):
            options = {**options, "left_state": left, "right_state": right, "form": form, "chunk_size": CHUNK}
            outputs.insert(0, linear_attention(*x, of, **options))
            right = right * state.across_leftward + state.leftward
        return torch.cat(outputs, 2)

    expected = outputs_and_gradients(definition, inputs, mask=mask, normalize=normalize)
    assert_all_close(outputs_and_gradients(in_segments, inputs), expected, 1e-7)


@pytest.mark.parametrize("normalize", [False, True])
def test_the_attention_matrix_times_the_values_is_the_output(normalize):
    (q, k, v, log_decay), mask = draw("token", 33, mask="holes", positive=True)
    y = attention_matrix(q, k, log_decay, mask=mask, normalize=normalize) @ v
    expected = linear_attention(q, k, v, log_decay, mask=mask, normalize=normalize)
    torch.testing.assert_close(y, expected, atol=1e-9, rtol=1e-9)


def test_heads_of_values_share_heads_of_queries():
    (q, k, v, log_decay), _ = draw("token", 33, heads=4)
    shared = linear_attention(q[:, :2], k[:, :2], v, log_decay)
    expected = linear_attention(*(x[:, :2].repeat_interleave(2, 1) for x in (q, k)), v, log_decay)
    torch.testing.assert_close(shared, expected)


def test_dropout_drops_entries_of_the_matrix():
    inputs, _ = draw("token", 7, heads=1)
    q, k, v, log_decay = (x.expand(2000, -1, -1, -1) for x in (y[:1] for y in inputs))
    torch.manual_seed(0)
    mean = linear_attention(q, k, v, log_decay, dropout_p=0.5).mean(0, keepdim=True)
    q, k, v, log_decay = (x[:1] for x in inputs)
    exact = definition(q, k, v, log_decay)
    assert distance(mean, exact) < 0.1
    assert distance(linear_attention(q, k, v, log_decay, dropout_p=0.5), exact) > 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_decay": torch.zeros(3, 5)}, r"log_decay.*\(3, 4\)"),
        ({"log_decay_future": torch.zeros(3)}, r"log_decay_future.*\(3, 4\)"),
        ({"dropout_p": 0.1, "form": "chunkwise"}, "attention dropout exists only in the full form"),
    ],
)
def test_invalid_arguments_are_named(changes, message):
    (q, k, v, log_decay), _ = draw("head", 7)
    with pytest.raises(ValueError, match=message):
        linear_attention(q, k, v, **{"log_decay": log_decay, **changes})
