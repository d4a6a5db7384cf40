"""Run jobs in processes, one or several at a time, forked from a server that has already imported what they need."""

import multiprocessing
import os
import time
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from src import cli
from src.cli import log
from src.data.workers import usable_cores
from src.errors import UserError
from src.jobs.experiment import LOG_FILE, RESULT_FILE, Experiment, Job

ROOT = Path(__file__).resolve().parents[2]
Failure = tuple[Job, str]  # and the reason
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
        try:
            while self.connection.poll():
                kind, *values = self.connection.recv()
                if kind == "step":
                    self.step, self.steps = values
                else:
                    (self.reason,) = values
        except (EOFError, OSError):  # the process has ended
            pass


def devices(parallel: Any, device: str) -> list[str | None]:
    """Return one entry per concurrent job: its GPU's ID, or None if it is not bound to a GPU."""
    import torch

    if isinstance(parallel, bool) or parallel is None:
        number = None if parallel else 1
    elif isinstance(parallel, int) and parallel > 0:
        number = parallel
    else:
        raise UserError(f"parallel={parallel!r} must be true, false or a number of jobs")
    if device == "cpu":
        return [None] * (number or usable_cores())
    if number == 1:
        return [None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if number is not None and number > len(gpus):
        raise UserError(f"parallel={number} is more than the {len(gpus)} GPUs; each job takes one")
    return list(gpus[:number])


def start_server(preload: str) -> None:
    """Start the server that jobs are forked from, if it is not running; its imports run in the background."""
    before = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), *before.values()))  # Python < 3.12 does not pass sys.path
    forkserver.set_forkserver_preload(["src.jobs.worker", preload])
    forkserver.ensure_running()
    del os.environ["PYTHONPATH"]
    os.environ.update(before)


def run_all(experiment: Experiment, jobs: list[Job], device: str, gpus: list[str | None]) -> list[Failure]:
    """Run jobs, as many at a time as `gpus` has entries (if several, costliest first). Returns the failures."""
    import torch

    if not jobs:
        return []
    start_server(experiment.preload)
    several = len(gpus) > 1
    threads = max(1, torch.get_num_threads() // len(gpus)) if several and device == "cpu" else None
    waiting = sorted(jobs, key=lambda job: -job.cost) if several else list(jobs)
    free, running, failures = list(gpus), [], []
    total = sum(job.cost for job in jobs)
    bar = cli.progress(total=total, smoothing=0, bar_format=BAR) if experiment.config.progress_bar else None
    try:
        with logging_redirect_tqdm():
            while waiting or running:
                while free and (job := next_job(waiting, running, failures)):
                    running.append(start(experiment, job, device, free.pop(0), threads))
                wait([each.process.sentinel for each in running] + [each.connection for each in running], timeout=0.5)
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
        if bar is not None:
            bar.close()
    return failures


def next_job(waiting: list[Job], running: list[Running], failures: list[Failure]) -> Job | None:
    """Take the first job that need not wait for another; a job that waits for a failed one fails too."""
    failed = {job.folder for job, _ in failures}
    unfinished = {job.folder for job in waiting} | {each.job.folder for each in running}
    for job in list(waiting):
        if job.after is not None and job.after.folder in failed:
            waiting.remove(job)
            failures.append((job, f"not run, since {job.after.name}, which it starts from, failed"))
        elif job.after is None or job.after.folder not in unfinished:
            waiting.remove(job)
            return job
    return None


def start(experiment: Experiment, job: Job, device: str, gpu: str | None, threads: int | None) -> Running:
    from src.jobs.worker import run_job

    context = multiprocessing.get_context("forkserver")
    connection, its_end = context.Pipe()
    process = context.Process(target=run_job, args=(experiment, job, device, gpu, threads, its_end), name=job.name)
    process.start()
    its_end.close()
    return Running(job, process, connection, gpu, time.monotonic())


def end(ended: Running, failures: list[Failure], number: str) -> None:
    """Log how a job ended; if it failed, record it in `failures`."""
    ended.process.join()
    ended.connection.close()
    job, status = ended.job, ended.process.exitcode
    if status == 0 and (job.folder / RESULT_FILE).is_file():
        score, seconds = job.read_result()["score"], time.monotonic() - ended.started
        log.info(f"{number} {job.name}: {100 * score:.2f} in {seconds:.0f} s")
        return
    killed = f"killed by signal {-status} (out of memory?)" if status < 0 else f"ended with status {status}"
    reason = ended.reason or killed
    logged = f" (log: {job.folder / LOG_FILE})" if (job.folder / LOG_FILE).is_file() else ""
    failures.append((job, reason + logged))
    log.info(f"{number} {job.name}: failed, {reason}")


def show(bar: tqdm, waiting: list[Job], running: list[Running], total: int) -> None:
    """Show how many jobs are done, the time left (estimated from the remaining cost), and each running job's step."""
    done = f"{total - len(waiting) - len(running)} of {total} jobs done"
    steps = [f"{each.job.name} step {each.step:,} of {each.steps:,}" for each in running]
    bar.set_postfix_str("; ".join([done, *steps]), refresh=False)
    left = sum(job.cost for job in waiting) + sum(each.job.cost * (1 - each.step / each.steps) for each in running)
    bar.update(bar.total - left - bar.n)
