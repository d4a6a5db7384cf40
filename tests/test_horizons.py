"""The command that measures how far heads see: its numbers against models that are known, and its mistakes."""

import json
import math

import pytest
import torch
from conftest import TINY_MODEL, sentences, write_jsonl

from src.checkpoints.reading import read_folder
from src.errors import UserError
from src.horizons.__main__ import main
from src.horizons.measure import measure
from src.lion import LionConfig, LionModel

SIZES = {**TINY_MODEL, "num_hidden_layers": 2, "vocab_size": 64, "hidden_dropout_prob": 0.0, "initializer_range": 0.2}
ROWS = torch.randint(64, (2, 127), generator=torch.Generator().manual_seed(0)).tolist()


def build(mixer: str, **changes) -> LionModel:
    torch.manual_seed(0)
    return LionModel(LionConfig(**{**SIZES, "mixer": mixer, **changes}), add_pooling_layer=False).eval()


def test_horizons_and_shares_are_those_of_the_decays():
    model = build("lion-d")
    with torch.no_grad():
        for layer in model.layers:  # queries, keys and values that do not depend on the token
            layer.attention.qkv.weight.zero_()
            layer.attention.qkv.bias.fill_(1)
            layer.attention.decay.copy_(torch.tensor([0.0, 3.0]))
    result = measure(model, ROWS)
    decays = [0.5, 1 / (1 + math.exp(-3))]
    expected = [-1 / math.log(decay) for decay in decays]
    assert result["horizons"] == [pytest.approx(expected)] * 2
    for distance, (first, second) in result["shares"].items():
        assert first == pytest.approx(second)
        share = []
        for decay in decays:
            weights = [[decay ** abs(i - j) for j in range(127)] for i in range(127)]
            far = [[w if abs(i - j) > distance else 0 for j, w in enumerate(row)] for i, row in enumerate(weights)]
            share += [sum(row) / sum(all_) for row, all_ in zip(far, weights)]
        assert first == pytest.approx(sum(share) / len(share), rel=1e-4)
    assert list(result["gradients"]) == [10, 100]


@pytest.mark.parametrize(("mixer", "heads"), [("lion-lit", None), ("softmax", None), ("lion-s", 2), ("hydra", 8)])
def test_every_mixer_is_measured(mixer, heads):
    sizes = {"num_attention_heads": None, "intermediate_size": None, "headdim": 16, "d_state": 8}
    result = measure(build(mixer, **(sizes if mixer == "hydra" else {})), ROWS)
    assert [horizons and len(horizons) for horizons in result["horizons"]] == [heads] * 2
    assert all(0 <= share <= 1 for shares in result["shares"].values() for share in shares)
    if heads is None:  # nothing decays, so most of an output is from far away
        assert min(result["shares"][10]) > 0.5


def test_spread_horizons_see_further():
    near, far = (measure(build("lion-s", decay_horizon=horizon), ROWS) for horizon in (None, [2, 1000]))
    assert far["gradients"][100] > 1e-4 > 1e-10 > near["gradients"][100]
    assert far["shares"][10][0] > 0.2 > near["shares"][10][0]


def test_the_command_measures_a_hub_folder(folder, tmp_path, capsys):
    data = write_jsonl(tmp_path / "data.jsonl", sentences(40))
    out = tmp_path / "out" / "horizons"
    main(["--checkpoint", str(folder), "--data_files", str(data), "--length", "120", "--out", str(out)])
    printed = capsys.readouterr().out
    result = json.loads((out / "horizons.json").read_text())
    assert result["length"] == 120 and result["rows"] == 4 and result["shares"].keys() == {"10", "100"}
    assert len(result["horizons"]) == len(result["initial_horizons"]) == read_folder(folder).config.num_hidden_layers
    assert result["horizons"] != result["initial_horizons"]
    assert (out / "horizons.png").read_bytes().startswith(b"\x89PNG")
    assert "gradient relative to a token's own" in printed and str(out / "horizons.png") in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--length", 100000], "--data_files.*100000 tokens"),
        (["--length", 2], "--length 2 must be at least 3"),
        (["--rows", 0], "--rows 0 must be at least 1"),
        (["--checkpoint", "nowhere/at/all"], "--checkpoint: nowhere/at/all"),
        (["--data_files", "nowhere.txt"], "--data_files.*nowhere.txt"),
    ],
)
def test_a_mistake_is_named(folder, tmp_path, arguments, words):
    data = write_jsonl(tmp_path / "data.jsonl", sentences(10))
    given = ["--checkpoint", folder, "--data_files", data, "--out", tmp_path / "out", *arguments]
    with pytest.raises(UserError, match=words):
        main([str(argument) for argument in given])


def test_a_checkpoint_without_tokenizer_needs_one(folder, tokenizer_folder, tmp_path):
    for name in ("tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    given = ["--checkpoint", str(folder), "--data_files", str(write_jsonl(tmp_path / "data.jsonl", sentences(10)))]
    given += ["--out", str(tmp_path / "out"), "--length", "20"]
    with pytest.raises(UserError, match=r"has no tokenizer.*--tokenizer"):
        main(given)
    main([*given, "--tokenizer", str(tokenizer_folder)])
    assert (tmp_path / "out" / "horizons.png").is_file()
