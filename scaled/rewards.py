"""Rewards: exact match, each row's own verifier, or a function of the user's own.

Model output is text and stays text: nothing here evaluates or executes it. All but exact match runs in worker
processes with limits on time and memory. The workers import neither torch nor the configuration.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, SupportsFloat

import regex

from scaled.errors import UserError
from scaled.graders import reasoning_gym
from scaled.graders.pool import WorkerPool
from scaled.graders.verdict import Verdict, failed
from scaled.graders.worker import VERIFIERS, failure, load_function, load_verifiers, run_function, run_verifier
from scaled.records import Problem, Response, Score

if TYPE_CHECKING:
    from scaled.config import RunConfig

PATTERN_SECONDS = 1.0
REMEMBERED = 65_536  # verdicts, some 200 bytes each
EXACT, VERIFIER = "exact_match", "verifier"

RewardFunction = Callable[[Response, Problem], "SupportsFloat | Score"]


def exact_match(response: Response, problem: Problem, *, failure_reward: float) -> Score:
    """Reward 1 if the response stopped and its text is the answer, spaces around both aside."""
    if response.stop_reason == "stop" and response.text.strip() == problem.answer.strip():
        return Score(1.0, "right")
    return Score(failure_reward, "wrong")


class Grader:
    """Scores responses with the reward of the configuration; a context manager, as it may hold worker processes.

    ``reward: verifier`` asks each row's own ``verifier``: ``exact`` (as ``exact_match``), ``math`` (math-verify on the
    final answer) or ``reasoning-gym`` (the task's own scorer). The reward is the verifier's score in [0, 1], or the
    failure reward where that is 0, so a partly right answer to a reasoning-gym task is paid for its part; only a score
    of 1 counts as right. Verdicts but failures are remembered by content, since the same answers come again.

    A function of the user's own is called as ``score(response, problem)`` and returns a number (a bool counts as 1 or
    0) or a ``Score``. A number is the reward as it is, and a response counts as right if it is above 0. A function
    that raises, dies, takes longer than ``rewards.timeout``, needs more than ``rewards.memory`` or returns something
    else, NaN or infinity gives ``failed``; hung and dead workers are replaced.
    """

    def __init__(self, config: RunConfig) -> None:
        self._reward = config.reward
        self._failure_reward = config.rewards.failure_reward
        self._timeout = config.rewards.timeout
        self._memory = config.rewards.memory
        self._folder = str(Path.cwd())
        self._pool: WorkerPool | None = None
        self._loaded: frozenset[str] = frozenset()
        self._verdicts: dict[bytes, Verdict] = {}
        # Not `re`: it has no time limit, and a response can make a pattern take for ever.
        pattern = config.rewards.answer_pattern
        self._pattern = None if pattern is None else regex.compile(pattern)

    def __enter__(self) -> Grader:
        """Start the workers of a function. Raises a ``UserError`` if it cannot be imported."""
        if self._reward not in (EXACT, VERIFIER):
            module, _, name = self._reward.partition(":")
            if not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
                raise UserError(
                    f"reward={self._reward!r} is neither `exact_match` nor a path such as my_package.my_module:score, "
                    f"nor `verifier`"
                )
            self._start(WorkerPool(load_function, (self._reward, self._folder, self._memory), self._timeout))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def replaced(self) -> int:
        """Workers replaced so far because they hung or died."""
        return self._pool.replaced if self._pool else 0

    def prepare(self, problems: Sequence[Problem]) -> None:
        """Check every row's verifier and start the workers that they need, before anything is sampled.

        Raises a ``UserError`` that names the first row whose verifier is none, or is not installed. Rewards other
        than ``verifier`` need nothing.
        """
        if self._reward != VERIFIER:
            return
        for problem in problems:
            if reason := _fault(problem):
                raise UserError(f"reward='verifier': row {problem.id!r}: {reason}")
        self._load(frozenset(problem.verifier for problem in problems) & VERIFIERS.keys())

    def grade(self, responses: Sequence[Response]) -> list[Score]:
        """A score for each response, in order."""
        if self._reward == EXACT:
            scores = [exact_match(r, r.problem, failure_reward=self._failure_reward) for r in responses]
        elif self._reward == VERIFIER:
            self.prepare([response.problem for response in responses])
            scores = self._verify(responses)
        else:
            scores = self._pool.map(run_function, [(response,) for response in responses], failure)
        return [self._with_form(response, score) for response, score in zip(responses, scores, strict=True)]

    def require_any(self, responses: Sequence[Response], scores: Sequence[Score]) -> None:
        """Raises a ``UserError`` if the grader failed on every response of a batch."""
        if scores and all(score.outcome == "failed" for score in scores):
            remedy = "look at the gold answers" if self._reward == VERIFIER else "mend the function"
            raise UserError(
                f"reward={self._reward!r} failed on all {len(scores)} responses of a batch, first on that to "
                f"{responses[0].problem.id!r}: {scores[0].reason}; {remedy}, or raise rewards.timeout "
                f"({self._timeout:g} s) if it is slow"
            )

    def _with_form(self, response: Response, score: Score) -> Score:
        """Add whether the pattern matches, unless the user's function has said so."""
        if self._pattern is None or score.well_formed is not None:
            return score
        if response.stop_reason != "stop":
            return replace(score, well_formed=False)
        try:
            matched = self._pattern.fullmatch(response.text.strip(), timeout=PATTERN_SECONDS) is not None
        except TimeoutError:
            late = f"answer_pattern took longer than {PATTERN_SECONDS:g} s"
            return replace(score, reason="; ".join(filter(None, [score.reason, late])))
        return replace(score, well_formed=matched)

    def _verify(self, responses: Sequence[Response]) -> list[Score]:
        """Each response by its row's verifier; what is known is not asked again, nor is the same thing twice."""
        keys = [_key(response) for response in responses]
        new = {
            key: response
            for key, response in zip(keys, responses, strict=True)
            if key not in self._verdicts and response.problem.verifier != "exact"
        }
        tasks = [(r.problem.verifier, r.problem.answer, r.text, r.truncated, r.problem.metadata) for r in new.values()]
        found = dict(zip(new, self._pool.map(run_verifier, tasks, failed) if tasks else [], strict=True))
        known = self._verdicts | found
        scores = [
            exact_match(response, response.problem, failure_reward=self._failure_reward)
            if response.problem.verifier == "exact"
            else self._score(known[key])
            for key, response in zip(keys, responses, strict=True)
        ]
        # A failure may be the machine's, e.g. of its load; it is tried again.
        self._verdicts |= {key: verdict for key, verdict in found.items() if verdict.outcome != "failed"}
        for key in list(self._verdicts)[: max(0, len(self._verdicts) - REMEMBERED)]:
            del self._verdicts[key]
        return scores

    def _score(self, verdict: Verdict) -> Score:
        if verdict.credit is None:
            return failure(verdict.reason)
        reward = verdict.credit if verdict.credit > 0 else self._failure_reward
        return Score(reward, verdict.outcome, None, verdict.reason, verdict.credit)

    def _load(self, names: frozenset[str]) -> None:
        if names <= self._loaded:
            return
        names |= self._loaded
        self._stop()
        self._start(WorkerPool(load_verifiers, (tuple(sorted(names)), self._memory), self._timeout))
        self._loaded = names

    def _start(self, pool: WorkerPool) -> None:
        self._pool = pool
        pool.start()
        try:
            reason = pool.why_not_loaded()
        except BaseException:
            self._stop()
            raise
        if reason:
            self._stop()
            where = (
                ""
                if self._reward == VERIFIER
                else (f"; it is looked for in {self._folder} and in the environment, as `module:function`")
            )
            raise UserError(f"reward={self._reward!r}: {reason}{where}")

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            self._pool = None
        self._loaded = frozenset()


def _fault(problem: Problem) -> str | None:
    """What keeps a row from being graded by its verifier, and the remedy."""
    if problem.verifier not in ("exact", *VERIFIERS):
        known = ", ".join(["exact", *VERIFIERS])
        return f"its `verifier` is {problem.verifier!r:.60}; give each row one of {known}, or set another `reward`"
    if problem.verifier != "reasoning-gym":
        return None
    if find_spec("reasoning_gym") is None:
        return "its `verifier` needs the package reasoning-gym, which is not installed; install it by `make data`"
    return reasoning_gym.fault(problem.metadata)


def _key(response: Response) -> bytes:
    """A digest of all that a verdict depends on."""
    problem = response.problem
    parts = [problem.verifier, problem.answer, response.text, response.stop_reason, problem.metadata]
    text = json.dumps(parts, sort_keys=True, default=str)  # escapes lone surrogates, which no encoding takes
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
