"""The derivation of Eq. 5 and 6 by sympy, for small vocabularies, and exact numbers from it.

Logits are z_v = T log w_v with positive symbols w_v, so p_v = w_v / Σ w and derivatives at 0 are rational functions,
which sympy reduces to 0 or not. Along the update they move as z_v + α ż_v + α² z̈_v/2, bend included.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

SIZES = (2, 3, 4)
"""Vocabularies for which the algebra is done."""
ALPHA, TEMPERATURE = sympy.symbols("alpha T", positive=True)


@dataclass(frozen=True)
class Vocabulary:
    """Symbols of one context: ``weights`` w_v = exp(z_v/T), ``rates`` ż_v and ``bends`` z̈_v of the logits."""

    weights: tuple[sympy.Symbol, ...]
    rates: tuple[sympy.Symbol, ...]
    bends: tuple[sympy.Symbol, ...]

    @classmethod
    def of(cls, size: int) -> Vocabulary:
        positive = sympy.symbols(f"w1:{size + 1}", positive=True)
        return cls(positive, sympy.symbols(f"r1:{size + 1}", real=True), sympy.symbols(f"b1:{size + 1}", real=True))

    @property
    def p(self) -> list[sympy.Expr]:
        """Probabilities before the update."""
        return [w / sum(self.weights) for w in self.weights]

    def log_p(self) -> list[sympy.Expr]:
        """log p_v(α) after the update: log softmax of (z + α ż + α² z̈/2) / T."""
        moved = [
            TEMPERATURE * sympy.log(w) + ALPHA * r + ALPHA**2 * b / 2
            for w, r, b in zip(self.weights, self.rates, self.bends, strict=True)
        ]
        scores = [sympy.expand(z / TEMPERATURE) for z in moved]
        return [score - sympy.log(sum(map(sympy.exp, scores))) for score in scores]

    def kl(self) -> sympy.Expr:
        """K(α) = Σ_v p_v (log p_v − log p_v(α))."""
        return sum(p * (new.subs(ALPHA, 0) - new) for p, new in zip(self.p, self.log_p(), strict=True))

    def mean(self, values: list[sympy.Expr] | tuple[sympy.Symbol, ...]) -> sympy.Expr:
        """E_p."""
        return sum(p * value for p, value in zip(self.p, values, strict=True))

    def variance(self, values: list[sympy.Expr] | tuple[sympy.Symbol, ...]) -> sympy.Expr:
        """Var_p."""
        return self.mean([(value - self.mean(values)) ** 2 for value in values])


def derivative(expression: sympy.Expr, order: int) -> sympy.Expr:
    """The derivative in α at 0."""
    return sympy.diff(expression, ALPHA, order).subs(ALPHA, 0)


def vanishes(expression: sympy.Expr) -> bool:
    """Whether a rational function is identically 0."""
    return sympy.cancel(sympy.together(expression)) == 0


def expansion_identities(size: int, *, power: int = 2) -> list[bool]:
    """Whether K(0) = 0, K'(0) = 0 and K''(0) = Var_p[ż] / T^power hold identically; the paper's power is 2."""
    v = Vocabulary.of(size)
    kl = v.kl()
    curvature = v.variance(v.rates) / TEMPERATURE**power
    return [vanishes(derivative(kl, order) - value) for order, value in enumerate((0, 0, curvature))]


def score_identities(size: int, *, centred: bool = True) -> list[bool]:
    """The steps of A.1 from score rates to Eq. 6, each true or not.

    (1) d log p_v/dα = (ż_v − E_p ż)/T for every v; (2) K''(0) = Σ p_v (d log p_v/dα)²; (3) that sum is the variance of
    ż over T²; (4) a constant added to every ż changes nothing. A wrong formula leaves E_p ż out (``centred``).
    """
    v = Vocabulary.of(size)
    rates = [derivative(entry, 1) for entry in v.log_p()]
    mean = v.mean(v.rates) if centred else 0
    constant = sympy.Symbol("c", real=True)
    shifted = [rate + constant for rate in v.rates]

    def spread(values: list[sympy.Expr] | tuple[sympy.Symbol, ...]) -> sympy.Expr:
        return v.variance(values) if centred else v.mean([value**2 for value in values])

    squares = v.mean([rate**2 for rate in rates])
    return [
        all(vanishes(rate - (r - mean) / TEMPERATURE) for rate, r in zip(rates, v.rates, strict=True)),
        vanishes(derivative(v.kl(), 2) - squares),
        vanishes(squares - spread(v.rates) / TEMPERATURE**2),
        vanishes(spread(shifted) - spread(v.rates)),
    ]


def exact_numbers(
    logits: list[sympy.Rational], rates: list[sympy.Rational], temperature: sympy.Rational
) -> tuple[sympy.Float, sympy.Float]:
    """K''(0)/2 and K(1) for logits that move linearly, to 40 digits, by sympy's derivative and from the definition."""
    v = Vocabulary.of(len(logits))
    kl = v.kl()
    values = {TEMPERATURE: temperature} | dict(zip(v.rates, rates, strict=True)) | dict.fromkeys(v.bends, 0)
    values |= {w: sympy.exp(z / temperature) for w, z in zip(v.weights, logits, strict=True)}
    return (derivative(kl, 2) / 2).subs(values).evalf(40), kl.subs(ALPHA, 1).subs(values).evalf(40)
