"""Accuracy on held-out problems, with intervals by bootstrap over the problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from scaled.answer import answer
from scaled.config import RunConfig
from scaled.errors import UserError
from scaled.ranks import ALONE, Ranks
from scaled.records import Problem, Response, Score
from scaled.rewards import Grader
from scaled.rollout import Rollout
from scaled.seeds import derive_seed

RESAMPLES = 10_000
AT_ONCE = 4_000_000  # problems drawn at once: 64 MB
LEVEL = 0.95

Answered = list[tuple[Response, Score]]


def bootstrap_interval(
    numerators: Sequence[float], denominators: Sequence[float], *, seed: int
) -> tuple[float, float] | None:
    """The 95 % percentile interval of Σ numerators / Σ denominators, one pair a problem, problems resampled.

    Responses to one problem are not independent, so whole problems are drawn. None where no denominator is above 0;
    a sample without variation gives its own value twice.
    """
    above, below = np.asarray(numerators, float), np.asarray(denominators, float)
    if below.sum() == 0:
        return None
    generator = np.random.default_rng(seed)
    sums = []
    for block in np.array_split(np.arange(RESAMPLES), -(-RESAMPLES * len(below) // AT_ONCE)):
        drawn = generator.integers(len(below), size=(len(block), len(below)))
        sums.append([above[drawn].sum(axis=1), below[drawn].sum(axis=1)])
    above, below = np.concatenate(sums, axis=1)
    low, high = np.quantile(above[below > 0] / below[below > 0], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def evaluate(
    rollout: Rollout,
    problems: Sequence[Problem],
    config: RunConfig,
    *,
    update: int,
    grader: Grader,
    advance: Callable[[int], None],
    ranks: Ranks = ALONE,
) -> tuple[list[dict[str, Any]], dict[str, Answered]]:
    """Rows of the log, and the responses with their scores, for ``greedy`` (if it is wanted) and ``sampled``.

    The random numbers are the same at every update, so that before and after are compared on the same draws.
    Raises ``UserError`` if there are no problems.
    """
    if not problems:
        raise UserError("there are no held-out problems; set data.held_out above 0 or give data.held_out_file")
    settings = config.evaluation
    rows, answered = [], {}
    for name, samples, temperature in (("greedy", 1, 0.0), ("sampled", settings.samples, settings.temperature)):
        if name == "greedy" and not settings.greedy:
            continue
        started = perf_counter()
        responses, scores = answer(
            rollout,
            [problem for problem in problems for _ in range(samples)],
            grader,
            update=update,
            temperature=temperature,
            seed=derive_seed(config.seed, "evaluate"),
            advance=advance,
            ranks=ranks,
        )
        answered[name] = list(zip(responses, scores, strict=True))
        summary = summarise(responses, scores, samples, seed=derive_seed(config.seed, "bootstrap"))
        rows.append({"update": update, "eval": name, **summary, "seconds": perf_counter() - started})
    return rows, answered


def summarise(responses: Sequence[Response], scores: Sequence[Score], samples: int, *, seed: int) -> dict[str, Any]:
    """The figures of one evaluation, from ``samples`` responses in a row to each problem.

    pass@1 is the mean over responses, pass@k the share of problems with any right one. A response on which the grader
    failed is counted apart and leaves the means: it is no wrong answer.
    """

    def by_problem(of: Callable[[Score], float]) -> np.ndarray:
        return np.array([of(score) for score in scores], float).reshape(-1, samples)

    right = by_problem(lambda score: score.outcome == "right")
    graded = by_problem(lambda score: score.outcome != "failed")
    judged = graded * by_problem(lambda score: score.well_formed is not None)
    formed = graded * by_problem(lambda score: bool(score.well_formed))
    both = formed * right
    any_right, any_graded = right.max(axis=1), graded.max(axis=1)

    def share(above: np.ndarray, below: np.ndarray) -> float | None:
        return float(above.sum() / below.sum()) if below.sum() else None

    def interval(above: np.ndarray, below: np.ndarray) -> tuple[float, float] | None:
        return bootstrap_interval(above.reshape(len(above), -1).sum(1), below.reshape(len(below), -1).sum(1), seed=seed)

    return {
        "problems": len(right),
        "samples": samples,
        "pass_at_1": share(right, graded),
        "interval": interval(right, graded),
        "pass_at_k": share(any_right, any_graded),
        "interval_k": interval(any_right, any_graded),
        "well_formed": share(formed, judged),
        "well_formed_interval": interval(formed, judged),
        "accuracy_of_well_formed": share(both, formed),
        "accuracy_of_well_formed_interval": interval(both, formed),
        "truncated": sum(response.truncated for response in responses) / len(responses),
        "response_tokens": sum(len(response.token_ids) for response in responses) / len(responses),
        "grader_failed": int((1 - graded).sum()),
    }
