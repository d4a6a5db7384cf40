"""Samples → a batch: tokens masked, one sample per row or several packed, rows padded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from src.data.masking import IGNORED, Masking


@dataclass
class MaskingCollator:
    """Samples with `text`, or with `tokens` as src/data/token_rows.py writes them, → inputs of a masked language model.

    Rows are padded to the longest of the batch, rounded up to a multiple of 8, or to `max_seq_len` with
    `pad_to_max_length`. With `packing`, samples share rows of at most `max_seq_len` tokens, and `seq_idx` separates
    them, as it does the documents of one sample (`begins`). Each sample is masked as without packing, so the loss is
    the same.

    A batch has input_ids, attention_mask and labels, (rows, length); with packing also seq_idx, (rows, length), and
    sample_lengths, (rows, max samples per row): the number of tokens of each sample, -1 where there is none.
    """

    tokenizer: PreTrainedTokenizerBase
    max_seq_len: int
    masking: Masking
    packing: bool = False
    pad_to_max_length: bool = False

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        masked = [self.masking(ids, *sample["sample"]) for ids, sample in zip(self.token_ids(samples), samples)]
        lengths = [len(ids) for ids, _ in masked]
        rows = first_fit_decreasing(lengths, self.max_seq_len) if self.packing else [[i] for i in range(len(samples))]
        shape = (len(rows), self.row_length(max(sum(lengths[i] for i in row) for row in rows)))
        batch = {
            "input_ids": np.full(shape, self.tokenizer.pad_token_id),
            "attention_mask": np.zeros(shape, np.int64),
            "labels": np.full(shape, IGNORED),
        }
        for r, row in enumerate(rows):
            end = sum(lengths[i] for i in row)
            batch["input_ids"][r, :end] = np.concatenate([masked[i][0] for i in row])
            batch["labels"][r, :end] = np.concatenate([masked[i][1] for i in row])
            batch["attention_mask"][r, :end] = 1
        if self.packing:
            batch["seq_idx"] = np.zeros(shape, np.int64)
            # never a single column, for which torch.compile would compile a separate graph
            batch["sample_lengths"] = np.full((len(rows), max(2, *map(len, rows))), -1)
            for r, row in enumerate(rows):
                starts = np.concatenate([document_starts(samples[i], lengths[i]) for i in row])
                batch["seq_idx"][r, : len(starts)] = starts
                batch["sample_lengths"][r, : len(row)] = [lengths[i] for i in row]
            # Padding belongs to the last document: a sequence of padding alone would have no key to attend to.
            batch["seq_idx"] = batch["seq_idx"].cumsum(1) - 1
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def token_ids(self, samples: Sequence[dict[str, Any]]) -> list[np.ndarray]:
        """Return each sample's tokens, including special ones, at most max_seq_len, (length,)."""
        if "tokens" in samples[0]:
            return [sample["tokens"].astype(np.int64) for sample in samples]
        texts = [sample["text"] for sample in samples]
        encoded = self.tokenizer(texts, truncation=True, max_length=self.max_seq_len, return_attention_mask=False)
        return [np.array(ids, np.int64) for ids in encoded["input_ids"]]

    def row_length(self, longest: int) -> int:
        """Return the padded length of rows whose longest has `longest` tokens."""
        return self.max_seq_len if self.pad_to_max_length else min(-(-longest // 8) * 8, self.max_seq_len)


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
