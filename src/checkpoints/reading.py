"""Read models without running code from their files: ours, the paper's authors', Hydra's, DeiT's, timm's, Hub folders,
BERTs and ViTs."""

import copy
import json
import tempfile
from argparse import Namespace
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, BertForPreTraining, PreTrainedModel, PreTrainedTokenizerBase

from src import lion
from src.checkpoints.adapters import (
    config_from_modernbert,
    config_from_published,
    is_published,
    lion_config,
    state_dict_from_modernbert,
    state_dict_from_published,
)
from src.checkpoints.image_adapters import (
    config_from_release,
    config_from_vit,
    settings_from_shapes,
    state_dict_from_release,
    state_dict_from_vit,
)
from src.checkpoints.processors import normalization, processor_settings, read_processor, written
from src.checkpoints.remote import check_exists, fetch
from src.checkpoints.safe_load import load_safely
from src.checkpoints.timm_models import PATCHES, timm_processor, timm_settings, weights_of_timm
from src.cli import log
from src.errors import UserError, first_line, some
from src.files import sha256

MODELS = tuple(name for name in lion.__all__ if name.endswith("Model") or name.startswith("LionFor"))
OF_LRA = "SequenceClassifier"  # the class of lra.py's models, whose inputs and head are its own
TEXT, IMAGE = lion.LionConfig, lion.LionVisionConfig
# Other tokenizer files are rejected: they can be code, or refer to code (adapter_config.json, modules.json).
TOKENIZER_FILES = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.txt", "vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model",
}  # fmt: skip
# In the folder of a mixer without a position table, max_position_embeddings tells other programs, such as
# sentence-transformers, that there is no limit; this key of config.json holds the checkpoint's own value.
STORED_POSITIONS = "original_max_position_embeddings"
# Arguments of a configuration that decide which weights a model has, and of which shapes.
OF_WEIGHTS = (
    "mixer", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
    "max_position_embeddings", "type_vocab_size", "position_embedding", "norm", "normalization", "bias", "mlp",
    "short_conv", "value_gate", "key_weight", "separate_decays", "channel_decays", "expand", "headdim", "d_state",
    "d_conv", "patch_size", "patch_order", "num_channels", "distillation_token", "distillation_classifier",
    "layer_scale_init",
)  # fmt: skip
# The same weights fit, and compute something else: refused, or reported.
OF_HEADS = ("num_attention_heads", "headdim")
OF_FUNCTIONS = ("hidden_act", "layer_norm_eps", "normalization", "position_embedding", "rope_theta")
OF_FEATURES = ("feature_map", "normalize_rows")  # functions too, but another mixer brings its own
OF_DECAYS = ("decay_horizon", "key_weight")  # which may change where horizons are widened
SENTENCE_PROMPTS, SENTENCE_LIMIT = "config_sentence_transformers.json", "sentence_bert_config.json"
PREPROCESSOR = "preprocessor_config.json"  # the file of a folder's image processor
HEADS = "num_attention_heads"
GUESSES = dict.fromkeys(("mean", "std"), "as of ImageNet, though many ViTs have 0.5") | {HEADS: "one per 64 channels"}


@dataclass
class Checkpoint:
    """A stored model: settings, weights under our names, tokenizer and, from Composer, the training state."""

    path: Path  # a file or a folder
    class_name: str  # of the model, one of MODELS
    config: lion.LionConfig | lion.LionVisionConfig
    weights: dict[str, Tensor]
    tokenizer: dict[str, dict[str, Any]] = field(default_factory=dict)  # of a file, see `tokenizer_files`
    processor: dict[str, Any] = field(default_factory=dict)  # settings of a CLIPImageProcessor; empty for texts
    embedding: dict[str, Any] = field(default_factory=dict)  # prompts and max_seq_len of a LionEmbeddingModel
    timestamp: dict[str, int] = field(default_factory=dict)  # batch, sample, …; empty in weights-only checkpoints
    run_name: str | None = None
    optimizers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # class → settings per parameter group
    published: str | None = None  # the source, if the paper's authors published it; None for ours
    guessed: dict[str, Any] = field(default_factory=dict)  # settings that it does not name: what was assumed

    def __post_init__(self) -> None:
        if self.reads == "images" and not self.processor:
            self.processor = processor_settings(self.config.image_size)
            self.guessed |= normalization(self.processor)

    def report_guesses(self, given: Collection[str] | None = None) -> None:
        """Warn of settings that had to be guessed. given: the names of those that a run's config gives; None where
        there is no config."""
        others = f"add a {PREPROCESSOR}" if self.path.is_dir() else "name a folder that timm's save_for_hf wrote"
        for name, value in self.guessed.items():
            if name not in (given or ()):
                shown, reason = written(value), GUESSES[name]
                fix = others if given is None else f"set {'model.' * (name == HEADS)}{name}"
                log.warning(
                    f"{self.path} does not name {name}: assumed to be {shown}, {reason}; if that is wrong, {fix}"
                )

    def build(self) -> "lion.LionPreTrainedModel":
        """Return the model with its weights. Raises UserError naming tensors that are missing, unused or wrong."""
        try:
            model = getattr(lion, self.class_name)(copy.deepcopy(self.config))
        except Exception as error:  # whatever a layer raises for impossible sizes
            raise UserError(f"the config of {self.path} is not valid ({first_line(error)})") from None
        load_all(model, self.weights, str(self.path))
        return model.eval()

    @property
    def reads(self) -> str:
        """What the model reads."""
        return "images" if isinstance(self.config, IMAGE) else "texts"

    @property
    def class_names(self) -> list[str]:
        """The names of a classifier's classes, by number; LABEL_n if n has none."""
        return [str(self.config.id2label.get(number, f"LABEL_{number}")) for number in range(self.config.num_labels)]

    @property
    def classes(self) -> list[str] | None:
        """`class_names`, or None if no class has a name."""
        names = self.class_names
        return None if all(name == f"LABEL_{number}" for number, name in enumerate(names)) else names

    def encoder(self) -> dict[str, Tensor]:
        """Return the weights of LionModel or LionImageModel, under its names."""
        return {name.removeprefix("lion."): tensor for name, tensor in self.weights.items() if name.startswith("lion.")}

    def tokenizer_files(self) -> dict[str, bytes]:
        """Return the tokenizer's files by name. Raises UserError for any that is not expected or refers to code."""
        files, refused = {}, f"the tokenizer of {self.path}"
        try:
            for name, file in self.tokenizer.items():
                suffix, content = file["file_extension"], file["content"]
                name = name if name.endswith(suffix) else name + suffix  # old Composer omitted the suffix
                if name not in TOKENIZER_FILES:
                    raise UserError(f"{refused} has a file {name}, which is not a tokenizer file; it was not written")
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
        """Return the tokenizer, or None if there is none. Raises UserError if it cannot be loaded without code."""
        with tempfile.TemporaryDirectory() as work:
            folder = self.path if self.path.is_dir() and not self.tokenizer else Path(work)
            for name, content in self.tokenizer_files().items():
                (folder / name).write_bytes(content)
            if not any((folder / name).is_file() for name in TOKENIZER_FILES):
                return None
            try:
                return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            except Exception as error:  # whatever transformers, tokenizers and sentencepiece raise
                problem = f"the tokenizer of {self.path} cannot be loaded ({first_line(error)})"
                raise UserError(f"{problem}; name another as tokenizer_name, or as --tokenizer of hub.py") from None


def read_pretrained(name: str, key: str, reads: str = "texts", given: Collection[str] | None = None) -> Checkpoint:
    """Read what training starts from: a file, folder or Hub repository. Reports guesses but for what is `given`. Raises
    UserError naming it and its `key`, also for a model that reads something else than `reads`: "texts" or "images"."""
    check_exists(name, key)
    path = fetch(name, key)
    if not path.exists():
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.txt", "*.model", "*.safetensors", "*.pt", "pytorch_model*.bin"]
        try:
            path = fetch(snapshot_download(name, allow_patterns=patterns), key)
        except Exception as error:  # whatever the Hub client raises
            reason = f"not a file or folder, and cannot be downloaded from the Hugging Face Hub ({first_line(error)})"
            raise UserError(f"{key}: {name} is {reason}; fix its path or name") from None
    if path.is_dir() and not (path / "config.json").is_file() and len(files := list(path.glob("*.pt"))) == 1:
        path = files[0]  # the paper's authors publish theirs this way
    read = read_folder(path) if path.is_dir() else read_checkpoint(path)
    if read.reads != reads:
        raise UserError(f"{key}: {name} reads {read.reads}; give a model that reads {reads}")
    read.report_guesses(given)
    if not read.encoder():  # a LionModel, whose names have no prefix
        read.weights = {f"lion.{part}": tensor for part, tensor in read.weights.items()}
    return read


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint of main.py, glue.py or vision.py, or of the paper's authors, DeiT's scripts or timm's ViTs.
    Raises UserError for others."""
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    loaded = load_safely(path)
    if isinstance(loaded, dict) and (weights := weights_of_timm(loaded)):
        return _from_timm(path, weights)
    if isinstance(loaded, dict) and "state" not in loaded and isinstance(loaded.get("model"), dict):
        given = vars(loaded["args"]) if isinstance(loaded.get("args"), Namespace) else {}
        return _from_scripts(path, loaded["model"], settings_from_shapes(loaded["model"], given, str(path)))
    try:
        state = loaded["state"]
        stored = state["integrations"]["huggingface"]
        class_name = stored["model"]["config"]["class"].rsplit(".", 1)[-1]
        config = dict(stored["model"]["config"]["content"])
        weights = {name.removeprefix("model."): tensor for name, tensor in state["model"].items()}
        weights |= _averaged(dict(state.get("algorithms") or ()), weights)
        counts = state.get("timestamp", {}).get("Timestamp", {}).items()
        facts = {
            "tokenizer": dict(stored.get("tokenizer") or {}),
            "processor": dict(stored.get("image_processor") or {}),
            "embedding": dict(stored.get("embedding") or {}),
            "timestamp": {unit: count for unit, count in counts if isinstance(count, int)},
            "run_name": str(state["run_name"]) if state.get("run_name") else None,
            "optimizers": {name: kept["param_groups"] for name, kept in (state.get("optimizers") or {}).items()},
        }
    except Exception:  # whatever the objects in some other kind of file raise
        found = f"{path} is not a Composer checkpoint of a transformers model, nor weights of a ViT"
        raise UserError(f"{found}; give another file") from None
    _check_dense(path, weights)
    if is_published(config):
        ours = config_from_published(config, str(path))
        weights = state_dict_from_published(weights, ours)
        class_name = "LionForSequenceClassification" if "classifier.weight" in weights else "LionForMaskedLM"
        return Checkpoint(path, class_name, ours, weights, published=path.name, **facts)
    if class_name not in MODELS:
        if class_name == OF_LRA:
            found = f"{path} is a model of lra.py, which has no Hub format and is no start for others"
            raise UserError(f"{found}; name a checkpoint of another command")
        raise UserError(f"{path} holds a {class_name}; only models of this project can be read")
    kind = getattr(lion, class_name).config_class
    return Checkpoint(path, class_name, lion_config(config, str(path), kind), weights, **facts)


def _averaged(algorithms: dict[str, dict[str, Any]], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the moving averages of weights by an EMA, which are what a run evaluates, or nothing."""
    ema = algorithms.get("EMA", {})
    if not ema.get("ema_started") or ema["ema_weights_active"]:
        return {}
    kept = ema["ema_model"]["named_parameters_dict"]
    kept = {name.removeprefix("module.").removeprefix("model."): tensor for name, tensor in kept.items()}
    # Of tensors that are one, such as word embeddings and decoder, only the first name is averaged.
    averages = {weights[name].data_ptr(): tensor for name, tensor in kept.items() if name in weights}
    return kept | {name: averages[x.data_ptr()] for name, x in weights.items() if x.data_ptr() in averages}


def _check_dense(path: Path, weights: dict[str, Any]) -> None:
    """Raise UserError unless all are dense tensors of numbers."""
    dense = (isinstance(t, Tensor) and t.layout == torch.strided and not t.is_quantized for t in weights.values())
    if unusable := [name for name, usable in zip(weights, dense) if not usable]:
        raise UserError(f"{path} holds {some(unusable)}, which are not dense tensors of numbers")


def _read_safetensors(path: Path) -> Checkpoint:
    """Read an image model of the paper's authors, with its settings in the metadata, or a state dict of timm."""
    try:
        with safe_open(path, "pt") as file:
            settings = json.loads((file.metadata() or {}).get("config", "null"))
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}); copy it again") from None
    if PATCHES in state:
        return _from_timm(path, state)
    state = {name.removeprefix("model."): tensor for name, tensor in state.items() if name.startswith("model.")}
    if not isinstance(settings, dict) or not state:
        raise UserError(f"{path} has no settings in its metadata (config) or no tensors model.*; give another file")
    return _from_scripts(path, state, settings)


def _from_scripts(path: Path, state: dict[str, Tensor], settings: dict[str, Any]) -> Checkpoint:
    """An image model under the names of the authors' and DeiT's scripts, which normalize as ImageNet."""
    _check_dense(path, state)
    config = config_from_release(settings, str(path))
    weights = state_dict_from_release(state, config)
    guessed = {HEADS: config.num_attention_heads} if settings.get("guesses_heads") else {}
    facts = {"processor": processor_settings(config.image_size), "guessed": guessed}
    return Checkpoint(path, "LionForImageClassification", config, weights, published=path.name, **facts)


def _from_timm(path: Path, state: dict[str, Tensor], config: dict[str, Any] | None = None) -> Checkpoint:
    """A ViT or DeiT of timm: its state dict and, of a folder, its config.json."""
    read = _from_scripts(path, state, timm_settings(state, config or {}, str(path)))
    if config:
        read.processor = timm_processor(config.get("pretrained_cfg") or {}, read.config.image_size, str(path))
    else:
        read.guessed |= normalization(read.processor)
    return read


def _read_timm(folder: Path, config: dict[str, Any]) -> Checkpoint:
    file, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    state = load_file(file) if file.is_file() or not pickled.is_file() else load_safely(pickled)
    return _from_timm(folder, state, config)


def read_folder(folder: Path) -> Checkpoint:
    """Read one of our Hub folders, or a BERT, ModernBERT, ViT or DeiT for the softmax mixer, or one of timm's. Raises
    UserError for others."""
    try:
        config = json.loads((folder / "config.json").read_text())
        kind = config.get("model_type")
        if kind in READERS:
            return READERS[kind](folder)
        if kind is None and "architecture" in config:
            return _read_timm(folder, config)
        weights = load_file(folder / "model.safetensors")
    except FileNotFoundError:
        raise UserError(
            f"{folder} holds no config.json or model.safetensors; give a folder that has both, or a checkpoint"
        ) from None
    except (SafetensorError, AttributeError, TypeError, LookupError, ValueError) as error:
        raise UserError(f"{folder} cannot be read ({error}); export it again") from None
    if kind == IMAGE.model_type:
        class_name = (config.get("architectures") or ["LionForImageClassification"])[0]
        return Checkpoint(folder, class_name, lion_config(config, str(folder), IMAGE), weights, **_processor(folder))
    if kind != TEXT.model_type:
        raise UserError(f"{folder} holds a {kind} model, not one of ours")
    if STORED_POSITIONS in config:
        config["max_position_embeddings"] = config[STORED_POSITIONS]
    class_name = (config.get("architectures") or ["LionForMaskedLM"])[0]
    return Checkpoint(folder, class_name, lion_config(config, str(folder)), weights, embedding=_embedding(folder))


def read_saved(folder: Path) -> Checkpoint:
    """Read a folder of one of our models, as export or `save_pretrained` wrote it, with the files of its tokenizer.
    Raises UserError."""
    read = read_folder(folder)
    if json.loads((folder / "config.json").read_text()).get("model_type") not in (TEXT.model_type, IMAGE.model_type):
        raise UserError(f"{folder} holds no model of this project, which alone can be exported")
    for name in sorted(name for name in TOKENIZER_FILES if (folder / name).is_file()):
        content, suffix = (folder / name).read_bytes(), Path(name).suffix
        try:
            content = json.loads(content) if suffix == ".json" else content
        except ValueError as error:
            raise UserError(f"{folder / name} is corrupt ({error}); save the tokenizer again") from None
        read.tokenizer[name] = {"file_extension": suffix, "content": content}
    return read


def _embedding(folder: Path) -> dict[str, Any]:
    """What a folder says to sentence-transformers, as a checkpoint does; empty if it says nothing. Raises UserError."""
    try:
        prompts = json.loads((folder / SENTENCE_PROMPTS).read_text())["prompts"]
        limit = json.loads((folder / SENTENCE_LIMIT).read_text()).get("max_seq_length")
        if limit is None and (stored := folder / "tokenizer_config.json").is_file():  # where version 6 keeps it
            limit = json.loads(stored.read_text()).get("model_max_length")
            limit = limit if isinstance(limit, int) and 0 < limit < 2**31 else None  # transformers' 10³⁰: no limit
        return {"prompts": {kind: str(text) for kind, text in prompts.items() if text}, "max_seq_len": limit}
    except FileNotFoundError:
        return {}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        files = f"{SENTENCE_PROMPTS}, {SENTENCE_LIMIT} or tokenizer_config.json of {folder}"
        raise UserError(f"{files} is corrupt ({first_line(error)}); export the folder again") from None


def _read_bert(folder: Path) -> Checkpoint:
    model, missing = _load(BertForPreTraining, folder, "BERT")
    if model.config.position_embedding_type != "absolute" or model.config.is_decoder:
        raise UserError(f"{folder} is not a plain BERT, but a decoder or one with relative positions; give another")
    _check_complete(folder, "BERT", missing, may_lack=("bert.pooler.", "cls."))
    config = config_from_published(model.config.to_dict(), str(folder))
    has_head = not any(name.startswith("cls.predictions.") for name in missing)
    weights = {}
    for part in ("bert.", "cls.predictions.")[: 1 + has_head]:  # each alone: beside a head, the pooler would be omitted
        tensors = {name: t for name, t in model.state_dict().items() if name.startswith(part) and name not in missing}
        weights |= state_dict_from_published(tensors, config)
    return Checkpoint(folder, "LionForMaskedLM", config, weights)


def _read_modernbert(folder: Path) -> Checkpoint:
    from transformers import ModernBertConfig, ModernBertForMaskedLM  # whose import starts processes that compile

    of_head = ("head.", "decoder.")  # both, or neither
    config = config_from_modernbert(ModernBertConfig.from_pretrained(folder).to_dict(), str(folder))
    model, missing = _load(ModernBertForMaskedLM, folder, "ModernBERT")
    _check_complete(folder, "ModernBERT", missing, may_lack=of_head)
    weights = {name: t for name, t in model.state_dict().items() if not (missing and name.startswith(of_head))}
    return Checkpoint(folder, "LionForMaskedLM", config, state_dict_from_modernbert(weights))


def _read_vit(folder: Path) -> Checkpoint:
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    ours = config_from_vit(config, weights, str(folder))
    weights = state_dict_from_vit(weights)
    return Checkpoint(folder, "LionForImageClassification", ours, weights, **_processor(folder))


def _processor(folder: Path) -> dict[str, dict[str, Any]]:
    """A folder's image processor, as an argument of Checkpoint. Raises UserError."""
    try:
        return {"processor": read_processor(json.loads((folder / PREPROCESSOR).read_text()), str(folder))}
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{folder / PREPROCESSOR} is corrupt ({first_line(error)}); export the folder again") from None


READERS = {"bert": _read_bert, "modernbert": _read_modernbert, "vit": _read_vit, "deit": _read_vit}


def _load(kind: type, folder: Path, name: str) -> tuple[PreTrainedModel, list[str]]:
    """Load a model of transformers. Return it and the weights that the folder lacks. Raises UserError."""
    try:
        model, info = kind.from_pretrained(folder, output_loading_info=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{folder} cannot be read as a {name} ({first_line(error)}); copy it again") from None
    return model, sorted(info["missing_keys"])


def _check_complete(folder: Path, name: str, missing: list[str], may_lack: str | tuple[str, ...]) -> None:
    if needed := [part for part in missing if not part.startswith(may_lack)]:
        raise UserError(f"{folder} lacks weights of {name}: {some(needed)}")


def weights_digest(weights: Mapping[str, Tensor] | None) -> str:
    """Return the SHA-256 of names and values, in the order of the names; "random" for none."""
    if weights is None:
        return "random"
    tensors = ((name, tensor.cpu().contiguous().view(-1).view(torch.uint8)) for name, tensor in sorted(weights.items()))
    return sha256(part for name, tensor in tensors for part in (name.encode(), tensor.numpy().data))


def load_all(model: torch.nn.Module, weights: dict[str, Tensor], source: str, stored: Any = None) -> None:
    """Load weights into a model. `stored`: their configuration, where the section `model` may change it. Raises
    UserError naming tensors that are missing, unused, misshapen or not finite, and keys that differ."""
    own = model.state_dict()
    problems = {
        "needs": own.keys() - weights.keys(),
        "has no": weights.keys() - own.keys(),
        "expects another shape for": {n for n in own.keys() & weights.keys() if own[n].shape != weights[n].shape},
    }
    unfit = f"the weights of {source} do not fit: {type(model).__name__}"
    if found := [f"{what} {some(names)}" for what, names in problems.items() if names]:
        fixes = _differing(model.config, stored, bool(problems["needs"]), OF_WEIGHTS)
        raise UserError("; ".join([f"{unfit} {found[0]}", *found[1:], *fixes]))
    if fixes := _differing(model.config, stored, False, OF_HEADS):
        raise UserError("; ".join([f"{unfit} divides them among other heads", *fixes]))
    same_mixer = stored is not None and model.config.mixer == stored.mixer
    for other in _differing(model.config, stored, False, OF_FUNCTIONS + (OF_FEATURES if same_mixer else ())):
        log.warning(f"{other}, unless you mean it")
    if nonfinite := [name for name, tensor in weights.items() if not tensor.isfinite().all()]:
        raise UserError(f"{source} holds NaN or infinite numbers in {some(nonfinite)}; use an earlier checkpoint")
    model.load_state_dict(weights)
    # Tied tensors, such as the word embeddings and the decoder, share storage: the last one loaded wins.
    if lost := [name for name, tensor in own.items() if not torch.equal(tensor, weights[name].to(tensor.dtype))]:
        raise UserError(f"{unfit} shares {some(lost)} with another tensor, but the values differ")


def _differing(config: Any, stored: Any, lacking: bool, names: tuple[str, ...]) -> list[str]:
    """What to do about each of some keys of `model` that differs from the stored one's. `lacking`: whether weights are
    missing."""
    words = []
    for name, own, its in [] if stored is None else changed(config, stored, names):
        fix = "omit it"
        if name == "mixer" and lacking:
            fix = f"the own parameters of {own} are not in the checkpoint; omit it, or start from one of {own}"
            fix += ", or use lion-lit, which needs none" if its == "softmax" and isinstance(config, IMAGE) else ""
        elif name == "max_position_embeddings" and own and its and own > its:
            fix = f"omit it, and keep max_seq_len up to {its}"
        elif name in OF_FEATURES and own:
            fix = "omit it, and long_reach, which sets it"
        elif name == "distillation_token" and own:
            fix = "the token is not in the checkpoint; omit it, or start from a distilled one"
        words.append(f"{in_words(name, own, its)}: {fix}")
    return words


def changed(config: Any, stored: Any, names: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
    """Return (name, own value, stored value) of the arguments that differ between two configurations."""
    pairs = [(name, getattr(config, name, None), getattr(stored, name, None)) for name in names]
    return [(name, own, its) for name, own, its in pairs if own != its]


def in_words(name: str, own: Any, its: Any) -> str:
    own, its = (json.dumps(value).strip('"') for value in (own, its))
    return f"model.{name}={own}, where the checkpoint has {its}"
