"""Samples → batches: rows padded and packed, and the loss of packed rows the same as that of single ones."""

import itertools

import numpy as np
import pytest
import torch
from conftest import MIXERS, TINY_MODEL, WORDS, sentences, settings_of

from src.data.batches import (
    IGNORED,
    Masking,
    MaskingCollator,
    first_fit_decreasing,
    sample_count,
    split_batch,
    token_counts,
)
from src.lion import LionConfig, LionForMaskedLM


def collator(tokenizer, max_seq_len: int = 64, share: float = 0.3, **options) -> MaskingCollator:
    return MaskingCollator(tokenizer, max_seq_len, Masking(tokenizer, share, seed=17), **options)


def samples(texts: list[str], epoch: int = 0, first: int = 0) -> list[dict]:
    return [{"text": text, "sample": (epoch, first + i)} for i, text in enumerate(texts)]


def tokenized(tokenizer, texts: list[str]) -> list[dict]:
    return [
        {"tokens": np.array(tokenizer(text)["input_ids"], np.uint8), "sample": (0, i)} for i, text in enumerate(texts)
    ]


def unmasked(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.where(batch["labels"] == IGNORED, batch["input_ids"], batch["labels"])


def test_special_tokens_and_padding_are_never_chosen(tokenizer):
    texts = ["the dog", "☃ the unknown ☃", *sentences(6)]
    batch = collator(tokenizer, share=0.999999)(samples(texts))
    original = tokenizer(texts, padding=True, pad_to_multiple_of=8, return_tensors="pt")["input_ids"]
    special = torch.isin(original, torch.tensor(tokenizer.all_special_ids))
    assert tokenizer.unk_token_id in original
    assert tokenizer.pad_token_id in original
    assert torch.equal(batch["labels"] != IGNORED, ~special)
    assert torch.equal(batch["input_ids"][special], original[special])
    assert torch.equal(batch["attention_mask"].bool(), original != tokenizer.pad_token_id)


def test_a_mask_does_not_depend_on_the_batch(tokenizer):
    collate = collator(tokenizer)
    texts = sentences(6)
    together = collate(samples(texts, epoch=2, first=40))
    for i, text in enumerate(texts):
        alone = collate([{"text": text, "sample": (2, 40 + i)}])
        length = int(alone["attention_mask"].sum())
        for name in ("input_ids", "labels"):
            assert torch.equal(alone[name][0, :length], together[name][i, :length])


@pytest.mark.parametrize("packing", [False, True])
def test_text_and_its_tokens_give_the_same_batch(tokenizer, packing):
    collate = collator(tokenizer, packing=packing)
    texts = sentences(9)
    of_text, of_tokens = collate(samples(texts)), collate(tokenized(tokenizer, texts))
    assert of_text.keys() == of_tokens.keys()
    assert all(torch.equal(of_text[name], of_tokens[name]) for name in of_text)


# Rows


@pytest.mark.parametrize("max_seq_len", [8, 20, 24, 64])
@pytest.mark.parametrize("packing", [False, True])
def test_rows_are_padded_to_a_multiple_of_8_and_never_beyond_max_seq_len(tokenizer, max_seq_len, packing):
    collate = collator(tokenizer, max_seq_len, packing=packing)
    for words in range(1, 70):
        batch = collate(samples(["the dog", " ".join((WORDS * 2)[:words])]))
        length = batch["input_ids"].shape[1]
        real = int(batch["attention_mask"].sum(1).max())
        assert real <= length <= max_seq_len
        assert length - real < 8
        assert length % 8 == 0 or max_seq_len % 8
        assert batch["attention_mask"].shape == batch["labels"].shape == batch["input_ids"].shape


@pytest.mark.parametrize("packing", [False, True])
def test_pad_to_max_length_gives_every_batch_the_same_length(tokenizer, packing):
    collate = collator(tokenizer, 52, packing=packing, pad_to_max_length=True)
    for count in (1, 2, 5):
        batch = collate(samples(sentences(count)))
        assert {value.shape[1] for name, value in batch.items() if name != "sample_lengths"} == {52}


@pytest.mark.parametrize("max_seq_len", [8, 20])
def test_a_truncated_text_still_ends_with_sep(tokenizer, max_seq_len):
    batch = collator(tokenizer, max_seq_len)(samples([" ".join(WORDS)]))
    row = unmasked(batch)[0]
    expected = tokenizer(" ".join(WORDS), add_special_tokens=False)["input_ids"][: max_seq_len - 2]
    assert row.tolist() == [tokenizer.cls_token_id, *expected, tokenizer.sep_token_id]


# Packed rows


def test_first_fit_decreasing_puts_every_sample_in_the_first_row_with_room():
    assert first_fit_decreasing([3, 7, 5, 2, 4], 10) == [[1, 0], [2, 4], [3]]
    assert first_fit_decreasing([10, 10], 10) == [[1], [0]]
    draw = np.random.default_rng(0)
    for count in (1, 2, 50, 500):
        lengths = draw.integers(1, 65, count)
        rows = first_fit_decreasing(lengths, 64)
        assert sorted(itertools.chain.from_iterable(rows)) == list(range(count))
        fill = [lengths[row].sum() for row in rows]
        assert max(fill) <= 64
        assert len(rows) <= 1.05 * lengths.sum() / 64 + 2


def test_a_sample_longer_than_a_row_is_an_error():
    with pytest.raises(ValueError, match="65 tokens does not fit in a row of 64"):
        first_fit_decreasing([3, 65], 64)


def test_packed_rows_hold_each_sample_once_with_its_mask_and_index(tokenizer):
    texts = sentences(40)
    single = collator(tokenizer)(samples(texts))
    packed = collator(tokenizer, packing=True)(samples(texts))
    assert len(packed["input_ids"]) < 0.7 * len(texts)
    found = []
    for row in range(len(packed["input_ids"])):
        ids, labels, real, numbers = (
            packed[name][row] for name in ("input_ids", "labels", "attention_mask", "seq_idx")
        )
        assert numbers[real == 0].eq(numbers[real == 1][-1]).all()
        lengths = packed["sample_lengths"][row]
        assert numbers[real == 1].unique(return_counts=True)[1].tolist() == lengths[lengths >= 0].tolist()
        for number in range(numbers.max() + 1):
            own = (numbers == number) & (real == 1)
            found.append((ids[own].tolist(), labels[own].tolist()))
    real = single["attention_mask"].bool()
    rows = zip(single["input_ids"], single["labels"], real)
    expected = [(ids[own].tolist(), labels[own].tolist()) for ids, labels, own in rows]
    assert sorted(found) == sorted(expected)


def test_packed_rows_of_one_sample_have_room_for_two(tokenizer):
    batch = collator(tokenizer, 16, packing=True)(samples([" ".join(WORDS[:12])] * 3))
    assert batch["sample_lengths"].tolist() == [[14, -1]] * 3


def model(tokenizer, mixer: str) -> LionForMaskedLM:
    torch.manual_seed(0)
    sizes = {
        **TINY_MODEL,
        "mixer": mixer,
        "num_hidden_layers": 2,
        "initializer_range": 0.3,
        "vocab_size": len(tokenizer),
    }
    settings = settings_of(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return LionForMaskedLM(LionConfig(**settings)).double().train()


def loss_and_gradients(network: LionForMaskedLM, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    network.zero_grad()
    for_composer = ("sample_lengths", "token_counts")
    loss = network(**{name: value for name, value in batch.items() if name not in for_composer}).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in network.parameters())]


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_loss_of_packed_rows_is_that_of_single_ones_and_so_are_its_gradients(tokenizer, mixer):
    network = model(tokenizer, mixer)
    single, packed = (collator(tokenizer, packing=packing)(samples(sentences(24))) for packing in (False, True))
    assert packed["input_ids"].numel() < 0.8 * single["input_ids"].numel()
    for one, other in zip(loss_and_gradients(network, single), loss_and_gradients(network, packed)):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def concatenated(tokenizer, *begins: int) -> dict:
    """A row of 30 tokens in which documents start at these positions."""
    ids = np.random.default_rng(0).integers(5, len(tokenizer), 30)
    ids[0] = tokenizer.cls_token_id
    ids[[*(begin - 1 for begin in begins if 1 < begin < 30), 29]] = tokenizer.sep_token_id
    return {"tokens": ids.astype(np.uint8), "begins": np.array(begins, np.uint16), "sample": (0, 0)}


@pytest.mark.parametrize(
    ("begins", "numbers"),
    [
        ([1, 11, 18], [0] * 11 + [1] * 7 + [2] * 12),  # [CLS] belongs to the first document
        ([11, 18], [0] * 11 + [1] * 7 + [2] * 12),  # it belongs to the rest of a document from the previous row
        ([1], [0] * 30),
        ([30], [0] * 30),  # no document starts here
        ([], [0] * 30),
    ],
)
def test_documents_of_a_row_are_separated_only_with_packing(tokenizer, begins, numbers):
    sample = concatenated(tokenizer, *begins)
    packed = collator(tokenizer, packing=True)([sample])
    assert packed["seq_idx"][0].tolist() == [*numbers, numbers[-1], numbers[-1]]
    assert sample_count(packed) == 1
    assert "seq_idx" not in collator(tokenizer)([sample])


@pytest.mark.parametrize("texts", [1, 2])
def test_a_text_without_tokens_takes_no_room_in_a_row(tokenizer, texts):
    """A tokenizer that adds no [CLS] reads control characters as nothing."""
    empty, other = {"tokens": np.zeros(0, np.uint16), "sample": (0, 0)}, concatenated(tokenizer)
    packed = collator(tokenizer, packing=True)([empty, other][:texts])
    assert sample_count(packed) == texts
    assert packed["attention_mask"].sum() == (texts - 1) * len(other["tokens"])
    assert not packed["seq_idx"].any()


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_document_in_a_row_is_encoded_as_when_alone(tokenizer, mixer):
    network = model(tokenizer, mixer).eval()
    sample = concatenated(tokenizer, 1, 11, 18)
    batch = collator(tokenizer, packing=True, share=1e-9)([sample])
    ids = torch.from_numpy(sample["tokens"].astype(np.int64))[None]
    logits = network(batch["input_ids"], batch["attention_mask"], seq_idx=batch["seq_idx"]).logits
    for begin, end in ((0, 11), (11, 18), (18, 30)):
        torch.testing.assert_close(logits[:, begin:end], network(ids[:, begin:end]).logits)


# Counting and splitting, for Composer


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("size", [1, 3, 8, 23, 24, 100])
def test_microbatches_hold_every_row_once_and_are_as_many_as_without_packing(tokenizer, packing, size):
    batch = collator(tokenizer, packing=packing)(samples(sentences(24)))
    parts = split_batch(batch, size)
    assert len(parts) == min(-(-24 // size), len(batch["input_ids"]))
    assert sum(map(sample_count, parts)) == sample_count(batch) == 24
    for part in parts:
        counts, positions = part.pop("token_counts"), part.pop("masked_positions")
        assert counts == token_counts(part)
        assert torch.equal(part["labels"].flatten()[positions], part["labels"][part["labels"] != -100])
    for name in batch:
        assert torch.equal(torch.cat([part[name] for part in parts]), batch[name])


def test_a_microbatch_for_a_gpu_has_a_mask_only_if_there_is_padding(tokenizer, monkeypatch):
    batch = collator(tokenizer)(samples(sentences(2)))
    batch["attention_mask"] = torch.tensor([[1, 0], [1, 1]]).repeat_interleave(batch["labels"].shape[1] // 2, 1)
    assert all("attention_mask" in part for part in split_batch(batch, 1))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    padded, full = split_batch(batch, 1)
    assert "attention_mask" in padded and "attention_mask" not in full
    assert full["token_counts"]["total"] == batch["labels"].shape[1]


def test_a_device_with_fewer_rows_adds_empty_microbatches(tokenizer, monkeypatch):
    batch = collator(tokenizer, packing=True)(samples(sentences(24)))
    rows = len(batch["input_ids"])
    monkeypatch.setattr("src.data.batches.dist.all_gather_object", lambda count: [count, rows + 2])
    parts = split_batch(batch, 1)
    assert [sample_count(part) for part in parts[rows:]] == [0, 0]
    assert [part["token_counts"]["loss_generating"] for part in parts[rows:]] == [1e-6, 1e-6]
    network = model(tokenizer, "lion-s")
    for gradient in loss_and_gradients(network, parts[-1]):
        assert not gradient.any()
    monkeypatch.undo()
    assert len(split_batch(batch, 1)) == rows


def test_real_and_predicted_tokens_are_counted_separately(tokenizer):
    texts = sentences(24)
    tokens = sum(len(ids) for ids in tokenizer(texts, truncation=True, max_length=64)["input_ids"])
    single, packed = (token_counts(collator(tokenizer, packing=packing)(samples(texts))) for packing in (False, True))
    assert single == packed
    assert single["total"] == tokens
    assert 0.2 * tokens < single["loss_generating"] < 0.4 * tokens
    assert 0 < token_counts(collator(tokenizer, share=1e-9)(samples(texts)))["loss_generating"] < 1e-3


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("size", [1, 5, 24])
def test_microbatch_losses_weighted_by_masked_tokens_give_the_loss_of_the_batch(tokenizer, packing, size):
    network = model(tokenizer, "lion-s")
    whole = collator(tokenizer)(samples(sentences(24)))
    parts = split_batch(collator(tokenizer, packing=packing)(samples(sentences(24))), size)
    weights = torch.tensor([token_counts(part)["loss_generating"] for part in parts])
    losses = torch.stack([loss_and_gradients(network, part)[0] for part in parts])
    torch.testing.assert_close(
        (weights / weights.sum()) @ losses, loss_and_gradients(network, whole)[0], rtol=1e-6, atol=0
    )
