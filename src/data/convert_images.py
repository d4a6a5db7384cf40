"""Labelled images → MDS shards with the columns image, a file's bytes as they were, and label."""

import contextlib
import io
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from src.cli import log, progress
from src.data.images import Images, decode, divide, open_images
from src.data.parts import command_of
from src.data.splits import Split, check_options, start_or_resume, unfinished, write_all
from src.data.workers import in_order
from src.errors import UserError
from src.files import write_json

GROUP = 64  # images that a process verifies at a time
NAMED = 100  # broken images whose names split.json keeps
COLUMNS = {"image": "bytes", "label": "int"}
OF_TEXT = {  # options, with what they are if they are not given
    "tokenizer": None, "concat_tokens": None, "max_seq_len": None, "data_subset": None,
    "revision": None, "stdin_format": None, "part": None, "text_column": "text", "one_document_per_file": False,
    "malformed_rows": 0,
}  # fmt: skip


class Source:
    """The images of a split, as `Split` expects a source."""

    stamps = None  # the description identifies the data
    resumable = True

    def __init__(self, images: Images, name: str):
        self.images = images
        self.description = {"images": name, "count": len(images), "contents": images.digest()}


def convert_images(options: Namespace) -> None:
    """Write the splits that a command line of src/convert_dataset.py asks for. Raises UserError."""
    if unknown := [split for split in options.splits if split not in ("train", "val")]:
        raise UserError(f"--splits {' '.join(unknown)}: images have train and val; name one or both")
    if given := [name for name, default in OF_TEXT.items() if getattr(options, name) != default]:
        raise UserError(f"--{given[0]} is for text, not for --images; omit it")
    if (fraction := options.val_fraction) is not None and not 0 < fraction < 1:
        raise UserError(f"--val_fraction {fraction} must be between 0 and 1")
    check_options(options)
    write_all(lambda: plan(options), lambda split: write_split(split, options), options, resumable=True)


def plan(options: Namespace) -> list[Split]:
    """Return the splits to write, with their folders created; none is created if this raises UserError."""
    from src.data.shards import read_progress

    splits, (name, fraction) = [], (options.images, options.val_fraction)
    parts = {} if fraction is None else divide(name, fraction, "--images")
    for split in options.splits:
        folder = Path(options.out_root, split)
        images = parts[split] if parts else open_images(name, split, key="--images")
        if not len(images):
            raise UserError(f"--images: no class of {name} has two pictures that differ, so val is empty; add some")
        source, progress = Source(images, name), read_progress(unfinished(folder))
        stored = (command_of(folder) or (progress or {}).get("command") or {}).get("contents")
        if stored not in (None, source.description["contents"]) and stored == images.earlier_digest():
            source.description["contents"] = stored
        command = {**source.description, "compression": options.compression, "size_limit": options.size_limit}
        command |= {} if fraction is None else {"val_fraction": fraction}
        finished = command_of(folder) == command and not options.overwrite
        splits.append(Split(folder, source, command, progress, finished=finished))
    return start_or_resume(splits, options)


def verified(images: Images, indices: Sequence[int]) -> list[tuple[bytes, int, str | None]]:
    """Return each image's bytes, its label, and None; or what is wrong with it, without bytes."""
    found = []
    for index in indices:
        try:
            content, label, name = images[index]
            picture = decode(content, name)
        except UserError as error:
            found.append((b"", 0, str(error)))
            continue
        if not isinstance(content, bytes):  # which has no file
            grey = isinstance(content, np.ndarray) and content.ndim == 2
            content = png(Image.fromarray(content) if grey else picture)
        found.append((content, label, None))
    return found


def png(picture: Image.Image) -> bytes:
    """Return a picture as the content of a file."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def groups(start: int, count: int) -> Iterator[range]:
    """Return ranges of at most GROUP numbers, from start to count."""
    return (range(at, min(at + GROUP, count)) for at in range(start, count, GROUP))


def write_split(split: Split, options: Namespace) -> None:
    """Write a split. It appears under its final name once it is complete."""
    from src.data.shards import ShardWriter, publish

    folder, images = unfinished(split.folder), split.source.images
    format_ = {"columns": COLUMNS, "compression": options.compression, "size_limit": options.size_limit}
    with contextlib.closing(ShardWriter(folder, split.progress, True, **format_)) as writer:
        state = split.progress["state"] or {"next": 0, "counts": {}, "broken": []}
        counts, broken = Counter(state["counts"]), list(state["broken"])
        if writer.stored:
            log.info(f"{split.folder}: resuming after {len(writer.shards):,} shards")
        bar = progress(desc=split.folder.name, total=len(images), unit="img", initial=state["next"])
        work = partial(verified, images)
        with (
            bar,
            contextlib.closing(in_order(work, groups(state["next"], len(images)), options.num_workers)) as results,
        ):
            for group, contents in results:
                writer.mark({"next": group.start, "counts": dict(counts), "broken": broken[:NAMED]})
                for content, label, problem in contents:
                    if problem is not None:
                        counts["broken"] += 1
                        broken.append(problem)
                        if counts["broken"] <= 5:
                            log.warning(f"skipped: {problem}")
                        continue
                    writer.write({"image": content, "label": label})
                    counts.update(images=1, image_bytes=len(content))
                bar.set_postfix_str(f"{counts['image_bytes'] / 1e6:,.1f} MB", refresh=False)
                bar.update(len(group))
        if not counts["images"]:
            raise UserError(f"{split.folder.name}: no image of {images.source} can be read ({broken[0]})")
        writer.finish()
        size = sum(path.stat().st_size for path in folder.glob("shard.*"))
        summary = {
            "images": counts["images"], "classes": images.classes, "broken": counts["broken"],
            "broken_images": broken[:NAMED], "image_bytes": counts["image_bytes"], "samples": writer.stored,
            "shards": len(writer.shards), "bytes": size, "source": split.source.description,
            "command": split.command,
        }  # fmt: skip
        write_json(folder / "split.json", summary)
        publish(folder, split.folder)
    skipped = f", {counts['broken']:,} broken ones skipped, see split.json" if counts["broken"] else ""
    words = f"{counts['images']:,} images in {len(images.classes):,} classes{skipped}, {len(writer.shards):,} shards"
    log.info(f"{split.folder}: {words}, {size / 1e6:,.1f} MB in total")
