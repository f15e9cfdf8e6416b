"""C09: the three probes of q(D) agree, on a toy policy in fp64 and on a pretrained model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from logra_ref.predicted_kl import mean_and_error, probe_exact, probe_finite_difference
from validation.checks.kl import kl_of, slope, small_steps, worst
from validation.checks.proposals import (
    Proposal,
    difference_q,
    logits_along,
    pretrained_proposal,
    scipy_kl,
    toy_proposal,
)
from validation.claim import Comparison, Measurement, NotMeasured, Setting, claim


def large_steps_on_toy(proposal: Proposal, step: float) -> list[Comparison]:
    """What the probes find at one step that is not small, against weights that were really moved there."""
    temperature = proposal.temperature
    moved = logits_along(proposal, [0.0, step, -step])
    kl = {s: scipy_kl(moved[0.0], moved[s], temperature) for s in (step, -step)}
    reverse = {s: scipy_kl(moved[s], moved[0.0], temperature) for s in (step, -step)}
    arguments = (proposal.update, proposal.contexts, proposal.logits_of)
    finite = probe_finite_difference(*arguments, temperature=temperature, step=step).numpy()
    exact = probe_exact(*arguments, temperature=temperature, alpha=step).numpy()
    change, factored = moved[step] - moved[0.0], proposal.displaced_logits(step) - moved[0.0]
    backward = proposal.displaced_logits(-step) - moved[0.0]
    fp64 = {"tolerance": 1e-9, "reason": "fp64: rounding of logits, 1e-15, against a change of 0.1"}
    oracle = "scipy's relative entropy at weights really moved, at a KL of about 0.1"
    return [
        Comparison(
            what="toy: finite difference over the mean KL at ±h, over h², the worst of 64 positions",
            expected=1,
            measured=worst(finite * 2 * step**2 / (kl[step] + kl[-step])),
            oracle=oracle,
            control="the KL from the new policy to the old",
            control_measured=worst((reverse[step] + reverse[-step]) / (kl[step] + kl[-step])),
            **fp64,
        ),
        Comparison(
            what="toy: exact probe over the KL at α, over α², the worst of 64 positions",
            expected=1,
            measured=worst(exact * step**2 / kl[step]),
            oracle=oracle,
            control="the KL from the new policy to the old",
            control_measured=worst(reverse[step] / kl[step]),
            **fp64,
        ),
        Comparison(
            what="toy: change of the logits computed with the factors over that with moved weights, regression",
            expected=1,
            measured=float((factored * change).sum() / (change * change).sum()),
            oracle="weights really moved by the dense D",
            control="W − αD in place of W + αD",
            control_measured=float((backward * change).sum() / (change * change).sum()),
            **fp64,
        ),
    ]


def probes_on_toy(setting: Setting) -> tuple[list[Comparison], dict[str, Any]]:
    """The three probes on the toy policy in fp64, and how the two that take a step approach q as it shrinks."""
    proposal, h = toy_proposal(setting), 0.02
    q, temperature = proposal.q(), proposal.temperature
    difference = difference_q(logits_along(proposal, [0.0, h, -h, 2 * h, -2 * h]), h, temperature)
    steps = small_steps(q, 2e-3, 2e-2, 5)
    arguments = (proposal.update, proposal.contexts, proposal.logits_of)
    before = proposal.logits()

    def errors(probe: Callable[..., Any], name: str, target: np.ndarray) -> list[float]:
        found = (probe(*arguments, temperature=temperature, **{name: step}).numpy() for step in steps)
        return [float(np.abs(values - target).mean()) for values in found]

    finite, exact = errors(probe_finite_difference, "step", q), errors(probe_exact, "alpha", q)
    one_sided = [
        float(np.abs(kl_of(before, proposal.displaced_logits(a), temperature) / a**2 - q).mean()) for a in steps
    ]
    missing = proposal.without("v_proj").q()
    comparisons = [
        Comparison(
            what="toy, fp64: q by JVP over q by a central difference of logits, the worst of 64 positions",
            expected=1,
            measured=worst(q / difference),
            tolerance=1e-6,
            reason="Richardson leaves h⁴ = 1.6e-7 times a fifth derivative; rounding 1e-16/h is below that",
            oracle="Eq. 6 by scipy on logits of weights really moved by ±h and ±2h, h = 0.02",
            control="value projections without their tangent",
            control_measured=worst(missing / difference),
        ),
        Comparison(
            what="toy: order in h at which the finite difference approaches q",
            expected=2,
            measured=slope(steps, finite),
            tolerance=0.1,
            reason="the next order in h², below 1e-3 of the first for h√q ≤ 0.02, bends the line by less",
            oracle="the even part of a Taylor series",
            control="+h alone, without −h",
            control_measured=slope(steps, one_sided),
        ),
        Comparison(
            what="toy: order in α at which the exact KL over α² approaches q",
            expected=1,
            measured=slope(steps, exact),
            tolerance=0.1,
            reason="the next order in α, a few times 0.02 of the first for α√q ≤ 0.02, bends the line by less",
            oracle="Taylor's theorem",
            control="q without 1/T²",
            control_measured=slope(steps, errors(probe_exact, "alpha", temperature**2 * q)),
        ),
    ]
    comparisons += large_steps_on_toy(proposal, 0.3 / math.sqrt(q.mean()))
    data = {"q": float(q.mean()), "steps": steps, "finite_difference": finite, "exact": exact}
    return comparisons, data


def probes_on_pretrained(setting: Setting, *, responses: int) -> tuple[list[Comparison], dict[str, Any]]:
    """The three probes on the 135M model as transformers runs it, in fp32. Raises ``NotMeasured`` without the model.

    The oracle moves the weights by ±h and ±2h along the dense D; its logits give q by a central difference, and its KL
    by scipy what the other two probes should find, with the size of their next terms.
    """
    proposal = pretrained_proposal(setting, responses=responses)
    values, temperature = proposal.q(), proposal.temperature
    q = float(values.mean())
    # Large enough for fp32; small enough where few positions have most of q, whose own KL is then far above the mean.
    h = 0.02 / math.sqrt(q)
    logits = logits_along(proposal, [0.0, h, -h, 2 * h, -2 * h])
    difference = difference_q(logits, h, temperature)
    k = {step: float(scipy_kl(logits[0.0], z, temperature).mean()) for step, z in logits.items()}
    even, even_far = ((k[s] + k[-s]) / (2 * s**2) for s in (h, 2 * h))
    odd_far = (k[2 * h] - k[-2 * h]) / (2 * (2 * h) ** 2)
    h_term, alpha_term = abs(even_far - even) / 3 / q, abs(odd_far) / 2 / q
    arguments = (proposal.update, proposal.contexts, proposal.logits_of)
    by_finite = probe_finite_difference(*arguments, temperature=temperature, step=h)
    finite = float(by_finite.mean())
    by_exact = probe_exact(*arguments, temperature=temperature, alpha=h)
    exact = float(by_exact.mean())
    missing = float(proposal.without("down_proj").q().mean())
    noise = "norms and products in fp32 leave 1e-5 of a logit, against a change of 0.02 on average"
    comparisons = [
        Comparison(
            what=f"135M, fp32: q by JVP over q by a central difference of logits, {len(values)} positions",
            expected=1,
            measured=q / float(difference.mean()),
            tolerance=1e-3,
            reason=noise,
            oracle="Eq. 6 by scipy on logits of weights really moved by ±h and ±2h, h √q = 0.02",
            control="down projections without their tangent",
            control_measured=missing / float(difference.mean()),
        ),
        Comparison(
            what="135M: finite difference over the KL of weights really moved by ±h, over h²",
            expected=1,
            measured=finite / even,
            tolerance=1e-3,
            reason=noise,
            oracle="scipy's relative entropy on the moved weights",
            control="the sum of both signs in place of their mean",
            control_measured=2 * finite / even,
        ),
        Comparison(
            what="135M: finite difference over JVP",
            expected=1,
            measured=finite / q,
            tolerance=2 * h_term + 1e-3,
            reason="twice the h² term, from scipy's KL at ±h and ±2h, and the rounding of fp32",
            oracle="Eq. 5: both are q up to O(h²)",
            control="the sum of both signs in place of their mean",
            control_measured=2 * finite / q,
        ),
        Comparison(
            what="135M: exact KL over α², over JVP",
            expected=1,
            measured=exact / q,
            tolerance=2 * alpha_term + 2 * h_term + 1e-3,
            reason="twice the α and α² terms, from scipy's KL at ±2h, and the rounding of fp32",
            oracle="Eq. 5: both are q up to O(α)",
            control="q without 1/T²",
            control_measured=exact / (q * temperature**2),
        ),
    ]
    mean, error = mean_and_error(torch.from_numpy(values), proposal.response)
    data = {
        "q": mean,
        "standard_error": error,
        "positions": _short(values),
        "by_difference": _short(difference),
        "by_finite_difference": _short(by_finite),
        "by_exact": _short(by_exact),
        "response": proposal.response.tolist(),
        "finite_difference": finite,
        "exact": exact,
        "h": h,
    }
    return comparisons, data


def _short(values: Iterable[float]) -> list[float]:
    return [float(f"{float(x):.4g}") for x in values]


@claim("C09", "JVP, finite difference and exact KL agree", "§2.3, §3.3")
def probes_agree(setting: Setting) -> Measurement:
    """On the toy policy always; on the pretrained model where it is here, or the note says how to get it."""
    comparisons, toy = probes_on_toy(setting)
    data, note, left_out = {"toy": toy}, "", []
    try:
        more, data["pretrained"] = probes_on_pretrained(setting, responses=4 if setting.quick else 12)
        comparisons += more
    except NotMeasured as reason:
        note = f"The toy policy alone; the figures of the pretrained model were skipped: {reason}."
        left_out = ["the pretrained model"]
    return Measurement(comparisons, note, data, left_out)
