"""Batches against responses run one by one, whole, without padding."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from logra_ref import attach_sketches
from logra_ref.direction import Factor
from logra_ref.rl import token_log_probs
from logra_ref.update import FactoredUpdate
from scaled import gradients
from scaled.batching import collate, microbatches, probe_indices
from scaled.config_file import load_config
from scaled.policy import Policy
from scaled.records import Problem, Response
from scaled.rollout.hf import generate
from tests.tiny import FAMILIES, make_tiny_model

CPU = torch.device("cpu")


def response(prompt: list[int], tokens: list[int]) -> Response:
    return Response(
        problem=Problem(id="p", messages=({"role": "user", "content": "?"},), answer=""),
        prompt_ids=tuple(prompt),
        token_ids=tuple(tokens),
        log_probs=tuple(-0.5 - token for token in tokens),
        text="",
        stop_reason="length",
    )


def some_responses(shared: int) -> list[Response]:
    """Nine, of many lengths; all prompts begin with the same ``shared`` tokens, and one of them has only one more."""
    generator = np.random.default_rng(1)

    def tokens(count: int) -> list[int]:
        return generator.integers(256, size=count).tolist()

    beginning = tokens(shared)
    return [response(beginning + tokens(1 + 5 * i % 7), tokens(1 + 3 * i % 5)) for i in range(9)]


def test_a_batch_written_out():
    batch = collate([response([1, 2, 3], [4]), response([9], [9]), response([5], [6, 7, 8])], [2, 0], 99, CPU)
    assert batch.input_ids.tolist() == [[5, 6, 7], [1, 2, 3]]
    assert batch.predicts.tolist() == [[True, True, True], [False, False, True]]
    assert batch.targets.tolist() == [6, 7, 8, 4]
    assert batch.rollout_log_probs.tolist() == [-6.5, -7.5, -8.5, -4.5]
    assert batch.response.tolist() == [2, 2, 2, 0]
    assert batch.shared == 0
    dtypes = (batch.input_ids.dtype, batch.targets.dtype, batch.response.dtype, batch.rollout_log_probs.dtype)
    assert dtypes == (torch.int64, torch.int64, torch.int64, torch.float32)


def test_the_shared_beginning_leaves_a_token_of_the_shortest_prompt():
    prompts = {
        2: ([1, 2, 3], [1, 2, 4, 5], [1, 2, 3, 4]),
        1: ([1, 2], [1, 2, 3], [1, 2]),
        0: ([1], [1, 2]),
        3: ([1] * 4,),
    }
    for shared, some in prompts.items():
        batch = collate([response(prompt, [7]) for prompt in some], range(len(some)), 0, CPU)
        assert batch.shared == shared


@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    size=st.integers(1, 5),
    data=st.data(),
)
def test_microbatches_hold_every_chosen_token_once_in_order_of_length(lengths, size, data):
    responses = [response([0] * prompt, list(range(tokens))) for prompt, tokens in lengths]
    chosen = data.draw(st.lists(st.sampled_from(range(len(lengths))), unique=True, min_size=1))
    batches = microbatches(responses, chosen, size, 0, CPU)
    assert all(len(batch.input_ids) <= size for batch in batches)
    assert len(batches) == -(-len(chosen) // size)
    order = list(dict.fromkeys(torch.cat([batch.response for batch in batches]).tolist()))
    assert order == sorted(chosen, key=lambda i: (sum(lengths[i]), chosen.index(i)))
    for batch in batches:
        assert len(batch.targets) == int(batch.predicts.sum()) == len(batch.response)
        for i in set(batch.response.tolist()):
            assert batch.targets[batch.response == i].tolist() == list(responses[i].token_ids)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("shared", [0, 6])
def test_logits_in_a_padded_batch_are_those_of_each_response_alone(family, tied, attention, shared):
    model = make_tiny_model(family, tied, initializer_range=0.3, attn_implementation=attention)
    responses = some_responses(shared)
    batch = collate(responses, range(len(responses)), 7, CPU)
    logits = Policy(model, trains_head=True)(batch)
    assert batch.shared == shared
    assert logits.shape == (len(batch.targets), 258)
    for i, one in enumerate(responses):
        whole = model(torch.tensor([one.prompt_ids + one.token_ids]), use_cache=False).logits[0]
        expected = whole[len(one.prompt_ids) - 1 : -1]
        torch.testing.assert_close(logits[batch.response == i], expected, atol=2e-5, rtol=1e-4)
    other_pads = Policy(model, trains_head=True)(collate(responses, range(len(responses)), 200, CPU))
    assert torch.equal(logits, other_pads)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_the_ratio_of_trainer_to_rollout_is_one_at_the_sampling_temperature(temperature, tiny_tokenizer):
    model = make_tiny_model(initializer_range=0.4)
    problems = [
        Problem(id=str(i), messages=({"role": "user", "content": "x" * (i % 5)},), answer="") for i in range(20)
    ]
    responses = generate(model, tiny_tokenizer, problems, max_new_tokens=5, temperature=temperature, seed=2)
    for batch in microbatches(responses, range(20), 8, 0, CPU):
        log_probs = token_log_probs(Policy(model, trains_head=True)(batch), batch.targets, temperature)
        torch.testing.assert_close(log_probs, batch.rollout_log_probs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shared", [0, 6])
def test_sketches_are_the_same_with_checkpointing_and_in_other_microbatches(shared):
    found = []
    for checkpointing, size in ((True, 1), (True, 9), (False, 9), (False, 2)):
        model, responses = make_tiny_model(initializer_range=0.3), some_responses(shared)
        sketches = attach_sketches(model, 5)
        model.requires_grad_(False).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for batch in microbatches(responses, range(9), size, 0, CPU):
            (-token_log_probs(Policy(model, trains_head=True)(batch), batch.targets, 1.0).sum()).backward()
        found.append(sketches.sketches())
    for name, sketch in found[0].items():
        assert sketch.norm() > 0
        for other in found[1:]:
            torch.testing.assert_close(other[name], sketch, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own forward mode
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared", [0, 6])
def test_forward_mode_goes_through(family, shared):
    model, responses = make_tiny_model(family, initializer_range=0.3).double(), some_responses(shared)
    sketches = attach_sketches(model, 3)
    generator = torch.Generator().manual_seed(0)
    factors = {
        name: Factor.of(torch.randn(sketch.shape, generator=generator, dtype=torch.float64))
        for name, sketch in sketches.sketches().items()
    }
    update = FactoredUpdate(sketches.layers, factors, update=1, update_ratio=1e-2)
    batch = collate(responses, range(9), 0, CPU)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        with update.tangents(), forward_ad.dual_level():
            rates = forward_ad.unpack_dual(Policy(model, trains_head=True)(batch)).tangent
        displaced = []
        for alpha in (0.1, -0.1):
            with update.displaced(alpha):
                displaced.append(Policy(model, trains_head=True)(batch))
    central = (displaced[0] - displaced[1]) / 0.2
    # The norms of transformers compute in fp32 even here.
    torch.testing.assert_close(rates, central, atol=2e-3 * float(central.abs().max()), rtol=0)


def test_the_probe_is_drawn_until_it_has_its_positions():
    lengths = [3, 1, 4, 1, 5, 9, 2, 6]
    for seed in range(50):
        drawn = probe_indices(lengths, positions=10, responses=None, seed=seed)
        assert len(set(drawn)) == len(drawn)
        assert sum(lengths[i] for i in drawn) >= 10 > sum(lengths[i] for i in drawn[:-1])
        assert drawn == probe_indices(lengths, positions=10, responses=None, seed=seed)
    assert len(probe_indices(lengths, positions=None, responses=3, seed=0)) == 3
    assert len({tuple(probe_indices(lengths, positions=None, responses=3, seed=seed)) for seed in range(50)}) > 30


@pytest.mark.parametrize("size", [{"positions": 32, "responses": None}, {"positions": None, "responses": 9}])
def test_the_probe_takes_everything_if_there_is_less(size):
    lengths = [3, 1, 4, 1, 5, 9, 2, 6]
    assert sorted(probe_indices(lengths, seed=0, **size)) == list(range(8))
    assert probe_indices([], seed=0, **size) == []


def test_every_response_is_as_likely_in_the_probe_whatever_its_length():
    """Chi-square; a right draw is refused for one choice of seeds in 10,000."""
    lengths, count = [1, 9, 1, 9, 1, 9], 3000
    first = [probe_indices(lengths, positions=1, responses=None, seed=seed)[0] for seed in range(count)]
    assert stats.chisquare(np.bincount(first, minlength=6)).pvalue > 1e-4


@pytest.mark.parametrize("world", [1, 4])
def test_responses_per_rank_are_so_many_for_each_rank_and_not_for_all_of_them(monkeypatch, world):
    chosen = []
    monkeypatch.setattr(gradients, "own_blocks", lambda run, responses, indices: chosen.extend(indices) or [])
    config = load_config(Path("smollm2-demo"), ["control.positions=null", "control.responses_per_rank=2"])
    ranks = SimpleNamespace(world=world, total=None)
    progress = SimpleNamespace(phase=lambda *_: None)
    run = SimpleNamespace(config=config, ranks=ranks, progress=progress, policy=None, advance=None)
    responses = [SimpleNamespace(token_ids=(1, 2, 3))] * 20
    gradients.build_probe(run, responses, 1)
    assert len(set(chosen)) == 2 * world
