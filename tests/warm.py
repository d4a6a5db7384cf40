"""Commands in processes of their own that start at once: forked from a server that has imported what takes seconds.
What they start is forked from it too: by multiprocessing, and as `sys.executable`, which is then `python()`."""

import atexit
import functools
import json
import multiprocessing
import os
import resource
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from src import cli

ROOT = Path(__file__).resolve().parent.parent
# What libraries read when they are imported: where one differs, `python()` is the real one.
FIXED = """HF_DATASETS_OFFLINE HF_ENDPOINT HF_HOME LION_NATIVE LION_TRITON OMP_NUM_THREADS TRANSFORMERS_OFFLINE
TRITON_INTERPRET XDG_CACHE_HOME""".split()
SERVER = "WARM_SERVER"  # the variable with the server's address
SIGNALS = [int(getattr(signal, f"SIG{name}")) for name in "HUP INT QUIT TERM USR1 USR2".split()]

CLIENT = """#!{real} -IS
import json, os, signal, socket, sys
connection = socket.socket(socket.AF_UNIX)
try:
    if {{name: os.environ.get(name) for name in {names}}} != {fixed}:
        raise OSError
    connection.connect({path!r})
except OSError:
    os.execv({real!r}, [{real!r}, *sys.argv[1:]])
for number in {signals}:
    signal.signal(number, lambda number, _: connection.send(bytes([number])))
job = json.dumps({{"arguments": sys.argv, "cwd": os.getcwd(), "environment": dict(os.environ)}})
socket.send_fds(connection, [job.encode() + b"\\n"], [0, 1, 2])
status = int(connection.makefile().readline() or -signal.SIGKILL)
if status < 0:
    if -status in {signals}:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def start(
    script: str,
    *arguments: object,
    output: Path,
    errors: Path | None = None,
    file_size: int | None = None,
    cwd: Path | None = None,
    **changes: str,
) -> BaseProcess:
    """Start a script of the repository, as `python script arguments` does, as the leader of a process group.

    Args:
        output: a new file for stdout and stderr.
        errors: one for stderr alone.
        file_size: the most bytes that the process can write to a file, as on a full disk.
        cwd: its working directory; default: this process's.
        changes: environment variables.
    """
    given = script, [str(value) for value in arguments], output, errors, file_size, cwd, {**os.environ, **changes}
    return forked(execute, python(), *given)


def forked(target: Callable[..., None], *arguments: object) -> BaseProcess:
    """Start target(the server's address, *arguments) in a process that is forked from the server."""
    share()
    server = forkserver._forkserver
    server._forkserver_address = os.environ[SERVER]
    server.ensure_running = forkserver.ensure_running = lambda: None
    if server._forkserver_alive_fd is None:  # another process's server, which lives as long as that process
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    process = multiprocessing.get_context("forkserver").Process(target=target, args=(os.environ[SERVER], *arguments))
    process.start()
    return process


def share() -> None:
    """Start the server, for this process and those that it starts, unless there is one."""
    if SERVER in os.environ:
        return
    forkserver.set_forkserver_preload(["warm_imports"])
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if path is None else os.environ.update(PYTHONPATH=path)
    os.environ[SERVER] = forkserver._forkserver._forkserver_address


@functools.cache
def python() -> str:
    """Return an executable that runs programs as `sys.executable` does, in processes that are forked from the server.
    It hands signals on to the process group of its program, whose exit status is its own; if it is killed, so is that
    group."""
    work = tempfile.TemporaryDirectory(prefix="warm-")
    atexit.register(work.cleanup)
    executable, path = Path(work.name, "python"), f"{work.name}/socket"
    fixed = {name: os.environ.get(name) for name in FIXED}
    executable.write_text(CLIENT.format(real=sys.executable, names=FIXED, fixed=fixed, path=path, signals=SIGNALS))
    executable.chmod(0o755)
    server = forked(serve, path)
    atexit.register(server.kill)
    wait_for(Path(path).exists, server)
    return str(executable)


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
    address: str,
    executable: str,
    script: str,
    arguments: list[str],
    output: Path,
    errors: Path | None,
    file_size: int | None,
    cwd: Path | None,
    environment: dict[str, str],
) -> None:
    """Be the command."""
    os.setsid()
    for descriptor, file in ((1, output), (2, errors)):
        os.dup2(1 if file is None else os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    if cwd is not None:
        os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    try:
        run_program(address, executable, [str(ROOT / script), *arguments])
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends a process without them


def run_program(address: str, executable: str, arguments: list[str]) -> None:
    """Run `python arguments` in this process, which is forked from the server."""
    server = forkserver._forkserver  # processes of its own are forked from the same
    server._forkserver_address = address
    server.ensure_running = forkserver.ensure_running = lambda: None
    multiprocessing.set_start_method("fork", force=True)  # the default, which a server's processes do not have
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("forkserver" if method == "spawn" else method)
    cli.RANK_DELAY = 0
    loaded = sys.modules
    for name in ("transformers.dynamic_module_utils", "transformers.utils.hub"):
        loaded[name].HF_MODULES_CACHE = f"{os.environ['HF_HOME']}/modules"  # not the one of another worker's tests
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        loaded["huggingface_hub.constants"].HF_HUB_OFFLINE = loaded["transformers.utils.hub"]._is_offline_mode = True
    sys.executable = executable
    program, *sys.argv = arguments
    if program == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif program == "-c":
        exec(compile(sys.argv[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(program, run_name="__main__")


def serve(address: str, path: str) -> None:
    """Fork the programs of `python()` until the socket is deleted or the tests have ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{path}-new")
        server.listen()
        os.rename(f"{path}-new", path)
        server.settimeout(1)
        while os.path.exists(path) and multiprocessing.parent_process().is_alive():
            with suppress(TimeoutError):
                connection, _ = server.accept()
                with connection:
                    if os.fork() == 0:
                        supervise(address, connection)


def supervise(address: str, connection: socket.socket) -> None:
    """Fork one program, hand on its signals, and report its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.settimeout(None)
    text, descriptors = b"", []
    while not text.endswith(b"\n"):
        more, given, *_ = socket.recv_fds(connection, 2**16, 3)
        text, descriptors = text + more, descriptors + given
    if (pid := os.fork()) == 0:
        connection.close()
        program(address, json.loads(text), descriptors)
    ended = os.pidfd_open(pid)
    while ended not in select.select([connection, ended], [], [])[0]:
        number = connection.recv(1)
        with suppress(ProcessLookupError):
            os.killpg(pid, number[0] if number else signal.SIGKILL)
        if not number:
            break
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        connection.sendall(b"%d\n" % status)
    os._exit(0)


def program(address: str, job: dict[str, Any], descriptors: list[int]) -> None:
    """Be the program, to its end."""
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    status, (executable, *arguments) = 1, job["arguments"]
    try:
        run_program(address, executable, arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
