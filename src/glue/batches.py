"""Examples → batches."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from src.glue.sources import Example


class Batches:
    """Collates tokenized examples: padded to the longest of the batch, rounded up to a multiple of 8."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_seq_len: int, regression: bool):
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len
        self.label_dtype = torch.float32 if regression else torch.long

    def __call__(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        batch = self.tokenizer(
            *map(list, zip(*(example.texts for example in examples))),
            truncation=True,
            max_length=self.max_seq_len,
            padding="longest",
            pad_to_multiple_of=8 if self.max_seq_len % 8 == 0 else None,
            return_tensors="pt",
        )
        if examples[0].label is None:  # of a test set
            return dict(batch)
        return {**batch, "labels": torch.tensor([example.label for example in examples], dtype=self.label_dtype)}


def loader(examples: list[Example], batches: Batches, batch_size: int, shuffle_seed: int | None = None) -> DataLoader:
    """Batches of a list of examples; in a new order in every epoch if there is a seed. No example is left out."""
    generator = None if shuffle_seed is None else torch.Generator().manual_seed(shuffle_seed)
    return DataLoader(
        examples,  # type: ignore[arg-type]  # a list is a map-style dataset
        batch_size=batch_size,
        shuffle=shuffle_seed is not None,
        generator=generator,
        collate_fn=batches,
        pin_memory=torch.cuda.is_available(),
    )
