"""A training step's cost beside dense Adam's, on a pretrained model (C22): seconds, and the operations counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from logra_ref.projection import canonical_name
from scaled.bench.contenders import Contender, open_contender
from scaled.bench.costs import beside, measured
from scaled.bench.smoke_run import RESPONSES, made_up
from scaled.gradients import accumulate_gradients
from validation.claim import Comparison, Measurement, Setting, claim

RANK = 64
TOKENS, QUICK_TOKENS = 512, 64  # of each sequence
REPEATS = 5
WITHIN = 0.01
GRADIENT_FIRST = "the dense gradient is formed and then projected, which gives the same sketches"
FORWARD_TWICE = "activations are computed again in LoGRA's backward"
NOTE = (
    "A step is forward, backward and update. Rollouts are alike. LoGRA's update has a probe besides, of 8 of 128 "
    "responses in the paper's recipe: `logra bench probe`. Seconds are of a CPU."
)


def operations_by_hand(config: dict[str, Any], tokens: int, rank: int) -> dict[str, int]:
    """Of a step of two sequences, by method, from the numbers of ``config.json``; a multiplication and an addition are
    two. What is linear in tokens and not a product with a matrix is left out."""
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or hidden // heads
    queries, keys = heads * width, kv_heads * width
    shapes = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
    length = tokens - 1  # nothing is predicted from the last
    n, predicted = RESPONSES * length, RESPONSES * (tokens - tokens // 8)  # an eighth of them are prompt
    product = 2 * n * layers * sum(d * k for d, k in shapes)
    head = 2 * predicted * hidden * config["vocab_size"]
    attention = layers * RESPONSES * 2 * length * length * queries  # a product of scores or of values
    alike = 2 * product + 2 * head + (2 + 5) * attention  # to outputs and to inputs; backward makes the scores anew
    sketch = 2 * n * rank * layers * sum(d + k for d, k in shapes)  # x Aᵀ, and its product with δᵀ
    update = 2 * rank * layers * sum(d * k for d, k in shapes)  # U A
    norm = 2 * rank * rank * layers * sum(d + k for d, k in shapes)  # of U A, by UᵀU and AAᵀ
    return {"dense": alike + product, "logra": alike + sketch + update + norm}


def steps(model: Path, tokens: int) -> dict[str, Callable[[], None]]:
    """A step by each method on the same batch, and the controls: more work for the same sketches."""
    dense, logra = (open_contender(name, str(model), checkpointing=False) for name in ("dense", f"logra:{RANK}"))
    twice = cache(lambda: open_contender(f"logra:{RANK}", str(model), checkpointing=True))
    responses, advantages = made_up(dense.run.model.config.vocab_size, tokens, 0)

    def take(contender: Contender) -> None:
        accumulate_gradients(contender.run, responses, advantages)
        contender.update()

    def gradient_first() -> None:
        accumulate_gradients(dense.run, responses, advantages)
        gradients = {canonical_name(name): p.grad for name, p in dense.run.model.named_parameters()}
        for name, layer in logra.run.method.sketches.layers.items():
            layer.sketch.copy_(layer.projection.project(gradients[name]))
            layer.contributions = 1
        logra.update()

    return {
        "dense": lambda: take(dense),
        "logra": lambda: take(logra),
        GRADIENT_FIRST: gradient_first,
        FORWARD_TWICE: lambda: take(twice()),
    }


@claim("C22", "updates an hour not lower than dense", "Table 1")
def step_beside_dense(setting: Setting) -> Measurement:
    """Seconds of a step over dense Adam's, in turn in one process, and operations over the count by hand."""
    folder = setting.model_folder()
    tokens = QUICK_TOKENS if setting.quick else TOKENS
    works = steps(folder, tokens)
    if setting.quick:
        del works[FORWARD_TWICE]  # for seconds alone
    found = measured(works, 0 if setting.quick else REPEATS, torch.device("cpu"))
    by_hand = operations_by_hand(json.loads((folder / "config.json").read_text()), tokens, RANK)
    counted = {name: one["operations"] / found["dense"]["operations"] for name, one in found.items()}
    ratio = by_hand["logra"] / by_hand["dense"]
    count = Comparison(
        f"operations of a step at r = {RANK} over dense Adam's, the 135M model",
        expected=ratio,
        measured=counted["logra"],
        tolerance=WITHIN * ratio,
        reason="1 %: layer 0 has no gradient to make for its input, and rotations are left out",
        oracle="products of the architecture's shapes, by hand",
        control=GRADIENT_FIRST,
        control_measured=counted[GRADIENT_FIRST],
    )
    dense = Comparison(
        "operations of dense Adam's step over the count by hand",
        expected=1,
        measured=found["dense"]["operations"] / by_hand["dense"],
        tolerance=WITHIN,
        reason="1 %: layer 0 has no gradient to make for its input",
        oracle="products of the architecture's shapes, by hand",
        control=GRADIENT_FIRST,
        control_measured=found[GRADIENT_FIRST]["operations"] / by_hand["dense"],
    )
    if setting.quick:
        missing = [f"seconds of a step over dense Adam's ({REPEATS} rounds)"]
        return Measurement([count, dense], NOTE, {"operations": counted}, missing)
    rows = beside(found, "dense")
    seconds = Comparison(
        f"seconds of a step at r = {RANK} over dense Adam's, the 135M model, median of {REPEATS}",
        expected=1,
        measured=rows["logra"]["ratio"],
        tolerance=0,
        relation="≤",
        reason="not slower: the spread is in the data",
        oracle="dense Adam in the same rounds",
        control=FORWARD_TWICE,
        control_measured=rows[FORWARD_TWICE]["ratio"],
    )
    return Measurement([seconds, count, dense], NOTE, {"tokens": RESPONSES * tokens, "rows": rows})
