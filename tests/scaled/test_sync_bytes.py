"""The code of changed numbers loses nothing, and its bytes are those of its definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaled.bench.sync_bytes import gap_code, gap_decode, measure


def by_hand(places: list[int]) -> int:
    """Bytes of the places: as many groups of seven bits as the distance has, one at least."""
    gaps = [b - a - 1 for a, b in zip([-1, *places], places, strict=False)]
    return sum(max(1, -(-gap.bit_length() // 7)) for gap in gaps)


@given(st.sets(st.integers(0, 2**40), max_size=60), st.randoms(use_true_random=False))
def test_what_is_decoded_is_what_was_encoded_in_as_many_bytes_as_the_code_says(chosen, random):
    places = sorted(chosen)
    values = np.array([random.randint(-(2**15), 2**15 - 1) for _ in places], np.int16)
    code = gap_code(np.array(places, np.int64), values)
    assert len(code) == 8 + by_hand(places) + 2 * len(places)
    found, same = gap_decode(code)
    assert found.tolist() == places
    assert np.array_equal(same, values)


def test_edges_of_a_byte():
    places = np.array([0, 1, 129, 258, 258 + 2**14 + 1], np.int64)  # distances 0, 0, 127, 128, 2^14
    code = gap_code(places, np.zeros(5, np.int16))
    assert len(code) == 8 + (1 + 1 + 1 + 2 + 3) + 10
    assert gap_decode(code)[0].tolist() == places.tolist()


def test_a_larger_step_changes_more_numbers_and_its_factors_take_the_same_bytes(tiny_model):
    one, three = (measure(tiny_model, 4, 2, alpha) for alpha in (1.0, 3.0))
    assert 0 < one.changed < three.changed < 1
    assert one.plain == pytest.approx(6 * one.changed)
    assert one.factors == three.factors
    # Σ d (r + 4) over Σ d k: q 16 × 16, k and v 8 × 16, o 16 × 16, gate and up 24 × 16, down 16 × 24.
    rows, numbers = 16 + 8 + 8 + 16 + 24 + 24 + 16, 2 * 16 * 16 + 2 * 8 * 16 + 2 * 24 * 16 + 16 * 24
    assert one.factors == pytest.approx(rows * 8 / numbers)
