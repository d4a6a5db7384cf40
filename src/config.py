"""YAML file + command-line overrides → one validated config. A dataclass states each key's type, meaning and bounds."""

import argparse
import difflib
import functools
import operator
import os
import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import MISSING as REQUIRED
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from src.errors import UserError, first_line, reason

Config = TypeVar("Config")
TIME_UNITS = {"ba": "batches", "sp": "samples", "ep": "epochs", "tok": "tokens", "dur": "fraction of the run"}
SECONDS = {"sec": "seconds of training"}  # where it does not matter that they differ from run to run
SEED = {"at_least": 0, "at_most": 2**32 - 1}


@dataclass(frozen=True)
class Rule:
    """What values a key may have, besides their type."""

    choices: tuple[Any, ...] = ()
    at_least: float = -inf
    above: float = -inf
    at_most: float = inf
    below: float = inf
    whole: bool = False  # whether only integers are valid, whatever the key's type
    units: tuple[str, ...] = ()  # of a duration such as 10ba
    also: tuple[Any, ...] = ()  # accepted outside the bounds, such as -1 or "auto"

    @property
    def bounds(self) -> str:
        """The bounds in words, such as ` ≥ 0 and < 1`; empty if there are none."""
        signs = {"≥": self.at_least, ">": self.above, "≤": self.at_most, "<": self.below}
        return " and".join(f" {sign} {bound:.12g}" for sign, bound in signs.items() if isfinite(bound))

    def admits(self, value: float) -> bool:
        """Return whether a number is finite and within the bounds."""
        return self.at_least <= value <= self.at_most and self.above < value < self.below


def key(meaning: str, default: Any = REQUIRED, *, may_change: bool | tuple[str, ...] = False, **rule: Any) -> Any:
    """Declare a config key with its meaning for `--help` and its `Rule`. Without a default it is required.
    `may_change`: whether a resumed run may have a different value; in a free-form section, which keys may."""
    metadata = {"meaning": meaning, "rule": Rule(**rule), "may_change": may_change}
    default = {"default_factory": default.copy} if isinstance(default, dict | list) else {"default": default}
    return field(**default, metadata=metadata)


def duration(meaning: str, default: Any = REQUIRED, units: Iterable[str] = tuple(TIME_UNITS), **options: Any) -> Any:
    """Declare a config key that holds a duration above 0, such as 10ba."""
    return key(meaning, default, units=tuple(units), above=0, **options)


def _keys(schema: type, prefix: str = "") -> Iterator[tuple[str, Field, Any]]:
    """Yield the dotted name, the field and the type of each key, with those of nested dataclasses."""
    hints = get_type_hints(schema)
    for entry in fields(schema):
        if is_dataclass(hints[entry.name]):
            yield from _keys(hints[entry.name], f"{prefix}{entry.name}.")
        else:
            yield prefix + entry.name, entry, hints[entry.name]


def load(
    schema: type[Config],
    script: str,
    argv: list[str],
    example: str = "",
    more_help: str = "",
    commands: Collection[str] = (),
) -> Config:
    """Return the validated config of `script.py FILE.yaml [key=value ...]`; `example`, `more_help` and the script's
    other `commands` are for `--help`. A file may inherit another with `inherit: other.yaml`, a path relative to itself,
    and state only what differs. Raises UserError for a missing file, an unknown or missing key, or a value of the wrong
    type or out of bounds."""
    if commands and argv and argv[0].isidentifier() and not Path(argv[0]).exists():
        raise UserError(f"{argv[0]} is neither a YAML file nor a command of {script}{nearest(argv[0], commands)}")
    keys = "keys, in the YAML file or as key=value (the value after = is the default):"
    parser = argparse.ArgumentParser(script, f"{script} FILE.yaml [key=value ...] [--print_config]")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = f"Example: {script} {example}"
    if commands:
        names = ", ".join(f"{script} {name}" for name in commands)
        parser.description += f"\nOther commands, each with a --help of its own: {names}"
    durations = f"durations, such as 500ba, are a number and {_in_words(TIME_UNITS | SECONDS)}"
    parser.epilog = f"{keys}\n\n{describe(schema)}\n\n{durations}\n\n{more_help}"
    parser.add_argument("yaml", metavar="FILE.yaml", help="the config, e.g. one in yamls/")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="values that override the file's")
    parser.add_argument("--print_config", action="store_true", help="print the resolved config and exit")
    arguments = parser.parse_args(argv)
    path, overrides = arguments.yaml, arguments.overrides
    if malformed := [pair for pair in overrides if "=" not in pair]:
        raise UserError(f"{malformed[0]!r} must have the form key=value")
    try:
        given = OmegaConf.to_container(OmegaConf.merge(read_file(Path(path)), OmegaConf.from_dotlist(overrides)))
        _check_keys(given, schema)
        config = OmegaConf.merge(OmegaConf.structured(schema), _expand_home(given))
        if missing := [name for name, value in flatten(OmegaConf.to_container(config)).items() if value == REQUIRED]:
            raise UserError(f"{path} does not set {', '.join(missing)}; set it there or as {missing[0]}=VALUE")
        OmegaConf.resolve(config)
        if arguments.print_config:
            print(OmegaConf.to_yaml(config), end="")
            raise SystemExit(0)
        config = OmegaConf.to_object(config)
    except yaml.YAMLError as error:
        raise UserError(f"cannot read the overrides {' '.join(overrides)}: {first_line(error)}") from None
    except (InterpolationResolutionError, MissingMandatoryValue) as error:
        raise UserError(f"{path}: {first_line(error)}") from None
    except OmegaConfBaseException as error:
        name, problem = getattr(error, "full_key", None) or path, first_line(error)
        if problem.startswith("Incompatible value 'None'"):
            problem = "has no value; give one, or omit the key"
        if "is not a ListConfig" in problem:
            problem = f"must be a list, such as {name}=[one,two]"
        raise UserError(f"{name}: {problem}") from None
    except TypeError as error:
        if "Cannot merge" not in str(error):
            raise
        raise UserError(f"{path}: a list is where a section of `key: value` lines belongs, or the reverse") from None
    validate(config)
    return config


def read_file(path: Path, seen: tuple[Path, ...] = ()) -> DictConfig:
    """Return a YAML file merged over the one that it inherits. Raises UserError."""
    try:
        if not path.is_file():
            raise UserError(f"{path} is not a file; give the path of a YAML config, e.g. one in yamls/")
        config = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {path} ({reason(error)}); fix that or give another file") from None
    if not isinstance(config, DictConfig):
        raise UserError(f"{path} must hold `key: value` lines")
    if (base := config.pop("inherit", None)) is None:
        return config
    if not isinstance(base, str):
        raise UserError(f"{path}: inherit must name one file, not {base}")
    if path.resolve() in seen:
        raise UserError(f"{path} inherits itself; remove one `inherit:`")
    return OmegaConf.merge(read_file(path.parent / base, (*seen, path.resolve())), config)


def oldest(path: Path) -> Path:
    """Return the file that a YAML file goes back to by `inherit`, or the file itself."""
    base = OmegaConf.load(path).get("inherit")
    return path if base is None else oldest(path.parent / base)


def _check_keys(given: dict[str, Any], schema: type) -> None:
    """Raise UserError for a key that the schema does not have, and for a value in place of a section."""
    known = [name for name, _, _ in _keys(schema)]
    sections = {name.rsplit(".", depth)[0] for name in known for depth in range(1, name.count(".") + 1)}
    values = flatten(given)
    for name, value in values.items():
        if name in sections:
            raise UserError(f"{name}={value!r} must be a section of `key: value` lines")
        # A key of a free-form section, such as optimizer.lr, is checked where it is used, and suggested for lr.
        if not any(f"{name}.".startswith(f"{other}.") for other in known):
            raise UserError(f"unknown key {name}{nearest(name, {*known, *values} - {name})}")


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested dictionary's values by dotted name; an empty dictionary is a value."""
    flat = {}
    for name, value in config.items():
        nested = isinstance(value, dict) and value
        flat |= flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def _expand_home(given: Any) -> Any:
    if isinstance(given, dict):
        return {name: _expand_home(value) for name, value in given.items()}
    if isinstance(given, list):
        return [_expand_home(value) for value in given]
    return os.path.expanduser(given) if isinstance(given, str) and given.startswith("~/") else given


def describe(schema: type) -> str:
    """Return every key of a schema with its default, meaning and allowed values."""
    lines = []
    for name, entry, _ in _keys(schema):
        default = entry.default_factory() if entry.default is MISSING else entry.default
        shown = "" if default == REQUIRED else f" = {'null' if default is None else default}"
        choices = ", ".join(map(str, (rule := entry.metadata["rule"]).choices or rule.units))
        lines.append(f"  {name}{shown}\n        {entry.metadata['meaning']}{f' ({choices})' if choices else ''}")
    return "\n".join(lines)


def validate(config: Any, prefix: str = "") -> None:
    """Check each key of a config dataclass against its type and rule. Raises UserError."""
    for name, entry, kind in _keys(type(config)):
        if "rule" in entry.metadata:
            check_value(prefix + name, operator.attrgetter(name)(config), kind, entry.metadata["rule"])


def check_value(name: str, value: Any, kind: Any = Any, rule: Rule = Rule()) -> None:
    """Raise UserError unless a value has its type and satisfies its rule."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if value in rule.also or (value is None and type(None) in kinds):
        return
    also = "".join(f", or {other}" for other in rule.also)
    if rule.choices:
        if value not in rule.choices:
            raise UserError(f"{name}={value} must be one of {', '.join(map(str, rule.choices))}{also}")
    elif rule.units:
        if not _is_duration(value, rule):
            units = _in_words(rule.units)
            raise UserError(f"{name}={value} is not a duration{rule.bounds}; give a number and {units}, such as 10ba")
    elif kinds[0] in (int, float) or rule.bounds:
        whole = kinds[0] is int or rule.whole
        number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not (number and rule.admits(value)):
            raise UserError(f"{name}={value!r} must be {'an integer' if whole else 'a number'}{rule.bounds}{also}")
    elif kinds[0] in (str, bool) and type(value) not in kinds:
        raise UserError(f"{name}={value!r} must be {'a string' if kinds[0] is str else 'true or false'}")


def _in_words(units: Iterable[str]) -> str:
    return ", ".join(f"{unit} ({(TIME_UNITS | SECONDS)[unit]})" for unit in units)


def _is_duration(value: Any, rule: Rule) -> bool:
    try:
        number, unit = re.fullmatch(f"(.+)({'|'.join(rule.units)})", str(value).lower()).groups()
        return rule.admits(float(number)) and (unit == "dur" or float(number).is_integer())
    except (AttributeError, ValueError):  # another unit, or no number
        return False


def check_known(section: str, given: Iterable[str], known: Collection[str], hint: str = "") -> None:
    """Raise UserError for unknown keys of a section."""
    unknown = [str(name) for name in given if name not in known]
    if len(unknown) == 1:
        raise UserError(f"unknown key {section}.{unknown[0]}{nearest(unknown[0], known)}{hint}")
    if unknown:
        meant = {name: closest(name, known) for name in unknown}
        shown = ", ".join(f"{section}.{name}" + (f" ({close}?)" if close else "") for name, close in meant.items())
        raise UserError(f"unknown keys {shown}{'' if all(meant.values()) else nearest('', known)}{hint}")


def nearest(name: str, known: Collection[str]) -> str:
    """Return '; did you mean …?' for an unknown name, or the known names if none is similar."""
    if close := closest(name, known):
        return f"; did you mean {close}?"
    return f"; choose from {', '.join(sorted(known))}" if len(known) <= 40 else "; --help lists the keys"


def closest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that an unknown one may stand for."""
    tail = name.rsplit(".", 1)[-1]
    same_tail = [candidate for candidate in known if candidate.rsplit(".", 1)[-1] == tail]
    return next(iter(same_tail or difflib.get_close_matches(name, known, n=1, cutoff=0.6)), None)


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config as plain dictionaries and lists, to store or compare."""
    return OmegaConf.to_container(OmegaConf.structured(config), resolve=True)


def read_stored(path: Path, schema: type) -> dict[str, Any] | None:
    """Return the `to_dict` of a config as a run stored it, with defaults for newer keys; None without a file."""
    if not path.is_file():
        return None
    defaults = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(schema)))
    try:
        return OmegaConf.to_container(OmegaConf.merge(defaults, OmegaConf.load(path)), resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError):
        raise UserError(f"{path} is corrupt; restore it or choose another folder") from None


def fixed_settings(config: Mapping[str, Any], schema: type) -> dict[str, Any]:
    """Return the values of a config, by dotted name, that a resumed run must not change."""
    fixed = {}
    for name, entry, _ in _keys(schema):
        if (may_change := entry.metadata["may_change"]) is not True:
            fixed[name] = _without(may_change or (), functools.reduce(operator.getitem, name.split("."), config))
    return fixed


def _without(names: Iterable[str], section: Any) -> Any:
    """Return a section without the keys of these names, at any depth."""
    if not isinstance(section, dict):
        return section
    return {name: _without(names, value) for name, value in section.items() if name not in names}
