"""Dropout, drawn four entries at a time on a CPU."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Dropout(nn.Dropout):
    """`nn.Dropout`, computed by `dropout`."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training else x


def dropout(x: Tensor, p: float) -> Tensor:
    """x, (...), with each entry 0 with probability p, whatever the others are, and the rest divided by 1 − p.

    On a CPU torch draws one number an entry, on one core: a tenth of a training step at base size. Here 64 random bits
    serve four entries, and p is rounded to a multiple of 2^-16.
    """
    dropped = round(p * 2**16)
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not 0 < dropped < 2**16:
        return F.dropout(x, p)
    draws = x.new_empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    kept = draws.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - 2**15
    return torch.where(kept, x, 0).mul_(2**16 / (2**16 - dropped))
