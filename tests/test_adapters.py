"""Checkpoints of the paper's authors: their names become ours, and small random models give the same outputs."""

import json

import pytest
import torch
from conftest import PARITY, needs_reference
from safetensors import safe_open

from src.checkpoints.adapters import config_from_published, state_dict_from_published
from src.errors import UserError
from src.lion import LionForMaskedLM, LionForSequenceClassification

FILES = [*sorted(PARITY.glob("*.safetensors")), *PARITY.glob("hydra/hydra-mlm.safetensors")]
HYDRA = {"matrix_mixer_type": "hydra", "num_hidden_layers": 1, "num_attention_heads": 16, "intermediate_size": 3072}


@needs_reference
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("form", ["full", "recurrent", "chunkwise"])
def test_published_model_gives_its_published_outputs(path, form):
    with safe_open(path, "pt") as file:
        published = json.loads(file.metadata()["config"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    config = config_from_published(published)
    config.chunk_size = 8
    inputs = {name[3:]: tensor for name, tensor in tensors.items() if name.startswith("in.")}
    real = inputs["attention_mask"].bool()

    def load(model, prefix):
        state = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        model.load_state_dict(state_dict_from_published(state, config))  # strict: nothing missing, nothing left over
        return model.eval()

    mlm = load(LionForMaskedLM(config), "mlm.")
    encoder = {name: tensor for name, tensor in tensors.items() if name.startswith("mlm.bert.")}
    tensors |= {"cls." + name.removeprefix("mlm."): tensor for name, tensor in encoder.items()}
    classifier = load(LionForSequenceClassification(config), "cls.")
    with torch.no_grad():
        output = mlm(**inputs, output_hidden_states=True, attention_form=form)
        torch.testing.assert_close(output.hidden_states[-1][real], tensors["out.hidden"][real], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(output.logits[real], tensors["out.mlm_logits"][real], atol=1e-5, rtol=1e-5)
        logits = classifier(**inputs, attention_form=form).logits
        torch.testing.assert_close(logits, tensors["out.cls_logits"], atol=1e-5, rtol=1e-5)


def test_a_hydra_ignores_what_is_berts():
    config = config_from_published({**HYDRA, "attention_probs_dropout_prob": 0.1, "chunk_size": 256, "qk_dim": 16})
    assert (config.mixer, config.num_attention_heads, config.intermediate_size) == ("hydra", 24, None)
    assert (config.attention_probs_dropout_prob, config.chunk_size) == (0.0, 128)
    assert config_from_published({**HYDRA, "pool_all": True}).classifier_pooling == "mean"


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"matrix_mixer_type": "vandermonde"}, "matrix_mixer_type 'vandermonde' of theirs.pt must be hydra"),
        ({"is_prenorm": True}, "theirs.pt has is_prenorm: true"),
        ({"use_position_embeddings": True}, "theirs.pt has use_position_embeddings: true"),
        ({"d_conv": 4}, r"d_conv must be odd \(got 4\)"),
        ({"headdim": 100}, r"expand \* hidden_size = 1536 is not divisible by headdim=100"),
    ],
)
def test_another_hydra_is_refused(setting, message):
    with pytest.raises(UserError, match=message):
        config_from_published({**HYDRA, **setting}, "theirs.pt")


def test_initial_states_of_a_hydra_are_refused_by_name():
    name = "bert.encoder.layer.0.layer.mixer.init_states"
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        state_dict_from_published({name: torch.zeros(1)}, config_from_published(HYDRA))


def test_unknown_names_are_listed():
    config = config_from_published({"arch_type": "nova", "num_hidden_layers": 1})
    with pytest.raises(UserError, match=r"bert\.strange, other"):
        state_dict_from_published({"bert.strange": torch.zeros(1), "other": torch.zeros(1)}, config)


@pytest.mark.parametrize("part", ["query", "key"])
def test_queries_and_keys_of_different_shapes_are_named(part):
    config = config_from_published({"arch_type": "nova", "num_hidden_layers": 1})
    state = {
        f"bert.encoder.layer.0.attention.self.{name}.weight": torch.zeros(4, 4) for name in ("query", "key", "value")
    }
    state[f"bert.encoder.layer.0.attention.self.{part}.weight"] = torch.zeros(3, 4)
    with pytest.raises(UserError, match=rf"attention\.{part}\.weight.*must have the same shape"):
        state_dict_from_published(state, config)


def test_the_decoders_two_biases_must_be_equal():
    config = config_from_published({"arch_type": "nova", "num_hidden_layers": 1})
    state = {"cls.predictions.bias": torch.zeros(8), "cls.predictions.decoder.bias": torch.zeros(8)}
    assert state_dict_from_published(state, config).keys() == {"head.decoder.bias"}
    state["cls.predictions.bias"] = torch.ones(8)
    with pytest.raises(UserError, match=r"cls\.predictions\.bias and cls\.predictions\.decoder\.bias"):
        state_dict_from_published(state, config)


@pytest.mark.parametrize("setting", [{"hidden_size": 33}, {"num_attention_heads": "two"}, {"id2label": [0]}])
def test_an_invalid_config_is_reported(setting):
    with pytest.raises(UserError, match=r"the config of theirs\.pt is not valid"):
        config_from_published({"arch_type": "nova", **setting}, "theirs.pt")


def test_unknown_architecture_is_refused():
    with pytest.raises(UserError, match="hydra"):
        config_from_published({"arch_type": "hydra"})
