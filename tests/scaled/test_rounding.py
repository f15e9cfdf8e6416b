"""What follows from an engine's rounding: the verdict of ``logra bench rounding``, with rows made up (measured in
tests/engine), and why a run stops."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from scaled.bench import rounding as module
from scaled.config_engines import EngineConfig
from scaled.errors import UserError
from scaled.policy_sync.compare import Went
from scaled.policy_sync.server import EngineSettings
from scaled.train import require_agreement


@pytest.mark.parametrize(
    ("equal", "well", "said"),
    [
        ((1, 0.4, 0.3), True, "exact: every entry is bf16 of the trainer's; naive: some are not"),
        ((1 - 1e-9, 0.4, 0.3), False, "exact: NOT every entry is bf16 of the trainer's"),
        ((1, 1, 0.3), False, "naive: NO entry differs, so nothing is shown"),
    ],
)
def test_exact_must_be_equal_in_every_entry_and_the_control_must_not(monkeypatch, tmp_path, capsys, equal, well, said):
    shares = dict(zip(module.ROUNDINGS, equal, strict=True))

    def follow(client: None, model: Path, rounding: str, folder: Path, **options: object) -> module.Row:
        return module.Row(rounding, shares[rounding], Went(0.5, 0.25), 1e-3, 0.1, 0.01)

    monkeypatch.setattr(module, "engine", lambda *_: nullcontext())
    monkeypatch.setattr(module, "follow", follow)
    settings = EngineSettings(tmp_path, tmp_path, tmp_path / "log", "bfloat16")
    assert module.bench_rounding(settings, Console(width=200), rank=8, updates=3) is well
    out = capsys.readouterr().out
    assert said in out
    assert "50.00%" in out and "25.00%" in out


@pytest.mark.parametrize(
    ("rounding", "verified", "said"),
    [("exact", 1, "though their weights are equal"), ("naive", 0, r"drift apart by engine\.rounding=naive")],
)
def test_engines_that_round_are_not_blamed_for_other_bits_when_they_have_drifted(rounding, verified, said):
    calls = []
    rollout = SimpleNamespace(verify=lambda: calls.append(1))
    run = SimpleNamespace(config=SimpleNamespace(engine=EngineConfig(rounding=rounding)), rollout=rollout)
    require_agreement(run, 0.09)
    require_agreement(run, None)
    assert calls == []
    with pytest.raises(UserError, match=said):
        require_agreement(run, 0.11)
    assert len(calls) == verified
