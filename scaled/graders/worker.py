"""What runs in a worker process: it loads its graders once, then grades one response after another."""

from __future__ import annotations

import importlib
import math
import operator
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, SupportsFloat

from scaled.graders import contain
from scaled.graders.verdict import Verdict, failed
from scaled.records import Response, Score

SURVIVED = 77  # the exit code of a process that has imported the function; one that was ended has another
VERIFIERS = {"math": "scaled.graders.math", "reasoning-gym": "scaled.graders.reasoning_gym"}

_function: Callable[..., Any] | None = None
_problem_with_import = ""
_graders: dict[str, Callable[..., Verdict]] = {}
_memory = math.inf


def load_function(reward: str, folder: str, memory: float) -> None:
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
    _limit(memory)


def load_verifiers(names: tuple[str, ...], memory: float) -> None:
    """Import the graders of some verifiers, then close the doors that no grader needs."""
    global _problem_with_import
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        for name in names:
            module = importlib.import_module(VERIFIERS[name])
            module.prepare()
            _graders[name] = module.grade
        contain.refuse_code()
        contain.refuse_effects()
    except BaseException as error:
        _problem_with_import = _described(error)
        return
    _limit(memory)


def load_alone(load: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Load in a process of its own, which tells by its exit code that it lived through it."""
    load(*arguments)
    os._exit(SURVIVED)


def load_problem() -> str:
    """What went wrong when this worker loaded; empty if nothing did."""
    return _problem_with_import


def run_function(response: Response) -> Score:
    """The user's function on one response; whatever it does but kill the process comes back as a ``Score``."""
    # Errors go back as text: an exception of the user's own class may not survive pickling.
    try:
        return score_of(_function(response, response.problem))
    except MemoryError:
        return failure(_too_much_memory())
    except BaseException as error:
        return failure(_described(error))


def run_verifier(name: str, gold: str, text: str, cut: bool, metadata: dict[str, Any]) -> Verdict:
    """A verifier's verdict on one response; an error is a verdict of ``failed``."""
    try:
        return _graders[name](gold, text, cut, metadata)
    except MemoryError:
        return failed(_too_much_memory())
    except BaseException as error:
        return failed(_described(error))


def failure(reason: str) -> Score:
    """The score of a response on which the grader failed."""
    return Score(None, "failed", reason=reason)


def _limit(memory: float) -> None:
    global _memory
    _memory = memory
    contain.limit_memory(memory)


def _too_much_memory() -> str:
    return f"needed more memory than rewards.memory={_memory:g} GiB"


def _described(error: BaseException) -> str:
    """The error in a line, with the place where it was raised."""
    text = "".join(traceback.format_exception_only(error)).strip()[:500]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text


def score_of(value: object) -> Score:
    """The score that a user's function means by what it returned, or a failure that says what it should return."""
    if isinstance(value, Score):
        score = value
    elif isinstance(value, SupportsFloat):
        reward = float(value)
        score = Score(reward, "right" if reward > 0 else "wrong")
    else:
        return failure(f"returned {type(value).__name__}, not a number or a Score")
    if score.outcome == "failed":
        return failure(str(score.reason) or "returned the outcome `failed`")
    if score.outcome not in ("right", "wrong", "unparseable"):
        return failure(f"returned the outcome {score.outcome!r}; use right, wrong, unparseable or failed")
    if score.reward is None or not math.isfinite(score.reward):
        return failure(f"returned the reward {score.reward}")
    formed = score.well_formed
    # A truth of numpy's is no bool. Any other value, a text for one, would be true whatever it says.
    if not (formed is None or isinstance(formed, bool) or str(getattr(formed, "dtype", "")) == "bool"):
        return failure(f"returned well_formed={formed!r:.60}; use True, False or None")
    if not (isinstance(score.credit, SupportsFloat) and 0 <= float(score.credit) <= 1):
        return failure(f"returned credit={score.credit!r:.60}; use a number from 0 to 1")
    formed = None if formed is None else bool(formed)
    return Score(float(score.reward), score.outcome, formed, str(score.reason), float(score.credit))
