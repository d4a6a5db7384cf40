"""The demo, by its own command, at the smallest size: an existing corpus and a model of one layer."""

import json
import os
import random
import re
import subprocess
from collections import Counter
from types import SimpleNamespace

import pytest
import warm
from conftest import ROOT, assert_one_sentence, environment, run

from src.data.convert import is_validation
from src.demo import __main__ as demo_command
from src.demo import search
from src.demo.__main__ import MAX_SEQ_LEN, VAL_FRACTION, Demo, choose_precision, main
from src.demo.comparison import print_comparison
from src.demo.corpus import join_documents
from src.demo.search import FILES, QUESTIONS, write_search
from src.embed.beir import read_beir
from src.errors import UserError
from src.mlm.task import PretrainConfig
from src.training.config import load_config

NOUNS = "dog king river child house song bird ship tree garden letter window".split()
VERBS = "sees finds hears follows keeps loves carries draws".split()
PLACES = "near under behind over without beside".split()
SIZES = ["--vocab_size", "200", "--train_examples", "64", "--dev_examples", "16", "--search_pairs", "256"]
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
    command = [warm.python(), "-m", "src.demo", *arguments]
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
                 "exported/lion-d-tiny/model.safetensors", "exported/lion-d-tiny-embedder/modules.json",
                 "embedded/lion-d-tiny-embedder/latest-rank0.pt", "search/lion-d-tiny/report.md"):  # fmt: skip
        assert (out / path).exists()
    for path in ("results.md", "curves.png", "scores.png", "pretrained", "finetuned", "search/lion-d-tiny", "embedded",
                 "exported/lion-d-tiny", "exported/lion-d-tiny-embedder"):  # fmt: skip
        assert str(out / path) in first.stdout
    for picture in ("curves.png", "scores.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_it_answers_three_questions_and_compares_the_search_with_words(demo):
    out, first, *_ = demo
    passages = {row["source"] for row in map(json.loads, (out / "search/passages.jsonl").read_text().splitlines())}
    answers = first.stdout.split("=== search\n")[1].split("\n\n")[0].splitlines()
    assert answers[::4] == [f"  {question}" for question in QUESTIONS] and len(answers) == 12
    for start in (1, 5, 9):
        found = [re.fullmatch(r" {6}(-?\d\.\d\d)  (\S+): The .+", line).groups() for line in answers[start : start + 3]]
        scores = [float(score) for score, _ in found]
        assert scores == sorted(scores, reverse=True) and {source for _, source in found} <= passages
    report = json.loads((out / "search/lion-d-tiny/report.json").read_text())["results"]
    assert list(report) == ["lion-d-tiny", "lion-d-tiny-embedder", "bm25"]
    for model, of in report.items():
        expected = f"{100 * of['search']['scores']['nDCG@10']:.2f}"
        assert re.search(rf"^\| {model} +\| +{expected} \|", (out / "results.md").read_text(), re.MULTILINE)


@pytest.mark.slow
def test_the_faster_precision_is_measured_once(demo):
    out, first, second, _ = demo
    precision = (out / "precision").read_text()
    assert f"{precision} is faster on this CPU" in first.stderr and "is faster" not in second.stderr
    # Pretraining, which the second run starts too, both fine-tuning commands, and the training of embeddings.
    assert [run.stdout.count(f" precision={precision}") for run in (first, second)] == [4, 1]
    assert f"precision: {precision}\n" in (out / "pretrained/lion-d-tiny/config.yaml").read_text()


@pytest.mark.slow
def test_each_split_has_the_tokens_of_its_documents(demo):
    from transformers import AutoTokenizer

    from src.data.streaming import StreamingSamples

    out, *_ = demo
    tokenizer = AutoTokenizer.from_pretrained(out / "tokenizer")
    expected = {"train": Counter(), "val": Counter()}
    for row in map(json.loads, (out / "corpus.jsonl").read_text().splitlines()):
        tokens = tokenizer(row["text"], truncation=True, max_length=MAX_SEQ_LEN)["input_ids"]
        expected["val" if is_validation(row["text"], VAL_FRACTION) else "train"][tuple(tokens)] += 1
    for split, rows in expected.items():
        shards = StreamingSamples(local=str(out / "token-shards"), split=split, batch_size=1)
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
    assert second.stdout.count("done earlier") == 7
    assert "is already finished" in second.stderr
    assert all(path.stat().st_mtime_ns == time for path, time in files.items())
    results = first.stdout[first.stdout.index("=== search") : first.stdout.index("\nresults ")]
    assert results in second.stdout


@pytest.mark.slow
def test_horizons_are_compared_on_ones_own_text_with_several_seeds(tmp_path):
    """By `benchmarks/horizons.py`, which runs `python -m src.demo --compare` with configs of its own."""
    write_corpus(tmp_path / "texts.jsonl")
    command = ["--mixers", "lion-d", "--starts", "2-to-L", "--lengths", "48", "--seeds", "2", "--jobs", "2"]
    command += ["--data_files", "texts.jsonl", "--val_fraction", "0.1", "--vocab_size", "200", "--out", "out"]
    script = str(ROOT / "benchmarks/horizons.py")
    command = [warm.python(), script, *command, "--tokens", "8192", *TINY[2:3], *TINY[5:]]
    command.append("precision=fp32")
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out/48"
    results = json.loads((out / "results.json").read_text())["lion-d-2-to-L"]
    assert [run["run"] for run in results] == ["lion-d-2-to-L", "lion-d-2-to-L-seed-18"]
    assert results[0]["loss"] != results[1]["loss"]
    assert re.search(r"lion-d-2-to-L +\| +[\d,]+ \| +\d+\.\d\d ± \d\.\d\d% \|", done.stdout)
    config = (out / "pretrained/lion-d-2-to-L-seed-18/config.yaml").read_text()
    assert "max_seq_len: 48\n" in config and "seed: 18\n" in config and "decay_horizon:\n  - 2\n  - 48\n" in config
    assert not (out / "finetuned").exists()
    samples = {}
    for split in ("train", "val"):
        index = json.loads((out / f"token-shards/{split}/index.json").read_text())
        samples[split] = sum(shard["samples"] for shard in index["shards"])
    assert 0.05 < samples["val"] / sum(samples.values()) < 0.15
    rows = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    expected = [run["accuracy"] for run in results]
    assert rows == [{"mixer": "lion-d", "start": "2-to-L", "length": 48, "accuracy": expected}]
    assert re.search(r"\| lion-d \| +2 to L \| +\d+\.\d\d ± \d\.\d\d% \|", done.stdout)
    for picture in (out / "curves.png", out / "scores.png", tmp_path / "out/results.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").touch()
    for given, words in (
        (("--tokens", "9000"), "out has runs with tokens=8192"),
        (("--out", "file"), "--out: file is"),
    ):
        assert_one_sentence(run(script, *command[2:], *given, cwd=tmp_path), words)


def test_a_comparison_has_means_deviations_and_times_relative_to_bert(tmp_path, capsys):
    runs = {"lion-s-tiny": ["lion-s-tiny", "lion-s-tiny-seed-18"], "bert-tiny": ["bert-tiny", "bert-tiny-seed-18"]}
    for number, name in enumerate(name for names in runs.values() for name in names):
        for kind in ("pretrained", "finetuned"):
            (tmp_path / kind / name).mkdir(parents=True)
        after = {"accuracy": 0.3 + 0.01 * number, "most_frequent_token": 0.06 + 0.01 * (number % 2), "loss": 4.0}
        summary = {"parameters": 1000 + number, "seconds": 90.0 + 10 * number, "after": after}
        (tmp_path / "pretrained" / name / "summary.json").write_text(json.dumps(summary))
        (tmp_path / "pretrained" / name / "metrics.jsonl").write_text("")
        tasks = [{"title": "Order", "metrics": ["matthews"], "mean": 0.5 + 0.02 * number, "majority": 0.0}]
        (tmp_path / "finetuned" / name / "report.json").write_text(json.dumps({"tasks": tasks}))
    print_comparison(tmp_path, runs)
    table = capsys.readouterr().out
    assert re.search(r"lion-s-tiny +\| +1,000 \| +30\.50 ± 0\.71% \| +51\.00 ± 1\.41 \| +×0\.83 \|", table)
    assert re.search(r"bert-tiny +\| +1,002 \| +32\.50 ± 0\.71% \| +55\.00 ± 1\.41 \| +×1\.00 \|", table)
    assert re.search(r"\*baseline\* +\| +- \| +6\.50% \| +0\.00 \| +- \|", table)
    assert "of 2 seeds" in table


def test_passages_of_a_file_become_a_document(tmp_path):
    rows = [("one", "a"), ("two", "a"), ("three", "b"), ("four", "a")]
    lines = "".join(json.dumps({"text": text, "source": source}) + "\n" for text, source in rows)
    (tmp_path / "corpus.jsonl").write_text(lines)
    join_documents(tmp_path / "corpus.jsonl", tmp_path / "documents.jsonl")
    documents = [json.loads(line)["text"] for line in (tmp_path / "documents.jsonl").read_text().splitlines()]
    assert documents == ["one\ntwo", "three", "four"]


def test_search_is_evaluated_on_sentences_that_training_does_not_see(tmp_path):
    rows = [
        "The first one is for the training. It has a second sentence with many words.",
        "This one is too short. It has a second sentence that nothing repeats.",
        "New: the shortest path of a graph. New: it has the fewest edges of all.",
        "New: a sentence that another text holds. New: and a document of its own here.",
        "New: this text quotes the one before it. New: a sentence that another text holds. New: as a part of it.",
        "New: this query is followed by known words. It has a second sentence with many words.",
        "New: one sentence is no pair of sentences.",
    ]
    lines = "".join(json.dumps({"text": text, "source": f"{place}.py"}) + "\n" for place, text in enumerate(rows))
    (tmp_path / "corpus.jsonl").write_text(lines)
    write_search(tmp_path / "corpus.jsonl", out := tmp_path / "search", lambda text: text.startswith("New:"))
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*.*")) == sorted(FILES)
    pairs, passages = (
        [json.loads(line) for line in (out / name).read_text().splitlines()]
        for name in ("pairs.jsonl", "passages.jsonl")
    )
    assert pairs == [
        {"query": "The first one is for the training.", "document": "It has a second sentence with many words."}
    ]
    assert passages == [{"text": text, "source": f"{place}.py"} for place, text in enumerate(rows) if place > 1]
    data = read_beir(out, "test")
    found = {data.queries[query]: [data.documents[name] for name in of] for query, of in data.judged.items()}
    assert found == {
        "New: the shortest path of a graph.": ["New: it has the fewest edges of all."],
        "New: this text quotes the one before it.": ["New: a sentence that another text holds. New: as a part of it."],
    }
    assert len(data.documents) == len(data.queries) == 2
    with pytest.raises(UserError, match="no pairs of sentences"):
        write_search(tmp_path / "corpus.jsonl", out, lambda text: False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "lion-x-tiny"], "lion-x-tiny must be one of .*lion-s-tiny"),
        (["--compare", "--models", "nowhere.yaml"], "nowhere.yaml must be one of"),
        (["--compare", "--models", "lion-d-tiny", "lion-d-tiny"], "lion-d-tiny is named twice"),
        (["--seeds", "2"], "--seeds needs --compare"),
        (["--compare", "--val_fraction", "0.1"], "--val_fraction needs --data_files"),
        (["--compare", "--length", "64"], "--length needs --pretrain_only"),
        (["--compare", "--seeds", "0"], "at least 1"),
        (["--search_pairs", "0"], "--search_pairs 0 must be at least 1"),
        (["--compare", "--search_pairs", "9"], "--search_pairs has no effect with --compare"),
    ],
)
def test_a_mistake_is_named_before_anything_is_written(arguments, words, tmp_path):
    with pytest.raises(UserError, match=words):
        main([*arguments, "--out", str(tmp_path / "demo")])
    assert not (tmp_path / "demo").exists()


def test_what_was_made_from_a_checkpoint_is_made_again_once_that_was_trained_further(tmp_path, monkeypatch, capsys):
    commands = []

    def run(*some, meanwhile=None):
        commands.extend(some)
        if meanwhile is not None:
            meanwhile()

    monkeypatch.setattr(Demo, "fill_masks", lambda *arguments: "filled")
    monkeypatch.setattr(Demo, "run_as_user", lambda *arguments: "answered")
    monkeypatch.setattr(search, "write_search", lambda *arguments: None)
    monkeypatch.setattr(demo_command, "run", run)
    folder, trained = tmp_path / "embedded/m-embedder", tmp_path / "pretrained/m/latest-rank0.pt"
    written = [trained, tmp_path / "precision", tmp_path / "exported/m/config.json"]
    written += [folder / file for file in ("config.yaml", "summary.json", "latest-rank0.pt")]
    written += [tmp_path / "exported/m-embedder/config.json", *(tmp_path / f"search/{file}" for file in FILES)]
    written += [tmp_path / f"search/m/{file}" for file in ("report.json", "answers.txt")]
    written += [tmp_path / f"finetuned/{name}/report.json" for name in ("m", "m-from-scratch")]
    for path in [*written, tmp_path / "exported/m-filled-masks.txt"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    options = dict.fromkeys(("search_pairs", "length", "pretrain_only", "compare"))
    demo = Demo(SimpleNamespace(out=tmp_path, jobs=1, overrides=[], **options))
    demo.yamls["m"] = tmp_path / "m.yaml"
    demo.train("m", 0)
    assert [command[0] for command in commands] == ["main.py"]
    written[-1].unlink()
    demo.train("m", 0)
    assert [command[0] for command in commands[1:]] == ["main.py", "glue.py", "glue.py", "src/hub.py"]
    written[-1].touch()
    commands.clear()
    later = folder.stat().st_mtime + 1
    os.utime(trained, (later, later))
    demo.train("m", 0)
    scripts = ["main.py", "glue.py", "glue.py", "src/hub.py", "embed.py"]
    assert [command[0] for command in commands] == scripts and commands[3][1] == "export"
    assert not folder.exists() and not (tmp_path / "exported/m").exists()
    assert f"removing {folder}" in capsys.readouterr().out
    folder.mkdir()
    (folder / "latest-rank0.pt").touch()
    os.utime(folder / "latest-rank0.pt", (later + 1, later + 1))
    (folder / "summary.json").touch()
    os.utime(folder / "summary.json", (later + 1, later + 1))
    demo.search("m")
    assert ["embed.py", "evaluate"] in [command[:2] for command in commands]


@pytest.mark.parametrize(
    ("prepared", "words"),
    [
        ({}, "prepared without --length; repeat that, or choose another --out"),
        ({"length": 48}, "prepared with --length 48; repeat"),
        ({"length": 64, "vocab_size": 200}, "prepared with --vocab_size 200; repeat"),
    ],
)
def test_data_that_other_options_prepared_are_not_used(prepared, words, tmp_path):
    usual = {"vocab_size": 8192, "length": None, "data_files": None, "val_fraction": VAL_FRACTION}
    (tmp_path / "prepared.json").write_text(json.dumps(usual | prepared))
    with pytest.raises(UserError, match=words):
        main(["--compare", "--pretrain_only", "--length", "64", "--out", str(tmp_path)])
