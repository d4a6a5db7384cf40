"""Samples → batches for a masked language model: masked, packed, padded; and how Composer counts and splits them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from composer.utils import dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from src.errors import UserError
from src.lion.losses import labelled_positions

IGNORED = -100  # the label of a token that is not predicted


@dataclass
class Masking:
    """Hides tokens for masked language modelling (Devlin et al. 2018, section 3.1). Of the tokens that are not special,
    a fraction `mlm_probability` is predicted: 80% of those become [MASK], 10% a random token of the vocabulary, 10%
    stay unchanged. With `whole_words`, the tokens of a word are chosen together. A sample's masks depend on (seed,
    epoch, index) alone; without `every_epoch` (evaluation), on (seed, index)."""

    tokenizer: PreTrainedTokenizerBase
    mlm_probability: float
    seed: int
    every_epoch: bool = True
    whole_words: bool = False

    def __post_init__(self):
        self.mask_id, self.special = self.tokenizer.mask_token_id, np.zeros(len(self.tokenizer), bool)
        self.special[self.tokenizer.all_special_ids] = True
        self.continues = continuation_tokens(self.tokenizer) if self.whole_words else None
        self.draw = np.random.Generator(np.random.Philox())

    def __call__(self, ids: np.ndarray, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a sample's tokens, some of them masked, and their labels, both (length,)."""
        state = self.draw.bit_generator.state  # Philox computes a sample's random numbers from a key and a counter
        state["state"]["key"][:] = self.seed, epoch if self.every_epoch else 0
        state["state"]["counter"][:] = 0, 0, index, 0
        state["buffer_pos"] = len(state["buffer"])  # nothing is left over from the previous sample
        self.draw.bit_generator.state = state
        chance, fate, other = self.draw.random((3, len(ids)))
        if self.continues is not None:
            starts = ~self.continues[ids] | self.special[ids]  # of words; none extends across a special token
            starts[1:] |= self.special[ids[:-1]]
            chance = chance[np.maximum.accumulate(np.where(starts, np.arange(len(ids)), 0))]
        chosen = (chance < self.mlm_probability) & ~self.special[ids]
        masked = np.where(chosen & (fate < 0.8), self.mask_id, ids)
        masked = np.where(chosen & (fate >= 0.9), (other * len(self.special)).astype(np.int64), masked)
        return masked, np.where(chosen, ids, IGNORED)


def continuation_tokens(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return which tokens continue a word, (vocabulary,) bool. Raises UserError unless the tokenizer is WordPiece."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    prefix = getattr(model, "continuing_subword_prefix", None)
    if type(model).__name__ != "WordPiece" or not prefix:
        found = f"{tokenizer.name_or_path} is not a WordPiece tokenizer, which marks the continuation of a word (##)"
        raise UserError(f"whole_word_masking: {found}; set it to false, or choose another tokenizer")
    continues = np.zeros(len(tokenizer), bool)
    continues[[number for token, number in tokenizer.get_vocab().items() if token.startswith(prefix)]] = True
    return continues


@dataclass
class MaskingCollator:
    """Samples with `text`, or with `tokens` as src/data/token_rows.py writes them, → inputs of a masked language model.
    Rows are padded to the longest of the batch, rounded up to a multiple of 8, or to `max_seq_len` with
    `pad_to_max_length`. With `packing`, samples share rows of at most `max_seq_len` tokens, masked as without packing.
    A batch has input_ids, attention_mask and labels, (rows, length). With packing it also has seq_idx, (rows, length),
    the number of each token's sample, or document if the sample has `begins`, in its row; and sample_lengths, (rows,
    max samples per row): the number of tokens of each sample, -1 where there is none."""

    tokenizer: PreTrainedTokenizerBase
    max_seq_len: int
    masking: Masking
    packing: bool = False
    pad_to_max_length: bool = False

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        if "tokens" in samples[0]:
            tokens = [sample["tokens"] for sample in samples]
        else:
            texts = [sample["text"] for sample in samples]
            tokens = self.tokenizer(texts, truncation=True, max_length=self.max_seq_len)["input_ids"]
        masked = [self.masking(np.array(ids, np.int64), *each["sample"]) for ids, each in zip(tokens, samples)]
        lengths = [len(ids) for ids, _ in masked]
        rows = first_fit_decreasing(lengths, self.max_seq_len) if self.packing else [[i] for i in range(len(samples))]
        shape = (len(rows), self.row_length(max(sum(lengths[i] for i in row) for row in rows)))
        batch = {
            "input_ids": np.full(shape, self.tokenizer.pad_token_id),
            "attention_mask": np.zeros(shape, np.int64),
            "labels": np.full(shape, IGNORED),
        }
        if self.packing:
            batch["seq_idx"] = np.zeros(shape, np.int64)
            # never a single column, for which torch.compile would compile a separate graph
            batch["sample_lengths"] = np.full((len(rows), max(2, *map(len, rows))), -1)
        for r, row in enumerate(rows):
            ids, labels = (np.concatenate(parts) for parts in zip(*(masked[i] for i in row)))
            batch["input_ids"][r, : len(ids)] = ids
            batch["attention_mask"][r, : len(ids)] = 1
            batch["labels"][r, : len(ids)] = labels
            if self.packing:
                batch["seq_idx"][r, : len(ids)] = np.concatenate([document_starts(samples[i], lengths[i]) for i in row])
                batch["sample_lengths"][r, : len(row)] = [lengths[i] for i in row]
        if self.packing:
            # Padding belongs to the last document: a sequence of padding alone would have no key to attend to.
            batch["seq_idx"] = (batch["seq_idx"].cumsum(1) - 1).clip(0)  # a text without tokens starts nothing
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def row_length(self, longest: int) -> int:
        """Return the padded length of rows whose longest has `longest` tokens."""
        return self.max_seq_len if self.pad_to_max_length else min(-(-longest // 8) * 8, self.max_seq_len)


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return each row's samples, at most `capacity` tokens: from the longest on, each in the first row with room."""
    if max(lengths) > capacity:
        raise ValueError(f"a sample of {max(lengths)} tokens does not fit in a row of {capacity}")
    rows: list[list[int]] = [[] for _ in lengths]
    room = np.full(len(lengths), capacity)
    for i in np.argsort(lengths, kind="stable")[::-1]:
        row = int(np.argmax(room >= lengths[i]))
        rows[row].append(int(i))
        room[row] -= lengths[i]
    return [row for row in rows if row]


def document_starts(sample: dict[str, Any], length: int) -> np.ndarray:
    """Return where documents start in a sample, (length,) bool. [CLS] belongs to the document of the token after it."""
    starts = np.zeros(length, bool)
    begins = sample.get("begins", np.zeros(0, int))
    starts[:1] = True
    starts[begins[(begins > 1) & (begins < length)]] = True
    return starts


def sample_count(batch: dict[str, Tensor]) -> int:
    """Return the number of samples in a batch: its rows, unless they are packed."""
    return int((batch["sample_lengths"] >= 0).sum()) if "sample_lengths" in batch else len(batch["input_ids"])


def token_counts(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the number of real tokens and of predicted ones, which the loss averages over, under Composer's names."""
    if "token_counts" in batch:
        return batch["token_counts"]
    labelled = (batch["labels"] != IGNORED).sum().item()
    # Composer divides by the second.
    return {"total": int(batch["attention_mask"].sum()), "loss_generating": max(float(labelled), 1e-6)}


def split_batch(batch: dict[str, Tensor], microbatch_size: int) -> list[dict[str, Any]]:
    """Split a batch into microbatches of about equally many rows, as many microbatches as without packing if there are
    enough rows. All devices get the same number, since they may communicate in each: one with fewer packed rows adds
    microbatches without labels. A microbatch carries `token_counts` and `masked_positions`, (labels,), in the flattened
    rows, so that training need not synchronize with the GPU to compute them; for a GPU, which is faster without a mask,
    it has none if all tokens are real."""
    count = min(-(-sample_count(batch) // microbatch_size), len(batch["input_ids"]))
    splits = zip(*(tensor.tensor_split(count) for tensor in batch.values()))
    parts = [dict(zip(batch, split)) for split in splits]
    if "sample_lengths" in batch:
        few = {name: tensor[:1, :8] for name, tensor in batch.items()}  # tokens, but no label and no sample
        few |= {"labels": torch.full_like(few["labels"], IGNORED)}
        few |= {"sample_lengths": torch.full_like(few["sample_lengths"], -1)}
        parts += [dict(few) for _ in range(max(dist.all_gather_object(count)) - count)]
    for part in parts:
        part["token_counts"] = token_counts(part)
        positions = labelled_positions(part["labels"])
        part["masked_positions"] = positions.pin_memory() if part["labels"].is_pinned() else positions
        if part["labels"].is_pinned() and part["attention_mask"].all():
            del part["attention_mask"]
    return parts
