"""Worker processes: map a function over items, with results in order; and the errors of a loader's workers."""

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from src.errors import UserError

QUEUED = 3  # items per process: one being processed, and others so that it never waits


def usable_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(work: Callable[[Any], Any], items: Iterable[Any], workers: int) -> Iterator[tuple[Any, Any]]:
    """Yield (item, work(item)) in order; one worker or item needs no process. Raises UserError if one is killed."""
    items = iter(items)
    first = list(itertools.islice(items, 2))
    items = itertools.chain(first, items)
    if workers == 1 or len(first) < 2:
        yield from ((item, work(item)) for item in items)
        return
    # spawn, since the libraries that read the Hub start threads, which do not survive a fork
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (work,))
    queue = deque()
    try:
        for item in items:
            # Ctrl-C reaches every process of a terminal. The workers started here ignore it; this process ends them.
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            queue.append((item, pool.submit(_work, item)))
            signal.signal(signal.SIGINT, before)
            if len(queue) == QUEUED * workers:
                item, future = queue.popleft()
                yield item, future.result()
        for item, future in queue:
            yield item, future.result()
    except BrokenProcessPool:
        fix = "the same command resumes, if necessary with a smaller --num_workers"
        raise UserError(f"a worker process was killed, perhaps for lack of memory; {fix}") from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def short_errors() -> Iterator[None]:
    """Shorten a UserError of a loader's worker, which has its traceback before the sentence."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).rsplit("UserError: ", 1)[-1].strip()) from None


def _start(work: Callable[[Any], Any]) -> None:
    global _function
    _function = work

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _work(item: Any) -> Any:
    return _function(item)
