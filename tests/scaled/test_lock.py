"""Two trainings in one folder: processes of their own, as the lock is held by a process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from scaled.errors import UserError
from scaled.lock import LOCK, locked
from scaled.plan import plan
from scaled.train import train
from tests.training import settings

HOLD = "import sys\nfrom scaled.lock import locked\nfrom pathlib import Path\nwith locked(Path(sys.argv[1])):\n    "
IN_USE = "is in use: another process trains in it"


@pytest.fixture
def trainer() -> Iterator[Callable[[Path], subprocess.Popen]]:
    """Another process that holds a run's folder until it is killed."""
    started = []

    def hold(run: Path) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLD + "print(1, flush=True)\n    input()", str(run)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"1\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.communicate()


def test_a_run_that_is_still_trained_is_not_resumed_and_one_whose_process_was_killed_is(
    four, tiny_model, tmp_path, trainer
):
    run = tmp_path / "run"
    shutil.copytree(four, run)
    before = (run / "metrics.jsonl").read_bytes()
    other = trainer(run)
    config = settings(tiny_model, run, updates=5)
    with pytest.raises(UserError, match=IN_USE):
        train(config, resume=True)
    assert any(IN_USE in line for line in plan(config, Console(quiet=True), resume=True))
    assert (run / "metrics.jsonl").read_bytes() == before
    other.kill()
    other.wait()
    train(config, resume=True)
    assert (run / "checkpoints/update-000005").is_dir()


def test_a_run_that_has_just_begun_is_not_said_to_be_in_need_of_removal(tiny_model, tmp_path, trainer):
    (tmp_path / "config.yaml").write_text("")
    trainer(tmp_path)
    with pytest.raises(UserError, match=IN_USE):
        train(settings(tiny_model, tmp_path))


def test_a_folder_that_another_run_took_while_the_model_was_loaded_is_not_written_over(
    tiny_model, tmp_path, trainer, monkeypatch
):
    run = tmp_path / "run"

    def take(begun: bool) -> Callable:
        def load_model(*arguments):
            run.mkdir(exist_ok=True)
            if begun:
                (run / "config.yaml").write_text("another")
            else:
                trainer(run)
            return loaded(*arguments)

        return load_model

    from scaled.model import load_model as loaded

    monkeypatch.setattr("scaled.build.load_model", take(begun=True))
    with pytest.raises(UserError, match="exists already"):
        train(settings(tiny_model, run))
    assert (run / "config.yaml").read_text() == "another"
    shutil.rmtree(run)
    monkeypatch.setattr("scaled.build.load_model", take(begun=False))
    with pytest.raises(UserError, match=IN_USE):
        train(settings(tiny_model, run))
    assert [path.name for path in run.iterdir()] == [LOCK]


def test_two_handles_in_one_process_exclude_each_other_and_the_second_may_follow_the_first(tmp_path):
    with locked(tmp_path), pytest.raises(UserError, match=IN_USE), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_the_lock_is_not_left_to_processes_that_were_started_meanwhile(tmp_path):
    with locked(tmp_path):
        command = [sys.executable, "-c", "print(1, flush=True); input()"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False)
    try:
        # Popen may return a moment before the system has closed what the new program does not inherit.
        assert child.stdout.readline() == b"1\n"
        with locked(tmp_path):
            pass
    finally:
        child.communicate(b"\n")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_folder_that_is_read_only_is_refused_before_the_model_is_loaded(four, tiny_model, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(four, run)
    (run / LOCK).unlink()
    run.chmod(0o555)
    try:
        with pytest.raises(UserError, match=r"cannot be written in .Permission denied"):
            train(settings(tiny_model, run, updates=5), resume=True)
    finally:
        run.chmod(0o755)


def test_a_lock_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / LOCK).mkdir()
    with pytest.raises(UserError, match=r"cannot be written in .Is a directory"), locked(tmp_path):
        pass


def test_a_disk_without_locks_does_not_keep_a_run_from_training(tmp_path, monkeypatch):
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with locked(tmp_path):
        assert (tmp_path / LOCK).exists()
