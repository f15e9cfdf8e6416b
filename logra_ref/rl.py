"""Advantages, losses and importance weights (§3.1): any differentiable RL loss fills the sketches.

Losses take arrays of tokens of any shape, (b, l) with a mask or (n,) of response tokens alone, and divide by a
``denominator`` that the caller takes from the global batch, so that microbatches and ranks simply add up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # e^20: beyond it a ratio is clipped away anyway, and e^89 overflows fp32


def token_log_probs(
    logits: Float[Tensor, "*n v"], tokens: Int[Tensor, "*n"], temperature: float
) -> Float[Tensor, "*n"]:
    """log softmax(z/T) of the given tokens, in at least fp32 (fp64 logits stay fp64).

    Its derivative in z is (1_token − softmax(z/T)) / T. Written out, it takes one array of the logits' size in
    backward, where autograd would take several.
    """
    return _TokenLogProbs.apply(logits, tokens, temperature)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, tokens, temperature):
        scaled = _scaled(logits, temperature)
        normaliser = torch.logsumexp(scaled, dim=-1)
        ctx.save_for_backward(logits, tokens, normaliser)
        ctx.temperature = temperature
        return scaled.gather(-1, tokens[..., None]).squeeze(-1) - normaliser

    @staticmethod
    def backward(ctx, rate):
        logits, tokens, normaliser = ctx.saved_tensors
        rate = (rate / ctx.temperature)[..., None]
        gradient = (_scaled(logits, ctx.temperature) - normaliser[..., None]).exp_().mul_(-rate)
        return gradient.scatter_add_(-1, tokens[..., None], rate).to(logits.dtype), None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1 else wide / temperature


@dataclass
class RunningBaseline:
    """Reward minus a running average of the mean rewards of past batches; it starts at 0 (§3.1)."""

    value: float = 0.0
    weight: float = 0.1

    def advantages(self, rewards: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """Advantages of a batch; only afterwards does the batch count in the average."""
        advantages = rewards - self.value
        self.value = (1 - self.weight) * self.value + self.weight * float(rewards.mean())
        return advantages


def group_relative_advantages(
    rewards: Float[Tensor, " b"], group: Int[Tensor, " b"], *, normalise: bool = True
) -> Float[Tensor, " b"]:
    """Reward minus the mean of its group (the responses to one prompt), over the group's standard deviation.

    A group whose rewards are all equal, of one response for instance, gives 0.
    """
    _, index, counts = torch.unique(group, return_inverse=True, return_counts=True)

    def group_mean(x: Tensor) -> Tensor:
        return torch.zeros(len(counts), dtype=x.dtype, device=x.device).index_add_(0, index, x) / counts

    centred = rewards - group_mean(rewards)[index]
    if not normalise:
        return centred
    deviation = group_mean(centred.square()).sqrt()[index]
    # Equal rewards differ from their mean by a rounding error, which must not be divided by itself.
    equal = deviation <= 1e-6 * rewards.abs().max()
    return torch.where(equal, 0, centred / torch.where(equal, 1, deviation))


def without_signal(advantages: Float[Tensor, " b"]) -> bool:
    """Whether all advantages are equal: then their gradient has mean zero, and η would make a full step of noise."""
    return len(advantages) == 0 or bool((advantages == advantages[0]).all())


def importance_weights(
    log_probs: Float[Tensor, "*n"], rollout_log_probs: Float[Tensor, "*n"], cap: float = 2.0
) -> Float[Tensor, "*n"]:
    """w_t = min(π_trainer / π_engine, cap), without a gradient: corrects for an engine that is not the trainer."""
    return _ratio(log_probs.detach(), rollout_log_probs).clamp(max=cap)


def reinforce_loss(
    log_probs: Float[Tensor, "*n"],
    advantages: Float[Tensor, "*n"],
    *,
    weights: Float[Tensor, "*n"],
    mask: Bool[Tensor, "*n"],
    denominator: float,
) -> Float[Tensor, ""]:
    """−Σ_t w_t A_t log π(a_t|s_t) / denominator; the denominator is the number of response tokens (global batch)."""
    log_probs, advantages, weights = _responses(mask, log_probs, advantages, weights)
    return -(weights * advantages * log_probs).sum() / denominator


def ppo_loss(
    log_probs: Float[Tensor, "*n"],
    old_log_probs: Float[Tensor, "*n"],
    advantages: Float[Tensor, "*n"],
    *,
    weights: Float[Tensor, "*n"],
    mask: Bool[Tensor, "*n"],
    denominator: float | Float[Tensor, "*n"],
    clip: float = 0.2,
) -> Float[Tensor, ""]:
    """−Σ_t w_t min(ρ_t A_t, clip(ρ_t, 1 ± ε) A_t) / denominator, with ρ_t = π/π_old.

    With one update a batch π_old is π: ρ = 1, and the gradient is that of ``reinforce_loss``. A tensor as
    denominator divides each token by its own number.
    """
    log_probs, old_log_probs, advantages, weights = _responses(mask, log_probs, old_log_probs, advantages, weights)
    if isinstance(denominator, Tensor):
        denominator = denominator[mask]
    ratio = _ratio(log_probs, old_log_probs)
    clipped = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -(weights * clipped / denominator).sum()


def grpo_loss(
    log_probs: Float[Tensor, "*n"],
    old_log_probs: Float[Tensor, "*n"],
    advantages: Float[Tensor, "*n"],
    *,
    weights: Float[Tensor, "*n"],
    mask: Bool[Tensor, "*n"],
    response_tokens: Float[Tensor, "*n"],
    responses: int,
    clip: float = 0.2,
) -> Float[Tensor, ""]:
    """PPO's clipped objective as a mean over the tokens of each response, then over responses (GRPO).

    ``response_tokens`` holds at each token the length of its response, ``responses`` their number in the global
    batch; advantages are group-relative.
    """
    denominator = response_tokens * responses
    return ppo_loss(
        log_probs, old_log_probs, advantages, weights=weights, mask=mask, denominator=denominator, clip=clip
    )


def _ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _responses(mask: Tensor, *arrays: Tensor) -> list[Tensor]:
    """The tokens of responses alone: what stands in the padding, NaN included, reaches neither loss nor gradient."""
    return [x[mask] for x in arrays]
