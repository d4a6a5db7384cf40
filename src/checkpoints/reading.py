"""Read Composer checkpoints of ours and of the paper's authors, and Hub folders, without running code from them.

Every tensor in a file must be used by the model; otherwise reading fails and names it.
"""

import copy
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from src import lion
from src.checkpoints.adapters import config_from_published, lion_config, state_dict_from_published
from src.checkpoints.safe_load import check_hub_folder, load_safely
from src.data import tokenizers
from src.errors import UserError, first_line

MODELS = tuple(name for name in lion.__all__ if name == "LionModel" or name.startswith("LionFor"))
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
    config: lion.LionConfig
    weights: dict[str, Tensor]
    tokenizer: dict[str, dict[str, Any]]  # in Composer's format, see `tokenizer_files`; empty if there is none
    timestamp: dict[str, int] = field(default_factory=dict)  # batch, sample, …; empty in weights-only checkpoints
    run_name: str | None = None
    optimizers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # class → settings per parameter group
    published: str | None = None  # the source, if the paper's authors published it; None for ours

    def build(self) -> "lion.LionPreTrainedModel":
        """Return the model with its weights. Raises UserError naming tensors that are missing, unused or wrong."""
        try:
            model = getattr(lion, self.class_name)(copy.deepcopy(self.config))
        except Exception as error:  # whatever a layer raises for impossible sizes
            raise UserError(f"the config of {self.path} is not valid ({first_line(error)})") from None
        load_all(model, self.weights, str(self.path))
        return model.eval()

    def tokenizer_files(self) -> dict[str, bytes]:
        """Return the tokenizer's files by name. Raises UserError for any that is not expected or refers to code."""
        files, refused = {}, f"the tokenizer of {self.path}"
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
        with tempfile.TemporaryDirectory() as folder:
            for name, content in self.tokenizer_files().items():
                Path(folder, name).write_bytes(content)
            return load_tokenizer(Path(folder), str(self.path))


def load_tokenizer(folder: Path, source: str) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer in a folder, if there is one, without running its code. Raises UserError naming `source`."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
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
        stored = state["integrations"]["huggingface"]
        class_name = stored["model"]["config"]["class"].rsplit(".", 1)[-1]
        config = dict(stored["model"]["config"]["content"])
        weights = {name.removeprefix("model."): tensor for name, tensor in state["model"].items()}
        counts = state.get("timestamp", {}).get("Timestamp", {})
        facts = {
            "tokenizer": dict(stored.get("tokenizer") or {}),
            "timestamp": {unit: count for unit, count in counts.items() if isinstance(count, int)},
            "run_name": str(state["run_name"]) if state.get("run_name") else None,
            "optimizers": {name: kept["param_groups"] for name, kept in (state.get("optimizers") or {}).items()},
        }
    except Exception:  # whatever the objects in some other kind of file raise
        raise UserError(f"{path} is not a Composer checkpoint of a transformers model") from None
    if unusable := sorted(name for name, tensor in weights.items() if not _is_dense(tensor)):
        raise UserError(f"{path} holds {', '.join(unusable)}, which are not dense tensors of numbers")
    if "arch_type" in config:
        ours = config_from_published(config, str(path))
        classifies = any(name.startswith("classifier.") for name in weights)
        class_name = "LionForSequenceClassification" if classifies else "LionForMaskedLM"
        weights = state_dict_from_published(weights, ours)
        return Checkpoint(path, class_name, ours, weights, published=path.name, **facts)
    if class_name not in MODELS:
        raise UserError(f"{path} holds a {class_name}; only models of this project can be read")
    return Checkpoint(path, class_name, lion_config(config, str(path)), weights, **facts)


def _is_dense(tensor: Any) -> bool:
    dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided
    return dense and tensor.device.type == "cpu" and not tensor.is_quantized


def read_folder(folder: Path) -> tuple["lion.LionConfig", dict[str, Tensor]]:
    """Return the config and weights of one of our Hub folders. Raises UserError if it is not one."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_hub_folder(folder)
    try:
        config = json.loads((folder / "config.json").read_text())
        kind = config.get("model_type")
        weights = load_file(folder / "model.safetensors")
    except (SafetensorError, AttributeError, ValueError) as error:
        raise UserError(f"{folder} cannot be read ({error}); export it again") from None
    if kind != "lion":
        raise UserError(f"{folder} holds a {kind} model, not one of ours")
    if STORED_POSITIONS in config:
        config["max_position_embeddings"] = config[STORED_POSITIONS]
    return lion_config(config, str(folder)), weights


def load_all(model: torch.nn.Module, weights: dict[str, Tensor], source: str) -> None:
    """Load weights into a model: none missing, none unused, all of the right shape and finite.

    Raises:
        UserError: some tensors do not fit; the message lists their names.
    """
    own = model.state_dict()
    problems = {
        "misses": own.keys() - weights.keys(),
        "does not have": weights.keys() - own.keys(),
        "has another shape of": {n for n in own.keys() & weights.keys() if own[n].shape != weights[n].shape},
    }
    unfit = f"the weights of {source} do not fit: {type(model).__name__}"
    if found := [f"{what} {', '.join(sorted(names))}" for what, names in problems.items() if names]:
        raise UserError(f"{unfit} {'; '.join(found)}")
    if nonfinite := sorted(name for name, tensor in weights.items() if not tensor.isfinite().all()):
        raise UserError(f"{source} holds NaN or infinite numbers in {', '.join(nonfinite)}; use an earlier checkpoint")
    model.load_state_dict(weights)
    # Tied tensors, such as the word embeddings and the decoder, share storage: the last one loaded wins.
    if lost := sorted(name for name, tensor in own.items() if not torch.equal(tensor, weights[name].to(tensor.dtype))):
        raise UserError(f"{unfit} shares {', '.join(lost)} with another tensor, but the values differ")
