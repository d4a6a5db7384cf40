"""Predictions of the test sets, as files that GLUE's server takes: NAME.tsv with `index` and `prediction`."""

import json
from pathlib import Path
from typing import Any

from src.glue.tasks import GLUE

FILES = {"cola": ("CoLA",), "sst2": ("SST-2",), "mrpc": ("MRPC",), "stsb": ("STS-B",), "mnli": ("MNLI-m", "MNLI-mm"),
         "qnli": ("QNLI",), "rte": ("RTE",), "qqp": ("QQP",)}  # fmt: skip
NOT_OURS = ("WNLI", "AX")  # the server wants these too
NUMBERED = ("cola", "sst2", "mrpc", "qqp")  # the class's number; the others' names


def write(rows: list[dict[str, Any]], run: Path) -> tuple[Path, list[str]]:
    """Write run/submission/*.tsv; returns the folder, and the files that the server needs beside them.

    A task's predictions are those of the seed with the highest score on its validation set.
    """
    folder = run / "submission"
    folder.mkdir(exist_ok=True)
    for row in rows:
        best = max(row["seeds"], key=row["seeds"].get)
        job = run / "jobs" / row["folders"][best]
        result = json.loads((job / "result.json").read_text())
        files = FILES.get(row["task"], tuple(f"{row['task']}-{split}" for split in result["test_splits"]))
        for file, split in zip(files, result["test_splits"]):
            lines = (job / f"predictions-{split}.jsonl").read_text(encoding="utf-8").splitlines()
            shown = [show(row["task"], json.loads(line)["prediction"], result["labels"]) for line in lines]
            numbered = "".join(f"{index}\t{prediction}\n" for index, prediction in enumerate(shown))
            (folder / f"{file}.tsv").write_text(f"index\tprediction\n{numbered}", encoding="utf-8")
    there = {row["task"] for row in rows}
    missing = [file for task in GLUE if task not in there for file in FILES[task]]
    return folder, [f"{file}.tsv" for file in (*missing, *NOT_OURS)] if there & GLUE.keys() else []


def show(task: str, prediction: str | float, labels: list[str]) -> str:
    if task == "stsb":
        return f"{min(5.0, max(0.0, prediction)):.3f}"  # the scale of its labels
    return str(labels.index(prediction)) if task in NUMBERED else str(prediction)
