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
        for number, part in enumerate(parts):
            entropy = (self.seed, state.timestamp.batch.value, rank, number)
            part["seed"] = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)
        own: Tensor | None = None
        with torch.no_grad(), get_precision_context(state.precision):
            for part in parts:
                vectors = state.model(part)
                if own is None:
                    own = vectors.new_zeros(len(batch["keys"]) + len(batch["positives"]), vectors.shape[1])
                own[part["texts"]] = vectors
        loss, gradients = self.differentiate(own, batch["keys"], batch["positives"])
        for number, part in enumerate(parts):
            repeated = number >= counts[rank]
            part["gradients"] = gradients[part["texts"]] * (0 if repeated else 1)
            # Composer multiplies a microbatch's loss by its share, 1 / len(parts), and DDP averages over devices.
            part["scale"] = len(parts) * dist.get_world_size()
            part["loss"] = loss

    def differentiate(self, own: Tensor, keys: Tensor, positives: Tensor) -> tuple[Tensor, Tensor]:
        """Return ℓ of all devices' vectors, and ∂ℓ of this device's, (texts, D), in the order of the collator: its
        queries, their documents, and the negatives."""
        size, rank = len(positives), dist.get_global_rank()
        pairs, negatives = own[: 2 * size], own[2 * size :]
        gathered = [gather(x) for x in (pairs[:size], pairs[size:], negatives)]
        leaves = [torch.cat(x).requires_grad_() for x in gathered]
        queries, documents = leaves[0], torch.cat(leaves[1:])
        all_keys = torch.cat([torch.cat(gather(x)) for x in (keys[:size], keys[size:])])
        excluded = false_negatives(all_keys, torch.cat(gather_padded(positives)))
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


def gather_padded(positives: Tensor) -> list[Tensor]:
    """Return the positives of each device, (B, P), padded to the largest P with the first of each."""
    if dist.get_world_size() == 1:
        return [positives]
    width = max(dist.all_gather_object(positives.shape[1]))
    return gather(torch.cat([positives, positives[:, :1].expand(-1, width - positives.shape[1])], 1))
