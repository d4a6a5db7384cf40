"""Files of embedding models that commit 875a6ea wrote (tests/fixtures/embed): today's commands resume, verify and load
them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import embed
from src import hub
from src.lion import cpu_linear, machine

FIXTURES = Path(__file__).with_name("fixtures")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A copy of the fixtures as the current folder."""
    shutil.copytree(FIXTURES / "embed", tmp_path / "here", symlinks=True)
    shutil.copytree(FIXTURES / "tokenizer", tmp_path / "here" / "tokenizer")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def test_every_key_keeps_its_name_default_and_meaning(here, capsys):
    expected = yaml.safe_load(Path("keys-embed.yaml").read_text())
    for path in ("stopped.yaml", "keys-embed.yaml"):
        with pytest.raises(SystemExit) as end:
            embed.main([path, "--print_config"])
        assert end.value.code in (0, None)
        found = yaml.safe_load(capsys.readouterr().out)
        assert {name: value for name, value in found.items() if name in expected} == expected


@pytest.mark.slow
def test_a_stopped_run_resumes_to_the_same_weights(here):
    embed.main(["stopped.yaml"])
    found, expected = (
        [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
        for folder in ("stopped", "expected")
    )
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for new, old in zip(found, expected):
        for key in ("samples", "lr", "loss", "eval", "cut_queries", "cut_documents"):
            assert new.get(key) == (pytest.approx(old[key], rel=1e-4) if key in old else None)
    weights = torch.load("stopped/latest-rank0.pt", weights_only=False)["state"]["model"]
    for name, values in load_file("expected/weights.safetensors").items():
        torch.testing.assert_close(weights[name], values, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_a_hub_folder_verifies_and_loads_with_its_own_code(here, capsys, monkeypatch):
    from sentence_transformers import SentenceTransformer

    # As the folder's own code, of an earlier version, computes on every machine.
    monkeypatch.setattr(machine, "_adopted", {"native": False, "onednn_from": cpu_linear.NEVER})
    hub.main("verify --checkpoint stopped/latest-rank0.pt --folder my-embedder".split())
    assert "0.0e+00" in capsys.readouterr().out
    expected = json.loads(Path("expected/vectors.json").read_text())
    model = SentenceTransformer("my-embedder", device="cpu", trust_remote_code=True)
    found = model.encode_document(expected["texts"], convert_to_tensor=True)
    torch.testing.assert_close(found, torch.tensor(expected["vectors"]), atol=1e-5, rtol=0)
