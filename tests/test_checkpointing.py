"""Checkpoints: valid or absent, found again after a kill; a resumed run equals an uninterrupted one."""

import errno
import json
import logging
import random
import re
import shutil
import signal
import time
import zipfile
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import warm
from transformers import BertTokenizerFast

import main
from src.checkpoints.safe_load import load_safely
from src.errors import RunFailed, UserError
from src.files import follow
from src.mlm.task import MaskedLM, PretrainConfig
from src.training import checkpointing
from src.training.config import load_config
from src.training.registry import build_optimizer

DROPOUT = ("model.hidden_dropout_prob=0.1", "model.attention_probs_dropout_prob=0.1")
OPTIONS = {
    "max_duration": "40ba",
    "save_interval": "5ba",
    "save_num_checkpoints_to_keep": 2,
    "eval_interval": "20ba",
    "log_interval": "4ba",
    "loggers": {},
}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "latest-rank0.pt", weights_only=False)["state"]["model"]


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def numbers(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl without what depends on the clock."""
    return [{name: value for name, value in line.items() if "second" not in name} for line in lines(folder)]


def assert_same_run(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert numbers(one) == numbers(other)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, write_config) -> Path:
    """The folder of a run of 40 steps with dropout."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    main.main([str(write_config(folder, **OPTIONS)), *DROPOUT])
    return folder / "run"


@pytest.mark.slow
def test_a_run_killed_at_any_moment_ends_like_an_uninterrupted_one(uninterrupted, tmp_path, write_config):
    folder = tmp_path / "run"
    command = ["main.py", write_config(tmp_path, **OPTIONS), *DROPOUT]
    draw = random.Random(0)
    before = []
    for step in (5, 20):
        process = warm.start(*command, output=tmp_path / f"killed-{step}.txt")
        try:
            warm.wait_for(lambda step=step: list(folder.glob(f"ep*-ba{step}-rank0.pt")), process)
            time.sleep(draw.random() * 0.1)
        finally:
            process.kill()
            process.join()
        before = lines(folder)
        assert before[-1]["step"] < 40, "the run was over before it was killed"
    status, output = warm.run(*command, output=tmp_path / "resumed.txt")
    assert status == 0, output
    (resumed,) = re.findall(r"^resuming from step (\d+)$", output, re.MULTILINE)
    assert int(resumed) in range(15, 40, 5)  # 15 if the kill came before the file of step 20 was complete
    kept = [line for line in before if line["step"] <= int(resumed)]
    assert lines(folder)[: len(kept)] == kept
    assert_same_run(uninterrupted, folder)
    assert not list(folder.glob("*.unfinished"))
    assert len(checkpointing.checkpoints(folder)) == 2


ENDING = """
import os, signal
from composer import Callback
class Ending(Callback):
    def __init__(self, signum: int): self.signum, self.batches = signum, 0
    def eval_batch_start(self, state, logger):
        self.batches += 1
        assert self.batches < 4, "the evaluation went on"
        if self.batches == 2: os.kill(os.getpid(), self.signum)
"""


@pytest.mark.slow
@pytest.mark.parametrize("signum, save_interval", [(signal.SIGTERM, "30ba"), (signal.SIGKILL, "20ba")])
def test_a_run_that_ends_in_an_evaluation_is_saved_and_repeats_it(signum, save_interval, tmp_path, write_config):
    (tmp_path / "ending.py").write_text(ENDING)
    averages = {"ema": {"half_life": "4ba"}}  # which are in place of the weights meanwhile
    same = {**OPTIONS, "eval_first": False, "device_eval_batch_size": 2, "algorithms": averages}
    same |= {"callbacks": {"early_stopper": {"patience": "30ba"}}}
    for name in ("whole", "ended"):
        (tmp_path / name).mkdir()
    main.main([str(write_config(tmp_path / "whole", **same))])
    exports = {"hf_export": "save"} if signum == signal.SIGKILL else {}  # after an evaluation, or when it is repeated
    config = write_config(tmp_path / "ended", **{**same, "save_interval": save_interval, **exports})
    own = [f"callbacks[ending:Ending].signum={int(signum)}", f"code_paths=[{tmp_path / 'ending.py'}]"]
    status, output = warm.run("main.py", config, *own, output=tmp_path / "output")
    assert status == (143 if signum == signal.SIGTERM else -9), output
    folder = tmp_path / "ended" / "run"
    assert [path.name for path in checkpointing.checkpoints(folder)] == ["ep3-ba20-rank0.pt"]
    assert not [line for line in lines(folder) if "eval" in line]
    status, output = warm.run("main.py", config, output=tmp_path / "output")
    assert status == 0, output
    assert_same_run(tmp_path / "whole" / "run", folder)
    assert [line["step"] for line in lines(folder) if "eval" in line] == [20, 40]
    if exports:
        assert {path.name for path in (folder / "hub").iterdir()} == {"ep3-ba20", "ep6-ba40"}


@pytest.mark.slow
@pytest.mark.parametrize("end", ["40ba", "6ep"])
def test_a_run_that_an_evaluation_stopped_is_finished_by_the_same_command(tmp_path, write_config, caplog, end):
    stops = {"early_stopper": {"min_delta": 100, "patience": "10ba"}}
    changes = {**OPTIONS, "eval_interval": "10ba", "eval_first": False, "callbacks": stops, "max_duration": end}
    config, folder = write_config(tmp_path, **changes), tmp_path / "run"
    with caplog.at_level("INFO", logger="lion"):
        main.main([str(config)])
    assert "a callback, such as early_stopper, ended the run at step 30" in caplog.text
    before = numbers(folder)
    assert before[-1]["step"] == 30
    (folder / "summary.json").unlink()
    main.main([str(config)])
    assert (folder / "summary.json").exists() and numbers(folder) == before


@pytest.mark.slow
def test_an_evaluation_that_another_run_owes_is_not_repeated(uninterrupted, tmp_path, write_config):
    changes = {**OPTIONS, "max_duration": "42ba", "eval_interval": "100ba", "save_interval": "41ba"}
    main.main([str(write_config(tmp_path, **changes)), *DROPOUT, f"load_path={uninterrupted}"])
    (checkpoint,) = (path for path in checkpointing.checkpoints(tmp_path / "run") if "-ba41-" in path.name)
    assert load_safely(checkpoint)["state"]["callbacks"]["CheckpointWriter"]["owes_evaluation"] is False
    assert [line["step"] for line in lines(tmp_path / "run") if "eval" in line] == [42]


@pytest.mark.slow
def test_a_truncated_checkpoint_is_skipped_and_the_one_before_it_used(uninterrupted, tmp_path, write_config, caplog):
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder, symlinks=True)
    (folder / "summary.json").unlink()  # as if killed while the last checkpoint was copied
    newest = checkpointing.checkpoints(folder)[0]
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    with caplog.at_level("INFO", logger="lion"):
        main.main([str(write_config(tmp_path, **OPTIONS)), *DROPOUT])
    assert f"{newest} is corrupt or truncated; skipped" in caplog.text
    assert "resuming from step 35" in caplog.text
    assert_same_run(uninterrupted, folder)


@pytest.mark.slow
def test_a_full_disk_does_not_delete_earlier_checkpoints(tmp_path, write_config):
    config, folder = write_config(tmp_path, **{**OPTIONS, "save_num_checkpoints_to_keep": -1}), tmp_path / "run"
    main.main([str(config), "max_duration=10ba"])
    kept = {path.name: path.read_bytes() for path in checkpointing.checkpoints(folder)}
    size = (folder / "latest-rank0.pt").stat().st_size
    output = tmp_path / "full.txt"
    status, output = warm.run("main.py", config, "max_duration=18ba", output=output, file_size=size // 2)
    assert status == 1
    assert "Traceback" not in output
    assert f"cannot save step 15 to {folder}" in output
    assert "training continues and retries at the next save" in output
    last = output.rstrip().splitlines()[-1]
    assert last.startswith("error: cannot save the last step, 18, to ")
    assert re.search(r"the same command resumes from .*ba10-rank0\.pt$", last)
    assert {path.name: path.read_bytes() for path in checkpointing.checkpoints(folder)} == kept
    assert not list(folder.glob("*.unfinished"))
    main.main([str(config), "max_duration=18ba"])
    assert checkpointing.checkpoints(folder)[0].name.split("-")[1] == "ba18"


# load_path


@pytest.fixture(scope="module")
def check(uninterrupted) -> Callable[..., None]:
    """check(path, override, ...): check the load_path of a run of the same config with overrides."""

    def check(path: Path, *overrides: str) -> None:
        argv = [str(uninterrupted.parent / "tiny.yaml"), *DROPOUT, f"load_path={path}", *overrides]
        config = load_config(PretrainConfig, "main.py", "", argv)
        model = MaskedLM(config).build_model(None)
        optimizer = build_optimizer(config.optimizer, model)
        checkpointing.check_load_path(config, path, model, optimizer)

    return check


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "",
            "is at 40ba, so max_duration=40ba leaves nothing to train; use a longer one, or start at step 0 with "
            "load_position=false",
        ),
        ("max_duration=320sp", "is at 320sp, so max_duration=320sp leaves nothing to train"),
        ("max_duration=60ba model.hidden_size=64", "is a checkpoint of a different model"),
        ("max_duration=60ba optimizer.name=adamw", "was trained with a different optimizer"),
        (
            "max_duration=60ba optimizer.lr=0.01",
            "was trained with a different optimizer than this config's; use that run's config, or start from its "
            "weights alone with model.pretrained_checkpoint, or also with its optimizer's state by load_position=false",
        ),
        ("max_duration=60ba optimizer.filter_bias_norm_wd=true", "was trained with a different optimizer"),
        (
            "load_position=false model.hidden_size=64",
            "is a checkpoint of a different model than this config's (model.hidden_size=64, where the checkpoint "
            "has 32);",
        ),
        (
            "load_position=false model.decay_horizon=[8,64] model.key_weight=linear",
            "does not change its model: model.decay_horizon=[8.0, 64.0], where the checkpoint has null; "
            "model.key_weight=linear, where the checkpoint has none; use that run's config, or start from its weights "
            "alone with model.pretrained_checkpoint, which widens horizons",
        ),
        ("max_duration=60ba model.position_embedding=rope", "does not change its model: model.position_embedding=rope"),
        ("max_duration=60ba model.num_attention_heads=4 model.mixer=lion-s", "is a checkpoint of a different model"),
        (
            "load_position=false optimizer.name=adamw",
            "was trained with a different optimizer than this config's (AdamW instead of FusedDecoupledAdamW); ",
        ),
        (
            "load_position=false optimizer.filter_bias_norm_wd=true",
            "was trained with a different optimizer than this config's (other groups of parameters: "
            "optimizer.filter_bias_norm_wd or optimizer.layer_lr_decay); ",
        ),
    ],
)
def test_a_checkpoint_that_cannot_be_resumed_is_rejected(uninterrupted, check, overrides, message):
    path = uninterrupted / "latest-rank0.pt"
    with pytest.raises(UserError) as error:
        check(path, *overrides.split())
    assert str(error.value).startswith(f"load_path={path} {message}")


@pytest.mark.slow
def test_load_path_needs_the_tokenizer_of_its_run(uninterrupted, check, tokenizer, tmp_path):
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    (tmp_path / "vocab.txt").write_text("\n".join([*words[:5], *reversed(words[5:])]) + "\n")
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "other")
    path = uninterrupted / "latest-rank0.pt"
    with pytest.raises(UserError, match=rf"tokenizer_name: another tokenizer than that of load_path={path}; use that"):
        check(path, "max_duration=60ba", f"tokenizer_name={tmp_path / 'other'}")


@pytest.mark.slow
def test_a_second_phase_keeps_weights_and_optimizer_state_alone(uninterrupted, tmp_path, write_config, caplog):
    changes = {
        **OPTIONS, "max_duration": "4ba", "save_interval": "2ba", "log_interval": "1ba", "eval_first": False, "seed": 5,
        "optimizer": {"lr": 1e-4, "weight_decay": 0.0},
        "scheduler": {"name": "linear_decay_with_warmup", "t_warmup": "1ba"},
    }  # fmt: skip
    config, folder = write_config(tmp_path, **changes), tmp_path / "run"
    start = [f"load_path={uninterrupted / 'latest-rank0.pt'}", "load_position=false"]
    with caplog.at_level("INFO", logger="lion"):
        main.main([str(config), *DROPOUT, *start, "max_duration=2ba"])
    assert f"starting with the weights and the optimizer state of {uninterrupted}" in caplog.text
    main.main([str(config), *DROPOUT, *start])  # which resumes, and takes back nothing
    before, after = (load_safely(path / "latest-rank0.pt")["state"] for path in (uninterrupted, folder))
    assert after["timestamp"]["Timestamp"]["batch"] == 4 and after["rank_zero_seed"] == 5
    (old_optimizer,), (new_optimizer,) = before["optimizers"].values(), after["optimizers"].values()
    for name, old in old_optimizer["state"].items():
        new = new_optimizer["state"][name]
        assert new["step"] == old["step"] + 4 == 44
    alone = tmp_path / "alone"
    main.main(
        [
            str(config),
            *DROPOUT,
            f"model.pretrained_checkpoint={uninterrupted / 'latest-rank0.pt'}",
            f"save_folder={alone}",
        ]
    )
    second, fresh = ([line for line in lines(path) if "loss" in line] for path in (folder, alone))
    assert [line["lr"] for line in second] == [line["lr"] for line in fresh]
    assert second[0]["loss"] == fresh[0]["loss"]  # the same weights, samples and masks
    assert second[-1]["loss"] != fresh[-1]["loss"]  # but another step


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["truncated", "not a checkpoint"])
def test_a_file_that_is_not_a_valid_checkpoint_is_rejected(uninterrupted, check, tmp_path, fault):
    path = tmp_path / "checkpoint.pt"
    message = "is corrupt or truncated" if fault == "truncated" else "is not a Composer checkpoint"
    if fault == "truncated":
        path.write_bytes((uninterrupted / "latest-rank0.pt").read_bytes()[:-500])
    else:
        torch.save({"weights": 1}, path)
    with pytest.raises(UserError, match=re.escape(f"{path} {message}")):
        check(path, "max_duration=60ba")


@pytest.mark.slow
def test_a_checkpoint_of_the_same_model_and_optimizer_is_accepted(uninterrupted, check):
    check(uninterrupted / "latest-rank0.pt", "max_duration=60ba")


# Files


@pytest.fixture
def folder(tmp_path) -> Path:
    for epoch, batch in ((0, 5), (0, 10), (1, 100)):
        torch.save({"batch": torch.full((1000,), batch)}, tmp_path / f"ep{epoch}-ba{batch}-rank0.pt")
    (tmp_path / "ep1-ba110-rank0.unfinished").write_bytes(b"part")
    return tmp_path


def test_checkpoints_are_listed_newest_first_without_unfinished_ones(folder):
    assert [path.name for path in checkpointing.checkpoints(folder)] == [
        "ep1-ba100-rank0.pt",
        "ep0-ba10-rank0.pt",
        "ep0-ba5-rank0.pt",
    ]
    assert checkpointing.latest_valid_checkpoint(folder).name == "ep1-ba100-rank0.pt"
    assert checkpointing.latest_valid_checkpoint(folder / "missing") is None


@pytest.mark.parametrize("link", ["ep0-ba10-rank0.pt", "ep0-ba1-rank0.pt", None])
def test_latest_points_at_the_newest_checkpoint_again_after_a_kill(folder, link):
    if link is not None:
        (folder / checkpointing.LATEST).symlink_to(link)
    assert checkpointing.latest_valid_checkpoint(folder) == (folder / checkpointing.LATEST).resolve()
    assert checkpointing.checkpoints(folder)[0].name == "ep1-ba100-rank0.pt"


@pytest.mark.parametrize("fault", ["truncated", "empty", "one bit"])
def test_a_corrupt_checkpoint_is_skipped_with_a_warning(folder, fault, caplog):
    newest = folder / "ep1-ba100-rank0.pt"
    data = bytearray(newest.read_bytes())
    if fault == "one bit":
        data[len(data) // 2] ^= 1
    newest.write_bytes({"truncated": data[:-200], "empty": b"", "one bit": data}[fault])
    with caplog.at_level(logging.WARNING, logger="lion"):
        assert checkpointing.latest_valid_checkpoint(folder).name == "ep0-ba10-rank0.pt"
    assert f"{newest} is corrupt or truncated; skipped" in caplog.text


def test_a_run_does_not_start_over_because_all_its_checkpoints_are_corrupt(folder):
    for path in checkpointing.checkpoints(folder):
        path.write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"no checkpoint in .* is valid"):
        checkpointing.latest_valid_checkpoint(folder)


def test_a_corrupt_later_checkpoint_does_not_delete_the_new_one(folder):
    (folder / "ep1-ba100-rank0.pt").write_bytes(b"part")
    writer = checkpointing.CheckpointWriter(folder, "10ba", keep=1)
    assert writer._publish({"batch": 20}, folder / "ep0-ba20-rank0.pt") is None
    assert [path.name for path in checkpointing.checkpoints(folder)] == ["ep1-ba100-rank0.pt", "ep0-ba20-rank0.pt"]
    assert (
        checkpointing.latest_valid_checkpoint(folder)
        == (folder / checkpointing.LATEST).resolve()
        == folder / "ep0-ba20-rank0.pt"
    )


def test_where_links_fail_latest_is_a_file_with_the_newest_name(folder, monkeypatch):
    def no_links(*arguments):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(Path, "symlink_to", no_links)
    writer, latest = checkpointing.CheckpointWriter(folder, "10ba", keep=1), folder / checkpointing.LATEST
    for batch in (110, 120):
        assert writer._publish({"batch": batch}, folder / f"ep1-ba{batch}-rank0.pt") is None
        assert latest.read_text() == f"ep1-ba{batch}-rank0.pt\n"
        assert load_safely(latest) == {"batch": batch}
    assert [path.name for path in checkpointing.checkpoints(folder)] == ["ep1-ba120-rank0.pt"]
    assert checkpointing.latest_valid_checkpoint(folder) == follow(latest)


def test_only_a_failed_write_is_a_failed_save(folder, monkeypatch):
    def out_of_memory(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "save", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        checkpointing.CheckpointWriter(folder, "10ba", keep=1)._publish({}, folder / "ep1-ba120-rank0.pt")
    assert len(checkpointing.checkpoints(folder)) == 3


def test_a_state_that_could_not_be_loaded_again_ends_the_run_at_its_first_save(tmp_path):
    writer = checkpointing.CheckpointWriter(tmp_path, "10ba", keep=1)
    with pytest.raises(RunFailed, match=r"could not resume .*collections.deque .*state_dict of your own callbacks"):
        writer._publish({"callbacks": {"Own": deque([1])}}, tmp_path / "ep0-ba10-rank0.pt")
    assert [*tmp_path.iterdir()] == []
    writer._publish({"callbacks": {"Own": [1]}}, tmp_path / "ep0-ba10-rank0.pt")


def test_a_checksum_is_computed_once(folder, monkeypatch):
    read, testzip = [], zipfile.ZipFile.testzip
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda self: read.append(self.filename) or testzip(self))
    newest = checkpointing.latest_valid_checkpoint(folder)
    assert checkpointing.latest_valid_checkpoint(folder) == newest
    load_safely(folder / checkpointing.LATEST)
    assert read == [str(newest)]
