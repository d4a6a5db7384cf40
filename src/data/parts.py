"""Parts of a conversion, which different machines write, and the index that makes them one split.

SPLIT/part-3-of-8 is a folder like a split's, for some units of the source. The entry "part" of its split.json holds its
number, their number, the counts to add up, and the command, which must be the same for all parts."""

import bisect
import contextlib
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.errors import UserError

NAME = re.compile(r"\.?part-(\d+)-of-(\d+)(?:\.unfinished)?")


@dataclass(frozen=True)
class Part:
    number: int  # from 1
    of: int

    def __str__(self) -> str:
        return f"part-{self.number:0{len(str(self.of))}}-of-{self.of}"

    @classmethod
    def parse(cls, text: str) -> "Part":
        """Return the part that --part asks for. Raises UserError."""
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(f"--part {text} must be I/N, part I of N, with I from 1 to N, e.g. 1/8")
        return cls(int(match[1]), int(match[2]))

    def units(self, sizes: Sequence[int]) -> range:
        """Return the units of this part, given the sizes of all: those with their middle in its share of the total."""
        ends = list(itertools.accumulate(size + 1 for size in sizes))  # + 1, since a unit may be empty
        owners = [(2 * end - size - 2) * self.of // (2 * ends[-1]) for size, end in zip(sizes, ends)]
        return range(bisect.bisect_left(owners, self.number - 1), bisect.bisect_right(owners, self.number - 1))


def find_parts(folder: Path) -> dict[Path, Part]:
    """Return the folders of a split's parts, finished (`part-…`) or not (`.part-….unfinished`), in order."""
    found = {path: NAME.fullmatch(path.name) for path in folder.glob("*part-*-of-*")}
    parts = {path: Part(int(match[1]), int(match[2])) for path, match in found.items() if match}
    return dict(sorted(parts.items(), key=lambda item: (item[1].of, item[1].number)))


def command_of(folder: Path) -> dict[str, Any] | None:
    """Return the command that wrote a split, or a part, finished or not; None if the folder does not say."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if folder.name.startswith("."):
            return json.loads((folder / "progress.json").read_text())["command"]
        made = json.loads((folder / "split.json").read_text())
        return made["part"]["command"] if "part" in made else made["command"]


def differing(before: dict[str, Any], now: dict[str, Any], known: object) -> str:
    """Return, in words, in which options two commands differ; "" if in none. `known` has options as attributes."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if names == ["revision"] and not Path(now["dataset"]).is_dir():
        return f"from another commit of {now['dataset']} (give --revision {before['revision']})"
    known = {*vars(known)} - {"revision"}  # which may be the latest, or of a folder
    shown = [f"--{name}" if name in known else f"the {name.replace('_', ' ')}" for name in names]
    return f"with different options ({', '.join(shown)})" if names else ""


def check_others(part: Part, folder: Path, command: dict[str, Any], options: object) -> None:
    """Raise UserError unless a split's folder holds nothing but parts of the command's conversion."""
    fix = "choose another --out_root"
    others = {path: other for path, other in find_parts(folder).items() if other != part}
    if folder.with_name(f".{folder.name}.unfinished").exists() or (
        (folder / "index.json").exists() and not find_parts(folder)
    ):
        raise UserError(f"--part: {folder} is converted as a whole, not in parts; {fix}")
    if wrong := next((other.of for other in others.values() if other.of != part.of), None):
        raise UserError(f"--part {part.number}/{part.of}: {folder} holds parts of {wrong}, not {part.of}; {fix}")
    before = next(filter(None, map(command_of, others)), command)  # the others have agreed with each other
    if why := differing(before, command, options):
        raise UserError(f"{folder} holds parts of a conversion {why}; repeat that command, or {fix}")
