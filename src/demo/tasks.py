"""Two labelled tasks made from the demo's corpus, in the file layout of the official GLUE download.

- `WordOrder/`, CoLA's layout: does a sentence stand in its own word order (1), or were some neighbouring words exchanged (0)?
- `NextSentence/`, RTE's layout: does the second sentence follow the first in the text (entailment, not_entailment)?

A bag of words cannot solve the first, and of the second it sees only how many words the two sentences share.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from src.cli import UserError, log
from src.demo.corpus import atomic_writer, split_sentences

SENTENCE_WORDS = range(6, 31)


class Document(NamedTuple):
    """A passage of the corpus: its source file, and its paragraphs as lists of sentences."""

    source: str
    paragraphs: list[list[str]]


class Pair(NamedTuple):
    """Two sentences of one source, the second right after the first."""

    source: str
    first: str
    second: str


def write_tasks(
    corpus: Path,
    out: Path,
    is_validation: Callable[[str], bool],
    *,
    train_examples: int = 8000,
    dev_examples: int = 1000,
    swaps: int = 2,
    same_source: bool = False,
    seed: int = 17,
) -> None:
    """Write WordOrder/ and NextSentence/, a train.tsv and a dev.tsv each, below `out`; labels are exactly balanced.

    `dev.tsv` is made of the passages for whose text `is_validation` holds, `train.tsv` of the others. No sentence occurs
    twice in a task, in whatever order of its words. `swaps` is the number of exchanges that scramble a sentence (fewer is
    harder); `same_source` takes the wrong second sentences from the first's own source file (harder). A corpus too small
    for the sizes asked for is a UserError.
    """
    sizes = {"train": train_examples, "dev": dev_examples}
    if odd := [f"{split}_examples={size}" for split, size in sizes.items() if size < 2 or size % 2]:
        raise UserError(f"{odd[0]}: two labels in balance need an even number of examples, 2 or more")
    documents = read_documents(corpus, is_validation)
    for task, examples, header in (
        ("WordOrder", lambda *given: word_order_examples(*given, swaps), None),
        ("NextSentence", lambda *given: next_sentence_examples(*given, same_source), "sentence1\tsentence2\tlabel"),
    ):
        rng, seen = random.Random(f"{task} {seed}"), set()
        for split, size in sizes.items():
            rng.shuffle(documents[split])
            rows = balanced(examples(documents[split], seen, rng), size, f"{corpus}: {task}/{split}.tsv")
            rng.shuffle(rows)
            if header:
                rows = [f"{index}\t{row}" for index, row in enumerate(rows)]
            with atomic_writer(out / task / f"{split}.tsv") as file:
                file.writelines(f"{row}\n" for row in ([f"index\t{header}"] if header else []) + rows)
            log.info(f"{out / task / split}.tsv: {size:,} examples")


def read_documents(corpus: Path, is_validation: Callable[[str], bool]) -> dict[str, list[Document]]:
    """The passages of a corpus, by the split they belong to."""
    documents: dict[str, list[Document]] = {"train": [], "dev": []}
    try:
        lines = corpus.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{corpus}: cannot read the corpus ({error.strerror}); build it first") from None
    for row in map(json.loads, lines):
        paragraphs = [split_sentences(line) for line in row["text"].split("\n")]
        documents["dev" if is_validation(row["text"]) else "train"].append(Document(row["source"], paragraphs))
    return documents


def balanced(examples: Iterable[tuple[int, str]], size: int, name: str) -> list[str]:
    """The first rows of (label, row) examples that make `size` of them, half with label 1 and half with label 0."""
    rows: dict[int, list[str]] = {1: [], 0: []}
    for label, row in examples:
        if len(rows[label]) < size // 2:
            rows[label].append(row)
        if len(rows[0]) + len(rows[1]) == size:
            return rows[1] + rows[0]
    most = 2 * min(map(len, rows.values()))
    raise UserError(f"{name}: the corpus gives {most:,} examples, not {size:,}; ask for fewer, or give more text")


def word_order_examples(
    documents: list[Document], seen: set[str], rng: random.Random, swaps: int
) -> Iterator[tuple[int, str]]:
    """(label, row) in CoLA's columns: source, label, the author's mark, sentence. Every other sentence is scrambled."""
    label = 1
    for source, paragraphs in documents:
        for sentence in (sentence for paragraph in paragraphs for sentence in paragraph):
            # Scrambled or not, a sentence must be one that can be: else the kind of sentence would tell the label.
            scrambled = scramble(sentence, swaps, rng)
            if scrambled and claim([sentence], seen):
                yield label, f"{source}\t1\t\t{sentence}" if label else f"{source}\t0\t*\t{scrambled}"
                label = 1 - label


def scramble(sentence: str, swaps: int, rng: random.Random) -> str | None:
    """A sentence with `swaps` disjoint pairs of neighbouring words exchanged; None if that many were not found in it.

    Only plain lower-case words move, so the first word's capital, the commas and the full stop stay where they were.
    """
    words = sentence.split()
    plain = [word.isalpha() and word.islower() for word in words]
    places = [i for i in range(1, len(words) - 1) if plain[i] and plain[i + 1] and words[i] != words[i + 1]]
    rng.shuffle(places)
    chosen: list[int] = []
    for place in places:
        if all(abs(place - other) > 1 for other in chosen):
            chosen.append(place)
    for place in chosen[:swaps]:
        words[place], words[place + 1] = words[place + 1], words[place]
    return " ".join(words) if len(chosen) >= swaps else None


def next_sentence_examples(
    documents: list[Document], seen: set[str], rng: random.Random, same_source: bool
) -> Iterator[tuple[int, str]]:
    """(label, row) in RTE's columns but the index: sentence1, sentence2, label.

    Pairs are taken two by two; every other couple exchanges its second sentences. So the sentences of both labels are of
    one kind, and each stands in one pair.
    """
    pairs = [pair for document in documents for pair in neighbours(document) if claim(pair[1:], seen)]
    rng.shuffle(pairs)
    if same_source:
        pairs.sort(key=lambda pair: pair.source)  # stable: within a source the order stays random
    couples = []
    while len(pairs) > 1:
        one, other = pairs.pop(), pairs[-1]
        if (one.source == other.source) == same_source:
            couples.append((one, pairs.pop()))
    rng.shuffle(couples)
    for number, (one, other) in enumerate(couples):
        label, name = (1, "entailment") if number % 2 else (0, "not_entailment")
        seconds = (one.second, other.second) if label else (other.second, one.second)
        yield label, f"{one.first}\t{seconds[0]}\t{name}"
        yield label, f"{other.first}\t{seconds[1]}\t{name}"


def neighbours(document: Document) -> Iterator[Pair]:
    """The sentences of each paragraph, two by two."""
    for paragraph in document.paragraphs:
        for first, second in zip(paragraph[::2], paragraph[1::2]):
            yield Pair(document.source, first, second)


def claim(sentences: Iterable[str], seen: set[str]) -> bool:
    """Whether the sentences are of a good length and none is `seen`, whatever the order of its words; then they are."""
    keys = set()
    for sentence in sentences:
        if len(sentence.split()) in SENTENCE_WORDS:
            keys.add(" ".join(sorted(re.findall(r"\w+", sentence.lower()))))
    if len(keys) < len(tuple(sentences)) or keys & seen:
        return False
    seen |= keys
    return True
