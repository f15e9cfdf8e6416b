"""From a sketch S (d, r) to the update factor U (d, r): S itself, or RowAdam (Appendix B).

Either is S with each row multiplied by a number, so U takes no memory beside S but for a number a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from logra_ref.holding import Total, identity


@dataclass(frozen=True)
class Factor:
    """U (d, r) = row_scale · levels, a scale a row.

    ``levels`` are the sketch itself, no copy of it, or small integers (``sync.round_rows``), with which U A is an exact
    sum. ``changed``: the sketch has changed since, and this is no longer its factor.
    """

    levels: Float[Tensor, "d r"]
    row_scale: Float[Tensor, " d"]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_version", self.levels._version)

    @classmethod
    def of(cls, direction: Float[Tensor, "d r"]) -> Factor:
        return cls(direction, direction.new_ones(len(direction)))

    def direction(self) -> Float[Tensor, "d r"]:
        return self.row_scale[:, None] * self.levels

    @property
    def changed(self) -> bool:
        return self.levels._version != self._version


def sgd_factor(sketch: Float[Tensor, "d r"], *, total: Total = identity) -> Factor:
    """U = S. Raises ``FloatingPointError`` for a sketch that is not finite."""
    require_finite(sketch, total)
    return Factor.of(sketch)


def row_adam_factor(
    sketch: Float[Tensor, "d r"],
    second_moment: Float[Tensor, " d"],
    *,
    step: int,
    beta2: float = 0.95,
    epsilon: float = 1e-8,
    total: Total = identity,
) -> tuple[Factor, Float[Tensor, " d"]]:
    """RowAdam: each row scaled by one running second moment, the norm of the whole restored (Appendix B).

        v_i     ← β₂ v_i + (1 − β₂) mean_j S_ij²
        root_i  = √(v_i / (1 − β₂^t))
        Ũ_i     = S_i / (root_i + ε mean_i(root))
        U       = Ũ ‖S‖_F / ‖Ũ‖_F

    No first moment; d numbers of state, which outlive A since E_A[mean_j S_ij²] = ‖g_i‖²/r whatever A is. The rows
    may be some of the matrix's: ``total`` sums a tensor over all holders of rows. ``step`` is t, from 1. Returns U, as
    S and a number a row, and the new v; S and v are left as they are, so that a proposal that is not taken costs
    nothing. S = 0 gives U = 0.

    Raises ``FloatingPointError`` for a sketch that is not finite and ``ValueError`` for a step below 1.
    """
    require_finite(sketch, total)
    if step < 1:
        raise ValueError(f"RowAdam counts applied updates from 1, not from {step}")
    row_square = sketch.square().mean(dim=1)
    second_moment = beta2 * second_moment + (1 - beta2) * row_square
    root = (second_moment / (1 - beta2**step)).sqrt()
    root_sum, rows = total(torch.stack([root.sum(), root.new_tensor(len(root))]))
    damped = root + epsilon * root_sum / rows
    # A row that never had a gradient has S_i = 0; dividing by one keeps it 0 instead of 0/0.
    damped = torch.where(damped == 0, 1, damped)
    sketch_square, scaled_square = total(torch.stack([row_square.sum(), (row_square.sqrt() / damped).square().sum()]))
    if not torch.isfinite(sketch_square + scaled_square):
        raise FloatingPointError("squares of the sketch's numbers, or second moments, overflow; nothing was changed")
    ratio = torch.where(scaled_square > 0, sketch_square / scaled_square, 0).sqrt()
    return Factor(sketch, ratio / damped), second_moment


def sgd_direction(sketch: Float[Tensor, "d r"], *, total: Total = identity) -> Float[Tensor, "d r"]:
    """``sgd_factor`` as U itself, a matrix beside S."""
    return sgd_factor(sketch, total=total).direction()


def row_adam_direction(
    sketch: Float[Tensor, "d r"],
    second_moment: Float[Tensor, " d"],
    *,
    step: int,
    beta2: float = 0.95,
    epsilon: float = 1e-8,
    total: Total = identity,
) -> tuple[Float[Tensor, "d r"], Float[Tensor, " d"]]:
    """``row_adam_factor`` with U itself, a matrix beside S; and the new v."""
    factor, second_moment = row_adam_factor(sketch, second_moment, step=step, beta2=beta2, epsilon=epsilon, total=total)
    return factor.direction(), second_moment


def require_finite(sketch: Tensor, total: Total = identity) -> None:
    """Raise ``FloatingPointError``, at every holder of rows, if any number of a sketch is not finite."""
    finite = torch.isfinite(sketch).sum()
    bad, numbers = total(torch.stack([sketch.numel() - finite, finite.new_tensor(sketch.numel())])).tolist()
    if bad:
        raise FloatingPointError(f"{bad} of {numbers} numbers of the sketch are not finite; nothing was changed")
