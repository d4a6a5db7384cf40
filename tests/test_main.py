"""Pretraining as a user runs it: run outputs, finished and resumed runs, and settings that must not change a result."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
import warm
from conftest import ROOT, TINY_MODEL, Result, assert_one_sentence, run, snapshot
from omegaconf import OmegaConf

import main
from src.config import read_stored
from src.errors import UserError
from src.files import exclusive_lock
from src.mlm.task import PretrainConfig
from src.training import run as run_folder
from src.training.config import load_config

pytestmark = pytest.mark.slow  # every test needs a run
PNG = b"\x89PNG\r\n\x1a\n"


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def batches(lines: list[dict], of: str) -> list[int]:
    return [line["step"] for line in lines if of in line]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, write_config) -> tuple[Path, Path, Result]:
    """Config file, save_folder and output of a run of 6 steps, killed before its first checkpoint and started again."""
    folder = tmp_path_factory.mktemp("finished")
    config = write_config(folder)
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text('{"step": 1, "samples": 8, "loss": -1}\n{"step": 2, "sam')
    (folder / "temporary").mkdir()
    result = run("main.py", config, cwd=folder, fresh=True, TMPDIR=str(folder / "temporary"))
    assert result.returncode == 0, result.stderr
    return config, folder / "run", result


def test_a_run_writes_metrics_curves_checkpoints_and_event_files(finished):
    _, folder, _ = finished
    lines = metrics(folder)
    assert batches(lines, "eval") == [0, 3, 6]
    assert batches(lines, "loss") == [1, 2, 3, 4, 5, 6]
    assert all(line["loss"] > 0 for line in lines if "loss" in line)
    for line in lines:
        if "eval" in line:
            assert set(line["eval"]) == {
                f"eval/{name}" for name in ("LanguageCrossEntropy", "MaskedAccuracy", "MostFrequentTokenAccuracy")
            }
    assert (folder / "curves.png").read_bytes().startswith(PNG)
    assert [path for path in (folder / "tensorboard").rglob("events.out.tfevents.*") if path.stat().st_size]
    checkpoint = torch.load(folder / "latest-rank0.pt", weights_only=False)
    assert checkpoint["state"]["timestamp"]["Timestamp"]["batch"] == 6
    assert {path.name.split("-")[1] for path in folder.glob("ep*.pt")} == {"ba3", "ba6"}
    assert OmegaConf.load(folder / "config.yaml").model.mixer == "lion-s"


def test_a_run_prints_its_plan_and_where_its_results_are(finished):
    _, folder, result = finished
    for words in ("lion-s, 1 layers of 32", "samples in", "6ba: 6 steps of 8 samples", str(folder)):
        assert words in result.stderr
    assert result.stderr.count("composer: The warmup duration is 0.") == 1  # a warning that a user can act on
    for words in ("before", "after", "latest-rank0.pt", "curves.png", "metrics.jsonl"):
        assert words in result.stdout
    assert re.search(r"first step after \d+\.\d s: \d+\.\d imports, .* first step", result.stderr)
    assert "Warning" not in result.stderr
    assert re.search(r"^padding: [\d.]+% of the positions$", result.stderr, re.MULTILINE)


def test_a_run_leaves_no_locks_of_streaming_behind(finished):
    assert not [path.name for path in (finished[1].parent / "temporary").iterdir() if path.name.endswith("filelock")]


def test_training_changes_every_weight(finished):
    first, last = (
        torch.load(next(finished[1].glob(f"ep*-{batch}-rank0.pt")), weights_only=False)["state"]["model"]
        for batch in ("ba3", "ba6")
    )
    assert [name for name in first if torch.equal(first[name], last[name])] == []


def test_repeating_the_command_changes_nothing_and_prints_the_result(finished):
    config, folder, before = finished
    files = snapshot(folder)
    result = run("main.py", config)
    assert result.returncode == 0
    assert result.stdout == before.stdout
    assert "tiny is already finished with this config" in result.stderr
    assert snapshot(folder) == files


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.hidden_size=64", ["save_folder", "differs in model", "choose another folder"]),
        ("seed=18", ["save_folder", "differs in seed"]),
        ("autoresume=false", ["save_folder", "already holds a run"]),
        ("max_duration=5ba", ["save_folder", "ba6-rank0.pt is at 6ba, so max_duration=5ba leaves nothing"]),
        ("max_duration=48sp", ["save_folder", "ba6-rank0.pt is at 48sp, so max_duration=48sp leaves nothing"]),
    ],
)
def test_another_run_is_rejected_and_leaves_a_finished_one_unchanged(finished, override, words):
    config, folder, _ = finished
    files = snapshot(folder)
    with pytest.raises(UserError) as error:
        main.main([str(config), override])
    for word in words:
        assert word in str(error.value)
    assert snapshot(folder) == files


def test_a_longer_run_may_use_the_folder_of_a_finished_one(finished):
    config = load_config(PretrainConfig, "main.py", "", [str(finished[0]), "max_duration=9ba"])
    run_folder.check_save_folder(config, finished[1])


def test_a_command_rejects_a_mistake_in_one_sentence(config_file, tmp_path):
    result = run("main.py", config_file, "data_local=no/such/shards", cwd=tmp_path)
    assert_one_sentence(result, "data_local", "no/such/shards", "does not exist", "convert_dataset.py")
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_that_is_not_on_the_hub_is_reported_before_anything_is_written(config_file, tmp_path):
    with pytest.raises(UserError, match=r"^tokenizer_name: cannot load nobody/nothing: .*Hub.*; give a folder"):
        main.main([str(config_file), "tokenizer_name=nobody/nothing"])
    assert not (tmp_path / "run").exists()


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder) if "loss" in line]


def test_packing_devices_microbatches_workers_and_resuming_change_only_rounding(tmp_path, write_config, caplog):
    """A plain run, and a packed one that resumes in the middle of epochs, on one device, then two, then one again."""
    same = {
        "model": {**TINY_MODEL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "scheduler": {"t_warmup": "0ba", "alpha_f": 1.0},  # the same rate whatever the duration
        "eval_interval": "25ba",
        "save_interval": "25ba",
        "loggers": {},
        "global_train_batch_size": 8,
    }
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
        assert "less than a minute left at" in caplog.text
        main.main([str(packed), "max_duration=2ba"])
        statuses, output = warm.run_ranks(2, "main.py", packed, "max_duration=22ba", output=tmp_path / "output")
        assert statuses == [0, 0], output
        assert "resuming from step 2\n" in output
        main.main([str(packed), "max_duration=25ba", "train_loader.num_workers=2", "device_train_microbatch_size=8"])
        assert "resuming from step 22" in caplog.text
        assert re.search(r"padding: [\d.]+% of the positions, [\d.]+% without packing", caplog.text)
    expected, found = losses(tmp_path / "plain" / "run"), losses(tmp_path / "packed" / "run")
    assert len(expected) == len(found) == 25
    assert found == pytest.approx(expected, rel=1e-5)
    evaluations = [metrics(tmp_path / name / "run")[-1]["eval"] for name in ("plain", "packed")]
    assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-4)
    shares = [line for line in metrics(tmp_path / "packed" / "run") if "loss" in line][-1]
    assert 0 < shares["padding"] < shares["padding_without_packing"]


# In this process


def test_a_folder_that_another_command_uses_is_rejected_before_anything_is_written(config_file, tmp_path):
    with exclusive_lock(tmp_path / "run", "main.py"), pytest.raises(UserError, match=r"another main\.py is running in"):
        main.main([str(config_file)])
    assert not (tmp_path / "run").exists()


def test_only_the_main_process_prints_the_result(finished, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    main.main([str(finished[0])])
    assert capsys.readouterr().out == ""


def test_a_compiled_model_trains_as_an_uncompiled_one(finished, tmp_path):
    from torch._dynamo.utils import counters

    # A compiled model draws different random numbers.
    without_dropout = "model.hidden_dropout_prob=0", "model.attention_probs_dropout_prob=0", "loggers={}"
    without_dropout += ("max_seq_len=64",)  # more than all texts have
    counters.clear()
    for name, compiled in (("plain", []), ("compiled", ["compile_config.backend=eager"])):
        main.main([str(finished[0]), f"save_folder={tmp_path / name}", *without_dropout, *compiled])
    # Batches of several lengths, with and without gradients: each size that varies is compiled once more, then no more.
    assert 2 <= counters["stats"]["unique_graphs"] <= 6 and not counters["graph_break"]
    torch._dynamo.reset()
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


def test_a_model_that_cannot_be_compiled_is_reported_with_the_way_out(config_file):
    from torch._dynamo import register_backend, reset

    @register_backend(name="broken")
    def broken(graph, inputs):
        raise ValueError("no such instruction")

    with pytest.raises(UserError, match=r"compile_config: .*: no such instruction; set compile_config=null"):
        main.main([str(config_file), "compile_config.backend=broken"])
    reset()


def test_a_signal_while_the_model_is_compiled_is_no_fault_of_the_model(config_file, caplog):
    from torch._dynamo import register_backend, reset

    @register_backend(name="interrupted")
    def interrupted(graph, inputs):
        signal.raise_signal(signal.SIGTERM)
        raise RuntimeError("the compiler was terminated")

    with pytest.raises(SystemExit) as error:
        main.main([str(config_file), "compile_config.backend=interrupted", "eval_first=false"])
    assert error.value.code == 128 + signal.SIGTERM
    assert "interrupted while the model was compiled" in caplog.text
    reset()


def test_a_run_continues_compiled_or_not_as_it_began(config_file, tmp_path):
    auto = load_config(PretrainConfig, "main.py", "", [str(config_file), "compile_config=auto"])
    path = tmp_path / "config.yaml"
    assert run_folder.as_begun(auto, read_stored(path, PretrainConfig)) == {}  # a new run
    once = read_stored(ROOT / "tests/fixtures/finished/config.yaml", PretrainConfig)
    assert run_folder.as_begun(auto, once) == {"compile_config": None}  # as all runs once were
    for stored in ("auto", {}, {"mode": "reduce-overhead"}, None):
        auto.compile_config = stored
        run_folder.save_config(auto, tmp_path)
        for now in ("auto", {"dynamic": True}, None):
            auto.compile_config = now
            expected = {"compile_config": stored} if now == "auto" else {}
            assert run_folder.as_begun(auto, read_stored(path, PretrainConfig)) == expected


def test_recomputing_layers_in_the_backward_pass_changes_nothing(finished, tmp_path, monkeypatch):
    from src.lion.mixers import Attention

    calls, project = [], Attention.project
    monkeypatch.setattr(Attention, "project", lambda self, *x: calls.append(self.training) or project(self, *x))
    for name, again in (("once", False), ("twice", True)):
        calls.append(name)
        main.main(
            [str(finished[0]), f"save_folder={tmp_path / name}", f"activation_checkpointing={again}", "loggers={}"]
        )
    second = calls.index("twice")
    assert calls[second:].count(True) == 2 * calls[:second].count(True) > 0
    assert losses(tmp_path / "twice") == losses(tmp_path / "once") == losses(finished[1])


def test_an_evaluation_that_a_kill_prevented_is_repeated(finished, tmp_path):
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


def test_a_run_saved_at_an_epochs_last_step_is_finished_and_can_be_extended(tmp_path, write_config):
    config = write_config(tmp_path, loggers={}, max_duration="1ep", save_interval="6ba", eval_interval="4ba")
    folder = tmp_path / "run"
    main.main([str(config)])
    lines = metrics(folder)
    assert batches(lines, "eval") == [0, 4, 6]
    assert (folder / "latest-rank0.pt").resolve().name == "ep0-ba6-rank0.pt"  # 6 steps per epoch
    (folder / "summary.json").unlink()  # as if killed before it
    main.main([str(config)])
    assert metrics(folder) == lines
    main.main([str(config), "max_duration=2ep"])
    assert batches(metrics(folder), "loss") == list(range(1, 13))
    assert batches(metrics(folder), "eval") == [0, 4, 6, 8, 12]
