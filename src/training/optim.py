"""Composer's optimizer, through torch's fused kernel."""

import torch
from composer.optim import DecoupledAdamW


class FusedDecoupledAdamW(DecoupledAdamW):
    """Adam whose weight decay follows the learning rate's schedule but not its height:  w ← (1 - lr_t/lr · weight_decay) w.

    The arithmetic of Composer's class (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2) in one pass over the
    memory, where Composer makes ten a parameter and waits for the GPU at each.
    """

    def step(self, closure=None):
        """One update. torch multiplies weight decay by lr_t; for as long as it works, ours is divided by lr."""
        decays = [group["weight_decay"] for group in self.param_groups]
        for group, decay in zip(self.param_groups, decays):
            group["fused"] = True
            group["weight_decay"] = decay / (group["initial_lr"] or 1.0)
        try:
            return torch.optim.AdamW.step(self, closure)
        finally:
            for group, decay in zip(self.param_groups, decays):
                group["weight_decay"] = decay
