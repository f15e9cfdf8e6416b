"""How an engine's weights compare with its trainer's: entries with equal bits, and how far the engine went along."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Went(NamedTuple):
    """With Δ the way from an engine's, or the trainer's, weights before to those after, all matrices as one vector.

    ``share``: ⟨Δ engine, Δ trainer⟩ / ‖Δ trainer‖². ``error``: ‖Δ engine − Δ trainer‖ / ‖Δ trainer‖.
    """

    share: float
    error: float


def went(
    engine_before: Mapping[str, Tensor],
    engine_after: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
) -> Went:
    """How much of the trainer's way an engine went along, and how far it is off it, summed in fp64.

    Raises ``ZeroDivisionError`` where the trainer did not move.
    """
    dot = square = off = 0.0
    for name in before:
        way = after[name].double() - before[name].double()
        engine_way = engine_after[name].double() - engine_before[name].double()
        dot += float((way * engine_way).sum())
        square += float(way.square().sum())
        off += float((engine_way - way).square().sum())
    return Went(dot / square, (off / square) ** 0.5)


def norm(before: Mapping[str, Tensor], after: Mapping[str, Tensor] | None = None) -> float:
    """Of the way from weights before to those after, or of the weights themselves, all as one vector, in fp64."""
    square = sum(
        float((weight.double() - (after[name].double() if after else 0)).square().sum())
        for name, weight in before.items()
    )
    return square**0.5


def bits16(weight: Tensor) -> np.ndarray:
    """A bf16 tensor as its bits."""
    return weight.contiguous().view(torch.int16).numpy().view(np.uint16)


def equal_fraction(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> float:
    """The share of entries with the same bits."""
    return sum(int((one[name] == other[name]).sum()) for name in one) / sum(bits.size for bits in one.values())
