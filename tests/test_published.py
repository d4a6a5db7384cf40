"""The authors' checkpoints, by the small random models in their naming that lie beside the repository (if they do)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from src.cli import UserError
from src.lion import LionForMaskedLM, LionForSequenceClassification
from src.published import config_from_published, state_dict_from_published

PARITY = Path(__file__).parents[2] / "shared" / "parity"
FILES = sorted(PARITY.glob("*.safetensors"))


@pytest.mark.skipif(not FILES, reason="the parity files are not beside this checkout")
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


def test_unknown_names_are_listed():
    config = config_from_published({"arch_type": "nova", "num_hidden_layers": 1})
    with pytest.raises(UserError, match=r"bert\.strange, other"):
        state_dict_from_published({"bert.strange": torch.zeros(1), "other": torch.zeros(1)}, config)


def test_unknown_architecture_is_refused():
    with pytest.raises(UserError, match="hydra"):
        config_from_published({"arch_type": "hydra"})
