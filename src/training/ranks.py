"""What the ranks of a distributed run do together: rank 0 decides, and the others do as it says."""

import contextlib
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from src.cli import is_main_process
from src.errors import RunFailed, UserError

PIECE = 2**26  # bytes of a file that are sent at a time


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


@contextlib.contextmanager
def delivered(path: Path | None) -> Iterator[Path | None]:
    """Provide a checkpoint of rank 0, if any, to every rank: under its own path where a rank sees the same file there,
    else as a copy, one per machine, which is deleted in the end."""
    if path is None or not several():
        yield path
        return
    from composer.utils import dist

    size, contents = decide(lambda: (path.stat().st_size, _contents(path)))
    sees = _contents(path) == contents
    machines = dist.all_gather_object(None if sees else dist.get_global_rank() - dist.get_local_rank())
    if not any(machine is not None for machine in machines):
        yield path
        return
    with contextlib.ExitStack() as stack:
        receiver = None if sees else machines.index(machines[dist.get_global_rank()])  # the first such rank there
        receives = receiver == dist.get_global_rank()
        folder = stack.enter_context(tempfile.TemporaryDirectory()) if receives else None
        folders = dist.all_gather_object(folder)
        copy = path if sees else Path(folders[receiver], path.name)
        source = stack.enter_context(path.open("rb")) if is_main_process() else None
        target = stack.enter_context(copy.open("wb")) if receives else None
        for _ in range(0, size, PIECE):
            piece = [None if source is None else source.read(PIECE)]
            dist.broadcast_object_list(piece)
            if target is not None:
                target.write(piece[0])
        if target is not None:
            target.close()
        dist.barrier()
        yield copy
        dist.barrier()


def _contents(path: Path) -> list[tuple[str, int]] | None:
    """The names and checksums in a checkpoint, read from its end; None if there is no such file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [(entry.filename, entry.CRC) for entry in archive.infolist()]
    except (OSError, zipfile.BadZipFile):
        return None
