"""What the GPU kernels need of a card, without a card:  python benchmarks/kernels.py [--cards 80 90] [--head_dims 64]

Compiles every kernel as a forward and a backward pass would start it, down to machine code, for A100 (80) and H100 (90), and
lists registers a thread, bytes spilled to memory and shared memory a program. Writes a table and its numbers.
"""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import math
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import measure
from src import cli
from src.lion import linear_attention_triton as kernels

FORMS = ("full", "full, dropout", "chunkwise")
SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # bytes that a program may have


class Start(NamedTuple):
    """A kernel as it would have been started."""

    kernel: Any
    arguments: tuple
    options: dict[str, Any]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", type=int, nargs="+", default=[80, 90], help="compute capabilities (default: 80 90)")
    parser.add_argument("--head_dims", type=int, nargs="+", default=[32, 64, 128], help="(default: 32 64 128)")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--decays", nargs="+", default=["none", "token"], choices=("none", "head", "token"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="(default: benchmarks/results)")
    a = parser.parse_args(argv)
    rows = []
    cases = [
        (card, dtype, size, form, decay)
        for card in a.cards for dtype in a.dtypes for size in a.head_dims for form in FORMS for decay in a.decays
        if size <= kernels.LARGEST_HEAD[getattr(torch, dtype)]
    ]  # fmt: skip
    for card, dtype, size, form, decay in cli.progress(cases, desc="kernels"):
        for start in starts(form, decay, getattr(torch, dtype), size, size):
            failed: dict[str, str] = {}
            needs = measure.attempt(failed, "error", compiled, start, card) or failed
            if needs.get("shared", 0) > SHARED.get(card, math.inf):
                needs = {"error": f"{needs['shared'] / 1024:.0f} KiB of shared memory are more than the card has"}
            name = start.kernel.__name__.strip("_").removesuffix("_kernel")
            rows.append({"card": card, "dtype": dtype, "head_dim": size, "form": form, "decay": decay, "kernel": name, **needs})  # fmt: skip
    facts = {"triton": kernels.triton.__version__, "torch": torch.__version__}
    header = ["card", "type", "head", "form", "decay", "kernel", "warps", "registers", "spilled, bytes", "shared, KiB"]
    lines = [
        [f"sm_{row['card']}", row["dtype"], str(row["head_dim"]), row["form"], row["decay"], row["kernel"], str(row["warps"]),
         str(row["registers"]), str(row["spilled"]), f"{row['shared'] / 1024:.0f}"]
        for row in rows if "error" not in row
    ]  # fmt: skip
    measure.write(a.out, "kernels", "What each kernel needs:", facts, [[header, *lines]], rows)


def starts(
    form: str, decay: str, dtype: torch.dtype, d: int, e: int, length: int = 512, heads: int = 12
) -> list[Start]:
    """The kernels that a forward and a backward pass start, with a mask, on operands as the model has them."""
    B, H = 2, heads
    qkv = torch.empty(B, length, H, 2 * d + e, dtype=dtype).transpose(1, 2)
    q, k, v = qkv.split([d, d, e], dim=-1)
    shape = {"none": None, "head": (H,), "token": (B, H, length)}[decay]
    log_decay = None if shape is None else torch.empty(shape)
    mask = torch.ones(B, length, dtype=torch.bool)
    chunk_size = 128 if form == "chunkwise" else 0
    seed, dropout_p = (torch.empty(B, H, dtype=torch.long), 0.1) if form == "full, dropout" else (None, 0.0)
    arguments = q, k, v, log_decay, mask, None, seed, d**-0.5, chunk_size, dropout_p
    recorded: list[Start] = []

    def record(kernel, programs: int, *arguments, **options) -> None:
        recorded.append(Start(kernel, arguments, options))

    launch, kernels._start = kernels._start, record
    try:
        y, sums = kernels._start_forward(*arguments)
        kernels._start_backward(y, *arguments, log_decay is not None, sums)
    finally:
        kernels._start = launch
    return recorded


def specialized(start: Start) -> tuple[dict[str, str], dict[str, Any], dict[tuple, list]]:
    """The types, constants and divisibilities that a kernel is compiled for: starts that agree in them share its code."""
    kernel, signature, constants, attributes = start.kernel, {}, {}, {}
    open_ = {parameter.num for parameter in kernel.params if parameter.do_not_specialize}
    for place, (name, value) in enumerate(zip(kernel.arg_names, start.arguments)):
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + POINTERS[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif value is None or (value == 1 and isinstance(value, int) and place not in open_):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, int):
            signature[name] = "i32"
            if value % 16 == 0 and place not in open_:
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    for name, value in start.options.items():
        if name in kernel.arg_names:
            signature[name], constants[name] = "constexpr", value
    return {name: signature[name] for name in kernel.arg_names}, constants, attributes


def compiled(start: Start, card: int) -> dict[str, int]:
    """Compile one kernel for a card of this compute capability: registers a thread, spilled bytes, shared bytes, warps.

    Raises whatever Triton or ptxas does of a kernel that cannot be compiled.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    given = {name: start.options[name] for name in ("num_warps", "num_stages") if name in start.options}
    source = ASTSource(start.kernel, *specialized(start))
    binary = kernels.triton.compile(source, target=GPUTarget("cuda", card, 32), options=given)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        tool = Path(kernels.triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said.stdout + said.stderr))
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
