"""Trackers, read back by TensorBoard's own reader; of Weights & Biases a stand-in is called."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scaled import trackers
from scaled.errors import UserError
from scaled.trackers import Tracker, numbers, opened_trackers, require_packages
from scaled.train import train
from tests.pages import evaluation_row, update_row
from tests.training import settings


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def expected(rows: list[dict]) -> dict[str, list[tuple[int, float]]]:
    """What the rows hold of numbers, by name."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        prefix = f"eval/{row['eval']}/" if "eval" in row else ""
        for key, value in row.items():
            if type(value) in (int, float):
                found.setdefault(prefix + key, []).append((row["update"], pytest.approx(value, rel=1e-6)))
            elif type(value) is list:
                for end, number in zip(("low", "high"), value, strict=True):
                    found.setdefault(f"{prefix}{key}/{end}", []).append(
                        (row["update"], pytest.approx(number, rel=1e-6))
                    )
    return found


def test_tensorboard_has_every_number_of_the_log_once_also_after_a_resume(tiny_model, tmp_path):
    run = tmp_path / "run"
    train(settings(tiny_model, run, updates=3, trackers=["tensorboard"]))
    log = (run / "metrics.jsonl").read_text()
    assert scalars(run / "tensorboard") == expected([json.loads(line) for line in log.splitlines()])

    # As if it had been stopped after update 2: what came later was logged already, and is taken again.
    (run / "checkpoints/update-000003").rename(tmp_path / "later")
    train(settings(tiny_model, run, updates=4, trackers=["tensorboard"]), resume=True)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows if "eval" not in row] == [1, 2, 3, 4]
    assert scalars(run / "tensorboard") == expected(rows)


def test_numbers_have_the_names_of_the_log_and_texts_truths_and_nothing_are_none():
    row = evaluation_row(3, "greedy", 0.5, by_source={"maze": 0.25, "none": None}, note="text", flag=True)
    found = numbers(row)
    assert (found["eval/greedy/pass_at_1"], found["eval/greedy/by_source/maze"]) == (0.5, 0.25)
    assert (found["eval/greedy/interval/low"], found["eval/greedy/interval/high"]) == (0.44, 0.56)
    assert not {name for name in found if name.endswith(("none", "note", "flag", "/eval", "interval"))}
    skipped = numbers(update_row(2, skipped="no signal", q=math.inf))
    assert skipped["q"] == math.inf
    assert not {"skipped", "method", "mismatch_kl"} & skipped.keys()


@pytest.mark.parametrize("made", [None, "wandb"])
def test_a_package_that_is_missing_is_one_error_and_a_folder_of_its_name_is_no_package(
    tiny_model, tmp_path, monkeypatch, made
):
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(path for path in sys.path if "site-packages" not in path)])
    if made:
        (tmp_path / made).mkdir()  # such as wandb leaves where it ran
    with pytest.raises(UserError, match="pip install wandb"):
        train(settings(tiny_model, tmp_path / "run", trackers=["wandb"]))
    assert not (tmp_path / "run").exists()
    require_packages([])


def test_a_tracker_that_cannot_be_started_leaves_a_folder_that_a_run_can_have(tiny_model, tmp_path, monkeypatch):
    def refuse(*_: object) -> Tracker:
        (tmp_path / "run" / "wandb").mkdir()
        raise RuntimeError("no API key")

    monkeypatch.setattr(trackers, "require_packages", lambda _: None)
    monkeypatch.setattr("scaled.run.require_packages", lambda _: None)
    monkeypatch.setitem(trackers.STARTS, "wandb", refuse)
    with pytest.raises(UserError, match=r"wandb cannot be started \(no API key\).*WANDB_MODE=offline"):
        train(settings(tiny_model, tmp_path / "run", updates=1, trackers=["tensorboard", "wandb"]))
    train(settings(tiny_model, tmp_path / "run", updates=1, trackers=["tensorboard"]))


def failing_at(update: int) -> tuple[list[int], Callable[..., Tracker]]:
    seen: list[int] = []

    def log(values: dict, step: int) -> None:
        seen.append(step)
        if step == update:
            raise ConnectionError("the network is down")

    return seen, lambda *_: Tracker("wandb", log, lambda: seen.append(-1))


def test_a_tracker_that_fails_in_a_run_is_named_once_and_the_others_go_on(tiny_model, tmp_path, monkeypatch, caplog):
    seen, start = failing_at(2)
    monkeypatch.setitem(trackers.STARTS, "wandb", start)
    config = settings(tiny_model, tmp_path / "run", trackers=["wandb", "tensorboard"])
    (tmp_path / "run").mkdir()
    with opened_trackers(config, update=0, resume=False) as track:
        for update in (1, 2, 3, 4):
            track(update_row(update))
    assert seen == [1, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "wandb has failed and gets no further numbers; the run goes on: the network is down"
    ]
    assert [step for step, _ in scalars(tmp_path / "run" / "tensorboard")["reward"]] == [1, 2, 3, 4]


def test_wandb_gets_each_row_at_its_update_and_a_resumed_run_the_id_it_had(tiny_model, tmp_path, monkeypatch):
    calls: list[tuple] = []
    run = SimpleNamespace(
        define_metric=lambda name, step_metric: calls.append((name, step_metric)),
        log=lambda values: calls.append((values["update"], values["reward"])),
        finish=lambda: calls.append(("finish",)),
    )

    def init(**how: object) -> SimpleNamespace:
        calls.append((how["project"], how["name"], how["dir"], how["id"], how["resume"]))
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=lambda **_: None))
    folder = tmp_path / "run"
    (folder / "wandb").mkdir(parents=True)
    config = settings(tiny_model, folder, trackers=["wandb", "wandb"])
    with opened_trackers(config, update=0, resume=False) as track:
        track(update_row(1, reward=0.25))
    for name in ("offline-run-20261201_030707-f5y13ydv", "latest-run"):
        (folder / "wandb" / name).mkdir()
    with opened_trackers(config, update=1, resume=True) as track:
        track(update_row(2, reward=0.75))
    assert calls == [
        ("logra", "run", str(folder), None, None),
        ("*", "update"),
        (1, 0.25),
        ("finish",),
        ("logra", "run", str(folder), "f5y13ydv", "allow"),
        ("*", "update"),
        (2, 0.75),
        ("finish",),
    ]
