"""Stored settings and tensors of image encoders → ours: those of the paper's authors' image models, of DeiT's scripts
and timm, and of ViT and DeiT in transformers."""

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import Tensor

from src.checkpoints.adapters import LABELS, join_qkv, lion_config, renamed
from src.errors import UserError
from src.lion import LionVisionConfig

# The authors' `mask_type` → our mixer.
MIXERS = {"Lit": "lion-lit", "Decay": "lion-d", "Selective": "lion-s", "Softmax": "softmax"}
ORDERS = {"Normal": "raster", "S": "snakes"}
# The authors' and timm's prefixes → ours.
RENAMED = {
    "cls_token": "lion.embeddings.class_token", "dist_token": "lion.embeddings.distillation_token",
    "pos_embed": "lion.embeddings.position_embeddings.weight", "patch_embed.proj.": "lion.embeddings.projection.",
    "norm.": "lion.final_norm.", "head.": "classifier.", "head_dist.": "distillation_classifier.",
}  # fmt: skip
RENAMED_IN_BLOCK = {  # after "blocks.N."
    "norm1.": "attention_norm.", "attn.qkv.": "attention.qkv.", "attn.proj.": "attention.out.",
    "attn.a_i": "attention.decay", "attn.a2_i": "attention.second_decay",
    "norm2.": "mlp_norm.", "mlp.fc1.": "mlp_in.", "mlp.fc2.": "mlp_out.", "scales": "scales",
}  # fmt: skip
# Those of transformers, after "vit." or "deit.".
RENAMED_VIT = {
    "embeddings.cls_token": "lion.embeddings.class_token",
    "embeddings.distillation_token": "lion.embeddings.distillation_token",
    "embeddings.position_embeddings": "lion.embeddings.position_embeddings.weight",
    "embeddings.patch_embeddings.projection.": "lion.embeddings.projection.", "layernorm.": "lion.final_norm.",
    "classifier.": "classifier.", "cls_classifier.": "classifier.",
    "distillation_classifier.": "distillation_classifier.",
}  # fmt: skip
RENAMED_IN_VIT_LAYER = {  # after "encoder.layer.N."
    "layernorm_before.": "attention_norm.", "attention.attention.query.": "attention.query.",
    "attention.attention.key.": "attention.key.", "attention.attention.value.": "attention.value.",
    "attention.output.dense.": "attention.out.", "layernorm_after.": "mlp_norm.", "intermediate.dense.": "mlp_in.",
    "output.dense.": "mlp_out.",
}  # fmt: skip
SIZES = {"tiny": 3, "small": 6, "base": 12}  # heads, by the name of a model
OF_WIDTH = {1152: 16, 1280: 16, 1408: 16, 1664: 16}  # heads of the larger ones, by their channels; others: one per 64


def config_from_release(settings: Mapping[str, Any], source: str) -> LionVisionConfig:
    """Convert the settings of an image model of the paper's authors. Raises UserError for others."""
    try:
        mask, order = str(settings["mask_type"]), str(settings.get("order", "Normal"))
        if mask not in MIXERS or order not in ORDERS:
            raise UserError(f"mask_type {mask!r} and order {order!r} of {source} are unknown; use another checkpoint")
        if not settings.get("qkv_bias", True):
            raise UserError(f"{source} has qkv_bias: false, a projection that no LION image model has; use another")
        width = settings["embed_dim"]
        ours = {
            "mixer": MIXERS[mask], "patch_order": ORDERS[order], "image_size": settings["img_size"],
            "patch_size": settings["patch_size"], "num_channels": settings["in_chans"], "hidden_size": width,
            "num_labels": settings["num_classes"], "num_hidden_layers": settings["depth"],
            "num_attention_heads": settings["num_heads"], "intermediate_size": int(width * settings["mlp_ratio"]),
            "class_token": bool(settings["cls_tok"]),
            "position_embedding": "learned" if settings["pos_emb"] else "none",
            "distillation_token": bool(settings.get("distilled", False)),
            "layer_norm_eps": settings.get("layer_norm_eps", 1e-6),
            "layer_scale_init": settings.get("layer_scale_init"),
        }  # fmt: skip
        if classes := settings.get("label_names"):
            ours |= {"id2label": dict(enumerate(classes)), "label2id": {x: number for number, x in enumerate(classes)}}
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the settings of {source} are incomplete ({type(error).__name__}: {error})") from None
    return lion_config(ours, source, LionVisionConfig)


def settings_from_shapes(state: Mapping[str, Tensor], given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the settings of a model in the authors' names: of its tensors' shapes, and of the arguments `given` that
    its training script stored, which are empty for DeiT's own files. Raises UserError."""
    try:
        width, channels, patch = state["patch_embed.proj.weight"].shape[:3]
        blocks = {name.split(".")[1] for name in state if name.startswith("blocks.")}
        first = next((state[name] for name in ("blocks.0.attn.a_i", "blocks.0.attn.a_i.bias") if name in state), None)
        mask = "Softmax" if not given.get("mask_type") else str(given["mask_type"])
        name = next((size for size in SIZES if size in str(given.get("model", ""))), None)
        named = len(first) if first is not None else given.get("num_heads") or SIZES.get(name) or OF_WIDTH.get(width)
        heads = named or max(width // 64, 1)
        distilled, scaled = "dist_token" in state, not {"blocks.0.gamma_1", "blocks.0.ls1.gamma"}.isdisjoint(state)
        size = int(given.get("input_size") or 224)
        if "pos_embed" in state:
            rows = state["pos_embed"].shape[-2]
            tokens = rows - (2 if distilled else 1)
            # DeiT III's positions are of patches only.
            side = next((round(n**0.5) for n in (tokens, rows) if n and round(n**0.5) ** 2 == n), None)
            if side is None:
                raise UserError(f"{source} has positions of {tokens} patches, which are no square; use another")
            size = side * patch
        return {
            "mask_type": mask, "order": "S" if "blocks.0.attn.a2_i" in state or "blocks.0.attn.a2_i.bias" in state else
            str(given.get("order") or "Normal"), "cls_tok": bool(given.get("cls_tok", mask == "Softmax")),
            "pos_emb": "pos_embed" in state, "img_size": size, "patch_size": patch, "in_chans": channels,
            "num_classes": len(state["head.bias"]) if "head.bias" in state else 0, "embed_dim": width,
            "depth": len(blocks), "num_heads": heads, "distilled": distilled,
            "qkv_bias": "blocks.0.attn.qkv.bias" in state, "layer_norm_eps": 1e-6,
            "mlp_ratio": Fraction(len(state["blocks.0.mlp.fc1.bias"]), width),  # exact, for int(width * ratio)
            "layer_scale_init": 1e-4 if scaled else None, "guesses_heads": named is None,
        }  # fmt: skip
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise UserError(f"{source} is not an image model of DeiT's scripts ({type(error).__name__}: {error})") from None


def state_dict_from_release(state: Mapping[str, Tensor], config: LionVisionConfig) -> dict[str, Tensor]:
    """Return the authors', DeiT's or timm's tensors under our names. Raises UserError with the names of those that are
    unknown."""
    used = {name: x for name, x in state.items() if config.has_positions or name != "pos_embed"}
    used = {re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", name): tensor for name, tensor in used.items()}  # timm's
    for first in [name for name in used if name.endswith(".gamma_1")]:  # DeiT III: factors per channel of both branches
        second = first.replace("gamma_1", "gamma_2")
        if second in used:
            used[first.replace("gamma_1", "scales")] = torch.stack([used.pop(first), used.pop(second)])
    if "pos_embed" in used and used["pos_embed"].shape[-2] == prod(config.grid):  # DeiT III: of patches alone
        prefix = used["pos_embed"].new_zeros(1, config.num_prefix_tokens, config.hidden_size)
        used["pos_embed"] = torch.cat([prefix, used["pos_embed"]], 1)
    ours = renamed(used, RENAMED, "blocks.", RENAMED_IN_BLOCK)
    for name in [name for name in ours if ".second_decay" in name]:
        first, second = name.replace("second_", ""), ours.pop(name)
        if config.patch_order == "snakes":
            ours[first] = torch.cat([ours[first], second]) if first in ours else second
    return _flattened(ours)


def config_from_vit(config: Mapping[str, Any], names: Iterable[str], source: str) -> LionVisionConfig:
    """Convert the config of a ViT or DeiT of transformers whose tensors have these names. Raises UserError for one that
    no softmax model here computes."""
    if not config.get("qkv_bias", True):
        raise UserError(f"{source} has qkv_bias: false, a projection that no LION image model has; use another")
    same = "image_size", "patch_size", "num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads"
    same += "intermediate_size", "hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob"
    same += "initializer_range", "layer_norm_eps", *LABELS
    ours = {name: config[name] for name in same if config.get(name) is not None}
    if not any("classifier." in name for name in names):
        ours = {name: value for name, value in ours.items() if name not in LABELS} | {"num_labels": 0}
    ours |= {"mixer": "softmax", "position_embedding": "learned", "distillation_token": config["model_type"] == "deit"}
    ours["distillation_classifier"] = any(name.startswith("distillation_classifier.") for name in names)
    return lion_config(ours, source, LionVisionConfig)


def state_dict_from_vit(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a ViT or DeiT of transformers under our names. Omitted: the pooler, which its classifier
    does not use, and the token that masks patches. Raises UserError with the names of those that are unknown."""
    plain = {re.sub(r"^(vit|deit)\.", "", name): tensor for name, tensor in state.items()}
    used = {n: x for n, x in plain.items() if not n.startswith("pooler.") and n != "embeddings.mask_token"}
    return join_qkv(_flattened(renamed(used, RENAMED_VIT, "encoder.layer.", RENAMED_IN_VIT_LAYER)))


def _flattened(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tokens and positions without the dimensions of size 1 that those projects store, (1, 1, D) and (1, L, D)."""
    for name, tensor in ours.items():
        if name.endswith("_token"):
            ours[name] = tensor.flatten()
        elif name.endswith("position_embeddings.weight") and tensor.ndim == 3:
            ours[name] = tensor[0]
    return ours
