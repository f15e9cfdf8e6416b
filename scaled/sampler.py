"""The model that responses are sampled from, in process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from scaled.ranks import Ranks


class Sampler:
    """The model that is trained or, where that lies in parts, a whole copy of it on every rank.

    A copy costs a model's memory: for models of some hundred million parameters. Larger ones want an engine.
    """

    def __init__(
        self, model: PreTrainedModel, weights: Callable[[], Iterator[tuple[str, Tensor]]], ranks: Ranks
    ) -> None:
        self._weights, self._copied = weights, ranks.world > 1
        self._current: int | None = None
        self.model = model
        if self._copied:
            device = next(model.buffers()).device
            with torch.device("meta"):
                self.model = type(model)(model.config)
            self.model.to_empty(device=device).tie_weights()
            self.model.eval().requires_grad_(False)
            self.model.generation_config = model.generation_config
            held = dict(model.named_buffers())
            for name, buffer in self.model.named_buffers():
                buffer.copy_(held[name])

    def at(self, update: int) -> PreTrainedModel:
        """The model as it is after ``update``. Every rank has to ask."""
        if self._copied and self._current != update:
            parameters = dict(self.model.named_parameters())
            with torch.no_grad():
                for name, weight in self._weights():
                    parameters[name].copy_(weight)
            self._current = update
        return self.model
