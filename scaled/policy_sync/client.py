"""What the trainer asks of an engine, over HTTP: weights that follow it, tokens and their log-probabilities."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2

from scaled.errors import UserError

PATIENCE = 600.0  # seconds for one answer
# A connection each time: vLLM closes those on which something failed.
LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=0)


class EngineGone(UserError):
    """An engine that does not answer: it may have ended, and may come back."""


class EngineClient:
    """One engine. Whatever goes wrong with it is a ``UserError`` with the engine's own words.

    ``version`` is a label of the sender's choice, given with an update, and by the engine with every response.
    """

    def __init__(self, url: str, patience: float = PATIENCE) -> None:
        self.url = url
        self.timeout = httpx2.Timeout(patience, connect=5.0)
        self._http = httpx2.Client(base_url=url, timeout=self.timeout, limits=LIMITS, trust_env=False)

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
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

    def follow(self, run: str, folder: Path) -> None:
        """Take updates of a run from a folder from now on."""
        self._post("/init_weight_transfer_engine", {"init_info": {"run": run, "folder": str(folder.absolute())}})

    def send_full(self, update: int, model: Path, version: str) -> None:
        """Give the engine all weights of a Hugging Face folder, as those after ``update``."""
        self._sync({"kind": "full", "update": update, "model": str(model.absolute())}, version)

    def send_factors(self, update: int, digest: str, version: str) -> None:
        """Have the engine apply the message of ``update``, which lies in the folder."""
        self._sync({"kind": "factors", "update": update, "digest": digest}, version)

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

    def log_probs(self, token_ids: Sequence[int]) -> list[float]:
        """The log-probability of each token but the first, given those before it."""
        body = {"model": "policy", "prompt": list(token_ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        (choice,) = self._post("/v1/completions", body)["choices"]
        steps = choice["prompt_logprobs"][1:]
        return [step[str(token)]["logprob"] for step, token in zip(steps, token_ids[1:], strict=True)]

    def _sync(self, info: dict[str, Any], version: str) -> None:
        with self._paused():
            self._post("/start_weight_update", {})
            try:
                self._post("/update_weights", {"update_info": info})
            except EngineGone:
                raise
            except UserError as error:
                said = None
                with suppress(UserError):  # the first error tells more
                    refusals = self._post("/collective_rpc", {"method": "logra_refusal"})["results"]
                    said = next(filter(None, refusals), None)
                raise UserError(
                    f"engine {self.url} refuses update {info['update']}: {said}" if said else error
                ) from error
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

    def _get(self, path: str) -> Any:
        return self._answer("GET", path, None)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._answer("POST", path, body)

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
