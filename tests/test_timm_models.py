"""Checkpoints of DeiT's scripts, whose models timm has, and timm's own files and folders: the same logits."""

import argparse
import json
import shutil

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import deit, vision_transformer

from src.checkpoints.processors import processor_settings
from src.checkpoints.reading import read_checkpoint, read_folder, read_pretrained
from src.errors import UserError
from src.vision.teachers import read_teacher

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_classes": 7}
MODELS = {
    "deit": lambda heads: vision_transformer.VisionTransformer(**SIZES, num_heads=heads),
    "distilled": lambda heads: deit.VisionTransformerDistilled(**SIZES, num_heads=heads),
    "deit3": lambda heads: vision_transformer.VisionTransformer(
        **SIZES, num_heads=heads, no_embed_class=True, init_values=0.1
    ),
}


def save(network: torch.nn.Module, path, **arguments) -> None:
    state = {
        name.replace(".ls1.gamma", ".gamma_1").replace(".ls2.gamma", ".gamma_2"): tensor
        for name, tensor in network.state_dict().items()
    }
    torch.save({"model": state, **({"args": argparse.Namespace(**arguments)} if arguments else {})}, path)


def check_logits(read, model: torch.nn.Module) -> None:
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(read.build()(images).logits, model(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("heads", [3, 1])
def test_a_pth_gives_timms_logits(kind, heads, tmp_path, caplog):
    torch.manual_seed(0)
    model = MODELS[kind](heads).eval()
    for name, tensor in model.named_parameters():
        if "gamma" not in name:
            torch.nn.init.normal_(tensor, std=0.2)
    # The number of heads is that of the model's name; or, where there is none, as DeiT's own files, one per 64 channels.
    save(model, tmp_path / "it.pth", **({"model": "deit_tiny_patch16_224"} if heads == 3 else {}))
    with caplog.at_level("INFO", logger="lion"):
        read = read_pretrained(str(tmp_path / "it.pth"), "it", reads="images")
    assert read.config.num_attention_heads == heads and read.config.num_labels == 7
    assert ("one per 64 channels" in caplog.text) == (heads == 1)
    check_logits(read, model)


@pytest.mark.parametrize("kind", [*MODELS, "no_embed_class"])
def test_a_state_dict_alone_gives_timms_logits(kind, tmp_path, caplog):
    torch.manual_seed(0)
    options = {"num_heads": 1, "no_embed_class": True}
    model = MODELS[kind](1) if kind in MODELS else vision_transformer.VisionTransformer(**SIZES, **options)
    model = model.eval()
    for tensor in model.parameters():
        torch.nn.init.normal_(tensor, std=0.2)
    torch.save(model.state_dict(), tmp_path / "it.pth")
    save_file(model.state_dict(), tmp_path / "it.safetensors")
    for file in ("it.pth", "it.safetensors"):
        read = read_pretrained(str(tmp_path / file), "it", reads="images")
        assert (read.config.layer_scale_init is not None) == (kind == "deit3")
        assert f"{file} does not name mean: assumed to be [0.485,0.456,0.406], as of ImageNet" in caplog.text
        assert "if that is wrong, name a folder that timm's save_for_hf wrote" in caplog.text
        check_logits(read, model)


def test_an_mlp_of_any_width_is_read(tmp_path):
    model = vision_transformer.VisionTransformer(
        32, 8, num_classes=7, embed_dim=88, depth=1, num_heads=2, mlp_ratio=1.37
    )
    torch.save(model.state_dict(), tmp_path / "it.pth")  # 120 / 88 * 88 is less than 120 in floating point
    assert read_checkpoint(tmp_path / "it.pth").config.intermediate_size == 120


def test_a_checkpoint_of_timms_training_gives_its_averages_if_there_are_any(tmp_path):
    torch.manual_seed(0)
    model, averages = MODELS["deit"](1).eval(), MODELS["deit"](1).eval()
    for tensor in (*model.parameters(), *averages.parameters()):
        torch.nn.init.normal_(tensor, std=0.2)
    saved = {"epoch": 3, "arch": "vit_small_patch8_32", "args": argparse.Namespace(lr=1.0), "metric": 71.5}
    saved["state_dict"] = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save(saved, tmp_path / "last.pth.tar")
    check_logits(read_checkpoint(tmp_path / "last.pth.tar"), model)
    torch.save(saved | {"state_dict_ema": averages.state_dict()}, tmp_path / "last.pth.tar")
    check_logits(read_checkpoint(tmp_path / "last.pth.tar"), averages)


@pytest.fixture
def folder(tmp_path):
    """A folder that timm wrote, and its model."""
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 7}
    model = timm.create_model("deit3_small_patch16_224", **options).eval()
    for tensor in model.parameters():
        torch.nn.init.normal_(tensor, std=0.2)
    names = {"label_names": list("gfedcba"), "pretrained_cfg": {"mean": [0.5] * 3, "interpolation": "bilinear"}}
    timm.models.save_for_hf(model, tmp_path / "it", names, safe_serialization="both")
    return tmp_path / "it", model


def test_a_folder_gives_timms_logits(folder, tmp_path, caplog):
    folder, model = folder
    assert (folder / "pytorch_model.bin").is_file()
    expected = processor_settings(32, 0.9, [0.5] * 3) | {"resample": 2}
    for left_out in ("pytorch_model.bin", "model.safetensors"):
        shutil.copytree(folder, tmp_path / left_out, ignore=shutil.ignore_patterns(left_out))
        read = read_folder(tmp_path / left_out)
        assert read.processor == expected and [*read.config.id2label.values()] == list("gfedcba")
        check_logits(read, model)
    assert not caplog.text
    images, student = torch.randn(2, 3, 32, 32), processor_settings(32, mean=[0.5] * 3)
    torch.testing.assert_close(read_teacher(str(folder), list("gfedcba"), student)(images), model(images))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"architecture": "regnety_160"}, "holds a regnety_160 of timm, and only its ViTs and DeiTs can be read"),
        ({"architecture": "vit_base_patch16_rope_224"}, "holds a vit_base_patch16_rope_224 of timm"),
        ({"global_pool": "avg"}, "has global_pool=avg, which no LION image model has"),
        ({"model_args": {"act_layer": "relu"}}, "has act_layer=relu, which no LION image model has"),
        ({"model_args": 3}, "cannot be read"),
        ({"pretrained_cfg": {"input_size": [3, 16, 64]}}, "reads images of 16×64 pixels, and only squares can be"),
        ({"pretrained_cfg": {"input_size": 3}}, "cannot be read"),
        ({"pretrained_cfg": {"crop_mode": "squash"}}, "has crop_mode 'squash', which is unknown"),
        ({"pretrained_cfg": {"crop_pct": "all"}}, "pretrained_cfg in .* has unusable settings"),
        ({"pretrained_cfg": {"interpolation": "magic"}}, "pretrained_cfg in .* has unusable settings"),
    ],
)
def test_mistakes_in_a_folder(folder, change, problem):
    file = folder[0] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=problem):
        read_folder(folder[0])


def test_models_without_positions_are_named(tmp_path):
    model = vision_transformer.VisionTransformer(**SIZES, num_heads=3, pos_embed="none")
    torch.save(model.state_dict(), tmp_path / "it.pth")
    with pytest.raises(UserError, match=r"it\.pth has no position embeddings, pos_embed, so it is no plain ViT"):
        read_checkpoint(tmp_path / "it.pth")


def test_other_models_of_timm_are_named(tmp_path):
    save(
        vision_transformer.VisionTransformer(**SIZES, num_heads=3, qk_norm=True), tmp_path / "it.pth", model="deit_tiny"
    )
    with pytest.raises(UserError, match=r"holds tensors that no LION model has: blocks\.0\.attn\.k_norm\.bias"):
        read_checkpoint(tmp_path / "it.pth")
