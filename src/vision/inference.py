"""What commands that classify pictures share: their options, the model, and its logits."""

import argparse
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from src.checkpoints.reading import Checkpoint, read_pretrained
from src.cli import progress
from src.data.image_loader import ImageLoader
from src.data.workers import usable_cores
from src.errors import RunFailed, UserError
from src.lion.cpu import flush_denormals, speed_up
from src.lion.machine import keep_freed_memory
from src.training.trainer import resolve_device, silence_libraries


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add how pictures are read, which `read_classifier` and `logits` take."""
    add = parser.add_argument
    add("--batch_size", type=int, default=64, help="images per batch (default: 64)")
    add("--num_workers", type=int, default=usable_cores() - 1, help="processes that read images (default: %(default)s)")
    add("--device", choices=["gpu", "cpu"], help="default: a GPU if there is one")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="default: fp32")
    add_image_size(parser)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the argument MODEL."""
    words = "checkpoint, folder of a run, Hub folder or Hub name; also a ViT or DeiT of transformers, timm or DeiT's"
    parser.add_argument("model", metavar="MODEL", help=words)


def read_classifier(options: argparse.Namespace) -> tuple[Checkpoint, dict[str, Any]]:
    """Return the model and the settings of its image processor, and resolve `options.device`. Raises UserError."""
    for name in ("batch_size", "num_workers"):
        if getattr(options, name) < (name == "batch_size"):
            raise UserError(f"--{name} {getattr(options, name)} must be at least {int(name == 'batch_size')}")
    silence_libraries()
    options.device = resolve_device(options.device)
    checkpoint = read_pretrained(options.model, "MODEL", reads="images")
    check_rgb(checkpoint)
    if not checkpoint.config.num_labels:
        raise UserError(f"{checkpoint.path} has no classifier; name a model with one")
    return checkpoint, resized(checkpoint.processor, options.image_size, checkpoint)


@torch.no_grad()
def logits(
    checkpoint: Checkpoint, loader: ImageLoader, options: argparse.Namespace, words: str | None
) -> Iterator[tuple[dict[str, Any], Tensor, float]]:
    """Yield each batch of `pixel_values`, its logits, (B, classes) in float32 on the CPU, and the seconds that they
    took. words: what the progress bar says; None: there is none. Raises RunFailed for non-finite ones."""
    flush_denormals()
    keep_freed_memory()  # the next batch requests it again
    name = "cuda" if options.device == "gpu" else "cpu"
    model = checkpoint.build().to(name)
    speed_up(model)
    bar = contextlib.nullcontext(loader) if words is None else progress(loader, desc=words, unit="batch")
    with bar as batches:
        for batch in batches:
            if not len(batch["pixel_values"]):  # none of its files can be read
                yield batch, torch.empty(0, checkpoint.config.num_labels), 0.0
                continue
            start = time.perf_counter()
            with torch.autocast(name, torch.bfloat16, enabled=options.precision == "bf16"):
                found = model(batch["pixel_values"].to(name)).logits.float().cpu()
            seconds = time.perf_counter() - start
            if not found.isfinite().all():
                raise RunFailed("the model's logits are non-finite; use --precision fp32, or another checkpoint")
            yield batch, found, seconds


def add_image_size(parser: argparse.ArgumentParser) -> None:
    """Add the option that `resized` takes."""
    words = "another size than the model's: one side, or two"
    parser.add_argument("--image_size", type=int, nargs="+", metavar="PIXELS", help=words)


def check_rgb(checkpoint: Checkpoint) -> None:
    """Raise UserError for a model that does not read three channels."""
    if (channels := checkpoint.config.num_channels) != 3:
        raise UserError(f"{checkpoint.path} reads {channels} channels, and files are read as RGB; use it from Python")


def resized(processor: dict[str, Any], size: list[int] | None, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a processor's settings, for images of another size if one is given, with the same margin."""
    if size is None:
        return processor
    if len(size) > 2 or any(side < 1 or side % checkpoint.config.patch_size for side in size):
        patch = checkpoint.config.patch_size
        raise UserError(f"--image_size {' '.join(map(str, size))} must be one or two multiples of the patch, {patch}")
    height, width = size[0], size[-1]
    crop, old = processor["crop_size"], processor["size"]
    short = old.get("shortest_edge") or max(old.values())
    scale = max(height, width) / max(crop.values())
    return processor | {
        "crop_size": {"height": height, "width": width}, "size": {"shortest_edge": round(short * scale)},
        "do_center_crop": True,
    }  # fmt: skip


def title_of(model: str) -> str:
    """Return a model's name for a picture: a checkpoint's is that of its run."""
    path = Path(model)
    return (path.resolve().parent if path.is_file() else path).name
