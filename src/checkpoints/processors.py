"""Settings of image processors: what is done to a picture before a model reads it."""

from collections.abc import Mapping, Sequence
from typing import Any

from src.errors import UserError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's channels
# Mean and standard deviation that classes of transformers use if they are not stored.
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
OF_CLASS = {"CLIPImageProcessor": CLIP, "BitImageProcessor": CLIP}
OF_CLASS |= dict.fromkeys(("ViTImageProcessor", "DeiTImageProcessor", "ConvNextImageProcessor"), HALF)
RESAMPLE = {"ViTImageProcessor": 2, "ConvNextImageProcessor": 2}  # others: 3
# Stored classes whose settings mean what CLIPImageProcessor's mean; a crop is theirs only if they name it.
SAME_MEANING = ("CLIPImageProcessor", "ViTImageProcessor", "DeiTImageProcessor", "BitImageProcessor")


def processor_settings(
    image_size: int | Sequence[int], crop_pct: float = 0.875, mean: Sequence[float] = MEAN, std: Sequence[float] = STD
) -> dict[str, Any]:
    """Return the settings of transformers' CLIPImageProcessor: resize the shorter side bicubically to image_size /
    crop_pct, crop the centre, and normalize. For [height, width], the greater decides the shorter side."""
    height, width = [image_size] * 2 if isinstance(image_size, int) else image_size
    return {
        "image_processor_type": "CLIPImageProcessor", "do_convert_rgb": True, "do_resize": True,
        "size": {"shortest_edge": int(max(height, width) / crop_pct)}, "resample": 3, "do_center_crop": True,
        "crop_size": {"height": height, "width": width}, "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": list(mean), "image_std": list(std),
    }  # fmt: skip


def normalization(processor: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the mean and the standard deviation of the channels, as keys of a config of images."""
    return {"mean": list(processor["image_mean"]), "std": list(processor["image_std"])}


def differs(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two means or standard deviations differ by more than rounding."""
    return len(one) != len(other) or any(abs(a - b) > 1e-4 for a, b in zip(one, other))


def written(value: Any) -> str:
    """Return a value as it is given on the command line: [0.5,0.5,0.5]."""
    return f"[{','.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)


def kind_of(stored: Mapping[str, Any]) -> str:
    """Return the class of a stored image processor, by its name in transformers 4."""
    kind = str(stored.get("image_processor_type") or stored.get("feature_extractor_type"))
    return kind.removesuffix("Fast").replace("FeatureExtractor", "ImageProcessor")


def stored_normalization(stored: Mapping[str, Any]) -> tuple[Sequence[float], Sequence[float]]:
    """Return the mean and the standard deviation that a stored image processor subtracts and divides by; where it does
    not name them, those of its class in transformers, or ImageNet's."""
    if not stored.get("do_normalize", True):
        return [0.0] * 3, [1.0] * 3
    mean, std = OF_CLASS.get(kind_of(stored), (MEAN, STD))
    return stored.get("image_mean") or mean, stored.get("image_std") or std


def read_processor(stored: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the settings of CLIPImageProcessor that do what a folder's preprocessor_config.json says. Raises UserError
    for another processor than those of ViT, DeiT and ConvNeXT."""
    kind = kind_of(stored)
    try:
        mean, std = stored_normalization(stored)
        if not (stored.get("do_resize", True) and stored.get("do_rescale", True)) or (
            abs(255 * stored.get("rescale_factor", 1 / 255) - 1) > 1e-6
        ):
            raise UserError(f"the image processor of {source} does not resize, or scale to 0 … 1; name another model")
        size, resample = stored["size"], stored.get("resample", RESAMPLE.get(kind, 3))
        if kind == "ConvNextImageProcessor":
            short = size if isinstance(size, int) else size["shortest_edge"]
            if short < 384:
                return processor_settings(short, stored.get("crop_pct", 224 / 256), mean, std) | {"resample": resample}
            size = {"height": short, "width": short}
        elif kind not in SAME_MEANING:
            raise UserError(f"{source} has a {kind}, which is unknown; write a preprocessor_config.json of ViT's")
        size = {"height": size, "width": size} if isinstance(size, int) else dict(size)
        crop = stored.get("crop_size")
        crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
        cropped = bool(crop) and stored.get("do_center_crop", kind == "CLIPImageProcessor")
        if not cropped and "height" not in size:
            raise UserError(f"the image processor of {source} gives images of different shapes; set do_center_crop")
        settings = processor_settings(1, 1, mean, std) | {"size": size, "resample": resample}
        return settings | {"do_center_crop": cropped, "crop_size": crop if cropped else size}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"the image processor of {source} has unusable settings ({type(error).__name__}: {error})"
        raise UserError(f"{problem}; export the folder again") from None
