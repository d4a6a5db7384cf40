"""Several samples in one row."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the samples of each row of `capacity` tokens: from the longest on, each goes to the first row with room.

    Raises ValueError for a sample longer than a row.
    """
    if max(lengths) > capacity:
        raise ValueError(f"a sample of {max(lengths)} tokens does not fit in a row of {capacity}")
    rows: list[list[int]] = []
    room = np.full(len(lengths), capacity)
    for i in np.argsort(lengths, kind="stable")[::-1]:
        row = int(np.argmax(room >= lengths[i]))
        if row == len(rows):
            rows.append([])
        rows[row].append(int(i))
        room[row] -= lengths[i]
    return rows


def document_starts(sample: dict[str, Any], length: int) -> np.ndarray:
    """Return where documents start in a sample, (length,) bool. [CLS] belongs to the document of the token after it."""
    starts = np.zeros(length, bool)
    starts[:1] = True
    if "begins" in sample:
        positions = sample["begins"]
        starts[positions[(positions > 1) & (positions < length)]] = True
    return starts
