"""How an engine holds weights: exactly with the low halves kept, and what is lost or blurred without. No vLLM."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scaled.engine.stream import stream
from scaled.engine.weights import PLACES, ROUNDINGS, EngineWeights, Form
from scaled.errors import UserError
from validation.receivers import bf16_bits

TIE = 0x3F808000  # 1 + 2⁻⁸, between 1 and the next bf16 number
UNIT = 2.0**-8  # of bf16 below 1
DEVIATIONS = 6  # of a normal distribution: exceeded in 2e-9 of all draws


class Fused(nn.Module):
    """Two weights by rows in one parameter and one that has every second column of another, as a loader finds them."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(10, 6, dtype=dtype), requires_grad=False)
        self.o = nn.Parameter(torch.zeros(5, 8, dtype=dtype), requires_grad=False)

    def places(self) -> dict[str, Tensor]:
        return {"q": self.qk.data[:4], "k": self.qk.data.narrow(0, 4, 6), "o": self.o.data[:, 1::2]}

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            self.places()[name].copy_(weight)


def float_of(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))


def place_of(value: float, count: int) -> Tensor:
    return torch.full((count,), value, dtype=torch.bfloat16)


def nudged(weight: np.ndarray) -> int:
    """Set the lowest bit of ties, in place; how many there were."""
    bits = weight.view(np.uint32)
    ties = (bits & 0xFFFF) == 0x8000
    bits[ties] |= 1
    return int(ties.sum())


@pytest.mark.parametrize("low_halves", PLACES)
@pytest.mark.parametrize("streamed", [False, True])
def test_kept_low_halves_make_bf16_places_of_fused_tensors_exact_ties_included(streamed, low_halves):
    random, model, held = np.random.default_rng(0), Fused(), EngineWeights(Form(low_halves=low_halves))
    wanted = {name: random.normal(1, 0.3, place.shape).astype(np.float32) for name, place in model.places().items()}
    wanted["k"][0, 0] = float_of(TIE)

    def apply(act, parts: dict[str, np.ndarray]) -> None:
        tensors = {name: torch.from_numpy(part.copy()) for name, part in parts.items()}
        if streamed:
            stream(model, tensors.items(), act)
        else:
            for name, tensor in tensors.items():
                act(model.places()[name], tensor)

    def require_equal() -> None:
        for name, place in model.places().items():
            bits = wanted[name].view(np.uint32)
            assert np.array_equal(held.split(place).join().numpy().view(np.uint32), bits)
            assert np.array_equal(place.contiguous().view(torch.int16).numpy().view(np.uint16), bf16_bits(bits))

    apply(held.set, wanted)
    ties = sum(map(nudged, wanted.values()))
    require_equal()
    for _ in range(50):
        parts = {name: random.normal(0, 1e-3, w.shape).astype(np.float32) for name, w in wanted.items()}
        for name, part in parts.items():  # some land on a tie: the difference of near numbers is exact
            near = (random.random(part.shape) < 0.1) & (abs(wanted[name] - 1.1) < 0.5)
            part[near] = wanted[name][near] - np.float32(float_of(TIE))
        apply(held.subtract, parts)
        for name, part in parts.items():
            wanted[name] -= part
        ties += sum(map(nudged, wanted.values()))
        require_equal()
    assert ties > 100
    assert model.o.data[:, 0::2].eq(0).all()  # what lies between belongs to others


def test_rounding_to_the_nearest_loses_any_number_of_updates_below_half_a_unit():
    naive, exact = EngineWeights(Form("naive")), EngineWeights()
    lost, kept = place_of(0, 3), place_of(0, 3)
    for held, place in ((naive, lost), (exact, kept)):
        held.set(place, torch.ones(3))
        for _ in range(100):
            held.subtract(place, torch.full((3,), 0.4 * UNIT))
    assert lost.eq(1).all()
    torch.testing.assert_close(exact.split(kept).join(), torch.full((3,), 1 - 40 * UNIT), rtol=0, atol=1e-5)
    naive.subtract(lost, torch.full((3,), 0.6 * UNIT))  # above half a unit it takes a whole one
    assert lost.eq(1 - UNIT).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("fraction", [0.01, 0.4, 0.99])
def test_rounding_at_random_takes_either_neighbour_as_often_as_it_should(sign, fraction):
    held, count = EngineWeights(Form("stochastic")), 200_000
    place = place_of(sign, count)
    held.subtract(place, torch.full((count,), sign * fraction * UNIT))
    moved = place.eq(sign * (1 - UNIT))
    assert (moved | place.eq(sign)).all()
    # The fp32 difference is a multiple of 2⁻²⁴, and the draw has 2¹⁶ values: 2⁻¹⁶ covers both.
    tolerance = DEVIATIONS * math.sqrt(fraction * (1 - fraction) / count) + 2.0**-16
    assert abs(float(moved.double().mean()) - fraction) < tolerance


def test_many_small_updates_rounded_at_random_arrive_in_the_mean():
    held, count, updates = EngineWeights(Form("stochastic")), 50_000, 40
    place = place_of(0.9, count)
    start = place.double()
    for _ in range(updates):
        held.subtract(place, torch.full((count,), 0.05 * UNIT))
    # Below 1 and above 1/2 each update adds u² f (1 − f) of variance.
    spread = UNIT * math.sqrt(0.05 * 0.95 * updates / count)
    assert abs(float((start - place.double()).mean()) / UNIT - 0.05 * updates) < DEVIATIONS * spread / UNIT + 1e-3
    assert place.unique().numel() > 3


def test_what_is_a_bf16_number_already_is_left_as_it_is_and_whole_weights_are_rounded_to_the_nearest():
    for rounding in ROUNDINGS:
        held, weight = EngineWeights(Form(rounding)), torch.randn(1000, generator=torch.Generator().manual_seed(1))
        place = place_of(0, 1000)
        held.set(place, weight)
        assert torch.equal(place, weight.to(torch.bfloat16))
        held.subtract(place, torch.zeros(1000))
        assert torch.equal(place, weight.to(torch.bfloat16))


def after_updates(held: EngineWeights) -> Tensor:
    place, generator = place_of(1, 500), torch.Generator().manual_seed(3)
    for _ in range(5):
        held.subtract(place, 1e-3 * torch.randn(500, generator=generator))
    return place


def test_the_noise_is_the_same_again_from_one_seed_and_from_its_start():
    held = EngineWeights(Form("stochastic"), seed=1)
    first = after_updates(held)
    assert torch.equal(after_updates(EngineWeights(Form("stochastic"), seed=1)), first)
    assert not torch.equal(after_updates(EngineWeights(Form("stochastic"), seed=2)), first)
    assert not torch.equal(after_updates(held), first)
    held.clear()
    assert torch.equal(after_updates(held), first)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_fp32_places_take_one_difference_whatever_the_rounding(rounding):
    model, held = Fused(torch.float32), EngineWeights(Form(rounding))
    generator = torch.Generator().manual_seed(0)
    for name, place in model.places().items():
        weight, part = (torch.randn(place.shape, generator=generator) for _ in range(2))
        weight[0, 0] = float_of(TIE)  # stays: nothing is split
        stream(model, [(name, weight)], held.set)
        assert torch.equal(place, weight)
        stream(model, [(name, part)], held.subtract)
        assert torch.equal(place, weight - part)


@pytest.mark.parametrize("rounding", ["naive", "stochastic"])
def test_places_in_the_loaders_hands_are_rounded_as_by_themselves(rounding):
    model, alone, held, same = Fused(), Fused(), EngineWeights(Form(rounding)), EngineWeights(Form(rounding))
    generator = torch.Generator().manual_seed(0)
    for name, place in alone.places().items():
        weight, part = (torch.randn(place.shape, generator=generator) for _ in range(2))
        for act, tensor in (("set", weight), ("subtract", 1e-2 * part)):
            stream(model, [(name, tensor)], getattr(held, act))
            getattr(same, act)(place, tensor)
        assert torch.equal(model.places()[name], place)
        assert not torch.equal(place, weight.to(torch.bfloat16))


def test_a_rounding_that_there_is_not_is_refused_with_those_that_there_are():
    with pytest.raises(UserError, match=r"engine\.rounding is 'up', not one of exact, naive, stochastic"):
        Form("up")
    with pytest.raises(UserError, match=r"engine\.low_halves is 'disk', not one of device, host"):
        Form(low_halves="disk")
