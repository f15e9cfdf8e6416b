"""Sketches against autograd's dense gradient times Aᵀ on stock models, whatever stands around the layers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from logra_ref import LoGRA, SketchSet, attach_sketches
from tests.tiny import make_tiny_model

FAMILIES = ("llama", "qwen2", "qwen3")
RANK = 5


def stock(family: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    model = make_tiny_model(family, seed=5, initializer_range=0.2).to(dtype).train()
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if name.endswith("bias"):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(index))
    return model


def microbatches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(258, shape, generator=generator) for shape in ((2, 5), (1, 7), (3, 4))]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)), tokens[:, 1:].flatten()
    )


def backward(model: nn.Module, blocks: list[torch.Tensor], autocast: bool = False) -> None:
    for block in blocks:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model, block)
        loss.backward()


def dense_times_a(plain: nn.Module, sketches: SketchSet) -> dict[str, torch.Tensor]:
    """G Aᵀ in fp64 from the gradients of an ordinary model."""
    gradients = {name: parameter.grad.double() for name, parameter in plain.named_parameters()}
    matrices = {name: projection.matrix(dtype=torch.float64) for name, projection in sketches.projections().items()}
    return {name: gradients[name] @ a.T for name, a in matrices.items()}


def worst(sketches: SketchSet, expected: dict[str, torch.Tensor]) -> float:
    """The largest relative error over the matrices, in Frobenius norm."""
    found = sketches.sketches()
    assert found.keys() == expected.keys()
    return max(float((found[name].double() - e).norm() / e.norm()) for name, e in expected.items())


def freeze(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_three_microbatches_add_up_to_autograds_gradient_also_checkpointed_and_with_all_else_frozen(
    family, checkpointing, frozen
):
    model, plain = stock(family), stock(family)
    sketches = attach_sketches(model, RANK, seed=3)
    assert len(sketches.layers) == 14
    if frozen:
        freeze(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    backward(model, microbatches())
    backward(plain, microbatches())
    expected = dense_times_a(plain, sketches)
    assert worst(sketches, expected) < 1e-12
    assert {layer.contributions for layer in sketches.layers.values()} == {3}  # a recomputed forward counts once
    backward(plain, microbatches()[:1])
    assert worst(sketches, dense_times_a(plain, sketches)) > 0.01  # control: a microbatch too many is seen


@pytest.mark.parametrize("kind", ["gaussian", "orthonormal", "hadamard"])
def test_every_kind_of_projection_gives_the_dense_gradient_times_its_matrix(kind):
    model, plain = stock("llama"), stock("llama")
    sketches = attach_sketches(model, RANK, kind=kind)
    backward(model, microbatches())
    backward(plain, microbatches())
    assert worst(sketches, dense_times_a(plain, sketches)) < 1e-12


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("autocast", "least", "most"), [(False, 0, 3e-6), (True, 1e-4, 1e-2)])
def test_fp32_weights_give_fp32_sketches_of_the_accuracy_of_the_compute_type(autocast, least, most, checkpointing):
    model, plain = stock("qwen2", torch.float32), stock("qwen2", torch.float32)
    sketches = attach_sketches(model, RANK)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    backward(model, microbatches(), autocast)
    backward(plain, microbatches(), autocast)
    assert {sketch.dtype for sketch in sketches.sketches().values()} == {torch.float32}
    assert least < worst(sketches, dense_times_a(plain, sketches)) < most


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_all_other_gradients_are_those_of_the_plain_model_bit_for_bit(family, autocast):
    models, logits, inputs = [stock(family, torch.float32), stock(family, torch.float32)], [], []
    sketches = attach_sketches(models[0], RANK)
    for model in models:
        x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits.append(model(inputs_embeds=x, use_cache=False).logits)
        logits[-1].float().square().sum().backward()
        inputs.append(x)
    assert torch.equal(*logits)
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    selected = sketches.weights()
    for (name, own), (_, theirs) in zip(*(model.named_parameters() for model in models), strict=True):
        if name in selected:
            assert own.grad is None and not own.requires_grad
            assert theirs.grad is not None
        elif own.grad is None:
            assert theirs.grad is None
        else:
            assert torch.equal(own.grad, theirs.grad)  # norms, biases and the head


def saved_inside(layers: list[nn.Linear], run) -> list[torch.Tensor]:
    """What autograd keeps while these layers run forward, without their parameters."""
    depth, saved = [], []
    handles = [layer.register_forward_pre_hook(lambda *_: depth.append(1)) for layer in layers]
    handles += [layer.register_forward_hook(lambda *_: depth.pop() and None) for layer in layers]
    parameters = {parameter.data_ptr() for layer in layers for parameter in layer.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if depth and tensor.data_ptr() not in parameters:
            saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    for handle in handles:
        handle.remove()
    return saved


@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_keeps_n_by_r_for_each_selected_layer_and_no_copy_of_its_input(family):
    model, plain = stock(family), stock(family)
    tokens = microbatches()[0]
    sketches = attach_sketches(model, RANK)
    saved = saved_inside(list(sketches.layers.values()), lambda: loss_of(model, tokens))
    assert [tuple(tensor.shape) for tensor in saved] == [(*tokens.shape, RANK)] * 14
    ordinary = [plain.get_submodule(name.removesuffix(".weight")) for name in sketches.layers]
    widths = sorted(tensor.shape[-1] for tensor in saved_inside(ordinary, lambda: loss_of(plain, tokens)))
    assert widths == [16] * 12 + [24] * 2  # control: the plain layers keep their inputs


def lone(bias: bool = True, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Linear, SketchSet]:
    torch.manual_seed(1)
    model = nn.Sequential()
    model.add_module("q_proj", nn.Linear(6, 4, bias=bias, dtype=dtype))
    plain = copy.deepcopy(model.q_proj)
    return model, plain, attach_sketches(model, 3, targets=["q_proj"])


@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 5, 6), (2, 1, 3, 6), (0, 6), (2, 0, 6)])
def test_inputs_of_any_number_of_dimensions_also_one_token_and_none(shape):
    model, plain, sketches = lone()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for layer in (model, plain):
        layer(x).sin().sum().backward()
    expected = dense_times_a(nn.ModuleDict({"q_proj": plain}), sketches)["q_proj.weight"]
    torch.testing.assert_close(sketches.sketches()["q_proj.weight"], expected, rtol=1e-12, atol=1e-14)
    assert model.q_proj.contributions == 1
    torch.testing.assert_close(model.q_proj.bias.grad, plain.bias.grad, rtol=1e-14, atol=0)


@pytest.mark.parametrize(("width", "outputs"), [(1, 4), (6, 1), (1, 1)])
def test_layers_of_one_input_or_one_output_and_ranks_above_the_width(width, outputs):
    model = nn.ModuleDict({"o_proj": nn.Linear(width, outputs, dtype=torch.float64)})
    plain = copy.deepcopy(model)
    sketches = attach_sketches(model, 7, targets=["o_proj"])
    x = torch.randn(9, width, dtype=torch.float64)
    for each in (model, plain):
        each["o_proj"](x).sin().sum().backward()
    assert worst(sketches, dense_times_a(plain, sketches)) < 1e-12


def test_a_bias_has_its_gradient_if_it_wants_one_and_none_if_it_is_frozen():
    for wanted in (True, False):
        model, plain, _ = lone()
        model.q_proj.bias.requires_grad_(wanted)
        x = torch.randn(5, 6, dtype=torch.float64)
        for layer in (model, plain):
            layer(x).sin().sum().backward()
        assert torch.equal(model.q_proj.bias.grad, plain.bias.grad) if wanted else model.q_proj.bias.grad is None


def test_a_layer_used_twice_in_one_forward_adds_both_uses():
    model, plain, sketches = lone()
    x, y = torch.randn(2, 5, 6, dtype=torch.float64)
    for layer in (model, plain):
        (layer(x) * layer(2 * y)).sum().backward()
    assert worst(sketches, dense_times_a(nn.ModuleDict({"q_proj": plain}), sketches)) < 1e-12
    assert model.q_proj.contributions == 2


def test_one_layer_under_two_names_is_one_sketch_of_both_uses():
    layer = nn.Linear(6, 6, dtype=torch.float64)
    model = nn.ModuleDict({"a": nn.ModuleDict({"q_proj": layer}), "b": nn.ModuleDict({"q_proj": layer})})
    plain = copy.deepcopy(layer)
    sketches = attach_sketches(model, 3, targets=["q_proj"])
    x = torch.randn(5, 6, dtype=torch.float64)
    model["b"]["q_proj"](model["a"]["q_proj"](x).sin()).square().sum().backward()
    plain(plain(x).sin()).square().sum().backward()
    assert worst(sketches, dense_times_a(nn.ModuleDict({"a": nn.ModuleDict({"q_proj": plain})}), sketches)) < 1e-12


def test_two_backwards_through_a_retained_graph_double_the_sketch():
    model, _, sketches = lone()
    loss = model(torch.randn(5, 6, dtype=torch.float64)).sin().sum()
    loss.backward(retain_graph=True)
    once = sketches.sketches()["q_proj.weight"].clone()
    loss.backward()
    torch.testing.assert_close(sketches.sketches()["q_proj.weight"], 2 * once, rtol=1e-14, atol=0)
    assert once.abs().max() > 0.1


def test_hundreds_of_bf16_microbatches_do_not_stall_as_a_bf16_sum_would():
    model, _, sketches = lone(dtype=torch.float32)
    for _ in range(600):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(torch.ones(1, 6))
        y.float().sum().backward()
    expected = 600 * model.q_proj.projection.matrix().sum(1).expand(4, 3)
    torch.testing.assert_close(sketches.sketches()["q_proj.weight"], expected, rtol=1e-5, atol=1e-5)
    stalled = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(600):
        stalled += 1
    assert stalled == 256  # control


def reentrant(model: nn.Module, inputs_want_gradients: bool) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    if not inputs_want_gradients:  # transformers sees to it itself; a model of one's own does not
        model.disable_input_require_grads()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("trainable", [[], ["lm_head.weight"], ["model.norm.weight"]])
def test_reentrant_checkpointing_of_frozen_embeddings_is_an_error_and_not_silence(trainable):
    model = stock("llama")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    optimizer = LoGRA(attach_sketches(model, RANK))
    freeze(model)
    reentrant(model, inputs_want_gradients=False)
    for name in trainable:
        model.get_parameter(name).requires_grad_(True)
    if trainable:
        backward(model, microbatches())
        with pytest.raises(RuntimeError, match=r"no backward pass reached 14 of 14 .*is checkpointing non-reentrant"):
            optimizer.propose()
    else:
        with pytest.raises(RuntimeError, match="does not require grad"):
            backward(model, microbatches())


def test_reentrant_checkpointing_behind_an_input_that_wants_a_gradient_is_right():
    model, plain = stock("llama"), stock("llama")
    sketches = attach_sketches(model, RANK)
    freeze(model)
    reentrant(model, inputs_want_gradients=True)
    backward(model, microbatches())
    backward(plain, microbatches())
    assert worst(sketches, dense_times_a(plain, sketches)) < 1e-12
