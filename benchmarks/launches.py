"""How many operations a training step launches on a GPU and what they read and write, without a GPU:

    python benchmarks/launches.py [--texts lion-s ...] [--images lion-s ...]

In small models and batches a GPU waits for the program, whose time grows with the operations. In larger ones most
operations wait for memory, which has to deliver their operands unless a cache still holds them. Models run on
PyTorch's meta device, and kernels launch nothing. Softmax attention counts as the one operation that it is in
FlashAttention. Not counted: the optimizer; conversions by autocast, since all weights are in bfloat16; and dropout,
which is 0. Writes a table and its numbers, with the bytes of each kind of operation.
"""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import collections
import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import measure, models, vision
from benchmarks.kernels import as_if_on, replaced
from src import cli
from src.lion import linear_attention_triton as host

TEXTS = [name for name in models.MODELS if name != models.MODERN_BERT]  # which depends on the values of a batch
NOT_LAUNCHED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
PICKING = {"embedding", "index_select", "nll_loss_forward", "nll_loss_backward"}  # which read a few entries
OVERWRITING = {"copy_", "fill_", "zero_"}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", nargs="*", default=TEXTS, choices=TEXTS, metavar="NAME", help="(default: all)")
    images = vision.MODELS
    parser.add_argument("--images", nargs="*", default=images, choices=images, metavar="NAME", help="(default: all)")
    parser.add_argument("--layers", type=int, default=12, help="of text models (default: 12, that is 23 in hydra)")
    parser.add_argument("--batch", type=int, default=128, help="texts of 128 tokens, or images (default: 128)")
    parser.add_argument("--out", type=Path, default=measure.RESULTS, help=f"(default: {measure.RESULTS})")
    a = parser.parse_args(argv)
    rows = []
    cases = [*(("texts", name) for name in a.texts), *(("images", name) for name in a.images)]
    for what, name in cli.progress(cases, desc="models"):
        failed: dict[str, str] = {}
        case = what, name, a.layers, a.batch
        rows.append({"what": what, "model": name, **(measure.attempt(failed, "error", count, *case) or failed)})
    header = ["of", "model", "forward", "backward", "both", "of which attention kernels", "read and written"]
    lines = []
    for row in rows:
        numbers = ["-"] * 5
        if "error" not in row:
            both = row["forward"] + row["backward"]
            numbers = [f"{x:,}" for x in (row["forward"], row["backward"], both, row["kernels"])]
            numbers.append(f"{row['bytes'] / 1e9:.1f} GB")
        lines.append([row["what"], row["model"], *numbers])
    size = models.describe(a.texts, a.layers, 768) if a.texts else "base size"
    title = (
        f"Operations of a training step, of {a.batch} texts of 128 tokens by models of {size}, of {a.batch} images of "
        "224 pixels by those of size small:"
    )
    measure.write(a.out, "launches", title, {"torch": torch.__version__}, [[header, *lines]], rows)


def count(what: str, name: str, layers: int, batch: int) -> dict[str, Any]:
    """Count the operations of a forward and of a backward pass, those that are attention kernels, and the bytes that
    all read and write, in sum and by kind."""
    operations = Operations()

    def launch(kernel: host.Kernel, *tensors: torch.Tensor | None) -> None:
        operations.kernels += 1
        operations.add(f"kernel {kernel.name}", tensors)

    with on_no_gpu(), replaced(host.Kernel, "launch", launch):
        model, inputs = text_model(name, layers, batch) if what == "texts" else image_model(name, batch)
        model.to(torch.bfloat16).train()
        with operations:
            if what == "texts":
                loss = models.masked_lm_loss(model, *inputs)
            else:
                loss = F.cross_entropy(vision.logits(model(inputs[0])).float(), inputs[1])
            forward = operations.count
            loss.backward()
    counts = {"forward": forward, "backward": operations.count - forward, "kernels": operations.kernels}
    return {**counts, "bytes": operations.bytes.total(), "bytes by kind": dict(operations.bytes.most_common())}


def text_model(name: str, layers: int, batch: int) -> tuple[nn.Module, tuple]:
    """Return a model for texts of 128 tokens, and such texts, as `masked_lm_loss` takes them."""
    model = models.build(name, layers, 768, 128, masked_lm=True)
    if name == models.BERT:  # as on a GPU
        models.drop_masks(model)
    ids = torch.zeros(batch, 128, dtype=torch.int64)
    return model, (ids, ids, torch.zeros(batch * 128 * 3 // 10, dtype=torch.int64), None)


def image_model(name: str, batch: int) -> tuple[nn.Module, tuple]:
    """Return a classifier, images, and their labels."""
    model, pixels = vision.build(name, "small", 224), torch.zeros(batch, 3, 224, 224, dtype=torch.bfloat16)
    return model, (pixels, torch.zeros(batch, dtype=torch.int64))


class Operations(TorchDispatchMode):
    """Counts the operations that compute something, all but views and new, empty tensors, and what they read and
    write."""

    def __init__(self):
        super().__init__()
        self.count, self.kernels, self.bytes = 0, 0, collections.Counter()

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        schema, options = operation._schema, options or {}
        name, result = schema.name.partition("::")[2], operation(*arguments, **options)
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in schema.returns)
        if any("Tensor" in str(x.type) for x in schema.returns) and not is_view and name not in NOT_LAUNCHED:
            returned = {x.name for x in schema.arguments if x.is_out}
            read = tree_leaves((arguments[name in OVERWRITING :], [options[x] for x in options if x not in returned]))
            if name in PICKING:
                read = [x for x in read if isinstance(x, torch.Tensor) and not x.is_floating_point()]
                read += [result] * (name in ("embedding", "index_select"))  # as much as they write
            self.add(name, (*read, *tree_leaves(result)))
        return result

    def add(self, kind: str, operands: tuple) -> None:
        """Count an operation that reads or writes each of its operands that is a tensor once."""
        self.count += 1
        for x in operands:
            if isinstance(x, torch.Tensor):
                sizes = (size for size, stride in zip(x.shape, x.stride()) if stride)  # without repetitions
                self.bytes[kind] += math.prod(sizes) * x.element_size()


@contextlib.contextmanager
def on_no_gpu() -> Iterator[None]:
    """Create tensors on the meta device, which is treated as a GPU."""

    def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **options):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.device("meta"))
        stack.enter_context(as_if_on(90))
        stack.enter_context(replaced(torch, "is_autocast_enabled", lambda kind="cuda": False))
        stack.enter_context(replaced(F, "scaled_dot_product_attention", attend))
        yield


if __name__ == "__main__":
    cli.run(main)
