"""Loggers as a run uses them: the config as hyperparameters, and one run in W&B and MLflow for all parts of a run."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from composer import Event
from omegaconf import OmegaConf
from test_callback import FakeWorker

import main
from src.config import flatten
from src.errors import UserError
from src.mlm import evaluations
from src.mlm.finetune_eval import FinetuneEval
from src.training import run as run_folder
from src.training.loggers import MLflow, of_run, scalars
from src.training.registry import build_all

pytestmark = pytest.mark.slow  # they need a run
LOUD = """
from composer import Callback
steps = []
class Loud(Callback):
    def __init__(self, every: int = 1): self.every = every
    def batch_end(self, state, logger):
        if state.timestamp.batch.value % self.every == 0: steps.append(state.timestamp.batch.value)
"""


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, write_config) -> tuple[Path, Path]:
    """Config file and folder of a run of 6 steps that was extended to 9, with all loggers and a callback of its own."""
    pytest.importorskip("wandb", reason="needs wandb")
    pytest.importorskip("mlflow", reason="needs mlflow-skinny")
    folder = tmp_path_factory.mktemp("logged")
    (folder / "loud_callback.py").write_text(LOUD)
    chosen = {
        "wandb": {"project": "lion", "init_kwargs": {"mode": "offline", "dir": str(folder)}},
        "mlflow": {
            "tracking_uri": f"file:{folder}/mlruns",
            "log_system_metrics": False,
            "logging_buffer_seconds": None,
        },
        "file": {"filename": str(folder / "log.txt"), "overwrite": True},
    }
    config = write_config(
        folder,
        finetune_eval={"tasks": ["amount"], "interval": "2ba"},
        save_interval="1ba",
        loggers={**chosen, "tensorboard": {"log_dir": str(folder / "tensorboard")}},
        code_paths=[str(folder / "loud_callback.py")],
        callbacks={"loud_callback:Loud": {"every": 2}},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("WANDB_SILENT", "true")
        for name in ("MLFLOW_RUN_ID", "WANDB_RUN_ID", "WANDB_MODE", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):
            patch.delenv(name, raising=False)
        patch.setattr(FinetuneEval, "check_tasks", lambda *_: None)
        patch.setattr(evaluations, "Worker", FakeWorker)
        patch.setattr(FakeWorker, "started", [], raising=False)
        patch.setattr(FakeWorker, "is_running", lambda _: False)  # it has ended at the next step
        patch.setattr(evaluations, "read_report", lambda _: ({"finetune/amount/accuracy": 0.5}, []))
        main.main([str(config)])
        main.main([str(config), "max_duration=9ba"])
        yield config, folder


def wandb_parts(folder: Path) -> list[tuple[dict, dict[int, dict]]]:
    """Of each part of the run in W&B, its settings, and the values of each step."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    kept = json.loads((folder / "run" / "loggers-rank0.json").read_text())["wandb"]
    parts = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        assert path.name == f"run-{kept}.wandb"
        store, parts = DataStore(), [*parts, ({}, {})]
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = Record()
            record.ParseFromString(data)
            for entry in record.config.update:
                parts[-1][0][".".join(entry.nested_key) or entry.key] = json.loads(entry.value_json)
            if items := record.history.item:
                values = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
                parts[-1][1].setdefault(record.history.step.num, {}).update(values)
    return parts


def test_a_resumed_run_is_one_run_in_wandb(resumed):
    parts = wandb_parts(resumed[1])
    assert [settings["max_duration"] for settings, _ in parts] == ["6ba", "9ba"]
    assert [settings["optimizer"]["lr"] for settings, _ in parts] == [8e-4, 8e-4]
    assert [(min(steps), max(steps)) for _, steps in parts] == [(0, 6), (6, 9)]


def test_scores_of_an_evaluation_leave_the_losses_of_the_steps_around_it_in_wandb(resumed):
    parts = [values for _, values in wandb_parts(resumed[1])]
    losses = [step for part in parts for step, values in part.items() if "loss/train/total" in values]
    assert losses == list(range(9))
    scores = [(step, v["finetune/step"]) for part in parts for step, v in part.items() if "finetune/step" in v]
    assert scores == [(3, 2), (5, 4), (6, 6), (9, 8)]


def test_a_resumed_run_is_one_run_in_mlflow(resumed):
    from mlflow import MlflowClient

    _, folder = resumed
    client = MlflowClient(f"file:{folder}/mlruns")
    (run,) = client.search_runs([client.get_experiment_by_name("my-mlflow-experiment").experiment_id])
    assert run.info.run_id == json.loads((folder / "run" / "loggers-rank0.json").read_text())["mlflow"]
    assert run.info.status == "FINISHED"
    losses = client.get_metric_history(run.info.run_id, "loss/train/total")
    assert [metric.step for metric in sorted(losses, key=lambda metric: metric.step)] == list(range(9))
    settings = flatten(OmegaConf.to_container(OmegaConf.load(folder / "run" / "config.yaml")))
    began = {"max_duration": "6ba", "history": "[]"}
    expected = {name: str(value) for name, value in settings.items()} | began
    assert {name: run.data.params.get(name) for name in expected} == expected
    assert {name: run.data.tags[name] for name in began} == {name: str(settings[name]) for name in began}


def test_hyperparameters_in_tensorboard_and_log_files_are_exact(resumed):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    _, folder = resumed
    found = {}
    for path in (folder / "tensorboard").rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(path)).Reload()
        if "_hparams_/session_start_info" in events.summary_metadata:
            content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
            given = HParamsPluginData.FromString(content).session_start_info.hparams
            found |= {name: getattr(value, value.WhichOneof("kind")) for name, value in given.items()}
    assert (found["optimizer.weight_decay"], found["model.mixer"], found["eval_first"]) == (1e-5, "lion-s", True)
    assert '[hyperparameter]: optimizer.weight_decay: "1e-05"' in (folder / "log.txt").read_text()


@pytest.mark.parametrize(("rank", "own", "files"), [("1", True, 0), ("1", False, 1), ("0", True, 1)])
def test_ranks_above_0_write_event_files_only_if_they_are_asked_to(tmp_path, monkeypatch, rank, own, files):
    monkeypatch.setenv("RANK", rank)
    (logger,) = build_all("loggers", {"tensorboard": {"log_dir": str(tmp_path), "rank_zero_only": own}})
    state, upload = SimpleNamespace(run_name="tiny"), SimpleNamespace(upload_file=lambda **_: None)
    logger.run_event(Event.INIT, state, None)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.run_event(Event.EVAL_END, state, upload)
    logger.close(state, upload)
    assert len([*tmp_path.glob("tiny/events.*")]) == files


def test_files_without_a_place_of_their_own_are_in_the_runs_folder(tmp_path, capsys):
    file, tensorboard = of_run(build_all("loggers", {"file": None, "tensorboard": None}), tmp_path, False)
    assert (file.filename_format, tensorboard.log_dir) == (
        f"{tmp_path}/logs-rank{{rank}}.txt",
        f"{tmp_path}/tensorboard",
    )


def test_a_config_is_stored_as_given_so_that_a_finished_run_is_not_repeated(resumed, monkeypatch):
    config, folder = resumed  # Composer's logger adds to its arguments
    assert "id" not in OmegaConf.load(folder / "run" / "config.yaml").loggers.wandb.init_kwargs
    monkeypatch.setattr(run_folder, "train", None)
    main.main([str(config), "max_duration=9ba"])


def test_a_resumed_run_appends_to_its_log_file(resumed):
    found = re.findall(r"\[batch=(\d+)\]: loss/train/total:", (resumed[1] / "log.txt").read_text())
    assert [int(step) for step in found] == list(range(9))


def test_a_run_uses_a_callback_of_its_own(resumed):
    import loud_callback

    assert loud_callback.steps == [2, 4, 6, 8]


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_a_new_one_in_wandb(tmp_path):
    pytest.importorskip("wandb", reason="needs wandb")
    ids = tmp_path / "loggers-rank0.json"
    for resumes, kept in ((True, "earlier"), (False, None)):
        ids.write_text('{"wandb": "earlier"}')
        (logger,) = of_run(build_all("loggers", {"wandb": {}}), tmp_path, resumes)
        assert logger.kept_id() == kept


def test_a_service_that_refuses_a_run_ends_the_command_in_one_sentence(resumed, tmp_path, monkeypatch):
    _, folder = resumed
    (ids := tmp_path / "loggers-rank0.json").write_text('{"mlflow": "deleted"}')
    arguments = {"tracking_uri": f"file:{folder}/mlruns", "log_system_metrics": False}
    (logger,) = of_run(build_all("loggers", {"mlflow": arguments}), tmp_path, resumes=True)
    with pytest.raises(
        UserError, match=rf"loggers.mlflow cannot start its run: .*deleted.*delete {ids} to begin a new"
    ):
        logger.init(SimpleNamespace(run_name="tiny"), None)
    ids.write_text("{")
    with pytest.raises(UserError, match=f"{ids} is corrupt; delete it to begin a new run in mlflow"):
        logger.init(SimpleNamespace(run_name="tiny"), None)
    assert isinstance(logger, MLflow)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (logger,) = build_all("loggers", {"wandb": {"init_kwargs": {"dir": str(tmp_path)}}})
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(
        UserError, match=r"loggers.wandb cannot start its run: No API key .* omit it with loggers.wandb"
    ):
        logger.init(SimpleNamespace(run_name="tiny"), None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"projct": "lion"}, "unexpected keyword argument 'projct'; fix that, or omit it with loggers.wandb=false"),
        ({"mode": "offlin"}, "mode='offlin': Input should be 'online', 'offline', "),
        ({"id": "a/b"}, "Run ID cannot contain the characters"),
    ],
)
def test_a_mistake_in_the_arguments_of_wandb_ends_the_command_in_one_sentence(tmp_path, given, words):
    pytest.importorskip("wandb", reason="needs wandb")
    given = {"mode": "offline", "dir": str(tmp_path), **given}
    (logger,) = build_all("loggers", {"wandb": {"init_kwargs": given}})
    with pytest.raises(UserError, match=f"^loggers.wandb cannot start its run: .*{words}"):
        logger.init(SimpleNamespace(run_name="tiny"), None)


def test_hyperparameters_are_numbers_booleans_or_text():
    nested = {"a": {"b": 1, "c": 1e-5, "d": True}, "e": None, "f": [1, 2], "g": {}, "h.i:J": {"k": "l"}}
    flat = {"a.b": 1, "a.c": 1e-5, "a.d": True, "e": "None", "f": "[1, 2]", "g": "{}", "h.i:J.k": "l"}
    assert scalars(nested) == flat
