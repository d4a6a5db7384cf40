"""Read what training starts from: a checkpoint of ours or of the paper's authors, a Hub folder, or a BERT."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from src.checkpoints.adapters import config_from_published, state_dict_from_published
from src.checkpoints.reading import load_tokenizer, read_checkpoint, read_folder
from src.errors import UserError, first_line
from src.lion import LionConfig

HUB_FILES = ["*.json", "*.txt", "*.model", "*.safetensors", "*.pt", "pytorch_model*.bin"]


@dataclass
class Pretrained:
    """Model settings, all weights under our names (`lion.…`, `head.…`, …), and a function that loads the tokenizer.

    That function returns None if there is no tokenizer, and raises UserError if it cannot be loaded.
    """

    config: dict[str, Any]
    weights: dict[str, Tensor]
    load_tokenizer: Callable[[], PreTrainedTokenizerBase | None]

    def encoder(self) -> dict[str, Tensor]:
        """Return the weights of LionModel, under its names."""
        return {name.removeprefix("lion."): tensor for name, tensor in self.weights.items() if name.startswith("lion.")}


def read_pretrained(name: str, key: str) -> Pretrained:
    """Read a file, a folder or a Hub repository. Raises UserError naming `key`, the config key that holds the name."""
    path = _local_path(name, key)
    if path.is_dir() and not (path / "config.json").is_file() and len(files := list(path.glob("*.pt"))) == 1:
        path = files[0]  # the paper's authors publish theirs this way
    if not path.is_dir():
        checkpoint = read_checkpoint(path)
        return Pretrained(checkpoint.config.to_dict(), checkpoint.weights, checkpoint.load_tokenizer)
    kind = None
    with contextlib.suppress(OSError, ValueError, AttributeError):  # read_folder reports a missing or corrupt file
        kind = json.loads((path / "config.json").read_text()).get("model_type")
    config, weights = _read_bert(path) if kind == "bert" else read_folder(path)
    if not any(part.startswith("lion.") for part in weights):  # of a LionModel, the encoder alone
        weights = {f"lion.{part}": tensor for part, tensor in weights.items()}
    return Pretrained(config.to_dict(), weights, partial(load_tokenizer, path, str(path)))


def _local_path(name: str, key: str) -> Path:
    """Return the path of a file or folder, or of the downloaded Hub repository."""
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


def _read_bert(folder: Path) -> tuple[LionConfig, dict[str, Tensor]]:
    """Read a BERT for the softmax mixer. Raises UserError if a tensor is missing or the architecture differs."""
    from transformers import BertModel

    try:
        model, info = BertModel.from_pretrained(folder, output_loading_info=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{folder} cannot be read as a BERT ({first_line(error)}); copy it again") from None
    if model.config.position_embedding_type != "absolute" or model.config.is_decoder:
        reason = "it has relative positions or is a decoder"
        raise UserError(f"{folder} is not a plain BERT encoder ({reason}), which the softmax mixer cannot compute")
    if missing := sorted(name for name in info["missing_keys"] if not name.startswith("pooler.")):
        raise UserError(f"{folder} lacks weights of BERT: {', '.join(missing)}")
    config = config_from_published(model.config.to_dict(), str(folder))
    weights = {
        f"bert.{name}": tensor for name, tensor in model.state_dict().items() if name not in info["missing_keys"]
    }
    return config, state_dict_from_published(weights, config)
