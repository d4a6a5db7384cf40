"""The demo's search: pairs to train text embeddings on, and queries and documents to evaluate them on.

The first sentence of a passage is a query, and the rest of the passage is the document to find. Training pairs come
from the passages that the model is pretrained on; the evaluation set, a BEIR folder, from the validation passages.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from src.cli import log
from src.demo.tasks import IsValidation, read_passages
from src.embed.beir import CORPUS, QRELS, QUERIES
from src.errors import UserError
from src.files import write_atomically

PAIRS, PASSAGES, JUDGED = "pairs.jsonl", "passages.jsonl", "qrels/test.tsv"
FILES = (PAIRS, PASSAGES, QUERIES, CORPUS, JUDGED)
SHORTEST = 6  # words of a query, and of a document
QUESTIONS = (  # chosen for what validation passages mention, not for the answers
    "How do I compute the inverse of a matrix?",
    "How do I find the shortest path between two nodes of a graph?",
    "How do I set the timeout of a request?",
)


def write_search(corpus: Path, out: Path, is_validation: IsValidation) -> None:
    """Write pairs.jsonl for training, a BEIR folder for evaluation, and passages.jsonl, the validation passages
    unabridged. The BEIR folder shares no sentence with training passages, and no query is part of a document.
    Raises UserError."""
    pairs, held_out, passages, trained = [], [], [], set()
    for text, sentences in read_passages(corpus):
        first, *others = (sentence for _, sentence in sentences)
        pair = first, " ".join(others)
        long = min(len(part.split()) for part in pair) >= SHORTEST
        if is_validation(text):
            passages.append({"text": text, "source": sentences[0][0]})
            held_out += [(pair, {first, *others})] * long
        else:
            trained.update([first, *others])
            pairs += [{"query": pair[0], "document": pair[1]}] * long
    new = [pair for pair, sentences in held_out if not sentences & trained]
    documents = "\n".join(document for _, document in new)
    judged = [(query, document) for query, document in new if query not in documents]
    if not (pairs and judged):
        raise UserError(f"{corpus}: the corpus gives no pairs of sentences for training and evaluation; add text")
    (out / JUDGED).parent.mkdir(parents=True, exist_ok=True)
    write_rows(out / PAIRS, pairs)
    write_rows(out / PASSAGES, passages)
    write_rows(out / QUERIES, ({"_id": f"query-{n}", "text": query} for n, (query, _) in enumerate(judged)))
    write_rows(out / CORPUS, ({"_id": f"text-{n}", "text": text} for n, (_, text) in enumerate(judged)))
    lines = [QRELS, *((f"query-{n}", f"text-{n}", "1") for n in range(len(judged)))]
    write_atomically(out / JUDGED, "".join("\t".join(line) + "\n" for line in lines))
    log.info(f"{out}: {len(pairs):,} training pairs, {len(judged):,} queries, each with one relevant document")


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def scores(report: Path) -> list[list[str]]:
    """Return the lines of a table of what `embed.py evaluate` has written."""
    results = json.loads(report.read_text())["results"]
    lines = [["search", "nDCG@10", "R@10"]]
    for model, (found,) in ((model, found.values()) for model, found in results.items()):
        lines.append([model, *(f"{100 * found['scores'][metric]:.2f}" for metric in lines[0][1:])])
    return lines
