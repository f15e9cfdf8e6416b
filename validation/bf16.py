"""Parts of the argument of C26, each by itself: ties, sums of integers, blocks, and what one update gives to bf16."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from logra_ref import Projection
from logra_ref.direction import Factor
from logra_ref.sync import SplitWeight, nudge_ties_, round_rows
from logra_ref.update import merge_rows_
from scaled.engine.weights import at_random
from scaled.policy_sync.compare import went
from validation.receivers import wrapping_split
from validation.sync_trainer import UPDATE_RATIO

TIES = (0x3F808000, 0x3F7F8000)  # above an even and an odd bf16 number


def error_of_halves(*, nudged: bool) -> float:
    """The largest error, in bf16 units, of a weight that was split and joined: all low halves of four numbers."""
    highs = [sign | high for sign in (0, 0x8000) for high in (0x3F80, 0x3F7F)]
    bits = np.concatenate([(high << 16) + np.arange(1 << 16) for high in highs]).astype(np.uint32)
    weight = torch.from_numpy(bits.view(np.float32).copy())
    expected = bits | ((bits & 0xFFFF) == 0x8000) if nudged else bits
    if nudged:
        nudge_ties_(weight)
    back = (SplitWeight.of(weight) if nudged else wrapping_split(weight)).join()
    return float(np.abs(back.numpy().view(np.uint32).astype(np.int64) - expected).max()) / (1 << 16)


def tie_patterns() -> list[dict[str, int]]:
    """The two ties and what comes back of each, nudged and not, as bits."""
    found = []
    for pattern in TIES:
        weight = torch.tensor([pattern], dtype=torch.int32).view(torch.float32)
        plain = wrapping_split(weight).join()
        nudge_ties_(weight)
        back = SplitWeight.of(weight).join()
        found.append({"bits": pattern, "nudged": int(back.view(torch.int32)), "plain": int(plain.view(torch.int32))})
    return found


@dataclass
class Simulated:
    """Random weights (d, k), and an update of them of relative size ρ from a random factor: no model, any shape."""

    weight: Tensor
    factor: Factor
    coefficient: Tensor
    projection: Projection

    @classmethod
    def draw(cls, generator: torch.Generator, shape: tuple[int, int], rank: int, *, rounded: bool = True) -> Simulated:
        """Gaussian weights and factor; the projection's seed comes from the generator as well."""
        weight = torch.randn(shape, generator=generator)
        direction = torch.randn(shape[0], rank, generator=generator)
        seed = int(torch.randint(1 << 62, (1,), generator=generator))
        factor = round_rows(direction) if rounded else Factor.of(direction)
        projection = Projection("rademacher", rank, shape[1], seed)
        # ‖U E‖ is close to ‖U‖ √k; the size of a step needs no more here.
        eta = UPDATE_RATIO * weight.norm() / (direction.norm() * math.sqrt(shape[1]))
        nudge_ties_(weight)
        return cls(weight, factor, factor.row_scale * eta, projection)

    def merged(self) -> Tensor:
        """The weights after the update, by ``merge_rows_``."""
        new = self.weight.clone()
        merge_rows_(new, self.factor.levels, self.coefficient, self.projection)
        return new


def differ_by_blocks(generator: torch.Generator, updates: int, *, rounded: bool = True) -> int:
    """fp32 entries that differ after some updates: rows in 4 blocks here, columns in 3 and sums reversed there."""
    by_rows = torch.randn(96, 200, generator=generator)
    nudge_ties_(by_rows)
    by_columns = by_rows.clone()
    for _ in range(updates):
        one = Simulated.draw(generator, (96, 200), 64, rounded=rounded)
        for rows in torch.arange(96).chunk(4):
            block = by_rows[rows]
            merge_rows_(block, one.factor.levels[rows], one.coefficient[rows], one.projection)
            by_rows[rows] = block
        for columns in (slice(0, 70), slice(70, 130), slice(130, 200)):
            entries = one.projection.entries(columns=columns)
            sums = one.factor.levels.flip(1) @ entries.flip(0)
            by_columns[:, columns] -= one.coefficient[:, None] * sums
        for weight in (by_rows, by_columns):
            nudge_ties_(weight)
    return int((by_rows != by_columns).sum())


def wrong_sums(generator: torch.Generator, rank: int = 256) -> dict[str, float]:
    """Entries of ``levels E`` that are not the integer they should be, with fp32 and with bf16 output."""
    one = Simulated.draw(generator, (256, 256), rank)
    levels = one.factor.levels
    signs = one.projection.entries().numpy().astype(np.int64)
    right = levels.numpy().astype(np.int64) @ signs
    fp32 = one.projection.lift(levels, scaled=False).numpy()
    bf16 = one.projection.lift(levels.to(torch.bfloat16), scaled=False).float().numpy()
    return {
        "fp32": int((fp32 != right).sum()),
        "bf16": int((bf16 != right).sum()),
        "bf16 error": float(np.abs(bf16 - right).max()),
        "largest": float(np.abs(right).max()),
    }


def rounding_loss(generator: torch.Generator) -> dict[str, float]:
    """1 − cos(U, rounded U) of a Gaussian U (1024, 256), beside what independent uniform errors of width s_i give."""
    direction = torch.randn(1024, 256, generator=generator).double()
    peak = np.abs(direction.numpy()).max(axis=1)
    square = float(np.square(direction.numpy()).sum())

    def by_uniform_errors(levels: int) -> float:
        # The largest entry of a row has no error: r − 1 are left.
        return float(np.square(peak / levels).sum()) * 255 / 12 / (2 * square)

    rounded = round_rows(direction).direction()
    cosine = float((rounded * direction).sum() / (rounded.norm() * direction.norm()))
    found = {"measured": 1 - cosine, "expected": by_uniform_errors(127), "4 bits": by_uniform_errors(7)}
    return {name: float(f"{value:.3g}") for name, value in found.items()}


def share_of_one_update(generator: torch.Generator) -> dict[str, float]:
    """What bf16 weights take of one update of relative size ρ: rounding to the nearest, and at random.

    To the nearest, a number in [2^e, 2^(e+1)) moves by whole units u_e = 2^(e−7), so that an entry d of the update
    moves it by u_e round(d/u_e). The closed form averages this over Gaussian weights, binade by binade; at random, it
    averages to d and has variance u² f (1 − f), where f is the fraction d/u.
    """
    one = Simulated.draw(generator, (1024, 1024), 64)
    one.weight = one.weight.to(torch.bfloat16).float()
    way = (one.merged().double() - one.weight.double()).numpy()
    square = float(np.square(way).sum())
    start, merged = {"W": one.weight}, {"W": one.merged()}
    took = {
        name: went(start, {"W": rounded}, start, merged).share
        for name, rounded in (
            ("nearest", merged["W"].to(torch.bfloat16)),
            ("stochastic", at_random(merged["W"], generator)),
        )
    }
    mean, mean_square = np.zeros_like(way), np.zeros_like(way)
    for exponent in range(-24, 4):
        weight = 2 * (stats.norm.cdf(2.0 ** (exponent + 1)) - stats.norm.cdf(2.0**exponent))
        unit = 2.0 ** (exponent - 7)
        moved = unit * np.rint(way / unit)
        mean += weight * moved
        mean_square += weight * np.square(moved)
    spread = math.sqrt(float((np.square(way) * (mean_square - np.square(mean))).sum())) / square
    unit = 2.0 ** (np.floor(np.log2(np.abs(one.weight.double().numpy()))) - 7)
    fraction = np.mod(way / unit, 1)
    noise = math.sqrt(float((np.square(way * unit) * fraction * (1 - fraction)).sum()))
    return {
        **{name: round(value, 4) for name, value in took.items()},
        "expected": round(float((way * mean).sum()) / square, 4),
        "spread": round(spread, 5),
        "spread at random": round(noise / square, 4),
    }
