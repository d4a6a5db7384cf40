"""`embed.py encode`: passages by tokens and by units, Parquet files of vectors, resuming, mistakes."""

import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import sentences
from pyarrow import parquet
from test_embed_retrieval import write_beir

import embed
from src.data import readers
from src.embed import encode
from src.embed.beir import read_beir
from src.embed.encoder import DOCUMENT, Passages, Settings, open_encoder
from src.embed.options import READING, fingerprint
from src.embed.passages import UNITS, characters, passage_edges, special_tokens, unit_starts
from src.errors import UserError

TEXT = "the king sees a dog. the cat hears\nthe old ship!  a house\n\n a river. the end"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with texts of several lines in a.jsonl, and others in b.txt."""
    folder, texts = tmp_path_factory.mktemp("texts"), sentences(30)
    rows = ({"text": "\n".join(texts[n : n + 3])} for n in range(20))
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "b.txt").write_text("\n".join(["", TEXT.split("\n")[0], *texts[20:]]) + "\n")
    return folder


def test_passages_cover_a_text_once_and_begin_at_units():
    assert passage_edges(12, (1, 1), 4) == [0, 5, 9, 12]
    assert passage_edges(2, (1, 1), 4) == [0, 2]  # no word
    assert passage_edges(12, (0, 0), 4) == [0, 4, 8, 12]
    assert passage_edges(12, (1, 1), 4, [1, 3, 6]) == [0, 3, 6, 10, 12]
    assert passage_edges(20, (1, 1), 4, [15]) == [0, 5, 9, 13, 15, 20]


@pytest.mark.parametrize("unit", UNITS)
def test_units_begin_at_their_first_word(unit, tokenizer):
    encoded = tokenizer(TEXT, return_offsets_mapping=True)
    offsets, length = encoded["offset_mapping"], len(encoded["input_ids"])
    edges = passage_edges(length, (1, 1), 100, unit_starts(TEXT, offsets, (1, 1), unit))
    found = [TEXT[slice(*characters(span, offsets, (1, 1)))] for span in itertools.pairwise(edges)]
    expected = {
        "tokens": [TEXT],
        "lines": ["the king sees a dog. the cat hears", "the old ship!  a house", "a river. the end"],
        "paragraphs": ["the king sees a dog. the cat hears\nthe old ship!  a house", "a river. the end"],
        "sentences": ["the king sees a dog.", "the cat hears\nthe old ship!", "a house\n\n a river.", "the end"],
    }
    assert [re.sub("!$", "", text) for text in found] == [re.sub("!$", "", text) for text in expected[unit]]


def test_a_token_that_starts_with_a_space_begins_its_sentence():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["ĠDogs", "Ġbark", "ĠCats", "Ġsleep", ".", "[CLS]", "[SEP]", "</s>", "[UNK]"]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    for template, special in (("[CLS] $A [SEP]", (1, 1)), ("$A </s>", (0, 1)), ("$A", (0, 0))):
        named = [(word, words.index(word)) for word in template.split() if word != "$A"]
        made.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")
        assert special_tokens(tokenizer) == special
        text = "Dogs bark. Cats sleep."
        encoded = tokenizer(text, return_offsets_mapping=True)
        starts = unit_starts(text, encoded["offset_mapping"], special, "sentences")
        assert starts == [special[0] + 3]
        spans = itertools.pairwise(passage_edges(len(encoded["input_ids"]), special, 100, starts))
        found = [text[slice(*characters(span, encoded["offset_mapping"], special))].strip() for span in spans]
        assert found == ["Dogs bark.", "Cats sleep."]


def rows_of(out: Path) -> list[dict]:
    return [row for part in sorted(out.glob("part-*.parquet")) for row in parquet.read_table(part).to_pylist()]


def test_files_become_vectors_of_texts_and_of_passages(files, checkpoint, tmp_path, capsys):
    patterns = ["--data_files", str(files / "*")]
    embed.main(["encode", str(checkpoint), *patterns, "--out", str(tmp_path / "texts")])
    embed.main(
        ["encode", str(checkpoint), *patterns, "--out", str(tmp_path / "lines"), "--passages", "9", "--unit", "lines"]
    )
    shown = capsys.readouterr().out
    texts = [json.loads(line)["text"] for line in (files / "a.jsonl").read_text().splitlines()]
    texts += (files / "b.txt").read_text().splitlines()
    assert f"{len(texts)} vectors of {len(texts)} texts" in shown
    encoder = open_encoder(str(checkpoint), Settings())
    rows = rows_of(tmp_path / "texts")
    assert [row["file"] for row in rows] == ["a.jsonl"] * 20 + ["b.txt"] * 12
    assert [row["row"] for row in rows] == [*range(20), *range(12)]
    vectors = encoder.encode(texts, DOCUMENT).vectors
    torch.testing.assert_close(torch.tensor([row["vector"] for row in rows]), vectors, atol=1e-5, rtol=1e-5)
    assert all(row["start"] == 0 and row["last"] == len(text.rstrip()) for row, text in zip(rows, texts))
    rows, found = rows_of(tmp_path / "lines"), encoder.encode(texts, DOCUMENT, passages=Passages(9, "lines"))
    torch.testing.assert_close(torch.tensor([row["vector"] for row in rows]), found.vectors, atol=1e-5, rtol=1e-5)
    passages = [texts[row["row"] + 20 * (row["file"] == "b.txt")][row["first"] : row["last"]] for row in rows]
    assert all("\n" not in text for text in passages)
    assert "".join(passages).replace(" ", "") == "".join(texts).replace("\n", "").replace(" ", "")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "lines").iterdir()}
    embed.main(
        ["encode", str(checkpoint), *patterns, "--out", str(tmp_path / "lines"), "--passages", "9", "--unit", "lines"]
    )
    assert shown.endswith(capsys.readouterr().out)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "lines").iterdir()} == before


@pytest.mark.parametrize("at", [1, 3, 6])
def test_an_interrupted_encoding_continues_with_the_same_result(files, checkpoint, tmp_path, monkeypatch, at):
    monkeypatch.setattr(readers, "BATCH_BYTES", 700)
    command = ["encode", str(checkpoint), "--data_files", str(files / "*"), "--passages", "5", "--out"]
    embed.main([*command, str(tmp_path / "whole")])
    expected, write = sorted((tmp_path / "whole").glob("part-*")), encode.write_part
    calls = []

    def interrupted(*arguments):
        calls.append(0)
        if len(calls) > at:
            raise KeyboardInterrupt
        return write(*arguments)

    monkeypatch.setattr(encode, "write_part", interrupted)
    with pytest.raises(KeyboardInterrupt):
        embed.main([*command, str(tmp_path / "resumed")])
    assert len(list((tmp_path / "resumed").glob("part-*"))) == at
    monkeypatch.setattr(encode, "write_part", write)
    embed.main([*command, str(tmp_path / "resumed")])
    found = sorted((tmp_path / "resumed").glob("part-*"))
    assert len(found) > 6
    assert [path.read_bytes() for path in found] == [path.read_bytes() for path in expected]


def test_the_texts_of_several_columns_are_joined_as_those_of_a_beir_folder(checkpoint, tmp_path, monkeypatch):
    documents = {"1": {"title": "The king ", "text": "sees a dog."}, "2": {"title": "", "text": "the cat"}}
    write_beir(tmp_path / "beir", documents, {"q": "the king"}, [("q", "1", 1)])
    read, write = [], encode.write_part
    monkeypatch.setattr(encode, "write_part", lambda *given: read.extend(given[2].texts) or write(*given))
    command = ["encode", str(checkpoint), "--data_files", str(tmp_path / "beir/corpus.jsonl")]
    command += ["--out", str(tmp_path / "out"), "--text_column", "title", "--text_column", "text"]
    embed.main(command)
    assert read == list(read_beir(tmp_path / "beir", "test").documents.values()) == ["The king sees a dog.", "the cat"]


def test_vectors_may_be_truncated(files, checkpoint, tmp_path):
    command = ["encode", str(checkpoint), "--data_files", str(files / "b.txt"), "--dims", "8", "--out"]
    embed.main([*command, str(tmp_path / "out")])
    vectors = torch.tensor([row["vector"] for row in rows_of(tmp_path / "out")])
    assert vectors.shape[1] == 8
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(vectors)))


def test_other_weights_of_the_same_name_are_noticed(tmp_path, monkeypatch):
    options = SimpleNamespace(dims=None, **dict.fromkeys(READING))
    weights = tmp_path / "model/0_Transformer/model.safetensors"  # where sentence-transformers puts them
    weights.parent.mkdir(parents=True)
    found = []
    for content in ("old", "newer"):
        weights.write_text(content)
        found.append(fingerprint(str(tmp_path / "model"), options))
    monkeypatch.chdir(tmp_path)
    for commit in ("a1", "b2"):
        monkeypatch.setattr("huggingface_hub.HfApi.model_info", Mock(return_value=Mock(sha=commit)))
        found.append(fingerprint("org/model", options))
    assert all(one != other for i, one in enumerate(found) for other in found[:i])
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", Mock(side_effect=OSError))
    assert fingerprint("org/model", options)["files"] == []  # not known offline


def test_vectors_of_earlier_versions_are_known_and_may_be_inside_the_models_folder(files, folder, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling/config.json").write_text("{}")  # of which earlier versions did not know
    command = ["encode", str(model), "--data_files", str(files / "b.txt"), "--out", str(model / "vectors")]
    embed.main(command)
    state = model / "vectors" / encode.STATE
    stored = json.loads(state.read_text())
    before = [path.stat().st_mtime_ns for path in (model / "vectors").glob("part-*")]
    for known in (stored["files"], [file for file in stored["files"] if "/" not in file[0]]):
        state.write_text(json.dumps({**stored, "files": known}))
        embed.main(command)
    assert [path.stat().st_mtime_ns for path in (model / "vectors").glob("part-*")] == before


def test_mistakes_are_named(files, checkpoint, tmp_path):
    command = ["encode", str(checkpoint), "--data_files", str(files / "b.txt"), "--out", str(tmp_path / "out")]
    with pytest.raises(UserError, match=r"--unit lines needs --passages"):
        embed.main([*command, "--unit", "lines"])
    with pytest.raises(UserError, match="none"):
        embed.main(["encode", str(checkpoint), "--data_files", str(files / "none*"), "--out", str(tmp_path / "out")])
    with pytest.raises(UserError, match="no body"):
        embed.main([*command[:3], str(files / "a.jsonl"), *command[4:], "--text_column", "body"])
    assert not list((tmp_path / "out").glob("part*"))
    embed.main(command)
    with pytest.raises(UserError, match="holds vectors of another model, of other texts or settings"):
        embed.main([*command, "--max_seq_len", "10"])
    with pytest.raises(UserError, match="holds vectors of another model, of other texts or settings"):
        embed.main([*command, "--dims", "8"])
    assert "dims" not in json.loads((tmp_path / "out" / encode.STATE).read_text())  # as earlier versions wrote it
    assert len(parquet.read_table(tmp_path / "out")) == len(rows_of(tmp_path / "out"))
    (tmp_path / "out" / encode.STATE).rename(tmp_path / "out" / "encoding.json")  # their name for it
    before = [path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")]
    embed.main(command)
    assert [path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")] == before
    (tmp_path / "out" / encode.STATE).write_text("{")
    with pytest.raises(UserError, match="holds vectors of another model"):
        embed.main(command)
