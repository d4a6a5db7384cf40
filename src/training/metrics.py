"""What a run measures, by name; metrics.jsonl, the summary and the plots are built from it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.files import METRICS, read_json_lines


@dataclass(frozen=True)
class Curve:
    """A metric, in the names of metrics.jsonl (`name` and `eval_key`) and of Composer (`train_key`)."""

    name: str  # in lines of training and in summary.json, e.g. accuracy
    title: str  # for people, e.g. masked accuracy
    eval_key: str  # e.g. eval/MaskedAccuracy
    train_key: str | None = None  # e.g. metrics/train/MaskedAccuracy; None: not measured in training
    percent: bool = False
    unit: str = ""  # of a value that is not a percentage, e.g. nats per token
    baseline: bool = False  # drawn as a line: the score of a trivial prediction

    def show(self, value: float) -> str:
        """Return the value, formatted for people."""
        return f"{value:.2%}" if self.percent else f"{value:.3f}"


def evaluations(folder: Path, curves: tuple[Curve, ...]) -> list[dict[str, Any]]:
    """Return the evaluations of a run in order: {"step": …, curve.name: value, …}."""
    return [
        {"step": line["step"], **{curve.name: line["eval"][curve.eval_key] for curve in curves}}
        for line in read_json_lines(folder / METRICS)
        if "eval" in line
    ]
