"""The key `resume_with`: what a resumed run may change on purpose, the record of it, and how it takes effect."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from src.config import flatten
from src.errors import UserError

if TYPE_CHECKING:  # imports that take seconds
    from composer import State
    from torch.optim import Optimizer

SECTIONS, KEYS = ("optimizer", "scheduler"), ("global_train_batch_size", "max_duration")
KEPT = ("optimizer.name", "optimizer.filter_bias_norm_wd", "optimizer.layer_lr_decay")  # on which the state depends
ALLOWED = f"optimizer.KEY, scheduler, scheduler.KEY, {', '.join(KEYS)}"


def check(resume_with: Sequence[str]) -> None:
    """Raise UserError for keys that no run may change."""
    for name in resume_with:
        if not may_change(name):
            raise UserError(f"resume_with: {name} cannot change; choose from {ALLOWED}")


def may_change(name: str) -> bool:
    """Whether a resumed run may change this key, or section, at all."""
    section, _, own = name.partition(".")
    return name not in KEPT and (name in KEYS or name == "scheduler" or bool(section in SECTIONS and own))


def found(old: Mapping[str, Any], new: Mapping[str, Any], resume_with: Sequence[str]) -> dict[str, list[Any]]:
    """Return what differs between two configs under the names in resume_with: {key: [old value, new value]}."""
    old, new = flatten(dict(old)), flatten(dict(new))
    names = [n for n in {**old, **new} if any(n == name or n.startswith(f"{name}.") for name in resume_with)]
    return {n: [old.get(n), new.get(n)] for n in names if old.get(n) != new.get(n)}


def made(config: Mapping[str, Any], new: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a config in which the keys of these names are as in a new one."""
    config, given = copy.deepcopy(dict(config)), flatten(dict(new))
    for name in names:
        *sections, last = name.split(".")
        section = config
        for part in sections:
            section = section.setdefault(part, {})
        section.pop(last, None)
        if name in given:
            section[last] = given[name]
    return config


def settings_of(optimizer: "Optimizer") -> list[dict[str, Any]]:
    """Return the settings of each parameter group, before a checkpoint is loaded into the optimizer."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def take_effect(state: "State", settings: Sequence[Mapping[str, Any]]) -> None:
    """Replace what a checkpoint brought by the config's settings of the optimizer, and its schedule, from the next step
    on."""
    groups = state.optimizers[0].param_groups
    for group, given in zip(groups, settings):
        group.update(given, initial_lr=given["lr"])
    for scheduler in state.schedulers:
        scheduler.base_lrs = [group["initial_lr"] for group in groups]
        for group, lr in zip(groups, scheduler.get_lr()):
            group["lr"] = lr
        scheduler._last_lr = [group["lr"] for group in groups]
