"""How far the heads of a model see, measured on rows of tokens."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from src.cli import progress
from src.lion import LionModel

DISTANCES = (10, 100, 1000)


@contextlib.contextmanager
def reading_horizons(model: LionModel) -> Iterator[list[list[float] | None]]:
    """Yield a list, which afterwards holds the horizons in tokens of each layer's heads, by the mean log decay over all
    that the model read meanwhile. None: no decay; if both directions have their own, those of past keys come first."""
    log_decays: list[list[Tensor]] = [[] for _ in model.layers]
    horizons: list[list[float] | None] = []

    def read(number: int, layer, inputs) -> None:
        if (decays := layer.attention.log_decays(layer.before_mixing(inputs[0]))) is not None:
            log_decays[number].append(decays.double().mean((0, 2)))

    hooks = [layer.register_forward_pre_hook(partial(read, number)) for number, layer in enumerate(model.layers)]
    try:
        yield horizons
    finally:
        for hook in hooks:
            hook.remove()
    horizons += [(-1 / torch.stack(parts).mean(0)).tolist() if parts else None for parts in log_decays]


@torch.no_grad()
def measure_horizons(model: LionModel, row: list[int]) -> list[list[float] | None]:
    """Return the horizons of each layer's heads on one row of token ids, see `reading_horizons`."""
    with reading_horizons(model) as horizons:
        model(torch.tensor([row]))
    return horizons


def measure(model: LionModel, rows: list[list[int]]) -> dict[str, Any]:
    """Return, as means over rows of token ids: `horizons` of `reading_horizons`; `shares`, per distance and layer; and
    `gradients`, per distance. Distances are those of DISTANCES that are less than a row's length."""
    length = len(rows[0])
    distances = [distance for distance in DISTANCES if distance < length]
    places = torch.arange(length, dtype=torch.int32)
    apart = (places[:, None] - places).abs()
    shares: list[list[Tensor]] = [[] for _ in model.layers]

    def read(number: int, layer, inputs, output):
        """Measure a layer in a hook, so that only one layer's matrix is in memory."""
        y, matrix = output
        sizes = layer.attention.values(layer.before_mixing(inputs[0])).norm(dim=-1)
        of_heads = []
        for row, size in zip(matrix[0], sizes[0]):  # of one head at a time, to save memory
            weights = row.abs() * size
            total = weights.sum(-1)
            of_heads.append([(weights.masked_fill_(apart <= d, 0).sum(-1) / total).mean() for d in distances])
        shares[number].append(torch.tensor(of_heads).mean(0))
        return y, None

    gradients = []
    with contextlib.ExitStack() as hooks, reading_horizons(model) as horizons, torch.no_grad():
        for number, layer in enumerate(model.layers):
            hooks.callback(layer.register_forward_hook(partial(read, number)).remove)
        for row in progress(rows, desc="rows", unit=" rows"):
            model(torch.tensor([row]), output_attentions=True, attention_form="full")
    for row in rows:
        embeddings = model.get_input_embeddings()(torch.tensor([row])).detach().requires_grad_()
        state = model(inputs_embeds=embeddings).last_hidden_state[0, 0]
        probe = torch.randn(state.shape, generator=torch.Generator().manual_seed(0))
        norms = torch.autograd.grad((state * probe).sum(), embeddings)[0][0].norm(dim=-1)
        gradients.append(norms[distances] / norms[0])
    of_layers = torch.stack([torch.stack(parts).mean(0) for parts in shares], 1).tolist()
    means = torch.stack(gradients).log().mean(0).exp().tolist()  # they differ by orders of magnitude
    return {"horizons": horizons, "shares": dict(zip(distances, of_layers)), "gradients": dict(zip(distances, means))}
