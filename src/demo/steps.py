"""What the demos share: steps that are announced, timed and done once, and commands of this project."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from src.data.workers import usable_cores
from src.files import is_newer

ROOT = Path(__file__).resolve().parents[2]
RUNNING: set[subprocess.Popen] = set()
STARTING, STOPPING = threading.Lock(), threading.Event()  # once stopping, no process starts


class Steps:
    """The steps below a folder, and the seconds that each took."""

    def __init__(self, out: Path):
        self.out = out
        self.begin, self.seconds = time.monotonic(), {}

    def step(
        self, title: str, outputs: Sequence[Path], action: Callable[[], object], source: Path | None = None
    ) -> None:
        """Announce a step, do it unless its outputs exist and are newer than their source, and time it."""
        print(f"\n=== {title}", flush=True)
        start = time.monotonic()
        if outputs and all(path.exists() if source is None else is_newer(path, source) for path in outputs):
            print(f"done earlier: {', '.join(map(str, outputs))}", flush=True)
        else:
            action()
        self.seconds[title] = time.monotonic() - start

    def print_seconds(self) -> None:
        self.seconds["total"] = time.monotonic() - self.begin  # steps may overlap
        print("\n" + "\n".join(f"{title:40}{seconds:6.0f} s" for title, seconds in self.seconds.items()), flush=True)


def discard(folder: Path) -> None:
    """Remove a folder of outputs, if there is one, under another name, so that an interruption leaves no part of it."""
    if folder.exists():
        print(f"removing {folder}, which is older than what it was made from", flush=True)
        old = folder.with_name(f"{folder.name}-outdated")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        shutil.rmtree(old)


def run(*commands: Sequence[object], meanwhile: Callable[[], None] | None = None) -> None:
    """Print and run commands of this project in parallel, and a function meanwhile; exit if one fails."""
    processes: list[subprocess.Popen] = []
    for command in commands:
        words = [str(word).removeprefix(f"{ROOT}/") for word in command]
        print(f"$ python {' '.join(words)}", flush=True)
        program = [str(ROOT / word) if word.endswith((".py", ".yaml")) else word for word in words]
        with STARTING:
            if STOPPING.is_set():
                raise SystemExit(1)
            processes.append(subprocess.Popen([sys.executable, *program]))
            RUNNING.add(processes[-1])
    try:
        if meanwhile is not None:
            meanwhile()
        status = max((abs(process.wait()) for process in processes), default=0)
    finally:
        for process in processes:
            process.terminate()
    if status:
        raise SystemExit(status)


def share_cores(jobs: int) -> list[str]:
    """Divide the cores among jobs. Return arguments of a command that runs beside others."""
    if jobs == 1:
        return []
    os.environ["OMP_NUM_THREADS"] = str(max(1, usable_cores() // jobs))
    return ["progress_bar=false"]


def in_rounds(rounds: Sequence[Sequence[Callable[[], None]]], jobs: int, after_round: Callable[[int], None]) -> None:
    """Run all actions, `jobs` at a time and in order, and `after_round(number)` when all of a round are done. If one
    fails, end the commands that run."""
    with ThreadPoolExecutor(jobs) as pool:
        submitted: list[list[Future]] = [[pool.submit(action) for action in actions] for actions in rounds]
        try:
            for number, futures in enumerate(submitted):
                for done in futures:
                    done.result()
                after_round(number)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            with STARTING:
                STOPPING.set()
                for process in RUNNING:
                    process.terminate()
            raise
