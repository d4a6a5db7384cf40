"""Pretraining as a user runs it: what a run leaves, that it is not done twice, that it survives a kill, what it refuses."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import PARITY, ROOT, TINY_MODEL, Result, assert_one_sentence, environment, needs_reference, run, snapshot
from omegaconf import OmegaConf
from safetensors.torch import load_file

import main
from src.config import load, to_dict
from src.errors import UserError
from src.files import exclusive_lock
from src.mlm.config import PretrainConfig

PNG = b"\x89PNG\r\n\x1a\n"


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def batches(lines: list[dict], of: str) -> list[int]:
    return [line["step"] for line in lines if of in line]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, write_config) -> tuple[Path, Path, Result]:
    """Config file, save_folder and output of a run of 6 steps, where an earlier try was killed before its first checkpoint."""
    folder = tmp_path_factory.mktemp("finished")
    config = write_config(folder)
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text('{"step": 1, "samples": 8, "loss": -1}\n{"step": 2, "sam')
    result = run("main.py", config, cwd=folder)
    assert result.returncode == 0, result.stderr
    return config, folder / "run", result


def test_a_run_leaves_metrics_curves_checkpoints_and_event_files(finished):
    _, folder, _ = finished
    lines = metrics(folder)
    assert batches(lines, "eval") == [0, 3, 6]
    assert batches(lines, "loss") == [1, 2, 3, 4, 5, 6]
    assert all(line["loss"] > 0 for line in lines if "loss" in line)
    for line in lines:
        if "eval" in line:
            assert set(line["eval"]) == {f"eval/{name}" for name in ("LanguageCrossEntropy", "MaskedAccuracy", "MostFrequentTokenAccuracy")}  # fmt: skip
    assert (folder / "curves.png").read_bytes().startswith(PNG)
    assert [path for path in (folder / "tensorboard").rglob("events.out.tfevents.*") if path.stat().st_size]
    checkpoint = torch.load(folder / "latest-rank0.pt", weights_only=False)
    assert checkpoint["state"]["timestamp"]["Timestamp"]["batch"] == 6
    assert {path.name.split("-")[1] for path in folder.glob("ep*.pt")} == {"ba3", "ba6"}
    assert OmegaConf.load(folder / "config.yaml").model.mixer == "lion-s"


def test_a_run_says_what_it_will_do_and_where_the_result_lies(finished):
    _, folder, result = finished
    for words in ("lion-s, 1 layers of 32", "samples in", "6ba: 6 steps of 8 samples", str(folder)):
        assert words in result.stderr
    for words in ("before", "after", "latest-rank0.pt", "curves.png", "metrics.jsonl"):
        assert words in result.stdout
    assert re.search(r"first step after \d+\.\d s: \d+\.\d imports, .* first step", result.stderr)
    assert "Warning" not in result.stderr


def test_training_changes_every_weight(finished):
    first, last = (
        torch.load(next(finished[1].glob(f"ep*-{batch}-rank0.pt")), weights_only=False)["state"]["model"]
        for batch in ("ba3", "ba6")
    )
    assert [name for name in first if torch.equal(first[name], last[name])] == []


def test_the_same_command_again_changes_nothing_and_shows_the_result(finished):
    config, folder, before = finished
    files = snapshot(folder)
    result = run("main.py", config)
    assert result.returncode == 0
    assert result.stdout == before.stdout
    assert "finished already" in result.stderr
    assert snapshot(folder) == files


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.hidden_size=64", ["save_folder", "another model", "another folder"]),
        ("seed=18", ["save_folder", "another seed"]),
        ("autoresume=false", ["save_folder", "already holds a run"]),
        ("max_duratoin=3ba", ["unknown key max_duratoin", "did you mean max_duration?"]),
    ],
)
def test_another_run_is_refused_and_the_finished_one_left_alone(finished, override, words):
    config, folder, _ = finished
    files = snapshot(folder)
    assert_one_sentence(run("main.py", config, override), *words)
    assert snapshot(folder) == files


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("max_duration=soon", ["max_duration", "soon"]),
        ("load_path=nowhere.pt", ["load_path", "nowhere.pt"]),
        ("tokenizer_name=nobody/nothing", ["tokenizer_name", "nobody/nothing", "Hub", "give a folder"]),
    ],
)
def test_what_cannot_be_used_is_named_before_anything_is_written(config_file, tmp_path, override, words):
    with pytest.raises(UserError) as error:
        main.main([str(config_file), override])
    for word in words:
        assert word in str(error.value)
    assert not (tmp_path / "run").exists()


def test_shards_that_are_not_there_are_told_in_one_sentence(config_file, tmp_path):
    result = run("main.py", config_file, "data_local=no/such/shards", cwd=tmp_path)
    assert_one_sentence(result, "data_local", "no/such/shards", "does not exist", "convert_dataset.py")
    assert not (tmp_path / "run").exists()


def test_a_killed_run_goes_on_from_its_last_checkpoint_to_the_same_end(tmp_path, write_config):
    config = write_config(tmp_path, max_duration="300ba", save_interval="5ba", eval_interval="50ba", loggers={}, save_num_checkpoints_to_keep=2)  # fmt: skip
    folder = tmp_path / "run"
    command = [sys.executable, ROOT / "main.py", config]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    try:
        while not list(folder.glob("ep*-ba20-rank0.pt")):
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline, "no checkpoint within 90 s"
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    left = metrics(folder)
    assert batches(left, "loss")[-1] < 300, "the run was over before it was killed"
    result = run("main.py", config)
    assert result.returncode == 0, result.stderr
    said = [line for line in result.stderr.splitlines() if line.startswith("going on from step ")]
    assert len(said) == 1
    step = int(said[0].rsplit(" ", 1)[-1])
    assert 15 <= step < 300
    assert step % 5 == 0  # 15 where the kill cut the file of step 20 in half
    lines = metrics(folder)
    assert batches(lines, "loss") == list(range(1, 301))
    assert batches(lines, "eval") == list(range(0, 301, 50))
    assert [line for line in left if line["step"] < step] == [line for line in lines if line["step"] < step]
    checkpoint = torch.load(folder / "latest-rank0.pt", weights_only=False)
    assert checkpoint["state"]["timestamp"]["Timestamp"]["batch"] == 300


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder) if "loss" in line]


def test_packing_devices_microbatches_workers_and_stops_change_nothing_but_rounding(tmp_path, write_config, caplog):
    """A plain run, and one with packed rows that goes on in the middle of epochs: one device, two for 20 steps, and one again."""
    same = {
        "model": {**TINY_MODEL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "scheduler": {"t_warmup": "0ba", "alpha_f": 1.0},  # the same rate however long the run is
        "eval_interval": "25ba", "save_interval": "25ba", "loggers": {}, "global_train_batch_size": 8,
    }  # fmt: skip
    for name in ("plain", "packed"):
        (tmp_path / name).mkdir()
    plain = write_config(tmp_path / "plain", **same, max_duration="25ba")
    packed = write_config(
        tmp_path / "packed",
        **same,
        device_train_microbatch_size=2,
        train_loader={"dataset": {"packing": True}, "num_workers": 1},
        eval_loader={"dataset": {"packing": True}, "num_workers": 0},
    )

    with caplog.at_level("INFO", logger="lion"):
        main.main([str(plain)])
        assert "about 0:01 hours left at" in caplog.text
        main.main([str(packed), "max_duration=2ba"])
        launch = [
            sys.executable,
            "-m",
            "composer.cli.launcher",
            "-n",
            "2",
            ROOT / "main.py",
            packed,
            "max_duration=22ba",
        ]
        two = subprocess.run(launch, env=environment(), capture_output=True, text=True, timeout=120)
        assert two.returncode == 0, two.stderr
        assert "going on from step 2" in two.stderr
        main.main([str(packed), "max_duration=25ba", "train_loader.num_workers=2", "device_train_microbatch_size=8"])
        assert "going on from step 22" in caplog.text
        assert re.search(r"padding: [\d.]+% of the positions, [\d.]+% without packing", caplog.text)
    expected, found = losses(tmp_path / "plain" / "run"), losses(tmp_path / "packed" / "run")
    assert len(expected) == len(found) == 25
    assert found == pytest.approx(expected, rel=1e-5)
    evaluations = [metrics(tmp_path / name / "run")[-1]["eval"] for name in ("plain", "packed")]
    assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-4)
    shares = [line for line in metrics(tmp_path / "packed" / "run") if "loss" in line][-1]
    assert 0 < shares["padding"] < shares["padding_without_packing"]


# In this process


def test_a_run_that_another_command_is_at_work_on_is_refused_before_anything_is_written(config_file, tmp_path):
    with exclusive_lock(tmp_path / "run", "main.py"), pytest.raises(UserError, match=r"another main\.py is at work in"):
        main.main([str(config_file)])
    assert not (tmp_path / "run").exists()


def test_the_main_process_alone_reports(finished, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    main.main([str(finished[0])])
    assert capsys.readouterr().out == ""


def test_a_compiled_model_trains_as_one_that_is_not(finished, tmp_path):
    from torch._dynamo.utils import counters

    # What is compiled draws other random numbers.
    without_dropout = "model.hidden_dropout_prob=0", "model.attention_probs_dropout_prob=0", "loggers={}"
    for name, compiled in (("plain", []), ("compiled", ["compile_config.backend=eager"])):
        main.main([str(finished[0]), f"save_folder={tmp_path / name}", *without_dropout, *compiled])
    assert counters["frames"]["ok"] > 0
    torch._dynamo.reset()
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


def test_layers_computed_again_in_the_backward_pass_change_nothing(finished, tmp_path, monkeypatch):
    from src.lion.mixers import Mixer

    calls, forward = [], Mixer.forward
    monkeypatch.setattr(Mixer, "forward", lambda self, *args: calls.append(self.training) or forward(self, *args))
    for name, again in (("once", False), ("twice", True)):
        calls.append(name)
        main.main(
            [str(finished[0]), f"save_folder={tmp_path / name}", f"activation_checkpointing={again}", "loggers={}"]
        )
    second = calls.index("twice")
    assert calls[second:].count(True) == 2 * calls[:second].count(True) > 0
    assert losses(tmp_path / "twice") == losses(tmp_path / "once") == losses(finished[1])


def test_an_evaluation_that_a_kill_prevented_is_made_up_for(finished, tmp_path):
    config, before, _ = finished
    folder = tmp_path / "run"
    shutil.copytree(before, folder, symlinks=True)
    (folder / "summary.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert "eval" in lines[-1]
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]))
    main.main([str(config), f"save_folder={folder}", "loggers={}"])
    assert [line.get("eval") for line in metrics(folder)] == [line.get("eval") for line in metrics(before)]
    names = ("before", "best", "after")
    summaries = [json.loads((place / "summary.json").read_text()) for place in (folder, before)]
    assert [summaries[0][name] for name in names] == [summaries[1][name] for name in names]


def test_a_run_saved_at_an_epochs_last_step_is_over_and_can_be_made_longer(tmp_path, write_config):
    config = write_config(tmp_path, loggers={}, max_duration="1ep", save_interval="6ba", eval_interval="4ba")
    folder = tmp_path / "run"
    main.main([str(config)])
    lines = metrics(folder)
    assert batches(lines, "eval") == [0, 4, 6]
    assert (folder / "latest-rank0.pt").resolve().name == "ep0-ba6-rank0.pt"  # 6 steps an epoch
    (folder / "summary.json").unlink()  # as if a kill had come before it
    main.main([str(config)])
    assert metrics(folder) == lines
    main.main([str(config), "max_duration=2ep"])
    assert batches(metrics(folder), "loss") == list(range(1, 13))
    assert batches(metrics(folder), "eval") == [0, 4, 6, 8, 12]


@pytest.fixture
def config(config_file) -> PretrainConfig:
    return load(PretrainConfig, "main.py", [str(config_file)])


def remember(config: PretrainConfig, folder: Path, **changes) -> None:
    folder.mkdir()
    OmegaConf.save(OmegaConf.create({**to_dict(config), **changes}), folder / "config.yaml")


def test_a_new_an_empty_and_an_own_folder_are_accepted(config, tmp_path):
    main.check_save_folder(config, tmp_path / "new")
    (tmp_path / "empty").mkdir()
    main.check_save_folder(config, tmp_path / "empty")
    remember(config, tmp_path / "own")
    main.check_save_folder(config, tmp_path / "own")


@pytest.mark.parametrize("name", ["file", "file/below/it"])
def test_a_file_is_no_save_folder(config, tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file; name another folder"):
        main.check_save_folder(config, tmp_path / name)


def test_a_save_folder_that_cannot_be_made_is_refused(config, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # as of another user's folder
    with pytest.raises(UserError, match=f"save_folder: {tmp_path} cannot be written to"):
        main.check_save_folder(config, tmp_path / "new")


def test_a_bucket_is_no_save_folder(config):
    config.save_folder = "s3://bucket/run"
    with pytest.raises(UserError, match="save_folder: s3://bucket/run is no folder of this machine"):
        main.check_save_folder(config, Path(config.save_folder))


def test_the_config_beside_a_run_is_written_whole_and_only_if_it_has_changed(config, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    main.remember(config, folder)
    files = snapshot(folder)
    main.remember(config, folder)
    assert snapshot(folder) == files and list(files) == ["config.yaml"]

    def full(_, path):
        path.write_text("hal")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(OmegaConf, "save", full)
    config.max_duration = "9ba"
    with pytest.raises(UserError, match=f"save_folder: cannot write to {folder}: No space left on device"):
        main.remember(config, folder)
    assert snapshot(folder)["config.yaml"] == files["config.yaml"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("save_interval=0ba", "save_interval: '0ba'"),
        ("save_interval=-5ba", "save_interval: '-5ba'"),
        ("eval_interval=500", "eval_interval: '500'"),
        ("max_duration=0.5dur", "max_duration: '0.5dur'"),
        ("seed=-1", "seed -1"),
        ("train_loader.dataset.seed=4294967296", "train_loader.dataset.seed 4294967296"),
        ("train_loader.num_workers=-1", "train_loader.num_workers -1"),
        ("device_eval_batch_size=0", "device_eval_batch_size 0"),
        ("eval_subset_num_batches=0", "eval_subset_num_batches 0"),
        ("save_num_checkpoints_to_keep=0", "save_num_checkpoints_to_keep 0"),
        ("max_seq_len=2", "max_seq_len 2"),
        (
            "activation_checkpointing=true fsdp_config.activation_checkpointing=true",
            "activation_checkpointing and fsdp_config.activation_checkpointing",
        ),
        ("eval_loader.dataset.max_seq_len=2", "eval_loader.dataset.max_seq_len 2"),
        (
            "train_loader.dataset.tokenizer_name=other",
            "train_loader.dataset.tokenizer_name other is not tokenizer_name",
        ),
        ("float32_matmul_precision=low", "float32_matmul_precision: 'low'"),
        (
            "on_nonfinite_loss=skip algorithms.gradient_clipping.clipping_type=value",
            "on_nonfinite_loss=skip cannot see an infinite gradient",
        ),
        ("compile_config=max-autotune", "compile_config"),
        ("ddp_sync_strategy=often", "ddp_sync_strategy: 'often' is none of single_auto_sync"),
        ("dist_timeout=0", "dist_timeout 0.0"),
        ("load_path=a.pt model.pretrained_checkpoint=b", "load_path and model.pretrained_checkpoint"),
        ("fsdp_config.shard_strategy=FULL_SHARD", "unknown key fsdp_config.shard_strategy"),
    ],
)
def test_values_that_no_run_can_have_are_refused(config_file, override, words):
    with pytest.raises(UserError, match=f"^{words}"):
        main.check(load(PretrainConfig, "main.py", [str(config_file), *override.split()]))


@pytest.mark.parametrize("loader", ["train_loader", "eval_loader"])
def test_the_longest_text_of_both_loaders_has_to_fit_the_positions(config_file, tokenizer, loader):
    overrides = ["model.mixer=lion-lit", f"{loader}.dataset.max_seq_len=256"]
    config = load(PretrainConfig, "main.py", [str(config_file), *overrides])
    with pytest.raises(UserError, match=r"max_seq_len 256 is more than model\.max_position_embeddings 128"):
        main.build_model(config, tokenizer)


@needs_reference
def test_a_checkpoint_of_the_papers_authors_is_a_start(tmp_path, write_config, tokenizer):
    path = write_config(tmp_path, model={"pretrained_checkpoint": str(PARITY / "legacy-nova.pt")})
    model = main.build_model(load(PretrainConfig, "main.py", [str(path)]), tokenizer).model.eval()
    tensors = load_file(PARITY / "legacy-nova.safetensors")
    inputs = {name[3:]: tensor for name, tensor in tensors.items() if name.startswith("in.")}
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        logits = model(**inputs).logits
    torch.testing.assert_close(logits[real], tensors["out.mlm_logits"][real], atol=1e-5, rtol=1e-5)


LOAD_PATHS = {
    "the end": ({}, [], "is at 6ba, so max_duration 6ba leaves nothing to train"),
    "another model": ({}, ["max_duration=9ba", "model.hidden_size=64"], "is of another model"),
    "another optimizer": ({}, ["max_duration=9ba", "optimizer.name=adamw"], "was trained with another optimizer"),
    "another rate": ({}, ["max_duration=9ba", "optimizer.lr=0.01"], "was trained with another optimizer"),
    "other groups": (
        {},
        ["max_duration=9ba", "optimizer.filter_bias_norm_wd=true"],
        "was trained with another optimizer",
    ),
    "cut short": ({"cut": True}, ["max_duration=9ba"], "is damaged"),
    "no checkpoint": ({"holds": {"weights": 1}}, ["max_duration=9ba"], "is no Composer checkpoint"),
    "no file": ({"name": "nowhere.pt"}, [], "is not a file"),
}


@pytest.mark.parametrize("changes, overrides, words", LOAD_PATHS.values(), ids=LOAD_PATHS.keys())
def test_a_checkpoint_that_cannot_be_gone_on_from_is_refused(finished, tokenizer, tmp_path, changes, overrides, words):
    path = tmp_path / "checkpoint.pt"
    shutil.copy(finished[1] / "latest-rank0.pt", path)
    if "cut" in changes:
        path.write_bytes(path.read_bytes()[:-500])
    if "holds" in changes:
        torch.save(changes["holds"], path)
    path = tmp_path / changes.get("name", path.name)
    config = load(PretrainConfig, "main.py", [str(finished[0]), f"load_path={path}", *overrides])
    with pytest.raises(UserError, match=re.escape(f"{path} {words}")):
        main.check_load_path(config, main.build_model(config, tokenizer))


def test_a_checkpoint_of_the_same_model_can_be_gone_on_from(finished, tokenizer):
    overrides = [f"load_path={finished[1] / 'latest-rank0.pt'}", "max_duration=9ba"]
    config = load(PretrainConfig, "main.py", [str(finished[0]), *overrides])
    main.check_load_path(config, main.build_model(config, tokenizer))


@pytest.mark.parametrize("key", ["eval_interval", "save_interval", "device_train_microbatch_size"])
def test_habits_of_a_run_may_change_on_the_way(config, tmp_path, key):
    remember(config, tmp_path / "run", **{key: "something else"})
    main.check_save_folder(config, tmp_path / "run")


STREAM = "train_loader.dataset.streams.web"


def changed(config_file: Path, folder: Path, override: str) -> PretrainConfig:
    """A config with this override, after a folder was given to a run without it."""
    given = [str(config_file), f"{STREAM}={{local: web, proportion: 1}}"]
    remember(load(PretrainConfig, "main.py", given), folder)
    return load(PretrainConfig, "main.py", [*given, override])


@pytest.mark.parametrize(
    "override",
    ["data_local=/elsewhere", "data_remote=s3://bucket", "train_loader.num_workers=3", "eval_loader.dataset.predownload=9",
     "train_loader.dataset.cache_limit=9gb", f"{STREAM}.local=/elsewhere"],
)  # fmt: skip
def test_data_may_move_and_be_fetched_otherwise_on_the_way(config_file, tmp_path, override):
    now = changed(config_file, tmp_path / "run", override)
    main.check_save_folder(now, tmp_path / "run")


@pytest.mark.parametrize(
    "override",
    ["train_loader.dataset.mlm_probability=0.5", "eval_loader.dataset.split=test", "train_loader.dataset.packing=true",
     "train_loader.drop_last=false", "train_loader.dataset.seed=99", f"{STREAM}.proportion=0.5", "load_path=other.pt"],
)  # fmt: skip
def test_what_the_data_are_stays_on_the_way(config_file, tmp_path, override):
    now = changed(config_file, tmp_path / "run", override)
    name = override.split("=")[0].removesuffix(".web.proportion")
    with pytest.raises(UserError, match=rf"another {name};"):
        main.check_save_folder(now, tmp_path / "run")


def test_a_run_is_prolonged_but_not_cut_short_of_what_is_done(finished):
    def ask(max_duration: str) -> None:
        config = load(PretrainConfig, "main.py", [str(finished[0]), f"max_duration={max_duration}"])
        main.check_save_folder(config, finished[1])

    ask("9ba"), ask("6ba")
    for shorter in ("5ba", "48sp"):
        with pytest.raises(UserError, match=rf"ep\d-ba6-rank0.pt is at .*, so max_duration {shorter} leaves nothing"):
            ask(shorter)


def test_a_key_newer_than_the_run_counts_as_its_default(config, tmp_path):
    stored = {name: value for name, value in to_dict(config).items() if name != "float32_matmul_precision"}
    del stored["train_loader"]["dataset"]["whole_word_masking"]
    (tmp_path / "run").mkdir()
    OmegaConf.save(OmegaConf.create({**stored, "key_of_long_ago": 1}), tmp_path / "run" / "config.yaml")
    main.check_save_folder(config, tmp_path / "run")
    config.float32_matmul_precision = "high"
    with pytest.raises(UserError, match="another float32_matmul_precision;"):
        main.check_save_folder(config, tmp_path / "run")


def test_checkpoints_of_which_nothing_tells_the_run_are_refused(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ep0-ba3-rank0.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"holds checkpoints but no config\.yaml"):
        main.check_save_folder(config, tmp_path / "run")


def test_a_stored_config_that_is_damaged_is_told(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: [1\n")
    with pytest.raises(UserError, match=r"config\.yaml is damaged"):
        main.check_save_folder(config, tmp_path / "run")


@pytest.mark.parametrize("key", ["model", "tokenizer_name", "optimizer", "scheduler", "global_train_batch_size", "seed", "max_seq_len", "mlm_probability"])  # fmt: skip
def test_what_makes_another_run_is_refused_by_name(config, tmp_path, key):
    remember(config, tmp_path / "run", **{key: "something else"})
    with pytest.raises(UserError, match=rf"another {key};"):
        main.check_save_folder(config, tmp_path / "run")


def test_a_finished_run_is_one_with_a_summary_and_the_same_config(config, tmp_path):
    folder = tmp_path / "run"
    remember(config, folder)
    assert not main.is_finished(config, folder)
    (folder / "summary.json").write_text("{}")
    assert main.is_finished(config, folder)
    config.max_duration = "9ba"
    assert not main.is_finished(config, folder)
