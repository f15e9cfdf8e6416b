"""Whoever does not have an engine's token gets nothing from it but its health."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from scaled.engine.token import TOKEN, RequireToken
from scaled.errors import UserError
from scaled.policy_sync.client import EngineClient
from scaled.policy_sync.server import EngineProcess, EngineSettings


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "reached"})


def answer(path: str, header: bytes | None, kind: str = "http") -> dict[str, Any]:
    """The first message that comes back."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [] if header is None else [(b"authorization", header)]
    asyncio.run(RequireToken(app)({"type": kind, "path": path, "headers": headers}, None, send))
    return sent[0]


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "secret")


@pytest.mark.parametrize("path", ["/update_weights", "/v1/completions", "/health/../update_weights", "/healthy", "/"])
@pytest.mark.parametrize("header", [None, b"", b"secret", b"Bearer ", b"Bearer secre", b"Bearer secrets", b"\xff"])
def test_without_the_whole_token_every_path_is_refused(path, header):
    assert answer(path, header)["status"] == 401


def test_with_it_all_are_open_and_health_without():
    assert answer("/update_weights", b"Bearer secret") == {"type": "reached"}
    assert answer("/health", None) == {"type": "reached"}


def test_a_websocket_is_closed():
    assert answer("/v1/realtime", None, "websocket")["type"] == "websocket.close"


@pytest.mark.parametrize("value", [None, ""])
def test_an_engine_without_a_token_does_not_start(monkeypatch, value):
    monkeypatch.delenv(TOKEN) if value is None else monkeypatch.setenv(TOKEN, value)
    with pytest.raises(RuntimeError, match=f"set {TOKEN} to a secret"):
        RequireToken(app)


@pytest.mark.parametrize("value", ["secret\n", "two words", "gehe\u00efm", "nul\x00"])
def test_a_token_that_no_header_can_carry_is_one_error_on_either_side(monkeypatch, value):
    with pytest.raises(UserError, match=f"{TOKEN} has a space, a line's end or a letter beyond ASCII"):
        EngineClient("http://127.0.0.1:9", token=value)
    monkeypatch.setattr("os.environ", {TOKEN: value})
    with pytest.raises(UserError, match="set it to one word"):
        RequireToken(app)


@pytest.mark.parametrize("host", ["nonsense.invalid", "192.0.2.1"])
def test_a_host_that_an_engine_cannot_listen_at_is_named_before_it_is_started(tmp_path, host):
    settings = EngineSettings(Path(sys.executable), tmp_path, tmp_path / "log", host=host, port=9999)
    with pytest.raises(UserError, match=f"an engine cannot listen at {host}:9999 .*set another host"):
        EngineProcess(settings)
    assert not (tmp_path / "log").exists()
