"""Samples straight from a dataset of the Hub: those of its shards, distributed to readers, shuffled and resumed."""

import copy
import gzip
import io
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm
from conftest import ROOT, environment, sentences, write_jsonl
from test_streaming import config, epochs, same, unmasked
from tokenizers.processors import TemplateProcessing

from src.convert_dataset import main as convert
from src.data import hub_samples, streaming
from src.data.convert import SPLITS
from src.errors import UserError
from src.mlm import task
from src.mlm.task import PretrainConfig
from src.training.config import load_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_memory_freed")]
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


class Devices:
    """Composer's `dist` on one of several devices, whose states are gathered in a list."""

    def __init__(self, rank: int, states: list):
        self.get_global_rank, self.get_world_size = lambda: rank, lambda: len(states)
        self.all_gather_object = lambda own: [own if n == rank else state for n, state in enumerate(states)]


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


@pytest.mark.parametrize(("devices", "workers"), [(1, 2), (1, 5), (2, 2), (4, 1)])
def test_an_epoch_holds_every_document_once_whatever_the_number_of_readers(
    dataset, tokenizer, monkeypatch, devices, workers
):
    expected = sorted(str(tokenizer(t, truncation=True, max_length=64)["input_ids"]) for t in TEXTS if t.strip())
    shuffled, read = {"workers": workers, "shuffle": True, "shuffle_block_size": 20}, []
    for rank in range(devices):
        monkeypatch.setattr(hub_samples, "dist", Devices(rank, [None] * devices))
        read.append([texts_of(epoch) for epoch in epochs(loader(dataset, tokenizer, **shuffled), 2)])
        assert [len(texts) for texts in read[-1]] == pytest.approx([len(expected) / devices] * 2, abs=3)
    first, second = (list(itertools.chain(*epoch)) for epoch in zip(*read))
    assert sorted(first) == sorted(second) == expected
    assert first != second


@pytest.mark.parametrize(("files", "readers"), [(1, 1), (3, 8), (120, 64), (1024, 64), (41, 64), (100, 7)])
def test_readers_have_equal_shares_of_the_files(files, readers):
    owned = [0] * readers
    for file, document in itertools.product(range(files), range(readers)):
        owner = hub_samples.owner(file, document, files, readers)
        owned[owner] += 1
        assert file in hub_samples.share(files, owner, readers)
    assert owned == [files] * readers
    most = max(len(hub_samples.share(files, reader, readers)) for reader in range(readers))
    assert most <= -(-files // readers) + 1  # so that little is read twice


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


@pytest.mark.parametrize("changes", [{}, {"concat_tokens": True}, {"val_fraction": 0.7, "split": "val"}], ids=str)
def test_evaluation_starts_with_the_same_batches_whatever_the_number_of_readers(
    dataset, tokenizer, monkeypatch, changes
):
    expected = list(itertools.islice(loader(dataset, tokenizer, train=False, **changes), 12))
    assert len(expected) == 12
    for devices, workers in ((2, 0), (2, 3), (3, 2)):
        read = []
        for rank in range(devices):
            monkeypatch.setattr(hub_samples, "dist", Devices(rank, [None] * devices))
            batches = loader(dataset, tokenizer, train=False, workers=workers, **changes)
            read.append(list(itertools.islice(batches, 12 // devices)))
        assert same(list(itertools.chain(*zip(*read))), expected)


# Resuming


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {"workers": 0},
        {"workers": 2, "packing": True},
        {"workers": 3, "concat_tokens": True},
        {"workers": 5, "drop_last": True},
        {"workers": 2, "concat_tokens": True, "split": "train_small"},
    ],
    ids=str,
)
def test_resuming_at_any_batch_repeats_an_uninterrupted_run(dataset, tokenizer, monkeypatch, changes, persistent):
    monkeypatch.setitem(SPLITS, "train_small", ("train", 120))
    options = {"shuffle": True, "shuffle_block_size": 20, "persistent_workers": persistent, **changes}
    expected, states = [[], [], []], []
    whole = loader(dataset, tokenizer, **options)
    for epoch, batches in enumerate(expected):
        states.append((epoch, 0, whole.dataset.state_dict(0, True)))
        for batch in whole:
            batches.append(batch)
            states.append((epoch, len(batches), whole.dataset.state_dict(len(batches), True)))
    inside_second = [state for state in states if state[0] == 1]
    step = 1 if changes == {"workers": 0} else len(inside_second) // 2
    for epoch, done, state in inside_second[::step]:
        resumed = loader(dataset, tokenizer, **options)
        resumed.dataset.load_state_dict(checkpointed(state))
        assert resumed.dataset.state_dict(done, True) == state
        assert same(list(resumed), expected[epoch][done:]), f"after {done} batches"
    assert same(list(resumed), expected[2])


def checkpointed(state: dict) -> dict:
    """What a checkpoint gives back of a state."""
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_an_epoch_that_is_left_early_is_followed_by_the_next(dataset, tokenizer):
    """Composer leaves an epoch as soon as one device has no batch."""
    options = {"workers": 2, "shuffle": True}
    _, second = epochs(loader(dataset, tokenizer, **options), 2)
    left = loader(dataset, tokenizer, **options)
    list(itertools.islice(left, 3))
    assert same(list(left), second)


def test_devices_resume_together(dataset, tokenizer, monkeypatch):
    options = {"workers": 2, "shuffle": True, "shuffle_block_size": 20}

    def on_device(rank, states, **changes):
        monkeypatch.setattr(hub_samples, "dist", Devices(rank, states))
        return loader(dataset, tokenizer, **{**options, **changes})

    expected, reached = [], [None, None]
    for rank in (0, 1):
        device = on_device(rank, reached)
        batches = iter(device)
        for _ in range(5):
            next(batches)
        reached[rank] = device.dataset.reached
        expected.append(list(batches))
    state = checkpointed(on_device(0, reached).dataset.state_dict(50, True) | {"epoch": 0, "devices": reached})
    for rank in (0, 1):
        resumed = on_device(rank, reached)
        resumed.dataset.load_state_dict(state)
        assert same(list(resumed), expected[rank])
    for readers, states in (({"workers": 1}, [None, None]), ({}, [None])):
        found = (
            f"{len(states)} devices with {readers.get('workers', 2)} loader workers cannot resume .* that 2 with 2 st"
        )
        with pytest.raises(UserError, match=found):
            on_device(0, states, **readers).dataset.load_state_dict(state)
    between = on_device(0, [None], workers=1)  # epochs, where there is nothing to share out again
    between.dataset.load_state_dict({**state, "epoch": 1, "devices": [hub_samples.DEVICE_START] * 2})
    assert sorted(texts_of(between)) == sorted(texts_of(on_device(0, [None], workers=0)))


def test_a_position_of_an_earlier_version_is_refused_within_an_epoch_and_taken_between_epochs(dataset, tokenizer):
    reading = loader(dataset, tokenizer, shuffle=True)
    list(reading)
    second = list(reading)
    start = {"file": 1, "position": None, "documents": 51, "samples": 51, "waiting": None}
    state = {"revision": reading.dataset.source.description["revision"], "epoch": 1, "workers": 1}
    inside, between = ({**state, "devices": [{"turn": 0, "places": places}]} for places in ({0: [start, 3]}, {}))
    resumed = loader(dataset, tokenizer, shuffle=True)
    with pytest.raises(UserError, match=r"within an epoch of \S+ is of another version; start another run from it"):
        resumed.dataset.load_state_dict(inside)
    resumed.dataset.load_state_dict(between)
    assert same(list(resumed), second)


def test_a_folder_that_has_changed_cannot_be_resumed_by_its_revision(dataset, tokenizer):
    state = {**loader(dataset, tokenizer).dataset.state_dict(0, True), "revision": "before"}
    with pytest.raises(UserError, match=r"has changed since .*; restore its files, or start another run from it"):
        loader(dataset, tokenizer).dataset.load_state_dict(state)


def test_all_ranks_read_the_commit_that_rank_0_finds(dataset, shards, monkeypatch):
    monkeypatch.setattr(task, "several", lambda: True)
    monkeypatch.setattr(task, "decide", lambda function: f"{function()} of rank 0")
    own, of_shards = config(Path("unused"), hub=str(dataset)), config(shards)
    found = hub_samples.open_source(own.dataset).description["revision"]
    assert task.at_one_commit(own).dataset.revision == f"{found} of rank 0"
    assert own.dataset.revision is None and task.at_one_commit(of_shards) is of_shards


def test_a_position_in_shards_is_not_one_in_a_dataset_nor_the_reverse(dataset, shards, tokenizer):
    samples, of_shards = loader(dataset, tokenizer).dataset, streaming.build(config(shards), tokenizer, 5, True).dataset
    with pytest.raises(UserError, match=r"position is in shards; .*load_position=false"):
        samples.load_state_dict(of_shards.state_dict(5, True))
    with pytest.raises(UserError, match=r"position is in a dataset on the Hub; .*load_position=false"):
        of_shards.load_state_dict(samples.state_dict(0, True))


# What is refused


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text_column": "body"}, r"no column body \(its columns are text\); set dataset.text_column$"),
        ({"split": "test"}, r"^dataset.hub: cannot read \S+ \(test\) .*train.*; check the name, the split and"),
        ({"split": "test", "val_fraction": 0.1}, "^dataset.val_fraction divides train into .* not test"),
        ({"split": "val", "drop_last": True}, r"\(val\) does not fill a batch of 50 on each device; check the split"),
    ],
)
def test_what_cannot_be_read_is_named_in_one_sentence(dataset, tokenizer, changes, words, workers):
    with pytest.raises(UserError, match=words) as error:
        list(loader(dataset, tokenizer, batch=50, workers=workers, **changes))
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_cannot_concatenate_is_refused_by_the_key(dataset, tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    with pytest.raises(
        UserError, match=r"^dataset.concat_tokens: .* does not frame a text .* or omit dataset.concat_to"
    ):
        loader(dataset, bare, concat_tokens=True)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.concat_tokens=true"], r"^train_loader.dataset.concat_tokens only applies with hub; omit it$"),
        (["eval.val_fraction=0.1"], r"^eval_loader.dataset.val_fraction only applies with hub"),
        (["train.hub=a/b", "train.cache_limit=1gb"], r"^train_loader.dataset.cache_limit only applies to shards"),
        (["train.hub=a/b", "train.shuffle_algo=py2s"], r"^train_loader.dataset.shuffle_algo only applies to shards"),
        (["train.hub=./no/where"], r"^train_loader.dataset.hub: ./no/where is not a folder; fix its path$"),
        (["train.hub=a/b", "max_duration=1ep"], r"^max_duration=1ep: the length of an epoch .*; give it in ba, sp or"),
        (["train.hub=a/b", "scheduler.t_warmup=1ep"], r"^scheduler.t_warmup=1ep: the length of an epoch"),
        (["eval.hub=a/b"], r"^eval_subset_num_batches=-1: .* eval_loader.dataset.hub is unknown; set how many"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(config_file, overrides, words):
    overrides = [
        each.replace("train.", "train_loader.dataset.").replace("eval.", "eval_loader.dataset.") for each in overrides
    ]
    with pytest.raises(UserError, match=words):
        load_config(PretrainConfig, "main.py", "", [str(config_file), *overrides])


# A Hub that is asked over HTTP, and a run

HTTP = """
import json, os, sys, time
sys.path[:0] = sys.argv[1:3]
sleep, time.sleep = time.sleep, lambda seconds: sleep(min(seconds, 0.01))  # before another try
from fake_hub import serve
with serve() as hub:
    os.environ["HF_ENDPOINT"] = hub.url
    from src.data import corpora, hub_samples
    from src.data.config import DatasetConfig, LoaderConfig
    from src.errors import UserError
    from src.training.text_model import build_tokenizer
    tokenizer = build_tokenizer(sys.argv[3], 64, needs=("mask_token", "pad_token"))

    def loader(revision=None):
        corpora._builder.cache_clear()  # as in a new process
        sizes = {"max_seq_len": 64, "mlm_probability": 0.3, "seed": 17}
        options = DatasetConfig(hub="org/texts", split="train", revision=revision, local="", remote=None, **sizes)
        return hub_samples.build(LoaderConfig(options, num_workers=2), tokenizer, 5, train=True)

    def lines(name, count):
        return "".join(json.dumps({"text": f"the dog {name} {n}"}) + "\\n" for n in range(count)).encode()

    files = {"README.md": b"", "train-0.jsonl": lines("a", 20), "train-1.jsonl": lines("b", 30)}
    hub.repos["org/texts"] = {"main": files, "first": files}
    first, found = hub.sha(files), {"counts": []}
    reading = loader()
    hub.fail_reads = 3
    for batch in reading:
        found["counts"].append(len(batch["input_ids"]))
        if len(found["counts"]) == 3:
            state = reading.dataset.state_dict(15, True)
    found["failures_left"] = hub.fail_reads
    hub.repos["org/texts"]["main"] = {**files, "train-2.jsonl": lines("c", 40)}
    try:
        loader().dataset.load_state_dict(state)
    except UserError as error:
        found["changed"] = str(error).replace(first, "FIRST")
    resumed = loader(first)
    resumed.dataset.load_state_dict(state)
    found["resumed"] = sum(len(batch["input_ids"]) for batch in resumed)
    broken = loader()
    hub.fail_reads = 10**6
    try:
        list(broken)
    except UserError as error:
        found["broken"] = str(error)
print(json.dumps(found))
"""


def test_a_dataset_is_read_over_http_at_its_revision_and_a_broken_connection_is_retried(tokenizer_folder):
    command = [sys.executable, "-c", HTTP, ROOT, ROOT / "tests", tokenizer_folder]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (sum(found["counts"]), found["failures_left"], found["resumed"]) == (50, 0, 35)
    assert found["changed"].startswith("org/texts has changed since the checkpoint")
    assert found["changed"].endswith("set train_loader.dataset.revision=FIRST")
    assert found["broken"].startswith("dataset.hub: cannot read org/texts (train) from the Hugging Face Hub: ")
    assert "\n" not in found["broken"]


def test_a_run_on_two_devices_killed_in_its_second_epoch_ends_like_an_uninterrupted_one(tmp_path, write_config):
    dataset = write_dataset(tmp_path / "texts", TEXTS[:60], files=5)  # 7 batches of 8
    file = write_config(
        tmp_path,
        train_loader={"num_workers": 0, "dataset": {"hub": str(dataset), "shuffle_block_size": 20, "packing": True}},
        eval_loader={"num_workers": 0, "dataset": {"hub": str(dataset)}},
        device_train_microbatch_size=4,
        max_duration="16ba",
        eval_interval="7ba",
        eval_subset_num_batches=2,
        save_interval="9ba",
        loggers={},
    )
    whole, killed = tmp_path / "run", tmp_path / "killed"
    statuses, output = warm.run_ranks(2, "main.py", file, output=tmp_path / "whole.txt")
    assert statuses == [0, 0], output
    expected = "data: 5 files of {}, train, shuffled by 20 samples, read from the Hub in every epoch, which is slower"
    assert expected.format(dataset) in output
    assert "16ba: 16 steps of 8 samples" in output
    assert (whole / "ep1-ba9-rank0.pt").exists() and (whole / "ep2-ba16-rank0.pt").exists()
    shutil.copytree(whole, killed, ignore=shutil.ignore_patterns("summary.json", "*-ba16-*", "latest*"))
    statuses, output = warm.run_ranks(2, "main.py", file, f"save_folder={killed}", output=tmp_path / "killed.txt")
    assert statuses == [0, 0], output
    assert "resuming from step 9" in output
    metrics, weights = [], []
    for folder in (whole, killed):
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        metrics.append([(line["step"], line["samples"], line.get("loss"), line.get("eval")) for line in lines])
        weights.append(torch.load(folder / "latest-rank0.pt", weights_only=False)["state"]["model"])
    assert metrics[0] == metrics[1]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
