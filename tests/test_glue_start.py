"""What fine-tuning starts from: the complete encoder, from any kind of file or folder."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from conftest import PARITY, ROOT, TINY_MODEL, VOCABULARY, needs_reference
from glue_files import write_yaml
from safetensors.torch import load_file, save_file

from src.checkpoints.reading import read_checkpoint
from src.config import load
from src.errors import UserError
from src.glue.experiment import FinetuneConfig
from src.glue.finetune import build_model, read_start
from src.glue.tasks import GLUE
from src.publish import folder as hub_folder

LEGACY = PARITY / "legacy-nova.pt"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, write_checkpoint) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("pretrained") / "checkpoint.pt")


@pytest.fixture
def config(tmp_path, checkpoint):
    """config(key=value, ...): the checked config of a run from the tiny checkpoint."""

    def make(*overrides: object) -> FinetuneConfig:
        path = write_yaml(tmp_path / "f.yaml", starting_checkpoint_load_path=str(checkpoint))
        return load(FinetuneConfig, "glue.py", [str(path), *map(str, overrides)])

    return make


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory, tokenizer_folder) -> Path:
    """A Hugging Face BERT with random weights, as save_pretrained writes it."""
    from transformers import BertConfig, BertForMaskedLM

    folder = tmp_path_factory.mktemp("bert") / "bert"
    torch.manual_seed(3)
    sizes = {key: value for key, value in TINY_MODEL.items() if key != "mixer"}
    BertForMaskedLM(BertConfig(vocab_size=len(VOCABULARY), initializer_range=0.3, **sizes)).save_pretrained(folder)
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    return folder


@pytest.mark.parametrize("name", ["rte", "stsb", "mnli"])
def test_every_tensor_of_the_encoder_is_loaded(config, checkpoint, name):
    model = build_model(read_start(config()), GLUE[name])
    state = torch.load(checkpoint, weights_only=False)["state"]["model"]
    own = model.lion.state_dict()
    fresh = {name for name in own if f"model.lion.{name}" not in state}
    assert fresh == {"pooler.weight", "pooler.bias"}
    assert all(torch.equal(own[name], state[f"model.lion.{name}"]) for name in own.keys() - fresh)
    assert model.classifier.out_features == GLUE[name].num_labels
    if GLUE[name].labels:
        assert tuple(model.config.id2label.values()) == GLUE[name].labels


def test_the_horizons_of_a_start_are_widened_but_not_those_of_a_model_trained_with_them(config):
    start = read_start(config("model.decay_horizon=[8,512]"))
    encoder = build_model(start, GLUE["rte"]).lion
    widened = {name for name, tensor in start.weights.items() if not torch.equal(encoder.state_dict()[name], tensor)}
    assert widened == {"layers.0.attention.decay.bias"}
    start.stored = encoder.config
    own = build_model(start, GLUE["rte"]).lion.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in start.weights.items())


def test_from_scratch_takes_the_sizes_and_no_weights(config, checkpoint):
    start = read_start(config("from_scratch=true"))
    assert start.weights is None
    assert start.config["hidden_size"] == TINY_MODEL["hidden_size"]
    own = build_model(start, GLUE["rte"]).lion.state_dict()
    state = torch.load(checkpoint, weights_only=False)["state"]["model"]
    assert not torch.equal(own["layers.0.mlp_in.weight"], state["model.lion.layers.0.mlp_in.weight"])
    assert (
        read_start(config("from_scratch=true"), str(checkpoint)).weights is not None
    )  # of MNLI's job, tuned from scratch


def test_a_tokenizer_other_than_the_checkpoints_is_refused(config, tokenizer_folder, tmp_path):
    other = shutil.copytree(tokenizer_folder, tmp_path / "other")
    (other / "tokenizer.json").unlink()
    words = list(VOCABULARY)
    words[-2:] = reversed(words[-2:])  # of the same size, but two ids are others
    (other / "vocab.txt").write_text("\n".join(words) + "\n")
    with pytest.raises(UserError, match=r"tokenizer_name=\S+other is not the tokenizer of \S+checkpoint\.pt; omit it"):  # fmt: skip
        read_start(config(f"tokenizer_name={other}"))
    assert read_start(config(f"tokenizer_name={tokenizer_folder}")).digest() == read_start(config()).digest()
    assert read_start(config(f"tokenizer_name={other}", "from_scratch=true")).weights is None  # which know no ids


def test_without_a_checkpoint_sizes_come_from_the_config(config, tokenizer_folder):
    start = read_start(
        config("starting_checkpoint_load_path=null", f"tokenizer_name={tokenizer_folder}", "model.num_hidden_layers=3")
    )
    assert (start.weights, start.config["num_hidden_layers"], start.name) == (None, 3, "random weights")


@torch.no_grad()
def same_hidden_states(start, bert, batch) -> None:
    ours = build_model(start, GLUE["rte"]).lion.eval()(**batch)
    theirs = bert.eval()(**batch)
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(ours.last_hidden_state[real], theirs.last_hidden_state[real], atol=1e-5, rtol=1e-4)
    if theirs.pooler_output is not None:
        torch.testing.assert_close(ours.pooler_output, theirs.pooler_output, atol=1e-5, rtol=1e-4)


def test_a_hugging_face_bert_gives_the_same_outputs(config, bert_folder, tmp_path):
    from transformers import BertModel

    start = read_start(config(f"starting_checkpoint_load_path={bert_folder}"))
    assert start.config["mixer"] == "softmax"
    batch = start.tokenizer(["the dog sees a cat", "no"], ["a king", "but"], padding=True, return_tensors="pt")
    same_hidden_states(start, BertModel.from_pretrained(bert_folder, add_pooling_layer=False), batch)
    torch.manual_seed(4)  # one with a pooler, which is then taken too
    with_pooler = BertModel(BertModel.from_pretrained(bert_folder).config)
    with_pooler.save_pretrained(tmp_path / "pooled")
    shutil.copy(bert_folder / "vocab.txt", tmp_path / "pooled")
    start = read_start(config(f"starting_checkpoint_load_path={tmp_path / 'pooled'}"))
    same_hidden_states(start, with_pooler, batch)


def test_a_bert_that_lacks_a_tensor_is_refused(config, bert_folder, tmp_path):
    folder = shutil.copytree(bert_folder, tmp_path / "bert")
    weights = load_file(folder / "model.safetensors")
    del weights["bert.encoder.layer.0.output.dense.bias"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks weights of BERT: bert\.encoder\.layer\.0\.output\.dense\.bias"):
        read_start(config(f"starting_checkpoint_load_path={folder}"))


def test_a_bert_with_relative_positions_is_refused(config, bert_folder, tmp_path):
    folder = shutil.copytree(bert_folder, tmp_path / "bert")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "position_embedding_type": "relative_key"}))
    with pytest.raises(UserError, match="not a plain BERT"):
        read_start(config(f"starting_checkpoint_load_path={folder}"))


@needs_reference
def test_a_run_starts_from_a_checkpoint_of_the_papers_authors(config, tokenizer_folder, tmp_path):
    content = torch.load(LEGACY, weights_only=False)["state"]
    state = content["model"]
    vocabulary = content["integrations"]["huggingface"]["model"]["config"]["content"]["vocab_size"]
    small = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_folder, small)
    (small / "vocab.txt").write_text("\n".join(VOCABULARY[: min(vocabulary, len(VOCABULARY))]) + "\n")
    (small / "tokenizer.json").unlink()
    (tmp_path / "repository").mkdir()
    shutil.copy(LEGACY, tmp_path / "repository" / "latest.pt")  # as a Hub repository holds it, and by itself
    for path in (LEGACY, tmp_path / "repository"):
        start = read_start(config(f"starting_checkpoint_load_path={path}", f"tokenizer_name={small}", "max_seq_len=16"))
        assert start.config["mixer"] == "lion-d"
        own = build_model(start, GLUE["rte"]).lion.state_dict()
        name = next(name for name in state if name.endswith("encoder.layer.0.output.dense.weight"))
        assert torch.equal(own["layers.0.mlp_out.weight"], state[name])


def test_a_run_starts_from_a_hub_folder_by_path_or_by_name(config, checkpoint, tmp_path, monkeypatch):
    hub_folder.write(read_checkpoint(checkpoint), tmp_path / "mine")
    expected = read_start(config()).digest()
    start = read_start(config(f"starting_checkpoint_load_path={tmp_path / 'mine'}"))
    assert (start.digest(), start.name) == (expected, str(tmp_path / "mine"))
    repositories = {"org/mine": str(tmp_path / "mine")}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: repositories[name])
    assert read_start(config("starting_checkpoint_load_path=org/mine")).digest() == expected


def test_the_digest_distinguishes_weights(config, write_checkpoint, tmp_path):
    def add_one(state: dict) -> None:
        state["model"]["model.lion.layers.0.mlp_in.bias"] += 1

    changed = write_checkpoint(tmp_path / "changed.pt", edit=add_one)
    assert read_start(config(f"starting_checkpoint_load_path={changed}")).digest() != read_start(config()).digest()


@pytest.mark.parametrize(
    ("override", "names"),
    [
        (
            "model.num_hidden_layers=2",
            ["needs layers.1.attention", "more; model.num_hidden_layers=2, where the", "omit"],
        ),
        ("model.mixer=lion-d", ["needs layers.0.attention.decay", "has no layers.0.attention.decay.bias"]),
        ("model.intermediate_size=32", ["another shape for layers.0.mlp_in.bias"]),
    ],
)
def test_weights_that_do_not_fit_the_model_are_refused_by_name(config, override, names):
    with pytest.raises(UserError) as error:
        build_model(read_start(config(override)), GLUE["rte"])
    for name in names:
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("nowhere.pt", r"nowhere\.pt is not a file or folder"),
        ("./nowhere", r"nowhere is not a file or folder"),
        ("org/nowhere", "org/nowhere is not a file or folder, and cannot be downloaded from the Hugging Face Hub"),
        (str(ROOT / "README.md"), "not a readable checkpoint"),
        (str(ROOT / "tests"), "holds no config.json"),
    ],
)
def test_a_missing_or_unusable_start_is_named(config, start, words):
    with pytest.raises(UserError, match=words):
        read_start(config(f"starting_checkpoint_load_path={start}"))
