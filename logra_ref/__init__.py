"""LoGRA: reinforcement learning of language models with low-rank gradient sketches, as a text to read.

The data's path, one idea a file:

    projection → sketch → direction → update → predicted_kl → step_size        rl        sync

``optimizer`` joins them into a ``torch.optim.Optimizer``; ``toy`` has small policies and tasks to try it on.

Legend for shapes: d outputs, k inputs, r rank, n tokens, v vocabulary, b sequences, l length, p probe positions.
"""

from logra_ref.optimizer import LoGRA
from logra_ref.projection import Projection
from logra_ref.sketch import SketchedLinear, SketchSet, attach_sketches
from logra_ref.update import FactoredUpdate

__all__ = ["FactoredUpdate", "LoGRA", "Projection", "SketchSet", "SketchedLinear", "attach_sketches"]
