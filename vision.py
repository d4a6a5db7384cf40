"""Train an image classifier:  [composer -n N] vision.py FILE.yaml [key=value ...]
Evaluate one:  python vision.py evaluate MODEL --data DIR
Classify pictures:  python vision.py predict MODEL PICTURE ...
Draw what a patch sees:  python vision.py draw MODEL PICTURE"""

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

        return evaluate(argv[1:])
    if argv[:1] == ["predict"]:
        from src.vision.predict import predict

        return predict(argv[1:])
    if argv[:1] == ["draw"]:
        from src.vision.draw import draw

        return draw(argv[1:])
    run(Vision(load_config(VisionConfig, "vision.py", EXAMPLE, argv, ("evaluate", "predict", "draw"))))


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent)
    cli.run(main)
