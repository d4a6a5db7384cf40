"""The CPU's speed-ups: they compute what the plain model computes, and step aside for whatever replaces or inspects a
module."""

import copy
import math
import os
import pickle
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

from src.lion import cpu, cpu_kernel, cpu_linear, machine
from src.lion.configuration_lion import MIXERS, LionConfig
from src.lion.cpu import Dropout, dropout, linear, positive_map, split_linear
from src.lion.modeling_lion import LionForMaskedLM, LionLayer, LionModel, LionPreTrainedModel, MixerLayer
from tests.conftest import ROOT, settings_of

TINY = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}

# The feature map


@pytest.mark.parametrize("dtype, accuracy", [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_the_positive_map_is_a_shifted_and_normalized_silu(dtype, accuracy):
    x, probe = torch.randn(2, 5, 2, 3, 16, dtype=dtype), torch.randn(2, 5, 2, 3, 16, dtype=dtype)
    exact = x.double().requires_grad_()
    expected = F.normalize(F.silu(exact) + 0.5, dim=-1)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        actual = positive_map(x.requires_grad_())
        inferred = positive_map(x.detach())
    assert actual.dtype == dtype and (actual > 0).all() and torch.equal(actual, inferred)
    of_actual, of_expected = (
        torch.autograd.grad(y, given, probe.to(y.dtype))[0] for y, given in ((actual, x), (expected, exact))
    )
    for found, wanted in ((actual, expected), (of_actual, of_expected)):
        assert (found.double() - wanted).norm() < accuracy * wanted.norm()


# Linear layers


@pytest.fixture
def by_onednn(monkeypatch, two_threads):
    """The arguments of each product by oneDNN, on a machine where it is faster from 1,024 tokens on."""
    monkeypatch.setattr(machine, "_adopted", {"onednn_from": dict.fromkeys(cpu_linear.SHAPES, [[1024]] * 3)})
    calls, multiply = [], cpu_linear._multiply
    monkeypatch.setattr(cpu_linear, "_multiply", lambda *args: calls.append(args) or multiply(*args))
    return calls


@pytest.fixture(scope="module")
def two_threads():
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        pytest.skip("torch lacks MKL or oneDNN")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def layer(inputs: int = 768, outputs: int = 768, **options) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, **options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [701, 2304])
@pytest.mark.parametrize("shape", [(1024,), (1, 1025), (3, 401), (2, 2, 257)])
def test_onednn_computes_the_output_and_gradients_of_the_linear_layer(shape, outputs, bias, by_onednn):
    dense = layer(outputs=outputs, bias=bias)
    x = torch.randn(*shape, 768, requires_grad=True)
    grad = torch.randn(*shape, outputs)
    expected = F.linear(x, dense.weight, dense.bias)
    expected_grads = torch.autograd.grad(expected, [x, *dense.parameters()], grad)
    y = linear(dense, x)
    grads = torch.autograd.grad(y, [x, *dense.parameters()], grad)
    assert len(by_onednn) == 3
    assert y.is_contiguous() and y.shape == expected.shape
    for actual, wanted in zip((y, *grads), (expected, *expected_grads)):
        assert actual.stride() == wanted.stride()
        torch.testing.assert_close(actual, wanted, rtol=0, atol=5e-6 * wanted.abs().max().item())


@pytest.mark.parametrize("shape", [(1024,), (3, 401), (7,), (2, 1)])
def test_parts_of_a_layer_have_its_outputs_and_gradients(shape, by_onednn):
    sizes = 701, 800, 19
    dense, x = layer(outputs=sum(sizes), bias=False), torch.randn(*shape, 768, requires_grad=True)
    expected = F.linear(x, dense.weight).split(sizes, -1)
    grads = [torch.randn_like(part) for part in expected]
    expected_grads = torch.autograd.grad(expected, [x, dense.weight], grads)
    parts = split_linear(dense, x, sizes)
    assert len(by_onednn) == (2 if x[..., 0].numel() >= 1024 else 0)  # the large ones
    assert all(part.is_contiguous() for part in parts)
    actual = *parts, *torch.autograd.grad(parts, [x, dense.weight], grads)
    for one, wanted in zip(actual, (*expected, *expected_grads), strict=True):
        torch.testing.assert_close(one, wanted, rtol=0, atol=5e-6 * wanted.abs().max().item())


@pytest.mark.parametrize("tokens", [8, cpu_linear.FEW, cpu_linear.FEW + 1])
@pytest.mark.parametrize("faster", ["output", "input", "weight"])
def test_each_product_is_chosen_by_itself(faster, tokens, by_onednn, monkeypatch):
    changes = [[8] if name == faster else [] for name in ("output", "input", "weight")]
    monkeypatch.setattr(machine, "_adopted", {"onednn_from": {"wider": changes, "square": [[]] * 3}})
    for dense in (layer(outputs=1600), layer()):
        x, grad = torch.randn(tokens, 768, requires_grad=True), torch.randn(tokens, len(dense.weight))
        leaves = [x, *dense.parameters()]
        expected = torch.autograd.grad(dense(x), leaves, grad)
        for one, wanted in zip((y := linear(dense, x), *torch.autograd.grad(y, leaves, grad)), (dense(x), *expected)):
            assert one.stride() == wanted.stride()
            torch.testing.assert_close(one, wanted, rtol=0, atol=5e-6 * wanted.abs().max().item())
    few = tokens <= cpu_linear.FEW
    sizes = {"output": (1600, 768) if few else (tokens, 768), "input": (tokens, 1600), "weight": (1600, tokens)}
    assert [operand.shape for operand, *_ in by_onednn] == [sizes[faster]]


def test_gradients_have_gradients(by_onednn):
    dense, x = layer(), torch.randn(1024, 768, requires_grad=True)

    def second(run) -> tuple[torch.Tensor, ...]:
        (grad,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        assert len(by_onednn) <= 1  # the output
        return torch.autograd.grad(grad.square().sum(), [x, dense.weight])

    expected = second(dense)
    for one, wanted in zip(second(lambda x: linear(dense, x)), expected):
        torch.testing.assert_close(one, wanted, rtol=0, atol=5e-6 * wanted.abs().max().item())
    assert by_onednn


def test_functions_of_a_layer_are_transformed(by_onednn):
    dense, x = layer(), torch.randn(2, 1024, 768)
    grads = torch.func.vmap(torch.func.grad(lambda x: linear(dense, x).square().sum()))(x)
    torch.testing.assert_close(grads, torch.func.grad(lambda x: dense(x).square().sum())(x), rtol=0, atol=1e-4)
    _, tangent = torch.func.jvp(lambda x: linear(dense, x), (x,), (x,))
    torch.testing.assert_close(tangent, x @ dense.weight.T, rtol=0, atol=1e-5)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(linear(dense, forward_ad.make_dual(x, x)))
        torch.testing.assert_close(dual.tangent, x @ dense.weight.T, rtol=0, atol=1e-5)
    assert not by_onednn


def test_gradients_can_be_batched_and_counted(by_onednn):
    dense, x = layer(), torch.randn(1024, 768, requires_grad=True)
    grads = torch.randn(3, 1024, 768)
    leaves = [x, *dense.parameters()]
    expected = torch.autograd.grad(dense(x), leaves, grads, is_grads_batched=True)
    for one, wanted in zip(torch.autograd.grad(linear(dense, x), leaves, grads, is_grads_batched=True), expected):
        torch.testing.assert_close(one, wanted, rtol=0, atol=5e-6 * wanted.abs().max().item())
    y = linear(dense, x)
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 4 * 1024 * 768 * 768
    assert len(by_onednn) == 2  # the outputs


@pytest.mark.parametrize("tokens", [cpu_linear.FEW, 1024])
@pytest.mark.parametrize(
    "change",
    [
        lambda dense: setattr(dense, "bias", nn.Parameter(torch.randn(2 * 768)[::2])),
        lambda dense: setattr(dense, "bias", nn.Parameter(torch.randn(1))),
        lambda dense: setattr(dense, "bias", nn.Parameter(dense.bias.double())),
        lambda dense: setattr(dense, "weight", nn.Parameter(dense.weight.detach().to_sparse_csr())),
    ],
    ids=["with gaps", "one number", "float64", "sparse"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_unusual_parameters_are_left_to_torch(change, tokens, by_onednn, monkeypatch):
    monkeypatch.setattr(machine, "_adopted", {"onednn_from": dict.fromkeys(cpu_linear.SHAPES, [[8]] * 3)})
    dense, x = layer(), torch.randn(tokens, 768)
    change(dense)

    def result(run) -> torch.Tensor | str:
        try:
            return run()
        except RuntimeError as error:
            return str(error)

    expected, found = result(lambda: dense(x)), result(lambda: linear(dense, x))
    assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected
    assert not by_onednn


def test_tensors_without_memory_are_left_to_torch(by_onednn):
    dense = layer()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert linear(dense, torch.randn(1024, 768)).shape == (1024, 768)
    assert not by_onednn


def test_one_thread_suffices(by_onednn):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        dense, x = layer(), torch.randn(1024, 768)
        torch.testing.assert_close(linear(dense, x), dense(x), rtol=0, atol=1e-5)
    finally:
        torch.set_num_threads(threads)
    assert by_onednn


class _Head(LionPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.linear, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)
        self.post_init()


def test_a_head_of_ones_own_keeps_its_modules():
    head = _Head(LionConfig(num_hidden_layers=1, vocab_size=50))
    assert isinstance(head.linear, nn.Linear) and type(head) is _Head


def test_a_hooked_layer_is_called_for_its_parts():
    dense, calls = layer(32, 48, bias=False), []
    dense.register_forward_hook(lambda *_: calls.append(1))
    parts = split_linear(dense, x := torch.randn(5, 32), (16, 32))
    assert calls and all(torch.equal(*pair) for pair in zip(parts, F.linear(x, dense.weight).split((16, 32), -1)))


@pytest.mark.parametrize("tokens", [100, 2048])
def test_repeated_runs_give_the_same_bits(tokens, two_threads, monkeypatch):
    monkeypatch.setattr(machine, "_adopted", {"onednn_from": dict.fromkeys(cpu_linear.SHAPES, [[8]] * 3)})
    dense, x = layer(), torch.randn(tokens, 768, requires_grad=True)
    parameters = [x, *dense.parameters()]
    runs = [[y := linear(dense, x), *torch.autograd.grad(y.square().sum(), parameters)] for _ in range(3)]
    for run in runs[1:]:
        assert all(torch.equal(*pair) for pair in zip(run, runs[0]))


@pytest.mark.parametrize("shape", [(1024, 3, 768), (2, 768, 1024), (1024, 1, 1536)], ids=str)
def test_onednn_takes_no_operand_with_gaps(shape, by_onednn, monkeypatch):
    """It would not fail, but take hundreds of times as long."""
    by_torch, taken = torch.ops.mkldnn._linear_pointwise, []
    monkeypatch.setattr(
        torch.ops.mkldnn, "_linear_pointwise", lambda a, b, *others: taken.extend((a, b)) or by_torch(a, b, *others)
    )
    dense, x = layer(), torch.randn(shape).requires_grad_()
    part = x[:, 0, :768] if shape[1] != 768 else x.mT
    y = linear(dense, part)
    grads = torch.autograd.grad(y.sum(), [x, dense.weight])  # an expanded gradient
    assert len(taken) == 6 and all(operand.is_contiguous() or operand.T.is_contiguous() for operand in taken)
    expected = dense(part)
    for one, wanted in zip((y, *grads), (expected, *torch.autograd.grad(expected.sum(), [x, dense.weight]))):
        torch.testing.assert_close(one, wanted, rtol=0, atol=5e-6 * wanted.abs().max().item())


@pytest.mark.parametrize(
    "dense, x",
    [
        (layer(), torch.randn(1023, 768)),
        (layer(128, 128), torch.randn(2048, 128)),
        (layer(256, 256), torch.randn(1, 256)),
        (layer(dtype=torch.float64), torch.randn(1024, 768, dtype=torch.float64)),
        (layer(dtype=torch.bfloat16), torch.randn(1024, 768, dtype=torch.bfloat16)),
    ],
    ids=["few tokens", "small weights", "few products", "float64", "bfloat16"],
)
def test_small_or_unsupported_operands_use_the_layer(dense, x, by_onednn):
    assert torch.equal(linear(dense, x), dense(x))
    assert not by_onednn


def test_autocast_applies(by_onednn):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(layer(), torch.randn(1024, 768)).dtype == torch.bfloat16
    assert not by_onednn


@pytest.mark.filterwarnings("ignore:TF32")
def test_onednn_can_be_disabled(by_onednn):
    with torch.backends.mkldnn.flags(enabled=False):
        linear(layer(), torch.randn(1024, 768))
    assert not by_onednn


@pytest.mark.filterwarnings("ignore")  # of newer ways to say it
def test_torch_computes_all_if_reduced_precision_is_allowed(by_onednn):
    torch.set_float32_matmul_precision("medium")
    try:
        linear(layer(), torch.randn(1024, 768))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not by_onednn
    linear(layer(), torch.randn(1024, 768))
    assert by_onednn


def test_a_wrong_width_raises_the_linear_layers_error():
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        linear(layer(), torch.randn(1024, 700))


class _Adapted(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def test_a_replaced_layer_is_called(by_onednn):
    adapted = _Adapted(768, 768)
    wrapped = layer()
    wrapped.forward = lambda x: x + 1  # as accelerate does
    x = torch.randn(1024, 768)
    assert torch.equal(linear(adapted, x), adapted(x))
    assert torch.equal(linear(wrapped, x), x + 1)
    assert torch.equal(linear(nn.Identity(), x), x)
    assert not by_onednn


@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook"],
)  # fmt: skip
def test_hooks_run(register):
    dense, called = layer(), []
    getattr(dense, register)(lambda *_: called.append(register))
    linear(dense, torch.randn(1024, 768, requires_grad=True)).sum().backward()
    assert called == [register]


def test_hooks_of_all_modules_see_the_plain_model(by_onednn):
    torch.manual_seed(0)
    model, seen = LionModel(LionConfig(num_hidden_layers=1, vocab_size=50)).eval(), {}
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, y: seen.update({module: y}))
    try:
        with torch.no_grad():
            model(torch.randint(50, (1, 2049)))
    finally:
        handle.remove()
    layer = model.layers[0]
    assert seen[layer.attention.qkv].shape == (1, 2049, 3 * 768) and seen[layer.mlp_norm].shape == (1, 2049, 768)
    assert not by_onednn


def test_the_masked_lm_head_is_computed_too(by_onednn):
    torch.manual_seed(0)
    model = LionForMaskedLM(LionConfig(num_hidden_layers=1, vocab_size=1000)).eval()
    with torch.no_grad():
        model(torch.randint(1000, (1, 1024)))
    assert [operand.shape[0] for _, operand, *_ in by_onednn][-2:] == [768, 1000]


@pytest.mark.filterwarnings("ignore")  # of its deprecation
def test_a_base_models_linear_layers_can_be_quantized(by_onednn):
    torch.manual_seed(0)
    model = LionModel(LionConfig(num_hidden_layers=1, vocab_size=50)).eval()
    ids = torch.randint(50, (2, 2048))
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        assert len(by_onednn) == 1 + 2 * 3  # qkv; out and the MLP's two, 2,048 tokens at a time
        quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
        y = quantized(ids).last_hidden_state
    assert len(by_onednn) == 1 + 2 * 3
    assert not any(type(module) is nn.Linear for module in quantized.modules())
    assert F.cosine_similarity(y, expected, dim=-1).min() > 0.98


def test_torch_compile_sees_a_linear_layer(by_onednn):
    dense, x = layer(), torch.randn(1024, 768)
    compiled = torch.compile(lambda x: linear(dense, x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), dense(x))
    assert not by_onednn


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = layer()

    def forward(self, x):
        return linear(self.dense, x)


def test_an_exported_layer_accepts_every_length(by_onednn):
    model = _Layer()
    length = torch.export.Dim("length", min=2, max=4096)
    exported = torch.export.export(model, (torch.randn(1024, 768),), dynamic_shapes=({0: length},)).module()
    x = torch.randn(7, 768)
    torch.testing.assert_close(exported(x), model(x))
    assert not by_onednn


@torch.no_grad()
def test_a_traced_layer_accepts_every_length(by_onednn):
    dense = layer().requires_grad_(False)
    traced = torch.jit.trace(lambda x: linear(dense, x), torch.randn(1024, 768), check_trace=False)
    x = torch.randn(7, 768)
    assert torch.equal(traced(x), dense(x))
    assert not by_onednn


# A model


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_model_is_sped_up_and_so_are_its_copies(mixer):
    model = LionForMaskedLM(LionConfig(**settings_of(mixer, **TINY)))
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        layer = copied.lion.layers[0]
        kind = LionLayer if layer.attention.has_mlp else MixerLayer
        assert isinstance(layer, kind) and isinstance(layer, cpu._Layer) and type(layer).__name__ == kind.__name__
        assert isinstance(layer.attention, cpu._Mixer)
        assert {type(module) for module in copied.modules() if isinstance(module, nn.Dropout)} == {Dropout}
        assert {type(module) for module in copied.modules() if isinstance(module, nn.Linear)} == {nn.Linear}
    before = [type(module) for module in model.modules()]
    cpu.speed_up(model)  # once is enough
    assert [type(module) for module in model.modules()] == before


# What replaces or inspects a module of a model


class Shifted(nn.Module):
    """A module of a user's, around one of the model's."""

    def __init__(self, own: nn.Module):
        super().__init__()
        self.own, self.weight, self.bias = own, own.weight, own.bias if hasattr(own, "bias") else None
        self.shift = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.own(x) + self.shift


class Centred(Shifted):
    """One that sees a text as a whole."""

    def forward(self, x):
        assert x.ndim == 3
        return self.own(x) - x.mean(-2, keepdim=True)[..., :1]


CONVOLVED = {
    "hydra": settings_of("hydra", **TINY),
    "lion-s": {**TINY, "mixer": "lion-s", "short_conv": 3, "value_gate": True},
}


def outputs(model: LionModel, packed: bool = False) -> list[torch.Tensor]:
    """Of two rows in inference, and with gradients; if packed, of two sequences each."""
    ids = torch.arange(36).view(2, 18) % 40
    seq_idx = torch.tensor([[0] * 7 + [1] * 11, [0] * 12 + [1] * 6]) if packed else None
    with torch.no_grad():
        inferred = model.eval()(ids, seq_idx=seq_idx).last_hidden_state
    return [inferred, model(ids, seq_idx=seq_idx).last_hidden_state]


@pytest.mark.parametrize("name", ["conv", "norm"])
@pytest.mark.parametrize("mixer", CONVOLVED)
def test_a_module_around_a_mixers_convolution_or_norm_is_called_and_trained(mixer, name):
    torch.manual_seed(0)
    model = LionModel(LionConfig(**CONVOLVED[mixer]), add_pooling_layer=False)
    attention = model.layers[0].attention
    own = getattr(attention, name)
    plain = outputs(model), outputs(model, packed=True)
    setattr(attention, name, wrapper := Shifted(own))
    nn.init.zeros_(wrapper.shift)
    for packed, expected in enumerate(plain):
        for found, wanted in zip(outputs(model, packed), expected):
            torch.testing.assert_close(found, wanted)
    nn.init.constant_(wrapper.shift, 0.5)
    inferred, y = outputs(model)
    torch.testing.assert_close(inferred, y)
    assert (y - plain[0][1]).abs().max() > 0.01
    (y * torch.randn(y.shape)).sum().backward()
    assert wrapper.shift.grad.abs() > 0.01


@pytest.mark.filterwarnings("ignore:`torch.nn.utils")  # of their newer forms
@pytest.mark.parametrize("mixer", CONVOLVED)
def test_a_mixers_convolution_may_be_hooked_or_reparametrized(mixer):
    torch.manual_seed(0)
    model = LionModel(LionConfig(**CONVOLVED[mixer]), add_pooling_layer=False)
    conv = model.layers[0].attention.conv
    before, seen = outputs(model), []
    hook = conv.register_forward_hook(lambda layer, inputs, y: seen.append((y, y.clone())))
    for found, expected in zip(outputs(model), before):
        torch.testing.assert_close(found, expected)
    assert len(seen) == 2 and all(torch.equal(kept, copied) for kept, copied in seen)
    hook.remove()
    prune.l1_unstructured(conv, "weight", amount=0.5)
    for _ in range(2):  # the second step computes the weight again
        y = outputs(model)[1]
        (y * torch.randn(y.shape)).sum().backward()
    torch.testing.assert_close(*outputs(model))
    with torch.no_grad():
        conv.weight_orig.mul_(2)
    torch.testing.assert_close(*outputs(model))
    assert (outputs(model)[0] - y).abs().max() > 1e-3 and conv.weight_orig.grad.abs().max() > 0.01


@pytest.mark.parametrize("mixer", CONVOLVED)
def test_a_convolution_whose_weight_is_computed_compiles_with_packed_rows(mixer):
    torch.manual_seed(0)
    model = LionModel(LionConfig(**CONVOLVED[mixer]), add_pooling_layer=False).eval()
    nn.utils.parametrizations.weight_norm(model.layers[0].attention.conv)
    ids, seq_idx = torch.arange(36).view(2, 18) % 40, torch.tensor([[0] * 7 + [1] * 11, [0] * 12 + [1] * 6])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids, seq_idx=seq_idx)[0], model(ids, seq_idx=seq_idx)[0])


@pytest.mark.parametrize("replace", ["module", "forward"])
@pytest.mark.parametrize("name", ["attention.out", "attention_norm", "mlp_out", "mlp_norm"])
def test_modules_of_others_see_whole_texts(name, replace, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(cpu, "SLICE", 8)
    model = LionModel(LionConfig(**TINY), add_pooling_layer=False)
    owner, _, last = f"layers.0.{name}".rpartition(".")
    own = model.get_submodule(f"{owner}.{last}")
    if replace == "module":
        setattr(model.get_submodule(owner), last, Centred(own))
    else:
        forward = own.forward
        own.forward = lambda x: forward(x) - x.mean(-2, keepdim=True)[..., :1]
    torch.testing.assert_close(*outputs(model))


# A process

PROGRAM = """
import ctypes, resource, runpy

machine = runpy.run_path("src/lion/machine.py")  # without what the package imports
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
size = 2**26

def blocks_from_the_system():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        block = libc.malloc(size)
        ctypes.memset(block, 1, size)
        libc.free(block)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / size

print(blocks_from_the_system())
machine["keep_freed_memory"]()
print(blocks_from_the_system())
machine["return_freed_memory"]()
print(blocks_from_the_system())
"""


def blocks_from_the_system(**environment: str) -> list[float]:
    """How many of ten 64 MiB blocks, allocated one after the other, come from the system: before memory is kept, while
    it is, and after."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**own, **environment}, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [float(count) for count in done.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this C library is not glibc")
def test_freed_memory_is_reused_unless_the_environment_has_its_own_settings():
    before, kept, after = blocks_from_the_system()
    if before < 5:
        pytest.skip("this system's pages are too large to count")
    assert kept < 1.5 and after == pytest.approx(before, rel=0.1)
    before, kept, after = blocks_from_the_system(MALLOC_ARENA_MAX="4")
    assert kept == pytest.approx(before, rel=0.1) and after == pytest.approx(before, rel=0.1)


def test_other_c_libraries_are_left_alone(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    asked = []
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: asked.append(name) or object())
    machine.keep_freed_memory()
    assert asked


# Dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3,), (7, 13), (4, 5, 6)])
def test_dropout_scales_kept_entries_and_zeroes_the_others(shape, dtype):
    x = torch.rand(shape, dtype=dtype).add(1).requires_grad_()
    y = dropout(x, 0.25)
    y.sum().backward()
    assert y.dtype == dtype and y.shape == x.shape
    kept = y != 0
    torch.testing.assert_close(y[kept], x[kept] / 0.75)
    torch.testing.assert_close(x.grad, kept.to(dtype) / 0.75)


def test_entries_are_dropped_independently():
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


def test_dropout_takes_a_transposed_operand():
    x = torch.rand(6, 4, 10).transpose(0, 2).requires_grad_()
    torch.manual_seed(1)
    y = dropout(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(y, dropout(x.detach().contiguous(), 0.5))


def test_dropout_depends_on_the_seed():
    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return dropout(torch.ones(1000), 0.5)

    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0), drawn(1))


def test_four_entries_share_a_draw_of_64_bits(monkeypatch):
    monkeypatch.setattr(cpu_kernel, "USE_NATIVE", False)
    torch.manual_seed(0)
    y = dropout(torch.ones(11), 0.5)
    torch.manual_seed(0)
    draws = torch.empty(3, dtype=torch.int64).random_(-(2**63), None)
    bits = torch.stack([draws >> 16 * place & 0xFFFF for place in range(4)], -1).flatten()[:11]
    assert torch.equal(y != 0, bits < 2**15)  # as signed numbers, not below 0


def test_dropout_has_all_kinds_of_derivatives():
    x = torch.rand(50, dtype=torch.float64, requires_grad=True)

    def dropped(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return dropout(x**3, 0.5)

    assert torch.autograd.gradcheck(dropped, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(dropped, x)
    _, back = torch.func.vjp(dropped, x.detach())
    torch.testing.assert_close(back(torch.ones(50, dtype=torch.float64))[0] != 0, dropped(x) != 0)


@pytest.mark.parametrize(("p", "share"), [(0.0, 1.0), (1.0, 0.0), (1e-9, 1.0)])
def test_dropout_of_no_or_all_entries(p, share):
    assert (dropout(torch.ones(1000), p) != 0).float().mean() == share
    with pytest.raises(ValueError, match="between 0 and 1"):
        dropout(torch.ones(3), 1.5)


def test_the_module_is_an_nn_dropout_and_acts_in_training_only():
    module, x = Dropout(0.5), torch.ones(1000)
    assert isinstance(module, nn.Dropout)
    assert not torch.equal(module(x), x)
    assert module.eval()(x) is x
