"""Work in several processes, its results in order."""

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

WAITING = 3  # items a process has been given, at most: one in work, and others so that it never waits


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(
    work: Callable[[Any], Any], items: Iterable[tuple[Any, Any]], workers: int
) -> Iterator[tuple[Any, Any, Any]]:
    """(name, item, work(item)) for each (name, item), in order, the work done by `workers` processes.

    One worker is this process, and so it is if there is but one item. `work` goes to each process once, by pickle. What it
    raises is raised here, in its turn. Raises UserError if a process dies.
    """
    items = iter(items)
    first = list(itertools.islice(items, 2))
    items = itertools.chain(first, items)
    if workers == 1 or len(first) < 2:
        for name, item in items:
            yield name, item, work(item)
        return
    # spawn, since the libraries that read the Hub keep threads, which a fork does not survive
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (work,))
    waiting = deque()
    try:
        for name, item in items:
            with _interrupts_ignored() if len(waiting) < workers else contextlib.nullcontext():  # a process may start
                waiting.append((name, item, pool.submit(_work, item)))
            if len(waiting) == WAITING * workers:
                name, item, future = waiting.popleft()
                yield name, item, future.result()
        for name, item, future in waiting:
            yield name, item, future.result()
    except BrokenProcessPool:
        raise UserError("a worker process was killed, perhaps for want of memory; the same command goes on where it stopped, with a smaller --num_workers if need be") from None  # fmt: skip
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ctrl-C reaches every process of a terminal; those that start meanwhile leave it to this one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_the_work: Callable[[Any], Any]


def _start(work: Callable[[Any], Any]) -> None:
    global _the_work
    _the_work = work
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _work(item: Any) -> Any:
    return _the_work(item)
