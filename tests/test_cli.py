"""What commands share: which process speaks."""

import logging

import pytest

from src import cli


@pytest.mark.parametrize(("rank", "waits"), [("0", []), ("1", [(cli.PATIENCE, "")])])
def test_an_error_is_said_by_the_main_process_first(rank, waits, monkeypatch, capsys):
    slept = []  # seconds, and what was said before
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("time.sleep", lambda seconds: slept.append((seconds, capsys.readouterr().err)))
    assert cli.fail(cli.UserError("a key\nis wrong")) == 2
    assert slept == waits
    assert capsys.readouterr().err == "error: a key is wrong\n"


@pytest.mark.parametrize(("rank", "level"), [("0", logging.INFO), ("1", logging.ERROR)])
def test_the_main_process_alone_logs(rank, level, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    before = cli.log.level
    try:
        cli.start_log()
        assert cli.log.level == level
    finally:
        cli.log.setLevel(before)
