"""Checkpoints of DeiT's scripts, whose models timm has: the same logits, through `hub.py import` and as a start."""

import argparse

import pytest
import torch
from timm.models import deit, vision_transformer

from src.checkpoints.reading import read_checkpoint
from src.errors import UserError

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
        read = read_checkpoint(tmp_path / "it.pth")
    assert read.config.num_attention_heads == heads and read.config.num_labels == 7
    assert ("one per 64 channels" in caplog.text) == (heads == 1)
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(read.build()(images).logits, model(images), atol=1e-5, rtol=1e-5)


def test_other_models_of_timm_are_named(tmp_path):
    save(
        vision_transformer.VisionTransformer(**SIZES, num_heads=3, qk_norm=True), tmp_path / "it.pth", model="deit_tiny"
    )
    with pytest.raises(UserError, match=r"holds tensors that no LION model has: blocks\.0\.attn\.k_norm\.bias"):
        read_checkpoint(tmp_path / "it.pth")
