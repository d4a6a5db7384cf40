"""From text to a small published model, without the Hub:  python -m src.demo [--model lion-s-tiny] [--compare]

Docstrings of the installed packages → tokenizer → shards of tokens → pretraining → fine-tuning on two tasks, with and
without pretraining → Hub folder → filled masks → text embeddings → answers to questions, by the commands of a full run.
Finished steps are reused, interrupted ones resume. With --compare, several models are pretrained and fine-tuned, each
with one or more seeds.
"""

import argparse
import contextlib
import functools
import importlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from src import cli
from src.data.convert import is_validation
from src.data.readers import find_files
from src.data.workers import usable_cores
from src.demo import search, tasks
from src.demo.comparison import print_comparison
from src.demo.corpus import build_corpus, join_documents
from src.demo.steps import ROOT, Steps, discard, in_rounds, run, share_cores
from src.errors import UserError
from src.files import LATEST, check_writable, is_newer, write_atomically, write_json
from src.tables import markdown

MODELS = ("lion-lit-tiny", "lion-d-tiny", "lion-s-tiny", "lion-s-plus-tiny", "hydra-tiny", "bert-tiny")
FROM_SCRATCH = "-from-scratch"  # suffix of fine-tuning runs without pretraining
EMBEDDER = "-embedder"  # suffix of the embedding model
MAX_SEQ_LEN = 32  # of yamls/pretrain/tiny.yaml
SEEDS = (17, 19)  # of the first run: pretraining, fine-tuning
TRIAL_STEPS = 6  # per precision, after one to warm up
PREPARING = ("vocab_size", "length", "data_files", "val_fraction")  # options that the data depend on
VAL_FRACTION = 0.04  # enough validation text for a thousand examples of each task
IS_VALIDATION = functools.partial(is_validation, fraction=VAL_FRACTION)
NEEDED = {  # options → the one that they are for
    "models": "compare", "seeds": "compare", "jobs": "compare", "pretrain_only": "compare",
    "data_files": "pretrain_only", "length": "pretrain_only", "val_fraction": "data_files",
}  # fmt: skip


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m src.demo", description=__doc__.split("\n\n")[1])
    add = parser.add_argument
    add("--model", default="lion-s-tiny", help="a config of yamls/pretrain (default: lion-s-tiny)")
    add("--out", type=Path, default=Path("demo"), help="folder for all outputs (default: demo)")
    add("--vocab_size", type=int, default=8192, help="tokens of the vocabulary (default: 8192)")
    add("--train_examples", type=int, default=8000, help="of each labelled task (default: 8000)")
    add("--dev_examples", type=int, default=1000, help="of each labelled task (default: 1000)")
    add("--search_pairs", type=int, default=10240, help="to train the search on (default: 10240)")
    add("--compare", action="store_true", help="compare models, by default " + ", ".join(MODELS))
    add("--models", nargs="+", metavar="NAME", help="with --compare: configs of yamls/pretrain, or paths of others")
    add("--seeds", type=int, default=1, help="with --compare: runs of each model (default: 1)")
    add("--pretrain_only", action="store_true", help="with --compare: omit the tasks")
    add("--jobs", type=int, default=1, help="with --compare: runs at a time, which share the cores (default: 1)")
    add("--data_files", nargs="+", metavar="GLOB", help="with --pretrain_only: your own text")
    add(
        "--val_fraction",
        type=float,
        default=VAL_FRACTION,
        help="with --data_files: of it, to evaluate on (default: 0.04)",
    )
    add(
        "--length",
        type=int,
        help="with --pretrain_only: tokens of a row, documents end to end (default: 32, truncated)",
    )
    add("overrides", nargs="*", metavar="key=value", help="changes to the pretraining config")
    options = parser.parse_args(argv)
    named = options.models or (MODELS if options.compare else [options.model])
    names = [name for name in named if "=" not in name or name.endswith(".yaml")]
    options.overrides += [name for name in named if name not in names]  # which follow the names
    for name, needed in NEEDED.items():
        if getattr(options, name) != parser.get_default(name) and not getattr(options, needed):
            raise UserError(f"--{name} needs --{needed}; add it")
    if options.compare and options.search_pairs != parser.get_default("search_pairs"):
        raise UserError("--search_pairs has no effect with --compare, which trains no search; omit one of them")
    for name, least in (("seeds", 1), ("jobs", 1), ("length", 3), ("search_pairs", 1)):
        if (value := getattr(options, name)) is not None and value < least:
            raise UserError(f"--{name} {value} must be at least {least}")
    demo = Demo(options)
    models = [demo.name(name) for name in names]
    demo.check_prepared()
    demo.prepare_data()
    rounds = [[functools.partial(demo.train, model, number) for model in models] for number in range(options.seeds)]

    def after_round(number: int) -> None:
        if options.compare:
            print_comparison(options.out, {model: [run_name(model, s) for s in range(number + 1)] for model in models})

    in_rounds(rounds, options.jobs, after_round)
    demo.print_end(models)


def run_name(model: str, number: int) -> str:
    """Return the name of a model's run; that of the first seed is the model's."""
    return model if number == 0 else f"{model}-seed-{SEEDS[0] + number}"


class Demo(Steps):
    def __init__(self, options: argparse.Namespace):
        super().__init__(out := options.out)
        self.options = options
        self.corpus, self.tokenizer, self.shards = out / "corpus.jsonl", out / "tokenizer", out / "token-shards"
        self.tasks, self.pretrained, self.finetuned = out / "glue", out / "pretrained", out / "finetuned"
        self.embedded, self.exported, self.searched = out / "embedded", out / "exported", out / "search"
        self.yamls: dict[str, Path] = {}  # name of a model → its config
        self.lock = threading.Lock()  # of --jobs

    def name(self, model: str) -> str:
        """Return the name of a model, given as that or as the path of its config. Raises UserError."""
        path = Path(model) if model.endswith(".yaml") else ROOT / f"yamls/pretrain/{model}.yaml"
        if not path.is_file() or path.stem in self.yamls:
            known = ", ".join(sorted(path.stem for path in (ROOT / "yamls/pretrain").glob("*-tiny.yaml")))
            problem = "is named twice; omit one" if path.is_file() else f"must be one of {known}, or a YAML file"
            raise UserError(f"model {model} {problem}")
        self.yamls[path.stem] = path.resolve()
        return path.stem

    def check_prepared(self) -> None:
        """Raise UserError if `--out` holds data that were prepared with other options."""
        path, now = self.out / "prepared.json", {name: getattr(self.options, name) for name in PREPARING}
        before = json.loads(path.read_text()) if path.exists() else now
        if changed := [name for name in PREPARING if before.get(name, now[name]) != now[name]]:
            name, value = changed[0], before[changed[0]]
            shown = " ".join(value) if isinstance(value, list) else value
            was = f"without --{name}" if value is None else f"with --{name} {shown}"
            raise UserError(f"the data in {self.out} were prepared {was}; repeat that, or choose another --out")
        check_writable("--out", self.out)
        self.out.mkdir(parents=True, exist_ok=True)
        write_json(path, now)

    def prepare_data(self) -> None:
        """Make the tokenizer, the shards and, unless only pretraining is wanted, the labelled tasks."""
        options, corpus, outputs = self.options, self.corpus, []
        joined = options.length or options.data_files
        if options.data_files:
            find_files(options.data_files)  # which names a pattern that matches nothing
            text = ["--data_files", *options.data_files]
        else:
            self.step("text", [corpus], lambda: build_corpus(corpus))
            if joined:
                corpus = self.out / "documents.jsonl"
                self.step("documents", [corpus], lambda: join_documents(self.corpus, corpus))
            text = ["--data_files", corpus]
        command = ["src/train_tokenizer.py", *text, "--vocab_size", options.vocab_size, "--out", self.tokenizer]
        imports = functools.partial(importlib.import_module, "src.lion")  # for `choose_precision`
        self.step("tokenizer", [self.tokenizer / "tokenizer.json"], lambda: run(command, meanwhile=imports))
        missing = [split for split in ("train", "val") if not (self.shards / split).exists()]
        convert = ["src/convert_dataset.py", *text, "--splits", *missing, "--val_fraction", options.val_fraction]
        rows = "--concat_tokens" if joined else "--max_seq_len"
        convert += ["--tokenizer", self.tokenizer, rows, options.length or MAX_SEQ_LEN, "--out_root", self.shards]
        label, title = None, "shards"
        if not options.pretrain_only:
            title = "shards, labelled tasks"
            outputs = [self.tasks / task / f"{split}.tsv" for task in tasks.TASKS for split in ("train", "dev")]
            sizes = (options.train_examples, options.dev_examples)
            label = functools.partial(tasks.write_tasks, corpus, self.tasks, IS_VALIDATION, *sizes)
        outputs += [self.shards / "train", self.shards / "val"]
        self.step(title, outputs, lambda: run(*([convert] if missing else []), meanwhile=label))

    def precision(self, config: Sequence[str] = ()) -> list[str]:
        """Return the precision as an argument. It is chosen once, so that a resumed run keeps it."""
        path = self.out / "precision"
        with self.lock:
            if not path.exists():
                write_atomically(path, choose_precision(config, self.options.vocab_size) or "")
        return [f"precision={precision}"] if (precision := path.read_text()) else []

    def train(self, model: str, number: int) -> None:
        self.pretrain(model, number)
        if not self.options.pretrain_only:
            self.finetune(model, number)
        if not self.options.compare:
            self.search(model)

    def pretrain(self, model: str, number: int) -> None:
        name, options = run_name(model, number), self.options
        config = [str(self.yamls[model]), f"save_folder={self.pretrained / name}"]
        config += [f"data_local={self.shards}", f"tokenizer_name={self.tokenizer}"]
        if number:
            config += [f"run_name={name}", f"seed={SEEDS[0] + number}"]
        if options.length not in (None, MAX_SEQ_LEN):
            config += [f"max_seq_len={options.length}", f"model.max_position_embeddings={options.length}"]
        config += [*options.overrides, *share_cores(self.options.jobs)]
        self.step(f"pretraining {name}", [], lambda: run(["main.py", *config, *self.precision(config)]))

    def finetune(self, model: str, number: int) -> None:
        """Fine-tune the pretrained encoder on both tasks. Unless models are compared, do so with random weights at the
        same time, and meanwhile export the encoder and fill masks."""
        model = run_name(model, number)
        checkpoint, exported = self.pretrained / model / LATEST, self.exported / model
        config = ["glue.py", "yamls/finetune-glue/demo.yaml", f"glue_dir={self.tasks}"]
        config += [f"starting_checkpoint_load_path={checkpoint}", *self.precision()]
        if number:
            config += [f"tasks.{task}.seeds=[{SEEDS[1] + number}]" for task in ("word_order", "continuation")]
        pretrained, baseline = (
            [*config, f"base_run_name={name}", f"save_folder={self.finetuned / name}"]
            for name in (model, f"{model}{FROM_SCRATCH}")
        )
        if self.options.compare:
            pretrained += share_cores(self.options.jobs)
            return self.step(f"fine-tuning {model}", [], lambda: run(pretrained))
        baseline += ["from_scratch=true", "progress_bar=false"]

        filled = self.exported / f"{model}-filled-masks.txt"
        reports = [self.finetuned / name / "report.json" for name in (model, f"{model}{FROM_SCRATCH}")]

        def finetune_and_export() -> None:
            texts = []

            def export_and_fill() -> None:
                export(checkpoint, exported)
                texts.append(self.fill_masks(exported))

            run(pretrained, baseline, meanwhile=export_and_fill)
            write_atomically(filled, texts[0])  # once all is done

        with half_the_cores():
            self.step(f"fine-tuning {model}, export", [*reports, exported, filled], finetune_and_export, checkpoint)
        print(f"\n=== filled masks\n{filled.read_text()}", flush=True)

    def fill_masks(self, folder: Path) -> str:
        """Fill masks with a Hub folder as its users would: without this repository and the Hub."""
        sentences, words = tasks.masked_sentences(self.corpus, self.tokenizer / "vocab.txt", IS_VALIDATION)
        filled = self.run_as_user("fill_masks.py", folder.resolve(), *sentences)
        return f"{filled}  (hidden words: {', '.join(words)})"

    def search(self, model: str) -> None:
        """Train text embeddings from the pretrained encoder, evaluate both beside BM25, and meanwhile export the
        embedding model and answer questions."""
        name, data, report = f"{model}{EMBEDDER}", self.searched, self.searched / model
        checkpoint, trained = self.pretrained / model / LATEST, self.embedded / name / LATEST
        exported, answers = self.exported / name, report / "answers.txt"
        files = [data / file for file in search.FILES]
        self.step("pairs", files, lambda: search.write_search(self.corpus, data, IS_VALIDATION))
        config = ["embed.py", "yamls/embed/demo.yaml", f"run_name={name}", f"save_folder={trained.parent}"]
        config += [f"starting_checkpoint_load_path={checkpoint}", f"data.docstrings.files={data / search.PAIRS}"]
        config += [f"eval_data=[{data}]", f"max_duration={self.options.search_pairs}sp", *self.precision()]

        def train() -> None:
            if not is_newer(trained.with_name("config.yaml"), checkpoint):
                discard(trained.parent)
            run(config)

        self.step(f"training {name}", [trained.with_name("summary.json")], train, checkpoint)
        evaluate = ["embed.py", "evaluate", checkpoint, trained, "bm25", "--data", data, "--out", report]

        def export_and_answer() -> None:
            export(trained, exported)
            texts = (data / search.PASSAGES).resolve()
            found = self.run_as_user("answer_questions.py", exported.resolve(), texts, *search.QUESTIONS)
            report.mkdir(exist_ok=True)
            write_atomically(answers, found)

        done = [exported, report / "report.json", answers]
        with half_the_cores():
            self.step("evaluation, export", done, lambda: run(evaluate, meanwhile=export_and_answer), trained)
        print(f"\n=== search\n{answers.read_text()}", end="", flush=True)

    def run_as_user(self, program: str, *arguments: object) -> str:
        """Return the output of a program that needs neither this repository nor the Hub."""
        command = [sys.executable, ROOT / "src/demo" / program, *arguments]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=self.out, env=environment, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(1)
        return done.stdout

    def print_end(self, models: Sequence[str]) -> None:
        """Print the results, unless several models are compared, and name the outputs and the seconds of each step."""
        if not self.options.compare:
            self.print_results(models[0])
        print(f"runs     {self.pretrained}, {self.finetuned}  (tensorboard --logdir {self.pretrained})")
        if not self.options.compare:
            exported = self.exported / models[0]
            print(f"search   {self.searched / models[0]}, {self.embedded}")
            print(f"export   {exported}, {exported}{EMBEDDER}")
        self.print_seconds()

    def print_results(self, model: str) -> None:
        """Print tables of the model with and without pretraining, and of its search, and draw curves and scores."""
        from src import plots
        from src.jobs import report
        from src.mlm.task import CURVES

        lines, runs = [], []
        summary = json.loads((self.pretrained / model / "summary.json").read_text())
        for name, result in (model, summary["after"]), (f"{model}{FROM_SCRATCH}", summary["before"]):
            runs.append((name, rows := json.loads((self.finetuned / name / "report.json").read_text())["tasks"]))
            scores = (f"{100 * row['mean']:.2f}" for row in rows)
            seconds = f"{summary['seconds']:.0f} s" if name == model else "-"
            accuracy = f"{result['accuracy']:.2%}" if result else "-"  # with eval_first=false
            lines.append([name, f"{summary['parameters']:,}", accuracy, *scores, seconds])
        majority = (f"{100 * row['majority']:.2f}" for row in rows)
        lines.append(["*baseline*", "-", f"{summary['after']['most_frequent_token']:.2%}", *majority, "-"])
        titles = (f"{row['title']}, {row['metrics'][0]}" for row in rows)
        lines.insert(0, ["model", "parameters", "masked accuracy", *titles, "pretraining"])
        table, curves, scores = (self.out / name for name in ("results.md", "curves.png", "scores.png"))
        searched = markdown(search.scores(self.searched / model / "report.json"))
        note = "Baseline: always the most frequent token or the majority class."
        table.write_text(f"{markdown(lines)}\n\n{note}\n\n{searched}\n")
        plots.curves([(model, self.pretrained / model)], CURVES, curves, "Pretraining on docstrings")
        report.draw(runs, scores, "Fine-tuning on tasks made from docstrings")
        print(f"\n{table.read_text()}\nresults  {table}, {curves}, {scores}")


@contextlib.contextmanager
def half_the_cores() -> Iterator[None]:
    """Let each command that starts meanwhile use half of the cores."""
    before = {name: value for name, value in os.environ.items() if name == "OMP_NUM_THREADS"}
    os.environ["OMP_NUM_THREADS"] = str(max(1, usable_cores() // 2))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        os.environ.update(before)


def export(checkpoint: Path, folder: Path) -> None:
    """Write a Hub folder, or verify the one that is there, unless the checkpoint was trained further since."""
    if not is_newer(folder, checkpoint):
        discard(folder)
    action, option = ("verify", "--folder") if folder.exists() else ("export", "--out")
    run(["src/hub.py", action, "--checkpoint", checkpoint, option, folder])


def choose_precision(arguments: Sequence[str], vocab_size: int) -> str | None:
    """Return fp32 or amp_bf16, whichever trains faster on this CPU, in steps timed in turns on random tokens. A
    precision among the arguments of main.py takes precedence; on a GPU, None leaves the choice to main.py."""
    import torch

    from src.lion import LionConfig, LionForMaskedLM
    from src.lion.machine import keep_freed_memory
    from src.mlm.task import PretrainConfig
    from src.training.config import load_config

    config = load_config(PretrainConfig, "main.py", "", list(arguments))
    if config.precision or torch.cuda.is_available():
        return config.precision
    keep_freed_memory()
    try:
        model = LionForMaskedLM(LionConfig(**{**config.model, "vocab_size": vocab_size}))
    except (TypeError, ValueError) as error:
        raise UserError(f"model: {error}") from None
    ids = torch.randint(vocab_size, (config.global_train_batch_size, config.max_seq_len))
    labels = ids.where(torch.rand(ids.shape) < config.mlm_probability, -100)
    seconds: dict[str, list[float]] = {"fp32": [], "amp_bf16": []}
    for _ in range(1 + TRIAL_STEPS):
        for precision, times in seconds.items():
            start = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp_bf16"):
                loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            model.zero_grad()
            times.append(time.perf_counter() - start)
        if len(times) > 1 and max(last := [each[-1] for each in seconds.values()]) > 2 * min(last):
            break  # bfloat16 may take thirty times as long
    rates = {precision: ids.numel() / statistics.median(times[1:]) for precision, times in seconds.items()}
    faster = max(rates, key=rates.__getitem__)
    trial = ", ".join(f"{precision} {rate:,.0f}" for precision, rate in rates.items())
    cli.log.info(f"{faster} is faster on this CPU (tokens per second in a trial: {trial})")
    return faster


if __name__ == "__main__":
    cli.run(main)
