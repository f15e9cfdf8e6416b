"""α, the cosine budget and the mismatch tracker at their exact values and edges (method.md 4)."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logra_ref.step_size import MismatchTracker, cosine_budget, step_scale

positive = st.floats(1e-12, 1e3)


def test_step_scale_is_the_root_of_budget_over_q_and_enlarges_as_well_as_shrinks():
    assert step_scale(4.0, 1.0) == 0.5
    assert step_scale(1.0, 4.0) == 2.0
    assert step_scale(2e-4, 2e-4) == 1.0


def test_step_scale_is_capped_at_alpha_max():
    assert step_scale(1e-9, 1.0) == 3.0
    assert step_scale(1.0, 9.0001) == 3.0
    assert step_scale(1.0, 16.0, alpha_max=5.0) == 4.0
    assert step_scale(5e-324, 2e-4) == 3.0  # the quotient overflows
    assert step_scale(1.0, math.inf) == 3.0


def test_q_of_zero_takes_the_nominal_step_whatever_the_budget():
    assert step_scale(0.0, 1e-4) == 1.0
    assert step_scale(0.0, 0.0) == 1.0
    assert step_scale(-0.0, 1.0) == 1.0


def test_a_budget_of_zero_is_no_step():
    assert step_scale(1e-4, 0.0) == 0.0


@pytest.mark.parametrize("q", [-1e-300, -1.0, math.nan, math.inf, -math.inf])
def test_a_q_that_is_negative_or_not_finite_is_an_error_and_no_step(q):
    with pytest.raises(FloatingPointError, match="nothing was changed"):
        step_scale(q, 1e-4)


@pytest.mark.parametrize("budget", [-1e-12, math.nan])
@pytest.mark.parametrize("q", [0.0, 1e-4])
def test_a_negative_budget_is_an_error_also_where_q_is_zero(q, budget):
    with pytest.raises(ValueError, match="budget"):
        step_scale(q, budget)


@given(positive, positive, st.floats(0.1, 10))
def test_the_step_never_exceeds_its_budget_and_uses_it_up_below_the_cap(q, budget, alpha_max):
    alpha = step_scale(q, budget, alpha_max)
    assert 0 < alpha <= alpha_max
    assert alpha**2 * q <= budget * (1 + 1e-12)
    if alpha < alpha_max:
        assert alpha**2 * q == pytest.approx(budget, rel=1e-12)


@given(positive, positive, positive)
def test_the_step_falls_with_q_and_grows_with_the_budget(q, budget, more):
    assert step_scale(q + more, budget) <= step_scale(q, budget) <= step_scale(q, budget + more)


def test_cosine_budget_against_numpy_over_the_whole_horizon():
    u = np.arange(1, 301)
    expected = 2e-5 + (2e-4 - 2e-5) / 2 * (1 + np.cos(np.pi * (u - 1) / 299))
    np.testing.assert_allclose([cosine_budget(int(i)) for i in u], expected, rtol=1e-12)


def test_cosine_budget_starts_at_the_maximum_and_is_half_way_in_the_middle():
    values = [cosine_budget(u, budget_max=4e-2, budget_min=4e-3, horizon=21) for u in (1, 11, 21)]
    assert values == pytest.approx([4e-2, 2.2e-2, 4e-3], rel=1e-12)


def test_cosine_budget_stays_at_the_minimum_after_the_horizon_and_does_not_come_back():
    assert [cosine_budget(u) for u in (300, 301, 599, 10**6)] == [2e-5] * 4


def test_a_horizon_of_one_update_is_the_minimum_and_no_division_by_zero():
    assert [cosine_budget(u, horizon=1) for u in (1, 2, 3)] == [2e-5] * 3
    assert [cosine_budget(u, horizon=2) for u in (1, 2)] == pytest.approx([2e-4, 2e-5])


@pytest.mark.parametrize("u", [0, -3])
def test_updates_are_counted_from_one(u):
    with pytest.raises(ValueError, match="from 1"):
        cosine_budget(u)


@given(st.integers(1, 400), st.integers(1, 350))
def test_cosine_budget_never_rises_and_stays_between_its_ends(u, horizon):
    here, after = (cosine_budget(i, horizon=horizon) for i in (u, u + 1))
    assert 2e-5 <= after <= here <= 2e-4 + 1e-18


def test_mismatch_is_smoothed_from_zero_and_subtracted_by_hand():
    tracker = MismatchTracker()
    # κ = 0.3 · 1e-5 = 3e-6, then 0.7 · 3e-6 + 0.3 · 2e-5 = 8.1e-6.
    assert tracker.budget(1e-4, 1e-5) == pytest.approx(1e-4 - 3e-6, rel=1e-12)
    assert tracker.budget(1e-4, 2e-5) == pytest.approx(1e-4 - 8.1e-6, rel=1e-12)
    assert tracker.smoothed == pytest.approx(8.1e-6, rel=1e-12)


def test_a_negative_mismatch_counts_as_zero_and_lets_the_old_one_decay():
    tracker = MismatchTracker(smoothed=1e-5)
    assert tracker.budget(1e-4, -1.0) == pytest.approx(1e-4 - 7e-6, rel=1e-12)
    assert tracker.smoothed == pytest.approx(7e-6, rel=1e-12)


def test_a_large_mismatch_takes_at_most_half_of_the_budget():
    tracker = MismatchTracker()
    assert tracker.budget(1e-4, 0.02) == 0.5e-4
    assert tracker.smoothed == pytest.approx(6e-3, rel=1e-12)  # κ itself is not clamped to the budget
    assert MismatchTracker().budget(0.0, 0.02) == 0.0


@pytest.mark.parametrize("nothing", [None, math.nan, math.inf, -math.inf])
def test_without_a_measurement_kappa_is_kept_and_nothing_is_subtracted(nothing):
    tracker = MismatchTracker()
    tracker.budget(1e-4, 1e-5)
    assert tracker.budget(1e-4, nothing) == 1e-4
    assert tracker.smoothed == pytest.approx(3e-6, rel=1e-12)
    # The next measurement goes on from the kept κ.
    assert tracker.budget(1e-4, 1e-5) == pytest.approx(1e-4 - (0.7 * 3e-6 + 0.3 * 1e-5), rel=1e-12)


@given(st.floats(0, 1), st.lists(st.one_of(st.none(), st.floats(-1, 1)), max_size=8))
def test_the_effective_budget_lies_between_half_and_all_of_the_scheduled_one(scheduled, measurements):
    tracker = MismatchTracker()
    for measured in measurements:
        assert 0.5 * scheduled <= tracker.budget(scheduled, measured) <= scheduled
        assert tracker.smoothed >= 0
