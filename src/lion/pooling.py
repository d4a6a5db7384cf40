"""Hidden states → one vector per text, or per span of a text. The pooling is the mean of a text's tokens, or their sum
weighted by a softmax over their scores. Sums are in float32 at least. Shape letters: B batch, L length, D hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

PIECE = 512  # tokens that one product sums, since its rounding errors grow with them


def pool(x: Tensor, tokens: Tensor, scores: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Pool the texts of rows, T at most in a row.

    Args:
        x: (B, L, D).
        tokens: (B, T, L), which tokens a text has; none, if its row has fewer than T.
        scores: (B, L); None: the mean of a text's tokens.
    Returns:
        vectors, (B, T, D), and the tokens' weights, (B, T, L), which sum to 1 over each text.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = torch.zeros(x.shape[:2], dtype=wide, device=x.device) if scores is None else scores.to(wide)
    logits = scores[:, None].masked_fill(~tokens, torch.finfo(wide).min)
    weights = logits.softmax(-1).masked_fill(~tokens, 0)
    if torch.compiler.is_compiling():  # a loop would be written out, for each number of pieces
        return (weights.double() @ x.double()).to(wide), weights
    parts = zip(weights.split(PIECE, -1), x.split(PIECE, 1))
    sums = [share @ part.to(wide) for share, part in parts]
    return (torch.stack(sums).sum(0) if len(sums) > 1 else sums[0]), weights


def pool_spans(x: Tensor, spans: Sequence[tuple[int, int]], scores: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Pool spans of one text, (L, D), which may overlap; x may be a memory map.

    Args:
        spans: (start, stop) of each, in tokens.
        scores: (L,), of the tokens; None: their mean.
    Returns:
        vectors, (spans, D), and weights, (spans,): the sum over spans that cover the text once, each vector times its
        weight, is the vector of the text.
    Raises ValueError for a span that is empty or outside the text.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = torch.zeros(len(x), dtype=wide, device="cpu") if scores is None else scores.to(wide).cpu()
    total = scores.double().logsumexp(0)
    vectors, weights = scores.new_empty(len(spans), x.shape[-1]), scores.new_empty(len(spans))
    for number, (start, stop) in enumerate(spans):
        if not 0 <= start < stop <= len(x):
            raise ValueError(f"span {number}, ({start}, {stop}), is empty or outside the text of {len(x)} tokens")
        of_span = scores[start:stop].double()
        own = of_span.logsumexp(0)
        vector = of_span.new_zeros(x.shape[-1])
        for first in range(start, stop, PIECE):
            piece = x[first : min(first + PIECE, stop)].to(wide)
            shares = (of_span[first - start : first - start + PIECE] - own).exp()
            with torch.autocast(x.device.type, enabled=False):
                vector += (shares.to(piece) @ piece).cpu()
        vectors[number], weights[number] = vector, (own - total).exp()
    return vectors, weights
