"""Counts the bytes of tensors that live, by what they are for, while a program runs on tensors without numbers."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default
GATHERED, GRADIENTS = "gathered layers", "gradients"
OF_FSDP = {  # what FSDP allocates, by the function that does
    "unshard": GATHERED,
    "wait_for_unshard": GATHERED,
    "post_backward": GRADIENTS,
    "finalize_backward": GRADIENTS,
}
Label = Callable[[Tensor, str], str]
Place = tuple[str, str]


class LiveBytes(TorchDispatchMode):
    """The most bytes that lived in each phase, and whose they were.

    Inside ``FakeTensorMode`` every operation gives a tensor with a shape and no memory. Each new storage counts from
    then until it is freed or resized (FSDP empties the weights it gathered by resizing them), under the item that
    ``label(tensor, phase)`` says. What only numbers could tell is decided here: a boolean mask of sequences has
    ``answered`` True entries a row, one of positions is all True; a number that is asked for is 1 (0 if an integer,
    True if a truth), and tensors are equal.

    ``peaks`` has the items at the highest moment of each place, a phase and the part of it that ``part`` names.
    """

    def __init__(self, label: Label, answered: int) -> None:
        super().__init__()
        self.label, self.answered = label, answered
        self.phase, self.part = "start", ""
        self.inside: str | None = None
        self.live: Counter[str] = Counter()
        self.total = 0
        self.peaks: dict[Place, dict[str, int]] = {}
        self.highest: dict[Place, int] = {}
        self._held: dict[int, tuple[weakref.ref, str, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            kind = args[0].dtype
            return True if kind == torch.bool else 1.0 if kind.is_floating_point else 0
        if func is aten.equal.default:
            return True
        if func is WAIT or self._sums_in_place(func, args):  # in place, but for tensors without numbers
            return args[0]
        if func is aten.index.Tensor and any(_is_mask(index) for index in args[1]):
            source, mask = args[0], args[1][0]
            count = len(mask) * (self.answered if mask.ndim > 1 else 1)
            result = source.new_empty(count, *source.shape[mask.ndim :])
        else:
            result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.hold(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
        self.note()
        return result

    def _sums_in_place(self, func: Any, args: Any) -> bool:
        """Whether autograd would add to the gradient that it has: to tensors of a kind unknown to it, it does not."""
        if func is aten.scatter_add.default:  # of `gather`
            return self.phase == "backward"
        if func is not aten.add.Tensor or self.phase != "backward" or torch.is_grad_enabled():
            return False
        return isinstance(args[1], Tensor) and args[0].shape == args[1].shape and args[0].dtype == args[1].dtype

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor's storage from now on."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._held or tensor.device.type == "meta":
            return
        item = self.inside or self.label(tensor, self.phase)
        self._held[key] = (weakref.ref(storage, lambda _, key=key: self._drop(key)), item, size)
        self._add(item, size)

    def add(self, item: str, size: int) -> None:
        """Count bytes that no traced tensor stands for."""
        self._add(item, size)
        self.note()

    def note(self) -> None:
        """Remember this moment if no higher one was in this place."""
        place = (self.phase, self.part)
        if self.total > self.highest.get(place, -1):
            self.highest[place] = self.total
            self.peaks[place] = dict(self.live)

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Inside, memory is that of this phase."""
        before, self.phase, self.part = (self.phase, self.part), phase, ""
        self.note()
        try:
            yield
        finally:
            self.phase, self.part = before

    @contextmanager
    def items_as(self, item: str) -> Iterator[None]:
        """Inside, whatever is allocated is this item."""
        before, self.inside = self.inside, item
        try:
            yield
        finally:
            self.inside = before

    def __enter__(self) -> LiveBytes:
        self._before = {name: getattr(FSDPParamGroup, name) for name in OF_FSDP}
        self._resize = torch.UntypedStorage.resize_
        for name, item in OF_FSDP.items():
            setattr(FSDPParamGroup, name, _labelled(self, self._before[name], item))
        torch.UntypedStorage.resize_ = _followed(self, self._resize)  # it is no operation that a mode would see
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for name, function in self._before.items():
            setattr(FSDPParamGroup, name, function)
        torch.UntypedStorage.resize_ = self._resize

    def _add(self, item: str, size: int) -> None:
        self.live[item] += size
        self.total += size

    def _drop(self, key: int) -> None:
        _, item, size = self._held.pop(key)
        self._add(item, -size)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._held:
            reference, item, size = self._held[storage._cdata]
            self._held[storage._cdata] = (reference, item, storage.nbytes())
            self._add(item, storage.nbytes() - size)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def _labelled(live: LiveBytes, function: Callable[..., Any], item: str) -> Callable[..., Any]:
    def labelled(*args: Any, **kwargs: Any) -> Any:
        with live.items_as(item):
            return function(*args, **kwargs)

    return labelled


def _followed(live: LiveBytes, resize: Callable[..., Any]) -> Callable[..., Any]:
    def followed(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        live._resized(storage)

    return followed
