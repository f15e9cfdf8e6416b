"""Dense gradients of a policy-gradient loss on a pretrained model.

Prompts, sampling, rewards, advantages and loss are those of the demo's recipe; what differs from training is that
autograd gives each selected weight its dense gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from logra_ref.rl import RunningBaseline, importance_weights, without_signal
from logra_ref.sketch import DEFAULT_TARGETS, select_layers
from scaled.batching import microbatches
from scaled.config import RunConfig
from scaled.config_file import load_config
from scaled.data import ProblemStream, load_data
from scaled.gradients import policy_loss, response_log_probs
from scaled.model import load_model
from scaled.policy import Policy
from scaled.records import Response
from scaled.rewards import Grader
from scaled.rollout.hf import generate
from scaled.seeds import derive_seed

MATRICES = DEFAULT_TARGETS


@dataclass(frozen=True)
class Batch:
    """Sampled responses of one batch and their advantages."""

    responses: list[Response]
    advantages: Float[Tensor, " b"]

    def right(self) -> float:
        """The share of responses that were right: those whose advantage is positive."""
        return float((self.advantages > 0).double().mean())


def open_demo(folder: Path, seed: int, prompts: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, RunConfig]:
    """The pretrained model, no weight asking for a gradient, its tokenizer, and the demo's recipe on the CPU."""
    overrides = [f"model.path={folder}", "model.device=cpu", f"seed={seed}", f"rollout.prompts={prompts}"]
    config = load_config(Path("smollm2-demo"), overrides)
    model, tokenizer = load_model(config.model)
    return model.requires_grad_(False), tokenizer, config


def sample_batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: RunConfig, number: int
) -> list[Batch]:
    """The first ``number`` batches of the recipe that have a signal, all at the weights that the model has."""
    problems, _ = load_data(config.data, config.seed)
    stream, size, batches = ProblemStream(problems, config.seed), config.rollout.prompts, []
    with Grader(config) as grader:
        for index in count():
            responses = generate(
                model,
                tokenizer,
                stream.take(index * size, size),
                max_new_tokens=config.rollout.max_new_tokens,
                temperature=config.rollout.temperature,
                seed=derive_seed(config.seed, "rollout", index + 1),
                stop=config.rollout.stop,
            )
            rewards = torch.tensor([score.reward for score in grader.grade(responses)], dtype=torch.float64)
            advantages = RunningBaseline(weight=config.loss.baseline_weight).advantages(rewards)
            if not without_signal(advantages):
                batches.append(Batch(responses, advantages.float()))
            if len(batches) == number:
                return batches


def matrices_of(model: PreTrainedModel, layers: Sequence[int]) -> dict[tuple[int, str], torch.nn.Linear]:
    """The selected linear layers of some Transformer layers, by layer and short name."""
    selected = select_layers(model, MATRICES)
    names = {(int(name.split(".layers.")[1].split(".")[0]), name.split(".")[-2]): name for name in selected}
    return {(layer, matrix): selected[names[layer, matrix]] for layer in layers for matrix in MATRICES}


def dense_gradients(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: RunConfig, batch: Batch, layers: Sequence[int]
) -> dict[tuple[int, str], Float[Tensor, "d k"]]:
    """autograd's gradient of the batch's loss in every selected matrix of the given layers, in fp32."""
    policy, chosen = Policy(model), matrices_of(model, layers)
    for linear in chosen.values():
        linear.weight.requires_grad_(True)
    lengths = torch.tensor([len(response.token_ids) for response in batch.responses])
    for block in microbatches(
        batch.responses, range(len(lengths)), config.microbatch, tokenizer.pad_token_id, model.device
    ):
        log_probs = response_log_probs(policy, block, config.rollout.temperature)
        weights = importance_weights(log_probs, block.rollout_log_probs, config.loss.importance_cap)
        own = lengths[block.response]
        policy_loss(config.loss, log_probs, batch.advantages[block.response], weights, own, lengths).backward()
    gradients = {}
    for key, linear in chosen.items():
        gradients[key], linear.weight.grad = linear.weight.grad, None
        linear.weight.requires_grad_(False)
    return gradients
