"""From gradients to weights: LoGRA, and dense Adam for comparison, behind one interface."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import nn

from logra_ref import LoGRA, attach_sketches
from logra_ref.sketch import select_layers
from logra_ref.step_size import MismatchTracker, cosine_budget, step_scale
from scaled.config import RunConfig
from scaled.errors import UserError
from scaled.probe import Probe
from scaled.seeds import derive_seed


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
    """

    def zero_grad(self) -> None: ...
    def step(self, update: int, probe: Probe, mismatch: float | None, commit: Callable[[], None]) -> Step: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class LograMethod:
    """Sketch → direction → predicted KL → α → weights."""

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        self.control = config.control
        settings = config.logra
        model.requires_grad_(False)
        self.sketches = attach_sketches(
            model,
            settings.rank,
            targets=settings.targets,
            seed=derive_seed(config.seed, "projection"),
            kind=settings.kind,
        )
        self.optimizer = LoGRA(
            self.sketches,
            settings.update_ratio,
            direction=settings.direction,
            beta2=settings.beta2,
            epsilon=settings.epsilon,
            refresh=settings.refresh,
        )
        self.mismatch = MismatchTracker()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self, update: int, probe: Probe, mismatch: float | None, commit: Callable[[], None]) -> Step:
        sketch_norm = math.sqrt(sum(float(s.double().square().sum()) for s in self.sketches.sketches().values()))
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
        self.optimizer.step(alpha=alpha)
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

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "mismatch": self.mismatch.smoothed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.mismatch = MismatchTracker(state["mismatch"])


class DenseMethod:
    """Adam on dense gradients: the paper's baseline. It predicts no KL; the realised one is measured alike."""

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        self.settings = config.dense
        if self.settings.parameters == "targets":
            model.requires_grad_(False)
            for layer in select_layers(model, config.logra.targets).values():
                layer.weight.requires_grad_(True)
        else:
            model.requires_grad_(True)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(
            self.parameters, lr=self.settings.lr, betas=self.settings.betas, eps=self.settings.epsilon
        )

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self, update: int, probe: Probe, mismatch: float | None, commit: Callable[[], None]) -> Step:
        if any(p.grad is not None and not torch.isfinite(p.grad).all() for p in self.parameters):
            raise FloatingPointError("a gradient is not finite; nothing was changed")
        started = perf_counter()
        probe.record()
        recorded = perf_counter()
        self.optimizer.param_groups[0]["lr"] = self._learning_rate(update)
        commit()
        self.optimizer.step()
        stepped = perf_counter()
        realised = probe.realised_kl()
        return Step(
            realised_kl=realised,
            seconds_probe=recorded - started + perf_counter() - stepped,
            seconds_update=stepped - recorded,
        )

    def _learning_rate(self, update: int) -> float:
        """Linear warm-up, then the cosine that the KL budget follows too."""
        settings = self.settings
        if update <= settings.warmup:
            return settings.lr * update / settings.warmup
        return cosine_budget(
            update - settings.warmup,
            budget_max=settings.lr,
            budget_min=settings.lr_min,
            horizon=max(settings.horizon - settings.warmup, 1),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])


def build_method(model: nn.Module, config: RunConfig) -> Method:
    """The method of a configuration. Layers that cannot be trained are a ``UserError``."""
    try:
        return {"logra": LograMethod, "dense": DenseMethod}[config.method](model, config)
    except ValueError as error:
        raise UserError(f"{config.model.path} cannot be trained by {config.method}: {error}") from error
