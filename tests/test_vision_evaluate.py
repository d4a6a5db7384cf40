"""Which class of a model each class of the data is, by name or by number."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from src.checkpoints.reading import Checkpoint
from src.data.images import ArrayImages
from src.errors import UserError
from src.lion import LionVisionConfig
from src.vision.classes import labels_of
from src.vision.evaluate import Evaluated, report, save


def labels(model: list[str], data: list[str], by_number: bool = False) -> list[int]:
    names = {"id2label": dict(enumerate(model)), "label2id": {name: number for number, name in enumerate(model)}}
    checkpoint = Checkpoint(Path("it.pt"), "LionForImageClassification", LionVisionConfig(**names), {})
    images = ArrayImages("the data", np.zeros((1, 8, 8), np.uint8), [0], data)
    return labels_of(images, checkpoint, by_number).tolist()


def test_classes_are_matched_by_name_or_number():
    assert labels(["b", "a", "c"], ["a", "c"]) == [1, 2]
    assert labels(["a", "b", "c"], ["n1", "n2"], by_number=True) == [0, 1]
    assert labels(["a", "b", "c"], ["a", "n2"], by_number=True) == [0, 1]
    assert labels(["crane", "dog", "crane"], ["ant", "cat", "crane"], by_number=True) == [0, 1, 2]  # as in ImageNet
    assert labels(["crane", "dog", "crane"], ["crane", "cat"], by_number=True) == [0, 1]
    with pytest.raises(UserError, match=r"does not know the class n1"):
        labels(["a", "b"], ["n1"])


def test_classes_of_one_name_are_told_apart(tmp_path):
    cranes = ["crane", "dog", "crane"]  # as in ImageNet
    assert labels(cranes, cranes) == [0, 1, 2]
    found = Evaluated(cranes, torch.tensor([[50, 0, 0], [0, 40, 10], [2, 0, 48]]), 0.92, 1.0, 0.3, 1.0)
    rows = [line for line in report(found).splitlines() if "crane" in line]
    assert rows[0].endswith("100.0% |                      |") and rows[2].endswith("96.0% | crane (2)            |")
    save(found, tmp_path, "model", "data")
    of_class = json.loads((tmp_path / "report.json").read_text())["per_class"]
    assert of_class == {"crane (0)": 1.0, "dog": pytest.approx(0.8), "crane (2)": pytest.approx(0.96)}


def test_a_name_at_another_number_is_not_matched_by_number():
    problem = r"--by_number: the class c has number 1 in the data, and 2 in the model; omit it to match by name"
    with pytest.raises(UserError, match=problem):
        labels(["a", "b", "c"], ["a", "c"], by_number=True)
