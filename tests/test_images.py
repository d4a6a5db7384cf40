"""Sources of labelled images: each kind, odd pictures, and files that are broken or hostile."""

import errno
import gzip
import io
import json
import os
import pickle
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from src.data.images import decode, open_images, read_idx
from src.errors import UserError

pytestmark = pytest.mark.usefixtures("shared_memory_freed")

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
LABELS = [0, 1, 1, 0, 1, 0]


def encoded(pixels, form="PNG", **options) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, **options)
    return file.getvalue()


def check(images, classes, pixels=PIXELS, labels=LABELS):
    """The given classes, and the given pictures with their labels, in any order."""
    assert images.classes == classes and len(images) == len(labels)
    read = [
        (np.asarray(decode(content, name)).tobytes(), label)
        for content, label, name in map(images.__getitem__, range(len(images)))
    ]
    assert sorted(read) == sorted((x.tobytes(), label) for x, label in zip(pixels, labels))


def write_folder(folder, names=("cat", "dog")):
    for number, (pixels, label) in enumerate(zip(PIXELS, LABELS)):
        path = folder / names[label] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(pixels))


def test_folder(tmp_path):
    write_folder(tmp_path / "train")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / "cat" / "more").mkdir()
    (tmp_path / "train" / "cat" / "0.png").rename(tmp_path / "train" / "cat" / "more" / "0.PNG")
    (tmp_path / "train" / ".hidden").mkdir()
    images = open_images(str(tmp_path), "train")
    check(images, ["cat", "dog"])
    assert images[0][2].startswith(str(tmp_path))


def test_files_of_other_programs_are_no_pictures(tmp_path, caplog):
    write_folder(tmp_path / "train")
    before = open_images(str(tmp_path), "train").digest()
    for name in (
        "cat/.ipynb_checkpoints/0.png",
        "cat/__MACOSX/0.png",
        "__MACOSX/0.png",
        "cat/._0.png",
        "cat/.DS_Store",
    ):
        (tmp_path / "train" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "train" / name).write_bytes(encoded(PIXELS[0]))
    images = open_images(str(tmp_path), "train")
    check(images, ["cat", "dog"])
    assert images.digest() == before and not caplog.text  # so that an interrupted conversion can resume
    for name in ("cat/a.gif", "cat/b.GIF", "dog/README"):
        (tmp_path / "train" / name).write_bytes(b"")
    check(open_images(str(tmp_path), "train"), ["cat", "dog"])
    assert caplog.messages == [f"3 other files in {tmp_path / 'train'} ignored (.gif, no extension)"]
    (tmp_path / "val" / "__MACOSX").mkdir(parents=True)
    with pytest.raises(UserError, match="has no val/CLASS"):
        open_images(str(tmp_path), "val")


def test_linked_folders_are_read_once(tmp_path):
    write_folder(tmp_path / "train")
    (tmp_path / "train" / "cat").rename(tmp_path / "elsewhere")
    (tmp_path / "train" / "cat").mkdir()
    (tmp_path / "train" / "cat" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "circle").symlink_to(tmp_path / "train" / "cat")
    (tmp_path / "train" / "cat" / "again").symlink_to(tmp_path / "elsewhere")
    check(open_images(str(tmp_path), "train"), ["cat", "dog"])


def test_a_folder_that_cannot_be_listed_ends_the_command(tmp_path, monkeypatch):
    write_folder(tmp_path / "train")
    (locked := tmp_path / "train" / "dog" / "locked").mkdir()
    listing = os.scandir

    def forbid(path):  # since tests may run as root, who may list everything
        if str(path) == str(locked):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listing(path)

    monkeypatch.setattr(os, "scandir", forbid)
    with pytest.raises(UserError, match=r"dog/locked cannot be listed \(Permission denied\); change its permissions"):
        open_images(str(tmp_path), "train")


@pytest.mark.parametrize("names", [["cat", "dog"], None])
def test_parquet(tmp_path, names):
    import datasets

    label = datasets.ClassLabel(names=names) if names else datasets.Value("int64")
    features = datasets.Features({"image": datasets.Image(), "label": label})
    rows = {"image": [{"bytes": encoded(x), "path": None} for x in PIXELS], "label": LABELS}
    tmp_path /= "data[1]"  # which is not a pattern
    (tmp_path / "data").mkdir(parents=True)
    datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / "data" / "validation-00000-of-00001.parquet")
    check(open_images(str(tmp_path), "val"), names or ["0", "1"])
    with pytest.raises(UserError, match="no train/CLASS"):
        open_images(str(tmp_path), "train")
    (tmp_path / "data" / "train.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(UserError, match=r"the Parquet files of train .* cannot be read"):
        open_images(str(tmp_path), "train")


def test_shards(tmp_path):
    from streaming import MDSWriter

    with MDSWriter(out=str(tmp_path / "train"), columns={"image": "bytes", "label": "int"}) as writer:
        for pixels, label in zip(PIXELS, LABELS):
            writer.write({"image": encoded(pixels), "label": label})
    (tmp_path / "train" / "split.json").write_text(json.dumps({"classes": ["cat", "dog"]}))
    images = open_images(str(tmp_path), "train")
    check(images, ["cat", "dog"])
    fetched = open_images(str(tmp_path / "cache"), "train", remote=str(tmp_path))
    assert {path.name for path in (tmp_path / "cache/train").iterdir()} == {"index.json", "split.json"}  # no shard yet
    check(fetched, ["cat", "dog"])


def test_the_digest_of_compressed_shards_does_not_change_when_they_are_read(tmp_path):
    from streaming import MDSWriter

    columns = {"image": "bytes", "label": "int"}
    with MDSWriter(out=str(tmp_path / "train"), columns=columns, compression="zstd") as writer:
        for pixels, label in zip(PIXELS, LABELS):
            writer.write({"image": encoded(pixels), "label": label})
    (tmp_path / "train" / "split.json").write_text(json.dumps({"classes": ["cat", "dog"]}))
    images = open_images(str(tmp_path), "train")
    before = images.digest()
    check(images, ["cat", "dog"])
    assert [*tmp_path.glob("train/*.mds")] and images.digest() == before


@pytest.mark.parametrize("kind", ["parquet", "hub", "mnist", "shards"])
def test_a_changed_label_or_picture_changes_the_digest(tmp_path, monkeypatch, kind):
    import datasets
    from streaming import MDSWriter

    def digest(pixels=PIXELS, labels=LABELS) -> str:
        files = [encoded(x, compress_level=0) for x in pixels]  # all of the same size
        if kind == "mnist":
            (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(pixels[..., 0]))
            (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.array(labels, np.uint8)))
        elif kind == "shards":
            with MDSWriter(out=str(tmp_path / "train"), columns={"x": "bytes", "y": "int"}, exist_ok=True) as writer:
                for content, label in zip(files, labels):
                    writer.write({"x": content, "y": label})
        else:
            rows = datasets.Dataset.from_dict({"image": [{"bytes": x, "path": None} for x in files], "label": labels})
            monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: ["train"])
            monkeypatch.setattr(datasets, "load_dataset", lambda name, **_: {"train": rows}["train"])
            if kind == "parquet":
                monkeypatch.undo()
                rows.to_parquet(tmp_path / "train.parquet")
        return open_images("some/images" if kind == "hub" else str(tmp_path), "train").digest()

    same = 1 if kind in ("parquet", "shards") else 2  # these are known by the time of their files
    changed = PIXELS.copy()
    changed[2] += 1
    found = [digest() for _ in range(same)]
    assert len(set(found)) == 1
    assert len({*found, digest(changed), digest(labels=[0, 1, 0, 1, 1, 0])}) == 3


@pytest.mark.parametrize("kind", ["jpeg", "png", "pil"])
def test_shards_of_streamings_own_converters(tmp_path, kind):
    from streaming import MDSWriter

    with MDSWriter(out=str(tmp_path / "val"), columns={"i": "int", "x": kind, "y": "int"}) as writer:
        for number, (pixels, label) in enumerate(zip(PIXELS, LABELS)):
            writer.write({"i": number, "x": Image.fromarray(pixels), "y": label})
    images = open_images(str(tmp_path), "val")
    if kind == "jpeg":
        assert len(images) == 6 and images.classes == ["0", "1"]
    else:
        check(images, ["0", "1"])


def cifar_rows():
    return PIXELS.transpose(0, 3, 1, 2).reshape(6, 3072)


@pytest.mark.parametrize("hundred", [False, True])
@pytest.mark.parametrize("split", ["train", "val"])
def test_cifar_in_python_and_binary_layout(tmp_path, hundred, split):
    folder = tmp_path / "python" / ("cifar-100-python" if hundred else "cifar-10-batches-py")
    binary = tmp_path / "binary" / ("cifar-100-binary" if hundred else "cifar-10-batches-bin")
    folder.mkdir(parents=True)
    binary.mkdir(parents=True)
    rows, meta = cifar_rows(), ("meta", b"fine_label_names") if hundred else ("batches.meta", b"label_names")
    labels = {b"fine_labels": LABELS, b"coarse_labels": [7] * 6} if hundred else {b"labels": LABELS}
    files = {
        ("train", True): "train",
        ("train", False): "data_batch_1",
        ("val", True): "test",
        ("val", False): "test_batch",
    }
    file = files[split, hundred]
    (folder / file).write_bytes(pickle.dumps({b"data": rows, **labels}, protocol=2))
    (folder / meta[0]).write_bytes(pickle.dumps({meta[1]: [b"cat", b"dog"]}, protocol=2))
    if not hundred and split == "train":
        (folder / file).write_bytes(pickle.dumps({b"data": rows[:3], b"labels": LABELS[:3]}, protocol=2))
        (folder / "data_batch_2").write_bytes(pickle.dumps({b"data": rows[3:], b"labels": LABELS[3:]}, protocol=2))
    check(open_images(str(tmp_path / "python"), split), ["cat", "dog"])
    content = b"".join(bytes([7, label] if hundred else [label]) + row.tobytes() for label, row in zip(LABELS, rows))
    (binary / f"{file}.bin").write_bytes(content)
    check(open_images(str(tmp_path / "binary"), split), ["0", "1"])
    (binary / ("fine_label_names.txt" if hundred else "batches.meta.txt")).write_text("cat\ndog\n\n")
    check(open_images(str(tmp_path / "binary"), split), ["cat", "dog"])
    (binary / f"{file}.bin").write_bytes(content[:-5])
    with pytest.raises(UserError, match="truncated"):
        open_images(str(tmp_path / "binary"), split)


def test_cifar_is_read_without_executing_it(tmp_path):
    class Hostile:
        def __reduce__(self):
            return (exec, ("raise SystemExit('executed')",))

    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(UserError, match=r"it would execute builtins\.exec"):
        open_images(str(tmp_path), "train")
    (tmp_path / "data_batch_1").write_bytes(b"no pickle")
    with pytest.raises(UserError, match="is not a file of CIFAR"):
        open_images(str(tmp_path), "train")


def idx(array) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


@pytest.mark.parametrize("compress", [False, True])
def test_mnist(tmp_path, compress):
    grey, labels = PIXELS[..., 0], np.array(LABELS, np.uint8)
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name, array in (("t10k-images-idx3-ubyte", grey), ("t10k-labels-idx1-ubyte", labels)):
        content = gzip.compress(idx(array)) if compress else idx(array)
        (folder / (name + ".gz" * compress)).write_bytes(content)
    check(open_images(str(tmp_path), "val"), ["0", "1"], [np.repeat(x[..., None], 3, -1) for x in grey])
    broken = tmp_path / "broken-idx3-ubyte"
    broken.write_bytes(idx(grey)[:-1])
    with pytest.raises(UserError, match="cannot be read"):
        read_idx(broken)


def test_hub_dataset(tmp_path, monkeypatch):
    import datasets

    features = datasets.Features({"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"img": [{"bytes": encoded(x), "path": None} for x in PIXELS], "fine_label": LABELS}
    table = datasets.Dataset.from_dict(rows, features)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: ["train", "test"])
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: {"test": table}[split])
    check(open_images("uoft-cs/cifar100", "val"), ["cat", "dog"])
    with pytest.raises(UserError, match="no split extra; its splits are train, test"):
        open_images("uoft-cs/cifar100", "extra")


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "RGBA", "LA", "I;16", "I", "F"])
def test_every_mode_becomes_rgb(mode):
    grey = Image.fromarray(PIXELS[0, ..., 0])
    if mode == "I;16":
        image = Image.fromarray(PIXELS[0, ..., 0].astype(np.uint16) * 257)
    else:
        image = grey.convert(mode)
        if mode == "I":
            image = image.point(lambda value: value * 257)
    form = {"CMYK": "TIFF", "F": "TIFF", "I": "TIFF"}.get(mode, "PNG")
    file = io.BytesIO()
    image.save(file, form)
    read = decode(file.getvalue(), "it")
    assert read.mode == "RGB"
    if mode not in ("1", "F"):
        assert np.abs(np.asarray(read).astype(int) - np.asarray(grey.convert("RGB")).astype(int)).max() <= 3


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "1", "L", "CMYK", "turned"])
def test_pictures_are_read_as_by_transformers_pipeline(mode, tmp_path):
    from transformers.image_utils import load_image

    exif, picture = Image.Exif(), Image.fromarray(PIXELS[0, :20])
    if mode == "turned":
        exif[0x0112] = 6  # the camera was turned by 90°
    else:
        picture = picture.convert(mode.removesuffix("A"))
    if mode.endswith("A"):
        picture.putalpha(Image.fromarray(PIXELS[1, :20, :, 0]))
    path = tmp_path / f"it.{'tiff' if mode == 'CMYK' else 'png'}"
    picture.save(path, **({"transparency": 3} if mode == "P" else {}), exif=exif)
    read = decode(path.read_bytes(), "it")
    assert read.size == ((20, 32) if mode == "turned" else (32, 20))
    assert np.array_equal(np.asarray(read), np.asarray(load_image(str(path))))


def test_formats_that_start_programs_are_not_opened():
    with pytest.raises(UserError, match="it is not a readable image"):
        decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n", "it")


def test_labels_in_words_and_missing_labels(tmp_path):
    rows = {"image": [{"bytes": encoded(PIXELS[0]), "path": None}] * 3, "label": ["cat", "ant", "cat"]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "train.parquet")
    images = open_images(str(tmp_path), "train")
    assert images.classes == ["ant", "cat"] and [images[index][1] for index in range(3)] == [1, 0, 1]
    datasets.Dataset.from_dict({**rows, "label": [-1, -1, -1]}).to_parquet(tmp_path / "test.parquet")
    with pytest.raises(UserError, match="images without a label"):
        open_images(str(tmp_path), "test")
    lost = {"image": [{"bytes": None, "path": str(tmp_path / "no.png")}], "label": [0]}
    datasets.Dataset.from_dict(lost).to_parquet(tmp_path / "val.parquet")
    with pytest.raises(UserError, match=r"no\.png of row 0 .* cannot be read"):
        open_images(str(tmp_path), "val")[0]


def test_names_that_are_not_utf8(tmp_path):
    folder = tmp_path / "train" / "cat"
    folder.mkdir(parents=True)
    (Path(os.fsdecode(os.fsencode(folder) + b"/\xff.png"))).write_bytes(encoded(PIXELS[0]))
    assert open_images(str(tmp_path), "train")[0][0] == encoded(PIXELS[0])


@pytest.mark.parametrize("content, problem", [
    (b"", "cat/7.jpg is empty"),
    (b"no picture at all", r"^cat/7\.jpg is not a readable image \(its format is unknown\); replace or remove it$"),
    (encoded(PIXELS[0], "JPEG")[:300], "cat/7.jpg is not a readable image"),
    (encoded(PIXELS[0])[:-200], "cat/7.jpg is not a readable image"),
])  # fmt: skip
def test_broken_images_are_named(content, problem):
    with pytest.raises(UserError, match=problem):
        decode(content, "cat/7.jpg")


def test_mistakes_in_the_place(tmp_path):
    with pytest.raises(UserError, match=r"data_local: \./nothing is not a folder"):
        open_images("./nothing", "train")
    write_folder(tmp_path / "train")
    with pytest.raises(UserError, match=r"no val/CLASS.*\(its folders: train\)"):
        open_images(str(tmp_path), "val")
    (tmp_path / "train" / "zebra").mkdir()
    with pytest.raises(UserError, match="no images in class zebra; add some or remove the folder"):
        open_images(str(tmp_path), "train")
