import pytest
import torch
from torch import nn
from torch.nn import functional as F

from src.lion.configuration_lion import LionConfig
from src.lion.linear import linear
from src.lion.modeling_lion import LionModel


@pytest.fixture
def convolutions(monkeypatch):
    """The convolutions that were computed."""
    calls, convolve = [], F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda *args: calls.append(args) or convolve(*args))
    return calls


@pytest.fixture(scope="module", autouse=True)
def _two_threads_of_x86():
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        pytest.skip("this PyTorch is without MKL or oneDNN, so linear layers are never convolved")
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
def test_the_product_and_its_gradients_are_a_linear_layers(shape, outputs, bias, convolutions):
    dense = layer(outputs=outputs, bias=bias)
    x = torch.randn(*shape, 768, requires_grad=True)
    grad = torch.randn(*shape, outputs)
    expected = F.linear(x, dense.weight, dense.bias)
    expected_grads = torch.autograd.grad(expected, [x, *dense.parameters()], grad)
    y = linear(dense, x)
    grads = torch.autograd.grad(y, [x, *dense.parameters()], grad)
    assert len(convolutions) == 1
    assert y.is_contiguous() and y.shape == expected.shape
    for actual, wanted in zip((y, *grads), (expected, *expected_grads)):
        assert actual.stride() == wanted.stride()
        torch.testing.assert_close(actual, wanted, rtol=0, atol=5e-6 * wanted.abs().max().item())


def test_the_same_numbers_come_again():
    dense, x = layer(), torch.randn(2048, 768, requires_grad=True)
    parameters = [x, *dense.parameters()]
    runs = [[y := linear(dense, x), *torch.autograd.grad(y.square().sum(), parameters)] for _ in range(3)]
    for run in runs[1:]:
        assert all(torch.equal(*pair) for pair in zip(run, runs[0]))


def test_an_operand_need_not_be_contiguous(convolutions):
    dense = layer()
    x = torch.randn(2, 768, 1024).mT
    torch.testing.assert_close(linear(dense, x), dense(x), rtol=0, atol=1e-5)
    assert convolutions


@pytest.mark.parametrize(
    "dense, x",
    [
        (layer(), torch.randn(1023, 768)),
        (layer(256, 256), torch.randn(2048, 256)),
        (layer(dtype=torch.float64), torch.randn(1024, 768, dtype=torch.float64)),
        (layer(dtype=torch.bfloat16), torch.randn(1024, 768, dtype=torch.bfloat16)),
    ],
    ids=["few tokens", "small weights", "float64", "bfloat16"],
)
def test_what_gains_nothing_goes_through_the_layer(dense, x, convolutions):
    assert torch.equal(linear(dense, x), dense(x))
    assert not convolutions


def test_autocast_chooses_the_dtype(convolutions):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(layer(), torch.randn(1024, 768)).dtype == torch.bfloat16
    assert not convolutions


@pytest.mark.filterwarnings("ignore:TF32")
def test_nothing_is_convolved_where_mkldnn_is_switched_off(convolutions):
    with torch.backends.mkldnn.flags(enabled=False):
        linear(layer(), torch.randn(1024, 768))
    assert not convolutions


def test_nothing_is_convolved_on_one_thread(convolutions, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    linear(layer(), torch.randn(1024, 768))
    assert not convolutions


@pytest.mark.filterwarnings("ignore")  # of newer ways to say it
def test_nothing_is_convolved_where_products_may_be_rounded(convolutions):
    torch.set_float32_matmul_precision("medium")
    try:
        linear(layer(), torch.randn(1024, 768))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not convolutions
    linear(layer(), torch.randn(1024, 768))
    assert convolutions


def test_a_width_that_does_not_fit_is_named_as_a_linear_layer_names_it():
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        linear(layer(), torch.randn(1024, 700))


class _Adapted(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def test_what_has_taken_a_layers_place_is_called(convolutions):
    adapted = _Adapted(768, 768)
    wrapped = layer()
    wrapped.forward = lambda x: x + 1  # as accelerate does it
    x = torch.randn(1024, 768)
    assert torch.equal(linear(adapted, x), adapted(x))
    assert torch.equal(linear(wrapped, x), x + 1)
    assert torch.equal(linear(nn.Identity(), x), x)
    assert not convolutions


@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook"],
)  # fmt: skip
def test_hooks_hear_of_it(register):
    dense, heard = layer(), []
    getattr(dense, register)(lambda *_: heard.append(register))
    linear(dense, torch.randn(1024, 768, requires_grad=True)).sum().backward()
    assert heard == [register]


@pytest.mark.filterwarnings("ignore")  # of its deprecation
def test_a_base_models_linear_layers_can_be_quantized(convolutions):
    torch.manual_seed(0)
    model = LionModel(LionConfig(num_hidden_layers=1, vocab_size=50)).eval()
    ids = torch.randint(50, (2, 1024))
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        assert len(convolutions) == 1 + 2 * 3  # qkv; out and the MLP's two, 1,024 tokens at a time
        quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
        y = quantized(ids).last_hidden_state
    assert len(convolutions) == 1 + 2 * 3
    assert not any(type(module) is nn.Linear for module in quantized.modules())
    assert F.cosine_similarity(y, expected, dim=-1).min() > 0.98


def test_a_compiled_layer_sees_a_linear_layer(convolutions):
    dense, x = layer(), torch.randn(1024, 768)
    compiled = torch.compile(lambda x: linear(dense, x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), dense(x))
    assert not convolutions


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = layer()

    def forward(self, x):
        return linear(self.dense, x)


def test_an_exported_layer_takes_every_length(convolutions):
    model = _Layer()
    length = torch.export.Dim("length", min=2, max=4096)
    exported = torch.export.export(model, (torch.randn(1024, 768),), dynamic_shapes=({0: length},)).module()
    x = torch.randn(7, 768)
    torch.testing.assert_close(exported(x), model(x))
    assert not convolutions


@torch.no_grad()
def test_a_traced_layer_takes_every_length(convolutions):
    dense = layer().requires_grad_(False)
    traced = torch.jit.trace(lambda x: linear(dense, x), torch.randn(1024, 768), check_trace=False)
    x = torch.randn(7, 768)
    assert torch.equal(traced(x), dense(x))
    assert not convolutions
