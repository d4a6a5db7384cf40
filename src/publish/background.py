"""Functions in processes of their own, beside a run. Neither torch nor composer is imported here: before they are, a
process sets its environment."""

import atexit
import contextlib
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from src.errors import UserError, first_line

# As if a launcher had not started the process: it is no rank of a distributed run.
ALONE = dict.fromkeys("RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT".split())
# On a CPU: one thread, which runs when a core is idle, so that it hardly slows training, whose threads wait for each
# other several times per layer.
ASIDE = {"OMP_NUM_THREADS": "1"}
NICENESS = 19


class Worker:
    """`function(*arguments)`, which are pickled, in a process of its own that ends no later than this one, with all
    that it starts.

    Args:
        log: a file for its output, which is otherwise discarded.
        environment: variables to set before anything else, or, if None, to remove.
        aside: run on one thread and only when a core is idle.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *arguments: Any,
        log: Path | None = None,
        environment: Mapping[str, str | None] = {},
        aside: bool = False,
    ):
        context = multiprocessing.get_context("spawn")
        self.receiver, sender = context.Pipe(duplex=False)
        changes = {**ALONE, **(ASIDE if aside else {}), **environment}
        given = (function, arguments, log, changes, NICENESS if aside else 0, sender)
        self.process = context.Process(target=_work, args=given)
        self.process.start()
        sender.close()
        atexit.register(self.kill)  # before multiprocessing waits for it at exit

    def is_running(self) -> bool:
        return self.process.is_alive()

    def failure(self) -> str | None:
        """Wait for its end; return why it failed, or None."""
        self.process.join()
        atexit.unregister(self.kill)
        with contextlib.suppress(EOFError):  # it sent nothing
            return self.receiver.recv()
        status = self.process.exitcode
        return None if status == 0 else f"exit status {status}" if status > 0 else f"killed by signal {-status}"

    def kill(self) -> None:
        """End it and the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):  # its group has ended, or does not exist yet
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        atexit.unregister(self.kill)


def _work(
    function: Callable[..., None],
    arguments: tuple,
    log: Path | None,
    environment: Mapping[str, str | None],
    niceness: int,
    sender: Connection,
) -> None:
    """Be the process."""
    os.setpgrp()  # a Ctrl-C is for the run, which ends this process; in a session of its own, niceness would not count
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(niceness)
    for name, value in environment.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    try:
        with open(log or os.devnull, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        function(*arguments)
    except UserError as error:
        sender.send(first_line(error))
        sys.exit(1)
    except Exception as error:  # such as out of memory
        sender.send(f"{type(error).__name__}: {first_line(error)}")
        traceback.print_exc()
        sys.exit(1)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)  # this process and those that it has started


def run_script(script: Path, arguments: list[str]) -> None:
    """Be `python script arguments`."""
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def hold(checkpoint: Path, link: Path) -> None:
    """Keep a checkpoint, which the run may delete, as `link`: a hard link, or a copy on a disk that has none. A link
    of this name is replaced. Raises OSError."""
    unfinished = link.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    try:
        os.link(checkpoint, unfinished)
    except OSError:
        shutil.copyfile(checkpoint, unfinished)
    unfinished.replace(link)
