"""MDS shards, of text or of tokens, in one place or several → batches for masked language modelling."""

import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist
from streaming import Stream, StreamingDataLoader, StreamingDataset
from streaming.base.storage import CloudDownloader
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from src.config import nearest
from src.data.config import DatasetConfig, LoaderConfig
from src.data.masking import Masking
from src.data.mlm_collator import MaskingCollator, sample_count
from src.data.tokenizers import vocabulary_digest
from src.errors import UserError, first_line

STREAM_KEYS = ["local", "remote", "split", "proportion", "repeat", "choose"]


class StreamingTextDataset(StreamingDataset):
    """Samples of MDS shards: what the shards hold, `text` or `tokens`, and "sample": (epoch, index).

    The index counts through all shards of all streams, so no two samples have the same.
    """

    epoch = 0

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.prepared: set[int] = set()

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Ahead of every sample, streaming takes a lock (a file) to see to its shard; once does, if none is evicted."""
        if blocking or self.cache_limit or shard_id not in self.prepared:
            super().prepare_shard(shard_id, blocking)
            self.prepared.add(shard_id)

    def _resume_incr_epoch(self) -> tuple[int, int]:
        self.epoch, sample_in_epoch = super()._resume_incr_epoch()
        return self.epoch, sample_in_epoch

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "sample": (self.epoch, int(index))}


@dataclass
class Padding:
    """How much of the batches that a loader has given is padding, and how much would be without packing."""

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
        """Padding as a share of all positions."""
        named = {"padding": self.positions, "padding_without_packing": self.unpacked_positions}
        return {name: 1 - self.tokens / positions for name, positions in named.items() if positions}

    def __str__(self) -> str:
        shares = self.shares()
        without = f", {shares['padding_without_packing']:.1%} without packing" if self.unpacked_positions else ""
        return f"{shares['padding']:.1%} of the positions{without}"


class TextDataLoader(StreamingDataLoader):
    """Counts samples, of which several may share a row, where it is asked how far it got; and padding."""

    collate_fn: MaskingCollator

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.padding = Padding()

    def _get_batch_size(self, batch: dict[str, Tensor]) -> int:
        return sample_count(batch)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in super().__iter__():
            self.padding.count(batch, self.collate_fn)
            yield batch


def build(config: LoaderConfig, tokenizer: PreTrainedTokenizerBase, batch_size: int, train: bool) -> TextDataLoader:
    """Masked batches of `batch_size` samples for this device. Raises UserError for shards or options that cannot be used."""
    options = config.dataset
    if not 0 < options.mlm_probability < 1:
        raise UserError(f"mlm_probability {options.mlm_probability} must lie between 0 and 1")
    masking = Masking(
        tokenizer,
        options.mlm_probability,
        options.seed,
        every_epoch=train,
        whole_words=options.whole_word_masking,
    )
    dataset = build_dataset(
        options.local,
        options.remote,
        options.split,
        options.streams,
        batch_size=batch_size,
        shuffle=options.shuffle,
        shuffle_seed=options.seed,
        predownload=options.predownload,
        cache_limit=options.cache_limit,
        num_canonical_nodes=options.num_canonical_nodes,
    )
    if "tokens" in dataset.shards[0].column_names:
        for stream in dataset.streams:
            check_tokens(stream, tokenizer, options)
    devices = dist.get_world_size()
    if config.drop_last and len(dataset) < batch_size:  # of one device
        raise UserError(f"the split {options.split} gives each of {devices} devices {len(dataset)} samples, less than a batch of {batch_size}; lower {'global_train_batch_size' if train else 'device_eval_batch_size'}, or convert more text")  # fmt: skip
    return TextDataLoader(
        dataset,
        batch_size=batch_size,
        collate_fn=MaskingCollator(tokenizer, options.max_seq_len, masking, options.packing, options.pad_to_max_length),
        num_workers=config.num_workers,
        worker_init_fn=leave_signals_to_the_main_process,
        drop_last=config.drop_last,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=config.num_workers > 0,
    )


def leave_signals_to_the_main_process(worker: int) -> None:
    """Ctrl-C and SIGTERM may reach every process of a run; the main one still needs batches to end its step.

    From the main process, SIGTERM still ends a worker: multiprocessing sends it at exit, and then waits.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_heed_the_main_process, args=(os.getppid(),), daemon=True).start()


def _heed_the_main_process(main_process: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != main_process:
        pass
    os._exit(0)


def build_dataset(
    local: str, remote: str | None, split: str, streams: Mapping[str, Any] | None = None, **options: Any
) -> StreamingTextDataset:
    """The samples of a split, or of several streams, checked before any work. Raises UserError where there are no shards."""
    sources = {f"streams.{name}": source for name, source in (streams or {}).items()}
    if not sources:
        sources = {"data_local": {"local": local, "remote": remote}}
    tries = 20 if dist.get_world_size() == 1 else 1  # ranks wait for each other in there
    for tries_left in reversed(range(tries)):
        opened = [open_stream(name, source, split) for name, source in sources.items()]
        try:
            Stream.validate_weights(opened)
            dataset = StreamingTextDataset(streams=opened, **options)
            break
        except Exception as error:  # whatever the clients of s3, gs and oci raise, and streaming, of weights and limits
            if isinstance(error, FileExistsError) and tries_left:
                continue  # at the same moment, another run of this machine took the name chosen for its shared memory
            places = ", ".join(str(stream.remote or stream.local) for stream in opened)
            raise UserError(f"cannot read the shards of {split} in {places}: {first_line(error)}") from None
    check_columns(dataset)
    return dataset


def open_stream(name: str, source: Any, split: str) -> Stream:
    """One source of shards; those that lie here are checked. `name` is the key to speak of."""
    if not isinstance(source, Mapping) or source.get("local") is None:
        raise UserError(f"{name} must hold `key: value` lines, and among them local: the folder with the shards, or the cache for its remote")  # fmt: skip
    for field in source:
        if field not in STREAM_KEYS:
            raise UserError(f"unknown key {name}.{field}{nearest(field, STREAM_KEYS)}")
    split = source.get("split") or split
    if source.get("remote") is None:
        check_folder(name, Path(source["local"]), split)
    try:
        return Stream(**{**source, "split": split})
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: {first_line(error)}") from None


def check_folder(name: str, local: Path, split: str) -> None:
    """Raise UserError where a folder has no such split, or not all of it."""
    folder = local / split
    if (folder / "index.json").is_file():
        check_shards(folder)
        return
    command = f"python src/convert_dataset.py --dataset allenai/c4 --data_subset en --splits {split} --out_root {local}"
    if not local.is_dir():
        raise UserError(f"{name}: the folder {local} does not exist; write shards to it, e.g. with `{command}`")
    splits = sorted(path.parent.name for path in local.glob("*/index.json"))
    found = f"its splits are {', '.join(splits)}" if splits else "it holds no finished split"
    raise UserError(f"{name}: {folder} holds no shards ({found}); write them, e.g. with `{command}`")


def check_shards(folder: Path) -> None:
    """Raise UserError for an index that cannot be read, or that names shards which are not there."""
    try:
        shards = json.loads((folder / "index.json").read_text())["shards"]
        names = [
            (shard["raw_data"]["basename"], (shard["zip_data"] or shard["raw_data"])["basename"]) for shard in shards
        ]
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError):
        raise UserError(
            f"{folder / 'index.json'} is damaged; copy the split again or convert it anew with --overwrite"
        ) from None
    missing = [stored for raw, stored in names if not ((folder / raw).is_file() or (folder / stored).is_file())]
    if missing:
        raise UserError(f"{folder} lacks {len(missing)} of {len(names)} shards ({missing[0]}, …); copy the split again or convert it anew with --overwrite")  # fmt: skip


def check_columns(dataset: StreamingTextDataset) -> None:
    """Raise UserError where the shards hold neither text nor tokens, or some hold the one and some the other."""
    kinds = {}
    for stream, shard in zip(dataset.streams, dataset.shard_offset_per_stream):
        columns = dataset.shards[shard].column_names
        kind = next((name for name in ("text", "tokens") if name in columns), None)
        if kind is None:
            raise UserError(f"{folder_of(stream)}: the shards have columns {', '.join(columns)} but no `text` or `tokens`; convert the data anew")  # fmt: skip
        kinds[kind] = folder_of(stream)
    if len(kinds) > 1:
        raise UserError(
            f"{kinds['text']} holds text and {kinds['tokens']} tokens, which do not mix; convert both alike"
        )


def check_tokens(stream: Stream, tokenizer: PreTrainedTokenizerBase, options: DatasetConfig) -> None:
    """Raise UserError where a stream's tokens are not this tokenizer's, or its rows longer than max_seq_len."""
    made = tokens_summary(stream)
    if made["digest"] != vocabulary_digest(tokenizer):
        raise UserError(f"tokenizer_name: {options.tokenizer_name} did not make the tokens in {folder_of(stream)}, but {made['tokenizer']} with {made['vocab_size']:,} tokens; name that one, or convert the text again")  # fmt: skip
    if made["length"] > options.max_seq_len:
        raise UserError(f"max_seq_len {options.max_seq_len} is less than the {made['length']} tokens of rows in {folder_of(stream)}; set it to {made['length']}, or convert the text with --{made['mode']} {options.max_seq_len}")  # fmt: skip


def tokens_summary(stream: Stream) -> dict[str, Any]:
    """What split.json says about a stream's tokens; fetched from its remote where it is not here yet."""
    path = folder_of(stream) / "split.json"
    if not path.exists() and stream.remote is not None:
        with tempfile.TemporaryDirectory(
            dir=path.parent
        ) as folder:  # each process fetches it, and none sees half of it
            fetched = Path(folder) / path.name
            try:
                CloudDownloader.direct_download(os.path.join(stream.remote, stream.split, path.name), str(fetched))
                fetched.replace(path)
            except Exception as error:  # whatever the clients of s3, gs and oci raise
                raise UserError(f"{stream.remote}: cannot fetch {stream.split}/split.json ({first_line(error)}), which tells what tokenizer made the tokens; copy it there, or convert the text again") from None  # fmt: skip
    try:
        made = json.loads(path.read_text())["tokens"]
        return {name: made[name] for name in ("tokenizer", "vocab_size", "digest", "mode", "length")}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path} is missing or damaged, and without it nothing tells what tokenizer made the tokens; copy the split again, or convert the text again") from None  # fmt: skip


def tokens_of_text(stream: Stream) -> int | None:
    """How many tokens of text a stream's rows hold, where they are rows of tokens."""
    try:
        made = json.loads((folder_of(stream) / "split.json").read_text())["tokens"]
        return round(made["of_text"] * (1 - made["share_cut_off"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def folder_of(stream: Stream) -> Path:
    """Where a stream's shards lie here."""
    return Path(stream.local) / stream.split


def describe(options: DatasetConfig, dataset: StreamingTextDataset) -> str:
    """How many samples there are, of how many tokens where split.json tells it, and where."""
    if not options.streams:
        tokens = [tokens_of_text(stream) for stream in dataset.streams]
        told = "" if None in tokens else f" ({sum(tokens):,} tokens)"
        return f"{dataset.size:,} samples{told} in {options.remote or options.local}"
    parts = ", ".join(f"{stream.choose:,} of {name}" for name, stream in zip(options.streams, dataset.streams))
    return f"{dataset.epoch_size:,} samples an epoch ({parts})"
