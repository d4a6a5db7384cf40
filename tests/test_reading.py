"""Reading checkpoints: all of a valid one, one sentence about an invalid one, and no code run from either."""

import collections
import json
import os
import pickle
import re
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from conftest import assert_one_sentence, run

from src.checkpoints.reading import load_all, read_checkpoint
from src.checkpoints.safe_load import load_safely
from src.errors import UserError
from src.lion import LionForImageClassification, LionVisionConfig
from src.lra.model import SequenceClassifier
from src.publish import folder as hub_folder


def drop(name: str):
    return lambda state: state["model"].pop(f"model.{name}")


def put(name: str, tensor: torch.Tensor):
    return lambda state: state["model"].update({f"model.{name}": tensor})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop("lion.layers.0.attention.decay.weight"), r"needs lion\.layers\.0\.attention\.decay\.weight$"),
        (put("lion.layers.7.strange", torch.zeros(2)), r"has no lion\.layers\.7\.strange$"),
        (put("lion.layers.0.mlp_in.weight", torch.zeros(3, 3)), r"another shape for lion\.layers\.0\.mlp_in\.weight$"),
        (put("head.dense.bias", torch.full((32,), torch.nan)), r"NaN or infinite numbers in head\.dense\.bias;"),
        (put("head.decoder.weight", torch.zeros(104, 32)), r"shares .*word_embeddings\.weight with another tensor"),
    ],
    ids=["missing", "left over", "shape", "NaN", "untied"],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(write_checkpoint, tmp_path, edit, message):
    read = read_checkpoint(write_checkpoint(tmp_path / "c.pt", edit=edit))
    with pytest.raises(UserError, match=message):
        read.build()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32, "drop_path_rate": 0.1}, r"classifier.weight, .*projection.weight and \d+ more; "
         r"model\.hidden_size=32, where the checkpoint has 16: omit it$"),
        ({"patch_size": 4}, r"patch_size=4, where the checkpoint has 8: omit it$"),
        ({"mixer": "lion-s"}, r"model\.mixer=lion-s, where the checkpoint has softmax: the own parameters of lion-s are not "
         r"in the checkpoint; omit it, or start from one of lion-s, or use lion-lit, which needs none$"),
        ({"distillation_token": True}, r"needs lion\.embeddings\.distillation_token; .*model\.distillation_token=true, .*: "
         r"the token is not in the checkpoint; omit it, or start from a distilled one$"),
        ({"layer_scale_init": 0.1}, r"model\.layer_scale_init=0\.1, where the checkpoint has null: omit it$"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_keys_that_change_which_weights_there_are_are_named(changes, message, caplog):
    settings = {
        "image_size": 16, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "mixer": "softmax", "position_embedding": "learned", "distillation_classifier": False,
        "intermediate_size": 64,
    }  # fmt: skip
    stored = LionVisionConfig(**settings)
    weights = LionForImageClassification(stored).state_dict()
    with pytest.raises(UserError) as error:
        load_all(LionForImageClassification(LionVisionConfig(**settings | changes)), weights, "it.pt", stored)
    assert re.search(message, str(error.value)) and str(error.value).count("lion.") < 11
    with caplog.at_level("WARNING", logger="lion"):
        lit = LionForImageClassification(LionVisionConfig(**settings | {"mixer": "lion-lit"}))
        load_all(lit, weights, "it.pt", stored)
    assert not caplog.text  # of its feature map and its row sums, which nobody chose


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"hidden_size": 33}, "hidden_size=33"),
        ({"mixer": "lion-x"}, "lion-x"),
        ({"hidden_act": "gulu"}, "gulu"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be an integer ≥ 1"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps='small' must be a number ≥ 0"),
        ({"type_vocab_size": 2.5}, "type_vocab_size=2.5 must be an integer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_invalid_config_is_reported(write_checkpoint, tmp_path, setting, message):
    def edit(state):
        state["integrations"]["huggingface"]["model"]["config"]["content"].update(setting)

    path = write_checkpoint(tmp_path / "c.pt", edit=edit)
    with pytest.raises(UserError, match=rf"the config of {re.escape(str(path))} is not valid.*{message}"):
        read_checkpoint(path).build()


def test_only_model_settings_are_taken_from_a_config(write_checkpoint, tmp_path):
    """Keys that would have transformers load code of the checkpoint's choice among them."""

    def edit(state):
        state["integrations"]["huggingface"]["model"]["config"]["content"] |= {
            "custom_pipelines": {"fill-mask": {"impl": "someone/repo--evil.Pipeline"}},
            "auto_map": {"AutoModel": "someone/repo--evil.Model"},
            "id2label": {0: "bad", 1: "good", 2: "ugly"},
        }

    read = read_checkpoint(write_checkpoint(tmp_path / "c.pt", edit=edit))
    assert read.config.id2label == {0: "bad", 1: "good", 2: "ugly"}
    hub_folder.write(read, tmp_path / "my-model")
    assert "someone" not in (tmp_path / "my-model" / "config.json").read_text()


def test_weights_that_are_not_dense_tensors_are_named(write_checkpoint, tmp_path):
    def edit(state):
        state["model"] |= {"model.list": [1, 2], "model.sparse": torch.zeros(2).to_sparse()}

    with pytest.raises(UserError, match="holds list, sparse, which"):
        read_checkpoint(write_checkpoint(tmp_path / "c.pt", edit=edit))


# The tokenizer in a checkpoint


def tokenizer_of(state: dict) -> dict:
    return state["integrations"]["huggingface"]["tokenizer"]


@pytest.mark.parametrize(
    "name",
    ["modeling_lion.py", "evil.py", "config.json", "adapter_config.json", "modules.json", "../vocab.txt",
     "/tmp/vocab.txt"],
)  # fmt: skip
def test_a_file_that_does_not_belong_to_a_tokenizer_is_refused_by_name(write_checkpoint, tmp_path, name):
    def edit(state):
        tokenizer_of(state)[name] = {"file_extension": Path(name).suffix, "content": {"a": 1}}

    read = read_checkpoint(write_checkpoint(tmp_path / "c.pt", edit=edit))
    with pytest.raises(UserError, match=f" a file {re.escape(name)}, "):
        hub_folder.write(read, tmp_path / "my-model")
    with pytest.raises(UserError, match=f" a file {re.escape(name)}, "):
        read.load_tokenizer()
    assert not (tmp_path / "my-model").exists()


@pytest.mark.parametrize("suffix", [".json", "", "on"])
def test_a_tokenizer_that_names_code_is_refused(write_checkpoint, tmp_path, suffix):
    def edit(state):
        file = tokenizer_of(state)["tokenizer_config.json"]
        file["content"]["auto_map"] = {"AutoTokenizer": [None, "evil.Tokenizer"]}
        file["file_extension"] = suffix

    with pytest.raises(UserError, match=r"auto_map in tokenizer_config\.json"):
        read_checkpoint(write_checkpoint(tmp_path / "c.pt", edit=edit)).load_tokenizer()


def test_files_named_by_stem_by_old_composer_are_read_and_may_hold_bytes(write_checkpoint, tmp_path):
    def edit(state):
        files = tokenizer_of(state)
        state["integrations"]["huggingface"]["tokenizer"] = {
            **{name.removesuffix(file["file_extension"]): file for name, file in files.items()},
            "vocab": {"file_extension": ".txt", "content": ["one", "two"]},
            "spiece": {"file_extension": ".model", "content": b"\x0a\xff"},
        }

    read = read_checkpoint(write_checkpoint(tmp_path / "c.pt", edit=edit))
    files = read.tokenizer_files()
    assert files.keys() >= {"tokenizer.json", "tokenizer_config.json", "vocab.txt", "spiece.model"}
    assert (files["vocab.txt"], files["spiece.model"]) == (b"one\ntwo", b"\x0a\xff")
    hub_folder.write(read, tmp_path / "my-model")
    assert "BertTokenizer" in json.loads((tmp_path / "my-model" / "config.json").read_text())["tokenizer_class"]
    assert read.load_tokenizer()("a")["input_ids"]


@pytest.mark.parametrize("broken", [{"file_extension": ".json", "content": {}}, "text", {"content": None}])
def test_a_tokenizer_that_cannot_be_loaded_is_reported_with_a_fix(write_checkpoint, tmp_path, broken):
    path = write_checkpoint(
        tmp_path / "c.pt", edit=lambda state: tokenizer_of(state).update({"tokenizer.json": broken})
    )
    with pytest.raises(UserError, match=rf"the tokenizer of {re.escape(str(path))} .*name another"):
        read_checkpoint(path).load_tokenizer()


# Corrupt, foreign and dangerous files


def truncate(path: Path, checkpoint: Path) -> None:
    path.write_bytes(checkpoint.read_bytes()[: checkpoint.stat().st_size // 2])


def flip_a_bit(path: Path, checkpoint: Path) -> None:
    """Change one number of one tensor, as a bad disk would."""
    data = bytearray(checkpoint.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (truncate, "not a readable checkpoint"),
        (lambda path, _: path.write_bytes(b""), "not a readable checkpoint"),
        (lambda path, _: path.write_text("hello, this is a text"), "not a readable checkpoint"),
        (lambda path, _: path.write_text("cat and\ndog\n"), "not a readable checkpoint"),  # c is an import to a pickle
        (flip_a_bit, "not a readable checkpoint"),
        (lambda path, _: torch.save({"weights": torch.zeros(2)}, path), "not a Composer checkpoint"),
        (lambda path, _: torch.save({"state": {"model": {}}}, path), "not a Composer checkpoint"),
        (lambda path, _: torch.save([torch.zeros(2)], path), "not a Composer checkpoint"),
        (lambda path, _: torch.save({"state": torch.zeros(2).untyped_storage()}, path), "not a Composer checkpoint"),
        (lambda path, _: path.mkdir(), "is not a file"),
        (lambda path, _: None, "is not a file"),
        (lambda path, _: path.symlink_to("gone.pt"), r"points at .*gone\.pt, which is gone; give another"),
        (lambda path, _: path.write_text("gone.pt"), r"points at .*gone\.pt, which is gone; give another"),
    ],
    ids=[
        "truncated",
        "empty",
        "text",
        "another text",
        "flipped",
        "other dict",
        "no metadata",
        "list",
        "numbers",
        "folder",
        "absent",
        "dangling link",
        "dangling name",
    ],
)
def test_a_file_that_is_not_a_checkpoint_is_refused_by_its_path(checkpoint, tmp_path, make, words):
    path = tmp_path / "given.pt"
    make(path, checkpoint)
    with pytest.raises(UserError, match=f"{re.escape(str(path))}.*{words}"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("transformers.BertForMaskedLM", "holds a BertForMaskedLM"),
        (f"{SequenceClassifier.__module__}.{SequenceClassifier.__qualname__}", "a model of lra.py, which has no Hub format"),
    ],
)  # fmt: skip
def test_another_model_class_is_refused_by_name(write_checkpoint, tmp_path, name, words):
    def edit(state):
        state["integrations"]["huggingface"]["model"]["config"]["class"] = name

    with pytest.raises(UserError, match=words):
        read_checkpoint(write_checkpoint(tmp_path / "c.pt", edit=edit))


class Malicious:
    def __init__(self, victim: Path):
        self.victim = victim

    def __reduce__(self):
        return os.system, (f"touch {self.victim}",)


def test_a_checkpoint_that_would_execute_a_function_is_not_opened(tmp_path):
    path, victim = tmp_path / "evil.pt", tmp_path / "was-run"
    torch.save({"state": {"model": Malicious(victim)}}, path)
    assert_one_sentence(
        run("src/hub.py", "import", "--checkpoint", path, "--out", tmp_path / "my-model"), str(path), "posix.system"
    )
    with pytest.raises(UserError, match=r"posix\.system"):
        read_checkpoint(path)
    assert not victim.exists()
    assert not (tmp_path / "my-model").exists()


@pytest.mark.parametrize("protocol", [0, 2, 3, 4, 5])
@pytest.mark.parametrize("write", ["pickle", "zip", "no zip"])
def test_the_function_is_named_in_every_protocol(tmp_path, protocol, write):
    path, victim = tmp_path / "evil.pt", tmp_path / "was-run"
    content = {"state": {"model": {"weight": 0}, "evil": [collections.Counter("text"), Malicious(victim)]}}
    if write == "pickle":
        path.write_bytes(pickle.dumps(content, protocol))
    else:
        torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=write == "zip")
    with pytest.raises(UserError, match=r"would execute posix\.system when"):
        read_checkpoint(path)
    assert not victim.exists()


def test_the_function_is_named_in_protocol_0(tmp_path):
    (tmp_path / "evil.pt").write_bytes(b"(S'exit 1'\nios\nsystem\n.")
    with pytest.raises(UserError, match=r"would execute os\.system when"):
        read_checkpoint(tmp_path / "evil.pt")


def test_random_states_are_read_as_numpy_1_and_2_wrote_them(tmp_path):
    new, old = tmp_path / "new.pt", tmp_path / "old.pt"
    torch.save({"numpy": numpy.random.get_state(), "loss": numpy.float64(0.5)}, new)
    with zipfile.ZipFile(new) as source, zipfile.ZipFile(old, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, data.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    assert old.read_bytes() != new.read_bytes()
    for path in (new, old):
        state = load_safely(path)
        assert state["loss"] == 0.5
        assert (state["numpy"][1] == numpy.random.get_state()[1]).all()
