"""Files over a wire: every byte, in order, to every worker; and whoever is gone is noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from scaled.engine.inbox import Wired
from scaled.errors import UserError
from scaled.policy_sync import wire
from scaled.policy_sync.wire import Meeting, Wire, WireBroken, Wiring, await_workers, listen

CPU = torch.device("cpu")
HERE = Wiring("127.0.0.1", 1, CPU)


def nothing_wrong() -> None:
    pass


def joined(workers: int, folder: Path, names: dict[str, int]) -> tuple[Wire, list[Future[dict[str, bytes]]]]:
    """The trainer's end, and workers that wait for these files and return what they got."""
    meeting, store = listen(replace(HERE, workers=workers))
    pool = ThreadPoolExecutor(workers)

    def work(number: int) -> dict[str, bytes]:
        inbox = Wired(meeting, number, CPU, 20)
        with inbox.factors(names) as found:
            assert found.stat().st_mode & 0o077 == 0
            return {file.name: file.read_bytes() for file in found.iterdir()}

    futures = [pool.submit(work, number) for number in range(workers)]
    pool.shutdown(wait=False)
    await_workers(store, meeting, nothing_wrong)
    return Wire(meeting, 0, store, CPU, 20), futures


@pytest.mark.parametrize("workers", [1, 2])
def test_every_worker_gets_every_byte_of_files_that_end_on_and_off_a_chunks_edge(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(wire, "CHUNK", 7)
    contents = {"empty": b"", "short": b"abc", "edge": bytes(range(14)), "long": os.urandom(40)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    sender, futures = joined(workers, tmp_path, {name: len(content) for name, content in contents.items()})
    for name, content in contents.items():
        sender.send(tmp_path / name, len(content), nothing_wrong)
    assert [future.result(20) for future in futures] == [contents] * workers


def test_a_file_that_became_shorter_is_one_error_and_the_worker_does_not_wait_for_the_rest(tmp_path):
    (tmp_path / "cut").write_bytes(b"abc")
    sender, (future,) = joined(1, tmp_path, {"cut": 4})
    with pytest.raises(UserError, match="has become shorter while it was sent"):
        sender.send(tmp_path / "cut", 4, nothing_wrong)
    sender.close()
    with pytest.raises(UserError, match="cut did not come whole from the trainer"):
        future.result(20)


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "a/b"])
def test_a_name_that_leads_out_of_the_folder_is_refused_before_anything_is_received(tmp_path, name):
    _, (future,) = joined(1, tmp_path, {name: 1})
    with pytest.raises(UserError, match="which is no plain name; refused"):
        future.result(20)


def test_a_worker_that_is_killed_is_noticed(tmp_path):
    (tmp_path / "large").write_bytes(bytes(10**8))
    meeting, store = listen(HERE)
    code = "import sys, time; from scaled.policy_sync.wire import *; m = Meeting(*eval(sys.argv[1]))\n"
    code += "Wire(m, 1, visit(m), torch.device('cpu'), 60); print('here', flush=True); time.sleep(60)"
    place = str((meeting.host, meeting.port, 1, "gloo"))
    with subprocess.Popen([sys.executable, "-c", code, place], stdout=subprocess.PIPE, text=True) as worker:
        await_workers(store, meeting, nothing_wrong)
        sender = Wire(meeting, 0, store, CPU, 60)
        assert worker.stdout.readline() == "here\n"
        worker.send_signal(signal.SIGSTOP)

        def check() -> None:  # it does not take the file, and is then killed
            worker.kill()

        with pytest.raises(WireBroken, match="the other side is gone"):
            sender.send(tmp_path / "large", 10**8, check)


def test_what_the_engine_says_meanwhile_ends_the_waiting():
    def refused() -> None:
        raise UserError("the engine has refused")

    meeting, store = listen(HERE)
    with pytest.raises(UserError, match="the engine has refused"):
        await_workers(store, meeting, refused)


def test_who_does_not_come_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(wire, "MEETING", timedelta(seconds=1))
    meeting, store = listen(replace(HERE, workers=2))
    store.add(wire.COME, 1)
    with pytest.raises(WireBroken, match="1 of 2 workers came"):
        await_workers(store, meeting, nothing_wrong)
    with pytest.raises(UserError, match=r"engine.meet_at 192\.0\.2\.1 is no address of this machine"):
        listen(replace(HERE, host="192.0.2.1"))
    del store
    with pytest.raises(UserError, match=r"the trainer is not at 127\.0\.0\.1:9 "):
        Wired(Meeting("127.0.0.1", 9, 1, "gloo"), 0, CPU, 1)
    with pytest.raises(UserError, match="this engine has no GPU"):
        Wired(Meeting("127.0.0.1", 9, 1, "nccl"), 0, CPU, 1)
