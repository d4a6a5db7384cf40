"""Order, repeats, workers, resuming and mixing of images: each equals its definition on fixed draws."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from src.checkpoints.processors import processor_settings
from src.data.image_config import AugmentationConfig, ImageLoaderConfig, MixingConfig
from src.data.image_loader import Draws, ImageDataset, Mixing, eval_loader, train_loader
from src.data.image_transforms import Augmentation, Evaluation
from src.data.images import ArrayImages
from src.errors import UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (21, 12, 12, 3), dtype=np.uint8)
EVALUATION = Evaluation(processor_settings(8))


def dataset(count=21, **changes) -> ImageDataset:
    images = ArrayImages("pixels", PIXELS[:count], list(range(count)), [str(n) for n in range(count)])
    return ImageDataset(images, Augmentation(AugmentationConfig(**changes), EVALUATION, (8, 8)), seed=5)


def loader(batch_size=4, num_workers=0, repeats=3, drop_last=False, mixing=None, data=None):
    config = ImageLoaderConfig("train", repeats, drop_last, num_workers)
    return train_loader(data or dataset(), config, batch_size, Mixing(mixing or MixingConfig(), 21, 0.1, seed=5))


def epochs(of, count=2):
    for epoch in range(count):
        of.sampler.set_epoch(epoch)
        yield from of


def assert_equal(first, second):
    first, second = list(first), list(second)
    assert len(first) == len(second) > 0
    for a, b in zip(first, second):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_do_not_matter(num_workers):
    torch.manual_seed(1)  # of what else the main process draws
    expected = list(epochs(loader()))
    torch.manual_seed(2)
    assert_equal(epochs(loader(num_workers=num_workers)), expected)


def test_epochs_and_copies_differ():
    batches = list(epochs(loader(21, mixing=MixingConfig(chance=0.0))))
    pictures = {image.numpy().tobytes() for batch in batches for image in batch["pixel_values"]}
    assert len(pictures) == 42


@pytest.mark.parametrize("after", [4, 12, 20, 21])
def test_resuming_repeats_an_uninterrupted_epoch(after):
    whole = loader()
    whole.sampler.set_epoch(3)
    expected = list(whole)
    resumed = loader()
    resumed.dataset.load_state_dict(whole.dataset.state_dict(after, True))
    resumed.sampler.set_epoch(3)
    rest = list(resumed)
    assert len(rest) == 6 - -(-after // 4)
    if rest:
        assert_equal(rest, expected[-len(rest) :])
    assert_equal(epochs(resumed), epochs(loader()))  # later epochs are whole


def test_resuming_with_another_number_of_images_warns(caplog):
    dataset, state = loader().dataset, loader().dataset.state_dict(4, True)
    for stored in (state, {"sample_in_epoch": 4}):  # earlier versions did not store the number
        dataset.load_state_dict(stored)
    assert not caplog.text
    dataset.load_state_dict({**state, "images": 7})
    assert f"has {len(dataset)} images, and had 7 when the checkpoint was saved: the order differs" in caplog.text


def test_repeated_augmentation():
    for repeats, world in itertools.product((1, 3), (1, 2, 3)):
        draws = [Draws(dataset(), 5, repeats, world, rank) for rank in range(world)]
        per_rank = [list(one) for one in draws]
        assert [len(keys) for keys in per_rank] == [len(one) for one in draws] == [21 // world] * world
        together = [key for keys in zip(*per_rank) for key in keys]
        images = [image for _, image, _ in together]
        assert images == [image for image in dict.fromkeys(images) for _ in range(repeats)][: len(images)]
        assert set(Counter(images).values()) <= {repeats, len(images) % repeats or repeats}
        assert [copy for _, _, copy in together] == [draw % repeats for draw in range(len(images))]
        alone = list(Draws(dataset(), 5, repeats))[: len(together)]
        assert together == alone  # the number of devices does not change what a global batch holds
        if world == repeats == 3:
            assert all(len({keys[n][1] for keys in per_rank}) == 1 for n in range(7))  # a copy on each device


def test_orders_are_new_in_each_epoch():
    draws = Draws(dataset(), 5)
    orders = []
    for epoch in (0, 1, 0):
        draws.set_epoch(epoch)
        orders.append([image for _, image, _ in draws])
    assert orders[0] == orders[2] != orders[1] and sorted(orders[1]) == list(range(21))
    assert [image for _, image, _ in Draws(dataset(), 6)] != orders[0]


def unmixed(count=5):
    return [{"pixel_values": torch.rand(3, 10, 14), "labels": n % 4, "key": (0, n, 0)} for n in range(count)]


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_smoothed_targets_without_mixing(count):
    batch = Mixing(MixingConfig(chance=0.0), 4, 0.1, seed=1)(samples := unmixed(count))
    assert torch.equal(batch["pixel_values"], torch.stack([sample["pixel_values"] for sample in samples]))
    expected = F.one_hot(batch["labels"], 4) * 0.9 + 0.1 / 4
    torch.testing.assert_close(batch["targets"], expected)
    logits = torch.randn(count, 4)  # the loss is torch's own smoothed cross entropy
    smooth = F.cross_entropy(logits, batch["labels"], label_smoothing=0.1)
    torch.testing.assert_close(F.cross_entropy(logits, batch["targets"]), smooth)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [1, 4, 5])
def test_mixup_adds_the_reversed_batch(seed, count):
    samples = unmixed(count)
    images = torch.stack([sample["pixel_values"] for sample in samples])
    batch = Mixing(MixingConfig(cutmix=0.0), 4, 0.0, seed)(samples)
    draw = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, 2, 0, 0, 0))))
    draw.random()
    weight = draw.beta(0.8, 0.8)
    torch.testing.assert_close(batch["pixel_values"], weight * images + (1 - weight) * images.flip(0))
    labels = F.one_hot(batch["labels"], 4)
    torch.testing.assert_close(batch["targets"], (weight * labels + (1 - weight) * labels.flip(0)).float())


@pytest.mark.parametrize("seed", range(8))
def test_cutmix_pastes_a_box_and_weighs_labels_by_its_clipped_area(seed):
    samples = unmixed(5)
    images = torch.stack([sample["pixel_values"] for sample in samples])
    batch = Mixing(MixingConfig(mixup=0.0), 4, 0.0, seed)(samples)
    pasted = (batch["pixel_values"] != images)[0].any(0)
    assert torch.equal(batch["pixel_values"][:, :, pasted], images.flip(0)[:, :, pasted])
    rows, columns = pasted.any(1).sum(), pasted.any(0).sum()
    assert pasted.sum() == rows * columns  # a rectangle
    weight = 1 - float(pasted.float().mean())
    labels = F.one_hot(batch["labels"], 4)
    torch.testing.assert_close(batch["targets"], weight * labels + (1 - weight) * labels.flip(0))


def test_weights_are_distributed_as_timms(monkeypatch):
    """The same images mixed by timm, 2,000 times each: equal shares of cutmix, and equal means and spreads of weights,
    which are not folded to above ½."""
    from timm.data.mixup import Mixup

    np.random.seed(0)
    timms = Mixup(0.8, 1.0, prob=0.9, switch_prob=0.3, label_smoothing=0.0, num_classes=4)
    mixing = Mixing(MixingConfig(switch=0.3, chance=0.9), 4, 0.0, seed=1)
    images = torch.zeros(2, 3, 16, 20)
    images[1] = 1
    weights = {"ours": [], "timm": []}
    cut = Counter()
    for number in range(2000):
        samples = [{"pixel_values": image, "labels": n, "key": (number, n, 0)} for n, image in enumerate(images)]
        batch = mixing(samples)
        for name, pixels, targets in (
            ("ours", batch["pixel_values"], batch["targets"]),
            ("timm", *timms(images.clone(), torch.arange(2))),
        ):
            weights[name].append(float(targets[0, 0]))
            cut[name] += bool(pixels[0].unique().numel() == 2)
    ours, theirs = (np.array(values) for values in weights.values())
    assert abs(cut["ours"] - cut["timm"]) < 120
    assert abs((ours == 1).mean() - (theirs == 1).mean()) < 0.03
    assert abs(ours.mean() - theirs.mean()) < 0.03 and abs(ours.std() - theirs.std()) < 0.02
    assert np.abs(np.quantile(ours, [0.1, 0.25, 0.5, 0.75]) - np.quantile(theirs, [0.1, 0.25, 0.5, 0.75])).max() < 0.06


def test_evaluation_reads_every_image_once():
    data = ImageDataset(ArrayImages("pixels", PIXELS, list(range(21)), [str(n) for n in range(21)]), EVALUATION)
    batches = list(eval_loader(data, ImageLoaderConfig("val"), 8))
    assert torch.cat([batch["labels"] for batch in batches]).tolist() == list(range(21))
    assert batches[0].keys() == {"pixel_values", "labels"}


def test_too_few_images_and_broken_ones_in_a_worker():
    with pytest.raises(UserError, match="has 3 images per device, fewer than a batch of 4; lower global_train_batch"):
        loader(data=dataset(3), drop_last=True)
    for num_workers in (0, 1):
        data = dataset()
        data.images.pixels = [b"broken"] * 21
        with pytest.raises(UserError, match=r"^image \d+ of pixels is not a readable image .*; replace or remove it$"):
            list(loader(data=data, num_workers=num_workers))
