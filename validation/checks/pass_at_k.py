"""C21: pass@1 over 4 × 500 responses, pass@4, and unparseable answers as wrong, on texts whose kinds are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

from scaled.evaluate import summarise
from scaled.graders import math
from scaled.records import Problem, Response, Score
from validation.claim import Comparison, Measurement, Setting, claim

PROBLEMS, SAMPLES = 500, 4
TEXTS: dict[str, Callable[[int], str]] = {
    "right": lambda gold: f"Counting gives \\boxed{{{gold}}}.",
    "wrong": lambda gold: f"At first {gold}, but no.\nAnswer: {gold + 1}",
    "unparseable": lambda gold: f"It may well be {gold}, or not",
}
ROUNDING = "one division of whole numbers in fp64"
ORACLE = "whole numbers counted from the kinds that were drawn, as exact fractions"


def drawn(seed: int) -> list[list[str]]:
    """The kind of each response, a list a problem; problems differ in how hard they are."""
    source = random.Random(seed)
    rows = []
    for _ in range(PROBLEMS):
        right = source.random() ** 2
        rows.append(source.choices(list(TEXTS), [right, (1 - right) * 0.7, (1 - right) * 0.3], k=SAMPLES))
    return rows


@claim("C21", "Pass@1 is the mean over 4 × 500 responses; Pass@4 any of four; unparseable is wrong", "C.1")
def pass_at_k(setting: Setting) -> Measurement:
    """Texts of known kinds through the mathematical grader and ``summarise``, beside counts of the kinds."""
    math.prepare()
    kinds = drawn(setting.derived_seed("C21 kinds"))
    responses, scores = [], []
    for gold, row in enumerate(kinds):
        problem = Problem(str(gold), (), str(gold), verifier="math")
        for kind in row:
            responses.append(Response(problem, (1,), (2,), (-1.0,), TEXTS[kind](gold), "stop"))
            verdict = math.grade(problem.answer, responses[-1].text, False, {})
            scores.append(Score(float(verdict.outcome == "right"), verdict.outcome))
    row = summarise(responses, scores, SAMPLES, seed=setting.seed)

    counts = {kind: sum(row.count(kind) for row in kinds) for kind in TEXTS}
    responses_in_all = PROBLEMS * SAMPLES
    solved = sum("right" in row for row in kinds)
    first = sum(row[0] == "right" for row in kinds)
    comparisons = [
        Comparison(
            f"pass@1 of {SAMPLES} × {PROBLEMS} responses",
            expected=float(Fraction(counts["right"], responses_in_all)),
            measured=row["pass_at_1"],
            tolerance=1e-15,
            reason=ROUNDING,
            oracle=ORACLE,
            control="unparseable responses left out of the mean",
            control_measured=float(Fraction(counts["right"], responses_in_all - counts["unparseable"])),
        ),
        Comparison(
            "pass@4: problems with any right response of four",
            expected=float(Fraction(solved, PROBLEMS)),
            measured=row["pass_at_k"],
            tolerance=1e-15,
            reason=ROUNDING,
            oracle=ORACLE,
            control="the first response alone",
            control_measured=float(Fraction(first, PROBLEMS)),
        ),
        Comparison(
            "share of the unparseable, reported apart",
            expected=float(Fraction(counts["unparseable"], responses_in_all)),
            measured=row["unparseable"],
            tolerance=1e-15,
            reason=ROUNDING,
            oracle=ORACLE,
            control="wrong answers counted among them",
            control_measured=float(Fraction(responses_in_all - counts["right"], responses_in_all)),
        ),
        Comparison(
            "responses that count neither as right nor as wrong",
            expected=0,
            measured=row["grader_failed"],
            tolerance=0,
            reason="a count",
            oracle="none was made to fail the grader",
            control="unparseable answers taken for failures of the grader",
            control_measured=counts["unparseable"],
        ),
    ]
    note = (
        f"Drawn: {counts['right']} right, {counts['wrong']} wrong, {counts['unparseable']} without an answer to read."
    )
    return Measurement(comparisons, note)
