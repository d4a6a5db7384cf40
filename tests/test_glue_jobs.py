"""Runs of several jobs by the command that a user gives: what they write, what runs again, and what stops them."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch
from composer.core import Precision
from composer.devices import DeviceCPU
from conftest import ROOT, assert_one_sentence, environment, run, sentences, snapshot
from glue_files import OFFICIAL_TEST, write_glue, write_tsv, write_yaml
from safetensors.torch import load_file
from test_jobs_scores import reference

import glue
from src.cli import progress
from src.config import load
from src.errors import RunFailed, UserError
from src.glue.examples import Data, Example, read_task
from src.glue.experiment import FinetuneConfig, GlueExperiment
from src.glue.finetune import build_model, collator, finetune, read_start
from src.glue.tasks import GLUE
from src.glue.tokens import tokenize
from src.jobs import pool, predictions
from src.jobs.experiment import Job
from src.jobs.jobs import finished
from src.jobs.pool import BAR, Running, devices, run_job, show
from src.jobs.training import Classifier, loader, predict

PNG = b"\x89PNG\r\n\x1a\n"
ONE = {"epochs": 1, "batch_size": 8, "seeds": [19], "eval_interval": "1ep"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, write_checkpoint) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("pretrained") / "checkpoint.pt")


@pytest.fixture(scope="module")
def glue_dir(tmp_path_factory) -> Path:
    return write_glue(tmp_path_factory.mktemp("glue"))


@pytest.fixture(scope="module")
def shared(glue_dir, checkpoint) -> dict:
    return {"glue_dir": str(glue_dir), "starting_checkpoint_load_path": str(checkpoint)}


@pytest.mark.parametrize("mixer", ["lion-s", "softmax"])
@pytest.mark.parametrize("name", ["sst2", "rte", "stsb"])
def test_padding_to_the_longest_does_not_change_predictions(shared, write_checkpoint, tmp_path, mixer, name):
    checkpoint = write_checkpoint(tmp_path / "c.pt", mixer)
    path = write_yaml(tmp_path / "f.yaml", **{**shared, "starting_checkpoint_load_path": str(checkpoint)})
    start = read_start(load(FinetuneConfig, "glue.py", [str(path)]))
    task = GLUE[name]
    torch.manual_seed(0)
    model = Classifier(build_model(start, task), start.tokenizer, use_logits=True)
    torch.nn.init.normal_(model.model.classifier.weight)
    texts = ["dog", *sentences(8), "a song"]
    examples = [Example((text, texts[i - 1])[: len(task.columns)], float(i % 2)) for i, text in enumerate(texts)]
    tokens, collate = tokenize(Data(task, examples, {}, {}), start.tokenizer, 64).train, collator(start.tokenizer, 64)
    alone, together = (
        predict(model, loader(tokens, collate, size), DeviceCPU(), Precision.FP32) for size in (1, len(examples))
    )
    assert len({batch["input_ids"].shape[1] for batch in loader(tokens, collate, 1)}) > 3
    assert alone.std() > 0.01
    torch.testing.assert_close(alone, together, atol=1e-5, rtol=1e-5)


def test_a_job_that_cannot_write_reports_it(tmp_path, monkeypatch):
    monkeypatch.setattr(pool.threading, "Thread", Mock())  # which waits for the end of the main process
    (tmp_path / "jobs").write_text("a file, where the folders of jobs should go")
    job, connection = Job(GLUE["rte"], 19, tmp_path / "jobs" / "rte-19", {}), Mock()
    with pytest.raises(SystemExit):
        run_job(None, job, "cpu", None, None, "{}", connection)
    (message,) = connection.send.call_args.args
    assert message["reason"].startswith(f"cannot write {job.folder}/log.txt: Not a directory")


def test_training_batches_hold_every_example_once_in_an_order_set_by_the_seed(tokenizer):
    examples = [Example((text,), float(i)) for i, text in enumerate(sentences(21))]
    tokens = tokenize(Data(GLUE["stsb"], examples, {}, {}), tokenizer, 64).train

    def order(seed: int, epochs: int = 1) -> list[list[float]]:
        batched = loader(tokens, collator(tokenizer, 64), 8, shuffle_seed=seed)
        return [[label for batch in batched for label in batch["labels"].tolist()] for _ in range(epochs)]

    first, second = order(1, epochs=2)
    assert sorted(first) == sorted(second) == list(range(21))
    assert first != second and first != list(range(21))
    assert order(1)[0] == first != order(2)[0]


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory, shared):
    """Arguments, save_folder and output of a run: MNLI, RTE from it, STS-B from it, SST-2 searched, a task of one's
    own with an optimizer of its own."""
    folder = tmp_path_factory.mktemp("finetuned")
    own = [f"{text},{'many' if len(text) > 100 else 'few'}" for text in sentences(30, seed=9)]
    (folder / "own.csv").write_text("\n".join(["words,amount", *own]))
    files = {split: str(folder / "own.csv") for split in ("train", "validation", "test")}
    tasks = {
        "rte": {**ONE, "seeds": [19, 20]}, "mnli": ONE, "stsb": ONE, "sst2": {**ONE, "lr": [1e-4, 1e-3]},
        "amount": {**ONE, "columns": ["words"], "label": "amount", "metrics": ["macro_f1"], "files": files,
                   "optimizer": "torch.optim:SGD", "microbatch_size": 3, "max_seq_len": 16},
    }  # fmt: skip
    path = write_yaml(
        folder / "finetune.yaml",
        **shared,
        tasks=tasks,
        tasks_to_run=["rte", "mnli", "stsb", "sst2", "amount"],
        mnli_first=True,
        predict_test=True,
        parallel=2,
    )
    done = run("glue.py", path, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stderr
    return [str(path)], folder / "run", done


def test_a_run_prints_its_table_and_writes_report_picture_and_predictions(finetuned):
    _, folder, done = finetuned
    for row in (r"\| RTE +\| accuracy +\| +50\.00 \| +\d+\.\d\d ± \d+\.\d\d", r"\| STS-B +\| spearman +\| +0\.00 \|", r"\| amount +\| macro_f1",
                r"\| SST-2\* ", r"lr=0\.00\d*1?, picked"):  # fmt: skip
        assert re.search(row, done.stdout), done.stdout
    assert "GLUE average: not computed, lacks QQP, QNLI, MRPC, CoLA" in done.stdout
    assert "7 jobs (RTE, MNLI, STS-B, SST-2, amount)" in done.stderr
    written = json.loads((folder / "report.json").read_text())
    assert [row["task"] for row in written["tasks"]] == ["rte", "mnli", "stsb", "sst2", "amount"]
    assert set(written["tasks"][0]["seeds"]) == {"19", "20"}
    assert written["glue"] is None
    assert "| RTE " in (folder / "report.md").read_text()
    assert (folder / "report.png").read_bytes().startswith(PNG)
    jobs = {path.name for path in (folder / "jobs").iterdir()}
    assert jobs == {"rte-19", "rte-20", "mnli-19", "stsb-19", "sst2-lr=0.0001-19", "sst2-lr=0.001-19", "amount-19"}


def test_the_scores_of_a_run_follow_from_its_predictions(finetuned, glue_dir):
    _, folder, _ = finetuned
    for place in (folder / "jobs").iterdir():
        written, name = json.loads((place / "result.json").read_text()), place.name.split("-")[0]
        for split, scores in written["scores"].items():
            rows = [json.loads(line) for line in (place / f"predictions-{split}.jsonl").read_text().splitlines()]
            assert [row["id"] for row in rows] == list(range(2, len(rows) + 2))  # lines of the file, below its header
            guesses, labels = predictions.read_tensors(place, split, written["labels"])
            if written["labels"]:
                assert [row["prediction"] for row in rows] == [written["labels"][guess] for guess in guesses]
                assert [row["label"] for row in rows] == [written["labels"][label] for label in labels]
            else:
                assert [row["label"] for row in rows] == pytest.approx(labels.tolist())
            assert scores == {
                metric: pytest.approx(reference(metric, guesses, labels), abs=1e-6) for metric in written["metrics"]
            }
            if name in GLUE:
                examples = read_task(GLUE[name], str(glue_dir)).validation[split]
                assert labels.tolist() == pytest.approx([example.label for example in examples])
        evaluated = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        last = [line["eval"] for line in evaluated if "eval" in line][-1]  # during training, at its end
        for split, scores in written["scores"].items():
            for metric, value in scores.items():
                assert last[f"{split}/{metric}"] == pytest.approx(value, abs=1e-6)


def test_jobs_take_the_tokens_that_the_command_made(finetuned):
    _, folder, _ = finetuned
    tokens = {path.name for path in (folder / "tokens").iterdir()}
    assert tokens == {f"{task}.safetensors" for task in ("rte", "mnli", "stsb", "sst2", "amount")}
    assert not any("tokenizing" in path.read_text() for path in folder.glob("jobs/*/log.txt"))


def test_a_task_may_have_a_length_of_its_own(finetuned):
    _, folder, done = finetuned
    assert "- amount: " in done.stdout and re.search(
        r"\d\.\d% of the training texts truncated to 16 tokens", done.stdout
    )
    assert re.search(r"\namount: \d+\.\d% of the training texts truncated to 16 tokens\n", done.stderr)
    longest = {path.stem: max(load_file(path)["0.ends"].diff()) for path in folder.glob("tokens/*.safetensors")}
    assert longest.pop("amount") == 16 < min(longest.values())
    results = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("jobs/*/result.json")}
    assert {name: result["settings"]["max_seq_len"] for name, result in results.items()} == {
        **dict.fromkeys(results, 64),
        "amount-19": 16,
    }


def test_tasks_after_mnli_start_from_its_encoder(finetuned):
    _, folder, _ = finetuned
    starts = {path.parent.name: json.loads(path.read_text())["start"] for path in folder.glob("jobs/*/result.json")}
    assert all(starts[name].endswith("mnli-19/latest-rank0.pt") for name in ("rte-19", "rte-20", "stsb-19"))
    assert starts["mnli-19"] == starts["sst2-lr=0.001-19"] != starts["rte-19"]


def test_test_set_predictions_are_written_for_the_server(finetuned):
    _, folder, done = finetuned
    files = {path.name: path.read_text().splitlines() for path in (folder / "submission").iterdir()}
    assert files.keys() == {"MNLI-m.tsv", "MNLI-mm.tsv", "RTE.tsv", "STS-B.tsv", "SST-2.tsv", "amount-test.tsv"}
    for name, lines in files.items():
        assert lines[0] == "index\tprediction"
        assert [line.split("\t")[0] for line in lines[1:]] == [str(i) for i in range(30 if "amount" in name else 5)]
    assert {line.split("\t")[1] for line in files["RTE.tsv"][1:]} <= {"entailment", "not_entailment"}
    assert {line.split("\t")[1] for line in files["SST-2.tsv"][1:]} <= {"0", "1"}
    assert "the server also needs AX.tsv, QQP.tsv, QNLI.tsv, MRPC.tsv, CoLA.tsv, WNLI.tsv" in done.stdout


def test_repeating_the_command_trains_nothing_and_prints_the_same_table(finetuned, capsys, caplog, monkeypatch):
    arguments, folder, done = finetuned
    monkeypatch.setattr("src.jobs.jobs.start_server", pytest.fail)
    jobs = snapshot(folder / "jobs")
    with caplog.at_level("INFO", logger="lion"):
        glue.main(arguments)
    assert caplog.text.count("done earlier") == 7
    assert capsys.readouterr().out == done.stdout
    with pytest.raises(UserError, match="choose another save_folder or base_run_name, or add --rerun"):
        glue.main([*arguments, "from_scratch=true"])
    assert snapshot(folder / "jobs") == jobs


def test_a_changed_value_reruns_the_jobs_it_affects_and_rerun_all_of_them(finetuned, glue_dir, caplog):
    arguments, folder, _ = finetuned
    jobs = snapshot(folder / "jobs")

    def changed() -> set[str]:
        now = snapshot(folder / "jobs")
        return {name.split("/")[0] for name in now if now[name] != jobs.get(name)}

    with caplog.at_level("INFO", logger="lion"):
        glue.main([*arguments, "tasks.stsb.lr=0.5"])
    assert caplog.text.count("done earlier") == 6
    assert "STS-B seed 19: task changed since its result, so it runs again" in caplog.text
    assert changed() == {"stsb-19"}
    lines = [json.loads(line) for line in (folder / "jobs/stsb-19/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [3]  # of the new run alone
    jobs = snapshot(folder / "jobs")
    glue.main(["--rerun", *arguments, "tasks_to_run=[amount]", "mnli_first=false"])
    assert changed() == {"amount-19"}
    # Another test set matters only where it is to be predicted; RTE starts from MNLI's encoder, which is not trained again.
    write_tsv(glue_dir / "RTE/test.tsv", OFFICIAL_TEST["rte"][0], [["0", "the dog sees", "a cat"]])
    jobs = snapshot(folder / "jobs")
    glue.main([*arguments, "tasks_to_run=[mnli,rte]", "predict_test=false"])
    assert changed() == set()
    glue.main([*arguments, "tasks_to_run=[mnli,rte]"])
    assert changed() == {"rte-19", "rte-20"}
    assert len((folder / "submission/RTE.tsv").read_text().splitlines()) == 2


def test_a_failed_or_killed_job_is_reported_and_does_not_affect_others(tmp_path, shared, capsys, caplog):
    folder = write_glue(tmp_path / "glue")
    settings = {**shared, "glue_dir": str(folder), "tasks_to_run": ["sst2", "stsb", "rte"]}
    path = write_yaml(tmp_path / "f.yaml", **settings, tasks={"sst2": {**ONE, "epochs": 1000}, "stsb": ONE, "rte": ONE})

    def disturb() -> None:
        wait_for(lambda: metrics(tmp_path / "run/jobs/sst2-19") > 2)
        # After the command has read them. RTE's job has its tokens, and so needs no example.
        for task in ("STS-B", "RTE"):
            (folder / task / "train.tsv").write_bytes(b"\xff\xfe\n")
        (tmp_path / "run/tokens/stsb.safetensors").write_bytes(b"truncated")
        job = max(multiprocessing.active_children(), key=lambda child: psutil.Process(child.pid).create_time())
        os.kill(job.pid, signal.SIGKILL)

    disturber = threading.Thread(target=disturb)
    disturber.start()
    with caplog.at_level("INFO", logger="lion"), pytest.raises(SystemExit) as ended:
        glue.main([str(path)])
    disturber.join()
    assert ended.value.code == 1
    assert "2 of 3 jobs failed" in caplog.text
    out = capsys.readouterr().out
    assert re.search(r"\n\| RTE ", out) and not re.search(r"\n\| SST-2 ", out)
    assert "- SST-2 seed 19: killed by signal 9" in out
    assert re.search(r"- STS-B seed 19: \S+train\.tsv, line 1: not valid UTF-8.*log: \S+stsb-19/log\.txt", out)
    write_glue(tmp_path / "glue")
    write_yaml(path, **settings, tasks={"sst2": ONE, "stsb": ONE, "rte": ONE})
    caplog.clear()
    with caplog.at_level("INFO", logger="lion"):
        glue.main([str(path)])
    assert caplog.text.count("done earlier") == 1 and "Failed" not in capsys.readouterr().out


def test_a_killed_command_ends_its_jobs_and_keeps_finished_ones(tmp_path, shared, caplog):
    settings = {**shared, "tasks_to_run": ["sst2", "rte"]}
    path = write_yaml(tmp_path / "f.yaml", **settings, tasks={"sst2": ONE, "rte": {**ONE, "epochs": 1000}})
    process = start(path)
    wait_for(lambda: metrics(tmp_path / "run/jobs/rte-19") > 2, process)
    job = job_process(process.pid)
    process.kill()
    process.communicate()
    wait_for(lambda: not psutil.pid_exists(job))
    assert [place.parent.name for place in tmp_path.rglob("result.json")] == ["sst2-19"]
    write_yaml(path, **settings, tasks={"sst2": ONE, "rte": ONE})
    with caplog.at_level("INFO", logger="lion"):
        glue.main([str(path)])
    assert caplog.text.count("done earlier") == 1
    assert len(list(tmp_path.rglob("result.json"))) == 2


def start(path: Path) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "glue.py"), str(path)]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, process: subprocess.Popen | None = None, seconds: float = 100) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.05)


def metrics(place: Path) -> int:
    """Lines of a running job's metrics.jsonl."""
    path = place / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


def job_process(command: int) -> int:
    """The process of the running job: the newest child of the fork server, which is a child of the command."""
    servers = [child for child in psutil.Process(command).children() if "forkserver" in " ".join(child.cmdline())]
    return max((job for server in servers for job in server.children()), key=psutil.Process.create_time).pid


def test_devices_are_gpu_ids_or_unbound_processes(monkeypatch):
    assert devices(False, "cpu") == devices(1, "gpu") == [None]
    assert devices(3, "cpu") == [None] * 3
    assert devices(True, "cpu") == [None] * len(os.sched_getaffinity(0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert devices(True, "gpu") == ["4", "6", "7"]
    assert devices(2, "gpu") == ["4", "6"]
    with pytest.raises(UserError, match="parallel=4 is more than the 3 GPUs"):
        devices(4, "gpu")
    for wrong in ("yes", 0, -1, 1.5):
        with pytest.raises(UserError, match="parallel"):
            devices(wrong, "cpu")


def test_the_progress_bar_shows_jobs_done_time_left_and_steps_of_running_jobs():
    jobs = [Job(GLUE["rte"], seed, Path(f"rte-{seed}"), {}, cost=100) for seed in (1, 2, 3)]
    ours, its = multiprocessing.Pipe()
    its.send({"step": 1200, "steps": 2400})
    running = Running(jobs[1], None, ours, None, started=0)
    running.receive()
    bar = progress(total=300, smoothing=0, bar_format=BAR)
    show(bar, [jobs[2]], [running], 3)
    bar.close()
    assert bar.n == 150
    assert re.search(r" 50% .* left.*1 of 3 jobs done; RTE seed 2 step 1,200 of 2,400", str(bar))


def test_concurrent_jobs_start_with_the_costliest(monkeypatch):
    class Enough(Exception):
        pass

    def start(experiment, job, *_) -> Mock:
        started.append(job.seed)
        if len(started) == len(jobs):
            raise Enough
        return Mock(job=job)

    jobs = [Job(GLUE["rte"], seed, Path(f"rte-{seed}"), {}, cost=cost) for seed, cost in enumerate((20, 5, 30))]
    monkeypatch.setattr(pool, "start", start)
    started: list[int] = []
    with pytest.raises(Enough):
        pool.run_all(SimpleNamespace(config=SimpleNamespace(progress_bar=False)), jobs, "cpu", [None] * 3)
    assert started == [2, 0, 1]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("mnli_first=true", ["mnli_first", "add mnli"]),
        ("tasks.sst2.zzzz=1", ["unknown key tasks.sst2.zzzz; choose from", "kind, label, labels, like, lr, "]),
        ("tasks.sst2.eval_interval=often", ["tasks.sst2.eval_interval=often"]),
        ("tasks.sst2.eval_interval=500", ["tasks.sst2.eval_interval=500"]),
        ("tasks.sst2.optimizer=sgd", ["tasks.sst2.optimizer=sgd must be one of", "adamw, or module:Class"]),
        ("tasks.sst2.optimizer=torch.optim:SDG", ["tasks.sst2: optimizer: torch.optim has no 'SDG'; did you mean SGD"]),
        ("tasks.sst2.optimizer=torch.optim:Rprop", ["tasks.sst2: unknown key optimizer.weight_decay"]),
        ("tasks.sst2.precision=fp8", ["tasks.sst2.precision=fp8"]),
        ("model.num_hidden_layers=2", ["needs", "layers.1"]),
        ("scheduler.name=steps", ["scheduler", "steps"]),
        ("device_eval_batch_size=0", ["device_eval_batch_size=0 must be an integer ≥ 1"]),
        ("max_seq_len=2", ["max_seq_len=2 must be at least 3"]),
        ("tasks.sst2.max_seq_len=2", ["tasks.sst2.max_seq_len=2 must be at least 3"]),
        ("tasks.sst2.max_seq_len=0", ["tasks.sst2.max_seq_len=0 must be at least 3"]),
        ("loggers.tensorbord={{}}", ["loggers", "tensorbord", "did you mean tensorboard?"]),
        ("loggers.file={{filenam: x}}", ["unknown key loggers.file.filenam", "filename?"]),
        ("loggers.file={{filename: all.txt}}", ["loggers.file.filename", "run_name"]),
        ("save_folder=s3://bucket/run", ["save_folder", "not a local folder"]),
        ("parallel=many", ["parallel", "'many'"]),
        ("tasks_to_run=[sst2,qqp]", ["QQP/train.tsv does not exist"]),
        ("save_folder={}", ["save_folder", "choose another folder"]),
    ],
)
def test_a_mistake_is_reported_before_any_training(tmp_path, shared, override, words):
    (tmp_path / "file").touch()
    path = write_yaml(tmp_path / "f.yaml", **shared, tasks_to_run=["sst2"])
    with pytest.raises(UserError) as error:
        glue.main([str(path), override.format(tmp_path / "file")])
    for word in words:
        assert word in str(error.value)
    assert not list(tmp_path.rglob("result.json"))


def test_a_length_beyond_the_position_embeddings_names_its_task(tmp_path, shared, write_checkpoint):
    start = {"starting_checkpoint_load_path": str(write_checkpoint(tmp_path / "c.pt", "softmax"))}
    path = write_yaml(tmp_path / "f.yaml", **shared | start, tasks_to_run=["sst2", "rte"])
    for override, words in (("tasks.rte.max_seq_len=9999", r"^tasks\.rte\.max"), ("max_seq_len=9999", "^max")):
        with pytest.raises(UserError, match=words + "_seq_len=9999 exceeds model.max_position_embeddings"):
            glue.main([str(path), override])


def test_a_dry_run_says_what_would_run_and_refuses_what_the_run_refuses(tmp_path, shared, capsys):
    path = write_yaml(tmp_path / "f.yaml", **shared, tasks_to_run=["sst2", "rte"])
    arguments = [str(path), "dry_run=true", "device=cpu", "parallel=2", "seeds=1"]
    glue.main(arguments)
    out = capsys.readouterr().out
    assert out.startswith(
        "checked    config, that the files of the tasks exist (not their rows), starting checkpoint, device\n"
    )
    start = shared["starting_checkpoint_load_path"]
    assert f"would run  2 jobs (SST-2, RTE), from {start}, on cpu, 2 at a time\n" in out
    for wrong, words in (
        (f"starting_checkpoint_load_path={ROOT / 'tests/fixtures/images/my-model'}", "reads images"),
        (f"save_folder={path}", "save_folder"),
        ("parallel=0", "parallel=0"),
    ):
        with pytest.raises(UserError, match=words):
            glue.main([*arguments, wrong])
    assert [file.name for file in tmp_path.iterdir()] == ["f.yaml"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("glue_dir=nowhere", "glue_dir: nowhere is not a directory"),
        ("starting_checkpoint_load_path=./nowhere.pt", "./nowhere.pt is not a file or folder"),
        ("starting_checkpoint_load_path=null", "starting_checkpoint_load_path is not set"),
        ("save_folder=f.yaml/run", "save_folder: f.yaml is not a directory"),
        ("tasks.sst2.files={train: a.csv, validation: b.csv}", "a.csv does not exist"),
    ],
)
def test_a_wrong_path_is_reported_before_slow_imports(tmp_path, shared, override, words):
    write_yaml(tmp_path / "f.yaml", **shared, tasks_to_run=["sst2"])
    program = """
import sys, glue
try:
    glue.main(sys.argv[1:])
except Exception as error:
    print(error, sorted({"torch", "transformers", "composer", "datasets"} & sys.modules.keys()))
"""
    command = [sys.executable, "-c", program, "f.yaml", override]
    done = subprocess.run(command, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True)
    assert words in done.stdout and done.stdout.endswith(" []\n"), done.stdout + done.stderr


@pytest.fixture
def experiment_of(tmp_path, shared):
    """experiment_of(key=value, ...): an experiment with checked paths."""

    def make(*overrides: str) -> GlueExperiment:
        path = write_yaml(tmp_path / "f.yaml", **shared, tasks_to_run=["mnli", "rte"])
        experiment = GlueExperiment(load(FinetuneConfig, "glue.py", [str(path), "tasks.rte.seeds=[19]", *overrides]))
        experiment.check_paths()
        return experiment

    return make


@pytest.fixture
def plan_of(experiment_of):
    """plan_of(key=value, ...): the jobs of a config, from an encoder of this name."""
    return lambda *overrides, encoder="one": experiment_of(*overrides).jobs({"weights": encoder}, "cpu")


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("callbacks.early_stopper={monitor: MaskedAccuracy, dataloader_label: dev, patience: 1ep}", False),
        ("callbacks.early_stopper=false", True),
        ("callbacks.lr_monitor={}", True),
        ("callbacks[composer.callbacks:LRMonitor]={}", False),
        (f"code_paths=[{__file__}]", False),
        ("log_level=warning", True),
        ("precision=amp_bf16", False),
        ("precision=fp32", True),  # what null is on a CPU
        ("tasks.rte.precision=amp_bf16", False),
        ("mnli_first=true", False),
    ],
)
def test_a_result_depends_on_every_setting_that_changes_training(plan_of, override, same):
    assert (plan_of(override)[-1].settings == plan_of()[-1].settings) == same


def test_results_of_other_weights_are_not_replaced_without_asking(experiment_of, plan_of):
    for job in plan_of():
        job.folder.mkdir(parents=True)
        (job.folder / "result.json").write_text(json.dumps({"settings": job.settings, "scores": {}, "test_splits": []}))
    experiment = experiment_of()
    experiment.start_name = "c.pt"
    assert finished(plan_of("tasks.rte.lr=1", "mnli_first=true"), experiment) == {}
    message = r"weights.* other than those of c\.pt \(MNLI seed 19\).*or add --rerun"
    for override in ("mnli_first=false", "mnli_first=true"):
        with pytest.raises(UserError, match=message):
            finished(plan_of(override, encoder="two"), experiment)


def test_a_job_does_not_start_from_other_weights_than_were_planned(experiment_of, plan_of):
    with pytest.raises(RunFailed, match=r"c\S+\.pt has changed since the command started; run it again"):
        finetune(experiment_of().config, plan_of()[0], "cpu", None, False, None)


def test_a_folder_locked_by_another_command_is_refused(tmp_path, shared):
    from src.files import exclusive_lock

    path = write_yaml(tmp_path / "f.yaml", **shared, tasks_to_run=["sst2"])
    with exclusive_lock(tmp_path / "run", "glue.py"), pytest.raises(UserError, match=r"another glue\.py is running in"):
        glue.main([str(path)])


def test_a_mistake_is_reported_in_one_sentence(finetuned):
    assert_one_sentence(run("glue.py", *finetuned[0], "taks_to_run=[sst2]"), "unknown key taks_to_run", "tasks_to_run")
    assert_one_sentence(
        run("glue.py", "report", finetuned[1].parent), "report.json (No such file or directory); give the save_folder"
    )
