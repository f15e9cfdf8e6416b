"""Real processes: a module of the tests, or the command, by ``torchrun``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT = 240


def torchrun(ranks: int, *arguments: object, check: bool = True, **environment: str) -> subprocess.CompletedProcess:
    """``torchrun --nproc-per-node RANKS -m ARGUMENTS``, on a free port, a thread a rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    done = subprocess.run(
        [*command, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    if check and done.returncode:
        raise AssertionError(f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return done
