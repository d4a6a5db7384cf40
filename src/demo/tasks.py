"""Two labelled tasks made from the demo's corpus, in the file layout of the official GLUE download.

- `WordOrder/`, CoLA's layout: is a sentence in its original word order (1), or were its words permuted (0)?
- `Continuation/`, RTE's layout: does the second text follow the first (entailment), or come from another file
  (not_entailment)? The texts are halves of sentences. A bag of words cannot solve either.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from src.cli import log
from src.demo.corpus import split_sentences
from src.errors import UserError, reason
from src.files import write_atomically

MOVED_WORDS = 4  # at least, in a permuted sentence
SENTENCE_WORDS = range(6, 21)  # of WordOrder
HALVED_WORDS = range(8, 23)  # of Continuation, before halving
Sentence = tuple[str, str]  # source file, text
IsValidation = Callable[[str], bool]  # of a passage's text


TASKS = {"WordOrder": "", "Continuation": "index\tsentence1\tsentence2\tlabel\n"}  # task → header line of its files


def write_tasks(
    corpus: Path, out: Path, is_validation: IsValidation, train_examples: int, dev_examples: int, seed: int = 17
) -> None:
    """Write train.tsv and dev.tsv of each task below `out`, with balanced labels. Passages whose text satisfies
    `is_validation` go to dev.tsv, the others to train.tsv. No sentence occurs twice in a task, in any word order."""
    sizes = {"train": train_examples, "dev": dev_examples}
    if odd := [f"{split}_examples={size}" for split, size in sizes.items() if size < 2 or size % 2]:
        raise UserError(f"{odd[0]} must be even and at least 2, for two balanced labels")
    passages: dict[str, list[list[Sentence]]] = {"train": [], "dev": []}
    for text, sentences in read_passages(corpus):
        passages["dev" if is_validation(text) else "train"].append(sentences)
    for (task, header), examples in zip(TASKS.items(), (word_order_examples, continuation_examples)):
        rng, seen = random.Random(f"{task} {seed}"), set()
        for split, size in sizes.items():
            rng.shuffle(passages[split])
            sentences = [sentence for passage in passages[split] for sentence in passage]
            rows = balanced(examples(sentences, seen, rng), size, f"{corpus}: {task}/{split}.tsv")
            rng.shuffle(rows)
            lines = (f"{index}\t{row}\n" if header else f"{row}\n" for index, row in enumerate(rows))
            path = out / task / f"{split}.tsv"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, header + "".join(lines))
            log.info(f"{path}: {size:,} examples")


def read_passages(corpus: Path) -> Iterator[tuple[str, list[Sentence]]]:
    """Yield the text and the sentences of each passage."""
    try:
        lines = corpus.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{corpus}: cannot read the corpus ({reason(error)}); build it first") from None
    for row in map(json.loads, lines):
        sentences = (sentence for line in row["text"].split("\n") for sentence in split_sentences(line))
        yield row["text"], [(row["source"], sentence) for sentence in sentences]


def masked_sentences(corpus: Path, vocabulary: Path, is_validation: IsValidation) -> tuple[list[str], list[str]]:
    """Return three validation sentences with a word of the vocabulary masked, and the words. A hash chooses both."""
    known = set(vocabulary.read_text(encoding="utf-8").split("\n"))
    passages = [(text, first) for text, ((_, first), *_) in read_passages(corpus) if is_validation(text)]
    sentences, hidden = [], []
    for digest, sentence in sorted((hashlib.sha256(text.encode()).hexdigest(), first) for text, first in passages):
        words = sentence.split()
        plain = [i for i, word in enumerate(words) if re.fullmatch(r"[a-z]{4,}", word) and word in known]
        if 8 <= len(words) <= 18 and plain:
            place = plain[int(digest, 16) % len(plain)]
            hidden.append(words[place])
            sentences.append(" ".join([*words[:place], "[MASK]", *words[place + 1 :]]))
    return sentences[:3], hidden[:3]


def balanced(examples: Iterable[tuple[int, str]], size: int, name: str) -> list[str]:
    """Return the first `size` rows of (label, row) examples, half with label 1 and half with label 0."""
    rows: dict[int, list[str]] = {1: [], 0: []}
    for label, row in examples:
        if len(rows[label]) < size // 2:
            rows[label].append(row)
        if len(rows[0]) + len(rows[1]) == size:
            return rows[1] + rows[0]
    most = 2 * min(map(len, rows.values()))
    raise UserError(f"{name}: the corpus gives {most:,} examples, not {size:,}; request fewer or add text")


def word_order_examples(sentences: list[Sentence], seen: set[str], rng: random.Random) -> Iterator[tuple[int, str]]:
    """Yield (label, row) in CoLA's columns: source, label, the author's mark, sentence. Every other one is permuted."""
    label = 1
    for source, sentence in sentences:
        # Every sentence, even an unpermuted one, must be one that can be permuted: others would reveal the label.
        permuted = permute(sentence, rng)
        if permuted and claim(sentence, SENTENCE_WORDS, seen):
            yield label, f"{source}\t1\t\t{sentence}" if label else f"{source}\t0\t*\t{permuted}"
            label = 1 - label


def permute(sentence: str, rng: random.Random) -> str | None:
    """Move every plain lower-case word of a sentence to the position of another; None if too few can move. The first
    word with its capital, the last, and words with a comma or a digit stay: they would reveal the label."""
    words = sentence.split()
    places = [i for i in range(1, len(words) - 1) if words[i].isalpha() and words[i].islower()]
    if len(places) < MOVED_WORDS:
        return None
    rng.shuffle(places)
    permuted = words[:]
    for place, other in zip(places, places[1:] + places[:1]):  # one cycle, so that each word moves
        permuted[place] = words[other]
    return None if permuted == words else " ".join(permuted)


def continuation_examples(sentences: list[Sentence], seen: set[str], rng: random.Random) -> Iterator[tuple[int, str]]:
    """Yield (label, row) in RTE's columns without the index: sentence1, sentence2, label. Sentences from different
    sources and of nearly equal length are paired; every other pair swaps its second halves. So each half occurs
    once, and both labels have halves of the same kind."""
    halves = []
    for source, sentence in sentences:
        if claim(sentence, HALVED_WORDS, seen):
            words = sentence.split()
            middle = len(words) // 2
            halves.append((len(words), source, " ".join(words[:middle]), " ".join(words[middle:])))
    rng.shuffle(halves)
    halves.sort(key=lambda half: half[0])  # stable: the order remains random
    pairs = []
    while len(halves) > 1:
        one, other = halves.pop(), halves[-1]
        if one[1] != other[1]:
            pairs.append((one, halves.pop()))
    rng.shuffle(pairs)
    for number, ((*_, first, second), (*_, other_first, other_second)) in enumerate(pairs):
        label, name = (1, "entailment") if number % 2 else (0, "not_entailment")
        if not label:
            second, other_second = other_second, second
        yield label, f"{first}\t{second}\t{name}"
        yield label, f"{other_first}\t{other_second}\t{name}"


def claim(sentence: str, lengths: range, seen: set[str]) -> bool:
    """Whether a sentence has a suitable number of words and is not in `seen` in any word order; then add it."""
    key = " ".join(sorted(re.findall(r"\w+", sentence.lower())))
    if len(sentence.split()) not in lengths or key in seen:
        return False
    seen.add(key)
    return True
