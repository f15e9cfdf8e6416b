"""``logra bench sync``: the bytes of an update by every way to send it that leaves the engine exact.

The ways: all weights; the bf16 numbers that an update has changed, each with its place; LoGRA's factors. The first two
give a bf16 engine bf16 of the trainer's weights, and so do factors with the low halves kept (``logra_ref.sync``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from scaled.sync_check import Trainer

ALPHAS = (1.0, 3.0)  # the nominal step, and the paper's largest
PLAIN = 6  # bytes of a changed number: four for its place, two for itself


@dataclass(frozen=True)
class Bytes:
    """Of one update at α: the share of bf16 numbers that it changes, and bytes for a number of the trained matrices."""

    alpha: float
    changed: float
    plain: float
    gap_coded: float
    factors: float

    def even(self, rank: int) -> float:
        """The inputs k above which factors of this rank, d (r + 4) bytes, are less than gap-coded numbers."""
        return (rank + 4) / self.gap_coded


def gap_code(places: np.ndarray, values: np.ndarray) -> bytes:
    """Places in rising order as distances to the one before, seven bits a byte (LEB128), and then the 16-bit values."""
    gaps = np.diff(places, prepend=-1) - 1
    lengths = 1 + sum((gaps >= 1 << 7 * i).astype(np.int64) for i in range(1, 9))
    ends = np.cumsum(lengths)
    coded = np.zeros(ends[-1] if len(ends) else 0, np.uint8)
    for i in range(int(lengths.max(initial=0))):
        longer = lengths > i
        coded[(ends - lengths + i)[longer]] = (gaps[longer] >> 7 * i & 0x7F) | ((lengths[longer] > i + 1) << 7)
    return len(places).to_bytes(8, "little") + coded.tobytes() + values.astype("<i2").tobytes()


def gap_decode(coded: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Places and values again."""
    count, stream = int.from_bytes(coded[:8], "little"), np.frombuffer(coded[8:], np.uint8)
    head, tail = np.split(stream, [len(stream) - 2 * count])
    last = head < 0x80
    number = np.cumsum(last) - last
    starts = np.flatnonzero(np.r_[True, last[:-1]]) if len(head) else np.zeros(0, np.int64)
    shifts = 7 * (np.arange(len(head)) - starts[number])
    gaps = np.zeros(count, np.int64)
    np.add.at(gaps, number, (head & 0x7F).astype(np.int64) << shifts)
    return np.cumsum(gaps + 1) - 1, tail.view("<i2")


def measure(model: Path, rank: int, updates: int, alpha: float) -> Bytes:
    """Means over some real updates of relative size 6e-5 α, each encoded and decoded again."""
    trainer = Trainer.of(model, rank, "bfloat16", 6e-5)
    weights = trainer.optimizer.sketches.weights()
    numbers = sum(weight.numel() for weight in weights.values())
    changed, coded, factors = 0, 0, 0
    for _ in range(updates):
        before = {name: _bits(weight) for name, weight in weights.items()}
        factors += trainer.step(alpha).byte_count
        for name, weight in weights.items():
            after = _bits(weight)
            places = np.flatnonzero(after != before[name])
            code = gap_code(places, after[places])
            found_places, found = gap_decode(code)
            before[name][found_places] = found
            if not np.array_equal(before[name], after):
                raise AssertionError(f"{name} is not what was encoded")
            changed, coded = changed + len(places), coded + len(code)
    each = updates * numbers
    return Bytes(alpha, changed / each, PLAIN * changed / each, coded / each, factors / each)


def bench_sync(model: Path, console: Console, *, rank: int, updates: int) -> None:
    """Print the bytes of every way, and where factors are fewer."""
    table = Table("α", "bf16 numbers changed", "all, bf16", "changed, plain", "gap-coded", f"factors, r = {rank}")
    found = [measure(model, rank, updates, alpha) for alpha in ALPHAS]
    for one in found:
        ways = (2.0, one.plain, one.gap_coded, one.factors)
        table.add_row(f"{one.alpha:g}", f"{one.changed:.2%}", *(f"{way:.4f}" for way in ways))
    console.print(table)
    console.print(f"bytes a number of the trained matrices of {model}, mean of {updates} updates")
    for one in found:
        widths = ", ".join(f"{one.even(r):,.0f} at r = {r}" for r in sorted({rank, 256}))
        console.print(f"α = {one.alpha:g}: factors are fewer where a matrix has more inputs than {widths}")


def _bits(weight: torch.Tensor) -> np.ndarray:
    return weight.detach().to(torch.bfloat16).view(torch.int16).flatten().numpy().copy()
