"""Reconstruction Ĝ = G AᵀA measured, for gradients that are given or made up, with the shapes of the paper's model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.stats
import torch
from jaxtyping import Float
from torch import Tensor

from logra_ref.direction import Factor
from logra_ref.projection import Kind, Projection, projection_seed, reconstruction_energy
from logra_ref.update import lifted_square
from validation.claim import Comparison, Setting
from validation.shapes import QWEN_1_5B
from validation.spread import Prediction, Spectrum, predict

RANKS = (4, 16, 64, 256)
KINDS: tuple[Kind, ...] = ("rademacher", "gaussian", "orthonormal")
QWEN = QWEN_1_5B.matrices()  # (d, k) of a layer of the model that the paper measured
PAPER = {4: 0.046, 256: 0.348}
Z = 6.0  # standard errors: 2e-9 for a normal mean, below 1e-7 with the skewness that a mean of 50 has
CLOSED = "rounding of fp64"
Drawn = tuple[float, float, Prediction]
"""⟨G, Ĝ⟩/‖G‖², the cosine and its prediction."""
EVERYWHERE = Spectrum(1.0, 0.0)  # where only the first order is asked for


@dataclass(frozen=True)
class GivenRows:
    """A projection whose rows are given, with the two methods that ``reconstruct`` uses: for controls."""

    rows: Float[Tensor, "r k"]

    def project(self, x: Tensor) -> Tensor:
        return x @ self.rows.T

    def gram(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        return self.rows.double() @ self.rows.double().T


def reconstruct(
    gradients: Sequence[Float[Tensor, "d k"]], projection: Projection | GivenRows
) -> list[tuple[float, float]]:
    """For each gradient ⟨G, Ĝ⟩/‖G‖² and the cosine between G and Ĝ = G AᵀA, without forming Ĝ.

    With S = G Aᵀ from ``Projection.project``, ⟨G, Ĝ⟩ = ‖S‖² and ‖Ĝ‖² = tr(SᵀS · AAᵀ): d plays no part but in SᵀS.
    """
    found = []
    for gradient in gradients:
        sketch = projection.project(gradient).double()
        inner = float(sketch.square().sum())
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        lifted = float(lifted_square(Factor.of(sketch), projection)) ** 0.5
        # A sketch of zeros, which only a wrong projection gives, has no direction.
        found.append((inner / norm**2, inner / (norm * lifted) if lifted > 0 else 0.0))
    return found


def width_mean(kind: Kind, rank: int, widths: Sequence[int] | None = None) -> float:
    """The mean over a layer's matrices of 1/√E‖ĝ‖², by the code under test: the first order of Figure 5."""
    widths = [k for _, k in QWEN.values()] if widths is None else widths
    return float(np.mean([reconstruction_energy(kind, rank, width) ** -0.5 for width in widths]))


def expected_mean(kind: Kind, rank: int) -> float:
    """The same from the moments of `validation.spread`, which are derived otherwise."""
    return float(np.mean([predict(kind, rank, k, EVERYWHERE).first for _, k in QWEN.values()]))


def synthetic_gradients(width: int, seed: int) -> dict[str, Float[Tensor, "d k"]]:
    """Gradients of four spectra.

    d has no part in the cosine beyond the rank it allows: of G = V Λ Wᵀ only Λ and W enter ‖G Aᵀ‖ and ‖G AᵀA‖. So a
    few rows stand for thousands.
    """
    rows = seeded_normal(64, width, seed)
    single = torch.zeros(1, width, dtype=torch.float64)
    single[0, seed % width] = 1
    decay = torch.arange(1, 33)[:, None] ** -0.6
    return {"64 equal ranks": rows, "power law": decay * rows[:32], "rank one": rows[:1], "one input": single}


def seeded_normal(rows: int, width: int, seed: int) -> Float[Tensor, "rows width"]:
    """Normal numbers from a generator with this seed, in fp64: equal seeds begin with equal rows."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).double()


def simulate(
    setting: Setting, kind: Kind, rank: int, draws: int, *, correlated: bool = False
) -> dict[str, list[Drawn]]:
    """The four spectra, in a fresh draw of gradient and projection for each, with Qwen's widths.

    ``correlated``, the control: A's rows come from a generator with the seed that the gradient's has.
    """
    found: dict[str, list[Drawn]] = {}
    base = setting.derived_seed(f"C13 simulation {kind} {rank}")
    for draw, (name, (_, width)) in itertools.product(range(draws), QWEN.items()):
        seed = setting.derived_seed(f"C13 gradient {kind} {rank} {draw} {name}")
        gradients = synthetic_gradients(width, seed)
        if correlated:
            projection = GivenRows(seeded_normal(rank, width, seed) / math.sqrt(rank))
        else:
            projection = Projection(kind, rank, width, projection_seed(base, draw, name), keep=True)
        measured = reconstruct(list(gradients.values()), projection)
        for (spectrum, gradient), (inner, cosine) in zip(gradients.items(), measured, strict=True):
            expected = predict(kind, rank, width, Spectrum.of(gradient))
            found.setdefault(spectrum, []).append((inner, cosine, expected))
    return found


def remainder(rank: int) -> float:
    """A bound of what the expansion leaves out, relative to the cosine.

    For k ≫ r the next term of E√X is (Σλ³/2 − 15 (Σλ²)²/32)/r² ≤ 0.065/r², since Σλ³ ≤ (Σλ²)^1.5.
    """
    return 0.1 / rank**2


def mean_comparison(what: str, found: Sequence[Drawn], rank: int, wrong: Sequence[Drawn]) -> Comparison:
    """The mean cosine beside the mean of its second-order predictions, with the standard error that they give."""
    expected = float(np.mean([p.second for _, _, p in found]))
    error = math.sqrt(sum(p.deviation**2 for _, _, p in found)) / len(found)
    return Comparison(
        what=what,
        expected=expected,
        measured=float(np.mean([cosine for _, cosine, _ in found])),
        tolerance=Z * error + remainder(rank) * expected,
        reason=f"{Z:g} standard errors, of the predicted spread, of {len(found)} draws (too few to tell the second "
        "order from the first: the ratio of rank one does), and the third order",
        oracle="second order from moments of A, summed over partitions, and each gradient's Σλ²",
        control="A drawn with the seed of the gradient",
        control_measured=float(np.mean([cosine for _, cosine, _ in wrong])),
        chance=1e-7,
    )


def chi_square_tolerance(count: int) -> float:
    """How far the mean of ``count`` squared standard errors may be above 1: 1.5 × what χ² exceeds once in 1e9."""
    return 1.5 * (float(scipy.stats.chi2.isf(1e-9, count)) / count - 1)


def mean_square(
    what: str, squares: np.ndarray, *, oracle: str, control: str, control_measured: float
) -> list[Comparison]:
    """The mean of squared standard errors beside 1, from above and from below, by the quantiles of χ²."""
    count, found = squares.size, float(squares.mean())
    common = {"expected": 1.0, "measured": found, "oracle": oracle, "chance": 1e-8}
    return [
        Comparison(
            what=f"{what}, at most",
            tolerance=chi_square_tolerance(count),
            reason=f"1.5 × the excess that χ² with {count} degrees has once in 1e9",
            control=control,
            control_measured=control_measured,
            relation="≤",
            **common,
        ),
        Comparison(
            what=f"{what}, at least",
            tolerance=1 - float(scipy.stats.chi2.ppf(1e-9, count)) / count / 1.5,
            reason=f"1/1.5 of what χ² with {count} degrees falls below once in 1e9",
            control="a predicted deviation a hundred times too large",
            control_measured=found / 100**2,
            relation="≥",
            **common,
        ),
    ]


def rank_one_ratio(setting: Setting, draws: int) -> tuple[float, float, Prediction]:
    """Mean cosine at r = 4, k = 256 over its first order, for a gradient of rank one; root mean square; prediction.

    Rows of a projection are independent, so four at a time of a tall one are as many draws.
    """
    rank, width, block = 4, 256, 2000
    gradient = seeded_normal(1, width, setting.derived_seed("C13 rank one"))[0]
    base, cosines = setting.derived_seed("C13 rank one projections"), []
    for start in range(0, draws, block):
        tall = Projection("rademacher", rank * block, width, projection_seed(base, start, "tall"))
        entries = tall.entries(dtype=torch.float64).unflatten(0, (block, rank))
        sketch = entries @ gradient
        lifted = torch.einsum("nr,nrk->nk", sketch, entries)
        cosines.append(sketch.square().sum(1) / (gradient.norm() * lifted.norm(dim=1)))
    relative = torch.cat(cosines).double() / reconstruction_energy("rademacher", rank, width) ** -0.5
    expected = predict("rademacher", rank, width, Spectrum.of(gradient[None]))
    return float(relative.mean()), float(relative.square().mean().sqrt()), expected


@dataclass(frozen=True)
class BasisTrial:
    """Figure 5b repeated: cells (ranks, layers) of fixed − refreshed, and the standard deviation expected of each."""

    differences: Float[np.ndarray, "ranks layers"]
    expected_deviation: Float[np.ndarray, "ranks layers"]
    correlated: float
    """A difference at the first rank with the fixed basis drawn with the gradients' seed: for controls."""


def basis_trial(
    setting: Setting, ranks: tuple[int, ...], layers: int, *, seeds: int = 8, batches: int = 3
) -> BasisTrial:
    """Cells of the paper's comparison of bases: the mean over seven matrices, eight seeds and some minibatches.

    Each matrix has one gradient with 20 equal singular values in all minibatches. That is the least favourable: a
    fixed basis makes the same error every time, a refreshed one averages it away. So the difference has the variance
    σ² (1 + 1/batches)/(7 · seeds), with σ that of a single cosine.
    """
    differences, deviations = np.zeros((len(ranks), layers)), np.zeros((len(ranks), layers))
    cells, correlated = list(itertools.product(range(len(ranks)), range(layers))), []
    for i, layer in setting.track(cells, "C13 fixed and refreshed"):
        rank, variance = ranks[i], 0.0
        for name, (_, width) in QWEN.items():
            own = setting.derived_seed(f"C13 basis {rank} {layer} {name}")
            rows = seeded_normal(20, width, own)
            base = setting.derived_seed(f"C13 bases {rank}")
            for seed in range(seeds):
                drawn = [
                    Projection("rademacher", rank, width, projection_seed(base, update, f"{seed} {layer} {name}"))
                    for update in range(batches + 1)
                ]
                fixed, *refreshed = [reconstruct([rows], projection)[0][1] for projection in drawn]
                differences[i, layer] += (fixed - np.mean(refreshed)) / (len(QWEN) * seeds)
            variance += predict("rademacher", rank, width, Spectrum.of(rows)).deviation ** 2
            if (i, layer) == (0, 0):
                correlated.append(reconstruct([rows], GivenRows(seeded_normal(rank, width, own)))[0][1] - refreshed[-1])
        deviations[i, layer] = math.sqrt(variance * (1 + 1 / batches) / seeds) / len(QWEN)
    return BasisTrial(differences, deviations, float(np.mean(correlated)))
