"""The step multiplier α and its KL budget (§2.3, A.2, D.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass


def step_scale(q: float, budget: float, alpha_max: float = 3.0) -> float:
    """α = min(α_max, √(budget / q)): the largest α with α² q ≤ budget, capped; it enlarges as well as shrinks.

    q = 0 means that D does not move the policy where it was measured: α = 1. Raises ``FloatingPointError`` for a q
    that is negative or not finite, ``ValueError`` for a negative budget.
    """
    if not (math.isfinite(q) and q >= 0):
        raise FloatingPointError(f"predicted KL q = {q} is no finite number ≥ 0; nothing was changed")
    if not budget >= 0:
        raise ValueError(f"KL budget {budget} is negative")
    return 1.0 if q == 0 else min(alpha_max, math.sqrt(budget / q))


def cosine_budget(u: int, *, budget_max: float = 2e-4, budget_min: float = 2e-5, horizon: int = 300) -> float:
    """δ_u = δ_min + (δ_max − δ_min)/2 · [1 + cos(π (u−1)/(H−1))] for u = 1…H, then δ_min (D.1); H = 1: δ_min."""
    if u < 1:
        raise ValueError(f"updates are counted from 1, not from {u}")
    if u >= horizon:
        return budget_min
    return budget_min + (budget_max - budget_min) / 2 * (1 + math.cos(math.pi * (u - 1) / (horizon - 1)))


@dataclass
class MismatchTracker:
    """κ, the smoothed difference of log-probabilities between rollout engine and trainer (D.1).

    κ ← 0.7 κ + 0.3 · max(0, measured), from 0; ``measured`` is the mean over the tokens of completed responses of
    log p_engine − log p_trainer, in nats. Without a valid measurement κ is kept and nothing is subtracted.
    """

    smoothed: float = 0.0
    weight: float = 0.3
    floor: float = 0.5

    def budget(self, scheduled: float, measured: float | None) -> float:
        """Take the measurement in and return max(δ_u − κ, 0.5 δ_u), the effective budget."""
        if measured is None or not math.isfinite(measured):
            return scheduled
        self.smoothed = (1 - self.weight) * self.smoothed + self.weight * max(0.0, measured)
        return max(scheduled - self.smoothed, self.floor * scheduled)
