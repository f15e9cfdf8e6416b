"""Whole runs over ranks: as one process, stopped and resumed, and with a rank at fault."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from scaled.config_file import dump_config
from scaled.train import train
from tests.ranks.launch import torchrun
from tests.tiny import byte_tokenizer, make_tiny_model
from tests.training import log, same, settings, weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 that three ranks cannot share evenly, and a file of sixteen problems: two batches an epoch."""
    folder = tmp_path_factory.mktemp("ranks")
    make_tiny_model("qwen2", intermediate_size=25).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    rows = [{"messages": [{"role": "user", "content": f"{i} + {i}?"}], "answer": str(2 * i)} for i in range(16)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config(folder: Path, run: Path, **changes) -> Path:
    """The settings as a file for the command."""
    data = {"file": str(folder / "data.jsonl"), "held_out": 0}
    path = run.with_suffix(".yaml")
    path.write_text(dump_config(settings(folder / "model", run, threads=1, data=data, **changes)))
    return path


@pytest.fixture(scope="module")
def two(folder: Path) -> Path:
    """A run of four updates on two ranks; not to be changed."""
    torchrun(2, "scaled", "train", config(folder, folder / "two"))
    return folder / "two"


def near(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def test_two_ranks_train_as_one_process_does(folder, two):
    one = folder / "one"
    train(settings(folder / "model", one, data={"file": folder / "data.jsonl", "held_out": 0}))
    assert near(weights(one, 4), weights(two, 4)) < 1e-6
    for left, right in zip(log(one), log(two), strict=True):
        assert left.keys() == right.keys()
        for name, value in left.items():
            assert right[name] == (pytest.approx(value, rel=1e-3, abs=1e-9) if isinstance(value, float) else value)
    assert near(weights(one, 3), weights(two, 4)) > 1e-4  # control: an update makes a difference that is seen


def test_two_and_two_updates_are_four_to_the_bit_over_the_edge_of_an_epoch_and_other_ranks_go_on(folder, two):
    run = folder / "halves"
    torchrun(2, "scaled", "train", config(folder, run, updates=2))
    shutil.copytree(run, folder / "on_four")
    shutil.copytree(run, folder / "alone")
    torchrun(2, "scaled", "train", run, "--resume", "updates=4")
    assert same(weights(run, 4), weights(two, 4))
    assert log(run) == log(two)
    torchrun(4, "scaled", "train", folder / "on_four", "--resume", "updates=4", f"run={folder / 'on_four'}")
    assert near(weights(folder / "on_four", 4), weights(two, 4)) < 1e-6
    train(
        settings(folder / "model", folder / "alone", threads=1, data={"file": folder / "data.jsonl", "held_out": 0}),
        resume=True,
    )
    assert near(weights(folder / "alone", 4), weights(two, 4)) < 1e-6


@pytest.mark.parametrize("method", ["dense", "lora"])
def test_the_other_methods_train_over_ranks_as_in_one_process(folder, method):
    changes = {
        "method": method,
        "updates": 2,
        "dense": {"lr": 1e-2, "lr_min": 1e-3, "warmup": 1},
        "lora": {"rank": 4, "lr": 1e-2},
    }
    one, both = folder / f"{method}-1", folder / f"{method}-2"
    torchrun(2, "scaled", "train", config(folder, both, **changes))
    train(settings(folder / "model", one, data={"file": folder / "data.jsonl", "held_out": 0}, **changes))
    assert near(weights(one, 2), weights(both, 2)) < 1e-5
    assert near(weights(one, 1), weights(both, 2)) > 1e-4


# Faults


def test_a_loss_that_is_not_finite_in_one_rank_is_refused_by_all_and_nothing_moves(folder):
    run = folder / "nan"
    done = torchrun(2, "tests.ranks.faulty", "train", config(folder, run), check=False, FAULT="nan")
    assert done.returncode
    assert done.stderr.count("update 1 was refused: ") == 2
    assert same(weights(run, 0), start(folder))
    assert "rank 1: the loss of a microbatch is nan" in done.stderr


def test_ranks_that_draw_other_projections_are_found_before_a_sketch_is_summed(folder):
    done = torchrun(2, "tests.ranks.faulty", "train", config(folder, folder / "a"), check=False, FAULT="projections")
    assert done.returncode
    assert done.stderr.count("rank 1 draws other projections than rank 0 for update 1") == 2
    assert same(weights(folder / "a", 0), start(folder))


def start(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model/model.safetensors")


def test_a_rank_that_dies_ends_the_others_with_one_error_and_the_last_checkpoint_goes_on(folder, two):
    """That none waits for ever is seen by ``torchrun``'s own limit here."""
    run = folder / "dies"
    done = torchrun(2, "tests.ranks.faulty", "train", config(folder, run), check=False, FAULT="dies")
    assert done.returncode
    assert "rank 0 lost another rank" in done.stderr
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["update-000001", "update-000002"]
    torchrun(2, "scaled", "train", run, "--resume")
    assert same(weights(run, 4), weights(two, 4))


def test_a_signal_to_one_rank_stops_all_at_one_place_and_saves(folder, two):
    run = folder / "stopped"
    done = torchrun(2, "tests.ranks.faulty", "train", config(folder, run), check=False, FAULT="stop")
    assert done.returncode
    assert "stopped after update 2; go on with: logra train" in done.stdout
    torchrun(2, "scaled", "train", run, "--resume")
    assert same(weights(run, 4), weights(two, 4))


def test_a_truncated_part_of_a_checkpoint_is_one_clear_error_at_every_rank(folder, two):
    run = folder / "cut"
    shutil.copytree(two, run)
    (part,) = (run / "checkpoints/update-000004/state").glob("shard-00002*")
    part.write_bytes(part.read_bytes()[:-5])
    done = torchrun(2, "scaled", "train", run, "--resume", "updates=5", f"run={run}", check=False)
    assert done.returncode
    assert done.stderr.count(f"{part} is damaged") == 2
    assert f"resumes from {run}/checkpoints/update-000003" in done.stderr
