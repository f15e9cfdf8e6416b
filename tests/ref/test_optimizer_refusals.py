"""What LoGRA refuses, and that a refusal leaves weights and state as they were."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from logra_ref import LoGRA, attach_sketches
from logra_ref.toy import ToyPolicy


def sketched(**settings) -> tuple[ToyPolicy, LoGRA]:
    model = ToyPolicy(7, width=8, layers=1, heads=2, length=5, seed=2).double()
    return model, LoGRA(attach_sketches(model, 4), 3e-3, **settings)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    tokens = torch.randint(7, (4, 6), generator=torch.Generator().manual_seed(number))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(model: nn.Module, optimizer: LoGRA, numbers) -> None:
    for number in numbers:
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_step_without_backward_is_an_error_and_not_an_update_of_nothing():
    model, optimizer = sketched()
    before = weights_of(model)
    with pytest.raises(RuntimeError, match=r"no backward pass reached 7 of 7.*q_proj"):
        optimizer.step()
    model.blocks[0].q_proj(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    with pytest.raises(RuntimeError, match=r"reached 6 of 7 sketches, the first blocks\.0\.k_proj\.weight"):
        optimizer.step()
    train(model, optimizer, [0])
    with pytest.raises(RuntimeError, match="no backward pass"):
        optimizer.step()
    assert not same(weights_of(model), before)
    assert optimizer.update == 2


@pytest.mark.parametrize("alpha", [math.nan, math.inf])
def test_an_alpha_that_is_not_finite_is_refused_and_changes_nothing(alpha):
    model, optimizer = sketched()
    before = weights_of(model)
    loss_of(model, 0).backward()
    with pytest.raises(FloatingPointError, match="nothing was changed"):
        optimizer.step(alpha=alpha)
    assert same(weights_of(model), before)
    assert optimizer.update == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_sketch_that_is_not_finite_is_refused_and_training_can_go_on(bad):
    (model, optimizer), (twin, other) = sketched(), sketched()
    for m, o in ((model, optimizer), (twin, other)):
        train(m, o, [0])
    before, state = weights_of(model), copy.deepcopy(optimizer.state_dict())
    (bad * loss_of(model, 1)).backward()
    for attempt in (optimizer.step, optimizer.propose):
        with pytest.raises(FloatingPointError, match="not finite; nothing was changed"):
            attempt()
    assert same(weights_of(model), before)
    assert str(optimizer.state_dict()) == str(state)
    train(model, optimizer, [2, 3])
    train(twin, other, [2, 3])
    assert same(weights_of(model), weights_of(twin))


@pytest.mark.parametrize("direction", ["row_adam", "sgd"])
def test_a_gradient_of_zero_moves_nothing_and_makes_no_nan(direction):
    model, optimizer = sketched(direction=direction)
    before = weights_of(model)
    (0 * loss_of(model, 0)).backward()
    optimizer.step()
    assert same(weights_of(model), before)
    train(model, optimizer, [1])
    assert all(w.isfinite().all() for w in weights_of(model).values())


@pytest.mark.parametrize(
    "settings",
    [
        {"update_ratio": 0.0},
        {"update_ratio": -1e-4},
        {"update_ratio": math.nan},
        {"direction": "adam"},
        {"refresh": "sometimes"},
        {"beta2": 1.0},
        {"beta2": -0.1},
        {"epsilon": 0.0},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings):
    sketches = sketched()[1].sketches
    with pytest.raises((ValueError, TypeError)):  # the second where types are checked at run time
        LoGRA(sketches, **settings)


def test_a_proposal_is_made_of_the_sketches_and_is_refused_once_they_have_changed():
    model, optimizer = sketched()
    before = weights_of(model)
    loss_of(model, 0).backward()
    proposal = optimizer.propose()
    for name, sketch in optimizer.sketches.sketches().items():
        assert proposal.factors[name].levels.data_ptr() == sketch.data_ptr()
    loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match=r"sketch of blocks\.0\.q_proj\.weight was changed after this update was"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="nothing was done"), proposal.displaced(1.0):
        pass
    assert same(weights_of(model), before)
    optimizer.propose()
    optimizer.step()
    assert not same(weights_of(model), before)
