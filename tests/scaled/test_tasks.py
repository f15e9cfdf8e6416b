from __future__ import annotations

from collections import Counter

from scaled.tasks import arithmetic, arithmetic_group


def test_every_sum_and_difference_is_there_once_with_its_result():
    results = {}
    for problem in arithmetic():
        user, assistant = problem.messages
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        left, sign, right, equals = assistant["content"].split(" ")
        assert user["content"] == f"What is {left} {sign} {right}?"
        assert equals == "="
        assert problem.id == f"arithmetic/{left}{sign}{right}"
        results[int(left), sign, int(right)] = int(problem.answer)
    expected = {(x, "+", y): x + y for x in range(20) for y in range(20)}
    expected |= {(x, "-", y): x - y for x in range(20) for y in range(20) if x - y >= 0}
    assert results == expected
    assert len(arithmetic()) == 610


def test_minus_is_the_ascii_character_that_the_prompts_were_tried_with():
    assert all(problem.messages[0]["content"].isascii() for problem in arithmetic())


def test_groups_are_the_commuted_pairs_and_nothing_else():
    group = {problem.id.removeprefix("arithmetic/"): arithmetic_group(problem) for problem in arithmetic()}
    assert group["7+5"] == group["5+7"]
    assert group["7-5"] != group["7+5"]
    assert len({group["12+1"], group["1+2"], group["11+2"], group["1+12"]}) == 3
    # 190 pairs of two different terms, 20 doubles and 210 differences, which have no partner.
    assert Counter(Counter(group.values()).values()) == {2: 190, 1: 20 + 210}
