"""Load checkpoints without running code from them."""

import contextlib
import datetime
import io
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy
import torch

from src.checkpoints.integrity import check_checkpoint_exists, is_valid_checkpoint
from src.errors import UserError

# What RNG states and times in a checkpoint consist of, besides tensors and plain containers. NumPy 1 and 2 use
# different names for the module of the same functions.
HARMLESS: list[Any] = [datetime.timedelta, torch.torch_version.TorchVersion, numpy.ndarray, numpy.dtype]
HARMLESS += [type(numpy.dtype(kind)) for kind in (numpy.uint32, numpy.int64, numpy.float32, numpy.float64)]
for function in ("_reconstruct", "scalar"):
    for core in ("core", "_core"):
        HARMLESS.append((getattr(numpy._core.multiarray, function), f"numpy.{core}.multiarray.{function}"))


def load_safely(path: Path) -> dict[str, Any]:
    """Return a checkpoint's contents. Raises UserError for a missing, corrupt or unsafe file."""
    check_checkpoint_exists(path)
    try:
        loaded = _load(path)
        if zipfile.is_zipfile(path) and not is_valid_checkpoint(path):  # torch does not compare checksums
            raise ValueError("wrong checksum")
        return loaded
    except Exception as error:  # the unpickler can fail in any way on a file that is not a checkpoint
        if unsafe := _refused_name(error) or next(filter(_is_refused, _imported_names(path)), None):
            raise UserError(f"{path} would execute {unsafe} when loaded; it was not opened") from None
        raise UserError(f"{path} is not a readable checkpoint; copy it again or use an earlier one") from None


def _load(file: Path | io.BytesIO) -> Any:
    with torch.serialization.safe_globals(HARMLESS), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about pickle protocols; loading fails for those that torch cannot read
        return torch.load(file, map_location="cpu", weights_only=True)


# torch.load refuses every import that is not known to be harmless, but its error names the import only for pickle
# protocols 2 and 3. So does torch.serialization.get_unsafe_globals_in_checkpoint, which also needs a zip file. The
# functions below find the name for every protocol.


def _refused_name(error: Exception) -> str | None:
    """Return the "module.name" that torch refused to import, according to its message."""
    found = re.search(r"GLOBAL (\S+) (?:was not|whose module)", str(error))
    return found[1] if found else None


def _is_refused(name: str) -> bool:
    """Return whether torch refuses a pickle that imports "module.name"."""
    try:
        _load(io.BytesIO("c{}\n{}\n.".format(*name.rsplit(".", 1)).encode()))
    except Exception as error:  # always raised, since the pickle holds no tensors
        return _refused_name(error) is not None


class _Inert(dict):
    """A stand-in that does nothing, for everything that a pickle imports."""

    def __init__(self, *_: Any):
        super().__init__()

    def __setstate__(self, _: Any) -> None:
        pass

    add = append = extend = __setstate__


def _imported_names(path: Path) -> list[str]:
    """Return the "module.name" of each import in a file's pickles, of any protocol, without importing them."""
    names = []

    class Reader(pickle._Unpickler):  # pure Python: the C version may allocate gigabytes for a text file
        def find_class(self, module: str, name: str) -> type:
            names.append(f"{module}.{name}")
            return _Inert

        def persistent_load(self, _: Any) -> None:
            return None

    with contextlib.suppress(Exception), path.open("rb") as file:
        if zipfile.is_zipfile(path):
            archive = zipfile.ZipFile(file)
            file = archive.open(next(name for name in archive.namelist() if name.endswith("data.pkl")))
        while True:  # a file that is not a zip is several pickles end to end
            Reader(file, encoding="latin1").load()
    return names
