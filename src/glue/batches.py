"""Examples → batches."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from transformers import PreTrainedTokenizerBase

from src.glue.examples import Example


class Batches:
    """Tokenizes examples and pads them to the longest in the batch, rounded up to a multiple of 8."""

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
        if examples[0].label is None:  # an unlabelled test set
            return dict(batch)
        return {**batch, "labels": torch.tensor([example.label for example in examples], dtype=self.label_dtype)}


class GroupedByLength(Sampler[int]):
    """Draw a new order in each epoch, with texts of similar length in each batch to reduce padding.

    The shuffled examples are sorted by length within chunks of up to 50 batches, at most a quarter of the epoch; then
    the batches are shuffled. An incomplete batch stays last.
    """

    def __init__(self, examples: list[Example], batch_size: int, seed: int):
        self.lengths = [sum(map(len, example.texts)) for example in examples]
        self.batch_size = batch_size
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        size, order = self.batch_size, torch.randperm(len(self), generator=self.generator).tolist()
        rest = order[len(order) // size * size :]
        stretch = size * max(1, min(50, len(order) // (4 * size)))
        batches = []
        for begin in range(0, len(order) - len(rest), stretch):
            near = sorted(order[begin : min(begin + stretch, len(order) - len(rest))], key=self.lengths.__getitem__)
            batches += [near[at : at + size] for at in range(0, len(near), size)]
        for number in torch.randperm(len(batches), generator=self.generator).tolist():
            yield from batches[number]
        yield from rest


def loader(examples: list[Example], batches: Batches, batch_size: int, shuffle_seed: int | None = None) -> DataLoader:
    """Return a loader of all examples; with a seed, their order is new in each epoch."""
    return DataLoader(
        examples,  # type: ignore[arg-type]  # a list is a map-style dataset
        batch_size=batch_size,
        sampler=None if shuffle_seed is None else GroupedByLength(examples, batch_size, shuffle_seed),
        collate_fn=batches,
        pin_memory=torch.cuda.is_available(),
    )
