"""``python -m scaled.bench.gpu_sync MODEL``: sync-check in all its ways on a node with GPUs, with CUDA graphs on.

What a CPU cannot show: graphs that were captured before an update compute with the weights after it, bits are equal on
both kinds of device, and updates come by NCCL. The engine takes ``--tensor-parallel`` GPUs, and the trainer, where
updates are broadcast, the one after them; with no GPU left it stays on the CPU, and sends by gloo.

Exits 1 if any way was not exact. It was never run on a GPU by its authors, on a CPU with the tiny model alone.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import torch
from rich.console import Console

from scaled.errors import UserError
from scaled.policy_sync.server import EngineSettings
from scaled.sync_check import sync_check


def main() -> None:
    """Run all ways, and say which were not exact."""
    parser = argparse.ArgumentParser(description="sync-check in all its ways, on a node with GPUs")
    parser.add_argument("model", type=Path, help="a model's folder in Hugging Face format")
    parser.add_argument("--engine-python", type=Path, default=Path(sys.executable), help="a Python that has vLLM")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--log", type=Path, default=Path("gpu-sync.log"))
    given = parser.parse_args()
    console = Console(highlight=False)
    count = torch.cuda.device_count()
    console.print(f"{count} GPUs, vLLM with CUDA graphs" if count else "no GPU: this shows only that the script runs")
    wrong = []
    for dtype, transport in itertools.product(("bfloat16", "float32"), ("folder", "broadcast")):
        console.print(f"\nan engine in {dtype}, updates by {transport}")
        settings = EngineSettings(
            given.engine_python, given.model, given.log, dtype, given.tensor_parallel, max_model_len=64
        )
        try:
            well = sync_check(settings, console, rank=given.rank, updates=given.updates, transport=transport)
        except UserError as error:  # the other ways are still worth a look
            console.print(f"error: {error}", markup=False)
            well = False
        if not well:
            wrong.append(f"{dtype} by {transport}")
    console.print(f"\nnot exact: {', '.join(wrong)}" if wrong else "\nall exact")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
