"""A task's inputs as shards for `main.py`, and a tokenizer that numbers them, to pretrain a model on before it is
fine-tuned on the task itself (Amos et al., "Never Train from Scratch", arXiv:2310.02980):

    python lra.py shards listops --lra_dir DIR --out listops-shards
    python main.py yamls/lra/pretrain/listops.yaml data_local=listops-shards
    python lra.py yamls/lra/lion-s.yaml lra_dir=DIR tasks_to_run=[listops] \\
        starting_checkpoint_load_path=runs/lra-pretrain-listops/latest-rank0.pt
"""

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from src.cli import check_alone, log, progress
from src.config import SEED, Rule, check_value
from src.data.tokenizers import SPECIAL_TOKENS, vocabulary_digest
from src.errors import RunFailed, UserError, reason
from src.files import check_writable, exclusive_lock, write_json
from src.lra import sources
from src.lra.listops import VOCABULARY
from src.lra.tasks import FIRST, LRA, Task

SPLITS = {"train": "train", "validation": "val"}


def main(argv: list[str]) -> None:
    check_alone("lra.py shards")
    parser = argparse.ArgumentParser(
        "lra.py shards", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("task", choices=list(LRA), metavar="TASK", help=", ".join(LRA))
    add("--lra_dir", metavar="DIR", help="folder with the official or generated files")
    add("--out", required=True, type=Path, metavar="DIR", help="writes DIR/train, DIR/val and DIR/tokenizer")
    add("--split", choices=["seed", "in_order"], default="seed", help="of Pathfinder's images, as in lra.py's config")
    add("--split_seed", type=int, default=0, help="of what is held out, as in lra.py's config (default: 0)")
    arguments = parser.parse_args(argv)
    check_value("--split_seed", arguments.split_seed, int, Rule(**SEED))
    out = arguments.out
    task = replace(LRA[arguments.task], split=arguments.split, split_seed=arguments.split_seed)
    check_writable("--out", out)
    sources.check(task, arguments.lra_dir)
    if existing := [name for name in (*SPLITS.values(), "tokenizer") if (out / name).exists()]:
        raise UserError(f"--out: {out / existing[0]} exists; remove it, or choose another folder")
    try:
        with exclusive_lock(out, "lra.py shards", "--out"):
            write(task, arguments.lra_dir, out)
    except OSError as error:
        raise RunFailed(f"cannot write to {out} ({reason(error)}); free some space and run it again") from None


def write(task: Task, lra_dir: str | None, out: Path) -> None:
    """Write the splits and the tokenizer, each under its name once it is complete."""
    from transformers import PreTrainedTokenizerFast

    unfinished = out / ".unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=numbering(task), model_max_length=task.max_length, **names)
    tokenizer.save_pretrained(unfinished / "tokenizer")
    summary = {
        "tokenizer": str(out / "tokenizer"), "vocab_size": len(tokenizer), "digest": vocabulary_digest(tokenizer),
        "mode": "max_seq_len", "length": task.max_length,
    }  # fmt: skip
    for split, name in SPLITS.items():
        write_split(task, lra_dir, split, unfinished / name, summary)
    for name in ("tokenizer", *SPLITS.values()):
        (unfinished / name).rename(out / name)
    unfinished.rmdir()
    log.info(f"tokenizer  {out / 'tokenizer'}, {len(tokenizer)} tokens; set tokenizer_name to it")


def write_split(task: Task, lra_dir: str | None, split: str, folder: Path, summary: dict) -> None:
    """Write each part of each example as a row of tokens."""
    from streaming import MDSWriter

    samples = tokens = 0
    with MDSWriter(out=str(folder), columns={"tokens": "ndarray:uint16"}) as writer:
        for parts, _ in progress(sources.read(task, lra_dir, split), desc=f"{task.title}, {split}", unit=" examples"):
            for part in parts:
                writer.write({"tokens": part.astype(np.uint16) + FIRST})
                samples += 1
                tokens += len(part)
    origin = sources.generated(task, lra_dir)
    source = {"task": task.name, "origin": origin, "split": task.split, "split_seed": task.split_seed}
    about = {"samples": samples, "documents": samples, "tokens": {**summary, "of_text": tokens, "share_cut_off": 0.0}}
    write_json(folder / "split.json", {**about, "source": source})
    log.info(f"{folder.name:10} {samples:,} rows, {tokens:,} tokens{f'; {origin}' if origin else ''}")


def numbering(task: Task):
    """Return a word-level tokenizer, one word per value."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = VOCABULARY if task.layout == "listops" else [f"<0x{number:02X}>" for number in range(task.vocabulary)]
    vocabulary = {name: number for number, name in enumerate((*SPECIAL_TOKENS, *names))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer
