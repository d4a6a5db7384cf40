"""Time and memory of the operator by length, compared with softmax attention:

    python benchmarks/operator.py [--device cuda] [--lengths 128 1024 8192] [--dtype bfloat16] [--heads 24]

Every form of every variant and `scaled_dot_product_attention` on one random input, forward and forward with backward;
interleaved runs, medians. Writes a table, its numbers and a picture.

On a GPU, full and chunkwise are the kernels, pytorch-full and pytorch-chunkwise the forms in PyTorch, softmax is
FlashAttention (PyTorch's memory-efficient attention in float32 or with --mask, which FlashAttention does not take),
softmax-cudnn cuDNN's, and fla is chunk_simple_gla of flash-linear-attention in both directions, if that package is
installed. Two times are measured there: with the program that launches the kernels, and on the device alone, by
replaying a CUDA graph.

Each time's floor is the longer of its bytes at a copy's rate and its operations at a matrix product's, both measured in
the same run. q, k, v and the gradient are (B, L, H, D) in memory, as in the model; log decays are given, in float32.

hydra is the attention of a Hydra layer: all heads share q and k, which differ between the directions, as do log decays
and log weights; the diagonal is given. The 12 heads of 64 by default are LION's base size; --heads 24 is Hydra's. The
names of the files then include the number of heads.
"""

import os
import sys

# If this folder came first, this file would replace Python's own module `operator`.
sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import contextlib
import importlib
import math
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import measure
from src import cli, plots
from src.errors import first_line
from src.lion import linear_attention
from src.lion.hydra_attention import Scans, hydra_attention
from src.lion.machine import keep_freed_memory

VARIANTS = ("lion-lit", "lion-d", "lion-s", "hydra")
FORMS = {
    "cpu": ["full", "recurrent", "chunkwise"],
    "cuda": ["full", "chunkwise", "pytorch-full", "pytorch-chunkwise", "softmax-cudnn", "fla"],
}
LENGTHS = [128, 256, 512, 1024, 2048, 4096, 8192, 16384]
# Beyond these lengths a form is impractical: L×L matrices that fill the memory, a loop over tokens that takes minutes.
LONGEST = {
    "cpu": {"full": 4096, "recurrent": 2048, "chunkwise": 2**20, "softmax": 32768},
    "cuda": {
        "full": 65536, "chunkwise": 2**20, "recurrent": 2048, "softmax": 65536, "softmax-cudnn": 65536,
        "pytorch-full": 4096, "pytorch-chunkwise": 2**20, "fla": 2**20,
    },
}  # fmt: skip
SOFTMAX = ("softmax", "softmax")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--lengths", type=int, nargs="+", help="(default: 128 to 16,384; to 65,536 on a GPU)")
    parser.add_argument("--batch", type=int, default=1, help="(default: 1)")
    parser.add_argument(
        "--tokens", type=int, help="tokens of all texts, instead of --batch, so that all lengths fill a GPU"
    )
    parser.add_argument("--heads", type=int, default=12, help="(default: 12; hydra's base size has 24)")
    parser.add_argument("--head_dim", type=int, default=64, help="(default: 64)")
    parser.add_argument(
        "--chunk_size", type=int, default=128, help="tokens per chunk of the chunkwise form (default: 128)"
    )
    parser.add_argument("--dtype", help="(default: bfloat16 on a GPU, float32 on a CPU)")
    parser.add_argument("--mask", action="store_true", help="mask the last tenth of each text as padding")
    parser.add_argument("--forms", nargs="+", choices=[form for form in LONGEST["cuda"] if form != "softmax"])
    parser.add_argument("--rounds", type=int, default=9, help="runs per case, or as few as 3 if slow (default: 9)")
    parser.add_argument("--seconds", type=float, default=20, help="limit per length, after 3 rounds (default: 20)")
    parser.add_argument("--out", type=Path, help=measure.OUT)
    a = parser.parse_args(argv)
    a.out = a.out or measure.results_folder(a.device)
    usual = "bfloat16" if a.device == "cuda" else "float32"
    a.dtype = a.dtype or usual
    a.lengths = a.lengths or [*LENGTHS, *([32768, 65536] if a.device == "cuda" else [])]
    a.forms = a.forms or [form for form in FORMS[a.device] if form != "fla" or imports("fla.ops.simple_gla")]
    longest = {**LONGEST["cuda"], **LONGEST[a.device]}
    if a.device == "cpu":
        keep_freed_memory()  # as in training
    rates = measure.rates(a.device, getattr(torch, a.dtype))
    facts = measure.machine(a.device)
    facts |= {"copied": f"{rates.bytes / 1e9:,.0f} GB/s", "multiplied": f"{rates.operations / 1e12:,.1f} TFLOP/s"}
    texts = f"{a.tokens:,} tokens" if a.tokens else f"batch {a.batch}"
    texts += ", a tenth of each text masked" if a.mask else ""
    title = f"Attention of {a.heads} heads of {a.head_dim}, {texts}, {a.dtype}, chunks of {a.chunk_size}:"
    unusual = [a.dtype] * (a.dtype != usual) + [f"{a.heads}-heads"] * (a.heads != 12)
    unusual += [f"of-{a.head_dim}"] * (a.head_dim != 64) + [f"batch-{a.batch}"] * (a.batch != 1) + ["masked"] * a.mask
    name = "-".join(["operator", a.device, *unusual])

    cases = [SOFTMAX] + [(form, variant) for form in a.forms for variant in variants(form)]
    rows: list[dict] = []
    for length in cli.progress(sorted(a.lengths), desc="lengths"):
        here = [case for case in cases if length <= longest[case[0]]]
        batch = max(1, a.tokens // length) if a.tokens else a.batch
        new = timed(here, length, (batch, a.heads, a.head_dim, a.dtype, a.chunk_size, a.device), rates, a)
        rows += new
        if a.device == "cuda":  # on a CPU a case is measured from its smallest to its largest length
            fill_peaks(new, a)
        measure.write(a.out, name, title, facts, [at_a_glance(rows), table(rows)], rows, show=False)
    if a.device == "cpu":
        fill_peaks(rows, a)
    measure.write(a.out, name, title, facts, [at_a_glance(rows), table(rows)], rows)
    described = f"{a.heads} heads of {a.head_dim}, {texts}, {a.dtype}, {measure.device_name(a.device)}"
    draw(rows, a.out / f"{name}.png", f"Operator, {described}")
    print(f"picture  {a.out / name}.png")


def variants(form: str) -> tuple[str, ...]:
    """Return what a form computes."""
    if form == "softmax-cudnn":
        return ("softmax",)
    if form == "fla":
        return ("lion-d", "lion-s")
    return VARIANTS


def imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    except Exception as error:
        print(f"{module} is omitted: {first_line(error)}", file=sys.stderr)
        return False
    return True


def timed(
    cases: list[tuple[str, str]], length: int, shape: tuple, rates: measure.Rates, a: argparse.Namespace
) -> list[dict]:
    """Return a row of times for each case at one length."""
    failed: dict[tuple[str, str], str] = {}
    times, alone = {}, {}
    for kind, backward in (("forward", False), ("both", True)):
        given = (length, backward, *shape, a.mask)
        runs = {case: measure.attempt(failed, case, prepare, *case, *given) for case in cases}
        runs = {case: run for case, run in runs.items() if case not in failed}
        times[kind] = measure.interleaved(runs, a.device, a.rounds, a.seconds, failed)
        alone[kind] = {}
        if a.device == "cuda":
            alone[kind] = {
                case: measure.attempt({}, case, measure.device_time, runs[case], seconds)
                for case, seconds in times[kind].items()
            }
        del runs
    rows = []
    for case in cases:
        row = {"length": length, "batch": shape[0], "form": case[0], "variant": case[1]}
        if case[1] == "softmax" and a.device == "cuda":
            row["backend"] = backend(case[0], getattr(torch, a.dtype), a.mask).name
        for kind, backward in (("forward", False), ("both", True)):
            seconds, on_device = times[kind].get(case), alone[kind].get(case)
            moved, operations = least(*case, length, backward, *shape)
            fastest = on_device or seconds
            row |= {
                f"{kind}_ms": seconds and 1000 * seconds,
                f"{kind}_device_ms": on_device and 1000 * on_device,
                f"{kind}_floor_ms": 1000 * rates.floor(moved, operations),
                f"{kind}_bandwidth": fastest and moved / rates.bytes / fastest,
                f"{kind}_products": fastest and operations / rates.operations / fastest,
            }
        beside, own = ([x["both"].get(y) for x in (alone, times)] for y in (SOFTMAX, case))
        pair = next(((x, y) for x, y in zip(beside, own) if x and y), None)
        row["softmax_over_this"] = pair and pair[0] / pair[1]
        rows.append({**row, "peak_mib": None, "error": failed.get(case)})
    return rows


def fill_peaks(rows: list[dict], a: argparse.Namespace) -> None:
    """Measure the peak memory of each row that has times."""
    fixed = (a.heads, a.head_dim, a.dtype, a.chunk_size, a.device, a.mask)
    rows = [row for row in rows if row["both_ms"]]
    for case in dict.fromkeys((row["form"], row["variant"]) for row in rows):
        own = [row for row in rows if (row["form"], row["variant"]) == case]
        arguments = [(*case, row["length"], True, row["batch"], *fixed) for row in own]
        failed: dict = {}
        warm_up = (*case, measure.WARM_UP_TOKENS[a.device], True, 1, *fixed)
        peaks = measure.attempt(failed, case, measure.peak_memory, prepare, warm_up, arguments, a.device)
        for row, peak in zip(own, peaks or []):
            row["peak_mib"] = peak / 2**20
        for row in own if failed else []:
            row["error"] = failed[case]


def at_a_glance(rows: list[dict]) -> list[list[str]]:
    """Return one line per length: forward and backward time of the forms in use, and the memory of two of them.
    "hydra / S" is hydra's time over that of S in the same form."""
    numbers = {(row["length"], row["form"], row["variant"]): row for row in rows}
    times = {
        "softmax": SOFTMAX,
        "cuDNN": ("softmax-cudnn", "softmax"),
        "full, S": ("full", "lion-s"),
        "chunkwise, LIT": ("chunkwise", "lion-lit"),
        "D": ("chunkwise", "lion-d"),
        "S": ("chunkwise", "lion-s"),
        "full, S, PyTorch": ("pytorch-full", "lion-s"),
        "chunkwise, S, PyTorch": ("pytorch-chunkwise", "lion-s"),
        "fla, S": ("fla", "lion-s"),
        "hydra": ("chunkwise", "hydra"),
        "chunkwise, hydra, PyTorch": ("pytorch-chunkwise", "hydra"),
    }
    present = {(row["form"], row["variant"]) for row in rows}
    always = ("softmax", "full", "chunkwise")
    times = {
        title: case for title, case in times.items() if case in present or (case[0] in always and case[1] != "hydra")
    }
    hydra = next((case for case in times.values() if case[1] == "hydra"), None)
    peaks = {"peak: softmax": times["softmax"], "chunkwise, S": times["S"]}
    lines = [["length", *times, *(["hydra / S"] if hydra else []), "softmax / S", *peaks]]
    for length in dict.fromkeys(row["length"] for row in rows):
        here = {case: numbers.get((length, *case)) for case in times.values()}
        of_s = [(here.get(times[title]) or {}).get("softmax_over_this") for title in ("full, S", "S")]
        ratio = max(filter(None, of_s), default=None)  # of the faster form
        milliseconds = [shown(row and best(row), "ms") for row in here.values()]
        memory = [here[case] and here[case]["peak_mib"] for case in peaks.values()]
        memory = ["-" if mib is None else f"{mib:.0f} MiB" for mib in memory]
        ratios = ["-" if ratio is None else f"×{ratio:.1f}"]
        if hydra:
            own, beside = (
                row and best(row) for row in (numbers.get((length, hydra[0], x)) for x in ("hydra", "lion-s"))
            )
            ratios.insert(0, f"×{own / beside:.2f}" if own and beside else "-")
        lines.append([f"{length:,}", *milliseconds, *ratios, *memory])
    return lines


def best(row: dict) -> float | None:
    """Return the milliseconds of forward and backward, on the device alone if measured there."""
    return row["both_device_ms"] or row["both_ms"]


def shown(number: float | None, unit: str = "") -> str:
    """Format a number to three digits."""
    if number is None:
        return "-"
    digits = max(0, 2 - math.floor(math.log10(number))) if number > 0 else 0
    return f"{number:,.{digits}f} {unit}".rstrip()


def table(rows: list[dict]) -> list[list[str]]:
    """Return one line per case. Bandwidth and products: fraction of a copy's and of a large product's rate reached."""
    on_device = any(row["both_device_ms"] for row in rows)
    measured = ("ms", "device_ms", "floor_ms") if on_device else ("ms", "floor_ms")
    titles = [" on the device" if key == "device_ms" else " floor" if key == "floor_ms" else ", ms" for key in measured]
    columns = [f"{kind}{title}" for kind in ("forward", "with backward") for title in titles]
    columns = ["length", "batch", "form", "variant", *columns, "bandwidth", "products"]
    lines = [[*columns, "µs per token", "softmax's time is", "peak, MiB"]]
    for row in rows:
        ratio, tokens = row["softmax_over_this"], row["length"] * row["batch"]
        form = f"{row['form']} ({row['backend']})" if "backend" in row else row["form"]
        times = [f"{kind}_{key}" for kind in ("forward", "both") for key in measured]
        lines.append([
            f"{row['length']:,}", str(row["batch"]), form, row["variant"],
            *("failed" if row[key] is None and row["error"] else shown(row[key]) for key in times),
            *("-" if row[key] is None else f"{row[key]:.0%}" for key in ("both_bandwidth", "both_products")),
            "-" if row["both_ms"] is None else shown(1000 * best(row) / tokens),
            "-" if ratio is None else f"×{ratio:.2f}",
            "-" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}",
        ])  # fmt: skip
    return lines


def prepare(form, variant, length, backward, batch, heads, head_dim, dtype, chunk_size, device, masked=False):
    """Return a function that runs one case once."""
    generator = torch.Generator(device).manual_seed(0)

    def draw_one(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    half = getattr(torch, dtype)
    shared = 1 if variant == "hydra" else heads
    q, k = (draw_one(batch, length, shared, head_dim).to(half).transpose(1, 2) for _ in range(2))
    v, grad = (draw_one(batch, length, heads, head_dim).to(half).transpose(1, 2) for _ in range(2))
    log_decay, of_hydra = None, []
    if variant in ("lion-d", "lion-s"):
        log_decay = F.logsigmoid(draw_one(*([heads] if variant == "lion-d" else [batch, length, heads])))
        log_decay = log_decay if variant == "lion-d" else log_decay.transpose(1, 2)
    if variant == "hydra":
        of_hydra = [draw_one(batch, length, 1, head_dim).to(half).transpose(1, 2) for _ in range(2)]
        steps = F.softplus(draw_one(batch, length, 2, heads) - 4.6).permute(2, 0, 3, 1)  # near 0.01, as initialized
        of_hydra += [-steps, steps.log(), draw_one(batch, length, heads).mT]
    mask = torch.arange(length, device=device).expand(batch, -1) < 0.9 * length if masked else None
    leaves = [x.requires_grad_(backward) for x in (q, k, v, log_decay, *of_hydra) if x is not None]

    def run() -> None:
        if form.startswith("softmax"):
            # One implementation on a GPU, so that no other replaces it silently.
            only = contextlib.nullcontext() if device == "cpu" else sdpa_kernel(backend(form, half, masked))
            with only:
                y = F.scaled_dot_product_attention(q, k, v, None if mask is None else mask[:, None, None])
        elif form == "fla":
            per_token = log_decay if log_decay.ndim == 3 else log_decay[None, :, None].expand(q.shape[:3])
            y = both_directions(q, k if mask is None else k * mask[:, None, :, None], v, per_token)
        else:
            module = importlib.import_module("src.lion.linear_attention")
            use_triton = module.USE_TRITON
            module.USE_TRITON = use_triton and not form.startswith("pytorch-")
            how = {"form": form.removeprefix("pytorch-"), "chunk_size": chunk_size, "mask": mask}
            try:
                if variant == "hydra":
                    q_future, k_future, log_decays, log_weights, diagonal = of_hydra
                    scans = Scans((q, q_future), (k, k_future), log_decays, log_weights)
                    y = hydra_attention(v, scans, diagonal, **how)
                else:
                    y = linear_attention(q, k, v, log_decay, **how)
            finally:  # or the kernels would not run once these had needed too much memory
                module.USE_TRITON = use_triton
        if backward:
            torch.autograd.grad(y, leaves, grad)

    return run


def backend(form: str, dtype: torch.dtype, masked: bool) -> SDPBackend:
    """Return the implementation of softmax attention on a GPU: the form's, or the fastest that takes such arguments."""
    if form == "softmax-cudnn":
        return SDPBackend.CUDNN_ATTENTION
    flash = dtype in (torch.bfloat16, torch.float16) and not masked
    return SDPBackend.FLASH_ATTENTION if flash else SDPBackend.EFFICIENT_ATTENTION


def both_directions(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor) -> torch.Tensor:
    """Compute LION with flash-linear-attention's causal operator from both ends; each includes the diagonal."""
    from fla.ops.simple_gla import chunk_simple_gla

    operands = [x.transpose(1, 2) for x in (q, k, v, log_decay)]  # (B, L, H, ·)
    outputs = []
    for backwards in (False, True):
        *qkv, g = (x.flip(1) for x in operands) if backwards else operands
        g = F.pad(g[:, :-1], (0, 0, 1, 0))  # its decays act before their token, ours after it
        y, _ = chunk_simple_gla(*qkv, g=g)
        outputs.append(y.flip(1) if backwards else y)
    diagonal = (q * k).sum(-1, keepdim=True) * q.shape[-1] ** -0.5 * v
    return (outputs[0] + outputs[1]).transpose(1, 2) - diagonal


def least(form, variant, length, backward, batch, heads, head_dim, dtype, chunk_size, device) -> tuple[float, float]:
    """Return the minimum bytes and matrix-product operations of a case, forward or with backward.

    Operands are read and results written once: q, k, v, y, and in the backward pass q, k, v, dy, dq, dk, dv;
    numbers per token, such as log decays, in float32. There are 2 products with L×L or C×C matrices, q·k and one
    with v, and 5 more in the backward pass, 3 of them for q and k; with D×E states an update and an output in each
    direction and 10 more in the backward pass, or half of these without decay, as one state serves both directions.
    In hydra all heads share two pairs of q and k.
    """
    tokens, size = batch * heads * length, getattr(torch, dtype).itemsize
    pairs = 2 / heads if variant == "hydra" else 1  # of q and k, per head
    moved = (5 + 6 * pairs if backward else 2 + 2 * pairs) * tokens * head_dim * size
    moved += {"lion-s": 1, "hydra": 5}.get(variant, 0) * (3 if backward else 1) * tokens * 4
    inside, states = 3 + 4 * pairs if backward else 1 + pairs, 14 if backward else 4
    if variant == "softmax" or form in ("full", "pytorch-full"):
        return moved, 2 * tokens * inside * length * head_dim
    if variant == "lion-lit":
        return moved, 2 * tokens * states / 2 * head_dim**2
    columns = 0 if form == "recurrent" else min(length, chunk_size)
    return moved, 2 * tokens * (inside * columns * head_dim + states * head_dim**2)


def draw(rows: list[dict], picture: Path, title: str) -> None:
    figure, axes = plots.subplots(columns=2, title=title)
    styles = {"full": "-", "chunkwise": "--", "recurrent": ":", "softmax": "-", "softmax-cudnn": "--", "fla": "-."}
    for form, variant in dict.fromkeys((row["form"], row["variant"]) for row in rows):
        own = [row for row in rows if (row["form"], row["variant"]) == (form, variant)]
        lengths = [row["length"] for row in own]
        times = [best(row) or math.nan for row in own]
        peaks = [math.nan if row["peak_mib"] is None else row["peak_mib"] for row in own]
        pytorch = form.startswith("pytorch-")
        for axis, heights in zip(axes[0], (times, peaks)):
            axis.plot(
                lengths, heights, styles[form.removeprefix("pytorch-")], color=plots.color(variant), marker=".",
                alpha=0.4 if pytorch else 1, label=form if form == variant else f"{form} {variant}",
            )  # fmt: skip
    plots.label_axes(axes[0, 0], "forward and backward", "tokens", "ms", log=True)
    plots.label_axes(axes[0, 1], "peak memory", "tokens", "MiB", log=True)
    plots.save(figure, picture)


if __name__ == "__main__":
    cli.run(main)
