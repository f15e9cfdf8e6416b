"""What the trainer asks of an engine, over HTTP: weights that follow it, tokens and their log-probabilities."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from scaled.background import in_background
from scaled.engine.token import TOKEN, checked
from scaled.engine.weights import EXACT, Form
from scaled.errors import UserError
from scaled.policy_sync.message_file import parts_of
from scaled.policy_sync.wire import Wire, WireBroken, Wiring, await_workers, listen

PATIENCE = 600.0  # seconds for one answer
LOOK, ILL = 2.0, 3  # seconds between looks at an engine's health, and how many bad ones are its death
# A connection each time: vLLM closes those on which something failed.
LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=0)


class EngineGone(UserError):
    """An engine that does not answer: it may have ended, and may come back."""


class EngineClient:
    """One engine. Whatever goes wrong with it is a ``UserError`` with the engine's own words.

    ``version`` is a label of the sender's choice, given with an update, and by the engine with every response.
    """

    def __init__(
        self, url: str, patience: float = PATIENCE, *, wiring: Wiring | None = None, token: str | None = None
    ) -> None:
        """``wiring``: how to send it files, if it shares no folder. ``token``: if it is not ``LOGRA_ENGINE_TOKEN``."""
        self.url, self.patience, self.wiring = url, patience, wiring
        self._wire: Wire | None = None
        token = checked(token or os.environ.get(TOKEN))
        self.settings = {
            "base_url": url,
            "timeout": httpx2.Timeout(patience, connect=5.0),
            "limits": LIMITS,
            "trust_env": False,
            "headers": {"Authorization": f"Bearer {token}"} if token else {},
        }
        self._http = httpx2.Client(**self.settings)

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._unwire()
        self._http.close()

    def healthy(self) -> bool:
        """Whether it answers, and its engine is alive."""
        try:
            return self._http.get("/health", timeout=5.0).status_code == 200
        except httpx2.TransportError:
            return False

    def await_health(self, seconds: float, waiting: Callable[[float], None] = lambda seconds: None) -> None:
        """Return once it answers; ``waiting`` is told the seconds until then. Raises ``EngineGone`` after that."""
        started = time.monotonic()
        while not self.healthy():
            if (waited := time.monotonic() - started) > seconds:
                raise EngineGone(f"engine {self.url} does not answer after {seconds:.0f} seconds; see its log")
            waiting(waited)
            time.sleep(0.5)

    def follow(self, run: str, folder: Path, form: Form = EXACT) -> None:
        """Take updates of a run from a folder from now on, or what the trainer sends of it by a wire.

        ``form`` is how a bf16 engine holds its weights.
        """
        self.folder, info = folder, {"run": run, "form": asdict(form)}
        path, what = "/init_weight_transfer_engine", "to follow this run"
        if self.wiring is None:
            with self._meanwhile(path, {"init_info": info | {"folder": str(folder.absolute())}}, what):
                return
        self._unwire()
        meeting, store = listen(self.wiring, urlsplit(self.url).hostname)
        info |= {"meeting": asdict(meeting), "patience": self.patience}
        with self._meanwhile(path, {"init_info": info}, what) as check:
            await_workers(store, meeting, check)
            self._wire = Wire(meeting, 0, store, self.wiring.device, self.patience, check)

    @property
    def follows(self) -> bool:
        """Whether it can be sent an update; if not, it has to be told to ``follow`` (again)."""
        return self.wiring is None or self._wire is not None

    def send_full(self, update: int, model: Path, version: str) -> None:
        """Give the engine all weights of a Hugging Face folder, as those after ``update``."""
        info = {"kind": "full", "update": update}
        if self.wiring is None:
            self._sync(info | {"model": str(model.absolute())}, [], version)
        else:
            self._sync(info, sorted(model.glob("*.safetensors")), version)

    def send_factors(self, update: int, digest: str, version: str) -> None:
        """Have the engine apply the message of ``update``, which lies in the folder."""
        files = [] if self.wiring is None else parts_of(self.folder, update)
        self._sync({"kind": "factors", "update": update, "digest": digest}, files, version)

    def version(self) -> str:
        """That of the weights it has; `default` if none were sent to it."""
        return str(self._get("/weight_info")["weight_version"])

    def differing(self, fingerprints: Mapping[str, int]) -> list[str]:
        """The weights of which the engine's workers together have other bits than those with these fingerprints."""
        states = [json.loads(text) for text in self._post("/collective_rpc", {"method": "logra_state"})["results"]]
        if len({state["version"] for state in states}) != 1:
            raise UserError(f"the workers of {self.url} have versions {[s['version'] for s in states]}; restart it")
        wrong = []
        for name, wanted in fingerprints.items():
            shares = [state["shares"].get(name, (0, 0, 1)) for state in states]
            total, entries = sum(share[0] for share in shares), sum(share[1] for share in shares)
            copies, rest = divmod(entries, shares[0][2])
            if rest or not copies or (total - copies * wanted) % 2**64:
                wrong.append(name)
        return wrong

    def export(self, folder: Path) -> list[Path]:
        """Have each of the engine's workers write what it holds to a folder that both have; the files."""
        body = {"method": "logra_export", "args": [str(folder.absolute())]}
        return [Path(path) for path in self._post("/collective_rpc", body)["results"]]

    def log_probs(self, token_ids: Sequence[int]) -> list[float]:
        """The log-probability of each token but the first, given those before it."""
        body = {"model": "policy", "prompt": list(token_ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        (choice,) = self._post("/v1/completions", body)["choices"]
        steps = choice["prompt_logprobs"][1:]
        return [step[str(token)]["logprob"] for step, token in zip(steps, token_ids[1:], strict=True)]

    def _sync(self, info: dict[str, Any], files: Sequence[Path], version: str) -> None:
        try:
            sizes = {file.name: file.stat().st_size for file in files}
        except OSError as error:
            raise UserError(f"{error.filename} cannot be sent to engine {self.url}: {error.strerror}") from error
        with self._paused():
            self._post("/collective_rpc", {"method": "logra_forget"})
            self._post("/start_weight_update", {})
            body, what = {"update_info": info | {"files": sizes}}, f"update {info['update']}"
            with self._meanwhile("/update_weights", body, what) as check:
                for file in files:
                    self._wire.send(file, sizes[file.name], check)
            # What was cached under the old weights must not be read under the new ones, nor be so called.
            if not self._post("/reset_prefix_cache", {})["success"]:
                raise UserError(f"engine {self.url} did not empty its prefix cache after update {info['update']}")
            self._post("/finish_weight_update", {"weight_version": version})
        if (found := self.version()) != version:
            raise UserError(f"engine {self.url} says that it has version {found}, and was brought to {version}")

    def resume(self) -> None:
        """Let it write again, after a sync that went wrong half way."""
        self._post("/resume", {})

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._post("/pause?mode=wait", {})
        try:
            yield
        except BaseException:
            with suppress(EngineGone):  # the first of the two errors tells more
                self.resume()
            raise
        self.resume()

    @contextmanager
    def _meanwhile(self, path: str, body: dict[str, Any], what: str) -> Iterator[Callable[[], None]]:
        """Post while the block does its part, which is to call what it is given: it raises once the post has failed.

        ``what`` our own part of the engine refuses is told in its words, of which vLLM's answer has none.
        """
        post = in_background(lambda: self._post(path, body))
        try:
            yield lambda: post.result() if post.done() else None
            post.result()
        except BaseException as error:
            self._unwire()  # or the engine would wait for the rest
            if isinstance(error, WireBroken):
                raise EngineGone(f"engine {self.url} was lost while files were sent: {error}") from error
            if post.done() and post.exception() is error and not isinstance(error, EngineGone):
                with suppress(UserError):  # the first error tells more
                    said = filter(None, self._post("/collective_rpc", {"method": "logra_refusal"})["results"])
                    error = next((UserError(f"engine {self.url} refuses {what}: {text}") for text in said), error)
                raise error from None
            raise

    def _unwire(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def _get(self, path: str) -> Any:
        return self._answer("GET", path, None)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        """A server whose engine has died in a request never answers that one, so its health is looked at meanwhile."""
        answer, ill = in_background(lambda: self._answer("POST", path, body)), 0
        while not wait([answer], LOOK).done:
            ill = 0 if self.healthy() else ill + 1
            if ill == ILL:
                raise EngineGone(f"engine {self.url} has died at {path}; see its log")
        return answer.result()

    def _answer(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            response = self._http.request(method, path, json=body)
        except httpx2.TransportError as error:
            raise EngineGone(f"engine {self.url} does not answer {path} ({error!r}); see its log") from error
        if response.status_code >= 500 and not self.healthy():
            raise EngineGone(f"engine {self.url} has failed at {path}: {reason(response)}; see its log")
        if response.status_code != 200:
            raise UserError(f"engine {self.url} refuses {path}: {reason(response)}")
        try:
            return response.json() if response.content else None
        except ValueError as error:
            raise UserError(f"engine {self.url} answers {path} with something else than JSON") from error


def reason(response: httpx2.Response) -> str:
    """Why an engine refused, in its own words."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.text[:500]}"
