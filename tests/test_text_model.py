"""A text model's sizes and tokenizer, from a config."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import TINY_MODEL, VOCABULARY
from transformers import BertTokenizerFast

from src.errors import UserError
from src.training import text_model


def test_the_vocabulary_is_the_tokenizers_rounded_up(tokenizer):
    config = text_model.build_lion_config(TINY_MODEL, tokenizer, 64)
    assert config.vocab_size == -(-len(tokenizer) // 8) * 8
    assert config.pad_token_id == tokenizer.pad_token_id
    assert text_model.build_lion_config({**TINY_MODEL, "vocab_size": 1000}, tokenizer, 64).vocab_size == 1000


@pytest.mark.parametrize(
    ("changes", "max_seq_len", "words"),
    [
        ({"hiden_size": 64}, 64, ["unknown key model.hiden_size", "did you mean hidden_size?"]),
        ({"mixer": "lion-x"}, 64, ["model", "lion-x", "lion-lit, lion-d, lion-s, hydra, softmax"]),
        ({"num_attention_heads": 3}, 64, ["model: hidden_size=32", "num_attention_heads=3"]),
        ({"vocab_size": 32}, 64, ["model.vocab_size=32", "tokenizer"]),
        ({"num_attention_heads": 0}, 64, ["model.num_attention_heads=0", "≥ 1"]),
        ({"hidden_size": "abc"}, 64, ["model.hidden_size='abc'", "an integer"]),
        ({"hidden_size": 32.0}, 64, ["model.hidden_size=32.0", "an integer"]),
        ({"hidden_act": "gleu"}, 64, ["model.hidden_act=gleu must be one of gelu,"]),
        ({"hidden_act": None}, 64, ["model.hidden_act=None"]),
        ({"hidden_dropout_prob": 2}, 64, ["model.hidden_dropout_prob=2", "< 1"]),
        ({"tie_word_embeddings": "yes"}, 64, ["model.tie_word_embeddings", "true or false"]),
        ({"mixer": "softmax"}, 256, ["max_seq_len=256", "max_position_embeddings=128", "softmax"]),
        ({"mixer": "lion-lit"}, 256, ["max_seq_len=256", "max_position_embeddings=128", "lion-lit"]),
        (
            {"attention_form": "chunkwise", "attention_probs_dropout_prob": 0.1},
            64,
            ["attention_probs_dropout_prob", "chunkwise"],
        ),
        ({"attention_form": "chunkwse", "attention_probs_dropout_prob": 0.0}, 64, ["attention_form", "chunkwse"]),
    ],
)
def test_an_impossible_model_is_rejected(tokenizer, changes, max_seq_len, words):
    with pytest.raises(UserError) as error:
        text_model.build_lion_config({**TINY_MODEL, **changes}, tokenizer, max_seq_len)
    for word in words:
        assert word in str(error.value)


def test_values_of_the_arguments_types_are_accepted(tokenizer):
    changes = {
        "hidden_dropout_prob": 0,
        "classifier_dropout": None,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    config = text_model.build_lion_config({**TINY_MODEL, **changes}, tokenizer, 64)
    assert {name: getattr(config, name) for name in changes} == changes


@pytest.mark.parametrize("mixer", ["lion-d", "lion-s"])
def test_a_mixer_with_decay_reads_texts_longer_than_the_position_embeddings(tokenizer, mixer):
    assert text_model.build_lion_config({**TINY_MODEL, "mixer": mixer}, tokenizer, 4096).mixer == mixer


def test_a_tokenizer_is_loaded_from_its_folder(tokenizer_folder):
    tokenizer = text_model.build_tokenizer(str(tokenizer_folder), 40)
    assert len(tokenizer) == len(VOCABULARY)
    assert tokenizer.model_max_length == 40


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nobody/nothing", ["nobody/nothing", "not a folder", "Hub"]),  # the Hub is unreachable, see conftest.py
        ("bert-base-uncased", ["bert-base-uncased", "Hub"]),
        ("./nowhere", ["./nowhere", "does not exist"]),
        ("a/b/c", ["a/b/c"]),
        ("{empty}", ["holds no tokenizer"]),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_is_reported_in_one_sentence(tmp_path, name, words):
    with pytest.raises(UserError) as error:
        text_model.build_tokenizer(name.format(empty=tmp_path), 64)
    assert str(error.value).startswith("tokenizer_name: ")
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("fault", ["code", "content"])
def test_a_tokenizer_with_code_of_its_own_or_corrupt_files_is_rejected(tmp_path, tokenizer_folder, fault):
    folder = Path(shutil.copytree(tokenizer_folder, tmp_path / "copy"))
    if fault == "code":
        settings = {"tokenizer_class": "Other", "auto_map": {"AutoTokenizer": [None, "code.Other"]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "code.py").write_text("raise SystemExit('run')")
    else:
        (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer_name: cannot load .* its files are unusable"):
        text_model.build_tokenizer(str(folder), 64)


@pytest.mark.parametrize("token", ["mask_token", "pad_token"])
def test_a_tokenizer_without_a_needed_token_is_rejected(tmp_path, tokenizer_folder, token):
    tokenizer = BertTokenizerFast(str(tokenizer_folder / "vocab.txt"))
    setattr(tokenizer, token, None)
    tokenizer.save_pretrained(tmp_path / "without")
    with pytest.raises(UserError, match=f"has no {token}"):
        text_model.build_tokenizer(str(tmp_path / "without"), 64, needs=("mask_token", "pad_token"))
