from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scaled.config import RunConfig
from scaled.data import load_problems
from scaled.errors import UserError
from scaled.records import Problem, Response, Score
from scaled.rewards import Grader, exact_match

ROOT = Path(__file__).parents[2]


def config(**more: Any) -> RunConfig:
    return RunConfig(run="runs/test", updates=1, model={"path": "none"}, data={"task": "arithmetic"}, **more)


def response(text: str, answer: str = "12", stop_reason: str = "stop") -> Response:
    problem = Problem("arithmetic/7+5", ({"role": "user", "content": "What is 7 + 5?"},), answer)
    return Response(problem, (1, 2), (3,), (-0.5,), text, stop_reason)


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> str:
    """Write a reward function where a user would have it, in the current folder; returns its path for `reward`."""
    (folder / "my_reward.py").write_text("import math, os, re, signal, sys, time\n" + source, encoding="utf-8")
    monkeypatch.chdir(folder)
    return "my_reward:score"


# Exact match


@pytest.mark.parametrize(
    ("text", "stop_reason", "right"),
    [
        ("12", "stop", True),
        (" 12\n", "stop", True),
        ("\u00a012", "stop", True),
        ("12", "length", False),  # the right text, but cut: what would have followed is not known
        ("12.", "stop", False),
        ("012", "stop", False),
        ("1 2", "stop", False),
        ("112", "stop", False),
        ("", "stop", False),
    ],
)
def test_exact_match_wants_the_whole_answer_and_the_stop(text: str, stop_reason: str, right: bool):
    given = response(text, answer=" 12 ", stop_reason=stop_reason)
    expected = Score(1.0, "right") if right else Score(-0.25, "wrong")
    assert exact_match(given, given.problem, failure_reward=-0.25) == expected


def test_the_grader_takes_the_failure_reward_of_the_configuration_and_keeps_the_order():
    with Grader(config(rewards={"failure_reward": -2.5})) as grader:
        scores = grader.grade([response("13"), response("12"), response("x")])
        assert [score.reward for score in scores] == [-2.5, 1.0, -2.5]
        assert grader.grade([]) == []


def test_a_payload_in_the_response_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    payload = "__import__('pathlib').Path('trace').touch() or 12"
    with Grader(config(rewards={"answer_pattern": r".*"})) as grader:
        grader.grade([response(payload), response("12", answer=payload), response("`touch trace` $(touch trace)")])
    assert list(tmp_path.iterdir()) == []


# Well-formedness


def test_well_formed_is_the_whole_stripped_text_and_the_stop_and_apart_from_right():
    given = [response(" 13\n"), response("12 apples"), response("a 12"), response("12", stop_reason="length")]
    with Grader(config(rewards={"answer_pattern": r"-?\d+|"})) as grader:
        scores = grader.grade([*given, response("12")])
    assert [score.well_formed for score in scores] == [True, False, False, False, True]
    assert [score.outcome for score in scores] == ["wrong"] * 4 + ["right"]
    with Grader(config()) as grader:
        assert [score.well_formed for score in grader.grade(given)] == [None] * 4


def test_a_pattern_that_explodes_on_a_response_is_stopped_and_told():
    with Grader(config(rewards={"answer_pattern": r"(a|aa)+c|12"})) as grader:
        late, right = grader.grade([response("a" * 200), response("12")])
    assert late == Score(-0.01, "wrong", None, "answer_pattern took longer than 1 s")
    assert right.well_formed is True


# A function of the user's own


def test_what_a_function_may_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = """
import fractions, numpy
from scaled.records import Score
VALUES = {
    "positive": 0.25, "zero": 0, "negative": -3, "true": True, "false": False, "numpy": numpy.float32(0.5),
    "numpy bool": numpy.bool_(True), "fraction": fractions.Fraction(1, 4),
    "score": Score(-1.5, "right", well_formed=numpy.bool_(False), reason="because"), "given up": Score(None, "failed"),
    "none": None, "text": "1", "nan": math.nan, "infinite": -math.inf, "huge": 10**400,
    "no reward": Score(None, "right"), "nan score": Score(math.nan, "right"), "odd outcome": Score(1.0, "good"),
}
def score(response, problem):
    return VALUES[response.text]
"""
    expected = {
        "positive": Score(0.25, "right"),
        "zero": Score(0.0, "wrong"),
        "negative": Score(-3.0, "wrong"),
        "true": Score(1.0, "right"),
        "false": Score(0.0, "wrong"),
        "numpy": Score(0.5, "right"),
        "numpy bool": Score(1.0, "right"),
        "fraction": Score(0.25, "right"),
        "score": Score(-1.5, "right", False, "because"),
    }
    failures = {
        "given up": "returned the outcome `failed`",
        "none": "returned NoneType, not a number or a Score",
        "text": "returned str, not a number or a Score",
        "nan": "returned the reward nan",
        "infinite": "returned the reward -inf",
        "huge": "OverflowError",
        "no reward": "returned the reward None",
        "nan score": "returned the reward nan",
        "odd outcome": "returned the outcome 'good'",
    }
    with Grader(config(reward=module(tmp_path, monkeypatch, source))) as grader:
        scores = grader.grade([response(name) for name in [*expected, *failures]])
    assert scores[: len(expected)] == list(expected.values())
    assert [type(score.reward) for score in scores[: len(expected)]] == [float] * len(expected)
    for score, reason in zip(scores[len(expected) :], failures.values(), strict=True):
        assert (score.reward, score.outcome) == (None, "failed")
        assert reason in score.reason


def test_every_way_to_break_fails_alone_and_the_responses_after_it_are_graded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = """
import ctypes
class OwnError(Exception):  # pickles, but does not unpickle
    def __init__(self, first, second):
        super().__init__("own words")
def score(response, problem):
    match response.text:
        case "hang": time.sleep(1000)
        case "power tower": return 10 ** 10 ** 10
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        case "exit": sys.exit(3)
        case "os exit": os._exit(3)
        case "segfault": ctypes.string_at(0)
        case "raise": raise OwnError(1, 2)
        case "deep": return score(response, problem)
        case "alarm":  # as math graders do; only possible in a main thread
            signal.signal(signal.SIGALRM, lambda *_: sys.exit(4))
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            time.sleep(1000)
    return float(response.text)
"""
    reasons = {
        "hang": "took longer than rewards.timeout=0.5 s",
        "os exit": "ended its process (exit code 3)",
        "segfault": f"ended its process (exit code {-signal.SIGSEGV})",
        "raise": "OwnError: own words (my_reward.py, line 17)",
        "exit": "SystemExit: 3",
        "deep": "RecursionError",
        "alarm": "SystemExit: 4",
        "power tower": "took longer than rewards.timeout=0.5 s",
        "stubborn": "took longer than rewards.timeout=0.5 s",
    }
    mixed = [text for number, reason in enumerate(reasons) for text in (reason, str(number))]
    with Grader(config(reward=module(tmp_path, monkeypatch, source), rewards={"timeout": 0.5})) as grader:
        scores = grader.grade([response(text) for text in mixed])
        again = grader.grade([response("9")])
    assert [score.reward for score in scores[1::2]] == [float(number) for number in range(len(reasons))]
    for score, reason in zip(scores[::2], reasons.values(), strict=True):
        assert (score.reward, score.outcome) == (None, "failed")
        assert reason in score.reason
    assert again[0].reward == 9.0


def test_workers_are_kept_from_batch_to_batch_and_end_with_the_grader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = module(tmp_path, monkeypatch, "def score(response, problem):\n    return os.getpid()\n")
    with Grader(config(reward=path)) as grader:
        pids = {int(score.reward) for _ in range(6) for score in grader.grade([response("x")] * 8)}
    assert len(pids) <= min(4, os.cpu_count())
    assert os.getpid() not in pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_worker_need_not_import_torch():
    code = "import sys, scaled.rewards; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_batch_is_graded_although_the_idle_workers_were_killed_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = module(tmp_path, monkeypatch, "def score(response, problem):\n    return os.getpid()\n")
    with Grader(config(reward=path)) as grader:
        before = {int(score.reward) for score in grader.grade([response("x")] * 20)}
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        after = {int(score.reward) for score in grader.grade([response("x")] * 20)}
    assert before.isdisjoint(after)


def test_a_function_that_fails_on_the_whole_batch_stops_the_run_with_the_first_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = module(tmp_path, monkeypatch, "def score(response, problem):\n    return 1 / (len(response.text) - 2)\n")
    with Grader(config(reward=path)) as grader:
        grader.require_any([], grader.grade([response("12"), response("x")]))  # one of two is right enough
        with pytest.raises(UserError, match=r"all 2 responses .*'arithmetic/7\+5': ZeroDivisionError.*my_reward.py"):
            given = [response("12"), response("ab")]
            grader.require_any(given, grader.grade(given))


def test_response_and_gold_answer_are_not_swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = """
def score(response, problem):  # is the interval of the response inside that of the answer?
    (low, high), (least, most) = (map(float, text.split("..")) for text in (response.text, problem.answer))
    return least <= low and high <= most
"""
    with Grader(config(reward=module(tmp_path, monkeypatch, source))) as grader:
        inside, outside = grader.grade([response("1..2", answer="0..3"), response("0..3", answer="1..2")])
    assert (inside.outcome, outside.outcome) == ("right", "wrong")


def test_the_pattern_counts_beside_a_function_unless_it_judges_the_form_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = """
from scaled.records import Score
def score(response, problem):
    return Score(1.0, "right", well_formed=True) if response.text == "twelve" else 0.0
"""
    path = module(tmp_path, monkeypatch, source)
    with Grader(config(reward=path, rewards={"answer_pattern": r"\d+"})) as grader:
        scores = grader.grade([response("twelve"), response("thirteen"), response("13")])
    assert [score.well_formed for score in scores] == [True, False, True]


@pytest.mark.parametrize(
    ("source", "reward", "text"),
    [
        ("", "my_rewards:score", "No module named 'my_rewards'"),
        ("", "my_reward:score", "no attribute 'score'"),
        ("score = 5", "my_reward:score", "`score` is not a function but int"),
        ("def score(:", "my_reward:score", "SyntaxError"),
        ("import no_such_library", "my_reward:score", "No module named 'no_such_library'"),
        ("sys.exit(2)", "my_reward:score", "SystemExit: 2"),
        ("os._exit(2)", "my_reward:score", "importing it end"),
        ("os._exit(0)", "my_reward:score", "importing it ends its process (exit code 0)"),
        ("", "exact-match", "neither `exact_match` nor a path"),
        ("", "my_reward", "neither `exact_match` nor a path"),
        ("", "my_reward.score", "neither `exact_match` nor a path"),
        ("", ".my_reward:score", "neither `exact_match` nor a path"),
        ("", "my_reward:print(1)", "neither `exact_match` nor a path"),
    ],
)
def test_a_function_that_cannot_be_imported_is_named_before_training_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reward: str, text: str
):
    module(tmp_path, monkeypatch, source)
    monkeypatch.setattr("scaled.graders.pool.WORKER_DOUBT_SECONDS", 3.0)
    with pytest.raises(UserError) as caught, Grader(config(reward=reward)):
        pass
    assert repr(reward) in str(caught.value)
    assert text in str(caught.value)


def test_the_example_rewards_nearness_and_counts_only_the_answer_as_right(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    texts = {"12": 1.0, " 12 apples": 1.0, "24": 0.5, "0": 0.5, "-12": 1 / 3, "1,200": 1 / 100, "none": 0.0, "": 0.0}
    with Grader(config(reward="examples.closeness:score")) as grader:
        scores = grader.grade([*map(response, texts), response("9" * 5000), response("12", stop_reason="length")])
    assert [score.reward for score in scores] == pytest.approx([*texts.values(), 0.0, 0.0])
    assert [score.outcome for score in scores] == ["right", "right", *["wrong"] * 8]
    assert [score.well_formed for score in scores] == [*[True] * 6, False, False, True, False]


def test_the_rows_of_the_example_can_be_loaded_and_graded(monkeypatch: pytest.MonkeyPatch):
    problems = load_problems(ROOT / "examples" / "how_many.jsonl")
    assert len(problems) == 20
    monkeypatch.chdir(ROOT)
    with Grader(config(reward="examples.closeness:score")) as grader:
        given = [Response(problem, (1,), (2,), (0.0,), problem.answer, "stop") for problem in problems]
        assert {score.reward for score in grader.grade(given)} == {1.0}
