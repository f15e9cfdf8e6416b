"""What a run shows while it works: a bar for the phase at hand and a lasting line for each update, on stdout."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from scaled.interrupt import Interrupted, close_stdout


class _RunConsole(Console):
    ask_to_stop: Callable[[], None] | None = None

    def on_broken_pipe(self) -> None:
        """`logra train … | head`: stop as for Ctrl-C, with everything saved."""
        close_stdout()
        if self.ask_to_stop is None:
            raise Interrupted
        self.ask_to_stop()


class RunProgress:
    """Bars in a terminal; in a pipe or a CI log the lasting lines alone, plain, each one line long and flushed.

    When nobody reads on, ``ask_to_stop`` is called; without it the process stops here, by ``Interrupted``.
    """

    def __init__(
        self,
        total_updates: int,
        start: int,
        *,
        shown: bool = True,
        ask_to_stop: Callable[[], None] | None = None,
    ) -> None:
        self.total = total_updates
        self.console = _RunConsole(highlight=False, markup=False, emoji=False, quiet=not shown)
        self.console.ask_to_stop = ask_to_stop
        self._terminal = self.console.is_terminal and not self.console.is_dumb_terminal
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=self.console,
            transient=True,
            refresh_per_second=4,
            disable=not self._terminal,
        )
        self._updates = self._bars.add_task("updates", total=total_updates, completed=start)
        self._phase = self._bars.add_task("", total=None, visible=False)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()

    def phase(self, name: str, total: int) -> None:
        """A phase of an update begins; ``advance`` counts its parts."""
        self._bars.reset(self._phase, total=total, description=name, visible=True)

    def advance(self, count: int) -> None:
        self._bars.advance(self._phase, count)

    def finish_update(self, row: dict[str, Any]) -> None:
        """The line of an update, or of a skipped batch, from its row of ``metrics.jsonl``."""
        self._bars.update(self._phase, visible=False)
        head = f"update {row['update']}/{self.total}"
        if row["skipped"]:
            self._say(f"{head} skipped", row["skipped"])
            return
        self._bars.update(self._updates, completed=row["update"])
        self._say(
            head,
            _part("reward {:+.3f}", row["reward"]),
            _part("right {:.0%}", row["right"]),
            _part("well-formed {:.0%}", row["well_formed"]),
            _part("α {:.2f}", row["alpha"]),
            _part("KL predicted {:.1e}", row["predicted_kl"]),
            _part("realised {:.1e}", row["realised_kl"]),
            _part("budget {:.1e}", row["budget"]),
            _part("{:.1f} s", row["seconds"]),
        )

    def finish_evaluation(self, row: dict[str, Any]) -> None:
        """The line of an evaluation, from its row of ``metrics.jsonl``."""
        self._bars.update(self._phase, visible=False)
        head = f"held out after update {row['update']}/{self.total}"
        if row["interval"] is None:
            self._say(head, f"{row['eval']}: no response could be graded")
            return
        low, high = row["interval"]
        self._say(
            head,
            f"{row['eval']} {row['pass_at_1']:.1%} right",
            f"95% interval [{low:.1%}, {high:.1%}]",
            _part("well-formed {:.1%}", row["well_formed"]),
            _part("no answer {:.1%}", row.get("unparseable") or None),
            _part(f"any of {row['samples']} right {{:.1%}}", row["pass_at_k"]) if row.get("samples", 1) > 1 else "",
            _part("mean over tasks {:.1%}", row.get("macro_score")),
        )

    def note(self, text: str) -> None:
        self._say(text)

    def _say(self, *parts: str) -> None:
        """Print a lasting line; in a terminal too narrow for it, break it between its parts."""
        width = self.console.width if self._terminal else None
        lines = [""]
        for part in filter(None, parts):
            # What a model or a grader wrote may hold codes that would move the cursor.
            part = "".join(c if c.isprintable() else " " for c in part)
            longer = f"{lines[-1]}  {part}" if lines[-1] else part
            if width and lines[-1] and cell_len(longer) > width:
                lines.append(f"  {part}")
            else:
                lines[-1] = longer
        text = "\n".join(lines)
        if self.console.options.ascii_only:
            text = text.replace("α", "alpha").encode("ascii", "replace").decode()
        try:
            self.console.print(Text(text), soft_wrap=not self._terminal)
        except OSError:  # what stdout leads to is full
            self.console.on_broken_pipe()


def _part(pattern: str, value: float | None) -> str:
    return "" if value is None else pattern.format(value)
