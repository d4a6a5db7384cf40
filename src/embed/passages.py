"""Where the passages of a text are, in tokens and in characters. `special` is the number of special tokens before and
after a text."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

UNITS = {  # what stands between two passages
    "tokens": None,
    "lines": re.compile(r"\n\s*"),
    "paragraphs": re.compile(r"\n[^\S\n]*\n\s*"),
    "sentences": re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+"),
}
Span = tuple[int, int]
Special = tuple[int, int]


def special_tokens(tokenizer: Any) -> Special:
    """Return how many special tokens a tokenizer puts before and after a text."""
    mask = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    before = mask.index(0)
    return before, mask[::-1].index(0)


def passage_edges(length: int, special: Special, size: int, breaks: Sequence[int] = ()) -> list[int]:
    """Return where a text's passages begin, in ascending order, and its length: there is one at each of `breaks`,
    numbers of tokens in ascending order, and after every `size` tokens. Special tokens before the text belong to the
    first passage, and those after it to the last."""
    start, last, edges = special[0], length - special[1], [0]
    for stop in (*(place for place in breaks if start < place < last), last):
        edges += range(start + size, stop, size)
        edges += [stop] * (stop < last)
        start = stop
    return [*edges, length]


def unit_starts(text: str, offsets: Sequence[Span], special: Special, unit: str) -> list[int]:
    """Return the tokens with which lines, paragraphs or sentences begin. `offsets` are the tokens' characters."""
    pattern = UNITS[unit]
    if pattern is None:
        return []
    before, after = special
    stops = [stop for _, stop in offsets[before : len(offsets) - after]]  # a token may start with the space before it
    found = {before + bisect_right(stops, match.end()) for match in pattern.finditer(text)}
    return sorted(found)


def characters(span: Span, offsets: Sequence[Span], special: Special) -> Span:
    """Return the first character of a span of tokens, and the one after its last; special tokens have none."""
    before, after = special
    inside = offsets[max(span[0], before) : min(span[1], len(offsets) - after)]
    return (inside[0][0], inside[-1][1]) if inside else (0, 0)


def shifted(span: Span | None, by: int) -> Span | None:
    """Return a span after `by` more characters, such as those of a prompt."""
    return None if span is None else (span[0] + by, span[1] + by)


def tokens_of(passage: Span, offsets: Sequence[Span], special: Special) -> Span:
    """Return the tokens, at least one, that hold a passage, which is given in characters."""
    before, after = special
    inside = offsets[before : len(offsets) - after]
    first = min(bisect_right([stop for _, stop in inside], passage[0]), len(inside) - 1)
    last = bisect_left([start for start, _ in inside], passage[1])
    return before + first, before + max(last, first + 1)


def prompt_tokens(prompt: str, offsets: Sequence[Span], special: Special) -> int:
    """Return how many tokens of a text are of the prompt that it begins with."""
    before, after = special
    return bisect_right([stop for _, stop in offsets[before : len(offsets) - after]], len(prompt)) if prompt else 0


def cut_around(ids: list[int], span: Span, limit: int, special: Special, prompt: int = 0) -> tuple[list[int], Span]:
    """Return at most `limit` tokens of a text, and where a span of it is in them: special tokens, the first `prompt`
    tokens of the text, up to half of the limit, and the span in the middle; of a longer span, the beginning."""
    if len(ids) <= limit:
        return ids, span
    before, after = special
    before += max(0, min(prompt, (limit - after) // 2 - before, span[0] - before))
    room = limit - before - after
    start = max(min((sum(span) - room) // 2, span[0], len(ids) - after - room), before)
    first = span[0] - start + before
    kept = ids[:before] + ids[start : start + room] + ids[len(ids) - after :]
    return kept, (first, min(span[1] - start, room) + before)
