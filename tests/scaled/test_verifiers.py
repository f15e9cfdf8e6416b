"""`reward: verifier` through real worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scaled.bench.graders import KINDS, hostile_answers, try_hostile
from scaled.config import RunConfig
from scaled.errors import UserError
from scaled.evaluate import summarise
from scaled.records import Problem, Response, Score
from scaled.rewards import Grader

ENTRY = {"question": "?", "answer": "1 2\n3 4", "metadata": {}}
MATRIX = {"dataset": "pool_matrix", "entry": ENTRY}


def config(**rewards: Any) -> RunConfig:
    settings = {"failure_reward": -0.25, "timeout": 5.0} | rewards
    return RunConfig(
        run="runs/test",
        updates=1,
        model={"path": "none"},
        data={"task": "arithmetic"},
        reward="verifier",
        rewards=settings,
    )


def response(text: str, verifier: str = "math", answer: str = "34", stop: str = "stop", **metadata: Any) -> Response:
    return Response(Problem(f"row of {verifier}", (), answer, "", verifier, metadata), (1,), (2,), (-0.5,), text, stop)


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(config()) as opened:
        opened.prepare([response("").problem, response("", "reasoning-gym", ENTRY["answer"], **MATRIX).problem])
        yield opened


def test_each_row_is_graded_by_its_own_verifier_and_paid_by_its_score(grader: Grader):
    rows = ("reasoning-gym", ENTRY["answer"])
    given = [
        response(r"so \boxed{34.0}"),
        response("34", "exact"),
        response("<answer>1 2\n3 4</answer>", *rows, **MATRIX),
        response("<answer>1 2\n3 5</answer>", *rows, **MATRIX),
        response("<answer>none</answer>", *rows, **MATRIX),
        response("1 2\n3 4", *rows, **MATRIX),
        response(r"so \boxed{35}"),
        response("34"),
        response(r"\boxed{34}", "exact"),
        response("Answer: 34", stop="length"),
        response("34", "exact", stop="length"),
    ]
    scores = grader.grade(given)
    found = [(score.reward, score.outcome, score.credit) for score in scores]
    wrong, unparseable = (-0.25, "wrong", 0.0), (-0.25, "unparseable", 0.0)
    assert found[:6] == [*[(1.0, "right", 1.0)] * 3, (0.1, "wrong", 0.1), wrong, unparseable]
    assert found[6:] == [wrong, unparseable, wrong, unparseable, wrong]
    row = summarise(given, scores, 1, seed=0)
    assert (row["pass_at_1"], row["unparseable"], row["grader_failed"]) == (3 / 11, 3 / 11, 0)


def test_an_answer_that_takes_for_ever_fails_alone_and_the_others_are_graded(grader: Grader):
    late = response(r"\boxed{99999999!}")
    mixed = [response(r"then \boxed{34}"), late, response(r"then \boxed{33}"), late, response("Then, answer: 34")]
    replaced = grader.replaced
    scores = grader.grade(mixed)
    assert [score.outcome for score in scores] == ["right", "failed", "wrong", "failed", "right"]
    assert (scores[1].reward, scores[1].credit) == (None, None)
    assert scores[1].reason == "took longer than rewards.timeout=5 s"
    assert grader.replaced == replaced + 1  # the same text twice is one question


def test_memory_beyond_the_limit_fails_alone_without_a_worker_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = (
        "import os\ndef score(response, problem):\n    bytearray(int(response.text) * 2**20)\n    return os.getpid()\n"
    )
    (tmp_path / "hungry.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    with Grader(config(memory=0.25).model_copy(update={"reward": "hungry:score"})) as opened:
        scores = opened.grade([response(size, "") for size in ("1", "600", "2") * 4])
        assert opened.replaced == 0
    assert [score.outcome for score in scores] == ["right", "failed", "right"] * 4
    assert scores[1].reason == "needed more memory than rewards.memory=0.25 GiB"


def test_gold_that_cannot_be_read_fails_with_its_reason_and_is_never_a_wrong_answer(grader: Grader):
    broken = response(r"\boxed{34}", answer=r"\frac{1}{\text{the")
    (score,) = grader.grade([broken])
    assert (score.reward, score.outcome, score.credit) == (None, "failed", None)
    with pytest.raises(UserError, match=r"all 1 responses .*'row of math'.*gold answer.*look at the gold answers"):
        grader.require_any([broken], [score])


def test_what_is_known_is_not_asked_again_but_a_failure_is(grader: Grader, monkeypatch: pytest.MonkeyPatch):
    asked = []
    real = grader._pool.map

    def watched(function, tasks, failure):
        asked.extend(task[2] for task in tasks)
        return real(function, tasks, failure)

    monkeypatch.setattr(grader._pool, "map", watched)
    same, broken = response(r"new \boxed{34}"), response(r"\boxed{1}", answer=r"\frac{2}{\text{the")
    first = grader.grade([same, broken, same, response(r"new \boxed{34}", answer="35")])
    assert asked == [same.text, broken.text, same.text]
    assert [score.outcome for score in first] == ["right", "failed", "right", "wrong"]
    assert grader.grade([same, broken]) == first[:2]
    assert asked[3:] == [broken.text]
    # Cut, the same text is another question; so is the same text to another row's metadata.
    grader.grade([response(same.text, stop="length")])
    assert asked[4:] == [same.text]


def test_what_is_remembered_is_bounded(grader: Grader, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("scaled.rewards.REMEMBERED", 3)
    grader.grade([response(f"\\boxed{{{number}}}") for number in range(8)])
    assert len(grader._verdicts) == 3


def test_texts_that_no_encoding_takes_are_graded(grader: Grader):
    texts = ["\ud800\\boxed{34}", "\\boxed{34\0}", "\\boxed{\udfff}", "\0" * 100, "Answer: ٣٤"]
    outcomes = [score.outcome for score in grader.grade([response(text) for text in texts])]
    assert outcomes[0] == "right"
    assert "failed" not in outcomes


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (response("", ""), r"row 'row of ': its `verifier` is '';.*exact, math, reasoning-gym"),
        (response("", "maths"), r"its `verifier` is 'maths'"),
        (response("", "reasoning-gym"), r"no `dataset` and `entry`.*logra data"),
        (response("", "reasoning-gym", dataset="n_queens", entry=ENTRY), r"'n_queens' is not among"),
    ],
)
def test_a_row_without_a_verifier_is_named_before_anything_is_sampled(row: Response, text: str):
    with Grader(config()) as opened, pytest.raises(UserError, match=text):
        opened.prepare([response("").problem, row.problem])


def test_without_the_package_a_row_that_needs_it_names_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("scaled.rewards.find_spec", lambda name: None)
    with Grader(config()) as opened, pytest.raises(UserError, match=r"reasoning-gym.*not installed.*`make data`"):
        opened.prepare([response("", "reasoning-gym", **MATRIX).problem])


def test_other_rewards_do_not_ask_for_a_verifier():
    with Grader(config().model_copy(update={"reward": "exact_match"})) as opened:
        opened.prepare([response("", "").problem])
        assert opened.grade([response("34", "")]) == [Score(1.0, "right")]


def test_hostile_answers_come_back_in_time_and_without_effect():
    found = try_hostile(42, 1, timeout=0.5)
    assert found.effects == []
    assert found.over == 0
    assert sum(sum(outcomes.values()) for outcomes in found.outcomes.values()) == 42
    assert set(found.outcomes) == set(KINDS)
    assert all(outcomes["right"] == 0 for outcomes in found.outcomes.values())


def test_the_same_seed_makes_the_same_hostile_answers():
    first, again = (hostile_answers(40, 3, "canary") for _ in range(2))
    assert first == again != hostile_answers(40, 4, "canary")
