"""`vision.py evaluate`: the accuracy of an image classifier, overall and per class, and its speed."""

import argparse
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from src.checkpoints.reading import Checkpoint
from src.cli import check_alone, log
from src.data.image_config import ImageLoaderConfig
from src.data.image_loader import ImageDataset, ImageLoader, eval_loader
from src.data.image_transforms import Evaluation
from src.data.images import open_images
from src.errors import UserError, reason
from src.files import write_json
from src.tables import markdown
from src.vision.classes import labels_of
from src.vision.inference import add_model, add_options, logits, read_classifier, title_of

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
    add_model(parser)
    add = parser.add_argument
    add(
        "--data",
        required=True,
        help="as data_local of vision.py: a folder with SPLIT/CLASS/*, shards, …, or a Hub name",
    )
    add("--split", default="val", help="subfolder or split of the data (default: val)")
    add("--out", help="folder for report.json and confusion.png (default: only print)")
    words = "match the data's classes, in alphabetical order, to the model's by number: their names differ"
    add("--by_number", action="store_true", help=words)
    add_options(parser)
    options = parser.parse_args(argv)
    checkpoint, settings = read_classifier(options)
    images = open_images(options.data, options.split, key="--data")
    labels = labels_of(images, checkpoint, options.by_number)
    dataset = ImageDataset(images, Evaluation(settings))
    loader = eval_loader(dataset, ImageLoaderConfig(options.split, num_workers=options.num_workers), options.batch_size)
    sizes = settings["crop_size"]
    where = f"{len(images):,} images of {images.source}, {sizes['height']}×{sizes['width']} pixels"
    log.info(f"{options.model}: {checkpoint.config.mixer}, on {options.device} in {options.precision}; {where}")
    found = measure(checkpoint, loader, labels, options)
    print(report(found))
    if options.out is not None:
        save(found, Path(options.out), options.model, images.source)


def measure(checkpoint: Checkpoint, loader: ImageLoader, labels: Tensor, options: argparse.Namespace) -> Evaluated:
    """Return what a model finds in all batches. Raises RunFailed for non-finite logits."""
    classes = checkpoint.config.num_labels
    confusion, top5, loss, seconds = torch.zeros(classes, classes, dtype=torch.long), 0, 0.0, 0.0
    for batch, found, taken in logits(checkpoint, loader, options, "evaluating"):
        right = labels[batch["labels"]]
        confusion.view(-1).index_add_(0, right * classes + found.argmax(1), torch.ones_like(right))
        top5 += int((found.topk(min(5, classes)).indices == right[:, None]).sum())
        loss += float(torch.nn.functional.cross_entropy(found, right, reduction="sum"))
        seconds += taken
    count = int(confusion.sum())
    return Evaluated(
        checkpoint.class_names, confusion, int(confusion.trace()) / count, top5 / count, loss / count, seconds
    )


def report(found: Evaluated) -> str:
    """Return the results as text: all classes, or those with the lowest accuracy if there are many."""
    count = int(found.confusion.sum())
    lines = [
        f"top-1 accuracy  {found.top1:.2%}",
        f"top-5 accuracy  {found.top5:.2%}",
        f"loss            {found.loss:.4f}",
        f"images          {count:,} in {found.seconds:.1f} s of computing ({count / found.seconds:,.1f} per second)",
    ]
    rows = [(share, label) for label, share in enumerate(found.per_class) if share is not None]
    title = "accuracy per class"
    if len(rows) > 2 * SHOWN:
        rows, title = sorted(rows, key=lambda row: row[0])[:SHOWN], f"the {SHOWN} classes with the lowest accuracy"
    table = [["class", "images", "right", "most often taken for"]]
    for share, label in rows:
        wrong = (row := found.confusion[label]).clone()
        wrong[label] = 0
        other = f"{found.classes[int(wrong.argmax())]} ({int(wrong.max())})" if wrong.any() else ""
        table.append([found.classes[label], f"{int(row.sum()):,}", f"{share:.1%}", other])
    return "\n".join([*lines, "", f"{title}:", "", markdown(table)])


def save(found: Evaluated, folder: Path, model: str, source: str) -> None:
    """Write report.json and confusion.png. Raises UserError if that fails."""
    from src.vision.pictures import confusion

    count = int(found.confusion.sum())
    repeated = {name for name, times in Counter(found.classes).items() if times > 1}
    names = [f"{name} ({label})" if name in repeated else name for label, name in enumerate(found.classes)]
    content = {
        "model": model, "data": source, "images": count, "top1": found.top1, "top5": found.top5, "loss": found.loss,
        "images_per_second": count / found.seconds, "per_class": dict(zip(names, found.per_class)),
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
