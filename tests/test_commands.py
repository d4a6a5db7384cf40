"""The commands around Hub folders: export of our checkpoints, import of the authors', and what they refuse."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import PARITY, needs_reference, run, snapshot, tokens_of
from safetensors import safe_open
from safetensors.torch import load_file

from src import hub as hub_command
from src.errors import UserError
from src.files import LATEST, link
from src.lion import LionForMaskedLM, LionForSequenceClassification
from src.publish import commands as hub
from src.publish import folder as hub_folder
from src.publish.commands import check_proof

PUBLISHED = [*sorted(PARITY.glob("*.safetensors")), *PARITY.glob("hydra/hydra-mlm.safetensors")]
import_published = partial(hub.export, published=True)


def test_export_and_verify_accept_relative_paths(tmp_path, write_checkpoint, tokenizer, monkeypatch):
    write_checkpoint(tmp_path / "checkpoint.pt")
    link(tmp_path / LATEST, "checkpoint.pt")  # as in the folder of a run
    result = run("src/hub.py", "export", "--checkpoint", ".", "--out", "my-model", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("my-model gives the checkpoint's logits")
    assert result.stderr == ""
    assert tokens_of(tmp_path / "my-model") == tokenizer.get_vocab()
    monkeypatch.chdir(tmp_path)
    verify = ["verify", "--checkpoint", "checkpoint.pt", "--folder", "my-model"]
    hub_command.main(verify)
    Path("my-model", "config.json").write_text("{}")
    with pytest.raises(UserError, match="my-model"):
        hub_command.main(verify)


def test_a_model_with_few_positions_is_verified(write_checkpoint, tmp_path):
    """No sentence that verify compares may be longer than the model reads."""

    def edit(state):
        state["model"]["model.lion.embeddings.position_embeddings.weight"] = torch.randn(16, 32)
        integration = state["integrations"]["huggingface"]
        integration["model"]["config"]["content"]["max_position_embeddings"] = 16
        integration["tokenizer"]["tokenizer_config.json"]["content"]["model_max_length"] = 16

    hub.export(write_checkpoint(tmp_path / "c.pt", "softmax", edit), tmp_path / "my-model")
    assert (tmp_path / "my-model").is_dir()


# What export refuses, with nothing written


def test_an_existing_out_is_refused_and_left_unchanged(write_checkpoint, tmp_path):
    checkpoint, out = write_checkpoint(tmp_path / "c.pt"), tmp_path / "my-model"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    files = snapshot(tmp_path)
    with pytest.raises(UserError, match="already exists"):
        hub.export(checkpoint, out)
    assert snapshot(tmp_path) == files


def test_a_dotted_name_is_refused(tmp_path):
    with pytest.raises(UserError, match="dot in its name"):
        hub.export(tmp_path / "c.pt", tmp_path / "my-model-1.0")


def test_an_out_that_cannot_be_written_is_named(write_checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/my-model cannot be written \(Not a directory\)"):
        hub.export(write_checkpoint(tmp_path / "c.pt"), tmp_path / "file" / "my-model")


@pytest.mark.parametrize("name", ["../escaped.json", "/tmp/escaped.json", "modeling_lion.py"])
def test_a_tokenizer_with_code_or_a_file_outside_the_folder_is_refused(write_checkpoint, tmp_path, name):
    def edit(state):
        state["integrations"]["huggingface"]["tokenizer"][name] = {
            "file_extension": Path(name).suffix,
            "content": "1/0",
        }

    checkpoint = write_checkpoint(tmp_path / "c.pt", edit=edit)
    with pytest.raises(UserError, match=f"has a file {name}"):
        hub.export(checkpoint, tmp_path / "my-model")
    assert list(tmp_path.iterdir()) == [checkpoint]


# The published checkpoints


def write_published(path: Path, source: Path, kind: str) -> dict:
    """A small model in the authors' naming as one of their Composer checkpoints; returns its inputs and outputs."""
    with safe_open(source, "pt") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    names = [name for name in tensors if name.startswith("mlm.") and (kind == "mlm" or name.startswith("mlm.bert."))]
    model = {f"model.{name.removeprefix('mlm.')}": tensors[name] for name in names}
    if kind == "cls":
        model |= {f"model.{name[4:]}": tensor for name, tensor in tensors.items() if name.startswith("cls.")}
        config |= {"id2label": {0: "no", 1: "maybe", 2: "yes"}, "label2id": {"no": 0, "maybe": 1, "yes": 2}}
    integration = {"model": {"config": {"file_extension": ".json", "content": config, "class": "BertForMaskedLM"}}}
    torch.save({"state": {"model": model, "integrations": {"huggingface": integration}}, "rng": []}, path)
    return tensors


@needs_reference
@pytest.mark.parametrize("kind", ["mlm", "cls"])
@pytest.mark.parametrize("source", PUBLISHED, ids=lambda path: path.stem)
def test_importing_gives_the_published_outputs(tmp_path, monkeypatch, source, kind):
    if (source.stem, kind) not in (
        ("lion-s", "mlm"),
        ("bert", "cls"),
        ("hydra-mlm", "mlm"),
    ):  # a process of its own takes seconds
        monkeypatch.setattr(hub_folder, "verify", lambda *_: 0.0)
    tensors = write_published(tmp_path / "theirs.pt", source, kind)
    import_published(str(tmp_path / "theirs.pt"), tmp_path / "my-model")
    inputs = {name[3:]: tensor for name, tensor in tensors.items() if name.startswith("in.")}
    auto = LionForMaskedLM if kind == "mlm" else LionForSequenceClassification
    model, loaded = auto.from_pretrained(tmp_path / "my-model", output_loading_info=True)
    assert not any(loaded[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    with torch.no_grad():
        output = model.eval()(**inputs, output_hidden_states=True)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(output.hidden_states[-1][real], tensors["out.hidden"][real], atol=1e-5, rtol=1e-5)
    if kind == "mlm":
        torch.testing.assert_close(output.logits[real], tensors["out.mlm_logits"][real], atol=1e-5, rtol=1e-5)
    else:
        torch.testing.assert_close(output.logits, tensors["out.cls_logits"], atol=1e-5, rtol=1e-5)
        assert model.config.id2label == {0: "no", 1: "maybe", 2: "yes"}


@needs_reference
def test_importing_the_pickle_gives_its_published_outputs_with_proof_and_card(tmp_path, tokenizer_folder, caplog):
    caplog.set_level("INFO")
    checkpoint, out = PARITY / "legacy-nova.pt", tmp_path / "my-model"
    import_published(str(checkpoint), out, tokenizer=str(tokenizer_folder))
    tensors = load_file(PARITY / "legacy-nova.safetensors")
    inputs = {name[3:]: tensor for name, tensor in tensors.items() if name.startswith("in.")}
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        logits = LionForMaskedLM.from_pretrained(out).eval()(**inputs).logits
    torch.testing.assert_close(logits[real], tensors["out.mlm_logits"][real], atol=1e-5, rtol=1e-5)
    assert json.loads((out / "config.json").read_text())["mixer"] == "lion-d"
    assert tokens_of(out) == tokens_of(tokenizer_folder)
    check_proof(out)
    assert "Converted from the paper's authors' legacy-nova.pt" in (out / "README.md").read_text()
    hub.verify(str(checkpoint), out)  # which has no tokenizer to compare the folder's with
    assert f"the tokens of {out} are not compared" in caplog.text


@needs_reference
def test_export_and_import_point_to_each_other(tmp_path, write_checkpoint):
    with pytest.raises(UserError, match=r"hub\.py import"):
        hub.export(PARITY / "legacy-nova.pt", tmp_path / "my-model")
    with pytest.raises(UserError, match=r"hub\.py export"):
        import_published(str(write_checkpoint(tmp_path / "c.pt")), tmp_path / "my-model")
    assert not (tmp_path / "my-model").exists()


@needs_reference
def test_an_unsuitable_or_invalid_tokenizer_is_refused(tmp_path, tokenizer_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_tokens([f"word{number}" for number in range(100)])
    tokenizer.save_pretrained(tmp_path / "large")
    (tmp_path / "empty").mkdir()
    for name, words in (("large", "tokens, but the model's vocabulary is 120"), ("empty", "holds no tokenizer")):
        with pytest.raises(UserError, match=words):
            import_published(str(PARITY / "legacy-nova.pt"), tmp_path / "my-model", tokenizer=str(tmp_path / name))
    assert not (tmp_path / "my-model").exists()


@needs_reference
def test_a_published_checkpoint_with_an_unknown_tensor_or_variant_is_refused_by_name(tmp_path):
    def edited(edit) -> str:
        loaded = torch.load(PARITY / "legacy-nova.pt", weights_only=True)
        edit(loaded["state"])
        torch.save(loaded, tmp_path / "edited.pt")
        return str(tmp_path / "edited.pt")

    def strange(state):
        state["model"]["model.bert.strange"] = torch.zeros(1)

    def hydra(state):
        state["integrations"]["huggingface"]["model"]["config"]["content"]["arch_type"] = "hydra"

    def untied(state):
        state["model"]["model.cls.predictions.decoder.weight"] = torch.ones(120, 64)

    for edit, words in ((strange, r"bert\.strange"), (hydra, "'hydra'"), (untied, r"head\.decoder\.weight|word_emb")):
        with pytest.raises(UserError, match=words):
            import_published(edited(edit), tmp_path / "my-model")
    assert not (tmp_path / "my-model").exists()
