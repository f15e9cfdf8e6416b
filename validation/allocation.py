"""Which rank each matrix of a layer should have, for the best reconstruction of the whole from a given memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import scipy.optimize

from logra_ref.projection import Projection, projection_seed, reconstruction_energy
from validation.claim import Comparison, Setting
from validation.reconstruct import QWEN, reconstruct, seeded_normal

UNIFORM = 256  # the rank whose memory is dealt out anew
OUTPUTS, INPUTS = np.array(list(QWEN.values())).T
MEMORY = UNIFORM * int(OUTPUTS.sum())  # numbers in the sketches of a layer


def allotted(weights: Sequence[float]) -> np.ndarray:
    """r_i ∝ √w_i, not rounded, with Σ d_i r_i the memory of a layer of one rank for all."""
    roots = np.sqrt(weights)
    return roots * MEMORY / (OUTPUTS * roots).sum()


def best_ranks() -> np.ndarray:
    """r_i ∝ √((k_i − 1)/d_i): the least Σ (k_i − 1)/r_i for a given Σ d_i r_i, for gradients of equal norms."""
    return allotted((INPUTS - 1) / OUTPUTS)


def whole_cosine(ranks: Sequence[float]) -> float:
    """First order of the cosine between all gradients of a layer, of equal norms, and their reconstructions."""
    pairs = zip(ranks, INPUTS.tolist(), strict=True)
    return float(np.mean([reconstruction_energy("rademacher", rank, width) for rank, width in pairs]) ** -0.5)


def measured_whole_cosine(setting: Setting, ranks: Sequence[float]) -> float:
    """The same by projecting gradients of 64 equal ranks with the code's own projections."""
    aligned, energy = 0.0, 0.0
    for (name, (_, width)), rank in zip(QWEN.items(), ranks, strict=True):
        gradient = seeded_normal(64, width, setting.derived_seed(f"C13 whole layer {name}"))
        seed = projection_seed(setting.derived_seed("C13 whole layer"), 1, name)
        projection = Projection("rademacher", round(rank), width, seed)
        ((inner, cosine),) = reconstruct([gradient], projection)
        aligned, energy = aligned + inner, energy + (inner / cosine) ** 2
    return aligned / math.sqrt(len(QWEN) * energy)


def numerical_optimum() -> float:
    """The best cosine over all ranks of that memory: scipy searches over the logarithms of the ranks."""

    def excess(logs: np.ndarray) -> float:
        ranks = np.exp(logs)
        ranks *= MEMORY / (OUTPUTS * ranks).sum()
        return float(np.mean((INPUTS - 1) / ranks))

    found = scipy.optimize.minimize(excess, np.full(len(INPUTS), math.log(UNIFORM)), tol=1e-12)
    return (1 + float(found.fun)) ** -0.5


def allocation(setting: Setting) -> list[Comparison]:
    """The best ranks beside scipy's optimum and beside projected gradients; one rank for all is the control."""
    best, uniform = best_ranks(), [UNIFORM] * len(QWEN)
    return [
        Comparison(
            what=f"a layer's gradients as a whole, r ∝ √((k − 1)/d) with the memory of r = {UNIFORM}: cosine",
            expected=numerical_optimum(),
            measured=whole_cosine(best),
            tolerance=1e-6,
            reason="where scipy stops; the optimum is flat, so that errors of ranks enter squared",
            oracle="minimised by scipy over all ranks of that memory",
            control="r ∝ k, the same cosine for each matrix",
            control_measured=whole_cosine(allotted(INPUTS.astype(float) ** 2)),
        ),
        Comparison(
            what=f"the same by simulation, over that of r = {UNIFORM} for all",
            expected=numerical_optimum() / whole_cosine(uniform),
            measured=measured_whole_cosine(setting, best) / measured_whole_cosine(setting, uniform),
            tolerance=0.025,
            reason="6 standard errors: seven cosines that spread by √(1/(2 · 64 · r)) each, in both, 0.4 % in all",
            oracle="the numerical optimum over √E‖Ĝ‖² of one rank",
            control="r ∝ k, the same cosine for each matrix",
            control_measured=measured_whole_cosine(setting, allotted(INPUTS.astype(float) ** 2))
            / measured_whole_cosine(setting, uniform),
            chance=1e-8,
        ),
    ]
