"""The whole road, by its own command, at the smallest size: a corpus that is there already, a model of one layer."""

import json
import random
import subprocess
import sys

import pytest
from conftest import ROOT, environment

NOUNS = "dog king river child house song bird ship tree garden letter window".split()
VERBS = "sees finds hears follows keeps loves carries draws".split()
PLACES = "near under behind over without beside".split()
SIZES = ["--vocab_size", "200", "--train_examples", "64", "--dev_examples", "16"]
TINY = [
    "max_duration=4ba", "eval_interval=2ba", "save_interval=2ba", "global_train_batch_size=16", "device_train_microbatch_size=16",
    "model.hidden_size=32", "model.num_hidden_layers=1", "model.num_attention_heads=2", "model.intermediate_size=64",
]  # fmt: skip


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


def test_the_road_ends_with_filled_masks_scores_and_places(demo):
    out, first, _, _ = demo
    assert first.stdout.count("[MASK]") == 3 and "(hidden were: " in first.stdout
    for line in ("masked accuracy", "WordOrder, matthews", "Continuation, accuracy", "in all"):
        assert line in first.stdout
    for place in ("runs/lion-d-tiny/latest-rank0.pt", "runs/lion-d-tiny/curves.png", "runs/lion-d-tiny/tensorboard",
                  "runs/lion-d-tiny-tasks/report.md", "runs/lion-d-tiny-tasks-from-scratch/report.md",
                  "runs/lion-d-tiny-tasks/with-and-without-pretraining.png", "hub/lion-d-tiny/model.safetensors"):  # fmt: skip
        assert (out / place).exists()
        assert place.removesuffix("/model.safetensors") in first.stdout
    assert (out / "runs/lion-d-tiny/curves.png").read_bytes().startswith(b"\x89PNG")


def test_no_document_is_in_both_splits(demo):
    from streaming import StreamingDataset

    out, *_ = demo
    texts = {
        split: {row["text"] for row in StreamingDataset(local=str(out / "shards"), split=split, batch_size=1)}
        for split in ("train", "val")
    }
    assert not texts["train"] & texts["val"]
    assert len(texts["train"]) + len(texts["val"]) == 1500


def test_a_second_run_uses_what_is_finished(demo):
    _, first, second, files = demo
    assert "is there already" in second.stdout
    assert "is finished already" in second.stderr
    assert second.stderr.count("done earlier") == 4
    assert all(path.stat().st_mtime_ns == time for path, time in files.items())
    table = first.stdout[first.stdout.index("| masked accuracy") :].split("\n\n")[0]
    assert table in second.stdout


def test_an_unknown_model_is_refused(tmp_path):
    done = run_demo("--model", "lion-x-tiny", "--out", str(tmp_path / "demo"))
    assert done.returncode == 2 and "lion-s-tiny" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "demo").exists()
