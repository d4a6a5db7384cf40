"""README and chapters: links, files, options, keys and make targets exist, and the README is short."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest
from conftest import ROOT

from src.embed.config import EmbedConfig
from src.glue.experiment import FinetuneConfig
from src.lra.tasks import LraConfig
from src.mlm.task import PretrainConfig
from src.vision.config import VisionConfig

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIG = ("src/config.py", "src/training/config.py")
JOBS = [f"src/jobs/{path.name}" for path in (ROOT / "src/jobs").glob("*.py")]
PARSERS = {  # script → the files that declare its options, if they are others
    "glue.py": (*CONFIG, *JOBS),
    "lra.py": (*CONFIG, *JOBS, "src/lra/make.py", "src/lra/shards.py"),
    "src/convert_dataset.py": ("src/data/options.py",),
    "main.py": (*CONFIG, "src/mlm/context.py"),
    "embed.py": (*CONFIG, *(f"src/embed/{name}.py" for name in ("evaluate", "encode", "options"))),
    "vision.py": (*CONFIG, *(f"src/vision/{name}.py" for name in ("evaluate", "predict", "draw", "inference"))),
}
SCRIPT = re.compile(r"(?<![\w/.])(?:src/|benchmarks/)?\w+\.py\b")


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(text: str) -> list[str]:
    """The command lines in code blocks and in inline code, with continued lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    inline = re.findall(r"`([^`\n]+\.py [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = "\n".join(blocks).replace("\\\n", " ").split("\n") + [command.replace("\n", " ") for command in inline]
    return [line.split(" #")[0] for line in lines if ".py" in line]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if not path.startswith("http"):
            linked = (page.parent / path).resolve() if path else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_a_page_exist(page):
    named = re.findall(r"`((?:src|tests|yamls|benchmarks)/[\w./-]+?)/?`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_of_commands_are_known(page):
    for command in commands(page.read_text()):
        script = next((name for name in SCRIPT.findall(command) if (ROOT / name).is_file()), None)
        if script is None:  # a test file
            continue
        declared = "".join((ROOT / path).read_text() for path in PARSERS.get(script, (script,)))
        options = set(re.findall(r"--\w+", command.split(script, 1)[1])) - {"--help"}  # which every parser has
        assert {option for option in options if f'"{option}"' not in declared} == set(), command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_given_as_key_value_are_known(page):
    schemas = (PretrainConfig, FinetuneConfig, LraConfig, VisionConfig, EmbedConfig)
    known = {entry.name for schema in schemas for entry in fields(schema)}
    others = {"form", "num_labels", "trust_remote_code"}  # arguments of Python functions
    assert set(re.findall(r"`'?([a-z_]+)(?:\.[\w.]+)?=", page.read_text())) <= known | others


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE)) <= set(targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_a_page_parses(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        ast.parse(block)


def test_the_recipe_for_a_mixer_works(monkeypatch):
    import torch

    from src.lion import LionConfig, LionModel, configuration_lion, mixers

    code = re.search(r"```python\n# (src/lion/\w+\.py)\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)[
        2
    ]
    monkeypatch.setitem(mixers.MIXERS, "lion-fixed", None)  # removed again at the end
    monkeypatch.setitem(configuration_lion.CHOICES, "mixer", (*configuration_lion.MIXERS, "lion-fixed"))
    exec(code, {"__name__": "src.lion.lion_fixed", "__package__": "src.lion"})
    sizes = {"vocab_size": 16, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    model = LionModel(LionConfig(mixer="lion-fixed", num_hidden_layers=1, **sizes)).eval()
    ids = torch.arange(1, 13)[None]
    full, chunkwise = (model(ids, attention_form=form).last_hidden_state for form in ("full", "chunkwise"))
    torch.testing.assert_close(full, chunkwise, atol=1e-5, rtol=1e-5)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_the_readme_links_every_chapter():
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)", (ROOT / "README.md").read_text()))
    assert linked == {page.name for page in PAGES[1:]}
