"""A folder as the Hub holds it, used by programs that have torch and transformers and not this repository.

Needs neither Composer nor a checkpoint, so that it also runs under the newest transformers (`make test-compat`).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from src import hub
from src.lion import LionConfig, LionForMaskedLM, LionForSequenceClassification
from tests.conftest import MIXERS, TINY_MODEL, VOCABULARY, environment

AUTO_CLASSES = (
    "AutoModel", "AutoModelForMaskedLM", "AutoModelForSequenceClassification", "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
)  # fmt: skip


def write(out: Path, tokenizer_folder: Path, kind: type, mixer: str = "lion-s", **changes) -> Path:
    tokenizer = {  # as a Composer checkpoint holds it
        path.name: {
            "file_extension": path.suffix,
            "content": path.read_text() if path.suffix == ".txt" else json.loads(path.read_text()),
        }
        for path in tokenizer_folder.iterdir()
    }
    torch.manual_seed(0)
    settings = {**TINY_MODEL, "mixer": mixer, "vocab_size": -(-len(VOCABULARY) // 8) * 8, "initializer_range": 0.3}
    hub.write_folder(kind(LionConfig(**settings, **changes)), tokenizer, out)
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer_folder) -> Path:
    """A masked language model of each mixer, and a classifier of two named labels."""
    out = tmp_path_factory.mktemp("hub")
    for mixer in MIXERS:
        write(out / mixer, tokenizer_folder, LionForMaskedLM, mixer)
    labels = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    write(out / "classifier", tokenizer_folder, LionForSequenceClassification, **labels)
    return out


def outside(program: str, folder: Path, cwd: Path) -> str:
    """The output of a program that runs in another folder, offline, with code caches of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(folder)], cwd=cwd, capture_output=True, text=True,
        env=environment(HF_HUB_OFFLINE="1", HF_MODULES_CACHE=str(cwd / "modules"), PYTHONPATH=""), timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


HEAD = """
import sys, torch, transformers
from pathlib import Path
folder = Path(sys.argv[1])
tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
batch = tokenizer(["the small cat sees a red house .", "every king"], padding=True, return_tensors="pt")
"""


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_auto_class_loads_the_folder_and_what_it_saves_loads_again(folders, mixer, tmp_path):
    program = f"""{HEAD}
for name in {AUTO_CLASSES}:
    auto = getattr(transformers, name)
    model = auto.from_pretrained(folder, trust_remote_code=True).eval()
    model.save_pretrained(name)
    tokenizer.save_pretrained(name)
    again = auto.from_pretrained(name, trust_remote_code=True).eval()
    with torch.no_grad():
        one, other = model(**batch), again(**batch)
    assert all(torch.equal(x, y) for x, y in zip(one.to_tuple(), other.to_tuple())), name
    print(name, *one[0].shape)
"""
    lines = outside(program, folders / mixer, tmp_path).splitlines()
    assert [line.split()[0] for line in lines] == list(AUTO_CLASSES)


def test_the_masked_language_model_is_loaded_whole(folders, tmp_path):
    program = f"""{HEAD}
model, info = transformers.AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
print(*(len(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")))
with torch.no_grad():
    torch.save(model.eval()(**batch).logits, "logits.pt")
"""
    assert outside(program, folders / "lion-s", tmp_path).split() == ["0", "0", "0"]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders / "lion-s")
    batch = tokenizer(["the small cat sees a red house .", "every king"], padding=True, return_tensors="pt")
    with torch.no_grad():
        own = LionForMaskedLM.from_pretrained(folders / "lion-s").eval()(**batch).logits
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt", weights_only=True), own, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_gives_finite_numbers(folders, dtype, tmp_path):
    program = f"""{HEAD}
model = transformers.AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True, torch_dtype="{dtype}").eval()
with torch.no_grad():
    logits = model(**batch).logits
print(logits.dtype, bool(logits.isfinite().all()))
"""
    assert outside(program, folders / "lion-s", tmp_path).split() == [f"torch.{dtype}", "True"]


def test_pipelines_fill_masks_and_name_labels(folders, tmp_path):
    program = """
import sys
from pathlib import Path
from transformers import pipeline
folder = Path(sys.argv[1])
fill = pipeline("fill-mask", model=str(folder / "lion-s"), trust_remote_code=True)
print(len(fill("the small [MASK] sees a red house .", top_k=5)))
classify = pipeline("text-classification", model=str(folder / "classifier"), trust_remote_code=True)
print(classify("the small cat .")[0]["label"])
"""
    count, label = outside(program, folders, tmp_path).split()[-2:]
    assert count == "5"
    assert label in ("good", "bad")


def test_a_long_text_is_encoded_in_pieces_from_the_folder(folders, tmp_path):
    program = f"""{HEAD}
model = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
ids = torch.randint(5, 40, (1, 1000))
with torch.no_grad():
    print(float((model(ids).last_hidden_state - model.encode_long(ids, piece_length=300)).abs().max()) < 1e-4)
"""
    assert outside(program, folders / "lion-s", tmp_path).strip() == "True"


def test_the_folder_loads_where_triton_is_not_installed(folders, tmp_path):
    program = f"""
import sys
sys.modules["triton"] = None  # importing it then fails
{HEAD}
model = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
with torch.no_grad():
    print(bool(model(**batch).last_hidden_state.isfinite().all()))
"""
    assert outside(program, folders / "lion-s", tmp_path).strip() == "True"


def test_copies_of_the_kernels_in_two_folders_live_in_one_program(folders, tmp_path):
    """Each registers operators with PyTorch, under names of its own."""
    program = f"""{HEAD}
models = [transformers.AutoModel.from_pretrained(folder.parent / name, trust_remote_code=True) for name in ("lion-s", "lion-d")]
modules = [name for name in sys.modules if name.endswith("linear_attention_triton")]
print(len(modules), len({{sys.modules[name]._forward._qualname for name in modules}}))
"""
    assert outside(program, folders / "lion-s", tmp_path).split() == ["2", "2"]
