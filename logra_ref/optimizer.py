"""LoGRA as a ``torch.optim.Optimizer``, for anyone's training loop (Algorithm 1 without the RL around it)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from logra_ref.direction import row_adam_factor, sgd_factor
from logra_ref.projection import canonical_name
from logra_ref.sketch import SketchSet
from logra_ref.sync import round_rows
from logra_ref.update import FactoredUpdate


class LoGRA(torch.optim.Optimizer):
    """One update: ``zero_grad``, ``backward`` of every microbatch, ``step``.

    ``update_ratio`` is ρ, the norm of the proposed update over the norm of the selected weights (Eq. 4); it stands
    in the parameter group as ``lr``, so torch's schedulers scale it. The size of an update is that ratio times the
    multiplier α given to ``step``; it does not depend on the size of the loss or of the gradient.

    ``direction`` is RowAdam (Appendix B) or the sketch itself (``sgd``). ``refresh``: draw new projections for every
    update, or keep those of the first (``fixed``). ``int8_factors`` rounds U to small integers with one scale a row
    before anything is computed from it, so that receivers can repeat the update bit for bit (``sync``).

    Only the layers of ``sketches`` are trained. Parameters that are not selected belong to another optimizer, or
    are frozen. ``state_dict`` holds tensors, numbers and strings only.
    """

    def __init__(
        self,
        sketches: SketchSet,
        update_ratio: float = 6e-5,
        *,
        direction: Literal["row_adam", "sgd"] = "row_adam",
        beta2: float = 0.95,
        epsilon: float = 1e-8,
        refresh: Literal["every_update", "fixed"] = "every_update",
        int8_factors: bool = False,
    ) -> None:
        if not isinstance(sketches, SketchSet):
            raise TypeError("LoGRA takes the sketches of a model, attach_sketches(model, rank), not its parameters")
        if not update_ratio > 0:
            raise ValueError(f"update_ratio must be above 0, not {update_ratio}")
        if direction not in ("row_adam", "sgd"):
            raise ValueError(f"direction {direction!r} is unknown; choose row_adam or sgd")
        if refresh not in ("every_update", "fixed"):
            raise ValueError(f"refresh {refresh!r} is unknown; choose every_update or fixed")
        if not (0 <= beta2 < 1 and epsilon > 0):
            raise ValueError(f"RowAdam wants 0 ≤ beta2 < 1 and epsilon > 0, not {beta2} and {epsilon}")
        self.sketches, self.direction, self.refresh = sketches, direction, refresh
        self.int8_factors = int8_factors
        self._proposal: FactoredUpdate | None = None
        self._moments: dict[str, Tensor] = {}
        settings = {"lr": update_ratio, "beta2": beta2, "epsilon": epsilon, "drawn": self._drawn()}
        # "update" is the number of the update that comes next.
        super().__init__([{"params": list(sketches.weights().items()), "update": 1, **settings}], defaults={})

    @property
    def update(self) -> int:
        """u, the number of the update that comes next; it counts updates that were applied, from 1."""
        return self.param_groups[0]["update"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Empty the sketches and forget a proposal that was not taken."""
        super().zero_grad(set_to_none)
        self.sketches.zero_()
        self._proposal = None

    @torch.no_grad()
    def propose(self) -> FactoredUpdate:
        """The update that ``step`` would apply at α = 1. Weights and state stay as they are.

        It is made of the sketches themselves, and so is good until they change: by backward, ``zero_grad`` or ``step``.

        Raises ``FloatingPointError`` for a sketch that is not finite, and ``RuntimeError`` for a layer that no
        backward pass has reached since ``zero_grad`` (as reentrant checkpointing of a frozen model does silently).
        """
        unreached = [name for name, layer in self.sketches.layers.items() if layer.contributions == 0]
        if unreached:
            raise RuntimeError(
                f"no backward pass reached {len(unreached)} of {len(self.sketches.layers)} sketches, the first "
                f"{unreached[0]}; was backward called, and is checkpointing non-reentrant?"
            )
        group = self.param_groups[0]
        factors, moments = {}, {}
        for name, layer in self.sketches.layers.items():
            if self.direction == "sgd":
                factor = sgd_factor(layer.sketch, total=self.sketches.holding.total)
            else:
                held = self.state[layer.weight].get("second_moment")
                factor, moments[name] = row_adam_factor(
                    layer.sketch,
                    layer.sketch.new_zeros(len(layer.sketch)) if held is None else held,
                    step=group["update"],
                    beta2=group["beta2"],
                    epsilon=group["epsilon"],
                    total=self.sketches.holding.total,
                )
            factors[name] = round_rows(factor.direction()) if self.int8_factors else factor
        self._moments = moments
        drawn_for = group["update"] if self.refresh == "every_update" else 1
        self._proposal = FactoredUpdate(
            self.sketches.layers, factors, update=drawn_for, update_ratio=group["lr"], holding=self.sketches.holding
        )
        return self._proposal

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        alpha: float = 1.0,
        probe: Callable[[FactoredUpdate], float] | None = None,
    ) -> Any:
        """Merge α D into the weights, count the update and draw the next projections.

        ``probe`` takes the proposal and returns α, e.g. ``lambda update: step_scale(q_of(update), budget)``. A
        ``closure`` computes the loss and calls backward, as for torch's own optimizers; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._proposal = None
        proposal = self._proposal or self.propose()
        proposal.apply_(alpha if probe is None else probe(proposal))
        for name, moment in self._moments.items():
            self.state[self.sketches.layers[name].weight]["second_moment"] = moment
        self.param_groups[0]["update"] += 1
        self._next_projections()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the other optimizer stood. Raises ``ValueError`` if it drew its projections otherwise."""
        drawn = state_dict["param_groups"][0].get("drawn")
        if drawn != self._drawn():
            raise ValueError(f"the state was saved with {drawn}, this optimizer has {self._drawn()}")
        held = [canonical_name(name) for name in state_dict["param_groups"][0].get("param_names", [])]
        if held != list(self.sketches.layers):
            raise ValueError(f"the state is for {len(held)} matrices {held[:2]}…, not for those of this model")
        for index, layer in enumerate(self.sketches.layers.values()):
            moment = state_dict["state"].get(index, {}).get("second_moment")
            if moment is not None and tuple(moment.shape) != (len(layer.sketch),):
                raise ValueError(f"a second moment of {tuple(moment.shape)} is not for {len(layer.sketch)} rows")
        super().load_state_dict(state_dict)
        self._next_projections()

    def _drawn(self) -> dict[str, Any]:
        """What the projections are a function of, beside the update number."""
        sketches = self.sketches
        return {"seed": sketches.seed, "kind": sketches.kind, "rank": sketches.rank, "refresh": self.refresh}

    def _next_projections(self) -> None:
        if self.refresh == "every_update":
            self.sketches.refresh(self.update)
        self.zero_grad()
