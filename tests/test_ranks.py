"""Several ranks: they agree with rank 0, whatever their own disks hold, and on whether a save failed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import warm

import main

SHORT = {"max_duration": "4ba", "save_interval": "2ba", "eval_interval": "100ba", "loggers": {}, "eval_first": False}
STILL = ("model.hidden_dropout_prob=0", "model.attention_probs_dropout_prob=0")  # dropout differs between ranks
SHORT |= {"device_train_microbatch_size": 4}

READS = """
import os
from pathlib import Path
import torch

def reading(file, *arguments, load=torch.load, **options):
    if isinstance(file, Path) and not options["mmap"]:
        with Path(r"{}").open("a") as reads:
            print(os.environ["RANK"], file=reads)
    return load(file, *arguments, **options)

if "RANK" in os.environ:
    torch.load = reading
"""


def losses(folder: Path) -> list[float]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in found if "loss" in line]


@pytest.mark.slow
def test_machines_that_see_other_files_train_as_one(tmp_path, write_config):
    (tmp_path / "reads.py").write_text(READS.format(reads := tmp_path / "reads"))
    config = write_config(tmp_path, **SHORT, code_paths=[str(tmp_path / "reads.py")])
    folder, other = tmp_path / "run", tmp_path / "other"
    each = [[f"save_folder={folder}"], [f"save_folder={other}"]]  # as on machines without a shared disk
    other.mkdir()
    torch.save({"state": "of another run"}, other / "ep0-ba4-rank0.pt")
    (other / "config.yaml").write_text((tmp_path / "tiny.yaml").read_text() + "\nseed: 5\n")
    stored = f"save_remote={tmp_path / 'remote'}"
    for duration, expected in (("4ba", ""), ("8ba", "resuming from step 4\n")):
        output, options = tmp_path / f"output-{duration}", [*STILL, stored, f"max_duration={duration}"]
        statuses, text = warm.run_ranks(2, "main.py", config, *options, output=output, each=each)
        assert statuses == [0, 0], text + output.with_name(f"{output.name}-1").read_text()
        assert expected in text
        assert not expected or reads.read_text() == "0\n"  # on rank 0 alone, once
        main.main([str(config), *STILL, f"max_duration={duration}", f"save_folder={tmp_path / 'one'}"])
        shutil.move(folder, first := tmp_path / f"run-{duration}")
        assert (tmp_path / "remote" / "summary.json").read_text() == (first / "summary.json").read_text()
    assert sorted(path.name for path in other.iterdir() if path.is_file()) == ["config.yaml", "ep0-ba4-rank0.pt"]
    assert losses(first) == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


@pytest.mark.slow
def test_all_ranks_go_on_after_a_failed_save_and_end_with_it(tmp_path, write_config):
    config, folder = write_config(tmp_path, **SHORT), tmp_path / "run"
    statuses, output = warm.run_ranks(2, "main.py", config, output=tmp_path / "output", file_size=2**16)
    assert statuses == [1, 1], output
    assert f"cannot save step 2 to {folder}" in output
    assert output.rstrip().splitlines()[-1].startswith("error: cannot save the last step, 4, to ")
    assert not list(folder.glob("ep*"))


FAILS = """
import os
from src.data import batches
from src.errors import UserError
from src.mlm.task import MaskedLM

def fail(*arguments, **options):
    {}

if os.environ.get("RANK") == "1":
    {} = fail
"""
TRAINING, OPENING = "batches.split_batch", "MaskedLM.build_loaders"
ENDED = "another rank ended, or did not answer within dist_timeout=300 seconds; its error, if it has one, is above"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "failure", "statuses", "sentence"),
    [
        (TRAINING, "raise UserError('its shard is damaged')", [2, 2], "its shard is damaged"),
        (OPENING, "raise UserError('its disk is empty')", [2, 2], "its disk is empty"),
        (TRAINING, "raise KeyError(5)", [1, 1], "another rank failed (5); its error is above"),
        (TRAINING, "os._exit(9)", [1, 9], ENDED),
    ],
)
def test_an_error_of_one_rank_ends_the_others_with_its_sentence(
    at, failure, statuses, sentence, tmp_path, write_config
):
    (tmp_path / "fails.py").write_text(FAILS.format(failure, at))
    config = write_config(tmp_path, **SHORT, code_paths=[str(tmp_path / "fails.py")])
    found, output = warm.run_ranks(2, "main.py", config, output=tmp_path / "output")
    assert found == statuses, output
    assert "Traceback" not in output
    assert output.rstrip().splitlines()[-1] == f"error: {sentence}"


PACKED = {"dataset": {"packing": True}, "num_workers": 0}
LONGER = {**SHORT, "max_duration": "16ba", "train_loader": PACKED, "eval_loader": PACKED}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, write_config) -> Path:
    """The folder of a run on two ranks."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    statuses, output = warm.run_ranks(2, "main.py", write_config(folder, **LONGER), output=folder / "output")
    assert statuses == [0, 0], output
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_killed_during_a_save_costs_nothing_but_the_steps_since_the_last(
    killed, tmp_path, write_config, uninterrupted
):
    config, folder = write_config(tmp_path, **LONGER), tmp_path / "run"
    processes = warm.start_ranks(2, "main.py", config, output=tmp_path / "killed")
    try:
        warm.wait_for(lambda: list(folder.glob("ep*ba[68]-rank0.unfinished")), processes[0])
        processes[killed].kill()
        processes[killed].join()
    finally:
        for process in processes:  # as the launcher does
            process.kill()
            process.join()
    statuses, output = warm.run_ranks(2, "main.py", config, output=tmp_path / "resumed")
    assert statuses == [0, 0], output
    assert "resuming from step" in output
    one, other = (torch.load(at / "latest-rank0.pt", weights_only=False) for at in (folder, uninterrupted))
    assert one["state"]["timestamp"]["Timestamp"]["batch"] == 16
    weights, expected = one["state"]["model"], other["state"]["model"]
    assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []
    assert losses(folder) == losses(uninterrupted)
