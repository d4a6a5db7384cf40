"""Check checkpoint files, and load them without running code from them. Torch is imported only to load."""

import argparse
import contextlib
import datetime
import functools
import io
import pickletools
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

from src.errors import UserError
from src.files import follow


def check_checkpoint_exists(path: Path) -> None:
    """Raise UserError unless `path` is a file."""
    if not follow(path).is_file():
        target = path.resolve() if path.is_symlink() else follow(path)
        if target != path:
            raise UserError(f"{path} points at {target}, which is gone; give another checkpoint of the run")
        raise UserError(f"{path} is not a file; give a checkpoint, such as runs/NAME/latest-rank0.pt")


def is_valid_checkpoint(path: Path) -> bool:
    """Return whether a file that torch.save wrote is complete and its checksums match. A process reads it once."""
    try:
        path = follow(path).resolve()
        found = path.stat()
        return _checksums_match(path, found.st_ino, found.st_size, found.st_mtime_ns)
    except OSError:
        return False


@functools.lru_cache(64)
def _checksums_match(path: Path, *_version: int) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError):
        return False


def load_safely(path: Path, mapped: bool = True) -> dict[str, Any]:
    """Return a checkpoint's contents; `mapped` tensors are read when they are used. Raises UserError for a missing,
    corrupt or unsafe file."""
    check_checkpoint_exists(path)
    path = follow(path)
    try:
        if zipfile.is_zipfile(path) and not is_valid_checkpoint(path):  # torch does not compare checksums
            raise ValueError("wrong checksum")
        return _load(path, mapped and zipfile.is_zipfile(path))
    except Exception:  # the unpickler can fail in any way on a file that is not a checkpoint
        if unsafe := next(filter(_is_refused, _imported_names(path)), None):
            raise UserError(f"{path} would execute {unsafe} when loaded; it was not opened") from None
        raise UserError(f"{path} is not a readable checkpoint; copy it again or use an earlier one") from None


def _load(file: Path | io.BytesIO, mapped: bool = False) -> Any:
    import numpy
    import torch

    # RNG states, times and arguments in a checkpoint consist of these, besides tensors and plain containers. NumPy 1
    # and 2 use different names for the module of the same functions.
    harmless: list[Any] = [
        argparse.Namespace,
        datetime.timedelta,
        torch.torch_version.TorchVersion,
        numpy.ndarray,
        numpy.dtype,
    ]
    harmless += [type(numpy.dtype(name)) for name in ("uint32", "int64", "float32", "float64")]
    for name in ("_reconstruct", "scalar"):
        function = getattr(numpy._core.multiarray, name)
        harmless += [(function, f"numpy.{core}.multiarray.{name}") for core in ("core", "_core")]
    with torch.serialization.safe_globals(harmless), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about pickle protocols; loading fails for those that torch cannot read
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped or None)


# Torch refuses every import that is not known to be harmless, but its error, like get_unsafe_globals_in_checkpoint,
# names the import only for pickle protocols 2 and 3. The functions below find the name for every protocol.


def _is_refused(name: str) -> bool:
    try:
        _load(io.BytesIO("c{}\n{}\n.".format(*name.rsplit(".", 1)).encode()))
    except Exception as error:  # always raised, since the pickle holds no tensors
        return re.search(r"GLOBAL \S+ (was not|whose module)", str(error)) is not None


def _imported_names(path: Path) -> list[str]:
    """Return each import in a file's pickles, of any protocol, as "module.name", without importing it."""
    names, strings, memo = [], [], {}
    with contextlib.suppress(Exception), path.open("rb") as file:
        if zipfile.is_zipfile(path):
            archive = zipfile.ZipFile(file)
            file = archive.open(next(name for name in archive.namelist() if name.endswith("data.pkl")))
        while True:  # a file that is not a zip is several pickles end to end
            for opcode, argument, _ in pickletools.genops(file):
                if opcode.name in ("GLOBAL", "INST"):
                    names.append(".".join(argument.rsplit(" ", 1)))
                elif opcode.name == "STACK_GLOBAL":  # takes the last two strings from the stack
                    names.append(".".join(strings[-2:]))
                elif opcode.name == "MEMOIZE" or "PUT" in opcode.name:
                    memo[len(memo) if argument is None else argument] = strings[-1:]
                elif "GET" in opcode.name:
                    strings += memo[argument]
                elif isinstance(argument, str):
                    strings.append(argument)
    return names
