"""RowAdam against numpy over several steps, what it leaves unchanged, and rows held by several holders."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logra_ref.direction import row_adam_direction, row_adam_factor, sgd_direction, sgd_factor
from logra_ref.projection import Projection, projection_seed
from tests.ref.holders import each_holder

BETA2, EPSILON = 0.95, 1e-8


def draws(*shape: int, seed: int = 0, decades: float = 3) -> torch.Tensor:
    """Rows of sizes that differ by many powers of ten."""
    generator = np.random.default_rng(seed)
    sizes = 10 ** generator.uniform(-decades, decades, (shape[0], 1))
    return torch.from_numpy(generator.standard_normal(shape) * sizes)


def numpy_row_adam(sketches: list[np.ndarray], *, absolute: bool = False) -> list[np.ndarray]:
    """Appendix B in loops over rows, from S of every step to U of every step."""
    v, directions = np.zeros(len(sketches[0])), []
    for t, sketch in enumerate(sketches, start=1):
        root = np.zeros_like(v)
        for i, row in enumerate(sketch):
            v[i] = BETA2 * v[i] + (1 - BETA2) * np.mean(row**2)
            root[i] = np.sqrt(v[i] / (1 - BETA2**t))
        epsilon = EPSILON if absolute else EPSILON * root.mean()
        raw = np.array([row / (root[i] + epsilon) for i, row in enumerate(sketch)])
        directions.append(raw * np.linalg.norm(sketch) / np.linalg.norm(raw))
    return directions


def run(sketches: list[torch.Tensor], **settings) -> list[torch.Tensor]:
    moment, directions = torch.zeros(len(sketches[0]), dtype=sketches[0].dtype), []
    for t, sketch in enumerate(sketches, start=1):
        direction, moment = row_adam_direction(sketch, moment, step=t, beta2=BETA2, epsilon=EPSILON, **settings)
        directions.append(direction)
    return directions


@pytest.mark.parametrize(("d", "r"), [(7, 3), (1, 4), (5, 1), (1, 1)])
def test_six_steps_are_those_of_numpy_in_loops(d, r):
    sketches = [draws(d, r, seed=t) for t in range(6)]
    expected = numpy_row_adam([sketch.numpy() for sketch in sketches])
    for direction, reference in zip(run(sketches), expected, strict=True):
        np.testing.assert_allclose(direction, reference, rtol=1e-12)


def test_a_small_gradient_shows_that_epsilon_is_relative_to_the_mean_root():
    sketches = [1e-9 * draws(7, 3, seed=t) for t in range(3)]
    arrays = [sketch.numpy() for sketch in sketches]
    np.testing.assert_allclose(run(sketches)[-1], numpy_row_adam(arrays)[-1], rtol=1e-12)
    wrong = numpy_row_adam(arrays, absolute=True)[-1]
    assert np.abs(wrong / numpy_row_adam(arrays)[-1] - 1).max() > 0.1  # control


def test_the_stored_second_moment_is_the_plain_average_without_the_correction_for_its_start():
    first, second = draws(4, 3, seed=0), draws(4, 3, seed=1)
    _, moment = row_adam_direction(first, torch.zeros(4).double(), step=1, beta2=BETA2)
    np.testing.assert_allclose(moment, (1 - BETA2) * np.mean(first.numpy() ** 2, axis=1), rtol=1e-14)
    _, moment = row_adam_direction(second, moment, step=2, beta2=BETA2)
    plain = (1 - BETA2) * (BETA2 * np.mean(first.numpy() ** 2, axis=1) + np.mean(second.numpy() ** 2, axis=1))
    np.testing.assert_allclose(moment, plain, rtol=1e-14)


def test_fp32_is_fp32_throughout_and_agrees_with_fp64():
    sketches = [draws(6, 4, seed=t) for t in range(4)]
    direction = run([sketch.float() for sketch in sketches])[-1]
    assert direction.dtype == torch.float32
    np.testing.assert_allclose(direction, run(sketches)[-1], rtol=1e-5)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32), st.integers(1, 50))
def test_the_norm_of_the_sketch_is_restored_whatever_the_history(d, r, seed, step):
    sketch, moment = draws(d, r, seed=seed), draws(d, 1, seed=seed + 1)[:, 0].abs()
    direction, _ = row_adam_direction(sketch, moment, step=step)
    assert float(direction.norm() / sketch.norm()) == pytest.approx(1, abs=1e-12)


def test_at_the_first_step_all_rows_get_the_same_size():
    direction = run([draws(9, 4, decades=1)])[0]
    norms = direction.norm(dim=1) / direction.norm()
    np.testing.assert_allclose(norms, np.full(9, 1 / 3), rtol=1e-6)  # but for ε


@pytest.mark.parametrize("factor", [1e-2, 3.0, 1e2])
def test_a_row_whose_gradients_were_always_larger_moves_as_much_as_before(factor):
    sketches = [draws(5, 3, seed=t, decades=1) for t in range(5)]
    scales = torch.tensor([1, factor, 1, 1, 1], dtype=torch.float64)[:, None]
    for before, after in zip(run(sketches), run([scales * sketch for sketch in sketches]), strict=True):
        np.testing.assert_allclose(after / after.norm(), before / before.norm(), rtol=1e-5)  # but for ε
    # control: from the third step on alone, the row is not the same
    late = [*sketches[:2], *(scales * sketch for sketch in sketches[2:])]
    assert (run(late)[2] / run(late)[2].norm() - run(sketches)[2] / run(sketches)[2].norm()).abs().max() > 0.01


@pytest.mark.parametrize("factor", [1e-6, 1e5])
def test_the_whole_gradient_times_a_constant_is_the_direction_times_it(factor):
    sketches = [draws(5, 3, seed=t) for t in range(4)]
    for before, after in zip(run(sketches), run([factor * sketch for sketch in sketches]), strict=True):
        np.testing.assert_allclose(after, factor * before, rtol=1e-12)


def test_the_second_moment_estimates_the_row_of_the_dense_gradient_whatever_a_is():
    """E_A[mean_j S_ij²] = ‖g_i‖² / r over all 256 sign matrices, to rounding: state outlives a redrawn A."""
    g = draws(3, 4, decades=0)
    total = torch.zeros(3, dtype=torch.float64)
    for signs in itertools.product((-1.0, 1.0), repeat=8):
        a = torch.tensor(signs, dtype=torch.float64).reshape(2, 4) / 2**0.5
        total += row_adam_direction(g @ a.T, torch.zeros(3).double(), step=1, beta2=0.0)[1]
    np.testing.assert_allclose(total / 256, g.square().sum(1) / 2, rtol=1e-13)
    drawn = Projection("rademacher", 2, 4, projection_seed(0, 1, "q")).matrix(dtype=torch.float64)
    one = row_adam_direction(g @ drawn.T, torch.zeros(3).double(), step=1, beta2=0.0)[1]
    assert (one / (g.square().sum(1) / 2) - 1).abs().max() > 0.01  # control: only the mean over A has it


def test_a_row_of_zeros_stays_zero_and_the_others_are_as_without_it_but_for_the_mean_root():
    sketches = [draws(5, 3, seed=t) for t in range(3)]
    for sketch in sketches:
        sketch[2] = 0
    for direction, reference in zip(run(sketches), numpy_row_adam([s.numpy() for s in sketches]), strict=True):
        assert (direction[2] == 0).all()
        np.testing.assert_allclose(direction, reference, rtol=1e-12)


@pytest.mark.parametrize("history", [0.0, 2.0])
def test_a_sketch_of_zeros_gives_a_direction_of_zeros_and_not_nan(history):
    direction, moment = row_adam_direction(torch.zeros(4, 3), torch.full((4,), history), step=2)
    assert (direction == 0).all()
    np.testing.assert_allclose(moment, np.full(4, 0.95 * history), rtol=1e-6)
    assert (sgd_direction(torch.zeros(4, 3)) == 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_is_counted_and_refused_before_anything_is_changed(bad):
    sketch, moment = draws(4, 3), torch.ones(4, dtype=torch.float64)
    sketch[1, 2] = sketch[3, 0] = bad
    before = sketch.clone()
    for direction in (sgd_direction, lambda s: row_adam_direction(s, moment, step=1)):
        with pytest.raises(FloatingPointError, match="2 of 12 numbers of the sketch are not finite; nothing was"):
            direction(sketch)
    assert torch.equal(moment, torch.ones(4, dtype=torch.float64))
    assert torch.equal(sketch.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("size", [2e19, 1e38])
def test_finite_fp32_numbers_whose_squares_overflow_are_an_error_and_not_zeros_for_ever(size):
    """v = ∞ would make U = 0 at this and every later update."""
    moment = torch.ones(4)
    with pytest.raises(FloatingPointError, match="overflow"):
        row_adam_direction(torch.full((4, 3), size), moment, step=1)
    assert torch.equal(moment, torch.ones(4))
    assert torch.equal(sgd_direction(torch.full((4, 3), size)), torch.full((4, 3), size))


def test_neither_sketch_nor_second_moment_is_changed_in_place_so_a_proposal_may_be_dropped():
    sketch, moment = draws(4, 3), torch.ones(4, dtype=torch.float64)
    copies = sketch.clone(), moment.clone()
    direction, new = row_adam_direction(sketch, moment, step=3)
    again, _ = row_adam_direction(sketch, moment, step=3)
    assert torch.equal(direction, again)
    assert torch.equal(sketch, copies[0]) and torch.equal(moment, copies[1])
    assert not torch.equal(new, moment)
    plain = sgd_direction(sketch)
    assert torch.equal(plain, sketch)
    sketch.zero_()  # as the next microbatch does
    assert torch.equal(plain, copies[0])


def test_u_as_a_factor_takes_no_memory_beside_the_sketch_but_for_a_number_a_row():
    sketch, moment = draws(4, 3), torch.zeros(4, dtype=torch.float64)
    for factor in (sgd_factor(sketch), row_adam_factor(sketch, moment, step=1)[0]):
        assert factor.levels.data_ptr() == sketch.data_ptr()
        assert factor.row_scale.shape == (4,)


@pytest.mark.parametrize("step", [0, -1])
def test_a_step_below_one_would_divide_by_zero_and_is_refused(step):
    with pytest.raises(ValueError, match=f"counts applied updates from 1, not from {step}"):
        row_adam_direction(draws(4, 3), torch.zeros(4).double(), step=step)


@pytest.mark.parametrize("cuts", [[3, 4], [1, 6], [0, 7], [2, 2, 3]])
def test_rows_at_several_holders_of_any_number_even_none_get_the_direction_of_the_whole(cuts):
    sketches = [draws(7, 3, seed=t) for t in range(4)]
    whole = run(sketches)
    parts = [sketch.split(cuts) for sketch in sketches]
    held = each_holder(lambda holder, total: run([part[holder] for part in parts], total=total), len(cuts))
    for step, direction in enumerate(whole):
        together = torch.cat([holder[step] for holder in held])
        np.testing.assert_allclose(together, direction, rtol=1e-12)
    if cuts == [3, 4]:  # control: each holder for itself restores its own norm
        alone = torch.cat([run([part[holder] for part in parts])[-1] for holder in (0, 1)])
        assert (alone / whole[-1] - 1).abs().max() > 0.1
