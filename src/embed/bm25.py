"""BM25, the baseline that reads words alone (Robertson & Zaragoza 2009; Lucene's variant, k1 = 1.2, b = 0.75)."""

import logging
import re
from collections.abc import Iterator

import torch
from torch import Tensor

from src.cli import progress
from src.embed.beir import Retrieval

WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def bm25(retrieval: Retrieval) -> Iterator[tuple[str, Tensor]]:
    """Yield each query's _id, and the scores of all documents, (1, documents); −∞ for one without a word of the
    query."""
    from bm25s import BM25

    logging.getLogger("bm25s").setLevel(logging.WARNING)
    texts = zip(retrieval.documents.values(), retrieval.spans())
    corpus = [words(text[slice(*(span or (None,)))]) for text, span in texts]
    index = BM25(method="lucene", k1=1.2, b=0.75)
    if any(corpus):
        index.index(corpus, show_progress=False)
    for name, text in progress(retrieval.queries.items(), desc=f"bm25: {retrieval.name}", unit="query"):
        known = [word for word in words(text) if any(corpus) and word in index.vocab_dict]
        scores = torch.from_numpy(index.get_scores(known)) if known else torch.zeros(len(corpus))
        yield name, scores.masked_fill(scores <= 0, -torch.inf)[None]
