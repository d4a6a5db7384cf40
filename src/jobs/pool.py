"""Run jobs in processes of their own: first the main process's side, then, from StepReporter on, a job's side."""

import os
import shutil
import sys
import threading
import time
import traceback
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from composer import Callback, Logger, State
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from src import cli
from src.checkpoints.remote import FETCHED
from src.checkpoints.safe_load import is_valid_checkpoint
from src.cli import log
from src.data.workers import usable_cores
from src.errors import RunFailed, UserError, first_line, reason
from src.files import LATEST, write_json
from src.jobs.experiment import LOG_FILE, RESULT_FILE, SETTINGS_FILE, Experiment, Job
from src.training import choices
from src.training.checkpointing import checkpoints, delete_checkpoints
from src.training.trainer import configure_process

BAR = "{percentage:3.0f}% |{bar:20}| {elapsed} elapsed, {remaining} left{postfix}"


@dataclass
class Running:
    """A job in progress, and what its process has reported."""

    job: Job
    process: BaseProcess
    connection: Connection
    gpu: str | None
    started: float  # time.monotonic()
    step: int = 0
    steps: int = 1  # in total
    reason: str | None = None  # why it failed

    def receive(self) -> None:
        with suppress(EOFError, OSError):  # the process has ended
            while self.connection.poll():
                vars(self).update(self.connection.recv())


def devices(parallel: Any, device: str) -> list[str | None]:
    """Return one entry per concurrent job: its GPU's ID, or None if it is not bound to a GPU."""
    if not (isinstance(parallel, bool | None) or (isinstance(parallel, int) and parallel > 0)):
        raise UserError(f"parallel={parallel!r} must be true, false or a number of jobs")
    number = None if parallel is True else parallel or 1
    if device == "cpu":
        return [None] * (number or usable_cores())
    if number == 1:
        return [None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if number is not None and number > len(gpus):
        raise UserError(f"parallel={number} is more than the {len(gpus)} GPUs; each job takes one")
    return list(gpus[:number])


def run_all(experiment: Experiment, jobs: list[Job], device: str, gpus: list[str | None]) -> dict[Path, str]:
    """Run jobs, as many at a time as `gpus` has entries (if several, costliest first); return failures by folder."""
    several = len(gpus) > 1
    threads = max(1, torch.get_num_threads() // len(gpus)) if several and device == "cpu" else None
    waiting = sorted(jobs, key=lambda job: -job.cost) if several else list(jobs)
    free, running, failures = list(gpus), [], {}
    total = sum(job.cost for job in jobs)
    bar = cli.progress(total=total, smoothing=0, bar_format=BAR) if experiment.config.progress_bar else None
    with logging_redirect_tqdm(), nullcontext() if bar is None else bar:
        try:
            while waiting or running:
                while free and (job := next_job(waiting, running, failures)):
                    running.append(start(experiment, job, device, free.pop(0), threads))
                wait([part for each in running for part in (each.process.sentinel, each.connection)], timeout=0.5)
                for each in list(running):
                    ended = not each.process.is_alive()
                    each.receive()
                    if ended:
                        running.remove(each)
                        free.append(each.gpu)
                        end(each, failures, f"[{len(jobs) - len(waiting) - len(running)}/{len(jobs)}]")
                if bar is not None:
                    show(bar, waiting, running, len(jobs))
        finally:
            for each in running:
                each.process.kill()
                each.process.join()
    return failures


def next_job(waiting: list[Job], running: list[Running], failures: dict[Path, str]) -> Job | None:
    """Take the first job that need not wait for another; a job that waits for a failed one fails too."""
    unfinished = {job.folder for job in [*waiting, *(each.job for each in running)]}
    for job in list(waiting):
        if job.after is not None and job.after.folder in failures:
            waiting.remove(job)
            failures[job.folder] = f"{job.name}: not run, since {job.after.name}, which it starts from, failed"
        elif job.after is None or job.after.folder not in unfinished:
            waiting.remove(job)
            return job
    return None


def start(experiment: Experiment, job: Job, device: str, gpu: str | None, threads: int | None) -> Running:
    context = get_context("forkserver")
    connection, its_end = context.Pipe()
    fetched = os.environ.get(FETCHED, "{}")  # since the server that forks jobs started
    given = (experiment, job, device, gpu, threads, fetched, its_end)
    process = context.Process(target=run_job, args=given, name=job.name)
    process.start()
    its_end.close()
    return Running(job, process, connection, gpu, time.monotonic())


def end(ended: Running, failures: dict[Path, str], number: str) -> None:
    """Log how a job ended; if it failed, record it in `failures`."""
    job, status, log_file = ended.job, ended.process.exitcode, ended.job.folder / LOG_FILE
    if status == 0:
        seconds = time.monotonic() - ended.started
        log.info(f"{number} {job.name}: {100 * job.read_result()['score']:.2f} in {seconds:.0f} s")
        return
    killed = f"killed by signal {-status} (out of memory?)" if status < 0 else f"ended with status {status}"
    logged = f" (log: {log_file})" if log_file.is_file() else ""
    failures[job.folder] = f"{job.name}: {ended.reason or killed}{logged}"
    log.warning(f"{number} {job.name}: failed, {ended.reason or killed}")


def show(bar: tqdm, waiting: list[Job], running: list[Running], total: int) -> None:
    """Show how many jobs are done, the time left (estimated from the remaining cost), and each running job's step."""
    done = f"{total - len(waiting) - len(running)} of {total} jobs done"
    steps = [f"{each.job.name} step {each.step:,} of {each.steps:,}" for each in running]
    bar.set_postfix_str("; ".join([done, *steps]), refresh=False)
    left = sum(job.cost for job in waiting) + sum(each.job.cost * (1 - each.step / each.steps) for each in running)
    bar.update(bar.total - left - bar.n)


class StepReporter(Callback):
    """Sends the training step to the main process, twice a second."""

    def __init__(self, connection: Connection):
        self.connection, self.total, self.sent = connection, 0, 0.0

    def batch_end(self, state: State, logger: Logger) -> None:
        if time.monotonic() - self.sent > 0.5:
            self.sent = time.monotonic()
            self.connection.send({"step": state.timestamp.batch.value, "steps": self.total})


def run_job(
    experiment: Experiment,
    job: Job,
    device: str,
    gpu: str | None,
    threads: int | None,
    fetched: str,
    connection: Connection,
) -> None:
    """Run a job in this process and store its result; on failure, send the reason and exit with status 1."""

    def exit_with_parent() -> None:
        wait([connection])  # until the main process, which sends nothing, has ended, for whatever reason
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    os.environ[FETCHED] = fetched
    if gpu is not None:  # else all GPUs
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    if threads is not None:
        torch.set_num_threads(threads)
    configure_process(device)
    try:
        valid = job.saved_step() and any(map(is_valid_checkpoint, checkpoints(job.folder)))
        if not valid or experiment.config.rerun:
            shutil.rmtree(job.folder, ignore_errors=True)
        try:
            job.folder.mkdir(parents=True, exist_ok=True)
            write_json(job.folder / SETTINGS_FILE, job.settings)
            with (job.folder / LOG_FILE).open("a") as file:
                os.dup2(file.fileno(), sys.stdout.fileno())
                os.dup2(file.fileno(), sys.stderr.fileno())
        except OSError as error:
            raise RunFailed(f"cannot write {job.folder / LOG_FILE}: {reason(error)}") from None
        cli.start_log(experiment.config.log_level)
        if device == "cpu":
            choices.keep(choices.recall(experiment.folder, f"jobs/*/{RESULT_FILE}"), experiment.folder)
        result = experiment.run(job, device, StepReporter(connection))
        write_json(job.folder / RESULT_FILE, {**result, "settings": job.settings})
        if LATEST not in (experiment.files(job, result) or ()):
            delete_checkpoints(job.folder)
    except UserError as error:
        connection.send({"reason": str(error)})
        log.error(f"error: {error}")
        sys.exit(1)
    except Exception as error:
        connection.send({"reason": f"{type(error).__name__}: {first_line(error)}"})  # first: the disk may be full
        traceback.print_exc()
        sys.exit(1)
