"""Shards → masked batches: what is masked, when it is the same again, how rows are padded, and in what order they come."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY_MODEL, WORDS, sentences
from streaming import MDSWriter

from src.cli import UserError
from src.config import DatasetConfig, LoaderConfig
from src.text_data import IGNORED, MaskingCollator, build, build_dataset


def collator(tokenizer, max_seq_len: int = 64, seed: int = 17, share: float = 0.3, train: bool = True):
    return MaskingCollator(tokenizer, max_seq_len, share, seed, every_epoch=train)


def samples(texts: list[str], epoch: int = 0, first: int = 0) -> list[dict]:
    return [{"text": text, "sample": (epoch, first + i)} for i, text in enumerate(texts)]


def unmasked(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.where(batch["labels"] == IGNORED, batch["input_ids"], batch["labels"])


# Loaders


def config(shards: Path, split: str = "train", workers: int = 0, **changes) -> LoaderConfig:
    options = {"local": str(shards), "remote": None, "split": split, "max_seq_len": 64, "mlm_probability": 0.3, "seed": 17, **changes}  # fmt: skip
    return LoaderConfig(DatasetConfig(**options), num_workers=workers)


def epochs(loader, count: int = 1) -> list[list[dict[str, torch.Tensor]]]:
    return [list(loader) for _ in range(count)]


def test_the_loader_gives_the_same_samples_and_masks_with_no_worker_and_with_two(shards, tokenizer):
    plain, parallel = (
        epochs(build(config(shards, workers=workers, shuffle=True), tokenizer, 5, train=True), 2) for workers in (0, 2)
    )
    for one, other in zip(plain, parallel):
        rows = [
            sorted((tuple(ids), tuple(labels)) for batch in epoch for ids, labels in unpadded(batch))
            for epoch in (one, other)
        ]
        assert rows[0] == rows[1]


def unpadded(batch: dict[str, torch.Tensor]):
    for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"].bool()):
        yield ids[mask].tolist(), labels[mask].tolist()


def test_an_epoch_holds_every_text_once(shards, tokenizer):
    dataset = build_dataset(str(shards), None, "train", batch_size=5)
    expected = sorted(tokenizer(dataset[i]["text"], truncation=True, max_length=64)["input_ids"] for i in range(len(dataset)))  # fmt: skip
    loader = build(config(shards, shuffle=True), tokenizer, 5, train=True)
    for epoch in epochs(loader, 2):
        rows = [row[mask.bool()].tolist() for b in epoch for row, mask in zip(unmasked(b), b["attention_mask"])]
        assert sorted(rows) == expected


def rows_in_order(loader, count: int) -> list[list[tuple]]:
    return [[tuple(row[mask.bool()].tolist()) for b in epoch for row, mask in zip(unmasked(b), b["attention_mask"])] for epoch in epochs(loader, count)]  # fmt: skip


def test_shuffling_is_another_order_in_every_epoch_and_the_same_by_seed(shards, tokenizer):
    one, again, other = (
        rows_in_order(build(config(shards, shuffle=True, seed=seed), tokenizer, 5, train=True), 2)
        for seed in (17, 17, 18)
    )
    assert one[0] != one[1]
    assert one == again
    assert one[0] != other[0]


def test_evaluation_gives_the_same_batches_in_every_epoch_and_training_other_masks(shards, tokenizer):
    first, second = epochs(build(config(shards, "val"), tokenizer, 8, train=False), 2)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(first, second) for name in a)
    first, second = epochs(build(config(shards, "val"), tokenizer, 8, train=True), 2)
    assert all(torch.equal(unmasked(a), unmasked(b)) for a, b in zip(first, second))
    assert any(not torch.equal(a["labels"], b["labels"]) for a, b in zip(first, second))


def test_a_batch_is_what_the_model_takes(shards, tokenizer):
    from src.lion import LionConfig, LionForMaskedLM

    batch = next(iter(build(config(shards), tokenizer, 4, train=True)))
    model = LionForMaskedLM(LionConfig(**TINY_MODEL, vocab_size=len(tokenizer))).train()
    loss = model(**batch).loss
    assert loss.item() > 0


# What is not there


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"data_local: the folder \S+nowhere does not exist.*--splits train_small"):
        build_dataset(str(tmp_path / "nowhere"), None, "train_small")


def test_a_split_that_is_not_there_is_named_beside_those_that_are(shards):
    with pytest.raises(UserError, match=r"train_small holds no shards \(its splits are train, val\)"):
        build_dataset(str(shards), None, "train_small")


def test_an_empty_folder_holds_no_split(tmp_path):
    with pytest.raises(UserError, match="no finished split"):
        build_dataset(str(tmp_path), None, "train")


def test_shards_without_text_are_named_with_their_columns(tmp_path):
    with MDSWriter(out=str(tmp_path / "train"), columns={"body": "str", "id": "int"}) as out:
        out.write({"body": "hello", "id": 1})
    with pytest.raises(UserError, match=r"train: the shards have columns body, id but no `text`"):
        build_dataset(str(tmp_path), None, "train")


def test_a_split_that_does_not_fill_one_batch_is_refused_where_such_batches_are_left_out(shards, tokenizer):
    """Epochs without a batch would go by for ever."""
    options = config(shards)
    options.drop_last = True
    with pytest.raises(UserError, match=r"1000"):
        build(options, tokenizer, 1000, train=True)


def test_an_index_that_is_cut_is_named(shards, tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "index.json").write_text((shards / "train" / "index.json").read_text()[:40])
    with pytest.raises(UserError, match=r"train"):
        build_dataset(str(tmp_path), None, "train")


def test_an_index_without_its_shards_is_named(shards, tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "index.json").write_text((shards / "train" / "index.json").read_text())
    with pytest.raises(UserError, match=r"train"):
        build_dataset(str(tmp_path), None, "train")
