"""The encoder as a Composer model for masked language modelling: its loss and its metrics."""

from collections.abc import Mapping
from typing import Any

import torch
from composer.metrics import LanguageCrossEntropy
from torch import Tensor
from torchmetrics import Metric
from transformers import PreTrainedTokenizerBase

from src.lion import LionConfig, LionForMaskedLM
from src.lion.losses import labelled_positions
from src.lion.mixers import MIXERS
from src.training.metrics import MajorityAccuracy
from src.training.trainer import AutocastModel


class MaskedAccuracy(Metric):
    """Fraction of labels predicted correctly. Composer's metric searches for labels, which synchronizes the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("correct", default=torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        predicted = logits.max(-1).indices  # argmax, which takes four times as long on a CPU
        self.correct += (predicted == labels).sum()
        self.total += len(labels)

    def compute(self) -> Tensor:
        return self.correct / self.total


class MostFrequentTokenAccuracy(MajorityAccuracy):
    """The baseline of masked accuracy."""


class LionMLM(AutocastModel):
    """Masked language modelling: cross entropy and accuracy at the masked positions, and their baseline."""

    def __init__(self, config: LionConfig, tokenizer: PreTrainedTokenizerBase):
        model = LionForMaskedLM(config)
        measured = [LanguageCrossEntropy(), MaskedAccuracy(), MostFrequentTokenAccuracy(config.vocab_size)]
        super().__init__(model, tokenizer, use_logits=True, metrics=[MaskedAccuracy()], eval_metrics=measured)
        # Counted here, since FSDP leaves each device with a shard.
        self.layer_parameters = sum(parameter.numel() for parameter in model.lion.layers.parameters())
        self.head_parameters = sum(parameter.numel() for parameter in model.head.parameters())
        for layer in model.lion.layers:  # the units that Composer's FSDP shards, and recomputes if asked to
            layer._fsdp_wrap = layer._activation_checkpointing = True

    def flops_per_batch(self, batch: Mapping[str, Tensor]) -> float:
        """Return the operations of a training step: 6 per weight and token, the vocabulary only at labelled tokens."""
        rows, length = batch["input_ids"].shape
        mixing = self.config.num_hidden_layers * MIXERS[self.config.mixer].products_per_token(self.config, length)
        labelled = float((batch["labels"] != -100).sum())
        return 6.0 * ((self.layer_parameters + mixing) * rows * length + self.head_parameters * labelled)

    def eval_forward(self, batch: Mapping[str, Tensor], outputs: Any = None) -> Tensor:
        """Return the logits at the labelled positions, (labels, vocabulary): only they are measured."""
        labelled = batch.get("masked_positions")
        if labelled is None:
            labelled = labelled_positions(batch["labels"])
        self.labels = batch["labels"].flatten().index_select(0, labelled)
        if outputs is not None:  # of a training step, which has labelled positions only
            return outputs.logits
        inputs = {name: value for name, value in batch.items() if name in self.model_forward_args and name != "labels"}
        select = self.model.head.register_forward_pre_hook(lambda head, hidden: hidden[0].flatten(0, 1)[labelled])
        with self.autocast(), select:
            logits = self.model(**inputs).logits  # through the model, where FSDP gathers its weights
        return logits.float()

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> dict[str, Any]:
        """Update as Composer does, unless there are no labels, which its cross entropy cannot handle."""
        return super().update_metric(batch, outputs, metric) if len(self.labels) else {}
