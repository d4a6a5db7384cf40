"""Train an image classifier:  [composer -n N] vision.py FILE.yaml [key=value ...]
Evaluate one:  python vision.py evaluate MODEL --data DIR"""

import sys
from pathlib import Path

from src import cli
from src.training.config import load_config
from src.training.run import run
from src.vision.config import VisionConfig
from src.vision.task import Vision

EXAMPLE = "yamls/vision/lion-s-small.yaml data_local=./imagenet"


def main(argv: list[str]) -> None:
    if argv[:1] == ["evaluate"]:
        from src.vision.evaluate import evaluate

        evaluate(argv[1:])
        return
    run(Vision(load_config(VisionConfig, "vision.py", EXAMPLE, argv)))


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent)
    cli.run(main)
