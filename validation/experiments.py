"""Small RL runs on a CPU: LoGRA, dense Adam and LoRA on the toy task, many of them side by side.

A run is a function of its ``Run`` alone: fp64, one thread, seeds of its own, in a process whose sums go in one order
on every processor, so that every machine and any number of processes give the same figures. The task is that of
``toy.LargerNumber``; accuracy is exact, over all prompts.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Literal
from unittest.mock import patch

import torch
from torch import Tensor

from logra_ref import LoGRA, attach_sketches
from logra_ref.predicted_kl import exact_kl, probe_jvp
from logra_ref.rl import RunningBaseline, reinforce_loss, token_log_probs, without_signal
from logra_ref.sketch import DEFAULT_TARGETS, select_layers
from logra_ref.step_size import cosine_budget, step_scale
from logra_ref.toy import LargerNumber, ToyPolicy, accuracy, sample_answers
from validation.claim import NotMeasured, Setting

TASK = LargerNumber(10)
WIDTH, HEADS = 32, 2
PROMPTS, PROBED = 64, 32  # a batch; how many of its prompts are the probe contexts
EVALUATE_EVERY = 10
MOST_WORKERS = 8


@dataclass(frozen=True)
class Run:
    """All that a run depends on. Without ``budget_max`` the step is not controlled: α = 1.

    ``budget_min`` is reached at update ``horizon`` by the cosine; equal budgets are a constant one. The last two are
    for controls: ``alpha_max``, and ``shuffled``, which gives each answer the advantage of another.
    """

    method: Literal["logra", "adam", "lora"] = "logra"
    seed: int = 0
    updates: int = 300
    rank: int = 16
    direction: Literal["row_adam", "sgd"] = "row_adam"
    update_ratio: float = 1e-2
    budget_max: float | None = 2e-2
    budget_min: float = 2e-3
    horizon: int = 300
    learning_rate: float = 0.0
    alpha_max: float = 3.0
    shuffled: bool = False


@dataclass
class Log:
    """What a run did: one entry an update, but for ``accuracy``, which is measured before the first update and after
    every ``EVALUATE_EVERY``. KLs in nats; ``predicted`` is α² q. Dense Adam and LoRA predict nothing."""

    accuracy: list[float] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    alpha: list[float] = field(default_factory=list)
    q: list[float] = field(default_factory=list)
    realised: list[float] = field(default_factory=list)
    skipped: int = 0


def train(run: Run) -> Log:
    """REINFORCE with a running baseline on the toy task (§3.1), by the method of the run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _train(run)
    finally:
        torch.set_num_threads(threads)


def _train(run: Run) -> Log:
    policy = ToyPolicy(TASK.vocabulary, width=WIDTH, layers=1, heads=HEADS, length=3, seed=run.seed).double()
    step = {"logra": _logra, "adam": _adam, "lora": _lora}[run.method](policy.requires_grad_(False), run)
    generator = torch.Generator().manual_seed(10_000 + run.seed)  # not the policy's seed
    baseline, log = RunningBaseline(), Log(accuracy=[accuracy(policy, TASK)])
    for update in range(1, run.updates + 1):
        prompts = TASK.prompts(PROMPTS, generator)
        answers, _ = sample_answers(policy, prompts, 1.0, generator)
        rewards = TASK.rewards(prompts, answers).double()
        advantages = baseline.advantages(rewards)
        if run.shuffled:
            advantages = advantages[torch.randperm(PROMPTS, generator=generator)]
        log.reward.append(float(rewards.mean()))
        if without_signal(advantages):
            log.skipped += 1
        else:
            with torch.no_grad():
                before = policy(prompts[:PROBED])[:, -1]
            alpha, q = step(prompts, answers, advantages)
            with torch.no_grad():
                realised = exact_kl(before, policy(prompts[:PROBED])[:, -1], 1.0)
            log.alpha.append(alpha)
            log.q.append(q)
            log.realised.append(float(realised.mean()))
        if update % EVALUATE_EVERY == 0:
            log.accuracy.append(accuracy(policy, TASK))
    return log


Step = Callable[[Tensor, Tensor, Tensor], tuple[float, float]]


def _loss(policy: torch.nn.Module, prompts: Tensor, answers: Tensor, advantages: Tensor) -> Tensor:
    log_probs = token_log_probs(policy(prompts)[:, -1], answers, 1.0)
    ones = torch.ones_like(log_probs)
    return reinforce_loss(log_probs, advantages, weights=ones, mask=ones.bool(), denominator=float(len(answers)))


def _logra(policy: ToyPolicy, run: Run) -> Step:
    """Algorithm 1, and α with the q it comes from."""
    optimizer = LoGRA(attach_sketches(policy, run.rank, seed=run.seed), run.update_ratio, direction=run.direction)

    def step(prompts: Tensor, answers: Tensor, advantages: Tensor) -> tuple[float, float]:
        optimizer.zero_grad()
        _loss(policy, prompts, answers, advantages).backward()
        proposal = optimizer.propose()
        last = probe_jvp(proposal, [prompts[:PROBED]], lambda block: policy(block)[:, -1], temperature=1.0)
        q, alpha = float(last.mean()), 1.0
        if run.budget_max is not None:
            budget = cosine_budget(
                optimizer.update, budget_max=run.budget_max, budget_min=run.budget_min, horizon=run.horizon
            )
            alpha = step_scale(q, budget, run.alpha_max)
        optimizer.step(alpha=alpha)
        return alpha, q

    return step


def _adam(policy: ToyPolicy, run: Run) -> Step:
    return _gradient_step(policy, [layer.weight.requires_grad_() for layer in select_layers(policy).values()], run)


def _lora(policy: ToyPolicy, run: Run) -> Step:
    try:
        from peft import LoraConfig, inject_adapter_in_model  # takes seconds to import
    except ImportError as error:
        raise NotMeasured(f"LoRA needs peft ({error}): pip install -e '.[dev]'") from error
    config = LoraConfig(r=run.rank, lora_alpha=run.rank, target_modules=list(DEFAULT_TARGETS))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)  # the adapters' initial A comes from the global generator
        inject_adapter_in_model(config, policy)
    return _gradient_step(policy, [p for name, p in policy.named_parameters() if "lora_" in name], run)


def _gradient_step(policy: torch.nn.Module, parameters: list[Tensor], run: Run) -> Step:
    """Adam with the paper's moment decays (D.1, D.4) at a constant learning rate."""
    optimizer = torch.optim.Adam(parameters, lr=run.learning_rate, betas=(0.9, 0.95), eps=1e-8)

    def step(prompts: Tensor, answers: Tensor, advantages: Tensor) -> tuple[float, float]:
        optimizer.zero_grad()
        _loss(policy, prompts, answers, advantages).backward()
        optimizer.step()
        return float("nan"), float("nan")

    return step


_DONE: dict[Run, Log] = {}
# By itself each processor takes the widest instructions that it has, and so sums in an order of its own.
ONE_ORDER = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"}


def logs(runs: Sequence[Run], setting: Setting, description: str) -> dict[Run, Log]:
    """The log of each run, made in processes side by side, as many as there are cores; the same run only once."""
    missing = [run for run in dict.fromkeys(runs) if run not in _DONE]
    if missing:
        with (
            patch.dict(os.environ, ONE_ORDER),
            ProcessPoolExecutor(
                min(len(missing), _cores(), MOST_WORKERS), mp_context=multiprocessing.get_context("spawn")
            ) as pool,
        ):
            futures = [pool.submit(train, run) for run in missing]
            for run, future in zip(missing, setting.track(futures, description), strict=True):
                _DONE[run] = future.result()
    return {run: _DONE[run] for run in runs}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
