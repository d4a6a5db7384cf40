"""The key `hf_export`: the Hub folders that a run exports, and exports that fail without affecting the run."""

import json
import re
from pathlib import Path

import pytest
import warm
from test_main import batches, metrics

import main
from src.checkpoints.reading import read_checkpoint
from src.errors import RunFailed, UserError
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


def test_a_finished_run_exports_a_lost_hub_folder_again_without_training(saved, capsys):
    config, folder = saved
    (folder / "hub" / "ep0-ba6").rename(folder / "lost")
    before = (folder / "metrics.jsonl").read_bytes()
    main.main([str(config)])
    assert capsys.readouterr().out.rstrip().endswith(f"Hub folder    {folder / 'hub' / 'ep0-ba6'}")
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


def test_only_the_first_rank_exports_and_only_after_a_save(tmp_path, monkeypatch):
    class Writer:
        folder, saved_batch = tmp_path, -1

    asked = []
    monkeypatch.setattr(callback, "export_latest", lambda *_: asked.append(1) or (tmp_path / "hub" / "x", "refused"))
    exports = callback.HubExports(Writer, 300.0)
    exports.batch_checkpoint(None, None)
    assert asked == []
    Writer.saved_batch = 3
    exports.batch_checkpoint(None, None)
    exports.epoch_checkpoint(None, None)
    assert asked == [1]
    Writer.saved_batch = 6
    monkeypatch.setattr("composer.utils.dist.get_global_rank", lambda: 1)
    exports.batch_checkpoint(None, None)
    assert asked == [1]


@pytest.mark.parametrize("dist_timeout", [60.0, 300.0])
def test_an_export_ends_before_other_ranks_time_out_and_only_folders_of_lost_checkpoints_are_removed(
    tmp_path, monkeypatch, dist_timeout
):
    class Writer:
        folder, saved_batch = tmp_path, 6

    for name in ("ep0-ba3", "ep0-ba3-unfinished", "ep0-ba6", "my-best"):
        (tmp_path / "hub" / name).mkdir(parents=True)
    (tmp_path / "ep0-ba6-rank0.pt").touch()

    def export_latest(folder: Path, seconds: float) -> tuple[Path, None]:
        assert 0 < seconds < dist_timeout
        return folder / "hub" / "ep0-ba6", None

    monkeypatch.setattr(callback, "export_latest", export_latest)
    callback.HubExports(Writer, dist_timeout).batch_checkpoint(None, None)
    assert folders(tmp_path) == {"ep0-ba6", "my-best"}


def test_an_export_that_takes_too_long_is_ended_and_reported(tmp_path):
    (tmp_path / "ep0-ba3-rank0.pt").write_bytes(b"")
    (tmp_path / "latest-rank0.pt").symlink_to("ep0-ba3-rank0.pt")
    assert callback.export_latest(tmp_path, 0.01) == (tmp_path / "hub" / "ep0-ba3", "the export took more than 0 s")
    with pytest.raises(RunFailed, match="not a readable checkpoint"):
        callback.export_last(tmp_path)


def test_an_invalid_value_is_refused_before_anything_is_written(config_file, tmp_path):
    with pytest.raises(UserError, match="hf_export=always must be one of end, save"):
        main.main([str(config_file), "hf_export=always"])
    assert not (tmp_path / "run").exists()
