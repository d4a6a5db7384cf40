"""The options of an encoder beyond BERT's: each against its formula, and all of them in every form, masked, packed, in
segments, saved and compiled."""

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.nn import functional as F

from src.lion import LionConfig, LionForMaskedLM, LionModel, channel_decay
from src.lion.configuration_lion import OPTIONS
from src.lion.cpu import rotate
from src.lion.linear_attention import definition
from src.lion.mixers import FEATURE_MAPS, MIXERS, rotation, spread_horizons

V, D, HEADS, LENGTH = 64, 32, 4, 23
FORMS = ("full", "recurrent", "chunkwise")
MODERN = {"norm": "pre", "mlp": "geglu", "position_embedding": "rope", "bias": False, "type_vocab_size": 0}
# Cases together use each option with each mixer that has it.
CASES = {
    "softmax-modern": ("softmax", MODERN),
    "softmax-rest": ("softmax", {"normalization": "rmsnorm", "short_conv": 5, "value_gate": True}),
    "softmax-none": ("softmax", {"position_embedding": "none", "short_conv": 3}),
    "lit-modern": ("lion-lit", {**MODERN, "short_conv": 3, "value_gate": True}),
    "lit-rows": ("lion-lit", {"feature_map": "sigmoid", "normalize_rows": True, "normalization": "rmsnorm"}),
    "d-modern": ("lion-d", {**MODERN, "decay_horizon": [2, 64], "key_weight": "linear", "normalization": "rmsnorm"}),
    "d-rest": (
        "lion-d",
        {"short_conv": 5, "value_gate": True, "feature_map": "silu", "normalize_rows": True, "separate_decays": True},
    ),
    "s-modern": ("lion-s", {**MODERN, "decay_horizon": [2, 64], "key_weight": "sqrt", "short_conv": 5}),
    "s-rest": (
        "lion-s",
        {"value_gate": True, "feature_map": "silu", "normalize_rows": True, "separate_decays": True, "norm": "pre"},
    ),
    "s-learned": ("lion-s", {"position_embedding": "learned", "feature_map": "sigmoid", "normalization": "rmsnorm"}),
    "d-channels": ("lion-d", {"channel_decays": True, "long_reach": 64, "norm": "pre", "key_weight": "sqrt"}),
    "d-channels-separate": ("lion-d", {"channel_decays": True, "separate_decays": True}),
    "s-channels": ("lion-s", {"channel_decays": True, "key_weight": "linear", **MODERN}),
    "s-channels-separate": (
        "lion-s",
        {"channel_decays": True, "separate_decays": True, "long_reach": 64, "short_conv": 3},
    ),
    "hydra": ("hydra", {"norm": "pre", "normalization": "rmsnorm", "position_embedding": "learned"}),
    "hydra-bias": ("hydra", {"bias": False, "headdim": 16, "d_state": 8}),
}
WITH_FORMULAS = ("lion-lit", "lion-d", "lion-s", "softmax")  # those that `reference` computes
WITH_STATES = [name for name, (mixer, _) in CASES.items() if mixer != "softmax"]


def build(case: str, kind: type = LionForMaskedLM, **changes):
    mixer, options = CASES[case]
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": 3, "max_position_embeddings": 64, "chunk_size": 8}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.2}
    sizes |= (
        {"headdim": 16, "d_state": 8} if mixer == "hydra" else {"num_attention_heads": HEADS, "intermediate_size": 48}
    )
    model = kind(LionConfig(mixer=mixer, **{**sizes, **options, **changes}))
    with torch.no_grad():  # away from 0 and 1, so that every parameter counts
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "conv" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def draw(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(1, V, (batch, length), generator=torch.Generator().manual_seed(0))


def test_the_cases_use_every_option_with_every_mixer_that_has_it():
    used = {(name, mixer) for mixer, options in CASES.values() for name in options}
    possible = {(name, mixer) for name, mixers in OPTIONS.items() for mixer in mixers}
    assert possible - used <= {("rope_theta", mixer) for mixer in MIXERS} | {("bias", "hydra")}


# Each option against its formula


def reference(model: LionModel, ids: Tensor) -> Tensor:
    """The encoder for one text without padding, (L,) to (L, D), one step after the other, in float64."""
    config, state = model.config, {name: x.double() for name, x in model.state_dict().items()}

    def norm(x: Tensor, name: str, eps: float = config.layer_norm_eps) -> Tensor:
        if config.normalization == "rmsnorm":
            return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * state[f"{name}.weight"]
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * state[f"{name}.weight"] + bias(name)

    def bias(name: str) -> Tensor | float:
        return state.get(f"{name}.bias", 0.0)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"].mT + bias(name)

    L, pre = len(ids), config.norm == "pre"
    x = state["embeddings.word_embeddings.weight"][ids]
    if config.type_vocab_size:
        x = x + state["embeddings.token_type_embeddings.weight"][0]
    kind = config.position_embedding or ("learned" if config.mixer in ("lion-lit", "softmax") else "none")
    if kind == "learned":
        x = x + state["embeddings.position_embeddings.weight"][:L]
    x = norm(x, "embeddings.LayerNorm")
    for number in range(config.num_hidden_layers):
        at = f"layers.{number}"
        u = norm(x, f"{at}.attention_norm") if pre and number else x
        qkv = linear(u, f"{at}.attention.qkv")
        if W := config.short_conv:
            weight, padded = state[f"{at}.attention.conv.weight"][:, 0], F.pad(qkv, (0, 0, W // 2, W // 2))
            qkv = sum(weight[:, tap] * padded[tap : tap + L] for tap in range(W))
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(0, 1) for y in qkv.chunk(3, -1))  # (H, L, D/H)
        if config.feature_map == "silu":
            q, k = (y / (1 + (-y).exp()) + 0.5 for y in (q, k))
            q, k = (y / y.square().sum(-1, keepdim=True).sqrt() for y in (q, k))
        if config.feature_map == "sigmoid":
            q, k = (1 / (1 + (-y).exp()) for y in (q, k))
        if kind == "rope":
            size = q.shape[-1]
            for y in (q, k):
                turned = y.clone()
                for position in range(L):
                    for i in range(size // 2):
                        angle = position * config.rope_theta ** (-2 * i / size)
                        pair = y[:, position, i], y[:, position, i + size // 2]
                        turned[:, position, i] = pair[0] * math.cos(angle) - pair[1] * math.sin(angle)
                        turned[:, position, i + size // 2] = pair[1] * math.cos(angle) + pair[0] * math.sin(angle)
                y.copy_(turned)
        if config.mixer == "softmax":
            y = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        else:
            decays = {}
            if config.mixer == "lion-d":
                past, *future = state[f"{at}.attention.decay"].sigmoid().log().split(HEADS)  # (H,) or (H, D/H)
            elif config.mixer == "lion-s":
                logits = linear(u, f"{at}.attention.decay").mT  # (H or H · D/H, L)
                logits = logits.unflatten(0, (-1, D // HEADS)).mT if config.channel_decays else logits
                past, *future = (1 - logits.sigmoid()).log().split(HEADS)
            if config.mixer != "lion-lit":
                names = ("log_decay", "log_decay_future")
                decays = {n: y if config.mixer == "lion-d" else y[None] for n, y in zip(names, (past, *future))}
                λ = past.exp() if config.channel_decays else past.exp()[..., None]
                λ = λ[:, None] if config.mixer == "lion-d" else λ
                weight = {"none": 1 + 0 * λ, "linear": 2 * (1 - λ), "sqrt": (4 / 3 * (1 - λ * λ)).sqrt()}
                k = k * weight[config.key_weight]
            mix = channel_decay.definition if config.channel_decays else definition
            y = mix(q[None], k[None], v[None], **decays, normalize=config.normalize_rows)[0]
        y = y.transpose(0, 1).flatten(1)
        if config.value_gate:
            y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * state[f"{at}.attention.norm.weight"]
            y = y * F.silu(linear(u, f"{at}.attention.gate"))
        elif config.mixer == "lion-lit":
            y = norm(y, f"{at}.attention.norm", 1e-5)
        x = x + linear(y, f"{at}.attention.out")
        x = x if pre else norm(x, f"{at}.attention_norm")
        u = linear(norm(x, f"{at}.mlp_norm") if pre else x, f"{at}.mlp_in")
        u = F.gelu(u.chunk(2, -1)[0]) * u.chunk(2, -1)[1] if config.mlp == "geglu" else F.gelu(u)
        x = x + linear(u, f"{at}.mlp_out")
        x = x if pre else norm(x, f"{at}.mlp_norm")
    return norm(x, "final_norm") if pre else x


@pytest.mark.parametrize("case", [name for name, (mixer, _) in CASES.items() if mixer in WITH_FORMULAS])
def test_an_encoder_equals_its_formulas(case):
    model, ids = build(case, LionModel), draw()
    with torch.no_grad():
        expected = torch.stack([reference(model, text) for text in ids])
        # Decays and rotations are float32.
        torch.testing.assert_close(model.double()(ids).last_hidden_state, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("mixer", ["lion-d", "lion-s"])
@pytest.mark.parametrize("separate", [False, True])
def test_horizons_are_spread_over_the_heads(mixer, separate):
    config = LionConfig(
        mixer=mixer, hidden_size=D, num_attention_heads=HEADS, num_hidden_layers=1, decay_horizon=[2, 128],
        separate_decays=separate, vocab_size=V,
    )  # fmt: skip
    attention = LionModel(config).layers[0].attention
    λ = attention.log_decay(torch.zeros(1, 1, D)).exp().flatten()
    horizons = torch.tensor([2.0, 8.0, 32.0, 128.0]).repeat(1 + separate)
    torch.testing.assert_close(1 / (1 - λ), horizons, rtol=1e-4, atol=0)


@pytest.mark.parametrize("case", ["d-rest", "s-rest", "s-modern", "s-learned"])
def test_widening_changes_the_slower_half_of_the_heads_and_only_them(case):
    model = build(case, LionModel)
    model.config.decay_horizon = [4, 400]
    length = 64 if case == "s-learned" else 128  # all its positions
    ids = torch.randint(V, (8, length), generator=torch.Generator().manual_seed(0))

    def measure() -> list[Tensor]:
        found = []

        def read(layer, inputs, output):
            decays = layer.attention.log_decays(layer.before_mixing(inputs[0]))
            found.append(-1 / decays.double().mean((0, 2)).view(-1, HEADS))

        hooks = [layer.register_forward_hook(read) for layer in model.layers]
        model(ids)
        for hook in hooks:
            hook.remove()
        return found

    before, weights = measure(), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.widen_horizons()
    for number, (old, new) in enumerate(zip(before, measure())):
        if number == 0:  # whose input is the same
            slower = old.argsort(1)[:, HEADS // 2 :]
            expected = new.new_tensor(spread_horizons(model.config)[HEADS // 2 :]).expand_as(slower)
            torch.testing.assert_close(new.gather(1, slower), expected, rtol=1e-5, atol=0)
            faster = old.argsort(1)[:, : HEADS // 2]
            assert torch.equal(new.gather(1, faster), old.gather(1, faster))
        assert (new.amax(1) > 399).all()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, weights[name])}
    kind = "decay" if case.startswith("d") else "decay.bias"
    assert changed == {f"layers.{number}.attention.{kind}" for number in range(3)}
    for name in changed:
        assert ((model.state_dict()[name] != weights[name]).view(-1, HEADS).sum(1) == HEADS // 2).all()


@pytest.mark.parametrize("mixer", ["lion-d", "lion-s"])
@pytest.mark.parametrize("horizon", [None, [2, 128]])
def test_channels_start_with_the_decays_of_hippo(mixer, horizon):
    sizes = {"hidden_size": D, "num_attention_heads": HEADS, "num_hidden_layers": 1, "vocab_size": V}
    config = LionConfig(mixer=mixer, channel_decays=True, decay_horizon=horizon, separate_decays=True, **sizes)
    log_decay = LionModel(config).layers[0].attention.log_decay(torch.zeros(1, 1, D))
    log_decay = log_decay.view(2, HEADS, D // HEADS)  # of past and future
    low, high = horizon or (10, 1000)
    for h in range(HEADS):
        horizon_of_head = low * (high / low) ** (h / (HEADS - 1))
        expected = torch.arange(1, D // HEADS + 1) * math.log(1 - 1 / horizon_of_head)
        torch.testing.assert_close(log_decay[:, h], expected.expand(2, -1), rtol=1e-4, atol=0)


def test_long_horizons_of_channels_depend_on_the_token_in_bfloat16_too():
    torch.manual_seed(0)
    config = LionConfig(mixer="lion-s", channel_decays=True, decay_horizon=[10, 10000], hidden_size=D, vocab_size=V,
                        num_attention_heads=HEADS, num_hidden_layers=1)  # fmt: skip
    attention, x = LionModel(config).layers[0].attention, torch.randn(1, 50, D)
    exact = attention.log_decay(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = attention.log_decay(x)
    assert found.dtype == torch.float32 and exact.std(2).min() > 0
    torch.testing.assert_close(found, exact, rtol=2e-3, atol=0)


def test_long_reach_is_three_options_in_one():
    config = LionConfig(long_reach=1000)
    assert config.options() == {"decay_horizon": [2, 1000], "feature_map": "sigmoid", "normalize_rows": True}
    assert LionConfig(**config.options()).to_dict() == config.to_dict()
    other = LionConfig(long_reach=1000, decay_horizon=[4, 50], feature_map="silu")
    assert other.options() == {"decay_horizon": [4, 50], "feature_map": "silu", "normalize_rows": True}


def test_one_head_has_the_geometric_mean_of_the_horizons():
    assert spread_horizons(LionConfig(num_attention_heads=1, decay_horizon=[2, 128])) == [16]


def test_a_feature_map_keeps_the_precision_of_autocast_on_a_gpu():
    with FakeTensorMode(), torch.autocast("cuda", torch.bfloat16):
        x = torch.empty(2, 3, 4, 8, dtype=torch.bfloat16, device="cuda")
        assert all(feature_map(x).dtype == torch.bfloat16 for feature_map in FEATURE_MAPS.values())


def test_key_weights_of_a_decay_that_rounds_to_1_have_finite_gradients():
    mixer = LionModel(LionConfig(mixer="lion-d", num_hidden_layers=1, key_weight="sqrt")).layers[0].attention
    log_decay = torch.tensor([-0.0, -1e-30, -1.0], requires_grad=True)
    mixer.weigh(torch.ones(1, 3, 2, 4), log_decay).sum().backward()
    assert log_decay.grad.isfinite().all()


def test_widening_never_narrows_a_horizon():
    model = build("d-modern", LionModel, decay_horizon=[2, 4])
    for layer in model.layers:
        layer.attention.decay.data = torch.tensor([0.0, 1.0, 5.0, 7.0])  # horizons of 148 and 1,097 tokens
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.widen_horizons()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])


@pytest.mark.parametrize(
    "case, horizon", [("s-rest", None), ("lit-modern", [2, 8]), ("hydra", [2, 8]), ("s-channels", [2, 8])]
)
def test_only_configured_horizons_of_decays_are_widened(case, horizon):
    model = build(case, LionModel)
    model.config.decay_horizon = horizon
    with pytest.raises(ValueError, match="only lion-d and lion-s with a decay_horizon"):
        model.widen_horizons()


# All of them, in every way that a model is used


@pytest.mark.parametrize("form", ["recurrent", "chunkwise", "auto"])
@pytest.mark.parametrize("case", WITH_STATES)
def test_every_form_gives_the_same_logits_and_gradients(case, form):
    model, ids = build(case), draw()
    mask = torch.ones_like(ids)
    mask[0, 17:] = 0
    labels = ids.where(mask.bool(), -100)
    results = []
    for one in (form, "full"):
        output = model(ids, attention_mask=mask, labels=labels, attention_form=one)
        grads = torch.autograd.grad(output.loss, list(model.parameters()), allow_unused=True)
        results.append([output.logits * mask[..., None], *(grad for grad in grads if grad is not None)])
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("form", ["full", "auto", "chunkwise", "recurrent"])
@pytest.mark.parametrize("case", CASES)
def test_padding_and_packing_change_no_output(case, form):
    model, texts = build(case, LionModel), [draw(1, length)[0] for length in (9, 1, 13)]
    alone = torch.cat([model(text[None], attention_form=form).last_hidden_state[0] for text in texts])
    packed = torch.cat(texts)[None]
    seq_idx = torch.repeat_interleave(torch.arange(3), torch.tensor([9, 1, 13]))[None]
    y = model(packed, seq_idx=seq_idx, attention_form=form).last_hidden_state[0]
    torch.testing.assert_close(y, alone, atol=1e-5, rtol=1e-5)
    batch, mask = torch.zeros(3, 15, dtype=torch.long), torch.zeros(3, 15, dtype=torch.long)
    for row, text in enumerate(texts):
        batch[row, : len(text)], mask[row, : len(text)] = text, 1
    y = model(batch, attention_mask=mask, attention_form=form).last_hidden_state[mask.bool()]
    torch.testing.assert_close(y, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("segment_length", [1, 5, LENGTH])
@pytest.mark.parametrize("case", WITH_STATES)
def test_a_long_text_in_segments_gives_the_outputs_of_one_call(case, segment_length):
    model, ids = build(case, LionModel), draw()
    mask = torch.ones_like(ids)
    mask[0, 17:] = 0
    expected = model(ids, attention_mask=mask).last_hidden_state
    actual = model.encode_long(ids, mask, segment_length=segment_length)
    real = mask.bool()
    torch.testing.assert_close(actual[real], expected[real], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_a_saved_model_has_its_options(case, tmp_path):
    model, ids = build(case), draw()
    model.save_pretrained(tmp_path)
    loaded = LionForMaskedLM.from_pretrained(tmp_path)
    for name in OPTIONS:
        assert getattr(loaded.config, name) == getattr(model.config, name)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=0, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_the_attention_matrix_is_that_of_the_outputs(case):
    model = build(case, LionModel)
    attention = model.layers[1].attention
    x = torch.randn(2, LENGTH, D)
    options = {"rotation": model._rotation(torch.arange(LENGTH)[None])}
    y, matrix = attention(x, None, None, "full", True, **options)
    assert matrix.shape == (2, attention.config.num_attention_heads, LENGTH, LENGTH)
    if case.startswith("hydra") or attention.gate is not None:
        return
    v = attention.project(x, None, None)[2]
    torch.testing.assert_close(y, (matrix @ v).transpose(1, 2).flatten(2), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["softmax-modern", "lit-modern", "d-rest", "s-modern", "s-rest", "s-channels"])
def test_an_encoder_compiles_as_one_graph(case):
    model, ids = build(case, LionModel, num_hidden_layers=2), draw()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    expected = model(ids).last_hidden_state
    torch.testing.assert_close(compiled(ids).last_hidden_state, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["softmax-modern", "lit-rows", "d-rest", "s-modern", "hydra"])
def test_an_exported_encoder_accepts_texts_of_all_shapes(case):
    model, sizes = build(case, LionModel, num_hidden_layers=1), {0: Dim("batch", max=64), 1: Dim("length", max=64)}
    ids, mask = draw(3), torch.ones(3, LENGTH, dtype=torch.long)
    exported = torch.export.export(model, (ids, mask), dynamic_shapes=(sizes, sizes), strict=False).module()
    for batch, length in ((2, 2), (4, 40), (8, 64)):
        ids = draw(batch, length)
        mask = (torch.arange(length) < torch.arange(1, batch + 1)[:, None] * length / batch).long()
        actual = exported(ids, mask).last_hidden_state
        torch.testing.assert_close(actual, model(ids, mask).last_hidden_state, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("case", ["softmax-rest", "s-modern"])  # with and without learned positions, of which 64
def test_in_the_full_form_an_exported_encoder_needs_no_operator_of_ours(case):
    model = build(case, attention_form="full", num_hidden_layers=1)
    sizes = {0: Dim("batch", max=64), 1: Dim("length", max=64)}
    given = draw(3), torch.ones(3, LENGTH, dtype=torch.long)
    exported = torch.export.export(model, given, dynamic_shapes=(sizes, sizes), strict=False)
    operators = {str(node.target) for node in exported.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    assert operators and all(name.startswith("aten.") for name in operators)


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_has_a_gradient(case):
    model, ids = build(case).train(), draw()
    model(ids, labels=ids).loss.backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing


def test_the_defaults_are_not_in_the_settings():
    assert not OPTIONS.keys() & LionConfig().to_dict().keys()
    assert LionConfig(short_conv=5).to_dict()["short_conv"] == 5


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"mixer": "softmax", "feature_map": "silu"}, "softmax has no feature_map.*lion-lit"),
        ({"mixer": "lion-lit", "decay_horizon": [2, 8]}, "lion-lit has no decay_horizon.*lion-s"),
        ({"mixer": "hydra", "short_conv": 3}, "hydra has no short_conv"),
        ({"mixer": "hydra", "position_embedding": "rope"}, "hydra cannot rotate"),
        ({"rope_theta": 100.0}, "rope_theta needs position_embedding: rope"),
        ({"short_conv": 4}, "short_conv must be 0 or odd"),
        ({"short_conv": -1}, "short_conv must be 0 or odd"),
        ({"norm": "middle"}, "norm must be one of post, pre"),
        ({"position_embedding": "sine"}, "position_embedding must be one of null, learned, rope, none"),
        ({"decay_horizon": [1, 8]}, "decay_horizon must be"),
        ({"decay_horizon": [8, 2]}, "decay_horizon must be"),
        ({"decay_horizon": 8}, "decay_horizon must be"),
        ({"decay_horizon": [2, float("inf")]}, "decay_horizon must be"),
        ({"normalize_rows": True}, "feature_map"),
        ({"normalize_rows": True, "feature_map": "silu", "position_embedding": "rope"}, "normalize_rows.*rope"),
        ({"key_weight": "linear", "separate_decays": True}, "key_weight.*separate_decays"),
        ({"mixer": "softmax", "long_reach": 64}, "softmax has no decays, which long_reach spreads"),
        ({"mixer": "lion-lit", "channel_decays": True}, "lion-lit has no channel_decays"),
        ({"long_reach": 64, "position_embedding": "rope"}, "normalize_rows.*rope"),
        ({"hidden_size": 36, "num_attention_heads": 12, "position_embedding": "rope"}, "rope rotates pairs"),
    ],
)
def test_an_option_that_cannot_be_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        LionConfig(**settings)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_rotation_has_the_gradients_of_its_formula(dtype, transposed):
    x = torch.randn(2, 3, 7, 8).to(dtype)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x
    angles = rotation(torch.arange(7)[None] + torch.tensor([[0], [5]]), 8, 100.0)
    probe, results = torch.randn(x.shape).to(dtype), []
    for form in ("fast", "formula"):
        y = x.detach().requires_grad_()
        if form == "fast":
            turned = rotate(y, angles)
        else:
            numbers = torch.complex(*y.to(torch.promote_types(dtype, torch.float32)).chunk(2, -1))
            numbers = numbers * torch.complex(*angles)
            turned = torch.cat([numbers.real, numbers.imag], -1).to(dtype)
        results.append((turned, torch.autograd.grad((turned * probe).sum(), y)[0]))
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-6
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
