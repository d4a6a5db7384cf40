"""Types and bounds of the arguments of LionConfig, for the `model` section of a config and for stored configs."""

import inspect
from typing import Any

from src.config import Rule, check_value
from src.lion import LionConfig

# Name → type.
ARGUMENTS = {name: entry.annotation for name, entry in inspect.signature(LionConfig).parameters.items()}
del ARGUMENTS["kwargs"]
COUNT, FRACTION, NOT_NEGATIVE = Rule(at_least=1), Rule(at_least=0, below=1), Rule(at_least=0)
RULES = {
    "vocab_size": COUNT, "hidden_size": COUNT, "num_hidden_layers": COUNT, "num_attention_heads": COUNT,
    "intermediate_size": COUNT, "chunk_size": COUNT, "max_position_embeddings": COUNT, "type_vocab_size": COUNT,
    "hidden_dropout_prob": FRACTION, "attention_probs_dropout_prob": FRACTION, "classifier_dropout": FRACTION,
    "initializer_range": NOT_NEGATIVE, "layer_norm_eps": NOT_NEGATIVE, "pad_token_id": NOT_NEGATIVE,
}  # fmt: skip


def check_argument(name: str, value: Any) -> None:
    """Raise UserError for a value of the wrong type or out of bounds. `name` may be dotted: model.mixer."""
    argument = name.rsplit(".", 1)[-1]
    check_value(name, value, ARGUMENTS[argument], RULES.get(argument, Rule()))
