"""What a job starts from: an encoder that was pretrained (src/pretrained.py), or random weights."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from src.checkpoints.pretrained import read_pretrained
from src.checkpoints.reading import load_all
from src.data.tokenizers import vocabulary_digest
from src.errors import UserError
from src.glue.config import FinetuneConfig
from src.glue.tasks import Task
from src.lion import LionConfig, LionForSequenceClassification
from src.training import registry


@dataclass
class Start:
    """Sizes, weights of the encoder (None: random ones), tokenizer, and where they are from."""

    config: dict[str, Any]
    weights: dict[str, Tensor] | None
    tokenizer: PreTrainedTokenizerBase
    name: str

    def digest(self) -> dict[str, Any]:
        """What a result depends on, whatever the path: the model's settings, its weights and its vocabulary."""
        found = hashlib.sha256()
        for name, tensor in sorted((self.weights or {}).items()):
            found.update(name.encode())
            found.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
        return {
            "model": registry.lion_arguments(self.config),
            "weights": found.hexdigest() if self.weights is not None else "random",
            "vocabulary": vocabulary_digest(self.tokenizer),
        }


def read_start(config: FinetuneConfig, path: str | None = None) -> Start:
    """Read `path`, or the starting checkpoint, or make up a random start. Raises UserError where none can be."""
    name = path or config.starting_checkpoint_load_path
    if name is None:
        if config.tokenizer_name is None:
            raise UserError("starting_checkpoint_load_path is not set; name a checkpoint, or set tokenizer_name to start from random weights")  # fmt: skip
        tokenizer = registry.build_tokenizer(config.tokenizer_name, config.max_seq_len)
        settings = registry.build_lion_config(config.model, tokenizer, config.max_seq_len).to_dict()
        return Start(settings, None, tokenizer, "random weights")
    pretrained = read_pretrained(name, "starting_checkpoint_load_path")
    fresh = config.from_scratch and path is None
    tokenizer = own = pretrained.tokenizer
    if config.tokenizer_name is not None:
        tokenizer = registry.build_tokenizer(config.tokenizer_name, config.max_seq_len)
        if own is not None and not fresh and vocabulary_digest(own) != vocabulary_digest(tokenizer):
            raise UserError(f"tokenizer_name: {config.tokenizer_name} is not the tokenizer of {name}; leave it out")
    if tokenizer is None:
        raise UserError(f"{name} holds no tokenizer; set tokenizer_name")
    # Vocabulary and padding are the checkpoint's, not the tokenizer's, rounded.
    changed = {**registry.lion_arguments(pretrained.config), **config.model}
    settings = registry.build_lion_config(changed, tokenizer, config.max_seq_len).to_dict()
    if fresh:
        return Start(settings, None, tokenizer, f"random weights, of the sizes of {name}")
    return Start(settings, pretrained.encoder(), tokenizer, name)


def build_model(start: Start, task: Task) -> LionForSequenceClassification:
    """A classifier with the starting encoder: all of it, but for the pooler that pretraining does not have."""
    names = {"id2label": dict(enumerate(task.labels)), "label2id": {label: i for i, label in enumerate(task.labels)}}
    labels = {"num_labels": 1, "problem_type": "regression"} if task.regression else names
    settings = registry.lion_arguments(start.config)
    model = LionForSequenceClassification(LionConfig(**settings, **labels))
    if start.weights is not None:
        own = model.lion.state_dict()
        fresh = {
            name: tensor for name, tensor in own.items() if name.startswith("pooler.") and name not in start.weights
        }
        load_all(model.lion, {**fresh, **start.weights}, start.name)
    return model
