"""Time of a fine-tuning epoch with batches grouped by length and padded to their longest text, or to a fixed length:

    python benchmarks/finetune_padding.py --glue_dir DIR --tokenizer bert-base-uncased [--task sst2] [--device cuda]

Training steps on evenly spaced batches of the task's first shuffled epoch; both paddings run on each batch in turn. An
epoch's time is its number of steps times the mean step. Writes a table and its numbers.
"""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import contextlib
import time
from pathlib import Path
from statistics import mean

import torch

from benchmarks import measure, models
from src import cli
from src.glue.examples import read_task
from src.glue.finetune import collator
from src.glue.tasks import GLUE
from src.glue.tokens import tokenize
from src.jobs.training import loader
from src.lion import LionConfig, LionForSequenceClassification
from src.training import text_model


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--glue_dir", help="folder with the official GLUE TSV files (default: the Hub's nyu-mll/glue)")
    parser.add_argument("--tokenizer", default="bert-base-uncased", help="(default: bert-base-uncased)")
    parser.add_argument("--task", default="sst2", choices=GLUE, help="(default: sst2)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--length", type=int, default=128, help="fixed length (default: 128)")
    parser.add_argument("--batch", type=int, help="batch size (default: the task's)")
    parser.add_argument("--mixer", default="lion-s", help="(default: lion-s)")
    parser.add_argument("--layers", type=int, default=12, help="(default: 12, that is 23 in hydra)")
    parser.add_argument("--hidden", type=int, default=768, help="(default: 768, in heads of 64)")
    parser.add_argument("--steps", type=int, default=20, help="batches to time (default: 20)")
    parser.add_argument("--out", type=Path, help=measure.OUT)
    a = parser.parse_args(argv)
    a.out = a.out or measure.results_folder(a.device)

    task = GLUE[a.task]
    tokenizer = text_model.build_tokenizer(a.tokenizer, a.length)
    examples = tokenize(read_task(task, a.glue_dir), tokenizer, a.length).train
    batched = loader(examples, collator(tokenizer, a.length), a.batch or task.batch_size, shuffle_seed=19)
    every = max(1, len(batched) // a.steps)
    batches = [batch for number, batch in enumerate(batched) if number % every == 0][: a.steps]
    step = prepare(a, len(tokenizer), task.num_labels)
    paddings = {
        "the longest of the batch": batches,
        f"{a.length} tokens": [widen(batch, a.length) for batch in batches],
    }
    for padded in paddings.values():
        step(padded[0])
    seconds: dict[str, list[float]] = {name: [] for name in paddings}
    for number in cli.progress(range(len(batches)), desc="batches"):
        for name, padded in paddings.items():
            synchronize(a.device)
            begin = time.perf_counter()
            step(padded[number])
            synchronize(a.device)
            seconds[name].append(time.perf_counter() - begin)

    rows, lines = [], [["padded to", "tokens per text", "step, ms", "epoch, s", "relative to the longest"]]
    (fastest, _) = paddings
    for name, padded in paddings.items():
        width = mean(batch["input_ids"].shape[1] for batch in padded)
        ratio = mean(seconds[name]) / mean(seconds[fastest])
        times = {"ms": 1000 * mean(seconds[name]), "epoch_s": len(batched) * mean(seconds[name])}
        rows.append({"padding": name, "tokens": width, **times, "ratio": ratio})
        lines.append([name, f"{width:.1f}", f"{rows[-1]['ms']:.1f}", f"{rows[-1]['epoch_s']:,.0f}", f"×{ratio:.2f}"])
    real = mean(int(batch["attention_mask"].sum()) / len(batch["attention_mask"]) for batch in batches)
    title = (
        f"{task.title}, {len(examples):,} texts of {real:.1f} tokens on average, "
        f"batches of {a.batch or task.batch_size}, {a.mixer} of {models.describe([a.mixer], a.layers, a.hidden)}, "
        f"forward, backward and AdamW, over {len(batches)} of an epoch's {len(batched):,} batches:"
    )
    measure.write(a.out, f"finetune-padding-{a.device}", title, measure.machine(a.device), [lines], rows)


def widen(batch: dict[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    """Pad a batch to a fixed length; 0 pads ids, masks and segments alike."""
    extra = length - batch["input_ids"].shape[1]
    return {name: x if name == "labels" else torch.nn.functional.pad(x, (0, extra)) for name, x in batch.items()}


def prepare(a: argparse.Namespace, vocabulary: int, labels: int):
    """Return a function that takes one step on a batch."""
    torch.manual_seed(0)
    sizes = models.bert_sizes(a.mixer, a.layers, a.hidden)
    config = LionConfig(mixer=a.mixer, num_labels=labels, vocab_size=-(-vocabulary // 8) * 8, **sizes)
    model = LionForSequenceClassification(config).to(a.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    half = torch.autocast("cuda", torch.bfloat16) if a.device == "cuda" else contextlib.nullcontext()

    def step(batch: dict[str, torch.Tensor]) -> None:
        with half:
            loss = model(**{name: x.to(a.device) for name, x in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    cli.run(main)
