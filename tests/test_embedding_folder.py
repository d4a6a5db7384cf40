"""Folders of embedding models as sentence-transformers reads them. Needs no Composer (`make test-compat`)."""

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from torch.nn import functional as F

from src.checkpoints.reading import read_checkpoint, read_folder
from src.errors import UserError
from src.lion import LionEmbeddingModel
from src.publish import commands as hub
from src.publish import folder as hub_folder
from tests.test_folder import write_checkpoint

TEXTS = ["the old dog sees a ship.", "a king", "the red cat finds the quiet house of the bird. " * 1200]
PROMPTS = {"query": "the king ", "document": "a dog "}


def embedding(state: dict) -> None:
    state["integrations"]["huggingface"]["embedding"] = {"prompts": PROMPTS, "max_seq_len": 20}


@pytest.fixture(scope="module")
def write(tmp_path_factory, tokenizer_folder):
    """write(mixer, pooling) → a checkpoint with prompts, as embed.py saves it."""

    def write(mixer: str, pooling: str) -> Path:
        path = tmp_path_factory.mktemp("embedding") / "checkpoint.pt"
        write_checkpoint(path, tokenizer_folder, LionEmbeddingModel, mixer, pooling=pooling)
        stored = torch.load(path, weights_only=False)
        if pooling == "attention":
            torch.nn.init.normal_(stored["state"]["model"]["model.pooling_weight"])
        embedding(stored["state"])
        torch.save(stored, path)
        return path

    return write


@pytest.fixture(scope="module")
def exported(write, tmp_path_factory) -> tuple[Path, Path]:
    """A checkpoint with attention pooling, and its folder."""
    checkpoint, out = write("lion-s", "attention"), tmp_path_factory.mktemp("out") / "my-embedder"
    hub.export(checkpoint, out)
    return checkpoint, out


def vectors(checkpoint: Path, texts: list[str], prompt: str = "", limit: int | None = None) -> torch.Tensor:
    read = read_checkpoint(checkpoint)
    model, tokenizer = read.build(), read.load_tokenizer()
    cut = {"truncation": True, "max_length": limit} if limit else {}
    with torch.no_grad():
        ids = [tokenizer(prompt + text, return_tensors="pt", **cut)["input_ids"] for text in texts]
        return F.normalize(torch.cat([model(each).pooler_output for each in ids]), dim=-1)


@pytest.mark.parametrize("mixer, pooling", [("lion-s", "mean"), ("lion-d", "attention"), ("lion-lit", "cls")])
def test_sentence_transformers_gives_our_vectors_with_prompts_and_at_any_length(mixer, pooling, write, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    checkpoint = write(mixer, pooling)
    hub_folder.write(read_checkpoint(checkpoint), tmp_path / "embedder")
    encoder = sentence_transformers.SentenceTransformer(
        str(tmp_path / "embedder"), device="cpu", trust_remote_code=True
    )
    assert encoder.max_seq_length == 20
    for encode, prompt in (
        (encoder.encode_query, "the king "),
        (encoder.encode_document, "a dog "),
        (encoder.encode, ""),
    ):
        found = encode(TEXTS, convert_to_tensor=True)
        torch.testing.assert_close(found, vectors(checkpoint, TEXTS, prompt, 20), atol=1e-5, rtol=0)
    if mixer != "lion-lit":  # which has a table of positions
        encoder.max_seq_length = 1 << 20
        found = encoder.encode(TEXTS, convert_to_tensor=True)
        assert len(encoder.tokenizer(TEXTS[2])["input_ids"]) > 9000
        torch.testing.assert_close(found, vectors(checkpoint, TEXTS), atol=1e-5, rtol=0)


def test_an_exported_folder_is_proved_read_back_and_described(exported):
    checkpoint, out = exported
    read, stored = read_checkpoint(checkpoint), read_folder(out)
    assert stored.class_name == "LionEmbeddingModel"
    assert stored.embedding == read.embedding == {"prompts": PROMPTS, "max_seq_len": 20}
    assert {"1_Pooling/config.json", "modules.json"} <= hub.digests(out).keys()
    hub.check_proof(out)
    card = (out / "README.md").read_text()
    assert "library_name: sentence-transformers" in card and 'SentenceTransformer("my-embedder"' in card
    auto_map = json.loads((out / "config.json").read_text())["auto_map"]
    assert auto_map["AutoModel"] == "modeling_lion_embedding.LionEmbeddingModel"
    assert auto_map["AutoModelForMaskedLM"] == "modeling_lion.LionForMaskedLM"


def test_a_folder_whose_tokenizer_keeps_a_last_space_is_exported(write, tmp_path):
    """sentence-transformers strips a text first."""
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {
        token: number for number, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters])
    }
    own = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    transformers.PreTrainedTokenizerFast(tokenizer_object=own, **names).save_pretrained(tmp_path / "tokenizer")
    path = tmp_path / "checkpoint.pt"
    write_checkpoint(
        path, tmp_path / "tokenizer", LionEmbeddingModel, "lion-s", pooling="mean", vocab_size=len(vocabulary)
    )
    stored = torch.load(path, weights_only=False)
    embedding(stored["state"])
    torch.save(stored, path)
    hub.export(path, tmp_path / "out")
    hub.check_proof(tmp_path / "out")


def edit(name: str, change):
    def edit_file(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return edit_file


CHANGES = {
    "prompts": (edit("config_sentence_transformers.json", lambda c: c["prompts"].update(query="x")), "config_sentence"),
    "pooling": (
        edit("1_Pooling/config.json", lambda c: c.update(pooling_mode_cls_token=True)),
        "1_Pooling/config.json",
    ),
    "modules": (edit("modules.json", lambda c: c.pop()), "modules.json"),
    "limit": (edit("sentence_bert_config.json", lambda c: c.update(max_seq_length=8)), "max_seq_length (8, and 20"),
    "missing": (lambda folder: (folder / "1_Pooling/config.json").unlink(), "1_Pooling/config.json"),
}


@pytest.mark.parametrize("change, words", CHANGES.values(), ids=CHANGES)
def test_verify_notices_what_sentence_transformers_would_read_differently(change, words, exported, tmp_path):
    checkpoint, out = exported
    shutil.copytree(out, tmp_path / "changed")
    change(tmp_path / "changed")
    with pytest.raises(UserError, match=re.escape(words)):
        hub.verify(str(checkpoint), tmp_path / "changed")


def test_a_longer_limit_is_set_at_export_and_accepted(exported, write, tmp_path):
    checkpoint, _ = exported
    read = read_checkpoint(checkpoint)
    hub.set_limit(read, 1 << 20)
    hub_folder.write(read, tmp_path / "long")
    assert read_folder(tmp_path / "long").embedding["max_seq_len"] == 1 << 20
    hub.verify(str(checkpoint), tmp_path / "long")
    with pytest.raises(UserError, match="less than the 20 tokens of training"):
        hub.set_limit(read_checkpoint(checkpoint), 19)
    with pytest.raises(UserError, match="128 position embeddings"):
        hub.set_limit(read_checkpoint(write("lion-lit", "mean")), 129)
    read.class_name = "LionForMaskedLM"
    with pytest.raises(UserError, match=r"--max_seq_length 64 is for a checkpoint of embed\.py"):
        hub.set_limit(read, 64)


def test_a_corrupt_file_of_a_folder_is_named(exported, tmp_path):
    shutil.copytree(exported[1], tmp_path / "corrupt")
    (tmp_path / "corrupt" / "config_sentence_transformers.json").write_text("[")
    with pytest.raises(UserError, match=r"config_sentence_transformers\.json, .* is corrupt"):
        read_folder(tmp_path / "corrupt")


@pytest.mark.parametrize("stored, limit", [(20, 20), (10**30, None), (None, None)])
def test_a_folder_as_version_6_of_sentence_transformers_saves_it_is_read(stored, limit, exported, tmp_path):
    folder = tmp_path / "saved"
    shutil.copytree(exported[1], folder)
    kept = {"__version__": {"sentence_transformers": "6.2.0"}, "model_type": "SentenceTransformer"}
    edit("config_sentence_transformers.json", lambda c: c.update(kept))(folder)
    # Version 6 omits max_seq_length here, and sets model_max_length there.
    edit("sentence_bert_config.json", lambda c: (c.clear(), c.update(transformer_task="feature-extraction")))(folder)
    edit("tokenizer_config.json", lambda c: c.update(model_max_length=stored))(folder)
    assert read_folder(folder).embedding == {"prompts": PROMPTS, "max_seq_len": limit}
    (folder / "tokenizer_config.json").unlink()
    assert read_folder(folder).embedding == {"prompts": PROMPTS, "max_seq_len": None}


def test_sentence_transformers_own_trainer_trains_a_folder(exported, tmp_path):
    st, datasets = pytest.importorskip("sentence_transformers"), pytest.importorskip("datasets")
    losses = pytest.importorskip("sentence_transformers.losses")
    pytest.importorskip("accelerate")
    # In one process, transformers takes two folders of the same name for one, and then does not save the code.
    shutil.copytree(exported[1], tmp_path / "to-train")
    model = st.SentenceTransformer(str(tmp_path / "to-train"), device="cpu", trust_remote_code=True)
    texts = [f"{one} {other}" for one in ("dog", "king", "ship", "cat") for other in ("sees", "finds")]
    pairs = datasets.Dataset.from_dict({"anchor": texts, "positive": [f"the {text} a bird" for text in texts]})
    arguments = st.SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=4, per_device_train_batch_size=8, learning_rate=1e-2, use_cpu=True,
        report_to=[], logging_steps=1, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    loss = losses.MultipleNegativesRankingLoss(model)
    trainer = st.SentenceTransformerTrainer(model=model, args=arguments, train_dataset=pairs, loss=loss)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0]
    model.save_pretrained(str(tmp_path / "trained"))
    assert read_folder(tmp_path / "trained").embedding == {"prompts": PROMPTS, "max_seq_len": 20}
    again = st.SentenceTransformer(str(tmp_path / "trained"), device="cpu", trust_remote_code=True)
    for text in TEXTS[:2]:
        torch.testing.assert_close(
            again.encode(text, convert_to_tensor=True), model.encode(text, convert_to_tensor=True)
        )


def test_negatives_mined_with_a_folder_can_be_trained_on(exported, tmp_path, monkeypatch):
    """The script of docs/embeddings.md, with fewer negatives, and embed.py's reader of pairs."""
    pytest.importorskip("sentence_transformers"), pytest.importorskip("datasets")
    open_pairs = pytest.importorskip("src.embed.pairs").open_pairs
    page = (Path(__file__).parents[1] / "docs/embeddings.md").read_text()
    script = re.search(r"```python\n([^`]*mine_hard_negatives[^`]*)```", page)[1]
    (tmp_path / "labelled").mkdir()
    texts = [" ".join(words) for words in itertools.permutations(("dog", "king", "ship", "cat", "bird"), 3)]
    rows = [json.dumps({"query": text, "document": f"the {text} a bird", "extra": 1}) for text in texts]
    (tmp_path / "labelled/rows.jsonl").write_text("\n".join(rows))
    shutil.copytree(exported[1], tmp_path / "my-embedder")
    monkeypatch.chdir(tmp_path)
    fewer = {"num_negatives=7": "num_negatives=2", "relative_margin=0.05": "relative_margin=-10"}  # it is not trained
    for given, other in fewer.items():
        assert given in script
        script = script.replace(given, other)
    exec(script, {})
    columns = {"query": "query", "document": "document", "negatives": ["negative_1", "negative_2"]}
    mined = open_pairs("mined", {"files": ["mined.jsonl"], "columns": columns}, {}, tmp_path / "pairs")
    assert len(mined) == len(texts)
    for pair in (mined[row] for row in range(len(mined))):
        assert pair.document == f"the {pair.query} a bird"
        assert len({pair.document, *pair.negatives}) == 3
