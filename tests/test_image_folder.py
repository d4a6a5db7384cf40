"""Image models of others and of ours: read without running code, and published as folders that plain transformers loads.

Needs no Composer, so that it also runs under the newest transformers (`make test-compat`).
"""

import argparse
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PARITY
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    CLIPImageProcessor,
    DeiTConfig,
    DeiTForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    pipeline,
)

from src.checkpoints.image_adapters import RENAMED, RENAMED_IN_BLOCK
from src.checkpoints.processors import processor_settings
from src.checkpoints.reading import read_checkpoint, read_pretrained
from src.errors import UserError
from src.lion import LionForImageClassification, LionVisionConfig
from src.publish import commands as hub
from src.publish import folder as hub_folder

SIZES = {"image_size": 24, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
VARIANTS = {
    "Lit Normal": {"mixer": "lion-lit"}, "Decay S": {"mixer": "lion-d", "patch_order": "snakes"},
    "Selective Normal": {"mixer": "lion-s", "position_embedding": "learned"},
    "Selective S": {"mixer": "lion-s", "patch_order": "snakes", "class_token": False}, "Softmax Normal": {"mixer": "softmax"},
}  # fmt: skip


def model_of(variant: str = "Selective S", labels: int = 5) -> LionForImageClassification:
    torch.manual_seed(0)
    return LionForImageClassification(
        LionVisionConfig(**SIZES, **VARIANTS[variant], num_labels=labels, initializer_range=0.3)
    ).eval()


def release(model: LionForImageClassification, variant: str) -> tuple[dict, dict]:
    """A model's settings and tensors in the names of the authors' release."""
    config, (mask, order) = model.config, variant.split()
    settings = {
        "mask_type": mask, "order": order, "img_size": 24, "patch_size": 8, "in_chans": 3, "embed_dim": 16, "depth": 2,
        "num_heads": 2, "mlp_ratio": 4.0, "num_classes": 5, "cls_tok": config.class_token,
        "pos_emb": config.has_positions, "qkv_bias": True,
    }  # fmt: skip
    theirs, state = {}, model.state_dict()
    for name, tensor in state.items():
        if ".layers." in name:
            _, _, number, rest = name.split(".", 3)
            other = next((o, r) for o, r in RENAMED_IN_BLOCK.items() if rest.startswith(r.rstrip(".")))
            if rest.startswith("attention.decay"):
                halves = tensor.chunk(2) if config.num_orders > 1 else [tensor]
                for key, half in zip(("a_i", "a2_i"), halves):
                    theirs[f"blocks.{number}.attn.{key}{rest.removeprefix('attention.decay')}"] = half.clone()
                continue
            theirs[f"blocks.{number}.{other[0]}{rest.removeprefix(other[1])}"] = tensor
        else:
            theirs_name, ours = next((o, r) for o, r in RENAMED.items() if name.startswith(r))
            shape = (1, 1, 16) if "token" in name else (1, *tensor.shape) if "position" in name else tensor.shape
            theirs[theirs_name + name.removeprefix(ours)] = tensor.reshape(shape).clone()
    return settings, theirs


def images(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 3, 24, 24, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_files_of_the_release_and_of_deits_scripts(variant, tmp_path):
    model = model_of(variant)
    settings, state = release(model, variant)
    save_file(
        {f"model.{name}": tensor.contiguous() for name, tensor in state.items()},
        tmp_path / "it.safetensors",
        {"config": json.dumps(settings)},
    )
    arguments = {
        "model": "lion_tiny_patch16_224",
        "input_size": 24,
        "mask_type": settings["mask_type"],
        "order": settings["order"],
    }
    arguments |= {"cls_tok": settings["cls_tok"], "pos_emb": settings["pos_emb"]}
    # The number of heads is in the decays; of other models, in the name, and these have two.
    if settings["mask_type"] in ("Lit", "Softmax"):
        arguments["model"] = ""
    torch.save({"model": state, "args": argparse.Namespace(**arguments), "epoch": 3}, tmp_path / "it.pth")
    with torch.no_grad():
        expected = model(images()).logits
        read = read_checkpoint(tmp_path / "it.safetensors")
        assert torch.equal(read.build()(images()).logits, expected)
        assert read.processor == processor_settings(24)
        if settings["mask_type"] not in ("Lit", "Softmax"):
            assert torch.equal(read_checkpoint(tmp_path / "it.pth").build()(images()).logits, expected)


def test_a_pth_is_read_without_executing_it(tmp_path):
    class Hostile:
        def __reduce__(self):
            return (exec, ("raise SystemExit('executed')",))

    torch.save({"model": {}, "args": Hostile()}, tmp_path / "it.pth")
    with pytest.raises(UserError, match=r"it\.pth"):
        read_checkpoint(tmp_path / "it.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(UserError, match=r"plain\.pth"):
        read_checkpoint(tmp_path / "plain.pth")


@pytest.mark.parametrize("kind", ["vit", "deit"])
def test_vit_and_deit_of_transformers(kind, tmp_path):
    torch.manual_seed(0)
    config_class, model_class = {
        "vit": (ViTConfig, ViTForImageClassification),
        "deit": (DeiTConfig, DeiTForImageClassification),
    }[kind]
    theirs = model_class(config_class(**SIZES, intermediate_size=32, id2label=dict(enumerate("abcde")))).eval()
    theirs.save_pretrained(tmp_path)
    stored = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 24, "width": 24},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(stored))
    read = read_pretrained(str(tmp_path), "it", reads="images")
    assert read.processor["size"] == {"height": 24, "width": 24} and not read.processor["do_center_crop"]
    with torch.no_grad():
        torch.testing.assert_close(read.build()(images()).logits, theirs(images()).logits, atol=1e-5, rtol=0)
    with pytest.raises(UserError, match="reads images; give a model that reads texts"):
        read_pretrained(str(tmp_path), "it")
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(UserError, match=r"preprocessor_config\.json is corrupt"):
        read_pretrained(str(tmp_path), "it", reads="images")


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[LionForImageClassification, Path]:
    """A model, and the folder that importing it wrote and verified."""
    folder, variant = tmp_path_factory.mktemp("published"), "Selective S"
    model = model_of(variant)
    settings, state = release(model, variant)
    file = folder / "it.safetensors"
    save_file(
        {f"model.{name}": tensor.contiguous() for name, tensor in state.items()}, file, {"config": json.dumps(settings)}
    )
    hub.export(file, folder / "my-model", published=True)
    return model, folder / "my-model"


def test_a_folder_loads_in_plain_transformers(published):
    model, folder = published
    loaded = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)
    encoder = AutoModel.from_pretrained(folder, trust_remote_code=True)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8))
    processor = AutoImageProcessor.from_pretrained(folder)
    pixels = processor(picture, return_tensors="pt")["pixel_values"]
    expected = CLIPImageProcessor(**processor_settings(24))(picture, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(pixels, expected, atol=1e-6, rtol=0)
    with torch.no_grad():
        logits = model(pixels).logits
        torch.testing.assert_close(loaded(pixels).logits, logits, atol=1e-5, rtol=0)
        states = encoder(pixels).last_hidden_state
        torch.testing.assert_close(states, model.lion(pixels).last_hidden_state, atol=1e-5, rtol=0)
    classify = pipeline("image-classification", model=str(folder), trust_remote_code=True)
    found = {each["label"]: each["score"] for each in classify(picture, top_k=5)}
    for number, score in enumerate(logits.softmax(-1)[0].tolist()):
        assert found[f"LABEL_{number}"] == pytest.approx(score, abs=1e-5)
    assert json.loads((folder / "proof.json").read_text())["largest_difference"] <= 1e-5
    card = (folder / "README.md").read_text()
    assert "image size: 24 px" in card and "a snake through rows and one through columns" in card


FILES = sorted((PARITY / "vision").glob("*.safetensors")) if (PARITY / "vision").is_dir() else []


@pytest.mark.skipif(not FILES, reason="needs reference data beside the checkout")
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_a_folder_of_the_authors_model_gives_their_logits_in_every_form(file, tmp_path):
    hub_folder.write(read_checkpoint(file), tmp_path / "it")
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "it", trust_remote_code=True)
    tensors = load_file(file)
    for form in ("full", "recurrent", "chunkwise"):
        with torch.no_grad():
            logits = model(tensors["in.pixel_values"], attention_form=form).logits
        torch.testing.assert_close(logits, tensors["out.logits"], atol=1e-5, rtol=0)


def test_another_processor_is_reported(published, tmp_path):
    _, folder = published
    shutil.copytree(folder, tmp_path / "it")
    path = tmp_path / "it" / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "image_mean": [0.4, 0.4, 0.4]}))
    with pytest.raises(UserError, match=r"differs from .* in preprocessor_config\.json; export it again"):
        hub_folder.verify(read_checkpoint(folder.parent / "it.safetensors"), tmp_path / "it")
