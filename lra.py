"""Train on Long Range Arena:  python lra.py yamls/lra/lion-s.yaml lra_dir=DIR tasks_to_run=[listops] [key=value ...]
Compare the results:  python lra.py report DIR [DIR ...]
Generate data:  python lra.py make listops|pathfinder --out DIR
Pretrain on a task's inputs:  python lra.py shards TASK --lra_dir DIR --out DIR, then main.py"""

import sys
from pathlib import Path

from src import cli
from src.jobs import jobs
from src.lra.experiment import LraExperiment


def main(argv: list[str]) -> None:
    if argv[:1] == ["make"]:
        from src.lra import make

        return make.main(argv[1:])
    if argv[:1] == ["shards"]:
        from src.lra import shards

        return shards.main(argv[1:])
    jobs.main(LraExperiment, argv)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent)
    cli.run(main)
