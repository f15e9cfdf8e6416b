"""What drawing projections costs, and using them: counter-based bits beside torch's generator, and each kind.

``x Aᵀ`` and ``U A`` are taken of ``ROWS`` rows, with A drawn before. A Hadamard projection has k log₂ k additions a row
in place of a matrix product's operations, which are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import torch
from rich.console import Console

from logra_ref.projection import Kind, Projection
from scaled.bench import costs
from scaled.bench.contenders import open_contender
from scaled.bench.smoke_run import made_up
from scaled.gradients import accumulate_gradients

WIDTHS = (576, 1536, 3584, 18944)  # of SmolLM2-135M and Qwen2.5-Math-7B, the inputs of an attention's and an MLP's end
QR_WIDTH = 1536  # an orthonormal projection's QR decomposition is of k r² operations, and in fp64
ROWS = 256
DRAWN, USED = "torch.randint, signs in fp32", "gaussian"  # what the others are compared with
STEP, REDRAW = "forward and backward", "all projections drawn anew"
TARGET = 0.01


def compare(model: str, *, rank: int, tokens: int, repeats: int, widths: tuple[int, ...] = WIDTHS) -> dict[str, Any]:
    """Figures of every way to draw, of every kind's products, and of drawing all of a model's beside its training."""
    device = torch.device("cpu")
    drawn, projected, lifted = {}, {}, {}
    for width in widths:
        drawn[width] = costs.beside(costs.measured(_ways_to_draw(rank, width), repeats, device), DRAWN)
        projections = {
            kind: Projection(kind, rank, width, 1, keep=True)
            for kind in get_args(Kind)
            if kind != "orthonormal" or width <= QR_WIDTH
        }
        for into, method, operand in ((projected, "project", width), (lifted, "lift", rank)):
            x = torch.randn(ROWS, operand)
            works = {kind: partial(getattr(each, method), x) for kind, each in projections.items()}
            into[width] = costs.beside(costs.measured(works, repeats, device), USED)
    works, matrices = _training(model, rank, tokens)
    training = costs.beside(costs.measured(works, repeats, device), STEP)
    setting = {"model": model, "rank": rank, "tokens": tokens, "repeats": repeats, "threads": torch.get_num_threads()}
    found = {"drawn": drawn, "projected": projected, "lifted": lifted, "training": training, "matrices": matrices}
    return found | setting | {"share": training[REDRAW]["ratio"], "target": TARGET}


def _ways_to_draw(rank: int, width: int) -> dict[str, Callable[[], Any]]:
    return {
        "counter, packed bits": lambda: Projection("rademacher", rank, width, 1).packed(),
        "counter, signs in fp32": lambda: Projection("rademacher", rank, width, 1).entries(),
        DRAWN: lambda: 2.0 * torch.randint(2, (rank, width)) - 1,
        "torch.randn": lambda: torch.randn(rank, width),
    }


def _training(model: str, rank: int, tokens: int) -> tuple[dict[str, Callable[[], Any]], int]:
    """Drawing all projections of an update, beside forward and backward of two sequences; the number of matrices."""
    run = open_contender(f"logra:{rank}", model, checkpointing=False).run
    responses, advantages = made_up(run.model.config.vocab_size, tokens, 0)
    sketches = run.method.sketches

    def redraw() -> None:
        sketches.refresh(update=1)
        for layer in sketches.layers.values():
            layer.projection.packed()

    return {STEP: lambda: accumulate_gradients(run, responses, advantages), REDRAW: redraw}, len(sketches.layers)


def show(found: dict[str, Any], console: Console) -> None:
    """Print what is drawn, what is used, and the share of a step."""
    rank, more = found["rank"], f"{found['repeats']} repeats, {found['threads']} threads"
    for title, key, base in (
        ("drawing A", "drawn", DRAWN),
        (f"x Aᵀ of {ROWS} rows", "projected", USED),
        (f"U A of {ROWS} rows", "lifted", USED),
    ):
        for width, rows in found[key].items():
            costs.show(rows, base, f"{title}, r = {rank}, k = {width}; {more}", console)
    costs.show(found["training"], STEP, f"{found['model']}: two sequences of {found['tokens']} tokens; {more}", console)
    met = "met" if found["share"] <= found["target"] else "missed"
    console.print(
        f"Drawing the {found['matrices']} projections of an update takes {found['share']:.2%} of forward and backward "
        f"of these {2 * found['tokens']} tokens alone, and less of an update of more; the target of "
        f"{found['target']:.0%} of an update is {met}"
    )
