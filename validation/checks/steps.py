"""C10: the step multiplier α meets its KL budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from logra_ref.step_size import step_scale
from validation.checks.proposals import (
    Proposal,
    dense_direction,
    frobenius,
    logits_along,
    pretrained_proposal,
    scipy_kl,
    toy_proposal,
)
from validation.claim import Comparison, Measurement, NotMeasured, Setting, claim

BUDGET_MAX, BUDGET_MIN = 2e-4, 2e-5
NEXT_TERMS = "twice the next terms of K, α c₃/q and α² c₄/q, from scipy's K at ±a and ±2a, K(a) about 1e-3"
DOUBLE = "fp64: a few roundings of 1e-16"


def realised(proposal: Proposal, steps: Sequence[float]) -> list[float]:
    """The KL of each step α, the mean over positions, in nats: by scipy, at weights really moved to W + α D."""
    moved = logits_along(proposal, [0.0, *steps])
    return [float(scipy_kl(moved[0.0], moved[alpha], proposal.temperature).mean()) for alpha in steps]


def next_terms(proposal: Proposal, a: float) -> Callable[[float], float]:
    """The most by which K(α)/(α² q) should leave 1, over α: its α and α² terms in size, doubled, and rounding.

    K(α) = α² q + α³ c₃ + α⁴ c₄ + …; all three from scipy's K at ±a and ±2a, so that nothing of the probes enters.
    """
    steps = [a, -a, 2 * a, -2 * a]
    kl = dict(zip(steps, realised(proposal, steps), strict=True))
    even, even_far = ((kl[s] + kl[-s]) / (2 * s**2) for s in (a, 2 * a))
    quartic = (even_far - even) / (3 * a**2)
    cubic, coefficient = (kl[a] - kl[-a]) / (2 * a**3), even - a**2 * quartic
    return lambda alpha: 2 * (alpha * abs(cubic) + alpha**2 * abs(quartic)) / coefficient + 1e-6


def budgets(count: int) -> list[float]:
    """From 1e-6 to 1 nat, evenly on a logarithmic axis."""
    return [float(f"{x:.4g}") for x in np.geomspace(1e-6, 1, count)]


def beyond_quadratic(proposal: Proposal, chosen: Sequence[float]) -> list[dict[str, float]]:
    """For each budget the step √(budget/q), without a cap, and the KL that it realises, in nats."""
    q = float(proposal.q().mean())
    steps = [step_scale(q, budget, alpha_max=math.inf) for budget in chosen]
    found = zip(chosen, steps, realised(proposal, steps), strict=True)
    return [{"budget": budget, "alpha": alpha, "realised": kl} for budget, alpha, kl in found]


def change_of_weights(proposal: Proposal, alpha: float) -> tuple[float, float]:
    """Cosine of the merged change of all weights to the dense D, and its norm over D's; the weights are put back."""
    direction = dense_direction(proposal)
    weights = {name: layer.weight for name, layer in proposal.update.layers.items()}
    before = {name: weight.clone() for name, weight in weights.items()}
    proposal.update.apply_(alpha)
    change = {name: weight - before[name] for name, weight in weights.items()}
    for name, weight in weights.items():
        weight.data.copy_(before[name])
    return _cosine(change, direction), frobenius(change.values()) / frobenius(direction.values())


def each_by_itself(proposal: Proposal) -> float:
    """A wrong direction: every matrix scaled to ρ of its own norm instead of all by one η; its cosine to D."""
    direction = dense_direction(proposal)
    own = {
        name: matrix * frobenius([proposal.update.layers[name].weight]) / frobenius([matrix])
        for name, matrix in direction.items()
    }
    return _cosine(own, direction)


def _cosine(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    dot = math.fsum(float((one[name] * other[name]).sum()) for name in one)
    return dot / (frobenius(one.values()) * frobenius(other.values()))


def on_pretrained(setting: Setting) -> tuple[list[Comparison], list[dict[str, float]]]:
    """Realised KL over the paper's two budgets on the 135M model, and beyond. Raises ``NotMeasured`` without it."""
    proposal = pretrained_proposal(setting, responses=8)
    q = float(proposal.q().mean())
    sweep = beyond_quadratic(proposal, budgets(7))
    terms, comparisons = next_terms(proposal, math.sqrt(1e-3 / q)), []
    for budget in (BUDGET_MAX, BUDGET_MIN):
        alpha = step_scale(q, budget, alpha_max=math.inf)
        right, wrong = realised(proposal, [alpha, alpha / math.sqrt(2)])
        comparisons.append(
            Comparison(
                what=f"135M, fp32: realised KL over the budget {budget:g}",
                expected=1,
                measured=right / budget,
                tolerance=terms(alpha) + 1e-2,
                reason=NEXT_TERMS + "; and 1e-5 of a logit, from fp32, against a change of 4e-3",
                oracle="the budget itself; K by scipy's relative entropy at weights moved to W + α D",
                control="q without the ½",
                control_measured=wrong / budget,
            )
        )
    return comparisons, sweep


@claim("C10", "α meets the budget; the direction is unchanged; it enlarges and shrinks, and is capped", "§2.3, A.2")
def meets_the_budget(setting: Setting) -> Measurement:
    """Realised KL over budget at the paper's budgets and in the limit; α where it shrinks, enlarges and is capped."""
    first = toy_proposal(setting)
    # q ∝ ρ²: with this ρ the step for the paper's first budget is α = 0.1.
    proposal = first.resized(10 * math.sqrt(BUDGET_MAX / first.q().mean()))
    q, temperature = float(proposal.q().mean()), proposal.temperature

    terms = next_terms(proposal, math.sqrt(1e-3 / q))

    def over_budget(budget: float, wrong: Callable[[float], float] | None = None) -> tuple[float, float]:
        alpha = step_scale(q, budget)
        return realised(proposal, [alpha if wrong is None else wrong(alpha)])[0] / budget, terms(alpha)

    at_max, tolerance_max = over_budget(BUDGET_MAX)
    at_min, tolerance_min = over_budget(BUDGET_MIN)
    limit, tolerance_limit = over_budget(1e-8)
    smaller, larger = proposal.resized(0.05), proposal.resized(1 / 300)  # α of 2 and of 30 before the cap
    enlarged = step_scale(float(smaller.q().mean()), BUDGET_MAX)
    capped = step_scale(float(larger.q().mean()), BUDGET_MAX)
    cosine, length = change_of_weights(proposal, 0.1)
    scipys = "the budget itself; K by scipy's relative entropy at weights moved to W + α D"
    comparisons = [
        Comparison(
            what="realised KL over the budget 2e-4",
            expected=1,
            measured=at_max,
            tolerance=tolerance_max,
            reason=NEXT_TERMS,
            oracle=scipys,
            control="α = budget/q, without the square root",
            control_measured=over_budget(BUDGET_MAX, lambda alpha: alpha**2)[0],
        ),
        Comparison(
            what="realised KL over the budget 2e-5",
            expected=1,
            measured=at_min,
            tolerance=tolerance_min,
            reason=NEXT_TERMS,
            oracle=scipys,
            control="q without 1/T²",
            control_measured=over_budget(BUDGET_MIN, lambda alpha: alpha / temperature)[0],
        ),
        Comparison(
            what="realised KL over a budget of 1e-8",
            expected=1,
            measured=limit,
            tolerance=tolerance_limit,
            reason=NEXT_TERMS,
            oracle=scipys,
            control="q without the ½",
            control_measured=over_budget(1e-8, lambda alpha: alpha / math.sqrt(2))[0],
        ),
        Comparison(
            what="α for a proposal of a quarter of the budget",
            expected=2,
            measured=enlarged,
            tolerance=1e-9,
            reason=DOUBLE + ", through the forward-mode pass",
            oracle="q ∝ ρ²",
            control="steps that only shrink, min(1, ·)",
            control_measured=min(1.0, enlarged),
        ),
        Comparison(
            what="α for a proposal of a 900th of the budget",
            expected=3,
            measured=capped,
            tolerance=0,
            reason="the cap itself",
            oracle="α_max = 3",
            control="without the cap",
            control_measured=step_scale(float(larger.q().mean()), BUDGET_MAX, alpha_max=math.inf),
        ),
        Comparison(
            what="cosine of the change of the weights to D at α = 0.1",
            expected=1,
            measured=cosine,
            tolerance=1e-9,
            reason="a weight of size 0.2 is rounded to 1e-17, its change is 1e-3; the cosine's error is quadratic",
            oracle="D = −η U A, dense",
            control="each matrix scaled to ρ of its own norm",
            control_measured=each_by_itself(proposal),
        ),
        Comparison(
            what="norm of the change of the weights over that of D at α = 0.1",
            expected=0.1,
            measured=length,
            tolerance=1e-9,
            reason="as for the cosine",
            oracle="α itself, and the dense D with ‖D‖ = ρ ‖W‖",
            control="α² in place of α",
            control_measured=change_of_weights(proposal, 0.1**2)[1],
        ),
    ]
    sweeps = [
        beyond_quadratic(toy_proposal(setting, draw=draw), budgets(13)) for draw in range(3 if setting.quick else 8)
    ]
    data = {"q": q, "temperature": temperature, "beyond": sweeps}
    if setting.quick:
        return Measurement(comparisons, data=data, not_measured=["the pretrained model (--quick)"])
    try:
        more, data["pretrained"] = on_pretrained(setting)
    except NotMeasured as reason:
        note = f"The toy policy alone; the pretrained model was skipped: {reason}."
        return Measurement(comparisons, note, data, ["the pretrained model"])
    return Measurement(comparisons + more, data=data)
