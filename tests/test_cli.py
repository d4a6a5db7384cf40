"""What every command shares: which process prints, exit statuses, and the lock on a folder."""

import errno
import importlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

from src import cli, errors
from src.files import exclusive_lock


def end(error: Exception) -> int:
    """The exit status of a command that raises an error."""

    def main(argv):
        raise error

    with pytest.raises(SystemExit) as ended:
        cli.run(main)
    return ended.value.code


@pytest.mark.parametrize(("rank", "waits"), [("0", []), ("1", [(cli.RANK_DELAY, "")])])
def test_the_main_process_prints_an_error_first(rank, waits, monkeypatch, capsys):
    slept = []  # seconds, and what was printed before
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("time.sleep", lambda seconds: slept.append((seconds, capsys.readouterr().err)))
    monkeypatch.setattr("src.cli.start_log", lambda: None)
    assert end(errors.UserError("a key\nis wrong")) == 2
    assert slept == waits
    assert capsys.readouterr().err == "error: a key is wrong\n"


@pytest.mark.parametrize(
    ("rank", "given", "level"),
    [("0", "info", logging.INFO), ("0", "debug", logging.DEBUG), ("1", "info", logging.ERROR)],
)
def test_only_the_main_process_logs_from_its_level_on(rank, given, level, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    before = cli.log.level
    try:
        cli.start_log(given)
        assert cli.log.level == level
    finally:
        cli.log.setLevel(before)


@pytest.mark.parametrize(
    ("module", "subcommand", "named"),
    [
        ("main", "context", "main.py context"),
        ("vision", "evaluate", "vision.py evaluate"),
        ("vision", "predict", "vision.py predict"),
        ("vision", "draw", "vision.py draw"),
        ("embed", "evaluate", "embed.py evaluate"),
        ("embed", "encode", "embed.py encode"),
        ("lra", "make", "lra.py make"),
        ("lra", "shards", "lra.py shards"),
        ("glue", "report", "glue.py"),
        ("glue", "run.yaml", "glue.py"),
        ("src.horizons.__main__", "", "src.horizons"),
    ],
)
def test_a_command_of_one_process_is_refused_on_several_ranks(module, subcommand, named, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(errors.UserError, match=f"start {named} with python, not a launcher; "):
        importlib.import_module(module).main([subcommand])


@pytest.mark.parametrize(
    ("ending", "status", "logged"),
    [
        ("Ctrl-C", 130, 1),
        (signal.SIGINT, 130, 1),  # Ctrl-C after Composer was imported
        ("Ctrl-C in W&B", 130, 1),  # which replaces sys.exit
        (signal.SIGTERM, 143, 0),
        ("a command that logged it itself", 130, 0),
    ],
)
def test_an_interrupted_command_ends_with_the_status_of_its_signal(ending, status, logged, monkeypatch, caplog):
    from composer.core.engine import sigterm_handler

    def main(argv):
        if ending == "Ctrl-C":
            raise KeyboardInterrupt
        if ending == "Ctrl-C in W&B":
            exit_ = sys.exit
            monkeypatch.setattr(sys, "exit", lambda code: exit_(code))
            sigterm_handler(signal.SIGINT, None)
        if isinstance(ending, signal.Signals):
            sigterm_handler(ending, None)  # raises SystemExit
        sys.exit(130)

    monkeypatch.setattr("src.cli.start_log", lambda: None)
    with caplog.at_level(logging.INFO, cli.log.name), pytest.raises(SystemExit) as ended:
        cli.run(main)
    assert ended.value.code == status
    assert caplog.messages.count("interrupted; repeat the command to resume or restart it") == logged


@pytest.mark.parametrize(
    ("error", "status"), [(errors.UserError("no such key"), 2), (errors.RunFailed("disk full"), 1)]
)
def test_an_error_ends_a_command_with_its_status(error, status, monkeypatch, capsys):
    monkeypatch.setattr("src.cli.start_log", lambda: None)
    assert end(error) == status
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_full_disk_ends_a_command_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr("src.cli.start_log", lambda: None)
    full, absent = (OSError(number, os.strerror(number), "a.png") for number in (errno.ENOSPC, errno.ENOENT))
    assert end(full) == 1
    assert capsys.readouterr().err == "error: cannot write a.png (No space left on device); free disk space\n"
    with pytest.raises(FileNotFoundError):  # a mistake of ours
        end(absent)


def test_a_folder_is_locked_by_one_command_and_removed_if_left_empty(tmp_path):
    folder = tmp_path / "run"
    refused = pytest.raises(errors.UserError, match=f"another main.py is running in {folder}; wait for it")
    with exclusive_lock(folder, "main.py"), refused, exclusive_lock(folder, "main.py"):
        pass
    assert not folder.exists()
    with exclusive_lock(folder, "main.py"):
        (folder / "config.yaml").touch()
    assert (folder / "config.yaml").is_file()


HOLDER = """
import multiprocessing, sys, time
from pathlib import Path
from src.files import exclusive_lock
with exclusive_lock(Path(sys.argv[1]), "main.py"):
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,)).start()
    print("held", flush=True)
    time.sleep(20)
"""


def test_a_killed_command_releases_the_lock_even_if_its_workers_survive(tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path / "run"], cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(errors.UserError), exclusive_lock(tmp_path / "run", "main.py"):
            pass
        process.kill()
        process.wait()
        for attempts_left in range(100, -1, -1):  # a worker that has just started releases it a moment later
            try:
                with exclusive_lock(tmp_path / "run", "main.py"):
                    break
            except errors.UserError:
                if not attempts_left:
                    raise
                time.sleep(0.1)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
