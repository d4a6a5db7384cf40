"""The time before the first step: from when it counts."""

from types import SimpleNamespace

import psutil
import pytest

from src.training.startup import Startup


@pytest.mark.parametrize(
    ("rank", "parent", "launched"),
    [
        ("0", ["python", "/bin/composer", "-n", "2", "main.py"], True),
        ("0", ["python", "-m", "composer.cli.launcher", "-n", "2", "main.py"], True),
        ("0", ["bash"], False),
        (None, ["composer"], False),
        (None, None, False),
    ],
)
def test_a_start_counts_from_the_birth_of_the_launcher_if_there_is_one(rank, parent, launched, monkeypatch):
    if rank is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", rank)
    launcher = parent and SimpleNamespace(cmdline=lambda: parent, create_time=lambda: 100.0)
    own = SimpleNamespace(parent=lambda: launcher, create_time=lambda: 103.0)
    monkeypatch.setattr(psutil, "Process", lambda: own)
    monkeypatch.setattr("time.time", lambda: 105.0)
    startup = Startup()
    assert startup.begun == (100.0 if launched else 103.0)
    assert startup.parts == ({"launcher": 3.0} if launched else {}) | {"imports": 2.0}
