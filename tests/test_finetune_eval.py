"""The section `finetune_eval`: copies of a model that glue.py fine-tunes beside the run."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm
from composer import Time, Timestamp
from composer.loggers import WandBLogger
from conftest import sentences
from glue_files import write_yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_callback import FakeWorker
from test_main import metrics
from torch.utils.data import DataLoader

import glue
import main
from src.errors import UserError
from src.files import LATEST, METRICS, link, write_json
from src.mlm import evaluations, finetune_eval
from src.mlm.finetune_eval import FinetuneEval
from src.mlm.task import MaskedLM, PretrainConfig
from src.training.config import load_config
from src.training.run_log import RunLog

SCORE = "finetune/amount/accuracy"


def write_tasks(folder: Path) -> Path:
    """A config of glue.py with two tasks, of which one fails once it is trained."""
    rows = [f"{text},{'many' if len(text) > 100 else 'few'}" for text in sentences(24, seed=9)]
    (folder / "own.csv").write_text("\n".join(["words,amount", *rows]) + "\n")
    task = {"columns": ["words"], "label": "amount", "metrics": ["accuracy"], "epochs": 1, "batch_size": 8}
    task |= {"seeds": [5, 6], "files": dict.fromkeys(("train", "validation"), str(folder / "own.csv"))}
    return write_yaml(folder / "tasks.yaml", tasks={"amount": task, "diverging": {**task, "lr": 1e38}}, max_seq_len=32)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, write_config) -> tuple[Path, str]:
    """save_folder and output of a run of 5 steps that kept one checkpoint and fine-tuned the one of step 3."""
    folder = tmp_path_factory.mktemp("evaluated")
    section = {"tasks": ["amount", "diverging"], "interval": "0.6dur", "config": str(write_tasks(folder))}
    given = {"max_duration": "5ba", "log_interval": "5ba", "save_num_checkpoints_to_keep": 1}
    config = write_config(folder, finetune_eval=section, **given)
    status, output = warm.run("main.py", config, output=folder / "output")
    assert status == 0, output
    return folder / "run", output


@pytest.mark.slow
def test_scores_of_a_checkpoint_that_is_deleted_meanwhile_are_in_metrics_curves_summary_and_event_files(evaluated):
    folder, output = evaluated
    assert [path.name for path in folder.glob("ep*.pt")] == ["ep0-ba5-rank0.pt"]
    lines = metrics(folder)
    line = lines[-1]
    assert line == {"step": 3, "samples": 24, "seconds": line["seconds"], "finetune": {SCORE: line["finetune"][SCORE]}}
    score = line["finetune"][SCORE]
    result = json.loads((folder / "finetune/ep0-ba3/jobs/amount-5/result.json").read_text())
    assert score == result["score"] > 0
    assert [line["step"] for line in lines if "eval" in line] == [0, 3, 5]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["finetuned"] == [{"step": 3, SCORE: score}] and summary["after"]["step"] == 5
    assert "\nthe run is trained and saved; waiting for: fine-tuning\n" in output
    assert f"\nep0-ba3: amount accuracy {score:.2%}\n" in output
    assert f"\nfine-tuned    amount accuracy {score:.2%}, from step 3\n" in output
    logged = []
    for path in (folder / "tensorboard").rglob("events.*"):
        events = EventAccumulator(str(path)).Reload()
        logged += events.Scalars(SCORE) if SCORE in events.Tags()["scalars"] else []
    assert [(event.step, round(event.value, 6)) for event in logged] == [(3, round(score, 6))]
    assert {path.name for path in (folder / "finetune").iterdir()} == {"ep0-ba3", "tokens"}
    assert [path.stem for path in sorted(folder.glob("finetune/**/*.safetensors"))] == ["amount", "diverging"]
    assert not [*folder.glob("finetune/*/*.pt")]


@pytest.mark.slow
def test_a_failing_task_warns_with_its_log_and_the_others_are_scored(evaluated):
    folder, output = evaluated
    (warning,) = re.findall("^.*fine-tuning failed.*$", output, re.MULTILINE)
    why = f"diverging seed 5: the trained model's predictions are non-finite; set a smaller lr (log: {folder}"
    assert warning.startswith(f"ep0-ba3: fine-tuning failed ({why}/finetune/ep0-ba3/jobs/diverging-5/log.txt)), log: ")
    assert "Traceback" not in output


# With processes that a test ends


class Evaluation(FakeWorker):
    """glue.py, whose score is given."""

    @property
    def given(self) -> dict[str, str]:
        _, (_, *arguments) = self.arguments
        return {name: json.loads(value) for name, value in (each.split("=", 1) for each in arguments[:-1])}

    @property
    def name(self) -> str:
        return Path(self.given["save_folder"]).name

    def end(self, score: float | None = None, why: str | None = None) -> None:
        super().end(why)
        folder = Path(self.given["save_folder"])
        if score is not None:
            (folder / "jobs/amount-5").mkdir(parents=True)
            write_json(folder / "jobs/amount-5/result.json", {"scores": {"dev": {"accuracy": score}}})
            row = {"task": "amount", "metrics": ["accuracy"], "folders": {"5": "amount-5"}}
            write_json(folder / "report.json", {"tasks": [row], "failed": []})


class Run:
    """A run of 100 steps that keeps one checkpoint, and starts at a step."""

    saved_batch = -1
    max_duration = Time(100, "ba")

    def __init__(self, folder: Path, start: int = 0, interval: str = "10ba", **settings):
        self.folder = folder
        settings = FinetuneEval(tasks=["amount"], interval=interval, **settings)
        self.evaluations = evaluations.FinetuneEvaluations(self, settings, "tiny", RunLog(folder, "1ba"))
        self.logged, self.late = [], []
        memory, wandb = SimpleNamespace(), WandBLogger.__new__(WandBLogger)
        memory.log_metrics = lambda values, step: self.logged.append((step, values[SCORE]))
        wandb.log_metrics = lambda values, step: self.late.append((values["finetune/step"], step))
        self.evaluations.logger = SimpleNamespace(destinations=(memory, wandb))
        self.evaluations.aside = True
        self.evaluations.after_load(self.state(start), None)

    def state(self, batch: int, counted: bool = False) -> SimpleNamespace:
        """The state after a step of an epoch of 20; counted: the epoch is counted too, if that was its last step."""
        epoch, at = divmod(batch, 20) if counted or not batch else (divmod(batch - 1, 20))
        in_epoch = at + (not counted and batch > 0)
        counts = {"batch_in_epoch": in_epoch, "sample_in_epoch": 8 * in_epoch}
        now = Timestamp(batch=batch, sample=8 * batch, epoch=epoch, **counts)
        loader = DataLoader(range(160), batch_size=8)
        return SimpleNamespace(timestamp=now, max_duration=self.max_duration, train_dataloader=loader)

    def steps(self, *batches: int, save: int = 1) -> None:
        """Train these steps and save those that are multiples of `save`."""
        for batch in batches:
            if batch % save == 0:
                self.save(batch)
            state = self.evaluations.state = self.state(batch)
            self.evaluations.batch_checkpoint(state, None)
            if batch % 20 == 0:
                self.evaluations.epoch_checkpoint(self.state(batch, counted=True), None)

    def save(self, batch: int) -> None:
        for old in self.folder.glob("*-rank0.pt"):
            old.unlink()
        path = self.folder / f"ep0-ba{batch}-rank0.pt"
        path.write_text(str(batch))
        link(self.folder / LATEST, path.name)
        self.saved_batch = batch

    def lines(self) -> list[tuple[int, float]]:
        path = self.folder / METRICS
        return [(line["step"], line["finetune"][SCORE]) for line in metrics(self.folder)] if path.exists() else []


@pytest.fixture
def started(monkeypatch) -> list[Evaluation]:
    monkeypatch.setattr(evaluations, "Worker", Evaluation)
    monkeypatch.setattr(Evaluation, "started", [], raising=False)
    return Evaluation.started


def test_the_first_checkpoint_at_or_after_each_interval_is_fine_tuned_one_at_a_time_while_training_goes_on(
    tmp_path, started
):
    run = Run(tmp_path)
    run.steps(*range(1, 41), save=4)  # checkpoints 12, 20, 32 and 40 are due
    assert [each.name for each in started] == ["ep0-ba12"]
    assert started[0].given["seeds"] == 1 and started[0].given["tasks_to_run"] == ["amount"]
    held = sorted((tmp_path / "finetune").glob("*/checkpoint.pt"))
    assert [path.read_text() for path in held] == ["12", "20", "32", "40"]
    assert Path(started[0].given["tokens_folder"]) == tmp_path / "finetune/tokens"  # shared by all
    assert Path(started[0].given["starting_checkpoint_load_path"]) == held[0]
    for number, score in enumerate((0.5, 0.6, 0.7)):
        started[number].end(score)
        run.steps(41 + number, save=4)
    assert [each.name for each in started] == ["ep0-ba12", "ep0-ba20", "ep0-ba32", "ep0-ba40"]
    assert run.lines() == [(12, 0.5), (20, 0.6), (32, 0.7)]
    assert metrics(tmp_path)[0]["samples"] == 96
    assert run.logged == run.lines()
    assert run.late == [(12, 41), (20, 42), (32, 43)]  # W&B drops values of earlier steps
    assert run.evaluations.is_busy()  # so that the end of the run waits
    started[3].end(0.8)
    assert not run.evaluations.is_busy()
    assert not [*(tmp_path / "finetune").glob("*/checkpoint.pt")]


@pytest.mark.parametrize("interval", ["80sp", "0.1dur", "10ba"])
def test_an_interval_may_be_in_any_unit(tmp_path, started, interval):
    run = Run(tmp_path, interval=interval)
    run.steps(*range(1, 31))
    for each in ("ep0-ba10", "ep0-ba20", "ep0-ba30"):
        assert started[-1].name == each
        started[-1].end(0.5)
        run.evaluations.is_busy()


@pytest.mark.parametrize("interval", ["1ep", "0.2dur"])
def test_the_last_step_of_an_epoch_completes_it_once(tmp_path, started, monkeypatch, interval):
    monkeypatch.setattr(Run, "max_duration", Time(5, "ep"))
    run = Run(tmp_path, interval=interval)
    run.steps(19)
    assert started == []
    run.steps(20)
    started[0].end(0.5)
    run.steps(21)
    run = Run(tmp_path, start=20, interval=interval)  # from the checkpoint, which was saved before the epoch's end
    run.evaluations.epoch_checkpoint(run.state(20, counted=True), None)
    run.steps(21, 39, 40)
    assert [each.name for each in started] == ["ep0-ba20", "ep0-ba40"]


def test_a_resumed_run_resumes_what_is_unfinished_and_drops_what_belongs_to_later_steps(tmp_path, started):
    run = Run(tmp_path)
    run.steps(10, 20, 30, 40)
    started[0].end(0.5)
    run.steps(41)
    done = tmp_path / "finetune/ep0-ba10/checkpoint.pt"
    done.touch()  # as if killed between the line and this
    run = Run(tmp_path, start=31)
    assert not done.exists() and not (tmp_path / "finetune/ep0-ba40").exists()
    run.steps(32, 33)
    assert [each.name for each in started[2:]] == ["ep0-ba20"]
    started[2].end(0.6)
    run.steps(34)
    started[3].end(0.7)
    run.steps(39, 40)
    assert [each.name for each in started[2:]] == ["ep0-ba20", "ep0-ba30", "ep0-ba40"]
    assert run.lines() == [(10, 0.5), (20, 0.6), (30, 0.7)]
    assert Run(tmp_path, start=0).evaluations.waiting == [] and [*(tmp_path / "finetune").iterdir()] == []


def test_a_folder_that_was_not_filled_before_a_kill_is_deleted(tmp_path, started):
    (folder := tmp_path / "finetune/ep0-ba10").mkdir(parents=True)
    (folder / "checkpoint.pt").write_text("10")
    run = Run(tmp_path, start=10)
    assert not folder.exists() and run.evaluations.waiting == []


def test_checkpoints_that_wait_are_counted_in_a_warning(tmp_path, started, caplog):
    run = Run(tmp_path)
    run.steps(10, 20)
    assert "checkpoints wait" not in caplog.text
    run.steps(30, 40)
    waiting = "{} checkpoints wait for fine-tuning, and take disk space; raise finetune_eval.interval"
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [waiting.format(2), waiting.format(3)]


def test_a_run_that_resumes_without_tasks_deletes_the_checkpoints_that_wait(tmp_path, started, config_file):
    run = Run(tmp_path)
    run.steps(10, 20)
    assert len([*tmp_path.glob("finetune/*/checkpoint.pt")]) == 2
    config = load_config(PretrainConfig, "main.py", "", [str(config_file)])
    assert MaskedLM(config).background(run, None) == []
    assert [*tmp_path.glob("finetune/*/checkpoint.pt")] == []


@pytest.mark.parametrize(("before", "after", "due"), [("5ba", "15ba", 30), ("20ba", "5ba", 25)])
def test_an_interval_that_changes_counts_from_the_start(tmp_path, started, before, after, due):
    run = Run(tmp_path, interval=before)
    run.steps(20)
    started[0].end(0.5)
    run.steps(21)
    run = Run(tmp_path, start=21, interval=after)
    run.steps(*range(22, due + 2))
    assert [each.name for each in started] == ["ep0-ba20", f"ep0-ba{due}"]


def test_intervals_before_the_checkpoint_that_a_run_starts_from_do_not_count(tmp_path, started):
    run = Run(tmp_path, start=50)  # with load_path, say, or on another machine
    run.steps(51, 59)
    assert started == []
    run.steps(60)
    assert [each.name for each in started] == ["ep0-ba60"]


@pytest.mark.parametrize("max_duration", [Time(100, "ba"), Time(5, "ep")])
def test_a_section_that_is_added_to_a_trained_run_is_said_to_have_no_effect(
    tmp_path, started, monkeypatch, caplog, max_duration
):
    monkeypatch.setattr(Run, "max_duration", max_duration)
    Run(tmp_path, start=99).steps(100)
    assert caplog.text.count("no effect") == 0 and len(started) == 1
    Run(tmp_path, start=100)
    assert caplog.text.count("no effect") == 0  # it has evaluations
    Run(tmp_path / "other", start=100)
    message = "finetune_eval has no effect, since the run is already trained; raise max_duration, or give its"
    assert caplog.text.count(message) == 1


def test_a_checkpoint_that_a_signal_has_saved_is_fine_tuned_when_the_run_resumes(tmp_path, started):
    run = Run(tmp_path)
    run.steps(12, save=5)
    run.save(12)
    run.evaluations.close(run.state(12), None)
    assert started == []
    Run(tmp_path, start=12).steps(13, save=5)
    assert [each.name for each in started] == ["ep0-ba12"]


@pytest.mark.parametrize(
    ("log", "said"), [("...\nerror: the sentence\n", "the sentence"), ("Killed\n", "killed by signal 9")]
)
def test_a_failure_warns_with_the_log_and_the_next_one_is_started(tmp_path, started, caplog, log, said):
    run = Run(tmp_path)
    run.steps(10, 20)
    path = tmp_path / "finetune/ep0-ba10/log.txt"
    path.write_text(log)
    started[0].end(why="killed by signal 9")
    run.steps(21)
    warning = f"ep0-ba10: fine-tuning failed ({said}), log: {path}; the run continues"
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [warning]
    assert [each.name for each in started] == ["ep0-ba10", "ep0-ba20"] and run.lines() == []
    assert not path.with_name("checkpoint.pt").exists()


def test_a_full_disk_warns_and_the_next_checkpoint_is_fine_tuned(tmp_path, started, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    run = Run(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(evaluations, "hold", full)
        run.steps(10)
    assert caplog.messages[0] == "step 10: no fine-tuning (No space left on device); training continues"
    assert [*(tmp_path / "finetune").iterdir()] == []
    run.steps(11)
    assert [each.name for each in started] == ["ep0-ba11"]


@pytest.mark.parametrize(
    ("aside", "device", "given", "environment"),
    [
        (True, None, "cpu", {}),
        (False, None, "gpu", {"CUDA_VISIBLE_DEVICES": "6"}),
        (False, "2", "gpu", {"CUDA_VISIBLE_DEVICES": "2"}),
        (False, "cpu", "cpu", {"OMP_NUM_THREADS": "4"}),
    ],
)
def test_a_cpu_shares_itself_and_otherwise_the_last_visible_gpu_is_used(
    tmp_path, started, monkeypatch, aside, device, given, environment
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(evaluations, "usable_cores", lambda: 8)
    run = Run(tmp_path, device=device)
    run.evaluations.aside = aside
    run.steps(10)
    assert started[0].arguments[1][-1] == f"device={given}"
    assert started[0].options["environment"] == environment
    assert started[0].options["aside"] == (given == "cpu")


@pytest.mark.parametrize(
    ("processes", "device", "shared"),
    [(1, None, None), (2, None, "6"), (1, "4", "4"), (2, "7", None), (2, "cpu", None)],
)
def test_a_gpu_that_training_uses_too_is_named_in_a_warning(
    tmp_path, started, monkeypatch, caplog, processes, device, shared
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(evaluations.dist, "get_local_world_size", lambda: processes)
    Run(tmp_path, device=device).evaluations.init(SimpleNamespace(device=None), None)
    assert [message.split(" with training; ")[0] for message in caplog.messages] == (
        [] if shared is None else [f"finetune_eval shares GPU {shared}"]
    )


# Mistakes


@pytest.fixture
def in_process(monkeypatch):
    """Let glue.py check its arguments in this process, which has imported what takes seconds; return its environments."""
    environments = []

    def run(command: list[str], env: dict[str, str], **_) -> SimpleNamespace:
        assert command[:2] == [sys.executable, str(finetune_eval.SCRIPT)]
        environments.append(env)
        try:
            glue.main(command[2:])
        except UserError as error:
            return SimpleNamespace(returncode=2, stderr=f"a warning\nerror: {error}\n")
        return SimpleNamespace(returncode=0, stderr="a warning\n")

    monkeypatch.setattr(finetune_eval, "subprocess", SimpleNamespace(run=run))
    return environments


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("tasks=[sst]", "finetune_eval: glue.py reports: tasks_to_run: unknown task sst; did you mean sst2?"),
        ("config=no.yaml", "finetune_eval: glue.py reports: no.yaml is not a file; "),
        ("tasks=[lost]", "finetune_eval: glue.py reports: tasks.lost.files: nowhere.csv does not exist; "),
        ("device=99", "finetune_eval (device=99): glue.py reports: device=gpu, but no GPU is available; "),
        ("device=first", "finetune_eval.device=first must be cpu or the number of a GPU, such as 7"),
        ("interval=often", "finetune_eval.interval=often is not a duration"),
        ("seeds=0", "finetune_eval.seeds=0 must be an integer ≥ 1"),
        ("task=[sst2]", "unknown key finetune_eval.task; "),
    ],
)
def test_a_mistake_is_reported_before_anything_is_written(
    config_file, tmp_path, in_process, monkeypatch, given, message
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lost = {"like": "sst2", "files": dict.fromkeys(("train", "validation"), "nowhere.csv")}
    tasks = write_yaml(tmp_path / "tasks.yaml", tasks={"lost": lost})
    overrides = ["finetune_eval.tasks=[sst2]", f"finetune_eval.config={tasks}", f"finetune_eval.{given}"]
    with pytest.raises(UserError) as error:
        main.main([str(config_file), *overrides])
    assert str(error.value).startswith(message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scheduler": {"name": "linear"}}, "scheduler: unknown name 'linear'; "),
        ({"callbacks": {"early_stoper": {}}}, "callbacks: unknown name 'early_stoper'; did you mean early_stopper?"),
        ({"loggers": {"file": {"filename": "log"}}}, "loggers.file.filename must contain {run_name}"),
        ({"code_paths": ["no.py"]}, "code_paths: no.py does not exist; "),
    ],
)
def test_a_mistake_in_the_config_of_glue_is_reported_before_training(tmp_path, in_process, given, message):
    config = write_yaml(tmp_path / "glue.yaml", **given)
    with pytest.raises(UserError, match=re.escape(f"finetune_eval: glue.py reports: {message}")):
        FinetuneEval(tasks=["sst2"], config=str(config)).check_tasks(tmp_path, "bert-base-uncased")


def test_glue_accepts_the_arguments_by_default(tmp_path, in_process, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device, gpu in ((None, "4,6"), ("cpu", "4,6"), ("6", "6")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
        settings = FinetuneEval(tasks=["sst2", "rte"], device=device)
        settings.check_tasks(tmp_path / "a folder: with #signs", "bert-base-uncased")
        assert in_process[-1]["CUDA_VISIBLE_DEVICES"] == gpu and "RANK" not in in_process[-1]
    assert [*tmp_path.iterdir()] == []


def test_a_check_that_is_killed_is_reported(tmp_path, monkeypatch):
    killed = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=-9, stderr=""))
    monkeypatch.setattr(finetune_eval, "subprocess", killed)
    with pytest.raises(UserError, match=r"^finetune_eval: glue.py reports: exit status -9$"):
        FinetuneEval(tasks=["sst2"]).check_tasks(tmp_path, "bert-base-uncased")


def test_nothing_is_fine_tuned_by_default(config_file):
    config = load_config(PretrainConfig, "main.py", "", [str(config_file)])
    assert config.finetune_eval == FinetuneEval() and config.finetune_eval.tasks == []
