"""Reading `metrics.jsonl`, which a run writes (src/run_log.py)."""

import json
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, none if it is not there; a last line that a kill cut in half is left out."""
    lines: list[dict[str, Any]] = []
    if not (folder / METRICS_FILE).is_file():
        return lines
    for line in (folder / METRICS_FILE).read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """The evaluations of a pretraining run in order: {"step", "loss", "accuracy", "most_frequent_token"}."""
    return [
        {
            "step": line["step"],
            "loss": line["eval"]["eval/LanguageCrossEntropy"],
            "accuracy": line["eval"]["eval/MaskedAccuracy"],
            "most_frequent_token": line["eval"]["eval/MostFrequentTokenAccuracy"],
        }
        for line in read_metrics(folder)
        if "eval" in line
    ]
