"""C27: orthonormal rows in place of independent entries."""

from __future__ import annotations

import math

import numpy as np
import scipy.stats
import torch

from logra_ref.projection import Kind, Projection, projection_seed
from validation.claim import Comparison, Measurement, Setting, claim
from validation.reconstruct import (
    CLOSED,
    KINDS,
    QWEN,
    RANKS,
    GivenRows,
    Z,
    expected_mean,
    mean_comparison,
    reconstruct,
    remainder,
    seeded_normal,
    simulate,
    width_mean,
)
from validation.spread import Spectrum, predict


@claim("C27", "orthonormal rows reconstruct better for the same sketch", "ours")
def orthonormal(setting: Setting) -> Measurement:
    """√(r/k) for √(r/(k+r−1)): 0.374 against 0.348 at r = 256, and exact at r = k."""
    draws = 2 if setting.quick else 8
    found, wrong = (simulate(setting, kind, 256, draws) for kind in ("orthonormal", "rademacher"))
    correlated = simulate(setting, "orthonormal", 256, 1, correlated=True)
    lines = [
        Comparison(
            what="mean cosine from layer shapes alone, r = 256",
            expected=float(np.mean([math.sqrt(256 / k) for _, k in QWEN.values()])),
            measured=width_mean("orthonormal", 256),
            tolerance=1e-12,
            reason=CLOSED,
            oracle="ĝ is k/r times g's part in a random subspace of r dimensions, which holds r/k of ‖g‖²",
            control="Rademacher rows",
            control_measured=width_mean("rademacher", 256),
        )
    ]
    for spectrum in ("64 equal ranks", "power law", "rank one"):
        what = f"simulated gradients, {spectrum}, r = 256: mean cosine"
        lines.append(mean_comparison(what, found[spectrum], 256, correlated[spectrum]))
    gain = [float(np.mean([c for _, c, _ in kind["64 equal ranks"]])) for kind in (found, wrong)]
    error = math.sqrt(2 * sum(p.deviation**2 for _, _, p in found["64 equal ranks"])) / len(found["64 equal ranks"])
    lines += [
        Comparison(
            what="simulated gradients, 64 equal ranks, r = 256: gain over Rademacher",
            expected=expected_mean("orthonormal", 256) - expected_mean("rademacher", 256),
            measured=gain[0] - gain[1],
            tolerance=Z * error,
            reason=f"{Z:g} standard errors of a difference of two means of {7 * draws}",
            oracle="√(r/k) − 1/√E[tr(M (AᵀA)²)], the latter summed over partitions",
            control="Rademacher rows beside themselves",
            control_measured=0.0,
            chance=1e-8,
        ),
        *share(setting),
        *square(setting),
    ]
    means = {kind: [width_mean(kind, r) for r in RANKS] for kind in KINDS}
    lines.insert(0, lines.pop(1))  # the headline is one that draws projections
    note = (
        "The sketch and both products cost the same. A does not: a kept one takes its entries in fp32, 32 times the "
        "bits of signs, and a draw needs a QR decomposition."
    )
    return Measurement(lines, note, {"ranks": list(RANKS), "means": means})


def share(setting: Setting) -> list[Comparison]:
    """The square of the cosine is the subspace's share of G: its mean is r/k for every gradient, to all orders."""
    rank, width, draws = 16, 64, 1000
    gradient = seeded_normal(1, width, setting.derived_seed("C27 share"))

    def means(kind: Kind) -> tuple[float, float]:
        base = setting.derived_seed(f"C27 share {kind}")
        drawn = [Projection(kind, rank, width, projection_seed(base, u, "w"), keep=True) for u in range(draws)]
        found = [reconstruct([gradient], projection)[0] for projection in drawn]
        return float(np.mean([inner for inner, _ in found])), float(np.mean([cosine**2 for _, cosine in found]))

    inner, square = means("orthonormal")
    beta = scipy.stats.beta(rank / 2, (width - rank) / 2)
    error = Z * float(beta.std()) / math.sqrt(draws)
    common = {
        "reason": f"{Z:g} standard errors of {draws:,} draws",
        "oracle": "share of a vector in a random subspace: Beta(r/2, (k − r)/2) of scipy",
        "chance": 1e-8,
    }
    return [
        Comparison(
            what="mean square of the cosine at r = 16, k = 64, a gradient of rank one",
            expected=float(beta.mean()),
            measured=square,
            tolerance=error,
            control="rows that are not made orthogonal",
            control_measured=means("gaussian")[1],
            **common,
        ),
        Comparison(
            what="mean of ⟨G, Ĝ⟩/‖G‖² at r = 16, k = 64, to whose scale the cosine is blind",
            expected=1.0,
            measured=inner,
            tolerance=error * width / rank,
            control="1/√r for the scale √(k/r)",
            control_measured=inner / width,
            **common,
        ),
    ]


def square(setting: Setting) -> list[Comparison]:
    """r = k: orthonormal rows lose nothing, independent signs keep a cosine of √(k/(2k − 1))."""
    width, draws = 96, 50
    seed = setting.derived_seed("C27 square")
    gradient = seeded_normal(40, width, seed)
    whole = {kind: Projection(kind, width, width, projection_seed(seed, 1, kind)) for kind in KINDS}
    off = {kind: float((p.lift(p.project(gradient)) - gradient).norm() / gradient.norm()) for kind, p in whole.items()}
    drawn = [Projection("rademacher", width, width, projection_seed(seed, u, "w"), keep=True) for u in range(draws)]
    cosines = [reconstruct([gradient], projection)[0][1] for projection in drawn]
    predicted = predict("rademacher", width, width, Spectrum.of(gradient))
    orthogonal = torch.linalg.qr(seeded_normal(width, width, seed + 1))[0]
    return [
        Comparison(
            what="‖Ĝ − G‖/‖G‖ at r = k",
            expected=0.0,
            measured=off["orthonormal"],
            tolerance=1e-12,
            reason="fp64: 96 rounding errors of 1e-16 in each of two products",
            oracle="AᵀA = I for a square orthogonal A",
            control="Rademacher rows at r = k",
            control_measured=off["rademacher"],
        ),
        Comparison(
            what="mean cosine of Rademacher rows at r = k = 96",
            expected=predicted.second,
            measured=float(np.mean(cosines)),
            tolerance=Z * predicted.deviation / math.sqrt(draws) + predicted.first * remainder(width),
            reason=f"{Z:g} standard errors of {draws} draws",
            oracle="second order from enumerated moments; to first order √(k/(2k − 1)) = 0.709",
            control="orthonormal rows",
            control_measured=reconstruct([gradient], GivenRows(orthogonal))[0][1],
            chance=1e-8,
        ),
    ]
