"""Arrays of Long Range Arena: the same as the files tell, written once, all or nothing, and written again if they do
not fit."""

import json
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import DATA, needs_reference
from test_lra_sources import examples, task, write_aan, write_cifar, write_imdb, write_listops, write_pathfinder

from src.errors import RunFailed, UserError
from src.lra import arrays, sources
from src.lra.arrays import collate, prepare

SPLITS = sources.SPLITS


def items(split: arrays.Examples) -> list:
    return [(tuple(part.tolist() for part in item["parts"]), item["label"]) for item in split]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def in_process(function, *arguments) -> int:
    """Return the exit code of a function in a process of its own."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join(60)
    return process.exitcode


@pytest.mark.parametrize("layout", ["listops", "imdb", "aan", "cifar10", "pathfinder"])
def test_arrays_hold_what_the_files_hold(tmp_path, layout):
    root = write_aan(write_imdb(write_pathfinder(write_listops(tmp_path / "lra"))))
    write_cifar(root / "cifar-10-batches-py")
    prepared = prepare(task(layout), str(root), tmp_path / "store")
    for split in SPLITS:
        found, expected = prepared.open(split), examples(layout, root, split)
        assert items(found) == expected and len(found) == len(expected)
        assert found.labels.tolist() == [label for _, label in expected] and found.labels.dtype == np.int64
        assert found.lengths.tolist() == [max(map(len, parts)) for parts, _ in expected]
        assert isinstance(found.values, np.memmap) and found.values.dtype == np.uint8
        assert found.parts == (2 if layout == "aan" else 1) and len(found.ends) == found.parts * len(found) + 1
        assert items([found[-1]]) == expected[-1:]
        about = prepared.about["splits"][split]
        assert about["classes"] == pytest.approx(np.bincount(found.labels) / len(found), abs=1e-4)
    assert names(tmp_path / "store") == [layout]


def test_a_prepared_task_is_small_and_its_splits_map_the_files_anew_in_other_processes(tmp_path):
    prepared = prepare(task("listops"), str(write_listops(tmp_path)), tmp_path / "store")
    again = pickle.loads(pickle.dumps(prepared))
    assert again == prepared and len(pickle.dumps(prepared)) < 2000
    sent = pickle.dumps(again.open("train"))
    assert len(sent) < 500 and items(pickle.loads(sent)) == items(prepared.open("train"))


def test_the_summary_is_a_line(tmp_path):
    write_listops(tmp_path, 12)
    (tmp_path / "listops-1000/generated.json").write_text(json.dumps({"seed": 7}))
    prepared = prepare(task("listops", title="ListOps"), str(tmp_path), tmp_path / "store")
    assert prepared.summary() == "ListOps: 12 / 12 / 12 examples, mean length 4, longest 4; generated, seed 7"
    write_pathfinder(tmp_path, empty=1)
    prepared = prepare(task("pathfinder", title="Pathfinder"), str(tmp_path), tmp_path / "store")
    assert prepared.summary().endswith("mean length 1,024, longest 1,024, 1 empty image skipped")
    changed = task("imdb", title="Text", validation="test", max_length=20)
    prepared = prepare(changed, str(write_imdb(tmp_path)), tmp_path / "store")
    found = "Text: 40 / 40 examples, mean length 20, longest 20, 50.0% truncated to 20; validation on the test set"
    assert prepared.summary() == found


def test_more_classes_than_labels_are_refused(tmp_path):
    prepared = prepare(task("listops", title="ListOps"), str(write_listops(tmp_path, 12)), tmp_path / "store")
    found = len(prepared.about["splits"]["train"]["classes"])
    prepared.check_labels(found)
    with pytest.raises(UserError, match=f"ListOps has {found} classes in its data, and 2 labels; add the missing"):
        prepared.check_labels(2)


def test_validation_on_the_test_set_stores_it_once(tmp_path):
    prepared = prepare(task("imdb", validation="test"), str(write_imdb(tmp_path)), tmp_path / "store")
    assert items(prepared.open("validation")) == items(prepared.open("test"))
    assert names(tmp_path / "store/imdb") == ["about.json", "test", "train"]


def test_files_are_read_once_and_again_if_they_or_the_options_change(tmp_path, monkeypatch, caplog):
    root, store, reads = str(write_listops(tmp_path)), tmp_path / "store", []
    monkeypatch.setattr(arrays, "read", lambda *given: reads.append(given[2]) or sources.read(*given))
    first = prepare(task("listops"), root, store)
    assert prepare(task("listops"), root, store) == first and reads == list(SPLITS)
    moved = shutil.copytree(tmp_path / "listops-1000", tmp_path / "elsewhere/listops-1000")
    os.utime(moved / "basic_test.tsv", (1, 1))
    with caplog.at_level("INFO", "lion"):
        assert prepare(task("listops"), str(tmp_path / "elsewhere"), store).digest == first.digest
    assert len(reads) == 6 and "other files or options" in caplog.text
    shorter = prepare(task("listops", max_length=3), root, store)
    assert shorter.digest != first.digest and shorter.open("train").lengths.max() == 3
    with pytest.raises(RunFailed, match="was rewritten by another command"):
        first.open("train")
    write_listops(tmp_path, extra="5\t5\r\n")
    assert len(prepare(task("listops"), root, store).open("train")) == 7


@pytest.mark.parametrize("name", ["values.bin", "ends.npy", "labels.npy", "../about.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "longer", "empty"])
def test_corrupt_arrays_are_detected_and_written_again(tmp_path, caplog, name, damage):
    root, store = str(write_aan(tmp_path)), tmp_path / "store"
    prepared = prepare(task("aan"), root, store)
    path = (store / "aan/validation" / name).resolve()
    content = path.read_bytes()
    path.write_bytes({"truncated": content[:-1], "longer": content + b"\0", "empty": b"", "missing": b""}[damage])
    if damage == "missing":
        path.unlink()
    harmless = damage == "longer" and name.endswith(".npy")  # NumPy reads what the header tells
    if not harmless and (damage, name) != ("truncated", "../about.json"):  # whose last byte is a newline
        with pytest.raises(RunFailed, match="missing or corrupt; run the command again"):
            prepared.open("validation")
        with caplog.at_level("INFO", "lion"):
            assert prepare(task("aan"), root, store) == prepared
        assert "missing or corrupt; reading the files again" in caplog.text
    assert items(prepared.open("validation")) == examples("aan", tmp_path, "validation")


def dies_in(split: str, after: int):
    """Readers that end their process in the middle."""

    def read(task, lra_dir, name, counts):
        for number, example in enumerate(sources.read(task, lra_dir, name, counts)):
            if name == split and number == after:
                os.kill(os.getpid(), signal.SIGKILL)
            yield example

    return read


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_killed_command_leaves_nothing_under_the_name(tmp_path, monkeypatch, split):
    root, store = str(write_listops(tmp_path)), tmp_path / "store"
    with monkeypatch.context() as patch:
        patch.setattr(arrays, "read", dies_in(split, 3))
        assert in_process(prepare, task("listops"), root, store) == -signal.SIGKILL
    assert names(store) == [".listops.unfinished"]
    first = prepare(task("listops"), root, store)
    assert names(store) == ["listops"] and len(first.open("test")) == 6
    write_listops(tmp_path, 12)
    with monkeypatch.context() as patch:
        patch.setattr(arrays, "read", dies_in(split, 3))
        assert in_process(prepare, task("listops"), root, store) == -signal.SIGKILL
    assert items(first.open("train"))  # what was there is as it was
    assert len(prepare(task("listops"), root, store).open("test")) == 12 and names(store) == ["listops"]


def test_an_error_leaves_nothing(tmp_path):
    write_listops(tmp_path, extra="[MAX 1\t1\r\n")
    with pytest.raises(UserError, match="line 8: unbalanced"):
        prepare(task("listops"), str(tmp_path), tmp_path / "store")
    assert names(tmp_path / "store") == []


def test_a_full_disk_is_told_in_a_sentence_and_leaves_nothing(tmp_path):
    root, store = str(write_imdb(tmp_path)), tmp_path / "store"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, before[1]))
    try:
        with pytest.raises(RunFailed, match=r"cannot write imdb to .*store: File too large; free some space"):
            prepare(task("imdb"), root, store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(store) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailed, match=r"cannot write imdb to .*; free some space, or choose another folder"):
        prepare(task("imdb"), root, tmp_path / "file/store")
    assert prepare(task("imdb"), root, store).open("train")


def test_of_two_commands_at_once_one_reads_and_one_waits(tmp_path):
    root, store, log = str(write_listops(tmp_path)), tmp_path / "store", tmp_path / "reads"
    fork = multiprocessing.get_context("fork")
    ready, done = fork.Barrier(2), fork.Queue()

    def slow(task, lra_dir, split, counts):
        with log.open("a") as file:
            file.write(f"{split}\n")
        for example in sources.read(task, lra_dir, split, counts):
            signal.sigtimedwait([], 0.02)
            yield example

    def command():
        arrays.read = slow
        ready.wait()
        prepared = prepare(task("listops"), root, store)
        done.put((prepared.digest, items(prepared.open("train"))))

    processes = [fork.Process(target=command) for _ in range(2)]
    for process in processes:
        process.start()
    found = [done.get(timeout=30) for _ in processes]
    for process in processes:
        process.join()
    assert found[0] == found[1] and log.read_text().split() == list(SPLITS)
    assert names(store) == ["listops"]


def test_batches_are_padded_to_a_multiple_with_a_mask():
    rows = [np.arange(1, n + 1, dtype=np.uint8) for n in (3, 9, 255)]
    batch = collate([{"parts": (row,), "label": label} for label, row in enumerate(rows)])
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (3, 256)
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64} and batch["labels"].tolist() == [0, 1, 2]
    for ids, mask, row in zip(batch["input_ids"], batch["attention_mask"], rows):
        assert mask.sum() == mask[: len(row)].sum() == len(row)
        assert ids[: len(row)].tolist() == row.tolist() and not ids[len(row) :].any()
    assert collate([{"parts": (rows[1],), "label": 0}], pad_to_multiple_of=5)["input_ids"].shape == (1, 10)
    assert "attention_mask" not in collate([{"parts": (rows[1],), "label": 0}], pad_to_multiple_of=9)


def test_batches_of_pairs_have_two_rows_per_example():
    first, second = [np.full(4, n, np.uint8) for n in (1, 2, 3)], [np.full(n, n, np.uint8) for n in (7, 8, 9)]
    batch = collate([{"parts": pair, "label": 1} for pair in zip(first, second)])
    assert batch["input_ids"].shape == (3, 2, 16) and batch["labels"].tolist() == [1, 1, 1]
    assert batch["input_ids"][..., 0].tolist() == [[1, 7], [2, 8], [3, 9]]
    assert batch["attention_mask"].sum(-1).tolist() == [[4, 7], [4, 8], [4, 9]]


@needs_reference
def test_reference_samples_of_listops(tmp_path):
    prepared = prepare(task("listops", title="ListOps"), str(DATA / "lra"), tmp_path)
    assert prepared.summary() == "ListOps: 10 / 4 / 4 examples, mean length 1,116, longest 1,889"
    lines = (DATA / "lra/listops-1000/basic_train.tsv").read_text().splitlines()[1:]
    assert prepared.open("train").labels.tolist() == [int(line.split("\t")[1]) for line in lines]
    assert prepared.open("train").lengths.tolist() == [len(line.split("\t")[0].split()) // 3 + 1 for line in lines]
