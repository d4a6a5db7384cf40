"""Fine-tune on GLUE:  python glue.py yamls/finetune-glue/lion-s-base.yaml starting_checkpoint_load_path=CKPT [key=value ...]

Compare what came out:  python glue.py report DIR [DIR ...]
"""

import sys
from pathlib import Path

from src import cli
from src.cli import log
from src.config import load
from src.glue.config import FinetuneConfig


def main(argv: list[str]) -> None:
    if argv[:1] == ["report"]:
        from src.jobs import compare

        compare.main(argv[1:])
    else:
        rerun = ["rerun=true"] if "--rerun" in argv else []  # last, since the file comes first
        finetune(load(FinetuneConfig, "glue.py", [*(a for a in argv if a != "--rerun"), *rerun]))


def finetune(config: FinetuneConfig) -> None:
    """Run a config's jobs, and report."""
    if config.rerun or not any(Path(config.save_folder).glob("jobs/*/result.json")):  # else perhaps no job is to be run
        from src.jobs import fork_server

        fork_server.start()  # its imports and those below take seconds each, and so one time instead of two
    from src.glue import submission
    from src.jobs import jobs, report

    results, failures = jobs.run_jobs(config)
    folder = Path(config.save_folder)
    failed = [f"{failure.job.name}: {failure.reason}" for failure in failures]
    rows = report.write(results, folder, config.base_run_name, failed)
    print(f"\n{report.text(rows, failed)}\n")
    print(f"report       {folder / 'report.md'}, report.json, report.png\npredictions  {folder / 'jobs'}")
    if config.predict_test and rows:
        place, missing, earlier = submission.write(rows, folder)
        needed = f"; the server also needs {', '.join(missing)}" if missing else ""
        print(f"test sets    {place}{needed}" + (f"; of earlier runs are {', '.join(earlier)}" if earlier else ""))
    if failures:
        log.info(
            f"error: {len(failures)} of {len(results) + len(failures)} jobs failed; the same command runs them again"
        )
        raise SystemExit(1)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent)
    cli.run(main)
