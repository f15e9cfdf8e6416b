"""C01: the sketch is unbiased, exactly for small matrices and within an interval for larger ones (§2.1)."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import scipy.stats
import torch

from logra_ref.projection import Kind, Projection, projection_seed, reconstruction_energy
from validation.claim import Comparison, Measurement, Setting, claim
from validation.draws import KINDS, LARGE, draw_many, error_of_averages, error_of_mean, reconstructed
from validation.enumeration import (
    energy_of_independent_entries,
    enumerated_energy,
    enumerated_mean,
    hadamard_choices,
    normal_fourth_moment,
    seeds_of_all_signs,
    sign_matrices,
)

RANK = 4  # so that 1/√r is 1/2, and a reconstruction of whole numbers exact in floating point
SHAPES = [(1, 1), (1, 8), (2, 4), (4, 2), (8, 1), (3, 4)]  # (r, k) of the enumerated energies, all with r·k ≤ 12


def exact_comparisons(setting: Setting) -> list[Comparison]:
    """The code's reconstruction over every sign matrix (4, k), in floating point without any rounding."""
    width = 3 if setting.quick else 4
    g = np.random.default_rng(setting.derived_seed("exact")).integers(-5, 6, (3, width))
    g[:, 0] = 7  # no row of zeros
    dense = torch.from_numpy(g).double()
    seeds = seeds_of_all_signs(RANK, width, setting.derived_seed("signs"))
    total, off, entries = torch.zeros_like(dense), 0.0, []
    for seed in setting.track(seeds, "C01 every sign matrix"):
        projection = Projection("rademacher", RANK, width, seed)
        e = projection.entries(dtype=torch.float64).numpy()
        lifted = reconstructed(projection, dense)
        by_hand = (g @ e.T.astype(int)) @ e.astype(int)
        off = max(off, float(np.abs(RANK * lifted.numpy() - by_hand).max()))
        total += lifted
        entries.append(e)
    mean = (total / len(seeds)).numpy()
    drawn = np.stack(entries).astype(int)
    oracle = np.array(enumerated_mean(sign_matrices(RANK, width), g))
    count = 2 ** (RANK * width)
    shifted = np.abs((g @ np.roll(drawn, 1, 2).transpose(0, 2, 1)) @ drawn - (g @ drawn.transpose(0, 2, 1)) @ drawn)
    return [
        Comparison(
            f"mean of G AᵀA over all {count:,} sign matrices ({RANK}, {width}), largest distance from G",
            expected=float(np.abs(oracle - g).max()),
            measured=float(np.abs(mean - g).max()),
            tolerance=0,
            reason="whole numbers over a power of two are exact in floating point",
            oracle="the same mean by enumeration in fractions is G",
            control="1/√r missing when A is lifted",
            control_measured=float(np.abs(math.sqrt(RANK) * mean - g).max()),
        ),
        Comparison(
            "different sign matrices that the code draws",
            expected=count,
            measured=len(np.unique(drawn.reshape(len(drawn), -1), axis=0)),
            tolerance=0,
            reason="a count; 40 draws for each matrix find it",
            oracle="2^(r·k)",
            control="every row drawn from the same word",
            control_measured=len(np.unique(drawn[:, 0], axis=0)),
            chance=3e-13,
        ),
        Comparison(
            "r G AᵀA of each of these, largest distance from whole-number arithmetic",
            expected=0,
            measured=off,
            tolerance=0,
            reason="no rounding happens",
            oracle="G EᵀE in integers, E the signs drawn",
            control="signs shifted by a column between project and lift",
            control_measured=float(shifted.max()),
        ),
    ]


def fair_draws(setting: Setting) -> Comparison:
    """Whether updates draw all sign matrices (3, 2) equally often."""
    rank, width, count = 3, 2, 40 * 64
    base = setting.derived_seed("draws")
    bits, twice = [], []
    for update in range(1, count + 1):
        e = Projection("rademacher", rank, width, projection_seed(base, update, "w")).entries().numpy()
        bits.append(tuple(e.flatten()))
        twice.append(tuple(e[[0, 0, 2]].flatten()))

    def statistic(draws: list[tuple[float, ...]]) -> float:
        seen = Counter(draws)
        return sum((seen[cell] - 40) ** 2 / 40 for cell in itertools.product((-1.0, 1.0), repeat=rank * width))

    return Comparison(
        f"χ² of how often {count:,} updates draw each of the 64 sign matrices (3, 2)",
        expected=63,
        measured=statistic(bits),
        tolerance=float(scipy.stats.chi2.isf(1e-9, 63)) - 63,
        reason="χ² with 63 degrees of freedom is above this once in 10⁹, and never that far below",
        oracle="equal probability",
        control="the second row drawn from the word of the first",
        control_measured=statistic(twice),
        chance=1e-8,
    )


def closed_forms(setting: Setting) -> list[Comparison]:
    """`reconstruction_energy` of each kind beside enumeration in fractions, or the moments of the entries."""
    rng = np.random.default_rng(setting.derived_seed("energy"))
    normal = normal_fourth_moment()

    def enumerated(choices: Iterable[tuple[int, int, np.ndarray]]) -> dict[tuple[int, int], Fraction]:
        return {(r, k): enumerated_energy(e, rng.integers(1, 8, k)) for r, k, e in choices}

    padded = [(r, k) for k in (3, 4, 5, 7) for r in (1, 2, 3)]
    expected = {
        "rademacher": enumerated((r, k, sign_matrices(r, k)) for r, k in SHAPES),
        "gaussian": {(r, k): energy_of_independent_entries(normal, r, k) for r, k in SHAPES},
        "orthonormal": {(r, k): Fraction(k, r) for r, k in [(1, 1), (1, 8), (2, 4), (4, 4), (64, 1536)]},
        "hadamard": enumerated((r, k, hadamard_choices(r, k)) for r, k in padded),
    }
    oracles = {
        "rademacher": "every sign matrix, in fractions",
        "gaussian": "1 + (κ + k − 2)/r with κ = ∫ x⁴ φ(x) dx = 3 by sympy",
        "orthonormal": "A Aᵀ = (k/r) I makes ‖ĝ‖² = (k/r) ⟨ĝ, g⟩, whose mean is (k/r) ‖g‖²",
        "hadamard": "every choice of signs and rows, k = 3, 5, 7 padded to 4 and 8, in fractions",
    }
    wrong: dict[Kind, tuple[str, Kind]] = {
        "rademacher": ("k + 1 for k − 1", "gaussian"),
        "gaussian": ("k − 1 for k + 1", "rademacher"),
        "orthonormal": ("independent rows", "rademacher"),
        "hadamard": ("rows drawn with repeats", "rademacher"),
    }

    def error(kind: Kind, formula: Kind) -> float:
        return max(abs(reconstruction_energy(formula, r, k) / e - 1) for (r, k), e in expected[kind].items())

    return [
        Comparison(
            f"E‖ĝ‖²/‖g‖², {kind}, largest relative error of the closed form over {len(expected[kind])} shapes",
            expected=0,
            measured=error(kind, kind),
            tolerance=1e-15,
            reason="four roundings of 2⁻⁵³",
            oracle=oracles[kind],
            control=wrong[kind][0],
            control_measured=error(kind, wrong[kind][1]),
        )
        for kind in KINDS
    ]


def random_comparisons(draws: dict[Kind, dict[str, np.ndarray]]) -> list[Comparison]:
    """The figures of `draw_many` for each kind beside their expectations."""
    _, k, r = LARGE
    found = []
    for kind, drawn in draws.items():
        count = len(drawn["alignment"])
        found.append(
            Comparison(
                f"mean of ⟨GAᵀA, G⟩/‖G‖², {kind}, G {LARGE[:2]}, r = {r}, {count:,} seeds",
                expected=1,
                measured=float(drawn["alignment"].mean()),
                tolerance=error_of_mean(drawn["alignment"]),
                reason="6 standard errors of the mean",
                oracle="E[AᵀA] = I",
                control="data drawn with the projection's own seed",
                control_measured=float(drawn["same seed"].mean()),
                chance=1e-8,
            )
        )
    tests = sum(drawn["mean"].size for drawn in draws.values())
    limit = float(scipy.stats.t.isf(1e-7 / (2 * tests), count - 1))

    def farthest(scale: float) -> float:
        """The largest distance of a mean entry from G, in its standard errors."""
        scores = [(scale * x["mean"] - x["g"]) / (scale * x["deviation"]) * math.sqrt(count) for x in draws.values()]
        return float(max(np.abs(z).max() for z in scores))

    found.append(
        Comparison(
            f"the entry of the mean that is farthest from G, of all {tests:,} entries of the four kinds",
            expected=limit,
            measured=farthest(1),
            tolerance=0,
            relation="≤",
            unit="standard errors",
            reason="Student's t, for the largest of all entries together once in 10⁷",
            oracle="E[AᵀA] = I",
            control="1/√r missing when A is lifted",
            control_measured=farthest(math.sqrt(r)),
            chance=1e-6,
        )
    )
    energies = {
        "rademacher": energy_of_independent_entries(Fraction(1), r, k),
        "gaussian": energy_of_independent_entries(Fraction(3), r, k),
        "orthonormal": Fraction(k, r),
        "hadamard": 1 + Fraction((k - 1) * (64 - r), r * 63),
    }
    for kind, drawn in draws.items():
        found.append(
            Comparison(
                f"mean of ‖GAᵀA‖²/‖G‖², {kind}, the same seeds",
                expected=float(energies[kind]),
                measured=float(drawn["energy"].mean()),
                tolerance=error_of_mean(drawn["energy"]),
                reason="6 standard errors of the mean",
                oracle="the closed form that enumeration and moments gave above",
                control="1/√r missing when A is lifted",
                control_measured=float(drawn["energy"].mean() * r),
                chance=1e-8,
            )
        )
    return found


@claim("C01", "the sketch is unbiased, E[SA] = G", "§2.1")
def unbiased(setting: Setting) -> Measurement:
    """Exact over every sign matrix, within an interval for all four kinds, with the second moments beside."""
    draws = {kind: draw_many(kind, setting, 400 if setting.quick else 1200) for kind in KINDS}
    edges = np.linspace(0, 2, 41)
    return Measurement(
        [
            *exact_comparisons(setting),
            fair_draws(setting),
            *closed_forms(setting),
            *random_comparisons(draws),
        ],
        note="A single reconstruction is far from G (its length alone is √(1 + (k−1)/r) times as large); only its mean "
        "is G.",
        data={
            "averages": error_of_averages(setting),
            "edges": [round(float(x), 3) for x in edges],
            "alignment": {kind: np.histogram(x["alignment"], edges)[0].tolist() for kind, x in draws.items()},
        },
    )
