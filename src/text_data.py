"""MDS shards → masked batches.

Masks are drawn from (seed, epoch, sample), so they do not depend on the number of workers or devices, differ from epoch
to epoch, and are the same again in a run that was interrupted.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.utils import dist
from streaming import StreamingDataLoader, StreamingDataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from src.cli import UserError
from src.config import LoaderConfig

IGNORED = -100  # the label of a token that is not to be predicted


class StreamingTextDataset(StreamingDataset):
    """Texts from MDS shards with a `text` column. Samples: {"text": str, "sample": (epoch, index)}."""

    epoch = 0

    def _resume_incr_epoch(self) -> tuple[int, int]:
        self.epoch, sample_in_epoch = super()._resume_incr_epoch()
        return self.epoch, sample_in_epoch

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"text": super().__getitem__(index)["text"], "sample": (self.epoch, int(index))}


class MaskingCollator:
    """Samples → a batch for masked language modelling (Devlin et al. 2018, section 3.1).

    Of the tokens that are no special ones, `mlm_probability` are to be predicted: 80 % of those become [MASK], 10 % a
    random token, 10 % stay. Rows are padded to the longest, rounded up to a multiple of 8.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_seq_len: int, mlm_probability: float, seed: int, every_epoch: bool
    ):
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len
        self.mlm_probability = mlm_probability
        self.seed = seed
        self.every_epoch = every_epoch  # draw anew in each epoch (training) or keep the masks (evaluation)
        self.special = np.array(sorted(tokenizer.all_special_ids))
        self.pad_to = 8 if max_seq_len % 8 == 0 else None
        self.ordinary = np.setdiff1d(np.arange(len(tokenizer)), self.special)

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        batch = self.tokenizer(
            [sample["text"] for sample in samples],
            truncation=True,
            max_length=self.max_seq_len,
            padding="longest",
            pad_to_multiple_of=self.pad_to,
            return_token_type_ids=False,
            return_tensors="np",
        )
        ids, labels = zip(*(self.mask(row, *sample["sample"]) for row, sample in zip(batch["input_ids"], samples)))
        return {
            "input_ids": torch.from_numpy(np.stack(ids)),
            "attention_mask": torch.from_numpy(batch["attention_mask"]),
            "labels": torch.from_numpy(np.stack(labels)),
        }

    def mask(self, ids: np.ndarray, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The row with tokens hidden, and its labels; both (length,)."""
        draw = np.random.default_rng((self.seed, epoch if self.every_epoch else 0, index))
        chosen = (draw.random(self.max_seq_len)[: len(ids)] < self.mlm_probability) & ~np.isin(ids, self.special)
        fate = draw.random(self.max_seq_len)[: len(ids)]
        random_ids = draw.choice(self.ordinary, self.max_seq_len)[: len(ids)]
        labels = np.where(chosen, ids, IGNORED)
        hidden = np.where(chosen & (fate < 0.8), self.tokenizer.mask_token_id, ids)
        return np.where(chosen & (fate >= 0.9), random_ids, hidden), labels


def build(
    config: LoaderConfig, tokenizer: PreTrainedTokenizerBase, batch_size: int, train: bool
) -> StreamingDataLoader:
    """Masked batches of `batch_size` rows for this device. Raises UserError where the split has no shards."""
    options = config.dataset
    if not 0 < options.mlm_probability < 1:
        raise UserError(f"mlm_probability {options.mlm_probability} must lie between 0 and 1")
    dataset = build_dataset(
        options.local,
        options.remote,
        options.split,
        batch_size=batch_size,
        shuffle=options.shuffle,
        shuffle_seed=options.seed,
        predownload=options.predownload,
        cache_limit=options.cache_limit,
        num_canonical_nodes=options.num_canonical_nodes,
    )
    devices = dist.get_world_size()
    if config.drop_last and len(dataset) < batch_size:  # of one device
        raise UserError(f"the split {options.split} gives each of {devices} devices {len(dataset)} samples, less than a batch of {batch_size}; lower global_train_batch_size, or convert more text")  # fmt: skip
    return StreamingDataLoader(
        dataset,
        batch_size=batch_size,
        collate_fn=MaskingCollator(
            tokenizer, options.max_seq_len, options.mlm_probability, options.seed, every_epoch=train
        ),
        num_workers=config.num_workers,
        drop_last=config.drop_last,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=config.num_workers > 0,
    )


def build_dataset(local: str, remote: str | None, split: str, **options: Any) -> StreamingTextDataset:
    """The samples of a split, checked before any work. Raises UserError where there are no shards."""
    folder = Path(local) / split
    if remote is None and not (folder / "index.json").is_file():
        command = (
            f"python src/convert_dataset.py --dataset allenai/c4 --data_subset en --splits {split} --out_root {local}"
        )
        if not Path(local).is_dir():
            raise UserError(f"data_local: the folder {local} does not exist; write shards to it, e.g. with `{command}`")
        splits = sorted(path.parent.name for path in Path(local).glob("*/index.json"))
        found = f"its splits are {', '.join(splits)}" if splits else "it holds no finished split"
        raise UserError(f"data_local: {folder} holds no shards ({found}); write them, e.g. with `{command}`")
    if remote is None:
        check_shards(folder)
    dataset = StreamingTextDataset(local=local, remote=remote, split=split, **options)
    columns = dataset.shards[0].column_names
    if "text" not in columns:
        raise UserError(f"{folder}: the shards have columns {', '.join(columns)} but no `text`; convert the data anew")
    return dataset


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
