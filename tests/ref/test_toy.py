"""The toy policy and task: deterministic, fp64 all the way, exact rewards, learnt by LoGRA in seconds."""

import itertools

import numpy as np
import pytest
import scipy.special
import torch

from logra_ref import LoGRA, attach_sketches
from logra_ref.rl import RunningBaseline, reinforce_loss, token_log_probs
from logra_ref.sketch import DEFAULT_TARGETS, select_layers
from logra_ref.toy import ModularSum, ToyPolicy, accuracy, sample_answers


def small(seed: int = 0) -> ToyPolicy:
    return ToyPolicy(6, width=32, layers=1, heads=2, seed=seed)


def test_the_policy_is_a_function_of_its_seed_and_not_of_the_global_generator():
    torch.manual_seed(1)
    first = small().state_dict()
    torch.manual_seed(2)
    second, other = small().state_dict(), small(seed=1).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(not torch.equal(first[name], other[name]) for name in first if first[name].ndim == 2)


def test_the_policy_computes_in_fp64_all_the_way():
    policy, tokens = small().double(), torch.tensor([[1, 2, 5, 0]])
    logits = policy(tokens)
    assert logits.dtype == torch.float64
    expected = by_numpy(policy, tokens[0].numpy())
    np.testing.assert_allclose(logits[0].detach(), expected, rtol=1e-11)  # a step in fp32 would leave 1e-7


def by_numpy(policy: ToyPolicy, tokens: np.ndarray) -> np.ndarray:
    p = {name: value.numpy() for name, value in policy.state_dict().items()}

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + np.finfo(np.float64).eps) * weight

    x = p["embedding.weight"][tokens] + p["positions.weight"][: len(tokens)]
    for i, block in enumerate(policy.blocks):
        w = {name.removeprefix(f"blocks.{i}."): value for name, value in p.items()}
        h = norm(x, w["attention_norm.weight"])
        q, k, v = (h @ w[f"{name}_proj.weight"].T for name in "qkv")
        heads = []
        for part in np.split(np.arange(q.shape[1]), block.heads):
            scores = q[:, part] @ k[:, part].T / np.sqrt(len(part))
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            heads.append(scipy.special.softmax(scores, axis=-1) @ v[:, part])
        x = x + np.concatenate(heads, axis=1) @ w["o_proj.weight"].T
        h = norm(x, w["mlp_norm.weight"])
        gate = h @ w["gate_proj.weight"].T
        x = x + (gate * scipy.special.expit(gate) * (h @ w["up_proj.weight"].T)) @ w["down_proj.weight"].T
    return norm(x, p["norm.weight"]) @ p["head.weight"].T


def test_later_tokens_do_not_change_earlier_logits():
    policy = small()
    a, b = torch.tensor([[1, 2, 5, 0]]), torch.tensor([[1, 2, 5, 3]])
    assert torch.equal(policy(a)[:, :3], policy(b)[:, :3])
    assert not torch.equal(policy(a)[:, 3], policy(b)[:, 3])


def test_the_policy_has_the_seven_layers_that_are_sketched_by_default():
    policy = ToyPolicy(6, width=8, layers=2, heads=2)
    expected = [f"blocks.{i}.{target}.weight" for i in range(2) for target in DEFAULT_TARGETS]
    assert sorted(select_layers(policy)) == sorted(expected)


def test_rewards_are_one_for_the_sum_modulo_m_and_zero_for_every_other_answer():
    task = ModularSum(4)
    for a, b, answer in itertools.product(range(4), range(4), range(5)):
        prompt = torch.tensor([[a, b, 4]])
        assert task.rewards(prompt, torch.tensor([answer])).item() == float(answer == (a + b) % 4)


def test_prompts_are_two_numbers_and_the_equals_sign_and_all_of_them_occur():
    task = ModularSum(4)
    every = task.all_prompts()
    assert sorted(map(tuple, every.tolist())) == [(a, b, 4) for a in range(4) for b in range(4)]
    drawn = task.prompts(500, torch.Generator().manual_seed(0))
    assert {tuple(row) for row in drawn.tolist()} == {tuple(row) for row in every.tolist()}
    assert torch.equal(drawn, task.prompts(500, torch.Generator().manual_seed(0)))
    assert task.vocabulary == 5


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_answers_are_sampled_at_the_temperature_of_their_log_probs(temperature):
    policy = small()
    prompts = torch.tensor([[1, 2, 5]]).repeat(20000, 1)
    answers, log_probs = sample_answers(policy, prompts, temperature, torch.Generator().manual_seed(0))
    p = scipy.special.softmax(policy(prompts[:1])[0, -1].detach().double().numpy() / temperature)
    np.testing.assert_allclose(log_probs, np.log(p)[answers], rtol=1e-4)
    share = np.bincount(answers, minlength=6) / len(answers)
    assert np.abs(share - p).max() < 5 * 0.5 / np.sqrt(len(answers))  # five standard deviations at most


def test_accuracy_is_the_mean_probability_of_the_right_answer():
    policy, task = small(), ModularSum(5)
    expected = np.mean(
        [
            scipy.special.softmax(policy(torch.tensor([[a, b, 5]]))[0, -1].detach().numpy())[(a + b) % 5]
            for a, b in itertools.product(range(5), range(5))
        ]
    )
    assert accuracy(policy, task) == pytest.approx(expected, rel=1e-5)


def test_reinforce_with_logra_learns_the_task():
    """From about chance (one in six) to about one half, in sixty updates."""
    policy, task, batch = small(), ModularSum(5), 64
    optimizer = LoGRA(attach_sketches(policy, 8), 5e-2)
    baseline, generator = RunningBaseline(), torch.Generator().manual_seed(0)
    before = accuracy(policy, task)
    for _ in range(60):
        prompts = task.prompts(batch, generator)
        answers, _ = sample_answers(policy, prompts, 1.0, generator)
        advantages = baseline.advantages(task.rewards(prompts, answers))
        optimizer.zero_grad()
        log_probs = token_log_probs(policy(prompts)[:, -1], answers, 1.0)
        everywhere = {"weights": torch.ones(batch), "mask": torch.ones(batch, dtype=torch.bool)}
        reinforce_loss(log_probs, advantages, **everywhere, denominator=float(batch)).backward()
        optimizer.step()
    assert before < 0.25
    assert accuracy(policy, task) > before + 0.25
