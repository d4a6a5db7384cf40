"""Two labelled tasks made from the demo's corpus, in the file layout of the official GLUE download.

- `WordOrder/`, CoLA's layout: does a sentence stand in its own word order (1), or have its words changed places (0)?
- `Continuation/`, RTE's layout: does the second text follow the first (entailment), or is it out of another file
  (not_entailment)? The texts are the halves of sentences: what fits is told by grammar and sense.

A bag of words can solve neither.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from src.cli import log
from src.demo.corpus import atomic_writer, split_sentences
from src.errors import UserError

MOVED_WORDS = 4  # at least, in a scrambled sentence
SENTENCE_WORDS = range(6, 21)  # of WordOrder
HALVED_WORDS = range(8, 23)  # of Continuation, before they are halved


class Document(NamedTuple):
    """A passage of the corpus: its source file, and its paragraphs as lists of sentences."""

    source: str
    paragraphs: list[list[str]]


class Pair(NamedTuple):
    """The halves of a sentence."""

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
    seed: int = 17,
) -> None:
    """Write WordOrder/ and Continuation/, a train.tsv and a dev.tsv each, below `out`; labels are exactly balanced.

    `dev.tsv` is made of the passages for whose text `is_validation` holds, `train.tsv` of the others. No sentence occurs
    twice in a task, in whatever order of its words. A corpus too small for the sizes asked for is a UserError.
    """
    sizes = {"train": train_examples, "dev": dev_examples}
    if odd := [f"{split}_examples={size}" for split, size in sizes.items() if size < 2 or size % 2]:
        raise UserError(f"{odd[0]}: two labels in balance need an even number of examples, 2 or more")
    documents = read_documents(corpus, is_validation)
    for task, examples, header in (
        ("WordOrder", word_order_examples, None),
        ("Continuation", continuation_examples, "sentence1\tsentence2\tlabel"),
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


def word_order_examples(documents: list[Document], seen: set[str], rng: random.Random) -> Iterator[tuple[int, str]]:
    """(label, row) in CoLA's columns: source, label, the author's mark, sentence. Every other sentence is scrambled."""
    label = 1
    for source, paragraphs in documents:
        for sentence in (sentence for paragraph in paragraphs for sentence in paragraph):
            # Scrambled or not, a sentence must be one that can be: else the kind of sentence would tell the label.
            scrambled = scramble(sentence, rng)
            if scrambled and claim(sentence, SENTENCE_WORDS, seen):
                yield label, f"{source}\t1\t\t{sentence}" if label else f"{source}\t0\t*\t{scrambled}"
                label = 1 - label


def scramble(sentence: str, rng: random.Random) -> str | None:
    """A sentence with its plain lower-case words in another order, no word where it was; None if few could move.

    The first word with its capital, the last, and what carries a comma or a digit stay: else a glance would tell.
    """
    words = sentence.split()
    places = [i for i in range(1, len(words) - 1) if words[i].isalpha() and words[i].islower()]
    if len(places) < MOVED_WORDS:
        return None
    rng.shuffle(places)
    scrambled = words[:]
    for place, other in zip(places, places[1:] + places[:1]):  # around one circle, so that each moves
        scrambled[place] = words[other]
    return None if scrambled == words else " ".join(scrambled)


def continuation_examples(documents: list[Document], seen: set[str], rng: random.Random) -> Iterator[tuple[int, str]]:
    """(label, row) in RTE's columns but the index: sentence1, sentence2, label.

    Sentences are taken two by two, from different sources and of one length; every other couple exchanges its second
    halves. So the halves of both labels are of one kind, and each stands in one pair.
    """
    halves = [half for document in documents for half in halve(document, seen)]
    rng.shuffle(halves)
    halves.sort(key=lambda half: len(f"{half.first} {half.second}".split()))  # stable: else the order stays random
    couples = []
    while len(halves) > 1:
        one, other = halves.pop(), halves[-1]
        if one.source != other.source:
            couples.append((one, halves.pop()))
    rng.shuffle(couples)
    for number, (one, other) in enumerate(couples):
        label, name = (1, "entailment") if number % 2 else (0, "not_entailment")
        seconds = (one.second, other.second) if label else (other.second, one.second)
        yield label, f"{one.first}\t{seconds[0]}\t{name}"
        yield label, f"{other.first}\t{seconds[1]}\t{name}"


def halve(document: Document, seen: set[str]) -> Iterator[Pair]:
    """The halves of each sentence of a passage that is not yet `seen`."""
    for sentence in (sentence for paragraph in document.paragraphs for sentence in paragraph):
        if claim(sentence, HALVED_WORDS, seen):
            words = sentence.split()
            middle = len(words) // 2
            yield Pair(document.source, " ".join(words[:middle]), " ".join(words[middle:]))


def claim(sentence: str, lengths: range, seen: set[str]) -> bool:
    """Whether a sentence is of a good length and is not `seen`, whatever the order of its words; then it is."""
    key = " ".join(sorted(re.findall(r"\w+", sentence.lower())))
    if len(sentence.split()) not in lengths or key in seen:
        return False
    seen.add(key)
    return True
