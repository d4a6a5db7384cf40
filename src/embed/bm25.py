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


def bm25(retrieval: Retrieval) -> Iterator[Tensor]:
    """Yield the scores of all documents, (queries, documents), as one block; −∞ for one without a word of the query."""
    from bm25s import BM25

    logging.getLogger("bm25s").setLevel(logging.WARNING)
    corpus = [words(text[first:last]) for text, (first, last) in zip(retrieval.documents.values(), retrieval.spans())]
    queries = [words(text) for text in retrieval.queries.values()]
    scores = torch.full((len(queries), len(corpus)), -torch.inf)
    if any(corpus):
        index = BM25(method="lucene", k1=1.2, b=0.75)
        index.index(corpus, show_progress=False)
        for row, query in zip(scores, progress(queries, desc=f"bm25: {retrieval.name}", unit="query")):
            known = [word for word in query if word in index.vocab_dict]
            if known:
                row.copy_(torch.from_numpy(index.get_scores(known)))
        scores[scores <= 0] = -torch.inf
    yield scores
