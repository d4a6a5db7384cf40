"""`vision.py predict`: the classes that an image classifier sees in pictures without labels."""

import argparse
import contextlib
import csv
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tqdm.contrib.logging import logging_redirect_tqdm

from src.cli import check_alone, log
from src.data.image_loader import Pictures, picture_loader
from src.data.image_transforms import Evaluation
from src.data.images import find_pictures
from src.errors import UserError, reason
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
    add("--out", type=Path, metavar="FILE.csv", help="file for the predictions (default: print them)")
    add_options(parser)
    options = parser.parse_args(argv)
    if options.top < 1:
        raise UserError(f"--top {options.top} must be at least 1")
    files = find_pictures(options.pictures, "PICTURE")
    checkpoint, settings = read_classifier(options)
    names = checkpoint.class_names
    top = min(options.top, len(names))
    log.info(f"{options.model}: {len(names):,} classes, on {options.device} in {options.precision}")
    loader = picture_loader(Pictures(files, Evaluation(settings)), options.batch_size, options.num_workers)
    unreadable, counts = 0, Counter()
    with contextlib.ExitStack() as stack:
        write = None  # predictions are printed, which shows progress
        if options.out is not None:
            write = stack.enter_context(csv_file(options.out, top))
            stack.enter_context(logging_redirect_tqdm())
        for batch, found, _ in logits(checkpoint, loader, options, None if write is None else "predicting"):
            for problem in batch["problems"]:
                log.warning(problem)
            unreadable += len(batch["problems"])
            best = found.softmax(1).topk(top)
            for file, shares, classes in zip(batch["files"], best.values.tolist(), best.indices.tolist()):
                likely = [(names[number], share) for number, share in zip(classes, shares)]
                counts[likely[0][0]] += 1
                if write is not None:
                    write([file, *(value for name, share in likely for value in (name, f"{share:.4f}"))])
                else:
                    print(
                        f"{printable(file)}  {', '.join(f'{name} {share:.1%}' for name, share in likely)}", flush=True
                    )
        if unreadable:
            log.warning(f"{unreadable:,} of {len(files):,} files could not be read")
        if not counts:
            raise UserError("PICTURE: none of the files is a readable picture; name others")
    if options.out is not None:
        rows = [f"{count:9,}  {name}" for name, count in counts.most_common(SHOWN)]
        print("\n".join(["", " pictures  class", *rows, *(["        …"] if len(counts) > SHOWN else [])]))
        print(f"\npredictions   {options.out}")


@contextlib.contextmanager
def csv_file(path: Path, top: int) -> Iterator[Callable[[Sequence[str]], object]]:
    """Give what writes a row of a CSV file with the columns file, class, probability, class_2, probability_2, …; it
    gets its name once it is complete. Raises UserError if it cannot be written."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    places = ["", *(f"_{place}" for place in range(2, top + 1))]
    try:
        if path.is_dir():
            raise UserError(f"--out {path} is a folder; name a file in it")
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:  # names of any bytes
            write = csv.writer(file).writerow
            write(["file", *(f"{name}{place}" for place in places for name in ("class", "probability"))])
            yield write
        unfinished.replace(path)
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written ({reason(error)}); choose another file") from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def printable(file: str) -> str:
    """Return the name of a file on one line, with escapes for control characters and bytes of no character."""
    shown = os.fsencode(file).decode(errors="backslashreplace")
    return re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\x{ord(found[0]):02x}", shown)
