"""How a prompt ends, and what is refused before anything is sampled."""

from __future__ import annotations

import jinja2
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from scaled.errors import UserError
from scaled.rollout.hf import generate
from scaled.rollout.prompts import encode_prompt
from tests.tiny import BOS, asked, byte_tokenizer, make_tiny_model

PLAIN_TEMPLATE = "{{ messages[0]['content'] }}"


def test_a_prompt_without_room_is_refused_by_name_before_anything_runs(tiny_tokenizer):
    model, told = make_tiny_model(max_position_embeddings=64), []
    problems = asked("short", "x" * 20, "y" * 80)
    for count, problem, lengths in ((30, "q1", ["39", "30", "64", "25 at most"]), (25, "q2", ["99", "25", "64"])):
        with pytest.raises(UserError) as refusal:
            generate(
                model,
                tiny_tokenizer,
                problems,
                max_new_tokens=count,
                temperature=1.0,
                seed=0,
                batch=1,
                advance=told.append,
            )
        assert problem in str(refusal.value) and all(length in str(refusal.value) for length in lengths)
    assert not told
    generate(model, tiny_tokenizer, problems[:2], max_new_tokens=25, temperature=1.0, seed=0)


def test_a_model_with_a_recurrent_state_is_refused(tiny_tokenizer):
    config = Qwen3NextConfig(
        vocab_size=258,
        hidden_size=8,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=4,
        shared_expert_intermediate_size=4,
    )
    with pytest.raises(UserError, match=r"Qwen3NextForCausalLM .*LinearAttentionLayer"):
        generate(Qwen3NextForCausalLM(config), tiny_tokenizer, asked("?"), max_new_tokens=1, temperature=1.0, seed=0)


def test_the_prompt_ends_where_the_model_goes_on(tiny_tokenizer):
    (new,) = asked("7+5?")
    (begun,) = asked("7+5?", answer_begun="7 + 5 =")
    head = "<|im_start|>user\n7+5?<|im_end|>\n<|im_start|>assistant\n"
    assert tiny_tokenizer.decode(encode_prompt(tiny_tokenizer, new)) == head
    assert tiny_tokenizer.decode(encode_prompt(tiny_tokenizer, begun)) == head + "7 + 5 ="


def test_no_second_beginning_of_text_is_added():
    tokenizer = byte_tokenizer("<|im_start|>" + PLAIN_TEMPLATE)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", BOS)]
    )
    assert tokenizer("hi")["input_ids"][0] == BOS, "this tokenizer adds one of its own accord"
    assert encode_prompt(tokenizer, asked("hi")[0]).count(BOS) == 1


def test_a_template_that_strips_spaces_takes_a_begun_answer_but_not_its_last_space():
    template = "{% for m in messages %}<|im_start|>{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    tokenizer = byte_tokenizer(template)
    assert tokenizer.decode(encode_prompt(tokenizer, asked("q", answer_begun="a =")[0])).endswith("<|im_start|>a =")
    for begun in ("a = ", " a ="):
        with pytest.raises(UserError, match=r"q0.*started answer"):
            encode_prompt(tokenizer, asked("q", answer_begun=begun)[0])


def test_a_chat_that_the_template_refuses_is_named():
    tokenizer = byte_tokenizer("{{ raise_exception('roles must alternate') }}{{ messages[0]['content'] }}")
    with pytest.raises(UserError, match=r"q0.*roles must alternate") as refusal:
        encode_prompt(tokenizer, asked("q")[0])
    assert isinstance(refusal.value.__cause__, jinja2.TemplateError)
    # Qwen3's template and others drop what they take for thoughts.
    dropping = byte_tokenizer(
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    with pytest.raises(UserError, match=r"q0.*chat template"):
        encode_prompt(dropping, asked("q", answer_begun="a =")[0])
