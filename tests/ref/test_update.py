"""The proposal, its norm, its merge and the displaced forward pass against dense matrices in numpy."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from logra_ref import FactoredUpdate, Projection, SketchSet, attach_sketches
from logra_ref.direction import Factor
from logra_ref.update import nominal_step
from tests.ref.holders import Part, each_holder
from tests.tiny import make_tiny_model

RATIO = 6e-5
KINDS = ("rademacher", "gaussian", "orthonormal", "hadamard")


def draws(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    layers = nn.ModuleDict({"up_proj": nn.Linear(12, 10), "act": nn.Tanh(), "down_proj": nn.Linear(10, 7, bias=False)})
    return nn.Sequential(layers["up_proj"], layers["act"], layers["down_proj"]).to(dtype), layers.to(dtype)


def proposed(
    kind: str = "rademacher", dtype: torch.dtype = torch.float64, ratio: float = RATIO, zero: tuple[str, ...] = ()
) -> tuple[nn.Module, FactoredUpdate, SketchSet]:
    forward, layers = model(dtype)
    sketches = attach_sketches(layers, 4, targets=["up_proj", "down_proj"], kind=kind, seed=5)
    factors = {
        name: Factor.of(draws(*sketch.shape, seed=len(name), dtype=dtype) * (name not in zero))
        for name, sketch in sketches.sketches().items()
    }
    return forward, FactoredUpdate(sketches.layers, factors, update=1, update_ratio=ratio), sketches


def dense(update: FactoredUpdate, ratio: float = RATIO) -> dict[str, np.ndarray]:
    """D = −η U A, η from the norms of the whole, in numpy."""
    lifted = {
        name: factor.row_scale.double().numpy()[:, None]
        * (factor.levels.double().numpy() @ update.projections[name].matrix(dtype=torch.float64).numpy())
        for name, factor in update.factors.items()
    }
    weights = sum(float(np.square(layer.weight.detach().double().numpy()).sum()) for layer in update.layers.values())
    eta = ratio * math.sqrt(weights / sum(float(np.square(x).sum()) for x in lifted.values()))
    return {name: -eta * x for name, x in lifted.items()}


def norm(matrices) -> float:
    return math.sqrt(sum(float(np.square(np.asarray(x, dtype=np.float64)).sum()) for x in matrices))


def weights_of(update: FactoredUpdate) -> dict[str, np.ndarray]:
    return {name: layer.weight.detach().double().numpy().copy() for name, layer in update.layers.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_norm_is_frobenius_of_the_dense_update_over_all_matrices_and_the_ratio_is_rho(kind):
    _, update, _ = proposed(kind)
    d = dense(update)
    assert update.norm() == pytest.approx(norm(d.values()), rel=1e-13)
    assert update.weight_norm == pytest.approx(norm(weights_of(update).values()), rel=1e-14)
    assert update.norm() / update.weight_norm == pytest.approx(RATIO, rel=1e-13)
    estimate = update.eta * norm(factor.direction().numpy() for factor in update.factors.values()) * math.sqrt(12 / 4)
    assert abs(estimate / update.norm() - 1) > 1e-3  # control: ‖U‖ √(k/r) is an estimate and not the norm


@pytest.mark.parametrize("alpha", [1.0, 0.3, 3.0, -1.0, 0.0])
@pytest.mark.parametrize("kind", KINDS)
def test_apply_adds_alpha_d_to_each_weight_and_to_nothing_else(kind, alpha):
    forward, update, _ = proposed(kind, ratio=0.1)
    before, d, bias = weights_of(update), dense(update, 0.1), forward[0].bias.detach().clone()
    update.apply_(alpha)
    for name, after in weights_of(update).items():
        np.testing.assert_allclose(after, before[name] + alpha * d[name], rtol=1e-14, atol=1e-14)
    assert torch.equal(forward[0].bias, bias)
    assert norm(d.values()) > 0.01  # control: D is large enough to be seen, its sign included


def test_apply_keeps_the_parameters_so_that_optimizers_and_graphs_still_hold_them():
    _, update, sketches = proposed()
    held = [(layer.weight, layer.weight.data_ptr()) for layer in update.layers.values()]
    update.apply_(1.0)
    assert [(layer.weight, layer.weight.data_ptr()) for layer in sketches.layers.values()] == held


def test_coefficients_are_alpha_eta_row_scale_and_the_scale_of_a_in_the_weights_dtype():
    for kind in KINDS:
        _, update, sketches = proposed(kind, torch.float32)
        scaled = {
            name: Factor(f.levels, draws(len(f.levels), seed=9).abs().float()) for name, f in update.factors.items()
        }
        update = FactoredUpdate(sketches.layers, scaled, update=1, update_ratio=RATIO)
        for name, coefficient in update.coefficients(0.7).items():
            k = update.layers[name].in_features
            scale = math.sqrt(k / 4) if kind == "orthonormal" else 0.5
            expected = 0.7 * update.eta * scale * scaled[name].row_scale.double().numpy()
            np.testing.assert_allclose(coefficient, expected, rtol=1e-6)
            assert coefficient.dtype == torch.float32
        before, d = weights_of(update), dense(update)
        update.apply_(0.7)
        moved = {name: after - before[name] for name, after in weights_of(update).items()}
        assert norm(moved[name] - 0.7 * d[name] for name in d) < 0.01 * norm(d.values())


def test_a_factor_of_zeros_is_a_step_of_zero_and_changes_no_bit():
    names = ("up_proj.weight", "down_proj.weight")
    _, update, _ = proposed(zero=names)
    before = weights_of(update)
    assert update.eta == update.norm() == 0.0
    update.apply_(3.0)
    assert all((before[name] == after).all() for name, after in weights_of(update).items())
    assert nominal_step(0.0, 5.0, RATIO) == 0.0
    _, update, _ = proposed(zero=names[:1])  # the other matrix takes the whole step
    d = dense(update)
    assert update.norm() == pytest.approx(RATIO * update.weight_norm, rel=1e-13)
    before = weights_of(update)
    update.apply_(1.0)
    assert (weights_of(update)[names[0]] == before[names[0]]).all()
    np.testing.assert_allclose(weights_of(update)[names[1]], before[names[1]] + d[names[1]], rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("alpha", [math.nan, math.inf, -math.inf])
def test_an_alpha_that_is_not_finite_is_refused_without_any_change(alpha):
    _, update, _ = proposed()
    before = weights_of(update)
    with pytest.raises(FloatingPointError, match=r"α = .* is not finite; nothing was changed"):
        update.apply_(alpha)
    assert all((before[name] == after).all() for name, after in weights_of(update).items())


def test_displaced_layers_compute_what_merged_weights_do_and_are_themselves_again_after():
    for kind in KINDS:
        forward, update, _ = proposed(kind, ratio=0.3)
        x = draws(2, 5, 12)
        plain = forward(x).detach()
        with torch.no_grad(), update.displaced(0.8):
            inside = forward(x)
        assert torch.equal(forward(x), plain)
        with pytest.raises(KeyError), update.displaced(0.8):
            raise KeyError("the caller's own")
        assert torch.equal(forward(x), plain)
        update.apply_(0.8)
        np.testing.assert_allclose(inside, forward(x).detach(), rtol=1e-12, atol=1e-13)
        assert (inside - plain).abs().max() > 0.01


def test_displaced_stock_model_equals_the_merged_one():
    llama = make_tiny_model("qwen2", initializer_range=0.2).double()
    sketches = attach_sketches(llama, 4)
    factors = {name: Factor.of(draws(*s.shape, seed=i)) for i, (name, s) in enumerate(sketches.sketches().items())}
    update = FactoredUpdate(sketches.layers, factors, update=1, update_ratio=0.05)
    tokens = torch.arange(24).reshape(3, 8)
    with torch.no_grad():
        plain = llama(input_ids=tokens, use_cache=False).logits
        with update.displaced(1.0):
            inside = llama(input_ids=tokens, use_cache=False).logits
        update.apply_(1.0)
        merged = llama(input_ids=tokens, use_cache=False).logits
    assert (inside - merged).norm() < 1e-5 * (merged - plain).norm()  # its norms compute in fp32


def test_after_a_refresh_the_factors_no_longer_belong_to_the_layers_and_are_refused():
    forward, update, sketches = proposed()
    held = dict(update.projections)
    before, d = weights_of(update), dense(update)
    sketches.refresh(2)
    for enter in (lambda: update.displaced(1.0), update.tangents):
        with pytest.raises(RuntimeError, match=r"projection of up_proj\.weight was redrawn after"), enter():
            pass
    update.apply_(1.0)  # the same A as before: the update has its own
    assert update.projections == held
    for name, after in weights_of(update).items():
        np.testing.assert_allclose(after, before[name] + d[name], rtol=1e-14, atol=1e-15)
    assert forward(draws(3, 12)).isfinite().all()


def test_one_stale_projection_among_many_leaves_no_layer_displaced():
    forward, update, sketches = proposed(ratio=0.3)
    plain = forward(draws(3, 12)).detach()
    sketches.layers["down_proj.weight"].projection = Projection("rademacher", 4, 10, 99)
    with pytest.raises(RuntimeError, match="down_proj"), update.displaced(1.0):
        pass
    assert torch.equal(forward(draws(3, 12)), plain)


def test_rows_at_two_holders_get_the_eta_and_the_weights_of_the_whole():
    _, whole, _ = proposed()
    parts = {"up_proj.weight": [4, 6], "down_proj.weight": [0, 7]}

    def work(holder: int, total) -> tuple[FactoredUpdate, dict[str, np.ndarray]]:
        layers, factors = {}, {}
        for name, layer in whole.layers.items():
            layers[name] = copy.copy(layer)
            layers[name]._parameters = {
                "weight": nn.Parameter(layer.weight.detach().split(parts[name])[holder].clone())
            }
            layers[name].projection = layer.projection
            factors[name] = Factor.of(whole.factors[name].levels.split(parts[name])[holder])
        update = FactoredUpdate(layers, factors, update=1, update_ratio=RATIO, holding=Part(total))
        update.apply_(1.0)
        return update, weights_of(update)

    (first, upper), (second, lower) = each_holder(work, 2)
    assert first.eta == second.eta == pytest.approx(whole.eta, rel=1e-13)
    assert first.norm() == pytest.approx(whole.norm(), rel=1e-13)
    assert first.weight_norm == pytest.approx(whole.weight_norm, rel=1e-14)
    whole.apply_(1.0)
    for name, weight in weights_of(whole).items():
        np.testing.assert_allclose(np.concatenate([upper[name], lower[name]]), weight, rtol=1e-14)
