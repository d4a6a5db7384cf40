"""Vectors → rankings → scores. Rankings are exhaustive, ties are broken as trec_eval does, scores are ir_measures'."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from src.embed.beir import Retrieval
from src.files import write_atomically

DEPTH = 100  # documents of a ranking, the most that a metric reads
METRICS = ("nDCG@10", "R@10", "R@100", "RR@10")
Run = dict[str, dict[str, float]]  # query → document → score


class Ranking:
    """Ranks the documents of `retrieval`. A query does not find the document with its own _id (ArguAna); of equal
    scores, the last _id comes first, as trec_eval sorts them."""

    def __init__(self, retrieval: Retrieval):
        self.names = list(retrieval.documents)
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self.by_name = sorted(range(len(self.names)), key=lambda number: self.names[number].encode(), reverse=True)
        self.places = torch.empty(len(self.names), dtype=torch.long)  # by which ties are broken: 0 for the last _id
        self.places[torch.tensor(self.by_name)] = torch.arange(len(self.names))

    def run(self, queries: Sequence[str], blocks: Iterable[Tensor], depth: int = DEPTH) -> Run:
        """Return the documents with the highest scores for each query. `blocks` are the scores of consecutive
        documents, (queries, documents of the block), in the order of `retrieval`; −∞ is not retrieved."""
        own = torch.tensor([self.numbers.get(query, -1) for query in queries])
        best, start = torch.empty(len(queries), 0, dtype=torch.long), 0
        for block in blocks:
            scores = block.float().cpu()
            inside = (own >= start) & (own < start + scores.shape[1])
            scores[inside.nonzero().squeeze(1), own[inside] - start] = -torch.inf
            keys = _sortable(scores, self.places[start : start + scores.shape[1]])
            merged = torch.cat([best, keys], 1)
            best = merged.topk(min(depth, merged.shape[1])).values
            start += scores.shape[1]
        run: Run = {}
        for query, row in zip(queries, best):
            names = (self.names[self.by_name[place]] for place in _place_of(row).tolist())
            run[query] = {name: score for name, score in zip(names, _score_of(row).tolist()) if score > -torch.inf}
        return run


def rank(retrieval: Retrieval, blocks: Iterable[Tensor], depth: int = DEPTH) -> Run:
    """Return the ranking of each query; `blocks` are those of `Ranking.run`, for all queries."""
    return Ranking(retrieval).run(list(retrieval.queries), blocks, depth)


def _sortable(scores: Tensor, places: Tensor) -> Tensor:
    """Integers in the order of (score, −place). Those of floats have the order of their bits, but for the sign."""
    bits = (scores + 0.0).view(torch.int32)  # −0 becomes 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (0xFFFFFFFF - places)


def _score_of(keys: Tensor) -> Tensor:
    ordered = (keys >> 32).int()
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _place_of(keys: Tensor) -> Tensor:
    return 0xFFFFFFFF - (keys & 0xFFFFFFFF)


def cosines(queries: Tensor, documents: Tensor, owners: Tensor | None = None, block: int = 8192) -> Iterator[Tensor]:
    """Yield the scores of blocks of documents, given unit vectors, (queries, D) and (documents, D). With `owners`,
    (vectors,), the document of each vector in ascending order, a document's score is that of its best vector."""
    if owners is None:
        yield from (queries @ part.T for part in documents.split(block))
        return
    count = int(owners[-1]) + 1
    bounds = torch.searchsorted(owners, torch.arange(0, count + block, block).clamp(max=count))
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
        if start < stop:
            own = owners[start:stop] - owners[start]
            best = torch.full((len(queries), int(own[-1]) + 1), -torch.inf)
            yield best.scatter_reduce_(
                1, own.expand(len(queries), -1), (queries @ documents[start:stop].T).float(), "amax"
            )


def measure(retrieval: Retrieval, run: Run) -> dict[str, dict[str, float]]:
    """Return metric → query → value, in the order of the queries; 0 for a query that finds nothing."""
    import ir_measures

    measures = {str(measure): measure for measure in map(ir_measures.parse_measure, METRICS)}
    values = {name: dict.fromkeys(retrieval.queries, 0.0) for name in METRICS}
    for found in ir_measures.iter_calc(list(measures.values()), retrieval.judged, run):
        values[str(found.measure)][found.query_id] = found.value
    return values


def means(values: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(each.values()) / len(each) for name, each in values.items()}


def write_run(path: Path, run: Run, tag: str) -> None:
    """Write a run in TREC's format. Raises OSError."""
    lines = []
    for query, found in run.items():
        ordered: Sequence = sorted(found.items(), key=lambda item: (item[1], item[0].encode()), reverse=True)
        lines += [f"{query} Q0 {name} {place} {score:.9g} {tag}\n" for place, (name, score) in enumerate(ordered, 1)]
    write_atomically(path, "".join(lines))
