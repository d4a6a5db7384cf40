"""Retrieval data in BEIR's layout (Thakur et al., arXiv:2104.08663): corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv. A
line of corpus.jsonl may also have a `passage`, [first, last], the characters of its text that are to be found."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from src.cli import log
from src.data.readers import joined, read_rows
from src.embed.passages import Span
from src.errors import UserError

CORPUS, QUERIES = "corpus.jsonl", "queries.jsonl"
QRELS = ("query-id", "corpus-id", "score")
REPEATED = "that repeat another"


@dataclass
class Retrieval:
    """Queries and the documents to find. Texts by _id, in the order of their files."""

    name: str
    documents: dict[str, str]  # title and text, joined by a space
    queries: dict[str, str]  # those with a relevant document
    judged: dict[str, dict[str, int]]  # query → document → grade; relevant if above 0
    left_out: int  # queries without a relevant document
    passages: dict[str, Span] = field(default_factory=dict)  # documents of which a passage is meant, in characters
    skipped: int = 0  # judgements of documents or queries that are not there

    def spans(self) -> list[Span | None]:
        """The characters of each document that are meant; None: all."""
        return [self.passages.get(name) for name in self.documents]


def read_beir(folder: Path, split: str, key: str = "--data") -> Retrieval:
    """Read a folder. `key` is what the user set. Raises UserError, with file and line. Judgements of texts that are not
    there, as after sampling a corpus, are skipped with a warning."""
    qrels = folder / "qrels" / f"{split}.tsv"
    if not folder.is_dir():
        raise UserError(f"{key}: {folder} is not a folder; give one with {CORPUS}, {QUERIES} and qrels/{split}.tsv")
    for path in (folder / CORPUS, folder / QUERIES, qrels):
        if not path.is_file():
            splits = ", ".join(sorted(found.stem for found in folder.glob("qrels/*.tsv")))
            hint = f"its splits are {splits}; choose one with --split" if path == qrels and splits else "add it"
            raise UserError(f"{key}: {folder} has no {path.relative_to(folder)}; {hint}")
    documents, passages = _texts(folder / CORPUS, titles=True)
    queries, _ = _texts(folder / QUERIES)
    judged, skipped = _judgements(qrels, queries, documents)
    answered = {query for query, grades in judged.items() if any(grade > 0 for grade in grades.values())}
    if not answered:
        found = f"no query has a relevant document in {CORPUS}, with a score above 0"
        raise UserError(f"{qrels}: {found}; give another --split, or the corpus of these judgements")
    kept = {name: text for name, text in queries.items() if name in answered}
    grades = {name: judged[name] for name in kept}
    return Retrieval(folder.resolve().name, documents, kept, grades, len(queries) - len(kept), passages, skipped)


def _judgements(
    qrels: Path, queries: dict[str, str], documents: dict[str, str]
) -> tuple[dict[str, dict[str, int]], int]:
    """Return grades by query and document, and how many are skipped since their texts are missing. Raises UserError."""
    judged: dict[str, dict[str, int]] = {}
    skipped, firsts = Counter(), {}  # by kind
    for number, (query, document, grade) in read_rows(qrels, QRELS):
        where = f"{qrels}, line {number}"
        if not re.fullmatch(r"[+-]?\d+(\.0*)?", grade.strip()):  # some write 1.0
            raise UserError(f"{where}: the score {grade} is not an integer; fix the line")
        value, kind, of = int(float(grade)), "", judged.get(query, {})
        if query not in queries:
            kind = f"of queries without a text in {QUERIES}"
        elif document not in documents:
            kind = f"of documents that are not in {CORPUS}"
        elif of.get(document, value) != value:
            raise UserError(f"{where}: {query} and {document} are judged twice, {of[document]} and {value}; remove one")
        elif document in of:
            kind = REPEATED
        else:
            judged.setdefault(query, {})[document] = value
        if kind:
            skipped[kind] += 1
            firsts.setdefault(kind, f"line {number}: {query} {document}")
    missing = skipped.total() - skipped[REPEATED]
    if skipped:
        found = ", ".join(f"{count:,} {kind} (first {firsts[kind]})" for kind, count in skipped.items())
        effect = "not comparable with those on all texts" if missing else "the same"
        log.warning(f"{qrels}: judgements skipped: {found}; scores are {effect}")
    return judged, missing


def _texts(path: Path, titles: bool = False) -> tuple[dict[str, str], dict[str, Span]]:
    """Return texts by _id, with their titles, and the passages in them."""
    texts: dict[str, str] = {}
    passages: dict[str, Span] = {}
    optional = ("title", "passage") if titles else ()
    for number, (name, text, *others) in read_rows(path, ("_id", "text"), optional=optional):
        title, passage = others[:1], others[1:]
        where = f"{path}, line {number}"
        if isinstance(name, int) and not isinstance(name, bool):
            name = str(name)
        if not isinstance(name, str) or not name:
            raise UserError(f"{where}: the _id must be a string that is not empty; fix the line")
        if len(name.split()) != 1:
            raise UserError(f"{where}: the _id {name!r} has a space in it, which qrels and runs cannot; rename it")
        if name in texts:
            raise UserError(f"{where}: another line has the _id {name} too; remove or rename one")
        for kind, value in (("text", text), ("title", title[0] if title else "")):
            if not isinstance(value, str | None):
                raise UserError(f"{where}: the {kind} is a {type(value).__name__}, not a string; fix the line")
        whole = joined((*title, text))
        if not titles and not whole:
            continue  # a query that cannot be asked
        texts[name] = whole
        if passage and passage[0] is not None:
            text = text or ""
            first, last = check_passage(passage[0], text, where)
            start, stop = len(text) - len(text.lstrip()), len(text.rstrip())
            moved = len(texts[name]) - stop
            passages[name] = (max(first, start) + moved, min(last, stop) + moved)
    if not texts:
        raise UserError(f"{path} is empty; give another folder")
    return texts, passages


def check_passage(given: Any, text: str, where: str) -> Span:
    """Return a passage, [first, last] in the characters of a text. Raises UserError unless it is one."""
    try:
        first, last = map(int, given)
    except (TypeError, ValueError):
        raise UserError(f"{where}: the passage is not two numbers, first and last; fix or remove the line") from None
    if not 0 <= first < last <= len(text) or not text[first:last].strip():
        found = f"the passage, characters {first} to {last}, is not a part of the text, which has {len(text):,}"
        raise UserError(f"{where}: {found}; fix or remove the line")
    return first, last
