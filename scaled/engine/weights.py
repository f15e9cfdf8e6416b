"""How an engine holds the weights of a trainer that has them in fp32: exactly, or in bf16 alone and rounded.

Functions of places, which are views of the engine's own parameters: no vLLM here, so that `validation` measures them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from logra_ref.sync import SplitWeight, nudge_ties_
from scaled.errors import UserError

Rounding = Literal["exact", "naive", "stochastic"]
LowHalves = Literal["device", "host"]
ROUNDINGS, PLACES = get_args(Rounding), get_args(LowHalves)
SEED = 7  # of the noise: the same updates in the same order give the same weights


@dataclass(frozen=True)
class Form:
    """How bf16 places hold an fp32 weight, and where the low halves of ``exact`` lie: 2 bytes a weight."""

    rounding: Rounding = "exact"
    low_halves: LowHalves = "device"

    def __post_init__(self) -> None:
        """Raises ``UserError`` for what is none of these."""
        if self.rounding not in ROUNDINGS:
            raise UserError(f"engine.rounding is {self.rounding!r}, not one of {', '.join(ROUNDINGS)}")
        if self.low_halves not in PLACES:
            raise UserError(f"engine.low_halves is {self.low_halves!r}, not one of {', '.join(PLACES)}")


EXACT = Form()


class EngineWeights:
    """Sets places of weights and subtracts from them. fp32 places do as fp32 numbers do, whatever the rounding.

    In bf16, ``exact`` keeps the 16 bits below each number beside it (``SplitWeight``), so that nothing is lost.
    ``naive`` rounds every difference to the nearest bf16 number, ``stochastic`` up or down at random. Both start from
    weights rounded to the nearest, keep nothing beside them, and are there to be compared with.
    """

    def __init__(self, form: Form = EXACT, seed: int = SEED) -> None:
        self.form, self.rounding, self.seed = form, form.rounding, seed
        self._low: dict[int, Tensor] = {}  # by the address of a weight's storage
        self._generators: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def set(self, place: Tensor, part: Tensor) -> None:
        """From now on the place holds ``part``, fp32."""
        part = part.to(place.device)
        if place.dtype == torch.float32 or self.rounding != "exact":
            place.copy_(part)
        else:
            self._write(place, part.clone())

    @torch.no_grad()
    def subtract(self, place: Tensor, part: Tensor) -> None:
        """Take ``part``, fp32, off what the place holds: one fp32 difference, and then the place's rounding."""
        part = part.to(place.device)
        if place.dtype == torch.float32:
            place.sub_(part)
        elif self.rounding == "exact":
            self._write(place, self.split(place).join().sub_(part))
        elif self.rounding == "naive":
            place.copy_(place.float().sub_(part))
        else:
            place.copy_(at_random(place.float().sub_(part), self._generator(place.device)))

    def split(self, place: Tensor) -> SplitWeight:
        """A bf16 place and the low halves of it, by ``exact``: zeros until something is set."""
        return SplitWeight(place, self._low_of(place).to(place.device))

    def clear(self) -> None:
        """Let go of the low halves, and draw the noise from its start again."""
        self._low.clear()
        self._generators.clear()

    def _write(self, place: Tensor, weight: Tensor) -> None:
        nudge_ties_(weight)
        new = SplitWeight.of(weight)
        place.copy_(new.high)
        self._low_of(place).copy_(new.low)

    def _low_of(self, place: Tensor) -> Tensor:
        """A view of the same form as the place, of a tensor as large as the weight's storage."""
        storage = place.untyped_storage()
        held = self._low.get(storage.data_ptr())
        if held is None:
            device = place.device if self.form.low_halves == "device" else "cpu"
            held = torch.zeros(storage.nbytes() // place.element_size(), dtype=torch.int16, device=device)
            self._low[storage.data_ptr()] = held
        return held.as_strided(place.size(), place.stride(), place.storage_offset())

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]


def at_random(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Of finite fp32 numbers one of both bf16 neighbours each, so that the mean is right: 16 random bits are added to
    the number's own, and the low half is cut off."""
    noise = torch.randint(0, 1 << 16, weight.shape, generator=generator, dtype=torch.int32, device=weight.device)
    cut = (weight.view(torch.int32) + noise) & ~0xFFFF
    return cut.view(torch.float32).to(torch.bfloat16)
