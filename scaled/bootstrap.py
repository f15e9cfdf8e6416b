"""Intervals by bootstrap, over problems drawn again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000
AT_ONCE = 4_000_000  # problems drawn at once: 64 MB
LEVEL = 0.95


def bootstrap_interval(
    numerators: Sequence[float], denominators: Sequence[float], *, seed: int
) -> tuple[float, float] | None:
    """The 95 % percentile interval of Σ numerators / Σ denominators, one pair a problem, problems resampled.

    Responses to one problem are not independent, so whole problems are drawn. None where no denominator is above 0;
    a sample without variation gives its own value twice.
    """
    above, below = np.asarray(numerators, float), np.asarray(denominators, float)
    if below.sum() == 0:
        return None
    generator = np.random.default_rng(seed)
    sums = []
    for block in np.array_split(np.arange(RESAMPLES), -(-RESAMPLES * len(below) // AT_ONCE)):
        drawn = generator.integers(len(below), size=(len(block), len(below)))
        sums.append([above[drawn].sum(axis=1), below[drawn].sum(axis=1)])
    above, below = np.concatenate(sums, axis=1)
    low, high = np.quantile(above[below > 0] / below[below > 0], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
