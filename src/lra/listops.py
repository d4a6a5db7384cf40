"""ListOps rows: nested lists of digits under MIN, MAX, MED and SM (sum modulo 10); the class is the value.

Rules of Tay et al. 2020 (arXiv:2011.04006). A node at depth t (the root is at 1) is an operator with probability ¼, if
t is below the maximum depth, else a digit. An operator has 2 … max_args arguments, each a node at t + 1. MED is the
median, rounded down. A tree's length counts its digits and, twice, its operators (`[MAX` and its `]`).
"""

import hashlib
import re
import statistics
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from src.cli import progress
from src.errors import UserError
from src.files import file_digest, sync_to_disk

VOCABULARY = tuple("[MIN [MAX [MED [SM ] 0 1 2 3 4 5 6 7 8 9".split())  # a token's id is its place: 0 … 14
FILES = {split: f"basic_{split}.tsv" for split in ("train", "val", "test")}
HEADER = b"Source\tTarget\r\n"
ROW = re.compile(rb"([^\t]+)\t([0-9])\r\n")
OPERATOR_RATE = 0.25
MAX_ATTEMPTS = 100_000  # trees drawn for one row


def median(values: Sequence[int]) -> int:
    ordered = sorted(values)
    return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) // 2


OPERATORS: tuple[tuple[str, Callable[[Sequence[int]], int]], ...] = (
    ("[MIN", min), ("[MAX", max), ("[MED", median), ("[SM", lambda values: sum(values) % 10),
)  # fmt: skip


def tokens(source: str) -> list[str]:
    """Return the tokens of a row's source, all in VOCABULARY. Parentheses only group and are dropped."""
    return source.replace("( ", "").replace(" )", "").split(" ")


def evaluate(tokens: Iterable[str], levels: int | None = None, guess: int = 0) -> int:
    """Return the value of an expression by a stack, independently of the generator.

    Args:
        tokens: as `tokens` returns them.
        levels: an operator deeper than this (the root is at 1) counts as `guess`; None: all are computed.

    Raises:
        ValueError: if the tokens are not one expression.
    """
    stack: list[tuple[str, list[int]]] = [("", [])]
    for token in tokens:
        if token in ("[MIN", "[MAX", "[MED", "[SM"):
            stack.append((token, []))
            continue
        if token != "]":
            value = int(token)
        elif len(stack) == 1 or not stack[-1][1]:
            raise ValueError("a ] closes nothing")
        else:
            operator, values = stack.pop()
            if levels is not None and len(stack) > levels:
                value = guess
            elif operator == "[SM":
                value = sum(values) % 10
            elif operator == "[MED":
                value = int(statistics.median(values))
            else:
                value = sorted(values)[0 if operator == "[MIN" else -1]
        stack[-1][1].append(value)
    if len(stack) > 1 or len(stack[0][1]) != 1:
        raise ValueError("not one expression")
    return stack[0][1][0]


def readings(rows: Iterable[tuple[str, int]]) -> dict[str, float]:
    """Return the accuracy, in %, of answers that read only part of an expression: what a score means.

    The most frequent class, and that of the root's operator, are counted on the rows themselves. "k levels" computes
    the upper k levels exactly; all operators below count as one digit, which knows nothing: i modulo 10 in row i.

    Args:
        rows: (source, target).
    """
    targets: Counter[int] = Counter()
    of_operator: dict[str, Counter[int]] = defaultdict(Counter)
    right: Counter[int] = Counter()
    for i, (source, target) in enumerate(rows):
        expression = tokens(source)
        targets[target] += 1
        of_operator[expression[0]][target] += 1
        for levels in range(1, 6):
            right[levels] += evaluate(expression, levels, i % 10) == target
    names = {1: "root's operator and digits", **{levels: f"{levels} levels" for levels in range(2, 6)}}
    counts = {
        "most frequent class": max(targets.values()),
        "root's operator": sum(max(counter.values()) for counter in of_operator.values()),
        **{name: right[levels] for levels, name in names.items()},
    }
    return {name: round(100 * count / targets.total(), 2) for name, count in counts.items()}


def draw_shape(random: Callable[[int], np.ndarray], options: dict[str, Any]) -> list[np.ndarray] | None:
    """Draw a tree's shape, or None once it is certain to be too long, or is too short.

    Returns:
        For each depth, from the root's, the number of arguments of each node, 0 for a digit. (nodes,) int64. The
        arguments of a depth's operators are the nodes of the next, in order.
    """
    shape, nodes, length = [], 1, 0
    for depth in range(1, options["max_depth"] + 1):
        arguments = np.zeros(nodes, np.int64)
        if depth < options["max_depth"]:
            (operators,) = (random(nodes) <= OPERATOR_RATE).nonzero()
            arguments[operators] = 2 + random(len(operators)) * (options["max_args"] - 1)
            length += len(operators)
        shape.append(arguments)
        length += nodes
        nodes = int(arguments.sum())
        if length + nodes >= options["max_length"]:
            return None
        if nodes == 0:
            break
    return shape if length > options["min_length"] else None


def fill_in(shape: list[np.ndarray], random: Callable[[int], np.ndarray]) -> tuple[str, int]:
    """Draw operators and digits for a shape; return its source, in binary applications, and its value."""
    sources: list[str] = []
    values: list[int] = []
    for arguments in reversed(shape):
        symbols = (random(len(arguments)) * np.where(arguments, len(OPERATORS), 10)).astype(np.int64)
        deeper_sources, deeper_values, sources, values, start = sources, values, [], [], 0
        for count, symbol in zip(arguments.tolist(), symbols.tolist()):
            if count:
                (name, compute), end = OPERATORS[symbol], start + count
                sources.append(f"{'( ' * (count + 1)}{name} {' ) '.join(deeper_sources[start:end])} ) ] )")
                values.append(compute(deeper_values[start:end]))
                start = end
            else:
                sources.append(str(symbol))
                values.append(symbol)
    return sources[0], values[0]


def draw_row(key: Sequence[int], seen: set[bytes], options: dict[str, Any]) -> tuple[str, int] | None:
    """Draw trees, which depend on `key` alone, until one has an accepted length and is not in `seen`; add it there.

    Returns:
        Its source and its value, or None after MAX_ATTEMPTS trees.
    """
    random = np.random.Generator(np.random.PCG64(key)).random
    for _ in range(MAX_ATTEMPTS):
        if (shape := draw_shape(random, options)) is not None:
            source, value = fill_in(shape, random)
            if (digest := digest_of(source.encode())) not in seen:
                seen.add(digest)
                return source, value
    return None


def digest_of(source: bytes) -> bytes:
    return hashlib.blake2b(source, digest_size=16).digest()


def read(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield source and target of the rows of a file, up to the first truncated one. Raises OSError."""
    with path.open("rb") as file:
        if file.readline() == HEADER:
            for line in file:
                if (row := ROW.fullmatch(line)) is None:
                    return
                yield row[1], int(row[2])


def name(options: dict[str, Any]) -> str:
    return "listops-1000"


def contents(options: dict[str, Any]) -> list[str]:
    return [name for file in FILES.values() for name in (file, unfinished(file))]


def unfinished(name: str) -> str:
    return f".{name}.unfinished"


def check(args: Namespace) -> dict[str, Any]:
    """Return the options that the rows depend on. Raises UserError for impossible ones."""
    options = {key: vars(args)[key] for key in ("rows", "min_length", "max_length", "max_depth", "max_args", "seed")}
    nodes, largest = 1, 0
    for _ in range(args.max_depth - 1):
        if largest + nodes <= args.min_length:
            largest, nodes = largest + 2 * nodes, nodes * args.max_args
    for wrong, message in (
        (min(args.rows) < 1, f"--rows {' '.join(map(str, args.rows))}: each split must have at least 1 row"),
        (args.max_depth < 2, f"--max_depth {args.max_depth} must be at least 2"),
        (args.max_args < 2, f"--max_args {args.max_args} must be at least 2"),
        (args.seed < 0, f"--seed {args.seed} must not be negative"),
        (
            args.max_length - args.min_length < 2,
            f"--max_length {args.max_length} must be at least --min_length {args.min_length} + 2: both are excluded",
        ),
        (
            largest + nodes <= args.min_length,
            f"--min_length {args.min_length}: the largest tree of depth {args.max_depth} with {args.max_args} "
            f"arguments has length {largest + nodes}; lower it, or raise --max_depth or --max_args",
        ),
    ):
        if wrong:
            raise UserError(message)
    return options


def write(folder: Path, options: dict[str, Any], workers: int) -> dict[str, Any]:
    """Write the three files, or what is left to write of them; return what generated.json says of them.

    Row i of a split is drawn from (seed, split, i). The test split comes first and train last, so that the test rows
    stay the same with more training rows. Raises UserError if there are too few trees, OSError."""
    seen: set[bytes] = set()
    with progress(total=sum(options["rows"]), desc="ListOps", unit=" rows") as bar:
        for number, file in reversed([*enumerate(FILES.values())]):
            count, final, part = options["rows"][number], folder / file, folder / unfinished(file)
            found, size = 0, len(HEADER)
            for source, _ in read(final if final.exists() else part) if final.exists() or part.exists() else ():
                seen.add(digest_of(source))
                found, size = found + 1, size + len(source) + len(b"\t0\r\n")
            bar.update(found)
            bar.initial += found
            if final.exists():
                continue
            with part.open("r+b" if part.exists() else "wb") as output:
                if found == 0:
                    output.write(HEADER)
                output.truncate(size)
                output.seek(size)
                for i in range(found, count):
                    if (row := draw_row((options["seed"], number, i), seen, options)) is None:
                        limits = f"--min_length {options['min_length']} --max_length {options['max_length']}"
                        raise UserError(
                            f"{limits}: after {len(seen):,} rows, {MAX_ATTEMPTS:,} draws gave no new tree of that "
                            "length; widen the limits or reduce --rows, and add --overwrite"
                        )
                    output.write(b"%s\t%d\r\n" % (row[0].encode(), row[1]))
                    bar.update()
            sync_to_disk(part)
            part.replace(final)
    splits = {split: describe(folder / file) for split, file in FILES.items()}
    score = readings((source.decode(), target) for source, target in read(folder / FILES["test"]))
    return {"splits": splits, "readings of test, %": score}


def describe(path: Path) -> dict[str, Any]:
    """Return the number of rows of a file, their mean length and the share of each class in %."""
    classes, length = np.zeros(10, np.int64), 0
    for source, target in read(path):
        classes[target] += 1
        length += source.count(b"(") + 1  # a ( per operator and argument; all nodes but the root are arguments
    rows = int(classes.sum())
    shares = (100 * classes / rows).round(2).tolist()
    return {"rows": rows, "mean length": round(length / rows, 1), "classes, %": shares}


def digest(folder: Path, options: dict[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of each file. Raises OSError."""
    return {file: file_digest(folder / file) for file in FILES.values()}


def report(folder: Path, record: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that end the command."""
    for split, file in FILES.items():
        found = record["splits"][split]
        shares = " ".join(f"{share:.1f}" for share in found["classes, %"])
        yield f"{folder / file}: {found['rows']:,} rows, mean length {found['mean length']:,}, classes {shares} %"
    score = ", ".join(f"{name} {value:.1f} %" for name, value in record["readings of test, %"].items())
    yield f"test accuracy of computing only part of each expression, exactly: {score}"
