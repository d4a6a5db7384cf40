"""The global fit of a layer of linear attention and its certificate, against least squares and teachers."""

import json
import re
import warnings
from types import SimpleNamespace

import psutil
import pytest
import torch
import warm
from conftest import ROOT
from torch.nn import functional as F

from benchmarks import measure, polytime
from src.errors import UserError
from src.lion.linear_attention import definition, linear_attention
from src.polytime import Layer, Moments, certificate, coefficients, fit, from_projections


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def teacher(heads: int, e: int = 4, d: int = 4, **options) -> Layer:
    return Layer(normal(heads, e, d, seed=1), normal(heads, d, d, seed=2), **options)


def off(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).norm() / y.norm())


def rows_of_features(Z, tokens="all", mask=None, log_decay=None, causal=False) -> torch.Tensor:
    """The features of all samples as the module's text defines them, (rows, G·ψ)."""
    (N, n, d), rows = Z.shape, []
    mask = torch.ones(N, n, dtype=torch.bool) if mask is None else mask
    identity = torch.eye(n).double().expand(1, 1, n, n)
    for z, real, number in zip(Z.double(), mask, range(N)):
        decays = log_decay if log_decay is None or log_decay.ndim == 1 else log_decay[number : number + 1]
        ones = torch.ones(1, 1 if decays is None else decays.shape[-1 if decays.ndim == 1 else 1], n, 1).double()
        M = definition(ones, ones, identity, decays, scale=1.0, causal=causal)[0]  # (G, n, n)
        places = real.nonzero()[:, 0]
        for i in places[-1:] if tokens == "last" else places:
            S = torch.einsum("gj,ja,jb->gab", M[:, i] * real, z, z)
            pairs = [S[:, j, k] for j in range(d) for k in range(j, d)]
            rows.append(torch.einsum("mg,l->gml", torch.stack(pairs), z[i]).flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("tokens", ["all", "last"])
@pytest.mark.parametrize("heads", [1, 2, 3, 4])
def test_a_teacher_is_recovered_on_all_inputs(heads, tokens):
    layer = teacher(heads)
    Z = normal(40 if tokens == "all" else 160, 8, 4)
    Y = layer(Z)
    found = fit(Z, Y if tokens == "all" else Y[:, -1])
    assert found.fitted.unique and len(found.values) <= 16
    assert off(found.coefficients(), layer.coefficients()) < 1e-8
    fresh = normal(5, 8, 4, seed=3)
    for inputs in (fresh, normal(3, 40, 4, seed=4), normal(3, 1, 4, seed=5), 100 * fresh, fresh + 5):
        assert off(found(inputs), layer(inputs)) < 1e-8


def test_outputs_are_the_formula():
    layer, Z = teacher(3, e=2), normal(2, 5, 4)
    y = sum(torch.einsum("ab,nbj,njc,cd,nid->nia", V, Z.mT, Z, Q, Z) for V, Q in zip(layer.values, layer.keyqueries))
    assert off(layer(Z), y) < 1e-12
    assert off(rows_of_features(Z) @ layer.coefficients().flatten(1).T, y.flatten(0, 1)) < 1e-12


def test_coefficients_are_those_of_the_function():
    V, Q = normal(3, 2, 4, seed=1), normal(3, 4, 4, seed=2)
    p, scales, order = coefficients(V, Q), torch.tensor([2.0, -0.5, 7.0])[:, None, None], [2, 0, 1]
    same = {
        "rescaled": (V * scales, Q / scales),
        "permuted": (V[order], Q[order]),
        "split": (torch.cat([V, V[:1]]), torch.cat([Q[:1] / 2, Q[1:], Q[:1] / 2])),
        "cancelling": (torch.cat([V, V, V]), torch.cat([Q, Q, -Q])),
    }
    a, b, c = normal(2, 1), normal(1, 4, seed=3), normal(4, seed=4)
    v, w = normal(4, seed=5), normal(4, seed=6)  # antisymmetric in the pair: v, w and c against w, v
    more = torch.stack([a @ v[None], -a @ w[None]]), torch.stack([torch.outer(w, c), torch.outer(v, c)])
    same["antisymmetric"] = torch.cat([V, more[0]]), torch.cat([Q, more[1]])
    for name, heads in same.items():
        assert off(coefficients(*heads), p) < 1e-8, name
    assert off(coefficients(V, Q + b), p) > 1e-3
    stacked = coefficients(torch.stack([V, 2 * V]), torch.stack([Q, Q]))
    assert off(stacked, torch.stack([p, 2 * p])) < 1e-12


CASES = {
    "all": {},
    "last": {"tokens": "last"},
    "padded": {"mask": torch.rand(50, 5, generator=torch.Generator().manual_seed(0)) < 0.7},
    "padded last": {"tokens": "last", "mask": torch.rand(50, 5, generator=torch.Generator().manual_seed(0)) < 0.7},
    "causal": {"causal": True},
    "decays": {"log_decay": torch.tensor([0.9, 0.5]).double().log()},
    "decay 1": {"log_decay": torch.zeros(1).double()},
    "decays per token": {"log_decay": -normal(50, 2, 5, seed=9).abs(), "causal": True},
}


@pytest.mark.parametrize("case", CASES)
def test_moments_are_those_of_the_features(case):
    given, Z = CASES[case], normal(50, 5, 3)
    features = rows_of_features(Z, **given)
    values = torch.linalg.eigvalsh(features.T @ features / len(features))
    found = certificate(Z, **given)
    assert found.identifiable and found.samples == len(features) and found.rank == found.size == features.shape[1]
    assert found.smallest == pytest.approx(float(values[0]), rel=1e-7)
    assert found.largest == pytest.approx(float(values[-1]), rel=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_agnostic_fits_are_least_squares(case):
    options = dict(CASES[case])
    tokens = options.pop("tokens", "all")
    Z = normal(50, 5, 3)
    Y = normal(50, 2, seed=8) if tokens == "last" else normal(50, 5, 2, seed=8)
    mask = options.get("mask", torch.ones(50, 5, dtype=torch.bool))
    features, targets = rows_of_features(Z, tokens, **options), Y[mask.any(1)] if tokens == "last" else Y[mask]
    best = torch.linalg.lstsq(features, targets, driver="gelsd").solution
    error = (features @ best - targets).square().sum(1).mean()
    found = fit(Z, Y, **options)
    assert found.fitted.error == pytest.approx(float(error), abs=1e-8)
    assert found.fitted.error_of_zero == pytest.approx(float(targets.square().sum(1).mean()))
    assert off(found.coefficients().movedim(-3, 0).flatten(1).T, best) < 1e-8
    decays = options.get("log_decay")
    y = found(Z, options.get("mask"), decays if decays is not None and decays.ndim == 3 else None)
    last = torch.arange(5).expand(50, 5).masked_fill(~mask, -1).amax(1)
    y = y[torch.arange(50), last][mask.any(1)] if tokens == "last" else y[mask]
    assert off(y, features @ best) < 1e-8


@pytest.mark.parametrize("form", ["full", "chunkwise", "recurrent"])
@pytest.mark.parametrize("length", [1, 7, 130])
@pytest.mark.parametrize("decays", [None, "per head", "per token"])
def test_a_layer_computes_the_same_in_every_form(decays, length, form):
    heads = torch.tensor([0, 1, 1])
    constant = torch.tensor([0.9, 0.5]).double().log() if decays == "per head" else None
    layer = teacher(3, e=2, log_decay=constant, decay_of_head=None if decays is None else heads)
    Z, mask = normal(2, length, 4), torch.rand(2, length, generator=torch.Generator().manual_seed(1)) < 0.8
    given = -normal(2, 2, length, seed=3).abs() if decays == "per token" else None
    decay = constant[heads] if decays == "per head" else None if given is None else given[:, heads]
    q, v = torch.einsum("hkl,nil->nhik", layer.keyqueries, Z), torch.einsum("haj,nij->nhia", layer.values, Z)
    wanted = definition(q, Z[:, None].expand_as(q), v, decay, mask=mask, scale=1.0).sum(1)
    assert (layer(Z, mask, given, form=form) - wanted).abs().max() < 1e-10 * wanted.abs().max() + 1e-14


def test_two_given_decays_are_recovered_and_padding_is_not_read():
    decays = torch.tensor([0.9, 0.5]).double().log()
    layer = teacher(3, log_decay=decays, decay_of_head=torch.tensor([0, 0, 1]))
    Z, mask = normal(60, 9, 4), torch.rand(60, 9, generator=torch.Generator().manual_seed(1)) < 0.8
    Y = layer(Z, mask)
    hidden = [torch.where(mask[..., None], x, torch.nan) for x in (Z, Y)]
    found = fit(*hidden, mask, decays)
    assert off(found.coefficients(), layer.coefficients()) < 1e-8
    assert off(found(Z, mask)[mask], Y[mask]) < 1e-8
    assert off(found(normal(2, 50, 4, seed=5)), layer(normal(2, 50, 4, seed=5))) < 1e-8
    close = certificate(Z, log_decay=torch.tensor([0.9, 0.899]).log())
    assert close.identifiable and close.smallest / close.largest < 1e-6


def recall(count: int, share: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Associative memory of section 4.2: tokens, outputs at the last, coefficients."""
    Z = polytime.memories(count, share, torch.Generator().manual_seed(0))
    first = torch.arange(8) < 4
    p = coefficients(torch.diag((~first).double())[None], torch.diag(first.double())[None])
    return Z, polytime.features_of_last(Z) @ p.flatten(1).T, p


one_hot = F.one_hot(torch.randint(4, (200, 8), generator=torch.Generator().manual_seed(0)), 4)
POOR = {  # tokens, those with targets, rank, dimensions
    "too few sequences": (normal(9, 8, 4), "all", 36, 4),
    "too few last tokens": (normal(39, 8, 4), "last", 39, 4),
    "a subspace": (normal(200, 8, 3) @ normal(3, 4, seed=1), "all", 18, 3),
    "a subspace in float32": (normal(200, 8, 2).float() @ normal(2, 4, seed=1).float(), "all", 6, 2),
    "LayerNorm": (F.layer_norm(normal(200, 8, 4), (4,)), "all", 18, 3),
    "LayerNorm in float32": (F.layer_norm(normal(200, 8, 4).float(), (4,)), "all", 18, 3),
    "LayerNorm in bfloat16": (F.layer_norm(normal(200, 8, 4).bfloat16(), (4,)), "all", 18, 3),
    "orthonormal rows": (torch.linalg.qr(normal(200, 4, 4)).Q, "all", 4, 4),
    "one-hot": (one_hot.double(), "all", 16, 4),
    "one sequence repeated": (normal(1, 8, 4).expand(200, -1, -1), "all", 4, 4),
    "orthonormal memories": (lambda: recall(3000, 1)[0], "last", 248, 8),
}


@pytest.mark.parametrize("kind", POOR)
def test_poor_data_are_reported_and_fitted(kind):
    Z, tokens, rank, span = POOR[kind]
    Z = Z() if callable(Z) else Z
    found = certificate(Z, tokens)
    assert not found.identifiable and (found.rank, found.span, found.smallest) == (rank, span, 0)
    assert found.identifiable_in_span == (span < Z.shape[-1])
    assert f"not identifiable: rank {rank} of {found.size}" in str(found)
    assert ("in which the layer is determined" in str(found)) == (span < Z.shape[-1])
    blind = found.blind.flatten(1)
    assert blind.shape == (found.size - rank, found.size)
    assert (blind @ blind.T - torch.eye(len(blind))).abs().max() < 1e-10
    features = rows_of_features(Z[:300], tokens)
    noise = {torch.float32: 1e-5, torch.bfloat16: 0.05}.get(Z.dtype, 1e-7)
    assert (features @ blind.T).abs().max() < noise * features.abs().max()
    if Z.dtype == torch.float64 and Z.shape[-1] == 4:
        Y = normal(len(Z), 2, seed=8) if tokens == "last" else normal(*Z.shape[:2], 2, seed=8)
        with pytest.warns(UserWarning, match=f"do not determine the layer: rank {rank} from {found.samples:,} samples"):
            layer = fit(Z, Y, rtol=1e-13)
        features, Y = rows_of_features(Z, tokens), Y.reshape(-1, 2)
        best = torch.linalg.lstsq(features, Y, driver="gelsd", rcond=1e-10).solution
        assert layer.fitted.error == pytest.approx(float((features @ best - Y).square().sum(1).mean()), abs=1e-8)
        assert off(layer.coefficients().flatten(1).T, best) < 1e-5  # the one of least norm too
        assert not layer.fitted.unique and "not unique" in repr(layer)


def test_free_pairs_of_coordinates_are_named():
    found = certificate(one_hot.double())
    assert found.pairs() == {(j, k): 1.0 for j in range(4) for k in range(j + 1, 4)}
    pairs = "(0, 1) 100%, (0, 2) 100%, (0, 3) 100%, (1, 2) 100%, (1, 3) 100%, (2, 3) 100%"
    assert str(found).endswith(f"free coefficients by pair of coordinates: {pairs}")
    constant = normal(50, 6, 3)
    constant[..., 2] = 0
    found = certificate(constant, log_decay=torch.tensor([-0.1, -0.5]))
    assert found.blind.shape == (found.size - found.rank, 2, 6, 3)
    shares = found.pairs()
    assert [pair for pair, share in shares.items() if share == 1] == [(0, 2), (1, 2), (2, 2)]
    assert shares[0, 0] == pytest.approx(1 / 3)  # with the third coordinate of the query


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [1, 2, 4, 8])
def test_data_that_determine_the_layer_are_not_refused(d, dtype):
    size = d * d * (d + 1) // 2
    for tokens, count in (("all", d * (d + 1)), ("last", 2 * size)):
        found = certificate(normal(count, 8, d).to(dtype), tokens)
        assert found.identifiable and found.span == d and "identifiable: rank" in str(found), tokens


def test_the_least_data_suffice_and_units_do_not_matter():
    assert certificate(normal(10, 8, 4)).identifiable
    assert certificate(normal(40, 8, 4), "last").identifiable
    assert certificate(normal(1, 60, 4), causal=True).identifiable
    assert not certificate(normal(1, 60, 4)).identifiable
    units, Z = torch.tensor([1e-3, 1, 1e3, 1e-6]).double(), normal(100, 8, 4)
    found, plain = certificate(Z * units), certificate(Z)
    assert found.identifiable and 0 < found.smallest < 1e-30 < plain.smallest
    layer = teacher(2)
    assert off(fit(Z * units, layer(Z))(Z * units), layer(Z)) < 1e-8


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mean", [20, 293, 1013, 1e5])
def test_where_the_zero_of_coordinates_is_does_not_matter(mean, causal):
    one, centred = torch.ones(60, 9, 1).double(), normal(60, 9, 3) * torch.tensor([5.0, 1.0, 0.1]).double()
    given, same = torch.cat([centred + mean, one], 2), torch.cat([centred, one], 2)
    layer, noise = teacher(2, e=2, causal=causal), 0.1 * normal(60, 9, 2, seed=5)
    Y = layer(same) + noise
    found, wanted = fit(given, Y, causal=causal), fit(same, Y, causal=causal)
    rounding = 1e-14 * wanted.fitted.error_of_zero
    assert found.fitted.unique and found.fitted.error == pytest.approx(wanted.fitted.error, rel=1e-6, abs=rounding)
    assert off(found(given), wanted(same)) < 1e-6
    assert certificate(given, causal=causal).identifiable
    alone = fit(given[..., :3], Y, causal=causal).fitted  # without a 1, another function, and the best one too
    features = rows_of_features(given[..., :3], causal=causal)
    features, targets = features / features.norm(dim=0), Y.flatten(0, 1)
    best = torch.linalg.lstsq(features, targets, driver="gelsd", rcond=1e-15).solution
    error = float((features @ best - targets).square().sum(1).mean())
    assert alone.unique and (alone.error == pytest.approx(error, rel=1e-5) if mean < 1e4 else alone.error <= error)


def test_rounded_tokens_far_from_zero_are_fitted_and_do_not_seem_to_span_more():
    one, x = torch.ones(200, 9, 1).double(), 293 + 5 * normal(200, 9, 3)
    given = torch.cat([x, one], 2)
    Y = teacher(2)(torch.cat([(x - 293) / 5, one], 2))
    found = fit(given.float(), Y)
    assert found.fitted.unique and off(found(given), Y) < 1e-3
    flat = torch.cat([x[..., :2], x[..., :2].mean(2, keepdim=True), one], 2)
    for dtype in (torch.float64, torch.float32):
        proof = certificate(flat.to(dtype))
        assert (proof.rank, proof.span) == (18, 3) and proof.identifiable_in_span


def test_the_first_tokens_of_a_stream_need_not_be_typical():
    Z, layer = normal(300, 8, 4) + 30, teacher(2)
    for constants in ([30, 0, 40], [0, 0, 0], [100, 100, 100], [1e-3, 0, 40]):
        first = Z[:10].clone()
        first[..., 1:] = torch.tensor(constants).double()
        moments = Moments()
        for part in (first[:0], first, Z):
            moments.add(part, layer(part))
        found = moments.fit()
        assert moments.certificate().identifiable and found.fitted.unique
        assert off(found(Z), layer(Z)) < 1e-8 and off(found.coefficients(), layer.coefficients()) < 1e-4


@pytest.mark.parametrize(
    ("shape", "causal", "rank"), [((5, 5, 3), False, 15), ((2, 8, 2), False, 4), ((1, 17, 3), True, 17)]
)
def test_few_tokens_that_are_alike_do_not_seem_to_determine_a_layer(shape, causal, rank):
    for seed in range(20):
        Z = normal(*shape, seed=seed)
        Z[..., 1] = Z[..., 0] + 1e-2 * Z[..., 1]
        proof = certificate(Z, causal=causal)
        assert (proof.rank, proof.identifiable) == (rank, False), seed


@pytest.mark.parametrize("repeats", [1, 40])
def test_a_stream_of_single_sequences_has_the_rank_of_all(repeats):
    one, x = torch.ones(5, 9, 1).double(), 293 + 5 * normal(5, 9, 2)
    Z, moments = torch.cat([x, one], 2), Moments()
    for number in range(5 * repeats):
        moments.add(Z[number % 5 : number % 5 + 1])
    assert moments.certificate().rank == 15 < moments.certificate().size


def test_a_refused_call_changes_no_sums():
    Z, Y, moments = normal(40, 8, 4), normal(40, 8, 2, seed=1), Moments()
    moments.add(Z, Y)
    for wrong in (1e60 * Z, NAN):
        with pytest.raises(ValueError, match=r"overflow|non-finite"):
            moments.add(wrong, Y)
    moments.add(1e-50 * Z, 0 * Y)  # of tokens that are small beside the others
    found = moments.fit()
    assert found.fitted.samples == 640 and off(found.coefficients(), fit(Z, Y).coefficients()) < 1e-9


@pytest.mark.parametrize("ridge", [1e-6, 1e-2])
@pytest.mark.parametrize("scales", [(1, 1, 1e-3), (1, 1, 1e-4), (1, 1e-3, 1e3)])
def test_a_ridge_counts_for_tokens_as_they_are_given(scales, ridge):
    Z = normal(100, 9, 3)
    Y = teacher(2, e=2, d=3)(Z) + 0.1 * normal(100, 9, 2, seed=5)
    given = Z * torch.tensor(scales).double()
    features = rows_of_features(given)
    size = features.norm(dim=0)
    rows = torch.cat([features / size, (len(features) * ridge) ** 0.5 * torch.diag(1 / size)])
    targets = torch.cat([Y.flatten(0, 1), torch.zeros(18, 2).double()])
    best = torch.linalg.lstsq(rows, targets, driver="gelsd", rcond=1e-15).solution / size[:, None]
    error = float((features @ best - Y.flatten(0, 1)).square().sum(1).mean())
    found = fit(given, Y, ridge=ridge)
    assert found.fitted.error == pytest.approx(error, rel=1e-4)
    assert found.fitted.error == pytest.approx(float((found(given) - Y).square().sum(2).mean()), rel=1e-6)


def test_the_error_is_that_of_the_layer_also_where_sizes_differ_too_much():
    Z = normal(100, 9, 3) * torch.tensor([1, 1e-3, 1e3]).double()
    Z[..., 0], Z[..., 2] = 1, 3e3
    Y = normal(100, 9, 2, seed=5)
    with pytest.warns(UserWarning, match="do not determine"):
        found = fit(Z, Y)
    real = float((found(Z) - Y).square().sum(2).mean())
    assert found.fitted.error == pytest.approx(real, rel=1e-4) and real < found.fitted.error_of_zero


@pytest.mark.parametrize(("share", "rank"), [(0, 288), (0.95, 288), (1, 248)])
def test_associative_memory_is_found_also_where_it_is_not_identifiable(share, rank):
    Z, Y, p = recall(2**14, share)
    found = certificate(Z, "last")
    assert found.rank == rank and found.identifiable == (rank == 288)
    assert share != 0.95 or 0.05 < found.smallest < 0.07
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = fit(Z, Y)
    assert float((layer.coefficients() - p).norm()) < 1e-10


def test_two_good_layers_are_as_near_as_the_certificate_says():
    Z, layer = normal(50, 6, 3), teacher(2, e=2, d=3)
    proof, p = certificate(Z), layer.coefficients()
    features = rows_of_features(Z)
    worst = torch.linalg.eigh(features.T @ features / len(features)).eigenvectors[:, 0].view(1, 6, 3)
    for size in (0.1, 1.0):
        error = float((features @ (size * worst).flatten()).square().mean()) / 4  # each is half as far from a target
        assert size == pytest.approx(proof.distance(error), rel=1e-6)
    inside = normal(*p.shape, seed=4)
    error = float((features @ inside.flatten(1).T).square().sum(1).mean()) / 4
    assert float(inside.norm()) <= proof.distance(error)
    assert certificate(normal(2, 6, 3)).distance(error) == float("inf")


def test_a_ridge_shrinks_the_coefficients():
    Z, Y = normal(9, 8, 4), normal(9, 8, 2, seed=8)
    features, targets = rows_of_features(Z), Y.flatten(0, 1)
    gram, cross = features.T @ features / 72, features.T @ targets / 72
    layer = fit(Z, Y, ridge=0.5)
    wanted = torch.linalg.solve(gram + 0.5 * torch.eye(40).double(), cross)
    assert off(layer.coefficients().flatten(1).T, wanted) < 1e-8
    assert layer.fitted.error == pytest.approx(float((features @ wanted - targets).square().sum(1).mean()))
    assert layer.fitted.unique and "ridge 0.5" in repr(layer) and f"rtol {layer.fitted.rtol:.2g}" in repr(layer)


def test_rtol_omits_small_directions():
    Z = normal(100, 8, 2) * torch.tensor([1.0, 1.0]).double()
    with pytest.warns(UserWarning, match="do not determine"):
        assert fit(Z, normal(100, 8, 1, seed=3), rtol=0.5).fitted.rank < 6
    assert certificate(Z, rtol=0.5).rank < 6 == certificate(Z).rank


def test_heads_are_those_of_projections():
    W = SimpleNamespace(**{name: normal(6, 4, seed=number) for number, name in enumerate(("q", "k", "v"))})
    output, Z = normal(5, 6, seed=4), normal(2, 7, 4)
    q, k, v = ((Z @ weight.T).unflatten(2, (3, 2)).transpose(1, 2) for weight in (W.q, W.k, W.v))
    for scale in (None, 0.3):
        wanted = linear_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2) @ output.T
        layer = Layer(*from_projections(W.q, W.k, W.v, output, heads=3, scale=scale))
        assert off(layer(Z), wanted) < 1e-12


def test_a_layer_is_saved_and_takes_arrays_of_numpy(tmp_path):
    Z, mask = normal(40, 8, 4), torch.ones(40, 8, dtype=torch.bool)
    layer = fit(Z.numpy(), teacher(2)(Z).numpy(), mask.numpy(), torch.tensor([-0.1]).numpy())
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    state = torch.load(tmp_path / "layer.pt", weights_only=True)
    assert torch.equal(Layer(**state)(Z), layer(Z.numpy()))
    causal = fit(Z, teacher(2)(Z), causal=True)
    other = Layer(torch.zeros_like(causal.values), torch.zeros_like(causal.keyqueries))
    assert Layer(**causal.state_dict()).causal and not other.causal
    other.load_state_dict(causal.state_dict())
    assert torch.equal(other(Z), causal(Z))
    old = {name: value for name, value in causal.state_dict().items() if name != "causal"}  # of earlier versions
    other.load_state_dict(old)
    assert torch.equal(other(Z), causal(Z))
    assert layer.float()(Z).dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def streamed(count: int, size: int) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Fit sequences that arrive in batches; return the process's growth in bytes and both coefficients."""
    torch.set_num_threads(1)
    layer = teacher(2, e=8, d=8)
    fit(normal(40, 8, 8), layer(normal(40, 8, 8)))
    before, moments = measure.highest_mark(), Moments()
    for start in range(0, count, size):
        Z = normal(size, 8, 8, seed=start)
        moments.add(Z, layer(Z))
    return measure.highest_mark() - before, moments.fit().coefficients(), layer.coefficients()


def test_a_stream_of_data_takes_little_memory():
    growth, found, wanted = measure.apart(streamed, 100_000, 1000)
    assert growth < 500e6 and off(found, wanted) < 1e-9
    Z, Y = normal(300, 8, 4), normal(300, 8, 2, seed=1)
    moments = Moments()
    for start, end in ((0, 1), (1, 97), (97, 300)):
        moments.add(Z[start:end], Y[start:end])
    assert off(moments.fit().coefficients(), fit(Z, Y).coefficients()) < 1e-9


Z, Y = normal(40, 8, 4), normal(40, 8, 2, seed=1)
NAN = Z.clone()
NAN[3, 2, 1] = torch.nan
BAD = {
    "Z must be tokens, (N, n, d), of floating point (got (40, 8), torch.float64)": lambda: certificate(Z[..., 0]),
    "Z must be tokens, (N, n, d), of floating point (got (40, 8, 4), torch.int64)": lambda: certificate(Z.long()),
    "Y must have the shape (40, 8, 2) (got (39, 8, 2))": lambda: fit(Z, Y[1:]),
    "Y must have the shape (40, 8, 1) (got (40,))": lambda: fit(Z, Y[:, 0, 0]),
    "Y must have the shape (40, 2) (got (39, 2))": lambda: fit(Z, Y[1:, 0]),
    "mask must have the shape (40, 8) (got (40, 7))": lambda: fit(Z, Y, torch.ones(40, 7, dtype=torch.bool)),
    "mask must be bool (got torch.float32)": lambda: fit(Z, Y, torch.ones(40, 8)),
    "log_decay must have the shape (3,) or (40, 3, 8) (got (3, 8))": lambda: fit(Z, Y, None, -torch.ones(3, 8)),
    "log_decay must be at most 0": lambda: fit(Z, Y, None, torch.tensor([0.9])),
    "Z has non-finite values at real tokens; mask or remove them": lambda: fit(NAN, Y),
    "Y has non-finite values at real tokens; mask or remove them": lambda: fit(Z, Y / 0),
    "there are no samples": lambda: fit(Z, Y, torch.zeros(40, 8, dtype=torch.bool)),
    "there are no samples; give": lambda: Moments().fit(),
    "there are no targets; give Y": lambda: Moments().add(Z).fit(),
    "features overflow, as they grow with the cube of tokens; divide all": lambda: certificate(1e60 * Z),
    "features underflow, as they grow with the cube of tokens; multiply": lambda: certificate(1e-60 * Z),
    "squares of targets overflow; divide Y by a constant": lambda: fit(Z, 1e160 * Y),
    "Y must be real": lambda: fit(Z, Y.to(torch.complex128)),
    "ridge must be finite (got inf)": lambda: fit(Z, Y, ridge=float("inf")),
    "Z must be tokens, (N, n, 4) (got (40, 8, 2))": lambda: Layer(normal(1, 4, 4), normal(1, 4, 4))(Y),
    "log_decay must have the shape (40, 2, 8) (got (40, 3, 8))": lambda: fit(Z, Y, None, -torch.rand(40, 2, 8))(
        Z, log_decay=-torch.ones(40, 3, 8)
    ),
    "rtol must be at least 0 and below 1 (got 1)": lambda: fit(Z, Y, rtol=1),
    "ridge must be at least 0 (got -1)": lambda: fit(Z, Y, ridge=-1),
    "tokens must be all or last (got 'first')": lambda: certificate(Z, "first"),
    "d, e and decays differ from those": lambda: Moments().add(Z, Y).add(Z, Y[..., :1]),
    "log_decay must be given if": lambda: Layer(normal(1, 4, 4), normal(1, 4, 4))(Z, log_decay=-torch.ones(40, 1, 8)),
    "d=200 means 4,020,000 unknowns, which need": lambda: certificate(normal(1, 2, 200)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_one_sentence(message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        BAD[message]()
    assert "\n" not in str(raised.value)


def test_memory_is_asked_for_before_it_is_taken(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    with pytest.raises(ValueError, match=r"need 0.0 GiB of memory \(free: 0.0\); reduce the tokens' dimensions"):
        certificate(Z)


def test_the_examples_of_the_chapter_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/polytime.md").read_text(), re.DOTALL):
        exec(compile(block, "docs/polytime.md", "exec"), {})
    output = capsys.readouterr().out
    assert "identifiable: rank 40 of 40" in output and "not identifiable: rank 16 of 40" in output
    assert "same function: True" in output


def test_the_benchmark_trains_attention():
    """Its models compute outputs with coefficients; the heads get the gradients that they get from attention."""
    torch.manual_seed(0)
    heads, x = [1, 3], normal(2, 5, 6, 4)
    model = polytime.Layers(2, heads, 4, 2).double()
    y = model(x, polytime.features(x))
    y.square().sum().backward()
    for seed in range(2):
        for number, count in enumerate(heads):
            V = model.values[0][seed, number].detach().requires_grad_()
            Q = model.keyqueries[0][seed, number].detach().requires_grad_()
            k = x[seed][:, None].expand(-1, 3, -1, -1)
            q, v = torch.einsum("hkl,nil->nhik", Q, x[seed]), torch.einsum("haj,nij->nhia", V, x[seed])
            wanted = linear_attention(q, k, v, scale=1 / (count * 2), causal=True).sum(1)
            assert off(y[seed, number], wanted) < 1e-12
            wanted.square().sum().backward()
            assert off(model.values[0].grad[seed, number, :count], V.grad[:count]) < 1e-10
            assert off(model.keyqueries[0].grad[seed, number, :count], Q.grad[:count]) < 1e-10
            assert not model.values[0].grad[seed, number, count:].any()


@pytest.mark.parametrize("given", ["--seeds 0", "--dimensions 2 25", "--heads 0", "--speed_dimensions 0"])
def test_the_benchmark_refuses_sizes_in_one_sentence(given):
    name, *_, value = given.split()
    with pytest.raises(UserError, match=f"^{name}={value} must be "):
        polytime.main(given.split())


def test_the_benchmark_writes_tables_numbers_and_pictures(tmp_path):
    sizes = "--seeds 1 --dimensions 2 --sequences 32 --heads 1 2 --layers 2 --epochs 1 --deep_epochs 1 --samples 512"
    given = [*sizes.split(), *"--sample_epochs 1 --speed_dimensions 2 --speed_sequences 9 --out".split(), tmp_path]
    status, output = warm.run("benchmarks/polytime.py", *given, output=tmp_path / "output")
    assert status == 0, output
    rows = json.loads((tmp_path / "polytime-cpu.json").read_text())["rows"]
    errors = {(row["model"], row.get("heads")): row["errors"][0] for row in rows if row["part"] == "heads"}
    assert errors.pop(("global fit", None)) < 1e-10 < 1e-6 < min(errors.values())
    assert {name for name, _ in errors} == {"1 layer", "2 layers", "softmax transformer"}
    recalled = {row["share"]: row for row in rows if row["part"] == "certificate"}
    assert recalled[1]["rank"] == 248 and all(row["least norm"] < 1e-8 for row in recalled.values())
    assert recalled[1]["nearest to a start"] > 0.1 > 1e-8 > recalled[0]["nearest to a start"]
    speed = [row for row in rows if row["part"] == "speed"]
    assert [(row["d"], row["unknowns"], row["sequences"]) for row in speed] == [(2, 6, 9)]
    assert (tmp_path / "polytime-cpu.md").read_text().strip() in output
    for part in ("heads", "certificate"):
        assert (tmp_path / f"polytime-{part}-cpu.png").stat().st_size > 1000
