"""The operator with a decay per key channel: every form against the formula written out, outputs and gradients."""

import functools

import pytest
import torch
from test_linear_attention import CHUNK, FORMS, MASKS, PACKED, assert_all_close, distance, outputs_and_gradients
from test_linear_attention import draw as draw_by_head
from torch import Tensor
from torch.nn import functional as F

from src.lion import channel_decay, linear_attention
from src.lion.channel_decay import definition
from src.lion.linear_attention import attention_matrix, segment_states

DECAYS = ("head", "token", "strong")
LENGTHS = (1, 2, 7, 16, 33, 70)


def draw(
    decay: str, length: int, batch: int = 2, heads: int = 3, mask: str = "none", positive: bool = False, seed: int = 0
) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v and log decays of channels in float64, and a mask. "strong": some decays are almost 0, others 1."""
    (q, k, v, _), real = draw_by_head("none", length, batch, heads, mask, positive, seed)
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


@pytest.mark.parametrize("options", [{"normalize": True}, {"scale": 0.7, "normalize": True}, {"causal": True}], ids=str)
@pytest.mark.parametrize("mask", ["none", "holes", "left"])
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
