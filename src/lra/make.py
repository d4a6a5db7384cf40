"""Generate data of Long Range Arena in the layout of the release, by its published rules.

    python lra.py make listops --out lra_data                        # 100,000 rows: 620 MB
    python lra.py make listops --out lra_short --rows 20000 1000 1000 --min_length 20 --max_length 100
    python lra.py make pathfinder --out lra_data --size 32 --images 200000 --workers 16

The same options give the same bytes, also after an interruption: the same command resumes. The folder's generated.json
holds the options and marks the data as generated; the release's own rows came from another random seed.
"""

import argparse
import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

from src.cli import check_alone, log
from src.errors import RunFailed, UserError, reason
from src.files import check_writable, exclusive_lock, write_json
from src.lra import listops, pathfinder
from src.lra.sources import RECORD, STARTED


def main(argv: list[str]) -> None:
    check_alone("lra.py make")
    args = parse(argv)
    generator = {"listops": listops, "pathfinder": pathfinder}[args.data]
    options = {"data": args.data, **generator.check(args)}
    check_writable("--out", args.out)
    folder = args.out / generator.name(options)
    try:
        with exclusive_lock(folder, "lra.py make", "--out"):
            if record := start(folder, options, generator, args.overwrite):
                log.info(f"{folder} is finished: nothing to do")
            else:
                content = generator.write(folder, options, getattr(args, "workers", 1))
                record = {"generated": True, "options": options, **content}
                write_json(folder / RECORD, {**record, "sha256": generator.digest(folder, options)})
            (folder / STARTED).unlink(missing_ok=True)
    except OSError as error:
        raise RunFailed(f"cannot write to {folder} ({reason(error)}); fix this, then rerun to resume") from None
    for line in generator.report(folder, record):
        log.info(line)


def parse(argv: list[str]) -> argparse.Namespace:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="lra.py make", description=__doc__, **style)
    commands = parser.add_subparsers(dest="data", required=True, metavar="listops|pathfinder")
    help = "nested lists of digits: 10 classes, 501 to 1,999 tokens"
    add = commands.add_parser("listops", help=help, description=listops.__doc__, **style).add_argument
    add("--out", required=True, type=Path, metavar="DIR", help="writes DIR/listops-1000/basic_{train,val,test}.tsv")
    add(
        "--rows",
        type=int,
        nargs=3,
        default=[96000, 2000, 2000],
        metavar="N",
        help="rows of train, val and test (default: 96000 2000 2000)",
    )
    add("--min_length", type=int, default=500, metavar="L", help="trees are longer than this (default: %(default)s)")
    add("--max_length", type=int, default=2000, metavar="L", help="trees are shorter than this (default: %(default)s)")
    add("--max_depth", type=int, default=10, metavar="T", help="of a tree; the root is at 1 (default: %(default)s)")
    add("--max_args", type=int, default=10, metavar="K", help="arguments of an operator (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="S", help="(default: %(default)s)")
    add("--overwrite", action="store_true", help="replace data that is already there")
    help = "two discs and dashed contours, in grayscale: are the discs the ends of one contour?"
    add = commands.add_parser("pathfinder", help=help, description=pathfinder.__doc__, **style).add_argument
    add("--out", required=True, type=Path, metavar="DIR", help=f"writes DIR/pathfinder{{32,128}}/{pathfinder.LEVEL}")
    add("--size", type=int, required=True, choices=(32, 128), help="pixels per side; 128 is Path-X")
    add("--images", type=int, required=True, metavar="N", help="the release has 200,000")
    add("--seed", type=int, default=0, metavar="S", help="(default: %(default)s)")
    add(
        "--workers", "--num_workers", type=int, default=1, metavar="N", help="processes; the images do not depend on it"
    )
    add("--overwrite", action="store_true", help="replace data that is already there")
    return parser.parse_args(argv)


def start(folder: Path, options: dict[str, Any], generator: Any, overwrite: bool) -> dict[str, Any]:
    """Return the record of finished data with these options, or {} if it is to be written or resumed.

    Raises UserError if the folder holds anything else, unless it is to be overwritten."""
    finished, started = load(folder / RECORD), load(folder / STARTED)
    changed = differing(options, finished.get("options", started))
    held = [name for name in (RECORD, *generator.contents(options)) if (folder / name).exists()]
    if finished and not changed:
        with contextlib.suppress(OSError):
            if generator.digest(folder, options) == finished.get("sha256"):
                return finished
        problem = f"data that has changed since it was generated (see {RECORD})"
    elif not finished and started and not changed:
        if held:
            log.info(f"resuming {folder}")
        return {}
    elif finished or started:
        problem = f"{'data' if finished else 'unfinished data'} of other options ({', '.join(changed)})"
    else:
        problem = f"data that was not generated ({', '.join(held)})"
    if held and not overwrite:
        raise UserError(f"--out: {folder} already holds {problem}; choose another folder or add --overwrite")
    remove(folder, options, generator)
    write_json(folder / STARTED, options)
    return {}


def load(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_bytes())
        return content if isinstance(content, dict) else {}
    return {}


def differing(options: dict[str, Any], before: object) -> list[str]:
    """Return the options, as on a command line, in which data differs from what is asked for."""
    before = before if isinstance(before, dict) else {}
    return [f"--{name} {before.get(name)}" for name in options if before.get(name) != options[name]]


def remove(folder: Path, options: dict[str, Any], generator: Any) -> None:
    """Remove what the generator writes, and nothing else. The record goes first: without it nothing is finished."""
    for name in (RECORD, STARTED, *generator.contents(options)):
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
