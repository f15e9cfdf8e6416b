"""Responses from vLLM engines that follow the trainer, and go on where an engine was lost."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from scaled.config import RunConfig
from scaled.errors import UserError
from scaled.files import discard
from scaled.interrupt import StopRequest
from scaled.methods import Method
from scaled.model import resolve_device
from scaled.policy_sync.client import EngineClient, EngineGone
from scaled.policy_sync.fingerprint import fingerprints
from scaled.policy_sync.outbox import Outbox
from scaled.policy_sync.wire import Wiring
from scaled.ranks import Ranks
from scaled.records import Problem, Response
from scaled.rollout import SyncCost
from scaled.rollout.generation import Generation, Request
from scaled.rollout.prompts import EndOfResponse, encode_prompts, room_after
from scaled.seeds import derive_seed

TRIES = 3  # of one thing with an engine that goes away each time


class FromEngines:
    """Engine k belongs to rank k mod world, which brings it up to date and asks it every so many problems."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: RunConfig,
        method: Method | None,
        ranks: Ranks,
        base: Path | None,
        stop: StopRequest,
        token: str | None = None,
    ) -> None:
        """``base`` is a folder that has the model's weights as they are now, if there is one. Without a ``method``
        nothing is trained, and they are asked for no others; the model may then have no weights. ``token`` is what the
        engines ask for, if it is not that of the environment.

        Raises ``UserError`` for an engine that does not answer.
        """
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.method, self.ranks, self.base, self.stop = method, ranks, base, stop
        self.count = len(config.engine_urls)
        engine, device = config.engine, resolve_device(config.model.device)
        wiring = Wiring(engine.meet_at, engine.tensor_parallel, device) if engine.transport == "broadcast" else None
        self.clients = {
            number: EngineClient(url, engine.patience, wiring=wiring, token=token)
            for number, url in enumerate(config.engine_urls)
            if number % ranks.world == ranks.rank
        }
        self.outbox: Outbox | None = None
        self._cost: SyncCost | None = None
        self._checkpoint: tuple[int, Path] | None = None
        with ranks.together():
            if lost := [client.url for client in self.clients.values() if not client.healthy()]:
                raise UserError(
                    f"engine {lost[0]} does not answer; start it, or have `logra launch` start engines and trainer"
                )

    def share(self, count: int) -> Sequence[int]:
        return [number for number in range(count) if number % self.count in self.clients]

    def follow(self, update: int) -> None:
        """Raises ``UserError`` if an engine refuses, does not come back, or has other bits than the trainer."""
        if self.outbox is not None and self.outbox.update == update:
            return
        started = perf_counter()
        size = self._write(update)
        with self.ranks.together():
            for client in self.clients.values():
                self._patiently(client, self.outbox.bring_up)
        seconds = max(self.ranks.gather(perf_counter() - started))
        self._cost = SyncCost(seconds, size * self.count)
        self.outbox.prune()
        if self.outbox.full:
            self.outbox.add_full(update, self.method.weights())
        if self.method and (every := self.config.engine.verify_every) and update % every == 0:
            self.verify()

    def verify(self) -> None:
        """Compare the bits of all weights. Raises ``UserError`` with the first that differ."""
        wanted = fingerprints(self.method.weights(), getattr(torch, self.config.engine.dtype))

        def compare(client: EngineClient) -> None:
            self.outbox.bring_up(client)
            if wrong := client.differing(wanted):
                raise UserError(
                    f"engine {client.url} has other weights than the trainer after update {self.outbox.update}: "
                    f"{len(wrong)} of {len(wanted)}, the first {', '.join(wrong[:3])}; restart it"
                )

        with self.ranks.together():
            for client in self.clients.values():
                self._patiently(client, compare)

    def respond(
        self,
        problems: Sequence[Problem],
        numbers: Sequence[int],
        *,
        temperature: float,
        top_p: float = 1.0,
        seed: int,
        advance: Callable[[int], None],
    ) -> list[Response]:
        """Raises ``UserError`` for an engine that does not come back, for an answer that is none, and for one by other
        weights than those after the last update unless the configuration lets it pass."""
        settings, engine = self.config.rollout, self.config.engine
        most, context = settings.max_new_tokens, settings.context
        prompts = encode_prompts(self.model, self.tokenizer, problems, most, context, self.config.longest)
        waiting: dict[EngineClient, list[Request]] = {client: [] for client in self.clients.values()}
        for number, problem, prompt in zip(numbers, problems, prompts, strict=True):
            client = self.clients[number % self.count]
            limit = room_after(prompt, most, context)
            waiting[client].append(Request(number, problem, prompt, limit, derive_seed(seed, "response", number)))
        generation = Generation(
            version=self.outbox.version(self.outbox.update),
            any_version=engine.other_version == "weight",
            vocabulary=self.model.config.get_text_config().vocab_size,
            temperature=temperature,
            top_p=top_p,
            in_flight=engine.in_flight,
            ends=EndOfResponse(self.model, self.tokenizer, settings.stop),
        )
        found: dict[int, Response] = {}

        def keep(number: int, response: Response) -> None:
            found[number] = response
            advance(1)

        for client in self.clients.values():  # one may have died and come back since it was brought up
            self._patiently(client, self.outbox.bring_up)
        for last in range(TRIES):
            gone = generation.collect(waiting, keep)
            if not gone:
                break
            if last == TRIES - 1:
                raise next(iter(gone.values()))
            for client in gone:
                self._patiently(client, self.outbox.bring_up)
            waiting = {client: [one for one in waiting[client] if one.number not in found] for client in gone}
        return [found[number] for number in numbers]

    def saved(self, update: int, model: Path) -> None:
        # Not before it is written for engines: they go on from the update before it.
        self._checkpoint = update, model

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        if self.outbox is not None and self.ranks.first:
            discard(self.outbox.folder.parent)

    def cost(self) -> SyncCost | None:
        cost, self._cost = self._cost, None
        return cost

    def _write(self, update: int) -> int:
        """Put the update where engines find it; its bytes."""
        if self.outbox is None:
            parent = self.config.run / "sync"
            if self.config.engine.folder is not None:
                run = str(self.config.run.absolute()).encode()
                parent = self.config.engine.folder / f"logra-{hashlib.sha256(run).hexdigest()[:12]}"
            if self.ranks.first:
                discard(parent)  # what this run has left when it was killed
            self.outbox = Outbox(parent, update, self.base or parent, self.ranks, self.config.engine.form)
            return 0 if self.base else self.outbox.add_full(update, self.method.weights())
        if not self.config.sends_factors:
            return self.outbox.add_full(update, self.method.weights())
        size = self.outbox.add_factors(self.method.message)
        if self._checkpoint and self._checkpoint[0] <= update:
            self.outbox.rebase(*self._checkpoint)
            self._checkpoint = None
        return size

    def _patiently(self, client: EngineClient, work: Callable[[EngineClient], None]) -> None:
        """Do it with an engine that may be gone and come back, as `logra launch` sees to."""
        for last in range(TRIES):
            client.await_health(self.config.launch.patience, self._unless_asked_to_stop)
            try:
                if last:
                    client.resume()
                return work(client)
            except EngineGone:
                if last == TRIES - 1:
                    raise

    def _unless_asked_to_stop(self, seconds: float) -> None:
        if self.stop.requested:
            raise EngineGone(f"an engine is gone, did not come back in {seconds:.0f} seconds, and the run is to stop")
