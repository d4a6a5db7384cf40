"""The encoder and its heads, for every mixer: BERT where it is BERT, one set of numbers in every form, and what users
rely on."""

import inspect
import io
import math

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification
from transformers.utils.generic import find_labels

from src.checkpoints.adapters import state_dict_from_published
from src.lion import (
    LionConfig,
    LionForMaskedLM,
    LionForQuestionAnswering,
    LionForSequenceClassification,
    LionForTokenClassification,
    LionModel,
    cpu,
    mixers,
)
from src.lion.configuration_lion import MIXERS
from src.lion.linear_attention import definition
from src.lion.mixers import MIXERS as MIXER_CLASSES
from tests.conftest import settings_of

LINEAR = tuple(mixer for mixer in MIXERS if mixer != "softmax")
LION = ("lion-lit", "lion-d", "lion-s")  # the paper's
WITH_POSITIONS = tuple(mixer for mixer in MIXERS if MIXER_CLASSES[mixer].has_positions)
WITH_DECAY = tuple(
    mixer for mixer in MIXERS if issubclass(MIXER_CLASSES[mixer], mixers.LinearMixer) and mixer not in WITH_POSITIONS
)
MODELS = (
    LionModel, LionForMaskedLM, LionForSequenceClassification, LionForTokenClassification, LionForQuestionAnswering,
)  # fmt: skip
V, D, LAYERS, HEADS, POSITIONS = 96, 32, 2, 4, 40
SIZES = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 64,
    "max_position_embeddings": POSITIONS,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.2,  # ten times the usual, so that every part of a small model counts
}


HYDRA_SHAPES = {  # heads of 16, N = 8
    "in_proj.weight": (2 * 64 + 4 * 8 + 2 * HEADS, D), "conv.weight": (64 + 4 * 8, 1, 7), "conv.bias": (64 + 4 * 8,),
    "dt_bias": (HEADS,), "A_log": (HEADS,), "D": (HEADS,), "fc_D.weight": (HEADS, 64), "norm.weight": (64,),
    "out.weight": (D, 64),
}  # fmt: skip


def build(mixer: str, kind: type = LionForMaskedLM, **changes):
    torch.manual_seed(0)
    return kind(LionConfig(**settings_of(mixer, **{**SIZES, "chunk_size": 8, **changes}))).eval()


def texts(batch: int = 3, length: int = 21, padded: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Ids (never 0, the padding) and segments; the second text 7 tokens shorter than the rest if padded."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        "input_ids": torch.randint(5, V, (batch, length), generator=generator),
        "token_type_ids": torch.randint(0, 2, (batch, length), generator=generator),
    }
    if padded:
        inputs["attention_mask"] = torch.ones(batch, length, dtype=torch.long)
        inputs["attention_mask"][1, -7:] = 0
        inputs["input_ids"][1, -7:] = 0
    return inputs


def draw_labels(batch: int = 3, length: int = 21, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, V, (batch, length), generator=generator)
    return labels.masked_fill(torch.rand(batch, length, generator=generator) < 0.7, -100)


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        torch.testing.assert_close(
            x, expected[name], atol=tolerance, rtol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def project(x: Tensor) -> Tensor:
    """A number whose gradient is random: the sum of a LayerNorm's output would have none."""
    return (x * torch.randn(x.shape, generator=torch.Generator().manual_seed(2))).sum()


# The softmax mixer is BERT


def bert(kind: type, **changes):
    config = BertConfig(**{name: SIZES[name] for name in SIZES}, pad_token_id=0, **changes)
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():  # biases and norms that a wrong name mapping would not survive
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


@pytest.mark.parametrize("padded", [False, True])
def test_softmax_computes_what_bert_computes(padded):
    theirs, ours, inputs = bert(BertForMaskedLM), build("softmax"), texts(padded=padded)
    ours.load_state_dict(state_dict_from_published(theirs.state_dict(), ours.config))
    labels = draw_labels()
    with torch.no_grad():
        expected = theirs(**inputs, labels=labels, output_hidden_states=True)
        actual = ours(**inputs, labels=labels, output_hidden_states=True)
    real = inputs.get("attention_mask", torch.ones(3, 21)).bool()
    assert len(actual.hidden_states) == len(expected.hidden_states)
    for x, y in zip(actual.hidden_states, expected.hidden_states):
        torch.testing.assert_close(x[real], y[real], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(actual.logits[real], expected.logits[real], atol=1e-4, rtol=1e-4)
    if not padded:
        torch.testing.assert_close(actual.loss, expected.loss, atol=1e-5, rtol=1e-5)


def test_softmax_classifies_as_bert_classifies():
    theirs = bert(BertForSequenceClassification, num_labels=3)
    ours, inputs = build("softmax", LionForSequenceClassification, num_labels=3), texts(padded=True)
    ours.load_state_dict(state_dict_from_published(theirs.state_dict(), ours.config))
    labels = torch.tensor([0, 2, 1])
    actual, expected = ours(**inputs, labels=labels), theirs(**inputs, labels=labels)
    torch.testing.assert_close(actual.logits, expected.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(actual.loss, expected.loss, atol=1e-5, rtol=1e-5)


# What a model is made of


@pytest.mark.parametrize("mixer", MIXERS)
def test_each_mixer_has_exactly_its_own_parameters(mixer):
    shapes = {name: tuple(parameter.shape) for name, parameter in build(mixer).named_parameters()}
    assert ("lion.embeddings.position_embeddings.weight" in shapes) == (mixer in WITH_POSITIONS)
    own = {
        "lion-lit": {"norm.weight": (D,), "norm.bias": (D,)},
        "lion-d": {"decay": (HEADS,)},
        "lion-s": {"decay.weight": (HEADS, D), "decay.bias": (HEADS,)},
        "softmax": {},
    }
    common = {"qkv.weight": (3 * D, D), "qkv.bias": (3 * D,), "out.weight": (D, D), "out.bias": (D,)}
    for layer in range(LAYERS):
        prefix = f"lion.layers.{layer}.attention."
        found = {name.removeprefix(prefix): s for name, s in shapes.items() if name.startswith(prefix)}
        published = {"hydra": HYDRA_SHAPES, **{name: common | extra for name, extra in own.items()}}
        assert found == published.get(mixer, found)
        assert (f"lion.layers.{layer}.mlp_in.weight" in shapes) == MIXER_CLASSES[mixer].has_mlp


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_norm_has_berts_epsilon_except_lion_lits_and_hydras(mixer):
    norms = {name: m.eps for name, m in build(mixer).named_modules() if isinstance(m, torch.nn.LayerNorm)}
    larger = {"lion-lit": "attention.norm", "hydra": "attention_norm"}.get(mixer)
    larger = {f"lion.layers.{layer}.{larger}" for layer in range(LAYERS)} if larger else set()
    assert larger <= norms.keys()
    assert {name: 1e-5 if name in larger else 1e-12 for name in norms} == norms


@pytest.mark.parametrize("mixer", MIXERS)
def test_initial_weights_have_the_papers_distribution(mixer):
    model = build(mixer, hidden_size=64, num_attention_heads=64, num_hidden_layers=4, initializer_range=0.02)
    for name, parameter in model.named_parameters():
        if name.endswith(("attention.decay", "dt_bias", "conv.weight", "conv.bias")):
            continue
        if parameter.ndim == 2:
            assert abs(parameter.mean()) < 5 * 0.02 * parameter.numel() ** -0.5, name
            assert abs(parameter.std() - 0.02) < 5 * 0.02 * (2 * parameter.numel()) ** -0.5, name
        else:
            is_one = ("norm" in name.lower() and name.endswith("weight")) or name.endswith("attention.D")
            assert torch.equal(parameter, torch.full_like(parameter, float(is_one))), name
    assert not model.lion.embeddings.word_embeddings.weight[0].any()
    if mixer == "lion-d":
        decays = torch.cat([layer.attention.decay for layer in model.lion.layers])  # 256 of N(0, 1)
        assert abs(decays.mean()) < 0.3 and abs(decays.std() - 1) < 0.2
    if mixer == "hydra":
        own = [layer.attention for layer in model.lion.layers]
        steps = torch.stack([F.softplus(part.dt_bias).log() for part in own])  # U(log 0.001, log 0.1)
        assert math.log(0.001) <= steps.min() + 1e-4 and steps.max() <= math.log(0.1) + 1e-4
        assert abs(steps.mean() - math.log(0.01)) < 0.3 and not torch.equal(steps[0], steps[1])
        convolutions = torch.stack([part.conv.weight for part in own])  # U(−1/√7, 1/√7)
        assert 0.99 < convolutions.abs().max() * 7**0.5 <= 1 and abs(convolutions.std() * 21**0.5 - 1) < 0.05
        assert not torch.equal(convolutions[0], convolutions[1])


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_loss_of_an_untrained_model_is_that_of_guessing(mixer):
    model = build(
        mixer, vocab_size=2048, hidden_size=128, intermediate_size=512, max_position_embeddings=64,
        initializer_range=0.02,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    losses = []
    with torch.no_grad():
        for _ in range(4):
            ids, labels = (torch.randint(5, 2048, (4, 64), generator=generator) for _ in range(2))
            losses.append(model(ids, labels=labels).loss)
    assert sum(losses) / 4 == pytest.approx(math.log(2048), rel=0.02)


def test_a_configuration_accepts_every_mixer_and_knows_its_positions():
    assert tuple(mixers.MIXERS) == MIXERS
    published = (*LION, "hydra", "softmax")
    assert [mixer for mixer in published if LionConfig(mixer=mixer).has_positions] == ["lion-lit", "softmax"]
    assert WITH_DECAY[:2] == ("lion-d", "lion-s")


def test_an_invalid_configuration_is_refused():
    with pytest.raises(ValueError, match=f"mixer.*{', '.join(MIXERS)}.*mamba"):
        LionConfig(mixer="mamba")
    with pytest.raises(ValueError, match=r"classifier_pooling.*max"):
        LionConfig(classifier_pooling="max")
    with pytest.raises(ValueError, match=r"100.*12"):
        LionConfig(hidden_size=100, num_attention_heads=12)


# What a mixer computes


@pytest.mark.parametrize("mixer", LION)
def test_attention_equals_the_definition_with_the_mixers_decay(mixer):
    model, inputs = build(mixer, LionModel), texts(padded=True)
    with torch.no_grad():
        for layer in model.layers:
            if mixer in WITH_DECAY:  # values of their own, so that a wrong sign shows
                bias = layer.attention.decay if mixer == "lion-d" else layer.attention.decay.bias
                bias.copy_(torch.linspace(-2, 1, HEADS))
        output = model(**inputs, output_hidden_states=True, output_attentions=True)
        for layer, x, matrix in zip(model.layers, output.hidden_states, output.attentions):
            part = layer.attention
            q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2).double() for y in part.qkv(x).chunk(3, -1))
            log_decay, mask = None, inputs["attention_mask"].bool()
            if mixer == "lion-d":
                log_decay = torch.sigmoid(part.decay.double()).log()
            elif mixer == "lion-s":  # padding does not decay
                log_decay = (1 - torch.sigmoid(part.decay(x).double())).log().transpose(1, 2).where(mask[:, None], 0)
            y = definition(q, k, v, log_decay, mask=mask)
            torch.testing.assert_close(matrix.double() @ v, y, atol=1e-4, rtol=1e-4)
            y = y.transpose(1, 2).flatten(2).float()
            if mixer == "lion-lit":
                y = F.layer_norm(y, (D,), part.norm.weight, part.norm.bias, 1e-5)
            x = layer.attention_norm(x + part.out(y))
            expected = layer.mlp_norm(x + layer.mlp_out(F.gelu(layer.mlp_in(x))))
            actual = output.hidden_states[1 + list(model.layers).index(layer)]
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("form", ["recurrent", "chunkwise", "auto"])
@pytest.mark.parametrize("mixer", LINEAR)
def test_every_form_gives_the_same_logits_and_gradients(mixer, form, padded):
    model, inputs, labels = build(mixer), texts(padded=padded), draw_labels()
    if padded:
        labels[1, -7:] = -100
    expected = model(**inputs, labels=labels, attention_form="full")
    actual = model(**inputs, labels=labels, attention_form=form)
    torch.testing.assert_close(actual.logits, expected.logits, atol=1e-4, rtol=1e-4)
    assert_same(gradients(model, actual.loss), gradients(model, expected.loss), 1e-4)
    configured = build(mixer, attention_form=form)
    configured.load_state_dict(model.state_dict())
    assert torch.equal(configured(**inputs).logits, actual.logits)


@pytest.mark.parametrize("mixer", LINEAR)
def test_an_unknown_form_is_refused(mixer):
    with pytest.raises(ValueError, match=r"form.*full.*quadratic"):
        build(mixer)(**texts(), attention_form="quadratic")


@pytest.mark.parametrize("form", ["recurrent", "chunkwise"])
@pytest.mark.parametrize("mixer", LION)
def test_attention_dropout_restricts_only_training_to_the_full_form(mixer, form):
    model, inputs = build(mixer, attention_probs_dropout_prob=0.1, attention_form=form), texts()
    logits = model(**inputs).logits
    torch.testing.assert_close(logits, build(mixer, attention_form="full")(**inputs).logits, atol=1e-4, rtol=1e-4)
    model.train()
    with pytest.raises(ValueError, match="dropout"):
        model(**inputs)
    model(**inputs, attention_form="full")


@pytest.mark.parametrize(
    "mixer, which",
    [
        *((mixer, "hidden_dropout_prob") for mixer in MIXERS),
        *((mixer, "attention_probs_dropout_prob") for mixer in (*LION, "softmax")),
    ],
)
def test_dropout_acts_only_in_training(mixer, which):
    model, inputs = build(mixer, LionModel, **{which: 0.3}), texts()
    with torch.no_grad():
        assert torch.equal(model(**inputs)[0], model(**inputs)[0])
        model.train()
        assert not torch.allclose(model(**inputs)[0], model(**inputs)[0])


# Masks, padding, lengths


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_mask_may_be_numbers_or_booleans_and_none_means_all_real(mixer):
    model, inputs = build(mixer, LionModel), texts(padded=True)
    mask = inputs.pop("attention_mask")
    expected = model(**inputs, attention_mask=mask)[0]
    for other in (mask.bool(), mask.float(), mask.to(torch.int32)):
        assert torch.equal(model(**inputs, attention_mask=other)[0], expected)
    without = model(**inputs)[0]
    torch.testing.assert_close(model(**inputs, attention_mask=torch.ones_like(mask))[0], without, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(without[1], expected[1], atol=1e-3)


@pytest.mark.parametrize("form", ["full", "recurrent", "chunkwise"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_padding_does_not_change_a_texts_outputs(mixer, side, form):
    model = build(mixer)
    ids = texts(batch=2, length=13)["input_ids"]
    alone = model(ids, attention_form=form).logits
    for padding in (1, 6, 27):
        pad = (padding, 0) if side == "left" else (0, padding)
        mask = F.pad(torch.ones_like(ids), pad)
        # Texts that are padded on the left start counting at their first token; decays need no counting.
        positions = (mask.cumsum(-1) - 1).clamp(min=0) if mixer in WITH_POSITIONS and side == "left" else None
        logits = model(F.pad(ids, pad), mask, position_ids=positions, attention_form=form).logits
        torch.testing.assert_close(logits[mask.bool()], alone.flatten(0, 1), atol=1e-4, rtol=1e-4)


MASKED = [(mixer, {}) for mixer in MIXERS] + [
    ("lion-s", {"separate_decays": True}), ("lion-s", {"channel_decays": True}), ("lion-s", {"key_weight": "linear"}),
    ("lion-s", {"short_conv": 3}), ("lion-s", {"position_embedding": "rope"}),
]  # fmt: skip


@pytest.mark.parametrize("form", ["auto", "full", "recurrent", "chunkwise"])
@pytest.mark.parametrize(("mixer", "options"), MASKED, ids=str)
def test_nothing_depends_on_a_masked_token_within_a_text(mixer, options, form):
    model = build(mixer, **options)
    ids = texts(batch=2, length=23)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 5:9] = mask[1, 11] = mask[1, 0] = 0
    other = torch.where(mask.bool(), ids, V - 1 - ids)
    form = "full" if mixer == "softmax" else form
    embeds = model.lion.embeddings.word_embeddings(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, attention_mask=mask, attention_form=form).logits
    found = model(other, mask, attention_form=form).logits
    torch.testing.assert_close(found[mask.bool()], logits[mask.bool()], atol=1e-6, rtol=1e-6)
    (gradient,) = torch.autograd.grad(logits[mask.bool()].square().sum(), embeds)
    assert not gradient[~mask.bool()].any() and gradient[mask.bool()].any()


@pytest.mark.parametrize("options", [{}, {"separate_decays": True}, {"channel_decays": True}], ids=str)
def test_masking_a_token_is_removing_it_where_decays_are_all_that_knows_of_places(options):
    model, ids = build("lion-s", **options), texts(batch=1, length=23)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 5:9] = 0
    removed = model(ids[:, mask[0].bool()]).logits
    torch.testing.assert_close(model(ids, mask).logits[:, mask[0].bool()], removed, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_batch_gives_the_outputs_of_its_texts_one_by_one(mixer):
    model, inputs = build(mixer), texts(padded=True)
    together = model(**inputs).logits
    for row in range(3):
        one = model(**{name: tensor[row : row + 1] for name, tensor in inputs.items()}).logits
        torch.testing.assert_close(one[0], together[row], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mixer", WITH_DECAY)
def test_mixers_with_decay_read_texts_longer_than_the_configured_positions(mixer):
    model, ids = build(mixer), texts(length=3 * POSITIONS)["input_ids"]
    logits = model(ids).logits
    assert logits.shape == (3, 3 * POSITIONS, V) and logits.isfinite().all()
    torch.testing.assert_close(model(ids, attention_form="chunkwise").logits, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mixer", WITH_POSITIONS)
def test_a_text_longer_than_the_position_table_is_refused(mixer):
    model = build(mixer)
    assert model(texts(length=POSITIONS)["input_ids"]).logits.shape[1] == POSITIONS
    with pytest.raises(ValueError, match=rf"{POSITIONS + 1} tokens.*{mixer}.*{POSITIONS} position embeddings"):
        model(texts(length=POSITIONS + 1)["input_ids"])


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_depends_on_token_order(mixer):
    model, ids = build(mixer, LionModel), texts()["input_ids"]
    order = torch.randperm(21, generator=torch.Generator().manual_seed(5))
    moved = model(ids[:, order])[0]
    assert not torch.allclose(moved, model(ids)[0][:, order], atol=1e-3)


@pytest.mark.parametrize("mixer", MIXERS)
def test_decays_encode_distance_but_not_direction(mixer):
    model, ids = build(mixer, LionModel), texts()["input_ids"]
    backwards = torch.allclose(model(ids.flip(1))[0].flip(1), model(ids)[0], atol=1e-4)
    assert backwards == (mixer in WITH_DECAY)


# Packed rows, and texts in segments


@pytest.mark.parametrize("form", ["full", "chunkwise", "recurrent"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_packed_sequences_are_encoded_as_when_alone(mixer, form):
    model, inputs, labels = build(mixer).train(), texts(), draw_labels()
    inputs["attention_mask"] = torch.ones(3, 21, dtype=torch.long)
    inputs["attention_mask"][1, -4:] = 0
    lengths = (9, 1, 11)
    seq_idx = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand(3, -1)
    packed = model(**inputs, seq_idx=seq_idx, labels=labels, attention_form=form)
    packed_gradients = gradients(model, packed.loss)

    count, loss, start = (labels != -100).sum(), 0, 0
    for length in lengths:
        part = slice(start, start := start + length)
        alone = model(**{name: x[:, part] for name, x in inputs.items()}, labels=labels[:, part], attention_form=form)
        loss = loss + alone.loss * (labels[:, part] != -100).sum() / count
    torch.testing.assert_close(packed.loss, loss, atol=1e-5, rtol=1e-5)
    assert_same(packed_gradients, gradients(model, loss), tolerance=1e-4)


def record_attention(monkeypatch) -> list:
    """The first operand and the mask of each softmax attention."""
    given, attend = [], F.scaled_dot_product_attention

    def record(q, k, v, attn_mask=None, **options):
        given.append((q, attn_mask))
        return attend(q, k, v, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    return given


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_is_given_a_mask_only_if_there_is_padding(dtype, monkeypatch):
    model, ids = build("softmax", LionModel).to(dtype), texts()["input_ids"]
    given = record_attention(monkeypatch)
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        assert torch.equal(model(ids, torch.ones_like(ids)).last_hidden_state, expected)
        assert [mask for _, mask in given] == [None] * 2 * LAYERS
        model(**texts(padded=True))
    assert torch.equal(model(ids, torch.ones_like(ids)).last_hidden_state, expected)  # does not wait to find out
    assert [mask.shape for _, mask in given[2 * LAYERS :]] == [(3, 1, 1, 21)] * 2 * LAYERS


def test_the_mask_of_packed_rows_is_made_once_for_all_layers(monkeypatch):
    seq_idx, given = (torch.arange(21) >= 9).long().expand(3, -1), record_attention(monkeypatch)
    build("softmax", LionModel)(**texts(padded=True), seq_idx=seq_idx)
    (_, first), (_, second) = given
    assert first is second and first.shape == (3, 1, 21, 21)


@pytest.mark.parametrize("record, mixer", [("compile", "softmax"), *(("trace", mixer) for mixer in MIXERS)])
@torch.no_grad()
def test_a_recorded_encoder_does_not_depend_on_the_padding_of_its_first_batch(record, mixer):
    model, ids = build(mixer, LionModel).requires_grad_(False), texts()["input_ids"]
    padded = texts(padded=True)["attention_mask"]

    def encode(ids: Tensor, mask: Tensor) -> Tensor:
        return model(ids, mask).last_hidden_state

    if record == "compile":
        torch.compiler.reset()
        recorded = torch.compile(encode, backend="eager", fullgraph=True)
    else:
        recorded = torch.jit.trace(encode, (ids, torch.ones_like(ids)), check_trace=False)
    for mask in (torch.ones_like(ids), padded):
        torch.testing.assert_close(recorded(ids, mask), encode(ids, mask), atol=1e-5, rtol=1e-5)


def give_sequences(monkeypatch) -> None:
    """Give softmax packed rows as sequences, as on a GPU. FlashAttention's kernel exists only there, so here each
    sequence, (tokens, heads, size), is computed on its own."""

    def attend(q, k, v, starts, starts_of_keys, longest, longest_key, dropout_p, is_causal, debug):
        assert starts is starts_of_keys and starts.dtype == torch.int32 and not (is_causal or debug)
        lengths = starts.diff()
        assert longest == longest_key == lengths.max() and lengths.sum() == len(q)
        parts = zip(*(x.transpose(0, 1).split(lengths.tolist(), 1) for x in (q, k, v)))
        y = torch.cat([F.scaled_dot_product_attention(*part, dropout_p=dropout_p) for part in parts], 1)
        return y.transpose(0, 1), None, None, None, None

    monkeypatch.setattr(mixers, "_has_flash_attention", lambda config, x: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", attend)


PACKED = torch.tensor([[0] * 9 + [1] + [2] * 11, [4] * 5 + [3] * 16, [0] * 9 + [1] * 12])
REAL = torch.tensor([[1] * 21, [1] * 17 + [0] * 4, [1] * 6 + [0] * 5 + [1] * 10])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("options", [{}, {"position_embedding": "rope", "short_conv": 3}])
def test_packed_rows_as_sequences_give_what_they_give_with_a_mask(options, recompute, monkeypatch):
    model, ids = build("softmax", **options).train(), texts()["input_ids"]
    labels = draw_labels().where(REAL.bool(), -100)
    inputs = {"attention_mask": REAL, "seq_idx": PACKED, "output_attentions": True}
    expected = model(ids, labels=labels, **inputs)
    expected_gradients = gradients(model, expected.loss)
    give_sequences(monkeypatch)
    given = record_attention(monkeypatch)
    if recompute:
        model.gradient_checkpointing_enable()
    actual = model(ids, labels=labels, **inputs)
    assert_same(gradients(model, actual.loss), expected_gradients)
    assert given and all(q.ndim == 3 and mask is None for q, mask in given)
    torch.testing.assert_close(actual.logits, expected.logits, atol=1e-5, rtol=1e-5)
    for x, y in zip(actual.attentions, expected.attentions):
        x, y = (z.transpose(1, 2)[REAL.bool()] for z in (x, y))
        torch.testing.assert_close(x, y)
    with torch.inference_mode():
        assert model.eval()(ids, **inputs).logits.isfinite().all()


def test_sequences_are_found_unless_there_is_padding_within_one(monkeypatch):
    starts, longest = mixers.find_sequences(None, PACKED)
    assert (starts.tolist(), longest) == ([0, 9, 10, 21, 26, 42, 51, 63], 16)
    starts, longest = mixers.find_sequences(REAL.bool(), PACKED)
    assert (starts.tolist(), longest) == ([0, 9, 10, 21, 26, 38, 42, 48, 51, 53, 63], 12)
    within = REAL.bool().clone()
    within[1, 2] = False
    assert mixers.find_sequences(within, PACKED) is None
    give_sequences(monkeypatch)
    for mask, expected in ((REAL.bool(), "sequences"), (within, "keys")):
        _, prepared = mixers.Softmax.prepare(LionConfig(), torch.zeros(3, 21, D), mask, PACKED)
        assert list(prepared) == [expected]


def test_flash_attention_takes_sequences_as_this_version_of_torch_declares_it():
    q, k, v = (torch.empty(3, 2, 21, 8, device="meta", requires_grad=True) for _ in range(3))
    sequences = mixers.Sequences(torch.empty(8, device="meta", dtype=torch.int32), 16)
    y = mixers.attend_within(sequences, q, k, v, 0.1)
    assert y.shape == q.shape and all(x.shape == q.shape for x in torch.autograd.grad(y.sum(), (q, k, v)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_packed_rows_are_computed_by_flash_attention_on_a_gpu(monkeypatch):
    model = build("softmax", LionModel, hidden_size=128, num_attention_heads=2).cuda()
    inputs = {"attention_mask": REAL, "seq_idx": PACKED, **texts()}
    inputs = {name: x.cuda() for name, x in inputs.items()}
    results = []
    for by_flash in (True, False):
        if not by_flash:
            monkeypatch.setattr(mixers, "_has_flash_attention", lambda config, x: False)
        with torch.profiler.profile() as profile, torch.autocast("cuda", torch.bfloat16):
            y = model(**inputs).last_hidden_state[inputs["attention_mask"].bool()]
            results.append([y, *gradients(model, project(y.cpu())).values()])
        called = {event.key for event in profile.key_averages()}
        assert {"aten::_flash_attention_forward", "aten::_flash_attention_backward"} <= called or not by_flash
    for x, y in zip(*results):
        assert (x - y).float().norm() < 0.03 * y.float().norm()


@pytest.mark.parametrize("mixer", WITH_POSITIONS)
def test_a_packed_row_may_be_longer_than_the_position_table_but_not_a_sequence_in_it(mixer):
    model, ids = build(mixer, LionModel), texts(1, 2 * POSITIONS)["input_ids"]
    half = torch.arange(2 * POSITIONS)[None] // POSITIONS
    y = model(ids, seq_idx=half).last_hidden_state
    alone = model(ids.view(2, POSITIONS)).last_hidden_state
    torch.testing.assert_close(y.view(2, POSITIONS, D), alone, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=f"{POSITIONS + 3} tokens.*{POSITIONS}"):
        model(ids, seq_idx=(torch.arange(2 * POSITIONS)[None] >= POSITIONS + 3).long())


def test_attention_matrices_of_packed_sequences_are_block_diagonal():
    inputs, seq_idx = texts(1, 20), (torch.arange(20)[None] >= 8).long()
    apart = seq_idx[:, None, :, None] != seq_idx[:, None, None, :]
    for mixer in MIXERS:
        for matrix in build(mixer, LionModel)(**inputs, seq_idx=seq_idx, output_attentions=True).attentions:
            assert matrix.abs().masked_select(apart).max() < 1e-20 < matrix.abs().masked_select(~apart).max()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("segment_length", [1, 5, 8, 21, 100])
@pytest.mark.parametrize("mixer", LINEAR)
def test_a_long_text_in_segments_gives_the_outputs_of_one_call(mixer, segment_length, padded):
    model, inputs = build(mixer, LionModel), texts(padded=padded)
    expected = model(**inputs).last_hidden_state
    actual = model.encode_long(**inputs, segment_length=segment_length)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mixer", ["lion-s", "hydra"])
def test_hooks_see_a_text_whole_that_would_be_read_in_segments(mixer, monkeypatch):
    monkeypatch.setattr("src.lion.modeling_lion.MIN_SEGMENT", 8)
    model, ids = build(mixer, LionModel, segment_length=8).eval(), torch.randint(1, V, (1, 21))
    seen = []
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        assert model._segment_length(ids) == 8
        model.layers[0].register_forward_hook(lambda layer, inputs, y: seen.append(y[0].shape))
        torch.testing.assert_close(model(ids).last_hidden_state, expected)
    assert seen == [(1, 21, expected.shape[-1])]


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_mask_of_another_shape_is_refused(mixer):
    model = build(mixer, LionModel)
    for shape in ((2, 8), (1, 9), (2, 1, 1, 9)):
        with pytest.raises(ValueError, match=r"attention_mask must be \(2, 9\), as the texts are \(got"):
            model(torch.ones(2, 9, dtype=torch.long), torch.ones(shape))


def test_an_output_may_be_a_tuple():
    model, ids = build("lion-s", torchscript=True).eval(), torch.randint(1, V, (2, 9))
    (logits,) = model(ids)
    assert torch.equal(model(ids, return_dict=True).logits, logits)
    traced = torch.jit.trace(model, ids)
    torch.testing.assert_close(traced(ids)[0], logits)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_trace_is_the_same_with_and_without_gradients(mixer):
    model, ids = build(mixer, torchscript=True).eval(), torch.randint(1, V, (2, 9))
    traced = torch.jit.trace(model, ids)  # which compares two traces
    torch.testing.assert_close(traced(ids)[0], model(ids)[0])


@pytest.mark.parametrize("mixer", LINEAR)
def test_the_exporter_that_would_lose_the_attention_is_refused(mixer):
    model, ids = build(mixer, torchscript=True).eval(), torch.randint(1, V, (2, 9))
    with pytest.raises(
        RuntimeError, match=r"torch\.onnx's tracing exporter cannot record linear attention: use torch\.export"
    ):
        torch.onnx.export(model, (ids,), io.BytesIO(), dynamo=False)


def test_the_earlier_keyword_of_segment_length_is_accepted():
    model, ids = build("lion-s", LionModel), texts()["input_ids"]
    assert torch.equal(model.encode_long(ids, piece_length=8), model.encode_long(ids, segment_length=8))


def test_encode_long_is_for_inference_by_mixers_with_states_within_their_positions():
    ids = texts(1, POSITIONS + 1)["input_ids"]
    with pytest.raises(ValueError, match=r"softmax.*lion"):
        build("softmax", LionModel).encode_long(ids)
    with pytest.raises(ValueError, match="eval"):
        build("lion-s", LionModel).train().encode_long(ids)
    with pytest.raises(ValueError, match=f"{POSITIONS + 1} tokens.*{POSITIONS}"):
        build("lion-lit", LionModel).encode_long(ids, segment_length=8)
    with pytest.raises(ValueError, match=r"at least one token.*0 and 8"):
        build("lion-s", LionModel).encode_long(ids[:, :0], segment_length=8)
    with pytest.raises(ValueError, match=r"segments of one.*0"):
        build("lion-s", LionModel).encode_long(ids, segment_length=0)


def test_matrices_of_softmax_are_finite_without_any_real_token():
    inputs = texts() | {"attention_mask": torch.zeros_like(texts()["input_ids"])}
    for matrix in build("softmax", LionModel)(**inputs, output_attentions=True).attentions:
        assert matrix.isfinite().all()


@pytest.mark.parametrize("mixer", MIXERS)
def test_token_types_are_0_unless_given(mixer):
    model, inputs = build(mixer, LionModel), texts()
    segments = inputs.pop("token_type_ids")
    expected = model(**inputs)[0]
    torch.testing.assert_close(
        model(**inputs, token_type_ids=torch.zeros_like(segments))[0], expected, atol=1e-5, rtol=1e-5
    )
    assert not torch.allclose(model(**inputs, token_type_ids=segments)[0], expected, atol=1e-3)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mixer", MIXERS)
def test_embeddings_may_be_given_in_place_of_ids(mixer, kind):
    model, inputs = build(mixer, kind), texts(padded=True)
    expected = model(**inputs)[0]
    embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
    assert torch.equal(model(**inputs, inputs_embeds=embeds)[0], expected)


@pytest.mark.parametrize("kind", MODELS)
def test_ids_and_embeddings_are_mutually_exclusive(kind):
    model, ids = build("lion-s", kind), texts()["input_ids"]
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model(ids, inputs_embeds=torch.zeros(*ids.shape, D))
    for wrong in ({"input_ids": ids[0]}, {"inputs_embeds": torch.zeros(5, D)}):
        with pytest.raises(ValueError, match=r"input_ids must be \(batch, length\).*\(got \(\d+, ?\d*\)\)"):
            model(**wrong)


# What a call returns


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mixer", MIXERS)
def test_hidden_states_are_the_embeddings_and_every_layers_output(mixer, kind):
    model, inputs = build(mixer, kind), texts(padded=True)
    assert model(**inputs).hidden_states is None
    states = model(**inputs, output_hidden_states=True).hidden_states
    encoder = model if kind is LionModel else model.lion
    assert len(states) == LAYERS + 1
    places = torch.arange(inputs["input_ids"].shape[1])[None]
    embeddings = encoder.embeddings(inputs["input_ids"], None, inputs["token_type_ids"], places)
    torch.testing.assert_close(states[0], embeddings)
    assert torch.equal(states[-1], encoder(**inputs).last_hidden_state)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mixer", MIXERS)
def test_attentions_are_one_matrix_per_layer_without_weight_on_padding(mixer, kind):
    model, inputs = build(mixer, kind), texts(padded=True)
    plain, output = model(**inputs), model(**inputs, output_attentions=True)
    assert plain.attentions is None
    torch.testing.assert_close(output[0], plain[0])
    assert [tuple(matrix.shape) for matrix in output.attentions] == [(3, HEADS, 21, 21)] * LAYERS
    for matrix in output.attentions:
        assert not matrix[1, ..., -7:].any() and matrix[1, ..., :-7].any() and matrix[0, ..., -7:].any()
        if mixer == "softmax":
            torch.testing.assert_close(matrix.sum(-1), torch.ones(3, HEADS, 21))


@pytest.mark.parametrize("form", ["recurrent", "chunkwise"])
@pytest.mark.parametrize("mixer", LINEAR)
def test_attentions_are_refused_by_forms_without_a_matrix(mixer, form):
    with pytest.raises(ValueError, match=rf"{form}.*full"):
        build(mixer)(**texts(), output_attentions=True, attention_form=form)
    with pytest.raises(ValueError, match=rf"{form}.*full"):
        build(mixer, attention_form=form)(**texts(), output_attentions=True)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_tuple_holds_the_named_outputs_in_order(mixer, kind):
    model, options = build(mixer, kind), {"output_hidden_states": True, "output_attentions": True, **texts()}
    if kind is LionForQuestionAnswering:
        options |= {"start_positions": torch.tensor([0, 1, 2]), "end_positions": torch.tensor([3, 4, 5])}
    elif kind is LionForSequenceClassification:
        options["labels"] = torch.tensor([0, 1, 0])
    elif kind is LionForTokenClassification:
        options["labels"] = torch.ones(3, 21, dtype=torch.long)
    elif kind is LionForMaskedLM:
        options["labels"] = draw_labels()
    named, plain = model(**options), model(**options, return_dict=False)
    assert type(plain) is tuple and len(plain) == len(named.to_tuple())
    for x, y in zip(plain, named.to_tuple()):
        for a, b in zip(x if isinstance(x, tuple) else [x], y if isinstance(y, tuple) else [y]):
            torch.testing.assert_close(a, b)


def test_an_encoder_without_pooler_returns_none_for_it():
    torch.manual_seed(0)
    model = LionModel(LionConfig(**SIZES), add_pooling_layer=False).eval()
    assert model(**texts()).pooler_output is None
    assert not [name for name, _ in model.named_parameters() if "pooler" in name]


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_pooler_reads_the_first_token_or_the_mean_of_real_tokens(mixer):
    inputs = texts(padded=True)
    for pooling in ("cls", "mean"):
        model = build(mixer, LionModel, classifier_pooling=pooling)
        output = model(**inputs)
        for row, length in enumerate((21, 14, 21)):
            real = output.last_hidden_state[row, :length]
            expected = torch.tanh(model.pooler(real[0] if pooling == "cls" else real.mean(0)))
            torch.testing.assert_close(output.pooler_output[row], expected, atol=1e-5, rtol=1e-5)
        unmasked = model(inputs["input_ids"])
        real = unmasked.last_hidden_state
        expected = torch.tanh(model.pooler(real[:, 0] if pooling == "cls" else real.mean(1)))
        torch.testing.assert_close(unmasked.pooler_output, expected, atol=1e-5, rtol=1e-5)


# Saving, loading, resizing


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_saved_model_is_loaded_unchanged(mixer, tmp_path):
    model, inputs = build(mixer), texts(padded=True)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = set(file.keys())
    assert "lion.embeddings.word_embeddings.weight" in stored
    assert "head.decoder.weight" not in stored  # it is the former once more
    back, info = LionForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert back.head.decoder.weight is back.lion.embeddings.word_embeddings.weight
    assert back.config.mixer == mixer and back.config.chunk_size == 8
    assert_same(dict(back.state_dict()), dict(model.state_dict()), 0)
    assert torch.equal(back.eval()(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("kind", [LionModel, *MODELS[2:]])
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_task_model_loads_a_pretrained_encoder_and_a_new_head(mixer, kind, tmp_path):
    pretrained = build(mixer)
    pretrained.save_pretrained(tmp_path)
    torch.manual_seed(1)
    model = kind.from_pretrained(tmp_path, **({"num_labels": 5} if kind in MODELS[2:4] else {})).eval()
    encoder = model if kind is LionModel else model.lion
    kept = {name: tensor for name, tensor in encoder.state_dict().items() if not name.startswith("pooler")}
    assert_same(kept, dict(pretrained.lion.state_dict()), 0)
    for name, parameter in model.named_parameters():
        if name.startswith(("pooler", "lion.pooler", "classifier", "qa_outputs")):
            if name.endswith("bias"):
                assert not parameter.any()
            else:
                assert 0.1 < parameter.std() < 0.3
    if kind in MODELS[2:4]:
        assert model.classifier.out_features == 5


@pytest.mark.parametrize("size", [V + 8, V - 16])
@pytest.mark.parametrize("mixer", MIXERS)
def test_the_vocabulary_can_be_resized(mixer, size, tmp_path):
    model = build(mixer)
    ids = texts()["input_ids"].clamp(max=V - 17)
    before = model(ids).logits
    model.resize_token_embeddings(size)
    logits = model(ids).logits
    assert model.config.vocab_size == size and logits.shape == (3, 21, size)
    assert model.head.decoder.weight is model.get_input_embeddings().weight
    both = min(size, V)
    torch.testing.assert_close(logits[..., :both], before[..., :both], atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path)
    assert torch.equal(LionForMaskedLM.from_pretrained(tmp_path).eval()(ids).logits, logits)


# Training


@pytest.mark.parametrize("mixer", MIXERS)
def test_training_computes_logits_only_at_labelled_positions(mixer):
    model, inputs, labels = build(mixer), texts(padded=True), draw_labels()
    labels[1, -7:] = -100
    labelled = labels != -100
    expected = model(**inputs, labels=labels)
    assert expected.logits.shape == (3, 21, V)
    expected_gradients = gradients(model, expected.loss)
    model.train()
    actual = model(**inputs, labels=labels)
    assert actual.logits.shape == (int(labelled.sum()), V)
    torch.testing.assert_close(actual.logits, expected.logits[labelled], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(actual.loss, expected.loss, atol=1e-6, rtol=1e-6)
    assert_same(gradients(model, actual.loss), expected_gradients)
    assert model(**inputs).logits.shape == (3, 21, V)  # nothing labelled because nothing is asked


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_loss_is_the_mean_over_labelled_positions(mixer):
    model, inputs, labels = build(mixer), texts(), draw_labels()
    output = model(**inputs, labels=labels)
    chosen = output.logits.log_softmax(-1)[labels != -100]
    expected = -chosen.gather(1, labels[labels != -100][:, None]).mean()
    torch.testing.assert_close(output.loss, expected)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_batch_without_labelled_positions_has_loss_0(mixer, training):
    model = build(mixer).train(training)
    loss = model(**texts(), labels=torch.full((3, 21), -100)).loss
    assert loss == 0
    assert all(gradient.isfinite().all() and not gradient.any() for gradient in gradients(model, loss).values())


def task(kind: str):
    """A task's model and what goes with its inputs."""
    labels = torch.Generator().manual_seed(4)
    if kind == "classes":
        return LionForSequenceClassification, {"num_labels": 3}, {"labels": torch.tensor([0, 2, 1])}
    if kind == "regression":
        return LionForSequenceClassification, {"num_labels": 1}, {"labels": torch.tensor([0.0, 2.5, -1.0])}
    if kind == "several classes":
        several = {"num_labels": 3, "problem_type": "multi_label_classification"}
        return LionForSequenceClassification, several, {"labels": torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0]])}
    if kind == "tokens":
        each = torch.randint(0, 3, (3, 21), generator=labels)
        return LionForTokenClassification, {"num_labels": 3}, {"labels": each.index_fill(1, torch.tensor([0, 5]), -100)}
    spans = {"start_positions": torch.tensor([0, 3, 20]), "end_positions": torch.tensor([2, 3, 20])}
    return LionForQuestionAnswering, {}, spans


def loss_by_hand(kind: str, output, labels: dict[str, Tensor]) -> Tensor:
    if kind == "question":
        start, end = output.start_logits.log_softmax(-1), output.end_logits.log_softmax(-1)
        rows = torch.arange(3)
        return -(start[rows, labels["start_positions"]] + end[rows, labels["end_positions"]]).mean() / 2
    logits, labels = output.logits, labels["labels"]
    if kind == "regression":
        return ((logits[:, 0] - labels) ** 2).mean()
    if kind == "several classes":
        return -torch.where(labels.bool(), logits.sigmoid().log(), (1 - logits.sigmoid()).log()).mean()
    if kind == "tokens":
        logits, labels = logits[labels != -100], labels[labels != -100]
    return -logits.log_softmax(-1)[torch.arange(len(labels)), labels].mean()


TASKS = ("classes", "regression", "several classes", "tokens", "question")


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("mixer", MIXERS)
def test_every_head_has_a_loss_with_gradients_for_every_parameter(mixer, kind):
    model_class, settings, labels = task(kind)
    model, inputs = build(mixer, model_class, **settings), texts()
    output = model(**inputs, **labels)
    torch.testing.assert_close(output.loss, loss_by_hand(kind, output, labels), atol=1e-5, rtol=1e-5)
    assert model(**inputs).loss is None
    received = gradients(model, output.loss)
    for name, _ in model.named_parameters():
        assert name in received and received[name].isfinite().all() and received[name].any(), name


@pytest.mark.parametrize("mixer", MIXERS)
def test_regression_takes_labels_as_a_column_too(mixer):
    model, labels = build(mixer, LionForSequenceClassification, num_labels=1), torch.tensor([0.0, 2.5, -1.0])
    assert model(**texts(), labels=labels[:, None]).loss == model(**texts(), labels=labels).loss


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_masked_lm_loss_has_gradients_for_every_parameter(mixer):
    model = build(mixer).train()
    received = gradients(model, model(**texts(), labels=draw_labels()).loss)
    for name, _ in model.named_parameters():
        assert name in received and received[name].isfinite().all() and received[name].any(), name


@pytest.mark.parametrize("mixer", MIXERS)
def test_hidden_states_and_pooler_have_gradients_for_every_parameter(mixer):
    model = build(mixer, LionModel)
    output = model(**texts())
    received = gradients(model, project(output.last_hidden_state) + project(output.pooler_output))
    for name, _ in model.named_parameters():
        assert name in received and received[name].isfinite().all() and received[name].any(), name


@pytest.mark.parametrize("outside", [21, 25, 1000, -1, -100])
def test_an_answer_outside_the_text_does_not_count(outside):
    model, inputs = build("lion-s", LionForQuestionAnswering), texts()
    start, end = torch.tensor([4, outside, 6]), torch.tensor([9, 20, outside])
    output = model(**inputs, start_positions=start, end_positions=end)
    starts, ends = output.start_logits.log_softmax(-1), output.end_logits.log_softmax(-1)
    expected = -((starts[0, 4] + starts[2, 6]) / 2 + (ends[0, 9] + ends[1, 20]) / 2) / 2
    torch.testing.assert_close(output.loss, expected, atol=1e-5, rtol=1e-5)
    assert start.tolist() == [4, outside, 6]


def test_a_batch_whose_answers_are_all_outside_the_text_has_loss_0():
    model, outside = build("lion-s", LionForQuestionAnswering), torch.tensor([21, 30, 99])
    loss = model(**texts(), start_positions=outside, end_positions=outside).loss
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients(model, loss).values())


def test_a_batch_whose_tokens_are_all_unlabelled_has_loss_0():
    model = build("lion-s", LionForTokenClassification, num_labels=3)
    loss = model(**texts(), labels=torch.full((3, 21), -100)).loss
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients(model, loss).values())


INPUTS = ["self", "input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds"]
OPTIONS = ["output_attentions", "output_hidden_states", "return_dict", "attention_form", "seq_idx"]


@pytest.mark.parametrize(
    "kind, targets, last",
    [
        (LionModel, [], []),
        (LionForMaskedLM, ["labels"], ["masked_positions"]),
        (LionForSequenceClassification, ["labels"], []),
        (LionForTokenClassification, ["labels"], []),
        (LionForQuestionAnswering, ["start_positions", "end_positions"], []),
    ],
)
def test_the_arguments_of_a_call_have_names_and_an_order(kind, targets, last):
    names = [*INPUTS, *targets, *OPTIONS, *last]
    assert inspect.getfullargspec(kind.forward).args == names == list(inspect.signature(kind.forward).parameters)
    model, inputs = build("lion-s", kind), texts(padded=True)
    by_position = model(*(inputs.get(name) for name in names[1 : names.index("return_dict")]), False)
    assert torch.equal(by_position[0], model(**inputs)[0])
    with pytest.raises(TypeError, match="nonsense"):
        model(**inputs, nonsense=1)
    with pytest.raises(TypeError, match="input_ids"):
        model(inputs["input_ids"], **inputs)
    with pytest.raises(TypeError, match="takes"):
        model(*[None] * len(names))


def test_transformers_finds_the_labels_of_every_model():
    heads = {
        LionForMaskedLM: ["labels"], LionForSequenceClassification: ["labels"], LionForTokenClassification: ["labels"],
        LionForQuestionAnswering: ["start_positions", "end_positions"],
    }  # fmt: skip
    assert {head: find_labels(head) for head in heads} == heads


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("form", ["full", "chunkwise"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_gradient_checkpointing_recomputes_layers_and_changes_no_gradient(mixer, form, reentrant, monkeypatch):
    # A reentrant checkpoint runs without gradients at first, as inference does, which processes long texts in slices.
    monkeypatch.setattr(cpu, "SLICE", 16)
    model = build(mixer, attention_form=form, hidden_dropout_prob=0.3).train()
    inputs, labels = texts(padded=True), draw_labels()
    mixer_class = MIXER_CLASSES[mixer]
    calls, project = [], mixer_class.project
    monkeypatch.setattr(mixer_class, "project", lambda *arguments: calls.append(1) or project(*arguments))
    torch.manual_seed(0)
    expected = gradients(model, model(**inputs, labels=labels).loss)
    assert len(calls) == LAYERS
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    torch.manual_seed(0)
    actual = gradients(model, model(**inputs, labels=labels).loss)
    assert len(calls) == 3 * LAYERS
    assert_same(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["full", "chunkwise"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_sliced_layers_give_the_same_outputs_and_hooks_see_complete_activations(mixer, form, dtype, monkeypatch):
    model, inputs = build(mixer, LionModel, attention_form=form), texts(padded=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        expected = model(**inputs).last_hidden_state
        monkeypatch.setattr(cpu, "SLICE", 16)
        part = model.layers[0].attention.out if mixer == "hydra" else model.layers[0].mlp_in
        forward, seen = torch.nn.Linear.forward, []

        def watched(layer, x):
            seen.extend([tuple(x.shape)] if layer is part else [])
            return forward(layer, x)

        monkeypatch.setattr(torch.nn.Linear, "forward", watched)
        torch.testing.assert_close(model(**inputs).last_hidden_state, expected)
        width = part.in_features
        assert seen == [(16, width), (16, width), (16, width), (15, width)]
        part.register_forward_hook(lambda module, arguments, output: seen.append(tuple(output.shape)))
        torch.testing.assert_close(model(**inputs).last_hidden_state, expected)
        assert seen[4:] == [(3, 21, width), (3, 21, part.out_features)]


def test_a_form_that_does_not_exist_is_refused_when_a_folder_is_loaded(tmp_path):
    build("lion-s", LionModel).save_pretrained(tmp_path)
    assert LionModel.from_pretrained(tmp_path, attention_form="full").config.attention_form == "full"
    with pytest.raises(ValueError, match=r"attention_form must be one of .* \(got foo\)"):
        LionModel.from_pretrained(tmp_path, attention_form="foo")


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("mixer", ["lion-s", "hydra"])
def test_padding_on_either_side_changes_no_pooled_vector(mixer, pooling):
    model, ids = build(mixer, LionModel, classifier_pooling=pooling), torch.randint(1, V, (1, 7))
    expected = model(ids).pooler_output
    for left, right in ((0, 3), (3, 0), (2, 1)):
        mask = F.pad(torch.ones_like(ids), (left, right))
        torch.testing.assert_close(model(F.pad(ids, (left, right)), mask).pooler_output, expected)


def test_the_mean_of_a_long_text_fits_in_float16():
    model = build("lion-s", LionModel, classifier_pooling="mean").half()
    mask = torch.arange(10_000)[None] < 9_000
    assert float(model._pooled(torch.full((1, 10_000, D), 9.0, dtype=torch.float16), mask).max()) == 9


@pytest.mark.parametrize("form", ["full", "chunkwise"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_layer_compiles_as_one_graph(mixer, form):
    layer = build(mixer, LionModel).layers[0]
    mask = torch.ones(3, 21, dtype=torch.bool)
    mask[1, -7:] = False
    seq_idx = (torch.arange(21) >= 9).long().expand(3, -1)

    def outputs_and_gradients(run):
        x = torch.randn(3, 21, D, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y, _ = run(x, mask, seq_idx, form)
        return y, *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])

    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    # Hydra's gated norm, for one, and matrices that the kernel does not compute, are rounded to bfloat16 elsewhere.
    tolerance = 5e-2 if mixer == "hydra" or form == "full" else 1e-2
    for x, y in zip(outputs_and_gradients(compiled), outputs_and_gradients(layer)):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def test_a_compiled_model_follows_its_own_configuration():
    """And not that of one that was compiled before it: torch.compile has to see what a configuration is asked for."""
    inputs = texts(padded=True)
    torch.compiler.reset()
    for changes in *({"mixer": mixer} for mixer in MIXERS), {"mixer": "softmax", "classifier_pooling": "mean"}:
        model = build(kind=LionForSequenceClassification, **changes)
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(model, backend="eager")(**inputs).logits, model(**inputs).logits)


# Precision


@pytest.mark.parametrize("form", ["full", "recurrent", "chunkwise"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_bfloat16_model_is_close_to_the_float32_model(mixer, form):
    model, inputs = build(mixer, initializer_range=0.05), texts(padded=True)
    labels = draw_labels()
    with torch.no_grad():
        expected = model(**inputs, labels=labels)
        actual = model.bfloat16()(**inputs, labels=labels, attention_form=form)
    assert actual.logits.dtype == torch.bfloat16 and actual.loss.dtype == torch.float32
    assert (actual.logits.float() - expected.logits).norm() / expected.logits.norm() < 0.05
    torch.testing.assert_close(actual.loss, expected.loss, atol=0.05, rtol=0)


@pytest.mark.parametrize("form", ["full", "chunkwise"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_gradients_in_mixed_precision_are_close_to_float32(mixer, form):
    model = build(mixer, initializer_range=0.1, attention_form=form).train()
    inputs, labels = texts(length=40), draw_labels(length=40)
    expected = gradients(model, model(**inputs, labels=labels).loss)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**inputs, labels=labels).loss
    for name, gradient in gradients(model, loss).items():
        assert gradient.dtype == torch.float32
        assert (gradient - expected[name]).norm() / expected[name].norm() < 0.05, name


@pytest.mark.parametrize("changes", [{}, {"value_gate": True}], ids=str)
def test_autocast_converts_what_a_mixer_reads_once(changes):
    mixer, shape, converted = build("lion-s", LionModel, **changes).layers[0].attention, (2, 7, D), []

    class Conversions(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, arguments=(), options=None):
            y = operation(*arguments, **(options or {}))
            if operation is torch.ops.aten._to_copy.default and tuple(y.shape) == shape:
                converted.append(y.dtype)
            return y

    x = 1 * torch.randn(shape, requires_grad=True)  # autocast would keep the conversion of a leaf
    with Conversions(), torch.autocast("cpu", torch.bfloat16):
        y, _ = mixer(x, None, None, "full")
        assert converted == [torch.bfloat16]
        y.sum().backward()
    assert converted == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("changes", [{}, {"channel_decays": True, "separate_decays": True}], ids=str)
def test_what_replaces_the_layer_of_the_decays_is_called(changes):
    """Adapters and quantized layers have other weights than that layer."""

    class Adapted(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer, self.added = layer, torch.nn.Parameter(torch.zeros(layer.out_features))

        def forward(self, x):
            return self.layer(x) + self.added

    model, inputs = build("lion-s", LionModel, **changes), texts()
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
    for layer in model.layers:
        layer.attention.decay = Adapted(layer.attention.decay)
    y = model(**inputs).last_hidden_state
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    assert all(layer.attention.decay.added.grad.abs().sum() > 0 for layer in model.layers)


def test_hooks_see_the_embeddings_of_omitted_token_types():
    """So does accelerate, which loads weights when a module is called."""
    model, calls = build("lion-s", LionModel), []
    model.embeddings.token_type_embeddings.register_forward_hook(lambda *_: calls.append(1))
    ids = texts()["input_ids"]
    torch.testing.assert_close(
        model(ids).last_hidden_state, model(ids, token_type_ids=torch.zeros_like(ids)).last_hidden_state
    )
    assert len(calls) == 2
