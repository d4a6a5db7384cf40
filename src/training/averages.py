"""The moving average of a model's weights, saved with the run and evaluated in their place."""

from typing import Any

from composer import Event, State, algorithms
from torch.nn.parallel import DistributedDataParallel

WRAPPED = "module."  # before the names of a model's parameters once DDP has wrapped it


class EMA(algorithms.EMA):
    """Composer's, w ← s·w + (1 − s)·x, whose checkpoints resume on any number of devices. Its class of this name stores
    averages under DDP's names, and would then leave those of other names as they are."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["ema_model"] = {kind: _renamed(averages, "") for kind, averages in state["ema_model"].items()}
        return state

    def match(self, event: Event, state: State) -> bool:
        """Return whether to act; names follow those of the model, which DDP may wrap after a checkpoint is loaded."""
        if self.ema_model is not None:
            prefix = WRAPPED if isinstance(state.model, DistributedDataParallel) else ""
            for kind in ("named_parameters_dict", "named_buffers_dict"):
                averages = getattr(self.ema_model, kind)
                if not all(name.startswith(WRAPPED) == bool(prefix) for name in averages):
                    setattr(self.ema_model, kind, _renamed(averages, prefix))
        return super().match(event, state)


def _renamed(averages: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {prefix + name.removeprefix(WRAPPED): tensor for name, tensor in averages.items()}
