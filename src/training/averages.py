"""The moving average of a model's weights, saved with the run and evaluated in their place."""

from itertools import chain

from composer import Event, State, TimeUnit, algorithms

from src.training.schedules import elapsed

WRAPPED = "module."  # before the names of a model's parameters once DDP has wrapped it


class EMA(algorithms.EMA):
    """Composer's, w ← s·w + (1 − s)·x, whose checkpoints resume on any number of devices. Its class of this name stores
    averages under DDP's names, and would then leave those of other names as they are."""

    half_life = None  # read by Composer where only smoothing is given

    def activate(self, state: State) -> None:
        """Put the averages, if there are any yet, in the weights' place, as in an evaluation."""
        if self.ema_started:
            self._ensure_ema_weights_active(state)

    def _should_start(self, state: State) -> bool:
        if self.ema_start.unit != TimeUnit.DURATION:
            return super()._should_start(state)
        return self.ema_start.value <= elapsed(state)

    def match(self, event: Event, state: State) -> bool:
        """Return whether to act. Before training and evaluation, averages get the names that the model has by then."""
        if self.ema_model is not None and event in self.move_device_events:
            own = {name for name, _ in chain(state.model.named_parameters(), state.model.named_buffers())}
            for kind in ("named_parameters_dict", "named_buffers_dict"):
                stored = getattr(self.ema_model, kind)
                setattr(self.ema_model, kind, {_renamed(name, own): average for name, average in stored.items()})
        return super().match(event, state)


def _renamed(name: str, own: set[str]) -> str:
    candidates = name, WRAPPED + name, name.removeprefix(WRAPPED)
    return next((each for each in candidates if each in own), name)
