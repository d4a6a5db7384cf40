"""What is faster on this machine: measured on it, once, with the memory settings of training, and kept in the user's
cache.

A choice may change how results are rounded, so a run keeps the choices that it started with (`chosen`, `adopt`).
"""

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import platform
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

METHOD = 4  # raised when something is measured in another way, so that what was found before is not used
_adopted: dict[str, Any] = {}  # the choices of the run that this process resumes
_keeps_freed_memory = False
_measuring = threading.RLock()  # threads would disturb each other, and could take different choices
_alone = False  # whether this process holds the lock of `alone`
if hasattr(os, "register_at_fork"):  # no thread of the parent would release it
    os.register_at_fork(after_in_child=lambda: globals().update(_measuring=threading.RLock(), _alone=False))


def choice(name: str, measure: Callable[[], Any], version: str = "") -> Any:
    """Return `measure()`, which can be written as JSON, for this machine, this number of threads and this version of
    what is measured; from the cache if it was measured before."""
    if name in _adopted:
        return _adopted[name]
    with _measuring:
        return _choice(name, measure, torch.get_num_threads(), version)


@functools.cache
def _choice(name: str, measure: Callable[[], Any], threads: int, version: str) -> Any:
    try:
        path = private_folder() / f"{name}-{threads}-threads-{digest()}-{METHOD}{version and '-'}{version}.json"
    except (OSError, RuntimeError):  # a home that cannot be written; measured in every process
        return _found(measure)
    if (known := _read(path, name)) is not None:
        return known
    with alone():
        if (known := _read(path, name)) is not None:
            return known  # another process has measured it meanwhile
        corrupt, found = path.exists(), _found(measure)
        _store(path, name, found, threads, corrupt)
        return _read(path, name) or found


def _store(path: Path, name: str, found: Any, threads: int, corrupt: bool) -> None:
    stored = {"processor": processor_name(), "torch": torch.__version__, "threads": threads, name: found}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):  # a full disk
        try:
            temporary.write_text(json.dumps(stored, indent=1))
            if corrupt:
                temporary.replace(path)
            else:
                os.link(temporary, path)
        except FileExistsError:  # a process that cannot wait for others was first, and all take the same choice
            pass
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Wait until no other thread of this process, and no other process with this cache, measures or compiles: they
    would disturb each other. Where files cannot be locked, other processes are not waited for."""
    global _alone
    with _measuring, contextlib.ExitStack() as stack:
        if not _alone:
            with contextlib.suppress(AttributeError, OSError, RuntimeError):
                file = stack.enter_context((private_folder() / ".lock").open("w"))
                fcntl.flock(file, fcntl.LOCK_EX)
                stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open
            _alone = True
            stack.callback(globals().update, _alone=False)
        yield


def _found(measure: Callable[[], Any]) -> Any:
    returned = not _keeps_freed_memory
    keep_freed_memory()  # else the pages of new tensors, which the system zeroes, are measured too
    try:
        return measure()
    finally:
        if returned:
            return_freed_memory()


def keep_freed_memory() -> None:
    """Make glibc keep the memory that this process frees instead of returning large blocks to the system at once. A
    training step requests the blocks that the previous one freed, and the system would zero every page first. The
    process stays at its peak size, which grew by up to a quarter in our trials with varying lengths. Without glibc, or
    with settings in the environment (MALLOC_…, GLIBC_TUNABLES), nothing is done."""
    global _keeps_freed_memory
    _keeps_freed_memory = _set_malloc(mmap_max=0, trim_threshold=-1)


def return_freed_memory() -> None:
    """Undo `keep_freed_memory`. The limits are those that glibc reaches by itself once a large block was freed."""
    global _keeps_freed_memory
    if _keeps_freed_memory:
        _set_malloc(mmap_max=2**16, trim_threshold=2**26, mmap_threshold=2**25)
        ctypes.CDLL(None).malloc_trim(0)
    _keeps_freed_memory = False


def _set_malloc(**settings: int) -> bool:
    """Set options of glibc's malloc; returns whether they may be, and were, set."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    numbers = {"trim_threshold": -1, "mmap_threshold": -3, "mmap_max": -4}  # in malloc.h
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        return all(mallopt(numbers[name], value) for name, value in settings.items())
    return False


def _read(path: Path, name: str) -> Any:
    try:
        return json.loads(path.read_text())[name]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def adopt(choices: dict[str, Any]) -> None:
    """Take these choices from now on, instead of this machine's or earlier ones."""
    _adopted.clear()
    _adopted.update(choices)


def adopted(name: str, default: Any) -> Any:
    return _adopted.get(name, default)


def kept() -> list[Path]:
    """The files of all choices and kernels in the user's cache; none without a home."""
    try:
        return sorted(path for path in cache_folder().glob("*") if path.suffix in (".json", ".so", ".tmp"))
    except RuntimeError:
        return []


def cache_folder() -> Path:
    """Raises RuntimeError without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lion-bert"
    except RuntimeError:
        raise RuntimeError("this user has no home; set XDG_CACHE_HOME to a folder of your own") from None


def private_folder() -> Path:
    """The cache folder, created if need be. Raises RuntimeError if it cannot be, or if another user could have written
    what is in it."""
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or error
        raise RuntimeError(f"{folder} cannot be created ({why}); set XDG_CACHE_HOME to a folder of your own") from error
    state = folder.stat()
    if hasattr(os, "getuid") and state.st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user; set XDG_CACHE_HOME to a folder of your own")
    if hasattr(os, "getuid") and state.st_mode & 0o022:
        raise RuntimeError(f"{folder} can be written by other users; make it private with chmod 700")
    return folder


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
