"""The policy: a causal model up to its last hidden states, and its output layer, run on some positions at a time.

The logits of a sequence are v numbers a token, and of all that training holds they can be the most. Here they exist
for response positions alone, and for at most ``rows`` of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

from scaled.batching import Batch


class Policy(nn.Module):
    """A model for training and probing.

    Called on a batch it gives the states (p, h) at the response positions; ``readout`` gives what a function of the
    logits is there. A model whose output layer itself is trained has no fixed way from states to logits: its states
    are the logits.
    Products are made inside ``computing()``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        rows: int = 1024,
        trains_head: bool = False,
        computing: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        super().__init__()
        self.model, self.rows, self.trains_head, self.computing = model, rows, trains_head, computing
        self.shares_prompts = True

    def forward(self, batch: Batch) -> Tensor:
        """The last hidden states (p, h) at the response positions, in row-major order.

        What all prompts begin with is run once, and its keys and values serve every row; gradients and rates of
        change flow through them, so the result is the same. Checkpointing, which keeps no keys and values, and FSDP,
        which does not see gradients that reach a layer by a cache, go without.
        """
        with self.computing():
            states = self._states(batch)
            return self.model.get_output_embeddings()(states) if self.trains_head else states

    def _states(self, batch: Batch) -> Tensor:
        inner = self.model.base_model
        shared, cache = batch.shared if self.shares_prompts else 0, None
        if (self.model.is_gradient_checkpointing and self.model.training) or len(batch.input_ids) == 1:
            shared = 0
        if shared:
            cache = DynamicCache()
            inner(input_ids=batch.input_ids[:1, :shared], past_key_values=cache, use_cache=True)
            cache.batch_repeat_interleave(len(batch.input_ids))
        found = inner(input_ids=batch.input_ids[:, shared:], past_key_values=cache, use_cache=shared > 0)
        return found.last_hidden_state[batch.predicts[:, shared:]]

    def readout(self, measure: Callable[..., Tensor], *hidden: Tensor, beside: Sequence[Tensor] = ()) -> Tensor:
        """The values (p,) of ``measure(*logits, *beside)``, where each of ``hidden`` gives its logits (p, v).

        ``beside`` has a number a position. With a gradient, the logits of all pieces but one are computed again in
        backward.
        """
        head = nn.Identity() if self.trains_head else self.model.get_output_embeddings()

        def measured(*piece: Tensor) -> Tensor:
            with self.computing():
                logits = [head(states) for states in piece[: len(hidden)]]
            return measure(*logits, *piece[len(hidden) :])

        pieces = list(zip(*(tensor.split(self.rows) for tensor in (*hidden, *beside)), strict=True))
        if len(pieces) == 1 or not torch.is_grad_enabled():
            return torch.cat([measured(*piece) for piece in pieces])
        return torch.cat([checkpoint(measured, *piece, use_reentrant=False) for piece in pieces])
