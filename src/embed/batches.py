"""Pairs → batches. Which pairs a batch holds depends on (seed, epoch) alone, and a pair's negatives on (seed, epoch,
row): neither workers nor the number of devices change a step, and a resumed run repeats an uninterrupted one."""

import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from composer.utils import dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import PreTrainedTokenizerBase

from src.data.readers import grouped
from src.data.streaming import ignore_signals
from src.embed.beir import Retrieval
from src.embed.microbatches import Part, assemble, split
from src.embed.pairs import Pairs, text_key, tokens_key
from src.embed.passages import Span, cut_around, prompt_tokens, shifted, special_tokens, tokens_of
from src.errors import UserError
from src.files import sha256

ROWS, SOURCES, NEGATIVES = range(3)  # what random numbers are for
PATIENCE = 8  # times the rows of a source, drawn in vain for one batch
Draw = tuple[int, int, int]  # (epoch, source, row)
Item = tuple[int, Sequence[int], Span | None]


def generator(*entropy: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


def shuffled(count: int, *entropy: int) -> np.ndarray:
    """The numbers below `count` in random order, in as few bytes as they need: there may be hundreds of millions."""
    order = np.arange(count, dtype=np.uint32 if count <= 2**32 else np.int64)
    generator(*entropy).shuffle(order)
    return order


class PairDataset(Dataset):
    """Pairs of sources, by Draw. `held_out` are rows of each that training does not see; nor, with `apart`, others of
    their queries. It also holds the position from which an epoch resumes, which Composer stores and restores here."""

    def __init__(self, sources: Sequence[Pairs], seed: int, held_out: int = 0, apart: bool = True):
        self.sources, self.seed = sources, seed
        orders = [shuffled(len(pairs), seed, ROWS, number) for number, pairs in enumerate(sources)]
        self.held_out, self.rows = [order[:held_out] for order in orders], [order[held_out:] for order in orders]
        self.apart, self.repeated = apart, 0  # pairs that are omitted for their query
        if held_out and apart:
            held = np.concatenate([pairs.query_keys[rows] for pairs, rows in zip(sources, self.held_out)])
            for number, pairs in enumerate(sources):
                omitted = np.zeros(len(pairs), bool)
                omitted[pairs.rows_of(held)] = True
                kept = self.rows[number][~omitted[self.rows[number]]]
                self.repeated += len(self.rows[number]) - len(kept)
                self.rows[number] = kept
        self.resume_at = 0  # pairs of the epoch, on all devices, that a resumed run has already seen

    def __len__(self) -> int:
        return sum(map(len, self.rows))

    def __getitem__(self, draw: Draw) -> Draw:
        return draw

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        return {"sample_in_epoch": num_samples, **({"pairs": self.digests} if self.apart else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resume_at = state["sample_in_epoch"]

    @cached_property
    def digests(self) -> dict[str, str]:
        """What the pairs of each source are recognized by."""
        return {
            pairs.name: sha256([np.ascontiguousarray(keys).data for keys in (pairs.query_keys, pairs.document_keys)])
            for pairs in self.sources
        }

    def check_same(self, state: dict[str, Any]) -> None:
        """Raise UserError if the pairs are not those of a `state_dict`: their order would be another, and others held
        out. Earlier versions stored none."""
        if changed := [name for name, digest in state.get("pairs", {}).items() if self.digests.get(name) != digest]:
            found = f"data.{changed[0]}: the pairs have changed since the run began"
            way_out = "start another run from its weights with starting_checkpoint_load_path"
            raise UserError(f"{found}; restore the files, or {way_out}")

    def positives(self, query_key: int) -> np.ndarray:
        """Return the keys of all documents that are pairs of a query, of any source."""
        return np.unique(np.concatenate([pairs.positives(query_key) for pairs in self.sources]))

    def retrieval(self) -> list[Retrieval]:
        """The held-out pairs of each source: their documents are the corpus."""
        found = []
        for pairs, rows in zip(self.sources, self.held_out):
            documents: dict[str, str] = {}
            queries: dict[str, str] = {}
            judged: dict[str, dict[str, int]] = {}
            passages: dict[str, Span] = {}
            for row in rows.tolist():
                query, document, _, passage = pairs[row]
                keys = (text_key(query), text_key(document, passage))
                names = tuple(f"{kind}{key % 2**64:016x}" for kind, key in zip("qd", keys))
                queries[names[0]], documents[names[1]] = query, document
                judged.setdefault(names[0], {})[names[1]] = 1
                if passage is not None:
                    passages[names[1]] = (passage[0], passage[1])
            found.append(Retrieval(pairs.name, documents, queries, judged, 0, passages))
        return found


class Batches(DistributedSampler):
    """The Draws of an epoch, batch by batch: each of one source, or with `mixed` of all. A batch holds no query and no
    document twice; a pair that would repeat one waits for a later batch. Devices take the pairs of a batch in turn."""

    def __init__(self, dataset: PairDataset, batch_size: int, mixed: bool, world_size: int = 1, rank: int = 0):
        super().__init__(dataset, world_size, rank, seed=dataset.seed, drop_last=True)
        self.batch_size, self.mixed = batch_size, mixed
        sizes = [len(rows) // batch_size for rows in dataset.rows]
        self.total = len(dataset) // batch_size if mixed else sum(sizes)
        proportions = [pairs.proportion for pairs in dataset.sources]
        if proportions[0] is None:
            self.counts = sizes  # batches of each source
        else:
            shares = np.cumsum(proportions) / sum(proportions)
            self.counts = np.diff(np.round(shares * self.total).astype(int), prepend=0).tolist()
        few = [number for number, size in enumerate(sizes) if not size]
        if not self.total or (few and not mixed):
            number = few[0] if few and not mixed else 0
            name = "data" if mixed else f"data.{dataset.sources[number].name}"
            count = len(dataset) if mixed else len(dataset.rows[number])
            others = len(dataset) < sum(map(len, dataset.sources))
            to_do = "lower global_train_batch_size or held_out" if others else "lower global_train_batch_size"
            found = f"{name} has {count:,} pairs to train on, and a batch has {batch_size:,}"
            raise UserError(f"{found}; {to_do}, or name more data")

    def __len__(self) -> int:
        return self.total * self.batch_size // self.num_replicas

    def __iter__(self) -> Iterator[Draw]:
        start, self.dataset.resume_at = self.dataset.resume_at // self.batch_size, 0
        for number, batch in enumerate(self.batches()):
            if number >= start:
                yield from batch[self.rank :: self.num_replicas]

    def batches(self) -> Iterator[list[Draw]]:
        """Yield the epoch's batches, for all devices."""
        numbers = range(len(self.dataset.sources))
        if self.mixed:
            filled = self.fill([*numbers])
            for _ in range(self.total):
                yield next(filled)
            return
        order = np.repeat(numbers, self.counts)
        generator(self.seed, SOURCES, self.epoch).shuffle(order)
        filling = {number: self.fill([number]) for number in numbers}
        for number in order.tolist():
            yield next(filling[number])

    def fill(self, sources: list[int]) -> Iterator[list[Draw]]:
        """Yield batches of the pairs of some sources, without end. Raises UserError if one cannot be filled."""
        stream: Iterator[tuple[int, int]] = self.stream(sources)
        waiting: deque[tuple[int, int]] = deque()
        patience = PATIENCE * (sum(len(self.dataset.rows[number]) for number in sources) + self.batch_size)
        while True:
            batch, queries, documents, tried = [], set(), set(), 0
            returning = min(len(waiting), self.batch_size)  # a text that is everywhere would make many wait
            while len(batch) < self.batch_size:
                source, row = waiting.popleft() if tried < returning else next(stream)
                tried += 1
                pairs = self.dataset.sources[source]
                query, document = int(pairs.query_keys[row]), int(pairs.document_keys[row])
                if query in queries or document in documents:
                    waiting.append((source, row))
                else:
                    batch.append((self.epoch, source, row))
                    queries.add(query)
                    documents.add(document)
                if tried > patience:
                    name = "data" if len(sources) > 1 else f"data.{self.dataset.sources[sources[0]].name}"
                    few = f"{name} has too few different queries and documents for batches of {self.batch_size:,} pairs"
                    raise UserError(f"{few}; lower global_train_batch_size")
            yield batch

    def stream(self, sources: list[int]) -> Iterator[tuple[int, int]]:
        """Yield (source, row) in a new order in each pass."""
        starts = [0, *itertools.accumulate(len(self.dataset.rows[number]) for number in sources)]
        for turn in itertools.count():
            for place in map(int, shuffled(starts[-1], self.seed, ROWS, self.epoch, turn, *sources)):
                number = bisect_right(starts, place) - 1
                source = sources[number]
                yield source, int(self.dataset.rows[source][place - starts[number]])


@dataclass
class CutTexts:
    """Counts the texts of a loader's batches, and those that were truncated to the maximum length."""

    queries: int = 0
    documents: int = 0
    cut_queries: int = 0
    cut_documents: int = 0

    def count(self, batch: dict[str, Any]) -> None:
        for name, value in batch["counts"].items():
            setattr(self, name, getattr(self, name) + value)

    def shares(self) -> dict[str, float]:
        shares = {"cut_queries": self.queries, "cut_documents": self.documents}
        return {name: getattr(self, name) / count for name, count in shares.items() if count}

    def __str__(self) -> str:
        shares = self.shares() or {"cut_queries": 0.0, "cut_documents": 0.0}
        cut = f"{shares['cut_queries']:.1%} of the queries and {shares['cut_documents']:.1%} of the documents"
        return f"truncated to the maximum length: {cut}"


class Collator:
    """Draws → a device's batch: `parts`, microbatches; `keys`, (texts − queries, 2), of documents, then negatives, by
    text and as they are read; `positives`, (P, 2), a query's number and the key of the text of a document that is a
    pair of it; and `counts`."""

    def __init__(
        self,
        dataset: PairDataset,
        tokenizer: PreTrainedTokenizerBase,
        limits: tuple[int, int],
        negatives: int,
        microbatch: tuple[int | None, int | None],
        packing: bool,
    ):
        self.dataset, self.tokenizer, self.limits, self.negatives = dataset, tokenizer, limits, negatives
        self.microbatch, self.packing = microbatch, packing

    def __call__(self, draws: Sequence[Draw]) -> dict[str, Any]:
        queries, documents, others = [], [], []  # as `tokenize` takes them
        keys, of_others, positives = [], [], []
        for epoch, source, row in draws:
            pairs = self.dataset.sources[source]
            query, document, negatives, passage = pairs[row]
            before = pairs.prompts.get("document", "")
            queries.append((pairs.prompts.get("query", ""), query, None))
            documents.append((before, document, passage))
            if len(negatives) > self.negatives:
                draw = generator(self.dataset.seed, NEGATIVES, epoch, source, row)
                chosen = draw.choice(len(negatives), self.negatives, replace=False)
                negatives = [negatives[number] for number in chosen]
            others += [(before, text, None) for text in negatives]
            of_others += map(text_key, negatives)
            keys.append(int(pairs.document_keys[row]))
            positives.append(self.dataset.positives(int(pairs.query_keys[row])))
        numbers = np.repeat(np.arange(len(positives)), [*map(len, positives)])
        query_ids, query_spans, cut_queries = tokenize(self.tokenizer, queries, self.limits[0])
        document_ids, spans, cut_documents = tokenize(self.tokenizer, documents + others, self.limits[1])
        as_read = [tokens_key(*document) for document in zip(document_ids, spans)]
        ids, spans = query_ids + document_ids, query_spans + spans
        groups = split([len(text) for text in ids], *self.microbatch, self.packing)
        return {
            "parts": [assemble(ids, group, self.tokenizer.pad_token_id, self.packing, spans) for group in groups],
            "keys": torch.tensor([[*keys, *of_others], as_read]).T,
            "positives": torch.from_numpy(np.stack([numbers, np.concatenate(positives)], 1)),
            "counts": {
                "queries": len(queries), "documents": len(document_ids),
                "cut_queries": cut_queries, "cut_documents": cut_documents,
            },
        }  # fmt: skip


def tokenize(
    tokenizer: PreTrainedTokenizerBase, given: Sequence[tuple[str, str, Span | None]], limit: int
) -> tuple[list[list[int]], list[Span | None], int]:
    """Return the token ids of texts, each given as (prompt, text, passage or None), the tokens of their passages, which
    are given in characters, and how many texts were truncated to `limit`: around their passage, if they have one."""
    options = {"return_attention_mask": False, "return_token_type_ids": False}
    texts = [prompt + text for prompt, text, _ in given]
    if not any(passage for *_, passage in given):
        encoded = tokenizer(texts, truncation=True, max_length=limit, **options)
        return encoded["input_ids"], [None] * len(texts), sum(bool(one.overflowing) for one in encoded.encodings or ())
    special = special_tokens(tokenizer)
    encoded = tokenizer(texts, return_offsets_mapping=True, **options)
    rows, spans = [], []
    for ids, offsets, (prompt, _, passage) in zip(encoded["input_ids"], encoded["offset_mapping"], given):
        span = (0, len(ids)) if passage is None else tokens_of(shifted(passage, len(prompt)), offsets, special)
        kept, span = cut_around(ids, span, limit, special, prompt_tokens(prompt, offsets, special))
        rows.append(kept)
        spans.append(passage and span)
    return rows, spans, sum(len(ids) > limit for ids in encoded["input_ids"])


class PairLoader(DataLoader):
    """A loader that counts what it cuts."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.cut = CutTexts()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in super().__iter__():
            self.cut.count(batch)
            yield batch


def train_loader(
    dataset: PairDataset, collator: Collator, batch_size: int, mixed: bool, num_workers: int
) -> PairLoader:
    """Return batches of `batch_size` pairs for this device. Raises UserError if the data does not fill one."""
    world = dist.get_world_size()
    sampler = Batches(dataset, batch_size * world, mixed, world, dist.get_global_rank())
    return _loader(PairLoader, dataset, batch_size, num_workers, sampler=sampler, collate_fn=collator, drop_last=True)


class EvaluationTexts(Dataset):
    """The tokens of documents and queries, the longest first; each item is (number, ids, span of the passage), the
    number of `Rankings`. Each retrieval has prompts of its own."""

    def __init__(
        self,
        retrievals: list[Retrieval],
        tokenizer: PreTrainedTokenizerBase,
        limits: tuple[int, int],
        prompts: Sequence[dict[str, str]],
    ):
        ids: list[Sequence[int]] = []
        spans: list[Span | None] = []
        self.cut = 0
        for retrieval, own in zip(retrievals, prompts):
            for kind, texts, limit, passages in (
                ("document", retrieval.documents, limits[1], retrieval.spans()),
                ("query", retrieval.queries, limits[0], ()),
            ):
                items = itertools.zip_longest(itertools.repeat(own.get(kind, ""), len(texts)), texts.values(), passages)
                for group in grouped(items, lambda item: len(item[1])):
                    read, of_texts, cut = tokenize(tokenizer, group, limit)
                    ids += (np.array(row, np.int32) for row in read)
                    spans += of_texts
                    self.cut += cut
        self.items = sorted(zip(range(len(ids)), ids, spans), key=lambda item: -len(item[1]))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Item:
        return self.items[place]


def eval_loader(texts: EvaluationTexts, pad: int, batch_size: int) -> DataLoader:
    """Return padded batches of texts for this device, with their `numbers`, (texts,)."""

    def collate(items: list[Item]) -> Part:
        numbers, ids, spans = zip(*items)
        part = assemble(ids, range(len(items)), pad, False, spans)
        return part | {"numbers": torch.tensor(numbers)}

    return _loader(DataLoader, texts, batch_size, 0, sampler=dist.get_sampler(texts), collate_fn=collate)


def _loader(kind: type, dataset: Dataset, batch_size: int, num_workers: int, **options: Any) -> Any:
    return kind(
        dataset,
        batch_size=batch_size,
        num_workers=num_workers,
        worker_init_fn=ignore_signals,
        persistent_workers=num_workers > 0,
        **options,
    )


def count_tokens(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch's or a microbatch's tokens under Composer's names; microbatches have equal shares of the loss."""
    parts = batch.get("parts", [batch])
    return {"total": sum(int(part["attention_mask"].sum()) for part in parts), "loss_generating": float(len(parts))}


def count_samples(batch: dict[str, Any]) -> int:
    """Return the number of pairs, or of texts in evaluation."""
    return batch["counts"]["queries"] if "counts" in batch else len(batch["texts"])


def split_batch(batch: dict[str, Tensor], microbatch_size: int) -> list[dict[str, Any]]:
    return batch.get("parts", [batch])
