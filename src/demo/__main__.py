"""From text to a published model, small and without the Hub:  python -m src.demo [--model lion-s-tiny] [--compare]

Docstrings of the installed packages → tokenizer → shards of tokens → pretraining → fine-tuning on two tasks, with and
without pretraining → Hub folder → filled masks, by the commands of a full run. Finished steps are reused, interrupted
ones resume.
"""

import argparse
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from src import cli
from src.data.convert import is_validation
from src.data.workers import usable_cores
from src.errors import UserError
from src.files import LATEST, write_atomically
from src.tables import markdown

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("lion-lit-tiny", "lion-d-tiny", "lion-s-tiny", "bert-tiny")
FROM_SCRATCH = "-from-scratch"  # suffix of fine-tuning runs without pretraining
TASKS = ("WordOrder", "Continuation")
MAX_SEQ_LEN = 32  # of yamls/pretrain/tiny.yaml
VAL_FRACTION = 0.04  # enough validation text for a thousand examples of each task


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m src.demo", description=__doc__.split("\n\n")[1])
    parser.add_argument("--model", default="lion-s-tiny", help="a config of yamls/pretrain (default: lion-s-tiny)")
    parser.add_argument("--compare", action="store_true", help=f"compare {', '.join(MODELS)}")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for all outputs (default: demo)")
    parser.add_argument("--vocab_size", type=int, default=8192, help="tokens of the vocabulary (default: 8192)")
    parser.add_argument("--train_examples", type=int, default=8000, help="of each labelled task (default: 8000)")
    parser.add_argument("--dev_examples", type=int, default=1000, help="of each labelled task (default: 1000)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the pretraining config")
    options = parser.parse_args(argv)
    known = sorted(path.stem for path in (ROOT / "yamls/pretrain").glob("*-tiny.yaml"))
    if options.model not in known:
        raise UserError(f"MODEL={options.model} must be one of {', '.join(known)}")
    demo = Demo(options)
    demo.prepare_data()
    models = MODELS if options.compare else (options.model,)
    for model in models:
        demo.pretrain(model)
        demo.finetune(*([model] if options.compare else [model, f"{model}{FROM_SCRATCH}"]))
    if not options.compare:
        demo.export(options.model)
        demo.fill_masks(options.model)
    demo.print_results(models)


class Demo:
    """The steps, each with a folder below `--out`, and the seconds that each took."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        names = ("corpus.jsonl", "tokenizer", "token-shards", "glue", "pretrained", "finetuned", "exported")
        self.corpus, self.tokenizer, self.shards, self.tasks, self.pretrained, self.finetuned, self.exported = (
            options.out / name for name in names
        )
        self.seconds: dict[str, float] = {}

    def prepare_data(self) -> None:
        text = ["--data_files", self.corpus]
        with self.step("text", self.corpus) as missing:
            if missing:
                from src.demo.corpus import build_corpus

                build_corpus(self.corpus)
        with self.step("tokenizer", self.tokenizer / "tokenizer.json") as missing:
            if missing:
                run(["src/train_tokenizer.py", *text, "--vocab_size", self.options.vocab_size, "--out", self.tokenizer])
        with self.step("shards", self.shards / "train", self.shards / "val") as missing:
            if missing:
                splits = ["--splits", *(folder.name for folder in missing), "--val_fraction", VAL_FRACTION]
                tokens = ["--tokenizer", self.tokenizer, "--max_seq_len", MAX_SEQ_LEN]
                run(["src/convert_dataset.py", *text, *splits, *tokens, "--out_root", self.shards])
        files = [self.tasks / task / f"{split}.tsv" for task in TASKS for split in ("train", "dev")]
        with self.step("labelled tasks", *files) as missing:
            if missing:
                from src.demo.tasks import write_tasks

                sizes = (self.options.train_examples, self.options.dev_examples)
                write_tasks(self.corpus, self.tasks, functools.partial(is_validation, fraction=VAL_FRACTION), *sizes)

    def pretrain(self, model: str) -> None:
        config = str(ROOT / f"yamls/pretrain/{model}.yaml")
        paths = [f"data_local={self.shards}", f"tokenizer_name={self.tokenizer}"]
        paths.append(f"save_folder={self.pretrained / model}")
        with self.step(f"pretraining {model}"):
            run(["main.py", config, *paths, *self.precision(config, *paths), *self.options.overrides])

    def precision(self, *config: str) -> list[str]:
        """Return the faster precision on a CPU as an argument. It is measured once, so that a resumed run keeps it."""
        path = self.options.out / "precision"
        if not path.exists():
            import torch

            from src.demo.precision import faster_precision
            from src.mlm.config import PretrainConfig
            from src.training.config import load_config

            if torch.cuda.is_available():  # a GPU's default is the faster one
                return []
            options = load_config(PretrainConfig, "main.py", "", [*config, *self.options.overrides])
            write_atomically(path, faster_precision(options, self.options.vocab_size))
        return [f"precision={path.read_text()}"]

    def finetune(self, model: str, *baselines: str) -> None:
        """Fine-tune on both tasks, side by side: the pretrained encoder and baselines with random weights."""
        start = f"starting_checkpoint_load_path={self.pretrained / model / LATEST}"
        shared = ["yamls/finetune-glue/demo.yaml", f"glue_dir={self.tasks}", start, *self.precision()]
        with self.step(f"fine-tuning {model}"):
            commands = []
            for name in (model, *baselines):
                own = [f"base_run_name={name}", f"save_folder={self.finetuned / name}"]
                commands.append(["glue.py", *shared, *own, *(["from_scratch=true"] if name in baselines else [])])
            run(*commands)

    def export(self, model: str) -> None:
        folder = self.exported / model
        action, option = ("verify", "--folder") if folder.exists() else ("export", "--out")
        with self.step("Hub folder"):
            run(["src/hub.py", action, "--checkpoint", self.pretrained / model / LATEST, option, folder])

    def fill_masks(self, model: str) -> None:
        """Fill masks with the Hub folder as its users would: without this repository and the Hub."""
        sentences = masked_sentences(self.corpus, self.tokenizer)
        program = [sys.executable, ROOT / "src/demo/fill_masks.py", (self.exported / model).resolve()]
        program += [sentence for sentence, _ in sentences]
        with self.step("filled masks"):
            if subprocess.run(program, cwd=self.options.out, env={**os.environ, "HF_HUB_OFFLINE": "1"}).returncode:
                raise SystemExit(1)
            print(f"  (hidden words: {', '.join(word for _, word in sentences)})", flush=True)

    def print_results(self, models: Sequence[str]) -> None:
        """Print a table, draw curves and scores, and name their files and the seconds of each step."""
        from src.jobs import report
        from src.mlm.task import CURVES
        from src.training.run_log import draw_curves

        lines, runs = [], []
        for model in models:
            summary = json.loads((self.pretrained / model / "summary.json").read_text())
            for name, when in (model, "after"), (f"{model}{FROM_SCRATCH}", "before"):
                if (path := self.finetuned / name / "report.json").exists():
                    runs.append((name, rows := json.loads(path.read_text())["tasks"]))
                    scores = (f"{100 * row['mean']:.2f}" for row in rows)
                    seconds = f"{summary['seconds']:.0f} s" if name == model else "-"
                    accuracy = f"{summary[when]['accuracy']:.2%}"
                    lines.append([name, f"{summary['parameters']:,}", accuracy, *scores, seconds])
        majority = (f"{100 * row['majority']:.2f}" for row in rows)
        lines.append(["*baseline*", "-", f"{summary['after']['most_frequent_token']:.2%}", *majority, "-"])
        titles = (f"{row['title']}, {row['metrics'][0]}" for row in rows)
        lines.insert(0, ["model", "parameters", "masked accuracy", *titles, "pretraining"])
        note = "Baseline: always the most frequent token or the majority class."
        table, curves, scores = (self.options.out / name for name in ("results.md", "curves.png", "scores.png"))
        table.write_text(f"{markdown(lines)}\n\n{note}\n")
        draw_curves([(model, self.pretrained / model) for model in models], CURVES, curves, "Pretraining on docstrings")
        report.draw(runs, scores, "Fine-tuning on tasks made from docstrings")
        print(f"\n{table.read_text()}\nresults  {table}, {curves}, {scores}")
        print(f"runs     {self.pretrained}, {self.finetuned}  (tensorboard --logdir {self.pretrained})")
        if not self.options.compare:
            print(f"export   {self.exported / models[0]}")
        steps = (*self.seconds.items(), ("total", sum(self.seconds.values())))
        print("\n" + "\n".join(f"{title:40}{seconds:6.0f} s" for title, seconds in steps), flush=True)

    @contextmanager
    def step(self, title: str, *outputs: Path) -> Iterator[list[Path]]:
        """Announce and time a step; yield the outputs that do not exist yet."""
        print(f"\n=== {title}", flush=True)
        missing = [path for path in outputs if not path.exists()]
        if outputs and not missing:
            print(f"{os.path.commonpath(outputs)} exists already", flush=True)
        start = time.monotonic()
        yield missing
        self.seconds[title] = time.monotonic() - start


def run(*commands: Sequence[object]) -> None:
    """Print and run commands of this project side by side, showing all but the first afterwards; exit if one fails."""
    environment = {**os.environ}
    if len(commands) > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, usable_cores() // len(commands)))
    processes: list[subprocess.Popen] = []
    with tempfile.TemporaryFile("w+") as output:
        for command in commands:
            words = [str(word).removeprefix(f"{ROOT}/") for word in command]
            print(f"$ python {' '.join(words)}", flush=True)
            program = [str(ROOT / word) if word.endswith((".py", ".yaml")) else word for word in words]
            streams = {"stdout": output, "stderr": subprocess.STDOUT} if processes else {}
            processes.append(subprocess.Popen([sys.executable, *program], env=environment, **streams))
        try:
            status = max(process.wait() for process in processes)
        finally:
            for process in processes:
                process.terminate()
        output.seek(0)
        print(output.read(), end="", flush=True)
    if status:
        raise SystemExit(status)


def masked_sentences(corpus: Path, tokenizer: Path, count: int = 3) -> list[tuple[str, str]]:
    """Return validation sentences with a word of the vocabulary masked, and the word; a hash chooses them."""
    from src.demo.corpus import split_sentences

    vocabulary = set((tokenizer / "vocab.txt").read_text(encoding="utf-8").split("\n"))
    texts = (json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines())
    hashed = ((hashlib.sha256(text.encode()).hexdigest(), text) for text in texts if is_validation(text, VAL_FRACTION))
    found: list[tuple[str, str]] = []
    for digest, text in sorted(hashed):
        words = split_sentences(text.split("\n")[0])[0].split()
        plain = [i for i, word in enumerate(words) if re.fullmatch(r"[a-z]{4,}", word) and word in vocabulary]
        if 8 <= len(words) <= 18 and plain:
            place = plain[int(digest, 16) % len(plain)]
            found.append((" ".join([*words[:place], "[MASK]", *words[place + 1 :]]), words[place]))
    return found[:count]


if __name__ == "__main__":
    cli.run(main)
