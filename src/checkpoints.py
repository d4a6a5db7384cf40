"""Reading what training left: Composer checkpoints of ours and of the paper's authors, and Hub folders, without running code.

Every tensor that is read finds its place in a model, or the reading fails with its name.
"""

import datetime
import json
import pickle
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from src import lion
from src.cli import UserError
from src.published import config_from_published, state_dict_from_published

MODELS = (
    "LionModel", "LionForMaskedLM", "LionForSequenceClassification", "LionForTokenClassification",
    "LionForQuestionAnswering",
)  # fmt: skip
# Beside tensors and plain containers, all that a checkpoint's random states and times are made of. NumPy 1 and 2 name
# the module of the same functions differently.
HARMLESS: list[Any] = [
    datetime.timedelta, torch.torch_version.TorchVersion, numpy.ndarray, numpy.dtype,
    *(type(numpy.dtype(kind)) for kind in (numpy.uint32, numpy.int64, numpy.float32, numpy.float64)),
    *((getattr(numpy._core.multiarray, name), f"numpy.{core}.multiarray.{name}") for core in ("core", "_core")
      for name in ("_reconstruct", "scalar")),
]  # fmt: skip


@dataclass
class Checkpoint:
    """What a checkpoint says of its model."""

    path: Path
    class_name: str  # of the model, one of MODELS
    config: dict[str, Any]  # arguments of LionConfig
    tokenizer: dict[str, dict[str, Any]]  # file name → {"file_extension", "content"}; empty where it holds none
    weights: dict[str, Tensor]
    timestamp: dict[str, Any] = field(default_factory=dict)  # batch, sample, …; empty in weights-only checkpoints
    run_name: str | None = None
    published: str | None = None  # where a checkpoint of the paper's authors comes from; None for ours

    def build(self) -> "lion.LionPreTrainedModel":
        """The model with its weights, every tensor used and none missing. Raises UserError naming those that are not."""
        model = getattr(lion, self.class_name)(lion.LionConfig(**self.config))
        load_all(model, self.weights, str(self.path))
        return model.eval()

    def write_tokenizer(self, out: Path) -> None:
        """The tokenizer as files that AutoTokenizer loads. Raises UserError for a file outside the folder."""
        out.mkdir(parents=True, exist_ok=True)
        for name, file in self.tokenizer.items():
            content = file["content"]
            if Path(name).name != name:
                raise UserError(f"the tokenizer of {self.path} wants to write {name}, outside its folder; it was not opened")  # fmt: skip
            if file["file_extension"] == ".json":
                content = json.dumps(content, indent=2, ensure_ascii=False)
            elif isinstance(content, list):
                content = "\n".join(content)
            (out / name).write_text(content, encoding="utf-8")


def load_safely(path: Path) -> dict[str, Any]:
    """A checkpoint's contents, never running code from it. Raises UserError for a file that is not there, cut or unsafe."""
    if not path.is_file():
        raise UserError(f"{path} is not a file; give a checkpoint, e.g. runs/NAME/latest-rank0.pt")
    try:
        with torch.serialization.safe_globals(HARMLESS):
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
    """Read a checkpoint of main.py or glue.py, or one that the paper's authors published. Raises UserError for others."""
    loaded = load_safely(path)
    try:
        state = loaded["state"]
        integration = state["integrations"]["huggingface"]
        class_name = integration["model"]["config"]["class"].rsplit(".", 1)[-1]
        config = dict(integration["model"]["config"]["content"])
        weights = {name.removeprefix("model."): tensor for name, tensor in state["model"].items()}
    except (KeyError, TypeError, AttributeError, ValueError):
        raise UserError(f"{path} is no Composer checkpoint of a transformers model") from None
    timestamp = state.get("timestamp", {}).get("Timestamp", {})
    facts = {"timestamp": timestamp, "run_name": state.get("run_name")}
    tokenizer = integration.get("tokenizer") or {}
    if "arch_type" in config:
        ours = config_from_published(config)
        classifier = any(name.startswith("classifier.") for name in weights)
        class_name = "LionForSequenceClassification" if classifier else "LionForMaskedLM"
        weights = state_dict_from_published(weights, ours)
        return Checkpoint(path, class_name, ours.to_dict(), tokenizer, weights, published=path.name, **facts)
    if class_name not in MODELS:
        raise UserError(f"{path} holds a {class_name}, which is no model of ours")
    return Checkpoint(path, class_name, config, tokenizer, weights, **facts)


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and weights of a Hub folder of ours. Raises UserError where it is none."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise UserError(f"{folder} holds no {name}; give a folder that `hub.py export` wrote")
    try:
        config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{folder} cannot be read ({error}); export it anew") from None
    if config.get("model_type") != "lion":
        raise UserError(f"{folder} holds a {config.get('model_type')} model, not one of ours")
    return config, weights


def load_all(model: torch.nn.Module, weights: dict[str, Tensor], source: str) -> None:
    """Load weights into a model: none missing, none left over, all of the right shape, finite and where they belong.

    Raises UserError listing the names of those that are not.
    """
    own = model.state_dict()
    problems = {
        "misses": own.keys() - weights.keys(),
        "has no place for": weights.keys() - own.keys(),
        "has another shape of": {
            name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape
        },
    }
    told = [f"{what} {', '.join(sorted(names))}" for what, names in problems.items() if names]
    if told:
        raise UserError(f"the weights of {source} do not fit: {type(model).__name__} {'; '.join(told)}")
    if broken := sorted(name for name, tensor in weights.items() if not tensor.isfinite().all()):
        raise UserError(f"{source} holds NaN or infinite numbers in {', '.join(broken)}; use an earlier checkpoint")
    model.load_state_dict(weights)
    # Two names of one tensor, as the word embeddings and the decoder are, take the weights of the last.
    if lost := sorted(name for name, tensor in own.items() if not torch.equal(tensor, weights[name].to(tensor.dtype))):
        raise UserError(f"the weights of {source} do not fit: {type(model).__name__} shares {', '.join(lost)} with another tensor, and theirs differ")  # fmt: skip
