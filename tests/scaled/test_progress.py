"""What is shown is read off a pipe or a pseudo-terminal of its own, whose screen is kept by a few lines below."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

ROW = {
    "update": 1,
    "skipped": None,
    "reward": 0.412,
    "right": 0.42,
    "well_formed": 0.98,
    "alpha": 1.834,
    "predicted_kl": 3.9e-2,
    "realised_kl": 3.7e-2,
    "budget": 4e-2,
    "seconds": 16.24,
}
SCRIPT = f"""
from scaled.progress import RunProgress
row = {ROW!r}
with RunProgress(14, 0) as progress:
    progress.phase("evaluate", 8)
    progress.finish_evaluation(
        {{"update": 0, "eval": "greedy", "pass_at_1": 0.293, "interval": [0.24, 0.35], "well_formed": 0.85}}
    )
    ungraded = {{"update": 0, "eval": "sampled", "pass_at_1": None, "interval": None, "well_formed": None}}
    progress.finish_evaluation(ungraded)
    for update in (1, 2):
        progress.phase("rollout", 64)
        progress.advance(40)
        progress._bars.refresh()
        progress.finish_update(row | {{"update": update}})
    progress.finish_update(row | {{"update": 3, "skipped": "every reward is [red]0[/red] :smile:"}})
    dense = dict.fromkeys(["alpha", "predicted_kl", "budget", "well_formed"])
    progress.finish_update(row | {{"update": 3}} | dense)
    progress.note("saving \\x1b[2J\\r\\x07 \u6570\u5b66 [/]")
"""
FIRST = (
    "update 1/14  reward +0.412  right 42%  well-formed 98%  α 1.83  KL predicted 3.9e-02  realised 3.7e-02"
    "  budget 4.0e-02  16.2 s"
)
LINES = [
    "held out after update 0/14  greedy 29.3% right  95% interval [24.0%, 35.0%]  well-formed 85.0%",
    "held out after update 0/14  sampled: no response could be graded",
    FIRST,
    FIRST.replace("1/14", "2/14"),
    "update 3/14 skipped  every reward is [red]0[/red] :smile:",
    "update 3/14  reward +0.412  right 42%  realised 3.7e-02  16.2 s",
    "saving  [2J   数学 [/]",
]


def environment(**changes: str) -> dict[str, str]:
    ours = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "TTY_COMPATIBLE")}
    return ours | {"PYTHONIOENCODING": "utf-8", "TERM": "xterm"} | changes


def piped(script: str = SCRIPT, **changes: str) -> bytes:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, env=environment(**changes))
    assert done.stderr == b""
    return done.stdout


def in_terminal(width: int) -> str:
    """Everything the script writes to a terminal of this width."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    command = [sys.executable, "-c", SCRIPT]
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment())
    os.close(follower)
    written = b""
    try:
        while block := os.read(leader, 4096):
            written += block
    except OSError:  # the end of a pseudo-terminal
        pass
    os.close(leader)
    assert process.wait() == 0
    return written.decode()


def screen(written: str, width: int) -> list[str]:
    """The lines that stand in the end on a terminal that knows what rich writes: move up, erase a line, wrap."""
    rows, row, column = [[]], 0, 0
    for code, up, char in re.findall(r"(\x1b\[\??[0-9;]*(?:[hlmK]|(A)))|(.)", written, re.DOTALL):
        if up:
            row -= int(code[2:-1] or 1)
            assert row >= 0
        elif code.endswith("K"):
            rows[row] = []
        elif char == "\r":
            column = 0
        elif char == "\n" or (char and column >= width):
            row, column = row + 1, 0
        if char and char not in "\r\n":
            assert char.isprintable()
            rows += [[] for _ in range(len(rows), row + 1)]
            rows[row] += " " * (column - len(rows[row]))
            rows[row][column : column + 1] = char
            column += 1
        rows += [[] for _ in range(len(rows), row + 1)]
    return ["".join(line).rstrip() for line in rows]


def test_a_pipe_gets_one_plain_line_an_update_however_long():
    written = piped()
    assert written.decode().splitlines() == LINES
    assert re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", written) is None


def test_a_log_that_takes_only_ascii_is_no_reason_to_end_a_run():
    lines = piped(PYTHONIOENCODING="ascii").decode("ascii").splitlines()
    assert lines[2] == FIRST.replace("α", "alpha")
    assert lines[-1] == "saving  [2J   ?? [/]"


def test_no_line_waits_in_a_buffer_that_a_kill_would_lose():
    assert piped(f"{SCRIPT}    import os; os._exit(0)\n").decode().splitlines() == LINES


@pytest.mark.parametrize("width", [200, 100, 60, 40, 20])
def test_a_terminal_of_any_width_is_left_with_the_lasting_lines_alone(width):
    written = in_terminal(width)
    left = [line for line in screen(written, width) if line]
    assert "rollout" in written
    assert re.search("40/64|…", written)
    assert all(len(line) <= width for line in left)
    assert " ".join(" ".join(left).split()) == " ".join(" ".join(LINES).split())
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h")  # the cursor is there again


def test_a_narrow_terminal_breaks_a_line_between_its_parts():
    left = [line for line in screen(in_terminal(40), 40) if line]
    start = left.index("update 1/14  reward +0.412  right 42%")
    assert left[start : start + 4] == [
        "update 1/14  reward +0.412  right 42%",
        "  well-formed 98%  α 1.83",
        "  KL predicted 3.9e-02  realised 3.7e-02",
        "  budget 4.0e-02  16.2 s",
    ]
