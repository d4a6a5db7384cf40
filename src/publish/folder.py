"""A Hub folder: written from a checkpoint, and compared with it in a process that has only torch and transformers."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from src import lion
from src.checkpoints.adapters import IMAGE_ARGUMENTS, SETTINGS
from src.checkpoints.reading import PREPROCESSOR, Checkpoint, read_folder
from src.errors import UserError, reason, some
from src.publish.inputs import ImageInputs, TextInputs
from src.publish.spec import EXPORTS, ExportSpec

CODE = Path(lion.__file__).parent
INPUTS = {"texts": TextInputs, "images": ImageInputs}
TOLERANCE = 1e-5  # largest difference of a logit; relative to the largest logit if that is above 1
SAME_NUMBERS = {"attention_form", "chunk_size"}  # settings that change only the cost


def write(checkpoint: Checkpoint, out: Path) -> None:
    """Write config.json with auto_map, model.safetensors, the modelling code, and the files of the tokenizer or of the
    image processor."""
    model = checkpoint.build()
    config = model.config
    files = INPUTS[checkpoint.reads](checkpoint).files(config)
    config.auto_map = auto_map(checkpoint.class_name)
    config.architectures = [checkpoint.class_name]
    model.save_pretrained(out, safe_serialization=True, max_shard_size="50GB")  # the Hub's limit for a file
    files |= {file.name: file.read_bytes() for file in CODE.glob("*.py") if file.name != "__init__.py"}
    for name, content in files.items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(content)


def auto_map(class_name: str) -> dict[str, str]:
    """Which class in which file transformers loads: this one, and others that read the same."""
    specs = {class_name: EXPORTS[class_name], **EXPORTS}
    classes: dict[str, str] = {}
    for name, spec in specs.items():
        if spec.reads == EXPORTS[class_name].reads:
            classes.setdefault(spec.auto_class, f"{spec.module}.{name}")
    return {"AutoConfig": f"configuration_lion.{getattr(lion, class_name).config_class.__name__}", **classes}


def verify(checkpoint: Checkpoint, folder: Path, python: str = sys.executable) -> float:
    """Return how far a folder's logits, from a new process of `python`, are from the checkpoint's. Raises UserError."""
    stored = read_folder(folder)
    model, spec, prepared = checkpoint.build(), EXPORTS[checkpoint.class_name], INPUTS[checkpoint.reads](checkpoint)
    own, differing = model.config, different_tensors(model.state_dict(), stored.weights)
    names = {name for name in {*vars(own), *SETTINGS} - SAME_NUMBERS if name in SETTINGS or name in IMAGE_ARGUMENTS}
    differing += sorted(n for n in names if getattr(own, n, None) != getattr(stored.config, n, None))
    differing += [PREPROCESSOR] if checkpoint.processor != stored.processor else []
    differing += prepared.differing(folder)
    if differing:
        raise UserError(f"{folder} differs from {checkpoint.path} in {some(differing)}; export it again")
    given = prepared.given()
    report = _run_probe(folder, spec, given, python)
    prepared.check(folder, report, model)
    with torch.no_grad():
        expected = model(**given["inputs"])
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
