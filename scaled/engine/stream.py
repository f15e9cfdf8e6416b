"""Tensors sent through vLLM's own loader, with something else done where it would copy.

The loader knows how a checkpoint's weight lies in the model: which fused layer takes it and which slice of it this
worker has. So whatever is to be done to a weight, add to it or look at it, is done there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Act = Callable[[Tensor, Tensor], None]


class _InPlaceOfCopy(TorchFunctionMode):
    def __init__(self, act: Act) -> None:
        super().__init__()
        self.act = act

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            self.act(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def stream(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], act: Act) -> None:
    """``act(place, part)`` for every place of the model's weights and the part of a tensor that belongs there.

    ``tensors`` have a checkpoint's names and shapes, of any dtype.
    """
    for tensor in tensors:  # one by one, so that nothing in making them is taken for the loader's copy
        with _InPlaceOfCopy(act):
            model.load_weights([tensor])
