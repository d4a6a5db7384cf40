"""A Hub folder: written from a checkpoint, and compared with it in a process that has only torch and transformers."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DataCollatorWithPadding

from src import lion
from src.checkpoints.reading import SETTINGS, STORED_POSITIONS, Checkpoint, lion_config, read_folder
from src.cli import log
from src.errors import UserError, reason
from src.files import write_json
from src.publish.proof import check_out, write_proof
from src.publish.spec import EXPORTS, ExportSpec

CODE = Path(lion.__file__).parent
PROBE = Path(__file__).with_name("probe.py")
AUTO_MAP = {
    "AutoConfig": "configuration_lion.LionConfig",
    **{spec.auto_class: f"modeling_lion.{name}" for name, spec in EXPORTS.items()},
}
TOLERANCE = 1e-5  # largest difference of a logit; relative to the largest logit if that is above 1
SAME_NUMBERS = {"attention_form", "chunk_size"}  # settings that change only the cost
NO_LIMIT = 2**31 - 1  # as max_position_embeddings: sentence-transformers needs a number that fits a 64-bit integer
NO_TOKENIZER_LIMIT = int(1e30)  # as model_max_length: what transformers writes for "no limit"
LONG_TEXT = "the " * 9000  # shows at which length a tokenizer truncates


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to write into, which is renamed to `out` unless something failed. Raises UserError."""
    check_out(out)
    unfinished = out.with_name(f"{out.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        unfinished.rename(out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--out {out} cannot be written ({reason(error)}); choose another or free space") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write(checkpoint: Checkpoint, out: Path) -> None:
    """Write config.json with auto_map, model.safetensors, the modelling code, and the tokenizer's files."""
    model = checkpoint.build()
    config = model.config
    files = checkpoint.tokenizer_files()
    out.mkdir(parents=True, exist_ok=True)
    if files:
        tokenizer_config = json.loads(files.get("tokenizer_config.json", b"{}"))
        limit = config.max_position_embeddings if config.has_positions else NO_TOKENIZER_LIMIT
        files["tokenizer_config.json"] = json.dumps({**tokenizer_config, "model_max_length": limit}, indent=2).encode()
        # pipeline() finds no tokenizer for an architecture it does not know, unless the config names one.
        config.tokenizer_class = tokenizer_config.get("tokenizer_class")
    for name, content in files.items():
        (out / name).write_bytes(content)
    if not config.has_positions:
        setattr(config, STORED_POSITIONS, config.max_position_embeddings)
        config.max_position_embeddings = NO_LIMIT
    config.auto_map = dict(AUTO_MAP)
    config.architectures = [checkpoint.class_name]
    model.save_pretrained(out, safe_serialization=True, max_shard_size="50GB")  # the Hub's limit for a file
    for file in sorted(CODE.glob("*.py")):
        if file.name != "__init__.py":
            shutil.copy(file, out / file.name)


def verify(checkpoint: Checkpoint, folder: Path, python: str = sys.executable) -> float:
    """Compare a folder, loaded by a fresh process of `python` without this repository, with its checkpoint.

    Tokens are compared if the checkpoint has a tokenizer.

    Returns:
        The largest difference between logits.

    Raises:
        UserError: the folder and the checkpoint differ; the message says in what.
    """
    config, stored = read_folder(folder)
    model = checkpoint.build()
    spec = EXPORTS[checkpoint.class_name]
    if differing := _differing(model.state_dict(), stored) or _changed(model.config, lion_config(config, str(folder))):
        raise UserError(f"{folder} differs from {checkpoint.path} in {', '.join(differing)}; export it again")
    max_length = min(model.config.max_position_embeddings, 128)
    inputs, tokens = spec.example_inputs(model.config), None
    if (tokenizer := checkpoint.load_tokenizer()) is not None:
        batch = [dict(tokenizer(*text, truncation=True, max_length=max_length)) for text in spec.examples]
        inputs = dict(DataCollatorWithPadding(tokenizer)(batch))
        tokens = {"tokens": batch, "vocabulary": tokenizer.get_vocab()}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        save_file(inputs, work / "inputs.safetensors")
        write_json(work / "texts.json", {"texts": spec.examples, "max_length": max_length, "long": LONG_TEXT})
        _run_probe(spec, folder, work, python)
        outputs = load_file(work / "outputs.safetensors")
        report = json.loads((work / "report.json").read_text())
    if report["tokens"] is not None:
        _check_limits(model.config, tokenizer, folder, report)
    if tokens is None and report["tokens"] is not None:
        why = f"{checkpoint.path} has no tokenizer; name it as --tokenizer to compare them"
        log.info(f"the tokens of {folder} are not compared, as {why}")
    elif tokens != report["tokens"]:
        raise UserError(f"{folder} and its checkpoint tokenize differently; export it again")
    with torch.no_grad():
        expected = model(**inputs)
    difference = largest_difference(expected, outputs)
    if not difference <= TOLERANCE * max(1.0, *(tensor.abs().max().item() for tensor in expected.values())):
        raise UserError(f"the logits of {folder} differ from the checkpoint's by {difference:.1e}; export it again")
    return difference


def prove(checkpoint: Checkpoint, folder: Path) -> float:
    """Verify a folder and write the proof into it. Returns the largest difference between logits."""
    difference = verify(checkpoint, folder)
    write_proof(folder, difference)
    return difference


def largest_difference(expected: dict[str, Tensor], outputs: dict[str, Tensor]) -> float:
    """Return the largest difference between two outputs: NaN if either has NaN, infinity if names or shapes differ."""
    if {name: tensor.shape for name, tensor in expected.items()} != {name: t.shape for name, t in outputs.items()}:
        return float("inf")
    # Python's built-in max may skip a NaN.
    return torch.stack([(expected[name] - outputs[name]).abs().max() for name in expected]).max().item()


def _differing(own: dict[str, Tensor], stored: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ; a tied tensor may be stored under one of its two names."""
    found = {own[name].data_ptr() for name in own.keys() & stored.keys()}

    def same(name: str) -> bool:
        if name not in own or name not in stored:
            return name in own and own[name].data_ptr() in found
        one, other = own[name], stored[name]
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(one, other)

    return sorted(name for name in own.keys() | stored.keys() if not same(name))


def _changed(own: "lion.LionConfig", stored: "lion.LionConfig") -> list[str]:
    """Return the names of the settings, labels included, that differ and matter."""
    return sorted(name for name in SETTINGS - SAME_NUMBERS if getattr(own, name, None) != getattr(stored, name, None))


def _check_limits(config: "lion.LionConfig", tokenizer: Any, folder: Path, report: dict[str, Any]) -> None:
    """Raise UserError unless a long text is truncated to the position table, or not at all if there is none.

    The limits that earlier versions wrote, which are those of training, are only logged.
    """
    own = tokenizer.model_max_length if tokenizer is not None else config.max_position_embeddings
    full, read = report["long"], report["long_truncated"]
    table = config.max_position_embeddings if config.has_positions else NO_LIMIT
    if (read, report["max_position_embeddings"]) == (min(full, table), table):
        return
    limit = min(read, report["max_position_embeddings"])
    what = f"{folder} limits texts to {limit:,} tokens"
    right = f"{config.mixer} reads {f'{table:,} tokens' if config.has_positions else 'texts of any length'}"
    earlier = {min(full, own), min(full, table)}, {config.max_position_embeddings, table}
    if read not in earlier[0] or report["max_position_embeddings"] not in earlier[1]:
        raise UserError(f"{what}, but {right}; export it again")
    log.info(f"{what}, as earlier versions did, but {right}; export it again to change that")


def _run_probe(spec: ExportSpec, folder: Path, work: Path, python: str) -> None:
    hidden = ("PYTHONPATH", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"HF_MODULES_CACHE": str(work / "modules"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [python, "-c", PROBE.read_text(), str(folder.resolve()), spec.auto_class, spec.processor, str(work)]
    try:
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"--python {python} cannot be started ({reason(error)}); give a Python interpreter") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise UserError(f"{folder} does not load in plain transformers: {last}")
