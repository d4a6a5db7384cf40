"""What a job starts from: a checkpoint of main.py, a Hub folder, a published checkpoint, a Hugging Face BERT, or nothing."""

import hashlib
import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from src import builders, hub
from src.cli import UserError
from src.config import FinetuneConfig
from src.glue.tasks import Task
from src.lion import LionConfig, LionForSequenceClassification
from src.published import config_from_published, state_dict_from_published

HUB_FILES = ["*.json", "*.txt", "*.model", "*.safetensors", "*.pt", "pytorch_model*.bin"]


@dataclass
class Start:
    """Sizes, weights of the encoder (None: random ones), tokenizer, and where they are from."""

    config: dict[str, Any]
    weights: dict[str, Tensor] | None
    tokenizer: PreTrainedTokenizerBase
    name: str

    def digest(self) -> dict[str, Any]:
        """What a result depends on, whatever the path: the model's settings, its weights and its vocabulary."""
        vocabulary = json.dumps(sorted(self.tokenizer.get_vocab().items())).encode()
        found = hashlib.sha256()
        for name, tensor in sorted((self.weights or {}).items()):
            found.update(name.encode())
            found.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
        return {
            "model": {name: self.config[name] for name in lion_keys(self.config)},
            "weights": found.hexdigest() if self.weights is not None else "random",
            "vocabulary": hashlib.sha256(vocabulary).hexdigest(),
        }


def read_start(config: FinetuneConfig, path: str | None = None) -> Start:
    """Read `path`, or the starting checkpoint, or make up a random start. Raises UserError where none can be."""
    name = path or config.starting_checkpoint_load_path
    if name is None:
        if config.tokenizer_name is None:
            raise UserError("starting_checkpoint_load_path is not set; name a checkpoint, or set tokenizer_name to start from random weights")  # fmt: skip
        tokenizer = builders.build_tokenizer(config.tokenizer_name, config.max_seq_len)
        settings = builders.build_lion_config(config.model, tokenizer, config.max_seq_len).to_dict()
        return Start(settings, None, tokenizer, "random weights")
    settings, weights, tokenizer = read_encoder(local_path(name))
    if config.tokenizer_name is not None:
        tokenizer = builders.build_tokenizer(config.tokenizer_name, config.max_seq_len)
    if tokenizer is None:
        raise UserError(f"{name} holds no tokenizer; set tokenizer_name")
    # Vocabulary and padding are the checkpoint's, not the tokenizer's, rounded.
    changed = {**{key: settings[key] for key in lion_keys(settings)}, **config.model}
    settings = builders.build_lion_config(changed, tokenizer, config.max_seq_len).to_dict()
    if config.from_scratch and path is None:
        return Start(settings, None, tokenizer, f"random weights, of the sizes of {name}")
    return Start(settings, weights, tokenizer, name)


def lion_keys(settings: dict[str, Any]) -> list[str]:
    return [name for name in inspect.signature(LionConfig).parameters if name in settings]


def local_path(name: str) -> Path:
    """A file or folder, or a copy of what the Hub has under this name. Raises UserError where neither is there."""
    path = Path(name)
    if path.exists():
        return path
    if path.suffix in (".pt", ".bin") or name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise UserError(f"starting_checkpoint_load_path: {name} is not a file or folder here; mend its path")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # whatever the Hub's client raises
        raise UserError(f"starting_checkpoint_load_path: {name} is not a file or folder here, and the Hugging Face Hub did not give it ({str(error).splitlines()[0]}); mend its path or name") from None  # fmt: skip


def read_encoder(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], PreTrainedTokenizerBase | None]:
    """Config, weights (named as in LionModel) and tokenizer. Raises UserError for what is none of the four."""
    if path.is_dir() and not (path / "config.json").is_file() and len(files := list(path.glob("*.pt"))) == 1:
        path = files[0]  # as the paper's authors publish theirs on the Hub
    return read_bert(path) if path.is_dir() and _model_type(path) == "bert" else hub.read_encoder(path)


def _model_type(folder: Path) -> str | None:
    try:
        return json.loads((folder / "config.json").read_text()).get("model_type")
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, AttributeError) as error:
        raise UserError(f"{folder / 'config.json'} cannot be read ({error}); copy the folder again") from None


def read_bert(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], PreTrainedTokenizerBase | None]:
    """A Hugging Face BERT as our softmax mixer. Raises UserError for one that lacks a tensor or computes otherwise."""
    from transformers import BertModel

    try:
        model, told = BertModel.from_pretrained(folder, output_loading_info=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{folder} cannot be read as a BERT ({str(error).splitlines()[0]}); copy it again") from None
    if model.config.position_embedding_type != "absolute" or model.config.is_decoder:
        raise UserError(f"{folder} is no plain BERT encoder (relative positions, or a decoder), which the softmax mixer would not compute")  # fmt: skip
    missing = [name for name in told["missing_keys"] if not name.startswith("pooler.")]
    if missing or told["mismatched_keys"]:
        raise UserError(f"{folder} lacks weights of BERT: {', '.join(sorted(missing) or map(str, told['mismatched_keys']))}")  # fmt: skip
    settings = config_from_published({**model.config.to_dict(), "arch_type": "attention"})
    named = {f"bert.{name}": tensor for name, tensor in model.state_dict().items() if name not in told["missing_keys"]}
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"))
    tokenizer = AutoTokenizer.from_pretrained(folder) if has_tokenizer else None
    weights = state_dict_from_published(named, settings)
    return settings.to_dict(), {name.removeprefix("lion."): tensor for name, tensor in weights.items()}, tokenizer


def build_model(start: Start, task: Task) -> LionForSequenceClassification:
    """A classifier with the starting encoder: all of it, but for the pooler that pretraining does not have."""
    names = {"id2label": dict(enumerate(task.labels)), "label2id": {label: i for i, label in enumerate(task.labels)}}
    labels = {"num_labels": 1, "problem_type": "regression"} if task.regression else names
    settings = {name: start.config[name] for name in lion_keys(start.config)}
    model = LionForSequenceClassification(LionConfig(**settings, **labels))
    if start.weights is not None:
        own = model.lion.state_dict()
        fresh = {
            name: tensor for name, tensor in own.items() if name.startswith("pooler.") and name not in start.weights
        }
        hub.load_all(model.lion, {**fresh, **start.weights}, start.name)
    return model
