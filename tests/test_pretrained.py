"""What training starts from: all weights under our names, from any kind of file or folder."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import TINY_MODEL, VOCABULARY, assert_one_sentence, run

from src.checkpoints.reading import Checkpoint, load_all, read_pretrained
from src.embed.encoder import embedding_model
from src.errors import UserError
from src.lion import LionConfig, LionModel

SENTENCE = "the old dog sees a [MASK] ."


@pytest.mark.parametrize("of", ["checkpoint", "folder"])
def test_an_encoder_is_read_completely_from_a_checkpoint_and_from_its_folder(checkpoint, folder, tokenizer, of):
    read = read_pretrained(str({"checkpoint": checkpoint, "folder": folder}[of]), "key")
    weights = read.encoder()
    state = torch.load(checkpoint, weights_only=False)["state"]["model"]
    expected = {name.removeprefix("model.lion."): t for name, t in state.items() if name.startswith("model.lion.")}
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert read.config.hidden_size == 32
    own = read.load_tokenizer()
    assert own(SENTENCE)["input_ids"] == tokenizer(SENTENCE)["input_ids"]
    assert read.config.max_position_embeddings == 128  # the folder says "no limit" to other programs
    assert own.model_max_length == (tokenizer.model_max_length if of == "checkpoint" else int(1e30))


@pytest.mark.parametrize("of", ["checkpoint", "folder"])
def test_an_unloadable_tokenizer_fails_only_when_it_is_needed(folder, tmp_path, write_checkpoint, of):
    def edit(state):
        state["integrations"]["huggingface"]["tokenizer"]["tokenizer.json"]["content"] = {}

    (folder / "tokenizer.json").write_text("{}")
    path = folder if of == "folder" else write_checkpoint(tmp_path / "c.pt", edit=edit)
    read = read_pretrained(str(path), "key")
    assert read.encoder()
    with pytest.raises(UserError, match=rf"the tokenizer of {re.escape(str(path))} cannot be loaded"):
        read.load_tokenizer()


def test_a_folders_tokenizer_runs_no_code(folder, tmp_path):
    """Nor does it ask whether it may."""
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')\nclass Tokenizer: pass")
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.Tokenizer", null]}}')
    with pytest.raises(UserError, match="cannot be loaded"):
        read_pretrained(str(folder), "key").load_tokenizer()
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("fault", ["config.json", "model.safetensors", "model_type", "list", "truncated"])
def test_a_folder_of_another_model_is_refused_by_name(folder, tmp_path, fault):
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    if fault == "model_type":
        (broken / "config.json").write_text('{"model_type": "gpt2"}')
    elif fault == "list":
        (broken / "config.json").write_text("[]")
    elif fault == "truncated":
        (broken / "model.safetensors").write_bytes(b"\0" * 20)
    else:
        (broken / fault).unlink()
    words = {"model_type": "gpt2", "list": "cannot be read", "truncated": "cannot be read"}.get(fault, fault)
    with pytest.raises(UserError, match=f"{re.escape(str(broken))}.*{words}"):
        read_pretrained(str(broken), "key")


def test_pretraining_starts_from_a_hub_folder(folder, tmp_path, write_config):
    config = write_config(tmp_path, model={"pretrained_checkpoint": str(folder)}, max_duration="1ba", loggers={})
    frozen = ["optimizer.lr=0", "optimizer.weight_decay=0"]
    result = run("main.py", config, *frozen)
    assert result.returncode == 0, result.stderr
    assert f"weights of {folder}" in result.stderr
    trained = torch.load(tmp_path / "run" / "latest-rank0.pt", weights_only=False)["state"]["model"]
    expected = read_pretrained(str(folder), "key").weights
    assert all(torch.equal(trained[f"model.{name}"], tensor) for name, tensor in expected.items())

    shutil.rmtree(folder)
    prolonged = run("main.py", config, *frozen, "max_duration=2ba")
    assert prolonged.returncode == 0, prolonged.stderr
    assert "resuming from step 1" in prolonged.stderr


def test_pretraining_starts_from_a_hugging_face_bert_with_a_new_head(tmp_path, write_config, tokenizer_folder):
    from transformers import BertConfig, BertModel

    sizes = {key: value for key, value in TINY_MODEL.items() if key != "mixer"}
    bert = BertModel(BertConfig(vocab_size=-(-len(VOCABULARY) // 8) * 8, **sizes), add_pooling_layer=False)
    bert.save_pretrained(tmp_path / "bert")
    shutil.copytree(tokenizer_folder, tmp_path / "bert", dirs_exist_ok=True)
    start = {"pretrained_checkpoint": str(tmp_path / "bert")}
    config = write_config(tmp_path, model=start, max_duration="1ba", loggers={})
    result = run("main.py", config, "optimizer.lr=0", "optimizer.weight_decay=0")
    assert result.returncode == 0, result.stderr
    assert "with a new head" in result.stderr
    trained = torch.load(tmp_path / "run" / "latest-rank0.pt", weights_only=False)["state"]["model"]
    assert torch.equal(trained["model.lion.embeddings.word_embeddings.weight"], bert.embeddings.word_embeddings.weight)
    assert torch.equal(trained["model.head.decoder.weight"], bert.embeddings.word_embeddings.weight)
    assert torch.equal(trained["model.lion.layers.0.mlp_in.weight"], bert.encoder.layer[0].intermediate.dense.weight)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.pretrained_checkpoint=nowhere/at/all"], ["model.pretrained_checkpoint", "nowhere/at/all"]),
        (["model.pretrained_chekpoint=x"], ["unknown key model.pretrained_chekpoint; did you mean pretrained_check"]),
        (["model.hidden_size=64"], ["do not fit", "another shape"]),
    ],
)
def test_a_start_that_does_not_fit_is_refused(folder, tmp_path, write_config, overrides, words):
    config = write_config(tmp_path, model={"pretrained_checkpoint": str(folder)}, loggers={})
    assert_one_sentence(run("main.py", config, *overrides), *words)
    assert not (tmp_path / "run").exists()


def test_weights_are_not_divided_among_other_heads_and_other_functions_are_reported(caplog):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 40, "mixer": "softmax"}
    stored = LionConfig(**sizes, num_attention_heads=4)
    weights = LionModel(stored).state_dict()
    with pytest.raises(UserError, match=r"other heads; model.num_attention_heads=8, where the checkpoint has 4: omit"):
        load_all(LionModel(LionConfig(**sizes, num_attention_heads=8)), weights, "it", stored)
    with caplog.at_level("WARNING", logger="lion"):
        load_all(LionModel(LionConfig(**sizes, num_attention_heads=4)), weights, "it", stored)
        assert not caplog.text
        load_all(LionModel(LionConfig(**sizes, num_attention_heads=4, hidden_act="relu")), weights, "it", stored)
    assert "model.hidden_act=relu, where the checkpoint has gelu: omit it, unless you mean it" in caplog.text


@pytest.mark.parametrize(
    ("own", "changes", "reported"),
    [
        ({}, {"long_reach": 100}, ["feature_map", "normalize_rows"]),
        ({}, {"feature_map": "silu"}, ["feature_map"]),
        ({"position_embedding": "rope"}, {"position_embedding": "none"}, ["position_embedding"]),
        ({"bias": False}, {"normalization": "rmsnorm"}, ["normalization"]),
    ],
)
def test_functions_that_differ_are_reported(own, changes, reported, caplog):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    stored = LionConfig(**sizes, **own, vocab_size=40)
    with caplog.at_level("WARNING", logger="lion"):
        changed = LionModel(LionConfig(**{**sizes, **own, **changes}, vocab_size=40))
        load_all(changed, LionModel(stored).state_dict(), "it", stored)
    assert re.findall(r"model\.(\w+)=", caplog.text) == reported
    assert ("long_reach" in caplog.text) == ("feature_map" in reported)


def test_weights_of_an_embedder_are_not_divided_among_other_heads():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 40, "mixer": "lion-lit"}
    stored = LionConfig(**sizes, num_attention_heads=4)
    weights = LionModel(stored).state_dict()
    read = Checkpoint(Path("it"), "LionModel", LionConfig(**sizes, num_attention_heads=8), weights)
    with pytest.raises(UserError, match=r"model.num_attention_heads=8, where the checkpoint has 4: omit it"):
        embedding_model(read, stored)


def test_positions_that_do_not_fit_name_the_ways_out():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 40, "mixer": "lion-lit"}
    stored = LionConfig(**sizes, num_attention_heads=4, max_position_embeddings=16)
    longer = LionConfig(**sizes, num_attention_heads=4, max_position_embeddings=32)
    with pytest.raises(UserError, match=r"omit it, and keep max_seq_len up to 16$"):
        load_all(LionModel(longer), LionModel(stored).state_dict(), "it", stored)
    with pytest.raises(UserError, match=r"model.max_position_embeddings=16, where the checkpoint has 32: omit it"):
        load_all(LionModel(stored), LionModel(longer).state_dict(), "it", longer)


def test_a_vocabulary_other_than_the_starts_is_refused(folder, tmp_path, write_config, tokenizer_folder):
    other = Path(shutil.copytree(tokenizer_folder, tmp_path / "other"))
    (other / "tokenizer.json").unlink()
    lines = (other / "vocab.txt").read_text().splitlines()
    (other / "vocab.txt").write_text("\n".join([*lines[:-2], lines[-1], lines[-2]]) + "\n")
    config = write_config(tmp_path, model={"pretrained_checkpoint": str(folder)}, tokenizer_name=str(other), loggers={})
    assert_one_sentence(run("main.py", config), "tokenizer_name", str(other), str(folder))
