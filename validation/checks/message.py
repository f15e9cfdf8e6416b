"""Bytes of the policy sync's message (C05)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from logra_ref import LoGRA, attach_sketches
from logra_ref.sync import FactorMessage, apply_message_, nudge_ties_
from validation.checks.sizes import COUNTED
from validation.claim import Comparison, Measurement, Setting, claim
from validation.message_files import MOST_A_FILE, MOST_A_MATRIX, file_sizes, in_fp32, renamed, sizes_by_format
from validation.shapes import MODELS, QWEN_7B, ModelShape

RANK = 256  # the paper's main runs
# What the size of a 7B message and its like were worked out to be, by hand from the shapes, before any was made.
STATED = {"1.5B": 6.4, "7B": 2.8, "27B": 2.1}
STATED_OF_ALL = 2.4  # 7B, over all weights
PARTS = 4  # ranks that write an update's files
FORMAT = "safetensors' format, its header written again from the description, and d (r + 4)"


def message_of(matrices: Mapping[str, tuple[int, int]], rank: int, generator: torch.Generator) -> FactorMessage:
    """A real message: a backward pass through matrices of these (d, k), the proposal, its int8 factors.

    All entries of a weight share one number of storage, so that a layer of a 27B model fits anywhere.
    """
    model = nn.ModuleDict()
    for name, (outputs, inputs) in matrices.items():
        with torch.device("meta"):
            model[name] = nn.Linear(inputs, outputs, bias=False)
        model[name].weight = nn.Parameter(torch.ones(()).expand(outputs, inputs))
    sketches = attach_sketches(model, rank, targets=matrices)
    optimizer = LoGRA(sketches, int8_factors=True)
    for layer in sketches.layers.values():
        layer(torch.randn(1, layer.in_features, generator=generator)).square().sum().backward()
    return FactorMessage.of(optimizer.propose(), 1.0, base_seed=sketches.seed)


def content_bytes(message: FactorMessage) -> dict[str, int]:
    """The bytes of each matrix's part of a message, as they would be written."""
    parts = [message.levels, message.coefficients]
    return {
        name.removesuffix(".weight"): sum(len(part[name].contiguous().numpy().tobytes()) for part in parts)
        for name in message.levels
    }


def sync_bytes(shape: ModelShape, rank: int, generator: torch.Generator) -> dict[str, int]:
    """Bytes of an update of a whole model: each selected matrix of its skeleton, in the message of its shape.

    Beside them the bytes in bf16 of these matrices and of all parameters.
    """
    matrices = shape.matrices()
    different = {f"{d}x{k}": (d, k) for d, k in matrices.values()}
    of_shape = {different[name]: size for name, size in content_bytes(message_of(different, rank, generator)).items()}
    skeleton = shape.skeleton()
    layers = [module for name, module in skeleton.named_modules() if name.rpartition(".")[2] in matrices]
    return {
        "message": sum(of_shape[layer.out_features, layer.in_features] for layer in layers),
        "selected": sum(2 * layer.weight.numel() for layer in layers),
        "all": sum(2 * parameter.numel() for parameter in skeleton.parameters()),
    }


def received(setting: Setting, *, seed_error: int = 0) -> int:
    """How many weights a receiver has otherwise than the trainer after one message, from factors and seed alone."""
    generator = setting.generator("C05 receiver")
    model = nn.ModuleDict({"up_proj": nn.Linear(48, 96, bias=False)})
    with torch.no_grad():
        model["up_proj"].weight.copy_(torch.randn(96, 48, generator=generator))
    sketches = attach_sketches(model, 8, targets=["up_proj"], seed=setting.derived_seed("C05 projection"))
    optimizer = LoGRA(sketches, 1e-2, int8_factors=True)
    weight = model["up_proj"].weight
    nudge_ties_(weight)
    theirs = {name: held.detach().clone() for name, held in sketches.weights().items()}
    model["up_proj"](torch.randn(5, 48, generator=generator)).square().sum().backward()
    message = FactorMessage.of(optimizer.propose(), 1.0, base_seed=sketches.seed)
    optimizer.step(alpha=1.0)
    apply_message_(theirs, replace(message, base_seed=message.base_seed + seed_error))
    return int((theirs["up_proj.weight"] != weight).sum())


@claim("C05", "the sync payload is O(d r) plus a seed", "§2.2")
def sync_payload(setting: Setting) -> Measurement:
    """Bytes of real messages, for the shapes of three models, and how they grow with d, r and k."""
    generator = setting.generator("C05 tokens")
    found = {name: sync_bytes(shape, RANK, generator) for name, shape in MODELS.items()}

    def small(outputs: int, inputs: int, rank: int) -> int:
        return content_bytes(message_of({"up_proj": (outputs, inputs)}, rank, generator))["up_proj"]

    by_rank = small(96, 80, 21) - small(96, 80, 20)
    by_row = small(97, 80, 20) - small(96, 80, 20)
    by_width = small(96, 8000, 20) - small(96, 80, 20)
    rows96, layer = message_of({"up_proj": (96, 80)}, 20, generator), MODELS["1.5B"].matrices()
    of_layer = renamed(message_of(layer, RANK, generator), "model.layers.27.self_attn.")
    rows = {name: len(levels) for name, levels in of_layer.levels.items()}
    beside = sum(file_sizes(of_layer, PARTS)) - sum(d * (RANK + 4) for d in rows.values())
    arithmetic = "Σ d (r + 4) over the architecture's matrices: a byte a factor, an fp32 coefficient a row"
    comparisons = [
        Comparison(
            f"message of a 7B update at r = {RANK}",
            expected=QWEN_7B.rows * (RANK + 4),
            measured=found["7B"]["message"],
            unit="bytes",
            tolerance=0,
            reason=COUNTED,
            oracle=arithmetic,
            control="factors as fp32",
            control_measured=QWEN_7B.rows * (4 * RANK + 4),
        ),
        *(
            _share(f"{name}: message over the selected weights in bf16", found[name], "selected", stated)
            for name, stated in STATED.items()
        ),
        _share("7B: message over all weights in bf16", found["7B"], "all", STATED_OF_ALL),
        Comparison(
            "bytes that one more unit of rank adds, for 96 rows",
            expected=96,
            measured=by_rank,
            tolerance=0,
            reason=COUNTED,
            oracle="one byte for each of d rows: linear in r",
            control="factors as fp32",
            control_measured=4 * 96,
        ),
        Comparison(
            "bytes that one more row adds, at r = 20",
            expected=24,
            measured=by_row,
            tolerance=0,
            reason=COUNTED,
            oracle="r bytes and an fp32 number: linear in d",
            control="U A itself in int8, 80 columns",
            control_measured=80 + 4,
        ),
        Comparison(
            "bytes that 100 times the inputs k add",
            expected=0,
            measured=by_width,
            tolerance=0,
            reason=COUNTED,
            oracle="O(d r) has no k in it",
            control="U A itself in int8",
            control_measured=96 * (8000 - 80),
        ),
        Comparison(
            "bytes of the file of a message, 96 rows, r = 20, one matrix",
            expected=sum(sizes_by_format({"up_proj.weight": 96}, 20, 1, rows96.base_seed)),
            measured=sum(file_sizes(rows96, 1)),
            unit="bytes",
            tolerance=0,
            reason=COUNTED,
            oracle=FORMAT,
            control="factors as fp32",
            control_measured=sum(file_sizes(in_fp32(rows96), 1)),
        ),
        Comparison(
            f"bytes of the files in which {PARTS} ranks write a layer of 1.5B",
            expected=sum(sizes_by_format(rows, RANK, PARTS, of_layer.base_seed)),
            measured=sum(file_sizes(of_layer, PARTS)),
            unit="bytes",
            tolerance=0,
            reason=COUNTED,
            oracle=FORMAT,
            control="factors as fp32",
            control_measured=sum(file_sizes(in_fp32(of_layer), PARTS)),
        ),
        Comparison(
            "bytes there beside the factors, for each matrix in each file",
            expected=MOST_A_MATRIX + MOST_A_FILE / len(layer),
            measured=beside / PARTS / len(layer),
            unit="bytes",
            relation="≤",
            tolerance=0,
            reason="two names, types, shapes and places a matrix, and what a file says of itself",
            oracle="the longest header: names of 48 characters, numbers of 12 digits, whatever d, r and k are",
            control="A's signs as bits in place of the seed",
            control_measured=sum(RANK * k // 8 for _, k in layer.values()) / len(layer),
        ),
        Comparison(
            "weights that a receiver has otherwise than the trainer, from factors and seed alone, counted to 10",
            expected=0,
            measured=min(received(setting), 10),
            tolerance=0,
            reason="sums of integers are exact and both merge by the same two operations",
            oracle="the trainer's own weights, bit for bit",
            control="the receiver draws A from another base seed",
            control_measured=min(received(setting, seed_error=1), 10),
        ),
        Comparison(
            "the message's own count of its bytes, a layer of 1.5B",
            expected=sum(d * (RANK + 4) for d, _ in layer.values()),
            measured=of_layer.byte_count,
            unit="bytes",
            tolerance=0,
            reason=COUNTED,
            oracle=arithmetic,
            control="coefficients not counted",
            control_measured=sum(d * RANK for d, _ in layer.values()),
        ),
    ]
    models = [
        {
            "model": name,
            "all weights, bf16": sizes["all"],
            "selected weights, bf16": sizes["selected"],
            "factors, fp32": MODELS[name].rows * (4 * RANK + 4),
            "factors, int8": sizes["message"],
        }
        for name, sizes in found.items()
    ]
    note = (
        "The paper's own runs sent the full weights; int8 factors are this project's. A file also names its matrices "
        f"and their shapes, to be checked: {beside / PARTS / len(layer):.0f} bytes for each matrix in each file."
    )
    return Measurement(comparisons, note, {"rank": RANK, "models": models})


def _share(what: str, sizes: Mapping[str, int], of: str, stated: float) -> Comparison:
    share = 100 * sizes["message"] / sizes[of]
    return Comparison(
        what,
        expected=stated,
        measured=share,
        unit="%",
        tolerance=0.05,
        reason="half of the last digit stated",
        oracle="by hand from the shapes, to one decimal",
        control="factors as fp32",
        control_measured=share * (4 * RANK + 4) / (RANK + 4),
    )
