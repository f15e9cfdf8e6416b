"""What the probe costs beside one forward pass over the same tokens: by forward mode, by finite difference, exactly.

A forward pass is the policy's without gradient, up to the log-probabilities of the responses' tokens. ``jvp`` and
``finite difference`` are predictions of the KL, ``realised KL`` is its measurement once the weights have changed, and
``training`` the gradients of the same responses. One proposal is probed over and over, from real gradients of made-up
responses as long as they may be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

from scaled.bench import costs
from scaled.bench.costs import beside, measured, together
from scaled.bench.memory import made_up
from scaled.bench.smoke_run import SmokeRun
from scaled.build import build_method, build_policy
from scaled.config import RunConfig
from scaled.config_file import SHIPPED, load_config
from scaled.gradients import accumulate_gradients, build_probe, response_log_probs
from scaled.memory.architecture import architecture
from scaled.memory.plan import sizes_of
from scaled.model import evaluating
from scaled.probe import Probe
from scaled.ranks import ALONE

KINDS = {"jvp": "jvp", "finite difference": "finite_difference"}
WHOLE = "jvp and realised KL"  # what an update does
TARGET_RATIO, TARGET_SHARE = 2.5, 0.05
TRAINING = 3  # forward passes that training costs: forward, again for checkpointing, backward to the inputs


def compare(config: RunConfig, *, prompt: int, repeats: int) -> dict[str, Any]:
    """Figures of every alternative, and the share of an update that follows from them for the paper's recipes.

    Raises ``UserError`` if the model cannot be loaded or trained, or gives no finite gradient.
    """
    if config.launch.ranks > 1:
        config = config.model_copy(update={"launch": config.launch.model_copy(update={"ranks": 1})})
    config = config.model_copy(update={"method": "logra"})
    if config.threads:
        torch.set_num_threads(config.threads)
    sizes = sizes_of(config, architecture(config.model.path), prompt)
    policy, tokenizer = build_policy(config, config.model, ALONE)
    run = SmokeRun(config, policy, build_method(policy, config, ALONE), tokenizer=tokenizer)
    responses = made_up(
        policy.model.config.vocab_size, sizes, config.rollout.prompts * config.rollout.responses_per_prompt
    )
    probe = build_probe(run, responses, 1)
    chosen = [responses[i] for i in torch.cat([block.response for block in probe.blocks]).unique().tolist()]
    works, predicted = _works(run, probe, chosen)
    found = measured(works, repeats, policy.model.device)
    found[WHOLE] = together([found["jvp"], found["realised KL"]])
    rows = beside(found, "forward")
    shares = {
        kind: {name: share(paper, rows[kind]["ratio"]) for name, paper in recipes().items()} for kind in ("jvp", WHOLE)
    }
    return {
        "rows": rows,
        "predicted_kl": predicted,
        "share_of_update": shares,
        "model": config.model.path,
        "rank": config.logra.rank,
        "responses": len(chosen),
        "tokens": sum(block.input_ids.numel() for block in probe.blocks),
        "positions": sum(len(block.targets) for block in probe.blocks),
        "repeats": repeats,
        "threads": torch.get_num_threads(),
        "targets": {"ratio": TARGET_RATIO, "share": TARGET_SHARE},
    }


def _works(run: SmokeRun, probe: Probe, chosen: list) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """What is measured, and where the predictions will be."""
    predicted: dict[str, float] = {}
    advantages = torch.tensor([1.0, -1.0] * len(chosen), device=run.model.device)[: len(chosen)]
    temperature = run.config.rollout.temperature
    probe.record()

    def forward() -> None:
        with evaluating(run.model), torch.no_grad():
            for block in probe.blocks:
                response_log_probs(run.policy, block, temperature)

    def predict(kind: str) -> None:
        mine = Probe(run.policy, probe.blocks, kind=KINDS[kind], temperature=temperature, advance=run.advance)
        predicted[kind] = mine.predict(proposal[0])[0]

    def propose() -> None:
        proposal[:] = [run.method.optimizer.propose()]

    proposal: list = []
    works = {
        "forward": forward,
        "training": lambda: accumulate_gradients(run, chosen, advantages),
        "proposal": propose,
        **{kind: lambda kind=kind: predict(kind) for kind in KINDS},
        "realised KL": probe.realised_kl,
    }
    return works, predicted


def recipes() -> dict[str, RunConfig]:
    """The shipped ones of LoGRA that give the probe a number of responses a rank, as the paper's do."""
    every = {path.stem: load_config(path) for path in sorted(SHIPPED.glob("*.yaml"))}
    return {name: c for name, c in every.items() if c.method == "logra" and c.control.responses_per_rank}


def probed(config: RunConfig) -> tuple[int, int]:
    """Responses that are probed, and those of a batch."""
    batch = config.rollout.prompts * config.rollout.responses_per_prompt
    return min(config.control.responses(config.launch.ranks), batch), batch


def share(config: RunConfig, ratio: float) -> float:
    """The probe's part of training and probe if it costs ``ratio`` forward passes over its tokens.

    Its responses are drawn at random, so they have as many tokens as others. Rollout and merge are not counted.
    """
    chosen, batch = probed(config)
    return chosen * ratio / (TRAINING * batch + chosen * ratio)


def show(found: dict[str, Any], console: Console) -> None:
    """Print the table, the targets and the shares."""
    console.print(
        f"{found['model']}, r = {found['rank']}: {found['responses']} responses, {found['tokens']:,} tokens, "
        f"{found['positions']:,} positions; {found['repeats']} repeats, {found['threads']} threads"
    )
    costs.show(found["rows"], "forward", "the probe beside a forward pass over its tokens", console)
    predicted = ", ".join(f"{kind} {value:.3e}" for kind, value in found["predicted_kl"].items())
    console.print(f"predicted KL of the proposal: {predicted}")
    for kind in found["share_of_update"]:
        ratio = found["rows"][kind]["ratio"]
        met = "met" if ratio <= TARGET_RATIO else "missed"
        console.print(f"{kind}: {ratio:.2f} forward passes; the target of {TARGET_RATIO:g} is {met}")
    for name, config in recipes().items():
        chosen, batch = probed(config)
        parts = (f"{kind} {shares[name]:.1%}" for kind, shares in found["share_of_update"].items())
        console.print(
            f"{name}: {chosen} of {batch} responses are probed; share of an update: {', '.join(parts)} "
            f"(target {TARGET_SHARE:.0%})"
        )
    console.print(
        f"An update is taken as {TRAINING} forward passes over its batch (forward, again for checkpointing, backward "
        "to the inputs: no weight has a gradient) and the probe: p R / (3 b + p R), p of b responses at R passes each. "
        "R is of the model and lengths measured here."
    )
