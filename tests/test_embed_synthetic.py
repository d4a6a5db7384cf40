"""Passkey and header sets, and training on passages of documents, of which header is an example."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import warm
from conftest import ROOT

from src.embed import passages, synthetic
from src.embed.batches import tokenize
from src.embed.beir import read_beir
from src.embed.pairs import open_pairs
from src.errors import UserError
from src.lion import LionConfig, LionEmbeddingModel
from src.lion.pooling import pool_spans


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    """A tokenizer with 80 words, and with parts of words that are not among them."""
    from transformers import BertTokenizerFast

    folder = tmp_path_factory.mktemp("words")
    words = [a + b for a in "bcdfghklmn" for b in ("an", "el", "ix", "op", "ut", "ain", "est", "ock")]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, "##s", "##ing", "7", ".", "é"]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture(scope="module")
def header(tokenizer_folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("made") / "header"
    command = ["header", "--tokenizer", tokenizer_folder, "--lengths", 66, 200, "--documents", 32, "--pairs", 64]
    synthetic.main([str(word) for word in (*command, "--out", out)])
    return out


def pairs_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]


def test_a_header_document_begins_with_its_subject_and_one_passage_holds_its_key(header, tokenizer):
    for length in (66, 200):
        data = read_beir(header / f"header-{length}", "test")
        assert (len(data.documents), len(data.queries), data.left_out) == (32, 32, 0)
        assert {len(tokenizer(text)["input_ids"]) for text in data.documents.values()} == {length}
        subjects, keys = zip(*(query.split() for query in data.queries.values()))
        assert len({*data.queries.values()}) == 32 and (len({*subjects}), len({*keys})) == (2, 16)
        for query, judged in data.judged.items():
            subject, key = data.queries[query].split()
            words = data.documents[next(iter(judged))].split()
            assert words[0] == subject and words.count(key) == words.count(subject) == 1 and words.index(key) >= 16
    rows = [json.loads(line) for line in (header / "header-200/queries.jsonl").read_text().splitlines()]
    assert min(row["metadata"]["depth"] for row in rows) < 0.4 < 0.7 < max(row["metadata"]["depth"] for row in rows)


def test_the_passage_of_a_pair_is_one_of_those_that_evaluation_reads(header, tokenizer):
    for pair in pairs_of(header):
        first, last = pair["passage"]
        assert pair["query"].split()[1] in pair["document"][first:last].split()
        encoded = tokenizer(pair["document"], return_offsets_mapping=True)
        span = passages.tokens_of((first, last), encoded["offset_mapping"], (1, 1))
        edges = passages.passage_edges(len(encoded["input_ids"]), (1, 1), synthetic.PASSAGE)
        assert span in itertools.pairwise(edges)
        assert passages.characters(span, encoded["offset_mapping"], (1, 1)) == (first, last)


def test_a_passkey_follows_the_marker_among_other_names(tokenizer_folder, tokenizer, tmp_path):
    command = ["passkey", "--tokenizer", tokenizer_folder, "--lengths", 400, "--documents", 16, "--pairs", 200]
    command += ["--pair_lengths", 20, 30, "--out", tmp_path]
    synthetic.main([str(word) for word in command])
    data, pairs = read_beir(tmp_path / "passkey-400", "test"), pairs_of(tmp_path)
    names = {pair["query"] for pair in pairs}
    assert len(names) > 30 and {*data.queries.values()} <= names
    made = [(query, data.documents[next(iter(data.judged[name]))]) for name, query in data.queries.items()]
    marker = synthetic.words_of(str(tokenizer_folder), np.random.default_rng(0))[0]
    for name, text in (*made, *((pair["query"], pair["document"]) for pair in pairs)):
        words = text.split()
        assert words.count(marker) == 1 and words[words.index(marker) + 1] == name
    assert {len(tokenizer(pair["document"])["input_ids"]) for pair in pairs} == set(range(20, 31))
    assert all(len(names & {*text.split()}) > 16 for _, text in made)
    before = (tmp_path / "pairs.jsonl").read_bytes()
    synthetic.main([str(word) for word in command])
    assert (tmp_path / "pairs.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "options, message",
    [
        (["passkey", "--documents", "64"], "--tokenizer has 80 words of one token, too few for 64 documents"),
        (["header", "--documents", "20"], "--documents 20 must be a multiple of 16, at most 256"),
        (["header", "--lengths", "40"], "--lengths: header documents have at least 51 tokens (got 40)"),
        (["passkey", "--pair_lengths", "90", "60"], "--pair_lengths 90 60: give the shortest first"),
        (["passkey", "--pairs", "-1"], "--pairs"),
    ],
)
def test_what_cannot_be_made_is_named(options, message, tokenizer_folder, tmp_path):
    given = [options[0], "--tokenizer", str(tokenizer_folder), "--lengths", "100", "--out", str(tmp_path / "out")]
    with pytest.raises(UserError, match=message.replace("(", r"\(").replace(")", r"\)")):
        synthetic.main([*given, *options[1:]])
    assert not (tmp_path / "out").exists()


# Passages


def test_a_long_document_is_cut_around_its_passage(header, tokenizer):
    texts = [pair["document"] for pair in pairs_of(header)[:8]]
    texts = [" ".join([text, *texts]) for text in texts]
    for words in ((0, 3), (200, 210), (60, 62), (500, 700)):
        for limit in (12, 40):
            spots = []
            for text in texts:
                split = text.split()
                first = len(" ".join(split[: words[0]])) + (words[0] > 0)
                spots.append((first, first + len(" ".join(split[words[0] : words[1]]))))
            rows, spans, cut = tokenize(tokenizer, [("", *pair) for pair in zip(texts, spots)], limit)
            assert cut == len(texts)
            for text, row, (start, stop) in zip(texts, rows, spans):
                assert len(row) == limit and row[0] == tokenizer.cls_token_id and row[-1] == tokenizer.sep_token_id
                wanted = text.split()[words[0] : words[1]][: limit - 2]
                assert tokenizer.convert_ids_to_tokens(row[start:stop]) == wanted
    spot = (len(" ".join(texts[0].split()[:60])) + 1, len(" ".join(texts[0].split()[:62])))
    short, spans, cut = tokenize(tokenizer, [("", "ban bel", None), ("", "bix bop but", (4, 7))], 4)
    assert cut == 1 and spans == [None, (2, 3)]
    assert [tokenizer.convert_ids_to_tokens(row)[1:-1] for row in short] == [["ban", "bel"], ["bix", "bop"]]
    rows, spans, _ = tokenize(tokenizer, [("ban bel ", texts[0], spot), ("ban bel " * 9, texts[0], spot)], 12)
    for row, (start, stop), before in zip(rows, spans, (2, 4)):  # of a long prompt, the beginning
        words = tokenizer.convert_ids_to_tokens(row)
        assert len(words) == 12 and words[1 : before + 1] == (["ban", "bel"] * 2)[:before] and start > before
        assert words[start:stop] == texts[0][slice(*spot)].split()


@pytest.mark.parametrize("pooling", ["mean", "attention"])
def test_a_passage_is_pooled_as_after_the_whole_text_was_read(pooling):
    from src.embed.microbatches import assemble

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = LionEmbeddingModel(LionConfig(vocab_size=50, **sizes, pooling=pooling)).eval()
    if pooling == "attention":
        torch.nn.init.normal_(model.pooling_weight)
    ids = [torch.randint(5, 50, (length,)).tolist() for length in (9, 4, 12)]
    spans = [(2, 5), None, (11, 12)]
    expected = []
    for text, span in zip(ids, spans):
        x = model.lion(torch.tensor([text])).last_hidden_state
        vectors, _ = pool_spans(x[0], [span or (0, len(text))], None if pooling == "mean" else model.scores(x)[0])
        expected.append(vectors[0])
    for packing in (False, True):
        part = assemble(ids, [1, 0, 2], 0, packing, spans)
        order = part.pop("texts").tolist()
        vectors = model(**part).pooler_output
        torch.testing.assert_close(vectors, torch.stack([expected[n] for n in order]), atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_training_on_passages_reaches_beyond_them(header, tokenizer_folder, tmp_path):
    """A run learns from its passages, and what is wrong with a row is named."""
    config = [
        ROOT / "yamls/embed/tiny.yaml", "run_name=made", f"save_folder={tmp_path / 'run'}", "device=cpu",
        "starting_checkpoint_load_path=null", f"tokenizer_name={tokenizer_folder}", "model.hidden_size=32",
        "model.num_hidden_layers=1", "model.num_attention_heads=2", "model.intermediate_size=64", "held_out=16",
        f"data.made.files={header / 'pairs.jsonl'}", "data.made.columns.passage=passage", "max_seq_len=64",
        "global_train_batch_size=16", "max_duration=6ba", "eval_interval=3ba", "save_interval=3ba",
        "progress_bar=false", "optimizer.lr=3e-3",
    ]  # fmt: skip
    status, output = warm.run("embed.py", *config, output=tmp_path / "output")
    assert status == 0, output
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["after"]["loss"] < summary["before"]["loss"]
    rows = pairs_of(header)
    rows[3]["passage"] = [5, 9999]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"files": str(tmp_path / "pairs.jsonl"), "columns": {"passage": "passage"}}
    with pytest.raises(UserError, match="line 4: the passage, characters 5 to 9999, is not"):
        open_pairs("made", source, {}, tmp_path)
