"""The command of an experiment: run its jobs, each once, and report; or compare reports."""

import os
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path

from src.cli import check_alone, log, start_log
from src.errors import UserError
from src.files import check_writable, exclusive_lock
from src.jobs import report
from src.jobs.experiment import RESULT_FILE, Experiment, Job, Result
from src.training.config import load_config


def main(experiment: type[Experiment], argv: list[str]) -> None:
    """Run `FILE.yaml [key=value ...] [--rerun]` or `report DIR ...`."""
    check_alone(experiment.command, "parallel=true runs one job per GPU")
    if argv[:1] == ["report"]:
        report.main(experiment, argv[1:])
        return
    rerun = ["rerun=true"] if "--rerun" in argv else []
    arguments = [argument for argument in argv if argument != "--rerun"] + rerun  # last: the YAML comes first
    given = experiment.schema, experiment.command, experiment.example, arguments, experiment.commands
    planned = experiment(load_config(*given))
    (check if planned.config.dry_run else run)(planned)


def check(experiment: Experiment) -> None:
    """Check all that `run` checks without reading the tasks' rows, and print what it would run. Raises UserError."""
    config = experiment.config
    check_writable("save_folder", experiment.folder)
    experiment.check_paths()
    from src.jobs import pool
    from src.training.trainer import resolve_device, silence_libraries

    silence_libraries()
    device = resolve_device(config.device)
    at_once = len(pool.devices(config.parallel, device))
    experiment.check_sections()
    tasks = experiment.tasks
    titles, count = ", ".join(dict.fromkeys(task.title for task in tasks)), sum(len(task.seeds) for task in tasks)
    start = ", starting checkpoint" * (config.starting_checkpoint_load_path is not None)
    print(f"checked    config, that the files of the tasks exist (not their rows){start}, device")
    print(f"would run  {count} jobs ({titles}), from {experiment.start_name}, on {device}, {at_once} at a time")
    finished = "" if config.rerun else "; jobs that are finished there do not run again"
    print(f"would save {experiment.folder}{finished}")


def run(experiment: Experiment) -> None:
    """Run every job without a valid result, report all, and exit with status 1 if one failed. Raises UserError."""
    config, folder, averages = experiment.config, experiment.folder, experiment.averages
    start_log(config.log_level)
    check_writable("save_folder", folder)
    experiment.check_paths()
    if config.rerun or not any(folder.glob(f"jobs/*/{RESULT_FILE}")):  # else there may be no job to run
        start_server(experiment.preload)  # its imports take seconds, as do those below
    from src.jobs import pool
    from src.training.trainer import resolve_device, silence_libraries

    silence_libraries()
    device = resolve_device(config.device)
    gpus = pool.devices(config.parallel, device)
    with exclusive_lock(folder, experiment.command):
        jobs = experiment.plan(device)
        done = {} if config.rerun else finished(jobs, experiment)
        titles = ", ".join(dict.fromkeys(job.task.title for job in jobs))
        log.info(f"{config.base_run_name}: {len(jobs)} jobs ({titles}), from {experiment.start_name}, on {device}")
        log.info(f"scores and predictions: {folder}")
        for job in jobs:
            if job.folder in done:
                log.info(f"{job.name}: {100 * done[job.folder]['score']:.2f}, done earlier")
        todo = [replace(job, cost=experiment.cost(job)) for job in jobs if job.folder not in done]
        for job in todo:
            if not config.rerun and (step := job.saved_step()):
                log.info(f"{job.name}: resumes from step {step:,}")
        failed = {}
        if todo:
            start_server(experiment.preload)
            failed = pool.run_all(experiment, todo, device, gpus[: len(todo)])
            done |= {job.folder: job.read_result() for job in todo if job.folder not in failed}
        results = [{**done[job.folder], "of": len(job.task.seeds)} for job in jobs if job.folder in done]
        failures = list(failed.values())
        rows = report.write(results, averages, folder, config.base_run_name, failures)
    print(f"\n{report.text(rows, averages, failures)}\n")
    drawn = ", curves.png" * (folder / "curves.png").exists()
    print(f"report       {folder / 'report.md'}, report.json, report.png{drawn}\npredictions  {folder / 'jobs'}")
    with report.writing(folder):
        experiment.finish(rows)
    if failed:
        log.error(f"error: {len(failed)} of {len(jobs)} jobs failed; the same command runs them again")
        raise SystemExit(1)


def start_server(preload: str) -> None:
    """Start the server that jobs are forked from, if it is not running; its imports run in the background."""
    before = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    root = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join((root, *before.values()))  # Python < 3.12 does not pass sys.path
    forkserver.set_forkserver_preload(["src.jobs.pool", preload])
    forkserver.ensure_running()
    del os.environ["PYTHONPATH"]
    os.environ.update(before)


def finished(jobs: list[Job], experiment: Experiment) -> dict[Path, Result]:
    """Return, by folder, results with matching settings and all files. Raises UserError for one of another origin."""
    valid = {}
    for job in jobs:
        try:
            result = job.read_result()
            settings = result["settings"]
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):  # none, or not readable
            continue
        if experiment.origin(settings) != experiment.origin(job.settings):
            other = f"has results for weights, model settings or tokens other than those of {experiment.start_name}"
            to_do = "choose another save_folder or base_run_name, or add --rerun"
            raise UserError(f"save_folder: {experiment.folder} {other} ({job.name}); {to_do}")
        if settings != job.settings:
            changed = [name for name, value in job.settings.items() if settings.get(name) != value]
            log.info(f"{job.name}: {', '.join(changed)} changed since its result, so it runs again")
        elif (files := experiment.files(job, result)) and all((job.folder / file).is_file() for file in files):
            valid[job.folder] = result
    return valid
