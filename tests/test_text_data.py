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


# Masks


@pytest.fixture(scope="module")
def many(tokenizer) -> dict[str, torch.Tensor]:
    """Masked rows of 64,000 tokens, with the ids they had."""
    texts = [" ".join(np.random.default_rng(i).choice(WORDS, 200)) for i in range(1000)]
    original = tokenizer(texts, truncation=True, max_length=64, return_tensors="pt", return_token_type_ids=False)
    return {**collator(tokenizer)(samples(texts)), "original": original["input_ids"]}


def test_the_share_of_tokens_to_predict_and_what_becomes_of_them(many, tokenizer):
    chosen = many["labels"] != IGNORED
    ordinary = ~torch.isin(many["original"], torch.tensor(tokenizer.all_special_ids))
    assert chosen[ordinary].float().mean() == pytest.approx(0.3, abs=0.01)
    before, after = many["original"][chosen], many["input_ids"][chosen]
    masked, kept = after == tokenizer.mask_token_id, after == before
    assert masked.float().mean() == pytest.approx(0.8, abs=0.01)
    # of the random tokens, one in the number of ordinary ones is by chance the old one
    chance = 0.1 / (len(tokenizer) - len(tokenizer.all_special_ids))
    assert kept.float().mean() == pytest.approx(0.1 + chance, abs=0.01)
    random = after[~masked & ~kept]
    assert not torch.isin(random, torch.tensor(tokenizer.all_special_ids)).any()
    assert len(random.unique()) == len(tokenizer) - len(tokenizer.all_special_ids)


def test_every_place_of_a_row_is_chosen_as_often(many):
    share = (many["labels"] != IGNORED).float().mean(0)[1:-1]  # without [CLS] and [SEP]
    assert share.min() > 0.22
    assert share.max() < 0.38


def test_labels_are_the_old_ids_where_chosen_and_nothing_else_changes(many):
    chosen = many["labels"] != IGNORED
    assert torch.equal(many["labels"][chosen], many["original"][chosen])
    assert torch.equal(many["input_ids"][~chosen], many["original"][~chosen])


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_special_tokens_and_padding_are_never_chosen(tokenizer, share):
    texts = ["the dog", "☃ the unknown ☃", *sentences(6)]
    batch = collator(tokenizer, share=share)(samples(texts))
    original = tokenizer(texts, padding=True, pad_to_multiple_of=8, return_tensors="pt")["input_ids"]
    special = torch.isin(original, torch.tensor(tokenizer.all_special_ids))
    assert tokenizer.unk_token_id in original
    assert tokenizer.pad_token_id in original
    assert torch.equal(batch["labels"] != IGNORED, ~special if share else torch.zeros_like(special))
    assert torch.equal(batch["input_ids"][special], original[special])
    assert torch.equal(batch["attention_mask"].bool(), original != tokenizer.pad_token_id)


def test_a_mask_depends_on_seed_epoch_and_sample_and_not_on_its_batch(tokenizer):
    collate = collator(tokenizer)
    texts = sentences(6)
    together = collate(samples(texts, epoch=2, first=40))
    for i, text in enumerate(texts):
        alone = collate([{"text": text, "sample": (2, 40 + i)}])
        length = int(alone["attention_mask"].sum())
        for name in ("input_ids", "labels"):
            assert torch.equal(alone[name][0, :length], together[name][i, :length])


@pytest.mark.parametrize(("change", "same"), [({}, True), ({"seed": 18}, False), ({"epoch": 1}, False), ({"index": 1}, False)])  # fmt: skip
@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
def test_when_the_same_text_is_masked_alike(tokenizer, change, same, train):
    text = " ".join(WORDS)

    def labels(seed=17, epoch=0, index=0):
        return collator(tokenizer, seed=seed, train=train)([{"text": text, "sample": (epoch, index)}])["labels"]

    if not train and "epoch" in change:
        same = True  # evaluations are comparable
    assert torch.equal(labels(), labels(**change)) == same


# Rows


@pytest.mark.parametrize("max_seq_len", [8, 20, 24, 64])
def test_rows_are_padded_to_a_multiple_of_8_and_never_beyond_max_seq_len(tokenizer, max_seq_len):
    collate = collator(tokenizer, max_seq_len)
    for words in range(1, 70):
        batch = collate(samples(["the dog", " ".join((WORDS * 2)[:words])]))
        length = batch["input_ids"].shape[1]
        real = int(batch["attention_mask"].sum(1).max())
        assert real <= length <= max_seq_len
        assert length - real < 8
        assert length % 8 == 0 or max_seq_len % 8
        assert batch["attention_mask"].shape == batch["labels"].shape == batch["input_ids"].shape


@pytest.mark.parametrize("max_seq_len", [8, 20])
def test_a_cut_text_still_ends_with_sep(tokenizer, max_seq_len):
    batch = collator(tokenizer, max_seq_len)(samples([" ".join(WORDS)]))
    row = unmasked(batch)[0]
    expected = tokenizer(" ".join(WORDS), add_special_tokens=False)["input_ids"][: max_seq_len - 2]
    assert row.tolist() == [tokenizer.cls_token_id, *expected, tokenizer.sep_token_id]


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
