"""Pictures → normalized pixels: augmented in training, resized and cropped in evaluation."""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data.auto_augment import auto_augment_transform, rand_augment_transform
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision import transforms
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from src.data.image_config import AugmentationConfig

BICUBIC = InterpolationMode.BICUBIC


@contextlib.contextmanager
def seeded(*entropy: int) -> Iterator[None]:
    """Inside, the generators of random, numpy and torch's CPU depend on `entropy` alone; afterwards they are as
    before."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    words = np.random.SeedSequence(entropy).generate_state(6)
    random.seed(int.from_bytes(words[:2].tobytes(), "little"))
    np.random.seed(words[2:4])
    torch.default_generator.manual_seed(int.from_bytes(words[4:].tobytes(), "little") >> 1)  # not those of GPUs
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


class Evaluation:
    """What an image processor does, given its settings in transformers' names: resize the shorter side, or both, crop
    the centre, scale, normalize."""

    def __init__(self, settings: Mapping[str, Any]):
        self.size = settings["size"]
        self.resize = settings.get("do_resize", True)
        self.crop_size = settings["crop_size"] if settings.get("do_center_crop", True) else None
        self.resample = settings.get("resample", Image.Resampling.BICUBIC)
        self.mean, self.std = settings["image_mean"], settings["image_std"]

    def __call__(self, image: Image.Image) -> Tensor:
        """Return a picture, in RGB, as (3, height, width)."""
        return self.normalized(self.cropped(image))

    def cropped(self, image: Image.Image) -> Image.Image:
        if self.resize:
            short = self.size.get("shortest_edge")
            size = short if short is not None else [self.size["height"], self.size["width"]]
            image = TF.resize(image, size, self.resample)
        if self.crop_size is not None:
            height, width = self.crop_size["height"], self.crop_size["width"]
            # As transformers rounds an odd margin; torchvision's center_crop rounds it to the even number.
            image = TF.crop(image, (image.height - height) // 2, (image.width - width) // 2, height, width)
        return image

    def normalized(self, image: Image.Image) -> Tensor:
        return TF.normalize(TF.to_tensor(image), self.mean, self.std)


class Augmentation:
    """A random change of training images, drawn from the global generators (`seeded`)."""

    def __init__(self, config: AugmentationConfig, evaluation: Evaluation, size: tuple[int, int]):
        self.evaluation = evaluation
        parts: list[Callable] = []
        if config.crop == "resized":
            parts.append(transforms.RandomResizedCrop(size, tuple(config.area), tuple(config.aspect), BICUBIC))
        elif config.crop == "padded":
            parts += [evaluation.cropped, transforms.RandomCrop(size, padding=config.padding)]
        else:
            parts.append(evaluation.cropped)
        parts.append(transforms.RandomHorizontalFlip(config.flip))
        # As timm's create_transform: shifts up to 45 % of the image, and its mean colour where there is none.
        options = {
            "translate_const": int(min(size) * 0.45), "interpolation": Image.Resampling.BICUBIC,
            "img_mean": tuple(round(255 * mean) for mean in evaluation.mean),
        }  # fmt: skip
        if config.policy == "randaugment":
            parts.append(rand_augment_transform(f"rand-{config.magnitude}", options))
        elif config.policy == "three_augment":
            parts.append(auto_augment_transform("3a", options))
        if config.jitter:
            parts.append(transforms.ColorJitter(config.jitter, config.jitter, config.jitter))
        self.picture = transforms.Compose(parts)
        self.erasing = RandomErasing(config.erasing, mode="pixel", device="cpu") if config.erasing else None

    def __call__(self, image: Image.Image) -> Tensor:
        """Return a picture, in RGB, as (3, height, width)."""
        pixels = self.evaluation.normalized(self.picture(image))
        return pixels if self.erasing is None else self.erasing(pixels)
