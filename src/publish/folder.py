"""A Hub folder: written from a checkpoint, and compared with it in a process that has only torch and transformers."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DataCollatorWithPadding

from src import lion
from src.checkpoints.adapters import SETTINGS
from src.checkpoints.reading import STORED_POSITIONS, Checkpoint, read_folder
from src.cli import log
from src.errors import UserError, reason
from src.publish.spec import EXPORTS, ExportSpec

CODE = Path(lion.__file__).parent
AUTO_MAP = {spec.auto_class: f"modeling_lion.{name}" for name, spec in EXPORTS.items()}
TOLERANCE = 1e-5  # largest difference of a logit; relative to the largest logit if that is above 1
SAME_NUMBERS = {"attention_form", "chunk_size"}  # settings that change only the cost
NO_LIMIT = 2**31 - 1  # as max_position_embeddings: sentence-transformers needs a number that fits a 64-bit integer


def write(checkpoint: Checkpoint, out: Path) -> None:
    """Write config.json with auto_map, model.safetensors, the modelling code, and the tokenizer's files."""
    model, files = checkpoint.build(), checkpoint.tokenizer_files()
    config = model.config
    if files:
        tokenizer_config = json.loads(files.get("tokenizer_config.json", b"{}"))
        limit = config.max_position_embeddings if config.has_positions else int(1e30)  # transformers' "no limit"
        files["tokenizer_config.json"] = json.dumps({**tokenizer_config, "model_max_length": limit}, indent=2).encode()
        # pipeline() finds no tokenizer for an architecture it does not know, unless the config names one.
        config.tokenizer_class = tokenizer_config.get("tokenizer_class")
    if not config.has_positions:
        setattr(config, STORED_POSITIONS, config.max_position_embeddings)
        config.max_position_embeddings = NO_LIMIT
    config.auto_map = {"AutoConfig": "configuration_lion.LionConfig", **AUTO_MAP}
    config.architectures = [checkpoint.class_name]
    model.save_pretrained(out, safe_serialization=True, max_shard_size="50GB")  # the Hub's limit for a file
    files |= {file.name: file.read_bytes() for file in CODE.glob("*.py") if file.name != "__init__.py"}
    for name, content in files.items():
        (out / name).write_bytes(content)


def verify(checkpoint: Checkpoint, folder: Path, python: str = sys.executable) -> float:
    """Return how far a folder's logits, from a new process of `python`, are from the checkpoint's. Raises UserError."""
    stored = read_folder(folder)
    model, tokenizer, spec = checkpoint.build(), checkpoint.load_tokenizer(), EXPORTS[checkpoint.class_name]
    own, differing = model.config, different_tensors(model.state_dict(), stored.weights)
    differing += sorted(n for n in SETTINGS - SAME_NUMBERS if getattr(own, n, None) != getattr(stored.config, n, None))
    if differing:
        raise UserError(f"{folder} differs from {checkpoint.path} in {', '.join(differing)}; export it again")
    inputs, tokens, max_length = spec.example_inputs(own), None, min(own.max_position_embeddings, 128)
    if tokenizer is not None:
        batch = [dict(tokenizer(*text, truncation=True, max_length=max_length)) for text in spec.examples]
        inputs = dict(DataCollatorWithPadding(tokenizer)(batch))
        tokens = {"tokens": batch, "vocabulary": tokenizer.get_vocab()}
    given = {"inputs": inputs, "texts": spec.examples, "max_length": max_length, "long": "the " * 9000}
    report = _run_probe(folder, spec, given, python)
    if report["tokens"] is not None:
        trained = own.max_position_embeddings if tokenizer is None else tokenizer.model_max_length
        _check_limits(folder, own, trained, report)
    if tokens is None and report["tokens"] is not None:
        log.info(f"the tokens of {folder} are not compared: {checkpoint.path} has no tokenizer; pass --tokenizer")
    elif tokens != report["tokens"]:
        raise UserError(f"{folder} and its checkpoint tokenize differently; export it again")
    with torch.no_grad():
        expected = model(**inputs)
    difference = largest_difference(expected, report["outputs"])
    if not difference <= TOLERANCE * max(1.0, *(tensor.abs().max().item() for tensor in expected.values())):
        raise UserError(f"the logits of {folder} differ from the checkpoint's by {difference:.1e}; export it again")
    return difference


def different_tensors(own: dict[str, Tensor], stored: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ; a tied tensor may be stored under one of its two names."""
    both = own.keys() & stored.keys()
    found = {own[name].data_ptr() for name in both}
    tied = {name for name in own.keys() - both if own[name].data_ptr() in found}
    same = {name for name in both if own[name].dtype == stored[name].dtype and torch.equal(own[name], stored[name])}
    return sorted((own.keys() | stored.keys()) - tied - same)


def largest_difference(expected: dict[str, Tensor], outputs: dict[str, Tensor]) -> float:
    """Return the largest difference between two outputs: NaN if either has NaN, infinity if names or shapes differ."""
    if {name: tensor.shape for name, tensor in expected.items()} != {name: t.shape for name, t in outputs.items()}:
        return float("inf")
    # Python's built-in max may skip a NaN.
    return torch.stack([(expected[name] - outputs[name]).abs().max() for name in expected]).max().item()


def _run_probe(folder: Path, spec: ExportSpec, given: dict[str, Any], python: str) -> dict[str, Any]:
    probe, hidden = Path(__file__).with_name("probe.py"), ("PYTHONPATH", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    with tempfile.TemporaryDirectory() as work:
        environment = os.environ | dict.fromkeys((*hidden, "CUDA_VISIBLE_DEVICES"), "")
        environment |= {"HF_MODULES_CACHE": f"{work}/modules", "HF_HUB_OFFLINE": "1"}
        torch.save(given, f"{work}/inputs.pt")
        command = [python, "-c", probe.read_text(), str(folder.resolve()), spec.auto_class, spec.processor, work]
        try:
            done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
        except OSError as error:
            raise UserError(f"--python {python} cannot be started ({reason(error)}); use another") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise UserError(f"{folder} does not load in plain transformers: {last}")
        return torch.load(f"{work}/report.pt", weights_only=True)


def _check_limits(folder: Path, config: lion.LionConfig, trained: int, report: dict[str, Any]) -> None:
    """Raise UserError unless texts are truncated to the position table, if any, or as earlier versions did."""
    own = config.max_position_embeddings
    table = own if config.has_positions else NO_LIMIT
    full, read, positions = report["long"], report["long_truncated"], report["max_position_embeddings"]
    if (read, positions) == (min(full, table), table):
        return
    right = f"{table:,} tokens" if config.has_positions else "texts of any length"
    what = f"{folder} limits texts to {min(read, positions):,} tokens, but {config.mixer} reads {right}"
    if read not in (min(full, trained), min(full, table)) or positions not in (own, table):
        raise UserError(f"{what}; export it again")
    log.info(f"{what}; it is from an earlier version, export it again to change that")
