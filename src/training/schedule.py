"""The one learning-rate schedule that Composer does not have."""

from composer import State
from composer.optim import ComposerScheduler, ConstantWithWarmupScheduler

from src.errors import UserError


class WarmupStableDecayScheduler(ComposerScheduler):
    """Linear warm-up, a constant rate, and over the last `decay` of the run a line down to `alpha_f` of it.

    The constant part can be prolonged, since nothing before the decay depends on the run's length (Hu et al. 2024,
    arXiv:2404.06395, section 4). `t_warmup` is a time as Composer writes it; `decay` a share of the run between 0 and 1.
    """

    def __init__(self, t_warmup: str, decay: float = 0.1, alpha_f: float = 0.0):
        if not 0 < decay <= 1:
            raise UserError(f"scheduler.decay {decay} must be a share of the run, above 0 and at most 1")
        self.warmup = ConstantWithWarmupScheduler(t_warmup)
        self.decay = decay
        self.alpha_f = alpha_f

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        left = max(0.0, 1 - state.get_elapsed_duration().value)  # of the run
        decayed = max(0.0, 1 - left / self.decay)
        return self.warmup(state, ssr) * (1 - decayed * (1 - self.alpha_f))
