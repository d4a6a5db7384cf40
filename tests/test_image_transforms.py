"""Evaluation equals transformers' image processor; each part of the augmentation equals its definition."""

import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps
from transformers import CLIPImageProcessor, CLIPImageProcessorFast, ViTImageProcessor

from src.checkpoints.processors import processor_settings, read_processor
from src.data.image_config import AugmentationConfig
from src.data.image_transforms import Augmentation, Evaluation, seeded
from src.errors import UserError

NONE = {"crop": "none", "flip": 0.0, "policy": "none", "jitter": 0.0, "erasing": 0.0}


def picture(height, width, seed=0) -> Image.Image:
    rough = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC)


def augmentation(size=24, crop_pct=1.0, **changes) -> Augmentation:
    evaluation = Evaluation(processor_settings(size, crop_pct))
    sides = (size, size) if isinstance(size, int) else tuple(size)
    return Augmentation(AugmentationConfig(**{**NONE, **changes}), evaluation, sides)


@pytest.mark.parametrize("shape", [(40, 40), (41, 67), (90, 31), (12, 300), (8, 8)])
@pytest.mark.parametrize("size, crop_pct", [(24, 0.875), (24, 1.0), (384, 0.875), ([16, 32], 0.9), (23, 0.95)])
def test_evaluation_equals_the_published_processor(shape, size, crop_pct):
    settings = processor_settings(size, crop_pct, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    image = picture(*shape)
    expected = CLIPImageProcessor(**settings)(image, return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(Evaluation(settings)(image), expected, atol=1e-6, rtol=0)


def test_processors_that_resize_by_torchvision_differ_by_two_levels_at_most():
    settings = processor_settings(24, 1.0, (0.0,) * 3, (1.0,) * 3)
    for shape in ((40, 40), (48, 72), (96, 30), (25, 25)):
        image = picture(*shape)
        found = CLIPImageProcessorFast(**settings)(image, return_tensors="pt")["pixel_values"][0]
        difference = 255 * (Evaluation(settings)(image) - found).abs()
        assert difference.max() < 2.01 and (difference > 0.01).float().mean() < 0.01


@pytest.mark.parametrize("stored", [
    ViTImageProcessor(size={"height": 20, "width": 24}).to_dict(),
    {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 224}, "crop_pct": 0.875, "resample": 3},
    {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 384}, "resample": 3},
    {"feature_extractor_type": "DeiTFeatureExtractor", "size": 30, "crop_size": 24, "do_center_crop": True},
])  # fmt: skip
def test_processors_of_others_are_translated(stored):
    import transformers

    name = stored.get("image_processor_type", "DeiTImageProcessor")
    processor = getattr(transformers, name)(**{key: v for key, v in stored.items() if not key.endswith("_type")})
    image = picture(50, 61)
    expected = processor(image, return_tensors="pt")["pixel_values"][0]
    full = {**processor.to_dict(), "image_processor_type": name}
    torch.testing.assert_close(Evaluation(read_processor(full, "it"))(image), expected, atol=1e-6, rtol=0)


def test_unknown_processors_are_named():
    with pytest.raises(UserError, match="it has a PoolFormerImageProcessor, which is unknown"):
        read_processor({"image_processor_type": "PoolFormerImageProcessor", "size": 3}, "it")
    with pytest.raises(UserError, match="unusable settings"):
        read_processor({"image_processor_type": "ViTImageProcessor"}, "it")


def test_draws_depend_on_the_entropy_alone():
    def draw(*entropy):
        with seeded(*entropy):
            return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(1)
    first = draw(1, 2, 3)
    middle = random.random()
    assert draw(1, 2, 3) == first and draw(1, 2, 4)[0] != first[0] and draw(1, 2, 4)[1] != first[1]
    random.seed(1)
    assert random.random() == middle  # a draw leaves the generators as they were


def test_resized_crop_is_torchvisions_within_its_bounds():
    from torchvision import transforms

    image, change = picture(60, 90), augmentation(crop="resized", area=[0.1, 0.3], aspect=[0.5, 2.0])
    for number in range(20):
        with seeded(number):
            result = change(image)
        with seeded(number):
            top, left, height, width = transforms.RandomResizedCrop.get_params(image, (0.1, 0.3), (0.5, 2.0))
        assert 0.09 * 5400 <= height * width <= 0.31 * 5400 and 0.45 <= width / height <= 2.2
        part = image.crop((left, top, left + width, top + height)).resize((24, 24), Image.Resampling.BICUBIC)
        torch.testing.assert_close(result, change.evaluation.normalized(part))


def test_padded_crop_shifts_the_image_in_black():
    image, change, seen = picture(24, 24), augmentation(crop="padded", padding=2), set()
    padded = ImageOps.expand(image, 2)
    windows = {(y, x): padded.crop((x, y, x + 24, y + 24)).tobytes() for y in range(5) for x in range(5)}
    for number in range(200):
        with seeded(number):
            pixels = change.picture(image)
        seen |= {place for place, window in windows.items() if window == pixels.tobytes()}
    assert len(seen) == 25


def test_flip_happens_with_its_chance():
    image, change = picture(24, 24), augmentation(flip=0.3)
    mirrored, flips = ImageOps.mirror(image).tobytes(), 0
    for number in range(400):
        with seeded(number):
            result = change.picture(image).tobytes()
        assert result in (image.tobytes(), mirrored)
        flips += result == mirrored
    assert 90 < flips < 150


def test_randaugment_is_timms():
    from timm.data.auto_augment import rand_augment_transform

    image, change = picture(24, 24), augmentation(policy="randaugment", magnitude="m9-mstd0.5-inc1")
    options = {"translate_const": 10, "img_mean": (124, 116, 104), "interpolation": Image.Resampling.BICUBIC}
    timms = rand_augment_transform("rand-m9-mstd0.5-inc1", options)
    assert len(timms.ops) == 15 and timms.num_layers == 2 and all(op.prob == 0.5 for op in timms.ops)
    changed = 0
    for number in range(60):
        with seeded(number):
            ours = change.picture(image)
        with seeded(number):
            torch.rand(1)  # the flip's
            expected = timms(image)
        assert ours.tobytes() == expected.tobytes()
        changed += ours.tobytes() != image.tobytes()
    assert 30 < changed < 60


def test_three_augment_is_grey_solarized_or_blurred():
    image, change, kinds = picture(24, 24), augmentation(policy="three_augment"), set()
    grey, solarized = ImageOps.grayscale(image).convert("RGB"), ImageOps.solarize(image, 128)
    for number in range(40):
        with seeded(number):
            result = np.asarray(change.picture(image)).astype(int)
        if np.abs(result - np.asarray(grey)).max() <= 1:
            kinds.add("grey")
        elif np.abs(result - np.asarray(solarized)).max() == 0:
            kinds.add("solarized")
        else:
            blurs = [np.asarray(image.filter(ImageFilter.GaussianBlur(r))) for r in np.arange(0.1, 2.05, 0.05)]
            assert min(np.abs(result - blur).max() for blur in blurs) <= 6
            kinds.add("blurred")
    assert kinds == {"grey", "solarized", "blurred"}


def test_jitter_stays_within_its_share():
    image = Image.new("RGB", (24, 24), (100, 100, 100))  # of no contrast and no colour: brightness alone changes it
    values = set()
    for number in range(30):
        with seeded(number):
            values.add(np.asarray(augmentation(jitter=0.3).picture(image)).max())
    assert 69 <= min(values) < 90 and 110 < max(values) <= 131


def test_erasing_replaces_a_rectangle_by_noise():
    image, change, erased = picture(24, 24), augmentation(erasing=0.25), []
    plain = change.evaluation(image)
    for number in range(300):
        with seeded(number):
            result = change(image)
        where = (result != plain).any(0)
        if where.any():
            rows, columns = where.any(1).nonzero().flatten(), where.any(0).nonzero().flatten()
            height, width = len(rows), len(columns)
            assert where.sum() == height * width == (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1)
            assert 0.01 <= height * width / 576 <= 0.37 and 0.2 <= height / width <= 4.5
            erased.append(result[:, where])
    assert 45 < len(erased) < 105
    noise = torch.cat([part.flatten() for part in erased])
    assert abs(noise.mean()) < 0.05 and abs(noise.std() - 1) < 0.05


@pytest.mark.parametrize("changes, problem", [
    ({"magnitude": "strong"}, "augmentation.magnitude='strong' is not timm's notation"),
    ({"magnitude": "m9-mstd"}, "is not timm's notation"),
    ({"area": [0.5, 0.1]}, "augmentation.area"),
    ({"aspect": [1.0]}, "augmentation.aspect"),
])  # fmt: skip
def test_mistakes(changes, problem):
    AugmentationConfig(magnitude="m7-n3-p0.4-mstd0.5-mmax12-inc0").check()
    with pytest.raises(UserError, match=problem):
        AugmentationConfig(**changes).check()
