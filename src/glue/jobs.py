"""All of a config's fine-tuning runs, each done once: one after another, or several at a time on GPUs or CPU cores."""

import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from tqdm.contrib.logging import logging_redirect_tqdm

from src import builders, cli
from src.cli import UserError, log
from src.config import FinetuneConfig, to_dict
from src.glue.job import CHECKPOINT_FILE, LOG_FILE, RESULT_FILE, Job, run_in_process
from src.glue.sources import check_sources, digest, read_task
from src.glue.start import build_model, read_start
from src.glue.tasks import FROM_MNLI, Task, select

ROOT = Path(__file__).resolve().parents[2]
Result = dict[str, Any]


@dataclass(frozen=True)
class Failure:
    job: Job
    reason: str


def run_jobs(config: FinetuneConfig) -> tuple[list[Result], list[Failure]]:
    """Run every task with every seed that has no result yet; returns all results, and the jobs that have none."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("glue.py is started by python, not by a launcher; parallel=true runs a job on every GPU")
    builders.quiet()
    device = builders.resolve_device(config.device)
    tasks = select(config.tasks_to_run, config.tasks, config.default_seed)
    check(config, tasks, device)
    places = where_to_run(config.parallel, device)
    folder = Path(config.save_folder)
    with alone_in(folder):
        start = read_start(config)
        build_model(start, replace(tasks[0], labels=tasks[0].labels or ("a", "b")))  # or weights that do not fit end it
        jobs = plan(config, tasks, start.digest())
        done = {job.folder: result for job in jobs if not config.rerun and (result := finished(job, config))}
        log.info(f"{config.base_run_name}: {len(jobs)} jobs ({', '.join(dict.fromkeys(task.title for task in tasks))}), from {start.name}, on {device}")  # fmt: skip
        log.info(f"scores and predictions: {folder}")
        for job in jobs:
            if job.folder in done:
                log.info(f"{job.name}: {100 * done[job.folder]['score']:.2f}, done earlier")
        del start  # every job's process reads it for itself
        todo = with_work(config, [job for job in jobs if job.folder not in done])
        with logging_redirect_tqdm():
            failures = run_all(config, todo, device, places[: len(todo)])
        failed = {failure.job.folder for failure in failures}
        results = [done.get(job.folder) or read_result(job) for job in jobs if job.folder not in failed]
    return results, failures


def check(config: FinetuneConfig, tasks: list[Task], device: str) -> None:
    """Raise UserError for what would stop a job later on."""
    for key in ("max_seq_len", "device_eval_batch_size"):
        if getattr(config, key) < 1:
            raise UserError(f"{key} {getattr(config, key)} must be at least 1")
    builders.build_scheduler(config.scheduler)
    builders.build_algorithms(config.algorithms)
    builders.build_callbacks(config.callbacks)
    builders.resolve_precision(config.precision, device)
    for task in tasks:
        builders.resolve_precision(task.precision or config.precision, device)
        builders.check_times(**{f"tasks.{task.name}.eval_interval": task.eval_interval})
        if task.optimizer not in builders.OPTIMIZERS:
            raise UserError(f"tasks.{task.name}.optimizer: {task.optimizer} is none of {', '.join(builders.OPTIMIZERS)}")  # fmt: skip
    if config.mnli_first:
        mnli = [task for task in tasks if task.name == "mnli"]
        if not mnli:
            raise UserError("mnli_first needs MNLI's encoder; add mnli to tasks_to_run")
        if len(mnli) > 1:
            raise UserError("mnli_first with a search over mnli: it is not known which encoder to take; give mnli one value each")  # fmt: skip
    check_sources(tasks, config.glue_dir, config.predict_test)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder for this process. Raises UserError where another one holds it, or it cannot be written."""
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(f"save_folder: another glue.py is at work in {folder}; wait for it, or name another folder") from None  # fmt: skip
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UserError(f"save_folder: {folder} cannot be written ({error.strerror}); name another folder") from None
    with lock:
        yield


def where_to_run(parallel: Any, device: str) -> list[str | None]:
    """Where jobs run at the same time: a GPU each, by its number, or so many processes on the CPU (None each)."""
    if isinstance(parallel, bool) or parallel is None:
        number = None if parallel else 1
    elif isinstance(parallel, int) and parallel > 0:
        number = parallel
    else:
        raise UserError(f"parallel: {parallel!r} is neither true, false nor a number of jobs")
    if device == "cpu":
        return [None] * (number or os.cpu_count() or 1)
    if number == 1:
        return [None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if number is not None and number > len(there):
        raise UserError(f"parallel: {number} jobs at a time, but there are {len(there)} GPUs; a job takes one")
    return list(there[:number])


def plan(config: FinetuneConfig, tasks: list[Task], start: dict[str, Any]) -> list[Job]:
    """A job a task and seed, each with what its result depends on: if any of it changes, the job runs again."""
    shared = {name: value for name, value in to_dict(config).items() if name in ("max_seq_len", "scheduler", "algorithms", "precision")}  # fmt: skip
    digests = {task.name: digest(task, config.glue_dir, config.predict_test) for task in tasks}

    def job(task: Task, seed: int, after: Job | None = None) -> Job:
        data = dict(digests[task.name])
        test_data = data.pop("test", None)
        hyperparameters = {key: value for key, value in asdict(task).items() if key not in ("title", "seeds", "files", "hub")}  # fmt: skip
        settings = {**shared, "task": hyperparameters, "seed": seed, "data": data, "start": after.settings if after else start}  # fmt: skip
        return Job(
            task=task,
            seed=seed,
            folder=Path(config.save_folder) / "jobs" / "-".join(filter(None, (task.name, task.variant, str(seed)))),
            settings=json.loads(json.dumps(settings)),
            test_data=json.loads(json.dumps(test_data)),
            after=after,
            keep_checkpoint=config.save_finetuned_checkpoints or (config.mnli_first and task.name == "mnli"),
        )

    mnli = next((job(task, task.seeds[0]) for task in tasks if task.name == "mnli" and config.mnli_first), None)
    return [job(task, seed, mnli if task.name in FROM_MNLI else None) for task in tasks for seed in task.seeds]


def finished(job: Job, config: FinetuneConfig) -> Result | None:
    """A job's result, if it has one that the same settings gave, with all that is asked for beside it."""
    try:
        result = read_result(job)
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    if not isinstance(result, dict) or "settings" not in result:
        return None
    if result["settings"] != job.settings:
        now = job.settings
        changed = [key for key in now if result["settings"].get(key) != now[key]]
        log.info(f"{job.name}: its result is of another {', '.join(changed)}, so it runs again")
        return None
    splits = [*result["scores"], *result["test_splits"]]
    files = [job.folder / f"predictions-{split}.jsonl" for split in splits]
    files += [job.folder / CHECKPOINT_FILE] if job.keep_checkpoint else []
    tested = not config.predict_test or result["test_data"] == job.test_data
    return result if tested and all(file.is_file() for file in files) else None


def read_result(job: Job) -> Result:
    return json.loads((job.folder / RESULT_FILE).read_text())


def with_work(config: FinetuneConfig, jobs: list[Job]) -> list[Job]:
    """The jobs with what they cost. Reads every row of their data, so that a bad one is told before any job runs."""
    work: dict[str, int] = {}
    for job in jobs:
        if job.task.name not in work:
            work[job.task.name] = read_task(job.task, config.glue_dir, config.predict_test).work // job.task.epochs
    return [replace(job, work=work[job.task.name] * job.task.epochs) for job in jobs]


@dataclass
class Running:
    job: Job
    process: BaseProcess
    connection: Connection
    place: str | None
    begun: float
    step: tuple[int, int] = (0, 1)  # done, of all
    reason: str | None = None  # why it failed

    def listen(self) -> None:
        """Take in what the process has said."""
        try:
            while self.connection.poll():
                kind, *told = self.connection.recv()
                if kind == "step":
                    self.step = (told[0], told[1])
                else:
                    self.reason = told[0]
        except (EOFError, OSError):  # it has ended
            pass


def run_all(config: FinetuneConfig, jobs: list[Job], device: str, places: list[str | None]) -> list[Failure]:
    """Run jobs in processes of their own, as many at a time as there are places, the largest first; returns those that failed.

    A fork server, which has imported the libraries once, starts the processes.
    """
    if not jobs:
        return []
    context = multiprocessing.get_context("forkserver")
    start_fork_server()
    threads = max(1, torch.get_num_threads() // len(places)) if device == "cpu" and len(places) > 1 else None
    waiting = sorted(jobs, key=lambda job: -job.work) if len(places) > 1 else list(jobs)
    free, running, failures, done = list(places), [], [], 0
    bar = cli.progress(total=sum(job.work for job in jobs), smoothing=0,
                       bar_format="{percentage:3.0f}% |{bar:20}| {elapsed} gone, {remaining} left{postfix}") if config.progress_bar else None  # fmt: skip
    try:
        while waiting or running:
            unfinished = {r.job.folder for r in running} | {job.folder for job in waiting}
            failed = {failure.job.folder for failure in failures}
            for job in list(waiting):
                if job.after is not None and job.after.folder in failed:
                    waiting.remove(job)
                    failures.append(Failure(job, f"not run, since {job.after.name}, which it starts from, failed"))
                elif free and not (job.after is not None and job.after.folder in unfinished):
                    waiting.remove(job)
                    running.append(begin(context, config, job, device, free.pop(0), threads))
            wait(
                [r.process.sentinel for r in running] + [r.connection for r in running if not r.connection.closed], 0.5
            )
            for each in list(running):
                each.listen()
                if each.process.is_alive():
                    continue
                each.process.join()
                each.listen()
                running.remove(each)
                free.append(each.place)
                done += 1
                tell(each, failures, done, len(jobs))
                each.connection.close()
            if bar is not None:
                left = sum(job.work for job in waiting) + sum(r.job.work * (1 - r.step[0] / r.step[1]) for r in running)
                now = ", ".join(f"{r.job.name} step {r.step[0]:,} of {r.step[1]:,}" for r in running)
                bar.set_postfix_str(f"{done} of {len(jobs)} jobs done; {now}" if now else f"{done} of {len(jobs)} jobs done", refresh=False)  # fmt: skip
                bar.update(bar.total - left - bar.n)
    finally:
        for each in running:
            each.process.kill()
            each.process.join()
        if bar is not None:
            bar.close()
    return failures


def start_fork_server() -> None:
    """Let it import what jobs need. Before Python 3.12 it is not told where to find that, and does without."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), before)))
    forkserver.set_forkserver_preload(["src.glue.job"])
    forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def begin(context, config: FinetuneConfig, job: Job, device: str, place: str | None, threads: int | None) -> Running:
    connection, its_end = context.Pipe()
    arguments = (config, job, device, place, threads, its_end)
    process = context.Process(target=run_in_process, args=arguments, name=job.name)
    process.start()
    its_end.close()
    return Running(job, process, connection, place, time.monotonic())


def tell(ended: Running, failures: list[Failure], done: int, total: int) -> None:
    """Say how a job ended, and take down a failure."""
    job, status = ended.job, ended.process.exitcode
    name = f"[{done}/{total}] {job.name}"
    if status == 0 and (job.folder / RESULT_FILE).is_file():
        log.info(f"{name}: {100 * read_result(job)['score']:.2f} in {time.monotonic() - ended.begun:.0f} s")
        return
    killed = f"killed by signal {-status} (out of memory?)" if status < 0 else f"ended with status {status}"
    reason = ended.reason or killed
    failures.append(Failure(job, f"{reason} (log: {job.folder / LOG_FILE})"))
    log.info(f"{name}: failed, {reason}")
