"""Retrieval: BEIR folders and their mistakes; rankings, scores and BM25 against their definitions."""

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import DATA

from src.embed.beir import Retrieval, read_beir
from src.embed.bm25 import bm25, words
from src.embed.scores import Ranking, cosines, means, measure, rank, write_run
from src.errors import UserError

DOCUMENTS = {
    "d1": {"title": "Ships", "text": "the old ship sees the river"},
    "d2": {"title": "", "text": "a quiet dog and a red cat"},
    "d10": {"text": "the king loves the ship"},
    "d3": {"title": "Birds", "text": ""},
}
QUERIES = {"q1": "old ship", "q2": "red cat", "q3": "bird"}
QRELS = [("q1", "d1", 2), ("q1", "d10", 1), ("q2", "d2", 1), ("q3", "d3", 0)]


def write_beir(folder: Path, documents=DOCUMENTS, queries=QUERIES, qrels=QRELS, split: str = "test") -> Path:
    (folder / "qrels").mkdir(parents=True)
    corpus = ({"_id": name, **document} for name, document in documents.items())
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in corpus))
    rows = ({"_id": name, "text": text, "metadata": {}} for name, text in queries.items())
    (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, row)) for row in qrels)]
    (folder / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def test_a_folder_is_read_with_titles_and_without_queries_that_have_no_answer(tmp_path):
    found = read_beir(write_beir(tmp_path / "beir"), "test")
    assert found.name == "beir" and list(found.documents) == list(DOCUMENTS)
    assert found.documents["d1"] == "Ships the old ship sees the river"
    assert found.documents["d10"] == "the king loves the ship" and found.documents["d3"] == "Birds"
    assert list(found.queries) == ["q1", "q2"] and found.left_out == 1
    assert found.judged == {"q1": {"d1": 2, "d10": 1}, "q2": {"d2": 1}}


def test_a_document_may_be_a_passage_of_its_text(tmp_path):
    documents = {
        "a": {"title": " Ships ", "text": "  the old ship sees the river\n", "passage": [6, 14]},
        "b": {"text": "a dog ", "passage": [0, 6]}, "c": {"title": "Cats", "text": "a red cat"},
    }  # fmt: skip
    found = read_beir(write_beir(tmp_path / "beir", documents, {"q": "ship"}, [("q", "a", 1)]), "test")
    texts = [text[slice(*(span or (None,)))] for text, span in zip(found.documents.values(), found.spans())]
    assert texts == ["old ship", "a dog", "Cats a red cat"] and list(found.passages) == ["a", "b"]
    ((query, scores),) = bm25(found)
    assert query == "q" and (scores > 0).tolist() == [[True, False, False]]


def replaced(file: str, old: str, new: str):
    def change(folder: Path) -> None:
        content = (folder / file).read_text()
        assert old in content
        (folder / file).write_text(content.replace(old, new, 1))

    return change


def removed(file: str):
    return lambda folder: (folder / file).unlink()


def emptied(file: str):
    return lambda folder: (folder / file).write_text("")


QRELS_FILE = "qrels/test.tsv"
MISTAKES = [
    (removed("corpus.jsonl"), "has no corpus.jsonl"),
    (removed("queries.jsonl"), "has no queries.jsonl"),
    (lambda folder: (folder / QRELS_FILE).rename(folder / "qrels" / "dev.tsv"), "its splits are dev"),
    (emptied("corpus.jsonl"), "corpus.jsonl is empty"),
    (emptied(QRELS_FILE), "no query has a relevant document"),
    (replaced("corpus.jsonl", '"d2"', '"d1"'), "corpus.jsonl, line 2: another line has the _id d1"),
    (replaced("corpus.jsonl", '"_id": "d2"', '"id": "d2"'), "corpus.jsonl, line 2: no _id"),
    (replaced("corpus.jsonl", '"d2"', '"d 2"'), "line 2: the _id 'd 2' has a space"),
    (replaced("corpus.jsonl", '"d2"', "null"), "line 2: the _id must be a string"),
    (replaced("corpus.jsonl", '"a quiet dog and a red cat"', "[1]"), "line 2: the text is a list"),
    (replaced("corpus.jsonl", '"Ships"', "7"), "line 1: the title is a int"),
    (replaced("corpus.jsonl", '"Ships"', '"", "passage": [4, 99]'), "line 1: the passage, characters 4 to 99, is not"),
    (replaced("corpus.jsonl", '"Ships"', '"", "passage": 4'), "corpus.jsonl, line 1: the passage is not two numbers"),
    (replaced("queries.jsonl", "}\n", "\n"), "queries.jsonl, line 1: not valid JSON"),
    (replaced(QRELS_FILE, "query-id\tcorpus-id\tscore\n", ""), "no column query-id"),
    (replaced(QRELS_FILE, "d10\t1", "d10\t0.5"), f"{QRELS_FILE}, line 3: the score 0.5 is not an integer"),
    (replaced(QRELS_FILE, "d10\t1", "d10\tnan"), f"{QRELS_FILE}, line 3: the score nan is not an integer"),
    (replaced(QRELS_FILE, "d10\t", "d1\t"), f"{QRELS_FILE}, line 3: q1 and d1 are judged twice, 2 and 1; remove one"),
    (replaced(QRELS_FILE, "q2\td2\t1", "q2\td2"), f"{QRELS_FILE}, line 4: 2 columns instead of 3"),
]


@pytest.mark.parametrize("change, words", MISTAKES, ids=[words for _, words in MISTAKES])
def test_a_mistake_in_a_folder_is_named(tmp_path, change, words):
    change(write_beir(tmp_path / "beir"))
    with pytest.raises(UserError, match=re.escape(words)):
        read_beir(tmp_path / "beir", "test")


def test_judgements_of_missing_texts_and_repeated_ones_are_skipped_with_one_warning(tmp_path, caplog):
    lost = [("q1", "gone", 1), ("q2", "gone", 1), ("q9", "d1", 1), ("q4", "d1", 1), ("q1", "d1", "2.0")]
    folder = write_beir(tmp_path / "beir", queries={**QUERIES, "q4": " "}, qrels=[*QRELS, *lost])
    found = read_beir(folder, "test")
    assert found.judged == {"q1": {"d1": 2, "d10": 1}, "q2": {"d2": 1}} and found.skipped == 4
    (message,) = caplog.messages
    assert "2 of documents that are not in corpus.jsonl (first line 6: q1 gone)" in message
    assert "2 of queries without a text in queries.jsonl (first line 8: q9 d1)" in message
    assert "1 that repeat another (first line 10: q1 d1); scores are not comparable" in message
    caplog.clear()
    read_beir(write_beir(tmp_path / "repeated", qrels=[*QRELS, QRELS[0]]), "test")
    assert "1 that repeat another (first line 6: q1 d1); scores are the same" in caplog.text


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match=r"--data: .* is not a folder"):
        read_beir(tmp_path / "none", "test")


def retrieval(documents: int, queries: int) -> Retrieval:
    names = {f"d{number}": "" for number in range(documents)}
    asked = {f"q{number}": "" for number in range(queries)}
    return Retrieval("made", names, asked, {name: {"d0": 1} for name in asked}, 0)


def test_rankings_are_exhaustive_and_ties_are_broken_as_trec_eval_does():
    """Against sorting by (score, _id), with many equal scores, in blocks of any size."""
    data, generator = retrieval(57, 5), torch.Generator().manual_seed(0)
    scores = torch.randint(-3, 4, (5, 57), generator=generator) / 4
    scores[0] *= torch.where(torch.arange(57) % 2 == 0, 1.0, -1.0)  # also −0
    for block in (1, 10, 57):
        run = rank(data, iter(scores.split(block, 1)), depth=20)
        for row, found in zip(scores.tolist(), run.values()):
            expected = sorted(zip(row, data.documents), key=lambda pair: (pair[0], pair[1]), reverse=True)[:20]
            assert list(found.items()) == [(name, score) for score, name in expected]


def test_a_query_does_not_find_the_document_with_its_own_id():
    data = Retrieval("made", {"a": "", "b": "", "c": ""}, {"b": ""}, {"b": {"c": 1}}, 0)
    run = rank(data, iter(torch.tensor([[0.1, 0.9, 0.5]]).split(2, 1)))
    assert list(run["b"]) == ["c", "a"] and means(measure(data, run))["nDCG@10"] == 1


def test_scores_are_those_of_their_definitions():
    """nDCG with graded gains, recall and reciprocal rank of rankings by hand; a query that finds nothing scores 0."""
    documents = {f"d{number}": "" for number in range(30)}
    judged = {"q1": {"d1": 2, "d2": 1, "d29": 1, "d3": 0}, "q2": {"d5": 1}, "q3": {"d6": 1}}
    data = Retrieval("made", documents, dict.fromkeys(judged, ""), judged, 0)
    ranking = [f"d{number}" for number in range(30)]
    run = {name: {one: 1 - place / 100 for place, one in enumerate(ranking)} for name in ("q1", "q2")} | {"q3": {}}
    ideal = 2 / math.log2(2) + 1 / math.log2(3) + 1 / math.log2(4)
    expected = {
        "nDCG@10": [(2 / math.log2(3) + 1 / math.log2(4)) / ideal, 1 / math.log2(7), 0],
        "R@10": [2 / 3, 1, 0], "R@100": [1, 1, 0], "RR@10": [1 / 2, 1 / 6, 0],
    }  # fmt: skip
    found = measure(data, run)
    assert {name: list(values.values()) for name, values in found.items()} == {
        name: pytest.approx(values, abs=1e-6) for name, values in expected.items()
    }
    assert means(found)["R@100"] == pytest.approx(2 / 3)


def test_a_document_scores_as_its_best_passage():
    generator = torch.Generator().manual_seed(0)
    queries, vectors = torch.randn(3, 4, generator=generator), torch.randn(17, 4, generator=generator)
    owners = torch.arange(6).repeat_interleave(torch.tensor([1, 5, 2, 1, 7, 1]))
    scores = queries @ vectors.T
    expected = torch.stack([scores[:, owners == number].amax(1) for number in range(6)], 1)
    for block in (1, 4, 6, 100):
        found = torch.cat(list(cosines(queries, vectors, owners, block)), 1)
        torch.testing.assert_close(found, expected)


def test_bm25_is_its_formula(tmp_path):
    """Σ idf · tf / (tf + k1 (1 − b + b · length / mean length)), idf = ln(1 + (N − n + ½) / (n + ½))."""
    data = read_beir(write_beir(tmp_path / "beir"), "test")
    data.queries["q1"] = "The old ship, unknown!"
    texts = [Counter(words(text)) for text in data.documents.values()]
    mean = sum(map(Counter.total, texts)) / len(texts)
    expected = torch.full((2, 4), -math.inf)
    for row, query in enumerate(data.queries.values()):
        for column, text in enumerate(texts):
            total = 0.0
            for word in words(query):
                n = sum(word in other for other in texts)
                idf = math.log(1 + (len(texts) - n + 0.5) / (n + 0.5))
                total += idf * text[word] / (text[word] + 1.2 * (1 - 0.75 + 0.75 * text.total() / mean))
            expected[row, column] = total or -math.inf
    names, rows = zip(*bm25(data))
    assert names == ("q1", "q2")
    torch.testing.assert_close(torch.cat(rows), expected)


def test_a_run_is_written_in_trec_s_format(tmp_path):
    write_run(tmp_path / "run.trec", {"q1": {"d1": 0.5, "d2": 0.75, "d3": 0.5}}, "model")
    assert (tmp_path / "run.trec").read_text().splitlines() == [
        "q1 Q0 d2 1 0.75 model", "q1 Q0 d3 2 0.5 model", "q1 Q0 d1 3 0.5 model",
    ]  # fmt: skip


@pytest.mark.skipif(not (DATA / "retrieval").is_dir(), reason="needs reference data beside the checkout")
@pytest.mark.parametrize("name, ndcg, recall", [("cranfield", 49.5, 72.3), ("qmsum-val", 90.5, 100)])
def test_bm25_s_baselines(name, ndcg, recall):
    data = read_beir(DATA / "retrieval" / name, "test")
    ranking = Ranking(data)
    run = {name: found for query, scores in bm25(data) for name, found in ranking.run([query], [scores]).items()}
    found = means(measure(data, run))
    assert 100 * found["nDCG@10"] == pytest.approx(ndcg, abs=0.1)
    assert 100 * found["R@100"] == pytest.approx(recall, abs=0.1)
