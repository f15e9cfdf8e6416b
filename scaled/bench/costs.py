"""What alternatives cost: their seconds, measured in turn, beside the operations and bytes that torch counts for them.

Operations are those of matrix products and attention, a multiplication and an addition being two; attention counts as
if every query saw every key. Bytes are what each of torch's operations reads and writes, as if nothing stayed in a
cache from one to the next. The ratio of either to that of another alternative is what the ratio of seconds would be if
time went by it alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from scaled.bench.smoke_run import clock

aten = torch.ops.aten
ALLOCATES = {aten.empty, aten.new_empty, aten.empty_like, aten.empty_strided, aten.new_empty_strided}
OVERWRITES = {aten.copy_, aten.zero_, aten.fill_}
LOOKS_UP = {aten.embedding, aten.index, aten.index_select, aten.gather}  # reads of its first operand what it writes


def _attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[2] * (width + value[3])


def _attention_backward(_: Any, query: Sequence[int], key: Sequence[int], value: Sequence[int], *__: Any, **___: Any):
    # Scores again, their gradient and that of the values, then those of queries and keys.
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[2] * (3 * width + 2 * value[3])


# torch counts the fused attentions of GPUs alone.
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


class Traffic(TorchDispatchMode):
    """Counts ``bytes``: what every operation inside reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        self.bytes += _moved(function, _tensors((args, kwargs)), _tensors(found))
        return found


def _moved(function: Any, given: list[Tensor], made: list[Tensor]) -> int:
    kind = function.overloadpacket
    held = {tensor.untyped_storage().data_ptr() for tensor in given}
    is_view = not function._schema.is_mutable and all(x.untyped_storage().data_ptr() in held for x in made)
    if kind in ALLOCATES or is_view:
        return 0
    written = sum(map(_size, made))
    if kind in LOOKS_UP:
        return 2 * written + sum(map(_size, given[1:]))
    return written + sum(map(_size, given[1:] if kind in OVERWRITES else given))


def _tensors(tree: Any) -> list[Tensor]:
    # Forward mode has zeros that take no memory.
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and not leaf._is_zerotensor()]


def _size(tensor: Tensor) -> int:
    """Bytes, of an expanded tensor those that there are."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def operations_counter() -> FlopCounterMode:
    """A context that counts; then ``get_total_flops``."""
    return FlopCounterMode(display=False, custom_mapping=ATTENTION)


def measured(
    works: Mapping[str, Callable[[], Any]],
    repeats: int,
    device: torch.device,
    before: Callable[[], Any] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Of each: ``operations`` and ``bytes``, counted once, and ``seconds`` of every repeat.

    One after the other is run once in each repeat, and so meets what the others meet of a busy machine. ``before`` is
    done ahead of each, untimed.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, work in works.items():
        before()
        with operations_counter() as operations, Traffic() as traffic:
            work()
        found[name] = {"operations": operations.get_total_flops(), "bytes": traffic.bytes, "seconds": []}
    for _ in range(repeats):
        for name, work in works.items():
            before()
            started = clock(device)
            work()
            found[name]["seconds"].append(clock(device) - started)
    return found


def together(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The cost of doing all of them."""
    parts = list(parts)
    seconds = [sum(each) for each in zip(*(part["seconds"] for part in parts), strict=True)]
    return {key: sum(part[key] for part in parts) for key in ("operations", "bytes")} | {"seconds": seconds}


def beside(found: Mapping[str, Mapping[str, Any]], base: str) -> dict[str, dict[str, Any]]:
    """Medians and spreads, ratios to the one called ``base`` taken in each repeat, and the bounds of the ratios."""
    other = found[base]
    rows = {}
    for name, own in found.items():
        ratios = [mine / its for mine, its in zip(own["seconds"], other["seconds"], strict=True)]
        rows[name] = {
            "seconds": statistics.median(own["seconds"]),
            "spread_of_seconds": [min(own["seconds"]), max(own["seconds"])],
            "ratio": statistics.median(ratios),
            "spread_of_ratio": [min(ratios), max(ratios)],
            "operations": own["operations"],
            "bytes": own["bytes"],
            "bound_by_operations": own["operations"] / other["operations"] if other["operations"] else None,
            "bound_by_bytes": own["bytes"] / other["bytes"] if other["bytes"] else None,
        }
    return rows


def show(rows: Mapping[str, Mapping[str, Any]], base: str, title: str, console: Console) -> None:
    """Print what ``beside`` gives."""
    table = Table("", "ms", f"/ {base}", "M operations", f"/ {base}", "MB moved", f"/ {base}", title=title)
    for name, row in rows.items():
        low, high = (1e3 * seconds for seconds in row["spread_of_seconds"])
        least, most = row["spread_of_ratio"]
        table.add_row(
            name,
            f"{1e3 * row['seconds']:.4g} ({low:.4g}..{high:.4g})",
            f"{row['ratio']:.3g} ({least:.3g}..{most:.3g})",
            f"{row['operations'] / 1e6:,.1f}",
            _ratio(row["bound_by_operations"]),
            f"{row['bytes'] / 1e6:,.2f}",
            _ratio(row["bound_by_bytes"]),
        )
    console.print(table)


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
