"""``python guard.py COMMAND``: runs a command that leaves nothing behind, however it or its starter ends.

The command has a process group of its own. When it ends, what is left of the group is killed. When standard input
ends, which is a pipe from whoever started the guard, the command is asked to end, and then all of the group is killed:
so it is also if that one was killed. Signals to the guard go to the command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

ENDS = 8.0  # seconds that the command may take to end when asked to


def main() -> None:
    """Exit as the command does; by 128 + the signal's number if it was killed."""
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, frame: process.send_signal(received))
    threading.Thread(target=_end_with_input, args=[process], daemon=True).start()
    code = process.wait()
    _kill_group(process)
    os._exit(code if code >= 0 else 128 - code)  # the thread may be in a read that nothing interrupts


def _end_with_input(process: subprocess.Popen[bytes]) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    process.terminate()
    threading.Timer(ENDS, _kill_group, [process]).start()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
