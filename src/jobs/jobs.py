"""All of a config's fine-tuning runs, each done once."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from src.cli import log
from src.config import to_dict
from src.data.workers import usable_cores
from src.errors import UserError
from src.files import exclusive_lock
from src.glue.config import FinetuneConfig
from src.glue.examples import check_sources, digest, read_task
from src.glue.experiment import CHECKPOINT_FILE, Job, read_result
from src.glue.start import build_model, read_start
from src.glue.tasks import FROM_MNLI, Task, select
from src.jobs.pool import Failure, run_all
from src.training import registry

Result = dict[str, Any]


def run_jobs(config: FinetuneConfig) -> tuple[list[Result], list[Failure]]:
    """Run every task with every seed that has no result yet; returns all results, and the jobs that have none."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("glue.py is started by python, not by a launcher; parallel=true runs a job on every GPU")
    registry.quiet()
    device = registry.resolve_device(config.device)
    tasks = select(config.tasks_to_run, config.tasks, config.default_seed)
    check(config, tasks, device)
    places = where_to_run(config.parallel, device)
    folder = Path(config.save_folder)
    with exclusive_lock(folder, "glue.py"):
        start = read_start(config)
        build_model(start, replace(tasks[0], labels=tasks[0].labels or ("a", "b")))  # or weights that do not fit end it
        jobs = plan(config, tasks, start.digest(), device)
        if not config.rerun:
            refuse_another_start(jobs, start.name, folder)
        done = {job.folder: result for job in jobs if not config.rerun and (result := finished(job, config))}
        log.info(f"{config.base_run_name}: {len(jobs)} jobs ({', '.join(dict.fromkeys(task.title for task in tasks))}), from {start.name}, on {device}")  # fmt: skip
        log.info(f"scores and predictions: {folder}")
        for job in jobs:
            if job.folder in done:
                log.info(f"{job.name}: {100 * done[job.folder]['score']:.2f}, done earlier")
        del start  # every job's process reads it for itself
        todo = with_work(config, [job for job in jobs if job.folder not in done])
        failures = run_all(config, todo, device, places[: len(todo)])
        failed = {failure.job.folder for failure in failures}
        results = [
            {**(done.get(job.folder) or read_result(job)), "of": len(job.task.seeds)}
            for job in jobs
            if job.folder not in failed
        ]
    return results, failures


def check(config: FinetuneConfig, tasks: list[Task], device: str) -> None:
    """Raise UserError for what would stop a job later on."""
    # [CLS], and of each text at least a token and its [SEP].
    longest = max(2 * len(task.columns) + 1 for task in tasks)
    for key, least in (("max_seq_len", longest), ("device_eval_batch_size", 1)):
        if getattr(config, key) < least:
            raise UserError(f"{key} {getattr(config, key)} must be at least {least}")
    if "://" in config.save_folder:
        raise UserError(f"save_folder: {config.save_folder} is no folder of this machine, where a run has to save; name one, and copy it from there")  # fmt: skip
    registry.build_scheduler(config.scheduler)
    registry.build_algorithms(config.algorithms)
    registry.build_callbacks(config.callbacks)
    check_loggers(config.loggers)
    registry.resolve_precision(config.precision, device)
    for task in tasks:
        registry.resolve_precision(task.precision or config.precision, device)
        registry.check_times(**{f"tasks.{task.name}.eval_interval": task.eval_interval})
        if task.optimizer not in registry.OPTIMIZERS:
            raise UserError(f"tasks.{task.name}.optimizer: {task.optimizer} is none of {', '.join(registry.OPTIMIZERS)}")  # fmt: skip
    if config.mnli_first:
        mnli = [task for task in tasks if task.name == "mnli"]
        if not mnli:
            raise UserError("mnli_first needs MNLI's encoder; add mnli to tasks_to_run")
        if len(mnli) > 1:
            raise UserError("mnli_first with a search over mnli: it is not known which encoder to take; give mnli one value each")  # fmt: skip
    check_sources(tasks, config.glue_dir, config.predict_test)


def where_to_run(parallel: Any, device: str) -> list[str | None]:
    """Where jobs run at the same time: a GPU each, by its number, or so many processes on the CPU (None each)."""
    if isinstance(parallel, bool) or parallel is None:
        number = None if parallel else 1
    elif isinstance(parallel, int) and parallel > 0:
        number = parallel
    else:
        raise UserError(f"parallel: {parallel!r} is neither true, false nor a number of jobs")
    if device == "cpu":
        return [None] * (number or usable_cores())
    if number == 1:
        return [None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if number is not None and number > len(there):
        raise UserError(f"parallel: {number} jobs at a time, but there are {len(there)} GPUs; a job takes one")
    return list(there[:number])


def check_loggers(sections: dict[str, Any]) -> None:
    """Raise UserError for loggers that no job can have, or whose file the jobs would take from each other."""
    sections = dict(sections)
    file = sections.get("file", False)
    if file is None or isinstance(file, dict):
        file = file or {}
        if "{run_name}" not in str(file.get("filename", "{run_name}")):
            raise UserError("loggers.file.filename must have {run_name} in it, so that each job has a file of its own")
        # Tried here without what would take hold of this process's output.
        sections["file"] = {**file, "capture_stdout": False, "capture_stderr": False}
    registry.build_loggers(sections)


def plan(config: FinetuneConfig, tasks: list[Task], start: dict[str, Any], device: str) -> list[Job]:
    """A job a task and seed, each with what its result depends on: if any of it changes, the job runs again."""
    shared = {name: value for name, value in to_dict(config).items() if name in ("max_seq_len", "scheduler", "algorithms")}  # fmt: skip
    # Of the callbacks, the one that changes what is trained.
    shared["callbacks"] = {name: given for name, given in config.callbacks.items() if name == "early_stopper" and given is not False}  # fmt: skip
    digests = {task.name: digest(task, config.glue_dir, config.predict_test) for task in tasks}

    def job(task: Task, seed: int, after: Job | None = None) -> Job:
        data = dict(digests[task.name])
        test_data = data.pop("test", None)
        hyperparameters = {key: value for key, value in asdict(task).items() if key not in ("title", "seeds", "files", "hub", "precision")}  # fmt: skip
        precision = registry.resolve_precision(task.precision or config.precision, device)
        settings = {**shared, "precision": precision, "task": hyperparameters, "seed": seed, "data": data, "start": after.settings if after else start}  # fmt: skip
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


def stored(job: Job) -> Result | None:
    """The result that a job's folder holds, of whatever settings."""
    try:
        result = read_result(job)
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    return result if isinstance(result, dict) and "settings" in result else None


def refuse_another_start(jobs: list[Job], start: str, folder: Path) -> None:
    """Raise UserError where these jobs would take the place of results that began from another encoder."""

    def encoder(settings: dict[str, Any]) -> dict[str, Any]:
        return encoder(settings["start"]) if "start" in settings else settings  # with `mnli_first`, MNLI's

    for job in jobs:
        result = stored(job)
        if result is not None and encoder(result["settings"]) != encoder(job.settings):
            raise UserError(f"save_folder: {folder} holds results that began with other weights, model settings or tokens than those of {start} ({job.name}); name another save_folder or base_run_name, or replace them with --rerun")  # fmt: skip


def finished(job: Job, config: FinetuneConfig) -> Result | None:
    """A job's result, if it has one that the same settings gave, with all that is asked for beside it."""
    result = stored(job)
    if result is None:
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


def with_work(config: FinetuneConfig, jobs: list[Job]) -> list[Job]:
    """The jobs with what they cost. Reads every row of their data, so that a bad one is told before any job runs."""
    work: dict[str, int] = {}
    for job in jobs:
        if job.task.name not in work:
            work[job.task.name] = read_task(job.task, config.glue_dir, config.predict_test).work // job.task.epochs
    return [replace(job, work=work[job.task.name] * job.task.epochs) for job in jobs]
