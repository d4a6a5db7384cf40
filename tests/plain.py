"""Python programs outside the repository that start at once: forked from a server that has imported transformers.

As a script, it is that server: one connection per program. It ends when its socket is deleted.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FIXED = ("HF_ENDPOINT", "HF_HOME", "OMP_NUM_THREADS")  # what libraries read when they are imported
PYTHON = sys.executable
SOCKET = "PLAIN_SERVER"  # the variable with the path of the server's socket, which all processes of a test share


def run(command: list[str], *, cwd: str | Path, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess:
    """Run `python -c program arguments` with captured text, as `subprocess.run` does."""
    offline = env.get("HF_HUB_OFFLINE") == "1" and not env.get("PYTHONPATH")
    if (
        command[0] not in (PYTHON, sys.executable)
        or not offline
        or any(env.get(name) != os.environ.get(name) for name in FIXED)
    ):
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    with connect(env) as connection, tempfile.TemporaryDirectory() as work:
        job = {"command": command[command.index("-c") + 1 :], "cwd": str(cwd), "env": env, "work": work}
        connection.sendall(json.dumps(job).encode() + b"\n")
        status = connection.recv(1)  # nothing if it was killed
        output, errors = (Path(work, name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(command, status[0] if status else -signal.SIGKILL, output, errors)


def connect(env: dict[str, str]) -> socket.socket:
    """Return a connection to the server, which is started if there is none."""
    path, started = os.environ[SOCKET], None
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            return connection
        except OSError:
            connection.close()
            if started is None or started.poll():
                variables = {**env, SOCKET: path, "HF_MODULES_CACHE": "/nowhere"}
                command = [PYTHON, "-W", "ignore", "-I", __file__]
                started = subprocess.Popen(
                    command, env=variables, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            time.sleep(0.05)


def serve() -> None:
    import transformers
    from transformers import dynamic_module_utils
    from transformers.models.auto import image_processing_auto, modeling_auto, tokenization_auto  # noqa: F401

    list(modeling_auto.MODEL_MAPPING.keys())  # imports what each program would otherwise take 4 s to import

    if find_spec("sentence_transformers"):
        import sentence_transformers  # noqa: F401

    gc.freeze()  # so that no garbage collection visits what all programs share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    path = os.environ[SOCKET]
    with socket.socket(socket.AF_UNIX) as server, suppress(OSError):
        server.bind(path)  # two may start at once
        server.listen()
        server.settimeout(1)
        while os.path.exists(path):
            with suppress(TimeoutError):
                connection, _ = server.accept()
                with connection:
                    if os.fork():
                        continue
                    execute(connection, (dynamic_module_utils, transformers.utils.hub))


def execute(connection: socket.socket, modules: tuple[Any, ...]) -> None:
    """Be the program."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.settimeout(None)
    job = json.loads(connection.makefile().readline())
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(job["work"], name), os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    for module in modules:
        module.HF_MODULES_CACHE = job["env"].get("HF_MODULES_CACHE", "/nowhere")
    sys.path.insert(0, "")
    program, *sys.argv[1:] = job["command"]
    status = 1
    try:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    connection.sendall(bytes([status or 0]))
    os._exit(0)


if __name__ == "__main__":
    serve()
