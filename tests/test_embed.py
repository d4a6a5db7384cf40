"""`embed.py` as a user runs it: what a run writes, resuming after kills, devices, sources, mistakes, evaluation."""

import json
import re
import signal
from pathlib import Path

import pytest
import torch
import warm
import yaml
from conftest import ROOT, sentences, write_jsonl
from test_embed_retrieval import write_beir

import embed
from src.checkpoints.reading import read_checkpoint
from src.embed import batches
from src.embed.config import EmbedConfig
from src.embed.pairs import open_pairs, text_key, tokens_key
from src.embed.task import Embedding
from src.errors import UserError
from src.publish.card import model_card
from src.training.config import load_config

pytestmark = pytest.mark.slow  # most tests need a run


@pytest.fixture(scope="session")
def pairs(tmp_path_factory) -> Path:
    """A folder with two sources: a.jsonl, with negatives, and b.csv, with columns of other names."""
    folder, texts = tmp_path_factory.mktemp("pairs"), sentences(60, seed=5)
    rows = [
        {"query": " ".join(text.split()[:3]), "document": text, "negatives": texts[n + 1 : n + 1 + n % 4]}
        for n, text in enumerate(texts[:40])
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = ["question,answer", *(f'{" ".join(text.split()[-3:])},"{text}"' for text in texts[40:])]
    (folder / "b.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def write_config(pairs, checkpoint):
    """write_config(folder, key=value, ...) → a tiny config with everything on that saves to folder/run."""

    def write(folder: Path, **changes) -> Path:
        config = {
            "inherit": str(ROOT / "yamls" / "embed" / "finetune.yaml"),
            "run_name": "tiny", "starting_checkpoint_load_path": str(checkpoint), "pooling": "attention",
            "data": {
                "a": {"files": str(pairs / "a.jsonl"), "columns": {"negatives": "negatives"}},
                "b": {"files": [str(pairs / "b.csv")], "columns": {"query": "question", "document": "answer"}},
            },
            "prompts": {"query": "the dog ", "document": ""}, "max_seq_len": 24, "query_max_seq_len": 12,
            "held_out": 4, "negatives": 2, "matryoshka_dims": [8, 32], "symmetric": True,
            "device_train_microbatch_tokens": 64, "device_eval_batch_size": 8, "train_loader": {"num_workers": 0},
            "optimizer": {"lr": 1e-2}, "max_duration": "3ep", "global_train_batch_size": 8, "eval_interval": "4ba",
            "save_interval": "4ba", "log_interval": "1ba", "save_num_checkpoints_to_keep": -1, "loggers": {},
            "callbacks": {},
            "device": "cpu", "progress_bar": False, "save_folder": str(folder / "run"),
        }  # fmt: skip
        path = folder / "tiny.yaml"
        path.write_text(yaml.safe_dump({**config, **changes}))
        return path

    return write


@pytest.fixture(scope="session")
def trained(tmp_path_factory, write_config) -> tuple[Path, str]:
    """The folder and output of a finished run."""
    folder = tmp_path_factory.mktemp("trained")
    status, output = warm.run("embed.py", write_config(folder), output=folder / "output")
    assert status == 0, output
    return folder / "run", output


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(folder / "latest-rank0.pt").weights


def lines(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl without times."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if "second" not in name} for line in found]


def test_a_run_learns_says_what_it_cut_and_can_be_scored(trained, tmp_path, capsys):
    folder, output = trained
    assert "52 pairs of a, b" in output and "lion-s, 1 layers of 32, attention pooling" in output
    cut = re.search(r"truncated to the maximum length: ([\d.]+)% of the queries and ([\d.]+)% of the documents", output)
    assert float(cut[1]) == 0 and float(cut[2]) > 10
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["best"]["loss"] < summary["before"]["loss"]
    assert lines(folder)[-2]["cut_documents"] > 0.1 and (folder / "curves.png").is_file()
    card = model_card(read_checkpoint(folder / "latest-rank0.pt"), "name")
    for fact in (
        "(`truncate_dim`): 8, 32",
        "sources: a, b",
        "negatives of each query: 2",
        "evaluated on: up to 4 held-out",
    ):
        assert fact in card
    assert "prompt of each query: `the dog `" in card and "difference between the vectors" in card
    read = read_checkpoint(folder / "latest-rank0.pt")
    assert read.class_name == "LionEmbeddingModel" and read.config.pooling == "attention"
    assert read.embedding == {"prompts": {"query": "the dog ", "document": ""}, "max_seq_len": 24}
    beir = write_beir(tmp_path / "beir")
    embed.main(["evaluate", str(folder / "latest-rank0.pt"), "--data", str(beir)])
    assert "beir: 2 queries, 4 documents" in capsys.readouterr().out


def test_a_killed_run_ends_as_an_uninterrupted_one(trained, write_config, tmp_path):
    """Killed while it reads its pairs, between checkpoints, and stopped by a signal; packed and without workers."""
    config, folder = write_config(tmp_path), tmp_path / "run"
    process = warm.start("embed.py", config, output=tmp_path / "first")
    warm.wait_for(lambda: len(list(folder.glob("pairs/*"))), process)
    process.kill()
    warm.join(process)
    process = warm.start("embed.py", config, output=tmp_path / "second")
    warm.wait_for(lambda: (folder / "metrics.jsonl").is_file() and len(lines(folder)) > 7, process)
    process.kill()
    warm.join(process)
    assert (folder / "latest-rank0.pt").exists() and not (folder / "summary.json").exists()
    process = warm.start("embed.py", config, output=tmp_path / "third")
    warm.wait_for(lambda: (tmp_path / "third").is_file() and "resuming" in (tmp_path / "third").read_text(), process)
    process.terminate()
    assert warm.join(process) in (0, 128 + signal.SIGTERM)
    status, output = warm.run("embed.py", config, output=tmp_path / "fourth")
    assert status == 0, output
    expected = trained[0]
    assert lines(folder) == lines(expected)
    ours, theirs = weights(folder), weights(expected)
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items()) and len(ours) == len(theirs)


def test_two_devices_learn_as_one(write_config, tmp_path):
    """Without dropout, which each device draws for itself; the microbatches of the two differ."""
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    still = {"model": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, "max_duration": "4ba"}
    folders = []
    status, output = warm.run("embed.py", write_config(tmp_path / "one", **still), output=tmp_path / "output1")
    assert status == 0, output
    statuses, output = warm.run_ranks(
        2, "embed.py", write_config(tmp_path / "two", **still), output=tmp_path / "output2"
    )
    assert statuses == [0, 0], output
    folders = [tmp_path / name / "run" for name in ("one", "two")]
    one, two = map(weights, folders)
    for name, x in one.items():
        torch.testing.assert_close(two[name], x, atol=2e-4, rtol=1e-3)
    losses = [[line["loss"] for line in lines(folder) if "loss" in line] for folder in folders]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def dataset(pairs: Path, folder: Path, **proportions: float) -> batches.PairDataset:
    sources = {
        "a": {"files": str(pairs / "a.jsonl"), "columns": {"negatives": "negatives"}},
        "b": {"files": [str(pairs / "b.csv")], "columns": {"query": "question", "document": "answer"}},
    }
    sources = {name: {**source, "proportion": proportions.get(name)} for name, source in sources.items()}
    return batches.PairDataset([open_pairs(name, source, {}, folder) for name, source in sources.items()], seed=3)


@pytest.mark.parametrize("mixed", [False, True])
def test_an_epoch_s_batches_are_the_same_on_any_number_of_devices_and_after_resuming(pairs, tmp_path, mixed):
    data = dataset(pairs, tmp_path)
    whole = list(batches.Batches(data, 8, mixed))
    assert len(whole) == (7 if mixed else 5 + 2) * 8
    for start in range(0, len(whole), 8):
        batch = whole[start : start + 8]
        assert mixed or len({source for _, source, _ in batch}) == 1
        texts = [data.sources[source][row] for _, source, row in batch]
        assert len({pair.query for pair in texts}) == len({pair.document for pair in texts}) == 8
    seen = [draw[1:] for draw in whole]
    assert len({*seen}) == len(seen)  # no pair twice in an epoch
    ranks = [list(batches.Batches(data, 8, mixed, 2, rank)) for rank in range(2)]
    joined = [draw for start in range(0, len(ranks[0]), 4) for rank in ranks for draw in rank[start : start + 4]]
    assert [{*joined[at : at + 8]} for at in range(0, 56, 8)] == [{*whole[at : at + 8]} for at in range(0, 56, 8)]
    data.load_state_dict(data.state_dict(24, False))
    assert list(batches.Batches(data, 8, mixed)) == whole[24:]
    other = batches.Batches(data, 8, mixed)
    other.set_epoch(1)
    assert [draw[1:] for draw in other] != seen


def test_proportions_are_of_batches_and_small_sources_repeat(pairs, tmp_path):
    plan = batches.Batches(dataset(pairs, tmp_path, a=1, b=3), 8, mixed=False)
    assert plan.counts == [2, 5]
    draws = list(plan)
    of_b = [row for _, source, row in draws if source == 1]
    assert len(of_b) == 40 and len({*of_b}) == 20


def test_a_pair_that_repeats_a_text_of_a_batch_waits(tmp_path):
    rows = [{"query": f"q{n}", "document": f"d{n // 2}"} for n in range(8)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_pairs("x", {"files": str(tmp_path / "pairs.jsonl")}, {}, tmp_path)
    data = batches.PairDataset([source], seed=0)
    found = [row for _, _, row in batches.Batches(data, 4, mixed=False)]
    assert sorted(found) == [*range(8)]
    assert all(len({row // 2 for row in found[at : at + 4]}) == 4 for at in (0, 4))
    with pytest.raises(UserError, match="too few different queries and documents"):
        list(batches.Batches(data, 5, mixed=False))


def test_a_batch_has_what_the_loss_needs(pairs, tmp_path, tokenizer):
    data = dataset(pairs, tmp_path)
    collator = batches.Collator(data, tokenizer, (12, 24), 2, (5, None), packing=False)
    draws = [(0, 0, 3), (0, 0, 1), (0, 0, 6)]  # of 3, 1 and 2 negatives
    batch = collator(draws)
    texts = [data.sources[0][row] for _, _, row in draws]
    ids = {
        int(n): part["input_ids"][i][part["attention_mask"][i].bool()]
        for part in batch["parts"]
        for i, n in enumerate(part["texts"])
    }
    assert sorted(ids) == [*range(3 + 3 + 5)] and [len(part["texts"]) for part in batch["parts"]] == [5, 5, 1]
    for number, pair in enumerate(texts):
        assert ids[number].tolist() == tokenizer(pair.query, truncation=True, max_length=12)["input_ids"]
        assert ids[3 + number].tolist() == tokenizer(pair.document, truncation=True, max_length=24)["input_ids"]
    keys, as_read = batch["keys"].T.tolist()
    assert keys[:3] == [text_key(pair.document) for pair in texts]
    assert {*keys[3:5]} < {text_key(text) for text in texts[0].negatives}
    assert keys[5:] == [text_key(text) for pair in texts[1:] for text in pair.negatives]
    assert as_read == [tokens_key(ids[number].tolist()) for number in range(3, 11)]
    assert batches.count_samples(batch) == 3
    assert batches.count_tokens(batch) == {"total": sum(map(len, ids.values())), "loss_generating": 3.0}


def test_held_out_pairs_are_evaluated_with_the_prompts_of_their_source(write_config, tmp_path, tokenizer):
    changes = yaml.safe_load(write_config(tmp_path).read_text())["data"]
    changes["a"]["prompts"] = {"query": "the king ", "document": "a cat "}
    path = write_config(tmp_path, data=changes)
    task = Embedding(load_config(EmbedConfig, "embed.py", "", [str(path)]))
    task.build_model(None)
    texts = batches.EvaluationTexts(task.retrievals, task.tokenizer, (64, 64), task.prompts)
    ids = {number: list(row) for number, row, _ in texts.items}
    start = 0
    for name, retrieval in zip("ab", task.retrievals):
        before = {"query": "the king ", "document": "a cat "} if name == "a" else {"query": "the dog ", "document": ""}
        given = [before["document"] + text for text in retrieval.documents.values()]
        given += [before["query"] + text for text in retrieval.queries.values()]
        assert [ids[start + n] for n in range(len(given))] == tokenizer(given)["input_ids"]
        start += len(given)


def test_no_query_of_a_held_out_pair_is_trained_on(tmp_path):
    rows = [{"query": f"q{n % 30}", "document": f"d{n}"} for n in range(90)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_pairs("x", {"files": str(tmp_path / "pairs.jsonl")}, {}, tmp_path)
    data = batches.PairDataset([source], seed=1, held_out=8)
    held, trained = ({source[int(row)].query for row in rows} for rows in (data.held_out[0], data.rows[0]))
    assert len(data.held_out[0]) == 8 and held | trained == {row["query"] for row in rows} and not held & trained
    assert len(data) == 90 - 3 * len(held) and data.repeated == 90 - 8 - len(data)
    assert batches.PairDataset([source], seed=1).repeated == 0
    earlier = batches.PairDataset([source], seed=1, held_out=8, apart=False)
    assert len(earlier) == 82 and earlier.rows[0].tolist() == batches.shuffled(90, 1, batches.ROWS, 0)[8:].tolist()


def test_a_run_resumes_with_the_pairs_with_which_it_began(pairs, tmp_path):
    data = dataset(pairs, tmp_path)
    state = data.state_dict(16, False)
    for of in (state, {"sample_in_epoch": 16}):  # the second of an earlier version
        data.check_same(of)
    earlier = batches.PairDataset(data.sources, 3, held_out=4, apart=False)
    assert "pairs" not in earlier.state_dict(16, False)  # so that the next resumed run is as this one
    (changed := tmp_path / "changed").mkdir()
    for path in pairs.iterdir():
        (changed / path.name).write_text(
            path.read_text() + ("one more?,a last answer\n" if path.suffix == ".csv" else "")
        )
    with pytest.raises(UserError, match=r"^data\.b: the pairs have changed since the run began; restore the files, or"):
        dataset(changed, changed).check_same(state)


def test_a_text_that_is_in_many_pairs_does_not_slow_each_batch(tmp_path):
    rows = [{"query": f"q{n}", "document": "same" if n % 3 else f"d{n}"} for n in range(3000)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_pairs("x", {"files": str(tmp_path / "pairs.jsonl")}, {}, tmp_path)
    sampler = batches.Batches(batches.PairDataset([source], 1), 8, False)
    filled, tried = sampler.fill([0]), []
    stream = sampler.stream
    sampler.stream = lambda sources: (tried.append(place) or place for place in stream(sources))
    for _ in range(60):
        batch = next(filled)
        documents = [source[row].document for _, _, row in batch]
        assert len(documents) == 8 and documents.count("same") <= 1
    assert len(tried) <= 60 * 8 * 3  # two of three pairs wait


def test_all_documents_of_a_query_are_its_positives(tmp_path):
    rows = [("q", "d1"), ("p", "d1"), ("q", "d2"), ("q", "d3")]
    write_beir(tmp_path / "beir", {d: {"text": d} for d in ("d1", "d2", "d3")}, {"q": "the q", "p": "the p"},
               [(q, d, 1) for q, d in rows], split="train")  # fmt: skip
    found = open_pairs("x", {"beir": str(tmp_path / "beir")}, {}, tmp_path)
    assert len(found) == 4
    assert {*found.positives(text_key("the q"))} == {text_key(d) for d in ("d1", "d2", "d3")}
    assert found.positives(text_key("the p")).tolist() == [text_key("d1")]
    write_jsonl(tmp_path / "more.jsonl", ["the p"], column="query")
    more = open_pairs("y", {"files": str(tmp_path / "more.jsonl"), "columns": {"document": "query"}}, {}, tmp_path)
    both = batches.PairDataset([found, more], seed=0)
    assert {*both.positives(text_key("the p"))} == {text_key("d1"), text_key("the p")}


MISTAKES = [
    ({"data": {}}, "data has no sources"),
    ({"data": {"a": {}}}, "data.a must be a section with either files or beir"),
    ({"data": {"a": {"files": "x.jsonl", "column": {}}}}, "unknown key data.a.column; did you mean columns?"),
    ({"data": {"a": {"files": "x.jsonl", "columns": {"doc": "d"}}}}, "unknown key data.a.columns.doc"),
    ({"data": {"a": {"files": "x.jsonl", "split": "train"}}}, "data.a.split applies only to beir sources"),
    ({"data": {"a": {"files": "x.jsonl"}}}, "data.a.files: nothing matches x.jsonl"),
    ({"data": {"a/b": {"files": "x.jsonl"}}}, "data.a/b: the name of a source names its file too"),
    ({"data": {"a": {"beir": "nowhere"}}}, "data.a.beir: nowhere is not a folder"),
    ({"data": {"a": {"files": "x", "proportion": 1}, "b": {"files": "x"}}}, "only some sources set proportion"),
    ({"data": {"a": {"files": "x", "proportion": 1}}, "mixed_batches": True}, "no effect with mixed_batches=true"),
    ({"eval_data": ["nowhere"]}, "eval_data: nowhere is not a folder"),
    ({"device_train_microbatch_size": 2}, "set one of device_train_microbatch_size"),
    ({"prompts": {"passage": "x"}}, "unknown key prompts.passage"),
    ({"prompts": {"query": {"search_query": None}}}, """: 'prompts.query="search_query: "'"""),
    ({"matryoshka_dims": [8, 64]}, "matryoshka_dims: 64 exceeds the vectors' 32"),
    ({"starting_checkpoint_load_path": None}, "random weights need a tokenizer"),
    ({"starting_checkpoint_load_path": "./none.pt"}, "./none.pt is not a file or folder"),
    (
        {"global_train_batch_size": 32},
        "data.b has 16 pairs to train on, and a batch has 32; lower global_train_batch_size or held_out",
    ),
    ({"eval_subset_num_batches": 2}, "eval_subset_num_batches: rankings need all texts"),
    ({"state_passing": 0.5}, "state_passing=0.5 needs one text per row; set packing=false, or omit state_passing"),
    ({"state_passing": 2.0, "packing": False}, "state_passing=2.0 must be a number ≥ 0 and ≤ 1"),
    ({"pooling": "max"}, "pooling=max must be one of mean, attention, cls"),
]


@pytest.mark.parametrize("changes, words", MISTAKES, ids=[words for _, words in MISTAKES])
def test_a_mistake_in_a_config_is_named(changes, words, write_config, tmp_path):
    with pytest.raises(UserError, match=re.escape(words)):
        embed.main([str(write_config(tmp_path, **changes))])
    assert not (tmp_path / "run" / "latest-rank0.pt").exists()


ROWS = [
    ('{"query": "a", "document": "b"\n', "line 2: not valid JSON"),
    ('{"query": "a"}\n', "line 2: no document"),
    ('{"query": "", "document": "b", "negatives": []}\n', "line 2: the query (query) is empty"),
    (
        '{"query": "a", "document": null, "negatives": []}\n',
        "line 2: the document (document) is missing; fix or remove",
    ),
    ('{"query": "a", "document": 5, "negatives": []}\n', "line 2: the document (document) is not text, but 5"),
    (
        '{"query": "a", "document": "b", "negatives": "c"}\n',
        "line 2: the negatives (negatives) must be a list of non-empty texts (got",
    ),
    (
        '{"query": "a", "document": "b", "negatives": [""]}\n',
        "line 2: the negatives (negatives) must be a list of non-empty texts (got",
    ),
    ('{"query": "a", "document": "b"}\n', "line 2: no negatives"),
]


def test_malformed_rows_are_skipped_up_to_a_limit(tmp_path, caplog):
    good = [json.dumps({"query": f"q {i}", "document": f"d {i}", "negatives": ["c"]}) + "\n" for i in range(3)]
    bad = [row for row, words in ROWS if not words.startswith("line 2: no ")]
    (tmp_path / "pairs.jsonl").write_text("".join([bad[0], good[0], *bad[1:], *good[1:]]))
    source = {"files": str(tmp_path / "pairs.jsonl"), "columns": {"negatives": "negatives"}}
    open_ = lambda count: open_pairs("x", {**source, "malformed_rows": count}, {}, tmp_path / "pairs")  # noqa: E731
    with pytest.raises(UserError, match=r"line 7: .*, after 5 other .*; fix or .* with data\.x\.malformed_rows=N"):
        open_(len(bad) - 1)
    with caplog.at_level("INFO", logger="lion"):
        pairs = open_(len(bad))
    assert [pair.query for pair in pairs] == ["q 0", "q 1", "q 2"]
    assert "skipped 6 malformed rows (line 1, 3, 4, 5, 6, …)" in caplog.text


@pytest.mark.parametrize("row, words", ROWS, ids=[words for _, words in ROWS])
def test_a_malformed_row_is_named_and_nothing_is_kept(row, words, tmp_path):
    first = {"query": "a", "document": "b", "negatives": ["c"]}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(first) + "\n" + row)
    source = {"files": str(tmp_path / "pairs.jsonl"), "columns": {"negatives": "negatives"}}
    with pytest.raises(UserError, match=re.escape(words)):
        open_pairs("x", source, {}, tmp_path / "pairs")
    assert not list((tmp_path / "pairs").glob("x*"))


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_columns_of_other_names_are_to_be_set_in_the_config(ending, tmp_path):
    lines = {"jsonl": '{"anchor": "a", "positive": "b"}', "csv": "anchor,positive\na,b"}
    (tmp_path / f"pairs.{ending}").write_text(lines[ending] + "\n")
    source = {"files": str(tmp_path / f"pairs.{ending}")}
    words = r"no (column )?query, document \(its \w+ are anchor, positive\); set data\.x\.columns\.query or \.document"
    with pytest.raises(UserError, match=f"{words} to one of these, or correct the file$"):
        open_pairs("x", source, {}, tmp_path)
    columns = {"query": "anchor", "document": "positive"}
    assert open_pairs("x", {**source, "columns": columns}, {}, tmp_path)[0].document == "b"


def test_changed_files_are_read_again(tmp_path):
    path = write_jsonl(tmp_path / "pairs.jsonl", ["a"], column="query")
    source = {"files": str(path), "columns": {"document": "query"}}
    assert len(open_pairs("x", source, {}, tmp_path)) == 1
    write_jsonl(path, ["a", "b"], column="query")
    assert len(open_pairs("x", source, {}, tmp_path)) == 2
    (tmp_path / "x.arrow").write_bytes(b"corrupt")
    assert [pair.query for pair in map(open_pairs("x", source, {}, tmp_path).__getitem__, range(2))] == ["a", "b"]


EMBED_CONFIGS = [
    path for path in sorted((ROOT / "yamls/embed").glob("*.yaml")) if "-" in path.stem or path.stem == "tiny"
]


@pytest.mark.parametrize("path", EMBED_CONFIGS, ids=lambda path: path.stem)
def test_each_config_is_complete(path):
    config = load_config(EmbedConfig, "embed.py", "", [str(path), "data.pairs.files=pairs.jsonl"])
    assert config.run_name == ("embed-tiny" if path.stem == "tiny" else path.stem)
    assert Embedding(config).limits == (config.query_max_seq_len, config.max_seq_len)


def test_a_config_without_the_negatives_it_asks_for_is_reported(caplog):
    arguments = [str(ROOT / "yamls/embed/lion-s-base-finetune.yaml"), "data.x.files=x.jsonl"]
    load_config(EmbedConfig, "embed.py", "", [*arguments, "data.x.columns.negatives=negatives"])
    assert not caplog.text
    load_config(EmbedConfig, "embed.py", "", arguments)
    assert "negatives=7 has no effect: no source sets columns.negatives" in caplog.text
