"""C03: no full gradient buffer, inputs not kept (§2.1, §2.2), counted in numbers and bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from logra_ref import LoGRA, attach_sketches
from logra_ref.toy import ModularSum, ToyPolicy
from validation.claim import Comparison, Measurement, Setting, claim

FP32 = 4  # bytes of a number
TOKENS, INPUTS, OUTPUTS, RANK = 48, 320, 256, 8
BLOCKS, WIDTH = 3, 192


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations inside it make, for as long as these live.

    ``peak`` is the most at the end of any operation, ``left`` what a caller found to live on, ``sizes`` the numbers
    of each new tensor. Tensors in ``known`` (weights, inputs) do not count, nor do views of them.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.left = 0
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.hold(tensor)
        self.peak = max(self.peak, self.live())
        return result

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor from now on, until its storage is freed."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if storage.data_ptr() in self.known or reference.cdata in self.held or storage.nbytes() == 0:
            return
        self.held[reference.cdata] = (reference, storage.nbytes())
        self.sizes.append(tensor.numel())

    def live(self) -> int:
        """The bytes that are counted and not freed yet."""
        self.held = {key: entry for key, entry in self.held.items() if not entry[0].expired()}
        return sum(size for _, size in self.held.values())


def saved_numbers(forward: Callable[[], Tensor], weights: Iterable[Tensor]) -> int:
    """How many numbers autograd keeps for backward, beside the weights; a tensor that is kept twice counts once."""
    ignored = {weight.untyped_storage().data_ptr() for weight in weights}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in ignored:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in kept.values())


def saved_by_a_layer(setting: Setting, sketched: bool) -> int:
    """Numbers that one linear layer (d, k) keeps of an input of n tokens."""
    model = nn.Sequential(OrderedDict(up_proj=nn.Linear(INPUTS, OUTPUTS, bias=False)))
    if sketched:
        attach_sketches(model, RANK, targets=["up_proj"], seed=setting.derived_seed("A"))
    x = torch.randn(TOKENS, INPUTS, generator=setting.generator("x"), requires_grad=True)
    return saved_numbers(lambda: model(x), model.parameters())


def mlp() -> nn.Sequential:
    """Blocks of two linear layers, (2w, w) and (w, 2w), with a ReLU between: almost all memory is weights."""
    return nn.Sequential(
        *(
            nn.Sequential(
                OrderedDict(
                    up_proj=nn.Linear(WIDTH, 2 * WIDTH, bias=False),
                    act=nn.ReLU(),
                    down_proj=nn.Linear(2 * WIDTH, WIDTH, bias=False),
                )
            )
            for _ in range(BLOCKS)
        )
    )


def traced(setting: Setting, sketched: bool) -> LiveBytes:
    """One forward and backward pass of the MLP, with its memory beside weights and input."""
    model = mlp()
    x = torch.randn(TOKENS, WIDTH, generator=setting.generator("tokens"))
    known = [*model.parameters(), x]
    sketches = None
    if sketched:
        sketches = attach_sketches(model, RANK, targets=["up_proj", "down_proj"], seed=setting.derived_seed("A"))
    with LiveBytes(known) as memory:
        for sketch in sketches.sketches().values() if sketches else []:
            memory.hold(sketch)
        model(x).sum().backward()
    memory.left = memory.live()
    return memory


def bound_of_peak() -> int:
    """The most bytes that LoGRA may need beside the weights in `traced`, from shapes.

    Kept all along: sketches d·r, entries of A r·k, and x Aᵀ n·r of each layer; the ReLU's output n·2w of each block.
    For a moment: five activations n·2w at most (input, output, two derivatives, a mask), or while A is drawn four
    arrays of 8-byte words with a place for each of its bits, 64·⌈2w/64⌉ a row.
    """
    kept = 2 * BLOCKS * (3 * WIDTH * RANK + TOKENS * RANK) + BLOCKS * TOKENS * 2 * WIDTH
    moment = FP32 * 5 * TOKENS * 2 * WIDTH + 8 * 4 * RANK * (2 * WIDTH + 64)
    return FP32 * kept + moment


def weights_with_gradients(sketched: bool) -> int:
    """How many of the seven matrices of each of two Transformer blocks have a gradient after backward."""
    model = ToyPolicy(ModularSum().vocabulary, width=16)
    names = [name for name, _ in model.named_parameters() if "proj" in name]
    if sketched:
        attach_sketches(model, 4)
    model(ModularSum().all_prompts()).square().sum().backward()
    return sum(dict(model.named_parameters())[name].grad is not None for name in names)


def bytes_by_part(setting: Setting, width: int, rank: int, tokens: int) -> dict[str, dict[str, int]]:
    """What one block of the toy Transformer holds for training beside its weights, in bytes, counted on tensors."""
    parts = {}
    for method in ("dense Adam", "LoGRA"):
        policy = ToyPolicy(ModularSum().vocabulary, width=width, layers=1, length=tokens)
        block = nn.ModuleDict({"block": policy.blocks[0]})
        x = torch.randn(1, tokens, width, generator=setting.generator("block"), requires_grad=True)
        weights = [weight for name, weight in block.named_parameters() if "proj" in name]
        optimizer: torch.optim.Optimizer
        sketches = None
        if method == "LoGRA":
            sketches = attach_sketches(block, rank, seed=setting.derived_seed("A"))
            optimizer = LoGRA(sketches)
        else:
            optimizer = torch.optim.Adam(weights)
        saved = FP32 * saved_numbers(lambda block=block, x=x: block["block"](x), block.parameters())
        block["block"](x).square().sum().backward()
        gradients = [w.grad for w in weights if w.grad is not None]
        held = list(sketches.sketches().values()) if sketches else []
        drawn = [p.entries() for p in sketches.projections().values()] if sketches else []
        optimizer.step()
        moments = [v for state in optimizer.state.values() for v in state.values() if v.ndim > 0]
        parts[method] = {
            "gradients": _bytes(gradients),
            "sketches": _bytes(held),
            "projections": _bytes(drawn),
            "moments": _bytes(moments),
            "saved for backward": saved,
        }
    return parts


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@claim("C03", "no full gradient buffer, inputs not kept", "§2.1, §2.2")
def no_buffer(setting: Setting) -> Measurement:
    """Numbers kept by a layer, gradients of a Transformer, and the peak of an MLP whose weights dominate."""
    sketched, dense = traced(setting, sketched=True), traced(setting, sketched=False)
    matrix = 2 * WIDTH * WIDTH
    return Measurement(
        [
            Comparison(
                f"numbers kept for backward by a layer ({OUTPUTS}, {INPUTS}), n = {TOKENS}, r = {RANK}",
                expected=TOKENS * RANK,
                measured=saved_by_a_layer(setting, sketched=True),
                tolerance=0,
                reason="a count",
                oracle="n·r, where the weight itself does not count",
                control="nn.Linear, which keeps x, n·k",
                control_measured=saved_by_a_layer(setting, sketched=False),
            ),
            Comparison(
                "matrices of 14 whose weight.grad is not None after backward",
                expected=0,
                measured=weights_with_gradients(sketched=True),
                tolerance=0,
                reason="a count",
                oracle="no gradient is wanted",
                control="the same model without sketches",
                control_measured=weights_with_gradients(sketched=False),
            ),
            Comparison(
                "tensors of d·k numbers or more that forward and backward make",
                expected=0,
                measured=sum(size >= matrix for size in sketched.sizes),
                tolerance=0,
                reason="a count of all tensors that any operation makes",
                oracle="G is never formed",
                control="the dense gradient, a tensor for each of 6 matrices",
                control_measured=sum(size >= matrix for size in dense.sizes),
            ),
            Comparison(
                "what stays after backward beside the weights",
                expected=BLOCKS * RANK * 3 * WIDTH * (FP32 + 1 / 8),
                measured=sketched.left,
                tolerance=0,
                reason="a count",
                oracle="sketches r·d in fp32 and r·k bits of A of every matrix",
                control="the dense gradients, d·k",
                control_measured=dense.left,
                unit="B",
            ),
            Comparison(
                "peak of forward and backward beside the weights",
                expected=bound_of_peak(),
                measured=sketched.peak,
                tolerance=0,
                relation="≤",
                reason="a bound from the shapes of all that is kept and five activations",
                oracle="arithmetic on shapes",
                control="the dense gradient path",
                control_measured=dense.peak,
                unit="B",
            ),
        ],
        note=f"Peak beside the weights: {sketched.peak:,} B with sketches, {dense.peak:,} B with gradients.",
        data={
            "block": bytes_by_part(setting, width=64, rank=8, tokens=64),
            "peak": {"dense": dense.peak, "LoGRA": sketched.peak},
        },
    )
