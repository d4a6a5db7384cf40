"""How many operations a training step launches on a GPU, forward and backward, without a GPU:

    python benchmarks/launches.py [--texts lion-s ...] [--images lion-s ...]

In small models and batches a GPU waits for the program, whose time grows with these. Models run on PyTorch's meta
device, and kernels launch nothing. Softmax attention counts as the one operation that it is in FlashAttention. Not
counted: the optimizer; conversions by autocast, since all weights are in bfloat16; and dropout, which is 0. Writes a
table and its numbers.
"""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import measure, models, vision
from benchmarks.kernels import as_if_on, replaced
from src import cli
from src.lion import linear_attention_triton as host

TEXTS = [name for name in models.MODELS if name != models.MODERN_BERT]  # which depends on the values of a batch
NOT_LAUNCHED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", nargs="*", default=TEXTS, choices=TEXTS, metavar="NAME", help="(default: all)")
    images = vision.MODELS
    parser.add_argument("--images", nargs="*", default=images, choices=images, metavar="NAME", help="(default: all)")
    parser.add_argument("--layers", type=int, default=12, help="of text models (default: 12, that is 23 in hydra)")
    parser.add_argument("--out", type=Path, default=measure.RESULTS, help=f"(default: {measure.RESULTS})")
    a = parser.parse_args(argv)
    rows = []
    cases = [*(("texts", name) for name in a.texts), *(("images", name) for name in a.images)]
    for what, name in cli.progress(cases, desc="models"):
        failed: dict[str, str] = {}
        counts = measure.attempt(failed, "error", count, what, name, a.layers)
        rows.append({"what": what, "model": name, **(counts or failed)})
    header = ["of", "model", "forward", "backward", "both", "of which attention kernels"]
    lines = []
    for row in rows:
        numbers = ["-"] * 4
        if "error" not in row:
            both = row["forward"] + row["backward"]
            numbers = [f"{x:,}" for x in (row["forward"], row["backward"], both, row["kernels"])]
        lines.append([row["what"], row["model"], *numbers])
    size = models.describe(a.texts, a.layers, 768) if a.texts else "base size"
    title = f"Operations of a training step, of texts by models of {size}, of images by those of size small:"
    measure.write(a.out, "launches", title, {"torch": torch.__version__}, [[header, *lines]], rows)


def count(what: str, name: str, layers: int) -> dict[str, int]:
    """Count the operations of a forward and of a backward pass, and those of them that are attention kernels."""
    kernels: list[str] = []

    def launch(kernel: host.Kernel, *tensors: torch.Tensor | None) -> None:
        kernels.append(kernel.name)

    with on_no_gpu(), replaced(host.Kernel, "launch", launch):
        model, inputs = text_model(name, layers) if what == "texts" else image_model(name)
        model.to(torch.bfloat16).train()
        with Operations() as forward:
            if what == "texts":
                loss = models.masked_lm_loss(model, *inputs)
            else:
                loss = F.cross_entropy(vision.logits(model(inputs[0])).float(), inputs[1])
        of_forward = len(kernels)
        with Operations() as backward:
            loss.backward()
    of_backward = len(kernels) - of_forward
    counts = {"forward": forward.count + of_forward, "backward": backward.count + of_backward}
    return {**counts, "kernels": len(kernels)}


def text_model(name: str, layers: int) -> tuple[nn.Module, tuple]:
    """Return a model for 16 texts of 128 tokens, and such texts, as `masked_lm_loss` takes them."""
    model = models.build(name, layers, 768, 128, masked_lm=True)
    if name == models.BERT:  # as on a GPU
        models.drop_masks(model)
    ids = torch.zeros(16, 128, dtype=torch.int64)
    return model, (ids, ids, torch.zeros(614, dtype=torch.int64), None)


def image_model(name: str) -> tuple[nn.Module, tuple]:
    """Return a classifier, 16 images, and their labels."""
    model, pixels = vision.build(name, "small", 224), torch.zeros(16, 3, 224, 224, dtype=torch.bfloat16)
    return model, (pixels, torch.zeros(16, dtype=torch.int64))


class Operations(TorchDispatchMode):
    """Counts the operations that compute something: all but views and new, empty tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        schema = operation._schema
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in schema.returns)
        name = schema.name.partition("::")[2]
        computes = any("Tensor" in str(x.type) for x in schema.returns) and not is_view and name not in NOT_LAUNCHED
        self.count += computes
        return operation(*arguments, **(options or {}))


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
