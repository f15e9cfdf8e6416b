"""Attaching, pausing, refreshing and detaching sketches, and that what is refused leaves the model as it was."""

import copy
import io

import pytest
import torch
from torch import nn

from logra_ref import SketchedLinear, attach_sketches
from logra_ref.toy import ToyPolicy

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def toy() -> ToyPolicy:
    return ToyPolicy(7, width=8, layers=2, heads=2, length=5, seed=2).double()


def tokens() -> torch.Tensor:
    return torch.randint(7, (3, 5), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(tokens()).square().mean()


def snapshot(model: nn.Module) -> list:
    """All that attaching could change."""
    state = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    return state + [(name, id(p), p.requires_grad, p.dtype, p._version) for name, p in model.named_parameters()]


def test_the_seven_linear_layers_of_every_block_are_selected_and_nothing_else_changes():
    model, plain = toy(), toy()
    sketches = attach_sketches(model, 3)
    assert sorted(sketches.layers) == sorted(f"blocks.{i}.{layer}.weight" for i in (0, 1) for layer in LAYERS)
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == set(sketches.layers)
    assert type(model.head) is nn.Linear
    assert torch.equal(model(tokens()), plain(tokens()))
    for name, sketch in sketches.sketches().items():
        assert sketch.shape == (len(model.get_parameter(name)), 3)
        assert sketches.weights()[name] is model.get_parameter(name)
        assert sketch.dtype == torch.float64


def test_state_dict_has_the_keys_of_the_plain_model_and_loads_both_ways():
    model, plain = toy(), toy()
    sketches = attach_sketches(model, 3)
    loss_of(model).backward()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert list(dict(model.named_buffers())) == []
    with torch.no_grad():
        model.blocks[0].q_proj.weight.mul_(1.5)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(plain(tokens()), model(tokens()))
    sketch = sketches.sketches()["blocks.0.q_proj.weight"].clone()
    model.load_state_dict(toy().state_dict())
    assert torch.equal(model(tokens()), toy()(tokens()))
    assert torch.equal(sketches.sketches()["blocks.0.q_proj.weight"], sketch)
    assert sketch.abs().max() > 0


def test_a_copied_model_has_sketches_of_its_own():
    model = toy()
    sketches = attach_sketches(model, 3)
    loss_of(copy.deepcopy(model)).backward()
    assert all((sketch == 0).all() for sketch in sketches.sketches().values())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forward_without_gradients_is_the_plain_one_and_leaves_the_sketches(mode):
    model = toy()
    sketches = attach_sketches(model, 3)
    for layer in sketches.layers.values():
        layer.projection = None  # not even a product with A is made
    with mode():
        assert torch.equal(model(tokens()), toy()(tokens()))
    assert all((sketch == 0).all() for sketch in sketches.sketches().values())


def test_paused_forward_and_backward_pass_the_sketches_by_even_nested_and_after_an_error():
    model = toy()
    sketches = attach_sketches(model, 3)
    loss_of(model).backward()
    before = {name: sketch.clone() for name, sketch in sketches.sketches().items()}

    def unchanged() -> bool:
        return all(torch.equal(sketch, before[name]) for name, sketch in sketches.sketches().items())

    with sketches.paused():
        with sketches.paused():
            loss_of(model).backward()
        loss_of(model).backward()  # still paused after the inner block
        assert unchanged()
        assert all(p.grad is None for name, p in model.named_parameters() if name in sketches.layers)
    with pytest.raises(KeyError), sketches.paused():
        raise KeyError("the caller's own")
    loss_of(model).backward()
    assert not unchanged()
    assert {layer.contributions for layer in sketches.layers.values()} == {2}


def test_zero_empties_sketches_and_counts_in_place_and_keeps_the_projections():
    model = toy()
    sketches = attach_sketches(model, 3)
    loss_of(model).backward()
    held, drawn = sketches.sketches(), sketches.projections()
    sketches.zero_()
    for name, layer in sketches.layers.items():
        assert layer.sketch is held[name]
        assert (layer.sketch == 0).all()
        assert layer.contributions == 0
        assert layer.projection is drawn[name]


def test_refresh_draws_other_projections_for_every_matrix_and_update_and_empties_the_sketches():
    model = toy()
    sketches = attach_sketches(model, 3, seed=9)

    def drawn() -> dict[tuple, str]:
        return {tuple(p.entries().flatten().tolist()): name for name, p in sketches.projections().items()}

    first = drawn()
    loss_of(model).backward()
    sketches.refresh(2)
    second = drawn()
    assert len(first.keys() | second.keys()) == 28  # 3 · 8 bits and more: none twice among 28
    assert all((layer.sketch == 0).all() and layer.contributions == 0 for layer in sketches.layers.values())
    sketches.refresh(1)
    assert drawn() == first
    assert (
        attach_sketches(toy(), 3, seed=10).projections()["blocks.0.q_proj.weight"].seed
        != next(iter(sketches.projections().values())).seed
    )


def test_detached_layers_are_plain_trainable_ones_again_with_nothing_left_behind():
    model, plain = toy(), toy()
    sketches = attach_sketches(model, 3)
    attached = snapshot(model)
    loss_of(model).backward()
    model.zero_grad()
    sketches.detach_from_model()
    assert snapshot(model) != attached
    assert [entry[:3] for entry in snapshot(model)[:20]] == [entry[:3] for entry in snapshot(plain)[:20]]
    assert sketches.sketches() == {}
    for each in (model, plain):
        loss_of(each).backward()
    for (name, own), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(own.grad, theirs.grad), name
    assert len(attach_sketches(model, 2).layers) == 14


class Quantised(nn.Linear):
    pass


def with_layer(layer: nn.Module) -> nn.Module:
    model = toy()
    model.blocks[1].k_proj = layer
    return model


def tied() -> nn.Module:
    model = toy()
    model.head.weight = model.embedding.weight
    return model


def sketched() -> nn.Module:
    model = toy()
    attach_sketches(model, 2, targets=["v_proj"])
    return model


@pytest.mark.parametrize(
    ("model", "arguments", "complaint"),
    [
        (toy, {"targets": ["q_proj", "query"]}, r"named query; .*: down_proj, gate_proj, head, k_proj"),
        (toy, {"targets": ["proj"]}, "named proj"),  # a suffix of the characters alone is no name
        (toy, {"targets": ["nothing", "less"]}, "named less, nothing"),
        (toy, {"targets": []}, "no target given"),
        (lambda: nn.Sequential(nn.ReLU()), {}, "linear layers of this model: none"),
        (toy, {"targets": ["q_proj", "embedding"]}, "layer embedding is a Embedding"),
        (toy, {"targets": ["q_proj", "attention_norm"]}, "is a RMSNorm"),
        (lambda: with_layer(Quantised(8, 8).double()), {}, "k_proj is a Quantised; only plain"),
        (lambda: with_layer(nn.Conv1d(8, 8, 1).double()), {}, "k_proj is a Conv1d"),
        (sketched, {}, "v_proj is a SketchedLinear"),
        (lambda: with_layer(nn.Linear(8, 8).bfloat16()), {}, "k_proj is torch.bfloat16; load the model in float32"),
        (lambda: with_layer(nn.Linear(8, 8).half()), {}, "float16"),
        (tied, {"targets": ["q_proj", "head"]}, r"weight of head is tied to \['embedding', 'head'\]"),
        (toy, {"rank": 0}, "rank 0"),
        (toy, {"rank": -3}, "rank -3"),
        (toy, {"rank": 9, "kind": "orthonormal"}, "rank 9 is above 8"),  # 8 inputs; down_proj has 32
        (toy, {"rank": 9, "kind": "hadamard"}, "rank 9 is above 8"),
        (
            lambda: with_layer(nn.Linear(4, 8).double()),
            {"rank": 5, "kind": "hadamard"},
            "rank 5 is above 4",
        ),  # a late one
    ],
)
def test_what_cannot_be_sketched_is_refused_by_name_before_anything_is_changed(model, arguments, complaint):
    model = model()
    before = snapshot(model)
    with pytest.raises(ValueError, match=complaint):
        attach_sketches(model, **{"rank": 3, **arguments})
    assert snapshot(model) == before


def test_a_tied_head_outside_the_targets_is_no_obstacle_and_an_untied_one_can_be_selected():
    attach_sketches(tied(), 2)
    model, plain = toy(), toy()
    sketches = attach_sketches(model, 2, targets=["head"])
    assert isinstance(model.head, SketchedLinear)
    for each in (model, plain):
        loss_of(each).backward()
    expected = plain.head.weight.grad @ sketches.projections()["head.weight"].matrix(dtype=torch.float64).T
    torch.testing.assert_close(sketches.sketches()["head.weight"], expected, rtol=1e-12, atol=1e-15)
