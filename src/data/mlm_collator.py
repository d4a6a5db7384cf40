"""Samples → a batch: tokens hidden, one sample a row or several packed in it, rows padded."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from src.data.masking import IGNORED, Masking
from src.lion.modeling_lion import labelled_positions


class MaskingCollator:
    """Samples with a `text`, or with `tokens` as src/token_rows.py writes them, → what a masked language model takes.

    Rows are padded to the longest of the batch, rounded up to a multiple of 8, or to `max_seq_len` with
    `pad_to_max_length`. With `packing`, samples share rows of at most `max_seq_len` tokens, and `seq_idx` keeps them
    apart, as it does the documents of a sample that has several (`begins`). Each sample is masked as it is without
    packing, so the loss is the same.

    A batch has input_ids, attention_mask and labels, (rows, length); with packing also seq_idx, (rows, length), and
    sample_lengths, (rows, most samples of a row): the tokens of each sample, -1 where there is none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_seq_len: int,
        masking: Masking,
        packing: bool = False,
        pad_to_max_length: bool = False,
    ):
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len
        self.masking = masking
        self.packing = packing
        self.pad_to_max_length = pad_to_max_length

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
            # never one column, for which torch.compile would make a graph of its own
            batch["sample_lengths"] = np.full((len(rows), max(2, *map(len, rows))), -1)
            for r, row in enumerate(rows):
                begins = np.concatenate([document_begins(samples[i], lengths[i]) for i in row])
                batch["seq_idx"][r, : len(begins)] = begins
                batch["sample_lengths"][r, : len(row)] = [lengths[i] for i in row]
            # Padding goes with the last document: a sequence of padding alone would have no key to attend to.
            batch["seq_idx"] = batch["seq_idx"].cumsum(1) - 1
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def token_ids(self, samples: Sequence[dict[str, Any]]) -> list[np.ndarray]:
        """Each sample's tokens with the special ones, at most max_seq_len, (length,)."""
        if "tokens" in samples[0]:
            return [sample["tokens"].astype(np.int64) for sample in samples]
        texts = [sample["text"] for sample in samples]
        encoded = self.tokenizer(texts, truncation=True, max_length=self.max_seq_len, return_attention_mask=False)
        return [np.array(ids, np.int64) for ids in encoded["input_ids"]]

    def row_length(self, longest: int) -> int:
        """The length of rows of which the longest has so many tokens."""
        return self.max_seq_len if self.pad_to_max_length else min(-(-longest // 8) * 8, self.max_seq_len)


def document_begins(sample: dict[str, Any], length: int) -> np.ndarray:
    """Whether a document, or the rest of one, begins at a token of the sample, (length,). [CLS] goes with the token after it."""
    begins = np.zeros(length, bool)
    begins[:1] = True
    if "begins" in sample:
        places = sample["begins"]
        begins[places[(places > 1) & (places < length)]] = True
    return begins


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Which samples share a row of `capacity` tokens: from the longest on, each goes to the first row that has room.

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


def sample_count(batch: dict[str, Tensor]) -> int:
    """How many samples a batch is made of: its rows, if they are not packed."""
    return int((batch["sample_lengths"] >= 0).sum()) if "sample_lengths" in batch else len(batch["input_ids"])


def token_counts(batch: dict[str, Any]) -> dict[str, Any]:
    """Real tokens, and those that the loss is a mean over, by the names Composer has for them."""
    if "token_counts" in batch:
        return batch["token_counts"]
    labelled = (batch["labels"] != IGNORED).sum().item()
    # Composer divides by the second.
    return {"total": int(batch["attention_mask"].sum()), "loss_generating": max(float(labelled), 1e-6)}


def split_batch(batch: dict[str, Tensor], microbatch_size: int) -> list[dict[str, Any]]:
    """Microbatches, as many on every device, with about equally many rows each; as many as without packing, if there are the rows.

    A device that packing has left with fewer rows than another fills up with a few tokens without labels: devices that
    exchange something in each microbatch wait for each other. A microbatch brings along what a GPU would have to be waited
    for: its `token_counts`, and `masked_positions`, (labels,), in the flattened rows.
    """
    count = min(-(-sample_count(batch) // microbatch_size), len(batch["input_ids"]))
    splits = zip(*(tensor.tensor_split(count) for tensor in batch.values()))
    parts = [dict(zip(batch, split)) for split in splits]
    if "sample_lengths" in batch:
        parts += [without_labels(batch) for _ in range(most_of_all_devices(count) - count)]
    for part in parts:
        part["token_counts"] = token_counts(part)
        positions = labelled_positions(part["labels"])
        part["masked_positions"] = positions.pin_memory() if part["labels"].is_pinned() else positions
    return parts


def most_of_all_devices(count: int) -> int:
    if not (dist.is_available() and dist.is_initialized()):
        return count
    counts = [0] * dist.get_world_size()
    dist.all_gather_object(counts, count)
    return max(counts)


def without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The smallest batch that counts for nothing: a few tokens of the first row, no label, no sample."""
    part = {name: tensor[:1, :8] for name, tensor in batch.items()}
    nothing = {"labels": IGNORED, "sample_lengths": -1}
    return part | {name: torch.full_like(part[name], value) for name, value in nothing.items()}
