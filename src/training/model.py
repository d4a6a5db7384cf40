"""The encoder as Composer models: what the loss is, and what is measured."""

from collections.abc import Mapping
from typing import Any

import torch
from composer.metrics import LanguageCrossEntropy
from composer.models import HuggingFaceModel
from torch import Tensor
from torchmetrics import Metric
from transformers import PreTrainedTokenizerBase

from src.lion import LionConfig, LionForMaskedLM, LionForSequenceClassification
from src.lion.modeling_lion import labelled_positions


class MaskedAccuracy(Metric):
    """Share of labels that are predicted. Composer's looks for the labels among other positions, and waits for a GPU to count them."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("correct", default=torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        self.correct += (logits.argmax(-1) == labels).sum()
        self.total += len(labels)

    def compute(self) -> Tensor:
        return self.correct / self.total


class MostFrequentTokenAccuracy(Metric):
    """Share of labels that are the most frequent one: what always guessing that token gets. The floor of masked accuracy."""

    full_state_update = False

    def __init__(self, vocab_size: int):
        super().__init__()
        self.add_state("counts", default=torch.zeros(vocab_size, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        self.counts += torch.bincount(labels[labels >= 0], minlength=len(self.counts))

    def compute(self) -> Tensor:
        return self.counts.max() / self.counts.sum().clamp(min=1)


class CastingModel(HuggingFaceModel):
    """A HuggingFaceModel that can compute in bfloat16 on a CPU, where Composer has no mixed precision of its own."""

    cpu_bfloat16 = False

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.cpu_bfloat16)

    def forward(self, batch: Mapping[str, Any]) -> Any:
        with self.autocast():
            return super().forward(batch)


class LionMLM(CastingModel):
    """Masked language modelling: cross entropy and accuracy at the masked positions, and the most frequent token's share."""

    def __init__(self, config: LionConfig, tokenizer: PreTrainedTokenizerBase):
        super().__init__(
            LionForMaskedLM(config),
            tokenizer,
            use_logits=True,
            metrics=[MaskedAccuracy()],
            eval_metrics=[LanguageCrossEntropy(), MaskedAccuracy(), MostFrequentTokenAccuracy(config.vocab_size)],
        )
        # Counted here, since FSDP leaves each device with a share of them.
        self.layer_parameters, self.head_parameters = (
            sum(parameter.numel() for parameter in part.parameters())
            for part in (self.model.lion.layers, self.model.head)
        )
        for layer in self.model.lion.layers:  # the units that Composer's FSDP shards, and recomputes if asked to
            layer._fsdp_wrap = layer._activation_checkpointing = True

    def get_metadata(self) -> dict[str, Any]:
        """What a checkpoint says of the model: its own class, where FSDP has wrapped it."""
        metadata = super().get_metadata()
        metadata["model"]["config"]["class"] = f"{LionForMaskedLM.__module__}.{LionForMaskedLM.__name__}"
        return metadata

    def flops_per_batch(self, batch: Mapping[str, Tensor]) -> float:
        """Operations of a training step, forward and backward: 6 a weight and token, the vocabulary at labelled tokens only.

        Of attention, (L, L) or (C, C) matrices twice a layer; of the chunkwise form also its two D×E states. "auto" counts
        as the form that needs fewer.
        """
        config = self.config
        rows, length = batch["input_ids"].shape
        states = 2 * config.hidden_size // config.num_attention_heads
        widths = {"full": length, "chunkwise": min(config.chunk_size, length) + states, "recurrent": states}
        widths["auto"] = min(widths["full"], widths["chunkwise"])
        full = config.mixer == "softmax" or config.attention_probs_dropout_prob > 0
        width = widths["full" if full else config.attention_form]
        attention = 2 * config.num_hidden_layers * config.hidden_size * width
        labelled = float((batch["labels"] != -100).sum())
        return 6.0 * ((self.layer_parameters + attention) * rows * length + self.head_parameters * labelled)

    def eval_forward(self, batch: Mapping[str, Tensor], outputs: Any = None) -> Tensor:
        """Logits at the labelled positions, (labels, vocabulary): nothing else is measured, so nothing else is computed."""
        labelled = batch.get("masked_positions")
        if labelled is None:
            labelled = labelled_positions(batch["labels"])
        self.labels = batch["labels"].flatten().index_select(0, labelled)
        if outputs is not None:  # of the training step, which has labelled positions only
            return outputs.logits
        inputs = {name: value for name, value in batch.items() if name in self.model_forward_args and name != "labels"}
        choose = self.model.head.register_forward_pre_hook(lambda head, hidden: hidden[0].flatten(0, 1)[labelled])
        with self.autocast(), choose:
            logits = self.model(**inputs).logits  # through the whole model, where FSDP gathers its weights
        return logits.float()  # whose cross entropies are summed

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> dict[str, Any]:
        """As Composer's, where there is anything to predict: its cross entropy cannot take nothing."""
        return super().update_metric(batch, outputs, metric) if len(self.labels) else {}


class LionClassifier(CastingModel):
    """Classification or regression of a text or a pair of texts. `metrics` are torchmetrics by name."""

    def __init__(
        self, model: LionForSequenceClassification, tokenizer: PreTrainedTokenizerBase, metrics: dict[str, Metric]
    ):
        super().__init__(model, tokenizer, use_logits=True)
        self.val_metrics = metrics

    def eval_forward(self, batch: Mapping[str, Tensor], outputs: Any = None) -> Tensor:
        """Logits, (batch, classes), or predictions, (batch,), of a regression."""
        with self.autocast():
            return super().eval_forward({"labels": None, **batch}, outputs).float()  # a test set has no labels
