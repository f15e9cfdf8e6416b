"""The memory plan beside what an update really allocates on this machine's CPU.

The measure is torch's own (``allocations``): it knows nothing of the planner, and has the temporaries inside an
operation too, which the planner cannot see.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import record_function

from scaled.bench import allocations
from scaled.bench.phases import METHODS, failure
from scaled.bench.smoke_run import SmokeRun
from scaled.build import build_method, build_policy
from scaled.config import RunConfig
from scaled.errors import NumericalTrouble, UserError
from scaled.gradients import accumulate_gradients, build_probe
from scaled.memory.architecture import architecture
from scaled.memory.plan import PROMPT, plan_memory, sizes_of
from scaled.memory.trace import Sizes
from scaled.model import resolve_device
from scaled.ranks import joined_ranks
from scaled.records import Problem, Response
from scaled.run import require_same_settings

TRAIN, REST = "forward and backward", "probe and update"
PARTS = {TRAIN: ("forward", "backward"), REST: ("probe", "update")}
LIMIT = 0.10  # of the measured figure
MIB = 2**20


def compare(config: RunConfig, *, prompt: int = PROMPT) -> dict[str, dict[str, tuple[float, float]]]:
    """For each method and part of an update: bytes of one process, planned and measured (the largest of all ranks).

    Every response is made up and as long as it may be. Raises ``UserError`` if a measurement fails.
    """
    found = {}
    several = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(config.launch.ranks), "-m"]
    for method in METHODS:
        settings = _comparable(config, method)
        plan = plan_memory(settings, prompt=prompt, whole=True)
        ranks = several if config.launch.ranks > 1 else []
        job = [sys.executable, "-m", *ranks, "scaled.bench.memory", settings.model_dump_json(), str(prompt)]
        done = subprocess.run(job, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"measuring {method} failed: {failure(done)}")
        measured = json.loads(done.stdout.splitlines()[-1])
        found[method] = {
            part: (max(sum(plan.phases[phase].values()) for phase in phases), measured[part])
            for part, phases in PARTS.items()
        }
    return found


def measure(config: RunConfig, prompt: int) -> dict[str, int]:
    """The most bytes that torch's allocator had given out in each part of the second update, in this process."""
    sizes = sizes_of(config, architecture(config.model.path), prompt)
    device = resolve_device(config.model.device)
    with joined_ranks(device) as ranks:
        require_same_settings(config, ranks)
        with allocations.recorded() as record:
            policy, tokenizer = build_policy(config, config.model, ranks)
            gc.collect()  # the whole model that the first rank has read, in host memory where there is a GPU
            if ranks.world == 1:
                allocations.own_weights(policy)
            run = SmokeRun(config, policy, build_method(policy, config, ranks), ranks, tokenizer)
            responses = made_up(policy.model.config.vocab_size, sizes, _count(config))
            advantages = torch.tensor([1.0, -1.0] * len(responses))[: len(responses)]
            for update in (1, 2):
                with record_function(f"{TRAIN} {update}"):
                    accumulate_gradients(run, responses, advantages)
                with record_function(f"{REST} {update}"):
                    run.method.step(update, build_probe(run, responses, update), None, lambda: None)
        peaks = dict(allocations.peaks(record, TRAIN, REST))
        everyone = ranks.gather({part: peaks[f"{part} 2"] for part in PARTS})
    return {part: max(one[part] for one in everyone) for part in PARTS}


def made_up(vocabulary: int, sizes: Sizes, count: int) -> list[Response]:
    """Responses of full length to prompts that begin differently."""
    drawn = random.Random(0)
    answered = sizes.longest - sizes.prompt
    return [
        Response(
            problem=Problem(id=f"{number}", messages=(), answer=""),
            prompt_ids=(number % vocabulary, *drawn.choices(range(vocabulary), k=sizes.prompt - 1)),
            token_ids=tuple(drawn.choices(range(vocabulary), k=answered)),
            log_probs=(-1.0,) * answered,
            text="",
            stop_reason="length",
        )
        for number in range(count)
    ]


def show(found: dict[str, dict[str, tuple[float, float]]], console: Console) -> bool:
    """Print planned beside measured; whether all are within ``LIMIT``."""
    table = Table("method", "part of an update", "planned MiB", "measured MiB", "planned / measured")
    for method, parts in found.items():
        for part, (planned, measured) in parts.items():
            table.add_row(method, part, f"{planned / MIB:.1f}", f"{measured / MIB:.1f}", f"{planned / measured:.3f}")
    console.print(table)
    off = [abs(planned / measured - 1) for parts in found.values() for planned, measured in parts.values()]
    console.print(f"largest difference {max(off):.1%}, allowed {LIMIT:.0%}")
    return max(off) <= LIMIT


def _comparable(config: RunConfig, method: str) -> RunConfig:
    """Without what writes responses: they are made up."""
    settings = config.model_dump() | {"method": method, "policy_sync": "full"}
    settings["rollout"]["backend"] = "vllm"
    settings["model"]["device"] = "cpu"
    settings["engine"].pop("launched", None)
    return RunConfig.model_validate(settings)


def _count(config: RunConfig) -> int:
    """Responses: two microbatches for each rank, or as many as the configuration has."""
    return min(
        2 * config.microbatch * config.launch.ranks, config.rollout.prompts * config.rollout.responses_per_prompt
    )


if __name__ == "__main__":
    try:
        figures: dict[str, Any] = measure(RunConfig.model_validate_json(sys.argv[1]), int(sys.argv[2]))
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(figures))
    except (UserError, NumericalTrouble) as error:  # without a traceback, as the caller shows what is written here
        sys.exit(str(error))
