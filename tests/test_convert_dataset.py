"""Texts → shards: every text once and unchanged, splits by the text alone, no incomplete split under its name."""

import json
import os
import random
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import warm
from conftest import assert_one_sentence, run, sentences, snapshot, write_jsonl
from streaming.base.format.mds import MDSReader

from src.convert_dataset import main
from src.data.convert import SPLITS, is_validation
from src.errors import UserError

TEXTS = ["Grüße, 世界 🙂", 'tab\tand "quotes" and \\ backslash', " spaces around ", *sentences(40)]


def convert(*arguments: object) -> None:
    main([str(argument) for argument in arguments])


def read(folder: Path) -> list[str]:
    """The texts of a split, in order, as stored in its shards."""
    index = json.loads((folder / "index.json").read_text())
    readers = [MDSReader.from_json(str(folder.parent), folder.name, shard) for shard in index["shards"]]
    for reader in readers:
        reader.validate(allow_unsafe_types=False)
    return [reader[i]["text"] for reader in readers for i in range(len(reader))]


def write_source(folder: Path, ending: str, texts: list[str], column: str = "text") -> Path:
    path = folder / f"data{ending}"
    if ending == ".jsonl":
        return write_jsonl(path, texts, column)
    if ending == ".txt":
        path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    else:
        pq.write_table(pa.table({"id": list(range(len(texts))), column: texts}), path, row_group_size=7)
    return path


@pytest.mark.parametrize("ending", [".jsonl", ".txt", ".parquet"])
def test_the_shards_hold_the_source_text_by_text(tmp_path, ending):
    convert("--data_files", write_source(tmp_path, ending, TEXTS), "--splits", "train", "--out_root", tmp_path / "out")
    assert read(tmp_path / "out" / "train") == TEXTS
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train"]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_the_text_may_be_in_another_column(tmp_path, ending):
    source = write_source(tmp_path, ending, TEXTS, column="content")
    convert("--data_files", source, "--text_column", "content", "--splits", "train", "--out_root", tmp_path / "out")
    assert read(tmp_path / "out" / "train") == TEXTS


def test_windows_line_ends_and_an_unterminated_last_line_are_read(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\r\nthree")
    convert("--data_files", tmp_path / "a.txt", "--splits", "train", "--out_root", tmp_path / "out")
    assert read(tmp_path / "out" / "train") == ["one", "two", "three"]


def test_several_patterns_and_small_shards(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", TEXTS[20:])
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:20])
    (tmp_path / "c.txt").write_text("last one\n")
    convert(
        "--data_files",
        tmp_path / "*.jsonl",
        tmp_path / "c.txt",
        "--splits",
        "train",
        "--out_root",
        tmp_path / "out",
        "--size_limit",
        2000,
    )
    assert read(tmp_path / "out" / "train") == [*TEXTS, "last one"]
    assert len(list((tmp_path / "out" / "train").glob("*.mds"))) > 1


def test_compressed_shards_are_read_back_by_training(tmp_path, tokenizer):
    from src.data.config import DatasetConfig
    from src.data.streaming import build_dataset

    convert(
        "--data_files",
        write_jsonl(tmp_path / "a.jsonl", TEXTS),
        "--splits",
        "train",
        "--out_root",
        tmp_path / "out",
        "--compression",
        "zstd",
    )
    assert list((tmp_path / "out" / "train").glob("*.mds.zstd"))
    dataset = build_dataset(DatasetConfig(local=str(tmp_path / "out"), remote=None, split="train", seed=1), 1)
    assert sorted(dataset[i]["text"] for i in range(len(dataset))) == sorted(TEXTS)


# Splits


def test_val_fraction_splits_the_texts_without_overlap_or_loss_in_any_order(tmp_path):
    shuffled = random.Random(1).sample(TEXTS, len(TEXTS))
    splits = []
    for name, parts in (("one", [TEXTS]), ("two", [shuffled[:9], shuffled[9:]])):
        (tmp_path / name).mkdir()
        for number, part in enumerate(parts):
            write_jsonl(tmp_path / name / f"{number}.jsonl", part)
        convert(
            "--data_files", tmp_path / name / "*.jsonl", "--val_fraction", 0.3, "--out_root", tmp_path / name / "out"
        )
        splits.append([set(read(tmp_path / name / "out" / split)) for split in ("train", "val")])
    (train, val), other = splits
    assert not train & val
    assert train | val == set(TEXTS)
    assert len(val) > 2
    assert other == [train, val]


def test_a_val_fraction_that_leaves_a_split_empty_is_an_error_with_a_fix(tmp_path):
    command = ["--data_files", write_jsonl(tmp_path / "a.jsonl", TEXTS), "--out_root", tmp_path / "out"]
    with pytest.raises(
        UserError, match=f"^val: none of the {len(TEXTS)} .* raise --val_fraction 1e-05, and give --overwrite"
    ):
        convert(*command, "--val_fraction", 0.00001)
    convert(*command, "--val_fraction", 0.3, "--overwrite")
    assert len(read(tmp_path / "out" / "train")) + len(read(tmp_path / "out" / "val")) == len(TEXTS)


@pytest.mark.parametrize("fraction", [0.02, 0.5])
def test_val_fraction_is_the_fraction_of_val(fraction):
    texts = [f"text {i}" for i in range(20_000)]
    assert sum(is_validation(text, fraction) for text in texts) / len(texts) == pytest.approx(fraction, abs=0.01)


def test_a_larger_val_fraction_keeps_what_a_smaller_one_chose():
    small = {text for text in TEXTS if is_validation(text, 0.2)}
    assert small < {text for text in TEXTS if is_validation(text, 0.8)}


def test_a_small_split_holds_the_first_documents_up_to_its_limit(tmp_path, monkeypatch):
    monkeypatch.setitem(SPLITS, "train_small", ("train", 5))
    texts = ["", *TEXTS]
    convert(
        "--data_files",
        write_jsonl(tmp_path / "a.jsonl", texts),
        "--splits",
        "train_small",
        "--out_root",
        tmp_path / "out",
    )
    assert read(tmp_path / "out" / "train_small") == TEXTS[:5]


def test_the_names_of_splits_and_their_limits():
    assert SPLITS == {
        "train": ("train", None),
        "train_small": ("train", 100_000),
        "val": ("validation", None),
        "val_small": ("validation", 10_000),
    }


def test_empty_documents_are_skipped_and_counted(tmp_path, caplog):
    write_jsonl(tmp_path / "a.jsonl", ["one", "", "  \n ", "two", ""])
    with caplog.at_level("INFO", logger="lion"):
        convert("--data_files", tmp_path / "a.jsonl", "--splits", "train", "--out_root", tmp_path / "out")
    assert read(tmp_path / "out" / "train") == ["one", "two"]
    assert "2 documents, 3 empty ones skipped, 0.0 MB of text (3 bytes per document)" in caplog.text


# An existing split


def test_an_existing_split_is_refused_before_anything_is_written(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    out = tmp_path / "out"
    convert("--data_files", source, "--val_fraction", 0.3, "--splits", "val", "--out_root", out)
    files = snapshot(out)
    with pytest.raises(UserError, match=r"out/val already exists.*--overwrite"):
        convert("--data_files", source, "--val_fraction", 0.4, "--splits", "train", "val", "--out_root", out)
    assert snapshot(out) == files


def test_overwrite_replaces_a_split_and_leaves_the_other(tmp_path):
    out = tmp_path / "out"
    first, second = write_jsonl(tmp_path / "a.jsonl", TEXTS), write_jsonl(tmp_path / "b.jsonl", ["new one"])
    convert("--data_files", first, "--val_fraction", 0.3, "--out_root", out, "--size_limit", 2000)
    val = snapshot(out / "val")
    convert("--data_files", second, "--splits", "train", "--out_root", out, "--overwrite")
    assert read(out / "train") == ["new one"]
    assert {path.name for path in (out / "train").iterdir()} == {"index.json", "shard.00000.mds", "split.json"}
    assert snapshot(out / "val") == val


def test_a_failed_overwrite_leaves_the_old_split(tmp_path):
    out = tmp_path / "out"
    convert("--data_files", write_jsonl(tmp_path / "a.jsonl", TEXTS), "--splits", "train", "--out_root", out)
    files = snapshot(out / "train")
    (tmp_path / "b.jsonl").write_text('{"text": "good"}\n{"text"\n')
    with pytest.raises(UserError, match="line 2"):
        convert("--data_files", tmp_path / "b.jsonl", "--splits", "train", "--out_root", out, "--overwrite")
    assert snapshot(out / "train") == files


# Unreadable input


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "one"}\n{"text": "\xff"}\n', ["a.jsonl, line 2", "UTF-8"]),
        ("a.txt", b"one\ntwo\n\xe9t\xe9\n", ["a.txt, line 3", "UTF-8"]),
        ("a.jsonl", b'{"text": "one"}\n\n{"text": \n', ["a.jsonl, line 3", "JSON"]),
        ("a.jsonl", b'{"text": "one"}\n{"body": "two", "id": 3}\n', ["a.jsonl, line 2", "no text", "body, id", "--text_column"]),
        ("a.jsonl", b'{"text": 7}\n', ["a.jsonl, line 1", "'text'"]),
        ("a.jsonl", b'"just a text"\n', ["a.jsonl, line 1", "not a JSON object"]),
        ("a.jsonl", b'{"text": "half of a pair: \\ud83d"}\n', ["a.jsonl, line 1"]),
        ("a.jsonl", b'{"text": ""}\n\n', ["train", "no document has text"]),
        ("a.txt", b"", ["train", "no document has text"]),
        ("a.parquet", b"PAR1 this is none PAR1", ["a.parquet", "Parquet"]),
        ("a.parquet", b"", ["a.parquet", "Parquet"]),
        ("a.xml", b"<text>one</text>\n", ["a.xml", ".xml", ".jsonl"]),
        ("a", b"one\n", ["without an extension"]),
    ],
    ids=["jsonl bytes", "txt bytes", "json", "column", "number", "not an object", "surrogate", "all empty", "empty file", "parquet", "empty parquet", "extension", "no extension"],
)  # fmt: skip
def test_unreadable_input_is_reported_with_file_and_line(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        convert("--data_files", tmp_path / name, "--splits", "train", "--out_root", tmp_path / "out")
    for word in words:
        assert word in str(error.value)
    assert not (tmp_path / "out" / "train").exists()


def test_a_broken_link_is_named(tmp_path):
    (tmp_path / "a.jsonl").symlink_to("lost.jsonl")
    with pytest.raises(UserError, match=r"a\.jsonl: cannot be read \(No such file"):
        convert("--data_files", tmp_path / "*.jsonl", "--splits", "train", "--out_root", tmp_path / "out")


def test_a_corrupt_parquet_file_is_named(tmp_path):
    """The footer is valid, so the error shows only when rows are read."""
    path = write_source(tmp_path, ".parquet", TEXTS)
    content = bytearray(path.read_bytes())
    content[4:200] = b"\xff" * 196
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"data\.parquet"):
        convert("--data_files", path, "--splits", "train", "--out_root", tmp_path / "out")


def test_a_parquet_column_of_numbers_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [1, 2, 3]}), path)
    with pytest.raises(UserError, match=r"a\.parquet"):
        convert("--data_files", path, "--splits", "train", "--out_root", tmp_path / "out")


def test_a_parquet_file_without_the_column_lists_those_it_has(tmp_path):
    path = write_source(tmp_path, ".parquet", TEXTS, column="content")
    with pytest.raises(UserError, match=r"data\.parquet: no column text \(its columns are id, content\)"):
        convert("--data_files", path, "--splits", "train", "--out_root", tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data_files", "nothing-*.jsonl", "--splits", "train"], "nothing matches nothing-*.jsonl"),
        (["--data_files", "nothing-*.jsonl"], "nothing matches nothing-*.jsonl"),  # before it asks for a fraction
        (["--data_files", "a.jsonl"], "--val_fraction"),
        (["--data_files", ".", "--splits", "train"], "--data_files: . is a folder; give its files, as in './*.jsonl'"),
        (["--data_files", "a.jsonl", "--val_fraction", "1.5"], "between 0 and 1"),
        (["--data_files", "a.jsonl", "--val_fraction", "nan"], "between 0 and 1"),
        (["--data_files", "a.jsonl", "--splits", "train", "--data_subset", "en"], "--data_subset"),
        (["--data_files", "a.jsonl", "--splits", "train", "--stdin_format", "txt"], "--stdin_format"),
        (["--data_files", "a.jsonl", "--splits", "train", "--one_document_per_file"], "--one_document_per_file"),
        (["--dataset", "a/b", "--one_document_per_file"], "--one_document_per_file"),
        (["--dataset", "a/b", "--stdin_format", "txt"], "--stdin_format"),
    ],
)
def test_invalid_arguments_are_refused(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(UserError) as error:
        convert(*arguments, "--out_root", "out")
    assert words in str(error.value)
    assert not (tmp_path / "out").exists()


def test_files_for_validation_become_their_split(tmp_path):
    for split, texts in (("train", TEXTS), ("val", TEXTS[:2])):
        write_jsonl(tmp_path / f"{split}.jsonl", texts)
        convert("--data_files", tmp_path / f"{split}.jsonl", "--splits", split, "--out_root", tmp_path / "out")
    samples = [json.loads((tmp_path / "out" / s / "split.json").read_text())["samples"] for s in ("train", "val")]
    assert samples == [len([text for text in TEXTS if text.strip()]), len([text for text in TEXTS[:2] if text.strip()])]
    with pytest.raises(UserError, match=r"out/train already holds these files; give others, delete it, or divide them"):
        convert("--data_files", tmp_path / "train.jsonl", "--splits", "val_small", "--out_root", tmp_path / "out")


def test_the_help_holds_the_recipes(capsys):
    with pytest.raises(SystemExit):
        convert("--help")
    assert "python src/convert_dataset.py --merge --out_root ./my-texts" in capsys.readouterr().out


def test_out_root_cannot_be_a_file(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(UserError, match=r"--out_root: .*a\.jsonl is not a directory"):
        convert("--data_files", source, "--splits", "train", "--out_root", source)


def test_an_unreachable_hub_is_reported_in_one_sentence(tmp_path):
    result = run(
        "src/convert_dataset.py",
        "--dataset",
        "allenai/c4",
        "--data_subset",
        "en",
        "--splits",
        "val",
        "--out_root",
        tmp_path / "out",
        timeout=60,
    )
    assert_one_sentence(result, "--dataset", "allenai/c4", "validation", "Hub", "--data_files")
    assert not (tmp_path / "out" / "val").exists()


# A kill


def test_a_killed_conversion_leaves_no_finished_split_and_the_next_one_completes_it(tmp_path):
    out = tmp_path / "out"
    pipe = tmp_path / "endless.jsonl"  # fed until the kill
    os.mkfifo(pipe)
    arguments = ["--data_files", pipe, "--splits", "train", "--out_root", out, "--size_limit", "2000"]
    process = warm.start("src/convert_dataset.py", *arguments, output=tmp_path / "output")
    handle = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    line = (json.dumps({"text": "unfinished " * 20}) + "\n").encode()
    deadline = time.monotonic() + 60
    try:
        while len(list(out.rglob("*.mds"))) < 3:
            assert process.is_alive(), "the conversion ended by itself"
            assert time.monotonic() < deadline, "no shard within 60 s"
            try:
                os.write(handle, line)
            except BlockingIOError:
                time.sleep(0.01)
    finally:
        process.kill()
        process.join()
        os.close(handle)
    assert not (out / "train").exists()
    assert not list(out.rglob("index.json"))
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    convert("--data_files", source, "--splits", "train", "--out_root", out)  # without --overwrite
    assert read(out / "train") == TEXTS
    assert [path.name for path in out.iterdir()] == ["train"]
