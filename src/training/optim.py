"""Composer's optimizer with torch's fused kernel, and a schedule that Composer lacks."""

import torch
from composer import State
from composer.optim import ComposerScheduler, ConstantWithWarmupScheduler, DecoupledAdamW


class FusedDecoupledAdamW(DecoupledAdamW):
    """Adam whose weight decay follows the learning rate's schedule, not its peak:  w ← (1 - lr_t/lr · weight_decay) w.

    The arithmetic of Composer's class (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2) in one kernel, where
    Composer runs ten per parameter and synchronises the GPU at each. A subclass, so that old checkpoints still load.
    """

    def step(self, closure=None):
        """Do one update. torch multiplies weight decay by lr_t, so it is divided by lr for the duration of the call."""
        decays = [group["weight_decay"] for group in self.param_groups]
        for group, decay in zip(self.param_groups, decays):
            group["fused"] = True
            group["weight_decay"] = decay / (group["initial_lr"] or 1.0)
        try:
            return torch.optim.AdamW.step(self, closure)
        finally:
            for group, decay in zip(self.param_groups, decays):
                group["weight_decay"] = decay


class WarmupStableDecayScheduler(ComposerScheduler):
    """Linear warm-up, a constant rate, and over the last `decay` of the run a linear decay to `alpha_f` of it.

    The constant part can be extended, since nothing before the decay depends on the run's length (Hu et al. 2024,
    arXiv:2404.06395, section 4). `decay` is a fraction of the run.
    """

    def __init__(self, t_warmup: str, decay: float = 0.1, alpha_f: float = 0.0):
        self.warmup = ConstantWithWarmupScheduler(t_warmup)
        self.decay = decay
        self.alpha_f = alpha_f

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        remaining = max(0.0, 1 - state.get_elapsed_duration().value)  # fraction of the run
        decayed = max(0.0, 1 - remaining / self.decay)
        return self.warmup(state, ssr) * (1 - decayed * (1 - self.alpha_f))
