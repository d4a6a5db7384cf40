"""The config of `vision.py`. Imports nothing slow."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from src.config import key
from src.data.image_config import SHARE, AugmentationConfig, ImageLoaderConfig, MixingConfig
from src.errors import UserError
from src.training.config import RunConfig

OF_START = "default: those of model.pretrained_checkpoint"


@dataclass
class LossConfig:
    """The loss of the labels."""

    kind: str = key("soft: cross entropy; binary: one per class, as DeiT III", "soft", choices=("soft", "binary"))
    smoothing: float = key("share of a label that all classes receive", 0.1, at_least=0, below=1)


@dataclass
class DistillationConfig:
    """The loss of what a teacher predicts, if there is one."""

    teacher: str | None = key("image classifier to learn from: a checkpoint, a folder, a Hub name or a timm name", None)
    kind: str = key("hard: its class; soft: its probabilities", "hard", choices=("hard", "soft"))
    weight: float = key("share of the loss", 0.5, **SHARE)
    temperature: float = key("of soft distillation", 3.0, above=0)


@dataclass
class VisionConfig(RunConfig):
    """Keys of `vision.py`."""

    model_config = "LionVisionConfig"
    chosen_at_first: ClassVar[dict[str, Any]] = {**RunConfig.chosen_at_first, "mean": None, "std": None}
    model: dict[str, Any] = key(
        "mixer and sizes: arguments of LionVisionConfig (src/lion/configuration_lion.py); and pretrained_checkpoint, "
        "to start from the weights of a checkpoint of vision.py, DeiT or the paper's authors, of a Hub folder or a ViT",
        {},
    )
    data_local: str = key(
        "folder with SPLIT/CLASS/*, shards that src/convert_dataset.py --images wrote, Parquet, CIFAR's or MNIST's "
        "files; or the name of a Hub dataset",
        may_change=True,
    )
    data_remote: str | None = key("where the shards are, if data_local is only a cache", None, may_change=True)
    image_size: Any = key("pixels of the model's images: a number, or [height, width]", 224)
    crop_pct: float = key("evaluation resizes the shorter side to image_size / this", 0.875, above=0, at_most=1)
    mean: list[float] | None = key(f"of the three channels; {OF_START}, or ImageNet's: 0.485, 0.456, 0.406", None)
    std: list[float] | None = key(f"of the three channels; {OF_START}, or ImageNet's: 0.229, 0.224, 0.225", None)
    train_loader: ImageLoaderConfig = field(default_factory=ImageLoaderConfig)
    eval_loader: ImageLoaderConfig = field(default_factory=ImageLoaderConfig)
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)
    mixing: MixingConfig = field(default_factory=MixingConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    freeze: list[str] = key("parts of names of parameters that are not trained, such as attention.decay", [])

    def check(self) -> None:
        super().check()
        if "image_size" in self.model:
            raise UserError("model.image_size: set image_size instead, which the data has too")
        if len(self.size) != 2 or not all(type(side) is int and side > 0 for side in self.size):
            raise UserError(f"image_size={self.image_size} must be a number of pixels, or [height, width]")
        for name in ("mean", "std"):
            values = getattr(self, name)
            if values is not None and (len(values) != 3 or (name == "std" and min(values) <= 0)):
                raise UserError(f"{name}={values} must be three numbers{' above 0' if name == 'std' else ''}")
        if self.loss.kind == "binary" and self.loss.smoothing:
            raise UserError("loss.smoothing makes every class a target of the binary loss; set it to 0")
        self.augmentation.check()

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the model's images."""
        return tuple(self.image_size) if isinstance(self.image_size, list) else (self.image_size, self.image_size)
