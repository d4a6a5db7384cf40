"""What the ranks of a distributed run do together: rank 0 decides, and the others do as it says."""

import os
from collections.abc import Callable
from typing import Any

from src.cli import is_main_process
from src.errors import RunFailed, UserError


def several() -> bool:
    """Return whether this process is one of several."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def decide(function: Callable[[], Any]) -> Any:
    """Return, on every rank, what `function` returns on rank 0, or raise the error that it raises there: the disks of
    other machines may differ, or show a shared file later. Every rank must call this, once torch.distributed is
    initialized."""
    if not several():
        return function()
    from composer.utils import dist

    outcome: list[Any] = [None, None]
    if is_main_process():
        try:
            outcome[0] = function()
        except (UserError, RunFailed) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def on_each_machine(function: Callable[[], Any]) -> Any:
    """Return what `function` returns on the first rank of this one's machine, or raise the error that it raises on any
    machine: for what is read from afar. Every rank must call this."""
    if not several():
        return function()
    from composer.utils import dist

    outcome: tuple[Any, Exception | None] = (None, None)
    if dist.get_local_rank() == 0:
        try:
            outcome = function(), None
        except UserError as error:
            outcome = None, error
    outcomes = dist.all_gather_object(outcome)
    if error := next((error for _, error in outcomes if error is not None), None):
        raise error
    return outcomes[dist.get_global_rank() - dist.get_local_rank()][0]
