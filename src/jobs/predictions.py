"""predictions-SPLIT.jsonl: what a job predicts for each text of a split."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.files import sync_to_disk

if TYPE_CHECKING:
    from torch import Tensor


def file_name(split: str) -> str:
    return f"predictions-{split}.jsonl"


def predicted(logits: "Tensor") -> "Tensor":
    """Return each example's class from logits, (examples, classes), or regression values, (examples,), unchanged."""
    return logits.argmax(-1) if logits.ndim == 2 else logits


def write(path: Path, logits: "Tensor", classes: Sequence[str], examples: Iterable[tuple[Any, float | None]]) -> None:
    """Write one line per example, (id, label): its logits, prediction and label (class index or value), if it has one.
    `logits` are (examples, classes), or regression values, (examples,); classes are written by name."""
    with path.open("w", encoding="utf-8") as file:
        for row, prediction, (number, label) in zip(logits.tolist(), predicted(logits).tolist(), examples):
            line = {"id": number, "logits": row, "prediction": classes[prediction] if classes else prediction}
            if label is not None:
                line["label"] = classes[int(label)] if classes else label
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    sync_to_disk(path)  # the result that follows implies that it is there


def read(job: Path, split: str) -> list[dict[str, Any]]:
    """Return the lines of a split. Only a line feed ends a line: the name of a class may contain U+2028."""
    with (job / file_name(split)).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def read_tensors(job: Path, split: str, classes: Sequence[str]) -> tuple["Tensor", "Tensor"]:
    """Return predictions and labels, (examples,), as numbers. Earlier versions did not write labels by name."""
    import torch

    lines = read(job, split)
    labels = [line["label"] for line in lines]
    if classes:
        labels = [classes.index(label) if isinstance(label, str) else int(label) for label in labels]
    return predicted(torch.tensor([line["logits"] for line in lines])), torch.tensor(labels)
