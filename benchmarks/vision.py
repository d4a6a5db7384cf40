"""Speed of image models beside Hugging Face's ViT and timm's DeiT:  python benchmarks/vision.py [--device cuda]

A training step at size small and 224 pixels, then inference of one image of several sizes at size tiny, with its peak
memory, all on random pixels. The models take turns; medians and ratios. Writes tables, their numbers and a picture.
"""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import measure
from benchmarks.models import allow_many_shapes
from src import cli, plots
from src.lion import LionForImageClassification, LionVisionConfig
from src.lion.cpu import flush_denormals
from src.lion.machine import keep_freed_memory

VIT, DEIT = "Hugging Face ViT", "timm DeiT"
OURS = {
    "softmax": {"mixer": "softmax"}, "lion-lit": {"mixer": "lion-lit"}, "lion-d": {"mixer": "lion-d"},
    "lion-d-natural": {"mixer": "lion-d", "patch_order": "snakes"}, "lion-s": {"mixer": "lion-s"},
    "lion-s-natural": {"mixer": "lion-s", "patch_order": "snakes"},
}  # fmt: skip
MODELS = (VIT, DEIT, *OURS)
SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}
PATCH, CLASSES = 16, 1000


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    add("--models", nargs="+", default=MODELS, choices=MODELS, metavar="NAME", help="(default: all)")
    add("--only", choices=("train", "inference"), help="(default: both)")
    add("--train_size", default="small", choices=SIZES, help="(default: small)")
    add("--train_pixels", type=int, default=224, help="(default: 224)")
    add("--batch", type=int, help="images per training step (default: 4 on a CPU, 128 on a GPU)")
    add("--size", default="tiny", choices=SIZES, help="for inference (default: tiny)")
    add("--pixels", type=int, nargs="+", default=[224, 512, 1024], help="for inference (default: 224 512 1024)")
    add("--images", type=int, default=1, help="per inference (default: 1)")
    add("--precision", choices=("fp32", "bf16"), help="(default: bf16 on a GPU, fp32 on a CPU)")
    about = "torch.compile every model, as `compile_config` does, in this mode (without a mode: default)"
    modes = ("default", "reduce-overhead", "max-autotune")
    add("--compile", nargs="?", const="default", choices=modes, help=about)
    add("--rounds", type=int, default=9, help="(default: 9)")
    add("--out", type=Path, help=measure.OUT)
    a = parser.parse_args(argv)
    a.out, a.pixels = a.out or measure.results_folder(a.device), sorted(set(a.pixels))
    a.batch = a.batch or (4 if a.device == "cpu" else 128)
    a.precision = a.precision or ("fp32" if a.device == "cpu" else "bf16")
    if a.device == "cpu":
        keep_freed_memory()  # as in training
        flush_denormals()
    compiled = f"compiled-{a.compile}" if a.compile else None
    other = f"{a.train_size}-and-{a.size}" if (a.train_size, a.size) != ("small", "tiny") else None
    own = a.precision if a.precision != ("fp32" if a.device == "cpu" else "bf16") else None
    name = "-".join(filter(None, ["vision", a.device, a.only, other, own, compiled]))
    rows: list[dict[str, Any]] = []
    tables: list[list[list[str]]] = []
    facts = measure.machine(a.device)
    title = (
        f"A training step (forward, backward, AdamW) of size {a.train_size}, {a.batch} images of {a.train_pixels} pixels; "
        f"inference of size {a.size}, {a.images} image{'s' * (a.images > 1)} at a time; patches of {PATCH} pixels, "
        f"{a.precision}{f', compiled, {a.compile}' if a.compile else ''}; ratios to {VIT} and {DEIT}:"
    )
    for what, run in (("train", train), ("inference", inference)):
        if a.only in (None, what):
            table, found = run(a)
            tables.append(table)
            rows += found
            measure.write(a.out, name, title, facts, tables, rows, show=False)
    measure.write(a.out, name, title, facts, tables, rows)
    if a.only != "train":
        draw(rows, a.out / f"{name}.png", f"One image, size {a.size}, {a.precision}, {measure.device_name(a.device)}")
        print(f"picture  {a.out / name}.png")


def build(name: str, size: str, pixels: int) -> nn.Module:
    """Return an untrained model without dropout."""
    width, heads = SIZES[size]
    torch.manual_seed(0)
    if name == VIT:
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=width, num_hidden_layers=12, num_attention_heads=heads, intermediate_size=4 * width,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, image_size=pixels, patch_size=PATCH,
            num_labels=CLASSES, attn_implementation="sdpa",
        )  # fmt: skip
        return ViTForImageClassification(config)
    if name == DEIT:
        import timm

        return timm.create_model(f"deit_{size}_patch16_224", img_size=pixels, num_classes=CLASSES)
    config = LionVisionConfig(
        pixels,
        PATCH,
        hidden_size=width,
        num_hidden_layers=12,
        num_attention_heads=heads,
        num_labels=CLASSES,
        **OURS[name],
    )
    return LionForImageClassification(config)


def logits(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.logits


def autocast(a: argparse.Namespace) -> contextlib.AbstractContextManager:
    return torch.autocast(a.device, torch.bfloat16) if a.precision == "bf16" else contextlib.nullcontext()


def prepare_step(name: str, a: argparse.Namespace) -> Callable[[], None]:
    """Return a function that takes one training step."""
    model = build(name, a.train_size, a.train_pixels).to(a.device).train()
    if a.compile:
        allow_many_shapes()
        model.compile(mode=a.compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    pixels = torch.randn(a.batch, 3, a.train_pixels, a.train_pixels, device=a.device)
    labels = torch.randint(CLASSES, (a.batch,), device=a.device)

    def step() -> None:
        with autocast(a):
            loss = F.cross_entropy(logits(model(pixels)).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def prepare_pass(
    name: str, size: str, pixels: int, images: int, device: str, precision: str, compiled: str | None = None
) -> Callable[[], None]:
    """Return a function that classifies images."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32  # converted once, not in every pass
    model = build(name, size, pixels).to(device, dtype).eval()
    if compiled:
        allow_many_shapes()
        model.compile(mode=compiled)
    batch = torch.randn(images, 3, pixels, pixels, device=device, dtype=dtype)

    def run() -> None:
        with torch.no_grad():
            model(batch)

    return run


def train(a: argparse.Namespace) -> tuple[list[list[str]], list[dict[str, Any]]]:
    failed: dict[str, str] = {}
    steps = {name: measure.attempt(failed, name, prepare_step, name, a) for name in a.models}
    steps = {name: step for name, step in steps.items() if step}
    warm_ups = 3 if a.compile == "reduce-overhead" else 1  # the second is recorded
    times = measure.interleaved(steps, a.device, a.rounds, 600, failed, warm_ups=warm_ups)
    lines = [["training step", "ms", "images per second", *ratio_titles(a.models)]]
    for name, seconds in times.items():
        lines.append([name, f"{1000 * seconds:,.1f}", f"{a.batch / seconds:,.1f}", *ratios(seconds, times, a.models)])
    rows = [{"what": "train", "model": name, "pixels": a.train_pixels, "ms": 1000 * s} for name, s in times.items()]
    return lines, rows + [{"what": "train", "model": name, "error": error} for name, error in failed.items()]


def inference(a: argparse.Namespace) -> tuple[list[list[str]], list[dict[str, Any]]]:
    lines, rows = [["inference", "pixels", "ms", "images per second", "peak memory, MB", *ratio_titles(a.models)]], []
    peaks = {}
    fixed = a.images, a.device, a.precision, a.compile
    for name in a.models:
        given = [(name, a.size, pixels, *fixed) for pixels in a.pixels]
        warm_up = (name, a.size, PATCH * 2 if a.device == "cpu" else min(a.pixels), *fixed)
        peaks[name] = measure.attempt({}, name, measure.peak_memory, prepare_pass, warm_up, given, a.device)
    for number, pixels in enumerate(a.pixels):
        failed: dict[str, str] = {}
        cases = {name: measure.attempt(failed, name, prepare_pass, name, a.size, pixels, *fixed) for name in a.models}
        times = measure.interleaved({n: c for n, c in cases.items() if c}, a.device, a.rounds, 60, failed)
        for name, seconds in times.items():
            peak = peaks[name][number] / 1e6 if peaks[name] else None
            memory = "-" if peak is None else f"{peak:,.0f}"
            shown = [f"{1000 * seconds:,.1f}", f"{a.images / seconds:,.1f}", memory]
            lines.append([name, f"{pixels}", *shown, *ratios(seconds, times, a.models)])
            rows.append({"what": "inference", "model": name, "pixels": pixels, "ms": 1000 * seconds, "peak_mb": peak})
        rows += [
            {"what": "inference", "model": name, "pixels": pixels, "error": error} for name, error in failed.items()
        ]
    return lines, rows


def ratio_titles(names: Any) -> list[str]:
    return [f"relative to {name}" for name in (VIT, DEIT) if name in names]


def ratios(seconds: float, times: dict[str, float], names: Any) -> list[str]:
    compared = [name for name in (VIT, DEIT) if name in names]
    return [f"×{seconds / times[name]:.2f}" if name in times else "-" for name in compared]


def draw(rows: list[dict[str, Any]], picture: Path, title: str) -> None:
    """Draw time and peak memory of inference against the side of an image."""
    rows = [row for row in rows if row["what"] == "inference" and "ms" in row]
    names = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plots.subplots(columns=2, title=title)
    for axis, key, label in zip(axes[0], ("ms", "peak_mb"), ("time, ms", "peak memory, MB")):
        for name, shade in zip(names, plots.colors(names)):
            points = [(row["pixels"], row[key]) for row in rows if row["model"] == name and row[key]]
            axis.plot(*zip(*points), marker="o", color=shade, label=name)
        plots.label_axes(axis, "", "pixels of a side", label, log=True)
    plots.save(figure, picture)


if __name__ == "__main__":
    cli.run(main)
