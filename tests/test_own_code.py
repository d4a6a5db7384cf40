"""A user's own classes: files in code_paths, and classes named as module:Class, with the checks of any other name."""

import re
import sys
from pathlib import Path

import pytest
import torch

from src.config import to_dict
from src.errors import UserError
from src.mlm.task import PretrainConfig
from src.training import registry
from src.training.config import load_config
from src.training.own_code import import_files

CODE = """
import torch
from composer import Algorithm, Callback
from composer.loggers import LoggerDestination
from composer.optim import ComposerScheduler

class Loud(Callback):
    def __init__(self, every: int = 1, decay: float = 0.0):
        if every < 1:
            raise ValueError("every must be at least 1")
        self.every, self.decay = every, decay

class Halve(Algorithm):
    def match(self, event, state): return False
    def apply(self, event, state, logger): pass

class Memory(LoggerDestination): pass

class Half(ComposerScheduler):
    def __init__(self, factor: float = 0.5): self.factor = factor
    def __call__(self, state, ssr=1.0): return self.factor

class SGD(torch.optim.SGD): pass

class Named(Callback):
    def __init__(self, model: str, params: int = 0, **options): self.given = model, params, options

class Counting(ComposerScheduler):
    calls = 0
    def __call__(self, state, ssr=1.0):
        self.calls += 1
        return 1 / state.train_dataloader.size

def function(): pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch) -> str:
    """The name of a module with classes of a user, imported by code_paths from the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("own_classes.py").write_text(CODE)
    import_files(["own_classes.py"])
    yield "own_classes"
    del sys.modules["own_classes"]


def test_a_class_of_ones_own_is_built_like_any_other(own):
    (loud,) = registry.build_all("callbacks", {f"{own}:Loud": {"every": 2, "decay": 5}, f"{own}:Unknown": False})
    assert (type(loud).__name__, loud.every, loud.decay) == ("Loud", 2, 5)  # decay: not one of our schedules'
    for kind, name in (("algorithms", "Halve"), ("loggers", "Memory")):
        assert type(registry.build_all(kind, {f"{own}:{name}": None})[0]).__name__ == name
    assert registry.build_scheduler({"name": f"{own}:Half", "factor": 0.25}).factor == 0.25
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    section = {"name": f"{own}:SGD", "lr": 0.5, "weight_decay": 0.1, "filter_bias_norm_wd": True}
    assert [group["weight_decay"] for group in registry.build_optimizer(section, model).param_groups] == [0.1, 0.0]
    assert registry.build_all("loggers", {"composer.loggers:InMemoryLogger": {}})  # of an installed package


def test_a_class_of_ones_own_may_name_its_arguments_as_it_likes(own):
    given = {"model": "name", "params": 3, "other": [1], "inherited": None}
    (named,) = registry.build_all("callbacks", {f"{own}:Named": given})
    assert named.given == ("name", 3, {"other": [1]})
    with pytest.raises(UserError, match=r"unknown key optimizer\.params"):
        registry.build_optimizer({"name": f"{own}:SGD", "params": []}, torch.nn.Linear(1, 1))


def test_a_schedule_of_ones_own_is_called_in_training_alone(own):
    assert registry.build_scheduler({"name": f"{own}:Counting"}).calls == 0


@pytest.mark.parametrize(
    ("kind", "name", "arguments", "words"),
    [
        (
            "callbacks",
            "own_classes:Loud",
            {"evry": 2},
            "unknown key callbacks.own_classes:Loud.evry; did you mean every",
        ),
        ("callbacks", "own_classes:Loud", {"every": 0}, "callbacks.own_classes:Loud: own_classes:Loud rejects these"),
        ("callbacks", "own_classes:Lout", {}, "callbacks: own_classes has no 'Lout'; did you mean Loud?"),
        ("callbacks", "own_classes:Half", {}, "callbacks: own_classes:Half must be a subclass of composer's Callback"),
        ("algorithms", "own_classes:function", {}, "own_classes:function must be a subclass of composer's Algorithm"),
        (
            "callbacks",
            "no_package.mod:Loud",
            {},
            "there is no module no_package for no_package.mod:Loud; install it, or",
        ),
        ("callbacks", "torch.mod:Loud", {}, "there is no module torch.mod for torch.mod:Loud; install it, or add its"),
        ("callbacks", "my", {"mod:Loud": {"every": 1}}, "unknown name 'my'; write callbacks[my.mod:Loud]"),
        ("callbacks", ":Loud", {}, "callbacks: ':Loud' must have the form module:Class"),
    ],
)
def test_a_mistake_in_the_name_of_a_class_is_reported(own, kind, name, arguments, words):
    with pytest.raises(UserError, match=re.escape(words)):
        registry.build_all(kind, {name: arguments})


@pytest.mark.parametrize(
    ("file", "code", "words"),
    [
        ("missing.py", None, "code_paths: missing.py does not exist; give a path relative to the working directory"),
        ("classes.txt", "", "code_paths: classes.txt is not a .py file"),
        ("my-classes.py", "", "code_paths: my-classes.py is not a module name; rename it"),
        ("torch.py", "", "code_paths: torch.py would hide another module torch; rename it"),
        ("broken.py", "x = 1\nimport no_such_package", "ModuleNotFoundError: No module named 'no_such_package' ("),
        ("broken.py", "x = 1\nx.y", r"broken.py, line 2)"),
        ("broken.py", "x = (", "code_paths: broken.py cannot be imported: SyntaxError: '(' was never closed"),
    ],
)
def test_a_file_that_cannot_be_imported_is_reported(tmp_path, monkeypatch, file, code, words):
    monkeypatch.chdir(tmp_path)
    if code is not None:
        Path(file).write_text(code)
    with pytest.raises(UserError) as error:
        import_files([file])
    assert words in str(error.value)
    assert "broken" not in sys.modules


def test_a_file_is_imported_once_and_two_of_one_name_are_rejected(own, tmp_path):
    module = sys.modules[own]
    import_files([f"{own}.py", str(tmp_path / f"{own}.py")])
    assert sys.modules[own] is module
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / f"{own}.py").touch()
    with pytest.raises(UserError, match=f"would hide another module {own}"):
        import_files([f"other/{own}.py"])


def test_a_file_that_python_would_find_itself_is_executed(tmp_path, monkeypatch):
    (tmp_path / "own_patch.py").write_text("import sys\nsys.own_patch_was_executed = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "own_patch_was_executed", False, raising=False)
    monkeypatch.delitem(sys.modules, "own_patch", raising=False)
    import_files([str(tmp_path / "own_patch.py")])
    assert sys.own_patch_was_executed and sys.modules["own_patch"]


def test_names_with_dots_are_keys_in_yaml_and_in_brackets(config_file):
    given = ["callbacks[my_package.mod:Loud].every=2", "callbacks.mod:Loud.every=3", "code_paths=[a.py]"]
    config = load_config(PretrainConfig, "main.py", "", [str(config_file), *given])
    assert config.callbacks["my_package.mod:Loud"] == {"every": 2} and config.callbacks["mod:Loud"] == {"every": 3}
    config_file.write_text(f"{config_file.read_text()}callbacks:\n  my_package.mod:Loud: {{every: 4}}\n")
    config = load_config(PretrainConfig, "main.py", "", [str(config_file), given[0].replace("2", "5")])
    assert to_dict(config)["callbacks"]["my_package.mod:Loud"] == {"every": 5}
