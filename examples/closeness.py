"""A reward of one's own: the nearer the first number of the response is to the answer, the more.

Problems are in `examples/how_many.jsonl`; any others whose answers are numbers, such as the arithmetic task, work too:

    logra train CONFIG data.task=null data.file=examples/how_many.jsonl data.held_out=4 reward=examples.closeness:score
"""

from __future__ import annotations

import re

from scaled.records import Problem, Response, Score

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def score(response: Response, problem: Problem) -> Score:
    """1 for the answer itself, 1/2 if off by as much as the answer is (at least by 1), 0 without a number.

    It returns a ``Score`` and not the bare number, so that only the answer itself counts as right in the accuracy.
    """
    number = NUMBER.search(response.text.replace(",", ""))
    if number is None or response.truncated:
        return Score(0.0, "wrong", well_formed=False)
    answer = float(problem.answer)
    error = abs(float(number[0]) - answer) / max(1.0, abs(answer))
    return Score(1 / (1 + error), "right" if error == 0 else "wrong", well_formed=True)
