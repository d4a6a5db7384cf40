"""Writing the splits of a conversion, one after the other, whatever they hold: planned first, then resumed or started.
A split is written to a hidden folder and renamed when it is complete. An interrupted conversion resumes with the same
command and writes the shards that an uninterrupted one would have written."""

import contextlib
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from src.cli import log
from src.data.parts import command_of, differing
from src.errors import UserError, reason
from src.files import check_writable


@dataclass
class Split:
    """A split to write. `source` has stamps and `changed(stamps, position)`, unless its stamps are None."""

    folder: Path
    source: Any
    command: dict[str, Any]  # every option that the shards depend on
    progress: dict[str, Any] | None  # left by an earlier process
    finished: bool = field(default=False, kw_only=True)  # whether the folder is the result of this command


def check_options(options: Namespace) -> None:
    """Raise UserError unless the splits can be written, or resumed, with options that all conversions have."""
    if not 0 < options.size_limit < 2**32:
        raise UserError(f"--size_limit {options.size_limit} must be between 1 and {2**32 - 1} bytes")
    if options.num_workers < 1:
        raise UserError(f"--num_workers {options.num_workers} must be at least 1")
    if "://" in options.out_root:
        fix = "give a folder, and copy it to the object store afterwards"
        raise UserError(f"--out_root {options.out_root} is not a folder; {fix}")
    check_writable("--out_root", Path(options.out_root))
    if options.part is not None:
        return  # parts may be there, of this command or another
    folders = [Path(options.out_root, split) for split in options.splits]
    if not any(unfinished(folder).exists() for folder in folders):  # else a finished split may be this command's own
        for folder in folders:
            if command_of(folder) is None:
                check_absent(folder, options)


def check_absent(folder: Path, options: Namespace) -> None:
    """Raise UserError for a split that exists and that the command is not to replace."""
    if folder.exists() and not options.overwrite:
        raise UserError(f"{folder} already exists; choose another --out_root, or give --overwrite to replace it")


def unfinished(folder: Path) -> Path:
    """Return where a split is until it is complete."""
    return folder.with_name(f".{folder.name}.unfinished")


def write_all(
    plan: Callable[[], list[Split]], write: Callable[[Any], None], options: Namespace, resumable: bool
) -> None:
    """Plan and write all splits. Raises UserError; ends with status 130 at Ctrl-C. `resumable`: whether the sources can
    be read again."""
    try:
        splits = plan()
        try:
            for split in splits:
                write(split)
        except (UserError, OSError):
            discard_if_empty(splits, options)
            raise
    except KeyboardInterrupt:
        if resumable:
            raise
        log.info("interrupted; standard input and pipes cannot be read again, so the same command starts over")
        sys.exit(130)
    except OSError as error:
        found = f"cannot write {options.out_root}: {reason(error)}"
        raise UserError(f"{found}; free disk space and repeat the command, or choose another --out_root") from None


def start_or_resume(splits: Sequence[Split], options: Namespace) -> list[Split]:
    """Return the splits left to write, with their folders created; none is created if this raises UserError."""
    from src.data.shards import start

    # A command starts all its splits before it writes the first, so a finished split next to a started one is its own.
    resumed = [
        split.progress["splits"] for split in splits if split.progress and split.progress["command"] == split.command
    ]
    left = list(splits)
    for split in splits:
        own = split.finished or any(split.folder.name in names for names in resumed)
        if split.progress is None and split.folder.exists() and own:
            log.info(f"{split.folder}: already written by the same command")
            left.remove(split)
    for split in left:
        split.progress = resumable_progress(split, options)
    for split in left:
        if split.progress is None:
            split.progress = start(unfinished(split.folder), split.command, options.splits, split.source.stamps)
    return left


def resumable_progress(split: Split, options: Namespace) -> dict[str, Any] | None:
    """Return an earlier process's progress if it is of use. Raises UserError if shards or a split would be lost."""
    check_absent(split.folder, options)
    if split.progress is None or not split.progress["shards"]:
        return None
    stamps = split.progress["stamps"]
    why = differing(split.progress["command"], split.command, options)
    if not why:
        changed = split.source.stamps and split.source.changed(stamps, split.progress["state"]["last"])
        if not changed:
            return split.progress
        why = f"{changed} has changed since"
    if not options.overwrite:
        found = f"{unfinished(split.folder)} holds an earlier conversion, but {why}"
        raise UserError(f"{found}; repeat the earlier command on its original data, or give --overwrite to start over")
    return None


def discard_if_empty(splits: list[Split], options: Namespace) -> None:
    """After an error, remove the folders of a command that has written neither a split nor a shard."""
    from src.data.shards import lock, read_progress

    for split in splits:
        if unfinished(split.folder).exists():
            try:
                os.close(lock(unfinished(split.folder)))
            except UserError:  # another command has started the same conversion
                return
    left = [read_progress(unfinished(split.folder)) for split in splits]
    if len(splits) < len(options.splits) or any(progress is None or progress["shards"] for progress in left):
        log.info(f"{options.out_root} keeps what is complete, and the same command resumes")
        return
    for split in splits:
        shutil.rmtree(unfinished(split.folder))
    for folder in (*{split.folder.parent for split in splits}, Path(options.out_root)):
        with contextlib.suppress(OSError):  # it holds other files
            folder.rmdir()
