"""Name → object: the optimizers, schedules, algorithms, callbacks and loggers that a config may name."""

import functools
import inspect
import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
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
from src.training.early_stopper import ResumableEarlyStopper
from src.training.loggers import TensorBoard
from src.training.optim import FusedDecoupledAdamW, WarmupStableDecayScheduler


def gradient_clipping(clipping_type: str, clipping_threshold: float) -> GradientClipping:
    """Return Composer's gradient clipping, which would check its arguments only in the first step."""
    key = "algorithms.gradient_clipping"
    check_value(f"{key}.clipping_type", clipping_type, rule=Rule(choices=("adaptive", "norm", "value")))
    check_value(f"{key}.clipping_threshold", clipping_threshold, float, Rule(above=0))
    return GradientClipping(clipping_type, float(clipping_threshold))


OPTIMIZERS = {"decoupled_adamw": FusedDecoupledAdamW, "adamw": functools.partial(torch.optim.AdamW, fused=True)}
SCHEDULERS = {
    "linear_decay_with_warmup": optim.LinearWithWarmupScheduler,
    "cosine_with_warmup": optim.CosineAnnealingWithWarmupScheduler,
    "constant": optim.ConstantScheduler,
    "constant_with_warmup": optim.ConstantWithWarmupScheduler,
    "warmup_stable_decay": WarmupStableDecayScheduler,
}
ALGORITHMS = {"gradient_clipping": gradient_clipping}
CALLBACKS = {
    "early_stopper": ResumableEarlyStopper,
    "lr_monitor": callbacks.LRMonitor,
    "memory_monitor": callbacks.MemoryMonitor,
    "memory_snapshot": callbacks.MemorySnapshot,
    "oom_observer": callbacks.OOMObserver,
    "optimizer_monitor": callbacks.OptimizerMonitor,
    "runtime_estimator": callbacks.RuntimeEstimator,
    "speed_monitor": callbacks.SpeedMonitor,
    "system_metrics_monitor": callbacks.SystemMetricsMonitor,
}
LOGGERS = {
    "file": loggers.FileLogger,
    "mlflow": loggers.MLFlowLogger,
    "tensorboard": TensorBoard,
    "wandb": loggers.WandBLogger,
}
SECTIONS = {
    "optimizer": OPTIMIZERS,
    "scheduler": SCHEDULERS,
    "algorithms": ALGORITHMS,
    "callbacks": CALLBACKS,
    "loggers": LOGGERS,
}


def build_optimizer(section: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer. `filter_bias_norm_wd: true` exempts biases and norms from weight decay."""
    section = dict(section)
    betas = section.get("betas", (0.9, 0.98))
    if not (isinstance(betas, list | tuple) and len(betas) == 2):
        raise UserError(f"optimizer.betas={betas!r} must be two numbers, such as [0.9, 0.98]")
    exempt = section.pop("filter_bias_norm_wd", False)
    parameters: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if exempt:
        parameters = [
            {"params": [p for p in parameters if p.ndim >= 2]},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
    return build("optimizer", OPTIMIZERS, section, params=parameters)


def build_scheduler(section: Mapping[str, Any], max_duration: str = "1ep") -> optim.ComposerScheduler:
    """Return a learning-rate schedule, tried at both ends of a run of `max_duration`. Raises UserError."""
    if section.get("t_warmup") is not None:
        check_value("scheduler.t_warmup", section["t_warmup"], str, Rule(units=tuple(TIME_UNITS), at_least=0))
    scheduler = build("scheduler", SCHEDULERS, section)
    start = {"max_duration": Time.from_timestring(max_duration), "dataloader_len": Time.from_batch(1000)}
    late = Timestamp(epoch=10**12, batch=10**12, sample=10**12, token=10**12)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warm-up of zero steps
            for timestamp, elapsed in ((Timestamp(), 0.0), (late, 1.0)):
                duration = Time(elapsed, TimeUnit.DURATION)
                get = {"get_elapsed_duration": lambda duration=duration: duration}
                scheduler(SimpleNamespace(**start, timestamp=timestamp, **get))
    except Exception as error:  # only here does Composer fail, in various ways, on bad arguments
        raise UserError(f"scheduler: {section['name']} rejects these arguments: {error}") from None
    return scheduler


def build(kind: str, registry: Mapping[str, Callable], section: Mapping[str, Any], **fixed: Any) -> Any:
    """Return the object that a section's `name` refers to, with the section's other keys as arguments.

    An unknown argument that is null is dropped, so that a file can remove one that it inherits for another name.
    Raises UserError for an unknown name, an unknown argument, or arguments that the class rejects.
    """
    arguments = dict(section)
    name = arguments.pop("name", None)
    if name not in registry:
        raise UserError(f"{kind}: unknown name {name!r}{nearest(str(name), registry)}")
    known = [parameter for parameter in inspect.signature(registry[name]).parameters if parameter not in fixed]
    if "kwargs" not in known:
        arguments = {argument: value for argument, value in arguments.items() if argument in known or value is not None}
        if unknown := next((argument for argument in arguments if argument not in known), None):
            hint = f"(if it is inherited and {name} does not have it, set {kind}.{unknown}=null)"
            raise UserError(f"unknown key {kind}.{unknown}{nearest(unknown, known)} {hint}")
    try:
        return registry[name](**fixed, **arguments)
    except UserError:
        raise
    except Exception as error:  # whatever a class of torch or Composer raises
        raise UserError(f"{kind}: {name} rejects these arguments: {error}") from None


def build_all(kind: str, sections: Mapping[str, Any]) -> list[Any]:
    """Return algorithms, callbacks or loggers: {name: {argument: value}}, null for no arguments, or false to omit."""
    chosen = {name: arguments for name, arguments in sections.items() if arguments is not False}
    for name, arguments in chosen.items():
        if arguments is not None and not isinstance(arguments, Mapping):
            raise UserError(f"{kind}.{name}={arguments!r} must be a section of `key: value` lines")
    registry = SECTIONS[kind]
    return [
        build(f"{kind}.{name}" if name in registry else kind, registry, {"name": name, **(arguments or {})})
        for name, arguments in chosen.items()
    ]


def arguments_of(cls: Callable) -> dict[str, Any]:
    """Return the arguments a class or function takes from a config: {name: default or inspect.Parameter.empty}."""
    if cls is FSDPConfig:  # its signature takes anything
        return {entry.name: entry.default for entry in fields(cls) if entry.init}
    return {
        name: entry.default
        for name, entry in inspect.signature(cls).parameters.items()
        if name not in ("params", "model") and entry.kind not in (entry.VAR_POSITIONAL, entry.VAR_KEYWORD)
    }


FSDP_ARGUMENTS = arguments_of(FSDPConfig)


def describe_arguments() -> str:
    """Return the arguments of everything that a section may name, with defaults, for `--help`."""
    described = {"model:": LionConfig, "fsdp_config:": FSDPConfig, "compile_config:": torch.compile}
    described |= {f"{kind}: {name}": cls for kind, registry in SECTIONS.items() for name, cls in registry.items()}
    lines = []
    for name, cls in described.items():
        shown = [
            argument if default is inspect.Parameter.empty else f"{argument}={default!r}"
            for argument, default in arguments_of(cls).items()
        ]
        if name.startswith("optimizer"):
            shown.append("filter_bias_norm_wd=False")
        words = ", ".join(shown) or "no arguments"
        lines += [f"  {name}", textwrap.fill(words, 112, initial_indent=" " * 8, subsequent_indent=" " * 8)]
    return "\n".join(lines)
