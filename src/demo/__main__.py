"""The whole road at a small size, on real text and without the Hub:  python -m src.demo [--model lion-s-tiny] [--compare]

Docstrings of the installed packages → tokenizer → shards → pretraining → fine-tuning on two tasks, with and without
pretraining → a Hub folder → filled masks. Every step is a command of this project that a full run uses, and is printed
before it runs. What is finished is used again; what was interrupted goes on.
"""

import argparse
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from src import cli
from src.data.convert import is_validation
from src.errors import UserError
from src.tables import markdown

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("lion-lit-tiny", "lion-d-tiny", "lion-s-tiny", "bert-tiny")
VAL_FRACTION = 0.04  # enough validation text for a thousand examples of each task


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m src.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="lion-s-tiny", help="a YAML of yamls/pretrain by its name (default: lion-s-tiny)"
    )
    parser.add_argument("--compare", action="store_true", help=f"run {', '.join(MODELS)} and print one table")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for everything (default: demo)")
    parser.add_argument("--vocab_size", type=int, default=8192, help="tokens of the vocabulary (default: 8192)")
    parser.add_argument("--train_examples", type=int, default=8000, help="of each labelled task (default: 8000)")
    parser.add_argument("--dev_examples", type=int, default=1000, help="of each labelled task (default: 1000)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the pretraining config")
    arguments = parser.parse_args(argv)
    known = sorted(path.stem for path in (ROOT / "yamls/pretrain").glob("*-tiny.yaml"))
    if arguments.model not in known:
        raise UserError(f"MODEL={arguments.model} is none of {', '.join(known)}")
    demo = Demo(arguments.out, arguments.overrides)
    demo.prepare_data(arguments.vocab_size, arguments.train_examples, arguments.dev_examples)
    if arguments.compare:
        for model in MODELS:
            demo.pretrain(model)
            demo.finetune(model)
        demo.compare(MODELS)
    else:
        demo.pretrain(arguments.model)
        demo.finetune(arguments.model)
        demo.finetune(arguments.model, from_scratch=True)
        demo.export(arguments.model)
        demo.show(arguments.model)


class Demo:
    """The steps of the road, each in a folder below `out`, and the seconds that each took."""

    def __init__(self, out: Path, overrides: list[str]):
        self.out = out
        self.overrides = overrides
        self.corpus, self.tokenizer, self.shards, self.tasks = (
            out / name for name in ("corpus.jsonl", "tokenizer", "shards", "glue")
        )
        self.seconds: dict[str, float] = {}

    def run(self, model: str) -> Path:
        return self.out / "runs" / model

    def tasks_run(self, model: str, from_scratch: bool = False) -> Path:
        return self.out / "runs" / f"{model}-tasks{'-from-scratch' if from_scratch else ''}"

    def checkpoint(self, model: str) -> Path:
        return self.run(model) / "latest-rank0.pt"

    def prepare_data(self, vocab_size: int, train_examples: int, dev_examples: int) -> None:
        """Text, tokenizer, shards and labelled tasks."""
        validation = functools.partial(is_validation, fraction=VAL_FRACTION)
        if self.begin("text: the docstrings of the installed packages", self.corpus):
            from src.demo.corpus import build_corpus

            build_corpus(self.corpus)
        if self.begin("tokenizer", self.tokenizer / "tokenizer.json"):
            self.command("src/train_tokenizer.py", "--data_files", self.corpus, "--vocab_size", vocab_size, "--out", self.tokenizer)  # fmt: skip
        missing = [split for split in ("train", "val") if not (self.shards / split).exists()]
        if self.begin("shards", self.shards if not missing else None):
            self.command("src/convert_dataset.py", "--data_files", self.corpus, "--val_fraction", VAL_FRACTION,
                         "--splits", *missing, "--out_root", self.shards)  # fmt: skip
        files = [
            self.tasks / task / name for task in ("WordOrder", "Continuation") for name in ("train.tsv", "dev.tsv")
        ]
        if self.begin("labelled tasks", self.tasks if all(file.exists() for file in files) else None):
            from src.demo.tasks import write_tasks

            write_tasks(self.corpus, self.tasks, validation, train_examples=train_examples, dev_examples=dev_examples)
        self.end()

    def pretrain(self, model: str) -> None:
        self.begin(f"pretraining {model}")
        self.command("main.py", f"yamls/pretrain/{model}.yaml", f"data_local={self.shards}", f"tokenizer_name={self.tokenizer}",
                     f"save_folder={self.run(model)}", *fastest_precision(), *self.overrides)  # fmt: skip

    def finetune(self, model: str, from_scratch: bool = False) -> None:
        """Both tasks, from the pretrained encoder or, as a baseline, from one of the same sizes with random weights."""
        folder = self.tasks_run(model, from_scratch)
        self.begin(f"fine-tuning {model}{' without its pretraining' if from_scratch else ''}")
        self.command("glue.py", "yamls/finetune-glue/demo.yaml", f"base_run_name={folder.name}", f"glue_dir={self.tasks}",
                     f"starting_checkpoint_load_path={self.checkpoint(model)}", f"save_folder={folder}", *fastest_precision(),
                     *(["from_scratch=true"] if from_scratch else []))  # fmt: skip

    def export(self, model: str) -> None:
        folder = self.out / "hub" / model
        self.begin(f"a Hub folder of {model}")
        if folder.exists():
            self.command("src/hub.py", "verify", "--checkpoint", self.checkpoint(model), "--folder", folder)
        else:
            self.command("src/hub.py", "export", "--checkpoint", self.checkpoint(model), "--out", folder)
        self.end()

    def show(self, model: str) -> None:
        """Fill masks with the Hub folder, and print scores and places."""
        from src.jobs import report

        self.begin("filling masks in sentences of the validation text, most likely words first")
        # From another folder and without this repository: what any user of the Hub folder has.
        program = [sys.executable, str(ROOT / "src/demo/fill_masks.py"), str((self.out / "hub" / model).resolve())]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        sentences = masked_sentences(self.corpus, self.tokenizer)
        if subprocess.run(program + [shown for shown, _ in sentences], cwd=self.out, env=environment).returncode:
            raise SystemExit(1)
        print(f"  (hidden were: {', '.join(word for _, word in sentences)})", flush=True)
        self.end()

        summary, scores, baseline = self.summary(model), self.scores(model), self.scores(model, from_scratch=True)
        picture = self.tasks_run(model) / "with-and-without-pretraining.png"
        report.draw([("pretrained", scores), ("without pretraining", baseline)], picture)
        lines = [["", "baseline", "without pretraining", "pretrained"]]
        lines.append(["masked accuracy", f"{summary['after']['most_frequent_token']:.2%} (most frequent token)",
                      f"{summary['before']['accuracy']:.2%}", f"{summary['after']['accuracy']:.2%}"])  # fmt: skip
        for row, base in zip(scores, baseline):
            lines.append([f"{row['title']}, {row['metrics'][0]}", f"{100 * row['majority']:.2f} (majority class)",
                          f"{100 * base['mean']:.2f}", f"{100 * row['mean']:.2f}"])  # fmt: skip
        print(f"\n{markdown(lines)}\n")
        for name, place in (
            ("checkpoint", self.checkpoint(model)),
            ("curves", self.run(model) / "curves.png"),
            ("metrics", self.run(model) / "metrics.jsonl"),
            ("TensorBoard", f"{self.run(model) / 'tensorboard'}  (tensorboard --logdir {self.out / 'runs'})"),
            (
                "scores",
                f"{self.tasks_run(model) / 'report.md'}, {self.tasks_run(model, from_scratch=True) / 'report.md'}",
            ),
            ("scores, drawn", picture),
            ("Hub folder", self.out / "hub" / model),
        ):
            print(f"{name:14}{place}")
        self.print_seconds()

    def compare(self, models: tuple[str, ...]) -> None:
        """One table and one picture of several models."""
        from src.training.run_log import draw_curves

        scores = {model: self.scores(model) for model in models}
        summaries = {model: self.summary(model) for model in models}
        rows = scores[models[0]]
        lines = [["model", "parameters", "masked accuracy", *(f"{row['title']}, {row['metrics'][0]}" for row in rows), "training time"]]  # fmt: skip
        for model, summary in summaries.items():
            lines.append([
                model, f"{summary['parameters']:,}", f"{summary['after']['accuracy']:.2%}",
                *(f"{100 * row['mean']:.2f}" for row in scores[model]),
                f"×{summary['seconds'] / summaries['bert-tiny']['seconds']:.2f}",
            ])  # fmt: skip
        lines.append(["*baseline*", "-", f"{summaries[models[0]]['after']['most_frequent_token']:.2%}",
                      *(f"{100 * row['majority']:.2f}" for row in rows), "-"])  # fmt: skip
        table = markdown(lines)
        note = "Baseline: always the most frequent token, always the majority class. Training time: against bert-tiny."
        picture = self.out / "compare.png"
        draw_curves([(model, self.run(model)) for model in models], picture)
        (self.out / "compare.md").write_text(f"{table}\n\n{note}\n")
        print(f"\n{table}\n\n{note}\n\n{'table':14}{self.out / 'compare.md'}\n{'curves':14}{picture}")
        self.print_seconds()

    def summary(self, model: str) -> dict:
        return json.loads((self.run(model) / "summary.json").read_text())

    def scores(self, model: str, from_scratch: bool = False) -> list[dict]:
        return json.loads((self.tasks_run(model, from_scratch) / "report.json").read_text())["tasks"]

    def begin(self, title: str, finished: Path | None = None) -> bool:
        """Announce a step. False if what it makes is there already."""
        self.end()
        print(f"\n=== {title}", flush=True)
        if finished is not None and finished.exists():
            print(f"{finished} is there already", flush=True)
            return False
        self.step, self.started = title, time.monotonic()
        return True

    def end(self) -> None:
        if getattr(self, "step", None):
            self.seconds[self.step.split(":")[0].split(" in sentences")[0]] = time.monotonic() - self.started
            self.step = None

    def command(self, script: str, *arguments) -> None:
        """Run a command of this project as a user would, showing it first; stop with it if it fails."""
        words = [script, *map(str, arguments)]
        print(f"$ python {' '.join(words)}", flush=True)
        absolute = [str(ROOT / word) if word.endswith((".py", ".yaml")) else word for word in words]
        status = subprocess.run([sys.executable, *absolute]).returncode
        if status:
            raise SystemExit(status)

    def print_seconds(self) -> None:
        print("\n" + "\n".join(f"{title:56}{seconds:6.0f} s" for title, seconds in self.seconds.items()))
        print(f"{'in all':56}{sum(self.seconds.values()):6.0f} s", flush=True)


def fastest_precision() -> list[str]:
    """bfloat16 where the processor multiplies it in hardware: half the time of float32. A GPU chooses it by itself."""
    import torch

    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return ["precision=amp_bf16"] if native and not torch.cuda.is_available() else []


def masked_sentences(corpus: Path, tokenizer: Path, count: int = 3) -> list[tuple[str, str]]:
    """Sentences of validation passages with a word of the vocabulary hidden, and the word; chosen by hash, not by eye."""
    from src.demo.corpus import split_sentences

    vocabulary = set((tokenizer / "vocab.txt").read_text(encoding="utf-8").split("\n"))
    texts = (json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines())
    passages = sorted(
        (hashlib.sha256(text.encode()).hexdigest(), text) for text in texts if is_validation(text, VAL_FRACTION)
    )
    found = []
    for digest, text in passages:
        for sentence in split_sentences(text.split("\n")[0])[:1]:
            words = sentence.split()
            plain = [
                place for place, word in enumerate(words) if re.fullmatch(r"[a-z]{4,}", word) and word in vocabulary
            ]
            if 8 <= len(words) <= 18 and plain:
                place = plain[int(digest, 16) % len(plain)]
                found.append((" ".join([*words[:place], "[MASK]", *words[place + 1 :]]), words[place]))
        if len(found) == count:
            break
    return found


if __name__ == "__main__":
    cli.run(main)
