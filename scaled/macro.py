"""The macro-average of evaluations over several tasks: each task counts the same, however many problems it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from scaled.bootstrap import AT_ONCE, LEVEL, RESAMPLES


def macro_average(sources: Sequence[str], credits: np.ndarray, graded: np.ndarray, *, seed: int) -> dict[str, Any]:
    """``macro_score``, the equally weighted mean of the tasks' mean credits (C.2); its interval; and those means.

    ``sources`` is the task of each problem, ``credits`` (problems, samples) the verifier's scores in [0, 1], and
    ``graded`` which of them there are. The interval is the 95 % percentile one of drawing whole problems again within
    each task. All are None where there are fewer than two tasks; the score is, where a task has nothing graded, and the
    interval, where one has in every draw.
    """
    tasks = list(dict.fromkeys(sources))
    if len(tasks) < 2:
        return {"macro_score": None, "macro_score_interval": None, "by_source": None}
    of = np.array([tasks.index(source) for source in sources])
    above, below = (credits * graded).sum(axis=1), graded.sum(axis=1)
    counts = [below[of == task].sum() for task in range(len(tasks))]
    means = [float(above[of == task].sum() / count) if count else None for task, count in enumerate(counts)]
    found = {"macro_score": None, "macro_score_interval": None, "by_source": dict(zip(tasks, means, strict=True))}
    if None in means:
        return found
    generator = np.random.default_rng(seed)
    drawn = [_drawn_means(above[of == task], below[of == task], generator) for task in range(len(tasks))]
    found |= {"macro_score": float(np.mean(means))}
    whole = np.mean(drawn, axis=0)
    whole = whole[~np.isnan(whole)]  # without the draws in which a task has nothing graded
    if not len(whole):
        return found
    low, high = np.quantile(whole, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return found | {"macro_score_interval": (float(low), float(high))}


def _drawn_means(above: np.ndarray, below: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Means of one task over problems drawn again, NaN where nothing drawn was graded."""
    means = []
    for block in np.array_split(np.arange(RESAMPLES), -(-RESAMPLES * len(below) // AT_ONCE)):
        drawn = generator.integers(len(below), size=(len(block), len(below)))
        count = below[drawn].sum(axis=1)
        means.append(np.where(count > 0, above[drawn].sum(axis=1) / np.maximum(count, 1), np.nan))
    return np.concatenate(means)
