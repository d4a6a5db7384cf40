"""A user's own classes: Python files to import first, and classes that a config names as module:Class."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from src.config import nearest
from src.errors import UserError, first_line


def import_files(paths: Iterable[str]) -> None:
    """Import files, each as a module with the file's name. Raises UserError."""
    for given in paths:
        path = Path(given).resolve()
        if path.suffix != ".py" or not path.is_file():
            found = "is not a .py file" if path.exists() else "does not exist"
            raise UserError(f"code_paths: {given} {found}; give a path relative to the working directory")
        if not path.stem.isidentifier():
            raise UserError(f"code_paths: {given} is not a module name; rename it to letters, digits and _")
        loaded = sys.modules.get(path.stem)
        known = loaded or importlib.util.find_spec(path.stem)
        its_file = getattr(known, "__file__", None) or getattr(known, "origin", None) or ""
        if known is not None and Path(its_file).resolve() != path:
            raise UserError(f"code_paths: {given} would hide another module {path.stem}; rename it")
        if loaded is None:
            _import_file(given, path)


def _import_file(given: str, path: Path) -> None:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[path.stem]
        raise UserError(f"code_paths: {given} cannot be imported: {_cause(error)}") from None


def find_class(kind: str, name: str, base: type) -> type:
    """Return the class that module:Class names. Raises UserError unless it is a subclass of `base`."""
    module_name, _, class_name = name.partition(":")
    if not (module_name and class_name) or module_name.startswith("."):
        raise UserError(f"{kind}: {name!r} must have the form module:Class, such as my_package.my_module:MyClass")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(f"{kind}: {module_name} cannot be imported: {_cause(error)}") from None
        to_do = "install it, or add its file to code_paths"
        raise UserError(f"{kind}: there is no module {error.name} for {name}; {to_do}") from None
    except Exception as error:
        raise UserError(f"{kind}: {module_name} cannot be imported: {_cause(error)}") from None
    classes = [key for key, value in vars(module).items() if isinstance(value, type) and base in value.__mro__]
    found = getattr(module, class_name, None)
    if found is None:
        raise UserError(f"{kind}: {module_name} has no {class_name!r}{nearest(class_name, classes) if classes else ''}")
    if not (isinstance(found, type) and base in found.__mro__):
        raise UserError(f"{kind}: {name} must be a subclass of {base.__module__.split('.')[0]}'s {base.__name__}")
    return found


def _cause(error: Exception) -> str:
    """Return an error in one line, and where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {first_line(error)} ({last.filename}, line {last.lineno})"
