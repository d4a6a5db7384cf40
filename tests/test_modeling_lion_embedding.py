"""Text embeddings: poolings against their formulas, packed and padded texts, passages, and long texts in segments."""

import inspect

import pytest
import torch

from src.lion import LionConfig, LionEmbeddingModel, LionForMaskedLM, LionModel
from src.lion import modeling_lion as modeling
from src.lion.pooling import pool_spans

V, D = 60, 16
POOLINGS = ("mean", "attention", "cls")
LINEAR = ("lion-lit", "lion-d", "lion-s", "hydra")


def build(mixer: str = "lion-s", pooling: str = "mean", kind: type = LionEmbeddingModel):
    torch.manual_seed(0)
    sizes = {"headdim": 8, "d_state": 8} if mixer == "hydra" else {"num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"vocab_size": V, "hidden_size": D, "num_hidden_layers": 2, "max_position_embeddings": 100}
    model = kind(LionConfig(mixer=mixer, pooling=pooling, **sizes)).eval()
    if pooling == "attention":
        torch.nn.init.normal_(model.pooling_weight)
    return model


def texts(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, V, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return ids * mask, mask.long()


def expected_vectors(model: LionEmbeddingModel, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Each text's vector by the formula, from the encoder's hidden states of the text on its own."""
    vectors = []
    for row, length in zip(ids, mask.sum(1)):
        h = model.lion(row[None, :length]).last_hidden_state[0]
        if model.config.pooling == "attention":
            vectors.append((h @ model.pooling_weight).softmax(0) @ h)
        else:
            vectors.append(h.mean(0) if model.config.pooling == "mean" else h[0])
    return torch.stack(vectors)


@pytest.mark.parametrize("mixer", [*LINEAR, "softmax"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_vector_is_its_formula_alone_padded_and_packed(mixer, pooling):
    model, (ids, mask) = build(mixer, pooling), texts(1, 7, 12, 3)
    expected = expected_vectors(model, ids, mask)
    torch.testing.assert_close(model(ids, mask).pooler_output, expected, atol=1e-5, rtol=1e-5)
    rows, numbers = ids.new_zeros(2, 16), ids.new_zeros(2, 16)  # texts 0, 2 and texts 1, 3, and padding
    for row, members in enumerate(((0, 2), (1, 3))):
        packed = torch.cat([ids[text, : mask[text].sum()] for text in members])
        rows[row, : len(packed)] = packed
        numbers[row, mask[members[0]].sum() :] = 1
    packed_mask = rows != 0
    found = model(rows, packed_mask, seq_idx=numbers).pooler_output
    torch.testing.assert_close(found, expected[[0, 2, 1, 3]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "attention"])
def test_the_mean_of_the_hidden_states_is_the_vector(pooling):
    model, (ids, mask) = build(pooling=pooling), texts(9, 4)
    output = model(ids, mask)
    mean = (output.last_hidden_state * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    torch.testing.assert_close(mean, output.pooler_output, atol=1e-5, rtol=1e-5)
    as_tuple = model(ids, mask, return_dict=False)
    assert torch.equal(as_tuple[1], output.pooler_output)


def test_attention_pooling_begins_as_the_mean_and_learns():
    (ids, mask), models = texts(9, 4), [build(pooling=pooling) for pooling in ("attention", "mean")]
    models[0].pooling_weight.data.zero_()
    models[0].lion.load_state_dict(models[1].lion.state_dict())
    ours, mean = (model(ids, mask).pooler_output for model in models)
    torch.testing.assert_close(ours, mean)
    ours.square().sum().backward()
    assert models[0].pooling_weight.grad.abs().max() > 0


def test_an_encoder_gets_weights_of_zero_for_attention_pooling(tmp_path):
    build(kind=LionModel).save_pretrained(tmp_path)
    junk = [torch.full((D,), torch.nan) for _ in range(2000)]  # memory that an uninitialized weight would take
    del junk
    model = LionEmbeddingModel.from_pretrained(tmp_path, pooling="attention")
    assert torch.equal(model.pooling_weight, torch.zeros(D))
    torch.nn.init.normal_(model.pooling_weight)
    model.save_pretrained(tmp_path / "trained")
    again = LionEmbeddingModel.from_pretrained(tmp_path / "trained")
    assert torch.equal(again.pooling_weight, model.pooling_weight)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_texts_that_are_not_packed_compile_as_one_graph(pooling):
    model, (ids, mask) = build(pooling=pooling), texts(9, 5)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        actual = compiled(ids, attention_mask=mask).pooler_output
        torch.testing.assert_close(actual, model(ids, attention_mask=mask).pooler_output)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_an_exported_model_pools_any_number_of_tokens(pooling):
    model = build(pooling=pooling)
    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=2048)}
    exported = torch.export.export(model, texts(9, 5), dynamic_shapes=(sizes, sizes), strict=False).module()
    for lengths in ((3, 8), (1100, 700, 20)):
        ids, mask = texts(*lengths)
        torch.testing.assert_close(exported(ids, mask).pooler_output, model(ids, mask).pooler_output)


def test_spans_are_pooled_on_the_cpu_whatever_device_is_the_default():
    x = torch.randn(7, D)
    expected = pool_spans(x, [(0, 7)])
    with torch.device("meta"):
        for actual, wanted in zip(pool_spans(x, [(0, 7)]), expected):
            torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("pooling", ["mean", "attention"])
@pytest.mark.parametrize("mixer", LINEAR)
def test_passages_of_a_text_in_segments(mixer, pooling, tmp_path):
    model, (ids, _) = build(mixer, pooling), texts(61)
    spans = [(0, 20), (20, 21), (21, 61), (5, 30)]
    output = model(ids)
    h = output.last_hidden_state[0]
    for options in ({}, {"segment_length": 8}, {"segment_length": 7, "storage": tmp_path / "hidden"}):
        vectors, weights = model.encode_long(ids, spans=spans, **options)
        for vector, (start, stop) in zip(vectors, spans):
            cosine = torch.cosine_similarity(vector, h[start:stop].mean(0), dim=0)
            assert cosine > 1 - 1e-5
        covering = (vectors[:3] * weights[:3, None]).sum(0)  # the first three cover the text
        torch.testing.assert_close(covering, output.pooler_output[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(weights[:3].sum(), torch.tensor(1.0))
    assert (tmp_path / "hidden").stat().st_size == 61 * D * 4


def test_an_encoder_pools_passages_by_their_mean_and_keeps_hidden_states_in_a_file(tmp_path):
    model, (ids, _) = build(kind=LionModel), texts(40)
    hidden = model(ids).last_hidden_state
    vectors, weights = model.encode_long(ids, spans=[(3, 13)], segment_length=9)
    torch.testing.assert_close(vectors[0], hidden[0, 3:13].mean(0), atol=1e-5, rtol=1e-5)
    assert weights.item() == pytest.approx(0.25)
    stored = model.encode_long(ids, segment_length=9, storage=str(tmp_path / "states"))
    torch.testing.assert_close(stored, hidden, atol=1e-5, rtol=1e-5)


def test_spans_are_checked():
    model, (ids, mask) = build(), texts(9, 4)
    with pytest.raises(ValueError, match=r"single text.*batch of 2"):
        model.encode_long(ids, mask, spans=[(0, 1)])
    with pytest.raises(ValueError, match=r"single text.*batch of 2"):
        model.lion.encode_long(ids, mask, spans=[(0, 1)])
    for span in ((0, 0), (3, 10), (-1, 2)):
        with pytest.raises(ValueError, match="empty or outside the text of 9"):
            model.encode_long(ids[:1], spans=[span])
    with pytest.raises(ValueError, match="cls"):
        build(pooling="cls").encode_long(ids[:1], spans=[(0, 1)])


def test_sums_of_a_long_span_are_of_pieces(monkeypatch):
    x, scores = torch.randn(50, 4, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    whole = pool_spans(x, [(1, 50)], scores)
    monkeypatch.setattr("src.lion.pooling.PIECE", 7)
    torch.testing.assert_close(pool_spans(x, [(1, 50)], scores), whole)
    torch.testing.assert_close(whole[0][0], scores[1:].softmax(0) @ x[1:])


@pytest.mark.parametrize("mixer", [*LINEAR, "softmax"])
def test_inference_reads_a_long_text_in_segments_by_itself(mixer, monkeypatch):
    model, (ids, mask) = build(mixer, kind=LionModel), texts(50, 33)
    expected = model(ids, mask)  # with gradients: as a whole
    monkeypatch.setattr(modeling, "MIN_SEGMENT", 4)
    model.config.segment_length = 20
    lengths, encode_long = [], model.encode_long
    monkeypatch.setattr(model, "encode_long", lambda *args, **given: (
        lengths.append(given["segment_length"]), encode_long(*args, **given)
    )[1])  # fmt: skip
    model(ids, mask)
    assert not lengths
    with torch.no_grad():
        found = model(ids, mask)
        assert lengths == ([] if mixer == "softmax" else [10])
        for name in ("last_hidden_state", "pooler_output"):
            torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-5)
        model(ids[:, :10], mask[:, :10])  # short
        model(ids, mask, seq_idx=torch.zeros_like(ids))
        model(ids, mask, output_hidden_states=True)
        model(ids, mask, output_attentions=True)
        model.train()(ids, mask)
    assert len(lengths) == (mixer != "softmax")


def test_a_head_also_reads_a_long_text_in_segments():
    model, (ids, _) = build(kind=LionForMaskedLM), texts(modeling.MIN_SEGMENT + 100)
    expected = model(ids).logits
    model.config.segment_length = 1
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)


def test_the_signature_of_forward_has_every_argument():  # transformers' Trainer drops columns that it lacks
    names = list(inspect.signature(LionEmbeddingModel.forward).parameters)
    assert names == [*inspect.signature(LionModel.forward).parameters, "pooling_mask"]


@pytest.mark.parametrize("pooling", ["mean", "attention"])
def test_shapes_are_found_on_the_meta_device(pooling):
    with torch.device("meta"):
        output = build(pooling=pooling)(torch.ones(2, 7, dtype=torch.long))
    assert output.pooler_output.shape == (2, D) and output.pooler_output.is_meta


def test_surplus_and_repeated_arguments_are_refused():
    model, (ids, mask) = build(), texts(8)
    with pytest.raises(TypeError, match="token_type_ids"):
        model(ids, mask, mask, token_type_ids=mask)
    with pytest.raises(TypeError, match="takes"):
        model(*[None] * len(inspect.signature(LionEmbeddingModel.forward).parameters))


def test_the_pooling_is_in_the_configuration_only_if_it_is_not_the_mean():
    assert "pooling" not in LionConfig().to_diff_dict()
    assert LionConfig(pooling="cls").to_dict()["pooling"] == "cls"
    with pytest.raises(ValueError, match=r"pooling must be one of mean, attention, cls \(got max\)"):
        LionConfig(pooling="max")


def test_spans_are_summed_in_float32_under_autocast():
    x = 1 + torch.randn(900, 8) / 100
    expected, _ = pool_spans(x, [(0, 900), (3, 7)])
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = pool_spans(x, [(0, 900), (3, 7)])
    assert torch.equal(found, expected)
