"""Image encoders: against their formulas, the authors' outputs, and ViT and DeiT of transformers."""

import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import functional as F

from src.checkpoints.image_adapters import (
    config_from_release,
    config_from_vit,
    settings_from_shapes,
    state_dict_from_release,
    state_dict_from_vit,
)
from src.checkpoints.reading import load_all
from src.lion import LionForImageClassification, LionImageModel, LionVisionConfig
from src.lion.patch_orders import definition_in_orders, snakes
from tests.conftest import PARITY

FORMS = ("full", "chunkwise", "recurrent")
VARIANTS = {
    "softmax": {"mixer": "softmax"},
    "lit": {"mixer": "lion-lit"},
    "d": {"mixer": "lion-d"},
    "s": {"mixer": "lion-s"},
    "d-natural": {"mixer": "lion-d", "patch_order": "snakes"},
    "s-natural": {"mixer": "lion-s", "patch_order": "snakes"},
}
TINY = {
    "image_size": [24, 32], "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_labels": 5, "initializer_range": 0.2, "chunk_size": 4,
}  # fmt: skip
LINEAR = [name for name in VARIANTS if name != "softmax"]


def build(variant: str, **changes) -> LionForImageClassification:
    torch.manual_seed(0)
    return LionForImageClassification(LionVisionConfig(**{**TINY, **VARIANTS[variant], **changes})).eval()


def pixels(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def reference(model: LionForImageClassification, x: torch.Tensor) -> torch.Tensor:
    """The logits by the formulas of the paper and of ViT, one after the other."""
    config, lion = model.config, model.lion
    P, D, H = config.patch_size, config.hidden_size, config.num_attention_heads
    grid = x.shape[2] // P, x.shape[3] // P
    patches = x.unfold(2, P, P).unfold(3, P, P).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    projection = lion.embeddings.projection
    patches = patches @ projection.weight.flatten(1).T + projection.bias
    x = torch.cat([lion.embeddings.class_token.expand(len(x), 1, -1), patches], 1)
    if lion.embeddings.position_embeddings is not None:
        x = x + lion.embeddings.position_embeddings.weight
    norm = lambda layer, x: F.layer_norm(x, (D,), layer.weight, layer.bias, 1e-6)  # noqa: E731
    for layer in lion.layers:
        y, mixer = norm(layer.attention_norm, x), layer.attention
        q, k, v = (
            z.unflatten(-1, (H, -1)).transpose(1, 2) for z in F.linear(y, mixer.qkv.weight, mixer.qkv.bias).chunk(3, -1)
        )
        if config.mixer == "softmax":
            mixed = (q @ k.mT / math.sqrt(D / H)).softmax(-1) @ v
        else:
            phi = (
                (lambda u: F.elu(u) + 1)
                if config.mixer == "lion-lit"
                else (lambda u: F.normalize(F.silu(u) + 0.5, dim=-1))
            )
            orders = snakes(*grid) if config.patch_order == "snakes" else torch.arange(x.shape[1])[None]
            if config.mixer == "lion-lit":
                log_decay = torch.zeros(len(orders) * H, dtype=x.dtype)
            elif config.mixer == "lion-d":
                log_decay = mixer.decay.sigmoid().log()
            else:
                log_decay = (1 - F.linear(y, mixer.decay.weight, mixer.decay.bias).sigmoid()).log().mT
                log_decay = torch.cat([torch.zeros_like(log_decay[..., :1]), log_decay[..., 1:]], -1)
            mixed = definition_in_orders(phi(q), phi(k), v, log_decay, orders)
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), mixer.out.weight, mixer.out.bias)
        y = F.linear(norm(layer.mlp_norm, x), layer.mlp_in.weight, layer.mlp_in.bias)
        x = x + F.linear(0.5 * y * (1 + torch.erf(y / math.sqrt(2))), layer.mlp_out.weight, layer.mlp_out.bias)
    x = norm(lion.final_norm, x)
    return F.linear(x[:, 0] if config.class_token else x.mean(1), model.classifier.weight, model.classifier.bias)


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_are_those_of_the_formulas_in_every_form(variant, class_token):
    model, x = build(variant, class_token=class_token), pixels(2, 3, 24, 32)
    exact = build(variant, class_token=class_token).double()
    expected = reference(exact, x.double())
    expected.logsumexp(1).sum().backward()
    for form in FORMS if variant != "softmax" else ["auto"]:
        logits = model(x, attention_form=form).logits
        torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=1e-5)
        model.zero_grad()
        logits.logsumexp(1).sum().backward()
        for (name, parameter), wanted in zip(model.named_parameters(), exact.parameters()):
            difference = (parameter.grad - wanted.grad).norm() / wanted.grad.norm()
            assert wanted.grad.norm() > 0 and difference < 1e-4, (form, name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_image_alone_is_the_same_as_in_a_batch_and_precision_does_not_matter(variant):
    model, x = build(variant), pixels(3, 3, 24, 32)
    together = model(x).logits
    torch.testing.assert_close(torch.cat([model(image[None]).logits for image in x]), together, atol=1e-5, rtol=1e-5)
    half = build(variant).bfloat16()(x).logits
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), together, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("variant", LINEAR)
@pytest.mark.parametrize("size", [(8, 8), (8, 24), (40, 32), (24, 40)])  # 1, 3, 20 and 15 patches; chunks of 4
def test_any_grid_in_every_form(variant, size):
    model, x = build(variant, num_attention_heads=1), pixels(2, 3, *size)
    full, *others = (model(x, attention_form=form).logits for form in FORMS)
    for other in others:
        torch.testing.assert_close(other, full, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", ["s", "s-natural"])
def test_extreme_decays_are_finite(variant):
    model, x = build(variant), pixels(2, 3, 24, 32)
    for sign in (100, -100):
        for layer in model.lion.layers:
            torch.nn.init.constant_(layer.attention.decay.bias, sign)
        for form in FORMS:
            model.zero_grad()
            model(x, attention_form=form).logits.sum().backward()
            assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


COUNTS = {  # of the paper's sizes, 1,000 classes and 224 px
    ("tiny", "lit", "none"): 5_679_592, ("tiny", "lit", None): 5_717_416, ("tiny", "softmax", None): 5_717_416,
    ("tiny", "d", None): 5_679_628, ("tiny", "d-natural", None): 5_679_664, ("tiny", "s", None): 5_686_540,
    ("tiny", "s-natural", None): 5_693_488, ("small", "lit", "none"): 21_975_016, ("small", "lit", None): 22_050_664,
    ("small", "d", None): 21_975_088, ("small", "d-natural", None): 21_975_160, ("small", "s", None): 22_002_736,
    ("small", "s-natural", None): 22_030_456, ("base", "lit", "none"): 86_416_360, ("base", "softmax", None): 86_567_656,
    ("base", "d", None): 86_416_504, ("base", "d-natural", None): 86_416_648, ("base", "s", None): 86_527_096,
    ("base", "s-natural", None): 86_637_832,
}  # fmt: skip


@pytest.mark.parametrize("size, variant, positions", COUNTS)
def test_parameters_are_as_many_as_published(size, variant, positions):
    heads = {"tiny": 3, "small": 6, "base": 12}[size]
    config = LionVisionConfig(
        hidden_size=64 * heads, num_attention_heads=heads, num_labels=1000, position_embedding=positions,
        **VARIANTS[variant],
    )  # fmt: skip
    with torch.device("meta"):
        model = LionForImageClassification(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[size, variant, positions]


def test_initial_weights():
    model = build("s", hidden_size=64, initializer_range=0.02, layer_scale_init=1e-4)
    layer = model.lion.layers[0]
    assert 0.018 < layer.mlp_in.weight.std() < 0.022
    assert 0.015 < model.lion.embeddings.class_token.std() < 0.025
    assert layer.attention.decay.bias.eq(0).all() and layer.scales.eq(1e-4).all()
    assert build("d", hidden_size=64, num_attention_heads=32).lion.layers[0].attention.decay.std() > 0.5
    bound = 1 / math.sqrt(3 * 8 * 8)  # torch's default for convolutions
    assert 0.9 * bound < model.lion.embeddings.projection.weight.abs().max() <= bound
    spread = build("s-natural", decay_horizon=[2, 32]).lion.layers[0].attention.decay.bias
    torch.testing.assert_close(spread, -torch.tensor([1.0, 31.0, 1.0, 31.0]).log())


def test_positions_are_resized_bicubically_and_the_others_need_none():
    for variant in VARIANTS:
        model = build(variant)
        logits = model(pixels(1, 3, 48, 64)).logits
        assert logits.shape == (1, 5) and logits.isfinite().all()
    embeddings = build("softmax").lion.embeddings
    table = embeddings.position_embeddings.weight
    image = table[1:].T.view(1, 32, 3, 4)
    expected = F.interpolate(image, size=(6, 8), mode="bicubic", align_corners=False)[0].flatten(1).T
    torch.testing.assert_close(embeddings.positions(6, 8), torch.cat([table[:1], expected]))
    assert embeddings.positions(3, 4) is table


def test_a_branch_is_dropped_for_a_whole_image_and_the_others_are_scaled():
    model = build("s", num_hidden_layers=3, drop_path_rate=0.5)
    assert [layer.drop_path_rate for layer in model.lion.layers] == [0, 0.25, 0.5]
    layer, x = model.lion.layers[2].train(), torch.ones(4000, 2, 3)
    dropped = layer.drop_path(x)
    kept = dropped[:, 0, 0] > 0
    assert torch.equal(dropped, torch.where(kept, 2.0, 0.0)[:, None, None].expand_as(x))
    assert 0.45 < kept.float().mean() < 0.55
    assert layer.eval().drop_path(x) is x


def test_features_classifiers_and_intermediate_layers():
    model, x = build("s"), pixels(2, 3, 24, 32)
    output = model(x, output_hidden_states=True)
    features = model.lion(x)
    assert torch.equal(features.pooler_output, features.last_hidden_state.mean(1))
    with_token = build("softmax").lion(x)
    assert torch.equal(with_token.pooler_output, with_token.last_hidden_state[:, 0])
    assert len(output.hidden_states) == 3 and output.hidden_states[0].shape == (2, 13, 32)
    patches = model.lion.get_intermediate_layers(x, 1)[0]
    torch.testing.assert_close(patches, features.last_hidden_state[:, 1:])
    first, last = model.lion.get_intermediate_layers(x, [0, -1], norm=False, reshape=True)
    torch.testing.assert_close(first.flatten(2).mT, output.hidden_states[1][:, 1:])
    torch.testing.assert_close(last[0, :, 2, 3], output.hidden_states[2][0, 12])
    for wrong in (0, 3, [2]):
        with pytest.raises(ValueError, match="layers"):
            model.lion.get_intermediate_layers(x, wrong)
    with pytest.raises(ValueError, match=r"numbered from 0 to 1 \(got 2\)"):
        model.lion.get_intermediate_layers(x, [2])
    model.reset_classifier(0)
    assert torch.equal(model(x).logits, features.pooler_output) and model.config.num_labels == 0
    model.reset_classifier(3)
    assert model(x).logits.shape == (2, 3) and model.config.id2label[2] == "LABEL_2"
    assert build("s", num_labels=0)(x).logits.shape == (2, 32)
    loss = model(x, labels=torch.tensor([0, 2])).loss
    torch.testing.assert_close(loss, F.cross_entropy(model(x).logits, torch.tensor([0, 2])))


@pytest.mark.parametrize("variant", ["s-natural", "softmax"])
def test_gradient_checkpointing_changes_nothing(variant):
    gradients = []
    for checkpointing in (False, True):
        model = build(variant).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(pixels(2, 3, 24, 32), labels=torch.tensor([0, 1])).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("variant", ["softmax", "s", "d-natural"])
def test_an_exported_model_accepts_batches_of_all_sizes(variant):
    model = build(variant)
    batch = {0: torch.export.Dim("batch", max=64)}
    exported = torch.export.export(model, (pixels(3, 3, 24, 32),), dynamic_shapes=(batch,), strict=False).module()
    for size in (2, 7):
        x = pixels(size, 3, 24, 32)
        torch.testing.assert_close(exported(x).logits, model(x).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("variant", LINEAR)
def test_the_attention_matrix_multiplies_the_values(variant):
    model, x = build(variant, num_hidden_layers=1), pixels(1, 3, 24, 32)
    matrix = model(x, output_attentions=True).attentions[0]
    assert matrix.shape == (1, 2, 13, 13)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(1, 2, 13), atol=1e-4, rtol=0)
    layer = model.lion.layers[0]
    y = layer.attention_norm(model.lion.embeddings(x))
    mixed, _ = layer.attention(y, None, None, "full", orders=snakes(3, 4) if "natural" in variant else None)
    expected = (matrix @ layer.attention.values(y)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=1e-4)


def test_a_saved_folder_is_the_same_model(tmp_path):
    model, x = build("s-natural", distillation_token=True, layer_scale_init=0.1), pixels(1, 3, 24, 32)
    model.save_pretrained(tmp_path)
    loaded = LionForImageClassification.from_pretrained(tmp_path)
    bare = LionImageModel.from_pretrained(tmp_path)

    for ours, theirs in ((model, loaded), (model.lion, bare)):
        weights, expected = theirs.state_dict(), ours.state_dict()
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
    # The rounding of a matrix product depends on where in memory its operands are.
    torch.testing.assert_close(loaded(x).logits, model(x).logits, atol=1e-6, rtol=0)
    torch.testing.assert_close(bare(x).last_hidden_state, model.lion(x).last_hidden_state, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"image_size": 30}, "image_size=30 is not divisible by patch_size=8"),
        ({"mixer": "hydra"}, r"mixer of images must be one of .*hydra"),
        ({"patch_order": "spiral"}, "patch_order must be one of raster, snakes"),
        ({"hidden_size": 33}, "not divisible by num_attention_heads"),
        ({"drop_path_rate": 1.0}, "drop_path_rate must be"),
        ({"mixer": "lion-lit", "decay_horizon": [2, 8]}, "lion-lit has no decay_horizon"),
        ({"distillation_classifier": True}, "needs distillation_token"),
        ({"feature_map": "none"}, "feature_map=none does not apply"),
        ({"position_embedding": "rope"}, "position_embedding of images must be learned or none"),
    ],
)
def test_settings_that_cannot_be_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        build("s", **changes)


def test_images_that_do_not_fit_are_named():
    model = build("s")
    for x, message in ((pixels(1, 3, 24, 30), "24×30 pixels are not divisible"), (pixels(1, 1, 24, 32), "must be")):
        with pytest.raises(ValueError, match=message):
            model(x)


VIT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "image_size": 24,
    "patch_size": 8, "num_labels": 7, "initializer_range": 0.2,
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["ViTForImageClassification", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher", "ViTModel"],
)
def test_softmax_is_vit_and_deit(name, tmp_path):
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, name)
    theirs = kind(kind.config_class(**VIT)).eval()
    theirs.save_pretrained(tmp_path)  # transformers 5 has other names in memory
    state = load_file(tmp_path / "model.safetensors")
    config = config_from_vit(theirs.config.to_dict(), state, "it")
    ours = LionForImageClassification(config).eval()
    load_all(ours, state_dict_from_vit(state), "it")
    x = pixels(2, 3, 24, 24)
    expected = theirs(x).logits if name != "ViTModel" else theirs(x).last_hidden_state[:, 0]
    torch.testing.assert_close(ours(x).logits, expected, atol=1e-5, rtol=0)


FILES = sorted((PARITY / "vision").glob("*.safetensors")) if (PARITY / "vision").is_dir() else []


@pytest.mark.skipif(not FILES, reason="needs reference data beside the checkout")
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_the_authors_outputs(file):
    with safe_open(file, "pt") as opened:
        settings = json.loads(opened.metadata()["config"])
    tensors = load_file(file)
    state = {name.removeprefix("model."): x for name, x in tensors.items() if name.startswith("model.")}
    config = config_from_release(settings, file.name)
    model = LionForImageClassification(config).eval()
    load_all(model, state_dict_from_release(state, config), file.name)
    mixed = []
    model.lion.layers[0].attention.out.register_forward_hook(lambda layer, inputs, output: mixed.append(output))
    for form in FORMS:
        output = model(tensors["in.pixel_values"], attention_form=form, output_hidden_states=True)
        for name, x in (("attention_0", mixed[-1]), ("hidden", output.hidden_states[-1]), ("logits", output.logits)):
            torch.testing.assert_close(x, tensors[f"out.{name}"], atol=1e-5, rtol=0)
    given = {name: settings[name] for name in ("mask_type", "order", "cls_tok")}
    found = settings_from_shapes(state, {**given, "input_size": settings["img_size"]}, file.name)
    heads = {} if "Lit" != settings["mask_type"] else {"num_heads": settings["num_heads"]}  # LIT's are in no shape
    assert config_from_release({**found, **heads}, file.name).to_dict() == config.to_dict()
