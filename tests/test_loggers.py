"""TensorBoard files on a full disk."""

import errno
import os
from types import SimpleNamespace

import pytest
from composer import Event
from tensorboard.summary.writer.record_writer import RecordWriter

from src.training.registry import build_all


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
