"""CPU time of reading a fine-tuning task and of an epoch's batches: with tokens that are kept, and with every batch
tokenized when it is needed:

    python benchmarks/glue_reading.py --tokenizer bert-base-uncased [--task sst2 --glue_dir DIR]

Without --glue_dir, the examples are synthetic: random words, as many as in SST-2's training set. Nothing is trained.
Writes a table and its numbers.
"""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import measure
from src import cli
from src.glue import tokens
from src.glue.examples import Example, read_task
from src.glue.finetune import collator
from src.glue.tasks import GLUE, FinetuneConfig
from src.jobs.training import GroupedByLength, loader
from src.training import text_model

SST2 = {"train": 67_349, "dev": 872}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--glue_dir", help="folder with the official GLUE TSV files (default: synthetic, like SST-2)")
    parser.add_argument("--tokenizer", default="bert-base-uncased", help="(default: bert-base-uncased)")
    parser.add_argument("--task", default="sst2", choices=GLUE, help="(default: sst2; others need --glue_dir)")
    parser.add_argument("--length", type=int, default=128, help="maximum sequence length (default: 128)")
    parser.add_argument("--scale", type=float, default=1, help="made-up examples, relative to SST-2 (default: 1)")
    parser.add_argument("--out", type=Path, help=measure.OUT)
    a = parser.parse_args(argv)
    a.out = a.out or measure.results_folder("cpu")
    if a.task != "sst2" and not a.glue_dir:
        parser.error("--task: only SST-2 can be synthesized; give --glue_dir")

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in a job
    tokenizer, task = text_model.build_tokenizer(a.tokenizer, a.length), GLUE[a.task]
    with tempfile.TemporaryDirectory() as folder:
        if not a.glue_dir:
            make_up(Path(folder, task.folder), tokenizer.get_vocab(), a.scale)
        config = FinetuneConfig({}, save_folder=folder, base_run_name="benchmark", max_seq_len=a.length)
        glue_dir, file, seconds = a.glue_dir or folder, Path(folder, "tokens", "tokens.safetensors"), {}

        def timed(name: str, work: Callable[[], Any]) -> Any:
            start = time.process_time()
            found = work()
            seconds[name] = time.process_time() - start
            return found

        data = timed("read", lambda: read_task(task, glue_dir))
        kept = timed("keep", lambda: tokens.keep(data, tokenizer, config, file))
        split = timed("open", lambda: tokens.read(kept, task, tokenizer, config)).train
        size = os.path.getsize(file)
    collate = collator(tokenizer, a.length)
    batched = loader(split, collate, task.batch_size, shuffle_seed=19)
    timed("pad", lambda: [None for _ in batched])
    order = list(GroupedByLength(split.characters.tolist(), task.batch_size, 19))
    groups = [order[at : at + task.batch_size] for at in range(0, len(order), task.batch_size)]
    timed("tokenize", lambda: [collate_texts(collate, [data.train[i] for i in group], a.length) for group in groups])

    examples = sum(len(examples) for examples in (data.train, *data.validation.values()))
    rows = [
        ("once per command: read and check the examples", "read", "read"),
        ("once per command: tokenize, and write the tokens", None, "keep"),
        ("per job, until its first step: read", "read", "open"),
        ("per job and epoch: make the batches", "tokenize", "pad"),
    ]
    lines = [["CPU seconds", "without kept tokens", "with"]]
    lines += [[name, *(f"{seconds[key]:.2f}" if key else "-" for key in keys)] for name, *keys in rows]
    title = (
        f"{task.title}{'' if a.glue_dir else ', synthetic'}: {examples:,} examples, of which {len(data.train):,} to train "
        f"on, {float(split.ends[-1]) / len(split):.1f} tokens each; {len(groups):,} batches of {task.batch_size}; "
        f"{size / 2**20:.1f} MiB of tokens:"
    )
    measure.write(a.out, f"glue-reading-{a.task}-cpu", title, measure.machine("cpu"), [lines], [seconds])


def make_up(folder: Path, vocabulary: dict[str, int], scale: float) -> None:
    """Write the training and the validation set of SST-2: random words of a vocabulary, 3 to 22 of them."""
    draw, words = random.Random(0), sorted(word for word in vocabulary if word.isalpha())
    folder.mkdir()
    for name, count in SST2.items():
        texts = (" ".join(draw.choices(words, k=draw.randint(3, 22))) for _ in range(max(1, round(scale * count))))
        rows = [f"{text} \t{number % 2}\n" for number, text in enumerate(texts)]
        (folder / f"{name}.tsv").write_text("".join(["sentence\tlabel\n", *rows]))


def collate_texts(collate: Any, examples: list[Example], length: int) -> Any:
    """Tokenize a batch, padded as by a collator, as jobs did before tokens were kept."""
    return collate.tokenizer(
        *map(list, zip(*(example.texts for example in examples))),
        truncation=True,
        max_length=length,
        padding="longest",
        pad_to_multiple_of=collate.pad_to_multiple_of,
        return_tensors="pt",
    )


if __name__ == "__main__":
    cli.run(main)
