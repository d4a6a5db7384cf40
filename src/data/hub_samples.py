"""Samples straight from a dataset on the Hugging Face Hub: those that src/convert_dataset.py would write to shards.
They are read, dealt to processes, shuffled and resumed without knowing how many there are."""

from collections.abc import Iterator, Sequence
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
from src.data.streaming import ANEW, TextDataLoader, open_loader
from src.data.token_rows import Packer, RowMaker
from src.errors import UserError

BLOCK = 10_000  # samples shuffled together, unless shuffle_block_size is set: 20 MB of C4
START = {"file": 0, "position": None, "documents": 0, "samples": 0, "waiting": None}  # the place where an epoch starts
DEVICE_START: dict[str, Any] = {"turn": 0, "places": {}}

Place = dict[str, Any]  # where a reader starts to read a block of samples


class Source(HubDataset):
    """A dataset that a loader reads."""

    key, set_column = "dataset.hub", "; set dataset.text_column"
    fix = "check the name, the split and the connection, and repeat the command"


class HubSamples(IterableDataset):
    """Samples of a split: `text`, or `tokens` and `begins` with `concat_tokens`; and "sample": (epoch, index).

    Each worker of each device is a reader. Readers have files of their own, or share them and take turns at documents
    if the files are fewer, or if the split is the first documents of all. A reader shuffles its samples block by block.
    It can resume at a block, so `place` of a sample is (worker, where its block starts, samples taken of the block).

    The main process follows the places of the batches that it has got from each worker; a checkpoint has those of all
    devices, and the worker whose turn is next."""

    def __init__(self, options: DatasetConfig, tokenizer: PreTrainedTokenizerBase, workers: int):
        self.options, self.workers = options, max(1, workers)
        self.rank, self.devices = dist.get_global_rank(), dist.get_world_size()
        if options.val_fraction is not None and options.split not in SPLITS:
            raise UserError(
                f"dataset.val_fraction divides train into {', '.join(SPLITS)}, not {options.split}; omit it"
            )
        split, self.limit = SPLITS.get(options.split, (options.split, None))
        self.validation = split == "validation"
        split = split if options.val_fraction is None else "train"
        self.source = Source(options.hub, options.data_subset, split, options.text_column, options.revision)
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
        self.reached = {"turn": (worker + 1) % self.workers, "places": {**self.reached["places"], worker: reached}}

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """Return the position of all devices, each of which must call this. `num_samples`: those of this epoch."""
        inside = num_samples > 0
        return {
            "revision": self.source.description["revision"],
            "epoch": max(int(self.epoch) + (not inside), self.resumes_at),
            "workers": self.workers,
            "devices": dist.all_gather_object(self.reached if inside else DEVICE_START),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`. Raises UserError for one of another kind, revision or number of readers."""
        name = self.options.hub
        if "devices" not in state:
            raise UserError(f"dataset.hub={name}, but the checkpoint's position is in shards; {ANEW}")
        before, now = state["revision"], self.source.description["revision"]
        if before != now:
            raise UserError(
                f"{name} has changed since the checkpoint, to {now}; set train_loader.dataset.revision={before}"
            )
        counts = len(state["devices"]), state["workers"]
        if counts != (self.devices, self.workers) and any(device["places"] for device in state["devices"]):
            found = f"{self.devices} devices with {self.workers} loader workers cannot resume within an epoch of {name}"
            raise UserError(
                f"{found} that {counts[0]} with {counts[1]} started; use as many (train_loader.num_workers)"
            )
        self.resumes_at = state["epoch"]
        self.start = state["devices"][self.rank] if counts == (self.devices, self.workers) else DEVICE_START
        self.reached = self.start
        self.epoch.fill_(self.resumes_at - 1)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        epoch, seed, info = int(self.epoch), self.options.seed, get_worker_info()
        device = self.start if epoch == self.resumes_at else DEVICE_START
        worker = ((info.id if info else 0) + device["turn"]) % self.workers
        reader, readers = self.rank * self.workers + worker, self.devices * self.workers
        files = list(range(len(self.source.sizes)))
        if self.options.shuffle and self.limit is None:
            files = [files[number] for number in np.random.default_rng((seed, epoch)).permutation(len(files))]
        start, taken = device["places"].get(worker, (START, 0))
        own = share(files, reader, readers, self.limit is not None)
        for place, samples in self._blocks(*own, start):
            order = np.arange(len(samples))
            if self.options.shuffle:
                order = np.random.default_rng((seed, epoch, reader, place["samples"])).permutation(order)
            for number in range(taken, len(samples)):
                index = (place["samples"] + number) * readers + reader
                yield {**samples[order[number]], "sample": (epoch, index), "place": (worker, place, number + 1)}
            taken = 0

    def _blocks(
        self, files: Sequence[int], turn: int, turns: int, start: Place
    ) -> Iterator[tuple[Place, list[dict[str, Any]]]]:
        """Yield blocks of samples in the order of the files, each with the place from which it is read again."""
        packer = self.rows and Packer(self.rows, start["waiting"])
        block, documents, samples, last = [], start["documents"], start["samples"], start["file"]
        for number, batch in batches(self.source, files, start):
            if packer and number != last:  # no row has documents of two files
                block += self._rows(packer.last_sample())
            last = number
            if len(block) >= self.block:
                yield start, block
                samples += len(block)
                block = []
            if not block:
                start = {"file": number, "position": batch.position, "documents": documents, "samples": samples}
                start["waiting"] = packer and packer.state()
            _, texts, _ = prepare(None, self.options.val_fraction, self.validation, [batch])
            texts = texts[: None if self.limit is None else self.limit - documents]
            own = [text for document, text in enumerate(texts, documents) if document % turns == turn]
            documents += len(texts)
            block += self._rows(packer.samples(list(filter(None, self.rows(own)[0])))) if packer else map(as_text, own)
            if documents == self.limit:
                break
        block += self._rows(packer.last_sample()) if packer else ()
        if block:
            yield start, block

    def _rows(self, samples: Iterator[dict[str, bytes]]) -> Iterator[dict[str, np.ndarray]]:
        """Decode rows as a shard's reader does."""
        for sample in samples:
            yield {name: mds_decode(self.rows.columns[name], data) for name, data in sample.items()}


def as_text(text: str) -> dict[str, str]:
    return {"text": text}


def batches(source: HubDataset, files: Sequence[int], place: Place) -> Iterator[tuple[int, Batch]]:
    """Yield the batches of files from a place on, each with its file's place in the list."""
    position = place["position"]
    for number, file in enumerate(files[place["file"] :], place["file"]):
        yield from ((number, batch) for batch in source.batches(file, position))
        position = None


def share(files: Sequence[int], reader: int, readers: int, all_files: bool) -> tuple[Sequence[int], int, int]:
    """Return the files that one of several readers reads, its turn and the number of turns: of every so many documents
    in them it takes the one whose turn it is. With `all_files`, all readers take turns in all files."""
    if all_files:
        return files, reader, readers
    if len(files) >= readers:
        return files[reader::readers], 0, 1
    turn, number = divmod(reader, len(files))
    return files[number : number + 1], turn, len(range(number, readers, len(files)))


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
    dataset = HubSamples(config.dataset, tokenizer, config.num_workers)
    return open_loader(HubDataLoader, PlacedCollator, dataset, config, tokenizer, batch_size, train)


def describe(options: DatasetConfig, dataset: HubSamples) -> str:
    """Return what is read, and what reading it without shards costs, in words."""
    subset = f" {options.data_subset}" if options.data_subset else ""
    files = f"{dataset.source.documents.num_shards} files of {options.hub}{subset}, {options.split}"
    order = f"shuffled by {dataset.block:,} samples" if options.shuffle else "in their order"
    return f"{files}, {order}, read from the Hub in every epoch, which is slower than shards"
