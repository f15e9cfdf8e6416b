"""The three probes of q(D) against weights really moved by ±h, on the toy policy in fp64 and stock models."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from logra_ref import attach_sketches
from logra_ref.direction import Factor
from logra_ref.predicted_kl import probe_exact, probe_finite_difference, probe_jvp
from logra_ref.toy import ToyPolicy
from logra_ref.update import FactoredUpdate
from tests.tiny import FAMILIES, make_tiny_model

TEMPERATURE = 0.6
RATIO = 1e-2  # large, so that central differences have something to see


def toy(seed: int = 1) -> ToyPolicy:
    return ToyPolicy(11, width=16, layers=2, heads=2, length=6, seed=seed).double()


def stock(family: str, attention: str = "sdpa") -> nn.Module:
    model = make_tiny_model(family, tied=False, seed=5, initializer_range=0.2, attn_implementation=attention)
    torch.manual_seed(6)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero at first, which would hide a bias that moves
            nn.init.normal_(parameter)
    return model


def proposed(model: nn.Module, *, kind: str = "rademacher", rank: int = 3, ratio: float = RATIO) -> FactoredUpdate:
    """A random direction, and sketches that hold something which must not change."""
    sketches = attach_sketches(model, rank, kind=kind, seed=4)
    generator = torch.Generator().manual_seed(8)
    factors = {}
    for name, layer in sketches.layers.items():
        layer.sketch.copy_(torch.randn(layer.sketch.shape, generator=generator))
        layer.contributions = 3
        factors[name] = Factor.of(torch.randn(layer.sketch.shape, generator=generator, dtype=layer.weight.dtype))
    return FactoredUpdate(sketches.layers, factors, update=1, update_ratio=ratio)


def dense_direction(update: FactoredUpdate, leave_out: str = "") -> dict[str, torch.Tensor]:
    """D = −η U A as full matrices, η from their norms."""
    lifted = {
        name: factor.levels.double() @ update.projections[name].matrix(dtype=torch.float64)
        for name, factor in update.factors.items()
    }
    squares = sum(float(layer.weight.double().square().sum()) for layer in update.layers.values())
    eta = RATIO * math.sqrt(squares / sum(float(x.square().sum()) for x in lifted.values()))
    return {name: -eta * x * (name != leave_out) for name, x in lifted.items()}


def moved_logits(update: FactoredUpdate, direction: dict, step: float, block, logits_of) -> np.ndarray:
    copies = {name: layer.weight.clone() for name, layer in update.layers.items()}
    with torch.no_grad():
        for name, layer in update.layers.items():
            layer.weight.copy_(copies[name].double() + step * direction[name])
        logits = logits_of(block).double().numpy()
        for name, layer in update.layers.items():
            layer.weight.copy_(copies[name])
    return logits


def central_difference_q(update: FactoredUpdate, block, logits_of, *, h: float, leave_out: str = "") -> np.ndarray:
    """Eq. 6 by numpy from a fourth-order difference of the logits of models that were really moved."""
    direction = dense_direction(update, leave_out)
    z, plus, minus, plus2, minus2 = (
        moved_logits(update, direction, step, block, logits_of) for step in (0, h, -h, 2 * h, -2 * h)
    )
    rates = (8 * (plus - minus) - (plus2 - minus2)) / (12 * h)
    p = np.exp((z - z.max(-1, keepdims=True)) / TEMPERATURE)
    p /= p.sum(-1, keepdims=True)
    centred = rates - (p * rates).sum(-1, keepdims=True)
    return (p * centred**2).sum(-1) / (2 * TEMPERATURE**2)


def tokens(vocabulary: int, rows: int = 4, length: int = 6) -> torch.Tensor:
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(2))


def of_toy(model: ToyPolicy):
    return lambda block: model(block)[:, 2:].flatten(0, 1)


def of_stock(model: nn.Module):
    """Left padding, as a batch of prompts has: the first positions of the first row are hidden."""

    def logits_of(block):
        mask = torch.ones_like(block)
        mask[0, :2] = 0
        return model(input_ids=block, attention_mask=mask, use_cache=False).logits[:, 3:].flatten(0, 1)

    return logits_of


@pytest.mark.parametrize("kind", ["rademacher", "hadamard"])
def test_jvp_through_norms_and_attention_is_the_central_difference_to_1e_6(kind):
    model = toy()
    update, block = proposed(model, kind=kind), tokens(11)
    q = probe_jvp(update, [block], of_toy(model), temperature=TEMPERATURE)
    np.testing.assert_allclose(q, central_difference_q(update, block, of_toy(model), h=0.02), rtol=1e-6)
    name = "blocks.0.v_proj.weight"
    without = central_difference_q(update, block, of_toy(model), h=0.02, leave_out=name)
    assert np.abs(q.numpy() / without - 1).max() > 0.01  # control: a matrix without its tangent would be seen


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_jvp_of_stock_models_with_left_padding_is_the_central_difference(family, attention):
    model = stock(family, attention)
    update, block = proposed(model), tokens(258)
    q = probe_jvp(update, [block], of_stock(model), temperature=TEMPERATURE)
    expected = central_difference_q(update, block, of_stock(model), h=0.1)
    np.testing.assert_allclose(q, expected, rtol=1e-3)
    finite = probe_finite_difference(update, [block], of_stock(model), temperature=TEMPERATURE)
    np.testing.assert_allclose(finite, expected, rtol=2e-2)  # h² of its step 0.1, and fp32


def test_jvp_with_checkpointing_in_train_mode_is_that_of_eval_mode():
    model = stock("qwen2")
    update, block = proposed(model), tokens(258)
    expected = probe_jvp(update, [block], of_stock(model), temperature=TEMPERATURE)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert torch.equal(probe_jvp(update, [block], of_stock(model), temperature=TEMPERATURE), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_tangent_passes_two_sketched_layers_with_and_without_bias(bias):
    """ẏ = ẋ Wᵀ + (x Aᵀ) Uᵀ: the bias has a value but no rate, and the first layer's rate goes through the second."""
    torch.manual_seed(3)
    model = nn.Sequential()
    model.add_module("up_proj", nn.Linear(5, 9, bias=bias))
    model.add_module("act", nn.Tanh())
    model.add_module("down_proj", nn.Linear(9, 4, bias=bias))
    model.double()
    sketches = attach_sketches(model, 2, targets=("up_proj", "down_proj"))
    factors = {name: Factor.of(torch.randn_like(sketch)) for name, sketch in sketches.sketches().items()}
    update = FactoredUpdate(sketches.layers, factors, update=1, update_ratio=RATIO)
    x = torch.randn(3, 2, 5, dtype=torch.float64)

    def logits_of(block):
        return model(block).flatten(0, 1)

    q = probe_jvp(update, [x], logits_of, temperature=TEMPERATURE)
    np.testing.assert_allclose(q, central_difference_q(update, x, logits_of, h=0.02), rtol=1e-7)


def test_the_three_probes_meet_in_the_limit_of_a_small_step():
    model = toy()
    update, block, logits_of = proposed(model), tokens(11), of_toy(model)
    q = probe_jvp(update, [block], logits_of, temperature=TEMPERATURE)
    finite = probe_finite_difference(update, [block], logits_of, temperature=TEMPERATURE, step=1e-3)
    np.testing.assert_allclose(finite, q, rtol=1e-5)  # h² = 1e-6
    np.testing.assert_allclose(
        probe_exact(update, [block], logits_of, temperature=TEMPERATURE, alpha=1e-5), q, rtol=1e-3
    )


def test_realised_over_predicted_goes_to_one_linearly_and_without_the_cubic_term_quadratically():
    model = toy()
    update, block, logits_of = proposed(model), tokens(11), of_toy(model)
    q = probe_jvp(update, [block], logits_of, temperature=TEMPERATURE).mean()

    def excess(probe, **step):
        return float(probe(update, [block], logits_of, temperature=TEMPERATURE, **step).mean() / q - 1)

    steps = [0.02, 0.01, 0.005]
    exact = [abs(excess(probe_exact, alpha=a)) for a in steps]
    finite = [abs(excess(probe_finite_difference, step=a)) for a in steps]
    slopes = [np.polyfit(np.log(steps), np.log(x), 1)[0] for x in (exact, finite)]
    assert slopes == pytest.approx([1.0, 2.0], abs=0.1)


@pytest.mark.parametrize("probe", [probe_jvp, probe_finite_difference, probe_exact])
def test_contexts_in_blocks_and_as_an_iterator_give_the_values_of_one_block(probe):
    model = toy()
    update, block, logits_of = proposed(model), tokens(11), of_toy(model)
    whole = probe(update, [block], logits_of, temperature=TEMPERATURE)
    assert whole.shape == (16,)
    parts = probe(update, (block[i : i + 1] for i in range(4)), logits_of, temperature=TEMPERATURE)
    np.testing.assert_allclose(parts, whole, rtol=1e-9)


def state_of(model: nn.Module, update: FactoredUpdate) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name, layer in update.layers.items():
        assert layer.factor is None
        assert not layer.moving
        assert not layer.paused
        assert layer.contributions == 3
        assert layer.weight.grad is None
        state[f"sketch of {name}"] = layer.sketch.clone()
    return state


def fail(block):
    raise KeyError("the caller's own failure")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("probe", [probe_jvp, probe_finite_difference, probe_exact])
def test_probes_leave_weights_and_sketches_bit_for_bit_even_when_the_model_fails(probe, training):
    model = toy().train(training)
    update, block, logits_of = proposed(model), tokens(11), of_toy(model)
    before = state_of(model, update)
    logits = model(block).detach()

    def fail_late(block, calls=[]):  # noqa: B006 - the count of calls
        calls.append(1)
        return fail(block) if len(calls) == 2 else logits_of(block)

    for logits_or_failure in (logits_of, fail, fail_late):
        try:
            probe(update, [block, block], logits_or_failure, temperature=TEMPERATURE)
        except KeyError:
            assert logits_or_failure is not logits_of
        after = state_of(model, update)
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(model(block), logits)


def test_a_backward_after_the_probes_still_fills_the_sketches():
    model, twin = toy(), toy()
    block = tokens(11)
    for m, probes in ((model, [probe_jvp, probe_finite_difference, probe_exact]), (twin, [])):
        update = proposed(m)
        for probe in probes:
            probe(update, [block], of_toy(m), temperature=TEMPERATURE)
        m(block).square().mean().backward()
    name = "blocks.1.down_proj"
    assert torch.equal(model.get_submodule(name).sketch, twin.get_submodule(name).sketch)
    assert model.get_submodule(name).contributions == 4


def test_a_rate_that_does_not_arrive_is_an_error_and_not_a_kl_of_zero():
    model = toy()
    update, block = proposed(model), tokens(11)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference mode"):
        probe_jvp(update, [block], of_toy(model), temperature=TEMPERATURE)
    with pytest.raises(RuntimeError, match="no rate of change"):
        probe_jvp(update, [block], lambda block: of_toy(model)(block).detach(), temperature=TEMPERATURE)
    other = toy(seed=2)
    with pytest.raises(RuntimeError, match="no rate of change"):
        probe_jvp(update, [block], of_toy(other), temperature=TEMPERATURE)


class WithoutForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, delta):
        return delta * 2


def flash_attention(h: torch.Tensor) -> torch.Tensor:
    heads = h[:, None].contiguous()
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads)[0][:, 0]


@pytest.mark.parametrize("operation", [WithoutForwardMode.apply, flash_attention])
def test_an_operation_without_forward_mode_names_the_attention_and_the_other_probe(operation):
    model = toy()
    update, block = proposed(model), tokens(11)

    def logits_of(block):
        return operation(model(block))[:, 2:].flatten(0, 1)

    with pytest.raises(RuntimeError, match="eager or sdpa attention, or use the finite-difference probe"):
        probe_jvp(update, [block], logits_of, temperature=TEMPERATURE)
    finite = probe_finite_difference(update, [block], logits_of, temperature=TEMPERATURE, step=1e-3)
    exact = probe_exact(update, [block], logits_of, temperature=TEMPERATURE, alpha=1e-4)
    np.testing.assert_allclose(finite, exact, rtol=1e-2)


def test_an_unrelated_runtime_error_is_passed_on_as_it_is():
    model = toy()
    update = proposed(model)
    with pytest.raises(RuntimeError, match=r"shape|size") as caught:
        probe_jvp(update, [tokens(11, length=9)], of_toy(model), temperature=TEMPERATURE)
    assert "finite-difference" not in str(caught.value)


def test_an_update_proposed_before_a_new_projection_is_refused_by_the_probes():
    model = toy()
    sketches = attach_sketches(model, 2)
    factors = {name: Factor.of(torch.ones_like(sketch)) for name, sketch in sketches.sketches().items()}
    update = FactoredUpdate(sketches.layers, factors, update=1, update_ratio=RATIO)
    sketches.refresh(2)
    for probe in (probe_jvp, probe_finite_difference):
        with pytest.raises(RuntimeError, match="redrawn"):
            probe(update, [tokens(11)], of_toy(model), temperature=TEMPERATURE)
    assert all(layer.factor is None for layer in sketches.layers.values())
