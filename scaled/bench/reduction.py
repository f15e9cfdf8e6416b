"""Bytes that ranks sum in a backward pass: sketches beside dense gradients, counted in real processes over gloo.

What is counted is what ranks hand to collectives, seen as torch dispatches them: those that sum, and those that gather
the weights' shards, which both methods do alike. By formula an update's gradients have Σ d k numbers of 4 bytes and its
sketches Σ d r, and (ranks − 1) / ranks of what is handed over leaves each rank.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from logra_ref.sketch import select_layers
from scaled.bench.contenders import settings
from scaled.bench.phases import failure
from scaled.bench.smoke_run import SmokeRun, clock, made_up
from scaled.build import build_method, build_policy
from scaled.errors import UserError
from scaled.gradients import accumulate_gradients
from scaled.memory.architecture import architecture, shipped
from scaled.ranks import joined_ranks

SUMMED, GATHERED = "summed", "gathered"
KINDS = {"reduce_scatter": SUMMED, "allreduce": SUMMED, "allgather": GATHERED}
FP32 = 4
PAPER_RANK = 256


class CountedBytes(TorchDispatchMode):
    """Inside, ``bytes`` counts what this rank hands to collectives that sum, and gets from those that gather."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function.namespace == "c10d":
            name = function._opname.strip("_").replace("all_reduce", "allreduce").replace("all_gather", "allgather")
            for beginning, kind in KINDS.items():
                if name.startswith(beginning):
                    # The output comes first; of a sum in place it is the input too.
                    whole = args[0] if kind == GATHERED or beginning == "allreduce" else args[1]
                    tensors = [leaf for leaf in tree_leaves(whole) if isinstance(leaf, torch.Tensor)]
                    self.bytes[kind] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return function(*args, **(kwargs or {}))


def by_formula(name: str, rank: int) -> dict[str, int]:
    """Bytes of the sketches and of the dense gradients of a model's selected matrices, in fp32."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture(name))
    shapes = [layer.weight.shape for layer in select_layers(model).values()]
    return {"logra": FP32 * sum(d * rank for d, _ in shapes), "dense": FP32 * sum(d * k for d, k in shapes)}


def compare(model: str, *, rank: int, ranks: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Bytes and seconds of a backward pass of each method in so many processes, the formula, and what it says of the
    paper's models. Raises ``UserError`` if a measurement fails."""
    several = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "scaled.bench.reduction"]
    found = {}
    for name in (f"logra:{rank}", "dense"):
        job = [sys.executable, "-m", *several, name, model, str(tokens), str(repeats)]
        done = subprocess.run(job, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"measuring {name} failed: {failure(done)}")
        found[name.partition(":")[0]] = json.loads(done.stdout.splitlines()[-1])
    summed = {method: one["bytes"][SUMMED] for method, one in found.items()}
    return {
        "measured": found,
        "formula": by_formula(model, rank),
        "ratio_to_dense": summed["logra"] / summed["dense"],
        "paper": {name: by_formula(name, PAPER_RANK) for name in shipped()},
        "model": model,
        "rank": rank,
        "ranks": ranks,
        "tokens": tokens,
    }


def measure(name: str, model: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Bytes by kind of collective, and the seconds of forward and backward, of this rank."""
    config = settings(name, model, checkpointing=False)
    device = torch.device("cpu")
    with joined_ranks(device) as ranks:
        policy, tokenizer = build_policy(config, config.model, ranks)
        run = SmokeRun(config, policy, build_method(policy, config, ranks), ranks, tokenizer)
        responses, advantages = made_up(policy.model.config.vocab_size, tokens, ranks.rank)
        with CountedBytes() as counted:
            accumulate_gradients(run, responses, advantages)
        seconds = []
        for _ in range(repeats):
            started = clock(device)
            accumulate_gradients(run, responses, advantages)
            seconds.append(clock(device) - started)
    return {"bytes": counted.bytes, "seconds": statistics.median(seconds)}


def show(found: dict[str, Any], console: Console) -> None:
    """Print what was counted beside the formula, and the paper's models by formula."""
    part = (found["ranks"] - 1) / found["ranks"]
    title = f"{found['model']}, r = {found['rank']}, {found['ranks']} ranks, one microbatch; MB"
    table = Table(
        "", "summed", "by formula", "leaves a rank", "weights gathered", "forward and backward, s", title=title
    )
    for method, one in found["measured"].items():
        summed = one["bytes"][SUMMED]
        table.add_row(
            method,
            f"{summed / 1e6:.2f}",
            f"{found['formula'][method] / 1e6:.2f}",
            f"{part * summed / 1e6:.2f}",
            f"{one['bytes'].get(GATHERED, 0) / 1e6:.2f}",
            f"{one['seconds']:.3f}",
        )
    console.print(table)
    console.print(f"sketches over gradients: {found['ratio_to_dense']:.4f}")
    for name, each in found["paper"].items():
        console.print(
            f"{name}, r = {PAPER_RANK}, by formula: {each['logra'] / 1e9:.3f} GB of sketches, "
            f"{each['dense'] / 1e9:.2f} of gradients: {each['logra'] / each['dense']:.4f}"
        )


if __name__ == "__main__":
    try:
        answer = json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
        if os.environ.get("RANK", "0") == "0":
            print(answer)
    except UserError as error:  # without a traceback, as the caller shows what is written here
        sys.exit(str(error))
