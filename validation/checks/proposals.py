"""Real proposals, with the contexts on which their KL is probed, and oracles for both that use no part of the probes.

``toy_proposal``: a small transformer in fp64, norms and attention included. ``pretrained_proposal``: the 135M model as
transformers runs it. Both come from the gradient of an RL loss, by RowAdam, as an update of a run does.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.special
import torch
from torch import Tensor

from logra_ref import LoGRA, attach_sketches
from logra_ref.direction import Factor
from logra_ref.predicted_kl import probe_jvp
from logra_ref.rl import reinforce_loss, token_log_probs
from logra_ref.toy import ModularSum, ToyPolicy, sample_answers
from logra_ref.update import FactoredUpdate
from validation.claim import Setting

TEMPERATURE = 0.6
"""Not 1, so that a T too many or too few shows."""


@dataclass(frozen=True)
class Proposal:
    """An update that was proposed and not applied, and where its KL is probed.

    ``logits_of`` maps a block of ``contexts`` to the logits (p, v) at its response positions; ``ratio`` is ρ, the size
    of the update over the size of the selected weights; ``response`` (p,) says which response a position belongs to.
    """

    update: FactoredUpdate
    contexts: list[Any]
    logits_of: Callable[[Any], Tensor]
    ratio: float
    response: Tensor
    temperature: float = TEMPERATURE

    def logits(self) -> np.ndarray:
        """Logits (p, v) of the model as it is, fp64."""
        with torch.no_grad():
            return torch.cat([self.logits_of(block) for block in self.contexts]).double().numpy()

    def displaced_logits(self, alpha: float) -> np.ndarray:
        """Logits (p, v) at W + α D, by the factors."""
        with self.update.displaced(alpha):
            return self.logits()

    def q(self) -> np.ndarray:
        """q(D) at each position (p,), by the forward-mode probe of ``logra_ref``."""
        return probe_jvp(self.update, self.contexts, self.logits_of, temperature=self.temperature).numpy()

    def resized(self, factor: float) -> Proposal:
        """The same direction with ρ times ``factor``."""
        return replace(self, ratio=factor * self.ratio).with_factors(self.update.factors)

    def with_factors(self, factors: Mapping[str, Factor]) -> Proposal:
        """Other U by the same projections, of size ρ ‖W‖ as every update is."""
        update = FactoredUpdate(self.update.layers, factors, update=self.update.update, update_ratio=self.ratio)
        return replace(self, update=update)

    def without(self, part: str) -> Proposal:
        """A wrong proposal for controls: matrices with ``part`` in their name do not move, η is as before."""
        update = copy.copy(self.update)
        update.factors = {
            name: Factor.of(torch.zeros_like(factor.direction())) if part in name else factor
            for name, factor in self.update.factors.items()
        }
        return replace(self, update=update)


def toy_proposal(
    setting: Setting, *, draw: int = 0, ratio: float = 1e-2, rank: int = 4, prompts: int = 256
) -> Proposal:
    """The first update of an untrained toy policy in fp64 on addition modulo 10; its contexts are 64 of the prompts.

    Another ``draw`` is another policy, another batch and other projections.
    """
    generator = setting.generator(f"kl/toy/{draw}")
    task = ModularSum(10)
    policy = ToyPolicy(task.vocabulary, width=32, layers=2, seed=setting.derived_seed(f"kl/toy policy/{draw}")).double()
    sketches = attach_sketches(policy, rank, seed=setting.derived_seed(f"kl/toy projections/{draw}"))
    optimizer = LoGRA(sketches, ratio)
    asked = task.prompts(prompts, generator)
    answers, _ = sample_answers(policy, asked, TEMPERATURE, generator)
    rewards = task.rewards(asked, answers).double()
    log_probs = token_log_probs(policy(asked)[:, -1], answers, TEMPERATURE)
    ones = torch.ones_like(log_probs)
    loss = reinforce_loss(log_probs, rewards - rewards.mean(), weights=ones, mask=ones.bool(), denominator=prompts)
    loss.backward()
    contexts = asked[:64]
    return Proposal(optimizer.propose(), [contexts], lambda block: policy(block)[:, -1], ratio, torch.arange(64))


def pretrained_proposal(setting: Setting, *, responses: int, ratio: float = 6e-5, rank: int = 16) -> Proposal:
    """An update of the 135M model: written answers to sums, half of them right. Raises ``NotMeasured`` without it."""
    folder = setting.model_folder()
    # Not at the top: the other checks need not wait for transformers, which loads tqdm; in a notebook without its
    # widgets tqdm says so, though nothing here shows a bar.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")
        from scaled.batching import collate
        from scaled.config_data import ModelConfig
        from scaled.model import load_model
        from scaled.policy import Policy
        from scaled.records import Response
        from scaled.rollout.prompts import encode_prompt
        from scaled.tasks import arithmetic

    model, tokenizer = load_model(ModelConfig(path=str(folder), device="cpu"))
    model.requires_grad_(False)
    problems = arithmetic()
    chosen = torch.randperm(len(problems), generator=setting.generator("kl/problems"))[:responses].tolist()
    written, advantages = [], []
    for number, index in enumerate(chosen):
        problem, wrong = problems[index], number % 2
        text = f" {int(problem.answer) + wrong}. I counted on my fingers."
        token_ids = (*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id)
        prompt_ids = tuple(encode_prompt(tokenizer, problem))
        written.append(Response(problem, prompt_ids, token_ids, (0.0,) * len(token_ids), text, "stop"))
        advantages.append(-1.0 if wrong else 1.0)
    batch = collate(written, range(responses), tokenizer.pad_token_id, torch.device("cpu"))

    logits_of = Policy(model, trains_head=True)

    sketches = attach_sketches(model, rank, seed=setting.derived_seed("kl/pretrained projections"))
    log_probs = token_log_probs(logits_of(batch), batch.targets, TEMPERATURE)
    ones = torch.ones_like(log_probs)
    advantage = torch.tensor(advantages)[batch.response]
    reinforce_loss(log_probs, advantage, weights=ones, mask=ones.bool(), denominator=len(ones)).backward()
    return Proposal(LoGRA(sketches, ratio).propose(), [batch], logits_of, ratio, batch.response)


def dense_direction(proposal: Proposal) -> dict[str, Tensor]:
    """D = −η U A for every matrix as a dense (d, k), with η such that ‖D‖ = ρ ‖W‖ over all of them together."""
    update = proposal.update
    lifted = {
        name: factor.direction() @ update.projections[name].matrix(dtype=factor.levels.dtype)
        for name, factor in update.factors.items()
    }
    eta = proposal.ratio * frobenius(layer.weight for layer in update.layers.values()) / frobenius(lifted.values())
    return {name: matrix.mul_(-eta) for name, matrix in lifted.items()}


def frobenius(matrices: Iterable[Tensor]) -> float:
    """The Frobenius norm of several matrices together, fp64."""
    norms = [float(torch.linalg.vector_norm(matrix.detach(), dtype=torch.float64)) for matrix in matrices]
    return math.hypot(*norms)


@torch.no_grad()
def logits_along(proposal: Proposal, steps: list[float]) -> dict[float, np.ndarray]:
    """Logits (p, v), by step, of models whose weights were really moved to W + step · D; they are put back."""
    direction = dense_direction(proposal)
    weights = {name: layer.weight for name, layer in proposal.update.layers.items()}
    copies = {name: weight.clone() for name, weight in weights.items()}
    found = {}
    for step in steps:
        for name, weight in weights.items():
            torch.add(copies[name], direction[name], alpha=step, out=weight)
        found[step] = proposal.logits()
    for name, weight in weights.items():
        weight.copy_(copies[name])
    return found


def difference_q(logits: dict[float, np.ndarray], h: float, temperature: float) -> np.ndarray:
    """Eq. 6 at each position from logits at 0, ±h and ±2h: a central difference with one step of Richardson, O(h⁴)."""
    near, far = ((logits[s] - logits[-s]) / (2 * s) for s in (h, 2 * h))
    rates = (4 * near - far) / 3
    p = scipy.special.softmax(logits[0.0] / temperature, axis=-1)
    centred = rates - (p * rates).sum(-1, keepdims=True)
    return (p * centred**2).sum(-1) / (2 * temperature**2)


def scipy_kl(before: np.ndarray, after: np.ndarray, temperature: float) -> np.ndarray:
    """KL(softmax(z/T) ‖ softmax(z'/T)) at each position, in nats, by scipy's relative entropy; good to about 1e-16."""
    p, q = (scipy.special.softmax(z / temperature, axis=-1) for z in (before, after))
    return scipy.special.rel_entr(p, q).sum(-1)
