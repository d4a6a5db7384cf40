"""The models that docs/operator.md covers: the page's own functions against each model's recurrence, token by token."""

import re

import pytest
import torch
from conftest import ROOT
from torch import Tensor
from torch.nn import functional as F

from src.lion.two_sided_attention import two_sided_attention, two_sided_segment_states

B, H, L, D, E = 2, 3, 9, 4, 6
PAGE = (ROOT / "docs/operator.md").read_text()


def python_in(heading: str) -> str:
    """The code blocks of a section."""
    return "\n".join(
        re.findall(r"```python\n(.*?)```", PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0], re.DOTALL)
    )


MODELS: dict = {}
exec(compile(python_in("Which linear transformers it covers"), "docs/operator.md", "exec"), MODELS)


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def scan(q, k, v, transitions, weights, reverse: bool = False) -> Tensor:
    """S_i = Λ_i S_{i−1} + γ_i k_i v_iᵀ, y_i = S_iᵀ q_i, from left to right or from right to left, (B, H, L, E).
    transitions: Λ, (B or 1, H, L or 1), numbers or D×D matrices; weights: γ, (B or 1, H, L or 1)."""
    q, k = (x.expand(B, H, L, -1) for x in (q, k))
    if transitions.ndim == 3:
        transitions = transitions[..., None, None] * torch.eye(q.shape[-1], dtype=q.dtype)
    transitions, weights = transitions.expand(B, H, L, -1, -1), weights.expand(B, H, L)
    state, outputs = torch.zeros(B, H, q.shape[-1], v.shape[-1], dtype=q.dtype), {}
    for i in reversed(range(L)) if reverse else range(L):
        state = transitions[:, :, i] @ state
        state = state + weights[:, :, i, None, None] * k[:, :, i, :, None] * v[:, :, i, None, :]
        outputs[i] = torch.einsum("bhd,bhde->bhe", q[:, :, i], state)
    return torch.stack([outputs[i] for i in range(L)], 2)


def both(q, k, v, transitions, weights) -> Tensor:
    """Both scans; token i, which both contain, once."""
    scans = sum(scan(q, k, v, transitions, weights, reverse) for reverse in (False, True))
    return scans - ((q * k).sum(-1) * weights)[..., None] * v


def ones_like(v: Tensor) -> Tensor:  # the values of a normalizer, (B, H, L, 1)
    return v.new_ones(*v.shape[:-1], 1)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


ONE = torch.ones(1, H, 1, dtype=torch.float64)


@pytest.mark.parametrize("causal", [False, True])
def test_linear_transformer(draw, causal):
    q, k, v = draw(B, H, L, D), draw(B, H, L, D), draw(B, H, L, E)
    run = scan if causal else both
    features = F.elu(q) + 1, F.elu(k) + 1
    expected = run(*features, v, ONE, ONE) / (run(*features, ones_like(v), ONE, ONE) + 1e-6)
    assert_equal(MODELS["linear_transformer"](q, k, v, causal=causal), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_gla_and_hgrn2_decay_by_channel(draw, causal):
    q, k, v, gate = draw(B, H, L, D), draw(B, H, L, D), draw(B, H, L, E), draw(B, H, L, D).sigmoid()
    run = scan if causal else both
    assert_equal(MODELS["gla"](q, k, v, gate.log(), causal), run(q, k, v, torch.diag_embed(gate), ONE))
    assert_equal(MODELS["hgrn2"](q, v, gate.log(), causal), run(q, 1 - gate, v, torch.diag_embed(gate), ONE))


def turn(angle: Tensor) -> Tensor:
    """Turn pairs of channels, (D/2,), by these angles: (D, D)."""
    return torch.block_diag(*(torch.stack([a.cos(), -a.sin(), a.sin(), a.cos()]).view(2, 2) for a in angle))


@pytest.mark.parametrize("causal", [False, True])
def test_retnet_with_the_rotation_inside_the_state(draw, causal):
    q, k, v = draw(B, H, L, D), draw(B, H, L, D), draw(B, H, L, E)
    decay, angles = 1 - 2.0 ** -torch.arange(1, H + 1, dtype=torch.float64), draw(D // 2)
    per_head, scaled = decay[None, :, None, None, None], q * D**-0.5
    expected = scan(scaled, k, v, per_head * turn(-angles), ONE)
    if not causal:
        expected = expected + scan(scaled, k, v, per_head * turn(angles), ONE, reverse=True)
        expected = expected - (scaled * k).sum(-1, keepdim=True) * v
    assert_equal(MODELS["retnet"](q, k, v, decay.log(), angles, causal=causal), expected)


def test_gated_rfa(draw):
    q, k, v, gate = draw(B, H, L, D).exp(), draw(B, H, L, D).exp(), draw(B, H, L, E), draw(B, H, L).sigmoid()
    expected = both(q, k, v, gate, 1 - gate) / both(q, k, ones_like(v), gate, 1 - gate)
    assert_equal(MODELS["gated_rfa"](q, k, v, gate.log()), expected)


@pytest.fixture
def mamba(draw):
    """x; B, C and Δ of each direction; A and D."""
    sides = [x for _ in range(2) for x in (draw(B, 1, L, D), draw(B, 1, L, D), F.softplus(draw(B, H, L)))]
    return draw(B, H, L, E), sides[:3], sides[3:], -draw(H).exp(), draw(H)


def test_mamba2_shared_by_both_directions(mamba):
    x, (keys, queries, step), _, A, skip = mamba
    decay = (A[:, None] * step).exp()
    expected = both(queries, keys, x, decay, step) + skip[:, None, None] * x
    assert_equal(MODELS["mamba2"](x, keys, queries, step, A, skip), expected)


def test_two_mamba2_scans(mamba):
    x, past, future, A, skip = mamba
    expected = skip[:, None, None] * x
    for (keys, queries, step), reverse in ((past, False), (future, True)):
        expected = expected + scan(queries, keys, x, (A[:, None] * step).exp(), step, reverse)
    assert_equal(MODELS["two_mamba2"](x, *past, *future, A, skip), expected)


def test_hydra(mamba, draw):
    x, past, future, A, _ = mamba
    diagonal = draw(B, H, L)
    expected = diagonal[..., None] * x
    for (keys, queries, step), reverse in ((past, False), (future, True)):  # each scan, then moved by one token
        y = scan(queries, keys, x, (A[:, None] * step).exp(), step, reverse)
        expected = expected + F.pad(y, (0, 0, -1, 1) if reverse else (0, 0, 1, -1))
    assert_equal(MODELS["hydra"](x, *past, *future, A, diagonal), expected)


@pytest.fixture
def lstm(draw):
    """q, k, v, log forget gate, log input gate."""
    return draw(B, H, L, D), draw(B, H, L, D), draw(B, H, L, E), F.logsigmoid(draw(B, H, L)), 4 * draw(B, H, L)


def divided(run, q, k, v, log_forget, log_input, **options) -> Tensor:
    """The cell and its normalizer of an mLSTM."""
    gates, q = (log_forget.exp(), log_input.exp()), q * D**-0.5
    row_sum = run(q, k, ones_like(v), *gates, **options)
    assert (row_sum.abs() < 1).any() and (row_sum.abs() > 1).any()  # either divisor
    return run(q, k, v, *gates, **options) / row_sum.abs().clamp(min=1)


def test_mlstm(lstm):
    assert_equal(MODELS["mlstm"](*lstm), divided(both, *lstm))
    assert_equal(MODELS["mlstm"](*lstm, future=False), divided(scan, *lstm))


@pytest.mark.parametrize("layer", [0, 1])
def test_vil(lstm, layer):
    assert_equal(MODELS["vil"](*lstm, layer=layer), divided(scan, *lstm, reverse=layer == 1))


def test_an_mlstm_whose_input_gate_overflows_float32_gives_its_limit(lstm):
    q, k, v, log_forget, log_input = lstm
    actual = MODELS["mlstm"](*(x.float() for x in (q, k, v, log_forget, log_input + 200)))
    gates = log_forget.exp(), log_input.exp()
    expected = both(q, k, v, *gates) / both(q, k, ones_like(v), *gates).abs()  # the gate exceeds any bound of 1
    torch.testing.assert_close(actual.double(), expected, atol=1e-3, rtol=1e-3)


def test_simple_gla(draw):
    q, k, v, gate = draw(B, H, L, D), draw(B, H, L, D), draw(B, H, L, E), draw(B, H, L).sigmoid()
    assert_equal(MODELS["simple_gla"](q, k, v, gate.log()), both(q, k, v, gate, ONE))


def test_every_model_of_the_page_has_a_test():
    helpers = {"scans", "with_ones", "rotated"}
    defined = set(re.findall(r"^def (\w+)", python_in("Which linear transformers it covers"), re.MULTILINE))
    used = set(re.findall(r'MODELS\["(\w+)"\]', (ROOT / "tests/test_covered_models.py").read_text()))
    assert defined - helpers == used - helpers


# The section on triangles


def test_the_example_of_two_triangles(draw):
    names = {"q": draw(B, H, L, D), "k": draw(B, H, L, D), "v": draw(B, H, L, E), "mask": None}
    gate = draw(B, H, L).sigmoid()
    names["log_decay"] = gate.log()
    exec(python_in("Two triangles"), names)
    assert_equal(names["y"], both(names["q"], names["k"], names["v"], gate, ONE))


def test_a_right_state_for_an_exclusive_sum_is_decayed_by_the_last_token(draw):
    q, k, v, gate = draw(B, H, L, D), draw(B, H, L, D), draw(B, H, L, E), draw(B, H, L).sigmoid()
    cuts = [[x[:, :, part] for x in (q, k, v, gate.log())] for part in (slice(0, 5), slice(5, L))]
    (past, future, diagonal), (past2, future2, _) = (MODELS["scans"](cut[0], cut[1], cut[3]) for cut in cuts)
    totals = [cuts[1][3].sum(-1, keepdim=True)] * 2
    state = two_sided_segment_states(cuts[1][2], past2, future2, *totals).leftward * gate[:, :, 4, None, None]
    actual = two_sided_attention(cuts[0][2], past, future, diagonal, right_state=state)
    assert_equal(actual, both(q, k, v, gate, ONE)[:, :, :5])
