"""Eq. 6 and the exact KL against scipy, numpy, mpmath and sympy; the standard error against a jackknife."""

import math

import mpmath
import numpy as np
import pytest
import scipy.special
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from logra_ref.predicted_kl import exact_kl, mean_and_error, predicted_kl


def tensor(x) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def draws(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scipy_kl(z, new, temperature: float) -> np.ndarray:
    p = scipy.special.softmax(np.asarray(z) / temperature, axis=-1)
    q = scipy.special.softmax(np.asarray(new) / temperature, axis=-1)
    return scipy.special.rel_entr(p, q).sum(-1)


def mpmath_kl(z: torch.Tensor, new: torch.Tensor, temperature: float) -> float:
    """With 1,500 digits, enough for e^-2000 beside 1."""
    with mpmath.workdps(1500):
        a = [mpmath.mpf(float(x)) / mpmath.mpf(temperature) for x in z]
        b = [mpmath.mpf(float(x)) / mpmath.mpf(temperature) for x in new]
        log_a, log_b = (mpmath.log(mpmath.fsum(map(mpmath.exp, x))) for x in (a, b))
        return float(mpmath.fsum(mpmath.exp(x - log_a) * (x - log_a - y + log_b) for x, y in zip(a, b, strict=True)))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.5])
def test_exact_kl_is_scipys_relative_entropy(temperature):
    z = 3 * draws(200, 17, seed=0)
    new = z + draws(200, 17, seed=1)
    expected = scipy_kl(z, new, temperature)
    # rel_entr's terms cancel in the sum, hence the absolute part.
    np.testing.assert_allclose(exact_kl(z, new, temperature), expected, rtol=1e-12, atol=1e-15)
    assert np.abs(scipy_kl(new, z, temperature) / expected - 1).max() > 0.1  # control: the direction matters


@pytest.mark.parametrize("size", [1e-12, 1e-9, 1e-6, 1e-3, 0.02, 0.3, 3.0, 30.0])
def test_exact_kl_of_any_size_of_change_keeps_its_relative_precision(size):
    z = draws(4, 9, seed=2)
    new = z + size * draws(4, 9, seed=3)
    expected = [mpmath_kl(a, b, 0.7) for a, b in zip(z, new, strict=True)]
    np.testing.assert_allclose(exact_kl(z, new, 0.7), expected, rtol=1e-11)


@pytest.mark.parametrize(
    ("z", "new"),
    [
        ([0.0, -2000.0], [0.0, 0.0]),  # a probability that underflowed to 0 comes back
        ([0.0, -2000.0], [0.0, 2000.0]),
        ([2000.0, -2000.0, 0.0], [-2000.0, 2000.0, 0.0]),
        ([2000.0, 1999.0, -2000.0], [2000.0, 1999.5, -2000.0]),
        ([-2000.0, -2000.0, -2001.0], [2000.0, 2000.5, 1999.0]),
        ([0.0, 0.5, 300.0], [800.0, 0.5, 300.0]),
    ],
)
def test_exact_kl_with_logits_2000_apart_neither_overflows_nor_forgets_underflowed_tokens(z, new):
    z, new = tensor(z), tensor(new)
    assert float(exact_kl(z[None], new[None], 1.0)) == pytest.approx(mpmath_kl(z, new, 1.0), rel=1e-11)


logit_rows = hnp.arrays(np.float64, (2, 3, 5), elements=st.floats(-1e3, 1e3, width=32))


@settings(max_examples=150, deadline=None)
@given(logit_rows, st.sampled_from([1.0, 1e-3, 1e-9, 1e-14]), st.floats(0.1, 10))
def test_kl_is_never_negative_nor_nan(pair, size, temperature):
    z, change = torch.from_numpy(pair)
    assert (exact_kl(z, z + size * change, temperature) >= 0).all()
    assert (predicted_kl(z, size * change, temperature) >= 0).all()


def test_no_change_is_exactly_zero_kl():
    z = 5 * draws(3, 11, seed=4)
    assert exact_kl(z, z, 0.6).eq(0).all()
    assert predicted_kl(z, torch.zeros_like(z), 0.6).eq(0).all()


def test_a_constant_added_to_all_logits_moves_nothing():
    z, rates = draws(6, 12, seed=5), draws(6, 12, seed=6)
    shift = torch.tensor([[-40.0], [-1.0], [0.5], [3.0], [100.0], [1e3]], dtype=torch.float64)
    np.testing.assert_allclose(exact_kl(z + shift, z + rates - shift, 1.0), exact_kl(z, z + rates, 1.0), rtol=1e-11)
    np.testing.assert_allclose(predicted_kl(z - shift, rates + shift, 1.0), predicted_kl(z, rates, 1.0), rtol=1e-10)


def test_a_common_drift_a_million_times_the_change_does_not_drown_it():
    z, rates = draws(6, 12, seed=5), 1e-6 * draws(6, 12, seed=6)
    np.testing.assert_allclose(predicted_kl(z, rates + 1.0, 1.0), predicted_kl(z, rates, 1.0), rtol=1e-8)


def test_masked_tokens_have_no_part_whatever_their_rate():
    z, rates = draws(3, 8, seed=7), draws(3, 8, seed=8)
    kept = [0, 2, 3, 6]
    masked = torch.full_like(z, -math.inf)
    masked[:, kept] = z[:, kept]
    new = masked + rates  # −∞ on both sides
    for garbage in (0.0, math.nan, math.inf, -math.inf):
        dirty = torch.full_like(rates, garbage)
        dirty[:, kept] = rates[:, kept]
        expected = predicted_kl(z[:, kept], rates[:, kept], 0.6)
        np.testing.assert_allclose(predicted_kl(masked, dirty, 0.6), expected, rtol=1e-12)
    np.testing.assert_allclose(exact_kl(masked, new, 0.6), scipy_kl(z[:, kept], (z + rates)[:, kept], 0.6), rtol=1e-11)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nan_anywhere_is_nan_and_not_a_kl_of_zero(bad):
    z, rates = draws(1, 6, seed=9), draws(1, 6, seed=10)
    far = z.clone()
    far[0, 2] = -5000.0  # p underflows there: a NaN must stay visible all the same
    spoilt = z.clone()
    spoilt[0, 2] = bad
    for before, after in ((spoilt, z), (z, spoilt), (spoilt, spoilt)):
        assert exact_kl(before, after, 1.0).isfinite().logical_not().all()
    assert exact_kl(far, torch.where(far == -5000, math.nan, far), 1.0).isnan().all()
    assert predicted_kl(spoilt, rates, 1.0).isnan().all()
    for logits in (z, far):
        dirty = rates.clone()
        dirty[0, 2] = math.nan
        assert predicted_kl(logits, dirty, 1.0).isnan().all()
    assert predicted_kl(torch.full_like(z, -math.inf), rates, 1.0).isnan().all()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 3.0])
def test_predicted_kl_is_half_the_variance_over_the_squared_temperature(temperature):
    z, rates = 2 * draws(50, 13, seed=11), draws(50, 13, seed=12)
    p = scipy.special.softmax(z.numpy() / temperature, axis=-1)
    mean = (p * rates.numpy()).sum(-1, keepdims=True)
    expected = (p * (rates.numpy() - mean) ** 2).sum(-1) / (2 * temperature**2)
    np.testing.assert_allclose(predicted_kl(z, rates, temperature), expected, rtol=1e-12)


def test_scaling_logits_and_temperature_together_leaves_the_factor_one_over_temperature_squared():
    z, rates = draws(5, 9, seed=13), draws(5, 9, seed=14)
    np.testing.assert_allclose(predicted_kl(2 * z, rates, 2.0), predicted_kl(z, rates, 1.0) / 4, rtol=1e-13)
    np.testing.assert_allclose(exact_kl(2 * z, 2 * z + 2 * rates, 2.0), exact_kl(z, z + rates, 1.0), rtol=1e-13)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_predicted_kl_is_half_the_second_derivative_of_scipys_kl(temperature):
    z, rates, h = draws(40, 7, seed=15), draws(40, 7, seed=16), 2e-3

    def kl(step):
        return scipy_kl(z, z + step * rates, temperature)

    # Fourth-order second difference; KL and its first derivative are 0 at no step.
    second = (16 * (kl(h) + kl(-h)) - (kl(2 * h) + kl(-2 * h))) / (12 * h**2)
    np.testing.assert_allclose(predicted_kl(z, rates, temperature), second / 2, rtol=1e-6)


def test_two_tokens_agree_with_the_symbolic_second_derivative():
    a, b, rate_a, rate_b, step, temperature = sympy.symbols("a b rate_a rate_b step T", positive=True)

    def p(first, second):
        return 1 / (1 + sympy.exp((second - first) / temperature))

    before, after = p(a, b), p(a + step * rate_a, b + step * rate_b)
    kl = before * sympy.log(before / after) + (1 - before) * sympy.log((1 - before) / (1 - after))
    half_second = sympy.diff(kl, step, 2).subs(step, 0) / 2
    numbers = {a: 0.3, b: 1.1, rate_a: 0.7, rate_b: 0.2, temperature: 0.6}
    expected = float(half_second.subs(numbers).evalf(30))
    assert float(predicted_kl(tensor([[0.3, 1.1]]), tensor([[0.7, 0.2]]), 0.6)) == pytest.approx(expected, rel=1e-12)


def test_low_precision_logits_are_differenced_in_fp64():
    z = draws(4, 50, seed=17).to(torch.bfloat16)
    new = (z.float() + 0.05 * draws(4, 50, seed=18)).to(torch.bfloat16)
    result = exact_kl(z, new, 1.0)
    assert result.dtype == torch.float64
    np.testing.assert_allclose(result, scipy_kl(z.double(), new.double(), 1.0), rtol=1e-9)


def brute_force(values: list[float], responses: list[int]) -> tuple[float, float]:
    names = sorted(set(responses))
    sums = [sum(v for v, r in zip(values, responses, strict=True) if r == name) for name in names]
    counts = [responses.count(name) for name in names]
    mean = sum(sums) / sum(counts)
    scatter = sum((s - mean * c) ** 2 for s, c in zip(sums, counts, strict=True))
    return mean, math.sqrt(len(names) / (len(names) - 1) * scatter) / sum(counts)


def test_standard_error_counts_responses_and_not_positions():
    values, responses = [1.0, 2.0, 4.0, 0.5, 3.0, 9.0], [7, 7, -3, 12, 12, 7]
    mean, error = mean_and_error(tensor(values), torch.tensor(responses))
    assert (mean, error) == pytest.approx(brute_force(values, responses), rel=1e-12)
    naive = np.std(values, ddof=1) / math.sqrt(len(values))
    assert abs(error / naive - 1) > 0.05  # control: independent positions would give another number


def test_standard_error_agrees_with_leaving_out_one_response_at_a_time():
    generator = np.random.default_rng(3)
    lengths = generator.integers(1, 30, size=300)
    level = generator.gamma(2.0, size=300)  # positions of one response share a level
    responses = np.repeat(np.arange(300), lengths)
    values = level[responses] * generator.gamma(2.0, size=len(responses))
    mean, error = mean_and_error(torch.from_numpy(values), torch.from_numpy(responses))
    sums = np.bincount(responses, values)
    left = (sums.sum() - sums) / (lengths.sum() - lengths)
    jackknife = math.sqrt(299 / 300 * ((left - left.mean()) ** 2).sum())
    assert mean == pytest.approx(values.mean(), rel=1e-12)
    # The two differ by terms of order 1/300 and by the spread of the lengths over 300.
    assert error == pytest.approx(jackknife, rel=0.02)


def test_a_single_response_has_no_standard_error():
    mean, error = mean_and_error(tensor([1.0, 3.0]), torch.tensor([5, 5]))
    assert mean == 2.0
    assert math.isnan(error)


def test_no_positions_at_all_is_an_error_and_not_a_mean_of_nothing():
    with pytest.raises(ValueError, match="no positions"):
        mean_and_error(tensor([]), torch.tensor([], dtype=torch.int64))


def holders_agree(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
    """What one of several holders gets: its first call of ``total`` must be answered before its second is known."""
    firsts: list[torch.Tensor] = []

    class Stop(Exception):
        pass

    def note(x):
        firsts.append(x)
        raise Stop

    for values, responses in parts:
        with pytest.raises(Stop):
            mean_and_error(values, responses, note)
    first = torch.stack(firsts).sum(0)
    seconds: list[torch.Tensor] = []
    for values, responses in parts:
        answers = iter([lambda x: first, lambda x: seconds.append(x) or x])
        mean_and_error(values, responses, lambda x, answers=answers: next(answers)(x))
    answers = iter([first, torch.stack(seconds).sum(0)])
    return mean_and_error(*parts[0], lambda x: next(answers))


@pytest.mark.parametrize("cut", [0, 4, 20])
def test_two_holders_of_responses_get_the_mean_and_error_of_the_whole(cut):
    values, responses = draws(40, seed=19).abs(), torch.arange(40) // 4
    # A response is whole on one holder; the first may hold none.
    parts = [(values[:cut], responses[:cut]), (values[cut:], responses[cut:])]
    assert holders_agree(parts) == pytest.approx(mean_and_error(values, responses), rel=1e-12)
