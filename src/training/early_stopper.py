"""Composer's early stopping, for runs that go on."""

from typing import Any

import torch
from composer import Logger, State, Timestamp, TimeUnit
from composer.callbacks import EarlyStopper

from src.errors import UserError


class ResumableEarlyStopper(EarlyStopper):
    """Ends the run when `monitor` of `dataloader_label` has not improved for `patience`, in epochs or batches.

    A run that goes on knows the best value so far. Raises UserError for a metric that is not measured.
    """

    def __init__(
        self,
        monitor: str = "LanguageCrossEntropy",
        dataloader_label: str = "eval",
        comp: str | None = None,
        min_delta: float = 0.0,
        patience: str | int = "1ep",
    ):
        if comp is None and "crossentropy" in monitor.lower():  # Composer knows losses by their names
            comp = "less"
        super().__init__(monitor, dataloader_label, comp, min_delta, patience)
        if self.patience.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH):
            raise ValueError(f"patience {patience} is neither in epochs (ep) nor in batches (ba)")

    def before_load(self, state: State, logger: Logger) -> None:
        measured = {**state.eval_metrics, "train": state.train_metrics or {}}
        key = "callbacks.early_stopper"
        if self.dataloader_label not in measured:
            raise UserError(f"{key}.dataloader_label: {self.dataloader_label!r} is none of {', '.join(measured)}")
        if self.monitor not in (names := measured[self.dataloader_label]):
            raise UserError(f"{key}.monitor: {self.monitor!r} is none of {', '.join(names)}, measured of {self.dataloader_label}")  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        if self.best is None:
            return {}
        return {
            "best": float(self.best),
            "epoch": self.best_occurred.epoch.value,
            "batch": self.best_occurred.batch.value,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.best = torch.tensor(state["best"])
            self.best_occurred = Timestamp(epoch=state["epoch"], batch=state["batch"])
