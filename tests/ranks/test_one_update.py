"""An update over ranks beside the explicit dense computation: G by autograd, G Aᵀ, RowAdam in numpy, W − α η U A."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from transformers.models.qwen2 import modeling_qwen2

from logra_ref.projection import Projection, projection_seed
from logra_ref.sketch import select_layers
from scaled.seeds import derive_seed
from tests.ranks.launch import torchrun
from tests.ranks.one_update import (
    CASES,
    RANK,
    RATIO,
    TEMPERATURE,
    NormInItsOwnType,
    configuration,
    small_model,
    some_responses,
)

BETA2, EPSILON = 0.95, 1e-8


def log_probs_of(model, response) -> torch.Tensor:
    """One response alone, all logits at once."""
    ids = torch.tensor([response.prompt_ids + response.token_ids])
    logits = model(ids, use_cache=False).logits[0, len(response.prompt_ids) - 1 : -1]
    return torch.log_softmax(logits / TEMPERATURE, -1)


@cache
def expected(tied: bool) -> dict:
    """In fp64, without sketches, microbatches or ranks."""
    kept = modeling_qwen2.Qwen2RMSNorm.forward
    modeling_qwen2.Qwen2RMSNorm.forward = NormInItsOwnType.forward
    try:
        model, config = small_model(torch.float64, tied), configuration(False)
        responses, advantages = some_responses()
        tokens = sum(len(response.token_ids) for response in responses)
        loss = 0
        for response, advantage in zip(responses, advantages, strict=True):
            taken = log_probs_of(model, response).gather(1, torch.tensor(response.token_ids)[:, None])[:, 0]
            weight = (taken.detach() + 5).clamp(-20, 20).exp().clamp(max=1.5)
            loss = loss - (weight * advantage * taken).sum() / tokens
        loss.backward()
        layers = select_layers(model)
        update, projections, squares, held = {}, {}, 0.0, 0.0
        for name, layer in layers.items():
            seed = projection_seed(derive_seed(config.seed, "projection"), 1, name)
            a = Projection("rademacher", RANK, layer.in_features, seed).matrix(dtype=torch.float64).numpy()
            sketch = layer.weight.grad.numpy() @ a.T
            root = np.sqrt((1 - BETA2) * (sketch**2).mean(1) / (1 - BETA2))
            scaled = sketch / (root + EPSILON * root.mean())[:, None]
            direction = scaled * np.linalg.norm(sketch) / np.linalg.norm(scaled)
            update[name], projections[name] = direction @ a, sketch
            squares += (update[name] ** 2).sum()
            held += float(layer.weight.detach().square().sum())
        eta = RATIO * math.sqrt(held / squares)
        update = {name: -eta * d for name, d in update.items()}
        before = {name: layer.weight.detach().clone() for name, layer in layers.items()}

        def logits_at(step: float) -> torch.Tensor:
            with torch.no_grad():
                for name, layer in layers.items():
                    layer.weight.copy_(before[name] + step * torch.from_numpy(update[name]))
                return torch.cat([log_probs_of(model, response) for response in responses]) * TEMPERATURE

        h = 1e-4
        rates = (logits_at(h) - logits_at(-h)) / (2 * h)
        p = torch.softmax(logits_at(0) / TEMPERATURE, -1)
        variance = (p * rates**2).sum(-1) - (p * rates).sum(-1) ** 2
        return {
            "q": float(variance.mean() / (2 * TEMPERATURE**2)),
            "update": update,
            "before": before,
            "sketch_norm": math.sqrt(sum((s**2).sum() for s in projections.values())),
            "sums": sum(s.sum() for s in projections.values()),
        }
    finally:
        modeling_qwen2.Qwen2RMSNorm.forward = kept


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_an_update_over_ranks_is_the_dense_computation(ranks, tmp_path):
    """Matrices of 25 and of 4 rows leave the last of three or four ranks fewer, or none."""
    torchrun(ranks, "tests.ranks.one_update", tmp_path / "found")
    found, gatherings = torch.load(tmp_path / "found")
    assert len(found) == len(CASES)
    for (dtype, _, tied), made in found.items():
        compare(made, expected(tied), dtype == "torch.float64", ranks)
    if gatherings:  # the output layer is not gathered again for each piece of the positions
        assert gatherings[3] == gatherings[1000] > 0


def compare(found: dict, wanted: dict, exact: bool, ranks: int) -> None:
    close = 1e-10 if exact else 1e-5
    for name, before in wanted["before"].items():
        after = before + found["alpha"] * torch.from_numpy(wanted["update"][name])
        torch.testing.assert_close(found["weights"][name].double(), after, atol=close, rtol=0)
    # What is compared is far larger than the tolerance.
    assert found["alpha"] * max(np.abs(d).max() for d in wanted["update"].values()) > 10 * close
    assert found["q"] == pytest.approx(wanted["q"], rel=1e-6 if exact else 1e-3)
    assert found["alpha"] == pytest.approx(min(3.0, math.sqrt(1e-3 / wanted["q"])), rel=1e-6 if exact else 1e-3)
    assert found["sketch_norm"] == pytest.approx(wanted["sketch_norm"], rel=1e-10 if exact else 1e-5)
    # The lost-update trap: every rank's next forward pass is with the new weights.
    assert all(found["moved"])
    # Each holds its rows: ⌈d/ranks⌉, and fewer or none at the end.
    rows = [len(weight) for weight in wanted["before"].values()]
    for number, held in enumerate(found["held"]):
        share = [min(max(d - number * math.ceil(d / ranks), 0), math.ceil(d / ranks)) for d in rows]
        assert held == RANK * sum(share)
    assert sum(found["held"]) == RANK * sum(rows)
