"""The contexts on which the KL of an update is predicted, and measured once it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.autograd import forward_ad

from logra_ref.holding import Total, identity
from logra_ref.predicted_kl import exact_kl, mean_and_error, probe_exact, probe_finite_difference, probe_jvp
from logra_ref.update import FactoredUpdate
from scaled.attention import attention_in_chunks
from scaled.batching import Batch
from scaled.model import evaluating
from scaled.policy import Policy

PROBES = {"jvp": probe_jvp, "finite_difference": probe_finite_difference, "exact": probe_exact}


class Probe:
    """Some responses of the batch, with the hidden states that the policy has there before the update.

    ``advance`` is called after each block, for the progress bar; ``total`` sums over all ranks, of which each has
    blocks of its own. The states of the current policy are those of a
    block's first run.
    """

    def __init__(
        self,
        policy: Policy,
        blocks: Sequence[Batch],
        *,
        kind: str,
        temperature: float,
        advance: Callable[[int], None],
        total: Total = identity,
    ) -> None:
        self.policy, self.blocks, self.kind, self.temperature = policy, blocks, kind, temperature
        self._advance, self._total = advance, total
        self._before: dict[int, Tensor] = {}

    def predict(self, update: FactoredUpdate) -> tuple[float, float]:
        """q(D) and its standard error."""
        attention = attention_in_chunks(self.policy.model) if self.kind == "jvp" else nullcontext()
        with evaluating(self.policy.model), attention:
            values = PROBES[self.kind](
                update, self.blocks, self._run, temperature=self.temperature, readout=self.policy.readout
            )
        return mean_and_error(values, torch.cat([block.response for block in self.blocks]), self._total)

    def record(self) -> None:
        """Run the current policy, for a method that predicts nothing."""
        with evaluating(self.policy.model), torch.no_grad():
            for block in self.blocks:
                self._run(block)

    def realised_kl(self) -> float:
        """The exact KL from the policy before the update to the present one, the mean over positions, in nats."""

        def kl(logits: Tensor, new_logits: Tensor) -> Tensor:
            return exact_kl(logits, new_logits, self.temperature)

        with evaluating(self.policy.model), torch.no_grad():
            values = [self.policy.readout(kl, self._before[id(block)], self.policy(block)) for block in self.blocks]
        found = torch.cat(values)
        whole, positions = self._total(torch.stack([found.sum(), found.new_tensor(len(found))]))
        return float(whole / positions)

    def _run(self, block: Batch) -> Tensor:
        states = self.policy(block)
        if id(block) not in self._before:
            self._before[id(block)] = forward_ad.unpack_dual(states).primal.detach()
            self._advance(1)
        return states
