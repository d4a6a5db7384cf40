import os
import platform
import subprocess
import sys

import pytest

from src import memory
from tests.conftest import ROOT

PROGRAM = """
import ctypes, resource, sys
from src.memory import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
size = 2**26
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)
pages = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize()
print(pages / size)
"""


def blocks_asked_of_the_system(how: str, **environment: str) -> float:
    """In which ten blocks of 64 MiB are allocated, one after the other."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], env={**own, **environment}, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this C library is not glibc")
def test_what_is_freed_is_used_again_unless_the_environment_says_how():
    returned = blocks_asked_of_the_system("as it is")
    if returned < 5:
        pytest.skip("this system gives memory in pages too large to count")
    assert blocks_asked_of_the_system("keep") < 1.5
    assert blocks_asked_of_the_system("keep", MALLOC_ARENA_MAX="4") == pytest.approx(returned, rel=0.1)


def test_another_c_library_is_left_alone(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    asked = []
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: asked.append(name) or object())
    memory.keep_freed_memory()
    assert asked
