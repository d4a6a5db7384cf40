"""Hydra's attention: two scans, one from each end of a text, and a diagonal. It is `two_sided_attention` with the
decays of the tokens between key and query.

Shape letters: B batch, H heads, G heads of q and k, L length, D head size of q and k, E head size of v.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import linear_attention_triton
from .custom_operators import no_autocast
from .linear_attention import is_fused, one_per_head
from .linear_attention_forms import cumulative_log_decay
from .two_sided_attention import (
    Triangle,
    add_states,
    check_options,
    check_shapes,
    resolve_form,
    two_sided_attention,
)


class Scans(NamedTuple):
    """For past and for future keys: queries and keys, (B, G, L, D) each with G a divisor of H; and the tokens' log
    decays and the logarithms of the keys' weights, (2, B, H, L) each."""

    q: tuple[Tensor, Tensor]
    k: tuple[Tensor, Tensor]
    log_decays: Tensor
    log_weights: Tensor

    def triangles(self) -> tuple[Triangle, Triangle, tuple[Tensor, Tensor]]:
        """Return past and future as `two_sided_attention` takes them, and the sums of their log decays, (B, H, 1)."""
        length = self.log_decays.shape[-1]
        with no_autocast(self.log_decays):
            (before, through), (to_before, to_through) = (cumulative_log_decay(x, length) for x in self.log_decays)
        past = Triangle(self.q[0], self.k[0], before, through, self.log_weights[0])
        future = Triangle(self.q[1], self.k[1], to_through, to_before, self.log_weights[1])
        return past, future, (through[..., -1:], to_through[..., -1:])


def hydra_attention(
    v: Tensor,
    scans: Scans,
    diagonal: Tensor,
    *,
    mask: Tensor | None = None,
    seq_idx: Tensor | None = None,
    left_state: Tensor | None = None,
    right_state: Tensor | None = None,
    form: str = "auto",
    chunk_size: int = 128,
) -> Tensor:
    """Compute the attention of a Hydra layer, (B, H, L, E), of values v, (B, H, L, E), and the weights of tokens for
    themselves, diagonal, (B, H, L). Other arguments and errors as for `two_sided_attention`."""
    given = {"mask": mask, "seq_idx": seq_idx, "left_state": left_state, "right_state": right_state}
    dtype, heads = v.dtype, v.shape[1]
    if not all(is_fused(q, k, v, form, 0.0) for q, k in zip(scans.q, scans.k)):
        past, future, _ = scans.triangles()
        return two_sided_attention(v, past, future, diagonal, **given, form=form, chunk_size=chunk_size, report=False)
    _check(v, scans, diagonal, form=form, chunk_size=chunk_size, **given)
    size = 0 if resolve_form(form, v, True, fused=True) == "full" else chunk_size
    with no_autocast(v):
        of_past, of_future = (
            linear_attention_triton.fused_linear_attention(
                one_per_head(q, heads), one_per_head(k, heads), v, log_decay, mask, seq_idx, 1.0, size, 0.0, keys=keys,
                log_weight=log_weight,
            )
            for q, k, log_decay, log_weight, keys in zip(*scans, ("before", "after"))
        )  # fmt: skip
        diagonal = diagonal if mask is None else diagonal.masked_fill(~mask[:, None], 0)
        y = torch.addcmul(of_past + of_future, diagonal[..., None].to(dtype), v)
        if left_state is not None or right_state is not None:
            past, future, _ = scans.triangles()
            sums = torch.stack([past.query_sum, -future.query_sum], -1)
            queries = one_per_head(torch.cat(scans.q, -1), heads)
            y = add_states(y, queries, sums, "separate", left_state, right_state, 1.0)
    return y.to(dtype)


def _check(v, scans: Scans, diagonal, *, mask, seq_idx, left_state, right_state, form: str, chunk_size: int) -> None:
    """Raise ValueError for shapes that do not match, and for what `check_options` refuses."""
    (B, H, L, E), (_, G, _, D) = v.shape, scans.q[0].shape
    named = [(name, x, (B, G, L, D)) for name, pair in (("q", scans.q), ("k", scans.k)) for x in pair]
    named += [("log_decays", scans.log_decays, (2, B, H, L)), ("log_weights", scans.log_weights, (2, B, H, L))]
    named += [("diagonal", diagonal, (B, H, L)), ("mask", mask, (B, L)), ("seq_idx", seq_idx, (B, L))]
    named += [("left_state", left_state, (B, H, D, E)), ("right_state", right_state, (B, H, D, E))]
    check_shapes(*named)
    check_options(mask, seq_idx, left_state, right_state, form, chunk_size)
    if H % G:
        raise ValueError(f"v must have a multiple of the {G} heads of q and k (got {H})")
