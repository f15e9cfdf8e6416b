"""What goes wrong with a run: refused before anything is made, or ended with everything saved."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from time import sleep

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from scaled.checkpoint import _seal
from scaled.errors import NumericalTrouble, UserError
from scaled.interrupt import Interrupted
from scaled.rewards import Grader
from scaled.train import train
from tests.training import log, same, settings, weights


def test_a_run_folder_is_not_written_over(four, tiny_model):
    before = (four / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="--resume"):
        train(settings(tiny_model, four))
    assert (four / "metrics.jsonl").read_bytes() == before


def test_a_run_that_never_saved_is_not_said_to_be_resumable(tiny_model, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("")
    with pytest.raises(UserError, match="no checkpoint to resume from, so remove it"):
        train(settings(tiny_model, tmp_path / "run"))


@pytest.mark.parametrize("run", ["file", "file/below"])
def test_a_run_folder_that_cannot_be_made_is_named(tiny_model, tmp_path, run):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="no folder to write in"):
        train(settings(tiny_model, tmp_path / run))
    assert (tmp_path / "file").read_text() == "mine"


def test_resuming_with_another_rank_is_refused_by_name(four, tiny_model):
    with pytest.raises(UserError, match="rank"):
        train(settings(tiny_model, four, updates=5, logra={"rank": 5, "update_ratio": 0.1}), resume=True)


def test_resuming_without_a_checkpoint_says_so(tiny_model, tmp_path):
    with pytest.raises(UserError, match="no checkpoint"):
        train(settings(tiny_model, tmp_path / "run"), resume=True)


def test_a_model_without_the_target_layers_is_refused_before_the_folder_is_made(tiny_model, tmp_path):
    config = settings(tiny_model, tmp_path / "run", logra={"targets": ["c_attn"]})
    with pytest.raises(UserError, match=r"c_attn.*q_proj"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_ctrl_c_saves_and_the_resumed_run_ends_as_if_never_stopped(four, tiny_model, tmp_path):
    config = settings(tiny_model, tmp_path / "run")
    rows = tmp_path / "run/metrics.jsonl"

    def interrupt_after_two_updates():
        while not rows.exists() or len(rows.read_text().splitlines()) < 4:
            if done.wait(0.005):
                return
        signal.raise_signal(signal.SIGINT)

    done = threading.Event()
    watcher = threading.Thread(target=interrupt_after_two_updates)
    watcher.start()
    with pytest.raises(Interrupted):
        train(config)
    done.set()
    watcher.join()
    assert len([row for row in log(tmp_path / "run") if "eval" not in row]) < 4
    train(config, resume=True)
    assert same(weights(tmp_path / "run", 4), weights(four, 4))
    assert [row["update"] for row in log(tmp_path / "run") if "eval" not in row] == [1, 2, 3, 4]


def test_a_killed_process_leaves_a_run_that_resumes_exactly(four, tiny_model, tmp_path):
    config = settings(tiny_model, tmp_path / "run")
    (tmp_path / "config.json").write_text(config.model_dump_json())
    script = (
        "import sys, torch\nfrom scaled.config import RunConfig\nfrom scaled.train import train\n"
        "torch.set_num_threads(int(sys.argv[2]))\n"
        "if __name__ == '__main__':\n    train(RunConfig.model_validate_json(open(sys.argv[1]).read()))\n"
    )
    (tmp_path / "job.py").write_text(script)
    job = subprocess.Popen(
        [sys.executable, tmp_path / "job.py", tmp_path / "config.json", str(torch.get_num_threads())],
        env={"PYTHONPATH": str(Path.cwd()), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.DEVNULL,
    )
    while not list((tmp_path / "run/checkpoints").glob("update-000002")) and job.poll() is None:
        sleep(0.02)
    job.kill()
    job.wait()
    train(config, resume=True)
    assert same(weights(tmp_path / "run", 4), weights(four, 4))


def test_an_update_that_ruins_the_policy_is_an_error_and_never_a_checkpoint(tiny_model, tmp_path, monkeypatch):
    config = settings(tiny_model, tmp_path / "run")
    monkeypatch.setattr("scaled.probe.Probe.realised_kl", lambda probe: float("nan"))
    with pytest.raises(NumericalTrouble, match=r"update \d has ruined the policy: its realised KL is (nan|inf)"):
        train(config)
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_reward_that_breaks_in_the_middle_costs_no_update(four, tiny_model, tmp_path):
    config = settings(tiny_model, tmp_path / "run", checkpoint={"every": 0, "keep_last": 5}, updates=3)
    with pytest.MonkeyPatch.context() as patch:
        grade = Grader.grade

        def breaks_in_the_third(grader, responses):
            rows = tmp_path / "run/metrics.jsonl"
            if rows.exists() and rows.read_text().count('"reward"') == 2:
                raise UserError("the reward is broken")
            return grade(grader, responses)

        patch.setattr(Grader, "grade", breaks_in_the_third)
        with pytest.raises(UserError, match=r"the reward is broken\. Update 2 is saved; go on with: logra train"):
            train(config)
    train(config, resume=True)
    assert same(weights(tmp_path / "run", 3), weights(four, 3))


@pytest.mark.parametrize(
    "change",
    [
        {"batch": -5},
        {"batch": "4"},
        {"batch": 10**30},
        {"update": None},
        {"update": 3},
        {"baseline": "1.5"},
        {"baseline": float("nan")},
        {"baseline": 10**400},
        {"more": 1},
        {"method": {}},
        {"method": None},
        {"method.update": 5.5},
        {"method.update": -7},
        {"method.mismatch": "x"},
        {"method.mismatch": -3.0},
        {"method.mismatch": float("nan")},
    ],
)
def test_a_state_of_another_kind_is_refused_before_the_logs_are_rewound(four, tiny_model, tmp_path, change):
    shutil.copytree(four, tmp_path / "run")
    checkpoint = tmp_path / "run/checkpoints/update-000004"
    numbers = checkpoint / "state/numbers.json"
    held = json.loads(numbers.read_text())
    for key, value in change.items():
        part = held["method"] if key.startswith("method.") else held
        part[key.removeprefix("method.")] = value
    numbers.write_text(json.dumps(held))
    (checkpoint / "state/files.json").unlink()
    _seal(checkpoint)
    before = (tmp_path / "run/metrics.jsonl").read_text()
    with pytest.raises(UserError, match=r"is not that of this run \([^\n]*\); move"):
        train(settings(tiny_model, tmp_path / "run", updates=5), resume=True)
    assert (tmp_path / "run/metrics.jsonl").read_text() == before


@pytest.mark.parametrize(("method", "bad"), [("logra", -1.0), ("logra", float("nan")), ("dense", float("inf"))])
def test_a_moment_that_training_cannot_have_made_is_refused(tiny_model, tmp_path, method, bad):
    """NaN would go on unseen: the step of an update does not depend on the size of its direction."""
    run = tmp_path / "run"
    train(settings(tiny_model, run, method=method, updates=1))
    state = run / "checkpoints/update-000001/state"
    (part,) = state.glob("*.safetensors")
    with safe_open(part, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    next(iter(tensors.values())).flatten()[0] = bad
    save_file(tensors, part, metadata)
    (state / "files.json").unlink()
    _seal(state.parent)
    with pytest.raises(UserError, match="moment"):
        train(settings(tiny_model, run, method=method, updates=2), resume=True)


def test_a_folder_that_is_no_run_is_not_to_be_removed(tiny_model, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match=r"exists already: it is not empty, and no run's; set run=FOLDER$"):
        train(settings(tiny_model, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_problem_that_leaves_no_room_is_named_before_the_folder_is_made(tiny_model, tmp_path):
    config = settings(tiny_model, tmp_path / "run", rollout={"prompts": 8, "max_new_tokens": 5000})
    with pytest.raises(UserError, match=r"problem .*max_new_tokens = 5000 make more than the model's context of 2048"):
        train(config)
    assert not (tmp_path / "run").exists()
