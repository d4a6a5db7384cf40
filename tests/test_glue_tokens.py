"""Tokens of a task: the same as without them, kept in a file, and made again whenever that does not fit."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import sentences
from glue_files import write_glue, write_yaml

from src.config import load
from src.data.tokenizers import load_tokenizer, tokenizer_digest
from src.glue import tokens
from src.glue.examples import read_task
from src.glue.experiment import FinetuneConfig
from src.glue.finetune import collator
from src.glue.tasks import GLUE
from src.jobs.training import loader

SST2 = replace(GLUE["sst2"], max_seq_len=64)


@pytest.fixture(scope="module")
def glue_dir(tmp_path_factory) -> Path:
    return write_glue(tmp_path_factory.mktemp("glue"))


@pytest.fixture
def config(tmp_path, glue_dir, tokenizer_folder):
    """config(key=value, ...): the checked config of a run."""

    def make(**settings: object) -> FinetuneConfig:
        settings = {"glue_dir": str(glue_dir), "tokenizer_name": str(tokenizer_folder), **settings}
        return load(FinetuneConfig, "glue.py", [str(write_yaml(tmp_path / "f.yaml", **settings))])

    return make


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "tokens" / "sst2.safetensors"


@pytest.fixture
def tokenized(monkeypatch) -> list[str]:
    """Names of the tasks that are tokenized from now on."""
    names, tokenize = [], tokens.tokenize
    monkeypatch.setattr(tokens, "tokenize", lambda data, *rest: names.append(data.task.name) or tokenize(data, *rest))
    return names


def same(one: tokens.Tokens, other: tokens.Tokens) -> bool:
    """Whether two splits are equal, in the types of their numbers too."""
    tensors = one.tensors.keys() == other.tensors.keys() and all(
        torch.equal(tensor, other.tensors[name]) and tensor.dtype == other.tensors[name].dtype
        for name, tensor in one.tensors.items()
    )
    return tensors and (one.ids, one.texts) == (other.ids, other.texts)


@pytest.mark.parametrize(("name", "length"), [("sst2", 64), ("rte", 21), ("stsb", 24), ("mnli", 64)])
def test_batches_are_those_of_tokenizing_each_when_it_is_needed(glue_dir, tokenizer, config, path, name, length):
    task, config = replace(GLUE[name], max_seq_len=length), config(predict_test=True)
    data = read_task(task, str(glue_dir), with_test=True)
    read = tokens.read(tokens.keep(data, tokenizer, config, path), task, tokenizer, config)
    assert read.task == data.task
    splits, found = tokens._splits(data), tokens._splits(read)
    assert [split[:2] for split in splits] == [split[:2] for split in found]
    multiple = 8 if length % 8 == 0 else None
    padding = {"padding": "longest", "pad_to_multiple_of": multiple, "return_tensors": "pt"}
    for (*_, examples), (*_, split) in zip(splits, found):
        batches = list(loader(split, collator(tokenizer, length), 8))
        assert len(batches) == -(-len(examples) // 8)
        for number, batch in enumerate(batches):
            group = examples[8 * number :][:8]
            texts = map(list, zip(*(example.texts for example in group)))
            expected = dict(tokenizer(*texts, truncation=True, max_length=length, **padding))
            if group[0].label is not None:
                dtype = torch.float32 if task.regression else torch.long
                expected["labels"] = torch.tensor([example.label for example in group], dtype=dtype)
            assert batch.keys() == expected.keys()
            for key, tensor in expected.items():
                assert tensor.dtype == batch[key].dtype and torch.equal(tensor, batch[key]), key
        assert split.ids == [example.id for example in examples]
    assert read.train.labels.tolist() == [example.label for example in data.train]


def test_processes_prepare_the_same_batches_in_the_same_order(glue_dir, tokenizer, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    split = tokens.tokenize(read_task(SST2, str(glue_dir)), tokenizer, 64).train
    states, orders = set(), []
    for workers in (0, 2):
        torch.manual_seed(0)
        batched = loader(split, collator(tokenizer, 64), 8, workers, shuffle_seed=19)
        orders.append([batch["input_ids"].tolist() for _ in range(2) for batch in batched])
        states.add(torch.rand(1).item())  # dropout, on a CPU, is drawn from the same generator
    assert orders[0] == orders[1] and len(states) == 1


def test_tokens_are_made_once_and_mapped_into_memory(glue_dir, tokenizer, config, path, tokenized):
    config, data = config(), read_task(SST2, str(glue_dir))
    kept = tokens.keep(data, tokenizer, config, path)
    tokenizer(["a call that changes the state of the tokenizer"], truncation=True, max_length=5, padding="max_length")
    assert tokens.keep(data, tokenizer, config, path) == kept
    read = tokens.read(pickle.loads(pickle.dumps(kept)), SST2, tokenizer, config)
    assert tokenized == ["sst2"] and [file.name for file in path.parent.iterdir()] == [path.name]
    assert str(path) in Path("/proc/self/maps").read_text()
    assert same(read.train, tokens.tokenize(data, tokenizer, 64).train)


def test_tokens_are_made_again_if_anything_that_they_depend_on_changes(
    glue_dir, tokenizer, tokenizer_folder, config, path, tokenized
):
    task, data = SST2, read_task(SST2, str(glue_dir))
    cased = load_tokenizer(tokenizer_folder, do_lower_case=False)
    assert cased.get_vocab() == tokenizer.get_vocab() and tokenizer_digest(cased) != tokenizer_digest(tokenizer)
    other_text = data._replace(train=[*data.train[1:], data.train[0]])
    other_labels = data._replace(task=replace(task, labels=("1", "0")))
    more = data._replace(test={"test": data.train[:3]})
    changed = [(data, tokenizer, 64), (other_text, tokenizer, 64), (other_labels, tokenizer, 64), (more, tokenizer, 64)]
    changes = [*changed, (data, cased, 64), (data, tokenizer, 32)]
    settings = config()
    for count, (given, tool, length) in enumerate(changes, 1):
        given = given._replace(task=replace(given.task, max_seq_len=length))
        kept = tokens.keep(given, tool, settings, path)
        assert len(tokenized) == count
        read = tokens.read(kept, task, tool, settings)
        assert len(tokenized) == count and read.task.labels == given.task.labels and list(read.test) == list(given.test)
    assert tokens.keep(given, tokenizer, settings, path) == kept and len(tokenized) == count


def test_a_truncated_or_corrupt_file_is_noticed_and_replaced(glue_dir, tokenizer, config, path, tokenized, caplog):
    task, config, data = SST2, config(), read_task(SST2, str(glue_dir))
    kept = tokens.keep(data, tokenizer, config, path)
    expected, content = tokens.tokenize(data, tokenizer, 64), path.read_bytes()
    broken = [content[:size] for size in (0, 5, 100, len(content) // 2, len(content) - 1)]
    for place in range(0, len(content), 97):
        broken.append(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    for wrong in [*broken, None]:
        path.unlink()
        if wrong is not None:
            path.write_bytes(wrong)
        assert tokens._load(kept, task) is None
    assert same(tokens.read(kept, task, tokenizer, config).validation["dev"], expected.validation["dev"])
    assert "missing or corrupt; tokenizing SST-2" in caplog.text
    path.write_bytes(broken[0])
    tokenized.clear()
    assert tokens.keep(data, tokenizer, config, path) == kept
    assert tokenized == ["sst2"] and tokens._load(kept, task) is not None


def test_a_folder_that_cannot_be_written_costs_only_speed(glue_dir, tokenizer, config, path, caplog):
    path.parent.write_text("a file")
    config, data = config(), read_task(SST2, str(glue_dir))
    kept = tokens.keep(data, tokenizer, config, path)
    assert f"cannot write {path} (" in caplog.text and "each job of SST-2 tokenizes" in caplog.text
    read = tokens.read(kept, SST2, tokenizer, config)
    assert same(read.train, tokens.tokenize(data, tokenizer, 64).train)


def test_a_tokenizer_without_tokenizer_json_is_told_apart_too(tokenizer_folder, tmp_path):
    from transformers import BertTokenizer

    slow, cased = (BertTokenizer(str(tokenizer_folder / "vocab.txt"), do_lower_case=lower) for lower in (True, False))
    digests = [tokenizer_digest(each) for each in (slow, cased)]
    assert digests[0] != digests[1]
    slow(sentences(2), truncation=True, max_length=8)
    assert [tokenizer_digest(each) for each in (slow, cased)] == digests
