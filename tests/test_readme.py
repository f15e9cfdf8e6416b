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


def test_the_probe_of_the_readme_sizes_a_step_by_its_kl():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (snippet,) = [block for block in blocks if "probe_jvp" in block]
    before = """
import torch
from logra_ref import LoGRA, attach_sketches
torch.manual_seed(0)
x, model = torch.randn(64, 8), torch.nn.Sequential()
model.add_module("up_proj", torch.nn.Linear(8, 5))
optimizer = LoGRA(attach_sketches(model, rank=4, targets=["up_proj"]), update_ratio=1e-2)
torch.nn.functional.cross_entropy(model(x), x[:, :5].argmax(1)).backward()
old = model(x).log_softmax(1)
"""
    after = "\nprint('KL', (old.exp() * (old - model(x).log_softmax(1))).sum(1).mean().item())"
    code = before + snippet + after
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    # A hundredth of the weights may be smaller than the budget allows; α is at most 3.
    assert 1e-5 < float(done.stdout.split()[-1]) < 1.1e-3


def test_parameters_instead_of_sketches_are_refused_with_the_remedy():
    code = "import logra_ref, torch; logra_ref.LoGRA(torch.nn.Linear(2, 2).parameters())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert "TypeError: LoGRA takes the sketches of a model, attach_sketches(model, rank)" in done.stderr
