"""Jobs of an experiment that has nothing to do with GLUE."""

import json
from types import SimpleNamespace

import pytest
from toy_experiment import ToyExperiment

from src.jobs import jobs, report


def experiment(folder, **changes) -> ToyExperiment:
    config = {"save_folder": str(folder), "base_run_name": "toy", "device": "cpu", "parallel": 2, "rerun": False}
    return ToyExperiment(
        SimpleNamespace(**{**config, "progress_bar": False, "log_level": "info", "size": 10, "failing": "", **changes})
    )


def test_an_experiment_runs_resumes_reports_and_is_compared(tmp_path, capsys, caplog):
    jobs.run(experiment(tmp_path / "a"))
    out = capsys.readouterr().out
    assert "Toy average: 50.00 (Odd: 1 of 2 seeds at chance, " in out and "| Odd " in out  # seed 2 is always wrong
    assert "Toy average without Even: 50.00 (Odd: " in out and "| 100.00, 0.00 (chance) |" in out
    assert "At chance, no better than one answer to all: Odd, seed 2; Even, seed 2." in out
    assert "- Odd, Even: 10 numbers" in out
    written = json.loads((tmp_path / "a/report.json").read_text())
    assert written["toy"] == written["toy_odd"] == 0.5
    with caplog.at_level("INFO", logger="lion"):
        jobs.run(experiment(tmp_path / "a"))
    assert caplog.text.count("done earlier") == 4 and capsys.readouterr().out == out
    with caplog.at_level("INFO", logger="lion"):
        jobs.run(experiment(tmp_path / "a", size=20))
    assert "Odd seed 1: size changed since its result, so it runs again" in caplog.text
    jobs.run(experiment(tmp_path / "b", size=20))
    report.main(ToyExperiment, [str(tmp_path / "a"), str(tmp_path / "b"), "--resamples", "100"])
    assert "+0.00 [+0.00, +0.00], p = 1.000" in capsys.readouterr().out


def test_failed_jobs_are_reported_and_run_again(tmp_path, capsys, caplog):
    with caplog.at_level("INFO", logger="lion"), pytest.raises(SystemExit):
        jobs.run(experiment(tmp_path, failing="even", log_level="warning"))
    assert sorted(message.split("] ")[-1] for message in caplog.messages) == [
        "Even seed 1: failed, fails, as it should",
        "Even seed 2: failed, fails, as it should",
        "error: 2 of 4 jobs failed; the same command runs them again",
    ]
    assert (tmp_path / "jobs/even-1/log.txt").read_text() == "error: fails, as it should\n"
    assert "- Even seed 2: fails, as it should (log: " in capsys.readouterr().out
    jobs.run(experiment(tmp_path))
    assert "Toy average: 50.00" in capsys.readouterr().out
