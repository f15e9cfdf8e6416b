"""Baseline, group-relative advantages and batches without signal, against numpy and numbers worked out by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logra_ref.rl import RunningBaseline, group_relative_advantages, without_signal


def tensor(*x) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def test_running_baseline_starts_at_zero_and_counts_a_batch_only_afterwards():
    baseline = RunningBaseline()
    assert baseline.advantages(tensor(1.0, 0.0, 1.0, 1.0)).tolist() == [1.0, 0.0, 1.0, 1.0]
    # 0.1 · 0.75 = 0.075, then 0.9 · 0.075 + 0.1 · 0.5 = 0.1175.
    np.testing.assert_allclose(baseline.advantages(tensor(1.0, 0.0)), [0.925, -0.075], rtol=1e-12)
    np.testing.assert_allclose(baseline.advantages(tensor(-0.01)), [-0.1275], rtol=1e-12)
    assert baseline.value == pytest.approx(0.9 * 0.1175 - 0.001)


def test_group_relative_advantages_against_numpy_with_mixed_and_unsorted_groups():
    rewards = tensor(1.0, 0.0, 5.0, 3.0, 1.0, -0.01, 2.0, 2.0)
    group = torch.tensor([9, 4, 9, 4, 9, 7, -2, -2])  # 7 is alone, −2 has equal rewards
    result, centred = (group_relative_advantages(rewards, group, normalise=n).numpy() for n in (True, False))
    for name in set(group.tolist()):
        here = (group == name).numpy()
        own = rewards.numpy()[here]
        np.testing.assert_allclose(centred[here], own - own.mean(), atol=1e-15)
        expected = (own - own.mean()) / own.std() if own.std() > 0 else 0 * own
        np.testing.assert_allclose(result[here], expected, atol=1e-12)


@pytest.mark.parametrize("reward", [0.1, -0.01, 1.0, 1e6, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_whose_mean_rounds_give_zero_and_not_a_rounding_error_over_itself(reward, dtype):
    rewards = torch.full((7,), reward, dtype=dtype)
    assert group_relative_advantages(rewards, torch.zeros(7, dtype=torch.int64)).eq(0).all()


def test_group_relative_advantages_do_not_mix_groups():
    rewards, group = torch.linspace(0, 1, 12).double() ** 2, torch.arange(12) % 3
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    whole = group_relative_advantages(rewards, group)
    np.testing.assert_allclose(group_relative_advantages(rewards[order], group[order]), whole[order], rtol=1e-12)
    alone = group_relative_advantages(rewards[group == 1], group[group == 1])
    np.testing.assert_allclose(alone, whole[group == 1], rtol=1e-12)


def test_a_batch_without_signal_is_one_whose_advantages_are_all_equal():
    assert without_signal(tensor(0.3, 0.3, 0.3))
    assert without_signal(tensor(-0.4))
    assert without_signal(tensor(0.0, 0.0))
    assert without_signal(tensor())
    assert not without_signal(tensor(0.3, 0.3, 0.3 + 1e-12))
    assert not without_signal(tensor(0.0, 0.0, 1.0))


@given(st.lists(st.sampled_from([-0.01, 0.0, 1.0]), min_size=1, max_size=12), st.integers(1, 4))
def test_group_relative_advantages_have_mean_zero_and_deviation_one_or_zero(rewards, groups):
    group = torch.arange(len(rewards)) % groups
    result = group_relative_advantages(tensor(*rewards), group)
    for name in group.unique():
        own = result[group == name]
        assert own.mean().item() == pytest.approx(0, abs=1e-9)
        spread = own.std(correction=0).item()
        assert spread == pytest.approx(1, abs=1e-9) or own.eq(0).all()
