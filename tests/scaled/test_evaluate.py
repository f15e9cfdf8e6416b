"""Evaluation: figures by hand, intervals against scipy's bootstrap, and the whole on a model of two layers."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from scaled import bootstrap as module
from scaled.bootstrap import bootstrap_interval
from scaled.config import RunConfig
from scaled.errors import UserError
from scaled.evaluate import evaluate, summarise
from scaled.metrics import EVALUATION_FIELDS, JsonLines
from scaled.records import Problem, Response, Score
from scaled.rewards import Grader
from scaled.rollout.in_process import InProcess
from tests.tiny import make_tiny_model

PROBLEMS = [Problem(id=f"p{i}", messages=({"role": "user", "content": "x" * i},), answer=str(i)) for i in range(12)]


def mean_interval(values, **settings):
    return bootstrap_interval(values, np.ones(len(values)), seed=0, **settings)


def test_interval_is_scipys_percentile_bootstrap_of_a_mean():
    values = (np.random.default_rng(3).random(120) < 0.3).astype(float)
    expected = stats.bootstrap(
        (values,), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    np.testing.assert_allclose(mean_interval(values), expected, atol=0.01)


def test_interval_of_a_ratio_draws_numerator_and_denominator_of_a_problem_together():
    generator = np.random.default_rng(4)
    formed = generator.integers(0, 5, size=80)
    right = generator.binomial(formed, 0.5)

    def ratio(above, below, axis):
        return above.sum(axis) / below.sum(axis)

    expected = stats.bootstrap(
        (right, formed), ratio, paired=True, vectorized=True, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    np.testing.assert_allclose(bootstrap_interval(right, formed, seed=0), expected, atol=0.01)


def test_four_equal_responses_to_a_problem_do_not_narrow_the_interval():
    values = (np.random.default_rng(3).random(60) < 0.4).astype(float)
    assert bootstrap_interval(4 * values, np.full(60, 4), seed=0) == mean_interval(values)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1])
@pytest.mark.parametrize("count", [1, 7])
def test_interval_without_variation_is_the_value_twice(value, count):
    assert mean_interval([value] * count) == pytest.approx((value, value), abs=1e-15)


def test_interval_of_a_ratio_where_most_problems_have_no_part_in_it():
    assert bootstrap_interval([1, 0, 0, 0], [1, 0, 0, 0], seed=0) == (1.0, 1.0)
    assert bootstrap_interval([0, 0], [0, 0], seed=0) is None


def test_interval_is_drawn_in_blocks_that_do_not_change_it(monkeypatch):
    values = np.random.default_rng(0).random(50)
    whole = mean_interval(values)
    monkeypatch.setattr(module, "AT_ONCE", 9_999)
    assert mean_interval(values) == pytest.approx(whole, abs=0.01)


def answered(tokens: int, stop_reason: str = "stop") -> Response:
    return Response(PROBLEMS[0], (1,), (2,) * tokens, (-1.0,) * tokens, "", stop_reason)


def test_figures_by_hand_with_a_failed_grader_left_out():
    right, wrong = Score(1.0, "right", True), Score(-0.01, "wrong", True)
    odd, failed = Score(-0.01, "wrong", False), Score(None, "failed", True)
    # Three problems of two responses.
    scores = [right, wrong, odd, odd, failed, right]
    responses = [answered(2), answered(4, "length"), answered(1), answered(1), answered(1), answered(3)]
    row = summarise(responses, scores, 2, seed=0)
    assert (row["problems"], row["samples"]) == (3, 2)
    assert row["pass_at_1"] == pytest.approx(2 / 5)
    assert row["pass_at_k"] == pytest.approx(2 / 3)
    assert row["well_formed"] == pytest.approx(3 / 5)
    assert row["accuracy_of_well_formed"] == pytest.approx(2 / 3)
    assert row["truncated"] == pytest.approx(1 / 6)
    assert row["response_tokens"] == pytest.approx(2.0)
    assert row["grader_failed"] == 1
    for value, interval in (
        ("pass_at_1", "interval"),
        ("pass_at_k", "interval_k"),
        ("well_formed", "well_formed_interval"),
        ("accuracy_of_well_formed", "accuracy_of_well_formed_interval"),
    ):
        low, high = row[interval]
        assert 0 <= low <= row[value] <= high <= 1


def test_a_problem_whose_responses_all_failed_to_be_graded_is_no_failure_of_the_model():
    scores = [Score(1.0, "right")] * 2 + [Score(None, "failed")] * 2
    row = summarise([answered(1)] * 4, scores, 2, seed=0)
    assert (row["pass_at_1"], row["pass_at_k"], row["grader_failed"]) == (1.0, 1.0, 2)
    assert (row["interval"], row["interval_k"]) == ((1.0, 1.0), (1.0, 1.0))


def test_without_a_pattern_there_is_no_share_of_the_well_formed():
    row = summarise([answered(1)] * 2, [Score(1.0, "right"), Score(0.0, "wrong")], 1, seed=0)
    for name in ("well_formed", "well_formed_interval", "accuracy_of_well_formed", "accuracy_of_well_formed_interval"):
        assert row[name] is None
    row = summarise([answered(1)] * 2, [Score(0.0, "wrong", False)] * 2, 1, seed=0)
    assert (row["well_formed"], row["accuracy_of_well_formed"]) == (0.0, None)


def settings(**evaluation) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": "unused",
            "seed": 4,
            "updates": 1,
            "model": {"path": "unused"},
            "data": {"task": "arithmetic"},
            "rollout": {"max_new_tokens": 4, "batch": 8},
            "evaluation": evaluation,
        }
    )


class ShortIsRight(Grader):
    """Grades otherwise."""

    def grade(self, responses):
        return [Score(*((1.0, "right") if r.text < "m" else (0.0, "wrong")), r.text.isalnum()) for r in responses]


def evaluated(model, tokenizer, problems, config, update, advance=lambda count: None):
    rollout = InProcess(model, tokenizer, config)
    return evaluate(rollout, problems, config, update=update, grader=ShortIsRight(config), advance=advance)


@pytest.fixture(scope="module")
def model():
    return make_tiny_model(initializer_range=0.3)


def test_rows_have_the_fields_of_the_log_and_fit_into_it(model, tiny_tokenizer, tmp_path):
    told = []
    rows, answers = evaluated(model, tiny_tokenizer, PROBLEMS, settings(samples=3), 7, told.append)
    assert [(row["eval"], row["update"], row["samples"]) for row in rows] == [("greedy", 7, 1), ("sampled", 7, 3)]
    assert sum(told) == len(PROBLEMS) * 4
    assert list(answers) == ["greedy", "sampled"]
    assert [response.problem for response, _ in answers["sampled"]] == [p for p in PROBLEMS for _ in range(3)]
    for row in rows:
        assert row.keys() | {"batch"} == EVALUATION_FIELDS.keys()
        pairs = answers[row["eval"]]
        assert row["pass_at_1"] == pytest.approx(np.mean([score.outcome == "right" for _, score in pairs]))
        JsonLines(tmp_path / "metrics.jsonl").append(row)


def test_before_and_after_are_answered_with_the_same_random_numbers(model, tiny_tokenizer):
    config = settings(samples=2, greedy=False)
    before = evaluated(model, tiny_tokenizer, PROBLEMS, config, 0)
    after = evaluated(model, tiny_tokenizer, PROBLEMS, config, 9)
    assert before[1] == after[1]
    assert [{**row, "update": 0, "seconds": 0} for row in after[0]] == [{**row, "seconds": 0} for row in before[0]]
    assert list(after[1]) == ["sampled"]


def test_the_temperature_of_evaluation_is_its_own(model, tiny_tokenizer):
    cold = evaluated(model, tiny_tokenizer, PROBLEMS, settings(samples=4, temperature=1e-3), 0)[1]
    greedy = {response.problem.id: response.token_ids for response, _ in cold["greedy"]}
    assert all(response.token_ids == greedy[response.problem.id] for response, _ in cold["sampled"])


def test_no_problems_are_an_error_that_names_the_setting(model, tiny_tokenizer):
    with pytest.raises(UserError, match=r"data\.held_out"):
        evaluated(model, tiny_tokenizer, [], settings(), 0)
