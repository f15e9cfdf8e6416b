"""C17 and C18: the schedule of the KL budget, and the mismatch of engine and trainer that is taken off it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import mpmath
import torch

from logra_ref.step_size import MismatchTracker, cosine_budget
from validation.checks.kl import worst
from validation.claim import Comparison, Measurement, Setting, claim

HORIZONS = (300, 1000, 1500)
"""The main runs, the long run, Figure 6."""
DOUBLE = "fp64: a few roundings of 1e-16"


def exact_budget(u: int, horizon: int, *, shift: int = 1, intervals: int = 1, half: str = "0.5") -> mpmath.mpf:
    """The schedule at update u to 40 digits; ``shift``, ``intervals``, ``half``: its ones and its ½, for wrong ones."""
    with mpmath.workdps(40):
        top, bottom, factor = (mpmath.mpf(x) for x in ("2e-4", "2e-5", half))
        return bottom + (top - bottom) * factor * (1 + mpmath.cospi(mpmath.mpf(u - shift) / (horizon - intervals)))


def only_update() -> float:
    """The budget where H = 1; a schedule that divides by H − 1 has none, which counts as 0."""
    try:
        return cosine_budget(1, horizon=1)
    except ZeroDivisionError:
        return 0.0


def worst_of_schedule(horizon: int, schedule: Callable[[int], float | mpmath.mpf]) -> float:
    """``schedule(u)`` over the exact budget, u = 1…H: the ratio farthest from 1."""
    return worst(float(schedule(u) / exact_budget(u, horizon)) for u in range(1, horizon + 1))


@claim("C17", "budget schedule: 2e-4 at first, 2e-5 at update H, a cosine between, constant after", "D.1")
def schedule(setting: Setting) -> Measurement:
    """The ends, every update between, the sum, what comes after, and H = 1."""
    after = [cosine_budget(u, horizon=h) for h in HORIZONS for u in range(h, 3 * h)]
    returning = [float(exact_budget(u, 300)) for u in range(300, 900)]
    comparisons = [
        Comparison(
            what="budget of the first update, H = 300",
            expected=2e-4,
            measured=cosine_budget(1),
            tolerance=1e-18,
            reason=DOUBLE,
            oracle="the paper",
            control="without the ½",
            control_measured=float(exact_budget(1, 300, half="1")),
            unit="nats",
        ),
        Comparison(
            what="budget of update H = 300",
            expected=2e-5,
            measured=cosine_budget(300),
            tolerance=1e-18,
            reason=DOUBLE,
            oracle="the paper",
            control="H in place of H − 1",
            control_measured=float(exact_budget(300, 300, intervals=0)),
            unit="nats",
        ),
    ]
    slips = ({"intervals": 0}, {"shift": 0}, {"intervals": 0})
    for horizon, slip in zip(HORIZONS, slips, strict=True):
        comparisons.append(
            Comparison(
                what=f"budget over the cosine, the worst of u = 1…{horizon}",
                expected=1,
                measured=worst_of_schedule(horizon, lambda u, h=horizon: cosine_budget(u, horizon=h)),
                tolerance=1e-13,
                reason="fp64: the cosine is good to 1e-16 of δ_max, ten times δ_min",
                oracle="mpmath's cosine, 40 digits",
                control="H in place of H − 1" if "intervals" in slip else "u in place of u − 1",
                control_measured=worst_of_schedule(horizon, lambda u, h=horizon, s=slip: exact_budget(u, h, **s)),
            )
        )
    comparisons += [
        Comparison(
            what="KL that 300 updates may spend together",
            expected=0.033,
            measured=math.fsum(cosine_budget(u) for u in range(1, 301)),
            tolerance=1e-16,
            reason=DOUBLE,
            oracle="the cosine is odd about the middle: H (δ_max + δ_min)/2",
            control="H in place of H − 1",
            control_measured=float(sum(exact_budget(u, 300, intervals=0) for u in range(1, 301))),
            unit="nats",
        ),
        Comparison(
            what="largest budget from update H to 3H",
            expected=2e-5,
            measured=max(after),
            tolerance=0,
            reason="constant",
            oracle="the paper",
            control="a cosine that goes on",
            control_measured=max(returning),
            unit="nats",
        ),
        Comparison(
            what="smallest budget from update H to 3H",
            expected=2e-5,
            measured=min(after),
            tolerance=0,
            reason="constant",
            oracle="the paper",
            control="no step after H",
            control_measured=0.0,
            unit="nats",
        ),
        Comparison(
            what="budget of the only update of H = 1",
            expected=2e-5,
            measured=only_update(),
            tolerance=0,
            reason="the update H has δ_min",
            oracle="the paper's δ_H; its formula divides by H − 1 = 0",
            control="the first update of a longer schedule",
            control_measured=cosine_budget(1, horizon=2),
            unit="nats",
        ),
    ]
    data = {str(h): [[u, cosine_budget(u, horizon=h)] for u in range(1, 1802, 20)] for h in HORIZONS}
    return Measurement(comparisons, data={"schedules": data})


Measured = float | None
EDGES: tuple[Measured, ...] = (
    None,
    1e-5,
    3e-5,
    -2e-5,
    math.nan,
    2e-5,
    math.inf,
    -math.inf,
    0.02,
    0.0,
    None,
    -1.0,
    5e-5,
)
"""No measurement at first and later, negative ones, one that is far above the budget, numbers that are none."""


def exact_mismatch(
    scheduled: Fraction,
    measurements: Sequence[Measured],
    *,
    weight: Fraction = Fraction(3, 10),
    floor: Fraction | None = Fraction(1, 2),
    clamp: bool = True,
    decay_without: bool = False,
    subtract_without: bool = False,
) -> list[tuple[Fraction, Fraction]]:
    """(effective budget, κ) after each measurement, in fractions. The options are for wrong formulas."""
    kappa, found = Fraction(0), []
    for measured in measurements:
        valid = measured is not None and math.isfinite(measured)
        if valid or decay_without:
            taken = Fraction(measured) if valid else Fraction(0)
            kappa = (1 - weight) * kappa + weight * (max(Fraction(0), taken) if clamp else taken)
        budget = scheduled - kappa if valid or subtract_without else scheduled
        found.append((budget if floor is None else max(budget, floor * scheduled), kappa))
    return found


def tracked(scheduled: float, measurements: Sequence[Measured]) -> list[tuple[float, float]]:
    """(effective budget, κ) after each measurement, by ``logra_ref``."""
    tracker = MismatchTracker()
    return [(tracker.budget(scheduled, measured), tracker.smoothed) for measured in measurements]


def random_measurements(setting: Setting, count: int) -> list[Measured]:
    """Measurements of the size of a budget, of either sign, every fifth of them missing."""
    values = (torch.randn(count, generator=setting.generator("steps/mismatch"), dtype=torch.float64) * 1e-4).tolist()
    return [None if i % 5 == 3 else value for i, value in enumerate(values)]


def example(setting: Setting) -> list[Measured]:
    """Sixty updates for the plot: a drift upwards from 21 to 40, and a gap without measurements from 46 to 50."""
    noise = (torch.randn(60, generator=setting.generator("steps/example"), dtype=torch.float64) * 3e-5).tolist()
    drift = [1.5e-4 if 20 <= u < 40 else 1e-5 for u in range(60)]
    return [None if 45 <= u < 50 else drift[u] + noise[u] for u in range(60)]


@claim("C18", "mismatch: clamped at 0, smoothed by 0.3, floor of 50 %, nothing without a valid measurement", "D.1")
def mismatch(setting: Setting) -> Measurement:
    """Two sequences in fractions; the floor, the clamp, the smoothing and missing measurements each alone."""
    scheduled = 2e-4
    sequence = [*EDGES, *random_measurements(setting, 100 if setting.quick else 1000)]
    ours, exact = tracked(scheduled, sequence), exact_mismatch(Fraction(scheduled), sequence)

    def off(found: Sequence[tuple[Any, Any]], which: int) -> float:
        # An infinite κ is far off as well, but has no place in JSON.
        return min(1.0, max(abs(float(a[which] - b[which])) for a, b in zip(found, exact, strict=True)))

    def wrong(which: int, **change: Any) -> float:
        return off(exact_mismatch(Fraction(scheduled), sequence, **change), which)

    negative, steady, missing = [3e-5, -1.0], [4e-5] * 5, [3e-5, None, math.nan, math.inf]
    tolerance = {"tolerance": 1e-17, "reason": "fp64: 1e-16 of numbers up to 1e-2", "unit": "nats"}
    comparisons = [
        Comparison(
            what=f"effective budget, largest difference over {len(sequence)} updates",
            expected=0,
            measured=off(ours, 0),
            oracle="the recursion in fractions",
            control="no floor",
            control_measured=wrong(0, floor=None),
            **tolerance,
        ),
        Comparison(
            what=f"κ, largest difference over {len(sequence)} updates",
            expected=0,
            measured=off(ours, 1),
            oracle="the recursion in fractions",
            control="weights swapped: 0.3 κ + 0.7 measured",
            control_measured=wrong(1, weight=Fraction(7, 10)),
            **tolerance,
        ),
        Comparison(
            what="κ after 3e-5 and −1",
            expected=6.3e-6,
            measured=tracked(scheduled, negative)[-1][1],
            oracle="0.7 · 0.3 · 3e-5",
            control="no clamp at 0",
            control_measured=float(exact_mismatch(Fraction(scheduled), negative, clamp=False)[-1][1]),
            **tolerance,
        ),
        Comparison(
            what="effective budget after a mismatch of 0.02, a hundred times the budget",
            expected=1e-4,
            measured=tracked(scheduled, [0.02])[-1][0],
            oracle="half of 2e-4",
            control="no floor",
            control_measured=float(exact_mismatch(Fraction(scheduled), [0.02], floor=None)[-1][0]),
            **tolerance,
        ),
        Comparison(
            what="κ after five measurements of 4e-5",
            expected=4e-5 * (1 - 0.7**5),
            measured=tracked(scheduled, steady)[-1][1],
            oracle="the geometric sum 4e-5 (1 − 0.7⁵)",
            control="weights swapped",
            control_measured=float(exact_mismatch(Fraction(scheduled), steady, weight=Fraction(7, 10))[-1][1]),
            **tolerance,
        ),
        Comparison(
            what="effective budget where κ = 9e-6 is held and nothing was measured",
            expected=2e-4,
            measured=min(budget for budget, _ in tracked(scheduled, missing)[1:]),
            oracle="the scheduled budget",
            control="κ subtracted all the same",
            control_measured=float(exact_mismatch(Fraction(scheduled), missing, subtract_without=True)[-1][0]),
            **tolerance,
        ),
        Comparison(
            what="κ after 3e-5, nothing, NaN and ∞",
            expected=9e-6,
            measured=tracked(scheduled, missing)[-1][1],
            oracle="0.3 · 3e-5, kept",
            control="κ decays when nothing was measured",
            control_measured=float(exact_mismatch(Fraction(scheduled), missing, decay_without=True)[-1][1]),
            **tolerance,
        ),
    ]
    shown = example(setting)
    shown_budget, kappa = (list(column) for column in zip(*tracked(scheduled, shown), strict=True))
    data = {"scheduled": scheduled, "measured": shown, "budget": shown_budget, "kappa": kappa}
    return Measurement(comparisons, data=data)
