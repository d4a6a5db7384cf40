"""Config of the loaders that read shards of text or tokens, and the check of the shards. Imports nothing slow."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import II

from src.config import SEED, key
from src.data.parts import find_parts
from src.errors import UserError
from src.files import looks_like_path

SHUFFLE_ALGOS = ("py1br", "py1e", "py1s", "py2s", "naive")  # streaming's, which is slow to import
OF_HUB = ("data_subset", "revision", "text_column", "val_fraction", "concat_tokens")  # keys without effect on shards
OF_SHARDS = (
    "streams", "predownload", "cache_limit", "num_canonical_nodes", "shuffle_algo", "batching_method",
    "download_timeout",
)  # fmt: skip
BATCHING_METHODS = ("random", "stratified", "per_stream", "device_per_stream")


@dataclass
class DatasetConfig:
    local: str = key("folder with the shards, or the cache for `remote`", II("data_local"), may_change=True)
    remote: str | None = key("s3://, gs://, oci:// or path that `local` caches", II("data_remote"), may_change=True)
    streams: dict[str, Any] = key(
        "several sources by name, each with local, remote, split, and proportion, repeat or choose (samples) per epoch",
        {},
        may_change=("num_workers", "local", "remote", "predownload", "cache_limit"),
    )
    hub: str | None = key(
        "dataset on the Hugging Face Hub to read instead of shards, without conversion but slower, e.g. allenai/c4",
        None,
    )
    data_subset: str | None = key("with `hub`: its configuration, e.g. en", None)
    revision: str | None = key("with `hub`: commit, tag or branch; default: the latest", None, may_change=True)
    text_column: str = key("with `hub`: column with the text", "text")
    val_fraction: float | None = key(
        "with `hub`: hold out this fraction of its train split for val, chosen by a hash of the text",
        None,
        above=0,
        below=1,
    )
    concat_tokens: bool = key(
        "with `hub`: rows of max_seq_len tokens, documents end to end, else one per document", False
    )
    split: str = key("subfolder of the shards, e.g. train, train_small, val; the same of `hub`, or its own, e.g. test")
    tokenizer_name: str = key("Hub name or folder of the tokenizer", II("tokenizer_name"))
    max_seq_len: int = key("maximum sequence length; longer texts are cut", II("max_seq_len"), at_least=3, below=2**32)
    mlm_probability: float = key("masking rate: fraction of tokens to predict", II("mlm_probability"), above=0, below=1)
    whole_word_masking: bool = key("mask all WordPiece tokens of a word or none", False)
    packing: bool = key("pack several samples per row; separate them, and the documents of --concat_tokens rows", False)
    pad_to_max_length: bool = key("pad rows to max_seq_len instead of the longest row of the batch", False)
    shuffle: bool = key("draw a new order in every epoch from the seed", False)
    seed: int = key("seed for order and masks", II("seed"), **SEED)
    predownload: int | None = key("samples to fetch ahead, with `remote`", None, may_change=True)
    cache_limit: str | None = key("maximum disk space of the cache, e.g. 100gb", None, may_change=True)
    num_canonical_nodes: int | None = key("fix the sample order for this many nodes, whatever the real number", None)
    shuffle_algo: str = key("how `shuffle` draws the order of shards and samples", "py1e", choices=SHUFFLE_ALGOS)
    shuffle_block_size: int | None = key(
        "samples shuffled together; default: the larger of 262,144 and 4,000,000 / num_canonical_nodes, and with `hub` "
        "10,000, which each worker keeps in memory",
        None,
        at_least=1,
    )
    batching_method: str = key(
        "streams of a batch: drawn by chance, in fixed shares, or one per batch or per device",
        "random",
        choices=BATCHING_METHODS,
    )
    download_timeout: float = key("seconds to wait for a shard of `remote`", 60.0, above=0, may_change=True)


@dataclass
class LoaderConfig:
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    drop_last: bool = key("drop the last batch of an epoch if it is not full", False)
    num_workers: int = key("processes to prepare batches; 0: the main one", 0, at_least=0, below=2**32, may_change=True)
    prefetch_factor: int | None = key(
        "batches that each worker prepares ahead; default: 2", None, at_least=1, below=2**32, may_change=True
    )
    persistent_workers: bool = key("keep the workers from epoch to epoch", True, may_change=True)

    def check(self, name: str) -> None:
        """Raise UserError for settings that contradict each other. `name` is the loader's, such as train_loader."""
        if self.prefetch_factor is not None and not self.num_workers:
            problem = f"{name}.prefetch_factor={self.prefetch_factor} needs worker processes"
            raise UserError(f"{problem}; set {name}.num_workers to at least 1, or omit it")
        dataset, without = self.dataset, DatasetConfig()
        unused, given = (
            (OF_HUB, "only applies with hub") if dataset.hub is None else (OF_SHARDS, "only applies to shards")
        )
        for each in unused:
            if getattr(dataset, each) != getattr(without, each):
                raise UserError(f"{name}.dataset.{each} {given}; omit it")
        if dataset.hub is not None and looks_like_path(dataset.hub) and not Path(dataset.hub).is_dir():
            raise UserError(f"{name}.dataset.hub: {dataset.hub} is not a folder; fix its path")


def check_images(key: str, name: str, split: str) -> None:
    """Raise UserError for the path of a folder of images that does not exist, or shards that are not complete."""
    if not Path(name).is_dir() and looks_like_path(name):
        raise UserError(f"{key}: {name} is not a folder; fix its path")
    if Path(name, split, "index.json").is_file():
        check_split(key, Path(name), split)


def check_split(key: str, local: Path, split: str) -> None:
    """Raise UserError unless a folder has a split with all its shards, none truncated. `key` is what the user set."""
    folder, index = local / split, local / split / "index.json"
    if not index.is_file():
        splits = ", ".join(sorted(path.parent.name for path in local.glob("*/index.json")))
        if (local / "index.json").is_file():
            raise UserError(
                f"{key}: {local} is a split itself; give the folder that it is in, {local.resolve().parent}"
            )
        found = f"its splits are {splits}" if splits else f"{local} has no finished split"
        found = f"{folder} holds no shards ({found})" if local.is_dir() else f"{local} does not exist"
        if find_parts(folder):
            command = f"python src/convert_dataset.py --merge --splits {split} --out_root {local}"
            raise UserError(f"{key}: {folder} holds parts of a conversion; write all, then join them with `{command}`")
        if not splits and (below := sorted({path.parents[1].name for path in local.glob("*/*/index.json")})):
            raise UserError(f"{key}: {local} holds no shards, but its folders do; give one of them: {', '.join(below)}")
        command = f"src/convert_dataset.py --dataset allenai/c4 --data_subset en --splits {split} --out_root {local}"
        own = f"src/convert_dataset.py … --splits {split} --out_root {local}"
        fix = (
            f"read one of them, or write {split} with `python {own}`"
            if splits
            else f"write shards, e.g. with `python {command}`"
        )
        raise UserError(f"{key}: {found}; {fix}")
    fix = "copy the split again, or convert it again with --overwrite"
    try:
        shards = json.loads(index.read_text())["shards"]
        forms = [[shard[form] for form in ("raw_data", "zip_data") if shard[form]] for shard in shards]
        sizes = [
            {form["basename"]: form["bytes"] for form in each} for each in forms
        ]  # one of a shard's files may lack
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{index} is corrupt; {fix}") from None
    found = [{name: _size(folder / name) for name in each} for each in sizes]
    if missing := [[*each][-1] for each in found if not any(size is not None for size in each.values())]:
        raise UserError(f"{folder}: {len(missing)} of {len(found)} shards are missing ({missing[0]}, …); {fix}")
    for each, expected in zip(found, sizes):
        for name, size in each.items():
            if size not in (None, expected[name]):
                differs = f"has {size:,} bytes, and {expected[name]:,} according to index.json"
                raise UserError(f"{folder / name} {differs}; {fix}")


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
