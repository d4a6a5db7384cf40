"""Fine-tune:  python glue.py yamls/finetune-glue/lion-s-base.yaml starting_checkpoint_load_path=CKPT [key=value ...]

Compare the results:  python glue.py report DIR [DIR ...]
"""

import sys
from pathlib import Path

from src import cli
from src.glue.experiment import GlueExperiment
from src.jobs import jobs


def main(argv: list[str]) -> None:
    jobs.main(GlueExperiment, argv)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent)
    cli.run(main)
