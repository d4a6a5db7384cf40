"""ListOps: rows by the rules, readings of a score, files that are the same however often the command is interrupted."""

import errno
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import DATA, ROOT, needs_reference, snapshot

from src.errors import RunFailed, UserError
from src.lra import listops, make

SMALL = ("--rows", "60", "6", "8", "--min_length", "20", "--max_length", "100")


def run_make(out: Path, *options: object) -> Path:
    make.main(["listops", "--out", str(out), *map(str, options)])
    return out / "listops-1000"


def rows(folder: Path, split: str) -> list[tuple[str, int]]:
    return [(source.decode(), target) for source, target in listops.read(folder / f"basic_{split}.tsv")]


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    """Rows within the release's limits."""
    return run_make(tmp_path_factory.mktemp("full"), "--rows", 600, 30, 40, "--seed", 3)


def value(source: str) -> int:
    """The value of a row, by Python itself: `( f 4 )` applies f to an argument, `]` ends it."""
    code = re.sub(r"\[(\w+)", r"\1()", source.replace("]", "None")).split(" ")
    code = " ".join(code).replace("( ", "apply(").replace(" )", ")")
    code = re.sub(r"(?<=[\w)]) (?=[\w(])", ", ", code)
    compute = {
        "MIN": min,
        "MAX": max,
        "MED": lambda values: int((sorted(values)[(len(values) - 1) // 2] + sorted(values)[len(values) // 2]) / 2),
        "SM": lambda values: sum(values) % 10,
    }

    def apply(function: tuple, argument: int | None):
        name, values = function
        return compute[name](values) if argument is None else (name, [*values, argument])

    names = {name: lambda name=name: (name, []) for name in compute}
    return eval(code, {"apply": apply, **names})


def test_an_expression_is_read_and_computed():
    source = "( ( ( ( [MED 4 ) ( ( ( [SM 9 ) 8 ) ] ) ) 0 ) ] )"
    tokens = listops.tokens(source)
    assert tokens == "[MED 4 [SM 9 8 ] 0 ]".split()
    assert listops.evaluate(tokens) == 4
    assert listops.evaluate(tokens, levels=1, guess=1) == 1
    assert listops.evaluate(tokens, levels=0, guess=3) == 3
    assert listops.evaluate("[MED 3 4 ]".split()) == 3  # 3.5 is cut
    assert listops.evaluate("[MAX 3 [MIN 9 8 ] ]".split()) == 8
    assert listops.evaluate(["7"]) == 7
    for broken in ("[MAX 3", "3 4", "]", "[MAX ]", "[MAX 3 ] ]", "", "[AVG 1 2 ]"):
        with pytest.raises(ValueError):
            listops.evaluate(broken.split())
    assert len(listops.VOCABULARY) == 15
    assert listops.VOCABULARY[:6] == ("[MIN", "[MAX", "[MED", "[SM", "]", "0")


def test_rows_follow_the_rules(full):
    options = json.loads((full / "generated.json").read_text())["options"]
    assert options["seed"] == 3
    sources = []
    for split, count in (("train", 600), ("val", 30), ("test", 40)):
        content = (full / f"basic_{split}.tsv").read_bytes()
        found = rows(full, split)
        assert len(found) == count
        written = b"".join(f"{source}\t{target}\r\n".encode() for source, target in found)
        assert content == b"Source\tTarget\r\n" + written
        sources += [source for source, _ in found]
        for source, target in found:
            tokens = listops.tokens(source)
            assert {*tokens} <= {*listops.VOCABULARY}
            assert 500 < len(tokens) < 2000
            assert listops.evaluate(tokens) == target
            depth = opened = 0
            for token in tokens:
                opened += token.startswith("[") - (token == "]")
                depth = max(depth, opened + token.isdigit())
            assert depth <= 10
    assert len({*sources}) == len(sources)
    for source in sources[:40]:
        assert value(source) == listops.evaluate(listops.tokens(source))


def test_rows_are_distributed_as_published(full):
    """As 20,000 rows by the documented rules; the tolerances are four standard errors of 600 rows."""
    found = rows(full, "train")
    targets = [target for _, target in found]
    expected = (17.1, 8.9, 7.4, 8.3, 9.3, 8.4, 7.8, 7.2, 8.8, 16.8)
    for digit, share in enumerate(expected):
        assert abs(100 * targets.count(digit) / len(targets) - share) < 6.5
    lengths = [len(listops.tokens(source)) for source, _ in found]
    assert abs(sum(lengths) / len(lengths) - 1033) < 68
    score = listops.readings(found)
    expected = {"most frequent class": 17, "root's operator": 36, "root's operator and digits": 41}
    expected |= {"2 levels": 65, "3 levels": 79, "4 levels": 87, "5 levels": 92}
    assert score.keys() == expected.keys()
    for name, percent in expected.items():
        assert abs(score[name] - percent) < 8, name


def test_readings_of_known_rows():
    rows = [
        ("( ( ( [MAX 4 ) 3 ) ] )", 4),
        ("( ( ( [MAX 0 ) ( ( ( [MIN 5 ) 8 ) ] ) ) ] )", 5),
        ("( ( ( [SM 4 ) 3 ) ] )", 7),
    ]
    score = listops.readings(rows)
    assert score["most frequent class"] == 33.33
    assert score["root's operator"] == 66.67
    assert score["root's operator and digits"] == 66.67  # in row 1, MIN 5 8 counts as 1
    assert score["2 levels"] == score["5 levels"] == 100


def test_options_are_recorded_and_a_finished_command_does_nothing(tmp_path, caplog):
    folder = run_make(tmp_path, *SMALL)
    record = json.loads((folder / "generated.json").read_text())
    assert record["generated"] is True
    assert record["options"]["rows"] == [60, 6, 8]
    assert record["splits"]["test"]["rows"] == 8
    lengths = [len(listops.tokens(source)) for source, _ in rows(folder, "train")]
    assert min(lengths) > 20 and max(lengths) < 100
    assert record["splits"]["train"]["mean length"] == round(sum(lengths) / 60, 1)
    assert {path.name for path in folder.iterdir()} - {".lock"} == {*listops.FILES.values(), "generated.json"}
    before = snapshot(folder)
    with caplog.at_level("INFO", logger="lion"):
        run_make(tmp_path, *SMALL)
    assert "is finished: nothing to do" in caplog.text
    assert "test accuracy of computing only part" in caplog.text
    assert {name: before[name] for name in before if name != ".lock"} == {
        name: state for name, state in snapshot(folder).items() if name != ".lock"
    }
    with pytest.raises(UserError, match=r"already holds data of other options \(--seed 0\); choose .* --overwrite"):
        run_make(tmp_path, *SMALL, "--seed", 1)
    first = (folder / "basic_train.tsv").read_bytes()
    run_make(tmp_path, *SMALL, "--seed", 1, "--overwrite")
    assert (folder / "basic_train.tsv").read_bytes() != first
    run_make(tmp_path, *SMALL, "--overwrite")
    assert (folder / "basic_train.tsv").read_bytes() == first
    (folder / "basic_val.tsv").write_bytes(b"Source\tTarget\r\n")
    with pytest.raises(UserError, match="has changed since it was generated"):
        run_make(tmp_path, *SMALL)
    run_make(tmp_path, *SMALL, "--overwrite")
    assert (folder / "basic_val.tsv").read_bytes() == before["basic_val.tsv"][0]


def test_test_rows_do_not_depend_on_the_number_of_training_rows(tmp_path):
    one, two = (run_make(tmp_path / str(count), "--rows", count, 5, 5, *SMALL[4:]) for count in (10, 20))
    assert rows(one, "test") == rows(two, "test")
    assert rows(one, "train") == rows(two, "train")[:10]


@pytest.mark.slow
def test_a_killed_command_resumes_to_the_same_bytes(tmp_path):
    options = ("--rows", 2000, 50, 50, "--min_length", 20, "--max_length", 200)
    expected = run_make(tmp_path / "expected", *options)
    code = "import sys; from src.lra.make import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "listops", "--out", str(tmp_path / "killed"), *map(str, options)]
    folder = tmp_path / "killed" / "listops-1000"
    train = folder / ".basic_train.tsv.unfinished"
    for size in (0, 200_000):
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not (train.exists() and train.stat().st_size > size) and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert train.exists()
        assert not (folder / "basic_train.tsv").exists() and not (folder / "generated.json").exists()
    with pytest.raises(UserError, match="unfinished data of other options"):
        run_make(tmp_path / "killed", *options, "--seed", 5)
    with train.open("ab") as file:
        file.write(b"( ( [MIN 3 ) \r")  # a truncated row
    run_make(tmp_path / "killed", *options)
    for name in (*listops.FILES.values(), "generated.json"):
        assert (folder / name).read_bytes() == (expected / name).read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rows", "5", "0", "5"), "--rows 5 0 5: each split must have at least 1 row"),
        (("--min_length", "500", "--max_length", "501"), "--max_length 501 must be at least --min_length 500 + 2"),
        (("--max_depth", "1"), "--max_depth 1 must be at least 2"),
        (("--max_args", "1"), "--max_args 1 must be at least 2"),
        (("--seed", "-1"), "--seed -1 must not be negative"),
        (("--max_depth", "3"), "the largest tree of depth 3 with 10 arguments has length 122"),
    ],
)
def test_impossible_options_are_refused(tmp_path, options, message):
    with pytest.raises(UserError) as error:
        run_make(tmp_path / "out", *options)
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()


def test_too_few_trees_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(listops, "MAX_ATTEMPTS", 2000)
    few = ("--rows", "9", "1", "1", "--min_length", "0", "--max_length", "2")  # ten digits
    with pytest.raises(UserError, match=r"after 10 rows, .* widen the limits or reduce --rows"):
        run_make(tmp_path, *few)
    folder = run_make(tmp_path, "--rows", "8", "1", "1", *few[4:], "--overwrite")
    sources = [source for split in listops.FILES for source, _ in rows(folder, split)]
    assert sorted(sources) == list("0123456789")


def test_other_data_is_not_touched(tmp_path):
    folder = tmp_path / "listops-1000"
    folder.mkdir()
    (folder / "basic_test.tsv").write_text("the release's")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"already holds data that was not generated \(basic_test.tsv\)"):
        run_make(tmp_path, *SMALL)
    assert (folder / "basic_test.tsv").read_text() == "the release's"
    run_make(tmp_path, *SMALL, "--overwrite")
    assert (folder / "notes.txt").read_text() == "mine"
    assert len(rows(folder, "test")) == 8


@needs_reference
def test_sample_files_of_the_release_are_read():
    folder = DATA / "lra" / "listops-1000"
    for split, count in (("train", 10), ("val", 4), ("test", 4)):
        found = rows(folder, split)
        assert len(found) == count
        assert all(listops.evaluate(listops.tokens(source)) == target for source, target in found)


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        make.main(["listops", "--help"])
    text = capsys.readouterr().out
    assert "lra.py make listops" in text and "probability ¼" in text
    with pytest.raises(SystemExit):
        make.main(["--help"])
    assert "python lra.py make pathfinder" in capsys.readouterr().out


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    def fail(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(listops, "sync_to_disk", fail)
    with pytest.raises(RunFailed, match=r"cannot write to .*No space left on device.*then rerun to resume"):
        run_make(tmp_path, *SMALL)
    monkeypatch.undo()
    assert len(rows(run_make(tmp_path, *SMALL), "test")) == 8
