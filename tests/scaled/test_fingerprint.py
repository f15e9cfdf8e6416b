"""Fingerprints of weights against SplitMix64 in Python's integers, and what they must notice."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scaled.policy_sync.fingerprint import fingerprint, positions

MASK = 2**64 - 1


def by_hand(bits: list[int], where: list[int]) -> int:
    """Σ SplitMix64 of position and bits, in integers of any size, as a signed number of 64 bits."""
    total = 0
    for b, n in zip(bits, where, strict=True):
        z = (((n << 32) | b) + 1) * 0x9E3779B97F4A7C15 & MASK
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        total += z ^ (z >> 31)
    total &= MASK
    return total - 2**64 if total >> 63 else total


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def of(w: torch.Tensor) -> int:
    return int(fingerprint(w, positions(range(len(w)), w.shape[1])))


def test_it_is_the_sum_of_hashes_of_position_and_bits():
    w = weight(3, 5)
    bits = [struct.unpack("<I", struct.pack("<f", x))[0] for x in w.flatten().tolist()]
    assert of(w) == by_hand(bits, list(range(15)))
    half = weight(3, 5, dtype=torch.bfloat16)
    bits = [struct.unpack("<I", struct.pack("<f", x))[0] >> 16 for x in half.float().flatten().tolist()]
    assert of(half) == by_hand(bits, list(range(15)))
    assert of(half) != of(w)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 6), st.integers(0, 6))
def test_parts_add_up_to_the_whole_however_the_matrix_is_cut(rows, width, row, column):
    w, where = weight(rows, width), positions(range(rows), width)
    cut = [(slice(a, b), slice(c, d)) for a, b in ((0, row), (row, None)) for c, d in ((0, column), (column, None))]
    total = sum(fingerprint(w[part], where[part]) for part in cut)
    assert int(total) == of(w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_changed_bit_an_exchanged_row_and_a_negative_zero_are_noticed(dtype):
    w = weight(4, 3, dtype=dtype)
    view = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    seen = {of(w), of(w[[1, 0, 2, 3]]), of(w.T.reshape(4, 3))}
    for bit in range(torch.finfo(dtype).bits - 1):
        other = w.clone()
        other.view(view)[2, 1] ^= 1 << bit
        seen.add(of(other))
    zero = w.clone()
    zero[0, 0] = 0.0
    seen |= {of(zero), of(torch.where(zero == 0, -zero, zero))}
    assert len(seen) == 3 + torch.finfo(dtype).bits - 1 + 2


def test_rows_are_counted_from_their_place_in_the_whole():
    w = weight(6, 2)
    parts = [fingerprint(w[a:b], positions(range(a, b), 2)) for a, b in ((0, 1), (1, 1), (1, 6))]
    assert int(sum(parts)) == of(w)
    assert int(fingerprint(w[1:], positions(range(5), 2))) + int(parts[0]) != of(w)  # control: counted from 0 again


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"only fp32 and bf16 weights have a fingerprint, not torch\.float64"):
        of(weight(2, 2, dtype=torch.float64))
