"""Name → object: the optimizers, schedules, algorithms, callbacks and loggers that a config may name."""

import inspect
import re
import textwrap
import warnings
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from composer import Algorithm, Callback, Time, Timestamp, TimeUnit, callbacks, optim
from composer.algorithms import GradientClipping
from composer.distributed.mosaic_parallelism import BACKWARD_PREFETCH_MAP, SHARDING_MAP
from composer.loggers import LoggerDestination
from composer.utils import FSDPConfig
from torch import nn

from src.config import TIME_UNITS, Rule, check_known, check_value, flatten, nearest
from src.errors import UserError
from src.lion.configuration_lion import CHOICES, LionConfig
from src.training.averages import EMA
from src.training.guards import ResumableEarlyStopper
from src.training.loggers import File, MLflow, TensorBoard, WandB
from src.training.own_code import find_class
from src.training.schedules import CosineOverRunScheduler, WarmupStableDecayScheduler


class FusedDecoupledAdamW(optim.DecoupledAdamW):
    """Adam whose weight decay follows the learning rate's schedule, not its peak: w ← (1 - lr_t/lr · weight_decay) w.
    The arithmetic of Composer's class (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2) in one kernel, where
    Composer, for each parameter, runs ten and synchronizes the GPU. A subclass, so that old checkpoints still load."""

    def step(self, closure=None):
        """Do one update. torch multiplies weight decay by lr_t, so it is divided by lr for the duration of the call."""
        decays = [group["weight_decay"] for group in self.param_groups]
        for group, decay in zip(self.param_groups, decays):
            group["fused"] = True
            group["weight_decay"] = decay / (group["initial_lr"] or 1.0)
        try:
            return torch.optim.AdamW.step(self, closure)
        finally:
            for group, decay in zip(self.param_groups, decays):
                group["weight_decay"] = decay


def lamb(
    params: Any,
    lr: float = 4e-3,
    betas: tuple = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = 1.0,
):
    """LAMB (You et al., arXiv:1904.00962) as DeiT III uses it: timm's. Gradients longer than
    `max_grad_norm` are scaled down to it, as in the implementation that it was trained with; null: none are."""
    from timm.optim import Lamb

    return Lamb(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm)


REGISTRY: dict[str, dict[str, Callable]] = {
    "optimizer": {
        "decoupled_adamw": FusedDecoupledAdamW, "adamw": partial(torch.optim.AdamW, fused=True), "lamb": lamb,
    },
    "scheduler": {
        "linear_decay_with_warmup": optim.LinearWithWarmupScheduler,
        "cosine_with_warmup": optim.CosineAnnealingWithWarmupScheduler,
        "constant": optim.ConstantScheduler, "constant_with_warmup": optim.ConstantWithWarmupScheduler,
        "warmup_stable_decay": WarmupStableDecayScheduler, "cosine_over_run": CosineOverRunScheduler,
    },
    "algorithms": {"gradient_clipping": GradientClipping, "ema": EMA},
    "callbacks": {
        "early_stopper": ResumableEarlyStopper, "lr_monitor": callbacks.LRMonitor,
        "memory_monitor": callbacks.MemoryMonitor, "memory_snapshot": callbacks.MemorySnapshot,
        "oom_observer": callbacks.OOMObserver, "optimizer_monitor": callbacks.OptimizerMonitor,
        "runtime_estimator": callbacks.RuntimeEstimator, "speed_monitor": callbacks.SpeedMonitor,
        "system_metrics_monitor": callbacks.SystemMetricsMonitor,
    },
    "loggers": {
        "file": File, "mlflow": MLflow, "tensorboard": TensorBoard, "wandb": WandB,
    },
}  # fmt: skip
BASES = {  # of classes that are given as module:Class
    "optimizer": torch.optim.Optimizer, "scheduler": optim.ComposerScheduler, "algorithms": Algorithm,
    "callbacks": Callback, "loggers": LoggerDestination,
}  # fmt: skip
OF_GROUPS = ("filter_bias_norm_wd=False", "layer_lr_decay=None")  # arguments of `build_optimizer` itself
RULES = {  # of arguments that Composer and torch would not check before the first step, or with a worse message
    "lr": Rule(at_least=0),
    "clipping_type": Rule(choices=("adaptive", "norm", "value")),
    "clipping_threshold": Rule(above=0),
    "t_warmup": Rule(units=tuple(TIME_UNITS), at_least=0),
    "alpha_i": Rule(at_least=0),
    "alpha_f": Rule(at_least=0),
    "decay": Rule(above=0, at_most=1),
    "ema_start": Rule(units=("dur", "ba", "ep", "sp", "tok"), at_least=0),
    "smoothing": Rule(above=0, below=1, also=(None,)),
    "half_life": Rule(units=("ba", "ep"), above=0, also=(None,)),  # with smoothing instead
    "update_interval": Rule(units=("ba", "ep"), above=0, also=(None,)),
    "window_size": Rule(at_least=1, whole=True),
    "batch_log_interval": Rule(at_least=1, whole=True),
    "skip_batches": Rule(at_least=0, whole=True),
    "sharding_strategy": Rule(choices=tuple(SHARDING_MAP)),
    "backward_prefetch": Rule(choices=tuple(BACKWARD_PREFETCH_MAP)),
    "state_dict_type": Rule(choices=("full",)),  # a checkpoint is one file
    "cpu_offload": Rule(choices=(False,)),  # Composer cannot offload parameters yet
}


def build_optimizer(section: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer. `filter_bias_norm_wd: true` exempts biases and norms from weight decay, and whatever else a
    model names. `layer_lr_decay: 0.75` multiplies the rate by that for each layer below the top (arXiv:2106.08254)."""
    section, betas = dict(section), section.get("betas", (0.9, 0.98))
    name, exempt = section.pop("name", None), section.pop("filter_bias_norm_wd", False)
    layer_decay = section.pop("layer_lr_decay", None)
    if not (isinstance(betas, list | tuple) and len(betas) == 2):
        raise UserError(f"optimizer.betas={betas!r} must be two numbers, such as [0.9, 0.98]")
    if layer_decay is not None:
        check_value("optimizer.layer_lr_decay", layer_decay, rule=Rule(above=0, at_most=1))
        check_value("optimizer.lr", section.get("lr"), rule=Rule(at_least=0))
    own = getattr(model, "model", model)
    free = own.no_weight_decay() if hasattr(own, "no_weight_decay") else set()
    groups: dict[tuple, dict[str, Any]] = {}
    for parameter_name, parameter in own.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = not exempt or (parameter.ndim >= 2 and parameter_name not in free)
        scale = (
            1.0 if layer_decay is None else layer_decay ** layers_above(parameter_name, own.config.num_hidden_layers)
        )
        group = groups.setdefault((-scale, not decays), {"params": []})
        group["params"].append(parameter)
        group |= {} if decays else {"weight_decay": 0.0}
        group |= {} if layer_decay is None else {"lr": section["lr"] * scale}
    if not exempt and layer_decay is None:
        return build("optimizer", name, section, params=[p for group in groups.values() for p in group["params"]])
    return build("optimizer", name, section, params=[groups[key] for key in sorted(groups)])


def layers_above(name: str, layers: int) -> int:
    """Return how many layers, counting heads as one, are above that of a parameter: layers + 1 for embeddings."""
    if "embeddings." in name:
        return layers + 1
    layer = re.search(r"\blayers\.(\d+)\.", name)
    return layers - int(layer[1]) if layer else 0


def build_scheduler(section: Mapping[str, Any], max_duration: str = "1ep") -> optim.ComposerScheduler:
    """Return a learning-rate schedule, tried, unless it is the user's own, at both ends of a run of `max_duration`.
    Raises UserError."""
    name = section.get("name")
    scheduler = build("scheduler", name, {key: value for key, value in section.items() if key != "name"})
    if ":" in str(name):  # which may read more of a state, and keep count of its calls
        return scheduler
    run = {"max_duration": Time.from_timestring(max_duration), "dataloader_len": Time.from_batch(1000)}
    late = Timestamp(epoch=10**12, batch=10**12, sample=10**12, token=10**12)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warm-up of zero steps
            for now, elapsed in ((Timestamp(), 0.0), (late, 1.0)):
                duration = partial(Time, elapsed, TimeUnit.DURATION)
                scheduler(SimpleNamespace(**run, timestamp=now, get_elapsed_duration=duration))
    except Exception as error:  # only here does Composer fail, in various ways, on bad arguments
        raise UserError(f"scheduler: {name} rejects these arguments: {error}") from None
    return scheduler


def build_all(kind: str, sections: Mapping[str, Any]) -> list[Any]:
    """Return algorithms, callbacks or loggers: {name: {argument: value}}, null for no arguments, or false to omit."""
    chosen = {name: arguments for name, arguments in sections.items() if arguments is not False}
    built = []
    for name, arguments in chosen.items():
        try:
            built.append(build(kind, name, {} if arguments is None else arguments))
        except UserError as error:
            if arguments is not None:
                raise
            raise UserError(f"{error}; to omit it, set {kind}.{name}=false") from None
    return built


def build(kind: str, name: str | None, given: Mapping[str, Any], **fixed: Any) -> Any:
    """Return the object of a name or module:Class, with given arguments, and fixed ones that a config cannot set.
    Raises UserError."""
    own = ":" in str(name)
    if not own and name not in REGISTRY[kind]:
        split = isinstance(given, Mapping) and next((key.split(":") for key in flatten(given) if ":" in key), None)
        meant = f"; write {kind}[{name}.{split[0]}:{split[1].split('.')[0]}]" if split else ""  # dots of key=value
        raise UserError(f"{kind}: unknown name {name!r}{meant or nearest(str(name), REGISTRY[kind])}")
    factory = find_class(kind, str(name), BASES[kind]) if own else REGISTRY[kind][name]
    place = kind if kind in ("optimizer", "scheduler") else f"{kind}.{name}"
    if not isinstance(given, Mapping):
        raise UserError(f"{place}={given!r} must be a section of `key: value` lines")
    if glued := next((key for key, value in given.items() if value is None and ":" in str(key)), None):
        raise UserError(f"{place}: unknown key {glued!r}; write a space after the colon")
    known = arguments_of(factory, fixed)  # an unknown null is dropped: it removes one inherited for another name
    arguments = {argument: value for argument, value in given.items() if argument in known or value is not None}
    if own and any(p.kind == p.VAR_KEYWORD for p in inspect.signature(factory).parameters.values()):
        known = {**known, **arguments}
    check_known(place, arguments, known, " (null removes what is inherited)")
    check_values(place, arguments, {} if own else RULES)
    try:
        return factory(**fixed, **deepcopy(arguments))  # some change theirs, which are the config's
    except Exception as error:  # whatever a class of torch or Composer raises
        raise UserError(f"{place}: {name} rejects these arguments: {error}") from None


def check_arguments(place: str, function: Callable, given: Mapping[str, Any]) -> None:
    """Raise UserError for an argument that a class or function does not have, or whose value breaks its rule."""
    check_known(place, given, arguments_of(function))
    check_values(place, given, RULES)


def check_values(place: str, given: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    for name, value in given.items():
        check_value(f"{place}.{name}", value, rule=rules.get(name, Rule()))


def arguments_of(function: Callable, hidden: Collection[str] = ("params", "model")) -> dict[str, str]:
    """Return the arguments a class or function takes from a config, with their defaults: {"lr": "lr=0.001", …}. Hidden
    are those that its caller gives: an optimizer's parameters, the model of torch.compile."""
    if function is FSDPConfig:  # its signature takes anything
        return {entry.name: f"{entry.name}={entry.default!r}" for entry in fields(function) if entry.init}
    found = inspect.signature(function).parameters.values()
    own = [p for p in found if p.name not in hidden and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return {parameter.name: str(parameter.replace(annotation=parameter.empty)) for parameter in own}


def describe_arguments(model: type, sections: Collection[str]) -> str:
    """Return the arguments of a model's configuration and of everything that these sections of a config may name, with
    defaults, for `--help`."""
    described = {"model:": model, "fsdp_config:": FSDPConfig, "compile_config:": torch.compile}
    described |= {f"{kind}: {name}": factory for kind, named in REGISTRY.items() for name, factory in named.items()}
    described = {name: factory for name, factory in described.items() if name.split(":")[0] in sections}
    lines = [
        "arguments of everything chosen by name (in `callbacks` and the like, as name: {argument: value}):\n",
        "  module:Class, such as my_package.my_module:MyCallback, names a class of your own, with the arguments of its",
        "  constructor; on the command line, brackets keep the dots: callbacks[my_package.my_module:MyCallback].n=1\n",
    ]
    for name, factory in described.items():
        known = CHOICES if factory is LionConfig else {}  # models of images accept fewer
        shown = [
            f"{text} (or {', '.join(str(x) for x in known[key] if text != f'{key}={x!r}')})" if key in known else text
            for key, text in arguments_of(factory).items()
        ]
        shown += OF_GROUPS if "optimizer:" in name else []
        words = textwrap.fill(", ".join(shown) or "no arguments", 104)
        lines += [f"  {name}", textwrap.indent(words, " " * 8)]
    return "\n".join(lines)
