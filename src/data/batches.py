"""How Composer counts and splits batches of text, in which several samples may share a row."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from src.data.masking import IGNORED
from src.lion.modeling_lion import labelled_positions


def sample_count(batch: dict[str, Tensor]) -> int:
    """Return the number of samples in a batch: its rows, unless they are packed."""
    return int((batch["sample_lengths"] >= 0).sum()) if "sample_lengths" in batch else len(batch["input_ids"])


def token_counts(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the number of real tokens and of predicted ones, which the loss averages over, under Composer's names."""
    if "token_counts" in batch:
        return batch["token_counts"]
    labelled = (batch["labels"] != IGNORED).sum().item()
    # Composer divides by the second.
    return {"total": int(batch["attention_mask"].sum()), "loss_generating": max(float(labelled), 1e-6)}


def split_batch(batch: dict[str, Tensor], microbatch_size: int) -> list[dict[str, Any]]:
    """Split a batch into microbatches of about equally many rows: as many as without packing, if there are enough rows.

    All devices get the same number, since they may communicate in each microbatch: a device with fewer packed rows adds
    microbatches without labels. A microbatch carries `token_counts` and `masked_positions`, (labels,), in the flattened
    rows, so that training need not synchronize with the GPU to compute them.
    """
    count = min(-(-sample_count(batch) // microbatch_size), len(batch["input_ids"]))
    splits = zip(*(tensor.tensor_split(count) for tensor in batch.values()))
    parts = [dict(zip(batch, split)) for split in splits]
    if "sample_lengths" in batch:
        parts += [without_labels(batch) for _ in range(max_over_devices(count) - count)]
    for part in parts:
        part["token_counts"] = token_counts(part)
        positions = labelled_positions(part["labels"])
        part["masked_positions"] = positions.pin_memory() if part["labels"].is_pinned() else positions
    return parts


def max_over_devices(count: int) -> int:
    if not (dist.is_available() and dist.is_initialized()):
        return count
    counts = [0] * dist.get_world_size()
    dist.all_gather_object(counts, count)
    return max(counts)


def without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a minimal batch that contributes nothing: a few tokens of the first row, no label, no sample."""
    part = {name: tensor[:1, :8] for name, tensor in batch.items()}
    nothing = {"labels": IGNORED, "sample_lengths": -1}
    return part | {name: torch.full_like(part[name], value) for name, value in nothing.items()}
