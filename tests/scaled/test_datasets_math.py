"""MATH-500 from small files of the published schema, names on the hub, and what is not installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from scaled.data import load_problems
from scaled.datasets import rows as data_rows
from scaled.datasets.mathematics import dapo_math, math_500
from scaled.errors import UserError

QUIET = Console(quiet=True)


def math_row(number: int, **more: object) -> dict:
    row = {"problem": f"What is $\\frac{{{number}}}{{1}}$?", "solution": "…", "answer": str(number)}
    return row | {"subject": "Algebra", "level": 2, "unique_id": f"test/algebra/{number}.json"} | more


def jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_each_problem_is_a_users_message_with_its_answer_as_a_text(tmp_path: Path):
    source = jsonl(tmp_path / "test.jsonl", [math_row(number) for number in range(500)])
    math_500(tmp_path / "out.jsonl", str(source), QUIET)
    found = load_problems(tmp_path / "out.jsonl")
    assert len(found) == 500
    assert found[3].messages == ({"role": "user", "content": "What is $\\frac{3}{1}$?"},)
    assert (found[3].id, found[3].answer) == ("math-500/test/algebra/3.json", "3")
    assert {(p.verifier, p.source) for p in found} == {("math", "math-500")}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda rows: rows[:-1], "has 499 problems in 499 rows, and 500 are needed: 1 are missing"),
        (lambda rows: [*rows, math_row(500)], "has 501 problems in 501 rows, and 500 are needed: 1 are too many"),
        (lambda rows: [*rows[:-1], rows[0]], r":500: its id is that of .*test.jsonl:1 too"),
        (lambda rows: [*rows[:-1], math_row(7, unique_id=None)], r":500: `unique_id` is None"),
        (lambda rows: [*rows[:-1], math_row(501, answer=None)], r":500: `answer` is missing"),
        (lambda rows: [*rows[:-1], math_row(501, problem=" ")], r":500: `problem` is ' '"),
    ],
)
def test_anything_but_all_five_hundred_is_an_error(tmp_path: Path, change, told: str):
    source = jsonl(tmp_path / "test.jsonl", change([math_row(number) for number in range(500)]))
    with pytest.raises(UserError, match=told):
        math_500(tmp_path / "out.jsonl", str(source), QUIET)
    assert not (tmp_path / "out.jsonl").exists()


# The hub, and what is not installed


def dapo_row(text: str) -> dict:
    judged_by = {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}
    return {"prompt": [{"content": text, "role": "user"}], "reward_model": judged_by}


def test_a_name_on_the_hub_is_streamed_and_its_failure_is_told(tmp_path: Path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def stream(name: str, **options: object):
        asked.append((name, options))
        yield dapo_row("a")
        yield dapo_row("b")
        raise ConnectionError("the line\nwent dead")

    monkeypatch.setattr(datasets, "load_dataset", stream)
    dapo_math(tmp_path / "out.jsonl", "BytedTsinghua-SIA/DAPO-Math-17k", QUIET, count=2)
    assert asked == [("BytedTsinghua-SIA/DAPO-Math-17k", {"split": "train", "streaming": True})]
    assert [p.messages[0]["content"] for p in load_problems(tmp_path / "out.jsonl")] == ["a", "b"]
    with pytest.raises(UserError, match=r"after row 2: ConnectionError: the line went dead\nWithout a network"):
        dapo_math(tmp_path / "out.jsonl", "BytedTsinghua-SIA/DAPO-Math-17k", QUIET, count=3)


def test_what_is_not_installed_is_told_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"^pyarrow is not installed .*`make data`"):
        data_rows.library("pyarrow")
