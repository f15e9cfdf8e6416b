"""Tasks whose problems are generated."""

from __future__ import annotations

from collections.abc import Hashable

from scaled.records import Problem

TERMS = range(20)


def arithmetic() -> list[Problem]:
    """All ``x + y`` and ``x - y`` with both terms below 20 and y ≤ x for minus: 610 problems.

    The assistant's turn is begun with the problem itself, so that only a number is left to say.
    """
    sums = [(x, "+", y, x + y) for x in TERMS for y in TERMS]
    differences = [(x, "-", y, x - y) for x in TERMS for y in TERMS if y <= x]
    return [
        Problem(
            id=f"arithmetic/{x}{sign}{y}",
            messages=(
                {"role": "user", "content": f"What is {x} {sign} {y}?"},
                {"role": "assistant", "content": f"{x} {sign} {y} ="},
            ),
            answer=str(result),
            source="arithmetic",
        )
        for x, sign, y, result in sums + differences
    ]


def arithmetic_group(problem: Problem) -> Hashable:
    """Equal for ``7 + 5`` and ``5 + 7``, different for all else: who knows one of them knows the other."""
    return frozenset(problem.id.removeprefix("arithmetic/").split("+"))
