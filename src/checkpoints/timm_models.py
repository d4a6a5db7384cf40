"""ViTs and DeiTs of timm: settings from a state dict, and from the config.json that timm's `save_for_hf` writes."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from src.checkpoints.image_adapters import settings_from_shapes
from src.checkpoints.processors import MEAN, STD, processor_settings
from src.errors import UserError

PATCHES = "patch_embed.proj.weight"  # a tensor of every ViT of timm
FAMILIES = ("vit_", "deit_", "deit3_", "flexivit_")  # how names of architectures start that may be plain ViTs
INTERPOLATIONS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}
UNSEEN = ("act_layer", "norm_layer", "pool_include_prefix")  # arguments that change results and no tensor's name
SAVED = ("state_dict_ema", "state_dict")  # by timm's train.py; it validates the averages, if there are any


def weights_of_timm(loaded: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the state dict of a ViT from a file of timm, which may be all of it, or nothing."""
    for state in (loaded, *(loaded.get(part) for part in SAVED)):
        if isinstance(state, Mapping):
            plain = {str(name).removeprefix("module."): tensor for name, tensor in state.items()}
            if PATCHES in plain:
                return plain
    return {}


def timm_settings(state: Mapping[str, Tensor], config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a model's settings as `config_from_release` takes them. `config`: of config.json, or empty. Raises
    UserError for a model that no softmax model here computes, unless its tensors' names tell."""
    name, arguments = str(config.get("architecture", "")), config.get("model_args") or {}
    if config and (not name.startswith(FAMILIES) or "rope" in name):
        raise UserError(f"{source} holds a {name} of timm, and only its ViTs and DeiTs can be read; name another")
    found = [f"{key}={arguments[key]}" for key in UNSEEN if key in arguments]
    if (pool := config.get("global_pool", "token")) != "token":
        found.append(f"global_pool={pool}")
    if found:
        raise UserError(f"{source} has {', '.join(found)}, which no LION image model has; use another")
    if "pos_embed" not in state:
        raise UserError(f"{source} has no position embeddings, pos_embed, so it is no plain ViT; use another")
    settings = settings_from_shapes(state, {"model": name, "num_heads": arguments.get("num_heads")}, source)
    side, size = settings["img_size"], (config.get("pretrained_cfg") or {}).get("input_size")
    if size and list(size[1:]) != [side, side]:
        raise UserError(f"{source} reads images of {size[1]}×{size[2]} pixels, and only squares can be; use another")
    classes = config.get("label_names")
    named = isinstance(classes, list) and len(classes) == settings["num_classes"]
    return settings | {"label_names": [str(one) for one in classes] if named else None}


def timm_processor(config: Mapping[str, Any], side: int, source: str) -> dict[str, Any]:
    """Return the settings of a CLIPImageProcessor that does what `config`, a pretrained_cfg, says. Raises UserError."""
    try:
        if (mode := config.get("crop_mode", "center")) != "center":
            raise UserError(f"{source} has crop_mode {mode!r}, which is unknown; use another")
        mean, std = config.get("mean", MEAN), config.get("std", STD)
        resample = INTERPOLATIONS[config.get("interpolation", "bicubic")]
        return processor_settings(side, config.get("crop_pct", 0.875), mean, std) | {"resample": resample}
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        problem = f"pretrained_cfg in {source} has unusable settings ({type(error).__name__}: {error})"
        raise UserError(f"{problem}; save the folder again") from None
