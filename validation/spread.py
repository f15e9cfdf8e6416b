"""How well G AᵀA points along G, from shapes and spectrum alone: the theory that the measurements are held against.

With M = GᵀG/‖G‖² (trace 1) and B = AᵀA let X = tr(M B) = ⟨G, Ĝ⟩/‖G‖² and Y = tr(M B²) = ‖Ĝ‖²/‖G‖². The cosine is
X/√Y. E[X] = 1, and E[Y] depends on the shape alone: that is the first order. What the gradient adds enters the second
moments of X and Y by two numbers, ``participation`` Σλ² = tr(M²), with λ the squared singular values of G over their
sum, and ``coherence`` Σ M_ii², with M_ii the share of input i in ‖G‖².

Nothing here calls the code under test. Moments of a matrix of independent entries z come from enumeration: the mean
of a product of z's is a sum over all ways to part its factors into blocks, each block giving the cumulant of its size
if its factors are one and the same entry (pairs alone for normal entries: Isserlis).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from jaxtyping import Float
from torch import Tensor

from logra_ref.projection import Kind

CUMULANTS = {"gaussian": {2: 1}, "rademacher": {2: 1, 4: -2, 6: 16, 8: -272}}
"""Of an entry that is N(0, 1) or ±1: the coefficients of log E[eᵗᶻ], t²/2 and log cosh t, times the factorials."""

Term = tuple[int, int, str]
"""The powers of r and k and what is left of M: ``1`` (a product of traces), ``participation`` or ``coherence``."""


@dataclass(frozen=True)
class Spectrum:
    """What the spread of the cosine knows of a gradient."""

    participation: float
    """Σλ², from 1/rank (all singular values equal) to 1 (rank one); its inverse is the number of effective ranks."""
    coherence: float
    """Σ M_ii², from 1/k (all inputs alike) to 1 (a single input has all of the gradient)."""

    @classmethod
    def of(cls, gradient: Float[Tensor, "d k"]) -> Spectrum:
        """Σλ² as ‖G Gᵀ‖²/‖G‖⁴ (or of GᵀG, whichever is smaller) and Σ M_ii² from the columns' norms, in fp64."""
        g = gradient.double()
        gram = g @ g.T if len(g) <= g.shape[1] else g.T @ g
        whole = float(g.square().sum()) ** 2
        return cls(float(gram.square().sum()) / whole, float(g.square().sum(0).square().sum()) / whole)


@dataclass(frozen=True)
class Prediction:
    """The cosine's mean to first and second order and its standard deviation over draws of A."""

    first: float
    second: float
    deviation: float


def predict(kind: Kind, rank: int, width: int, spectrum: Spectrum) -> Prediction:
    """First order √(1/E[Y]); second order by the expansion of X/√Y around the means of X and Y.

    With x = X − 1 and y = Y/E[Y] − 1:  E[X/√Y] ≈ (1 − E[xy]/2 + 3 E[y²]/8)/√E[Y]  and
    Var ≈ (E[x²] − E[xy] + E[y²]/4)/E[Y].  For k ≫ r, y is x and they are 1 − Σλ²/(4r) and Σλ²/(2r).
    Orthonormal rows have Y = X k/r in every draw, and X the variance of a random subspace's share. Hadamard rows have
    signs' moments but for the factor (K − r)/(K − 1) of drawing r of K rows without repeats; y is taken to be x.
    """
    if kind == "orthonormal":
        share = max(width * spectrum.participation - 1, 0.0) / max(width - 1, 1)
        xx = 2 * (width - rank) / (rank * (width + 2)) * share
        first = math.sqrt(rank / width)
        return Prediction(first, first * (1 - xx / 8), first * math.sqrt(xx) / 2)
    if kind == "hadamard":
        padded = 1 << (width - 1).bit_length()
        unsampled = (padded - rank) / max(padded - 1, 1)
        first = (1 + (width - 1) / rank * unsampled) ** -0.5
        xx = 2 * (spectrum.participation - spectrum.coherence) / rank * unsampled
        return Prediction(first, first * (1 - xx / 8), first * math.sqrt(xx) / 2)
    energy = moment(kind, "Y", rank, width, spectrum)
    xx = moment(kind, "XX", rank, width, spectrum) - 1
    xy = moment(kind, "XY", rank, width, spectrum) / energy - 1
    yy = moment(kind, "YY", rank, width, spectrum) / energy**2 - 1
    first = energy**-0.5
    variance = max(xx - xy + yy / 4, 0.0)
    return Prediction(first, first * (1 - xy / 2 + 3 * yy / 8), first * math.sqrt(variance))


def moment(kind: str, product: str, rank: int, width: int, spectrum: Spectrum) -> float:
    """E of a product such as ``Y`` or ``XY``, exact for every gradient (``kind``: rademacher or gaussian)."""
    value = {"1": 1.0, "participation": spectrum.participation, "coherence": spectrum.coherence}
    terms = moment_terms(kind, product)
    return sum(count * rank**r * width**k * value[left] for (r, k, left), count in terms.items())


@cache
def moment_terms(kind: str, product: str) -> dict[Term, int]:
    """The polynomial in r, 1/r, k, Σλ² and Σ M_ii² that E of the product is, as term → coefficient.

    X is Σ M_ij z_ai z_aj / r and Y is Σ M_ij z_ai z_ac z_bc z_bj / r²: each z has a row (of r) and a column (of k).
    """
    entries: list[tuple[str, str]] = []
    for n, letter in enumerate(product):
        inner = [("a", "i"), ("a", "j")] if letter == "X" else [("a", "i"), ("a", "c"), ("b", "c"), ("b", "j")]
        entries += [(row + str(n), column + str(n)) for row, column in inner]
    terms: Counter[Term] = Counter()
    for blocks in even_partitions(len(entries)):
        weight = math.prod(CUMULANTS[kind].get(len(block), 0) for block in blocks)
        if weight:
            rows = _joined([{entries[i][0] for i in block} for block in blocks])
            columns = _joined([{entries[i][1] for i in block} for block in blocks])
            free = sum(all(name[0] == "c" for name in group) for group in columns)
            terms[len(rows) - len(entries) // 2, free, _left(columns, len(product))] += weight
    return {term: count for term, count in terms.items() if count}


def _left(columns: Sequence[set[str]], matrices: int) -> str:
    """What the sum over the columns leaves of M_ij (and M_i'j'): indices that are one are equal."""
    if matrices == 1:
        return "1"
    tied = [{name for name in group if name[0] in "ij"} for group in columns]
    if {"i0", "j0", "i1", "j1"} in tied:
        return "coherence"
    return "1" if {"i0", "j0"} in tied else "participation"


def even_partitions(count: int) -> Iterator[list[list[int]]]:
    """All ways to part 0 … count − 1 into blocks of even size."""
    if count == 0:
        yield []
        return
    yield from _partitions(list(range(count)))


def _partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for mask in range(1, 1 << len(rest)):
        if mask.bit_count() % 2:
            block = [first, *(item for i, item in enumerate(rest) if mask >> i & 1)]
            for others in _partitions([item for i, item in enumerate(rest) if not mask >> i & 1]):
                yield [block, *others]


def _joined(groups: Sequence[set[str]]) -> list[set[str]]:
    """The groups with those that share a name made one."""
    joined: list[set[str]] = []
    for group in groups:
        touching = [other for other in joined if other & group]
        joined = [other for other in joined if not other & group] + [group.union(*touching)]
    return joined
