"""Tasks of a benchmark other than GLUE."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest

from src.config import key
from src.errors import UserError
from src.jobs.tasks import Suite, Task, optimizer_of


@dataclass(frozen=True)
class Sums(Task):
    searchable: ClassVar[tuple[str, ...]] = (*Task.searchable, "dropout")
    needed: ClassVar[Mapping[str, str]] = {"digits": "how many to add"}
    unstored: ClassVar[tuple[str, ...]] = (*Task.unstored, "folder")

    digits: int = key("in a row", at_least=1)
    folder: str = key("where they are", "sums")
    dropout: float = key("of inputs", 0.0, at_least=0, below=1)
    lr: float = key("peak learning rate", 1e-3, at_least=0)


SUITE = Suite(
    "Sums", "two", {name: Sums(name, name, ("accuracy",), digits=n) for name, n in (("short", 2), ("long", 9))}
)


def test_a_benchmark_has_hyperparameters_and_defaults_of_its_own():
    tasks = SUITE.select(["short"], {"short": {"dropout": [0.0, 0.1], "epochs": 7}}, 1)
    assert [(task.variant, task.dropout, task.epochs) for task in tasks] == [
        ("dropout=0", 0, 7),
        ("dropout=0.1", 0.1, 7),
    ]
    (task,) = SUITE.select(["mine"], {"mine": {"digits": 3, "optimizer": "torch.optim:SGD"}}, 1)
    assert optimizer_of(task) == {"name": "torch.optim:SGD", "lr": 1e-3, "weight_decay": 1e-6}
    assert {"title", "seeds", "precision", "folder"}.isdisjoint(task.settings()) and task.settings()["digits"] == 3
    assert not task.regression and task.num_labels == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mine": {}}, "tasks.mine: a new task needs `digits`, how many to add, or `like`, a task of Sums"),
        ({"mine": {"digits": 3}}, "tasks_to_run is empty, which means Sums's two and not mine; name the tasks to run"),
        ({"short": {"folder": ["a", "b"]}}, "only epochs, batch_size, lr, weight_decay, dropout take several values"),
        ({"short": {"dropout": [0.1, 1.0]}}, "tasks.short.dropout=1.0 must be a number ≥ 0 and < 1"),
        ({"short": {"metrics": ["pearson"]}}, "unknown metric pearson for a classification"),
        ({"short": {"kind": "regression"}}, "unknown key tasks.short.kind"),
    ],
)
def test_mistakes_are_reported_in_the_words_of_the_benchmark(changes, message):
    with pytest.raises(UserError) as error:
        SUITE.select([], changes, 1)
    assert message in str(error.value)
