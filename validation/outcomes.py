"""What is read off the logs of learning runs: ends, best stretches, trends, and intervals over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.stats

from validation.claim import Comparison
from validation.experiments import EVALUATE_EVERY, TASK, Log

SHUFFLED = "advantages shuffled among the answers"
BLIND = (2 * TASK.modulus - 1) / TASK.modulus**2  # always the largest number: the best answer that ignores the prompt


def stretches(log: Log, updates: int) -> np.ndarray:
    """The mean accuracy of every stretch of so many updates in a row, the last one at the end."""
    count = updates // EVALUATE_EVERY
    return np.convolve(log.accuracy[1:], np.ones(count) / count, mode="valid")


def end(log: Log, updates: int) -> float:
    """The mean accuracy over the last updates."""
    return float(stretches(log, updates)[-1])


def retained(log: Log, updates: int) -> float:
    """The end over the best stretch of the same length: 1 where a run ends at its best."""
    found = stretches(log, updates)
    return float(found[-1] / found.max())


def slope(ranks: Sequence[float], accuracies: Sequence[float]) -> float:
    """Percentage points of accuracy for each doubling of the rank: the least-squares line over log₂ r."""
    return 100 * float(scipy.stats.linregress(np.log2(ranks), accuracies).slope)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean over seeds and its 95 % interval by Student's t: (mean, low, high).

    Of fewer than four seeds, as ``--quick`` has, which say nothing about their spread, it is their range.
    """
    sample = np.asarray(values, dtype=float)
    mean, error = float(sample.mean()), float(scipy.stats.sem(sample))
    if len(sample) < 4 or error == 0:
        return mean, float(sample.min()), float(sample.max())
    low, high = scipy.stats.t.interval(0.95, len(sample) - 1, loc=mean, scale=error)
    return mean, float(low), float(high)


def kl_ratio(logs: Sequence[Log], percentile: float = 50, *, q_factor: float = 1.0) -> float:
    """Realised over predicted KL, α² q: the median over all updates, or another percentile.

    ``q_factor`` makes the prediction wrong by that factor.
    """
    realised = np.concatenate([log.realised for log in logs])
    predicted = np.concatenate([np.square(log.alpha) * log.q for log in logs])
    return float(np.percentile(realised / (q_factor * predicted), percentile))


def learns(runs: Sequence[Log], unlearned: Sequence[Log], updates: int) -> Comparison:
    """Whether more is learnt than an answer that ignores the prompt; without signal it must not be."""
    return Comparison(
        "accuracy at the end, lower end of its 95 % interval over seeds",
        expected=BLIND,
        measured=interval([end(log, updates) for log in runs])[1],
        tolerance=0,
        reason="more than blind guessing, whatever the seed",
        oracle="the best answer that ignores the prompt is right for (2m − 1)/m² of the prompts",
        control=SHUFFLED,
        control_measured=interval([end(log, updates) for log in unlearned])[1],
        relation="≥",
    )


def curve(runs: Sequence[Log]) -> dict[str, Any]:
    """Mean accuracy over seeds with its interval, at each evaluation."""
    found = [interval(values) for values in np.transpose([log.accuracy for log in runs])]
    mean, low, high = np.round(np.transpose(found), 4).tolist()
    updates = [EVALUATE_EVERY * i for i in range(len(mean))]
    return {"update": updates, "mean": mean, "low": low, "high": high}


def averaged(runs: Sequence[Log]) -> np.ndarray:
    """The realised KL of each update, the mean over seeds, as far as all runs go: batches without signal make none."""
    least = min(len(log.realised) for log in runs)
    return np.mean([log.realised[:least] for log in runs], axis=0)


def thinned(values: Sequence[float], points: int = 60) -> dict[str, Any]:
    """Means of some sixty blocks of a long series, for a plot: update and value."""
    blocks = np.array_split(np.asarray(values, dtype=float), min(points, len(values)))
    ends = np.cumsum([len(block) for block in blocks])
    return {"update": ends.tolist(), "value": [float(f"{np.mean(block):.4g}") for block in blocks]}
