"""E[AᵀA] = I and E‖ĝ‖² by enumeration of every draw (signs, Hadamard), by closed forms and statistics for the others.

Statistics are limited to 4.9 standard errors or p = 1e-6: of the few dozen here one would be a false alarm once in
2e4 choices of the seeds, which are fixed.
"""

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch

from logra_ref import projection as module
from logra_ref.projection import Projection, projection_seed, reconstruction_energy

LIMIT = 4.9
RARE = 1e-6


def choose_words(monkeypatch, words) -> None:
    """The hash gives these words for the counters 0, 1, …"""
    table = torch.tensor(words)
    monkeypatch.setattr(module, "hash_words", lambda seed, counters: table[counters])


def there_and_back(projection: Projection, g: torch.Tensor) -> torch.Tensor:
    """g EᵀE in integers: r times the reconstruction for entries of ±1."""
    return projection.lift(projection.project(g, scaled=False), scaled=False)


def check_moments(kind: str, rank: int, width: int, choices, monkeypatch) -> None:
    """Over all draws the mean of ĝ is g and that of ‖ĝ‖² is as claimed, in whole numbers and fractions."""
    g = torch.from_numpy(np.random.default_rng(width).integers(-5, 6, (3, width)).astype(np.float64))
    g[0, 0] = 7  # no row of zeros
    total, squares, count = torch.zeros_like(g), torch.zeros(len(g), dtype=torch.float64), 0
    for words in choices:
        choose_words(monkeypatch, words)
        lifted = there_and_back(Projection(kind, rank, width, 0), g)
        total, squares, count = total + lifted, squares + lifted.square().sum(1), count + 1
    assert torch.equal(total, count * rank * g)
    padded = 2 ** math.ceil(math.log2(width))
    energy = {
        "rademacher": 1 + Fraction(width - 1, rank),
        "hadamard": 1 + Fraction((width - 1) * (padded - rank), rank * max(padded - 1, 1)),
    }
    for row, square in zip(g, squares, strict=True):
        measured = Fraction(int(square), count * rank**2)
        assert measured == energy[kind] * int(row.square().sum())
    assert reconstruction_energy(kind, rank, width) == pytest.approx(float(energy[kind]), rel=1e-15)


@pytest.mark.parametrize(("rank", "width"), [(1, 1), (1, 8), (2, 4), (4, 2), (8, 1), (2, 3), (3, 2), (1, 5)])
def test_over_all_sign_matrices_the_mean_of_ata_is_exactly_the_identity_and_the_energy_as_claimed(
    rank, width, monkeypatch
):
    check_moments("rademacher", rank, width, itertools.product(range(2**width), repeat=rank), monkeypatch)
    assert reconstruction_energy("gaussian", rank, width) != reconstruction_energy("rademacher", rank, width)


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [4, 3])
def test_over_all_signs_and_row_subsets_hadamard_has_these_moments_also_where_it_is_padded(rank, width, monkeypatch):
    """Padding to K = 4 keeps the mean; without the (K − r)/(K − 1) of drawing rows without repeats it is not this."""
    orders = [[i not in chosen for i in range(4)] for chosen in itertools.combinations(range(4), rank)]
    choices = [[signs, *order] for signs in range(2**width) for order in orders]
    check_moments("hadamard", rank, width, [[int(x) for x in words] for words in choices], monkeypatch)
    with_repeats = 1 + (width - 1) / rank
    assert rank == 1 or reconstruction_energy("hadamard", rank, width) < with_repeats


@pytest.mark.parametrize(("width", "rank"), [(1, 1), (2, 1), (2, 2)])
def test_hadamard_of_one_or_two_inputs_has_these_moments(width, rank, monkeypatch):
    orders = [[int(i not in chosen) for i in range(width)] for chosen in itertools.combinations(range(width), rank)]
    check_moments("hadamard", rank, width, [[s, *order] for s in range(2**width) for order in orders], monkeypatch)


def seeds(count: int, name: str) -> list[int]:
    return [projection_seed(17, update, name) for update in range(count)]


def rarity(counts: Counter, outcomes: int) -> float:
    """The p-value of equal probability."""
    observed = [*counts.values(), *[0] * (outcomes - len(counts))]
    return scipy.stats.chisquare(observed).pvalue


def test_seeds_draw_every_small_sign_matrix_equally_often():
    drawn = Counter(
        tuple(Projection("rademacher", 2, 2, seed).entries().flatten().tolist()) for seed in seeds(800, "a")
    )
    assert rarity(drawn, 16) > RARE
    drawn.pop(next(iter(drawn)))
    assert rarity(drawn, 16) < RARE  # control: a matrix that never comes would be seen


def test_seeds_draw_every_hadamard_row_equally_often_and_in_every_order():
    rows = Counter()
    for seed in seeds(600, "b"):
        e = Projection("hadamard", 2, 3, seed).entries().numpy()
        e *= e[:, :1]  # the sign of column 0 taken out
        rows[tuple(e.flatten().tolist())] += 1
    # 12 ordered pairs of rows times the signs of columns 1 and 2 against column 0
    whole = scipy.linalg.hadamard(4)[:, :3]
    possible = Counter()
    for pair, flips in itertools.product(itertools.permutations(range(4), 2), itertools.product((1, -1), repeat=2)):
        possible[tuple((whole[list(pair)] * [1, *flips]).astype(float).flatten().tolist())] += 1
    assert rows.keys() <= possible.keys()
    expected = np.array(list(possible.values())) * 600 / sum(possible.values())
    assert scipy.stats.chisquare([rows[key] for key in possible], expected).pvalue > RARE


def test_gaussian_entries_are_standard_normal_and_independent():
    drawn = Projection("gaussian", 64, 1024, projection_seed(0, 1, "c")).entries(dtype=torch.float64).numpy()
    assert scipy.stats.kstest(drawn.flatten(), "norm").pvalue > RARE
    assert scipy.stats.kstest(1.02 * drawn.flatten(), "norm").pvalue < 0.05  # control: 2 % more would be felt
    many = Projection("gaussian", 6000, 3, projection_seed(0, 1, "d")).entries(dtype=torch.float64).numpy()
    many = many.reshape(-1, 6)  # neighbours within a row and in two rows
    covariance = many.T @ many / len(many)
    error = np.sqrt((1 + np.eye(6)) / len(many))
    assert (np.abs(covariance - np.eye(6)) < LIMIT * error).all()
    assert np.abs(drawn).max() < math.sqrt(-2 * math.log(2**-33)) + 1e-9  # 32 bits: the tail ends at 6.8, no infinity


def z_score(values: np.ndarray, expected: float) -> float:
    return float((values.mean() - expected) / (values.std(ddof=1) / math.sqrt(len(values))))


def draws(kind: str, rank: int, width: int, count: int) -> np.ndarray:
    """``count`` independent matrices A, (count, r, k)."""
    name = f"{kind} {rank} {width}"
    if kind in ("rademacher", "gaussian"):  # rows are independent: one tall matrix holds all
        tall = Projection(kind, count * rank, width, projection_seed(17, 0, name)).entries(dtype=torch.float64)
        return tall.numpy().reshape(count, rank, width) / math.sqrt(rank)
    drawn = [Projection(kind, rank, width, seed).matrix(dtype=torch.float64).numpy() for seed in seeds(count, name)]
    return np.stack(drawn)


def reconstructed_squares(a: np.ndarray) -> np.ndarray:
    """‖ĝ‖² / ‖g‖² for a stack of matrices A and one g."""
    g = np.linspace(-1, 2, a.shape[-1])
    return np.square(np.einsum("nrk,k,nrl->nl", a, g, a)).sum(1) / (g @ g)


def cosines(a: np.ndarray, g: np.ndarray) -> np.ndarray:
    """The cosine between G and G AᵀA for each A of a stack."""
    found = []
    for one in a:
        lifted = (g @ one.T) @ one
        found.append((lifted * g).sum() / (np.linalg.norm(lifted) * np.linalg.norm(g)))
    return np.array(found)


@pytest.mark.parametrize(("rank", "width"), [(1, 1), (1, 3), (4, 2), (2, 6)])
def test_gaussian_energy_has_k_plus_1_where_signs_have_k_minus_1(rank, width):
    found = reconstructed_squares(draws("gaussian", rank, width, 20_000))
    assert abs(z_score(found, 1 + (width + 1) / rank)) < LIMIT
    assert reconstruction_energy("gaussian", rank, width) == pytest.approx(1 + (width + 1) / rank, rel=1e-15)
    assert abs(z_score(found, reconstruction_energy("rademacher", rank, width))) > LIMIT  # control


@pytest.mark.parametrize(("rank", "width"), [(1, 1), (1, 7), (3, 7), (6, 7), (7, 7), (5, 64)])
def test_orthonormal_rows_are_exactly_orthogonal_and_the_energy_is_k_over_r(rank, width):
    projection = Projection("orthonormal", rank, width, projection_seed(1, 1, "e"))
    a = projection.matrix(dtype=torch.float64)
    np.testing.assert_allclose(a @ a.T, width / rank * np.eye(rank), rtol=0, atol=1e-13 * width)
    assert reconstruction_energy("orthonormal", rank, width) == pytest.approx(width / rank, rel=1e-15)
    g = torch.linspace(-1, 2, width, dtype=torch.float64)[None]
    lifted = projection.lift(projection.project(g))
    if rank == width:
        np.testing.assert_allclose(lifted, g, rtol=0, atol=1e-13)
    else:
        # A Aᵀ = (k/r) I makes ĝ a projection times k/r, so that ‖ĝ‖² = (k/r) ⟨ĝ, g⟩ for every draw.
        np.testing.assert_allclose(lifted.square().sum(), width / rank * (lifted * g).sum(), rtol=1e-12)
        assert abs(z_score(reconstructed_squares(draws("orthonormal", rank, width, 200)), width / rank)) < LIMIT


def normal_rows(rank: int, width: int, seed: int) -> np.ndarray:
    return Projection("gaussian", rank, width, seed).entries(dtype=torch.float64).numpy()


def test_orthonormal_rows_are_uniform_which_qr_without_the_signs_of_r_is_not():
    drawn, corrected_not = [], []
    for seed in seeds(250, "f"):
        drawn.append(Projection("orthonormal", 2, 2, seed).entries(dtype=torch.float64).numpy())
        corrected_not.append(np.linalg.qr(normal_rows(2, 2, seed).T)[0].T)
    drawn, corrected_not = np.stack(drawn), np.stack(corrected_not)

    def p_value(matrices: np.ndarray) -> float:
        """Uniform on O(2): the angle of the first row on the circle, a rotation or a reflection by a fair coin."""
        angles = np.arctan2(matrices[:, 0, 1], matrices[:, 0, 0]) / (2 * math.pi) + 0.5
        rotations = int((np.linalg.det(matrices) > 0).sum())
        return min(
            scipy.stats.kstest(angles, "uniform").pvalue,
            scipy.stats.binomtest(rotations, len(matrices)).pvalue,
        )

    assert p_value(drawn) > RARE
    assert p_value(corrected_not) < RARE  # control
    mean = np.einsum("nri,nrj->ij", drawn[:, :1], drawn[:, :1]) * 2 / len(drawn)
    assert np.abs(mean - np.eye(2)).max() < LIMIT / math.sqrt(len(drawn))


QWEN_1_5B = [1536] * 6 + [8960]  # inputs of q, k, v, o, gate, up and down of a Qwen2.5-Math-1.5B layer


def mean_cosine(kind: str, rank: int) -> float:
    return float(np.mean([reconstruction_energy(kind, rank, width) ** -0.5 for width in QWEN_1_5B]))


def test_the_papers_figure_5_follows_from_the_shapes_of_a_layer_alone():
    assert mean_cosine("rademacher", 4) == pytest.approx(0.0467, abs=5e-5)
    assert mean_cosine("rademacher", 256) == pytest.approx(0.3479, abs=5e-5)
    assert mean_cosine("orthonormal", 256) == pytest.approx(0.374, abs=5e-4)
    gaps = [mean_cosine("rademacher", rank) - mean_cosine("gaussian", rank) for rank in (64, 256)]
    assert gaps == pytest.approx([1.1e-4, 1.8e-4], abs=5e-6)


@pytest.mark.parametrize("kind", ["rademacher", "gaussian", "orthonormal", "hadamard"])
def test_measured_cosine_of_a_full_rank_gradient_is_the_closed_form_for_a_padded_width_too(kind):
    g = np.random.default_rng(5).standard_normal((96, 192))
    found = cosines(draws(kind, 16, 192, 40), g)
    spectrum = np.square(np.linalg.svd(g, compute_uv=False))
    lower = np.square(spectrum / spectrum.sum()).sum() / (4 * 16)  # the second order: 0.03 % here
    expected = reconstruction_energy(kind, 16, 192) ** -0.5
    assert abs(found.mean() / expected - 1) < 2 * lower + LIMIT * found.std() / expected / math.sqrt(40)
    assert found.std() / expected < 0.03


def test_a_gradient_of_rank_one_at_rank_four_lies_seven_percent_below_the_first_order():
    g = np.outer(np.arange(1.0, 4), np.linspace(-1, 2, 1536))
    found = cosines(draws("rademacher", 4, 1536, 200), g)
    first_order = reconstruction_energy("rademacher", 4, 1536) ** -0.5
    # ‖g Aᵀ‖/‖g‖ is that of four normal numbers: E[χ₄]/2 = 0.940.
    expected = math.sqrt(2) * math.gamma(2.5) / math.gamma(2) / 2
    assert abs(z_score(found / first_order, expected)) < LIMIT
