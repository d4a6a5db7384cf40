"""A device's texts → microbatches of texts of similar length, padded, or packed into shared rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from src.data.batches import first_fit_decreasing
from src.embed.passages import Span

Part = dict[str, Tensor]


def split(lengths: Sequence[int], texts: int | None, tokens: int | None, packing: bool = False) -> list[list[int]]:
    """Return the numbers of each microbatch's texts, from the shortest text to the longest: at most `texts` of them, or
    at most `tokens` in all, unless a single text has more. Without packing, padding counts as tokens, and `tokens` also
    keeps it below half of them."""
    groups: list[list[int]] = [[]]
    total = 0
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        group, total = groups[-1], total + lengths[number]
        size = total if packing else (len(group) + 1) * lengths[number]
        if group and (len(group) == texts or (tokens is not None and (size > tokens or size > 2 * total))):
            groups.append([])
            total = lengths[number]
        groups[-1].append(number)
    return groups


def assemble(
    ids: Sequence[Sequence[int]],
    numbers: Sequence[int],
    pad: int,
    packing: bool,
    spans: Sequence[Span | None] | None = None,
) -> Part:
    """Return a microbatch of some texts: input_ids and attention_mask, (rows, L), with packing also seq_idx, (rows, L);
    if `spans` of any are given, in tokens, pooling_mask, (rows, L), 1 in them and in texts without; and `texts`,
    (texts,), their numbers in reading order."""
    lengths = [len(ids[number]) for number in numbers]
    rows = first_fit_decreasing(lengths, max(lengths)) if packing else [[place] for place in range(len(numbers))]
    shape = (len(rows), max(lengths))
    part = {"input_ids": torch.full(shape, pad), "attention_mask": torch.zeros(shape, dtype=torch.long)}
    starts, pooled = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
    for r, row in enumerate(rows):
        at = 0
        for place in row:
            text = torch.tensor(ids[numbers[place]])
            part["input_ids"][r, at : at + len(text)] = text
            part["attention_mask"][r, at : at + len(text)] = 1
            starts[r, at] = 1
            span = None if spans is None else spans[numbers[place]]
            first, last = span or (0, len(text))
            pooled[r, at + first : at + last] = 1
            at += len(text)
    if packing:
        part["seq_idx"] = starts.cumsum(1) - 1  # padding belongs to the last text
    if spans is not None and any(spans[number] for number in numbers):
        part["pooling_mask"] = pooled
    return part | {"texts": torch.tensor([numbers[place] for row in rows for place in row])}
