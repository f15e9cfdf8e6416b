"""The loop as a whole, on a model of two layers with random weights."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from scaled.errors import NumericalTrouble, UserError
from scaled.train import train
from tests.training import log, same, settings, weights


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
    with pytest.raises(UserError, match=r"20 batches in a row .*easier task"):
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
    with pytest.raises(
        UserError, match=r"20 batches in a row .*refused-batch-000020\.jsonl for extreme rewards"
    ) as caught:
        train(config)
    assert "easier task" not in str(caught.value)
    for row in log(tmp_path / "run"):
        assert "eval" in row or "the loss of a microbatch is" in row["skipped"]
