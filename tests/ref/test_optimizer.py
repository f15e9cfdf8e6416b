"""LoGRA against Algorithm 1 written out again in numpy on full matrices, and its manners as a torch optimizer."""

import copy
import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from logra_ref import LoGRA, Projection, attach_sketches
from logra_ref.projection import projection_seed
from logra_ref.sketch import DEFAULT_TARGETS
from logra_ref.toy import ToyPolicy
from tests.tiny import make_tiny_model

RATIO = 3e-3


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = OrderedDict(up_proj=nn.Linear(6, 10), act=nn.Tanh(), down_proj=nn.Linear(10, 3, bias=False))
    return nn.Sequential(layers).double()


def policy() -> nn.Module:
    return ToyPolicy(7, width=8, layers=1, heads=2, length=5, seed=2).double()


def batch_of(model: nn.Module, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    if isinstance(model, ToyPolicy):
        tokens = torch.randint(7, (4, 6), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return x, x[:, :3].sin()


def loss_of(model: nn.Module, inputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    outputs = model(inputs)
    return (
        F.cross_entropy(outputs.flatten(0, 1), wanted.flatten()) if outputs.ndim == 3 else F.mse_loss(outputs, wanted)
    )


def targets_of(model: nn.Module) -> tuple[str, ...]:
    return DEFAULT_TARGETS if isinstance(model, ToyPolicy) else ("up_proj", "down_proj")


def sketched(build, *, rank: int = 4, kind: str = "rademacher", seed: int = 9, **settings):
    model = build()
    return model, LoGRA(
        attach_sketches(model, rank, targets=targets_of(model), seed=seed, kind=kind), RATIO, **settings
    )


def train(model: nn.Module, optimizer: LoGRA, numbers, alpha: float = 1.0) -> None:
    for number in numbers:
        optimizer.zero_grad()
        loss_of(model, *batch_of(model, number)).backward()
        optimizer.step(alpha=alpha)


def selected(model: nn.Module) -> dict[str, torch.Tensor]:
    ends = tuple(f"{target}.weight" for target in targets_of(model))
    return {name: p.detach().clone() for name, p in model.named_parameters() if name.endswith(ends)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def moved(model: nn.Module, before: dict[str, torch.Tensor]) -> float:
    """The norm of the change of all selected weights over their norm before."""
    change = [(weight - before[name]).flatten() for name, weight in selected(model).items()]
    return float(torch.cat(change).norm() / torch.cat([weight.flatten() for weight in before.values()]).norm())


class Dense:
    """Algorithm 1 with dense gradients of an untouched model; all matrices are formed, all in numpy."""

    def __init__(self, model: nn.Module, direction: str, refresh: str, kind: str, rank: int = 4, seed: int = 9) -> None:
        self.model, self.direction, self.refresh, self.kind = model, direction, refresh, kind
        self.rank, self.seed, self.u = rank, seed, 1
        self.v = dict.fromkeys(selected(model), 0.0)

    def step(self, number: int, alpha: float) -> None:
        self.model.zero_grad()
        loss_of(self.model, *batch_of(self.model, number)).backward()
        parameters = {name: p for name, p in self.model.named_parameters() if name in self.v}
        proposal = {name: self.lifted(name, p.grad.numpy()) for name, p in parameters.items()}
        weight_square = sum(float((p.detach().numpy() ** 2).sum()) for p in parameters.values())
        eta = RATIO * math.sqrt(weight_square / sum(float((d**2).sum()) for d in proposal.values()))
        with torch.no_grad():
            for name, p in parameters.items():
                p -= torch.from_numpy(alpha * eta * proposal[name])
        self.u += 1

    def lifted(self, name: str, gradient: np.ndarray) -> np.ndarray:
        drawn = self.u if self.refresh == "every_update" else 1
        projection = Projection(self.kind, self.rank, gradient.shape[1], projection_seed(self.seed, drawn, name))
        a = projection.matrix(dtype=torch.float64).numpy()
        s = gradient @ a.T
        if self.direction == "sgd":
            return s @ a
        self.v[name] = 0.95 * self.v[name] + 0.05 * (s**2).mean(axis=1)
        root = np.sqrt(self.v[name] / (1 - 0.95**self.u))
        scaled = s / (root + 1e-8 * root.mean())[:, None]
        return scaled * (np.linalg.norm(s) / np.linalg.norm(scaled)) @ a


@pytest.mark.parametrize("kind", ["rademacher", "gaussian", "orthonormal", "hadamard"])
@pytest.mark.parametrize("refresh", ["every_update", "fixed"])
@pytest.mark.parametrize("direction", ["row_adam", "sgd"])
@pytest.mark.parametrize("build", [mlp, policy])
def test_five_updates_are_those_of_algorithm_1_on_dense_gradients(build, direction, refresh, kind):
    model, optimizer = sketched(build, direction=direction, refresh=refresh, kind=kind)
    dense = Dense(build(), direction, refresh, kind)
    start = selected(model)
    for number, alpha in enumerate([1.0, 0.3, 2.0, 1.0, 0.7]):
        train(model, optimizer, [number], alpha)
        dense.step(number, alpha)
    expected = selected(dense.model)
    for name, weight in selected(model).items():
        np.testing.assert_allclose(weight - start[name], expected[name] - start[name], rtol=1e-7, atol=1e-12)


def test_the_reference_tells_directions_and_refresh_apart():
    """Control of the test above: each setting has its own trajectory."""
    ends = []
    for direction in ("row_adam", "sgd"):
        for refresh in ("every_update", "fixed"):
            model, optimizer = sketched(mlp, direction=direction, refresh=refresh)
            train(model, optimizer, range(3))
            ends.append(selected(model)["up_proj.weight"])
    gaps = [(a - b).abs().max() for i, a in enumerate(ends) for b in ends[:i]]
    assert min(gaps) > 1e-4


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("direction", ["row_adam", "sgd"])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_size_of_an_update_is_rho_alpha_whatever_the_size_of_the_loss(scale, direction, int8):
    model, optimizer = sketched(policy, direction=direction, int8_factors=int8)
    before = selected(model)
    (scale * loss_of(model, *batch_of(model, 0))).backward()
    optimizer.step(alpha=1.5)
    assert moved(model, before) == pytest.approx(1.5 * RATIO, rel=1e-9)


def test_microbatches_add_up_to_the_update_of_the_whole_batch():
    (model, optimizer), (twin, other) = sketched(mlp), sketched(mlp)
    train(twin, other, [0])
    inputs, wanted = batch_of(model, 0)
    for rows in (slice(0, 3), slice(3, 4), slice(4, 8)):
        share = len(inputs[rows]) / len(inputs)
        (share * loss_of(model, inputs[rows], wanted[rows])).backward()
    optimizer.step()
    for name, weight in selected(twin).items():
        np.testing.assert_allclose(selected(model)[name], weight, rtol=1e-12, atol=1e-14)


def test_gradients_of_an_earlier_update_do_not_leak_into_the_next_without_zero_grad():
    (model, optimizer), (twin, other) = sketched(mlp), sketched(mlp)
    for number in range(3):
        loss_of(model, *batch_of(model, number)).backward()
        optimizer.step()
    train(twin, other, range(3))
    assert same(selected(model), selected(twin))


def test_torchs_schedulers_scale_the_update_ratio():
    model, optimizer = sketched(mlp)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    for number in range(3):
        before = selected(model)
        train(model, optimizer, [number])
        scheduler.step()
        assert moved(model, before) == pytest.approx(RATIO * 0.5**number, rel=1e-9)


def test_a_closure_computes_the_gradients_and_its_loss_is_returned():
    (model, optimizer), (twin, other) = sketched(mlp), sketched(mlp)
    inputs, wanted = batch_of(model, 4)
    expected = loss_of(twin, inputs, wanted)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, inputs, wanted)
        loss.backward()
        return loss

    assert torch.equal(optimizer.step(closure), expected)
    train(twin, other, [4])
    assert same(selected(model), selected(twin))


def test_a_proposal_from_before_the_closures_gradients_is_not_what_is_applied():
    (model, optimizer), (twin, other) = sketched(mlp), sketched(mlp)
    for m in (model, twin):
        loss_of(m, *batch_of(m, 0)).backward()
    optimizer.propose()
    optimizer.step(lambda: loss_of(model, *batch_of(model, 1)).backward())
    loss_of(twin, *batch_of(twin, 1)).backward()
    other.step()
    assert same(selected(model), selected(twin))


def test_propose_changes_nothing_and_a_second_one_is_equal():
    (model, optimizer), (twin, other) = sketched(policy), sketched(policy)
    train(model, optimizer, [0])
    train(twin, other, [0])
    loss_of(model, *batch_of(model, 1)).backward()
    sketches = {n: s.clone() for n, s in optimizer.sketches.sketches().items()}
    before, state = selected(model), copy.deepcopy(optimizer.state_dict())
    first, second = optimizer.propose(), optimizer.propose()
    assert first.eta == second.eta
    assert all(torch.equal(first.factors[n].levels, second.factors[n].levels) for n in first.factors)
    assert same(selected(model), before)
    assert same(optimizer.sketches.sketches(), sketches)
    assert str(optimizer.state_dict()) == str(state)
    optimizer.step()
    train(twin, other, [1])
    assert same(selected(model), selected(twin))


def test_a_proposal_that_was_not_taken_is_forgotten_by_zero_grad():
    (model, optimizer), (twin, other) = sketched(policy), sketched(policy)
    loss_of(model, *batch_of(model, 5)).backward()
    optimizer.propose()
    train(model, optimizer, [0, 1])
    train(twin, other, [0, 1])
    assert same(selected(model), selected(twin))
    assert optimizer.update == 3


def test_the_probe_sees_the_proposal_and_decides_alpha():
    (model, optimizer), (twin, other) = sketched(mlp), sketched(mlp)
    loss_of(model, *batch_of(model, 0)).backward()
    seen = []
    optimizer.step(probe=lambda update: seen.append(update.norm()) or 0.25)
    train(twin, other, [0], alpha=0.25)
    assert same(selected(model), selected(twin))
    held = math.sqrt(sum(float(w.square().sum()) for w in selected(mlp()).values()))
    assert seen == [pytest.approx(RATIO * held, rel=1e-9)]


def test_int8_factors_are_small_integers_close_to_the_direction():
    model, optimizer = sketched(policy, int8_factors=True)
    twin, exact = sketched(policy)
    for m in (model, twin):
        loss_of(m, *batch_of(m, 0)).backward()
    rounded, plain = optimizer.propose(), exact.propose()
    for name, factor in rounded.factors.items():
        assert factor.levels.eq(factor.levels.round()).all()
        assert factor.levels.abs().max() == 127
        direction = plain.factors[name].direction()
        assert torch.cosine_similarity(factor.direction().flatten(), direction.flatten(), dim=0) > 0.9999


def test_unselected_parameters_are_trained_by_another_optimizer_beside_it():
    model, optimizer = sketched(policy)
    rest = [p for name, p in model.named_parameters() if name not in selected(model)]
    assert all(p.requires_grad for p in rest)
    assert not any(p.requires_grad for p in optimizer.param_groups[0]["params"])
    other = torch.optim.AdamW(rest, lr=1e-2)
    before, rest_before = selected(model), [p.detach().clone() for p in rest]
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        other.zero_grad()
        loss = loss_of(model, *batch_of(model, 0))
        loss.backward()
        optimizer.step()
        other.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(not torch.equal(w, before[n]) for n, w in selected(model).items())
    assert all(not torch.equal(p, old) for p, old in zip(rest, rest_before, strict=True))
    assert all(p.grad is None for p in optimizer.param_groups[0]["params"])


def test_a_model_with_tied_embeddings_trains_and_stays_tied():
    model = make_tiny_model("qwen2", tied=True, seed=1, initializer_range=0.2)
    model.model.embed_tokens.weight.requires_grad_(False)
    optimizer = LoGRA(attach_sketches(model, 8), 2e-2)
    tokens = torch.randint(17, (4, 6), generator=torch.Generator().manual_seed(0))
    table = model.lm_head.weight.detach().clone()
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, table)
