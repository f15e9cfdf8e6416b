"""Saving and continuing: 2 + 2 updates are 4, bit for bit, from a file that holds no objects."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F

from logra_ref import LoGRA, attach_sketches
from logra_ref.toy import ToyPolicy


def policy(**shape) -> ToyPolicy:
    return ToyPolicy(7, **({"width": 8, "layers": 1, "heads": 2, "length": 5, "seed": 2} | shape))


def optimizer_of(model: ToyPolicy, *, rank: int = 4, kind: str = "rademacher", seed: int = 9, **settings) -> LoGRA:
    return LoGRA(attach_sketches(model, rank, seed=seed, kind=kind), 3e-3, **settings)


def train(model: ToyPolicy, optimizer: LoGRA, numbers) -> None:
    for number in numbers:
        tokens = torch.randint(7, (4, 6), generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(a, b) -> bool:
    """Equal in structure, values and bits."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("refresh", ["every_update", "fixed"])
@pytest.mark.parametrize("direction", ["row_adam", "sgd"])
def test_two_and_two_updates_are_four_bit_for_bit(direction, refresh, int8):
    settings = {"direction": direction, "refresh": refresh, "int8_factors": int8}
    whole = policy()
    straight = optimizer_of(whole, **settings)
    train(whole, straight, range(4))

    first = policy()
    stopped = optimizer_of(first, **settings)
    train(first, stopped, range(2))
    saved = through_a_file({"model": first.state_dict(), "optimizer": stopped.state_dict()})
    torch.manual_seed(12345)  # the global generator has no part in it
    second = policy(seed=77)
    second.load_state_dict(saved["model"])
    resumed = optimizer_of(second, **settings)
    resumed.load_state_dict(saved["optimizer"])
    train(second, resumed, range(2, 4))
    assert same(second.state_dict(), whole.state_dict())
    assert same(resumed.state_dict(), straight.state_dict())
    assert resumed.update == 5


def test_an_optimizer_that_forgot_its_state_would_be_seen():
    """Control of the test above: neither the moments nor the update number may be lost."""
    model, whole = policy(), policy()
    optimizer, straight = optimizer_of(model), optimizer_of(whole)
    train(model, optimizer, range(2))
    train(whole, straight, range(4))
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    saved = optimizer.state_dict()
    for lost in ({**saved, "state": {}}, {**saved, "param_groups": [{**saved["param_groups"][0], "update": 1}]}):
        twin = policy()
        twin.load_state_dict(model.state_dict())
        resumed = optimizer_of(twin)
        resumed.load_state_dict(lost)
        train(twin, resumed, range(2, 4))
        assert not same(twin.state_dict(), whole.state_dict())


def test_loading_brings_the_projections_of_the_next_update_and_empties_the_sketches():
    model, twin = policy(), policy()
    optimizer, resumed = optimizer_of(model), optimizer_of(twin)
    train(model, optimizer, range(3))
    F.mse_loss(twin(torch.tensor([[1, 2]])), torch.zeros(1, 2, 7)).backward()
    resumed.load_state_dict(optimizer.state_dict())
    for name, projection in optimizer.sketches.projections().items():
        assert resumed.sketches.projections()[name].seed == projection.seed
        assert torch.equal(resumed.sketches.projections()[name].matrix(), projection.matrix())
    assert all(sketch.eq(0).all() for sketch in resumed.sketches.sketches().values())


def test_a_scheduled_ratio_is_part_of_the_state():
    model, twin = policy(), policy()
    optimizer, resumed = optimizer_of(model), optimizer_of(twin)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    train(model, optimizer, [0])
    scheduler.step()
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert resumed.param_groups[0]["lr"] == 1.5e-3


def walk(value, kinds: set) -> None:
    kinds.add(type(value))
    if isinstance(value, dict):
        for key, item in value.items():
            assert type(key) in (str, int)
            walk(item, kinds)
    elif isinstance(value, list | tuple):
        for item in value:
            walk(item, kinds)


@pytest.mark.parametrize("direction", ["row_adam", "sgd"])
def test_the_state_holds_tensors_numbers_and_strings_only_and_is_small(direction):
    model = policy()
    optimizer = optimizer_of(model, direction=direction)
    train(model, optimizer, range(2))
    state, kinds = optimizer.state_dict(), set()
    walk(state, kinds)
    assert kinds <= {torch.Tensor, int, float, bool, str, dict, list}
    numbers = [x.numel() for held in state["state"].values() for x in held.values()]
    rows = [layer.out_features for layer in optimizer.sketches.layers.values()]
    assert numbers == (rows if direction == "row_adam" else [])


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"rank": 5}, "'rank': 4"),
        ({"kind": "hadamard"}, "rademacher"),
        ({"seed": 10}, "'seed': 9"),
        ({"refresh": "fixed"}, "every_update"),
        ({"layers": 2}, "7 matrices"),
    ],
)
def test_a_state_with_other_projections_or_matrices_is_refused_unchanged(other, says):
    model = policy()
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2))
    shape = {k: v for k, v in other.items() if k == "layers"}
    twin = policy(**shape)
    resumed = optimizer_of(twin, **{k: v for k, v in other.items() if k not in shape})
    train(twin, resumed, [5])
    before = copy.deepcopy(resumed.state_dict())
    with pytest.raises(ValueError, match=says):
        resumed.load_state_dict(optimizer.state_dict())
    assert same(resumed.state_dict(), before)


def test_a_state_of_a_wrapped_model_fits_the_plain_one():
    plain, wrapped = policy(), torch.nn.ModuleDict({"module": policy()})
    sketches = attach_sketches(wrapped, 4, seed=9)
    optimizer, resumed = LoGRA(sketches, 3e-3), optimizer_of(plain)
    train(wrapped["module"], optimizer, range(2))
    resumed.load_state_dict(optimizer.state_dict())
    plain.load_state_dict(wrapped["module"].state_dict())
    train(wrapped["module"], optimizer, [2])
    train(plain, resumed, [2])
    assert same(plain.state_dict(), wrapped["module"].state_dict())
