"""Project structure: which package may import which, no import cycles, no side effects on import, no overlong lines."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

FILES = [*sorted((ROOT / "src").rglob("*.py")), *sorted(ROOT.glob("*.py"))]
SCRIPTS = {"main", "glue", "vision", "embed", "lra", "src.hub", "src.convert_dataset", "src.train_tokenizer"}
COMMANDS = {"mlm", "glue", "vision", "embed", "lra", "horizons", "demo"}
# Each room may import itself, the rooms below it, and what every command uses (modules directly in src).
BELOW = {
    "lion": set(),
    "data": {"lion"},
    "checkpoints": {"lion", "data"},
    "publish": {"lion", "data", "checkpoints"},
    "training": {"lion", "data", "checkpoints", "publish"},
    "jobs": {"lion", "data", "checkpoints", "publish", "training"},
}
for command in COMMANDS - {"demo"}:
    BELOW[command] = set(BELOW["jobs"]) | {"jobs"}


def module(path: Path) -> str:
    name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    return name.removesuffix(".__init__")


NAMES = {module(path): path for path in FILES}


def imports(path: Path) -> set[str]:
    """The project's modules that a file imports, anywhere in it but under TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module(path).split(".")[: -node.level]) if node.level else ""
            base = ".".join(filter(None, (base, node.module)))
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in NAMES else base for alias in node.names}
    return found & NAMES.keys() - {module(path)}


GRAPH = {name: imports(path) for name, path in NAMES.items()}


def room(name: str) -> str | None:
    """The package of a module; None of one directly in src."""
    parts = name.split(".")
    return parts[1] if parts[0] == "src" and len(parts) > 1 and (ROOT / "src" / parts[1]).is_dir() else None


def test_imports_have_no_cycle():
    finished, path = set(), []

    def visit(name: str) -> None:
        assert name not in path, f"circle: {' → '.join([*path[path.index(name) :], name])}"
        if name not in finished:
            path.append(name)
            for other in sorted(GRAPH[name]):
                visit(other)
            finished.add(path.pop())

    for name in GRAPH:
        visit(name)


@pytest.mark.parametrize("package", sorted(BELOW))
def test_a_package_imports_only_the_packages_below_it(package):
    for name, others in GRAPH.items():
        if room(name) == package:
            strangers = {other for other in others if room(other) not in {None, package, *BELOW[package]}}
            assert not strangers, f"{name} imports {', '.join(strangers)}"


def test_nothing_imports_a_script_or_the_demo():
    for name, others in GRAPH.items():
        assert not others & SCRIPTS, f"{name} imports {others & SCRIPTS}"
        assert room(name) == "demo" or not any(room(other) == "demo" for other in others), name


def test_the_model_imports_nothing_else_from_the_project():
    for name, others in GRAPH.items():
        assert room(name) != "lion" or all(room(other) == "lion" for other in others), name


def test_the_model_imports_no_module_by_the_name_of_a_function():
    """`from . import linear_attention` is the function here, and the module in a Hub folder."""
    public = set(importlib.import_module("src.lion").__all__)
    for path in sorted((ROOT / "src/lion").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module is None:
                assert not public & {alias.name for alias in node.names}, path


def test_scripts_are_short_and_files_are_readable():
    wide, long = [], []
    for path in FILES:
        lines = path.read_text(encoding="utf-8").splitlines()
        wide += [f"{path.name}:{number}" for number, line in enumerate(lines, 1) if len(line) > 120]
        long += [path.name] * (len(lines) > (60 if module(path) in SCRIPTS else 600))
    assert (wide, long) == ([], [])


def test_importing_src_has_no_side_effect():
    code = (
        "import os, sys; before = dict(os.environ), set(sys.modules); import src;"
        "print(before[0] == dict(os.environ), set(sys.modules) - before[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True {'src'}"
