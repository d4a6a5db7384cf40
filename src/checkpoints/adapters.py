"""The settings and tensors of stored models → ours, also for the checkpoints published by the paper's authors.

Those are `LIONS-EPFL/{BERT,LION-Lit,LION-D,LION-S}-{base,large}-mlm` on the Hub.
"""

import inspect
import re
from typing import Any

import torch
from torch import Tensor

from src.config import Rule, check_value
from src.errors import UserError, first_line
from src.lion import LionConfig

# The arguments of LionConfig: name → type.
ARGUMENTS = {name: entry.annotation for name, entry in inspect.signature(LionConfig).parameters.items()}
del ARGUMENTS["kwargs"]
COUNT, FRACTION, NOT_NEGATIVE = Rule(at_least=1), Rule(at_least=0, below=1), Rule(at_least=0)
RULES = {
    "vocab_size": COUNT, "hidden_size": COUNT, "num_hidden_layers": COUNT, "num_attention_heads": COUNT,
    "intermediate_size": COUNT, "chunk_size": COUNT, "max_position_embeddings": COUNT, "type_vocab_size": COUNT,
    "hidden_dropout_prob": FRACTION, "attention_probs_dropout_prob": FRACTION, "classifier_dropout": FRACTION,
    "initializer_range": NOT_NEGATIVE, "layer_norm_eps": NOT_NEGATIVE, "pad_token_id": NOT_NEGATIVE,
}  # fmt: skip
# Nothing else is taken from a stored config: other keys can name code that transformers would load (custom_pipelines).
SETTINGS = {*ARGUMENTS, "num_labels", "id2label", "label2id", "problem_type"}
OURS = {"mixer", "attention_form", "chunk_size", "classifier_pooling", "tie_word_embeddings"}  # not in their configs

# Their `arch_type` → our mixer.
MIXERS = {
    "attention": "softmax", "linear_attention": "lion-lit", "lion-lit": "lion-lit", "nova": "lion-d",
    "lion-d": "lion-d", "nova-inputdep": "lion-s", "lion-s": "lion-s",
}  # fmt: skip

# Their name → ours. They store query, key and value as three tensors; we store them as one.
RENAMED = (
    (r"^bert\.embeddings\.", "lion.embeddings."),
    (r"^bert\.encoder\.layer\.(\d+)\.attention\.self\.(query|key|value)\.", r"lion.layers.\1.attention.\2."),
    (r"^bert\.encoder\.layer\.(\d+)\.attention\.self\.layer_norm\.", r"lion.layers.\1.attention.norm."),
    (r"^bert\.encoder\.layer\.(\d+)\.attention\.self\.ai$", r"lion.layers.\1.attention.decay"),
    (r"^bert\.encoder\.layer\.(\d+)\.attention\.self\.Wa_i\.", r"lion.layers.\1.attention.decay."),
    (r"^bert\.encoder\.layer\.(\d+)\.attention\.output\.dense\.", r"lion.layers.\1.attention.out."),
    (r"^bert\.encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.", r"lion.layers.\1.attention_norm."),
    (r"^bert\.encoder\.layer\.(\d+)\.intermediate\.dense\.", r"lion.layers.\1.mlp_in."),
    (r"^bert\.encoder\.layer\.(\d+)\.output\.dense\.", r"lion.layers.\1.mlp_out."),
    (r"^bert\.encoder\.layer\.(\d+)\.output\.LayerNorm\.", r"lion.layers.\1.mlp_norm."),
    (r"^bert\.pooler\.dense\.", "lion.pooler."),
    (r"^cls\.predictions\.transform\.dense\.", "head.dense."),
    (r"^cls\.predictions\.transform\.LayerNorm\.", "head.norm."),
    (r"^cls\.predictions\.decoder\.", "head.decoder."),
    (r"^classifier\.", "classifier."),
)


def check_argument(name: str, value: Any) -> None:
    """Raise UserError for a value of the wrong type or out of bounds. `name` may be dotted: model.mixer."""
    argument = name.rsplit(".", 1)[-1]
    check_value(name, value, ARGUMENTS[argument], RULES.get(argument, Rule()))


def lion_config(config: dict[str, Any], source: str) -> LionConfig:
    """Return a stored config as a LionConfig. Raises UserError for values that LionConfig rejects."""
    try:
        for name in sorted(ARGUMENTS.keys() & config.keys()):
            check_argument(name, config[name])
        return LionConfig(**{name: config[name] for name in SETTINGS & config.keys()})
    except Exception as error:  # arithmetic can also raise anything for a value of the right type
        raise UserError(f"the config of {source} is not valid ({first_line(error)})") from None


def config_from_published(config: dict[str, Any], source: str = "the checkpoint") -> LionConfig:
    """Convert their config to ours. Raises UserError for an unknown `arch_type` or values that LionConfig rejects."""
    arch = str(config.get("arch_type", "attention"))
    if arch not in MIXERS:
        raise UserError(f"arch_type {arch!r} of {source} must be one of {', '.join(MIXERS)}")
    same = {name: config[name] for name in SETTINGS - OURS if config.get(name) is not None}
    return lion_config({**same, "mixer": MIXERS[arch]}, source)


def state_dict_from_published(state: dict[str, Tensor], config: LionConfig) -> dict[str, Tensor]:
    """Return their tensors under our names, without duplicates and without those that the variant does not use.

    Omitted: `position_ids` (a constant), `cls.predictions.bias` (a copy of the decoder's bias), the position table of
    LION-D and LION-S (not used), BERT's next-sentence head, a classifier's masked-LM head and a masked LM's pooler.
    Raises UserError with the names of tensors that are unknown, or that belong together and do not match.
    """
    ours, unknown, unused = {}, [], ["cls.seq_relationship."]
    classifies = any(name.startswith("classifier.") for name in state)
    if classifies:
        unused.append("cls.predictions.")
    elif any(name.startswith("cls.predictions.") for name in state):
        unused.append("bert.pooler.")
    if not config.has_positions:
        unused.append("bert.embeddings.position_embeddings.")
    for name, tensor in state.items():
        if name.endswith("position_ids") or name == "cls.predictions.bias" or name.startswith(tuple(unused)):
            continue
        if rule := next((rule for rule in RENAMED if re.match(rule[0], name)), None):
            ours[re.sub(*rule, name)] = tensor
        else:
            unknown.append(name)
    if unknown:
        raise UserError(f"the checkpoint holds tensors that no LION model has: {', '.join(sorted(unknown))}")
    if "cls.predictions.bias" in state and not classifies:
        bias = ours.setdefault("head.decoder.bias", state["cls.predictions.bias"])
        if not torch.equal(bias.double(), state["cls.predictions.bias"].double()):
            both = "cls.predictions.bias and cls.predictions.decoder.bias"
            raise UserError(f"{both} of the checkpoint differ, but are one tensor in the model")
    for query in [name for name in ours if ".attention.query." in name]:
        names = [query.replace(".query.", f".{part}.") for part in ("query", "key", "value")]
        if all(name in ours for name in names):
            shapes = {tuple(ours[name].shape) for name in names}
            if len(shapes) > 1 or () in shapes:
                raise UserError(f"{', '.join(names)} of the checkpoint must have the same shape")
            ours[query.replace(".query.", ".qkv.")] = torch.cat([ours.pop(name) for name in names])
    return ours
