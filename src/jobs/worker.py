"""The process of one job: its log file, device, progress messages, errors and result."""

import os
import shutil
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from composer import Callback, Logger, State

from src import cli
from src.cli import log
from src.errors import RunFailed, UserError, first_line, reason
from src.files import write_json
from src.jobs.experiment import LOG_FILE, RESULT_FILE, Experiment, Job
from src.training.trainer import configure_process


class StepReporter(Callback):
    """Sends the training step to the main process, twice a second."""

    def __init__(self, connection: Connection):
        self.connection, self.total, self.sent = connection, 0, 0.0

    def batch_end(self, state: State, logger: Logger) -> None:
        if time.monotonic() - self.sent > 0.5:
            self.sent = time.monotonic()
            self.connection.send(("step", state.timestamp.batch.value, self.total))


def run_job(
    experiment: Experiment, job: Job, device: str, gpu: str | None, threads: int | None, connection: Connection
) -> None:
    """Run a job in this process and store its result; on failure, send the reason and exit with status 1.

    Args:
        gpu: ID of the only GPU that the job may use; None: all.
        threads: number of torch threads on a CPU; None: torch's default.
    """
    threading.Thread(target=_exit_with_parent, args=(connection,), daemon=True).start()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    if threads is not None:
        torch.set_num_threads(threads)
    configure_process(device)
    try:
        _log_to(job.folder / LOG_FILE)
        result = experiment.run(job, device, StepReporter(connection))
        write_json(job.folder / RESULT_FILE, {**result, "settings": job.settings})
    except UserError as error:
        connection.send(("failed", str(error)))
        log.info(f"error: {error}")
        sys.exit(1)
    except Exception as error:
        connection.send(("failed", f"{type(error).__name__}: {first_line(error)}"))  # first: the disk may be full
        traceback.print_exc()
        sys.exit(1)


def _log_to(path: Path) -> None:
    """Redirect all output of this process to a file in an empty folder. Raises RunFailed if it cannot be written."""
    shutil.rmtree(path.parent, ignore_errors=True)
    try:
        path.parent.mkdir(parents=True)
        with path.open("w") as file:
            os.dup2(file.fileno(), sys.stdout.fileno())
            os.dup2(file.fileno(), sys.stderr.fileno())
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {reason(error)}") from None
    cli.start_log()


def _exit_with_parent(connection: Connection) -> None:
    """Wait until the main process ends, for whatever reason, then end this one."""
    try:
        connection.recv()
    except (EOFError, OSError):
        os._exit(1)
