"""What every command shares: exit status, log and progress bar."""

import errno
import gc
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable

from tqdm import tqdm

from src.errors import UserError, reason

# A thread of OpenMP that has nothing to do spins for milliseconds, at the cost of every other program on its core.
# 10,000 rounds cover the usual gap between two parallel operations. libgomp reads it when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

log = logging.getLogger("lion")
RANK_DELAY = 10  # seconds
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class _TimmWithoutWandb:
    """Hides wandb from timm, which transformers imports to list its models: importing it takes two seconds."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        importing = getattr(sys.modules.get("timm.utils.summary"), "__spec__", None)
        if name == "wandb" and getattr(importing, "_initializing", False):
            raise ModuleNotFoundError("not for timm", name=name)


sys.meta_path.insert(0, _TimmWithoutWandb)


def run(main: Callable[[list[str]], None]) -> None:
    """Run `main(argv)` and end with status 0, 2 (unusable input), 1 (failure), 130 (Ctrl-C) or 143 (SIGTERM)."""
    start_log()
    # With this set, torch requests 2 MB pages for large tensors on a CPU, which the system clears faster. It reads the
    # variable when it creates its first tensor, which importing transformers' models already does.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        main(sys.argv[1:])
    except UserError as error:
        if not is_main_process():
            time.sleep(RANK_DELAY)  # rank 0 prints the same error first, and its launcher ends this process
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.status)
    except (KeyboardInterrupt, SystemExit) as end:
        # Composer, once it is imported, ends the process where Ctrl-C finds it. A command that exits has said why.
        within = {frame.name for frame in traceback.extract_tb(end.__traceback__)}  # W&B's sys.exit may be the last
        if isinstance(end, SystemExit) and not (end.code == 130 and "sigterm_handler" in within):
            raise
        log.info("interrupted; repeat the command to resume or restart it")
        sys.exit(130)
    except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        print(f"error: cannot write {error.filename or 'a file'} ({reason(error)}); free disk space", file=sys.stderr)
        sys.exit(1)
    finally:
        gc.freeze()  # otherwise Python's last collection visits every object of torch and transformers, for a second


def start_log(level: str = "info") -> None:
    """Print log messages from `level` on (debug, info, warning or error) to stderr; of other ranks than 0, errors."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    log.setLevel(level.upper() if is_main_process() else logging.ERROR)


def is_main_process() -> bool:
    """Return whether this is global rank 0, the one process of a distributed run that prints and writes."""
    return int(os.environ.get("RANK", 0)) == 0


def several() -> bool:
    """Return whether this process is one of several that a launcher has started."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def check_alone(command: str, instead: str = "it runs in one process") -> None:
    """Raise UserError if this process is one of several: each would do all of the work, or a part that none adds up."""
    if several():
        raise UserError(f"start {command} with python, not a launcher; {instead}")


def progress(iterable=None, **options) -> tqdm:
    """Return a tqdm bar: live on a terminal, a line every 30 seconds in a log file, silent off rank 0."""
    live = sys.stderr.isatty()
    style = {"mininterval": 0.2 if live else 30, "unit_scale": True, "ascii": not live, "dynamic_ncols": live}
    return tqdm(iterable, disable=not is_main_process(), **style, **options)
