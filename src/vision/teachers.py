"""Teachers for distillation: any image classifier, of this project, transformers or timm."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from src.checkpoints.processors import MEAN, STD, processor_settings, read_processor
from src.checkpoints.reading import PREPROCESSOR, read_pretrained
from src.errors import UserError, first_line
from src.lion import LionVisionConfig


class Teacher:
    """A frozen classifier that sees the student's augmented images, normalized and resized as it was trained."""

    def __init__(self, model: nn.Module, size: tuple[int, int] | None, processor: Mapping[str, Any], student: Mapping):
        """`size`: (height, width) that the teacher reads; None: any. `processor`, `student`: settings of the two image
        processors, whose mean and standard deviation count."""
        self.model = model.eval().requires_grad_(False)
        self.size = size
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
    """Return the teacher of a file, a folder, a name on the Hub, or in timm. Raises UserError for an unknown one, or one
    of other classes."""
    key = "distillation.teacher"
    if not Path(name).exists() and "/" not in name:
        model, size, processor = _read_timm(name, key)
    else:
        model, size, processor = _read_classifier(name, key)
    count, labels = processor.pop("classes")
    if count != len(classes):
        raise UserError(f"{key}: {name} has {count} classes, and the data {len(classes)}; name another")
    named = labels and not all(label.startswith("LABEL_") for label in labels)
    if named and set(labels) == set(classes) and labels != classes:
        raise UserError(f"{key}: {name} has the same classes in another order; name another")
    return Teacher(model, size, processor, student)


def _read_timm(name: str, key: str) -> tuple[nn.Module, tuple[int, int], dict[str, Any]]:
    import timm

    try:
        model = timm.create_model(name, pretrained=True)
    except Exception as error:  # an unknown name, or whatever the Hub client raises
        raise UserError(f"{key}: timm cannot load {name} ({first_line(error)}); name a folder or another") from None
    data = timm.data.resolve_data_config({}, model=model)
    processor = {"image_mean": list(data["mean"]), "image_std": list(data["std"]), "classes": (model.num_classes, [])}
    return model, tuple(data["input_size"][1:]), processor


def _read_classifier(name: str, key: str) -> tuple[nn.Module, tuple[int, int] | None, dict[str, Any]]:
    from transformers import AutoConfig, AutoModelForImageClassification

    kind = None
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False) if not Path(name).is_file() else None
    except Exception:  # one of ours, which transformers does not know, or none at all
        config = None
    if config is not None and config.model_type != LionVisionConfig.model_type:
        try:
            model = AutoModelForImageClassification.from_pretrained(name, trust_remote_code=False)
        except Exception as error:  # whatever transformers and the Hub client raise
            raise UserError(f"{key}: {name} is not an image classifier ({first_line(error)}); name another") from None
        kind = config.id2label
        side = getattr(config, "image_size", None)
        processor = _processor_of(name)
        crop = processor["crop_size"]
        sides = side if isinstance(side, list | tuple) else [side or crop.get("height"), side or crop.get("width")]
        size = tuple(sides) if all(sides) else None
    else:
        checkpoint = read_pretrained(name, key, reads="images")
        model, processor, config = checkpoint.build(), dict(checkpoint.processor), checkpoint.config
        size = tuple(side * config.patch_size for side in config.grid) if config.has_positions else None
        kind = config.id2label
    processor["classes"] = (len(kind), [kind[number] for number in range(len(kind))])
    return model, size, processor


def _processor_of(name: str) -> dict[str, Any]:
    """The processor of a folder or Hub model; ImageNet's mean and standard deviation if it has none that is known."""
    import json

    from transformers.utils import cached_file

    path = cached_file(name, PREPROCESSOR, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return processor_settings(224, mean=MEAN, std=STD)
    stored = json.loads(Path(path).read_text())
    try:
        return read_processor(stored, name)
    except UserError:  # only the mean and the standard deviation count
        mean, std = stored.get("image_mean", MEAN), stored.get("image_std", STD)
        return processor_settings(224, mean=mean, std=std)


Reader = Callable[[str, str], tuple[nn.Module, tuple[int, int] | None, dict[str, Any]]]
