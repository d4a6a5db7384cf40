"""`vision.py predict`: the classes that an image classifier sees in pictures without labels."""

import argparse
import csv
import io
from collections import Counter
from pathlib import Path

from src.cli import check_alone, log
from src.data.image_loader import Pictures, picture_loader
from src.data.image_transforms import Evaluation
from src.data.images import find_pictures
from src.errors import UserError, reason
from src.files import write_atomically
from src.vision.inference import add_model, add_options, logits, read_classifier

SHOWN = 20  # classes in the summary


def predict(argv: list[str]) -> None:
    """Run the command. Raises UserError, RunFailed."""
    check_alone("vision.py predict")
    parser = argparse.ArgumentParser(
        "vision.py predict",
        description="Print the most probable classes of pictures. Unreadable files are named and skipped.",
        epilog="Example: python vision.py predict my-model holiday/ cat.jpg --top 3 --out predictions.csv",
    )
    add_model(parser)
    add = parser.add_argument
    add("pictures", metavar="PICTURE", nargs="+", help="a file, or a folder with pictures, at any depth")
    add("--top", type=int, default=1, help="classes per picture (default: 1)")
    add("--out", type=Path, help="a .csv file for the predictions (default: print them)")
    add_options(parser)
    options = parser.parse_args(argv)
    if options.top < 1:
        raise UserError(f"--top {options.top} must be at least 1")
    files = find_pictures(options.pictures, "PICTURE")
    checkpoint, settings = read_classifier(options)
    names = [str(checkpoint.config.id2label[number]) for number in range(checkpoint.config.num_labels)]
    top = min(options.top, len(names))
    log.info(
        f"{options.model}: {len(names):,} classes, on {options.device} in {options.precision}; {len(files):,} files"
    )
    loader = picture_loader(Pictures(files, Evaluation(settings)), options.batch_size, options.num_workers)
    rows, unreadable, counts = [], 0, Counter()
    for batch, found, _ in logits(checkpoint, loader, options, "predicting"):
        for problem in batch["problems"]:
            log.warning(problem)
        unreadable += len(batch["problems"])
        best = found.softmax(1).topk(top)
        for file, shares, classes in zip(batch["files"], best.values.tolist(), best.indices.tolist()):
            likely = [(names[number], share) for number, share in zip(classes, shares)]
            counts[likely[0][0]] += 1
            rows.append([file, *(value for name, share in likely for value in (name, f"{share:.4f}"))])
            if options.out is None:
                print(f"{file}  {', '.join(f'{name} {share:.1%}' for name, share in likely)}", flush=True)
    if unreadable:
        log.warning(f"{unreadable:,} of {len(files):,} files could not be read")
    if not rows:
        raise UserError("PICTURE: none of the files is a readable picture; name others")
    if options.out is not None:
        save(rows, top, options.out)
        shown = [f"{count:9,}  {name}" for name, count in counts.most_common(SHOWN)]
        print("\n".join(["", " pictures  class", *shown, *(["        …"] if len(counts) > SHOWN else [])]))
        print(f"\npredictions   {options.out}")


def save(rows: list[list[str]], top: int, path: Path) -> None:
    """Write a CSV file with the columns file, class, probability, class_2, probability_2, … Raises UserError."""
    places = ["", *(f"_{place}" for place in range(2, top + 1))]
    header = ["file", *(f"{name}{place}" for place in places for name in ("class", "probability"))]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.getvalue())
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written ({reason(error)}); choose another file") from None
