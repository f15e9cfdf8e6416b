"""A model small enough to be made anew, for trying things out: random weights, and a tokenizer whose tokens are bytes.

Its heads are of a size that vLLM's CPU kernels have.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TINY = "tiny"
SEED = 0
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A Qwen2 of two layers in fp32, the same one each time, and its tokenizer. torch's random numbers go on as if
    none had been drawn."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=300, num_hidden_layers=2, max_position_embeddings=256, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)  # of the CPU alone, unlike torch.manual_seed
        return Qwen2ForCausalLM(config), byte_tokenizer()


def byte_tokenizer(chat_template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """A token a byte, and two more for the turns of a chat."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=chat_template,
    )
