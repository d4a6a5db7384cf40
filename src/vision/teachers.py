"""Teachers for distillation: any image classifier, of this project, transformers or timm."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from src.checkpoints.processors import read_processor, stored_normalization
from src.checkpoints.reading import PREPROCESSOR
from src.errors import UserError, first_line
from src.lion import LionVisionConfig
from src.training.loading import read_start
from src.vision.classes import moved

KEY = "distillation.teacher"
Size = tuple[int, int] | None  # (height, width) that a teacher reads; None: any


class Teacher:
    """A frozen classifier that sees the student's augmented images, normalized and resized as it was trained."""

    def __init__(self, model: nn.Module, size: Size, processor: Mapping[str, Any], student: Mapping[str, Any]):
        """`processor`, `student`: settings of the two image processors, of which mean and standard deviation count."""
        self.model, self.size = model.eval().requires_grad_(False), size
        mean, std = (torch.tensor(processor[name]).view(-1, 1, 1) for name in ("image_mean", "image_std"))
        own_mean, own_std = (torch.tensor(student[name]).view(-1, 1, 1) for name in ("image_mean", "image_std"))
        self.factor, self.shift = own_std / std, (own_mean - mean) / std

    @torch.no_grad()
    def __call__(self, pixel_values: Tensor) -> Tensor:
        """Return the teacher's logits, (B, classes), of images normalized for the student."""
        if (device := pixel_values.device) != self.factor.device:
            self.model.to(device)
            self.factor, self.shift = self.factor.to(device), self.shift.to(device)
        x = pixel_values * self.factor + self.shift
        if self.size is not None and tuple(x.shape[2:]) != self.size:
            x = F.interpolate(x, self.size, mode="bicubic", antialias=True)
        output = self.model(x)
        return (output if isinstance(output, Tensor) else output["logits"]).float()


def read_teacher(name: str, classes: list[str], student: Mapping[str, Any]) -> Teacher:
    """Return the teacher of a file, a folder, a name on the Hub, or in timm. Raises UserError for an unknown one, or
    one of other classes."""
    if not Path(name).exists() and "/" not in name.removeprefix("timm/"):
        model, size, processor, labels = _read_timm(name.removeprefix("timm/"))
    elif _is_of_transformers(name):
        model, size, processor, labels = _read_transformers(name)
    else:
        read = read_start(name, KEY, None, reads="images")
        config, processor, model = read.config, read.processor, read.build()
        size = tuple(side * config.patch_size for side in config.grid) if config.has_positions else None
        labels = read.class_names
    if len(labels) != len(classes):
        raise UserError(f"{KEY}: {name} has {len(labels)} classes, and the data {len(classes)}; name another")
    if (other := moved(labels, classes)) is not None:
        where = f"{labels.index(other)} in {name}, and {classes.index(other)} in the data"
        raise UserError(f"{KEY}: the class {other} has number {where}; name another, or rename the data's classes")
    return Teacher(model, size, processor, student)


def _read_timm(name: str) -> tuple[nn.Module, Size, dict[str, Any], list[str]]:
    import timm

    try:
        model = timm.create_model(name, pretrained=True)
    except Exception as error:  # an unknown name, or whatever the Hub client raises
        raise UserError(f"{KEY}: timm cannot load {name} ({first_line(error)}); name a folder or another") from None
    data = timm.data.resolve_data_config({}, model=model)
    processor = {"image_mean": list(data["mean"]), "image_std": list(data["std"])}
    return model, tuple(data["input_size"][1:]), processor, [""] * model.num_classes


def _is_of_transformers(name: str) -> bool:
    """Whether a folder or Hub name has a model of transformers and not one of this project."""
    from transformers import AutoConfig

    if Path(name).is_file():
        return False
    try:
        kind = AutoConfig.from_pretrained(name, trust_remote_code=False).model_type
        return kind not in (LionVisionConfig.model_type, "timm_wrapper")  # the latter: a folder of timm's
    except Exception:  # an unknown kind, or no model at all
        return False


def _read_transformers(name: str) -> tuple[nn.Module, Size, dict[str, Any], list[str]]:
    from transformers import AutoModelForImageClassification
    from transformers.utils import cached_file

    try:
        model, info = AutoModelForImageClassification.from_pretrained(
            name, trust_remote_code=False, output_loading_info=True
        )
        path = cached_file(name, PREPROCESSOR, _raise_exceptions_for_missing_entries=False)
        stored = json.loads(Path(path).read_text()) if path else {}
    except Exception as error:  # whatever transformers and the Hub client raise
        raise UserError(f"{KEY}: {name} is not an image classifier ({first_line(error)}); name another") from None
    if info["missing_keys"]:
        raise UserError(f"{KEY}: {name} lacks weights of a classifier ({min(info['missing_keys'])}); name another")
    if not stored:
        raise UserError(f"{KEY}: {name} has no {PREPROCESSOR}, so how it was trained is unknown; name another")
    mean, std = stored_normalization(stored)
    side = getattr(model.config, "image_size", None)
    if side is None:
        crop = read_processor(stored, name)["crop_size"]
        side = [crop["height"], crop["width"]]
    size = tuple(side) if isinstance(side, list | tuple) else (side, side)
    processor = {"image_mean": mean, "image_std": std}
    return model, size, processor, [model.config.id2label[number] for number in range(model.config.num_labels)]
