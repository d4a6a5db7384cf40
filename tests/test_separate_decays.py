"""The operator with decays of their own for past and future keys: every form against the formula; and row sums across
the segments of a text."""

import pytest
import torch
from test_linear_attention import CHUNK, FORMS, PACKED, assert_all_close, distance, draw, outputs_and_gradients
from torch import Tensor

from src.lion import linear_attention
from src.lion.linear_attention import attention_matrix, definition, segment_states

KINDS = [("head", "head"), ("token", "token"), ("head", "token"), ("token", "head")]


def draw_both(kinds, length: int, **options) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v and the decays of past and future keys in float64, and a mask."""
    inputs, mask = draw(kinds[0], length, **options)
    return [*inputs, draw(kinds[1], length, **{**options, "seed": 5})[0][3]], mask


def separate(function, **options):
    """The function with the decays as its last arguments."""
    return lambda q, k, v, past, future: function(q, k, v, past, log_decay_future=future, **options)


def test_the_definition_equals_the_formula_in_loops():
    (q, k, v, past, future), mask = draw_both(("token", "token"), 5, mask="holes", seed=3)
    expected = torch.zeros_like(v)
    for b in range(2):
        for h in range(3):
            for i in range(5):
                for j in range(5):
                    weight = float(mask[b, j])
                    for t in range(j, i):
                        weight *= past[b, h, t].exp()
                    for t in range(i + 1, j + 1):
                        weight *= future[b, h, t].exp()
                    expected[b, h, i] += 0.3 * (q[b, h, i] @ k[b, h, j]) * weight * v[b, h, j]
    y = definition(q, k, v, past, log_decay_future=future, mask=mask, scale=0.3)
    torch.testing.assert_close(y, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("mask", ["none", "holes", "left"])
@pytest.mark.parametrize("length", [1, 2, 16, 33, 70])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_outputs_and_gradients_of_the_definition(form, kinds, length, mask, normalize):
    inputs, real = draw_both(kinds, length, mask=mask, positive=normalize)
    options = {"mask": real, "normalize": normalize}
    actual = outputs_and_gradients(separate(linear_attention, form=form, chunk_size=CHUNK, **options), inputs)
    assert_all_close(actual, outputs_and_gradients(separate(definition, **options), inputs))


@pytest.mark.parametrize("kind", ["head", "token"])
@pytest.mark.parametrize("form", FORMS)
def test_equal_decays_in_both_directions_are_shared_decays(form, kind):
    (q, k, v, log_decay), mask = draw(kind, 70, mask="holes")
    options = {"mask": mask, "form": form, "chunk_size": CHUNK}
    both = linear_attention(q, k, v, log_decay, log_decay_future=log_decay, **options)
    torch.testing.assert_close(both, linear_attention(q, k, v, log_decay, **options), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_training_precisions_are_accurate(form, dtype, tolerance):
    inputs, mask = draw_both(("token", "token"), 133, mask="holes")
    low = [x.to(dtype) if number < 3 else x.float() for number, x in enumerate(inputs)]
    y = separate(linear_attention, mask=mask, form=form, chunk_size=CHUNK)(*low)
    exact = separate(definition, mask=mask)(*(x.double() for x in low))
    assert y.dtype == dtype and distance(y, exact) < tolerance


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("form", FORMS)
def test_packed_sequences_give_the_outputs_of_each_alone(form, kinds):
    (q, k, v, *decays), _ = draw_both(kinds, sum(PACKED))
    seq_idx = torch.repeat_interleave(torch.arange(len(PACKED)), torch.tensor(PACKED)).expand(2, -1)
    options = {"form": form, "chunk_size": CHUNK}
    packed = separate(linear_attention, seq_idx=seq_idx, **options)(q, k, v, *decays)
    parts, start = [], 0
    for length in PACKED:
        part = slice(start, start + length)
        own = [x if x.ndim == 1 else x[:, :, part] for x in decays]
        parts.append(separate(linear_attention, **options)(*(x[:, :, part] for x in (q, k, v)), *own))
        start += length
    torch.testing.assert_close(packed, torch.cat(parts, 2), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kinds", [("none", None), ("token", None), ("head", "head"), ("token", "token")], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_segments_give_the_outputs_of_one_call(form, kinds, normalize):
    (q, k, v, past), mask = draw(kinds[0], 70, mask="holes", positive=normalize)
    future = None if kinds[1] is None else draw(kinds[1], 70, seed=5)[0][3]

    def of(x: Tensor | None, part: slice) -> Tensor | None:
        return x if x is None or x.ndim == 1 else x[:, :, part] if x.ndim == 3 else x[:, part]

    parts = [slice(0, 1), slice(1, 30), slice(30, 47), slice(47, 70)]
    arguments = [
        {"log_decay_future": of(future, part), "mask": mask[:, part], "normalize": normalize} for part in parts
    ]
    own = [[x[:, :, part] for x in (q, k, v)] for part in parts]
    states = [segment_states(*x[1:], of(past, part), **given) for x, part, given in zip(own, parts, arguments)]
    lefts = [torch.zeros_like(states[0].rightward)]
    for state in states[:-1]:
        lefts.append(lefts[-1] * state.across + state.rightward)
    right, outputs = torch.zeros_like(lefts[0]), []
    for x, part, given, left, state in reversed(list(zip(own, parts, arguments, lefts, states))):
        given = {**given, "left_state": left, "right_state": right, "form": form, "chunk_size": CHUNK}
        outputs.insert(0, linear_attention(*x, of(past, part), **given))
        right = right * state.across_leftward + state.leftward
    expected = linear_attention(q, k, v, past, log_decay_future=future, mask=mask, normalize=normalize)
    torch.testing.assert_close(torch.cat(outputs, 2), expected, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("normalize", [False, True])
def test_the_attention_matrix_times_the_values_is_the_output(normalize):
    (q, k, v, past, future), mask = draw_both(("token", "head"), 33, mask="holes", positive=True)
    options = {"log_decay_future": future, "mask": mask, "normalize": normalize}
    y = attention_matrix(q, k, past, **options) @ v
    torch.testing.assert_close(y, linear_attention(q, k, v, past, **options), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"causal": True}, r"log_decay_future.*causal"),
        ({"log_decay": None}, r"log_decay_future needs log_decay"),
        ({"log_decay_future": torch.zeros(4)}, r"log_decay_future.*\(3,\)"),
    ],
)
def test_invalid_arguments_are_named(changes, message):
    (q, k, v, past, future), _ = draw_both(("head", "head"), 7)
    with pytest.raises(ValueError, match=message):
        linear_attention(q, k, v, **{"log_decay": past, "log_decay_future": future, **changes})
