"""Requests to vLLM's token-in, token-out route, many in flight, and what comes back, checked before it is used."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx2
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scaled.errors import NumericalTrouble, UserError
from scaled.policy_sync.client import EngineClient, EngineGone, reason
from scaled.records import Problem, Response
from scaled.rollout.prompts import EndOfResponse, Prompt

NO_NUMBER = -9999.0  # what vLLM makes of a log-probability that is none
Keep = Callable[[int, Response], None]


class _Part(BaseModel):
    """A part of an engine's answer, of which other fields are passed over."""

    model_config = ConfigDict(frozen=True, strict=True)


class _Token(_Part):
    token_id: int
    logprob: float


class _Tokens(_Part):
    content: list[_Token]


class _Span(_Part):
    version: str


class _Choice(_Part):
    token_ids: list[int] = Field(min_length=1)
    finish_reason: Literal["stop", "length", "abort"]
    logprobs: _Tokens
    weight_versions: list[_Span] = Field(min_length=1)


class _Answer(_Part):
    choices: list[_Choice] = Field(min_length=1, max_length=1)


@dataclass(frozen=True)
class Request:
    """One response that is wanted, of ``limit`` tokens at most; ``number`` is its place in the batch."""

    number: int
    problem: Problem
    prompt: Prompt
    limit: int
    seed: int


@dataclass(frozen=True)
class Generation:
    """What all requests of a batch have in common; ``version`` is that of the weights they are meant for."""

    version: str
    any_version: bool
    vocabulary: int
    temperature: float
    top_p: float
    in_flight: int
    ends: EndOfResponse

    def collect(self, asked: Mapping[EngineClient, Sequence[Request]], keep: Keep) -> dict[EngineClient, EngineGone]:
        """Give each response to ``keep`` as it comes; the engines that were gone before they had answered everything.

        Raises ``UserError`` for an answer that is none, or is by other weights, and whatever ``keep`` raises: the
        requests that are still out are then taken back.
        """

        async def of_each() -> dict[EngineClient, EngineGone]:
            gone = await _all([self._of_one(client, requests, keep) for client, requests in asked.items()])
            return {client: error for client, error in zip(asked, gone, strict=True) if error is not None}

        return asyncio.run(of_each())

    async def _of_one(self, client: EngineClient, requests: Sequence[Request], keep: Keep) -> EngineGone | None:
        slots = asyncio.Semaphore(self.in_flight)

        async def one(request: Request) -> None:
            async with slots:
                keep(request.number, await self._response(http, request))

        try:
            async with httpx2.AsyncClient(**client.settings) as http:
                await _all([one(request) for request in requests])
        except EngineGone as error:
            return error
        return None

    async def _response(self, http: httpx2.AsyncClient, request: Request) -> Response:
        sampling = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": request.seed,
            "max_tokens": request.limit,
            "stop": list(self.ends.stop),
            "stop_token_ids": sorted(self.ends.ids),
            "detokenize": bool(self.ends.stop),
            "logprobs": 0,
        }
        try:
            answer = await http.post(
                "/inference/v1/generate", json={"token_ids": list(request.prompt), "sampling_params": sampling}
            )
        except httpx2.ReadTimeout as error:
            raise EngineGone(
                f"engine {http.base_url} has not answered problem {request.problem.id} after {http.timeout.read:g} "
                "seconds; see its log, and set engine.patience higher or engine.in_flight lower if it is only slow"
            ) from error
        except httpx2.TransportError as error:
            raise EngineGone(f"engine {http.base_url} is gone while it writes ({error!r}); see its log") from error
        if answer.status_code >= 500:
            raise EngineGone(f"engine {http.base_url} has failed while it writes: {reason(answer)}; see its log")
        if answer.status_code != 200:
            raise UserError(f"engine {http.base_url} refuses problem {request.problem.id}: {reason(answer)}")
        try:
            choice = _Answer.model_validate_json(answer.content).choices[0]
        except ValidationError as error:
            wrong: Any = error.errors(include_url=False)[0]
            raise UserError(
                f"engine {http.base_url} answers problem {request.problem.id} with something else than a response "
                f"({'.'.join(map(str, wrong['loc']))}: {wrong['msg']}); is it the vLLM of `make engine`?"
            ) from error
        if choice.finish_reason == "abort":
            raise EngineGone(f"engine {http.base_url} has dropped problem {request.problem.id}; see its log")
        return self._checked(choice, request, str(http.base_url))

    def _checked(self, choice: _Choice, request: Request, url: str) -> Response:
        tokens, told = choice.token_ids, choice.logprobs.content
        trouble = None
        if [token.token_id for token in told] != tokens:
            trouble = "log-probabilities of other tokens than its own"
        elif len(tokens) > request.limit or not all(0 <= token < self.vocabulary for token in tokens):
            trouble = f"{len(tokens)} tokens up to number {max(tokens)}"
        if trouble:
            raise UserError(
                f"engine {url} answers problem {request.problem.id} with {trouble}, for at most {request.limit} "
                f"tokens of a vocabulary of {self.vocabulary}; has it another model?"
            )
        if not all(math.isfinite(token.logprob) and token.logprob > NO_NUMBER for token in told):
            raise NumericalTrouble(f"engine {url} has a log-probability that is no number, for {request.problem.id}")
        versions = sorted({span.version for span in choice.weight_versions})
        if versions != [self.version] and not self.any_version:
            raise UserError(
                f"engine {url} answered problem {request.problem.id} by weights {', '.join(versions)} and not "
                f"{self.version}: who else updates it? engine.other_version=weight would train on such responses"
            )
        return Response(
            problem=request.problem,
            prompt_ids=request.prompt,
            token_ids=tuple(tokens),
            log_probs=tuple(token.logprob for token in told),
            text=self.ends.text(tokens),
            stop_reason=choice.finish_reason,
            other_version=versions != [self.version],
        )


async def _all(work: Sequence[Any]) -> list[Any]:
    """The results in order; the first that raises takes the others with it."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
