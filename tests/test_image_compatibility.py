"""Files of image models that commit 458c32c wrote (tests/fixtures/images): today's commands resume, convert, verify and
load them."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageClassification

import vision
from src import convert_dataset, hub

FIXTURES = Path(__file__).with_name("fixtures") / "images"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A copy of the fixtures as the current folder."""
    shutil.copytree(FIXTURES, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_key_keeps_its_name_default_and_meaning(here, capsys):
    expected = yaml.safe_load(Path("keys-vision.yaml").read_text())
    for path in ("stopped.yaml", "keys-vision.yaml"):
        with pytest.raises(SystemExit) as end:
            vision.main([path, "--print_config"])
        assert end.value.code in (0, None)
        found = yaml.safe_load(capsys.readouterr().out)
        for name in ("mean", "std"):  # null: ImageNet's, as before, unless another model starts it
            assert found[name] in (None, expected[name])
            found[name] = expected[name]
        assert {name: value for name, value in found.items() if name in expected} == expected


@pytest.mark.slow
def test_the_same_pictures_give_the_same_shards(here):
    convert_dataset.main("--images pictures --num_workers 1 --size_limit 4096 --out_root again".split())
    for path in Path("shards").rglob("*.mds"):
        assert Path("again", *path.parts[1:]).read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_a_stopped_run_resumes_to_the_same_weights_and_averages(here):
    vision.main(["stopped.yaml"])
    found, expected = lines(Path("stopped/metrics.jsonl")), lines(Path("expected/metrics.jsonl"))
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for new, old in zip(found, expected):
        for key in ("samples", "lr", "loss", "eval"):
            assert new.get(key) == (pytest.approx(old[key], rel=1e-4) if key in old else None)
    state = torch.load("stopped/latest-rank0.pt", weights_only=False)["state"]
    averages = dict(state["algorithms"])["EMA"]["ema_model"]["named_parameters_dict"]
    weights = state["model"] | {f"average.{name}": tensor for name, tensor in averages.items()}
    for name, values in load_file("expected/weights.safetensors").items():
        torch.testing.assert_close(weights[name], values, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_a_hub_folder_verifies_and_loads_with_its_own_code(here, capsys):
    hub.main("verify --checkpoint stopped/latest-rank0.pt --folder my-model".split())
    # Its code of then computes in PyTorch, and so rounds otherwise than the kernel.
    assert float(re.search(r"largest difference (\S+)\)", capsys.readouterr().out)[1]) < 1e-7
    expected = json.loads(Path("expected/logits.json").read_text())
    Path("my-model").rename("with-its-code")  # transformers keeps the modules of a folder by its name
    model = AutoModelForImageClassification.from_pretrained("with-its-code", trust_remote_code=True).eval()
    processor = AutoImageProcessor.from_pretrained("with-its-code")
    with torch.no_grad():
        found = model(**processor([Image.open(file) for file in expected["files"]], return_tensors="pt")).logits
    torch.testing.assert_close(found, torch.tensor(expected["logits"]), atol=1e-5, rtol=0)
