"""Readers: every kind and compression gives the same texts, from any record on; errors name the line."""

import gzip
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from src.data.readers import BATCH_BYTES, find_files, read_batches, read_rows
from src.errors import UserError

TEXTS = [
    "Grüße, 世界 🙂",
    'tab\tand "quotes", commas',
    "",
    " spaces around ",
    *(f"text {i} " * (i % 9 + 1) for i in range(60)),
]


def content(kind: str, column: str = "text") -> bytes:
    """TEXTS as a file of some kind, made by libraries, not by the code under test."""
    if kind == "txt":
        return "".join(f"{text}\n" for text in TEXTS).encode()
    if kind in ("jsonl", "json"):
        return "".join(json.dumps({"id": 7, column: text}) + "\n" for text in TEXTS).encode()
    table = pa.table({"id": list(range(len(TEXTS))), column: TEXTS})
    buffer = io.BytesIO()
    if kind == "parquet":
        pq.write_table(table, buffer, row_group_size=7)
    else:
        pa.csv.write_csv(table, buffer, pa.csv.WriteOptions(delimiter="," if kind == "csv" else "\t"))
    return buffer.getvalue()


def read_texts(path: Path, column: str = "text", *options, **named) -> list[str]:
    return [text for batch in read_batches(path, column, *options, **named) for text in batch.texts]


def compress(data: bytes, ending: str) -> bytes:
    return {
        "": lambda: data,
        ".gz": lambda: gzip.compress(data),
        ".zst": lambda: pa.compress(data, "zstd", asbytes=True),
    }[ending]()


KINDS = [(kind, ending) for kind in ("txt", "jsonl", "json", "csv", "tsv") for ending in ("", ".gz", ".zst")] + [
    ("parquet", "")
]


@pytest.mark.parametrize("kind, ending", KINDS)
def test_every_kind_can_be_read_from_any_record(kind, ending, tmp_path):
    path = tmp_path / f"a.{kind}{ending}"
    path.write_bytes(compress(content(kind), ending))
    assert read_texts(path) == TEXTS
    for skip in (1, 7, 20, len(TEXTS)):
        assert read_texts(path, "text", skip) == TEXTS[skip:]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_the_text_may_be_in_another_column(kind, tmp_path):
    path = tmp_path / f"a.{kind}"
    path.write_bytes(content(kind, "body"))
    assert read_texts(path, "body") == TEXTS
    with pytest.raises(UserError, match=rf"a\.{kind}.* no (column )?text .*id, body.*--text_column"):
        read_texts(path)


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_batches_have_their_first_record_and_the_bytes_read(ending, tmp_path):
    path = tmp_path / f"a.txt{ending}"
    lines = [f"{i} {'word ' * (i % 1000)}\n".encode() for i in range(2000)]
    path.write_bytes(compress(b"".join(lines), ending))
    batches = list(read_batches(path, "text"))
    sizes = [sum(map(len, batch.texts)) + len(batch.texts) for batch in batches]  # line ends included
    assert len(batches) > 3 and all(BATCH_BYTES <= size < BATCH_BYTES + 6000 for size in sizes[:-1])
    assert [batch.position for batch in batches] == [
        sum(len(b.texts) for b in batches[:i]) for i in range(len(batches))
    ]
    assert sum(batch.size for batch in batches) == path.stat().st_size
    assert [text for batch in batches for text in batch.texts] == [line.decode().rstrip("\n") for line in lines]


def test_a_byte_order_mark_is_not_text(tmp_path):
    for name in ("a.txt", "a.jsonl", "a.csv"):
        (tmp_path / name).write_bytes(
            b"\xef\xbb\xbf" + {"txt": b"one\n", "jsonl": b'{"text": "one"}\n', "csv": b"text\none\n"}[name[2:]]
        )
        assert read_texts(tmp_path / name) == ["one"]


def test_a_csv_field_may_span_lines_and_be_long(tmp_path):
    long = "words and more\n" * 20_000
    (tmp_path / "a.csv").write_text(f'id,text\r\n1,"one\r\ntwo ""three"""\r\n\r\n2,"{long}"\r\n', newline="")
    assert read_texts(tmp_path / "a.csv") == ['one\r\ntwo "three"', "", long]


def test_a_text_file_may_be_one_document(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\n\ntwo\n")
    assert read_texts(tmp_path / "a.txt", "text", 0, True) == ["one\r\n\ntwo\n"]
    assert not read_texts(tmp_path / "a.txt", "text", 1, True)
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nth\xffree\n")
    with pytest.raises(UserError, match=r"a\.txt, line 3: not valid UTF-8"):
        read_texts(tmp_path / "a.txt", "text", 0, True)


def test_empty_and_null_are_empty_texts(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n\n{"text": ""}\n')
    assert read_texts(tmp_path / "a.jsonl") == ["", "", ""]
    pq.write_table(pa.table({"text": ["one", None]}), tmp_path / "a.parquet")
    assert read_texts(tmp_path / "a.parquet") == ["one", ""]


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


LINES = b"".join(b'{"text": "line %d of many"}\n' % i for i in range(50_000))
INVALID = {
    "a.txt.gz": (truncated(gzip.compress(LINES)), r"a\.txt\.gz, line \d{3,5}: corrupt or truncated \(Truncated"),
    "a.jsonl.zst": (
        truncated(pa.compress(LINES, "zstd", asbytes=True)),
        r"a\.jsonl\.zst, line \d+: corrupt or truncated \(Truncated",
    ),
    "b.jsonl.gz": (gzip.compress(LINES)[:-8] + b"\0" * 8, r"b\.jsonl\.gz, line \d{5}: corrupt or truncated"),
    "c.jsonl.gz": (LINES, r"c\.jsonl\.gz.*cannot be read"),
    "a.csv": (b'text,id\n"one,1\ntwo,2\n', r"a\.csv, line 2: not valid CSV"),
    "b.csv": (b"text,id\none,1\ntwo, and more,2\n", r"b\.csv, line 3: 3 columns instead of 2"),
    "c.csv": (b"", r"c\.csv: no column text"),
    "d.csv": (b"text\none\nt\xffwo\n", r"d\.csv, line 3: not valid UTF-8"),
    "a.jsonl": (b'{"text": "one"}\n{"text": "two", "n": ' + b"1" * 5000 + b"}\n", r"a\.jsonl, line 2: not valid JSON"),
    "b.jsonl": (b"[" * 100_000 + b"\n", r"b\.jsonl, line 1: not valid JSON"),
    "a.json": (
        b'[{"text": "one"}]\n',
        r"a\.json, line 1: not a JSON object \(a file holds one per line\); fix or remove",
    ),
    "b.json": (
        b'[\n{"text": "one"}\n]\n',
        r"b\.json, line 1: not valid JSON \(.*; a file holds one object per line\);",
    ),
    "c.jsonl": (b'{"text": ["one"]}\n', r"c\.jsonl, line 1: column 'text' holds list, not text"),
    "a.parquet.gz": (b"", r"a\.parquet\.gz: cannot read \.parquet\.gz"),
}


@pytest.mark.parametrize("name", INVALID)
def test_errors_name_file_and_line(name, tmp_path):
    data, message = INVALID[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        read_texts(tmp_path / name)


MALFORMED = {
    "a.jsonl": b'{"text": "one"}\n{"text": "tw\n{"text": "\xff"}\n\n{"text": "two"}\n',
    "a.txt": b"one\n\xff\n\nan \xff\ntwo\n",
    "a.csv": b"text,id\none,1\ntwo\n,2\n1,2,3\ntwo,2\n",
    "a.tsv": b"text\tid\none\t1\ntwo\n\t2\n1\t2\t3\ntwo\t2\n",
}
LINES_OF_MALFORMED = {"a.jsonl": "2, 3", "a.txt": "2, 4", "a.csv": "3, 5", "a.tsv": "3, 5"}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_rows_are_skipped_up_to_a_limit(name, tmp_path, caplog):
    (tmp_path / name).write_bytes(MALFORMED[name])
    with caplog.at_level("INFO", logger="lion"):
        assert read_texts(tmp_path / name, malformed_rows=2) == ["one", "", "two"]
    assert f"{name}: skipped 2 malformed rows (line {LINES_OF_MALFORMED[name]})" in caplog.text
    assert read_texts(tmp_path / name, skip=1, malformed_rows=2) == ["", "two"]
    last = LINES_OF_MALFORMED[name][-1]
    with pytest.raises(UserError, match=f"line {last}: .*, after 1 other malformed rows; .*--malformed_rows N"):
        read_texts(tmp_path / name, malformed_rows=1)
    with pytest.raises(UserError, match=", line ") as error:
        read_texts(tmp_path / name)
    assert "--malformed_rows" not in str(error.value)


def test_a_header_is_never_skipped(tmp_path):
    (tmp_path / "a.tsv").write_bytes(b"text\t\xff\none\t1\n")
    with pytest.raises(UserError, match=r"a\.tsv, line 1: not valid UTF-8"):
        list(read_rows(tmp_path / "a.tsv", ["text"], malformed_rows=9))


def test_a_byte_that_is_not_utf8_is_no_malformed_row_where_rows_may_span_lines(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'text,id\n"one\n\xff"\n,1\ntwo,2\n')
    with pytest.raises(UserError, match=r"a\.csv, line 3: not valid UTF-8; convert the file to UTF-8$"):
        read_texts(tmp_path / "a.csv", malformed_rows=9)
    (tmp_path / "a.txt").write_bytes(b"one\n\xff\n")
    with pytest.raises(UserError, match=r"a\.txt, line 2: not valid UTF-8; convert the file to UTF-8$"):
        read_texts(tmp_path / "a.txt", one_document_per_file=True, malformed_rows=9)


def test_invalid_utf8_in_parquet_is_reported_with_its_row(tmp_path):
    bad = pa.Array.from_buffers(pa.string(), 2, pa.array([b"one", b"t\xffwo"]).buffers())
    pq.write_table(pa.table({"text": bad}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet, row 2: not valid UTF-8"):
        read_texts(tmp_path / "a.parquet")


def test_patterns_find_each_file_once_and_no_directory(tmp_path):
    (tmp_path / "deep.txt").mkdir()
    for name in ("b.txt", "a.txt", "deep.txt/c.txt"):
        (tmp_path / name).write_text("one\n")
    found = find_files([f"{tmp_path}/b.txt", f"{tmp_path}/**/*.txt"])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["b.txt", "a.txt", "deep.txt/c.txt"]


def test_a_file_name_is_not_a_pattern(tmp_path):
    for name in ("a[1].txt", "a1.txt", "a2.txt"):
        (tmp_path / name).write_text("one\n")
    assert [path.name for path in find_files([f"{tmp_path}/a[1].txt", f"{tmp_path}/a[2].txt"])] == [
        "a[1].txt",
        "a2.txt",
    ]
