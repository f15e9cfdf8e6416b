"""The report of several runs: their curves over each other, what differs in their settings, and what they came to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from scaled.comparison_plots import comparison_plots, swatch
from scaled.config import RunConfig
from scaled.config_file import settings_of
from scaled.errors import UserError
from scaled.figures import number
from scaled.files import save_text
from scaled.logged import LoggedRun, read_run
from scaled.page import render
from scaled.plots import median_ratio

SAME_PROBLEMS = ("seed", "data.")  # which problems are held out follows from these
OF_METHOD = ("logra", "dense", "lora")  # sections that only runs of that method read
OF_ENGINES = ("engine", "launch", "policy_sync")
NOTHING = "–"


def write_comparison(folders: Sequence[Path], output: Path) -> Path:
    """Write one page about several runs, finished or not, by whatever methods, and return its path.

    Raises ``UserError`` for a folder that is no run's or is given twice.
    """
    resolved = [folder.resolve() for folder in folders]
    for i, folder in enumerate(resolved):
        if folder in resolved[:i]:
            raise UserError(f"{folders[i]} is given twice; name each run once")
    runs = dict(zip(names_of(resolved), map(read_run, folders), strict=True))
    differing = differences([run.config for run in runs.values()])
    kinds = list(dict.fromkeys(row["eval"] for run in runs.values() for row in run.evaluations))
    text = render(
        "comparison.html.jinja",
        title=f"{len(runs)} runs compared",
        legend=[(name, swatch(i)) for i, name in enumerate(runs)],
        kinds=kinds,
        finals=[_final(name, run, kinds) for name, run in runs.items()],
        other_problems=[key for key, _ in differing if key.startswith(SAME_PROBLEMS)],
        differing=differing,
        plots=comparison_plots(runs),
    )
    save_text(output, text)
    return output


def names_of(folders: Sequence[Path]) -> list[str]:
    """The last part of each of the different paths, or as many of the last parts as it takes to tell them apart."""
    parts = [folder.parts for folder in folders]
    depth = next(n for n in count(1) if len({part[-n:] for part in parts}) == len(parts))
    return ["/".join(part[-depth:]) for part in parts]


def differences(configs: Sequence[RunConfig]) -> list[tuple[str, list[str]]]:
    """The settings in which runs differ, and each run's value.

    A setting that a run does not read, such as LoRA's rank in a dense run, is no difference. One that only some of
    the runs read is listed if it is set off its default.
    """
    dumped = [dict(settings_of(config.model_dump(mode="json"))) for config in configs]
    least = RunConfig(run=Path("."), updates=1, model={"path": "."}, data={"file": "."})
    defaults = dict(settings_of(least.model_dump(mode="json")))
    rows = []
    for key, default in defaults.items():
        readers = [reads(config, key) for config in configs]
        values = [each[key] for each, read in zip(dumped, readers, strict=True) if read]
        equal = all(value == values[0] for value in values)
        if key != "run" and values and not (equal and (all(readers) or values[0] == default)):
            rows.append((key, [_shown(d[key]) if read else NOTHING for d, read in zip(dumped, readers, strict=True)]))
    return rows


def reads(config: RunConfig, key: str) -> bool:
    """Whether a run reads the setting."""
    section = key.partition(".")[0]
    if section in OF_ENGINES:
        return config.rollout.backend == "vllm"
    return section not in OF_METHOD or section == config.method


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"


def _final(name: str, run: LoggedRun, kinds: Sequence[str]) -> dict[str, Any]:
    """What a run came to: its last evaluation of each kind, and how it went there."""
    evaluations = [[row for row in run.evaluations if row["eval"] == kind] for kind in kinds]
    seconds = [number(row["seconds"]) for row in run.batches]
    peak = max((number(row["peak_bytes"]) for row in run.batches), default=None)
    ratio = median_ratio(run.updates)
    done = max(map(_update, run.updates), default=0)
    return {
        "name": name,
        "method": run.config.method,
        "updates": f"{done} of {run.config.updates}",
        "skipped": len(run.batches) - len(run.updates),
        "unfinished": done < run.config.updates,
        "evaluations": [max(rows, key=_update, default=None) for rows in evaluations],
        "ratio": NOTHING if ratio is None else f"{ratio:.2f}",
        "seconds": f"{median(seconds):.2f}" if seconds else NOTHING,
        "peak": NOTHING if peak is None else f"{peak / 2**30:.2f}",
    }


def _update(row: dict[str, Any]) -> int:
    return row["update"]
