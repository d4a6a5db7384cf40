"""One layer of linear attention, fitted to its global optimum, and a certificate that data determine it.

    y_i = Σ_h V_h S_i Q_h z_i        S_i = Σ_j M_ij z_j z_jᵀ

A token z has d coordinates. V_h (e, d) are the values of head h, Q_h (d, d) is the product of its key and query
projections, and M the decay mask of lion/linear_attention.py, all ones without decay. There is no softmax, no
normalization and no bias (append a 1 to the tokens). Outputs are linear in the features φ_i = svec(S_i) ⊗ z_i, where
svec lists S_jk for j ≤ k, each once. So the best layer with any number of heads solves a least-squares problem with
ψ = d²(d+1)/2 unknowns per output, and an SVD turns these coefficients into heads: Yau et al., "Learning Linear
Attention in Polynomial Time", NeurIPS 2025, arXiv:2410.10101. Decays are not in the paper; for G given decays, the
features of all S^(g) are joined, and each decay gets heads of its own.

All is computed in float64 from sums over samples, in O(G²ψ²) memory. A sequence costs O(ψ²) operations, whatever its
length, or with decays or a causal mask O(G²ψ²) per token. Solving costs O(G³ψ³).

Of tokens far from 0, say temperatures in kelvin, the features are nearly dependent, and the condition number of Λ,
their second moments, is the square of theirs. But the layers of tokens Az, with A invertible, are those of z, with V A
and Aᵀ Q A instead of V and Q. So the sums are those of tokens that A makes white.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import psutil
import torch
from torch import Tensor, nn

from src.lion.linear_attention import linear_attention
from src.lion.two_sided_attention import check_shapes

EPSILON = torch.finfo(torch.float64).eps
SMALLEST, LARGEST = 1e-45, 1e45  # tokens, whose sixth powers have room in float64
CUBES = "as they grow with the cube of tokens"
COPIES = 8  # matrices of Λ's size at the same time, with the workspace of eigh
BLOCK = 4_000_000  # numbers in a block of features
# The largest eigenvalues, relative to λ_max, that only rounding of tokens causes: ten times what was measured.
NOISE = {torch.float64: 0.0, torch.float32: 5e-13, torch.float16: 5e-7, torch.bfloat16: 2e-5}


class Fit(NamedTuple):
    """How a layer was fitted. Errors are squared, summed over outputs and averaged over samples."""

    error: float  # of the layer, to within about 1e-15 of `error_of_zero`
    error_of_zero: float  # of a layer that returns 0
    samples: int
    rank: int  # of Λ + ridge
    size: int  # unknowns per output, G·ψ
    rtol: float
    ridge: float

    @property
    def unique(self) -> bool:
        """Whether no other layer has as small an error (plus the ridge's penalty)."""
        return self.rank == self.size


class Layer(nn.Module):
    """Linear attention with heads V (H, e, d) and Q (H, d, d), which require no gradients until asked to. `log_decay`
    (G,) are log λ ≤ 0 of G decays, and `decay_of_head` (H,) is the index of each head's. Both are None without
    decays; `log_decay` is also None if each call gives decays per token. `causal` omits later tokens."""

    def __init__(self, values: Tensor, keyqueries: Tensor, log_decay=None, decay_of_head=None, causal: bool = False):
        super().__init__()
        self.values = nn.Parameter(values, requires_grad=False)
        self.keyqueries = nn.Parameter(keyqueries, requires_grad=False)
        self.register_buffer("log_decay", log_decay)
        self.register_buffer("decay_of_head", decay_of_head)
        self.register_buffer("causal", torch.as_tensor(causal))
        self.fitted: Fit | None = None

    def forward(self, Z: Tensor, mask: Tensor | None = None, log_decay: Tensor | None = None, form="auto") -> Tensor:
        """Return outputs (N, n, e) of tokens Z (N, n, d), in the dtype of the heads. `mask` (N, n): True: real;
        `log_decay` (N, G, n): decays per token; `form`: as in `linear_attention`."""
        Z, mask, log_decay = (x if x is None else torch.as_tensor(x) for x in (Z, mask, log_decay))
        d, of_head = self.values.shape[-1], self.decay_of_head
        if Z.ndim != 3 or Z.shape[2] != d:
            raise ValueError(f"Z must be tokens, (N, n, {d}) (got {tuple(Z.shape)})")
        Z, decays = Z.to(self.values.dtype), self.log_decay if log_decay is None else log_decay
        if (decays is None) != (of_head is None):
            raise ValueError("log_decay must be given if the layer was fitted with decays per token, and only then")
        if log_decay is not None:
            check_shapes(("log_decay", log_decay, (len(Z), int(of_head.max()) + 1, Z.shape[1])))
        if decays is not None:
            decays = decays.to(Z.dtype).index_select(0 if decays.ndim == 1 else 1, self.decay_of_head)
        q = torch.einsum("nil,hkl->nhik", Z, self.keyqueries)
        v = torch.einsum("nij,haj->nhia", Z, self.values)
        k = Z[:, None].expand(q.shape)
        return linear_attention(q, k, v, decays, mask=mask, scale=1.0, causal=bool(self.causal), form=form).sum(1)

    def _load_from_state_dict(self, state_dict, prefix, *rest) -> None:
        state_dict.setdefault(f"{prefix}causal", self.causal)  # states of earlier versions lack it
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def coefficients(self) -> Tensor:
        """Return p of `coefficients`, (e, d(d+1)/2, d), or if there are decays p of each, (G, e, d(d+1)/2, d)."""
        if self.decay_of_head is None:
            return coefficients(self.values, self.keyqueries)
        of_decay = [self.decay_of_head == g for g in range(int(self.decay_of_head.max()) + 1)]
        return torch.stack([coefficients(self.values[heads], self.keyqueries[heads]) for heads in of_decay])

    def extra_repr(self) -> str:
        text = "{} heads, {} outputs, tokens of {}".format(*self.values.shape) + ", causal" * self.causal
        if f := self.fitted:
            text += f"; error {f.error:.3g} of {f.error_of_zero:.3g} on {f.samples:,} samples, rank {f.rank:,} of "
            text += f"{f.size:,}, {'' if f.unique else 'not '}unique (rtol {f.rtol:.2g}, ridge {f.ridge:g})"
        return text


@dataclass(frozen=True)
class Certificate:
    """Whether data determine a layer. If `identifiable`, all layers that fit them best compute one function on all
    inputs (lemma 2.3). If not, others fit as well, and `fit` returns the one with the smallest coefficients."""

    smallest: float  # eigenvalue of Λ = mean φφᵀ, 0 below full rank; grows with the sixth power of the tokens' size
    largest: float
    rank: int
    size: int  # of Λ: unknowns per output, G·ψ
    samples: int
    d: int
    span: int  # dimensions that the tokens span, of d
    blind: Tensor  # (size − rank, [G,] d(d+1)/2, d): orthonormal p of layers that return 0 on all the data

    @property
    def identifiable(self) -> bool:
        """Whether Λ has full rank."""
        return self.rank == self.size

    @property
    def identifiable_in_span(self) -> bool:
        """Whether the layer is determined on all inputs within the span of these tokens."""
        return self.rank * self.d**2 * (self.d + 1) == self.size * self.span**2 * (self.span + 1)

    def distance(self, error: float) -> float:
        """Bound ‖p − p′‖ of two layers whose mean squared errors, as in `Fit`, are at most `error`: √(4·error/λ_min).
        On any input their outputs differ by at most ‖p − p′‖·‖svec S‖·‖z‖ (lemma A.7, with the square and the factor
        for two errors that its statement lacks)."""
        return (4 * error / self.smallest) ** 0.5 if self.smallest > 0 else float("inf")

    def pairs(self) -> dict[tuple[int, int], float]:
        """Return pairs of coordinates (j, k) that the data do not determine fully, the worst first, with the share of
        their coefficients that is free: 1 if the product z[j]·z[k] was never seen with any token."""
        free = self.blind.square().sum(0).mean(-1).view(-1, self.d * (self.d + 1) // 2).mean(0)
        shares = {(int(j), int(k)): round(float(x), 6) for (j, k), x in zip(_pairs(self.d).T, free)}
        return {pair: x for pair, x in sorted(shares.items(), key=lambda item: -item[1]) if x > 0}

    def __str__(self) -> str:
        text = f"identifiable: rank {self.rank:,} of {self.size:,} from {self.samples:,} samples"
        if self.identifiable:
            return f"{text}, λ_min {self.smallest:.3g}, λ_min/λ_max {self.smallest / self.largest:.2g}"
        if self.span < self.d:
            known = "determined" if self.identifiable_in_span else "not determined either"
            text += f"; tokens span {self.span} of {self.d} dimensions, in which the layer is {known}"
        pairs = [f"({j}, {k}) {share:.0%}" for (j, k), share in self.pairs().items()]
        more = f" and {len(pairs) - 8} more pairs" * (len(pairs) > 8)
        return f"not {text}; free coefficients by pair of coordinates: {', '.join(pairs[:8])}{more}"


class Moments:
    """Sums over samples, all that `fit` and `certificate` need, for data that come in batches. `tokens` is "all" if
    every token has a target, "last" if only the last real token of each sequence has; `causal` as in `Layer`."""

    def __init__(self, tokens: str = "all", causal: bool = False):
        if tokens not in ("all", "last"):
            raise ValueError(f"tokens must be all or last (got {tokens!r})")
        self.tokens, self.causal, self.samples, self.square = tokens, causal, 0, 0.0
        self.noise = self.size = 0.0  # of the tokens: NOISE, and the largest number
        self.kind: tuple | None = None  # d, e and decays, the same in all calls of `add`

    def add(self, Z: Tensor, Y: Tensor | None = None, mask=None, log_decay=None) -> "Moments":
        """Add sequences to the sums, which are most exact if the first are typical, and return this object; d, e and
        decays must be the same in all calls. Raises ValueError for shapes that do not match, non-finite numbers, tokens
        whose sixth power has no room in float64, or a d that memory has no room for.

        Args:
            Z: tokens, (N, n, d).
            Y: targets, (N, n, e), or (N, e) if tokens="last"; a certificate needs none.
            mask: (N, n) bool, True at real tokens. Padding is not read and has no targets.
            log_decay: (G,), the distinct decays that heads may have (LION-D), or (N, G, n), G decays per token
                (LION-S); None for λ = 1 (LION-LIT).
        """
        Z, Y, mask, log_decay = (x if x is None else torch.as_tensor(x) for x in (Z, Y, mask, log_decay))
        mask = Z.new_ones(Z.shape[:2], dtype=torch.bool) if mask is None else mask
        log_decay = None if log_decay is None else log_decay.double()
        self._check(Z, Y, mask, log_decay)
        (N, n, d), G, (rows, columns) = Z.shape, self.groups, _pairs(Z.shape[-1], Z.device)
        m, shared = len(rows), log_decay is None and not self.causal  # shared: one S for all tokens of a sequence
        outer = self.gram.new_zeros(m * m, d * d) if shared else None
        size = max(BLOCK // m**2, 256) if shared else max(BLOCK // (max(n, 1) * m * G), 1)
        samples = mask & (mask.flip(1).cumsum(1).flip(1) == 1) if self.tokens == "last" else mask
        parts = [slice(start, start + size) for start in range(0, N, size)]
        self._whiten(Z[part][mask[part]].double() for part in parts)
        for part in parts:
            z, sample = torch.where(mask[part][..., None], Z[part].double(), 0) @ self.whitening.mT, samples[part]
            x = torch.where(sample[..., None], z, 0)
            y = z.new_zeros(len(z), n, 0) if Y is None else Y[part].double()
            y = torch.where(sample[..., None], y if y.ndim == 3 else y[:, None], 0)
            self.samples += int(sample.sum())
            self.square += float(y.square().sum())
            self.token_gram += z.flatten(0, 1).T @ z.flatten(0, 1)
            products = z[..., rows] * z[..., columns]  # svec(zzᵀ), (b, n, m)
            if shared:  # Σ φφᵀ = Σ svec(S) svec(S)ᵀ ⊗ XXᵀ
                s = products.sum(1)
                outer += (s[:, :, None] * s[:, None]).flatten(1).T @ (x.mT @ x).flatten(1)
                self.cross += (s.T @ (x.mT @ y).flatten(1)).view_as(self.cross)
                continue
            decays = log_decay if log_decay is None or log_decay.ndim == 1 else log_decay[part]
            ones, products = z.new_ones(len(z), G, n, 1), products[:, None].expand(-1, G, -1, -1)
            S = linear_attention(ones, ones, products, decays, mask=mask[part], scale=1.0, causal=self.causal)
            of_rows = S.transpose(1, 2)[sample].flatten(1), x[sample], y[sample]  # (rows, G·m), (rows, d), (rows, e)
            for s, x, y in zip(*(t.split(max(BLOCK // len(self.gram), 1)) for t in of_rows)):
                features = (s[:, :, None] * x[:, None]).flatten(1)
                self.gram += features.T @ features
                self.cross += features.T @ y
        if shared:
            self.gram += outer.view(m, m, d, d).transpose(1, 2).reshape(self.gram.shape)
        return self

    def fit(self, rtol: float | None = None, ridge: float = 0.0) -> Layer:
        """Fit a layer to what was added; see the function `fit`."""
        cross = self._mean("cross")
        if not cross.shape[1]:
            raise ValueError("there are no targets; give Y")
        if not 0 <= ridge < float("inf"):
            raise ValueError(f"ridge must be {'at least 0' if ridge != float('inf') else 'finite'} (got {ridge})")
        square = self.square / self.samples
        if square == float("inf"):
            raise ValueError("squares of targets overflow; divide Y by a constant")
        white, d = self._solve(rtol), len(self.token_gram)
        cross, (size, rank) = _change(white.step, cross), white.inverse.shape

        def error_of(p: Tensor) -> float:
            return square - float((p * (2 * cross - white.gram @ p)).sum())

        x = white.inverse.mT @ cross
        given = _change(white.map, white.inverse, transposed=True)
        given -= white.blind @ (white.blind.mT @ given)  # given @ x is the smallest minimizer for tokens as given
        if ridge:  # Λ is the identity for x
            _, sizes, right = torch.linalg.svd(given, full_matrices=False)
            x = right.mT @ (right @ x / (1 + ridge * sizes.square())[:, None])
        p = white.inverse @ x
        if rank < size:
            smallest = _change(white.map.inverse(), given @ x, transposed=True)
            if error_of(smallest) <= error_of(p) + 1e-9 * square:  # not if coordinates differ too much in size
                p = smallest
        error = max(0.0, error_of(p))
        fitted = Fit(error, square, self.samples, size if ridge else rank, size, white.rtol, ridge)
        if not fitted.unique:
            rank = f"rank {fitted.rank:,} from {self.samples:,} samples for {fitted.size:,} unknowns per output"
            about = "this is the minimizer of least norm; certificate() reports what is missing"
            warnings.warn(f"the data do not determine the layer: {rank}; {about}", stacklevel=3)
        p = p.mT.unflatten(1, (self.groups, -1, d)).transpose(0, 1)  # (G, e, m, d)
        values, keyqueries = zip(*map(_heads, p))
        of_head = torch.tensor([g for g, v in enumerate(values) for _ in v], device=p.device) if self.kind[2] else None
        heads = torch.cat(values) @ white.map, white.map.mT @ torch.cat(keyqueries) @ white.map
        layer = Layer(*heads, self.log_decay, of_head, self.causal)
        layer.fitted = fitted
        return layer

    def certificate(self, rtol: float | None = None) -> Certificate:
        """Certify what was added; see the function `certificate`."""
        white, d = self._solve(rtol), len(self.token_gram)
        size, rank = white.inverse.shape
        # As the largest eigenvalue of Λ⁻¹, 1/λ_min is accurate whatever the scale of the tokens.
        inverse = _change(white.map, white.inverse, transposed=True)
        smallest = 0.0
        if rank == size:
            unit = float(inverse.abs().max())  # whose square may have no room
            inverse /= unit
            smallest = (1 / unit) ** 2 / float(torch.linalg.eigvalsh(inverse.mT @ inverse)[-1])
        largest = float(torch.linalg.eigvalsh(_change_both(white.map.inverse(), white.gram))[-1])
        blind = white.blind.mT.unflatten(1, (self.groups, -1, d) if self.kind[2] else (-1, d))
        return Certificate(smallest, largest, rank, size, self.samples, d, white.span, blind)

    def _check(self, Z: Tensor, Y: Tensor | None, mask: Tensor, log_decay: Tensor | None) -> None:
        """Raise ValueError if arguments are unusable; in the first call, allocate the sums."""
        if Z.ndim != 3 or Z.dtype not in NOISE or not Z.shape[-1]:
            raise ValueError(f"Z must be tokens, (N, n, d), of floating point (got {tuple(Z.shape)}, {Z.dtype})")
        (N, n, d), last = Z.shape, self.tokens == "last"
        e = 0 if Y is None else Y.shape[-1] if Y.ndim == 3 - last else 1
        per_token = log_decay is not None and log_decay.ndim == 3
        groups = None if log_decay is None else log_decay.shape[-2] if log_decay.ndim > 1 else log_decay.numel()
        of_decays = ("log_decay", log_decay, (groups,), (N, groups, n))
        check_shapes(("Y", Y, (N, e) if last else (N, n, e)), ("mask", mask, (N, n)), of_decays)
        if Y is not None and Y.is_complex():
            raise ValueError("Y must be real; give real and imaginary part as two outputs")
        if mask.dtype != torch.bool:
            raise ValueError(f"mask must be bool (got {mask.dtype})")
        if log_decay is not None and not (log_decay <= 0).all():
            raise ValueError("log_decay must be at most 0: the logarithm of a decay between 0 and 1")
        for name, x, read in (("Z", Z, mask), ("Y", Y, mask.any(1) if last else mask)):
            if x is not None and not (x.isfinite().all(-1) | ~read).all():
                raise ValueError(f"{name} has non-finite values at real tokens; mask or remove them")
        largest = float(Z.abs().where(mask[..., None], 0).max()) if Z.numel() else 0.0
        if largest > LARGEST:
            raise ValueError(f"features overflow, {CUBES}; divide all tokens by a constant")
        kind = d, e, groups, per_token or log_decay is None or tuple(log_decay.tolist())
        if self.kind is None:
            size = (groups or 1) * d * d * (d + 1) // 2
            needed = 8 * COPIES * size**2
            free = torch.cuda.mem_get_info(Z.device)[0] if Z.is_cuda else psutil.virtual_memory().available
            if needed > free:
                memory = f"{needed / 2**30:,.1f} GiB of memory (free: {free / 2**30:,.1f})"
                raise ValueError(f"d={d} means {size:,} unknowns, which need {memory}; reduce the tokens' dimensions")
            self.kind, self.groups, self.log_decay = kind, groups or 1, None if per_token else log_decay
            shapes = (size, size), (size, e), (d, d)
            self.gram, self.cross, self.token_gram = (Z.new_zeros(shape, dtype=torch.float64) for shape in shapes)
            self.count, self.squares = 0, self.token_gram[0].clone()  # of tokens, as they are given
            self.whitening = torch.eye(d).to(self.gram)  # the other sums are of tokens that it multiplies
        elif kind != self.kind:
            raise ValueError("d, e and decays differ from those of the sequences that were added first")
        self.noise, self.size = max(self.noise, NOISE[Z.dtype]), max(self.size, largest)

    def _mean(self, name: str) -> Tensor:
        if not self.samples:
            raise ValueError("there are no samples; give a sequence with a real token")
        if not (sums := getattr(self, name)).isfinite().all():
            raise ValueError(f"features overflow, {CUBES}; divide all tokens by a constant")
        return sums / self.samples

    def _whiten(self, parts: Iterable[Tensor]) -> None:
        """Let all sums be those of tokens that are about white, also with these added, each (·, d)."""
        gram = self.token_gram.clone()
        for z in parts:
            self.count += len(z)
            self.squares += z.square().sum(0)
            x = z @ self.whitening.mT
            gram += x.mT @ x
        found = self._whitening_of(gram)
        if not self.samples:
            self.whitening = found.step @ self.whitening
        elif found.change > 100:
            self.whitening, self.token_gram = found.step @ self.whitening, found.step @ self.token_gram @ found.step.mT
            self.gram, self.cross = _change_both(found.step, self.gram), _change(found.step, self.cross)

    def _whitening_of(self, gram: Tensor) -> "_Whitening":
        count = max(self.count, 1)
        size = self.squares.where(self.squares > 0, count).div(count).sqrt()
        return _whitening(gram / count, self.whitening, size, max(256 * EPSILON, self.noise))

    def _solve(self, rtol: float | None) -> "_White":
        """Decompose Λ."""
        gram = self._mean("gram")
        if 0 < self.size < SMALLEST:
            raise ValueError(f"features underflow, {CUBES}; multiply all tokens by a constant")
        step, span, _, gain = self._whitening_of(self.token_gram)
        A, gram = step @ self.whitening, _change_both(step, gram)
        rtol = max(len(gram) * EPSILON, 256 * EPSILON, self.noise * gain) if rtol is None else rtol
        if not 0 <= rtol < 1:
            raise ValueError(f"rtol must be at least 0 and below 1 (got {rtol})")
        eigenvalues, vectors = torch.linalg.eigh(gram)
        kept = eigenvalues > rtol * eigenvalues[-1]
        inverse = vectors[:, kept] / eigenvalues[kept].sqrt()
        blind = torch.linalg.qr(_change(A, vectors[:, ~kept], transposed=True)).Q
        return _White(A, step, gram, inverse, blind, rtol, span)


class _White(NamedTuple):
    """A decomposition for tokens Az, which are white: uncorrelated, and of unit size."""

    map: Tensor  # A, (d, d)
    step: Tensor  # (d, d), from the tokens of the sums to Az
    gram: Tensor  # Λ
    inverse: Tensor  # B with BBᵀ an inverse of Λ on its range, (size, rank)
    blind: Tensor  # an orthonormal basis of the null space, for the tokens as given
    rtol: float
    span: int  # dimensions of the tokens


class _Whitening(NamedTuple):
    step: Tensor  # (d, d), which makes tokens white in the dimensions that they span
    span: int  # how many those are
    change: float  # by how much it changes second moments
    gain: float  # how much larger than the tokens' second moments those of their rounding errors become


def _whitening(gram: Tensor, A: Tensor, size: Tensor, tolerance: float) -> _Whitening:
    """Whiten tokens Az with second moments `gram`, (d, d), by Gram and Schmidt. What is left of a coordinate counts as
    0 below `tolerance` times the second moment of its rounding error, if z has coordinates of `size`, (d,), and is then
    scaled by that: tokens that follow may differ in it."""

    def errors(rows: Tensor) -> Tensor:
        return (rows @ A * size).square().sum(1)

    step, left, change, gain = torch.eye(len(gram)).to(gram), list(range(len(gram))), 1.0, 1.0
    while left:
        rows = step[left]
        own, error = (rows @ gram * rows).sum(1), errors(rows)
        best = int((own / error).argmax())
        if not own[best] > tolerance * error[best]:
            break
        variance = float(own[best])
        row = step[left.pop(best)].div_(variance**0.5)
        step[left] -= torch.outer(step[left] @ (gram @ row), row)
        change, gain = max(change, variance, 1 / variance), max(gain, float(error[best]) / variance)
    step[left] /= errors(step[left]).sqrt()[:, None]
    return _Whitening(step, len(gram) - len(left), change, gain)


def _change(A: Tensor, x: Tensor, transposed: bool = False) -> Tensor:
    """Return M x, or Mᵀ x, with M the matrix that makes features of tokens Az out of those of z. x: (G·ψ, ·)."""
    rows, columns = _pairs(len(A), A.device)
    pairs = A[rows][:, rows] * A[columns][:, columns]
    pairs += (A[rows][:, columns] * A[columns][:, rows]).where(rows != columns, 0)
    if transposed:
        A, pairs = A.mT, pairs.mT
    x = x.unflatten(0, (-1, len(rows), len(A)))
    x = torch.einsum("pm,gmdc->gpdc", pairs, x)
    return torch.einsum("kd,gpdc->gpkc", A, x).flatten(0, 2)


def _change_both(A: Tensor, gram: Tensor) -> Tensor:
    """Return M gram Mᵀ, with the M of `_change`."""
    return _change(A, _change(A, gram).mT)


def fit(Z: Tensor, Y: Tensor, mask=None, log_decay=None, *, causal=False, rtol=None, ridge=0.0) -> Layer:
    """Return the layer with the smallest squared error of any number of heads (theorem 2.2, algorithm 1).

    If the data do not determine it, this warns and returns the minimizer with the smallest ‖p‖; or, where coordinates
    differ so much in size that rounding would spoil that one, with the smallest ‖p‖ of white tokens.
    It has at most min(e·d, d²) heads per decay; how many heads produced the data cannot be recovered.

    Args:
        Z, Y, mask, log_decay: as in `Moments.add`; Y (N, n, e) for all tokens, (N, e) for the last.
        causal: as in `Layer`.
        rtol: eigenvalues of Λ, for tokens that are made white, below rtol times the largest count as 0. Default:
            2.2e-16·max(G·ψ, 256), or what rounding to Z's dtype causes, 5e-13 in float32, if that is more; times the
            ratio of the tokens' second moments, if the tokens are far from white.
        ridge: for noisy data: minimize the error plus ridge·‖p‖².
    """
    return Moments("last" if Y.ndim == 2 else "all", causal).add(Z, Y, mask, log_decay).fit(rtol, ridge)


def certificate(Z: Tensor, tokens="all", mask=None, log_decay=None, *, causal=False, rtol=None) -> Certificate:
    """Certify whether tokens Z, (N, n, d), determine a layer, whatever the targets (lemma 2.3, algorithm 2). `tokens`:
    which have targets, "all" or "last"; other arguments as in `fit`."""
    return Moments(tokens, causal).add(Z, None, mask, log_decay).certificate(rtol)


def coefficients(values: Tensor, keyqueries: Tensor) -> Tensor:
    """Return p, (..., e, d(d+1)/2, d), of heads V (..., H, e, d) and Q (..., H, d, d): two layers are the same function
    if and only if their p are equal (corollary 2.4). For pairs j ≤ k in the order of torch.triu_indices, and halved if
    j = k, p[a, {j,k}, l] = Σ_h V[h, a, j] Q[h, k, l] + V[h, a, k] Q[h, j, l]."""
    rows, columns = _pairs(values.shape[-1], values.device)
    unfolded = torch.einsum("...haj,...hkl->...ajkl", values, keyqueries)
    p = unfolded[..., rows, columns, :] + unfolded[..., columns, rows, :]
    return torch.where((rows == columns)[:, None], p / 2, p)


def from_projections(query, key, value, output, heads: int, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Return V (H, e, d) and Q (H, d, d) of an attention layer's weights, as torch.nn.Linear holds them: queries and
    keys (H·D, d), values (H·E, d), output (e, H·E). `scale` is D^-1/2 if None. Biases go into a last column of the
    weights, with a 1 at the end of each token; the output's bias is not part of the layer."""
    q, k, v = (weight.unflatten(0, (heads, -1)) for weight in (query, key, value))
    scale = q.shape[1] ** -0.5 if scale is None else scale
    return output.unflatten(1, (heads, -1)).transpose(0, 1) @ v, scale * k.mT @ q


def _heads(p: Tensor) -> tuple[Tensor, Tensor]:
    """Return V and Q with coefficients p, (e, m, d), each of which (j, k) and (k, j) share equally."""
    (e, _, d), (rows, columns) = p.shape, _pairs(p.shape[-1], p.device)
    unfolded = p.new_zeros(e, d, d, d)
    unfolded[:, rows, columns] = unfolded[:, columns, rows] = torch.where((rows == columns)[:, None], p, p / 2)
    left, sizes, right = torch.linalg.svd(unfolded.reshape(e * d, d * d), full_matrices=False)
    count = max(1, int((sizes > sizes[0] * d * d * EPSILON).sum()))
    roots = sizes[:count].sqrt()
    return (left[:, :count] * roots).T.unflatten(1, (e, d)), (right[:count].T * roots).T.unflatten(1, (d, d))


def _pairs(d: int, device: torch.device | None = None) -> Tensor:
    """The pairs j ≤ k in the order of svec, (2, d(d+1)/2)."""
    return torch.triu_indices(d, d, device=device)
