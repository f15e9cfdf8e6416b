"""The theory behind C13 against all sign matrices of small cases, Wishart moments and singular values."""

import numpy as np
import pytest
import torch

from validation.enumeration import sign_matrices
from validation.spread import Spectrum, even_partitions, moment, predict


@pytest.mark.parametrize(("rank", "width"), [(1, 4), (2, 3), (3, 2), (3, 4)])
def test_second_moments_for_signs_are_the_means_over_all_sign_matrices(rank, width):
    g = np.random.default_rng(width).standard_normal((2, width))
    m = g.T @ g / np.square(g).sum()
    entries = sign_matrices(rank, width)
    b = np.einsum("nri,nrj->nij", entries, entries) / rank
    x, y = np.einsum("ij,nji->n", m, b), np.einsum("ij,njl,nli->n", m, b, b)
    spectrum = Spectrum.of(torch.from_numpy(g))
    for product, values in {"X": x, "Y": y, "XX": x * x, "XY": x * y, "YY": y * y}.items():
        assert moment("rademacher", product, rank, width, spectrum) == pytest.approx(values.mean(), rel=1e-12)


@pytest.mark.parametrize(("rank", "width", "share"), [(4, 10, 0.3), (7, 3, 1.0)])
def test_second_moments_for_normal_entries_are_those_of_a_wishart_matrix(rank, width, share):
    spectrum = Spectrum(share, 0.0)
    assert moment("gaussian", "Y", rank, width, spectrum) == pytest.approx(1 + (width + 1) / rank)
    assert moment("gaussian", "XX", rank, width, spectrum) == pytest.approx(1 + 2 * share / rank)
    # The derivative of E[tr M W²] = r(r+1) tr(MΣ²) + r tr(Σ) tr(MΣ) along Σ = I + 2tM.
    covariance = (4 * (rank + 1) * share + 2 + 2 * width * share) / rank**2
    found = moment("gaussian", "XY", rank, width, spectrum) - moment("gaussian", "Y", rank, width, spectrum)
    assert found == pytest.approx(covariance)


@pytest.mark.parametrize("shape", [(3, 8), (8, 3)])
def test_the_spectrum_is_that_of_the_singular_values(shape):
    g = torch.from_numpy(np.random.default_rng(1).standard_normal(shape))
    lam = np.square(np.linalg.svd(g.numpy(), compute_uv=False))
    assert Spectrum.of(g).participation == pytest.approx(np.square(lam / lam.sum()).sum())
    assert Spectrum.of(torch.eye(3, dtype=torch.float64)) == Spectrum(pytest.approx(1 / 3), pytest.approx(1 / 3))


def test_partitions_into_even_blocks_are_counted_by_the_coefficients_of_exp_of_cosh():
    assert [sum(1 for _ in even_partitions(n)) for n in (0, 2, 4, 6, 8)] == [1, 1, 4, 31, 379]
    assert sum(1 for _ in even_partitions(3)) == 0


@pytest.mark.parametrize("kind", ["rademacher", "gaussian", "orthonormal", "hadamard"])
def test_for_wide_matrices_the_second_order_is_the_simple_one(kind):
    width, rank, share = 2**24, 8, 0.4
    p = predict(kind, rank, width, Spectrum(share, 0.0))
    assert p.second / p.first == pytest.approx(1 - share / (4 * rank), rel=1e-5)
    assert p.deviation / p.first == pytest.approx((share / (2 * rank)) ** 0.5, rel=1e-4)
