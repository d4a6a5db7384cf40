"""The GPU kernels against the definition in float64: on a GPU, or with TRITON_INTERPRET=1 on the CPU by Triton's
interpreter. test_linear_attention.py starts the second where there is no GPU. The interpreter takes milliseconds for
what a GPU does in nanoseconds, so blocks and texts are short there."""

import functools
import importlib
import itertools
import math
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from src.lion import LionConfig, LionModel, linear_attention
from src.lion.configuration_lion import LionVisionConfig
from src.lion.hydra_attention import Scans, hydra_attention
from src.lion.linear_attention import attention_matrix, definition
from src.lion.modeling_lion_vision import LionImageModel
from src.lion.patch_orders import definition_in_orders, linear_attention_in_orders, snakes
from tests.test_linear_attention import DECAYS, PACKED, distance, draw, in_segments, one_by_one
from tests.test_patch_orders import draw as draw_patches

GPU = torch.cuda.is_available()
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

host = importlib.import_module("src.lion.linear_attention_triton")
operator = importlib.import_module("src.lion.linear_attention")  # the package's name for it is the function

DEVICE = "cuda" if GPU else "cpu"
FORMS = ("full", "chunkwise")
CHUNK = 128 if GPU else 32
LENGTHS = (1, 7, 64, 65, 300, 1000) if GPU else (1, 40)
LONG = 300 if GPU else 40
HEADS = 2 if GPU else 1
TILES = host.TILES
HEAD_SIZES = ((64, 64), (32, 64), (128, 128), (20, 33), (128, 65)) if GPU else ((20, 33),)


if not GPU:
    import quick_interpreter
    import triton.runtime.interpreter as interpreter

    quick_interpreter.install()


@pytest.fixture(autouse=True)
def started(monkeypatch) -> Iterator[list[str]]:
    """The kernels that a test has started, the products by what they compute; and blocks so short that there are
    several."""
    if not GPU:
        short = dict.fromkeys(("y", "dq", "dk", "states"), (32, 16, 4, 3))
        monkeypatch.setattr(host, "TILES", {(8, 0): short})
        host._plan.cache_clear()
    names: list[str] = []
    launch = host.Kernel.launch

    def record(kernel, *tensors) -> None:
        names.append(kernel.name)
        launch(kernel, *tensors)

    monkeypatch.setattr(host.Kernel, "launch", record)
    yield names
    host._plan.cache_clear()


def results(function, inputs: list[Tensor | None], *, device: str, dtype: torch.dtype, **options) -> list[Tensor]:
    """The output and the gradients of q, k, v and log_decay, with operands of a type, on a device. log_decay is in
    float32."""
    types = dtype, dtype, dtype, torch.promote_types(dtype, torch.float32)
    leaves = [None if x is None else x.to(device, kind).requires_grad_() for x, kind in zip(inputs, types)]
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    y = function(*leaves, **options)
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()  # the same in all types
    probe = probe.to(device, y.dtype)
    leaves = [x for x in leaves if x is not None]
    return [x.cpu() for x in (y.detach(), *torch.autograd.grad((y * probe).sum(), leaves, materialize_grads=True))]


def exact(inputs: list[Tensor | None], dtype: torch.dtype, **options) -> list[Tensor]:
    """What the definition gives in float64 for operands as they are in a type. Long texts in the full form, which is
    tested."""

    def operator(*operands, **options):
        short = operands[0].shape[-2] <= 64 and "seq_idx" not in options
        return definition(*operands, **options) if short else linear_attention(*operands, form="full", **options)

    rounded = [None if x is None else x.to(kind) for x, kind in zip(inputs, (dtype, dtype, dtype, torch.float32))]
    return results(operator, rounded, device="cpu", dtype=torch.float64, **options)


def check(inputs: list[Tensor | None], form: str, dtype: torch.dtype = torch.float32, **options) -> None:
    """The kernels' output and gradients are those of the definition."""
    actual = results(
        linear_attention,
        inputs,
        device=DEVICE,
        dtype=dtype,
        form=form,
        chunk_size=options.pop("chunk_size", CHUNK),
        **options,
    )
    expected = exact(inputs, dtype, **options)
    for name, x, y in zip(("output", "q", "k", "v", "log_decay"), actual, expected, strict=False):
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        if name == "log_decay" and x.ndim == 1:  # a sum over a long text, of which nearly all cancels
            tolerance = max(tolerance, 1e-6 * inputs[0].shape[-2])
        assert x.shape == y.shape and x.isfinite().all(), name
        assert x.dtype == (torch.float32 if name == "log_decay" else dtype), name
        assert distance(x, y) < tolerance or float(y.norm()) < 1e-12 > float(x.norm()), f"{name}: {distance(x, y):.1e}"


@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_the_kernels_have_the_outputs_and_gradients_of_the_definition(form, decay, length, mask, started):
    inputs, real = draw(decay, length, 1, HEADS, mask)
    check(inputs, form, **({} if real is None else {"mask": real}))
    assert {"y", "dq", "dk"} <= set(started)


@pytest.mark.parametrize("case", ["plain", "normalized", "packed"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_causal_attention_reads_no_later_keys(form, decay, case, started):
    inputs, mask = draw(decay, LONG, 1, HEADS, "holes", case == "normalized")
    how = {"normalized": {"normalize": True}, "packed": {"seq_idx": torch.arange(LONG)[None] // 9}}.get(case, {})
    check(inputs, form, mask=mask, causal=True, **how)
    assert {"y", "dq", "dk"} <= set(started)


@pytest.mark.parametrize("case", ["plain", "normalized", "packed", "states"])
@pytest.mark.parametrize("decay", ["head", "token"])
@pytest.mark.parametrize("form", FORMS)
def test_decays_may_differ_between_the_directions(form, decay, case, started):
    inputs, mask = draw(decay, LONG, 1, HEADS, "holes", case == "normalized")
    state = torch.randn(1, HEADS, *inputs[1].shape[-1:], *inputs[2].shape[-1:], dtype=torch.float64)
    how = {
        "normalized": {"normalize": True},
        "packed": {"seq_idx": torch.arange(LONG)[None] // 9},
        "states": {"left_state": state, "right_state": -state},
    }.get(case, {})

    def both(q, k, v, log_decay, **how):
        return linear_attention(q, k, v, log_decay, log_decay_future=log_decay / 2, **how)

    rounded = [x.float() for x in inputs]
    actual = results(both, inputs, device=DEVICE, dtype=torch.float32, form=form, chunk_size=CHUNK, mask=mask, **how)
    expected = results(both, rounded, device="cpu", dtype=torch.float64, form="full", mask=mask, **how)
    assert all(distance(x, y) < 1e-5 for x, y in zip(actual, expected, strict=True))
    assert started.count("y") == 2


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("case", ["both", "causal", "separate"])
@pytest.mark.parametrize("decay", ["head", "token"])
def test_slow_decays_cross_many_chunks(decay, case, normalize, started):
    """Ordinary ones leave nothing of a state that crosses a chunk."""
    inputs, mask = draw(decay, 300 if GPU else 100, 1, HEADS, "holes", normalize)
    inputs[3] = inputs[3] / 100
    how = {"mask": mask, "normalize": normalize, **({"causal": True} if case == "causal" else {})}

    def run(q, k, v, log_decay, **how):
        future = {"log_decay_future": log_decay / 2} if case == "separate" else {}
        return linear_attention(q, k, v, log_decay, **future, **how)

    rounded = [x.float() for x in inputs]
    actual = results(run, inputs, device=DEVICE, dtype=torch.float32, form="chunkwise", chunk_size=32, **how)
    expected = results(run, rounded, device="cpu", dtype=torch.float64, form="full", **how)
    assert all(distance(x, y) < 1e-4 for x, y in zip(actual, expected, strict=True))
    assert "scan" in started and "decay_gradients" in started


@pytest.mark.parametrize("length", [1, LONG])
@pytest.mark.parametrize("case", ["plain", "mask", "packed", "states", "strong"])
@pytest.mark.parametrize("form", FORMS)
def test_hydra_is_two_scans_and_a_diagonal(form, case, length, started):
    B, H, G = (2, 4, 2) if GPU or case == "plain" else (2 if case == "mask" else 1, 2, 1)
    D, E = 8, 12
    inputs = draw_scans(B, H, G, length, D, E)
    generator = torch.Generator().manual_seed(1)
    if case == "strong":  # some tokens let nothing past, and some keys weigh nothing or much
        inputs[5] = inputs[5].where(torch.rand(inputs[5].shape, generator=generator) < 0.7, -300)
        inputs[6] = inputs[6] + 200 * torch.randint(-1, 2, inputs[6].shape, generator=generator).clamp(max=0.02)
    left, right = torch.randn(2, B, H, D, E, generator=generator, dtype=torch.float64)
    how = {
        "mask": {"mask": torch.rand(B, length, generator=generator) < 0.7},
        "packed": {"seq_idx": (torch.arange(length) // 9).expand(B, -1)},
        "states": {"left_state": left, "right_state": right},
    }.get(case, {})
    actual = hydra_results(inputs, DEVICE, torch.float32, form, **how)
    for x, y in zip(actual, hydra_results(inputs, "cpu", torch.float64, form, **how), strict=True):
        assert x.shape == y.shape and (distance(x, y) < 1e-5 or float(y.norm()) < 1e-12 > float(x.norm()))
    assert started.count("y") == 2


@pytest.mark.parametrize("length", LENGTHS if GPU else (1, 130))
@pytest.mark.parametrize("form", FORMS)
def test_hydra_in_bfloat16_is_as_accurate_as_its_operands(form, length, as_trained, started):
    check_hydra(form, length, torch.bfloat16, 8e-3)
    assert started.count("y") == 2


@pytest.mark.parametrize("form", FORMS)
def test_hydra_in_float16_is_as_accurate_as_its_operands(form, started):
    check_hydra(form, 130, torch.float16, 1e-3)
    assert started.count("y") == 2


def check_hydra(form: str, length: int, dtype: torch.dtype, accuracy: float) -> None:
    """Compare results in a dtype with those of its operands in float64."""
    inputs = [x.to(dtype) for x in draw_scans(1, 2, 1, length, 64, 64)]
    actual = hydra_results(inputs, DEVICE, dtype, form)
    for x, y in zip(actual, hydra_results(inputs, "cpu", torch.float64, form), strict=True):
        assert distance(x, y) < accuracy or float(y.norm()) < 1e-12 > float(x.norm())


def draw_scans(B: int, H: int, G: int, length: int, D: int, E: int) -> list[Tensor]:
    """The operands of `hydra_attention`: values; queries and keys of the past and of the future; log decays and log
    weights; the diagonal."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    steps = F.softplus(normal(2, B, H, length)) / 20  # so that much is left of a state that crosses a chunk
    pairs = [normal(B, G, length, D) for _ in range(4)]
    return [normal(B, H, length, E), *pairs, -steps, steps.log(), normal(B, H, length)]


def hydra_results(inputs: list[Tensor], device: str, dtype: torch.dtype, form: str, **how) -> list[Tensor]:
    """The output and the gradients of all operands; of decays and weights in float32 or better, as a layer has them."""
    wide = torch.promote_types(dtype, torch.float32)
    types = *[dtype] * 5, wide, wide, dtype
    v, q, q_future, k, k_future, *rest = leaves = [x.to(device, t).requires_grad_() for x, t in zip(inputs, types)]
    how = {name: x.to(device, dtype if x.is_floating_point() else x.dtype) for name, x in how.items()}
    y = hydra_attention(v, Scans((q, q_future), (k, k_future), *rest[:2]), rest[2], **how, form=form, chunk_size=16)
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()  # the same in all types
    grads = torch.autograd.grad(y, leaves, probe.to(device, y.dtype))
    return [x.cpu() for x in (y.detach(), *grads)]


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_of_hydra_has_the_outputs_and_gradients_of_pytorch(form, started, monkeypatch):
    layer, *inputs = hydra_layer()
    seq_idx, found = torch.arange(LONG, device=DEVICE).expand(len(inputs[0]), -1) // 9, []
    for fused in (True, False):
        monkeypatch.setattr(operator, "USE_TRITON", fused)
        found.append(outputs_and_gradients(layer, layer, *inputs, seq_idx, form))
        assert started.count("y") == 2
    assert all(distance(x.cpu(), y.cpu()) < 1e-5 for x, y in zip(*found, strict=True))


def test_a_layer_of_hydra_compiles_as_one_graph(started):
    layer, *inputs = hydra_layer()
    compiled = torch.compile(layer, backend="inductor" if GPU else "aot_eager", fullgraph=True)
    found = (outputs_and_gradients(run, layer, *inputs, None, "chunkwise") for run in (compiled, layer))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert {"y", "dq", "dk"} <= set(started)


def hydra_layer() -> tuple[torch.nn.Module, Tensor, Tensor]:
    """A layer, hidden states and a mask."""
    B, headdim = (2, 8) if GPU else (1, 16)
    config = LionConfig(mixer="hydra", hidden_size=16, headdim=headdim, d_state=4, num_hidden_layers=1, chunk_size=16)
    torch.manual_seed(0)
    layer = LionModel(config).layers[0].to(DEVICE).eval()
    return layer, torch.randn(B, LONG, 16, device=DEVICE), torch.rand(B, LONG, device=DEVICE) < 0.8


def outputs_and_gradients(run, layer: torch.nn.Module, *inputs) -> list[Tensor]:
    y, _ = run(*inputs)
    return [y.detach(), *torch.autograd.grad(y.cos().sum(), list(layer.parameters()))]


@pytest.mark.parametrize(
    "mixer, order", [("lion-lit", "raster"), ("lion-d", "raster"), ("lion-s", "raster"), ("lion-s", "snakes")]
)
def test_a_layer_of_images_has_the_outputs_and_gradients_of_pytorch(mixer, order, started, monkeypatch):
    layer, x, orders = image_layer(mixer, order)
    found = []
    for fused in (True, False):
        monkeypatch.setattr(operator, "USE_TRITON", fused)
        found.append(outputs_and_gradients(functools.partial(layer, **orders), layer, x, None, None, "full"))
        assert started.count("y") == 1
    assert all(distance(a.cpu(), b.cpu()) < 1e-5 for a, b in zip(*found, strict=True))


def test_a_layer_of_images_in_two_orders_compiles_as_one_graph(started):
    layer, x, orders = image_layer("lion-s", "snakes")
    compiled = torch.compile(layer, backend="inductor" if GPU else "aot_eager", fullgraph=True)
    found = (
        outputs_and_gradients(functools.partial(run, **orders), layer, x, None, None, "chunkwise")
        for run in (compiled, layer)
    )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert {"y", "dq", "dk"} <= set(started)


def image_layer(mixer: str, order: str) -> tuple[torch.nn.Module, Tensor, dict[str, Tensor]]:
    """A layer, hidden states of images of 5 × 6 patches, and the orders in which it reads them."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LionVisionConfig((20, 24), 4, **sizes, mixer=mixer, patch_order=order)
    torch.manual_seed(0)
    layer = LionImageModel(config).layers[0].to(DEVICE).eval()
    orders = {"orders": snakes(*config.grid, device=DEVICE)} if order == "snakes" else {}
    return layer, torch.randn(2, 31, 16, device=DEVICE), orders


@pytest.mark.parametrize("mask", ["left", "right"])
@pytest.mark.parametrize("form", FORMS)
def test_each_text_of_a_batch_has_its_own_padding(form, mask):
    inputs, real = draw("head", LONG, 2, 1, mask)
    check(inputs, form, mask=real)


@pytest.mark.parametrize("sizes", HEAD_SIZES, ids=str)
@pytest.mark.parametrize("decay", ["none", "token"])
@pytest.mark.parametrize("form", FORMS)
def test_heads_may_have_any_size(form, decay, sizes, started):
    inputs, _ = draw(decay, LONG, 1, 1, d=sizes[0], e=sizes[1])
    dtype = torch.float32 if max(sizes) <= host.LARGEST_HEAD[torch.float32] else torch.bfloat16
    check(inputs, form, dtype)
    assert started


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_heads_may_share_queries_and_keys(form, groups, started):
    (q, k, v, log_decay), mask = draw("token", LONG, 2, 4, "holes")
    options = {"form": form, "chunk_size": CHUNK, "mask": mask}
    inputs = [q[:, :groups], k[:, :groups], v, log_decay]
    actual = results(linear_attention, inputs, device=DEVICE, dtype=torch.float32, **options)
    expected = results(linear_attention, inputs, device="cpu", dtype=torch.float64, **options)
    assert all(distance(x, y) < 1e-5 for x, y in zip(actual, expected, strict=True))
    assert {"y", "dq", "dk"} <= set(started)


@pytest.mark.parametrize("chunk_size", [1, 33, 1000])
def test_the_chunk_size_changes_nothing(chunk_size):
    inputs, _ = draw("token", LONG, 1, 1)
    check(inputs, "chunkwise", chunk_size=chunk_size)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_normalized_rows_are_divided_by_their_sum(form, decay, started):
    inputs, mask = draw(decay, LONG, 2, HEADS, "holes", positive=True)
    check(inputs, form, mask=mask, normalize=True)
    assert {"y", "rows", "dq", "dk"} <= set(started)


def test_a_row_without_keys_is_zero_and_so_are_its_gradients():
    inputs, _ = draw("token", 20, 2, 1, positive=True)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1] = False
    for form in FORMS:
        y, *grads = results(
            linear_attention, inputs, device=DEVICE, dtype=torch.float32, form=form, mask=mask, normalize=True
        )
        assert y[0].ne(0).all() and not any(x[1].any() for x in (y, *grads))


@pytest.mark.parametrize("read", ["both", "columns", "raster"])
@pytest.mark.parametrize("kind", ["d", "s"])
@pytest.mark.parametrize("form", FORMS)
def test_patches_are_read_in_their_orders(form, kind, read, started):
    grid = (14, 14) if GPU else (5, 8)
    inputs, orders = draw_patches(2 if GPU else 1, HEADS, grid, kind, torch.float64, read=read)
    options = {"orders": orders, "form": form, "chunk_size": CHUNK}
    actual = results(linear_attention_in_orders, inputs, device=DEVICE, dtype=torch.float32, **options)
    expected = results(definition_in_orders, inputs, device="cpu", dtype=torch.float64, orders=orders)
    for x, y in zip(actual, expected, strict=True):
        assert x.shape == y.shape and distance(x, y) < (1e-4 if GPU else 1e-5)  # 197 tokens cancel in decays' gradients
    assert {"y", "dq", "dk", "rows"} <= set(started) and started.count("y") == 1


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"form": "chunkwise", "dropout_p": 0.1}, "only in the full form"),
        ({"form": "ful"}, "form must be one of"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"forget_logits": torch.zeros(2)}, "two ways to give decays; give one"),
    ],
)
def test_options_of_orders_that_cannot_be_are_refused(wrong, words, started):
    inputs, orders = draw_patches(1, 1, (2, 3), "s", torch.float32)
    with pytest.raises(ValueError, match=words):
        linear_attention_in_orders(*(x.to(DEVICE) for x in inputs), orders.to(DEVICE), **wrong)
    assert started == []


def test_orders_cannot_write_beyond_the_text_nor_be_combined_with_a_mask(started):
    inputs, orders = draw_patches(1, HEADS, (3, 5), "s", torch.float32)
    wrong = orders.clone()
    wrong[:, -1] = 2**40
    y = linear_attention_in_orders(*(x.to(DEVICE) for x in inputs), wrong.to(DEVICE))
    assert y.shape == inputs[2].shape and "y" in started
    q, k, v, log_decay = (x.to(DEVICE) for x in inputs)
    for mask, mode in ((torch.ones(1, 16, dtype=torch.bool, device=DEVICE), "divide"), (None, "sum")):
        with pytest.raises(ValueError, match="orders need divided rows, and exclude mask"):
            host.fused_linear_attention(
                q, k, v, log_decay, mask, None, 1.0, 0, 0.0, row_mode=mode, orders=orders.to(DEVICE)
            )


@pytest.mark.parametrize("form", FORMS)
def test_patches_in_bfloat16_are_as_accurate_as_their_operands(form, as_trained, started):
    generator, grid = torch.Generator().manual_seed(0), (14, 14) if GPU else (9, 15)
    orders, O = snakes(*grid), 2  # noqa: E741
    L = orders.shape[1]
    q, k, v = (torch.randn(1, 1, L, 64, generator=generator).bfloat16() for _ in range(3))
    inputs = [*(F.silu(x) + 0.5 for x in (q, k)), v, torch.randn(1, O, L, generator=generator).bfloat16()]
    inputs[3][..., 0] = -math.inf  # the class token does not decay

    def exact(q, k, v, logits, **how):
        return definition_in_orders(q, k, v, F.logsigmoid(-logits), **how)

    def run(q, k, v, logits, **how):
        return linear_attention_in_orders(q, k, v, forget_logits=logits, **how)

    actual = results(run, inputs, device=DEVICE, dtype=torch.bfloat16, orders=orders, form=form, chunk_size=64)
    expected = results(exact, inputs, device="cpu", dtype=torch.float64, orders=orders)
    for x, y in zip(actual, expected, strict=True):
        assert distance(x, y) < 1.2e-2
    assert started.count("y") == 1 and not actual[-1][..., 0].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_patches_in_half_precision_are_accurate_to_two_digits(dtype):
    inputs, orders = draw_patches(1, 1, (3, 5), "s", torch.float64)
    actual = results(linear_attention_in_orders, inputs, device=DEVICE, dtype=dtype, orders=orders)
    rounded = [x.to(kind) for x, kind in zip(inputs, (dtype, dtype, dtype, torch.float32))]
    expected = results(definition_in_orders, rounded, device="cpu", dtype=torch.float64, orders=orders)
    assert all(x.dtype == dtype and distance(x, y) < 2e-2 for x, y in zip(actual[:4], expected))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("decay", ["none", "token"])
@pytest.mark.parametrize("form", FORMS)
def test_float16_is_accurate_to_two_digits(form, decay, normalize):
    inputs, mask = draw(decay, LONG, 1, HEADS, "holes", normalize, d=16, e=16)
    check(inputs, form, torch.float16, mask=mask, normalize=normalize)


@pytest.fixture
def as_trained(monkeypatch) -> None:
    """Heads of 64 in bfloat16 with the tiles of a GPU. The interpreter multiplies float32: it gets operands rounded as
    tensor cores would."""
    if GPU:
        return

    def rounded(x):
        data = torch.from_numpy(np.ascontiguousarray(x.data, dtype=np.float32)).bfloat16().float().numpy()
        return interpreter.TensorHandle(data, x.dtype)

    def create_dot(self, a, b, *rest):
        return multiply(self, rounded(a), rounded(b), *rest)

    def of_bfloat16(name, device, precision, *sizes):
        return tile(name, device, (host.tl.bfloat16, "ieee"), *sizes)

    multiply, tile = interpreter.InterpreterBuilder.create_dot, host.tile
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(host, "TILES", TILES)
    monkeypatch.setattr(host, "tile", of_bfloat16)
    host._plan.cache_clear()


# The interpreter truncates results to bfloat16, where a GPU rounds them.
BFLOAT16_ERRORS = {
    "y": 5e-3 if GPU else 6e-3,
    "q": 5.5e-3,
    "k": 5.5e-3,
    "v": 5.5e-3,
    "per token": 3e-3,
    "per head": 2e-2,
}


@pytest.mark.parametrize("length", LENGTHS if GPU else (1, 130))
@pytest.mark.parametrize("case", ["plain", "mask", "packed", "dropout", "normalized", "causal", "separate"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_with_heads_of_64_is_as_accurate_as_its_operands(form, decay, case, length, as_trained):
    if case == "dropout" and (form == "chunkwise" or length < 3):
        pytest.skip("nothing to drop")
    if case == "separate" and decay == "none":
        pytest.skip("nothing to separate")
    dtype, options, left = torch.bfloat16, {"form": form, "chunk_size": 128 if GPU else 64}, None
    if case == "normalized" and length == 1:
        pytest.skip("all but nothing is left of the gradients")
    mask, positive = "holes" if case == "mask" else "none", case == "normalized"
    inputs, mask = draw(decay, length, 1, 12 if GPU else 1, mask, positive, d=64, e=64)
    rest = {} if mask is None else {"mask": mask}
    if case in ("normalized", "causal"):
        rest["normalize" if case == "normalized" else case] = True
    if case == "packed":
        rest["seq_idx"] = torch.arange(length)[None] // 48
    if case == "dropout":
        left = kept(1, inputs[0].shape[1], length, 0.4, seed=5)
        options["dropout_p"] = 0.4

    def seeded(*operands, **how):
        torch.manual_seed(5)
        return linear_attention(*operands, **of_future(*operands), **how)

    def of_future(*operands) -> dict[str, Tensor]:
        return {"log_decay_future": operands[3] / 2} if case == "separate" else {}

    def dropped(q, k, v, log_decay, **how):
        return (attention_matrix(q, k, log_decay, **how) * left / 0.6) @ v

    actual = results(seeded, inputs, device=DEVICE, dtype=dtype, **options, **rest)
    rounded = [None if x is None else x.to(kind) for x, kind in zip(inputs, (dtype, dtype, dtype, torch.float32))]
    if left is not None:
        expected = results(dropped, rounded, device="cpu", dtype=torch.float64, **rest)
    elif case == "separate":
        expected = results(seeded, rounded, device="cpu", dtype=torch.float64, form="full")
    else:
        expected = exact(inputs, dtype, **rest)
    names = ["y", "q", "k", "v", "per head" if decay == "head" else "per token"]
    for name, x, y in zip(names, actual, expected):
        error = distance(x, y) if float(y.norm()) > 1e-12 else float(x.norm())
        most = BFLOAT16_ERRORS[name] * (3 if length == 1 else 1)  # a single product may cancel
        if case == "normalized":  # gradients cancel along rows, as those of softmax attention do
            most *= 2 if GPU else 3
        assert error < most, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    "where, value",
    [("everywhere", -math.inf), ("everywhere", -59.0), ("here and there", -1e4), ("here and there", 0.0)],
)
@pytest.mark.parametrize("form", FORMS)
def test_decays_at_their_limits(form, where, value):
    inputs, _ = draw("token", LONG, 1, 1)
    some = torch.rand(inputs[3].shape, generator=torch.Generator().manual_seed(0)) < (
        1 if where == "everywhere" else 0.3
    )
    inputs[3][some] = value
    check(inputs, form)


@pytest.mark.parametrize("decay", ["none", "token"])
@pytest.mark.parametrize("form", FORMS)
def test_packed_sequences_give_the_outputs_of_each_alone(form, decay):
    lengths = PACKED if GPU else (5, 1, 27, 9)
    inputs, mask = draw(decay, sum(lengths), 1, 1, "holes")
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    operands = {"device": DEVICE, "dtype": torch.float32, "mask": mask}
    actual = results(linear_attention, inputs, form=form, chunk_size=CHUNK, seq_idx=numbers, **operands)
    rounded = [None if x is None else x.float() for x in inputs]
    expected = results(one_by_one(definition, lengths), rounded, device="cpu", dtype=torch.float64, mask=mask)
    assert all(distance(x, y) < 1e-5 for x, y in zip(actual, expected))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("decay", ["none", "token"])
@pytest.mark.parametrize("form", FORMS)
def test_the_content_of_a_masked_key_is_not_seen(form, decay, value):
    inputs, mask = draw(decay, LONG, 1, 1, "holes")
    options = {"device": DEVICE, "dtype": torch.float32, "mask": mask, "form": form, "chunk_size": CHUNK}
    expected = results(linear_attention, inputs, **options)
    inputs[1] = inputs[1].masked_fill(~mask[:, None, :, None], value)
    assert all(torch.equal(x, y) for x, y in zip(results(linear_attention, inputs, **options), expected))


def kept(count: int, heads: int, length: int, dropout_p: float, seed: int) -> Tensor:
    """What dropout leaves of the matrices, (B, H, L, L) of 0 and 1: matrices of ones and the unit matrix as values show
    it."""
    ones, columns = torch.ones(count, heads, length, 1, device=DEVICE), []
    for unit in torch.eye(length, device=DEVICE).split(64, dim=1):
        torch.manual_seed(seed)
        values = unit.expand(count, heads, -1, -1)
        columns.append(linear_attention(ones, ones, values, scale=1.0, form="full", dropout_p=dropout_p))
    matrices = torch.cat(columns, -1).cpu() * (1 - dropout_p)
    assert ((matrices - 1).abs() < 1e-3).logical_or(matrices == 0).all()
    return (matrices != 0).double()


@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize("decay", DECAYS)
def test_dropout_drops_the_same_entries_forward_and_backward(decay, mask, started):
    inputs, real = draw(decay, LONG, 2, HEADS, mask)
    left = kept(2, HEADS, LONG, 0.6, seed=5)
    assert bool((left.diagonal(dim1=-2, dim2=-1) == 0).any())  # the diagonal is dropped as all else is

    def dropped(*operands, **options):
        torch.manual_seed(5)
        return linear_attention(*operands, **options, dropout_p=0.6)  # auto: only the full form has dropout

    def expected(q, k, v, log_decay, **options):
        return (attention_matrix(q, k, log_decay, **options) * left / 0.4) @ v

    options = {} if real is None else {"mask": real}
    rounded = [None if x is None else x.float() for x in inputs]
    actual = results(dropped, inputs, device=DEVICE, dtype=torch.float32, **options)
    for x, y in zip(actual, results(expected, rounded, device="cpu", dtype=torch.float64, **options), strict=True):
        assert distance(x, y) < 1e-4
    assert "dk" in started and "scan" not in started


def test_dropout_drops_entries_independently():
    dropout_p, length = 0.1, 64
    first, second = (kept(2, 4, length, dropout_p, seed).flatten(0, 1) for seed in (0, 1))  # (matrices, L, L)
    assert torch.equal(first, kept(2, 4, length, dropout_p, 0).flatten(0, 1))
    both = torch.cat([first, second])
    deviation = math.sqrt(dropout_p * (1 - dropout_p))
    assert abs(float(both.mean()) - (1 - dropout_p)) < 4 * deviation / math.sqrt(both.numel())
    x = (both - (1 - dropout_p)) / deviation
    for vectors in (x.flatten(1), x.flatten(0, 1), x.mT.flatten(0, 1)):  # matrices, rows, columns
        products = (vectors @ vectors.T) / math.sqrt(
            vectors.shape[1]
        )  # of two that are independent: 0, with variance 1
        squares = products[tuple(torch.triu_indices(*products.shape, 1))].square()
        assert abs(float(squares.mean()) - 1) < max(6 * math.sqrt(2 / len(squares)), 0.05)
    # nor is one matrix another, or itself, moved along or across
    spectra = torch.fft.fft2(x)
    for shift in range(len(x)):
        moved = torch.fft.ifft2(spectra * spectra.roll(shift, 0).conj()).real / length
        if shift == 0:
            moved[:, 0, 0] = 0
        assert float(moved.abs().max()) < 7


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_segments_give_the_outputs_of_one_call(form, normalize, started):
    inputs, mask = draw("token", 33, 1, 1, "holes", positive=True)
    options = {"mask": mask, "normalize": normalize}
    actual = results(in_segments, inputs, device=DEVICE, dtype=torch.float32, form=form, chunk_size=16, **options)
    assert all(distance(x, y) < 1e-5 for x, y in zip(actual, exact(inputs, torch.float32, **options)))
    assert "dk" in started


@pytest.mark.parametrize("in_one", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_views_of_one_projection_are_read_in_place(form, in_one):
    inputs, _ = draw("token", LONG, 2, 2, d=16, e=16)
    qkv = torch.stack([x.transpose(1, 2) for x in inputs[:3]], dim=2)  # (B, L, 3, H, D), as the model has it

    def projected(qkv, log_decay):
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        assert not q.is_contiguous() and host.cpu_kernel.adjacent_rows(q) is q
        parts = (qkv,) if in_one else (q, k, v)
        return linear_attention(*parts, log_decay=log_decay.mT.contiguous().mT, form=form, chunk_size=CHUNK)

    qkv, log_decay = (x.to(DEVICE, torch.float32).requires_grad_() for x in (qkv, inputs[3]))
    y = projected(qkv, log_decay)
    assert y.transpose(1, 2).is_contiguous()  # so that the layer after it need not copy
    torch.autograd.backward(y, torch.ones_like(y))
    (before, _), *_ = (x for x in y.grad_fn.next_functions if x[0] is not None)
    assert (type(before).__name__ == "AccumulateGrad") is in_one  # nothing puts three gradients together
    operands = [x.detach().double().cpu().requires_grad_() for x in (qkv, log_decay)]
    z = linear_attention(*operands[0].permute(2, 0, 3, 1, 4).unbind(), operands[1], form="full")
    torch.autograd.backward(z, torch.ones_like(z))
    for x, exact in ((y.detach(), z.detach()), (qkv.grad, operands[0].grad), (log_decay.grad, operands[1].grad)):
        assert distance(x.cpu(), exact) < 1e-5


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_causal_attention_reads_the_state_of_earlier_text(form, normalize, started):
    inputs, mask = draw("token", LONG, 1, 1, "holes", positive=True)
    state = torch.rand(1, 1, inputs[1].shape[-1], inputs[2].shape[-1] + normalize, dtype=torch.float64)
    how = {"mask": mask, "causal": True, "left_state": state, "normalize": normalize}
    actual = results(linear_attention, inputs, device=DEVICE, dtype=torch.float32, form=form, chunk_size=CHUNK, **how)
    rounded = [x.float() for x in inputs]
    expected = results(linear_attention, rounded, device="cpu", dtype=torch.float64, form="full", **how)
    assert all(distance(x, y) < 1e-5 for x, y in zip(actual, expected, strict=True))
    assert {"y", "dq", "dk"} <= set(started)


def test_dropout_with_decays_of_each_direction_drops_the_entries_of_both_triangles():
    inputs, _ = draw("token", LONG, 1, HEADS)
    q, k, _, log_decay = (x.float().to(DEVICE) for x in inputs)
    unit = torch.eye(LONG, device=DEVICE).expand(1, HEADS, -1, -1)
    torch.manual_seed(0)
    future = {"log_decay_future": log_decay / 2}
    matrix = linear_attention(q, k, unit, log_decay, **future, form="full", dropout_p=0.5)
    whole = 2 * attention_matrix(q, k, log_decay, **future)
    left = (matrix - whole).abs() < 1e-4 * whole.abs()
    assert torch.equal(matrix != 0, left)
    for triangle in (left.tril(), left.triu(1)):
        share = float(triangle.sum()) / (HEADS * LONG * LONG / 2)
        assert 0.4 < share < 0.6


def test_dropout_of_causal_attention_keeps_the_triangle():
    torch.manual_seed(0)
    ones, unit = torch.ones(1, 1, LONG, 1, device=DEVICE), torch.eye(LONG, device=DEVICE)[None, None]
    matrix = linear_attention(ones, ones, unit, scale=1.0, form="full", dropout_p=0.5, causal=True)[0, 0].cpu()
    kept_entries = matrix[torch.ones(LONG, LONG).tril() > 0]
    assert not matrix.triu(1).any() and {*kept_entries.tolist()} == {0.0, 2.0}


def test_non_contiguous_features_are_copied():
    inputs, _ = draw("head", LONG, 1, 1)
    check([inputs[0].mT.contiguous().mT, inputs[1], inputs[2].mT.contiguous().mT, inputs[3]], "chunkwise")


@pytest.mark.parametrize("form", FORMS)
def test_only_inputs_that_require_a_gradient_get_one(form, started):
    inputs, _ = draw("token", LONG, 1, 1)
    q, k, v, log_decay = (x.to(DEVICE, torch.float32) for x in inputs)
    q.requires_grad_()
    y = linear_attention(q, k, v, log_decay, form=form, chunk_size=CHUNK)
    (grad,) = torch.autograd.grad(y.sum(), q)
    assert "decay_gradients" not in started
    log_decay.requires_grad_()
    y = linear_attention(q, k, v, log_decay, form=form, chunk_size=CHUNK)
    again, bound = torch.autograd.grad(y.sum(), [q, log_decay])[0], 1e-6 if GPU else 0  # where it is another program
    torch.testing.assert_close(again, grad, rtol=bound, atol=bound)
    assert "decay_gradients" in started


@pytest.mark.parametrize("decay", ["head", "token"])
@pytest.mark.parametrize("form", FORMS)
def test_logits_give_the_numbers_of_their_decays(form, decay):
    (q, k, v, _), mask = draw(decay, LONG, 2, 1, "holes")
    logits = (
        torch.linspace(-70, 70, 2 * LONG, dtype=torch.float64).view(2, 1, LONG) if decay == "token" else torch.zeros(1)
    )
    if decay == "token":  # as LION-S gives them
        logits = logits.masked_fill(~mask[:, None], -math.inf)

    def of_logits(q, k, v, logits, **options):
        return linear_attention(q, k, v, forget_logits=logits, **options)

    def of_decays(q, k, v, logits, **options):
        return linear_attention(q, k, v, F.logsigmoid(-logits), form="full", **options)

    for dtype in (torch.float32, torch.bfloat16):
        kind = logits.to(dtype).double()
        types = {"device": DEVICE, "dtype": torch.float32, "form": form, "chunk_size": CHUNK, "mask": mask}
        actual = results(of_logits, [q, k, v, kind], **types)
        expected = results(
            of_decays, [x.float().double() for x in (q, k, v)] + [kind], device="cpu", dtype=torch.float64, mask=mask
        )
        for x, y in zip(actual, expected, strict=True):
            assert distance(x, y) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_a_second_run_gives_the_same_bits(form):
    inputs, mask = draw("token", LONG, 2, 1, "holes")
    one, other = (
        results(linear_attention, inputs, device=DEVICE, dtype=torch.float32, form=form, chunk_size=CHUNK, mask=mask)
        for _ in range(2)
    )
    assert all(torch.equal(x, y) for x, y in zip(one, other))


@pytest.mark.parametrize("form, dropout_p", [("full", 0.0), ("full", 0.3), ("chunkwise", 0.0)])
def test_gradients_are_the_same_under_activation_checkpointing(form, dropout_p):
    inputs, mask = draw("token", LONG, 1, 1, "holes", positive=True)
    options = {"device": DEVICE, "dtype": torch.float32, "mask": mask, "form": form, "chunk_size": CHUNK}
    options |= {"dropout_p": dropout_p, "normalize": dropout_p == 0}

    def checkpointed(*operands, **options):
        return checkpoint(lambda *x: linear_attention(*x, **options), *operands, use_reentrant=False)

    torch.manual_seed(0)
    expected = results(linear_attention, inputs, **options)
    torch.manual_seed(0)
    actual = results(checkpointed, inputs, **options)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


@pytest.mark.parametrize("normalize, causal", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("form", FORMS)
def test_a_compiled_operator_is_one_graph_and_gives_the_same_numbers(form, normalize, causal):
    inputs, mask = draw("token", LONG, 1, 1, "holes", positive=True)
    compiled = torch.compile(linear_attention, backend="inductor" if GPU else "aot_eager", fullgraph=True)
    options = {"device": DEVICE, "dtype": torch.float32, "mask": mask, "form": form, "chunk_size": CHUNK}
    options |= {"normalize": normalize, "causal": causal}
    for x, y in zip(results(compiled, inputs, **options), results(linear_attention, inputs, **options)):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("decay", ["none", "token"])
def test_the_custom_operators_pass_pytorchs_checks(decay):
    inputs, mask = draw(decay, 20, 1, 1, "holes")
    q, k, v, log_decay = (None if x is None else x.to(DEVICE, torch.float32) for x in inputs)
    drawn = torch.full((1, 1), 7, device=DEVICE)
    cases = [(None, 16, 0.0, "sum", "all"), (None, 16, 0.0, "sum", "to"), (drawn, 0, 0.1, "divide", "all")]
    cases = [*cases, (None, 16, 0.0, "sum", "before")] if decay == "token" else cases[::2]
    for seed, chunk_size, dropout_p, row_mode, keys in cases:
        log_weight = log_decay / 2 if keys == "before" else None
        how = log_decay, log_weight, mask.to(DEVICE), None, None, seed, None, None
        how = *how, 0.5, chunk_size, dropout_p, False, keys
        torch.library.opcheck(host.ATTENTION.call, (q, k, v, *how))
        torch.library.opcheck(host.ATTENTION.backward, (torch.ones_like(v), q, k, v, *how, log_decay is not None))
        qkv = torch.stack([x.transpose(1, 2) for x in (q, k, q)], 2)
        torch.library.opcheck(host.ATTENTION.call, (qkv, None, None, *how))
        torch.library.opcheck(
            host.ATTENTION.backward, (torch.ones_like(q), qkv, None, None, *how, log_decay is not None)
        )
        how = *how, row_mode
        torch.library.opcheck(host.ATTENTION_ROWS.call, (q, k, v, *how))
        outputs = host.ATTENTION_ROWS.call(q, k, v, *how)
        grads = [torch.ones_like(x) for x in outputs]
        torch.library.opcheck(host.ATTENTION_ROWS.backward, (*grads, *outputs, q, k, v, *how, log_decay is not None))
    if decay == "token":
        decays, orders = torch.cat([log_decay] * 2, 1), torch.stack([torch.arange(20), torch.arange(20).flip(0)]).int()
        how = decays, None, None, None, orders.to(DEVICE), None, None, None, 0.5, 16, 0.0, False, "all", "divide"
        torch.library.opcheck(host.ATTENTION_ROWS.call, (q, k, v, *how))
        outputs = host.ATTENTION_ROWS.call(q, k, v, *how)
        torch.library.opcheck(host.ATTENTION_ROWS.backward, (*outputs, *outputs, q, k, v, *how, True))


@pytest.mark.parametrize("decay", ["head", "token"])
@pytest.mark.parametrize("in_one", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_compiler_is_told_the_strides_of_all_results(dtype, in_one, decay):
    inputs, mask = draw(decay, 20, 2, 2, "holes")
    q, k, v, log_decay = (x.to(DEVICE, torch.float32 if x is inputs[3] else dtype) for x in inputs)
    parts = (torch.stack([x.transpose(1, 2) for x in (q, k, q)], 2), None, None) if in_one else (q, k, v)
    log_weight = log_decay / 2 if decay == "token" else None
    how = log_decay, log_weight, mask.to(DEVICE), None, None, None, None, None, 0.5, 16, 0.0, False, "all"
    grad = torch.ones_like(q if in_one else v)

    def run() -> list[Tensor]:
        outputs = host.ATTENTION_ROWS.call(*parts, *how, "sum")
        grads = host.ATTENTION_ROWS.backward(grad, outputs[1], *outputs, *parts, *how, "sum", True)
        return [host.ATTENTION.call(*parts, *how), *host.ATTENTION.backward(grad, *parts, *how, True), *outputs, *grads]

    real = run()
    with FakeTensorMode() as mode:
        *parts, grad = (x if x is None else mode.from_tensor(x) for x in (*parts, grad))
        how = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in how]
        fake = run()
    assert [(x.shape, x.stride(), x.dtype) for x in fake] == [(x.shape, x.stride(), x.dtype) for x in real]


def test_a_matrix_whose_places_need_more_than_32_bits_is_refused():
    shape, strides = torch.Size((1, 1, 100, 16)), (0, 0, 2**25) * 3
    device, types = torch.device(DEVICE), (torch.float16, host._dot_precision(torch.float16))
    with pytest.raises(ValueError, match="use the chunkwise form"):
        host.Plan(
            device, *types, shape, 16, strides, 0, (0, 0, 0), None, False, (None,) * 8, 1, 1.0, 0, 0, False, "all"
        )


@pytest.mark.parametrize("slow_at_the_end", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_float32_is_accurate_to_five_digits_far_into_a_text(form, slow_at_the_end):
    L = 4000 if GPU else 200
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, L, 8, generator=generator) for _ in range(3))
    log_decay = -40 * torch.rand(1, 1, L, generator=generator)
    if slow_at_the_end:  # neighbours are close there, while the sum of all that came before is large
        log_decay[..., L * 3 // 4 :] *= 1e-4
    y = linear_attention(*(x.to(DEVICE) for x in (q, k, v, log_decay)), form=form, chunk_size=CHUNK).cpu()
    assert distance(y, linear_attention(q.double(), k.double(), v.double(), log_decay.double(), form="full")) < 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float64}, {"d": 65}, {"e": 65}, {"e": 129, "dtype": torch.bfloat16}, {"form": "recurrent"},
        {"form": "full", "dropout_p": 1.0}, {"v_dtype": torch.bfloat16}, {"fused": False},
    ],
    ids=str,
)  # fmt: skip
def test_calls_the_kernels_do_not_cover_fall_back_to_pytorch(changes, started, monkeypatch):
    options = dict(changes)
    inputs, _ = draw("token", 7, 1, 1, d=options.pop("d", 4), e=options.pop("e", 4))
    dtype = options.pop("dtype", torch.float32)
    monkeypatch.setattr(operator, "USE_TRITON", options.pop("fused", True))
    q, k, v, log_decay = (x.to(DEVICE, dtype) for x in inputs)
    if v_dtype := options.pop("v_dtype", None):
        assert not operator.is_fused(q, k, v.to(v_dtype), "auto", 0.0)
        return
    assert linear_attention(q, k, v, log_decay, **options).isfinite().all()
    assert started == []


def test_the_operands_gpu_decides(monkeypatch):
    cards = (7, 5), (8, 6), (9, 0), (10, 0)
    monkeypatch.setattr(host, "_capability", lambda device: cards[device.index])
    monkeypatch.setattr(host, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "hip", None)
    devices = *(torch.device("cuda", number) for number in range(4)), torch.device("cpu")
    assert [host._runs_on(device) for device in devices] == [False, True, True, False, False]
    monkeypatch.setattr(host, "NEWEST", (99, 0))  # LION_TRITON=force
    assert [host._runs_on(device) for device in devices] == [False, True, True, True, False]


def test_auto_takes_one_chunk_for_short_texts_and_states_for_long_ones(started, monkeypatch):
    monkeypatch.setitem(operator.FULL_UP_TO, "triton", (64, 64))
    for length in (64, 65):
        inputs, _ = draw("token", length, 1, 1)
        started.clear()
        linear_attention(*(x.to(DEVICE, torch.float32) for x in inputs), chunk_size=16)
        assert ("scan" in started) == (length == 65)


@pytest.mark.parametrize("setting", [False, True])
def test_float32_products_follow_pytorchs_precision_setting(setting, monkeypatch):
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = setting
        assert host._dot_precision(torch.float32)[1] == ("tf32" if setting else "ieee")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_memory_grows_linearly_with_the_length(form, decay):
    peaks = []
    for length in (2048, 8192):
        inputs = [None if x is None else x.to(DEVICE, torch.bfloat16) for x in draw(decay, length, 1, 4, d=64, e=64)[0]]
        inputs = [None if x is None else x.requires_grad_() for x in inputs]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        linear_attention(*inputs, form=form).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del inputs
    assert peaks[1] <= 4.2 * peaks[0]
    assert peaks[1] < 12 * 4 * 8192 * 64 * 2  # of q's size; one L×L matrix would be 128 of it


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_bfloat16_error_is_at_most_twice_that_of_softmax_attention():
    for form, decay in itertools.product(FORMS, DECAYS):
        (q, k, v, log_decay), _ = draw(decay, 300, 2, 4, d=64, e=64)
        q, k, v = (x.bfloat16() for x in (q, k, v))
        softmax = distance(
            F.scaled_dot_product_attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE)).cpu(),
            F.scaled_dot_product_attention(q.double(), k.double(), v.double()),
        )
        on_card = [None if x is None else x.to(DEVICE) for x in (q, k, v, log_decay)]
        y = linear_attention(*on_card, form=form).cpu()
        exact = linear_attention(q.double(), k.double(), v.double(), log_decay, form="full")
        assert distance(y, exact) < 2 * softmax, (form, decay)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_pytorchs_forms_copy_nothing_from_the_cpu(form, decay, packed, monkeypatch):
    """Such a copy waits for the GPU, and no CUDA graph can capture it."""
    monkeypatch.setattr(operator, "USE_TRITON", False)
    inputs, _ = draw(decay, LONG, 1, HEADS, "none")
    operands = [None if x is None else x.float().to(DEVICE) for x in inputs]
    how = {"seq_idx": torch.arange(LONG, device=DEVICE)[None] // 50} if packed else {}
    linear_attention(*operands, form=form, chunk_size=64, **how)  # what it allocates once does not belong in a graph
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        linear_attention(*operands, form=form, chunk_size=64, **how)
