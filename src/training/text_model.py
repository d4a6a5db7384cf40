"""A text model's configuration and tokenizer, from a config: what pretraining and fine-tuning share."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.activations import ACT2FN

from src.checkpoints.adapters import ARGUMENTS, check_argument
from src.config import Rule, check_known, check_value
from src.data.tokenizers import load_tokenizer
from src.errors import UserError
from src.lion import LionConfig
from src.lion.mixers import MIXERS


def build_tokenizer(name: str, max_seq_len: int, needs: tuple[str, ...] = ("pad_token",)) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the Hub. Raises UserError if it cannot be loaded or lacks a special token."""
    tokenizer = load_tokenizer(name, "tokenizer_name", model_max_length=max_seq_len)
    for token in needs:
        if getattr(tokenizer, token) is None:
            raise UserError(f"tokenizer_name={name} has no {token}, which this command needs; use another tokenizer")
    return tokenizer


def build_lion_config(arguments: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, max_seq_len: int) -> LionConfig:
    """Return the LionConfig of the `model` section; vocab_size defaults to the tokenizer's, up to a multiple of 8.

    Raises UserError for an unknown argument, or sizes that do not fit the tokenizer or the sequence length.
    """
    check_known("model", arguments, ARGUMENTS)
    for name, value in arguments.items():
        check_argument(f"model.{name}", value)
    check_value("model.hidden_act", arguments.get("hidden_act", "gelu"), rule=Rule(choices=tuple(ACT2FN)))
    options = {"vocab_size": -(-len(tokenizer) // 8) * 8, "pad_token_id": tokenizer.pad_token_id, **arguments}
    try:
        config = LionConfig(**options)
    except ValueError as error:
        raise UserError(f"model: {error}") from None
    size = f"model.vocab_size={config.vocab_size}"
    if config.vocab_size < len(tokenizer):
        raise UserError(f"{size} is less than the tokenizer's {len(tokenizer)} tokens; omit it to fit the tokenizer")
    if config.has_positions and config.max_position_embeddings < max_seq_len:
        table = f"model.max_position_embeddings={config.max_position_embeddings}"
        raise UserError(f"max_seq_len={max_seq_len} exceeds {table}, the position embeddings of {config.mixer}")
    dropout = config.attention_probs_dropout_prob and MIXERS[config.mixer].has_states
    if dropout and config.attention_form not in ("auto", "full"):
        raise UserError(
            f"model.attention_probs_dropout_prob={config.attention_probs_dropout_prob} needs the full form, not"
            f" {config.attention_form}; set it to 0 or attention_form to full"
        )
    return config


def lion_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those settings of a stored configuration that are arguments of LionConfig."""
    return {name: settings[name] for name in ARGUMENTS if name in settings}
