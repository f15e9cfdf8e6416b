"""The gradient of a batch's loss, microbatch by microbatch, and the probe on some of its responses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from logra_ref.rl import grpo_loss, importance_weights, ppo_loss, reinforce_loss, token_log_probs
from scaled.batching import Batch, microbatches, no_response, probe_indices
from scaled.config import LossConfig
from scaled.errors import NumericalTrouble
from scaled.policy import Policy
from scaled.probe import Probe
from scaled.records import Response
from scaled.seeds import derive_seed

if TYPE_CHECKING:  # another trainer's stand-in, as that of `bench.smoke_run`, does as well
    from scaled.run import Run


def accumulate_gradients(run: Run, responses: list[Response], advantages: Tensor) -> dict[str, Any]:
    """Forward and backward of every microbatch: the sketches (or gradients) of the whole batch's loss."""
    config, model = run.config, run.model
    started = perf_counter()
    run.method.zero_grad()
    lengths = torch.tensor([len(response.token_ids) for response in responses], device=model.device)
    blocks = own_blocks(run, responses, range(len(responses)))
    run.progress.phase("backward", len(blocks))
    largest, trouble = 0.0, None
    completed = torch.tensor([not response.truncated for response in responses], device=model.device)
    current = torch.tensor([not response.other_version for response in responses], device=model.device)
    apart = torch.zeros(4, dtype=torch.float64)
    for block in blocks:
        log_probs = response_log_probs(run.policy, block, config.rollout.temperature)
        weights = importance_weights(log_probs, block.rollout_log_probs, config.loss.importance_cap)
        loss = policy_loss(
            config.loss, log_probs, advantages[block.response], weights, lengths[block.response], lengths
        )
        if not torch.isfinite(loss):
            trouble = f"the loss of a microbatch is {loss.item()}; the update was refused"
        loss.backward()
        largest = max([largest, *weights.tolist()])
        same = current[block.response]
        apart += differences((block.rollout_log_probs - log_probs.detach())[same], completed[block.response][same])
        run.advance(1)
    with run.ranks.together():  # not before: the others would wait for the weights of a rank that stopped
        if trouble:
            raise NumericalTrouble(trouble)
    mismatch, completed_tokens, difference, response_tokens = run.ranks.total(apart).tolist()
    in_process = config.rollout.backend == "hf"
    tokens = sum(len(response.prompt_ids) + len(response.token_ids) for response in responses)
    return {
        "importance_max": max(run.ranks.gather(largest)),
        "mismatch_kl": None if in_process or not completed_tokens else mismatch / completed_tokens,
        "log_prob_difference": None if in_process or not response_tokens else difference / response_tokens,
        "tokens": tokens,
        "seconds_train": perf_counter() - started,
    }


def differences(gaps: Tensor, completed: Tensor) -> Tensor:
    """Of the gaps log p_engine − log p_trainer: sum and count over tokens of completed responses, Σ |gap| and count."""
    gaps = gaps.double().cpu()
    kept = gaps[completed.cpu()]
    return torch.stack([kept.sum(), torch.tensor(float(len(kept))), gaps.abs().sum(), torch.tensor(float(len(gaps)))])


def policy_loss(
    settings: LossConfig, log_probs: Tensor, advantages: Tensor, weights: Tensor, own_length: Tensor, lengths: Tensor
) -> Tensor:
    """A microbatch's share of the loss of the global batch, whose responses have ``lengths`` tokens."""
    mask = torch.ones_like(log_probs, dtype=torch.bool)
    if settings.kind == "reinforce":
        return reinforce_loss(log_probs, advantages, weights=weights, mask=mask, denominator=float(lengths.sum()))
    old = log_probs.detach()  # one update a batch: the policy that is trained is the one that is measured against
    if settings.kind == "ppo":
        return ppo_loss(
            log_probs,
            old,
            advantages,
            weights=weights,
            mask=mask,
            denominator=float(lengths.sum()),
            clip=settings.clip,
        )
    return grpo_loss(
        log_probs,
        old,
        advantages,
        weights=weights,
        mask=mask,
        response_tokens=own_length.to(log_probs.dtype),
        responses=len(lengths),
        clip=settings.clip,
    )


def build_probe(run: Run, responses: list[Response], batch_number: int) -> Probe:
    """The probe's responses, drawn at random before anything is sorted."""
    config, control = run.config, run.config.control
    chosen = probe_indices(
        [len(response.token_ids) for response in responses],
        positions=control.positions,
        responses=control.responses(run.ranks.world),
        seed=derive_seed(config.seed, "probe", batch_number),
    )
    blocks = own_blocks(run, responses, chosen)
    run.progress.phase("probe", len(blocks))
    return Probe(
        run.policy,
        blocks,
        kind=control.probe,
        temperature=config.rollout.temperature,
        advance=run.advance,
        total=run.ranks.total,
    )


def own_blocks(run: Run, responses: list[Response], chosen: Sequence[int]) -> list[Batch]:
    """This rank's share of the chosen responses in microbatches, as many as every other rank has."""
    size, pad_id = run.config.microbatch, run.tokenizer.pad_token_id
    by_length = sorted(chosen, key=lambda index: len(responses[index].prompt_ids) + len(responses[index].token_ids))
    blocks = microbatches(responses, run.ranks.share(by_length), size, pad_id, run.model.device)
    count = math.ceil(math.ceil(len(chosen) / run.ranks.world) / size)
    return blocks + [no_response(pad_id, run.model.device)] * (count - len(blocks))


def response_log_probs(policy: Policy, block: Batch, temperature: float) -> Tensor:
    """The log-probabilities (p,) of the block's sampled tokens."""
    return policy.readout(
        lambda logits, targets: token_log_probs(logits, targets, temperature), policy(block), beside=[block.targets]
    )
