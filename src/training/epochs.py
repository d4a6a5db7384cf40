"""How far an epoch is, also if the batch size changed within it."""

import math

from composer import Timestamp
from composer.utils import dist
from torch.utils.data import DataLoader, IterableDataset


def steps_left(loader: DataLoader, now: Timestamp) -> int | None:
    """Return how many steps of the loader's batch size the epoch has left, or None if its length is unknown."""
    dataset, size = loader.dataset, loader.batch_size
    if not hasattr(dataset, "__len__"):
        return None

    def steps(samples: int) -> int:
        return samples // size if loader.drop_last else math.ceil(samples / size)

    samples = len(dataset if isinstance(dataset, IterableDataset) else loader.sampler)  # of this device
    if size is None or steps(samples) != len(loader):  # a loader that counts in another way
        return max(0, len(loader) - now.batch_in_epoch.value)
    return max(0, steps(samples - now.sample_in_epoch.value // dist.get_world_size()))
