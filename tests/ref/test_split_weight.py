"""An fp32 weight as bf16 and the 16 bits below it, bit for bit, on integers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logra_ref.sync import SplitWeight, nudge_ties_


def from_bits(*patterns: int) -> torch.Tensor:
    return torch.from_numpy(np.array(patterns, dtype=np.uint32).view(np.float32).copy())


def bits_of(weight: torch.Tensor) -> list[int]:
    return weight.numpy().view(np.uint32).tolist()


def rounded_to_bf16(bits: int) -> int:
    """Round to nearest, ties to even, on integers."""
    low, high = bits & 0xFFFF, bits >> 16
    return high + (low > 0x8000 or (low == 0x8000 and high & 1))


LIMITS = [0x0, 0x1, 0x7FFF, 0x8001, 0xFFFF, 0x10000, 0x3F800000, 0x3F807FFF, 0x3F808001, 0x3F7F8001, 0x3F7FFFFF]
LIMITS += [0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F7F7FFF, 0x7F7F8001]


def check_split(weight: torch.Tensor) -> None:
    split = SplitWeight.of(weight)
    assert split.high.dtype == torch.bfloat16
    assert split.low.dtype == torch.int16
    assert bits_of(split.join()) == bits_of(weight)
    high = [x & 0xFFFF for x in split.high.view(torch.int16).tolist()]
    assert high == [rounded_to_bf16(bits) for bits in bits_of(weight)]
    assert torch.equal(split.high, weight.to(torch.bfloat16))


@pytest.mark.parametrize("sign", [0, 0x80000000])
def test_split_weights_come_back_bit_for_bit_at_the_limits(sign):
    check_split(from_bits(*(sign | bits for bits in LIMITS)))


def test_every_low_half_of_an_even_and_an_odd_number_comes_back():
    for high in (0x3F80, 0x3F7F, 0xBF80, 0xBF7F):
        weight = from_bits(*(high << 16 | low for low in range(0, 0x10000)))
        nudge_ties_(weight)
        check_split(weight)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1).filter(lambda b: b & 0x7F800000 != 0x7F800000), min_size=1, max_size=64))
def test_any_finite_pattern_comes_back_after_nudging(patterns):
    weight = from_bits(*patterns)
    nudge_ties_(weight)
    assert bits_of(weight) == [bits | (bits & 0xFFFF == 0x8000) for bits in patterns]
    check_split(weight)


@pytest.mark.parametrize("pattern", [0x3F808000, 0x3F7F8000, 0xBF808000, 0x00008000, 0x80018000])
def test_a_tie_is_refused_until_it_is_nudged_by_one_bit(pattern):
    weight = from_bits(pattern, 0x3F801234)
    with pytest.raises(ValueError, match="nudge_ties_"):
        SplitWeight.of(weight)
    nudge_ties_(weight)
    assert bits_of(weight) == [pattern + 1, 0x3F801234]
    nudge_ties_(weight)
    assert bits_of(weight) == [pattern + 1, 0x3F801234]
    check_split(weight)


def test_a_tie_between_even_and_its_upper_neighbour_would_come_back_one_bf16_unit_wrong():
    """Control: why ties are nudged at all. 0x8000 above an even number is no signed 16-bit distance."""
    bits, high = 0x3F808000, 0x3F80
    wrapped = np.array(bits - (high << 16)).astype(np.int16)
    assert (high << 16) + int(wrapped) == bits - 0x10000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_only_fp32_weights_are_split(dtype):
    with pytest.raises(ValueError, match="only fp32"):
        SplitWeight.of(torch.ones(3, dtype=dtype))
    with pytest.raises(ValueError, match="only fp32"):
        nudge_ties_(torch.ones(3, dtype=dtype))
