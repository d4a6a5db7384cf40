"""Learning-rate schedules besides Composer's."""

import math
from types import SimpleNamespace

from composer import State, Time, Timestamp, TimeUnit, optim

from src.training.epochs import steps_left


def elapsed(state: State) -> float:
    """Return the fraction of a run that is over. Composer's counts whole epochs if the run's duration is in epochs."""
    if state.max_duration.unit != TimeUnit.EPOCH:
        return min(1.0, state.get_elapsed_duration().value)
    now, done = state.timestamp, state.timestamp.batch_in_epoch.value
    left = steps_left(state.train_dataloader, now) if done else None
    share = 0 if left is None else done / (done + left)  # of this epoch; earlier ones may have had other batch sizes
    return min(1.0, (now.epoch.value + share) / state.max_duration.value)


class WarmupStableDecayScheduler(optim.ComposerScheduler):
    """Linear warm-up, a constant rate, and over the last fraction `decay` of the run a linear decay to `alpha_f` of it.
    Nothing before the decay depends on the run's length: it can be extended (arXiv:2404.06395, section 4)."""

    def __init__(self, t_warmup: str, decay: float = 0.1, alpha_f: float = 0.0):
        self.warmup = optim.ConstantWithWarmupScheduler(t_warmup)
        self.decay = decay
        self.alpha_f = alpha_f

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        decayed = max(0.0, 1 - (1 - elapsed(state)) / self.decay)
        return self.warmup(state, ssr) * (1 - decayed * (1 - self.alpha_f))


class CosineOverRunScheduler(optim.ComposerScheduler):
    """timm's schedule, which DeiT uses: linear from `alpha_i` over `t_warmup`, then a half-wave of the cosine, from 1
    to `alpha_f`, that began with the run. All are fractions of the rate. `per_epoch`: set it once an epoch, as those
    scripts do; the run's duration must then be in epochs. Composer asks for a step's rate before it counts the previous
    step, so the first step of an epoch still has the rate of the one before."""

    def __init__(self, t_warmup: str = "0ba", alpha_i: float = 0.0, alpha_f: float = 0.0, per_epoch: bool = False):
        warms_up = Time.from_timestring(t_warmup).value > 0
        self.warmup = optim.LinearScheduler(alpha_i, 1.0, t_warmup) if warms_up else None
        self.alpha_f, self.per_epoch = alpha_f, per_epoch

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        if self.per_epoch:
            if state.max_duration.unit != TimeUnit.EPOCH:
                raise ValueError("per_epoch needs max_duration in epochs (ep)")
            epoch, steps = state.timestamp.epoch.value, int(state.dataloader_len)
            now = Timestamp(epoch=epoch, batch=epoch * steps)
            state = SimpleNamespace(timestamp=now, max_duration=state.max_duration, dataloader_len=state.dataloader_len)
        if self.warmup is not None and (rate := self.warmup(state, ssr)) < 1:
            return rate
        return self.alpha_f + (1 - self.alpha_f) * (1 + math.cos(math.pi * elapsed(state))) / 2
