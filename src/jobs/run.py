"""The command of an experiment: run its jobs, each once, and report; or compare reports."""

import os
from dataclasses import replace

from src.cli import log
from src.errors import UserError
from src.files import check_writable, exclusive_lock
from src.jobs import pool
from src.jobs.experiment import Experiment
from src.jobs.jobs import RESULT_FILE, finished_result, read_result, refuse_other_origin
from src.training.config import load_config


def main(experiment: type[Experiment], argv: list[str]) -> None:
    """Run `FILE.yaml [key=value ...] [--rerun]` or `report DIR ...`."""
    if argv[:1] == ["report"]:
        from src.jobs import compare

        compare.main(experiment, argv[1:])
        return
    rerun = ["rerun=true"] if "--rerun" in argv else []
    arguments = [argument for argument in argv if argument != "--rerun"] + rerun  # last, since the file comes first
    run(experiment(load_config(experiment.schema, experiment.command, experiment.example, arguments)))


def run(experiment: Experiment) -> None:
    """Run every job that has no valid result, then report all.

    Raises:
        UserError: the config, its files or its data are unusable; nothing has been trained.
        SystemExit: with status 1, if a job failed.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError(f"start {experiment.command} with python, not a launcher; parallel=true runs one job per GPU")
    config, folder = experiment.config, experiment.folder
    check_writable("save_folder", folder)
    experiment.check_paths()
    if config.rerun or not any(folder.glob(f"jobs/*/{RESULT_FILE}")):  # else there may be no job to run
        pool.start_server(experiment.preload)  # its imports take seconds, as do those below
    from src.jobs import report
    from src.training.trainer import resolve_device, silence_libraries

    silence_libraries()
    device = resolve_device(config.device)
    gpus = pool.devices(config.parallel, device)
    with exclusive_lock(folder, experiment.command):
        jobs = experiment.plan(device)
        if not config.rerun:
            refuse_other_origin(jobs, experiment)
        done = {job.folder: result for job in jobs if not config.rerun and (result := finished_result(job, experiment))}
        titles = ", ".join(dict.fromkeys(job.task.title for job in jobs))
        log.info(f"{config.base_run_name}: {len(jobs)} jobs ({titles}), from {experiment.start_name}, on {device}")
        log.info(f"scores and predictions: {folder}")
        for job in jobs:
            if job.folder in done:
                log.info(f"{job.name}: {100 * done[job.folder]['score']:.2f}, done earlier")
        todo = [replace(job, cost=experiment.cost(job)) for job in jobs if job.folder not in done]
        failures = pool.run_all(experiment, todo, device, gpus[: len(todo)])
        failed = {failure.job.folder for failure in failures}
        results = [
            {**(done.get(job.folder) or read_result(job)), "of": len(job.task.seeds)}
            for job in jobs
            if job.folder not in failed
        ]
    failed_jobs = list(map(str, failures))
    rows = report.write(results, experiment.average, folder, config.base_run_name, failed_jobs)
    print(f"\n{report.text(rows, experiment.average, failed_jobs)}\n")
    print(f"report       {folder / 'report.md'}, report.json, report.png\npredictions  {folder / 'jobs'}")
    for line in experiment.finish(rows):
        print(line)
    if failures:
        log.info(f"error: {len(failures)} of {len(jobs)} jobs failed; the same command runs them again")
        raise SystemExit(1)
