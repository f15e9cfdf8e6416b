"""Responses to problems, graded: what training and evaluation ask for alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scaled.ranks import ALONE, Ranks
from scaled.records import Problem, Response, Score
from scaled.rewards import Grader
from scaled.rollout import Rollout


def answer(
    rollout: Rollout,
    asked: Sequence[Problem],
    grader: Grader,
    *,
    update: int,
    temperature: float,
    top_p: float = 1.0,
    seed: int,
    advance: Callable[[int], None],
    ranks: Ranks = ALONE,
) -> tuple[list[Response], list[Score]]:
    """A response and a score for each problem, in order, by the weights after ``update``.

    Each rank works on its share, and all get everything.
    """
    rollout.follow(update)
    numbers = rollout.share(len(asked))
    with ranks.together():
        responses = rollout.respond(
            [asked[number] for number in numbers],
            numbers,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            advance=advance,
        )
        scores = grader.grade(responses)
    found = {}
    for part in ranks.gather(list(zip(numbers, responses, scores, strict=True))):
        found |= {number: (response, score) for number, response, score in part}
    responses, scores = map(list, zip(*(found[number] for number in range(len(asked))), strict=True))
    grader.require_any(responses, scores)
    return responses, scores
