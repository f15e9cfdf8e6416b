"""Responses to problems, graded: what training and evaluation ask for alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from scaled.config import RunConfig
from scaled.model import computing
from scaled.ranks import ALONE, Ranks
from scaled.records import Problem, Response, Score
from scaled.rewards import Grader
from scaled.rollout import generate


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Problem],
    config: RunConfig,
    grader: Grader,
    *,
    temperature: float,
    seed: int,
    advance: Callable[[int], None],
    ranks: Ranks = ALONE,
) -> tuple[list[Response], list[Score]]:
    """A response and a score for each problem, in order. Each rank works on its share, and all get everything."""
    with ranks.together(), computing(model, config.model):
        responses = generate(
            model,
            tokenizer,
            ranks.share(asked),
            numbers=ranks.share(range(len(asked))),
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=temperature,
            seed=seed,
            stop=config.rollout.stop,
            batch=config.rollout.batch,
            advance=advance,
        )
        scores = grader.grade(responses)
    responses, scores = ranks.joined(responses), ranks.joined(scores)
    grader.require_any(responses, scores)
    return responses, scores
