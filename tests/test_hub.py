"""Checkpoints ↔ Hub folders: what export writes, what verify sees, what import takes, and what all of them refuse."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import MIXERS, ROOT, assert_one_sentence, environment, run, snapshot
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from src import hub
from src.cli import UserError
from src.lion import LionForMaskedLM

PARITY = ROOT.parent / "shared" / "parity"
FILES = {
    "README.md", "proof.json", "config.json", "model.safetensors", "configuration_lion.py", "modeling_lion.py", "linear_attention.py",
    "linear_attention_triton.py", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt",
}  # fmt: skip
SENTENCE = "the old dog sees a [MASK] ."


@pytest.fixture(scope="module")
def exported(tmp_path_factory, write_checkpoint):
    """exported(mixer): a checkpoint and the folder made from it, once a mixer."""
    made = {}

    def export(mixer: str = "lion-s") -> tuple[Path, Path]:
        if mixer not in made:
            folder = tmp_path_factory.mktemp(mixer)
            checkpoint = write_checkpoint(folder / "checkpoint.pt", mixer)
            if mixer == "lion-s":  # by the command, with relative paths
                result = run("src/hub.py", "export", "--checkpoint", checkpoint.name, "--out", "my-model", cwd=folder)
                assert result.returncode == 0, result.stderr
                assert result.stdout.startswith("my-model gives the checkpoint's logits")
            else:
                hub.export(checkpoint, folder / "my-model")
            made[mixer] = checkpoint, folder / "my-model"
        return made[mixer]

    return export


@pytest.fixture
def spoilt(exported, tmp_path) -> tuple[Path, Path]:
    """A checkpoint and a copy of its folder, to be changed."""
    checkpoint, folder = exported()
    return checkpoint, Path(shutil.copytree(folder, tmp_path / "my-model"))


@pytest.mark.parametrize("mixer", MIXERS)
def test_export_writes_the_checkpoints_weights_config_code_and_tokenizer(exported, mixer):
    checkpoint, folder = exported(mixer)
    assert FILES <= {path.name for path in folder.iterdir()}
    config = json.loads((folder / "config.json").read_text())
    assert config["mixer"] == mixer
    assert config["model_type"] == "lion"
    assert config["architectures"] == ["LionForMaskedLM"]
    for name in config["auto_map"].values():
        module, attribute = name.split(".")
        assert f"class {attribute}(" in (folder / f"{module}.py").read_text()
    state = torch.load(checkpoint, weights_only=False)["state"]["model"]
    stored = load_file(folder / "model.safetensors")
    assert {f"model.{name}" for name in stored} == state.keys() - {"model.head.decoder.weight"}  # tied
    assert all(torch.equal(tensor, state[f"model.{name}"]) for name, tensor in stored.items())
    for code in folder.glob("*.py"):
        assert "from src" not in code.read_text()
    assert not folder.with_name("my-model-unfinished").exists()


def test_export_writes_a_card_with_the_checkpoints_facts(exported):
    card = (exported("lion-d")[1] / "README.md").read_text()
    for fact in (
        "mixer: lion-d",
        "1 layers, hidden size 32, 2 heads",
        "1,200 steps",
        "pipeline_tag: fill-mask",
        "# tiny",
    ):
        assert fact in card


def test_exported_tokenizer_is_the_checkpoints(exported, tokenizer):
    exported_tokenizer = AutoTokenizer.from_pretrained(exported()[1])
    assert exported_tokenizer(SENTENCE)["input_ids"] == tokenizer(SENTENCE)["input_ids"]
    assert exported_tokenizer.model_max_length == tokenizer.model_max_length


def test_exported_folder_knows_no_place_on_the_machine_that_made_it(exported, tokenizer_folder):
    checkpoint, folder = exported()
    for path in folder.iterdir():
        for place in (tokenizer_folder, checkpoint.parent, ROOT):
            assert str(place).encode() not in path.read_bytes(), path.name


FILL_MASK = """
import json, os, sys, transformers
fill = transformers.pipeline("fill-mask", model=sys.argv[1], trust_remote_code=True)
assert not any(name == "src" or name.startswith("src.") for name in sys.modules)
print(json.dumps(fill(sys.argv[2])))
"""


def test_fill_mask_pipeline_works_outside_the_repository(exported, tmp_path, tokenizer):
    checkpoint, folder = exported()
    done = subprocess.run(
        [sys.executable, "-c", FILL_MASK, str(folder), SENTENCE],
        cwd=tmp_path, env=environment(HF_MODULES_CACHE=str(tmp_path / "modules")), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    guesses = json.loads(done.stdout.splitlines()[-1])
    batch = tokenizer(SENTENCE, return_tensors="pt")
    with torch.no_grad():
        logits = hub.read_checkpoint(checkpoint).build()(**batch).logits
    expected = logits[batch["input_ids"] == tokenizer.mask_token_id][0].softmax(-1).topk(5)
    assert [guess["token"] for guess in guesses] == expected.indices.tolist()
    assert [guess["score"] for guess in guesses] == pytest.approx(expected.values.tolist(), abs=1e-5)


# verify


def test_verify_passes_for_the_folder_that_export_wrote(exported):
    checkpoint, folder = exported()
    assert hub.verify(hub.read_checkpoint(checkpoint), folder) <= hub.TOLERANCE


@pytest.mark.parametrize("name", ["lion.layers.0.attention.qkv.weight", "lion.embeddings.word_embeddings.weight", "head.decoder.bias"])  # fmt: skip
def test_verify_names_the_tensor_that_differs_and_no_other(spoilt, name):
    checkpoint, folder = spoilt
    weights = load_file(folder / "model.safetensors")
    weights[name].flatten()[-1] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"differs from \S+ in (head\.decoder\.weight, )?{re.escape(name)};"):
        hub.verify(hub.read_checkpoint(checkpoint), folder)


def test_verify_names_a_tensor_that_is_not_there(spoilt):
    checkpoint, folder = spoilt
    weights = load_file(folder / "model.safetensors")
    del weights["lion.layers.0.mlp_in.bias"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"in lion\.layers\.0\.mlp_in\.bias;"):
        hub.verify(hub.read_checkpoint(checkpoint), folder)


def test_verify_sees_other_logits_from_the_same_weights(spoilt):
    """Changed code or config does not show in the weights, only in what the folder computes."""
    checkpoint, folder = spoilt
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    with pytest.raises(UserError, match="logits that differ"):
        hub.verify(hub.read_checkpoint(checkpoint), folder)


def test_verify_sees_another_tokenizer(spoilt):
    checkpoint, folder = spoilt
    text = (folder / "tokenizer.json").read_text()
    assert '"##e"' in text
    (folder / "tokenizer.json").write_text(text.replace('"##e"', '"##é"'))
    with pytest.raises(UserError, match="tokenizes otherwise"):
        hub.verify(hub.read_checkpoint(checkpoint), folder)


def test_verify_of_a_cut_file_names_the_folder(spoilt):
    checkpoint, folder = spoilt
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=re.escape(str(folder))):
        hub.verify(hub.read_checkpoint(checkpoint), folder)


@pytest.mark.parametrize("missing", ["model.safetensors", "modeling_lion.py"])
def test_verify_of_an_incomplete_folder_names_the_file(spoilt, missing):
    checkpoint, folder = spoilt
    (folder / missing).unlink()
    with pytest.raises(UserError, match=missing.replace(".", r"\.")):
        hub.verify(hub.read_checkpoint(checkpoint), folder)


def test_a_model_of_few_positions_is_verified_too(write_checkpoint, tmp_path):
    """No sentence that verify compares may be longer than the model reads."""

    def edit(state):
        state["model"]["model.lion.embeddings.position_embeddings.weight"] = torch.randn(16, 32)
        integration = state["integrations"]["huggingface"]
        integration["model"]["config"]["content"]["max_position_embeddings"] = 16
        integration["tokenizer"]["tokenizer_config.json"]["content"]["model_max_length"] = 16

    hub.export(write_checkpoint(tmp_path / "c.pt", "softmax", edit), tmp_path / "my-model")
    assert (tmp_path / "my-model").is_dir()


# What export refuses, with nothing written


def test_an_existing_out_is_refused_and_left_alone(exported):
    checkpoint, folder = exported()
    files = snapshot(folder)
    with pytest.raises(UserError, match="already there"):
        hub.export(checkpoint, folder)
    assert snapshot(folder) == files


def test_a_dotted_name_is_refused(exported, tmp_path):
    with pytest.raises(UserError, match="dot in its name"):
        hub.export(exported()[0], tmp_path / "my-model-1.0")


def drop(name: str):
    return lambda state: state["model"].pop(f"model.{name}")


def add(name: str):
    return lambda state: state["model"].update({f"model.{name}": torch.zeros(2)})


def reshape(name: str):
    return lambda state: state["model"].update({f"model.{name}": torch.zeros(3, 3)})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop("lion.layers.0.attention.decay.weight"), r"misses lion\.layers\.0\.attention\.decay\.weight$"),
        (add("lion.layers.7.strange"), r"has no place for lion\.layers\.7\.strange$"),
        (reshape("lion.layers.0.mlp_in.weight"), r"has another shape of lion\.layers\.0\.mlp_in\.weight$"),
    ],
    ids=["missing", "left over", "shape"],
)
def test_tensors_that_do_not_fit_are_named(write_checkpoint, tmp_path, edit, message):
    checkpoint = write_checkpoint(tmp_path / "c.pt", edit=edit)
    with pytest.raises(UserError, match=message):
        hub.export(checkpoint, tmp_path / "my-model")
    assert not (tmp_path / "my-model").exists()


def cut(path: Path, checkpoint: Path) -> None:
    path.write_bytes(checkpoint.read_bytes()[: checkpoint.stat().st_size // 2])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (cut, "not a readable checkpoint"),
        (lambda path, _: path.write_bytes(b""), "not a readable checkpoint"),
        (lambda path, _: path.write_text("hello, this is a text"), "not a readable checkpoint"),
        (lambda path, _: torch.save({"weights": torch.zeros(2)}, path), "no Composer checkpoint"),
        (lambda path, _: torch.save({"state": {"model": {}}}, path), "no Composer checkpoint"),
        (lambda path, _: torch.save([torch.zeros(2)], path), "no Composer checkpoint"),
        (lambda path, _: path.mkdir(), "is not a file"),
        (lambda path, _: None, "is not a file"),
    ],
    ids=["cut", "empty", "text", "other dict", "no metadata", "list", "folder", "absent"],
)
def test_what_is_no_checkpoint_is_refused_by_its_path(exported, tmp_path, make, words):
    path = tmp_path / "given.pt"
    make(path, exported()[0])
    for read in (hub.read_checkpoint, lambda path: hub.import_published(path, tmp_path / "out", None)):
        with pytest.raises(UserError, match=f"{re.escape(str(path))}.*{words}"):
            read(path)
    assert not (tmp_path / "out").exists()


class Malicious:
    def __init__(self, victim: Path):
        self.victim = victim

    def __reduce__(self):
        return os.system, (f"touch {self.victim}",)


def test_a_checkpoint_that_wants_to_run_a_function_is_not_opened_and_the_function_named(tmp_path):
    path, victim = tmp_path / "evil.pt", tmp_path / "was-run"
    torch.save({"state": {"model": Malicious(victim)}}, path)
    result = run("src/hub.py", "export", "--checkpoint", path, "--out", tmp_path / "my-model")
    assert_one_sentence(result, str(path), "posix.system")
    assert not victim.exists()
    assert not (tmp_path / "my-model").exists()


@pytest.mark.parametrize("name", ["../escaped.json", "/tmp/escaped.json"])
def test_a_tokenizer_file_outside_the_folder_is_refused(write_checkpoint, tmp_path, name):
    def edit(state):
        state["integrations"]["huggingface"]["tokenizer"][name] = {"file_extension": ".json", "content": {}}

    with pytest.raises(UserError, match="outside its folder"):
        hub.export(write_checkpoint(tmp_path / "c.pt", edit=edit), tmp_path / "my-model")
    assert not (tmp_path / "my-model").exists()
    assert not (tmp_path / "escaped.json").exists()


def test_another_model_class_is_refused_by_name(write_checkpoint, tmp_path):
    def edit(state):
        state["integrations"]["huggingface"]["model"]["config"]["class"] = "transformers.BertForMaskedLM"

    with pytest.raises(UserError, match="BertForMaskedLM"):
        hub.read_checkpoint(write_checkpoint(tmp_path / "c.pt", edit=edit))


# The published checkpoints


@pytest.mark.skipif(
    not (PARITY / "legacy-nova.pt").is_file(), reason="no published checkpoint lies beside the repository"
)
def test_import_gives_the_published_outputs(tmp_path, tokenizer_folder):
    out = tmp_path / "my-model"
    hub.import_published(PARITY / "legacy-nova.pt", out, str(tokenizer_folder))
    tensors = load_file(PARITY / "legacy-nova.safetensors")
    inputs = {name[3:]: tensor for name, tensor in tensors.items() if name.startswith("in.")}
    model, loaded = LionForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert not any(loaded[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    with torch.no_grad():
        output = model.eval()(**inputs, output_hidden_states=True)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(output.logits[real], tensors["out.mlm_logits"][real], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.hidden_states[-1][real], tensors["out.hidden"][real], atol=1e-5, rtol=1e-5)
    assert json.loads((out / "config.json").read_text())["mixer"] == "lion-d"
    assert len(AutoTokenizer.from_pretrained(out)) == len(AutoTokenizer.from_pretrained(tokenizer_folder))


@pytest.mark.skipif(
    not (PARITY / "legacy-nova.pt").is_file(), reason="no published checkpoint lies beside the repository"
)
def test_export_of_a_published_checkpoint_points_to_import(tmp_path):
    with pytest.raises(UserError, match=r"hub\.py import"):
        hub.export(PARITY / "legacy-nova.pt", tmp_path / "my-model")


# read_encoder: where fine-tuning starts


@pytest.mark.parametrize("of", [0, 1], ids=["checkpoint", "folder"])
def test_an_encoder_is_read_whole_from_a_checkpoint_and_from_its_folder(exported, tokenizer, of):
    checkpoint, folder = exported()
    config, weights, read_tokenizer = hub.read_encoder((checkpoint, folder)[of])
    state = torch.load(checkpoint, weights_only=False)["state"]["model"]
    expected = {name.removeprefix("model.lion."): t for name, t in state.items() if name.startswith("model.lion.")}
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert config["hidden_size"] == 32
    assert read_tokenizer(SENTENCE)["input_ids"] == tokenizer(SENTENCE)["input_ids"]


@pytest.mark.parametrize("spoil", ["config.json", "model.safetensors", "model_type", "cut"])
def test_a_folder_that_is_not_ours_is_refused_by_name(spoilt, spoil):
    folder = spoilt[1]
    if spoil == "model_type":
        (folder / "config.json").write_text('{"model_type": "bert"}')
    elif spoil == "cut":
        (folder / "model.safetensors").write_bytes(b"\0" * 20)
    else:
        (folder / spoil).unlink()
    with pytest.raises(UserError, match=f"{re.escape(str(folder))}.*({'bert' if spoil == 'model_type' else 'cannot be read' if spoil == 'cut' else spoil})"):  # fmt: skip
        hub.read_encoder(folder)
