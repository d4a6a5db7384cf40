"""Sources of examples: the official files of GLUE, the user's files, and the Hub."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from glue_files import MNLI_DEV, MRPC, OFFICIAL, OFFICIAL_TEST, PAIR_TEST, write_tsv

from src.data.readers import read_rows
from src.errors import UserError
from src.glue.examples import Example, check_sources, digest, read_task, splits_of, texts_digest
from src.glue.tasks import GLUE, select


def own_task(tmp_path: Path, **given) -> object:
    """A new task as a config defines it; paths are below tmp_path."""
    files = {split: str(tmp_path / name) for split, name in given.pop("files", {}).items()}
    (task,) = select(["mine"], {"mine": {"columns": ["text"], "files": files, **given}}, 7)
    return task


def write_official(folder: Path, name: str, train: list, dev: list | None = None, bom: bool = False) -> None:
    """A task's train and dev files with these rows; dev is the official row if none are given."""
    header, row, _ = OFFICIAL[name]
    write_tsv(folder / GLUE[name].folder / "train.tsv", header, train, bom)
    dev_header, dev_row = (header, row)
    if name == "mnli":
        dev_header, dev_row = MNLI_DEV, [*row[:-1], "neutral", "neutral", "neutral", "neutral", row[-1]]
    for split in GLUE[name].tsv_validation:
        write_tsv(folder / GLUE[name].folder / f"{split}.tsv", dev_header, dev or [dev_row], bom)


# The official files


@pytest.mark.parametrize("bom", [False, True], ids=["", "bom"])
@pytest.mark.parametrize("name", OFFICIAL)
def test_the_official_files_of_each_task_are_read(tmp_path, name, bom):
    _, row, expected = OFFICIAL[name]
    write_official(tmp_path, name, [row, row], bom=bom)
    header, test_row = OFFICIAL_TEST[name]
    for split in GLUE[name].tsv_test:
        write_tsv(tmp_path / GLUE[name].folder / f"{split}.tsv", header, [test_row] * 3, bom)
    data = read_task(GLUE[name], str(tmp_path), with_test=True)
    assert data.train == [expected, expected]
    assert data.validation == {split: [expected] for split in GLUE[name].tsv_validation}
    assert data.test == {split: [Example(expected.texts, None)] * 3 for split in GLUE[name].tsv_test}


def test_windows_line_ends_and_a_blank_last_line_are_read(tmp_path):
    write_official(tmp_path, "sst2", [["good", "1"]])
    (tmp_path / "SST-2/train.tsv").write_bytes("sentence\tlabel\r\na\u2028b\x85c \t1\r\nbad\t0\r\n\r\n".encode())
    data = read_task(GLUE["sst2"], str(tmp_path))
    assert data.train == [Example(("a\u2028b\x85c ",), 1), Example(("bad",), 0)]


def test_malformed_rows_of_qqp_are_skipped_and_counted(tmp_path, caplog):
    good = OFFICIAL["qqp"][1]
    write_official(tmp_path, "qqp", [good, good[:4], ["the rest of it", "Why?", "1"], good])
    with caplog.at_level(logging.INFO, logger="lion"):
        data = read_task(GLUE["qqp"], str(tmp_path))
    assert data.train == [OFFICIAL["qqp"][2]] * 2
    assert "train.tsv: skipped 2 malformed rows (line 3, 4)" in caplog.text
    write_official(tmp_path, "qqp", [good, *[good[:4]] * (GLUE["qqp"].malformed_rows + 1)])
    with pytest.raises(
        UserError, match=r"train\.tsv, line 103: 4 columns instead of 6, after 100 other malformed rows"
    ):
        read_task(GLUE["qqp"], str(tmp_path))


def test_a_malformed_row_of_a_test_set_is_an_error_even_in_qqp(tmp_path):
    write_official(tmp_path, "qqp", [OFFICIAL["qqp"][1]])
    header, row = OFFICIAL_TEST["qqp"]
    write_tsv(tmp_path / "QQP" / "test.tsv", header, [row, row[:2]])
    with pytest.raises(UserError, match=r"test\.tsv, line 3: 2 columns instead of 3"):
        read_task(GLUE["qqp"], str(tmp_path), with_test=True)


def test_mnli_rows_without_a_gold_label_are_skipped_and_counted(tmp_path, caplog):
    row = OFFICIAL["mnli"][1]
    write_official(tmp_path, "mnli", [row, [*row[:-1], "-"]])
    with caplog.at_level(logging.INFO, logger="lion"):
        assert len(read_task(GLUE["mnli"], str(tmp_path)).train) == 1
    assert "skipped 1 rows without a label (-)" in caplog.text


@pytest.mark.parametrize("place", ["diagnostic/diagnostic.tsv", "AX/AX.tsv"])
def test_the_diagnostic_set_is_predicted_with_mnli_if_it_exists(tmp_path, place):
    write_official(tmp_path, "mnli", [OFFICIAL["mnli"][1]])
    for split in GLUE["mnli"].tsv_test:
        write_tsv(tmp_path / "MNLI" / f"{split}.tsv", OFFICIAL_TEST["mnli"][0], [OFFICIAL_TEST["mnli"][1]])
    before = digest(GLUE["mnli"], str(tmp_path), with_test=True)
    write_tsv(tmp_path / place, PAIR_TEST, [["0", "It rains.", "It is wet."]])
    data = read_task(GLUE["mnli"], str(tmp_path), with_test=True)
    assert list(data.test) == ["test_matched", "test_mismatched", "AX"]
    assert data.test["AX"] == [Example(("It rains.", "It is wet."), None)]
    assert digest(GLUE["mnli"], str(tmp_path), with_test=True)["test"].keys() - before["test"] == {"AX"}
    assert splits_of(GLUE["mnli"], None, with_test=True)[-1].hub == ("nyu-mll/glue", "ax", "test")
    for task, glue_dir, with_test in ((GLUE["mnli"], str(tmp_path), False), (GLUE["rte"], str(tmp_path), True)):
        assert "AX" not in [split.name for split in splits_of(task, glue_dir, with_test)]


def test_mrpc_under_its_publishers_names_does_not_train_on_the_development_set(tmp_path, caplog):
    rows = [[str(i % 2), str(i), str(100 + i), f"first {i} .", f"second {i} ."] for i in range(5)]
    folder = tmp_path / "MRPC"
    write_tsv(folder / "msr_paraphrase_train.txt", MRPC, rows, bom=True)
    write_tsv(folder / "dev.tsv", MRPC, rows[1:3], bom=True)
    write_tsv(folder / "msr_paraphrase_test.txt", MRPC, rows[:2], bom=True)
    with caplog.at_level(logging.INFO, logger="lion"):
        data = read_task(GLUE["mrpc"], str(tmp_path), with_test=True)
    assert [example.texts[0] for example in data.train] == ["first 0 .", "first 3 .", "first 4 ."]
    assert [example.texts[0] for example in data.validation["dev"]] == ["first 1 .", "first 2 ."]
    assert len(data.test["test"]) == 2
    assert "2 rows are in the development set" in caplog.text
    write_tsv(folder / "train.tsv", MRPC, rows[3:])  # the official name goes before
    assert len(read_task(GLUE["mrpc"], str(tmp_path)).train) == 2


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("sst2", "sentence\tlabel\ngood\t1\nbad\n", ["train.tsv, line 3", "1 columns instead of 2"]),
        ("sst2", "sentence\tlabel\ngood\tvery\t1\n", ["train.tsv, line 2", "3 columns instead of 2"]),
        ("sst2", "sentence\tlabel\ngood\t1\nbad\tno\n", ["train.tsv, line 3", "'no'", "negative, positive"]),
        ("sst2", "sentence\tlabel\ngood\t2\n", ["train.tsv, line 2", "'2'"]),
        ("sst2", "sentence\tlabel\ngood\t-1\n", ["train.tsv, line 2", "'-1'"]),
        ("sst2", "sentence\tlabel\ngood\t0.5\n", ["train.tsv, line 2", "'0.5'"]),
        ("sst2", "sentence\tlabel\ngood\t\n", ["train.tsv, line 2", "no label"]),
        ("sst2", "text\tlabel\ngood\t1\n", ["train.tsv", "sentence", "text, label"]),
        ("sst2", "sentence\tlabel\n", ["train.tsv", "no examples"]),
        ("sst2", "", ["train.tsv", "no examples"]),
        ("cola", "gj04\t1\t\tGood.\ngj04\t1\n", ["train.tsv, line 2", "2 columns instead of 4"]),
        ("cola", "gj04\t1\n", ["train.tsv, line 1", "2 columns"]),
        ("rte", "index\tsentence1\tsentence2\n0\ta\tb\n", ["train.tsv", "label"]),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\tmuch\n", ["train.tsv, line 2", "'much'", "a number"]),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\tnan\n", ["train.tsv, line 2", "'nan'"]),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\tinf\n", ["train.tsv, line 2", "'inf'"]),
        ("sst2", None, ["train.tsv", "SST-2", "tasks_to_run"]),
    ],
)
def test_errors_in_official_files_name_file_and_line(tmp_path, name, content, words):
    write_official(tmp_path, name, [OFFICIAL[name][1]])
    train = tmp_path / GLUE[name].folder / "train.tsv"
    train.unlink()
    if content is not None:
        train.write_text(content)
    with pytest.raises(UserError) as error:
        read_task(GLUE[name], str(tmp_path))
    for word in words:
        assert word in str(error.value)


def test_invalid_utf8_is_reported_with_its_line(tmp_path):
    write_official(tmp_path, "sst2", [["good", "1"]])
    (tmp_path / "SST-2/dev.tsv").write_bytes(b"sentence\tlabel\ngood\t1\nb\xe4d\t0\n")
    with pytest.raises(UserError, match=r"dev\.tsv, line 3: not valid UTF-8"):
        read_task(GLUE["sst2"], str(tmp_path))


def test_a_task_like_another_does_not_inherit_its_examples(tmp_path):
    (task,) = select(["mine"], {"mine": {"like": "rte", "folder": "Mine"}}, 7)
    with pytest.raises(UserError, match=r"glue_dir is not set, and tasks\.mine is in its folder Mine; set glue_dir"):
        read_task(task, None)


def test_a_named_data_set_takes_precedence_over_glue_dir(tmp_path):
    (task,) = select(["sst2"], {"sst2": {"hub": "org/name"}}, 7)
    assert splits_of(task, str(tmp_path), with_test=False)[0].hub == ("org/name", "sst2", "train")


def test_a_split_cannot_be_both_validation_and_test():
    (task,) = select(["mine"], {"mine": {"columns": ["text"], "hub": "org/name", "validation": ["test"]}}, 7)
    check_sources([task], None)
    with pytest.raises(UserError, match=r"tasks\.mine: test is both a validation and a test split"):
        check_sources([task], None, with_test=True)


def test_a_missing_glue_dir_is_named(tmp_path):
    with pytest.raises(UserError, match=r"glue_dir: \S+nowhere is not a directory"):
        read_task(GLUE["sst2"], str(tmp_path / "nowhere"))


# The user's files

ROWS = [('He said "no", and\tleft.', "good"), ("Two\nlines.", "bad"), ("Ünïcode, quoted.", "good")]


def write_rows(path: Path, rows=ROWS) -> None:
    if path.suffix.lower() == ".csv":
        quoted = ['"{}",{}'.format(text.replace('"', '""'), label) for text, label in rows]
        path.write_text("\n".join(["text,stars", *quoted]), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": text, "stars": label}) + "\n" for text, label in rows))
    elif path.suffix == ".parquet":
        texts, labels = zip(*rows)
        pyarrow.parquet.write_table(pyarrow.table({"text": texts, "stars": labels}), path)


@pytest.mark.parametrize("ending", ["csv", "CSV", "jsonl", "parquet"])
def test_user_files_are_read_and_their_labels_found(tmp_path, ending):
    for name in ("train", "dev", "test"):
        write_rows(tmp_path / f"{name}.{ending}")
    task = own_task(
        tmp_path,
        label="stars",
        files={"train": f"train.{ending}", "validation": f"dev.{ending}", "test": f"test.{ending}"},
    )
    data = read_task(task, None, with_test=True)
    assert data.task.labels == ("bad", "good")
    assert data.train == [Example((text,), float(label == "good")) for text, label in ROWS]
    assert data.validation == {"validation": data.train}
    assert data.test == {"test": [Example((text,), None) for text, _ in ROWS]}


def test_quotes_in_a_tsv_are_literal_and_several_files_are_one_set(tmp_path):
    write_tsv(tmp_path / "a.tsv", ["text", "label"], [['"So', "1"]])
    write_tsv(tmp_path / "b.tsv", ["label", "text"], [["10", "b"], ["2", "c"]])
    files = {"train": [str(tmp_path / "a.tsv"), str(tmp_path / "b.tsv")], "validation": str(tmp_path / "a.tsv")}
    (task,) = select(["mine"], {"mine": {"columns": ["text"], "files": files}}, 7)
    data = read_task(task, None)
    assert data.task.labels == ("1", "2", "10")  # by number
    assert data.train == [Example(('"So',), 0), Example(("b",), 2), Example(("c",), 1)]


def test_regression_labels_are_read_as_numbers(tmp_path):
    write_rows(tmp_path / "a.jsonl", [("x", 1), ("y", 2.5)])
    task = own_task(tmp_path, label="stars", kind="regression", files={"train": "a.jsonl", "validation": "a.jsonl"})
    assert task.metrics == ("spearman",)
    assert [example.label for example in read_task(task, None).train] == [1, 2.5]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "text,stars\ngood,1\nbad\n", ["a.csv, line 3", "1 columns instead of 2"]),
        ("a.csv", 'text,stars\n"two\nlines",1\n"never closed,1\n', ["a.csv, line 4", "not valid CSV"]),
        ("a.csv", "words,stars\ngood,1\n", ["a.csv", "no column text", "words, stars"]),
        ("a.csv", "text,stars\nx,\n", ["a.csv, line 2", "no label in stars"]),
        ("a.jsonl", '{"text": "x", "stars": 1}\n{"text": "x"\n', ["a.jsonl, line 2", "not valid JSON"]),
        ("a.jsonl", '{"text": "x"}\n', ["a.jsonl, line 1", "no stars", "its keys are text"]),
        ("a.jsonl", "[1]\n", ["a.jsonl, line 1", "not a JSON object"]),
        ("a.jsonl", '{"text": 5, "stars": 1}\n', ["a.jsonl, line 1", "text holds 5, not text"]),
        ("a.jsonl", '{"text": "x", "stars": null}\n', ["a.jsonl, line 1", "no label"]),
        ("a.jsonl", '{"text": "x", "stars": NaN}\n', ["a.jsonl, line 1", "no label"]),
        ("a.jsonl", '{"text": "x", "stars": [1, 2]}\n', ["a.jsonl, line 1", "[1, 2] is not a single label"]),
        ("a.jsonl", '{"text": "x", "stars": 1}\n', ["all rows", "label '1'"]),
        ("a.csv", "text,stars\n", ["a.csv holds no examples with a label"]),
        ("a.parquet", "not parquet", ["a.parquet", "not a readable Parquet file"]),
        ("a.txt", "x\n", ["a.txt", "cannot read .txt", ".jsonl"]),
        ("a.csv", "text,stars,stars\nx,1,2\n", ["a.csv: two columns are called stars"]),
        ("a.csv", "text,stars\nx,\n", ['set tasks.mine.unlabelled to ""']),
        pytest.param("a.jsonl", "9" * 5000, ["a.jsonl, line 1", "not valid JSON"], id="digits"),
        pytest.param("a.jsonl", "[" * 100_000, ["a.jsonl, line 1", "not valid JSON"], id="depth"),
        ("a.jsonl", '{"text": "\\ud83d", "stars": 1}\n', ["a.jsonl, line 1", "half of a surrogate pair"]),
        ("a.jsonl", '{"text": "x", "stars": "\\ud83d"}\n', ["a.jsonl, line 1", "half of a surrogate pair"]),
    ],
)
def test_errors_in_user_files_name_file_and_line(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    task = own_task(tmp_path, label="stars", files={"train": name, "validation": name})
    with pytest.raises(UserError) as error:
        read_task(task, None)
    for word in words:
        assert word in str(error.value)


def test_invalid_utf8_in_parquet_is_reported_with_its_row(tmp_path):
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 2, pyarrow.array([b"good", b"b\xe4d"]).buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "stars": [0, 1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet, row 2: not valid UTF-8"):
        read_task(own_task(tmp_path, label="stars", files={"train": "a.parquet", "validation": "a.parquet"}), None)


def test_a_parquet_file_with_a_duplicate_column_is_refused(tmp_path):
    table = pyarrow.table([["x"], [1], [2]], names=["text", "stars", "stars"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: two columns are called stars"):
        read_task(own_task(tmp_path, label="stars", files={"train": "a.parquet", "validation": "a.parquet"}), None)


def test_a_header_is_skipped_with_numbered_columns(tmp_path):
    rows = "x,1\ny,0\nz,1\n"
    (tmp_path / "none.csv").write_text(rows)
    (tmp_path / "header.csv").write_text(f"text,stars\n{rows}")
    without, with_header = (
        own_task(tmp_path, columns=[0], label=1, files={"train": f"{name}.csv", "validation": "none.csv"})
        for name in ("none", "header")
    )
    assert len(read_task(without, None).train) == 3
    with pytest.raises(UserError, match=r"header\.csv, line 1: the label 'stars' occurs nowhere else"):
        read_task(with_header, None)


@pytest.mark.parametrize(
    ("name", "content"), [("a.csv", "text\nx\n\ny\n\n"), ("a.tsv", "text\nx\n\ny\n"), ("a.csv", 'text\nx\n""\ny\n')]
)
def test_an_empty_text_in_a_test_set_keeps_its_position(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert [cells for _, cells in read_rows(tmp_path / name, ("text",))] == [("x",), ("",), ("y",)]


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_rows_without_a_label_are_skipped_if_the_task_allows_it(tmp_path, caplog, ending):
    rows = [("x", 1.5), ("y", None), ("z", 2.0)]
    write_rows(tmp_path / f"a.{ending}", [(x, "" if y is None else y) for x, y in rows] if ending == "csv" else rows)
    task = own_task(
        tmp_path,
        label="stars",
        kind="regression",
        unlabelled="",
        files={"train": f"a.{ending}", "validation": f"a.{ending}"},
    )
    with caplog.at_level(logging.INFO, logger="lion"):
        assert read_task(task, None).train == [Example(("x",), 1.5), Example(("z",), 2.0)]
    assert f"a.{ending}: skipped 1 rows without a label\n" in caplog.text


def test_numerically_equal_labels_are_one_class(tmp_path):
    write_rows(tmp_path / "a.csv", [("x", "1.0"), ("y", "2.0")])
    task = own_task(tmp_path, label="stars", labels=[1.0, 2.0], files={"train": "a.csv", "validation": "a.csv"})
    assert task.labels == ("1", "2")
    assert [example.label for example in read_task(task, None).train] == [0, 1]


@pytest.mark.parametrize("one, other", [("neg", "neg "), ("1", "1.0")])
def test_labels_that_are_likely_one_are_not_two_classes(tmp_path, one, other):
    rows = [("no", one), ("yes", "pos"), ("not", other)]
    (tmp_path / "a.csv").write_text("text,stars\n" + "".join(f"{text},{label}\n" for text, label in rows))
    files = {"train": f"{tmp_path}/a.csv", "validation": f"{tmp_path}/a.csv"}
    task = own_task(tmp_path, label="stars", files=files)
    with pytest.raises(UserError, match=rf"tasks\.mine: stars holds '{one}' and '{other}' as two labels"):
        read_task(task, None)
    task = own_task(tmp_path, label="stars", files=files, labels=[one, "pos", other])
    assert [example.label for example in read_task(task, None).train] == [0, 1, 2]


def test_labels_equal_as_numbers_are_sorted_by_name(tmp_path):
    names = ["1", "01", "001", "0001", "2"]
    write_rows(tmp_path / "a.csv", [(name, name) for name in names])
    task = own_task(tmp_path, label="stars", files={"train": "a.csv", "validation": "a.csv"})
    assert read_task(task, None).task.labels == ("0001", "001", "01", "1", "2")


def test_the_digest_of_texts_ignores_only_whitespace():
    one, same, other = (texts_digest([Example((text, "b"), 1.0)]) for text in ("a x", "a  x ", "a y"))
    assert one == same != other


def test_columns_may_be_given_by_name_and_by_number(tmp_path):
    (tmp_path / "a.csv").write_text("text,stars\nx,1\ny,0\n")
    data = read_task(
        own_task(tmp_path, columns=[0], label="stars", files={"train": "a.csv", "validation": "a.csv"}), None
    )
    assert data.train == [Example(("x",), 1), Example(("y",), 0)]


def test_integers_stored_as_floats_are_the_same_classes(tmp_path, caplog):
    write_rows(tmp_path / "train.parquet", [("x", 1.0), ("y", 0.0), ("z", -1.0)])
    write_rows(tmp_path / "dev.parquet", [("x", 1)])
    task = own_task(
        tmp_path,
        label="stars",
        unlabelled=-1,
        metrics=["f1"],
        files={"train": "train.parquet", "validation": "dev.parquet"},
    )
    with caplog.at_level(logging.INFO, logger="lion"):
        data = read_task(task, None)
    assert data.task.labels == ("0", "1")
    assert data.train == [Example(("x",), 1), Example(("y",), 0)] and data.validation["validation"] == data.train[:1]
    assert "skipped 1 rows without a label (-1)" in caplog.text
    assert "the labels of the training set are 0, 1; f1 is computed for 1" in caplog.text


def test_a_validation_label_absent_from_training_is_refused(tmp_path):
    write_rows(tmp_path / "train.csv", [("x", "1"), ("y", "2")])
    write_rows(tmp_path / "dev.csv", [("x", "0")])  # a number, but of no class: the classes are called 1 and 2
    task = own_task(tmp_path, label="stars", files={"train": "train.csv", "validation": "dev.csv"})
    with pytest.raises(UserError, match=r"dev\.csv, line 2: the label '0' must be one of 1, 2"):
        read_task(task, None)


def test_the_digest_depends_on_content_not_on_paths(tmp_path):
    for folder in ("a", "b"):
        write_official(tmp_path / folder, "sst2", [["good", "1"]])
    assert digest(GLUE["sst2"], str(tmp_path / "a")) == digest(GLUE["sst2"], str(tmp_path / "b"))
    write_official(tmp_path / "b", "sst2", [["good", "0"]])
    assert digest(GLUE["sst2"], str(tmp_path / "a")) != digest(GLUE["sst2"], str(tmp_path / "b"))


# The Hub


def test_an_unreachable_hub_is_reported_in_one_sentence():
    with pytest.raises(UserError, match=r"nyu-mll/glue \(sst2\), train.*set glue_dir"):
        read_task(GLUE["sst2"], None)


@pytest.fixture
def on_hub(tmp_path, monkeypatch):
    """on_hub(stars, names, ...): a task over a data set as the Hub keeps it, its texts x, y, …, its classes called
    so."""
    from datasets import ClassLabel, Dataset, Features, Value

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def make(stars: list, names: list[str] | None, **given):
        features = Features({"text": Value("string"), "stars": ClassLabel(names=names) if names else Value("int64")})
        folder = tmp_path / "set"
        folder.mkdir()
        for split in ("train", "test"):
            table = Dataset.from_dict({"text": list("xyzuvw"[: len(stars)]), "stars": stars}, features=features)
            table.to_parquet(folder / f"{split}.parquet")
        return own_task(tmp_path, hub=str(folder), label="stars", validation=["test"], **given)

    return make


def test_a_hub_dataset_keeps_its_class_order(on_hub):
    task = on_hub([1, 0], ["2", "1"])  # names, not numbers, count
    data = read_task(task, None)
    assert data.task.labels == ("2", "1")
    assert data.train == data.validation["test"] == [Example(("x",), 1), Example(("y",), 0)]
    with pytest.raises(UserError, match=r"no column words \(its columns are text, stars\)"):
        read_task(replace(task, columns=("words",)), None)


def test_labels_in_a_different_order_than_the_hubs_match_by_name(on_hub):
    """As WNLI's, read like RTE."""
    task = on_hub([1, 0], ["not_entailment", "entailment"], like="rte", columns=["text"])
    assert task.labels == ("entailment", "not_entailment")
    assert read_task(task, None).train == [Example(("x",), 0), Example(("y",), 1)]


def test_labels_that_differ_from_the_hubs_are_refused(on_hub):
    task = on_hub([1, 0], ["no", "yes"], labels=["bad", "good"])
    with pytest.raises(UserError, match=r"its labels are no, yes, but tasks\.mine\.labels are bad, good; set labels"):
        read_task(task, None)


@pytest.mark.parametrize("names", [["no", "yes"], None], ids=["classes", "numbers"])
def test_hub_rows_without_a_label_are_skipped_and_counted(on_hub, caplog, names):
    """As SNLI's."""
    task = on_hub([0, -1 if names else None, 1, None], names)
    with caplog.at_level(logging.INFO, logger="lion"):
        data = read_task(task, None)
    assert data.task.labels == tuple(names or ("0", "1"))
    assert data.train == data.validation["test"] == [Example(("x",), 0), Example(("z",), 1)]
    assert "set, train: skipped 2 rows without a label" in caplog.text
    assert "set, test: skipped 2 rows without a label" in caplog.text


def test_a_split_without_labels_cannot_be_used_for_validation(on_hub):
    with pytest.raises(UserError, match="set, train holds no examples with a label"):
        read_task(on_hub([-1, -1], ["no", "yes"], labels=["no", "yes"]), None)
