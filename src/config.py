"""YAML file + command-line overrides → one validated config. A dataclass states each key's type, meaning and bounds."""

import argparse
import difflib
import math
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import MISSING as REQUIRED
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from src.errors import UserError, first_line, reason

Config = TypeVar("Config")
TIME_UNITS = {"ba": "batches", "sp": "samples", "ep": "epochs", "tok": "tokens", "dur": "fraction of the run"}
SEED = {"at_least": 0, "at_most": 2**32 - 1}


@dataclass(frozen=True)
class Rule:
    """What values a key may have, besides their type."""

    choices: tuple[Any, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    units: tuple[str, ...] = ()  # of a duration such as 10ba
    also: tuple[Any, ...] = ()  # accepted outside the bounds, such as -1 or "auto"

    @property
    def bounds(self) -> str:
        """The bounds in words, such as ` ≥ 0 and < 1`; empty if there are none."""
        signs = {"≥": self.at_least, ">": self.above, "≤": self.at_most, "<": self.below}
        words = " and ".join(f"{sign} {bound:.12g}" for sign, bound in signs.items() if bound is not None)
        return f" {words}" if words else ""

    def admits(self, value: float) -> bool:
        """Return whether a number is finite and within the bounds."""
        return math.isfinite(value) and not (
            (self.at_least is not None and value < self.at_least)
            or (self.above is not None and value <= self.above)
            or (self.at_most is not None and value > self.at_most)
            or (self.below is not None and value >= self.below)
        )


def key(meaning: str, default: Any = REQUIRED, *, may_change: bool | tuple[str, ...] = False, **rule: Any) -> Any:
    """Declare a config key with its meaning for `--help` and its `Rule`. Without a default it is required.

    `may_change`: whether a resumed run may have a different value; in a free-form section, which keys may.
    """
    metadata = {"meaning": meaning, "rule": Rule(**rule), "may_change": may_change}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def load(
    schema: type[Config], script: str, argv: list[str], example: str = "", more_help: Callable[[], str] | None = None
) -> Config:
    """Return the validated config that a command line asks for: `script.py FILE.yaml [key=value ...]`.

    A file may inherit another with `inherit: other.yaml`, a path relative to itself, and state only what differs.

    Args:
        example: a command line for `--help`, after the script's name.
        more_help: what `--help` prints after the keys; called only for `--help`, since its imports may take seconds.

    Raises:
        UserError: a missing file, an unknown or missing key, a value of the wrong type or outside its bounds.
    """
    arguments = _parse(schema, script, argv, example, more_help)
    try:
        given = OmegaConf.merge(_read(Path(arguments.yaml)), _overrides(arguments.overrides))
        _check_keys(given, schema)
        given = OmegaConf.create(_expand_home(OmegaConf.to_container(given)))
        config = OmegaConf.merge(OmegaConf.structured(schema), given)
        # The top level first: nested keys may refer to keys that are missing there.
        missing = [entry.name for entry in fields(schema) if OmegaConf.is_missing(config, entry.name)]
        _refuse_missing(missing, arguments.yaml)
        OmegaConf.resolve(config)
        _refuse_missing(sorted(OmegaConf.missing_keys(config)), arguments.yaml)
        if arguments.print_config:
            print(OmegaConf.to_yaml(config), end="")
            raise SystemExit(0)
        config = OmegaConf.to_object(config)
    except (InterpolationResolutionError, MissingMandatoryValue) as error:
        raise UserError(f"{arguments.yaml}: {first_line(error)}") from None
    except OmegaConfBaseException as error:
        raise UserError(f"{getattr(error, 'full_key', None) or arguments.yaml}: {first_line(error)}") from None
    validate(config)
    return config


def validate(config: Any, prefix: str = "") -> None:
    """Check each key of a config dataclass against its type and rule. Raises UserError."""
    hints = get_type_hints(type(config))
    for entry in fields(config):
        value, name = getattr(config, entry.name), prefix + entry.name
        if is_dataclass(value):
            validate(value, f"{name}.")
        elif "rule" in entry.metadata:
            check_value(name, value, hints[entry.name], entry.metadata["rule"])


def check_value(name: str, value: Any, kind: Any = Any, rule: Rule = Rule()) -> None:
    """Raise UserError unless a value has its type and satisfies its rule."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if (value is None and type(None) in kinds) or any(value is other or value == other for other in rule.also):
        return
    also = "".join(f", or {other}" for other in rule.also)
    if rule.choices:
        if value not in rule.choices:
            raise UserError(f"{name}={value} must be one of {', '.join(map(str, rule.choices))}{also}")
    elif rule.units:
        _check_duration(name, value, rule)
    elif kinds[0] in (int, float) or rule.bounds:
        whole = kinds[0] is int or (kinds[0] is Any and isinstance(rule.at_least, int))
        number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not (number and rule.admits(value)):
            raise UserError(f"{name}={value!r} must be {'an integer' if whole else 'a number'}{rule.bounds}{also}")
    elif kinds[0] in (str, bool) and type(value) not in kinds:
        raise UserError(f"{name}={value!r} must be {'a string' if kinds[0] is str else 'true or false'}")


def _check_duration(name: str, value: Any, rule: Rule) -> None:
    found = re.fullmatch(f"(.+)({'|'.join(TIME_UNITS)})", str(value), re.IGNORECASE)
    try:
        number, unit = float(found[1]), found[2].lower()
        valid = unit in rule.units and rule.admits(number) and (unit == "dur" or number.is_integer())
    except (TypeError, ValueError):
        valid = False
    if not valid:
        units = ", ".join(f"{unit} ({TIME_UNITS[unit]})" for unit in rule.units)
        raise UserError(f"{name}={value} is not a duration{rule.bounds}; give a number and {units}, such as 10ba")


def duration(meaning: str, default: Any = REQUIRED, units: Iterable[str] = tuple(TIME_UNITS), **options: Any) -> Any:
    """Declare a config key that holds a duration above 0, such as 10ba."""
    return key(meaning, default, units=tuple(units), above=0, **options)


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config as plain dictionaries and lists, to store or compare."""
    return OmegaConf.to_container(OmegaConf.structured(config), resolve=True)


def read_stored(path: Path, schema: type) -> dict[str, Any]:
    """Return the `to_dict` of a config as a run stored it, with defaults for newer keys. Raises UserError."""
    defaults = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(schema)))
    try:
        return OmegaConf.to_container(OmegaConf.merge(defaults, OmegaConf.load(path)), resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError):
        raise UserError(f"{path} is corrupt; restore it or choose another folder") from None


def fixed_settings(config: Mapping[str, Any], schema: type, prefix: str = "") -> dict[str, Any]:
    """Return the values of a config, by dotted name, that a resumed run must not change."""
    hints = get_type_hints(schema)
    fixed = {}
    for entry in fields(schema):
        name, value = prefix + entry.name, config[entry.name]
        may_change = entry.metadata.get("may_change")
        if is_dataclass(hints[entry.name]):
            fixed |= fixed_settings(value, hints[entry.name], f"{name}.")
        elif may_change is not True:
            fixed[name] = _without(may_change, value) if may_change else value
    return fixed


def _without(names: Iterable[str], section: Any) -> Any:
    """Return a section without the keys of these names, at any depth."""
    if not isinstance(section, dict):
        return section
    return {name: _without(names, value) for name, value in section.items() if name not in names}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return '; did you mean …?' for an unknown name, or the known names if none is similar."""
    known = list(known)
    tail = name.rsplit(".", 1)[-1]
    same_tail = [candidate for candidate in known if candidate.rsplit(".", 1)[-1] == tail]
    close = same_tail or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; choose from {', '.join(sorted(known))}" if len(known) <= 20 else "; --help lists the keys"


def check_known(section: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UserError for an unknown key of a section."""
    known = list(known)
    if unknown := next((name for name in given if name not in known), None):
        raise UserError(f"unknown key {section}.{unknown}{nearest(str(unknown), known)}")


def _refuse_missing(missing: list[str], path: str) -> None:
    if missing:
        raise UserError(f"{path} does not set {', '.join(missing)}; set it there or as {missing[0]}=VALUE")


def _expand_home(given: Any) -> Any:
    """Expand the `~/` at the start of each string."""
    if isinstance(given, dict):
        return {name: _expand_home(value) for name, value in given.items()}
    if isinstance(given, list):
        return [_expand_home(value) for value in given]
    return os.path.expanduser(given) if isinstance(given, str) and given.startswith("~/") else given


def _parse(
    schema: type, script: str, argv: list[str], example: str, more_help: Callable[[], str] | None
) -> argparse.Namespace:
    asks_help = more_help is not None and not {"-h", "--help"}.isdisjoint(argv)
    keys = f"keys, in the YAML file or as key=value (the value after = is the default):\n\n{describe(schema)}"
    parser = argparse.ArgumentParser(
        prog=script,
        usage=f"{script} FILE.yaml [key=value ...] [--print_config]",
        description=f"Example: {script} {example}" if example else None,
        epilog=f"{keys}\n\n{more_help()}" if asks_help else keys,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("yaml", metavar="FILE.yaml", help="the config, e.g. one in yamls/")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="values that override the file's")
    parser.add_argument("--print_config", action="store_true", help="print the resolved config and exit")
    return parser.parse_args(argv)


def describe(schema: type, prefix: str = "") -> str:
    """Return every key of a schema with its default, meaning and allowed values."""
    lines = []
    hints = get_type_hints(schema)
    for entry in fields(schema):
        if is_dataclass(hints[entry.name]):
            lines.append(describe(hints[entry.name], f"{prefix}{entry.name}."))
            continue
        default = entry.default_factory() if entry.default is MISSING else entry.default
        shown = "" if default == REQUIRED else f" = {'null' if default is None else default}"
        choices = f" ({', '.join(map(str, entry.metadata['rule'].choices))})" if entry.metadata["rule"].choices else ""
        lines.append(f"  {prefix}{entry.name}{shown}\n        {entry.metadata['meaning']}{choices}")
    return "\n".join(lines)


def _read(path: Path, seen: tuple[Path, ...] = ()) -> DictConfig:
    """Read a YAML file and merge it over the one it inherits."""
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
    base = config.pop("inherit", None)
    if base is None:
        return config
    if not isinstance(base, str):
        raise UserError(f"{path}: inherit must name one file, not {base}")
    if path.resolve() in seen:
        raise UserError(f"{path} inherits itself; remove one `inherit:`")
    return OmegaConf.merge(_read(path.parent / base, (*seen, path.resolve())), config)


def _overrides(pairs: list[str]) -> DictConfig:
    for pair in pairs:
        if "=" not in pair:
            raise UserError(f"{pair!r} must have the form key=value")
    try:
        return OmegaConf.from_dotlist(pairs)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"cannot read the overrides {' '.join(pairs)}: {first_line(error)}") from None


def _check_keys(given: DictConfig, schema: type) -> None:
    """Raise UserError for a key that the schema does not have, and for a value in place of a section."""
    known = _flatten(OmegaConf.to_container(OmegaConf.structured(schema)))
    sections = {name.rsplit(".", depth)[0] for name in known for depth in range(1, name.count(".") + 1)}
    names = _flatten(OmegaConf.to_container(given))
    for name in names:
        if name in sections:
            raise UserError(f"{name}={OmegaConf.select(given, name)!r} must be a section of `key: value` lines")
        free = any(
            name.startswith(f"{other}.") for other in known
        )  # in a section such as optimizer, checked where it is used
        if name not in known and not free:
            # Keys in free-form sections are also suggested for a key that was given without its section.
            raise UserError(f"unknown key {name}{nearest(name, {*known, *names} - {name})}")


def _flatten(config: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names of a nested dictionary's values; an empty dictionary is a value."""
    names: list[str] = []
    for name, value in config.items():
        nested = isinstance(value, dict) and value
        names += _flatten(value, f"{prefix}{name}.") if nested else [f"{prefix}{name}"]
    return names
