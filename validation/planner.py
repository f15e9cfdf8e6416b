"""The paper's memory figures by the planner: what is traced, and the one set of assumptions for what is not known.

Traced by `scaled.memory`, from the shapes, with the code that trains: four ranks that share all by FSDP2, each decoder
layer a unit and embedding, norm and output layer one more; fp32 weights, bf16 products, activation checkpointing, a
microbatch of one sequence of 4,096 tokens, flash attention. Dense Adam and LoRA train on the seven matrices of each
layer, as LoGRA does.

Assumed, since the paper does not say how its code holds logits: at the highest moment those of all 4,096 positions
exist in bf16 and once in fp32, 6 bytes a number, as with a cross-entropy that writes its gradient over the logits, and
embedding and output layer are gathered once, in bf16. Our own code holds the logits of `model.logit_rows` positions.
"""

from __future__ import annotations

from functools import cache

from scaled.config import RunConfig
from scaled.memory.architecture import architecture
from scaled.memory.plan import GIB, Items, Plan, highest, peaks
from scaled.memory.trace import Sizes
from validation.shapes import MODELS

RANKS, RANK, CONTEXT, PROMPT = 4, 256, 4096, 128
LOGIT_BYTES = 6
LOGIT_ROWS = 128  # of our own runs
PATHS = {"1.5B": "qwen2.5-math-1.5b", "7B": "qwen2.5-math-7b", "27B": "27b-stand-in"}
LOSS = ("backward", "")  # the place before backward has reached a layer


def settings(method: str, model: str) -> RunConfig:
    """The paper's main run (D.1, Table 4) as a configuration of ours."""
    return RunConfig.model_validate(
        {
            "run": "nowhere",
            "updates": 1,
            "method": method,
            "policy_sync": "factors" if method == "logra" else "full",
            "model": {"path": PATHS[model], "compute_dtype": "bfloat16", "logit_rows": LOGIT_ROWS},
            "data": {"task": "arithmetic"},
            # Sketches are there from the start, so that a microbatch is like the next; gradients are not.
            "rollout": {"backend": "vllm", "context": CONTEXT, "prompts": RANKS if method == "logra" else 128},
            "control": {"responses_per_rank": 2},
            "logra": {"rank": RANK},
            "lora": {"rank": RANK},
            "engine": {"dtype": "bfloat16"},
            "launch": {"ranks": RANKS},
        }
    )


@cache
def traced(method: str, model: str) -> dict[tuple[str, str], Items]:
    """Bytes by item at the highest moment of each place of an update."""
    return peaks(settings(method, model), architecture(PATHS[model]), Sizes(PROMPT, CONTEXT))


def ours(method: str, model: str) -> dict[str, Items]:
    """GiB by phase and item, as our code trains."""
    return {phase: _gib(items) for phase, items in Plan(highest(traced(method, model))).phases.items()}


def as_the_paper(method: str, model: str) -> Items:
    """GiB by item when the loss is differentiated, with the assumption on logits."""
    shape = MODELS[model]
    # Up to there LoGRA is dense Adam without gradients and moments; its sketches and projections are known by shape.
    items = _gib(traced("dense" if method == "logra" else method, model)[LOSS])
    items["logits"] = LOGIT_BYTES * CONTEXT * shape.vocabulary / GIB
    items["gathered layers"] = 2 * (1 if shape.tied else 2) * shape.vocabulary * shape.hidden / GIB
    if method == "logra":  # whole on every rank, and projections as fp32 numbers
        del items["gradients"], items["moments"]
        items["sketches"] = 4 * shape.rows * RANK / GIB
        items["projections"] = 4 * shape.columns * RANK / GIB
    return items


def _gib(items: Items) -> Items:
    return {item: size / GIB for item, size in items.items() if size > 0}
