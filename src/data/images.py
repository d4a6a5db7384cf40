"""Labelled images from folders, MDS shards, Parquet, the Hub, CIFAR and MNIST: as stored, with random access."""

import copy
import glob
import gzip
import io
import json
import os
import pickle
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from src.cli import log, progress
from src.data.config import check_images, check_split
from src.errors import UserError, first_line, reason
from src.files import sha256

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # torchvision's
SECOND_SPLITS = ("val", "validation", "valid", "test")  # names of the split that is not for training
FORMATS = ("JPEG", "PNG", "GIF", "PPM", "BMP", "TIFF", "WEBP")  # others of Pillow may start programs
# A file's content; pixels, (height, width) or (height, width, 3), uint8; or a decoded picture.
RAW = bytes | np.ndarray | Image.Image


class Images(ABC):
    """Labelled images. `classes` are the names of their labels, `source` is what the user gave."""

    classes: list[str]
    source: str

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> tuple[RAW, int, str]:
        """Return an image as stored, its label, and its name for messages."""

    def digest(self) -> str:
        """Return what tells these images from others: a hash of the names of the classes, and of `identity`."""
        return sha256([json.dumps(self.classes).encode(), *self.identity()])

    def earlier_digest(self) -> str:
        """Return what `digest` was in earlier versions, which looked at the first and the last image."""
        ends = (self[index] for index in {0, len(self) - 1})
        parts = (part for content, label, _ in ends for part in (bytes(np.asarray(content).data), str(label).encode()))
        return sha256([json.dumps(self.classes).encode(), *parts])

    @abstractmethod
    def identity(self) -> Iterable[bytes | memoryview]:
        """Return what changes with any image or label, without reading all files."""


class FolderImages(Images):
    """SPLIT/CLASS/*, with classes in alphabetical order."""

    def __init__(self, folder: Path):
        self.source, self.folder, self.classes = str(folder), folder, _class_names(folder)
        files, labels, empty, start, others = [], [], [], len(str(folder)) + 1, Counter()
        for label, name in enumerate(self.classes):
            walked = [os.path.join(at, file)[start:] for at, names in _walk(folder / name) for file in names]
            found = sorted(file for file in walked if _suffix(file) in IMAGE_SUFFIXES)
            others.update(suffix for suffix in map(_suffix, walked) if suffix not in IMAGE_SUFFIXES)
            files += found
            labels += [label] * len(found)
            if not found:
                empty.append(name)
        if others:
            kinds = ", ".join(kind for kind, _ in others.most_common(5)) + (", …" if len(others) > 5 else "")
            log.warning(f"{others.total():,} other files in {folder} ignored ({kinds})")
        if empty:
            shown = ", ".join(empty[:5]) + (", …" if len(empty) > 5 else "")
            raise UserError(f"{folder}: no images in class {shown}; add some or remove the folder")
        # Arrays, since each loader worker would copy a list of a million strings as it counts references.
        self.files = np.array([os.fsencode(file) for file in files])
        self.labels = np.array(labels, np.int32)

    def digest(self) -> str:  # as in earlier versions
        return sha256(self.identity())

    earlier_digest = digest

    def identity(self) -> Iterable[bytes | memoryview]:
        folder = os.fsencode(self.folder)
        return self.files.data, self.labels.data, _stamps(os.path.join(folder, file) for file in self.files)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[RAW, int, str]:
        path = self.folder / os.fsdecode(self.files[index])
        try:
            return path.read_bytes(), int(self.labels[index]), str(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({reason(error)}); restore or remove it") from None

    def divided(self, fraction: float) -> "dict[str, FolderImages]":
        """Return train and val, with about that fraction of each class in val, chosen by a hash of the files' contents:
        copies of a picture stay together. Each class has at least one picture in train, and one in val if it has two
        that differ."""
        chosen = np.zeros(len(self), bool)
        with progress(self.files, desc="hashing", unit="img") as files:
            hashes = np.array([_hash(self.folder / os.fsdecode(file)) for file in files])
        for label in range(len(self.classes)):
            own = self.labels == label
            different = np.unique(hashes[own])
            count = int((different < fraction).sum())
            chosen |= own & np.isin(hashes, different[: min(max(count, 1), len(different) - 1)])
        parts = {"train": copy.copy(self), "val": copy.copy(self)}
        for name, part in parts.items():
            part.files, part.labels = (x[chosen == (name == "val")] for x in (self.files, self.labels))
        return parts


class ArrayImages(Images):
    """Pixels in memory."""

    def __init__(self, source: str, pixels: np.ndarray, labels: Sequence[int], classes: list[str]):
        self.source, self.pixels, self.labels, self.classes = source, pixels, labels, classes

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[RAW, int, str]:
        return self.pixels[index], int(self.labels[index]), f"image {index} of {self.source}"

    def identity(self) -> Iterable[bytes | memoryview]:
        return np.asarray(self.labels, np.int64).data, *(np.ascontiguousarray(image).data for image in self.pixels)


class TableImages(Images):
    """A table of the datasets library: a Hub dataset, or Parquet files."""

    def __init__(self, source: str, table: Any, files: Sequence[Path] = ()):
        import datasets

        self.source, self.files, features = source, files, table.features
        image = next((name for name, kind in features.items() if isinstance(kind, datasets.Image)), None)
        image = image or next((name for name in ("image", "img") if name in features), None)
        label = next((name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)), None)
        label = label or next((name for name in ("label", "fine_label") if name in features), None)
        if image is None or label is None:
            raise UserError(f"{source}: no columns image and label (its columns are {', '.join(features)})")
        if isinstance(features[image], datasets.Image):
            table = table.cast_column(image, datasets.Image(decode=False))
        self.table, self.image, self.label = table.select_columns([image, label]), image, label
        kind = features[label]
        found, self.numbers = table.unique(label), None
        if None in found or (found and not isinstance(found[0], str) and min(found) < 0):
            raise UserError(f"{source} has images without a label, as test splits on the Hub do; name another split")
        if isinstance(kind, datasets.ClassLabel):
            self.classes = list(kind.names)
        elif found and isinstance(found[0], str):
            self.classes = sorted(found)
            self.numbers = {one: number for number, one in enumerate(self.classes)}
        else:
            self.classes = [str(number) for number in range(max(found, default=-1) + 1)]

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> tuple[RAW, int, str]:
        row, name = self.table[int(index)], f"row {index} of {self.source}"
        image = row[self.image]
        if isinstance(image, dict):  # {"bytes": …, "path": …}
            content, path = image.get("bytes"), image.get("path")
            try:
                image = content if content is not None else Path(path).read_bytes() if path else b""
            except OSError as error:
                raise UserError(f"{path} of {name} cannot be read ({reason(error)}); restore it") from None
        label = row[self.label]
        return image, int(label) if self.numbers is None else self.numbers[label], name

    def identity(self) -> Iterable[bytes | memoryview]:
        """Stamps of the files, which a dataset of the Hub does not have: some of its pictures stand for them."""
        yield json.dumps(list(self.table[self.label])).encode()
        yield _stamps(self.files)
        for index in () if self.files else np.linspace(0, len(self) - 1, 64).astype(int):
            yield bytes(np.asarray(self[index][0]).data)


class ShardImages(Images):
    """MDS shards with the columns `image` and `label`, or `x` and `y` of streaming's own converters."""

    def __init__(self, local: Path, remote: str | None, split: str):
        from src.data.streaming import StreamingSamples, fetch_summary

        self.source = f"{remote or local}/{split}"
        try:
            self.shards = StreamingSamples(local=str(local), remote=remote, split=split, batch_size=1)
        except Exception as error:  # from clients of s3, gs and oci
            raise UserError(f"cannot read the shards of {self.source}: {first_line(error)}") from None
        columns = self.shards.shards[0].column_names
        names = [(image, label) for image, label in (("image", "label"), ("x", "y")) if {image, label} <= {*columns}]
        if not names:
            raise UserError(f"{self.source}: no columns image and label, only {', '.join(columns)}; convert it again")
        self.image, self.label = names[0]
        self.folder = Path(local, split)
        if remote is not None:
            fetch_summary(self.folder, remote)  # which shards of other converters do not have
        self.classes = _stored_classes(self.folder)
        if not self.classes:
            log.info(f"{self.source}: reading all labels to count the classes, since split.json does not name them")
            count = 1 + max(self.shards[index][self.label] for index in range(self.shards.num_samples))
            self.classes = [str(number) for number in range(count)]

    def __len__(self) -> int:
        return self.shards.num_samples

    def __getitem__(self, index: int) -> tuple[RAW, int, str]:
        row = self.shards[int(index)]
        return row[self.image], int(row[self.label]), f"sample {index} of {self.source}"

    def identity(self) -> Iterable[bytes | memoryview]:
        index = (self.folder / "index.json").read_bytes()
        files = [(shard.get("zip_data") or shard["raw_data"])["basename"] for shard in json.loads(index)["shards"]]
        return index, _stamps(self.folder / file for file in files)  # not what streaming decompresses beside them


class Renumbered(Images):
    """Images with the labels that other data, with these `classes`, gives to the same names."""

    def __init__(self, images: Images, classes: list[str]):
        self.images, self.source, self.classes = images, images.source, classes
        numbers = {name: number for number, name in enumerate(classes)}
        self.numbers = [numbers[name] for name in images.classes]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[RAW, int, str]:
        content, label, name = self.images[index]
        return content, self.numbers[label], name

    def identity(self) -> Iterable[bytes | memoryview]:
        return self.images.identity()


def open_images(name: str, split: str, remote: str | None = None, key: str = "data_local") -> Images:
    """Open a split of a folder, whose content decides what it is, or of a Hub dataset. Raises UserError naming `key`.

    A folder holds one of: SPLIT/CLASS/*; shards of src/convert_dataset.py --images; Parquet files; CIFAR-10 or -100,
    python or binary; MNIST's files. In CIFAR, MNIST and on the Hub, val is whatever the second split is called."""
    folder = Path(name)
    if remote is not None or (folder / split / "index.json").is_file():
        if remote is None:
            check_split(key, folder, split)
        return _not_empty(ShardImages(folder, remote, split), key)
    if not folder.is_dir():
        check_images(key, name, split)
        return _not_empty(TableImages(f"{split} of {name}", _load_hub(name, split, key)), key)
    if (folder / split).is_dir() and _class_names(folder / split):
        return _not_empty(FolderImages(folder / split), key)
    for reader in (_parquet, _cifar, _mnist) if split in ("train", *SECOND_SPLITS) else (_parquet,):
        if (images := reader(folder, split)) is not None:
            return _not_empty(images, key)
    splits = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir())) or "none"
    found = f"{folder} has no {split}/CLASS/*, shards, Parquet files, CIFAR or MNIST (its folders: {splits})"
    fix = "name a folder of labelled images, or a split that it has"
    if any(_suffix(path.name) in IMAGE_SUFFIXES for path in folder.glob("*/*")):
        fix += "; if these are classes, src/convert_dataset.py --images divides them, with --val_fraction 0.1"
    raise UserError(f"{key}: {found}; {fix}")


def divide(name: str, fraction: float, key: str) -> dict[str, FolderImages]:
    """Open a folder CLASS/* without splits as train and val, see `FolderImages.divided`. Raises UserError."""
    folder = Path(name)
    if not folder.is_dir() or not _class_names(folder):
        raise UserError(f"{key}: {folder} is not a folder of CLASS/*; name one, or omit --val_fraction")
    if both := [name for name in ("train", *SECOND_SPLITS) if (folder / name).is_dir() and _class_names(folder / name)]:
        fix = f"omit --val_fraction, or divide {folder / both[0]}"
        raise UserError(f"{key}: {folder} has splits already ({', '.join(both)}); {fix}")
    return FolderImages(folder).divided(fraction)


def find_pictures(paths: Sequence[str], key: str) -> list[str]:
    """Return files, and the pictures in folders, at any depth, in alphabetical order, each once. Raises UserError for a
    path that does not exist, and a folder without pictures."""
    found: list[str] = []
    for path in paths:
        if not Path(path).is_dir():
            if not Path(path).is_file():
                raise UserError(f"{key}: {path} is not a file or folder; fix its path")
            found.append(path)
            continue
        files = sorted(os.path.join(at, file) for at, names in _walk(Path(path)) for file in names)
        pictures = [file for file in files if _suffix(file) in IMAGE_SUFFIXES]
        if not pictures:
            raise UserError(f"{key}: {path} has no pictures ({', '.join(IMAGE_SUFFIXES)}); name another folder")
        found += pictures
    return list(dict.fromkeys(found))


def decode(content: RAW, name: str) -> Image.Image:
    """Return a picture as RGB, turned upright as its EXIF data asks, as pipeline("image-classification") does. Unlike
    it, this scales those of 16 bits and more, in place of cutting all above 255. Raises UserError naming an empty,
    truncated or unreadable one."""
    if isinstance(content, bytes) and not content:
        raise UserError(f"{name} is empty; replace or remove it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd metadata
            if isinstance(content, bytes):
                content = Image.open(io.BytesIO(content), formats=FORMATS)
            image = content if isinstance(content, Image.Image) else Image.fromarray(content)
            return _to_rgb(ImageOps.exif_transpose(image))
    except UnidentifiedImageError:  # whose message names an object in memory
        raise UserError(f"{name} is not a readable image (its format is unknown); replace or remove it") from None
    except Exception as error:  # whatever the decoders raise
        raise UserError(f"{name} is not a readable image ({first_line(error)}); replace or remove it") from None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith(("I", "F")):  # 16 bits or more per channel
        pixels = np.asarray(image, np.float64)
        top = 65535 if image.mode.startswith("I") else max(pixels.max(), 1e-9)
        return Image.fromarray((255 * pixels / top).clip(0, 255).round().astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def _hash(path: Path) -> float:
    """A number from 0 to 1 for a file's content, or for its name if it cannot be read."""
    try:
        content = path.read_bytes()
    except OSError:
        content = os.fsencode(path.name)
    return int(sha256([content])[:13], 16) / 16**13


def _stamps(paths: Iterable[Path | bytes]) -> memoryview:
    """Sizes and times of files, or what no file has: of a link to nothing, say, which reading it reports."""

    def stamp(path: Path | bytes) -> tuple[int, int]:
        try:
            found = os.stat(path)
            return found.st_size, found.st_mtime_ns
        except OSError:
            return -1, 0

    return np.array([stamp(path) for path in paths], np.int64).data


def _class_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not _is_hidden(path.name))


def _is_hidden(name: str) -> bool:
    """Whether a file or folder is of some other program: .ipynb_checkpoints, or __MACOSX in an archive of a Mac."""
    return name.startswith(".") or name == "__MACOSX"


def _walk(top: Path) -> Iterator[tuple[str, list[str]]]:
    """Return each folder from the top down, and its files. Links to folders are followed, as by torchvision, but none
    twice, since they can form a circle. Raises UserError for a folder that cannot be listed, whose images would
    otherwise be missing without a word."""
    seen = set()
    walked = os.walk(top, onerror=_unreadable, followlinks=True)  # pathlib would take minutes for a million files
    for at, folders, files in walked:
        folders[:] = sorted(name for name in folders if not _is_hidden(name))
        if (place := os.path.realpath(at)) in seen:
            folders.clear()
            continue
        seen.add(place)
        yield at, [name for name in files if not _is_hidden(name)]


def _unreadable(error: OSError) -> None:
    raise UserError(f"{error.filename} cannot be listed ({error.strerror}); change its permissions, or move it away")


def _suffix(file: str) -> str:
    return os.path.splitext(file)[1].lower() or "no extension"


def _not_empty(images: Images, key: str) -> Images:
    if not len(images):
        raise UserError(f"{key}: {images.source} holds no images; choose another folder or split")
    return images


def _stored_classes(folder: Path) -> list[str]:
    """The names of the classes that src/convert_dataset.py wrote beside shards."""
    try:
        return [str(name) for name in json.loads((folder / "split.json").read_text())["classes"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _load_hub(name: str, split: str, key: str) -> Any:
    import datasets

    wanted = [split, *(other for other in SECOND_SPLITS if split in SECOND_SPLITS)]
    try:
        available = datasets.get_dataset_split_names(name)
        chosen = next((one for one in wanted if one in available), None)
        if chosen is not None:
            return datasets.load_dataset(name, split=chosen)
    except Exception as error:  # whatever the Hub client raises
        found = f"not a folder, and cannot be loaded from the Hugging Face Hub ({first_line(error)})"
        raise UserError(f"{key}: {name} is {found}; fix its path or name") from None
    raise UserError(f"{key}: {name} has no split {split}; its splits are {', '.join(available)}")


def _parquet(folder: Path, split: str) -> Images | None:
    files = sorted(folder.rglob("*.parquet"))
    names = [split, *(other for other in SECOND_SPLITS if split in SECOND_SPLITS)]
    for name in names:
        of_split = [f for f in files if f.name.startswith(name) or name in f.relative_to(folder).parts[:-1]]
        if of_split:
            import datasets

            try:
                patterns = [glob.escape(str(file)) for file in of_split]
                table = datasets.load_dataset("parquet", data_files=patterns)["train"]
                return TableImages(f"{folder}/{name}", table, of_split)
            except UserError:
                raise
            except Exception as error:  # whatever pyarrow and datasets raise
                found = f"the Parquet files of {name} in {folder} cannot be read ({first_line(error)})"
                raise UserError(f"{found}; copy them again") from None
    return None


class _ArraysOnly(pickle.Unpickler):
    """Loads pickles of dictionaries, lists, strings and numpy arrays, and refuses everything else."""

    ALLOWED = {
        ("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode"),
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it would execute {module}.{name}")
        return super().find_class(module, name)


def _cifar(folder: Path, split: str) -> Images | None:
    """CIFAR-10 and CIFAR-100 as distributed, in the folder or one below it."""
    train = split == "train"
    for place in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        batches = sorted(place.glob("data_batch_?")) if train else [place / "test_batch"]
        hundred = place / ("train" if train else "test")
        binary = sorted(place.glob("data_batch_?.bin")) if train else [place / "test_batch.bin"]
        hundred_binary = place / ("train.bin" if train else "test.bin")
        if batches and batches[0].is_file():
            return _cifar_python(place, batches, b"labels", "batches.meta", b"label_names")
        if hundred.is_file() and (place / "meta").is_file():
            return _cifar_python(place, [hundred], b"fine_labels", "meta", b"fine_label_names")
        if binary and binary[0].is_file():
            return _cifar_binary(place, binary, 1, "batches.meta.txt")
        if hundred_binary.is_file():
            return _cifar_binary(place, [hundred_binary], 2, "fine_label_names.txt")
    return None


def _cifar_python(place: Path, files: list[Path], labels: bytes, meta: str, names: bytes) -> Images:
    def load(path: Path) -> dict:
        try:
            with path.open("rb") as file:
                return _ArraysOnly(file, encoding="bytes").load()
        except (pickle.UnpicklingError, OSError, EOFError, ValueError, AttributeError, TypeError, IndexError) as error:
            raise UserError(f"{path} is not a file of CIFAR ({first_line(error)}); copy it again") from None

    try:
        read = [load(file) for file in files]
        pixels = np.concatenate([np.asarray(one[b"data"], np.uint8) for one in read])
        numbers = [int(label) for one in read for label in one[labels]]
        classes = [name.decode() for name in load(place / meta)[names]]
        pixels = pixels.reshape(len(numbers), 3, 32, 32).transpose(0, 2, 3, 1)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{place} is not CIFAR as distributed ({first_line(error)}); copy it again") from None
    return ArrayImages(str(place), pixels, numbers, classes)


def _cifar_binary(place: Path, files: list[Path], label_bytes: int, names: str) -> Images:
    rows = []
    for file in files:
        content = np.frombuffer(file.read_bytes(), np.uint8)
        if not len(content) or len(content) % (label_bytes + 3072):
            raise UserError(f"{file} is truncated: {len(content)} bytes are no full rows; copy it again")
        rows.append(content.reshape(-1, label_bytes + 3072))
    table = np.concatenate(rows)
    labels = table[:, label_bytes - 1].astype(np.int32)  # of two labels, the finer is the second
    stored = (place / names).read_text().split() if (place / names).is_file() else []
    classes = stored or [str(number) for number in range(int(labels.max()) + 1)]
    return ArrayImages(str(place), table[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels, classes)


def _mnist(folder: Path, split: str) -> Images | None:
    """MNIST's files, and those of data in its format, gzipped or not, in the folder or below."""
    stem = "train" if split == "train" else "t10k"
    images = sorted(folder.rglob(f"{stem}-images?idx3-ubyte*"))
    labels = sorted(folder.rglob(f"{stem}-labels?idx1-ubyte*"))
    if not images or not labels:
        return None
    pixels, numbers = read_idx(images[0]), read_idx(labels[0])
    if pixels.ndim != 3 or numbers.shape != pixels.shape[:1]:
        raise UserError(f"{images[0]} has {len(pixels)} images, {labels[0]} {len(numbers)} labels; copy them again")
    classes = [str(number) for number in range(int(numbers.max(initial=0)) + 1)]
    return ArrayImages(str(images[0]), pixels, numbers.astype(np.int32), classes)


def read_idx(path: Path) -> np.ndarray:
    """Return the array of a file in MNIST's format, IDX, of bytes; .gz is decompressed. Raises UserError."""
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        dimensions = content[3]
        shape = np.frombuffer(content, ">i4", dimensions, 4)
        if content[:3] != b"\0\0\x08":
            raise ValueError("it is not in IDX format, with bytes")
        return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}); copy it again") from None
