"""Images → batches. Every random number is drawn from the seed and what it is for, (epoch, image, copy) or a batch, so
that neither workers nor the number of devices change an augmented image, and a resumed run repeats an uninterrupted
one without reading what it has already seen."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.utils import dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from src.cli import log
from src.data.image_config import ImageLoaderConfig, MixingConfig
from src.data.image_transforms import Augmentation, Evaluation, seeded
from src.data.images import Images, decode
from src.data.streaming import ignore_signals
from src.data.workers import short_errors
from src.errors import UserError, reason

ORDER, AUGMENTATION, MIXING = range(3)  # what random numbers are for
Key = tuple[int, int, int]  # (epoch, image, copy)
Sample = dict[str, Any]


class ImageDataset(Dataset):
    """Pixels and labels, by index for evaluation, or by Key for training. It also holds the position from which an
    epoch resumes, which Composer stores and restores here."""

    def __init__(self, images: Images, transform: Evaluation | Augmentation, seed: int = 0):
        self.images, self.transform, self.seed = images, transform, seed
        self.resume_at = 0  # draws of the epoch, on all devices, that a resumed run has already seen

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: Key | int) -> Sample:
        index = key[1] if isinstance(key, tuple) else key
        content, label, name = self.images[index]
        image = decode(content, name)
        if not isinstance(key, tuple):
            return {"pixel_values": self.transform(image), "labels": label}
        with seeded(self.seed, AUGMENTATION, *key):
            return {"pixel_values": self.transform(image), "labels": label, "key": key}

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        return {"sample_in_epoch": num_samples, "images": len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if (before := state.get("images", len(self))) != len(self):  # not in checkpoints of earlier versions
            differs = f"the training data has {len(self):,} images, and had {before:,} when the checkpoint was saved"
            log.warning(f"{differs}: the order differs, so images of this epoch are repeated or omitted")
        self.resume_at = state["sample_in_epoch"]


class Pictures(Dataset):
    """Files without labels, in their order."""

    def __init__(self, files: Sequence[str], transform: Evaluation):
        self.files, self.transform = np.array([os.fsencode(file) for file in files]), transform  # as in FolderImages

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[str, Tensor | str]:
        """Return a file, and its pixels or why it cannot be read."""
        file = os.fsdecode(self.files[index])
        try:
            return file, self.transform(decode(Path(file).read_bytes(), file))
        except OSError as error:
            return file, f"{file} cannot be read ({reason(error)})"
        except UserError as error:
            return file, str(error).rsplit(";", 1)[0]


class Draws(DistributedSampler):
    """The Keys of an epoch, in a new order in each. With `repeats`, an epoch of N draws takes each of its N / repeats
    images that many times in a row, and devices take draws in turn, so that copies of an image are on different devices
    if there are enough (Hoffer et al., arXiv:1901.09335; DeiT's sampler)."""

    def __init__(self, dataset: ImageDataset, seed: int, repeats: int = 1, world_size: int = 1, rank: int = 0):
        super().__init__(dataset, world_size, rank, seed=seed, drop_last=True)
        self.repeats = repeats

    def __len__(self) -> int:
        return len(self.dataset) // self.num_replicas

    def __iter__(self) -> Iterator[Key]:
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, ORDER, self.epoch))))
        order = generator.permutation(len(self.dataset))
        start, self.dataset.resume_at = self.dataset.resume_at, 0
        for draw in range(start + self.rank, len(self) * self.num_replicas, self.num_replicas):
            yield self.epoch, int(order[draw // self.repeats]), draw % self.repeats


class Mixing:
    """Mixup or cutmix of a batch with its own reverse; and smoothed labels as targets."""

    def __init__(self, config: MixingConfig, classes: int, smoothing: float, seed: int):
        self.config, self.classes, self.smoothing, self.seed = config, classes, smoothing, seed

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Return a batch: pixel_values, (B, 3, height, width); labels, (B,), of the images before mixing; targets,
        (B, classes), rows of which sum to 1."""
        pixels = torch.stack([sample["pixel_values"] for sample in samples])
        labels = torch.tensor([sample["labels"] for sample in samples])
        targets = F.one_hot(labels, self.classes) * (1 - self.smoothing) + self.smoothing / self.classes
        pixels, weight = self.mixed(pixels, np.random.SeedSequence((self.seed, MIXING, *samples[0]["key"])))
        return {"pixel_values": pixels, "labels": labels, "targets": weight * targets + (1 - weight) * targets.flip(0)}

    def mixed(self, pixels: Tensor, entropy: np.random.SeedSequence) -> tuple[Tensor, float]:
        """Return mixed pixels, and the weight of each image's own label."""
        config, draw = self.config, np.random.Generator(np.random.Philox(entropy))
        if draw.random() >= config.chance or not (config.mixup or config.cutmix):
            return pixels, 1.0
        if config.cutmix and (not config.mixup or draw.random() < config.switch):
            height, width = pixels.shape[2:]
            area = 1 - draw.beta(config.cutmix, config.cutmix)
            tall, wide = int(height * area**0.5), int(width * area**0.5)
            y, x = draw.integers(height), draw.integers(width)  # the middle of the box, part of which may be outside
            top, bottom = max(0, y - tall // 2), min(height, y + (tall + 1) // 2)
            left, right = max(0, x - wide // 2), min(width, x + (wide + 1) // 2)
            mixed = pixels.clone()
            mixed[:, :, top:bottom, left:right] = pixels.flip(0)[:, :, top:bottom, left:right]
            return mixed, 1 - (bottom - top) * (right - left) / (height * width)
        weight = draw.beta(config.mixup, config.mixup)
        return weight * pixels + (1 - weight) * pixels.flip(0), weight


class ImageLoader(DataLoader):
    """A loader whose workers' errors are as short as its own."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        with short_errors():
            yield from super().__iter__()


def train_loader(dataset: ImageDataset, config: ImageLoaderConfig, batch_size: int, mixing: Mixing) -> ImageLoader:
    """Return batches of `batch_size` augmented and mixed images for this device. Raises UserError if there is none."""
    draws = Draws(dataset, dataset.seed, config.repeats, dist.get_world_size(), dist.get_global_rank())
    if not len(draws) or (config.drop_last and len(draws) < batch_size):
        found = f"the split {config.split} has {len(draws)} images per device, fewer than a batch of {batch_size}"
        raise UserError(f"{found}; lower global_train_batch_size")
    return _loader(dataset, config, batch_size, sampler=draws, collate_fn=mixing)


def eval_loader(dataset: ImageDataset, config: ImageLoaderConfig, batch_size: int) -> ImageLoader:
    """Return batches of images for this device; Composer drops those by which devices exceed the data."""
    return _loader(dataset, config, batch_size, sampler=dist.get_sampler(dataset))


def picture_loader(dataset: Pictures, batch_size: int, num_workers: int) -> ImageLoader:
    """Return batches: pixel_values, (B, 3, height, width), of those `files` that can be read; and the `problems` of
    others."""
    workers = min(num_workers, len(dataset) // batch_size)  # a single batch starts no process
    return _loader(dataset, ImageLoaderConfig(num_workers=workers), batch_size, collate_fn=_readable)


def _readable(samples: Sequence[tuple[str, Tensor | str]]) -> dict[str, Any]:
    pixels = [pixels for _, pixels in samples if isinstance(pixels, Tensor)]
    return {
        "files": [file for file, pixels in samples if isinstance(pixels, Tensor)],
        "pixel_values": torch.stack(pixels) if pixels else torch.empty(0),
        "problems": [problem for _, problem in samples if isinstance(problem, str)],
    }


def _loader(dataset: Dataset, config: ImageLoaderConfig, batch_size: int, **options: Any) -> ImageLoader:
    return ImageLoader(
        dataset,
        batch_size=batch_size,
        num_workers=config.num_workers,
        worker_init_fn=ignore_signals,
        drop_last=config.drop_last,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=config.num_workers > 0,
        **options,
    )
