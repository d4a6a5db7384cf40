"""TensorBoard files where the disk is full."""

import errno
import os
import threading
from types import SimpleNamespace

import pytest
from composer import Event
from tensorboard.summary.writer.record_writer import RecordWriter

from src.training.registry import build_all


@pytest.mark.parametrize("full_at", [Event.INIT, Event.BATCH_END, Event.EVAL_END, None])
def test_a_full_disk_costs_event_files_and_no_run_and_is_told_once(tmp_path, monkeypatch, caplog, capfd, full_at):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("threading.excepthook", threading.__excepthook__)
    state = SimpleNamespace(run_name="tiny", timestamp=SimpleNamespace(batch=100))
    uploads = SimpleNamespace(upload_file=lambda **_: None)
    (board,) = build_all("loggers", {"tensorboard": {"log_dir": str(tmp_path)}})
    for event in (Event.INIT, Event.BATCH_END, Event.EVAL_END, Event.EPOCH_END, Event.FIT_END):
        if event == full_at:
            monkeypatch.setattr(RecordWriter, "write", full)
            monkeypatch.setattr(RecordWriter, "flush", full)
        board.run_event(event, state, uploads)
        for step in range(30):  # more than wait in the queue
            board.log_metrics({"loss/train/total": 2.0}, step=step)
    if full_at is None:
        monkeypatch.setattr(RecordWriter, "flush", full)
    board.close(state, uploads)
    board.post_close()
    assert caplog.text.count(f"cannot write to {tmp_path}: No space left on device; the run goes on without it") == 1
    assert "Traceback" not in capfd.readouterr().err
