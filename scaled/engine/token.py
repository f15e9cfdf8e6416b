"""The token that an engine asks for: whoever has its port could otherwise read and change the policy."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from scaled.errors import UserError

TOKEN = "LOGRA_ENGINE_TOKEN"
OPEN = "/health"
Messages = Callable[..., Awaitable[Any]]


def checked(token: str | None) -> str | None:
    """The token, if a header can carry it. Raises ``UserError`` if not."""
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise UserError(f"{TOKEN} has a space, a line's end or a letter beyond ASCII in it; set it to one word")
    return token


class RequireToken:
    """ASGI middleware: every path but ``/health`` needs the header ``Authorization: Bearer`` with the token.

    The token is that of the environment. Raises ``RuntimeError`` where there is none.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app, token = app, checked(os.environ.get(TOKEN))
        if not token:
            raise RuntimeError(f"set {TOKEN} to a secret that the trainer has in its environment too")
        self.wanted = f"Bearer {token}".encode()

    async def __call__(self, scope: Mapping[str, Any], receive: Messages, send: Messages) -> None:
        if scope["type"] == "lifespan" or scope["path"] == OPEN or self._knows(scope):
            await self.app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        said = {"error": {"message": f"the token is missing or wrong; {TOKEN} must be that of the engine"}}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(said).encode()})

    def _knows(self, scope: Mapping[str, Any]) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self.wanted)
