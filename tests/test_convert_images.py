"""Conversion of labelled images: every byte kept, broken files counted and named, the same shards after a kill."""

import io
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import warm
from conftest import snapshot
from PIL import Image
from streaming.base.format.mds import MDSReader

from src.convert_dataset import main
from src.data.images import open_images
from src.errors import UserError

DRAW = np.random.default_rng(0)


def encoded(form: str, size: int = 24) -> bytes:
    file = io.BytesIO()
    Image.fromarray(DRAW.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(file, form)
    return file.getvalue()


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    for split, count in (("train", 70), ("val", 5)):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                form = ("JPEG", "PNG", "BMP")[number % 3]
                (folder / split / name / f"{number:03}.{form.lower()}").write_bytes(encoded(form))
    return folder


def convert(*arguments: object) -> None:
    main([str(argument) for argument in arguments])


def rows(folder: Path) -> list[tuple[bytes, int]]:
    shards = json.loads((folder / "index.json").read_text())["shards"]
    readers = [MDSReader.from_json(str(folder.parent), folder.name, shard) for shard in shards]
    return [(reader[i]["image"], reader[i]["label"]) for reader in readers for i in range(len(reader))]


def shards(folder: Path) -> dict[str, bytes]:
    return {name: content for name, (content, _) in snapshot(folder).items()}


def test_files_are_stored_as_they_are(source, tmp_path):
    convert("--images", source, "--out_root", tmp_path / "out", "--num_workers", 2, "--size_limit", 50_000)
    for split in ("train", "val"):
        images = open_images(str(source), split)
        expected = [images[index][:2] for index in range(len(images))]
        assert rows(tmp_path / "out" / split) == expected
        summary = json.loads((tmp_path / "out" / split / "split.json").read_text())
        assert (summary["images"], summary["classes"], summary["broken"]) == (len(images), ["cat", "dog"], 0)
        stored = open_images(str(tmp_path / "out"), split)
        assert stored.classes == ["cat", "dog"] and [stored[i][:2] for i in range(len(stored))] == expected
    convert("--images", source, "--out_root", tmp_path / "one", "--num_workers", 1, "--size_limit", 50_000)
    assert shards(tmp_path / "one") == shards(tmp_path / "out")


def test_a_folder_without_splits_is_divided(source, tmp_path):
    flat, draw = tmp_path / "flat", np.random.default_rng(1)
    for name, count in (("cat", 70), ("dog", 30), ("eel", 2), ("fox", 1)):
        (flat / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(flat / name / f"{number}.png")
    for name, number in (("dog", 0), ("eel", 0), ("fox", 0)):
        for copies in range(9):
            (flat / name / f"copy{copies}.png").write_bytes((flat / name / f"{number}.png").read_bytes())
    with pytest.raises(UserError, match=r"its folders: cat, dog, eel, fox.*; if these are classes, .* --val_fraction"):
        open_images(str(flat), "train")
    command = ["--images", flat, "--val_fraction", 0.2, "--num_workers", 1, "--out_root"]
    convert(*command, tmp_path / "out")
    train, val = (rows(tmp_path / "out" / split) for split in ("train", "val"))
    whole = sorted(
        (path.read_bytes(), sorted(os.listdir(flat)).index(path.parent.name)) for path in flat.rglob("*.png")
    )
    assert sorted(train + val) == whole and not {*train} & {*val}  # copies are on one side
    counts = np.bincount([label for _, label in val], minlength=4)
    assert 7 <= counts[0] <= 21 and counts[1] >= 1 and counts[2] in (1, 10) and counts[3] == 0
    assert open_images(str(tmp_path / "out"), "val").classes == ["cat", "dog", "eel", "fox"]
    Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(flat / "cat" / "new.png")
    convert(*command, tmp_path / "more")
    assert {*val} <= {*rows(tmp_path / "more" / "val")}  # one more moves no other
    convert(*command, tmp_path / "more")  # which is its own
    with pytest.raises(UserError, match=r"already exists|an earlier conversion"):
        convert(*command[:2], "--val_fraction", 0.3, *command[4:], tmp_path / "more")


def test_pixels_without_files_become_png(tmp_path):
    pixels, labels = DRAW.integers(0, 256, (6, 7, 9), dtype=np.uint8), np.arange(6, dtype=np.uint8) % 2
    for name, array in (("train-images-idx3-ubyte", pixels), ("train-labels-idx1-ubyte", labels)):
        head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
        (tmp_path / name).write_bytes(head + array.tobytes())
    convert("--images", tmp_path, "--splits", "train", "--out_root", tmp_path / "out")
    for (content, label), expected, own in zip(rows(tmp_path / "out" / "train"), pixels, labels, strict=True):
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(content))), expected) and label == own


def test_a_conversion_of_an_earlier_version_is_known(tmp_path, caplog):
    """Whose digest was of the first and the last image."""
    rows = np.zeros((40, 3073), np.uint8)
    (tmp_path / "cifar").mkdir()
    for name in ("data_batch_1.bin", "test_batch.bin"):
        (tmp_path / "cifar" / name).write_bytes(rows.tobytes())
    command = ["--images", tmp_path / "cifar", "--splits", "train", "--out_root", tmp_path / "out"]
    convert(*command)
    path = tmp_path / "out/train/split.json"
    summary = json.loads(path.read_text())
    summary["command"]["contents"] = open_images(str(tmp_path / "cifar"), "train").earlier_digest()
    path.write_text(json.dumps(summary))
    with caplog.at_level("INFO", logger="lion"):
        convert(*command)
    assert "already written by the same command" in caplog.text
    rows[5, 0] = 1  # a label
    (tmp_path / "cifar/data_batch_1.bin").write_bytes(rows.tobytes())
    with pytest.raises(UserError, match="already exists"):
        path.write_text(json.dumps({**summary, "command": {**summary["command"], "contents": "of other images"}}))
        convert(*command)


def test_broken_files_are_counted_and_named(source, tmp_path, caplog):
    folder = tmp_path / "source" / "train" / "cat"
    folder.mkdir(parents=True)
    for number in range(9):
        (folder / f"{number}.png").write_bytes(encoded("PNG") if number % 3 else encoded("PNG")[:200])
    (folder / "9.png").symlink_to("no such file")
    with caplog.at_level("INFO", logger="lion"):
        convert("--images", tmp_path / "source", "--splits", "train", "--out_root", tmp_path / "out")
    summary = json.loads((tmp_path / "out" / "train" / "split.json").read_text())
    assert (summary["images"], summary["broken"]) == (6, 4) and len(rows(tmp_path / "out" / "train")) == 6
    named = [Path(name.split(" is not")[0].split(" cannot")[0]).name for name in summary["broken_images"]]
    assert named == ["0.png", "3.png", "6.png", "9.png"]
    assert "9.png cannot be read (No such file or directory); restore or remove it" in caplog.text
    assert "skipped: " in caplog.text and "4 broken ones skipped, see split.json" in caplog.text
    (folder / "9.png").unlink()
    for file in folder.iterdir():
        file.write_bytes(b"")
    with pytest.raises(UserError, match=r"train: no image of .* can be read \(.*0\.png is empty"):
        convert("--images", tmp_path / "source", "--splits", "train", "--out_root", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_killed_conversion_resumes_with_the_same_shards(source, tmp_path):
    command = ["--images", source, "--num_workers", 1, "--size_limit", 30_000, "--out_root"]
    convert(*command, tmp_path / "whole")
    out = tmp_path / "out"
    process = warm.start("src/convert_dataset.py", *command, out, output=tmp_path / "output")
    warm.wait_for(lambda: (out / ".train.unfinished" / "shard.00001.mds").exists(), process)
    os.kill(process.pid, signal.SIGKILL)
    warm.join(process)
    assert not (out / "train").exists()
    with pytest.raises(UserError, match=r"an earlier conversion, but with different options \(--size_limit\)"):
        convert("--images", source, "--num_workers", 1, "--size_limit", 40_000, "--out_root", out)
    changed, stamp = source / "train" / "cat" / "000.jpeg", os.stat(source / "train" / "cat" / "000.jpeg")
    os.utime(changed)
    with pytest.raises(UserError, match=r"an earlier conversion, but with different options \(the contents\)"):
        convert(*command, out)
    os.utime(changed, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    convert(*command, out)
    assert shards(out) == shards(tmp_path / "whole")
    convert(*command, out)  # which is its own
    os.utime(changed)
    with pytest.raises(UserError, match="train already exists"):
        convert(*command, out)


def test_mistakes(source, tmp_path):
    content = encoded("PNG")
    (tmp_path / "copies" / "train").mkdir(parents=True)  # a class that is called so
    for number in range(3):
        (tmp_path / "copies" / "train" / f"{number}.png").write_bytes(content)
    for arguments, problem in (
        (["--images", "./nowhere/at/all"], "--images: ./nowhere/at/all is not a folder"),
        (["--images", source, "--splits", "train_small"], "--splits train_small: images have train and val"),
        (["--images", source, "--tokenizer", "it", "--max_seq_len", 8], "--tokenizer is for text, not for --images"),
        (["--images", source, "--malformed_rows", 3], "--malformed_rows is for text, not for --images"),
        (["--images", source, "--one_document_per_file"], "--one_document_per_file is for text, not for --images"),
        (["--images", source, "--num_workers", 0], "--num_workers 0 must be at least 1"),
        (["--images", source, "--size_limit", 0], "--size_limit 0 must be between"),
        (["--images", tmp_path], "has no train/CLASS"),
        (["--images", source, "--val_fraction", 0.1], "has splits already (train, val); omit --val_fraction"),
        (["--images", tmp_path / "copies", "--val_fraction", 0.1], "no class of"),
        (
            ["--images", tmp_path / "copies" / "train", "--val_fraction", 0.1],
            "is not a folder of CLASS/*; name one, or",
        ),
        (["--images", source, "--val_fraction", 1], "--val_fraction 1.0 must be between 0 and 1"),
    ):
        with pytest.raises(UserError) as error:
            convert(*arguments, "--out_root", tmp_path / "out")
        assert problem in str(error.value)
        assert not (tmp_path / "out").exists()
