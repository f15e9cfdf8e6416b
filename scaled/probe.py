"""The contexts on which the KL of an update is predicted, and measured once it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from logra_ref.predicted_kl import exact_kl, mean_and_error, probe_exact, probe_finite_difference, probe_jvp
from logra_ref.update import FactoredUpdate
from scaled.batching import Batch
from scaled.model import evaluating

PROBES = {"jvp": probe_jvp, "finite_difference": probe_finite_difference, "exact": probe_exact}


class Probe:
    """Some responses of the batch, with the logits that the policy has there before the update.

    ``logits_of`` runs the model on a block and returns the logits at its response positions; ``advance`` is called
    after each block, for the progress bar. The logits of the current policy are those of a block's first run.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Batch],
        logits_of: Callable[[Batch], Tensor],
        *,
        kind: str,
        temperature: float,
        advance: Callable[[int], None],
    ) -> None:
        self.model, self.blocks, self.kind, self.temperature = model, blocks, kind, temperature
        self._logits_of, self._advance = logits_of, advance
        self._before: dict[int, Tensor] = {}

    def predict(self, update: FactoredUpdate) -> tuple[float, float]:
        """q(D) and its standard error."""
        with evaluating(self.model):
            values = PROBES[self.kind](update, self.blocks, self._run, temperature=self.temperature)
        return mean_and_error(values, torch.cat([block.response for block in self.blocks]))

    def record(self) -> None:
        """Run the current policy, for a method that predicts nothing."""
        with evaluating(self.model), torch.no_grad():
            for block in self.blocks:
                self._run(block)

    def realised_kl(self) -> float:
        """The exact KL from the policy before the update to the present one, the mean over positions, in nats."""
        with evaluating(self.model), torch.no_grad():
            values = [
                exact_kl(self._before[id(block)], self._logits_of(block), self.temperature) for block in self.blocks
            ]
        return float(torch.cat(values).mean())

    def _run(self, block: Batch) -> Tensor:
        logits = self._logits_of(block)
        if id(block) not in self._before:
            self._before[id(block)] = forward_ad.unpack_dual(logits).primal.detach()
            self._advance(1)
        return logits
