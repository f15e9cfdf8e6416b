"""C12: RowAdam restores the norm, keeps d numbers, outlives its projections and needs no first moment (App. B)."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch

from logra_ref import LoGRA, attach_sketches
from logra_ref.direction import row_adam_direction
from logra_ref.projection import Kind, Projection, projection_seed
from logra_ref.toy import ModularSum, ToyPolicy
from validation.claim import Comparison, Measurement, Setting, claim
from validation.draws import KINDS, error_of_mean
from validation.enumeration import enumerated_row_square, seeds_of_all_signs, sign_matrices
from validation.rows import (
    BETA1,
    BETA2,
    EPSILON,
    RANK,
    SIMILAR_SIZES,
    UPDATES,
    WIDTH,
    gradient_rows,
    largest_change,
    norm_error,
    predicted_variance,
    refreshed_sketches,
    row_adam_by_hand,
    rows_before_and_after,
    run_of_updates,
    run_row_adam,
    turned,
)

EARLY = 10


def formula(setting: Setting) -> list[Comparison]:
    """U against Appendix B in 40 digits, and what each part of the formula does to it."""
    sketches = refreshed_sketches(setting, gradient_rows(setting), 8)
    small = [s * 2.0**-30 for s in sketches]
    found, by_hand = run_row_adam(sketches), row_adam_by_hand(sketches)
    alike = refreshed_sketches(setting, gradient_rows(setting, SIMILAR_SIZES), 8, "alike")
    factors = torch.tensor([1.0, 1, 8, 1, 1, 1], dtype=torch.float64)
    one_larger = [s * factors[:, None] for s in alike]
    rounding = "some twenty roundings of 2⁻⁵³"
    return [
        Comparison(
            "‖U‖/‖S‖ over 8 updates, largest distance from 1",
            expected=0,
            measured=round(norm_error(found, sketches), 15),
            tolerance=1e-12,
            reason=rounding,
            oracle="norm restoration: the ratio is 1",
            control="no norm restoration",
            control_measured=norm_error(row_adam_by_hand(sketches, restored=False), sketches),
        ),
        Comparison(
            "U of 8 updates, row norms from 1e-6 to 1e4, largest relative error",
            expected=0,
            measured=round(largest_change(found, by_hand), 15),
            tolerance=1e-13,
            reason=rounding,
            oracle="Appendix B in 40 digits, an entry at a time",
            control="absolute ε for relative",
            control_measured=largest_change(row_adam_by_hand(sketches, relative=False), by_hand),
        ),
        Comparison(
            "U/‖U‖ when all gradients are 2⁻³⁰ times as large: how far it turns",
            expected=0,
            measured=turned(run_row_adam(small), found),
            tolerance=0,
            reason="powers of two change no digit, and ε is relative",
            oracle="every part of the formula is homogeneous in S",
            control="absolute ε for relative",
            control_measured=turned(
                row_adam_by_hand(small, relative=False), row_adam_by_hand(sketches, relative=False)
            ),
        ),
        Comparison(
            "U/‖U‖ when one row's gradients are 8 times as large from the first update: how far it turns",
            expected=0,
            measured=turned(run_row_adam(one_larger), run_row_adam(alike)),
            tolerance=8 * EPSILON * max(SIMILAR_SIZES) / min(SIMILAR_SIZES),
            reason="a row's size enters through ε alone: ε times 8, times the largest over the smallest row",
            oracle="a row divided by its own root mean square",
            control="U = S",
            control_measured=turned(one_larger, alike),
        ),
        Comparison(
            "U without the bias correction 1 − β₂^t: largest relative difference",
            expected=0,
            measured=round(largest_change(row_adam_by_hand(sketches, corrected=False), found), 15),
            tolerance=1e-13,
            reason=rounding,
            oracle="the correction is one factor for all rows, ε follows it, and the norm is restored: it cancels",
            control="with an absolute ε, where it would not cancel, and small gradients",
            control_measured=largest_change(
                row_adam_by_hand(small, corrected=False, relative=False), row_adam_by_hand(small, relative=False)
            ),
        ),
    ]


def state_numbers(method: str) -> int:
    """Numbers that the optimizer keeps for the 14 matrices of a small Transformer after an update."""
    model = ToyPolicy(ModularSum().vocabulary, width=16)
    weights = [weight for name, weight in model.named_parameters() if "proj" in name]
    optimizer = LoGRA(attach_sketches(model, RANK)) if method == "row_adam" else torch.optim.Adam(weights)
    model(ModularSum().all_prompts()).square().sum().backward()
    optimizer.step()
    return sum(v.numel() for state in optimizer.state.values() for v in state.values() if v.ndim > 0)


def over_all_signs(setting: Setting) -> list[Comparison]:
    """Exact means over every sign matrix (4, 3): of the second moment, and of a first moment across a refresh."""
    rank, width = 4, 3
    g = np.random.default_rng(setting.derived_seed("exact")).integers(-5, 6, (3, width))
    g[:, 0] = 7  # no row of zeros
    dense = torch.from_numpy(g).double()
    moment, sketch, matrix, lifted = torch.zeros(3, dtype=torch.float64), 0, 0, 0
    seeds = seeds_of_all_signs(rank, width, setting.derived_seed("signs"))
    for seed in seeds:
        projection = Projection("rademacher", rank, width, seed, keep=True)
        s = projection.project(dense)
        # With β₂ = 0 the new second moment is that of this sketch alone.
        moment += row_adam_direction(s, torch.zeros_like(moment), step=1, beta2=0.0)[1]
        sketch, matrix = sketch + s, matrix + projection.matrix(dtype=torch.float64)
        lifted = lifted + projection.lift(s)
    count = len(seeds)
    expected = [enumerated_row_square(sign_matrices(rank, width), row) for row in g]
    square = torch.tensor([float(x) for x in expected], dtype=torch.float64)
    return [
        Comparison(
            "E_A[mean_j S_ij²] over all 4,096 sign matrices (4, 3), first row",
            expected=float(Fraction(int(g[0] @ g[0]), rank)),
            measured=float(moment[0] / count),
            tolerance=0,
            reason="whole numbers over a power of two are exact in floating point",
            oracle="‖g_i‖²/r, also by enumeration in fractions",
            control="the sum over j for the mean",
            control_measured=float(rank * moment[0] / count),
            chance=3e-13,
        ),
        Comparison(
            "the same, all rows, largest distance from enumeration in fractions",
            expected=0,
            measured=float((moment / count - square).abs().max()),
            tolerance=0,
            reason="whole numbers over a power of two are exact in floating point",
            oracle="enumeration of all signs in fractions",
            control="the sum over j for the mean",
            control_measured=float((rank * moment / count - square).abs().max()),
            chance=3e-13,
        ),
        Comparison(
            "mean of G A_uᵀA_t over all pairs of sign matrices, over ‖G‖: what is left of an older gradient in a first "
            "moment",
            expected=0,
            measured=float(((sketch / count) @ (matrix / count)).norm() / dense.norm()),
            tolerance=0,
            reason="whole numbers over a power of two are exact in floating point",
            oracle="A_u and A_t are independent with mean 0",
            control="A kept, where nothing is lost",
            control_measured=float((lifted / count).norm() / dense.norm()),
            chance=3e-13,
        ),
    ]


def row_square(kind: Kind, setting: Setting, count: int) -> Comparison:
    """mean_j S_j² for one row and many seeds of one kind of projection, in units of ‖g‖²/r."""
    g = gradient_rows(setting)[3]
    base, scale = setting.derived_seed(f"projections {kind}"), 1.0
    found = []
    for update in range(1, count + 1):
        projection = Projection(kind, RANK, WIDTH, projection_seed(base, update, "w"), keep=True)
        _, moment = row_adam_direction(
            projection.project(g[None]), torch.zeros(1, dtype=torch.float64), step=1, beta2=0.0
        )
        found.append(float(moment) * RANK / float(g @ g))
        scale = projection.scale
    values = np.array(found)
    return Comparison(
        f"mean of mean_j S_ij² · r/‖g_i‖², {kind}, k = {WIDTH}, r = {RANK}, {count:,} seeds",
        expected=1,
        measured=float(values.mean()),
        tolerance=error_of_mean(values),
        reason="6 standard errors of the mean",
        oracle="E[AᵀA] = I for every kind",
        control="A without its scale",
        control_measured=float(values.mean() / scale**2),
        chance=1e-7,
    )


def across_refresh(setting: Setting, count: int) -> tuple[list[Comparison], dict[str, list]]:
    """The second moment of a constant gradient under refresh: its mean, its spread; and a first moment beside it."""
    g = gradient_rows(setting, SIMILAR_SIZES)
    base = setting.derived_seed("runs")
    runs = setting.track(range(count), "C12 runs of 40 updates")
    found = [run_of_updates(g, projection_seed(base, run, "run")) for run in runs]
    course = np.stack([x["course"] for x in found])  # runs, updates, rows
    correction = 1 - BETA2 ** np.arange(1, UPDATES + 1)
    estimate = course / correction[:, None]
    early = estimate[:, EARLY - 1].mean(axis=1)
    spread = np.square(estimate[:, -1] - 1) / predicted_variance(g, UPDATES)
    alone = np.square(estimate[:, 0] - 1) / predicted_variance(g, UPDATES)
    aligned, kept = (np.array([float(x[name]) for x in found]) for name in ("aligned", "kept"))
    comparisons = [
        Comparison(
            f"mean of v_i/(1 − β₂^t) · r/‖g_i‖² after {EARLY} updates, each with its own A, {count} runs",
            expected=1,
            measured=float(early.mean()),
            tolerance=error_of_mean(early),
            reason="6 standard errors of the mean over runs",
            oracle="E_A[mean_j S_ij²] = ‖g_i‖²/r whatever A is",
            control="no bias correction",
            control_measured=float(early.mean() * correction[EARLY - 1]),
            chance=1e-8,
        ),
        Comparison(
            f"variance of the same after {UPDATES} updates, over its closed form",
            expected=1,
            measured=float(spread.mean()),
            tolerance=error_of_mean(spread.mean(axis=1)),
            reason="6 standard errors of the mean over runs",
            oracle="(2/r)(1 − Σp²) (1−β₂)(1+β₂^t)/((1+β₂)(1−β₂^t))",
            control="A kept from the first update, whose error stays",
            control_measured=float(alone.mean()),
            chance=1e-6,
        ),
        Comparison(
            f"⟨M A_t, G⟩/‖G‖² of a first moment M (β₁ = 0.9) after {UPDATES} updates with the same G",
            expected=(1 - BETA1) / (1 - BETA1**UPDATES),
            measured=float(aligned.mean()),
            tolerance=error_of_mean(aligned),
            reason="6 standard errors of the mean over runs",
            oracle="only the present sketch belongs to A_t: its weight is (1 − β₁)/(1 − β₁^t)",
            control="A kept, where all of it comes back",
            control_measured=float(kept.mean()),
            chance=1e-8,
        ),
    ]
    data = {
        "refreshed": [[round(float(x), 4) for x in run[:, 1]] for run in estimate[:5]],
        "fixed": [round(float(run[0, 1]), 4) for run in estimate[:5]],
        "deviation": [round(math.sqrt(float(predicted_variance(g, t)[1])), 4) for t in range(1, UPDATES + 1)],
    }
    return comparisons, data


@claim(
    "C12",
    "RowAdam restores the norm, keeps d numbers, is stable across refresh, needs no first moment",
    "App. B",
)
def row_adam(setting: Setting) -> Measurement:
    """The formula against 40 digits, its state, and what a refresh does to second and first moments."""
    runs, courses = across_refresh(setting, 200 if setting.quick else 600)
    state = Comparison(
        "numbers kept for the 14 matrices of a Transformer of width 16",
        expected=2 * (4 * 16 + 2 * 64 + 16),
        measured=state_numbers("row_adam"),
        tolerance=0,
        reason="a count",
        oracle="d of each matrix, from the shapes",
        control="Adam, 2·d·k",
        control_measured=state_numbers("adam"),
    )
    return Measurement(
        [
            *formula(setting),
            state,
            *over_all_signs(setting),
            *(row_square(kind, setting, 400 if setting.quick else 1200) for kind in KINDS),
            *runs,
        ],
        note="The bias correction 1 − β₂^t has no effect on U: it is one factor for all rows, ε is relative to it, and "
        "the norm is restored. It matters to v as an estimate of ‖g_i‖²/r.",
        data=courses | {"rows": rows_before_and_after(setting)},
    )
