"""What is faster on this machine: measured on it, once, and kept in the user's cache.

A choice may change how results are rounded, so a run keeps the choices that it started with (`chosen`, `adopt`).
"""

import functools
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_adopted: dict[str, Any] = {}  # the choices of the run that this process continues


def choice(name: str, measure: Callable[[], Any]) -> Any:
    """Return what `measure`, whose result is written as JSON, has found on this machine with this many threads, now or
    earlier."""
    return _adopted[name] if name in _adopted else _choice(name, measure, torch.get_num_threads())


@functools.cache
def _choice(name: str, measure: Callable[[], Any], threads: int) -> Any:
    path = cache_folder() / f"{name}-{threads}-threads-{digest()}.json"
    stored = _read(path)
    if stored is None:
        stored = {"processor": processor_name(), "torch": torch.__version__, "threads": threads, name: measure()}
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
                file.write(json.dumps(stored, indent=1))
            try:
                os.link(file.name, path)  # unless another process was first: all take the same choice
            except FileExistsError:
                stored = _read(path) or stored
            finally:
                os.unlink(file.name)
        except OSError:
            pass  # a home that cannot be written; measured again next time
    return stored[name]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def adopt(choices: dict[str, Any]) -> None:
    """Take these choices for the rest of this process, instead of this machine's."""
    _adopted.update(choices)


def adopted(name: str, default: Any) -> Any:
    return _adopted.get(name, default)


def kept() -> list[Path]:
    """The files of all choices and kernels in the user's cache."""
    return sorted(path for path in cache_folder().glob("*") if path.suffix in (".json", ".so"))


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lion-bert"


@functools.cache
def digest() -> str:
    """Tells processors and versions of torch apart, since machines may share a home directory."""
    return hashlib.sha256("\n".join([_processor(), torch.__version__]).encode()).hexdigest()[:16]


def processor_name() -> str:
    names = [line.partition(":")[2].strip() for line in _processor().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@functools.cache
def _processor() -> str:
    """What Linux says of the processor's model and instructions."""
    names = "model name", "flags", "CPU part", "Features"
    try:
        lines = {line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(names)}
    except OSError:
        lines = {platform.processor()}
    return "\n".join([platform.machine(), *sorted(lines)])
