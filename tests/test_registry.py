"""Name → object: every name and argument is checked, and a mistake is reported with the nearest known name."""

import math
from types import SimpleNamespace

import pytest
import torch
from composer import Time, Timestamp, TimeUnit
from composer.algorithms import GradientClipping
from composer.callbacks import LRMonitor, SpeedMonitor
from composer.loggers import FileLogger
from composer.optim import (
    ConstantWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    LinearWithWarmupScheduler,
)
from conftest import TINY_MODEL
from torch.utils.data import DataLoader

from src.errors import UserError
from src.lion import LionConfig, LionForImageClassification, LionForMaskedLM, LionVisionConfig
from src.training import registry
from src.training.registry import FusedDecoupledAdamW


@pytest.fixture(scope="module")
def model() -> LionForMaskedLM:
    return LionForMaskedLM(LionConfig(**TINY_MODEL, vocab_size=64))


def optimizer(model, **changes):
    return registry.build_optimizer({"name": "decoupled_adamw", "lr": 1e-3, "weight_decay": 0.1, **changes}, model)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "adamW"}, ["optimizer", "'adamW'", "did you mean adamw?"]),
        ({"name": "sgd9"}, ["optimizer", "choose from adamw, decoupled_adamw, lamb"]),
        ({"name": None}, ["optimizer", "None"]),
        ({"leraning_rate": 1}, ["unknown key optimizer.leraning_rate"]),
        ({"beta": [0.9, 0.98]}, ["unknown key optimizer.beta", "did you mean betas?"]),
        ({"params": []}, ["unknown key optimizer.params"]),
        (
            {"speed": 1, "beta": 2},
            ["unknown keys optimizer.speed, optimizer.beta (betas?); choose from amsgrad, betas,"],
        ),
        ({"lr": -1}, ["optimizer.lr=-1 must be a number ≥ 0"]),
        ({"lr": "fast"}, ["optimizer.lr='fast' must be a number ≥ 0"]),
        ({"betas": [0.9]}, ["optimizer.betas", "two numbers", "[0.9]"]),
        ({"betas": 0.9}, ["optimizer.betas"]),
        ({"weight_decay": "much"}, ["optimizer", "decoupled_adamw"]),
    ],
)
def test_a_mistake_in_the_optimizer_is_reported(model, changes, words):
    with pytest.raises(UserError) as error:
        optimizer(model, **changes)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("linear_decay", {}, ["scheduler", "did you mean linear_decay_with_warmup?"]),
        ("cosine_with_warmup", {"t_warmup": "1ba", "alpha": 0}, ["scheduler.alpha", "alpha_f"]),
        ("cosine_with_warmup", {}, ["scheduler", "t_warmup"]),
        ("cosine_with_warmup", {"t_warmup": "soon"}, ["scheduler", "soon"]),
        ("linear_decay_with_warmup", {"t_warmup": 100}, ["scheduler.t_warmup", "100", "dur"]),
        ("constant_with_warmup", {"t_warmup": "6%"}, ["scheduler.t_warmup", "6%"]),
        ("warmup_stable_decay", {"t_warmup": "1h"}, ["scheduler.t_warmup", "1h"]),
        ("linear_decay_with_warmup", {"t_warmup": "9ba"}, ["scheduler", "t_warmup", "same units"]),
        ("cosine_with_warmup", {"t_warmup": "1sp", "alpha_f": "low"}, ["scheduler.alpha_f", "low"]),
        ("cosine_over_run", {"alpha_f": -1}, ["scheduler.alpha_f=-1", "≥ 0"]),
        (None, {}, ["scheduler", "choose from"]),
    ],
)
def test_a_mistake_in_the_scheduler_is_reported(name, arguments, words):
    with pytest.raises(UserError) as error:
        registry.build_scheduler({"name": name, **arguments}, "99sp")
    for word in words:
        assert word in str(error.value)


CLIPPING = "algorithms.gradient_clipping"


@pytest.mark.parametrize(
    ("kind", "name", "arguments", "words"),
    [
        ("algorithms", "gradient_cliping", {}, ["algorithms", "did you mean gradient_clipping?"]),
        ("algorithms", "gradient_clipping", {"threshold": 1}, [CLIPPING, "threshold"]),
        ("algorithms", "gradient_clipping", {}, [CLIPPING, "clipping_type"]),
        ("algorithms", "gradient_clipping", None, [CLIPPING, "; to omit it, set algorithms.gradient_clipping=false"]),
        ("algorithms", "gradient_clipping", 1.0, [CLIPPING]),
        (
            "algorithms",
            "gradient_clipping",
            {"clipping_type": "foo", "clipping_threshold": 1},
            [f"{CLIPPING}.clipping_type=foo", "norm"],
        ),
        ("algorithms", "gradient_clipping", {"clipping_type": "norm", "clipping_threshold": -1}, [CLIPPING, "-1"]),
        ("callbacks", "speed_monitr", {}, ["callbacks", "did you mean speed_monitor?"]),
        ("callbacks", "speed_monitor", {"window": 3}, ["unknown key callbacks.speed_monitor.window", "window_size"]),
        (
            "callbacks",
            "early_stopper",
            {"monitor": "a", "dataloader_label": "b", "patience:2ba": None},
            ["unknown key 'patience:2ba'", "write a space after the colon"],
        ),
        ("callbacks", "speed_monitor", {"window_size": 0}, ["callbacks.speed_monitor.window_size=0"]),
        ("callbacks", "optimizer_monitor", {"batch_log_interval": 0}, ["batch_log_interval=0"]),
        ("callbacks", "runtime_estimator", {"skip_batches": -1}, ["skip_batches=-1"]),
        ("algorithms", "ema", {"half_life": "2ba", "update_interval": "0ba"}, ["update_interval=0ba"]),
        ("algorithms", "ema", {"half_life": "2ba", "ema_start": "-5ba"}, ["ema_start=-5ba"]),
        ("algorithms", "ema", {"half_life": "2ba", "ema_start": 0.5}, ["ema_start=0.5"]),
        ("algorithms", "ema", {"half_life": None, "smoothing": 2.0}, ["smoothing=2.0"]),
        ("loggers", "tensorbord", {}, ["loggers", "did you mean tensorboard?"]),
    ],
)
def test_a_mistake_in_a_section_of_names_is_reported(kind, name, arguments, words):
    with pytest.raises(UserError) as error:
        registry.build_all(kind, {name: arguments})
    for word in words:
        assert word in str(error.value)


def test_null_removes_an_inherited_argument_that_the_named_object_does_not_have():
    scheduler = registry.build_scheduler({"name": "constant", "t_warmup": None, "alpha": 0.5})
    assert scheduler.alpha == 0.5


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("linear_decay_with_warmup", LinearWithWarmupScheduler),
        ("cosine_with_warmup", CosineAnnealingWithWarmupScheduler),
        ("constant_with_warmup", ConstantWithWarmupScheduler),
    ],
)
def test_schedulers_are_built_by_name_with_their_arguments(name, kind):
    options = {} if name == "constant_with_warmup" else {"alpha_f": 0.02}
    scheduler = registry.build_scheduler({"name": name, "t_warmup": "0.06dur", **options})
    assert type(scheduler) is kind
    assert scheduler.t_warmup == "0.06dur"
    if options:
        assert scheduler.alpha_f == 0.02


@pytest.mark.parametrize(("name", "kind"), [("decoupled_adamw", FusedDecoupledAdamW), ("adamw", torch.optim.AdamW)])
def test_optimizers_are_built_over_every_parameter(model, name, kind):
    built = optimizer(model, name=name, betas=[0.9, 0.98], eps=1e-6)
    assert type(built) is kind
    assert len(built.param_groups) == 1
    group = built.param_groups[0]
    assert {id(p) for p in group["params"]} == {id(p) for p in model.parameters()}
    assert (group["lr"], tuple(group["betas"]), group["eps"], group["weight_decay"]) == (1e-3, (0.9, 0.98), 1e-6, 0.1)


def test_filter_bias_norm_wd_decays_only_matrices(model):
    decayed, free = optimizer(model, filter_bias_norm_wd=True).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1
    assert free["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(free["params"]) == len(names)
    for group, bare in ((decayed, False), (free, True)):
        for parameter in group["params"]:
            name = names[id(parameter)]
            assert (name.endswith("bias") or "norm" in name.lower()) == bare, name


def test_a_frozen_parameter_is_not_optimized():
    model = LionForMaskedLM(LionConfig(**TINY_MODEL, vocab_size=64))
    model.head.dense.weight.requires_grad_(False)
    assert all(p is not model.head.dense.weight for p in optimizer(model).param_groups[0]["params"])


def test_averages_may_be_smoothed_instead_of_having_a_half_life():
    (average,) = registry.build_all(
        "algorithms", {"ema": {"half_life": None, "smoothing": 0.9, "update_interval": "1ba"}}
    )
    assert average.smoothing == 0.9


def test_algorithms_callbacks_and_loggers_are_built_unless_they_are_false(tmp_path):
    (clipping,) = registry.build_all(
        "algorithms", {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 0.5}}
    )
    assert isinstance(clipping, GradientClipping)
    assert clipping.clipping_threshold == 0.5
    callbacks = registry.build_all(
        "callbacks", {"speed_monitor": {"window_size": 7}, "lr_monitor": None, "memory_monitor": False}
    )
    assert [type(callback) for callback in callbacks] == [SpeedMonitor, LRMonitor]
    assert isinstance(registry.build_all("loggers", {"file": {"filename": str(tmp_path / "log")}})[0], FileLogger)
    assert (
        registry.build_all("algorithms", {})
        == registry.build_all("callbacks", {})
        == registry.build_all("loggers", {})
        == []
    )


def rates(scheduler, epochs=10, steps=7) -> list[float]:
    """The factor at each step of a run."""
    return [
        scheduler(state_at(epochs, steps, epoch=step // steps, batch=step, batch_in_epoch=step % steps))
        for step in range(epochs * steps)
    ]


def state_at(epochs: int, steps: int, **now: int) -> SimpleNamespace:
    """What a schedule reads of a run's state, with one sample a step."""
    now = Timestamp(**now, sample_in_epoch=now["batch_in_epoch"])
    return SimpleNamespace(
        timestamp=now,
        max_duration=Time(epochs, "ep"),
        dataloader_len=Time(steps, "ba"),
        train_dataloader=DataLoader(range(steps)),
        get_elapsed_duration=lambda: Time(now.epoch.value / epochs, TimeUnit.DURATION),
    )


@pytest.mark.parametrize("before", [5, 20, 40])
def test_epochs_of_another_batch_size_change_no_later_rate(before):
    """A run of four epochs of ten steps whose first two had other batches."""
    late = {"epoch": 3, "batch": 2 * before + 15, "batch_in_epoch": 5}
    stable = registry.build_scheduler({"name": "warmup_stable_decay", "t_warmup": "0ba", "decay": 0.25}, "4ep")
    cosine = registry.build_scheduler({"name": "cosine_over_run"}, "4ep")
    assert stable(state_at(4, 10, **late)) == pytest.approx(0.5)
    assert cosine(state_at(4, 10, **late)) == pytest.approx((1 + math.cos(math.pi * 3.5 / 4)) / 2)


@pytest.mark.parametrize("per_epoch", [False, True])
def test_cosine_over_run_is_timms(per_epoch):
    from timm.scheduler import CosineLRScheduler

    section = {"name": "cosine_over_run", "t_warmup": "3ep", "alpha_i": 0.001, "alpha_f": 0.01, "per_epoch": per_epoch}
    scheduler = registry.build_scheduler(section, "10ep")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 2.0)
    unit = 1 if per_epoch else 7
    timms = CosineLRScheduler(optimizer, 10 * unit, lr_min=0.02, warmup_t=3 * unit, warmup_lr_init=0.002)
    expected = []
    for step in range(70):
        timms.step(step // 7 if per_epoch else step)
        expected.append(optimizer.param_groups[0]["lr"] / 2.0)
    assert rates(scheduler) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("warmup, last", [("0.3dur", 21), ("3ep", 21), ("21ba", 21), ("0dur", 0), ("0ba", 0)])
def test_cosine_over_run_warms_up_over_any_duration(warmup, last):
    found = rates(registry.build_scheduler({"name": "cosine_over_run", "t_warmup": warmup}, "10ep"))
    assert found[:last] == pytest.approx([step / 21 for step in range(last)]) and found[last] > 0.75


def test_cosine_over_run_per_epoch_needs_epochs():
    with pytest.raises(UserError, match="scheduler: cosine_over_run rejects these arguments: per_epoch needs"):
        registry.build_scheduler({"name": "cosine_over_run", "per_epoch": True}, "10ba")
    assert rates(registry.build_scheduler({"name": "cosine_over_run"}, "10ep"))[0] == 1


def test_lamb_is_timms_with_its_limit_on_gradients(model):
    from timm.optim import Lamb

    built = optimizer(model, name="lamb", filter_bias_norm_wd=True)
    assert isinstance(built, Lamb) and built.defaults["max_grad_norm"] == 1
    assert optimizer(model, name="lamb", max_grad_norm=None).defaults["max_grad_norm"] is None
    assert [group["weight_decay"] for group in built.param_groups] == [0.1, 0.0]


@pytest.fixture
def image_model():
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 32}
    return LionForImageClassification(LionVisionConfig(**sizes, mixer="lion-lit", layer_scale_init=1e-4))


def test_layer_lr_decay_lowers_the_rate_of_each_layer_below(image_model):
    built = optimizer(image_model, layer_lr_decay=0.5, filter_bias_norm_wd=True)
    found = {id(p): group["lr"] / 1e-3 for group in built.param_groups for p in group["params"]}
    assert len(found) == len(list(image_model.parameters()))
    for name, parameter in image_model.named_parameters():
        depth = 4 if "embeddings" in name else 3 - int(name.split(".")[2]) if ".layers." in name else 0
        assert found[id(parameter)] == pytest.approx(0.5**depth), name


def test_image_models_name_what_else_weight_decay_omits(image_model):
    built = optimizer(image_model, filter_bias_norm_wd=True)
    free = {id(p) for p in built.param_groups[1]["params"]}
    names = {name for name, parameter in image_model.named_parameters() if id(parameter) in free}
    assert {
        "lion.embeddings.position_embeddings.weight",
        "lion.embeddings.class_token",
        "lion.layers.0.scales",
    } <= names
    assert not any(name.endswith(("qkv.weight", "projection.weight", "classifier.weight")) for name in names)
