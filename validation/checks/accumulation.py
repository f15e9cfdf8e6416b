"""C02: the sketch is the dense gradient times Aᵀ, over microbatches, with checkpointing and in bf16 (§2.1)."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from logra_ref import SketchSet, attach_sketches
from logra_ref.projection import Projection, projection_seed
from logra_ref.rl import importance_weights, reinforce_loss, token_log_probs
from logra_ref.toy import ModularSum, ToyPolicy
from validation.claim import Comparison, Measurement, Setting, claim
from validation.draws import KINDS

RANK = 4
WIDTH = 16
BF16_HALF_UNIT = 2.0**-8  # of a number's power of two: eight significant bits


class Batch:
    """Prompts, answers, advantages and the engine's log-probabilities of one microbatch."""

    def __init__(self, size: int, generator: torch.Generator, dtype: torch.dtype) -> None:
        task = ModularSum()
        self.prompts = task.prompts(size, generator)
        self.answers = torch.randint(task.modulus, (size,), generator=generator)
        self.advantages = torch.randn(size, generator=generator, dtype=dtype)
        self.rollout = torch.randn(size, generator=generator, dtype=dtype) - math.log(10)


def policy(setting: Setting, dtype: torch.dtype) -> ToyPolicy:
    """A small transformer whose weights depend on the setting's seed."""
    return ToyPolicy(ModularSum().vocabulary, width=WIDTH, seed=setting.derived_seed("policy")).to(dtype)


def backward(model: nn.Module, batch: Batch, denominator: float) -> None:
    """One microbatch's share of the REINFORCE loss with importance weights, and its backward pass."""
    found = token_log_probs(model(batch.prompts)[:, -1], batch.answers, 1.0)
    weights = importance_weights(found, batch.rollout)
    mask = torch.ones_like(batch.answers, dtype=torch.bool)
    reinforce_loss(found, batch.advantages, weights=weights, mask=mask, denominator=float(denominator)).backward()


def microbatches(setting: Setting, sizes: Sequence[int], dtype: torch.dtype) -> list[Batch]:
    """Microbatches of the given numbers of prompts."""
    generator = setting.generator("microbatches")
    return [Batch(size, generator, dtype) for size in sizes]


def with_checkpoints(model: ToyPolicy) -> None:
    """Let every block keep its input alone and compute its inside again in backward (non-reentrant)."""
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def dense_times(plain: nn.Module, projections: dict[str, Projection]) -> dict[str, Tensor]:
    """G Aᵀ in fp64 from autograd's dense gradients of an ordinary model."""
    gradients = dict(plain.named_parameters())
    return {name: gradients[name].grad.double() @ p.matrix(dtype=torch.float64).T for name, p in projections.items()}


def relative_errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """‖found − expected‖_F / ‖expected‖_F of each matrix."""
    return {name: float((found[name].double() - e).norm() / e.norm()) for name, e in expected.items()}


def next_projections(sketches: SketchSet) -> dict[str, Projection]:
    """The projections of the update after the first."""
    return {
        name: Projection(sketches.kind, sketches.rank, p.width, projection_seed(sketches.seed, 2, name))
        for name, p in sketches.projections().items()
    }


def in_fp64(setting: Setting, checkpointing: bool) -> Comparison:
    """The largest error over all matrices and kinds of projection, three unequal microbatches, all in fp64."""
    batches = microbatches(setting, (3, 1, 4), torch.float64)
    worst, wrong = 0.0, math.inf
    for kind in KINDS:
        model = policy(setting, torch.float64)
        plain = copy.deepcopy(model)
        sketches = attach_sketches(model, RANK, kind=kind, seed=setting.derived_seed("projections"))
        if checkpointing:
            with_checkpoints(model)
        for batch in batches:
            backward(model, batch, 8)
            backward(plain, batch, 8)
        expected = dense_times(plain, sketches.projections())
        worst = max(worst, *relative_errors(sketches.sketches(), expected).values())
        if checkpointing:
            control = {name: 2 * sketch for name, sketch in sketches.sketches().items()}
        else:
            control = dense_times(plain, next_projections(sketches))
        wrong = min(wrong, *relative_errors(control, expected).values())
    return Comparison(
        f"‖S − GAᵀ‖/‖S‖, 3 microbatches, {'checkpointed blocks' if checkpointing else 'no checkpointing'}, fp64: "
        "the largest of 14 matrices and 4 kinds",
        expected=0,
        measured=round(worst, 14),
        tolerance=1e-12,
        reason="sums of 24 tokens and 64 inputs in another order: a hundred roundings of 1e-16, times up to 50 where "
        "terms cancel",
        oracle="autograd's dense gradient of an ordinary model, times Aᵀ",
        control="a forward pass that is computed again counts twice" if checkpointing else "the next update's A",
        control_measured=wrong,
    )


def microbatches_add_up(setting: Setting) -> Comparison:
    """Eight microbatches of one prompt against one batch of eight."""
    (whole,) = microbatches(setting, (8,), torch.float64)
    plain = policy(setting, torch.float64)
    model = copy.deepcopy(plain)
    sketches = attach_sketches(model, RANK, seed=setting.derived_seed("projections"))
    backward(plain, whole, 8)
    last: dict[str, Tensor] = {}
    for index in range(8):
        before = {name: sketch.clone() for name, sketch in sketches.sketches().items()}
        part = copy.copy(whole)
        for field, value in vars(whole).items():
            setattr(part, field, value[index : index + 1])
        backward(model, part, 8)
        last = {name: sketch - before[name] for name, sketch in sketches.sketches().items()}
    expected = dense_times(plain, sketches.projections())
    return Comparison(
        "‖S − GAᵀ‖/‖S‖, 8 microbatches against the dense gradient of the whole batch, fp64: the largest of 14 matrices",
        expected=0,
        measured=round(max(relative_errors(sketches.sketches(), expected).values()), 14),
        tolerance=1e-12,
        reason="as above: the same sum in another order",
        oracle="autograd's dense gradient of one batch, times Aᵀ",
        control="the sketch of the last microbatch alone",
        control_measured=min(relative_errors(last, expected).values()),
    )


class Recorder:
    """Keeps the input and output derivative of every sketched layer, which the layer itself must not keep."""

    def __init__(self, sketches: SketchSet) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.deltas: dict[str, Tensor] = {}
        for name, layer in sketches.layers.items():
            layer.register_forward_hook(functools.partial(self._record, name))

    def _record(self, name: str, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        self.inputs[name] = inputs[0].detach().to(output.dtype).flatten(0, -2).double()
        output.register_hook(lambda delta: self.deltas.__setitem__(name, delta.flatten(0, -2).double()))


def half_units(x: Tensor) -> Tensor:
    """Half the distance of neighbouring bf16 numbers at x: the most that rounding to nearest changes it."""
    return torch.ldexp(torch.full_like(x, BF16_HALF_UNIT), torch.frexp(x).exponent - 1)


def in_bf16(setting: Setting, count: int) -> tuple[list[Comparison], dict[str, list[float]]]:
    """bf16 compute, fp32 sums: the error is that of rounding each x Aᵀ to bf16 once, and no more."""
    model = policy(setting, torch.float32)
    sketches = attach_sketches(model, RANK, seed=setting.derived_seed("projections"))
    recorder = Recorder(sketches)
    matrices = {name: p.matrix(dtype=torch.float64) for name, p in sketches.projections().items()}
    exact, most, square, coarse = ({name: torch.zeros(1) for name in matrices} for _ in range(4))
    data: dict[str, list[float]] = {"microbatches": [], "fp32 sums": [], "bf16 sums": [], "predicted": []}
    before = {name: torch.zeros_like(sketch) for name, sketch in sketches.sketches().items()}
    for number, batch in enumerate(microbatches(setting, [2] * count, torch.float32), 1):
        with torch.autocast("cpu", torch.bfloat16):
            backward(model, batch, 2 * count)
        for name, a in matrices.items():
            delta, scale = recorder.deltas[name], sketches.projections()[name].scale
            projected = recorder.inputs[name] @ a.T
            half = scale * half_units(projected / scale)
            exact[name] = exact[name] + delta.T @ projected
            most[name] = most[name] + delta.abs().T @ half
            square[name] = square[name] + delta.square().T @ half.square() / 3
            added = sketches.sketches()[name] - before[name]
            coarse[name] = (coarse[name] + added).bfloat16().float()
            before[name] = sketches.sketches()[name].clone()
        if number & (number - 1) == 0 or number == count:
            whole = _norm(exact)
            data["microbatches"].append(float(number))
            data["fp32 sums"].append(_distance(before, exact) / whole)
            data["bf16 sums"].append(_distance(coarse, exact) / whole)
            data["predicted"].append(math.sqrt(sum(float(x.sum()) for x in square.values())) / whole)
    off = {name: (before[name] - e).abs() / most[name] for name, e in exact.items()}
    off_coarse = {name: (coarse[name] - e).abs() / most[name] for name, e in exact.items()}
    return [
        Comparison(
            "bf16 compute, fp32 sums: largest |S_ij − (δᵀxAᵀ)_ij| over its bound",
            expected=1,
            measured=max(float(x.max()) for x in off.values()),
            tolerance=0.02,
            relation="≤",
            reason="|error| ≤ Σ |δ| · 2⁻⁸ of the power of two of xAᵀ, by one rounding to bf16; 2 % for the fp32 sums",
            oracle="fp64 product of the layer's own bf16 inputs and derivatives, recorded by hooks",
            control="S kept in bf16 between microbatches",
            control_measured=max(float(x.max()) for x in off_coarse.values()),
        ),
        Comparison(
            f"the same over all entries of all matrices, {count} microbatches: ‖error‖ over its prediction",
            expected=1,
            measured=data["fp32 sums"][-1] / data["predicted"][-1],
            tolerance=0.5,
            relation="≤",
            reason="one rounding of each xAᵀ, uniform in ± half a unit: Σ δ² (half unit)²/3; equal tokens "
            "round alike, so single runs scatter by 8 %: 6 deviations",
            oracle="variance of the rounding errors, each from its own power of two",
            control="S kept in bf16 between microbatches",
            control_measured=data["bf16 sums"][-1] / data["predicted"][-1],
            chance=1e-7,
        ),
    ], data


def _norm(x: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(m.double().square().sum()) for m in x.values()))


def _distance(x: dict[str, Tensor], y: dict[str, Tensor]) -> float:
    return _norm({name: x[name].double() - y[name] for name in y})


@claim("C02", "direct accumulation equals compressing the dense gradient", "§2.1")
def accumulated(setting: Setting) -> Measurement:
    """The sketches of a small policy's RL loss against autograd, in fp64 and under autocast."""
    rounded, data = in_bf16(setting, 64 if setting.quick else 128)
    rounded_data = {name: [float(f"{x:.4g}") for x in values] for name, values in data.items()}
    return Measurement(
        [
            in_fp64(setting, checkpointing=False),
            in_fp64(setting, checkpointing=True),
            microbatches_add_up(setting),
            *rounded,
        ],
        note="Under bf16 compute the sketch has the accuracy of one rounding of xAᵀ, however many microbatches there "
        "are, since the sums are fp32.",
        data=rounded_data,
    )
