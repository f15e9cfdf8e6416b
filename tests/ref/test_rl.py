"""Log-probabilities, losses and importance weights against numpy, scipy and numbers worked out by hand."""

import math

import numpy as np
import pytest
import scipy.special
import torch

from logra_ref.rl import (
    grpo_loss,
    importance_weights,
    ppo_loss,
    reinforce_loss,
    token_log_probs,
)


def tensor(*x) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def draws(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def everywhere(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"weights": torch.ones_like(x), "mask": torch.ones_like(x, dtype=torch.bool)}


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_log_probs_are_scipys_at_the_sampling_temperature(temperature):
    logits = 4 * draws(3, 5, 11, seed=0)
    tokens = torch.arange(15).view(3, 5) % 11
    expected = np.take_along_axis(
        scipy.special.log_softmax(logits.numpy() / temperature, axis=-1), tokens.numpy()[..., None], -1
    )[..., 0]
    result = token_log_probs(logits, tokens, temperature)
    assert result.dtype == torch.float64
    np.testing.assert_allclose(result, expected, rtol=1e-12)
    if temperature != 1:  # control: log-probabilities of before the temperature are others
        assert (token_log_probs(logits, tokens, 1.0) - result).abs().max() > 0.1


def test_log_probs_of_bf16_logits_are_summed_in_fp32():
    logits = draws(2, 5000, seed=1).to(torch.bfloat16)
    tokens = torch.tensor([3, 4999])
    expected = scipy.special.log_softmax(logits.double().numpy() / 0.6, axis=-1)[[0, 1], tokens]
    result = token_log_probs(logits, tokens, 0.6)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result, expected, rtol=1e-6)  # bf16 would be off by 1e-2


def test_log_probs_survive_extreme_and_masked_logits():
    logits = torch.tensor([[1e4, -1e4, -math.inf]])
    assert token_log_probs(logits, torch.tensor([0]), 1.0).item() == 0.0
    assert token_log_probs(logits, torch.tensor([1]), 1.0).item() == -2e4
    assert token_log_probs(logits, torch.tensor([2]), 1.0).item() == -math.inf


def test_gradient_of_log_probs_is_onehot_minus_softmax_over_temperature():
    logits = draws(4, 7, seed=2).requires_grad_()
    tokens = torch.tensor([0, 3, 6, 3])
    token_log_probs(logits, tokens, 0.6).sum().backward()
    expected = (np.eye(7)[tokens] - scipy.special.softmax(logits.detach().numpy() / 0.6, axis=-1)) / 0.6
    np.testing.assert_allclose(logits.grad, expected, atol=1e-14)


def test_importance_weights_are_capped_and_carry_no_gradient():
    trainer = tensor(-1.0, -1.0, -1.0, -3.0).requires_grad_()
    weights = importance_weights(trainer, tensor(-1.0, -1.5, -2.5, -1.0))
    np.testing.assert_allclose(weights, [1.0, math.exp(0.5), 2.0, math.exp(-2.0)], rtol=1e-12)
    assert not weights.requires_grad
    assert importance_weights(tensor(0.0), tensor(-3.0), 5.0).tolist() == [5.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_ratios_of_ten_thousand_neither_overflow_nor_make_nan(dtype):
    new = torch.tensor([-1.0, -1e4, -1.0], dtype=dtype).requires_grad_()
    old = torch.tensor([-1e4, -1.0, -1.0], dtype=dtype)
    weights = importance_weights(new, old)
    assert weights.tolist() == pytest.approx([2.0, 0.0, 1.0], abs=1e-8)
    advantages = torch.tensor([-1.0, 1.0, 1.0], dtype=dtype)
    loss = ppo_loss(new, old, advantages, **everywhere(old), denominator=3.0)
    loss.backward()
    assert loss.isfinite()
    assert new.grad.isfinite().all()


def test_reinforce_by_hand():
    log_probs = tensor(-1.0, -2.0, -0.5).requires_grad_()
    mask = torch.tensor([True, True, False])
    loss = reinforce_loss(log_probs, tensor(1.0, -0.5, 9.0), weights=tensor(1.0, 2.0, 1.0), mask=mask, denominator=4.0)
    # −(1·1·(−1) + 2·(−0.5)·(−2)) / 4 = −(−1 + 2) / 4
    assert loss.item() == pytest.approx(-0.25)
    loss.backward()
    assert log_probs.grad.tolist() == pytest.approx([-0.25, 0.25, 0.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.5, 2.0, 1.2 * 2.0, 0.0),  # further up than ε: clipped, no gradient
        (0.5, 2.0, 0.5 * 2.0, 0.5 * 2.0),  # the wrong way: not clipped
        (1.5, -2.0, 1.5 * -2.0, 1.5 * -2.0),  # the wrong way: not clipped
        (0.5, -2.0, 0.8 * -2.0, 0.0),  # further down than ε: clipped, no gradient
        (1.1, 2.0, 1.1 * 2.0, 1.1 * 2.0),
        (0.9, -2.0, 0.9 * -2.0, 0.9 * -2.0),
    ],
)
def test_ppo_clips_only_where_the_ratio_has_gone_far_enough_the_right_way(ratio, advantage, value, slope):
    log_probs = tensor(-1.0 + math.log(ratio)).requires_grad_()
    loss = ppo_loss(log_probs, tensor(-1.0), tensor(advantage), **everywhere(tensor(0.0)), denominator=1.0)
    loss.backward()
    assert (loss.item(), log_probs.grad.item()) == pytest.approx((-value, -slope), rel=1e-12)


def test_ppo_at_the_old_policy_has_the_gradient_of_reinforce():
    values, advantages, weights = -draws(3, 6, seed=4).abs(), draws(3, 6, seed=5), draws(3, 6, seed=6).abs()
    mask = draws(3, 6, seed=7) > -0.5
    a, b = values.clone().requires_grad_(), values.clone().requires_grad_()
    reinforce_loss(a, advantages, weights=weights, mask=mask, denominator=7.0).backward()
    ppo_loss(b, values, advantages, weights=weights, mask=mask, denominator=7.0).backward()
    np.testing.assert_allclose(b.grad, a.grad, rtol=1e-12)
    assert a.grad.abs().max() > 0.1


def test_grpo_is_the_mean_over_responses_of_the_mean_over_their_tokens():
    """Responses of 2 and of 1 token, one of the 3 in another microbatch: −[(1.1·1 + 0.9·1)/2 + (1.3→1.2)·2/1] / 3."""
    old = tensor(-1.0, -2.0, -0.7)
    log_probs = old + tensor(1.1, 0.9, 1.3).log()
    lengths = tensor(2.0, 2.0, 1.0)
    loss = grpo_loss(log_probs, old, tensor(1.0, 1.0, 2.0), **everywhere(old), response_tokens=lengths, responses=3)
    assert loss.item() == pytest.approx(-(1.0 + 2.4) / 3, rel=1e-12)
    # A response of no tokens stands in a batch as a row of padding with length 0.
    padded = grpo_loss(
        log_probs[None].repeat(2, 1),
        old[None].repeat(2, 1),
        tensor([1.0, 1.0, 2.0], [4.0, 4.0, 4.0]),
        weights=torch.ones(2, 3, dtype=torch.float64),
        mask=torch.tensor([[True] * 3, [False] * 3]),
        response_tokens=torch.stack([lengths, 0 * lengths]),
        responses=3,
    )
    assert padded.item() == pytest.approx(loss.item(), rel=1e-12)


LOSSES = ["reinforce", "ppo", "grpo"]
TOKENS = [4, 1, 3, 6]


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Four responses padded to 6 tokens."""
    lengths = torch.tensor(TOKENS)
    mask = torch.arange(6) < lengths[:, None]
    return {
        "log_probs": -draws(4, 6, seed=seed).abs(),
        "old": -draws(4, 6, seed=seed).abs() + 0.3 * draws(4, 6, seed=seed + 1),
        "advantages": draws(4, 1, seed=seed + 2).expand(4, 6).clone(),
        "weights": draws(4, 6, seed=seed + 3).abs(),
        "mask": mask,
        "length": lengths[:, None].expand(4, 6).double(),
    }


def loss_of(kind: str, b: dict[str, torch.Tensor]) -> torch.Tensor:
    shared = {"weights": b["weights"], "mask": b["mask"]}
    if kind == "reinforce":
        return reinforce_loss(b["log_probs"], b["advantages"], **shared, denominator=float(sum(TOKENS)))
    if kind == "ppo":
        return ppo_loss(b["log_probs"], b["old"], b["advantages"], **shared, denominator=float(sum(TOKENS)))
    lengths = {"response_tokens": b["length"], "responses": len(TOKENS)}
    return grpo_loss(b["log_probs"], b["old"], b["advantages"], **shared, **lengths)


def loss_and_gradient(kind: str, b: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
    log_probs = b["log_probs"].clone().requires_grad_()
    loss = loss_of(kind, b | {"log_probs": log_probs})
    loss.backward()
    return loss.item(), log_probs.grad


def by_loops(kind: str, b: dict[str, torch.Tensor]) -> float:
    total = 0.0
    for i, length in enumerate(TOKENS):
        for t in range(length):
            log_prob, old, advantage, weight = (
                float(b[key][i, t]) for key in ("log_probs", "old", "advantages", "weights")
            )
            ratio = math.exp(log_prob - old)
            term = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            term = log_prob * advantage if kind == "reinforce" else term
            total -= weight * term / (length * len(TOKENS) if kind == "grpo" else sum(TOKENS))
    return total


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_against_plain_loops_over_the_tokens(kind):
    assert loss_and_gradient(kind, batch())[0] == pytest.approx(by_loops(kind, batch()), rel=1e-12)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("kind", LOSSES)
def test_garbage_in_the_padding_reaches_neither_loss_nor_gradient(kind, garbage):
    clean = batch()
    loss, gradient = loss_and_gradient(kind, clean)
    for keys in (["log_probs"], ["old"], ["advantages"], ["weights"], ["log_probs", "old", "advantages", "weights"]):
        dirty = {k: torch.where(clean["mask"], v, garbage) if k in keys else v for k, v in clean.items()}
        dirty_loss, dirty_gradient = loss_and_gradient(kind, dirty)
        assert dirty_loss == loss
        assert torch.equal(dirty_gradient, gradient)
    assert gradient[~clean["mask"]].eq(0).all()


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_do_not_depend_on_padding_microbatches_order_or_form(kind):
    whole = batch()
    loss, gradient = loss_and_gradient(kind, whole)
    wider = {k: torch.cat([v, v[:, :2]], dim=1) for k, v in whole.items()}
    wider["mask"][:, 6:] = False
    assert loss_and_gradient(kind, wider)[0] == pytest.approx(loss, rel=1e-12)

    parts = [loss_and_gradient(kind, {k: v[rows] for k, v in whole.items()}) for rows in ([0], [1, 2], [3])]
    assert sum(part for part, _ in parts) == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(torch.cat([g for _, g in parts]), gradient, rtol=1e-12)

    order = [2, 0, 3, 1]
    shuffled, shuffled_gradient = loss_and_gradient(kind, {k: v[order] for k, v in whole.items()})
    assert shuffled == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(shuffled_gradient, gradient[order], rtol=1e-12)

    flat = {k: v[whole["mask"]] for k, v in whole.items()}
    assert loss_and_gradient(kind, flat)[0] == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_microbatch_of_padding_alone_is_a_loss_of_zero_that_can_be_differentiated(kind):
    nothing = batch()
    nothing["mask"] = torch.zeros_like(nothing["mask"])
    loss, gradient = loss_and_gradient(kind, nothing)
    assert loss == 0
    assert gradient.eq(0).all()


@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_through_log_softmax_pass_gradcheck(kind):
    fixed, tokens = batch(), torch.arange(24).view(4, 6) % 5

    def loss(logits):
        return loss_of(kind, fixed | {"log_probs": token_log_probs(logits, tokens, 0.6)})

    assert torch.autograd.gradcheck(loss, draws(4, 6, 5, seed=9).requires_grad_())
