"""A run's folder: which configs may use it, when its run is finished, its stored config and summary."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from conftest import ROOT, sentences, snapshot, write_jsonl
from omegaconf import OmegaConf

import main
from src.cli import log
from src.config import to_dict
from src.convert_dataset import main as convert
from src.errors import RunFailed, UserError
from src.files import read_json_lines
from src.mlm.task import CURVES, MaskedLM, PretrainConfig
from src.training import run as run_folder
from src.training.config import load_config


@pytest.fixture
def config(config_file) -> PretrainConfig:
    return load_config(PretrainConfig, "main.py", "", [str(config_file)])


def store(config: PretrainConfig, folder: Path, **changes) -> None:
    """Store this config with changes in a folder, as a run does."""
    folder.mkdir()
    OmegaConf.save(OmegaConf.create({**to_dict(config), **changes}), folder / "config.yaml")


def test_a_new_an_empty_and_the_runs_own_folder_are_accepted(config, tmp_path):
    run_folder.check_save_folder(config, tmp_path / "new")
    (tmp_path / "empty").mkdir()
    run_folder.check_save_folder(config, tmp_path / "empty")
    store(config, tmp_path / "own")
    run_folder.check_save_folder(config, tmp_path / "own")


def test_the_config_is_written_atomically_and_only_if_it_has_changed(config, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    run_folder.save_config(config, folder)
    files = snapshot(folder)
    run_folder.save_config(config, folder)
    assert snapshot(folder) == files and list(files) == ["config.yaml"]

    def full_disk(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_folder, "write_atomically", full_disk)
    config.max_duration = "9ba"
    with pytest.raises(UserError, match=f"save_folder: cannot write to {folder}: No space left on device"):
        run_folder.save_config(config, folder)
    assert snapshot(folder)["config.yaml"] == files["config.yaml"]


@pytest.mark.parametrize("key", ["eval_interval", "save_interval", "device_train_microbatch_size"])
def test_settings_that_do_not_affect_numbers_may_change_on_resume(config, tmp_path, key):
    store(config, tmp_path / "run", **{key: "something else"})
    run_folder.check_save_folder(config, tmp_path / "run")


STREAM = "train_loader.dataset.streams.web"


def changed(config_file: Path, folder: Path, override: str) -> PretrainConfig:
    """A config with this override, whose folder holds a run without it."""
    given = [str(config_file), f"{STREAM}={{local: web, proportion: 1}}"]
    store(load_config(PretrainConfig, "main.py", "", given), folder)
    return load_config(PretrainConfig, "main.py", "", [*given, override])


@pytest.mark.parametrize(
    "override",
    [
        "data_local=/elsewhere",
        "data_remote=s3://bucket",
        "train_loader.num_workers=3",
        "eval_loader.dataset.predownload=9",
        "train_loader.dataset.cache_limit=9gb",
        f"{STREAM}.local=/elsewhere",
    ],
)
def test_data_may_move_on_resume(config_file, tmp_path, override):
    now = changed(config_file, tmp_path / "run", override)
    run_folder.check_save_folder(now, tmp_path / "run")


@pytest.mark.parametrize(
    "override",
    [
        "train_loader.dataset.mlm_probability=0.5",
        "eval_loader.dataset.split=test",
        "train_loader.dataset.packing=true",
        "train_loader.drop_last=false",
        "train_loader.dataset.seed=99",
        f"{STREAM}.proportion=0.5",
        "load_path=other.pt",
    ],
)
def test_settings_of_the_data_may_not_change_on_resume(config_file, tmp_path, override):
    now = changed(config_file, tmp_path / "run", override)
    name = override.split("=")[0]
    with pytest.raises(UserError, match=rf"differs in {name};"):
        run_folder.check_save_folder(now, tmp_path / "run")


def test_a_key_newer_than_the_run_has_its_default(config, tmp_path):
    stored = {name: value for name, value in to_dict(config).items() if name != "float32_matmul_precision"}
    del stored["train_loader"]["dataset"]["whole_word_masking"]
    (tmp_path / "run").mkdir()
    OmegaConf.save(OmegaConf.create({**stored, "key_of_an_old_version": 1}), tmp_path / "run" / "config.yaml")
    run_folder.check_save_folder(config, tmp_path / "run")
    config.float32_matmul_precision = "high"
    with pytest.raises(UserError, match="differs in float32_matmul_precision;"):
        run_folder.check_save_folder(config, tmp_path / "run")


def test_checkpoints_without_a_config_are_rejected(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ep0-ba3-rank0.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"has checkpoints but no config\.yaml"):
        run_folder.check_save_folder(config, tmp_path / "run")


def test_a_corrupt_stored_config_is_reported(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: [1\n")
    with pytest.raises(UserError, match=r"config\.yaml is corrupt"):
        run_folder.check_save_folder(config, tmp_path / "run")


@pytest.mark.parametrize(
    "key",
    [
        "model",
        "tokenizer_name",
        "optimizer",
        "scheduler",
        "global_train_batch_size",
        "seed",
        "max_seq_len",
        "mlm_probability",
    ],
)
def test_settings_that_make_another_run_are_rejected_by_name(config, tmp_path, key):
    store(config, tmp_path / "run", **{key: "something else"})
    with pytest.raises(UserError, match=rf"differs in {key};"):
        run_folder.check_save_folder(config, tmp_path / "run")


def test_a_run_is_finished_if_it_has_a_summary_and_the_same_config(config, tmp_path, monkeypatch):
    folder, trained = tmp_path / "run", []
    monkeypatch.setattr(MaskedLM, "check_paths", lambda task: None)
    monkeypatch.setattr(run_folder, "train", lambda task, folder, uploads: trained.append(folder))
    monkeypatch.setattr(run_folder, "print_summary", lambda folder, curves: None)
    config.save_folder = str(folder)

    def trains() -> bool:
        trained.clear()
        run_folder.run(MaskedLM(config))
        return trained == [folder]

    store(config, folder)
    assert trains()
    (folder / "summary.json").write_text("{}")
    assert not trains()
    config.log_level, config.progress_bar = "warning", not config.progress_bar
    assert not trains()
    config.max_duration = "9ba"
    assert trains()


def test_the_least_severe_message_to_print_is_chosen(config, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(MaskedLM, "check_paths", lambda task: log.info("begins"))
    monkeypatch.setattr(run_folder, "train", lambda task, folder, uploads: log.warning("slow"))
    monkeypatch.setattr(run_folder, "print_summary", lambda folder, curves: None)
    with caplog.at_level("INFO", logger="lion"):
        for config.log_level in ("info", "warning", "error"):
            run_folder.run(MaskedLM(config))
    assert caplog.messages == ["begins", "slow", "slow"]


def write_evaluations(folder: Path, losses: dict[int, float]) -> None:
    """Write metrics.jsonl with an evaluation at each step."""
    names = ("LanguageCrossEntropy", "MaskedAccuracy", "MostFrequentTokenAccuracy")
    lines = [
        {
            "step": step,
            "samples": 8 * step,
            "seconds": step / 2,
            "eval": dict(zip((f"eval/{name}" for name in names), (loss, 0.25, 0.125))),
        }
        for step, loss in losses.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("first", [0, 2])
def test_the_summary_has_the_first_the_best_and_the_last_evaluation(config, tmp_path, capsys, first):
    write_evaluations(tmp_path, {first: 4.0, 3: 2.0, 6: 3.0})
    run_folder.write_summary(MaskedLM(config), tmp_path, 6, 13290, "tiny")

    def result(step: int, loss: float) -> dict[str, float]:
        return {"step": step, "loss": loss, "accuracy": 0.25, "most_frequent_token": 0.125}

    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "run": "tiny",
        "parameters": 13290,
        "seconds": 3.0,
        "before": result(0, 4.0) if first == 0 else None,
        "best": result(3, 2.0),
        "after": result(6, 3.0),
        "best_by": "loss",
    }
    run_folder.print_summary(tmp_path, CURVES)
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split("   ")[-3:][0].strip() == "loss"
    rows = [line.split() for line in printed[2:] if line.startswith(("before", "best", "after"))]
    expected = [["before", "4.000"], ["best", "loss,", "step", "3", "2.000"], ["after", "3.000"]]
    assert rows == [[*row, "25.00%", "12.50%"] for row in (expected if first == 0 else expected[1:])]
    for damaged in ('{"run": "ti', "{}", "[]"):
        (tmp_path / "summary.json").write_text(damaged)
        with pytest.raises(UserError, match=r"summary.json is corrupt; delete it and repeat the command"):
            run_folder.print_summary(tmp_path, CURVES)


def test_an_evaluation_without_a_finite_loss_is_not_the_best(config, tmp_path):
    write_evaluations(tmp_path, {0: float("nan"), 3: 2.0, 6: float("inf")})
    run_folder.write_summary(MaskedLM(config), tmp_path, 6, 13290, "tiny")
    assert json.loads((tmp_path / "summary.json").read_text())["best"]["step"] == 3


def test_a_summary_that_cannot_be_written_ends_the_run_in_one_sentence(config, tmp_path, monkeypatch):
    write_evaluations(tmp_path, {0: 4.0})
    with pytest.raises(RunFailed, match="its last evaluation could not be written"):
        run_folder.write_summary(MaskedLM(config), tmp_path, 6, 13290, "tiny")
    write_evaluations(tmp_path, {0: 4.0, 6: 3.0})

    def full_disk(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_folder, "write_json", full_disk)
    with pytest.raises(RunFailed, match=r"finished and saved, but its summary is not \(No space left on device\)"):
        run_folder.write_summary(MaskedLM(config), tmp_path, 6, 13290, "tiny")


def test_an_evaluation_in_which_nothing_counted_is_reported(config, tmp_path):
    write_evaluations(tmp_path, {0: 4.0, 6: 3.0})
    path = tmp_path / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["eval"] = {}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=r"no loss, since nothing counted in it .* evaluate on more data"):
        run_folder.write_summary(MaskedLM(config), tmp_path, 6, 13290, "tiny")


# resume_with


@pytest.mark.slow
def test_a_resumed_run_takes_its_changed_settings_on_and_records_them(tmp_path, write_config, caplog):
    config = write_config(tmp_path, save_interval="2ba", eval_interval="100ba", loggers={}, eval_first=False)
    command, run = [str(config), "max_duration=4ba"], tmp_path / "run"
    main.main(command)
    lrs = {line["step"]: line["lr"] for line in read_json_lines(run / "metrics.jsonl") if "lr" in line}
    changes = ["optimizer.lr=0.1", "optimizer.weight_decay=0.5", "global_train_batch_size=16", "scheduler.t_warmup=0ba"]
    command = [str(config), "max_duration=8ba", *changes]
    with pytest.raises(
        UserError, match=r"differs in global_train_batch_size, optimizer.lr, optimizer.weight_decay, scheduler.t_warmup"
    ):
        main.main(command)
    keys = "optimizer.lr,optimizer.weight_decay,scheduler.t_warmup,global_train_batch_size"
    mean_it = rf"to change them on purpose, set resume_with=\[{keys}"
    with pytest.raises(UserError, match=rf"differs in global_train_batch_size, scheduler.t_warmup; .*{mean_it}"):
        main.main([*command, "resume_with=[optimizer.lr,optimizer.weight_decay]"])
    with pytest.raises(
        UserError,
        match=r"differs in global_train_batch_size, optimizer.lr, optimizer.weight_decay, scheduler.t_warmup, seed; "
        r".* its config.yaml$",
    ):
        main.main([*command, "seed=3"])
    allowed = "resume_with=[optimizer.lr,optimizer.weight_decay,scheduler,global_train_batch_size]"
    with caplog.at_level("INFO", logger="lion"):
        main.main([*command, allowed])
    old_lr = OmegaConf.load(ROOT / "yamls" / "pretrain" / "recipe.yaml").optimizer.lr
    assert f"optimizer.lr: {old_lr} up to step 4, 0.1 from now on" in caplog.text
    (entry,) = OmegaConf.to_container(OmegaConf.load(run / "config.yaml").history)
    assert entry["step"] == 4
    assert entry["changed"]["optimizer.lr"] == [old_lr, 0.1]
    assert entry["changed"]["global_train_batch_size"] == [8, 16]
    lines = read_json_lines(run / "metrics.jsonl")
    assert [line["changed"] for line in lines if "changed" in line] == [entry["changed"]]
    found = {line["step"]: line for line in lines if "lr" in line}
    assert [found[step]["lr"] for step in range(1, 5)] == list(lrs.values())
    assert 0.01 < found[8]["lr"] < found[6]["lr"] < found[5]["lr"] < 0.1
    assert found[8]["samples"] == 4 * 8 + 4 * 16
    groups = torch.load(run / "latest-rank0.pt", weights_only=False)["state"]["optimizers"]["FusedDecoupledAdamW"]
    assert {group["initial_lr"] for group in groups["param_groups"]} == {0.1}
    assert 0.5 in {group["weight_decay"] for group in groups["param_groups"]}
    main.main([*command, allowed])  # finished
    main.main([str(run / "config.yaml"), "max_duration=9ba"])  # nothing else changes
    history = OmegaConf.to_container(OmegaConf.load(run / "config.yaml").history)
    assert history == [entry, {"step": 8, "changed": {"max_duration": ["8ba", "9ba"]}}]


@pytest.mark.slow
def test_a_refused_continuation_leaves_a_finished_run_as_it_is(tmp_path, write_config):
    command = [str(write_config(tmp_path, loggers={}, eval_first=False)), "max_duration=4ba"]
    main.main(command)
    files = snapshot(tmp_path / "run")
    few = write_jsonl(tmp_path / "few.jsonl", sentences(9))
    convert(["--data_files", str(few), "--splits", "train", "--out_root", str(tmp_path / "fewer")])
    with pytest.raises(UserError, match=r"this data has 9, but the checkpoint's position is after 32 samples"):
        main.main([*command, "max_duration=9ba", f"train_loader.dataset.local={tmp_path}/fewer"])
    after = snapshot(tmp_path / "run")
    assert {name: after[name] for name in files} == files
    assert all(name.startswith("tensorboard/") for name in after.keys() - files)  # it opens a file at once
    main.main(command)  # finished


@pytest.mark.slow
def test_an_epoch_goes_on_with_another_batch_size_and_schedule(tmp_path, write_config):
    main.main([str(write_config(tmp_path, loggers={}, eval_first=False)), "max_duration=4ba"])  # of six in an epoch
    stored = tmp_path / "run" / "config.yaml"
    config = OmegaConf.load(stored)
    config.scheduler = {"name": "constant_with_warmup", "t_warmup": "0ba", "alpha": 0.5}
    OmegaConf.save(config, tmp_path / "changed.yaml")
    changed = [str(tmp_path / "changed.yaml"), "max_duration=1ep", "global_train_batch_size=16"]
    main.main([*changed, "resume_with=[scheduler,global_train_batch_size]"])
    (entry,) = OmegaConf.to_container(OmegaConf.load(stored).history)
    assert entry["changed"]["scheduler.alpha_f"] == [0.02, None]
    assert entry["changed"]["scheduler.alpha"] == [None, 0.5]
    lines = [line for line in read_json_lines(tmp_path / "run" / "metrics.jsonl") if "lr" in line]
    assert [line["samples"] for line in lines] == [8, 16, 24, 32, 48]  # of 49, and the last is written
    assert lines[-1]["lr"] == 0.5 * config.optimizer.lr
    with pytest.raises(UserError, match=r"ep1-ba5-rank0.pt is at 1ep, so max_duration=1ep leaves nothing to train"):
        main.main([*changed, "optimizer.lr=0.1", "resume_with=[optimizer.lr]"])


@pytest.mark.parametrize("name", ["seed", "model.hidden_size", "optimizer", "optimizer.name", "scheduler.", "lr"])
def test_only_rates_schedule_and_batch_size_can_change(config_file, name):
    with pytest.raises(UserError, match=rf"^resume_with: {name} cannot change; choose from"):
        load_config(PretrainConfig, "main.py", "", [str(config_file), f"resume_with=[{name}]"])
