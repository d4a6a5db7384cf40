"""Stored settings and tensors → ours, also those of LIONS-EPFL/{BERT,LION-Lit,LION-D,LION-S}-{base,large}-mlm, and of
Hydra: LIONS-EPFL/Hydra-large-mlm and goombalab/hydra."""

import inspect
import re
from typing import Any

import torch
from torch import Tensor

from src.config import Rule, check_value
from src.errors import UserError, first_line, some
from src.lion import LionConfig, LionVisionConfig, mixers
from src.lion.configuration_lion import OPTIONS

# name → type
ARGUMENTS = inspect.get_annotations(LionConfig.__init__)
IMAGE_ARGUMENTS = inspect.get_annotations(LionVisionConfig.__init__)
COUNT, FRACTION, NOT_NEGATIVE = Rule(at_least=1), Rule(at_least=0, below=1), Rule(at_least=0)
RULES = {
    "vocab_size": COUNT, "hidden_size": COUNT, "num_hidden_layers": COUNT, "num_attention_heads": COUNT,
    "intermediate_size": COUNT, "chunk_size": COUNT, "max_position_embeddings": COUNT, "type_vocab_size": NOT_NEGATIVE,
    "hidden_dropout_prob": FRACTION, "attention_probs_dropout_prob": FRACTION, "classifier_dropout": FRACTION,
    "expand": COUNT, "headdim": COUNT, "d_state": COUNT, "d_conv": COUNT,
    "short_conv": NOT_NEGATIVE, "long_reach": Rule(at_least=3), "rope_theta": Rule(above=0),
    "patch_size": COUNT, "num_channels": COUNT, "drop_path_rate": FRACTION,
    "initializer_range": NOT_NEGATIVE, "layer_norm_eps": NOT_NEGATIVE, "pad_token_id": NOT_NEGATIVE,
}  # fmt: skip
# Nothing else is taken from a stored config: other keys can name code that transformers would load (custom_pipelines).
LABELS = {"num_labels", "id2label", "label2id", "problem_type"}
SETTINGS = {*ARGUMENTS, *LABELS}
# Not in the authors' config.
OURS = {"mixer", "attention_form", "chunk_size", "classifier_pooling", "tie_word_embeddings", *OPTIONS}

# The authors' `arch_type` → our mixer.
MIXERS = {
    "attention": "softmax", "linear_attention": "lion-lit", "lion-lit": "lion-lit", "nova": "lion-d",
    "lion-d": "lion-d", "nova-inputdep": "lion-s", "lion-s": "lion-s",
}  # fmt: skip

# Settings of Hydra's checkpoints that, if true, make it another encoder, which we do not have.
OTHER_HYDRAS = ("is_prenorm", "use_position_embeddings")
# BERT's settings, which are in those checkpoints but do not describe them.
NOT_OF_HYDRA = {"num_attention_heads", "intermediate_size", "max_position_embeddings", "attention_probs_dropout_prob"}

# Prefixes of the authors' names → ours. Query, key and value, which they store as three tensors, become one at the end.
RENAMED = {
    "bert.embeddings.": "lion.embeddings.", "bert.pooler.dense.": "lion.pooler.",
    "cls.predictions.transform.dense.": "head.dense.", "cls.predictions.transform.LayerNorm.": "head.norm.",
    "cls.predictions.decoder.": "head.decoder.", "classifier.": "classifier.",
}  # fmt: skip
RENAMED_IN_LAYER = {  # after "bert.encoder.layer.N."
    "attention.self.query.": "attention.query.", "attention.self.key.": "attention.key.",
    "attention.self.value.": "attention.value.", "attention.self.layer_norm.": "attention.norm.",
    "attention.self.ai": "attention.decay", "attention.self.Wa_i.": "attention.decay.",
    "attention.output.dense.": "attention.out.", "attention.output.LayerNorm.": "attention_norm.",
    "layer.mixer.conv1d.": "attention.conv.", "layer.mixer.out_proj.": "attention.out.",
    "layer.mixer.in_proj.": "attention.in_proj.", "layer.mixer.dt_bias": "attention.dt_bias",
    "layer.mixer.A_log": "attention.A_log", "layer.mixer.D": "attention.D", "layer.mixer.fc_D.": "attention.fc_D.",
    "layer.mixer.norm.": "attention.norm.", "layer.norm.": "attention_norm.",
    "intermediate.dense.": "mlp_in.", "output.dense.": "mlp_out.", "output.LayerNorm.": "mlp_norm.",
}  # fmt: skip
# The same of ModernBERT.
RENAMED_MODERN = {
    "model.embeddings.tok_embeddings.": "lion.embeddings.word_embeddings.",
    "model.embeddings.norm.": "lion.embeddings.LayerNorm.", "model.final_norm.": "lion.final_norm.",
    "head.dense.": "head.dense.", "head.norm.": "head.norm.", "decoder.": "head.decoder.",
}  # fmt: skip
RENAMED_IN_MODERN_LAYER = {  # after "model.layers.N."
    "attn_norm.": "attention_norm.", "attn.Wqkv.": "attention.qkv.", "attn.Wo.": "attention.out.",
    "mlp_norm.": "mlp_norm.", "mlp.Wi.": "mlp_in.", "mlp.Wo.": "mlp_out.",
}  # fmt: skip


def check_argument(name: str, value: Any) -> None:
    """Raise UserError for a value of the wrong type or out of bounds. `name` may be dotted: model.mixer."""
    argument = name.rsplit(".", 1)[-1]
    check_value(name, value, {**IMAGE_ARGUMENTS, **ARGUMENTS}[argument], RULES.get(argument, Rule()))


def check_trainable(config: LionConfig | LionVisionConfig) -> None:
    """Raise UserError for a form that cannot compute the model's dropout."""
    dropout, form = config.attention_probs_dropout_prob, config.attention_form
    if dropout and form not in ("auto", "full") and mixers.MIXERS[config.mixer].has_states:
        raise UserError(f"model.attention_probs_dropout_prob={dropout} needs the full form, not {form}; set it to 0")


def lion_config(config: dict[str, Any], source: str, kind: type = LionConfig) -> LionConfig | LionVisionConfig:
    """Return a stored config as one of ours. Raises UserError for values that it rejects."""
    arguments = ARGUMENTS if kind is LionConfig else IMAGE_ARGUMENTS
    try:
        for name in sorted(arguments.keys() & config.keys()):
            check_argument(name, config[name])
        return kind(**{name: config[name] for name in {*arguments, *LABELS} & config.keys()})
    except Exception as error:  # arithmetic can also raise anything for a value of the right type
        raise UserError(f"the config of {source} is not valid ({first_line(error)})") from None


def is_published(config: dict[str, Any]) -> bool:
    """Whether a config is of a checkpoint of the paper's authors or of Hydra's."""
    return "arch_type" in config or "matrix_mixer_type" in config


def config_from_published(config: dict[str, Any], source: str = "the checkpoint") -> LionConfig:
    """Convert their config to ours. Raises UserError for an unknown `arch_type` or `matrix_mixer_type`, an encoder that
    we do not have, or values that LionConfig rejects."""
    if "arch_type" not in config and "matrix_mixer_type" in config:
        return _config_of_hydra(config, source)
    arch = str(config.get("arch_type", "attention"))
    if arch not in MIXERS:
        raise UserError(f"arch_type {arch!r} of {source} must be one of {', '.join(MIXERS)}")
    same = {name: config[name] for name in SETTINGS - OURS if config.get(name) is not None}
    return lion_config({**same, "mixer": MIXERS[arch]}, source)


def _config_of_hydra(config: dict[str, Any], source: str) -> LionConfig:
    if (kind := config["matrix_mixer_type"]) != "hydra":
        raise UserError(f"matrix_mixer_type {kind!r} of {source} must be hydra; its other mixers cannot be read")
    for name in OTHER_HYDRAS:
        if config.get(name):
            raise UserError(f"{source} has {name}: true, an encoder that cannot be read; use another")
    same = {name: config[name] for name in SETTINGS - OURS - NOT_OF_HYDRA if config.get(name) is not None}
    pooling = "mean" if config.get("pool_all") else "cls"
    return lion_config({**same, "mixer": "hydra", "classifier_pooling": pooling}, source)


def state_dict_from_published(state: dict[str, Tensor], config: LionConfig) -> dict[str, Tensor]:
    """Return their tensors under our names, without duplicates and without those that the variant does not use.
    Omitted: `position_ids` (a constant), `cls.predictions.bias` (a copy of the decoder's bias), the position table of
    LION-D and LION-S (not used), BERT's next-sentence head, a classifier's masked-LM head and a masked LM's pooler.
    Raises UserError with the names of tensors that are unknown, or that belong together and do not match."""
    classifies = any(name.startswith("classifier.") for name in state)
    predicts = not classifies and any(name.startswith("cls.predictions.") for name in state)
    unused = {"cls.seq_relationship.": True, "cls.predictions.": classifies, "bert.pooler.": predicts}
    unused["bert.embeddings.position_embeddings."] = not config.has_positions
    prefixes = tuple(prefix for prefix, omit in unused.items() if omit)
    used = {
        name: tensor
        for name, tensor in state.items()
        if not (name.endswith("position_ids") or name == "cls.predictions.bias" or name.startswith(prefixes))
    }
    ours = renamed(used, RENAMED, "bert.encoder.layer.", RENAMED_IN_LAYER)
    if predicts and "cls.predictions.bias" in state:
        bias = ours.setdefault("head.decoder.bias", state["cls.predictions.bias"])
        if not torch.equal(bias.double(), state["cls.predictions.bias"].double()):
            raise UserError("cls.predictions.bias and cls.predictions.decoder.bias are one tensor here, but differ")
    return join_qkv(ours)


def join_qkv(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace query, key and value of each layer by one tensor. Raises UserError if their shapes differ."""
    for query in [name for name in ours if ".attention.query." in name]:
        names = [query.replace(".query.", f".{part}.") for part in ("query", "key", "value")]
        if all(name in ours for name in names):
            shapes = {tuple(ours[name].shape) for name in names}
            if len(shapes) > 1 or () in shapes:
                raise UserError(f"{', '.join(names)} of the checkpoint must have the same shape")
            ours[query.replace(".query.", ".qkv.")] = torch.cat([ours.pop(name) for name in names])
    return ours


def renamed(
    state: dict[str, Tensor], names: dict[str, str], layers: str, names_in_layer: dict[str, str]
) -> dict[str, Tensor]:
    """Return tensors under our names, by their prefixes; `layers` is the prefix of layers and their numbers."""
    ours, unknown = {}, []
    for name, tensor in state.items():
        layer = re.match(rf"{re.escape(layers)}(\d+)\.", name)
        table, prefix = (names_in_layer, f"lion.layers.{layer[1]}.") if layer else (names, "")
        part = name.removeprefix(layer[0]) if layer else name
        if theirs := next(filter(part.startswith, table), None):
            ours[prefix + table[theirs] + part.removeprefix(theirs)] = tensor
        else:
            unknown.append(name)
    if unknown:
        raise UserError(f"the checkpoint holds tensors that no LION model has: {some(unknown)}")
    return ours


def config_from_modernbert(config: dict[str, Any], source: str) -> LionConfig:
    """Convert a ModernBERT's config to ours. Raises UserError if some layers have local attention, or only some layers
    have biases: such a model cannot be built."""
    # transformers 5 stores a type per layer and parameters per type, earlier versions one number for each.
    types = set(config.get("layer_types") or ())
    if types - {"full_attention"} or (not types and config["global_attn_every_n_layers"] != 1):
        raise UserError(f"{source} has layers with local attention, which no LION model has; use a ModernBERT without")
    biases = {name: bool(config[f"{name}_bias"]) for name in ("attention", "mlp", "norm", "classifier")}
    if not config["decoder_bias"]:
        raise UserError(f"{source} has a decoder without bias, which no LION model has; use another")
    if len(set(biases.values())) > 1:
        raise UserError(f"{source} has biases in some of its layers only, which no LION model has; use another")
    if config["classifier_activation"] != config["hidden_activation"]:
        raise UserError(f"{source} has different activations in its layers and its head; use another")
    rope = (config.get("rope_parameters") or {}).get("full_attention", {})
    same = "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"
    same += "initializer_range", "pad_token_id", "max_position_embeddings", "classifier_pooling"
    renamed = {
        "hidden_act": "hidden_activation", "layer_norm_eps": "norm_eps", "hidden_dropout_prob": "mlp_dropout",
        "attention_probs_dropout_prob": "attention_dropout", "classifier_dropout": "classifier_dropout",
    }  # fmt: skip
    ours = {name: config[name] for name in same} | {name: config[theirs] for name, theirs in renamed.items()}
    ours |= {"mixer": "softmax", "norm": "pre", "mlp": "geglu", "position_embedding": "rope", "type_vocab_size": 0}
    ours |= {"bias": biases["mlp"], "rope_theta": rope.get("rope_theta") or config["global_rope_theta"]}
    return lion_config(ours, source)


def state_dict_from_modernbert(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a ModernBERT's tensors under our names. Raises UserError with the names of those that are unknown."""
    return renamed(state, RENAMED_MODERN, "model.layers.", RENAMED_IN_MODERN_LAYER)
