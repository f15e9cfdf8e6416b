"""``python -m tests.ranks.kill_anytime [MOMENTS] [SEED]``: SIGKILL to all ranks of a run at random moments.

After each, the last checkpoint must be whole and the run must go on from it; the last state of all is compared, to the
bit, with that of a run that nothing happened to. Exit 1 if not. Twenty moments take about ten minutes.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from scaled.checkpoint import latest_checkpoint, verify
from scaled.config_file import dump_config
from tests.ranks.launch import ROOT, torchrun
from tests.tiny import byte_tokenizer, make_tiny_model
from tests.training import log, same, settings, weights

UPDATES = 40
MARK = "LOGRA_KILL_ANYTIME"


def marked(mark: str) -> list[int]:
    """The processes that inherited a mark: torchrun starts each rank in a session of its own."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended meanwhile, or is another user's
            continue
    return found


def kill_after(seconds: float, config: Path, resume: list[str]) -> bool:
    """Run on two ranks, and end everything after so many seconds; whether it was still at work then."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "scaled"]
    started = subprocess.Popen(
        [*command, "train", str(config), *resume],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", MARK: mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(seconds)
    working = started.poll() is None
    while pids := [pid for pid in marked(mark) if pid != os.getpid()]:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        started.poll()
        time.sleep(0.05)
    started.wait()
    return working


def main(moments: int, seed: int) -> None:
    """Kill, resume, kill, …, and compare."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model().save_pretrained(folder / "model")
        byte_tokenizer().save_pretrained(folder / "model")
        checkpoint = {"every": 1, "keep_last": 2}
        for run in ("whole", "killed"):
            config = settings(folder / "model", folder / run, threads=1, updates=UPDATES, checkpoint=checkpoint)
            (folder / f"{run}.yaml").write_text(dump_config(config))
        begun = time.monotonic()
        torchrun(2, "scaled", "train", folder / "whole.yaml")
        length = time.monotonic() - begun
        killed = 0
        while killed < moments:
            last = latest_checkpoint(folder / "killed")
            if last is not None:
                verify(last)
            if last is not None and last.name.endswith(f"{UPDATES:06d}"):  # it came to its end between two kills
                compare(folder)
                shutil.rmtree(folder / "killed")
                last = None
            target, resume = (folder / "killed", ["--resume"]) if last else (folder / "killed.yaml", [])
            if last is None and (folder / "killed").exists():
                shutil.rmtree(folder / "killed")  # nothing was saved yet: the user is told to remove it
            at = draw.uniform(0.2 * length, 0.8 * length)
            killed += kill_after(at, target, resume)
            last = latest_checkpoint(folder / "killed")
            saved = last.name if last else "nothing saved yet"
            print(f"{killed} of {moments}: killed after {at:.1f} s, {saved}", flush=True)
        if latest_checkpoint(folder / "killed") is None:
            sys.exit("the last run had saved nothing when it was killed; try another seed")
        torchrun(2, "scaled", "train", folder / "killed", "--resume")
        compare(folder)
        print("weights and log equal those of the undisturbed run")


def compare(folder: Path) -> None:
    """Exit 1 unless the run that was killed is, at its end, the one that was not."""
    if not same(weights(folder / "killed", UPDATES), weights(folder / "whole", UPDATES)):
        sys.exit("THE WEIGHTS DIFFER")
    if log(folder / "killed") != log(folder / "whole"):
        sys.exit("THE LOGS DIFFER")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
