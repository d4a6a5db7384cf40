"""Reading checkpoints and folders: whole, or a sentence that names what is wrong; and never running what they hold."""

import os
import re
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from conftest import assert_one_sentence, run

from src import hub_folder
from src.checkpoints import load_safely, read_checkpoint
from src.cli import UserError

SENTENCE = "the old dog sees a [MASK] ."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, write_checkpoint) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "checkpoint.pt")


@pytest.fixture
def folder(checkpoint, tmp_path) -> Path:
    hub_folder.write(read_checkpoint(checkpoint), tmp_path / "my-model")
    return tmp_path / "my-model"


def drop(name: str):
    return lambda state: state["model"].pop(f"model.{name}")


def put(name: str, tensor: torch.Tensor):
    return lambda state: state["model"].update({f"model.{name}": tensor})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop("lion.layers.0.attention.decay.weight"), r"misses lion\.layers\.0\.attention\.decay\.weight$"),
        (put("lion.layers.7.strange", torch.zeros(2)), r"has no place for lion\.layers\.7\.strange$"),
        (put("lion.layers.0.mlp_in.weight", torch.zeros(3, 3)), r"has another shape of lion\.layers\.0\.mlp_in\.weight$"),
        (put("head.dense.bias", torch.full((32,), torch.nan)), r"NaN or infinite numbers in head\.dense\.bias;"),
        (put("head.decoder.weight", torch.zeros(104, 32)), r"shares .*word_embeddings\.weight with another tensor"),
    ],
    ids=["missing", "left over", "shape", "NaN", "untied"],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(write_checkpoint, tmp_path, edit, message):
    read = read_checkpoint(write_checkpoint(tmp_path / "c.pt", edit=edit))
    with pytest.raises(UserError, match=message):
        read.build()


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
def test_what_is_no_checkpoint_is_refused_by_its_path(checkpoint, tmp_path, make, words):
    path = tmp_path / "given.pt"
    make(path, checkpoint)
    with pytest.raises(UserError, match=f"{re.escape(str(path))}.*{words}"):
        read_checkpoint(path)


def test_another_model_class_is_refused_by_name(write_checkpoint, tmp_path):
    def edit(state):
        state["integrations"]["huggingface"]["model"]["config"]["class"] = "transformers.BertForMaskedLM"

    with pytest.raises(UserError, match="BertForMaskedLM"):
        read_checkpoint(write_checkpoint(tmp_path / "c.pt", edit=edit))


class Malicious:
    def __init__(self, victim: Path):
        self.victim = victim

    def __reduce__(self):
        return os.system, (f"touch {self.victim}",)


def test_a_checkpoint_that_wants_to_run_a_function_is_not_opened_and_the_function_named(tmp_path):
    path, victim = tmp_path / "evil.pt", tmp_path / "was-run"
    torch.save({"state": {"model": Malicious(victim)}}, path)
    assert_one_sentence(
        run("src/hub.py", "import", "--checkpoint", path, "--out", tmp_path / "my-model"), str(path), "posix.system"
    )
    with pytest.raises(UserError, match=r"posix\.system"):
        read_checkpoint(path)
    assert not victim.exists()
    assert not (tmp_path / "my-model").exists()


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
