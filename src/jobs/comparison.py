"""The paired bootstrap: how much better one set of scores is than another of the same examples."""

from collections.abc import Sequence
from typing import NamedTuple


class Difference(NamedTuple):
    mean: float  # this and the 95% confidence interval are on the scores' scale of 0 to 1
    low: float
    high: float
    p: float

    def __str__(self) -> str:
        return f"{100 * self.mean:+.2f} [{100 * self.low:+.2f}, {100 * self.high:+.2f}], p = {self.p:.3f}"


def of_resamples(mean: float, gains: Sequence[float]) -> Difference:
    """Return a difference from its value in each resample."""
    import torch

    values = torch.tensor(gains, dtype=torch.float64)
    low, high = torch.quantile(values, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    # How often a resample shows the opposite sign; 1 added to each count keeps p above 0 (Davison & Hinkley 1997, 4.2).
    opposite = min(int((values <= 0).sum()), int((values >= 0).sum()))
    return Difference(mean, low, high, min(1.0, 2 * (opposite + 1) / (len(gains) + 1)))


def paired(first: Sequence[float], second: Sequence[float], resamples: int = 1000) -> Difference:
    """Return how much higher the mean of the second scores is, of the same examples in the same order."""
    import numpy as np

    gains, draw = np.subtract(second, first), np.random.default_rng(0)
    means = [float(gains[draw.integers(len(gains), size=len(gains))].mean()) for _ in range(resamples)]
    return of_resamples(float(gains.mean()), means)
