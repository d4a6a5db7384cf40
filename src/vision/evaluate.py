"""`vision.py evaluate`: the accuracy of an image classifier, overall and per class, and its speed."""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from src.checkpoints.reading import Checkpoint, read_pretrained
from src.cli import check_alone, log, progress
from src.data.image_config import ImageLoaderConfig
from src.data.image_loader import ImageDataset, eval_loader
from src.data.image_transforms import Evaluation
from src.data.images import open_images
from src.data.workers import usable_cores
from src.errors import RunFailed, UserError, reason
from src.files import write_json
from src.lion.cpu import speed_up
from src.tables import markdown
from src.training.trainer import resolve_device, silence_libraries
from src.vision.classes import labels_of

SHOWN = 10  # classes in the printed table, if there are more than twice as many


@dataclass
class Evaluated:
    """What an evaluation found. `confusion`: (classes, classes), images of a class (row) predicted as one (column)."""

    classes: list[str]
    confusion: Tensor
    top1: float
    top5: float
    loss: float
    seconds: float

    @property
    def per_class(self) -> list[float | None]:
        """The share of right predictions in each class; None for one without images."""
        totals = self.confusion.sum(1)
        right = self.confusion.diagonal() / totals.clamp(min=1)
        return [float(share) if total else None for share, total in zip(right, totals)]


def evaluate(argv: list[str]) -> None:
    """Run the command. Raises UserError, RunFailed."""
    check_alone("vision.py evaluate")
    parser = argparse.ArgumentParser(
        "vision.py evaluate",
        description="Print top-1 and top-5 accuracy, accuracy per class and images per second of an image classifier.",
        epilog="Example: python vision.py evaluate my-model --data ./imagenet --batch_size 256 --precision bf16",
    )
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="checkpoint, Hub folder or Hub name; also a ViT or DeiT of transformers, timm or DeiT's",
    )
    add(
        "--data",
        required=True,
        help="as data_local of vision.py: a folder with SPLIT/CLASS/*, shards, …, or a Hub name",
    )
    add("--split", default="val", help="subfolder or split of the data (default: val)")
    add("--out", help="folder for report.json and confusion.png (default: only print)")
    add("--batch_size", type=int, default=64, help="images per batch (default: 64)")
    add("--num_workers", type=int, default=usable_cores() - 1, help="processes that read images (default: %(default)s)")
    add("--device", choices=["gpu", "cpu"], help="default: a GPU if there is one")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="default: fp32")
    words = "match the data's classes, in alphabetical order, to the model's by number: their names differ"
    add("--by_number", action="store_true", help=words)
    add_image_size(parser)
    options = parser.parse_args(argv)
    for name in ("batch_size", "num_workers"):
        if getattr(options, name) < (name == "batch_size"):
            raise UserError(f"--{name} {getattr(options, name)} must be at least {int(name == 'batch_size')}")
    silence_libraries()
    device = resolve_device(options.device)
    checkpoint = read_pretrained(options.model, "MODEL", reads="images")
    images = open_images(options.data, options.split, key="--data")
    check_rgb(checkpoint)
    labels = labels_of(images, checkpoint, options.by_number)
    settings = resized(checkpoint.processor, options.image_size, checkpoint)
    dataset = ImageDataset(images, Evaluation(settings))
    loader = eval_loader(dataset, ImageLoaderConfig(options.split, num_workers=options.num_workers), options.batch_size)
    sizes = settings["crop_size"]
    where = f"{len(images):,} images of {images.source}, {sizes['height']}×{sizes['width']} pixels"
    log.info(f"{options.model}: {checkpoint.config.mixer}, on {device} in {options.precision}; {where}")
    found = measure(checkpoint, loader, labels, device, options.precision)
    print(report(found))
    if options.out is not None:
        save(found, Path(options.out), options.model, images.source)


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


@torch.no_grad()
def measure(checkpoint: Checkpoint, loader: Any, labels: Tensor, device: str, precision: str) -> Evaluated:
    """Return what a model finds in all batches. Raises RunFailed for non-finite logits."""
    name = "cuda" if device == "gpu" else "cpu"
    model = checkpoint.build().to(name)
    speed_up(model)
    config, classes = checkpoint.config, checkpoint.config.num_labels
    if not classes:
        raise UserError(f"{checkpoint.path} has no classifier; name a model with one")
    confusion, top5, loss, seconds = torch.zeros(classes, classes, dtype=torch.long), 0, 0.0, 0.0
    with progress(loader, desc="evaluating", unit="batch") as batches:
        for batch in batches:
            start = time.perf_counter()
            with torch.autocast(name, torch.bfloat16, enabled=precision == "bf16"):
                logits = model(batch["pixel_values"].to(name)).logits.float().cpu()
            seconds += time.perf_counter() - start
            if not logits.isfinite().all():
                raise RunFailed("the model's logits are non-finite; use --precision fp32, or another checkpoint")
            right = labels[batch["labels"]]
            confusion.view(-1).index_add_(0, right * classes + logits.argmax(1), torch.ones_like(right))
            top5 += int((logits.topk(min(5, classes)).indices == right[:, None]).sum())
            loss += float(torch.nn.functional.cross_entropy(logits, right, reduction="sum"))
    count = int(confusion.sum())
    names = [str(config.id2label[number]) for number in range(classes)]
    return Evaluated(names, confusion, int(confusion.trace()) / count, top5 / count, loss / count, seconds)


def title_of(model: str) -> str:
    """Return a model's name for a picture: a checkpoint's is that of its run."""
    path = Path(model)
    return (path.resolve().parent if path.is_file() else path).name


def report(found: Evaluated) -> str:
    """Return the results as text: all classes, or those with the lowest accuracy if there are many."""
    count = int(found.confusion.sum())
    lines = [
        f"top-1 accuracy  {found.top1:.2%}",
        f"top-5 accuracy  {found.top5:.2%}",
        f"loss            {found.loss:.4f}",
        f"images          {count:,} in {found.seconds:.1f} s of computing ({count / found.seconds:,.1f} per second)",
    ]
    rows = [
        (share, name, row)
        for share, name, row in zip(found.per_class, found.classes, found.confusion)
        if share is not None
    ]
    title = "accuracy per class"
    if len(rows) > 2 * SHOWN:
        rows, title = sorted(rows, key=lambda row: row[0])[:SHOWN], f"the {SHOWN} classes with the lowest accuracy"
    table = [["class", "images", "right", "most often taken for"]]
    for share, name, row in rows:
        wrong = row.clone()
        wrong[found.classes.index(name)] = 0
        other = f"{found.classes[int(wrong.argmax())]} ({int(wrong.max())})" if wrong.any() else ""
        table.append([name, f"{int(row.sum()):,}", f"{share:.1%}", other])
    return "\n".join([*lines, "", f"{title}:", "", markdown(table)])


def save(found: Evaluated, folder: Path, model: str, source: str) -> None:
    """Write report.json and confusion.png. Raises UserError if that fails."""
    from src.vision.pictures import confusion

    count = int(found.confusion.sum())
    content = {
        "model": model, "data": source, "images": count, "top1": found.top1, "top5": found.top5, "loss": found.loss,
        "images_per_second": count / found.seconds, "per_class": dict(zip(found.classes, found.per_class)),
        "confusion": found.confusion.tolist() if len(found.classes) <= 100 else None,
    }  # fmt: skip
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "report.json", content)
        confusion(
            found.classes,
            found.confusion,
            folder / "confusion.png",
            f"{title_of(model)}: top-1 accuracy {found.top1:.2%}",
        )
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written ({reason(error)}); choose another folder") from None
    print(f"\nreport        {folder / 'report.json'}\nconfusion     {folder / 'confusion.png'}")
