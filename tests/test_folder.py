"""A folder as the Hub holds it: made from a checkpoint, and used by programs that have torch and transformers alone.

Needs no Composer, so that it also runs under the newest transformers (`make test-compat`).
"""

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import plain
import pytest
import torch
from safetensors.torch import load_file, save_file

from src.checkpoints.reading import read_checkpoint
from src.errors import UserError
from src.lion import LionConfig, LionForMaskedLM, LionForSequenceClassification
from src.publish import commands as hub
from src.publish import folder as hub_folder
from src.publish.commands import digests
from tests.conftest import MIXERS, ROOT, TINY_MODEL, VOCABULARY, environment, settings_of, snapshot
from tests.fake_hub import serve

AUTO_CLASSES = (
    "AutoModel", "AutoModelForMaskedLM", "AutoModelForSequenceClassification", "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
)  # fmt: skip
FILES = {
    "README.md", "proof.json", "config.json", "model.safetensors", "configuration_lion.py", "modeling_lion.py",
    "linear_attention.py", "linear_attention_triton.py", "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip
OPTIONS = {  # of the folder "options", a lion-s
    "norm": "pre", "mlp": "geglu", "position_embedding": "rope", "bias": False, "short_conv": 3, "value_gate": True,
    "decay_horizon": [2.0, 64.0], "separate_decays": True, "type_vocab_size": 0,
}  # fmt: skip
SENTENCE = "the old dog sees a [MASK] ."


def write_checkpoint(path: Path, tokenizer_folder: Path, kind: type, mixer: str = "lion-s", **changes) -> Path:
    """An untrained model as the checkpoint that Composer would save of it."""
    tokenizer = {
        file.name: {
            "file_extension": file.suffix,
            "content": file.read_text() if file.suffix == ".txt" else json.loads(file.read_text()),
        }
        for file in tokenizer_folder.iterdir()
    }
    torch.manual_seed(0)
    sizes = {**TINY_MODEL, "mixer": mixer, "vocab_size": -(-len(VOCABULARY) // 8) * 8, "initializer_range": 0.3}
    model = kind(LionConfig(**settings_of(**sizes | changes)))
    config = {"file_extension": ".json", "content": model.config.to_dict(), "class": f"modeling_lion.{kind.__name__}"}
    state = {
        "model": {f"model.{name}": tensor for name, tensor in model.state_dict().items()},
        "integrations": {"huggingface": {"model": {"config": config}, "tokenizer": tokenizer}},
        "timestamp": {"Timestamp": {"batch": 1200, "sample": 9600}},
        "run_name": f"tiny-{mixer}",
    }
    torch.save({"state": state, "rng": []}, path)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer_folder):
    """made(name): a checkpoint of a mixer, "classifier" or "options", and its exported folder; made once per name."""
    work, done = tmp_path_factory.mktemp("hub"), {}

    def make(name: str = "lion-s") -> tuple[Path, Path]:
        if name not in done:
            checkpoint = work / f"{name}.pt"
            if name == "classifier":
                labels = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
                write_checkpoint(checkpoint, tokenizer_folder, LionForSequenceClassification, **labels)
            elif name == "options":
                write_checkpoint(checkpoint, tokenizer_folder, LionForMaskedLM, **OPTIONS)
            else:
                write_checkpoint(checkpoint, tokenizer_folder, LionForMaskedLM, name)
            hub.export(checkpoint, work / name)
            done[name] = checkpoint, work / name
        return done[name]

    return make


@pytest.fixture
def changed(made, tmp_path) -> tuple[Path, Path]:
    """A checkpoint and a copy of its folder, to be changed."""
    checkpoint, folder = made()
    return checkpoint, Path(shutil.copytree(folder, tmp_path / "my-model"))


@pytest.mark.parametrize("mixer", ["lion-s", "softmax"])
def test_a_folder_that_transformers_saved_is_exported_like_a_checkpoint(tokenizer_folder, tmp_path, mixer, capsys):
    names = {"id2label": {0: "bad", 1: "fair", 2: "good"}, "label2id": {"bad": 0, "fair": 1, "good": 2}}
    model = LionForSequenceClassification(LionConfig(**{**TINY_MODEL, "mixer": mixer, "vocab_size": 160}, **names))
    saved, out = tmp_path / "saved.by-the-trainer", tmp_path / "my-model"
    model.save_pretrained(saved)
    shutil.copytree(tokenizer_folder, saved, dirs_exist_ok=True)
    before = snapshot(saved)
    hub.export(saved, out)
    hub.verify(str(saved), out)
    assert "largest difference 0.0e+00" in capsys.readouterr().out and snapshot(saved) == before
    assert {path.name for path in out.iterdir()} >= FILES
    config = json.loads((out / "config.json").read_text())
    assert config["auto_map"]["AutoModelForSequenceClassification"] and config["id2label"]["1"] == "fair"
    assert load_file(out / "model.safetensors").keys() == load_file(saved / "model.safetensors").keys()
    hub.export(out, tmp_path / "again")  # and so is a folder of export, which gets today's code
    assert digests(tmp_path / "again") == digests(out)


def test_a_folder_that_cannot_be_exported_is_named(made, tokenizer_folder, tmp_path):
    _, folder = made()
    saved = Path(shutil.copytree(folder, tmp_path / "saved"))
    (saved / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"saved/tokenizer\.json is corrupt .*; save the tokenizer again"):
        hub.export(saved, tmp_path / "out")
    (saved / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match=str(saved)):
        hub.export(saved, tmp_path / "out")
    with pytest.raises(UserError, match="is not a file; give a checkpoint"):
        hub.export(tokenizer_folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def verify(checkpoint: Path, folder: Path) -> float:
    return hub_folder.verify(read_checkpoint(checkpoint), folder)


# What export writes


@pytest.mark.parametrize("name", [*MIXERS, "classifier", "options"])
def test_a_folder_contains_weights_config_code_and_proof(made, name):
    checkpoint, folder = made(name)
    assert {path.name for path in folder.iterdir()} >= FILES
    config = json.loads((folder / "config.json").read_text())
    assert config["mixer"] == (name if name in MIXERS else "lion-s")
    assert config.items() >= (OPTIONS if name == "options" else {}).items()
    assert config["model_type"] == "lion"
    for value in config["auto_map"].values():
        module, attribute = value.split(".")
        assert f"class {attribute}(" in (folder / f"{module}.py").read_text()
    for code in hub_folder.CODE.glob("*.py"):
        assert code.name == "__init__.py" or code.read_bytes() == (folder / code.name).read_bytes()
    state = torch.load(checkpoint, weights_only=True)["state"]["model"]
    stored = load_file(folder / "model.safetensors")
    assert {f"model.{tensor}" for tensor in stored} == state.keys() - {"model.head.decoder.weight"}  # tied
    assert all(torch.equal(tensor, state[f"model.{key}"]) for key, tensor in stored.items())
    proof = json.loads((folder / "proof.json").read_text())
    assert proof["largest_difference"] <= 1e-5
    assert proof["sha256"].keys() == {path.name for path in folder.iterdir()} - {"README.md", "proof.json"}
    assert not list(folder.parent.glob("*-unfinished"))


@pytest.mark.parametrize(
    "file, times", [("modeling_lion.py", 8), ("modeling_lion_embedding.py", 15), ("modeling_lion_vision.py", 15)]
)
def test_transformers_finds_all_code_and_reads_it_a_few_times(made, file, times):
    """Version 4 reads a file for every chain of imports that leads to it, to load a model and to save one."""
    from transformers.dynamic_module_utils import get_relative_import_files

    folder = made()[1]
    found = [Path(path).name for path in get_relative_import_files(folder / file)]
    others = {path.name for path in folder.glob("*.py")} - {path.name for path in folder.glob("modeling_lion*")}
    assert set(found) - {"modeling_lion.py"} == others
    assert len(found) < times * len(others)


def test_a_classifiers_labels_keep_their_names(made):
    config = json.loads((made("classifier")[1] / "config.json").read_text())
    assert config["id2label"] == {"0": "bad", "1": "good"}
    assert config["architectures"] == ["LionForSequenceClassification"]


def test_a_folder_contains_no_path_of_the_machine_that_wrote_it(made, tokenizer_folder):
    checkpoint, folder = made()
    for path in folder.iterdir():
        for place in (tokenizer_folder, checkpoint.parent, ROOT):
            assert str(place).encode() not in path.read_bytes(), path.name


# verify


@contextlib.contextmanager
def changed_weights(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """A folder's weights, which are written back as the block leaves them."""
    weights = load_file(folder / "model.safetensors")
    yield weights
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_verify_passes_for_an_exported_folder_and_needs_no_card(changed):
    (changed[1] / "README.md").unlink()
    assert verify(*changed) <= 1e-5


@pytest.mark.parametrize(
    "name", ["lion.layers.0.attention.qkv.weight", "lion.embeddings.word_embeddings.weight", "head.decoder.bias"]
)
def test_verify_names_the_tensor_that_differs_and_no_other(changed, name):
    checkpoint, folder = changed
    with changed_weights(folder) as weights:
        weights[name].flatten()[-1] += 1e-3
    with pytest.raises(UserError, match=rf"differs from \S+ in (head\.decoder\.weight, )?{re.escape(name)};"):
        verify(checkpoint, folder)


def test_verify_names_a_missing_tensor(changed):
    checkpoint, folder = changed
    with changed_weights(folder) as weights:
        del weights["lion.layers.0.mlp_in.bias"]
    with pytest.raises(UserError, match=r"in lion\.layers\.0\.mlp_in\.bias;"):
        verify(checkpoint, folder)


def test_verify_names_a_tensor_of_another_type_or_shape(changed):
    checkpoint, folder = changed
    with changed_weights(folder) as weights:
        weights["lion.layers.0.mlp_in.bias"] = weights["lion.layers.0.mlp_in.bias"].half()
        weights["lion.layers.0.mlp_out.bias"] = weights["lion.layers.0.mlp_out.bias"][:-1].clone()
    with pytest.raises(UserError, match=r"in lion\.layers\.0\.mlp_in\.bias, lion\.layers\.0\.mlp_out\.bias;"):
        verify(checkpoint, folder)


def test_verify_names_tied_weights_that_are_missing_under_both_names(changed):
    checkpoint, folder = changed
    with changed_weights(folder) as weights:
        del weights["lion.embeddings.word_embeddings.weight"]
    with pytest.raises(UserError, match=r"in head\.decoder\.weight, lion\.embeddings\.word_embeddings\.weight;"):
        verify(checkpoint, folder)


@pytest.mark.parametrize(
    "setting",
    [
        {"hidden_act": "relu"},
        {"id2label": {"0": "bad", "1": "ugly"}},
        {"hidden_dropout_prob": 0.0},
        {"pad_token_id": 1},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_verify_names_a_setting_that_differs(changed, setting):
    checkpoint, folder = changed
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **setting}))
    with pytest.raises(UserError, match=rf"differs from \S+ in {next(iter(setting))}[;,]"):
        verify(checkpoint, folder)


def test_verify_detects_different_logits_from_the_same_weights(changed):
    """Changed code does not show in the weights, only in what the folder computes."""
    checkpoint, folder = changed
    code = (folder / "modeling_lion.py").read_text()
    assert code.count("logits = self.head(") == 1
    (folder / "modeling_lion.py").write_text(code.replace("logits = self.head(", "logits = 2 * self.head("))
    with pytest.raises(UserError, match=r"the logits of .* differ"):
        verify(checkpoint, folder)


@pytest.mark.parametrize(
    ("outputs", "difference"),
    [
        ({"start": torch.ones(2), "end": torch.zeros(2)}, 1),
        ({"start": torch.zeros(2), "end": torch.tensor([0, torch.nan])}, torch.nan),
        ({"start": torch.zeros(2), "end": torch.zeros(2, 1)}, torch.inf),
        ({"start": torch.zeros(2)}, torch.inf),
    ],
    ids=["number", "NaN", "shape", "missing"],
)
def test_no_difference_is_missed(outputs, difference):
    expected = {"start": torch.zeros(2), "end": torch.zeros(2)}
    assert hub_folder.largest_difference(expected, outputs) == pytest.approx(difference, nan_ok=True)


def test_an_interpreter_that_cannot_be_started_is_reported(made):
    checkpoint, folder = made()
    with pytest.raises(UserError, match="--python nowhere/python cannot be started"):
        hub_folder.verify(read_checkpoint(checkpoint), folder, "nowhere/python")


def test_verify_detects_a_changed_word_of_the_vocabulary(changed):
    checkpoint, folder = changed
    text = (folder / "tokenizer.json").read_text()
    assert '"ship"' in text
    (folder / "tokenizer.json").write_text(text.replace('"ship"', '"boat"'))
    with pytest.raises(UserError, match="tokenize differently"):
        verify(checkpoint, folder)


@pytest.mark.parametrize("missing", ["model.safetensors", "modeling_lion.py"])
def test_verify_of_an_incomplete_folder_names_the_file(changed, missing):
    checkpoint, folder = changed
    (folder / missing).unlink()
    with pytest.raises(UserError, match=missing.replace(".", r"\.")):
        verify(checkpoint, folder)


def test_verify_of_a_truncated_file_names_the_folder(changed):
    checkpoint, folder = changed
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=re.escape(str(folder))):
        verify(checkpoint, folder)


def edit_json(path: Path, **changes: object) -> None:
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


@pytest.mark.parametrize(
    ("file", "setting", "limit"),
    [("tokenizer_config", {"model_max_length": 100}, 100), ("config", {"max_position_embeddings": 300}, 300)],
    ids=["tokenizer", "config"],
)
def test_verify_detects_that_long_texts_would_be_truncated(changed, file, setting, limit):
    checkpoint, folder = changed
    edit_json(folder / f"{file}.json", **setting)
    with pytest.raises(UserError, match=f"limits texts to {limit} tokens, but lion-s reads texts of any length"):
        verify(checkpoint, folder)


def test_verify_detects_that_texts_longer_than_the_position_table_would_not_be_truncated(made, tmp_path):
    checkpoint, folder = made("softmax")
    folder = Path(shutil.copytree(folder, tmp_path / "my-model"))
    edit_json(folder / "tokenizer_config.json", model_max_length=10**30)
    with pytest.raises(UserError, match="but softmax reads 128 tokens"):
        verify(checkpoint, folder)


def test_limits_written_by_earlier_versions_verify_with_a_hint(changed, caplog):
    caplog.set_level("INFO")
    checkpoint, folder = changed
    edit_json(folder / "tokenizer_config.json", model_max_length=512)
    edit_json(folder / "config.json", max_position_embeddings=128, original_max_position_embeddings=None)
    verify(checkpoint, folder)
    assert (
        f"{folder} limits texts to 128 tokens, but lion-s reads texts of any length; it is from an earlier"
        in caplog.text
    )


# What export refuses, with nothing left behind


@pytest.mark.parametrize("failure", [UserError("no"), OSError(28, "No space left on device")])
def test_a_folder_that_failed_does_not_appear(made, tmp_path, monkeypatch, failure):
    def write_half(_, folder: Path) -> None:
        folder.mkdir()
        (folder / "half").write_text("half")
        raise failure

    monkeypatch.setattr(hub_folder, "write", write_half)
    with pytest.raises(UserError, match=r"no|No space left on device"):
        hub.export(made()[0], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["trained.pt", "sub/weights.BIN", "scaler.joblib", "pickled", ".env"])
def test_a_pickle_and_a_hidden_file_are_not_published(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=re.escape(name)):
        digests(tmp_path)


# Programs outside the repository


def outside(program: str, folder: Path, cwd: Path, **changes: str) -> str:
    """Return the output of a program run in another folder, offline by default, with its own code cache."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(cwd / "modules"), "CUDA_VISIBLE_DEVICES": "", **changes}
    command = [sys.executable, "-W", "ignore", "-c", program, str(folder)]
    done = plain.run(command, cwd=cwd, env=environment(**offline))
    assert done.returncode == 0, done.stderr
    return done.stdout


HEAD = """
import json, sys
sys.modules["triton"] = None  # as where it is not installed
import torch, transformers
from pathlib import Path
folder = Path(sys.argv[1])
tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
batch = tokenizer(["the small cat sees a red house .", "every king"], padding=True, return_tensors="pt")
assert not any(name == "src" or name.startswith("src.") for name in sys.modules)
"""

USE = f"""{HEAD}
for name in CLASSES:
    auto = getattr(transformers, name)
    model = auto.from_pretrained(folder, trust_remote_code=True).eval()
    model.save_pretrained(name)
    tokenizer.save_pretrained(name)
    assert not any("--" in place for place in json.loads(Path(name, "config.json").read_text())["auto_map"].values())
    again = auto.from_pretrained(name, trust_remote_code=True).eval()
    with torch.no_grad():
        one, other = model(**batch), again(**batch)
    assert all(torch.equal(x, y) for x, y in zip(one.to_tuple(), other.to_tuple())), name
    print(name, *one[0].shape)
    if name == "AutoModelForMaskedLM":
        model.base_model.save_pretrained("encoder")
        encoder = transformers.AutoModel.from_pretrained("encoder", trust_remote_code=True).eval()
        with torch.no_grad():
            assert torch.equal(encoder(**batch)[0], model.base_model(**batch)[0])

logits = {{}}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    model, info = transformers.AutoModelForMaskedLM.from_pretrained(
        folder, trust_remote_code=True, torch_dtype=dtype, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    with torch.no_grad():
        logits[dtype] = model.eval()(**batch).logits
    assert logits[dtype].dtype == dtype
exact = logits[torch.float32]
for dtype in (torch.bfloat16, torch.float16):
    print(dtype, float((logits[dtype].float() - exact).norm() / exact.norm()))
"""


@pytest.mark.parametrize("mixer", [*MIXERS, "options"])
def test_every_auto_class_and_precision_loads_the_folder_and_what_it_saves_loads_again(made, mixer, tmp_path):
    all_of_them = mixer in ("lion-s", "options")  # for the others, two heads: these do not depend on the mixer
    classes = AUTO_CLASSES if all_of_them else AUTO_CLASSES[:3]
    program = f"CLASSES = {classes}\n{USE}"
    lines = [line.split() for line in outside(program, made(mixer)[1], tmp_path).splitlines()]
    shapes = {line[0]: line[1:] for line in lines[: len(classes)]}
    assert list(shapes) == list(classes)
    assert shapes["AutoModelForSequenceClassification"] == ["2", "2"]
    assert shapes["AutoModel"][-1] == "32"
    errors = {dtype: float(error) for dtype, error in lines[len(classes) :]}
    assert errors["torch.bfloat16"] < 0.05
    assert errors["torch.float16"] < 0.01


def test_the_pipelines_of_the_cards_fill_masks_and_name_labels(made, tmp_path):
    """The lines of use of both cards, as they stand there; the guesses are those of the checkpoint."""
    lines = ["import json"]
    for name in ("lion-s", "classifier"):
        use = re.search(r"```python\n(.*?)```", (made(name)[1] / "README.md").read_text(), re.DOTALL)[1]
        *before, last = use.strip().splitlines()
        lines += [*before, f"print(json.dumps({last}))"]
    lines.append(f"print(json.dumps(fill({SENTENCE!r})))")
    folder = made()[1].parent
    for name in ("lion-s", "classifier"):
        (tmp_path / name).symlink_to(folder / name)
    fill, classify, guesses = map(json.loads, outside("\n".join(lines), folder, tmp_path).splitlines()[-3:])
    assert len(fill) == 5
    assert classify[0]["label"] in ("good", "bad")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "lion-s")
    batch = tokenizer(SENTENCE, return_tensors="pt")
    with torch.no_grad():
        logits = read_checkpoint(made()[0]).build()(**batch).logits
    expected = logits[batch["input_ids"] == tokenizer.mask_token_id][0].softmax(-1).topk(5)
    assert [guess["token"] for guess in guesses] == expected.indices.tolist()
    assert [guess["score"] for guess in guesses] == pytest.approx(expected.values.tolist(), abs=1e-5)


LONG = f"""{HEAD}
model = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
ids = torch.randint(5, 40, (1, 1000))
with torch.no_grad():
    print(float((model(ids).last_hidden_state - model.encode_long(ids, segment_length=300)).abs().max()) < 1e-4)
"""


@pytest.mark.parametrize("name", ["lion-s", "options"])
def test_a_folder_encodes_a_long_text_in_segments(made, name, tmp_path):
    assert outside(LONG, made(name)[1], tmp_path).strip() == "True"


def test_the_card_names_options(made):
    lines = (made("options")[1] / "README.md").read_text().splitlines()
    options = next(line for line in lines if line.startswith("- options: "))
    assert "norm pre" in options and "decay_horizon [2.0, 64.0]" in options and "short_conv 3" in options
    assert not any(line.startswith("- options: ") for line in (made()[1] / "README.md").read_text().splitlines())


TRAINER = f"""{HEAD}
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, trust_remote_code=True)
before = {{name: p.detach().clone() for name, p in model.named_parameters()}}
texts = ["the small cat sees a red house .", "every king finds the old ship ."] * 8
data = [{{**tokenizer(text), "labels": number % 2}} for number, text in enumerate(texts)]
arguments = TrainingArguments("out", max_steps=20, learning_rate=5e-3, per_device_train_batch_size=8, use_cpu=True,
                              report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True)
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data,
                  data_collator=transformers.DataCollatorWithPadding(tokenizer))
first = trainer.evaluate()["eval_loss"]
trainer.train()
last = trainer.evaluate()["eval_loss"]
assert last < first / 2, (first, last)
assert not [name for name, p in model.named_parameters() if torch.equal(before[name], p)]
trainer.save_model("trained")
again = AutoModelForSequenceClassification.from_pretrained("trained", trust_remote_code=True).eval()
with torch.no_grad():
    print(torch.equal(again(**batch).logits, model.eval()(**batch).logits))
"""


@pytest.mark.skipif(find_spec("accelerate") is None, reason="transformers' Trainer needs accelerate")
def test_transformers_trainer_trains_and_saves_it(made, tmp_path):
    assert outside(TRAINER, made()[1], tmp_path).split()[-1] == "True"


SENTENCES = f"""{HEAD}
from sentence_transformers import SentenceTransformer
texts = ["the small cat sees a red house .", "every king"]
encoder = SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
vectors = encoder.encode(texts, convert_to_tensor=True)
model = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
with torch.no_grad():
    hidden = model(**batch).last_hidden_state
mask = batch["attention_mask"][..., None]
assert torch.allclose(vectors, (hidden * mask).sum(1) / mask.sum(1), atol=1e-5)
encoder.save("saved")
again = SentenceTransformer("saved", trust_remote_code=True, device="cpu").encode(texts, convert_to_tensor=True)
print(torch.equal(again, vectors))
"""


@pytest.mark.skipif(
    find_spec("sentence_transformers") is None, reason="needs sentence-transformers, which is in requirements.txt"
)
def test_sentence_transformers_takes_the_mean_of_the_real_tokens(made, tmp_path):
    assert outside(SENTENCES, made()[1], tmp_path).split()[-1] == "True"


LENGTHS = f"""{HEAD}
from sentence_transformers import SentenceTransformer
encoder = SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
read = tokenizer("the " * 9000, truncation=True, return_tensors="pt")
model = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
with torch.no_grad():
    expected = model(**read).last_hidden_state.mean(1)[0]
assert torch.allclose(encoder.encode("the " * 9000, convert_to_tensor=True), expected, atol=1e-5)
print(encoder.max_seq_length, read["input_ids"].shape[1])
"""


@pytest.mark.skipif(
    find_spec("sentence_transformers") is None, reason="needs sentence-transformers, which is in requirements.txt"
)
@pytest.mark.parametrize("mixer", ["lion-d", "softmax"])
def test_sentence_transformers_truncates_at_the_position_table_if_there_is_one(made, mixer, tmp_path):
    limit, read = map(int, outside(LENGTHS, made(mixer)[1], tmp_path).split()[-2:])
    assert (limit, read) == (128, 128) if mixer == "softmax" else (limit > 10**9 and read == 9002)


GPU = f"""{HEAD}
import copy
model = transformers.AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True).eval()
with torch.no_grad():
    exact = model(**batch).logits
    batch = batch.to("cuda")
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 0.05), (torch.float16, 0.01)):
        logits = copy.deepcopy(model).to("cuda", dtype)(**batch).logits.float().cpu()
        assert (logits - exact).norm() / exact.norm() < bound, dtype
print("done")
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_folder_gives_the_same_outputs_on_a_gpu(made, mixer, tmp_path):
    for head in (GPU, GPU.replace('sys.modules["triton"] = None', "pass")):
        assert outside(head, made(mixer)[1], tmp_path, CUDA_VISIBLE_DEVICES="0").split()[-1] == "done"


BY_NAME = f"""{HEAD.replace("folder = Path(sys.argv[1])", 'folder = "lions/small-cat"')}
model = transformers.AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True).eval()
local = transformers.AutoModelForMaskedLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
with torch.no_grad():
    print(torch.equal(model(**batch).logits, local(**batch).logits))
"""


def test_a_folder_on_the_hub_is_loaded_by_its_name(made, tmp_path):
    with serve() as fake:
        fake.repos["lions/small-cat"] = {"main": {path.name: path.read_bytes() for path in made()[1].iterdir()}}
        changes = {"HF_ENDPOINT": fake.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        assert outside(BY_NAME, made()[1], tmp_path, HF_HUB_OFFLINE="0", **changes).strip() == "True"


def test_two_folders_load_in_one_program(made, tmp_path):
    """Each registers operators with PyTorch, under names of its own."""
    pytest.importorskip("triton", reason="triton is not installed")
    other = shutil.copytree(made("lion-d")[1], tmp_path / "another-model")
    program = (
        HEAD.replace('sys.modules["triton"] = None', "pass")
        + f"""
models = [transformers.AutoModel.from_pretrained(name, trust_remote_code=True) for name in (folder, {str(other)!r})]
modules = [name for name in sys.modules if name.endswith("linear_attention_triton")]
print(len(modules), len({{sys.modules[name].ATTENTION.call.name() for name in modules}}))
modules = [name for name in sys.modules if name.endswith("linear_attention_forms")]
print(len(modules), len({{sys.modules[name].CHUNKWISE.call.name() for name in modules}}))
"""
    )
    assert outside(program, made()[1], tmp_path).split() == ["2"] * 4
