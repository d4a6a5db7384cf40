"""Composer's early stopping, for runs that resume."""

from typing import Any

import torch
from composer import Logger, State, Timestamp, TimeUnit
from composer.callbacks import EarlyStopper

from src.errors import UserError


class ResumableEarlyStopper(EarlyStopper):
    """End the run when `monitor` of `dataloader_label` has not improved for `patience`, in epochs or batches.

    The best value is saved with the run. Raises UserError for a metric that is not measured.
    """

    def __init__(
        self,
        monitor: str = "LanguageCrossEntropy",
        dataloader_label: str = "eval",
        comp: str | None = None,
        min_delta: float = 0.0,
        patience: str | int = "1ep",
    ):
        if comp is None and "crossentropy" in monitor.lower():  # Composer recognizes losses by other names
            comp = "less"
        super().__init__(monitor, dataloader_label, comp, min_delta, patience)
        if self.patience.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH):
            raise ValueError(f"patience {patience} must be in epochs (ep) or batches (ba)")

    def before_load(self, state: State, logger: Logger) -> None:
        label, monitor = self.dataloader_label, self.monitor
        measured = {**state.eval_metrics, "train": state.train_metrics or {}}
        key = "callbacks.early_stopper"
        if label not in measured:
            raise UserError(f"{key}.dataloader_label={label} must be one of {', '.join(measured)}")
        if monitor not in measured[label]:
            raise UserError(f"{key}.monitor={monitor} must be one of {', '.join(measured[label])}, measured on {label}")

    def state_dict(self) -> dict[str, Any]:
        if self.best is None:
            return {}
        occurred = self.best_occurred
        return {"best": float(self.best), "epoch": occurred.epoch.value, "batch": occurred.batch.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.best = torch.tensor(state["best"])
            self.best_occurred = Timestamp(epoch=state["epoch"], batch=state["batch"])
