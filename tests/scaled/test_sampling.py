"""Top-p against transformers' own, limits of length, and what ends a response of a base model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TopPLogitsWarper

from scaled.config import RunConfig
from scaled.config_file import load_config
from scaled.errors import UserError
from scaled.rollout.hf import choose_tokens, generate, nucleus
from scaled.rollout.prompts import EndOfResponse, encode_prompts, end_of_turn, room_after
from tests.tiny import EOS, asked, byte_tokenizer, make_tiny_model

UNIFORM = np.linspace(0, 1, 401)[:-1]


@given(
    seed=st.integers(0, 2**32 - 1),
    top_p=st.floats(0.01, 0.99),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
)
def test_the_tokens_left_by_top_p_are_those_of_transformers_at_the_temperature(seed, top_p, temperature):
    logits = 3 * torch.randn(4, 40, generator=torch.Generator().manual_seed(seed))
    expected = TopPLogitsWarper(top_p)(None, logits / temperature).isfinite()
    found = nucleus(logits, temperature, top_p).isfinite()
    mass = (logits / temperature).softmax(-1).sort(-1, descending=True).values.cumsum(-1)
    close = (mass - top_p).abs().amin(-1) < 1e-5  # where rounding decides
    assert torch.equal(found[~close], expected[~close])
    assert found.any(-1).all()


def test_top_p_draws_and_log_probabilities_are_those_of_what_is_left():
    p = torch.tensor([0.05, 0.5, 0.15, 0.3])
    tokens, log_probs = choose_tokens(p.log().expand(400, 4), 1.0, UNIFORM, 0.75)
    share = tokens.bincount(minlength=4) / 400
    torch.testing.assert_close(share, torch.tensor([0, 0.625, 0, 0.375]), atol=0.003, rtol=0)
    torch.testing.assert_close(log_probs.exp(), torch.where(tokens == 1, 0.625, 0.375), atol=1e-6, rtol=0)


def test_top_p_of_1_changes_no_bit_and_of_almost_0_is_greedy():
    logits = torch.randn(400, 50, generator=torch.Generator().manual_seed(1))
    plain = choose_tokens(logits, 0.7, UNIFORM)
    for one, other in zip(plain, choose_tokens(logits, 0.7, UNIFORM, 1.0), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(choose_tokens(logits, 0.7, UNIFORM, 1e-9)[0], logits.argmax(-1))


def test_training_has_no_top_p_as_it_would_break_the_ratio(recipe):
    with pytest.raises(UserError, match=r"rollout\.top_p.*no such key"):
        load_config(recipe, ["rollout.top_p=0.9"])
    for wrong in ("0", "1.01", ".nan"):
        with pytest.raises(UserError, match=r"evaluation\.top_p"):
            load_config(recipe, [f"evaluation.top_p={wrong}"])


def test_prompt_and_response_have_the_context_between_them(tiny_tokenizer):
    model = make_tiny_model(max_position_embeddings=64)
    problems = asked("?", "x" * 9, "y" * 19)
    sampling = {"temperature": 1.0, "seed": 3}
    by_context = generate(model, tiny_tokenizer, problems, max_new_tokens=None, context=60, **sampling)
    assert {len(r.prompt_ids) + len(r.token_ids) for r in by_context if r.truncated} == {60}
    for problem, response in zip(problems, by_context, strict=True):
        room = 60 - len(response.prompt_ids)
        (alone,) = generate(
            model, tiny_tokenizer, [problem], max_new_tokens=room, numbers=[problems.index(problem)], **sampling
        )
        assert alone.token_ids == response.token_ids
    both = generate(model, tiny_tokenizer, problems, max_new_tokens=25, context=60, **sampling)
    assert [len(r.token_ids) for r in both if r.truncated] == [
        min(25, 60 - len(r.prompt_ids)) for r in both if r.truncated
    ]
    assert room_after((1, 2, 3), 4, None) == 4


def test_every_prompt_that_is_too_long_is_named_with_its_tokens_and_the_limit(tiny_tokenizer):
    model = make_tiny_model(max_position_embeddings=64)
    with pytest.raises(UserError) as refusal:
        encode_prompts(model, tiny_tokenizer, asked("?", "x" * 41, "y" * 42, "z"), None, 60)
    assert str(refusal.value).splitlines() == [
        "problem q1: its prompt of 60 tokens leaves no room in rollout.context = 60; leave it out, or raise that",
        "  problem q2: its prompt of 61 tokens leaves no room in rollout.context = 60; leave it out, or raise that",
    ]
    with pytest.raises(UserError, match="… and 20 more"):
        encode_prompts(model, tiny_tokenizer, asked(*["x" * 60] * 30), None, 60)
    for longest, said in ((None, "the model's context of 64"), (50, "engine.max_model_len of 50")):
        with pytest.raises(UserError, match=f"rollout.context = 100 is more than {said}"):
            encode_prompts(model, tiny_tokenizer, asked("?"), None, 100, longest)


def test_without_a_limit_there_is_one_and_with_a_context_none_but_that(recipe):
    def limits(**rollout):
        base = load_config(recipe).model_dump(exclude={"rollout"})
        found = RunConfig.model_validate(base | {"rollout": rollout}).rollout
        return found.max_new_tokens, found.context, found.limit

    assert limits() == (1024, None, "at most 1024 tokens")
    assert limits(context=4096) == (None, 4096, "at most 4096 with the prompt")
    assert limits(context=4096, max_new_tokens=9) == (9, 4096, "at most 9 tokens and at most 4096 with the prompt")
    engines = load_config(recipe, ["rollout.context=300", "rollout.backend=vllm"])
    assert engines.longest == 300


def test_a_base_model_stops_where_the_chat_template_ends_an_answer():
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "<|im_start|>"  # as Qwen2.5-Math: the end of text, not that of a turn
    model = make_tiny_model()
    model.generation_config.eos_token_id = None
    assert end_of_turn(tokenizer) == EOS
    assert EndOfResponse(model, tokenizer, ()).reached([65, EOS])
    for template in ("{{ messages[0]['content'] }}", "{{ raise_exception('no') }}"):
        assert end_of_turn(byte_tokenizer(template)) is None
