"""The time before the first training step: when it starts, and how it is reported."""

from types import SimpleNamespace

import psutil

from src.training.startup import Startup


def test_startup_time_counts_from_the_start_of_the_process_and_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(create_time=lambda: 103.0))
    clock = iter([105.0, 109.5, 110.0])
    monkeypatch.setattr("src.training.startup.time", SimpleNamespace(time=lambda: next(clock)))
    with caplog.at_level("INFO", logger="lion"):
        startup = Startup()
        assert startup.started == 103.0
        startup.done("data")
        for _ in range(3):
            startup.batch_end(None, None)
    logged = [record.message for record in caplog.records if record.name == "lion"]
    assert logged == ["first step after 7.0 s: 2.0 imports, 4.5 data, 0.5 first step"]
