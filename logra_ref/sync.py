"""The policy sync: an update as O(d r) numbers, and weights that a bf16 engine holds exactly (§2.2).

The message of an update is, for each matrix, the factor in integers (d, r) and one fp32 coefficient a row, with the
numbers that the projection is a function of. A receiver redraws A and applies ``merge_rows_``, the same function as
the trainer. With ±1 entries and integer factors the sum over r is exact, so both end with the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from logra_ref.direction import Factor
from logra_ref.projection import Kind, Projection, projection_seed
from logra_ref.update import FactoredUpdate, merge_rows_

INT8_MOST = 127
TIE = 0x8000  # the low half of an fp32 number that lies between two bf16 numbers


def round_rows(direction: Float[Tensor, "d r"]) -> Factor:
    """U_ij ≈ s_i Q_ij with integers |Q_ij| ≤ 127 and s_i = max_j |U_ij| / 127. A row of zeros has s_i = 0."""
    row_scale = direction.abs().amax(dim=1) / INT8_MOST
    levels = torch.round(direction / torch.where(row_scale > 0, row_scale, 1)[:, None])
    return Factor(levels.clamp(-INT8_MOST, INT8_MOST), row_scale)


@dataclass(frozen=True)
class FactorMessage:
    """What an engine is sent for one update: α η U as levels and coefficients, by canonical weight name."""

    update: int
    base_seed: int
    kind: Kind
    rank: int
    levels: Mapping[str, Int[Tensor, "d r"]]
    coefficients: Mapping[str, Float[Tensor, " d"]]

    @classmethod
    def of(cls, proposal: FactoredUpdate, alpha: float, *, base_seed: int) -> FactorMessage:
        """The message of a proposal with int8 factors.

        Raises ``ValueError`` if its factors are no such integers, and if ``base_seed`` is not that of its projections.
        """
        levels = {name: factor.levels.to(torch.int8) for name, factor in proposal.factors.items()}
        for name, factor in proposal.factors.items():
            if not torch.equal(levels[name].to(factor.levels.dtype), factor.levels):
                raise ValueError(f"the factor of {name} is not rounded to int8; build LoGRA with int8_factors=True")
        for name, projection in proposal.projections.items():
            if projection.seed != projection_seed(base_seed, proposal.update, name):
                raise ValueError(f"the projection of {name} is not that of base seed {base_seed}; receivers would err")
        any_projection = next(iter(proposal.projections.values()))
        return cls(
            proposal.update, base_seed, any_projection.kind, any_projection.rank, levels, proposal.coefficients(alpha)
        )

    @property
    def byte_count(self) -> int:
        """Bytes of the factors; the header is a few dozen more."""
        tensors = [*self.levels.values(), *self.coefficients.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def digest(self) -> str:
        """SHA-256 over header, names, shapes and bytes: any change of any of them changes it."""
        total = hashlib.sha256(f"{self.update}|{self.base_seed}|{self.kind}|{self.rank}".encode())
        for name in sorted(self.levels):
            for tensor in (self.levels[name], self.coefficients[name]):
                total.update(f"|{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
                total.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return total.hexdigest()


def redrawn(message: FactorMessage, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Projection]:
    """The projections of a message, drawn again by a receiver whose weights have these shapes.

    All is checked: ``ValueError`` for a name or shape that does not fit, for levels that are not int8, a coefficient
    that is not finite and a projection that the matrix cannot have.
    """
    if set(message.levels) != set(message.coefficients):
        raise ValueError("the message has levels and coefficients of different matrices; nothing was changed")
    projections = {}
    for name, levels in message.levels.items():
        if name not in shapes:
            raise ValueError(f"the message updates {name}, which this model does not have; nothing was changed")
        (rows, width), coefficient = shapes[name], message.coefficients[name]
        if levels.dtype != torch.int8 or tuple(levels.shape) != (rows, message.rank) or coefficient.shape != (rows,):
            raise ValueError(
                f"the factor of {name} is {levels.dtype} {tuple(levels.shape)} with {tuple(coefficient.shape)} "
                f"coefficients, not int8 {(rows, message.rank)} with {(rows,)}; nothing was changed"
            )
        if not torch.isfinite(coefficient).all():
            raise ValueError(f"a coefficient of {name} is not finite; nothing was changed")
        seed = projection_seed(message.base_seed, message.update, name)
        projections[name] = Projection(message.kind, message.rank, width, seed)
    return projections


@torch.no_grad()
def apply_message_(weights: Mapping[str, Float[Tensor, "d k"]], message: FactorMessage) -> None:
    """Merge the message into the receiver's weights, in place.

    Everything is checked before anything is written: ``ValueError`` as from ``redrawn``, and for a weight of another
    dtype than the trainer's.
    """
    projections = redrawn(message, {name: tuple(weight.shape) for name, weight in weights.items()})
    for name, coefficient in message.coefficients.items():
        if coefficient.dtype != (held := weights[name].dtype):
            raise ValueError(f"weight {name} is {held}, not {coefficient.dtype} as sent; nothing was changed")
    for name, projection in projections.items():
        merge_rows_(weights[name], message.levels[name], message.coefficients[name], projection)


@dataclass
class SplitWeight:
    """An fp32 weight as bf16 and the 16 bits below it: what a bf16 engine keeps to follow the trainer exactly.

    ``high`` is bf16(W), which the engine computes with; ``low`` the signed distance of the fp32 bits from it.
    """

    high: Tensor
    low: Tensor

    @classmethod
    def of(cls, weight: Float[Tensor, "*n"]) -> SplitWeight:
        """Split an fp32 weight. Raises ``ValueError`` for ties (``nudge_ties_`` first) and for other dtypes."""
        bits = _bits(weight)
        if bool(_is_tie(bits).any()):
            raise ValueError("the weight lies between two bf16 numbers somewhere; call nudge_ties_ on it first")
        high = weight.to(torch.bfloat16)
        return cls(high, (bits - (high.view(torch.int16).to(torch.int32) << 16)).to(torch.int16))

    def join(self) -> Float[Tensor, "*n"]:
        """The fp32 weight, bit for bit."""
        bits = (self.high.view(torch.int16).to(torch.int32) << 16) + self.low.to(torch.int32)
        return bits.view(torch.float32)


@torch.no_grad()
def nudge_ties_(weight: Float[Tensor, "*n"]) -> None:
    """Set the lowest bit of every fp32 number whose low half is 0x8000, in place.

    A signed 16-bit distance cannot hold +0x8000, which such a number needs where it rounds to the even neighbour
    below. Trainer and engine do this after loading and after each merge, so both have the same weights.
    """
    bits = _bits(weight)
    bits |= _is_tie(bits).to(torch.int32)


def _bits(weight: Tensor) -> Tensor:
    if weight.dtype != torch.float32:
        raise ValueError(f"only fp32 weights are split, not {weight.dtype}")
    return weight.detach().view(torch.int32)


def _is_tie(bits: Tensor) -> Tensor:
    return (bits & 0xFFFF) == TIE
