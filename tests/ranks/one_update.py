"""A worker: one update of a small Qwen2 on made-up responses by the trainer's own pieces, in any number of ranks.

``-m tests.ranks.one_update FILE``: in fp64 and fp32, with and without checkpointing; rank 0 writes what came out.
Then how often weights are gathered for few and for many logits at a time.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.models.qwen2 import modeling_qwen2

from scaled.build import build_method, policy_of, prepare_model
from scaled.config import RunConfig
from scaled.gradients import accumulate_gradients, build_probe
from scaled.progress import RunProgress
from scaled.ranks import Ranks, joined_ranks
from scaled.records import Problem, Response
from scaled.sharding import fill, gathered, shard
from tests.tiny import make_tiny_model

CPU = torch.device("cpu")
RANK, RATIO, TEMPERATURE, MICROBATCH = 5, 1e-2, 0.7, 2
# Embedding and output layer with weights of their own are shared out otherwise.
CASES = [(dtype, again, True) for dtype in (torch.float64, torch.float32) for again in (False, True)]
CASES += [(torch.float64, again, False) for again in (False, True)]


class NormInItsOwnType(nn.Module):
    """Transformers' norm computes in fp32 whatever comes in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


def small_model(dtype: torch.dtype, tied: bool = True) -> PreTrainedModel:
    """Four layers; 25 rows in some of its matrices and 4 in others, which three and four ranks cannot share evenly."""
    model = make_tiny_model(
        "qwen2", tied, initializer_range=0.3, num_hidden_layers=4, intermediate_size=25, num_key_value_heads=1
    )
    return model.to(dtype)


def some_responses() -> tuple[list[Response], torch.Tensor]:
    """Eleven responses of one to six tokens, and their advantages."""
    generator = torch.Generator().manual_seed(3)
    problem, made = Problem("made up", ({"role": "user", "content": "?"},), ""), []
    for i in range(11):
        prompt, tokens = (
            tuple(torch.randint(0, 200, (count,), generator=generator).tolist()) for count in (4 + i % 3, 1 + i % 6)
        )
        made.append(Response(problem, prompt, tokens, (-5.0,) * len(tokens), "", "stop"))
    return made, torch.randn(11, generator=generator, dtype=torch.float64)


def configuration(checkpointing: bool, logit_rows: int = 3) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": "unused",
            "updates": 1,
            "microbatch": MICROBATCH,
            "model": {"path": "unused", "gradient_checkpointing": checkpointing, "logit_rows": logit_rows},
            "data": {"task": "arithmetic"},
            "rollout": {"temperature": TEMPERATURE},
            "loss": {"kind": "reinforce", "importance_cap": 1.5},
            "logra": {"rank": RANK, "update_ratio": RATIO},
            "control": {"budget_max": 1e-3, "budget_min": 1e-4, "positions": 1000},
        }
    )


def a_run(config: RunConfig, dtype: torch.dtype, tied: bool, ranks: Ranks) -> SimpleNamespace:
    """What the trainer's pieces need of a run."""
    modeling_qwen2.Qwen2RMSNorm.forward = NormInItsOwnType.forward
    model = small_model(dtype, tied)
    prepare_model(model, config)
    policy = policy_of(model, config)
    if ranks.world > 1:
        source = model
        model = type(source)(source.config).to(dtype).to("meta")
        model.tie_weights()  # if they are to be
        prepare_model(model, config)
        policy = policy_of(model, config)
        model.enable_input_require_grads()
        shard(policy, ranks, dtype)
        fill(policy, source if ranks.first else None, CPU, ranks)
    return SimpleNamespace(
        config=config,
        ranks=ranks,
        policy=policy,
        model=model,
        method=build_method(policy, config, ranks),
        tokenizer=SimpleNamespace(pad_token_id=0),
        progress=RunProgress(1, 0, shown=False),
        advance=lambda count: None,
    )


def one_update(dtype: torch.dtype, checkpointing: bool, tied: bool, ranks: Ranks) -> dict:
    """Weights after the update, α and q; and on how many ranks the next forward pass is another."""
    run = a_run(configuration(checkpointing), dtype, tied, ranks)
    responses, advantages = some_responses()
    accumulate_gradients(run, responses, advantages.to(dtype))
    probe = build_probe(run, responses, 1)
    before = run.policy(probe.blocks[0])
    step = run.method.step(1, probe, None, lambda: None)
    with torch.no_grad():
        after = run.policy(probe.blocks[0])
    held = sum(sketch.numel() for sketch in run.method.sketches.sketches().values())
    return {
        "weights": {name: weight.clone() for name, weight in gathered(run.model)},
        "alpha": step.alpha,
        "q": step.q,
        "sketch_norm": step.sketch_norm,
        "moved": ranks.gather(bool(len(after) == 0 or (after - before).abs().max() > 1e-6)),
        "held": ranks.gather(held),
        "sums": ranks.gather(float(sum(sketch.sum() for sketch in run.method.sketches.sketches().values()))),
    }


class Gatherings(TorchDispatchMode):
    """Counts how often FSDP gathers a unit."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.fsdp.all_gather_copy_in.default
        return function(*args, **(kwargs or {}))


def gatherings(logit_rows: int, ranks: Ranks) -> int:
    """How often a unit is gathered for the gradients of all microbatches."""
    run = a_run(configuration(True, logit_rows), torch.float32, False, ranks)
    responses, advantages = some_responses()
    with Gatherings() as found:
        accumulate_gradients(run, responses, advantages.float())
    return found.count


if __name__ == "__main__":
    with joined_ranks(CPU) as ranks:
        found = {
            (str(dtype), checkpointing, tied): one_update(dtype, checkpointing, tied, ranks)
            for dtype, checkpointing, tied in CASES
        }
        pieces = {rows: gatherings(rows, ranks) for rows in (3, 1000)} if ranks.world > 1 else None
        if ranks.first:
            torch.save((found, pieces), sys.argv[1])
