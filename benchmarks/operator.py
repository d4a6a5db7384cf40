"""Time and memory of the operator against the length, beside softmax attention:

    python benchmarks/operator.py [--device cuda] [--lengths 128 1024 8192] [--dtype bfloat16]

Every form of every variant and `scaled_dot_product_attention` on one random input, forward and forward with backward,
interleaved, medians. Writes a table, its numbers and a picture.

On a GPU the forms are the kernels; pytorch-full and pytorch-chunkwise are PyTorch's; softmax is FlashAttention; and fla is
flash-linear-attention's chunk_simple_gla run in both directions, if that package is installed. Beside each time stands the
floor under it: its bytes and operations at the rates of a copy and of a matrix product, measured in the same run.
"""

import os
import sys

# Found first in this folder, this file would take the place of Python's own module `operator`.
sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import importlib
import importlib.util
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks import measure
from src import cli
from src.lion import linear_attention

VARIANTS = ("lion-lit", "lion-d", "lion-s")
FORMS = {
    "cpu": ["full", "recurrent", "chunkwise"],
    "cuda": ["full", "chunkwise", "pytorch-full", "pytorch-chunkwise", "fla"],
}
LENGTHS = [128, 256, 512, 1024, 2048, 4096, 8192, 16384]
# Where a form stops being what anyone would use: L×L matrices that fill the memory, a loop over tokens that takes minutes.
LONGEST = {
    "full": 4096, "pytorch-full": 4096, "recurrent": 2048, "chunkwise": 2**20, "pytorch-chunkwise": 2**20, "fla": 2**20,
    "softmax": 32768,
}  # fmt: skip


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--lengths", type=int, nargs="+", help="(default: 128 to 16,384; to 65,536 on a GPU)")
    parser.add_argument("--batch", type=int, default=1, help="(default: 1)")
    parser.add_argument("--heads", type=int, default=12, help="(default: 12)")
    parser.add_argument("--head_dim", type=int, default=64, help="(default: 64)")
    parser.add_argument("--chunk_size", type=int, default=128, help="of the chunkwise form (default: 128)")
    parser.add_argument("--dtype", help="(default: bfloat16 on a GPU, float32 on a CPU)")
    parser.add_argument("--forms", nargs="+", choices=[form for form in LONGEST if form != "softmax"])
    parser.add_argument("--rounds", type=int, default=9, help="each case's runs; 3 where they take long (default: 9)")
    parser.add_argument(
        "--seconds", type=float, default=20, help="that a length may take before 3 rounds do (default: 20)"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="(default: benchmarks/results)")
    a = parser.parse_args(argv)
    a.dtype = a.dtype or ("bfloat16" if a.device == "cuda" else "float32")
    a.lengths = a.lengths or [*LENGTHS, *([32768, 65536] if a.device == "cuda" else [])]
    a.forms = a.forms or [form for form in FORMS[a.device] if form != "fla" or importlib.util.find_spec("fla")]
    longest = {**LONGEST, "softmax": 65536 if a.device == "cuda" else LONGEST["softmax"]}
    rates = measure.rates(a.device, getattr(torch, a.dtype))
    shape = (a.batch, a.heads, a.head_dim, a.dtype, a.chunk_size, a.device)

    cases = [
        ("softmax", "softmax"),
        *((form, variant) for form in a.forms for variant in VARIANTS if form != "fla" or variant != "lion-lit"),
    ]
    rows = []
    for length in cli.progress(sorted(a.lengths), desc="lengths"):
        here = [(form, variant) for form, variant in cases if length <= longest[form]]
        times = {}
        for backward in (False, True):
            runs = {case: prepare(*case, length, backward, *shape) for case in here}
            times[backward] = measure.interleaved(runs, a.device, a.rounds, a.seconds)
        for form, variant in here:
            floors = [1000 * rates.floor(*least(form, variant, length, backward, *shape)) for backward in (False, True)]
            rows.append({
                "length": length, "form": form, "variant": variant,
                "forward_ms": 1000 * times[False][form, variant], "both_ms": 1000 * times[True][form, variant],
                "forward_floor_ms": floors[0], "both_floor_ms": floors[1],
                "softmax_over_this": times[True]["softmax", "softmax"] / times[True][form, variant]
                if ("softmax", "softmax") in times[True] else None,
            })  # fmt: skip
    for form, variant in cli.progress(cases, desc="memory"):
        own = [row for row in rows if (row["form"], row["variant"]) == (form, variant)]
        arguments = [(form, variant, row["length"], True, *shape) for row in own]
        warm_up = (form, variant, 16, True, *shape)
        for row, peak in zip(own, measure.peak_memory(prepare, warm_up, arguments, a.device)):
            row["peak_mib"] = peak / 2**20

    title = f"Attention of {a.heads} heads of {a.head_dim}, batch {a.batch}, {a.dtype}, chunks of {a.chunk_size}:"
    name = f"operator-{a.device}"
    facts = measure.machine(a.device)
    facts |= {"copied": f"{rates.bytes / 1e9:,.0f} GB/s", "multiplied": f"{rates.operations / 1e12:,.1f} TFLOP/s"}
    measure.write(a.out, name, title, facts, [at_a_glance(rows), table(rows, a.batch)], rows)
    draw(rows, a.out / f"{name}.png")
    print(f"picture  {a.out / name}.png")


def at_a_glance(rows: list[dict]) -> list[list[str]]:
    """A line a length: forward and backward together of the forms that matter there, and the memory of two of them."""
    numbers = {(row["length"], row["form"], row["variant"]): row for row in rows}
    times = {
        "softmax": ("softmax", "softmax"), "full, S": ("full", "lion-s"), "chunkwise, LIT": ("chunkwise", "lion-lit"),
        "D": ("chunkwise", "lion-d"), "S": ("chunkwise", "lion-s"), "full, S, PyTorch": ("pytorch-full", "lion-s"),
        "chunkwise, S, PyTorch": ("pytorch-chunkwise", "lion-s"), "fla, S": ("fla", "lion-s"),
    }  # fmt: skip
    present = {(row["form"], row["variant"]) for row in rows}
    times = {
        title: case for title, case in times.items() if case in present or case[0] in ("softmax", "full", "chunkwise")
    }
    peaks = {"peak: softmax": times["softmax"], "chunkwise, S": times["S"]}
    lines = [["length", *times, "softmax / S", *peaks]]
    for length in dict.fromkeys(row["length"] for row in rows):
        here = {case: numbers.get((length, *case)) for case in times.values()}
        softmax, chunkwise = here[times["softmax"]], here[times["S"]]
        lines.append([
            f"{length:,}", *(f"{row['both_ms']:,.{1 if row['both_ms'] >= 1 else 3}f} ms" if row else "-" for row in here.values()),
            f"×{softmax['both_ms'] / chunkwise['both_ms']:.1f}" if softmax and chunkwise else "-",
            *(f"{here[case]['peak_mib']:.0f} MiB" if here[case] else "-" for case in peaks.values()),
        ])  # fmt: skip
    return lines


def table(rows: list[dict], batch: int) -> list[list[str]]:
    lines = [["length", "form", "variant", "forward, ms", "floor", "with backward, ms", "floor", "µs a token", "softmax's time is", "peak, MiB"]]  # fmt: skip
    for row in rows:
        ratio = row["softmax_over_this"]
        lines.append([
            f"{row['length']:,}", row["form"], row["variant"], f"{row['forward_ms']:.3f}",
            f"{row['forward_floor_ms']:.3f}", f"{row['both_ms']:.3f}", f"{row['both_floor_ms']:.3f}",
            f"{1000 * row['both_ms'] / row['length'] / batch:.1f}", "-" if ratio is None else f"×{ratio:.2f}",
            f"{row['peak_mib']:.0f}",
        ])  # fmt: skip
    return lines


def prepare(form, variant, length, backward, batch, heads, head_dim, dtype, chunk_size, device):
    """A function of no arguments that runs one case once."""
    generator = torch.Generator().manual_seed(0)

    def draw_one(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, getattr(torch, dtype)).requires_grad_(backward)

    q, k, v, grad = (draw_one(batch, heads, length, head_dim) for _ in range(4))
    raw = None
    if variant in ("lion-d", "lion-s"):
        raw = draw_one(heads) if variant == "lion-d" else draw_one(batch, heads, length)

    def run() -> None:
        log_decay = None if raw is None else F.logsigmoid(raw.float())
        if form == "softmax":
            y = F.scaled_dot_product_attention(q, k, v)
        elif form == "fla":
            y = both_directions(
                q, k, v, log_decay if log_decay.ndim == 3 else log_decay[None, :, None].expand(q.shape[:3])
            )
        elif form.startswith("pytorch-"):
            module = importlib.import_module("src.lion.linear_attention")
            fused, module._FUSED = module._FUSED, False
            y = linear_attention(q, k, v, log_decay, form=form.removeprefix("pytorch-"), chunk_size=chunk_size)
            module._FUSED = fused
        else:
            y = linear_attention(q, k, v, log_decay, form=form, chunk_size=chunk_size)
        if backward:
            leaves = [x for x in (q, k, v, raw) if x is not None]
            torch.autograd.grad(y, leaves, grad)

    return run


def both_directions(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor) -> torch.Tensor:
    """LION by flash-linear-attention's causal operator, once from either end; both count the diagonal."""
    from fla.ops.simple_gla import chunk_simple_gla

    operands = [x.transpose(1, 2) for x in (q, k, v, log_decay)]  # (B, L, H, ·)
    outputs = []
    for backwards in (False, True):
        *qkv, g = (x.flip(1) for x in operands) if backwards else operands
        g = F.pad(g[:, :-1], (0, 0, 1, 0))  # there a decay acts before its token, here after it
        y, _ = chunk_simple_gla(*qkv, g=g)
        outputs.append(y.flip(1) if backwards else y)
    diagonal = (q * k).sum(-1, keepdim=True) * q.shape[-1] ** -0.5 * v
    return (outputs[0] + outputs[1]).transpose(1, 2) - diagonal


def least(form, variant, length, backward, batch, heads, head_dim, dtype, chunk_size, device) -> tuple[float, float]:
    """The bytes and the operations of matrix products that a case cannot do without, forward or with backward.

    Operands are read and results written once: q, k, v, y, and backwards q, k, v, dy, dq, dk, dv. Of the products, 2 of the
    L×L or C×C kind and 5 more backwards; of those with D×E states, an update and an output in each direction and 10 more
    backwards, or half of these where nothing decays and one state serves both.
    """
    tokens, size = batch * heads * length, getattr(torch, dtype).itemsize
    moved = (11 if backward else 4) * tokens * head_dim * size
    if variant == "lion-s":
        moved += (3 if backward else 1) * tokens * 4
    inside, states = 7 if backward else 2, 14 if backward else 4
    if form in ("full", "pytorch-full", "softmax"):
        return moved, 2 * tokens * inside * length * head_dim
    if variant == "lion-lit":
        return moved, 2 * tokens * states / 2 * head_dim**2
    columns = 0 if form == "recurrent" else min(length, chunk_size)
    return moved, 2 * tokens * (inside * columns * head_dim + states * head_dim**2)


def draw(rows: list[dict], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    styles = {"full": "-", "chunkwise": "--", "recurrent": ":", "softmax": "-", "fla": "-."}
    colors = {"softmax": "black", "lion-lit": "tab:green", "lion-d": "tab:orange", "lion-s": "tab:blue"}
    for case in dict.fromkeys((row["form"], row["variant"]) for row in rows):
        own = [row for row in rows if (row["form"], row["variant"]) == case]
        lengths = [row["length"] for row in own]
        label = case[0] if case[0] == case[1] else " ".join(case)
        for axis, key in zip(axes, ("both_ms", "peak_mib")):
            axis.plot(
                lengths,
                [row[key] for row in own],
                styles[case[0].removeprefix("pytorch-")],
                color=colors[case[1]],
                marker=".",
                label=label,
            )
    for axis, title in zip(axes, ("forward and backward, ms", "peak memory, MiB")):
        axis.set(xlabel="length", title=title)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", nonpositive="mask")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(picture, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    cli.run(main)
