"""Samples straight from a dataset on the Hugging Face Hub: those that src/convert_dataset.py would write to shards.
They are read, distributed to processes, shuffled and resumed without knowing how many there are."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.utils import dist
from streaming.base.format.mds.encodings import mds_decode
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from src.data.batches import MaskingCollator
from src.data.config import DatasetConfig, LoaderConfig
from src.data.convert import SPLITS, prepare
from src.data.corpora import HubDataset
from src.data.readers import Batch
from src.data.streaming import ANOTHER_RUN, READ_THE_SAME, TextDataLoader, open_loader
from src.data.token_rows import Packer, RowMaker
from src.errors import UserError

BLOCK = 10_000  # samples shuffled together, unless shuffle_block_size is set: 20 MB of C4
START = {"file": 0, "position": None, "documents": 0, "dealt": 0, "samples": 0, "waiting": None}  # of an epoch
DEVICE_START: dict[str, Any] = {"next_worker": 0, "places": {}}
FORMAT = 2  # of positions; raise it if documents are distributed or places written in another way

Place = dict[str, Any]  # where a reader starts to read a block of samples


class Source(HubDataset):
    """A dataset that a loader reads."""

    key, set_column = "dataset.hub", "; set dataset.text_column"
    fix = "check the name, the split and the connection, and repeat the command"


class HubSamples(IterableDataset):
    """Samples of a split: `text`, or `tokens` and `begins` with `concat_tokens`; and "sample": (epoch, index).

    Each worker of each device is a reader. In training, each reads an equal share of the list of files; if it has a
    fraction of a file, it takes that fraction of the file's documents. In evaluation, and for a split that is the first
    documents of another, every reader makes all samples and keeps those of its turns, `turn` samples each: with
    `batch_size`, the first batches of all devices are the first samples, however many readers there are.

    A reader shuffles its samples block by block. It can resume at a block, so `place` of a sample is (worker, where its
    block starts, samples taken of the block).

    The main process follows the places of the batches that it has got from each worker; a checkpoint has those of all
    devices, and the worker that gives the next batch."""

    def __init__(
        self, options: DatasetConfig, tokenizer: PreTrainedTokenizerBase, workers: int, batch_size: int | None = None
    ):
        """batch_size: of evaluation; None: the samples are for training."""
        self.options, self.workers = options, max(1, workers)
        self.rank, self.devices = dist.get_global_rank(), dist.get_world_size()
        split, self.limit = SPLITS.get(options.split, (options.split, None))
        self.validation = split == "validation"
        self.by_turns, self.turn = batch_size is not None or self.limit is not None, batch_size or 1
        self.source = open_source(options)
        self.rows = None
        if options.concat_tokens:
            self.rows = RowMaker.of(tokenizer, "concat_tokens", options.max_seq_len, "dataset.concat_tokens")
        self.block = (options.shuffle_block_size or BLOCK) if options.shuffle else 1
        self.epoch = torch.tensor(-1).share_memory_()  # the current one, also for workers that stay
        self.resumes_at, self.start = 0, DEVICE_START  # the epoch and this device's places in it to start from
        self.reached = DEVICE_START  # by this device's batches in the current epoch

    def begin_epoch(self) -> bool:
        """Begin the next epoch, in the main process, before its workers do. Return whether it begins at its start."""
        self.epoch += 1
        self.reached = self.start if self.epoch == self.resumes_at else DEVICE_START
        return not self.reached["places"]

    def follow(self, place: tuple[int, Place, int]) -> None:
        """Note the place of a batch's last sample, in the main process."""
        worker, *reached = place
        places = {**self.reached["places"], worker: reached}
        self.reached = {"next_worker": (worker + 1) % self.workers, "places": places}

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """Return the position of all devices, each of which must call this. `num_samples`: those of this epoch."""
        inside = num_samples > 0
        return {
            "format": FORMAT,
            "revision": self.source.description["revision"],
            "epoch": max(int(self.epoch) + (not inside), self.resumes_at),
            "workers": self.workers,
            "devices": dist.all_gather_object(self.reached if inside else DEVICE_START),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`. Raises UserError for one of another kind, revision or number of readers, or of an
        earlier version within an epoch."""
        name = self.options.hub
        if "devices" not in state:
            raise UserError(f"dataset.hub={name}, but the checkpoint's position is in shards; {READ_THE_SAME}")
        before, now = state["revision"], self.source.description["revision"]
        if before != now:
            fix = f"set train_loader.dataset.revision={before}"
            fix = f"restore its files, or {ANOTHER_RUN}" if Path(name).is_dir() else fix
            raise UserError(f"{name} has changed since the checkpoint, to {now}; {fix}")
        inside = any(device["places"] for device in state["devices"])
        if inside and state.get("format") != FORMAT:
            found = f"the checkpoint's position within an epoch of {name} is of another version"
            raise UserError(f"{found}; {ANOTHER_RUN}")
        counts = len(state["devices"]), state["workers"]
        if inside and counts != (self.devices, self.workers):
            found = f"{self.devices} devices with {self.workers} loader workers cannot resume within an epoch of {name}"
            raise UserError(
                f"{found} that {counts[0]} with {counts[1]} started; use as many (train_loader.num_workers)"
            )
        self.resumes_at = state["epoch"]
        self.start = self.reached = state["devices"][self.rank] if inside else DEVICE_START
        self.epoch.fill_(self.resumes_at - 1)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        epoch, seed, info = int(self.epoch), self.options.seed, get_worker_info()
        device = self.start if epoch == self.resumes_at else DEVICE_START
        worker = ((info.id if info else 0) + device["next_worker"]) % self.workers
        reader, readers = worker * self.devices + self.rank, self.devices * self.workers
        files = list(range(len(self.source.sizes)))
        if self.options.shuffle and self.limit is None:
            files = [files[number] for number in np.random.default_rng((seed, epoch)).permutation(len(files))]
        start, taken = device["places"].get(worker, (START, 0))
        for place, samples in self._blocks(files, reader, readers, start):
            order = np.arange(len(samples))
            if self.options.shuffle:
                order = np.random.default_rng((seed, epoch, reader, place["samples"])).permutation(order)
            for number in range(taken, len(samples)):
                turn, rest = divmod(place["samples"] + number, self.turn)
                index = (turn * readers + reader) * self.turn + rest  # if by turns, among those of all readers
                yield {**samples[order[number]], "sample": (epoch, index), "place": (worker, place, number + 1)}
            taken = 0

    def _blocks(
        self, files: Sequence[int], reader: int, readers: int, start: Place
    ) -> Iterator[tuple[Place, list[dict[str, Any]]]]:
        """Yield blocks of a reader's samples in the order of the files, each with the place to read it again from."""
        own = range(len(files)) if self.by_turns else share(len(files), reader, readers)
        packer = self.rows and Packer(self.rows, start["waiting"])
        documents, dealt, samples = start["documents"], start["dealt"], start["samples"]
        block, last = [], start["file"]

        def add(made: Iterable[dict[str, Any]]) -> None:
            nonlocal dealt
            for sample in made:
                if not self.by_turns or dealt // self.turn % readers == reader:
                    block.append(sample)
                dealt += 1

        for number, batch in batches(self.source, files, own, start):
            if number != last:
                add(self._rows(packer.last_sample()) if packer else ())  # no row has documents of two files
                documents = documents if self.by_turns else 0  # before the batch: of all files, else of its own
            last = number
            if len(block) >= self.block:
                yield start, block
                samples += len(block)
                block = []
            if not block:
                start = {"file": number, "position": batch.position, "documents": documents, "dealt": dealt}
                start |= {"samples": samples, "waiting": packer and packer.state()}
            _, texts, _ = prepare(None, self.options.val_fraction, self.validation, [batch])
            texts = texts[: None if self.limit is None else self.limit - documents]
            kept = texts
            if not self.by_turns:
                kept = [t for d, t in enumerate(texts, documents) if owner(number, d, len(files), readers) == reader]
            documents += len(texts)
            add(self._rows(packer.samples(list(filter(None, self.rows(kept)[0])))) if packer else map(as_text, kept))
            if documents == self.limit:
                break
        add(self._rows(packer.last_sample()) if packer else ())
        if block:
            yield start, block

    def _rows(self, samples: Iterator[dict[str, bytes]]) -> Iterator[dict[str, np.ndarray]]:
        """Decode rows as a shard's reader does."""
        for sample in samples:
            yield {name: mds_decode(self.rows.columns[name], data) for name, data in sample.items()}


def as_text(text: str) -> dict[str, str]:
    return {"text": text}


def open_source(options: DatasetConfig) -> Source:
    """Return the dataset that a loader reads, at a commit. Raises UserError."""
    if options.val_fraction is not None and options.split not in SPLITS:
        raise UserError(f"dataset.val_fraction divides train into {', '.join(SPLITS)}, not {options.split}; omit it")
    split, _ = SPLITS.get(options.split, (options.split, None))
    split = split if options.val_fraction is None else "train"
    return Source(options.hub, options.data_subset, split, options.text_column, options.revision)


def batches(source: HubDataset, files: Sequence[int], own: range, start: Place) -> Iterator[tuple[int, Batch]]:
    """Yield the batches of a reader's own files from a place on, each with its file's place in the list of all."""
    position = start["position"]
    for number in range(max(own.start, start["file"]), own.stop):
        yield from ((number, batch) for batch in source.batches(files[number], position))
        position = None


def share(files: int, reader: int, readers: int) -> range:
    """Return which files of a list one of several readers reads, some of them in part."""
    return range(reader * files // readers, -(-(reader + 1) * files // readers))


def owner(file: int, document: int, files: int, readers: int) -> int:
    """Return the reader of a file's document: the list of files, each of `readers` pieces, is cut into equal shares,
    and a file's documents go to its pieces in turn."""
    return (file * readers + document % readers) // files


class PlacedCollator(MaskingCollator):
    """Adds the place of a batch's last sample."""

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {**super().__call__(samples), "place": samples[-1]["place"]}


class HubDataLoader(TextDataLoader):
    """Follows where the batches are from. Devices end an epoch together, once one of them has no batch."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        empty = self.dataset.begin_epoch()
        for batch in super().__iter__():
            empty = False
            self.dataset.follow(batch.pop("place"))
            yield batch
        if empty:
            options = self.dataset.options
            found = f"{options.hub} ({options.split}) does not fill a batch of {self.batch_size} on each device"
            raise UserError(f"dataset.hub: {found}; check the split and dataset.text_column, or lower the batch size")


def build(config: LoaderConfig, tokenizer: PreTrainedTokenizerBase, batch_size: int, train: bool) -> HubDataLoader:
    """Build a loader of masked batches of `batch_size` samples for this device. Raises UserError."""
    dataset = HubSamples(config.dataset, tokenizer, config.num_workers, None if train else batch_size)
    return open_loader(HubDataLoader, PlacedCollator, dataset, config, tokenizer, batch_size, train)


def describe(options: DatasetConfig, dataset: HubSamples) -> str:
    """Return what is read, and what reading it without shards costs, in words."""
    subset = f" {options.data_subset}" if options.data_subset else ""
    files = f"{dataset.source.documents.num_shards} files of {options.hub}{subset}, {options.split}"
    order = f"shuffled by {dataset.block:,} samples" if options.shuffle else "in their order"
    return f"{files}, {order}, read from the Hub in every epoch, which is slower than shards"
