"""The sketch S = G Aᵀ of a weight gradient, gathered during backward (§2.1, Eq. 2).

For y = x Wᵀ with x (n, k) and the loss's derivative δ (n, d) in y, the gradient is G = δᵀ x, and so

    S = G Aᵀ = δᵀ (x Aᵀ).

The forward pass keeps x Aᵀ (n, r) and not x; backward adds δᵀ (x Aᵀ) to S (d, r). G is never formed, W has no
gradient, and microbatches add up. (S is also the gradient in U of y = x (W + U A)ᵀ at U = 0.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad

from logra_ref.direction import Factor
from logra_ref.holding import WHOLE, Holding
from logra_ref.projection import Kind, Projection, canonical_name, projection_seed

DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class SketchedLinear(nn.Linear):
    """A linear layer whose backward fills a sketch instead of ``weight.grad``.

    An existing ``nn.Linear`` becomes one by a change of its class, so the keys of ``state_dict`` and whatever wraps
    it stay. Projection and sketch are plain attributes: neither saved nor sharded with the parameters.
    """

    sketch: Float[Tensor, "own r"]
    projection: Projection
    holding: Holding
    paused: bool
    contributions: int
    factor: Factor | None
    moving: bool

    def forward(self, x: Float[Tensor, "*n k"]) -> Float[Tensor, "*n d"]:
        if self.factor is not None:
            return self._tangent(x) if self.moving else self._displaced(x)
        if self.paused or not torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        # Without an input that requires a gradient autograd would skip this layer's backward.
        anchor = x.new_empty(0, requires_grad=True)
        return _SketchingProduct.apply(x, self.weight, self.bias, anchor, self)

    def _displaced(self, x: Tensor) -> Tensor:
        """x (W + U A)ᵀ without touching W: x Wᵀ + (x Aᵀ) Uᵀ."""
        return F.linear(x, self.weight, self.bias) + self._along(x)

    def _tangent(self, x: Tensor) -> Tensor:
        """Forward mode along U A: ẏ = ẋ Wᵀ + (x Aᵀ) Uᵀ, value and first term in one product."""
        value, rate = forward_ad.unpack_dual(x)
        own = self._along(value)
        if rate is None:
            return forward_ad.make_dual(F.linear(value, self.weight, self.bias), own)
        y, y_rate = F.linear(torch.stack([value, rate]), self.weight).unbind(0)
        return forward_ad.make_dual(y if self.bias is None else y + self.bias, y_rate + own)

    def _along(self, x: Tensor) -> Tensor:
        """(x Aᵀ) Uᵀ for the factor U that is set."""
        factor = self.holding.whole(self.factor.direction().to(x.dtype), self.out_features)
        return F.linear(self.projection.project(x), factor)

    def _add(self, contribution: Float[Tensor, "own r"]) -> None:
        self.sketch.add_(contribution, alpha=self.projection.scale)


class _SketchingProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, anchor, layer):
        y = F.linear(x, weight, bias)
        # In the product's own dtype (under autocast not that of x), and unscaled, for the sum to scale in fp32.
        ctx.save_for_backward(layer.projection.project(x.to(y.dtype), scaled=False), weight)
        ctx.layer, ctx.has_bias = layer, bias is not None
        return y

    @staticmethod
    def backward(ctx, delta):
        projected, weight = ctx.saved_tensors
        layer, sum_type = ctx.layer, ctx.layer.sketch.dtype
        rows, projected = delta.reshape(-1, delta.shape[-1]), projected.reshape(-1, projected.shape[-1])
        with torch.autocast(rows.device.type, enabled=False):  # it would make this product in its own type again
            contribution = rows.to(sum_type).T @ projected.to(sum_type)
        layer.holding.collect(contribution, layer._add)
        layer.contributions += 1
        needs_x, _, needs_bias = ctx.needs_input_grad[:3]
        along_x = delta @ weight.to(delta.dtype) if needs_x else None
        along_bias = rows.sum(0) if ctx.has_bias and needs_bias else None
        return along_x, None, along_bias, None, None


class SketchSet:
    """The sketches of a model's selected layers, by the canonical names of their weights.

    ``refresh(update)`` draws every projection anew; ``zero_()`` empties the sketches before the first microbatch.
    """

    def __init__(
        self, layers: dict[str, SketchedLinear], rank: int, kind: Kind, seed: int, holding: Holding = WHOLE
    ) -> None:
        self.layers, self.rank, self.kind, self.seed, self.holding = layers, rank, kind, seed, holding
        self.refresh(update=1)

    def sketches(self) -> dict[str, Float[Tensor, "own r"]]:
        return {name: layer.sketch for name, layer in self.layers.items()}

    def weights(self) -> dict[str, Float[Tensor, "d k"]]:
        return {name: layer.weight for name, layer in self.layers.items()}

    def projections(self) -> dict[str, Projection]:
        return {name: layer.projection for name, layer in self.layers.items()}

    def refresh(self, update: int) -> None:
        """Draw the projections of an update and empty the sketches: a sketch belongs to its projection."""
        for name, layer in self.layers.items():
            seed = projection_seed(self.seed, update, name)
            layer.projection = Projection(self.kind, self.rank, layer.in_features, seed, keep=True)
        self.zero_()

    def zero_(self) -> None:
        for layer in self.layers.values():
            layer.sketch.zero_()
            layer.contributions = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, forward and backward pass the sketches by."""
        before = {name: layer.paused for name, layer in self.layers.items()}
        self._pause(dict.fromkeys(self.layers, True))
        try:
            yield
        finally:
            self._pause(before)

    def detach_from_model(self) -> None:
        """Turn the layers back into ``nn.Linear`` and their weights into ordinary trainable parameters."""
        for layer in self.layers.values():
            layer.__class__ = nn.Linear
            for attribute in ("sketch", "projection", "holding", "paused", "contributions", "factor", "moving"):
                delattr(layer, attribute)
            layer.weight.requires_grad_(True)
        self.layers = {}

    def _pause(self, states: dict[str, bool]) -> None:
        for name, paused in states.items():
            self.layers[name].paused = paused


def select_layers(model: nn.Module, targets: Iterable[str] = DEFAULT_TARGETS) -> dict[str, nn.Linear]:
    """The linear layers whose name ends in one of ``targets``, by the canonical names of their weights.

    Raises ``ValueError`` if a target matches no layer, if a selected layer is no plain ``nn.Linear`` (quantised, an
    adapter, sketched already), if its weight is neither fp32 nor fp64 (an update of relative size 6e-5 is lost in
    bf16), and if the weight is tied to another module (a sketch would miss that module's share of the gradient).
    """
    targets = tuple(targets)
    modules = dict(model.named_modules())
    chosen = {name: module for name, module in modules.items() if last_part(name) in targets}
    missing = sorted(set(targets) - {last_part(name) for name in chosen})
    if missing or not chosen:
        here = sorted({last_part(name) for name, module in modules.items() if isinstance(module, nn.Linear)})
        raise ValueError(
            f"no layer is named {', '.join(missing) or '(no target given)'}; "
            f"linear layers of this model: {', '.join(here) or 'none'}"
        )
    owners: dict[int, list[str]] = {}
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    for name, module in chosen.items():
        if type(module) is not nn.Linear:
            raise ValueError(f"layer {name} is a {type(module).__name__}; only plain nn.Linear layers can be sketched")
        if module.weight.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"weight of {name} is {module.weight.dtype}; load the model in float32, or updates vanish")
        if len(owners[id(module.weight)]) > 1:
            raise ValueError(f"weight of {name} is tied to {owners[id(module.weight)]}; leave it out of the targets")
    return {canonical_name(f"{name}.weight"): module for name, module in chosen.items()}


def attach_sketches(
    model: nn.Module,
    rank: int,
    *,
    targets: Iterable[str] = DEFAULT_TARGETS,
    seed: int = 0,
    kind: Kind = "rademacher",
    holding: Holding = WHOLE,
) -> SketchSet:
    """Give every linear layer of ``model`` whose name ends in one of ``targets`` a sketch of ``rank`` columns.

    The selected weights no longer ask for a gradient; other parameters are left as they are. Sketches are fp32, or
    fp64 for fp64 weights, and have the rows that ``holding`` holds. Raises ``ValueError``, before anything is changed,
    for layers that cannot be sketched (``select_layers``) and for a rank that the kind of projection does not have.
    """
    layers = select_layers(model, targets)
    for layer in layers.values():
        Projection(kind, rank, layer.in_features, seed)
    for layer in layers.values():
        layer.__class__ = SketchedLinear
        layer.weight.requires_grad_(False)
        own = holding.own(layer.weight)
        layer.sketch = torch.zeros(len(own), rank, dtype=own.dtype, device=own.device)
        layer.holding, layer.paused, layer.contributions, layer.factor, layer.moving = holding, False, 0, None, False
    return SketchSet(layers, rank, kind, seed, holding)


def last_part(name: str) -> str:
    """``q_proj`` of ``layers.0.self_attn.q_proj``."""
    return name.rpartition(".")[2]
