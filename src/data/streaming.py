"""MDS shards of text or tokens, from one source or several → batches for masked language modelling."""

import atexit
import contextlib
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.utils import dist
from filelock import FileLock, Timeout
from streaming import Stream, StreamingDataLoader, StreamingDataset
from streaming.base.storage import CloudDownloader
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from src.cli import log
from src.config import check_known
from src.data.batches import Masking, MaskingCollator, sample_count
from src.data.config import DatasetConfig, LoaderConfig, check_split
from src.data.tokenizers import vocabulary_digest
from src.data.workers import short_errors
from src.errors import UserError, first_line

ANOTHER_RUN = "start another run from it, with load_path and load_position=false"
READ_THE_SAME = f"read the same, or {ANOTHER_RUN}"
PASSED_ON = (  # keys of DatasetConfig that are arguments of StreamingDataset
    "shuffle", "shuffle_algo", "shuffle_block_size", "batching_method", "num_canonical_nodes", "predownload",
    "cache_limit", "download_timeout",
)  # fmt: skip


@contextlib.contextmanager
def first_in_line() -> Iterator[None]:
    """Wait until no other run of this user opens shards on any machine of this run: streaming looks for a free name of
    shared memory, and takes it only later, when another may have."""
    shared_memory = Path("/dev/shm")  # a machine's own, which the folder of temporary files need not be
    folder = shared_memory if shared_memory.is_dir() else tempfile.gettempdir()
    lock = FileLock(Path(folder, f"lion-streaming-{os.getuid()}.lock"))
    while not all(dist.all_gather_object(dist.get_local_rank() != 0 or took(lock))):
        lock.release()  # another run may hold one machine and wait for another
        time.sleep(random.SystemRandom().uniform(0.2, 1))  # longer than its pause between two tries
    try:
        yield
    finally:
        lock.release()


def took(lock: FileLock) -> bool:
    """Whether a lock could be taken; runs that wait for each other give up at different times."""
    with contextlib.suppress(Timeout):
        lock.acquire(timeout=random.SystemRandom().uniform(5, 15) if dist.get_world_size() > 1 else -1)
        return True
    return False


class StreamingSamples(StreamingDataset):
    """Samples of MDS shards, which are prepared once."""

    def __init__(self, **options: Any):
        with first_in_line():
            super().__init__(**options)
        if dist.get_local_rank() == 0:  # streaming leaves these files, and looks at all of them in the next run
            for path in (self._cache_filelock_path, self._shared_barrier.filelock_path):
                atexit.register(Path(path).unlink, missing_ok=True)
        self.prepared: set[int] = set()

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Prepare a shard once unless shards are evicted: streaming would take a file lock for every sample."""
        if blocking or self.cache_limit or shard_id not in self.prepared:
            super().prepare_shard(shard_id, blocking)
            self.prepared.add(shard_id)

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        """Return a sample. Raises UserError naming its shard if that is damaged."""
        try:
            return self.check(super().get_item(sample_id, retry))
        except (ValueError, LookupError, TypeError, MemoryError) as error:  # whatever decoding wrong bytes raises
            shard = self.shards[self.spanner[sample_id][0]]
            path = Path(shard.dirname, shard.split, shard.raw_data.basename)
            problem = f"sample {sample_id} cannot be read ({first_line(error)})"
            raise UserError(f"{path} is damaged: {problem}; copy it again, or convert the data again") from None

    def check(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return a sample. Raises ValueError for one that decodes, but cannot have been written."""
        return sample


class StreamingTextDataset(StreamingSamples):
    """Samples of MDS shards: `text` or `tokens`, and "sample": (epoch, index), the index over all streams."""

    epoch = 0
    vocab_size: int | None = None  # of the tokens, once `build` knows it

    def check(self, sample: dict[str, Any]) -> dict[str, Any]:
        if self.vocab_size is not None and (largest := sample["tokens"].max(initial=0)) >= self.vocab_size:
            raise ValueError(f"it has token {largest} of {self.vocab_size:,}")
        return sample

    def _resume_incr_epoch(self) -> tuple[int, int]:
        self.epoch, sample_in_epoch = super()._resume_incr_epoch()
        return self.epoch, sample_in_epoch

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "devices" in state:  # src/data/hub_samples.py saved it
            raise UserError(
                f"this data is shards, but the checkpoint's position is in a dataset on the Hub; {READ_THE_SAME}"
            )
        # An epoch whose samples do not divide among the devices, or among canonical nodes, repeats some.
        repeated = dist.get_world_size() * self.batch_size + (state["num_canonical_nodes"] or 0)
        if state["sample_in_epoch"] > self.epoch_size + repeated:
            raise self.too_small(state["sample_in_epoch"])
        if (before := state.get("samples_per_epoch", self.epoch_size)) != self.epoch_size:
            differs = f"an epoch of the training data has {self.epoch_size:,} samples, and had {before:,} when"
            log.warning(f"{differs} the checkpoint was saved: the order differs, so samples are repeated or omitted")
        super().load_state_dict(state)

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        return {**super().state_dict(num_samples, from_beginning), "samples_per_epoch": self.epoch_size}

    def _get_work(self, epoch: int, sample_in_epoch: int) -> np.ndarray:
        try:
            return super()._get_work(epoch, sample_in_epoch)
        except ValueError as error:  # from batching or shuffling, about sizes that do not fit together
            if sample_in_epoch > self.epoch_size:
                raise self.too_small(sample_in_epoch) from None
            given = f"batching_method={self.batching_method} and shuffle_algo={self.shuffle_algo}"
            raise UserError(f"{given} cannot order these samples: {' '.join(str(error).split())}") from None

    def too_small(self, position: int) -> UserError:
        found = f"this data has {self.epoch_size:,}, but the checkpoint's position is after {position:,} samples"
        return UserError(f"{found}; {READ_THE_SAME}")

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "sample": (self.epoch, int(index))}


@dataclass
class Padding:
    """Counts the padding in a loader's batches, and what it would be without packing."""

    tokens: int = 0
    positions: int = 0
    unpacked_positions: int = 0

    def count(self, batch: dict[str, Tensor], collator: MaskingCollator) -> None:
        self.tokens += int(batch["attention_mask"].sum())
        self.positions += batch["input_ids"].numel()
        if collator.packing:
            longest = int(batch["sample_lengths"].max())
            self.unpacked_positions += sample_count(batch) * collator.row_length(longest)

    def shares(self) -> dict[str, float]:
        """Return padding as a fraction of all positions."""
        named = {"padding": self.positions, "padding_without_packing": self.unpacked_positions}
        return {name: 1 - self.tokens / positions for name, positions in named.items() if positions}

    def __str__(self) -> str:
        shares = self.shares()
        without = f", {shares['padding_without_packing']:.1%} without packing" if self.unpacked_positions else ""
        return f"padding: {shares['padding']:.1%} of the positions{without}"


class TextDataLoader(StreamingDataLoader):
    """Counts its position in samples, several of which may share a row, and padding; its workers' errors are short."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.padding = Padding()

    def _get_batch_size(self, batch: dict[str, Tensor]) -> int:
        return sample_count(batch)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        with short_errors():
            for batch in super().__iter__():
                self.padding.count(batch, self.collate_fn)
                yield batch


def build(config: LoaderConfig, tokenizer: PreTrainedTokenizerBase, batch_size: int, train: bool) -> TextDataLoader:
    """Build a loader of masked batches of `batch_size` samples for this device. Raises UserError."""
    options = config.dataset
    dataset = build_dataset(options, batch_size)
    for stream in dataset.streams if "tokens" in dataset.shards[0].column_names else ():
        check_tokens(stream, tokenizer, options)
        dataset.vocab_size = len(tokenizer)
    if config.drop_last and len(dataset) < batch_size:  # of one device
        key = "global_train_batch_size" if train else "device_eval_batch_size"
        found = f"the split {options.split} has {len(dataset)} samples per device, fewer than a batch of {batch_size}"
        raise UserError(f"{found}; lower {key}, or convert more text")
    return open_loader(TextDataLoader, MaskingCollator, dataset, config, tokenizer, batch_size, train)


def open_loader(
    kind: type[TextDataLoader],
    collator: type[MaskingCollator],
    dataset: IterableDataset,
    config: LoaderConfig,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    train: bool,
) -> Any:
    """Return a loader of masked batches of a dataset's samples. Raises UserError."""
    options = config.dataset
    masking = Masking(tokenizer, options.mlm_probability, options.seed, train, options.whole_word_masking)
    return kind(
        dataset,
        batch_size=batch_size,
        collate_fn=collator(tokenizer, options.max_seq_len, masking, options.packing, options.pad_to_max_length),
        num_workers=config.num_workers,
        prefetch_factor=config.prefetch_factor,
        persistent_workers=config.persistent_workers and config.num_workers > 0,
        worker_init_fn=ignore_signals,
        drop_last=config.drop_last,
        pin_memory=torch.cuda.is_available(),
    )


def ignore_signals(worker: int) -> None:
    """Ignore signals that reach all processes of a run, since the main one still needs batches from this worker. A
    SIGTERM from the main process still ends the worker: multiprocessing sends one at exit, and then waits."""
    main_process = os.getppid()

    def obey_main_process() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != main_process:
            pass
        os._exit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=obey_main_process, daemon=True).start()


def build_dataset(options: DatasetConfig, batch_size: int) -> StreamingTextDataset:
    """Return the samples of a split, or of several streams. Raises UserError without shards of text or tokens."""
    sources = {f"streams.{name}": source for name, source in options.streams.items()}
    sources = sources or {"data_local": {"local": options.local, "remote": options.remote}}
    order = {name: getattr(options, name) for name in PASSED_ON}
    order |= {"batch_size": batch_size, "shuffle_seed": options.seed}
    tries = 20 if dist.get_world_size() == 1 else 1  # the ranks wait for each other inside
    for tries_left in reversed(range(tries)):
        opened = [open_stream(name, source, options.split) for name, source in sources.items()]
        try:
            Stream.validate_weights(opened)
        except ValueError as error:
            raise UserError(f"streams: {first_line(error)}; give all streams the same kind") from None
        try:
            dataset = StreamingTextDataset(streams=opened, **order)
            break
        except Exception as error:  # from clients of s3, gs and oci, or from streaming about weights and limits
            if isinstance(error, FileExistsError) and tries_left:
                continue  # another run has just taken the name chosen for shared memory
            places = ", ".join(str(stream.remote or stream.local) for stream in opened)
            raise UserError(f"cannot read the shards of {options.split} in {places}: {first_line(error)}") from None
    kinds = {}
    for stream, shard in zip(dataset.streams, dataset.shard_offset_per_stream):
        columns, folder = dataset.shards[shard].column_names, Path(stream.local, stream.split)
        if not {"text", "tokens"} & {*columns}:
            raise UserError(f"{folder}: no column `text` or `tokens`, only {', '.join(columns)}; convert it again")
        kinds["text" if "text" in columns else "tokens"] = folder
    if len(kinds) > 1:
        raise UserError(f"{kinds['text']} holds text and {kinds['tokens']} tokens; convert both the same way")
    return dataset


def open_stream(key: str, source: Any, split: str) -> Stream:
    """Return one source of shards, checked if it is local. `key` is what the user set."""
    if not isinstance(source, Mapping) or source.get("local") is None:
        raise UserError(f"{key} must hold `key: value` lines, with local: the shards' folder or the remote's cache")
    check_known(key, source, ("local", "remote", "split", "proportion", "repeat", "choose"))
    split = source.get("split") or split
    if source.get("remote") is None:
        check_split(key, Path(source["local"]), split)
    try:
        return Stream(**{**source, "split": split})
    except (TypeError, ValueError) as error:
        raise UserError(f"{key}: {first_line(error)}") from None


def fetch_summary(folder: Path, remote: str) -> str | None:
    """Download split.json of a split into the folder of its shards unless it is there; return None, or why it failed.
    Each process fetches it, and none sees a partial file."""
    name = "split.json"
    if (folder / name).exists():
        return None
    try:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            CloudDownloader.direct_download(os.path.join(remote, folder.name, name), f"{own}/{name}")
            os.replace(f"{own}/{name}", folder / name)
    except Exception as error:  # whatever the clients of s3, gs and oci raise
        return first_line(error)
    return None


def check_tokens(stream: Stream, tokenizer: PreTrainedTokenizerBase, options: DatasetConfig) -> None:
    """Raise UserError unless split.json says that a stream's tokens are this tokenizer's, in rows not too long."""
    folder = Path(stream.local, stream.split)
    if stream.remote is not None and (problem := fetch_summary(folder, stream.remote)):
        found = f"cannot fetch {stream.split}/split.json ({problem}), which names the tokenizer"
        raise UserError(f"{stream.remote}: {found}; copy it there, or convert the text again")
    made = tokens_summary(stream)
    if not {"tokenizer", "vocab_size", "digest", "mode", "length"} <= made.keys():
        found = f"{folder}/split.json, which names the tokenizer, is missing or corrupt"
        raise UserError(f"{found}; copy the split again, or convert the text again")
    if made["digest"] != vocabulary_digest(tokenizer):
        maker = f"{made['tokenizer']} with {made['vocab_size']:,} tokens, not by {options.tokenizer_name}"
        raise UserError(f"tokenizer_name: the tokens in {folder} were made by {maker}; use the former or convert again")
    if made["length"] > options.max_seq_len:
        found = f"max_seq_len={options.max_seq_len} is less than the {made['length']} tokens per row in {folder}"
        raise UserError(f"{found}; raise it, or convert the text with --{made['mode']} {options.max_seq_len}")
    if made["length"] < options.max_seq_len and not options.packing:
        found = f"no row in {folder} has more than {made['length']} tokens, though max_seq_len={options.max_seq_len}"
        log.warning(f"{found}; for longer ones, convert the text with --{made['mode']} {options.max_seq_len}")


def tokens_summary(stream: Stream) -> dict[str, Any]:
    """Return split.json's entry for token rows; an empty one if it is missing or corrupt, or the shards hold text."""
    try:
        return dict(json.loads(Path(stream.local, stream.split, "split.json").read_text())["tokens"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def describe(options: DatasetConfig, dataset: StreamingTextDataset) -> str:
    """Return the number of samples, of tokens if split.json has it, and their location, in words."""
    if options.streams:
        parts = ", ".join(f"{stream.choose:,} of {name}" for name, stream in zip(options.streams, dataset.streams))
        return f"{dataset.epoch_size:,} samples per epoch ({parts})"
    made, tokens = tokens_summary(dataset.streams[0]), ""
    if "of_text" in made:
        tokens = f" ({round(made['of_text'] * (1 - made['share_cut_off'])):,} tokens)"
    return f"{dataset.size:,} samples{tokens} in {options.remote or options.local}"
