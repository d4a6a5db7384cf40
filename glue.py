"""Fine-tune on GLUE:  python glue.py yamls/finetune-glue/lion-s-base.yaml starting_checkpoint_load_path=CKPT [key=value ...]"""

import sys
from pathlib import Path

from src import cli
from src.cli import is_main_process
from src.config import FinetuneConfig, load


def main(argv: list[str]) -> None:
    config = load(FinetuneConfig, "glue.py", argv)  # before the imports below, which take seconds
    from src.glue import jobs, report

    results = jobs.run_jobs(config)
    if is_main_process():
        folder = Path(config.save_folder)
        rows = report.write(results, folder, config.base_run_name)
        print("\n" + "\n\n".join(filter(None, (report.table(rows), report.closing(rows)))) + "\n")
        print(f"report       {folder / 'report.md'}, report.json, report.png\npredictions  {folder / 'jobs'}")


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent)
    cli.run(main)
