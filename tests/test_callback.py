"""The key `hf_export`: the Hub folders that a run exports, and exports that fail without affecting the run."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm
from composer import Timestamp
from test_main import batches, metrics

import main
from src.checkpoints.reading import read_checkpoint
from src.errors import UserError
from src.files import LATEST, link
from src.publish import callback
from src.publish import folder as hub_folder
from src.publish.commands import check_proof


def folders(run_folder: Path) -> set[str]:
    return {path.name for path in (run_folder / "hub").iterdir()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory, write_config) -> tuple[Path, Path]:
    """Config file and save_folder of a run of 6 steps that exported each of its saves, and kept one."""
    folder = tmp_path_factory.mktemp("saved")
    config = write_config(folder, hf_export="save", save_num_checkpoints_to_keep=1, loggers={})
    status, output = warm.run("main.py", config, output=folder / "output")
    assert status == 0, output
    assert "Hub folder was not written" not in output
    assert output.rstrip().endswith(f"Hub folder    {folder / 'run' / 'hub' / 'ep0-ba6'}")
    return config, folder / "run"


def test_each_save_becomes_a_hub_folder_and_as_many_are_kept_as_checkpoints(saved):
    _, folder = saved
    assert folders(folder) == {"ep0-ba6"}
    out = folder / "hub" / "ep0-ba6"
    check_proof(out)
    read = read_checkpoint(folder / "latest-rank0.pt")
    assert hub_folder.different_tensors(read.build().state_dict(), hub_folder.read_folder(out).weights) == []
    card = (out / "README.md").read_text()
    last = [line["eval"] for line in metrics(folder) if "eval" in line][-1]
    assert f"At step 6, with 15% of the tokens masked: masked accuracy {last['eval/MaskedAccuracy']:.2%}" in card


def test_a_finished_run_exports_a_lost_hub_folder_again_without_training(saved):
    config, folder = saved
    (folder / "hub" / "ep0-ba6").rename(folder / "lost")
    before = (folder / "metrics.jsonl").read_bytes()
    status, output = warm.run("main.py", config, output=folder / "output")
    assert status == 0 and output.rstrip().endswith(f"Hub folder    {folder / 'hub' / 'ep0-ba6'}")
    assert folders(folder) == {"ep0-ba6"}
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_failing_export_does_not_affect_the_run(tmp_path, write_config):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "hub").write_text("a file, where the Hub folders should go")
    config = write_config(tmp_path, hf_export="save", save_interval="6ba", loggers={})
    status, output = warm.run("main.py", config, output=tmp_path / "output")
    assert status == 1
    assert re.findall(r"step (\d+): the Hub folder was not written \(.*\); training continues", output) == ["6"]
    assert output.splitlines()[-1].startswith("error: the run is saved, but its Hub folder is not: ")
    assert "Traceback" not in output
    assert batches(metrics(tmp_path / "run"), "loss") == [1, 2, 3, 4, 5, 6]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["after"]["step"] == 6
    read_checkpoint(tmp_path / "run" / "latest-rank0.pt").build()


class FakeWorker:
    """A worker without a process, which a test ends."""

    started: list["FakeWorker"]

    def __init__(self, function, *arguments, **options):
        self.arguments, self.options, self.running, self.why = arguments, options, True, None
        self.started.append(self)

    def end(self, why: str | None = None) -> None:
        self.running, self.why = False, why

    def is_running(self) -> bool:
        return self.running

    def failure(self) -> str | None:
        return self.why

    def kill(self) -> None:
        self.running = False


class FakeExport(FakeWorker):
    def __init__(self, function, checkpoint: Path, out: Path, aside: bool):
        super().__init__(function, checkpoint, out)
        self.step = checkpoint.read_text()

    def end(self, why: str | None = None) -> None:
        super().end(why)
        if why is None:
            self.arguments[1].mkdir(parents=True)


class FakeRun:
    """A run that keeps one checkpoint, with the step as its content, and exports them by fake workers."""

    saved_batch = -1

    def __init__(self, folder: Path):
        self.folder = folder
        self.exports = callback.HubExports(self)

    def step(self, batch: int, save: bool = False) -> None:
        if save:
            for old in self.folder.glob("*-rank0.pt"):
                old.unlink()
            (self.folder / f"ep0-ba{batch}-rank0.pt").write_text(str(batch))
            link(self.folder / LATEST, f"ep0-ba{batch}-rank0.pt")
            self.saved_batch = batch
        state = SimpleNamespace(timestamp=Timestamp(batch=batch))
        self.exports.batch_checkpoint(state, None)
        self.exports.epoch_checkpoint(state, None)

    @property
    def held(self) -> bool:
        return (self.folder / callback.HELD).exists()


@pytest.fixture
def fake(tmp_path, monkeypatch) -> FakeRun:
    FakeWorker.started = []
    monkeypatch.setattr(callback, "Worker", FakeExport)
    return FakeRun(tmp_path)


def test_training_does_not_wait_for_an_export_and_the_newest_of_the_saves_meanwhile_comes_next(fake):
    for batch in range(1, 9):
        fake.step(batch, save=batch % 2 == 0)
    assert [worker.step for worker in FakeWorker.started] == ["2"]
    assert fake.held  # and not deleted with the run's own
    FakeWorker.started[0].end()
    fake.step(9)
    assert [worker.step for worker in FakeWorker.started] == ["2", "8"]
    assert folders(fake.folder) == {"ep0-ba2"}  # until there is a newer one
    FakeWorker.started[1].end()
    assert not fake.exports.is_busy()
    assert folders(fake.folder) == {"ep0-ba8"} and not fake.held
    fake.step(10)
    assert len(FakeWorker.started) == 2


def test_a_failed_export_warns_and_the_next_save_is_exported(fake, caplog):
    fake.step(3, save=True)
    FakeWorker.started[0].end("no space left")
    fake.step(4)
    assert caplog.messages == ["step 3: the Hub folder was not written (no space left); training continues"]
    fake.step(6, save=True)
    assert [worker.step for worker in FakeWorker.started] == ["3", "6"]


def test_a_checkpoint_that_cannot_be_held_warns(fake, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(callback, "hold", full)
    fake.step(3, save=True)
    assert caplog.messages == ["step 3: the Hub folder was not written (No space left on device); training continues"]


def test_only_the_first_rank_exports(fake, monkeypatch):
    monkeypatch.setattr("composer.utils.dist.get_global_rank", lambda: 1)
    fake.step(3, save=True)
    assert FakeWorker.started == [] and not fake.exports.is_busy()


def test_only_folders_of_lost_checkpoints_are_removed_and_what_a_killed_run_left(fake):
    for name in ("ep0-ba1", "ep0-ba1-unfinished", "my-best"):
        (fake.folder / "hub" / name).mkdir(parents=True)
    (fake.folder / callback.HELD).touch()
    fake.exports.after_load(None, None)
    assert not fake.held
    fake.step(3, save=True)
    FakeWorker.started[0].end()
    fake.step(4)
    assert folders(fake.folder) == {"ep0-ba3", "my-best"}


def test_a_run_that_ends_early_ends_its_export(fake):
    fake.step(3, save=True)
    fake.exports.close(None, None)
    assert not FakeWorker.started[0].is_running() and not fake.held


def test_an_invalid_value_is_refused_before_anything_is_written(config_file, tmp_path):
    with pytest.raises(UserError, match="hf_export=always must be one of end, save"):
        main.main([str(config_file), "hf_export=always"])
    assert not (tmp_path / "run").exists()
