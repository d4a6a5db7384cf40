"""File helpers for all packages: atomic writes, hashes, locks and checks."""

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from src.errors import UserError, reason

# In a run folder, the links to the newest checkpoint, and to that of the best evaluation; or text files with its name.
LATEST, BEST = "latest-rank0.pt", "best-rank0.pt"
METRICS, SUMMARY, CONFIG = "metrics.jsonl", "summary.json", "config.yaml"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name, then rename it: readers see the old content or the new, never a mix. Raises
    OSError, and leaves nothing then."""
    temporary = path.with_name(f"{path.name}.unfinished")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        sync_to_disk(temporary)  # or a power cut could leave the new name without the content
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_json(path: Path, content: Any) -> None:
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def link(path: Path, target: str) -> None:
    """Point a path at a file beside it, atomically: by a link, or, on a file system without, by a file with its name,
    which `follow` reads. Raises OSError."""
    temporary = path.with_name(f"{path.name}.unfinished")
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL):
            raise
        temporary.write_text(f"{target}\n")
    temporary.replace(path)


def follow(path: Path) -> Path:
    """Return the file that `link` pointed a path at, or the path itself if it is no such file."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > 255:
        return path
    name = path.read_bytes().decode(errors="replace").strip()
    return path.with_name(name) if re.fullmatch(r"[\w-][\w.-]*\.pt", name) else path


def is_newer(output: Path, source: Path) -> bool:
    """Whether an output exists and is not older than its source, if that exists."""
    return output.exists() and (not source.exists() or output.stat().st_mtime >= source.stat().st_mtime)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a .jsonl file of objects up to its first line that is damaged; a missing file has none."""
    lines = []
    with contextlib.suppress(FileNotFoundError, ValueError):  # at a truncated line, or after the last newline
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            if not isinstance(found := json.loads(line), dict):
                break
            lines.append(found)
    return lines


def read_result(path: Path, of: dict[str, Any]) -> dict[str, Any] | None:
    """Return a result that was written as {"of": what it depends on, …} if it is there, and of the same."""
    try:
        found = json.loads(path.read_text())
        return found if found.pop("of", None) == of else None
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def sha256(chunks: Iterable[bytes | memoryview]) -> str:
    """Return the SHA-256 of concatenated byte strings, in hexadecimal."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return sha256(iter(lambda: file.read(1 << 20), b""))


def sync_to_disk(path: Path) -> None:
    """Return once a file, or the entries of a directory, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_writable(key: str, folder: Path) -> None:
    """Raise UserError if nothing can be written to a folder, which need not exist yet. `key` is what the user set."""
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not existing.is_dir():
        raise UserError(f"{key}: {existing} is not a directory; choose another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{key}: {existing} is not writable; choose another folder or change its permissions")


@contextlib.contextmanager
def exclusive_lock(folder: Path, command: str, key: str = "save_folder") -> Iterator[None]:
    """Lock a folder for this process; a folder left empty is removed. `key` is what the user set. Raises UserError if
    it is in use."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / ".lock", timeout=0, thread_local=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        found = f"another {command} is running in {folder}"
        raise UserError(f"{key}: {found}; wait for it or choose another folder") from None
    except OSError as error:
        raise UserError(f"{key}: cannot write to {folder} ({reason(error)}); choose another folder") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if os.listdir(folder) == [".lock"]:
                Path(folder, ".lock").unlink()
                folder.rmdir()
        lock.release()


def looks_like_path(name: str) -> bool:
    """Return whether a name is of a file or folder, not of a repository on the Hub."""
    return name.count("/") > 1 or name.startswith((".", "/", "~"))


def distinct(names: list[str], key: str) -> list[str]:
    """Return short titles: the last part of each path, with its folder for a file; or the whole names, if two would
    be equal. Raises UserError for a name that is given twice."""
    if len({*names}) < len(names):
        raise UserError(f"{key}: {next(name for name in names if names.count(name) > 1)} is named twice; omit one")
    paths = [Path(name) for name in names]
    short = [path.resolve().parent.name if path.is_file() else path.resolve().name for path in paths]
    return short if len({*short}) == len(short) else names
