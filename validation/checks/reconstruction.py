"""C13 and C27: how well Ĝ = G AᵀA points along G (Figure 5), from shapes, by simulation and on real gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.stats

from logra_ref.projection import Kind, reconstruction_energy
from validation.allocation import allocation
from validation.claim import Comparison, Measurement, NotMeasured, Setting, claim
from validation.enumeration import enumerated_energy, hadamard_choices, sign_matrices
from validation.real_gradients import comparisons, explanation, record, study
from validation.reconstruct import (
    CLOSED,
    KINDS,
    PAPER,
    QWEN,
    RANKS,
    BasisTrial,
    Drawn,
    Z,
    basis_trial,
    expected_mean,
    mean_comparison,
    mean_square,
    rank_one_ratio,
    simulate,
    width_mean,
)


@claim(
    "C13",
    "reconstruction cosine 0.046 at r = 4, 0.348 at r = 256; fixed against refreshed ≤ 0.0014 a cell; "
    "Gaussian lower by < 2e-4 on average",
    "Fig. 5b, c",
)
def reconstruction(setting: Setting) -> Measurement:
    """Figure 5 from layer shapes alone, by simulation with those shapes, and on the gradients of a pretrained model."""
    trial = basis_trial(setting, (4, 16), 4 if setting.quick else 28)
    lines = paper_figures() + energies() + simulated(setting) + [rank_one(setting)] + bases(trial) + allocation(setting)
    data: dict[str, Any] = {
        "ranks": list(RANKS),
        "first": {kind: [width_mean(kind, r) for r in RANKS] for kind in KINDS},
        "paper": {str(rank): cosine for rank, cosine in PAPER.items()},
    }
    by_chance = (
        "Fixed and refreshed bases differ by chance alone, and the more, the fewer effective ranks gradients have: the "
        f"largest cell by simulation is {np.abs(trial.differences).max():.4f}, the paper's 0.0014. "
    )
    try:
        found = study(setting)
    except NotMeasured as missing:
        return Measurement(lines, f"{by_chance}Real gradients were not measured: {missing}", data, ["real gradients"])
    return Measurement(lines + comparisons(found), by_chance + explanation(found), data | {"real": record(found)})


def paper_figures() -> list[Comparison]:
    """The closed form from the shapes of Qwen2.5-Math-1.5B beside the figures that the paper prints."""
    outputs, inputs = [d for d, _ in QWEN.values()], [k for _, k in QWEN.values()]
    lines = []
    for rank, tolerance, reason in (
        (256, 0.0005, "half a unit of the last digit that is printed"),
        (4, 0.0005 + 0.0467 / 16, "half a printed unit, and the second order: up to Σλ²/(4r) ≤ 1/16 lower"),
    ):
        lines.append(
            Comparison(
                what=f"mean cosine from layer shapes alone, r = {rank}",
                expected=PAPER[rank],
                measured=width_mean("rademacher", rank),
                tolerance=tolerance,
                reason=reason,
                oracle="the paper's measurement on 196 matrices",
                control="outputs d in place of inputs k",
                control_measured=width_mean("rademacher", rank, outputs),
                from_paper=True,
            )
        )
    lines.append(
        Comparison(
            what="Rademacher − Gaussian from layer shapes alone, r = 256",
            expected=2e-4,
            measured=width_mean("rademacher", 256) - width_mean("gaussian", 256),
            tolerance=0.0,
            reason="the paper's bound; its eight seeds could not resolve the figure itself",
            oracle="the paper: detectable at 64 and 256, below 2e-4",
            control="k + 5 for the Gaussian's k + 1",
            control_measured=width_mean("rademacher", 256) - width_mean("gaussian", 256, [k + 4 for k in inputs]),
            relation="≤",
            from_paper=True,
        )
    )
    for rank in (64, 256):
        lines.append(
            Comparison(
                what=f"Rademacher − Gaussian from layer shapes alone, r = {rank}",
                expected=float(np.mean([(1 + k / rank) ** -1.5 / rank for k in inputs])),
                measured=width_mean("rademacher", rank) - width_mean("gaussian", rank),
                tolerance=1e-8,
                reason="the next term, of third order in 1/(k + r), is below 1e-9",
                oracle="−2 times the derivative of √(r/(r + k)) in k",
                control="k for k − 1",
                control_measured=width_mean("rademacher", rank, [k + 1 for k in inputs]) - width_mean("gaussian", rank),
            )
        )
    return lines


def energies() -> list[Comparison]:
    """E‖ĝ‖² by the code, beside moments that were derived otherwise."""
    lines = []
    for kind, control in (("rademacher", "gaussian"), ("gaussian", "rademacher")):
        for rank in (4, 256):
            lines.append(
                Comparison(
                    what=f"mean cosine of a layer to first order, {kind}, r = {rank}",
                    expected=expected_mean(kind, rank),
                    measured=width_mean(kind, rank),
                    tolerance=1e-12,
                    reason=CLOSED,
                    oracle="E[tr(M (AᵀA)²)] by summing over all partitions of its entries",
                    control="k − 1 and k + 1 exchanged",
                    control_measured=expected_mean(control, rank),
                )
            )
    lines += [
        Comparison(
            what="E‖ĝ‖²/‖g‖² of a row of 5 inputs at rank 3, Rademacher",
            expected=float(enumerated_energy(sign_matrices(3, 5), np.arange(1, 6))),
            measured=reconstruction_energy("rademacher", 3, 5),
            tolerance=1e-14,
            reason=CLOSED,
            oracle="mean over all 32,768 sign matrices, in fractions",
            control="k + 1 for k − 1",
            control_measured=1 + (5 + 1) / 3,
        ),
        Comparison(
            what="E‖ĝ‖²/‖g‖² of a row of 3 inputs (4 when padded) at rank 2, Hadamard",
            expected=float(enumerated_energy(hadamard_choices(2, 3), np.arange(1, 4))),
            measured=reconstruction_energy("hadamard", 2, 3),
            tolerance=1e-14,
            reason=CLOSED,
            oracle="mean over all pairs of rows and all signs, in fractions",
            control="rows drawn with repeats: no (K − r)/(K − 1)",
            control_measured=1 + (3 - 1) / 2,
        ),
    ]
    return lines


def simulated(setting: Setting) -> list[Comparison]:
    """Gradients of several spectra with Qwen's widths, projected by the code."""
    quick = setting.quick
    lines, small = [], simulate(setting, "rademacher", 4, 20 if quick else 60)
    plans = [("rademacher", 256, 2 if quick else 6), ("gaussian", 4, 20 if quick else 60), ("hadamard", 16, 2)]
    if not quick:
        plans += [("rademacher", 16, 30), ("rademacher", 64, 12), ("gaussian", 256, 6)]
    for kind, rank, draws in [("rademacher", 4, 0), *plans]:
        found = small if (kind, rank) == ("rademacher", 4) else simulate(setting, kind, rank, draws)
        wrong = simulate(setting, kind, rank, 1, correlated=True)
        for spectrum in ("64 equal ranks", "power law", "rank one"):
            what = f"simulated gradients, {spectrum}, {kind}, r = {rank}: mean cosine"
            lines.append(mean_comparison(what, found[spectrum], rank, wrong[spectrum]))
        if rank == 4:
            lines.append(scale(kind, found["64 equal ranks"]))
            if kind == "gaussian":
                lines += one_input(small["one input"], found["one input"])
    return lines


def scale(kind: Kind, found: Sequence[Drawn]) -> Comparison:
    """The mean of ⟨G, Ĝ⟩/‖G‖², to which the cosine is blind: a wrong scale of A shows here."""
    inner = float(np.mean([inner for inner, _, _ in found]))
    return Comparison(
        what=f"simulated gradients, 64 equal ranks, {kind}, r = 4: mean of ⟨G, Ĝ⟩/‖G‖²",
        expected=1.0,
        measured=inner,
        tolerance=Z * math.sqrt(2 * 1.1 / 64 / 4 / len(found)),
        reason=f"{Z:g} standard errors √(2 Σλ²/(r n)) of {len(found)} draws, Σλ² ≤ 1.1/64",
        oracle="E[AᵀA] = I",
        control="A without 1/√r",
        control_measured=4 * inner,
        chance=1e-7,
    )


def one_input(signs: Sequence[Drawn], normal: Sequence[Drawn]) -> list[Comparison]:
    """A gradient of rank one on a single input: ±1 entries all have the same square there, so that nothing spreads."""

    def squares(found: Sequence[Drawn]) -> np.ndarray:
        """Distances from the mean, in the standard deviations that signs have."""
        pairs = zip(found, signs, strict=True)
        return np.array([((c / p.second - 1) * own.second / own.deviation) ** 2 for (_, c, p), (_, _, own) in pairs])

    return mean_square(
        "simulated gradients, one input, r = 4: mean square of the cosine's distance from its mean, in variances",
        squares(signs),
        oracle="second order with Σλ² − Σ M_ii² = 0 in place of Σλ² = 1",
        control="normal entries, whose spread is that of Σλ² = 1",
        control_measured=float(squares(normal).mean()),
    )


def rank_one(setting: Setting) -> Comparison:
    """A gradient of one rank at r = 4: lower than the shape says, by what an average of χ₄ is below its root square."""
    draws = 20_000 if setting.quick else 60_000
    mean, root, finite = rank_one_ratio(setting, draws)
    chi = float(scipy.stats.chi(4).mean()) / 2
    expected = chi + finite.second / finite.first - (1 - 1 / 16)
    return Comparison(
        what="simulated gradient of rank one, r = 4, k = 256: mean cosine over its first order",
        expected=expected,
        measured=mean,
        tolerance=Z * math.sqrt((1 - chi**2) / draws) + 0.001,
        reason=f"{Z:g} standard errors of {draws:,} draws; 0.001 for the third order in r/k",
        oracle="‖A v‖ is χ₄/2, of mean 0.940 by scipy; to it what a finite k changes in the second order, 15/16",
        control="the root of the mean square",
        control_measured=root,
        chance=1e-8,
    )


def bases(trial: BasisTrial) -> list[Comparison]:
    """Fixed against refreshed: the largest cell beside the paper's, and the spread that explains it."""
    largest, squares = np.abs(trial.differences).max(), (trial.differences / trial.expected_deviation) ** 2
    typical = trial.expected_deviation.max()
    spread = "σ² (1 + 1/3)/(7 · 8), with σ² ≈ Σλ²/(2k) of each matrix"
    return [
        Comparison(
            what="fixed − refreshed by simulation with layer shapes, the largest cell",
            expected=0.0014,
            measured=float(largest),
            tolerance=0.00005,
            reason="half of the last digit printed",
            oracle="the paper's largest of 112 cells (28 layers, 4 ranks)",
            control="the fixed basis drawn with the gradient's seed",
            control_measured=trial.correlated,
            relation="≤",
            from_paper=True,
        ),
        Comparison(
            what="the same, beside what chance makes of two equal means",
            expected=Z * typical,
            measured=float(largest),
            tolerance=0.0,
            reason=f"{Z:g} standard errors {typical:.2g} of a cell whose gradients have 20 effective ranks",
            oracle=spread,
            control="the fixed basis drawn with the gradient's seed",
            control_measured=trial.correlated,
            relation="≤",
            chance=1e-7,
        ),
        Comparison(
            what="fixed − refreshed by simulation: cells without any difference",
            expected=0.0,
            measured=float((np.abs(trial.differences) < 1e-12).sum()),
            tolerance=0.0,
            reason="below 1e-12 is rounding; two draws of a basis are equal with a probability of 2^-6144 or less",
            oracle="a seed of its own for each update",
            control="all updates drawn alike",
            control_measured=float(squares.size),
        ),
        *mean_square(
            "fixed − refreshed by simulation: mean square of the cells, in standard errors",
            squares,
            oracle=spread,
            control="the fixed basis drawn with the gradient's seed",
            control_measured=float((trial.correlated / typical) ** 2),
        ),
    ]
