"""Runs that are asked to stop, and runs whose loss is no number any more."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, environment, run

import main
from src.training import checkpointing
from src.training.guards import FiniteLoss, SeedEveryStep, StopOnSignal, Stopped

LAUNCHER = ["-m", "composer.cli.launcher", "-n", "2"]


# The first is what a launcher makes of a Ctrl-C; the others reach a whole process group, as a scheduler's do.
@pytest.mark.parametrize(
    ("asked", "status", "launcher", "group"),
    [
        ([signal.SIGINT, signal.SIGTERM], 130, [], False),
        ([signal.SIGTERM], 143, [], True),
        ([signal.SIGTERM], 143, LAUNCHER, True),
    ],
)
def test_a_run_asked_to_stop_saves_its_step_says_so_and_goes_on_from_there(
    asked, status, launcher, group, tmp_path, write_config, caplog
):
    config = write_config(
        tmp_path,
        max_duration="2000ba",
        save_interval="1000ba",
        eval_interval="1000ba",
        loggers={},
        device_train_microbatch_size=4,
        train_loader={"num_workers": 2 if group else 0},
        eval_loader={"num_workers": 1 if group else 0},
    )
    folder = tmp_path / "run"
    command = [sys.executable, *launcher, ROOT / "main.py", config]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 90
    while not (folder / "metrics.jsonl").is_file() or '"step": 5' not in (folder / "metrics.jsonl").read_text():
        assert process.poll() is None, "the run ended before it was asked to"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for signum in asked:
        (os.killpg if group else os.kill)(process.pid, signum)
        time.sleep(0.001)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == status, said
    assert launcher or "Traceback" not in said  # the launcher shows its own
    steps = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert 5 <= steps < 1000
    assert said.count(f"{asked[0].name}: step {steps} is saved; the same command goes on from there") == 1
    assert "interrupted" not in said
    assert [path.name.split("-")[1] for path in checkpointing.checkpoints(folder)] == [f"ba{steps}"]
    with caplog.at_level("INFO", logger="lion"):
        main.main(
            [str(config), f"max_duration={steps + 2}ba", "train_loader.num_workers=0", "eval_loader.num_workers=0"]
        )
    assert f"going on from step {steps}\n" in caplog.text


@pytest.mark.parametrize(
    ("heard", "ends"),
    [
        ([(signal.SIGTERM, 0), (signal.SIGTERM, 0.2)], []),
        ([(signal.SIGINT, 0), (signal.SIGTERM, 5), (signal.SIGTERM, 5.5)], []),
        ([(signal.SIGTERM, 0), (signal.SIGTERM, 2)], [signal.SIGTERM]),
        ([(signal.SIGINT, 0), (signal.SIGINT, 0.1), (signal.SIGINT, 1.5)], [signal.SIGINT]),
    ],
)
def test_a_signal_ends_at_once_when_it_comes_again_and_not_when_it_only_comes_twice(heard, ends, monkeypatch, caplog):
    handlers, raised = {}, []
    guard = StopOnSignal(writer=None)
    guard.before = {signum: f"before {signum}" for signum in guard.SIGNALS}
    monkeypatch.setattr("signal.signal", handlers.__setitem__)
    monkeypatch.setattr("signal.raise_signal", raised.append)
    with caplog.at_level("INFO", logger="lion"):
        for signum, at in heard:
            monkeypatch.setattr("time.monotonic", lambda at=at: at)
            guard._ask(signum, None)
    assert raised == ends
    assert handlers == {signum: f"before {signum}" for signum in ends}
    assert caplog.text.count("finishing this step and saving; once more to end at once") == 1
    assert guard.asked == heard[0][0]


def test_a_run_asked_to_stop_on_a_full_disk_says_what_is_not_saved(tmp_path, caplog):
    torch.save({}, tmp_path / "ep0-ba5-rank0.pt")
    writer = SimpleNamespace(
        folder=tmp_path, save=lambda state: "cannot save step 7 to ep0-ba7-rank0.pt: No space left"
    )
    guard = StopOnSignal(writer)
    guard.asked = signal.SIGTERM
    with caplog.at_level("INFO", logger="lion"), pytest.raises(Stopped):
        guard.batch_checkpoint(SimpleNamespace(timestamp=SimpleNamespace(batch=SimpleNamespace(value=7))), None)
    assert re.search(r"SIGTERM: cannot save step 7 .*; the same command goes on from .*ba5-rank0\.pt", caplog.text)
    assert "is saved" not in caplog.text


def test_a_loss_that_is_no_number_ends_the_run_before_it_is_saved(tmp_path, write_config):
    config = write_config(
        tmp_path,
        max_duration="40ba",
        save_interval="1ba",
        scheduler={"name": "constant", "t_warmup": None, "alpha_f": None},
        loggers={},
    )
    result = run("main.py", config, "optimizer.lr=1e30")
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    last = result.stderr.rstrip().splitlines()[-1]
    assert last.startswith("error: step ")
    if "the loss is" in last:
        assert "learning rate 1e+30" in last
    for path in checkpointing.checkpoints(tmp_path / "run"):
        assert path.name in last or path != checkpointing.checkpoints(tmp_path / "run")[0]
        weights = torch.load(path, weights_only=False)["state"]["model"]
        assert all(torch.isfinite(tensor).all() for tensor in weights.values())


@pytest.mark.parametrize("poisoned", [False, True])
def test_an_update_with_gradients_that_are_no_numbers_is_left_out_and_counted(poisoned):
    model = torch.nn.Linear(3, 2)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.ones(4, 3)
    if poisoned:
        x[1, 1] = float("nan")
    model(x).sum().backward()
    logged = {}
    guard = FiniteLoss("skip", writer=None)
    state = SimpleNamespace(model=model, timestamp=SimpleNamespace(batch=SimpleNamespace(value=7)))
    guard.after_train_batch(state, SimpleNamespace(log_metrics=logged.update))
    optimizer.step()
    changed = [name for name, tensor in model.named_parameters() if not torch.equal(tensor, before[name])]
    assert changed == ([] if poisoned else ["weight", "bias"])
    assert logged == {"skipped_steps": int(poisoned)}
    again = FiniteLoss("skip", writer=None)
    again.load_state_dict(guard.state_dict())
    assert again.skipped == int(poisoned)


def test_a_step_draws_by_its_number_whatever_was_drawn_before():
    def draw(seed: int, batch: int) -> torch.Tensor:
        state = SimpleNamespace(timestamp=SimpleNamespace(batch=SimpleNamespace(value=batch)))
        SeedEveryStep(seed).batch_start(state, None)
        return torch.rand(8)

    first = draw(17, 3)
    torch.rand(100)
    assert torch.equal(draw(17, 3), first)
    assert not torch.equal(draw(17, 4), first)
    assert not torch.equal(draw(18, 3), first)
