"""An English corpus for a machine without the Hub: the documentation strings of the installed Python packages.

Python's standard library and the packages this project installs carry some tens of megabytes of docstrings, written by
people, in English, about arrays, graphs, sockets and statistics. `build_corpus` reads them out of the source files (it
parses, and never imports, the packages), strips what is not prose, drops what was said before, and writes *passages*:

    {"text": "Applies an affine linear transformation to the incoming data. ...", "source": "torch/nn/modules/linear.py"}

The result depends on the installed versions alone: not on where they lie, nor on the process that reads them.
"""

import ast
import importlib.util
import inspect
import json
import multiprocessing
import os
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from src.cli import log, progress
from src.errors import UserError

STDLIB = "stdlib"  # the name the standard library goes by in `source`
REQUIRED = (STDLIB, "numpy", "torch", "transformers")
# In the order in which they are read: of a sentence that two packages share, the first keeps it.
PACKAGES = (
    *REQUIRED, "scipy", "pandas", "sympy", "sklearn", "networkx", "matplotlib", "mpl_toolkits", "torchmetrics", "torchvision",
    "composer", "streaming", "datasets", "huggingface_hub", "pyarrow", "PIL", "mpmath", "narwhals", "fsspec", "fontTools",
    "omegaconf", "tensorboard", "grpc", "absl", "joblib", "dill", "triton", "aiohttp", "anyio", "httpx", "requests",
    "urllib3", "websockets", "werkzeug", "jinja2", "markdown", "pygments", "rich", "prompt_toolkit", "tqdm", "pip",
    "setuptools", "_pytest", "attr", "filelock", "dateutil", "arrow", "psutil", "wcwidth", "paramiko", "OpenSSL", "nacl",
    "asn1crypto", "pyasn1", "graphql", "gql", "opentelemetry", "mcli",
)  # fmt: skip
SKIPPED_FOLDERS = {"test", "tests", "testing", "idle_test", "site-packages", "dist-packages", "__pycache__"}

# A passage ends with its paragraph from the first on, and is longer than the second only if it is one sentence. As short as
# what the tiny models read at once: those without decay have to find out first which positions are neighbours.
PASSAGE_WORDS = (16, 24)
SHORTEST_PASSAGE = 5  # words; shorter ends of files are left out
SENTENCE_WORDS = (5, 80)

PUNCTUATION = re.compile(r"[^\w\s]+")
UNPROSE = "\0"  # stands for what prose does not hold (a URL, a tag): the sentence around it is left out
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
FENCE = re.compile(r"\s*(```|~~~)")
DIRECTIVE = re.compile(r"\s*\.\.(?:\s+([\w:-]+?)::|\s|$)\s*(?:\d[\w.]*\s*)?")  # with a version, if any
KEPT_DIRECTIVES = {"note", "warning", "caution", "attention", "important", "tip", "hint", "seealso", "admonition",
                   "versionadded", "versionchanged", "deprecated"}  # fmt: skip
RULE = re.compile(r"^\s*(?:```|~~~)|^\s*([-=~^\"'*#+_.`])(?:\1|\s)*$|\S {3,}\S|^\s*[|+].*[|+]\s*$")  # or a table's row
TYPE_LINE = re.compile(r"\s*[\w.*`'\", ]{1,60} : |\s*[\w*]+\s*:\s*$")  # numpydoc's "x : int, optional"
BULLET = re.compile(r"\s*(?:[-*+•]|\d+[.)]|\([a-z\d]\)|#\.)\s+")
FIELD = re.compile(r"\s*[:@]\w+(?:\s+[\w.*, `]+)?:(?:\s+|$)")  # Sphinx's ":param x: "
ARGUMENT = re.compile(
    r"\s*[`*]*[\w.]+(?:\[[\w\[\], .]*\])?[`*]*(?:\s*\((?:[^()]|\([^()]*\))*\))?\s*:(?:\s+|$)"
)  # Google's "x (int): "
MARKUP = re.compile(r"[^\w .,;()'-]|  ")  # a paragraph without these is plain text
INLINE = [(re.compile(pattern), to) for pattern, to in (
    (r"[\u2018\u2019]", "'"), (r"[\u201c\u201d]|``(?=\w[^`]*'')|(?<=\w)''", '"'), (r"[\u2013\u2014]", "-"), ("\u2026", "..."),
    (r"\\ ", ""),  # RST: what joins a role and a letter
    (r"!\[[^]]*\]\([^)]*\)", " "),  # Markdown: an image, a link
    (r"\[([^][]+)\]\((?:[^()\s]|\([^()]*\))*\)", r"\1"),
    (r"\[`[~!]?(?:\w+\.)*(\w+)`\]", r"\1"),  # and the short one of transformers
    (r":[\w:+-]+:`([^`<]+?)\s*<[^`>]*>`", r"\1"),  # RST: a role with a title, a role with a dotted path
    (r":[\w:+-]+:`[~!]?(?:\w+\.)*([^`]*)`", r"\1"),
    (r"`([^`<]+?)\s*<[^`>]*>`_{0,2}", r"\1"),
    (r"`{1,3}([^`]*)`{1,3}_{0,2}", r"\1"),
    (r"(?<![\w*])\*{1,2}(?=[^\s*])([^*]*[^\s*])\*{1,2}(?![\w*])", r"\1"),
    (r"\b(?:[Ii]n|[Bb]y|[Ff]rom|[Oo]f|[Ss]ee|[Tt]o|as|with|and|per|[Rr]ef\.|e\.g\.),? \[[#\w*,+-]{1,20}\]_", UNPROSE),
    (r"\s*\[[#\w*,+-]{1,20}\]_", ""), (r"\s+\[\d+\](?=[.,;)]|$)", ""),  # a citation that ends a clause, a footnote
    (r"(?:https?|ftp)://\S+|\bwww\.\S+|<[/!]?[A-Za-z][^<>]*>", UNPROSE),
    (r"\s+([,.;:!?)])(?=\s|$)", r"\1"), (r"\s+", " "),
)]  # fmt: skip
SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s+(?=[\"'(\[]*(?:[A-Z]|[a-z]+_))")
ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|cf|vs|al|resp|approx|ca|[Ff]igs?|[Ee]qs?|[Ss]ecs?|[Rr]efs?|[Cc]h|[Vv]ol|[Nn]o|pp?|"
                          r"Dr|Mr|Ms|Mrs|Prof|St|Inc|Jr)|(?:^|[\s(.])[A-Z])\.$")  # fmt: skip
WHOLE = re.compile(r"[\"'(\[]*[A-Za-zÀ-ɏ].*[.!?][\"')\]]*$")
FORBIDDEN = re.compile(
    r"[^A-Za-zÀ-ÖØ-öø-ɏ0-9 .,;:!?'\"()\[\]/%&+_-]|__|--|\.\.\.\.|%[(sdr]|(?<!\w)\(\s*\)|\b(?:by|of|from|the|as)\.$"
)
WORD = re.compile(
    r"[(\[\"']*(?:[aAI]|[A-Z]{2,}s?|[A-Za-zÀ-ɏ][a-zÀ-ɏ]+)(?:['/-](?:[A-Za-z]?[a-z]+|[A-Z]+))*[)\]\"',.;:!?]*"
)
FUNCTION_WORDS = frozenset("""a about after all also an and any are as at be because been before between both but by can cannot
    could do does each either every for from has have he her here his how however i if in into is it its itself may more most
    must no nor not of on one only or other our over same should since so some such than that the their them then there these
    they this those through to under until up upon use used using was we were what when where whether which while who whose
    will with within without would you your""".split())  # fmt: skip


@dataclass
class CorpusSummary:
    """What `build_corpus` wrote, and what it met on the way."""

    documents: int = 0
    words: int = 0
    megabytes: float = 0.0  # of text, in UTF-8, in millions of bytes
    packages: dict[str, float] = field(default_factory=dict)  # the megabytes of each package that gave any
    skipped_files: int = 0  # not UTF-8, or not the syntax of this Python


def build_corpus(out: Path, packages: Iterable[str] = PACKAGES, required: Iterable[str] = REQUIRED) -> CorpusSummary:
    """Write the prose of the installed `packages` to `out`, a JSONL file of passages ordered by package and file.

    A package that is not installed is passed over, unless it is among the `required`: then UserError.
    """
    files = {package: source_files(package) for package in packages}
    if missing := [package for package in required if not files.get(package)]:
        raise UserError(
            f"no Python sources of {', '.join(missing)} here: install them, for the corpus is their docstrings"
        )
    summary, seen = CorpusSummary(), set()
    paths = [path for sources in files.values() for _, path in sources]
    bar = progress(total=len(paths), desc="reading docstrings", unit="file")
    # Reading is for every core; what was said before is for one process to know.
    with bar, atomic_writer(out) as lines, multiprocessing.get_context("spawn").Pool() as pool:
        contents = pool.imap(file_paragraphs, paths, chunksize=16)
        for package, sources in files.items():
            size = 0
            for (source, _), paragraphs in zip(sources, contents):
                bar.update()
                summary.skipped_files += paragraphs is None
                unsaid = filter(None, (without_repeats(sentences, seen) for sentences in paragraphs or ()))
                for text in merge_passages(unsaid):
                    lines.write(json.dumps({"text": text, "source": source}, ensure_ascii=False) + "\n")
                    summary.documents += 1
                    summary.words += len(text.split())
                    size += len(text.encode())
            if size:
                summary.packages[package] = size / 1e6
    summary.megabytes = sum(summary.packages.values())
    log.info(f"{out}: {summary.documents:,} passages, {summary.words:,} words, {summary.megabytes:.1f} MB")
    return summary


@contextmanager
def atomic_writer(path: Path) -> Iterator[TextIO]:
    """A text file that appears under its name once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def source_files(package: str) -> list[tuple[str, Path]]:
    """(name, path) of each source file of a package, tests left out, sorted by the name; [] if it is not installed."""
    if package == STDLIB:
        roots = [sysconfig.get_path("stdlib")]
    else:
        spec = importlib.util.find_spec(package)  # finds a package without running it
        roots = (spec and spec.submodule_search_locations) or []
    found = []
    for root in roots:
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
            paths = [Path(folder, name) for name in names if name.endswith(".py")]
            found += [(f"{package}/{path.relative_to(root).as_posix()}", path) for path in paths]
    return sorted(found)


def file_paragraphs(path: Path) -> list[list[str]] | None:
    """The prose of one source file: paragraphs, each a list of sentences. None for what this Python cannot read."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes, in other people's files
            texts = documentation(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError, OSError):
        return None
    return [sentences for text in texts for paragraph in split_paragraphs(text) if (sentences := prose(paragraph))]


def documentation(tree: ast.Module) -> list[str]:
    """The docstrings of a file and its other strings of several lines (texts that functions share), in order."""
    found, nodes = [], [tree]
    while nodes:
        node = nodes.pop()
        alone = isinstance(node, ast.Expr)
        node = node.value if alone else node
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and (alone or "\n" in node.value):
                found.append((node.lineno, node.col_offset, node.value))
        elif isinstance(node, FUNCTION):  # most of a file, and below its docstring no documentation
            nodes += node.decorator_list + [part for part in node.body if isinstance(part, (ast.Expr, *FUNCTION))]
        elif not isinstance(node, ast.JoinedStr):  # whose pieces are no sentences
            nodes += ast.iter_child_nodes(node)
    return [text for *_, text in sorted(found)]


def split_paragraphs(text: str) -> list[str]:
    """The paragraphs of a docstring in reStructuredText, Markdown, numpydoc or Google style, without its code.

    An item of a list and the description of an argument are paragraphs of their own. Whether one is English is for
    `prose` to judge.
    """
    paragraphs, lines = [], []  # the lines of the paragraph being read, ...
    start, hangs = 0, False  # ... the indent of its first, and whether that opens an item, whose text may hang deeper
    for line in without_code(text):
        indent = len(line) - len(line.lstrip())
        bullet = BULLET.match(line) or FIELD.match(line)
        rest = line[bullet.end() :] if bullet else line
        argument = ARGUMENT.match(rest)
        new = bullet or indent < start or (indent > start and not hangs and len(lines) == 1)
        new = new or (argument and (hangs or "(" in argument[0]))
        if lines and (new or not line or TYPE_LINE.match(line)):
            paragraphs.append(" ".join(lines))
            lines = []
        if not line or TYPE_LINE.match(line):
            continue
        if not lines:
            start, hangs = indent, bool(bullet or argument)
            rest = rest[argument.end() :] if argument else rest
        lines.append(rest.strip())
    return [*paragraphs, " ".join(lines)] if lines else paragraphs


def without_code(text: str) -> Iterator[str]:
    """The lines of a docstring with "" in place of fenced, literal and directive blocks, doctests, tables and rules."""
    fenced = doctest = False
    hidden = None  # lines indented deeper than this are a block's
    for line in inspect.cleandoc(text.expandtabs()).split("\n"):
        body, indent = line.strip(), len(line) - len(line.lstrip())
        if FENCE.match(body):
            fenced = not fenced
        doctest = bool(body) and (doctest or body.startswith(">>>"))
        if hidden is not None and body and indent <= hidden:
            hidden = None
        if not body or fenced or doctest or hidden is not None or RULE.search(line):
            yield ""
        elif directive := DIRECTIVE.match(line):
            kept = directive[1] in KEPT_DIRECTIVES
            hidden = None if kept else indent
            rest = line[directive.end() :]
            yield f"{' ' * indent}* {rest}" if kept and rest else ""
        else:
            hidden = indent if body.endswith("::") else None
            yield line


def prose(paragraph: str) -> list[str]:
    """The English sentences of a paragraph, in plain text."""
    if not re.search(r"[.!?](?!\w)", paragraph):  # a heading, a signature, a line of code
        return []
    for pattern, replacement in INLINE if MARKUP.search(paragraph) else ():
        paragraph = pattern.sub(replacement, paragraph)
    return [capitalize(sentence) for sentence in split_sentences(paragraph.strip()) if is_english(sentence)]


def without_repeats(sentences: list[str], seen: set[str]) -> str:
    """The sentences of a paragraph that are not yet `seen`; they join `seen`."""
    kept = []
    for sentence in sentences:
        if (key := fold(sentence)) not in seen:
            seen.add(key)
            kept.append(sentence)
    return " ".join(kept)


def split_sentences(text: str) -> list[str]:
    """The sentences of a paragraph; a full stop after an abbreviation or an initial ends none."""
    sentences, start = [], 0
    for end in SENTENCE_END.finditer(text):
        if not ABBREVIATION.search(text, start, end.start() + 1):
            sentences.append(text[start : end.end()].rstrip())
            start = end.end()
    return [*sentences, text[start:]] if text[start:] else sentences


def is_english(sentence: str) -> bool:
    """Whether a sentence is whole, is made of words rather than of names and numbers, and has the words that bind."""
    count = len(words := sentence.split())
    if not (SENTENCE_WORDS[0] <= count <= SENTENCE_WORDS[1] and WHOLE.match(sentence)) or FORBIDDEN.search(sentence):
        return False
    plain = sum(WORD.fullmatch(word) is not None for word in words)
    binding = sum(word.strip(",.;:()").lower() in FUNCTION_WORDS for word in words)
    return plain >= 0.8 * count and binding >= 0.15 * count


def fold(sentence: str) -> str:
    """What two sentences share that say the same: case, punctuation, numbers and names of code do not count."""
    words = PUNCTUATION.sub("", sentence).split()
    return " ".join(word.lower() if word.isalpha() and word[1:] == word[1:].lower() else "@" for word in words)


def capitalize(sentence: str) -> str:
    """A sentence with its first letter in upper case, unless it starts with a name or a symbol."""
    first = sentence.split(maxsplit=1)[0]
    return sentence[0].upper() + sentence[1:] if first == "a" or (len(first) > 1 and first.isalpha()) else sentence


def merge_passages(paragraphs: Iterable[str]) -> Iterator[str]:
    """Consecutive paragraphs, a line each, joined to PASSAGE_WORDS; a paragraph that would not fit goes on in the next."""
    lines: list[list[str]] = []  # the passage so far: its paragraphs, each a list of sentences
    size = 0
    for paragraph in paragraphs:
        lines.append([])
        for sentence in split_sentences(paragraph):
            words = len(sentence.split())
            if size and size + words > PASSAGE_WORDS[1]:
                yield join(lines)
                lines, size = [[]], 0
            lines[-1].append(sentence)
            size += words
        if size >= PASSAGE_WORDS[0]:
            yield join(lines)
            lines, size = [], 0
    if size >= SHORTEST_PASSAGE:
        yield join(lines)


def join(lines: list[list[str]]) -> str:
    return "\n".join(" ".join(sentences) for sentences in lines if sentences)
