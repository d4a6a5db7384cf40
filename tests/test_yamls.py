"""The project's configs: each builds its model, with the parameters that docs/pretraining.md states, and trains."""

import re

import pytest
import torch
from conftest import ROOT

from src.lion import LionConfig, LionForMaskedLM
from src.mlm.task import PretrainConfig
from src.training.config import load_config

MODELS = sorted(path.stem for path in (ROOT / "yamls/pretrain").glob("*.yaml") if "-" in path.stem)
VOCABULARY = {"tiny": 8192}  # the demo's; otherwise BERT's, rounded up to a multiple of 8


def build(name: str, **changes: int) -> LionForMaskedLM:
    config = load_config(PretrainConfig, "main.py", "", [str(ROOT / f"yamls/pretrain/{name}.yaml")])
    sizes = {"vocab_size": VOCABULARY.get(name.rsplit("-", 1)[-1], 30528), **config.model, **changes}
    return LionForMaskedLM(LionConfig(**sizes))


@pytest.mark.parametrize("name", MODELS)
def test_the_docs_state_the_parameters_of_every_model(name):
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build(name).parameters())
    if name.endswith("-large") and name != "hydra-large":
        assert round(parameters, -6) == 335_000_000
    else:
        table = (ROOT / "docs/pretraining.md").read_text()
        rows = re.findall(r"^\| `([\w-]+)\.yaml` .*?\| *([\d,]+) \|$", table, re.MULTILINE)
        assert dict(rows)[name] == f"{parameters:,}"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name.endswith("-base") or name == "lion-s-base-8k"])
def test_layers_of_a_base_model_learn_in_one_step(name):
    torch.manual_seed(0)
    model = build(name, num_hidden_layers=2).train()
    ids = torch.randint(1000, 30000, (2, 24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        optimizer.zero_grad()
    assert losses[1] < losses[0]
