"""Read what training starts from: a checkpoint of ours or of the paper's authors, a Hub folder, or a BERT."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from src.checkpoints.adapters import config_from_published, state_dict_from_published
from src.checkpoints.reading import load_tokenizer, read_checkpoint, read_folder
from src.errors import UserError, first_line

HUB_FILES = ["*.json", "*.txt", "*.model", "*.safetensors", "*.pt", "pytorch_model*.bin"]


@dataclass
class Pretrained:
    """Model settings, all weights under our names (`lion.…`, `head.…`, …), and the tokenizer."""

    config: dict[str, Any]
    weights: dict[str, Tensor]
    load_tokenizer: Callable[[], PreTrainedTokenizerBase | None]

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer, loaded on first access; None if there is none. Raises UserError if it cannot be loaded."""
        return self.load_tokenizer()

    def encoder(self) -> dict[str, Tensor]:
        """Return the weights of LionModel, under its names."""
        return {name.removeprefix("lion."): tensor for name, tensor in self.weights.items() if name.startswith("lion.")}


def read_pretrained(name: str, key: str) -> Pretrained:
    """Read a file, a folder or a Hub repository.

    Args:
        key: the config key that holds the name, for messages.

    Raises:
        UserError: nothing by that name exists, or it cannot be read.
    """
    path = local_path(name, key)
    if path.is_dir() and not (path / "config.json").is_file() and len(files := list(path.glob("*.pt"))) == 1:
        path = files[0]  # the paper's authors publish theirs this way
    if not path.is_dir():
        checkpoint = read_checkpoint(path)
        return Pretrained(checkpoint.config, checkpoint.weights, checkpoint.load_tokenizer)
    if _model_type(path) == "bert":
        return read_bert(path)
    config, weights = read_folder(path)
    if config.get("architectures") == ["LionModel"]:  # the encoder alone, whose names have no prefix
        weights = {f"lion.{part}": tensor for part, tensor in weights.items()}
    return Pretrained(config, weights, lambda: _tokenizer(path))


def local_path(name: str, key: str) -> Path:
    """Return the path of a file or folder, or of the downloaded Hub repository. Raises UserError if neither exists."""
    path = Path(name)
    if path.exists():
        return path
    if path.suffix in (".pt", ".bin") or name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise UserError(f"{key}: {name} is not a file or folder; fix its path")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # whatever the Hub client raises
        reason = f"not a file or folder, and the Hugging Face Hub did not send it ({first_line(error)})"
        raise UserError(f"{key}: {name} is {reason}; fix its path or name") from None


def _model_type(folder: Path) -> str | None:
    try:
        return json.loads((folder / "config.json").read_text()).get("model_type")
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError) as error:
        raise UserError(f"{folder / 'config.json'} cannot be read ({error}); copy the folder again") from None


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    exists = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"))
    return load_tokenizer(folder, str(folder)) if exists else None


def read_bert(folder: Path) -> Pretrained:
    """Read a BERT for the softmax mixer. Raises UserError if a tensor is missing or the architecture differs."""
    from transformers import BertModel

    try:
        model, info = BertModel.from_pretrained(folder, output_loading_info=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{folder} cannot be read as a BERT ({first_line(error)}); copy it again") from None
    if model.config.position_embedding_type != "absolute" or model.config.is_decoder:
        reason = "it has relative positions or is a decoder"
        raise UserError(f"{folder} is not a plain BERT encoder ({reason}), which the softmax mixer cannot compute")
    missing = [name for name in info["missing_keys"] if not name.startswith("pooler.")]
    if missing or info["mismatched_keys"]:
        names = ", ".join(sorted(missing) or map(str, info["mismatched_keys"]))
        raise UserError(f"{folder} lacks weights of BERT: {names}")
    settings = config_from_published({**model.config.to_dict(), "arch_type": "attention"}, str(folder))
    named = {f"bert.{name}": tensor for name, tensor in model.state_dict().items() if name not in info["missing_keys"]}
    return Pretrained(settings.to_dict(), state_dict_from_published(named, settings), lambda: _tokenizer(folder))
