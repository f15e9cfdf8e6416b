"""From gradients to weights: what every method offers, and LoGRA."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from logra_ref import LoGRA, Projection, attach_sketches
from logra_ref.holding import WHOLE
from logra_ref.sketch import select_layers
from logra_ref.step_size import MismatchTracker, cosine_budget, step_scale
from logra_ref.sync import FactorMessage, nudge_ties_
from scaled.config import RunConfig
from scaled.errors import UserError
from scaled.probe import Probe
from scaled.ranks import Ranks
from scaled.section import Count, NonNegative, Numbers
from scaled.seeds import derive_seed
from scaled.sharding import ShardedRows, gathered, reshard


@dataclass(frozen=True)
class Step:
    """What one update did; the fields of ``metrics.jsonl`` of the same names. None where a method has no such thing."""

    realised_kl: float
    seconds_probe: float
    seconds_update: float
    q: float | None = None
    q_se: float | None = None
    predicted_kl: float | None = None
    alpha: float | None = None
    budget_scheduled: float | None = None
    budget: float | None = None
    mismatch_smoothed: float | None = None
    update_norm: float | None = None
    weight_norm: float | None = None
    sketch_norm: float | None = None


class Method(Protocol):
    """``step`` raises ``FloatingPointError`` before anything is changed if a gradient or q is not finite.

    ``commit`` is called right before the weights change: from there on an interrupt waits for the end of the step.
    ``weights`` are those of the model as a Hugging Face folder has them, one after the other, whole. A checkpoint has
    ``tensors`` (which are also what ``load`` is given: a fresh method's, filled in) and ``numbers`` (of JSON's types).
    ``message`` is the last update as engines get it, or None where they get all weights.
    ``parameters`` are what is trained; ``state_bytes`` is what this rank keeps for it beside weights and activations.
    """

    parameters: dict[str, Tensor]
    message: FactorMessage | None

    def zero_grad(self) -> None: ...
    def step(self, update: int, probe: Probe, mismatch: float | None, commit: Callable[[], None]) -> Step: ...
    def weights(self) -> Iterator[tuple[str, Tensor]]: ...
    def tensors(self) -> dict[str, Tensor]: ...
    def numbers(self) -> dict[str, Any]: ...
    def load(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None: ...
    def state_bytes(self) -> dict[str, int]: ...


class LograNumbers(Numbers):
    """What ``LograMethod.numbers`` gives."""

    update: Count
    drawn: dict[str, Any]
    mismatch: NonNegative


class LograMethod:
    """Sketch → direction → predicted KL → α → weights."""

    @staticmethod
    def prepare(model: PreTrainedModel, config: RunConfig) -> None:
        """No weight has a gradient. Raises ``ValueError`` for layers that cannot be sketched."""
        for layer in select_layers(model, config.logra.targets).values():
            Projection(config.logra.kind, config.logra.rank, layer.in_features, 0)
        model.requires_grad_(False)

    def __init__(self, model: PreTrainedModel, config: RunConfig, ranks: Ranks) -> None:
        self.model, self.ranks, self.control = model, ranks, config.control
        settings = config.logra
        self.seed = derive_seed(config.seed, "projection")
        self.sends_factors, self.message = config.sends_factors, None
        self.to_bf16_engines = config.sends_factors and config.engine.dtype == "bfloat16"
        self.sketches = attach_sketches(
            model,
            settings.rank,
            targets=settings.targets,
            seed=self.seed,
            kind=settings.kind,
            holding=WHOLE if ranks.world == 1 else ShardedRows(ranks),
        )
        self.optimizer = LoGRA(
            self.sketches,
            settings.update_ratio,
            direction=settings.direction,
            beta2=settings.beta2,
            epsilon=settings.epsilon,
            refresh=settings.refresh,
            int8_factors=self.sends_factors,
        )
        self._nudge(dict(model.named_parameters()))
        self.mismatch = MismatchTracker()
        self.parameters = self.sketches.weights()

    def zero_grad(self) -> None:
        """Also compares the projections over ranks: sketches of different ones must not be summed."""
        self.optimizer.zero_grad()
        digests = self.ranks.gather(self._projections_digest() if self.ranks.world > 1 else "")
        if other := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise UserError(
                f"rank {other[0]} draws other projections than rank 0 for update {self.optimizer.update}; all ranks "
                "need the same version of this project and of torch"
            )

    def _projections_digest(self) -> str:
        """BLAKE2b of what every layer's projection consists of."""
        total = hashlib.blake2b(digest_size=16)
        for name, layer in self.sketches.layers.items():
            projection, device = layer.projection, layer.sketch.device
            drawn = projection.packed(device) if projection.kind == "rademacher" else projection.entries(device)
            total.update(name.encode())
            total.update(drawn.cpu().contiguous().numpy().tobytes())
        return total.hexdigest()

    def step(self, update: int, probe: Probe, mismatch: float | None, commit: Callable[[], None]) -> Step:
        reshard(probe.policy)
        squares = sum(sketch.double().square().sum() for sketch in self.sketches.sketches().values())
        sketch_norm = math.sqrt(float(self.ranks.total(squares)))
        started = perf_counter()
        proposal = self.optimizer.propose()
        proposed = perf_counter()
        q, q_se = probe.predict(proposal)
        probed = perf_counter()

        control = self.control
        scheduled = cosine_budget(
            update, budget_max=control.budget_max, budget_min=control.budget_min, horizon=control.horizon
        )
        tracker = MismatchTracker(self.mismatch.smoothed)
        budget = tracker.budget(scheduled, mismatch if control.mismatch else None)
        # Also without control: a q that is not finite is a proposal that is not finite.
        alpha = step_scale(q, budget, control.alpha_max)
        if not control.enabled:
            alpha = 1.0

        commit()
        merging = perf_counter()
        reshard(probe.policy)
        if self.sends_factors:
            self.message = FactorMessage.of(proposal, alpha, base_seed=self.seed)
        self.optimizer.step(alpha=alpha)
        self._nudge(self.parameters)
        self.mismatch = tracker
        merged = perf_counter()
        realised = probe.realised_kl()
        return Step(
            realised_kl=realised,
            seconds_probe=probed - proposed + perf_counter() - merged,
            seconds_update=proposed - started + merged - merging,
            q=q,
            q_se=q_se,
            predicted_kl=alpha**2 * q,
            alpha=alpha,
            budget_scheduled=scheduled,
            budget=budget,
            mismatch_smoothed=tracker.smoothed,
            update_norm=alpha * proposal.norm(),
            weight_norm=proposal.weight_norm,
            sketch_norm=sketch_norm,
        )

    def _nudge(self, weights: dict[str, Tensor]) -> None:
        """Away from the numbers that a bf16 engine cannot follow (``logra_ref.sync``)."""
        for weight in weights.values() if self.to_bf16_engines else ():
            nudge_ties_(self.ranks.own(weight.detach()))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return gathered(self.model)

    def tensors(self) -> dict[str, Tensor]:
        if self.optimizer.direction == "sgd":
            return {}
        found = {}
        for name, layer in self.sketches.layers.items():
            held = self.optimizer.state[layer.weight].get("second_moment")
            own = layer.sketch.new_zeros(len(layer.sketch)) if held is None else held
            found[f"{name}.second_moment"] = self.ranks.spread(own, layer.out_features)
        return found

    def numbers(self) -> dict[str, Any]:
        group = self.optimizer.param_groups[0]
        return {"update": group["update"], "drawn": group["drawn"], "mismatch": self.mismatch.smoothed}

    def load(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        held = LograNumbers.read(numbers)
        bad = any(not (torch.isfinite(own := self.ranks.own(moment)) & (own >= 0)).all() for moment in tensors.values())
        if self.ranks.any(bad):
            raise ValueError("a second moment is negative or not finite")
        state = self.optimizer.state_dict()
        state["param_groups"][0] |= {"update": held.update, "drawn": held.drawn}
        state["state"] = {
            index: {"second_moment": self.ranks.own(tensors[f"{name}.second_moment"])}
            for index, name in enumerate(self.sketches.layers)
            if tensors
        }
        self.optimizer.load_state_dict(state)
        self.mismatch = MismatchTracker(held.mismatch)

    def state_bytes(self) -> dict[str, int]:
        layers = self.sketches.layers.values()
        moments = {"second moments": sum(layer.sketch.element_size() * len(layer.sketch) for layer in layers)}
        found = {
            "sketches": sum(layer.sketch.numel() * layer.sketch.element_size() for layer in layers),
            "projections": sum(layer.projection.kept_bytes for layer in layers),
        } | (moments if self.optimizer.direction == "row_adam" else {})
        sent = sum(layer.sketch.numel() + layer.sketch.element_size() * len(layer.sketch) for layer in layers)
        return found | ({"factors to send": sent} if self.sends_factors else {})
