"""Runs of lra.py by the command that a user gives: what they write, what runs again, and what stops them."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
import warm
import yaml
from conftest import ROOT, assert_one_sentence, run, snapshot
from test_lra_sources import write_aan, write_pathfinder

import lra
from src.errors import UserError
from src.lra import make
from src.lra.sources import read
from src.lra.tasks import LRA

PNG = b"\x89PNG\r\n\x1a\n"
SIZES = ["--rows", "64", "24", "25", "--min_length", "5", "--max_length", "30", "--max_depth", "4", "--max_args", "4"]
UNLIKE = "generated, seed 0, unlike the release (rows 64 24 25, min_length 5, max_length 30, max_depth 4, max_args 4)"
MODEL = {
    "mixer": "lion-s", "long_reach": True, "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2,
    "intermediate_size": 16,
}  # fmt: skip
ONE = {"epochs": 1, "batch_size": 8, "lr": 0.01}
TASKS = {
    "listops": {**ONE, "epochs": 5, "seeds": [1, 2]},
    "retrieval": ONE,
    "micro": {**ONE, "epochs": 5, "like": "listops", "title": "In parts", "microbatch_size": 3},
    "still": {**ONE, "like": "retrieval", "title": "Still", "lr": 0.0, "validation": "test", "max_length": 6},
}


@pytest.fixture(scope="module")
def lra_dir(tmp_path_factory) -> Path:
    """Short expressions, and pairs of texts that look like those of the release."""
    folder = tmp_path_factory.mktemp("lra")
    make.main(["listops", "--out", str(folder), *SIZES])
    return write_aan(folder, rows=16)


@pytest.fixture(scope="module")
def write_yaml(lra_dir):
    """write_yaml(path, key=value, ...) → a config of small jobs on the CPU, which saves beside it."""

    def write(path: Path, **changes) -> Path:
        config = {
            "inherit": str(ROOT / "yamls/lra/recipe.yaml"), "base_run_name": "tiny-lra", "lra_dir": str(lra_dir),
            "model": MODEL, "device": "cpu", "save_folder": str(path.parent / "run"), "tasks": TASKS,
            "tasks_to_run": [*TASKS], "device_eval_batch_size": 16,
        }  # fmt: skip
        path.write_text(yaml.safe_dump({**config, **changes}))
        return path

    return write


@pytest.fixture(scope="module")
def trained(tmp_path_factory, write_yaml):
    """The config, save_folder and output of a run of five jobs, two at a time."""
    folder = tmp_path_factory.mktemp("trained")
    path = write_yaml(folder / "lra.yaml", parallel=2, save_finetuned_checkpoints=True)
    done = run("lra.py", path, cwd=folder)
    assert done.returncode == 0, done.stderr
    return path, folder / "run", done


@pytest.fixture
def copied(trained, tmp_path):
    """Arguments of the same run, and its copy, in which it is finished."""
    shutil.copytree(trained[1], tmp_path / "copy")
    return [trained[0], f"save_folder={tmp_path / 'copy'}"], tmp_path / "copy"


def predictions(job: Path, split: str = "test") -> list[dict]:
    return [json.loads(line) for line in (job / f"predictions-{split}.jsonl").read_text().splitlines()]


def result(job: Path) -> dict:
    return json.loads((job / "result.json").read_text())


def test_a_run_prints_its_table_with_seeds_and_what_is_unlike_the_benchmark(trained):
    _, folder, done = trained
    score = r"\d+\.\d\d"
    assert re.search(rf"\| ListOps +\| accuracy +\| +{score} \| +{score} ± {score} \|", done.stdout), done.stdout
    assert re.search(rf"\| Retrieval +\| accuracy +\| +50\.00 \| +{score} \|", done.stdout), done.stdout
    assert "LRA average" not in done.stdout and "Average without" not in done.stdout  # no data is the benchmark's
    assert f"- ListOps, In parts: {UNLIKE}" in done.stdout
    assert "- Still: validated on the test set" in done.stdout
    assert "- Retrieval: 16 test examples instead of 17,437" in done.stdout
    assert re.search(r"At chance, no better than one answer to all: .*Still, seed 1", done.stdout)
    assert "5 jobs (ListOps, Retrieval, In parts, Still), from random weights, on cpu" in done.stderr
    assert "ListOps: 64 / 24 / 25 examples, mean length 1" in done.stderr
    assert "Still: 16 / 16 examples" in done.stderr and "validation on the test set" in done.stderr
    shown = done.stdout[: done.stdout.index("report  ")].strip()
    assert (folder / "report.md").read_text().split("\n\n", 1)[1].strip() == shown
    for picture in ("report.png", "curves.png"):
        assert (folder / picture).read_bytes().startswith(PNG)


def test_the_report_as_json_has_rows_seeds_and_both_averages(trained):
    _, folder, _ = trained
    report = json.loads((folder / "report.json").read_text())
    assert report.keys() == {"run", "tasks", "lra", "lra_without_pathx", "failed"}
    assert report["lra"] is None and report["lra_without_pathx"] is None and report["failed"] == []
    rows = {row["task"]: row for row in report["tasks"]}
    assert [*rows] == [*TASKS] and rows["listops"]["folders"] == {"1": "listops-1", "2": "listops-2"}
    assert {name: row["lra"] for name, row in rows.items()} == dict.fromkeys(TASKS, False)
    notes = ["50.0% of the training inputs truncated to 6", "validated on the test set"]
    assert rows["still"]["notes"] == notes and rows["still"]["at_chance"] == ["1"]
    assert rows["retrieval"]["notes"] == ["16 test examples instead of 17,437"]
    scores = [result(folder / "jobs" / f"listops-{seed}")["score"] for seed in (1, 2)]
    assert [*rows["listops"]["seeds"].values()] == scores and rows["listops"]["mean"] == pytest.approx(sum(scores) / 2)


@pytest.mark.parametrize("name", ["listops-1", "retrieval-1", "still-1"])
def test_the_score_is_on_the_test_set_and_the_selection_on_validation(trained, lra_dir, name):
    _, folder, _ = trained
    job, task = folder / "jobs" / name, LRA[name.split("-")[0].replace("still", "retrieval")]
    found = result(job)

    def accuracy(split: str) -> float:
        lines = predictions(job, split)
        labels = [task.labels[label] for _, label in read(task, str(lra_dir), split)]
        assert [line["label"] for line in lines] == labels
        assert [line["id"] for line in lines] == list(range(len(labels)))
        guesses = [task.labels[max(range(task.num_labels), key=line["logits"].__getitem__)] for line in lines]
        assert [line["prediction"] for line in lines] == guesses
        return sum(map(str.__eq__, guesses, labels)) / len(labels)

    assert found["score"] == pytest.approx(accuracy("test")) and found["scores"].keys() == {"test"}
    if name == "still-1":  # whose validation set is the test set
        assert "selection" not in found and not (job / "predictions-validation.jsonl").exists()
    else:
        assert found["selection"] == pytest.approx(accuracy("validation"))
        assert found["validation_examples"] == {"validation": len(predictions(job, "validation"))}


def test_a_batch_in_parts_trains_to_the_same_predictions_up_to_rounding(trained):
    whole, parts = (predictions(trained[1] / "jobs" / name) for name in ("listops-1", "micro-1"))
    logits = [torch.tensor([line["logits"] for line in lines]) for lines in (whole, parts)]
    assert logits[0].std(0).min() > 1e-3
    torch.testing.assert_close(*logits, atol=2e-4, rtol=1e-3)


def test_trained_models_are_kept_on_request(trained):
    state = torch.load(trained[1] / "jobs/retrieval-1/latest-rank0.pt", map_location="cpu", weights_only=False)
    tensors = state["state"]["model"]
    assert tensors["model.pair.weight"].shape == (16, 64) and tensors["model.classifier.weight"].shape == (2, 16)


def test_repeating_the_command_trains_nothing_and_rebuilds_corrupt_arrays(trained, copied):
    arguments, copy = copied
    values = copy / "arrays/listops/train/values.bin"
    whole = values.read_bytes()
    values.write_bytes(whole[:-3])
    jobs = snapshot(copy / "jobs")
    done = run("lra.py", *arguments)
    assert done.returncode == 0 and done.stderr.count("done earlier") == 5, done.stderr
    assert f"{copy / 'arrays/listops'} is missing or corrupt; reading the files again" in done.stderr
    assert values.read_bytes() == whole and snapshot(copy / "jobs") == jobs
    assert done.stdout.split("report  ")[0] == trained[2].stdout.split("report  ")[0]


def test_a_changed_rate_or_row_reruns_only_its_task_and_runs_are_compared(trained, copied, lra_dir, tmp_path, capsys):
    arguments, copy = copied
    shutil.copytree(lra_dir, tmp_path / "data")
    path = tmp_path / "data/listops-1000/basic_val.tsv"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    jobs = snapshot(copy / "jobs")
    given = [f"lra_dir={tmp_path / 'data'}", "tasks.retrieval.lr=0.5", "tasks_to_run=[listops,retrieval,still]"]
    done = run("lra.py", *arguments, *given, "seeds=1")
    assert done.returncode == 0, done.stderr
    assert "Retrieval seed 1: task changed since its result, so it runs again" in done.stderr
    assert "ListOps seed 1: data changed since its result, so it runs again" in done.stderr
    assert done.stderr.count("done earlier") == 1  # Still reads no validation set
    now = snapshot(copy / "jobs")
    assert {name.split("/")[0] for name in now if now[name] != jobs[name]} == {"listops-1", "retrieval-1"}
    lra.main(["report", str(trained[1]), str(copy), "--resamples", "100", "--out", str(tmp_path / "out")])
    shown = capsys.readouterr().out
    assert "over the test examples" in shown and re.search(r"\| ListOps +\|.*p = ", shown), shown
    compared = json.loads((tmp_path / "out/compare.json").read_text())["differences"]["copy"]
    assert compared.keys() == {"listops", "retrieval", "still"} and compared["still"]["mean"] == 0.0  # one test set


def test_a_killed_command_resumes_to_the_same_scores_and_predictions(trained, write_yaml, tmp_path):
    path = write_yaml(tmp_path / "lra.yaml", tasks_to_run=["listops"])
    jobs = tmp_path / "run/jobs"
    process = warm.start("lra.py", path, output=tmp_path / "out")
    running = jobs / "listops-2/metrics.jsonl"
    warm.wait_for(lambda: (jobs / "listops-1/result.json").exists() and running.exists(), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    first = snapshot(jobs / "listops-1")
    done = run("lra.py", path)
    assert done.returncode == 0 and done.stderr.count("done earlier") == 1, done.stderr
    assert snapshot(jobs / "listops-1") == first
    for name in ("listops-1", "listops-2"):
        expected = trained[1] / "jobs" / name
        for file in ("predictions-test.jsonl", "predictions-validation.jsonl"):
            assert (jobs / name / file).read_bytes() == (expected / file).read_bytes()
        assert result(jobs / name)["scores"] == result(expected)["scores"]


KILLER = """
import os, signal
from pathlib import Path
from composer import Callback

class Killer(Callback):
    def __init__(self, folder):
        self.left = Path(folder, "left")

    def maybe(self, state, event):
        steps = self.left.read_text().split()
        if "killed" in state.run_name and steps[:1] == [f"{event}{state.timestamp.batch.value}"]:
            self.left.write_text(" ".join(steps[1:]))
            os.kill(os.getpid(), signal.SIGKILL)

    def batch_end(self, state, logger):
        self.maybe(state, "step")

    def fit_end(self, state, logger):
        self.maybe(state, "end")
"""


@pytest.mark.parametrize("interval", ["1ba", "1ep"])
def test_a_killed_job_resumes_to_the_bits_of_an_uninterrupted_one(write_yaml, tmp_path, caplog, interval):
    name = f"killer_{interval}"  # the module, which is imported once
    (tmp_path / f"{name}.py").write_text(KILLER)
    (tmp_path / "left").write_text("step9 step22 end24")
    same = {"like": "listops", "epochs": 3, "batch_size": 8, "lr": 0.01, "seeds": [1], "dropout": 0.3}
    given = {
        "tasks": {"whole": {**same, "title": "Whole"}, "killed": {**same, "title": "Killed"}},
        "tasks_to_run": ["whole", "killed"], "code_paths": [str(tmp_path / f"{name}.py")], "save_interval": interval,
        "callbacks": {f"{name}:Killer": {"folder": str(tmp_path)}}, "algorithms": {"ema": {"half_life": "5ba"}},
    }  # fmt: skip
    path, jobs = write_yaml(tmp_path / "lra.yaml", **given), tmp_path / "run/jobs"
    for step in {"1ba": (8, 21, 24), "1ep": (8, 16, 24)}[interval]:
        with pytest.raises(SystemExit):
            lra.main([str(path)])
        assert [file.name.split("-")[1] for file in jobs.glob("killed-1/ep*.pt")] == [f"ba{step}"]
    with caplog.at_level("INFO", logger="lion"):
        lra.main([str(path)])
    assert f"Killed seed 1: resumes from step {step}" in caplog.text
    assert f"resuming from step {step}\n" in (jobs / "killed-1/log.txt").read_text()
    for file in ("predictions-test.jsonl", "predictions-validation.jsonl"):
        assert (jobs / "killed-1" / file).read_bytes() == (jobs / "whole-1" / file).read_bytes()
    lines = [[json.loads(line) for line in (jobs / job / "metrics.jsonl").open()] for job in ("whole-1", "killed-1")]
    whole, killed = ([{k: v for k, v in line.items() if "second" not in k} for line in of_job] for of_job in lines)
    assert killed == whole
    assert not list(jobs.glob("*/*.pt"))


def test_a_job_that_was_stopped_early_does_not_train_on_and_corrupt_or_odd_checkpoints_are_no_failure(
    write_yaml, tmp_path, caplog
):
    stopper = {
        "monitor": "accuracy",
        "dataloader_label": "validation",
        "comp": "less",
        "min_delta": 1,
        "patience": "1ep",
    }
    task = {"like": "listops", "epochs": 5, "batch_size": 8, "lr": 0.01, "seeds": [1], "title": "Stopped"}
    given = {"tasks": {"stopped": task}, "tasks_to_run": ["stopped"], "save_finetuned_checkpoints": True}
    path = write_yaml(tmp_path / "lra.yaml", **given, callbacks={"early_stopper": stopper})
    job = tmp_path / "run/jobs/stopped-1"
    lra.main([str(path)])
    (saved,), expected = job.glob("ep*.pt"), result(job)
    assert saved.name < "ep5"
    (job / "predictions-test.jsonl").unlink()
    lra.main([str(path)])
    assert [*job.glob("ep*.pt")] == [saved] and result(job)["scores"] == expected["scores"]
    saved.write_bytes(saved.read_bytes()[:-100])
    (job / "predictions-test.jsonl").unlink()
    lra.main([str(path)])  # starts over
    assert [*job.glob("ep*.pt")] == [saved] and result(job)["scores"] == expected["scores"]
    (tmp_path / "odd_callback.py").write_text(
        "from composer import Callback\nclass Odd: pass\n"
        "class Own(Callback):\n    def state_dict(self):\n        return {'odd': Odd()}\n"
    )
    given |= {
        "code_paths": [str(tmp_path / "odd_callback.py")],
        "save_finetuned_checkpoints": False,
        "save_interval": "4ba",
    }
    path = write_yaml(tmp_path / "lra.yaml", **given, callbacks={"odd_callback:Own": {}})
    lra.main([str(path)])
    warning = "would execute odd_callback.Odd when loaded; it was not opened; let the state_dict of your own callbacks"
    assert (job / "log.txt").read_text().count(warning) == 1 and not [*job.glob("*.pt")]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("lra_dir=null", "lra_dir is not set, but ListOps is read from its folder listops-1000"),
        ("lra_dir=nowhere", "lra_dir: nowhere is not a directory"),
        ("tasks_to_run=[pathfinder]", "does not exist, but Pathfinder is read from it; generate it with"),
        ("tasks_to_run=[image]", "uoft-cs/cifar10 is not a folder, and cannot be loaded from the Hugging Face Hub"),
        ("lra_dir={outer}", "pathfinder128 is the broken copy of the release, on which nothing can be learned"),
        ("tasks.listops.size=32", "tasks.listops.size=32"),
        ("tasks.listops.model={{hidden_dropout_prob: 0.5}}", "tasks.listops.model.hidden_dropout_prob: use the tasks'"),
        ("model.hidden_dropout_prob=0.5", "model.hidden_dropout_prob: use the tasks' own field, dropout"),
        ("model.hiden_size=8", "unknown key model.hiden_size; did you mean hidden_size?"),
        ("model.num_attention_heads=0", "model.num_attention_heads=0"),
        ("model.num_hidden_layers=six", "model.num_hidden_layers='six' must be an integer"),
        ("model.hidden_act=foo", "model.hidden_act=foo must be one of"),
        ("tasks.listops.model={{hiden_size: 8}}", "unknown key tasks.listops.model.hiden_size"),
        ("model={{hidden_size: 10, num_attention_heads: 3}}", "tasks.listops.model: "),
        (
            "model={{mixer: softmax, long_reach: false, max_position_embeddings: 100}}",
            "exceeds the model's 100 positions",
        ),
        ("tasks.listops.folder=other", "other/basic_train.tsv does not exist"),
        ("tasks.listops.microbatch_size=9", "tasks.listops.microbatch_size=9 is more than batch_size=8"),
        ("tasks.listops.optimizer=sgd", "tasks.listops.optimizer"),
        ("starting_checkpoint_load_path=./nowhere.pt", "./nowhere.pt is not a file or folder; fix its path"),
        ("scheduler.name=steps", "scheduler"),
    ],
)
def test_a_mistake_is_reported_before_any_training(write_yaml, tmp_path, monkeypatch, override, words):
    monkeypatch.setattr("src.jobs.jobs.start_server", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    write_pathfinder(tmp_path / "outer", 2, "pathfinder128/curv_contour_length_14", 128)
    (tmp_path / "outer/lra_release/pathfinder128").mkdir(parents=True)
    given = ["tasks_to_run=[pathx]"] if "outer" in override else ["tasks_to_run=[listops]"]
    with pytest.raises(UserError) as error:
        lra.main([str(write_yaml(tmp_path / "lra.yaml")), *given, override.format(outer=tmp_path / "outer")])
    assert words in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.glob("run/jobs")) and not list(tmp_path.rglob("values.bin"))


def test_a_mistake_ends_with_status_2_and_a_dry_run_with_0_and_both_write_nothing(write_yaml, tmp_path):
    path = write_yaml(tmp_path / "lra.yaml")
    assert_one_sentence(run("lra.py", path, "lra_dir=nowhere"), "lra_dir: nowhere is not a directory")
    assert_one_sentence(run("lra.py", path, "dry_run=true", "tasks_to_run=[pathx]"), "pathfinder128", "does not exist")
    done = run("lra.py", path, "dry_run=true")
    assert done.returncode == 0, done.stderr
    assert "would run  5 jobs (ListOps, Retrieval, In parts, Still), from random weights, on cpu, 1" in done.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["lra.yaml"]
