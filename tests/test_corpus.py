"""The offline corpus: what counts as prose, that repeats are dropped, and that the same sources give the same file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from src.demo.corpus import (
    PASSAGE_WORDS,
    build_corpus,
    is_english,
    merge_passages,
    prose,
    source_files,
    split_paragraphs,
    split_sentences,
    without_repeats,
)
from src.errors import UserError

ROOT = Path(__file__).resolve().parent.parent


def clean(docstring: str) -> list[str]:
    seen: set[str] = set()
    return [text for paragraph in split_paragraphs(docstring) if (text := without_repeats(prose(paragraph), seen))]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that writes an importable package of the given files and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(files: dict[str, str], name: str = "a_documented_package") -> str:
        for path, source in {"__init__.py": "", **files}.items():
            file = tmp_path / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source, encoding="utf-8")
        return name

    return write


def build(tmp_path, name: str):
    build_corpus(tmp_path / "corpus.jsonl", [name], [])
    return [json.loads(line) for line in (tmp_path / "corpus.jsonl").read_text(encoding="utf-8").splitlines()]


BEFORE, AFTER = "The text that comes before is kept here.", "And so is the text that follows after it."

NO_PROSE = {
    "doctest": ">>> print('It is an example of the code.')\nIt is an example of the code.",
    "fence": "```python\nThis is not for you to read, it is code.\n```",
    "literal block": "::\n\n    This is not for you to read, it is code.",
    "code directive": ".. code-block:: python\n\n    This is not for you to read, it is code.",
    "math": ".. math::\n\n    x \\text{ is the value of the sum.}",
    "comment": ".. This is a comment and it is not for the reader.",
    "link target": ".. _the-target:",
    "heading": "The Notes of the Author\n-----------------------",
    "table": "=====  =====\nThe a     or the b.\n=====  =====",
    "grid table": "+---+---+\n| This is a cell of the table. |\n+---+---+",
    "ascii art": "This is a box ------> and this is the other box.",
    "signature": "norm(x, ord=None, axis=None, keepdims=False) -> float",
    "no full stop": "The number of the elements in the array",
    "names": "Foo, bar_baz, qux2, x.y.z and self.w are T1, T2.",
    "not English": "Dieser Satz handelt von einem Netzwerk aus Knoten.",
}


@pytest.mark.parametrize("block", NO_PROSE.values(), ids=NO_PROSE.keys())
def test_non_prose_is_dropped_and_the_text_around_it_kept(block):
    assert clean(f"{BEFORE}\n\n{block}\n\n{AFTER}") == [BEFORE, AFTER]


MARKUP = {
    "A :class:`Foo` is the parent of a :meth:`~pkg.Bar.baz`.": "A Foo is the parent of a baz.",
    "A :ref:`broadcasting rule <rules>` is what it obeys.": "A broadcasting rule is what it obeys.",
    "The ``mask`` is *never* **ever** a `list` of it.": "The mask is never ever a list of it.",
    "See the `guide <https://a.b/c>`_ or [the paper](https://a.b) for it.": "See the guide or the paper for it.",
    "A [`~utils.ModelOutput`] is what the model returns.": "A ModelOutput is what the model returns.",
    "A list of :class:`int`\\ s is all that it takes.": "A list of ints is all that it takes.",
    "The method is due to Gauss [1]_.": "The method is due to Gauss.",
    "It is a number in [0, 1], as the author of the method has shown [2].": (
        "It is a number in [0, 1], as the author of the method has shown."
    ),
    "The method is described in [1]_. It is the one in use here.": "It is the one in use here.",
    "Read https://a.b/c.html for the details. It is all written there.": "It is all written there.",
    "It “is” the user’s own text,  as it were.\nIt\tgoes on.": 'It "is" the user\'s own text, as it were.',
    "x : int, optional\n    The number of the things to do.": "The number of the things to do.",
    "Args:\n    x (int): the number of the things\n        that it has to do.": "The number of the things that it has to do.",
    ":param x: the number of the things to do.": "The number of the things to do.",
    "- **x** (`int`) -- the number of things.\n- The second of the items.": "The second of the items.",
    ".. note:: This is what one has to know.": "This is what one has to know.",
    ".. versionchanged:: 1.2\n    The default is now what it was.": "The default is now what it was.",
}


@pytest.mark.parametrize("docstring", MARKUP)
def test_markup_gives_plain_text(docstring):
    assert clean(docstring)[0] == MARKUP[docstring]


def test_arguments_are_separate_paragraphs():
    docstring = """Do what it says.

    Args:
        first (`int`, *optional*, defaults to 3):
            The first of the numbers. It may be
            left out.
        second: The second of the numbers.
        third: The third one of them.

    Returns:
        list[int]: The numbers in the order of their size.
    """
    assert clean(docstring) == [
        "The first of the numbers. It may be left out.",
        "The second of the numbers.",
        "The third one of them.",
        "The numbers in the order of their size.",
    ]


def test_sentences_do_not_end_at_abbreviations():
    text = "It uses, e.g. The Method of J. Smith et al. And so on (cf. Fig. 3). Is it so? It is."
    assert split_sentences(text) == [
        "It uses, e.g. The Method of J. Smith et al. And so on (cf. Fig. 3).",
        "Is it so?",
        "It is.",
    ]


def test_a_sentence_is_kept_once_regardless_of_case_punctuation_numbers_and_names():
    seen: set[str] = set()
    assert without_repeats(prose("The size of the queue is 10. It is the size of a FooBar."), seen)
    assert without_repeats(prose("the size of the queue, is 20! It is the size of a BazQux."), seen) == ""


def test_english_is_recognized_by_function_words():
    assert is_english("The cat sat on the mat and was glad.")
    assert not is_english("Cat sat mat table chair window door.")
    assert not is_english("The cat sat on the mat and was glad")


def test_passages_are_filled_with_complete_sentences():
    sentence = "This is one sentence of exactly ten words in all."
    paragraphs = [" ".join([sentence] * count) for count in (3, 4, 5, 30, 2)]
    passages = list(merge_passages(paragraphs))
    assert sum(len(passage.split()) for passage in passages) == 440
    assert all(len(passage.split()) <= PASSAGE_WORDS[1] and passage.endswith(".") for passage in passages)
    assert all(len(passage.split()) >= PASSAGE_WORDS[0] for passage in passages[:-1])
    assert list(merge_passages(["It is too short."])) == []  # to stand alone


def words(number: int) -> str:
    """A passage, one sentence of 22 words, that no other number gives."""
    name = "".join("abcdefghij"[int(digit)] for digit in str(number))
    return f"The {name} is the first of the things that it has to do in its life, where all of its kind are."


def test_docstrings_and_shared_texts_are_read_in_order_without_tests(package, tmp_path, caplog):
    name = package(
        {
            "b.py": f'"""{words(1)}"""\n\nclass A:\n    """{words(2)}"""\n\n    def f(self):\n        """{words(3)}"""\n',
            "a/__init__.py": f'TEXT = r"""\n{words(4)}\n"""\nx = "{words(5)}"\n',
            "tests/c.py": f'"""{words(6)}"""',
        }
    )
    with caplog.at_level("INFO"):
        rows = build(tmp_path, name)
    assert [row["source"] for row in rows] == [f"{name}/a/__init__.py"] + 3 * [f"{name}/b.py"]
    assert [row["text"] for row in rows] == [words(n) for n in (4, 1, 2, 3)]
    assert f"4 passages, {sum(len(row['text'].split()) for row in rows)} words\n" in caplog.text


def test_packages_are_read_but_not_imported(package, tmp_path):
    name = package({"__init__.py": f'"""{words(1)}"""\nraise SystemExit("it was run")\n'})
    assert len(build(tmp_path, name)) == 1


def test_unreadable_files_are_counted(package, tmp_path, caplog):
    name = package({"good.py": f'"""{words(1)}"""', "bad.py": '"""It is a text'})
    (tmp_path / name / "latin.py").write_bytes('"""Un café."""'.encode("latin-1"))
    with caplog.at_level("INFO"):
        assert len(build(tmp_path, name)) == 1
    assert "; 2 unreadable files" in caplog.text


def test_only_required_packages_must_be_installed(package, tmp_path):
    name = package({"a.py": f'"""{words(1)}"""'})
    build_corpus(tmp_path / "c.jsonl", [name, "no_such_package"], [name])
    assert len((tmp_path / "c.jsonl").read_text().splitlines()) == 1
    with pytest.raises(UserError, match="no_such_package"):
        build_corpus(tmp_path / "d.jsonl", [name, "no_such_package"], ["no_such_package"])
    assert not (tmp_path / "d.jsonl").exists()


def test_the_standard_library_is_found():
    names = [name for name, _ in source_files("stdlib")]
    assert "stdlib/argparse.py" in names
    assert not any("site-packages" in name or "/test/" in name for name in names)


def test_the_file_does_not_depend_on_process_or_location(package, tmp_path):
    files = {f"m{n}.py": "\n\n".join(f'"""{words(n * 5 + k)}"""' for k in range(5)) for n in range(9)}
    written = []
    for seed in ("1", "2"):
        name = package(files, name=f"place{seed}/documented")
        out = tmp_path / f"{seed}.jsonl"
        code = f"from pathlib import Path; from src.demo.corpus import *; build_corpus(Path({str(out)!r}), ['documented'], [])"
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{(tmp_path / name).parent}{os.pathsep}{ROOT}"}
        subprocess.run([sys.executable, "-c", code], env=env, check=True, cwd=tmp_path)
        written.append(out.read_bytes())
    assert written[0] == written[1] and written[0].count(b"\n") == 45
