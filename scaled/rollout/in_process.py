"""Responses from the trainer's own process, by the model that is trained or by a copy of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from scaled.config import RunConfig
from scaled.model import computing
from scaled.ranks import ALONE, Ranks
from scaled.records import Problem, Response
from scaled.rollout import SyncCost
from scaled.rollout.hf import generate

Weights = Callable[[], Iterator[tuple[str, Tensor]]]


class InProcess:
    """The model itself or, where that lies in parts, a whole copy of it on every rank, filled from ``weights``.

    A copy costs a model's memory: for models of some hundred million parameters. Larger ones want an engine.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: RunConfig,
        weights: Weights | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model, self.tokenizer, self.config, self.ranks = model, tokenizer, config, ranks
        self._weights, self._copied = weights, ranks.world > 1
        self._current: int | None = None
        if self._copied:
            self.model = _empty_copy(model)

    def share(self, count: int) -> Sequence[int]:
        return self.ranks.share(range(count))

    def follow(self, update: int) -> None:
        if self._copied and self._current != update:
            parameters = dict(self.model.named_parameters())
            with torch.no_grad():
                for name, weight in self._weights():
                    parameters[name].copy_(weight)
            self._current = update

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
        settings = self.config.rollout
        with computing(self.model, self.config.model):
            return generate(
                self.model,
                self.tokenizer,
                problems,
                numbers=numbers,
                max_new_tokens=settings.max_new_tokens,
                context=settings.context,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                stop=settings.stop,
                batch=settings.batch,
                advance=advance,
            )

    def saved(self, update: int, model: Path) -> None:
        """Nothing here depends on it."""

    def cost(self) -> SyncCost | None:
        return None

    def close(self) -> None:
        """There is nothing to give back."""


def _empty_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same form with memory of its own, whose weights are yet to be filled in."""
    device = next(model.buffers()).device
    with torch.device("meta"):
        copy = type(model)(model.config)
    copy.to_empty(device=device).tie_weights()
    copy.eval().requires_grad_(False)
    copy.generation_config = model.generation_config
    held = dict(model.named_buffers())
    for name, buffer in copy.named_buffers():
        buffer.copy_(held[name])
    return copy
