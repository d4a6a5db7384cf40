"""How the C library deals with memory that was freed. (How large its pages are, `src/__init__.py` says.)"""

import contextlib
import ctypes
import os

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # glibc's malloc.h


def keep_freed_memory() -> None:
    """Have glibc keep what this process frees, rather than return large blocks to the system at once.

    A step on a CPU asks for the blocks that the last one freed, and the system clears each page of them first. The process
    stays as large as it ever was, and grows larger where lengths vary, by up to a quarter in our trials. Does nothing where
    glibc is not, or where the environment has settings of its own (MALLOC_…, GLIBC_TUNABLES).
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)
