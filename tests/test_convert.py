"""Conversion: token rows hold the source, and shards are the same whatever interrupts or shares the work."""

import errno
import gzip
import io
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import DATA, ROOT, assert_one_sentence, environment, needs_reference, run, sentences, write_jsonl
from streaming.base.format.mds import MDSReader
from tqdm import tqdm

from src.convert_dataset import main
from src.data import convert as conversion
from src.data import shards as shard_writer
from src.data.readers import read_batches
from src.data.tokenizers import vocabulary_digest
from src.errors import UserError

DOCUMENTS = ["", *sentences(900, seed=5), " \n", "the dog"]


def convert(*arguments: object) -> None:
    main([str(argument) for argument in arguments])


def samples(folder: Path) -> list[dict]:
    """Everything in a split's shards, in order."""
    shards = json.loads((folder / "index.json").read_text())["shards"]
    readers = [MDSReader.from_json(str(folder.parent), folder.name, shard) for shard in shards]
    return [reader[i] for reader in readers for i in range(len(reader))]


def summary(folder: Path) -> dict:
    return json.loads((folder / "split.json").read_text())


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "split.json"}


def documents(folder: Path) -> list[list[int]]:
    """The token ids of each document of a split in concatenated rows."""
    found: list[list[int]] = []
    for sample in samples(folder):
        row, begins = sample["tokens"].tolist(), sample["begins"].tolist()
        cuts = [1, *[begin for begin in begins if 1 < begin < len(row)], len(row)]
        segments = [row[begin:end] for begin, end in itertools.pairwise(cuts)]
        if begins[0] > 1:
            found[-1] += segments.pop(0)
        found += segments
    return [[token for token in ids if token != 3] for ids in found]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("source") / "a.jsonl", DOCUMENTS)


# Rows of tokens


def test_concatenated_rows_hold_every_document(source, tokenizer, tokenizer_folder, tmp_path):
    convert("--data_files", source, "--splits", "train", "--out_root", tmp_path, "--tokenizer", tokenizer_folder,
            "--concat_tokens", 32, "--size_limit", 6000)  # fmt: skip
    expected = [ids for ids in tokenizer(DOCUMENTS, add_special_tokens=False)["input_ids"] if ids]
    assert documents(tmp_path / "train") == expected
    rows = [sample["tokens"] for sample in samples(tmp_path / "train")]
    assert {len(row) for row in rows[:-1]} == {32} and {str(row.dtype) for row in rows} == {"uint8"}
    facts = summary(tmp_path / "train")
    assert facts["tokens"] == {
        "tokenizer": str(tokenizer_folder), "vocab_size": len(tokenizer), "digest": vocabulary_digest(tokenizer),
        "mode": "concat_tokens", "length": 32, "of_text": sum(map(len, expected)), "share_cut_off": 0,
    }  # fmt: skip
    assert (facts["documents"], facts["empty"], facts["samples"]) == (len(expected), 2, len(rows))
    assert facts["text_bytes"] == sum(len(text.encode()) for text in DOCUMENTS if text.strip())
    shards = list((tmp_path / "train").glob("*.mds"))
    assert facts["shards"] == len(shards) > 2
    assert facts["bytes"] == sum(path.stat().st_size for path in shards)


def test_one_row_per_document_is_truncated_and_counted(source, tokenizer, tokenizer_folder, tmp_path, caplog):
    with caplog.at_level("INFO", logger="lion"):
        convert(
            "--data_files",
            source,
            "--splits",
            "train_small",
            "--out_root",
            tmp_path,
            "--tokenizer",
            tokenizer_folder,
            "--max_seq_len",
            16,
        )
    rows = samples(tmp_path / "train_small")
    texts = [text for text in DOCUMENTS if text.strip()]
    assert [row["tokens"].tolist() for row in rows] == tokenizer(texts, truncation=True, max_length=16)["input_ids"]
    assert {tuple(row) for row in rows} == {("tokens",)}
    whole = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    share = sum(max(size - 14, 0) for size in whole) / sum(whole)
    assert summary(tmp_path / "train_small")["tokens"]["share_cut_off"] == pytest.approx(share)
    assert f"{share:.2%} of the tokens truncated" in caplog.text and f"{sum(whole):,} tokens" in caplog.text


def test_a_document_without_tokens_counts_as_empty(tokenizer_folder, tmp_path):
    data = write_jsonl(tmp_path / "a.jsonl", ["\x00\x01", "the dog", "\u200b"])
    for mode in ("--concat_tokens", "--max_seq_len"):
        convert(
            "--data_files",
            data,
            "--splits",
            "train",
            "--out_root",
            tmp_path / mode,
            "--tokenizer",
            tokenizer_folder,
            mode,
            8,
        )
        (row,) = samples(tmp_path / mode / "train")
        assert len(row["tokens"]) == 4
        facts = summary(tmp_path / mode / "train")
        assert (facts["documents"], facts["empty"]) == (1, 2)


@pytest.mark.parametrize("mode", ["--concat_tokens", "--max_seq_len", None])
def test_a_limit_is_kept_in_the_middle_of_a_batch(mode, tokenizer, tokenizer_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(conversion.SPLITS, "train_small", ("train", 7))
    options = ("--tokenizer", tokenizer_folder, mode, 32) if mode else ()
    source = write_jsonl(tmp_path / "a.jsonl", [*DOCUMENTS[:8], "", "", *(DOCUMENTS[8:] if mode else [])])
    convert("--data_files", source, "--splits", "train_small", "--out_root", tmp_path, *options)
    first = DOCUMENTS[1:8]  # and after the last one, nothing is counted
    facts = summary(tmp_path / "train_small")
    assert (facts["documents"], facts["empty"]) == (7, 1)
    if mode == "--concat_tokens":
        assert documents(tmp_path / "train_small") == tokenizer(first, add_special_tokens=False)["input_ids"]
    elif mode:
        assert [row["tokens"].tolist() for row in samples(tmp_path / "train_small")] == tokenizer(
            first, truncation=True, max_length=32
        )["input_ids"]
    else:
        assert [row["text"] for row in samples(tmp_path / "train_small")] == first


@needs_reference
def test_wikitext_is_recovered_from_both_modes(tmp_path):
    """The real vocabulary on real text: the rows hold the source as the tokenizer encodes and decodes it."""
    from transformers import BertTokenizerFast

    tokenizer = BertTokenizerFast(str(DATA / "bert-base-uncased" / "vocab.txt"), model_max_length=512)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    lines = [line for line in (DATA / "wikitext" / "valid.txt").read_text(encoding="utf-8").split("\n") if line.strip()]  # fmt: skip
    options = (
        "--data_files",
        DATA / "wikitext" / "valid.txt",
        "--splits",
        "train",
        "--tokenizer",
        tmp_path / "tokenizer",
    )
    convert(*options, "--concat_tokens", 128, "--out_root", tmp_path / "packed")
    convert(*options, "--max_seq_len", 128, "--out_root", tmp_path / "single")

    found = []
    for sample in samples(tmp_path / "packed" / "train"):
        row, begins = sample["tokens"].astype(int), sample["begins"]
        segments = [row[a:b] for a, b in zip([1, *begins], [*begins, len(row)]) if a < b]
        if begins[0] > 1:
            found[-1] = [*found[-1], *segments.pop(0)]
        found += segments
    decode = tokenizer.batch_decode
    bare = tokenizer(lines, add_special_tokens=False)["input_ids"]
    assert decode(found, skip_special_tokens=True) == decode(bare)
    assert {str(sample["tokens"].dtype) for sample in samples(tmp_path / "packed" / "train")} == {"uint16"}
    single = [sample["tokens"].tolist() for sample in samples(tmp_path / "single" / "train")]
    assert single == tokenizer(lines, truncation=True, max_length=128)["input_ids"]
    normal = "".join("".join(lines).split()).lower()
    packed = "".join("".join(decode(found, skip_special_tokens=True, clean_up_tokenization_spaces=False)).split())
    assert len(packed) == pytest.approx(len(normal), rel=0.02)  # accents are folded, and unknown characters omitted


MISTAKES = {
    "no length": (["--tokenizer", "x"], ["--tokenizer", "--concat_tokens", "--max_seq_len"]),
    "no tokenizer": (["--concat_tokens", "128"], ["--tokenizer"]),
    "no room": (["--tokenizer", "x", "--max_seq_len", "2"], ["(got 2)"]),
    "a shard too large": (["--size_limit", str(2**32)], ["--size_limit"]),
    "no worker": (["--num_workers", "0"], ["--num_workers"]),
    "a length of none": (["--tokenizer", "x", "--concat_tokens", "0"], ["(got 0)"]),
    "no such tokenizer": (["--tokenizer", "./none", "--max_seq_len", "8"], ["--tokenizer", "./none"]),
}


@pytest.mark.parametrize("options, words", MISTAKES.values(), ids=MISTAKES.keys())
def test_invalid_options_are_refused(options, words, source, tmp_path):
    with pytest.raises(UserError) as error:
        convert("--data_files", source, "--splits", "train", "--out_root", tmp_path / "out", *options)
    for word in words:
        assert word in str(error.value)
    assert not (tmp_path / "out").exists()


# Several processes


def test_the_shards_are_the_same_with_any_number_of_workers(tokenizer_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("src.data.readers.BATCH_BYTES", 4000)
    for name, part in (("a", DOCUMENTS[:400]), ("b", DOCUMENTS[400:410]), ("c", DOCUMENTS[410:])):
        write_jsonl(tmp_path / f"{name}.jsonl", part)
    results = []
    for workers in (1, 2, 3):
        out = tmp_path / f"out{workers}"
        convert(
            "--data_files",
            tmp_path / "*.jsonl",
            "--val_fraction",
            0.2,
            "--out_root",
            out,
            "--size_limit",
            9000,
            "--tokenizer",
            tokenizer_folder,
            "--concat_tokens",
            32,
            "--compression",
            "zstd",
            "--num_workers",
            workers,
        )
        results.append(
            [files(out / split) | {"": (out / split / "split.json").read_bytes()} for split in ("train", "val")]
        )
    assert results[0] == results[1] == results[2]
    assert len(results[0][0]) > 4


def test_an_error_in_a_worker_is_reported_as_in_a_single_process(tokenizer_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("src.data.readers.BATCH_BYTES", 4000)
    data = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    data.write_bytes(data.read_bytes() + b'{"text": "\xff"}\n')
    with pytest.raises(UserError, match=f"line {len(DOCUMENTS) + 1}: not valid UTF-8"):
        convert(
            "--data_files",
            data,
            "--splits",
            "train",
            "--out_root",
            tmp_path / "out",
            "--tokenizer",
            tokenizer_folder,
            "--max_seq_len",
            8,
            "--num_workers",
            2,
        )
    assert not (tmp_path / "out").exists()


# Interruptions


def killed(function: str, call: int, *arguments: object) -> bool:
    """Convert in a process that is killed at the n-th call of a function of shard_writer; return whether it was.

    The process is forked, since a new one spends seconds on imports.
    """
    child = os.fork()
    if child == 0:
        tqdm.set_lock(threading.RLock())  # its own, since a shared lock that a killed process holds is never released
        original, calls = getattr(shard_writer, function), itertools.count(1)

        def deadly(*args):
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args)

        setattr(shard_writer, function, deadly)
        try:
            convert(*arguments)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr("src.data.readers.BATCH_BYTES", 3000)


@pytest.fixture
def parts(tmp_path) -> Path:
    """Three files of different kinds, as a pattern."""
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS[:300])
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("".join(f"{text}\n" for text in DOCUMENTS[300:600]).encode()))
    write_jsonl(tmp_path / "c.jsonl", DOCUMENTS[600:])
    return tmp_path / "[abc].*"


@pytest.mark.parametrize("mode", ["--concat_tokens", "--max_seq_len", None])
def test_repeated_kills_give_the_same_bytes(mode, parts, tokenizer_folder, tmp_path, small_batches):
    draw = random.Random(str(mode))
    command = ["--data_files", parts, "--val_fraction", 0.3, "--size_limit", 4000, "--num_workers", 1]
    command += ["--tokenizer", tokenizer_folder, mode, 24] if mode else []
    convert(*command, "--out_root", tmp_path / "whole")
    out = tmp_path / "out"
    kills = 0
    while kills < 4:
        moment = draw.choice(["save_progress", "sync_to_disk", "sync_to_disk", "publish"])
        kills += killed(moment, draw.randint(1, 20) if moment != "publish" else 1, *command, "--out_root", out)
        done = [split for split in ("train", "val") if (out / split).exists()]
        for split in done:
            assert {**files(out / split), "progress.json": b""} == {
                **files(tmp_path / "whole" / split),
                "progress.json": b"",
            }
        if len(done) == 2:
            shutil.rmtree(out)
    convert(*command, "--out_root", out)
    for split in ("train", "val"):
        assert files(out / split) == files(tmp_path / "whole" / split)
        assert summary(out / split) == summary(tmp_path / "whole" / split)
    assert sorted(path.name for path in out.iterdir()) == ["train", "val"]


def test_it_resumes_after_the_last_shard_and_reads_only_the_rest(parts, tmp_path, small_batches, caplog, monkeypatch):
    command = ["--data_files", parts, "--splits", "train", "--size_limit", 4000]
    convert(*command, "--out_root", tmp_path / "whole")
    assert killed("save_progress", 14, *command, "--out_root", tmp_path / "out")
    read = []
    monkeypatch.setattr(
        "src.data.corpora.read_batches", lambda path, *rest: read.append(path.name) or read_batches(path, *rest)
    )
    with caplog.at_level("INFO", logger="lion"):
        convert(*command, "--out_root", tmp_path / "out")
    assert "resuming after 12 shards" in caplog.text
    assert read == ["b.txt.gz", "c.jsonl"]
    assert files(tmp_path / "out" / "train") == files(tmp_path / "whole" / "train")


CHANGES = {
    "an option": (["--size_limit", "5000"], "--size_limit"),
    "the tokenizer": (["--tokenizer", "TOKENIZER", "--max_seq_len", "8"], "--max_seq_len, --tokenizer"),
    "a file that was read": ([], r"a\.jsonl has changed since"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_different_command_or_input_does_not_resume(change, parts, tokenizer_folder, tmp_path, small_batches):
    out = tmp_path / "out"
    command = ["--data_files", parts, "--splits", "train", "--size_limit", 4000, "--out_root", out]
    assert killed("save_progress", 9, *command)
    before = files(out / ".train.unfinished")
    options, message = CHANGES[change]
    if not options:
        write_jsonl(tmp_path / "a.jsonl", DOCUMENTS[:299])
    command += [tokenizer_folder if option == "TOKENIZER" else option for option in options]
    with pytest.raises(UserError, match=f"{message}.*--overwrite"):
        convert(*command)
    assert files(out / ".train.unfinished") == before
    convert(*command, "--overwrite")
    assert summary(out / "train")["documents"] == len([t for t in DOCUMENTS if t.strip()]) - (not options)
    assert [path.name for path in out.iterdir()] == ["train"]


def test_unread_files_may_change(parts, tmp_path, small_batches):
    command = ["--data_files", parts, "--splits", "train", "--size_limit", 4000, "--out_root", tmp_path / "out"]
    good = (tmp_path / "c.jsonl").read_bytes()
    (tmp_path / "c.jsonl").write_bytes(b'{"text": \n')
    with pytest.raises(UserError, match=r"c\.jsonl, line 1"):
        convert(*command)
    (tmp_path / "c.jsonl").write_bytes(good)
    (tmp_path / "b.txt.gz").touch()
    with pytest.raises(UserError, match=r"b\.txt\.gz has changed since"):
        convert(*command)


def test_malformed_rows_may_be_skipped_when_it_resumes(parts, tmp_path, small_batches, caplog):
    command = ["--data_files", parts, "--splits", "train", "--size_limit", 4000]
    convert(*command, "--out_root", tmp_path / "whole")
    lines = (tmp_path / "c.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "c.jsonl").write_bytes(b"".join([*lines[:200], b'{"text": \n', *lines[200:]]))
    command += ["--out_root", tmp_path / "out"]
    with pytest.raises(UserError, match=r"c\.jsonl, line 201: not valid JSON .*; fix or remove the line, or skip"):
        convert(*command)
    with caplog.at_level("INFO", logger="lion"):
        convert(*command, "--malformed_rows", 1)
    assert "resuming after" in caplog.text and "c.jsonl: skipped 1 malformed row (line 201)" in caplog.text
    assert samples(tmp_path / "out" / "train") == samples(tmp_path / "whole" / "train")


def test_only_the_unfinished_split_resumes(parts, tmp_path, small_batches, caplog):
    out = tmp_path / "out"
    command = ["--data_files", parts, "--val_fraction", 0.5, "--size_limit", 4000, "--out_root", out]
    convert(*command, "--splits", "train")
    (out / "train" / "old").touch()
    assert killed("publish", 2, *command, "--overwrite")
    train = files(out / "train")
    assert "old" not in train and not (out / "val").exists()
    with caplog.at_level("INFO", logger="lion"):
        convert(*command, "--overwrite")
    assert "already written by the same command" in caplog.text
    assert files(out / "train") == train
    assert len(samples(out / "train")) + len(samples(out / "val")) == len([text for text in DOCUMENTS if text.strip()])


def test_a_finished_conversion_may_be_repeated(parts, tmp_path, small_batches, caplog):
    out = tmp_path / "out"
    command = ["--data_files", parts, "--splits", "train", "--size_limit", 4000, "--out_root", out]
    convert(*command)
    (out / "train" / "old").touch()
    with caplog.at_level("INFO", logger="lion"):
        convert(*command)
    assert "train: already written by the same command" in caplog.text and (out / "train" / "old").exists()
    with pytest.raises(UserError, match="train already exists"):
        convert(*command, "--compression", "zstd")
    convert(*command, "--overwrite")
    assert not (out / "train" / "old").exists()
    os.utime(tmp_path / "a.jsonl")  # it may have another text of the same length
    with pytest.raises(UserError, match="train already exists"):
        convert(*command)


def test_a_full_disk_is_reported_in_one_sentence_and_complete_shards_are_kept(
    parts, tmp_path, small_batches, monkeypatch
):
    command = ["--data_files", parts, "--splits", "train", "--size_limit", 4000]
    convert(*command, "--out_root", tmp_path / "whole")
    original, calls = shard_writer.sync_to_disk, itertools.count()

    def full(path):
        if next(calls) == 14:
            path.write_bytes(b"")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(path)

    with monkeypatch.context() as patch:
        patch.setattr(shard_writer, "sync_to_disk", full)
        with pytest.raises(UserError, match=r"cannot write .*out: No space left on device; free disk space"):
            convert(*command, "--out_root", tmp_path / "out")
    assert len(json.loads((tmp_path / "out" / ".train.unfinished" / "progress.json").read_text())["shards"]) == 4
    convert(*command, "--out_root", tmp_path / "out")
    assert files(tmp_path / "out" / "train") == files(tmp_path / "whole" / "train")


def test_an_unwritable_folder_is_named(parts, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--out_root: .*/file is not a directory; choose another folder"):
        convert("--data_files", parts, "--splits", "train", "--out_root", tmp_path / "file" / "out")


def test_two_processes_do_not_write_the_same_split(parts, tmp_path, small_batches):
    out = tmp_path / "out"
    command = ["--data_files", parts, "--splits", "train", "--size_limit", 4000, "--out_root", out]
    assert killed("save_progress", 9, *command)
    handle = shard_writer.lock(out / ".train.unfinished")
    for options in ([], ["--overwrite"], ["--overwrite", "--compression", "zstd"]):
        with pytest.raises(UserError, match="another process is writing it"):
            convert(*command, *options)
    os.close(handle)
    convert(*command)


def test_a_command_that_starts_a_moment_later_leaves_the_first_its_folder(parts, tmp_path, monkeypatch):
    command, held = ["--data_files", parts, "--splits", "train", "--out_root", tmp_path / "out"], []

    def planned(*given):  # by the second; meanwhile the first begins to write
        found = start_or_resume(*given)
        held.append(shard_writer.lock(tmp_path / "out/.train.unfinished"))
        return found

    start_or_resume = conversion.start_or_resume
    monkeypatch.setattr(conversion, "start_or_resume", planned)
    with pytest.raises(UserError, match="another process is writing it"):
        convert(*command)
    assert (tmp_path / "out/.train.unfinished").is_dir()
    os.close(*held)


def test_a_launcher_is_refused(parts, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(UserError, match="with python, not a launcher; machines share the work by --part"):
        convert("--data_files", parts, "--splits", "train", "--out_root", tmp_path / "out")


# The command itself, with workers


@pytest.fixture(scope="module")
def long_source(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("long") / "a.jsonl", [f"{text} " * 30 for text in sentences(800)])


def alive(group: int) -> bool:
    """Whether a process of the group still runs."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_a_killed_process_and_the_next_resumes(number, long_source, tokenizer_folder, tmp_path):
    out = tmp_path / "out"
    options = ["--data_files", long_source, "--splits", "train", "--tokenizer", tokenizer_folder]
    options += ["--concat_tokens", 128, "--size_limit", 20000]
    command = [sys.executable, ROOT / "src/convert_dataset.py", *map(str, options), "--out_root", out]
    command += ["--num_workers", "2"]
    # A real process: one of warm.py's would have its workers outside of its group.
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(list(out.rglob("*.mds"))) < 3:
        assert process.poll() is None and time.monotonic() < deadline, "no shards"
        time.sleep(0.01)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in stderr
    assert stderr.endswith("repeat the command to resume or restart it\n") == (number == signal.SIGINT)
    deadline = time.monotonic() + 30
    while alive(process.pid):
        assert time.monotonic() < deadline, "workers outlive the command"
        time.sleep(0.05)
    convert(*options, "--out_root", out, "--num_workers", 2)
    convert(*options, "--out_root", tmp_path / "whole", "--num_workers", 1)
    assert files(out / "train") == files(tmp_path / "whole" / "train")


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_standard_input_is_read(kind, tmp_path, monkeypatch, caplog):
    there = [text for text in DOCUMENTS if text.strip()]
    data = "".join((json.dumps({"text": text}) if kind == "jsonl" else text) + "\n" for text in there)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data.encode()))))
    with caplog.at_level("INFO", logger="lion"):
        convert("--data_files", "-", "--splits", "train", "--out_root", tmp_path)
    assert f"standard input: read as .{kind}; it cannot be read again" in caplog.text
    assert [row["text"] for row in samples(tmp_path / "train")] == there


def test_standard_input_gives_one_split(tmp_path):
    result = run(
        "src/convert_dataset.py",
        "--data_files",
        "-",
        "--val_fraction",
        "0.1",
        "--out_root",
        tmp_path / "out",
    )
    assert_one_sentence(result, "standard input", "one split")


# The Hub, simulated by a folder: datasets streams both the same way


FEATURES = (
    "dataset_info: {features: [{name: id, dtype: int64}, {name: text, dtype: string}]}"  # datasets then reads tables
)


@pytest.fixture(params=["", FEATURES], ids=["rows", "tables"])
def dataset(request, tmp_path) -> Path:
    folder = tmp_path / "dataset"
    folder.mkdir()
    (folder / "README.md").write_text(f"---\n{request.param}\n---\n")
    for number in range(3):
        lines = [json.dumps({"id": 1, "text": text or None}) + "\n" for text in DOCUMENTS[number:450:3]]
        (folder / f"train-{number}.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    return folder


def test_a_streamed_dataset_resumes(dataset, tokenizer_folder, tmp_path, small_batches, monkeypatch):
    """Kill the conversion after every other shard; a batch fills several."""
    monkeypatch.setattr("src.data.corpora.RECORDS", 70)
    command = ["--dataset", dataset, "--val_fraction", 0.2, "--size_limit", 1000, "--num_workers", 1,
               "--tokenizer", tokenizer_folder, "--concat_tokens", 24]  # fmt: skip
    convert(*command, "--out_root", tmp_path / "whole")
    found = documents(tmp_path / "whole" / "train") + documents(tmp_path / "whole" / "val")
    assert len(found) == len([text for text in DOCUMENTS[:450] if text.strip()])
    kills = 0
    while killed("save_progress", 3 if kills else 4, *command, "--out_root", tmp_path / "out"):
        kills += 1
    assert kills > 8
    for split in ("train", "val"):
        assert files(tmp_path / "out" / split) == files(tmp_path / "whole" / split)


def test_the_progress_bar_of_a_small_split_ends_at_its_limit(dataset, tmp_path, monkeypatch):
    totals, progress = [], conversion.progress
    monkeypatch.setitem(conversion.SPLITS, "train_small", ("train", 7))
    monkeypatch.setattr(
        conversion, "progress", lambda **options: totals.append(options["total"]) or progress(**options)
    )
    convert("--dataset", dataset, "--splits", "train_small", "--out_root", tmp_path / "out")
    assert totals == [7]


@pytest.mark.parametrize(
    "options, words",
    [
        (["--text_column", "body"], "no column body .*id, text"),
        (["--text_column", "id"], "column 'id' holds int, not text"),
        (["--splits", "val"], "validation"),
    ],
)
def test_a_missing_column_or_split_of_a_dataset_is_named(options, words, dataset, tmp_path):
    with pytest.raises(UserError, match=words):
        convert("--dataset", dataset, "--splits", "train", "--out_root", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()
