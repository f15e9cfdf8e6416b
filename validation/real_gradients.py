"""Figure 5 on the gradients of a pretrained model: every selected matrix, projections of three kinds, eight seeds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logra_ref.projection import Projection, projection_seed
from validation.claim import Comparison, Setting
from validation.reconstruct import KINDS, RANKS, GivenRows, Z, mean_square, reconstruct, remainder
from validation.spread import Spectrum, predict

LAYERS, QUICK_LAYERS = tuple(range(30)), (0, 6, 12, 18, 24, 29)
FIXED, REFRESHED = "fixed, second batch", "refreshed, second batch"
ONE = Spectrum(1.0, 0.0)  # where only the first order is asked for
Cell = tuple[int, str, int]
"""Layer, matrix and rank."""


@dataclass
class Study:
    """Cosines by condition (a kind of projection, or a batch's basis) and cell, one for each seed; and their causes."""

    layers: tuple[int, ...]
    matrices: tuple[str, ...]
    seeds: int
    prompts: int
    right: float = 0.0
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)
    spectra: dict[tuple[int, str], Spectrum] = field(default_factory=dict)
    second_spectra: dict[tuple[int, str], Spectrum] = field(default_factory=dict)
    overlaps: dict[tuple[int, str], float] = field(default_factory=dict)
    """tr(M₁ M₂) of the two batches: what Σλ² is for one gradient, this is for what two have in common."""
    cosines: dict[tuple[str, Cell], list[float]] = field(default_factory=dict)
    correlated: dict[Cell, float] = field(default_factory=dict)
    """The cosine where A's rows are the gradient's own first rows: for controls."""
    formed: list[tuple[float, float, float]] = field(default_factory=list)

    def cells(self, rank: int) -> list[Cell]:
        return [(layer, matrix, rank) for layer in self.layers for matrix in self.matrices]

    def mean(self, condition: str, rank: int) -> float:
        """The mean cosine over layers, matrices and seeds."""
        return float(np.mean([self.cosines[condition, cell] for cell in self.cells(rank)]))

    def predicted(self, condition: str, cell: Cell):
        layer, matrix, rank = cell
        kind = condition if condition in KINDS else "rademacher"
        spectra = self.spectra if condition in KINDS else self.second_spectra
        return predict(kind, rank, self.shapes[matrix][1], spectra[layer, matrix])


def study(setting: Setting) -> Study:
    """Sample two batches, take their dense gradients, reconstruct each. Raises ``NotMeasured`` without the model."""
    folder = setting.model_folder()
    from validation.gradients import MATRICES, dense_gradients, open_demo, sample_batches  # transformers takes seconds

    prompts = 16 if setting.quick else 64
    layers = QUICK_LAYERS if setting.quick else LAYERS
    model, tokenizer, config = open_demo(folder, setting.derived_seed("C13 rollout") % 2**31, prompts)
    batches = sample_batches(model, tokenizer, config, 2)
    found = Study(layers, MATRICES, 2 if setting.quick else 8, prompts, right=batches[0].right())
    first, second = (dense_gradients(model, tokenizer, config, batch, layers) for batch in batches)
    for layer, matrix in setting.track(list(first), "C13 real gradients"):
        measure_matrix(found, setting, (layer, matrix), first.pop((layer, matrix)), second.pop((layer, matrix)))
    return found


def measure_matrix(found: Study, setting: Setting, key: tuple[int, str], gradient: Tensor, later: Tensor) -> None:
    """All ranks, kinds and seeds for one matrix's gradients of two batches."""
    layer, matrix = key
    width = gradient.shape[1]
    found.shapes[matrix] = (gradient.shape[0], width)
    found.spectra[key], found.second_spectra[key] = Spectrum.of(gradient), Spectrum.of(later)
    g, h = gradient.double(), later.double()
    found.overlaps[key] = float((g @ h.T).square().sum() / (g.square().sum() * h.square().sum()))
    for rank in RANKS:
        cell = (layer, matrix, rank)
        for seed in range(found.seeds):
            base = setting.derived_seed(f"C13 real {rank} {seed}")

            def drawn(kind: str, update: int, base: int = base, rank: int = rank) -> Projection:
                name = f"{kind} layers.{layer}.{matrix}"
                return Projection(kind, rank, width, projection_seed(base, update, name), keep=True)

            basis = drawn("rademacher", 1)
            (_, now), (_, kept) = reconstruct([gradient, later], basis)
            ((_, redrawn),) = reconstruct([later], drawn("rademacher", 2))
            results = {"rademacher": now, FIXED: kept, REFRESHED: redrawn}
            for kind in KINDS[1:]:
                ((_, results[kind]),) = reconstruct([gradient], drawn(kind, 1))
            for condition, cosine in results.items():
                found.cosines.setdefault((condition, cell), []).append(cosine)
        ((_, found.correlated[cell]),) = reconstruct([gradient], GivenRows(gradient[:rank]))
    if layer == found.layers[0]:
        found.formed.append(
            _formed(gradient, Projection("rademacher", 16, width, setting.derived_seed(f"C13 {matrix}")))
        )


def _formed(gradient: Tensor, projection: Projection) -> tuple[float, float, float]:
    """The cosine by ``reconstruct``, by numpy with Ĝ formed, and with ‖S‖ in place of ‖Ĝ‖ (wrong)."""
    ((inner, cosine),) = reconstruct([gradient], projection)
    g, a = gradient.numpy().astype(np.float64), projection.matrix(dtype=torch.float64).numpy()
    lifted = g @ a.T @ a
    return cosine, float((g * lifted).sum() / np.linalg.norm(g) / np.linalg.norm(lifted)), math.sqrt(inner)


def comparisons(found: Study) -> list[Comparison]:
    """Real gradients against the prediction from shape and spectrum."""
    lines = [_mean(found, "rademacher", rank) for rank in RANKS]
    lines += [_mean(found, kind, RANKS[-1]) for kind in KINDS[1:]]
    lines.append(_shape_alone(found))
    worst = max(found.formed, key=lambda entry: abs(entry[0] - entry[1]))
    lines += [
        Comparison(
            what="real gradients: cosine without forming Ĝ, the matrix where it is furthest off",
            expected=worst[1],
            measured=worst[0],
            tolerance=1e-5,
            reason="fp32 sums of up to 1,536 terms of either sign, relative 6e-8 each",
            oracle="numpy in fp64 with Ĝ formed",
            control="‖G Aᵀ‖ in place of ‖Ĝ‖",
            control_measured=worst[2],
        ),
        *_spread(found),
        *_basis(found),
    ]
    return lines


def _mean(found: Study, kind: str, rank: int) -> Comparison:
    predicted = [found.predicted(kind, cell) for cell in found.cells(rank)]
    expected = float(np.mean([p.second for p in predicted]))
    error = math.sqrt(sum(p.deviation**2 for p in predicted) / found.seeds) / len(predicted)
    return Comparison(
        what=f"real gradients, r = {rank}: mean cosine, {kind}",
        expected=expected,
        measured=found.mean(kind, rank),
        tolerance=Z * error + remainder(rank) * expected,
        reason=f"{Z:g} standard errors, of the predicted spread, of {len(predicted) * found.seeds} draws, "
        "and the third order",
        oracle="second order from the shape, Σλ² and Σ M_ii² of each gradient",
        control="A's rows taken from the gradient",
        control_measured=float(np.mean([found.correlated[cell] for cell in found.cells(rank)])),
        chance=1e-7,
    )


def _shape_alone(found: Study) -> Comparison:
    """The first order, which knows nothing of the gradients, at a rank where the second is below 1/(4r) = 0.1 %."""
    rank = RANKS[-1]
    predicted = [found.predicted("rademacher", cell) for cell in found.cells(rank)]
    expected = float(np.mean([p.first for p in predicted]))
    error = math.sqrt(sum(p.deviation**2 for p in predicted) / found.seeds) / len(predicted)
    return Comparison(
        what=f"real gradients, r = {rank}: mean cosine, from the shapes alone",
        expected=expected,
        measured=found.mean("rademacher", rank),
        tolerance=Z * error + expected / (4 * rank),
        reason=f"{Z:g} standard errors of {len(predicted) * found.seeds} draws, and a second order of up to 1/(4r)",
        oracle="1/√E[tr(M (AᵀA)²)], which is the same for every gradient",
        control="outputs d in place of inputs k",
        control_measured=float(np.mean([predict("rademacher", rank, d, ONE).first for d, _ in found.shapes.values()])),
        chance=1e-8,
    )


def _spread(found: Study) -> list[Comparison]:
    """Mean square of the cells' deviations from the second order, in standard errors: 1 if the spread is right."""
    squares, naive = [], []
    for rank in RANKS:
        for cell in found.cells(rank):
            p = found.predicted("rademacher", cell)
            off = float(np.mean(found.cosines["rademacher", cell])) - p.second
            squares.append(off**2 / (p.deviation**2 / found.seeds))
            naive.append(off**2 / (p.first**2 / (2 * rank * 64) / found.seeds))
    return mean_square(
        "real gradients: mean square of a cell's distance from the second order, in standard errors",
        np.array(squares),
        oracle="the predicted standard deviation of each cell",
        control="Σλ² = 1/64, as if each gradient had 64 equal singular values",
        control_measured=float(np.mean(naive)),
    )


def _basis(found: Study) -> list[Comparison]:
    """Fixed against refreshed basis: the second batch's cells, in the standard errors of their difference."""
    squares = []
    for rank in RANKS:
        for layer in found.layers:
            cells = [(layer, matrix, rank) for matrix in found.matrices]
            off = np.mean([np.subtract(found.cosines[FIXED, c], found.cosines[REFRESHED, c]).mean() for c in cells])
            variance = sum(2 * found.predicted(FIXED, c).deviation ** 2 for c in cells) / found.seeds / len(cells) ** 2
            squares.append(float(off**2 / variance))
    return mean_square(
        "real gradients: mean square of fixed − refreshed by layer and rank, in standard errors",
        np.array(squares),
        oracle="no difference but that of independent draws: Var = 2 Σ σ²/(7² seeds)",
        control="a fixed basis that lies in the gradient",
        control_measured=_lying(found),
    )


def _lying(found: Study) -> float:
    squares = []
    for cell in found.cells(RANKS[0]):
        p = found.predicted("rademacher", cell)
        squares.append((found.correlated[cell] - p.second) ** 2 / (2 * p.deviation**2))
    return float(np.mean(squares))


def record(found: Study) -> dict[str, Any]:
    """What the plots need: cosines by rank, layer and matrix, measured and predicted; spectra by layer and matrix."""

    def grid(value: Callable[[Cell], float]) -> list[list[list[float]]]:
        return [[[round(value((n, m, r)), 4) for m in found.matrices] for n in found.layers] for r in RANKS]

    def spectra(value: Callable[[tuple[int, str]], float]) -> list[list[float]]:
        return [[round(value((layer, m)), 4) for m in found.matrices] for layer in found.layers]

    conditions = [*KINDS, FIXED, REFRESHED]
    return {
        "layers": found.layers,
        "matrices": found.matrices,
        "shapes": [found.shapes[m] for m in found.matrices],
        "seeds": found.seeds,
        "prompts": found.prompts,
        "measured": grid(lambda cell: float(np.mean(found.cosines["rademacher", cell]))),
        "second": grid(lambda cell: found.predicted("rademacher", cell).second),
        "deviation": grid(lambda cell: found.predicted("rademacher", cell).deviation / math.sqrt(found.seeds)),
        "first": [[predict("rademacher", r, found.shapes[m][1], ONE).first for m in found.matrices] for r in RANKS],
        "by_layer": {
            c: [[round(_layer_mean(found, c, n, r), 5) for n in found.layers] for r in RANKS] for c in conditions
        },
        "participation": spectra(lambda key: found.spectra[key].participation),
        "coherence": spectra(lambda key: found.spectra[key].coherence),
        "overlap": spectra(lambda key: found.overlaps[key]),
    }


def _layer_mean(found: Study, condition: str, layer: int, rank: int) -> float:
    return float(np.mean([found.cosines[condition, (layer, matrix, rank)] for matrix in found.matrices]))


def explanation(found: Study) -> str:
    """The largest difference between measured and predicted, and its cause in the gradient's spectrum."""
    cells = [cell for rank in RANKS for cell in found.cells(rank)]
    predicted = {cell: found.predicted("rademacher", cell) for cell in cells}
    off = {cell: float(np.mean(found.cosines["rademacher", cell])) - predicted[cell].first for cell in cells}
    layer, matrix, rank = worst = max(cells, key=lambda cell: abs(off[cell]) / predicted[cell].first)
    spectrum, p = found.spectra[layer, matrix], predicted[worst]
    bases = [
        abs(_layer_mean(found, FIXED, layer, r) - _layer_mean(found, REFRESHED, layer, r))
        for r in RANKS
        for layer in found.layers
    ]
    ranks = [1 / s.participation for s in found.spectra.values()]
    return (
        f"Real gradients: {len(found.layers)} layers of the 135M model, {found.prompts} sampled responses a batch, "
        f"{found.right:.0%} right, {found.seeds} seeds. Furthest from what the shape says is {matrix} of layer {layer} "
        f"at r = {rank}: {off[worst] + p.first:.4f} for {p.first:.4f}. There are {1 / spectrum.participation:.1f} "
        f"effective ranks (1/Σλ²) in its gradient, so the mean is {p.second:.4f} with a standard error of "
        f"{p.deviation / math.sqrt(found.seeds):.4f}. Over all matrices there are {min(ranks):.1f} to {max(ranks):.1f} "
        f"effective ranks. Fixed and refreshed basis differ by up to {max(bases):.4f} in a cell of the second batch; "
        f"two batches have in common tr(M₁M₂) = {np.mean(list(found.overlaps.values())):.2f} in the mean, where Σλ² is "
        f"{np.mean([s.participation for s in found.spectra.values()]):.2f}. The paper's cells average 56 draws or more "
        "over wider matrices, and so differ less."
    )
