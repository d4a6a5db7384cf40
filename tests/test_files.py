"""Files: written atomically, read up to a truncated line, and checked for writing."""

import errno
import hashlib
import os
from pathlib import Path

import pytest

from src.errors import UserError
from src.files import check_writable, file_digest, read_json_lines, write_atomically, write_json


def test_a_file_is_written_under_a_temporary_name_and_renamed(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    write_atomically(path, "one")
    original = Path.write_bytes

    def full_disk(path, content):
        original(path, content[:1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"two": 2})
    assert path.read_text() == "one"
    assert [file.name for file in tmp_path.iterdir()] == [path.name]  # nothing takes up the full disk


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (b"", []),
        (b'{"step": 1}\n{"step": 2}\n', [1, 2]),
        (b'{"step": 1}\n{"step": 2, "sam', [1]),
        (b'{"step": 1}\ngarbage\n{"step": 3}\n', [1]),
        (b'{"step": 1}\n2\n{"step": 3}\n', [1]),
        (b'{"step": 1}\n\xff\n', [1]),
    ],
)
def test_json_lines_are_read_up_to_the_first_damaged_one(tmp_path, text, numbers):
    (tmp_path / "metrics.jsonl").write_bytes(text)
    assert [line["step"] for line in read_json_lines(tmp_path / "metrics.jsonl")] == numbers
    assert read_json_lines(tmp_path / "missing.jsonl") == []


def test_a_digest_is_the_sha256_of_the_file(tmp_path):
    content = bytes(range(256)) * 10_000  # more than one chunk
    (tmp_path / "file").write_bytes(content)
    assert file_digest(tmp_path / "file") == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("name", ["file", "file/below/it"])
def test_a_file_is_rejected_where_a_folder_must_be(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--out: .*/file is not a directory; choose another folder"):
        check_writable("--out", tmp_path / name)


def test_a_folder_without_write_permission_is_rejected(tmp_path, monkeypatch):
    check_writable("--out", tmp_path / "new")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # as of another user's folder
    with pytest.raises(UserError, match=f"--out: {tmp_path} is not writable"):
        check_writable("--out", tmp_path / "new")
