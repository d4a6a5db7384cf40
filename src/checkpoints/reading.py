"""Read Composer checkpoints of ours and of the paper's authors, and Hub folders, without running code from them.

Every tensor in a file must be used by the model; otherwise reading fails and names it.
"""

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from src import lion
from src.checkpoints.adapters import config_from_published, state_dict_from_published
from src.checkpoints.integrity import check_hub_folder
from src.checkpoints.model_arguments import ARGUMENTS, check_argument
from src.checkpoints.safe_load import load_safely
from src.data import tokenizers
from src.errors import UserError, first_line

MODELS = tuple(name for name in lion.__all__ if name == "LionModel" or name.startswith("LionFor"))
# Nothing else is taken from a stored config: other keys can name code that transformers would load (custom_pipelines).
SETTINGS = {*ARGUMENTS, "num_labels", "id2label", "label2id", "problem_type"}
# Other tokenizer files are rejected: they can be code, or refer to code (adapter_config.json, modules.json).
TOKENIZER_FILES = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.txt", "vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model",
}  # fmt: skip
# In config.json of a folder whose mixer has no position table, max_position_embeddings means "no limit", which programs
# such as sentence-transformers compare with the tokenizer's limit; this key holds the checkpoint's own value.
STORED_POSITIONS = "original_max_position_embeddings"


@dataclass
class Checkpoint:
    """The model in a checkpoint, its tokenizer and its training state."""

    path: Path
    class_name: str  # of the model, one of MODELS
    config: dict[str, Any]  # arguments of LionConfig
    tokenizer: dict[str, dict[str, Any]]  # in Composer's format, see `tokenizer_files`; empty if there is none
    weights: dict[str, Tensor]
    timestamp: dict[str, Any] = field(default_factory=dict)  # batch, sample, …; empty in weights-only checkpoints
    run_name: str | None = None
    optimizers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # class → settings per parameter group
    published: str | None = None  # the source, if the paper's authors published it; None for ours

    def build(self) -> "lion.LionPreTrainedModel":
        """Return the model with its weights. Raises UserError naming tensors that are missing, unused or wrong."""
        try:
            model = getattr(lion, self.class_name)(lion.LionConfig(**self.config))
        except Exception as error:  # whatever a layer raises for impossible sizes
            raise _invalid_config(self.path, error) from None
        load_all(model, self.weights, str(self.path))
        return model.eval()

    def tokenizer_files(self) -> dict[str, bytes]:
        """Return the tokenizer's files by name. Raises UserError for any that is not expected or refers to code."""
        files = {}
        refused = f"the tokenizer of {self.path}"
        try:
            for name, file in self.tokenizer.items():
                suffix, content = file["file_extension"], file["content"]
                name = name if name.endswith(suffix) else name + suffix  # old Composer omitted the suffix
                if name not in TOKENIZER_FILES:
                    raise UserError(f"{refused} has a file {name}, which no tokenizer has; it was not written")
                if name == "tokenizer_config.json" and "auto_map" in (content := dict(content)):
                    raise UserError(f"{refused} would execute code (auto_map in {name}); it was not written")
                if name.endswith(".json"):
                    content = json.dumps(content, indent=2, ensure_ascii=False)
                elif isinstance(content, list):
                    content = "\n".join(content)
                files[name] = content if isinstance(content, bytes) else content.encode()
        except (AttributeError, KeyError, TypeError, ValueError):
            raise UserError(f"{refused} is not in Composer's format; name another") from None
        return files

    def load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the tokenizer, or None if there is none. Raises UserError if it cannot be loaded."""
        if not self.tokenizer:
            return None
        with tempfile.TemporaryDirectory() as folder:
            for name, content in self.tokenizer_files().items():
                Path(folder, name).write_bytes(content)
            return load_tokenizer(Path(folder), str(self.path))


def load_tokenizer(folder: Path, source: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a folder without running code from it. Raises UserError naming its `source`."""
    try:
        return tokenizers.load_tokenizer(folder)
    except UserError as error:
        why = first_line(error.__context__ or error)
        advice = "name another, as tokenizer_name in a config or as --tokenizer of hub.py"
        raise UserError(f"the tokenizer of {source} cannot be loaded ({why}); {advice}") from None


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint of main.py or glue.py, or one of the paper's authors. Raises UserError for others."""
    loaded = load_safely(path)
    try:
        state = loaded["state"]
        integration = state["integrations"]["huggingface"]
        class_name = integration["model"]["config"]["class"].rsplit(".", 1)[-1]
        config = dict(integration["model"]["config"]["content"])
        weights = {name.removeprefix("model."): tensor for name, tensor in state["model"].items()}
        timestamp = dict(state.get("timestamp", {}).get("Timestamp", {}))
        tokenizer = dict(integration.get("tokenizer") or {})
        name, optimizers = state.get("run_name"), state.get("optimizers")
    except Exception:  # whatever the objects in some other kind of file raise
        raise UserError(f"{path} is not a Composer checkpoint of a transformers model") from None
    facts = {
        "timestamp": {unit: count for unit, count in timestamp.items() if isinstance(count, int)},
        "run_name": name if isinstance(name, str) else None,
        "optimizers": {
            name: kept["param_groups"]
            for name, kept in (optimizers.items() if isinstance(optimizers, dict) else ())
            if isinstance(kept, dict) and "param_groups" in kept
        },
    }
    if unusable := sorted(name for name, tensor in weights.items() if not _is_plain(tensor)):
        raise UserError(f"{path} holds {', '.join(unusable)}, which are not dense tensors of numbers")
    published = None
    if "arch_type" in config:
        ours = config_from_published(config, str(path))
        published = path.name
        classifier = any(name.startswith("classifier.") for name in weights)
        class_name = "LionForSequenceClassification" if classifier else "LionForMaskedLM"
        weights = state_dict_from_published(weights, ours)
        config = ours.to_dict()
    elif class_name not in MODELS:
        raise UserError(f"{path} holds a {class_name}; only models of this project can be read")
    config = settings(lion_config(config, str(path)).to_dict())
    return Checkpoint(path, class_name, config, tokenizer, weights, published=published, **facts)


def _is_plain(tensor: Any) -> bool:
    plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided
    return plain and tensor.device.type == "cpu" and not tensor.is_quantized


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a stored config that defines the model."""
    return {name: config[name] for name in SETTINGS if name in config}


def lion_config(config: dict[str, Any], source: str) -> "lion.LionConfig":
    """Return a stored config as a LionConfig. Raises UserError for values that LionConfig rejects."""
    try:
        for name in ARGUMENTS:
            if name in config:
                check_argument(name, config[name])
        return lion.LionConfig(**settings(config))
    except Exception as error:  # arithmetic can also raise anything for a value of the right type
        raise _invalid_config(source, error) from None


def _invalid_config(source: Path | str, error: Exception) -> UserError:
    return UserError(f"the config of {source} is not valid ({first_line(error)})")


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and weights of one of our Hub folders. Raises UserError if it is not one."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_hub_folder(folder)
    try:
        config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        if not isinstance(config, dict):
            raise ValueError("config.json is not a JSON object")
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{folder} cannot be read ({error}); export it again") from None
    if config.get("model_type") != "lion":
        raise UserError(f"{folder} holds a {config.get('model_type')} model, not one of ours")
    if STORED_POSITIONS in config:
        config["max_position_embeddings"] = config.pop(STORED_POSITIONS)
    return config, weights


def load_all(model: torch.nn.Module, weights: dict[str, Tensor], source: str) -> None:
    """Load weights into a model: none missing, none unused, all of the right shape and finite.

    Raises:
        UserError: some tensors do not fit; the message lists their names.
    """
    own = model.state_dict()
    problems = {
        "misses": own.keys() - weights.keys(),
        "does not have": weights.keys() - own.keys(),
        "has another shape of": {
            name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape
        },
    }
    found = [f"{what} {', '.join(sorted(names))}" for what, names in problems.items() if names]
    if found:
        raise UserError(f"the weights of {source} do not fit: {type(model).__name__} {'; '.join(found)}")
    if nonfinite := sorted(name for name, tensor in weights.items() if not tensor.isfinite().all()):
        raise UserError(f"{source} holds NaN or infinite numbers in {', '.join(nonfinite)}; use an earlier checkpoint")
    model.load_state_dict(weights)
    # Tied tensors, such as the word embeddings and the decoder, share storage: the last one loaded wins.
    if lost := sorted(name for name, tensor in own.items() if not torch.equal(tensor, weights[name].to(tensor.dtype))):
        shared = f"shares {', '.join(lost)} with another tensor, but the values differ"
        raise UserError(f"the weights of {source} do not fit: {type(model).__name__} {shared}")
