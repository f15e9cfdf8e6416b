"""Seconds and peak memory of an update by phase, LoGRA beside dense Adam and LoRA, each in processes of its own.

Peak memory is the high-water mark of the process's resident memory, reset at the start of each phase (Linux), so it
holds weights, code and whatever is alive, not only what the phase allocates.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scaled.config import RunConfig
from scaled.errors import NumericalTrouble, UserError
from scaled.progress import RunProgress
from scaled.run import open_run
from scaled.train import take_batch

METHODS = ("logra", "dense", "lora")
TORCHRUN = "torch/distributed/elastic/"
REASON_LINES = 12
SECONDS = ("seconds_rollout", "seconds_train", "seconds_probe", "seconds_update")


class PhaseMeter(RunProgress):
    """Takes the high-water mark of memory whenever a phase begins and ends."""

    def __init__(self) -> None:
        super().__init__(0, 0)
        self.peaks: dict[str, int] = {}
        self._current: str | None = None

    def phase(self, name: str, total: int) -> None:
        self._close()
        self._current = name

    def advance(self, count: int) -> None:
        pass

    def finish_update(self, row: dict[str, Any]) -> None:
        self._close()
        self._current = None

    def _close(self) -> None:
        status = Path("/proc/self/status").read_text()
        peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
        if self._current:
            self.peaks[self._current] = max(peak, self.peaks.get(self._current, 0))
        Path("/proc/self/clear_refs").write_text("5")


def measure(config: RunConfig, updates: int) -> dict[str, Any]:
    """Median seconds of each phase over ``updates`` updates after one to warm up, and the peak bytes of each phase."""
    with open_run(config, resume=False) as run:
        run.progress = meter = PhaseMeter()
        take_batch(run)
        meter.peaks.clear()
        rows = [take_batch(run) for _ in range(updates)]
        taken = [row for row in rows if not row["skipped"]]
        if not taken:
            raise UserError("every measured batch was skipped for want of a signal; measure more with --updates")
        seconds = {name: statistics.median(row[name] for row in taken) for name in SECONDS}
        everyone = run.ranks.gather(meter.peaks)
        peaks = {name: max(peaks[name] for peaks in everyone) for name in meter.peaks}
        return {"seconds": seconds, "peak_bytes": peaks, "training_state_bytes": run.method.state_bytes()}


def compare(config: RunConfig, updates: int, ranks: int = 1) -> dict[str, Any]:
    """Measure every method in turn, each in fresh processes, on the same batches; of peaks the largest of all ranks."""
    found = {}
    several = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    for method in METHODS:
        with tempfile.TemporaryDirectory() as folder:
            settings = config.model_copy(update={"method": method, "run": Path(folder) / "run"})
            job = [sys.executable, "-m", *several, "scaled.bench.phases", settings.model_dump_json(), str(updates)]
            done = subprocess.run(job, capture_output=True, text=True)
            if done.returncode:
                raise UserError(f"measuring {method} failed: {failure(done)}")
            found[method] = json.loads(done.stdout.splitlines()[-1])
    return found


def failure(done: subprocess.CompletedProcess[str]) -> str:
    """The end of what a child wrote before it failed: a message of several lines, or the innermost of a traceback.

    What torchrun adds about its ranks is left out, unless there is nothing else.
    """
    lines = done.stderr.strip().splitlines()
    if lines := list(takewhile(lambda line: TORCHRUN not in line, lines)) or lines:
        return "\n".join(lines[-REASON_LINES:])
    killed = "killed, perhaps for its memory" if done.returncode == -signal.SIGKILL else "it wrote no reason"
    return f"exit code {done.returncode}, {killed}"


def show(found: dict[str, Any], console: Console) -> None:
    """Print the comparison as tables, with the ratios to dense."""
    ratios = [f"{method} / dense" for method in METHODS if method != "dense"]
    seconds = {method: found[method]["seconds"] for method in METHODS}
    peaks = {method: {name: n / 2**20 for name, n in found[method]["peak_bytes"].items()} for method in METHODS}
    for title, table_of, digits in (
        ("seconds an update (median)", seconds, 2),
        ("peak resident memory of a process (MiB)", peaks, 0),
    ):
        table = Table("phase", *METHODS, *ratios, title=title)
        for name in table_of["dense"]:
            values = {method: table_of[method][name] for method in METHODS}
            beside = [f"{values[method] / values['dense']:.2f}" for method in METHODS if method != "dense"]
            table.add_row(name.removeprefix("seconds_"), *(f"{v:.{digits}f}" for v in values.values()), *beside)
        console.print(table)
    table = Table("method", "holds", "MiB", title="training state of a process, counted")
    for method in METHODS:
        for name, count in found[method]["training_state_bytes"].items():
            table.add_row(method, name, f"{count / 2**20:.1f}")
    console.print(table)


if __name__ == "__main__":
    try:
        figures = json.dumps(measure(RunConfig.model_validate_json(sys.argv[1]), int(sys.argv[2])))
        if os.environ.get("RANK", "0") == "0":
            print(figures)
    except (UserError, NumericalTrouble) as error:  # without a traceback, as the caller shows what is written here
        sys.exit(str(error))
