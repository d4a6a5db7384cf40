"""A corpus of English for a machine without the Hub: the docstrings of the installed Python packages.

The standard library and the packages that this project installs hold 13 MB of English prose about arrays, graphs and
sockets. `build_corpus` parses their source files without importing them, drops code and repeated sentences, and writes
passages, which depend only on the installed versions:

    {"text": "Applies an affine linear transformation to the incoming data.", "source": "torch/nn/modules/linear.py"}
"""

import ast
import gc
import importlib.util
import inspect
import itertools
import json
import multiprocessing
import operator
import os
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from src.cli import log, progress
from src.errors import UserError
from src.files import write_atomically

REQUIRED = ("stdlib", "numpy", "torch", "transformers")
# In reading order: a sentence that two packages share belongs to the first.
PACKAGES = (
    *REQUIRED,
    *"""scipy pandas sympy sklearn networkx matplotlib mpl_toolkits torchmetrics torchvision composer streaming datasets
    huggingface_hub pyarrow PIL mpmath narwhals fsspec fontTools omegaconf tensorboard grpc absl joblib dill triton
    aiohttp anyio httpx requests urllib3 websockets werkzeug jinja2 markdown pygments rich prompt_toolkit tqdm pip
    setuptools _pytest attr filelock dateutil arrow psutil wcwidth paramiko OpenSSL nacl asn1crypto pyasn1 graphql gql
    opentelemetry mcli""".split(),
)
SKIPPED_FOLDERS = {"test", "tests", "testing", "idle_test", "site-packages", "dist-packages", "__pycache__"}

# A passage ends with the paragraph that reaches the first number of words; only a single sentence exceeds the second.
PASSAGE_WORDS = (16, 24)
SHORTEST_PASSAGE = 5  # words, at the end of a file
SENTENCE_WORDS = (5, 80)

PUNCTUATION = re.compile(r"[^\w\s]+")
NOT_PROSE = "\0"  # replaces a URL or a tag; a sentence that contains it is dropped
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
FENCE = re.compile(r"\s*(```|~~~)")
DIRECTIVE = re.compile(r"\s*\.\.(?:\s+([\w:-]+?)::|\s|$)\s*(?:\d[\w.]*\s*)?")  # and its version
KEPT_DIRECTIVES = {"note", "warning", "caution", "attention", "important", "tip", "hint", "seealso", "admonition",
                   "versionadded", "versionchanged", "deprecated"}  # fmt: skip
# A rule, or a row of a table
RULE = re.compile(r"^\s*(?:```|~~~)|^\s*([-=~^\"'*#+_.`])(?:\1|\s)*$|\S {3,}\S|^\s*[|+].*[|+]\s*$")
TYPE_LINE = re.compile(r"\s*[\w.*`'\", ]{1,60} : |\s*[\w*]+\s*:\s*$")  # numpydoc's "x : int, optional"
BULLET = re.compile(r"\s*(?:[-*+•]|\d+[.)]|\([a-z\d]\)|#\.)\s+")
FIELD = re.compile(r"\s*[:@]\w+(?:\s+[\w.*, `]+)?:(?:\s+|$)")  # Sphinx's ":param x: "
# Google's "x (int): "
ARGUMENT = re.compile(r"\s*[`*]*[\w.]+(?:\[[\w\[\], .]*\])?[`*]*(?:\s*\((?:[^()]|\([^()]*\))*\))?\s*:(?:\s+|$)")
MARKUP = re.compile(r"[^\w .,;()'-]|  ")  # otherwise a paragraph is plain text
INLINE = [(re.compile(pattern), to) for pattern, to in (
    (r"[\u2018\u2019]", "'"), (r"[\u201c\u201d]|``(?=\w[^`]*'')|(?<=\w)''", '"'),
    (r"[\u2013\u2014]", "-"), ("\u2026", "..."),
    (r"\\ ", ""),  # RST: joins a role and a letter
    (r"!\[[^]]*\]\([^)]*\)", " "),  # Markdown: an image, a link
    (r"\[([^][]+)\]\((?:[^()\s]|\([^()]*\))*\)", r"\1"),
    (r"\[`[~!]?(?:\w+\.)*(\w+)`\]", r"\1"),  # and a reference in transformers
    (r":[\w:+-]+:`([^`<]+?)\s*<[^`>]*>`", r"\1"),  # RST: a role with a title, a role with a dotted path
    (r":[\w:+-]+:`[~!]?(?:\w+\.)*([^`]*)`", r"\1"),
    (r"`([^`<]+?)\s*<[^`>]*>`_{0,2}", r"\1"),
    (r"`{1,3}([^`]*)`{1,3}_{0,2}", r"\1"),
    (r"(?<![\w*])\*{1,2}(?=[^\s*])([^*]*[^\s*])\*{1,2}(?![\w*])", r"\1"),
    (r"\b(?:[Ii]n|[Bb]y|[Ff]rom|[Oo]f|[Ss]ee|[Tt]o|as|with|and|per|[Rr]ef\.|e\.g\.),? \[[#\w*,+-]{1,20}\]_", NOT_PROSE),
    (r"\s*\[[#\w*,+-]{1,20}\]_", ""), (r"\s+\[\d+\](?=[.,;)]|$)", ""),  # a citation that ends a clause, a footnote
    (r"(?:https?|ftp)://\S+|\bwww\.\S+|<[/!]?[A-Za-z][^<>]*>", NOT_PROSE),
    (r"\s+([,.;:!?)])(?=\s|$)", r"\1"), (r"\s+", " "),
)]  # fmt: skip
SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s+(?=[\"'(\[]*(?:[A-Z]|[a-z]+_))")
ABBREVIATION = re.compile(
    r"(?:\b(?:e\.g|i\.e|cf|vs|al|resp|approx|ca|[Ff]igs?|[Ee]qs?|[Ss]ecs?|[Rr]efs?|[Cc]h|[Vv]ol|[Nn]o|pp?|"
    r"Dr|Mr|Ms|Mrs|Prof|St|Inc|Jr)|(?:^|[\s(.])[A-Z])\.$"
)
COMPLETE = re.compile(r"[\"'(\[]*[A-Za-zÀ-ɏ].*[.!?][\"')\]]*$")
FORBIDDEN = re.compile(
    r"[^A-Za-zÀ-ÖØ-öø-ɏ0-9 .,;:!?'\"()\[\]/%&+_-]|__|--|\.\.\.\.|%[(sdr]|(?<!\w)\(\s*\)|\b(?:by|of|from|the|as)\.$"
)
WORD = re.compile(
    r"[(\[\"']*(?:[aAI]|[A-Z]{2,}s?|[A-Za-zÀ-ɏ][a-zÀ-ɏ]+)(?:['/-](?:[A-Za-z]?[a-z]+|[A-Z]+))*[)\]\"',.;:!?]*"
)
FUNCTION_WORDS = frozenset(
    """a about after all also an and any are as at be because been before between both but by can cannot could do
    does each either every for from has have he her here his how however i if in into is it its itself may more
    most must no nor not of on one only or other our over same should since so some such than that the their them
    then there these they this those through to under until up upon use used using was we were what when where
    whether which while who whose will with within without would you your""".split()
)


def build_corpus(out: Path, packages: Iterable[str] = PACKAGES, required: Iterable[str] = REQUIRED) -> None:
    """Write the prose of the installed `packages` to `out`, a JSONL file of passages ordered by package and file.
    Packages other than `required` are skipped if they are not installed. Raises UserError."""
    files = {package: source_files(package) for package in packages}
    if absent := ", ".join(package for package in required if not files.get(package)):
        raise UserError(f"no Python sources of {absent} found; install them: the corpus is their docstrings")
    sources, paths = zip(*(file for package_files in files.values() for file in package_files))
    seen: set[str] = set()
    rows, words, skipped = [], 0, 0  # skipped: files that are not UTF-8 or not valid syntax for this Python
    # Parse on all cores, a quarter faster without garbage collection; drop repeats here, which depends on the order.
    with multiprocessing.get_context("spawn").Pool(initializer=gc.disable) as pool:
        contents = pool.imap(file_paragraphs, paths, chunksize=16)
        contents = progress(contents, total=len(paths), desc="reading docstrings", unit="file")
        for paragraphs, source in zip(contents, sources):
            skipped += paragraphs is None
            unique = filter(None, (without_repeats(sentences, seen) for sentences in paragraphs or ()))
            for text in merge_passages(unique):
                rows.append(json.dumps({"text": text, "source": source}, ensure_ascii=False) + "\n")
                words += len(text.split())
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, "".join(rows))
    log.info(f"{out}: {len(rows):,} passages, {words:,} words" + (f"; {skipped:,} unreadable files" if skipped else ""))


def source_files(package: str) -> list[tuple[str, Path]]:
    """Return (name, path) of the source files of a package, sorted, without tests; [] if it is not installed."""
    spec = None if package == "stdlib" else importlib.util.find_spec(package)  # does not run it
    roots = [sysconfig.get_path("stdlib")] if package == "stdlib" else (spec and spec.submodule_search_locations) or []
    found = []
    for root in roots:
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
            paths = (Path(folder, name) for name in names if name.endswith(".py"))
            found += [(f"{package}/{path.relative_to(root).as_posix()}", path) for path in paths]
    return sorted(found)


def file_paragraphs(path: Path) -> list[list[str]] | None:
    """Return the prose of a source file as paragraphs, lists of sentences; None if this Python cannot read it."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes
            texts = documentation(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError, OSError):
        return None
    return [sentences for text in texts for paragraph in split_paragraphs(text) if (sentences := prose(paragraph))]


def documentation(tree: ast.Module) -> list[str]:
    """Return the docstrings of a file and its other multi-line strings (texts that functions share), in order."""
    found, nodes = [], [tree]
    while nodes:
        node = nodes.pop()
        alone = isinstance(node, ast.Expr)
        node = node.value if alone else node
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and (alone or "\n" in node.value):
                found.append((node.lineno, node.col_offset, node.value))
        elif isinstance(node, FUNCTION):  # its other statements, most of a file, hold no documentation
            nodes += node.decorator_list + [part for part in node.body if isinstance(part, (ast.Expr, *FUNCTION))]
        elif not isinstance(node, ast.JoinedStr):
            nodes += ast.iter_child_nodes(node)
    return [text for *_, text in sorted(found)]


def join_documents(corpus: Path, out: Path) -> None:
    """Write the passages of each source file as one document, for rows that are longer than a passage."""
    with corpus.open(encoding="utf-8") as file:
        passages = itertools.groupby(map(json.loads, file), key=operator.itemgetter("source"))
        documents = [{"text": "\n".join(row["text"] for row in rows), "source": source} for source, rows in passages]
    write_atomically(out, "".join(json.dumps(document) + "\n" for document in documents))


def split_paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a docstring in reStructuredText, Markdown, numpydoc or Google style, without its code.
    List items and descriptions of arguments are separate paragraphs. Some may not be English: see `prose`."""
    paragraphs, lines = [], []
    start, hangs = 0, False  # of the current paragraph: indent of its first line; whether later lines may be deeper
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
    """Yield the lines of a docstring, with "" for fenced, literal and directive blocks, doctests, tables and rules."""
    fenced = doctest = False
    hidden = None  # lines with a deeper indent belong to a block
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
    """Return the English sentences of a paragraph, in plain text."""
    if not re.search(r"[.!?](?!\w)", paragraph):  # a heading, a signature, a line of code
        return []
    for pattern, replacement in INLINE if MARKUP.search(paragraph) else ():
        paragraph = pattern.sub(replacement, paragraph)
    return [capitalize(sentence) for sentence in split_sentences(paragraph.strip()) if is_english(sentence)]


def without_repeats(sentences: list[str], seen: set[str]) -> str:
    """Join the sentences of a paragraph that are not in `seen`, and add them to it."""
    kept = []
    for sentence in sentences:
        words = PUNCTUATION.sub("", sentence).split()
        # Case, punctuation, numbers and code identifiers do not distinguish sentences.
        key = " ".join(word.lower() if word.isalpha() and word[1:] == word[1:].lower() else "@" for word in words)
        if key not in seen:
            seen.add(key)
            kept.append(sentence)
    return " ".join(kept)


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a paragraph; abbreviations and initials do not end one."""
    sentences, start = [], 0
    for end in SENTENCE_END.finditer(text):
        if not ABBREVIATION.search(text, start, end.start() + 1):
            sentences.append(text[start : end.end()].rstrip())
            start = end.end()
    return [*sentences, text[start:]] if text[start:] else sentences


def is_english(sentence: str) -> bool:
    """Whether a sentence is complete and consists of words, function words among them, not of names and numbers."""
    count = len(words := sentence.split())
    if not (SENTENCE_WORDS[0] <= count <= SENTENCE_WORDS[1] and COMPLETE.match(sentence)) or FORBIDDEN.search(sentence):
        return False
    plain = sum(WORD.fullmatch(word) is not None for word in words)
    function_words = sum(word.strip(",.;:()").lower() in FUNCTION_WORDS for word in words)
    return plain >= 0.8 * count and function_words >= 0.15 * count


def capitalize(sentence: str) -> str:
    """Capitalize the first letter of a sentence, unless it starts with a name or a symbol."""
    first = sentence.split(maxsplit=1)[0]
    return sentence[0].upper() + sentence[1:] if first == "a" or (len(first) > 1 and first.isalpha()) else sentence


def merge_passages(paragraphs: Iterable[str]) -> Iterator[str]:
    """Yield passages of PASSAGE_WORDS: consecutive paragraphs, one per line, split between sentences if necessary."""
    passage, size = "", 0
    for paragraph in paragraphs:
        for number, sentence in enumerate(split_sentences(paragraph)):
            words = len(sentence.split())
            if size and size + words > PASSAGE_WORDS[1]:
                yield passage
                passage, size = "", 0
            passage += sentence if not passage else f" {sentence}" if number else f"\n{sentence}"
            size += words
        if size >= PASSAGE_WORDS[0]:
            yield passage
            passage, size = "", 0
    if size >= SHORTEST_PASSAGE:
        yield passage
