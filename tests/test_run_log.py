"""What a run reports: metrics.jsonl, bar, TensorBoard files, on a full disk too; the time of startup and the time
left."""

import datetime
import errno
import json
import logging
import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from composer import Event, Time, Timestamp
from tensorboard.summary.writer.record_writer import RecordWriter

from src.files import METRICS, read_json_lines
from src.mlm.task import CURVES
from src.training.registry import build_all
from src.training.run_log import LibraryMessages, RunLog, Startup


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
    run(RunLog(tmp_path, "5ba", curves=CURVES), range(1, 11))
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


def test_an_evaluation_counts_if_any_rank_had_a_label(tmp_path, monkeypatch):
    metric = {name: SimpleNamespace(update_count=n, compute=lambda: 0.5) for name, n in (("a", 0), ("b", 0), ("c", 2))}
    monkeypatch.setattr("composer.utils.dist.all_gather_object", lambda own: [own, ["eval/a"]])
    log, state = RunLog(tmp_path, "5ba"), state_at(5)
    state.eval_metrics = {"eval": metric}
    log.eval_end(state, None)
    assert read_json_lines(tmp_path / METRICS)[0]["eval"] == {"eval/a": 0.5, "eval/c": 0.5}


@pytest.mark.parametrize(
    ("reported", "shown"),
    [
        ({}, ""),
        ({"throughput/flops_per_sec": 3.4e12}, ", 3.40TFLOP/s"),
        ({"throughput/flops_per_sec": 3.4e12, "throughput/device/mfu": 0.336}, ", 3.40TFLOP/s (34% of peak)"),
    ],
)
def test_the_bar_shows_loss_accuracy_and_rates(tmp_path, reported, shown):
    log = RunLog(tmp_path, "5ba", curves=CURVES)
    log.log_metrics(reported)
    run(log, range(1, 11), seconds=0.002)
    assert log._postfix() == f"loss 2.000, accuracy 25.0%, 4.00k samples/s, 50.0k tokens/s{shown}"


@pytest.mark.parametrize(
    ("first", "seconds", "logged"), [(1, 1.0, [11]), (1, 30.0, [2]), (501, 12.0, [503]), (1, 0.0, [])]
)
def test_the_time_left_is_estimated_once_after_the_first_steps(tmp_path, caplog, first, seconds, logged):
    log = RunLog(tmp_path, "100ba", curves=CURVES)
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
        time = f"about {minutes // 60:.0f}:{minutes % 60:02.0f} hours" if minutes > 1 else "less than a minute"
        assert f"{time} left at {rate} tokens/s" in caplog.text


def test_a_step_in_which_the_model_is_compiled_does_not_count_in_the_time_left(tmp_path, caplog):
    log = RunLog(tmp_path, "100ba", curves=CURVES, compiles=True)
    with caplog.at_level("INFO", logger="lion"):
        log.fit_start(state_at(0, 1.0), None)
        log.log_metrics({"loss/train/total": 2.0})
        for step in range(1, 12):
            log.batch_end(state_at(step, 1 if step == 1 else (step + 40) / step), None)
    assert "about 0:17 hours left at 100 tokens/s" in caplog.text


def test_a_full_disk_loses_lines_but_not_the_run_and_warns_once(tmp_path, monkeypatch, caplog):
    log = RunLog(tmp_path, "1ba", curves=CURVES)
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
    log = RunLog(tmp_path, "1ba", curves=CURVES)
    run(log, range(1, 6))
    log.after_load(state_at(3), None)
    assert [line["step"] for line in read_json_lines(tmp_path / METRICS)] == [1, 2, 3]

    def full(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    log.after_load(state_at(2), None)
    assert "No space left on device" in caplog.text
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


@pytest.fixture
def libraries(monkeypatch):
    """Messages of libraries pass to a new log; what it changes is undone."""
    loggers = [logging.getLogger(name) for name in LibraryMessages.libraries]
    before = [(logger.level, logger.handlers, logger.propagate) for logger in loggers]
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    yield LibraryMessages()
    for logger, (level, handlers, propagate) in zip(loggers, before):
        logger.level, logger.handlers, logger.propagate = level, handlers, propagate


def warn(library: str, text: str) -> None:
    """Warn as code of a library does."""
    warnings.warn_explicit(text, UserWarning, f"/venv/lib/site-packages/{library}/core.py", 1)


def test_warnings_of_libraries_are_logged_once_in_one_line(libraries, caplog, recwarn):
    with warnings.catch_warnings(), caplog.at_level("INFO", logger="lion"):
        warnings.simplefilter("always")
        libraries.start()
        libraries.start()
        for _ in range(2):
            logging.getLogger("streaming.base.dataset").warning("a shard is\n  slow")
            warn("composer", "The warmup\nis 0")
            warn("composer", "No batches were trained for global rank 0, which is usual")
        logging.getLogger("composer.trainer").info("Using precision fp32")
        warn("numpy", "overflow")
    assert caplog.messages == ["streaming: a shard is slow", "composer: The warmup is 0"]
    assert [str(warning.message) for warning in recwarn.list] == ["overflow"]


def test_messages_of_libraries_are_debug(libraries, caplog):
    with warnings.catch_warnings(), caplog.at_level("DEBUG", logger="lion"):
        libraries.start()
        logging.getLogger("composer.trainer").info("Using precision fp32")
    with caplog.at_level("ERROR", logger="lion"):
        libraries.start()
        logging.getLogger("composer.trainer").warning("slow")
    assert caplog.messages == ["composer: Using precision fp32"]


def test_startup_time_counts_from_the_start_of_the_process_and_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(create_time=lambda: 103.0))
    clock = iter([105.0, 109.5, 110.0])
    monkeypatch.setattr("src.training.run_log.time", SimpleNamespace(time=lambda: next(clock)))
    with caplog.at_level("INFO", logger="lion"):
        startup = Startup()
        assert startup.started == 103.0
        startup.done("data")
        for _ in range(3):
            startup.batch_end(None, None)
    logged = [record.message for record in caplog.records if record.name == "lion"]
    assert logged == ["first step after 7.0 s: 2.0 imports, 4.5 data, 0.5 first step"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's writer thread
@pytest.mark.parametrize("full_at", [Event.INIT, Event.BATCH_END, Event.EVAL_END, None])
def test_a_full_disk_loses_event_files_but_not_the_run_and_warns_once(tmp_path, monkeypatch, caplog, full_at):
    def full_disk(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    state = SimpleNamespace(run_name="tiny", timestamp=SimpleNamespace(batch=100))
    uploads = SimpleNamespace(upload_file=lambda **_: None)
    (board,) = build_all("loggers", {"tensorboard": {"log_dir": str(tmp_path)}})
    for event in (Event.INIT, Event.BATCH_END, Event.EVAL_END, Event.EPOCH_END, Event.FIT_END):
        if event == full_at:
            monkeypatch.setattr(RecordWriter, "write", full_disk)
            monkeypatch.setattr(RecordWriter, "flush", full_disk)
        board.run_event(event, state, uploads)
        for step in range(30):  # more than the queue holds
            board.log_metrics({"loss/train/total": 2.0}, step=step)
    if full_at is None:
        monkeypatch.setattr(RecordWriter, "flush", full_disk)
    board.close(state, uploads)
    board.post_close()
    assert caplog.text.count(f"cannot write to {tmp_path}: No space left on device; the run continues without it") == 1
