"""Config of augmentation, mixing and image loaders. Imports nothing slow."""

import re
from dataclasses import dataclass

from src.config import key
from src.errors import UserError

SHARE = {"at_least": 0, "at_most": 1}


@dataclass
class AugmentationConfig:
    """How training images are changed, in this order. The defaults are DeiT's (Touvron et al., arXiv:2012.12877)."""

    crop: str = key(
        "resized: a random part, resized; padded: the image, shifted within a margin, for those up to 32 px; "
        "none: as in evaluation",
        "resized",
        choices=("resized", "padded", "none"),
    )
    area: list[float] = key("least and greatest share of the area in a resized crop", [0.08, 1.0])
    aspect: list[float] = key("least and greatest width / height of a resized crop", [3 / 4, 4 / 3])
    padding: int = key("pixels on each side of a padded crop", 4, at_least=0)
    flip: float = key("chance of a horizontal flip", 0.5, **SHARE)
    policy: str = key(
        "randaugment: random operations, as timm's; three_augment: grey, solarized or blurred, as DeiT III's",
        "randaugment",
        choices=("randaugment", "three_augment", "none"),
    )
    magnitude: str = key("strength and kind of randaugment, in timm's notation", "m9-mstd0.5-inc1")
    jitter: float = key("greatest random change of brightness, contrast and saturation", 0.0, at_least=0)
    erasing: float = key("chance that a rectangle of the normalized image becomes noise", 0.25, **SHARE)

    def check(self) -> None:
        """Check what the rules of individual keys cannot. Raises UserError."""
        for name in ("area", "aspect"):
            bounds = getattr(self, name)
            if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
                raise UserError(f"augmentation.{name}={bounds} must be two numbers above 0, the smaller first")
        if not re.fullmatch(r"(-?((m|n|mmax|inc)\d+|(p|mstd)\d+(\.\d+)?))+", self.magnitude):
            problem = f"augmentation.magnitude={self.magnitude!r} is not timm's notation"
            raise UserError(f"{problem}; give one such as m9-mstd0.5-inc1")


@dataclass
class MixingConfig:
    """A batch has mixup (Zhang et al., arXiv:1710.09412) or cutmix (Yun et al., arXiv:1905.04899)."""

    mixup: float = key("alpha of the weights' beta distribution; 0: no mixup", 0.8, at_least=0)
    cutmix: float = key("alpha of the areas' beta distribution; 0: no cutmix", 1.0, at_least=0)
    switch: float = key("chance of cutmix if both are on", 0.5, **SHARE)
    chance: float = key("chance that a batch is mixed", 1.0, **SHARE)


@dataclass
class ImageLoaderConfig:
    """One split, and how an epoch reads it."""

    split: str = key("subfolder or split of the data, e.g. train, val")
    repeats: int = key("repeated augmentation: how often an epoch draws each of its images", 1, at_least=1)
    drop_last: bool = key("drop the last batch of an epoch if it is not full", False)
    num_workers: int = key("processes to prepare batches; 0: the main one", 0, at_least=0, below=2**32, may_change=True)
