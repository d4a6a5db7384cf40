"""Name → object: the optimizers, schedules, algorithms, callbacks and loggers that a config may name."""

import inspect
import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from composer import Time, Timestamp, TimeUnit, callbacks, loggers, optim
from composer.algorithms import GradientClipping
from composer.utils import FSDPConfig
from torch import nn

from src.config import TIME_UNITS, Rule, check_value, nearest
from src.errors import UserError
from src.lion import LionConfig
from src.training.guards import ResumableEarlyStopper
from src.training.optim import FusedDecoupledAdamW, WarmupStableDecayScheduler
from src.training.run_log import TensorBoard


def gradient_clipping(clipping_type: str, clipping_threshold: float) -> GradientClipping:
    """Return Composer's gradient clipping, which would check its arguments only in the first step."""
    key = "algorithms.gradient_clipping"
    check_value(f"{key}.clipping_type", clipping_type, rule=Rule(choices=("adaptive", "norm", "value")))
    check_value(f"{key}.clipping_threshold", clipping_threshold, float, Rule(above=0))
    return GradientClipping(clipping_type, float(clipping_threshold))


REGISTRY: dict[str, dict[str, Callable]] = {
    "optimizer": {"decoupled_adamw": FusedDecoupledAdamW, "adamw": partial(torch.optim.AdamW, fused=True)},
    "scheduler": {
        "linear_decay_with_warmup": optim.LinearWithWarmupScheduler,
        "cosine_with_warmup": optim.CosineAnnealingWithWarmupScheduler,
        "constant": optim.ConstantScheduler,
        "constant_with_warmup": optim.ConstantWithWarmupScheduler,
        "warmup_stable_decay": WarmupStableDecayScheduler,
    },
    "algorithms": {"gradient_clipping": gradient_clipping},
    "callbacks": {
        "early_stopper": ResumableEarlyStopper,
        "lr_monitor": callbacks.LRMonitor,
        "memory_monitor": callbacks.MemoryMonitor,
        "memory_snapshot": callbacks.MemorySnapshot,
        "oom_observer": callbacks.OOMObserver,
        "optimizer_monitor": callbacks.OptimizerMonitor,
        "runtime_estimator": callbacks.RuntimeEstimator,
        "speed_monitor": callbacks.SpeedMonitor,
        "system_metrics_monitor": callbacks.SystemMetricsMonitor,
    },
    "loggers": {
        "file": loggers.FileLogger,
        "mlflow": loggers.MLFlowLogger,
        "tensorboard": TensorBoard,
        "wandb": loggers.WandBLogger,
    },
}


def build_optimizer(section: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer. `filter_bias_norm_wd: true` exempts biases and norms from weight decay."""
    betas = section.get("betas", (0.9, 0.98))
    if not (isinstance(betas, list | tuple) and len(betas) == 2):
        raise UserError(f"optimizer.betas={betas!r} must be two numbers, such as [0.9, 0.98]")
    section = dict(section)
    exempt = section.pop("filter_bias_norm_wd", False)
    parameters: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if exempt:
        parameters = [
            {"params": [p for p in parameters if p.ndim >= 2]},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
    return build("optimizer", section, params=parameters)


def build_scheduler(section: Mapping[str, Any], max_duration: str = "1ep") -> optim.ComposerScheduler:
    """Return a learning-rate schedule, tried at both ends of a run of `max_duration`. Raises UserError."""
    if section.get("t_warmup") is not None:
        check_value("scheduler.t_warmup", section["t_warmup"], str, Rule(units=tuple(TIME_UNITS), at_least=0))
    scheduler = build("scheduler", section)
    run = {"max_duration": Time.from_timestring(max_duration), "dataloader_len": Time.from_batch(1000)}
    late = Timestamp(epoch=10**12, batch=10**12, sample=10**12, token=10**12)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warm-up of zero steps
            for now, elapsed in ((Timestamp(), 0.0), (late, 1.0)):
                duration = partial(Time, elapsed, TimeUnit.DURATION)
                scheduler(SimpleNamespace(**run, timestamp=now, get_elapsed_duration=duration))
    except Exception as error:  # only here does Composer fail, in various ways, on bad arguments
        raise UserError(f"scheduler: {section['name']} rejects these arguments: {error}") from None
    return scheduler


def build_all(kind: str, sections: Mapping[str, Any]) -> list[Any]:
    """Return algorithms, callbacks or loggers: {name: {argument: value}}, null for no arguments, or false to omit."""
    chosen = {name: {} if arguments is None else arguments for name, arguments in sections.items()}
    for name, arguments in chosen.items():
        if arguments is not False and not isinstance(arguments, Mapping):
            raise UserError(f"{kind}.{name}={arguments!r} must be a section of `key: value` lines")
    return [build(kind, {"name": name, **chosen[name]}) for name in chosen if chosen[name] is not False]


def build(kind: str, section: Mapping[str, Any], **fixed: Any) -> Any:
    """Return the object that a section's `name` refers to, with the section's other keys as arguments.

    An unknown argument that is null is dropped, so that a file can remove one that it inherits for another name.
    Raises UserError for an unknown name, an unknown argument, or arguments that the class rejects.
    """
    arguments = dict(section)
    name = arguments.pop("name", None)
    if name not in REGISTRY[kind]:
        raise UserError(f"{kind}: unknown name {name!r}{nearest(str(name), REGISTRY[kind])}")
    factory = REGISTRY[kind][name]
    place = kind if kind in ("optimizer", "scheduler") else f"{kind}.{name}"
    known = arguments_of(factory)
    arguments = {argument: value for argument, value in arguments.items() if argument in known or value is not None}
    if unknown := [argument for argument in arguments if argument not in known]:
        hint = f"(if it is inherited and {name} does not have it, set {place}.{unknown[0]}=null)"
        raise UserError(f"unknown key {place}.{unknown[0]}{nearest(unknown[0], known)} {hint}")
    try:
        return factory(**fixed, **arguments)
    except UserError:
        raise
    except Exception as error:  # whatever a class of torch or Composer raises
        raise UserError(f"{place}: {name} rejects these arguments: {error}") from None


def arguments_of(cls: Callable) -> dict[str, Any]:
    """Return the arguments a class or function takes from a config: {name: default or inspect.Parameter.empty}."""
    if cls is FSDPConfig:  # its signature takes anything
        return {entry.name: entry.default for entry in fields(cls) if entry.init}
    return {
        name: entry.default
        for name, entry in inspect.signature(cls).parameters.items()
        if name not in ("params", "model") and entry.kind not in (entry.VAR_POSITIONAL, entry.VAR_KEYWORD)
    }


def describe_arguments() -> str:
    """Return the arguments of everything that a section may name, with defaults, for `--help`."""
    described = {"model:": LionConfig, "fsdp_config:": FSDPConfig, "compile_config:": torch.compile}
    described |= {f"{kind}: {name}": factory for kind, named in REGISTRY.items() for name, factory in named.items()}
    lines = ["arguments of everything chosen by name (in `callbacks` and the like, as name: {argument: value}):\n"]
    for name, factory in described.items():
        defaults = arguments_of(factory) | ({"filter_bias_norm_wd": False} if name.startswith("optimizer") else {})
        shown = [
            argument if default is inspect.Parameter.empty else f"{argument}={default!r}"
            for argument, default in defaults.items()
        ]
        words = ", ".join(shown) or "no arguments"
        lines += [f"  {name}", textwrap.fill(words, 112, initial_indent=" " * 8, subsequent_indent=" " * 8)]
    return "\n".join(lines)
