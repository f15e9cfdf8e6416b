"""Shapes of the paper's models, from the numbers of their architectures alone: no weights, no download."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM


@dataclass(frozen=True)
class ModelShape:
    """A decoder of the Qwen2 or Qwen3 family.

    Qwen2 has biases on q, k and v; Qwen3 has none, and a norm of ``head_width`` numbers on every layer's q and k.
    ``tied``: the output layer is the embedding. ``nominal`` is the count that the model's name rounds to.
    """

    name: str
    nominal: float
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    vocabulary: int
    tied: bool
    head_width: int = 128
    family: str = "qwen2"

    def matrices(self) -> dict[str, tuple[int, int]]:
        """(d, k) of the seven matrices that LoGRA selects in each layer: outputs, inputs."""
        queries, keys = self.heads * self.head_width, self.key_value_heads * self.head_width
        return {
            "q_proj": (queries, self.hidden),
            "k_proj": (keys, self.hidden),
            "v_proj": (keys, self.hidden),
            "o_proj": (self.hidden, queries),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }

    @property
    def rows(self) -> int:
        """Σ d over all selected matrices."""
        return self.layers * sum(d for d, _ in self.matrices().values())

    @property
    def columns(self) -> int:
        """Σ k over all selected matrices."""
        return self.layers * sum(k for _, k in self.matrices().values())

    @property
    def selected(self) -> int:
        """Σ d·k over all selected matrices: the numbers that LoGRA trains."""
        return self.layers * sum(d * k for d, k in self.matrices().values())

    @property
    def parameters(self) -> int:
        """All numbers of the model: selected, embedding, output layer unless tied, norms, biases."""
        queries, keys = self.heads * self.head_width, self.key_value_heads * self.head_width
        on_attention = queries + 2 * keys if self.family == "qwen2" else 2 * self.head_width
        norms = (2 * self.layers + 1) * self.hidden
        tables = (1 if self.tied else 2) * self.vocabulary * self.hidden
        return self.selected + self.layers * on_attention + norms + tables

    def skeleton(self) -> nn.Module:
        """The model as transformers builds it, fp32, on the meta device, where a tensor has a shape and no memory."""
        config, model = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[
            self.family
        ]
        settings = config(
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            head_dim=self.head_width,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
            dtype=torch.float32,
        )
        with torch.device("meta"):
            return model(settings)


QWEN_1_5B = ModelShape("Qwen2.5-Math-1.5B", 1.5e9, 28, 1536, 8960, 12, 2, 151_936, tied=True)
QWEN_7B = ModelShape("Qwen2.5-7B", 7e9, 28, 3584, 18_944, 28, 4, 152_064, tied=False)
# The paper's 27B model is not described; this one has its size and the paper's choice of matrices.
STAND_IN_27B = ModelShape("27B stand-in", 27e9, 77, 5120, 17_408, 40, 8, 151_936, tied=False, family="qwen3")
MODELS = {"1.5B": QWEN_1_5B, "7B": QWEN_7B, "27B": STAND_IN_27B}


GIB = 2**30
DENSE_BYTES = 16  # of a parameter: fp32 weight, gradient and two moments


def dense_memory(shape: ModelShape, ranks: int) -> dict[str, float]:
    """What dense Adam keeps for a model on each of ``ranks`` GPUs that share everything evenly, in GiB.

    Counted and not measured: no activations, no logits, no gathered layers.
    """
    part = 4 * shape.parameters / ranks / GIB
    return {"weights": part, "gradients": part, "moments": 2 * part}


def logra_memory(shape: ModelShape, rank: int, ranks: int, *, whole: bool = True) -> dict[str, float]:
    """What LoGRA keeps for a model on each GPU, in GiB; counted and not measured, as ``dense_memory``.

    Weights fp32 and shared evenly; sketches and factors U fp32, whole on every rank as in the paper or shared; second
    moments one fp32 number a row; projections as fp32 numbers (r k), whole on every rank.
    """
    held = 1 if whole else ranks
    return {
        "weights": 4 * shape.parameters / ranks / GIB,
        "sketches": 4 * shape.rows * rank / held / GIB,
        "factors": 4 * shape.rows * rank / held / GIB,
        "second moments": 4 * shape.rows / held / GIB,
        "projections": 4 * shape.columns * rank / GIB,
    }


def count(model: nn.Module) -> int:
    """The numbers in a model's parameters; a tied one counts once."""
    return sum(parameter.numel() for parameter in model.parameters())
