"""The demo's tasks: GLUE's file layout, balanced labels, and no sentence that a model could know from elsewhere."""

import hashlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from src.demo.tasks import permute, write_tasks
from src.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
SHARED = "The same words are said in many of the files."
SIZES = {"train_examples": 60, "dev_examples": 20}


def is_validation(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] < 80


def write_corpus(path: Path, documents: int = 150) -> Path:
    """Passages of 25 files, two paragraphs of three sentences each; every third opens with SHARED."""
    rng = random.Random(5)

    def sentence() -> str:
        words = ["".join(rng.choices("abcdefghij", k=5)) for _ in range(rng.randint(7, 12))]
        return f"{' '.join(words).capitalize()}."

    with path.open("w", encoding="utf-8") as file:
        for number in range(documents):
            paragraphs = [[sentence() for _ in range(3)] for _ in range(2)]
            if number % 3 == 0:
                paragraphs[0][0] = SHARED
            text = "\n".join(map(" ".join, paragraphs))
            file.write(json.dumps({"text": text, "source": f"package/{number // 6}.py"}) + "\n")
    return path


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus.jsonl")


def read(path: Path, header: bool) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[header:]]


def bag(sentence: str) -> tuple[str, ...]:
    return tuple(sorted(sentence.lower().split()))


def places(corpus: Path) -> dict[tuple[str, ...], tuple[int, str, bool]]:
    """For each sentence of the corpus, as a bag of words: its number, its file, whether its passage is for
    validation."""
    found = {}
    for row in map(json.loads, corpus.read_text().splitlines()):
        for sentence in row["text"].replace("\n", " ").rstrip(".").split(". "):
            found[bag(f"{sentence}.")] = (len(found), row["source"], is_validation(row["text"]))
    return found


def test_word_order_is_balanced_in_colas_layout_and_leaks_nothing(corpus, tmp_path):
    write_tasks(corpus, tmp_path, is_validation, **SIZES)
    known, bags = places(corpus), []
    for split, size in (("train", 60), ("dev", 20)):
        rows = read(tmp_path / "WordOrder" / f"{split}.tsv", header=False)
        assert Counter((label, mark) for _, label, mark, _ in rows) == {("1", ""): size // 2, ("0", "*"): size // 2}
        for source, label, _, sentence in rows:
            _, where, validation = known[bag(sentence)]
            assert bag(sentence) == bag(SHARED) or (where, validation) == (source, split == "dev")
            assert (sentence in corpus.read_text()) == (label == "1")
            assert sentence[0].isupper() and sentence.endswith(".")
            bags.append(bag(sentence))
    assert len(set(bags)) == len(bags)


def test_continuation_is_balanced_in_rtes_layout_and_leaks_nothing(corpus, tmp_path):
    write_tasks(corpus, tmp_path, is_validation, **SIZES)
    whole = {"train": [], "dev": []}
    for row in map(json.loads, corpus.read_text().splitlines()):
        whole["dev" if is_validation(row["text"]) else "train"].append(row["text"].replace("\n", " "))
    halves = []
    for split, size in (("train", 60), ("dev", 20)):
        path = tmp_path / "Continuation" / f"{split}.tsv"
        assert path.read_text().startswith("index\tsentence1\tsentence2\tlabel\n0\t")
        rows = read(path, header=True)
        assert Counter(row[3] for row in rows) == {"entailment": size // 2, "not_entailment": size // 2}
        for _, first, second, label in rows:
            text = " ".join(whole[split])
            assert first in text and second in text
            assert (f"{first} {second}" in text) == (label == "entailment")
            halves += [first, second]
    assert len(halves) == 160


def test_permuting_moves_every_plain_word_and_nothing_else():
    sentence = "The result, which has a name (see NumPy), is given to the caller of it."
    plain = {2, 3, 4, 5, 8, 9, 10, 11, 12, 13}
    results = set()
    for seed in range(50):
        scrambled = permute(sentence, random.Random(seed))
        words, moved = sentence.split(), scrambled.split()
        assert bag(scrambled) == bag(sentence)
        assert {i for i, (old, new) in enumerate(zip(words, moved)) if old != new} == plain
        results.add(scrambled)
    assert len(results) == 50


def test_permuting_needs_enough_movable_words():
    assert permute("No no no no no no no.", random.Random(0)) is None
    assert permute("A, b, c, d, e, f.", random.Random(0)) is None
    assert permute("It is one of them.", random.Random(0)) is None  # three words could move


def test_the_files_depend_on_the_seed_but_not_on_the_process(corpus, tmp_path):
    code = """if True:
        import sys
        from pathlib import Path
        from src.demo.tasks import write_tasks
        write_tasks(Path(sys.argv[1]), Path(sys.argv[2]), lambda text: len(text) % 4 == 0,
                    train_examples=60, dev_examples=20, seed=int(sys.argv[3]))"""
    written = []
    for seed, hash_seed in (("1", "1"), ("1", "2"), ("2", "1")):
        out = tmp_path / f"{seed}-{hash_seed}"
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", code, corpus, out, seed], env=env, check=True)
        written.append({path.relative_to(out): path.read_bytes() for path in sorted(out.glob("*/*.tsv"))})
    assert written[0] == written[1] != written[2] and len(written[0]) == 4


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"train_examples": 100_000}, r"WordOrder/train.tsv: the corpus gives \d+ examples, not 100,000"),
        ({"dev_examples": 7}, "dev_examples=7 must be even"),
    ],
)
def test_sizes_the_corpus_cannot_supply_are_refused(corpus, tmp_path, sizes, message):
    with pytest.raises(UserError, match=message):
        write_tasks(corpus, tmp_path / "out", is_validation, **{**SIZES, **sizes})
    assert not (tmp_path / "out").exists()


def test_a_missing_corpus_is_reported(tmp_path):
    with pytest.raises(UserError, match="build it first"):
        write_tasks(tmp_path / "none.jsonl", tmp_path, is_validation, **SIZES)
