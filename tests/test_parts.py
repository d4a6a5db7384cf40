"""Parts: however many machines convert a source, the joined split holds the samples of one machine's."""

import gzip
import itertools
import json
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, assert_one_sentence, run, sentences, snapshot, write_jsonl
from test_convert import convert, documents, files, killed, samples, summary
from test_streaming import config

from src.data import corpora
from src.data.parts import Part
from src.data.streaming import build, build_dataset
from src.errors import UserError

DOCUMENTS = ["", *sentences(300, seed=8), " \n", "the dog"]


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    monkeypatch.setattr("src.data.readers.BATCH_BYTES", 900)
    monkeypatch.setattr("src.data.corpora.UNIT_BYTES", 2500)
    monkeypatch.setattr("src.data.corpora.RECORDS", 20)


@pytest.fixture
def source(tmp_path) -> Path:
    """Files of different sizes and kinds, as a pattern: ten units, and an empty file."""
    cuts = [0, 8, 9, 10, 60, 61, 90, 130, 131, 131, 180, 205, 240, 270, 300, len(DOCUMENTS)]
    for number, (start, end) in enumerate(itertools.pairwise(cuts)):
        path = write_jsonl(tmp_path / f"{number:02}.jsonl", DOCUMENTS[start:end])
        if number % 4 == 3:
            (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    return tmp_path / "*.jsonl*"


@pytest.fixture
def dataset(tmp_path) -> Path:
    folder = tmp_path / "dataset"
    folder.mkdir()
    for number in range(3):
        write_jsonl(folder / f"train-{number}.jsonl", [text or None for text in DOCUMENTS[number::3]])
    return folder


def write_parts(of: int, out: Path, *command: object) -> None:
    for number in range(of, 0, -1):  # in any order
        convert(*command, "--out_root", out, "--part", f"{number}/{of}")


def merge(out: Path, *splits: str) -> None:
    convert("--merge", "--out_root", out, *(("--splits", *splits) if splits else ()))


def rows(folder: Path) -> list[tuple]:
    return [tuple(bytes(value) if name != "text" else value for name, value in row.items()) for row in samples(folder)]


def without_sizes(facts: dict) -> dict:
    command = {name: value for name, value in facts["command"].items() if name != "times"}  # of this machine's files
    kept = {name: value for name, value in facts.items() if name not in ("shards", "bytes", "parts")}
    return kept | {"command": command}


@pytest.mark.parametrize("mode", ["--concat_tokens", "--max_seq_len", None])
@pytest.mark.parametrize("kind", ["files", "dataset"])
def test_any_number_of_parts_gives_the_samples_of_one_machine(mode, kind, request, tokenizer_folder, tmp_path):
    read = request.getfixturevalue("source" if kind == "files" else "dataset")
    command = ["--data_files" if kind == "files" else "--dataset", read, "--val_fraction", 0.2, "--size_limit", 2000]
    command += ["--num_workers", 1]
    command += ["--tokenizer", tokenizer_folder, mode, 24] if mode else []
    convert(*command, "--out_root", tmp_path / "whole")
    whole = {split: rows(tmp_path / "whole" / split) for split in ("train", "val")}
    assert all(len(found) > 20 for found in whole.values())
    for of in (1, 2, 3, 14):  # 14: some are empty
        out = tmp_path / f"of-{of}"
        write_parts(of, out, *command)
        merge(out)
        for split, expected in whole.items():
            assert rows(out / split) == expected
            assert without_sizes(summary(out / split)) == without_sizes(summary(tmp_path / "whole" / split))
            assert summary(out / split)["parts"] == of
            sizes = [path.stat().st_size for path in (out / split).glob("*/*.mds")]
            assert (summary(out / split)["shards"], summary(out / split)["bytes"]) == (len(sizes), sum(sizes))


def test_concatenated_rows_of_units_hold_every_document(source, tokenizer, tokenizer_folder, tmp_path):
    command = ["--data_files", source, "--splits", "train", "--tokenizer", tokenizer_folder, "--concat_tokens", 24]
    write_parts(3, tmp_path / "out", *command)
    merge(tmp_path / "out", "train")
    assert documents(tmp_path / "out" / "train") == [
        ids for ids in tokenizer(DOCUMENTS, add_special_tokens=False)["input_ids"] if ids
    ]


def test_parts_share_the_bytes_and_omit_no_unit():
    sizes = [5, 0, 80, 1, 1, 0, 40, 40, 40, 30, 0]
    for of in range(1, 30):
        units = [list(Part(number, of).units(sizes)) for number in range(1, of + 1)]
        assert [*itertools.chain(*units)] == list(range(len(sizes)))
    assert [sum(sizes[i] for i in Part(number, 3).units(sizes)) for number in (1, 2, 3)] == [85, 82, 70]
    assert list(Part(1, 2).units([])) == []


def test_the_loader_reads_joined_parts_here_and_from_a_remote(source, tokenizer_folder, tokenizer, tmp_path):
    out = tmp_path / "out"
    write_parts(3, out, "--data_files", source, "--splits", "train", "--size_limit", 3000,
                "--tokenizer", tokenizer_folder, "--concat_tokens", 24)  # fmt: skip
    with pytest.raises(
        UserError, match=r"data_local: \S+train holds parts .*--merge --splits train --out_root \S+out`"
    ):
        build_dataset(config(out).dataset, 5)
    merge(out, "train")
    expected = rows(out / "train")
    for place in ({}, {"local": str(tmp_path / "cache"), "remote": str(out)}):
        loader = build(config(out, **place), tokenizer, 5, train=False)
        found = [loader.dataset[i] for i in range(loader.dataset.size)]
        assert [(bytes(row["begins"]), bytes(row["tokens"])) for row in found] == expected


@pytest.mark.parametrize("mode", ["--concat_tokens", None])
def test_a_killed_part_resumes_with_the_same_bytes(mode, source, tokenizer_folder, tmp_path):
    command = ["--data_files", source, "--splits", "train", "--size_limit", 450, "--num_workers", 1, "--part", "2/3"]
    command += ["--tokenizer", tokenizer_folder, mode, 24] if mode else []
    convert(*command, "--out_root", tmp_path / "whole")
    kills = 0
    while killed("save_progress", 4, *command, "--out_root", tmp_path / "out"):
        kills += 1
        assert not (tmp_path / "out" / "train" / "part-2-of-3").exists()
    assert kills > 2
    assert files(tmp_path / "out" / "train" / "part-2-of-3") == files(tmp_path / "whole" / "train" / "part-2-of-3")
    assert [path.name for path in (tmp_path / "out" / "train").iterdir()] == ["part-2-of-3"]


def test_a_conversion_of_an_earlier_version_resumes(dataset, tmp_path):
    """Its positions in a dataset have no unit, and mean the whole split."""
    command = ["--dataset", dataset, "--splits", "train", "--size_limit", 900]
    convert(*command, "--out_root", tmp_path / "whole")
    assert killed("save_progress", 6, *command, "--out_root", tmp_path / "out")
    path = tmp_path / "out" / ".train.unfinished" / "progress.json"
    progress = json.loads(path.read_text())
    assert progress["shards"] and progress["state"]["place"][2] == 0
    progress["state"] |= {name: progress["state"][name][:2] for name in ("place", "last")}
    path.write_text(json.dumps(progress))
    assert killed("save_progress", 8, *command, "--out_root", tmp_path / "out")
    assert len(json.loads(path.read_text())["state"]["place"]) == 2
    convert(*command, "--out_root", tmp_path / "out")
    assert files(tmp_path / "out" / "train") == files(tmp_path / "whole" / "train")


def test_repeated_commands_write_nothing(source, tmp_path, caplog):
    command = ["--data_files", source, "--val_fraction", 0.3]
    write_parts(2, tmp_path / "out", *command)
    merge(tmp_path / "out")
    before = snapshot(tmp_path / "out")
    with caplog.at_level("INFO", logger="lion"):
        write_parts(2, tmp_path / "out", *command)
        merge(tmp_path / "out")
    assert snapshot(tmp_path / "out") == before
    assert caplog.text.count("already written by the same command") == 4 and caplog.text.count("already merged") == 2


def test_an_interrupted_merge_is_repeated(source, tmp_path, monkeypatch):
    write_parts(2, tmp_path / "out", "--data_files", source, "--splits", "train")
    split = tmp_path / "out" / "train"

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("src.data.merge.write_atomically", full)
        with pytest.raises(UserError, match=r"cannot write .*train: No space left on device"):
            merge(tmp_path / "out", "train")
    assert not (split / "index.json").exists()
    merge(tmp_path / "out", "train")
    assert len(rows(split)) == summary(split)["documents"]


REFUSED = {
    "other options": (["--part", "1/3", "--size_limit", 5000], r"different options \(--size_limit\); repeat that"),
    "another number": (["--part", "1/4"], "--part 1/4: .*train holds parts of 3, not 4"),
    "the whole": ([], "train already exists"),
    "a changed source": (["--part", "1/3"], r"different options \(the files\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_of_another_conversion_is_refused(case, source, tmp_path):
    command = ["--data_files", source, "--splits", "train", "--size_limit", 2000, "--out_root", tmp_path / "out"]
    convert(*command, "--part", "2/3")
    options, message = REFUSED[case]
    if case == "a changed source":
        write_jsonl(tmp_path / "12.jsonl", ["another"])
    before = snapshot(tmp_path / "out")
    with pytest.raises(UserError, match=message):
        convert(*command, *options)
    assert snapshot(tmp_path / "out") == before
    assert [path.name for path in (tmp_path / "out" / "train").iterdir()] == ["part-2-of-3"]


def test_an_unfinished_part_of_other_options_is_refused_too(source, tmp_path):
    command = ["--data_files", source, "--splits", "train", "--out_root", tmp_path / "out", "--size_limit"]
    assert killed("save_progress", 5, *command, 700, "--part", "2/3")
    for number in (1, 2):
        with pytest.raises(UserError, match=r"different options \(--size_limit\)"):
            convert(*command, 800, "--part", f"{number}/3")
    convert(*command, 800, "--part", "2/3", "--overwrite")


def test_parts_of_a_dataset_that_changes_are_completed_at_the_commit_of_the_first(dataset, tmp_path, monkeypatch):
    build = corpora._builder.__wrapped__

    def of_hub(name, subset, revision):
        builder = build(str(dataset), subset, None)
        builder.hash = revision or latest
        return builder

    monkeypatch.setattr(corpora, "_builder", of_hub)
    command = ["--dataset", "org/texts", "--splits", "train", "--out_root", tmp_path / "out"]
    latest = "c0ffee"
    convert(*command, "--part", "1/2")
    latest = "decade"
    with pytest.raises(UserError, match=r"another commit of org/texts \(give --revision c0ffee\); repeat that command"):
        convert(*command, "--part", "2/2")
    convert(*command, "--part", "2/2", "--revision", "c0ffee")
    merge(tmp_path / "out", "train")
    assert summary(tmp_path / "out" / "train")["source"]["revision"] == "c0ffee"


def test_a_revision_is_of_a_dataset_on_the_hub(dataset, source, tmp_path):
    for given in (["--dataset", dataset], ["--data_files", source]):
        with pytest.raises(UserError, match=r"^--revision requires --dataset with a name on the Hub; omit it$"):
            convert(*given, "--revision", "main", "--splits", "train", "--out_root", tmp_path / "out")


@pytest.mark.parametrize("saves", range(2, 12, 3))
def test_rows_that_an_earlier_version_wrote_across_units_are_not_repeated(
    saves, source, tokenizer_folder, tmp_path, monkeypatch
):
    command = ["--data_files", source, "--splits", "train", "--tokenizer", tokenizer_folder, "--concat_tokens", 24,
               "--num_workers", 1, "--size_limit", 1000]  # fmt: skip
    convert(*command, "--out_root", tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr("src.data.corpora.UNIT_BYTES", 1 << 24)
        patch.setattr("src.data.readers.BATCH_BYTES", 4000)
        assert killed("save_progress", saves, *command, "--out_root", tmp_path / "out")
    convert(*command, "--out_root", tmp_path / "out")
    assert documents(tmp_path / "out" / "train") == documents(tmp_path / "whole" / "train")


def test_a_part_beside_a_whole_split_is_refused(source, tmp_path):
    command = ["--data_files", source, "--splits", "train", "--out_root", tmp_path / "out"]
    convert(*command)
    with pytest.raises(UserError, match=r"train is converted as a whole, not in parts; choose another --out_root"):
        convert(*command, "--part", "1/3")
    with pytest.raises(UserError, match=r"train has no parts; write them with --part I/N"):
        merge(tmp_path / "out", "train")


def damaged(out: Path, damage: str, source: Path) -> None:
    """Spoil the five parts of a split."""
    part = f"{out}/train/part-{{}}-of-5".format
    if damage == "missing":
        shutil.rmtree(part(2))
        Path(part(4)).rename(out / "train" / ".part-4-of-5.unfinished")
        shutil.rmtree(part(5))
    elif damage == "truncated":
        shard = next(Path(part(3)).glob("*.mds"))
        shard.write_bytes(shard.read_bytes()[:-10])
    elif damage == "corrupt":
        Path(part(3), "split.json").write_text("{")
    elif damage == "another":
        shutil.rmtree(part(3))
        convert("--data_files", source, "--splits", "train", "--out_root", out / "x", "--part", "3/5",
                "--compression", "zstd")  # fmt: skip
        Path(out, "x", "train", "part-3-of-5").rename(part(3))
    elif damage == "two numbers":
        Path(part(5)).rename(out / "train" / "part-5-of-6")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", "of the 5 parts of .*train, these are missing or unfinished: 2,4-5; repeat .*--part I/5"),
        ("truncated", "part-3-of-5 has .* of its .* bytes of shards; copy it again"),
        ("corrupt", "part-3-of-5: index.json or split.json is missing or corrupt; copy the part again"),
        ("another", r"part-3-of-5 was converted with different options \(--compression\) than part-1-of-5; delete"),
        ("two numbers", "holds parts of 5 and of 6; delete"),
    ],
)
def test_a_merge_names_what_is_wrong(damage, message, source, tmp_path):
    out = tmp_path / "out"
    write_parts(5, out, "--data_files", source, "--splits", "train")
    damaged(out, damage, source)
    before = snapshot(out)
    with pytest.raises(UserError, match=message):
        merge(out, "train")
    assert snapshot(out) == before


def test_indexes_alone_are_joined(source, tmp_path, caplog):
    """As when the shards stay in an object store, and only the .json files are copied."""
    write_parts(3, tmp_path / "out", "--data_files", source, "--splits", "train")
    shutil.copytree(tmp_path / "out", tmp_path / "copy", ignore=shutil.ignore_patterns("*.mds"))
    merge(tmp_path / "out", "train")
    with caplog.at_level("INFO", logger="lion"):
        merge(tmp_path / "copy", "train")
    assert "no shards, as in a copy of the .json files alone" in caplog.text
    for name in ("index.json", "split.json"):
        assert (tmp_path / "copy/train" / name).read_bytes() == (tmp_path / "out/train" / name).read_bytes()


@pytest.mark.parametrize(
    ("texts", "options", "words"),
    [
        (["", " "], ["train"], "train: no document has text; check the source and --text_column"),
        (["a", "b"], ["val", "--val_fraction", 1e-5], "val: none of the 2 documents .*; raise --val_fraction 1e-05"),
    ],
)
def test_a_split_without_documents_is_found_by_the_merge(texts, options, words, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", texts)
    write_parts(2, tmp_path / "out", "--data_files", tmp_path / "a.jsonl", "--splits", *options)
    with pytest.raises(UserError, match=f"{words}, delete the parts and convert again$"):
        merge(tmp_path / "out", options[0])


def test_an_invalid_source_leaves_no_folder(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": \n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 1"):
        convert(
            "--data_files", tmp_path / "a.jsonl", "--splits", "train", "--part", "1/2", "--out_root", tmp_path / "o"
        )
    assert not (tmp_path / "o").exists()


MISTAKES = {
    "part 0": (["--part", "0/3"], "--part 0/3 must be I/N"),
    "part 4 of 3": (["--part", "4/3"], "--part 4/3 must be I/N"),
    "no number": (["--part", "one"], "--part one must be I/N"),
    "a limit": (["--part", "1/3", "--splits", "train_small"], "--part: train_small is the first documents"),
    "an object store": (["--part", "1/3", "--out_root", "s3://bucket/c4"], "--out_root s3://bucket/c4 is not a folder"),
}


@pytest.mark.parametrize(("options", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_invalid_options_are_refused(options, message, source, tmp_path):
    with pytest.raises(UserError, match=message):
        convert("--data_files", source, "--splits", "train", "--out_root", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_a_part_needs_files_of_text(tmp_path):
    with pytest.raises(UserError, match="--part requires files, not a stream"):
        convert("--data_files", "-", "--splits", "train", "--part", "1/2", "--out_root", tmp_path / "out")
    with pytest.raises(UserError, match="--part is for text, not for --images"):
        convert("--images", tmp_path, "--part", "1/2", "--out_root", tmp_path / "out")
    with pytest.raises(UserError, match="--compression is for converting, not for --merge"):
        convert("--merge", "--compression", "zstd", "--out_root", tmp_path / "out")


@pytest.mark.slow
def test_the_command_reports_a_missing_part_in_one_sentence(source, tmp_path):
    convert("--data_files", source, "--splits", "train", "--part", "1/2", "--out_root", tmp_path / "out")
    result = run(ROOT / "src/convert_dataset.py", "--merge", "--splits", "train", "--out_root", tmp_path / "out")
    assert_one_sentence(result, "--merge", "missing or unfinished: 2")
