"""An engine that dies with an update half received or half applied, and comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import psutil
import pytest
import torch

from scaled.policy_sync.client import EngineClient, EngineGone
from scaled.policy_sync.outbox import Outbox
from scaled.policy_sync.server import EngineProcess, EngineSettings
from scaled.policy_sync.wire import Wiring
from scaled.ranks import ALONE
from scaled.sync_check import Trainer
from tests.engine.setting import PYTHON

WIRINGS = {"folder": None, "broadcast": Wiring(None, 1, torch.device("cpu"))}


@pytest.fixture(scope="module")
def process(model: Path) -> Iterator[EngineProcess]:
    found = EngineProcess(EngineSettings(PYTHON, model, model.parent / "killed.log", max_model_len=64))
    yield found
    found.stop()


def core(process: EngineProcess) -> psutil.Process:
    """The process that has the weights."""
    children = psutil.Process(process.process.pid).children(recursive=True)
    return next(child for child in children if "EngineCore" in " ".join(child.cmdline()))


class Deadly(EngineClient):
    """Kills the engine's core when it is to take an update: before it can have answered."""

    victim: psutil.Process | None = None

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/update_weights" and self.victim is not None:
            self.victim.suspend()
            Timer(1, self.victim.kill).start()
        return super()._post(path, body)


@pytest.mark.parametrize("transport", ["folder", "broadcast"])
def test_an_engine_killed_in_a_sync_is_one_error_and_has_every_bit_once_it_is_back(process, tmp_path, transport):
    settings = process.settings
    trainer = Trainer.of(settings.model, 8, settings.dtype, 1e-3)
    outbox = Outbox(tmp_path, 0, settings.model, ALONE)
    client = Deadly(process.url, 60, wiring=WIRINGS[transport], token=settings.token)
    with client:
        process.await_health(client)
        for _ in range(2):
            outbox.add_factors(trainer.step())
            outbox.bring_up(client)
        outbox.add_factors(trainer.step())
        client.victim = core(process)
        with pytest.raises(EngineGone):
            outbox.bring_up(client)
        client.victim = None
        until = time.monotonic() + 60
        while not process.died():
            assert time.monotonic() < until
            time.sleep(0.5)
        process.start()
        assert not process.died()
        process.await_health(client)
        outbox.bring_up(client)
        assert client.version() == outbox.version(3)
        assert client.differing(trainer.fingerprints()) == []
