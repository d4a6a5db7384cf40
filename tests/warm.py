"""Commands in processes of their own that start at once: forked from a server that has imported what takes seconds."""

import atexit
import multiprocessing
import os
import resource
import runpy
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def start(script: str, *arguments: object, output: Path, file_size: int | None = None) -> BaseProcess:
    """Start a script of the repository, as `python script arguments` does, as the leader of a process group.

    Args:
        output: a new file for stdout and stderr.
        file_size: the most bytes that the process can write to a file, as on a full disk.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm_imports"])
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if path is None else os.environ.update(PYTHONPATH=path)
    process = context.Process(target=execute, args=(script, [str(value) for value in arguments], output, file_size))
    process.start()
    return process


def run(script: str, *arguments: object, output: Path, **options: int) -> tuple[int, str]:
    """Run a script to its end; return its exit status and output."""
    process = start(script, *arguments, output=output, **options)
    process.join(300)
    if process.is_alive():
        process.kill()
        raise TimeoutError(output.read_text())
    return process.exitcode, output.read_text()


def wait_for(condition: Callable[[], object], process: BaseProcess, seconds: float = 300) -> None:
    """Return once a condition holds. Raises AssertionError if the process ends before."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.is_alive(), "the process ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def execute(script: str, arguments: list[str], output: Path, file_size: int | None) -> None:
    """Be the command."""
    os.setsid()
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends a process without them
