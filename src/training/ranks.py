"""What the ranks of a distributed run do together: rank 0 decides, and the others do as it says."""

import contextlib
import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

from src.cli import is_main_process, several
from src.errors import RunFailed, UserError, first_line

TOLD = "lion/error"  # the key of the error that ended a rank, in the store that all ranks share
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


@contextlib.contextmanager
def end_as_one(timeout: float) -> Iterator[None]:
    """Let an error of one rank end the others too, with its sentence. Raises RunFailed if a rank ends without one, or
    does not answer within `timeout` seconds."""
    try:
        yield
    except Exception as error:
        if not several() or is_common(error):
            raise
        told = _told(timeout) if _is_of_another(error) else None
        if told is None:
            _tell(error)
        if not is_main_process():  # which ends at once
            _hang_up()
        if told is None:
            raise
        raise told from None


def _tell(error: Exception) -> None:
    """Leave an error for the other ranks, which look for it once this one has hung up."""
    from torch.distributed import DistError, distributed_c10d

    told = _for_others(error)
    with contextlib.suppress(DistError):  # rank 0, whose store it is, has ended
        distributed_c10d._get_default_store().set(TOLD, json.dumps([told.status, str(told)]))


def _told(timeout: float) -> UserError:
    """Return the error that another rank has left, or one that says that there is none."""
    from torch.distributed import DistError, distributed_c10d

    store = distributed_c10d._get_default_store()
    with contextlib.suppress(DistError):  # rank 0, whose store it is, has ended
        if store.check([TOLD]):
            status, sentence = json.loads(store.get(TOLD))
            return UserError(sentence) if status == UserError.status else RunFailed(sentence)
    found = f"another rank ended, or did not answer within dist_timeout={timeout:g} seconds"
    return RunFailed(f"{found}; its error, if it has one, is above")


def _is_of_another(error: BaseException | None) -> bool:
    """Return whether an error, or one that it replaces, is that this rank cannot communicate with another."""
    from torch.distributed import DistError

    while error is not None:
        if isinstance(error, DistError) or "/gloo/" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _hang_up() -> None:
    """Close the connections to ranks that wait for this one. torch does when the process ends, but then a launcher
    kills the others before they can end by themselves."""
    store = int(os.environ["MASTER_PORT"])  # remains, for other ranks' errors
    for number in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile, or never connected
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as connection:
                    internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                    if internet and connection.getpeername()[1] != store:
                        connection.shutdown(socket.SHUT_RDWR)


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
    return None, _for_others(error)


def _for_others(error: Exception) -> UserError:
    """Return what ranks raise for an error of another."""
    known = isinstance(error, UserError)
    return error if known else RunFailed(f"another rank failed ({first_line(error)}); its error is above")
