"""Shards → masked batches: their order, sources, reproducibility, and what is refused."""

import contextlib
import inspect
import json
import multiprocessing
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import streaming
import torch
from conftest import TINY_MODEL, sentences, write_jsonl
from streaming import MDSWriter
from streaming.base.storage.download import S3Downloader
from transformers import BertTokenizerFast

from src.config import _keys
from src.convert_dataset import main as convert
from src.data import streaming as streaming_module
from src.data.batches import IGNORED, sample_count
from src.data.config import BATCHING_METHODS, SHUFFLE_ALGOS, DatasetConfig, LoaderConfig, check_split
from src.data.streaming import StreamingTextDataset, build, build_dataset, describe, ignore_signals
from src.data.tokenizers import vocabulary_digest
from src.errors import UserError

Batch = dict[str, torch.Tensor]

pytestmark = pytest.mark.usefixtures("shared_memory_freed")


def unmasked(batch: Batch) -> torch.Tensor:
    return torch.where(batch["labels"] == IGNORED, batch["input_ids"], batch["labels"])


def config(shards: Path, split: str = "train", workers: int = 0, drop_last: bool = False, **changes) -> LoaderConfig:
    of_loader = {name: changes.pop(name) for name in ("prefetch_factor", "persistent_workers") if name in changes}
    options = {
        "local": str(shards),
        "remote": None,
        "split": split,
        "max_seq_len": 64,
        "mlm_probability": 0.3,
        "seed": 17,
        **changes,
    }
    return LoaderConfig(DatasetConfig(**options), num_workers=workers, drop_last=drop_last, **of_loader)


def same(batches: list[Batch], others: list[Batch]) -> bool:
    return len(batches) == len(others) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(batches, others)
    )


def epochs(loader, count: int = 1) -> list[list[Batch]]:
    return [list(loader) for _ in range(count)]


@pytest.mark.parametrize("packing", [False, True])
def test_the_loader_gives_the_same_batches_with_no_worker_and_with_two(shards, tokenizer, packing):
    plain, parallel = (
        epochs(build(config(shards, workers=workers, shuffle=True, packing=packing), tokenizer, 5, train=True), 2)
        for workers in (0, 2)
    )
    assert all(same(one, other) for one, other in zip(plain, parallel))
    assert not same(*plain)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("packing", [False, True])
def test_drop_last_drops_the_last_batch(shards, tokenizer, workers, packing):
    for drop_last in (False, True):
        options = config(shards, workers=workers, drop_last=drop_last, packing=packing)
        loader = build(options, tokenizer, 5, train=True)
        size = loader.dataset.size
        assert size % 5
        full = [5] * (size // 5)
        assert [sample_count(batch) for batch in loader] == (full if drop_last else [*full, size % 5])


@pytest.mark.parametrize(("train", "key"), [(True, "global_train_batch_size"), (False, "device_eval_batch_size")])
def test_a_batch_larger_than_the_split_is_refused_by_the_key_to_lower(shards, tokenizer, train, key):
    with pytest.raises(UserError, match=f"the split val has .* fewer than a batch of 500; lower {key}"):
        build(config(shards, "val", drop_last=True), tokenizer, 500, train=train)


@pytest.mark.parametrize(("before", "after"), [(0, 0), (0, 2), (2, 1)])
@pytest.mark.parametrize("packing", [False, True])
def test_a_loader_resumes_within_an_epoch_with_another_number_of_workers(shards, tokenizer, before, after, packing):
    def loader(workers):
        return build(config(shards, workers=workers, shuffle=True, packing=packing), tokenizer, 5, train=True)

    _, second, third = epochs(loader(0), 3)
    stopped = loader(before)
    list(stopped)
    batches = iter(stopped)
    seen = [next(batches) for _ in range(4)]
    state = stopped.state_dict()
    resumed = loader(after)
    resumed.load_state_dict(state)
    assert same([*seen, *resumed], second)
    assert same(list(resumed), third)


def test_resuming_reads_no_sample_again(shards, tokenizer, monkeypatch):
    read = []
    fetch = StreamingTextDataset.__getitem__
    monkeypatch.setattr(StreamingTextDataset, "__getitem__", lambda self, i: read.append(int(i)) or fetch(self, i))
    stopped = build(config(shards, shuffle=True), tokenizer, 5, train=True)
    batches = iter(stopped)
    for _ in range(4):
        next(batches)
    seen, state = read[:20], stopped.state_dict()
    resumed = build(config(shards, shuffle=True), tokenizer, 5, train=True)
    read.clear()
    resumed.load_state_dict(state)
    list(resumed)
    assert sorted(seen + read) == list(range(stopped.dataset.size))


def test_a_position_in_other_data_is_refused_or_warned_about(tmp_path, shards, tokenizer, caplog):
    stopped = build(config(shards), tokenizer, 5, train=True)
    list(stopped)
    batches = iter(stopped)
    for _ in range(4):
        next(batches)
    state, size = stopped.state_dict(), stopped.dataset.epoch_size
    one_more, few = (write_texts(tmp_path / f"{n}", sentences(n)) for n in (size + 1, 3))
    resumed = build(config(one_more), tokenizer, 5, train=True)
    with caplog.at_level("WARNING", logger="lion"):
        resumed.load_state_dict(state)
    assert f"has {size + 1:,} samples, and had {size:,} when the checkpoint was saved" in caplog.text
    with pytest.raises(UserError, match=r"this data has 3, but the checkpoint's position is after 20 samples"):
        build(config(few), tokenizer, 5, train=True).load_state_dict(state)
    caplog.clear()
    of_earlier_version = {name: value for name, value in state.items() if name != "samples_per_epoch"}
    build(config(one_more), tokenizer, 5, train=True).load_state_dict(of_earlier_version)
    assert not caplog.text


def test_an_epoch_holds_every_text_once(shards, tokenizer):
    dataset = build_dataset(config(shards).dataset, 5)
    expected = sorted(
        tokenizer(dataset[i]["text"], truncation=True, max_length=64)["input_ids"] for i in range(len(dataset))
    )
    loader = build(config(shards, shuffle=True), tokenizer, 5, train=True)
    for epoch in epochs(loader, 2):
        rows = [row[mask.bool()].tolist() for b in epoch for row, mask in zip(unmasked(b), b["attention_mask"])]
        assert sorted(rows) == expected


def rows_in_order(loader, count: int) -> list[list[tuple]]:
    return [
        [tuple(row[mask.bool()].tolist()) for b in epoch for row, mask in zip(unmasked(b), b["attention_mask"])]
        for epoch in epochs(loader, count)
    ]


@pytest.mark.parametrize("times, given", [(2, True), (100, False)])
def test_a_run_that_starts_at_the_same_moment_costs_only_a_retry(shards, monkeypatch, times, given):
    choose, tried = streaming.base.dataset.get_shm_prefix, []

    def taken(*arguments, **options):
        tried.append(1)
        if len(tried) <= times:
            raise FileExistsError(17, "File exists", "/000000_locals")
        return choose(*arguments, **options)

    monkeypatch.setattr(streaming.base.dataset, "get_shm_prefix", taken)
    if given:
        assert len(build_dataset(config(shards).dataset, 5)) > 0
    else:
        with pytest.raises(UserError, match=r"cannot read the shards of train in .*File exists"):
            build_dataset(config(shards).dataset, 5)


def test_runs_that_hold_one_machine_each_give_way(monkeypatch):
    """The lock is a machine's own, wherever its temporary files are."""
    locks, others = [], iter([False, False, True])

    class Lock:
        held = False

        def __init__(self, path):
            assert path.parent == Path("/dev/shm")
            locks.append(self)

        def acquire(self, timeout):
            self.held = True

        def release(self):
            self.held = False

    def gather(own: bool) -> list[bool]:
        assert own and locks[0].held
        return [own, next(others)]

    monkeypatch.setattr(streaming_module, "FileLock", Lock)
    monkeypatch.setattr(streaming_module.dist, "all_gather_object", gather)
    with streaming_module.first_in_line():
        assert locks[0].held and next(others, "all asked") == "all asked"
    assert not locks[0].held


def test_shuffling_gives_a_new_order_in_every_epoch_which_the_seed_determines(shards, tokenizer):
    one, again, other = (
        rows_in_order(build(config(shards, shuffle=True, seed=seed), tokenizer, 5, train=True), 2)
        for seed in (17, 17, 18)
    )
    assert one[0] != one[1]
    assert one == again
    assert one[0] != other[0]


def test_evaluation_gives_the_same_batches_in_every_epoch_and_training_new_masks(shards, tokenizer):
    first, second = epochs(build(config(shards, "val"), tokenizer, 8, train=False), 2)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(first, second) for name in a)
    first, second = epochs(build(config(shards, "val"), tokenizer, 8, train=True), 2)
    assert all(torch.equal(unmasked(a), unmasked(b)) for a, b in zip(first, second))
    assert any(not torch.equal(a["labels"], b["labels"]) for a, b in zip(first, second))


def test_a_batch_holds_the_inputs_of_the_model(shards, tokenizer):
    from src.lion import LionConfig, LionForMaskedLM

    batch = next(iter(build(config(shards), tokenizer, 4, train=True)))
    model = LionForMaskedLM(LionConfig(**TINY_MODEL, vocab_size=len(tokenizer))).train()
    loss = model(**batch).loss
    assert loss.item() > 0


def test_padding_is_counted_with_and_without_packing(shards, tokenizer):
    loader = build(config(shards, "val"), tokenizer, 8, train=False)
    packed = build(config(shards, "val", packing=True), tokenizer, 8, train=False)
    for single, batch in zip(loader, packed):
        assert batch["attention_mask"].sum() == single["attention_mask"].sum()
    assert loader.padding.shares() == {"padding": packed.padding.shares()["padding_without_packing"]}
    assert packed.padding.shares()["padding"] < 0.6 * loader.padding.shares()["padding"]
    assert str(packed.padding).endswith(f"% of the positions, {loader.padding.shares()['padding']:.1%} without packing")


# Rows of tokens


def write_tokens(folder: Path, tokenizer, texts: list[str], length: int = 64) -> Path:
    """Write a split of token rows, one per text, and return the folder of splits."""
    with MDSWriter(out=str(folder / "train"), columns={"tokens": "ndarray:uint16"}) as out:
        for text in texts:
            out.write({"tokens": np.array(tokenizer(text, truncation=True, max_length=length)["input_ids"], np.uint16)})
    made = {
        "tokenizer": "mine",
        "vocab_size": len(tokenizer),
        "digest": vocabulary_digest(tokenizer),
        "mode": "max_seq_len",
        "length": length,
    }
    (folder / "train" / "split.json").write_text(json.dumps({"tokens": made}))
    return folder


def write_texts(folder: Path, texts: list[str], *options: str) -> Path:
    folder.mkdir()
    data = write_jsonl(folder / "data.jsonl", texts)
    convert(["--data_files", str(data), "--splits", "train", "--out_root", str(folder), *options])
    return folder


@pytest.mark.parametrize("changes", [{}, {"packing": True}, {"whole_word_masking": True}])
def test_tokens_give_the_batches_that_their_text_gives(tmp_path, tokenizer, changes):
    texts = sentences(23)
    folders = write_texts(tmp_path / "text", texts), write_tokens(tmp_path / "tokens", tokenizer, texts)
    batches = [list(build(config(folder, **changes), tokenizer, 5, train=True)) for folder in folders]
    assert same(*batches)


def test_the_description_has_the_tokens_of_split_json(tmp_path, tokenizer, tokenizer_folder):
    texts = sentences(23)
    folder = write_texts(tmp_path / "cut", texts, "--tokenizer", str(tokenizer_folder), "--max_seq_len", "16")
    options = config(folder)
    loader = build(options, tokenizer, 5, train=True)
    kept = sum(len(ids) - 2 for ids in tokenizer(texts, truncation=True, max_length=16)["input_ids"])
    assert describe(options.dataset, loader.dataset) == f"23 samples ({kept} tokens) in {folder}"
    plain = config(write_texts(tmp_path / "plain", texts))
    loader = build(plain, tokenizer, 5, train=True)
    assert describe(plain.dataset, loader.dataset) == f"23 samples in {tmp_path / 'plain'}"


def test_tokens_of_another_tokenizer_are_refused(tmp_path, tokenizer, tokenizer_folder):
    folder = write_tokens(tmp_path, tokenizer, sentences(3))
    vocabulary = (tokenizer_folder / "vocab.txt").read_text().split()
    (tmp_path / "vocab.txt").write_text("\n".join([*vocabulary[:-2], vocabulary[-1], vocabulary[-2]]))
    other = BertTokenizerFast(str(tmp_path / "vocab.txt"))
    with pytest.raises(
        UserError, match=rf"^tokenizer_name: .*train were made by mine with {len(tokenizer)} tokens, not by other;"
    ):
        build(config(folder, tokenizer_name="other"), other, 2, train=True)


def test_tokens_longer_than_max_seq_len_are_refused(tmp_path, tokenizer):
    folder = write_tokens(tmp_path, tokenizer, sentences(3), length=64)
    with pytest.raises(UserError, match=r"max_seq_len=32 is less than the 64 tokens per row .* --max_seq_len 32"):
        build(config(folder, max_seq_len=32), tokenizer, 2, train=True)


def test_rows_shorter_than_max_seq_len_are_reported(tmp_path, tokenizer, caplog):
    folder = write_tokens(tmp_path, tokenizer, sentences(3), length=16)
    for fine in ({"max_seq_len": 16}, {"max_seq_len": 64, "packing": True}):
        build(config(folder, **fine), tokenizer, 2, train=True)
    assert not caplog.text
    build(config(folder, max_seq_len=64), tokenizer, 2, train=True)
    found = f"no row in {folder / 'train'} has more than 16 tokens, though max_seq_len=64; for longer ones, convert"
    assert f"{found} the text with --max_seq_len 64" in caplog.text


@pytest.mark.parametrize("content", [None, "{", "{}", '{"tokens": null}', "[]"])
def test_tokens_without_a_valid_split_json_are_refused(tmp_path, tokenizer, content):
    folder = write_tokens(tmp_path, tokenizer, sentences(3))
    (folder / "train" / "split.json").unlink()
    if content is not None:
        (folder / "train" / "split.json").write_text(content)
    with pytest.raises(UserError, match=r"train/split.json, which names the tokenizer, is missing or corrupt"):
        build(config(folder), tokenizer, 2, train=True)


# Streams


def source_of(batch: Batch, tokenizer) -> list[str]:
    """Which stream each row is from: its texts begin with the stream's name."""
    return [tokenizer.convert_ids_to_tokens(int(row[1])) for row in unmasked(batch)]


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> dict[str, dict]:
    """Streams of 40 and 20 texts."""
    folder = tmp_path_factory.mktemp("streams")
    for name, count in (("dog", 40), ("cat", 20)):
        write_texts(folder / name, [f"{name} {text}" for text in sentences(count)])
    return {name: {"local": str(folder / name)} for name in ("dog", "cat")}


@pytest.mark.parametrize(
    ("weights", "dogs", "cats"),
    [
        ([{}, {}], 40, 20),
        ([{"proportion": 0.2}, {"proportion": 0.8}], 12, 48),
        ([{"proportion": 1}, {"proportion": 3}], 15, 45),
        ([{"repeat": 0.5}, {"repeat": 2}], 20, 40),
        ([{"choose": 7}, {}], 7, 20),
    ],
)
def test_streams_are_mixed_by_their_weights(two, tokenizer, weights, dogs, cats):
    streams = {name: {**stream, **weight} for (name, stream), weight in zip(two.items(), weights)}
    options = config(Path("unused"), shuffle=True, streams=streams)
    loader = build(options, tokenizer, 6, train=True)
    found = [name for batch in loader for name in source_of(batch, tokenizer)]
    assert (found.count("dog"), found.count("cat")) == (dogs, cats)
    assert found[:dogs] != ["dog"] * dogs  # they are shuffled together
    assert (
        describe(options.dataset, loader.dataset) == f"{dogs + cats} samples per epoch ({dogs} of dog, {cats} of cat)"
    )


def test_the_same_text_in_two_streams_has_two_masks(two, tokenizer, tmp_path):
    copy = shutil.copytree(two["cat"]["local"], tmp_path / "copy")
    streams = {"cat": two["cat"], "copy": {"local": str(copy)}}
    loader = build(config(Path("unused"), streams=streams), tokenizer, 20, train=True)
    first, second = loader
    assert torch.equal(unmasked(first), unmasked(second))
    assert not torch.equal(first["labels"], second["labels"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dog": "folder"}, ["streams.dog must hold", "local"]),
        ({"dog": {"remote": "s3://bucket"}}, ["streams.dog must hold", "local"]),
        ({"dog": {"local": "x", "proporton": 1}}, ["unknown key streams.dog.proporton; did you mean proportion?"]),
        ({"dog": {"local": "no/such"}}, ["streams.dog: no/such does not exist"]),
        ({"dog": {"local": "{cat}", "split": "val"}}, ["streams.dog", "val holds no shards (its splits are train)"]),
        ({"dog": {"local": "{dog}", "proportion": 1, "repeat": 1}}, ["streams.dog: At most one of"]),
        ({"dog": {"local": "{dog}", "proportion": -1}}, ["streams.dog", "non-negative"]),
        ({"dog": {"local": "{dog}", "proportion": "half"}}, ["streams.dog: "]),
        ({"dog": {"local": "{dog}", "proportion": 1}}, ["streams: Relative", "incompatible"]),
        ({"dog": {"local": "{cat}"}}, ["cannot read the shards", "Reused local directory"]),
        ({"dog": {"local": "x", "remote": "ftp://nowhere"}}, ["streams.dog: Unsupported remote path"]),
    ],
)
def test_invalid_streams_are_refused_by_name(two, tokenizer, change, words):
    def filled(value):
        return value.format(dog=two["dog"]["local"], cat=two["cat"]["local"]) if isinstance(value, str) else value

    changed = {
        name: {key: filled(value) for key, value in stream.items()} if isinstance(stream, dict) else stream
        for name, stream in change.items()
    }
    with pytest.raises(UserError) as error:
        build(config(Path("unused"), streams={**two, **changed}), tokenizer, 4, train=True)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_text_and_tokens_do_not_mix(two, tokenizer, tmp_path):
    streams = {"dog": two["dog"], "rows": {"local": str(write_tokens(tmp_path, tokenizer, sentences(3)))}}
    with pytest.raises(UserError, match=r"dog/train holds text and \S+ tokens; convert both the same way"):
        build(config(Path("unused"), streams=streams), tokenizer, 4, train=True)


# The knobs of streaming and of its loader


def test_the_choices_are_those_of_streaming():
    assert set(SHUFFLE_ALGOS) == streaming.base.shuffle.algos.keys()
    assert set(BATCHING_METHODS) == streaming.base.batching.batching_methods.keys()


def test_every_knob_reaches_streaming_or_its_loader(shards, tokenizer):
    plain = build(config(shards, workers=1, shuffle=True), tokenizer, 5, train=True)
    library = inspect.signature(streaming.StreamingDataset).parameters
    passed = {"shuffle_algo": "py2s", "shuffle_block_size": 7, "batching_method": "stratified"}
    dataset = build_dataset(config(shards, **passed, download_timeout=5.5).dataset, 5)
    for name, value in passed.items():
        assert getattr(plain.dataset, name) == library[name].default != value == getattr(dataset, name)
    assert plain.dataset.streams[0].download_timeout == library["download_timeout"].default
    assert dataset.streams[0].download_timeout == 5.5
    assert (plain.prefetch_factor, plain.persistent_workers) == (2, True)
    changed = config(shards, workers=1, prefetch_factor=3, persistent_workers=False)
    loader = build(changed, tokenizer, 5, train=True)
    assert (loader.prefetch_factor, loader.persistent_workers) == (3, False)


def test_workers_that_end_with_their_epoch_give_the_batches_of_those_that_stay(shards, tokenizer):
    stay, end = (
        epochs(build(config(shards, workers=1, shuffle=True, persistent_workers=keep), tokenizer, 16, train=True), 2)
        for keep in (True, False)
    )
    assert all(same(one, other) for one, other in zip(stay, end))


def test_samples_are_shuffled_within_blocks(shards, tokenizer):
    def order(**changes):
        return [sample["sample"][1] for sample in build_dataset(config(shards, shuffle=True, **changes).dataset, 5)]

    far, near = (
        max(abs(at - sample) for at, sample in enumerate(order(shuffle_algo="py1br", shuffle_block_size=size)))
        for size in (1 << 18, 4)
    )
    assert near < 8 < far


def test_stratified_batches_hold_every_stream_in_its_share(two, tokenizer):
    options = config(Path("unused"), shuffle=True, streams=two, batching_method="stratified")
    batches = [source_of(batch, tokenizer) for batch in build(options, tokenizer, 6, train=True)]
    assert [(names.count("dog"), names.count("cat")) for names in batches] == [(4, 2)] * 10


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_that_do_not_fit_a_batching_method_are_refused_in_one_sentence(two, tokenizer, workers):
    options = config(Path("unused"), workers=workers, streams=two, batching_method="stratified")
    with pytest.raises(
        UserError, match=r"^batching_method=stratified and .* cannot order these samples: Number of"
    ) as e:
        next(iter(build(options, tokenizer, 1, train=True)))
    assert "\n" not in str(e.value)


def test_workers_that_do_not_exist_cannot_prepare_batches_ahead(shards):
    with pytest.raises(UserError, match=r"^train_loader.prefetch_factor=4 needs .*set train_loader.num_workers to at"):
        config(shards, prefetch_factor=4).check("train_loader")
    config(shards, workers=1, prefetch_factor=4).check("train_loader")


def test_a_resumed_run_may_change_what_leaves_the_order_of_samples():
    keys = {name: entry.metadata["may_change"] for name, entry, _ in _keys(LoaderConfig)}
    knobs = "shuffle_algo shuffle_block_size batching_method download_timeout".split()
    assert [keys[f"dataset.{name}"] for name in knobs] == [False, False, False, True]
    assert keys["prefetch_factor"] is keys["persistent_workers"] is True


# A remote and its cache


def test_a_remote_is_copied_to_the_cache_and_gives_what_it_holds(tmp_path, shards, tokenizer):
    def loader(local, remote=None, **changes):
        return build(config(local, shuffle=True, remote=remote, **changes), tokenizer, 5, train=True)

    expected = epochs(loader(shards), 2)
    found = epochs(loader(tmp_path / "cache", str(shards), workers=2), 2)
    assert all(same(one, other) for one, other in zip(expected, found))
    assert (tmp_path / "cache" / "train" / "index.json").is_file()


def size_of_settled(folder) -> int:
    """The bytes of complete files in a folder, at a moment when none is added or removed."""
    before = None
    while True:
        with contextlib.suppress(FileNotFoundError):
            now = {path: path.stat().st_size for path in folder.iterdir() if path.suffix != ".tmp"}
            if now == before:
                return sum(now.values())
            before = now


def test_the_cache_holds_no_more_than_its_limit(tmp_path, tokenizer):
    texts = sentences(120)
    remote = write_texts(tmp_path / "remote", texts, "--size_limit", "1024")
    assert len(list((remote / "train").glob("*.mds"))) > 10
    cache, limit = tmp_path / "cache", (remote / "train" / "index.json").stat().st_size + 5 * 1024
    loader = build(config(cache, remote=str(remote), cache_limit=f"{limit}b", predownload=8), tokenizer, 8, train=True)
    rows = []
    for batch in loader:
        rows += [row[real.bool()].tolist() for row, real in zip(unmasked(batch), batch["attention_mask"])]
        # Streaming frees space for each shard alone, but a prefetching thread and a reader may each fetch one.
        assert size_of_settled(cache / "train") <= limit + 2 * 1024
    assert rows == tokenizer(texts, truncation=True, max_length=64)["input_ids"]


def test_tokens_of_a_remote_are_checked_by_the_split_json_there(tmp_path, tokenizer):
    remote = write_tokens(tmp_path / "remote", tokenizer, sentences(12))
    options = config(tmp_path / "cache", remote=str(remote))
    assert sum(sample_count(batch) for batch in build(options, tokenizer, 4, train=True)) == 12
    with pytest.raises(UserError, match="max_seq_len=32 is less than"):
        build(config(tmp_path / "cache", remote=str(remote), max_seq_len=32), tokenizer, 4, train=True)
    (remote / "train" / "split.json").unlink()
    build(options, tokenizer, 4, train=True)  # it is in the cache
    with pytest.raises(UserError, match=r"cannot fetch train/split.json \(.*No such file"):
        build(config(tmp_path / "other", remote=str(remote)), tokenizer, 4, train=True)


@pytest.mark.parametrize(
    "options", [{"remote": "s3://bucket/texts"}, {"streams": {"web": {"remote": "s3://bucket/texts"}}}]
)
def test_a_bucket_is_read_through_its_own_client(tmp_path, tokenizer, monkeypatch, options):
    here = write_tokens(tmp_path / "here", tokenizer, sentences(12))
    asked = []

    def fetch(self, remote, local, timeout):
        asked.append(remote)
        shutil.copy(here / remote.removeprefix("s3://bucket/texts/"), local)

    monkeypatch.setattr(S3Downloader, "_download_file_impl", fetch)
    for stream in options.get("streams", {}).values():
        stream["local"] = str(tmp_path / "cache")
    loader = build(config(tmp_path / "cache", **options), tokenizer, 4, train=True)
    assert sum(sample_count(batch) for batch in loader) == 12
    assert sorted(asked) == [
        f"s3://bucket/texts/train/{name}" for name in ("index.json", "shard.00000.mds", "split.json")
    ]


def test_a_missing_remote_is_named(tmp_path, tokenizer):
    with pytest.raises(UserError, match=r"cannot read the shards of train in \S+nowhere: .*No such file"):
        build(config(tmp_path / "cache", remote=str(tmp_path / "nowhere")), tokenizer, 4, train=True)


# What is missing


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match=r"data_local: \S+nowhere does not exist.*--splits train_small"):
        build_dataset(config(tmp_path / "nowhere", "train_small").dataset, 5)


def test_a_missing_split_is_named_with_those_that_exist(shards):
    for wrong, words in ((shards / "train", "train is a split itself; give the folder that it is in"),
                         (shards.parent, rf"but its folders do; give one of them: .*{shards.name}")):  # fmt: skip
        with pytest.raises(UserError, match=words):
            check_split("data_local", wrong, "train")
    with pytest.raises(UserError, match=r"train_small holds no shards \(its splits are train, val\)"):
        build_dataset(config(shards, "train_small").dataset, 5)


def test_an_empty_folder_holds_no_split(tmp_path):
    with pytest.raises(UserError, match="has no finished split"):
        build_dataset(config(tmp_path).dataset, 5)


def test_shards_without_text_are_named_with_their_columns(tmp_path):
    with MDSWriter(out=str(tmp_path / "train"), columns={"body": "str", "id": "int"}) as out:
        out.write({"body": "hello", "id": 1})
    with pytest.raises(UserError, match=r"train: no column `text` or `tokens`, only body, id"):
        build_dataset(config(tmp_path).dataset, 5)


def test_a_split_smaller_than_a_batch_is_refused_with_drop_last(shards, tokenizer):
    """Epochs without a batch would never end."""
    options = config(shards, drop_last=True)
    with pytest.raises(UserError, match=r"1000"):
        build(options, tokenizer, 1000, train=True)


def test_a_truncated_index_is_named(shards, tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "index.json").write_text((shards / "train" / "index.json").read_text()[:40])
    with pytest.raises(UserError, match=r"train"):
        build_dataset(config(tmp_path).dataset, 5)


def test_an_index_without_its_shards_is_named(shards, tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "index.json").write_text((shards / "train" / "index.json").read_text())
    with pytest.raises(UserError, match=r"train"):
        build_dataset(config(tmp_path).dataset, 5)


@pytest.mark.parametrize("options", [[], ["--compression", "zstd"]])
def test_a_truncated_shard_is_named_before_the_first_step(tmp_path, options):
    folder = write_texts(tmp_path / "texts", sentences(64), *options)
    shard = next(folder.glob("train/shard.00000.mds*"))
    build_dataset(config(folder).dataset, 5)
    shard.write_bytes(shard.read_bytes()[:-10])
    size = shard.stat().st_size
    with pytest.raises(UserError, match=rf"{shard} has {size:,} bytes, and {size + 10:,} .* copy the split again"):
        build_dataset(config(folder).dataset, 5)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_damaged_samples_name_their_shard(tmp_path, tokenizer, kind, workers):
    write = write_texts if kind == "text" else lambda folder, texts: write_tokens(folder, tokenizer, texts)
    shard = write(tmp_path / kind, sentences(12)) / "train" / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:-20] + b"\xff" * 20)  # neither UTF-8 nor tokens
    loader = build(config(tmp_path / kind, workers=workers), tokenizer, 4, train=True)
    with pytest.raises(UserError) as error:
        list(loader)
    assert str(error.value).startswith(f"{shard} is damaged: sample 11 cannot be read (")
    assert str(error.value).endswith("); copy it again, or convert the data again")


def test_a_shard_of_zeros_is_damaged(tmp_path):
    shard = write_texts(tmp_path / "texts", sentences(12)) / "train" / "shard.00000.mds"
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(UserError, match=rf"{shard} is damaged: sample 3 "):
        build_dataset(config(tmp_path / "texts").dataset, 4)[3]


def _wait_for_word(connection) -> None:
    ignore_signals(0)
    connection.send("ready")
    connection.recv()
    connection.send("alive")
    time.sleep(30)


@pytest.mark.parametrize("signum", ["TERM", "INT"])
def test_only_the_main_process_ends_a_worker_by_signal(signum):
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=_wait_for_word, args=(theirs,), daemon=True)
    worker.start()
    assert ours.recv() == "ready"
    subprocess.run(["kill", f"-{signum}", str(worker.pid)], check=True, timeout=10)
    ours.send("continue")
    assert ours.poll(10) and ours.recv() == "alive"
    for _ in range(10):  # a signal that arrives while another is pending is lost
        worker.terminate()
        worker.join(1)
        if worker.exitcode is not None:
            break
    assert worker.exitcode == 0
