"""The lines of metrics.jsonl and the progress bar, on a full disk too, and the estimate of the time left."""

import datetime
import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from composer import Time, Timestamp

from src.files import METRICS, read_json_lines
from src.mlm.task import CURVES
from src.training.run_log import RunLog


def state_at(step: int, seconds: float = 1.0) -> SimpleNamespace:
    """The state of a run of 1,000 steps of 8 samples and 100 tokens, `seconds` each."""
    now = Timestamp(batch=step, sample=8 * step, token=100 * step, total_wct=datetime.timedelta(seconds=step * seconds))
    end = Time.from_batch(1000)
    return SimpleNamespace(
        timestamp=now,
        max_duration=end,
        schedulers=[],
        dataloader_len=None,
        get_elapsed_duration=lambda: Time.from_timestring(f"{step / 1000}dur"),
    )


def run(log: RunLog, steps: range, seconds: float = 1.0) -> None:
    log.fit_start(state_at(steps[0] - 1, seconds), None)
    for step in steps:
        log.log_metrics({"loss/train/total": 2.0, "metrics/train/MaskedAccuracy": 0.25})
        log.batch_end(state_at(step, seconds), None)


def test_a_line_has_step_samples_loss_accuracy_and_rates(tmp_path):
    run(RunLog(tmp_path, "5ba", show_progress=False, curves=CURVES), range(1, 11))
    lines = read_json_lines(tmp_path / METRICS)
    assert [line["step"] for line in lines] == [5, 10]
    assert lines[1] == {
        "step": 10,
        "samples": 80,
        "seconds": 10.0,
        "loss": 2.0,
        "accuracy": 0.25,
        "samples_per_second": 8.0,
        "tokens_per_second": 100.0,
    }


@pytest.mark.parametrize(
    ("reported", "shown"),
    [
        ({}, ""),
        ({"throughput/flops_per_sec": 3.4e12}, ", 3.40TFLOP/s"),
        ({"throughput/flops_per_sec": 3.4e12, "throughput/device/mfu": 0.336}, ", 3.40TFLOP/s (34% of peak)"),
    ],
)
def test_the_bar_shows_loss_accuracy_and_rates(tmp_path, reported, shown):
    log = RunLog(tmp_path, "5ba", show_progress=False, curves=CURVES)
    log.log_metrics(reported)
    run(log, range(1, 11), seconds=0.002)
    assert log._postfix() == f"loss 2.000, accuracy 25.0%, 4.00k samples/s, 50.0k tokens/s{shown}"


@pytest.mark.parametrize(
    ("first", "seconds", "logged"), [(1, 1.0, [11]), (1, 30.0, [2]), (501, 12.0, [503]), (1, 0.0, [])]
)
def test_the_time_left_is_estimated_once_after_the_first_steps(tmp_path, caplog, first, seconds, logged):
    log = RunLog(tmp_path, "100ba", show_progress=False, curves=CURVES)
    with caplog.at_level("INFO", logger="lion"):
        for step in range(first, first + 30):
            before = len(caplog.records)
            if step == first:
                log.fit_start(state_at(step - 1, seconds), None)
            log.log_metrics({"loss/train/total": 2.0})
            log.batch_end(state_at(step, seconds), None)
            assert (len(caplog.records) > before) == (step in logged)
    for step in logged:
        minutes = -(-(1000 - step) * seconds // 60)
        rate = f"{100 / seconds:,.0f}"
        assert f"about {minutes // 60:.0f}:{minutes % 60:02.0f} hours left at {rate} tokens/s" in caplog.text


def test_a_full_disk_loses_lines_but_not_the_run_and_warns_once(tmp_path, monkeypatch, caplog):
    log = RunLog(tmp_path, "1ba", show_progress=False, curves=CURVES)
    run(log, range(1, 4))
    before, original, full = (tmp_path / "metrics.jsonl").read_bytes(), Path.open, [True]

    def full_disk(path, mode="r", *rest, **named):
        file = original(path, mode, *rest, **named)
        if mode == "a" and full:
            file.write('{"step": ')  # as much as there is room for
            file.close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return file

    monkeypatch.setattr(Path, "open", full_disk)
    run(log, range(4, 7))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert caplog.text.count("No space left on device") == 1
    full.clear()
    run(log, range(7, 9))
    assert [line["step"] for line in read_json_lines(tmp_path / METRICS)] == [1, 2, 3, 7, 8]


def test_lines_after_the_checkpoint_are_dropped_and_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    log = RunLog(tmp_path, "1ba", show_progress=False, curves=CURVES)
    run(log, range(1, 6))
    log.after_load(state_at(3), None)
    assert [line["step"] for line in read_json_lines(tmp_path / METRICS)] == [1, 2, 3]

    def full(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    log.after_load(state_at(2), None)
    assert "No space left on device" in caplog.text
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
