"""The contrastive loss of queries and documents (InfoNCE, van den Oord et al., arXiv:1807.03748). Shape letters: B
queries, N documents, of which the first B are the queries' own, P positives of all queries, D size of a vector."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

AT_ONCE = 1024  # positives that are looked for among the keys


def false_negatives(keys: Tensor, positives: Tensor, queries: int) -> Tensor:
    """Return which documents must not count against a query, (B, N): those other than its own that have the text of its
    own, or of another of its positives, or the tokens of its own.

    Args:
        keys: (N, 2), numbers of the documents' texts, and of their tokens as they are read.
        positives: (P, 2), a query, from 0, and the number of a text that is a positive of it.
        queries: B.
    """
    texts, read = keys.unbind(1)
    found = (texts[:queries, None] == texts) | (read[:queries, None] == read)
    present = positives[torch.isin(positives[:, 1], texts)]  # most of a query's positives are not in the batch
    for of_some in present.split(AT_ONCE):
        rows, columns = (of_some[:, 1:] == texts).nonzero(as_tuple=True)
        found[of_some[rows, 0], columns] = True
    found.fill_diagonal_(False)
    return found


def contrastive_loss(
    queries: Tensor,
    documents: Tensor,
    excluded: Tensor,
    temperature: float,
    symmetric: bool = False,
    dims: Sequence[int] = (),
) -> Tensor:
    """Return ℓ = −1/B Σ_i log(exp(s_ii) / Σ_j exp(s_ij)), s_ij = q_i·d_j / temperature, without the excluded j.

    Args:
        queries, documents: (B, D) and (N, D), of unit length.
        excluded: (B, N), from `false_negatives`.
        symmetric: the mean with the same of queries for each of the B documents.
        dims: the mean of ℓ over the first m coordinates, of unit length again, for each m (Matryoshka
            representations, Kusupati et al., arXiv:2205.13147); none: all coordinates.
    """
    own = torch.arange(len(queries), device=queries.device)
    losses = []
    for m in dims or (queries.shape[1],):
        q, d = (F.normalize(x[:, :m], dim=-1) for x in (queries, documents))
        scores = (q @ d.T / temperature).masked_fill(excluded, -torch.inf)
        loss = F.cross_entropy(scores, own)
        if symmetric:
            loss = (loss + F.cross_entropy(scores[:, : len(own)].T, own)) / 2
        losses.append(loss)
    return torch.stack(losses).mean()
