"""Reconstructions of one gradient from many projections, of every kind."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from logra_ref.projection import Kind, Projection, projection_seed
from validation.claim import Setting
from validation.enumeration import energy_of_independent_entries

KINDS: tuple[Kind, ...] = get_args(Kind)
LARGE = (8, 40, 8)  # d, k, r; Hadamard pads k to 64


def reconstructed(projection: Projection, g: Float[Tensor, "d k"]) -> Float[Tensor, "d k"]:
    """Ĝ = G AᵀA by the code's own two products."""
    return projection.lift(projection.project(g))


def draw_many(kind: Kind, setting: Setting, count: int) -> dict[str, np.ndarray]:
    """Reconstructions of one G for many seeds of one kind of projection.

    Gives G, the mean and the standard deviation of Ĝ, and for each seed the alignment ⟨Ĝ, G⟩/‖G‖², the energy
    ‖Ĝ‖²/‖G‖², and the alignment of data that were drawn with the projection's own seed.
    """
    d, k, r = LARGE
    g = torch.randn(d, k, dtype=torch.float64, generator=setting.generator(f"data {kind}"))
    base, total, squares = setting.derived_seed(f"projections {kind}"), torch.zeros_like(g), torch.zeros_like(g)
    aligned, energy, same_seed = [], [], []
    for update in setting.track(range(1, count + 1), f"C01 {kind}"):
        projection = Projection(kind, r, k, projection_seed(base, update, "w"))
        lifted = reconstructed(projection, g)
        total, squares = total + lifted, squares + lifted.square()
        aligned.append(float((lifted * g).sum() / g.square().sum()))
        energy.append(float(lifted.square().sum() / g.square().sum()))
        own = projection.entries(dtype=torch.float64)
        same_seed.append(float((reconstructed(projection, own) * own).sum() / own.square().sum()))
    mean = total / count
    # Draws that never change have no spread; what is not 0 keeps every score a number.
    deviation = ((squares / count - mean.square()) * count / (count - 1)).clamp(min=1e-24).sqrt()
    return {
        "g": g.numpy(),
        "mean": mean.numpy(),
        "deviation": deviation.numpy(),
        "alignment": np.array(aligned),
        "energy": np.array(energy),
        "same seed": np.array(same_seed),
    }


def error_of_averages(setting: Setting, most: int = 512) -> dict[str, list[float]]:
    """‖mean of n reconstructions − G‖ / ‖G‖ for n = 1, 2, 4, …: measured, and √((E‖Ĝ‖²/‖G‖² − 1)/n)."""
    d, k, r = LARGE
    g = torch.randn(d, k, dtype=torch.float64, generator=setting.generator("averages"))
    base, total = setting.derived_seed("averages"), torch.zeros_like(g)
    counts, errors = [], []
    for n in range(1, most + 1):
        total += reconstructed(Projection("rademacher", r, k, projection_seed(base, n, "w")), g)
        if n & (n - 1) == 0:
            counts.append(float(n))
            errors.append(float((total / n - g).norm() / g.norm()))
    excess = float(energy_of_independent_entries(Fraction(1), r, k)) - 1
    return {"averaged": counts, "error": errors, "predicted": [math.sqrt(excess / n) for n in counts]}


def error_of_mean(values: np.ndarray, z: float = 6) -> float:
    """z standard errors of the mean."""
    return float(z * values.std(ddof=1) / math.sqrt(len(values)))
