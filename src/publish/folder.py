"""A Hub folder: written from a checkpoint, compared with it where only torch and transformers are, and its proof."""

import hashlib
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
from torch import Tensor

from src import lion
from src.checkpoints.reading import SETTINGS, Checkpoint, lion_config, read_folder
from src.cli import log
from src.errors import UserError

CODE = Path(lion.__file__).parent
PROBE = Path(__file__).with_name("probe.py")
AUTO_CLASSES = {
    "AutoModel": "LionModel",
    "AutoModelForMaskedLM": "LionForMaskedLM",
    "AutoModelForSequenceClassification": "LionForSequenceClassification",
    "AutoModelForTokenClassification": "LionForTokenClassification",
    "AutoModelForQuestionAnswering": "LionForQuestionAnswering",
}
AUTO_MAP = {
    "AutoConfig": "configuration_lion.LionConfig",
    **{auto: f"modeling_lion.{name}" for auto, name in AUTO_CLASSES.items()},
}
CARD = "README.md"
PROOF = "proof.json"  # what export leaves for push: the digests of the files it has compared with the checkpoint
TOLERANCE = 1e-5  # between the logits of the checkpoint and of the folder, or of the largest if that is above 1: so rounding grows
SAME_NUMBERS = {"attention_form", "chunk_size"}  # settings that change the cost alone
PUBLISHED = {".json", ".jinja", ".jpg", ".md", ".model", ".png", ".py", ".safetensors", ".svg", ".txt"}  # no pickles
TEXTS = (  # one text, or a pair
    ("The encoder reads the whole sentence at once.",),
    ("A short one.",),
    ("Every weight in this folder was loaded from a checkpoint, and these words are here to show that none is missing.",),
    ("Is this a question?", "This is its answer: 3.14 × 2 = 6.28 (more or less)."),
    ("The naïve café of Zürich, 東京 and Αθήνα; e-mail: someone@example.org",),
)  # fmt: skip


@contextmanager
def whole(out: Path) -> Iterator[Path]:
    """A folder to write into that gets its name, `out`, only if nothing failed. Raises UserError where it cannot have it."""
    check_name(out)
    unfinished = out.with_name(f"{out.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        unfinished.rename(out)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--out {out} cannot be written ({reason}); name another folder or make room") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_name(out: Path) -> None:
    """Raise UserError for a folder that is there already, or that transformers could not load."""
    if "." in out.name:
        raise UserError(
            f"--out {out}: transformers cannot load code from a folder with a dot in its name; leave the dot out"
        )
    if out.exists():
        raise UserError(f"--out {out} is already there; name another folder")


def write(checkpoint: Checkpoint, out: Path) -> None:
    """config.json with auto_map, model.safetensors, the modelling code, and the tokenizer's files."""
    model = checkpoint.build()
    checkpoint.write_tokenizer(out)
    tokenizer_config = json.loads(checkpoint.tokenizer_files().get("tokenizer_config.json", b"{}"))
    model.config.auto_map = dict(AUTO_MAP)
    model.config.architectures = [checkpoint.class_name]
    # pipeline() finds no tokenizer for an architecture it does not know, unless the config names one.
    model.config.tokenizer_class = tokenizer_config.get("tokenizer_class")
    model.save_pretrained(out, safe_serialization=True, max_shard_size="50GB")  # the Hub's limit for a file
    for file in sorted(CODE.glob("*.py")):
        if file.name != "__init__.py":
            shutil.copy(file, out / file.name)


def verify(checkpoint: Checkpoint, folder: Path, python: str = sys.executable) -> float:
    """Compare a folder, loaded in a fresh Python process without this repository, with the checkpoint it came from.

    Tokens are compared where the checkpoint has a tokenizer. `python` may be that of another environment.
    Returns the largest difference of logits. Raises UserError naming the tensors, or what else, that differs.
    """
    from safetensors.torch import load_file, save_file

    config, stored = read_folder(folder)
    model = checkpoint.build()
    if differing := _differing(model.state_dict(), stored) or _changed(model.config, lion_config(config, str(folder))):
        raise UserError(f"{folder} differs from {checkpoint.path} in {', '.join(differing)}; export it anew")
    longest = min(model.config.max_position_embeddings, 128)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        inputs, tokens = _inputs(checkpoint, model.config.vocab_size, longest)
        save_file(inputs, work / "inputs.safetensors")
        (work / "texts.json").write_text(json.dumps([TEXTS, longest]))
        _run_probe(checkpoint.class_name, folder, work, python)
        outputs = load_file(work / "outputs.safetensors")
        given = work / "tokens.json"
        if tokens is None and given.is_file():
            log.info(f"the tokens of {folder} are not compared, as {checkpoint.path} has no tokenizer; name it as --tokenizer to compare them")  # fmt: skip
        elif tokens != (json.loads(given.read_text()) if given.is_file() else None):
            raise UserError(f"{folder} tokenizes otherwise than the checkpoint; export it anew")
    with torch.no_grad():
        expected = model(**inputs)
    difference = largest_difference(expected, outputs)
    if not difference <= TOLERANCE * max(1.0, *(tensor.abs().max().item() for tensor in expected.values())):
        raise UserError(f"{folder} gives logits that differ from the checkpoint's by {difference:.1e}; export it anew")
    return difference


def largest_difference(expected: dict[str, Tensor], outputs: dict[str, Tensor]) -> float:
    """Between the numbers of two outputs: NaN where one is no number, infinite where names or shapes differ."""
    if {name: tensor.shape for name, tensor in expected.items()} != {name: t.shape for name, t in outputs.items()}:
        return float("inf")
    # Python's own max may pass over a NaN.
    return torch.stack([(expected[name] - outputs[name]).abs().max() for name in expected]).max().item()


def prove(checkpoint: Checkpoint, folder: Path) -> float:
    """Verify a folder and leave the proof of it there: what was compared, where, and the digests of the files."""
    import transformers

    difference = verify(checkpoint, folder)
    proof = {
        "largest_difference": difference,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sha256": digests(folder),
    }
    (folder / PROOF).write_text(json.dumps(proof, indent=1) + "\n")
    return difference


def check_proof(folder: Path) -> None:
    """Raise UserError unless the files of a folder are those that were compared with the checkpoint."""
    try:
        proved = json.loads((folder / PROOF).read_text())["sha256"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{folder} has no {PROOF} of export's comparison; name the --checkpoint to compare it with") from None  # fmt: skip
    if changed := sorted({name for name, _ in proved ^ digests(folder).items()}):
        raise UserError(f"{folder}: {', '.join(changed)} changed since export; name the --checkpoint to compare it with")  # fmt: skip


def files(folder: Path) -> list[str]:
    """The files of a folder that may be published. Raises UserError for one that may not: a link, a hidden file, another kind."""
    if not folder.is_dir():
        raise UserError(f"--folder {folder} is not there")
    names = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise UserError(f"{folder}/{name} is a link, which may lead out of the folder; put the file itself there")
        if path.name.startswith("."):
            raise UserError(f"{folder}/{name} is hidden, so it is not published unseen; remove or rename it")
        if path.is_file():
            if path.suffix.lower() not in PUBLISHED and name not in ("LICENSE", "NOTICE"):
                raise UserError(f"{folder}/{name} is of no kind that is published ({', '.join(sorted(PUBLISHED))}), and might run code when it is read; remove it")  # fmt: skip
            names.append(name)
    return names


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file but the model card, which people edit, and the proof itself."""
    found = {}
    for name in files(folder):
        if name not in (CARD, PROOF):
            digest = hashlib.sha256()
            with (folder / name).open("rb") as file:
                while part := file.read(2**20):
                    digest.update(part)
            found[name] = digest.hexdigest()
    return found


def auto_class(class_name: str) -> str:
    """The class of transformers that loads a model of ours."""
    return next(auto for auto, name in AUTO_CLASSES.items() if name == class_name)


def _differing(own: dict[str, Tensor], stored: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not the same; of two names of one tensor, as tied weights have, one may be missing."""
    there = {own[name].data_ptr() for name in own.keys() & stored.keys()}

    def same(name: str) -> bool:
        if name not in own or name not in stored:
            return name in own and own[name].data_ptr() in there
        one, other = own[name], stored[name]
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(one, other)

    return sorted(name for name in own.keys() | stored.keys() if not same(name))


def _changed(own: "lion.LionConfig", stored: "lion.LionConfig") -> list[str]:
    """Names of the settings, labels among them, that are not the same and matter."""
    return sorted(name for name in SETTINGS - SAME_NUMBERS if getattr(own, name, None) != getattr(stored, name, None))


def _inputs(checkpoint: Checkpoint, vocab_size: int, longest: int) -> tuple[dict[str, Tensor], Any]:
    """A batch to compare logits with, and what the checkpoint's tokenizer makes of TEXTS, if it has one."""
    tokenizer = checkpoint.load_tokenizer()
    if tokenizer is None:
        ids = (torch.arange(3 * 16) % vocab_size).view(3, 16)
        mask = torch.arange(16) < torch.tensor([[16], [9], [1]])
        return {"input_ids": ids, "attention_mask": mask.long()}, None
    from transformers import DataCollatorWithPadding

    tokens = [dict(tokenizer(*text, truncation=True, max_length=longest)) for text in TEXTS]
    return dict(DataCollatorWithPadding(tokenizer)(tokens)), {"tokens": tokens, "vocabulary": tokenizer.get_vocab()}


def _run_probe(class_name: str, folder: Path, work: Path, python: str) -> None:
    hidden = ("PYTHONPATH", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"HF_MODULES_CACHE": str(work / "modules"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [python, "-c", PROBE.read_text(), str(folder.resolve()), auto_class(class_name), str(work)]
    try:
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"--python {python} cannot be started ({error.strerror}); name the Python of an environment") from None  # fmt: skip
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise UserError(f"{folder} does not load in plain transformers: {reason}")
