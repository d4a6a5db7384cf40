"""Masking: distributed as in transformers' collator, determined by seed, epoch and sample, optionally by word."""

import numpy as np
import pytest
import torch
from conftest import SPECIAL, WORDS, sentences
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from src.data.batches import IGNORED, Masking
from src.errors import UserError

LENGTH = 128


@pytest.fixture(scope="module")
def rows(tokenizer) -> np.ndarray:
    """A million tokens: rows of 128 with [CLS], [SEP], unknown words and, in every fourth, padding."""
    draw = np.random.default_rng(0)
    ids = draw.integers(len(tokenizer), size=(8192, LENGTH))
    ids[np.isin(ids, (tokenizer.pad_token_id, tokenizer.mask_token_id))] = tokenizer.unk_token_id
    ids[:, 0], ids[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
    ids[::4, 99], ids[::4, 100:] = tokenizer.sep_token_id, tokenizer.pad_token_id
    return ids


def ours(rows: np.ndarray, masking: Masking) -> tuple[np.ndarray, np.ndarray]:
    ids, labels = zip(*(masking(row, 0, index) for index, row in enumerate(rows)))
    return np.stack(ids), np.stack(labels)


def facts(rows: np.ndarray, seen: np.ndarray, labels: np.ndarray, tokenizer) -> dict[str, float]:
    """Statistics of masks: how many, of which tokens, where, and their replacements."""
    ordinary = ~np.isin(rows, tokenizer.all_special_ids)
    chosen = labels != IGNORED
    changed = seen[chosen] != rows[chosen]
    masked = seen[chosen] == tokenizer.mask_token_id
    replaced = np.bincount(seen[chosen][changed & ~masked], minlength=len(tokenizer))
    pairs = ordinary[:, :-1] & ordinary[:, 1:]
    return {
        "chosen": chosen[ordinary].mean(),
        "special chosen": chosen[~ordinary].sum(),
        "chosen in a row, variance": (chosen.sum(1) / ordinary.sum(1)).var(),
        "neighbours both chosen": (chosen[:, :-1] & chosen[:, 1:])[pairs].mean(),
        "[MASK]": masked.mean(),
        "another token": (changed & ~masked).mean(),
        "rarest replacement": replaced[np.arange(len(tokenizer)) != tokenizer.mask_token_id].min() / replaced.sum(),
        "replaced by a special token": replaced[tokenizer.all_special_ids].sum() / replaced.sum(),
    }


@pytest.mark.parametrize("share", [0.15, 0.3])
def test_masks_of_a_million_tokens_have_the_statistics_of_transformers(rows, tokenizer, share):
    collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=share)
    torch.manual_seed(0)
    theirs = collate([{"input_ids": row} for row in torch.from_numpy(rows)])
    expected = facts(rows, theirs["input_ids"].numpy(), theirs["labels"].numpy(), tokenizer)
    seen, labels = ours(rows, Masking(tokenizer, share, seed=17))
    found = facts(rows, seen, labels, tokenizer)
    assert np.array_equal(labels[labels != IGNORED], rows[labels != IGNORED])
    assert np.array_equal(seen[labels == IGNORED], rows[labels == IGNORED])
    assert found["special chosen"] == expected["special chosen"] == 0
    # About four standard deviations, with at least 120,000 of a million tokens chosen.
    near = {
        "chosen": 0.003, "chosen in a row, variance": 0.0001, "neighbours both chosen": 0.003, "[MASK]": 0.005,
        "another token": 0.004, "rarest replacement": 0.002, "replaced by a special token": 0.01,
    }  # fmt: skip
    assert {name: found[name] == pytest.approx(expected[name], abs=near[name]) for name in near} == dict.fromkeys(
        near, True
    )
    assert found["chosen"] == pytest.approx(share, abs=0.002)
    assert found["[MASK]"] == pytest.approx(0.8, abs=0.004)


def test_every_position_of_a_row_is_chosen_equally_often(rows, tokenizer):
    _, labels = ours(rows, Masking(tokenizer, 0.3, seed=17))
    ordinary = ~np.isin(rows, tokenizer.all_special_ids)
    share = (labels != IGNORED).sum(0)[1:-1] / ordinary.sum(0)[1:-1]
    assert share.min() > 0.27
    assert share.max() < 0.33


@pytest.mark.parametrize(("share", "whole_words"), [(0.0, False), (1.0, False), (1.0, True)])
def test_special_tokens_are_never_chosen(rows, tokenizer, share, whole_words):
    _, labels = ours(rows[:64], Masking(tokenizer, share, seed=17, whole_words=whole_words))
    special = np.isin(rows[:64], tokenizer.all_special_ids)
    assert np.array_equal(labels != IGNORED, ~special if share else np.zeros_like(special))


@pytest.mark.parametrize(
    ("change", "same"), [({}, True), ({"seed": 18}, False), ({"epoch": 1}, False), ({"index": 1}, False)]
)
@pytest.mark.parametrize("every_epoch", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("whole_words", [True, False])
def test_seed_epoch_and_index_determine_the_mask_of_a_text(tokenizer, change, same, every_epoch, whole_words):
    ids = np.array(tokenizer(" ".join(WORDS))["input_ids"])

    def labels(seed=17, epoch=0, index=0):
        return Masking(tokenizer, 0.3, seed, every_epoch, whole_words)(ids, epoch, index)[1]

    if not every_epoch and "epoch" in change:
        same = True  # evaluations are comparable
    assert np.array_equal(labels(), labels(**change)) == same


# Whole words


def spelled(tokenizer, count: int) -> list[np.ndarray]:
    """Return texts with many words that the vocabulary splits into several tokens."""
    texts = [
        text.replace("dog", "dogs").replace("river", "rivers").replace("quiet", "zzz") for text in sentences(count)
    ]
    return [np.array(tokenizer(text)["input_ids"]) for text in texts]


def test_the_tokens_of_a_word_are_chosen_together_and_words_independently(tokenizer):
    masking = Masking(tokenizer, 0.3, seed=17, whole_words=True)
    continuing = together = apart = 0
    for index, ids in enumerate(spelled(tokenizer, 400)):
        chosen = masking(ids, 0, index)[1] != IGNORED
        continues = np.array([token.startswith("##") for token in tokenizer.convert_ids_to_tokens(ids)])
        assert (chosen[1:] == chosen[:-1])[continues[1:]].all()
        continuing += continues.sum()
        special = np.isin(ids, tokenizer.all_special_ids)
        words_meet = ~continues[1:] & ~special[1:] & ~special[:-1]
        together += (chosen[1:] & chosen[:-1])[words_meet].sum()
        apart += words_meet.sum()
    assert continuing > 500
    assert together / apart == pytest.approx(0.09, abs=0.01)  # two neighbouring words by chance alone


def test_whole_word_masking_chooses_as_many_tokens_as_token_masking(tokenizer):
    shares = []
    for whole_words in (False, True):
        masking = Masking(tokenizer, 0.3, seed=17, whole_words=whole_words)
        chosen = tokens = 0
        for index, ids in enumerate(spelled(tokenizer, 2000)):
            chosen += (masking(ids, 0, index)[1] != IGNORED).sum()
            tokens += (~np.isin(ids, tokenizer.all_special_ids)).sum()
        shares.append(chosen / tokens)
    assert shares == pytest.approx([0.3, 0.3], abs=0.01)


def test_a_row_that_starts_within_a_word_treats_its_first_token_as_a_word(tokenizer):
    cls, a, b, the, sep = tokenizer.convert_tokens_to_ids(["[CLS]", "##a", "##b", "the", "[SEP]"])
    masking = Masking(tokenizer, 0.5, seed=17, whole_words=True)
    masks = {tuple(masking(np.array([cls, a, b, the, sep]), 0, index)[1] != IGNORED) for index in range(64)}
    assert masks == {(False, x, x, y, False) for x in (False, True) for y in (False, True)}


def test_whole_words_require_a_wordpiece_tokenizer():
    bpe = Tokenizer(BPE({token: number for number, token in enumerate((*SPECIAL, *"abc"))}, []))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, mask_token="[MASK]", pad_token="[PAD]", name_or_path="mine"
    )
    Masking(tokenizer, 0.3, seed=17)
    with pytest.raises(UserError, match=r"whole_word_masking: mine is not a WordPiece tokenizer"):
        Masking(tokenizer, 0.3, seed=17, whole_words=True)
