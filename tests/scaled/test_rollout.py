"""Sampling against a forward pass without cache, batch or padding, and against transformers' own decoding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from logra_ref import attach_sketches
from scaled.errors import NumericalTrouble
from scaled.rollout.hf import choose_tokens, generate
from scaled.rollout.prompts import EndOfResponse
from tests.tiny import BOS, EOS, FAMILIES, asked, byte_tokenizer, make_tiny_model

PLAIN_TEMPLATE = "{{ messages[0]['content'] }}"


def opinionated(family: str = "llama", **changes):
    """A policy that has preferences, looks at its context and its positions, and often ends its turn."""
    model = make_tiny_model(family, **{"initializer_range": 0.4} | changes)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.generation_config.eos_token_id = [EOS, *range(25)]
    return model


@torch.no_grad()
def plain_log_probs(model, response, temperature: float) -> np.ndarray:
    """Of the response's tokens: one forward pass, alone, without cache or mask."""
    logits = model(torch.tensor([response.prompt_ids + response.token_ids]), use_cache=False).logits[0].double()
    log_p = torch.log_softmax(logits[len(response.prompt_ids) - 1 : -1] / temperature, dim=-1)
    return log_p.gather(1, torch.tensor(response.token_ids)[:, None])[:, 0].numpy()


QUESTIONS = ("7+5?", "What is 12 + 3?", "7+5?", "1", "What is 7?", "", "What is it that is so long here?")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_log_probs_are_those_of_a_plain_pass_at_the_sampling_temperature(
    family, temperature, attention, tiny_tokenizer
):
    model = opinionated(family, tied=attention == "sdpa", attn_implementation=attention)
    responses = generate(
        model, tiny_tokenizer, asked(*QUESTIONS * 3), max_new_tokens=12, temperature=temperature, seed=3
    )
    assert {response.stop_reason for response in responses} == {"stop", "length"}
    assert len({len(response.token_ids) for response in responses}) > 3
    for response in responses:
        np.testing.assert_allclose(response.log_probs, plain_log_probs(model, response, temperature), atol=1e-4)


@given(
    questions=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=7),
    batch=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_any_prompts_whatever_they_share_give_the_plain_log_probs(questions, batch, seed):
    model = opinionated()
    responses = generate(
        model,
        byte_tokenizer(PLAIN_TEMPLATE),
        asked(*questions),
        max_new_tokens=6,
        temperature=1.0,
        seed=seed,
        batch=batch,
    )
    for question, response in zip(questions, responses, strict=True):
        assert response.problem.messages[0]["content"] == question
        assert len(response.prompt_ids) == len(question)
        np.testing.assert_allclose(response.log_probs, plain_log_probs(model, response, 1.0), atol=1e-4)


def test_a_sliding_window_counts_tokens_and_not_pads(tiny_tokenizer):
    layers = ["sliding_attention", "full_attention"]
    model = opinionated("qwen2", use_sliding_window=True, sliding_window=5, layer_types=layers)
    model.generation_config.eos_token_id = EOS
    responses = generate(model, tiny_tokenizer, asked(*QUESTIONS), max_new_tokens=8, temperature=1.0, seed=1)
    model.config.sliding_window = 500
    assert any(abs(plain_log_probs(model, r, 1.0) - r.log_probs).max() > 0.01 for r in responses), "no window seen"
    model.config.sliding_window = 5
    for response in responses:
        np.testing.assert_allclose(response.log_probs, plain_log_probs(model, response, 1.0), atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_transformers_greedy_with_log_probs_at_temperature_1(family, tiny_tokenizer):
    model = opinionated(family)
    responses = generate(model, tiny_tokenizer, asked(*QUESTIONS), max_new_tokens=12, temperature=0, seed=0)
    for response in responses:
        ids = torch.tensor([response.prompt_ids])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0
        )
        assert response.token_ids == tuple(expected[0, ids.shape[1] :].tolist())
        np.testing.assert_allclose(response.log_probs, plain_log_probs(model, response, 1.0), atol=1e-4)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_sampling_follows_the_softmax_of_two_tokens_at_the_temperature(temperature, tiny_tokenizer):
    """Chi-square over pairs of tokens; a right sampler is refused for one seed in 10,000."""
    model, count = make_tiny_model(initializer_range=1.0), 6000
    model.generation_config.eos_token_id = tiny_tokenizer.eos_token_id
    responses = generate(
        model, tiny_tokenizer, asked("?") * count, max_new_tokens=2, temperature=temperature, seed=8, batch=2000
    )
    prompt = torch.tensor(responses[0].prompt_ids)
    with torch.no_grad():
        first = model(prompt[None]).logits[0, -1].double()
        second = model(torch.cat([prompt.expand(258, -1), torch.arange(258)[:, None]], 1)).logits[:, -1].double()
    found = np.zeros((258, 258))
    for response in responses:
        found[response.token_ids[0], response.token_ids[-1]] += 1  # an end of turn alone stands at its own place

    def p_value(at: float) -> float:
        joint = torch.log_softmax(first / at, -1)[:, None] + torch.log_softmax(second / at, -1)
        expected = count * joint.exp().numpy()
        expected[EOS] = 0
        expected[EOS, EOS] = count * float(torch.softmax(first / at, -1)[EOS])
        often = expected >= 5
        assert often.sum() > 10
        cells = [np.append(x[often], x[~often].sum()) for x in (found, expected)]
        return stats.chisquare(*cells).pvalue

    assert p_value(temperature) > 1e-4
    assert p_value(1.6 - temperature) < 1e-9, "the test could not tell the two temperatures apart"


def test_what_is_drawn_does_not_depend_on_the_batch_and_goes_on_when_the_limit_is_raised(tiny_tokenizer):
    model = opinionated()
    settings = {"temperature": 1.0, "seed": 5}
    whole = generate(model, tiny_tokenizer, asked(*QUESTIONS * 2), max_new_tokens=9, **settings)
    for batch in (1, 3, 4):
        parts = generate(model, tiny_tokenizer, asked(*QUESTIONS * 2), max_new_tokens=9, batch=batch, **settings)
        assert [part.token_ids for part in parts] == [response.token_ids for response in whole]
    short = generate(model, tiny_tokenizer, asked(*QUESTIONS * 2), max_new_tokens=4, **settings)
    assert [response.token_ids for response in short] == [response.token_ids[:4] for response in whole]
    other = generate(model, tiny_tokenizer, asked(*QUESTIONS * 2), max_new_tokens=9, temperature=1.0, seed=6)
    assert sum(a.token_ids == b.token_ids for a, b in zip(other, whole, strict=True)) < 4


def test_responses_to_the_same_prompt_are_drawn_independently(tiny_tokenizer):
    responses = generate(make_tiny_model(), tiny_tokenizer, asked("?") * 40, max_new_tokens=4, temperature=1.0, seed=0)
    assert len({response.token_ids for response in responses}) == 40
    assert len({response.token_ids[0] for response in responses}) > 20


def test_tokens_without_probability_are_not_drawn_at_either_end_of_the_uniform_numbers():
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 2.0, -torch.inf]]).expand(3, -1)
    tokens, _ = choose_tokens(logits, 1.0, np.array([0.0, 0.5, 1 - 2.0**-53]))
    assert set(tokens.tolist()) <= {1, 3} and tokens[0] != tokens[2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_named(temperature, tiny_tokenizer):
    model = make_tiny_model()
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    with pytest.raises(NumericalTrouble, match="not finite"):
        generate(model, tiny_tokenizer, asked("?"), max_new_tokens=2, temperature=temperature, seed=0)


def test_ends_at_any_end_of_turn_of_model_and_tokenizer_and_keeps_its_token(tiny_tokenizer):
    model = opinionated()
    model.generation_config.eos_token_id = EOS
    (free,) = generate(model, tiny_tokenizer, asked("hm"), max_new_tokens=10, temperature=0, seed=0)
    assert (free.stop_reason, len(free.token_ids)) == ("length", 10) and free.truncated
    end = free.token_ids[4]
    first = free.token_ids.index(end)
    for ids in (end, [BOS, end]):
        model.generation_config.eos_token_id = ids
        (ended,) = generate(model, tiny_tokenizer, asked("hm"), max_new_tokens=10, temperature=0, seed=0)
        assert (ended.stop_reason, ended.token_ids) == ("stop", free.token_ids[: first + 1])
        assert ended.text == tiny_tokenizer.decode(free.token_ids[:first])
        assert not ended.truncated
    # At the last token allowed it is a stop, too.
    (ended,) = generate(model, tiny_tokenizer, asked("hm"), max_new_tokens=first + 1, temperature=0, seed=0)
    assert ended.stop_reason == "stop"
    model.generation_config.eos_token_id = None
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    (ended,) = generate(model, tokenizer, asked("hm"), max_new_tokens=10, temperature=0, seed=0)
    assert ended.stop_reason == "stop" and len(ended.token_ids) == first + 1


def test_a_stop_string_is_cut_from_the_text_but_its_tokens_stay(tiny_tokenizer):
    model = opinionated()
    model.generation_config.eos_token_id = EOS
    free = generate(model, tiny_tokenizer, asked(*QUESTIONS), max_new_tokens=24, temperature=1.0, seed=2)
    lone = [i for i, response in enumerate(free) if response.text[9:11].isascii()]
    assert lone
    for i in lone:
        stop = free[i].text[9:11]
        stopped = generate(
            model, tiny_tokenizer, asked(*QUESTIONS), max_new_tokens=24, temperature=1.0, seed=2, stop=["\0\0\0", stop]
        )[i]
        until = next(t for t in range(1, 25) if stop in tiny_tokenizer.decode(free[i].token_ids[:t]))
        assert stopped.token_ids == free[i].token_ids[:until]
        assert stopped.text == free[i].text[: free[i].text.index(stop)]
        assert stopped.stop_reason == "stop"


PIECES = st.sampled_from(["a", "b", "\n", "é", "€", "ab"])


@given(text=st.lists(PIECES, min_size=1).map("".join), stop=st.lists(st.lists(PIECES, min_size=1).map("".join)))
def test_a_stop_string_is_seen_with_the_byte_that_completes_it(text, stop):
    tokenizer = byte_tokenizer()
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    ends = EndOfResponse(make_tiny_model(), tokenizer, stop)
    for t in range(1, len(tokens) + 1):
        whole = tokenizer.decode(tokens[:t])
        hit = [whole.index(string) for string in stop if string in whole]
        assert ends.reached(tokens[:t]) == bool(hit)
        assert ends.text(tokens[:t]) == whole[: min(hit)] if hit else whole
        if hit:
            break


def test_the_mode_of_the_model_comes_back_also_after_an_interrupt(tiny_tokenizer):
    model = opinionated()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    generate(model, tiny_tokenizer, asked("?"), max_new_tokens=2, temperature=1.0, seed=0)
    assert model.training

    def interrupted(count):
        assert not model.training
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, tiny_tokenizer, asked("?"), max_new_tokens=2, temperature=1.0, seed=0, advance=interrupted)
    assert model.training


def test_sketches_take_nothing_in(tiny_tokenizer):
    model = opinionated()
    plain = generate(model, tiny_tokenizer, asked(*QUESTIONS), max_new_tokens=4, temperature=1.0, seed=0)
    sketches = attach_sketches(model, 3)
    assert generate(model, tiny_tokenizer, asked(*QUESTIONS), max_new_tokens=4, temperature=1.0, seed=0) == plain
    assert all(layer.contributions == 0 for layer in sketches.layers.values())


def test_progress_is_told_of_responses_as_they_finish(tiny_tokenizer):
    told = []
    responses = generate(
        opinionated(),
        tiny_tokenizer,
        asked(*QUESTIONS * 3),
        max_new_tokens=6,
        temperature=1.0,
        seed=0,
        batch=len(QUESTIONS) * 3,
        advance=told.append,
    )
    lengths = [len(response.token_ids) for response in responses]
    assert told == [lengths.count(length) for length in sorted(set(lengths))]


def test_no_problems_give_no_responses(tiny_tokenizer):
    assert generate(make_tiny_model(), tiny_tokenizer, [], max_new_tokens=2, temperature=1.0, seed=0) == []
