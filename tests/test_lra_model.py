"""The classifier of Long Range Arena: what its logits and its optimizer depend on, and how far its encoders reach."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, settings_of

from src.config import load
from src.jobs.tasks import optimizer_of
from src.jobs.training import Classifier
from src.lion import LionConfig, LionModel
from src.lra.arrays import collate
from src.lra.tasks import FIRST, LRA, LraConfig
from src.lra.training import build_model, build_settings
from src.training.registry import build_optimizer

RECIPE = str(ROOT / "yamls/lra/recipe.yaml")
TINY = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
CHANNELS = {"channel_decays": True, "feature_map": "sigmoid", "normalize_rows": True}
# Of a default LionModel of TINY sizes, before there were long_reach and channel_decays (commit aab3fcf).
INITIAL = {
    "lion-lit": "ca96be0c447f485c", "lion-d": "4ae8629491d69ead", "lion-s": "99a6167971d08b17",
    "softmax": "54160ad54ea43de1", "hydra": "cf786210ed6134ce",
}  # fmt: skip
MODELS = [
    {"mixer": "lion-s", **CHANNELS},
    {"mixer": "lion-d", "long_reach": True},
    {"mixer": "lion-lit", "feature_map": "sigmoid", "normalize_rows": True, "norm": "pre", "mlp": "geglu"},
    {"mixer": "softmax"},
]


def config_of(**changes) -> LraConfig:
    return load(
        LraConfig,
        "lra.py",
        [RECIPE, "base_run_name=a", "model=null", *(f"{name}={json.dumps(value)}" for name, value in changes.items())],
    )


def classifier(name: str = "listops", model: dict | None = None, **changes):
    """A task's model, tiny, with weights large enough for differences to show."""
    config = config_of(model={**TINY, **(model or MODELS[0])}, **changes)
    torch.manual_seed(0)
    built = build_model(build_settings(LRA[name], config, {}), None, config).eval()
    for linear in (built.classifier, built.pair):
        if linear is not None:
            torch.nn.init.normal_(linear.weight, std=0.5)
    return built


def batch(lengths: list[int], parts: int = 1, seed: int = 0, pad_to: int = 8) -> dict:
    """Rows of tokens of ListOps, or pixels, as lra.py makes batches."""
    draw = torch.Generator().manual_seed(seed)
    rows = [
        tuple(torch.randint(0, 15, (length,), generator=draw).numpy().astype("uint8") for _ in range(parts))
        for length in lengths
    ]
    items = [{"parts": row, "label": i % 2} for i, row in enumerate(rows)]
    return collate(items, pad_to_multiple_of=pad_to)


@torch.no_grad()
def logits(model, given: dict) -> torch.Tensor:
    return model(given["input_ids"], given.get("attention_mask")).logits


@pytest.mark.parametrize("arguments", MODELS, ids=lambda arguments: arguments["mixer"])
@pytest.mark.parametrize("name", ["listops", "retrieval", "image"])
def test_logits_of_a_row_do_not_depend_on_padding_or_other_rows(name, arguments):
    model, lengths = classifier(name, arguments), [3, 40, 17, 150]
    together = batch(lengths, parts=2 if name == "retrieval" else 1)
    if name == "image":
        together["input_ids"] *= 17
    expected = logits(model, together)
    assert expected.shape == (4, LRA[name].num_labels) and expected.std(0).min() > 1e-3
    for row, length in enumerate(lengths):
        alone = {key: value[row : row + 1, ..., :length] for key, value in together.items() if key != "labels"}
        torch.testing.assert_close(logits(model, alone), expected[row : row + 1], atol=2e-5, rtol=1e-4)
    further = {key: torch.nn.functional.pad(together[key], (0, 64)) for key in ("input_ids", "attention_mask")}
    torch.testing.assert_close(logits(model, further), expected, atol=2e-5, rtol=1e-4)


def test_a_pair_is_two_texts_encoded_alone_and_compared_in_order():
    model, given = classifier("retrieval"), batch([9, 16, 30], parts=2)
    ids, mask = given["input_ids"], given["attention_mask"]
    with torch.no_grad():
        states = [model.lion(ids[:, part] + FIRST, mask[:, part]).last_hidden_state for part in (0, 1)]
        counts = [mask[:, part].sum(-1, keepdim=True) for part in (0, 1)]
        x, y = ((s * mask[:, part, :, None]).sum(1) / counts[part] for part, s in enumerate(states))
        for first, second, rows in ((x, y, ids), (y, x, ids.flip(1))):
            features = torch.cat([first, second, first * second, first - second], -1)
            expected = model.classifier(torch.nn.functional.gelu(model.pair(features)))
            found = model(rows, mask if rows is ids else mask.flip(1)).logits
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (
        logits(model, given) - logits(model, {"input_ids": ids.flip(1), "attention_mask": mask.flip(1)})
    ).abs().max() > 1e-3


def test_the_loss_is_the_cross_entropy_of_the_labels():
    model, given = classifier(), batch([5, 9, 12])
    found = model(**given)
    expected = torch.nn.functional.cross_entropy(found.logits, given["labels"])
    torch.testing.assert_close(found.loss, expected)


def test_values_go_normalized_through_a_linear_layer():
    model, given = classifier("image"), batch([16, 16])
    given["input_ids"] *= 17  # of 0 … 14, to 238
    assert model.lion.config.vocab_size == 8 and model.value.weight.shape == (16, 1)
    with torch.no_grad():
        inputs = model.value((given["input_ids"].float()[..., None] - 122.6) / 61)
        expected = model.classifier(model.lion(inputs_embeds=inputs).last_hidden_state.mean(1))
    torch.testing.assert_close(logits(model, given), expected)


def test_more_than_the_sign_of_a_value_passes_the_norm_at_the_start():
    config = config_of(model={**TINY, **MODELS[0]})
    torch.manual_seed(0)
    model = build_model(build_settings(LRA["image"], config, {}), None, config)
    pixels = (torch.tensor([[0.0], [60.0], [120.0], [130.0], [200.0], [255.0]]) - 122.6) / 61
    with torch.no_grad():
        found = model.lion.embeddings(None, model.value(pixels)[None], None, None)[0]
    assert torch.cdist(found, found).fill_diagonal_(9).min() > 0.1


def test_tokens_are_numbered_after_the_special_ones():
    model, given = classifier(), batch([16, 16])
    assert FIRST == 5 and model.lion.config.vocab_size == 24  # 5 + 15, to a multiple of 8
    with torch.no_grad():
        expected = model.classifier(model.lion(given["input_ids"] + 5).last_hidden_state.mean(1))
    torch.testing.assert_close(logits(model, given), expected)


@pytest.mark.parametrize("arguments", MODELS, ids=lambda arguments: arguments["mixer"])
def test_decays_biases_and_norms_have_no_weight_decay(arguments):
    model = classifier("retrieval", arguments)
    own = {name for name, _ in model.named_parameters() if name.split(".attention.")[-1].startswith("decay")}
    assert model.no_weight_decay() == own and bool(own) == arguments["mixer"].startswith(("lion-s", "lion-d"))
    given = {**optimizer_of(LRA["retrieval"]), "filter_bias_norm_wd": True}
    optimizer = build_optimizer(given, Classifier(model, use_logits=True))
    decayed = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    parameters = dict(model.named_parameters())
    assert decayed.keys() == {id(parameter) for parameter in parameters.values()}
    for name, parameter in parameters.items():
        free = name in own or name.endswith("bias") or parameter.ndim < 2
        assert decayed[id(parameter)] == (0.0 if free else 0.05), name
    assert decayed[id(model.classifier.weight)] == decayed[id(model.lion.embeddings.word_embeddings.weight)] == 0.05


@pytest.mark.parametrize("arguments", MODELS[:2], ids=lambda arguments: arguments["mixer"])
def test_activation_checkpointing_gives_the_same_gradients(arguments, with_and_without_kernel):
    given, found = batch([30, 40]), []
    for checkpointing in (False, True):
        model = classifier(model=arguments, activation_checkpointing=checkpointing).train()
        assert model.is_gradient_checkpointing is checkpointing
        model(**given).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)


def test_long_reach_spreads_horizons_to_the_length_of_each_task():
    for name in ("listops", "pathx"):
        settings = build_settings(LRA[name], config_of(model={**TINY, "mixer": "lion-s", "long_reach": True}), {})
        assert settings["decay_horizon"] == [2, LRA[name].max_length]
        assert (settings["feature_map"], settings["normalize_rows"]) == ("sigmoid", True)


def test_dropout_and_other_arguments_reach_the_model():
    task = replace(LRA["text"], dropout=0.25)
    settings = build_settings(task, config_of(model={"mixer": "lion-d", "norm": "pre"}), {})
    assert settings["hidden_dropout_prob"] == 0.25 and settings["attention_probs_dropout_prob"] == 0.0
    assert (settings["hidden_size"], settings["num_hidden_layers"], settings["mixer"]) == (256, 6, "lion-d")
    assert (settings["classifier_pooling"], settings["type_vocab_size"]) == ("mean", 0)


def reach(distance: int, **arguments) -> float:
    """|∂ first output / ∂ input| at a distance, relative to that of the input at its own place, at the start."""
    sizes = {"num_hidden_layers": 6, "hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 256}
    torch.manual_seed(0)
    model = LionModel(LionConfig(vocab_size=24, **sizes, **arguments)).eval()
    ids = torch.randint(5, 20, (1, distance + 8), generator=torch.Generator().manual_seed(1))
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    state = model(inputs_embeds=embeddings).last_hidden_state[0, 0]
    probe = torch.randn(state.shape, generator=torch.Generator().manual_seed(0))
    norms = torch.autograd.grad((state * probe).sum(), embeddings)[0][0].norm(dim=-1)
    return float(norms[distance] / norms[0])


@pytest.mark.parametrize("channels", [False, True], ids=["decays of heads", "decays of channels"])
@pytest.mark.parametrize("mixer", ["lion-s", "lion-d"])
def test_spread_horizons_see_a_thousand_tokens_at_the_start(mixer, channels):
    assert reach(1000, mixer=mixer, decay_horizon=[2, 2000], channel_decays=channels) >= 1e-4
    # Divided by the sums of rows, an output is a mean over tokens: softmax, which sees all alike, is at 1.2e-4.
    assert reach(1000, mixer=mixer, long_reach=2000, channel_decays=channels) >= 1e-5
    if not channels:
        assert reach(1000, mixer=mixer) < 1e-12  # of published models


@pytest.mark.parametrize("mixer", INITIAL)
def test_default_models_start_from_the_same_weights_as_before(mixer):
    torch.manual_seed(0)
    model = LionModel(LionConfig(**settings_of(mixer, **TINY, vocab_size=32, max_position_embeddings=16)))
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    assert digest.hexdigest()[:16] == INITIAL[mixer]
