"""What a worker may do while it grades: bounded memory, no text turned into code, no files written, no programs run.

The graders' libraries were read and hand no answer to ``eval``, but sympy's ``sympify`` would evaluate any text that
reached it. Both doors here are belts beside that. Audit hooks are no sandbox against code that already runs.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path
from typing import Any

GIB = 2**30
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NUMBER = re.compile(r"\s*(Integer|Float)\s*\(\s*'?([0-9.eE+-]{1,4000})'?\s*\)\s*")
FORBIDDEN = frozenset(
    [
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.kill",
        "os.killpg",
        "os.posix_spawn",
        "os.spawn",
        "os.startfile",
        "os.system",
        "subprocess.Popen",
        "pty.spawn",
        "os.chmod",
        "os.chown",
        "os.link",
        "os.mkdir",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.symlink",
        "os.truncate",
        "ctypes.dlopen",
        "shutil.copyfile",
        "shutil.move",
        "shutil.rmtree",
        "socket.bind",
        "socket.connect",
        "socket.getaddrinfo",
        "socket.sendto",
    ]
)


def limit_memory(gib: float) -> None:
    """Let the process map no more than ``gib`` beyond what it has mapped now.

    RLIMIT_AS and not a watch of the resident memory: a single huge number is refused before it is filled, and Python
    raises MemoryError, which costs no worker. It is counted from now, as the imports have mapped what they need. Does
    nothing but on Linux.
    """
    if sys.platform != "linux":  # which alone tells what is mapped
        return
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = mapped + int(gib * GIB)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def refuse_code() -> None:
    """Make sympy read numbers from text and nothing else.

    ``sympy.Number("12")`` goes through ``sympify``, which writes ``Integer(12)`` and evaluates it: that much is read
    here without ``eval``; anything else is refused.
    """
    from sympy import Float, Integer
    from sympy.parsing import sympy_parser

    def read_number(code: Any, *_: Any) -> Any:
        match = NUMBER.fullmatch(code) if isinstance(code, str) else None
        if match is None:
            raise ValueError("a text would have been evaluated")
        return Integer(int(match[2])) if match[1] == "Integer" else Float(match[2])

    sympy_parser.eval_expr = read_number


def refuse_effects() -> None:
    """Raise PermissionError where the process would run a program, write a file or open a connection. For good."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and arguments[2] & WRITING  # of builtin open and os.open alike
        if event in FORBIDDEN or writes:
            raise PermissionError(f"a grader may not do {event}")

    sys.addaudithook(hook)
