"""``logra eval``: its file of answers, what an interruption leaves, and the macro-average by hand."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scaled.errors import UserError
from scaled.evaluate_run import evaluate_run
from scaled.interrupt import Interrupted
from scaled.macro import macro_average
from scaled.records import Score
from scaled.rewards import Grader
from scaled.rollout.in_process import InProcess
from tests.training import log

WAYS = ["evaluation.samples=3", "evaluation.temperature=0.7", "evaluation.top_p=0.9"]


def answers(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(four, tmp_path_factory) -> list[dict]:
    out = tmp_path_factory.mktemp("whole") / "answers.jsonl"
    assert evaluate_run(four, WAYS, out) == out
    return answers(out)


def test_each_answer_is_a_row_with_its_score_behind_what_was_evaluated(whole):
    about, rows = whole[0]["evaluation"], whole[1:]
    assert about["evaluation"] == {"every": 0, "samples": 3, "greedy": True, "temperature": 0.7, "top_p": 0.9}
    assert len(rows) == 4 * (1 + 3)
    assert len({(row["kind"], row["id"], row["sample"]) for row in rows}) == 16
    for row in rows:
        assert row["outcome"] in ("right", "wrong")
        assert row["credit"] == (row["outcome"] == "right")
        assert 1 <= row["response_tokens"] <= 5
        assert isinstance(row["text"], str) and isinstance(row["truncated"], bool)


def test_it_gives_what_the_run_found_itself(four, tmp_path):
    out = evaluate_run(four, [], tmp_path / "answers.jsonl")
    kept = [row for row in answers(out)[1:] if row["kind"] == "sampled"]
    last = [row for row in log(four) if row.get("eval") == "sampled"][-1]
    assert last["pass_at_1"] == pytest.approx(np.mean([row["outcome"] == "right" for row in kept]))
    assert last["response_tokens"] == pytest.approx(np.mean([row["response_tokens"] for row in kept]))
    samples = {s["id"]: s["text"] for s in log_samples(four) if (s["kind"], s["update"]) == ("eval-sampled", 4)}
    assert samples == {row["id"]: row["text"] for row in kept}


def log_samples(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def test_one_that_was_interrupted_goes_on_to_the_same_answers(four, tmp_path, monkeypatch, capsys):
    out, asked, respond = tmp_path / "answers.jsonl", [], InProcess.respond
    ways = [*WAYS, "rollout.batch=2"]
    reference = evaluate_run(four, ways, tmp_path / "reference.jsonl")
    said = [line for line in capsys.readouterr().out.splitlines() if "held out" in line]

    def counted(self, problems, numbers, **given):
        asked.append(list(numbers))
        if len(asked) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return respond(self, problems, numbers, **given)

    monkeypatch.setattr(InProcess, "respond", counted)
    with pytest.raises(Interrupted):
        evaluate_run(four, ways, out)
    first = answers(out)
    assert 1 < len(first) < 17
    with out.open("ab") as file:
        file.write(b'{"kind": "sam')  # the machine stopped while it wrote
    evaluate_run(four, ways, out)
    assert answers(out) == answers(reference)
    assert [line for line in capsys.readouterr().out.splitlines() if "held out" in line] == said
    count = len(asked)
    evaluate_run(four, ways, out)  # all is there
    assert len(asked) == count
    assert [line for line in capsys.readouterr().out.splitlines() if "held out" in line] == said


def test_answers_of_another_evaluation_are_never_mixed_in(four, tmp_path):
    out = evaluate_run(four, WAYS, tmp_path / "answers.jsonl")
    before = out.read_bytes()
    for changed, said in (
        ("evaluation.temperature=1.5", r"evaluation\.temperature = 0\.7, and now it is 1\.5"),
        ("data.held_out=5", "`data.held_out=5` cannot be set"),  # other problems, of which many were trained on
        ("seed=6", "`seed=6` cannot be set"),
    ):
        with pytest.raises(UserError, match=said):
            evaluate_run(four, [*WAYS, changed], out)
    with pytest.raises(UserError, match="model = "):
        evaluate_run(four / "config.yaml", WAYS, out)
    assert out.read_bytes() == before
    other = tmp_path / "other.jsonl"
    other.write_text('{"kind": "a", "id": "b"}\n')
    with pytest.raises(UserError, match="no `sample`"):
        evaluate_run(four, WAYS, other)
    assert other.read_text() == '{"kind": "a", "id": "b"}\n'
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("a line without an end")
    with pytest.raises(UserError, match="no file of an evaluation's answers"):
        evaluate_run(four, WAYS, thesis)
    assert thesis.read_text() == "a line without an end"


def test_weights_that_were_written_anew_into_the_same_folder_do_not_get_the_old_answers(four, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(four / "checkpoints/update-000004/model", model)
    given = [*WAYS, f"model.path={model}"]
    out = evaluate_run(four / "config.yaml", given, tmp_path / "answers.jsonl")
    assert evaluate_run(four / "config.yaml", given, out) == out
    (model / "model.safetensors").touch()
    with pytest.raises(UserError, match="model = "):
        evaluate_run(four / "config.yaml", given, out)


def test_two_evaluations_never_write_into_one_file(four, tmp_path):
    out = tmp_path / "answers.jsonl"
    evaluate_run(four, WAYS, out)
    before = out.read_bytes()
    hold = "import sys\nfrom scaled.lock import locked_answers\nfrom pathlib import Path\n"
    hold += "with locked_answers(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", hold, out], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=r"answers\.jsonl is in use: another evaluation .* --out FILE"):
            evaluate_run(four, ["evaluation.samples=2"], out)
        other.kill()
    assert out.read_bytes() == before
    evaluate_run(four, WAYS, out)  # a lock ends with its process
    assert out.read_bytes() == before
    with pytest.raises(UserError, match=r"no folder for the answers .*other\.jsonl \(.*\); give --out FILE"):
        evaluate_run(four, WAYS, out / "other.jsonl")


def test_one_block_that_cannot_be_graded_does_not_end_an_evaluation_that_others_can(four, tmp_path, monkeypatch):
    given = [*WAYS, "rollout.batch=1"]
    grade = Grader.grade
    first = []

    def failing(self, responses):
        first.append(None)
        scores = grade(self, responses)
        return [Score(None, "failed", reason="broken") for _ in scores] if len(first) == 1 else scores

    monkeypatch.setattr(Grader, "grade", failing)
    rows = answers(evaluate_run(four, given, tmp_path / "answers.jsonl"))[1:]
    assert [row["outcome"] for row in rows].count("failed") == 1
    monkeypatch.setattr(
        Grader, "grade", lambda self, responses: [Score(None, "failed", reason="broken")] * len(responses)
    )
    with pytest.raises(UserError, match="failed on all 4 responses"):
        evaluate_run(four, given, tmp_path / "all.jsonl")


def test_prompts_are_checked_before_a_file_is_made(four, tmp_path):
    with pytest.raises(UserError, match=r"rollout\.context = 9; leave it out"):
        evaluate_run(four, ["rollout.context=9"], tmp_path / "answers.jsonl")
    assert not (tmp_path / "answers.jsonl").exists()


def test_a_task_with_few_problems_counts_as_much_as_one_with_many():
    sources = ["a"] * 8 + ["b"] * 2
    credits = np.array([[1.0]] * 8 + [[0.0], [0.5]])
    found = macro_average(sources, credits, np.ones((10, 1)), seed=0)
    assert found["by_source"] == {"a": 1.0, "b": 0.25}
    assert found["macro_score"] == 0.625  # not the mean over problems, 0.85
    low, high = found["macro_score_interval"]
    assert (low, high) == (0.5, 0.75)  # b's draws of two: 0, 0.25 or 0.5 with 1/4, 1/2, 1/4
    assert macro_average(["a"] * 10, credits, np.ones((10, 1)), seed=0)["macro_score"] is None


def test_a_response_that_could_not_be_graded_is_left_out_of_its_task_and_a_task_of_such_leaves_no_score():
    credits, graded = np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([[1, 0], [1, 1]])
    assert macro_average(["a", "b"], credits, graded, seed=0)["by_source"] == {"a": 1.0, "b": 0.5}
    none = macro_average(["a", "b"], credits, np.array([[0, 0], [1, 1]]), seed=0)
    assert none == {"macro_score": None, "macro_score_interval": None, "by_source": {"a": None, "b": 0.5}}


def test_draws_in_which_a_task_has_nothing_graded_are_left_out_and_none_is_left_of_many_such_tasks():
    sources = [f"task {number // 9}" for number in range(360)]
    graded = np.array([[number % 9 == 0] for number in range(360)], float)  # each is missed by a third of all draws
    found = macro_average(sources, np.ones((360, 1)), graded, seed=0)
    assert (found["macro_score"], found["macro_score_interval"]) == (1.0, None)
    few = macro_average(sources[:18], np.ones((18, 1)), graded[:18], seed=0)
    assert few["macro_score_interval"] == (1.0, 1.0)
