"""`embed.py evaluate`: texts to vectors and passages by ours and other models; the command, its mistakes, resuming."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY_MODEL, sentences
from test_embed_retrieval import write_beir
from torch.nn import functional as F

import embed
from src.checkpoints.reading import read_checkpoint
from src.embed.encoder import DOCUMENT, QUERY, LionEncoder, OtherEncoder, Passages, Settings, open_encoder
from src.embed.passages import cut_around, tokens_of
from src.errors import UserError

TEXTS = ["the old ship", "", *sentences(8), "the king loves the ship " * 60]


@pytest.fixture(scope="module")
def beir(tmp_path_factory) -> Path:
    """A folder whose queries are the beginnings of documents."""
    texts = sentences(12, seed=3)
    documents = {f"d{number}": {"title": "", "text": text} for number, text in enumerate(texts)}
    queries = {f"q{number}": " ".join(text.split()[:3]) for number, text in enumerate(texts[:6])}
    qrels = [(f"q{number}", f"d{number}", 1) for number in range(6)]
    return write_beir(tmp_path_factory.mktemp("beir") / "beir", documents, queries, qrels)


@pytest.fixture(scope="module")
def bert(tmp_path_factory, tokenizer_folder) -> Path:
    """A BERT of random weights, as its authors would publish it."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bert") / "tiny-bert"
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    sizes = {name: value for name, value in TINY_MODEL.items() if name != "mixer"}
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(checkpoint) -> LionEncoder:
    """Small batches, so that texts are padded in some and alone in others."""
    return open_encoder(str(checkpoint), Settings(batch_tokens=64))


def hidden_states(encoder: LionEncoder, text: str) -> torch.Tensor:
    ids = torch.tensor([encoder.tokenizer(text)["input_ids"]])
    with torch.no_grad():
        return encoder.model.lion(ids).last_hidden_state[0]


def test_vectors_are_means_of_unit_length_in_the_order_of_texts(encoder):
    found = encoder.encode(TEXTS, DOCUMENT)
    states = [hidden_states(encoder, text) for text in TEXTS]
    expected = torch.stack([F.normalize(x.mean(0), dim=0) for x in states])
    torch.testing.assert_close(found.vectors, expected, atol=1e-5, rtol=1e-5)
    assert found.owners is None and found.cut == 0 and found.tokens == sum(map(len, states))


def test_passages_see_the_whole_text_and_hold_every_token_once(encoder):
    found = encoder.encode(TEXTS, DOCUMENT, passages=Passages(7))
    expected, owners = [], []
    for number, text in enumerate(TEXTS):
        x = hidden_states(encoder, text)
        words = x[1:-1]
        parts = list(words.split(7)) or [words]
        parts[0], parts[-1] = torch.cat([x[:1], parts[0]]), torch.cat([parts[-1], x[-1:]])
        if len(parts) == 1:
            parts = [x]
        expected += [F.normalize(part.mean(0), dim=0) for part in parts]
        owners += [number] * len(parts)
    torch.testing.assert_close(found.vectors, torch.stack(expected), atol=1e-5, rtol=1e-5)
    assert found.owners.tolist() == owners


def test_given_passages_are_of_texts_read_once_or_around_them(encoder, checkpoint, bert):
    """Two passages of one text, and one of another; of texts that are cut, each in its own window."""
    texts = sentences(9, seed=8)
    texts = [" ".join(texts[:4]), " ".join(texts[4:]), " ".join(texts[:4])]
    spots = [(0, 3), (len(texts[1]) - 9, len(texts[1])), (20, 40)]
    tokens = [encoder.tokenizer(text, return_offsets_mapping=True) for text in texts]
    spans = [tokens_of(spot, each["offset_mapping"], (1, 1)) for spot, each in zip(spots, tokens)]
    states = [hidden_states(encoder, text) for text in texts]
    expected = torch.stack([F.normalize(x[start:stop].mean(0), dim=0) for x, (start, stop) in zip(states, spans)])
    found = encoder.encode_passages(texts, spots)
    torch.testing.assert_close(found.vectors, expected, atol=1e-5, rtol=1e-5)
    assert found.places.tolist() == [[*span, *spot] for span, spot in zip(spans, spots)]
    assert found.tokens == sum(len(encoder.tokenizer(text)["input_ids"]) for text in texts[:2]) and found.cut == 0
    prompted = open_encoder(str(checkpoint), Settings(prompts={DOCUMENT: "the king "})).encode_passages(texts, spots)
    longer = [(first + 9, last + 9) for first, last in spots]
    direct = encoder.encode_passages([f"the king {text}" for text in texts], longer)
    torch.testing.assert_close(prompted.vectors, direct.vectors, atol=1e-5, rtol=1e-5)

    found = open_encoder(str(checkpoint), Settings(limit=8)).encode_passages(texts, spots)
    assert found.cut == 3
    for vector, each, span in zip(found.vectors, tokens, spans):
        ids, (start, stop) = cut_around(each["input_ids"], span, 8, (1, 1))
        with torch.no_grad():
            x = encoder.model.lion(torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(vector, F.normalize(x[start:stop].mean(0), dim=0), atol=1e-5, rtol=1e-5)
    other = OtherEncoder(str(bert), Settings())
    alone = other.encode([text[first:last] for text, (first, last) in zip(texts, spots)], DOCUMENT)
    assert torch.equal(other.encode_passages(texts, spots).vectors, alone.vectors)


def test_passages_of_texts_longer_than_a_segment(encoder, monkeypatch):
    expected = encoder.encode(TEXTS, DOCUMENT, passages=Passages(16))
    monkeypatch.setattr(encoder.model.config, "segment_length", 64)
    found = encoder.encode(TEXTS, DOCUMENT, passages=Passages(16))
    torch.testing.assert_close(found.vectors, expected.vectors, atol=1e-5, rtol=1e-5)


def test_a_model_without_states_reads_passages_of_long_texts_whole(write_checkpoint, tmp_path):
    checkpoint = str(write_checkpoint(tmp_path / "softmax.pt", "softmax"))
    expected = open_encoder(checkpoint, Settings()).encode(TEXTS, DOCUMENT, passages=Passages(8))
    found = open_encoder(checkpoint, Settings(segment_length=16)).encode(TEXTS, DOCUMENT, passages=Passages(8))
    torch.testing.assert_close(found.vectors, expected.vectors, atol=1e-5, rtol=1e-5)


def test_texts_are_cut_and_counted_and_prompts_read(checkpoint):
    encoder = open_encoder(str(checkpoint), Settings(limit=10, prompts={QUERY: "the king "}))
    long = [text for text in TEXTS if len(encoder.tokenizer("the king " + text)["input_ids"]) > 10]
    found = encoder.encode(TEXTS, QUERY)
    assert found.cut == len(long) > 0
    texts = ["the king " + text for text in TEXTS]
    direct = open_encoder(str(checkpoint), Settings(limit=10)).encode(texts, DOCUMENT)
    assert torch.equal(found.vectors, direct.vectors)


def test_sentence_transformers_gives_the_same_vectors_and_its_own_models_are_read(encoder, folder, bert):
    assert isinstance(open_encoder(str(folder), Settings()), LionEncoder)
    theirs = OtherEncoder(str(folder), Settings(trust_remote_code=True)).encode(TEXTS, DOCUMENT)
    ours = encoder.encode(TEXTS, DOCUMENT)
    torch.testing.assert_close(theirs.vectors, ours.vectors, atol=1e-5, rtol=1e-5)
    assert theirs.tokens == ours.tokens
    other = open_encoder(str(bert), Settings(limit=16))
    assert isinstance(other, OtherEncoder) and other.limit == 16
    found = other.encode(TEXTS, QUERY)
    assert found.vectors.shape == (len(TEXTS), TINY_MODEL["hidden_size"])
    lengths = [len(row) for row in other.model.tokenizer(TEXTS)["input_ids"]]
    assert found.cut == sum(length > 16 for length in lengths) and found.tokens == sum(min(16, n) for n in lengths)


def test_vectors_are_truncated_and_normalized_again(checkpoint, bert):
    for name in (str(checkpoint), str(bert)):
        full, short = (open_encoder(name, Settings(dims=dims)).encode(TEXTS, DOCUMENT).vectors for dims in (None, 8))
        torch.testing.assert_close(short, F.normalize(full[:, :8], dim=-1), atol=1e-6, rtol=1e-5)
    encoder = open_encoder(str(checkpoint), Settings(dims=8))
    assert encoder.encode_passages(TEXTS[:1], [(0, 3)]).vectors.shape == (1, 8)


def test_a_checkpoint_of_another_head_keeps_its_encoder(checkpoint):
    read = read_checkpoint(checkpoint)
    from src.embed.encoder import embedding_model

    model, own = embedding_model(read), read.build()
    assert all(torch.equal(x, own.lion.state_dict()[name]) for name, x in model.lion.state_dict().items())


def test_the_command_scores_models_beside_bm25_and_resumes(beir, checkpoint, bert, tmp_path, capsys, caplog):
    out, second = tmp_path / "scores", write_beir(tmp_path / "second")
    command = ["evaluate", "bm25", str(checkpoint), str(bert), "--data", str(beir), str(second), "--out", str(out)]
    embed.main([*command, "--resamples", "100"])
    shown = capsys.readouterr().out
    assert "beir: 6 queries, 12 documents" in shown
    assert "second: 2 queries, 4 documents; queries without a relevant document omitted: 1" in shown
    names = ("bm25", checkpoint.parent.name, "tiny-bert")
    for name in names:
        assert len(re.findall(rf"^\| *{name} ", shown, re.M)) == 3
    report = json.loads((out / "report.json").read_text())
    assert list(report["results"]) == list(names) and list(report["differences"]) == list(names[1:])
    assert shown.split("| mean of all")[0].strip() in (out / "report.md").read_text()
    scores = report["results"]["bm25"]["beir"]["scores"]
    assert scores["nDCG@10"] > 0.9  # queries are words of their documents
    gap = report["differences"]["tiny-bert"]["beir"]
    assert gap["mean"] == pytest.approx(report["results"]["tiny-bert"]["beir"]["scores"]["nDCG@10"] - scores["nDCG@10"])
    run = (out / "runs" / "beir.tiny-bert.trec").read_text().splitlines()
    assert len(run) == 6 * 12 and run[0].split()[0] == "q0" and run[0].split()[3] == "1"
    caplog.set_level("INFO")
    embed.main([*command, "--resamples", "100"])
    assert caplog.text.count("read from") == 6 and capsys.readouterr().out == shown
    (second / "queries.jsonl").write_text((second / "queries.jsonl").read_text().replace("red cat", "the dog"))
    caplog.clear()
    embed.main([*command, "--resamples", "100"])
    assert caplog.text.count("read from") == 3  # the other data set has changed


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["./none"], "MODEL: ./none is not a file or folder"),
        (["bm25", "bm25"], "MODEL: bm25 is named twice"),
        (["bm25", "--split", "dev"], "its splits are test"),
        (["bm25", "--passages", "0"], "--passages=0 must be an integer ≥ 1"),
        (["BERT", "--passages", "8"], "gives one vector per text"),
        (["BERT", "--max_seq_len", "1000"], "reads at most 128 tokens"),
        (["LIT", "--dims", "33"], "--dims=33: the vectors of"),
        (["BERT", "--dims", "33"], "tiny-bert have 32 numbers; lower it"),
        (["bm25", "--dims", "0"], "--dims=0 must be an integer ≥ 1"),
        (["LIT", "--max_seq_len", "1000"], "has 128 position embeddings"),
        (["CLS", "--passages", "8"], "pools only the first token"),
        (["NO-TOKENIZER"], "has no tokenizer"),
        ([str(ROOT / "tests/fixtures/images/my-model")], "my-model reads images; give a model that reads texts"),
        (["nobody/nothing"], "cannot be downloaded from the Hugging Face Hub"),
        (["all-nothing"], "sentence-transformers cannot load it"),
        (["bm25", "--max_seq_len", "2"], "--max_seq_len=2 must be an integer ≥ 3"),
    ],
)
def test_a_mistake_is_named(arguments, words, beir, bert, tmp_path, write_checkpoint):
    def pooled(state):
        state["integrations"]["huggingface"]["model"]["config"]["content"]["pooling"] = "cls"

    def without_tokenizer(state):
        state["integrations"]["huggingface"]["tokenizer"] = {}

    models = {
        "BERT": lambda: bert,
        "LIT": lambda: write_checkpoint(tmp_path / "lit.pt", "lion-lit"),
        "CLS": lambda: write_checkpoint(tmp_path / "cls.pt", edit=pooled),
        "NO-TOKENIZER": lambda: write_checkpoint(tmp_path / "none.pt", edit=without_tokenizer),
    }
    arguments = [str(models.get(value, lambda value=value: value)()) for value in arguments]
    with pytest.raises(UserError, match=re.escape(words)):
        embed.main(["evaluate", *arguments, "--data", str(beir)])


def test_the_command_says_what_it_does_and_what_it_truncated(beir, checkpoint, capsys):
    with pytest.raises(SystemExit):
        embed.main(["evaluate", "--help"])
    assert "TREC" in capsys.readouterr().out
    embed.main(["evaluate", str(checkpoint), "--data", str(beir), "--max_seq_len", "8"])
    assert re.search(r"truncated .*\d of 12 documents to 8 tokens", capsys.readouterr().out)


def test_the_report_says_that_judgements_are_of_missing_documents(tmp_path, capsys):
    folder = write_beir(tmp_path / "beir", qrels=[("q1", "d1", 1), ("q1", "gone", 1)])
    embed.main(["evaluate", "bm25", "--data", str(folder)])
    assert "judgements of missing texts skipped: 1, so scores are not those of the whole" in capsys.readouterr().out
