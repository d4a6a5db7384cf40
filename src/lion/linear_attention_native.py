"""The full and the chunkwise form by the CPU's kernel: their operands, as linear_attention_forms.py describes them, cut
into what the kernel takes, and its results put together. `directions`: 1 or −1 for each triangle; `all_directions`:
those for each kind of triangles."""

import functools

import torch
from torch import Tensor

from .cpu_kernel import OWN, STRICT, FullCall, TriangleCalls, adjacent_rows, empty_rows


def full_forward(q, k, v, *others, with_rows: bool = False) -> tuple[Tensor, ...]:
    """The output, (B, H, L, E), and with_rows, if they are divided, their sums, (B, H, L). Arguments of `FullCall`."""
    problem, y = FullCall(q, k, v, *others), empty_rows(v)
    rows = (y.new_empty(v.shape[:3]),) if with_rows and problem.divides else ()
    problem.forward(y, *rows)
    return _laid_out(y, v), *rows


def full_backward(
    grad, q, k, v, query_sums, key_sums, *others, with_sums: bool, rows: tuple[Tensor, ...] = ()
) -> tuple[Tensor | None, ...]:
    """The gradients of the six tensors; of both sums only with_sums. rows: what `full_forward` returned, if rows are
    divided."""
    problem, grads = FullCall(q, k, v, query_sums, key_sums, *others), _empty_gradients(q, k, v)
    *of_sums, of_diagonal = problem.backward(grad, *grads, with_sums, *rows)
    if not problem.decays:
        of_sums = [None if x is None else _summed(x, sums) for x, sums in zip(of_sums, (query_sums, key_sums))]
    return *_cast(grads, q, k, v), *of_sums, of_diagonal


def chunkwise_forward(
    q, k, v, query_sums, key_sums, diagonal, order, scale: float, _chunk_size, _uniform, triangles: str,
    all_directions: dict,
) -> Tensor:  # fmt: skip
    """The output, (B, H, L, E). The kernel has a chunk size of its own, and needs no uniform decays."""
    directions, separate = all_directions[triangles], triangles == "separate"
    y, (q, k, v) = empty_rows(v), map(adjacent_rows, (q, k, v))
    calls = _triangles(q, k, v, query_sums, key_sums, diagonal, order, scale, directions, separate)
    for number, triangle in enumerate(calls):
        triangle.forward(y, add=number > 0)
    TriangleCalls.run(calls)
    return _laid_out(y, v)


def chunkwise_backward(
    grad, q, k, v, query_sums, key_sums, diagonal, order, scale: float, _chunk_size, _uniform, triangles: str,
    all_directions: dict, with_sums: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of the six tensors; of sums and diagonal only with_sums."""
    directions, separate = all_directions[triangles], triangles == "separate"
    grads = _empty_gradients(q, k, v)
    sides, rows = _sides(*grads[:2], directions, separate), [adjacent_rows(x) for x in (q, k, v, grad)]
    calls = _triangles(*rows[:3], query_sums, key_sums, diagonal, order, scale, directions, separate)
    for number, triangle in enumerate(calls):
        add = number > 0 and not separate, number > 0
        triangle.backward(rows[3], *sides[number % 2], grads[2], add, with_sums)
    TriangleCalls.run(calls)
    of_queries, of_keys = zip(*(triangle.of_sums() for triangle in calls)) if with_sums else ((), ())
    of_diagonal = None
    if with_sums and diagonal is not None:
        of_diagonal = diagonal.new_empty(diagonal.shape).copy_((grad.float() * v).sum(-1))
    return *_cast(grads, q, k, v), *_of_sums(of_queries, of_keys, query_sums, key_sums), of_diagonal


def _triangles(q, k, v, query_sums, key_sums, diagonal, order, scale, directions, separate) -> list[TriangleCalls]:
    """In each order, the first triangle brings the diagonal."""
    keys, own = query_sums if key_sums is None else key_sums, OWN if diagonal is None else diagonal
    assert order is None or diagonal is None
    orders, sums = [None] if order is None else order, zip(query_sums.unbind(-1), keys.unbind(-1))
    sides = list(enumerate(zip(directions, _sides(q, k, directions, separate))))
    return [
        TriangleCalls(*side, v, *next(sums), direction, scale / len(orders), STRICT if number else own, one)
        for one in orders
        for number, (direction, side) in sides
    ]


def _sides(q: Tensor, k: Tensor, directions, separate: bool) -> list[tuple[Tensor, Tensor]]:
    """q and k of each triangle."""
    return list(zip(*(x.chunk(2, -1) if separate else [x] * len(directions) for x in (q, k))))


def _laid_out(y: Tensor, like: Tensor) -> Tensor:
    """y in the dtype and with the strides of `torch.empty_like(like)`, which a compiler expects."""
    y = y.to(like.dtype)
    return y if y.stride() == _strides(like.shape, like.stride()) else torch.empty_like(like).copy_(y)


@functools.lru_cache(1024)
def _strides(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Those of `torch.empty_like` of a tensor with these."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Memory for the gradients in float32. Heads that share queries and keys have gradients of their own first."""
    return [empty_rows(x if x.shape[1] == v.shape[1] else x.expand(-1, v.shape[1], -1, -1)) for x in (q, k, v)]


def _cast(grads: list[Tensor], *inputs: Tensor) -> list[Tensor]:
    return [_laid_out(_summed(grad, x), x) for grad, x in zip(grads, inputs)]


def _summed(grad: Tensor, like: Tensor) -> Tensor:
    return grad if grad.shape == like.shape else grad.sum_to_size(like.shape)


def _of_sums(of_queries, of_keys, query_sums, key_sums) -> tuple[Tensor | None, Tensor | None]:
    if not of_queries:
        return None, None
    of_queries, of_keys = torch.stack(list(of_queries), -1), torch.stack(list(of_keys), -1)
    if key_sums is None:
        return _summed(of_queries + of_keys, query_sums), None
    return _summed(of_queries, query_sums), _summed(of_keys, key_sums)
