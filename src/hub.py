"""Composer checkpoint ↔ Hub folder.

python src/hub.py export --checkpoint runs/lion-s-base/latest-rank0.pt --out my-model
python src/hub.py verify --checkpoint runs/lion-s-base/latest-rank0.pt --folder my-model
python src/hub.py push   --folder my-model --repo_id ORG/NAME
python src/hub.py import --checkpoint LION-S-base-mlm.pt --out my-model --tokenizer bert-base-uncased
"""

import argparse
import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
from torch import Tensor

from src import cli, lion
from src.cli import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CODE = Path(lion.__file__).parent
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
PROOF = "proof.json"  # what export leaves for push: the digests of the files it has compared with the checkpoint
TOLERANCE = 1e-5  # between the logits of the checkpoint and of the folder


@dataclass
class Checkpoint:
    """What a Composer checkpoint says of its model."""

    path: Path
    class_name: str  # of the model, e.g. LionForMaskedLM
    config: dict[str, Any]  # arguments of LionConfig
    tokenizer: dict[str, dict[str, Any]]  # file name → {"file_extension", "content"}
    weights: dict[str, Tensor]
    timestamp: dict[str, Any]  # batch, sample, epoch, …; empty in weights-only checkpoints
    run_name: str | None

    def build(self) -> "lion.LionPreTrainedModel":
        """The model with its weights, every tensor used and none missing. Raises UserError naming those that are not."""
        model = getattr(lion, self.class_name)(lion.LionConfig(**self.config))
        load_all(model, self.weights, str(self.path))
        return model.eval()


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="hub.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{export,verify,push,import}")
    export_ = commands.add_parser("export", help="write a checkpoint as a folder that plain transformers loads")
    export_.add_argument("--checkpoint", type=Path, required=True, help="checkpoint that main.py or glue.py saved")
    export_.add_argument("--out", type=Path, required=True, help="folder to write; must not exist yet")
    verify_ = commands.add_parser("verify", help="compare a folder with the checkpoint it was made from")
    verify_.add_argument("--checkpoint", type=Path, required=True, help="the checkpoint")
    verify_.add_argument("--folder", type=Path, required=True, help="what export wrote")
    push_ = commands.add_parser("push", help="upload a folder to the Hugging Face Hub")
    push_.add_argument("--folder", type=Path, required=True, help="what export wrote; README.md may have changed since")
    push_.add_argument("--repo_id", required=True, help="ORG/NAME on the Hub; made if it is not there")
    push_.add_argument("--checkpoint", type=Path, help="verify against it first, where files changed after export")
    push_.add_argument("--private", action="store_true", help="make the repository private, if it is not there yet")
    push_.add_argument("--revision", help="branch to push to; made if it is not there (default: main)")
    import_ = commands.add_parser(
        "import", help="write a checkpoint published by the paper's authors as a folder of ours"
    )
    import_.add_argument("--checkpoint", type=Path, required=True, help="the authors' Composer checkpoint (.pt)")
    import_.add_argument("--out", type=Path, required=True, help="folder to write; must not exist yet")
    import_.add_argument("--tokenizer", help="folder or Hub name of the tokenizer to put beside the weights")
    arguments = parser.parse_args(argv)
    if arguments.command == "export":
        export(arguments.checkpoint, arguments.out)
    elif arguments.command == "verify":
        difference = verify(read_checkpoint(arguments.checkpoint), arguments.folder)
        print(f"{arguments.folder} gives the checkpoint's logits (largest difference {difference:.1e})")
    elif arguments.command == "push":
        push(arguments.folder, arguments.repo_id, arguments.checkpoint, arguments.private, arguments.revision)
    else:
        import_published(arguments.checkpoint, arguments.out, arguments.tokenizer)


def export(checkpoint_path: Path, out: Path) -> None:
    """Write a Hub folder and verify it; it appears under its name only if it gives the checkpoint's logits."""
    _check_out(out)
    checkpoint = read_checkpoint(checkpoint_path)
    unfinished = out.with_name(f"{out.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    write_folder(checkpoint.build(), checkpoint.tokenizer, unfinished)
    (unfinished / "README.md").write_text(model_card(checkpoint))
    difference = verify(checkpoint, unfinished)
    (unfinished / PROOF).write_text(
        json.dumps({"largest_difference": difference, "sha256": _digests(unfinished)}, indent=1)
    )
    unfinished.rename(out)
    print(f"{out} gives the checkpoint's logits in plain transformers (largest difference {difference:.1e})")


def import_published(checkpoint_path: Path, out: Path, tokenizer: str | None) -> None:
    """Write a checkpoint published by the paper's authors as an ordinary folder of ours. Every tensor has to have a place."""
    from src.published import config_from_published, state_dict_from_published

    _check_out(out)
    loaded = load_safely(checkpoint_path)
    try:
        published = loaded["state"]["integrations"]["huggingface"]["model"]["config"]["content"]
        weights = {name.removeprefix("model."): tensor for name, tensor in loaded["state"]["model"].items()}
    except (KeyError, TypeError):
        raise UserError(f"{checkpoint_path} is no Composer checkpoint of a transformers model") from None
    config = config_from_published(published)
    classifier = any(name.startswith("classifier.") for name in weights)
    model = (lion.LionForSequenceClassification if classifier else lion.LionForMaskedLM)(config)
    load_all(model, state_dict_from_published(weights, config), str(checkpoint_path))
    unfinished = out.with_name(f"{out.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    write_folder(model, {}, unfinished)
    if tokenizer is not None:
        from src.builders import build_tokenizer

        build_tokenizer(tokenizer, config.max_position_embeddings).save_pretrained(unfinished)
    unfinished.rename(out)
    print(f"{out} holds the {config.mixer} model of {checkpoint_path}")


def push(folder: Path, repo_id: str, checkpoint: Path | None, private: bool, revision: str | None) -> None:
    """Upload a folder whose files are those that were compared with the checkpoint. Safe to repeat.

    Files that the Hub has already are not sent again, so an upload that broke off goes on. Raises UserError for a folder
    that is not what export proved, and for a Hub that cannot be reached or refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
    from requests import RequestException

    if checkpoint is not None:
        verify(read_checkpoint(checkpoint), folder)
    else:
        _check_proof(folder)
    if links := [path.name for path in folder.rglob("*") if path.is_symlink()]:
        raise UserError(f"{folder}/{links[0]} is a link, which may lead out of the folder; put the file itself there")
    api = HfApi()
    try:
        repo = api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, revision=revision, commit_message=f"Upload {folder.name}"
        )
    except HFValidationError as error:
        raise UserError(f"--repo_id {repo_id}: {error}") from None
    except LocalTokenNotFoundError:
        raise UserError(
            "no token for the Hub; `huggingface-cli login`, or set HF_TOKEN to one that may write"
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status in (401, 403):
            why = "the token is missing or not valid" if status == 401 else "the token may not write there"
            raise UserError(f"the Hub refused {repo_id} ({why}); set HF_TOKEN to one that may write to it") from None
        raise UserError(
            f"the Hub refused {repo_id}: {str(error).splitlines()[0]}; push again, it goes on where it stopped"
        ) from None
    except RequestException as error:
        raise UserError(f"the Hub at {api.endpoint} could not be reached ({type(error).__name__}); push again, it goes on where it stopped") from None  # fmt: skip
    print(f"{folder} is at {repo} ({revision or 'main'}, commit {commit.oid[:7]})")


def _check_proof(folder: Path) -> None:
    """Raise UserError unless the files of a folder are those that export compared with the checkpoint."""
    if not folder.is_dir():
        raise UserError(f"--folder {folder} is not there")
    try:
        proved = json.loads((folder / PROOF).read_text())["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{folder} has no {PROOF} of export's comparison; name the --checkpoint to compare it with"
        ) from None
    now = _digests(folder)
    if changed := sorted(name for name in now.keys() | proved.keys() if now.get(name) != proved.get(name)):
        raise UserError(
            f"{folder}: {', '.join(changed)} changed since export; name the --checkpoint to compare it with"
        )


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file but the model card, which people edit, and the proof itself."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in ("README.md", PROOF):
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while part := file.read(2**20):
                    digest.update(part)
            digests[str(path.relative_to(folder))] = digest.hexdigest()
    return digests


def load_safely(path: Path) -> dict[str, Any]:
    """A checkpoint's contents, never running code from it. Raises UserError for a file that is not there, cut or unsafe."""
    if not path.is_file():
        raise UserError(f"{path} is not a file; give a checkpoint, e.g. runs/NAME/latest-rank0.pt")
    import datetime

    import numpy

    harmless = [
        datetime.timedelta, torch.torch_version.TorchVersion, numpy.ndarray, numpy.dtype, numpy._core.multiarray._reconstruct,
        *(type(numpy.dtype(kind)) for kind in (numpy.uint32, numpy.int64, numpy.float32, numpy.float64)),
    ]  # fmt: skip
    try:
        with torch.serialization.safe_globals(harmless):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        unsafe = re.search(r"GLOBAL (\S+)", str(error))
        if unsafe:
            raise UserError(f"{path} wants to run {unsafe[1]} when it is read; it was not opened") from None
        raise UserError(f"{path} is not a readable checkpoint; copy it again or use an earlier one") from None
    except Exception:  # over a file that is no checkpoint, the unpickler can stumble in any way
        raise UserError(
            f"{path} is not a readable checkpoint (cut short?); copy it again or use an earlier one"
        ) from None


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint of main.py or glue.py. Raises UserError where it is not one."""
    return checkpoint_of(load_safely(path), path)


def checkpoint_of(loaded: dict[str, Any], path: Path) -> Checkpoint:
    """What `load_safely` read from a path. Raises UserError where it is no checkpoint of main.py or glue.py."""
    try:
        state = loaded["state"]
        integration = state["integrations"]["huggingface"]
        config = integration["model"]["config"]
        class_name = config["class"].rsplit(".", 1)[-1]
        weights = {name.removeprefix("model."): tensor for name, tensor in state["model"].items()}
    except (KeyError, TypeError, AttributeError, IndexError):
        raise UserError(f"{path} is no Composer checkpoint of a transformers model") from None
    if class_name not in AUTO_CLASSES.values():
        hint = "; read the authors' own checkpoints with `hub.py import`" if "arch_type" in config["content"] else ""
        raise UserError(f"{path} holds a {class_name}, which is no model of ours{hint}")
    timestamp = state.get("timestamp", {}).get("Timestamp", {})
    return Checkpoint(path, class_name, dict(config["content"]), integration.get("tokenizer", {}), weights, timestamp, state.get("run_name"))  # fmt: skip


def read_encoder(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], "PreTrainedTokenizerBase | None"]:
    """Config, weights (named as in LionModel) and tokenizer of a checkpoint of main.py or a Hub folder of ours.

    Raises UserError where the path is neither.
    """
    from transformers import AutoTokenizer

    if path.is_dir():
        config, weights = _read_folder(path)
        tokenizer = AutoTokenizer.from_pretrained(path) if (path / "tokenizer_config.json").is_file() else None
    else:
        checkpoint = read_checkpoint(path)
        config, weights, tokenizer = checkpoint.config, checkpoint.weights, None
        if checkpoint.tokenizer:
            with tempfile.TemporaryDirectory() as folder:
                write_tokenizer(checkpoint.tokenizer, Path(folder))
                tokenizer = AutoTokenizer.from_pretrained(folder)
    return (
        config,
        {name.removeprefix("lion."): tensor for name, tensor in weights.items() if name.startswith("lion.")},
        tokenizer,
    )


def _read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise UserError(f"{folder} holds no {name}; give a folder that `hub.py export` wrote")
    try:
        config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
    except (SafetensorError, json.JSONDecodeError) as error:
        raise UserError(f"{folder} cannot be read ({error}); export it anew") from None
    if config.get("model_type") != "lion":
        raise UserError(f"{folder} holds a {config.get('model_type')} model, not one of ours")
    return config, weights


def load_all(model: torch.nn.Module, weights: dict[str, Tensor], source: str) -> None:
    """Load weights into a model: none missing, none left over, all of the right shape. Raises UserError listing names."""
    own = model.state_dict()
    problems = {
        "misses": sorted(own.keys() - weights.keys()),
        "has no place for": sorted(weights.keys() - own.keys()),
        "has another shape of": sorted(
            name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape
        ),
    }
    told = [f"{what} {', '.join(names)}" for what, names in problems.items() if names]
    if told:
        raise UserError(f"the weights of {source} do not fit: {type(model).__name__} {'; '.join(told)}")
    model.load_state_dict(weights)


def write_folder(model: "lion.LionPreTrainedModel", tokenizer: dict[str, dict[str, Any]], out: Path) -> None:
    """config.json with auto_map, model.safetensors, the modelling code, and the tokenizer's files."""
    model.config.auto_map = dict(AUTO_MAP)
    model.config.architectures = [type(model).__name__]
    # pipeline() finds no tokenizer for an architecture it does not know, unless the config names one.
    model.config.tokenizer_class = tokenizer.get("tokenizer_config.json", {}).get("content", {}).get("tokenizer_class")
    model.save_pretrained(out, safe_serialization=True)
    for file in sorted(CODE.glob("*.py")):
        if file.name != "__init__.py":
            shutil.copy(file, out / file.name)
    write_tokenizer(tokenizer, out)


def write_tokenizer(tokenizer: dict[str, dict[str, Any]], out: Path) -> None:
    """A checkpoint's tokenizer as files that AutoTokenizer loads."""
    out.mkdir(parents=True, exist_ok=True)
    for name, file in tokenizer.items():
        content = file["content"]
        if Path(name).name != name:
            raise UserError(f"the checkpoint's tokenizer wants to write {name}, outside its folder; it was not opened")
        if file["file_extension"] == ".json":
            content = json.dumps(content, indent=2, ensure_ascii=False)
        elif isinstance(content, list):
            content = "\n".join(content)
        (out / name).write_text(content, encoding="utf-8")


# Runs where only torch and transformers are: loads a folder as any user would and saves logits and tokens.
PROBE = """
import sys, torch, transformers
from safetensors.torch import save_file
folder, sentences, auto_class, out = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4]
tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
texts = open(sentences, encoding="utf-8").read().splitlines()
batch = tokenizer(texts, padding=True, truncation=True, max_length=int(sys.argv[5]), return_tensors="pt")
model = getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True).eval()
with torch.no_grad():
    output = model(**batch)
first = next(iter(output.values()))
save_file({"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "output": first.contiguous()}, out)
"""

SENTENCES = (
    "The encoder reads the whole sentence at once.",
    "A short one.",
    "Every weight in this folder was loaded from a checkpoint, and these words are here to show that none of them is missing.",
)


def verify(checkpoint: Checkpoint, folder: Path) -> float:
    """Compare a folder, loaded in a fresh Python process without this repository, with the checkpoint it came from.

    Returns the largest difference of logits. Raises UserError naming the tensors that differ.
    """
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    _, stored = _read_folder(folder)
    model = checkpoint.build()
    own = model.state_dict()
    shared = {
        name for name in own if any(name != other and own[name].data_ptr() == own[other].data_ptr() for other in own)
    }
    differing = sorted(
        name
        for name in own.keys() | stored.keys()
        if not (name in own and name in stored and torch.equal(own[name], stored[name]))
        and not (name in shared and name not in stored)
    )
    if differing:
        raise UserError(f"{folder} differs from {checkpoint.path} in {', '.join(differing)}; export it anew")
    auto_class = next(auto for auto, name in AUTO_CLASSES.items() if name == checkpoint.class_name)
    with tempfile.TemporaryDirectory() as work:
        length = min(model.config.max_position_embeddings, 128)
        sentences, out = Path(work, "sentences.txt"), Path(work, "out.safetensors")
        sentences.write_text("\n".join(SENTENCES), encoding="utf-8")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": str(Path(work, "modules")),
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [
            sys.executable,
            "-c",
            PROBE,
            str(folder.resolve()),
            str(sentences),
            auto_class,
            str(out),
            str(length),
        ]
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise UserError(
                f"{folder} does not load in plain transformers: {(done.stderr.strip().splitlines() or ['no output'])[-1]}"
            )
        probe = load_file(out)
        write_tokenizer(checkpoint.tokenizer, Path(work, "tokenizer"))
        own_tokenizer = AutoTokenizer.from_pretrained(Path(work, "tokenizer"))
        batch = own_tokenizer(list(SENTENCES), padding=True, truncation=True, max_length=length, return_tensors="pt")
    if not torch.equal(batch["input_ids"], probe["input_ids"]):
        raise UserError(f"{folder} tokenizes otherwise than the checkpoint; export it anew")
    with torch.no_grad():
        expected = next(iter(model(**batch).values()))
    real = batch["attention_mask"].bool() if expected.ndim == 3 else slice(None)
    difference = (expected - probe["output"])[real].abs().max().item()
    if not difference <= TOLERANCE:
        raise UserError(f"{folder} gives logits that differ from the checkpoint's by {difference:.1e}; export it anew")
    return difference


def model_card(checkpoint: Checkpoint) -> str:
    """README.md of a Hub folder, from facts in the checkpoint alone."""
    config = lion.LionConfig(**checkpoint.config)
    task = {"LionForMaskedLM": "fill-mask", "LionForSequenceClassification": "text-classification"}.get(
        checkpoint.class_name
    )
    auto_class = next(auto for auto, name in AUTO_CLASSES.items() if name == checkpoint.class_name)
    facts = [
        f"- mixer: {config.mixer}",
        f"- {config.num_hidden_layers} layers, hidden size {config.hidden_size}, {config.num_attention_heads} heads, vocabulary {config.vocab_size}",
    ]
    if checkpoint.timestamp:
        facts.append(
            f"- trained for {checkpoint.timestamp['batch']:,} steps, {checkpoint.timestamp['sample']:,} samples"
        )
    header = ["---", "library_name: transformers", "license: apache-2.0", "tags: [lion, linear-attention]"]
    header += [f"pipeline_tag: {task}"] if task else []
    name = checkpoint.run_name or "LION encoder"
    return "\n".join([
        *header, "---", "", f"# {name}", "",
        "A bidirectional encoder of the LION family (linear attention, [arXiv:2502.16249](https://arxiv.org/abs/2502.16249)).", "",
        *facts, "", "```python", f"from transformers import {auto_class}, AutoTokenizer", "",
        'tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER", trust_remote_code=True)',
        f'model = {auto_class}.from_pretrained("THIS_FOLDER", trust_remote_code=True)', "```", "",
    ])  # fmt: skip


def _check_out(out: Path) -> None:
    if "." in out.name:
        raise UserError(
            f"--out {out}: transformers cannot load code from a folder with a dot in its name; leave the dot out"
        )
    if out.exists():
        raise UserError(f"--out {out} is already there; name another folder")


if __name__ == "__main__":
    cli.run(main)
