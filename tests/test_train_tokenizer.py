"""The tokenizer command: a folder that AutoTokenizer loads, reproducible, and one sentence for each mistake."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from src.data.tokenizers import SPECIAL_TOKENS, check_path
from src.errors import RunFailed, UserError
from src.train_tokenizer import main

COMMAND = Path(__file__).resolve().parent.parent / "src" / "train_tokenizer.py"


def write_text(path: Path, sentences: int = 400) -> Path:
    """Random words of few letters: many pairs of equal count, whose order the trainer must not leave to chance."""
    rng = random.Random(3)
    words = ["".join(rng.choices("aeioknrst", k=rng.randint(2, 7))) for _ in range(300)]
    texts = [" ".join(rng.choices(words, k=12)).capitalize() + "." for _ in range(sentences)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def run_command(*args: object, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, COMMAND, *map(str, args)], capture_output=True, text=True,
                          env={**os.environ, **environment}, cwd=Path(COMMAND.anchor))  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tokenizer folder written by the command."""
    folder = tmp_path_factory.mktemp("tokenizer")
    data = write_text(folder / "data.jsonl")
    done = run_command("--data_files", data, "--vocab_size", 300, "--out", folder / "out", PYTHONHASHSEED="1")
    assert done.returncode == 0, done.stderr
    return folder / "out"


def test_auto_tokenizer_loads_it_as_berts(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.is_fast and len(tokenizer) == 300 and tokenizer.model_max_length == 512
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3, 4]
    named = ("pad", "unk", "cls", "sep", "mask")
    assert [getattr(tokenizer, f"{name}_token") for name in named] == list(SPECIAL_TOKENS)
    vocabulary = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert vocabulary == tokenizer.convert_ids_to_tokens(range(300))


def test_text_is_framed_and_decoded(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pair = tokenizer("Táke no [MASK]", "near it.")
    assert pair["token_type_ids"] == sorted(pair["token_type_ids"]) and set(pair["token_type_ids"]) == {0, 1}
    assert tokenizer.decode(pair["input_ids"]).replace(" .", ".") == "[CLS] take no [MASK] [SEP] near it. [SEP]"
    assert tokenizer.decode(tokenizer("%")["input_ids"]) == "[CLS] [UNK] [SEP]"


def test_the_same_text_gives_the_same_bytes_in_another_process(folder, tmp_path):
    data = write_text(tmp_path / "data.jsonl")
    run_command("--data_files", data, "--vocab_size", 300, "--out", tmp_path / "out", PYTHONHASHSEED="2")
    for name in ("tokenizer.json", "vocab.txt", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


def test_cased_vocabularies_and_txt_files_work(tmp_path):
    (tmp_path / "a.txt").write_text("Anna sees Otto.\n\nOtto sees Anna.\n", encoding="utf-8")
    main(["--data_files", f"{tmp_path}/*.txt", "--vocab_size", "60", "--out", f"{tmp_path}/out", "--no-lowercase"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("Anna sees Otto") == ["Anna", "sees", "Otto"]


def test_words_that_would_not_be_split_are_not_learned(tmp_path):
    lines = ["Anna sees Otto.", "x" * 100_000 + " Anna", "y" * 101 + ", Otto", "─" * 20_000]
    (tmp_path / "a.txt").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    main(["--data_files", f"{tmp_path}/a.txt", "--vocab_size", "60", "--out", f"{tmp_path}/out"])  # in seconds
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("Anna sees Otto") == ["anna", "sees", "otto"]
    assert not any(pair in token for pair in ("xx", "yy", "──") for token in tokenizer.get_vocab())


def test_the_folder_may_be_the_current_one(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("Anna sees Otto.\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    main(["--data_files", "a.txt", "--vocab_size", "40", "--out", "."])
    assert (
        AutoTokenizer.from_pretrained(tmp_path).tokenize("anna") == ["an", "##na"] or (tmp_path / "vocab.txt").is_file()
    )
    assert not list(tmp_path.glob("*unfinished"))


MISTAKES = {
    "no file": (None, [], "nothing matches"),
    "no such column": ('{"body": "It is."}', [], r"data.jsonl, line 1: no text \(its keys are body\)"),
    "no JSON": ('{"text": "It is."}\nIt is.', [], "data.jsonl, line 2: not valid JSON"),
    "no object": ("[1, 2]", [], "data.jsonl, line 1: not a JSON object"),
    "no text": ('{"text": " "}', [], "no text to train on"),
    "a small vocabulary": ('{"text": "It is."}', ["--vocab_size", "10"], "--vocab_size: 10 is too small"),
}


@pytest.mark.parametrize("data, options, message", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_reported_in_one_sentence(data, options, message, tmp_path):
    if data is not None:
        (tmp_path / "data.jsonl").write_text(data, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        main(["--data_files", f"{tmp_path}/*.jsonl", "--out", f"{tmp_path}/out", *options])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("below", ["", "deep/out"])
def test_an_invalid_out_is_reported_before_training(tmp_path, below):
    data = write_text(tmp_path / "data.jsonl", 0)  # no text: training would report that
    with pytest.raises(UserError, match=r"--out: .*data\.jsonl is not a directory"):
        main(["--data_files", str(data), "--out", str(data / below)])


def test_an_unwritable_out_is_reported_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # which root always has
    with pytest.raises(UserError, match=f"--out: {tmp_path} is not writable"):
        main(["--data_files", str(write_text(tmp_path / "data.jsonl", 0)), "--out", f"{tmp_path}/out"])


def test_a_failed_write_is_reported_in_one_sentence(tmp_path):
    (tmp_path / "out" / "vocab.txt" / "a folder in its place").mkdir(parents=True)
    with pytest.raises(RunFailed, match=r"--out: cannot write .*out \("):
        main(["--data_files", str(write_text(tmp_path / "data.jsonl", 9)), "--out", f"{tmp_path}/out"])
    assert not {"tokenizer.json", ".unfinished"} & set(os.listdir(tmp_path / "out"))


def test_a_tokenizer_is_never_overwritten_and_the_status_is_2(folder, tmp_path):
    before = (folder / "tokenizer.json").read_bytes()
    done = run_command("--data_files", write_text(tmp_path / "data.jsonl", 3), "--out", folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --out:") and done.stderr.count("\n") == 1
    assert (folder / "tokenizer.json").read_bytes() == before


def test_a_path_that_does_not_exist_is_reported_without_importing_transformers(tmp_path):
    check_path("bert-base-uncased", "tokenizer_name")  # may be on the Hub
    check_path(str(tmp_path), "tokenizer_name")
    with pytest.raises(UserError, match=r"^tokenizer_name: \./none does not exist"):
        check_path("./none", "tokenizer_name")
    code = "import sys, src.data.tokenizers, src.data.config; print({'torch', 'transformers', 'streaming'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=COMMAND.parent.parent, text=True) == "set()\n"
