"""The loop as a whole, on a model of two layers with random weights."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from time import sleep

import pytest
import torch
from safetensors.torch import load_file

from scaled.config import RunConfig
from scaled.errors import NumericalTrouble, UserError
from scaled.interrupt import Interrupted
from scaled.train import train

VARIES = ("seconds", "seconds_rollout", "seconds_train", "seconds_probe", "seconds_update", "peak_bytes")


def settings(model: Path, run: Path, compute_dtype: str = "float32", **changes) -> RunConfig:
    base = {
        "run": run,
        "updates": 4,
        "microbatch": 3,
        "seed": 5,
        "reward": "tests.checksum:score",
        "model": {"path": str(model), "compute_dtype": compute_dtype},
        "data": {"task": "arithmetic", "held_out": 4},
        "rollout": {"prompts": 8, "max_new_tokens": 5},
        "logra": {"rank": 4, "update_ratio": 0.1},
        "control": {"positions": 12, "budget_max": 1e-4, "budget_min": 1e-5, "horizon": 4},
        "checkpoint": {"every": 1, "keep_last": 5},
    }
    return RunConfig.model_validate(base | changes)


def log(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in VARIES} for row in rows]


def weights(run: Path, update: int) -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoints/update-{update:06d}/model/model.safetensors")


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def four(tiny_model, tmp_path_factory):
    """A run of four updates."""
    run = tmp_path_factory.mktemp("four") / "run"
    train(settings(tiny_model, run))
    return run


def test_the_same_run_twice_gives_the_same_log_and_weights(four, tiny_model, tmp_path):
    train(settings(tiny_model, tmp_path / "run"))
    assert log(tmp_path / "run") == log(four)
    assert same(weights(tmp_path / "run", 4), weights(four, 4))


def test_another_seed_gives_another_run(four, tiny_model, tmp_path):
    train(settings(tiny_model, tmp_path / "run", seed=6))
    assert log(tmp_path / "run") != log(four)


def test_weights_move_and_only_the_selected_ones(four, tiny_model):
    before, after = load_file(tiny_model / "model.safetensors"), weights(four, 4)
    for name in before:
        selected = "_proj" in name
        assert torch.equal(before[name], after[name]) != selected, name


def test_two_updates_and_two_resumed_are_four_to_the_bit(four, tiny_model, tmp_path):
    run = tmp_path / "run"
    train(settings(tiny_model, run, updates=2))
    train(settings(tiny_model, run, updates=4), resume=True)
    updates = [row for row in log(run) if "eval" not in row]
    assert updates == [row for row in log(four) if "eval" not in row]
    assert same(weights(run, 4), weights(four, 4))


def test_two_and_two_are_four_with_dense_adam_too(tiny_model, tmp_path):
    def run(name, updates, resume=False):
        config = settings(tiny_model, tmp_path / name, method="dense", updates=updates, dense={"lr": 1e-3})
        train(config, resume=resume)

    run("whole", 4)
    run("parts", 2)
    run("parts", 4, resume=True)
    assert same(weights(tmp_path / "parts", 4), weights(tmp_path / "whole", 4))
    assert not same(weights(tmp_path / "parts", 4), weights(tmp_path / "parts", 2))


def test_rows_after_the_last_checkpoint_do_not_stand_twice_when_resumed(four, tiny_model, tmp_path):
    run = tmp_path / "run"
    train(settings(tiny_model, run, updates=3))
    newest = run / "checkpoints/update-000003"
    newest.rename(run / "checkpoints/lost")
    train(settings(tiny_model, run, updates=4), resume=True)
    assert [row["update"] for row in log(run) if "eval" not in row] == [1, 2, 3, 4]
    assert same(weights(run, 4), weights(four, 4))


def test_every_update_meets_its_budget_and_says_what_it_realised(four):
    for row in log(four):
        if "eval" not in row:
            assert row["predicted_kl"] <= row["budget"] * (1 + 1e-9)
            assert row["alpha"] == 3 or row["predicted_kl"] == pytest.approx(row["budget"])
            assert 0.5 < row["realised_kl"] / row["predicted_kl"] < 2
            assert row["q_se"] > 0 and row["sketch_norm"] > 0


@pytest.mark.parametrize("changed", [{"microbatch": 8}, {"microbatch": 1}])
def test_the_split_into_microbatches_does_not_change_an_update(four, tiny_model, tmp_path, changed):
    train(settings(tiny_model, tmp_path / "run", updates=1, **changed))
    now, then = log(tmp_path / "run")[2], log(four)[2]
    assert now["update"] == then["update"] == 1
    for key in ("sketch_norm", "q", "alpha", "realised_kl"):
        assert now[key] == pytest.approx(then[key], rel=1e-4), key  # fp32 sums in another order


@pytest.mark.parametrize("kind", ["reinforce", "grpo"])
def test_every_loss_trains(tiny_model, tmp_path, kind):
    train(settings(tiny_model, tmp_path / "run", updates=1, loss={"kind": kind}))
    assert log(tmp_path / "run")[2]["update_norm"] > 0


# ``exact`` measures at α = 1, a step whose cubic term is part of it; the finite difference has none of it.
@pytest.mark.parametrize(("probe", "tolerance"), [("finite_difference", 1e-3), ("exact", 0.15)])
def test_the_other_probes_agree_with_the_jvp(four, tiny_model, tmp_path, probe, tolerance):
    control = settings(tiny_model, tmp_path).control.model_dump() | {"probe": probe}
    train(settings(tiny_model, tmp_path / "run", updates=1, control=control))
    assert log(tmp_path / "run")[2]["q"] == pytest.approx(log(four)[2]["q"], rel=tolerance)


def test_bf16_compute_samples_and_trains_the_same_policy_and_keeps_fp32_weights(tiny_model, tmp_path):
    train(settings(tiny_model, tmp_path / "run", updates=1, compute_dtype="bfloat16"))
    row = log(tmp_path / "run")[2]
    assert row["importance_max"] < 1.1, "the rollout was computed in another type"
    assert row["realised_kl"] > 0
    assert all(weight.dtype == torch.float32 for weight in weights(tmp_path / "run", 1).values())


def test_a_batch_without_signal_is_skipped_and_moves_nothing(tiny_model, tmp_path):
    config = settings(tiny_model, tmp_path / "run", reward="exact_match")
    with pytest.raises(UserError, match="20 batches in a row"):
        train(config)
    rows = [row for row in log(tmp_path / "run") if "eval" not in row]
    assert len(rows) == 20
    assert all("no signal" in row["skipped"] and row["update"] == 1 for row in rows)
    assert [row["batch"] for row in rows] == list(range(1, 21))
    assert rows[-1]["baseline"] < rows[0]["baseline"] < 0, "the baseline takes skipped batches in"


def test_a_loss_that_is_not_finite_stops_the_run_with_weights_of_the_last_update(tiny_model, tmp_path):
    config = settings(tiny_model, tmp_path / "run", reward="tests.checksum:huge")
    with pytest.raises(NumericalTrouble, match="refused-batch-000001"):
        train(config)
    kept = (tmp_path / "run/refused-batch-000001.jsonl").read_text().splitlines()
    assert len(kept) == 8
    assert same(weights(tmp_path / "run", 0), load_file(tiny_model / "model.safetensors"))


def test_told_to_skip_a_loss_that_is_not_finite_is_logged_and_passed_by(tiny_model, tmp_path):
    config = settings(tiny_model, tmp_path / "run", reward="tests.checksum:huge", on_non_finite="skip")
    with pytest.raises(UserError, match="20 batches in a row"):
        train(config)
    for row in log(tmp_path / "run"):
        assert "eval" in row or "the loss of a microbatch is" in row["skipped"]


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
