"""The fused optimizer takes the same steps as Composer's, and the schedule that Composer lacks."""

import copy

import pytest
import torch
from composer import Callback
from composer.models import ComposerClassifier
from composer.optim import DecoupledAdamW
from torch import nn

from src.errors import UserError
from src.training.registry import FusedDecoupledAdamW, build_scheduler
from src.training.trainer import build_trainer


def train(kind, steps: int, state: dict | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train a small model under a falling learning rate, with and without weight decay, from an optimizer's `state`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.GELU(), nn.Linear(5, 3))
    groups = [
        {"params": [model[0].weight, model[2].weight]},
        {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0},
    ]
    optimizer = kind(groups, lr=1e-2, betas=(0.9, 0.98), eps=1e-6, weight_decay=1e-2)
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))  # load_state_dict keeps the tensors, it does not copy them
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(steps):
        model(torch.randn(4, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model, optimizer


def test_it_does_the_same_steps_as_composers_class():
    ours, theirs = train(FusedDecoupledAdamW, 20)[0], train(DecoupledAdamW, 20)[0]
    for ours_now, theirs_now in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(ours_now, theirs_now, rtol=1e-5, atol=1e-7)


def test_a_step_leaves_the_weight_decay_setting_unchanged():
    _, optimizer = train(FusedDecoupledAdamW, 3)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [1e-2, 0.0]


def test_it_resumes_from_the_state_of_composers_class():
    _, optimizer = train(DecoupledAdamW, 5)
    state = optimizer.state_dict()
    ours, theirs = train(FusedDecoupledAdamW, 5, state)[0], train(DecoupledAdamW, 5, state)[0]
    for ours_now, theirs_now in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(ours_now, theirs_now, rtol=1e-5, atol=1e-7)


def test_it_reports_per_parameter_metrics_as_composers_class_does():
    model, optimizer = train(FusedDecoupledAdamW, 2)
    weight = model[0].weight
    weight.grad = torch.ones_like(weight)
    assert optimizer.report_per_parameter_metrics(weight, "weight", {})["l2_norm/moment/weight"] > 0


@pytest.mark.parametrize("duration", ["8ba", "1ep"])
def test_warmup_stable_decay_rises_stays_and_falls_at_the_end(duration):
    section = {"name": "warmup_stable_decay", "t_warmup": "2ba", "decay": 0.5, "alpha_f": 0.2}
    dataset = torch.utils.data.TensorDataset(torch.zeros(8, 1), torch.zeros(8, dtype=torch.long))
    classifier = ComposerClassifier(torch.nn.Linear(1, 2), num_classes=2)
    optimizer = torch.optim.SGD(classifier.parameters(), lr=1.0)
    rates = []

    class Record(Callback):
        def batch_start(self, state, logger):
            rates.append(state.schedulers[0].get_last_lr()[0])

    loader = torch.utils.data.DataLoader(dataset, batch_size=1)
    build_trainer(
        classifier,
        device="cpu",
        precision="fp32",
        train_dataloader=loader,
        optimizers=optimizer,
        schedulers=build_scheduler(section),
        max_duration=duration,
        callbacks=[Record()],
    ).fit()
    assert rates == pytest.approx([0, 0, 0.5, 1, 1, 1, 0.8, 0.6])  # Composer sets a rate by the steps before the last


@pytest.mark.parametrize("decay", [0, 1.5])
def test_a_decay_must_be_a_fraction_of_the_run(decay):
    with pytest.raises(UserError, match=f"scheduler.decay={decay} must be a number > 0 and ≤ 1"):
        build_scheduler({"name": "warmup_stable_decay", "t_warmup": "2ba", "decay": decay})
