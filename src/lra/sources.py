"""Examples of Long Range Arena from the official files, or from the Hub, streamed: (parts, label) with one or two
parts, uint8 arrays of tokens, bytes or gray pixels, and a class number.

A task is any object with `title`, `layout` (of LAYOUTS), `folder` (below lra_dir; None: the layout's), `size` (side of
a Pathfinder image), `max_length` (longer parts are cut), `hub` (dataset on the Hub to read if there is no folder),
`validation` ("held_out" or "test": the test set), `split` (of Pathfinder: by "seed" or "in_order") and `split_seed`."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from src.cli import log
from src.data.readers import read_rows
from src.errors import UserError, first_line, reason
from src.lra.listops import VOCABULARY

SPLITS = ("train", "validation", "test")
RECORD, STARTED = "generated.json", ".options.json"  # of lra.py make: in finished and in unfinished data
# The options of lra.py make with which its data is like the release's, but for the random seed.
RELEASE = {
    "rows": [96000, 2000, 2000], "min_length": 500, "max_length": 2000, "max_depth": 10, "max_args": 10,
    "images": 200000,
}  # fmt: skip
ON_HUB = ("imdb", "cifar10")
BINARY = {"0": 0, "0.0": 0, "1": 1, "1.0": 1}
LABEL = "the label {!r} must be 0 or 1; fix or remove the row"
TOKENS = {token: number for number, token in enumerate(VOCABULARY)}
OPEN, CLOSE = np.array([token[0] == "[" for token in TOKENS]), TOKENS["]"]
DEPTH = OPEN.astype(np.int8) - (np.arange(len(TOKENS)) == CLOSE)
WITHOUT_PARENTHESES = str.maketrans("", "", "()")
BLANK = np.frombuffer(b" ", np.uint8)  # stands for an empty text, since no model takes a row without tokens
CONTOUR = "curv_contour_length_14"  # of the three difficulties of Pathfinder, the hard one, which all papers report

Example = tuple[tuple[np.ndarray, ...], int]


class Layout(NamedTuple):
    """A file layout. `read(task, place, split, counts)` yields the examples of a split in the order of its files, from
    a folder, or from the Hub if `place` is None; it counts what is read, in bytes or files, and skipped images."""

    read: Callable[[Any, Path | None, str, Counter], Iterator[Example]]
    folders: tuple[str, ...]  # below lra_dir, the first that has any of the files
    files: tuple[tuple[str, ...], ...]  # and folders, in one of several forms
    fix: str  # how to get them


def check(task: Any, lra_dir: str | None) -> None:
    """Raise UserError for missing files, before anything slow."""
    layout, place = LAYOUTS[task.layout], f"{task.title} is read from"
    folder = task.folder or layout.folders[0].format(size=task.size)
    if task.hub and task.layout not in ON_HUB:
        raise UserError(f"{task.title}: only {' and '.join(ON_HUB)} can be read from the Hugging Face Hub; omit hub")
    if lra_dir is None:
        if task.hub is None or task.folder:
            raise UserError(f"lra_dir is not set, but {place} its folder {folder}; set lra_dir, and {layout.fix}")
        return
    inner = Path(lra_dir, "lra_release")
    if not Path(lra_dir).is_dir():
        raise UserError(f"lra_dir: {lra_dir} is not a directory; fix it, or {layout.fix}")
    if task.layout == "pathfinder" and task.size == 128 and inner.is_dir() and Path(lra_dir, folder).is_dir():
        found = f"{Path(lra_dir, folder)} is the broken copy of the release, on which nothing can be learned"
        raise UserError(f"lra_dir: {found}; set lra_dir={inner}, which has the right one")
    found, files = find(task, lra_dir)
    if found and (made := made_by(found)) and not (made / RECORD).exists():
        to_do = "run the same `python lra.py make` again, which resumes"
        raise UserError(f"lra_dir: {made} holds only partly generated data; {to_do}")
    if missing := [path for path in files if not path.exists()]:
        inside = find(task, str(inner))[1]
        fix = f"set lra_dir={inner}" if inside and all(path.exists() for path in inside) else layout.fix
        raise UserError(f"lra_dir: {missing[0]} does not exist, but {place} it; {fix}")


def find(task: Any, lra_dir: str | None) -> tuple[Path | None, list[Path]]:
    """Return a task's folder, and its files and folders, which may be missing; None and nothing: on the Hub."""
    layout = LAYOUTS[task.layout]
    folders = [task.folder] if task.folder else [name.format(size=task.size) for name in layout.folders]
    forms = [(Path(lra_dir, folder), names) for folder in folders for names in layout.files] if lra_dir else []
    for place, names in forms:
        if any((place / name).exists() for name in names):
            return place, [place / name for name in names]
    if not forms or (task.hub and not task.folder):
        return None, []
    place, names = forms[0]
    return place, [place / name for name in names]


def stamps(task: Any, lra_dir: str | None) -> list[list]:
    """Return what identifies the sources: name below lra_dir, bytes (of a folder: files in it), and time of the last
    change (of a folder: also of its texts). Raises UserError."""
    _, files = find(task, lra_dir)
    try:
        return [row for path in files for row in _stamps(path, Path(lra_dir))] if files else [["Hub", task.hub, 0]]
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({reason(error)}); copy it again") from None


def _stamps(path: Path, root: Path) -> Iterator[list]:
    name, stat = Path(os.path.relpath(path, root)).as_posix(), path.stat()
    if path.is_dir():
        with os.scandir(path) as found:
            entries = [(e.name, e.name.endswith(".npy") or e.is_dir(), _changed(e)) for e in found]
        changed = max([stat.st_mtime_ns, *(time for _, inner, time in entries if not inner)])
        yield [name, sum(not inner for _, inner, _ in entries), changed]
        for entry in sorted(entry for entry, inner, _ in entries if inner):
            yield from _stamps(path / entry, root)
    else:
        yield [name, stat.st_size, stat.st_mtime_ns]


def _changed(entry: os.DirEntry) -> int:
    """When a text was changed; images are too many to look at each."""
    return entry.stat().st_mtime_ns if entry.name.endswith(".txt") else 0


def amount(found: list[list]) -> int | None:
    """Return what readers will have counted as read after all splits, from the stamps; None: unknown."""
    return sum(size for name, size, _ in found if not name.endswith(".npy")) if found[0][0] != "Hub" else None


def generated(task: Any, lra_dir: str | None) -> str | None:
    """Return "generated, seed 0" for files of `lra.py make`, followed by "unlike the release" and the options that
    differ, if any, in parentheses; "the Hub's NAME" for data on the Hub; None for other files."""
    place, _ = find(task, lra_dir)
    if place is None:
        return f"the Hub's {task.hub}"
    if (made := made_by(place)) is None:
        return None
    try:
        record = json.loads((made / RECORD).read_bytes())
        options = record.get("options", record)
        given = {name: options[name] for name, value in RELEASE.items() if options.get(name, value) != value}
        shown = [f"{name} {' '.join(map(str, v)) if isinstance(v, list) else v}" for name, v in given.items()]
        return f"generated, seed {options['seed']}" + (f", unlike the release ({', '.join(shown)})" if shown else "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "generated, seed unknown"


def made_by(place: Path) -> Path | None:
    """Return the folder that `lra.py make` wrote: a task's, or the one above, which holds the three difficulties of
    Pathfinder; None if it wrote neither."""
    folders = (place, place.parent) if place.name == CONTOUR else (place,)
    return next((path for path in folders if (path / RECORD).exists() or (path / STARTED).exists()), None)


def read(task: Any, lra_dir: str | None, split: str, counts: Counter | None = None) -> Iterator[Example]:
    """Yield the examples of a split; count parts, those cut to max_length, what is read, and skipped images. Raises
    UserError with the file and line, and after the last example for a split without any, or of one class."""
    counts = Counter() if counts is None else counts
    split = "test" if split == "validation" and task.validation == "test" else split
    layout, (place, _), seen, skipped = LAYOUTS[task.layout], find(task, lra_dir), set(), counts["skipped"]
    try:
        for parts, label in layout.read(task, place, split, counts):
            counts["parts"] += len(parts)
            counts["cut"] += sum(len(part) > task.max_length for part in parts)
            seen.add(label)
            yield tuple(part[: task.max_length] if len(part) else BLANK for part in parts), label
    except OSError as error:
        raise UserError(f"lra_dir: {error.filename} cannot be read ({reason(error)}); copy it again") from None
    if (skipped := counts["skipped"] - skipped) > 0:
        images = "image" if skipped == 1 else "images"
        log.info(f"{task.title}: skipped {skipped:,} empty {images} of the {split} split")
    if not seen:
        raise UserError(f"lra_dir: the {split} split of {task.title} has no examples; {layout.fix}")
    if split == "train" and len(seen) == 1:
        found = f"all training examples of {task.title} have the label {seen.pop()}"
        raise UserError(f"lra_dir: {found}, so there is nothing to learn; {layout.fix}")


def _listops(task: Any, place: Path, split: str, counts: Counter) -> Iterator[Example]:
    """Lines of Source, Target. Parentheses, which only write a list as binary applications, are dropped."""
    path = place / f"basic_{'val' if split == 'validation' else split}.tsv"
    for number, (source, target) in read_rows(path, ("Source", "Target"), tab_separated=True):
        counts["read"] += len(source) + len(target) + 3
        where = f"{path}, line {number}"
        try:
            words = source.translate(WITHOUT_PARENTHESES).split()
            tokens = np.frombuffer(bytes(map(TOKENS.__getitem__, words)), np.uint8)
        except KeyError as error:
            raise UserError(f"{where}: unknown token {error.args[0]!r}; {LAYOUTS['listops'].fix}") from None
        depth = DEPTH[tokens].cumsum()
        without_arguments = OPEN[tokens[:-1]] & (tokens[1:] == CLOSE)
        if not len(tokens) or depth[-1] or (depth[:-1] < 1).any() or without_arguments.any():
            raise UserError(f"{where}: unbalanced brackets, or not one expression; fix or remove the row")
        if target not in TOKENS or not target.isdigit():
            raise UserError(f"{where}: the target {target!r} must be a digit from 0 to 9; fix or remove the row")
        yield (tokens,), int(target)


def _imdb(task: Any, place: Path | None, split: str, counts: Counter) -> Iterator[Example]:
    """{train,test}/{neg,pos}/ID_STARS.txt, as bytes. A tenth of each class of train is held out, drawn by a seed."""
    source = "test" if split == "test" else "train"
    if place is None:
        table = _load_hub(task, source)
        labels = np.array(table["label"])
        if not np.isin(labels, (0, 1)).all():
            raise UserError(f"lra_dir: {task.hub} has labels other than 0 and 1; {LAYOUTS['imdb'].fix}")
    else:
        classes = [sorted((place / source / name).glob("[!.]*.txt")) for name in ("neg", "pos")]
        labels, files = np.repeat([0, 1], [*map(len, classes)]), [*classes[0], *classes[1]]
    held_out = np.zeros(len(labels), bool)
    if source == "train" and task.validation == "held_out":
        draw = np.random.RandomState(task.split_seed)  # whose stream NumPy does not change
        for label in (0, 1):
            chosen = draw.permutation(np.flatnonzero(labels == label))
            held_out[chosen[: _tenth(len(chosen))]] = True
    for index in np.flatnonzero(held_out == (split == "validation")):
        counts["read"] += 1
        text = files[index].read_bytes() if place else table[int(index)]["text"].encode()
        yield (np.frombuffer(text, np.uint8),), int(labels[index])


def _load_hub(task: Any, split: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(task.hub, split=split).select_columns(["text", "label"])
    except Exception as error:  # whatever the Hub's client raises
        found = f"cannot read {task.hub} from the Hugging Face Hub ({first_line(error)})"
        raise UserError(f"lra_dir: {found}; {LAYOUTS[task.layout].fix}") from None


def _aan(task: Any, place: Path, split: str, counts: Counter) -> Iterator[Example]:
    """Lines of label, two ids and two texts, without header and quotes, as bytes."""
    path = place / f"new_aan_pairs.{'eval' if split == 'validation' else split}.tsv"
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            counts["read"] += len(line)
            cells = line.removesuffix(b"\n").removesuffix(b"\r").split(b"\t")
            if cells == [b""]:
                continue
            if len(cells) != 5:
                raise UserError(f"{path}, line {number}: {len(cells)} columns instead of 5; fix or remove the row")
            if (name := cells[0].decode(errors="replace")) not in BINARY:
                raise UserError(f"{path}, line {number}: {LABEL.format(name)}")
            yield tuple(np.frombuffer(text, np.uint8) for text in cells[3:]), BINARY[name]


def _cifar10(task: Any, place: Path | None, split: str, counts: Counter) -> Iterator[Example]:
    """Images as luma, 0.299 R + 0.587 G + 0.114 B, rounded, rows first. The last tenth of train is held out."""
    from src.data.images import decode, open_images

    images = open_images(str(place or task.hub), "test" if split == "test" else "train", key="lra_dir")
    held_out = _tenth(len(images)) if split != "test" and task.validation == "held_out" else 0
    start, end = (len(images) - held_out, len(images)) if split == "validation" else (0, len(images) - held_out)
    for index in range(start, end):
        content, label, name = images[index]
        pixels = content if isinstance(content, np.ndarray) else np.asarray(decode(content, name))
        if pixels.shape != (32, 32, 3) or label > 9:
            found = f"{pixels.shape[1]} × {pixels.shape[0]} pixels, label {label}"
            raise UserError(f"{name} is not CIFAR-10 ({found}); {LAYOUTS['cifar10'].fix}")
        counts["read"] += 1 + pixels.size
        red, green, blue = pixels.reshape(-1, 3).T.astype(np.int32)
        yield (((299 * red + 587 * green + 114 * blue + 500) // 1000).astype(np.uint8),), label


def _pathfinder(task: Any, place: Path, split: str, counts: Counter) -> Iterator[Example]:
    """Gray images, rows first. Validation and test get a tenth of the metadata's rows each. Empty files occur in
    the release; they are skipped."""
    from src.data.images import decode

    place = place if (place / "metadata").is_dir() else place / CONTOUR
    total = sum(1 for _ in _metadata(place))
    order = np.arange(total)
    if task.split == "seed":
        order = np.random.RandomState(task.split_seed).permutation(total)
    train, tenth = total - 2 * _tenth(total), _tenth(total)
    start, end = {"train": (0, train), "validation": (train, train + tenth), "test": (train + tenth, total)}[split]
    chosen = np.zeros(total, bool)
    chosen[order[start:end]] = True
    for (name, label), wanted in zip(_metadata(place), chosen):
        if not wanted:
            continue
        path = place / name
        counts["read"] += 1
        if not (content := path.read_bytes()):
            counts["skipped"] += 1
            continue
        image = decode(content, str(path)).convert("L")
        if image.size != (task.size, task.size):
            found = f"{image.width} × {image.height} pixels, not {task.size} × {task.size}"
            raise UserError(f"{path} is {found}; replace it, or {LAYOUTS['pathfinder'].fix}")
        yield (np.asarray(image).ravel(),), label


def _metadata(place: Path) -> Iterator[tuple[str, int]]:
    """Yield each image of metadata/*.npy, IMAGE FOLDER, FILE, NUMBER, LABEL, …, and its label. The files of the release
    are text; those of the public generator are arrays of strings."""
    files = [path for path in (place / "metadata").glob("*.npy") if path.stem.isdecimal()]
    for path in sorted(files, key=lambda path: int(path.stem)):
        content = path.read_bytes()
        try:
            if content.startswith((b"\x93NUMPY", b"\x80")):  # of NumPy, of pickle
                table = np.load(path, allow_pickle=False).astype(str)
                rows = table.tolist() if table.ndim == 2 else [[]]
            else:
                rows = [line.split() for line in content.decode().rstrip().splitlines()]
        except UnicodeDecodeError:
            raise UserError(f"{path} is not valid UTF-8; {LAYOUTS['pathfinder'].fix}") from None
        except (ValueError, EOFError):
            found = "is corrupt or holds pickled objects, which could run programs and are never loaded"
            raise UserError(f"{path} {found}; save it as lines of text or as an array of strings") from None
        for number, row in enumerate(rows, 1):
            if len(row) < 4:
                raise UserError(
                    f"{path}, line {number}: {len(row)} columns instead of 4 or more; fix or remove the row"
                )
            if row[3] not in BINARY:
                raise UserError(f"{path}, line {number}: {LABEL.format(row[3])}")
            yield f"{row[0]}/{row[1]}", BINARY[row[3]]


def _tenth(count: int) -> int:
    return -(-count // 10)


LAYOUTS = {
    "listops": Layout(
        _listops,
        ("listops-1000",),
        (tuple(f"basic_{split}.tsv" for split in ("train", "val", "test")),),
        "generate it with `python lra.py make listops`, or download the release of Long Range Arena",
    ),
    "imdb": Layout(
        _imdb,
        ("aclImdb",),
        (tuple(f"{split}/{name}" for split in ("train", "test") for name in ("neg", "pos")),),
        "download aclImdb_v1.tar.gz (ai.stanford.edu/~amaas/data/sentiment) and unpack it in lra_dir",
    ),
    "aan": Layout(
        _aan,
        ("tsv_data",),
        (tuple(f"new_aan_pairs.{split}.tsv" for split in ("train", "eval", "test")),),
        "download tsv_data of the release of Long Range Arena, or of OpenNLPLab/lra on the Hugging Face Hub",
    ),
    "cifar10": Layout(
        _cifar10,
        ("cifar-10-batches-py", "cifar-10-batches-bin", "."),
        (
            (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"),
            (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"),
        ),
        "download cifar-10-python.tar.gz (www.cs.toronto.edu/~kriz/cifar.html) and unpack it in lra_dir",
    ),
    "pathfinder": Layout(
        _pathfinder,
        ("pathfinder{size}",),
        ((f"{CONTOUR}/metadata", f"{CONTOUR}/imgs"), ("metadata", "imgs")),
        "generate it with `python lra.py make pathfinder`, or download the release of Long Range Arena",
    ),
}
