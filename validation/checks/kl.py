"""C07 and C08: the KL is quadratic in the step, and its coefficient is half the variance of the score rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction

import numpy as np
import scipy.special
import scipy.stats
import sympy
import torch

from logra_ref.predicted_kl import exact_kl, predicted_kl
from validation.checks.kl_symbolic import SIZES, exact_numbers, expansion_identities, score_identities
from validation.checks.proposals import (
    TEMPERATURE,
    Proposal,
    logits_along,
    scipy_kl,
    toy_proposal,
)
from validation.claim import Comparison, Measurement, Setting, claim

KL = Callable[[np.ndarray, np.ndarray, float], np.ndarray]
ROUNDING = "fp64: a few roundings of 1e-16 each, enlarged by the differences that are taken"


def kl_of(before: np.ndarray, after: np.ndarray, temperature: float) -> np.ndarray:
    """``logra_ref``'s exact KL at each position, in nats."""
    return exact_kl(torch.from_numpy(before), torch.from_numpy(after), temperature).numpy()


def slope(x: Iterable[float], y: Iterable[float]) -> float:
    """The exponent of y ∝ x^slope, by least squares on logarithms."""
    return float(scipy.stats.linregress(np.log(list(x)), np.log(list(y))).slope)


def worst(ratios: Iterable[float]) -> float:
    """Of numbers that should all be 1, the one farthest from it; NaN if any is."""
    ratios = np.asarray(list(ratios), dtype=float)
    return float(ratios[np.argmax(np.where(np.isnan(ratios), np.inf, np.abs(ratios - 1)))])


def small_steps(q: np.ndarray, low: float, high: float, count: int) -> list[float]:
    """Steps α at which the KL, about α² q, is between low² and high²."""
    return (np.geomspace(low, high, count) / math.sqrt(q.mean())).tolist()


def remainders(proposal: Proposal, q: np.ndarray, steps: list[float], kl: KL) -> list[float]:
    """|K(α) − α² q| at each step, the mean over positions of the absolute value, in nats.

    The absolute value is taken first: the cubic terms of two positions may have opposite signs, and their sum might be
    small by accident.
    """
    moved = logits_along(proposal, [0.0, *steps])
    return [float(np.abs(kl(moved[0.0], moved[a], proposal.temperature) - a**2 * q).mean()) for a in steps]


def along(proposal: Proposal, q: np.ndarray, steps: list[float]) -> dict[str, list[float]]:
    """K(α) by scipy, α² q, and the remainder with q right and 10 % off; nats, means over positions."""
    moved = logits_along(proposal, [0.0, *steps])
    kl = [float(scipy_kl(moved[0.0], moved[a], proposal.temperature).mean()) for a in steps]
    return {
        "alpha": steps,
        "kl": kl,
        "quadratic": [float(a**2 * q.mean()) for a in steps],
        "remainder": remainders(proposal, q, steps, scipy_kl),
        "off": remainders(proposal, 1.1 * q, steps, scipy_kl),
    }


def rational_points(setting: Setting, count: int) -> list[tuple[list[sympy.Rational], ...]]:
    """Logits, rates (eighths, exact in fp64, not all equal) and a temperature, for V = 2, 3, 4 in turn."""
    generator = setting.generator("kl/rational points")
    points = []
    for i in range(count):
        size = SIZES[i % len(SIZES)]
        numbers = torch.randint(-24, 25, (size,), generator=generator).tolist()
        rates = (torch.randperm(33, generator=generator)[:size] - 16).tolist()
        temperature = sympy.Rational(int(torch.randint(3, 17, (1,), generator=generator)), 8)
        points.append(([sympy.Rational(n, 8) for n in numbers], [sympy.Rational(r, 8) for r in rates], temperature))
    return points


def against_sympy(setting: Setting, count: int) -> list[dict[str, float]]:
    """``predicted_kl`` and ``exact_kl`` over sympy's K''(0)/2 and K(1), at rational points; and KL the wrong way."""
    found = []
    for logits, rates, temperature in rational_points(setting, count):
        half_curvature, kl = exact_numbers(logits, rates, temperature)
        z, rate = (torch.tensor([[float(x) for x in numbers]], dtype=torch.float64) for numbers in (logits, rates))
        found.append(
            {
                "predicted": float(predicted_kl(z, rate, float(temperature))) / float(half_curvature),
                "exact": float(exact_kl(z, z + rate, float(temperature))) / float(kl),
                "reversed": float(exact_kl(z + rate, z, float(temperature))) / float(kl),
            }
        )
    return found


@claim("C07", "the KL is quadratic in α with a cubic remainder", "Eq. 5, A.1")
def quadratic(setting: Setting) -> Measurement:
    """Slope of the remainder on a real proposal; K(0), K'(0), K''(0) by sympy; code against sympy's numbers."""
    proposal = toy_proposal(setting)
    q, temperature = proposal.q(), proposal.temperature
    steps = small_steps(q, 1e-3, 1e-2, 6)
    by_scipy = remainders(proposal, q, steps, scipy_kl)
    numbers = against_sympy(setting, 9 if setting.quick else 30)
    reason = "the quartic term, below 1e-2 of the cubic one for α√q ≤ 1e-2, bends the line by less than that"
    comparisons = [
        Comparison(
            what="slope of K(α) − α² q over α, absolute value, both logarithmic",
            expected=3,
            measured=slope(steps, by_scipy),
            tolerance=0.05,
            reason=reason,
            oracle="Taylor's theorem; K by scipy's relative entropy at weights really moved",
            control="q without the ½",
            control_measured=slope(steps, remainders(proposal, 2 * q, steps, scipy_kl)),
        ),
        Comparison(
            what="the same slope with K by exact_kl",
            expected=3,
            measured=slope(steps, remainders(proposal, q, steps, kl_of)),
            tolerance=0.05,
            reason=reason,
            oracle="Taylor's theorem",
            control="q without 1/T²",
            control_measured=slope(steps, remainders(proposal, temperature**2 * q, steps, kl_of)),
        ),
        Comparison(
            what="identities that hold, of K(0) = 0, K'(0) = 0 and K''(0) = Var[ż]/T² for V = 2, 3, 4",
            expected=9,
            measured=sum(sum(expansion_identities(size)) for size in SIZES),
            tolerance=0,
            reason="algebra",
            oracle="sympy's derivatives of K for symbolic logits, rates, second derivatives and T",
            control="Var[ż]/T in place of Var[ż]/T²",
            control_measured=sum(sum(expansion_identities(size, power=1)) for size in SIZES),
        ),
        Comparison(
            what=f"predicted_kl over K''(0)/2, the worst of {len(numbers)} rational points",
            expected=1,
            measured=worst(n["predicted"] for n in numbers),
            tolerance=1e-11,
            reason=ROUNDING,
            oracle="sympy, 40 digits",
            control="without the ½",
            control_measured=worst(2 * n["predicted"] for n in numbers),
        ),
        Comparison(
            what=f"exact_kl over K(1), the worst of {len(numbers)} rational points",
            expected=1,
            measured=worst(n["exact"] for n in numbers),
            tolerance=1e-11,
            reason=ROUNDING,
            oracle="sympy, 40 digits, from the definition",
            control="the KL from the new policy to the old",
            control_measured=worst(n["reversed"] for n in numbers),
        ),
    ]
    return Measurement(comparisons, data=along(proposal, q, small_steps(q, 1e-3, 1, 13)))


def fraction_q(weights: list[int], rates: list[int], temperature: Fraction) -> Fraction:
    """Half the variance of integer rates under p = weights / Σ weights, over T²: exact."""
    p = [Fraction(w, sum(weights)) for w in weights]
    mean = sum(a * r for a, r in zip(p, rates, strict=True))
    return sum(a * (r - mean) ** 2 for a, r in zip(p, rates, strict=True)) / (2 * temperature**2)


def against_fractions(setting: Setting, count: int) -> list[float]:
    """``predicted_kl`` over ``fraction_q`` for random integer weights and rates, V from 2 to 64, T from ⅖ to 3."""
    generator = setting.generator("kl/fractions")
    ratios = []
    for i in range(count):
        size = (2, 3, 4, 64)[i % 4]
        weights = torch.randint(1, 100, (size,), generator=generator)
        rates = torch.randperm(200, generator=generator)[:size] - 100
        temperature = Fraction(int(torch.randint(2, 16, (1,), generator=generator)), 5)
        logits = float(temperature) * weights.double().log()
        found = predicted_kl(logits[None], rates.double()[None], float(temperature))
        ratios.append(float(found) / float(fraction_q(weights.tolist(), rates.tolist(), temperature)))
    return ratios


def shifted_ratios(logits: torch.Tensor, rates: torch.Tensor, shifts: list[float]) -> list[float]:
    """q with a constant added to every rate over q without, for each shift and position."""
    plain = predicted_kl(logits, rates, TEMPERATURE)
    return [float(x) for c in shifts for x in predicted_kl(logits, rates + c, TEMPERATURE) / plain]


def score_rates(proposal: Proposal, h: float) -> tuple[np.ndarray, np.ndarray]:
    """p (positions, v), and d log p_v/dα along D by scipy and a central difference with one step of Richardson."""
    moved = logits_along(proposal, [0.0, h, -h, 2 * h, -2 * h])
    log_p = {step: scipy.special.log_softmax(z / proposal.temperature, axis=-1) for step, z in moved.items()}
    near, far = ((log_p[s] - log_p[-s]) / (2 * s) for s in (h, 2 * h))
    return np.exp(log_p[0.0]), (4 * near - far) / 3


@claim("C08", "q(D) is half the variance of the score rates over T²", "Eq. 6, A.1")
def half_variance(setting: Setting) -> Measurement:
    """Eq. 6 in fractions and by sympy; what it is invariant to; and the score rates of a real proposal."""
    proposal = toy_proposal(setting)
    ratios = against_fractions(setting, 40 if setting.quick else 400)
    generator = setting.generator("kl/shifts")
    logits, rates = (torch.randn(8, 50, generator=generator, dtype=torch.float64) for _ in range(2))
    p = torch.softmax(logits / TEMPERATURE, dim=-1)
    second_moment = ((p * (rates + 3) ** 2).sum(-1) / (p * rates**2).sum(-1)).tolist()
    temperatures = [0.25, 0.5, 1.0, 2.0, 4.0]
    by_temperature = [float(predicted_kl(t * logits, rates, t).mean()) for t in temperatures]
    p_toy, scores = score_rates(proposal, 0.02)
    q = proposal.q()
    half_square = (p_toy * scores**2).sum(-1) / 2
    control_scores = scores * proposal.temperature
    return Measurement(
        [
            Comparison(
                what=f"predicted_kl over Var_p[ż]/(2T²), the worst of {len(ratios)} random cases",
                expected=1,
                measured=worst(ratios),
                tolerance=1e-11,
                reason=ROUNDING,
                oracle="the variance in fractions, exact",
                control="the whole variance",
                control_measured=worst(2 * x for x in ratios),
            ),
            Comparison(
                what="steps of the derivation that hold, four each for V = 2, 3, 4",
                expected=12,
                measured=sum(sum(score_identities(size)) for size in SIZES),
                tolerance=0,
                reason="algebra",
                oracle="sympy's derivatives of log p for symbolic logits, rates, second derivatives and T",
                control="the mean of ż not taken off",
                control_measured=sum(sum(score_identities(size, centred=False)) for size in SIZES),
            ),
            Comparison(
                what="q with a constant from −1000 to 1000 added to every ż, over q without; the worst",
                expected=1,
                measured=worst(shifted_ratios(logits, rates, [-1000.0, -3.0, 0.1, 3.0, 1000.0])),
                tolerance=1e-9,
                reason="fp64 keeps 1e-13 of a rate at 1000, against rates of size 1",
                oracle="a common shift of all logits leaves softmax as it is",
                control="the second moment in place of the variance, shifted by 3",
                control_measured=worst(second_moment),
            ),
            Comparison(
                what="exponent of T in q at the same p and ż",
                expected=-2,
                measured=slope(temperatures, by_temperature),
                tolerance=1e-10,
                reason=ROUNDING,
                oracle="Eq. 6; least squares by scipy over T from ¼ to 4",
                control="1/T in place of 1/T²",
                control_measured=slope(
                    temperatures, [x * t for x, t in zip(by_temperature, temperatures, strict=True)]
                ),
            ),
            Comparison(
                what="q of a real proposal over ½ Σ p_v (d log p_v/dα)², the worst of 64 positions",
                expected=1,
                measured=worst(q / half_square),
                tolerance=1e-6,
                reason="the difference quotient is off by h⁴ = 1.6e-7 times a fifth derivative",
                oracle="scipy's log-softmax at weights really moved by ±h and ±2h, h = 0.02",
                control="rates of z, not of z/T",
                control_measured=worst(q / (p_toy * control_scores**2).sum(-1) * 2),
            ),
        ]
    )
