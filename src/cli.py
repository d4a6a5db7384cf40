"""What every command of this project shares: its error for the user, its exit status, its log and its progress bar."""

import contextlib
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

log = logging.getLogger("lion")
PATIENCE = 10  # seconds that an error of another process than the main one waits


class UserError(Exception):
    """Something the user gave cannot be used. The message is one sentence: what, where, and the way out."""

    status = 2  # of the process that ends with it


class RunFailed(UserError):
    """A run that began well cannot go on. The message is one sentence too."""

    status = 1


def run(main: Callable[[list[str]], None]) -> None:
    """Run a command's `main(argv)` and end the process.

    Its status is 0 done, 2 the user's mistake, 1 a failure, 130 interrupted, 143 asked to end by SIGTERM.
    """
    start_log()
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(fail(error))
    except KeyboardInterrupt:
        say_interrupted()
        sys.exit(130)
    except SystemExit as end:
        *_, (frame, _) = traceback.walk_tb(end.__traceback__)
        if frame.f_globals["__name__"] == "composer.core.engine":  # its import has set handlers of Ctrl-C and SIGTERM
            say_interrupted()
        raise
    except BrokenPipeError:  # the reader (`| head`) went away: nothing is left to say, nor anyone to say it to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say_interrupted() -> None:
    log.info("interrupted; the same command continues where it stopped")


def start_log() -> None:
    """Log messages as they are, to stderr; of the main process alone."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    log.setLevel(logging.INFO if is_main_process() else logging.ERROR)


def fail(error: UserError) -> int:
    """Say in one line what is wrong, and return the exit status for it."""
    if not is_main_process():
        time.sleep(PATIENCE)  # where the main process has the same error, it says it, and its launcher ends this one
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return error.status


def first_line(error: Exception) -> str:
    """What an error says, in short; its name where it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def is_main_process() -> bool:
    """True in the one process of a distributed launch that speaks and writes (global rank 0)."""
    return int(os.environ.get("RANK", 0)) == 0


def check_writable(name: str, folder: Path) -> None:
    """Raise UserError for a folder, the value of `name`, in which nothing can be written, whether it is there yet or not."""
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not there.is_dir():
        raise UserError(f"{name}: {there} is a file; name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{name}: {there} cannot be written to; name another folder, or change its permissions")


@contextlib.contextmanager
def alone_in(folder: Path, command: str) -> Iterator[None]:
    """Hold a folder for this process, however it ends; one that stays empty is removed again.

    Raises UserError where another process holds it, or it cannot be written.
    """
    from filelock import FileLock, Timeout

    path = folder / ".lock"
    lock = FileLock(path, timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(f"save_folder: another {command} is at work in {folder}; wait for it, or name another folder") from None  # fmt: skip
    except OSError as error:
        raise UserError(f"save_folder: {folder} cannot be written ({error.strerror or error}); name another folder") from None  # fmt: skip
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if os.listdir(folder) == [path.name]:
                path.unlink()
                folder.rmdir()
        lock.release()


def progress(iterable=None, *, total: int | None = None, desc: str = "", unit: str = "it", **options) -> tqdm:
    """A tqdm bar: drawn on a terminal, a line every 30 seconds in a log file, silent off the main process."""
    interactive = sys.stderr.isatty()
    options.setdefault("mininterval", 0.2 if interactive else 30)
    return tqdm(iterable, total=total, desc=desc, unit=unit, disable=not is_main_process(), ascii=not interactive,
                unit_scale=True, dynamic_ncols=interactive, **options)  # fmt: skip
