"""C19 and C20 where what they need is not installed, and what they count with."""

from __future__ import annotations

import json

import pytest

from validation.checks import datasets
from validation.claim import REGISTRY, Setting
from validation.ledger import claims, measure


@pytest.mark.parametrize(("claim", "package"), [("C19", "reasoning_gym"), ("C20", "pyarrow")])
def test_a_missing_package_is_no_failure_and_names_the_remedy(monkeypatch, claim: str, package: str):
    claims()
    monkeypatch.setattr(datasets, "find_spec", lambda name: None)
    entry = measure(REGISTRY[claim], Setting(quick=True))
    assert (entry.verdict, entry.reason) == ("not measured here", f"{package} not installed: needs make data")


def test_the_farthest_count_is_found_above_and_below():
    assert datasets.farthest({"tsumego": 4900, "pool_matrix": 5050}, 0, relative=True) == pytest.approx(2)
    assert datasets.farthest({"emoji_mystery": 25, "sentence_reordering": 16}, 1, relative=False) == 5


def test_differences_see_what_is_missing_at_the_end():
    assert datasets.differences(["a", "b"], ["a", "c", "d"]) == 2
    assert datasets.differences([], ["a"]) == datasets.differences(["a"], []) == 1


def test_questions_are_read_whole_whatever_separates_lines_inside_them(tmp_path):
    file = tmp_path / "a.jsonl"
    text = "one\u2028two\rthree"
    row = {"source": "s", "messages": [{"content": "system"}, {"content": text}]}
    file.write_text((json.dumps(row, ensure_ascii=False) + "\n") * 2, encoding="utf-8", newline="")
    assert list(datasets.questions(file)) == [("s", text)] * 2
