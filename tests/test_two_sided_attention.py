"""The core of two triangles: every form against its definition, the definition against loops, and the models that it
covers against their recurrences."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from src.lion import Triangle, linear_attention, two_sided_attention
from src.lion.linear_attention import definition as lion_definition
from src.lion.linear_attention_forms import BLOCK_ENTRIES, cumulative_log_decay
from src.lion.two_sided_attention import definition, report_fallback, two_sided_segment_states
from tests.test_linear_attention import CHUNK, FORMS, LENGTHS, MASKS, distance, draw_mask

D, E = 4, 6
# How the sums of queries and keys, past and future, begin and end; and which tokens' queries are read.
STRUCTURES = ("hydra", "scans", "lion", "past", "future")


def draw(
    structure: str, length: int, batch: int = 2, heads: int = 6, groups: int = 1, mask: str = "none", seed: int = 0
):
    """v, then q, k, log decays and log weights of both directions, and a diagonal, in float64; and a mask."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = [randn(batch, heads, length, E)]
    for _ in range(2):
        tensors += [randn(batch, groups, length, D), randn(batch, groups, length, D)]
        tensors += [F.logsigmoid(randn(batch, heads, length)), F.logsigmoid(2 * randn(batch, heads, length))]
    return [*tensors, randn(batch, heads, length)], draw_mask(mask, batch, length, generator)


def shifted(x: Tensor, places: int) -> Tensor:
    """x, (B, H, L, ·), moved to the right or left, with zeros at the end."""
    return F.pad(x, (0, 0, max(places, 0), max(-places, 0)))[:, :, max(-places, 0) :][:, :, : x.shape[2]]


def triangles(structure: str, q, k, a, w, q2, k2, a2, w2) -> tuple[Triangle | None, Triangle | None]:
    length = q.shape[2]
    (before, upto), (before2, upto2) = cumulative_log_decay(a, length), cumulative_log_decay(a2, length)
    if structure == "hydra":
        return Triangle(shifted(q, 1), k, before, upto, w), Triangle(shifted(q2, -1), k2, upto2, before2, w2)
    if structure == "scans":
        return Triangle(q, k, upto, upto, w), Triangle(q2, k2, before2, before2, w2)
    if structure == "lion":
        return Triangle(q, k, before, before), Triangle(q, k, upto, upto)
    one = Triangle(q, k, before, upto, w)
    other = Triangle(q2, k2, upto2, before2, w2)
    return (one, None) if structure == "past" else (None, other)


def run(function, structure: str, tensors: list[Tensor], **options) -> Tensor:
    v, *sides, diagonal = tensors
    return function(v, *triangles(structure, *sides), diagonal, **options)


def outputs_and_gradients(function, structure, tensors, **options) -> list[Tensor]:
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    y = run(function, structure, tensors, **options)
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)
    return [y.detach(), *torch.autograd.grad((y * probe).sum(), tensors, allow_unused=True, materialize_grads=True)]


@functools.cache
def reference(structure, *arguments) -> list[Tensor]:
    tensors, mask = draw(structure, *arguments)
    return outputs_and_gradients(definition, structure, tensors, mask=mask)


def assert_equal(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-9) -> None:
    for number, (x, y) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(x, y, atol=tolerance, rtol=tolerance, msg=lambda m, n=number: f"{n}: {m}")


# The formula


def test_the_definition_equals_the_formula_in_loops():
    (v, q, k, a, w, q2, k2, a2, w2, diagonal), mask = draw("hydra", 6, mask="holes", groups=2, heads=4)
    past, future = triangles("hydra", q, k, a, w, q2, k2, a2, w2)
    expected = torch.zeros_like(v)
    for b in range(2):
        for h in range(4):
            for i in range(6):
                expected[b, h, i] = diagonal[b, h, i] * mask[b, i] * v[b, h, i]
                for j in range(6):
                    if i == j or not mask[b, j]:
                        continue
                    if j < i:  # the neighbour's query; the decays of the tokens strictly between
                        score, between, weight = q[b, h // 2, i - 1] @ k[b, h // 2, j], a[b, h, j + 1 : i], w[b, h, j]
                    else:
                        score, between, weight = (
                            q2[b, h // 2, i + 1] @ k2[b, h // 2, j],
                            a2[b, h, i + 1 : j],
                            w2[b, h, j],
                        )
                    expected[b, h, i] += 0.3 * score * (between.sum() + weight).exp() * v[b, h, j]
    actual = definition(v, past, future, diagonal, mask=mask, scale=0.3)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(two_sided_attention(v, past, future, diagonal, mask=mask, scale=0.3), expected)


# Every form against the definition, in float64


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_outputs_and_gradients_of_the_definition(form, structure, length, mask):
    arguments = structure, length, 2, 6, 1, mask
    tensors, real = draw(*arguments)
    actual = outputs_and_gradients(two_sided_attention, structure, tensors, mask=real, form=form, chunk_size=CHUNK)
    assert_equal(actual, reference(*arguments))


@pytest.mark.parametrize("batch, heads, groups", [(1, 6, 6), (2, 1, 1), (1, 6, 3)])
@pytest.mark.parametrize("length", [1, 33])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("form", FORMS)
def test_heads_may_share_queries_and_keys(form, structure, length, batch, heads, groups):
    arguments = structure, length, batch, heads, groups, "holes"
    tensors, real = draw(*arguments)
    actual = outputs_and_gradients(two_sided_attention, structure, tensors, mask=real, form=form, chunk_size=CHUNK)
    assert_equal(actual, reference(*arguments))


@pytest.mark.parametrize("length, chunk_size", [(64, 64), (200, 64), (128, 128)])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("form", ["full", "chunkwise"])
def test_chunks_in_tiles_have_the_outputs_and_gradients_of_the_definition(form, structure, length, chunk_size):
    arguments = structure, length, 1, 3, 1, "holes"
    tensors, real = draw(*arguments)
    actual = outputs_and_gradients(two_sided_attention, structure, tensors, mask=real, form=form, chunk_size=chunk_size)
    assert_equal(actual, reference(*arguments))


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 32, 33, 34, 1000])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_chunk_size_changes_nothing(structure, chunk_size):
    tensors, _ = draw(structure, 33)
    actual = outputs_and_gradients(two_sided_attention, structure, tensors, form="chunkwise", chunk_size=chunk_size)
    assert_equal(actual, reference(structure, 33, 2, 6, 1, "none"))


@pytest.mark.parametrize("entries", [1, 4 * 6 * 5 * 5, 2**18])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_number_of_chunks_per_block_changes_nothing(structure, entries, monkeypatch):
    monkeypatch.setitem(BLOCK_ENTRIES, "cpu", entries)
    tensors, _ = draw(structure, 33)
    actual = outputs_and_gradients(two_sided_attention, structure, tensors, form="chunkwise", chunk_size=5)
    assert_equal(actual, reference(structure, 33, 2, 6, 1, "none"))


@pytest.mark.parametrize("batch, groups", [(2, 1), (1, 2)])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "auto"])  # which is one of the others
def test_gradients_agree_with_finite_differences(form, structure, batch, groups):
    tensors, mask = draw(structure, 5, batch, 2, groups, "holes")
    tensors = [x[..., : x.shape[-1] // 2] if x.ndim == 4 else x for x in tensors]  # fewer, thus fewer differences
    function = functools.partial(run, two_sided_attention, structure, mask=mask, form=form, chunk_size=2)
    inputs = [x.requires_grad_() for x in tensors]
    assert torch.autograd.gradcheck(lambda *x: function(list(x)), inputs, fast_mode=True)  # in a random direction


def test_only_inputs_that_require_a_gradient_get_one():
    for form in FORMS:
        tensors, _ = draw("hydra", 20)
        tensors[1].requires_grad_()
        run(two_sided_attention, "hydra", tensors, form=form, chunk_size=CHUNK).sum().backward()
        assert [x.grad is not None for x in tensors] == [number == 1 for number in range(len(tensors))]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("form", FORMS)
def test_transposed_views_give_the_results_of_contiguous_inputs(form, structure):
    tensors, _ = draw(structure, 33)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    results = (
        outputs_and_gradients(two_sided_attention, structure, x, form=form, chunk_size=CHUNK) for x in (tensors, views)
    )
    assert_equal(*results)


# LION and causal calls


@pytest.mark.parametrize("form", FORMS)
def test_lion_is_a_case_of_it(form):
    (v, q, k, a, *_), mask = draw("lion", 33, heads=6, groups=6, mask="holes")
    past, future = triangles("lion", q, k, a, None, None, None, a, None)
    diagonal = (q * k).sum(-1) * mask[:, None]
    actual = two_sided_attention(v, past, future, diagonal, mask=mask, scale=0.5, form=form, chunk_size=CHUNK)
    torch.testing.assert_close(
        actual, lion_definition(q, k, v, a, mask=mask, scale=0.5) + 0.5 * diagonal[..., None] * v
    )


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("groups", [1, 3, 6])
@pytest.mark.parametrize("decay", ["none", "head", "token"])
@pytest.mark.parametrize("form", FORMS)
def test_a_causal_call_reads_no_key_after_its_query(form, decay, groups, normalize):
    (v, q, k, a, *_), mask = draw("lion", 33, groups=groups, mask="left")
    q, k = q.abs(), k.abs()
    log_decay = {"none": None, "head": a[0, :, 0], "token": a}[decay]
    inputs = [None if x is None else x.clone().requires_grad_() for x in (q, k, v, log_decay)]
    options = {"mask": mask, "normalize": normalize, "causal": True}
    actual = linear_attention(*inputs, form=form, chunk_size=CHUNK, **options)
    wide = [x.repeat_interleave(6 // groups, 1) for x in inputs[:2]]
    expected = lion_definition(*wide, *inputs[2:], **options)
    leaves = [x for x in inputs if x is not None]
    gradients = (torch.autograd.grad((y * v.cos()).sum(), leaves) for y in (actual, expected))
    for x, y in zip((actual, *next(gradients)), (expected, *next(gradients)), strict=True):
        torch.testing.assert_close(x, y, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("causal", [False, True])
def test_groups_keep_their_own_decays_however_few_texts_a_block_holds(causal, monkeypatch):
    monkeypatch.setitem(BLOCK_ENTRIES, "cpu", 1)
    (v, q, k, a, *_), _ = draw("lion", 33, groups=3)
    wide = [x.repeat_interleave(2, 1) for x in (q, k)]
    expected = lion_definition(*wide, v, a[0, :, 0], causal=causal)
    actual = linear_attention(q, k, v, a[0, :, 0], causal=causal, form="chunkwise", chunk_size=CHUNK)
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("groups", [1, 6])
@pytest.mark.parametrize("form", FORMS)
def test_texts_with_the_same_decays_may_have_their_own_key_weights(form, groups, monkeypatch):
    monkeypatch.setitem(BLOCK_ENTRIES, "cpu", 1)  # one text per block
    tensors, _ = draw("hydra", 33, groups=groups)
    for number in (3, 7):
        tensors[number] = tensors[number][:1]
    expected = outputs_and_gradients(definition, "hydra", tensors)
    assert_equal(outputs_and_gradients(two_sided_attention, "hydra", tensors, form=form, chunk_size=CHUNK), expected)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_the_future_reaches_a_causal_call_not_even_infinity(form):
    (v, q, k, a, *_), _ = draw("lion", 33, groups=6)
    y = linear_attention(q, k, v, a, causal=True, form=form, chunk_size=CHUNK)
    k[:, :, 20:], v[:, :, 20:] = 1e300, -1e200
    assert torch.equal(linear_attention(q, k, v, a, causal=True, form=form, chunk_size=CHUNK)[:, :, :20], y[:, :, :20])


# Padding, packing, segments


@pytest.mark.parametrize("padding", [1, 15, 50])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("form", FORMS)
def test_padding_does_not_change_the_output(form, side, padding):
    tensors, _ = draw("scans", 20)
    ends = (padding, 0) if side == "left" else (0, padding)
    padded = [F.pad(x, (0, 0, *ends) if x.ndim == 4 else ends) for x in tensors]
    padded[3], padded[7] = (F.pad(x, ends, value=-0.7) for x in (tensors[3], tensors[7]))
    mask = F.pad(torch.ones(2, 20, dtype=torch.bool), ends)
    alone = run(two_sided_attention, "scans", tensors, form=form, chunk_size=CHUNK)
    actual = run(two_sided_attention, "scans", padded, mask=mask, form=form, chunk_size=CHUNK)
    torch.testing.assert_close(actual[:, :, mask[0]], alone, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("form", FORMS)
def test_packed_sequences_give_the_outputs_of_each_alone(form, structure, mask):
    tensors, real = draw(structure, 33, mask=mask)
    lengths = 1, 12, 3, 17
    seq_idx = torch.repeat_interleave(torch.tensor([5, 2, 9, 9 - 1]), torch.tensor(lengths)).expand(2, -1)
    packed = outputs_and_gradients(
        two_sided_attention, structure, tensors, mask=real, seq_idx=seq_idx, form=form, chunk_size=CHUNK
    )
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        own = [x[:, :, part] for x in tensors]
        alone = run(definition, structure, own, mask=None if real is None else real[:, part])
        torch.testing.assert_close(packed[0][:, :, part], alone, atol=1e-9, rtol=1e-9)
        start += length


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", FORMS)
def test_segments_give_the_outputs_of_one_call(form, mask):
    tensors, real = draw("hydra", 33, mask=mask)
    v, q, k, a, w, q2, k2, a2, w2, diagonal = tensors
    q, q2 = shifted(q, 1), shifted(q2, -1)  # across the segments too
    calls, states = [], []
    for part in (slice(0, 5), slice(5, 6), slice(6, 26), slice(26, 33)):
        length = part.stop - part.start
        cut = [x[:, :, part] for x in (v, q, k, a, w, q2, k2, a2, w2, diagonal)]
        (before, upto), (before2, upto2) = cumulative_log_decay(cut[3], length), cumulative_log_decay(cut[7], length)
        past = Triangle(cut[1], cut[2], before, upto, cut[4])
        future = Triangle(cut[5], cut[6], upto2, before2, cut[8])
        own = None if real is None else real[:, part]
        calls.append(((cut[0], past, future, cut[-1]), own))
        states.append(two_sided_segment_states(*calls[-1][0][:3], upto[..., -1:], upto2[..., -1:], mask=own))
    left, lefts = torch.zeros_like(states[0].rightward), []
    for state in states:
        lefts.append(left)
        left = left * state.across + state.rightward
    right, outputs = torch.zeros_like(left), []
    for (arguments, own), left, state in reversed(list(zip(calls, lefts, states))):
        options = {"mask": own, "left_state": left, "right_state": right, "form": form, "chunk_size": CHUNK}
        outputs.append(two_sided_attention(*arguments, **options))
        right = right * state.across_leftward + state.leftward
    expected = reference("hydra", 33, 2, 6, 1, mask)[0]
    torch.testing.assert_close(torch.cat(outputs[::-1], 2), expected, atol=1e-9, rtol=1e-9)


# Extreme decays and dtypes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("value", [-math.inf, -1e4, -100.0, -59.0])
@pytest.mark.parametrize("where", ["everywhere", "here and there", "at both ends", "one direction", "key weights"])
@pytest.mark.parametrize("structure", ["hydra", "scans"])
@pytest.mark.parametrize("form", FORMS)
def test_decays_and_weights_near_0_give_the_definitions_finite_numbers(form, structure, where, value, dtype):
    tensors, _ = draw(structure, 64)
    if where == "everywhere":
        tensors[3], tensors[7] = (torch.full_like(x, value) for x in (tensors[3], tensors[7]))
    elif where == "here and there":
        tensors[3][:, ::2, ::7] = tensors[7][:, 1::2, 1::5] = value
    elif where == "at both ends":
        for x in (tensors[3], tensors[7]):
            x[..., 0] = x[..., -1] = value
    elif where == "one direction":
        tensors[7][:] = value
    else:
        tensors[4][:, :, ::3] = tensors[8][:, :2] = value
    exact = [x.clamp(min=-60) if number in (3, 4, 7, 8) else x for number, x in enumerate(tensors)]
    expected = outputs_and_gradients(definition, structure, exact)
    options = {"form": form, "chunk_size": 64 if form == "auto" else CHUNK}
    actual = outputs_and_gradients(two_sided_attention, structure, [x.to(dtype) for x in tensors], **options)
    assert all(x.isfinite().all() for x in actual)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    assert_equal([x.double() for x in actual[:1]], expected[:1], tolerance)
    assert_equal([x.double() for x in (actual[1], actual[2], actual[6])], [expected[n] for n in (1, 2, 6)], tolerance)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("length", [7, 70])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("with_and_without_kernel")
def test_float32_is_accurate_to_five_digits(form, length, structure):
    tensors, mask = draw(structure, length, mask="holes")
    options = {"mask": mask, "form": form, "chunk_size": CHUNK}
    actual = outputs_and_gradients(two_sided_attention, structure, [x.float() for x in tensors], **options)
    for x, exact in zip(actual, reference(structure, length, 2, 6, 1, "holes"), strict=True):
        assert x.dtype == torch.float32
        assert not exact.any() or distance(x, exact) < 1e-5


@pytest.mark.parametrize("mean", [-0.002, -0.5, -20.0])
@pytest.mark.parametrize("form", ["full", "chunkwise"])
@pytest.mark.usefixtures("with_and_without_kernel")
def test_float32_is_accurate_to_five_digits_over_a_long_text(form, mean):
    tensors, _ = draw("hydra", 3000, 1, 2)
    for number, factor in ((3, 1.0), (7, 0.01)):  # one direction forgets, the other remembers
        tensors[number] = mean * factor * torch.rand_like(tensors[number]) * 2
    exact = run(two_sided_attention, "hydra", tensors, form="full")
    actual = run(two_sided_attention, "hydra", [x.float() for x in tensors], form=form)
    assert distance(actual, exact) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("with_and_without_kernel")
def test_half_precision_is_accurate_to_two_digits(form, structure, dtype):
    tensors, _ = draw(structure, 70)
    half = [x.to(dtype) if x.ndim == 4 else x.float() for x in tensors]  # decays, weights and diagonal are not
    half[-1] = half[-1].to(dtype)
    exact = run(definition, structure, [x.double() for x in half])
    actual = run(two_sided_attention, structure, half, form=form, chunk_size=CHUNK)
    assert actual.dtype == dtype
    assert distance(actual, exact) < 2e-2


@pytest.mark.parametrize("form", ["full", "recurrent", "chunkwise"])
@pytest.mark.parametrize("structure", ["hydra", "past"])
def test_a_compiled_operator_gives_the_same_numbers(form, structure):
    tensors, mask = draw(structure, 64, mask="holes")
    torch.compiler.reset()
    compiled = torch.compile(two_sided_attention, backend="aot_eager", fullgraph=True)
    actual = outputs_and_gradients(compiled, structure, tensors, mask=mask, form=form, chunk_size=CHUNK)
    assert_equal(actual, reference(structure, 64, 2, 6, 1, "holes"))


# What does not fit


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda v, past, future, diagonal: (v, None, None, diagonal), "past and future are both None"),
        (lambda v, past, future, diagonal: (v, past, future, diagonal[:, :1]), r"diagonal.*\(2, 6, 7\).*\(2, 1, 7\)"),
        (lambda v, past, future, diagonal: (v[:, :5], past, future, diagonal[:, :5]), r"past.query_sum.*\(1, 5, 7\)"),
        (lambda v, past, future, diagonal: (v[0], past, future, diagonal), r"v must be .*\(6, 7, 6\)"),
        (lambda v, past, future, d: (v, past, future._replace(k=past.k[..., :3]), d), r"future.k.*\(2, 1, 7, 4\)"),
        (lambda v, past, future, d: (v, past._replace(log_weight=d[..., :3]), future, d), r"past.log_weight"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_named(change, message):
    (v, *sides, diagonal), _ = draw("hydra", 7)
    with pytest.raises(ValueError, match=message):
        two_sided_attention(*change(v, *triangles("hydra", *sides), diagonal))


def test_heads_that_do_not_divide_and_states_that_nothing_reads_are_refused():
    (v, *sides, diagonal), _ = draw("hydra", 7, groups=4)
    with pytest.raises(ValueError, match="multiple of the 4 heads"):
        two_sided_attention(v, *triangles("hydra", *sides), diagonal)
    (v, *sides, diagonal), _ = draw("past", 7)
    with pytest.raises(ValueError, match="right_state has no triangle"):
        two_sided_attention(v, *triangles("past", *sides), diagonal, right_state=v.new_zeros(2, 6, D, E))
    with pytest.raises(ValueError, match=r"right_state.*causal"):
        linear_attention(sides[0], sides[1], v, causal=True, right_state=v.new_zeros(2, 6, D, E))


def test_a_gpu_is_told_once_what_its_kernels_do_not_cover(caplog):
    """And a CPU never, for which there are none."""
    report_fallback(torch.zeros(1), "a CPU")
    for _ in range(2):
        report_fallback(SimpleNamespace(is_cuda=True), "causal attention")
    assert [record.message.split(":")[0] for record in caplog.records] == ["causal attention"]
