"""Shared fixtures: a tiny tokenizer, shards, config, run and checkpoints; and commands run as a user runs them.

Set before any library is imported: one thread, and a Hub that refuses at once, so that no test waits for a network.
"""

import gc
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import yaml

gc.disable()  # until all tests are collected, since what they import stays

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT.parent / "shared"  # beside the checkout, on some machines
PARITY = REFERENCE / "parity"  # small models under the authors' names
DATA = REFERENCE / "data"  # BERT's vocabulary, and texts
needs_reference = pytest.mark.skipif(
    not (PARITY.is_dir() and DATA.is_dir()), reason="needs reference data beside the checkout"
)
CACHE = tempfile.TemporaryDirectory(prefix="hub-cache-", ignore_cleanup_errors=True)
for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "PYTHONPATH"):
    os.environ.pop(name, None)
os.environ |= {
    "HF_ENDPOINT": "http://127.0.0.1:9",  # nothing listens on this port
    "HF_HOME": CACHE.name,
    "NO_PROXY": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # in this process, not in a pool of others
}
sys.path.insert(0, str(ROOT))
import plain  # noqa: E402
import warm  # noqa: E402

from src.lion.configuration_lion import MIXERS  # noqa: E402

os.environ.setdefault(plain.SOCKET, f"{CACHE.name}/plain")

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (
    "the a one every no old young small red quiet dog cat king ship river child bird house tree song sees "
    "finds loves hears takes keeps likes follows near under over behind without and but then while today often "
    "never here"
).split()
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
VOCABULARY = (*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), *(w for w in WORDS if len(w) > 1), ".", ",")
TINY_MODEL = {
    "mixer": "lion-s",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}


def settings_of(mixer: str, **sizes) -> dict:
    """The arguments of LionConfig for a model of these sizes with this mixer."""
    if mixer == "hydra":  # which has no MLP, and heads of a given size
        heads, _ = sizes.pop("num_attention_heads"), sizes.pop("intermediate_size", None)
        sizes |= {"headdim": 2 * sizes["hidden_size"] // heads, "d_state": 8}
    return {**sizes, "mixer": mixer}


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, **changes}


def run(
    script: str, *arguments: object, cwd: Path = ROOT, timeout: float = 120, fresh: bool = False, **changes: str
) -> Result:
    """Run a script of the repository, e.g. "src/hub.py", as a user does, in a process that starts at once; with `fresh`
    in one that takes seconds to import everything. changes: environment variables."""
    python = sys.executable if fresh else warm.python()
    command = [python, str(ROOT / script), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment(**changes), capture_output=True, text=True, timeout=timeout)
    return Result(done.returncode, done.stdout, done.stderr)


def assert_one_sentence(result: Result, *words: str) -> None:
    """Assert that a command rejected its input in one line with these words, and printed no traceback."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    last = result.stderr.rstrip("\n").splitlines()[-1]
    assert last.startswith("error: "), result.stderr
    for word in words:
        assert word in last, f"{word!r} is not in {last!r}"


def sentences(count: int, seed: int = 0) -> list[str]:
    """Texts of 3 to 40 known words, all different."""
    draw = random.Random(seed)
    return [f"{' '.join(draw.choices(WORDS, k=draw.randint(3, 40)))} {i}." for i in range(count)]


def write_jsonl(path: Path, texts: Sequence[str], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file of a folder: its content and modification time."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def tokens_of(folder: Path) -> dict[str, int]:
    """The vocabulary of the tokenizer in a folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder).get_vocab()


@pytest.fixture(scope="session", autouse=True)
def quick_proofs() -> None:
    """Let folders be tried outside the repository in processes that start at once."""
    if folder := sys.modules.get("src.publish.folder"):
        folder.subprocess = plain


@pytest.fixture(autouse=True)
def choices_of_its_own() -> Iterator[None]:
    """Forget the choices that a run of another test adopted."""
    from src.lion import machine

    machine.adopt({})
    yield
    machine.adopt({})


@pytest.fixture(scope="module", autouse=True)
def remote_code_of_its_own() -> Iterator[None]:
    """Forget the code of folders that another file's tests loaded: transformers names it after the folder, without its
    path, and keeps what it imports."""
    yield
    for name in [name for name in sys.modules if name.startswith("transformers_modules.")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def workers_of_its_own() -> Iterator[None]:
    """End the workers of a test's loaders with it. After an error, torch would wait five seconds for each one that is
    blocked, or whose queue garbage collection has already closed."""
    from torch.utils.data import _utils
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as Reading

    started, initialize = [], Reading.__init__

    def record(reading, loader) -> None:
        initialize(reading, loader)
        started.append(reading)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reading, "__init__", record)
        yield
        patch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.1)  # how long it waits before it ends them by a signal
        for reading in started:
            reading._shutdown_workers()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    from transformers import BertTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=512).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    from src.training.text_model import build_tokenizer

    return build_tokenizer(str(tokenizer_folder), 64, needs=("mask_token", "pad_token"))


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    """A folder with the splits train and val, of 64 texts."""
    from src.convert_dataset import main

    folder = tmp_path_factory.mktemp("shards")
    data = write_jsonl(folder / "data.jsonl", sentences(64))
    main(["--data_files", str(data), "--val_fraction", "0.25", "--out_root", str(folder / "out")])
    return folder / "out"


@pytest.fixture(scope="session")
def write_config(tokenizer_folder, shards) -> Callable[..., Path]:
    """write_config(folder, key=value, ...) → a tiny pretraining config that saves to folder/run."""

    def write(folder: Path, **changes: Any) -> Path:
        path = folder / "tiny.yaml"
        config = {
            "inherit": str(ROOT / "yamls" / "pretrain" / "recipe.yaml"),
            "run_name": "tiny",
            "model": TINY_MODEL,
            "tokenizer_name": str(tokenizer_folder),
            "data_local": str(shards),
            "max_seq_len": 32,
            "train_loader": {"num_workers": 0},
            "eval_loader": {"num_workers": 0},
            "max_duration": "6ba",
            "global_train_batch_size": 8,
            "device_train_microbatch_size": 8,
            "device_eval_batch_size": 8,
            "eval_interval": "3ba",
            "save_interval": "3ba",
            "log_interval": "1ba",
            "device": "cpu",
            "save_folder": str(folder / "run"),
        }
        path.write_text(yaml.safe_dump({**config, **changes}))
        return path

    return write


@pytest.fixture
def config_file(tmp_path, write_config) -> Path:
    return write_config(tmp_path)


@pytest.fixture(scope="session")
def write_checkpoint(tokenizer) -> Callable[..., Path]:
    """write_checkpoint(path, mixer) → the checkpoint that Composer would save of an untrained model."""
    import torch

    from src.lion import LionConfig
    from src.mlm.model import LionMLM

    def write(path: Path, mixer: str = "lion-s", edit: Callable[[dict], None] | None = None) -> Path:
        torch.manual_seed(MIXERS.index(mixer))
        sizes = {**TINY_MODEL, "vocab_size": -(-len(tokenizer) // 8) * 8, "initializer_range": 0.3}
        model = LionMLM(LionConfig(**settings_of(**{**sizes, "mixer": mixer})), tokenizer)
        state = {
            "model": {f"model.{name}": tensor for name, tensor in model.model.state_dict().items()},
            "integrations": {"huggingface": model.get_metadata()},
            "timestamp": {"Timestamp": {"batch": 1200, "sample": 9600, "epoch": 3}},
            "run_name": "tiny",
        }
        if edit is not None:
            edit(state)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"state": state, "rng": []}, path)
        return path

    return write


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, write_checkpoint) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "checkpoint.pt")


@pytest.fixture
def folder(checkpoint, tmp_path) -> Path:
    """The Hub folder of the checkpoint, without card and proof."""
    from src.checkpoints.reading import read_checkpoint
    from src.publish import folder as hub_folder

    hub_folder.write(read_checkpoint(checkpoint), tmp_path / "my-model")
    return tmp_path / "my-model"


# Files whose tests load models, start processes or compute large grids: `make test-fast` omits them.
SLOW_FILES = set(
    """test_benchmarks test_callback test_card test_commands test_compatibility test_convert test_convert_dataset
    test_cpu test_folder test_embedding_folder test_image_folder test_glue_jobs test_glue_start test_jobs
    test_linear_attention test_linear_attention_triton test_lra_jobs test_lra_shards test_modeling_lion
    test_pretrained test_push test_reading test_streaming test_train_tokenizer""".split()
)


def pytest_configure(config):
    """Start the server of warm.py for all workers of this process, while they collect tests."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        gc.enable()  # it does not collect tests
        warm.share()


def pytest_collection_modifyitems(items):
    """Slow files come first, so that workers end at about the same time."""
    for item in items:
        if item.path.stem in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.stem not in SLOW_FILES)


def pytest_collection_finish():
    """Let garbage collections, which many libraries ask for, skip the million objects that were imported."""
    gc.freeze()
    gc.enable()


@pytest.fixture(params=["kernel", "PyTorch"])
def with_and_without_kernel(request, monkeypatch):
    """Compute in float32 with the CPU's kernel, then without."""
    from src.lion import cpu_kernel

    monkeypatch.setattr(cpu_kernel, "USE_NATIVE", request.param == "kernel")


@pytest.fixture
def shared_memory_freed(monkeypatch):
    """Free the shared memory of streaming's datasets after the test, not at exit: each new dataset opens that of all
    earlier ones, and a process may open so many files only."""
    from streaming.base.shared import memory

    cleanups = []
    monkeypatch.setattr(memory, "atexit", SimpleNamespace(register=cleanups.append))
    yield
    for cleanup in cleanups:
        cleanup()
