"""Files over a wire: every byte, in order, to every worker; and whoever is gone is noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from scaled.engine.inbox import Wired
from scaled.errors import UserError
from scaled.policy_sync import wire
from scaled.policy_sync.wire import Meeting, Wire, WireBroken, Wiring, await_workers, listen

CPU = torch.device("cpu")
HOST = "127.0.0.1"
HERE = Wiring(None, 1, CPU)


def nothing_wrong() -> None:
    pass


def joined(workers: int, names: dict[str, int]) -> tuple[Wire, list[Future[dict[str, bytes]]]]:
    """The trainer's end, and workers that wait for these files and return what they got."""
    meeting, store = listen(replace(HERE, workers=workers), HOST)
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
    sender, futures = joined(workers, {name: len(content) for name, content in contents.items()})
    for name, content in contents.items():
        sender.send(tmp_path / name, len(content), nothing_wrong)
    assert [future.result(20) for future in futures] == [contents] * workers


def test_a_file_that_became_shorter_is_one_error_and_the_worker_does_not_wait_for_the_rest(tmp_path):
    (tmp_path / "cut").write_bytes(b"abc")
    sender, (future,) = joined(1, {"cut": 4})
    with pytest.raises(UserError, match="has become shorter while it was sent"):
        sender.send(tmp_path / "cut", 4, nothing_wrong)
    sender.close()
    with pytest.raises(UserError, match="cut did not come whole from the trainer"):
        future.result(20)


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "a/b"])
def test_a_name_that_leads_out_of_the_folder_is_refused_before_anything_is_received(tmp_path, name):
    _, (future,) = joined(1, {name: 1})
    with pytest.raises(UserError, match="which is no plain name; refused"):
        future.result(20)


def test_a_worker_that_is_killed_is_noticed(tmp_path):
    (tmp_path / "large").write_bytes(bytes(10**8))
    meeting, store = listen(HERE, HOST)
    code = "import sys, time; from scaled.policy_sync.wire import *; m = Meeting(*eval(sys.argv[1]))\n"
    code += "kept = Wire(m, 1, visit(m), torch.device('cpu'), 60); print('here', flush=True); time.sleep(60)"
    place = str((meeting.host, meeting.port, 1, "gloo"))
    worker = subprocess.Popen([sys.executable, "-c", code, place], stdout=subprocess.PIPE, text=True)
    try:
        await_workers(store, meeting, nothing_wrong)
        sender = Wire(meeting, 0, store, CPU, 60)
        assert worker.stdout.readline() == "here\n"
        worker.send_signal(signal.SIGSTOP)  # it does not take the file, and is then killed
        with pytest.raises(WireBroken, match="the other side is gone"):
            sender.send(tmp_path / "large", 10**8, worker.kill)
        assert worker.wait(20) == -signal.SIGKILL
    finally:
        worker.kill()
        worker.communicate()


def test_what_the_engine_says_meanwhile_ends_the_waiting():
    def refused() -> None:
        raise UserError("the engine has refused")

    meeting, store = listen(HERE, HOST)
    with pytest.raises(UserError, match="the engine has refused"):
        await_workers(store, meeting, refused)


def test_a_worker_that_came_and_is_gone_before_all_are_joined_is_told_by_the_engine_and_not_waited_for(tmp_path):
    def refused() -> None:
        raise UserError("the engine has refused")

    meeting, store = listen(HERE, HOST)
    store.add(wire.COME, 1)
    await_workers(store, meeting, nothing_wrong)
    with pytest.raises(UserError, match="the engine has refused"):
        Wire(meeting, 0, store, CPU, 600, refused)


def test_members_that_do_not_all_join_are_one_error_in_time_whatever_the_patience(monkeypatch):
    monkeypatch.setattr(wire, "MEETING", timedelta(seconds=1))
    meeting, store = listen(HERE, HOST)
    with pytest.raises(UserError, match=r"did not all meet .*not in 1 seconds.*is engine\.tensor_parallel"):
        Wire(meeting, 0, store, CPU, 600)


def test_a_wire_is_closed_twice_without_trouble_and_a_worker_that_cannot_write_leaves_it(tmp_path):
    (tmp_path / "some").write_bytes(b"abc")
    meeting, store = listen(HERE, HOST)
    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(Wired, meeting, 0, CPU, 20)
        sender = Wire(meeting, 0, store, CPU, 20)
        inbox = worker.result(20)
    with pytest.raises(UserError, match="some did not come whole"):
        inbox._receive(tmp_path / "gone", "some", 3)
    with pytest.raises(WireBroken):
        sender.send(tmp_path / "some", 3, nothing_wrong)
    inbox.close()
    for _ in range(2):
        sender.close()


def test_the_trainer_is_met_at_the_address_by_which_it_reaches_an_engine():
    assert listen(HERE, "127.0.0.1")[0].host == "127.0.0.1"
    assert wire.address_towards("localhost") in ("127.0.0.1", "::1")
    with pytest.raises(UserError, match=r"nonsense\.invalid is no address that is reached from here"):
        listen(HERE, "nonsense.invalid")


def test_who_does_not_come_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(wire, "MEETING", timedelta(seconds=1))
    monkeypatch.setattr(wire, "VISIT", timedelta(seconds=1))
    meeting, store = listen(replace(HERE, workers=2), HOST)
    store.add(wire.COME, 1)
    with pytest.raises(UserError, match=r"1 of an engine's 2 workers came.*engine.tensor_parallel.*engine.meet_at"):
        await_workers(store, meeting, nothing_wrong)
    with pytest.raises(UserError, match=r"engine.meet_at 192\.0\.2\.1 is no address of this machine"):
        listen(replace(HERE, host="192.0.2.1"), HOST)
    del store
    with pytest.raises(UserError, match=r"the trainer is not at 127\.0\.0\.1:9 "):
        Wired(Meeting("127.0.0.1", 9, 1, "gloo"), 0, CPU, 1)
    with pytest.raises(UserError, match="this engine has no GPU"):
        Wired(Meeting("127.0.0.1", 9, 1, "nccl"), 0, CPU, 1)
