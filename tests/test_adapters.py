"""Checkpoints of the paper's authors: their names become ours, and small random models give the same outputs."""

import json

import pytest
import torch
import transformers
from conftest import PARITY, needs_reference
from safetensors import safe_open

from src.checkpoints.adapters import config_from_published, state_dict_from_published
from src.checkpoints.reading import read_folder
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


MODERN = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "global_attn_every_n_layers": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
    "sep_token_id": 2, "initializer_range": 0.2, "reference_compile": False,
}  # fmt: skip


def modernbert(folder, kind: str = "ModernBertForMaskedLM", **changes):
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(**{**MODERN, **changes})
    model = getattr(transformers, kind)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases, which would all be 1 and 0
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("changes", [{}, {f"{part}_bias": True for part in ("attention", "mlp", "norm", "classifier")}])
def test_a_modernbert_gives_its_logits(changes, tmp_path):
    theirs, ours = modernbert(tmp_path, **changes), read_folder(tmp_path).build()
    for batch, length in ((1, 1), (2, 7), (3, 33), (1, 150)):
        ids, mask = torch.randint(3, 96, (batch, length)), torch.ones(batch, length, dtype=torch.long)
        mask[0, length - length // 3 :] = 0
        expected, actual = (model(ids, attention_mask=mask).logits[mask.bool()] for model in (theirs, ours))
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_a_modernbert_without_head_lacks_only_the_head(tmp_path):
    modernbert(tmp_path, "ModernBertModel")
    weights = read_folder(tmp_path).weights
    missing = LionForMaskedLM(read_folder(tmp_path).config).state_dict().keys() - weights.keys()
    assert missing == {"head.dense.weight", "head.norm.weight", "head.decoder.weight", "head.decoder.bias"}
    assert not weights.keys() - LionForMaskedLM(read_folder(tmp_path).config).state_dict().keys()


def test_a_modernbert_written_by_transformers_5_is_read(tmp_path):
    modernbert(tmp_path)
    expected = read_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"):
        config.pop(name, None)
    config["layer_types"] = ["full_attention"] * 3
    config["rope_parameters"] = {"full_attention": {"rope_type": "default", "rope_theta": 160000.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_folder(tmp_path).config.to_dict() == expected.config.to_dict()
    config["layer_types"][1] = "sliding_attention"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="local attention"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"global_attn_every_n_layers": 3}, "local attention"),
        ({"mlp_bias": True}, "biases in some"),
        ({"decoder_bias": False}, "decoder without bias"),
        ({"classifier_activation": "relu"}, "different activations"),
    ],
)
def test_a_modernbert_that_cannot_be_built_is_refused(changes, words, tmp_path):
    modernbert(tmp_path, **changes)
    with pytest.raises(UserError, match=words):
        read_folder(tmp_path)
