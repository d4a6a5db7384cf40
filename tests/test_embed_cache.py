"""The contrastive loss against its formula, and cached gradients against those of one batch."""

import math

import pytest
import torch
import warm
from embed_batches import PAIRS, Embedder, at_once, batch_of, cached, close, texts
from torch.nn import functional as F

from src.embed.loss import contrastive_loss, false_negatives
from src.embed.microbatches import assemble, split


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dims", [(), (2,), (3, 8)])
def test_the_loss_is_its_formula(symmetric, dims):
    generator = torch.Generator().manual_seed(0)
    B, N, τ = 4, 7, 0.3
    q, d = (F.normalize(torch.randn(n, 8, dtype=torch.float64, generator=generator), dim=-1) for n in (B, N))
    keys, positives = torch.tensor([1, 2, 3, 1, 5, 2, 7]), [[1, 7, 8], [2], [3], [1]]
    read = torch.tensor([1, 2, 5, 1, 5, 2, 7])  # cut, the third document is the fifth
    pairs = torch.tensor([(row, key) for row, of_row in enumerate(positives) for key in of_row])
    excluded = false_negatives(torch.stack([keys, read], 1), pairs, B)
    expected = 0.0
    for m in dims or (8,):
        u, v = (F.normalize(x[:, :m], dim=-1) for x in (q, d))
        s = (u @ v.T / τ).tolist()

        def counts(i, j):
            return j == i or not (keys[j] == keys[i] or keys[j] in positives[i] or read[j] == read[i])

        rows = [
            -math.log(math.exp(s[i][i]) / sum(math.exp(s[i][j]) for j in range(N) if counts(i, j))) for i in range(B)
        ]
        columns = [
            -math.log(math.exp(s[i][i]) / sum(math.exp(s[j][i]) for j in range(B) if counts(j, i))) for i in range(B)
        ]
        expected += (sum(rows) + sum(columns)) / 2 / B if symmetric else sum(rows) / B
    loss = contrastive_loss(q, d, excluded, τ, symmetric, dims)
    assert loss.item() == pytest.approx(expected / len(dims or (8,)), rel=1e-12)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("size", [{"texts": 1}, {"texts": 3}, {"texts": 100}, {"tokens": 20}])
def test_cached_gradients_are_those_of_one_batch(size, dropout, packing):
    options = {"temperature": 0.1, "symmetric": False, "dims": (8, 16)}
    model, batch = Embedder(dropout), batch_of(texts(), PAIRS, size.get("texts"), size.get("tokens"), packing)
    loss, found = cached(model, batch, options)
    expected_loss, expected = at_once(model, batch, options)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    assert close(found, expected)
    if not dropout:  # nor do they depend on the microbatches
        whole = batch_of(texts(), PAIRS, 100, None, False)
        cached(model, whole, options)
        assert close(found, at_once(model, whole, options)[1])


def test_cached_gradients_with_passed_states_are_those_of_one_batch():
    options, model = {"temperature": 0.1, "symmetric": False, "dims": ()}, Embedder(dropout=0.1)
    model.model.lion.set_state_passing(0.5)
    batch = batch_of(texts(), PAIRS, 3, None, False)
    loss, found = cached(model, batch, options)
    expected_loss, expected = at_once(model, batch, options)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    assert close(found, expected)
    model.model.lion.set_state_passing(0)
    assert abs(at_once(model, batch, options)[0] - loss) > 1e-3


def test_two_devices_compute_the_gradients_of_one(tmp_path):
    status, output = warm.run("tests/embed_batches.py", tmp_path / "meeting", output=tmp_path / "output")
    assert status == 0, output


def test_microbatches_hold_every_text_once_within_their_limit():
    lengths = [5, 1, 9, 9, 2, 30, 4]
    assert split(lengths, 3, None) == [[1, 4, 6], [0, 2, 3], [5]]
    assert split(lengths, None, 12, packing=True) == [[1, 4, 6, 0], [2], [3], [5]]
    assert split(lengths, None, 12) == [[1, 4, 6], [0], [2], [3], [5]]
    assert split([2, 2, 2, 9, 9], None, 100) == [[0, 1, 2], [3, 4]]


def test_a_packed_microbatch_numbers_texts_in_reading_order():
    part = assemble([[7] * 5, [8], [9] * 3, [6] * 2], [1, 3, 2, 0], 0, packing=True)
    tokens, rows = part["input_ids"][part["attention_mask"].bool()].tolist(), len(part["input_ids"])
    texts = {0: [7] * 5, 1: [8], 2: [9] * 3, 3: [6] * 2}
    assert tokens == [token for number in part["texts"].tolist() for token in texts[number]]
    assert part["input_ids"].shape[1] == 5 and rows < 4
    starts = F.pad(part["seq_idx"], (1, 0), value=-1).diff(dim=1)
    assert starts.sum() == 4
