"""Early stopping: of a measured metric only, in the right direction, and with the best value kept on resume."""

from types import SimpleNamespace

import pytest
import torch
from composer import Timestamp

from src.errors import UserError
from src.training import registry


def stopper(**arguments):
    return registry.build_all("callbacks", {"early_stopper": {"patience": "2ba", **arguments}})[0]


class Run:
    """An evaluation every batch, with the attributes that a stopper reads."""

    def __init__(self, batch: int = 0):
        self.timestamp = Timestamp(batch=batch)
        self.dataloader_label = "eval"
        self.train_metrics = {"MaskedAccuracy": None}
        self.eval_metrics = {"eval": {"LanguageCrossEntropy": None, "MaskedAccuracy": None}}
        self.stopped = False

    def stop_training(self) -> None:
        self.stopped = True

    def evaluate(self, stopper, value: float) -> bool:
        self.timestamp = self.timestamp.copy(batch=self.timestamp.batch + 1)
        self.eval_metrics["eval"][stopper.monitor] = SimpleNamespace(compute=lambda: torch.tensor(value))
        stopper.eval_end(self, None)
        return self.stopped


def test_a_cross_entropy_must_fall_and_an_accuracy_must_rise():
    run, loss = Run(), stopper()
    assert not any(run.evaluate(loss, value) for value in (5.0, 4.0, 3.0, 2.0, 1.0))
    run, accuracy = Run(), stopper(monitor="MaskedAccuracy")
    assert [run.evaluate(accuracy, value) for value in (0.4, 0.3, 0.2, 0.1)] == [False, False, False, True]


def test_a_resumed_run_keeps_the_best_value():
    run, before, after = Run(), stopper(), stopper()
    assert not run.evaluate(before, 1.0)
    after.load_state_dict(before.state_dict())
    after.load_state_dict(stopper().state_dict())  # of a run without an evaluation
    assert [run.evaluate(after, value) for value in (2.0, 2.0, 2.0)] == [False, False, True]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"monitor": "loss"},
            r"early_stopper.monitor=loss must be one of LanguageCrossEntropy, MaskedAccuracy, measured on eval",
        ),
        ({"dataloader_label": "val"}, r"early_stopper.dataloader_label=val must be one of eval, train"),
    ],
)
def test_a_metric_that_is_not_measured_is_rejected(arguments, words):
    with pytest.raises(UserError, match=words):
        stopper(**arguments).before_load(Run(), None)


def test_a_patience_in_other_units_is_rejected():
    with pytest.raises(UserError, match="patience 100sp must be in epochs"):
        stopper(patience="100sp")


@pytest.mark.parametrize("label", ["eval", "train"])
def test_a_measured_metric_is_accepted(label):
    stopper(monitor="MaskedAccuracy", dataloader_label=label).before_load(Run(), None)
