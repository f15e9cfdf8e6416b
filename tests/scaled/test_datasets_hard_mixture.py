"""Reasoning-Gym Hard: what is drawn, what is removed, and what a row is good for once it is read back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from scaled.data import load_problems
from scaled.datasets import draw, hard_mixture
from scaled.datasets.codeio_programs import LEFT_OUT
from scaled.datasets.hard_mixture import APART, TABLE_3, Counts, entries, make, select, show
from scaled.errors import UserError

pytest.importorskip("reasoning_gym")
QUIET = Console(quiet=True)
SMALL = {"seed": 42, "candidates": 12, "evaluation": 3}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small mixture of all eight tasks."""
    folder = tmp_path_factory.mktemp("mixture") / "hard"
    assert {counts.task: counts.faults.count for counts in make(folder, QUIET, **SMALL)} == dict.fromkeys(TABLE_3, 0)
    return folder


def test_both_files_have_all_tasks_in_the_papers_order_and_nothing_else_is_left(mixture: Path):
    assert sorted(path.name for path in mixture.iterdir()) == ["eval.jsonl", "train.jsonl"]
    for split in ("train", "eval"):
        found = load_problems(mixture / f"{split}.jsonl")
        assert list(dict.fromkeys(p.source for p in found)) == list(TABLE_3)
        assert {p.verifier for p in found} == {"reasoning-gym"}
        assert all(p.metadata["dataset"] == p.source and p.metadata["entry"]["answer"] == p.answer for p in found)
        assert all(p.messages[-1]["content"] == p.metadata["entry"]["question"] for p in found)
        assert all("<answer>" in p.messages[0]["content"] for p in found)


@pytest.mark.parametrize("task", TABLE_3)
def test_the_tasks_scorer_takes_the_row_read_back_gold_scores_one_and_wrong_less(mixture: Path, task: str, capsys):
    import reasoning_gym

    score = reasoning_gym.get_score_answer_fn(task)
    found = [p for split in ("train", "eval") for p in load_problems(mixture / f"{split}.jsonl") if p.source == task]
    assert len(found) > 10
    for problem in found:
        assert score(problem.answer, problem.metadata["entry"]) == 1.0
        assert score("no such answer", problem.metadata["entry"]) < 1.0
        other = next(p for p in found if p.answer != problem.answer)
        assert score(other.answer, problem.metadata["entry"]) < 1.0


def same_bytes(folder: Path, mixture: Path, tasks: tuple[str, ...]) -> bool:
    """Whether the files are those of the whole mixture without the other tasks."""
    for name in ("train.jsonl", "eval.jsonl"):
        lines = (mixture / name).read_bytes().splitlines(keepends=True)
        by_task = {task: [line for line in lines if json.loads(line)["source"] == task] for task in tasks}
        if (folder / name).read_bytes() != b"".join(line for task in tasks for line in by_task[task]):
            return False
    return True


def test_the_same_call_writes_the_same_bytes_whatever_the_callers_environment(mixture: Path, tmp_path: Path):
    tasks = ("codeio", "word_ladder")  # they walk through sets, whose order the hash's seed decides
    command = "import sys; from pathlib import Path; from rich.console import Console\n"
    command += "from scaled.datasets.hard_mixture import make\n"
    command += f"make(Path(sys.argv[1]), Console(quiet=True), tasks={tasks}, **{SMALL})"
    env = os.environ | {"PYTHONHASHSEED": "7", "LC_ALL": "C", "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", command, str(tmp_path)], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert same_bytes(tmp_path, mixture, tasks)


def test_an_interrupted_call_goes_on_with_what_was_done_and_ends_with_the_same_bytes(mixture, tmp_path, monkeypatch):
    tasks = ("emoji_mystery", "tsumego", "manipulate_matrix")
    made = []
    original = hard_mixture.entries

    def interrupted(task, draws, stop=None):
        made.append(task)
        for number, found in enumerate(original(task, draws, stop)):
            if made == ["emoji_mystery", "tsumego"] and number == 5:
                raise KeyboardInterrupt
            yield found

    monkeypatch.setattr(hard_mixture, "entries", interrupted)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # one task after the other
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, QUIET, tasks=tasks, **SMALL)
    assert not list(tmp_path.glob("*.jsonl"))
    # A copy that is killed while it writes leaves such a file.
    next(tmp_path.glob(".parts-*")).joinpath(".tsumego.train.partial").write_text("half a li")
    make(tmp_path, QUIET, tasks=tasks, **SMALL)
    # What was done is not drawn again; what was interrupted is, from its beginning.
    assert [made.count(task) for task in tasks[:2]] == [1, 2]
    assert same_bytes(tmp_path, mixture, tasks)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval.jsonl", "train.jsonl"]


def test_what_was_done_with_other_arguments_is_not_gone_on_with(tmp_path: Path):
    make(tmp_path, QUIET, seed=1, candidates=4, evaluation=2, tasks=["emoji_mystery"])
    one = (tmp_path / "train.jsonl").read_bytes()
    (counts,) = make(tmp_path, QUIET, seed=2, candidates=4, evaluation=2, tasks=["emoji_mystery"])
    assert (tmp_path / "train.jsonl").read_bytes() != one
    assert counts.train == 4


def test_neighbouring_seeds_overlap_almost_wholly_and_the_seeds_used_do_not():
    draws = {"train": (42, 30), "eval": (43, 25), "far": (42 + APART, 25)}
    train, near, far = ([], [], [])
    for found in entries("emoji_mystery", draws):
        {"train": train, "eval": near, "far": far}[found[0]].append(
            ("eval" if found[0] == "far" else found[0], *found[1:])
        )
    counts = Counts("emoji_mystery"), Counts("emoji_mystery")
    list(select(train + near, counts[0]))
    list(select(train + far, counts[1]))
    assert (counts[0].overlap, counts[0].evaluation) == (25, 0)
    assert counts[1].evaluation >= 23


def test_more_candidates_than_seeds_between_the_draws_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"1,000,001 candidates reach into the evaluation's seeds"):
        make(tmp_path / "new", QUIET, candidates=APART + 1)
    assert not (tmp_path / "new").exists()


@given(st.lists(st.integers(0, 12), max_size=25), st.lists(st.integers(0, 12), max_size=12))
def test_of_equal_questions_the_first_stays_and_overlaps_leave_the_evaluation(train: list[int], evaluation: list[int]):
    counts = Counts("a")
    drawn = [("train", i, {"question": str(q)}, "") for i, q in enumerate(train)]
    drawn += [("eval", i, {"question": str(q)}, "") for i, q in enumerate(evaluation)]
    found = [(split, int(entry["question"])) for split, _, entry in select(drawn, counts)]
    kept = list(dict.fromkeys(train))
    held = [q for q in dict.fromkeys(evaluation) if q not in kept]
    assert found == [("train", q) for q in kept] + [("eval", q) for q in held]
    assert (counts.train, counts.evaluation) == (len(kept), len(held))
    assert counts.repeated == len(train) - len(kept)
    assert counts.overlap + counts.repeated_evaluation + len(held) == len(evaluation)


def test_an_entry_that_cannot_be_made_or_read_is_counted_with_its_reason_and_stops_nothing(
    tmp_path, monkeypatch, capsys
):
    def faulty(task, draws, stop=None):
        entry = {"question": "q", "answer": "a", "metadata": {}}
        yield "train", 0, entry, ""
        yield "train", 1, None, "fault: TypeError: no"
        yield "train", 2, entry | {"question": "\ud800"}, ""
        yield "train", 3, entry | {"question": "r", "answer": " "}, ""
        yield "train", 4, None, "clock"
        yield "eval", 0, entry | {"question": "s"}, ""

    monkeypatch.setattr(hard_mixture, "entries", faulty)
    (counts,) = make(tmp_path, QUIET, tasks=["codeio"])
    assert (counts.train, counts.evaluation, counts.faults.count, counts.left_out) == (1, 1, 3, {"clock": 1})
    show([counts], QUIET, 5)
    said = capsys.readouterr().err
    for part in (
        "left out: 3",
        "codeio, train 1: TypeError: no",
        "train 2: \\ud800 is half",
        "train 3: `answer` is ' '",
    ):
        assert part in said
    assert [p.answer for p in load_problems(tmp_path / "train.jsonl")] == ["a"]


def test_a_task_without_any_entry_is_an_error(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(hard_mixture, "entries", lambda *_: iter([("train", 0, None, "fault: no")]))
    with pytest.raises(UserError, match=r"nothing to train on for codeio\n.*left out: 1\ncodeio, train 0: no"):
        make(tmp_path, QUIET, tasks=["codeio"])
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_process_that_fails_or_dies_is_told_and_not_taken_for_the_end(monkeypatch, tmp_path: Path):
    with pytest.raises(UserError, match=r"cannot draw no_task: ValueError"):
        list(entries("no_task", {"train": (0, 1)}))
    dying = tmp_path / "draw.py"
    dying.write_text('import os\nprint(\'["train", 0, null, "clock"]\', flush=True)\nos._exit(3)\n')
    monkeypatch.setattr(draw, "__file__", str(dying))
    with pytest.raises(UserError, match=r"draws codeio ended by exit code 3"):
        list(entries("codeio", {"train": (0, 1)}))


def test_no_program_of_codeio_writes_where_the_caller_is_or_sees_its_environment(tmp_path: Path, monkeypatch, capfd):
    spy = tmp_path / "draw.py"
    spy.write_text(
        "import json, os\nopen('mark', 'w').write('x')\n"
        "seen = {'cwd': os.getcwd(), 'env': sorted(os.environ)}\n"
        "print(json.dumps(['train', 0, seen, '']))\nprint('[\"\", 0, null, \"\"]')\n"
    )
    monkeypatch.setattr(draw, "__file__", str(spy))
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.chdir(tmp_path)
    ((_, _, seen, _),) = entries("codeio", {"train": (0, 1)})
    assert "HF_TOKEN" not in seen["env"]
    assert seen["cwd"] != str(tmp_path) and not Path(seen["cwd"]).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draw.py"]


def test_a_program_without_a_certain_answer_is_left_out_before_it_runs():
    import reasoning_gym

    programs = reasoning_gym.create_dataset("codeio", size=1, seed=0)._jsonl_data
    named = [index for index, program in enumerate(programs) if draw.digest(program["code_sample"]) in LEFT_OUT]
    assert len(named) == len(LEFT_OUT)

    class Untouchable:
        _jsonl_data = programs

        def __getitem__(self, index: int) -> dict:
            raise AssertionError("it was run")

    import random

    seed = next(seed for seed in range(100_000) if random.Random(seed).choice(range(len(programs))) in named)
    found, reason = draw.entry(Untouchable(), 0, seed, LEFT_OUT)
    assert found is None and reason in set(LEFT_OUT.values())


def test_an_address_counts_in_what_is_asked_for_and_not_in_the_programs_text():
    class Fixed:
        def __init__(self, **entry: object) -> None:
            self.entry = {"question": "q", "answer": "a", "metadata": {}} | entry

        def __getitem__(self, index: int) -> dict:
            return self.entry

    address = "<P object at 0x7f5795556a10>"
    assert draw.entry(Fixed(question=f"# prints {address}"), 0, 0, {})[1] == ""
    assert draw.entry(Fixed(answer=address), 0, 0, {}) == (None, "address in memory")
    assert draw.entry(Fixed(metadata={"output": [address]}), 0, 0, {}) == (None, "address in memory")


def test_metadata_of_any_package_becomes_jsons_types_and_what_has_none_is_an_error():
    import numpy as np
    import sympy

    value = {"a": (1, np.int64(2)), 3: np.array([[1.5]]), "s": sympy.Integer(4), "n": float("nan"), "b": True, "f": 0.1}
    plain = draw.plain(value)
    assert json.loads(json.dumps(plain, allow_nan=False)) == {
        "a": [1, 2], "3": [[1.5]], "s": 4, "n": "nan", "b": True, "f": 0.1,
    }  # fmt: skip
    assert draw.plain(Fraction(1, 4)) == 0.25
    for wrong in ({(1, 2): 3}, {1}, b"x", object(), 1j):
        with pytest.raises(TypeError):
            draw.plain({"x": [wrong]})


def test_counts_stand_beside_the_papers_in_eighty_columns(capsys):
    found = [Counts(task, *numbers, repeated=2) for task, numbers in TABLE_3.items()]
    show(found, Console(width=80), 5000)
    said = capsys.readouterr().out
    assert said.count("38,948") == 2 and said.count("193") == 2
    assert all(task in said for task in TABLE_3) and "…" not in said
