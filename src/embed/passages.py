"""Where the passages of a text are, in tokens and in characters."""

import re
from bisect import bisect_left
from collections.abc import Sequence

UNITS = {  # what stands between two passages
    "tokens": None,
    "lines": re.compile(r"\n\s*"),
    "paragraphs": re.compile(r"\n[^\S\n]*\n\s*"),
    "sentences": re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+"),
}
Span = tuple[int, int]


def passage_edges(length: int, special: int, size: int, breaks: Sequence[int] = ()) -> list[int]:
    """Return where a text's passages begin, in ascending order, and its length: there is one at each of `breaks`,
    numbers of tokens in ascending order, and after every `size` tokens. Of the `special` tokens around the text, those
    before it belong to the first passage, and those after it to the last."""
    start, last, edges = special - special // 2, length - special // 2, [0]
    for stop in (*(place for place in breaks if start < place < last), last):
        edges += range(start + size, stop, size)
        edges += [stop] * (stop < last)
        start = stop
    return [*edges, length]


def unit_starts(text: str, offsets: Sequence[Span], special: int, unit: str) -> list[int]:
    """Return the tokens with which lines, paragraphs or sentences begin. `offsets` are the tokens' characters."""
    pattern = UNITS[unit]
    if pattern is None:
        return []
    before, after = special - special // 2, special // 2
    starts = [first for first, _ in offsets[before : len(offsets) - after]]
    found = {before + bisect_left(starts, match.end()) for match in pattern.finditer(text)}
    return sorted(found)


def characters(span: Span, offsets: Sequence[Span], special: int) -> Span:
    """Return the first character of a span of tokens, and the one after its last; special tokens have none."""
    before, after = special - special // 2, special // 2
    inside = offsets[max(span[0], before) : min(span[1], len(offsets) - after)]
    return (inside[0][0], inside[-1][1]) if inside else (0, 0)
