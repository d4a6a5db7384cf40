"""How far an epoch is, whatever batch size it began with."""

import pytest
from composer import Timestamp
from torch.utils.data import DataLoader, IterableDataset

from src.training.epochs import steps_left


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("samples", [56, 60, 64])
@pytest.mark.parametrize("before", [4, 8, 16])
def test_the_steps_left_are_those_that_the_loader_makes(drop_last, samples, before):
    for done in range(0, samples + 1, before):
        rest = DataLoader(range(samples - done), batch_size=16, drop_last=drop_last) if done < samples else []
        loader = DataLoader(range(samples), batch_size=16, drop_last=drop_last)
        now = Timestamp(sample_in_epoch=done, batch_in_epoch=done // before)
        assert steps_left(loader, now) == len(rest)


def test_each_device_has_its_share(monkeypatch):
    monkeypatch.setattr("composer.utils.dist.get_world_size", lambda: 2)
    loader = DataLoader(range(32), batch_size=4)  # of one device
    assert steps_left(loader, Timestamp(sample_in_epoch=24, batch_in_epoch=3)) == 5


class Unknown(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Known(Unknown):
    def __len__(self) -> int:
        return 10


def test_datasets_of_unknown_and_known_length():
    assert steps_left(DataLoader(Unknown(), batch_size=4), Timestamp()) is None
    assert steps_left(DataLoader(Known(), batch_size=4), Timestamp(sample_in_epoch=4, batch_in_epoch=1)) == 2


def test_a_loader_that_counts_in_another_way_is_believed():
    class Loader(DataLoader):
        def __len__(self) -> int:
            return 7

    assert steps_left(Loader(range(10), batch_size=4), Timestamp(sample_in_epoch=9, batch_in_epoch=5)) == 2
