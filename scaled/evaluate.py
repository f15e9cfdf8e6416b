"""Accuracy on held-out problems, with intervals by bootstrap over the problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from scaled.answer import answer
from scaled.bootstrap import bootstrap_interval
from scaled.config import EvaluationConfig, RunConfig
from scaled.errors import UserError
from scaled.macro import macro_average
from scaled.ranks import ALONE, Ranks
from scaled.records import Problem, Response, Score
from scaled.rewards import Grader
from scaled.rollout import Rollout
from scaled.seeds import derive_seed

Answered = list[tuple[Response, Score]]


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
    require_problems(problems)
    rows, answered = [], {}
    for name, samples, temperature, top_p in ways(config.evaluation):
        started = perf_counter()
        responses, scores = answer(
            rollout,
            [problem for problem in problems for _ in range(samples)],
            grader,
            update=update,
            temperature=temperature,
            top_p=top_p,
            seed=derive_seed(config.seed, "evaluate"),
            advance=advance,
            ranks=ranks,
        )
        answered[name] = list(zip(responses, scores, strict=True))
        summary = summarise(responses, scores, samples, seed=derive_seed(config.seed, "bootstrap"))
        rows.append({"update": update, "eval": name, **summary, "seconds": perf_counter() - started})
    return rows, answered


def require_problems(problems: Sequence[Problem]) -> None:
    """Raises ``UserError`` if there are none."""
    if not problems:
        raise UserError("there are no held-out problems; set data.held_out above 0 or give data.held_out_file")


def ways(settings: EvaluationConfig) -> list[tuple[str, int, float, float]]:
    """How each problem is answered: by name, how often, at which temperature and which top-p."""
    greedy = [("greedy", 1, 0.0, 1.0)] if settings.greedy else []
    return [*greedy, ("sampled", settings.samples, settings.temperature, settings.top_p)]


class Answer(Protocol):
    """What is summed up of a response."""

    @property
    def problem(self) -> Problem: ...
    @property
    def length(self) -> int: ...
    @property
    def truncated(self) -> bool: ...


def summarise(responses: Sequence[Answer], scores: Sequence[Score], samples: int, *, seed: int) -> dict[str, Any]:
    """The figures of one evaluation, from ``samples`` responses in a row to each problem.

    pass@1 is the mean over responses, pass@k the share of problems with any right one. A response on which the grader
    failed is counted apart and leaves the means: it is no wrong answer. One without an answer to read is wrong, and
    the share of these is reported as well.
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
        "response_tokens": sum(response.length for response in responses) / len(responses),
        "unparseable": share(by_problem(lambda score: score.outcome == "unparseable"), graded),
        "grader_failed": int((1 - graded).sum()),
        **macro_average(
            [response.problem.source for response in responses[::samples]],
            by_problem(lambda score: score.credit or 0.0),
            graded,
            seed=seed,
        ),
    }
