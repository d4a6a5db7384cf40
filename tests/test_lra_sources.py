"""Long Range Arena's official layouts, each written in miniature: known values and labels, and errors of one sentence."""

import json
import pickle
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import DATA, needs_reference
from PIL import Image

from src.errors import UserError
from src.lra import make
from src.lra.sources import RECORD, RELEASE, SPLITS, STARTED, amount, check, generated, read, stamps

LRA = DATA / "lra"
CONTOUR = "pathfinder32/curv_contour_length_14"
PAPER_VOCABULARY = "[MIN [MAX [MED [SM ] 0 1 2 3 4 5 6 7 8 9".split()


def task(layout: str, **changes) -> SimpleNamespace:
    given = {"name": layout, "title": layout, "layout": layout, "folder": None, "size": 32, "max_length": 4096}
    others = {"hub": None, "validation": "held_out", "split": "seed", "split_seed": 0}
    return SimpleNamespace(**{**given, **others, **changes})


def examples(layout: str, lra_dir: Path, of: str = "train", counts: Counter | None = None, **changes) -> list:
    """(lists of values of each part, label) of each example."""
    found = read(task(layout, **changes), str(lra_dir), of, counts)
    return [(tuple(part.tolist() for part in parts), label) for parts, label in found]


def write_listops(root: Path, rows: int = 6, extra: str = "") -> Path:
    folder = root / "listops-1000"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "val", "test"):
        lines = [f"( ( ( [MIN {i % 10} ) {len(name)} ) ] )\t{min(i % 10, len(name))}" for i in range(rows)]
        text = "".join(f"{line}\r\n" for line in ["Source\tTarget", *lines]) + (extra if name == "train" else "")
        (folder / f"basic_{name}.tsv").write_bytes(text.encode())
    return root


def write_imdb(root: Path, count: int = 20) -> Path:
    for split in ("train", "test"):
        for name in ("neg", "pos"):
            folder = root / "aclImdb" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                (folder / f"{i}_{8 if name == 'pos' else 2}.txt").write_bytes(f"{split} {name} {i} é<br />".encode())
    return root


def write_aan(root: Path, rows: int = 6, extra: bytes = b"") -> Path:
    folder = root / "tsv_data"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "eval", "test"):
        lines = [b"%d.0\tA%d\tB\t%s \"%d\t'\xff, %d\n" % (i % 2, i, name.encode(), i, i) for i in range(rows)]
        content = b"".join(lines) + (extra if name == "train" else b"")
        (folder / f"new_aan_pairs.{name}.tsv").write_bytes(content)
    return root


def colours(seed: int, count: int) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, (count, 3072), np.uint8)


def write_cifar(folder: Path, binary: bool = False, count: int = 4) -> Path:
    folder.mkdir(parents=True)
    for seed, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        data, labels = colours(seed, count), [(seed + i) % 10 for i in range(count)]
        if binary:
            content = b"".join(bytes([label]) + row.tobytes() for label, row in zip(labels, data))
            (folder / f"{name}.bin").write_bytes(content)
        else:
            (folder / name).write_bytes(pickle.dumps({b"data": data, b"labels": labels}))
    names = {b"label_names": [b"class%d" % i for i in range(10)]}
    if not binary:
        (folder / "batches.meta").write_bytes(pickle.dumps(names))
    return folder


def luma(rows: np.ndarray) -> list:
    red, green, blue = rows.astype(float).reshape(-1, 3, 1024).transpose(1, 0, 2)
    return np.floor(0.299 * red + 0.587 * green + 0.114 * blue + 0.5 + 1e-9).astype(int).tolist()


def write_pathfinder(
    root: Path, count: int = 40, folder: str = CONTOUR, side: int = 32, empty: int | None = None
) -> Path:
    """Images in two folders; the first pixels of each tell its number, and odd ones have label 1."""
    place = root / folder
    for part in range(2):
        (place / f"imgs/{part}").mkdir(parents=True)
        (place / "metadata").mkdir(exist_ok=True)
        lines = []
        for i in range(count // 2):
            number = part * (count // 2) + i
            pixels = np.full((side, side), 7, np.uint8)
            pixels[0, :2] = number, number % 2
            path = place / f"imgs/{part}/sample_{i}.png"
            Image.fromarray(pixels).save(path)
            lines.append(f"imgs/{part} sample_{i}.png {i} {number % 2} 1.0 14 4 2 0.5 1 1")
            if number == empty:
                path.write_bytes(b"")
        (place / f"metadata/{part}.npy").write_text("\n".join(lines) + "\n")
    return root


def refused(layout: str, lra_dir: Path | None, *words: str, of: str = "train", **changes) -> None:
    """Assert that a task is refused in a sentence with these words."""
    lra_dir = lra_dir and str(lra_dir)
    with pytest.raises(UserError) as error:
        check(task(layout, **changes), lra_dir)
        for _ in read(task(layout, **changes), lra_dir, of):
            pass
    message = str(error.value)
    assert "\n" not in message and ";" in message, message  # what is wrong; what to do
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"


def test_listops_are_token_numbers_without_parentheses(tmp_path):
    write_listops(tmp_path, extra="( ( ( ( [MED ( ( [SM 9 ) ] ) ) 0 ) 7 ) ] )\t7\r\n5\t5\r\n")
    found = examples("listops", tmp_path)
    assert found[1] == (([0, 6, 10, 4],), 1)  # [MIN 1 5 ]
    assert found[-2] == (([2, 3, 14, 4, 5, 12, 4],), 7) and found[-1] == (([10],), 5)
    assert [label for _, label in examples("listops", tmp_path, "validation")] == [0, 1, 2, 3, 3, 3]
    assert len(examples("listops", tmp_path, "test", folder="listops-1000")) == 6


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("[MAX 1 X\t1", ["line 8", "unknown token 'X'"]),
        ("[MAX 1 10 ]\t1", ["line 8", "unknown token '10'"]),
        ("[MAX 1 2\t2", ["line 8", "unbalanced brackets"]),
        ("[MAX 1 2 ] ]\t2", ["line 8", "unbalanced brackets"]),
        ("[MAX 1 ] 2\t2", ["line 8", "not one expression"]),
        ("[MAX 1 [MIN ] ]\t2", ["line 8", "not one expression"]),
        ("\t2", ["line 8", "not one expression"]),
        ("[MAX 1 2 ]\t10", ["line 8", "the target '10'", "from 0 to 9"]),
        ("[MAX 1 2 ]\t]", ["line 8", "the target ']'"]),
        ("[MAX 1 2 ]", ["line 8", "1 columns instead of 2"]),
    ],
)
def test_broken_rows_of_listops_are_refused(tmp_path, row, words):
    refused("listops", write_listops(tmp_path, extra=f"{row}\r\n"), "basic_train.tsv", *words)


def test_other_broken_files_of_listops_are_refused(tmp_path):
    path = write_listops(tmp_path) / "listops-1000/basic_train.tsv"
    content = path.read_bytes()
    path.write_bytes(content + b"[MAX \xff ]\t1\r\n")
    refused("listops", tmp_path, "basic_train.tsv, line 8", "UTF-8")
    path.write_bytes(content.partition(b"\n")[2])
    refused("listops", tmp_path, "basic_train.tsv", "no column Source")
    path.write_bytes(b"Source\tTarget\r\n")
    refused("listops", tmp_path, "lra_dir", "the train split of listops has no examples", "make listops")
    path.write_bytes(b"Source\tTarget\r\n[MAX 1 ]\t1\r\n[MIN 1 ]\t1\r\n")
    refused("listops", tmp_path, "lra_dir", "all training examples", "label 1", "nothing to learn")
    path.unlink()
    refused("listops", tmp_path, "lra_dir", f"{path} does not exist", "python lra.py make listops")


def test_imdb_is_bytes_with_a_tenth_of_each_class_held_out(tmp_path):
    write_imdb(tmp_path)
    found = {split: examples("imdb", tmp_path, split) for split in SPLITS}
    assert [len(found[split]) for split in SPLITS] == [36, 4, 40]
    assert [[label for _, label in found[split]].count(1) for split in SPLITS] == [18, 2, 20]
    texts = [bytes(parts[0]).decode() for parts, _ in found["train"] + found["validation"]]
    assert sorted(texts) == sorted(f"train {name} {i} é<br />" for name in ("neg", "pos") for i in range(20))
    assert all((b" pos " in bytes(parts[0])) == label for split in SPLITS for parts, label in found[split])
    assert found["validation"] == examples("imdb", tmp_path, "validation")
    assert found["validation"] != examples("imdb", tmp_path, "validation", split_seed=1)


def test_imdb_validates_on_the_test_set_if_asked(tmp_path):
    write_imdb(tmp_path, 3)
    found = {split: examples("imdb", tmp_path, split, validation="test") for split in SPLITS}
    assert found["validation"] == found["test"] and [len(found[split]) for split in SPLITS] == [6, 6, 6]


def test_long_texts_are_cut_and_counted_and_empty_ones_become_a_blank(tmp_path):
    counts = Counter()
    write_imdb(tmp_path)
    (tmp_path / "aclImdb/test/neg/0_1.txt").write_bytes(b"")
    found = examples("imdb", tmp_path, "test", counts, max_length=8)
    assert found[0] == (([32],), 0) and {len(parts[0]) for parts, _ in found[1:]} == {8}
    assert (counts["parts"], counts["cut"]) == (41, 40)  # one was 41 because 0_2.txt is there, too


def test_missing_parts_of_imdb_are_refused(tmp_path):
    shutil.rmtree(write_imdb(tmp_path) / "aclImdb/test/neg")
    refused("imdb", tmp_path, "lra_dir", "aclImdb/test/neg does not exist", "download aclImdb")
    for path in (tmp_path / "aclImdb/train/pos").iterdir():
        path.unlink()
    (tmp_path / "aclImdb/test/neg").mkdir()
    refused("imdb", tmp_path, "all training examples of imdb have the label 0")


def test_imdb_is_read_from_the_hub_without_a_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    hub = tmp_path / "hub"  # in the Hub's format
    hub.mkdir()
    for split in ("train", "test"):
        rows = {"text": [f"{split} é {i}" for i in range(20)], "label": [i // 10 for i in range(20)]}
        datasets.Dataset.from_dict(rows).to_parquet(str(hub / f"{split}-00000-of-00001.parquet"))
    found = examples("imdb", tmp_path, "validation", hub=str(hub))
    assert [label for _, label in found] == [0, 1] and bytes(found[0][0][0]).decode().startswith("train é")
    assert len(examples("imdb", tmp_path, "test", hub=str(hub))) == 20
    assert stamps(task("imdb", hub=str(hub)), None) == [["Hub", str(hub), 0]]
    assert generated(task("imdb", hub=str(hub)), None) == f"the Hub's {hub}"
    check(task("imdb", hub=str(hub)), None)
    refused("imdb", None, "lra_dir", "cannot read no/such", "aclImdb", hub="no/such")
    datasets.Dataset.from_dict({"text": ["a"], "label": [2]}).to_parquet(str(hub / "train-00000-of-00001.parquet"))
    refused("imdb", tmp_path, "typo/train/neg does not exist", hub=str(hub), folder="typo")
    refused("imdb", None, "lra_dir is not set", hub=str(hub), folder="typo")
    refused("imdb", None, "lra_dir", "labels other than 0 and 1", hub=str(hub))
    refused("listops", None, "only imdb and cifar10", "omit hub", hub="no/such")


def test_aan_is_pairs_of_bytes_of_any_kind(tmp_path):
    write_aan(tmp_path, extra=b"1\t\t\ta\r\r\n" + b"0\tx\ty\t\tz")
    refused("aan", tmp_path, "new_aan_pairs.train.tsv, line 7", "4 columns instead of 5")
    write_aan(tmp_path, extra=b"1\tx\ty\ta\tb\r\r\n\n" + b"0\tx\ty\t\tz")
    found = examples("aan", tmp_path)
    assert found[3] == ((list(b'train "3'), list(b"'\xff, 3")), 1)
    assert found[-2:] == [(([97], [98, 13]), 1), (([32], [122]), 0)]
    assert examples("aan", tmp_path, "validation")[2] == ((list(b'eval "2'), list(b"'\xff, 2")), 0)
    assert len(examples("aan", tmp_path, "test")) == 6


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (b"1.0\tA\tB\tone\ttwo\tthree", "6 columns instead of 5"),
        (b"2.0\tA\tB\tone\ttwo", "the label '2.0' must be 0 or 1"),
        (b"\xff\tA\tB\tone\ttwo", "must be 0 or 1"),
    ],
)
def test_broken_rows_of_aan_are_refused(tmp_path, row, words):
    refused("aan", write_aan(tmp_path, extra=row), "new_aan_pairs.train.tsv, line 7", words)
    (tmp_path / "tsv_data/new_aan_pairs.eval.tsv").unlink()
    refused("aan", tmp_path, "lra_dir", "new_aan_pairs.eval.tsv does not exist", "OpenNLPLab/lra")


@pytest.mark.parametrize(
    ("folder", "binary"), [("cifar-10-batches-py", False), ("cifar-10-batches-bin", True), (".", False), ("mine", True)]
)
def test_cifar_is_luma_with_the_last_tenth_held_out(tmp_path, folder, binary):
    write_cifar(tmp_path / "data" / folder, binary)
    changes = {"folder": folder} if folder == "mine" else {}
    found = {split: examples("cifar10", tmp_path / "data", split, **changes) for split in SPLITS}
    assert [len(found[split]) for split in SPLITS] == [18, 2, 4]
    values = luma(np.concatenate([colours(seed, 4) for seed in range(6)]))
    labels = [(seed + i) % 10 for seed in range(6) for i in range(4)]
    assert found["train"] + found["validation"] + found["test"] == [((v,), label) for v, label in zip(values, labels)]
    assert len(examples("cifar10", tmp_path / "data", "train", validation="test", **changes)) == 20


def test_cifar_is_read_from_the_hub_without_a_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    pixels = colours(0, 10).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    kinds = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=list("abcdefghij"))})
    rows = {"img": [Image.fromarray(one) for one in pixels], "label": list(range(10))}
    (tmp_path / "hub").mkdir()
    for split in ("train", "test"):
        table = datasets.Dataset.from_dict(rows, features=kinds)
        table.to_parquet(str(tmp_path / f"hub/{split}-00000-of-00001.parquet"))
    found = examples("cifar10", tmp_path, "test", hub=str(tmp_path / "hub"))
    assert found == [((values,), label) for label, values in enumerate(luma(colours(0, 10)))]
    refused("cifar10", None, "lra_dir", "no/such", "Hub", hub="no/such")


def test_missing_or_broken_files_of_cifar_are_refused(tmp_path):
    folder = write_cifar(tmp_path / "cifar-10-batches-bin", binary=True)
    (folder / "test_batch.bin").write_bytes((folder / "test_batch.bin").read_bytes()[:-1])
    refused("cifar10", tmp_path, "test_batch.bin is truncated", "copy it again", of="test")
    (folder / "test_batch.bin").write_bytes(bytes([11]) + bytes(3072))
    refused("cifar10", tmp_path, "is not CIFAR-10", "label 11", "cifar-10-python.tar.gz", of="test")
    (folder / "data_batch_3.bin").unlink()
    refused("cifar10", tmp_path, "lra_dir", "data_batch_3.bin does not exist", "cifar-10-python.tar.gz")


@pytest.mark.parametrize("order", ["seed", "in_order"])
def test_pathfinder_is_split_in_tenths(tmp_path, order):
    write_pathfinder(tmp_path)
    found = {split: examples("pathfinder", tmp_path, split, split=order) for split in SPLITS}
    numbers = {split: [parts[0][0] for parts, _ in found[split]] for split in SPLITS}
    assert [len(numbers[split]) for split in SPLITS] == [32, 4, 4]
    in_turn = [*numbers["train"], *numbers["validation"], *numbers["test"]]
    assert sorted(in_turn) == list(range(40)) and (in_turn == list(range(40))) == (order == "in_order")
    assert all(parts[0][1:3] == [label, 7] and len(parts[0]) == 1024 for s in SPLITS for parts, label in found[s])
    assert found["test"] == examples("pathfinder", tmp_path, "test", split=order)
    other = examples("pathfinder", tmp_path, "test", split=order, split_seed=1)
    assert (found["test"] == other) == (order == "in_order")


def test_pathfinder_reads_the_generators_own_metadata(tmp_path):
    write_pathfinder(tmp_path)
    expected = examples("pathfinder", tmp_path)
    for kind, path in zip(("U", "S"), sorted((tmp_path / CONTOUR / "metadata").iterdir())):
        rows = [line.split() for line in path.read_text().splitlines()]
        np.save(path, np.array(rows, kind))
    assert examples("pathfinder", tmp_path) == expected
    (tmp_path / CONTOUR).rename(tmp_path / "own")
    assert examples("pathfinder", tmp_path, folder="own") == expected


def test_pickled_metadata_is_never_loaded(tmp_path):
    class Runs:
        def __reduce__(self):
            return Path(tmp_path, "ran").touch, ()

    write_pathfinder(tmp_path)
    path = tmp_path / CONTOUR / "metadata/1.npy"
    np.save(path, np.array([[Runs()]], object), allow_pickle=True)
    refused("pathfinder", tmp_path, "1.npy", "pickled objects", "never loaded", "array of strings")
    path.write_bytes(pickle.dumps(Runs()))
    refused("pathfinder", tmp_path, "1.npy", "pickled objects", "never loaded")
    assert not (tmp_path / "ran").exists()


def test_broken_metadata_is_refused(tmp_path):
    path = write_pathfinder(tmp_path) / CONTOUR / "metadata/0.npy"
    text = path.read_text()
    path.write_text(f"{text}imgs/0 sample_0.png 0\n")
    refused("pathfinder", tmp_path, "0.npy, line 21", "3 columns instead of 4")
    path.write_text(f"{text}imgs/0 sample_0.png 0 0.3 1\n")
    refused("pathfinder", tmp_path, "0.npy, line 21", "the label '0.3' must be 0 or 1")
    path.write_bytes(b"imgs/0 sample_\xff.png 0 0\n")
    refused("pathfinder", tmp_path, "0.npy", "UTF-8")
    np.save(path, np.array(["imgs/0"]))
    refused("pathfinder", tmp_path, "0.npy, line 1", "0 columns")
    np.save(path, np.array([["imgs/0", "sample_0.png", "0", "1"]]))
    path.write_bytes(path.read_bytes()[:-9])
    refused("pathfinder", tmp_path, "0.npy", "corrupt")
    for other in path.parent.iterdir():
        other.unlink()
    refused("pathfinder", tmp_path, "lra_dir", "the train split of pathfinder has no examples", "make pathfinder")


def test_empty_images_are_skipped_and_others_must_be_readable(tmp_path, caplog):
    write_pathfinder(tmp_path, empty=3)
    counts = Counter()
    with caplog.at_level("INFO", "lion"):
        found = [examples("pathfinder", tmp_path, split, counts, split="in_order") for split in SPLITS]
    assert [len(split) for split in found] == [31, 4, 4] and counts["skipped"] == 1
    assert "skipped 1 empty image of the train split" in caplog.text
    path = tmp_path / CONTOUR / "imgs/0/sample_5.png"
    content = path.read_bytes()
    path.write_bytes(content[:40])
    refused("pathfinder", tmp_path, "imgs/0/sample_5.png is not a readable image", split="in_order")
    Image.fromarray(np.zeros((64, 32), np.uint8)).save(path)
    refused("pathfinder", tmp_path, "sample_5.png is 32 × 64 pixels, not 32 × 32")
    path.unlink()
    refused("pathfinder", tmp_path, "lra_dir", "sample_5.png cannot be read (No such file", "copy it again")


def test_the_outer_pathfinder128_and_other_wrong_folders_are_refused(tmp_path):
    folder = "pathfinder128/curv_contour_length_14"
    write_pathfinder(tmp_path, 20, folder, 128)
    assert examples("pathfinder", tmp_path, "test", size=128)
    inner = tmp_path / "lra_release"
    write_pathfinder(inner, 20, folder, 128)
    refused("pathfinder", tmp_path, "lra_dir", "broken copy", f"set lra_dir={inner}", size=128)
    check(task("pathfinder", size=128), str(inner))
    write_aan(inner)
    refused("aan", tmp_path, "lra_dir", "does not exist", f"set lra_dir={inner}")
    refused("pathfinder", inner, "pathfinder32/curv_contour_length_14/metadata does not exist", "make pathfinder")
    refused("listops", None, "lra_dir is not set", "listops-1000", "make listops")
    refused("listops", tmp_path / "none", "lra_dir", "none is not a directory", "make listops")


def test_stamps_change_with_the_files_and_tell_how_much_is_read(tmp_path):
    root = str(write_pathfinder(write_listops(write_imdb(tmp_path))))
    first = {name: stamps(task(name), root) for name in ("pathfinder", "listops", "imdb")}
    assert first == {name: stamps(task(name), root) for name in first}
    assert not any(root in str(row) for rows in first.values() for row in rows)
    text = tmp_path / "aclImdb/test/neg/0_2.txt"
    text.write_bytes(text.read_bytes())  # in place, with the same size
    assert stamps(task("imdb"), root) != first["imdb"]
    first["imdb"] = stamps(task("imdb"), root)
    for name, rows in first.items():
        counts = Counter()
        for split in SPLITS:
            examples(name, tmp_path, split, counts)
        assert counts["read"] == pytest.approx(amount(rows), rel=0.1), name
    (tmp_path / CONTOUR / "imgs/1/sample_0.png").unlink()
    (tmp_path / "aclImdb/train/pos/0_8.txt").unlink()
    write_listops(tmp_path, extra="5\t5\r\n")
    assert all(stamps(task(name), root) != first[name] for name in first)


def test_generated_files_are_named_so(tmp_path):
    root = str(write_pathfinder(write_listops(tmp_path)))
    assert generated(task("listops"), root) is generated(task("pathfinder"), root) is None
    (tmp_path / "listops-1000" / RECORD).write_text(json.dumps({"seed": 3}))
    (tmp_path / "pathfinder32" / RECORD).write_text("{")
    assert generated(task("listops"), root) == "generated, seed 3"
    assert generated(task("pathfinder"), root) == "generated, seed unknown"
    assert generated(task("pathfinder", folder=CONTOUR), root) == "generated, seed unknown"
    (tmp_path / "pathfinder32" / RECORD).rename(tmp_path / "pathfinder32" / STARTED)
    refused("pathfinder", tmp_path, "only partly generated", folder=CONTOUR)


def test_a_folder_may_be_anywhere(tmp_path):
    write_listops(tmp_path / "elsewhere")
    (tmp_path / "lra").mkdir()
    found = task("listops", folder=str(tmp_path / "elsewhere/listops-1000"))
    assert stamps(found, str(tmp_path / "lra"))[0][0] == "../elsewhere/listops-1000/basic_train.tsv"


def test_what_the_generator_writes_is_read_once_it_is_finished(tmp_path):
    options = ["--rows", "20", "5", "5", "--min_length", "5", "--max_length", "20", "--seed", "4"]
    make.main(["listops", "--out", str(tmp_path), *options])
    unlike = "unlike the release (rows 20 5 5, min_length 5, max_length 20)"
    assert generated(task("listops"), str(tmp_path)) == f"generated, seed 4, {unlike}"
    for data in (["listops"], ["pathfinder", "--size", "32", "--images", "200000"]):
        defaults = vars(make.parse([*data, "--out", str(tmp_path)]))
        assert not {name for name, value in RELEASE.items() if defaults.get(name, value) != value}
    assert [len(examples("listops", tmp_path, split)) for split in SPLITS] == [20, 5, 5]
    assert (RECORD, STARTED) == (make.RECORD, make.STARTED)
    (tmp_path / "listops-1000" / RECORD).rename(tmp_path / "listops-1000" / STARTED)
    refused("listops", tmp_path, "lra_dir", "only partly generated", "python lra.py make")


@needs_reference
def test_reference_samples():
    for split, name in zip(SPLITS, ("train", "val", "test")):
        lines = (LRA / f"listops-1000/basic_{name}.tsv").read_text().splitlines()[1:]
        rows = [line.split("\t") for line in lines]
        words = [[PAPER_VOCABULARY.index(w) for w in row[0].split() if w not in "()"] for row in rows]
        assert examples("listops", LRA, split) == [((w,), int(row[1])) for w, row in zip(words, rows)]
    reviews = examples("imdb", LRA, validation="test")
    files = [LRA / "aclImdb/train" / name for name in ("neg/0_3.txt", "neg/1000_4.txt", "pos/0_9.txt")]
    assert reviews == [((list(file.read_bytes()),), int(file.parent.name == "pos")) for file in files]
    rows = np.fromfile(LRA / "cifar-10-batches-bin/test_batch.bin", np.uint8).reshape(-1, 3073)
    assert examples("cifar10", LRA, "test") == [
        ((values,), label) for values, label in zip(luma(rows[:, 1:]), rows[:, 0].tolist())
    ]
    for size in (32, 128):
        place = LRA / f"pathfinder{size}/curv_contour_length_14"
        lines = [line.split() for line in (place / "metadata/0.npy").read_text().splitlines()]
        pixels = [np.asarray(Image.open(place / line[0] / line[1])).ravel().tolist() for line in lines]
        assert [example for split in SPLITS for example in read_split(size, split)] == [
            ((values,), int(line[3])) for values, line in zip(pixels, lines)
        ]


def read_split(size: int, split: str) -> list:
    """The examples of the samples' Pathfinder, in order; of a few images all may be of one class."""
    found = []
    try:
        for parts, label in read(task("pathfinder", size=size, max_length=16384, split="in_order"), str(LRA), split):
            found.append(((parts[0].tolist(),), label))
    except UserError as error:
        assert "nothing to learn" in str(error)
    return found
