"""Bytes of a sketch (C04), and of weights and Adam's moments at 7B (C11)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from logra_ref import attach_sketches
from validation.claim import Comparison, Measurement, Setting, claim
from validation.shapes import MODELS, QWEN_7B, count, dense_memory, logra_memory

MIB, GB = 2**20, 1e9
RANKS, SKETCH_RANK = 4, 256  # of the paper's main runs: GPUs that train, and r
COUNTED = "a count of bytes: nothing is rounded"


def storage(tensor: Tensor | None) -> int:
    """The bytes that hold a tensor's numbers; 0 for no tensor."""
    return 0 if tensor is None else tensor.untyped_storage().nbytes()


def gradient_storage(outputs: int, inputs: int, rank: int, generator: torch.Generator) -> dict[str, int]:
    """Bytes that a backward pass of one token leaves behind for a (d, k) matrix: dense, and with a sketch of rank r."""
    token = torch.randn(1, inputs, generator=generator)
    layer = nn.Sequential()
    layer.add_module("up_proj", nn.Linear(inputs, outputs, bias=False))
    layer(token).sum().backward()
    dense = storage(layer.up_proj.weight.grad)
    layer.zero_grad()
    sketches = attach_sketches(layer, rank, targets=["up_proj"])
    layer(token).sum().backward()
    sketch = sum(storage(tensor) for tensor in sketches.sketches().values())
    return {"dense": dense, "sketch": sketch, "beside the sketch": storage(layer.up_proj.weight.grad)}


@claim("C04", "d = k = 4096, r = 64: a gradient of 64 MiB becomes a sketch of 1 MiB", "§2.2")
def sketch_size(setting: Setting) -> Measurement:
    """Both accumulators of real layers, square and not, after a backward pass."""
    generator = setting.generator("C04 tokens")
    square = gradient_storage(4096, 4096, 64, generator)
    wide = gradient_storage(512, 4096, 64, generator)
    counted = "arithmetic on d, k, r and 4 bytes a number"
    comparisons = [
        Comparison(
            "sketch of a 4096 × 4096 matrix at r = 64, fp32",
            expected=4096 * 64 * 4 / MIB,
            measured=square["sketch"] / MIB,
            unit="MiB",
            tolerance=0,
            reason=COUNTED,
            oracle=counted,
            control="accumulate d·k numbers, as dense does",
            control_measured=square["dense"] / MIB,
        ),
        Comparison(
            "its dense gradient, fp32",
            expected=4096 * 4096 * 4 / MIB,
            measured=square["dense"] / MIB,
            unit="MiB",
            tolerance=0,
            reason=COUNTED,
            oracle=counted,
            control="accumulate d·r numbers",
            control_measured=square["sketch"] / MIB,
        ),
        Comparison(
            "sketch of a 512 × 4096 matrix at r = 64: d·r numbers and not r·k",
            expected=512 * 64 * 4 / MIB,
            measured=wide["sketch"] / MIB,
            unit="MiB",
            tolerance=0,
            reason=COUNTED,
            oracle=counted,
            control="project the output side: r·k numbers",
            control_measured=gradient_storage(4096, 512, 64, generator)["sketch"] / MIB,
        ),
        Comparison(
            "dense gradient that the sketched layer leaves as well",
            expected=0,
            measured=square["beside the sketch"] / MIB,
            unit="MiB",
            tolerance=0,
            reason=COUNTED,
            oracle="the weight takes part in no gradient",
            control="a plain nn.Linear",
            control_measured=square["dense"] / MIB,
        ),
    ]
    return Measurement(comparisons, data={"square": square, "wide": wide})


def moment_bytes(skeleton: nn.Module) -> int:
    """Bytes of both moments after a step of torch's Adam on a model without memory."""
    parameters = list(skeleton.parameters())
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    adam = torch.optim.Adam(parameters)
    adam.step()
    moments = [state[name] for state in adam.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return sum(moment.numel() * moment.element_size() for moment in moments)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters in the type they have."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


@claim("C11", "7B: bf16 weights 14 GB, Adam's moments 56 GB", "§1")
def weights_and_moments(setting: Setting) -> Measurement:
    """Counted on the 7B model that transformers builds, beside the paper's figures, which are those of 7e9."""
    skeletons = {name: shape.skeleton() for name, shape in MODELS.items()}
    counts = {name: count(skeleton) for name, skeleton in skeletons.items()}
    moments = moment_bytes(skeletons["7B"])
    weights = weight_bytes(skeletons["7B"].to(torch.bfloat16))
    number = QWEN_7B.parameters
    untied = QWEN_7B.vocabulary * QWEN_7B.hidden
    comparisons = [
        Comparison(
            "7B weights in bf16",
            expected=2 * number / GB,
            measured=weights / GB,
            unit="GB",
            tolerance=1e-9,
            reason="a count of bytes, printed in GB: one byte",
            oracle="2 bytes times the parameters, counted from the architecture's numbers",
            control="output layer taken as tied to the embedding",
            control_measured=2 * (number - untied) / GB,
        ),
        Comparison(
            "both moments of torch's Adam in fp32 after a step",
            expected=8 * number / GB,
            measured=moments / GB,
            unit="GB",
            tolerance=1e-9,
            reason="a count of bytes, printed in GB: one byte",
            oracle="2 × 4 bytes times the parameters",
            control="moments in bf16",
            control_measured=moments / 2 / GB,
        ),
        *(
            Comparison(
                f"{name} parameters, from the architecture's numbers",
                expected=counts[name],
                measured=shape.parameters,
                tolerance=0,
                reason=COUNTED,
                oracle="transformers builds the model on the meta device; its parameters are counted",
                control="embedding and output layer both counted or both tied, the other way",
                control_measured=replace(shape, tied=not shape.tied).parameters,
            )
            for name, shape in MODELS.items()
        ),
        *(
            Comparison(
                f"{what} of the 7B model beside the paper's {paper} GB",
                expected=paper,
                measured=measured / GB,
                unit="GB",
                tolerance=0.5,
                reason="half of the last digit printed",
                oracle="the paper, §1",
                control=f"{wrong} bytes a number",
                control_measured=wrong * number / GB,
                from_paper=True,
            )
            for paper, measured, wrong, what in (
                (14, weights, 4, "bf16 weights"),
                (56, moments, 4, "moments"),
            )
        ),
    ]
    note = (
        "The 7B model has 7.62e9 parameters, so its bf16 weights are 15.2 GB and the moments 60.9 GB; the paper's 14 "
        "and 56 are 7e9 parameters in GB. (In GiB the real ones are 14.2 and 56.7.)"
    )
    memory = {
        name: {"dense": dense_memory(shape, RANKS), "logra": logra_memory(shape, SKETCH_RANK, RANKS)}
        for name, shape in MODELS.items()
    }
    data: dict[str, Any] = {"weights_gb": weights / GB, "moments_gb": moments / GB, "memory_gib": memory}
    return Measurement(comparisons, note, data)
