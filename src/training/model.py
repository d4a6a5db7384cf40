"""What our Composer models share: bfloat16 on a CPU, and the model's class in a checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch
from composer.models import HuggingFaceModel


class AutocastModel(HuggingFaceModel):
    """A HuggingFaceModel that can compute in bfloat16 on a CPU, where Composer has no mixed precision of its own."""

    cpu_bfloat16 = False

    def __init__(self, model: torch.nn.Module, *arguments: Any, **options: Any):
        super().__init__(model, *arguments, **options)
        self.model_class = f"{type(model).__module__}.{type(model).__name__}"

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.cpu_bfloat16)

    def forward(self, batch: Mapping[str, Any]) -> Any:
        with self.autocast():
            return super().forward(batch)

    def get_metadata(self) -> dict[str, Any]:
        """Return what a checkpoint records about the model: its own class, even after FSDP has wrapped it."""
        metadata = super().get_metadata()
        metadata["model"]["config"]["class"] = self.model_class
        return metadata
