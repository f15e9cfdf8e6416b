"""The bytes that torch's CPU allocator has given out, from the profiler's record of every allocation and release.

It knows nothing of the code that is measured, and has the temporaries inside an operation too.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.profiler import ProfilerActivity, profile


def recorded() -> profile:
    """A context that records; mark the parts whose peaks are wanted with ``torch.profiler.record_function``."""
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def own_weights(module: nn.Module) -> None:
    """Give the weights memory of the allocator's: those that were read from a file are not."""
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def peaks(record: profile, *beginnings: str) -> Iterator[tuple[str, int]]:
    """The most bytes alive within each marked part whose name has one of the ``beginnings``."""
    events = record.profiler.kineto_results.events()
    marks = [event for event in events if event.name().startswith(beginnings)]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    for mark in marks:
        alive = most = 0
        for time, change in changes:
            if time > mark.end_ns():
                break
            alive += change
            if time >= mark.start_ns():
                most = max(most, alive)
        yield mark.name(), most
