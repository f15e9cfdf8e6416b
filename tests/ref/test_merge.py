"""The merge row by row: with integers bit for bit in any order, in small blocks, and large enough for fp32."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from logra_ref import FactoredUpdate, Projection, attach_sketches
from logra_ref import update as module
from logra_ref.direction import Factor
from logra_ref.projection import projection_seed
from logra_ref.update import merge_rows_, nominal_step

RATIO = 6e-5
KINDS = ("rademacher", "gaussian", "orthonormal", "hadamard")


def draws(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


@given(st.integers(1, 12), st.sampled_from(KINDS), st.booleans())
def test_blocks_of_rows_of_any_size_merge_as_one(block, kind, integers):
    projection = Projection(kind, 4, 9, 7)
    weight = draws(11, 9)
    levels = draws(11, 4, seed=1).mul(40).round() if integers else draws(11, 4, seed=1)
    whole, in_blocks, before = weight.clone(), weight.clone(), module.MERGE_ROWS
    merge_rows_(whole, levels, draws(11, seed=2), projection)
    try:
        module.MERGE_ROWS = block
        merge_rows_(in_blocks, levels, draws(11, seed=2), projection)
    finally:
        module.MERGE_ROWS = before
    expected = weight.numpy() - draws(11, seed=2).numpy()[:, None] * (
        levels.numpy() @ projection.entries(dtype=torch.float64).numpy()
    )
    np.testing.assert_allclose(in_blocks, expected, rtol=1e-13, atol=1e-13)
    assert not (integers and projection.has_signs) or torch.equal(whole, in_blocks)


def integer_case(rank: int = 64, rows: int = 40, width: int = 96) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = draws(rows, width, dtype=torch.float32) * 0.02
    levels = torch.from_numpy(np.random.default_rng(1).integers(-127, 128, (rows, rank))).float()
    return weight, levels, draws(rows, seed=2, dtype=torch.float32).abs() * 1e-4


@pytest.mark.parametrize("kind", ["rademacher", "hadamard"])
def test_integer_levels_merge_to_the_bits_of_one_product_and_one_difference(kind):
    """N by int64, then c N and W − c N each rounded to fp32, by numpy; a fused step is not this."""
    weight, levels, coefficient = integer_case()
    projection = Projection(kind, 64, 96, projection_seed(0, 1, "w"))
    whole = levels.numpy().astype(np.int64) @ projection.entries().numpy().astype(np.int64)
    step = coefficient.numpy()[:, None] * whole.astype(np.float32)
    expected = weight.numpy() - step
    fused = (weight.double().numpy() - coefficient.double().numpy()[:, None] * whole).astype(np.float32)
    merged = weight.clone()
    merge_rows_(merged, levels, coefficient, projection)
    np.testing.assert_array_equal(merged.numpy(), expected)
    assert (merged.numpy() != fused).any()  # control
    for dtype in (torch.int8, torch.int32):
        again = weight.clone()
        merge_rows_(again, levels.to(dtype), coefficient, projection)
        assert torch.equal(again, merged)


@given(st.lists(st.integers(0, 40), max_size=3), st.lists(st.integers(0, 96), max_size=3), st.randoms())
def test_integer_levels_merge_to_the_same_bits_under_any_split_of_rows_and_any_order_of_rank_and_columns(
    row_cuts, column_cuts, random
):
    weight, levels, coefficient = integer_case()
    projection = Projection("rademacher", 64, 96, projection_seed(0, 1, "w"))
    whole = weight.clone()
    merge_rows_(whole, levels, coefficient, projection)
    edges = sorted({0, 40, *row_cuts})
    by_rows = weight.clone()
    for start, stop in itertools.pairwise(edges):
        merge_rows_(by_rows[start:stop], levels[start:stop], coefficient[start:stop], projection)
    assert torch.equal(by_rows, whole)
    edges = sorted({0, 96, *column_cuts})
    blocks = list(itertools.pairwise(edges))
    random.shuffle(blocks)
    order = list(range(64))
    random.shuffle(order)
    by_columns = weight.clone()
    for start, stop in blocks:
        entries = projection.entries(columns=slice(start, stop))
        by_columns[:, start:stop] -= coefficient[:, None] * (levels[:, order] @ entries[order])
    assert torch.equal(by_columns, whole)


def test_levels_that_are_no_integers_do_depend_on_the_order():
    """The control of the two tests above."""
    _, levels, _ = integer_case()
    e = Projection("rademacher", 64, 96, 0).entries()
    assert not torch.equal((levels / 3) @ e, (levels / 3).flip(1) @ e.flip(0))


def test_fp32_weights_really_move_by_6e_5_of_their_norm_and_bf16_ones_would_not():
    weight = draws(256, 256, dtype=torch.float32) * 0.02
    projection = Projection("rademacher", 32, 256, 3)
    levels = draws(256, 32, seed=1, dtype=torch.float32)
    lifted = levels.double() @ projection.entries(dtype=torch.float64)
    eta = nominal_step(float(lifted.norm()), float(weight.double().norm()), RATIO)
    for dtype, few, many in ((torch.float32, 0.97, 1.0), (torch.bfloat16, 0.0, 0.1)):
        stored = weight.to(dtype)
        moved = stored.clone()
        merge_rows_(moved, levels, torch.full((256,), eta), projection)
        assert few <= (moved != stored).double().mean() <= many
        if dtype == torch.float32:
            step = moved.double() - stored.double()
            assert float((step + eta * lifted).norm() / step.norm()) < 2e-3
            assert float(step.norm() / stored.double().norm()) == pytest.approx(RATIO, rel=1e-3)


class LargestResult(TorchDispatchMode):
    """The largest number of elements of any tensor an operation made, views of the weights left out."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.own, self.largest = {weight.untyped_storage().data_ptr() for weight in weights}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.own:
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("kind", ["rademacher", "gaussian", "hadamard"])
def test_neither_proposal_nor_merge_makes_a_tensor_of_the_size_of_a_weight(kind, monkeypatch):
    monkeypatch.setattr(module, "MERGE_ROWS", 8)
    layers = nn.ModuleDict({"up_proj": nn.Linear(96, 211)})
    sketches = attach_sketches(layers, 2, targets=["up_proj"], kind=kind)
    factors = {name: Factor.of(torch.randn_like(sketch)) for name, sketch in sketches.sketches().items()}
    with LargestResult([layers.up_proj.weight]) as seen:
        update = FactoredUpdate(sketches.layers, factors, update=1, update_ratio=RATIO)
        update.apply_(1.0)
    assert seen.largest <= 256 * 8 < 211 * 96 / 9  # rows of a block, and the signs of every octet
    with LargestResult([layers.up_proj.weight]) as seen:
        _ = layers.up_proj.weight * 2
    assert seen.largest == 96 * 211  # control
