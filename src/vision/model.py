"""The image encoder as a Composer model for classification: its losses, with or without a teacher, and its metrics."""

from collections.abc import Mapping
from typing import Any

from composer.metrics import LanguageCrossEntropy
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from src.lion import LionForImageClassification
from src.lion.mixers import MIXERS
from src.training.metrics import MajorityAccuracy
from src.training.trainer import AutocastModel
from src.vision.config import DistillationConfig, LossConfig
from src.vision.teachers import Teacher


class Top1(MulticlassAccuracy):
    """Fraction of images whose most probable class is right."""

    def __init__(self, classes: int):
        super().__init__(classes, average="micro")


class Top5(MulticlassAccuracy):
    """Fraction of images whose class is among the five most probable, or among all if there are fewer."""

    def __init__(self, classes: int):
        super().__init__(classes, average="micro", top_k=min(5, classes))


class CrossEntropy(LanguageCrossEntropy):
    """Mean over images, where Composer's class of this name takes the mean of the batches' means."""


class LionImageClassifier(AutocastModel):
    """Image classification with mixed, smoothed targets. Composer's own model would compute the loss of the labels."""

    def __init__(
        self,
        model: LionForImageClassification,
        processor: Mapping[str, Any],
        loss: LossConfig,
        distillation: DistillationConfig,
        teacher: Teacher | None = None,
    ):
        classes = model.config.num_labels
        measured = [CrossEntropy(), Top1(classes), Top5(classes), MajorityAccuracy(classes)]
        super().__init__(model, None, use_logits=True, metrics=[], eval_metrics=measured)
        self.processor, self.loss_config, self.distillation = processor, loss, distillation
        self.teacher = (teacher,)  # in a tuple, so that its weights are neither trained, averaged, sharded nor saved
        self.layer_parameters = sum(parameter.numel() for parameter in model.lion.layers.parameters())
        for layer in model.lion.layers:  # the units that Composer's FSDP shards, and recomputes if asked to
            layer._fsdp_wrap = layer._activation_checkpointing = True

    def forward(self, batch: Mapping[str, Tensor]) -> Any:
        return super().forward({"pixel_values": batch["pixel_values"]})

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of a training batch, whose targets are (B, classes): soft cross entropy; or, for `binary`,
        the mean over classes of binary ones, with 1 where a label has any weight (DeiT III, arXiv:2204.07118)."""
        (teacher,), weight, targets = self.teacher, self.distillation.weight, batch["targets"]
        # Without a teacher, both tokens learn the labels: their mean is what is evaluated.
        has_token = teacher is not None and outputs.get("class_logits") is not None
        logits = (outputs["class_logits"] if has_token else outputs["logits"]).float()
        if self.loss_config.kind == "binary":
            loss = F.binary_cross_entropy_with_logits(logits, (targets > 0).float())
        else:
            loss = F.cross_entropy(logits, targets)
        if teacher is None:
            return loss
        student = outputs["distillation_logits"].float() if has_token else logits
        return (1 - weight) * loss + weight * self.distilled(student, teacher(batch["pixel_values"]))

    def distilled(self, logits: Tensor, teacher: Tensor) -> Tensor:
        """Return DeiT's loss of what a teacher predicts (arXiv:2012.12877): hard, the cross entropy of its classes;
        soft, the divergence from its probabilities at a temperature, times its square, per image and class."""
        if self.distillation.kind == "hard":
            return F.cross_entropy(logits, teacher.argmax(1))
        temperature = self.distillation.temperature
        student, teacher = (F.log_softmax(x / temperature, 1) for x in (logits, teacher))
        return F.kl_div(student, teacher, reduction="sum", log_target=True) * temperature**2 / logits.numel()

    def eval_forward(self, batch: Mapping[str, Tensor], outputs: Any = None) -> Tensor:
        """Return logits, (B, classes)."""
        self.labels = batch["labels"]
        outputs = self.forward(batch) if outputs is None else outputs
        return outputs["logits"].float()

    def flops_per_batch(self, batch: Mapping[str, Tensor]) -> float:
        """Return the operations of a training step: 6 per weight and token, and those of mixing."""
        rows, length = len(batch["pixel_values"]), token_count(self.config, batch["pixel_values"].shape[2:])
        mixing = self.config.num_hidden_layers * MIXERS[self.config.mixer].products_per_token(self.config, length)
        return 6.0 * (self.layer_parameters + mixing) * rows * length


def token_count(config: Any, size: tuple[int, int]) -> int:
    """Return the tokens of an image of (height, width) pixels."""
    return config.num_prefix_tokens + (size[0] // config.patch_size) * (size[1] // config.patch_size)
