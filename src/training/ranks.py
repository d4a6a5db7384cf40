"""What the ranks of a distributed run do together: rank 0 decides, and the others do as it says."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from src.cli import is_main_process, several
from src.errors import RunFailed, UserError, first_line

PATIENCE = 1  # seconds after which a rank that works tells the others that it still does


def decide(function: Callable[[], Any]) -> Any:
    """Return, on every rank, what `function` returns on rank 0, or raise the error that it raises there: the disks of
    other machines may differ, or show a shared file later. It may take longer than `dist_timeout`, and must not
    communicate. Every rank must call this, once torch.distributed is initialized."""
    if not several():
        return function()
    from composer.utils import dist

    def spread(outcome: Any) -> Any:
        outcomes = [outcome]
        dist.broadcast_object_list(outcomes)
        return outcomes[0]

    return _together(function if is_main_process() else None, spread)


def on_rank_0(function: Callable[[], Any]) -> Any:
    """Return what `function` returns on rank 0, where it stays, and None on the others; else as `decide`."""
    found: list[Any] = []
    decide(lambda: found.append(function()))
    return found[0] if found else None


def on_each_machine(function: Callable[[], Any]) -> Any:
    """Return what `function` returns on the first rank of this one's machine, or raise the error that it raises on any
    machine: for downloads. Every rank must call this."""
    if not several():
        return function()
    from composer.utils import dist

    first = dist.get_global_rank() - dist.get_local_rank()

    def spread(outcome: Any) -> Any:
        outcomes = dist.all_gather_object(outcome)
        if None in outcomes:
            return None
        return next((other for other in outcomes if other[1] is not None), outcomes[first])

    return _together(function if dist.get_local_rank() == 0 else lambda: None, spread)


def is_common(error: BaseException) -> bool:
    """Return whether all ranks raise this error."""
    return getattr(error, "common", False)


def _together(function: Callable[[], Any] | None, spread: Callable[[Any], Any]) -> Any:
    """Call `function` in a thread, which a Ctrl-C does not wait for. Meanwhile call `spread` again and again, with None
    until there is an outcome, (value, None) or (None, error), and return once `spread` returns one."""
    work = None
    if function is not None:
        work = Future()
        threading.Thread(target=_call, args=(function, work), daemon=True).start()
    while (outcome := spread(None if work is None else _outcome(work))) is None:
        pass
    if (error := outcome[1]) is not None:
        error = error if work is None or work.exception() is None else work.exception()
        error.common = True
        raise error
    return outcome[0]


def _call(function: Callable[[], Any], work: Future) -> None:
    try:
        work.set_result(function())
    except Exception as error:
        work.set_exception(error)


def _outcome(work: Future) -> tuple[Any, Exception | None] | None:
    if not wait([work], PATIENCE).done:
        return None
    if (error := work.exception()) is None:
        return work.result(), None
    known = isinstance(error, UserError)
    return None, error if known else RunFailed(f"another rank failed ({first_line(error)}); its error is above")
