"""What an engine is sent, for each state that it may be in; recorded, not applied. (Applied: tests/engine.)"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scaled.engine.weights import Form
from scaled.errors import UserError
from scaled.policy_sync import outbox as module
from scaled.policy_sync.outbox import Outbox, write_weights
from scaled.ranks import ALONE
from tests.scaled.test_message_file import message


class Recorder:
    """An engine as far as its version goes."""

    follows = True

    def __init__(self, version: str = "default") -> None:
        self.at, self.sent = version, []

    def version(self) -> str:
        return self.at

    def follow(self, run: str, folder: Path, form: Form) -> None:
        self.sent.append(("follow", run, form))

    def send_full(self, update: int, model: Path, version: str) -> None:
        self.sent.append(("full", update, model))
        self.at = version

    def send_factors(self, update: int, digest: str, version: str) -> None:
        self.sent.append(("factors", update))
        self.at = version


@pytest.fixture
def outbox(tmp_path) -> Outbox:
    """At update 5, of which it began at 2."""
    found = Outbox(tmp_path / "sync", 2, tmp_path / "base", ALONE)
    for update in (3, 4, 5):
        found.add_factors(message(update=update))
    return found


def sent(outbox: Outbox, version: str) -> list:
    engine = Recorder(version)
    outbox.bring_up(engine)
    assert engine.at == outbox.version(outbox.update)
    return [what for what in engine.sent if what[0] != "follow"]


def test_an_engine_gets_what_it_lacks_and_a_strange_one_everything(outbox, tmp_path):
    everything = [("full", 2, tmp_path / "base"), ("factors", 3), ("factors", 4), ("factors", 5)]
    assert sent(outbox, "default") == everything
    assert sent(outbox, "another/4") == everything  # the same number, and another run's
    assert sent(outbox, outbox.version(4)) == [("factors", 5)]
    assert sent(outbox, outbox.version(5)) == []
    assert sent(outbox, outbox.version(1)) == everything  # before the base


def test_an_engine_is_told_how_to_hold_its_weights(tmp_path):
    for given, told in (((), Form("exact", "device")), ((Form("naive", "host"),), Form("naive", "host"))):
        outbox, engine = Outbox(tmp_path, 0, tmp_path, ALONE, *given), Recorder()
        outbox.bring_up(engine)
        assert engine.sent[0] == ("follow", outbox.run, told)


def test_a_checkpoint_becomes_the_base_and_engines_that_follow_go_on_by_factors(outbox, tmp_path):
    outbox.rebase(5, tmp_path / "checkpoint")
    assert sent(outbox, outbox.version(3)) == [("factors", 4), ("factors", 5)]
    outbox.prune()
    assert list(outbox.folder.iterdir()) == []
    assert sent(outbox, outbox.version(3)) == [("full", 5, tmp_path / "checkpoint")]
    outbox.add_factors(message(update=6))
    assert sent(outbox, "default") == [("full", 5, tmp_path / "checkpoint"), ("factors", 6)]


def test_all_weights_replace_those_before_and_nothing_of_theirs_stays(outbox):
    for update in (6, 7):
        outbox.add_full(update, [("w", torch.full((2, 3), float(update)))])
        assert sent(outbox, "default") == [("full", update, outbox.base)]
        outbox.prune()
    assert [path.name for path in outbox.folder.iterdir()] == ["weights-00000007"]


def test_after_so_many_updates_all_weights_are_wanted(outbox, monkeypatch):
    assert not outbox.full
    monkeypatch.setattr(module, "MOST_KEPT", 3)
    assert outbox.full
    outbox.add_full(5, [("w", torch.zeros(1, 1))])
    assert not outbox.full
    assert sent(outbox, outbox.version(4)) == [("factors", 5)]


def test_an_update_out_of_turn_is_a_fault_of_the_trainer(outbox):
    with pytest.raises(RuntimeError, match="update 7 does not follow 5"):
        outbox.add_factors(message(update=7))


def test_weights_are_written_some_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FILE_BYTES", 20)
    weights = {f"w{i}": torch.full((2, 2), float(i)) for i in range(5)}
    assert write_weights(tmp_path / "all", iter(weights.items()), ALONE) == 80
    files = sorted((tmp_path / "all").iterdir())
    assert len(files) == 3
    held = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert held.keys() == weights.keys()
    assert all(torch.equal(held[name], weights[name]) for name in weights)


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"set engine\.folder"):
        Outbox(tmp_path / "file", 0, tmp_path, ALONE)
    with pytest.raises(UserError, match="make room there"):
        write_weights(tmp_path / "file" / "all", [("w", torch.zeros(1))], ALONE)


def test_only_its_owner_reads_the_outbox(outbox):
    assert outbox.folder.stat().st_mode & 0o077 == 0
