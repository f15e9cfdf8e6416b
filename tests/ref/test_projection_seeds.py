"""Seeds from blake2b and canonical names: another update, name or base seed is another, uncorrelated projection."""

import hashlib
import itertools
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from logra_ref import attach_sketches
from logra_ref.projection import Projection, canonical_name, projection_seed

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40), st.text(max_size=20))
def test_seed_is_blake2b_of_the_domain_base_seed_update_and_canonical_name(base_seed, update, name):
    text = f"logra/projection/v1|{base_seed}|{update}|{canonical_name(name)}".encode()
    assert (
        projection_seed(base_seed, update, name)
        == struct.unpack("<q", hashlib.blake2b(text, digest_size=8).digest())[0]
    )


def agreement(a: torch.Tensor, b: torch.Tensor) -> float:
    """The correlation of two arrays of mean 0, in its standard errors if they are independent."""
    a, b = a.double().flatten(), b.double().flatten()
    return float((a * b).mean() / (a.square().mean() * b.square().mean()).sqrt()) * math.sqrt(a.numel())


LIMIT = 5.7  # standard errors: 1.2e-8 for one pair, below 1e-4 for all pairs of a test here


def test_every_update_name_and_base_seed_has_a_projection_uncorrelated_with_all_others():
    keys = list(itertools.product((0, 1, -1, 2**32), (1, 2, 3), (Q_PROJ, Q_PROJ.replace("0", "1"), "q_proj.weight")))
    seeds = [projection_seed(*key) for key in keys]
    drawn = [Projection("rademacher", 16, 256, seed).entries() for seed in seeds]
    drawn += [Projection("rademacher", 16, 256, seed).entries() for seed in (0, 1, 2)]  # seeds that are neighbours
    worst = max(abs(agreement(a, b)) for a, b in itertools.combinations(drawn, 2))
    assert worst < LIMIT
    rows = [row for x in drawn[:4] for row in x]
    assert max(abs(agreement(a, b)) for a, b in itertools.combinations(rows, 2)) < LIMIT
    # control: one shared row in 16 is seen
    shared = torch.cat([drawn[0][:1].repeat(4, 1), drawn[1][4:]])
    assert abs(agreement(torch.cat([drawn[0][:1].repeat(4, 1), drawn[2][4:]]), shared)) > LIMIT


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_data_from_torchs_own_generator_of_the_same_seed_is_uncorrelated_with_the_projection(kind):
    shape = (32, 512)
    for seed in range(6):
        for own in (seed, projection_seed(seed, 1, Q_PROJ)):
            drawn = Projection(kind, *shape, own).entries()
            data = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            torch.manual_seed(seed)
            coins = torch.randint(2, shape) * 2 - 1
            for other in (data, coins, torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))):
                assert abs(agreement(drawn, other)) < LIMIT
        naive = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).sign()
        assert abs(agreement(naive, data)) > 50  # control: a projection drawn from torch's generator would be seen


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        (Q_PROJ, Q_PROJ),
        (f"module.{Q_PROJ}", Q_PROJ),
        (f"_orig_mod.module.{Q_PROJ}", Q_PROJ),
        (f"module._fsdp_wrapped_module._orig_mod.{Q_PROJ}", Q_PROJ),
        ("model.layers.0._checkpoint_wrapped_module.self_attn._fsdp_wrapped_module.q_proj._orig_mod.weight", Q_PROJ),
        ("model.module.weight", "model.module.weight"),  # not leading: the model's own name
        ("my_module.weight", "my_module.weight"),
        ("modules.weight", "modules.weight"),
        ("x_orig_mod.weight", "x_orig_mod.weight"),
        ("", ""),
    ],
)
def test_wrappers_anywhere_leave_the_name_and_the_projection_as_they_are(wrapped, plain):
    assert canonical_name(wrapped) == plain
    assert projection_seed(4, 2, wrapped) == projection_seed(4, 2, plain)


def test_a_model_in_torchs_real_wrappers_has_the_projections_of_the_bare_one():
    def model() -> nn.Sequential:
        block = nn.Sequential()
        block.add_module("q_proj", nn.Linear(6, 4))
        return nn.Sequential(block, nn.Linear(4, 2))

    def wrapped_block() -> nn.Sequential:
        bare = model()
        bare[0] = checkpoint_wrapper(bare[0])
        return bare

    expected = attach_sketches(model(), 2, targets=["q_proj"]).projections()["0.q_proj.weight"]
    for wrapped in (wrapped_block(), nn.DataParallel(model()), nn.DataParallel(wrapped_block())):
        sketches = attach_sketches(wrapped, 2, targets=["q_proj"])
        assert list(sketches.layers) == ["0.q_proj.weight"]
        assert sketches.projections()["0.q_proj.weight"].seed == expected.seed
