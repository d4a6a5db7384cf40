"""Commands in processes of their own that start at once: forked from a server that has imported what takes seconds."""

import atexit
import multiprocessing
import os
import resource
import runpy
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plain

from src import cli

ROOT = Path(__file__).resolve().parent.parent


def start(
    script: str,
    *arguments: object,
    output: Path,
    errors: Path | None = None,
    file_size: int | None = None,
    cwd: Path | None = None,
    forks: bool = False,
    **changes: str,
) -> BaseProcess:
    """Start a script of the repository, as `python script arguments` does, as the leader of a process group.

    Args:
        output: a new file for stdout and stderr.
        errors: one for stderr alone.
        file_size: the most bytes that the process can write to a file, as on a full disk.
        cwd: its working directory; default: this process's.
        forks: whether what it starts beside itself is forked too, and starts at once.
        changes: environment variables.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm_imports"])
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if path is None else os.environ.update(PYTHONPATH=path)
    process = context.Process(
        target=execute,
        args=(script, [str(value) for value in arguments], output, errors, file_size, cwd, forks, changes),
    )
    process.start()
    return process


def run(script: str, *arguments: object, output: Path, **options: object) -> tuple[int, str]:
    """Run a script to its end; return its exit status and output."""
    return join(start(script, *arguments, output=output, **options)), output.read_text()


def run_ranks(count: int, script: str, *arguments: object, output: Path, **options: Any) -> tuple[list[int], str]:
    """Run a script on several ranks to their end; return their exit statuses and rank 0's output."""
    ranks = start_ranks(count, script, *arguments, output=output, **options)
    return [join(process) for process in ranks], output.read_text()


def start_ranks(
    count: int, script: str, *arguments: object, output: Path, each: Sequence[Sequence[object]] = (), **options: Any
) -> list[BaseProcess]:
    """Start a script on several ranks, as Composer's launcher does. each: more arguments for each rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "NODE_RANK": 0}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    for rank in range(count):
        own = {"RANK": rank, "LOCAL_RANK": rank}
        file = output.with_name(f"{output.name}-{rank}") if rank else output
        variables = {key: str(value) for key, value in (world | own).items()}
        more = each[rank] if each else ()
        processes.append(start(script, *arguments, *more, output=file, **variables, **options))
    return processes


def join(process: BaseProcess, timeout: float = 300) -> int:
    """Wait for a process, and kill it after `timeout` seconds; return its exit status."""
    process.join(timeout)
    process.kill()
    process.join()
    return process.exitcode


def wait_for(condition: Callable[[], object], process: BaseProcess, seconds: float = 300) -> None:
    """Return once a condition holds. Raises AssertionError if the process ends before."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.is_alive(), "the process ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def execute(
    script: str,
    arguments: list[str],
    output: Path,
    errors: Path | None,
    file_size: int | None,
    cwd: Path | None,
    forks: bool,
    changes: dict[str, str],
) -> None:
    """Be the command."""
    os.setsid()
    for descriptor, file in ((1, output), (2, errors)):
        os.dup2(1 if file is None else os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    if cwd is not None:
        os.chdir(cwd)
    os.environ.update(changes)
    cli.RANK_DELAY = 0
    if folder := sys.modules.get("src.publish.folder"):
        folder.subprocess = plain
    if forks:
        import src.jobs.jobs
        import src.jobs.pool
        import src.publish.background

        own = SimpleNamespace(**vars(multiprocessing))
        own.get_context = src.jobs.pool.get_context = lambda method: multiprocessing.get_context("fork")
        src.publish.background.multiprocessing = own
        src.jobs.jobs.start_server = lambda *_: None
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends a process without them
