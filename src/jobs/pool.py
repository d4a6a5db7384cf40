"""Jobs in processes of their own: one after another, or several at a time on GPUs or CPU cores."""

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from src import cli
from src.cli import log
from src.glue.config import FinetuneConfig
from src.glue.experiment import LOG_FILE, RESULT_FILE, Job, read_result, run_in_process
from src.jobs import fork_server

BAR = "{percentage:3.0f}% |{bar:20}| {elapsed} gone, {remaining} left{postfix}"


@dataclass(frozen=True)
class Failure:
    job: Job
    reason: str


@dataclass
class Running:
    """A job at work, and what its process has said."""

    job: Job
    process: BaseProcess
    connection: Connection
    place: str | None
    begun: float
    step: int = 0
    steps: int = 1  # of all
    reason: str | None = None  # why it failed

    def listen(self) -> None:
        try:
            while self.connection.poll():
                kind, *told = self.connection.recv()
                if kind == "step":
                    self.step, self.steps = told
                else:
                    (self.reason,) = told
        except (EOFError, OSError):  # it has ended
            pass

    @property
    def work_left(self) -> float:
        return self.job.work * (1 - self.step / self.steps)


def run_all(config: FinetuneConfig, jobs: list[Job], device: str, places: list[str | None]) -> list[Failure]:
    """Run jobs, as many at a time as there are places, the largest first; returns those that failed."""
    if not jobs:
        return []
    fork_server.start()
    several = len(places) > 1
    threads = max(1, torch.get_num_threads() // len(places)) if several and device == "cpu" else None
    waiting = sorted(jobs, key=lambda job: -job.work) if several else list(jobs)
    free, running, failures = list(places), [], []
    bar = (
        cli.progress(total=sum(job.work for job in jobs), smoothing=0, bar_format=BAR) if config.progress_bar else None
    )
    try:
        with logging_redirect_tqdm():
            while waiting or running:
                while free and (job := next_job(waiting, running, failures)):
                    running.append(begin(config, job, device, free.pop(0), threads))
                wait([each.process.sentinel for each in running] + [each.connection for each in running], timeout=0.5)
                for each in running:
                    each.listen()
                for each in [each for each in running if not each.process.is_alive()]:
                    running.remove(each)
                    free.append(each.place)
                    end(each, failures, len(jobs) - len(waiting) - len(running), len(jobs))
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
    """Take the first job that need not wait for another; one that waits for a failed job fails with it."""
    failed = {failure.job.folder for failure in failures}
    unfinished = {job.folder for job in waiting} | {each.job.folder for each in running}
    for job in list(waiting):
        if job.after is not None and job.after.folder in failed:
            waiting.remove(job)
            failures.append(Failure(job, f"not run, since {job.after.name}, which it starts from, failed"))
        elif job.after is None or job.after.folder not in unfinished:
            waiting.remove(job)
            return job
    return None


def begin(config: FinetuneConfig, job: Job, device: str, place: str | None, threads: int | None) -> Running:
    context = multiprocessing.get_context("forkserver")
    connection, its_end = context.Pipe()
    arguments = (config, job, device, place, threads, its_end)
    process = context.Process(target=run_in_process, args=arguments, name=job.name)
    process.start()
    its_end.close()
    return Running(job, process, connection, place, time.monotonic())


def end(ended: Running, failures: list[Failure], number: int, total: int) -> None:
    """Say how a job ended, and take down a failure."""
    ended.process.join()
    ended.listen()  # to its last words
    ended.connection.close()
    job, status = ended.job, ended.process.exitcode
    if status == 0 and (job.folder / RESULT_FILE).is_file():
        log.info(f"[{number}/{total}] {job.name}: {100 * read_result(job)['score']:.2f} in {time.monotonic() - ended.begun:.0f} s")  # fmt: skip
        return
    killed = f"killed by signal {-status} (out of memory?)" if status < 0 else f"ended with status {status}"
    reason = ended.reason or killed
    logged = f" (log: {job.folder / LOG_FILE})" if (job.folder / LOG_FILE).is_file() else ""
    failures.append(Failure(job, reason + logged))
    log.info(f"[{number}/{total}] {job.name}: failed, {reason}")


def show(bar: tqdm, waiting: list[Job], running: list[Running], total: int) -> None:
    """Jobs done of all, the time left by the work left, and the step of every running job."""
    done = total - len(waiting) - len(running)
    steps = [f"{each.job.name} step {each.step:,} of {each.steps:,}" for each in running]
    bar.set_postfix_str("; ".join([f"{done} of {total} jobs done", *steps]), refresh=False)
    left = sum(job.work for job in waiting) + sum(each.work_left for each in running)
    bar.update(bar.total - left - bar.n)
