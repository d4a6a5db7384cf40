"""A text model's configuration and tokenizer, from a config: what pretraining and fine-tuning share."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.activations import ACT2FN

from src.checkpoints.adapters import ARGUMENTS, check_argument, check_trainable
from src.cli import log
from src.config import Rule, check_known, check_value
from src.data.tokenizers import load_tokenizer
from src.errors import UserError
from src.lion import LionConfig, LionModel


def build_tokenizer(name: str, max_seq_len: int, needs: tuple[str, ...] = ("pad_token",)) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the Hub. Raises UserError if it cannot be loaded or lacks a special token."""
    tokenizer = load_tokenizer(name, "tokenizer_name", model_max_length=max_seq_len)
    for token in needs:
        if getattr(tokenizer, token) is None:
            raise UserError(f"tokenizer_name={name} has no {token}, which this command needs; use another tokenizer")
    return tokenizer


def check_arguments(place: str, arguments: Mapping[str, Any], known: Mapping[str, Any] = ARGUMENTS) -> None:
    """Raise UserError for arguments that are not `known`, by default LionConfig's, or values of a wrong type or out of
    bounds."""
    check_known(place, arguments, known)
    for name, value in arguments.items():
        check_argument(f"{place}.{name}", value)
    check_value(f"{place}.hidden_act", arguments.get("hidden_act", "gelu"), rule=Rule(choices=tuple(ACT2FN)))


def build_lion_config(arguments: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, max_seq_len: int) -> LionConfig:
    """Build a LionConfig; default vocab_size: the tokenizer's, rounded up to a multiple of 8. Raises UserError."""
    check_arguments("model", arguments)
    tokens = len(tokenizer)
    try:
        sizes = {"vocab_size": -(-tokens // 8) * 8, "pad_token_id": tokenizer.pad_token_id}
        config = LionConfig(**{**sizes, **arguments})
    except ValueError as error:
        raise UserError(f"model: {error}") from None
    positions = config.max_position_embeddings
    if config.vocab_size < tokens:
        raise UserError(f"model.vocab_size={config.vocab_size} is less than the tokenizer's {tokens} tokens; omit it")
    if config.has_positions and positions < max_seq_len:
        found = f"max_seq_len={max_seq_len} exceeds model.max_position_embeddings={positions} ({config.mixer})"
        raise UserError(f"{found}; lower it, or raise that in a new model: a trained one cannot be extended")
    check_trainable(config)
    return config


def widen_horizons(model: LionModel, stored: LionConfig) -> None:
    """Widen the horizons of a model with the weights of a trained one, whose configuration is `stored`, if its own
    `decay_horizon` is another."""
    horizon = model.config.decay_horizon
    if horizon not in (None, stored.decay_horizon):
        if model.config.channel_decays:
            raise UserError(
                f"model.decay_horizon={horizon}: with channel_decays, a trained model keeps its own; omit it"
            )
        model.widen_horizons()
        log.info(f"horizons of the slower half of the heads: widened, at most to {horizon[1]:g} tokens")
        if model.config.key_weight == "none":
            log.warning("wider sums are larger, which can stall training; model.key_weight=linear keeps their size")


def set_state_passing(model: LionModel, probability: float) -> None:
    """`LionModel.set_state_passing`. Raises UserError."""
    try:
        model.set_state_passing(probability)
    except ValueError as error:
        raise UserError(f"state_passing: {error}") from None


def lion_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those settings of a stored configuration that are arguments of LionConfig."""
    return {name: settings[name] for name in ARGUMENTS if name in settings}
