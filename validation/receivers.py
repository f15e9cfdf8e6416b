"""Receivers of the policy sync: engines that hold bf16 weights, and one in numpy alone, written from the format.

The engines hold them as the real one does (``scaled.engine.weights``), and show what becomes of an update of relative
size 6e-5 in bf16. The numpy receiver is an oracle: hash, bit order, integer sums and rounding of fp32 numbers are
written again from their description.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from logra_ref.projection import Projection, projection_seed
from logra_ref.sync import FactorMessage, SplitWeight, apply_message_, nudge_ties_, redrawn
from logra_ref.update import lifted_rows
from scaled.engine.weights import SEED, EngineWeights, Form, Rounding

Weights = Mapping[str, Tensor]
TIE = 0x8000


class Bf16Engine:
    """bf16 weights as a vLLM engine holds and updates them, by one of its roundings."""

    def __init__(self, weights: Weights, rounding: Rounding, seed: int = SEED) -> None:
        self.held = EngineWeights(Form(rounding), seed)
        self.places = {name: torch.empty_like(weight, dtype=torch.bfloat16) for name, weight in weights.items()}
        for name, place in self.places.items():
            self.held.set(place, weights[name])

    def receive(self, message: FactorMessage) -> None:
        for name, projection in redrawn(message, {name: place.shape for name, place in self.places.items()}).items():
            part = lifted_rows(message.levels[name], message.coefficients[name], projection)
            self.held.subtract(self.places[name], part)

    def bf16(self) -> dict[str, Tensor]:
        return self.places


class SplitEngine(Bf16Engine):
    """bf16 weights and the low halves: 4 bytes a number, and exactly the trainer's weights."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights, "exact")

    def joined(self) -> dict[str, Tensor]:
        """The fp32 weights."""
        return {name: self.held.split(place).join() for name, place in self.places.items()}


class WrappingEngine:
    """A split engine that leaves ties as they are: the control. The low half wraps around at +0x8000."""

    def __init__(self, weights: Weights) -> None:
        self.split = {name: wrapping_split(weight) for name, weight in weights.items()}

    def joined(self) -> dict[str, Tensor]:
        """The fp32 weights."""
        return {name: split.join() for name, split in self.split.items()}

    def receive(self, message: FactorMessage) -> None:
        weights = self.joined()
        apply_message_(weights, message)
        self.split = {name: wrapping_split(weight) for name, weight in weights.items()}

    def bf16(self) -> dict[str, Tensor]:
        return {name: split.high for name, split in self.split.items()}


class FusingEngine:
    """fp32 weights, product and difference rounded once, as fused instructions do: the control."""

    def __init__(self, weights: Weights) -> None:
        self.weights = {name: weight.clone() for name, weight in weights.items()}

    def receive(self, message: FactorMessage) -> None:
        for name, weight in self.weights.items():
            seed = projection_seed(message.base_seed, message.update, name)
            projection = Projection(message.kind, message.rank, weight.shape[1], seed)
            step = message.coefficients[name].double()[:, None] * projection.lift(
                message.levels[name].double(), scaled=False
            )
            weight.copy_(weight.double() - step)
            nudge_ties_(weight)


def wrapping_split(weight: Tensor) -> SplitWeight:
    """What ``SplitWeight.of`` would give without its refusal of ties."""
    high = weight.to(torch.bfloat16)
    distance = weight.view(torch.int32) - (high.view(torch.int16).to(torch.int32) << 16)
    return SplitWeight(high, distance.to(torch.int16))


class NumpyReceiver:
    """fp32 weights as their bits, merged without torch: what an engine in another language would do."""

    def __init__(self, weights: Weights) -> None:
        self.bits = {name: weight.detach().numpy().view(np.uint32).copy() for name, weight in weights.items()}
        for bits in self.bits.values():
            bits[(bits & 0xFFFF) == TIE] |= 1

    def receive(self, message: FactorMessage) -> None:
        for name, bits in self.bits.items():
            signs = numpy_signs(message.base_seed, message.update, name, message.rank, bits.shape[1])
            sums = message.levels[name].numpy().astype(np.int64) @ signs  # exact integers
            product = message.coefficients[name].numpy()[:, None] * sums.astype(np.float32)
            new = (bits.view(np.float32) - product).view(np.uint32)
            new[(new & 0xFFFF) == TIE] |= 1
            self.bits[name] = new

    def weights(self) -> dict[str, Tensor]:
        """The fp32 weights."""
        return {name: torch.from_numpy(bits.view(np.float32).copy()) for name, bits in self.bits.items()}

    def bf16_bits(self) -> dict[str, np.ndarray]:
        """The weights rounded to bf16, as 16 bits each."""
        return {name: bf16_bits(bits) for name, bits in self.bits.items()}


def numpy_signs(base_seed: int, update: int, name: str, rank: int, width: int) -> np.ndarray:
    """The ±1 entries of a Rademacher projection (r, k), int64, from the format's description."""
    text = f"logra/projection/v1|{base_seed}|{update}|{name}"
    seed = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), dtype="<u8")[0]
    words = -(-width // 64)
    state = seed + (np.arange(rank * words, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    bits = np.unpackbits(state.astype("<u8").view(np.uint8), bitorder="little").reshape(rank, words * 64)
    return 2 * bits[:, :width].astype(np.int64) - 1


def bf16_bits(bits: np.ndarray) -> np.ndarray:
    """fp32 bits to bf16 bits: to the nearest, a tie to the even one, on integers."""
    wide = bits.astype(np.uint64)
    return ((wide + 0x7FFF + ((wide >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
