"""The policy's readout in pieces, and attention in chunks, each against the whole."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from logra_ref import attach_sketches
from logra_ref.rl import token_log_probs
from scaled.attention import QUERIES, attention_in_chunks, chunked_attention
from scaled.batching import collate
from scaled.errors import UserError
from scaled.gradients import response_log_probs
from scaled.policy import Policy
from tests.scaled.test_batching import CPU, some_responses
from tests.tiny import make_tiny_model


@pytest.mark.parametrize("rows", [1, 4, 7, 1000])
def test_log_probs_and_sketches_are_those_of_all_logits_at_once_and_never_more_rows_exist(rows):
    found = []
    for most in (rows, None):
        model, responses = make_tiny_model(initializer_range=0.3), some_responses(6)
        model.requires_grad_(False)
        sketches = attach_sketches(model, 5)
        batch = collate(responses, range(len(responses)), 0, CPU)
        seen: list[int] = []
        model.get_output_embeddings().register_forward_hook(lambda m, x, y, seen=seen: seen.append(len(y)))
        if most is None:
            log_probs = token_log_probs(Policy(model, trains_head=True)(batch), batch.targets, 0.7)
        else:
            log_probs = response_log_probs(Policy(model, rows=rows), batch, 0.7)
            assert max(seen) == min(rows, len(batch.targets))
        log_probs.square().sum().backward()
        if most is not None:  # all pieces are made again in backward, unless there is one
            assert sum(seen) == len(batch.targets) * (1 if len(batch.targets) <= rows else 2)
        found.append((log_probs.detach(), sketches.sketches()))
    (pieces, sketches), (whole, expected) = found
    torch.testing.assert_close(pieces, whole, atol=1e-6, rtol=1e-6)
    for name, sketch in expected.items():
        assert sketch.norm() > 0
        torch.testing.assert_close(sketches[name], sketch, atol=1e-4, rtol=1e-4)


def some_heads(length: int, keys: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query of six heads, key and value of two, fp64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(2, heads, tokens, 8, dtype=torch.float64, generator=generator)

    return draw(6, length), draw(2, keys), draw(2, keys)


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
    """The definition: all scores at once, keys repeated."""
    key, value = key.repeat_interleave(3, 1), value.repeat_interleave(3, 1)
    distance = (key.shape[2] - query.shape[2] + torch.arange(query.shape[2]))[:, None] - torch.arange(key.shape[2])
    seen = (distance >= 0) & (distance < (window or key.shape[2]))
    scores = (query @ key.mT / 8**0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 40, QUERIES + 3])
@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("length", [1, QUERIES, 2 * QUERIES + 1])
def test_attention_in_chunks_is_attention_at_once_with_a_cache_and_a_window(length, before, window):
    heads = some_heads(length, length + before)
    found, _ = chunked_attention(None, *heads, None, scaling=8**-0.5, sliding_window=window)
    torch.testing.assert_close(found, plain(*heads, window), atol=1e-12, rtol=0)
    if before + length > 1:  # control: keys one place off are seen
        off = plain(heads[0], heads[1].roll(1, 2), heads[2], window)
        assert (found - off).abs().max() > 1e-2 or window == 1


def test_attention_in_chunks_has_the_rate_of_change_of_attention_at_once():
    heads, rates = some_heads(300, 300), some_heads(300, 300, seed=1)
    with forward_ad.dual_level():
        moving = [forward_ad.make_dual(x, rate) for x, rate in zip(heads, rates, strict=True)]
        found = forward_ad.unpack_dual(chunked_attention(None, *moving, None, scaling=8**-0.5)[0]).tangent
    step = 1e-5
    ahead, behind = ([x + s * rate for x, rate in zip(heads, rates, strict=True)] for s in (step, -step))
    central = (plain(*ahead, None) - plain(*behind, None)) / (2 * step)
    torch.testing.assert_close(found, central, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_model_attends_in_chunks_only_inside_and_gives_the_same_logits(family):
    model = make_tiny_model(family, initializer_range=0.3)
    ids = torch.randint(0, 258, (2, 2 * QUERIES), generator=torch.Generator().manual_seed(0))[:, : QUERIES + 20]
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        expected = model(ids).logits
        with attention_in_chunks(model):
            assert model.config._attn_implementation == "logra_in_chunks"
            found = model(ids).logits
        assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert not torch.equal(found, expected)


def test_attention_with_more_than_softmax_is_refused_with_the_probe_to_choose():
    with pytest.raises(UserError, match=r"softcap.*finite_difference"):
        chunked_attention(None, *some_heads(4, 4), None, scaling=1.0, softcap=30.0)
    with pytest.raises(UserError, match="masks"):
        chunked_attention(None, *some_heads(4, 4), torch.ones(4, 4), scaling=1.0)
