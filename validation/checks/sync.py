"""The policy sync in bf16 (C26): what adding factors loses, and what keeping the low halves makes exact."""

from __future__ import annotations

import numpy as np

from logra_ref.direction import Factor
from logra_ref.sync import round_rows
from validation.bf16 import (
    differ_by_blocks,
    error_of_halves,
    rounding_loss,
    share_of_one_update,
    tie_patterns,
    wrong_sums,
)
from validation.checks.kl import worst
from validation.checks.proposals import difference_q, frobenius, logits_along, toy_proposal
from validation.claim import Comparison, Measurement, Setting, claim
from validation.sync_trainer import follow, rounded_late, step_over_nominal

MOST = 10  # differing weights are counted up to here: how many a control has hangs on the order of its sums
DEVIATIONS = 6  # of a normal distribution: passed by chance in 2e-9 of all runs
CHANCE = 2e-9


@claim("C26", "adding factors into bf16 weights loses the update; keeping the low half makes the sync exact", "ours")
def bf16_sync(setting: Setting) -> Measurement:
    """A real trainer followed by engines, then each part of the argument by itself."""
    updates = 60 if setting.quick else 300
    found = follow(setting, updates)
    plain, random, split = (found["rows"][-1][name] for name in ("nearest", "stochastic", "split"))
    lost, effect, of_signs = np.array([effect_of_rounding(setting, draw) for draw in range(4)]).T
    one = share_of_one_update(setting.generator("C26 share"))
    loss = rounding_loss(setting.generator("C26 rounding"))
    sums = wrong_sums(setting.generator("C26 sums"))
    blocks = {
        rounded: differ_by_blocks(setting.generator("C26 blocks"), updates // 6, rounded=rounded)
        for rounded in (True, False)
    }
    exact = "sums of integers below 2^24 are exact in fp32, and all merge by one product and one difference"
    comparisons = [
        Comparison(
            f"share of bf16 entries equal to the trainer's after {updates} updates, low half kept",
            expected=1,
            measured=split["equal"],
            tolerance=0,
            reason=exact,
            oracle="a receiver in numpy: its own hash, int64 sums, rounding to bf16 on integers",
            control="bf16 weights alone, factors added and rounded",
            control_measured=round(plain["equal"], 2),
        ),
        Comparison(
            f"fp32 weights that the engine has otherwise than the trainer, counted to {MOST}",
            expected=0,
            measured=min(found["split otherwise"], MOST),
            tolerance=0,
            reason=exact,
            oracle="the trainer's weights, bit for bit",
            control="an engine without nudge_ties_",
            control_measured=min(found["wrapping otherwise"], MOST),
        ),
        Comparison(
            f"fp32 weights that a receiver in numpy has otherwise than the trainer, counted to {MOST}",
            expected=0,
            measured=min(found["oracle otherwise"], MOST),
            tolerance=0,
            reason=exact,
            oracle="numpy, int64 sums, two fp32 operations",
            control="product and difference fused, rounded once",
            control_measured=min(found["fusing otherwise"], MOST),
        ),
        Comparison(
            f"fp32 weights that differ after an update if U is rounded before η, counted to {MOST}",
            expected=0,
            measured=min(rounded_late(setting, late=False), MOST),
            tolerance=0,
            reason=exact,
            oracle="the trainer's weights, bit for bit",
            control="η and merge from U, only the message rounded",
            control_measured=min(rounded_late(setting, late=True), MOST),
        ),
        Comparison(
            "size of a merged step over α ρ ‖W‖, α = 0.5",
            expected=1,
            measured=round(step_over_nominal(setting, 0.5), 6),
            tolerance=2e-5,
            reason="each weight rounds by up to 2^-24 of itself, 1e-3 of its step and at random: 2e-6 of the whole",
            oracle="Eq. 4, norms of the weights before and after in fp64",
            control="α left out of the coefficients",
            control_measured=round(step_over_nominal(setting, 1.0) / 0.5, 2),
        ),
        Comparison(
            "largest error of a split and joined weight, all low halves of four numbers",
            expected=0,
            measured=error_of_halves(nudged=True),
            unit="bf16 units",
            tolerance=0,
            reason="a nudged low half is between -32767 and 32767, or -32768: 16 bits hold it",
            oracle="integers in numpy",
            control="0x3F808000 and its like left as they are",
            control_measured=error_of_halves(nudged=False),
        ),
        Comparison(
            f"weights that differ after {updates // 6} updates, 4 blocks of rows against 3 of columns, reversed, "
            f"counted to {MOST}",
            expected=0,
            measured=min(blocks[True], MOST),
            tolerance=0,
            reason=exact,
            oracle="two orders of the same sums",
            control="fp32 factors, not rounded to integers",
            control_measured=min(blocks[False], MOST),
        ),
        Comparison(
            "entries of 256 × 256 integer sums, r = 256, that fp32 output has wrong",
            expected=0,
            measured=sums["fp32"],
            tolerance=0,
            reason="at most 127 r = 32,512, below 2^24",
            oracle="int64 in numpy",
            control=f"bf16 output, wrong by up to {sums['bf16 error']:.0f}",
            control_measured=sums["bf16"],
        ),
        Comparison(
            "1 - cos(U, rounded U), r = 256",
            expected=loss["expected"],
            measured=loss["measured"],
            tolerance=0.02 * loss["expected"],
            reason="the sum of 261,120 squared uniform errors has a relative deviation of 0.18 %; 11 of them",
            oracle="independent uniform errors, as wide as a row's largest entry over 127",
            control="4-bit levels",
            control_measured=loss["4 bits"],
            chance=CHANCE,
        ),
        Comparison(
            "q of the rounded update over q of the update itself, the worst of 4 policies",
            expected=1,
            measured=worst(effect),
            tolerance=2 * max(lost) + max(lost) ** 2,
            reason="q is a square: at most 2 ε + ε², ε = ‖U − rounded U‖/‖U‖, where the error moves logits as U does",
            oracle="Eq. 6 by scipy on logits of weights really moved, U not rounded",
            control="rounded to its signs, in place of 127 levels",
            control_measured=worst(of_signs),
        ),
        Comparison(
            "what bf16 weights take of one update at ρ = 6e-5, rounded to the nearest",
            expected=one["expected"],
            measured=one["nearest"],
            tolerance=round(DEVIATIONS * one["spread"] + 0.01 * one["expected"], 4),
            reason=f"{DEVIATIONS} deviations over a million entries, and 1 % for steps across a power of two",
            oracle="normal distribution of the weights, binade by binade",
            control="rounded at random, which takes all on average",
            control_measured=one["stochastic"],
            chance=CHANCE,
        ),
        Comparison(
            "what bf16 weights take of one update, rounded at random",
            expected=1,
            measured=one["stochastic"],
            tolerance=DEVIATIONS * one["spread at random"],
            reason=f"{DEVIATIONS} deviations of the rounding noise u² f (1 − f)",
            oracle="its mean is right by construction",
            control="rounded to the nearest",
            control_measured=one["nearest"],
            chance=CHANCE,
        ),
    ]
    note = (
        f"After {updates} updates that moved the weights by {100 * found['moved']:.2g} % of their size, plain bf16 "
        f"weights went {100 * plain['share']:.0f} % of the way, and {100 * plain['equal']:.0f} % of their entries are "
        f"right; rounded at random they went {100 * random['share']:.0f} % of the way, "
        f"{100 * random['equal']:.0f} % of them right. "
        f"An update changes {100 * found['changed']:.1f} % of the trainer's bf16 entries here."
    )
    data = {
        "rows": [{key: rounded(value) for key, value in row.items()} for row in found["rows"]],
        "changed": round(found["changed"], 4),
        "moved": round(found["moved"], 6),
        "entries": found["entries"],
        "ties": tie_patterns(),
        "largest_sum": sums["largest"],
    }
    return Measurement(comparisons, note, data)


def effect_of_rounding(setting: Setting, draw: int) -> tuple[float, float, float]:
    """ε = ‖U − rounded U‖/‖U‖ over all matrices, q of the rounded update over q of U, and that of U's signs alone."""
    proposal, h = toy_proposal(setting, draw=draw), 0.02
    exact = difference_q(logits_along(proposal, [0.0, h, -h, 2 * h, -2 * h]), h, proposal.temperature).mean()
    direction = {name: factor.direction() for name, factor in proposal.update.factors.items()}
    error = {name: round_rows(u).direction() - u for name, u in direction.items()}

    def over_exact(factors: dict[str, Factor]) -> float:
        return float(proposal.with_factors(factors).q().mean() / exact)

    signs = {name: Factor.of(u.sign() * u.abs().amax(1, keepdim=True)) for name, u in direction.items()}
    return (
        frobenius(error.values()) / frobenius(direction.values()),
        over_exact({name: round_rows(u) for name, u in direction.items()}),
        over_exact(signs),
    )


def rounded(value: int | dict[str, float]) -> int | dict[str, float]:
    """An engine's figures to four decimals, enough for a plot."""
    return value if isinstance(value, int) else {name: round(figure, 4) for name, figure in value.items()}
