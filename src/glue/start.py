"""What a job starts from: a pretrained encoder, or random weights."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from src.checkpoints.pretrained import read_pretrained
from src.checkpoints.reading import load_all
from src.data.tokenizers import vocabulary_digest
from src.errors import UserError
from src.files import sha256
from src.glue.config import FinetuneConfig
from src.glue.tasks import Task
from src.lion import LionConfig, LionForSequenceClassification
from src.training.text_model import build_lion_config, build_tokenizer, lion_arguments


@dataclass
class Start:
    """Model settings, weights of the encoder (None: random), tokenizer, and their source."""

    config: dict[str, Any]
    weights: dict[str, Tensor] | None
    tokenizer: PreTrainedTokenizerBase
    name: str

    def digest(self) -> dict[str, Any]:
        """Return what results depend on, whatever its source: model settings, weights and vocabulary."""
        parts = (
            part
            for name, tensor in sorted((self.weights or {}).items())
            for part in (name.encode(), tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
        )
        return {
            "model": lion_arguments(self.config),
            "weights": sha256(parts) if self.weights is not None else "random",
            "vocabulary": vocabulary_digest(self.tokenizer),
        }


def read_start(config: FinetuneConfig, path: str | None = None) -> Start:
    """Read `path`, or else the starting checkpoint, or draw random weights. Raises UserError if that fails."""
    name = path or config.starting_checkpoint_load_path
    given = build_tokenizer(config.tokenizer_name, config.max_seq_len) if config.tokenizer_name else None
    if name is None:
        return Start(
            build_lion_config(config.model, given, config.max_seq_len).to_dict(), None, given, "random weights"
        )
    pretrained = read_pretrained(name, "starting_checkpoint_load_path")
    from_scratch = config.from_scratch and path is None
    own = pretrained.load_tokenizer()
    if given and own and not from_scratch and vocabulary_digest(own) != vocabulary_digest(given):
        raise UserError(f"tokenizer_name={config.tokenizer_name} is not the tokenizer of {name}; omit it")
    tokenizer = given or own
    if tokenizer is None:
        raise UserError(f"{name} has no tokenizer; set tokenizer_name")
    # The vocabulary size and padding token come from the checkpoint.
    arguments = {**lion_arguments(pretrained.config), **config.model}
    settings = build_lion_config(arguments, tokenizer, config.max_seq_len).to_dict()
    if from_scratch:
        return Start(settings, None, tokenizer, f"random weights, with the sizes of {name}")
    return Start(settings, pretrained.encoder(), tokenizer, name)


def build_model(start: Start, task: Task) -> LionForSequenceClassification:
    """Return a classifier with the starting encoder's weights; the pooler, absent in pretraining, may be random."""
    names = {"id2label": dict(enumerate(task.labels)), "label2id": {label: i for i, label in enumerate(task.labels)}}
    labels = {"num_labels": 1, "problem_type": "regression"} if task.regression else names
    model = LionForSequenceClassification(LionConfig(**lion_arguments(start.config), **labels))
    if start.weights is not None:
        own = model.lion.state_dict()
        pooler = {name: tensor for name, tensor in own.items() if name.startswith("pooler.")}
        load_all(model.lion, {**pooler, **start.weights}, start.name)
    return model
