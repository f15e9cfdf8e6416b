"""The graders themselves: what is taken for the answer, what equals what, and what an untrusted text may do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from scaled.graders import math as grader
from scaled.graders import reasoning_gym
from scaled.graders.final_answer import LONGEST, TAIL, final_answer

PAIRS = yaml.safe_load((Path(__file__).parent / "answer_pairs.yaml").read_text(encoding="utf-8"))
# Pairs that come out otherwise than a mathematician would have it.
KNOWN = {
    # Equal for n > 0 alone, which neither says; for n < 0 they differ in sign.
    (r"\frac{1}{\sqrt{n}}", r"\sqrt{1/n}"): "wrong",
}


def response(pair: dict[str, Any]) -> str:
    return pair.get("text") or f"Therefore the answer is $\\boxed{{{pair['answer']}}}$."


def test_the_table_is_large_and_no_pair_stands_in_it_twice():
    assert len({(pair["gold"], response(pair)) for pair in PAIRS}) == len(PAIRS) >= 60
    assert {pair["verdict"] for pair in PAIRS} == {"right", "wrong", "unparseable"}
    assert sum(pair["source"] != "own" for pair in PAIRS) >= 60


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair['gold']} | {response(pair)}"[:90])
def test_pairs_that_were_graded_wrongly_somewhere(pair: dict[str, Any]):
    verdict = grader.grade(pair["gold"], response(pair), False, {})
    expected = KNOWN.get((pair["gold"], pair.get("answer")), pair["verdict"])
    assert verdict.outcome == expected, verdict.reason
    assert verdict.credit == float(expected == "right")


def test_every_known_difference_is_in_the_table_and_is_one():
    wanted = {(pair["gold"], pair.get("answer")): pair["verdict"] for pair in PAIRS}
    assert all(wanted[pair] != outcome for pair, outcome in KNOWN.items())


def test_gold_and_answer_are_not_swapped():
    # The solution set may be given for an inequality, and not an unsolved inequality for the solution set.
    assert grader.grade("2x + 1 < 7", r"\boxed{(-\infty, 3)}", False, {}).outcome == "right"
    assert grader.grade(r"(-\infty, 3)", r"\boxed{2x + 1 < 7}", False, {}).outcome == "wrong"


def test_a_gold_answer_that_cannot_be_read_is_a_failure_and_no_wrong_answer():
    gold = r"\frac{1}{\text{the"
    verdict = grader.grade(gold, r"\boxed{4}", False, {})
    assert (verdict.outcome, verdict.credit) == ("failed", None)
    assert "gold" in verdict.reason
    assert grader.grade("f(x) for all", "Answer: f(x) for all", False, {}).outcome == "right"


def test_an_answer_that_cannot_be_read_has_no_credit_and_says_why():
    for text in (r"\boxed{\frac{1}{}", r"\boxed{x \in }", "", "34", "\\boxed{ }"):
        verdict = grader.grade("34", text, False, {})
        assert (verdict.outcome, verdict.credit) == ("unparseable", 0.0), text
        assert verdict.reason


# The final answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{1}, \boxed{2}", "1,2"),
        (r"$\boxed{2}$ or $\boxed{2}$", "2"),
        (r"\boxed{1} and Answer: 2", " 2"),
        (r"Answer: 1 and \boxed{2}", "2"),
        ("Answer: 1\nanswer: 2\n", "2"),
        (r"\fbox {3}", "3"),
        (r"\boxed{\text{a } \{b\}}", r"\text{a } \{b\}"),
        (r"\boxed{\boxed{3}}", r"\boxed{3}"),
        (r"\boxed{3", None),
        (r"\boxed", None),
        ("the answers are 3", None),
        (r"<think>\boxed{3}</think> so it is", None),
        (r"<think>\boxed{3}</think> \boxed{4}", "4"),
        (r"<think>I think \boxed{3}", None),
        (r"thinking \boxed{3}</think>", None),
    ],
)
def test_where_the_answer_stands(text: str, answer: str | None):
    found = final_answer(text)
    assert (found and found.strip()) == (answer and answer.strip())


def test_a_line_that_was_cut_is_no_answer_but_a_closed_box_is():
    assert final_answer("Answer: 12", cut=True) is None
    assert final_answer("Answer: 12") == "12"
    assert final_answer("Answer: 12\nbut", cut=True) == "12"
    assert final_answer(r"so \boxed{12} bec", cut=True) == "12"


def test_only_the_end_of_a_long_response_is_searched():
    assert final_answer(r"\boxed{3}" + " " * TAIL) is None
    assert final_answer("x" * 3_000_000 + r"\boxed{3}") == "3"
    assert final_answer("\\boxed{" + "1" * (2 * LONGEST) + "}") is None


@settings(max_examples=200, deadline=None)
@given(
    st.text(st.sampled_from(["\\", "b", "{", "}", "$", " ", "1", ",", "\n"]), max_size=30),
    st.integers(min_value=-999, max_value=999),
)
def test_the_last_box_wins_whatever_stands_before_it(before: str, number: int):
    answer = final_answer(f"{before} first. Then: \\boxed{{{number}}}.")
    assert answer == str(number)


@settings(max_examples=60, deadline=None)
@given(st.integers(-(10**6), 10**6), st.integers(1, 999), st.integers(-(10**6), 10**6), st.integers(1, 999))
def test_fractions_are_equal_when_they_are(a: int, b: int, c: int, d: int):
    verdict = grader.grade(f"\\frac{{{a}}}{{{b}}}", f"Answer: $\\dfrac{{{c}}}{{{d}}}$", False, {})
    assert verdict.outcome == ("right" if a * d == b * c else "wrong")


# Containment

PAYLOADS = [
    around.format("__import__('pathlib').Path('trace').touch()")
    for around in (
        "{}", r"\text{{{}}}", r"\operatorname{{{}}}", r"\operatorname{{{}}}(1)", "f({}, 1)", r"\max({}, 2)",
        r"\{{{}, 1\}}", "[{}, 1)", "x_{{{}}}", r"\begin{{pmatrix}} {} & 1 \end{{pmatrix}}", r"x = {}", r"\gcd({}, 4)",
        r"\frac{{{}}}{{2}}", "3 < {}", r"\mathrm{{{}}}", r"\int_0^1 {} dx", r"\sum_{{n={}}}^3 n", "2^{{{}}}", "{}!",
    )
]  # fmt: skip


def test_no_payload_in_answer_or_gold_leaves_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for payload in PAYLOADS:
        grader.grade("4", f"\\boxed{{{payload}}}", False, {})
        grader.grade("4", f"Answer: {payload}", False, {})
        grader.grade(payload, "Answer: 4", False, {})
    assert list(tmp_path.iterdir()) == []


def worker(code: str, folder: Path) -> str:
    """Run a few lines in a process that is contained as a worker is; what they print."""
    lines = f"from scaled.graders import contain, math\n{code}"
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", lines], cwd=folder, capture_output=True, text=True, env={"PYTHONPATH": root, "PATH": ""}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_in_a_worker_text_that_reaches_sympify_is_not_evaluated_and_numbers_are_still_read(tmp_path: Path):
    code = """
math.prepare()
contain.refuse_code()
import sympy
print(sympy.Number("12"), sympy.Number("1.5"), sympy.sympify("7"))
for text in ("__import__('pathlib').Path('trace').touch()", "x", "open('trace', 'w')", "Integer(2)**3"):
    try:
        print(sympy.sympify(text))
    except Exception as error:
        print(type(error).__name__)
"""
    lines = worker(code, tmp_path).split("\n")
    assert lines[0] == "12 1.50000000000000 7"
    assert lines[1:5] == ["SympifyError"] * 4 or set(lines[1:5]) <= {"SympifyError", "ValueError"}
    assert list(tmp_path.iterdir()) == []


def test_in_a_worker_code_that_runs_after_all_writes_no_file_and_starts_no_program(tmp_path: Path):
    (tmp_path / "kept").write_text("kept")
    code = """
contain.refuse_effects()
import os, pathlib, shutil, socket, subprocess
def try_(act):
    try:
        act()
        print("done")
    except PermissionError:
        print("refused")
try_(lambda: open("trace", "w"))
try_(lambda: open("kept", "a"))
try_(lambda: pathlib.Path("trace").touch())
try_(lambda: os.open("trace", os.O_CREAT | os.O_WRONLY))
try_(lambda: os.remove("kept"))
try_(lambda: os.rename("kept", "trace"))
try_(lambda: os.mkdir("trace"))
try_(lambda: os.system("echo > trace"))
try_(lambda: subprocess.run(["/bin/true"]))
try_(lambda: os.posix_spawn("/bin/true", ["true"], {}))
try_(lambda: os.execv("/bin/true", ["true"]))
try_(lambda: os.fork())
try_(lambda: socket.create_connection(("127.0.0.1", 9)))
try_(lambda: open("kept").read())
"""
    assert worker(code, tmp_path).split() == ["refused"] * 13 + ["done"]
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_text() == "kept"


def test_in_a_worker_memory_beyond_the_limit_is_refused_and_the_worker_goes_on(tmp_path: Path):
    code = """
contain.limit_memory(0.25)
try:
    held = bytearray(2**30)
except MemoryError:
    print("refused")
print(len(bytearray(2**20)))
"""
    assert worker(code, tmp_path).split() == ["refused", str(2**20)]


# Tasks of reasoning-gym

ENTRY = {"question": "?", "answer": "1 2\n3 4", "metadata": {"start_word": "COLD", "end_word": "WARM"}}


def score(task: str, text: str, answer: str = ENTRY["answer"]) -> tuple[str, float | None]:
    pytest.importorskip("zss")
    entry = {**ENTRY, "answer": answer}
    verdict = reasoning_gym.grade(answer, text, False, {"dataset": task, "entry": entry})
    return verdict.outcome, verdict.credit


def test_a_task_is_scored_by_its_own_scorer_on_the_last_tagged_answer():
    assert score("manipulate_matrix", "<answer>9</answer> no: <answer>\n1 2\n3 4\n</answer>") == ("right", 1.0)
    assert score("manipulate_matrix", "<answer>1 2\n3 5</answer>") == ("wrong", 0.0)
    assert score("pool_matrix", "<answer>1 2\n3 5</answer>") == ("wrong", 0.1)
    assert score("rectangle_count", "<answer>3</answer>", "3") == ("right", 1.0)
    assert score("tsumego", "<answer>C4 or D5</answer>", "C4") == ("wrong", 0.25)
    assert score("sentence_reordering", "<answer>b a c</answer>", "a b c") == ("wrong", pytest.approx(1 / 3))
    assert score("codeio", '<answer>{"a": 1}</answer>', '{"a": 1}') == ("right", 1.0)
    assert score("word_ladder", "<answer>COLD,CORD,WORD,WARD,WARM</answer>", "-") == ("right", 1.0)
    assert score("emoji_mystery", "<answer>ab</answer>", "ac") == ("wrong", 0.5)


def test_what_the_answer_alone_makes_impossible_to_read_is_wrong_and_no_failure_of_the_grader():
    for answer in ('{"a": ' + "1" * 5000 + "}", "[" * 5000 + "]" * 5000):
        assert score("codeio", f"<answer>{answer}</answer>", '{"a": 1}') == ("wrong", 0.0)


def test_without_tags_there_is_no_answer_even_if_the_text_is_it():
    assert score("manipulate_matrix", "1 2\n3 4") == ("unparseable", 0.0)
    assert score("manipulate_matrix", "<answer>1 2\n3 4") == ("unparseable", 0.0)


def test_a_payload_to_a_scorer_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for task in reasoning_gym.SCORERS:
        for payload in (*PAYLOADS[:2], '{"a": __import__("os").system("touch trace")}'):
            score(task, f"<answer>{payload}</answer>")
    assert list(tmp_path.iterdir()) == []


def test_only_tasks_whose_scorers_were_read_are_let_through_as_others_evaluate_the_answer():
    assert reasoning_gym.fault({"dataset": "tsumego", "entry": ENTRY}) is None
    assert "spiral_matrix" in reasoning_gym.fault({"dataset": "spiral_matrix", "entry": ENTRY})
    for metadata in ({}, None, {"dataset": "tsumego"}, {"dataset": "tsumego", "entry": {"answer": "x"}}):
        assert reasoning_gym.fault(metadata)


def test_what_the_package_prints_on_import_is_not_seen():
    code = "from scaled.graders import reasoning_gym as g; g.prepare()"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
