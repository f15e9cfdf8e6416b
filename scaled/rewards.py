"""Rewards: exact match, or a function of the user's own in worker processes with a time limit.

Model output is text and stays text: nothing here evaluates or executes it. The module is imported in every worker,
so it imports neither torch nor the configuration.
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import operator
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, SupportsFloat

import regex
from pebble import ProcessExpired, ProcessFuture, ProcessPool

from scaled.errors import UserError
from scaled.records import Problem, Response, Score

if TYPE_CHECKING:
    from scaled.config import RunConfig

PATTERN_SECONDS = 1.0
WORKER_START_SECONDS = 120.0
WORKER_DOUBT_SECONDS = 15.0  # after which a start is looked into
WORKER_END_SECONDS = 3.0
SURVIVED = 77  # the exit code of a process that has imported the function; one that was ended has another
MAX_WORKERS = 4

RewardFunction = Callable[[Response, Problem], "SupportsFloat | Score"]


def exact_match(response: Response, problem: Problem, *, failure_reward: float) -> Score:
    """Reward 1 if the response stopped and its text is the answer, spaces around both aside."""
    if response.stop_reason == "stop" and response.text.strip() == problem.answer.strip():
        return Score(1.0, "right")
    return Score(failure_reward, "wrong")


class Grader:
    """Scores responses with the reward of the configuration; a context manager, as it may hold worker processes.

    A function of the user's own is called as ``score(response, problem)`` and returns a number (a bool counts as 1 or
    0) or a ``Score``. A number is the reward as it is, and a response counts as right if it is above 0. A function
    that raises, dies, takes longer than ``rewards.timeout`` or returns something else, NaN or infinity gives
    ``failed``; hung and dead workers are replaced.
    """

    def __init__(self, config: RunConfig) -> None:
        self._reward = config.reward
        self._failure_reward = config.rewards.failure_reward
        self._timeout = config.rewards.timeout
        self._folder = str(Path.cwd())
        self._pool: ProcessPool | None = None
        # Not `re`: it has no time limit, and a response can make a pattern take for ever.
        pattern = config.rewards.answer_pattern
        self._pattern = None if pattern is None else regex.compile(pattern)

    def __enter__(self) -> Grader:
        """Start the workers. Raises a ``UserError`` if the user's function cannot be imported."""
        if self._reward != "exact_match":
            module, _, name = self._reward.partition(":")
            if not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
                raise UserError(
                    f"reward={self._reward!r} is neither `exact_match` nor a path such as my_package.my_module:score"
                )
            self._start()
            try:
                self._check_import()
            except BaseException:
                self._stop()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def grade(self, responses: Sequence[Response]) -> list[Score]:
        """A score for each response, in order."""
        if self._reward == "exact_match":
            scores = [exact_match(r, r.problem, failure_reward=self._failure_reward) for r in responses]
        else:
            scores = self._grade_in_workers(responses)
        return [self._with_form(response, score) for response, score in zip(responses, scores, strict=True)]

    def require_any(self, responses: Sequence[Response], scores: Sequence[Score]) -> None:
        """Raises a ``UserError`` if the grader failed on every response of a batch."""
        if scores and all(score.outcome == "failed" for score in scores):
            raise UserError(
                f"reward={self._reward!r} failed on all {len(scores)} responses of a batch, first on that to "
                f"{responses[0].problem.id!r}: {scores[0].reason}; mend the function, or raise rewards.timeout "
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

    def _start(self) -> None:
        # Spawned, not forked: a fork copies the locks of torch's threads without the threads that would release them.
        self._pool = ProcessPool(
            max_workers=min(MAX_WORKERS, os.cpu_count() or 1),
            initializer=_load,
            initargs=(self._reward, self._folder),
            context=multiprocessing.get_context("spawn"),
        )

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.close()
            try:  # a worker that is only starting would complain, on the screen, that its parent is gone
                self._pool.join(timeout=WORKER_END_SECONDS)
            except TimeoutError:
                self._pool.stop()
                self._pool.join()
            self._pool = None

    def _check_import(self) -> None:
        future = self._pool.schedule(_load_problem)
        wait([future], timeout=WORKER_DOUBT_SECONDS)
        code = SURVIVED if future.done() else self._exit_code_of_an_import()
        if code == SURVIVED:
            wait([future], timeout=WORKER_START_SECONDS)
        if code not in (SURVIVED, None):
            reason = f"importing it ends its process (exit code {code})"
        elif not future.done():
            reason = f"importing it takes longer than {WORKER_START_SECONDS:g} s"
        elif (error := future.exception()) is not None:
            reason = f"importing it ended the worker process ({error})"
        else:
            reason = future.result()
        if reason:
            raise UserError(
                f"reward={self._reward!r}: {reason}; it is looked for in {self._folder} and in the environment, as "
                f"`module:function`"
            )

    def _exit_code_of_an_import(self) -> int | None:
        """The pool replaces a worker that dies while it starts, without a word: a process apart shows it.

        ``SURVIVED`` if it does not die, None if it takes too long.
        """
        process = multiprocessing.get_context("spawn").Process(target=_load_alone, args=(self._reward, self._folder))
        process.start()
        process.join(WORKER_START_SECONDS)
        code = process.exitcode
        process.kill()
        process.join()
        return code

    def _grade_in_workers(self, responses: Sequence[Response]) -> list[Score]:
        scores: list[Score | None] = [None] * len(responses)
        for _attempt in range(2):
            todo = [index for index, score in enumerate(scores) if score is None]
            try:
                futures = [self._pool.schedule(_run, args=(responses[i],), timeout=self._timeout) for i in todo]
            except RuntimeError:  # the pool broke since the last batch, e.g. an idle worker was killed for its memory
                futures = []
            for index, future in zip(todo, futures, strict=False):
                scores[index] = self._outcome(future)
                if scores[index] is None:
                    break
            if None not in scores:
                break
            self._stop()
            self._start()
        return [score or _failure("the worker processes broke down twice") for score in scores]

    def _outcome(self, future: ProcessFuture) -> Score | None:
        """Wait for a score; None if the pool itself is lost and has to be started anew."""
        # Tasks start in order, so the one waited for is running, or waits at most for a worker to be replaced.
        wait([future], timeout=self._timeout + WORKER_START_SECONDS)
        if not future.done():
            return None
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, TimeoutError):
            return _failure(f"took longer than rewards.timeout={self._timeout:g} s")
        if isinstance(error, ProcessExpired):
            return _failure(f"ended its process (exit code {error.exitcode})")
        return None


def _failure(reason: str) -> Score:
    return Score(None, "failed", reason=reason)


def _described(error: BaseException) -> str:
    """The error in a line, with the place where it was raised."""
    text = "".join(traceback.format_exception_only(error)).strip()[:500]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text


# Below: what runs in a worker.

_function: RewardFunction | None = None
_problem_with_import = ""


def _load(reward: str, folder: str) -> None:
    """Import the user's function; a failure is kept as text, since an initializer that raises only kills its worker."""
    global _function, _problem_with_import
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores
    os.chdir(folder)
    sys.path.insert(0, folder)
    module, _, name = reward.partition(":")
    try:
        found = operator.attrgetter(name)(importlib.import_module(module))
    except BaseException as error:  # also SystemExit, of a script without a main guard
        _problem_with_import = _described(error)
        return
    if callable(found):
        _function = found
    else:
        _problem_with_import = f"`{name}` is not a function but {type(found).__name__}"


def _load_alone(reward: str, folder: str) -> None:
    _load(reward, folder)
    os._exit(SURVIVED)


def _load_problem() -> str:
    return _problem_with_import


def _run(response: Response) -> Score:
    # Errors go back as text: an exception of the user's own class may not survive pickling.
    try:
        return _verdict(_function(response, response.problem))
    except BaseException as error:
        return _failure(_described(error))


def _verdict(value: object) -> Score:
    if isinstance(value, Score):
        score = value
    elif isinstance(value, SupportsFloat):
        reward = float(value)
        score = Score(reward, "right" if reward > 0 else "wrong")
    else:
        return _failure(f"returned {type(value).__name__}, not a number or a Score")
    if score.outcome == "failed":
        return _failure(str(score.reason) or "returned the outcome `failed`")
    if score.outcome not in ("right", "wrong"):
        return _failure(f"returned the outcome {score.outcome!r}; use right, wrong or failed")
    if score.reward is None or not math.isfinite(score.reward):
        return _failure(f"returned the reward {score.reward}")
    formed = score.well_formed
    # A truth of numpy's is no bool. Any other value, a text for one, would be true whatever it says.
    if not (formed is None or isinstance(formed, bool) or str(getattr(formed, "dtype", "")) == "bool"):
        return _failure(f"returned well_formed={formed!r:.60}; use True, False or None")
    return Score(float(score.reward), score.outcome, None if formed is None else bool(formed), str(score.reason))
