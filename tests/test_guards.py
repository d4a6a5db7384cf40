"""Runs that a signal stops, that end early or with a non-finite loss; random numbers that depend on the step alone."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm
from composer import Timestamp
from conftest import ROOT, environment

import main
from src.errors import UserError
from src.training import checkpointing, registry
from src.training.guards import FiniteLoss, SeedEveryStep, StopOnSignal


def resumable_config(folder: Path, write_config, **changes) -> Path:
    """A config of a run that is still training when it is signalled."""
    never = {"save_interval": "1000ba", "eval_interval": "1000ba", "eval_first": False, "loggers": {}}
    return write_config(folder, **never, max_duration="2000ba", device_train_microbatch_size=4, **changes)


def end_group(pid: int) -> None:
    """Kill what is left of a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def has_trained(folder: Path) -> bool:
    """Whether the run in a folder has done its fifth step."""
    return (folder / "metrics.jsonl").is_file() and '"step": 5' in (folder / "metrics.jsonl").read_text()


def assert_saved_and_resumable(config: Path, folder: Path, output: str, signum: signal.Signals, caplog) -> None:
    """Assert that a signalled run saved its last step, reported it once, and resumes from it."""
    step = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert 5 <= step < 1000
    assert output.count(f"{signum.name}: saved step {step}; the same command resumes from it") == 1
    assert "interrupted" not in output
    assert [path.name.split("-")[1] for path in checkpointing.checkpoints(folder)] == [f"ba{step}"]
    with caplog.at_level("INFO", logger="lion"):
        main.main(
            [str(config), f"max_duration={step + 2}ba", "train_loader.num_workers=0", "eval_loader.num_workers=0"]
        )
    assert f"resuming from step {step}\n" in caplog.text


# The first is what a launcher turns a Ctrl-C into; the second reaches a process group with its loader workers.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "status", "group"), [([signal.SIGINT, signal.SIGTERM], 130, False), ([signal.SIGTERM], 143, True)]
)
def test_a_signalled_run_saves_its_step_and_resumes_from_it(signals, status, group, tmp_path, write_config, caplog):
    workers = {"train_loader": {"num_workers": 2}, "eval_loader": {"num_workers": 1}} if group else {}
    config, folder = resumable_config(tmp_path, write_config, **workers), tmp_path / "run"
    process = warm.start("main.py", config, output=tmp_path / "output")
    try:
        warm.wait_for(lambda: has_trained(folder), process)
        for signum in signals:
            (os.killpg if group else os.kill)(process.pid, signum)
            time.sleep(0.001)
        process.join(60)
    finally:
        end_group(process.pid)
    output = (tmp_path / "output").read_text()
    assert process.exitcode == status, output
    assert "Traceback" not in output
    assert_saved_and_resumable(config, folder, output, signals[0], caplog)


@pytest.mark.slow
def test_a_signal_to_a_launcher_and_its_processes_saves_one_step(tmp_path, write_config, caplog):
    config, folder = resumable_config(tmp_path, write_config), tmp_path / "run"
    command = [warm.python(), "-m", "composer.cli.launcher", "-n", "2", ROOT / "main.py", config]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while not has_trained(folder):
            assert process.poll() is None, "the run ended before the signal"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGTERM)
        output = process.communicate(timeout=60)[1]
    finally:
        end_group(process.pid)
    assert process.returncode == 143, output
    assert_saved_and_resumable(config, folder, output, signal.SIGTERM, caplog)


@pytest.mark.parametrize(
    ("heard", "ends"),
    [
        ([(signal.SIGTERM, 0), (signal.SIGTERM, 0.2)], []),
        ([(signal.SIGINT, 0), (signal.SIGTERM, 5), (signal.SIGTERM, 5.5)], []),
        ([(signal.SIGTERM, 0), (signal.SIGTERM, 2)], [signal.SIGTERM]),
        ([(signal.SIGINT, 0), (signal.SIGINT, 0.1), (signal.SIGINT, 1.5)], [signal.SIGINT]),
    ],
)
def test_a_repeated_signal_ends_a_run_at_once_unless_it_follows_within_a_second(heard, ends, monkeypatch, caplog):
    handlers, raised = {}, []
    guard = StopOnSignal(writer=None)
    guard.old_handlers = {signum: f"before {signum}" for signum in guard.SIGNALS}
    monkeypatch.setattr("signal.signal", handlers.__setitem__)
    monkeypatch.setattr("signal.raise_signal", raised.append)
    with caplog.at_level("INFO", logger="lion"):
        for signum, at in heard:
            monkeypatch.setattr("time.monotonic", lambda at=at: at)
            guard._request(signum, None)
    assert raised == ends
    assert handlers == {signum: f"before {signum}" for signum in ends}
    assert caplog.text.count("finishing this step and saving; repeat to end at once") == 1
    assert guard.requested == heard[0][0]


def test_a_signalled_run_on_a_full_disk_reports_what_is_not_saved(tmp_path, caplog):
    torch.save({}, tmp_path / "ep0-ba5-rank0.pt")
    writer = SimpleNamespace(
        folder=tmp_path, save=lambda state: "cannot save step 7 to ep0-ba7-rank0.pt: No space left"
    )
    guard = StopOnSignal(writer)
    guard.requested = signal.SIGTERM
    with caplog.at_level("INFO", logger="lion"), pytest.raises(SystemExit):
        guard.batch_checkpoint(SimpleNamespace(timestamp=SimpleNamespace(batch=SimpleNamespace(value=7))), None)
    assert re.search(r"SIGTERM: cannot save step 7 .*; the same command resumes from .*ba5-rank0\.pt", caplog.text)
    assert "saved step" not in caplog.text


@pytest.mark.slow
def test_a_non_finite_loss_ends_the_run_before_the_step_is_saved(tmp_path, write_config):
    config = write_config(
        tmp_path,
        max_duration="40ba",
        save_interval="1ba",
        scheduler={"name": "constant", "t_warmup": None, "alpha_f": None},
        loggers={},
    )
    status, output = warm.run("main.py", config, "optimizer.lr=1e30", output=tmp_path / "output")
    assert status == 1, output
    assert "Traceback" not in output
    last = output.rstrip().splitlines()[-1]
    assert last.startswith("error: step ")
    if "loss is" in last:
        assert "learning rate 1e+30" in last
    for path in checkpointing.checkpoints(tmp_path / "run"):
        assert path.name in last or path != checkpointing.checkpoints(tmp_path / "run")[0]
        weights = torch.load(path, weights_only=False)["state"]["model"]
        assert all(torch.isfinite(tensor).all() for tensor in weights.values())


@pytest.mark.parametrize("poisoned", [False, True])
def test_an_update_with_non_finite_gradients_is_skipped_and_counted(poisoned):
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


def test_the_random_numbers_of_a_step_depend_on_its_number_alone():
    def draw(seed: int, batch: int) -> torch.Tensor:
        state = SimpleNamespace(timestamp=SimpleNamespace(batch=SimpleNamespace(value=batch)))
        SeedEveryStep(seed).batch_start(state, None)
        return torch.rand(8)

    first = draw(17, 3)
    torch.rand(100)
    assert torch.equal(draw(17, 3), first)
    assert not torch.equal(draw(17, 4), first)
    assert not torch.equal(draw(18, 3), first)


# Early stopping


def stopper(**arguments):
    return registry.build_all("callbacks", {"early_stopper": {"patience": "2ba", **arguments}})[0]


class Run:
    """An evaluation every batch, with the attributes that a stopper reads."""

    def __init__(self, batch: int = 0):
        self.timestamp = Timestamp(batch=batch)
        self.dataloader_label = "eval"
        self.train_metrics = {"MaskedAccuracy": None}
        self.eval_metrics = {"eval": {"LanguageCrossEntropy": None, "MaskedAccuracy": None}}
        self.stopped = False

    def stop_training(self) -> None:
        self.stopped = True

    def evaluate(self, stopper, value: float) -> bool:
        self.timestamp = self.timestamp.copy(batch=self.timestamp.batch + 1)
        self.eval_metrics["eval"][stopper.monitor] = SimpleNamespace(compute=lambda: torch.tensor(value))
        stopper.eval_end(self, None)
        return self.stopped


def test_a_cross_entropy_must_fall_and_an_accuracy_must_rise():
    run, loss = Run(), stopper()
    assert not any(run.evaluate(loss, value) for value in (5.0, 4.0, 3.0, 2.0, 1.0))
    run, accuracy = Run(), stopper(monitor="MaskedAccuracy")
    assert [run.evaluate(accuracy, value) for value in (0.4, 0.3, 0.2, 0.1)] == [False, False, False, True]


def test_a_resumed_run_keeps_the_best_value():
    run, before, after = Run(), stopper(), stopper()
    assert not run.evaluate(before, 1.0)
    after.load_state_dict(before.state_dict())
    after.load_state_dict(stopper().state_dict())  # of a run without an evaluation
    assert [run.evaluate(after, value) for value in (2.0, 2.0, 2.0)] == [False, False, True]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"monitor": "loss"},
            r"early_stopper.monitor=loss must be one of LanguageCrossEntropy, MaskedAccuracy",
        ),
        ({"dataloader_label": "val"}, r"early_stopper.dataloader_label=val must be one of eval, train"),
    ],
)
def test_a_metric_that_is_not_measured_is_rejected(arguments, words):
    with pytest.raises(UserError, match=words):
        stopper(**arguments).before_load(Run(), None)


def test_a_patience_in_other_units_is_rejected():
    with pytest.raises(UserError, match="patience 100sp must be in epochs"):
        stopper(patience="100sp")


@pytest.mark.parametrize("label", ["eval", "train"])
def test_a_measured_metric_is_accepted(label):
    stopper(monitor="MaskedAccuracy", dataloader_label=label).before_load(Run(), None)
