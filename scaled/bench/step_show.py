"""The figures of ``bench step`` as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from scaled.bench.step import PARTS

MIB, GIGA = 2**20, 1e9


def show(found: dict[str, Any], console: Console) -> None:
    """Print seconds beside the bound, and memory beside that of a step that trains nothing."""
    times = Table("method", *(f"{part}, s" for part in PARTS), "step / dense", "from", "to", "bound")
    sizes = Table("method", "products, 1e9", "needed", "peak, MiB", "/ dense", "over frozen, MiB")
    peaks, needed = found["peak_bytes"], found["operations_needed"]
    for name, parts in found["seconds_by_part"].items():
        times.add_row(
            name,
            *(f"{parts[part]:.3f}" for part in PARTS),
            *(f"{ratio:.3f}" for ratio in (found["ratio_to_dense"][name], *found["spread_of_ratio"][name])),
            f"{found['bound'][name]:.3f}" if name in found["bound"] else "",
        )
        sizes.add_row(
            name,
            f"{found['operations'][name] / GIGA:.1f}",
            f"{needed[name] / GIGA:.1f}" if needed[name] else "",
            f"{peaks[name] / MIB:.0f}",
            f"{peaks[name] / peaks['dense']:.2f}",
            f"{(peaks[name] - peaks['frozen']) / MIB:.0f}",
        )
    console.print(
        f"{found['model']}: {found['tokens']} tokens a step, {found['threads']} threads, medians of "
        f"{found['repeats']} taken in turn; weights {found['weight_bytes']['frozen'] / MIB:.0f} MiB"
    )
    console.print(times)
    console.print(sizes)
    console.print("frozen: forward, and backward to the outputs of the first matrices, of a model that trains nothing")
    for name in found["left_out"]:
        console.print(f"{name} is left out: its package is not installed; `make peers` installs it in .venv-peers")
