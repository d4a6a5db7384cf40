"""The demo, by its own command, at the smallest size: an existing corpus and a model of one layer."""

import json
import random
import subprocess
import sys
from collections import Counter

import pytest
from conftest import ROOT, environment

from src.data.convert import is_validation
from src.demo.__main__ import MAX_SEQ_LEN, VAL_FRACTION, choose_precision
from src.mlm.task import PretrainConfig
from src.training.config import load_config

NOUNS = "dog king river child house song bird ship tree garden letter window".split()
VERBS = "sees finds hears follows keeps loves carries draws".split()
PLACES = "near under behind over without beside".split()
SIZES = ["--vocab_size", "200", "--train_examples", "64", "--dev_examples", "16"]
TINY = [
    "max_duration=4ba",
    "eval_interval=2ba",
    "save_interval=2ba",
    "global_train_batch_size=16",
    "device_train_microbatch_size=16",
    "model.hidden_size=32",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "model.intermediate_size=64",
]


def run_demo(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "src.demo", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=400)


def write_corpus(path) -> None:
    draw = random.Random(0)
    with path.open("w") as file:
        for number in range(1500):
            sentences = [
                f"The {draw.choice(NOUNS)} {draw.choice(VERBS)} a {draw.choice(NOUNS)} {draw.choice(PLACES)} the "
                f"{draw.choice(NOUNS)} and a {draw.choice(NOUNS)} of number {number} and {place}."
                for place in range(2)
            ]
            file.write(json.dumps({"text": " ".join(sentences), "source": f"package/file{number % 7}.py"}) + "\n")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's folder, and what its first and second run printed."""
    out = tmp_path_factory.mktemp("demo")
    write_corpus(out / "corpus.jsonl")
    command = ["--model", "lion-d-tiny", "--out", str(out), *SIZES, *TINY]
    first = run_demo(*command)
    assert first.returncode == 0, first.stderr
    files = {
        path: path.stat().st_mtime_ns
        for path in out.rglob("*")
        if path.suffix in (".pt", ".safetensors", ".tsv", ".mds", ".jsonl")
    }
    second = run_demo(*command)
    assert second.returncode == 0, second.stderr
    return out, first, second, files


@pytest.mark.slow
def test_it_ends_with_filled_masks_scores_and_paths(demo):
    out, first, _, _ = demo
    assert first.stdout.count("[MASK]") == 3 and "(hidden words: " in first.stdout
    for line in ("masked accuracy", "WordOrder, matthews", "Continuation, accuracy", "*baseline*", "total"):
        assert line in first.stdout
    for path in ("pretrained/lion-d-tiny/latest-rank0.pt", "pretrained/lion-d-tiny/curves.png", "pretrained/lion-d-tiny/tensorboard",
                 "finetuned/lion-d-tiny/report.md", "finetuned/lion-d-tiny-from-scratch/report.md",
                 "exported/lion-d-tiny/model.safetensors"):  # fmt: skip
        assert (out / path).exists()
    for path in ("results.md", "curves.png", "scores.png", "pretrained", "finetuned", "exported/lion-d-tiny"):
        assert str(out / path) in first.stdout
    for picture in ("curves.png", "scores.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_faster_precision_is_measured_once(demo):
    out, first, second, _ = demo
    precision = (out / "precision").read_text()
    assert f"{precision} is faster on this CPU" in first.stderr and "is faster" not in second.stderr
    for run in (first, second):
        assert run.stdout.count(f" precision={precision}") == 3  # pretraining and both fine-tuning commands
    assert f"precision: {precision}\n" in (out / "pretrained/lion-d-tiny/config.yaml").read_text()


@pytest.mark.slow
def test_each_split_has_the_tokens_of_its_documents(demo):
    from streaming import StreamingDataset
    from transformers import AutoTokenizer

    out, *_ = demo
    tokenizer = AutoTokenizer.from_pretrained(out / "tokenizer")
    expected = {"train": Counter(), "val": Counter()}
    for row in map(json.loads, (out / "corpus.jsonl").read_text().splitlines()):
        tokens = tokenizer(row["text"], truncation=True, max_length=MAX_SEQ_LEN)["input_ids"]
        expected["val" if is_validation(row["text"], VAL_FRACTION) else "train"][tuple(tokens)] += 1
    for split, rows in expected.items():
        shards = StreamingDataset(local=str(out / "token-shards"), split=split, batch_size=1)
        assert Counter(tuple(row["tokens"].tolist()) for row in shards) == rows


def test_rows_are_as_long_as_the_tiny_models_read():
    config = load_config(PretrainConfig, "main.py", "", [str(ROOT / "yamls/pretrain/lion-s-tiny.yaml")])
    assert config.max_seq_len == MAX_SEQ_LEN


def test_a_given_precision_is_not_measured():
    arguments = [str(ROOT / "yamls/pretrain/lion-s-tiny.yaml"), "precision=fp32"]
    assert choose_precision(arguments, vocab_size=-1) == "fp32"


@pytest.mark.slow
def test_a_second_run_uses_what_is_finished(demo):
    _, first, second, files = demo
    assert second.stdout.count("done earlier") == 3
    assert "is already finished" in second.stderr
    assert second.stderr.count("done earlier") == 4
    assert all(path.stat().st_mtime_ns == time for path, time in files.items())
    table = first.stdout[first.stdout.index("| model") :].split("\n\n")[0]
    assert table in second.stdout


def test_an_unknown_model_is_refused(tmp_path):
    done = run_demo("--model", "lion-x-tiny", "--out", str(tmp_path / "demo"))
    assert done.returncode == 2 and "lion-s-tiny" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "demo").exists()
