"""One optimizer step of each mixer, beside Hugging Face's BERT:  python benchmarks/train_step.py [--device cuda]

Masked language modelling at the base size on random tokens; the models take their steps in turn, medians and ratios.
Writes a table and its numbers.
"""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import contextlib
from pathlib import Path

import torch

from benchmarks import measure
from src import cli
from src.lion import LionConfig, LionForMaskedLM

MODELS = ("Hugging Face BERT", "softmax", "lion-lit", "lion-d", "lion-s")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--batch", type=int, help="texts a step (default: 8 on a CPU, 128 on a GPU)")
    parser.add_argument("--length", type=int, default=128, help="tokens a text (default: 128)")
    parser.add_argument("--layers", type=int, default=12, help="(default: 12)")
    parser.add_argument("--hidden", type=int, default=768, help="(default: 768, in heads of 64)")
    parser.add_argument("--masked", type=float, default=0.3, help="share of masked tokens (default: 0.3)")
    parser.add_argument("--dropout", type=float, default=0.1, help="also on the attention matrix (default: 0.1)")
    parser.add_argument("--precision", help="fp32 or amp_bf16 (default: amp_bf16 on a GPU, fp32 on a CPU)")
    parser.add_argument("--form", default="auto", help="of the operator (default: auto)")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each model (default: 9)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="(default: benchmarks/results)")
    a = parser.parse_args(argv)
    a.batch = a.batch or (8 if a.device == "cpu" else 128)
    a.precision = a.precision or ("fp32" if a.device == "cpu" else "amp_bf16")

    steps = {name: prepare(name, a) for name in cli.progress(MODELS, desc="models")}
    print(f"{a.rounds} rounds of {len(steps)} steps …", file=sys.stderr, flush=True)
    times = measure.interleaved(steps, a.device, a.rounds, seconds=600)
    rows = [{"model": name, "ms": 1000 * seconds} for name, seconds in times.items()]
    lines = [["model", "a step, ms", "tokens a second", "against Hugging Face BERT", "against our softmax"]]
    for name, seconds in times.items():
        lines.append([
            name, f"{1000 * seconds:.1f}", f"{a.batch * a.length / seconds:,.0f}",
            f"×{seconds / times['Hugging Face BERT']:.2f}", f"×{seconds / times['softmax']:.2f}",
        ])  # fmt: skip
    title = (
        f"A training step (forward, backward, AdamW) of {a.layers} layers of {a.hidden}, {a.batch} texts of {a.length} tokens, "
        f"{a.masked:.0%} masked, dropout {a.dropout}, {a.precision}:"
    )
    measure.write(a.out, f"train-step-{a.device}", title, measure.machine(a.device), [lines], rows)


def prepare(name: str, a: argparse.Namespace):
    """A function of no arguments that takes one step with the model `name`."""
    sizes = {
        "vocab_size": 30528, "hidden_size": a.hidden, "num_hidden_layers": a.layers, "num_attention_heads": a.hidden // 64,
        "intermediate_size": 4 * a.hidden, "hidden_dropout_prob": a.dropout, "attention_probs_dropout_prob": a.dropout,
        "max_position_embeddings": max(512, a.length),
    }  # fmt: skip
    torch.manual_seed(0)
    if name == "Hugging Face BERT":
        from transformers import BertConfig, BertForMaskedLM  # it makes tensors, before which src.cli has its say

        model = BertForMaskedLM(BertConfig(**sizes, attn_implementation="sdpa"))
    else:
        model = LionForMaskedLM(LionConfig(**sizes, mixer=name, attention_form=a.form))
    model.to(a.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(5, 30522, (a.batch, a.length), device=a.device)
    labels = ids.masked_fill(torch.rand(ids.shape, device=a.device) >= a.masked, -100)
    mask = torch.ones_like(ids)
    half = torch.autocast(a.device, torch.bfloat16) if a.precision == "amp_bf16" else contextlib.nullcontext()

    def step() -> None:
        with half:
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    cli.run(main)
