"""``python guard.py SECONDS COMMAND``: runs a command that ends with whoever started it.

Standard input is a pipe from there. When it ends, as it does too if the starter was killed, the command is asked to
end, and after so many seconds all of the guard's process group is killed. Signals to the guard go to the command.
(``server.guarded`` starts guards, each in a group of its own, and kills what is left of it when its guard is gone.)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time


def main() -> None:
    """Exit as the command does; by 128 + the signal's number if it was killed."""
    ends, command = float(sys.argv[1]), sys.argv[2:]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, frame: process.send_signal(received))
    alone = threading.Event()
    threading.Thread(target=_end_with_input, args=[process, alone, ends], daemon=True).start()
    code = process.wait()
    if alone.is_set():
        os.killpg(0, signal.SIGKILL)
    os._exit(code if code >= 0 else 128 - code)  # the thread may be in a read that nothing interrupts


def _end_with_input(process: subprocess.Popen[bytes], alone: threading.Event, ends: float) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    alone.set()
    process.terminate()
    time.sleep(ends)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
