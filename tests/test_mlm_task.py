"""Masked-language-model pretraining as a task: its paths, and the model that it starts from."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import PARITY, ROOT, environment, needs_reference
from safetensors.torch import load_file

from src.errors import UserError
from src.mlm.task import CURVES, MaskedLM, PretrainConfig
from src.training.config import load_config


def task(*argv: object) -> MaskedLM:
    return MaskedLM(load_config(PretrainConfig, "main.py", "", [str(argument) for argument in argv]))


def test_the_names_of_a_runs_metrics_are_stable():
    """Programs that read metrics.jsonl and summary.json know these names."""
    assert {curve.name: (curve.eval_key, curve.train_key) for curve in CURVES} == {
        "loss": ("eval/LanguageCrossEntropy", "loss/train/total"),
        "accuracy": ("eval/MaskedAccuracy", "metrics/train/MaskedAccuracy"),
        "most_frequent_token": ("eval/MostFrequentTokenAccuracy", None),
    }


# Paths

UNUSABLE = {
    "load_path=nowhere.pt": "load_path=nowhere.pt is not a file; give a checkpoint or omit load_path",
    "data_local=no/such/shards": "data_local: no/such/shards does not exist; ",
    "tokenizer_name=./no/tokenizer": "tokenizer_name: ./no/tokenizer does not exist; ",
    "save_folder={file}/run": "save_folder: {file} is not a directory; choose another folder",
    "eval_loader.dataset.split=tset": "/tset holds no shards (its splits are train, val)",
    "seed=-1": "seed=-1 must be an integer ≥ 0",
    "max_duratoin=3ba": "unknown key max_duratoin; did you mean max_duration?",
}
REJECT = """
import json, sys
sys.path.insert(0, sys.argv.pop(1))
import main
from src.errors import UserError
messages = []
for override in sys.argv[2:]:
    try:
        main.main([sys.argv[1], override])
    except UserError as error:
        messages.append(str(error))
heavy = sys.modules.keys() & {"torch", "composer", "transformers", "streaming", "datasets", "matplotlib"}
print(json.dumps([messages, sorted(heavy)]))
"""


@pytest.mark.slow
def test_an_unusable_path_or_value_is_rejected_before_any_slow_import(config_file, tmp_path):
    (tmp_path / "file").touch()
    overrides = [override.format(file=tmp_path / "file") for override in UNUSABLE]
    command = [sys.executable, "-c", REJECT, ROOT, config_file, *overrides]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    messages, imported = json.loads(done.stdout)
    assert imported == []
    for message, expected in zip(messages, UNUSABLE.values(), strict=True):
        assert expected.format(file=tmp_path / "file") in message
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_does_not_need_the_checkpoint_it_started_from(config_file, tmp_path):
    run = task(config_file, "load_path=nowhere.pt")
    with pytest.raises(UserError, match=r"load_path=nowhere\.pt is not a file"):
        run.check_paths()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ep0-ba3-rank0.pt").touch()
    run.check_paths()


def test_shards_of_a_remote_or_of_streams_need_not_be_local(config_file, tmp_path):
    streams = "{web: {local: web, remote: s3://bucket/web}}"
    task(config_file, "data_local=cache", "data_remote=s3://bucket/shards").check_paths()
    loaders = (f"{loader}.dataset.streams={streams}" for loader in ("train_loader", "eval_loader"))
    task(config_file, "data_local=cache", *loaders).check_paths()


# Models


@pytest.mark.parametrize("loader", ["train_loader", "eval_loader"])
def test_the_longest_text_of_both_loaders_must_fit_the_position_embeddings(config_file, loader):
    run = task(config_file, "model.mixer=lion-lit", f"{loader}.dataset.max_seq_len=256")
    with pytest.raises(UserError, match=r"max_seq_len=256 exceeds model\.max_position_embeddings=128"):
        run.build_model(None)


def test_a_run_starts_from_the_weights_of_another_checkpoint(config_file, write_config, write_checkpoint, tmp_path):
    checkpoint = write_checkpoint(tmp_path / "start.pt")
    config = write_config(tmp_path, model={"pretrained_checkpoint": str(checkpoint)})
    weights = torch.load(checkpoint, weights_only=False)["state"]["model"]
    model = task(config).build_model(None)
    assert {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, weights[name])} == set()


def test_states_are_passed_between_rows_of_one_text_by_mixers_that_have_some(config_file):
    unpacked = "train_loader.dataset.packing=false"
    assert task(config_file, "state_passing=0.5", unpacked).build_model(None).model.lion.state_passing == 0.5
    with pytest.raises(UserError, match="no effect with device_train_microbatch_size=1; raise that"):
        task(config_file, "state_passing=0.5", unpacked, "device_train_microbatch_size=1")
    with pytest.raises(UserError, match=r"set train_loader\.dataset\.packing=false, or omit state_passing"):
        task(config_file, "state_passing=0.5", "train_loader.dataset.packing=true")
    with pytest.raises(UserError, match="state_passing: softmax has no states to pass"):
        task(config_file, "state_passing=0.5", unpacked, "model.mixer=softmax").build_model(None)


def test_a_run_does_not_start_from_a_checkpoint_with_another_tokenizer(
    write_config, write_checkpoint, tokenizer_folder, tmp_path
):
    other = Path(shutil.copytree(tokenizer_folder, tmp_path / "other"))
    swapped = json.loads((other / "tokenizer.json").read_text())
    vocabulary = swapped["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(swapped))
    checkpoint = write_checkpoint(tmp_path / "start.pt")
    config = write_config(tmp_path, model={"pretrained_checkpoint": str(checkpoint)}, tokenizer_name=str(other))
    with pytest.raises(UserError, match=f"tokenizer_name={other} is not the tokenizer of {checkpoint}"):
        task(config).build_model(None)


@needs_reference
def test_a_run_starts_from_a_checkpoint_of_the_papers_authors(tmp_path, write_config):
    config = write_config(tmp_path, model={"pretrained_checkpoint": str(PARITY / "legacy-nova.pt")})
    model = task(config).build_model(None).model.eval()
    tensors = load_file(PARITY / "legacy-nova.safetensors")
    inputs = {name[3:]: tensor for name, tensor in tensors.items() if name.startswith("in.")}
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        logits = model(**inputs).logits
    torch.testing.assert_close(logits[real], tensors["out.mlm_logits"][real], atol=1e-5, rtol=1e-5)


def test_the_slower_heads_of_a_start_are_widened_unless_a_run_resumes(folder, tmp_path, write_config, caplog):
    start = {"pretrained_checkpoint": str(folder), "decay_horizon": [8, 512]}
    run = task(write_config(tmp_path, model=start))
    expected = load_file(folder / "model.safetensors")
    with caplog.at_level("INFO"):
        widened, resumed = (run.build_model(checkpoint).model for checkpoint in (None, folder))
    assert caplog.text.count("at most to 512 tokens") == 1
    assert caplog.text.count("model.key_weight=linear") == 1
    assert resumed.config.to_dict() == widened.config.to_dict()  # its weights are loaded later
    for name, tensor in expected.items():
        assert torch.equal(widened.state_dict()[name], tensor) == (name != "lion.layers.0.attention.decay.bias")
    wider = widened.lion.layers[0].attention.decay.bias - expected["lion.layers.0.attention.decay.bias"]
    assert sorted(wider.sign().tolist()) == [-1, 0]  # of two heads, the slower one
    widened.config.save_pretrained(folder)  # as of a model trained with this horizon
    again = run.build_model(None).model
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in expected.items())
