"""Reading what training left: Composer checkpoints of ours and of the paper's authors, and Hub folders, without running code.

Every tensor that is read finds its place in a model, or the reading fails with its name.
"""

import datetime
import inspect
import io
import json
import math
import pickletools
import re
import tempfile
import typing
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from src import lion
from src.checkpoints.adapters import config_from_published, state_dict_from_published
from src.errors import UserError, first_line

MODELS = (
    "LionModel", "LionForMaskedLM", "LionForSequenceClassification", "LionForTokenClassification",
    "LionForQuestionAnswering",
)  # fmt: skip
# Of a model's configuration nothing else is taken: other keys can name code, which transformers would load (custom_pipelines).
ARGUMENTS = {name: entry for name, entry in inspect.signature(lion.LionConfig).parameters.items() if name != "kwargs"}
SETTINGS = {*ARGUMENTS, "num_labels", "id2label", "label2id", "problem_type"}
# Nor are other files of a tokenizer: a file of any other name can be code, or name some (adapter_config.json, modules.json).
TOKENIZER_FILES = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.txt", "vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model",
}  # fmt: skip
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
    tokenizer: dict[str, dict[str, Any]]  # as Composer keeps it, see `tokenizer_files`; empty where it holds none
    weights: dict[str, Tensor]
    timestamp: dict[str, Any] = field(default_factory=dict)  # batch, sample, …; empty in weights-only checkpoints
    run_name: str | None = None
    optimizers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # settings by group, by the class
    published: str | None = None  # where a checkpoint of the paper's authors comes from; None for ours

    def build(self) -> "lion.LionPreTrainedModel":
        """The model with its weights, every tensor used and none missing. Raises UserError naming those that are not."""
        try:
            model = getattr(lion, self.class_name)(lion.LionConfig(**self.config))
        except Exception as error:  # whatever a layer says of sizes that cannot be
            raise UserError(f"the config of {self.path} makes no model ({first_line(error)})") from None
        load_all(model, self.weights, str(self.path))
        return model.eval()

    def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer's files by name. Raises UserError for one that is none of TOKENIZER_FILES, or names code."""
        files = {}
        try:
            for name, file in self.tokenizer.items():
                suffix, content = file["file_extension"], file["content"]
                name = name if name.endswith(suffix) else name + suffix  # old Composer left the suffix out of the name
                if name not in TOKENIZER_FILES:
                    raise UserError(f"the tokenizer of {self.path} has a file {name}, which is no tokenizer's; it was not written")  # fmt: skip
                if name == "tokenizer_config.json" and "auto_map" in (content := dict(content)):
                    raise UserError(f"the tokenizer of {self.path} wants to run code of its own (auto_map in {name}); it was not written")  # fmt: skip
                if name.endswith(".json"):
                    content = json.dumps(content, indent=2, ensure_ascii=False)
                elif isinstance(content, list):
                    content = "\n".join(content)
                files[name] = content if isinstance(content, bytes) else content.encode()
        except (AttributeError, KeyError, TypeError, ValueError):
            raise UserError(f"the tokenizer of {self.path} is not kept as Composer does; name another") from None
        return files

    def write_tokenizer(self, out: Path) -> None:
        """The tokenizer as files that AutoTokenizer loads. Raises UserError as `tokenizer_files` does."""
        files = self.tokenizer_files()
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (out / name).write_bytes(content)

    def load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer, if there is one. Raises UserError for one that cannot be loaded."""
        if not self.tokenizer:
            return None
        with tempfile.TemporaryDirectory() as folder:
            self.write_tokenizer(Path(folder))
            return load_tokenizer(Path(folder), str(self.path))


def load_safely(path: Path) -> dict[str, Any]:
    """A checkpoint's contents, never running code from it. Raises UserError for a file that is not there, cut or unsafe."""
    if not path.is_file():
        raise UserError(f"{path} is not a file; give a checkpoint, e.g. runs/NAME/latest-rank0.pt")
    try:
        loaded = _load(path)
        if zipfile.is_zipfile(path) and (damaged := zipfile.ZipFile(path).testzip()):
            raise ValueError(f"{damaged} has another checksum")  # which torch does not compare
        return loaded
    except Exception as error:  # over a file that is no checkpoint, the unpickler can stumble in any way
        if unsafe := _refused(error) or next(filter(_is_refused, _imports(path)), None):
            raise UserError(f"{path} wants to run {unsafe} when it is read; it was not opened") from None
        raise UserError(
            f"{path} is not a readable checkpoint (damaged?); copy it again or use an earlier one"
        ) from None


def _load(file: Path | io.BytesIO) -> Any:
    with torch.serialization.safe_globals(HARMLESS), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pickle protocols; those that are not read fail below
        return torch.load(file, map_location="cpu", weights_only=True)


def _refused(error: Exception) -> str | None:
    """The "module.name" that torch says it does not import, if that is what it says."""
    found = re.search(r"GLOBAL (\S+) (?:was not|whose module)", str(error))
    return found[1] if found else None


def _is_refused(name: str) -> bool:
    """Whether a pickle that imports this "module.name" is refused."""
    try:
        _load(io.BytesIO("c{}\n{}\n.".format(*name.rsplit(".", 1)).encode()))
    except Exception as error:  # there are no tensors in it, so it always fails; the question is for what
        return _refused(error) is not None
    return False


def _imports(path: Path) -> Iterator[str]:
    """The "module.name" of all that a file's pickles import, in newer protocols too, which torch stops at. Runs nothing."""
    try:
        with path.open("rb") as raw:
            file: Any = raw
            if zipfile.is_zipfile(raw):
                archive = zipfile.ZipFile(raw)
                file = archive.open(next(name for name in archive.namelist() if name.endswith("data.pkl")))
            else:
                raw.seek(0)
            while True:  # without a zip, a checkpoint is several pickles, one after the other
                strings: list[str] = []
                memo: dict[int, str | None] = {}
                before = None  # the argument of the operation before, if that is a string
                for operation, argument, _ in pickletools.genops(file):
                    if operation.name in ("GLOBAL", "INST"):
                        found = argument.replace(" ", ".", 1)
                    elif operation.name == "STACK_GLOBAL":
                        found = ".".join(strings[-2:])
                    else:
                        found = ""
                        if operation.name == "MEMOIZE":
                            memo[len(memo)] = before
                        elif operation.name.endswith("PUT"):
                            memo[int(argument)] = before
                        elif operation.name.endswith("GET"):
                            argument = memo.get(int(argument))
                        before = argument if isinstance(argument, str) else None
                        strings += [before] if before is not None else []
                    if re.fullmatch(r"\w+(\.\w+)+", found):
                        yield found
    except Exception:  # the end of what reads as a pickle
        return


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint of main.py or glue.py, or one that the paper's authors published. Raises UserError for others."""
    loaded = load_safely(path)
    try:
        state = loaded["state"]
        integration = state["integrations"]["huggingface"]
        class_name = integration["model"]["config"]["class"].rsplit(".", 1)[-1]
        config = dict(integration["model"]["config"]["content"])
        weights = {name.removeprefix("model."): tensor for name, tensor in state["model"].items()}
        timestamp = dict(state.get("timestamp", {}).get("Timestamp", {}))
        tokenizer = dict(integration.get("tokenizer") or {})
    except Exception:  # whatever lies there instead says of being asked
        raise UserError(f"{path} is no Composer checkpoint of a transformers model") from None
    name, optimizers = state.get("run_name"), state.get("optimizers")
    facts = {
        "timestamp": {unit: count for unit, count in timestamp.items() if isinstance(count, int)},
        "run_name": name if isinstance(name, str) else None,
        "optimizers": {
            name: kept["param_groups"]
            for name, kept in (optimizers.items() if isinstance(optimizers, dict) else ())
            if isinstance(kept, dict) and "param_groups" in kept
        },
    }
    if strange := sorted(name for name, tensor in weights.items() if not _is_plain(tensor)):
        raise UserError(f"{path} holds {', '.join(strange)}, which are no plain tensors of numbers")
    published = None
    if "arch_type" in config:
        ours = config_from_published(config, str(path))
        published = path.name
        classifier = any(name.startswith("classifier.") for name in weights)
        class_name = "LionForSequenceClassification" if classifier else "LionForMaskedLM"
        weights = state_dict_from_published(weights, ours)
        config = ours.to_dict()
    elif class_name not in MODELS:
        raise UserError(f"{path} holds a {class_name}, which is no model of ours")
    config = settings(lion_config(config, str(path)).to_dict())
    return Checkpoint(path, class_name, config, tokenizer, weights, published=published, **facts)


def _is_plain(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized  # fmt: skip


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """Of a stored configuration, what makes the model."""
    return {name: config[name] for name in SETTINGS if name in config}


def lion_config(config: dict[str, Any], source: str) -> "lion.LionConfig":
    """A stored configuration as LionConfig. Raises UserError for values that it does not take."""
    try:
        for name in ARGUMENTS.keys() & config.keys():
            check_argument(name, config[name])
        return lion.LionConfig(**settings(config))
    except Exception as error:  # whatever arithmetic says of a value that is of its type, too
        raise UserError(f"the config of {source} makes no model ({first_line(error)})") from None


def check_argument(name: str, value: Any) -> None:
    """Raise ValueError for an argument of LionConfig that is not of its type, or that no model can have."""
    kind, *others = typing.get_args(ARGUMENTS[name].annotation) or (ARGUMENTS[name].annotation,)
    if value is None and type(None) in others:
        return
    if kind in (int, float):
        least, below = (1 if kind is int and not name.endswith("_id") else 0), (1 if "dropout" in name else math.inf)
        number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        if not number or not least <= value < below:
            what = "a whole number" if kind is int else "a number"
            raise ValueError(f"{name} must be {what} of at least {least}{'' if below > 1 else ' and below 1'}, not {value!r}")  # fmt: skip
    elif type(value) is not kind:
        raise ValueError(f"{name} must be {'true or false' if kind is bool else 'a word'}, not {value!r}")


def load_tokenizer(folder: Path, source: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, never running code from there. Raises UserError for one that cannot be loaded."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever transformers, tokenizers and sentencepiece raise
        raise UserError(f"the tokenizer of {source} cannot be loaded ({first_line(error)}); name another, as tokenizer_name in a config or as --tokenizer of hub.py") from None  # fmt: skip


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
        if not isinstance(config, dict):
            raise ValueError("config.json holds no settings")
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
