"""Processes beside a run: what they inherit, how they fail, and that none outlives it."""

import os
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT

from src.publish.background import Worker, hold, run_script

pytestmark = pytest.mark.slow


DESCRIBE = """
import os, sys
names = "RANK", "OMP_NUM_THREADS", "GREETING"
print(*sys.argv[1:], *map(os.environ.get, names), os.nice(0), "torch" in sys.modules)
print(os.getsid(0), os.getpgrp() == os.getpid())
"""
FAILURES = {
    "raise UserError('the sentence')": "the sentence",
    "raise ValueError('first line\\nsecond line')": "ValueError: first line",
    "sys.exit(3)": "exit status 3",
    "os.kill(os.getpid(), 9)": "killed by signal 9",
}


def test_a_process_is_no_rank_and_has_its_environment_before_torch_is_imported(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "script.py").write_text(DESCRIBE)
    given = {"log": tmp_path / "log", "environment": {"GREETING": "hello"}, "aside": True}
    worker = Worker(run_script, tmp_path / "script.py", ["argument"], **given)
    assert worker.failure() is None and not worker.is_running()
    first, second = (tmp_path / "log").read_text().splitlines()
    assert first == "argument None 1 hello 19 False"
    # Out of reach of a Ctrl-C, but in this session: Linux weighs niceness within a session alone.
    assert second == f"{os.getsid(0)} True"


@pytest.mark.parametrize("code", FAILURES)
def test_a_failure_is_one_line(tmp_path, code):
    (tmp_path / "script.py").write_text(f"import os, sys\nfrom src.errors import UserError\n{code}\n")
    assert Worker(run_script, tmp_path / "script.py", []).failure() == FAILURES[code]


PARENT = """
import os, subprocess, sys, time
import psutil
sys.path.insert(0, sys.argv[1])
from src.publish.background import Worker

if __name__ == "__main__":
    worker = Worker(subprocess.call, ["sleep", "600"])
    process = psutil.Process(worker.process.pid)
    while not (children := process.children()):
        time.sleep(0.01)
    print(process.pid, children[0].pid, flush=True)
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["kill", "end"])
def test_a_process_and_its_own_end_with_the_run_however_that_ends(tmp_path, how):
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, tmp_path / "parent.py", ROOT, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.wait(30)
    deadline = time.monotonic() + 30
    for pid in pids:
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("links", [True, False])
def test_a_held_checkpoint_outlives_the_one_that_the_run_deletes(tmp_path, monkeypatch, links):
    def no_links(*_):
        raise OSError("Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    checkpoint, held = tmp_path / "ep0-ba3-rank0.pt", tmp_path / "held.pt"
    held.write_text("older")
    checkpoint.write_text("weights")
    hold(checkpoint, held)
    checkpoint.unlink()
    assert held.read_text() == "weights" and list(tmp_path.iterdir()) == [held]
