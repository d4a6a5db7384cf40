"""Joining the parts of a conversion: the split gets an index of all their shards and a summary of all."""

import json
import logging
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from src.cli import log
from src.data.convert import check_documents, in_words, summarize
from src.data.parts import differing, find_parts
from src.errors import UserError, reason
from src.files import check_writable, sync_to_disk, write_atomically, write_json


def merge(options: Namespace, given: list[str]) -> None:
    """Join the parts of the splits in --out_root. Repeating it changes nothing. `given` are the options of the command
    that are not at their defaults. Raises UserError."""
    if others := [name for name in given if name not in ("merge", "out_root", "splits")]:
        raise UserError(f"--{others[0]} is for converting, not for --merge; omit it")
    check_writable("--out_root", Path(options.out_root))
    folders = [Path(options.out_root, split) for split in options.splits]
    checked = [complete_parts(folder, options) for folder in folders]  # all, before any is written
    for folder, parts in zip(folders, checked):
        try:
            merge_split(folder, parts)
        except OSError as error:
            raise UserError(f"cannot write {folder}: {reason(error)}; free disk space and repeat the command") from None


def complete_parts(folder: Path, options: Namespace) -> dict[Path, dict[str, Any]]:
    """Return the folders of a split's parts and what their split.json holds. Raises UserError unless they are all
    there, complete, and of one conversion."""
    parts = find_parts(folder)
    if not parts:
        raise UserError(f"--merge: {folder} has no parts; write them with --part I/N, or name other --splits")
    counts = sorted({part.of for part in parts.values()})
    if len(counts) > 1:
        raise UserError(f"--merge: {folder} holds parts of {counts[0]} and of {counts[1]}; delete one conversion's")
    finished = {path: part.number for path, part in parts.items() if not path.name.startswith(".")}
    if missing := in_ranges({*range(1, counts[0] + 1)} - {*finished.values()}):
        found = f"of the {counts[0]} parts of {folder}, these are missing or unfinished: {missing}"
        raise UserError(f"--merge: {found}; repeat their commands, with --part I/{counts[0]}")
    summaries = {path: read_summary(path) for path in finished}
    first = next(iter(finished))
    stored = [sum(file.stat().st_size for file in path.glob("shard.*")) for path in finished]
    if not any(stored):
        log.info(f"{folder}: no shards, as in a copy of the .json files alone; only these are checked")
    for (path, summary), size in zip(summaries.items(), stored):
        if why := differing(summaries[first]["part"]["command"], summary["part"]["command"], options):
            raise UserError(f"--merge: {path} was converted {why} than {first.name}; delete it and convert it again")
        if any(stored) and size != summary["bytes"]:
            found = f"{path} has {size:,} of its {summary['bytes']:,} bytes of shards"
            raise UserError(f"--merge: {found}; copy it again, or convert it again with --overwrite")
    fraction = summaries[first]["part"]["command"]["val_fraction"]
    check_documents(folder.name, total(summaries.values()), fraction, in_parts=True)
    return summaries


def in_ranges(numbers: Iterable[int]) -> str:
    """Return numbers as a job array takes them, such as 2,5-7."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in ranges)


def read_summary(path: Path) -> dict[str, Any]:
    """Return a part's split.json. Raises UserError unless it and index.json are valid."""
    try:
        json.loads((path / "index.json").read_text())["shards"]
        summary = json.loads((path / "split.json").read_text())
        summary["bytes"], summary["part"]["command"]["val_fraction"], summary["part"]["counts"]
        return summary
    except (OSError, ValueError, KeyError, TypeError):
        found = f"{path}: index.json or split.json is missing or corrupt"
        raise UserError(f"--merge: {found}; copy the part again, or convert it again with --overwrite") from None


def total(summaries: Iterable[dict[str, Any]]) -> Counter:
    return sum((Counter(summary["part"]["counts"]) for summary in summaries), Counter())


def merge_split(folder: Path, parts: dict[Path, dict[str, Any]]) -> None:
    """Write index.json and split.json of a split, unless they are there."""
    first = next(iter(parts.values()))
    sizes = {name: sum(part[name] for part in parts.values()) for name in ("samples", "shards", "bytes")}
    summary = summarize(total(parts.values()), first["source"], first.get("tokens"), **sizes)
    summary |= {"command": first["part"]["command"], "parts": len(parts)}
    index = joined_index(list(parts))
    written = [path.read_bytes() if path.is_file() else b"" for path in (folder / "index.json", folder / "split.json")]
    if written == [index, (json.dumps(summary, indent=1) + "\n").encode()]:
        log.info(f"{folder}: already merged")
        return
    write_json(folder / "split.json", summary)
    write_atomically(folder / "index.json", index)  # last, since it makes the folder a split
    for path in (folder / "split.json", folder / "index.json", folder):
        sync_to_disk(path)
    log.info(f"{folder}: {len(parts)} parts, {in_words(summary)}")


def joined_index(parts: list[Path]) -> bytes:
    """Return the index of all shards of these folders, as streaming joins it."""
    from streaming.base.util import merge_index

    with tempfile.TemporaryDirectory() as work:  # merge_index takes paths for URLs, and does not replace a file
        copies = [Path(work, path.name, "index.json") for path in parts]
        for copy, path in zip(copies, parts):
            copy.parent.mkdir()
            copy.write_bytes((path / "index.json").read_bytes())
        logging.disable(logging.WARNING)  # it warns that it makes a temporary folder
        try:
            merge_index([str(copy) for copy in copies], f"{work}/merged")
        finally:
            logging.disable(logging.NOTSET)
        return Path(work, "merged", "index.json").read_bytes()
