"""A small policy and tasks for notebooks and tests: two numbers, answered in one token, learnt in seconds.

The policy is a pre-norm transformer with the seven linear layers of the Llama family under their usual names; every
operation keeps the dtype of the weights, so in fp64 its derivatives can be checked to 1e-9.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from logra_ref.rl import token_log_probs


class ToyBlock(nn.Module):
    """Attention and gated MLP, each with its norm before it and the residual around both."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate_proj, self.up_proj = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Float[Tensor, "b l w"]) -> Float[Tensor, "b l w"]:
        h = self.attention_norm(x)
        projected = (layer(h) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in projected)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.o_proj(mixed)
        h = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class ToyPolicy(nn.Module):
    """Tokens (b, l) to logits (b, l, v). Initialised from ``seed`` alone."""

    def __init__(
        self, vocabulary: int, *, width: int = 64, layers: int = 2, heads: int = 4, length: int = 8, seed: int = 0
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(ToyBlock(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    # Unit-variance embeddings; elsewhere 1/√inputs keeps the size of activations.
                    is_table = parameter is self.embedding.weight or parameter is self.positions.weight
                    size = 1.0 if is_table else parameter.shape[1] ** -0.5
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)

    def forward(self, tokens: Int[Tensor, "b l"]) -> Float[Tensor, "b l v"]:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class PairTask:
    """Prompts ``a b =`` with a, b < m, each answered by one token below m; reward 1 if right, else 0."""

    modulus: int = 10

    @property
    def vocabulary(self) -> int:
        return self.modulus + 1  # the last token is "="

    def prompts(self, count: int, generator: torch.Generator) -> Int[Tensor, "b 3"]:
        numbers = torch.randint(self.modulus, (count, 2), generator=generator)
        return torch.cat([numbers, torch.full((count, 1), self.modulus)], dim=1)

    def all_prompts(self) -> Int[Tensor, "b 3"]:
        number = torch.arange(self.modulus)
        pairs = torch.cartesian_prod(number, number)
        return torch.cat([pairs, torch.full((len(pairs), 1), self.modulus)], dim=1)

    def right_answers(self, prompts: Int[Tensor, "b 3"]) -> Int[Tensor, " b"]:
        raise NotImplementedError

    def rewards(self, prompts: Int[Tensor, "b 3"], answers: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
        return (answers == self.right_answers(prompts)).to(torch.get_default_dtype())


class ModularSum(PairTask):
    """(a + b) mod m: no guess is better than another, and every pair has to be learnt."""

    def right_answers(self, prompts: Int[Tensor, "b 3"]) -> Int[Tensor, " b"]:
        return (prompts[:, 0] + prompts[:, 1]) % self.modulus


class LargerNumber(PairTask):
    """max(a, b): learnt steadily, with a trap, since always to say m − 1 is right for (2m − 1)/m² of the prompts."""

    def right_answers(self, prompts: Int[Tensor, "b 3"]) -> Int[Tensor, " b"]:
        return prompts[:, :2].amax(dim=1)


@torch.no_grad()
def sample_answers(
    policy: ToyPolicy, prompts: Int[Tensor, "b l"], temperature: float, generator: torch.Generator
) -> tuple[Int[Tensor, " b"], Float[Tensor, " b"]]:
    """One answer token for each prompt, and its log-probability at the temperature."""
    logits = policy(prompts)[:, -1]
    answers = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator).squeeze(1)
    return answers, token_log_probs(logits, answers, temperature)


@torch.no_grad()
def accuracy(policy: ToyPolicy, task: PairTask) -> float:
    """The exact probability of a right answer at temperature 1, over all prompts."""
    prompts = task.all_prompts()
    probabilities = torch.softmax(policy(prompts)[:, -1], dim=-1)
    return float(probabilities.gather(1, task.right_answers(prompts)[:, None]).mean())
