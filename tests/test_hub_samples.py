"""Samples straight from a dataset of the Hub: those of its shards, dealt to readers, shuffled and resumed."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from conftest import sentences, write_jsonl
from test_streaming import config, epochs, same, unmasked

from src.convert_dataset import main as convert
from src.data import hub_samples, streaming
from src.data.convert import SPLITS

pytestmark = pytest.mark.slow
TEXTS = [*sentences(150), "", " ", "the dog sees " * 60]


def write_dataset(folder: Path, texts: list[str], files: int) -> Path:
    """Write a dataset repository with the splits train, in several files, and validation."""
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    for number in range(files):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[number::files])
        (folder / f"train-{number}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    write_jsonl(folder / "validation.jsonl", texts[:30])
    return folder


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("hub") / "texts", TEXTS, files=3)


@pytest.fixture(autouse=True)
def small_reads(monkeypatch):
    monkeypatch.setattr("src.data.corpora.RECORDS", 8)


def loader(dataset: Path, tokenizer, batch: int = 5, train: bool = True, **changes) -> hub_samples.HubDataLoader:
    return hub_samples.build(config(Path("unused"), hub=str(dataset), **changes), tokenizer, batch, train)


def texts_of(batches) -> list[str]:
    return [str(row[real.bool()].tolist()) for b in batches for row, real in zip(unmasked(b), b["attention_mask"])]


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, []),
        ({"packing": True}, []),
        ({"concat_tokens": True, "packing": True}, ["--tokenizer", "{tokenizer}", "--concat_tokens", "64"]),
        ({"val_fraction": 0.3}, ["--val_fraction", "0.3"]),
        ({"split": "val", "val_fraction": 0.3}, ["--val_fraction", "0.3"]),
        ({"split": "val"}, []),
        ({"split": "train_small"}, []),
    ],
)
def test_batches_are_those_of_the_converted_dataset(
    dataset, tokenizer, tokenizer_folder, tmp_path, monkeypatch, changes, options
):
    monkeypatch.setitem(SPLITS, "train_small", ("train", 60))
    split = changes.get("split", "train")
    options = [option.format(tokenizer=tokenizer_folder) for option in options]
    convert(["--dataset", str(dataset), "--splits", split, "--out_root", str(tmp_path), "--num_workers", "1", *options])
    of_both = {name: value for name, value in changes.items() if name in ("packing", "split")}
    expected = epochs(streaming.build(config(tmp_path, **of_both), tokenizer, 5, train=True), 2)
    found = epochs(loader(dataset, tokenizer, **changes), 2)
    assert len(expected[0]) > 5
    assert all(same(one, other) for one, other in zip(expected, found))


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_an_epoch_holds_every_document_once_whatever_the_number_of_readers(dataset, tokenizer, workers):
    expected = sorted(str(tokenizer(t, truncation=True, max_length=64)["input_ids"]) for t in TEXTS if t.strip())
    found = loader(dataset, tokenizer, workers=workers, shuffle=True, shuffle_block_size=20)
    first, second = map(texts_of, epochs(found, 2))
    assert sorted(first) == sorted(second) == expected
    assert first != second


def test_the_first_documents_of_a_split_are_shared_by_all_readers(dataset, tokenizer, monkeypatch):
    monkeypatch.setitem(SPLITS, "train_small", ("train", 60))
    one, three = (
        texts_of(loader(dataset, tokenizer, workers=workers, split="train_small", shuffle=True)) for workers in (0, 3)
    )
    assert len(one) == 60
    assert sorted(one) == sorted(three)
    assert one != three


def test_the_seed_determines_the_order_and_blocks_are_shuffled(dataset, tokenizer):
    def order(**changes):
        return texts_of(loader(dataset, tokenizer, shuffle=True, **changes))

    assert order(seed=1) == order(seed=1) != order(seed=2)
    plain = texts_of(loader(dataset, tokenizer))
    blocks = order(seed=1, shuffle_block_size=16)
    parts = [set(blocks[start : start + 16]) for start in range(0, 48, 16)]
    assert all(part in [set(plain[at : at + 16]) for at in range(len(plain))] for part in parts)
    assert blocks[:16] not in [plain[at : at + 16] for at in range(len(plain))]


def test_evaluation_repeats_its_masks_and_training_does_not(dataset, tokenizer):
    first, second = epochs(loader(dataset, tokenizer, train=False, split="val"), 2)
    assert same(first, second)
    first, second = epochs(loader(dataset, tokenizer, split="val"), 2)
    assert texts_of(first) == texts_of(second)
    assert not same(first, second)


# Resuming


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {"workers": 0},
        {"workers": 2, "packing": True},
        {"workers": 3, "concat_tokens": True},
        {"workers": 5, "drop_last": True},
    ],
    ids=str,
)
def test_resuming_at_any_batch_repeats_an_uninterrupted_run(dataset, tokenizer, changes, persistent):
    options = {"shuffle": True, "shuffle_block_size": 20, "persistent_workers": persistent, **changes}
    expected, states = [[], [], []], []
    whole = loader(dataset, tokenizer, **options)
    for epoch, batches in enumerate(expected):
        states.append((epoch, 0, whole.dataset.state_dict(0, True)))
        for batch in whole:
            batches.append(batch)
            states.append((epoch, len(batches), whole.dataset.state_dict(len(batches), True)))
    inside_second = [state for state in states if state[0] == 1]
    for epoch, done, state in inside_second[:: 1 if changes == {"workers": 0} else 6]:
        resumed = loader(dataset, tokenizer, **options)
        resumed.dataset.load_state_dict(json_copy(state))
        assert resumed.dataset.state_dict(done, True) == state
        assert same(list(resumed), expected[epoch][done:]), f"after {done} batches"
    assert same(list(resumed), expected[2])


def json_copy(value):
    """A checkpoint's copy."""
    import io

    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
