"""Hydra: the block against its formulas token by token and against published values; padding, packing and segments."""

import math

import pytest
import torch
from conftest import PARITY, needs_reference
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from src.lion import LionConfig, LionForMaskedLM, LionModel
from src.lion.cpu import depthwise_conv, gated_norm
from src.lion.mixers import Hydra

D, N, P = 16, 4, 8  # hidden size, size of queries and keys, of a head's values
FORMS = ("full", "recurrent", "chunkwise")


def build(kind: type = Hydra, **changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": D, "headdim": P, "d_state": N, "num_hidden_layers": 2, "vocab_size": 64, "chunk_size": 8}
    model = kind(LionConfig(mixer="hydra", initializer_range=0.3, hidden_dropout_prob=0.0, **{**sizes, **changes}))
    if kind is Hydra:
        with torch.no_grad():
            model.init_parameters()
            for parameter in (model.dt_bias, model.A_log, model.D, model.norm.weight):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def block(part: Hydra, u: Tensor) -> Tensor:
    """The formulas of the paper for one text u, (L, D), token by token."""
    H, I = len(part.D), P * len(part.D)  # noqa: E741
    length, W = len(u), part.conv.weight.shape[-1]
    z, xBC, dt = (u @ part.in_proj.weight.mT).split([I, I + 4 * N, 2 * H], -1)
    convolved = []
    for t in range(length):
        total = part.conv.bias
        for tap in range(W):
            if 0 <= (source := t + tap - (W - 1) // 2) < length:
                total = total + part.conv.weight[:, 0, tap] * xBC[source]
        convolved.append(total / (1 + torch.exp(-total)))
    x, B, C, B2, C2 = torch.stack(convolved).split([I, N, N, N, N], -1)
    heads = x.unflatten(-1, (H, P))
    steps = [torch.log1p(torch.exp(half + part.dt_bias)) for half in dt.chunk(2, -1)]  # (L, H) each
    decays = [torch.exp(-torch.exp(part.A_log) * step) for step in steps]
    y = (x @ part.fc_D.weight.mT + part.D)[..., None] * heads
    for order, keys, queries, step, decay in (
        (range(length), B, C, steps[0], decays[0]),
        (range(length - 1, -1, -1), B2, C2, steps[1], decays[1]),
    ):
        state = torch.zeros(H, N, P, dtype=u.dtype)
        read = torch.zeros(H, P, dtype=u.dtype)  # what the previous token's query read from its state
        for t in order:
            y = y + F.pad(read[None], (0, 0, 0, 0, t, length - 1 - t))
            state = decay[t][:, None, None] * state + step[t][:, None, None] * keys[t][:, None] * heads[t][:, None]
            read = torch.einsum("n,hnp->hp", queries[t], state)
    y = y.flatten(-2)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * part.norm.weight * z / (1 + torch.exp(-z))
    return y @ part.out.weight.mT


@pytest.mark.parametrize("length", [1, 2, 5, 19])
@pytest.mark.parametrize("form", FORMS)
def test_a_block_equals_its_formulas(form, length):
    part = build().double()
    u = torch.randn(2, length, D, dtype=torch.float64, requires_grad=True)
    probe = torch.randn(2, length, D, dtype=torch.float64)
    results = []
    for run in (
        lambda: part.project_out(part(u, None, None, form)[0]),
        lambda: torch.stack([block(part, x) for x in u]),
    ):
        y = run()
        results.append([y, *torch.autograd.grad((y * probe).sum(), [u, *part.parameters()], materialize_grads=True)])
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)


@needs_reference
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_block_gives_the_published_outputs_and_gradients(form, dtype):
    values = load_file(PARITY / "hydra/hydra-block.safetensors")
    part = Hydra(LionConfig(mixer="hydra", hidden_size=32, headdim=16, d_state=8, chunk_size=16))
    theirs = {"conv.weight": "conv1d.weight", "conv.bias": "conv1d.bias", "out.weight": "out_proj.weight"}
    part.load_state_dict({name: values[f"mixer.{theirs.get(name, name)}"] for name in part.state_dict()})
    part.to(dtype)
    u = values["in.u"].to(dtype).requires_grad_()
    y = part.project_out(part(u, None, None, form)[0])
    (y * values["in.output_weight"]).sum().backward()
    actual = {"out.y": y, "grad.u": u.grad}
    actual |= {f"grad.{theirs.get(name, name)}": parameter.grad for name, parameter in part.named_parameters()}
    for name, x in actual.items():
        assert (x.double() - values[name]).norm() <= 1e-5 * values[name].double().norm(), name


@pytest.mark.parametrize("pads", [0, 1, 7, 100])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("form", FORMS)
def test_padding_changes_no_logit(form, side, pads):
    model = build(LionForMaskedLM)
    ids = torch.randint(1, 64, (2, 13))
    ends = (pads, 0) if side == "left" else (0, pads)
    mask = F.pad(torch.ones(2, 13, dtype=torch.long), ends)
    with torch.no_grad():
        alone = model(ids, attention_form=form).logits
        padded = model(F.pad(ids, ends, value=5), attention_mask=mask, attention_form=form).logits
    torch.testing.assert_close(padded[:, mask[0].bool()], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)  # which convolve by different code
@pytest.mark.parametrize("form", FORMS)
def test_packed_sequences_give_the_outputs_and_gradients_of_each_alone(form, dtype):
    model = build(LionModel).to(dtype)
    lengths = (1, 2, 9, 1, 3, 14)
    ids = torch.randint(1, 64, (2, sum(lengths)))
    seq_idx = torch.repeat_interleave(torch.arange(6) % 2, torch.tensor(lengths)).expand(2, -1)  # only changes count
    packed = model(ids, seq_idx=seq_idx, attention_form=form).last_hidden_state
    alone = torch.cat([model(part, attention_form=form).last_hidden_state for part in ids.split(lengths, 1)], 1)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(packed, alone, atol=tolerance, rtol=tolerance)
    leaves = list(model.layers.parameters())
    gradients = (torch.autograd.grad(y.cos().sum(), leaves) for y in (packed, alone))
    for x, y in zip(*gradients):
        torch.testing.assert_close(x, y, atol=100 * tolerance, rtol=100 * tolerance)


@pytest.mark.parametrize("segment_length", [1, 3, 16, 40])
@pytest.mark.parametrize("padded", [False, True])
def test_segments_shorter_and_longer_than_the_halo_give_the_output_of_one_call(segment_length, padded):
    model = build(LionModel)
    ids, mask = torch.randint(1, 64, (2, 37)), None
    if padded:
        mask = torch.arange(37) < torch.tensor([[37], [22]])
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).last_hidden_state
        actual = model.encode_long(ids, mask, segment_length=segment_length)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    torch.testing.assert_close(actual[real], expected[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["full", "chunkwise"])
def test_under_autocast_steps_decays_and_states_are_float32(form):
    model, ids = build(LionModel), torch.randint(1, 64, (2, 200))
    with torch.no_grad():
        exact = model.double()(ids).last_hidden_state
        model.float()
        with torch.autocast("cpu", torch.bfloat16):
            actual = model(ids, attention_form=form).last_hidden_state
    assert (actual.double() - exact).norm() < 0.03 * exact.norm()


# The parts that are faster on a CPU


@pytest.mark.parametrize("width", [1, 3, 7])
@pytest.mark.parametrize("length", [1, 2, 33])
def test_a_convolution_over_tokens_is_conv1d(width, length):
    x, weight, bias = (torch.randn(*shape).requires_grad_() for shape in ((2, length, 12), (12, 1, width), (12,)))
    expected = F.conv1d(x.mT, weight, bias, padding=width // 2, groups=12).mT
    leaves = x, weight, bias
    expected_gradients = torch.autograd.grad(expected.sin().sum(), leaves)
    torch.compiler.reset()
    for convolve in (depthwise_conv, torch.compile(depthwise_conv, backend="aot_eager", fullgraph=True)):
        actual = convolve(*leaves)
        torch.testing.assert_close(actual, expected)
        for a, b in zip(torch.autograd.grad(actual.sin().sum(), leaves), expected_gradients):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_compiled_convolution_is_the_same_on_packed_rows_and_without_a_bias():
    x, weight, seq_idx = (
        torch.randn(2, 33, 12),
        torch.randn(12, 1, 5),
        torch.tensor([0] * 7 + [1] + [2] * 25).repeat(2, 1),
    )
    torch.compiler.reset()
    compiled = torch.compile(depthwise_conv, backend="aot_eager", fullgraph=True)
    for rest in ((None,), (None, seq_idx), (torch.randn(12), seq_idx)):
        torch.testing.assert_close(compiled(x, weight, *rest), depthwise_conv(x, weight, *rest))


def test_a_convolution_elsewhere_has_the_layout_of_its_input():
    x, weight, bias = (torch.empty(*shape, device="meta") for shape in ((2, 33, 12), (12, 1, 7), (12,)))
    y = depthwise_conv(x, weight, bias)
    assert y.shape == x.shape and y.is_contiguous()  # else the GPU kernels would copy its parts


def test_a_gated_norm_is_a_norm_times_silu():
    norm = torch.nn.RMSNorm(24, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    y, z = (torch.randn(3, 150, 24).requires_grad_() for _ in range(2))
    actual, expected = gated_norm(norm, y, z), norm(y) * F.silu(z)
    torch.testing.assert_close(actual, expected)
    with torch.no_grad():
        for form in (y.clone(), y.clone().mT.contiguous().mT):
            torch.testing.assert_close(gated_norm(norm, form, z), expected)
    leaves = (y, z, norm.weight)
    gradients = (torch.autograd.grad(x.sin().sum(), leaves) for x in (actual, expected))
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    seen = []
    norm.register_forward_hook(lambda *given: seen.append(given[-1]))
    torch.testing.assert_close(gated_norm(norm, y, z), expected)
    assert len(seen) == 1


def test_a_weight_on_another_device_is_an_error():
    """As accelerate leaves it between calls; torch would return memory that nothing was written to."""
    x, weight = torch.randn(1, 5, 4), torch.empty(4, 1, 3, device="meta")
    with pytest.raises(ValueError, match="weight is on meta and its input on cpu"):
        depthwise_conv(x, weight, None)
    norm = torch.nn.RMSNorm(4, eps=1e-5)
    forward = norm.forward
    norm.forward = lambda y: 2 * forward(y)
    torch.testing.assert_close(gated_norm(norm, x, x), 2 * forward(x) * F.silu(x))


def test_a_traced_gated_norm_takes_other_numbers_of_tokens():
    norm, z = torch.nn.RMSNorm(24, eps=1e-5).requires_grad_(False), torch.randn(2, 300, 24)
    with torch.no_grad():
        traced = torch.jit.trace(lambda y: gated_norm(norm, y, y), z[:1, :10])
        torch.testing.assert_close(traced(z), norm(z) * F.silu(z))


# The configuration


def test_heads_follow_from_the_sizes_and_what_hydra_has_not_is_refused():
    config = LionConfig(mixer="hydra", hidden_size=1024)
    assert (config.num_attention_heads, config.intermediate_size, config.attention_probs_dropout_prob) == (32, None, 0)
    assert LionConfig(**{**config.to_dict(), "headdim": 64}).num_attention_heads == 32
    for name, value in {
        "num_attention_heads": 16,
        "intermediate_size": 64,
        "attention_probs_dropout_prob": 0.1,
    }.items():
        with pytest.raises(ValueError, match=f"hydra has {name}=.*got {value}"):
            LionConfig(mixer="hydra", **{name: value})
    with pytest.raises(ValueError, match=r"d_conv must be odd \(got 4\)"):
        LionConfig(mixer="hydra", d_conv=4)
    with pytest.raises(ValueError, match=r"2048 is not divisible by headdim=48"):
        LionConfig(mixer="hydra", hidden_size=1024, headdim=48)


def test_layers_start_with_steps_between_a_thousandth_and_a_tenth():
    steps = torch.cat([F.softplus(layer.attention.dt_bias) for layer in build(LionModel, hidden_size=512).layers])
    assert math.isclose(steps.min(), 0.001, rel_tol=0.5) and math.isclose(steps.max(), 0.1, rel_tol=0.3)
