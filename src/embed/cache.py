"""Large contrastive batches in the memory of small ones (GradCache; Gao et al., arXiv:2101.06983).

The loss ℓ compares all vectors e of a batch. A first pass computes them in microbatches, without gradients. g = ∂ℓ/∂e
then lets each microbatch learn on its own in a second pass, where ∂(Σ e·g)/∂θ is its part of ∂ℓ/∂θ.
"""

from collections.abc import Sequence

import numpy as np
import torch
from composer import Callback, Logger, State
from composer.core import get_precision_context
from composer.utils import dist
from torch import Tensor

from src.embed.loss import contrastive_loss, false_negatives


def seed_of(*entropy: int) -> int:
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)


class GradientCache(Callback):
    """Before each training step, put ℓ and the rows of g into the batch's microbatches. A microbatch's dropout is drawn
    from (seed, step, rank, microbatch) in both passes."""

    def __init__(self, seed: int, temperature: float, symmetric: bool = False, dims: Sequence[int] = ()):
        self.seed, self.temperature, self.symmetric, self.dims = seed, temperature, symmetric, tuple(dims)

    def batch_start(self, state: State, logger: Logger) -> None:
        batch, rank = state.device.batch_to_device(state.batch), dist.get_global_rank()
        parts = state.batch["parts"] = batch["parts"]
        counts = dist.all_gather_object(len(parts))
        # Devices that communicate in a microbatch need equally many: they repeat one, without gradients.
        parts += [dict(parts[0]) for _ in range(max(counts) - len(parts))]
        queries = batch["counts"]["queries"]
        own: Tensor | None = None
        with torch.no_grad(), get_precision_context(state.precision):
            for number, part in enumerate(parts):
                part["seed"] = seed_of(self.seed, state.timestamp.batch.value, rank, number)
                vectors = state.model(part)
                if own is None:
                    own = vectors.new_zeros(queries + len(batch["keys"]), vectors.shape[1])
                if number < counts[rank]:  # a repeated one has dropout of its own
                    own[part["texts"]] = vectors
        loss, gradients = self.differentiate(own, queries, batch["keys"], batch["positives"])
        for number, part in enumerate(parts):
            repeated = number >= counts[rank]
            part["gradients"] = gradients[part["texts"]] * (0 if repeated else 1)
            # Composer multiplies a microbatch's loss by its share, 1 / len(parts), and DDP averages over devices.
            part["scale"] = len(parts) * dist.get_world_size()
            part["loss"] = loss

    def differentiate(self, own: Tensor, size: int, keys: Tensor, positives: Tensor) -> tuple[Tensor, Tensor]:
        """Return ℓ of all devices' vectors, and ∂ℓ of this device's, (texts, D), in the order of the collator: its
        `size` queries, their documents, and the negatives."""
        rank = dist.get_global_rank()
        pairs, negatives = own[: 2 * size], own[2 * size :]
        gathered = [gather(x) for x in (pairs[:size], pairs[size:], negatives)]
        leaves = [torch.cat(x).requires_grad_() for x in gathered]
        queries, documents = leaves[0], torch.cat(leaves[1:])
        all_keys = torch.cat([torch.cat(gather(x)) for x in (keys[:size], keys[size:])])
        starts = np.cumsum([0, *map(len, gathered[0])])  # of each device's queries
        moved = [of + of.new_tensor([start, 0]) for start, of in zip(starts.tolist(), gather(positives))]
        excluded = false_negatives(all_keys, torch.cat(moved), len(queries))
        with torch.enable_grad():
            loss = contrastive_loss(queries, documents, excluded, self.temperature, self.symmetric, self.dims)
        rows = []
        for parts, gradient in zip(gathered, torch.autograd.grad(loss, leaves)):
            start = sum(map(len, parts[:rank]))
            rows.append(gradient[start : start + len(parts[rank])])
        return loss.detach(), torch.cat(rows)


def gather(x: Tensor) -> list[Tensor]:
    """Return the rows of x, (n, …), of each device; n may differ."""
    if dist.get_world_size() == 1:
        return [x]
    counts = dist.all_gather_object(len(x))
    padded = x.new_zeros(max(counts), *x.shape[1:])
    padded[: len(x)] = x
    return [rows[:count] for rows, count in zip(dist.all_gather(padded), counts)]
