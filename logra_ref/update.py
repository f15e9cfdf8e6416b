"""The proposal D_W = −η U A of all matrices at once, kept as factors, and its merge W ← W + α D_W (§2.1, Eq. 4)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from jaxtyping import Float, Real
from torch import Tensor

from logra_ref.direction import Factor
from logra_ref.holding import WHOLE, Holding
from logra_ref.projection import Projection
from logra_ref.sketch import SketchedLinear

MERGE_ROWS = 1024  # rows of U A that exist at a time


def nominal_step(update_norm: float, weight_norm: float, update_ratio: float) -> float:
    """η such that ‖D‖ = ρ ‖W‖ over all selected matrices: η = ρ ‖W‖ / ‖U A‖; 0 where U A = 0."""
    return update_ratio * weight_norm / update_norm if update_norm > 0 else 0.0


def squared_norm(weight: Float[Tensor, "d k"]) -> Float[Tensor, ""]:
    """‖W‖_F², the norm of each row in the weight's dtype and the sum of their squares in fp64: no fp64 copy of W."""
    return torch.linalg.vector_norm(weight, dim=1).double().square().sum()


def lifted_square(factor: Factor, projection: Projection) -> Float[Tensor, ""]:
    """‖U A‖_F² = tr(UᵀU · AAᵀ) without forming U A: UᵀU in the factor's dtype, AAᵀ and the sum in fp64."""
    direction = factor.direction()
    gram = projection.gram(direction.device, direction.dtype)
    return ((direction.T @ direction).double() * gram).sum()


def lifted_rows(
    levels: Real[Tensor, "d r"], coefficient: Float[Tensor, " d"], projection: Projection
) -> Float[Tensor, "d k"]:
    """c_i (levels_i E), with E the projection's unscaled entries: what an update takes off some rows of a weight.

    With integer levels and ±1 entries the sum in ``levels E`` is exact, whatever its order.
    """
    return projection.lift(levels.to(coefficient.dtype), scaled=False).mul_(coefficient[:, None])


def merge_rows_(
    weight: Float[Tensor, "d k"],
    levels: Real[Tensor, "d r"],
    coefficient: Float[Tensor, " d"],
    projection: Projection,
) -> None:
    """W_i ← W_i − c_i (levels_i E), in place, in blocks of rows.

    One product and one difference, as two operations: every holder of W, however it shards W, ends with the same
    bits. (``addmm`` would fuse them.)
    """
    for start in range(0, len(weight), MERGE_ROWS):
        rows = slice(start, start + MERGE_ROWS)
        weight[rows] -= lifted_rows(levels[rows], coefficient[rows].to(weight.dtype), projection)


class FactoredUpdate:
    """The proposal: for each selected matrix U and A, and one η for all.

    ``update`` is the number of the update that the projections were drawn for (1 throughout if they are fixed),
    ``weight_norm`` the norm of the selected weights, ``update_ratio`` is ρ; ``holding`` is who holds which rows.

    The factors may be the sketches themselves: once those have changed, ``RuntimeError`` is all that comes of them.
    """

    def __init__(
        self,
        layers: Mapping[str, SketchedLinear],
        factors: Mapping[str, Factor],
        *,
        update: int,
        update_ratio: float,
        holding: Holding = WHOLE,
    ) -> None:
        self.layers, self.factors, self.update = dict(layers), dict(factors), update
        self.projections = {name: layer.projection for name, layer in self.layers.items()}
        self.weights = {name: holding.own(layer.weight) for name, layer in self.layers.items()}
        squares = [lifted_square(factor, self.projections[name]) for name, factor in self.factors.items()]
        held = [squared_norm(weight) for weight in self.weights.values()]
        lifted_norm, weight_norm = holding.total(torch.stack([sum(squares), sum(held)])).sqrt().tolist()
        self.weight_norm = weight_norm
        self.eta = nominal_step(lifted_norm, weight_norm, update_ratio)
        self._lifted_norm = lifted_norm

    def norm(self) -> float:
        """‖D‖_F = η ‖U A‖_F over all matrices."""
        return self.eta * self._lifted_norm

    def coefficients(self, alpha: float) -> dict[str, Float[Tensor, " d"]]:
        """c_i = α η s_i · scale of A, the fp32 (or the weights') number of each row: what is merged and sent."""
        self._require_unchanged()
        return {
            name: factor.row_scale * (alpha * self.eta * self.projections[name].scale)
            for name, factor in self.factors.items()
        }

    @torch.no_grad()
    def apply_(self, alpha: float) -> None:
        """W ← W + α D_W for every selected matrix; no adapter stays."""
        if not math.isfinite(alpha):
            raise FloatingPointError(f"step multiplier α = {alpha} is not finite; nothing was changed")
        coefficients = self.coefficients(alpha)
        for name, weight in self.weights.items():
            merge_rows_(weight, self.factors[name].levels, coefficients[name], self.projections[name])

    def displaced(self, alpha: float) -> AbstractContextManager[None]:
        """Inside, the layers compute with W + α D_W, as factors: no weight is touched, so there is none to restore."""
        return self._factors(alpha, moving=False)

    def tangents(self) -> AbstractContextManager[None]:
        """Inside, under ``forward_ad.dual_level``, the layers add the rate of change along D, −η (x Aᵀ) Uᵀ."""
        return self._factors(1.0, moving=True)

    @contextmanager
    def _factors(self, alpha: float, *, moving: bool) -> Iterator[None]:
        self._require_unchanged()
        for name, layer in self.layers.items():
            if layer.projection is not self.projections[name]:
                raise RuntimeError(f"the projection of {name} was redrawn after this update was proposed")
        for name, layer in self.layers.items():
            factor = self.factors[name]
            layer.factor, layer.moving = Factor(factor.levels, -alpha * self.eta * factor.row_scale), moving
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.factor, layer.moving = None, False

    def _require_unchanged(self) -> None:
        for name, factor in self.factors.items():
            if factor.changed:
                raise RuntimeError(f"the sketch of {name} was changed after this update was proposed; nothing was done")
