"""Reports of a run, comparison of several, and the files for GLUE's server."""

import json
from pathlib import Path

import pytest
import torch

from src.errors import RunFailed, UserError
from src.glue.examples import Example
from src.glue.experiment import GlueExperiment, write_submission
from src.glue.tasks import GLUE, Task, select
from src.jobs import predictions, report
from src.jobs.experiment import Average, mean_score
from src.jobs.predictions import predicted
from src.jobs.scores import score

PNG = b"\x89PNG\r\n\x1a\n"
AVERAGES = GlueExperiment.averages
(AVERAGE,) = AVERAGES


def compare_command(*arguments: object) -> None:
    report.main(GlueExperiment, list(map(str, arguments)))


def summarize(results: list[dict]) -> list[dict]:
    return report.summarize(results, AVERAGES)


def write_predictions(path: Path, task: Task, logits: torch.Tensor, examples: list[Example]) -> None:
    predictions.write(path, logits, task.labels, [(example.id, example.label) for example in examples])


def result(task: str, seed: int, value: float, variant: str = "") -> dict:
    return {"task": task, "title": GLUE[task].title, "metrics": list(GLUE[task].metrics), "majority": 0.5, "seed": seed,
            "score": value, "variant": variant, "folder": f"{task}-{variant}{seed}"}  # fmt: skip


def test_the_report_has_mean_and_deviation_over_seeds_and_averages_only_all_eight_tasks():
    results = [result(name, 19, 0.8) for name in GLUE if name != "rte"]
    rows = summarize([*results, result("rte", 1, 0.5), result("rte", 2, 0.7)])
    rte = rows[-1]
    assert (rte["mean"], rte["std"]) == pytest.approx((0.6, 0.02**0.5))
    assert rte["seeds"] == {"1": 0.5, "2": 0.7}
    assert AVERAGE.of(rows) == pytest.approx((7 * 0.8 + 0.6) / 8)
    assert "GLUE average: 77.50" in report.text(rows, AVERAGES)
    assert "60.00 ± 14.14" in report.text(rows, AVERAGES)
    assert AVERAGE.of(rows[:-1]) is None
    assert "not computed, lacks RTE" in report.text(rows[:-1], AVERAGES)


def test_results_on_other_data_are_not_in_the_glue_average():
    rows = summarize([{**result(name, 1, 0.8), "glue": name != "rte"} for name in GLUE])
    assert AVERAGE.of(rows) is None
    assert "GLUE average: not computed, lacks RTE" in report.text(rows, AVERAGES)
    assert "GLUE" not in report.text(rows[1:2], AVERAGES)  # an RTE of one's own


def test_a_mean_over_too_few_seeds_is_marked_and_cannot_win_a_search():
    values = {"lr=1e-05": [0.9], "lr=3e-05": [0.7, 0.5], "lr=1e-04": [0.4, 0.6]}
    results = [
        {**result("rte", seed, value, variant), "of": 3}
        for variant, scores in values.items()
        for seed, value in enumerate(scores)
    ]
    results += [{**result(name, 1, 0.8), "of": 1} for name in GLUE if name != "rte"]
    rows = summarize(results)
    assert rows[0]["variant"] == "lr=3e-05"
    assert report.spread(rows[0]) == "60.00 ± 14.14 (2 of 3 seeds)" and report.spread(rows[1]) == "80.00"
    text = report.text(rows, AVERAGES)
    assert "90.00 (1 of 3 seeds)" in text
    assert "GLUE average: 77.50 (RTE: 2 of 3 seeds)" in text
    compared = report.table(
        {"a": report.Run(Path("a"), {"tasks": rows}, {row["task"]: row for row in rows})}, {}, AVERAGES
    )
    assert " 60.00 ± 14.14 (2 of 3 seeds)* |" in compared and " 77.50 (RTE: 2 of 3 seeds) |" in compared


def test_a_search_reports_all_candidates_and_marks_the_best_as_picked():
    values = {"lr=1e-05": (0.6, 0.8), "lr=3e-05": (0.75, 0.75)}
    results = [
        result("rte", seed, value, variant) for variant, pair in values.items() for seed, value in enumerate(pair)
    ]
    (row,) = summarize(results)
    assert (row["variant"], row["mean"], row["seeds"]) == ("lr=3e-05", 0.75, {"0": 0.75, "1": 0.75})
    assert [candidate["mean"] for candidate in row["candidates"]] == pytest.approx([0.7, 0.75])
    text = report.text([row], AVERAGES)
    assert "| RTE* " in text and "lr=3e-05, picked" in text and "lr=1e-05 " in text
    assert "on the validation set itself" in text


def test_candidates_are_compared_on_the_validation_set_if_scores_are_of_another():
    given = {"lr=1e-05": (0.6, 0.9), "lr=3e-05": (0.7, 0.8)}
    results = [{**result("rte", 1, score, variant), "selection": s} for variant, (score, s) in given.items()]
    (row,) = summarize(results)
    assert (row["variant"], row["mean"], row["selection"]) == ("lr=1e-05", 0.6, {"1": 0.9})
    text = report.text([row], AVERAGES)
    assert "on the validation set.\n" in text and "biased" not in text
    assert "lr=1e-05, picked |      90.00 | 60.00" in text
    del results[1]["selection"]  # of an earlier version
    (row,) = summarize(results)
    assert row["variant"] == "lr=3e-05" and "biased" in report.text([row], AVERAGES)


def test_a_run_has_several_averages_which_name_tasks_at_chance():
    averages = Average("all", "All", {"rte": "RTE", "cola": "CoLA"}), Average("few", "Without CoLA", {"rte": "RTE"})
    results = [result("rte", seed, 0.5 + seed / 10) | {"at_chance": seed == 0} for seed in range(3)]
    results += [result("cola", seed, 0.4) | {"at_chance": True} for seed in range(2)]
    rows = report.summarize(results, averages)
    assert [average.of(rows) for average in averages] == pytest.approx([0.5, 0.6])
    text = report.text(rows, averages)
    assert "All: 50.00 (RTE: 1 of 3 seeds at chance, CoLA at chance)" in text
    assert "Without CoLA: 60.00 (RTE: 1 of 3 seeds at chance)" in text
    assert "50.00 (chance), 60.00, 70.00 |" in text
    assert "At chance, no better than one answer to all: RTE, seed 0; CoLA, seeds 0 and 1." in text
    assert report.remarks({"a": rows, "b": []})[0].endswith("RTE of a, seed 0; CoLA of a, seeds 0 and 1.")


def test_notes_are_in_the_report_once_with_their_tasks():
    rows = summarize(
        [result(task, seed, 0.5) | {"notes": ["generated, seed 0"]} for task in ("rte", "cola") for seed in (1, 2)]
    )
    assert report.text(rows, AVERAGES).endswith("\n\nNotes:\n- RTE, CoLA: generated, seed 0")
    other = summarize([result("rte", 1, 0.5)])
    assert report.remarks({"a": rows, "b": other}) == ["Notes:\n- RTE of a, CoLA: generated, seed 0"]


def test_failed_jobs_are_in_the_report(tmp_path):
    report.write([result("rte", 1, 0.5)], AVERAGES, tmp_path, "run", ["RTE seed 2: out of memory"])
    for name in ("report.md", "report.json"):
        assert "RTE seed 2: out of memory" in (tmp_path / name).read_text()
    assert (tmp_path / "report.png").read_bytes().startswith(PNG)


def test_a_full_disk_is_reported(tmp_path):
    (tmp_path / "report.json.unfinished").symlink_to("/dev/full")
    with pytest.raises(RunFailed, match=r"cannot write to .*No space left on device\); free space there"):
        report.write([], AVERAGES, tmp_path, "run")


# Several runs


def write_run(folder: Path, task: str, seeds: dict[int, torch.Tensor], labels: torch.Tensor, split: str = "dev",
              variant: str = "", failed: tuple[str, ...] = (), texts: str | None = None) -> Path:  # fmt: skip
    """A finished run of one task, from its logits by seed."""
    results = []
    for seed, logits in seeds.items():
        place = folder / "jobs" / f"{task}-{seed}"
        place.mkdir(parents=True)
        scores = {split: score(GLUE[task].metrics, predicted(logits), labels, GLUE[task].num_labels)}
        written = {
            **result(task, seed, mean_score(scores.values()), variant),
            "scores": scores,
            "labels": list(GLUE[task].labels),
            "folder": place.name,
        }
        written |= {"validation_texts": {split: texts}} if texts else {}
        (place / "result.json").write_text(json.dumps(written))
        lines = [{"logits": row, "label": label} for row, label in zip(logits.tolist(), labels.float().tolist())]
        (place / predictions.file_name(split)).write_text("".join(json.dumps(line) + "\n" for line in lines))
        results.append(written)
    report.write(results, AVERAGES, folder, folder.name, failed)
    return folder


def noisy(labels: torch.Tensor, right: float, seed: int) -> torch.Tensor:
    """Logits that are right for this share of the examples."""
    draw = torch.rand(len(labels), generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.one_hot(torch.where(draw < right, labels, 1 - labels), 2).float()


@pytest.fixture
def labels() -> torch.Tensor:
    return torch.randint(2, (400,), generator=torch.Generator().manual_seed(0))


def difference_of(folders: list[Path], task: str) -> report.Difference | None:
    return report.difference(*report.read_runs(folders, "glue.py").values(), task, 500)


def test_the_interval_of_an_accuracy_is_the_binomials(tmp_path, labels):
    """All of the second run's errors away from none of the first's: the variance of the difference is known."""
    first = write_run(tmp_path / "a", "rte", {1: noisy(labels, 0.8, 1)}, labels)
    second = write_run(tmp_path / "b", "rte", {1: noisy(labels, 0.6, 1)}, labels)  # wrong wherever the first is
    found = difference_of([first, second], "rte")
    half = 1.96 * (-found.mean * (1 + found.mean) / 400) ** 0.5
    assert found.mean == pytest.approx(-0.2, abs=0.05)
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half), abs=0.012)
    assert found.p == pytest.approx(2 / 501)  # no resample says the contrary


@pytest.mark.parametrize("task", ["rte", "mrpc", "cola"])
def test_identical_runs_do_not_differ_and_equally_good_ones_not_significantly(tmp_path, labels, task):
    seeds = {seed: noisy(labels, 0.7, seed) for seed in (1, 2)}
    folders = [write_run(tmp_path / name, task, seeds, labels) for name in ("a", "b")]
    found = difference_of(folders, task)
    assert (found.mean, found.low, found.high, found.p) == (0, 0, 0, 1)
    other = write_run(tmp_path / "c", task, {seed: noisy(labels, 0.7, 10 + seed) for seed in (1, 2)}, labels)
    found = difference_of([folders[0], other], task)
    assert found.low < 0 < found.high and found.p > 0.05


def test_a_regression_is_compared_by_its_correlation(tmp_path):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(6, (300,), generator=generator).float()
    near, far = (labels + noise * torch.randn(300, generator=generator) for noise in (0.5, 4))
    folders = [
        write_run(tmp_path / name, "stsb", {1: values}, labels) for name, values in (("far", far), ("near", near))
    ]
    found = difference_of(folders, "stsb")
    assert 0.2 < found.low < found.mean < found.high and found.p < 0.01


def test_the_report_command_shows_runs_side_by_side(tmp_path, labels, capsys):
    first = write_run(tmp_path / "base", "rte", {1: noisy(labels, 0.6, 1), 2: noisy(labels, 0.6, 2)}, labels)
    second = write_run(tmp_path / "better", "rte", {1: noisy(labels, 0.9, 3), 3: noisy(labels, 0.9, 4)}, labels)
    write_run(tmp_path / "alone", "cola", {1: noisy(labels, 0.9, 3)}, labels)
    compare_command(first, second, tmp_path / "alone", "--out", tmp_path / "out", "--resamples", 200)
    shown = capsys.readouterr().out
    assert "| better − base" in shown and "paired bootstrap of 200 resamples" in shown
    assert "p = 0.010" in shown  # (0 + 1) · 2 / 201
    assert (tmp_path / "out" / "compare.md").read_text().strip() in shown
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(PNG)
    written = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert written["differences"]["better"]["rte"]["low"] > 0
    assert written["differences"]["alone"] == {}
    compare_command(first)
    assert "| RTE " in capsys.readouterr().out


def test_runs_on_different_examples_are_not_compared(tmp_path, labels, capsys):
    first = write_run(tmp_path / "a", "rte", {1: noisy(labels, 0.6, 1)}, labels)
    second = write_run(tmp_path / "b", "rte", {1: noisy(labels[:300], 0.6, 1)}, labels[:300])
    assert difference_of([first, second], "rte") is None
    compare_command(first, second)
    assert "other examples" in capsys.readouterr().out


def test_runs_on_different_texts_with_the_same_labels_are_not_compared(tmp_path, labels):
    folders = {
        texts: write_run(tmp_path / str(texts), "rte", {1: noisy(labels, 0.6, 1)}, labels, texts=texts)
        for texts in ("a", "b", None)
    }
    assert difference_of([folders["a"], folders["b"]], "rte") is None
    assert difference_of([folders["a"], folders[None]], "rte") is not None  # a run that did not take them down


def test_the_same_examples_may_come_from_the_hub_and_from_files(tmp_path, labels):
    folders = [
        write_run(tmp_path / split, "rte", {1: noisy(labels, 0.6, 1)}, labels, split) for split in ("dev", "validation")
    ]
    assert difference_of(folders, "rte").p == 1


def test_a_comparison_marks_picked_candidates_and_failed_jobs(tmp_path, labels, capsys):
    first = write_run(tmp_path / "a", "rte", {1: noisy(labels, 0.6, 1)}, labels, failed=("RTE seed 2: out of memory",))
    second = write_run(tmp_path / "b", "rte", {1: noisy(labels, 0.9, 1)}, labels, variant="lr=1e-05")
    compare_command(first, second, "--resamples", "100")
    shown = capsys.readouterr().out
    (row,) = [line for line in shown.splitlines() if line.startswith("| RTE")]
    assert row.split("|")[3].strip()[-1] != "*" and row.split("|")[4].strip()[-1] == "*"
    assert "\\* Picked by a search on these examples" in shown
    assert "a lacks jobs that failed: RTE seed 2: out of memory" in shown


def test_runs_that_cannot_be_compared_are_named(tmp_path, labels):
    folder = write_run(tmp_path / "a", "rte", {1: noisy(labels, 0.6, 1)}, labels)
    with pytest.raises(UserError, match=r"cannot read .*nowhere/report\.json \(No such file"):
        compare_command(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"report\.json/report\.json \(Not a directory\); give the save_folder"):
        compare_command(folder / "report.json")
    with pytest.raises(UserError, match=r"--out: .*report\.json is not a directory"):
        compare_command(folder, "--out", folder / "report.json")
    with pytest.raises(UserError, match="named twice"):
        compare_command(folder, folder)
    other = write_run(tmp_path / "b", "rte", {1: noisy(labels, 0.6, 1)}, labels)
    (other / "jobs/rte-1/predictions-dev.jsonl").write_text('{"logits": [1')
    with pytest.raises(UserError, match="rte-1 lacks readable predictions"):
        compare_command(folder, other)
    (other / "report.json").write_text('{"tasks"')
    with pytest.raises(UserError, match=r"cannot read .*report\.json \(Expecting"):
        compare_command(other)


def test_predictions_of_this_and_earlier_versions_are_read(tmp_path):
    logits, labels = torch.tensor([[2.0, 1], [0, 3], [1, 0]]), [1.0, 1.0, 0.0]
    examples = [Example(("a text",), label, number) for number, label in enumerate(labels, 2)]
    write_predictions(tmp_path / "predictions-dev.jsonl", GLUE["rte"], logits, examples)
    lines = predictions.read(tmp_path, "dev")
    assert lines[0] == {"id": 2, "logits": [2, 1], "prediction": "entailment", "label": "not_entailment"}
    earlier = [
        {"logits": line["logits"], "prediction": line["prediction"], "label": label}
        for line, label in zip(lines, labels)
    ]
    (tmp_path / "predictions-old.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in earlier))
    for split in ("dev", "old"):
        found = predictions.read_tensors(tmp_path, split, GLUE["rte"].labels)
        assert [values.tolist() for values in found] == [[0, 1, 0], [1, 1, 0]]


def test_regression_predictions_are_numbers(tmp_path):
    write_predictions(
        tmp_path / "predictions-dev.jsonl", GLUE["stsb"], torch.tensor([2.5]), [Example(("a", "b"), 3.8, 7)]
    )
    assert predictions.read(tmp_path, "dev") == [{"id": 7, "logits": 2.5, "prediction": 2.5, "label": 3.8}]
    found = predictions.read_tensors(tmp_path, "dev", ())
    assert [values.tolist() for values in found] == [[2.5], [pytest.approx(3.8)]]


@pytest.mark.parametrize("task", ["rte", "stsb"])
def test_runs_of_this_and_earlier_versions_are_compared(tmp_path, labels, task):
    logits = noisy(labels, 0.7, 1) if task == "rte" else labels + noisy(labels, 0.7, 1)[:, 0]
    folders = [write_run(tmp_path / name, task, {1: logits}, labels) for name in ("earlier", "present")]
    path = folders[1] / "jobs" / f"{task}-1" / "predictions-dev.jsonl"
    write_predictions(path, GLUE[task], logits, [Example(("x",), float(label), i) for i, label in enumerate(labels)])
    found = difference_of(folders, task)
    assert (found.mean, found.low, found.high, found.p) == (0, 0, 0, 1)


# The server's files


def test_submission_files_have_the_servers_labels_and_the_best_seeds_predictions(tmp_path):
    splits = {name: task.tsv_test for name, task in GLUE.items()}
    splits["mnli"] += ("AX",)
    predictions = {
        "mnli": "neutral",
        "qnli": "not_entailment",
        "rte": "entailment",
        "sst2": "positive",
        "cola": "unacceptable",
        "mrpc": "equivalent",
        "qqp": "not_duplicate",
        "stsb": 5.25,
    }
    results = []
    for name, prediction in predictions.items():
        for seed, value in ((1, 0.6), (2, 0.9)):
            place = tmp_path / "jobs" / f"{name}-{seed}"
            place.mkdir(parents=True)
            written = {
                **result(name, seed, value),
                "labels": list(GLUE[name].labels),
                "test_splits": list(splits[name]),
                "folder": place.name,
            }
            (place / "result.json").write_text(json.dumps(written))
            for split in splits[name]:
                told = [prediction, prediction if seed == 2 else (0.0 if name == "stsb" else GLUE[name].labels[-1])]
                (place / f"predictions-{split}.jsonl").write_text(
                    "".join(json.dumps({"prediction": p}) + "\n" for p in told)
                )
            results.append(written)
    folder = tmp_path / "submission"
    assert write_submission(summarize(results), tmp_path) == f"test sets    {folder}; the server also needs WNLI.tsv"
    expected = {
        "MNLI-m": "neutral",
        "MNLI-mm": "neutral",
        "AX": "neutral",
        "QNLI": "not_entailment",
        "RTE": "entailment",
        "SST-2": "1",
        "CoLA": "0",
        "MRPC": "1",
        "QQP": "0",
        "STS-B": "5.000",
    }
    assert {path.stem for path in folder.iterdir()} == expected.keys()
    for name, shown in expected.items():
        assert (folder / f"{name}.tsv").read_text() == f"index\tprediction\n0\t{shown}\n1\t{shown}\n"
    (folder / "WNLI.tsv").touch()  # as a user may put it there
    line = write_submission(summarize(results[4:]), tmp_path)
    needed, earlier = "MNLI-m.tsv, MNLI-mm.tsv, AX.tsv, QNLI.tsv, WNLI.tsv", "AX.tsv, MNLI-m.tsv, MNLI-mm.tsv, QNLI.tsv"
    assert line.endswith(f"/submission; the server also needs {needed}; from earlier runs: {earlier}")


def test_a_class_name_may_contain_any_character(tmp_path):
    (task,) = select(["mine"], {"mine": {"columns": ["a"], "hub": "b", "labels": ["a\tb\nc", "d\u2028e\x85f"]}}, 7)
    (tmp_path / "jobs/mine-1").mkdir(parents=True)
    logits = torch.tensor([[1.0, 0], [0, 1]])
    write_predictions(tmp_path / "jobs/mine-1/predictions-test.jsonl", task, logits, [Example(("x",), None)] * 2)
    (tmp_path / "jobs/mine-1/result.json").write_text(json.dumps({"labels": task.labels, "test_splits": ["test"]}))
    write_submission([{"task": "mine", "seeds": {"1": 0.5}, "folders": {"1": "mine-1"}}], tmp_path)
    written = (tmp_path / "submission/mine-test.tsv").read_text(encoding="utf-8")
    assert written.split("\n") == ["index\tprediction", "0\ta\\tb\\nc", "1\td\u2028e\x85f", ""]
