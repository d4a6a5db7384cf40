"""Registers and shared memory of the GPU kernels, without a GPU:  python benchmarks/kernels.py [--cards 80 90]

Compiles every kernel to machine code as a forward and a backward pass would launch it, for A100 (80) and H100 (90), and
lists registers per thread, bytes spilled to memory and shared memory per program. Writes a table and its numbers.
"""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import itertools
import math
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import measure
from src import cli
from src.lion import linear_attention_triton as host

FORMS = ("full", "full, dropout", "chunkwise")
SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # bytes available to a program


class Launch(NamedTuple):
    """A kernel and the arguments it would have been launched with."""

    kernel: Any
    arguments: tuple
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name or, for `product`, which of the output and the gradients of q, k and v it computes."""
        name = self.kernel.__name__.removesuffix("_kernel")
        if name != "product":
            return name
        _, _, _, x, _, out_x, *_ = self.arguments
        return "output" if x is None else "query_gradients" if out_x is None else "key_gradients"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", type=int, nargs="+", default=[80, 90], help="compute capabilities (default: 80 90)")
    parser.add_argument("--head_dims", type=int, nargs="+", default=[32, 64, 128], help="(default: 32 64 128)")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--decays", nargs="+", default=["none", "token"], choices=("none", "head", "token"))
    parser.add_argument("--out", type=Path, default=measure.RESULTS, help="(default: benchmarks/results)")
    a = parser.parse_args(argv)
    rows = []
    cases = [
        (card, dtype, size, form, decay)
        for card, dtype, size, form, decay in itertools.product(a.cards, a.dtypes, a.head_dims, FORMS, a.decays)
        if size <= host.LARGEST_HEAD[getattr(torch, dtype)]
    ]
    for card, dtype, size, form, decay in cli.progress(cases, desc="kernels"):
        for launch in launches(form, decay, getattr(torch, dtype), size, size):
            failed: dict[str, str] = {}
            needs = measure.attempt(failed, "error", compiled, launch, card) or failed
            if needs.get("shared", 0) > SHARED.get(card, math.inf):
                needs = {"error": f"{needs['shared'] / 1024:.0f} KiB of shared memory exceed the GPU's"}
            case = {"card": card, "dtype": dtype, "head_dim": size, "form": form, "decay": decay}
            rows.append({**case, "kernel": launch.name, **needs})
    facts = {"triton": host.triton.__version__, "torch": torch.__version__}
    header = ["card", "type", "head", "form", "decay", "kernel", "warps", "registers", "spilled, bytes", "shared, KiB"]
    keys = ["dtype", "head_dim", "form", "decay", "kernel", "warps", "registers", "spilled"]
    lines = [
        [f"sm_{row['card']}", *(str(row[key]) for key in keys), f"{row['shared'] / 1024:.0f}"]
        for row in rows
        if "error" not in row
    ]
    measure.write(a.out, "kernels", "Resources of each kernel:", facts, [[header, *lines]], rows)


def launches(form: str, decay: str, dtype: torch.dtype, d: int, e: int, length: int = 512) -> list[Launch]:
    """Return the kernels that a forward and a backward pass launch, with a mask, on operands as the model has them."""
    B, H = 2, 12
    qkv = torch.empty(B, length, H, 2 * d + e, dtype=dtype).transpose(1, 2)
    q, k, v = qkv.split([d, d, e], dim=-1)
    shape = {"none": None, "head": (H,), "token": (B, H, length)}[decay]
    log_decay = None if shape is None else torch.empty(shape)
    mask = torch.ones(B, length, dtype=torch.bool)
    chunk_size = 128 if form == "chunkwise" else 0
    seed, dropout_p = (torch.empty(B, H, dtype=torch.long), 0.1) if form == "full, dropout" else (None, 0.0)
    tensors, numbers = (q, k, v, log_decay, mask, None, seed), (d**-0.5, chunk_size, dropout_p)
    recorded: list[Launch] = []

    def record(kernel, programs: int, *arguments, **options) -> None:
        recorded.append(Launch(kernel, arguments, options))

    launch, host._launch = host._launch, record
    try:
        call = host._Call(*tensors, None, *numbers)
        host._launch_backward(call.output(), *tensors, call.sums, *numbers, log_decay is not None)
    finally:
        host._launch = launch
    return recorded


def specialized(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple, list]]:
    """Return the types, constants and divisibilities that determine a kernel's compiled code."""
    kernel, signature, constants, attributes = launch.kernel, {}, {}, {}
    unspecialized = {parameter.num for parameter in kernel.params if parameter.do_not_specialize}
    for place, (name, value) in enumerate(zip(kernel.arg_names, launch.arguments)):
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + POINTERS[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif value is None or (value == 1 and isinstance(value, int) and place not in unspecialized):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, int):
            signature[name] = "i32"
            if value % 16 == 0 and place not in unspecialized:
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    for name, value in launch.options.items():
        if name in kernel.arg_names:
            signature[name], constants[name] = "constexpr", value
    return {name: signature[name] for name in kernel.arg_names}, constants, attributes


def compiled(launch: Launch, card: int) -> dict[str, int]:
    """Compile one kernel for a compute capability: registers per thread, spilled bytes, shared bytes, warps.

    Raises the errors of Triton and ptxas.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    given = {name: launch.options[name] for name in ("num_warps", "num_stages") if name in launch.options}
    source = ASTSource(launch.kernel, *specialized(launch))
    binary = host.triton.compile(source, target=GPUTarget("cuda", card, 32), options=given)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        tool = Path(host.triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage.stdout + usage.stderr))
    return {
        "registers": int(usage["REG"]), "spilled": int(usage["STACK"]) + int(usage["LOCAL"]),
        "shared": binary.metadata.shared, "warps": binary.metadata.num_warps,
    }  # fmt: skip


POINTERS = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", torch.uint8: "u8",
    torch.int64: "i64", torch.int32: "i32",
}  # fmt: skip

if __name__ == "__main__":
    cli.run(main)
