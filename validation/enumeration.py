"""Every sign matrix of a small case: exact means over equally likely projections, in whole numbers and fractions."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import scipy.linalg
import sympy
import torch
from jaxtyping import Int

from logra_ref.projection import hash_words

GOLDEN = 0x9E3779B97F4A7C15  # the hash is a function of seed + (word + 1) · GOLDEN


def sign_matrices(rank: int, width: int) -> Int[np.ndarray, "m r k"]:
    """All 2^(r·k) matrices of ±1, in whole numbers."""
    index = np.arange(2 ** (rank * width))[:, None]
    return (2 * ((index >> np.arange(rank * width)) & 1) - 1).reshape(-1, rank, width)


def hadamard_choices(rank: int, width: int) -> Int[np.ndarray, "m r k"]:
    """All sets of r rows of the Hadamard matrix (k padded to K), each with all signs of the k inputs."""
    padded = 2 ** math.ceil(math.log2(width))
    rows = np.array(list(itertools.combinations(range(padded), rank)))
    signs = sign_matrices(1, width)
    return (scipy.linalg.hadamard(padded)[rows][:, None, :, :width] * signs[None]).reshape(-1, rank, width)


def enumerated_mean(entries: Int[np.ndarray, "m r k"], g: Int[np.ndarray, "d k"]) -> list[list[Fraction]]:
    """The mean of G AᵀA over equally likely A = E/√r, as fractions."""
    count, rank, _ = entries.shape
    total = g @ np.einsum("mri,mrj->ij", entries, entries)
    return [[Fraction(int(x), count * rank) for x in row] for row in total]


def enumerated_energy(entries: Int[np.ndarray, "m r k"], g: Int[np.ndarray, " k"]) -> Fraction:
    """E‖g AᵀA‖² / ‖g‖² over equally likely A = E/√r, for one row g."""
    count, rank, _ = entries.shape
    lifted = np.einsum("mr,mrk->mk", entries @ g, entries)
    return Fraction(int((lifted**2).sum()), count * rank**2 * int(g @ g))


def enumerated_row_square(entries: Int[np.ndarray, "m r k"], g: Int[np.ndarray, " k"]) -> Fraction:
    """E[mean_j S_j²] of S = g Aᵀ over equally likely A = E/√r, for one row g."""
    count, rank, _ = entries.shape
    return Fraction(int(((entries @ g) ** 2).sum()), count * rank**2)


def energy_of_independent_entries(fourth_moment: Fraction, rank: int, width: int) -> Fraction:
    """1 + (κ + k − 2)/r for independent entries of mean 0, variance 1/r and fourth moment κ/r².

    A single row a gives E[(aᵀa)²] = diag(κ + k − 1); different rows are independent and give I each.
    """
    return 1 + (fourth_moment + width - 2) / Fraction(rank)


def normal_fourth_moment() -> Fraction:
    """∫ x⁴ φ(x) dx = 3, integrated by sympy."""
    x = sympy.symbols("x", real=True)
    moment = sympy.integrate(x**4 * sympy.exp(-(x**2) / 2), (x, -sympy.oo, sympy.oo)) / sympy.sqrt(2 * sympy.pi)
    return Fraction(int(sympy.simplify(moment)))


def seeds_of_all_signs(rank: int, width: int, start: int) -> list[int]:
    """One seed for each of the 2^(r·k) sign matrices: the code then draws every one of them once.

    Word w of the seed ``start + m·GOLDEN`` is word w + m of ``start``, so that one call hashes many seeds. Stops after
    40 draws for each matrix, when one is still missing with probability 2^(r·k) e⁻⁴⁰ < 3e-13.
    """
    most = 40 * 2 ** (rank * width)
    words = hash_words(start, rank * torch.arange(most)[:, None] + torch.arange(rank))
    index = ((words & (2**width - 1)) << (width * torch.arange(rank))).sum(dim=1).numpy()
    first = np.unique(index, return_index=True)[1]
    return [(start + rank * int(m) * GOLDEN + 2**63) % 2**64 - 2**63 for m in first]
