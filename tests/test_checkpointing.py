"""Checkpoints: whole or not there, found again after a kill or damage, and the run that goes on from them is the same run."""

import json
import logging
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, environment, run

from src.errors import UserError
from src.training import checkpointing

DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "latest-rank0.pt", weights_only=False)["state"]["model"]


def numbers(folder: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if "second" not in name} for line in lines]


def assert_same_run(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert numbers(one) == numbers(other)


@pytest.fixture(scope="module")
def options() -> dict:
    return {
        "max_duration": "60ba",
        "save_interval": "7ba",
        "eval_interval": "20ba",
        "log_interval": "4ba",
        "loggers": {},
    }


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, write_config, options) -> Path:
    """The folder of a run of 60 steps, with dropout, that nothing disturbed."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    result = run("main.py", write_config(folder, **options), *(f"model.{name}={p}" for name, p in DROPOUT.items()))
    assert result.returncode == 0, result.stderr
    return folder / "run"


def test_a_run_killed_at_any_moment_ends_as_one_that_was_not(uninterrupted, tmp_path, write_config, options):
    command = [sys.executable, ROOT / "main.py", write_config(tmp_path, **options)]
    command += [f"model.{name}={p}" for name, p in DROPOUT.items()]
    draw = random.Random(0)
    for step in (7, 28):
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 90
        try:
            while not list((tmp_path / "run").glob(f"ep*-ba{step}-rank0.pt")):
                assert process.poll() is None, "the run ended before it could be killed"
                assert time.monotonic() < deadline
                time.sleep(0.002)
            time.sleep(draw.random() * 0.1)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "going on from step" in result.stderr
    assert_same_run(uninterrupted, tmp_path / "run")
    assert not list((tmp_path / "run").glob("*.unfinished"))


def test_a_checkpoint_cut_in_half_is_left_out_and_the_one_before_it_used(
    uninterrupted, tmp_path, write_config, options
):
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder, symlinks=True)
    (folder / "summary.json").unlink()  # as if the kill had come while the last checkpoint was copied
    newest = checkpointing.checkpoints(folder)[0]
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    result = run("main.py", write_config(tmp_path, **options), *(f"model.{name}={p}" for name, p in DROPOUT.items()))
    assert result.returncode == 0, result.stderr
    assert f"{newest} is damaged" in result.stderr
    assert "going on from step 56" in result.stderr
    assert_same_run(uninterrupted, folder)


def test_a_full_disk_costs_no_checkpoint_that_was_there(tmp_path, write_config, options):
    config = write_config(tmp_path, **options)
    command = [sys.executable, ROOT / "main.py", config]
    folder = tmp_path / "run"
    assert run("main.py", config, "max_duration=14ba").returncode == 0
    kept = {path.name: path.read_bytes() for path in checkpointing.checkpoints(folder)}
    size = (folder / "latest-rank0.pt").stat().st_size
    result = subprocess.run(
        [*command, "max_duration=25ba"], env=environment(), capture_output=True, text=True, timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2)),
    )  # fmt: skip
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert f"cannot save step 21 to {folder}" in result.stderr
    assert "tries again at the next save" in result.stderr
    last = result.stderr.rstrip().splitlines()[-1]
    assert last.startswith("error: cannot save step 25, the last")
    assert "the same command goes on from" in last
    assert "ba14" in last
    assert {path.name: path.read_bytes() for path in checkpointing.checkpoints(folder)} == kept
    assert not list(folder.glob("*.unfinished"))
    assert run("main.py", config, "max_duration=25ba").returncode == 0
    assert checkpointing.checkpoints(folder)[0].name.split("-")[1] == "ba25"


# In this process


@pytest.fixture
def folder(tmp_path) -> Path:
    for epoch, batch in ((0, 5), (0, 10), (1, 100)):
        torch.save({"batch": torch.full((1000,), batch)}, tmp_path / f"ep{epoch}-ba{batch}-rank0.pt")
    (tmp_path / "ep1-ba110-rank0.unfinished").write_bytes(b"half")
    return tmp_path


def test_checkpoints_come_newest_first_and_unfinished_ones_not_at_all(folder):
    assert [path.name for path in checkpointing.checkpoints(folder)] == [
        "ep1-ba100-rank0.pt",
        "ep0-ba10-rank0.pt",
        "ep0-ba5-rank0.pt",
    ]
    assert checkpointing.newest_whole(folder).name == "ep1-ba100-rank0.pt"
    assert checkpointing.newest_whole(folder / "not there") is None


@pytest.mark.parametrize("link", ["ep0-ba10-rank0.pt", "ep0-ba1-rank0.pt", None])
def test_latest_names_the_newest_again_where_a_kill_left_it_behind(folder, link):
    if link is not None:
        (folder / checkpointing.LATEST).symlink_to(link)
    assert checkpointing.newest_whole(folder) == (folder / checkpointing.LATEST).resolve()
    assert checkpointing.checkpoints(folder)[0].name == "ep1-ba100-rank0.pt"


@pytest.mark.parametrize("damage", ["cut", "empty", "one bit"])
def test_damage_of_any_kind_is_seen_and_said(folder, damage, caplog):
    newest = folder / "ep1-ba100-rank0.pt"
    data = bytearray(newest.read_bytes())
    if damage == "one bit":
        data[len(data) // 2] ^= 1
    newest.write_bytes({"cut": data[:-200], "empty": b"", "one bit": data}[damage])
    with caplog.at_level(logging.WARNING, logger="lion"):
        assert checkpointing.newest_whole(folder).name == "ep0-ba10-rank0.pt"
    assert f"{newest} is damaged" in caplog.text


def test_a_run_does_not_begin_anew_because_all_its_checkpoints_are_damaged(folder):
    for path in checkpointing.checkpoints(folder):
        path.write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole"):
        checkpointing.newest_whole(folder)


def test_a_damaged_later_checkpoint_does_not_cost_the_new_one(folder):
    (folder / "ep1-ba100-rank0.pt").write_bytes(b"cut")
    writer = checkpointing.CheckpointWriter(folder, "10ba", keep=1)
    torch.save({"batch": 20}, folder / "ep0-ba20.unfinished")
    writer._publish(folder / "ep0-ba20.unfinished", folder / "ep0-ba20-rank0.pt")
    assert [path.name for path in checkpointing.checkpoints(folder)] == ["ep1-ba100-rank0.pt", "ep0-ba20-rank0.pt"]
    assert checkpointing.newest_whole(folder) == (folder / checkpointing.LATEST).resolve() == folder / "ep0-ba20-rank0.pt"
