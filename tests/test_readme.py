"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_optimizer_loop_of_the_readme_runs_and_learns():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (loop,) = [block for block in blocks if "attach_sketches" in block]
    code = [line for line in loop.splitlines() if line.strip()]
    assert len(code) <= 20, "the README promises a loop of 20 lines"
    done = subprocess.run([sys.executable, "-c", loop], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    first, last = (float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout))
    assert last < 0.2 * first
