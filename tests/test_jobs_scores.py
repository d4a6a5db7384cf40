"""Scores, against scikit-learn and SciPy."""

import math

import pytest
import scipy.stats
import sklearn.metrics
import torch

from src.glue.tasks import GLUE
from src.jobs import tasks
from src.jobs.experiment import mean_score
from src.jobs.predictions import predicted
from src.jobs.scores import CORRELATIONS, METRICS, TaskScore, at_chance, score


def reference(metric: str, guesses, labels) -> float:
    if metric in ("spearman", "pearson"):
        return float({"spearman": scipy.stats.spearmanr, "pearson": scipy.stats.pearsonr}[metric](guesses, labels)[0])
    return {
        "accuracy": sklearn.metrics.accuracy_score,
        "f1": sklearn.metrics.f1_score,
        "macro_f1": lambda labels, guesses: sklearn.metrics.f1_score(labels, guesses, average="macro"),
        "matthews": sklearn.metrics.matthews_corrcoef,
    }[metric](labels, guesses)


def draw(metric: str, classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Predictions and labels that go together rather well; of a regression with ties, as people give whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    if metric in ("spearman", "pearson"):
        labels = torch.randint(6, (200,), generator=generator).float()
        return (labels + torch.randn(200, generator=generator)).round(decimals=1), labels
    labels = torch.randint(classes, (200,), generator=generator)
    logits = torch.randn(200, classes, generator=generator)
    logits[torch.arange(200), labels] += 1
    return predicted(logits), labels


def test_every_metric_can_be_computed():
    assert {metric for names in tasks.METRICS.values() for metric in names} == METRICS.keys()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("metric", "classes"), [*((m, 2) for m in METRICS), *((m, 4) for m in ("accuracy", "macro_f1", "matthews"))]
)
def test_scores_are_those_of_scikit_learn_and_scipy(metric, classes, seed):
    guesses, labels = draw(metric, classes, seed)
    got = score((metric,), guesses, labels, classes)
    assert got == {metric: pytest.approx(reference(metric, guesses, labels), abs=1e-6)}
    assert 0.2 < got[metric] < 1


@pytest.mark.parametrize("chosen", [0, 1])
@pytest.mark.parametrize("metric", ["accuracy", "f1", "macro_f1", "matthews"])
def test_a_constant_prediction_scores_as_in_scikit_learn(metric, chosen):
    labels, guesses = torch.tensor([0, 1, 1, 0, 1, 1]), torch.full((6,), chosen)
    assert score((metric,), guesses, labels, 2)[metric] == pytest.approx(reference(metric, guesses, labels))


@pytest.mark.parametrize("metric", CORRELATIONS)
def test_a_constant_has_no_correlation(metric):
    constant, other = torch.ones(6), torch.tensor([0.0, 1, 0, 1, 1, 1])
    assert score((metric,), constant, other, 2) == score((metric,), other, constant, 2) == {metric: 0.0}


def test_non_finite_predictions_have_no_score():
    values = score(("spearman", "pearson"), torch.tensor([0.0, float("nan"), 1]), torch.tensor([0.0, 1, 2]), 1)
    assert all(math.isnan(value) for value in values.values())


def test_a_tasks_score_is_the_mean_of_its_metrics_and_splits():
    assert mean_score([{"accuracy": 0.5, "f1": 0.7}, {"accuracy": 0.9, "f1": 0.1}]) == pytest.approx(0.55)


@pytest.mark.parametrize("name", ["qqp", "cola", "stsb"])
def test_evaluation_in_batches_scores_the_whole_set_at_once(name):
    """A mean over batches would count the last, smaller batch too much, and have no F1 or correlation of the set."""
    task = GLUE[name]
    for metric in task.metrics:
        guesses, labels = draw(metric, 2, 0)
        outputs = guesses if task.regression else torch.nn.functional.one_hot(guesses).float()
        running = TaskScore(task, metric)
        for rows in torch.arange(200).split(48):
            running.update(outputs[rows], labels[rows])
        assert float(running.compute()) == pytest.approx(reference(metric, guesses, labels), abs=1e-6)


def test_chance_is_two_standard_errors_above_the_majority_class():
    assert at_chance(0.4, 0.5, 400) and at_chance(0.549, 0.5, 400) and not at_chance(0.551, 0.5, 400)
