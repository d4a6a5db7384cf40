"""Retrieval sets that measure how far a model carries information, as BEIR folders, one for each length, and pairs to
train on:

    python -m src.embed.synthetic passkey --tokenizer my-tokenizer --lengths 256 1024 4096 --out passkey
    python -m src.embed.synthetic header --tokenizer my-tokenizer --lengths 128 512 2048 --out header

passkey: a document is full of names, and one of them follows a marker. The query is that name. Does the document's
vector keep one word among thousands?

header: a document begins with a subject, and one passage of 16 tokens, anywhere further on, holds a key. The query is
subject and key, and the passages are what is retrieved. Several share each subject, and several each key, so a
passage's vector finds its query only if it knows the subject, too. A model that reads each passage alone is right for
one query in 8 (of 128 documents).

Every word is one token of the tokenizer, and all lengths and the pairs use the same words.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from src.cli import log, progress, run
from src.config import Rule, check_value
from src.data.tokenizers import check_path, load_tokenizer
from src.errors import UserError
from src.files import check_writable, write_atomically

NAMES, NAME_SHARE = 512, 0.25  # different names, and their share of a passkey document
SUBJECTS = KEYS = 16
PASSAGE = 16  # tokens
FILLERS = (16, 512)  # the fewest and the most other words: a model is to learn that they do not matter
SPECIAL = 2  # tokens of a document that are not words
DOCUMENTS = {"passkey": 64, "header": 128}
PAIR_LENGTHS = {"passkey": (64, 256), "header": (128, 128)}


class Made(NamedTuple):
    """A document, its query, where the query's word is in it (from 0, the first token, to 1), and the characters of its
    passage, if only that is meant."""

    query: str
    document: str
    depth: float
    passage: tuple[int, int] | None


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        "python -m src.embed.synthetic", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("task", choices=list(DOCUMENTS))
    add("--tokenizer", required=True, help="folder or Hub name; its words are those of the texts")
    add("--lengths", type=int, nargs="+", required=True, help="tokens of the documents to evaluate on")
    add("--documents", type=int, help="per length, with one query each (default: 64 for passkey, 128 for header)")
    add("--pairs", type=int, default=16384, help="training pairs; 0: none (default: 16384)")
    words = "tokens of the pairs' documents, from shortest to longest (default: 64 256 for passkey, 128 128 for header)"
    add("--pair_lengths", type=int, nargs=2, metavar="N", help=words)
    add("--seed", type=int, default=0, help="seed of words and documents (default: 0)")
    add("--out", type=Path, required=True, help="folder for a BEIR folder TASK-LENGTH of each length, and pairs.jsonl")
    options = parser.parse_args(argv)
    for name, least in (("documents", 1), ("pairs", 0), ("seed", 0)):
        check_value(f"--{name}", getattr(options, name), int | None, Rule(at_least=least))
    pair_lengths = options.pair_lengths or PAIR_LENGTHS[options.task]
    least = SPECIAL + (1 + 3 * PASSAGE if options.task == "header" else 3)
    for name, lengths in (("lengths", options.lengths), ("pair_lengths", pair_lengths)):
        if min(lengths) < least:
            raise UserError(f"--{name}: {options.task} documents have at least {least} tokens (got {min(lengths)})")
    if pair_lengths[0] > pair_lengths[1]:
        raise UserError(f"--pair_lengths {pair_lengths[0]} {pair_lengths[1]}: give the shortest first")
    check_writable("--out", options.out)
    check_path(options.tokenizer, "--tokenizer")
    rng = np.random.default_rng(options.seed)
    maker = MAKERS[options.task](words_of(options.tokenizer, rng), options.documents or DOCUMENTS[options.task])
    for length in progress(options.lengths, desc="lengths"):
        write_beir(options.out / f"{options.task}-{length}", maker.documents(length, rng))
    print(f"\nto evaluate  {options.out}/{options.task}-*")
    if options.pairs:
        low, high = pair_lengths
        lengths = rng.integers(low, high + 1, options.pairs).tolist()
        pairs = (maker.pair(length, rng) for length in progress(lengths, desc="pairs"))
        rows = ({"query": made.query, "document": made.document, **of_passage(made)} for made in pairs)
        path, source = options.out / "pairs.jsonl", f"data.{options.task}"
        write_atomically(path, "".join(f"{json.dumps(row)}\n" for row in rows))
        columns = f" {source}.columns.passage=passage" if options.task == "header" else ""
        print(f"to train on  {source}.files={path}{columns}")


def of_passage(made: Made) -> dict[str, list[int]]:
    return {} if made.passage is None else {"passage": [*made.passage]}


def words_of(tokenizer_name: str, rng: np.random.Generator) -> np.ndarray:
    """Return the words that are one token each, in random order."""
    tokenizer = load_tokenizer(tokenizer_name)
    words = sorted(token for token in tokenizer.get_vocab() if re.fullmatch("[a-z]{2,}", token))
    pairs = [f"{word} {word}" for word in words]  # the first of a text, and one after a space
    ids = tokenizer(pairs, add_special_tokens=False)["input_ids"] if words else []
    found = [word for word, both in zip(words, ids) if len(both) == 2 and tokenizer.unk_token_id not in both]
    return rng.permutation(np.array(found, dtype=object))


class Passkey:
    def __init__(self, words: np.ndarray, count: int):
        names = min(NAMES, (len(words) - 1) // 2)
        if names < count or names < FILLERS[0]:
            raise UserError(
                f"--tokenizer has {len(words):,} words of one token, too few for {count:,} documents; "
                "choose one with a larger vocabulary, or lower --documents"
            )
        self.count, self.marker, self.names = count, words[0], words[1 : 1 + names]
        self.fillers = words[1 + names :][: FILLERS[1]]

    def documents(self, length: int, rng: np.random.Generator) -> Iterator[Made]:
        """Yield the documents of an evaluation, whose marked names differ."""
        for name in rng.choice(self.names, self.count, replace=False):
            yield self.make(name, length, rng)

    def pair(self, length: int, rng: np.random.Generator) -> Made:
        return self.make(rng.choice(self.names), length, rng)

    def make(self, name: str, length: int, rng: np.random.Generator) -> Made:
        size = length - SPECIAL
        chosen = rng.random(size) < NAME_SHARE
        words = np.where(chosen, rng.choice(self.names, size), rng.choice(self.fillers, size))
        at = int(rng.integers(size - 1))
        words[at], words[at + 1] = self.marker, name
        return Made(name, " ".join(words), (at + 1) / size, None)


class Header:
    def __init__(self, words: np.ndarray, count: int):
        if count % KEYS or count > SUBJECTS * KEYS:
            raise UserError(f"--documents {count} must be a multiple of {KEYS}, at most {SUBJECTS * KEYS}")
        if len(words) < (least := SUBJECTS + KEYS + FILLERS[0]):
            raise UserError(
                f"--tokenizer has {len(words):,} words of one token, and header needs {least}; "
                "choose one with a larger vocabulary"
            )
        self.count = count
        self.subjects, self.keys, others = np.split(words, [SUBJECTS, SUBJECTS + KEYS])
        self.fillers = others[: FILLERS[1]]

    def documents(self, length: int, rng: np.random.Generator) -> Iterator[Made]:
        """Yield the documents of an evaluation, one for each of some subjects and each key."""
        for subject in rng.choice(self.subjects, self.count // KEYS, replace=False):
            for key in self.keys:
                yield self.make(subject, key, length, rng)

    def pair(self, length: int, rng: np.random.Generator) -> Made:
        return self.make(rng.choice(self.subjects), rng.choice(self.keys), length, rng)

    def make(self, subject: str, key: str, length: int, rng: np.random.Generator) -> Made:
        size = length - SPECIAL
        words = rng.choice(self.fillers, size)
        start = PASSAGE * int(rng.integers(1, size // PASSAGE))
        at = start + int(rng.integers(PASSAGE))
        words[0], words[at] = subject, key
        first = len(" ".join(words[:start])) + 1
        passage = (first, first + len(" ".join(words[start : start + PASSAGE])))
        return Made(f"{subject} {key}", " ".join(words), at / size, passage)


MAKERS: dict[str, Callable] = {"passkey": Passkey, "header": Header}


def write_beir(folder: Path, documents: Iterator[Made]) -> None:
    """Write documents and their queries in BEIR's layout; a query's metadata has its depth."""
    corpus, queries, qrels = [], [], ["query-id\tcorpus-id\tscore\n"]
    for number, made in enumerate(documents):
        metadata = {"depth": round(made.depth, 6)}
        document = {"_id": f"d{number}", "title": "", "text": made.document, **of_passage(made)}
        corpus.append(json.dumps(document) + "\n")
        queries.append(json.dumps({"_id": f"q{number}", "text": made.query, "metadata": metadata}) + "\n")
        qrels.append(f"q{number}\td{number}\t1\n")
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name, lines in (("corpus.jsonl", corpus), ("queries.jsonl", queries), ("qrels/test.tsv", qrels)):
        write_atomically(folder / name, "".join(lines))
    log.info(f"{folder}: {len(corpus):,} documents")


if __name__ == "__main__":
    run(main)
