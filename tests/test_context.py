"""`main.py context`: the same masked tokens from more or less context; the command and its mistakes."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from conftest import TINY_MODEL, VOCABULARY, sentences, write_jsonl
from torch.nn import functional as F
from tqdm import tqdm
from transformers import BertConfig, BertForMaskedLM, BertModel, BertTokenizerFast

import main
from src.errors import RunFailed, UserError
from src.lion import LionForMaskedLM
from src.mlm.pieces import Reading, mask_rows, open_models, predict, read_rows

LENGTHS = (8, 16, 64)
SILENT = tqdm(disable=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Text for a dozen rows of 64 tokens."""
    return write_jsonl(tmp_path_factory.mktemp("text") / "data.jsonl", sentences(40))


@pytest.fixture(scope="module")
def masked(data, tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Five rows of 64 tokens and their labels."""
    return mask_rows(read_rows([data], "text", copy.deepcopy(tokenizer), 64, 5), tokenizer, 0.3, 1)


@pytest.fixture(scope="module")
def model(checkpoint) -> LionForMaskedLM:
    return open_models([str(checkpoint)])[0][0]


def save_bert(folder: Path, tokenizer_folder: Path, kind: type) -> Path:
    torch.manual_seed(0)
    sizes = {name: value for name, value in TINY_MODEL.items() if name != "mixer"}
    kind(BertConfig(vocab_size=len(VOCABULARY), initializer_range=0.3, **sizes)).save_pretrained(folder)
    BertTokenizerFast.from_pretrained(tokenizer_folder).save_pretrained(folder)
    return folder


def test_masks_depend_on_the_seed_and_the_row_alone(data, tokenizer):
    rows = read_rows([data], "text", copy.deepcopy(tokenizer), 64, 6)
    ids, labels = mask_rows(rows, tokenizer, 0.15, 3)
    fewer = mask_rows(rows[:2], tokenizer, 0.15, 3)
    assert torch.equal(fewer[0], ids[:2]) and torch.equal(fewer[1], labels[:2])
    assert not torch.equal(mask_rows(rows, tokenizer, 0.15, 4)[1], labels)
    original = torch.where(labels < 0, ids, labels)
    joined = [token for text in sentences(40) for token in tokenizer(text)["input_ids"]]
    assert original.flatten().tolist() == joined[: 6 * 64]
    assert not set(labels.unique().tolist()) & {*tokenizer.all_special_ids}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("batch_tokens", [1, 100, 4096])
def test_each_row_is_scored_as_if_its_pieces_were_read_one_by_one(model, masked, length, batch_tokens, monkeypatch):
    monkeypatch.setattr("src.mlm.pieces.AT_ONCE", 7)
    ids, labels = masked
    right, loss = predict(model, ids, labels, length, Reading(batch_tokens=batch_tokens), SILENT)
    for row, (tokens, wanted) in enumerate(zip(ids, labels)):
        with torch.no_grad():
            logits = torch.cat([model(part[None]).logits[0] for part in tokens.split(length)])
        assert right[row] == (logits.argmax(-1) == wanted).sum()
        assert loss[row].item() == pytest.approx(F.cross_entropy(logits, wanted, reduction="sum").item(), rel=1e-4)
    assert loss.sum() > 0


def test_a_piece_does_not_see_another(model, masked):
    ids, labels = masked[0].clone(), masked[1].clone()
    labels[:, :32] = -100  # only the second half is predicted
    found = {length: predict(model, ids, labels, length, Reading(), SILENT)[1] for length in (32, 64)}
    ids[:, 30] = (ids[:, 30] + 1) % len(VOCABULARY)
    again = {length: predict(model, ids, labels, length, Reading(), SILENT)[1] for length in (32, 64)}
    assert torch.equal(found[32], again[32])
    assert not torch.equal(found[64], again[64])


def test_losses_that_are_not_finite_fail(model, masked, monkeypatch):
    monkeypatch.setattr(model.head.decoder.bias, "data", torch.full_like(model.head.decoder.bias, torch.nan))
    with pytest.raises(RunFailed, match="not finite"):
        predict(model, *masked, 64, Reading(), SILENT)


def test_a_bert_of_hugging_face_predicts_what_it_does_there(tmp_path, tokenizer_folder, masked):
    folder = save_bert(tmp_path / "bert", tokenizer_folder, BertForMaskedLM)
    theirs = BertForMaskedLM.from_pretrained(folder).eval()
    (ours,), _ = open_models([str(folder)])
    ids, labels = masked
    with torch.no_grad():
        expected = F.cross_entropy(theirs(ids).logits.flatten(0, 1), labels.flatten(), reduction="sum")
    _, loss = predict(ours, ids, labels, 64, Reading(), SILENT)
    assert loss.sum().item() == pytest.approx(expected.item(), rel=1e-4)


def test_the_command_compares_models_and_lengths(data, checkpoint, folder, write_checkpoint, tmp_path, capsys, caplog):
    caplog.set_level("INFO")
    limited, out = write_checkpoint(tmp_path / "lit" / "lit.pt", "lion-lit"), tmp_path / "out" / "context"
    command = ["context", checkpoint, folder, limited, "--data_files", data, "--lengths", 256, 8, 128, "--rows", 3]
    main.main([*map(str, command), "--mlm_probability", "0.3", "--resamples", "100", "--out", str(out)])
    shown = capsys.readouterr().out
    report = json.loads((out / "report.json").read_text())
    first, second, third = report["results"].values()
    assert first["lengths"] == second["lengths"]  # the Hub folder is of the same model
    assert list(first["lengths"]) == ["8", "128", "256"] and list(third["lengths"]) == ["8", "128"]
    assert "lit has 128 position embeddings" in caplog.text and "3 rows of 256 tokens" in caplog.text
    for found in (*first["lengths"].values(), *third["lengths"].values()):
        for name, key in (("accuracy", "correct"), ("loss", "loss")):
            assert found[name] == pytest.approx(sum(found["by_row"][key]) / sum(report["masked"]))
    for found, last in ((first, "256"), (third, "128")):
        ends = [found["lengths"][length]["accuracy"] for length in (last, "8")]
        assert found["gain"]["mean"] == pytest.approx(ends[0] - ends[1])
        assert found["gain"]["low"] <= found["gain"]["mean"] <= found["gain"]["high"]
    assert re.search(r"^\| masked accuracy +\| +8 \| +128 \| +256 \| longest − shortest", shown, re.M)
    assert len(re.findall(r"^\| lit +\|.*\| +- \|", shown, re.M)) == 2
    assert (out / "report.md").read_text().split("\n\n", 1)[1].strip() in shown
    assert (out / "context.png").read_bytes().startswith(b"\x89PNG") and str(out / "context.png") in shown
    measured = [path.stat().st_mtime_ns for path in sorted((out / "models").iterdir())]
    main.main([*map(str, command), "--mlm_probability", "0.3", "--resamples", "100", "--out", str(out)])
    assert json.loads((out / "report.json").read_text()) == report and capsys.readouterr().out == shown
    assert [path.stat().st_mtime_ns for path in sorted((out / "models").iterdir())] == measured
    assert caplog.text.count("read from") == 3
    main.main([*map(str, command), "--mlm_probability", "0.2", "--resamples", "100", "--out", str(out)])
    assert caplog.text.count("read from") == 3  # other masks


def test_a_length_is_measured_the_same_whatever_the_others_are(data, checkpoint, tmp_path, capsys):
    def losses(*lengths):
        given = ["context", checkpoint, "--data_files", data, "--rows", 2, "--lengths", *lengths, "--out", tmp_path]
        main.main([*map(str, given)])
        return json.loads((tmp_path / "report.json").read_text())["results"][checkpoint.parent.name]["lengths"]

    assert losses(8, 32, 128)["8"] == losses(8, 128)["8"]
    assert capsys.readouterr().out.count("2 rows of 128 tokens") == 2


@pytest.mark.parametrize(
    ("models", "options", "words"),
    [
        (["OURS"], ["--lengths", 8, 12, 64], "--lengths: 12 does not divide the longest, 64"),
        (["OURS"], ["--lengths", 4, 64], "--lengths=4 must be an integer ≥ 8"),
        (["OURS"], ["--lengths", 8, 65536], "--data_files hold no row of 65,536 tokens"),
        (["OURS"], ["--lengths", 8, 800], "--data_files hold one row of 800 tokens"),
        (["OURS"], ["--rows", 1], "--rows=1 must be an integer ≥ 2"),
        (["OURS"], ["--mlm_probability", 1], "--mlm_probability=1.0 must be a number > 0 and < 1"),
        (["OURS"], ["--mlm_probability", 1e-9], "masks none of the 256 tokens"),
        (["OURS"], ["--data_files", "nowhere.txt"], "--data_files: nothing matches nowhere.txt"),
        (["OURS"], ["--tokenizer", "LARGER"], "and --tokenizer have different tokenizers"),
        (["OURS", "OURS"], [], "is named twice"),
        (["OURS", "OTHER"], [], "have different tokenizers"),
        (["./nowhere.pt"], [], "MODEL: ./nowhere.pt is not a file or folder"),
        (["LIT"], ["--lengths", 256, 1024], "lit has 128 position embeddings; add a length up to that"),
        (["HEADLESS"], [], "has no masked-language-model head"),
        (["NAMELESS"], [], "nameless.pt has no tokenizer; name it as --tokenizer"),
        (["NAMELESS"], ["--tokenizer", "LARGER"], "name the tokenizer it was trained with"),
    ],
)
def test_a_mistake_is_named(models, options, words, data, checkpoint, tokenizer_folder, write_checkpoint, tmp_path):
    def without_tokenizer(state):
        state["integrations"]["huggingface"]["tokenizer"] = {}

    def another_tokenizer(state):
        stored = state["integrations"]["huggingface"]["tokenizer"]["tokenizer.json"]["content"]
        tokens = stored["model"]["vocab"]
        tokens["dog"], tokens["cat"] = tokens["cat"], tokens["dog"]

    def larger():
        (tmp_path / "vocab.txt").write_text("\n".join([*VOCABULARY, *(f"more{number}" for number in range(20))]))
        BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "larger")
        return tmp_path / "larger"

    made = {
        "OURS": lambda: checkpoint,
        "LIT": lambda: write_checkpoint(tmp_path / "lit" / "lit.pt", "lion-lit"),
        "HEADLESS": lambda: save_bert(tmp_path / "headless", tokenizer_folder, BertModel),
        "NAMELESS": lambda: write_checkpoint(tmp_path / "nameless.pt", edit=without_tokenizer),
        "OTHER": lambda: write_checkpoint(tmp_path / "other.pt", edit=another_tokenizer),
        "LARGER": larger,
    }
    models, options = ([made.get(x, lambda x=x: x)() for x in given] for given in (models, options))
    command = [*models, "--data_files", data, "--lengths", 8, 128, "--rows", 2, "--out", tmp_path / "out", *options]
    with pytest.raises(UserError, match=re.escape(words)):
        main.main(["context", *map(str, command)])
    assert not (tmp_path / "out").exists()
